"""Nested batches in Tianshou's layout; `as_batch` is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.batch.nested.functions import as_batch as as_batch

__getattr__, __dir__, __all__ = exports(__name__)

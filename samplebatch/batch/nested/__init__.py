"""Batch: named values in a tree, as Tianshou's users know it.

The door to it for flat batches, which hand over to this function, loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.batch.nested.functions import as_batch as as_batch

__getattr__, __dir__, __all__ = exports(__name__)

"""Learning on top of batches and buffers: policies, algorithms and trainers, in torch.

Every public name of the learning side, loaded when it is first used. Nothing below this package knows of it.
"""

from __future__ import annotations

from samplebatch.exports import exports

_HOMES: dict[str, str] = {}

__all__ = [*_HOMES]

__getattr__, __dir__ = exports(__name__, _HOMES)

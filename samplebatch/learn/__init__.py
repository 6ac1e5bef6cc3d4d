"""Learning on top of batches and buffers: policies, algorithms and trainers, in torch.

Every public name of the learning side; `public_names` lists them, and all are loaded when the first is used, as torch
comes with them. Nothing below this package knows of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports_of

if TYPE_CHECKING:
    from samplebatch.learn.public_names import *  # noqa: F403

__getattr__, __dir__ = exports_of(__name__, "samplebatch.learn.public_names")

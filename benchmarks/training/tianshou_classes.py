"""Tianshou over our classes: batches, buffers and conversions are exchanged in its modules for a while.

Nothing of Tianshou's is changed but the names under which its modules have its own `Batch`, its buffers, its segment
tree, `to_numpy`, `to_torch` and `to_torch_as`. Its algorithms, policies, networks, collectors and trainers run as they
are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

OURS, THEIRS = "samplebatch", "tianshou.data"

EXCHANGED = (
    "Batch",
    "CachedReplayBuffer",
    "HERReplayBuffer",
    "HERReplayBufferManager",
    "HERVectorReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferManager",
    "PrioritizedVectorReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferManager",
    "SegmentTree",
    "VectorReplayBuffer",
    "to_numpy",
    "to_torch",
    "to_torch_as",
)
"""Names in the data package of both libraries."""

_LEFT_ALONE = ("tianshou.data.batch", "tianshou.data.buffer", "tianshou.data.utils")
"""Modules that define the classes, which must go on among themselves."""


_DRAWS = ("sample_indices", "sample")


@contextmanager
def classes_of(library: str) -> Iterator[Any]:
    """Let Tianshou's modules use the classes of a library, `OURS` or `THEIRS`; give that library's data package."""
    theirs = import_module(THEIRS)
    for module in ("tianshou.trainer", "tianshou.env", "tianshou.utils.net.continuous", "tianshou.utils.net.discrete"):
        import_module(module)
    data = import_module(library)
    if data is theirs:
        yield data
        return
    replaced = {id(getattr(theirs, name)): getattr(data, name) for name in EXCHANGED}
    undo = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tianshou" and not name.startswith(_LEFT_ALONE) and module is not theirs:
            for attribute, value in list(vars(module).items()):
                if id(value) in replaced:
                    undo.append((module, attribute, value))
                    setattr(module, attribute, replaced[id(value)])
    try:
        yield data
    finally:
        for module, attribute, value in undo:
            setattr(module, attribute, value)


@contextmanager
def matched_draws(data: Any, seed: int = 0) -> Iterator[None]:
    """Make both libraries' buffers draw the same indices, from NumPy's legacy generator."""
    rng = np.random.RandomState(seed)
    base, prioritized = data.ReplayBuffer, (data.PrioritizedReplayBuffer, data.PrioritizedReplayBufferManager)
    classes = {base, *prioritized, data.ReplayBufferManager}
    originals = {cls: {name: vars(cls)[name] for name in _DRAWS if name in vars(cls)} for cls in classes}
    in_order = {cls: cls.sample_indices for cls in classes}

    def sample_indices(buffer: Any, batch_size: int | None) -> Any:
        cls_of_buffer = next(cls for cls in type(buffer).__mro__ if cls in in_order)
        if batch_size is None or batch_size <= 0:
            return in_order[cls_of_buffer](buffer, batch_size)
        if isinstance(buffer, prioritized):
            return buffer.weight.get_prefix_sum_idx(rng.rand(batch_size) * buffer.weight.reduce())
        return rng.choice(in_order[cls_of_buffer](buffer, 0), batch_size)

    def sample(buffer: Any, batch_size: int | None) -> Any:
        indices = buffer.sample_indices(batch_size)
        return buffer[indices], indices

    for cls in classes:
        cls.sample_indices, cls.sample = sample_indices, sample
    try:
        yield
    finally:
        for cls in classes:
            for name in _DRAWS:
                if name in originals[cls]:
                    setattr(cls, name, originals[cls][name])
                else:
                    delattr(cls, name)

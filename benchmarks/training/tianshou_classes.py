"""Tianshou with our classes: batches, buffers and conversions are temporarily replaced in Tianshou's modules.

Only names in Tianshou's modules are replaced: `Batch`, the buffers, the segment tree, `to_numpy`, `to_torch` and
`to_torch_as`. Tianshou's algorithms, policies, networks, collectors and trainers run unmodified.
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
"""Replaced names, which the data packages of both libraries contain."""

_LEFT_ALONE = ("tianshou.data.batch", "tianshou.data.buffer", "tianshou.data.utils")
"""Modules that define the classes; they must continue to use their own classes."""


_DRAWS = ("sample_indices", "sample")


@contextmanager
def classes_of(library: str) -> Iterator[Any]:
    """Make Tianshou's modules use the classes of `OURS` or `THEIRS`; yield the data package of that library."""
    tianshou_data = import_module(THEIRS)
    for module in ("tianshou.trainer", "tianshou.env", "tianshou.utils.net.continuous", "tianshou.utils.net.discrete"):
        import_module(module)
    data = import_module(library)
    if data is tianshou_data:
        yield data
        return
    replaced = {id(getattr(tianshou_data, name)): getattr(data, name) for name in EXCHANGED}
    undo = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tianshou" and not name.startswith(_LEFT_ALONE) and module is not tianshou_data:
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
    """Make the buffers of both libraries draw the same indices, from NumPy's legacy generator."""
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

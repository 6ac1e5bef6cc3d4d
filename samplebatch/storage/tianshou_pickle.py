"""Stand-ins for objects of Tianshou's classes: their pickles load as those, where Tianshou is installed.

Unpickling needs Tianshou, and nothing of this library.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

_BUFFERS = "tianshou.data.buffer"
PLAIN_BUFFER = (f"{_BUFFERS}.buffer_base", "ReplayBuffer")
PRIORITIZED_BUFFER = (f"{_BUFFERS}.prio", "PrioritizedReplayBuffer")
HINDSIGHT_BUFFER = (f"{_BUFFERS}.her", "HERReplayBuffer")
_BATCH = ("tianshou.data.batch", "Batch")
_TREE = ("tianshou.data.utils.segtree", "SegmentTree")


class _Module:
    """A module, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.name,)


class _Class:
    """A class, by its module and name."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (_Module(self.module), self.name)


class Standing:
    """A stand-in for an object of a class that need not be installed; its pickle loads as that object.

    Parameters
    ----------
    kind
        Module and name of the class.
    state
        What the object's `__setstate__` gets; its attributes, if it has none.

    Examples
    --------
    >>> import pickle
    >>> pickle.loads(pickle.dumps(Standing(("argparse", "Namespace"), {"a": 3})))
    Namespace(a=3)
    """

    def __init__(self, kind: tuple[str, str], state: dict[str, Any]) -> None:
        self.kind, self.state = kind, state

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (_Class(*self.kind),), self.state


def batch(values: dict[str, Any]) -> Standing:
    """Stand for a batch of Tianshou's."""
    return Standing(_BATCH, values)


def segment_tree(weights: npt.NDArray[np.float64]) -> Standing:
    """Stand for a segment tree of Tianshou's with these weights, shape (n,).

    >>> segment_tree(np.array([1.0, 2.0, 3.0])).state["_value"]
    array([0., 6., 3., 3., 1., 2., 3., 0.])
    """
    n = len(weights)
    bound = 1
    while bound < n:
        bound *= 2
    value = np.zeros(2 * bound)
    value[bound : bound + n] = weights
    level = bound // 2
    while level:
        value[level : 2 * level] = value[2 * level : 4 * level].reshape(level, 2).sum(1)
        level //= 2
    return Standing(_TREE, {"_size": n, "_bound": bound, "_value": value})

"""The bare node of a nested batch, and what its values are.

A node keeps its values in the instance's `__dict__` and nothing else. The functions that walk a tree of nodes never
look a
method up through an instance: a column may be called `keys` or `items`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RowIndexError, SampleBatchError

N = TypeVar("N", bound="Node")


class Node:
    """A tree node: names and what stands under them, in `__dict__`."""

    __slots__ = ("__dict__", "__weakref__")
    __dict__: dict[str, Any]


_new = object.__new__
adopt: Final[Callable[[Node, dict[str, Any]], None]] = Node.__dict__["__dict__"].__set__
"""Give a node a dict as its `__dict__`; the dict is kept, not copied."""


def node(cls: type[N], values: dict[str, Any]) -> N:
    """Make a node over a dict of values that need no conversion; the dict is kept."""
    made = _new(cls)
    adopt(made, values)
    return made


ARRAY: Final = 0
"""A NumPy array."""
NODE: Final = 1
"""A nested batch."""
TENSOR: Final = 2
"""A torch tensor."""
NUMBER: Final = 3
"""A number of Python's or NumPy's: one element, as a row of a column has."""
DISTRIBUTION: Final = 4
"""A torch distribution."""
FOREIGN: Final = 5
"""An array of another library (JAX), kept as it is."""
SEQUENCE: Final = 6
"""A list or tuple, which becomes a column."""
MAPPING: Final = 7
"""A dict, which becomes a nested batch."""
OBJECT: Final = 8
"""Anything else: None, strings, objects."""


class _Kinds(dict[type, int]):
    """Type of a value to its kind; a type is looked at once."""

    def __missing__(self, cls: type) -> int:
        kind = self[cls] = _kind_of(cls)
        return kind


def _kind_of(cls: type) -> int:
    if issubclass(cls, np.ndarray):
        return ARRAY
    if issubclass(cls, Node):
        return NODE
    if issubclass(cls, (bool, int, float, complex, np.generic)):
        return NUMBER
    if issubclass(cls, (list, tuple)):
        return SEQUENCE
    if issubclass(cls, Mapping):
        return MAPPING
    torch = sys.modules.get("torch")
    if torch is not None:
        if issubclass(cls, torch.Tensor):
            return TENSOR
        distributions = sys.modules.get("torch.distributions")
        if distributions is not None and issubclass(cls, distributions.Distribution):
            return DISTRIBUTION
    if cls.__module__.partition(".")[0] in ("jax", "jaxlib"):
        return FOREIGN
    return OBJECT


KINDS: Final = _Kinds()
"""Type of a value to its kind."""


def values_of(value: Any) -> Mapping[str, Any] | None:
    """Return the names and values of a nested batch or a dict; None for anything else."""
    kind = KINDS[type(value)]
    if kind == NODE:
        found: dict[str, Any] = value.__dict__
        return found
    return value if kind == MAPPING else None


def is_reserved(value: Any) -> bool:
    """Tell whether a value stands for a name without values yet: an empty nested batch."""
    names = values_of(value)
    return names is not None and not names


def fault(path: str, doing: str, error: Exception) -> NoReturn:
    """Raise the library's error for what NumPy or torch refused to do with one leaf, naming it."""
    if isinstance(error, SampleBatchError):
        raise error
    message = f"column {path!r} cannot be {doing}: {error}"
    if isinstance(error, IndexError):
        raise RowIndexError(message) from error
    if isinstance(error, (TypeError, RuntimeError, AttributeError)):
        raise ColumnTypeError(message) from error
    raise ColumnMismatchError(message) from error

"""Node: the bare node of a nested batch, the kinds of its values, its copies and text, and indices of its rows.

A node keeps its values in the instance's `__dict__` and nothing else. The functions that walk a tree of nodes never
look up a method through an instance: a column may be called `keys` or `items`.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn, TypeVar

import numpy as np

from samplebatch.batch.action_unit import ActionUnit
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RowIndexError, SampleBatchError
from samplebatch.names import for_terminal

N = TypeVar("N", bound="Node")


class Node:
    """Tree node of a nested batch: names and their values, in `__dict__`."""

    __slots__ = ("__dict__", "__weakref__", "_action_unit")
    __dict__: dict[str, Any]
    _action_unit: ActionUnit | None
    """The unit of actions; None if it is unknown. No name in `__dict__`, so that no column hides it.

    Reading a slot that was never set takes four times as long: whoever makes a tree sets it."""
    _stack_rows: ClassVar[Callable[[Sequence[Any], str], Node]]
    """Stacks dicts and nested batches under a dotted prefix; `Batch` has it, and parsing values needs it."""


_new = object.__new__
_ndarray = np.ndarray
_FIRST_OBJECT = np.dtype(object).num
adopt: Final[Callable[[Node, dict[str, Any]], None]] = Node.__dict__["__dict__"].__set__
"""Give a node a dict as its `__dict__`; the dict is kept, not copied."""


set_unit: Final[Callable[[Node, ActionUnit | None], None]] = Node.__dict__["_action_unit"].__set__
"""Set the unit of a tree's actions."""


def unit_of(source: Any) -> ActionUnit | None:
    """Return the unit of a tree's actions; None if it is unknown, or the value is no tree."""
    return getattr(source, "_action_unit", None) if isinstance(source, Node) else None


def with_unit_of(source: Node, made: N) -> N:
    """Give a tree that was made of another the unit of its actions, and return it."""
    set_unit(made, getattr(source, "_action_unit", None))
    return made


def node(cls: type[N], values: dict[str, Any]) -> N:
    """Make a node over a dict of values that need no conversion; the dict is kept."""
    made = _new(cls)
    set_unit(made, None)
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
RECORD: Final = 9
"""Named values of another kind, which become a nested batch: a named tuple, a dataclass, another library's batch."""

RAGGED: Final = 10
"""A ragged column: rows that vary in shape."""


class _Kinds(dict[type, int]):
    """Cache of `KINDS`: the type of a value to its kind, found once per type."""

    def __missing__(self, cls: type) -> int:
        kind = self[cls] = _kind_of(cls)
        return kind


def _kind_of(cls: type) -> int:
    if issubclass(cls, np.ndarray):
        return ARRAY
    if issubclass(cls, VaryingRows):
        return RAGGED
    if issubclass(cls, Node):
        return NODE
    if issubclass(cls, (bool, int, float, complex, np.generic)):
        return NUMBER
    if issubclass(cls, (list, tuple)):
        return RECORD if hasattr(cls, "_fields") else SEQUENCE
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
    return RECORD if _has_names(cls) else OBJECT


def _has_names(cls: type) -> bool:
    """Tell whether values of a class have names: those of a dataclass, or of a batch without Python's mapping."""
    if dataclasses.is_dataclass(cls) or hasattr(cls, "get_keys"):
        return True
    # Frames and series of pandas have keys and items as well, but are arrays.
    return all(callable(getattr(cls, name, None)) for name in ("keys", "items")) and not hasattr(cls, "__array__")


KINDS: Final = _Kinds()
"""Type of a value to its kind."""


def values_of(value: Any) -> Mapping[str, Any] | None:
    """Return the names and values of a nested batch, a dict or a record; None for anything else."""
    kind = KINDS[type(value)]
    if kind == NODE:
        found: dict[str, Any] = value.__dict__
        return found
    if kind == MAPPING:
        return value  # type: ignore[no-any-return]
    return _values_of_record(value) if kind == RECORD else None


def _values_of_record(value: Any) -> dict[str, Any]:
    """Return the names and values of a named tuple, a dataclass or another library's batch."""
    # Methods are looked up in the class: a column may be called `keys` or `items`.
    cls: Any = type(value)
    if issubclass(cls, tuple):
        return dict(zip(cls._fields, value, strict=True))
    if hasattr(cls, "get_keys"):
        return {name: value[name] for name in cls.get_keys(value)}
    if dataclasses.is_dataclass(cls):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}
    return dict(cls.items(value))


def is_reserved(value: Any) -> bool:
    """Tell whether a value stands for a name without values yet: an empty nested batch."""
    names = values_of(value)
    return names is not None and not names


def fault(path: str, doing: str, error: Exception) -> NoReturn:
    """Raise the library's error for a refusal of NumPy or torch, naming the leaf."""
    if isinstance(error, SampleBatchError):
        raise error
    message = f"column {path!r} cannot be {doing}: {error}"
    if isinstance(error, IndexError):
        raise RowIndexError(message) from error
    if isinstance(error, (TypeError, RuntimeError, AttributeError)):
        raise ColumnTypeError(message) from error
    raise ColumnMismatchError(message) from error


def copy_tree(source: Node, memo: dict[int, Any] | None = None) -> Node:
    """Copy a tree and everything under it: arrays, tensors and objects."""
    if memo is None:
        memo = {}
    kept: dict[str, Any] = {}
    for name, value in source.__dict__.items():
        if type(value) is _ndarray and value.dtype.num < _FIRST_OBJECT:
            kept[name] = value.copy()
            continue
        kind = KINDS[type(value)]
        if kind == NODE:
            kept[name] = copy_tree(value, memo)
        elif kind == TENSOR:
            kept[name] = value.clone()
        elif kind == RAGGED:
            kept[name] = value.copy()
        elif kind == NUMBER or value is None or type(value) is str:
            kept[name] = value
        else:
            kept[name] = copy.deepcopy(value, memo)
    return with_unit_of(source, node(type(source), kept))


def copy_nodes(source: Node) -> Node:
    """Copy the nodes of a tree, over the same leaves."""
    kept = {name: copy_nodes(value) if KINDS[type(value)] == NODE else value for name, value in source.__dict__.items()}
    return with_unit_of(source, node(type(source), kept))


def replace_leaves(target: Node, source: Node) -> None:
    """Move the leaves of a tree into the nodes of another of the same structure."""
    held = target.__dict__
    for name, value in source.__dict__.items():
        if KINDS[type(value)] == NODE:
            replace_leaves(held[name], value)
        else:
            held[name] = value


_PLAIN_DTYPES = frozenset((np.dtype("?"), np.dtype("i8"), np.dtype("f8"), np.dtype("c16")))
"""Dtypes of plain Python numbers, which are shown without a dtype."""


def format_tree(source: Node, head: str | None = None) -> str:
    """Return the text of a nested batch under a class name: one name a line, nested ones indented under theirs."""
    head = type(source).__name__ if head is None else head
    if not source.__dict__:
        return f"{head}()"
    lines = [f"{head}("]
    for name, value in source.__dict__.items():
        shown = for_terminal(name)
        margin = " " * (len(shown) + 6)
        lines.append(f"    {shown}: {_format_leaf(value)},".replace("\n", f"\n{margin}"))
    lines.append(")")
    return "\n".join(lines)


def _format_leaf(value: Any) -> str:
    kind = KINDS[type(value)]
    # One row out of a buffer is a view, and shown as the array that it is.
    if kind in (ARRAY, NUMBER) and np.ndim(value) == 0 and getattr(value, "base", None) is None:
        number = np.asarray(value)
        if number.dtype in _PLAIN_DTYPES:
            return repr(number.item())
    return repr(value)


_intp = np.dtype(np.intp)


class Selection:
    """NumPy index for the leaves of a tree: lists become arrays, masks row numbers.

    Attributes
    ----------
    index
        The index for arrays.
    rows
        The index as an array of row numbers, shape (k,), where it is one.
    masked
        The number of rows that every leaf must have for the mask to apply; -1 without a mask.
    scalar
        Whether it selects everything, so that scalars are kept too.
    """

    __slots__ = ("index", "masked", "rows", "scalar", "torch_index")

    def __init__(self, index: Any) -> None:
        self.masked = -1
        self.rows: Any = None
        self.torch_index: Any = None
        self.scalar = False
        kind = type(index)
        if kind is list:
            index = np.array(index) if index else np.empty(0, _intp)
        elif KINDS[kind] == TENSOR:
            index = index.detach().cpu().numpy()
        elif index is ... or kind is tuple:
            self.scalar = index is ... or not index
        if type(index) is _ndarray and index.ndim == 1:
            if index.dtype.kind == "b":
                self.masked = len(index)
                self.rows = index.nonzero()[0]
            elif index.dtype == _intp:
                self.rows = index
        self.index = index

    @property
    def of_rows(self) -> Any:
        """The index in the form that ragged columns take, along their rows alone."""
        if self.rows is not None:
            return self.rows
        index = self.index
        if isinstance(index, tuple):
            index = index[0] if index else ...
        return slice(None) if index is ... else index

    @property
    def picks_rows(self) -> bool:
        """Whether the index goes along the rows alone."""
        index = self.index
        if isinstance(index, tuple):
            return not index or (len(index) == 1 and index[0] is not None)
        return index is not None and (not isinstance(index, _ndarray) or index.ndim <= 1)

    def of_tensor(self, tensor: Any) -> Any:
        """Return the index in a form that torch takes: torch has no descending slices."""
        if self.torch_index is None:
            self.torch_index = self._for_torch()
        if self.torch_index is not _DESCENDING:
            return self.torch_index
        parts = list(self.index) if isinstance(self.index, tuple) else [self.index]
        if sum(map(_descends, parts)) > 1 or any(isinstance(part, (list, _ndarray)) for part in parts):
            raise IndexError("torch takes one descending slice, and no array beside it")
        place = next(i for i, part in enumerate(parts) if _descends(part))
        dimension = sum(part is not None for part in parts[:place])
        if any(part is ... for part in parts[:place]):
            dimension = tensor.ndim - sum(part is not None for part in parts[place:])
        parts[place] = list(range(*parts[place].indices(tensor.shape[dimension])))
        return tuple(parts)

    def _for_torch(self) -> Any:
        index = self.index
        if isinstance(index, _ndarray):
            import torch

            return torch.from_numpy(np.ascontiguousarray(index)) if index.dtype.kind in "bi" else index
        if _descends(index) or (isinstance(index, tuple) and any(map(_descends, index))):
            return _DESCENDING
        return index


_DESCENDING = object()
EVERYTHING: Final = Selection(...)


def _descends(part: Any) -> bool:
    return isinstance(part, slice) and part.step is not None and part.step < 0

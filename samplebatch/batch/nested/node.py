"""Tree nodes of nested batches: kinds of values, copies, text form and row indices.

A node stores its values in `__dict__`. Functions on trees call methods through the class and not the instance, because
a column may be named `keys` or `items`.
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
    """Tree node of a nested batch; `__dict__` contains the names and values."""

    __slots__ = ("__dict__", "__weakref__", "_action_unit")
    __dict__: dict[str, Any]
    _action_unit: ActionUnit | None
    """Unit of actions; None if unknown. The unit is stored in a slot, so that no column can hide the unit.

    Every constructor sets the slot, because reading an unset slot is four times slower than reading a set slot."""
    _stack_rows: ClassVar[Callable[[Sequence[Any], str], Node]]
    """Function that stacks dicts and nested batches under a dotted prefix; set by `Batch`, used by `parse`."""

    # Tianshou's functions recognize batches by `isinstance`.
    __class__: Any = property(lambda self: PEER_CLASSES.get(type(self), type(self)))


PEER_CLASSES: Final[dict[type, type]] = {}
"""Mapping from each batch class to Tianshou's class of the same name; empty until Tianshou is imported."""

_new = object.__new__
_ndarray = np.ndarray
_FIRST_OBJECT = np.dtype(object).num
adopt: Final[Callable[[Node, dict[str, Any]], None]] = Node.__dict__["__dict__"].__set__
"""Set a node's `__dict__` without copying the dict."""


set_unit: Final[Callable[[Node, ActionUnit | None], None]] = Node.__dict__["_action_unit"].__set__
"""Set the unit of a tree's actions."""


def unit_of(source: Any) -> ActionUnit | None:
    """Return the unit of a tree's actions; None if the unit is unknown or the value is not a tree."""
    return getattr(source, "_action_unit", None) if isinstance(source, Node) else None


def with_unit_of(source: Node, derived: N) -> N:
    """Copy the action unit of `source` to a derived tree and return the derived tree."""
    set_unit(derived, getattr(source, "_action_unit", None))
    return derived


def node(cls: type[N], values: dict[str, Any]) -> N:
    """Create a node from converted values; the dict is not copied."""
    instance = _new(cls)
    set_unit(instance, None)
    adopt(instance, values)
    return instance


ARRAY: Final = 0
"""A NumPy array."""
NODE: Final = 1
"""A nested batch."""
TENSOR: Final = 2
"""A torch tensor."""
NUMBER: Final = 3
"""A Python or NumPy number: one element of a column."""
DISTRIBUTION: Final = 4
"""A torch distribution."""
FOREIGN: Final = 5
"""An array of another library (JAX), stored unchanged."""
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
    """Mapping from type to kind, computed once per type."""

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
    """Return whether a class is a dataclass or another library's batch."""
    if dataclasses.is_dataclass(cls) or hasattr(cls, "get_keys"):
        return True
    # Frames and series of pandas have keys and items as well, but are arrays.
    return all(callable(getattr(cls, name, None)) for name in ("keys", "items")) and not hasattr(cls, "__array__")


KINDS: Final = _Kinds()
"""Mapping from the type of a value to its kind."""


def values_of(value: Any) -> Mapping[str, Any] | None:
    """Return the names and values of a nested batch, a dict or a record; None for other values."""
    kind = KINDS[type(value)]
    if kind == NODE:
        columns: dict[str, Any] = value.__dict__
        return columns
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
    """Return whether a value only reserves a name, as an empty nested batch or dict does."""
    names = values_of(value)
    return names is not None and not names


def fault(path: str, doing: str, error: Exception) -> NoReturn:
    """Translate a NumPy or torch error into a library error that contains the name of the leaf."""
    if isinstance(error, SampleBatchError):
        raise error
    message = f"column {path!r} cannot be {doing}: {error}"
    if isinstance(error, IndexError):
        raise RowIndexError(message) from error
    if isinstance(error, (TypeError, RuntimeError, AttributeError)):
        raise ColumnTypeError(message) from error
    raise ColumnMismatchError(message) from error


def copy_tree(source: Node, memo: dict[int, Any] | None = None) -> Node:
    """Deep-copy a tree, including its arrays, tensors and objects."""
    if memo is None:
        memo = {}
    copies: dict[str, Any] = {}
    for name, value in source.__dict__.items():
        if type(value) is _ndarray and value.dtype.num < _FIRST_OBJECT:
            copies[name] = value.copy()
            continue
        kind = KINDS[type(value)]
        if kind == NODE:
            copies[name] = copy_tree(value, memo)
        elif kind == TENSOR:
            copies[name] = value.clone()
        elif kind == RAGGED:
            copies[name] = value.copy()
        elif kind == NUMBER or value is None or type(value) is str:
            copies[name] = value
        else:
            copies[name] = copy.deepcopy(value, memo)
    return with_unit_of(source, node(type(source), copies))


def copy_nodes(source: Node) -> Node:
    """Copy the nodes of a tree; leaves are shared."""
    columns = {
        name: copy_nodes(value) if KINDS[type(value)] == NODE else value for name, value in source.__dict__.items()
    }
    return with_unit_of(source, node(type(source), columns))


def replace_leaves(target: Node, source: Node) -> None:
    """Move the leaves of a tree into the nodes of another tree with the same structure."""
    columns = target.__dict__
    for name, value in source.__dict__.items():
        if KINDS[type(value)] == NODE:
            replace_leaves(columns[name], value)
        else:
            columns[name] = value


_PLAIN_DTYPES = frozenset((np.dtype("?"), np.dtype("i8"), np.dtype("f8"), np.dtype("c16")))
"""Dtypes of Python numbers, formatted without a dtype."""


def format_tree(source: Node, head: str | None = None) -> str:
    """Format a nested batch under a class name: one line per name, nested batches indented."""
    head = type(source).__name__ if head is None else head
    if not source.__dict__:
        return f"{head}()"
    lines = [f"{head}("]
    for name, value in source.__dict__.items():
        escaped = for_terminal(name)
        margin = " " * (len(escaped) + 6)
        lines.append(f"    {escaped}: {_format_leaf(value)},".replace("\n", f"\n{margin}"))
    lines.append(")")
    return "\n".join(lines)


def _format_leaf(value: Any) -> str:
    kind = KINDS[type(value)]
    # An element of a buffer's row is a 0-d view of an array, and is formatted as an array.
    if kind in (ARRAY, NUMBER) and np.ndim(value) == 0 and getattr(value, "base", None) is None:
        number = np.asarray(value)
        if number.dtype in _PLAIN_DTYPES:
            return repr(number.item())
    return repr(value)


_intp = np.dtype(np.intp)


class Selection:
    """NumPy index for all leaves of a tree; lists become arrays, masks become row numbers.

    rows: row numbers, shape (k,), if the index is an array or mask of rows; otherwise None.
    masked: length of the mask, which every leaf must match; -1 without a mask.
    scalar: whether the index selects all elements and is valid for scalars.
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
        """Index along the rows, for ragged columns; indices of other dimensions are omitted."""
        if self.rows is not None:
            return self.rows
        index = self.index
        if isinstance(index, tuple):
            index = index[0] if index else ...
        return slice(None) if index is ... else index

    @property
    def picks_rows(self) -> bool:
        """Whether the index applies to rows and to no other dimension."""
        index = self.index
        if isinstance(index, tuple):
            return not index or (len(index) == 1 and index[0] is not None)
        return index is not None and (not isinstance(index, _ndarray) or index.ndim <= 1)

    def of_tensor(self, tensor: Any) -> Any:
        """Return an equivalent index without negative steps, which torch does not support."""
        if self.torch_index is None:
            self.torch_index = self._for_torch()
        if self.torch_index is not _DESCENDING:
            return self.torch_index
        parts = list(self.index) if isinstance(self.index, tuple) else [self.index]
        if sum(map(_descends, parts)) > 1 or any(isinstance(part, (list, _ndarray)) for part in parts):
            raise IndexError("torch supports one descending slice, without arrays in the same index")
        position = next(i for i, part in enumerate(parts) if _descends(part))
        dimension = sum(part is not None for part in parts[:position])
        if any(part is ... for part in parts[:position]):
            dimension = tensor.ndim - sum(part is not None for part in parts[position:])
        parts[position] = list(range(*parts[position].indices(tensor.shape[dimension])))
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

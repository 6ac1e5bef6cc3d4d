"""Batch: a tree of named arrays, tensors and objects with leafwise arithmetic."""

from __future__ import annotations

import copyreg
import operator
import os
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Never, Self, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import suggest_names, whole
from samplebatch.batch import summary
from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.batch.delivery import ArrayTarget, Delivery, TorchTarget, tree_to, tree_to_numpy
from samplebatch.batch.nested import conversions, interchange
from samplebatch.batch.nested.node import (
    KINDS,
    MAPPING,
    NODE,
    NUMBER,
    PEER_CLASSES,
    RAGGED,
    RECORD,
    TENSOR,
    Node,
    adopt,
    copy_nodes,
    copy_tree,
    fault,
    format_tree,
    is_reserved,
    node,
    replace_leaves,
    set_unit,
    unit_of,
    values_of,
    with_unit_of,
)
from samplebatch.batch.nested.rows import (
    Missing,
    assign,
    concatenate_nodes,
    iterate,
    list_batches,
    list_one_or_more,
    select,
    shape_of,
    shortest,
    split_rows,
    stack_nodes,
    zero,
)
from samplebatch.batch.nested.values import (
    any_null,
    join_name,
    nulls,
    parse,
    parse_items,
    stack_rows,
    transform_leaves,
    trees_equal,
)
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ArgumentError, ColumnMismatchError, ColumnTypeError, near_names, no_such_column
from samplebatch.names import Convention

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch
    from matplotlib.figure import Figure

    from samplebatch.batch.delivery import Device, Floats


B = TypeVar("B", bound=Node)

_REDUCTIONS: Final = frozenset(
    getattr(np, name)
    for name in (
        "all", "any", "max", "mean", "median", "min", "nanmax", "nanmean", "nanmedian", "nanmin", "nanstd", "nansum",
        "nanvar", "prod", "std", "sum", "var",
    )
)  # fmt: skip
_TORCH_NAMES: Final = {"max": "amax", "min": "amin"}
_NAMED_REDUCTIONS: Final[dict[np.ufunc, Callable[..., Any]]] = {
    np.add: np.sum,
    np.multiply: np.prod,
    np.maximum: np.max,
    np.minimum: np.min,
    np.logical_or: np.any,
    np.logical_and: np.all,
}
_OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.true_divide: operator.truediv,
    np.floor_divide: operator.floordiv,
    np.remainder: operator.mod,
    np.power: operator.pow,
    np.negative: operator.neg,
    np.absolute: abs,
}


def _children(nodes: Sequence[Node], name: str, path: str) -> list[Any]:
    """Return the value of one name in each batch.

    Raises ColumnMismatchError if only some values are nested batches, unless the first batch only reserves the name.
    """
    children = [each.__dict__[name] for each in nodes]
    nested = [KINDS[type(child)] == NODE for child in children]
    if any(nested) and not all(nested) and not is_reserved(children[0]):
        raise ColumnMismatchError(f"column {path!r} must be a nested batch in every batch or in none, got both")
    return children


def _check_names(nodes: Sequence[Node], prefix: str) -> None:
    names = nodes[0].__dict__.keys()
    for other in nodes[1:]:
        if other.__dict__.keys() != names:
            lacking = sorted(prefix + name for name in names ^ other.__dict__.keys())
            raise ColumnMismatchError(
                f"batches must have the same names, only one batch has {', '.join(map(repr, lacking))}"
            )


def map_leaves(function: Callable[..., Any], args: Sequence[Any], prefix: str = "") -> Node:
    """Apply a function to corresponding leaves of all batches among the arguments.

    Other arguments are passed unchanged. Reserved names stay reserved. Raises ColumnMismatchError if the batches do not
    have the same names; the message lists the names that exist in only one batch. Raises ColumnTypeError if the
    function rejects a leaf.
    """
    positions = [position for position, arg in enumerate(args) if KINDS[type(arg)] == NODE]
    nodes = [args[position] for position in positions]
    _check_names(nodes, prefix)
    first: Node = nodes[0]
    results: dict[str, Any] = {}
    name = ""
    try:
        for name in first.__dict__:
            path = prefix + name
            leaves = list(args)
            for position, child in zip(positions, _children(nodes, name, path), strict=True):
                leaves[position] = child
            model = leaves[positions[0]]
            if KINDS[type(model)] != NODE:
                results[name] = function(*leaves)
            elif model.__dict__:
                results[name] = map_leaves(function, leaves, path + ".")
            else:
                results[name] = node(type(model), {})
    except Exception as error:
        fault(prefix + name, "computed with", error)
    return node(type(first), results)


def update_leaves(function: Callable[[Any, Any], Any], target: Node, other: Any, prefix: str = "") -> None:
    """Apply an in-place operator to every leaf of a batch; the other operand is a number or a batch with equal names.

    Raises ColumnMismatchError if the batches do not have the same names. Raises ColumnTypeError if a leaf cannot store
    the result. If a leaf is rejected, the preceding leaves remain updated.
    """
    matched = KINDS[type(other)] == NODE
    nodes = [target, other] if matched else [target]
    _check_names(nodes, prefix)
    columns = target.__dict__
    name = ""
    try:
        for name, value in columns.items():
            path = prefix + name
            operand = _children(nodes, name, path)[1] if matched else other
            if KINDS[type(value)] != NODE:
                columns[name] = function(value, operand)
            elif value.__dict__:
                update_leaves(function, value, operand, path + ".")
    except Exception as error:
        fault(prefix + name, "computed with in place", error)


def _on_elements(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of arrays so that the function also accepts ragged columns with equal row shapes."""

    def compute(*leaves: Any) -> Any:
        ragged = [leaf for leaf in leaves if KINDS[type(leaf)] == RAGGED]
        if not ragged:
            return function(*leaves)
        first = ragged[0]
        for leaf in leaves:
            if KINDS[type(leaf)] not in (RAGGED, NUMBER):
                raise TypeError(
                    "the other operand of a ragged column must be a number or a ragged column, got a "
                    f"{type(leaf).__name__}"
                )
        for other in ragged[1:]:
            if not np.array_equal(first.extents, other.extents):
                shapes = _differing_rows(first.extents, other.extents)
                raise ValueError(f"ragged columns must have rows of the same shapes, got {shapes}")
        elements = function(*[leaf.flat if KINDS[type(leaf)] == RAGGED else leaf for leaf in leaves])
        return type(first)(elements, *first.layout)

    return compute


def _differing_rows(first: npt.NDArray[Any], other: npt.NDArray[Any]) -> str:
    if first.shape != other.shape:
        return " and ".join(f"{n} rows of {ndim} dimensions" for n, ndim in (first.shape, other.shape))
    row = int((first != other).any(1).argmax())
    return f"{tuple(first[row].tolist())} and {tuple(other[row].tolist())} in row {row}"


def _operand(value: Any, rule: str = "the other operand of a Batch must be a number or a Batch") -> Any:
    """Require an operand to be a batch or a number; the error message starts with `rule`."""
    if KINDS[type(value)] in (NODE, NUMBER):
        return value
    if type(value) is np.ndarray and value.ndim == 0:
        return value[()]
    raise ColumnTypeError(f"{rule}, got {type(value).__name__}")


def operators(
    function: Callable[[Any, Any], Any], in_place: Callable[[Any, Any], Any]
) -> tuple[Callable[[B, Any], B], Callable[[B, Any], B], Callable[[B, Any], B]]:
    """Return the forward, reflected and in-place methods of a binary operator."""

    def forward(batch: B, other: Any) -> B:
        return cast("B", map_leaves(_on_elements(function), (batch, _operand(other))))

    def reflected(batch: B, other: Any) -> B:
        return cast("B", map_leaves(_on_elements(function), (_operand(other), batch)))

    def update(batch: B, other: Any) -> B:
        update_leaves(_on_elements(in_place), batch, _operand(other))
        return batch

    return forward, reflected, update


def apply(function: Callable[[Any], Any], source: Node) -> Node:
    """Apply an elementwise function to every leaf."""
    return map_leaves(_on_elements(function), (source,))


def apply_ufunc(source: Node, ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a NumPy ufunc to every leaf; implements `__array_ufunc__`."""
    if "out" in kwargs or ufunc.nout != 1:
        return NotImplemented
    if method == "reduce" and ufunc in _NAMED_REDUCTIONS:
        return reduce_leaves(_NAMED_REDUCTIONS[ufunc], source, {"axis": 0, **kwargs})
    if method != "__call__":
        return NotImplemented
    operands = [
        _operand(value, f"np.{ufunc.__name__} accepts only numbers and Batches next to a Batch") for value in inputs
    ]

    def leafwise(*leaves: Any) -> Any:
        if TENSOR in [KINDS[type(leaf)] for leaf in leaves]:
            return _tensor_ufunc(ufunc, leaves)
        return ufunc(*leaves, **kwargs)

    return map_leaves(_on_elements(leafwise), operands)


def apply_function(source: Node, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a NumPy function to every leaf; implements `__array_function__`."""
    if function is np.shape:
        return tuple(shape_of(source))
    if function is np.concatenate and kwargs.get("axis", 0) == 0 and len(args) == 1:
        return concatenate_nodes(type(source), args[0])
    if function is np.stack and len(args) == 1 and kwargs.keys() <= {"axis"}:
        return stack_nodes(type(source), args[0], axis=kwargs.get("axis", 0))
    if function in _REDUCTIONS and args[0] is source and not any(KINDS[type(arg)] == NODE for arg in args[1:]):
        return reduce_leaves(function, source, {**dict(zip(("axis",), args[1:2], strict=False)), **kwargs})
    if not any(KINDS[type(arg)] == NODE for arg in args) or any(KINDS[type(arg)] == NODE for arg in kwargs.values()):
        return NotImplemented
    results = map_leaves(lambda *leaves: _call_on_arrays(function, leaves, kwargs), args)
    if function in (np.array_equal, np.allclose):
        return all(_leaves(results))
    return results


def _leaves(source: Node) -> list[Any]:
    leaves: list[Any] = []
    for value in source.__dict__.values():
        if KINDS[type(value)] == NODE:
            leaves += _leaves(value)
        else:
            leaves.append(value)
    return leaves


def _call_on_arrays(function: Callable[..., Any], leaves: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if RAGGED in [KINDS[type(leaf)] for leaf in leaves]:
        raise TypeError(f"np.{function.__name__} does not support ragged columns; pad them first")
    if TENSOR in [KINDS[type(leaf)] for leaf in leaves]:
        raise TypeError(f"np.{function.__name__} does not support tensors; convert the batch with to_numpy first")
    return function(*leaves, **kwargs)


def _tensor_ufunc(ufunc: np.ufunc, leaves: Sequence[Any]) -> Any:
    import torch

    if ufunc in _OPERATORS:
        # A NumPy number on the left would turn the tensor on the right into an array.
        return _OPERATORS[ufunc](*[leaf.item() if isinstance(leaf, np.generic) else leaf for leaf in leaves])
    torch_function = getattr(torch, ufunc.__name__, None)
    if torch_function is None:
        raise TypeError(f"torch has no {ufunc.__name__}; convert the batch with to_numpy first")
    return torch_function(*map(torch.as_tensor, leaves))


def reduce_leaves(function: Callable[..., Any], source: Node, kwargs: Mapping[str, Any]) -> Node:
    """Apply a NumPy reduction to every leaf, by default over the dimensions common to all leaves.

    Raises ColumnTypeError if the function rejects a leaf.
    """
    axis = kwargs.get("axis")
    if axis is None:
        axis = tuple(range(min((np.ndim(leaf) for leaf in _leaves(source)), default=0)))
    kwargs = {**kwargs, "axis": axis}

    def leafwise(leaf: Any) -> Any:
        if KINDS[type(leaf)] == RAGGED:
            raise TypeError(f"{function.__name__} does not support ragged columns; pad them first")
        if KINDS[type(leaf)] == TENSOR:
            return _reduce_tensor(function.__name__, leaf, **kwargs)
        result = function(leaf, **kwargs)
        return np.asarray(result) if KINDS[type(result)] == NUMBER else result

    return map_leaves(leafwise, (source,))


def _reduce_tensor(name: str, tensor: Any, axis: Any, *, keepdims: bool = False, ddof: int = 0) -> Any:
    import torch

    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if not axes:
        tensor, axes = tensor[None], (0,)
    if name in ("mean", "std", "var") and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.get_default_dtype())
    if name in ("std", "var"):
        return getattr(torch, name)(tensor, dim=axes, correction=ddof, keepdim=keepdims)
    function = getattr(torch, _TORCH_NAMES.get(name, name), None)
    if function is None or name in ("prod", "median", "nanmedian"):
        raise TypeError(f"torch has no {name} over several dimensions; convert the batch with to_numpy first")
    return function(tensor, dim=axes, keepdim=keepdims)


_ndarray = np.ndarray
_FIRST_OBJECT = np.dtype(object).num


class _Shape:
    """Non-data descriptor of `Batch.shape`; a column named `shape` overrides the descriptor."""

    def __get__(self, batch: Any, owner: type) -> list[int]:
        return shape_of(batch) if batch is not None else []


class _Unit:
    """Non-data descriptor of `Batch.action_unit`; a column named `action_unit` overrides the descriptor."""

    def __get__(self, batch: Any, owner: type) -> ActionUnit | None:
        return unit_of(batch)


def _has_leaves(source: Node) -> bool:
    return any(KINDS[type(value)] != NODE or _has_leaves(value) for value in source.__dict__.values())


class _OtherName:
    """Attribute that only other libraries' batches have.

    Access raises AttributeError unless a column has the attribute's name.
    """

    # The descriptor has no `__set__`, so values in the `__dict__` of a batch take precedence.
    def __init__(self, name: str, way_out: str = "") -> None:
        self.name, self.way_out = name, way_out

    def __get__(self, batch: Any, owner: type) -> Any:
        way_out = self.way_out or near_names(self.name, () if batch is None else batch.__dict__)
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}: {way_out}")


_JOIN = "Batch.cat([batch, other]) joins two batches"
_TENSORS = "to_torch() has tensors, to_numpy() arrays"
_OTHER_NAMES: Final = {
    **dict.fromkeys(("append", "extend", "concat", "concatenate"), _JOIN),
    **dict.fromkeys(("tensor", "to_tensor", "numpy"), _TENSORS),
    "sample": "batch[rng.integers(len(batch), size=64)] has random rows, split(64) all of them in random order",
    "shuffle": "batch[rng.permutation(len(batch))] has the rows in random order",
    **dict.fromkeys(
        (
            "observation", "observations", "state_next", "next_obs", "new_obs", "next_observations", "action",
            "actions", "reward", "rewards", "dones", "terminateds", "truncateds", "infos",
        ),
        "",
    ),
}  # fmt: skip
"""Replacements for attributes of other libraries' batches, by attribute name; empty for names of columns."""


class Batch(Node):
    """Tree of named values: arrays, tensors, distributions, objects and nested batches.

    Every value is an attribute and an item: `b.obs` is `b["obs"]`. An integer, a slice, a mask or any other NumPy index
    selects rows of all values at once. An empty `Batch()` as a value reserves a name for a later value.

    Parameters
    ----------
    batch_dict
        Values by name: a dict, Batch, named tuple, dataclass, or another library's batch (with `keys` and `items`, or
        Tianshou's). A sequence or array of dicts, batches or records is stacked into one batch. Nested entries become
        batches, lists become arrays, and numbers become 0-d arrays. Arrays and tensors are stored without a copy.
    copy
        Whether to copy all values, including objects.
    **kwargs
        Additional values by name.

    Raises
    ------
    ColumnTypeError
        If a name is not a string, or no column can store a value.

    Examples
    --------
    >>> b = Batch(obs={"camera": np.zeros((2, 3)), "speed": [1.5, 2.5]}, act=[0, 1])
    >>> b.obs.speed
    array([1.5, 2.5])
    >>> b[0]
    Batch(
        obs: Batch(
                 camera: array([0., 0., 0.]),
                 speed: 1.5,
             ),
        act: 0,
    )
    >>> len(b), b.shape
    (2, [2])
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]
    _stack_rows = classmethod(stack_nodes)
    vars().update({name: _OtherName(name, way_out) for name, way_out in _OTHER_NAMES.items()})

    def __init__(
        self,
        /,
        batch_dict: Mapping[str, Any] | Batch | Iterable[Mapping[str, Any] | Batch] | npt.NDArray[Any] | None = None,
        copy: bool = False,
        **kwargs: Any,
    ) -> None:
        set_unit(self, None)
        if batch_dict is None:
            columns = kwargs
            for name, value in kwargs.items():
                if type(value) is not _ndarray or value.dtype.num >= _FIRST_OBJECT:
                    kwargs[name] = parse(value, Batch, name)
        else:
            kind = KINDS[type(batch_dict)]
            if kind in (MAPPING, RECORD):
                columns = parse_items(cast("Mapping[str, Any]", values_of(batch_dict)), Batch, "")
            else:
                source = batch_dict if kind == NODE else stack_rows(batch_dict, Batch)
                columns = dict(source.__dict__)
                with_unit_of(cast("Node", source), self)
            if kwargs:
                columns.update(parse_items(kwargs, Batch, ""))
        adopt(self, columns)
        if copy:
            adopt(self, copy_tree(self).__dict__)

    # Access by name

    if TYPE_CHECKING:
        # At run time, a value is a plain attribute in `__dict__`; a hook would double the cost of an access.
        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is not _ndarray or value.dtype.num >= _FIRST_OBJECT:
            value = parse(value, Batch, name)
        self.__dict__[name] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a name, inserting the default if the name is missing."""
        if key not in self.__dict__:
            self.__dict__[key] = parse(default, Batch, join_name(key, ""))
        return self.__dict__[key]

    def update(self, batch: Mapping[str, Any] | Batch | None = None, **kwargs: Any) -> None:
        """Set values by name, from a dict or Batch and from keywords.

        >>> b = Batch(a=4)
        >>> b.update({"b": [5, 5]}, c=1)
        >>> b
        Batch(
            a: 4,
            b: array([5, 5]),
            c: 1,
        )
        """
        items = {} if batch is None else values_of(batch)
        if items is None:
            raise ColumnTypeError(f"batch must be a Batch or a dict, got {type(batch).__name__}")
        values = parse_items(items, Batch, "")
        values.update(parse_items(kwargs, Batch, ""))
        self.__dict__.update(values)

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self.__dict__.keys()

    def get_keys(self) -> KeysView[str]:
        """Return the names, even if the batch has a column named `keys`."""
        return self.__dict__.keys()

    def values(self) -> ValuesView[Any]:
        """Return the values."""
        return self.__dict__.values()

    def items(self) -> ItemsView[str, Any]:
        """Return pairs of name and value."""
        return self.__dict__.items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a name, or the default if the name is missing."""
        return self.__dict__.get(key, default)

    def pop(self, key: str, default: Any = None) -> Any:
        """Remove a name and return its value, or the default if the name is missing."""
        return self.__dict__.pop(key, default)

    def popitem(self) -> tuple[str, Any]:
        """Remove and return the last pair of name and value."""
        return self.__dict__.popitem()

    def clear(self) -> None:
        """Remove all names."""
        self.__dict__.clear()

    def is_empty(self, recurse: bool = False) -> bool:
        """Return whether the batch has no names; with `recurse`, whether the tree has no leaves.

        >>> Batch(a=Batch()).is_empty(), Batch(a=Batch()).is_empty(recurse=True)
        (False, True)
        """
        return not _has_leaves(self) if recurse else not self.__dict__

    # Rows

    def __len__(self) -> int:
        return shortest(self.__dict__) or 0

    shape = _Shape()
    action_unit = _Unit()
    """Unit of the actions, inherited from the source buffer or flat batch; None if unknown."""

    def __iter__(self) -> Iterator[Self]:
        return cast("Iterator[Self]", iterate(self, shortest(self.__dict__) or 0))

    @overload
    def __getitem__(self, index: str) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is str:
            columns = self.__dict__
            if index in columns:
                return columns[index]
            raise no_such_column(index, columns)
        return self[str(index)] if isinstance(index, str) else select(self, index)

    def __getitems__(self, indices: Sequence[int]) -> Self:
        """Select several rows at once, for torch's `DataLoader`."""
        return cast("Self", select(self, list(indices)))

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, str):
            self.__dict__[str(index)] = parse(value, Batch, index)
            return
        items = values_of(value)
        if items is None:
            raise ColumnMismatchError(f"rows of a Batch are set from a Batch or dict, got {type(value).__name__}")
        assign(self, index, items if KINDS[type(value)] == NODE else parse_items(items, Batch, ""))

    def __delitem__(self, name: str) -> None:
        if name not in self.__dict__:
            raise no_such_column(name, self.__dict__)
        del self.__dict__[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        return trees_equal(self, other)

    def __repr__(self) -> str:
        return format_tree(self)

    def empty_(self, index: Any = None) -> Self:
        """Reset all rows or the indexed rows in place: numbers become zero, objects become None.

        >>> Batch(a=[1, 2], b=["x", "y"]).empty_(1)
        Batch(
            a: array([1, 0]),
            b: array(['x', None], dtype=object),
        )
        """
        zero(self, ... if index is None else index)
        return self

    @staticmethod
    def empty(batch: Batch, index: Any = None) -> Batch:
        """Return a copy in which `empty_` has reset all or the indexed rows."""
        return Batch.empty_(cast("Batch", copy_tree(batch)), index)

    # Joining and splitting

    @staticmethod
    def stack(batches: Iterable[Mapping[str, Any] | Batch], axis: int = 0, *, missing: Missing = "zero") -> Batch:
        """Stack n batches along a new axis: leaves of shape (...) become (n, ...) for axis 0.

        Raises ColumnMismatchError if a name is a nested batch in only some batches, or if `missing="error"` and a batch
        lacks a name. Raises ColumnTypeError if a name has both tensors and arrays, or tensors of different shapes.

        Parameters
        ----------
        batches
            Batches or dicts.
        axis
            Position of the new axis. Batches that lack a name can be padded only if `axis` is 0.
        missing
            Padding for a name that a batch lacks or only reserves: `"zero"` pads with zeros, False or None; `"nan"`
            pads with NaN, NaT or None (other dtypes raise); `"error"` raises.

        Warns
        -----
        UserWarning
            If arrays differ in shape; such arrays are stored in an array of dtype object.

        Examples
        --------
        >>> Batch.stack([Batch(a=[0.0, 2.0]), Batch(a=[1.0, 3.0], b="done")])
        Batch(
            a: array([[0., 2.],
                      [1., 3.]]),
            b: array([None, 'done'], dtype=object),
        )
        """
        rows = list_batches(batches)
        return _with_common_unit(cast("Batch", stack_nodes(Batch, rows, axis=axis, missing=missing)), rows)

    def stack_(self, batches: Iterable[Mapping[str, Any] | Batch], axis: int = 0) -> None:
        """Stack this batch with others in place; an empty batch is skipped."""
        others = list_batches(batches)
        rows = [self, *others] if self.__dict__ else others
        adopt(_with_common_unit(self, rows), stack_nodes(Batch, rows, axis=axis).__dict__)

    @staticmethod
    def cat(batches: Iterable[Mapping[str, Any] | Batch], *others: Never, missing: Missing = "zero") -> Batch:
        """Concatenate batches along the first axis: leaves of shape (n_i, ...) become (sum of n_i, ...).

        Raises ColumnMismatchError if row shapes differ, a value has no rows, a name is a nested batch in only some
        batches, or if `missing="error"` and a batch lacks a name. Raises ColumnTypeError if a name has both tensors and
        arrays. Raises ArgumentError if the batches are passed as separate arguments.

        Parameters
        ----------
        batches
            Batches or dicts.
        missing
            As in `stack`; the padding has the length of the batch that lacks the name.

        Examples
        --------
        >>> Batch.cat([Batch(a=[1, 2]), Batch(a=[3], b=[4.0])])
        Batch(
            a: array([1, 2, 3]),
            b: array([0., 0., 4.]),
        )
        >>> Batch.cat([Batch(a=[1, 2]), Batch(a=[3], b=[4.0])], missing="error")
        Traceback (most recent call last):
        samplebatch.errors.ColumnMismatchError: column 'b' must be in every batch to be
            concatenated, batch 0 lacks it
        """
        if others:
            raise ArgumentError(f"batches must be one list, Batch.cat([a, b]), got {len(others) + 1} arguments")
        parts = list_one_or_more(batches)
        return _with_common_unit(cast("Batch", concatenate_nodes(Batch, parts, missing)), parts)

    def cat_(self, batches: Mapping[str, Any] | Batch | Iterable[Mapping[str, Any] | Batch]) -> None:
        """Append other batches in place; a single batch does not need a list."""
        parts = [self, *list_one_or_more(batches)]
        adopt(_with_common_unit(self, parts), concatenate_nodes(Batch, parts).__dict__)

    def split(
        self, size: int, shuffle: bool = True, merge_last: bool = False, *, rng: np.random.Generator | None = None
    ) -> Iterator[Self]:
        """Yield batches of `size` rows.

        Raises ArgumentError if `size` is not a positive integer or -1.

        Parameters
        ----------
        size
            Rows per batch; -1 for all rows.
        shuffle
            Whether to copy the rows in random order. Without shuffling, the batches are views.
        merge_last
            Whether to merge a shorter last batch into the previous batch.
        rng
            Random generator of the order; None selects NumPy's global generator.

        Examples
        --------
        >>> [
        ...     part.a.tolist()
        ...     for part in Batch(a=[1, 2, 3, 4, 5]).split(2, shuffle=False, merge_last=True)
        ... ]
        [[1, 2], [3, 4, 5]]
        """
        if size != -1:
            whole("size", size, 1)
        return cast("Iterator[Self]", split_rows(self, size, shuffle, merge_last, rng))

    # Leaf by leaf

    def apply_values_transform(self, values_transform: Callable[[Any], Any], inplace: bool = False) -> Self | None:
        """Apply a function to every leaf.

        Parameters
        ----------
        values_transform
            Function of one leaf, which can also be None or an object. The function's result is converted like an
            assigned value.
        inplace
            Whether to update this batch and return None instead of returning a new batch.

        Examples
        --------
        >>> Batch(a=[1, 2], b=Batch(c=[3])).apply_values_transform(lambda value: value * 10)
        Batch(
            a: array([10, 20]),
            b: Batch(
                   c: array([30]),
               ),
        )
        """
        changed = transform_leaves(self, values_transform, Batch)
        if not inplace:
            return cast("Self", changed)
        replace_leaves(self, changed)
        return None

    # Operators

    __add__, __radd__, __iadd__ = operators(operator.add, operator.iadd)
    __sub__, __rsub__, __isub__ = operators(operator.sub, operator.isub)
    __mul__, __rmul__, __imul__ = operators(operator.mul, operator.imul)
    __truediv__, __rtruediv__, __itruediv__ = operators(operator.truediv, operator.itruediv)
    __floordiv__, __rfloordiv__, __ifloordiv__ = operators(operator.floordiv, operator.ifloordiv)
    __mod__, __rmod__, __imod__ = operators(operator.mod, operator.imod)
    __pow__, __rpow__, __ipow__ = operators(operator.pow, operator.ipow)

    def __neg__(self) -> Self:
        return cast("Self", apply(operator.neg, self))

    def __abs__(self) -> Self:
        return cast("Self", apply(abs, self))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return apply_ufunc(self, ufunc, method, inputs, kwargs)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return apply_function(self, function, args, kwargs)

    # Other forms

    def to_torch(
        self,
        dtype: torch.dtype | None = None,
        device: Device = "cpu",
        *,
        floats: Floats | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
        keep_objects: bool = False,
    ) -> Self:
        """Return a batch of tensors that share memory with the arrays if torch supports their layout.

        Only read-only arrays, arrays in foreign byte order or with negative strides, and leaves that change device or
        dtype are copied. None and distributions are unchanged. Raises ColumnTypeError if torch has no dtype for a leaf.
        Raises ArgumentError if `floats` is not a floating-point dtype, or is combined with `dtype`. Raises DeviceError
        if torch cannot use the device, or cannot page-lock memory on this machine.

        Parameters
        ----------
        dtype
            The dtype of all tensors; None keeps each dtype.
        device
            The device of all tensors.
        floats
            A torch or NumPy dtype, or its name, for floating-point tensors only.
        pin_memory
            Whether to page-lock the tensors' host memory.
        non_blocking
            Whether to return before copies to a device are complete.
        keep_objects
            Whether to keep strings and arrays of objects instead of raising.

        Examples
        --------
        >>> import torch
        >>> Batch(a=np.zeros(2), b=[1, 2]).to_torch(dtype=torch.float32)
        Batch(
            a: tensor([0., 0.]),
            b: tensor([1., 2.]),
        )
        >>> Batch(a=np.zeros(2), b=[1, 2]).to_torch(floats="float32")
        Batch(
            a: tensor([0., 0.]),
            b: tensor([1, 2]),
        )
        """
        how: dict[str, Any] = {"pin_memory": pin_memory, "non_blocking": non_blocking, "keep_objects": keep_objects}
        return tree_to(self, TorchTarget(dtype, device, floats=floats, **how))

    def to_torch_(
        self,
        dtype: torch.dtype | None = None,
        device: Device = "cpu",
        *,
        floats: Floats | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
        keep_objects: bool = False,
    ) -> None:
        """Convert all leaves to tensors in place; see `to_torch`."""
        how: dict[str, Any] = {"pin_memory": pin_memory, "non_blocking": non_blocking, "keep_objects": keep_objects}
        replace_leaves(self, tree_to(self, TorchTarget(dtype, device, floats=floats, **how)))

    def to_numpy(self, *, floats: Floats | None = None) -> Self:
        """Return a batch of arrays that share memory with tensors on the host.

        bfloat16 becomes float32 without loss. Raises ArgumentError if `floats` is not a NumPy floating-point dtype.

        Parameters
        ----------
        floats
            Dtype of floating-point arrays; None keeps each dtype.
        """
        arrays = tree_to_numpy(self)
        return arrays if floats is None else tree_to(arrays, ArrayTarget(floats))

    def to_numpy_(self, *, floats: Floats | None = None) -> None:
        """Convert all tensors to arrays in place; see `to_numpy`."""
        replace_leaves(self, Batch.to_numpy(self, floats=floats))

    @suggest_names(minibatch_size="size", batch_size="size")
    def minibatches(
        self,
        size: int,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        device: Device | None = None,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Iterator[Self]:
        """Yield minibatches of `size` rows, every row once per epoch; see `SampleBatch.minibatches`.

        Raises
        ------
        ArgumentError, DeviceError
            As in `SampleBatch.minibatches`.

        Examples
        --------
        >>> [
        ...     part.a
        ...     for part in Batch(a=[0.5, 1.5, 2.5]).minibatches(
        ...         2, shuffle=False, device="cpu", floats="float32"
        ...     )
        ... ]
        [tensor([0.5000, 1.5000]), tensor([2.5000])]
        """
        whole("size", size, 1)
        order = np.random.default_rng(rng)
        passes = (split_rows(self, size, shuffle, False, order) for _ in range(whole("epochs", epochs)))
        parts = cast("Iterator[Self]", chain.from_iterable(passes))
        return Delivery(device, floats, prefetch).each(parts, tree_to)

    def pin_memory(self, device: str | torch.device | None = None) -> Self:
        """Return a batch with its tensors in page-locked memory, for torch's `DataLoader`."""
        return cast("Self", conversions.pin_memory(self))

    def to_dict(self, recursive: bool = True) -> dict[str, Any]:
        """Return a dict of the values; with `recursive`, nested batches become dicts.

        >>> Batch(a=[1, 2], b=Batch(c=[3])).to_dict()
        {'a': array([1, 2]), 'b': {'c': array([3])}}
        """
        return conversions.to_dict(self) if recursive else dict(self.__dict__)

    def to_list_of_dicts(self) -> list[dict[str, Any]]:
        """Return one nested dict per row.

        Raises ColumnTypeError if a leaf is a scalar.
        """
        return [conversions.to_dict(row) for row in iterate(self, shortest(self.__dict__) or 0)]

    def to_at_least_2d(self) -> Self:
        """Return a batch whose leaves have at least two dimensions: () becomes (1, 1), and (n,) becomes (1, n)."""
        return cast("Self", conversions.to_at_least_2d(self))

    def as_sample_batch(self, convention: Convention | None = None) -> SampleBatch:
        """Return a flat batch that shares arrays and tensors with this batch; nested batches become nested columns.

        C-contiguous arrays in native byte order are shared; other arrays are copied once. Reserved names and None are
        omitted.

        Parameters
        ----------
        convention
            `"rllib"` renames columns to RLlib's names: `rew` becomes `rewards`, `obs_next` becomes `new_obs`.
            `"tianshou"` renames columns to Tianshou's names; None keeps all names.

        Raises
        ------
        ColumnLengthError
            If leaves differ in length.
        ColumnTypeError
            If a leaf is a scalar or a distribution.
        ArgumentError
            If `convention` has another value.
        ColumnMismatchError
            If two columns would have the same name.

        Examples
        --------
        >>> steps = Batch(obs={"x": [1.0, 2.0]}, rew=[0.5, 1.0])
        >>> steps.as_sample_batch(convention="rllib").column_names
        ('obs.x', 'rewards')
        """
        return conversions.as_sample_batch(self, convention)

    def to_environment_actions(self) -> Self:
        """Map the actions to the environment's action space; see `SampleBatch.to_environment_actions`.

        >>> from samplebatch import ActionUnit, SampleBatch
        >>> batch = SampleBatch(
        ...     actions=np.array([[-1.0]]), _action_unit=ActionUnit("scale", -2.0, 2.0)
        ... ).as_batch()
        >>> batch.to_environment_actions().actions
        array([[-2.]])
        """
        return cast("Self", conversions.to_environment_actions(self))

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table that shares memory, with one column per leaf under the leaf's dotted path."""
        return conversions.as_sample_batch(self).to_arrow()

    def save(self, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True) -> None:
        """Write the batch to a file or folder; see `SampleBatch.save`."""
        from samplebatch.storage import save

        save(self, path, compression, durable=durable)

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame with one column per leaf; see `SampleBatch.to_pandas`."""
        return conversions.as_sample_batch(self).to_pandas()

    def plot(self, *columns: str) -> Figure:
        """Plot leaves, selected by dotted name, over time; see `SampleBatch.plot`."""
        return conversions.as_sample_batch(self).plot(*columns)

    def _repr_html_(self) -> str:
        return summary.as_html(type(self).__name__, conversions.summary_lines(self, ""))

    def __arrow_c_schema__(self) -> Any:
        return conversions.as_sample_batch(self).__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return conversions.as_sample_batch(self).__arrow_c_stream__(requested_schema)

    def replace_empty_batches_by_none(self) -> None:
        """Set all reserved names, including nested ones, to None.

        >>> b = Batch(a=[1], b=Batch())
        >>> b.replace_empty_batches_by_none()
        >>> b.to_dict()
        {'a': array([1]), 'b': None}
        """
        conversions.drop_reserved(self)

    def isnull(self) -> Self:
        """Return a batch with the same structure, in which True marks NaN, NaT and None, and False all other values.

        >>> Batch(a=[1.0, float("nan")], b=["x", None]).isnull().to_dict()
        {'a': array([False,  True]), 'b': array([False,  True])}
        """
        return cast("Self", nulls(self))

    def hasnull(self) -> bool:
        """Return whether any element is NaN, NaT or None."""
        return any_null(self)

    def dropnull(self) -> Self:
        """Return the rows without NaN, NaT or None; object arrays that then contain only numbers become numeric.

        Raises ColumnTypeError if a leaf is a scalar.

        >>> Batch(a=[1.0, float("nan"), 3.0], b=["x", "y", None]).dropnull().to_dict()
        {'a': array([1.]), 'b': array(['x'], dtype=object)}
        >>> Batch(a=[None, 2, 3]).dropnull().to_dict()
        {'a': array([2, 3])}
        """
        length = shortest(self.__dict__)
        return self if length is None else cast("Self", conversions.drop_null_rows(self, length))

    def set_array_at_key(
        self, arr: npt.NDArray[Any], key: str, index: Any = None, default_value: float | None = None
    ) -> None:
        """Assign an array to a column, or to some rows of a column.

        Raises ColumnLengthError if `index` is None and the array's length differs from the length of the batch. Raises
        ColumnMismatchError if the value of `key` is a nested batch. Raises ColumnTypeError if a new column needs a
        default and its dtype has no missing value.

        Parameters
        ----------
        arr
            Array of shape (n, ...) for n rows, or (k, ...) for the k indexed rows.
        key
            Column name. With an index, the other rows of a new column are filled with the default.
        index
            A NumPy index; None for all rows.
        default_value
            Value of the other rows; None selects NaN, False or None by dtype.

        Examples
        --------
        >>> b = Batch(a=[1, 2, 3])
        >>> b.set_array_at_key(np.array([4.5]), "b", index=[1], default_value=7)
        >>> b.to_dict()
        {'a': array([1, 2, 3]), 'b': array([7. , 4.5, 7. ])}
        """
        conversions.set_array(self, arr, key, index, default_value)

    # Copies

    def copy(self) -> Self:
        """Copy the batch and all values in its tree."""
        return cast("Self", copy_tree(self))

    def __copy__(self) -> Self:
        return cast("Self", copy_nodes(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return cast("Self", copy_tree(self, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        unit, values = unit_of(self), interchange.values_to_pickle(self)
        if unit is not None or type(self) in PEER_CLASSES:
            # Pickle allows `__newobj__` only if `__class__` is the type.
            return _make_with_unit, (type(self), unit), values
        return copyreg.__newobj__, (type(self),), values  # type: ignore[attr-defined]


def _make_with_unit(cls: type[Batch], unit: ActionUnit | None) -> Batch:
    """Create an empty batch whose values are set by unpickling."""
    batch = node(cls, {})
    set_unit(batch, unit)
    return batch


def _with_common_unit(batch: Batch, parts: Sequence[Any]) -> Batch:
    """Set a batch's action unit to the common unit of its parts; raises the same errors as `common_unit`."""
    units = [unit for part in parts if (unit := getattr(part, "_action_unit", None)) is not None]
    if units:
        set_unit(batch, cast("ActionUnit", common_unit(units)))
    return batch


interchange.register_where_loaded(Batch, interchange.LIBRARIES)

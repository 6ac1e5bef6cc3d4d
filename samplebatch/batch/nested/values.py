"""Values of nested batches: conversion on assignment, equality and missing values.

Conversion (`parse`):

======================================  ======================================================================
value                                   stored as
======================================  ======================================================================
array of numbers, bool, dates           itself
array of strings or bytes               array of dtype object
array of dicts or batches, shape (n,)   one batch, stacked from the elements
0-d array with an object                the object
number                                  0-d array
dict                                    batch
named tuple, dataclass, foreign batch   batch
batch, tensor, distribution             itself
ragged column                           itself
list of numbers, strings, None          array; strings and mixtures have dtype object
list of dicts, batches or records       one batch, stacked from the elements
list of arrays of one shape             one array, stacked from the elements
list of arrays that differ in length    array of dtype object
list of tensors of one shape            one tensor, stacked from the elements
anything else                           NumPy array; a single object is itself
======================================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.distributions import distributions_equal
from samplebatch.batch.nested.node import (
    ARRAY,
    DISTRIBUTION,
    FOREIGN,
    KINDS,
    MAPPING,
    NODE,
    NUMBER,
    RAGGED,
    RECORD,
    SEQUENCE,
    TENSOR,
    Node,
    node,
    values_of,
)
from samplebatch.errors import ColumnTypeError

_SHAPES_OF_ONE = {(), (1,)}
_AGGREGATES = {NODE, MAPPING, RECORD}
_ndarray = np.ndarray
_FIRST_OBJECT = np.dtype(object).num
"""NumPy type number of `object`.

The type numbers of bool, integer, floating-point (except float16) and complex dtypes are smaller.
"""


def parse(value: Any, make: type[Node], path: str) -> Any:
    """Convert a value to the form in which batches store the value; see the module's table.

    Raises ColumnTypeError if names are not strings, or tensors or arrays cannot be stacked.

    make: the class of nested batches.
    """
    kind = KINDS[type(value)]
    if kind == ARRAY:
        return _settle(value, make, path)
    if kind == NUMBER:
        array = np.asarray(value)
        return array if array.dtype.num < _FIRST_OBJECT or array.dtype.kind in "fmM" else value
    if value is None or kind in (NODE, TENSOR, DISTRIBUTION, FOREIGN, RAGGED) or type(value) is str:
        return value
    if kind in (MAPPING, RECORD):
        return node(make, parse_items(values_of(value) or {}, make, path + "."))
    if kind == SEQUENCE:
        return parse_sequence(value, make, path)
    array = np.asanyarray(value)
    if array.ndim == 0:
        return value if array.dtype.kind in "OSUV" else array
    return _settle(array, make, path)


def parse_items(values: Mapping[Any, Any], make: type[Node], prefix: str) -> dict[str, Any]:
    """Convert the items of a dict to the form in which batches store values.

    Raises ColumnTypeError if a name is not a string, or no column can store a value.
    """
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if type(name) is not str:
            join_name(name, prefix)
        if type(value) is _ndarray and value.dtype.num < _FIRST_OBJECT:
            parsed[name] = value
        else:
            parsed[name] = parse(value, make, prefix + name)
    return parsed


def join_name(name: Any, prefix: str) -> str:
    """Join a prefix and a name into a dotted name.

    Raises ColumnTypeError if the name is not a string.
    """
    if isinstance(name, str):
        return prefix + name
    where = f"the names in {prefix[:-1]!r}" if prefix else "names"
    raise ColumnTypeError(f"{where} must be strings, got {type(name).__name__}")


def parse_sequence(values: Sequence[Any], make: type[Node], path: str) -> Any:
    """Convert a list or tuple to an array, a tensor or a nested batch.

    Raises ColumnTypeError if tensors, or arrays of equal length, cannot be stacked.
    """
    if not values:
        return np.array([])
    kinds = {KINDS[cls] for cls in set(map(type, values))}
    if kinds <= _AGGREGATES:
        return make._stack_rows(values, path + ".")
    if TENSOR in kinds:
        if kinds != {TENSOR}:
            raise ColumnTypeError(f"column {path!r} must contain only tensors or no tensors, got a list with both")
        return stack_tensors(values, path, 0)
    if kinds & _AGGREGATES or DISTRIBUTION in kinds:
        return object_rows(values)
    if kinds == {ARRAY}:
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            if len({shape[1:] for shape in shapes}) > 1:
                listed_shapes = " and ".join(map(str, sorted(shapes)[:4]))
                raise ColumnTypeError(f"column {path!r} must contain arrays with equal row shapes, got {listed_shapes}")
            return object_rows(values)
    return settle_rows(values, make, path)


def settle_rows(values: Sequence[Any], make: type[Node], path: str) -> Any:
    """Convert rows to an array, of dtype object if NumPy cannot stack them."""
    try:
        array = np.asanyarray(values)
    except ValueError:  # rows of different shapes
        return object_rows(values)
    except (TypeError, RuntimeError) as error:
        raise ColumnTypeError(f"column {path!r} cannot be built from these rows: {error}") from error
    return _settle(array, make, path) if array.dtype.kind in "SUVT" else array


def object_rows(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return n values as an array of dtype object, shape (n,)."""
    rows = np.empty(len(values), object)
    for position, value in enumerate(values):
        rows[position] = value
    return rows


def stack_tensors(tensors: Sequence[Any], path: str, axis: int) -> Any:
    """Stack tensors of one shape.

    Raises ColumnTypeError if shapes or devices differ.
    """
    import torch

    try:
        return torch.stack(list(tensors), axis)
    except (RuntimeError, IndexError) as error:
        raise ColumnTypeError(f"column {path!r} must contain tensors that can be stacked: {error}") from error


def _settle(array: npt.NDArray[Any], make: type[Node], path: str) -> Any:
    """Convert strings to objects and rows of dicts to a nested batch; return numeric arrays unchanged."""
    if array.dtype.num < _FIRST_OBJECT or array.dtype.kind in "fmM":
        return array
    objects = array if array.dtype.kind == "O" else array.astype(object)
    if objects.ndim == 0:
        return parse(objects.item(), make, path) if KINDS[type(objects.item())] in _AGGREGATES else objects.item()
    if objects.ndim == 1 and objects.size and all(KINDS[type(item)] in _AGGREGATES for item in objects):
        return make._stack_rows(objects.tolist(), path + ".")
    return objects


def transform_leaves(source: Node, function: Callable[[Any], Any], make: type[Node], prefix: str = "") -> Node:
    """Return a tree in which every leaf is replaced by the function's result."""
    changed = {}
    for name, value in source.__dict__.items():
        path = prefix + name
        if KINDS[type(value)] == NODE:
            changed[name] = transform_leaves(value, function, make, path + ".")
        else:
            changed[name] = parse(function(value), make, path)
    return node(type(source), changed)


def stack_rows(rows: Any, make: type[Node]) -> Node:
    """Stack a sequence of dicts and batches; raises ColumnTypeError if an item has another type."""
    if (
        isinstance(rows, (str, bytes))
        or not isinstance(rows, Iterable)
        or (isinstance(rows, np.ndarray) and rows.ndim != 1)
    ):
        raise ColumnTypeError(
            "a Batch must be built from a dict, a Batch, or a list of dicts and Batches, "
            f"got {type(rows).__name__}; name the value"
        )
    entries = list(rows)
    for cls in set(map(type, entries)):
        if KINDS[cls] not in _AGGREGATES:
            raise ColumnTypeError(
                "a Batch must be built from a dict, a Batch, or a list of dicts and Batches, got rows of "
                f"type {cls.__name__}; name the value"
            )
    return make._stack_rows(entries, "")


def trees_equal(a: Node, b: Node) -> bool:
    """Return whether two trees have the same names, and leaves of equal type, dtype, shape and elements.

    A number equals an array of shape () or (1,) whose only element is this number. The order of names is ignored. NaN
    is unequal to itself, as in NumPy.
    """
    if a is b and not a.__dict__:
        return True
    mine, theirs = a.__dict__, b.__dict__
    if mine.keys() != theirs.keys():
        return False
    for name, value in mine.items():
        other = theirs[name]
        if type(value) is _ndarray and type(other) is _ndarray and value.dtype.num < _FIRST_OBJECT:
            if value.dtype != other.dtype or not _same_shape(value, other) or not (value == other).all():
                return False
        elif not _leaves_equal(value, other):
            return False
    return True


def _leaves_equal(value: Any, other: Any) -> bool:
    kind, other_kind = KINDS[type(value)], KINDS[type(other)]
    if NUMBER in (kind, other_kind) and {kind, other_kind} <= {NUMBER, ARRAY}:
        # A number from a row equals the 0-d array that a batch stores for this number.
        value, other, kind = np.asarray(value), np.asarray(other), ARRAY
    elif kind != other_kind:
        return False
    if kind == NODE:
        return trees_equal(value, other)
    if kind == TENSOR:
        import torch

        if value.dtype != other.dtype or value.device != other.device or not _same_shape(value, other):
            return False
        return torch.equal(value.reshape(other.shape), other)
    if kind in (ARRAY, FOREIGN):
        if value.dtype != other.dtype or not _same_shape(value, other):
            return False
        if value.dtype.kind != "O":
            return bool((value == other).all())
        return all(map(_items_equal, value.flat, other.flat))
    if kind == RAGGED:
        return np.array_equal(value.extents, other.extents) and _leaves_equal(value.flat, other.flat)
    if kind == DISTRIBUTION:
        return distributions_equal(value, other)
    return type(value) is type(other) and _items_equal(value, other)


def _same_shape(value: Any, other: Any) -> bool:
    """Return whether two shapes are equal, or one is () and the other is (1,)."""
    return bool(value.shape == other.shape) or {value.shape, other.shape} == _SHAPES_OF_ONE


def _items_equal(item: Any, other: Any) -> bool:
    """Return whether two elements of object arrays are equal; arrays are compared elementwise."""
    if item is other:
        return True
    if isinstance(item, dict) and isinstance(other, dict):
        return item.keys() == other.keys() and all(_items_equal(value, other[name]) for name, value in item.items())
    if isinstance(item, (list, tuple)) and type(item) is type(other):
        return len(item) == len(other) and all(map(_items_equal, item, other))
    if KINDS[type(item)] in (ARRAY, TENSOR, FOREIGN, NODE, DISTRIBUTION):
        return _leaves_equal(item, other)
    if KINDS[type(other)] in (ARRAY, TENSOR, FOREIGN):
        return False
    return bool(item == other)


def _is_null(item: Any) -> bool:
    return item is None or (
        isinstance(item, (float, complex, np.inexact, np.datetime64, np.timedelta64)) and item != item
    )


_are_null = np.frompyfunc(_is_null, 1, 1)


def leaf_nulls(value: Any) -> Any:
    """Return a bool array or tensor that marks missing elements, or incomplete rows of a ragged column."""
    kind = KINDS[type(value)]
    if kind == RAGGED:
        counts = np.concatenate([[0], np.cumsum(_as_host(leaf_nulls(value.flat)))])
        offsets, _ = value.layout
        return counts[offsets[1:]] > counts[offsets[:-1]]
    if kind == TENSOR:
        return value.isnan()
    if kind in (ARRAY, NUMBER, FOREIGN):
        array = np.asarray(value)
        if array.dtype.kind in "fc":
            return np.asarray(np.isnan(array))
        if array.dtype.kind in "mM":
            return np.asarray(np.isnat(array))
        if array.dtype.kind == "O":
            return np.asarray(_are_null(array)).astype(bool)
        return np.zeros(array.shape, bool)
    return np.asarray(_is_null(value))


def _as_host(flags: Any) -> npt.NDArray[Any]:
    return np.asarray(flags.cpu() if KINDS[type(flags)] == TENSOR else flags)


def missing_value(dtype: Any, path: str) -> Any:
    """Return the missing value of a dtype: NaN, False or None.

    Raises ColumnTypeError if the dtype has no missing value.
    """
    if dtype.kind not in _MISSING:
        raise ColumnTypeError(
            f"column {path!r} must have a dtype with a missing value or a default for its other rows, got {dtype}"
        )
    return _MISSING[dtype.kind]


_MISSING: dict[str, Any] = {"f": np.nan, "c": np.nan, "b": False, "O": None}
"""Missing value by kind of dtype."""


def narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert an object array of numbers to a numeric dtype if no value changes; return other arrays unchanged.

    >>> narrow(np.array([1, 2.5], object)), narrow(np.array([1, "x"], object))
    (array([1. , 2.5]), array([1, 'x'], dtype=object))
    """
    if array.dtype.kind != "O" or not array.size or any(KINDS[type(item)] != NUMBER for item in array.flat):
        return array
    numbers = np.array(array.tolist())
    if numbers.dtype.kind not in "biufc":
        return array
    # Python compares integers and floats exactly; NaN equals nothing.
    pairs = zip(array.ravel().tolist(), numbers.ravel().tolist(), strict=True)
    return numbers if all(original == converted or converted != converted for original, converted in pairs) else array


def nulls(source: Node) -> Node:
    """Return a tree in which `leaf_nulls` replaces every leaf."""
    marks = {
        name: nulls(value) if KINDS[type(value)] == NODE else leaf_nulls(value)
        for name, value in source.__dict__.items()
    }
    return node(type(source), marks)


def any_null(source: Node) -> bool:
    """Return whether any leaf has a missing element."""
    return any(
        any_null(value) if KINDS[type(value)] == NODE else bool(leaf_nulls(value).any())
        for value in source.__dict__.values()
    )


def complete_rows(source: Node, length: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the first n rows, True for rows without missing elements in any leaf; shape (n,)."""
    complete = np.ones(length, np.bool_)
    for value in source.__dict__.values():
        if KINDS[type(value)] == NODE:
            complete &= complete_rows(value, length)
            continue
        null = np.asarray(leaf_nulls(value))
        if null.ndim == 0:
            complete &= not null
        else:
            complete &= ~null[:length].reshape(length, -1).any(axis=1)
    return complete

"""What becomes of a value that is put into a nested batch.

======================================  ======================================================================
given                                   kept
======================================  ======================================================================
array of numbers, bool, dates           itself
array of strings or bytes               array of dtype object
array of dicts or batches, shape (n,)   one batch: they are stacked
array of no dimension with an object    the object
number                                  array of no dimension
dict                                    batch
batch, tensor, distribution             itself
list of numbers, strings, None          array; strings and mixtures have dtype object
list of dicts and batches               one batch: they are stacked
list of arrays of one shape             one array: they are stacked
list of arrays that differ in length    array of dtype object
list of tensors of one shape            one tensor: they are stacked
anything else                           what NumPy makes of it; itself, if that is a single object
======================================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested import aggregate
from samplebatch.batch.nested.node import (
    ARRAY,
    DISTRIBUTION,
    FOREIGN,
    KINDS,
    MAPPING,
    NODE,
    NUMBER,
    SEQUENCE,
    TENSOR,
    Node,
    node,
)
from samplebatch.errors import ColumnTypeError

_AGGREGATES = {NODE, MAPPING}
_ndarray = np.ndarray
_FIRST_OBJECT = np.dtype(object).num
"""Type numbers below it are bool, the integers, and all floats and complex numbers but float16."""


def parse(value: Any, make: type[Node], path: str) -> Any:
    """Turn a value into what a nested batch keeps for it.

    Parameters
    ----------
    value
        Anything.
    make
        The class of nested batches.
    path
        The dotted name it will stand under, for errors.

    Raises
    ------
    ColumnTypeError
        If no column can hold it: names that are no strings, tensors that do not stack, arrays that do not.
    """
    kind = KINDS[type(value)]
    if kind == ARRAY:
        return _settle(value, make, path)
    if kind == NUMBER:
        array = np.asarray(value)
        return array if array.dtype.num < _FIRST_OBJECT or array.dtype.kind in "fmM" else value
    if value is None or kind in (NODE, TENSOR, DISTRIBUTION, FOREIGN) or type(value) is str:
        return value
    if kind == MAPPING:
        return node(make, parse_items(value, make, path + "."))
    if kind == SEQUENCE:
        return parse_sequence(value, make, path)
    array = np.asanyarray(value)
    if array.ndim == 0:
        return value if array.dtype.kind in "OSUV" else array
    return _settle(array, make, path)


def parse_items(values: Mapping[Any, Any], make: type[Node], prefix: str) -> dict[str, Any]:
    """Turn the items of a dict into what a nested batch keeps for them.

    Raises
    ------
    ColumnTypeError
        If a name is not a string, or a value is nothing that a column can hold.
    """
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if type(name) is not str:
            checked_name(name, prefix)
        if type(value) is _ndarray and value.dtype.num < _FIRST_OBJECT:
            kept[name] = value
        else:
            kept[name] = parse(value, make, prefix + name)
    return kept


def checked_name(name: Any, prefix: str) -> str:
    """Return the dotted name of a value.

    Raises
    ------
    ColumnTypeError
        If the name is not a string.
    """
    if isinstance(name, str):
        return prefix + name
    where = f"the names in {prefix[:-1]!r}" if prefix else "names"
    raise ColumnTypeError(f"{where} must be strings, got {type(name).__name__}")


def parse_sequence(values: Sequence[Any], make: type[Node], path: str) -> Any:
    """Turn a list or tuple into a column: an array, a tensor or a nested batch.

    Raises
    ------
    ColumnTypeError
        If tensors among them do not stack, or arrays of equal length do not.
    """
    if not values:
        return np.array([])
    kinds = {KINDS[cls] for cls in set(map(type, values))}
    if kinds <= _AGGREGATES:
        return aggregate.stack(values, make, path + ".")
    if TENSOR in kinds:
        if kinds != {TENSOR}:
            raise ColumnTypeError(f"column {path!r} must be made of tensors alone or of none, got a list with both")
        return aggregate.stack_tensors(values, path, 0)
    if kinds & _AGGREGATES or DISTRIBUTION in kinds:
        return object_rows(values)
    if kinds == {ARRAY}:
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            if len({shape[1:] for shape in shapes}) > 1:
                found = " and ".join(map(str, sorted(shapes)[:4]))
                raise ColumnTypeError(f"column {path!r} must be made of arrays whose rows have one shape, got {found}")
            return object_rows(values)
    return settle_rows(values, make, path)


def settle_rows(values: Sequence[Any], make: type[Node], path: str) -> Any:
    """Turn rows that NumPy may join into an array, one of dtype object if it cannot."""
    try:
        array = np.asanyarray(values)
    except ValueError:  # rows of different shapes
        return object_rows(values)
    except (TypeError, RuntimeError) as error:
        raise ColumnTypeError(f"column {path!r} cannot be made of these rows: {error}") from error
    return _settle(array, make, path) if array.dtype.kind in "SUVT" else array


def object_rows(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Make an array of shape (n,) whose elements are the n values, whatever they are."""
    rows = np.empty(len(values), object)
    for position, value in enumerate(values):
        rows[position] = value
    return rows


def _settle(array: npt.NDArray[Any], make: type[Node], path: str) -> Any:
    """Keep an array of numbers; strings become objects, and rows of dicts a nested batch."""
    if array.dtype.num < _FIRST_OBJECT or array.dtype.kind in "fmM":
        return array
    objects = array if array.dtype.kind == "O" else array.astype(object)
    if objects.ndim == 0:
        return parse(objects.item(), make, path) if KINDS[type(objects.item())] in _AGGREGATES else objects.item()
    if objects.ndim == 1 and objects.size and all(KINDS[type(item)] in _AGGREGATES for item in objects):
        return aggregate.stack(objects.tolist(), make, path + ".")
    return objects


def transformed(source: Node, function: Callable[[Any], Any], make: type[Node], prefix: str = "") -> Node:
    """Make a tree of what a function makes of every leaf."""
    changed = {}
    for name, value in source.__dict__.items():
        path = prefix + name
        if KINDS[type(value)] == NODE:
            changed[name] = transformed(value, function, make, path + ".")
        else:
            changed[name] = parse(function(value), make, path)
    return node(type(source), changed)


def stacked_rows(rows: Any, make: type[Node]) -> Node:
    """Stack what a Batch is constructed from when that is neither a dict nor a Batch.

    Raises
    ------
    ColumnTypeError
        If it is not a sequence of dicts and batches.
    """
    if (
        isinstance(rows, (str, bytes))
        or not isinstance(rows, Iterable)
        or (isinstance(rows, np.ndarray) and rows.ndim != 1)
    ):
        raise ColumnTypeError(
            f"a Batch is made from a dict, a Batch, or a sequence of them, got {type(rows).__name__}; name the value"
        )
    listed = list(rows)
    if not {KINDS[cls] for cls in set(map(type, listed))} <= _AGGREGATES:
        raise ColumnTypeError(
            "a Batch is made from a dict, a Batch, or a sequence of them, got other rows; name the value"
        )
    return aggregate.stack(listed, make)

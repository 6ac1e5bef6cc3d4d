"""Row operations on nested batches: count, index, assign, zero, iterate and split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, repeat
from typing import Any

import numpy as np

from samplebatch.batch.nested.distributions import get_len_of_dist, slice_distribution
from samplebatch.batch.nested.node import (
    ARRAY,
    DISTRIBUTION,
    EVERYTHING,
    FOREIGN,
    KINDS,
    MAPPING,
    NODE,
    NUMBER,
    OBJECT,
    RAGGED,
    RECORD,
    SEQUENCE,
    TENSOR,
    Node,
    Selection,
    adopt,
    fault,
    node,
    set_unit,
    unit_of,
    values_of,
    with_unit_of,
)
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RowIndexError, near_names

_ndarray = np.ndarray
_NO_NAMES: dict[str, Any] = {}
_new = object.__new__


def shortest(values: Mapping[str, Any], prefix: str = "") -> int | None:
    """Return the length of the shortest leaf, ignoring None and reserved names; None without leaves.

    Raises ColumnTypeError if a leaf is a scalar; names it.
    """
    length = None
    name = ""
    try:
        for name, value in values.items():
            if type(value) is _ndarray:
                n = len(value)
            elif value is None:
                continue
            else:
                kind = KINDS[type(value)]
                if kind in (NODE, MAPPING, RECORD):
                    nested = shortest(value.__dict__ if kind == NODE else values_of(value) or {}, f"{prefix}{name}.")
                    if nested is None:
                        continue
                    n = nested
                elif kind == DISTRIBUTION:
                    if not value.batch_shape:
                        raise TypeError
                    n = get_len_of_dist(value)
                elif kind == OBJECT:
                    raise TypeError
                else:
                    n = len(value)
            if length is None or n < length:
                length = n
    except ColumnTypeError:
        raise
    except TypeError:
        raise ColumnTypeError(f"object of type 'Batch' has no len(): column {prefix + name!r} is a scalar") from None
    return length


def shape_of(source: Node) -> list[int]:
    """Return the smallest extent of every dimension common to all leaves; a reserved name has no dimensions."""
    shapes = list(_shapes(source))
    return [min(extents) for extents in zip(*shapes, strict=False)]


def _shapes(source: Node) -> Iterator[tuple[int, ...]]:
    if not source.__dict__:
        yield ()
    for value in source.__dict__.values():
        kind = KINDS[type(value)]
        if kind == NODE:
            yield from _shapes(value)
        else:
            yield tuple(value.shape) if kind in (ARRAY, TENSOR, FOREIGN) else (len(value),) if kind == RAGGED else ()


def select(source: Node, index: Any) -> Node:
    """Index every leaf with a NumPy index: views for slices, copies for masks and arrays.

    Raises RowIndexError if the batch is empty, or the index is out of bounds for a leaf; names it.
    """
    if not source.__dict__:
        raise RowIndexError("an empty Batch has no rows to index")
    plain = type(index) is int or type(index) is slice
    return with_unit_of(source, _select_plain(source, index, "") if plain else _select(source, Selection(index), ""))


def _select_plain(source: Node, index: Any, prefix: str) -> Node:
    selected: dict[str, Any] = {}
    name = ""
    try:
        for name, value in source.__dict__.items():
            if type(value) is _ndarray:
                selected[name] = value[index]
            else:
                kind = KINDS[type(value)]
                if kind == NODE:
                    selected[name] = _select_plain(value, index, f"{prefix}{name}.")
                elif kind == TENSOR and index.__class__ is slice:
                    selected[name] = value[Selection(index).of_tensor(value)]
                elif kind == DISTRIBUTION:
                    selected[name] = slice_distribution(value, Selection(index))
                elif value is None:
                    selected[name] = None
                elif kind == OBJECT:
                    raise IndexError("it is a scalar")
                else:
                    selected[name] = value[index]
    except Exception as error:
        fault(prefix + name, "indexed", error)
    batch = _new(type(source))
    adopt(batch, selected)
    return batch


def _select(source: Node, selection: Selection, prefix: str) -> Node:
    selected: dict[str, Any] = {}
    rows, masked = selection.rows, selection.masked
    name = ""
    try:
        for name, value in source.__dict__.items():
            kind = ARRAY if type(value) is _ndarray else KINDS[type(value)]
            if masked >= 0 and kind in (ARRAY, TENSOR, FOREIGN, RAGGED) and len(value) != masked:
                raise IndexError(f"the mask has {masked} rows and the column {len(value)}")
            if kind == ARRAY:
                picked = value[selection.index] if rows is None else value.take(rows, 0)
                # An index with an ellipsis wraps even a single object.
                wrapped = value.dtype.hasobject and type(picked) is _ndarray and picked.ndim == 0
                selected[name] = picked.item() if wrapped else picked
            elif kind == NODE:
                selected[name] = _select(value, selection, f"{prefix}{name}.")
            elif kind == TENSOR:
                selected[name] = value[selection.of_tensor(value)]
            elif kind == RAGGED:
                # Indices of several dimensions give arrays of rows.
                selected[name] = value[selection.of_rows] if selection.picks_rows else value.to_numpy()[selection.index]
            elif kind == DISTRIBUTION:
                selected[name] = slice_distribution(value, selection)
            elif value is None or (kind == OBJECT and selection.scalar):
                selected[name] = value
            elif kind == OBJECT:
                raise IndexError("it is a scalar")
            else:
                selected[name] = value[selection.index]
    except Exception as error:
        fault(prefix + name, "indexed", error)
    return node(type(source), selected)


def assign(target: Node, index: Any, new_values: Mapping[str, Any]) -> None:
    """Assign values to the indexed rows of every leaf.

    Names missing from the values are set to zeros, or None for objects. Raises ColumnMismatchError for an unknown name
    or values of the wrong shape. Raises ColumnTypeError if a leaf is read-only or rejects the values' type. Raises
    RowIndexError if the index is out of bounds.
    """
    _assign(target, Selection(index), new_values, "")


def _assign(target: Node, selection: Selection, new_values: Mapping[str, Any], prefix: str) -> None:
    columns = target.__dict__
    if not new_values.keys() <= columns.keys():
        unknown = next(name for name in new_values if name not in columns)
        hint = near_names(prefix + unknown, [prefix + name for name in columns])
        raise ColumnMismatchError(f"rows can only be assigned to existing columns, got {prefix + unknown!r}; {hint}")
    index = selection.index
    name = ""
    try:
        for name, value in columns.items():
            absent = name not in new_values
            new = None if absent else new_values[name]
            if type(value) is _ndarray and type(new) is _ndarray:
                value[index] = new
                continue
            kind = KINDS[type(value)]
            values = _NO_NAMES if absent else values_of(new)
            if kind == NODE:
                if values is None:
                    raise ValueError("values for a nested batch must be a Batch or a dict")
                _assign(value, selection, values, f"{prefix}{name}.")
            elif absent or (values is not None and not values):
                if value is not None:
                    _zero_rows(value, kind, selection)
            elif values is not None:
                raise ValueError("a Batch or dict can only be assigned to a nested batch")
            elif kind == ARRAY:
                value[index] = np.asanyarray(new) if KINDS[type(new)] in (SEQUENCE, TENSOR) else new
            elif kind == TENSOR:
                import torch

                value[selection.of_tensor(value)] = torch.as_tensor(new, dtype=value.dtype, device=value.device)
            elif kind == RAGGED:
                value[selection.of_rows] = new
            elif value is not None or new is not None:
                raise TypeError("it has no rows that could be written to")
    except Exception as error:
        fault(prefix + name, "assigned to", error)


def zero(target: Node, index: Any = ...) -> None:
    """Set all or the indexed rows of every leaf to zero, objects to None, in place."""
    _zero_all(target, Selection(index), "")


def _zero_all(target: Node, selection: Selection, prefix: str) -> None:
    columns = target.__dict__
    name = ""
    try:
        for name, value in columns.items():
            kind = KINDS[type(value)]
            if kind == NODE:
                _zero_all(value, selection, f"{prefix}{name}.")
            elif kind == NUMBER:
                columns[name] = type(value)(0)
            elif kind in (OBJECT, DISTRIBUTION):
                columns[name] = None
            else:
                # A 0-d array is one value: emptied for any rows.
                _zero_rows(value, kind, selection if value.ndim else EVERYTHING)
    except Exception as error:
        fault(prefix + name, "reset", error)


def _zero_rows(value: Any, kind: int, selection: Selection) -> None:
    if kind == ARRAY:
        value[selection.index] = None if value.dtype.kind == "O" else np.zeros((), value.dtype)
    elif kind == TENSOR:
        value[selection.of_tensor(value)] = 0
    elif kind == RAGGED:
        value[selection.of_rows] = 0
    else:
        raise TypeError("it has no rows that could be written to")


def iterate(source: Node, length: int) -> Iterator[Node]:
    """Yield the rows `source[0]` to `source[length - 1]`, in one pass over all leaves."""
    cls = type(source)
    names = tuple(source.__dict__)
    columns = [_rows_of(value, length) for value in source.__dict__.values()]
    unit = unit_of(source)
    for row in zip(*columns, strict=True):
        batch = _new(cls)
        adopt(batch, dict(zip(names, row, strict=True)))
        if unit is not None:
            set_unit(batch, unit)
        yield batch


def _rows_of(value: Any, length: int) -> Iterator[Any]:
    kind = KINDS[type(value)]
    if kind == NODE:
        return iterate(value, length) if value.__dict__ else (node(type(value), {}) for _ in range(length))
    if kind == DISTRIBUTION:
        return (slice_distribution(value, Selection(row)) for row in range(length))
    if kind == OBJECT:
        return repeat(value, length)
    return islice(iter(value), length)


def split_rows(
    source: Node, size: int, shuffle: bool, merge_last: bool, rng: np.random.Generator | None
) -> Iterator[Node]:
    """Yield batches of `size` rows, -1 for all; `merge_last` merges a shorter last batch into the previous one."""
    length = shortest(source.__dict__) or 0
    if size == -1:
        size = max(length, 1)
    starts = list(range(0, length, size))
    if merge_last and len(starts) > 1 and length % size:
        starts.pop()
    stops = [*starts[1:], length]
    if not shuffle:
        for start, stop in zip(starts, stops, strict=False):
            yield with_unit_of(source, _select_plain(source, slice(start, stop), ""))
        return
    order = np.random.permutation(length) if rng is None else rng.permutation(length)
    for start, stop in zip(starts, stops, strict=False):
        yield with_unit_of(source, _select(source, Selection(order[start:stop]), ""))

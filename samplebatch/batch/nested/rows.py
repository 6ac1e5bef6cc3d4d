"""Rows of nested batches: count, index, assign, zero, iterate, split, stack and concatenate.

Batches that are stacked or concatenated may have different names. A name that a batch lacks or only reserves is padded
with zeros, False or None. A name that is a nested batch in only some batches raises an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any, Final, Literal, cast

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
from samplebatch.batch.nested.values import join_name, object_rows, parse, settle_rows, stack_tensors
from samplebatch.column import memory
from samplebatch.column.convert import as_ragged
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RowIndexError, SampleBatchError, near_names

_ndarray = np.ndarray
_NO_NAMES: Final[Mapping[str, Any]] = {}
_new = object.__new__


def shortest(values: Mapping[str, Any], prefix: str = "") -> int | None:
    """Return the length of the shortest leaf, without None and reserved names; return None if no leaves remain.

    Raises ColumnTypeError if a leaf is a scalar.
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
    """Return, for every dimension common to all leaves, the smallest extent; a reserved name has no dimensions."""
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

    Raises RowIndexError if the batch is empty, or the index is out of bounds for a leaf.
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
                # NumPy returns a 0-d array for an index with an ellipsis, even if the array contains a single object.
                wrapped = value.dtype.hasobject and type(picked) is _ndarray and picked.ndim == 0
                selected[name] = picked.item() if wrapped else picked
            elif kind == NODE:
                selected[name] = _select(value, selection, f"{prefix}{name}.")
            elif kind == TENSOR:
                selected[name] = value[selection.of_tensor(value)]
            elif kind == RAGGED:
                # An index with several dimensions returns an object array of rows.
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
                    raise ValueError(f"values for a nested batch must be a Batch or a dict, got a {type(new).__name__}")
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
    """Reset all or the indexed rows of every leaf in place: numbers become zero, objects become None."""
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
                # A 0-d array has no rows: its value is reset for any index.
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
    """Yield batches of `size` rows (-1: all rows); `merge_last` merges a shorter last batch into the previous batch."""
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


Missing = Literal["error", "zero", "nan"]
"""Policy for a name that a batch lacks: raise an error, pad with zeros, or pad with NaN."""


class _Absent:
    """Placeholder for the value of a name that a batch lacks or only reserves."""


_ABSENT: Final = _Absent()
_ABSENT_KIND: Final = -1
KINDS[_Absent] = _ABSENT_KIND
_ARRAYS: Final = {np.ndarray}
_ARRAY_KINDS: Final = {ARRAY}
_UNPARSED: Final = {ARRAY, SEQUENCE, RECORD}
_NESTED_KINDS: Final = {NODE, MAPPING, _ABSENT_KIND}
_FIRST_OBJECT: Final = np.dtype(object).num
_POOLED_NBYTES: Final = 1 << 18
"""Minimum size in bytes of a result from the memory pool; below it, the pool's overhead exceeds its benefit."""

Join = Callable[[list[Any], set[int], str], Any]
"""Function that joins the values of one name, called with values, kinds and dotted name."""


def stack_nodes(
    make: type[Node], batches: Sequence[Any], prefix: str = "", axis: int = 0, missing: Missing = "zero"
) -> Node:
    """Stack n batches or dicts along a new axis: leaves of shape (...) become (n, ...) for axis 0.

    Raises ColumnMismatchError if names or structures differ and cannot be padded. Raises ColumnTypeError if a name has
    both tensors and arrays, or tensors of different shapes. The message of each error contains the name of the leaf.
    """
    _check_missing(missing)

    def join(rows: list[Any], kinds: set[int], path: str) -> Any:
        if _ABSENT_KIND not in kinds:
            return _stack_leaves(rows, kinds, make, path, axis)
        present = [position for position, row in enumerate(rows) if row is not _ABSENT]
        if axis != 0 or missing == "error":
            where = "" if missing == "error" else f" along axis {axis}"
            raise ColumnMismatchError(
                f"column {path!r} must be in every batch to be stacked{where}, got {len(present)} of {len(rows)}"
            )
        block = _stack_leaves([rows[position] for position in present], kinds - {_ABSENT_KIND}, make, path, 0)
        padded = _make_padding(block, len(rows), missing, path)
        padded[present] = block
        return padded

    return node(make, _join(_entries_of(batches, "stacked"), make, prefix, join))


def concatenate_nodes(make: type[Node], batches: Sequence[Any], missing: Missing = "zero") -> Node:
    """Concatenate batches or dicts along the first axis: leaves of shape (n_i, ...) become (sum of n_i, ...).

    Raises ColumnMismatchError if row shapes differ, a value has no rows, or a batch lacks a name and `missing` does not
    permit padding. Raises ColumnTypeError if a name has both tensors and arrays.
    """
    _check_missing(missing)
    entries = _entries_of(batches, "concatenated")
    lengths: list[int] = []

    def join(rows: list[Any], kinds: set[int], path: str) -> Any:
        if _ABSENT_KIND not in kinds:
            return _concatenate_leaves(rows, kinds, path)
        if not lengths:
            lengths.extend(shortest(entry) or 0 for entry in entries)
        lacking = [row is _ABSENT and n > 0 for row, n in zip(rows, lengths, strict=True)]
        if missing == "error" and any(lacking):
            raise ColumnMismatchError(
                f"column {path!r} must be in every batch to be concatenated, batch {lacking.index(True)} lacks it"
            )
        present = [row for row in rows if row is not _ABSENT]
        block = _concatenate_leaves(present, kinds - {_ABSENT_KIND}, path)
        if not any(lacking):
            return block
        extents = [n if row is _ABSENT else len(row) for row, n in zip(rows, lengths, strict=True)]
        if KINDS[type(block)] == RAGGED:
            present_rows = np.repeat([row is not _ABSENT for row in rows], extents)
            return block.spread(len(present_rows), np.flatnonzero(present_rows))
        padded = _make_padding(block, sum(extents), missing, path)
        start = copied = 0
        for row, extent in zip(rows, extents, strict=True):
            if row is not _ABSENT:
                padded[start : start + extent] = block[copied : copied + extent]
                copied += extent
            start += extent
        return padded

    return node(make, _join(entries, make, "", join))


def list_batches(batches: Iterable[Any]) -> list[Any]:
    """Return batches as a list; a single Batch is split into rows.

    Raises ColumnTypeError if the argument is not a sequence.
    """
    if KINDS[type(batches)] in (MAPPING, RECORD) or not isinstance(batches, Iterable):
        raise ColumnTypeError(f"batches to be joined must be in a list, got {type(batches).__name__}")
    return list(batches)


def list_one_or_more(batches: Any) -> list[Any]:
    """Return batches as a list; a single batch becomes a list of one batch."""
    return [batches] if values_of(batches) is not None else list_batches(batches)


def _check_missing(missing: str) -> None:
    if missing not in ("error", "zero", "nan"):
        raise ColumnMismatchError(f"missing must be 'error', 'zero' or 'nan', got {missing!r}")


def _entries_of(batches: Sequence[Any], participle: str) -> list[Mapping[str, Any]]:
    entries = _names_of(batches, set(map(type, batches)))
    for position, names in enumerate(entries):
        if names is None:
            type_name = type(batches[position]).__name__
            raise ColumnMismatchError(
                f"values to be {participle} must be Batches or dicts, got {type_name} at place {position}"
            )
    return cast("list[Mapping[str, Any]]", entries)


def _names_of(rows: Sequence[Any], types: set[type]) -> Sequence[Mapping[str, Any] | None]:
    """Return the names and values of each row; None for a row of another type."""
    if len(types) == 1:
        (cls,) = types
        if cls is dict:
            return rows
        if issubclass(cls, Node):
            return [row.__dict__ for row in rows]
    return [values_of(row) for row in rows]


def _join(entries: list[Mapping[str, Any]], make: type[Node], prefix: str, join: Join) -> dict[str, Any]:
    """Stack or concatenate the values of all names that occur in any batch, in one traversal."""
    names = dict.fromkeys(chain.from_iterable(entries))
    uniform = set(map(len, entries)) == {len(names)}
    joined: dict[str, Any] = {}
    for name in names:
        rows = [entry[name] for entry in entries] if uniform else [entry.get(name, _ABSENT) for entry in entries]
        types = set(map(type, rows))
        path = prefix + name if type(name) is str else join_name(name, prefix)
        if types == _ARRAYS and rows[0].dtype.num < _FIRST_OBJECT:
            kinds = _ARRAY_KINDS
        else:
            kinds = {KINDS[cls] for cls in types}
            if kinds & _UNPARSED:
                # Values of a dict are not parsed yet: lists, strings, rows of dicts.
                rows = [parse(row, make, path) if KINDS[type(row)] in _UNPARSED else row for row in rows]
                types = set(map(type, rows))
                kinds = {KINDS[cls] for cls in types}
            if NODE in kinds or MAPPING in kinds:
                nested = _names_of(rows, types)
                if kinds <= _NESTED_KINDS:
                    children = [_NO_NAMES if child is None else child for child in nested]
                    joined[name] = node(make, _join(children, make, path + ".", join))
                    continue
                if any(nested):
                    raise ColumnMismatchError(f"column {path!r} must be a nested batch in all or in none, got both")
                rows = [row if child is None else _ABSENT for row, child in zip(rows, nested, strict=True)]
                kinds = {KINDS[type(row)] for row in rows}
        try:
            joined[name] = join(rows, kinds, path)
        except SampleBatchError:
            raise
        except Exception as error:
            fault(path, "joined", error)
    return joined


def _stack_leaves(rows: list[Any], kinds: set[int], make: type[Node], path: str, axis: int) -> Any:
    if RAGGED in kinds:
        # A stack of ragged columns has two axes of rows and cannot be stored as a ragged column.
        rows = [row.to_numpy() if KINDS[type(row)] == RAGGED else row for row in rows]
        kinds = kinds - {RAGGED} | {ARRAY}
    if kinds == {ARRAY, NUMBER}:
        rows, kinds = list(map(np.asarray, rows)), {ARRAY}
    if kinds == {ARRAY}:
        try:
            block = np.array(rows)
        except ValueError:
            warnings.warn(f"column {path!r}: arrays of different shapes are stacked as objects", stacklevel=6)
            return object_rows(rows)
        if axis == 0:
            return block
        if not -block.ndim <= axis < block.ndim:
            raise _no_axis(path, axis)
        return np.ascontiguousarray(np.moveaxis(block, 0, axis))
    if TENSOR in kinds:
        if kinds != {TENSOR}:
            raise _mixed_kinds(path)
        return stack_tensors(rows, path, axis)
    if kinds == {FOREIGN}:
        return rows[0].__array_namespace__().stack(rows, axis=axis)
    if axis not in (0, -1):
        raise _no_axis(path, axis)
    if DISTRIBUTION in kinds:
        return object_rows(rows)
    if ARRAY in kinds:
        rows = [row.item() if KINDS[type(row)] == ARRAY and row.ndim == 0 else row for row in rows]
    return settle_rows(rows, make, path)


def _concatenate_leaves(rows: list[Any], kinds: set[int], path: str) -> Any:
    if RAGGED in kinds:
        columns: list[Any] = [as_ragged(row, path) for row in rows]
        if len(set(map(type, columns))) > 1:
            raise _mixed_kinds(path)
        return type(columns[0]).concat(columns, path)
    if kinds == {ARRAY}:
        first = rows[0]
        if len(rows) > 1 and first.nbytes * len(rows) >= _POOLED_NBYTES and not first.dtype.hasobject:
            dtype = np.result_type(*rows)
            if not dtype.hasobject:
                out = memory.empty((sum(map(len, rows)), *first.shape[1:]), dtype)
                return np.concatenate(rows, 0, out, casting="same_kind")
        return np.concatenate(rows)
    if TENSOR in kinds:
        if kinds != {TENSOR}:
            raise _mixed_kinds(path)
        import torch

        return torch.cat(rows)
    if kinds == {FOREIGN}:
        return rows[0].__array_namespace__().concat(rows, axis=0)
    raise ColumnMismatchError(
        f"column {path!r} must have rows to be concatenated, got single values; stack the batches instead"
    )


def _no_axis(path: str, axis: int) -> ColumnMismatchError:
    return ColumnMismatchError(f"column {path!r} must have more dimensions to be stacked along axis {axis}")


def _mixed_kinds(path: str) -> ColumnTypeError:
    return ColumnTypeError(
        f"column {path!r} must contain tensors in all batches or in none, got both; use to_torch or to_numpy before"
    )


def _make_padding(block: Any, length: int, missing: Missing, path: str) -> Any:
    """Return `length` padding rows with the dtype and row shape of `block`."""
    shape = (length, *block.shape[1:])
    if KINDS[type(block)] == TENSOR:
        if missing == "nan":
            if not (block.is_floating_point() or block.is_complex()):
                raise _no_nan(path, block.dtype)
            return block.new_full(shape, float("nan"))
        return block.new_zeros(shape)
    if block.dtype.kind == "O":
        return np.empty(shape, object)
    if missing == "nan":
        if block.dtype.kind not in "fcmM":
            raise _no_nan(path, block.dtype)
        return np.full(shape, np.array("NaT" if block.dtype.kind in "mM" else np.nan, block.dtype))
    return np.zeros(shape, block.dtype)


def _no_nan(path: str, dtype: Any) -> ColumnMismatchError:
    return ColumnMismatchError(
        f"column {path!r} must be of a dtype that has NaN to be padded with it, got {dtype}; pad with zeros"
    )

"""Joining: stacking and concatenating nested batches that need not have the same names.

Names that a batch lacks or only reserves are padded with zeros, False or None. A name that is a nested batch in only
some batches cannot be joined.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Literal, cast

import numpy as np

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
    fault,
    node,
    values_of,
)
from samplebatch.batch.nested.rows import shortest
from samplebatch.batch.nested.values import join_name, object_rows, parse, settle_rows, stack_tensors
from samplebatch.column import memory
from samplebatch.column.convert import as_ragged
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, SampleBatchError

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
_NO_NAMES: Final[Mapping[str, Any]] = {}
_POOLED_NBYTES: Final = 1 << 18
"""Minimum size in bytes of a result from the memory pool; below it, the pool's overhead exceeds its benefit."""

Join = Callable[[list[Any], set[int], str], Any]
"""Function that joins the values of one name, called with values, kinds and dotted name."""


def stack(make: type[Node], batches: Sequence[Any], prefix: str = "", axis: int = 0, missing: Missing = "zero") -> Node:
    """Join n batches or dicts along a new axis: leaves of shape (...) become (n, ...) for axis 0.

    Raises ColumnMismatchError if names or structures differ and cannot be padded. Raises ColumnTypeError if a name has
    both tensors and arrays, or tensors of different shapes. Each names the leaf.
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


def cat(make: type[Node], batches: Sequence[Any], missing: Missing = "zero") -> Node:
    """Concatenate batches or dicts: leaves of shape (n_i, ...) become (sum of n_i, ...).

    Raises ColumnMismatchError if row shapes differ, or a value has no rows; if names differ and `missing` does not
    allow it. Raises ColumnTypeError if a name has both tensors and arrays.
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
    """Return batches as a list; a single Batch is split into its rows.

    Raises ColumnTypeError if the argument is not a sequence.
    """
    if KINDS[type(batches)] in (MAPPING, RECORD) or not isinstance(batches, Iterable):
        raise ColumnTypeError(f"batches to be joined must be in a list, got {type(batches).__name__}")
    return list(batches)


def list_one_or_more(batches: Any) -> list[Any]:
    """Return batches as a list; a single batch becomes a list of one."""
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
    """Return the names and values of each row, None for a row of another type."""
    if len(types) == 1:
        (cls,) = types
        if cls is dict:
            return rows
        if issubclass(cls, Node):
            return [row.__dict__ for row in rows]
    return [values_of(row) for row in rows]


def _join(entries: list[Mapping[str, Any]], make: type[Node], prefix: str, join: Join) -> dict[str, Any]:
    """Join the values of every name in any batch, in one traversal."""
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
        # Rows of rows that vary in shape are no ragged column.
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
        f"column {path!r} must hold tensors in all batches or in none, got both; use to_torch or to_numpy before"
    )


def _make_padding(block: Any, length: int, missing: Missing, path: str) -> Any:
    """Return `length` rows of padding with the block's dtype and row shape."""
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

"""Operations on elements of ragged rows: reductions, cumulative sums and operands aligned with the rows.

Elements are arrays, or tensors on any device. No function loops over rows in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.column import memory
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnMismatchError

Offsets = npt.NDArray[np.int64]

_SUMS: dict[str, Any] = {"b": np.int64, "i": np.int64, "u": np.uint64}
"""Dtypes of sums by element kind, as in NumPy; floats keep their dtype."""

_UFUNCS: dict[str, Any] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "any": np.logical_or}


def repeat(values: Any, rows: VaryingRows) -> Any:
    """Repeat each row's value once per element of the row: shape (n,) becomes (m,).

    >>> from samplebatch.column import RaggedColumn
    >>> repeat(np.array([5, 7]), RaggedColumn.from_rows([[1, 2], [3]], "x"))
    array([5, 5, 7])
    """
    if isinstance(values, np.ndarray):
        return np.repeat(values, rows.lengths)
    import torch

    lengths = torch.tensor(rows.lengths, device=values.device)
    # Passing the number of elements avoids waiting for the device.
    return torch.repeat_interleave(values, lengths, output_size=int(rows.offsets[-1] - rows.offsets[0]))


def operand(rows: VaryingRows, other: Any) -> Any:
    """Return an operand with one value per element of the ragged rows; a single number is returned unchanged.

    Raises ColumnLengthError if the row lengths of two ragged columns differ, or an array operand does not have one
    value per row. Raises ColumnMismatchError if one operand has arrays and the other has tensors.
    """
    if isinstance(other, VaryingRows):
        check_alike(rows, other)
        return other.flat
    if not hasattr(other, "ndim"):
        if not isinstance(other, list | tuple):
            return other
        other = np.asarray(other)
    if not other.ndim:
        return other
    if tuple(other.shape) != (len(rows),):
        raise ColumnLengthError(
            f"an operand must be a number, have one value per row, shape {(len(rows),)}, or be a ragged column of the "
            f"same lengths, got shape {tuple(other.shape)}"
        )
    if isinstance(rows.elements, np.ndarray):
        other = np.asarray(other)
    elif isinstance(other, np.ndarray):
        import torch

        other = torch.tensor(other, device=rows.elements.device)
    return repeat(other, rows)


def check_alike(rows: VaryingRows, other: VaryingRows, what: str = "an operand") -> None:
    """Check that two ragged columns have rows of equal shapes.

    Raises ColumnLengthError if the shapes of a row differ; the message contains the first row that differs. Raises
    ColumnMismatchError if one column has arrays and the other has tensors.
    """
    if isinstance(rows.elements, np.ndarray) != isinstance(other.elements, np.ndarray):
        raise ColumnMismatchError(
            f"{what} must be a {rows.kind} column, like the rows, got {other.kind}; convert the batch with to_torch "
            "or to_numpy"
        )
    if other.offsets is rows.offsets and other.shapes is rows.shapes:
        return
    if len(rows) != len(other):
        raise ColumnLengthError(f"{what} must have {len(rows)} rows, got {len(other)}")
    mine, theirs = rows.extents, other.extents
    if mine.shape != theirs.shape:
        raise ColumnLengthError(f"{what} must have rows of {mine.shape[1]} dimensions, got {theirs.shape[1]}")
    differs = np.flatnonzero((mine != theirs).any(1))
    if len(differs):
        row = int(differs[0])
        shapes = tuple(mine[row].tolist()), tuple(theirs[row].tolist())
        raise ColumnLengthError(
            f"{what} must have rows of the same lengths, got {shapes[1]} for {shapes[0]} in row {row}"
        )


def reduce(how: str, rows: VaryingRows, initial: Any = None) -> Any:
    """Reduce the elements of each row to one value, shape (n,).

    Raises ArgumentError if the minimum or maximum of a row without elements is requested without `initial`.

    how: `"sum"`, `"min"`, `"max"`, `"any"` or `"all"`.
    rows: any rows; every element of a row is included, regardless of the number of dimensions.
    initial: minimum or maximum of rows without elements.

    >>> from samplebatch.column import RaggedColumn
    >>> reduce("sum", RaggedColumn.from_rows([[1, 2], [], [3]], "x"))
    array([3, 0, 3])
    """
    lengths, is_array = rows.lengths, isinstance(rows.elements, np.ndarray)
    flat = rows.flat
    if how == "all":
        misses = reduce("any", type(rows)(_is_zero(flat), *rows.layout))
        return ~misses
    if how in ("min", "max") and initial is None:
        empty = np.flatnonzero(lengths == 0)
        if len(empty):
            raise ArgumentError(
                f"rows must have elements to have a {how}, got none in row {int(empty[0])}; pass initial, the "
                "value for rows without elements"
            )
    if how == "any":
        flat = ~_is_zero(flat)
    if not is_array:
        return _reduce_tensor(how, flat, rows, initial)
    ufunc = _UFUNCS[how]
    dtype = np.dtype(_SUMS.get(flat.dtype.kind, flat.dtype)) if how == "sum" else flat.dtype
    starts = rows.layout[0][:-1]
    full = lengths > 0
    if full.all() and len(rows):
        return ufunc.reduceat(flat, starts, dtype=dtype)
    out = np.full(len(rows), 0 if initial is None else initial, dtype)
    if full.any():
        out[full] = ufunc.reduceat(flat, starts[full], dtype=dtype)
    return out


def _is_zero(flat: Any) -> Any:
    return ~flat if str(flat.dtype).endswith("bool") else flat == 0


def _reduce_tensor(how: str, flat: Any, rows: VaryingRows, initial: Any) -> Any:
    import torch

    ids = repeat(torch.arange(len(rows), device=flat.device), rows)
    if how == "sum":
        values = flat if flat.is_floating_point() or flat.is_complex() else flat.long()
        return values.new_zeros(len(rows)).index_add_(0, ids, values)
    values = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
    out = values.new_full((len(rows),), 0 if initial is None else initial)
    out.scatter_reduce_(0, ids, values, "amin" if how == "min" else "amax", include_self=False)
    return out.bool() if flat.dtype == torch.bool else out


def mean(rows: VaryingRows, counts: Any) -> Any:
    """Return the sum of each row divided by the row's count, shape (n,); NaN for a count of 0."""
    if isinstance(rows.elements, np.ndarray):
        sums = reduce(
            "sum", rows if rows.dtype.kind in "fc" else type(rows)(rows.flat.astype(np.float64), *rows.layout)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums / counts.astype(sums.dtype if rows.dtype.kind in "fc" else np.float64)
    import torch

    sums = reduce("sum", rows)
    return sums / torch.as_tensor(counts, device=sums.device)


def argmax(rows: VaryingRows) -> Any:
    """Return the position of the first largest element in each row, shape (n,); all rows must have elements."""
    flat = rows.flat
    highest = repeat(reduce("max", rows), rows)
    # NaN is the largest element, and does not equal itself.
    matches = (flat == highest) | (flat != flat)
    if isinstance(flat, np.ndarray):
        matching = np.flatnonzero(matches)
        starts = rows.layout[0][:-1]
        return matching[np.searchsorted(matching, starts)] - starts
    import torch

    positions = torch.arange(len(flat), device=flat.device)
    last = torch.where(matches, positions, len(flat))
    first = _reduce_tensor("min", last, rows, None)
    return first - torch.tensor(rows.layout[0][:-1], device=flat.device)


def accumulate(rows: VaryingRows, *, reverse: bool) -> Any:
    """Return the cumulative sums of each row, shape (m,): from the row's start, or from the row's end if `reverse`."""
    flat = rows.flat
    offsets = rows.layout[0]
    if not isinstance(flat, np.ndarray):
        return _accumulate_tensor(flat, rows, offsets, reverse=reverse)
    if flat.dtype.kind == "f":
        sums = accumulate_floats(flat, offsets, np.zeros(len(rows)), 1.0, backwards=reverse)
        return sums.astype(flat.dtype, copy=False)
    # Exact: overflows in the total sum cancel in the subtraction.
    dtype = np.dtype(_SUMS.get(flat.dtype.kind, flat.dtype))
    total = np.zeros(len(flat) + 1, dtype)
    np.cumsum(flat, dtype=dtype, out=total[1:])
    if reverse:
        return np.repeat(total[offsets[1:]], rows.lengths) - total[:-1]
    return total[1:] - np.repeat(total[offsets[:-1]], rows.lengths)


def accumulate_floats(
    flat: npt.NDArray[Any], offsets: Offsets, initial: npt.NDArray[Any], decay: float, *, backwards: bool
) -> npt.NDArray[np.float64]:
    """Compute discounted cumulative sums of each row, in float64; see `kernels.accumulate_rows`."""
    from samplebatch import kernels

    sums = memory.empty(flat.shape, np.dtype(np.float64))
    values = np.ascontiguousarray(flat, np.float64)
    kernels.accumulate_rows(values, np.ascontiguousarray(offsets, np.intp), initial, decay, backwards, sums)
    return sums


def _accumulate_tensor(flat: Any, rows: VaryingRows, offsets: Offsets, *, reverse: bool) -> Any:
    import torch

    wide = flat.double() if flat.is_floating_point() else flat.long() if not flat.is_complex() else flat
    if flat.device.type == "cpu" and flat.is_floating_point():
        zeros = np.zeros(len(rows))
        sums = torch.from_numpy(accumulate_floats(wide.numpy(), offsets, zeros, 1.0, backwards=reverse))
        return sums.to(flat.dtype)
    total = torch.cat([wide.new_zeros(1), wide.cumsum(0)])
    ends = torch.tensor(offsets, device=flat.device)
    sums = repeat(total[ends[1:]], rows) - total[:-1] if reverse else total[1:] - repeat(total[ends[:-1]], rows)
    return sums.to(flat.dtype) if flat.is_floating_point() else sums


def apply_ufunc(rows: VaryingRows, ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Apply a NumPy function to the elements of ragged columns; see `RaggedRows`."""
    if method != "__call__":
        raise ArgumentError(f"NumPy's {ufunc.__name__}.{method} must be applied to row.flat, got a ragged column")
    outs = options.pop("out", ())
    if outs:
        for out in outs:
            if not isinstance(out, VaryingRows):
                raise ColumnMismatchError(f"out must be a ragged column, got {type(out).__name__}")
            check_alike(rows, out, "out")
        options["out"] = tuple(out.flat for out in outs)
    if "where" in options:
        options["where"] = operand(rows, options["where"])
    result = ufunc(*(operand(rows, value) for value in inputs), **options)
    if outs:
        return outs[0] if len(outs) == 1 else outs
    return (
        tuple(with_elements(rows, value) for value in result)
        if isinstance(result, tuple)
        else with_elements(rows, result)
    )


def with_elements(rows: VaryingRows, elements: Any) -> Any:
    """Return a column with the row shapes of `rows` and the elements in `elements`."""
    return type(rows)(elements, *rows.layout)


def map_elements(rows: VaryingRows, function: Callable[[Any], Any]) -> Any:
    """Apply a function of one array or tensor to all elements at once; see `RaggedRows.map`."""
    flat = rows.flat
    result = function(flat)
    if type(result) is not type(flat) or tuple(result.shape) != tuple(flat.shape):
        actual = getattr(result, "shape", type(result).__name__)
        raise ColumnLengthError(f"the function must return one element for each of {len(flat)}, got {actual}")
    return with_elements(rows, result)

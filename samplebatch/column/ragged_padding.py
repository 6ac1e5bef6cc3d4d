"""Padding of ragged rows to equal length in one array or tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import choice, whole
from samplebatch.column import memory
from samplebatch.column.types import movable
from samplebatch.column.varying_rows import VaryingRows, offsets_of
from samplebatch.errors import ColumnLengthError, ColumnMismatchError

if TYPE_CHECKING:
    import torch

Side = Literal["left", "right"]
SIDES = ("left", "right")

_COPIED_ROW = 48
"""Mean number of elements per row from which copying row by row is faster than assignment by a mask."""


def pad(rows: VaryingRows, value: Any, side: str, length: int | None, multiple_of: int | None, out: Any) -> Any:
    """Copy rows into an array or a tensor of shape (n, width, ...); see `RaggedRows.pad`."""
    choice("side", side, SIDES)
    extents = rows.extents
    widest = extents.max(0, initial=0).tolist()
    if out is not None and length is None and multiple_of is None and getattr(out, "ndim", 0) > 1:
        length = int(out.shape[1])
    widest[0] = padded_width(extents[:, 0], length, multiple_of)
    shape = (len(rows), *widest)
    if out is not None:
        _check_out(rows, shape, out)
    flat = rows.flat
    if isinstance(flat, np.ndarray):
        target = memory.empty(shape, flat.dtype) if out is None else out if isinstance(out, np.ndarray) else out.numpy()
        target[...] = value
        _copy_rows(target, flat, extents, side)
        return target if out is None else out
    return _pad_tensor(flat, shape, extents, value, side, out)


def _check_out(rows: VaryingRows, shape: tuple[int, ...], out: Any) -> None:
    if tuple(getattr(out, "shape", ())) != shape:
        actual = tuple(getattr(out, "shape", ()))
        raise ColumnMismatchError(f"out must have shape {shape}, got {actual}")
    is_array = isinstance(rows.flat, np.ndarray)
    dtypes = {str(rows.dtype).removeprefix("torch."), str(out.dtype).removeprefix("torch.")}
    if len(dtypes) > 1:
        raise ColumnMismatchError(f"out must have dtype {rows.dtype}, got {out.dtype}")
    if is_array and not isinstance(out, np.ndarray) and out.device.type != "cpu":
        raise ColumnMismatchError(f"out must be on the host, as the rows are, got a tensor on {out.device}")


def _pad_tensor(
    flat: torch.Tensor, shape: tuple[int, ...], extents: npt.NDArray[np.int64], value: Any, side: str, out: Any
) -> Any:
    import torch

    if not flat.dtype.is_signed and flat.dtype != torch.bool and value < 0:
        # Torch would wrap the value around.
        raise OverflowError(f"rows of {flat.dtype} must be padded with a non-negative number, got {value}")
    if out is None:
        target: torch.Tensor = flat.new_full(shape, value)
    else:
        target = torch.from_numpy(out) if isinstance(out, np.ndarray) else out
        target.fill_(value)
    if flat.device.type == target.device.type == "cpu" and target.is_contiguous():
        _copy_rows(movable(target).numpy(), movable(flat).numpy(), extents, side)
    else:
        inside = torch.ones(shape, dtype=torch.bool, device=target.device)
        moved = torch.tensor(extents, device=target.device)
        for axis, width in enumerate(shape[1:]):
            columns = torch.arange(width, device=target.device).reshape(-1, *(1,) * (len(shape) - axis - 2))
            limits = moved[:, axis].reshape(-1, *(1,) * (len(shape) - 1))
            inside &= columns >= width - limits if side == "left" and not axis else columns < limits
        movable(target).masked_scatter_(inside, movable(flat).to(target.device))
    return target if out is None else out


def _copy_rows(target: npt.NDArray[Any], flat: npt.NDArray[Any], extents: npt.NDArray[np.int64], side: str) -> None:
    n, width, *trailing = target.shape
    if len(flat) >= _COPIED_ROW * n and (not trailing or bool((extents[:, 1:] == trailing).all())):
        lengths = extents[:, 0]
        stops = offsets_of(lengths)
        elements = flat.reshape(-1, *trailing)
        firsts = (width - lengths).tolist() if side == "left" else [0] * n
        for row, start, length, first in zip(target, stops.tolist(), lengths.tolist(), firsts, strict=False):
            row[first : first + length] = elements[start : start + length]
        return
    inside = np.ones(target.shape, np.bool_)
    for axis, widest in enumerate(target.shape[1:]):
        columns = np.arange(widest).reshape(-1, *(1,) * (target.ndim - axis - 2))
        limits = extents[:, axis].reshape(-1, *(1,) * (target.ndim - 1))
        inside &= columns >= widest - limits if side == "left" and not axis else columns < limits
    target[inside] = flat


def padded_width(lengths: npt.NDArray[np.int64], length: int | None = None, multiple_of: int | None = None) -> int:
    """Return the width of padded rows.

    Raises ColumnLengthError if a row is longer than `length`. Raises ArgumentError if `length` or `multiple_of` is not
    a valid integer.

    >>> padded_width(np.array([3, 5])), padded_width(np.array([3, 5]), multiple_of=8)
    (5, 8)
    """
    width = int(lengths.max(initial=0))
    if length is not None:
        if whole("length", length) < width:
            raise ColumnLengthError(
                f"length must be at least {width}, the length of the longest row, got {length}; truncate the rows first"
            )
        width = int(length)
    if multiple_of is not None:
        divisor = whole("multiple_of", multiple_of, 1)
        width = -(-width // divisor) * divisor
    return width


def mask(rows: VaryingRows, side: str, length: int | None, multiple_of: int | None) -> Any:
    """Return a mask that is true for elements and false for padding, shape (n, width); see `RaggedRows.mask`."""
    _, columns, limits, width = _grid(rows, side, length, multiple_of)
    return columns >= width - limits if side == "left" else columns < limits


def positions(rows: VaryingRows, side: str, length: int | None, multiple_of: int | None) -> Any:
    """Return each element's position in the padded row, shape (n, width); see `RaggedRows.positions`."""
    xp, columns, limits, width = _grid(rows, side, length, multiple_of)
    if side == "left":
        counted = columns - (width - limits)
        return counted.clip(0) if xp is np else counted.clamp_(min=0)
    return xp.where(columns < limits, columns, 0)


def _grid(rows: VaryingRows, side: str, length: int | None, multiple_of: int | None) -> tuple[Any, Any, Any, int]:
    choice("side", side, SIDES)
    lengths = rows.extents[:, 0]
    width = padded_width(lengths, length, multiple_of)
    if isinstance(rows.elements, np.ndarray):
        return np, np.arange(width), lengths[:, None], width
    import torch

    device = rows.elements.device
    return torch, torch.arange(width, device=device), torch.tensor(lengths, device=device)[:, None], width


def places_of(rows: VaryingRows) -> Any:
    """Return a flat array, shape (m,), with each element's position in the element's row.

    >>> from samplebatch.column import RaggedColumn
    >>> places_of(RaggedColumn.from_rows([[7, 8], [9]], "ids"))
    array([0, 1, 0])
    """
    from samplebatch import kernels

    offsets = np.ascontiguousarray(rows.layout[0], np.intp)
    positions = memory.empty((int(offsets[-1]),), np.dtype(np.intp))
    kernels.count_positions(offsets, positions)
    if isinstance(rows.elements, np.ndarray):
        return positions
    import torch

    return torch.from_numpy(positions).to(rows.elements.device)

"""Lossless casts: conversions to another dtype that change no value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.column.types import holds
from samplebatch.errors import ColumnMismatchError

_KIND_RANK = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}


def cast_exactly(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Convert an array to a dtype of the same or a wider kind, or give None if a value would change.

    Examples
    --------
    >>> cast_exactly(np.array([1, 2]), np.dtype("f4")), cast_exactly(np.array([1.5]), np.dtype("i8"))
    (array([1., 2.], dtype=float32), None)
    >>> cast_exactly(np.array([2**53 + 1]), np.dtype("f8")) is None
    True
    """
    given = array.dtype
    if given == dtype:
        return array
    if holds(dtype, given):
        return array.astype(dtype)
    if _KIND_RANK.get(given.kind, 9) > _KIND_RANK.get(dtype.kind, -1):
        return None
    if not array.size:
        return array.astype(dtype)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return array.astype(dtype) if int(array.min()) >= bounds.min and int(array.max()) <= bounds.max else None
    if given.kind in "iu":
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        real = cast.real
        # Past the integer's own range the way back is undefined.
        exact = bool(np.isfinite(real).all()) and float(real.max()) < 2.0 ** (8 * given.itemsize - (given.kind == "i"))
        return cast if exact and bool(np.array_equal(real.astype(given), array)) else None
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    # Part by part, because a complex number counts as NaN, and as equal to any other such, if either of its parts is.
    exact = all(np.array_equal(new.astype(old.dtype), old, equal_nan=True) for new, old in _parts(cast, array))
    return cast if exact else None


def _parts(new: npt.NDArray[Any], old: npt.NDArray[Any]) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Pair real parts, and imaginary ones where the old values have them."""
    pairs = [(new.real, old.real)]
    return [*pairs, (new.imag, old.imag)] if old.dtype.kind == "c" else pairs


def as_flags(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.bool_]:
    """Convert numbers to flags.

    Raises
    ------
    ColumnMismatchError
        If one is neither 0 nor 1; names the column.

    Examples
    --------
    >>> as_flags(np.array([0.0, 1.0]), "terminated")
    array([False,  True])
    """
    if array.dtype.kind == "b":
        return array
    flags: npt.NDArray[np.bool_] = array != 0
    if not np.array_equal(flags, array):
        raise ColumnMismatchError(f"column {name!r} must have flags, 0 or 1 each, got other numbers")
    return flags


def wider(stored: np.dtype[Any], new: np.dtype[Any]) -> Sequence[np.dtype[Any]]:
    """List the dtypes that might hold the values of both, the likeliest first; `cast_exactly` tells whether one does.

    >>> wider(np.dtype("i8"), np.dtype("f8")), wider(np.dtype("i8"), np.dtype("U3"))
    ((dtype('float64'), dtype('float64')), ())
    """
    try:
        promoted = np.promote_types(stored, new)
    except TypeError:
        return ()
    if _KIND_RANK.get(stored.kind) is None or _KIND_RANK.get(new.kind) is None:
        return (promoted,) if promoted.kind == stored.kind == new.kind else ()
    if stored.kind in "iu" and new.kind in "iu":
        return (promoted, new) if promoted.kind in "iu" else (new,)
    return (promoted, new)

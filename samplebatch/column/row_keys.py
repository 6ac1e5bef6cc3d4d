"""Keys in the brackets of `column[...]`: a row, a slice, indices or a mask, resolved to rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.errors import RowIndexError

_INTP = np.dtype(np.intp)

Resolved = int | tuple[int, int] | npt.NDArray[np.intp]


def resolve(key: Any, n: int) -> Resolved:
    """Turn a key over n rows into a row, a range of rows `(start, stop)`, or the indices of rows, shape (k,).

    Parameters
    ----------
    key
        An integer, a slice, a sequence of integers, or a boolean mask of shape (n,). Negative rows count from the end.

    Raises
    ------
    RowIndexError
        If a row lies outside [-n, n), or the key is of another kind; names the first offender.

    Examples
    --------
    >>> resolve(-1, 4), resolve(slice(1, None), 4), resolve(slice(None, None, -2), 4)
    (3, (1, 4), array([3, 1]))
    >>> resolve([True, False, False, True], 4), resolve([2, -4], 4)
    (array([0, 3]), array([2, 0]))
    """
    if isinstance(key, slice):
        start, stop, step = key.indices(n)
        return (start, max(start, stop)) if step == 1 else np.arange(n)[key]
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        row = int(key)
        if not -n <= row < n:
            raise _outside(row, n)
        return row + n if row < 0 else row
    # As unsigned numbers, negative ones are larger than all rows.
    if type(key) is np.ndarray and key.dtype is _INTP and key.ndim == 1 and key.size and key.view(np.uintp).max() < n:
        return key.copy()
    indices = np.asarray(key)
    if indices.size == 0 and indices.ndim == 1 and not isinstance(key, np.ndarray):
        return np.empty(0, np.intp)
    if indices.ndim != 1 or indices.dtype.kind not in "biu":
        raise RowIndexError(
            f"rows must be picked by integers, a slice or a mask, got a {type(key).__name__} of dtype {indices.dtype} "
            f"and shape {indices.shape}"
        )
    if indices.dtype.kind == "b":
        if len(indices) != n:
            raise RowIndexError(f"a mask must have {n} entries, one for each row, got {len(indices)}")
        return np.flatnonzero(indices)
    rows = indices.astype(np.intp)
    if not rows.size:
        return rows
    lowest = indices.min()
    if lowest < -n or indices.max() >= n:
        outside = (indices < -n) | (indices >= n)
        raise _outside(indices[outside.argmax()], n)
    if lowest < 0:
        rows[rows < 0] += n
    return rows


def _outside(row: int | np.integer[Any], n: int) -> RowIndexError:
    return RowIndexError(f"row {row} must lie in [{-n}, {n}) of a column of {n} rows")

"""Flat arrays: the elements of rows laid end to end, and the offsets at which the rows lie in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.types import storage_of

_LONG_ROW = 160
"""Mean elements in a row from which joining views of the rows beats gathering their elements by index (`take`)."""


def gather(
    elements: npt.NDArray[Any], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Copy rows that lie anywhere in a flat array, shape (m,), end to end.

    Returns
    -------
    elements
        Those of the rows, in memory of their own.
    offsets
        Where the rows begin and end in them, shape (n + 1,).

    Examples
    --------
    >>> gather(np.arange(10), np.array([7, 0]), np.array([2, 1]))
    (array([7, 8, 0]), array([0, 2, 3]))
    """
    offsets = offsets_of(lengths)
    count = int(offsets[-1])
    out = memory.empty((count,), elements.dtype)
    if count > _LONG_ROW * len(lengths):
        np.concatenate(list(row_views(elements, starts, starts + lengths)), 0, out, casting="no")
    else:
        gathered = np.repeat(starts - offsets[:-1], lengths)
        gathered += np.arange(count)
        elements.take(gathered, 0, out, "clip")
    return out, offsets


def row_views(elements: Any, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Iterator[Any]:
    """View each row of a flat array or tensor by the offsets of its ends."""
    return map(elements.__getitem__, map(slice, starts.tolist(), stops.tolist()))


def offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Turn lengths, shape (n,), into offsets, shape (n + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def pad_rows(elements: npt.NDArray[Any], extents: npt.NDArray[np.int64], value: Any) -> npt.NDArray[Any]:
    """Copy rows that lie end to end into one array, each followed by a value up to the largest extents.

    Parameters
    ----------
    elements
        Shape (m,).
    extents
        Of each row, shape (n, ndim).
    value
        What fills up the rows.

    Examples
    --------
    >>> pad_rows(np.arange(5), np.array([[2], [3]]), -1).tolist()
    [[0, 1, -1], [2, 3, 4]]
    """
    widest = extents.max(0, initial=0)
    out = memory.empty((len(extents), *widest.tolist()), elements.dtype)
    out[...] = value
    inside = np.ones(out.shape, np.bool_)
    for axis, width in enumerate(widest.tolist()):
        places = np.arange(width).reshape(-1, *(1,) * (len(widest) - axis - 1))
        inside &= places < extents[:, axis].reshape(-1, *(1,) * len(widest))
    out[inside] = elements
    return out


def element_type(dtype: np.dtype[Any]) -> pa.DataType:
    """Return the Arrow type of one element: a list of two numbers where the dtype is complex."""
    storage = storage_of(dtype)
    return pa.list_(storage.arrow, 2) if storage.per_element else storage.arrow


def arrow_elements(elements: npt.NDArray[Any]) -> pa.Array:
    """View a flat array, shape (m,), as m Arrow values; a complex number is a list of two."""
    storage = storage_of(elements.dtype)
    buffers = [None, memory.as_buffer(elements)]
    if not storage.per_element:
        return pa.Array.from_buffers(storage.arrow, len(elements), buffers)
    parts = pa.Array.from_buffers(storage.arrow, 2 * len(elements), buffers)
    return pa.Array.from_buffers(element_type(elements.dtype), len(elements), [None], children=[parts])

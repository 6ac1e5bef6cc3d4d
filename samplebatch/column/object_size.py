"""How many bytes the Python objects of an Arrow array take, before they are made."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_LEAF_NBYTES, _NODE_NBYTES = 64, 128
"""Bytes of a number or an empty string with its place in a list, and of an empty dict, list or array with its place."""

_VIEWS = (pa.types.is_string_view, pa.types.is_binary_view)
_TEXTS = (pa.types.is_string, pa.types.is_binary)
_LARGE_TEXTS = (pa.types.is_large_string, pa.types.is_large_binary)
_LIST_VIEWS = (pa.types.is_list_view, pa.types.is_large_list_view)


def object_nbytes(array: pa.Array) -> int:
    """Estimate the bytes of the objects that an array becomes.

    Rows that have no bytes of their own count as much as any: nulls, empty structs, runs, views and indices of values
    that others have too. Only the sizes of the array's buffers need have been checked, as `Array.validate` does.

    Examples
    --------
    >>> object_nbytes(pa.nulls(1000)), object_nbytes(pa.array(["abc"] * 10).dictionary_encode())
    (64000, 670)
    """
    arrow, n = array.type, len(array)
    if isinstance(arrow, pa.BaseExtensionType):
        return object_nbytes(array.storage)
    if _is(arrow, _TEXTS):
        return n * _LEAF_NBYTES + _span(array, np.int32)
    if _is(arrow, _LARGE_TEXTS):
        return n * _LEAF_NBYTES + _span(array, np.int64)
    if _is(arrow, _VIEWS):
        return n * _LEAF_NBYTES + int(np.maximum(_buffer(array, 1, np.int32, 4)[::4], 0).sum(dtype=np.int64))
    if pa.types.is_dictionary(arrow):
        return n * _largest(array.dictionary)
    if pa.types.is_run_end_encoded(arrow):
        return n * _largest(array.values)
    if _is(arrow, _LIST_VIEWS):
        return n * _NODE_NBYTES + _repeated(array)
    if pa.types.is_struct(arrow):
        return n * _NODE_NBYTES + sum(object_nbytes(array.field(i)) for i in range(arrow.num_fields))
    if pa.types.is_fixed_size_list(arrow):
        values = array.values.slice(array.offset * arrow.list_size, n * arrow.list_size)
        return n * _NODE_NBYTES + object_nbytes(values)
    if pa.types.is_list(arrow) or pa.types.is_map(arrow):
        return n * _NODE_NBYTES + _listed(array, np.int32)
    if pa.types.is_large_list(arrow):
        return n * _NODE_NBYTES + _listed(array, np.int64)
    if pa.types.is_union(arrow):
        return n * sum(_NODE_NBYTES + _largest(array.field(i)) for i in range(arrow.num_fields))
    return n * (_LEAF_NBYTES + (arrow.byte_width if pa.types.is_fixed_size_binary(arrow) else 0))


def _is(arrow: pa.DataType, kinds: tuple[object, ...]) -> bool:
    return any(kind(arrow) for kind in kinds)  # type: ignore[operator]


def _buffer(array: pa.Array, place: int, dtype: npt.DTypeLike, per_row: int, more: int = 0) -> npt.NDArray[np.integer]:
    """View the numbers of an array's own rows in one of its buffers."""
    data = array.buffers()[place]
    if data is None or not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(data, dtype, len(array) * per_row + more, array.offset * per_row * np.dtype(dtype).itemsize)


def _span(array: pa.Array, dtype: npt.DTypeLike) -> int:
    """Return how much lies between the first and the last offset."""
    offsets = _buffer(array, 1, dtype, 1, 1)
    return int(offsets[-1]) - int(offsets[0]) if len(offsets) else 0


def _listed(array: pa.Array, dtype: npt.DTypeLike) -> int:
    offsets = _buffer(array, 1, dtype, 1, 1)
    if not len(offsets):
        return 0
    return object_nbytes(array.values.slice(int(offsets[0]), max(0, int(offsets[-1]) - int(offsets[0]))))


def _repeated(array: pa.Array) -> int:
    """Return the bytes of the values of list views, each as often as it is in a list."""
    starts, sizes = array.offsets.to_numpy(), array.sizes.to_numpy()
    order = np.argsort(starts, kind="stable")
    starts, sizes = starts[order], sizes[order].astype(np.int64)
    if not len(starts):
        return 0
    if (starts[1:] >= starts[:-1] + sizes[:-1]).all():
        first = max(0, int(starts[0]))
        return object_nbytes(array.values.slice(first, max(0, int(starts[-1] + sizes[-1]) - first)))
    return int(sizes.sum()) * _largest(array.values)


def _largest(values: pa.Array) -> int:
    """Return an upper bound of the bytes of one of some values."""
    arrow = values.type
    if not len(values):
        return _LEAF_NBYTES
    for kinds, dtype in ((_TEXTS, np.int32), (_LARGE_TEXTS, np.int64)):
        if _is(arrow, kinds):
            return _LEAF_NBYTES + int(np.diff(_buffer(values, 1, dtype, 1, 1)).max(initial=0))
    if _is(arrow, _VIEWS):
        return _LEAF_NBYTES + int(_buffer(values, 1, np.int32, 4)[::4].max(initial=0))
    return object_nbytes(values) if arrow.num_fields or pa.types.is_dictionary(arrow) else object_nbytes(values[:1])

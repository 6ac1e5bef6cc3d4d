"""Memory of columns: allocation from one pool, and views of bytes.

Columns are allocated from Arrow's memory pool: 64-byte aligned, and handed out again warm. mimalloc is
preferred wherever pyarrow has it: it reuses pages of every size (below 32 MiB before pyarrow 21), where malloc and
jemalloc give large blocks back to the system and take fresh, untouched pages the next time, at two to seven times the
cost of the copy (`benchmarks/bench_memory.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy import copyto

from samplebatch.column import threads

ALIGNMENT = 64
"""Bytes to which every block is aligned: a cache line, as Arrow recommends."""


def _preferred_pool() -> pa.MemoryPool:
    if "mimalloc" in pa.supported_memory_backends():
        return pa.mimalloc_memory_pool()
    return pa.default_memory_pool()


_pool = _preferred_pool()
_allocate = pa.allocate_buffer
_ndarray = np.ndarray


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate an array without writing to it, aligned, from pages that are reused.

    Parameters
    ----------
    shape
        Any shape, zero-sized ones included.
    dtype
        Any dtype whose items are plain bytes: no objects.

    Examples
    --------
    >>> a = empty((3, 2), np.dtype("f4"))
    >>> a.shape, a.ctypes.data % ALIGNMENT
    ((3, 2), 0)
    """
    return _ndarray(shape, dtype, _allocate(dtype.itemsize * prod(shape), _pool))


def zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate an array of zeros like `empty`."""
    array = empty(shape, dtype)
    # Not fill(0): that converts the number for strings ("0") and dates.
    if array.nbytes:
        array.reshape(-1).view(np.uint8).fill(0)
    return array


def copy_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Copy an array of any layout into C order, from pages that are reused."""
    nbytes = array.nbytes
    if nbytes >= threads.WORTHWHILE:
        copy, jobs = copying(array)
        threads.share(jobs)
        return copy
    copy = _ndarray(array.shape, array.dtype, _allocate(nbytes, _pool))
    copy[...] = array
    return copy


def copying(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[threads.Job]]:
    """Allocate room for a copy of an array, and cut the copying into jobs.

    The jobs only move bytes: memory that one thread allocates and another frees is not handed out again warm.
    """
    copy = _ndarray(array.shape, array.dtype, _allocate(array.nbytes, _pool))
    parts = [(copy[part], array[part]) for part in threads.pieces(len(array), array.nbytes)]
    return copy, [(source.nbytes, partial(copyto, target, source)) for target, source in parts]


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """View the bytes of a C-contiguous array of any dtype: dates too, which NumPy does not export itself."""
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")


def as_buffer(array: npt.NDArray[Any]) -> pa.Buffer:
    """Wrap the bytes of a C-contiguous array as an Arrow buffer, without a copy; the buffer keeps the array alive."""
    return pa.py_buffer(as_bytes(array))


def as_array(buffer: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """View a buffer, anything with the buffer protocol, as an array.

    Nothing is copied, unless the buffer's address is not one at which the dtype can be read.

    Raises
    ------
    ValueError
        If the buffer has fewer bytes than the shape needs.
    """
    if -1 in shape:
        # NumPy would take it for "as many as there are".
        raise ValueError("negative dimensions are not allowed")
    array = _ndarray(shape, dtype, buffer)
    return array if array.flags.aligned else copy_of(array)

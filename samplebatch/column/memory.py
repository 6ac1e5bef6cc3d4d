"""Memory of columns: allocation from one pool, byte views, and limits on allocation for untrusted data.

Columns are allocated from Arrow's memory pool. The pool's memory is 64-byte aligned, and pages are reused. mimalloc is
preferred if pyarrow includes mimalloc, because mimalloc reuses blocks of every size (before pyarrow 21, only blocks
below 32 MiB). malloc and jemalloc return large blocks to the system, so the page faults of the next allocation take two
to seven times as long as a copy of the block's bytes (`benchmarks/bench_memory.py`).
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
from samplebatch.errors import CapacityError, FormatError

ALIGNMENT = 64
"""Alignment of every block in bytes: a cache line, as Arrow recommends."""


def _preferred_pool() -> pa.MemoryPool:
    if "mimalloc" in pa.supported_memory_backends():
        return pa.mimalloc_memory_pool()
    return pa.default_memory_pool()


_pool = _preferred_pool()
_allocate = pa.allocate_buffer
_ndarray = np.ndarray


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate an aligned, uninitialized array from reused pages.

    shape: any shape, including zero sizes.
    dtype: any dtype except objects.

    >>> a = empty((3, 2), np.dtype("f4"))
    >>> a.shape, a.ctypes.data % ALIGNMENT
    ((3, 2), 0)
    """
    return _ndarray(shape, dtype, _allocate(dtype.itemsize * prod(shape), _pool))


def zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate an array of zeros; same parameters as `empty`."""
    array = empty(shape, dtype)
    # Not fill(0): that converts the number for strings ("0") and dates.
    if array.nbytes:
        array.reshape(-1).view(np.uint8).fill(0)
    return array


def copy_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Copy an array of any layout to C-contiguous memory in reused pages."""
    nbytes = array.nbytes
    if nbytes >= threads.WORTHWHILE:
        copy, jobs = copying(array)
        threads.share(jobs)
        return copy
    copy = _ndarray(array.shape, array.dtype, _allocate(nbytes, _pool))
    copy[...] = array
    return copy


def copying(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[threads.Job]]:
    """Allocate memory for a copy of an array; return the memory and the jobs that copy the array in parts.

    The jobs only copy bytes and do not allocate, because memory that one thread allocates and another thread frees is
    not reused.
    """
    copy = _ndarray(array.shape, array.dtype, _allocate(array.nbytes, _pool))
    parts = [(copy[part], array[part]) for part in threads.pieces(len(array), array.nbytes)]
    return copy, [(source.nbytes, partial(copyto, target, source)) for target, source in parts]


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """View the bytes of a C-contiguous array; dates are supported, although NumPy does not export buffers of dates."""
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")


def as_buffer(array: npt.NDArray[Any]) -> pa.Buffer:
    """View a C-contiguous array as an Arrow buffer; the buffer keeps the array alive."""
    return pa.py_buffer(as_bytes(array))


def as_array(buffer: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """View an object with the buffer protocol as an array; unaligned buffers are copied.

    Raises ValueError if the buffer contains fewer bytes than the shape requires.
    """
    if -1 in shape:
        # NumPy would infer the dimension.
        raise ValueError("negative dimensions are not allowed")
    array = _ndarray(shape, dtype, buffer)
    return array if array.flags.aligned else copy_of(array)


FLOOR_NBYTES = 1 << 28
"""Number of bytes that reading any source may allocate: 256 MiB."""

MAX_GROWTH = 1024
"""Maximum ratio of allocated to source bytes above the floor: the maximum of deflate; experience compresses less."""


_FREE_ROWS = 1 << 16
"""Maximum number of rows without bytes."""

_ROWS_PER_BYTE = 8
"""Maximum number of rows per byte: a flag occupies one bit."""


def check_rows(rows: int, nbytes: int, subject: str) -> None:
    """Raise FormatError if untrusted data has too many rows for the data's size in bytes.

    The limit is required because lists of fixed size 0 occupy no bytes.
    """
    max_rows = max(_FREE_ROWS, _ROWS_PER_BYTE * nbytes)
    if rows > max_rows:
        raise FormatError(f"{subject} must have at most {max_rows} rows in {nbytes} bytes, got {rows}")


class MemoryBound:
    """Limit on the memory that reading untrusted data may allocate.

    Parameters
    ----------
    source
        Name of the source, for error messages.
    nbytes
        Size of the source in bytes.
    max_nbytes
        Maximum number of allocated bytes; None selects 256 MiB or 1024 times `nbytes`, whichever is larger.

    Raises
    ------
    CapacityError
        If `max_nbytes` is not a non-negative number.

    Examples
    --------
    >>> bound = MemoryBound("'batch.arrow'", 1000)
    >>> bound.take(1 << 20, "column 'infos'")
    >>> bound.take(1 << 30, "column 'words'")
    Traceback (most recent call last):
    samplebatch.errors.CapacityError: column 'words' must fit into the 268435456 bytes of
        memory for 'batch.arrow', ...
    """

    def __init__(self, source: str, nbytes: int, max_nbytes: int | None = None) -> None:
        if max_nbytes is not None and (isinstance(max_nbytes, bool) or not max_nbytes >= 0):
            raise CapacityError(f"max_nbytes must be a number of bytes from 0, got {max_nbytes!r}")
        self._source = source
        self._limit = max(FLOOR_NBYTES, MAX_GROWTH * nbytes) if max_nbytes is None else max_nbytes
        self._used = 0

    def take(self, nbytes: int, subject: str) -> None:
        """Reserve bytes before their allocation.

        Raises CapacityError if the limit is exceeded; the message contains the size and the limit.
        """
        self._used += nbytes
        if self._used > self._limit:
            raise CapacityError(
                f"{subject} must fit into the {self._limit} bytes of memory for {self._source}, got "
                f"{nbytes} bytes; pass a larger max_nbytes if it is to be trusted"
            )

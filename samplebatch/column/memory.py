"""Memory of columns: allocation from one pool, views of bytes, and bounds on what data from outside may allocate.

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
from samplebatch.errors import CapacityError, FormatError

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

    Nothing is copied, unless the buffer's address is not one at which the dtype can be read. Raises ValueError if the
    buffer has fewer bytes than the shape needs.
    """
    if -1 in shape:
        # NumPy would take it for "as many as there are".
        raise ValueError("negative dimensions are not allowed")
    array = _ndarray(shape, dtype, buffer)
    return array if array.flags.aligned else copy_of(array)


FLOOR_NBYTES = 1 << 28
"""Bytes that may be made of anything, 256 MiB."""

MAX_GROWTH = 1024
"""How many bytes may be made of one, beyond the floor. Deflate cannot make more; experience compresses less."""


_FREE_ROWS = 1 << 16
"""Rows that may come without bytes."""

_ROWS_PER_BYTE = 8
"""Rows of one byte: flags take a bit."""


def check_rows(rows: int, nbytes: int, subject: str) -> None:
    """Check that data from outside has the bytes for its rows: those of fixed-size lists without values have none.

    Raises FormatError if there are more than 65536 rows, and more than 8 for each byte.

    >>> check_rows(10**9, 64, "a fragment")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: a fragment must have at most 65536 rows in 64 bytes, got 1000000000
    """
    most = max(_FREE_ROWS, _ROWS_PER_BYTE * nbytes)
    if rows > most:
        raise FormatError(f"{subject} must have at most {most} rows in {nbytes} bytes, got {rows}")


class MemoryBound:
    """The memory that reading something from outside may take, held by its reader.

    Parameters
    ----------
    source
        Name of what is read, for errors.
    nbytes
        Bytes of that.
    max_nbytes
        Bytes that may be made of it; 256 MiB or 1024 times its own, whichever is more, if None.

    Raises
    ------
    CapacityError
        If `max_nbytes` is not a number from 0.

    Examples
    --------
    >>> bound = MemoryBound("'batch.arrow'", 1000)
    >>> bound.take(1 << 20, "column 'infos'")
    >>> bound.take(1 << 30, "column 'words'")
    Traceback (most recent call last):
    samplebatch.errors.CapacityError: column 'words' would take 1073741824 bytes of memory, and all that is made of \
'batch.arrow' may take 268435456; pass a larger max_nbytes if it is to be trusted
    """

    def __init__(self, source: str, nbytes: int, max_nbytes: int | None = None) -> None:
        if max_nbytes is not None and (isinstance(max_nbytes, bool) or not max_nbytes >= 0):
            raise CapacityError(f"max_nbytes must be a number of bytes from 0, got {max_nbytes!r}")
        self._source = source
        self._limit = max(FLOOR_NBYTES, MAX_GROWTH * nbytes) if max_nbytes is None else max_nbytes
        self._taken = 0

    def take(self, nbytes: int, subject: str) -> None:
        """Take bytes that are about to be allocated from the bound.

        Raises CapacityError if it is more than is left; names the subject, its bytes and the bound.
        """
        self._taken += nbytes
        if self._taken > self._limit:
            raise CapacityError(
                f"{subject} would take {nbytes} bytes of memory, and all that is made of {self._source} may take "
                f"{self._limit}; pass a larger max_nbytes if it is to be trusted"
            )

"""Bulk moves: all columns of a batch copied, gathered or joined together.

Small batches: where columns are so small that allocating each costs more than copying it, they lie side by side in one
block, each at an aligned address. Keeping one of them keeps the block, which is why its size is bounded.

Large batches: the calling thread allocates every column, and two threads share the copying of all of them in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.column import memory, threads
from samplebatch.column.interface import Column, Indices
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn, gathering, joining

BLOCK_NBYTES = 1 << 16
"""Bytes that the columns of one block may have together."""

_BYTE = np.dtype(np.uint8)
_UP = memory.ALIGNMENT - 1
_ndarray = np.ndarray
_concatenate = np.concatenate


def copy_small(columns: dict[str, Column]) -> dict[str, Column] | None:
    """Copy tensor columns into one block; None if they are too large for one, or some are of another kind.

    >>> copies = copy_small({"a": TensorColumn(np.arange(3)), "b": TensorColumn(np.zeros((3, 2)))})
    >>> [column.values.ctypes.data % memory.ALIGNMENT for column in copies.values()]
    [0, 0]
    """
    nbytes = sum([column.values.nbytes for column in columns.values() if type(column) is TensorColumn])
    if nbytes > BLOCK_NBYTES:
        return None
    block = _allocate_block(nbytes, len(columns))
    copies: dict[str, Column] = {}
    at = 0
    for name, column in columns.items():
        if type(column) is not TensorColumn:
            if not _is_bare(column):
                return None
            copies[name] = column.copy()
            continue
        values = column.values
        out = _ndarray(values.shape, values.dtype, block, at)
        out[...] = values
        copies[name] = TensorColumn(out)
        at += values.nbytes + _UP & ~_UP
    return copies


def gather_small(columns: Mapping[str, Column], indices: Indices, nbytes: int) -> dict[str, Column]:
    """Gather rows of columns, those of tensors into one block; they have `nbytes` bytes together.

    >>> columns = {"t": TensorColumn(np.arange(3)), "a": TensorColumn(np.zeros((3, 2)))}
    >>> gathered = gather_small(columns, np.array([2, 0]), 48)
    >>> gathered["t"].values, gathered["a"].values.ctypes.data % memory.ALIGNMENT
    (array([2, 0]), 0)
    """
    block = _allocate_block(nbytes, len(columns))
    rows = len(indices)
    gathered: dict[str, Column] = {}
    at = 0
    for name, column in columns.items():
        if type(column) is not TensorColumn:
            gathered[name] = column.take(indices)
            continue
        values = column.values
        out = _ndarray((rows, *values.shape[1:]), values.dtype, block, at)
        values.take(indices, 0, out, "clip")
        gathered[name] = TensorColumn(out)
        at += out.nbytes + _UP & ~_UP
    return gathered


def join_small(groups: Sequence[dict[str, Column]], rows: int, nbytes: int) -> dict[str, Column] | None:
    """Join tensor columns to `rows` rows, in one block if all together have few enough bytes.

    Returns None if some are of another kind, or dtypes or row shapes differ.
    """
    block = _allocate_block(nbytes, len(groups[0])) if nbytes <= BLOCK_NBYTES else None
    columns: dict[str, Column] = {}
    at = 0
    for name, first in groups[0].items():
        if type(first) is not TensorColumn and all(_is_bare(group[name]) for group in groups):
            columns[name] = ObjectColumn.empty_dicts(rows)
            continue
        arrays = []
        for group in groups:
            piece = group[name]
            if type(piece) is not TensorColumn:
                return None
            arrays.append(piece.values)
        shape, dtype = (rows, *arrays[0].shape[1:]), arrays[0].dtype
        try:
            out = memory.empty(shape, dtype) if block is None else _ndarray(shape, dtype, block, at)
            _concatenate(arrays, 0, out, casting="no")
        except (TypeError, ValueError):
            return None
        columns[name] = TensorColumn(out)
        at += out.nbytes + _UP & ~_UP
    return columns


def _is_bare(column: Column) -> bool:
    return type(column) is ObjectColumn and column.is_bare


def _allocate_block(nbytes: int, columns: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Allocate a block for columns of `nbytes` bytes in all, each aligned."""
    return memory.empty((nbytes + memory.ALIGNMENT * columns,), _BYTE)


def nbytes_of(columns: Iterable[Column], rows: int, count: int) -> int:
    """Return the bytes that `rows` of the `count` rows of tensor columns have."""
    nbytes = sum([column.values.nbytes for column in columns if type(column) is TensorColumn])
    return nbytes * rows // count if count else 0


def is_large(nbytes: int) -> bool:
    """Tell whether columns have enough bytes together for two threads to move."""
    return nbytes >= threads.WORTHWHILE


_Cut = tuple[npt.NDArray[Any], list[threads.Job]]


def copy_large(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Copy columns, on two threads.

    >>> copy_large({"t": TensorColumn(np.arange(3))})["t"].values
    array([0, 1, 2])
    """
    return _convert(columns, memory.copying, lambda column: column.copy())


def gather_large(columns: Mapping[str, Column], indices: Indices) -> dict[str, Column]:
    """Gather rows of columns, on two threads.

    >>> gather_large({"t": TensorColumn(np.arange(3))}, np.array([2, 0]))["t"].values
    array([2, 0])
    """

    def cut(values: npt.NDArray[Any]) -> _Cut:
        out = memory.empty((len(indices), *values.shape[1:]), values.dtype)
        return out, gathering(values, indices, out)

    return _convert(columns, cut, lambda column: column.take(indices))


def join_large(
    pieces: Mapping[str, Sequence[Column]], concat: Callable[[Sequence[Column], str], Column]
) -> dict[str, Column]:
    """Join columns, on two threads; columns of different dtypes or shapes, or of other kinds, by `concat`."""
    columns: dict[str, Column] = {}
    jobs: list[threads.Job] = []
    for name, own in pieces.items():
        arrays = [column.values for column in own if type(column) is TensorColumn]
        kinds = {(array.dtype, array.shape[1:]) for array in arrays}
        if len(arrays) < len(own) or len(kinds) > 1:
            columns[name] = concat(own, name)
            continue
        # Where there are sequences, some columns have a row for each of them.
        out = memory.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
        jobs += joining(arrays, out)
        columns[name] = TensorColumn(out)
    threads.share(jobs)
    return columns


def _convert(
    columns: Mapping[str, Column], cut: Callable[[npt.NDArray[Any]], _Cut], make: Callable[[Column], Column]
) -> dict[str, Column]:
    """Make a new column of each: tensor columns by jobs on two threads, others one after the other."""
    converted: dict[str, Column] = {}
    jobs: list[threads.Job] = []
    for name, column in columns.items():
        if type(column) is TensorColumn:
            out, own = cut(column.values)
            jobs += own
            converted[name] = TensorColumn(out)
        else:
            converted[name] = make(column)
    threads.share(jobs)
    return converted

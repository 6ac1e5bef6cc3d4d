"""Small batches: what one core does with all tensor columns of a batch in one pass, with few calls and allocations.

Where columns are so small that allocating each costs more than copying it, they lie side by side in one block, each at
an aligned address. Whoever keeps one of them keeps the block, which is why it is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from samplebatch.column import memory
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn

BLOCK_NBYTES = 1 << 16
"""Bytes that the columns of one block may have together."""

_BYTE = np.dtype(np.uint8)
_UP = memory.ALIGNMENT - 1
_ndarray = np.ndarray
_concatenate = np.concatenate


def copied(columns: dict[str, Column]) -> dict[str, Column] | None:
    """Copy tensor columns into one block; None if they are too large for one, or some are of another kind.

    >>> copies = copied({"a": TensorColumn(np.arange(3)), "b": TensorColumn(np.zeros((3, 2)))})
    >>> [column.values.ctypes.data % memory.ALIGNMENT for column in copies.values()]
    [0, 0]
    """
    nbytes = sum([column.values.nbytes for column in columns.values()])
    if nbytes > BLOCK_NBYTES:
        return None
    block = _block(nbytes, len(columns))
    copies: dict[str, Column] = {}
    at = 0
    for name, column in columns.items():
        if type(column) is not TensorColumn:
            return None
        values = column.values
        out = _ndarray(values.shape, values.dtype, block, at)
        out[...] = values
        copies[name] = TensorColumn(out)
        at += values.nbytes + _UP & ~_UP
    return copies


def joined(groups: Sequence[dict[str, Column]], rows: int, nbytes: int) -> dict[str, Column] | None:
    """Join tensor columns to ones of so many rows, and so many bytes together, in one block if these are few enough.

    None if some are of another kind, or their dtypes or row shapes differ.
    """
    block = _block(nbytes, len(groups[0])) if nbytes <= BLOCK_NBYTES else None
    columns: dict[str, Column] = {}
    at = 0
    for name in groups[0]:
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


def _block(nbytes: int, columns: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Allocate room for so many bytes in so many columns, each aligned."""
    return memory.empty((nbytes + memory.ALIGNMENT * columns,), _BYTE)

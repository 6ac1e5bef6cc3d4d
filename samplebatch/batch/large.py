"""Large batches: the bytes of all columns moved by two threads.

The calling thread allocates every column, and the copying of all of them is shared in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from samplebatch.column import memory, threads
from samplebatch.column.interface import Column, Indices
from samplebatch.column.tensor import TensorColumn, gathering, joining

_Cut = tuple[npt.NDArray[Any], list[threads.Job]]


def copied(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Copy columns.

    >>> import numpy as np
    >>> copied({"t": TensorColumn(np.arange(3))})["t"].values
    array([0, 1, 2])
    """
    return _made(columns, memory.copying, lambda column: column.copy())


def gathered(columns: Mapping[str, Column], indices: Indices) -> dict[str, Column]:
    """Gather rows of columns.

    >>> import numpy as np
    >>> gathered({"t": TensorColumn(np.arange(3))}, np.array([2, 0]))["t"].values
    array([2, 0])
    """

    def cut(values: npt.NDArray[Any]) -> _Cut:
        out = memory.empty((len(indices), *values.shape[1:]), values.dtype)
        return out, gathering(values, indices, out)

    return _made(columns, cut, lambda column: column.take(indices))


def joined(
    pieces: Mapping[str, Sequence[Column]], concat: Callable[[Sequence[Column], str], Column]
) -> dict[str, Column]:
    """Join columns; those that do not simply fit on each other by `concat`."""
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


def _made(
    columns: Mapping[str, Column], cut: Callable[[npt.NDArray[Any]], _Cut], make: Callable[[Column], Column]
) -> dict[str, Column]:
    """Make a column of each: of tensor columns by jobs that are shared, of others one after the other."""
    made: dict[str, Column] = {}
    jobs: list[threads.Job] = []
    for name, column in columns.items():
        if type(column) is TensorColumn:
            out, own = cut(column.values)
            jobs += own
            made[name] = TensorColumn(out)
        else:
            made[name] = make(column)
    threads.share(jobs)
    return made

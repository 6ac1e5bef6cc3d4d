"""Operations on all columns of a batch at once: counting, copying, gathering and concatenation.

Small columns share one block with aligned addresses, because an allocation per column takes longer than the copies. A
reference to one column keeps the column's entire block alive, so the size of a block is bounded.

For large batches, the calling thread allocates every column, and two threads copy the columns in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.column import memory, threads
from samplebatch.column.interface import Column, Indices
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn, gathering, joining
from samplebatch.errors import ArgumentError, ColumnLengthError

BLOCK_NBYTES = 1 << 16
"""Maximum bytes of the columns in one block."""

_BYTE = np.dtype(np.uint8)
_UP = memory.ALIGNMENT - 1
_ndarray = np.ndarray
_concatenate = np.concatenate


def copy_small(columns: dict[str, Column]) -> dict[str, Column] | None:
    """Copy tensor columns into one block; return None if the columns are too large or not all are tensor columns.

    >>> copies = copy_small(
    ...     {"a": TensorColumn(np.arange(3)), "b": TensorColumn(np.zeros((3, 2)))}
    ... )
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
    """Gather rows of columns; the gathered tensor columns share one block of `nbytes` bytes.

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
    """Concatenate tensor columns to `rows` rows; if `nbytes` is at most `BLOCK_NBYTES`, the results share one block.

    Returns None if a column is not a tensor column, or dtypes or row shapes differ between the batches.
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
    return memory.empty((nbytes + memory.ALIGNMENT * columns,), _BYTE)


def nbytes_of(columns: Iterable[Column], rows: int, count: int) -> int:
    """Return the size in bytes of `rows` rows of the tensor columns, which have `count` rows."""
    nbytes = sum([column.values.nbytes for column in columns if type(column) is TensorColumn])
    return nbytes * rows // count if count else 0


def is_large(nbytes: int) -> bool:
    """Return whether two threads copy `nbytes` bytes faster than one thread."""
    return nbytes >= threads.WORTHWHILE


_Cut = tuple[npt.NDArray[Any], list[threads.Job]]


def copy_large(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Copy columns on two threads.

    >>> copy_large({"t": TensorColumn(np.arange(3))})["t"].values
    array([0, 1, 2])
    """
    return _convert(columns, memory.copying, lambda column: column.copy())


def gather_large(columns: Mapping[str, Column], indices: Indices) -> dict[str, Column]:
    """Gather rows of columns on two threads.

    >>> gather_large({"t": TensorColumn(np.arange(3))}, np.array([2, 0]))["t"].values
    array([2, 0])
    """

    def cut(values: npt.NDArray[Any]) -> _Cut:
        out = memory.empty((len(indices), *values.shape[1:]), values.dtype)
        return out, gathering(values, indices, out)

    return _convert(columns, cut, lambda column: column.take(indices))


def gather(columns: Mapping[str, Column], indices: Indices, count: int) -> dict[str, Column]:
    """Gather rows of columns with `count` rows; the size of the columns determines the method."""
    nbytes = nbytes_of(columns.values(), len(indices), count)
    if nbytes <= BLOCK_NBYTES:
        return gather_small(columns, indices, nbytes)
    if is_large(nbytes):
        return gather_large(columns, indices)
    return {name: column.take(indices) for name, column in columns.items()}


def copy(columns: dict[str, Column], count: int) -> dict[str, Column]:
    """Copy columns with `count` rows; the size of the columns determines the method."""
    copies = copy_small(columns)
    if copies is None and is_large(nbytes_of(columns.values(), count, count)):
        copies = copy_large(columns)
    return {name: column.copy() for name, column in columns.items()} if copies is None else copies


Move = tuple[dict[str, Column], str, Indices]
"""A column to permute by `reorder`: the columns, its name, and the order of its rows."""


def draw_moves(columns: dict[str, Column], count: int, rng: np.random.Generator) -> list[Move]:
    """Sample one permutation of `count` rows for all columns."""
    if not count:
        return []
    order = rng.permutation(count)
    return [(columns, name, order) for name in columns]


def reorder(moves: Iterable[Move]) -> None:
    """Permute the rows of columns, largest column first; the peak memory overhead is one copy of the largest column.

    Small columns are gathered in groups. A group is not larger than the largest column or `BLOCK_NBYTES` bytes,
    whichever is larger. If a copy fails or is interrupted, the columns are restored to their former order. The row
    order in each move is a permutation, shape (n,).

    >>> columns = {
    ...     "t": TensorColumn(np.arange(3)),
    ...     "a": TensorColumn(np.array([0.5, 1.5, 2.5])),
    ... }
    >>> reorder((columns, name, np.array([2, 0, 1])) for name in columns)
    >>> columns["t"].values, columns["a"].values
    (array([2, 0, 1]), array([2.5, 0.5, 1.5]))
    """
    replaced: list[tuple[dict[str, Column], dict[str, Column], Indices]] = []
    compressed: list[tuple[dict[str, Column], str, Column]] = []
    try:
        for columns, group, order in _group_moves(moves):
            # Gathered rows are not recompressed: only the blocks can restore the column.
            compressed += [(columns, name, columns[name]) for name in group if columns[name].kind == "compressed"]
            gathered = gather({name: columns[name] for name in group}, order, len(order))
            replaced.append((columns, gathered, order))
            columns.update(gathered)
            del gathered
    except BaseException:
        for columns, gathered, order in reversed(replaced):
            former = np.empty_like(order)
            former[order] = np.arange(len(order))
            columns.update({name: c.take(former) for name, c in gathered.items() if columns[name] is c})
        for columns, name, blocks in reversed(compressed):
            columns[name] = blocks
        raise


def _group_moves(moves: Iterable[Move]) -> list[tuple[dict[str, Column], list[str], Indices]]:
    """Group columns with the same row order, largest column first.

    No group is larger than the largest column or `BLOCK_NBYTES` bytes, whichever is larger.
    """
    sized = [(_movable_nbytes(columns[name]), columns, name, order) for columns, name, order in moves]
    sized.sort(key=lambda move: -move[0])
    bound = max(sized[0][0], BLOCK_NBYTES) if sized else 0
    groups: list[tuple[dict[str, Column], list[str], Indices]] = []
    room = 0
    for nbytes, columns, name, order in sized:
        together = groups and groups[-1][0] is columns and groups[-1][2] is order
        if together and nbytes <= room and type(columns[name]) is TensorColumn:
            groups[-1][1].append(name)
            room -= nbytes
        else:
            groups.append((columns, [name], order))
            room = bound - nbytes
    return groups


def _movable_nbytes(column: Column) -> int:
    """Return the size in bytes of a gathered copy; 0 for Python objects, because a gather copies only references."""
    return 0 if isinstance(column, ObjectColumn) else column.nbytes


def join_large(
    pieces: Mapping[str, Sequence[Column]], concat: Callable[[Sequence[Column], str], Column]
) -> dict[str, Column]:
    """Concatenate columns on two threads.

    `concat` handles differing dtypes or shapes, and columns that are not tensor columns.
    """
    columns: dict[str, Column] = {}
    jobs: list[threads.Job] = []
    for name, columns_of_name in pieces.items():
        arrays = [column.values for column in columns_of_name if type(column) is TensorColumn]
        kinds = {(array.dtype, array.shape[1:]) for array in arrays}
        if len(arrays) < len(columns_of_name) or len(kinds) > 1:
            columns[name] = concat(columns_of_name, name)
            continue
        # With sequences, some columns have one row per sequence: the number of rows differs between columns.
        out = memory.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
        jobs += joining(arrays, out)
        columns[name] = TensorColumn(out)
    threads.share(jobs)
    return columns


def _convert(
    columns: Mapping[str, Column], cut: Callable[[npt.NDArray[Any]], _Cut], make: Callable[[Column], Column]
) -> dict[str, Column]:
    """Convert columns: tensor columns by `cut` on two threads, and all other columns by `make`."""
    converted: dict[str, Column] = {}
    jobs: list[threads.Job] = []
    for name, column in columns.items():
        if type(column) is TensorColumn:
            out, copies = cut(column.values)
            jobs += copies
            converted[name] = TensorColumn(out)
        else:
            converted[name] = make(column)
    threads.share(jobs)
    return converted


# -- counting ----------------------------------------------------------------------------------------------------------


def count_rows(columns: Mapping[str, Column]) -> int:
    """Count the steps (infos and states alone do not count) and validate that all columns have equal length."""
    # len() of the array avoids a Python call per column; objects are counted without decoding them.
    lengths = [len(column.values) if type(column) is TensorColumn else len(column) for column in columns.values()]
    count = lengths[0] if lengths else 0
    if lengths.count(count) != len(lengths):
        counted = counted_column(columns)
        count = len(columns[counted])
        for name, column in columns.items():
            check_length(name, column, count, f"as {counted!r} has")
    if count and not names.counts_steps(next(iter(columns))) and not any(map(names.counts_steps, columns)):
        return 0
    return count


def counted_column(columns: Mapping[str, Column]) -> str:
    """Return the name of the column whose length is the number of steps.

    Infos and states are used only if no other column exists.
    """
    return next(filter(names.counts_steps, columns), next(iter(columns)))


def check_length(name: str, column: Column, rows: int, why: str) -> None:
    """Raise ColumnLengthError unless a column has `rows` rows; `why` completes the error message."""
    if len(column) != rows:
        raise ColumnLengthError(f"column {name!r} must have {rows} rows {why}, got {len(column)}")


def slice_bounds(count: int, size: int | None, num_slices: int | None, k: int | None) -> list[int]:
    """Return the row bounds of the views that `SampleBatch.timeslices` returns."""
    options = {"size": size, "num_slices": num_slices, "k": k}
    numbers = [whole(name, n, 1) for name, n in options.items() if n is not None]
    if len(numbers) != 1:
        raise ArgumentError(f"exactly one of size, num_slices and k must be passed, got {size}, {num_slices}, {k}")
    if num_slices is None:
        return [*range(0, count, numbers[0]), count]
    short, longer = divmod(count, num_slices)
    return [short * i + max(0, i - num_slices + longer) for i in range(num_slices + 1)]

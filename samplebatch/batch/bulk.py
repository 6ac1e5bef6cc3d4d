"""Bulk moves: all columns of a batch counted, copied, gathered or joined together.

Small batches: where columns are so small that allocating each costs more than copying it, they lie side by side in one
block, each at an aligned address. Keeping one of them keeps the block, which is why its size is bounded.

Large batches: the calling thread allocates every column, and two threads share the copying of all of them in pieces.
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


def gather(columns: Mapping[str, Column], indices: Indices, count: int) -> dict[str, Column]:
    """Gather rows of columns of `count` rows each, in the way that suits their size."""
    nbytes = nbytes_of(columns.values(), len(indices), count)
    if nbytes <= BLOCK_NBYTES:
        return gather_small(columns, indices, nbytes)
    if is_large(nbytes):
        return gather_large(columns, indices)
    return {name: column.take(indices) for name, column in columns.items()}


def copy(columns: dict[str, Column], count: int) -> dict[str, Column]:
    """Copy columns of `count` rows each, in the way that suits their size."""
    copies = copy_small(columns)
    if copies is None and is_large(nbytes_of(columns.values(), count, count)):
        copies = copy_large(columns)
    return {name: column.copy() for name, column in columns.items()} if copies is None else copies


Move = tuple[dict[str, Column], str, Indices]
"""A column that `reorder` replaces: the columns, its name, and the order of its rows."""


def draw_moves(columns: dict[str, Column], count: int, rng: np.random.Generator) -> list[Move]:
    """Sample one permutation of `count` rows for all columns."""
    if not count:
        return []
    order = rng.permutation(count)
    return [(columns, name, order) for name in columns]


def reorder(moves: Iterable[Move]) -> None:
    """Replace columns by their rows in another order, largest first: the peak is one copy of the largest column.

    Small columns are gathered together, in groups of no more bytes than the largest one. If a copy fails or is
    interrupted, the columns that were replaced are put back in their former order.

    Parameters
    ----------
    moves
        Columns with their orders, permutations of shape (n,).

    Examples
    --------
    >>> columns = {"t": TensorColumn(np.arange(3)), "a": TensorColumn(np.array([0.5, 1.5, 2.5]))}
    >>> reorder((columns, name, np.array([2, 0, 1])) for name in columns)
    >>> columns["t"].values, columns["a"].values
    (array([2, 0, 1]), array([2.5, 0.5, 1.5]))
    """
    replaced: list[tuple[dict[str, Column], dict[str, Column], Indices]] = []
    compressed: list[tuple[dict[str, Column], str, Column]] = []
    try:
        for columns, group, order in _group_moves(moves):
            # Gathered rows are not compressed again: only the blocks themselves can be put back.
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
    """Group columns of the same order into groups of no more bytes than the largest column, largest first."""
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
    """Return the bytes that gathering all rows allocates; 0 for objects, whose rows are references."""
    return 0 if isinstance(column, ObjectColumn) else column.nbytes


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


# -- counting ----------------------------------------------------------------------------------------------------------


def count_rows(columns: Mapping[str, Column]) -> int:
    """Count the steps that columns have, infos and states alone none, and check that all have as many rows."""
    # len() of the arrays themselves: a column's own is a Python call each. Objects need not be made to be counted.
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
    """Name the column that counts the steps: not infos or states, unless there is nothing else."""
    return next(filter(names.counts_steps, columns), next(iter(columns)))


def check_length(name: str, column: Column, rows: int, why: str) -> None:
    """Check that a column has the rows that it must have, for the reason given."""
    if len(column) != rows:
        raise ColumnLengthError(f"column {name!r} must have {rows} rows {why}, got {len(column)}")


def slice_bounds(count: int, size: int | None, num_slices: int | None, k: int | None) -> list[int]:
    """Return where the slices of `SampleBatch.timeslices` begin, and where the last one ends."""
    options = {"size": size, "num_slices": num_slices, "k": k}
    given = [whole(name, n, 1) for name, n in options.items() if n is not None]
    if len(given) != 1:
        raise ArgumentError(f"exactly one of size, num_slices and k must be given, got {size}, {num_slices}, {k}")
    if num_slices is None:
        return [*range(0, count, given[0]), count]
    short, longer = divmod(count, num_slices)
    return [short * i + max(0, i - num_slices + longer) for i in range(num_slices + 1)]

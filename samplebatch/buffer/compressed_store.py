"""CompressedStore: rows of one shape in LZ4 chunks, for images."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from samplebatch.buffer.store import DenseStore, Slots, Store, as_rows, check_dtype
from samplebatch.column import memory
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ColumnTypeError

CHUNK_NBYTES = 1 << 15
"""Maximum size of the rows of a chunk in bytes. Sampling a row decompresses its chunk: twice the size takes nearly
twice as long, and saves a tenth of the memory."""

_RESTORED_ROWS = 1 << 10


class _Chunk:
    """An open chunk: its rows, and a mask of the rows written since it was opened."""

    __slots__ = ("rows", "written")

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self.rows = rows
        self.written = np.zeros(len(rows), np.bool_)


class CompressedStore(Store):
    """Rows of one shape, such as images, in chunks of consecutive slots, each compressed as one LZ4 block.

    A chunk is open, uncompressed, while it is written, and sealed once all its rows are written. When it is
    overwritten, it is opened with its rows, so that rows not yet overwritten remain readable. At most `max_open` chunks
    are open; the least recently written ones are sealed first.

    Parameters
    ----------
    name
        Dotted name of the column.
    slots
        Number of slots.
    dtype, row_shape
        Dtype and shape of a row.
    max_open
        Maximum number of open chunks: two per write position, plus a few spare ones.

    Examples
    --------
    >>> store = CompressedStore("obs", 100, np.dtype(np.uint8), (84, 84))
    >>> store.write(slice(0, 100), store.fit(np.ones((100, 84, 84), np.uint8), 100))
    >>> store.take(np.array([3, 99])).shape, store.nbytes < 100 * 84 * 84 / 10
    ((2, 84, 84), True)
    """

    __slots__ = ("_blocks", "_chunk", "_form", "_max_open", "_open", "_slots")
    kind: ClassVar[str] = "compressed"

    def __init__(
        self, name: str, slots: int, dtype: np.dtype[Any], row_shape: tuple[int, ...], max_open: int = 8
    ) -> None:
        self.name = name
        self.dtype = self.row_shape = None
        # A store without slots that validates and converts rows.
        self._form = DenseStore(name, np.empty((0, *row_shape), dtype))
        self._slots = slots
        self._chunk = max(1, min(slots, CHUNK_NBYTES // max(1, dtype.itemsize * prod(row_shape))))
        self._blocks: list[Any] = [None] * -(-slots // self._chunk)
        self._open: dict[int, _Chunk] = {}
        self._max_open = max_open

    @classmethod
    def for_rows(cls, name: str, first_rows: Any, slots: int, max_open: int = 8) -> CompressedStore:
        """Create a store for rows like these, which are not written. Tensors are stored as arrays."""
        rows = as_rows(first_rows, name)
        if rows.dtype.kind == "O":
            raise ColumnTypeError(f"column {name!r} must have numbers of one shape to be compressed, got objects")
        dtype = rows.dtype.newbyteorder("=")
        check_dtype(name, dtype)
        return cls(name, slots, dtype, rows.shape[1:], max_open)

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def values(self) -> CompressedColumn:
        n, size = self._slots, self._chunk
        form = self._form
        if not n or not form.dtype.itemsize * prod(form.row_shape):
            return CompressedColumn.compress(TensorColumn(np.empty((n, *form.row_shape), form.dtype)))
        blocks = [self._seal(self._open[i].rows) if i in self._open else block for i, block in enumerate(self._blocks)]
        blank = self._seal(self._blank(0))
        last = self._seal(self._blank(len(blocks) - 1))
        blocks = [blank if block is None else block for block in blocks[:-1]] + [
            last if block is None else block for block in blocks[-1:]
        ]
        bounds = [*range(0, n, size), n]
        rows = [size] * (len(blocks) - 1)
        rows.append(n - bounds[-2])
        return CompressedColumn(blocks, rows, [0] * len(blocks), bounds, form.dtype, form.row_shape, trusted=True)

    @property
    def nbytes(self) -> int:
        sealed = sum(len(block) for block in self._blocks if block is not None)
        return sealed + sum(chunk.rows.nbytes for chunk in self._open.values())

    def fit(self, rows: Any, n: int) -> npt.NDArray[Any]:
        return self._form.fit(rows, n)

    def blank(self, n: int) -> npt.NDArray[Any]:
        return self._form.blank(n)

    def write(self, slots: Slots, rows: npt.NDArray[Any]) -> None:
        if not rows.nbytes:
            return
        if isinstance(slots, int):
            chunk, row = divmod(slots, self._chunk)
            self._write(chunk, np.array([row]), rows)
            return
        numbers = np.arange(self._slots)[slots] if isinstance(slots, slice) else slots
        for chunk, positions in _by_chunk(numbers // self._chunk):
            self._write(chunk, numbers[positions] - chunk * self._chunk, rows[positions])

    def _write(self, i: int, positions: npt.NDArray[np.intp], rows: npt.NDArray[Any]) -> None:
        """Write rows at positions within chunk i, and seal the chunk if it is complete."""
        chunk = self._open.pop(i, None)
        if chunk is None:
            if self._blocks[i] is None or len(set(positions.tolist())) == self._rows_in(i):
                chunk = _Chunk(self._blank(i))
            else:
                chunk = _Chunk(memory.copy_of(self._rows_of(i)))
        chunk.rows[positions] = rows
        chunk.written[positions] = True
        if chunk.written.all():
            self._blocks[i] = self._seal(chunk.rows)
            return
        # Insertion order is the order of writes.
        self._open[i] = chunk
        if len(self._open) > self._max_open:
            oldest = next(iter(self._open))
            self._blocks[oldest] = self._seal(self._open.pop(oldest).rows)

    def _rows_in(self, i: int) -> int:
        return min(self._chunk, self._slots - i * self._chunk)

    def _blank(self, i: int) -> npt.NDArray[Any]:
        return np.zeros((self._rows_in(i), *self._form.row_shape), self._form.dtype)

    @staticmethod
    def _seal(rows: npt.NDArray[Any]) -> Any:
        return CompressedColumn.compress(TensorColumn(rows), bulk=True).blocks[0]

    def _sealed_chunk(self, i: int) -> CompressedColumn:
        """View sealed chunk i as a column."""
        n, form = self._rows_in(i), self._form
        return CompressedColumn([self._blocks[i]], [n], [0], [0, n], form.dtype, form.row_shape, trusted=True)

    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        flat = slots.reshape(-1)
        out = memory.empty((len(flat), *self._form.row_shape), self._form.dtype)
        if out.nbytes:
            for i, positions in _by_chunk(flat // self._chunk):
                rows = self._rows_of(i)
                # A single row is copied once; rows indexed by an array are copied twice.
                if len(positions) == 1:
                    out[positions[0]] = rows[flat[positions[0]] - i * self._chunk]
                else:
                    out[positions] = rows[flat[positions] - i * self._chunk]
        return out.reshape(*slots.shape, *out.shape[1:])

    def gathered_nbytes(self, slots: npt.NDArray[np.intp]) -> int:
        return self._form.gathered_nbytes(slots)

    def _rows_of(self, i: int) -> npt.NDArray[Any]:
        """Return the rows of chunk i for reading."""
        if i in self._open:
            return self._open[i].rows
        return self._blank(i) if self._blocks[i] is None else self._sealed_chunk(i).decompress().values

    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        cuts = np.flatnonzero(np.diff(slots) != 1) + 1
        if len(slots) and len(cuts) * self._chunk <= len(slots):
            values = self.values
            runs = np.split(slots, cuts)
            return CompressedColumn.concat([values.slice(int(run[0]), int(run[-1]) + 1) for run in runs], self.name)
        return TensorColumn(self.take(slots))

    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        for start in range(0, len(slots), _RESTORED_ROWS):
            part = slots[start : start + _RESTORED_ROWS]
            self.write(part, self.fit(column.slice(start, start + len(part)).to_numpy(), len(part)))


def _by_chunk(owners: npt.NDArray[np.intp]) -> list[tuple[int, npt.NDArray[np.intp]]]:
    """Group positions by chunk, in order within each chunk."""
    if len(owners) == 1:
        return [(int(owners[0]), np.zeros(1, np.intp))]
    order = np.argsort(owners, kind="stable")
    cuts = np.flatnonzero(np.diff(owners[order])) + 1
    return [(int(owners[positions[0]]), positions) for positions in np.split(order, cuts) if len(positions)]

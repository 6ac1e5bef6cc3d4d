"""Selection of a store for each column of a buffer, and the store of compressed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import KINDS, TENSOR, values_of
from samplebatch.buffer import store
from samplebatch.column import memory
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.convert import is_of_arrays
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import NUMBERS
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ArgumentError, ColumnTypeError, near_names
from samplebatch.names import covers

CHUNK_NBYTES = 1 << 15
"""Maximum size of the rows of a chunk in bytes. Sampling a row decompresses its chunk: twice the size takes nearly
twice as long, and saves a tenth of the memory."""

_RESTORED_ROWS = 1 << 10


class _Chunk:
    """Rows of an open chunk, and a mask of the rows that were written since the chunk was opened."""

    __slots__ = ("rows", "written")

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self.rows = rows
        self.written = np.zeros(len(rows), np.bool_)


class CompressedStore(store.Store):
    """Store of rows of equal shape, such as images, in chunks of slots that are compressed with LZ4.

    A chunk is open (uncompressed) while rows are being written to it, and is sealed (compressed as one block) when all
    of its rows have been written. When a row of a sealed chunk is overwritten, all rows of the chunk are decompressed,
    so that the remaining rows stay readable. At most `max_open` chunks are open; if the limit is exceeded, the least
    recently written chunk is sealed.

    max_open: maximum number of open chunks: two per write position, plus a few spare chunks.

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
        self._form = store.DenseStore(name, np.empty((0, *row_shape), dtype))
        self._slots = slots
        self._chunk = max(1, min(slots, CHUNK_NBYTES // max(1, dtype.itemsize * prod(row_shape))))
        self._blocks: list[Any] = [None] * -(-slots // self._chunk)
        self._open: dict[int, _Chunk] = {}
        self._max_open = max_open

    @classmethod
    def for_rows(cls, name: str, first_rows: Any, slots: int, max_open: int = 8) -> CompressedStore:
        """Create an empty store with the layout of the rows. Tensors are stored as arrays."""
        rows = store.as_rows(first_rows, name)
        if rows.dtype.kind == "O":
            raise ColumnTypeError(f"column {name!r} must have numeric rows of one shape to be compressed, got objects")
        dtype = rows.dtype.newbyteorder("=")
        store.check_dtype(name, dtype)
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

    def write(self, slots: store.Slots, rows: npt.NDArray[Any]) -> None:
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
    """Group positions by chunk, and preserve the order of the positions within each chunk."""
    if len(owners) == 1:
        return [(int(owners[0]), np.zeros(1, np.intp))]
    order = np.argsort(owners, kind="stable")
    cuts = np.flatnonzero(np.diff(owners[order])) + 1
    return [(int(owners[positions[0]]), positions) for positions in np.split(order, cuts) if len(positions)]


Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Allocates the zeroed array of all slots, given the column's dotted name, the shape (slots, ...) and the dtype.

A second call for a name with more slots replaces the first array."""

OBSERVATIONS = ("obs", "obs_next")

_LATER = ("obs_next", "info", "policy")
"""Usual names that the first step may lack."""


def allocate_zeros(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate 64-byte aligned zeros; the operating system allocates each page on the first write to the page.

    >>> allocate_zeros("obs", (1_000_000, 3), np.dtype("f4")).shape
    (1000000, 3)
    """
    nbytes = dtype.itemsize * prod(shape)
    block = np.zeros(nbytes + memory.ALIGNMENT, np.uint8)
    start = -block.ctypes.data % memory.ALIGNMENT
    return np.ndarray(shape, dtype, block.data, start)


zeroed = allocate_zeros
"""Name of the function in older pickles of buffers."""


@dataclass(frozen=True)
class Stores:
    """Factory of a buffer's stores, which selects the kind of each store and allocates its memory.

    compress: names of columns to store in LZ4 chunks; a name includes its nested columns.
    ragged: names of columns whose rows vary in shape, in addition to observations that are object arrays of arrays.
    max_open: maximum number of open chunks per compressed column.
    allocate: function that allocates memory for rows of equal shape.

    >>> stores = Stores(compress=("obs",), ragged=("info.path",))
    >>> frames, path = np.zeros((1, 84, 84), np.uint8), np.zeros((1, 3))
    >>> [
    ...     stores.make(name, rows, 9).kind
    ...     for name, rows in [("obs.camera", frames), ("info.path", path)]
    ... ]
    ['compressed', 'ragged']
    """

    compress: tuple[str, ...] = ()
    ragged: tuple[str, ...] = ()
    max_open: int = 8
    allocate: Allocate = allocate_zeros

    def check_names(self, *steps: Mapping[str, Any]) -> None:
        """Check that the columns in `compress` and `ragged` exist in `steps`, the first step of each buffer."""
        if not self.compress and not self.ragged:
            return
        paths = [path for values in steps for path in _paths(values, "")]
        for argument in ("compress", "ragged"):
            for name in getattr(self, argument):
                top = name.partition(".")[0]
                later = top in _LATER and not any(covers((top,), path) for path in paths)
                if not later and not any(covers((name,), path) for path in paths):
                    candidates = dict.fromkeys([*(name_in_step for values in steps for name_in_step in values), *paths])
                    raise ArgumentError(
                        f"{argument} must name columns of a step, got {name!r}; {near_names(name, candidates)}"
                    )

    def make(self, name: str, first_rows: Any, slots: int) -> store.Store:
        """Create an empty store with the layout of the first rows of a column."""
        if covers(self.compress, name):
            return CompressedStore.for_rows(name, first_rows, slots, self.max_open)
        is_ragged = isinstance(first_rows, VaryingRows) or covers(self.ragged, name)
        if is_ragged or (covers(OBSERVATIONS, name) and is_of_arrays(first_rows)):
            return store.RaggedStore.for_rows(name, first_rows, slots)
        return store_for(name, first_rows, slots, self.allocate)

    def like(self, kind: str, name: str, column: Column, row_shape: tuple[int, ...], slots: int) -> store.Store:
        """Create an empty store of the given kind, for rows that another store's `to_column` returned."""
        if kind == "object":
            return store.ObjectStore(name, slots, row_shape)
        if kind == "compressed":
            return CompressedStore.for_rows(name, column.slice(0, min(len(column), 1)).to_numpy(), slots, self.max_open)
        if kind == "ragged":
            return store.RaggedStore.for_rows(name, column, slots)
        return store_for(name, column.to_torch() if kind == "torch" else column.to_numpy(), slots, self.allocate)

    def for_final_observations(self) -> Self:
        """Return a factory for stores of final observations: uncompressed, and ragged if observations are ragged."""
        ragged = (f"obs_next{name[3:]}" for name in self.ragged if covers(("obs",), name))
        return replace(self, compress=(), ragged=(*self.ragged, *ragged))

    def __getstate__(self) -> dict[str, Any]:
        # The allocator of another process or of a file cannot be pickled.
        return {
            "compress": self.compress,
            "ragged": self.ragged,
            "max_open": self.max_open,
            "allocate": allocate_zeros,
        }


def names_of(selection: bool | str | Sequence[str], of_true: tuple[str, ...], argument: str) -> tuple[str, ...]:
    """Convert an option, which is one name, several names, or True for the default names, to column names.

    >>> (
    ...     names_of(True, ("obs",), "compress"),
    ...     names_of("obs.camera", (), "compress"),
    ...     names_of(False, (), "compress"),
    ... )
    (('obs',), ('obs.camera',), ())
    """
    if isinstance(selection, bool):
        return of_true if selection else ()
    names = (selection,) if isinstance(selection, str) else tuple(selection)
    if isinstance(selection, Mapping) or not all(isinstance(name, str) for name in names):
        raise ColumnTypeError(f"{argument} must be True, False or names of columns, got {type(selection).__name__}")
    return names


def _paths(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        inner = values_of(value)
        if inner is None:
            yield prefix + name
        else:
            yield from _paths(inner, f"{prefix}{name}.")


def store_for(name: str, first_rows: Any, slots: int, allocate: Allocate = allocate_zeros) -> store.Store:
    """Create an empty store with the layout of the first rows of a column.

    >>> store_for("rew", np.zeros(2), 10).kind, store_for("info.text", ["a"], 10).kind
    ('dense', 'object')
    """
    if KINDS[type(first_rows)] == TENSOR:
        bits = store.tensor_bits(first_rows)
        return store.TorchStore(name, allocate(name, (slots, *bits.shape[1:]), bits.dtype), first_rows.dtype)
    rows = store.as_rows(first_rows, name)
    if rows.dtype.kind == "O":
        return store.ObjectStore(name, slots, rows.shape[1:])
    # newbyteorder() only if required: identical dtype objects compare fastest.
    dtype = rows.dtype if rows.dtype.isnative else rows.dtype.newbyteorder("=")
    if dtype not in NUMBERS:
        store.check_dtype(name, dtype)
    return store.DenseStore(name, allocate(name, (slots, *rows.shape[1:]), dtype))

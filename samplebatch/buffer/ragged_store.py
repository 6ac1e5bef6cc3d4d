"""RaggedStore: rows of varying shape in numbered slots, end to end in one array."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.tensors import column_of_arrays
from samplebatch.buffer.store import Slots, Store, as_rows
from samplebatch.column import memory
from samplebatch.column.casting import cast_exactly
from samplebatch.column.flat_array import gather, offsets_of
from samplebatch.column.interface import Column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

_SPARE = 2
"""Size of a compacted array, as a multiple of the elements in use."""

_PIECE = 1 << 16
"""Rows that are moved at once when the array is compacted."""


class RaggedStore(Store):
    """Rows of varying shape, of one dtype and number of dimensions, in one array.

    A row is appended behind the one written before it. When the array is full, it is compacted: the rows still in use
    move to an array of twice their size. So the memory stays within a small multiple of the rows in use, however often
    slots are written, and every element is moved about once. Slots that were never written hold a row without
    elements.

    Parameters
    ----------
    name
        The column's dotted name.
    slots
        How many slots there are.
    dtype
        Dtype of the elements.
    ndim
        Number of dimensions of one row, at least 1.

    Examples
    --------
    >>> store = RaggedStore("obs", 4, np.dtype(np.int64), 1)
    >>> store.write(np.array([0, 1]), store.fit([[1, 2], [3]], 2))
    >>> list(store.take(np.array([1, 0, 2])))
    [array([3]), array([1, 2]), array([], dtype=int64)]
    """

    __slots__ = ("_elements", "_end", "_lengths", "_shapes", "_starts", "item", "ndim")
    kind: ClassVar[str] = "ragged"

    def __init__(self, name: str, slots: int, dtype: np.dtype[Any], ndim: int) -> None:
        self.name = name
        self.dtype = self.row_shape = None
        self.item = dtype
        self.ndim = ndim
        self._elements = memory.empty((0,), dtype)
        self._end = 0
        self._starts = np.zeros(slots, np.int64)
        self._lengths = np.zeros(slots, np.int64)
        self._shapes = np.zeros((slots, ndim), np.int64) if ndim > 1 else None

    @classmethod
    def for_rows(cls, name: str, first_rows: Any, slots: int) -> RaggedStore:
        """Make a store for rows such as these, which are not written.

        Raises
        ------
        ColumnTypeError
            If they are not arrays of numbers of one number of dimensions, at least 1; names the column.
        """
        rows = ragged_rows(first_rows, name)
        return cls(name, slots, rows.dtype, rows.ndim)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self._starts)

    @property
    def values(self) -> RaggedColumn:
        """The rows of all slots in order, as a column of its own."""
        return self._column(np.arange(self.slots))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements' array, of starts, lengths and shapes."""
        shapes = 0 if self._shapes is None else self._shapes.nbytes
        return self._elements.nbytes + self._starts.nbytes + self._lengths.nbytes + shapes

    def fit(self, rows: Any, n: int) -> RaggedColumn:
        """Check n rows and convert them to the column's dtype; see `Store.fit`."""
        column = ragged_rows(rows, self.name)
        if len(column) != n:
            raise ColumnLengthError(f"column {self.name!r} must have {n} rows, got {len(column)}")
        if column.ndim != self.ndim:
            raise ColumnMismatchError(
                f"column {self.name!r} must have rows of {self.ndim} dimensions, got {column.ndim}"
            )
        if column.dtype == self.item:
            return column
        exact = cast_exactly(column.flat, self.item)
        if exact is None:
            raise ColumnMismatchError(
                f"column {self.name!r} must hold its values without loss, got {column.dtype} for {self.item}; "
                "convert them, or give the first row the wider dtype"
            )
        return RaggedColumn(exact, column.offsets - column.offsets[0], column.shapes)

    def blank(self, n: int) -> RaggedColumn:
        """Return n rows without elements."""
        shapes = np.zeros((n, self.ndim), np.int64) if self.ndim > 1 else None
        return RaggedColumn(memory.empty((0,), self.item), np.zeros(n + 1, np.int64), shapes)

    def write(self, slots: Slots, rows: RaggedColumn) -> None:
        """Write rows that `fit` returned."""
        count = len(rows.flat)
        if self._end + count > len(self._elements):
            self._compact(slots, count)
        self._elements[self._end : self._end + count] = rows.flat
        lengths = rows.lengths
        starts = rows.offsets[:-1] - rows.offsets[0] + self._end
        one = type(slots) is int
        self._starts[slots] = starts[0] if one else starts
        self._lengths[slots] = lengths[0] if one else lengths
        if self._shapes is not None and rows.shapes is not None:
            self._shapes[slots] = rows.shapes[0] if one else rows.shapes
        self._end += count

    def _compact(self, slots: Slots, count: int) -> None:
        """Move the rows of all slots but these to an array with room for `count` more elements, and to spare."""
        lengths = self._lengths.copy()
        lengths[slots] = 0
        wanted = int(lengths.sum()) + count
        # At least an element a slot, or many short rows would be compacted after every few writes.
        elements = memory.empty((max(_SPARE * wanted, self.slots),), self.item)
        starts = np.empty_like(self._starts)
        end = 0
        for first in range(0, self.slots, _PIECE):
            part = slice(first, first + _PIECE)
            moved, offsets = gather(self._elements, self._starts[part], lengths[part])
            elements[end : end + len(moved)] = moved
            starts[part] = offsets[:-1] + end
            end += len(moved)
        self._elements, self._starts, self._lengths, self._end = elements, starts, lengths, end

    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        """Gather rows into a new column; slots of more dimensions than one give an array of arrays of their shape."""
        column = self._column(slots.reshape(-1))
        return column if slots.ndim == 1 else column.to_numpy().reshape(slots.shape)

    def _column(self, slots: npt.NDArray[np.intp]) -> RaggedColumn:
        elements, offsets = gather(self._elements, self._starts[slots], self._lengths[slots])
        return RaggedColumn(elements, offsets, None if self._shapes is None else self._shapes[slots])

    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather rows into a column."""
        return self._column(slots)

    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `to_column` made."""
        self.write(slots, self.fit(column, len(slots)))


def ragged_rows(rows: Any, name: str) -> RaggedColumn:
    """View rows as a ragged column: those of an array of one shape too, and copies where they are apart.

    Raises
    ------
    ColumnTypeError
        If they are not arrays of numbers of one number of dimensions, at least 1; names the column.

    Examples
    --------
    >>> ragged_rows(np.zeros((2, 3)), "obs").lengths, ragged_rows([[1.0], []], "obs").lengths
    (array([3, 3]), array([1, 0]))
    """
    if isinstance(rows, Column):
        rows = column_of_arrays(rows)
    if isinstance(rows, RaggedColumn):
        return rows
    if isinstance(rows, list | tuple):
        return RaggedColumn.from_rows(rows, name)
    array = as_rows(rows, name)
    if array.dtype.kind != "O":
        if array.ndim < 2:
            raise ColumnTypeError(
                f"column {name!r} must have rows that are arrays, got single values of dtype {array.dtype}"
            )
        shape = array.shape[1:]
        flat = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1)
        shapes = np.full((len(array), len(shape)), shape, np.int64) if len(shape) > 1 else None
        return RaggedColumn(flat, offsets_of(np.full(len(array), prod(shape), np.int64)), shapes)
    return RaggedColumn.from_rows(array.tolist(), name)

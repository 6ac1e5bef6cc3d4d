"""Growing columns: rows written singly or in bulk into memory that doubles when full.

A growing column does not record its length: the builder that fills several columns passes the row to write, so that a
step rejected by one column is undone by not counting it. Every value is copied immediately, because environments reuse
their buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.column import memory
from samplebatch.column.casting import cast_exactly, wider
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.types import holds, storage_of
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

_ndarray = np.ndarray
_NUMBER_TYPES = tuple(np.dtype(code).type for code in "?bhilqBHILQefdFD")
_PYTHON_TYPES: dict[str, type] = {"bool": bool, "int64": int, "float64": float, "complex128": complex}


@lru_cache(maxsize=256)
def _scalar_types(dtype: np.dtype[Any]) -> frozenset[type]:
    """Return the types of single numbers that an array of the dtype stores exactly, or rejects with OverflowError."""
    exact = {kind for kind in _NUMBER_TYPES if dtype.kind in "biufc" and holds(dtype, np.dtype(kind))}
    return frozenset(exact | {_PYTHON_TYPES[dtype.name]} if dtype.name in _PYTHON_TYPES else exact)


class GrowingColumn(ABC):
    """Rows of one kind with spare capacity.

    `put` and `put_many` write within the capacity of the last `grow`; rewritten rows are replaced.

    Attributes
    ----------
    name
        The column's name, for errors.
    rows
        Storage of the rows.
    dtype, row_shape
        Dtype and shape of arrays that can be assigned to `rows[row]` without `put`; None for none.
    scalars
        Types of single numbers that can be assigned likewise, or raise OverflowError if too large.
    """

    __slots__ = ("dtype", "name", "row_shape", "rows", "scalars")
    name: str
    rows: Any
    dtype: np.dtype[Any] | None
    row_shape: tuple[int, ...] | None
    scalars: frozenset[type]

    @abstractmethod
    def put(self, row: int, value: Any) -> None:
        """Write one row.

        Raises ColumnMismatchError if earlier rows have another shape, or a dtype that neither represents the value
        exactly nor can be widened. Raises ColumnTypeError if columns do not support the value.
        """

    @abstractmethod
    def put_many(self, row: int, values: Any, count: int) -> None:
        """Write `count` rows from row `row` on, from values of shape (count, ...); raises as `put`.

        Raises ColumnLengthError if the number of values differs.
        """

    @abstractmethod
    def grow(self, rows: int, capacity: int) -> None:
        """Increase the capacity to `capacity` rows, and preserve the first `rows`."""

    def undo(self, row: int) -> None:
        """Undo the widening of the dtype caused by the write at `row`, if any."""
        return None

    @abstractmethod
    def finish(self, rows: int) -> Column:
        """Return the first `rows` rows as a column; the growing column must not be used afterwards."""


class GrowingTensor(GrowingColumn):
    """Rows of one shape.

    Parameters
    ----------
    name
        The column's name, for errors.
    dtype
        The elements' dtype.
    row_shape
        The shape of one row.
    capacity
        Initial capacity in rows.
    fixed
        Whether the dtype was declared, and must not be widened.

    Examples
    --------
    >>> column = GrowingTensor("rewards", np.dtype("i8"), (), capacity=4)
    >>> column.put(0, 1)
    >>> column.put(1, 0.5)
    >>> column.finish(2).values
    array([1. , 0.5])
    """

    __slots__ = ("_before", "_fixed")
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    def __init__(
        self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...], capacity: int, *, fixed: bool = False
    ) -> None:
        storage_of(dtype)
        self.name = name
        self.row_shape = row_shape
        self._fixed = fixed
        self._before: tuple[int, npt.NDArray[Any]] | None = None
        self._use(memory.empty((capacity, *row_shape), dtype))

    def _use(self, rows: npt.NDArray[Any]) -> None:
        self.rows = rows
        self.dtype = rows.dtype
        self.scalars = frozenset() if self.row_shape else _scalar_types(rows.dtype)

    def put(self, row: int, value: Any) -> None:
        self._store(row, as_rows(value, self.name)[None])

    def put_many(self, row: int, values: Any, count: int) -> None:
        block = as_rows(values, self.name)
        if not block.ndim or len(block) != count:
            raise _wrong_count(self.name, count, len(block) if block.ndim else None)
        self._store(row, block)

    def _store(self, row: int, block: npt.NDArray[Any]) -> None:
        if block.shape[1:] != self.row_shape:
            raise ColumnMismatchError(
                f"column {self.name!r} must have rows of shape {self.row_shape}, as its earlier rows, "
                f"got {block.shape[1:]}; declare it ragged if its rows vary"
            )
        exact = cast_exactly(block, self.dtype)
        if exact is None:
            exact = self._widen(row, block)
        self.rows[row : row + len(block)] = exact

    def _widen(self, row: int, block: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Widen the dtype to represent all rows and the new ones; return the converted new rows."""
        for dtype in () if self._fixed else wider(self.dtype, block.dtype):
            exact, stored = cast_exactly(block, dtype), cast_exactly(self.rows[:row], dtype)
            if exact is not None and stored is not None:
                rows = memory.empty(self.rows.shape, dtype)
                rows[:row] = stored
                self._before = (row, self.rows)
                self._use(rows)
                return exact
        raise ColumnMismatchError(
            f"column {self.name!r} must store {self.dtype}, got a value of {block.dtype} that neither fits exactly "
            "nor allows a wider dtype; convert the values to one dtype first"
        )

    def grow(self, rows: int, capacity: int) -> None:
        grown = memory.empty((capacity, *self.row_shape), self.dtype)
        grown[:rows] = self.rows[:rows]
        self.rows = grown
        self._before = None

    def undo(self, row: int) -> None:
        if self._before is not None and self._before[0] == row:
            self._use(self._before[1])
            self._before = None

    def finish(self, rows: int) -> Column:
        values = self.rows[:rows]
        if values.dtype.kind in "SU":
            return as_column(values, self.name)
        # A short column must not retain a long column's memory.
        return TensorColumn(values if 2 * rows >= len(self.rows) else memory.copy_of(values))


class GrowingObjects(GrowingColumn):
    """Python objects, mostly infos; dicts and lists are copied one level deep, because environments reuse them.

    Columns with only strings or only bytes become text columns, as lists of them do.
    """

    __slots__ = ()
    rows: list[Any]

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.rows = [None] * capacity
        self.dtype = self.row_shape = None
        self.scalars = frozenset()

    def put(self, row: int, value: Any) -> None:
        kind = type(value)
        self.rows[row] = value.copy() if kind is dict or kind is list or kind is _ndarray else value

    def put_many(self, row: int, values: Any, count: int) -> None:
        if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__"):
            raise _wrong_count(self.name, count, None)
        if len(values) != count:
            raise _wrong_count(self.name, count, len(values))
        for value in values:
            self.put(row, value)
            row += 1

    def grow(self, rows: int, capacity: int) -> None:
        self.rows += [None] * (capacity - len(self.rows))

    def finish(self, rows: int) -> Column:
        values = self.rows[:rows]
        text = None if self.name == names.INFOS else TextColumn.from_rows(values)
        return ObjectColumn.from_rows(values) if text is None else text


class GrowingRagged(GrowingColumn):
    """Rows of varying shape and one number of dimensions.

    Parameters
    ----------
    name
        The column's name, for errors.
    capacity
        Initial capacity in rows.
    item
        Dtype of the elements; default: dtype of the first row that is not an empty list.
    """

    __slots__ = ("_chosen", "_item")
    rows: list[Any]

    def __init__(self, name: str, capacity: int, item: np.dtype[Any] | None = None) -> None:
        self.name = name
        self.rows = [None] * capacity
        self.dtype = self.row_shape = None
        self.scalars = frozenset()
        self._item = item
        self._chosen: int | None = None
        """Row that determined the dtype of the elements; None if it was declared or is undetermined."""

    def put(self, row: int, value: Any) -> None:
        array = as_rows(value, self.name)
        before = self.rows[0]
        if row and array.ndim != before.ndim:
            raise ColumnMismatchError(
                f"column {self.name!r} must have rows of {before.ndim} dimensions, as its earlier rows, "
                f"got {array.ndim}"
            )
        if array.size or not isinstance(value, list | tuple):
            if self._item is None:
                self._item, self._chosen = array.dtype, row
            elif array.dtype != self._item:
                array = self._cast(array, is_list=isinstance(value, list | tuple))
        self.rows[row] = memory.copy_of(array)

    def _cast(self, array: npt.NDArray[Any], *, is_list: bool) -> npt.NDArray[Any]:
        """Convert a row to the dtype of the elements; declared float dtypes round lists of numbers, as NumPy does."""
        assert self._item is not None
        if is_list and self._chosen is None and self._item.kind in "fc" and array.dtype.kind in "biufc":
            return array.astype(self._item)
        exact = cast_exactly(array, self._item) if array.size else array.astype(self._item)
        if exact is None:
            raise ColumnMismatchError(
                f"column {self.name!r} must store {self._item}, got a row of {array.dtype} that does not fit exactly"
            )
        return exact

    def put_many(self, row: int, values: Any, count: int) -> None:
        if not hasattr(values, "__len__") or len(values) != count:
            raise _wrong_count(self.name, count, len(values) if hasattr(values, "__len__") else None)
        for i in range(count):
            self.put(row + i, values[i])

    def grow(self, rows: int, capacity: int) -> None:
        self.rows += [None] * (capacity - len(self.rows))

    def finish(self, rows: int) -> RaggedColumn:
        # Empty lists were stored as float arrays, which do not affect the dtype.
        item = self._item
        rows_to_store = (
            self.rows[:rows] if item is None else [row if row.size else row.astype(item) for row in self.rows[:rows]]
        )
        return RaggedColumn.from_rows(rows_to_store, self.name, item)

    def undo(self, row: int) -> None:
        if self._chosen is not None and self._chosen >= row:
            self._item = self._chosen = None


def growing_column(
    name: str,
    value: Any,
    capacity: int,
    *,
    many: bool = False,
    ragged: bool = False,
    dtype: np.dtype[Any] | None = None,
) -> GrowingColumn:
    """Create an empty growing column for rows like a first value.

    Raises ColumnTypeError if columns do not support the value.

    Parameters
    ----------
    name
        The column's name; infos are always objects.
    value
        A row, or rows of shape (k, ...) if `many` is true. It is inspected, not stored.
    capacity
        Initial capacity in rows.
    many
        Whether the value is several rows.
    ragged
        Whether rows vary in shape.
    dtype
        A declared dtype, which is never widened; default: the dtype of `np.array(value)`.

    Examples
    --------
    >>> [type(growing_column("x", v, 8)).__name__ for v in (0.5, "left", None, np.zeros(3))]
    ['GrowingTensor', 'GrowingObjects', 'GrowingObjects', 'GrowingTensor']
    """
    if ragged or (many and isinstance(value, VaryingRows)):
        return GrowingRagged(
            name, capacity, value.dtype if dtype is None and isinstance(value, RaggedColumn) else dtype
        )
    if name == names.INFOS or (dtype is None and _is_object(value, many)):
        return GrowingObjects(name, capacity)
    array = as_rows(value, name)
    if many and not array.ndim:
        raise ColumnTypeError(f"column {name!r} must have one row per step, got a single {type(value).__name__}")
    row_shape = array.shape[1:] if many else array.shape
    return GrowingTensor(name, array.dtype if dtype is None else dtype, row_shape, capacity, fixed=dtype is not None)


def _is_object(value: Any, many: bool) -> bool:
    if many:
        if isinstance(value, _ndarray):
            return value.dtype.kind == "O" or (value.dtype.kind == "T" and value.ndim == 1)
        if not isinstance(value, (list, tuple)) or not value:
            return False
        value = next((row for row in value if row is not None), None)
    if value is None or isinstance(value, (str, bytes, dict)):
        return True
    return isinstance(value, _ndarray) and value.dtype.kind == "O"


def as_rows(value: Any, name: str) -> npt.NDArray[Any]:
    """Convert a value to an array of numbers, dates or fixed-width strings in native byte order.

    Raises ColumnTypeError for other values.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ColumnTypeError(
            f"column {name!r} must have rows that are arrays, got a {type(value).__name__}: {error}"
        ) from error
    if array.dtype.kind == "T":
        fixed = np.array(array.tolist())
        # NumPy removes trailing zeros of fixed-width strings.
        array = fixed if fixed.dtype.kind == "U" and fixed.tolist() == array.tolist() else array
    if array.dtype.kind not in "biufcmMSU":
        hint = "; declare it ragged if its rows vary in shape" if isinstance(value, Column) else ""
        raise ColumnTypeError(f"column {name!r} must hold numbers or arrays, got a {_word(value)}{hint}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _word(value: Any) -> str:
    return f"{value.dtype} array" if isinstance(value, _ndarray) else type(value).__name__


def _wrong_count(name: str, count: int, found: int | None) -> ColumnLengthError:
    got = "a single value" if found is None else str(found)
    return ColumnLengthError(f"column {name!r} must have {count} rows, as the other columns of these steps, got {got}")

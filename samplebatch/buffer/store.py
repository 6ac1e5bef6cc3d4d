"""Store: the rows of one column of a buffer in numbered slots, each of which may be written many times.

A row is written in two steps, so that an `add` that one column refuses changes no other: `fit` checks rows and makes
them ready, `write` puts them into their slots and cannot fail.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import ARRAY, KINDS, NUMBER, TENSOR
from samplebatch.column import threads
from samplebatch.column.interface import Column
from samplebatch.column.types import storage_of
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

Slots = npt.NDArray[np.intp] | slice | int
"""Slots to be written: their numbers, shape (n,), in any order; a slice of them; or one."""

Range = tuple[int, int]
"""Slots that follow each other: the first one, and the one after the last."""

_ndarray = np.ndarray


class Store(ABC):
    """The interface of stores: rows of one column in numbered slots, for `Columns`.

    Attributes
    ----------
    kind
        The class's name in files.
    name
        The column's dotted name, for errors.
    dtype, row_shape
        Dtype and shape of the arrays that `values[slot] = row` stores without asking `fit`; None where there are none
        such.
    """

    __slots__ = ("dtype", "name", "row_shape")
    kind: ClassVar[str]
    name: str
    dtype: np.dtype[Any] | None
    row_shape: tuple[int, ...] | None

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many slots there are."""

    @property
    @abstractmethod
    def values(self) -> Any:
        """The rows of all slots as a buffer's attribute: the array itself where they lie in one."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the slots occupy; for Python objects, those of the references."""

    @abstractmethod
    def fit(self, rows: Any, n: int) -> Any:
        """Check n rows, leading axis n, and return them ready to be written; nothing is changed.

        Raises
        ------
        ColumnLengthError
            If there are not n rows; names the column.
        ColumnMismatchError
            If the rows have another shape, or a value that the dtype cannot hold without loss; names the column.
        ColumnTypeError
            If they are nothing that the column could hold; names the column.
        """

    @abstractmethod
    def blank(self, n: int) -> Any:
        """Return n rows ready to be written that stand for rows not given: zeros, None, rows without elements."""

    @abstractmethod
    def write(self, slots: Slots, rows: Any) -> None:
        """Write rows that `fit` returned; of several rows for one slot the last stays."""

    @abstractmethod
    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        """Gather rows into new memory: slots of any shape (...) in [0, number of slots) give (..., *row shape)."""

    @abstractmethod
    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather the rows of slots, shape (n,), into a column of n rows, for checkpoints and files."""

    @abstractmethod
    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `to_column` made.

        Raises
        ------
        SampleBatchError
            As `fit` does.
        """

    def plan_copy(self, ranges: Sequence[Range]) -> tuple[Any, list[threads.Job]]:
        """Allocate memory for the rows of ranges of slots, one after the other; return it and the jobs that fill it."""
        pairs = [np.arange(start, stop) for start, stop in ranges]
        return self.take(np.concatenate([np.zeros(0, np.intp), *pairs])), []


def check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Raise ColumnTypeError if no column can hold a dtype; names the column."""
    try:
        storage_of(dtype)
    except ColumnTypeError as error:
        raise ColumnTypeError(f"column {name!r} has dtype {dtype}, which no column can hold") from error


def check_rows(name: str, array: Any, n: int, row_shape: tuple[int, ...]) -> None:
    """Raise ColumnLengthError or ColumnMismatchError unless an array has the shape (n, *row_shape)."""
    shape = tuple(array.shape)
    if shape == (n, *row_shape):
        return
    if shape[1:] == row_shape:
        raise ColumnLengthError(f"column {name!r} must have {n} rows, got {shape[0]}")
    raise ColumnMismatchError(f"column {name!r} must have rows of shape {row_shape}, got {shape[1:]}")


def as_rows(rows: Any, name: str) -> npt.NDArray[Any]:
    """Turn rows into an array: of numbers where they are some of one shape, else of objects.

    Raises
    ------
    ColumnTypeError
        If there is no leading axis; names the column.
    """
    if type(rows) is _ndarray:
        array = rows
    elif KINDS[type(rows)] == TENSOR:
        array = rows.detach().resolve_conj().resolve_neg().numpy(force=True)
    elif isinstance(rows, np.ma.MaskedArray):
        raise ColumnTypeError(f"column {name!r} must have no mask, which no column can hold; call filled() first")
    elif isinstance(rows, Sequence) and not isinstance(rows, (str, bytes)):
        numbers = all(KINDS[cls] in (ARRAY, NUMBER) for cls in set(map(type, rows)))
        one_shape = numbers and len({np.shape(row) for row in rows}) == 1
        array = np.asarray(rows) if one_shape else object_rows(rows, name)
    else:
        array = np.asarray(rows)
    if not array.ndim:
        raise ColumnTypeError(f"column {name!r} must have rows, got a single {type(rows).__name__}")
    return array.astype(object) if array.dtype.kind in "SUT" else array


def object_rows(rows: Any, name: str) -> npt.NDArray[Any]:
    """Turn rows of any kind into an array of objects, shape (n,).

    Raises
    ------
    ColumnTypeError
        If there is no leading axis; names the column.
    """
    if isinstance(rows, _ndarray) and rows.dtype.kind == "O" and rows.ndim == 1:
        return rows
    if isinstance(rows, (str, bytes)) or not hasattr(rows, "__len__") or getattr(rows, "ndim", 1) == 0:
        raise ColumnTypeError(f"column {name!r} must have rows, got a single {type(rows).__name__}")
    return np.fromiter(rows, object, len(rows))


def narrow(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Convert numbers to a dtype of a narrower kind, or give None if a value would change.

    >>> narrow(np.array([2.0, 0.0]), np.dtype("i8")), narrow(np.array([0.7]), np.dtype("i8"))
    (array([2, 0]), None)
    """
    if array.dtype.kind not in "biufc" or dtype.kind not in "biufc":
        return None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        cast = array.astype(dtype)
        back = cast.astype(array.dtype)
    return cast if np.array_equal(back, array) else None

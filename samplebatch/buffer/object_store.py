"""ObjectStore: rows of Python objects."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from samplebatch.buffer.store import Slots, Store, as_rows, check_rows, object_rows
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn


class ObjectStore(Store):
    """Rows of Python objects: one a row, or an array of them of one shape. Slots that were never written hold None.

    Parameters
    ----------
    name
        The column's dotted name.
    slots
        How many slots there are.
    row_shape
        Shape of one row.

    Examples
    --------
    >>> store = ObjectStore("info.text", 3)
    >>> store.write(1, store.fit(["key found"], 1))
    >>> store.values
    array([None, 'key found', None], dtype=object)
    """

    __slots__ = ("_values", "shape")
    kind: ClassVar[str] = "object"

    def __init__(self, name: str, slots: int, row_shape: tuple[int, ...] = ()) -> None:
        self.name = name
        self.dtype = self.row_shape = None
        self.shape = row_shape
        self._values = np.empty((slots, *row_shape), object)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self._values)

    @property
    def values(self) -> Any:
        """The array of all slots, shape (slots, ...)."""
        return self._values

    @property
    def nbytes(self) -> int:
        """Bytes of the references."""
        return self._values.nbytes

    def fit(self, rows: Any, n: int) -> npt.NDArray[Any]:
        """Put n rows into an array of objects; see `Store.fit`."""
        if self.shape:
            array = as_rows(rows, self.name)
        else:
            # Rows of an array would be views of memory that its giver may use again.
            numbers = isinstance(rows, np.ndarray) and rows.dtype.kind != "O"
            array = object_rows(rows.copy() if numbers else rows, self.name)
        check_rows(self.name, array, n, self.shape)
        return array

    def blank(self, n: int) -> npt.NDArray[Any]:
        """Return n rows of None."""
        return np.empty((n, *self.shape), object)

    def write(self, slots: Slots, rows: npt.NDArray[Any]) -> None:
        """Write rows that `fit` returned."""
        self._values[slots] = rows[0] if type(slots) is int else rows

    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        """Gather references; shape (*slots.shape, ...)."""
        return self._values.take(slots, 0)

    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather the objects into a column; rows that are arrays of objects become lists."""
        rows = self._values.take(slots, 0)
        return ObjectColumn(rows) if rows.ndim == 1 else ObjectColumn.from_rows(rows.tolist())

    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `to_column` made."""
        rows = column.to_numpy()
        if self.shape:
            block = np.empty((len(rows), *self.shape), object)
            block[...] = rows.tolist()
            rows = block
        self.write(slots, self.fit(rows, len(slots)))

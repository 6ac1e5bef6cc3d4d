"""RowsLayout: how columns of numbers become Arrow record batches that are alike up to their rows, and back."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn

_from_buffers = pa.Array.from_buffers
_ndarray = np.ndarray


class _Form(NamedTuple):
    """The form of one column: of its NumPy array, and of its Arrow array.

    Attributes
    ----------
    dtype, row_shape
        Of its array.
    arrow
        The type of its Arrow array.
    lists
        The type of lists of numbers that a row is in Arrow; None where a row is a number.
    numbers
        The type of the numbers in the buffer.
    width
        Bytes of such a number.
    """

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    arrow: pa.DataType
    lists: pa.DataType | None
    numbers: pa.DataType
    width: int

    def encode(self, values: npt.NDArray[Any], count: int) -> pa.Array:
        """View the rows of an array as an Arrow array."""
        buffers = [None, memory.as_buffer(values)]
        if self.lists is None:
            flat = _from_buffers(self.numbers, count, buffers)
            return flat if self.numbers is self.arrow else pa.ExtensionArray.from_storage(self.arrow, flat)
        flat = _from_buffers(self.numbers, values.nbytes // self.width, buffers)
        return pa.ExtensionArray.from_storage(self.arrow, _from_buffers(self.lists, count, [None], children=[flat]))


class RowsLayout:
    """Layout of record batches of numbers without nulls, for writers and readers of many of one schema.

    Looking at the type of each column takes longer than viewing it. Record batches of a schema that was looked at
    before are made of arrays, and viewed as arrays, without looking again; how many rows they have does not matter.

    Parameters
    ----------
    schema
        Of the record batches, with its metadata.
    forms
        The form of each column, by its name.

    Attributes
    ----------
    schema
        As given.

    Examples
    --------
    >>> columns = {"a": TensorColumn(np.zeros((2, 3))), "b": TensorColumn(np.arange(2))}
    >>> arrays = [column.encode()[0] for column in columns.values()]
    >>> layout = RowsLayout.find(pa.record_batch(arrays, names=list(columns)), columns)
    >>> rows = layout.write({"a": np.ones((4, 3)), "b": np.arange(4)})
    >>> rows["b"].to_pylist(), layout.read(rows)["a"].shape
    ([0, 1, 2, 3], (4, 3))
    """

    __slots__ = ("_forms", "schema")

    def __init__(self, schema: pa.Schema, forms: Mapping[str, _Form]) -> None:
        self.schema = schema
        self._forms = dict(forms)

    @classmethod
    def find(cls, rows: pa.RecordBatch, columns: Mapping[str, Column]) -> Self | None:
        """Find the layout of record batches like one that was read.

        Parameters
        ----------
        rows
            The record batch.
        columns
            Its columns, once they were checked.

        Returns
        -------
        The layout; None if a column is not one array of numbers that the last of its Arrow buffers holds.
        """
        if rows.schema.names != list(columns):
            return None
        forms = {}
        for array, (name, column) in zip(rows.columns, columns.items(), strict=True):
            found = _form_of(array, column)
            if found is None:
                return None
            forms[name] = found
        return cls(rows.schema, forms)

    def fits(self, columns: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Tell whether arrays are the columns of such a record batch: all of them, in their order, of one length."""
        if len(columns) != len(self._forms):
            return False
        count = -1
        for (own, form), (name, values) in zip(self._forms.items(), columns.items(), strict=True):
            if name != own or values.shape[1:] != form.row_shape or values.dtype != form.dtype:
                return False
            if not values.flags.c_contiguous or (len(values) != count and count >= 0):
                return False
            count = len(values)
        return count > 0

    def write(self, columns: Mapping[str, npt.NDArray[Any]]) -> pa.RecordBatch:
        """View arrays that `fits` is true of as a record batch."""
        pairs = zip(self._forms.values(), columns.values(), strict=True)
        arrays = [form.encode(values, len(values)) for form, values in pairs]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def read(self, rows: pa.RecordBatch) -> dict[str, npt.NDArray[Any]] | None:
        """View the columns of a record batch; None if it has another schema, nulls, or too few bytes for its rows.

        Arrays at an address where their dtype cannot be read are copied. The others are read-only.
        """
        count = rows.num_rows
        if not count or not rows.schema.equals(self.schema, check_metadata=True):
            return None
        found = {}
        for (name, form), array in zip(self._forms.items(), rows.columns, strict=True):
            *others, last = array.buffers()
            shape = count, *form.row_shape
            if any(buffer is not None for buffer in others) or array.offset or last is None:
                return None
            if last.size < form.dtype.itemsize * prod(shape):
                return None
            values = _ndarray(shape, form.dtype, last)
            found[name] = values if values.flags.aligned else memory.copy_of(values)
        return found


def _form_of(array: pa.Array, column: Column) -> _Form | None:
    """Find the form of a column over an Arrow array that was read; None if it is not a view of its last buffer."""
    if type(column) is not TensorColumn or array.offset or not len(array):
        return None
    *others, last = array.buffers()
    values = column.values
    if last is None or any(buffer is not None for buffer in others) or values.ctypes.data != last.address:
        return None
    lists, numbers = None, array.type
    if isinstance(numbers, pa.Bool8Type):
        numbers = numbers.storage_type
    elif isinstance(numbers, pa.FixedShapeTensorType):
        lists, numbers = numbers.storage_type, numbers.value_type
    if numbers.num_fields or numbers.num_buffers != 2 or not values.nbytes:
        # Lists in lists, or empty rows.
        return None
    return _Form(values.dtype, values.shape[1:], array.type, lists, numbers, numbers.byte_width)

"""Conversion of columns to and from Arrow arrays and fields, and a cache of readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from samplebatch.column.interface import Column
from samplebatch.column.memory import MemoryBound, check_rows
from samplebatch.column.objects import ObjectColumn, object_nbytes
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn, TorchColumn
from samplebatch.column.types import DTYPE_KEY, TORCH_KEY, named_dtype
from samplebatch.errors import ColumnTypeError, FormatError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Bounded cache of values with first-in, first-out eviction.

    limit: maximum number of values; the value that was cached first is evicted first.

    >>> squares = Recent[int, int](limit=2)
    >>> squares.get(3, lambda: 9), squares.get(3, lambda: 10)
    (9, 9)
    """

    __slots__ = ("_adding", "_limit", "_values")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[K, V] = {}
        self._adding = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the cached value of a key, or create and cache the value.

        Raises the same errors as `make`.
        """
        try:
            return self._values[key]
        except KeyError:
            pass
        value = make()
        with self._adding:
            while len(self._values) >= self._limit:
                del self._values[next(iter(self._values))]
            self._values[key] = value
        return value


def arrow_field_and_array(column: Column, name: str) -> tuple[pa.Field, pa.Array]:
    """Return a column's Arrow field and array; the metadata contains a dtype that the Arrow type does not determine."""
    array, metadata = column.encode()
    # Text is always nullable, so that all batches of a file or dataset have one schema.
    nullable = array.null_count > 0 or pa.types.is_null(array.type) or isinstance(column, TextColumn)
    return pa.field(name, array.type, nullable=nullable, metadata=metadata or None), array


def holds_objects(field: pa.Field) -> bool:
    """Return whether a field is read as an object column."""
    return ObjectColumn.reads(field.type, field.metadata or {})


def check_size(chunks: Iterable[pa.Array], field: pa.Field, bound: MemoryBound) -> None:
    """Validate chunks whose decoded values need new memory, and subtract the decoded size from a memory bound.

    The validated chunks contain objects, or strings in dictionaries or views, which may be larger once decoded. Chunks
    of other columns are not validated here; the caller must have validated the buffer sizes of other columns. Raises
    CapacityError if the bound is exceeded. Raises pyarrow.ArrowException if a chunk is damaged.
    """
    if not (holds_objects(field) or _expands(field.type, field.metadata or {})):
        return
    for chunk in chunks:
        bound.take(object_nbytes(chunk), f"column {field.name!r}")
        chunk.validate(full=True)


def _expands(arrow: pa.DataType, metadata: Mapping[bytes, bytes]) -> bool:
    return TextColumn.reads(arrow, metadata) and TextColumn.expands(arrow)


class FixedRows(NamedTuple):
    """Location of a tensor column in Arrow's buffers; rows are viewed without creating Arrow arrays.

    values: values per row of each nested array, outermost first; only the innermost array has a data buffer.
    """

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    values: tuple[int, ...]


class FieldReader:
    """Reader that converts a field's arrays to columns; the field's type and metadata are inspected only once.

    arrow: Arrow type of the arrays; None for the field's type.

    Raises FormatError if the field's metadata is invalid.

    >>> FieldReader(pa.field("a", pa.int64())).read(pa.array([1, 2])).to_numpy()
    array([1, 2])
    """

    __slots__ = (
        "_arrow",
        "_dtype_name",
        "_holds_objects",
        "_is_ragged",
        "_is_text",
        "_metadata",
        "_torch_name",
        "is_bounded",
        "name",
    )

    def __init__(self, field: pa.Field, arrow: pa.DataType | None = None) -> None:
        arrow = field.type if arrow is None else arrow
        self.name: str = field.name
        self._arrow = arrow
        self._metadata = field.metadata or {}
        self._holds_objects = ObjectColumn.reads(arrow, self._metadata)
        self._is_ragged = not self._holds_objects and RaggedColumn.reads(arrow)
        self._is_text = not self._holds_objects and TextColumn.reads(arrow, self._metadata)
        self.is_bounded = self._holds_objects or (self._is_text and TextColumn.expands(arrow))
        self._dtype_name, self._torch_name = (
            self._metadata[key].decode(errors="replace") if key in self._metadata else None
            for key in (DTYPE_KEY, TORCH_KEY)
        )
        try:
            if self._dtype_name is not None and not (self._holds_objects or self._is_text):
                named_dtype(self._dtype_name)
        except ColumnTypeError as error:
            raise FormatError(f"column {self.name!r} must name a dtype that columns support: {error}") from error

    def read(self, array: pa.Array, *, allow_pickle: bool = False) -> Column:
        """View an Arrow array as a column.

        Raises the same errors as `column_from_arrow`.
        """
        name, torch_name = self.name, self._torch_name
        if self._holds_objects:
            return ObjectColumn.from_arrow(array, self._metadata, name, allow_pickle=allow_pickle)
        if self._is_text:
            return TextColumn.from_arrow(array, self._dtype_name, name)
        if self._is_ragged:
            rows = RaggedColumn.from_arrow(array, self._dtype_name, name)
            if rows.shapes is not None and len(rows):
                # Rows without elements have the declared shapes, which may be arbitrarily large.
                check_rows(int(rows.shapes[rows.lengths == 0].max(initial=0)), 0, f"a row of column {name!r}")
            return rows if torch_name is None else _from_bits(RaggedTorchColumn.from_bits, rows, torch_name, name)
        values = TensorColumn.from_arrow(array, self._dtype_name, name).values
        if torch_name is not None:
            return _from_bits(TorchColumn.from_bits, values, torch_name, name)
        if values.dtype.kind in "SU":
            return TextColumn.from_fixed(values, name, exact=self._dtype_name is None)
        return TensorColumn(values)

    def fixed_rows(self) -> FixedRows | None:
        """Return the layout of rows in Arrow's buffers; None if rows cannot be read as a view of the buffers."""
        if self._holds_objects or self._is_text or self._is_ragged or self._torch_name is not None:
            return None
        arrow, values = self._arrow, [1]
        while True:
            if isinstance(arrow, pa.FixedShapeTensorType) and arrow.permutation is not None:
                return None
            if isinstance(arrow, pa.BaseExtensionType):
                arrow = arrow.storage_type
            elif pa.types.is_fixed_size_list(arrow):
                values.append(values[-1] * arrow.list_size)
                arrow = arrow.value_type
            else:
                break
        if pa.types.is_boolean(arrow) or pa.types.is_date(arrow):
            return None
        try:
            # Unlike an empty table, `pa.nulls` does not import pandas.
            example = self.read(pa.nulls(0, self._arrow))
        except ColumnTypeError:
            return None
        array = example.to_numpy()
        if array.dtype.kind == "O" or array.itemsize * prod(array.shape[1:]) != arrow.byte_width * values[-1]:
            return None
        return FixedRows(array.dtype, array.shape[1:], tuple(values))


def column_from_arrow(array: pa.Array, field: pa.Field, *, allow_pickle: bool = False) -> Column:
    """View an Arrow array as a column, without a copy if the layout permits.

    Raises ColumnTypeError if the array has nulls or an unsupported type. Raises FormatError if the array does not match
    the field's metadata. Raises UntrustedPickleError if the array's rows are pickled and `allow_pickle` is false.
    """
    return FieldReader(field, array.type).read(array, allow_pickle=allow_pickle)


def _from_bits(read: Callable[[Any, str], Column], bits: Any, torch_name: str, name: str) -> Column:
    """View an array's bytes as a torch column; raises FormatError if the field specifies another dtype."""
    try:
        return read(bits, torch_name)
    except ColumnTypeError as error:
        raise FormatError(f"column {name!r} must name the torch dtype of its values: {error}") from error

"""Plan: cached layout of the numeric columns of an Arrow schema, for files, fragments and samples.

Arrow creates an array for each column and each level of nested lists, and inspects each type again. For a few rows,
these operations take longer than a copy of the rows. A plan inspects the fields of a schema once. A plan accepts only
the layout that the library writes; Arrow reads and validates every other layout.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import names
from samplebatch.column import memory
from samplebatch.column.arrow import FieldReader, Recent
from samplebatch.column.arrow_bodies import Body
from samplebatch.column.threads import copy_all

Arrays = dict[str, npt.NDArray[Any]]
Bytes = npt.NDArray[np.uint8]

_ALIGNED: Final = 7
"""Mask of the offset bits that are zero if every dtype can be read at the offset."""
_PREFIX: Final = struct.Struct("<Ii")
"""Start of a message: the continuation marker and the size of its metadata."""
_CONTINUED: Final = 0xFFFFFFFF
_MAX_HEAD_NBYTES: Final = 1 << 16
_BLANK_NBYTES: Final = 1 << 13
"""Maximum size of a stream for which one copy is faster than copying its parts."""

_ABSENT: Final = {type(None)}
"""Types of the validity buffers of an array without nulls."""

_from_buffers = pa.Array.from_buffers
_ndarray = np.ndarray


class _Column(NamedTuple):
    """Column of a plan, with its `position` in the schema and the index of its data `buffer` in the batch's body."""

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    row_nbytes: int
    buffer: int
    arrow: pa.DataType
    position: int


class Plan:
    """Precomputed conversion between arrays and record batches with one schema of numeric columns without nulls.

    >>> rows = pa.record_batch({"a": np.zeros(2), "b": np.arange(2)})
    >>> plan = Plan.of(rows.schema)
    >>> plan.read(rows)["b"]
    array([0, 1])
    >>> plan.write({"a": np.ones(3), "b": np.arange(3)}).to_pydict()
    {'a': [1.0, 1.0, 1.0], 'b': [0, 1, 2]}
    """

    __slots__ = ("_columns", "_has_bytes", "_row_nbytes", "_values", "schema")

    def __init__(self, schema: pa.Schema, columns: dict[str, _Column], values: list[int]) -> None:
        self.schema = schema
        self._columns, self._values = columns, values
        self._has_bytes = all(column.row_nbytes for column in columns.values())
        self._row_nbytes = sum([column.row_nbytes for column in columns.values()])

    @classmethod
    def of(cls, schema: pa.Schema) -> Plan | None:
        """Return the cached plan of a schema; None if a column cannot be read as a view."""
        key = schema.serialize().to_pybytes()
        return _plans.get(key, lambda: cls._create(schema)) if len(key) <= _MAX_HEAD_NBYTES else cls._create(schema)

    @classmethod
    def _create(cls, schema: pa.Schema) -> Plan | None:
        plan = cls.of_numbers(schema)
        return plan if len(plan._columns) == len(schema) else None

    @classmethod
    def of_numbers(cls, schema: pa.Schema) -> Plan:
        """Return a plan of the columns that can be read as views; callers may only use the plan's method `read`."""
        columns: dict[str, _Column] = {}
        values: list[int] = []
        buffers = 0
        for position, field in enumerate(schema):
            # Sequence lengths must be copied before they are validated.
            rows = None if field.name == names.SEQ_LENS else FieldReader(field).fixed_rows()
            if rows is None or field.name in columns:
                continue
            # Each array has a validity buffer, which is unused, and the innermost one a data buffer after it.
            buffers += len(rows.values) + 1
            row_nbytes = rows.dtype.itemsize * prod(rows.row_shape)
            columns[field.name] = _Column(rows.dtype, rows.row_shape, row_nbytes, buffers - 1, field.type, position)
            values += rows.values
        return cls(schema, columns, values)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    # Reading

    def view(self, data: pa.Buffer, body: Body, chosen: list[str]) -> Arrays | None:
        """View columns of a record batch in a file's bytes; return None if the batch's layout differs from the plan.

        Raises FormatError if the batch has too many rows for the batch's size in bytes.
        """
        rows, nodes, buffers, start, nbytes = body
        if rows <= 0 or nodes != [(rows * count, 0) for count in self._values]:
            return None
        memory.check_rows(rows, nbytes, "a table")
        arrays: Arrays = {}
        for name in chosen:
            dtype, row_shape, row_nbytes, buffer, *_ = self._columns[name]
            offset, buffer_nbytes = buffers[buffer]
            needed = rows * row_nbytes
            if offset < 0 or needed > buffer_nbytes or offset + needed > nbytes or start + offset & _ALIGNED:
                return None
            arrays[name] = _ndarray((rows, *row_shape), dtype, data, start + offset)
        return arrays

    def read(self, rows: pa.RecordBatch) -> Arrays | None:
        """View the columns of a record batch; return None if the batch's schema or layout differs from the plan.

        Misaligned arrays are copied; all other arrays are read-only views.
        """
        count = rows.num_rows
        if not (count and self._has_bytes and rows.schema.equals(self.schema, check_metadata=True)):
            return None
        arrays: Arrays = {}
        encoded = rows.columns
        for name, column in self._columns.items():
            array = encoded[column.position]
            *validity, last = array.buffers()
            if not _ABSENT.issuperset(map(type, validity)) or array.offset or last is None or len(array) != count:
                return None
            if last.size < count * column.row_nbytes:
                return None
            values = _ndarray((count, *column.row_shape), column.dtype, last)
            arrays[name] = values if values.flags.aligned else memory.copy_of(values)
        return arrays

    def nbytes_of(self, rows: pa.RecordBatch) -> int | None:
        """Return the size of a record batch's values in bytes; None if the schema is not the plan's schema."""
        has_schema = rows.schema.equals(self.schema, check_metadata=True)
        return rows.num_rows * self._row_nbytes if has_schema else None

    # Writing

    def fits(self, columns: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Return whether arrays match all columns of the schema in order, and all have the same positive length."""
        if len(columns) != len(self._columns):
            return False
        count = -1
        for (expected, column), (name, values) in zip(self._columns.items(), columns.items(), strict=True):
            if name != expected or values.shape[1:] != column.row_shape or values.dtype != column.dtype:
                return False
            if not values.flags.c_contiguous or (len(values) != count and count >= 0):
                return False
            count = len(values)
        return count > 0 and self._has_bytes

    def write(self, columns: Mapping[str, npt.NDArray[Any]]) -> pa.RecordBatch:
        """View arrays as a record batch; `fits` must be true for the arrays."""
        pairs = zip(self._columns.values(), columns.values(), strict=True)
        arrays = [_encode(column.arrow, len(values), memory.as_buffer(values)) for column, values in pairs]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


_plans = Recent[bytes, Plan | None](limit=64)
"""Plans of recently used schemas, by serialized schema."""


def _encode(arrow: pa.DataType, count: int, values: pa.Buffer) -> pa.Array:
    if isinstance(arrow, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(arrow, _encode(arrow.storage_type, count, values))
    if isinstance(arrow, pa.FixedSizeListType):
        inner = _encode(arrow.value_type, count * arrow.list_size, values)
        return _from_buffers(arrow, count, [None], children=[inner])
    return _from_buffers(arrow, count, [None, values])


class Place(NamedTuple):
    """Offset of a column in a stream, and the dtype and shape of its array."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the column."""
        return self.dtype.itemsize * prod(self.shape)


class StreamLayout:
    """Layout of Arrow streams that contain one record batch with a fixed schema and number of rows.

    A stream consists of a head and the record batch's buffers; the head contains the schema and the buffers' offsets. A
    stream is viewed without Arrow if all bytes outside its columns are equal to the corresponding bytes of a stream
    that Arrow has read.

    places: location of each column in the stream, by column name.
    stream: bytes of a stream with this layout, shape (nbytes,).
    head: bytes before the buffers.
    nbytes: size of a stream in bytes.

    >>> rows = pa.record_batch({"a": np.arange(3), "b": np.zeros(3)})
    >>> sink = pa.BufferOutputStream()
    >>> with pa.ipc.new_stream(sink, rows.schema) as writer:
    ...     writer.write_batch(rows)
    >>> stream = np.frombuffer(sink.getvalue(), np.uint8)
    >>> layout = StreamLayout.find(stream, pa.ipc.open_stream(stream).read_next_batch())
    >>> out = np.empty(layout.nbytes, np.uint8)
    >>> layout.write({"a": np.array([4, 5, 6]), "b": np.ones(3)}, out)
    >>> pa.ipc.open_stream(out).read_next_batch().to_pydict()
    {'a': [4, 5, 6], 'b': [1.0, 1.0, 1.0]}
    >>> layout.matches(out), layout.read(out)["a"]
    (True, array([4, 5, 6]))
    """

    __slots__ = ("_beside", "_blank", "head", "nbytes", "places")

    def __init__(self, places: Mapping[str, Place], stream: Bytes, head: bytes) -> None:
        self.head = head
        self.nbytes = stream.nbytes
        self.places: Mapping[str, Place] = dict(places)
        self._beside = _bytes_beside(self.places, stream, len(head))
        """Bytes after the head that belong to no column, with their offsets: paddings, and the end."""
        self._blank = stream.tobytes() if stream.nbytes <= _BLANK_NBYTES else None
        """A stream that is small, to be copied at once and written over."""

    @classmethod
    def find(cls, stream: Bytes, rows: pa.RecordBatch) -> Self | None:
        """Determine the layout of a stream, shape (nbytes,), that Arrow has read.

        Returns: the layout; None if the schema has no plan, or a column's values are not within the stream.
        """
        head, plan = head_of(stream), Plan.of(rows.schema)
        arrays = None if head is None or plan is None else plan.read(rows)
        if head is None or arrays is None:
            return None
        places = {}
        for name, values in arrays.items():
            start = values.ctypes.data - stream.ctypes.data
            if start < len(head) or start + values.nbytes > stream.nbytes:
                return None
            places[name] = Place(start, values.dtype, values.shape)
        return cls(places, stream, head)

    # Writing

    def fits(self, columns: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Return whether arrays match all columns of the layout in order."""
        if len(columns) != len(self.places):
            return False
        for (expected, (_, dtype, shape)), (name, values) in zip(self.places.items(), columns.items(), strict=True):
            if name != expected or values.shape != shape or values.dtype != dtype:
                return False
        return True

    def write(self, columns: Mapping[str, npt.NDArray[Any]], out: Bytes) -> None:
        """Write a stream.

        columns: arrays for which `fits` is true.
        out: destination, shape (nbytes,).
        """
        self._write_beside(out)
        targets = [_ndarray(shape, dtype, out, start) for start, dtype, shape in self.places.values()]
        copy_all(targets, list(columns.values()), self.nbytes)

    def _write_beside(self, out: Bytes) -> None:
        """Write all bytes of a stream outside the columns to memory, shape (nbytes,)."""
        view = out.data
        if self._blank is not None:
            view[:] = self._blank
            return
        view[: len(self.head)] = self.head
        for start, part in self._beside:
            view[start : start + len(part)] = part

    # Reading

    def matches(self, stream: Bytes) -> bool:
        """Return whether a stream, shape (m,), that starts with `head` has the layout's bytes outside the columns."""
        if stream.nbytes < self.nbytes:
            return False
        return all(stream[start : start + len(part)].tobytes() == part for start, part in self._beside)

    def read(self, stream: Bytes) -> dict[str, npt.NDArray[Any]]:
        """View the columns of a stream for which `matches` is true.

        Misaligned arrays are copied. Views are read-only if `stream` is read-only.
        """
        arrays = {}
        for name, (start, dtype, shape) in self.places.items():
            values = _ndarray(shape, dtype, stream, start)
            arrays[name] = values if values.flags.aligned else memory.copy_of(values)
        return arrays


def _bytes_beside(places: Mapping[str, Place], stream: Bytes, start: int) -> list[tuple[int, bytes]]:
    """Return offsets and copies of the runs of bytes in a stream that are after `start` and belong to no column."""
    spans = sorted((span.start, span.start + span.nbytes) for span in places.values())
    runs = []
    for first, stop in [*spans, (stream.nbytes, stream.nbytes)]:
        if first > start:
            runs.append((start, stream[start:first].tobytes()))
        start = max(start, stop)
    return runs


def head_of(stream: Bytes) -> bytes | None:
    """Return a stream's first two messages, without the second message's buffers; None if a message is missing.

    The first message is the schema, and the second message is the record batch.

    >>> head_of(np.zeros(8, np.uint8)) is None
    True
    """
    stop, limit = 0, min(stream.nbytes, _MAX_HEAD_NBYTES)
    for _ in range(2):
        if stop + _PREFIX.size > limit:
            return None
        mark, described = _PREFIX.unpack_from(stream.data, stop)
        stop += _PREFIX.size + described
        if mark != _CONTINUED or described <= 0 or stop > limit:
            return None
    return stream[:stop].tobytes()


def schema_of(head: bytes) -> bytes:
    """Return the schema, which is the first message in the result of `head_of`."""
    return head[: _PREFIX.size + _PREFIX.unpack_from(head)[1]]

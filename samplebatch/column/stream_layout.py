"""StreamLayout: where the columns lie in Arrow streams that are alike up to their numbers."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.threads import copy_all

Bytes = npt.NDArray[np.uint8]

_PREFIX: Final = struct.Struct("<Ii")
"""At the beginning of a message: the mark that one follows, and the bytes that describe it."""
_CONTINUED: Final = 0xFFFFFFFF
_MAX_HEAD_NBYTES: Final = 1 << 16
_BLANK_NBYTES: Final = 1 << 13
"""Bytes of a stream up to which one copy costs less than those of its pieces."""

_ndarray = np.ndarray


class Place(NamedTuple):
    """The place of a column in a stream.

    Attributes
    ----------
    start
        Its first byte.
    dtype, shape
        Of its array.
    """

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the column."""
        return self.dtype.itemsize * prod(self.shape)


class StreamLayout:
    """Layout of Arrow streams of one record batch of numbers, for writers and readers of many of one form.

    A stream is its head, which has the schema and says where the buffers of the record batch lie, and these buffers.
    Where all columns are numbers without nulls, a stream that has the same bytes beside its columns as one that was
    read and checked is read as that one: each column is a view of the same place.

    Parameters
    ----------
    places
        The columns, by their names.
    stream
        A stream of this form, shape (nbytes,).
    head
        The bytes that it begins with, up to the buffers.

    Attributes
    ----------
    places, head
        As given.
    nbytes
        Bytes of a stream.

    Examples
    --------
    >>> rows = pa.record_batch({"a": np.arange(3), "b": np.zeros(3)})
    >>> sink = pa.BufferOutputStream()
    >>> with pa.ipc.new_stream(sink, rows.schema) as writer:
    ...     writer.write_batch(rows)
    >>> stream = np.frombuffer(sink.getvalue(), np.uint8)
    >>> read = pa.ipc.open_stream(stream).read_next_batch()
    >>> columns = {name: TensorColumn(read[name].to_numpy()) for name in read.column_names}
    >>> layout = StreamLayout.find(stream, read, columns)
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
        """Bytes after the head that are no column's, and where they begin: paddings, and the end."""
        self._blank = stream.tobytes() if stream.nbytes <= _BLANK_NBYTES else None
        """A stream that is small, to be copied at once and written over."""

    @classmethod
    def find(cls, stream: Bytes, rows: pa.RecordBatch, columns: Mapping[str, Column]) -> Self | None:
        """Find the layout of a stream that was read.

        Parameters
        ----------
        stream
            Its bytes, shape (nbytes,).
        rows
            Its record batch.
        columns
            The columns of that, once they were checked.

        Returns
        -------
        The layout; None if a column is not one array of numbers in these bytes, so that a stream with the same bytes
        beside its columns may have others.
        """
        head = head_of(stream)
        if head is None or rows.schema.names != list(columns):
            return None
        places = {}
        for array, (name, column) in zip(rows.columns, columns.items(), strict=True):
            # Columns with nulls, or of rows that vary in length, have buffers before that of their values.
            if not isinstance(column, TensorColumn) or any(buffer is not None for buffer in array.buffers()[:-1]):
                return None
            values = column.values
            start = values.ctypes.data - stream.ctypes.data
            if not values.nbytes or start < len(head) or start + values.nbytes > stream.nbytes:
                return None
            places[name] = Place(start, values.dtype, values.shape)
        return cls(places, stream, head)

    # Writing

    def fits(self, columns: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Tell whether arrays are the columns of such a stream: all of them, in their order, and no others."""
        if len(columns) != len(self.places):
            return False
        for (own, (_, dtype, shape)), (name, values) in zip(self.places.items(), columns.items(), strict=True):
            if name != own or values.shape != shape or values.dtype != dtype:
                return False
        return True

    def write(self, columns: Mapping[str, npt.NDArray[Any]], out: Bytes) -> None:
        """Write a stream.

        Parameters
        ----------
        columns
            Arrays that `fits` is true of.
        out
            Memory for it, shape (nbytes,).
        """
        self.write_beside(out)
        targets = [_ndarray(shape, dtype, out, start) for start, dtype, shape in self.places.values()]
        copy_all(targets, list(columns.values()), self.nbytes)

    def write_beside(self, out: Bytes) -> None:
        """Write all bytes of a stream but those of its columns into memory, shape (nbytes,)."""
        view = out.data
        if self._blank is not None:
            view[:] = self._blank
            return
        view[: len(self.head)] = self.head
        for start, part in self._beside:
            view[start : start + len(part)] = part

    # Reading

    def matches(self, stream: Bytes) -> bool:
        """Tell whether a stream that begins with `head` has the same bytes beside its columns, shape (m,)."""
        if stream.nbytes < self.nbytes:
            return False
        return all(stream[start : start + len(part)].tobytes() == part for start, part in self._beside)

    def read(self, stream: Bytes) -> dict[str, npt.NDArray[Any]]:
        """View the columns of a stream that `matches` is true of.

        Arrays at an address where their dtype cannot be read are copied. The others are read-only if `stream` is.
        """
        found = {}
        for name, (start, dtype, shape) in self.places.items():
            values = _ndarray(shape, dtype, stream, start)
            found[name] = values if values.flags.aligned else memory.copy_of(values)
        return found


def _bytes_beside(places: Mapping[str, Place], stream: Bytes, start: int) -> list[tuple[int, bytes]]:
    """Copy the bytes of a stream from a place on that are no column's, each run with the place where it begins."""
    spans = sorted((place.start, place.start + place.nbytes) for place in places.values())
    found = []
    for first, stop in [*spans, (stream.nbytes, stream.nbytes)]:
        if first > start:
            found.append((start, stream[start:first].tobytes()))
        start = max(start, stop)
    return found


def head_of(stream: Bytes) -> bytes | None:
    """Return the bytes of a stream up to the buffers of its second message; None if it is no such stream.

    The first message is the schema, and the second one the record batch.

    Examples
    --------
    >>> head_of(np.zeros(8, np.uint8)) is None
    True
    """
    stop, most = 0, min(stream.nbytes, _MAX_HEAD_NBYTES)
    for _ in range(2):
        if stop + _PREFIX.size > most:
            return None
        mark, described = _PREFIX.unpack_from(stream.data, stop)
        stop += _PREFIX.size + described
        if mark != _CONTINUED or described <= 0 or stop > most:
            return None
    return stream[:stop].tobytes()

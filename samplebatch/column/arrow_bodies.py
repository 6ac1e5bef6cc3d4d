"""Layout of Arrow files, read without decoding: the schema's bytes, places of buffers and their decompressed sizes.

Arrow takes memory for as much as a compressed buffer's first eight bytes say. The library writes no compressed buffers
unless asked for; whoever has written a file again may have. pyarrow does not tell how buffers lie in a file, so the
footer and the messages of the record batches are read here: tables of FlatBuffers, whose fields are found by their
numbers in Arrow's format.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from samplebatch.errors import FormatError

_TAIL = struct.Struct("<i6s")
"""At the end of the file: bytes of the footer before it, and the magic."""

_BLOCK = struct.Struct("<qi4xq")
"""Where a message is, bytes of what describes it, and bytes of its body."""

_SPAN = struct.Struct("<qq")
"""Where a buffer begins in the body, and its bytes."""

_NODE = struct.Struct("<qq")
"""Rows of an array, and its nulls."""

_SCHEMA, _DICTIONARIES, _RECORD_BATCHES = 1, 2, 3
_ENDIANNESS = 0
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_CONTINUED = 0xFFFFFFFF
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_DATA = 1
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3

_DAMAGE = (struct.error, IndexError, ValueError, TypeError)
_NO_FOOTER = "an Arrow file must have a footer that says where its batches are: {}"


class Body(NamedTuple):
    """A record batch as its message describes it.

    Attributes
    ----------
    rows
        Rows of its columns.
    nodes
        Rows and nulls of each array, depth first.
    buffers
        Start of each buffer in the body, and its bytes.
    start
        Start of the body in the file.
    nbytes
        Bytes of the body.
    """

    rows: int
    nodes: list[tuple[int, ...]]
    buffers: list[tuple[int, ...]]
    start: int
    nbytes: int


class ArrowLayout:
    """Layout of an Arrow file as its footer and messages describe it, for readers of its buffers.

    Parameters
    ----------
    data
        All bytes of the file.

    Raises
    ------
    FormatError
        If the file has no footer and messages where it says.

    Attributes
    ----------
    schema
        The footer without the places of batches: files with the same bytes here have the same schema.
    num_batches
        Count of record batches.
    decompressed_nbytes
        Sum of the stated decompressed sizes of compressed buffers; 0 in a file without any.

    Examples
    --------
    >>> import numpy as np
    >>> sink = pa.BufferOutputStream()
    >>> table = pa.table({"a": np.zeros(1000)})
    >>> with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
    ...     writer.write_table(table, max_chunksize=600)
    >>> layout = ArrowLayout(sink.getvalue())
    >>> layout.num_batches, layout.rows(), layout.decompressed_nbytes
    (2, [600, 400], 8000)
    """

    __slots__ = ("_batches", "_footer", "decompressed_nbytes", "num_batches", "schema")

    def __init__(self, data: pa.Buffer) -> None:
        view = memoryview(data).cast("B")
        try:
            self._footer = _footer(view)
            self.schema = self._footer.bytes_without(_RECORD_BATCHES, _BLOCK)
            dictionaries = [_Message(view, *place) for place in self._footer.structs(_DICTIONARIES, _BLOCK)]
            self._batches = [_Message(view, *place) for place in self._footer.structs(_RECORD_BATCHES, _BLOCK)]
            self.decompressed_nbytes = sum([found.decompressed_nbytes() for found in dictionaries + self._batches])
        except _DAMAGE as error:
            raise FormatError(_NO_FOOTER.format(error)) from error
        self.num_batches = len(self._batches)

    def is_native(self) -> bool:
        """Tell whether numbers lie in the file as in memory, the lowest byte first; that follows from `schema`.

        Raises
        ------
        FormatError
            If the footer is damaged.
        """
        try:
            schema = self._footer.table(_SCHEMA)
            return sys.byteorder == "little" and schema is not None and not schema.byte(_ENDIANNESS)
        except _DAMAGE as error:
            raise FormatError(_NO_FOOTER.format(error)) from error

    def rows(self) -> list[int]:
        """Read the rows of each record batch.

        Raises
        ------
        FormatError
            If a message is damaged.
        """
        try:
            return [found.rows() for found in self._batches]
        except _DAMAGE as error:
            raise FormatError(_NO_FOOTER.format(error)) from error

    def body(self, number: int) -> Body | None:
        """Read the places of a record batch's buffers; None if they are compressed.

        Raises
        ------
        FormatError
            If the message is damaged.
        """
        try:
            return self._batches[number].body()
        except _DAMAGE as error:
            raise FormatError(_NO_FOOTER.format(error)) from error


def decompressed_stream_nbytes(data: pa.Buffer) -> int:
    """Add up the stated decompressed sizes of an Arrow stream's buffers, as `ArrowLayout` does for a file.

    Raises
    ------
    FormatError
        If there are no messages one after the other.
    """
    view = memoryview(data).cast("B")
    found = at = 0
    try:
        while at < len(view):
            prefix = 8 if _read(view, "<I", at) == _CONTINUED else 4
            described = _read(view, "<i", at + prefix - 4)
            if not described:
                break
            length = _root(_span(view, at + prefix, described)).long(_BODY_LENGTH)
            found += _Message(view, at, prefix + described, length).decompressed_nbytes()
            at += prefix + described + length
    except _DAMAGE as error:
        raise FormatError(f"an Arrow stream must have messages one after the other: {error}") from error
    return found


def _footer(view: memoryview) -> _Table:
    nbytes, magic = _TAIL.unpack_from(view, len(view) - _TAIL.size)
    if magic != b"ARROW1":
        raise ValueError("the last bytes are not those of an Arrow file")
    return _root(view[len(view) - _TAIL.size - nbytes : len(view) - _TAIL.size])


class _Message:
    """A message with a record batch, which may be that of a dictionary, and the place of its body."""

    __slots__ = ("_batch", "_is_dictionary", "_nbytes", "_start", "_view")

    def __init__(self, view: memoryview, start: int, described: int, length: int) -> None:
        if min(start, described, length) < 0 or start + described + length > len(view):
            raise ValueError("a batch lies outside of the file")
        # Before version 0.15 the length stood there alone.
        prefix = 8 if _read(view, "<I", start) == _CONTINUED else 4
        message = _root(view[start + prefix : start + described])
        kind, batch = message.byte(_HEADER_TYPE), message.table(_HEADER)
        self._is_dictionary = kind == _DICTIONARY_BATCH
        if self._is_dictionary and batch is not None:
            batch = batch.table(_DATA)
        self._batch = batch if kind in (_DICTIONARY_BATCH, _RECORD_BATCH) else None
        self._view, self._start, self._nbytes = view, start + described, length

    def rows(self) -> int:
        """Read the rows of the batch."""
        return 0 if self._batch is None else self._batch.long(_LENGTH)

    def decompressed_nbytes(self) -> int:
        """Add up the stated decompressed sizes of the body's buffers."""
        if self._batch is None or not self._batch.has(_COMPRESSION):
            return 0
        body = self._view[self._start : self._start + self._nbytes]
        found = 0
        for at, nbytes in self._batch.structs(_BUFFERS, _SPAN):
            if nbytes:
                found += max(_read(body, "<q", at), nbytes)
        return found

    def body(self) -> Body | None:
        """Read the places of the body's buffers; None if they are compressed."""
        batch = self._batch
        if batch is None or self._is_dictionary or batch.has(_COMPRESSION):
            return None
        nodes, buffers = list(batch.structs(_NODES, _NODE)), list(batch.structs(_BUFFERS, _SPAN))
        return Body(batch.long(_LENGTH), nodes, buffers, self._start, self._nbytes)


class _Table:
    """A table of FlatBuffers."""

    def __init__(self, view: memoryview, at: int) -> None:
        self._view, self._at = view, at
        self._fields = at - _read(view, "<i", at)
        self._count = (_read(view, "<H", self._fields) - 4) // 2

    def _place(self, field: int) -> int | None:
        if field >= self._count:
            return None
        offset = _read(self._view, "<H", self._fields + 4 + 2 * field)
        return self._at + offset if offset else None

    def has(self, field: int) -> bool:
        """Tell whether a field is there."""
        return self._place(field) is not None

    def byte(self, field: int) -> int:
        """Read a number of one byte."""
        place = self._place(field)
        return 0 if place is None else self._view[place]

    def long(self, field: int) -> int:
        """Read a number of eight bytes."""
        place = self._place(field)
        return 0 if place is None else _read(self._view, "<q", place)

    def table(self, field: int) -> _Table | None:
        """Find a table within."""
        place = self._place(field)
        return None if place is None else _Table(self._view, place + _read(self._view, "<I", place))

    def structs(self, field: int, form: struct.Struct) -> Iterator[tuple[int, ...]]:
        """Read the structs of a vector."""
        start, stop = self._vector(field, form)
        return form.iter_unpack(self._view[start:stop])

    def bytes_without(self, field: int, form: struct.Struct) -> bytes:
        """Return the bytes of all tables around this one, without the structs of a vector."""
        start, stop = self._vector(field, form)
        return bytes(self._view[:start]) + bytes(self._view[stop:])

    def _vector(self, field: int, form: struct.Struct) -> tuple[int, int]:
        """Find where the structs of a vector begin and end."""
        place = self._place(field)
        if place is None:
            return 0, 0
        place += _read(self._view, "<I", place)
        nbytes = _read(self._view, "<I", place) * form.size
        _span(self._view, place + 4, nbytes)
        return place + 4, place + 4 + nbytes


def _root(view: memoryview) -> _Table:
    return _Table(view, _read(view, "<I", 0))


def _read(view: memoryview, form: str, at: int) -> int:
    if at < 0:
        raise ValueError("a table lies outside of what holds it")
    number: int
    (number,) = struct.unpack_from(form, view, at)
    return number


def _span(view: memoryview, at: int, nbytes: int) -> memoryview:
    if at < 0 or at + nbytes > len(view):
        raise ValueError("a table lies outside of what holds it")
    return view[at : at + nbytes]

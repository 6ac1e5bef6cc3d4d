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

_U16, _I32, _U32, _I64 = map(struct.Struct, ("<H", "<i", "<I", "<q"))
_OUTSIDE = "a table lies outside of what holds it"

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
            prefix = 8 if _U32.unpack_from(view, at)[0] == _CONTINUED else 4
            described: int = _I32.unpack_from(view, at + prefix - 4)[0]
            if not described:
                break
            if at + prefix + described > len(view):
                raise ValueError(_OUTSIDE)
            length = _root(view[at + prefix : at + prefix + described]).long(_BODY_LENGTH)
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
        prefix = 8 if _U32.unpack_from(view, start)[0] == _CONTINUED else 4
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
                if at < 0:
                    raise ValueError(_OUTSIDE)
                found += max(_I64.unpack_from(body, at)[0], nbytes)
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

    __slots__ = ("_at", "_offsets", "_view")

    def __init__(self, view: memoryview, at: int) -> None:
        fields = at - _I32.unpack_from(view, at)[0]
        if fields < 0:
            raise ValueError(_OUTSIDE)
        count = max(0, (_U16.unpack_from(view, fields)[0] - 4) // 2)
        self._view, self._at = view, at
        # By the number of the field; 0 if the table lacks it.
        self._offsets = struct.unpack_from(f"<{count}H", view, fields + 4)

    def has(self, field: int) -> bool:
        """Tell whether a field is there."""
        return field < len(self._offsets) and self._offsets[field] != 0

    def byte(self, field: int) -> int:
        """Read a number of one byte."""
        offset = self._offsets[field] if field < len(self._offsets) else 0
        return self._view[self._at + offset] if offset else 0

    def long(self, field: int) -> int:
        """Read a number of eight bytes."""
        offset = self._offsets[field] if field < len(self._offsets) else 0
        number: int = _I64.unpack_from(self._view, self._at + offset)[0] if offset else 0
        return number

    def table(self, field: int) -> _Table | None:
        """Find a table within."""
        if not self.has(field):
            return None
        place = self._at + self._offsets[field]
        return _Table(self._view, place + _U32.unpack_from(self._view, place)[0])

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
        if field >= len(self._offsets) or not self._offsets[field]:
            return 0, 0
        place = self._at + self._offsets[field]
        place += _U32.unpack_from(self._view, place)[0] + 4
        stop = place + _U32.unpack_from(self._view, place - 4)[0] * form.size
        if stop > len(self._view):
            raise ValueError(_OUTSIDE)
        return place, stop


def _root(view: memoryview) -> _Table:
    return _Table(view, _U32.unpack_from(view)[0])

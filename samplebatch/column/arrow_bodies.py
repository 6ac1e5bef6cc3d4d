"""Layout of Arrow files, read without decoding: schema bytes, buffer offsets and decompressed sizes.

Arrow allocates as much memory as the first eight bytes of a compressed buffer declare. The library compresses buffers
only on request, but rewritten files may be compressed. pyarrow does not expose the buffer layout of a file, so this
module reads the footer and the record batch messages. The footer and the messages are FlatBuffers tables; Arrow's
format specifies the field numbers.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from samplebatch.errors import FormatError

_TAIL = struct.Struct("<i6s")
"""File trailer: size of the preceding footer, and the magic bytes."""

_BLOCK = struct.Struct("<qi4xq")
"""Offset of a message, size of its metadata, and size of its body."""

_SPAN = struct.Struct("<qq")
"""Offset of a buffer in the body, and its size."""

_NODE = struct.Struct("<qq")
"""Number of rows and nulls of an array."""

_U16, _I32, _U32, _I64 = map(struct.Struct, ("<H", "<i", "<I", "<q"))
_OUTSIDE = "a table is outside its container"

_SCHEMA, _DICTIONARIES, _RECORD_BATCHES = 1, 2, 3
_ENDIANNESS = 0
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_CONTINUED = 0xFFFFFFFF
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_DATA = 1
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3

_DAMAGE = (struct.error, IndexError, ValueError, TypeError)
_NO_FOOTER = "an Arrow file must have a footer that locates its batches: {}"


class Body(NamedTuple):
    """Buffer layout of a record batch, read from the batch's message.

    nodes: number of rows and number of nulls of each array, depth first.
    buffers: offset in the body and size in bytes of each buffer.
    start: offset of the body in the file, in bytes.
    nbytes: size of the body in bytes.
    """

    rows: int
    nodes: list[tuple[int, ...]]
    buffers: list[tuple[int, ...]]
    start: int
    nbytes: int


class ArrowLayout:
    """Layout of an Arrow file: offsets and sizes of the buffers, read from the footer and the messages.

    schema: bytes of the footer without the batch offsets; files with equal `schema` bytes have equal Arrow schemas.
    decompressed_nbytes: total declared decompressed size of compressed buffers; 0 without compression.

    Raises FormatError if the file has no valid footer, or no messages at the declared offsets.

    >>> import numpy as np
    >>> sink = pa.BufferOutputStream()
    >>> table = pa.table({"a": np.zeros(1000)})
    >>> with pa.ipc.new_file(
    ...     sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ... ) as writer:
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
            dictionaries = [_Message(view, *block) for block in self._footer.structs(_DICTIONARIES, _BLOCK)]
            self._batches = [_Message(view, *block) for block in self._footer.structs(_RECORD_BATCHES, _BLOCK)]
            self.decompressed_nbytes = sum([message.decompressed_nbytes() for message in dictionaries + self._batches])
        except _DAMAGE as error:
            raise FormatError(_NO_FOOTER.format(error)) from error
        self.num_batches = len(self._batches)

    def is_native(self) -> bool:
        """Return whether the file's numbers and this machine's memory are both little-endian.

        Raises FormatError if the footer is damaged.
        """
        try:
            schema = self._footer.table(_SCHEMA)
            return sys.byteorder == "little" and schema is not None and not schema.byte(_ENDIANNESS)
        except _DAMAGE as error:
            raise FormatError(_NO_FOOTER.format(error)) from error

    def rows(self) -> list[int]:
        """Return the number of rows per record batch.

        Raises FormatError if a message is damaged.
        """
        try:
            return [message.rows() for message in self._batches]
        except _DAMAGE as error:
            raise FormatError(_NO_FOOTER.format(error)) from error

    def body(self, number: int) -> Body | None:
        """Return the buffer layout of a record batch; None if the batch is compressed.

        Raises FormatError if the message is damaged.
        """
        try:
            return self._batches[number].body()
        except _DAMAGE as error:
            raise FormatError(_NO_FOOTER.format(error)) from error


def decompressed_stream_nbytes(data: pa.Buffer) -> int:
    """Sum the declared decompressed sizes of an Arrow stream's buffers; see `ArrowLayout`.

    Raises FormatError if the stream does not consist of contiguous messages.
    """
    view = memoryview(data).cast("B")
    total = at = 0
    try:
        while at < len(view):
            prefix = 8 if _U32.unpack_from(view, at)[0] == _CONTINUED else 4
            described: int = _I32.unpack_from(view, at + prefix - 4)[0]
            if not described:
                break
            if at + prefix + described > len(view):
                raise ValueError(_OUTSIDE)
            length = _root(view[at + prefix : at + prefix + described]).long(_BODY_LENGTH)
            total += _Message(view, at, prefix + described, length).decompressed_nbytes()
            at += prefix + described + length
    except _DAMAGE as error:
        raise FormatError(f"an Arrow stream must have contiguous messages: {error}") from error
    return total


def _footer(view: memoryview) -> _Table:
    nbytes, magic = _TAIL.unpack_from(view, len(view) - _TAIL.size)
    if magic != b"ARROW1":
        raise ValueError(f"the file must end with {b'ARROW1'!r}, got {bytes(magic)!r}")
    return _root(view[len(view) - _TAIL.size - nbytes : len(view) - _TAIL.size])


class _Message:
    """Message with a record batch or dictionary, and the location of the message body."""

    __slots__ = ("_batch", "_is_dictionary", "_nbytes", "_start", "_view")

    def __init__(self, view: memoryview, start: int, described: int, length: int) -> None:
        if min(start, described, length) < 0 or start + described + length > len(view):
            raise ValueError("a batch is outside the file")
        # Before version 0.15 there was only the length.
        prefix = 8 if _U32.unpack_from(view, start)[0] == _CONTINUED else 4
        message = _root(view[start + prefix : start + described])
        kind, batch = message.byte(_HEADER_TYPE), message.table(_HEADER)
        self._is_dictionary = kind == _DICTIONARY_BATCH
        if self._is_dictionary and batch is not None:
            batch = batch.table(_DATA)
        self._batch = batch if kind in (_DICTIONARY_BATCH, _RECORD_BATCH) else None
        self._view, self._start, self._nbytes = view, start + described, length

    def rows(self) -> int:
        return 0 if self._batch is None else self._batch.long(_LENGTH)

    def decompressed_nbytes(self) -> int:
        """Sum the declared decompressed sizes of the body's buffers."""
        if self._batch is None or not self._batch.has(_COMPRESSION):
            return 0
        body = self._view[self._start : self._start + self._nbytes]
        total = 0
        for at, nbytes in self._batch.structs(_BUFFERS, _SPAN):
            if nbytes:
                if at < 0:
                    raise ValueError(_OUTSIDE)
                total += max(_I64.unpack_from(body, at)[0], nbytes)
        return total

    def body(self) -> Body | None:
        """Return the body's buffer layout; None if the body is compressed."""
        batch = self._batch
        if batch is None or self._is_dictionary or batch.has(_COMPRESSION):
            return None
        nodes, buffers = list(batch.structs(_NODES, _NODE)), list(batch.structs(_BUFFERS, _SPAN))
        return Body(batch.long(_LENGTH), nodes, buffers, self._start, self._nbytes)


class _Table:
    """FlatBuffers table."""

    __slots__ = ("_at", "_offsets", "_view")

    def __init__(self, view: memoryview, at: int) -> None:
        fields = at - _I32.unpack_from(view, at)[0]
        if fields < 0:
            raise ValueError(_OUTSIDE)
        count = max(0, (_U16.unpack_from(view, fields)[0] - 4) // 2)
        self._view, self._at = view, at
        # Indexed by field number; 0 if the table lacks the field.
        self._offsets = struct.unpack_from(f"<{count}H", view, fields + 4)

    def has(self, field: int) -> bool:
        return field < len(self._offsets) and self._offsets[field] != 0

    def byte(self, field: int) -> int:
        offset = self._offsets[field] if field < len(self._offsets) else 0
        return self._view[self._at + offset] if offset else 0

    def long(self, field: int) -> int:
        offset = self._offsets[field] if field < len(self._offsets) else 0
        number: int = _I64.unpack_from(self._view, self._at + offset)[0] if offset else 0
        return number

    def table(self, field: int) -> _Table | None:
        if not self.has(field):
            return None
        position = self._at + self._offsets[field]
        return _Table(self._view, position + _U32.unpack_from(self._view, position)[0])

    def structs(self, field: int, form: struct.Struct) -> Iterator[tuple[int, ...]]:
        start, stop = self._vector(field, form)
        return form.iter_unpack(self._view[start:stop])

    def bytes_without(self, field: int, form: struct.Struct) -> bytes:
        """Return the bytes of the underlying memory, without the structs of one vector of this table."""
        start, stop = self._vector(field, form)
        return bytes(self._view[:start]) + bytes(self._view[stop:])

    def _vector(self, field: int, form: struct.Struct) -> tuple[int, int]:
        if field >= len(self._offsets) or not self._offsets[field]:
            return 0, 0
        position = self._at + self._offsets[field]
        position += _U32.unpack_from(self._view, position)[0] + 4
        stop = position + _U32.unpack_from(self._view, position - 4)[0] * form.size
        if stop > len(self._view):
            raise ValueError(_OUTSIDE)
        return position, stop


def _root(view: memoryview) -> _Table:
    return _Table(view, _U32.unpack_from(view)[0])

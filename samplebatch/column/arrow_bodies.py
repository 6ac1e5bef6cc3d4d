"""How many bytes the compressed buffers of an Arrow file say they decompress to, before anything is decompressed.

Arrow takes memory for as much as a buffer's first eight bytes say. The library writes no compressed buffers; whoever
has written a file again may have. pyarrow does not tell how buffers lie in a file, so the footer and the messages of
the record batches are read here: tables of FlatBuffers, whose fields are found by their numbers in Arrow's format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

from samplebatch.errors import FormatError

_TAIL = struct.Struct("<i6s")
"""At the end of the file: bytes of the footer before it, and the magic."""

_BLOCK = struct.Struct("<qi4xq")
"""Where a message is, bytes of what describes it, and bytes of its body."""

_SPAN = struct.Struct("<qq")
"""Where a buffer begins in the body, and its bytes."""

_DICTIONARIES, _RECORD_BATCHES = 2, 3
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_CONTINUED = 0xFFFFFFFF
_DICTIONARY_BATCH = 2
_DATA = 1
_LENGTH, _BUFFERS, _COMPRESSION = 0, 2, 3

_DAMAGE = (struct.error, IndexError, ValueError, TypeError)
_NO_FOOTER = "an Arrow file must have a footer that says where its batches are: {}"


def decompressed_nbytes(data: pa.Buffer) -> int:
    """Add up the stated decompressed sizes of compressed buffers; a file without any has 0.

    Raises
    ------
    FormatError
        If the file has no footer and messages where it says.

    Examples
    --------
    >>> import numpy as np
    >>> sink = pa.BufferOutputStream()
    >>> table = pa.table({"a": np.zeros(1000)})
    >>> with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
    ...     writer.write_table(table)
    >>> decompressed_nbytes(sink.getvalue())
    8000
    """
    view = memoryview(data).cast("B")
    try:
        footer = _footer(view)
        places = [*footer.structs(_DICTIONARIES, _BLOCK), *footer.structs(_RECORD_BATCHES, _BLOCK)]
        return sum(_body_nbytes(view, *place) for place in places)
    except _DAMAGE as error:
        raise FormatError(_NO_FOOTER.format(error)) from error


def batch_rows(data: pa.Buffer) -> list[int]:
    """Read the rows of each record batch of an Arrow file, and decode none.

    Raises
    ------
    FormatError
        If the file has no footer and messages where it says.

    Examples
    --------
    >>> sink = pa.BufferOutputStream()
    >>> table = pa.table({"a": [1, 2, 3]})
    >>> with pa.ipc.new_file(sink, table.schema) as writer:
    ...     writer.write_table(table, max_chunksize=2)
    >>> batch_rows(sink.getvalue())
    [2, 1]
    """
    view = memoryview(data).cast("B")
    try:
        batches = [_message(view, *place).table(_HEADER) for place in _footer(view).structs(_RECORD_BATCHES, _BLOCK)]
        return [0 if batch is None else batch.long(_LENGTH) for batch in batches]
    except _DAMAGE as error:
        raise FormatError(_NO_FOOTER.format(error)) from error


def decompressed_stream_nbytes(data: pa.Buffer) -> int:
    """Add up the stated decompressed sizes of an Arrow stream's buffers, as `decompressed_nbytes` does.

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
            found += _body_nbytes(view, at, prefix + described, length)
            at += prefix + described + length
    except _DAMAGE as error:
        raise FormatError(f"an Arrow stream must have messages one after the other: {error}") from error
    return found


def _footer(view: memoryview) -> _Table:
    nbytes, _ = _TAIL.unpack_from(view, len(view) - _TAIL.size)
    return _root(view[len(view) - _TAIL.size - nbytes : len(view) - _TAIL.size])


def _message(view: memoryview, start: int, described: int, length: int) -> _Table:
    if min(start, described, length) < 0 or start + described + length > len(view):
        raise ValueError("a batch lies outside of the file")
    # Before version 0.15 the length stood there alone.
    prefix = 8 if _read(view, "<I", start) == _CONTINUED else 4
    return _root(view[start + prefix : start + described])


def _body_nbytes(view: memoryview, start: int, described: int, length: int) -> int:
    message = _message(view, start, described, length)
    batch = message.table(_HEADER)
    if batch is not None and message.byte(_HEADER_TYPE) == _DICTIONARY_BATCH:
        batch = batch.table(_DATA)
    if batch is None or batch.table(_COMPRESSION) is None:
        return 0
    body = view[start + described : start + described + length]
    found = 0
    for at, nbytes in batch.structs(_BUFFERS, _SPAN):
        if nbytes:
            found += max(_read(body, "<q", at), nbytes)
    return found


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
        place = self._place(field)
        if place is None:
            return iter(())
        place += _read(self._view, "<I", place)
        count = _read(self._view, "<I", place)
        return form.iter_unpack(_span(self._view, place + 4, count * form.size))


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

"""Validation of the column sizes of a Parquet file before the columns are read.

The metadata of a file may declare incorrect sizes. The sizes are therefore computed from the page headers: Parquet
readers allocate only the decompressed size that each page header declares. The metadata consists of structs in Thrift's
compact protocol. This module parses the metadata itself, because pyarrow terminates the process on some damaged
metadata and does not expose page sizes.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from samplebatch.column.arrow import Recent
from samplebatch.column.memory import MemoryBound
from samplebatch.errors import FormatError, SampleBatchError

_TAIL_NBYTES = 8
"""Size of the end of a file: length of the metadata in four bytes, and the magic."""

_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Size of a value by type number: flags, 32, 64 and 96 bits, float and double."""

_INT32, _BYTES, _FIXED = 1, 6, 7
_PLACE_NBYTES = 8

_SCHEMA, _ROW_GROUPS = 2, 4
_ELEMENT_KIND, _ELEMENT_LENGTH, _ELEMENT_CHILDREN, _ELEMENT_MEANING = 1, 2, 5, 6
_ELEMENT_REPETITION, _REPEATED = 3, 2
_MEANING_WIDTHS = {11: 1, 12: 2, 15: 1, 16: 2}
"""Size in memory of 8- and 16-bit integers stored in 32 bits, by logical type number."""

_GROUP_COLUMNS, _CHUNK_ABOUT = 1, 3
_TYPE, _PATH, _VALUES, _COMPRESSED, _DATA_AT, _DICTIONARY_AT = 1, 3, 5, 7, 9, 11
_SIZES, _TEXT_NBYTES, _REPEATED_LEVELS, _DEFINED_LEVELS = 16, 1, 2, 3
_PAGE_NBYTES, _PAGE_STORED = 2, 3
_PAGE_FORMS = (5, 8)
_FORM_VALUES, _FORM_ENCODING = 1, {5: 2, 8: 4}
_REPEATING = frozenset((2, 7, 8))
"""Encodings in which few bytes represent many values of the maximum length: dictionaries and shared prefixes."""

STEP_ROWS = 1024
"""Rows read at once if their size is unknown."""


class Chunk(NamedTuple):
    """Size of one column's values in one row group, computed from the page headers.

    nbytes: uncompressed size of the pages or of the values in bytes, whichever is larger.
    repeats: whether values of variable length may occupy more than `nbytes`, because they are stored once and repeated.
    """

    name: str
    nbytes: int
    repeats: bool


class BoundedReader:
    """Reader of Parquet columns that enforces a memory bound.

    file: an open `pyarrow.parquet.ParquetFile`.

    Raises FormatError if the file's metadata is invalid.
    """

    def __init__(self, file: Any, data: pa.Buffer) -> None:
        self._file = file
        self._view = memoryview(data).cast("B")
        with _describing():
            self._about = _description(self._view)
            elements = self._about[_SCHEMA][1:]
            self._leaves = [element for element in elements if not element.get(_ELEMENT_CHILDREN)]
            self._widths = [_width(element) for element in self._leaves]

    def read(self, groups: Sequence[int], names: Sequence[str], bound: MemoryBound) -> pa.Table:
        """Read columns of row groups.

        A string that is stored once may occur repeatedly in the table. String columns are therefore read in parts, and
        the size of each part is subtracted from the memory bound.

        Raises CapacityError if a column exceeds the remaining memory bound. Raises FormatError if pages are not at the
        declared offsets.
        """
        repeats = False
        for chunk in self._chunks(groups, {name.encode() for name in names}):
            bound.take(chunk.nbytes, f"column {chunk.name!r}")
            repeats |= chunk.repeats
        rows = sum(self._file.metadata.row_group(i).num_rows for i in groups)
        columns = None if list(names) == self._file.schema_arrow.names else list(names)
        if not repeats or rows <= STEP_ROWS:
            table = self._file.read_row_groups(list(groups), columns=columns)
            # A name includes all columns nested under it, and dots do not distinguish them.
            return table if columns is None else table.select(columns)
        batches = []
        for batch in self._file.iter_batches(batch_size=STEP_ROWS, row_groups=list(groups), columns=columns):
            selected = batch if columns is None else batch.select(columns)
            for column, field in zip(selected.columns, selected.schema, strict=True):
                bound.take(column.get_total_buffer_size(), f"column {field.name!r}")
            batches.append(selected)
        return pa.Table.from_batches(batches)

    def check_sizes(self, names: Sequence[str]) -> None:
        """Check that size statistics match the repetition and type that the schema declares for each column.

        pyarrow terminates the process if it reads inconsistent size statistics.
        """
        with _describing():
            for group in self._about[_ROW_GROUPS]:
                for chunk, leaf in zip(group[_GROUP_COLUMNS], self._leaves, strict=True):
                    about = chunk[_CHUNK_ABOUT]
                    sizes, name = about.get(_SIZES), about[_PATH][0].decode()
                    if not sizes or name not in names:
                        continue
                    repetition = leaf.get(_ELEMENT_REPETITION, 0)
                    levels = {_REPEATED_LEVELS: repetition == _REPEATED, _DEFINED_LEVELS: repetition != 0}
                    is_consistent = all(len(sizes.get(field) or ()) in (0, 1 + more) for field, more in levels.items())
                    if not is_consistent or (_TEXT_NBYTES in sizes and leaf.get(_ELEMENT_KIND) != _BYTES):
                        raise FormatError(f"a row group must have size statistics of column {name!r}, got others")

    def _chunks(self, groups: Sequence[int], columns: Container[bytes]) -> Iterator[Chunk]:
        with _describing():
            for group in groups:
                column_chunks = self._about[_ROW_GROUPS][group][_GROUP_COLUMNS]
                for chunk, width in zip(column_chunks, self._widths, strict=True):
                    if chunk[_CHUNK_ABOUT][_PATH][0] in columns:
                        yield _chunk(self._view, chunk[_CHUNK_ABOUT], width)


@contextlib.contextmanager
def _describing() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, SampleBatchError):
            raise
        raise FormatError(f"its metadata must be valid Parquet metadata: {error!r}") from error


_MAX_KEPT_NBYTES = 1 << 16
_descriptions = Recent[bytes, "Struct"](limit=64)
"""Metadata of recently opened files by all its bytes: files of a dataset are opened in every epoch."""


def _description(view: memoryview) -> Struct:
    """Parse the metadata at the end of a Parquet file."""
    length = int.from_bytes(view[-_TAIL_NBYTES:][:4], "little")
    if length + _TAIL_NBYTES > len(view):
        raise FormatError(
            f"the metadata at its end must be at most {len(view) - _TAIL_NBYTES} bytes long, got {length}"
        )
    written = bytes(view[len(view) - _TAIL_NBYTES - length : len(view) - _TAIL_NBYTES])
    reader = ThriftReader(written)
    return _descriptions.get(written, reader.struct) if length <= _MAX_KEPT_NBYTES else reader.struct()


def _width(element: Struct) -> int:
    """Return the value size in bytes of 8- and 16-bit integers and fixed-length binary values; 0 for other types."""
    if element.get(_ELEMENT_KIND) == _INT32:
        return _MEANING_WIDTHS.get(element.get(_ELEMENT_MEANING, -1), 0)
    return int(element.get(_ELEMENT_LENGTH, 0))


def _chunk(view: memoryview, about: Struct, width: int) -> Chunk:
    kind = about[_TYPE]
    if kind not in (_FIXED, _INT32) or not width:
        width = _WIDTHS.get(kind, _PLACE_NBYTES)
    nbytes, repeats = 0, False
    counted = 0
    for page in _pages(view, about):
        nbytes += max(page[_PAGE_NBYTES], 0)
        for form in _PAGE_FORMS:
            if form in page:
                counted += max(page[form][_FORM_VALUES], 0)
                repeats |= kind == _BYTES and page[form][_FORM_ENCODING[form]] in _REPEATING
    path = [part.decode(errors="replace") for part in about[_PATH]]
    return Chunk(".".join(path), max(nbytes, width * max(counted, about[_VALUES])), repeats)


def _pages(view: memoryview, about: Struct) -> Iterator[Struct]:
    # Parquet reads no pages of a column without values, and writers record arbitrary offsets.
    if not about[_VALUES]:
        return
    offset = min(about[_DATA_AT], about.get(_DICTIONARY_AT) or about[_DATA_AT])
    stop = offset + about[_COMPRESSED]
    if not 0 <= offset <= stop <= len(view):
        raise FormatError("its metadata must locate pages inside the file, got others")
    while offset < stop:
        reader = ThriftReader(view[:stop], offset)
        page = reader.struct()
        yield page
        if page[_PAGE_STORED] < 0:
            raise FormatError(f"a page must have a size of at least 0, got {page[_PAGE_STORED]}")
        offset = reader.offset + page[_PAGE_STORED]


_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_NUMBERS = frozenset((_I16, _I32, _I64))
_MAX_DEPTH = 16

Data = bytes | memoryview
Struct = dict[int, Any]
"""Values of a struct by field number: int, bool, float, bytes, list, Struct; None for a map."""


class ThriftReader:
    """Sequential reader of Thrift structs in the compact protocol.

    >>> reader = ThriftReader(bytes([0x15, 0x06, 0x18, 1, 65, 0, 9]))
    >>> reader.struct(), reader.offset
    ({1: 3, 2: b'A'}, 6)
    """

    def __init__(self, data: Data, offset: int = 0) -> None:
        self._data = data
        self.offset = offset

    def struct(self) -> Struct:
        """Read a struct; raises FormatError if the struct is invalid."""
        try:
            fields, self.offset = _struct(self._data, self.offset, 0)
        except IndexError:
            raise _truncated() from None
        return fields


# Functions return the next offset: metadata has a thousand numbers, and an object that stores the offset is several
# times slower.


def _struct(data: Data, offset: int, depth: int) -> tuple[Struct, int]:
    if depth > _MAX_DEPTH:
        raise FormatError("metadata must be nested less deeply, got more levels than Parquet has")
    fields: Struct = {}
    field = 0
    while head := data[offset]:
        offset += 1
        if head >> 4:
            field += head >> 4
        else:
            number, offset = _varint(data, offset)
            field = _signed(number)
        kind = head & 15
        # Most fields are small numbers, decoded without a call.
        if kind in _NUMBERS and data[offset] < 128:
            number = data[offset]
            fields[field] = (number >> 1) ^ -(number & 1)
            offset += 1
        elif kind == _STRUCT:
            fields[field], offset = _struct(data, offset, depth + 1)
        else:
            fields[field], offset = _value(data, offset, kind, depth)
    return fields, offset + 1


def _value(data: Data, offset: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in _NUMBERS:
        number, offset = _varint(data, offset)
        return (number >> 1) ^ -(number & 1), offset
    if kind == _BINARY:
        count, offset = (data[offset], offset + 1) if data[offset] < 128 else _varint(data, offset)
        if count > len(data) - offset:
            raise _truncated()
        return bytes(data[offset : offset + count]), offset + count
    if kind == _STRUCT:
        return _struct(data, offset, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, offset, depth)
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, offset
    if kind == _BYTE:
        return data[offset], offset + 1
    if kind == _DOUBLE:
        if len(data) - offset < 8:
            raise _truncated()
        return struct.unpack_from("<d", data, offset)[0], offset + 8
    raise FormatError(f"metadata must have values of Parquet's types, got type {kind}")


def _list(data: Data, offset: int, depth: int) -> tuple[list[Any], int]:
    count, kind = data[offset] >> 4, data[offset] & 15
    offset += 1
    if count == 15:
        count, offset = _varint(data, offset)
    if count > len(data) - offset:
        raise _truncated()
    if kind in (_TRUE, _FALSE):
        return [byte == _TRUE for byte in data[offset : offset + count]], offset + count
    values = []
    for _ in range(count):
        value, offset = _value(data, offset, kind, depth)
        values.append(value)
    return values, offset


def _varint(data: Data, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
        shift += 7
        if shift > 63:
            raise FormatError("metadata must have 64-bit numbers, got a longer one")


def _signed(number: int) -> int:
    """Decode a zigzag-encoded signed number."""
    return (number >> 1) ^ -(number & 1)


def _truncated() -> FormatError:
    return FormatError("metadata must be complete, got truncated bytes")

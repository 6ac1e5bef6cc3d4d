"""How many bytes the columns of a Parquet file take, before they are read.

The file's own description may be of few bytes and lie. So the pages themselves are looked at: each says before its
bytes how many they are when they are decompressed, and Parquet believes that alone. Descriptions are structs of
Thrift's compact protocol. pyarrow ends the process at some damaged ones, and does not tell how large pages are.
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
"""At the end of the file: four bytes for the length of its description, and the magic."""

_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a value by its type's number: flags, 32, 64 and 96 bits, float and double."""

_INT32, _BYTES, _FIXED = 1, 6, 7
_PLACE_NBYTES = 8

_SCHEMA, _ROW_GROUPS = 2, 4
_ELEMENT_KIND, _ELEMENT_LENGTH, _ELEMENT_CHILDREN, _ELEMENT_MEANING = 1, 2, 5, 6
_ELEMENT_REPETITION, _REPEATED = 3, 2
_MEANING_WIDTHS = {11: 1, 12: 2, 15: 1, 16: 2}
"""Bytes in memory of a number of 32 bits in the file that stands for one of 8 or 16, by the meaning's number."""

_GROUP_COLUMNS, _CHUNK_ABOUT = 1, 3
_TYPE, _PATH, _VALUES, _COMPRESSED, _DATA_AT, _DICTIONARY_AT = 1, 3, 5, 7, 9, 11
_SIZES, _TEXT_NBYTES, _REPEATED_LEVELS, _DEFINED_LEVELS = 16, 1, 2, 3
_PAGE_NBYTES, _PAGE_STORED = 2, 3
_PAGE_FORMS = (5, 8)
_FORM_VALUES, _FORM_ENCODING = 1, {5: 2, 8: 4}
_REPEATING = frozenset((2, 7, 8))
"""Encodings in which few bytes stand for many values, each as long as the longest: dictionaries and shared starts."""

STEP_ROWS = 1024
"""Rows that are read at once where nobody can say how long they are."""


class Chunk(NamedTuple):
    """The values of one column in one row group, as their pages describe them.

    Attributes
    ----------
    name
        Of the column, with those that it is nested in.
    nbytes
        Bytes of its pages uncompressed, or of its values, whichever is more.
    repeats
        Whether values of no fixed length may be more bytes than that.
    """

    name: str
    nbytes: int
    repeats: bool


class BoundedReader:
    """Reads columns of a Parquet file as far as a memory bound allows.

    Parameters
    ----------
    file
        An open `pyarrow.parquet.ParquetFile`.
    data
        All bytes of the file.

    Raises
    ------
    FormatError
        If the file does not describe itself.
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
        """Read columns of some row groups.

        Strings may stand in the file once and in the table any number of times: such are read some rows at a time, and
        counted then.

        Raises
        ------
        CapacityError
            If a column takes more than is left of the bound; names it.
        FormatError
            If pages are not where the file's description says.
        """
        repeats = False
        for chunk in self._chunks(groups, {name.encode() for name in names}):
            bound.take(chunk.nbytes, f"column {chunk.name!r}")
            repeats |= chunk.repeats
        rows = sum(self._file.metadata.row_group(i).num_rows for i in groups)
        columns = None if list(names) == self._file.schema_arrow.names else list(names)
        if not repeats or rows <= STEP_ROWS:
            table = self._file.read_row_groups(list(groups), columns=columns)
            # A name stands for all that are nested under it there, and dots do not tell these from others.
            return table if columns is None else table.select(columns)
        batches = []
        for batch in self._file.iter_batches(batch_size=STEP_ROWS, row_groups=list(groups), columns=columns):
            kept = batch if columns is None else batch.select(columns)
            for column, field in zip(kept.columns, kept.schema, strict=True):
                bound.take(column.get_total_buffer_size(), f"column {field.name!r}")
            batches.append(kept)
        return pa.Table.from_batches(batches)

    def check_sizes(self, names: Sequence[str]) -> None:
        """Check that row groups tell of columns with a value a row as their schema has them.

        pyarrow ends the process at others, once it is asked for the statistics of a group.
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
                    fits = all(len(sizes.get(field) or ()) in (0, 1 + more) for field, more in levels.items())
                    if not fits or (_TEXT_NBYTES in sizes and leaf.get(_ELEMENT_KIND) != _BYTES):
                        raise FormatError(f"a row group must tell the sizes of column {name!r}, got others")

    def _chunks(self, groups: Sequence[int], columns: Container[bytes]) -> Iterator[Chunk]:
        with _describing():
            for group in groups:
                held = self._about[_ROW_GROUPS][group][_GROUP_COLUMNS]
                for chunk, width in zip(held, self._widths, strict=True):
                    if chunk[_CHUNK_ABOUT][_PATH][0] in columns:
                        yield _chunk(self._view, chunk[_CHUNK_ABOUT], width)


@contextlib.contextmanager
def _describing() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, SampleBatchError):
            raise
        raise FormatError(f"its description is not one of Parquet's: {error!r}") from error


_MAX_KEPT_NBYTES = 1 << 16
_descriptions = Recent[bytes, "Struct"](limit=64)
"""Descriptions of the files that were opened last, by all their bytes: those of a dataset are opened in every epoch."""


def _description(view: memoryview) -> Struct:
    """Read the description at the end of a file."""
    length = int.from_bytes(view[-_TAIL_NBYTES:][:4], "little")
    if length + _TAIL_NBYTES > len(view):
        raise FormatError("the description at its end is longer than the file")
    written = bytes(view[len(view) - _TAIL_NBYTES - length : len(view) - _TAIL_NBYTES])
    reader = ThriftReader(written)
    return _descriptions.get(written, reader.struct) if length <= _MAX_KEPT_NBYTES else reader.struct()


def _width(element: Struct) -> int:
    """Return the bytes of a value whose kind has no fixed width; 0 for other kinds."""
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
    # Of a column without values, Parquet reads no page, and writers say anything of where they are.
    if not about[_VALUES]:
        return
    place = min(about[_DATA_AT], about.get(_DICTIONARY_AT) or about[_DATA_AT])
    stop = place + about[_COMPRESSED]
    if not 0 <= place <= stop <= len(view):
        raise FormatError("its description names pages that lie outside of the file")
    while place < stop:
        reader = ThriftReader(view[:stop], place)
        page = reader.struct()
        yield page
        if page[_PAGE_STORED] < 0:
            raise FormatError("a page has fewer bytes than none")
        place = reader.place + page[_PAGE_STORED]


_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_NUMBERS = frozenset((_I16, _I32, _I64))
_MAX_DEPTH = 16

Data = bytes | memoryview
Struct = dict[int, Any]
"""Values of a struct by the numbers of their fields: int, bool, float, bytes, list, Struct; of a map, None."""


class ThriftReader:
    """Sequential reader of structs.

    Examples
    --------
    >>> reader = ThriftReader(bytes([0x15, 0x06, 0x18, 1, 65, 0, 9]))
    >>> reader.struct(), reader.place
    ({1: 3, 2: b'A'}, 6)
    """

    def __init__(self, data: Data, place: int = 0) -> None:
        self._data = data
        self.place = place

    def struct(self) -> Struct:
        """Read a struct; raises FormatError if there is none."""
        try:
            found, self.place = _struct(self._data, self.place, 0)
        except IndexError:
            raise _cut_short() from None
        return found


# Functions that hand the place on: a description has a thousand numbers, and an object that keeps the place costs
# several times as much for each.


def _struct(data: Data, place: int, depth: int) -> tuple[Struct, int]:
    if depth > _MAX_DEPTH:
        raise FormatError("a description must be flat, it is deeper than any that Parquet has")
    found: Struct = {}
    field = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            field += head >> 4
        else:
            number, place = _varint(data, place)
            field = _signed(number)
        kind = head & 15
        # Most fields are small numbers: without a call.
        if kind in _NUMBERS and data[place] < 128:
            number = data[place]
            found[field] = (number >> 1) ^ -(number & 1)
            place += 1
        elif kind == _STRUCT:
            found[field], place = _struct(data, place, depth + 1)
        else:
            found[field], place = _value(data, place, kind, depth)
    return found, place + 1


def _value(data: Data, place: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in _NUMBERS:
        number, place = _varint(data, place)
        return (number >> 1) ^ -(number & 1), place
    if kind == _BINARY:
        count, place = (data[place], place + 1) if data[place] < 128 else _varint(data, place)
        if count > len(data) - place:
            raise _cut_short()
        return bytes(data[place : place + count]), place + count
    if kind == _STRUCT:
        return _struct(data, place, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, place, depth)
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, place
    if kind == _BYTE:
        return data[place], place + 1
    if kind == _DOUBLE:
        if len(data) - place < 8:
            raise _cut_short()
        return struct.unpack_from("<d", data, place)[0], place + 8
    raise FormatError(f"a description must have values of types that Parquet has, it has one of type {kind}")


def _list(data: Data, place: int, depth: int) -> tuple[list[Any], int]:
    count, kind = data[place] >> 4, data[place] & 15
    place += 1
    if count == 15:
        count, place = _varint(data, place)
    if count > len(data) - place:
        raise _cut_short()
    if kind in (_TRUE, _FALSE):
        return [byte == _TRUE for byte in data[place : place + count]], place + count
    found = []
    for _ in range(count):
        value, place = _value(data, place, kind, depth)
        found.append(value)
    return found, place


def _varint(data: Data, place: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = data[place]
        place += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, place
        shift += 7
        if shift > 63:
            raise FormatError("a description must have numbers of 64 bits, it has a longer one")


def _signed(number: int) -> int:
    """Undo the zigzag in which numbers of either sign are written."""
    return (number >> 1) ^ -(number & 1)


def _cut_short() -> FormatError:
    return FormatError("a description must end where its bytes do, it does not; it is cut short")

"""How many bytes the columns of a Parquet file take, before they are read.

The file's own description may be of few bytes and lie. So the pages themselves are looked at: each says before its
bytes how many they are when they are decompressed, and Parquet believes that alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from samplebatch.column.memory_bound import MemoryBound
from samplebatch.errors import FormatError
from samplebatch.storage.thrift import Struct, ThriftReader

_TAIL_NBYTES = 8
"""At the end of the file: four bytes for the length of its description, and the magic."""

_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a value by its type's number: flags, 32, 64 and 96 bits, float and double."""

_BYTES, _FIXED = 6, 7
_PLACE_NBYTES = 8

_SCHEMA, _ROW_GROUPS = 2, 4
_ELEMENT_LENGTH, _ELEMENT_CHILDREN = 2, 5
_GROUP_COLUMNS, _CHUNK_ABOUT = 1, 3
_TYPE, _PATH, _VALUES, _COMPRESSED, _DATA_AT, _DICTIONARY_AT = 1, 3, 5, 7, 9, 11
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


def read_within(file: Any, data: pa.Buffer, bound: MemoryBound) -> pa.Table:
    """Read a Parquet file, as far as a bound allows.

    Strings may stand in the file once and in the table any number of times: such are read some rows at a time, and
    counted then.

    Parameters
    ----------
    file
        An open `pyarrow.parquet.ParquetFile`.
    data
        All bytes of the file.
    bound
        What may be made of it.

    Raises
    ------
    CapacityError
        If a column takes more than is left of the bound; names it.
    FormatError
        If the file does not describe itself.
    """
    repeats = False
    for chunk in chunks_in(memoryview(data)):
        bound.take(chunk.nbytes, f"column {chunk.name!r}")
        repeats |= chunk.repeats
    if not repeats or file.metadata.num_rows <= STEP_ROWS:
        return file.read()
    batches = []
    for batch in file.iter_batches(batch_size=STEP_ROWS):
        for column, field in zip(batch.columns, batch.schema, strict=True):
            bound.take(column.get_total_buffer_size(), f"column {field.name!r}")
        batches.append(batch)
    return pa.Table.from_batches(batches, file.schema_arrow)


def chunks_in(view: memoryview) -> Iterator[Chunk]:
    """Describe all chunks of a file.

    Raises
    ------
    FormatError
        If it has no description, or pages are not where that says.
    """
    view = view.cast("B")
    length = int.from_bytes(view[-_TAIL_NBYTES:][:4], "little")
    if length + _TAIL_NBYTES > len(view):
        raise FormatError("the description at its end is longer than the file")
    try:
        about = ThriftReader(view[len(view) - _TAIL_NBYTES - length : len(view) - _TAIL_NBYTES]).struct()
        widths = [
            element.get(_ELEMENT_LENGTH, 0) for element in about[_SCHEMA][1:] if not element.get(_ELEMENT_CHILDREN)
        ]
        for group in about[_ROW_GROUPS]:
            for chunk, width in zip(group[_GROUP_COLUMNS], widths, strict=True):
                yield _chunk(view, chunk[_CHUNK_ABOUT], width)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise FormatError(f"its description is not one of Parquet's: {error!r}") from error


def _chunk(view: memoryview, about: Struct, width: int) -> Chunk:
    kind = about[_TYPE]
    width = width if kind == _FIXED else _WIDTHS.get(kind, _PLACE_NBYTES)
    nbytes, repeats = 0, False
    counted = 0
    for page in _pages(view, about):
        nbytes += max(page[_PAGE_NBYTES], 0)
        for form in _PAGE_FORMS:
            if form in page:
                counted += max(page[form][_FORM_VALUES], 0)
                repeats |= kind == _BYTES and page[form][_FORM_ENCODING[form]] in _REPEATING
    name = b".".join(about[_PATH]).decode(errors="replace")
    return Chunk(name, max(nbytes, width * max(counted, about[_VALUES])), repeats)


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

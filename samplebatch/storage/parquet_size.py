"""How many bytes the columns of a Parquet file take, before they are read.

The file's own description may be of few bytes and lie. So the pages themselves are looked at: each says before its
bytes how many they are when they are decompressed, and Parquet believes that alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.recent import Recent
from samplebatch.errors import FormatError, SampleBatchError
from samplebatch.storage.thrift import Struct, ThriftReader

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

        Parameters
        ----------
        groups
            The row groups.
        names
            The columns, all or some of the file's, in their order.
        bound
            What may be made of the file.

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

        Raises
        ------
        FormatError
            If counts of levels, or of bytes, are those of another column.
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
_descriptions = Recent[bytes, Struct](limit=64)
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
    """Read the bytes of a value that its kind alone does not tell; 0 where it does."""
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

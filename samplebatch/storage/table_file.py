"""Tables in files, read by columns and by groups of rows, and those in Parquet files."""

from __future__ import annotations

import base64
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from samplebatch.batch.arrow import Parts, metadata_of
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.errors import CapacityError, FormatError, SampleBatchError
from samplebatch.storage.parquet_layout import from_parquet, holds_flags, parquet_field
from samplebatch.storage.parquet_size import BoundedReader
from samplebatch.storage.selection import RowFilter

SCHEMA_KEY = b"samplebatch.arrow_schema"
"""Key of the schema's metadata that holds the Arrow schema, in base64, where Parquet has no place for all of it."""


class TableFile(ABC):
    """An open file with a table in groups of rows, for readers of batches and datasets.

    Parameters
    ----------
    data
        All bytes of the file.
    name
        The file, for errors.

    Attributes
    ----------
    name
        As given.
    schema
        The schema that the table had in memory.
    num_groups
        How many groups there are: record batches of an Arrow file, row groups of a Parquet file.
    """

    form: str
    schema: pa.Schema
    num_groups: int

    def __init__(self, data: pa.Buffer, name: str) -> None:
        self.data = data
        self.name = name

    @cached_property
    def about(self) -> dict[str, Any] | None:
        """The metadata of a batch or buffer, None if there is none; `metadata_of` says how it may fail."""
        return metadata_of(self.schema)

    @cached_property
    @abstractmethod
    def group_rows(self) -> list[int]:
        """Rows of each group."""

    @abstractmethod
    def read(self, groups: Sequence[int], names: Sequence[str], bound: MemoryBound) -> pa.Table:
        """Read columns of some groups, in the order given.

        Raises
        ------
        FormatError
            If the file is damaged or cut short.
        CapacityError
            If more memory would be made of it than is left of the bound; names the column.
        """

    def view(self, names: Sequence[str]) -> Parts | None:
        """View columns of a flat batch where they lie, without a table; None if they must be read as one."""
        return None

    def matching(self, condition: RowFilter) -> list[int]:
        """List the groups that may have rows for which a condition holds."""
        return list(range(self.num_groups))


@contextlib.contextmanager
def name_file_damage(name: str, form: str) -> Iterator[None]:
    """Convert errors of pyarrow at damaged bytes into one that names the file.

    Raises
    ------
    FormatError
        If anything is raised within that is no error of the library's.
    CapacityError
        If there is not as much memory as would be needed.
    """
    try:
        yield
    except FormatError as error:
        if repr(name) in str(error):
            raise
        raise FormatError(f"{name!r} must be a whole {form} file, and it is not: {error}") from error
    except SampleBatchError:
        raise
    except MemoryError as error:
        raise CapacityError(f"{name!r} must fit into memory, it does not: {error}") from error
    # pyarrow words damage in many ways: what it cannot decode is any of these.
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError(f"{name!r} must be a whole {form} file, and it is damaged or cut short: {error}") from error


class ParquetTable(TableFile):
    """A table in a Parquet file, laid out in memory as it was before it was written.

    Parameters
    ----------
    data, name
        As of every file.
    check_pages
        Whether to hold each page that is read against its checksum.
    """

    form = "Parquet"

    def __init__(self, data: pa.Buffer, name: str, *, check_pages: bool) -> None:
        from pyarrow import parquet

        super().__init__(data, name)
        with name_file_damage(name, self.form):
            self._file = parquet.ParquetFile(pa.BufferReader(data), page_checksum_verification=check_pages)
            self._reader = BoundedReader(self._file, data)
            self.num_groups = self._file.metadata.num_row_groups
            self.schema = _schema_in_memory(self._file.schema_arrow)

    @cached_property
    def group_rows(self) -> list[int]:
        """Rows of each row group."""
        about = self._file.metadata
        return [about.row_group(i).num_rows for i in range(self.num_groups)]

    def read(self, groups: Sequence[int], names: Sequence[str], bound: MemoryBound) -> pa.Table:
        """Read columns of some row groups, laid out as they were in memory."""
        with name_file_damage(self.name, self.form):
            stored = self._reader.read(groups, names, bound)
            stored.validate()
            fields = [self.schema.field(i) for i in places_of(self.schema, stored.schema.names)]
            columns = [_column_in_memory(*pair) for pair in zip(stored.columns, fields, strict=True)]
            return pa.Table.from_arrays(columns, schema=pa.schema(fields, self.schema.metadata))

    def matching(self, condition: RowFilter) -> list[int]:
        """List the row groups in which a condition may hold, by their statistics."""
        from pyarrow import dataset

        form = dataset.ParquetFileFormat()
        with name_file_damage(self.name, self.form):
            self._reader.check_sizes(condition.names)
            self._check_types(condition.names)
            fragment = form.make_fragment(self.data)
            return [group.id for group in fragment.subset(filter=condition.expression).row_groups]

    def _check_types(self, names: Sequence[str]) -> None:
        """Check that row groups have columns of the types of the schema: pyarrow ends the process over statistics."""
        about = self._file.metadata
        for place in range(about.num_columns):
            column = about.schema.column(place)
            if column.path not in names:
                continue
            for group in range(self.num_groups):
                found = about.row_group(group).column(place).physical_type
                if found != column.physical_type:
                    raise FormatError(f"column {column.path!r} must be {column.physical_type}, a group has {found}")


def schema_to_store(schema: pa.Schema) -> pa.Schema:
    """Return the schema of the table that Parquet holds in place of one in memory, which it then has in its metadata.

    Parquet's is the same schema where it has a place for everything in it.
    """
    stored = pa.schema([parquet_field(field) for field in schema], schema.metadata)
    if stored.equals(schema):
        return schema
    plain = schema.remove_metadata().serialize().to_pybytes()
    return stored.with_metadata({**(schema.metadata or {}), SCHEMA_KEY: base64.b64encode(plain)})


def _schema_in_memory(stored: pa.Schema) -> pa.Schema:
    """Return the schema of which `schema_to_store` made another.

    Raises
    ------
    FormatError
        If the one does not fit the other.
    """
    encoded = (stored.metadata or {}).get(SCHEMA_KEY)
    if encoded is None:
        return stored
    wanted = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded, validate=True)))
    if wanted.names != stored.names:
        raise FormatError("the columns are not those of the schema in the metadata")
    return wanted.with_metadata(stored.metadata)


def places_of(schema: pa.Schema, names: Sequence[str]) -> list[int]:
    """Return the places of fields by name; those of all fields where their names are those of the schema.

    Raises
    ------
    FormatError
        If several fields have a name that is asked for.
    """
    if names == schema.names:
        return list(range(len(names)))
    places = [schema.get_field_index(name) for name in names]
    if -1 in places:
        raise FormatError(f"column {names[places.index(-1)]!r} must be there once, it is there again")
    return places


def _column_in_memory(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    flags = holds_flags(field)
    expected = parquet_field(field).type
    if not column.type.equals(expected) and not column.type.equals(field.type):
        raise FormatError(f"column {field.name!r} must be stored as {expected}, got {column.type}")
    chunks: list[Any] = [
        from_parquet(chunk, field.type, nullable=field.nullable, flags=flags) for chunk in column.chunks
    ]
    return pa.chunked_array(chunks, field.type)

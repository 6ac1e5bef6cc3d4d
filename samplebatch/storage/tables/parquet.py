"""Storage of batches in compressed Parquet files, for archives and for use with other tools.

A file contains the table that `to_arrow` returns, with separate row groups per policy. Types that Parquet lacks are
converted (see `parquet_layout`). The metadata contains the Arrow schema, from which the original types are restored
exactly. Each page has a Parquet page checksum; checksums of all bytes precede the footer (see `checksums`).
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from samplebatch.arguments import choice
from samplebatch.batch.arrow import metadata_of
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.column.arrow import Recent
from samplebatch.column.memory import MemoryBound
from samplebatch.errors import FormatError
from samplebatch.storage import checksums
from samplebatch.storage.files import check_magic, check_suffix, file_bytes, replacing
from samplebatch.storage.foreign.damage import name_file_damage
from samplebatch.storage.foreign.parquet import BoundedReader
from samplebatch.storage.tables import batches
from samplebatch.storage.tables.parquet_layout import byte_paths, holds_flags, lay_out, parquet_field, to_parquet

SCHEMA_KEY = b"samplebatch.arrow_schema"
"""Metadata key of the Arrow schema in base64, if Parquet cannot represent the schema."""


_MAX_SCHEMA_NBYTES = 1 << 16


class _ParquetSchema(batches.FileSchema):
    """Schema of Parquet files, and the storage types of the schema's columns."""

    def __init__(self, stored: pa.Schema) -> None:
        super().__init__(_schema_in_memory(stored))
        self.stored_types = [parquet_field(field).type for field in self.schema]


_schemas = Recent[bytes, _ParquetSchema](limit=32)
"""Recently used schemas by all their bytes."""


def _known_schema(stored: pa.Schema) -> _ParquetSchema:
    key = stored.serialize().to_pybytes()

    def make() -> _ParquetSchema:
        return _ParquetSchema(stored)

    return _schemas.get(key, make) if len(key) <= _MAX_SCHEMA_NBYTES else make()


class ParquetTable(batches.TableFile):
    """Table in a Parquet file; columns are converted back to their in-memory layout when they are read.

    If `check_pages` is true, each page is verified against its checksum when it is read.
    """

    form = "Parquet"
    _file_schema: _ParquetSchema

    def __init__(self, data: pa.Buffer, name: str, *, check_pages: bool) -> None:
        from pyarrow import parquet

        super().__init__(data, name)
        with name_file_damage(name, self.form):
            self._file = parquet.ParquetFile(pa.BufferReader(data), page_checksum_verification=check_pages)
            self._reader = BoundedReader(self._file, data)
            self.num_groups = self._file.metadata.num_row_groups
            self._file_schema = _known_schema(self._file.schema_arrow)

    @cached_property
    def group_rows(self) -> list[int]:
        """Number of rows per row group."""
        about = self._file.metadata
        return [about.row_group(i).num_rows for i in range(self.num_groups)]

    def read(self, groups: Sequence[int], names: Sequence[str], bound: MemoryBound) -> pa.Table:
        """Read columns of row groups, and convert the columns to their in-memory layout."""
        with name_file_damage(self.name, self.form):
            stored = self._reader.read(groups, names, bound)
            stored.validate()
            schema, types = self._file_schema.schema, self._file_schema.stored_types
            fields, columns = [], []
            for column, index in zip(stored.columns, batches.places_of(schema, stored.schema.names), strict=True):
                fields.append(schema.field(index))
                columns.append(_column_in_memory(column, fields[-1], types[index]))
            return pa.Table.from_arrays(columns, schema=pa.schema(fields, schema.metadata))

    def matching(self, condition: batches.RowFilter) -> list[int]:
        """List the row groups that, according to their statistics, may contain rows that satisfy a condition."""
        from pyarrow import dataset

        form = dataset.ParquetFileFormat()
        with name_file_damage(self.name, self.form):
            self._reader.check_sizes(condition.names)
            self._check_types(condition.names)
            fragment = form.make_fragment(self.data)
            return [group.id for group in fragment.subset(filter=condition.expression).row_groups]

    def _check_types(self, names: Sequence[str]) -> None:
        """Check the column types of row groups, because pyarrow terminates the process on mismatched statistics."""
        about = self._file.metadata
        for index in range(about.num_columns):
            column = about.schema.column(index)
            if column.path not in names:
                continue
            for group in range(self.num_groups):
                actual = about.row_group(group).column(index).physical_type
                if actual != column.physical_type:
                    raise FormatError(f"column {column.path!r} must be {column.physical_type}, got {actual} in a group")


def schema_to_store(schema: pa.Schema) -> pa.Schema:
    """Return the schema that Parquet stores for an in-memory schema; the metadata contains the original schema.

    Returns `schema` itself if Parquet can represent it.
    """
    stored = pa.schema([parquet_field(field) for field in schema], schema.metadata)
    if stored.equals(schema):
        return schema
    plain = schema.remove_metadata().serialize().to_pybytes()
    return stored.with_metadata({**(schema.metadata or {}), SCHEMA_KEY: base64.b64encode(plain)})


def _schema_in_memory(stored: pa.Schema) -> pa.Schema:
    """Restore the in-memory schema from a schema that `schema_to_store` returned."""
    encoded = (stored.metadata or {}).get(SCHEMA_KEY)
    if encoded is None:
        return stored
    original = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded, validate=True)))
    if original.names != stored.names:
        raise FormatError(
            f"the {len(original.names)} columns of the schema in the metadata must be stored in order, got "
            f"{len(stored.names)} columns with other names"
        )
    return original.with_metadata(stored.metadata)


def _column_in_memory(column: pa.ChunkedArray, field: pa.Field, stored: pa.DataType) -> pa.ChunkedArray:
    if column.type.equals(field.type):
        return column
    if not column.type.equals(stored):
        raise FormatError(f"column {field.name!r} must be stored as {stored}, got {column.type}")
    flags = holds_flags(field)
    chunks: list[Any] = [lay_out(chunk, field.type, nullable=field.nullable, flags=flags) for chunk in column.chunks]
    return pa.chunked_array(chunks, field.type)


_GROUP_NBYTES = 1 << 23
"""Approximate maximum size of a row group: readers load one at a time."""

_POLICY = "policy_id"
_CODECS = ("zstd", "snappy", "lz4", "gzip", "brotli", "none")


def write_parquet(
    batch: batches.AnyBatch, path: str | os.PathLike[str], *, compression: str = "zstd", durable: bool = True
) -> None:
    """Write a batch atomically to a Parquet file.

    The bytes are written to a temporary file. The complete temporary file then replaces the file at `path`.

    Parameters
    ----------
    batch
        The batch. Columns that are compressed in memory are decompressed first, because Parquet compresses all columns.
    path
        Path of the file in an existing folder.
    compression
        Parquet compression codec: `"zstd"`, `"snappy"`, `"lz4"`, `"gzip"`, `"brotli"` or `"none"`.
    durable
        Whether to sync the file to disk; see `SampleBatch.save`.

    Raises
    ------
    OSError
        If the file cannot be written.
    SequenceError
        If the batch is time-major.
    ArgumentError
        If the codec is unknown.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import SampleBatch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_parquet(
    ...         SampleBatch(rewards=[1.0, 2.0], infos=[{}, {}]), f"{folder}/batch.parquet"
    ...     )
    ...     read_parquet(f"{folder}/batch.parquet")["rewards"].tolist()
    [1.0, 2.0]
    """
    table = batches.to_table(batch)
    with parquet_writer(path, table.schema, compression, durable=durable) as writer:
        for part in _row_groups(batch, table):
            writer.write_table(part)


class ParquetWriter:
    """Writer that stores tables of one schema as row groups of a Parquet file; created by `parquet_writer`."""

    def __init__(self, writer: Any, schema: pa.Schema) -> None:
        self._writer = writer
        self._schema = schema

    def write_table(self, table: pa.Table) -> None:
        """Write a table as one or more row groups of limited size."""
        columns = [
            pa.chunked_array(
                [to_parquet(chunk, nullable=field.nullable, flags=holds_flags(field)) for chunk in column.chunks],
                stored.type,
            )
            for column, field, stored in zip(table.columns, table.schema, self._schema, strict=True)
        ]
        aligned = pa.Table.from_arrays(columns, schema=self._schema)
        rows = max(1, aligned.num_rows)
        self._writer.write_table(
            aligned, row_group_size=max(1, min(rows, rows * _GROUP_NBYTES // max(1, aligned.nbytes)))
        )

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write a record batch."""
        self.write_table(pa.Table.from_batches([batch]))


@contextlib.contextmanager
def parquet_writer(
    path: str | os.PathLike[str], schema: pa.Schema, compression: str = "zstd", *, durable: bool = True
) -> Iterator[ParquetWriter]:
    """Open a writer of a Parquet file with checksums; the file replaces `path` if the `with` block succeeds.

    Raises OSError if the path is a folder or not writable. Raises FormatError if the suffix of the path belongs to a
    format other than Parquet. Raises ArgumentError if the codec is unknown.
    """
    from pyarrow import parquet

    check_suffix(path, "Parquet")
    choice("compression", compression, _CODECS)
    stored = schema_to_store(schema)
    with replacing(path, durable=durable, unnamed=True) as file:
        with parquet.ParquetWriter(
            file,
            stored,
            compression=compression,
            # Dictionaries of floats and counters cost time without reducing size. Byte-stream splitting of floats would
            # save 10 %, but Spark cannot read it.
            use_dictionary=[_POLICY, *byte_paths(stored)],
            write_page_checksum=True,
            # The first version with 16-bit floats and unsigned integers.
            version="2.6",
        ) as writer:
            yield ParquetWriter(writer, stored)
        checksums.add(file, checksums.PARQUET)


def read_parquet(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, verify: bool = True, max_nbytes: int | None = None
) -> Any:
    """Read a batch written by `write_parquet`.

    Parameters
    ----------
    path
        The file.
    allow_pickle
        As in `read_arrow`.
    verify
        Whether to verify all bytes against their checksums; files of older versions have only page checksums.
    max_nbytes
        Maximum bytes to allocate; None for the larger of 256 MiB and 1024 times the file's size.

    Raises
    ------
    FormatError
        If the file is not a Parquet file, is damaged or truncated, or was not written by this library. The error
        message lists the columns with changed bytes.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false.
    CapacityError
        If more than `max_nbytes` would be allocated.
    OSError
        If the file cannot be read.
    """
    file, bound = open_parquet(path, verify=verify, max_nbytes=max_nbytes)
    requirement = f"{file.name!r} must be a batch that write_parquet wrote"
    return batches.read_batch(file, bound, requirement, allow_pickle=allow_pickle)


def open_parquet(
    path: str | os.PathLike[str], *, verify: bool | None = True, max_nbytes: int | None = None
) -> tuple[ParquetTable, MemoryBound]:
    """Open the table of a Parquet file; also return the bound on the memory that reading the table may allocate.

    path, max_nbytes: as in `read_parquet`.
    verify: whether to verify all bytes against their checksums; None verifies the footer immediately and each page when
    it is read.
    """
    name = os.fspath(path)
    return parquet_table(file_bytes(name, memory_map=True), name, verify=verify, max_nbytes=max_nbytes)


def parquet_table(
    data: pa.Buffer, name: str, *, verify: bool | None, max_nbytes: int | None = None
) -> tuple[ParquetTable, MemoryBound]:
    """Return the table of a Parquet file that is already in memory, and its memory bound; see `open_parquet`."""
    check_magic(data, checksums.PARQUET.magic, "Parquet", name)
    with name_file_damage(name, "Parquet"):
        has_checksums = verify is not False and check_parquet(data, name, verify=bool(verify))
        check_pages = verify is None or (verify and not has_checksums)
        return ParquetTable(data, name, check_pages=check_pages), MemoryBound(repr(name), data.size, max_nbytes)


def check_parquet(data: pa.Buffer, name: str, *, verify: bool = True) -> bool:
    """Verify a Parquet file, or only its footer if `verify` is false; return whether the file has checksums."""
    return checksums.verify(data, checksums.PARQUET, name, partial(_columns_at, data) if verify else None)


def _columns_at(data: pa.Buffer, start: int, stop: int) -> list[str]:
    from pyarrow import parquet

    try:
        about = parquet.read_metadata(pa.BufferReader(data))
    # The damage may affect the layout of the columns.
    except (pa.ArrowException, OSError):
        return []
    columns: dict[str, None] = {}
    for group in range(about.num_row_groups):
        for i in range(about.num_columns):
            column = about.row_group(group).column(i)
            first = column.dictionary_page_offset or column.data_page_offset
            if first < stop and first + column.total_compressed_size > start:
                columns[column.path_in_schema.removesuffix(".list.element")] = None
    return list(columns)


def _row_groups(batch: batches.AnyBatch, table: pa.Table) -> Iterator[pa.Table]:
    """Split a table into row groups of one policy each; readers of one policy can skip the other groups."""
    if not isinstance(batch, MultiAgentBatch) or not batch.policy_batches:
        yield table
        return
    about: dict[str, Any] = metadata_of(table.schema) or {}
    start = 0
    for policy in about["policies"].values():
        yield table.slice(start, policy["rows"])
        start += policy["rows"]

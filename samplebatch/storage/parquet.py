"""Batches in Parquet files: compressed, for keeping and for other tools.

A file holds the table that `to_arrow` makes; each policy has row groups of its own. Where Parquet has no place for what
Arrow holds, the values are written in another layout, and the Arrow schema stands beside them in the metadata under
`SCHEMA_KEY`, so that what is read equals what was written. Each page has a checksum as the format defines it, for every
reader; before the footer there are checksums of all bytes (see `file_checksums`).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from samplebatch.batch.arrow import metadata_of
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.errors import CapacityError, FormatError, near_names
from samplebatch.storage.arrow_file import batch_in, file_bytes, replacing
from samplebatch.storage.damage import name_damage
from samplebatch.storage.file_checksums import PARQUET, ColumnsAt, add_checksums, check_whole
from samplebatch.storage.parquet_layout import float_paths, from_parquet, holds_flags, parquet_field, to_parquet
from samplebatch.storage.parquet_size import read_within

SCHEMA_KEY = b"samplebatch.arrow_schema"
"""Key of the schema's metadata that holds the Arrow schema, in base64, where Parquet has no place for all of it."""

_POLICY = "policy_id"
_CODECS = ("zstd", "snappy", "lz4", "gzip", "brotli", "none")


def write_parquet(
    batch: SampleBatch | MultiAgentBatch, path: str | os.PathLike[str], *, compression: str = "zstd"
) -> None:
    """Write a batch to a Parquet file, whole or not at all.

    The bytes go to a temporary file beside the path, which takes its place once they are on the disk.

    Parameters
    ----------
    batch
        The batch. Compressed columns are written uncompressed: Parquet compresses all.
    path
        The file. Its folder must exist.
    compression
        Parquet's codec: `"zstd"`, `"snappy"`, `"lz4"`, `"gzip"`, `"brotli"` or `"none"`.

    Raises
    ------
    OSError
        If the file cannot be written.
    SequenceError
        If the batch is time-major.
    ValueError
        If there is no such codec.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_parquet(SampleBatch(rewards=[1.0, 2.0], infos=[{}, {}]), f"{folder}/batch.parquet")
    ...     read_parquet(f"{folder}/batch.parquet")["rewards"].tolist()
    [1.0, 2.0]
    """
    from pyarrow import parquet

    if compression not in _CODECS:
        raise ValueError(
            f"compression must be one of Parquet's codecs, got {compression!r}; {near_names(compression, _CODECS)}"
        )
    table = batch.to_arrow()
    stored = _to_parquet(table)
    with replacing(path) as file:
        with parquet.ParquetWriter(
            file,
            stored.schema,
            compression=compression,
            # Dictionaries of floats and counters cost time and save nothing.
            use_dictionary=[_POLICY],
            use_byte_stream_split=float_paths(stored.schema),
            write_page_checksum=True,
            # The version that has 16-bit floats and unsigned integers.
            version="2.6",
        ) as writer:
            for part in _row_groups(batch, stored):
                writer.write_table(part)
        add_checksums(file, PARQUET)


def read_parquet(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, verify: bool = True, max_nbytes: int | None = None
) -> SampleBatch | MultiAgentBatch:
    """Read a batch that `write_parquet` wrote.

    Parameters
    ----------
    path
        The file.
    allow_pickle
        Whether to unpickle columns of Python objects that Arrow has no type for. Only for files whose writer you
        trust: a pickle can run any code.
    verify
        Whether to hold the file against its checksums; against those of its pages, where an older version wrote it.
    max_nbytes
        Bytes of memory that may be made of the file; 256 MiB or 1024 times its own, whichever is more, if None.

    Raises
    ------
    FormatError
        If the file is no Parquet file, is damaged or cut short, or was not written by this library. Names the columns
        where bytes have changed.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false; names it.
    CapacityError
        If more memory would be made of the file than `max_nbytes`; names the column.
    OSError
        If the file cannot be read.
    """
    from pyarrow import parquet

    name = os.fspath(path)
    must = f"{name!r} must be a batch that write_parquet wrote"
    _check_magic(name)
    bound = MemoryBound(repr(name), os.path.getsize(name), max_nbytes)
    try:
        data = file_bytes(name, memory_map=True)
        verified = verify and check_parquet(data, name)
        with parquet.ParquetFile(name, page_checksum_verification=verify and not verified) as file:
            table = read_within(file, data, bound)
        # What becomes objects is validated once it is known how much that is.
        table.validate()
        table = _from_parquet(table)
        about = metadata_of(table.schema)
    except FormatError as error:
        raise FormatError(f"{must}, and it is not: {error}") from error
    except CapacityError:
        raise
    # pyarrow words damage in many ways: what it cannot decode is any of these.
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{name!r} must be a whole Parquet file, and it is damaged or cut short: {error}") from error
    # Names of columns may be no text, for one.
    with name_damage(repr(name)):
        return batch_in(table, about, must, bound, allow_pickle=allow_pickle)


def check_parquet(data: pa.Buffer, name: str) -> bool:
    """Hold all bytes of a Parquet file against its checksums, and tell whether it has any.

    Raises
    ------
    FormatError
        If a byte is not as it was written; names the columns.
    """
    return check_whole(data, PARQUET, name, _columns_at(data))


def _columns_at(data: pa.Buffer) -> ColumnsAt:
    """Make a function that names the columns of a Parquet file with values between two places."""

    def named(start: int, stop: int) -> list[str]:
        from pyarrow import parquet

        try:
            about = parquet.read_metadata(pa.BufferReader(data))
        # What is damaged may be what says where the columns are.
        except (pa.ArrowException, OSError):
            return []
        found: dict[str, None] = {}
        for group in range(about.num_row_groups):
            for i in range(about.num_columns):
                column = about.row_group(group).column(i)
                first = column.dictionary_page_offset or column.data_page_offset
                if first < stop and first + column.total_compressed_size > start:
                    found[column.path_in_schema.removesuffix(".list.element")] = None
        return list(found)

    return named


def _to_parquet(table: pa.Table) -> pa.Table:
    """Lay a table out so that Parquet has a place for everything in it; the table itself where it has already."""
    schema = pa.schema([parquet_field(field) for field in table.schema], table.schema.metadata)
    if schema.equals(table.schema):
        return table
    plain = table.schema.remove_metadata().serialize().to_pybytes()
    columns = [
        pa.chunked_array(
            [to_parquet(chunk, nullable=field.nullable, flags=holds_flags(field)) for chunk in column.chunks],
            field.type,
        )
        for column, field in zip(table.columns, schema, strict=True)
    ]
    metadata = {**(table.schema.metadata or {}), SCHEMA_KEY: base64.b64encode(plain)}
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(metadata))


def _from_parquet(table: pa.Table) -> pa.Table:
    """Undo `_to_parquet`.

    Raises
    ------
    FormatError
        If the table does not fit the schema in its metadata.
    """
    encoded = (table.schema.metadata or {}).get(SCHEMA_KEY)
    if encoded is None:
        return table
    wanted = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded, validate=True)))
    if wanted.names != table.schema.names:
        raise FormatError("the columns are not those of the schema in the metadata")
    columns = [_column_from_parquet(*pair) for pair in zip(table.columns, wanted, strict=True)]
    return pa.Table.from_arrays(columns, schema=wanted.with_metadata(table.schema.metadata))


def _column_from_parquet(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    flags = holds_flags(field)
    expected = parquet_field(field).type
    if not column.type.equals(expected) and not column.type.equals(field.type):
        raise FormatError(f"column {field.name!r} must be stored as {expected}, got {column.type}")
    chunks = [from_parquet(chunk, field.type, nullable=field.nullable, flags=flags) for chunk in column.chunks]
    return pa.chunked_array(chunks, field.type)


def _row_groups(batch: SampleBatch | MultiAgentBatch, table: pa.Table) -> Iterator[pa.Table]:
    """Cut a table so that no row group has rows of two policies: readers that want one then skip the others."""
    if isinstance(batch, SampleBatch) or not batch.policy_batches:
        yield table
        return
    about: dict[str, Any] = metadata_of(table.schema) or {}
    start = 0
    for policy in about["policies"].values():
        yield table.slice(start, policy["rows"])
        start += policy["rows"]


def _check_magic(name: str) -> None:
    with open(name, "rb") as file:
        if file.read(len(PARQUET.magic)) == PARQUET.magic:
            return
    raise FormatError(f"{name!r} must be a Parquet file, and its first bytes are not those of one")

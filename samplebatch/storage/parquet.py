"""Batches in Parquet files: compressed, for keeping and for other tools.

A file holds the table that `to_arrow` makes; each policy has row groups of its own. Where Parquet has no place for what
Arrow holds, the values are written in another layout (see `parquet_layout`), and the Arrow schema stands beside them in
the metadata, so that what is read equals what was written. Each page has a checksum as the format defines it, for every
reader; before the footer there are checksums of all bytes (see `file_checksums`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from samplebatch.arguments import choice
from samplebatch.batch.arrow import metadata_of
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.storage.arrow_file import replacing
from samplebatch.storage.batch_table import AnyBatch, read_batch, to_table
from samplebatch.storage.file_bytes import check_magic, file_bytes
from samplebatch.storage.file_checksums import (
    PARQUET,
    ColumnsAt,
    add_checksums,
    check_footer,
    check_whole,
    checksums_in,
)
from samplebatch.storage.parquet_layout import byte_paths, holds_flags, to_parquet
from samplebatch.storage.suffixes import check_suffix
from samplebatch.storage.table_file import ParquetTable, name_file_damage, schema_to_store

_GROUP_NBYTES = 1 << 23
"""Bytes of the rows of a row group, at the most, about: readers take one at a time."""

_POLICY = "policy_id"
_CODECS = ("zstd", "snappy", "lz4", "gzip", "brotli", "none")


def write_parquet(
    batch: AnyBatch, path: str | os.PathLike[str], *, compression: str = "zstd", durable: bool = True
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
    durable
        Whether to wait until the file is on the disk; see `SampleBatch.save`.

    Raises
    ------
    OSError
        If the file cannot be written.
    SequenceError
        If the batch is time-major.
    ArgumentError
        If there is no such codec.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import SampleBatch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_parquet(SampleBatch(rewards=[1.0, 2.0], infos=[{}, {}]), f"{folder}/batch.parquet")
    ...     read_parquet(f"{folder}/batch.parquet")["rewards"].tolist()
    [1.0, 2.0]
    """
    table = to_table(batch)
    with parquet_writer(path, table.schema, compression, durable=durable) as writer:
        for part in _row_groups(batch, table):
            writer.write_table(part)


class ParquetWriter:
    """Writes tables of one schema as row groups, laid out as Parquet has a place for them; made by `parquet_writer`."""

    def __init__(self, writer: Any, schema: pa.Schema) -> None:
        self._writer = writer
        self._schema = schema

    def write_table(self, table: pa.Table) -> None:
        """Write a table as one row group or several, none of which is larger than readers like to take at once."""
        columns = [
            pa.chunked_array(
                [to_parquet(chunk, nullable=field.nullable, flags=holds_flags(field)) for chunk in column.chunks],
                stored.type,
            )
            for column, field, stored in zip(table.columns, table.schema, self._schema, strict=True)
        ]
        laid = pa.Table.from_arrays(columns, schema=self._schema)
        rows = max(1, laid.num_rows)
        self._writer.write_table(laid, row_group_size=max(1, min(rows, rows * _GROUP_NBYTES // max(1, laid.nbytes))))

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write a record batch."""
        self.write_table(pa.Table.from_batches([batch]))


@contextlib.contextmanager
def parquet_writer(
    path: str | os.PathLike[str], schema: pa.Schema, compression: str = "zstd", *, durable: bool = True
) -> Iterator[ParquetWriter]:
    """Open a writer of a Parquet file, which takes the path's place, with checksums, when the block ends well.

    Raises
    ------
    OSError
        If the path is a folder, or no file there can be written.
    FormatError
        If its name has the ending of another format.
    ArgumentError
        If there is no such codec.
    """
    from pyarrow import parquet

    check_suffix(path, "Parquet")
    choice("compression", compression, _CODECS)
    stored = schema_to_store(schema)
    with replacing(path, durable=durable) as file:
        with parquet.ParquetWriter(
            file,
            stored,
            compression=compression,
            # Dictionaries of floats and counters cost time and save nothing. Streams of the bytes of floats, one for
            # each place, save a tenth, and Spark does not read them.
            use_dictionary=[_POLICY, *byte_paths(stored)],
            write_page_checksum=True,
            # The version that has 16-bit floats and unsigned integers.
            version="2.6",
        ) as writer:
            yield ParquetWriter(writer, stored)
        add_checksums(file, PARQUET)


def read_parquet(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, verify: bool = True, max_nbytes: int | None = None
) -> Any:
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
    file, bound = open_parquet(path, verify=verify, max_nbytes=max_nbytes)
    must = f"{file.name!r} must be a batch that write_parquet wrote"
    return read_batch(file, bound, must, allow_pickle=allow_pickle)


def open_parquet(
    path: str | os.PathLike[str], *, verify: bool | None = True, max_nbytes: int | None = None
) -> tuple[ParquetTable, MemoryBound]:
    """Open the table of a Parquet file, and make the bound of the memory that may be made of it.

    Parameters
    ----------
    path, max_nbytes
        As of `read_parquet`.
    verify
        Whether to hold the file against its checksums; if None, the footer at once, and pages when they are read.

    Raises
    ------
    FormatError
        If it is no Parquet file, is damaged or cut short.
    OSError
        If it cannot be read.
    """
    name = os.fspath(path)
    return parquet_table(file_bytes(name, memory_map=True), name, verify=verify, max_nbytes=max_nbytes)


def parquet_table(
    data: pa.Buffer, name: str, *, verify: bool | None, max_nbytes: int | None = None
) -> tuple[ParquetTable, MemoryBound]:
    """Make the table of a Parquet file's bytes, and its bound, as `open_parquet` does.

    Raises
    ------
    FormatError
        If they are those of no Parquet file, are damaged or cut short.
    """
    check_magic(data, PARQUET.magic, "Parquet", name)
    with name_file_damage(name, "Parquet"):
        whole = bool(verify) and check_parquet(data, name)
        if verify is None:
            _check_footer(data, name)
        return ParquetTable(data, name, check_pages=verify is not False and not whole), MemoryBound(
            repr(name), data.size, max_nbytes
        )


def check_parquet(data: pa.Buffer, name: str) -> bool:
    """Hold all bytes of a Parquet file against its checksums, and tell whether it has any.

    Raises
    ------
    FormatError
        If a byte is not as it was written; names the columns.
    """
    return check_whole(data, PARQUET, name, _columns_at(data))


def _check_footer(data: pa.Buffer, name: str) -> None:
    view = memoryview(data).cast("B")
    found = checksums_in(view, PARQUET, name)
    if found is not None:
        check_footer(view, found, name)


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


def _row_groups(batch: AnyBatch, table: pa.Table) -> Iterator[pa.Table]:
    """Cut a table so that no row group has rows of two policies: readers that want one then skip the others."""
    if not isinstance(batch, MultiAgentBatch) or not batch.policy_batches:
        yield table
        return
    about: dict[str, Any] = metadata_of(table.schema) or {}
    start = 0
    for policy in about["policies"].values():
        yield table.slice(start, policy["rows"])
        start += policy["rows"]

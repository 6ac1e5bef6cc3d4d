"""Batches in Arrow IPC files, read where they lie.

A file is the table that `to_arrow` makes, uncompressed unless asked for, so that reading maps it and copies nothing.
Polars, DuckDB, pandas and every other reader of Arrow files read it too. Before its footer it has checksums of all its
bytes (see `file_checksums`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from samplebatch.arguments import choice
from samplebatch.column.arrow_bodies import ArrowLayout
from samplebatch.column.checksum import BLOCK_NBYTES
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.errors import FormatError
from samplebatch.storage.arrow_table import ArrowTable
from samplebatch.storage.batch_table import AnyBatch, is_compressed, read_batch, to_table
from samplebatch.storage.file_bytes import check_magic, file_bytes
from samplebatch.storage.file_checksums import (
    ARROW,
    ColumnsAt,
    SummedFile,
    add_checksums,
    check_footer,
    check_whole,
    checksums_in,
    write_summed,
)
from samplebatch.storage.suffixes import check_suffix
from samplebatch.storage.table_file import name_file_damage

_CODECS = ("lz4", "zstd", "none")


def write_arrow(
    batch: AnyBatch, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True
) -> None:
    """Write a batch to an Arrow IPC file, whole or not at all.

    The bytes go to a temporary file beside the path, which takes its place once they are on the disk. A file that was
    there before stays as it was until then, also for those who have it mapped.

    Parameters
    ----------
    batch
        The batch. Its columns are written as they lie.
    path
        The file. Its folder must exist.
    compression
        Of the columns' buffers: `"lz4"`, `"zstd"` or `"none"`. None compresses with LZ4 where a column is compressed
        in memory, and not at all where none is, so that the file can be mapped.
    durable
        Whether to wait until the file is on the disk; see `SampleBatch.save`.

    Raises
    ------
    OSError
        If the file cannot be written.
    FormatError
        If its name has the ending of another format.
    ColumnTypeError
        If a nested batch has a single value, which is no column; names it.
    SequenceError
        If the batch is time-major.
    ArgumentError
        If there is no such compression.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import SampleBatch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_arrow(SampleBatch(rewards=[1.0, 2.0]), f"{folder}/batch.arrow")
    ...     read_arrow(f"{folder}/batch.arrow")["rewards"].tolist()
    [1.0, 2.0]
    """
    table = to_table(batch)
    codec = compression or ("lz4" if is_compressed(batch) else "none")
    nbytes = table.get_total_buffer_size()
    if nbytes < BLOCK_NBYTES:
        _write_small(table, path, codec, durable=durable)
        return
    with arrow_writer(path, table.schema, codec, durable=durable, nbytes=nbytes if codec == "none" else 0) as writer:
        writer.write_table(table)


def _write_small(table: pa.Table, path: str | os.PathLike[str], compression: str, *, durable: bool) -> None:
    """Write a table by way of memory: one large write takes less time than a small one for each buffer."""
    options = _options(path, compression)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    with replacing(path, durable=durable) as file, memoryview(sink.getvalue()) as data:
        if not durable:
            # To wait for the disk takes longer than the system takes to find blocks when the file is renamed.
            _reserve(file, len(data))
        write_summed(file, data, ARROW)
        file.truncate()


@contextlib.contextmanager
def arrow_writer(
    path: str | os.PathLike[str],
    schema: pa.Schema,
    compression: str = "none",
    *,
    durable: bool = True,
    nbytes: int = 0,
) -> Iterator[Any]:
    """Open a writer of an Arrow file, which takes the path's place, with checksums, when the block ends well.

    Parameters
    ----------
    path, schema, compression, durable
        As `write_arrow` takes them, and the schema of the tables.
    nbytes
        Bytes of the tables, as far as they are known: blocks of the disk are reserved for them together.

    Raises
    ------
    OSError
        If the path is a folder, or no file there can be written.
    FormatError
        If its name has the ending of another format.
    ArgumentError
        If there is no such compression.
    """
    options = _options(path, compression)
    with replacing(path, durable=durable) as file:
        _reserve(file, nbytes)
        summed = SummedFile(file)
        with pa.ipc.new_file(summed, schema, options=options) as writer:
            yield writer
        add_checksums(file, ARROW, summed.blocks, summed.tell())
        file.truncate()


def _reserve(file: BinaryIO, nbytes: int) -> None:
    """Reserve blocks of the disk for the body of a file and the metadata around it; `truncate` gives the rest back.

    Blocks that are found as bytes are written take twice the time, and where some are missing when the file is renamed,
    the system writes all of it at once.
    """
    if not nbytes or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes + BLOCK_NBYTES)
    except OSError as error:
        # Some file systems cannot; a disk without room is told here.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _options(path: str | os.PathLike[str], compression: str) -> pa.ipc.IpcWriteOptions:
    """Check the name of a file to be written, and turn a compression into Arrow's options."""
    check_suffix(path, "Arrow")
    choice("compression", compression, _CODECS)
    return pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)


def read_arrow(
    path: str | os.PathLike[str],
    *,
    memory_map: bool = True,
    allow_pickle: bool = False,
    verify: bool | None = None,
    max_nbytes: int | None = None,
) -> Any:
    """Read a batch that `write_arrow` wrote.

    Parameters
    ----------
    path
        The file.
    memory_map
        Whether to map the file instead of reading it. Columns then lie in the file: nothing is copied, pages are
        loaded when they are touched, and writing to them raises. The file must not be written to in place while they
        are in use.
    allow_pickle
        Whether to unpickle columns of Python objects that Arrow has no type for. Only for files whose writer you
        trust: a pickle can run any code.
    verify
        Whether to hold the file against its checksums, which reads all of it. By default that is done where all of it
        is read anyway, without `memory_map`; a mapped file has its footer checked alone. A file without checksums, by
        an older version or another tool, is read without a check.
    max_nbytes
        Bytes of memory that may be made of the file: of objects in columns, and of compressed ones. If None, 256 MiB or
        1024 times the bytes of the file, whichever is more.

    Raises
    ------
    FormatError
        If the file is no Arrow file, is damaged or cut short, or was not written by this library. Names the columns
        where bytes have changed.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false; names it.
    CapacityError
        If more memory would be made of the file than `max_nbytes`; names the column.
    OSError
        If the file cannot be read.
    """
    file, bound = open_arrow(path, memory_map=memory_map, verify=verify, max_nbytes=max_nbytes)
    must = f"{file.name!r} must be a batch that write_arrow wrote"
    return read_batch(file, bound, must, allow_pickle=allow_pickle)


def open_arrow(
    path: str | os.PathLike[str],
    *,
    memory_map: bool = True,
    verify: bool | None = None,
    max_nbytes: int | None = None,
) -> tuple[ArrowTable, MemoryBound]:
    """Open the table of an Arrow file, and make the bound of the memory that may be made of it.

    Parameters are those of `read_arrow`.

    Raises
    ------
    FormatError
        If it is no Arrow file, is damaged or cut short.
    CapacityError
        If more memory would be made of it than `max_nbytes`.
    OSError
        If it cannot be read.
    """
    name = os.fspath(path)
    data = file_bytes(name, memory_map=memory_map)
    return arrow_table(data, name, verify=not memory_map if verify is None else verify, max_nbytes=max_nbytes)


def arrow_table(
    data: pa.Buffer, name: str, *, verify: bool, max_nbytes: int | None = None
) -> tuple[ArrowTable, MemoryBound]:
    """Make the table of an Arrow file's bytes, and its bound, as `open_arrow` does.

    Raises
    ------
    FormatError
        If they are those of no Arrow file, are damaged or cut short.
    CapacityError
        If more memory would be made of them than `max_nbytes`.
    """
    check_magic(data, ARROW.magic, "Arrow", name)
    with name_file_damage(name, "Arrow"):
        bound = MemoryBound(repr(name), data.size, max_nbytes)
        layout = _layout_of(data, name)
        bound.take(layout.decompressed_nbytes, "what is compressed")
        check_arrow(data, name, verify=verify)
        return ArrowTable(data, name, layout), bound


def _layout_of(data: pa.Buffer, name: str) -> ArrowLayout:
    try:
        return ArrowLayout(data)
    except FormatError as error:
        raise FormatError(f"{name!r} must be a whole Arrow file, and it is damaged or cut short: {error}") from error


def check_arrow(data: pa.Buffer, name: str, *, verify: bool) -> bool:
    """Hold the bytes of an Arrow file against its checksums, and tell whether it has any.

    Parameters
    ----------
    data
        The bytes.
    name
        The file, for errors.
    verify
        Whether to check all of them, or the footer alone.

    Raises
    ------
    FormatError
        If a byte is not as it was written; names the columns.
    """
    if verify:
        return check_whole(data, ARROW, name, _columns_at(data))
    view = memoryview(data)
    found = checksums_in(view, ARROW, name)
    if found is not None:
        check_footer(view, found, name)
    return found is not None


def _columns_at(data: pa.Buffer) -> ColumnsAt:
    """Make a function that names the columns of an Arrow file with values between two places."""

    def named(start: int, stop: int) -> list[str]:
        try:
            file = pa.ipc.open_file(data)
            batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        # What is damaged may be what says where the columns are.
        except (pa.ArrowException, OSError):
            return []
        low, high = data.address + start, data.address + stop
        return [
            name
            for i, name in enumerate(file.schema.names)
            if any(
                buffer is not None and buffer.address < high and buffer.address + buffer.size > low
                for batch in batches
                for buffer in batch.column(i).buffers()
            )
        ]

    return named


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that `write_arrow` can write to a path, by making the temporary file and taking it away again.

    Raises
    ------
    OSError
        If it cannot.
    """
    temporary, file = _open_beside(_target(path), path)
    file.close()
    os.unlink(temporary)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the path's place when the block ends well, and vanishes when it does not.

    Parameters
    ----------
    path
        The path.
    durable
        Whether the bytes are on the disk before that.

    Raises
    ------
    OSError
        If the path is a folder, or no file there can be written.
    """
    target = _target(path)
    temporary, file = _open_beside(target, path)
    try:
        with file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _target(path: str | os.PathLike[str]) -> str:
    target = os.path.join(os.getcwd(), os.fspath(path))
    try:
        mode = os.lstat(target).st_mode
        if stat.S_ISLNK(mode):
            # A link stays a link: the file that it names is replaced.
            target = os.path.realpath(target)
            mode = os.stat(target).st_mode
    except OSError:
        return target
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{os.fspath(path)!r} must be a file, and it is a folder")
    if not os.access(target, os.W_OK):
        raise PermissionError(f"{os.fspath(path)!r} must be writable, and it is read-only")
    return target


def _open_beside(target: str, path: str | os.PathLike[str]) -> tuple[str, BinaryIO]:
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        return temporary, open(temporary, "x+b")
    except OSError as error:
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{os.fspath(path)!r} must lie in a folder, and there is no {folder!r}; make it first"
            ) from None
        raise type(error)(f"{target!r} must lie in a folder that can be written to: {error.strerror}") from error

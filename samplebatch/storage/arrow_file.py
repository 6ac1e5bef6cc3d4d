"""Batches in Arrow IPC files, read where they lie.

A file is the table that `to_arrow` makes, uncompressed, so that reading maps it into memory and copies nothing.
Polars, DuckDB, pandas and every other reader of Arrow files read it too. Before its footer it has checksums of all its
bytes (see `file_checksums`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from samplebatch.batch.arrow import from_policy_table, from_table, metadata_of
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.arrow_bodies import decompressed_nbytes
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.errors import ColumnTypeError, FormatError
from samplebatch.storage.damage import name_damage
from samplebatch.storage.file_checksums import ARROW, ColumnsAt, add_checksums, check_footer, check_whole, checksums_in


def write_arrow(batch: SampleBatch | MultiAgentBatch, path: str | os.PathLike[str]) -> None:
    """Write a batch to an Arrow IPC file, whole or not at all.

    The bytes go to a temporary file beside the path, which takes its place once they are on the disk. A file that was
    there before stays as it was until then, also for those who have it mapped.

    Parameters
    ----------
    batch
        The batch. Its columns are written as they lie.
    path
        The file. Its folder must exist.

    Raises
    ------
    OSError
        If the file cannot be written.
    SequenceError
        If the batch is time-major.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_arrow(SampleBatch(rewards=[1.0, 2.0]), f"{folder}/batch.arrow")
    ...     read_arrow(f"{folder}/batch.arrow")["rewards"].tolist()
    [1.0, 2.0]
    """
    table = batch.to_arrow()
    with arrow_writer(path, table.schema) as writer:
        writer.write_table(table)


@contextlib.contextmanager
def arrow_writer(path: str | os.PathLike[str], schema: pa.Schema) -> Iterator[Any]:
    """Open a writer of an Arrow file, which takes the path's place, with checksums, when the block ends well.

    Raises
    ------
    OSError
        If the path is a folder, or no file there can be written.
    """
    with replacing(path) as file:
        with pa.ipc.new_file(file, schema) as writer:
            yield writer
        add_checksums(file, ARROW)


def read_arrow(
    path: str | os.PathLike[str],
    *,
    memory_map: bool = True,
    allow_pickle: bool = False,
    verify: bool | None = None,
    max_nbytes: int | None = None,
) -> SampleBatch | MultiAgentBatch:
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
    name = os.fspath(path)
    check_magic(name)
    try:
        data = file_bytes(name, memory_map=memory_map)
        bound = bound_of_file(data, name, max_nbytes)
        check_arrow(data, name, verify=not memory_map if verify is None else verify)
        table = pa.ipc.open_file(data).read_all()
        # What becomes objects is validated once it is known how much that is.
        table.validate()
        about = metadata_of(table.schema)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{name!r} must be a whole Arrow file, and it is damaged or cut short: {error}") from error
    # Names of columns may be no text, for one.
    with name_damage(repr(name)):
        return batch_in(
            table, about, f"{name!r} must be a batch that write_arrow wrote", bound, allow_pickle=allow_pickle
        )


def bound_of_file(data: pa.Buffer, name: str, max_nbytes: int | None) -> MemoryBound:
    """Make the memory bound of an Arrow file, less the declared sizes of its compressed buffers.

    Raises
    ------
    CapacityError
        If that is more than the bound.
    FormatError
        If the file has no footer and messages where it says.
    """
    bound = MemoryBound(repr(name), data.size, max_nbytes)
    try:
        bound.take(decompressed_nbytes(data), "what is compressed")
    except FormatError as error:
        raise FormatError(f"{name!r} must be a whole Arrow file, and it is damaged or cut short: {error}") from error
    return bound


def file_bytes(name: str, *, memory_map: bool) -> pa.Buffer:
    """Return all bytes of a file, mapped or read.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    with pa.memory_map(name) if memory_map else pa.OSFile(name) as source:
        return source.read_buffer()


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


def batch_in(
    table: pa.Table, about: dict[str, Any] | None, must: str, bound: MemoryBound, *, allow_pickle: bool = False
) -> SampleBatch | MultiAgentBatch:
    """View the table of a file as the batch that its metadata says it is.

    Parameters
    ----------
    table
        The table, of which the sizes of buffers have been checked.
    about
        What `metadata_of` read in its schema.
    must
        What the file must be, for errors: the first half of a sentence, which names it.
    bound
        What memory may be made of the file.
    allow_pickle
        Whether columns may be unpickled.

    Raises
    ------
    FormatError
        If no batch wrote it, or it does not fit its own description.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false; names it.
    """
    kind = about.get("type") if about is not None else None
    if kind not in ("SampleBatch", "MultiAgentBatch"):
        raise FormatError(f"{must}, got another Arrow table; SampleBatch.from_arrow may take it")
    try:
        if kind == "SampleBatch":
            return SampleBatch._of(*from_table(table, allow_pickle=allow_pickle, bound=bound))
        policies, env_steps = from_policy_table(table, allow_pickle=allow_pickle, bound=bound)
        return MultiAgentBatch({policy: SampleBatch._of(*parts) for policy, parts in policies.items()}, env_steps)
    except (pa.ArrowException, ColumnTypeError) as error:
        raise FormatError(f"{must}, and it does not fit its own description: {error}") from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that `write_arrow` can write to a path, by making the temporary file and taking it away again.

    Raises
    ------
    OSError
        If it cannot.
    """
    target = _target(path)
    temporary, file = _open_beside(target)
    file.close()
    temporary.unlink()


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the path's place when the block ends well, and vanishes when it does not.

    Raises
    ------
    OSError
        If the path is a folder, or no file there can be written.
    """
    target = _target(path)
    temporary, file = _open_beside(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _target(path: str | os.PathLike[str]) -> Path:
    # A link stays a link: what it points to is replaced.
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{os.fspath(path)!r} must be a file, and it is a folder")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"{os.fspath(path)!r} must lie in a folder, and there is no {str(target.parent)!r}; make it first"
        )
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(f"{os.fspath(path)!r} must be writable, and it is read-only")
    return target


def _open_beside(target: Path) -> tuple[Path, BinaryIO]:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        return temporary, temporary.open("x+b")
    except OSError as error:
        raise type(error)(f"{str(target)!r} must lie in a folder that can be written to: {error.strerror}") from error


def check_magic(name: str) -> None:
    """Check that a file begins as Arrow files do.

    Raises
    ------
    FormatError
        If it does not.
    OSError
        If it cannot be read.
    """
    with open(name, "rb") as file:
        start = file.read(len(ARROW.magic))
        if start == ARROW.magic:
            return
    raise FormatError(f"{name!r} must be an Arrow file, and its first bytes are not those of one")

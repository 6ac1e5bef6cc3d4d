"""Batches in Arrow IPC files, read where they lie.

A file is the table that `to_arrow` makes, uncompressed unless asked for, so that reading maps it and copies nothing.
Polars, DuckDB, pandas and every other reader of Arrow files read it too. Before its footer it has checksums of all its
bytes (see `checksums`).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, BinaryIO

import pyarrow as pa

from samplebatch.arguments import choice
from samplebatch.batch.arrow import Parts, TableReader, make_reader
from samplebatch.column.arrow import Recent
from samplebatch.column.arrow_bodies import ArrowLayout
from samplebatch.column.checksum import BLOCK_NBYTES
from samplebatch.column.memory import MemoryBound
from samplebatch.column.plan import Plan
from samplebatch.errors import CapacityError, FormatError
from samplebatch.storage import checksums
from samplebatch.storage.files import check_magic, check_suffix, file_bytes, replacing
from samplebatch.storage.foreign.damage import name_file_damage
from samplebatch.storage.tables import batches

_CODECS = ("lz4", "zstd", "none")

MAX_LENGTH = (1 << 31) - 1
"""Values that one array of a record batch may have in a file, the elements of its rows included; Arrow's own limit."""


def write_arrow(
    batch: batches.AnyBatch, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True
) -> None:
    """Write a batch to an Arrow IPC file, atomically.

    The bytes go to a temporary file beside the path, which takes its place once they are on the disk. A file that was
    there before stays as it was until then, also for those who have it mapped.

    Parameters
    ----------
    batch
        The batch. Its columns are written as they lie, in one record batch; in several where one has more than 2^31 - 1
        elements, which readers then join with one copy.
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
    CapacityError
        If a single row of a column has more than 2^31 - 1 elements; names the column.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import SampleBatch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_arrow(SampleBatch(rewards=[1.0, 2.0]), f"{folder}/batch.arrow")
    ...     read_arrow(f"{folder}/batch.arrow")["rewards"].tolist()
    [1.0, 2.0]
    """
    table = batches.to_table(batch)
    codec = compression or ("lz4" if batches.is_compressed(batch) else "none")
    nbytes = table.get_total_buffer_size()
    # An element has a bit at least.
    parts = [table] if nbytes < MAX_LENGTH // 8 else list(_writable_parts(table))
    if nbytes < BLOCK_NBYTES and len(parts) == 1:
        _write_small(table, path, codec, durable=durable)
        return
    with arrow_writer(path, table.schema, codec, durable=durable, nbytes=nbytes if codec == "none" else 0) as writer:
        for part in parts:
            writer.write_table(part)


def _writable_parts(table: pa.Table) -> Iterator[pa.Table]:
    """Split a table between rows, so that arrays of record batches fit into Arrow files."""
    lengths = {name: max(map(_longest, table.column(name).chunks), default=0) for name in table.column_names}
    if max(lengths.values(), default=0) <= MAX_LENGTH:
        yield table
        return
    if table.num_rows < 2:
        name = max(lengths, key=lengths.__getitem__)
        raise CapacityError(
            f"column {name!r} must have rows of at most {MAX_LENGTH} elements to be written to an Arrow file, got one "
            f"of {lengths[name]}"
        )
    middle = table.num_rows // 2
    yield from _writable_parts(table.slice(0, middle))
    yield from _writable_parts(table.slice(middle))


def _longest(array: pa.Array) -> int:
    """Return the length of an array, or of the longest one nested in it: elements of lists, fields of structs."""
    arrow = array.type
    if isinstance(arrow, pa.BaseExtensionType):
        return _longest(array.storage)
    inner: list[pa.Array] = []
    if pa.types.is_fixed_size_list(arrow):
        inner = [array.values.slice(array.offset * arrow.list_size, len(array) * arrow.list_size)]
    elif pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        offsets = array.offsets
        first, last = (offsets[0].as_py(), offsets[len(array)].as_py()) if len(array) else (0, 0)
        inner = [array.values.slice(first, last - first)]
    elif pa.types.is_struct(arrow):
        inner = [array.field(i) for i in range(arrow.num_fields)]
    return max([len(array), *map(_longest, inner)])


def _write_small(table: pa.Table, path: str | os.PathLike[str], compression: str, *, durable: bool) -> None:
    """Write a table through memory: one large write is faster than a small write per buffer."""
    options = _options(path, compression)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    with replacing(path, durable=durable) as file, memoryview(sink.getvalue()) as data:
        if not durable:
            # To wait for the disk takes longer than the system takes to find blocks when the file is renamed.
            _reserve(file, len(data))
        checksums.write(file, data, checksums.ARROW)
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
        summed = checksums.SummedFile(file)
        with pa.ipc.new_file(summed, schema, options=options) as writer:
            yield writer
        checksums.add(file, checksums.ARROW, summed.blocks, summed.tell())
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
    return batches.read_batch(file, bound, must, allow_pickle=allow_pickle)


def open_arrow(
    path: str | os.PathLike[str],
    *,
    memory_map: bool = True,
    verify: bool | None = None,
    max_nbytes: int | None = None,
) -> tuple[ArrowTable, MemoryBound]:
    """Open the table of an Arrow file, and make the bound of the memory that may be made of it.

    Parameters are those of `read_arrow`.
    """
    name = os.fspath(path)
    data = file_bytes(name, memory_map=memory_map)
    return arrow_table(data, name, verify=not memory_map if verify is None else verify, max_nbytes=max_nbytes)


def arrow_table(
    data: pa.Buffer, name: str, *, verify: bool, max_nbytes: int | None = None
) -> tuple[ArrowTable, MemoryBound]:
    """Create the table of an Arrow file's bytes, and its bound, as `open_arrow` does."""
    check_magic(data, checksums.ARROW.magic, "Arrow", name)
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


def check_arrow(data: pa.Buffer, name: str, *, verify: bool = True) -> bool:
    """Verify an Arrow file, or its footer alone, against its checksums; return whether it has any."""
    return checksums.verify(data, checksums.ARROW, name, partial(_columns_at, data) if verify else None)


def _columns_at(data: pa.Buffer, start: int, stop: int) -> list[str]:
    """Name the columns of an Arrow file with values between two offsets."""
    try:
        file = pa.ipc.open_file(data)
        parts = [file.get_batch(i) for i in range(file.num_record_batches)]
    # What is damaged may be what says where the columns are.
    except (pa.ArrowException, OSError):
        return []
    low, high = data.address + start, data.address + stop
    return [
        name
        for i, name in enumerate(file.schema.names)
        if any(
            buffer is not None and buffer.address < high and buffer.address + buffer.size > low
            for part in parts
            for buffer in part.column(i).buffers()
        )
    ]


_MAX_SCHEMA_NBYTES = 1 << 16


class _ArrowSchema(batches.FileSchema):
    """A schema of Arrow files, with its plan, and readers of chosen columns."""

    def __init__(self, schema: pa.Schema, *, is_native: bool) -> None:
        super().__init__(schema)
        self._is_native = is_native
        self._readers = Recent[tuple[str, ...], TableReader](limit=8)

    @cached_property
    def plan(self) -> Plan | None:
        """The plan by which columns of a flat batch are viewed; None if there is none."""
        return Plan.of(self.schema) if self._is_native else None

    def reader(self, names: Sequence[str], about: Mapping[str, Any]) -> TableReader:
        """Return the reader of chosen columns of a flat batch."""
        chosen = [self.schema.field(name) for name in names]
        return self._readers.get(tuple(names), lambda: make_reader(pa.schema(chosen), dict(about)))


_schemas = Recent[bytes, _ArrowSchema](limit=32)
"""The schemas that were seen last, by their bytes in the files' footers."""


class ArrowTable(batches.TableFile):
    """A table in an Arrow IPC file, viewed where it lies unless its buffers are compressed."""

    form = "Arrow"
    _known: _ArrowSchema

    def __init__(self, data: pa.Buffer, name: str, layout: ArrowLayout) -> None:
        super().__init__(data, name)
        self._layout = layout
        self.num_groups = layout.num_batches
        remembered = len(layout.schema) <= _MAX_SCHEMA_NBYTES
        self._known = _schemas.get(layout.schema, self._read_schema) if remembered else self._read_schema()

    def _read_schema(self) -> _ArrowSchema:
        return _ArrowSchema(self._file.schema, is_native=self._layout.is_native())

    @cached_property
    def _file(self) -> Any:
        with name_file_damage(self.name, self.form):
            return pa.ipc.open_file(self.data)

    @cached_property
    def group_rows(self) -> list[int]:
        """Rows of each record batch."""
        with name_file_damage(self.name, self.form):
            return self._layout.rows()

    def view(self, names: Sequence[str]) -> Parts | None:
        """View columns of a flat batch where they lie, without a table; None if they must be read as one."""
        about = self._known.about
        if about is None or about.get("type") != "SampleBatch" or self.num_groups != 1:
            return None
        plan, body = self._known.plan, self._layout.body(0)
        if plan is None or body is None:
            return None
        return self._known.reader(names, about).view(plan, self.data, body)

    def read(self, groups: Sequence[int], names: Sequence[str], bound: MemoryBound) -> pa.Table:
        """Read columns of some record batches; those that are not compressed are viewed."""
        with name_file_damage(self.name, self.form):
            file, places = self._file, batches.places_of(self.schema, names)
            if self._layout.decompressed_nbytes and len(places) < len(self.schema):
                # What is compressed and not asked for stays so. With this option Arrow copies what is not compressed.
                file = pa.ipc.open_file(self.data, options=pa.ipc.IpcReadOptions(included_fields=places))
            table = pa.Table.from_batches([file.get_batch(i) for i in groups], file.schema)
            if len(names) < len(table.schema):
                table = table.select(places)
            # What becomes objects is validated once it is known how much that is.
            table.validate()
            return table

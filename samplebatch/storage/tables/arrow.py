"""Storage of batches in Arrow IPC files, which can be memory-mapped without copies.

A file contains the table that `to_arrow` returns, uncompressed by default, so that the file can be mapped without
copies. Polars, DuckDB, pandas and other Arrow readers can read the file. Checksums of all bytes precede the footer (see
`checksums`).
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
"""Maximum number of values per array of a record batch, including elements of rows; Arrow's limit."""


def write_arrow(
    batch: batches.AnyBatch, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True
) -> None:
    """Write a batch atomically to an Arrow IPC file.

    The bytes are written to a temporary file. The complete temporary file then replaces the file at `path`. Until the
    replacement, an existing file at `path` is unchanged. Memory mappings of the replaced file remain valid.

    Parameters
    ----------
    batch
        The batch; its columns are written without copies as one record batch. A column with more than 2^31 - 1 elements
        requires several record batches, which readers concatenate with one copy.
    path
        Path of the file in an existing folder.
    compression
        Compression of column buffers: `"lz4"`, `"zstd"` or `"none"`. None selects LZ4 if a column is compressed in
        memory, and otherwise no compression, so that the file can be mapped.
    durable
        Whether to sync the file to disk; see `SampleBatch.save`.

    Raises
    ------
    OSError
        If the file cannot be written.
    FormatError
        If the suffix of the path belongs to a format other than Arrow.
    ColumnTypeError
        If a value of a nested batch is a scalar, which cannot be a column.
    SequenceError
        If the batch is time-major.
    ArgumentError
        If the compression is unknown.
    CapacityError
        If a single row of a column has more than 2^31 - 1 elements.

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
    # An element has at least one bit.
    parts = [table] if nbytes < MAX_LENGTH // 8 else list(_writable_parts(table))
    if nbytes < BLOCK_NBYTES and len(parts) == 1:
        _write_small(table, path, codec, durable=durable)
        return
    with arrow_writer(path, table.schema, codec, durable=durable, nbytes=nbytes if codec == "none" else 0) as writer:
        for part in parts:
            writer.write_table(part)


def _writable_parts(table: pa.Table) -> Iterator[pa.Table]:
    """Split a table into ranges of rows whose record batches do not exceed Arrow's limit on array lengths."""
    lengths = {name: max(map(_longest, table.column(name).chunks), default=0) for name in table.column_names}
    if max(lengths.values(), default=0) <= MAX_LENGTH:
        yield table
        return
    if table.num_rows < 2:
        name = max(lengths, key=lengths.__getitem__)
        raise CapacityError(
            f"column {name!r} must have rows of at most {MAX_LENGTH} elements to be written to an Arrow file, got "
            f"{lengths[name]}"
        )
    middle = table.num_rows // 2
    yield from _writable_parts(table.slice(0, middle))
    yield from _writable_parts(table.slice(middle))


def _longest(array: pa.Array) -> int:
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
    """Serialize a table in memory first, because one large write is faster than one write per buffer."""
    options = _options(path, compression)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    with replacing(path, durable=durable) as file, memoryview(sink.getvalue()) as data:
        if not durable:
            # With a sync, reserving blocks saves no time.
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
    """Open a writer of an Arrow file with checksums; the file replaces `path` if the `with` block succeeds.

    path, compression, durable: as in `write_arrow`. schema: schema of the tables. nbytes: size of the tables in bytes,
    used to reserve disk blocks in advance; 0 if the size is unknown.

    Raises OSError if the path is a folder or not writable. Raises FormatError if the suffix of the path belongs to a
    format other than Arrow. Raises ArgumentError if the compression is unknown.
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
    """Reserve disk blocks for the body and metadata of a file; `truncate` releases unused blocks.

    Allocation of blocks during writes doubles the write time. If disk blocks of a file are not allocated yet, a rename
    of the file forces the system to write the entire file.
    """
    if not nbytes or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes + BLOCK_NBYTES)
    except OSError as error:
        # Some file systems do not support preallocation; a full disk is reported here.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _options(path: str | os.PathLike[str], compression: str) -> pa.ipc.IpcWriteOptions:
    """Check the suffix of a path, and convert the compression argument to Arrow's write options."""
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
    """Read a batch written by `write_arrow`.

    Parameters
    ----------
    path
        The file.
    memory_map
        Whether to memory-map the file instead of reading it. The columns of a mapped file are read-only views, loaded
        lazily; the file must not be modified while the views are in use.
    allow_pickle
        Whether to unpickle columns of Python objects without an Arrow type. A pickle can execute arbitrary code, so
        pass True only for files from a trusted writer.
    verify
        Whether to verify all bytes against their checksums. None verifies all bytes if the file is read, and only the
        footer if the file is mapped. Files without checksums, from older versions or other tools, are not verified.
    max_nbytes
        Maximum bytes to allocate for objects and compressed columns; None for the larger of 256 MiB and 1024 times the
        file's size.

    Raises
    ------
    FormatError
        If the file is not an Arrow file, is damaged or truncated, or was not written by this library. The error message
        lists the columns with changed bytes.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false.
    CapacityError
        If more than `max_nbytes` would be allocated.
    OSError
        If the file cannot be read.
    """
    file, bound = open_arrow(path, memory_map=memory_map, verify=verify, max_nbytes=max_nbytes)
    requirement = f"{file.name!r} must be a batch that write_arrow wrote"
    return batches.read_batch(file, bound, requirement, allow_pickle=allow_pickle)


def open_arrow(
    path: str | os.PathLike[str],
    *,
    memory_map: bool = True,
    verify: bool | None = None,
    max_nbytes: int | None = None,
) -> tuple[ArrowTable, MemoryBound]:
    """Open the table of an Arrow file; also return the bound on the memory that reading the table may allocate.

    Parameters as in `read_arrow`.
    """
    name = os.fspath(path)
    data = file_bytes(name, memory_map=memory_map)
    return arrow_table(data, name, verify=not memory_map if verify is None else verify, max_nbytes=max_nbytes)


def arrow_table(
    data: pa.Buffer, name: str, *, verify: bool, max_nbytes: int | None = None
) -> tuple[ArrowTable, MemoryBound]:
    """Return the table of an Arrow file that is already in memory, and its memory bound; see `open_arrow`."""
    check_magic(data, checksums.ARROW.magic, "Arrow", name)
    with name_file_damage(name, "Arrow"):
        bound = MemoryBound(repr(name), data.size, max_nbytes)
        layout = _layout_of(data, name)
        bound.take(layout.decompressed_nbytes, "compressed data")
        check_arrow(data, name, verify=verify)
        return ArrowTable(data, name, layout), bound


def _layout_of(data: pa.Buffer, name: str) -> ArrowLayout:
    try:
        return ArrowLayout(data)
    except FormatError as error:
        raise FormatError(f"{name!r} must be an intact Arrow file, got a damaged or truncated one: {error}") from error


def check_arrow(data: pa.Buffer, name: str, *, verify: bool = True) -> bool:
    """Verify an Arrow file, or only its footer if `verify` is false; return whether the file has checksums."""
    return checksums.verify(data, checksums.ARROW, name, partial(_columns_at, data) if verify else None)


def _columns_at(data: pa.Buffer, start: int, stop: int) -> list[str]:
    try:
        file = pa.ipc.open_file(data)
        parts = [file.get_batch(i) for i in range(file.num_record_batches)]
    # The damage may affect the layout of the columns.
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
    """Schema of Arrow files; caches the view plan and the readers of selected columns."""

    def __init__(self, schema: pa.Schema, *, is_native: bool) -> None:
        super().__init__(schema)
        self._is_native = is_native
        self._readers = Recent[tuple[str, ...], TableReader](limit=8)

    @cached_property
    def plan(self) -> Plan | None:
        """Plan for viewing columns of a flat batch; None if the columns cannot be viewed."""
        return Plan.of(self.schema) if self._is_native else None

    def reader(self, names: Sequence[str], about: Mapping[str, Any]) -> TableReader:
        """Return the reader of selected columns of a flat batch."""
        chosen = [self.schema.field(name) for name in names]
        return self._readers.get(tuple(names), lambda: make_reader(pa.schema(chosen), dict(about)))


_schemas = Recent[bytes, _ArrowSchema](limit=32)
"""The schemas that were seen last, by their bytes in the files' footers."""


class ArrowTable(batches.TableFile):
    """Table in an Arrow IPC file; the columns are viewed without copies unless their buffers are compressed."""

    form = "Arrow"
    _file_schema: _ArrowSchema

    def __init__(self, data: pa.Buffer, name: str, layout: ArrowLayout) -> None:
        super().__init__(data, name)
        self._layout = layout
        self.num_groups = layout.num_batches
        remembered = len(layout.schema) <= _MAX_SCHEMA_NBYTES
        self._file_schema = _schemas.get(layout.schema, self._read_schema) if remembered else self._read_schema()

    def _read_schema(self) -> _ArrowSchema:
        return _ArrowSchema(self._file.schema, is_native=self._layout.is_native())

    @cached_property
    def _file(self) -> Any:
        with name_file_damage(self.name, self.form):
            return pa.ipc.open_file(self.data)

    @cached_property
    def group_rows(self) -> list[int]:
        """Number of rows of each record batch."""
        with name_file_damage(self.name, self.form):
            return self._layout.rows()

    def view(self, names: Sequence[str]) -> Parts | None:
        """View columns of a flat batch without copies; return None if the columns must be read as a table."""
        about = self._file_schema.about
        if about is None or about.get("type") != "SampleBatch" or self.num_groups != 1:
            return None
        plan, body = self._file_schema.plan, self._layout.body(0)
        if plan is None or body is None:
            return None
        return self._file_schema.reader(names, about).view(plan, self.data, body)

    def read(self, groups: Sequence[int], names: Sequence[str], bound: MemoryBound) -> pa.Table:
        """Read columns of record batches; uncompressed columns are viewed without copies."""
        with name_file_damage(self.name, self.form):
            file, indices = self._file, batches.places_of(self.schema, names)
            if self._layout.decompressed_nbytes and len(indices) < len(self.schema):
                # Columns that are not requested remain compressed. This option makes Arrow copy uncompressed columns.
                file = pa.ipc.open_file(self.data, options=pa.ipc.IpcReadOptions(included_fields=indices))
            table = pa.Table.from_batches([file.get_batch(i) for i in groups], file.schema)
            if len(names) < len(table.schema):
                table = table.select(indices)
            # Object columns are validated once their size is known.
            table.validate()
            return table

"""Conversion between samples and Arrow record batches; numeric columns are viewed, not copied.

The record batch of a sample has the columns of `SampleBatch.to_arrow`, with the table's column names. Column
`batch_indexes` contains the row indices, and column `generation` contains the slot generations that `update_weight`
requires. A row is a step, a sequence or an episode; in the row of an episode, each column is a list with one element
per step.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from samplebatch import names
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.arrow import METADATA_KEY
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node, set_unit, unit_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer import samplers
from samplebatch.buffer.extending import flatten_rows
from samplebatch.column import memory
from samplebatch.column.arrow import FieldReader, check_size, holds_objects
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.plan import Arrays, Bytes, Plan, StreamLayout, head_of, schema_of
from samplebatch.errors import FormatError, SampleBatchError
from samplebatch.service.fragments import as_record_batch, read_fragment
from samplebatch.service.items import Sample
from samplebatch.service.protocol import SAMPLE_KEY, write_json
from samplebatch.transport.region import Region
from samplebatch.transport.shared_queue import Address, SharedQueueMemory, receive

T = TypeVar("T")

ROWS, EPISODES, FRAGMENTS = "rows", "episodes", "fragments"
"""Forms of samples: rows of steps or sequences, a list of episodes, or inserted fragments."""


class Packed(NamedTuple):
    """Sample encoded as one message of a stream.

    - `batch`: rows of the sample.
    - `metadata`: JSON-serializable metadata of the message.
    """

    batch: pa.RecordBatch
    metadata: dict[str, Any]


def pack(sample: Sample) -> Packed:
    """Encode a sample of a table as a record batch and metadata; numeric columns are views.

    Raises
    ------
    SampleBatchError
        If a column has no Arrow type.

    Examples
    --------
    >>> rows, indices = Batch(obs=np.zeros((2, 3)), info=Batch()), np.array([7, 9])
    >>> packed = pack(Sample(rows, indices, np.array([1, 1])))
    >>> packed.batch.column_names, packed.batch.num_rows
    (['obs', 'batch_indexes', 'generation'], 2)
    >>> unpack(*packed).batch.info, unpack(*packed).indices
    (Batch(), array([7, 9]))
    """
    if not isinstance(sample.batch, Batch):
        metadata = {
            "numbers": sample.indices.tolist(),
            "lengths": _as_list(sample.lengths),
            "weights": _as_list(sample.weights),
        }
        return Packed(_describe(sample.batch.to_arrow(), {"form": FRAGMENTS}), metadata)
    rows = flatten_rows(sample.batch)
    about = {"form": ROWS if sample.lengths is None else EPISODES, "names": list(sample.batch.__dict__)}
    rows[names.BATCH_INDEXES] = sample.indices
    if names.GENERATION not in rows:
        rows[names.GENERATION] = sample.generation
    if sample.lengths is not None:
        rows = SampleBatch({**rows, names.SEQ_LENS: sample.lengths}, _action_unit=rows.action_unit)
    return Packed(_describe(rows.to_arrow(), about), {})


def _describe(table: pa.Table, about: Mapping[str, Any]) -> pa.RecordBatch:
    metadata = {**(table.schema.metadata or {}), SAMPLE_KEY: json.dumps(about).encode()}
    return as_record_batch(table).replace_schema_metadata(metadata)


def _as_list(values: Any) -> Any:
    return None if values is None else values.tolist()


def unpack(packed: pa.RecordBatch, metadata: Mapping[str, Any]) -> samplers.Sample[Any, Any]:
    """Decode a record batch as a sample; numeric columns are read-only views.

    Raises FormatError if the batch is not a sample. Raises SampleBatchError in the same cases as
    `SampleBatch.from_arrow`.
    """
    try:
        about = json.loads((packed.schema.metadata or {})[SAMPLE_KEY])
        form, top_names = about["form"], [str(name) for name in about.get("names", ())]
        if form == FRAGMENTS:
            return samplers.Sample(read_fragment(packed), np.array(metadata["numbers"], np.int64))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise FormatError(
            "the metadata of a sample's schema must describe the sample, got damaged or missing metadata"
        ) from error
    rows = SampleBatch.from_arrow(pa.Table.from_batches([packed]))
    columns = rows.as_batch().__dict__
    if names.BATCH_INDEXES not in columns:
        raise FormatError(
            f"a sample must have a column {names.BATCH_INDEXES!r}, got {', '.join(map(repr, columns)) or 'no columns'}"
        )
    batch = node(Batch, {name: columns.get(name, node(Batch, {})) for name in top_names})
    indices = columns[names.BATCH_INDEXES]
    if rows.action_unit is not None:
        set_unit(batch, rows.action_unit)
    if form != EPISODES:
        return samplers.Sample(batch, indices)
    ends = np.cumsum(columns[names.SEQ_LENS]).tolist()
    episodes = [slice(*pair) for pair in zip([0, *ends[:-1]], ends, strict=True)]
    return samplers.Sample([batch[episode] for episode in episodes], [indices[episode] for episode in episodes])


def have_same_columns(schema: pa.Schema, other: pa.Schema) -> bool:
    """Return whether two schemas are equal except for their metadata, so that one stream may contain both."""
    if schema.equals(other, check_metadata=True):
        return True
    return bool(schema.remove_metadata().equals(other.remove_metadata(), check_metadata=True))


def batch_text(schema: pa.Schema, sent: pa.Schema) -> str | None:
    """Return the batch description in a schema's metadata; None if the schema `sent` has the same description."""
    if schema.equals(sent, check_metadata=True):
        return None
    texts = [(each.metadata or {}).get(METADATA_KEY, b"") for each in (schema, sent)]
    return None if texts[0] == texts[1] else texts[0].decode()


def read_stream(raw: Any) -> pa.RecordBatch:
    """Read the record batch of an Arrow stream.

    Raises FormatError if the bytes are not an Arrow stream with a record batch.
    """
    try:
        with ipc.open_stream(raw) as stream:
            return stream.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise FormatError(f"a sample must be an Arrow stream with a record batch: {error or 'no batch'}") from error


_MAX_FORMS: Final = 8
"""Maximum number of sample layouts that a session caches."""

_HEAD_NBYTES: Final = 1 << 12
"""Size in bytes of the prefix that is searched first for the end of a message's JSON; long JSON exceeds the prefix."""
_COPIED_NBYTES: Final = 1 << 18
"""Maximum size in bytes for which one copy of all streams is faster than one copy per misaligned column."""
MAX_INLINE: Final = 64
"""Maximum number of streams per message."""

Tree = dict[str, "str | Tree"]
"""Nested batch whose leaves are column names."""


class Stream(ABC):
    """Arrow stream of known size that can be written into memory."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size of the stream in bytes."""

    @abstractmethod
    def write(self, out: Bytes) -> None:
        """Write the stream into `out`, shape (nbytes,)."""


class RowsStream(Stream):
    """Stream that Arrow writes from a record batch."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows

    @cached_property
    def nbytes(self) -> int:
        """Size of the stream in bytes."""
        sink = pa.MockOutputStream()
        self._write(sink)
        return int(sink.size())

    def write(self, out: Bytes) -> None:
        """Write the stream into `out`, shape (nbytes,)."""
        self._write(pa.FixedSizeBufferWriter(pa.py_buffer(out)))

    def _write(self, sink: Any) -> None:
        with ipc.new_stream(sink, self._rows.schema) as stream:
            stream.write_batch(self._rows)


class LaidOutStream(Stream):
    """Stream that is written from arrays with a cached layout, without Arrow."""

    def __init__(self, layout: StreamLayout, columns: Arrays) -> None:
        self._layout, self._columns = layout, columns

    @property
    def nbytes(self) -> int:
        """Size of the stream in bytes."""
        return self._layout.nbytes

    def write(self, out: Bytes) -> None:
        """Write the stream into `out`, shape (nbytes,)."""
        self._layout.write(self._columns, out)


def inline(streams: Sequence[Stream], metadata: Mapping[str, Any] = MappingProxyType({})) -> Bytes:
    """Serialize a message as bytes, shape (n,): JSON with `metadata` and the stream sizes, followed by the streams."""
    sizes = [stream.nbytes for stream in streams]
    header = write_json({**metadata, "streams": sizes})
    start = _aligned(len(header) + 1)
    out = memory.empty((start + sum(map(_aligned, sizes)),), np.dtype(np.uint8))
    out.data[:start] = header.ljust(start - 1) + b"\n"
    for stream, size in zip(streams, sizes, strict=True):
        stop = start + _aligned(size)
        stream.write(out[start : start + size])
        # Do not send previous content of reused memory.
        out[start + size : stop] = 0
        start = stop
    return out


def _aligned(nbytes: int) -> int:
    return -(-nbytes // memory.ALIGNMENT) * memory.ALIGNMENT


def cut_inline(raw: Any) -> tuple[bytes, Bytes]:
    """Split a metadata message into its JSON and its stream bytes (empty if there are no streams).

    >>> cut_inline(b'{"updated":3}')
    (b'{"updated":3}', array([], dtype=uint8))
    """
    message = np.frombuffer(raw, np.uint8)
    header, newline, _ = message[:_HEAD_NBYTES].tobytes().partition(b"\n")
    if not newline:
        header, newline, _ = message.tobytes().partition(b"\n")
    streams = message[len(header) + len(newline) :]
    if streams.nbytes <= _COPIED_NBYTES:
        # Copy to an aligned address; for larger messages only misaligned columns are copied later.
        streams = memory.copy_of(streams)
        streams.flags.writeable = False
    return header, streams


def split_inline(streams: Bytes, sizes: Any) -> list[Bytes]:
    """Split the stream bytes of a message into streams of the given sizes.

    Raises FormatError if a size is not a positive integer, or the sizes exceed the number of bytes.

    >>> [part.nbytes for part in split_inline(np.zeros(192, np.uint8), [70, 8])]
    [70, 8]
    """
    parts, start = [], 0
    for size in sizes if isinstance(sizes, list) else [None]:
        if not isinstance(size, int) or not 0 < size <= streams.nbytes - start:
            raise FormatError(
                f"streams of samples must have the sizes that their message declares, {str(sizes)[:80]}, got "
                f"{streams.nbytes} bytes"
            )
        parts.append(streams[start : start + size])
        start += _aligned(size)
    return parts


class SampleWriter:
    """Service-side encoder of a session's samples; samples with a cached layout are copied only once.

    >>> sample = Sample(
    ...     Batch(obs=np.zeros((2, 3)), rew=np.ones(2)), np.array([7, 9]), np.array([1, 1])
    ... )
    >>> writer, reader = SampleWriter(), SampleReader()
    >>> stream, metadata = writer.prepare(sample)
    >>> out = np.empty(stream.nbytes, np.uint8)
    >>> stream.write(out)
    >>> reader.read(out).indices, reader.read(out).batch.rew
    (array([7, 9]), array([1., 1.]))
    """

    def __init__(self) -> None:
        self._forms: list[tuple[tuple[Any, ...], StreamLayout]] = []
        """Cached layouts, newest first, each with its key: the action unit and the names of empty nested batches."""
        self._last_form: Any = None
        """Form of the last sample for which no layout was cached."""

    def prepare(self, sample: Sample) -> tuple[Stream, dict[str, Any]]:
        """Return the stream and the metadata of a sample. Raises SampleBatchError in the same cases as `pack`."""
        layout = self._find_layout(sample)
        if layout is not None:
            return LaidOutStream(*layout), {}
        packed = pack(sample)
        return RowsStream(packed.batch), packed.metadata

    def _find_layout(self, sample: Sample) -> tuple[StreamLayout, Arrays] | None:
        """Return a layout of a sample and the sample's arrays; None if Arrow must serialize the sample."""
        empty_names: list[str] = []
        columns = _columns_of(sample, empty_names)
        if columns is None:
            return None
        key = unit_of(sample.batch), *empty_names
        for cached_key, layout in self._forms:
            if cached_key == key and layout.fits(columns):
                return layout, columns
        form = key, [(name, values.dtype, values.shape) for name, values in columns.items()]
        if form != self._last_form:
            # Create a layout only if two samples in a row have the same form.
            self._last_form = form
            return None
        created = _make_layout(sample)
        if created is None:
            return None
        self._forms = [(key, created), *self._forms[: _MAX_FORMS - 1]]
        return created, columns


def _columns_of(sample: Sample, empty_names: list[str]) -> Arrays | None:
    """Return a sample's arrays by column name; None if the rows are not steps or sequences of arrays.

    Append the names of empty nested batches to `empty_names`.
    """
    columns: Arrays = {}
    if not isinstance(sample.batch, Batch) or sample.lengths is not None:
        return None
    if not _collect(sample.batch.__dict__, "", columns, empty_names):
        return None
    columns[names.BATCH_INDEXES] = sample.indices
    columns.setdefault(names.GENERATION, sample.generation)
    return columns


def _collect(values: Mapping[str, Any], prefix: str, columns: Arrays, empty_names: list[str]) -> bool:
    """Add the arrays of a nested batch to `columns`; return whether all leaves are arrays without Python objects."""
    for name, value in values.items():
        path = prefix + name
        if type(value) is np.ndarray:
            if path in columns or not value.ndim or value.dtype.hasobject:
                return False
            columns[path] = value
        elif type(value) is not Batch:
            return False
        elif not value.__dict__:
            empty_names.append(path)
        elif not _collect(value.__dict__, f"{path}.", columns, empty_names):
            return False
    return True


def _make_layout(sample: Sample) -> StreamLayout | None:
    """Serialize a sample with Arrow and return the layout of the stream; None if a column cannot be viewed."""
    rows = RowsStream(pack(sample).batch)
    stream = np.empty(rows.nbytes, np.uint8)
    rows.write(stream)
    return StreamLayout.find(stream, read_stream(stream))


class SampleReader:
    """Learner-side decoder of a session's samples.

    Arrow reads the first sample of each layout, and `unpack` validates it. Later streams that differ only in column
    values are viewed without Arrow. Samples with Python objects are decoded with a cached plan for the sample's schema.
    """

    def __init__(self) -> None:
        self._layouts: dict[bytes, tuple[StreamLayout, _Form]] = {}
        """Layout and nesting of samples, keyed by stream header."""
        self._readers: dict[bytes, _ObjectsReader | None] = {}
        """Decoders of samples with object columns, keyed by schema; None if `unpack` must decode the samples."""

    def read(self, stream: Bytes, metadata: Mapping[str, Any] | None = None) -> samplers.Sample[Any, Any]:
        """Decode a sample from a stream.

        - `stream`: bytes of the stream, shape (nbytes,).
        - `metadata`: metadata of the sample's message, required for fragments.

        Raises FormatError if the bytes are not an Arrow stream with one record batch. Raises SampleBatchError in the
        same cases as `unpack`.
        """
        head = head_of(stream)
        entry = None if head is None else self._layouts.get(head)
        if entry is not None and entry[0].matches(stream):
            layout, form = entry
            return form.sample(layout.read(stream))
        if stream.ctypes.data % memory.ALIGNMENT:
            stream = memory.copy_of(stream)
            stream.flags.writeable = False
        rows = read_stream(stream)
        schema = b"" if head is None else schema_of(head)
        reader = self._readers.get(schema)
        sample = None if reader is None else reader.read(rows)
        if sample is None:
            sample = unpack(rows, metadata or {})
            if head is not None and isinstance(sample.batch, Batch):
                self._remember(stream, schema, rows, sample.batch)
        return sample

    def _remember(self, stream: Bytes, schema: bytes, rows: pa.RecordBatch, batch: Batch) -> None:
        """Cache the nesting of a validated sample if each leaf of its batch is a column of the record batch."""
        form = _Form(_name_leaves(batch, ""), unit_of(batch))
        if not _has_leaves(form.tree, rows.schema.names):
            return
        layout = StreamLayout.find(stream, rows)
        if layout is not None:
            _put_recent(self._layouts, layout.head, (layout, form))
        elif schema not in self._readers:
            _put_recent(self._readers, schema, _ObjectsReader.of(rows.schema, form))


def _put_recent(recent: dict[bytes, T], key: bytes, value: T) -> None:
    while len(recent) >= _MAX_FORMS:
        del recent[next(iter(recent))]
    recent[key] = value


class _Form(NamedTuple):
    """Nesting of a sample's columns, and the unit of its actions."""

    tree: Tree
    unit: ActionUnit | None

    def sample(self, columns: Arrays) -> samplers.Sample[Any, Any]:
        batch = _nest(self.tree, columns)
        if self.unit is not None:
            set_unit(batch, self.unit)
        return samplers.Sample(batch, columns[names.BATCH_INDEXES])


class _ObjectsReader:
    """Decoder of samples with one schema; each column is numeric or contains Python objects."""

    __slots__ = ("_form", "_objects", "_plan")

    def __init__(self, plan: Plan, objects: list[tuple[pa.Field, FieldReader]], form: _Form) -> None:
        self._plan, self._objects, self._form = plan, objects, form

    @classmethod
    def of(cls, schema: pa.Schema, form: _Form) -> _ObjectsReader | None:
        """Return a schema's decoder; None if no column has objects, or a column has neither numbers nor objects."""
        plan = Plan.of_numbers(schema)
        object_fields = [field for field in schema if field.name not in plan.names]
        if not object_fields or not all(map(holds_objects, object_fields)):
            return None
        return cls(plan, [(field, FieldReader(field)) for field in object_fields], form)

    def read(self, rows: pa.RecordBatch) -> samplers.Sample[Any, Any] | None:
        """View the numeric columns and decode the object columns of a batch; None if `unpack` must decode the batch.

        Raises SampleBatchError in the same cases as `SampleBatch.from_arrow`.
        """
        columns = self._plan.read(rows)
        if columns is None:
            return None
        bound = memory.MemoryBound("the table", rows.get_total_buffer_size())
        for field, reader in self._objects:
            array = rows.column(field.name)
            check_size([array], field, bound)
            column = reader.read(array)
            if not isinstance(column, ObjectColumn) or len(array) != rows.num_rows:
                return None
            columns[field.name] = column.values
        return self._form.sample(columns)


def _name_leaves(batch: Batch, prefix: str) -> Tree:
    return {
        name: _name_leaves(value, f"{prefix}{name}.") if isinstance(value, Batch) else prefix + name
        for name, value in batch.__dict__.items()
    }


def _has_leaves(tree: Tree, columns: Collection[str]) -> bool:
    return all(leaf in columns if isinstance(leaf, str) else _has_leaves(leaf, columns) for leaf in tree.values())


def _nest(tree: Tree, columns: Arrays) -> Batch:
    values: dict[str, Any] = {}
    for name, leaf in tree.items():
        values[name] = columns[leaf] if isinstance(leaf, str) else _nest(leaf, columns)
    return node(Batch, values)


_SECRET_NBYTES: Final = 32
_MIN_NBYTES: Final = 1 << 16
"""Minimum size in bytes of a sample for which shared memory is faster than a message."""


class Secret:
    """Random bytes in the service's shared memory that only clients on the same machine can read."""

    def __init__(self) -> None:
        self._value = secrets.token_bytes(_SECRET_NBYTES)
        self._region: Region | None = None

    def address(self) -> dict[str, Any]:
        """Return the path and size of the secret's memory; empty if this machine does not support shared memory."""
        if not os.path.isdir("/proc/self/fd"):
            return {}
        if self._region is None:
            try:
                region = Region.create(_SECRET_NBYTES)
            except SampleBatchError:
                return {}
            region.memory[:] = self._value
            self._region = region
        return {"path": f"/proc/{os.getpid()}/fd/{self._region.fileno()}", "nbytes": _SECRET_NBYTES}

    def open(self, secret: str, max_nbytes: int) -> SampleMemory | None:
        """Return memory for a client's samples; None if `secret`, in hexadecimal digits, is wrong."""
        return SampleMemory(max_nbytes) if hmac.compare_digest(secret.encode(), self._value.hex().encode()) else None

    def close(self) -> None:
        """Free the memory."""
        if self._region is not None:
            self._region.close()


def read_secret(address: dict[str, Any]) -> str | None:
    """Return a service's secret in hexadecimal digits; None if this process cannot open the secret's memory."""
    try:
        descriptor = os.open(str(address["path"]), os.O_RDWR | os.O_CLOEXEC)
        with Region.attach(descriptor, int(address["nbytes"])) as region:
            return bytes(region.memory).hex()
    except (OSError, KeyError, ValueError, TypeError):
        return None


class SampleMemory:
    """Service-side shared memory for the samples of one client.

    - `max_nbytes`: maximum total size of its regions in bytes.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._memory = SharedQueueMemory(max_nbytes)

    def put(self, stream: Stream) -> list[Any] | None:
        """Write the Arrow stream of a sample into a shared memory region.

        Returns
        -------
        Address for `take`; None if the stream is smaller than 64 KiB, or the memory is full.
        """
        nbytes = stream.nbytes
        if nbytes < _MIN_NBYTES or self._memory.lent_nbytes + nbytes > self._max_nbytes:
            return None
        written = self._memory.write(nbytes, stream.write)
        return None if written is None else [*written[0], *written[1]]

    def close(self) -> None:
        """Release all regions; samples that the client has received remain valid."""
        self._memory.close()


def take(memory_address: Any) -> Bytes:
    """Map the stream of a sample in the service's shared memory, read-only.

    Raises FormatError if the address is invalid. Raises PeerDiedError if the service's process has died.
    """
    try:
        *region, start, nbytes = memory_address
        (stream,) = receive(Address(*region), [(start, nbytes)])
    except (TypeError, ValueError, OSError) as error:
        if isinstance(error, SampleBatchError):
            raise
        raise FormatError(
            f"the address of a sample in shared memory must be valid, got {str(memory_address)[:80]}"
        ) from error
    stream.flags.writeable = False
    return stream

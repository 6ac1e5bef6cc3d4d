"""Sample streams: samples as Arrow streams, whole or in parts, where each is much like the one before.

A learner asks for samples of one kind, so they have the same columns and as many rows. The first one is written and
read by Arrow, and checked; of the others only the numbers are copied, and views made. The columns of large ones that
are sent are not even copied: they are parts of the stream by themselves.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import ipc

from samplebatch import names
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column import memory
from samplebatch.column.cut_layout import CutLayout, join_stream
from samplebatch.column.stream_layout import Bytes, StreamLayout, head_of
from samplebatch.errors import FormatError
from samplebatch.service.items import Sample
from samplebatch.service.protocol import write_json
from samplebatch.service.samples import Drawn, pack, read_stream, unpack

_MAX_FORMS: Final = 8
"""Forms of samples that a session remembers."""

_HEAD_NBYTES: Final = 1 << 12
"""Bytes that the JSON before streams in a message is looked for in first: that of many fragments is longer."""
MAX_INLINE: Final = 64
"""Streams in a message."""

_MAX_TOGETHER: Final = 2
"""Columns in a message of parts."""
_TOGETHER_NBYTES: Final = 1 << 22
"""Bytes up to which columns go in one message. A message takes time of both sides; of larger ones, it is less than that
which is gained where one is received while the next is sent."""

PARTS: Final = pa.schema([pa.field(f"column_{i}", pa.large_binary(), nullable=False) for i in range(_MAX_TOGETHER)])
"""Schema of record batches that are parts of a stream: one row, with the bytes of a large column each, or none where
there are fewer. The schemas of samples have metadata."""

_BYTES: Final = pa.large_binary()
_NO_BYTES: Final = pa.array([b""], _BYTES)
_ENDS: Final = struct.Struct("=qq")
"""The offsets of a column of one row."""

Arrays = dict[str, npt.NDArray[Any]]
Tree = dict[str, "str | Tree"]
"""A nested batch with the names of columns as its leaves."""


class Stream(ABC):
    """An Arrow stream that is about to be written into memory."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes."""

    @abstractmethod
    def write(self, out: Bytes) -> None:
        """Write it into memory, shape (nbytes,)."""


class RowsStream(Stream):
    """The stream of a record batch, written by Arrow."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows

    @cached_property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        counted = pa.MockOutputStream()
        self._write(counted)
        return int(counted.size())

    def write(self, out: Bytes) -> None:
        """Write it into memory, shape (nbytes,)."""
        self._write(pa.FixedSizeBufferWriter(pa.py_buffer(out)))

    def _write(self, sink: Any) -> None:
        with ipc.new_stream(sink, self._rows.schema) as stream:
            stream.write_batch(self._rows)


class _Form(NamedTuple):
    """A form of samples, for their writer.

    Attributes
    ----------
    bare
        The names without values.
    layout
        Of their streams.
    cut
        Of the same streams in parts; None if no column is large.
    said
        The JSON of messages with their last part.
    """

    bare: tuple[str, ...]
    layout: StreamLayout
    cut: CutLayout | None
    said: bytes


class LaidOutStream(Stream):
    """The stream of a sample of a known form."""

    def __init__(self, form: _Form, columns: Arrays) -> None:
        self._layout, self._cut, self._said, self._columns = form.layout, form.cut, form.said, columns

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._layout.nbytes

    def write(self, out: Bytes) -> None:
        """Write it into memory, shape (nbytes,)."""
        self._layout.write(self._columns, out)

    @property
    def has_parts(self) -> bool:
        """Whether it has large columns, which can be sent by themselves."""
        return self._cut is not None

    def messages(self) -> Iterator[tuple[pa.RecordBatch, Bytes | None]]:
        """Yield its parts, large columns where they lie, each with its metadata: the last one has the rest."""
        assert self._cut is not None
        *parts, last = _group(self._cut.parts(self._columns))
        for part in parts:
            yield _join_columns(part), None
        # Written while the part before it is on its way.
        message, start = _begin(self._said, self._cut.rest.nbytes)
        self._cut.rest.write(self._cut.small(self._columns), message[start:])
        yield _join_columns(last), message


def _group(columns: Sequence[Bytes]) -> list[list[Bytes]]:
    """Group columns into messages, in their order."""
    found: list[list[Bytes]] = []
    nbytes = 0
    for column in columns:
        nbytes += column.nbytes
        if not found or nbytes > _TOGETHER_NBYTES or len(found[-1]) == _MAX_TOGETHER:
            found.append([])
            nbytes = column.nbytes
        found[-1].append(column)
    return found


def _join_columns(columns: Sequence[Bytes]) -> pa.RecordBatch:
    """View columns as a record batch of parts."""
    arrays = [
        pa.Array.from_buffers(_BYTES, 1, [None, pa.py_buffer(_ENDS.pack(0, column.nbytes)), memory.as_buffer(column)])
        for column in columns
    ]
    return pa.RecordBatch.from_arrays(arrays + [_NO_BYTES] * (_MAX_TOGETHER - len(arrays)), schema=PARTS)


def split_columns(rows: pa.RecordBatch) -> list[Bytes]:
    """View the columns in a record batch of parts, shape (n,) each.

    Examples
    --------
    >>> rows = _join_columns([np.array([1, 2], np.uint8), np.array([3], np.uint8)])
    >>> split_columns(rows)
    [array([1, 2], dtype=uint8), array([3], dtype=uint8)]
    """
    # Offsets are not looked at: a column has the bytes that came, which are held against the form.
    found = [column.buffers()[-1] for column in rows.columns]
    return [np.frombuffer(values, np.uint8) for values in found if values is not None and values.size]


def inline(streams: Sequence[Stream]) -> Bytes:
    """Write streams behind JSON that has their sizes: a message of metadata, shape (n,)."""
    sizes = [stream.nbytes for stream in streams]
    out, start = _begin(write_json({"streams": sizes}), sum(map(_aligned, sizes)))
    for stream, size in zip(streams, sizes, strict=True):
        stop = start + _aligned(size)
        stream.write(out[start : start + size])
        # Memory that was in use before is not sent.
        out[start + size : stop] = 0
        start = stop
    return out


def _begin(said: bytes, nbytes: int) -> tuple[Bytes, int]:
    """Write the JSON of a message with room for some bytes after it, and tell where they begin."""
    start = _aligned(len(said) + 1)
    out = memory.empty((start + nbytes,), np.dtype(np.uint8))
    out.data[:start] = said.ljust(start - 1) + b"\n"
    return out, start


def _aligned(nbytes: int) -> int:
    """Return the next multiple of an alignment."""
    return -(-nbytes // memory.ALIGNMENT) * memory.ALIGNMENT


def cut_inline(raw: Any) -> tuple[bytes, Bytes]:
    """Cut a message of metadata into its JSON and the streams behind it, of no bytes where there are none.

    Examples
    --------
    >>> cut_inline(b'{"updated":3}')
    (b'{"updated":3}', array([], dtype=uint8))
    """
    message = np.frombuffer(raw, np.uint8)
    told, newline, _ = message[:_HEAD_NBYTES].tobytes().partition(b"\n")
    if not newline:
        told, newline, _ = message.tobytes().partition(b"\n")
    # In memory of its own, at an address where numbers can be read.
    streams = memory.copy_of(message[len(told) + len(newline) :])
    streams.flags.writeable = False
    return told, streams


def split_inline(streams: Bytes, sizes: Any) -> list[Bytes]:
    """Split the bytes behind the JSON of a message into streams of known sizes; a single one where none are said.

    Raises
    ------
    FormatError
        If there are not as many bytes.

    Examples
    --------
    >>> [part.nbytes for part in split_inline(np.zeros(192, np.uint8), [70, 8])]
    [70, 8]
    """
    if sizes is None:
        return [streams]
    found, start = [], 0
    for size in sizes if isinstance(sizes, list) else [None]:
        if not isinstance(size, int) or not 0 < size <= streams.nbytes - start:
            raise FormatError("samples must come in streams of the sizes that their message says, they do not")
        found.append(streams[start : start + size])
        start += _aligned(size)
    return found


class SampleWriter:
    """Writer of the samples of a session, for the service. Samples of a form that came before take a copy only.

    Examples
    --------
    >>> sample = Sample(Batch(obs=np.zeros((2, 3)), rew=np.ones(2)), np.array([7, 9]), np.array([1, 1]))
    >>> writer, reader = SampleWriter(), SampleReader()
    >>> writer.prepare(sample) is None
    True
    >>> stream = writer.prepare(sample)
    >>> out = np.empty(stream.nbytes, np.uint8)
    >>> stream.write(out)
    >>> reader.read(out).indices, reader.read(out).batch.rew
    (array([7, 9]), array([1., 1.]))
    """

    def __init__(self) -> None:
        self._forms: list[_Form] = []
        """The newest one first."""
        self._last: Any = None
        """The form of the last sample that had no layout."""

    def prepare(self, sample: Sample) -> LaidOutStream | None:
        """Return the stream of a sample; None if none of its form came before, or Arrow must look at each."""
        bare: list[str] = []
        columns = _columns_of(sample, bare)
        if columns is None:
            return None
        empty = tuple(bare)
        for known in self._forms:
            if known.bare == empty and known.layout.fits(columns):
                return LaidOutStream(known, columns)
        form = empty, [(name, values.dtype, values.shape) for name, values in columns.items()]
        if form != self._last:
            # Samples whose shapes differ from one to the next are not worth a layout.
            self._last = form
            return None
        found = _find_form(sample, empty)
        if found is None:
            return None
        self._forms = [found, *self._forms[: _MAX_FORMS - 1]]
        return LaidOutStream(found, columns)


def _columns_of(sample: Sample, bare: list[str]) -> Arrays | None:
    """Return the arrays of a sample by the names of their columns, and list names without values; None for others."""
    columns: Arrays = {}
    if not isinstance(sample.batch, Batch) or sample.lengths is not None:
        return None
    if not _collect(sample.batch.__dict__, "", columns, bare):
        return None
    columns[names.BATCH_INDEXES] = sample.indices
    columns.setdefault(names.GENERATION, sample.generations)
    return columns


def _collect(held: Mapping[str, Any], prefix: str, columns: Arrays, bare: list[str]) -> bool:
    """Collect the arrays of a nested batch, and tell whether it has nothing else."""
    for name, value in held.items():
        path = prefix + name
        if type(value) is np.ndarray:
            if path in columns or not value.ndim or value.dtype.hasobject:
                return False
            columns[path] = value
        elif type(value) is not Batch:
            return False
        elif not value.__dict__:
            bare.append(path)
        elif not _collect(value.__dict__, f"{path}.", columns, bare):
            return False
    return True


def _find_form(sample: Sample, bare: tuple[str, ...]) -> _Form | None:
    """Find the layouts of samples of a form, by one that Arrow writes and reads."""
    made = RowsStream(pack(sample).batch)
    stream = np.empty(made.nbytes, np.uint8)
    made.write(stream)
    rows = read_stream(stream)
    layout = StreamLayout.find(stream, rows, SampleBatch.from_arrow(rows)._all())
    if layout is None:
        return None
    cut = CutLayout.find(layout)
    return _Form(bare, layout, cut, b"" if cut is None else write_json({"cut": cut.spans}))


class SampleReader:
    """Reader of the samples of a session, for a learner.

    The first one of a form is read by Arrow and checked. A stream with the same bytes beside its columns is viewed.
    """

    def __init__(self) -> None:
        self._forms: dict[bytes, tuple[StreamLayout, CutLayout | None, Tree]] = {}

    def read(self, stream: Bytes, told: Mapping[str, Any] | None = None) -> Drawn:
        """View the sample of a stream.

        Parameters
        ----------
        stream
            Its bytes, shape (nbytes,).
        told
            What else is said of the sample.

        Raises
        ------
        FormatError
            If it is no stream of a record batch.
        SampleBatchError
            As `unpack` does.
        """
        head = head_of(stream)
        known = None if head is None else self._forms.get(head)
        if known is not None and known[0].matches(stream):
            layout, _, tree = known
            return _view(tree, layout.read(stream))
        rows = read_stream(stream)
        drawn = unpack(rows, told or {})
        self._learn(stream, rows, drawn.batch)
        return drawn

    def read_parts(self, columns: Sequence[Bytes], rest: Bytes, told: Mapping[str, Any]) -> Drawn:
        """View the sample of a stream that came in parts.

        Parameters
        ----------
        columns
            The bytes of its large columns, shape (n,) each.
        rest
            The bytes beside them, shape (n,).
        told
            What is said of the sample: `cut`, the places of the columns.

        Raises
        ------
        FormatError
            If the places are none, or the parts no stream of a record batch.
        SampleBatchError
            As `unpack` does.
        """
        head = head_of(rest)
        _, cut, tree = (None, None, {}) if head is None else self._forms.get(head, (None, None, {}))
        if cut is not None and told.get("cut") == cut.spans:
            found = cut.read(rest, columns)
            if found is not None:
                return _view(tree, found)
        stream = join_stream(rest, columns, told.get("cut"))
        if stream is None:
            raise FormatError("a sample in parts must have the places of its columns, it has others")
        stream.flags.writeable = False
        return self.read(stream, told)

    def _learn(self, stream: Bytes, rows: pa.RecordBatch, batch: Any) -> None:
        """Remember the form of a sample that was checked, if all samples of its form are views alike."""
        if not isinstance(batch, Batch):
            return
        columns = SampleBatch.from_arrow(rows)._all()
        layout = StreamLayout.find(stream, rows, columns)
        tree = _name_leaves(batch, "")
        if layout is not None and _has_leaves(tree, columns):
            while len(self._forms) >= _MAX_FORMS:
                del self._forms[next(iter(self._forms))]
            self._forms[layout.head] = layout, CutLayout.find(layout), tree


def _name_leaves(batch: Batch, prefix: str) -> Tree:
    """Name the column of each leaf of a nested batch."""
    return {
        name: _name_leaves(value, f"{prefix}{name}.") if isinstance(value, Batch) else prefix + name
        for name, value in batch.__dict__.items()
    }


def _has_leaves(tree: Tree, columns: Mapping[str, Any]) -> bool:
    """Tell whether all leaves of a nested batch are columns."""
    return all(leaf in columns if isinstance(leaf, str) else _has_leaves(leaf, columns) for leaf in tree.values())


def _view(tree: Tree, columns: Arrays) -> Drawn:
    """Return columns as the sample that they are."""
    return Drawn(_nest(tree, columns), columns[names.BATCH_INDEXES])


def _nest(tree: Tree, columns: Arrays) -> Batch:
    """Make a nested batch of columns."""
    return node(
        Batch,
        {name: columns[leaf] if isinstance(leaf, str) else _nest(leaf, columns) for name, leaf in tree.items()},
    )

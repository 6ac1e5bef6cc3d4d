"""Sample streams: samples as Arrow streams in memory, where each is much like the one before.

A learner asks for samples of one kind, so they have the same columns and as many rows. The first one is written and
read by Arrow, and checked; of the others only the numbers are copied, and views made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import ipc

from samplebatch import names
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column import memory
from samplebatch.column.stream_layout import Bytes, StreamLayout, head_of
from samplebatch.service.items import Sample
from samplebatch.service.samples import Drawn, pack, read_stream, unpack

_MAX_FORMS: Final = 8
"""Forms of samples that a session remembers."""

_HEAD: Final = np.frombuffer(b"{}".ljust(63) + b"\n", np.uint8)
"""JSON that says nothing, as long as an alignment."""

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


class LaidOutStream(Stream):
    """The stream of arrays of a known layout."""

    def __init__(self, layout: StreamLayout, columns: Arrays) -> None:
        self._layout, self._columns = layout, columns

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._layout.nbytes

    def write(self, out: Bytes) -> None:
        """Write it into memory, shape (nbytes,)."""
        self._layout.write(self._columns, out)


def inline(stream: Stream) -> Bytes:
    """Write a stream behind JSON that says nothing of it: a message of metadata, shape (n,)."""
    out = memory.empty((_HEAD.nbytes + stream.nbytes,), np.dtype(np.uint8))
    out[: _HEAD.nbytes] = _HEAD
    stream.write(out[_HEAD.nbytes :])
    return out


def cut_inline(raw: Any) -> tuple[bytes, Bytes]:
    """Cut a message of metadata into its JSON and the stream behind it, of no bytes where there is none.

    Examples
    --------
    >>> cut_inline(b'{"updated":3}')
    (b'{"updated":3}', array([], dtype=uint8))
    """
    message = np.frombuffer(raw, np.uint8)
    head = message[: _HEAD.nbytes].tobytes()
    if b"\n" not in head:
        head = message.tobytes()
    told, newline, _ = head.partition(b"\n")
    # In memory of its own, at an address where numbers can be read.
    stream = memory.copy_of(message[len(told) + len(newline) :])
    stream.flags.writeable = False
    return told, stream


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
        self._layouts: list[tuple[tuple[str, ...], StreamLayout]] = []
        """The names without values and the layouts of forms, the newest one first."""
        self._last: Any = None
        """The form of the last sample that had no layout."""

    def prepare(self, sample: Sample) -> Stream | None:
        """Return the stream of a sample; None if none of its form came before, or Arrow must look at each."""
        bare: list[str] = []
        columns = _columns_of(sample, bare)
        if columns is None:
            return None
        empty = tuple(bare)
        for known, layout in self._layouts:
            if known == empty and layout.fits(columns):
                return LaidOutStream(layout, columns)
        form = empty, [(name, values.dtype, values.shape) for name, values in columns.items()]
        if form != self._last:
            # Samples whose shapes differ from one to the next are not worth a layout.
            self._last = form
            return None
        layout_found = _find_layout(sample)
        if layout_found is None:
            return None
        self._layouts = [(empty, layout_found), *self._layouts[: _MAX_FORMS - 1]]
        return LaidOutStream(layout_found, columns)


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


def _find_layout(sample: Sample) -> StreamLayout | None:
    """Find the layout of samples of a form, by one that Arrow writes and reads."""
    made = RowsStream(pack(sample).batch)
    stream = np.empty(made.nbytes, np.uint8)
    made.write(stream)
    rows = read_stream(stream)
    return StreamLayout.find(stream, rows, SampleBatch.from_arrow(rows)._all())


class SampleReader:
    """Reader of the streams of a session's samples, for a learner.

    The first stream of a form is read by Arrow and checked. One with the same bytes beside its columns is viewed.
    """

    def __init__(self) -> None:
        self._forms: dict[bytes, tuple[StreamLayout, Tree]] = {}

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
            layout, tree = known
            columns = layout.read(stream)
            return Drawn(_nest(tree, columns), columns[names.BATCH_INDEXES])
        rows = read_stream(stream)
        drawn = unpack(rows, told or {})
        self._learn(stream, rows, drawn.batch)
        return drawn

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
            self._forms[layout.head] = layout, tree


def _name_leaves(batch: Batch, prefix: str) -> Tree:
    """Name the column of each leaf of a nested batch."""
    return {
        name: _name_leaves(value, f"{prefix}{name}.") if isinstance(value, Batch) else prefix + name
        for name, value in batch.__dict__.items()
    }


def _has_leaves(tree: Tree, columns: Mapping[str, Any]) -> bool:
    """Tell whether all leaves of a nested batch are columns."""
    return all(leaf in columns if isinstance(leaf, str) else _has_leaves(leaf, columns) for leaf in tree.values())


def _nest(tree: Tree, columns: Arrays) -> Batch:
    """Make a nested batch of columns."""
    return node(
        Batch,
        {name: columns[leaf] if isinstance(leaf, str) else _nest(leaf, columns) for name, leaf in tree.items()},
    )

"""Replay buffers in Arrow IPC and Parquet files.

A file is a table with a row for each step that counts, in the order of their slots, written a part at a time. The final
observations that no later step brings are lists of none, one or two beside the steps they follow. What else a buffer
needs to go on exactly as it would have stands in the schema's metadata, as JSON: rings, running episodes, sampler and
generator.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.batch.arrow import METADATA_KEY, metadata_of
from samplebatch.batch.tree import named_leaves
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.samplers import Prioritized
from samplebatch.buffer.store import Slots
from samplebatch.buffer.table import Table
from samplebatch.column.arrow import arrow_field_and_array, check_size, column_from_arrow, holds_objects
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.interface import Column
from samplebatch.column.memory import MemoryBound
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import FormatError, StorageError
from samplebatch.storage.buffers import state as buffer_state
from samplebatch.storage.buffers.state import (
    State,
    check_final_shapes,
    check_finals,
    check_structure,
    make_buffer,
)
from samplebatch.storage.files import Form
from samplebatch.storage.foreign.damage import name_buffer_damage
from samplebatch.storage.tables.arrow import arrow_writer, open_arrow
from samplebatch.storage.tables.batches import TableFile
from samplebatch.storage.tables.parquet import open_parquet, parquet_writer

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer


WEIGHTS, FINAL_ROWS = "sampler.weights", "final.rows"
"""Names of the columns beside those of rows: priorities, and places of final observations."""

ReadRows = Callable[[int, Ints], Column]
"""Reads the rows of one of a table's stores, given its place among them, in some slots."""
OpenWriter = Callable[[pa.Schema], contextlib.AbstractContextManager[Any]]


@dataclass
class PreparedBuffer:
    """A buffer at one moment, ready to be written to a file: all of it but the rows, which are read in parts.

    Attributes
    ----------
    about
        The schema's metadata.
    columns
        The rows' columns: their dotted names, their places among the table's stores, and whether they hold objects.
    held
        First slot of each ring, and how many of its slots have rows; shape (rings, 2).
    weights
        A sampler's weights of all slots; None for a sampler without.
    finals
        Final observations.
    """

    about: State
    columns: list[tuple[str, int, bool]]
    held: Ints
    weights: npt.NDArray[np.float64] | None
    finals: _Finals

    @cached_property
    def slots(self) -> Ints:
        """The slots of the rows as they lie, shape (n,)."""
        return np.concatenate([start + np.arange(count) for start, count in self.held])

    @cached_property
    def own(self) -> dict[str, Column]:
        """Columns beside those of the rows: priorities."""
        return {} if self.weights is None else {WEIGHTS: TensorColumn(self.weights[self.slots])}


def prepare_buffer(buffer: ReplayBuffer, memory: npt.NDArray[np.float64] | None = None) -> PreparedBuffer:
    """Prepare a buffer to be written, as it is at this moment; its lock must be held.

    No memory of the size of the rows is touched, save that of priorities, for which `memory` has room, shape
    (capacity,).
    """
    table, ring, sampler = buffer._table, buffer._ring, buffer._sampler
    rings = table.rings
    about = buffer_state.describe_without_rows(buffer)
    weights = None
    if isinstance(sampler, Prioritized):
        del about["sampler"]["known"]["weights"]
        weights = np.empty(rings.capacity) if memory is None else memory
        np.copyto(weights, sampler.tree.weights)
    structure = buffer_state.structure_of(table.columns)
    about |= {
        "type": "ReplayBuffer",
        "structure": _form(structure),
        "keeps_next": table.keeps_next,
        "last_frame": table.last_frame,
    }
    stores = [store for _, store in table.columns.leaves()]
    columns = [(name, place, stores[place].kind == "object") for name, place in named_leaves(structure["tree"])]
    held = np.stack([rings.bases, rings.sizes_of_all()], 1)
    return PreparedBuffer(
        about, columns, held if ring is None else held[ring : ring + 1], weights, _Finals(table, ring)
    )


def write_rows(prepared: PreparedBuffer, read: ReadRows, open_writer: OpenWriter, part_nbytes: int) -> Iterator[Ints]:
    """Write a prepared buffer, and yield the slots of each part once its rows are read.

    Parameters
    ----------
    prepared
        The buffer.
    read
        Reads the rows of one store, given its place, in some slots.
    open_writer
        Opens the file's writer, given its schema.
    part_nbytes
        Bytes of rows that are read at once, about.
    """
    prepared.finals.build(prepared.slots)
    about = prepared.about | {"finals": prepared.finals.form}
    metadata = {METADATA_KEY: json.dumps(buffer_state.plain(about)).encode()}
    parts = _parts(prepared, read, part_nbytes)
    slots, first = next(parts)
    schema = pa.schema([field for field, _ in first], metadata)
    with open_writer(schema) as writer:
        writer.write_batch(pa.record_batch([array for _, array in first], schema=schema))
        yield slots
        for slots, part in parts:
            writer.write_batch(pa.record_batch([array for _, array in part], schema=schema))
            yield slots


def _form(structure: Mapping[str, Any]) -> State:
    """Return the structure of columns without the columns."""
    return {name: structure[name] for name in ("tree", "kinds", "row_shapes")}


class _Finals:
    """The final observations of a buffer as lists of none, one or two beside its rows, for `write_rows`."""

    def __init__(self, table: Table, ring: int | None) -> None:
        self.form: State | None = None
        self.lists: list[tuple[pa.Field, pa.Array]] = []
        self._start = 0
        self._state: State | None = None
        if table.finals is not None:
            start, stop = (0, table.rings.capacity) if ring is None else table.rings.edges[ring : ring + 2].tolist()
            self._start, self._state = start, table.finals.state_dict(start, stop, ring)

    def build(self, slots: Ints) -> None:
        """Bring the observations, which are copies, into the order of the rows."""
        state = self._state
        if state is None:
            return
        found = state["found"]
        owners = state["owners"] - 1 + self._start
        places = np.searchsorted(slots, owners)
        there = np.flatnonzero(slots[np.minimum(places, len(slots) - 1)] == owners) if len(slots) else slots
        order = there[np.argsort(places[there], kind="stable")]
        self.form = _form(found) | {"room": state["room"]}
        self._offsets = np.searchsorted(places[order], np.arange(len(slots) + 1)).astype(np.int64)
        columns = [(name, found["columns"][place]) for name, place in named_leaves(found["tree"])]
        for name, column in [*columns, (FINAL_ROWS, TensorColumn(state["rows"].astype(np.int64)))]:
            self.lists.append(arrow_field_and_array(column.take(order), name))

    def of(self, start: int, stop: int) -> Iterator[tuple[pa.Field, pa.Array]]:
        """Return fields and arrays for a part of the rows."""
        if not self.lists:
            return
        offsets = self._offsets[start : stop + 1]
        # Arrow's writers before 19 take offsets for right only if they begin at zero.
        own = TensorColumn(offsets - offsets[0]).to_arrow()
        for field, values in self.lists:
            array = pa.LargeListArray.from_arrays(own, values.slice(offsets[0], offsets[-1] - offsets[0]))
            yield pa.field(field.name, array.type, nullable=False, metadata=field.metadata), array


def _parts(
    prepared: PreparedBuffer, read: ReadRows, part_nbytes: int
) -> Iterator[tuple[Ints, list[tuple[pa.Field, pa.Array]]]]:
    """Gather rows a part at a time, as fields and arrays, and the slots that they are in."""
    slots = prepared.slots
    one = slots[:1]
    rows = [read(place, one) for _, place, objects in prepared.columns if not objects]
    nbytes = sum(row.uncompressed_nbytes if isinstance(row, CompressedColumn) else row.nbytes for row in rows)
    step = max(1, part_nbytes // max(1, nbytes))
    # The form of objects in Arrow depends on all of them.
    whole = {
        name: arrow_field_and_array(_read_all(read, place, slots, step), name)
        for name, place, objects in prepared.columns
        if objects
    }
    for start in range(0, max(1, len(slots)), step):
        part = slots[start : start + step]
        found = []
        for name, place, objects in prepared.columns:
            if objects:
                field, array = whole[name]
                found.append((field, array.slice(start, len(part))))
            else:
                found.append(arrow_field_and_array(read(place, part), name))
        found += [
            arrow_field_and_array(column.slice(start, start + len(part)), name) for name, column in prepared.own.items()
        ]
        yield part, [*found, *prepared.finals.of(start, start + len(part))]


def _read_all(read: ReadRows, place: int, slots: Ints, step: int) -> Column:
    """Read all rows of a store, as many at once as of the others."""
    found = [read(place, slots[start : start + step]) for start in range(0, max(1, len(slots)), step)]
    return found[0] if len(found) == 1 else type(found[0]).concat(found, "objects")


_LIVE_PART_NBYTES = 1 << 22
"""Bytes of rows that are read while the lock is held, about: a few milliseconds."""


class LiveBuffer:
    """A buffer as it is at this moment, for checkpoints: copy on write.

    Rows are read a part at a time, and nobody who adds or samples waits for longer than a part takes. Rows that are
    about to be overwritten before their turn has come are copied first; the memory that they take is free again once
    they are in the file. Priorities and final observations are copied here.

    Parameters
    ----------
    buffer
        The buffer, in memory.

    Raises
    ------
    StorageError
        If it is kept in a folder, or is being written so already.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        table = buffer._table
        memory = None
        if isinstance(buffer._sampler, Prioritized):
            # Pages that are there already take a copy in a fraction of the time.
            memory = np.full(table.rings.capacity, 0.0)
        with table.lock:
            if table.journal is not None:
                raise StorageError(
                    "a buffer must be in memory, and not be written already, to be written while it is used"
                )
            self._compression = "lz4" if table.columns.stores.compress else "none"
            self._prepared = prepare_buffer(buffer, memory)
            self._rows = _RowsBefore(table, self._prepared.held)

    def __len__(self) -> int:
        return int(self._prepared.held[:, 1].sum())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the buffer to an Arrow file, as `ReplayBuffer.save` does."""
        parts = write_rows(
            self._prepared,
            self._rows.read,
            lambda schema: arrow_writer(path, schema, self._compression),
            _LIVE_PART_NBYTES,
        )
        for slots in parts:
            self._rows.release(slots)

    def close(self) -> None:
        """Let the buffer go on without copies."""
        self._rows.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


class _RowsBefore:
    """The rows of a table as they were before any further write, as its journal; the lock is held to make one."""

    def __init__(self, table: Table, held: Ints) -> None:
        self._table = table
        self._stores = [store for _, store in table.columns.leaves()]
        self._pending = np.zeros(table.rings.capacity, np.bool_)
        for start, count in held.tolist():
            self._pending[start : start + count] = True
        self._saved: dict[int, list[Column]] = {}
        self._left: dict[int, int] = {}
        # Which of the copies has the row of each slot, from 1, and where; 0 for none.
        self._copy = np.zeros(table.rings.capacity, np.int64)
        self._place = np.zeros(table.rings.capacity, np.intp)
        self._copies = 0
        table.journal = self
        # A compiled addition knows nothing of journals.
        table.forget_fast_add()

    # Of a journal

    def begin(self, overwritten: Sequence[tuple[Iterable[str], Slots]]) -> None:
        """Copy the rows that are about to be overwritten, and are not in the file yet."""
        # The first are those of the table's columns; the others are final observations.
        for names, slots in overwritten[:1]:
            if not any(True for _ in names):
                return
            numbers = (
                np.arange(slots.start, slots.stop, slots.step) if isinstance(slots, slice) else np.atleast_1d(slots)
            )
            self._save(np.unique(numbers[self._pending[numbers]]))

    def _save(self, slots: Ints) -> None:
        if len(slots):
            self._copies += 1
            self._saved[self._copies] = [store.to_column(slots) for store in self._stores]
            self._left[self._copies] = len(slots)
            self._copy[slots], self._place[slots] = self._copies, np.arange(len(slots))
            self._pending[slots] = False

    def commit(self) -> None:
        """Do nothing: the rows before are copied."""
        return None

    def mirror_weights(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return memory for weights that nobody reads."""
        return np.empty_like(weights)

    def flush(self) -> None:
        """Do nothing: the buffer is in memory."""
        return None

    def close(self) -> None:
        """Do nothing: the buffer is in memory."""
        return None

    # Of a reader

    def read(self, place: int, slots: Ints) -> Column:
        """Read rows of one store as they were."""
        store = self._stores[place]
        with self._table.lock:
            copies = self._copy[slots]
            there = copies == 0
            found = [store.to_column(slots[there] if not there.all() else slots)]
            if there.all():
                return found[0]
            order = [np.flatnonzero(there)]
            for copy in np.unique(copies[~there]).tolist():
                own = np.flatnonzero(copies == copy)
                found.append(self._saved[copy][place].take(self._place[slots[own]]))
                order.append(own)
        joined = type(found[0]).concat([part for part in found if len(part)], store.name)
        return joined.take(np.argsort(np.concatenate(order)))

    def release(self, slots: Ints) -> None:
        """Note that the rows of these slots are in the file, and drop the copies of them."""
        with self._table.lock:
            self._pending[slots] = False
            copies, counts = np.unique(self._copy[slots], return_counts=True)
            for copy, count in zip(copies.tolist(), counts.tolist(), strict=True):
                if copy:
                    self._left[copy] -= count
                    if not self._left[copy]:
                        del self._saved[copy], self._left[copy]

    def detach(self) -> None:
        """Stop copying."""
        with self._table.lock:
            if self._table.journal is self:
                self._table.journal = None
            self._saved.clear()


_PART_NBYTES = 1 << 25
"""Bytes of rows that are written at once, about."""

_ROW_NBYTES = 32
"""Bytes of the numbers of a row's slot, in arrays that are there together."""

_REFERENCE_NBYTES = 8

_Buffer = TypeVar("_Buffer", bound="ReplayBuffer")


def write_buffer(
    buffer: ReplayBuffer,
    path: str | os.PathLike[str],
    form: Form = "Arrow",
    compression: str | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write a buffer to an Arrow or Parquet file, atomically.

    Parameters
    ----------
    buffer
        The buffer.
    path
        The file. Its folder must exist.
    form
        `"Arrow"` or `"Parquet"`.
    compression
        As `write_arrow` and `write_parquet` take it. If None, an Arrow file is compressed with LZ4 where columns of the
        buffer are compressed in memory, and a Parquet file with zstd.
    durable
        Whether to wait until the file is on the disk; see `SampleBatch.save`.
    """
    with buffer._table.lock:
        if form == "Parquet":
            _write(buffer, lambda schema: parquet_writer(path, schema, compression or "zstd", durable=durable))
        else:
            usual = "lz4" if buffer._table.columns.stores.compress else "none"
            _write(buffer, lambda schema: arrow_writer(path, schema, compression or usual, durable=durable))


def _write(buffer: ReplayBuffer, open_writer: OpenWriter) -> None:
    prepared = prepare_buffer(buffer)
    stores = [store for _, store in buffer._table.columns.leaves()]
    for _ in write_rows(prepared, lambda place, slots: stores[place].to_column(slots), open_writer, _PART_NBYTES):
        pass


def read_buffer(
    cls: type[_Buffer],
    path: str | os.PathLike[str],
    form: Form = "Arrow",
    *,
    allow_pickle: bool = False,
    verify: bool = True,
    max_nbytes: int | None = None,
    missing: dict[str, Any],
) -> _Buffer:
    """Read a buffer from an Arrow or Parquet file of `write_buffer`.

    Parameters
    ----------
    cls
        The class of the buffer, or one that it derives from.
    path
        The file.
    form
        `"Arrow"` or `"Parquet"`.
    allow_pickle
        Whether to unpickle columns of Python objects that Arrow has no type for.
    verify
        Whether to hold the file against its checksums, if it has any.
    max_nbytes
        Bytes of memory that may be made of the file; 256 MiB or 1024 times its own, whichever is more, if None.
    missing
        Attributes that no file can hold, by argument.
    """
    name = os.fspath(path)
    open_table = open_parquet if form == "Parquet" else open_arrow
    found, bound = open_table(path, verify=verify, max_nbytes=max_nbytes)
    with name_buffer_damage(name):
        file = _Rows(found, bound)
        about = metadata_of(file.schema) or {}
        if about.get("type") != "ReplayBuffer":
            raise FormatError(f"{name!r} must hold a replay buffer, it holds a {about.get('type', 'table')}")
        table = _table_of(file, about, bound, allow_pickle=allow_pickle)
        sampler = dict(about["sampler"])
        if WEIGHTS in file.schema.names:
            weights = [part.column(0) for part in file.batches([WEIGHTS])]
            known = pa.chunked_array(weights, pa.float64()).combine_chunks().to_numpy(zero_copy_only=False)
            sampler["known"] = sampler["known"] | {"weights": known}
        chosen = buffer_state.sampler_from_state(sampler, table.rings.capacity, table.rings.stored_slots())
    buffer: _Buffer = make_buffer(cls, about, table, chosen, missing)
    return buffer


class _Rows:
    """The rows of a buffer's file, a part at a time."""

    def __init__(self, file: TableFile, bound: MemoryBound) -> None:
        self._file = file
        self._bound = bound
        self.schema = file.schema
        self.counts = file.group_rows

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read columns of each part."""
        for group in range(len(self.counts)):
            table = self._file.read([group], names, self._bound)
            arrays = [
                column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in table.columns
            ]
            yield pa.record_batch(arrays, schema=table.schema)


def _check_rows(file: _Rows, about: Mapping[str, Any], bound: MemoryBound) -> None:
    """Check that a file has the rows that its rings count, and take them from the bound with the objects among them.

    Columns of numbers are viewed where they lie, and stored in pages that the system gives when they are written to.
    """
    counts = file.counts
    if any(count < 0 for count in counts) or sum(counts) != sum(about["rings"]["sizes"]):
        raise FormatError(f"the buffer must have {sum(about['rings']['sizes'])} rows, the file has {sum(counts)}")
    bound.take(sum(counts) * _ROW_NBYTES, "the slots of rows")
    form = about["structure"]
    if "compressed" in form["kinds"]:
        bound.take(sum(about["rings"]["maxsizes"]) * _REFERENCE_NBYTES, "a compressed column")
    for kind, shape in zip(form["kinds"], form["row_shapes"], strict=True):
        if kind == "object":
            bound.take(sum(counts) * prod(shape) * _REFERENCE_NBYTES, "rows of objects")
    objects = [field.name for field in file.schema if holds_objects(field)]
    for batch in file.batches(objects) if objects else ():
        for array, field in zip(batch.columns, batch.schema, strict=True):
            check_size([array], field, bound)


def _table_of(file: _Rows, about: Mapping[str, Any], bound: MemoryBound, *, allow_pickle: bool = False) -> Table:
    """Create a table of the rows of a file, a part at a time."""
    _check_rows(file, about, bound)
    form, final_form, schema = about["structure"], about["finals"], file.schema
    count = len(form["kinds"])
    check_structure(form["tree"], count)
    rings = {key: np.array(value) for key, value in about["rings"].items()}
    state = {
        "rings": rings | {"together": about["rings"]["together"]},
        "columns": {"tree": {}, "kinds": [], "row_shapes": [], "columns": []},
        "finals": None,
        **{name: about[name] for name in ("stores", "keeps_next", "last_frame")},
    }
    table = buffer_state.table_from_state(state)
    slots, at = table.rings.stored_slots(), 0
    for batch in file.batches(schema.names):
        part = slots[at : at + batch.num_rows]
        if len(part) != batch.num_rows:
            raise FormatError(f"the buffer must have {len(slots)} rows, the file has more")
        columns = [column_from_arrow(batch.column(i), schema.field(i), allow_pickle=allow_pickle) for i in range(count)]
        if not at:
            table.columns.load_state_dict(part, {**form, "columns": columns})
            stores = [store for _, store in table.columns.leaves()]
        else:
            for (_, place), store in zip(named_leaves(form["tree"]), stores, strict=True):
                store.load_column(part, columns[place])
        at += batch.num_rows
    if at != len(slots):
        raise FormatError(f"the buffer must have {len(slots)} rows, the file has {at}")
    if final_form is not None and table.finals is not None:
        _restore_finals(table, slots, file, final_form, allow_pickle=allow_pickle)
    return table


def _restore_finals(
    table: Table, slots: Ints, file: _Rows, form: Mapping[str, Any], *, allow_pickle: bool = False
) -> None:
    """Put final observations back into their rows."""
    count = len(form["kinds"])
    check_structure(form["tree"], count)
    names = [name for name, _ in named_leaves(form["tree"])]
    places = [place for _, place in named_leaves(form["tree"])]
    first = len(file.schema) - count - 1
    parts: list[list[Column]] = []
    owners: list[npt.NDArray[np.int64]] = []
    at = 0
    for batch in file.batches(file.schema.names[first : first + count + 1]):
        lists = batch.columns
        lengths = np.diff(lists[-1].offsets.to_numpy())
        if any(not np.array_equal(np.diff(found.offsets.to_numpy()), lengths) for found in lists):
            raise FormatError("final observations must be as many in every column, they are not; the file is damaged")
        owners.append(np.repeat(slots[at : at + batch.num_rows] + 1, lengths))
        fields = [file.schema.field(first + i) for i in range(count + 1)]
        parts.append(
            [
                column_from_arrow(found.flatten(), field, allow_pickle=allow_pickle)
                for found, field in zip(lists, fields, strict=True)
            ]
        )
        at += batch.num_rows
    joined: list[Column] = [
        type(columns[0]).concat(columns, name)
        for columns, name in zip(zip(*parts, strict=True), [*names, FINAL_ROWS], strict=True)
    ]
    rows = joined[-1].to_numpy()
    owner = np.concatenate(owners)
    check_finals(rows, owner, int(form["room"]), table.rings)
    ordered = [column for _, column in sorted(zip(places, joined[:-1], strict=True), key=lambda pair: pair[0])]
    found = {"tree": form["tree"], "kinds": form["kinds"], "row_shapes": form["row_shapes"], "columns": ordered}
    assert table.finals is not None
    table.finals.load_state_dict({"rows": rows, "owners": owner, "room": int(form["room"]), "found": found})
    check_final_shapes(table)

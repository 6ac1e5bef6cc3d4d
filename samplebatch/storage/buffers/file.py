"""Storage of replay buffers in Arrow IPC and Parquet files; a multi-agent buffer is a folder of such files.

A file contains a table with one row per stored step, in slot order; the table is written in parts. Final observations
that no later step contains are stored in additional list columns. Each list contains up to two final observations and
is stored in the row of the step that precedes the observations. The schema's metadata contains the remaining state of
the buffer as JSON: rings, open episodes, sampler and generator.

The folder of a multi-agent buffer contains one file per policy, and a manifest that lists the files. Each save uses new
file names. The manifest is replaced atomically once the new files are written, and the previous files are deleted
afterwards. The folder therefore contains a consistent state even if the process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.arguments import describe_value
from samplebatch.batch.arrow import METADATA_KEY, metadata_of
from samplebatch.batch.tree import named_leaves
from samplebatch.buffer.env_steps import EnvSteps
from samplebatch.buffer.extending import Tail
from samplebatch.buffer.multi_agent import Form as PolicyForm
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
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
from samplebatch.names import PolicyID, label_policies
from samplebatch.storage.buffers import state as buffer_state
from samplebatch.storage.files import Form, plain_bytes, read_plain, replacing, sync
from samplebatch.storage.foreign.damage import name_buffer_damage
from samplebatch.storage.tables.arrow import arrow_writer, open_arrow
from samplebatch.storage.tables.batches import TableFile
from samplebatch.storage.tables.parquet import open_parquet, parquet_writer

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer


WEIGHTS, FINAL_ROWS = "sampler.weights", "final.rows"
"""Names of additional columns: priorities, and row numbers of final observations."""

ReadRows = Callable[[int, Ints], Column]
"""Reads rows of a table's store, given the store's index and slots."""
OpenWriter = Callable[[pa.Schema], contextlib.AbstractContextManager[Any]]


@dataclass
class PreparedBuffer:
    """State of a buffer that is to be written; the rows are not included, because they are read in parts.

    columns: dotted name and store index of each column, and whether the column contains objects.
    ring_rows: first slot and number of rows of each ring, shape (rings, 2).
    weights: sampler weights of all slots; None if the sampler has no weights.
    """

    about: buffer_state.State
    columns: list[tuple[str, int, bool]]
    ring_rows: Ints
    weights: npt.NDArray[np.float64] | None
    finals: _Finals

    @cached_property
    def slots(self) -> Ints:
        """Slots of the rows in storage order, shape (n,)."""
        return np.concatenate([start + np.arange(count) for start, count in self.ring_rows])

    @cached_property
    def extra_columns(self) -> dict[str, Column]:
        """Column of priorities to write in addition to the buffer's columns; empty without priorities."""
        return {} if self.weights is None else {WEIGHTS: TensorColumn(self.weights[self.slots])}


def prepare_buffer(buffer: ReplayBuffer, memory: npt.NDArray[np.float64] | None = None) -> PreparedBuffer:
    """Create a snapshot of a buffer for writing (lock held).

    No memory is allocated for rows. Priorities are copied into `memory`, shape (capacity,), or into a new array if
    `memory` is None.
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
    columns = [(name, index, stores[index].kind == "object") for name, index in named_leaves(structure["tree"])]
    ring_rows = np.stack([rings.bases, rings.sizes_of_all()], 1)
    return PreparedBuffer(
        about, columns, ring_rows if ring is None else ring_rows[ring : ring + 1], weights, _Finals(table, ring)
    )


def write_rows(prepared: PreparedBuffer, read: ReadRows, open_writer: OpenWriter, part_nbytes: int) -> Iterator[Ints]:
    """Write a snapshot in parts, and yield the slots of each part once the part's rows have been read.

    read: function that reads rows from one store.
    open_writer: function that opens a writer of the file for a schema.
    part_nbytes: approximate size of the rows of a part, in bytes.
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


def _form(structure: Mapping[str, Any]) -> buffer_state.State:
    return {name: structure[name] for name in ("tree", "kinds", "row_shapes")}


class _Finals:
    """Final observations of a buffer as additional list columns, for `write_rows`."""

    def __init__(self, table: Table, ring: int | None) -> None:
        self.form: buffer_state.State | None = None
        self.lists: list[tuple[pa.Field, pa.Array]] = []
        self._start = 0
        self._state: buffer_state.State | None = None
        if table.finals is not None:
            start, stop = (0, table.rings.capacity) if ring is None else table.rings.edges[ring : ring + 2].tolist()
            self._start, self._state = start, table.finals.state_dict(start, stop, ring)

    def build(self, slots: Ints) -> None:
        """Create the list columns from copies of the final observations, in the order of the rows."""
        state = self._state
        if state is None:
            return
        state_columns = state["found"]
        owners = state["owners"] - 1 + self._start
        positions = np.searchsorted(slots, owners)
        matches = np.flatnonzero(slots[np.minimum(positions, len(slots) - 1)] == owners) if len(slots) else slots
        order = matches[np.argsort(positions[matches], kind="stable")]
        self.form = _form(state_columns) | {"room": state["room"]}
        self._offsets = np.searchsorted(positions[order], np.arange(len(slots) + 1)).astype(np.int64)
        columns = [(name, state_columns["columns"][index]) for name, index in named_leaves(state_columns["tree"])]
        for name, column in [*columns, (FINAL_ROWS, TensorColumn(state["rows"].astype(np.int64)))]:
            self.lists.append(arrow_field_and_array(column.take(order), name))

    def of(self, start: int, stop: int) -> Iterator[tuple[pa.Field, pa.Array]]:
        """Yield the field and array of each list column for one part of the rows."""
        if not self.lists:
            return
        offsets = self._offsets[start : stop + 1]
        # Arrow writers before version 19 require that offsets start at zero.
        relative = TensorColumn(offsets - offsets[0]).to_arrow()
        for field, values in self.lists:
            array = pa.LargeListArray.from_arrays(relative, values.slice(offsets[0], offsets[-1] - offsets[0]))
            yield pa.field(field.name, array.type, nullable=False, metadata=field.metadata), array


def _parts(
    prepared: PreparedBuffer, read: ReadRows, part_nbytes: int
) -> Iterator[tuple[Ints, list[tuple[pa.Field, pa.Array]]]]:
    """Yield the slots, fields and arrays of each part of the rows."""
    slots = prepared.slots
    first_slot = slots[:1]
    rows = [read(index, first_slot) for _, index, objects in prepared.columns if not objects]
    nbytes = sum(row.uncompressed_nbytes if isinstance(row, CompressedColumn) else row.nbytes for row in rows)
    step = max(1, part_nbytes // max(1, nbytes))
    # The Arrow type of an object column depends on all rows.
    object_arrays = {
        name: arrow_field_and_array(_read_all(read, index, slots, step), name)
        for name, index, objects in prepared.columns
        if objects
    }
    for start in range(0, max(1, len(slots)), step):
        part = slots[start : start + step]
        part_arrays = []
        for name, index, objects in prepared.columns:
            if objects:
                field, array = object_arrays[name]
                part_arrays.append((field, array.slice(start, len(part))))
            else:
                part_arrays.append(arrow_field_and_array(read(index, part), name))
        part_arrays += [
            arrow_field_and_array(column.slice(start, start + len(part)), name)
            for name, column in prepared.extra_columns.items()
        ]
        yield part, [*part_arrays, *prepared.finals.of(start, start + len(part))]


def _read_all(read: ReadRows, index: int, slots: Ints, step: int) -> Column:
    """Read all rows of a store in parts of `step` rows, and concatenate the parts."""
    parts = [read(index, slots[start : start + step]) for start in range(0, max(1, len(slots)), step)]
    return parts[0] if len(parts) == 1 else type(parts[0]).concat(parts, "objects")


_LIVE_PART_NBYTES = 1 << 22
"""Approximate bytes of rows read under the lock, which takes a few milliseconds."""


class LiveBuffer:
    """Copy-on-write snapshot of a buffer that remains in use, for checkpoints.

    Rows are read in parts, so that writers and samplers wait for at most one part. Before the buffer overwrites a row
    that is not in the file yet, the snapshot copies the row; the copy is freed once the row is in the file. Priorities
    and final observations are copied when the snapshot is created.

    Raises StorageError if the buffer is stored in a folder, or another snapshot of the buffer is in use.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        table = buffer._table
        memory = None
        if isinstance(buffer._sampler, Prioritized):
            # Touched pages make the copy several times faster.
            memory = np.full(table.rings.capacity, 0.0)
        with table.lock:
            if table.journal is not None:
                raise StorageError(
                    "a buffer must be in memory and have no active snapshot to be written while it is used, "
                    f"got a {'snapshot' if isinstance(table.journal, _RowsBefore) else 'buffer in a folder'}"
                )
            self._compression = "lz4" if table.columns.stores.compress else "none"
            self._prepared = prepare_buffer(buffer, memory)
            self._rows = _RowsBefore(table, self._prepared.ring_rows)

    def __len__(self) -> int:
        return int(self._prepared.ring_rows[:, 1].sum())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the buffer to an Arrow file; see `ReplayBuffer.save`."""
        parts = write_rows(
            self._prepared,
            self._rows.read,
            lambda schema: arrow_writer(path, schema, self._compression),
            _LIVE_PART_NBYTES,
        )
        for slots in parts:
            self._rows.release(slots)

    def close(self) -> None:
        """Stop copying overwritten rows."""
        self._rows.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


class _RowsBefore:
    """Table journal that preserves the rows of a snapshot: rows are copied before they are overwritten (lock held)."""

    def __init__(self, table: Table, ring_rows: Ints) -> None:
        self._table = table
        self._stores = [store for _, store in table.columns.leaves()]
        self._pending = np.zeros(table.rings.capacity, np.bool_)
        for start, count in ring_rows.tolist():
            self._pending[start : start + count] = True
        self._saved: dict[int, list[Column]] = {}
        self._left: dict[int, int] = {}
        # Number of the copy with the row of each slot, from 1, and the position in the copy; 0 for none.
        self._copy = np.zeros(table.rings.capacity, np.int64)
        self._copy_positions = np.zeros(table.rings.capacity, np.intp)
        self._copies = 0
        table.journal = self
        # Compiled additions bypass journals.
        table.forget_fast_add()

    # Journal interface

    def begin(self, overwritten: Sequence[tuple[Iterable[str], Slots]]) -> None:
        """Copy the rows that a step will overwrite and that are not in the file yet."""
        # The first entry contains the table's columns; later entries contain final observations.
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
            self._copy[slots], self._copy_positions[slots] = self._copies, np.arange(len(slots))
            self._pending[slots] = False

    def commit(self) -> None:
        """Do nothing, because `begin` has already copied the overwritten rows."""
        return None

    def mirror_weights(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return an unused array, because the snapshot has already copied the weights."""
        return np.empty_like(weights)

    def flush(self) -> None:
        """Do nothing, because a buffer in memory has no file to sync."""
        return None

    def close(self) -> None:
        """Do nothing, because a buffer in memory has no file to close."""
        return None

    # Reader interface

    def read(self, index: int, slots: Ints) -> Column:
        """Read rows of one store as they were when the snapshot was created."""
        store = self._stores[index]
        with self._table.lock:
            copies = self._copy[slots]
            is_current = copies == 0
            parts = [store.to_column(slots[is_current] if not is_current.all() else slots)]
            if is_current.all():
                return parts[0]
            order = [np.flatnonzero(is_current)]
            for copy in np.unique(copies[~is_current]).tolist():
                copied = np.flatnonzero(copies == copy)
                parts.append(self._saved[copy][index].take(self._copy_positions[slots[copied]]))
                order.append(copied)
        joined = type(parts[0]).concat([part for part in parts if len(part)], store.name)
        return joined.take(np.argsort(np.concatenate(order)))

    def release(self, slots: Ints) -> None:
        """Mark slots as written to the file, and free copies of rows that are no longer required."""
        with self._table.lock:
            self._pending[slots] = False
            copies, counts = np.unique(self._copy[slots], return_counts=True)
            for copy, count in zip(copies.tolist(), counts.tolist(), strict=True):
                if copy:
                    self._left[copy] -= count
                    if not self._left[copy]:
                        del self._saved[copy], self._left[copy]

    def detach(self) -> None:
        """Stop copying rows before they are overwritten, and free all copies."""
        with self._table.lock:
            if self._table.journal is self:
                self._table.journal = None
            self._saved.clear()


_PART_NBYTES = 1 << 25
"""Approximate bytes of rows written at once."""

_ROW_NBYTES = 32
"""Bytes per row of temporary slot arrays."""

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
    """Write a buffer atomically to an Arrow or Parquet file.

    path: path of the file in an existing folder.
    form: `"Arrow"` or `"Parquet"`.
    compression: as in `write_arrow` and `write_parquet`. None selects LZ4 for an Arrow file if the buffer compresses
        columns in memory, and zstd for a Parquet file.
    durable: whether to sync the file to disk; see `SampleBatch.save`.
    """
    with buffer._table.lock:
        if form == "Parquet":
            _write(buffer, lambda schema: parquet_writer(path, schema, compression or "zstd", durable=durable))
        else:
            default = "lz4" if buffer._table.columns.stores.compress else "none"
            _write(buffer, lambda schema: arrow_writer(path, schema, compression or default, durable=durable))


def _write(buffer: ReplayBuffer, open_writer: OpenWriter) -> None:
    prepared = prepare_buffer(buffer)
    stores = [store for _, store in buffer._table.columns.leaves()]
    for _ in write_rows(prepared, lambda path, slots: stores[path].to_column(slots), open_writer, _PART_NBYTES):
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
    """Read a buffer from an Arrow or Parquet file that `write_buffer` wrote.

    form: `"Arrow"` or `"Parquet"`.
    allow_pickle: whether to unpickle columns of Python objects without an Arrow type.
    verify: whether to verify the checksums of a file that has checksums.
    max_nbytes: maximum bytes to allocate; None for the larger of 256 MiB and 1024 times the file's size.
    missing: attributes that files cannot store, by argument name.
    """
    name = os.fspath(path)
    open_table = open_parquet if form == "Parquet" else open_arrow
    table_file, bound = open_table(path, verify=verify, max_nbytes=max_nbytes)
    with name_buffer_damage(name):
        file = _Rows(table_file, bound)
        about = metadata_of(file.schema) or {}
        if about.get("type") != "ReplayBuffer":
            raise FormatError(f"{name!r} must contain a replay buffer, got a {about.get('type', 'table')!s:.80}")
        table = _table_of(file, about, bound, allow_pickle=allow_pickle)
        sampler = dict(about["sampler"])
        if WEIGHTS in file.schema.names:
            weights = [part.column(0) for part in file.batches([WEIGHTS])]
            sampler_weights = pa.chunked_array(weights, pa.float64()).combine_chunks().to_numpy(zero_copy_only=False)
            sampler["known"] = sampler["known"] | {"weights": sampler_weights}
        chosen = buffer_state.sampler_from_state(sampler, table.rings.capacity, table.rings.stored_slots())
    buffer: _Buffer = buffer_state.make_buffer(cls, about, table, chosen, missing)
    return buffer


class _Rows:
    """Reader of a buffer's file that returns the rows in parts."""

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
    """Check that a file has as many rows as the rings; subtract the size of slots and objects from the memory bound.

    Numeric columns are not subtracted: they are views of the file, and their stores allocate memory pages on write.
    """
    counts = file.counts
    if any(count < 0 for count in counts) or sum(counts) != sum(about["rings"]["sizes"]):
        raise FormatError(f"the buffer must have {sum(about['rings']['sizes'])} rows, got a file with {sum(counts)}")
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
    _check_rows(file, about, bound)
    form, final_form, schema = about["structure"], about["finals"], file.schema
    count = len(form["kinds"])
    buffer_state.check_structure(form["tree"], count)
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
            raise FormatError(f"the buffer must have {len(slots)} rows, got a file with more")
        columns = [column_from_arrow(batch.column(i), schema.field(i), allow_pickle=allow_pickle) for i in range(count)]
        if not at:
            table.columns.load_state_dict(part, {**form, "columns": columns})
            stores = [store for _, store in table.columns.leaves()]
        else:
            for (_, index), store in zip(named_leaves(form["tree"]), stores, strict=True):
                store.load_column(part, columns[index])
        at += batch.num_rows
    if at != len(slots):
        raise FormatError(f"the buffer must have {len(slots)} rows, got a file with {at}")
    if final_form is not None and table.finals is not None:
        _restore_finals(table, slots, file, final_form, allow_pickle=allow_pickle)
    return table


def _restore_finals(
    table: Table, slots: Ints, file: _Rows, form: Mapping[str, Any], *, allow_pickle: bool = False
) -> None:
    count = len(form["kinds"])
    buffer_state.check_structure(form["tree"], count)
    names = [name for name, _ in named_leaves(form["tree"])]
    indices = [index for _, index in named_leaves(form["tree"])]
    first = len(file.schema) - count - 1
    parts: list[list[Column]] = []
    owners: list[npt.NDArray[np.int64]] = []
    at = 0
    for batch in file.batches(file.schema.names[first : first + count + 1]):
        lists = batch.columns
        lengths = np.diff(lists[-1].offsets.to_numpy())
        if any(not np.array_equal(np.diff(list_array.offsets.to_numpy()), lengths) for list_array in lists):
            raise FormatError(
                "final observations must have equal counts in all columns, got others; the file is damaged"
            )
        owners.append(np.repeat(slots[at : at + batch.num_rows] + 1, lengths))
        fields = [file.schema.field(first + i) for i in range(count + 1)]
        parts.append(
            [
                column_from_arrow(list_array.flatten(), field, allow_pickle=allow_pickle)
                for list_array, field in zip(lists, fields, strict=True)
            ]
        )
        at += batch.num_rows
    joined: list[Column] = [
        type(columns[0]).concat(columns, name)
        for columns, name in zip(zip(*parts, strict=True), [*names, FINAL_ROWS], strict=True)
    ]
    rows = joined[-1].to_numpy()
    owner = np.concatenate(owners)
    buffer_state.check_finals(rows, owner, int(form["room"]), table.rings)
    ordered = [column for _, column in sorted(zip(indices, joined[:-1], strict=True), key=lambda pair: pair[0])]
    list_array = {"tree": form["tree"], "kinds": form["kinds"], "row_shapes": form["row_shapes"], "columns": ordered}
    assert table.finals is not None
    table.finals.load_state_dict({"rows": rows, "owners": owner, "room": int(form["room"]), "found": list_array})
    buffer_state.check_final_shapes(table)


# Several policies

MANIFEST = "policies.json"
_VERSION = 1


def write_policies(buffer: MultiAgentReplayBuffer, path: str | os.PathLike[str], compression: str | None) -> None:
    """Write a multi-agent buffer into a folder, and replace a buffer that the folder already contains."""
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise StorageError(f"{str(folder)!r} must be a new folder or one with a multi-agent buffer, got other files")
    folder.mkdir(exist_ok=True)
    with buffer._lock:
        about = _describe(buffer)
        mark = secrets.token_hex(4)
        files = {label: f"{i}-{mark}.arrow" for i, label in enumerate(_label(buffer, buffer.buffers))}
        for name, policy_buffer in zip(files.values(), buffer.buffers.values(), strict=True):
            write_buffer(policy_buffer, folder / name, "Arrow", compression)
    with replacing(folder / MANIFEST) as file:
        file.write(plain_bytes(about | {"files": files}))
    sync(folder)
    for older in folder.glob("*.arrow"):
        if older.name not in files.values():
            with contextlib.suppress(FileNotFoundError):
                older.unlink()


def _describe(buffer: MultiAgentReplayBuffer) -> buffer_state.State:
    strange = [name for name, value in buffer._options.items() if not buffer_state.is_plain(value)]
    if strange:
        raise StorageError(
            f"a multi-agent buffer must have plain options to be saved, got another value in {strange[0]!r}"
        )
    steps = buffer._steps.state_dict()
    return {
        "version": _VERSION,
        "type": "MultiAgentReplayBuffer",
        "size": buffer_state.plain(_label(buffer, buffer._size) if isinstance(buffer._size, dict) else buffer._size),
        "ids": {label: int(policy) for policy, label in _labels(buffer).items() if not isinstance(policy, str)},
        "lockstep": buffer.lockstep,
        "kind": buffer._kind.__name__,
        "options": buffer_state.plain(buffer._options),
        "seed": buffer_state.plain(buffer._seed),
        "forms": {
            label: [sorted(form.flags), form.rewards.str] for label, form in _label(buffer, buffer._forms).items()
        },
        "tails": {
            label: [buffer_state.plain(_item(part)) for part in tail]
            for label, tail in _label(buffer, buffer._tails).items()
        },
        "steps": _plain_steps(steps | {"buffers": _label(buffer, steps["buffers"])}),
        "generator": buffer_state.generator_state(buffer._rng),
    }


def _labels(buffer: MultiAgentReplayBuffer) -> dict[PolicyID, str]:
    """Return a string label per policy, because JSON supports only string keys."""
    return label_policies(dict.fromkeys([*buffer.buffers, *(buffer._size if isinstance(buffer._size, dict) else ())]))


def _label(buffer: MultiAgentReplayBuffer, values: Mapping[PolicyID, Any]) -> buffer_state.State:
    labels = _labels(buffer)
    return {labels[policy]: value for policy, value in values.items()}


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _plain_steps(state: Mapping[str, Any]) -> buffer_state.State:
    """Convert arrays to lists and dtype names, because JSON does not support arrays."""
    plain_state: buffer_state.State = json.loads(
        json.dumps(state, default=lambda array: {"dtype": array.dtype.str, "values": array.tolist()})
    )
    return plain_state


def _steps(plain_state: Any) -> Any:
    """Convert the result of `_plain_steps` back to arrays."""
    if isinstance(plain_state, dict):
        if plain_state.keys() == {"dtype", "values"}:
            return np.array(plain_state["values"], np.dtype(str(plain_state["dtype"])))
        return {name: _steps(value) for name, value in plain_state.items()}
    return plain_state


def files_of(folder: Path) -> list[Path]:
    """List the files of all policies in a multi-agent buffer's folder."""
    return [folder / os.path.basename(str(file)) for file in read_plain(folder / MANIFEST).get("files", {}).values()]


def read_policies(
    path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    verify: bool = True,
    max_nbytes: int | None = None,
    missing: dict[str, Any],
) -> MultiAgentReplayBuffer:
    """Read a multi-agent buffer from a folder that `write_policies` wrote; parameters as in `read_buffer`."""
    folder = Path(path)
    about = read_plain(folder / MANIFEST)
    if about.get("type") != "MultiAgentReplayBuffer" or about.get("version") != _VERSION:
        actual = f"type {describe_value(about.get('type'))} of version {describe_value(about.get('version'))}"
        raise FormatError(f"{str(folder)!r} must contain a MultiAgentReplayBuffer of version {_VERSION}, got {actual}")
    trust: dict[str, Any] = {"allow_pickle": allow_pickle, "verify": verify, "max_nbytes": max_nbytes}
    with name_buffer_damage(str(folder)):
        ids = dict(about.get("ids", {}))
        for number in ids.values():
            if type(number) is not int:
                actual = describe_value(number)
                raise FormatError(
                    f"{str(folder)!r} must have integer ids for policies without string ids, got {actual}"
                )
        kind = buffer_state.buffer_class(about["kind"], ReplayBuffer)
        size = about["size"]
        if isinstance(size, dict):
            size = {ids.get(label, label): policy_value for label, policy_value in size.items()}
        buffer = MultiAgentReplayBuffer(
            size, lockstep=about["lockstep"], kind=kind, seed=about["seed"], **about["options"]
        )
        for label, file in about["files"].items():
            policy = ids.get(label, label)
            if os.path.basename(file) != file or not (folder / file).is_file():
                raise FormatError(
                    f"{str(folder)!r} must have the file of policy {policy!r:.80}, got no file {file!r:.80}"
                )
            policy_value = read_buffer(kind, folder / file, "Arrow", missing=missing, **trust)
            policy_value._table.lock = buffer._lock
            buffer.buffers[policy] = policy_value
        buffer._forms = {
            ids.get(label, label): PolicyForm(frozenset(flags), np.dtype(dtype))
            for label, (flags, dtype) in about["forms"].items()
        }
        buffer_state.check_fragments(buffer.buffers, buffer._forms)
        buffer._tails = {ids.get(label, label): Tail(*tail) for label, tail in about["tails"].items()}
        steps = _steps(about["steps"])
        steps["buffers"] = {ids.get(label, label): policy_value for label, policy_value in steps["buffers"].items()}
        buffer._steps = EnvSteps.from_state_dict(steps)
        buffer._rng = buffer_state.generator_from_state(about["generator"])
    return buffer

"""PreparedBuffer: a buffer at one moment, as the parts of an Arrow table that files are written of."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.batch.arrow import METADATA_KEY
from samplebatch.batch.tree import named_leaves
from samplebatch.buffer.samplers import Prioritized
from samplebatch.buffer.table import Table
from samplebatch.column.arrow import arrow_field_and_array
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.storage import buffer_state
from samplebatch.storage.buffer_description import describe
from samplebatch.storage.untrusted_state import State

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer

WEIGHTS, FINAL_ROWS = "sampler.weights", "final.rows"
"""Names of the columns beside those of rows: priorities, and places of final observations."""

Slots = npt.NDArray[np.intp]
ReadRows = Callable[[int, Slots], Column]
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
    held: Slots
    weights: npt.NDArray[np.float64] | None
    finals: _Finals

    @cached_property
    def slots(self) -> Slots:
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
    state = buffer_state.sampler_state(sampler, np.zeros(0, np.intp))
    weights = None
    if isinstance(sampler, Prioritized):
        del state["known"]["weights"]
        weights = np.empty(rings.capacity) if memory is None else memory
        np.copyto(weights, sampler.tree.weights)
    structure = buffer_state.structure_of(table.columns)
    about = describe(buffer) | {
        "type": "ReplayBuffer",
        "generator": buffer_state.generator_state(buffer._rng),
        "sampler": state,
        "rings": rings.state_dict(ring),
        "structure": _form(structure),
        "stores": buffer_state.stores_state(table.columns.stores),
        "keeps_next": table.keeps_next,
        "last_frame": table.last_frame,
    }
    stores = [store for _, store in table.columns.leaves()]
    columns = [(name, place, stores[place].kind == "object") for name, place in named_leaves(structure["tree"])]
    held = np.stack([rings.bases, rings.sizes_of_all()], 1)
    return PreparedBuffer(
        about, columns, held if ring is None else held[ring : ring + 1], weights, _Finals(table, ring)
    )


def write_rows(prepared: PreparedBuffer, read: ReadRows, open_writer: OpenWriter, part_nbytes: int) -> Iterator[Slots]:
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

    def build(self, slots: Slots) -> None:
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
) -> Iterator[tuple[Slots, list[tuple[pa.Field, pa.Array]]]]:
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


def _read_all(read: ReadRows, place: int, slots: Slots, step: int) -> Column:
    """Read all rows of a store, as many at once as of the others."""
    found = [read(place, slots[start : start + step]) for start in range(0, max(1, len(slots)), step)]
    return found[0] if len(found) == 1 else type(found[0]).concat(found, "objects")

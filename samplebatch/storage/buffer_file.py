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
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.batch.arrow import METADATA_KEY, metadata_of
from samplebatch.batch.tree import named_leaves
from samplebatch.buffer.columns import Columns
from samplebatch.buffer.table import Table
from samplebatch.column.arrow import arrow_field_and_array, check_size, column_from_arrow, holds_objects
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.interface import Column
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import FormatError
from samplebatch.storage import buffer_state
from samplebatch.storage.arrow_file import arrow_writer, open_arrow
from samplebatch.storage.buffer_description import describe, make_buffer
from samplebatch.storage.damage import name_buffer_damage
from samplebatch.storage.parquet import open_parquet, parquet_writer
from samplebatch.storage.suffixes import Form
from samplebatch.storage.table_file import TableFile
from samplebatch.storage.untrusted_state import State, check_final_shapes, check_finals, check_structure

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer

_PART_NBYTES = 1 << 25
"""Bytes of rows that are written at once, about."""

_ROW_NBYTES = 32
"""Bytes of the numbers of a row's slot, in arrays that are there together."""

_REFERENCE_NBYTES = 8

_WEIGHTS, _FINAL_ROWS = "sampler.weights", "final.rows"

Slots = npt.NDArray[np.intp]
_Buffer = TypeVar("_Buffer", bound="ReplayBuffer")


def write_buffer(
    buffer: ReplayBuffer, path: str | os.PathLike[str], form: Form = "Arrow", compression: str | None = None
) -> None:
    """Write a buffer to an Arrow or Parquet file, whole or not at all.

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

    Raises
    ------
    ColumnTypeError
        If a column holds objects that cannot be pickled; names it.
    OSError
        If the file cannot be written.
    """
    with buffer._table.lock:
        if form == "Parquet":
            _write(buffer, lambda schema: parquet_writer(path, schema, compression or "zstd"))
        else:
            usual = "lz4" if buffer._table.columns.stores.compress else "none"
            _write(buffer, lambda schema: arrow_writer(path, schema, compression or usual))


def _write(buffer: ReplayBuffer, open_writer: Callable[[pa.Schema], contextlib.AbstractContextManager[Any]]) -> None:
    table, ring = buffer._table, buffer._ring
    slots = table.rings.stored_slots() if ring is None else buffer._start + np.arange(len(buffer))
    sampler = buffer_state.sampler_state(buffer._sampler, slots)
    weights = sampler["known"].pop("weights", None) if isinstance(sampler["known"], dict) else None
    finals = _Finals(table, ring, slots)
    structure = buffer_state.structure_of(table.columns)
    about = describe(buffer) | {
        "type": "ReplayBuffer",
        "generator": buffer_state.generator_state(buffer._rng),
        "sampler": sampler,
        "rings": table.rings.state_dict(ring),
        "structure": _form(structure),
        "stores": buffer_state.stores_state(table.columns.stores),
        "finals": finals.form,
        "keeps_next": table.keeps_next,
        "last_frame": table.last_frame,
    }
    metadata = {METADATA_KEY: json.dumps(buffer_state.plain(about)).encode()}
    names = list(named_leaves(structure["tree"]))
    own: dict[str, Column] = {} if weights is None else {_WEIGHTS: TensorColumn(weights)}
    parts = _parts(table.columns, names, slots, own, finals)
    first = next(parts)
    schema = pa.schema([field for field, _ in first], metadata)
    with open_writer(schema) as writer:
        writer.write_batch(pa.record_batch([array for _, array in first], schema=schema))
        for part in parts:
            writer.write_batch(pa.record_batch([array for _, array in part], schema=schema))


def _form(structure: Mapping[str, Any]) -> State:
    """Return the structure of columns without the columns."""
    return {name: structure[name] for name in ("tree", "kinds", "row_shapes")}


class _Finals:
    """The final observations of a buffer as lists of none, one or two beside its rows, for `write_buffer`."""

    def __init__(self, table: Table, ring: int | None, slots: Slots) -> None:
        self.form: State | None = None
        self.lists: list[tuple[pa.Field, pa.Array]] = []
        if table.finals is None:
            return
        start, stop = (0, table.rings.capacity) if ring is None else table.rings.edges[ring : ring + 2].tolist()
        state = table.finals.state_dict(start, stop, ring)
        found = state["found"]
        owners = state["owners"] - 1 + start
        places = np.searchsorted(slots, owners)
        there = np.flatnonzero(slots[np.minimum(places, len(slots) - 1)] == owners) if len(slots) else slots
        order = there[np.argsort(places[there], kind="stable")]
        self.form = _form(found) | {"room": state["room"]}
        self._offsets = np.searchsorted(places[order], np.arange(len(slots) + 1)).astype(np.int64)
        columns = [(name, found["columns"][place]) for name, place in named_leaves(found["tree"])]
        for name, column in [*columns, (_FINAL_ROWS, TensorColumn(state["rows"].astype(np.int64)))]:
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
    columns: Columns, names: list[tuple[str, int]], slots: Slots, own: dict[str, Column], finals: _Finals
) -> Iterator[list[tuple[pa.Field, pa.Array]]]:
    """Gather rows a part at a time, as fields and arrays."""
    stores = [store for _, store in columns.leaves()]
    # The form of objects in Arrow depends on all of them.
    whole = {
        name: arrow_field_and_array(stores[place].to_column(slots), name)
        for name, place in names
        if stores[place].kind == "object"
    }
    one = slots[:1]
    rows = [stores[place].to_column(one) for name, place in names if name not in whole]
    nbytes = sum(row.uncompressed_nbytes if isinstance(row, CompressedColumn) else row.nbytes for row in rows)
    step = max(1, _PART_NBYTES // max(1, nbytes))
    for start in range(0, max(1, len(slots)), step):
        part = slots[start : start + step]
        found = []
        for name, place in names:
            if name in whole:
                field, array = whole[name]
                found.append((field, array.slice(start, len(part))))
            else:
                found.append(arrow_field_and_array(stores[place].to_column(part), name))
        found += [arrow_field_and_array(column.slice(start, start + len(part)), name) for name, column in own.items()]
        yield [*found, *finals.of(start, start + len(part))]


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

    Raises
    ------
    FormatError
        If the file is of another format, is damaged or cut short, or holds something else than a buffer. Names the
        columns where bytes have changed.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false; names it.
    CapacityError
        If more memory would be made of the file than `max_nbytes`; names the column.
    OSError
        If the file cannot be read.
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
        if _WEIGHTS in file.schema.names:
            weights = [part.column(0) for part in file.batches([_WEIGHTS])]
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
    """Make a table of the rows of a file, a part at a time."""
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
    table: Table, slots: Slots, file: _Rows, form: Mapping[str, Any], *, allow_pickle: bool = False
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
        for columns, name in zip(zip(*parts, strict=True), [*names, _FINAL_ROWS], strict=True)
    ]
    rows = joined[-1].to_numpy()
    owner = np.concatenate(owners)
    check_finals(rows, owner, int(form["room"]), table.rings)
    ordered = [column for _, column in sorted(zip(places, joined[:-1], strict=True), key=lambda pair: pair[0])]
    found = {"tree": form["tree"], "kinds": form["kinds"], "row_shapes": form["row_shapes"], "columns": ordered}
    assert table.finals is not None
    table.finals.load_state_dict({"rows": rows, "owners": owner, "room": int(form["room"]), "found": found})
    check_final_shapes(table)

"""Replay buffers in Arrow IPC and Parquet files.

A file is a table with a row for each step that counts, in the order of their slots, written a part at a time. The final
observations that no later step brings are lists of none, one or two beside the steps they follow. What else a buffer
needs to go on exactly as it would have stands in the schema's metadata, as JSON: rings, running episodes, sampler and
generator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.batch.arrow import metadata_of
from samplebatch.batch.tree import named_leaves
from samplebatch.buffer.table import Table
from samplebatch.column.arrow import check_size, column_from_arrow, holds_objects
from samplebatch.column.interface import Column
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.errors import FormatError
from samplebatch.storage import buffer_state
from samplebatch.storage.arrow_file import arrow_writer, open_arrow
from samplebatch.storage.buffer_description import make_buffer
from samplebatch.storage.damage import name_buffer_damage
from samplebatch.storage.parquet import open_parquet, parquet_writer
from samplebatch.storage.prepared_buffer import FINAL_ROWS, WEIGHTS, OpenWriter, prepare_buffer, write_rows
from samplebatch.storage.suffixes import Form
from samplebatch.storage.table_file import TableFile
from samplebatch.storage.untrusted_state import check_final_shapes, check_finals, check_structure

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer

_PART_NBYTES = 1 << 25
"""Bytes of rows that are written at once, about."""

_ROW_NBYTES = 32
"""Bytes of the numbers of a row's slot, in arrays that are there together."""

_REFERENCE_NBYTES = 8

Slots = npt.NDArray[np.intp]
_Buffer = TypeVar("_Buffer", bound="ReplayBuffer")


def write_buffer(
    buffer: ReplayBuffer,
    path: str | os.PathLike[str],
    form: Form = "Arrow",
    compression: str | None = None,
    *,
    durable: bool = True,
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
    durable
        Whether to wait until the file is on the disk; see `SampleBatch.save`.

    Raises
    ------
    ColumnTypeError
        If a column holds objects that cannot be pickled; names it.
    OSError
        If the file cannot be written.
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

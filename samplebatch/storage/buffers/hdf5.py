"""Replay buffers in HDF5 files, in Tianshou's layout.

The columns are datasets with one row per slot; slots without a step occupy no space. Open episodes and the sampler are
stored where Tianshou expects them. Values that Tianshou does not support are attributes of the dataset `_indices`,
which Tianshou ignores and never writes. Checksums of all bytes follow the HDF5 end of the file (see `checksums`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.batch.nested.node import values_of
from samplebatch.buffer.samplers import Sampler
from samplebatch.buffer.store import DenseStore, Store, TorchStore
from samplebatch.buffer.stores import CompressedStore
from samplebatch.buffer.table import Table
from samplebatch.column.arrow import arrow_field_and_array, check_size, column_from_arrow
from samplebatch.column.arrow_bodies import decompressed_stream_nbytes
from samplebatch.errors import FormatError
from samplebatch.storage.buffers import state as buffer_state
from samplebatch.storage.buffers.state import (
    State,
    check_final_shapes,
    check_finals,
    check_structure,
    make_buffer,
)
from samplebatch.storage.buffers.tianshou import (
    attributes_for,
    description_in,
    reward_function_in,
    rings_in,
    sampler_in,
    table_in,
)
from samplebatch.storage.foreign.damage import name_buffer_damage
from samplebatch.storage.foreign.hdf5 import TYPE_KEY, Hdf5Reader, Ranges, bound_of
from samplebatch.storage.hdf5 import hdf5_file, hdf5_writer, to_hdf5, write_value

if TYPE_CHECKING:
    import h5py

    from samplebatch.buffer.replay import ReplayBuffer

_Buffer = TypeVar("_Buffer", bound="ReplayBuffer")
_ABOUT, _FINALS = "samplebatch", "samplebatch.finals"
_PART_NBYTES = 1 << 25
_CHUNK_NBYTES = 1 << 16
"""Approximate bytes per HDF5 chunk, if some slots have no rows or the rows are filtered."""

_MAX_PICKLED_NUMBER = 1 << 10
"""Maximum size of a pickled number in bytes."""


def save_hdf5_buffer(
    buffer: ReplayBuffer, path: str | os.PathLike[str], compression: str | None = None, *, durable: bool = True
) -> None:
    """Write a buffer to an HDF5 file; see `ReplayBuffer.save_hdf5`."""
    with buffer._table.lock:
        _write(buffer, path, compression, durable=durable)


# Writing


def _write(buffer: ReplayBuffer, path: str | os.PathLike[str], compression: str | None, *, durable: bool) -> None:
    state = attributes_for(buffer)
    with hdf5_writer(path, durable=durable) as file:
        to_hdf5(state, file, compression)
        _write_columns(buffer, file.create_group("_meta"), compression)
        file["_indices"].attrs[_ABOUT] = json.dumps(buffer_state.plain(buffer_state.describe_without_rows(buffer)))
        finals = _finals(buffer)
        if finals is not None:
            file["_indices"].attrs[_FINALS] = finals


def _write_columns(buffer: Any, group: h5py.Group, compression: str | None) -> None:
    """Write the columns with one row per slot; slots without a step are not written."""
    rings, start = buffer._table.rings, buffer._start
    sizes = rings.sizes_of_all()
    chosen = range(rings.n) if buffer._ring is None else (buffer._ring,)
    ranges = [(int(rings.edges[ring]), int(rings.edges[ring] + sizes[ring])) for ring in chosen if sizes[ring]]
    group.attrs[TYPE_KEY] = "Batch"

    def walk(tree: Mapping[str, Any], inner: Any, prefix: str) -> None:
        for name, node in tree.items():
            if isinstance(node, Store):
                _write_store(node, inner, name, prefix + name)
            else:
                to_hdf5({name: {}}, inner)
                walk(node, inner[name], f"{prefix}{name}.")

    def _write_store(store: Store, inner: Any, name: str, path: str) -> None:
        first = store.to_column(np.zeros(0, np.intp)).to_numpy() if _is_numeric(store) else None
        if first is None or not buffer.maxsize or 0 in first.shape[1:]:
            write_value(store.take(np.arange(start, start + buffer.maxsize)), inner, name, compression, path)
            return
        shape = (buffer.maxsize, *first.shape[1:])
        is_contiguous = sum(high - low for low, high in ranges) == buffer.maxsize and compression is None
        row_nbytes = first.dtype.itemsize * prod(shape[1:])
        chunk = min(buffer.maxsize, max(1, _CHUNK_NBYTES // row_nbytes))
        dataset = inner.create_dataset(
            name, shape, first.dtype, chunks=None if is_contiguous else (chunk, *shape[1:]), compression=compression
        )
        dataset.attrs[TYPE_KEY] = "Tensor" if isinstance(store, TorchStore) else "ndarray"
        step = max(chunk, _PART_NBYTES // row_nbytes // chunk * chunk)
        for low, high in ranges:
            for at in range(low, high, step):
                part = np.arange(at, min(at + step, high))
                dataset[at - start : part[-1] + 1 - start] = np.asarray(store.to_column(part).to_numpy())

    walk(buffer._table.columns.tree, group, "")


def _is_numeric(store: Store) -> bool:
    """Return whether HDF5 supports the dtype of a store with rows of one shape."""
    if isinstance(store, TorchStore):
        return store.dtype.name == str(store.torch_dtype).removeprefix("torch.")
    if isinstance(store, DenseStore):
        return store.dtype.kind in "biufc"
    return isinstance(store, CompressedStore) and store.take(np.zeros(0, np.intp)).dtype.kind in "biufc"


def _finals(buffer: Any) -> npt.NDArray[np.uint8] | None:
    """Encode the final observations as an Arrow stream."""
    table = buffer._table
    if table.finals is None:
        return None
    start = buffer._start
    state = table.finals.state_dict(start, start + buffer.maxsize, buffer._ring)
    columns_state = state["found"]
    pairs = [arrow_field_and_array(column, str(i)) for i, column in enumerate(columns_state["columns"])]
    pairs += [(pa.field(name, pa.int64()), pa.array(state[name], pa.int64())) for name in ("rows", "owners")]
    form = {name: columns_state[name] for name in ("tree", "kinds", "row_shapes")} | {"room": state["room"]}
    schema = pa.schema([field for field, _ in pairs], {b"form": json.dumps(buffer_state.plain(form)).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([array for _, array in pairs], schema=schema))
    return np.frombuffer(sink.getvalue(), np.uint8)


# Reading


def load_hdf5_buffer(
    cls: type[_Buffer],
    path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    verify: bool = True,
    max_nbytes: int | None = None,
    missing: dict[str, Any],
) -> _Buffer:
    """Read a buffer from an HDF5 file; see `ReplayBuffer.load_hdf5`."""
    name = os.fspath(path)
    with hdf5_file(path, verify=verify) as file, name_buffer_damage(name):
        reader = Hdf5Reader(bound_of(file, max_nbytes), allow_pickle=allow_pickle)
        about, table, sampler, stored = _parts_of(cls, file, reader)
    buffer: _Buffer = make_buffer(cls, about, table, sampler, stored | missing)
    return buffer


def _parts_of(cls: Any, file: h5py.File, reader: Hdf5Reader) -> tuple[State, Table, Sampler, dict[str, Any]]:
    """Read description, table, sampler and, if pickles are allowed, pickled attributes of a buffer."""
    children = reader.children(file)
    attributes = reader.attributes(file) | _numbers(children, reader)
    notes = reader.attributes(children["_indices"])
    about = json.loads(notes[_ABOUT]) if _ABOUT in notes else description_in(cls, attributes, children, reader)
    rings = rings_in(about)
    columns = values_of(reader.of_rows(*_counting(rings)).read(children["_meta"]))
    table = table_in(about, attributes, rings, dict(columns or {}))
    if table.finals is not None and _FINALS in notes:
        table.finals.load_state_dict(_read_finals(notes[_FINALS], table, reader))
        check_final_shapes(table)
    sampler = sampler_in(about, attributes, children, table, reader)
    return about, table, sampler, reward_function_in(children, reader)


def _counting(rings: State) -> tuple[int, Ranges]:
    """Return the total number of slots, and the ranges of slots with rows."""
    stops = np.cumsum(rings["maxsizes"])
    starts = stops - rings["maxsizes"]
    return int(stops[-1]), list(zip(starts.tolist(), (starts + rings["sizes"]).tolist(), strict=True))


def _numbers(children: Mapping[str, Any], reader: Hdf5Reader) -> State:
    """Read numbers stored as datasets: Tianshou pickles the numbers of a loaded buffer."""
    import h5py

    numbers: State = {}
    for name, child in children.items():
        kind = reader.attributes(child).get(TYPE_KEY)
        if isinstance(child, h5py.Dataset) and kind not in ("ndarray", "Tensor"):
            value = reader.inert(child) if child.size < _MAX_PICKLED_NUMBER else None
            if isinstance(value, np.generic | int | float):
                numbers[name] = value
    return numbers


def _read_finals(data: Any, table: Table, reader: Hdf5Reader) -> State:
    stream = pa.py_buffer(np.asarray(data, np.uint8))
    try:
        reader.bound.take(decompressed_stream_nbytes(stream), "compressed data")
        batch = pa.ipc.open_stream(stream).read_next_batch()
        batch.validate()
        for array, field in zip(batch.columns, batch.schema, strict=True):
            check_size([array], field, reader.bound)
    except (pa.ArrowException, StopIteration, OSError) as error:
        raise FormatError(f"the final observations of a buffer must be an intact Arrow stream: {error}") from error
    form = json.loads(batch.schema.metadata[b"form"])
    count = len(form["kinds"])
    check_structure(form["tree"], count)
    columns = [
        column_from_arrow(batch.column(i), batch.schema.field(i), allow_pickle=reader.allow_pickle)
        for i in range(count)
    ]
    rows, owners = (batch.column(name).to_numpy() for name in ("rows", "owners"))
    check_finals(rows, owners, int(form["room"]), table.rings)
    return {"rows": rows, "owners": owners, "room": int(form["room"]), "found": form | {"columns": columns}}

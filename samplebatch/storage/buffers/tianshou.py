"""Conversion of replay buffers to and from Tianshou's attributes and HDF5 files.

Objects of Tianshou's classes are written as stubs. Unpickling the stubs requires Tianshou, but not this library.

The columns of an HDF5 file are datasets with one row per slot; slots without a step occupy no disk space. Open episodes
and the sampler are stored in Tianshou's layout. Values that Tianshou does not support are stored as attributes of the
dataset `_indices`; Tianshou ignores these attributes and never writes them. Checksums of all bytes follow the end of
the HDF5 data (see `checksums`).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from math import inf, prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.batch.inert_pickle import Foreign, Named, resolve_stubs
from samplebatch.batch.nested.node import values_of
from samplebatch.buffer.samplers import Prioritized, Sampler
from samplebatch.buffer.store import DenseStore, Store, TorchStore
from samplebatch.buffer.stores import CompressedStore, Stores
from samplebatch.buffer.table import Table
from samplebatch.column.arrow import arrow_field_and_array, check_size, column_from_arrow
from samplebatch.column.arrow_bodies import decompressed_stream_nbytes
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import FormatError
from samplebatch.storage.buffers import state as buffer_state
from samplebatch.storage.foreign.damage import name_buffer_damage
from samplebatch.storage.foreign.hdf5 import TYPE_KEY, Hdf5Reader, Ranges, bound_of
from samplebatch.storage.hdf5 import hdf5_file, hdf5_writer, to_hdf5, write_value

if TYPE_CHECKING:
    import h5py

    from samplebatch.buffer.replay import ReplayBuffer


_BUFFERS = "tianshou.data.buffer"
_PLAIN_BUFFER = (f"{_BUFFERS}.buffer_base", "ReplayBuffer")
_PRIORITIZED_BUFFER = (f"{_BUFFERS}.prio", "PrioritizedReplayBuffer")
_HINDSIGHT_BUFFER = (f"{_BUFFERS}.her", "HERReplayBuffer")
_BATCH = ("tianshou.data.batch", "Batch")
_TREE = ("tianshou.data.utils.segtree", "SegmentTree")


class _Module:
    """Stub of a module, pickled by the module's name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.name,)


class _Class:
    """Stub of a class, pickled by the names of its module and class."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (_Module(self.module), self.name)


class Standing:
    """Stub of an object whose class need not be installed; unpickling the stub creates the original object.

    `state` is passed to the object's `__setstate__`, or is set as the object's attributes.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(Standing(("argparse", "Namespace"), {"a": 3})))
    Namespace(a=3)
    """

    def __init__(self, kind: tuple[str, str], state: dict[str, Any]) -> None:
        self.kind, self.state = kind, state

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (_Class(*self.kind),), self.state


def _batch_stub(values: dict[str, Any]) -> Standing:
    return Standing(_BATCH, values)


def _segment_tree_stub(weights: npt.NDArray[np.float64]) -> Standing:
    """Create a stub of a Tianshou segment tree that contains `weights`, shape (n,).

    >>> _segment_tree_stub(np.array([1.0, 2.0, 3.0])).state["_value"]
    array([0., 6., 3., 3., 1., 2., 3., 0.])
    """
    n = len(weights)
    bound = 1
    while bound < n:
        bound *= 2
    value = np.zeros(2 * bound)
    value[bound : bound + n] = weights
    level = bound // 2
    while level:
        value[level : 2 * level] = value[2 * level : 4 * level].reshape(level, 2).sum(1)
        level //= 2
    return Standing(_TREE, {"_size": n, "_bound": bound, "_value": value})


_OPTIONS = ("stack_num", "ignore_obs_next", "save_only_last_obs", "sample_avail", "alpha", "beta")
_CURSORS = ("_insertion_idx", "_size", "_ep_start_idx", "_ep_len", "_ep_return")
_EPSILON = "_PrioritizedReplayBuffer__eps"

Floats = npt.NDArray[np.float64]


class AttributeReader(Protocol):
    """Reader interface for a buffer's non-numeric attributes, stored in a file or in memory."""

    allow_pickle: bool

    def value(self, x: Any, /) -> Any:
        """Return an attribute."""

    def inert(self, x: Any, /) -> Any:
        """Return an attribute, with stubs in place of objects."""

    def raw(self, x: Any, /) -> npt.NDArray[Any]:
        """Return the undecoded bytes of an attribute."""


# Writing


def attributes_for(buffer: Any) -> buffer_state.State:
    """Return the attributes of the equivalent Tianshou buffer, without the rows.

    The single-ring buffers contain only rewards and flags, because Tianshou would otherwise store all rows twice.
    The single-ring buffers of a hindsight buffer contain all columns, because Tianshou reads goals from these buffers.
    """
    table, n = buffer._table, 1 if buffer._ring is not None else buffer._table.rings.n
    rings = table.rings.state_dict(buffer._ring)
    state = _common_state(buffer, buffer.maxsize)
    sampler = buffer._sampler
    weights = (
        sampler.tree.weights[buffer._start : buffer._start + buffer.maxsize]
        if isinstance(sampler, Prioritized)
        else None
    )
    state |= _sampler_state(sampler, weights)
    if "buffer_num" not in buffer.__dict__:
        return state | _hindsight_state(buffer) | _cursors(rings, 0) | {"last_index": buffer.last_index}
    offsets = table.rings.edges
    parts = np.empty(n, object)
    for ring in range(n):
        start, stop = offsets[ring : ring + 2].tolist()
        part_weights = None if weights is None else weights[start:stop]
        part = _common_state(buffer, stop - start) | _cursors(rings, ring) | _sampler_state(sampler, part_weights)
        part["last_index"] = table.rings.last_index[ring : ring + 1] - start
        hindsight = _hindsight_state(buffer)
        # Tianshou's relabelling reads goals from the single-ring buffers.
        tree = table.columns.tree
        names = tree.keys() if hindsight else tree.keys() & {"rew", "terminated", "truncated", "done"}
        part["_meta"] = rows_for({name: tree[name] for name in names}, np.arange(start, stop))
        parts[ring] = Standing(_part_kind(buffer, weights), part | hindsight)
    if "cached_buffer_num" in buffer.__dict__:
        state |= {"main_buffer": parts[0], "cached_buffers": parts[1:], "cached_buffer_num": buffer.cached_buffer_num}
    return state | {
        **dict.fromkeys(("_insertion_idx", "_size", "_ep_start_idx", "_ep_len"), 0),
        "_ep_return": 0.0,
        "last_index": buffer.last_index,
        "buffer_num": n,
        "buffers": parts,
        "_offset": offsets[:-1],
        "_extend_offset": offsets,
        "_lengths": rings["sizes"],
    }


def rows_for(tree: Mapping[str, Any], slots: npt.NDArray[np.intp]) -> Standing:
    """Create a stub of a Tianshou batch with the rows of some slots."""
    values = {
        name: child.take(slots) if isinstance(child, Store) else rows_for(child, slots) for name, child in tree.items()
    }
    return _batch_stub(values)


def _common_state(buffer: Any, maxsize: int) -> buffer_state.State:
    options = buffer.options
    return {
        "options": {name: options[name] for name in _OPTIONS if name in options},
        "maxsize": maxsize,
        "stack_num": buffer.stack_num,
        "_indices": np.arange(maxsize),
        "_save_obs_next": not options["ignore_obs_next"],
        "_save_only_last_obs": bool(options["save_only_last_obs"]),
        "_sample_avail": bool(options["sample_avail"]),
    }


def _cursors(rings: buffer_state.State, ring: int) -> buffer_state.State:
    base = int(rings["maxsizes"][:ring].sum())
    total = rings["returns"][ring]
    return {
        "_insertion_idx": int(rings["cursors"][ring]),
        "_size": int(rings["sizes"][ring]),
        "_ep_start_idx": int(rings["starts"][ring]) - base,
        "_ep_len": int(rings["writes"][ring] - rings["began"][ring]),
        "_ep_return": total if total.ndim else float(total),
    }


def _sampler_state(sampler: Any, weights: Floats | None) -> buffer_state.State:
    if weights is None:
        return {}
    return {
        "_alpha": sampler.alpha,
        "_beta": sampler.beta,
        "_weight_norm": sampler.weight_norm,
        "_max_prio": sampler.largest,
        "_min_prio": sampler.smallest,
        "weight": _segment_tree_stub(weights),
        _EPSILON: float(np.finfo(np.float32).eps),
    }


def _hindsight_state(buffer: Any) -> buffer_state.State:
    if "compute_reward_fn" not in buffer.__dict__:
        return {}
    names = ("horizon", "future_p", "compute_reward_fn")
    return {name: getattr(buffer, name) for name in names} | {
        "_original_meta": _batch_stub({}),
        "_altered_indices": np.array([]),
    }


def _part_kind(buffer: Any, weights: Floats | None) -> tuple[str, str]:
    if weights is not None:
        return _PRIORITIZED_BUFFER
    hindsight = "compute_reward_fn" in buffer.__dict__
    return _HINDSIGHT_BUFFER if hindsight else _PLAIN_BUFFER


# Reading


def sampler_in(
    about: buffer_state.State,
    attributes: buffer_state.State,
    children: Mapping[str, Any],
    table: Table,
    reader: AttributeReader,
) -> Sampler:
    """Restore the sampler from Tianshou's attributes, or from this library's description."""
    if "weight" not in children:
        return buffer_state.sampler_from_state(about["sampler"], table.rings.capacity, table.rings.stored_slots())
    tree = reader.inert(children["weight"])
    state = tree.state if isinstance(tree, Foreign) else {}
    value, bound = resolve_stubs(state["_value"]), int(state["_bound"])
    slots = table.rings.stored_slots()
    sampler_state = about["sampler"]["known"] | {
        "largest": attributes["_max_prio"],
        "smallest": attributes["_min_prio"],
        "weights": np.asarray(value, np.float64)[bound + slots],
    }
    return buffer_state.sampler_from_state({"kind": "prioritized", "known": sampler_state}, table.rings.capacity, slots)


def description_in(
    cls: Any, stored: buffer_state.State, children: Mapping[str, Any], reader: AttributeReader
) -> buffer_state.State:
    """Derive the description of a buffer from Tianshou's attributes."""
    parts = _parts(stored, children, reader)
    stored = {name: parts[0][name] for name in ("horizon", "future_p") if name in parts[0]} | stored
    maxsizes = [int(part["maxsize"]) for part in parts]
    options: buffer_state.State = {
        "stack_num": int(stored["stack_num"]),
        "ignore_obs_next": not stored["_save_obs_next"],
        "save_only_last_obs": bool(stored["_save_only_last_obs"]),
        "sample_avail": bool(stored["_sample_avail"]),
    }
    attributes: buffer_state.State = {}
    if "cached_buffer_num" in stored:
        count = int(stored["cached_buffer_num"])
        attributes = {"cached_buffer_num": count, "_order": list(range(count))}
    if "horizon" in stored:
        chance = float(stored["future_p"])
        future_k = inf if chance == 1.0 else 1.0 / (1.0 - chance)
        attributes |= {"horizon": int(stored["horizon"]), "future_k": future_k, "future_p": chance}
    sampler: buffer_state.State = {"kind": "uniform", "known": 1}
    if "weight" in children:
        settings = {name: stored[f"_{name}"] for name in ("alpha", "beta")}
        options |= settings | {"weight_norm": bool(stored.get("_weight_norm", True))}
        sampler = {
            "kind": "prioritized",
            "known": settings | {"weight_norm": options["weight_norm"], "stratified": False},
        }
    return {
        "version": buffer_state.VERSION,
        "class": _class_name(cls, stored, children, len(set(maxsizes)) == 1),
        "set_up": {"maxsizes": maxsizes, "options": options},
        "own": attributes | {"stack_num": int(stored["stack_num"])},
        "missing": ["compute_reward_fn"] if "horizon" in stored else [],
        "generator": buffer_state.generator_state(np.random.default_rng(_seed(children, reader))),
        "sampler": sampler,
        "rings": _rings(parts, maxsizes),
        "stores": buffer_state.stores_state(Stores(max_open=2 * len(parts) + 4)),
    }


def rings_in(about: buffer_state.State) -> buffer_state.State:
    """Validate and return the ring state in a buffer's description."""
    rings = {name: np.array(value) for name, value in about["rings"].items()} | {"together": about["rings"]["together"]}
    buffer_state.check_rings(rings)
    return rings


def table_in(
    about: buffer_state.State, attributes: buffer_state.State, rings: buffer_state.State, columns: buffer_state.State
) -> Table:
    """Create a table from columns that have one row per slot."""
    keeps_next, last_frame = bool(attributes["_save_obs_next"]), bool(attributes["_save_only_last_obs"])
    stores = buffer_state.stores_from_state(about["stores"])
    table = Table(rings["maxsizes"].tolist(), stores, keeps_next=keeps_next, last_frame=last_frame)
    if "done" in columns and "terminated" not in columns:
        columns |= {"terminated": columns["done"], "truncated": np.zeros(len(columns["done"]), np.bool_)}
    capacity = table.rings.capacity
    if not columns and rings["sizes"].any():
        raise FormatError("a buffer with rows must have columns, got none")
    prepared = table.columns.fit(columns, capacity, keep=True)
    table.columns.write(prepared, slice(0, capacity))
    tree = table.columns.tree
    if tree:
        for name in ("terminated", "truncated", "done"):
            _check_column(tree, name, np.bool_)
        _check_column(tree, "rew", np.float64)
    table.rings.load_state_dict(rings)
    return table


def _check_column(tree: Mapping[str, Any], name: str, dtype: Any) -> None:
    store = tree.get(name)
    actual = store.values.dtype if type(store) is DenseStore else None
    if actual != dtype:
        described = actual or ("no column" if store is None else f"a {type(store).__name__}")
        raise FormatError(f"column {name!r} of a buffer must be {np.dtype(dtype)}, got {described}")


def _parts(
    attributes: buffer_state.State, children: Mapping[str, Any], reader: AttributeReader
) -> list[buffer_state.State]:
    if "buffers" not in children:
        total = reader.value(children["_ep_return"]) if "_ep_return" in children else attributes["_ep_return"]
        return [attributes | {"_ep_return": total}]
    buffers = reader.inert(children["buffers"])
    if not isinstance(buffers, np.ndarray) or not all(
        isinstance(part, Foreign) and isinstance(part.state, dict) for part in buffers.tolist()
    ):
        raise FormatError("'buffers' must be pickled Tianshou buffers, got other values")
    names = (*_CURSORS, "maxsize", "horizon", "future_p")
    parts: list[buffer_state.State] = resolve_stubs(
        [{name: part.state[name] for name in names if name in part.state} for part in buffers.tolist()]
    )
    return parts


def reward_function_in(children: Mapping[str, Any], reader: AttributeReader) -> buffer_state.State:
    """Unpickle a hindsight buffer's reward function, an attribute of the buffer or of the buffer's first ring.

    Returns a dict with the argument name and the function. The dict is empty if there is no function, or if pickles are
    not permitted and the caller must pass the function.
    """
    if not reader.allow_pickle:
        return {}
    name = "compute_reward_fn"
    if name in children:
        return {name: reader.value(children[name])}
    buffers = reader.inert(children["buffers"]) if "buffers" in children else np.zeros(0)
    first = buffers.reshape(-1)[0] if isinstance(buffers, np.ndarray) and buffers.size else None
    if not isinstance(first, Foreign) or not isinstance(first.state, dict) or name not in first.state:
        return {}
    function = first.state[name]
    if not isinstance(function, Named):
        raise FormatError(f"{name!r} must be a function of a module, got another object; pass {name}=...")
    module, _, function_name = function.name.rpartition(".")
    return {
        name: unpickle([f"c{module}\n{function_name}\n.".encode()], repr(name), allow_pickle=reader.allow_pickle)[0]
    }


def _rings(parts: list[buffer_state.State], maxsizes: list[int]) -> buffer_state.State:
    cursors, sizes, starts, lengths = (np.array([int(part[name]) for part in parts]) for name in _CURSORS[:4])
    sizes_of = np.array(maxsizes)
    # Write counts as if each ring had been filled or overwritten once.
    writes = np.where(sizes < sizes_of, sizes, sizes_of + cursors)
    returns = [np.asarray(part["_ep_return"], np.float64) for part in parts]
    widest = max((total.shape for total in returns), key=len)
    alike = len({*map(int, cursors)}) == len({*map(int, sizes)}) == len({*maxsizes}) == 1
    return {
        "maxsizes": sizes_of,
        "cursors": cursors,
        "sizes": sizes,
        "writes": writes,
        "began": writes - lengths,
        "starts": starts + np.cumsum(sizes_of) - sizes_of,
        # A return is a scalar zero until the first episode with vector rewards ends.
        "returns": np.stack([np.broadcast_to(total, widest) for total in returns]),
        "origins": np.zeros(len(parts), np.int64),
        "together": alike,
    }


def _class_name(cls: Any, attributes: buffer_state.State, children: Mapping[str, Any], even: bool) -> str:
    """Infer the class of a Tianshou buffer from its attributes, because files do not contain the class name."""
    kind = "Prioritized" if "weight" in children else "HER" if "horizon" in attributes else ""
    if "cached_buffer_num" in attributes:
        return "CachedReplayBuffer"
    if "buffer_num" not in attributes:
        return f"{kind}ReplayBuffer"
    manager = f"{kind}ReplayBufferManager"
    return f"{kind}VectorReplayBuffer" if even and cls.__name__ != manager else manager


def _seed(children: Mapping[str, Any], reader: AttributeReader) -> Any:
    """Derive a seed from the state of Tianshou's generator, because the libraries use different generator types."""
    data = np.asarray(reader.raw(children["_random_state"])).tobytes() if "_random_state" in children else b""
    return cast("Any", np.frombuffer(hashlib.sha256(data).digest(), np.uint32).tolist())


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


# Writing HDF5 files


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
    """Return whether a store has rows of equal shape and a dtype that HDF5 supports."""
    if isinstance(store, TorchStore):
        return store.dtype.name == str(store.torch_dtype).removeprefix("torch.")
    if isinstance(store, DenseStore):
        return store.dtype.kind in "biufc"
    return isinstance(store, CompressedStore) and store.take(np.zeros(0, np.intp)).dtype.kind in "biufc"


def _finals(buffer: Any) -> npt.NDArray[np.uint8] | None:
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


# Reading HDF5 files


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
    buffer: _Buffer = buffer_state.make_buffer(cls, about, table, sampler, stored | missing)
    return buffer


def _parts_of(
    cls: Any, file: h5py.File, reader: Hdf5Reader
) -> tuple[buffer_state.State, Table, Sampler, dict[str, Any]]:
    """Read the description, table and sampler of a buffer; also read pickled attributes if pickles are allowed."""
    children = reader.children(file)
    attributes = reader.attributes(file) | _numbers(children, reader)
    notes = reader.attributes(children["_indices"])
    about = json.loads(notes[_ABOUT]) if _ABOUT in notes else description_in(cls, attributes, children, reader)
    rings = rings_in(about)
    columns = values_of(reader.of_rows(*_counting(rings)).read(children["_meta"]))
    table = table_in(about, attributes, rings, dict(columns or {}))
    if table.finals is not None and _FINALS in notes:
        table.finals.load_state_dict(_read_finals(notes[_FINALS], table, reader))
        buffer_state.check_final_shapes(table)
    sampler = sampler_in(about, attributes, children, table, reader)
    return about, table, sampler, reward_function_in(children, reader)


def _counting(rings: buffer_state.State) -> tuple[int, Ranges]:
    """Return the total number of slots, and the ranges of slots with rows."""
    stops = np.cumsum(rings["maxsizes"])
    starts = stops - rings["maxsizes"]
    return int(stops[-1]), list(zip(starts.tolist(), (starts + rings["sizes"]).tolist(), strict=True))


def _numbers(children: Mapping[str, Any], reader: Hdf5Reader) -> buffer_state.State:
    import h5py

    numbers: buffer_state.State = {}
    for name, child in children.items():
        kind = reader.attributes(child).get(TYPE_KEY)
        if isinstance(child, h5py.Dataset) and kind not in ("ndarray", "Tensor"):
            value = reader.inert(child) if child.size < _MAX_PICKLED_NUMBER else None
            if isinstance(value, np.generic | int | float):
                numbers[name] = value
    return numbers


def _read_finals(data: Any, table: Table, reader: Hdf5Reader) -> buffer_state.State:
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
    buffer_state.check_structure(form["tree"], count)
    columns = [
        column_from_arrow(batch.column(i), batch.schema.field(i), allow_pickle=reader.allow_pickle)
        for i in range(count)
    ]
    rows, owners = (batch.column(name).to_numpy() for name in ("rows", "owners"))
    buffer_state.check_finals(rows, owners, int(form["room"]), table.rings)
    return {"rows": rows, "owners": owners, "room": int(form["room"]), "found": form | {"columns": columns}}

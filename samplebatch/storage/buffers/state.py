"""Conversion of a buffer's state to plain values, arrays and columns, and validation of decoded states.

All file formats and `state_dict` store the converted state. Columns are the only library classes in the state, so that
any format can store the state. Every part is validated when the state is decoded, because files are untrusted.
"""

from __future__ import annotations

import contextlib
import pickle
import zlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import NoneType
from typing import Any

import numpy as np

from samplebatch.arguments import describe_value
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.nested.node import KINDS, TENSOR
from samplebatch.batch.tree import named_leaves
from samplebatch.buffer.columns import Columns, leaves_of
from samplebatch.buffer.env_steps import EnvSteps
from samplebatch.buffer.extending import Tail
from samplebatch.buffer.final_observations import NAME
from samplebatch.buffer.multi_agent import FRAGMENT_END, Form, MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Rings
from samplebatch.buffer.samplers import Prioritized, Sampler, Uniform
from samplebatch.buffer.stores import Stores
from samplebatch.buffer.table import Table
from samplebatch.buffer.writing import FLAGS
from samplebatch.column.checksum import checksum
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.errors import ArgumentError, ColumnMismatchError, FormatError, RingError, SampleBatchError, near_names
from samplebatch.names import PolicyID

State = dict[str, Any]
"""Plain values, arrays, tensors and columns by name, without other library classes."""

_RINGS = ("maxsizes", "cursors", "sizes", "writes", "began", "starts", "origins")


def check_structure(tree: Any, count: int) -> None:
    """Check that a nested structure of columns contains each column index exactly once."""
    indices: list[Any] = []
    pending = [tree]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict) and all(isinstance(name, str) for name in inner):
            pending += inner.values()
        else:
            indices.append(inner)
    if any(type(index) is not int for index in indices) or sorted(indices) != list(range(count)):
        raise FormatError(f"the structure of {count} columns must contain each index once, got others; it is damaged")


def check_rings(state: Mapping[str, Any]) -> None:
    """Check that the cursors, sizes and episodes of rings are within the rings' slots.

    >>> state = Rings([4]).state_dict()
    >>> check_rings(state)
    >>> check_rings(state | {"cursors": np.array([7])})
    Traceback (most recent call last):
    samplebatch.errors.FormatError: the state of rings must have cursors and sizes within
        their slots, got others; ...
    """
    try:
        parts = {name: np.asarray(state[name]) for name in _RINGS}
        returns, together = np.asarray(state["returns"], np.float64), bool(state["together"])
        n = len(parts["maxsizes"])
        if not n or any(part.shape != (n,) or part.dtype.kind not in "iu" for part in parts.values()):
            raise ValueError("its parts must be integers, one per ring, got others")
        if returns.shape[:1] != (n,):
            raise ValueError(f"it must have one return for each of {n} rings, got returns of shape {returns.shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the state of rings must be valid: {error}") from error
    maxsizes, cursors, sizes, writes, began, starts, origins = (part.astype(np.int64) for part in parts.values())
    bases = np.cumsum(maxsizes) - maxsizes
    offsets = starts - bases
    inside = (
        (maxsizes >= 0)
        & (sizes >= 0)
        & (sizes <= maxsizes)
        & (cursors >= 0)
        & (cursors < np.maximum(maxsizes, 1))
        & ((sizes == maxsizes) | (cursors == sizes))
        & (offsets >= 0)
        & (offsets < np.maximum(maxsizes, 1))
        & (writes - origins >= sizes)
        & (origins >= 0)
        & (began <= writes)
    )
    alike = all(len(set(part.tolist())) == 1 for part in (maxsizes, cursors, sizes, writes))
    if not inside.all() or (together and not alike):
        raise FormatError(
            "the state of rings must have cursors and sizes within their slots, got others; it is damaged"
        )


def check_finals(rows: Any, owners: Any, room: int, rings: Rings) -> None:
    """Check that final observations have distinct rows and that each final observation belongs to a slot.

    rows: row of each final observation.
    owners: slot of each final observation, plus one.
    """
    is_distinct = len(set(rows.tolist())) == len(rows) == len(owners)
    inside = ((rows >= 0) & (rows < room)).all() and ((owners > 0) & (owners <= rings.capacity)).all()
    if not is_distinct or not inside or not rings.n <= room <= len(rows) + 2 * rings.n + 64:
        raise FormatError("final observations must have distinct rows within their slots, got others; it is damaged")


def check_flags(table: Table) -> None:
    """Check that the episode flags of a table with rows are boolean columns."""
    if len(table.rings):
        for name in (*FLAGS, "done"):
            _check_flag(table, name)


def _check_flag(table: Table, name: str) -> None:
    store = table.columns.tree.get(name)
    values = getattr(store, "values", None)
    if not isinstance(values, np.ndarray) or values.dtype != np.bool_ or values.shape != (table.rings.capacity,):
        raise FormatError(f"column {name!r} of a buffer must have one flag per row, got another column; it is damaged")


def check_fragments(buffers: Mapping[PolicyID, ReplayBuffer], forms: Mapping[PolicyID, Form]) -> None:
    """Check that each policy has a `Form`, and that stored rows have valid fragment ends and rewards."""
    for policy, buffer in buffers.items():
        table = buffer._table
        if policy not in forms:
            raise FormatError(f"policy {policy!r} must have a form of its rows, got none; it is damaged")
        if not len(table.rings):
            continue
        _check_flag(table, FRAGMENT_END)
        rewards = table.columns.tree.get("rew")
        if rewards is None or isinstance(rewards, dict) or {_kind(rewards), forms[policy].rewards.kind} - set("biuf"):
            raise FormatError(
                f"column 'rew' of policy {policy!r} must have one number per row, got other values; it is damaged"
            )


def _kind(store: Any) -> str:
    kind: str = store.to_column(np.zeros(0, np.intp)).to_numpy().dtype.kind
    return kind


def check_final_shapes(table: Table) -> None:
    """Check that final observations have the same names and row shapes as the observations."""
    if table.finals is None or not table.finals.known or "obs" not in table.columns.tree:
        return
    no_rows = np.zeros(0, np.intp)
    shapes = [
        {path: store.to_column(no_rows).row_shape for path, store in leaves_of(columns.tree[name])}
        for columns, name in ((table.columns, "obs"), (table.finals.columns, NAME))
    ]
    for path, shape in shapes[0].items():
        if shapes[1].get(path) != shape:
            name = ".".join((NAME, *path))
            raise FormatError(
                f"column {name!r} must have row shape {shape}, as observations, got {shapes[1].get(path)}"
            )


_SAMPLERS: dict[str, type[Sampler]] = {"uniform": Uniform, "prioritized": Prioritized}
_GENERATORS = frozenset(("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"))


def plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays in dicts and lists to Python values that JSON supports.

    >>> plain({"a": np.arange(3), "b": (np.float64(0.5), None)})
    {'a': [0, 1, 2], 'b': [0.5, None]}
    """
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufU":
        return value.tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    raise TypeError(
        f"a value must be plain (a number, string, None, array, dict or list), got a {type(value).__name__}"
    )


def is_plain(value: Any) -> bool:
    """Return whether `plain` can convert a value."""
    try:
        plain(value)
    except TypeError:
        return False
    return True


# Generators


def generator_state(rng: np.random.Generator) -> State:
    """Return the state of a random generator as plain values."""
    state: State = plain(rng.bit_generator.state)
    return state


def generator_from_state(state: Any) -> np.random.Generator:
    """Create a random generator that continues from a state returned by `generator_state`.

    >>> rng = np.random.default_rng(3)
    >>> again = generator_from_state(generator_state(rng))
    >>> bool(rng.integers(100) == again.integers(100))
    True
    """
    try:
        name = state["bit_generator"]
        if name not in _GENERATORS:
            raise ValueError(f"its type must be one of {', '.join(sorted(_GENERATORS))}, got {describe_value(name)}")
        bits = getattr(np.random, name)()
        bits.state = _arrays(state)
    except (TypeError, LookupError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(f"the state of a generator must be a NumPy generator's: {error}") from error
    return np.random.Generator(bits)


def _arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {name: _arrays(inner) for name, inner in state.items()}
    return np.array(state, np.uint64) if isinstance(state, list) else state


# Samplers


def sampler_state(sampler: Sampler, slots: Any) -> State:
    """Return the kind and settings of a sampler, and the weights of `slots`, shape (n,)."""
    for kind, cls in _SAMPLERS.items():
        if type(sampler) is cls:
            return {"kind": kind, "known": sampler.state_dict(slots)}
    raise FormatError(f"a buffer must have a sampler of this library to be saved, got a {type(sampler).__name__}")


def sampler_from_state(state: Any, capacity: int, slots: Any) -> Sampler:
    """Create a sampler from its state for a table with `capacity` slots; `slots`, shape (n,), contain rows."""
    try:
        return _SAMPLERS[state["kind"]].from_state_dict(capacity, slots, state["known"])
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(f"the state of a sampler must be valid: {error}") from error


# Tables


def table_state(table: Table, ring: int | None = None) -> State:
    """Return the state of a table or one ring: cursors, rows and final observations."""
    state = table.state_dict(ring)
    finals = state["finals"]
    return state | {
        "stores": stores_state(state["stores"]),
        "columns": _arrays_of(state["columns"]),
        "finals": None if finals is None else finals | {"found": _arrays_of(finals["found"])},
    }


def table_from_state(state: Mapping[str, Any], stores: Stores | None = None) -> Table:
    """Create a table from its state.

    stores: factory of the stores; None to create the factory from the state.
    """
    try:
        check_rings(state["rings"])
        if stores is None:
            stores = stores_from_state(state["stores"])
        finals = state["finals"]
        table_parts = {
            "rings": state["rings"],
            "stores": stores,
            "columns": _columns_of(state["columns"]),
            "finals": None if finals is None else finals | {"found": _columns_of(finals["found"])},
            "keeps_next": bool(state["keeps_next"]),
            "last_frame": bool(state["last_frame"]),
        }
        table = Table.from_state_dict(table_parts)
    except FormatError:
        raise
    except (SampleBatchError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise FormatError(f"the state of a buffer must be complete and consistent: {error}") from error
    check_final_shapes(table)
    return table


def stores_state(stores: Stores) -> State:
    """Return the options of a table's stores as plain values."""
    return {"compress": stores.compress, "ragged": stores.ragged, "most_open": stores.max_open}


def stores_from_state(state: Mapping[str, Any]) -> Stores:
    """Create a factory of stores from the options that `stores_state` returned."""
    compress, ragged = (tuple(map(str, state[name])) for name in ("compress", "ragged"))
    return Stores(compress=compress, ragged=ragged, max_open=int(state["most_open"]))


def _arrays_of(state: State) -> State:
    return {**state, "columns": [column.values for column in state["columns"]]}


def _columns_of(state: Mapping[str, Any]) -> State:
    """Replace the arrays and tensors of a state by columns, and check the number of columns."""
    columns = [_column(values, kind) for values, kind in zip(state["columns"], state["kinds"], strict=True)]
    if len(state["row_shapes"]) != len(columns):
        raise FormatError(
            f"the state of {len(columns)} columns must have one row shape per column, got {len(state['row_shapes'])}"
        )
    return {**state, "columns": columns}


def _column(values: Any, kind: str) -> Column:
    if isinstance(values, Column):
        return values
    return as_column(np.fromiter(values, object, len(values)) if kind == "object" else values, "column")


def structure_of(columns: Columns) -> State:
    """Return the nested structure of columns without their rows; see `Columns.state_dict`."""
    return columns.state_dict(np.zeros(0, np.intp))


CHECKSUMS = "checksums"
"""Key of the checksums in a state, by dotted part names."""

_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic)


def with_checksums(state: State) -> State:
    """Copy a state, and add a checksum per part."""
    return {**state, CHECKSUMS: _digest_parts(state)}


def check_state(state: Mapping[str, Any]) -> None:
    """Verify the checksums of a state; a state without checksums is accepted."""
    expected = state.get(CHECKSUMS)
    if expected is None:
        return
    if not isinstance(expected, Mapping):
        raise FormatError(
            f"the checksums of a buffer's state must be a dict, got {describe_value(expected)}; it is damaged"
        )
    digests = _digest_parts(state)
    missing = sorted(map(str, expected.keys() ^ digests.keys()))
    if missing:
        raise FormatError(f"the state of a buffer must have one checksum per part, got an unmatched {missing[0]!r}")
    for name, digest in digests.items():
        if type(expected[name]) is not int or digest != expected[name]:
            raise FormatError(
                f"the state of a buffer must match its checksums, got a changed {_describe_part(name, state)}"
            )


def _digest_parts(state: Mapping[str, Any]) -> dict[str, int]:
    """Compute a checksum per part name; parts with equal names, such as policies 1 and "1", share one checksum."""
    digests: dict[str, int] = {}
    for name, value in _parts(state):
        digests[name] = _digest(value, digests.get(name, 0))
    return digests


def _parts(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of each part of a state; parts are leaves of nested dicts, and single columns."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if name == CHECKSUMS:
            continue
        if isinstance(value, Mapping) and value:
            yield from _parts(value, f"{name}.")
        elif isinstance(value, list) and value and key == "columns":
            yield from ((f"{name}.{index}", column) for index, column in enumerate(value))
        else:
            yield name, value


def _describe_part(part: str, state: Mapping[str, Any]) -> str:
    """Return the label of a part for error messages: the column name, or the part name if the state is damaged."""
    where, _, index = part.rpartition(".columns.")
    with contextlib.suppress(KeyError, TypeError, AttributeError, RecursionError):
        tree: Any = state
        for key in where.split("."):
            tree = tree[key]
        for column, number in named_leaves(tree["tree"]):
            if str(number) == index:
                return f"column {column!r}"
    return repr(part)


def _digest(value: Any, crc: int = 0) -> int:
    """Compute a checksum of plain values, arrays, tensors and columns, or of the class name of another object."""
    kind = type(value)
    crc = zlib.crc32(kind.__name__.encode(), crc)
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            crc = _digest(value[key], _digest(key, crc))
    elif isinstance(value, list | tuple):
        crc = zlib.crc32(str(len(value)).encode(), crc)
        for inner in value:
            crc = _digest(inner, crc)
    elif isinstance(value, _VALUES):
        crc = zlib.crc32(repr(value).encode(errors="surrogatepass"), crc)
    elif isinstance(value, np.ndarray):
        crc = zlib.crc32(f"{value.dtype.str}{value.shape}".encode(), crc)
        if value.dtype.kind in "OT":
            crc = _digest(value.ravel().tolist(), crc)
        else:
            crc ^= checksum(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, Column):
        crc = _digest(value.__reduce_ex__(5)[1][1:], crc)
    elif isinstance(value, pickle.PickleBuffer | memoryview | bytearray):
        crc ^= checksum(value)
    elif KINDS[kind] == TENSOR:
        import torch

        crc = zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode(), crc)
        bits = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        crc ^= checksum(bits.numpy())
    return crc


VERSION = 1
"""Version of descriptions, and of states and files that contain them."""

_HOMES = {
    "ReplayBuffer": "replay",
    "ReplayBufferManager": "vector",
    "VectorReplayBuffer": "vector",
    "PrioritizedReplayBuffer": "prioritized",
    "PrioritizedReplayBufferManager": "prioritized",
    "PrioritizedVectorReplayBuffer": "prioritized",
    "CachedReplayBuffer": "vector",
    "ReservoirReplayBuffer": "reservoir",
    "HERReplayBuffer": "hindsight",
    "HERReplayBufferManager": "hindsight",
    "HERVectorReplayBuffer": "hindsight",
}
"""Modules of the classes that a description may contain."""

_BOUND = frozenset(("_table", "_ring", "_start", "_sampler", "_rng", "_parts"))
"""Attributes that are stored in another form or not stored."""


def describe(buffer: Any) -> State:
    """Describe a buffer without its rows: class, plain attributes, and the names of all other attributes."""
    attributes = {name: value for name, value in buffer.__dict__.items() if name not in _BOUND}
    unit = buffer.action_unit
    return {
        **({} if unit is None else {"action_unit": unit.describe()}),
        "version": VERSION,
        "class": type(buffer).__name__,
        "own": {name: plain(value) for name, value in attributes.items() if is_plain(value)},
        "missing": [name for name, value in attributes.items() if not is_plain(value)],
    }


def describe_without_rows(buffer: ReplayBuffer) -> State:
    """Describe a buffer, its generator, sampler, rings and stores for files that store the rows separately."""
    table = buffer._table
    return describe(buffer) | {
        "generator": generator_state(buffer._rng),
        "sampler": sampler_state(buffer._sampler, np.zeros(0, np.intp)),
        "rings": table.rings.state_dict(buffer._ring),
        "stores": stores_state(table.columns.stores),
    }


def check_description(described: Mapping[str, Any]) -> None:
    """Check that a description describes a buffer and has a supported version."""
    if not isinstance(described, Mapping) or not isinstance(described.get("class"), str):
        raise FormatError(f"the state must be a dict with the class of a buffer, got {describe_value(described)}")
    version = described.get("version")
    if type(version) is not int or version != VERSION:
        raise FormatError(f"the buffer must have version {VERSION}, got version {describe_value(version)}")


def make_buffer(cls: Any, described: Mapping[str, Any], table: Table, sampler: Sampler, missing: dict[str, Any]) -> Any:
    """Create a buffer from its description, table and sampler.

    described: result of `describe`, extended by the state of the generator.
    missing: attributes that files cannot store, by argument name.
    """
    buffer = make_rowless(cls, described, missing)
    give_rows(buffer, table, sampler, generator_from_state(described.get("generator")))
    buffer.action_unit = action_unit_in(described)
    return buffer


def action_unit_in(described: Mapping[str, Any]) -> ActionUnit | None:
    """Return the action unit that a description specifies, or None."""
    if described.get("action_unit") is None:
        return None
    try:
        return ActionUnit.from_description(described["action_unit"])
    except (ValueError, TypeError) as error:
        raise FormatError(f"the description of a buffer must have a valid unit of its actions: {error}") from error


def give_rows(buffer: Any, table: Table, sampler: Sampler, rng: np.random.Generator) -> None:
    """Set the table, sampler and generator of a buffer without rows."""
    check_flags(table)
    attributes, n, kind = buffer.__dict__, table.rings.n, type(buffer).__name__
    if attributes.get("buffer_num", n) != n or attributes.get("cached_buffer_num", n - 1) != n - 1:
        raise FormatError(f"a {kind} must have one ring per buffer, got {n}")
    if attributes.get("_order", [0]) != list(range(attributes.get("cached_buffer_num", n))):
        raise FormatError(f"attribute '_order' of a {kind} must list its rings, got others; it is damaged")
    if buffer.stack_num > max(table.rings.capacity, _MAX_STACK):
        raise FormatError(f"attribute 'stack_num' of a {kind} must be at most its steps, got {buffer.stack_num}")
    buffer._table = table
    buffer.maxsize = table.rings.capacity
    buffer._rng = rng
    buffer._use(sampler)


def make_rowless(cls: Any, described: Mapping[str, Any], missing: dict[str, Any]) -> Any:
    """Create a buffer of the described class without rows; the class must be `cls` or a subclass."""
    check_description(described)
    name = described["class"]
    kind = buffer_class(name, cls)
    attributes, required = described.get("own"), described.get("missing")
    if not isinstance(attributes, dict) or not isinstance(required, list):
        raise FormatError(f"the state of a {name} must have its attributes, got none; it is damaged")
    arguments = {str(attribute).lstrip("_"): str(attribute) for attribute in required}
    for argument in arguments:
        if argument not in missing:
            raise FormatError(
                f"{argument!r}, which files cannot store, must be passed for a {name}, got none; pass {argument}=..."
            )
    for argument in missing:
        if argument not in arguments:
            raise TypeError(f"a {name} has no argument {argument!r} to pass; {near_names(argument, arguments)}")
    buffer: Any = object.__new__(kind)
    strange = [attribute for attribute in attributes if callable(getattr(kind, attribute, None))]
    if strange:
        raise FormatError(f"the attributes of a {name} must be values, got method {strange[0]!r}; it is damaged")
    _check_attributes(name, attributes, set_up="set_up" in described)
    if "set_up" in described:
        buffer._set_up(described["set_up"]["maxsizes"], described["set_up"]["options"], 42)
    buffer.__dict__.update({attribute: value for attribute, value in attributes.items() if attribute not in _CHECKED})
    set_checked(buffer, attributes)
    buffer.__dict__.update({attribute: missing[argument] for argument, attribute in arguments.items()})
    return buffer


def buffer_class(name: str, cls: Any) -> Any:
    """Return the buffer class with a given name; the class must be `cls` or a subclass."""
    if name in _HOMES:
        import_module(f"samplebatch.buffer.{_HOMES[name]}")
    kinds = {kind.__name__: kind for kind in _with_subclasses(cls)}
    if name not in kinds:
        raise FormatError(f"the buffer must be a {cls.__name__}, got a {name}; open or load it with {name}")
    return kinds[name]


def set_checked(buffer: Any, attributes: Mapping[str, Any]) -> None:
    """Set the buffer attributes whose setters validate values."""
    for attribute in _CHECKED:
        if attribute not in attributes:
            continue
        try:
            if type(attributes[attribute]) is int and attributes[attribute] > _MAX_INT:
                raise OverflowError(
                    f"{attribute} must be at most {_MAX_INT}, got {describe_value(attributes[attribute])}"
                )
            setattr(buffer, attribute, attributes[attribute])
        except (ArgumentError, OverflowError) as error:
            kind = type(buffer).__name__
            raise FormatError(f"attribute {attribute!r} of a {kind} must be valid: {error}") from error


_MAX_INT = (1 << 63) - 1
"""Maximum number of steps: indices have 64 bits."""

_MAX_STACK = 1024
"""Maximum number of stacked frames in a smaller buffer, which repeats the first step of an episode."""

_CHECKED = ("stack_num", "horizon", "future_k", "future_p")
"""Attributes with validating setters. Setting the last one also sets the one before."""

_KINDS: dict[str, tuple[type, ...]] = {
    "maxsize": (int,),
    "options": (dict,),
    "_seed": (int, NoneType),
    "buffer_num": (int,),
    "cached_buffer_num": (int,),
    "seen": (int,),
}
"""Types of other attributes, if present."""

_OPTIONS = frozenset(("stack_num", "ignore_obs_next", "save_only_last_obs", "sample_avail"))


def _check_attributes(name: str, attributes: Mapping[str, Any], *, set_up: bool) -> None:
    """Check the presence and types of the buffer attributes whose setters do not validate values."""
    if not set_up:
        needed = {"options", "stack_num", "_seed"}
        needed |= (
            {"buffer_num", "_order"}
            if name.startswith("Cached") or name.endswith(("Manager", "VectorReplayBuffer"))
            else set()
        )
        needed |= {"horizon", "future_k"} if name.startswith("HER") else set()
        absent = needed - attributes.keys()
        if absent:
            raise FormatError(f"a {name} must have attribute {min(absent)!r}, got none; it is damaged")
    for attribute, kinds in _KINDS.items():
        value = attributes.get(attribute, kinds[0]())
        if type(value) not in kinds or (type(value) is int and value < 0):
            expected = "a non-negative integer" if int in kinds else f"a {kinds[0].__name__}"
            raise FormatError(
                f"attribute {attribute!r} of a {name} must be {expected}, got {describe_value(value)}; it is damaged"
            )
    if not set_up and (omitted := _OPTIONS - attributes["options"].keys()):
        raise FormatError(f"the options of a {name} must include {min(omitted)!r}, got none; it is damaged")
    if attributes.get("options", {}).get("reward_dtype", "float32") != "float32":
        dtype = describe_value(attributes["options"]["reward_dtype"])
        raise FormatError(f"option 'reward_dtype' of a {name} must be 'float32' or absent, got {dtype}; it is damaged")


def _with_subclasses(cls: type) -> list[type]:
    classes = [cls]
    inner: type
    for inner in cls.__subclasses__():
        classes += _with_subclasses(inner)
    return classes


def export_state(buffer: ReplayBuffer | MultiAgentReplayBuffer) -> State:
    """Return the state of a buffer; see `ReplayBuffer.state_dict`."""
    return with_checksums(_export_policies(buffer) if isinstance(buffer, MultiAgentReplayBuffer) else _export(buffer))


def _export(buffer: ReplayBuffer) -> State:
    table = buffer._table
    with table.lock:
        slots = table.rings.stored_slots() if buffer._ring is None else buffer._start + np.arange(len(buffer))
        return describe(buffer) | {
            "generator": generator_state(buffer._rng),
            "sampler": sampler_state(buffer._sampler, slots),
            "table": table_state(table, buffer._ring),
        }


def load_state(buffer: ReplayBuffer | MultiAgentReplayBuffer, state: Mapping[str, Any], *, verify: bool = True) -> None:
    """Replace the state of a buffer; see `ReplayBuffer.load_state_dict`."""
    if isinstance(buffer, MultiAgentReplayBuffer):
        if verify:
            check_state(state)
        _load_policies(buffer, state)
        return
    if buffer._ring is not None:
        raise RingError(
            "the target of a state must be an entire buffer, got a part of a buffer; load the entire buffer"
        )
    check_description(state)
    if verify:
        check_state(state)
    absent = {"table", "sampler", "generator"} - state.keys()
    if absent:
        raise FormatError(f"the state of a buffer must have {min(absent)!r}, got none")
    if state["class"] != type(buffer).__name__:
        raise ColumnMismatchError(f"the state must be a {type(buffer).__name__}'s, got a {state['class']}'s")
    with buffer._table.lock:
        _replace(buffer, state)


def _replace(buffer: ReplayBuffer, state: Mapping[str, Any]) -> None:
    """Replace the rows, sampler and generator of a buffer; an invalid state leaves the buffer unchanged."""
    current = buffer._table
    journal = current.journal
    if journal is not None:
        journal.begin([])
    table = table_from_state(state["table"], current.columns.stores)
    _check_alike(table, current)
    check_flags(table)
    sampler = sampler_from_state(state["sampler"], buffer.maxsize, table.rings.stored_slots())
    rng, unit = generator_from_state(state["generator"]), action_unit_in(state)
    if "seen" in buffer.__dict__:
        num_seen = state.get("own", {}).get("seen")
        if type(num_seen) is not int or num_seen < len(table.rings):
            raise FormatError(f"the state of a reservoir must count at least its rows as seen, got {num_seen!r}")
        buffer.__dict__["seen"] = num_seen
    current.action_unit = unit
    current.rings, current.columns = table.rings, table.columns
    if current.finals is not None and table.finals is not None:
        current.finals.adopt(table.finals.columns, table.finals.owners)
    buffer._rng = rng
    buffer._use(sampler)
    parts = buffer.__dict__.get("_parts")
    for part in () if parts is None else parts:
        part._sampler = sampler
    if journal is not None:
        if isinstance(sampler, Prioritized):
            sampler.mirror = journal.mirror_weights(sampler.tree.weights)
        journal.commit()


def _check_alike(table: Table, current: Table) -> None:
    sizes, expected = table.rings.maxsizes.tolist(), current.rings.maxsizes.tolist()
    if sizes != expected:
        raise ColumnMismatchError(f"the state must have rings of {expected[:8]} slots, got {sizes[:8]}")
    for name, option in (("keeps_next", "ignore_obs_next"), ("last_frame", "save_only_last_obs")):
        if getattr(table, name) != getattr(current, name):
            raise ColumnMismatchError(f"the state must have the same {option!r} as the buffer, got another")


def _export_policies(buffer: MultiAgentReplayBuffer) -> State:
    with buffer._lock:
        return {
            "buffers": {policy: export_state(policy_buffer) for policy, policy_buffer in buffer.buffers.items()},
            "forms": {policy: (sorted(form.flags), form.rewards.str) for policy, form in buffer._forms.items()},
            "tails": {policy: tuple(tail) for policy, tail in buffer._tails.items()},
            "steps": buffer._steps.state_dict(),
            "generator": generator_state(buffer._rng),
        }


def _load_policies(buffer: MultiAgentReplayBuffer, state: Mapping[str, Any]) -> None:
    buffers = {policy: buffer._new(policy) for policy in state["buffers"]}
    for policy, policy_buffer in buffers.items():
        load_state(policy_buffer, state["buffers"][policy], verify=False)
    rng, steps = generator_from_state(state["generator"]), EnvSteps.from_state_dict(state["steps"])
    forms = {policy: Form(frozenset(flags), np.dtype(dtype)) for policy, (flags, dtype) in state["forms"].items()}
    check_fragments(buffers, forms)
    tails = {policy: Tail(*tail) for policy, tail in state["tails"].items()}
    with buffer._lock:
        buffer._forms, buffer._tails = forms, tails
        buffer.buffers, buffer._rng, buffer._steps = buffers, rng, steps

"""Encoders of a buffer's parts into plain values, arrays and columns: generator, sampler, table.

Every file format and `state_dict` are made of these. The state holds no class of the library but columns, so any format
can carry it; decoding checks all of it, since it may come from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from samplebatch.buffer.columns import Columns
from samplebatch.buffer.samplers import Prioritized, Sampler, Uniform
from samplebatch.buffer.stores import Stores
from samplebatch.buffer.table import Table
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.errors import FormatError, SampleBatchError
from samplebatch.storage.untrusted_state import State, check_final_shapes, check_rings

_SAMPLERS: dict[str, type[Sampler]] = {"uniform": Uniform, "prioritized": Prioritized}
_GENERATORS = frozenset(("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"))


def plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays in dicts and lists to Python values that JSON can carry.

    Raises
    ------
    TypeError
        If there is anything else that JSON has not.

    Examples
    --------
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
    raise TypeError(f"a {type(value).__name__} is no plain value")


def is_plain(value: Any) -> bool:
    """Tell whether `plain` can convert a value."""
    try:
        plain(value)
    except TypeError:
        return False
    return True


# Generators


def generator_state(rng: np.random.Generator) -> State:
    """Return the state of a random generator as plain values."""
    found: State = plain(rng.bit_generator.state)
    return found


def generator_from_state(state: Any) -> np.random.Generator:
    """Make a random generator that continues from a state.

    Raises
    ------
    FormatError
        If it is no state of a generator of NumPy's.

    Examples
    --------
    >>> rng = np.random.default_rng(3)
    >>> again = generator_from_state(generator_state(rng))
    >>> bool(rng.integers(100) == again.integers(100))
    True
    """
    try:
        name = state["bit_generator"]
        if name not in _GENERATORS:
            raise ValueError(f"there is no generator {name!r}")
        bits = getattr(np.random, name)()
        bits.state = _arrays(state)
    except (TypeError, LookupError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(f"the state of a generator must be one of NumPy's: {error}") from error
    return np.random.Generator(bits)


def _arrays(state: Any) -> Any:
    """Convert lists back to arrays."""
    if isinstance(state, Mapping):
        return {name: _arrays(inner) for name, inner in state.items()}
    return np.array(state, np.uint64) if isinstance(state, list) else state


# Samplers


def sampler_state(sampler: Sampler, slots: Any) -> State:
    """Return the kind of a sampler, its settings, and its weights of slots, shape (n,)."""
    for kind, cls in _SAMPLERS.items():
        if type(sampler) is cls:
            return {"kind": kind, "known": sampler.state_dict(slots)}
    raise FormatError(f"a buffer must have a sampler of the library's to be kept, it has a {type(sampler).__name__}")


def sampler_from_state(state: Any, capacity: int, slots: Any) -> Sampler:
    """Make a sampler from its state, for a table of a capacity and the slots that have rows, shape (n,).

    Raises
    ------
    FormatError
        If it is no state of a sampler, or does not fit the slots.
    """
    try:
        return _SAMPLERS[state["kind"]].from_state_dict(capacity, slots, state["known"])
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(f"the state of a sampler must be one that a buffer made: {error}") from error


# Tables


def table_state(table: Table, ring: int | None = None) -> State:
    """Return the state of a table, or of one of its rings: cursors, stored rows, final observations."""
    state = table.state_dict(ring)
    finals = state["finals"]
    return state | {
        "stores": stores_state(state["stores"]),
        "columns": _arrays_of(state["columns"]),
        "finals": None if finals is None else finals | {"found": _arrays_of(finals["found"])},
    }


def table_from_state(state: Mapping[str, Any], stores: Stores | None = None) -> Table:
    """Make a table from its state.

    Parameters
    ----------
    stores
        Makes the stores; such as the table had whose state it is if None.

    Raises
    ------
    FormatError
        If parts are missing, or do not fit each other.
    """
    try:
        check_rings(state["rings"])
        if stores is None:
            stores = stores_from_state(state["stores"])
        finals = state["finals"]
        whole = {
            "rings": state["rings"],
            "stores": stores,
            "columns": _columns_of(state["columns"]),
            "finals": None if finals is None else finals | {"found": _columns_of(finals["found"])},
            "keeps_next": bool(state["keeps_next"]),
            "last_frame": bool(state["last_frame"]),
        }
        table = Table.from_state_dict(whole)
    except FormatError:
        raise
    except (SampleBatchError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise FormatError(f"the state of a buffer must be whole, and fit itself; it does not: {error}") from error
    check_final_shapes(table)
    return table


def stores_state(stores: Stores) -> State:
    """Return the options of a table's stores as plain values."""
    return {"compress": stores.compress, "ragged": stores.ragged, "most_open": stores.max_open}


def stores_from_state(state: Mapping[str, Any]) -> Stores:
    """Make the factory of stores from its options."""
    compress, ragged = (tuple(map(str, state[name])) for name in ("compress", "ragged"))
    return Stores(compress=compress, ragged=ragged, max_open=int(state["most_open"]))


def _arrays_of(found: State) -> State:
    """Replace columns by their arrays and tensors."""
    return {**found, "columns": [column.values for column in found["columns"]]}


def _columns_of(found: Mapping[str, Any]) -> State:
    """Replace arrays and tensors by columns, and check their number."""
    columns = [_column(values, kind) for values, kind in zip(found["columns"], found["kinds"], strict=True)]
    if len(found["row_shapes"]) != len(columns):
        raise FormatError(f"the state of {len(columns)} columns must have as many row shapes")
    return {**found, "columns": columns}


def _column(values: Any, kind: str) -> Column:
    if isinstance(values, Column):
        return values
    return as_column(np.fromiter(values, object, len(values)) if kind == "object" else values, "column")


def structure_of(columns: Columns) -> State:
    """Return the structure of columns as `Columns.state_dict` does, without rows."""
    return columns.state_dict(np.zeros(0, np.intp))

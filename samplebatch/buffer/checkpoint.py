"""The state of a buffer as plain values, arrays and columns: whatever is kept of one is made of this.

Nothing in it is a class of the library but columns, so that any format can carry it, and everything in it is checked
when it comes back: it may come from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from samplebatch.buffer.columns import Columns, leaves_of
from samplebatch.buffer.final_observations import NAME
from samplebatch.buffer.ring import Rings
from samplebatch.buffer.samplers import Prioritized, Sampler, Uniform
from samplebatch.buffer.stores import Stores
from samplebatch.buffer.table import Table
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.errors import FormatError, SampleBatchError

VERSION = 1

_SAMPLERS: dict[str, type[Sampler]] = {"uniform": Uniform, "prioritized": Prioritized}
_GENERATORS = frozenset(("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"))
_RINGS = ("maxsizes", "cursors", "sizes", "writes", "began", "starts", "origins")

State = dict[str, Any]


def plain(value: Any) -> Any:
    """Turn NumPy's numbers and arrays in dicts and lists into Python's, so that JSON can carry them.

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
    """Tell whether JSON can carry a value, as `plain` makes it."""
    try:
        plain(value)
    except TypeError:
        return False
    return True


# Generators


def generator_state(rng: np.random.Generator) -> State:
    """Return what a generator needs to go on elsewhere, as plain values."""
    found: State = plain(rng.bit_generator.state)
    return found


def generator_of(state: Any) -> np.random.Generator:
    """Make a generator that goes on where another was.

    Raises
    ------
    FormatError
        If the state is none.

    Examples
    --------
    >>> rng = np.random.default_rng(3)
    >>> again = generator_of(generator_state(rng))
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
    """Turn lists into arrays again."""
    if isinstance(state, Mapping):
        return {name: _arrays(inner) for name, inner in state.items()}
    return np.array(state, np.uint64) if isinstance(state, list) else state


# Samplers


def sampler_state(sampler: Sampler, slots: Any) -> State:
    """Return the kind of a sampler, and what it knows of itself and of slots."""
    for kind, cls in _SAMPLERS.items():
        if type(sampler) is cls:
            return {"kind": kind, "known": sampler.state_dict(slots)}
    raise FormatError(f"a buffer must have a sampler of the library's to be kept, it has a {type(sampler).__name__}")


def sampler_of(state: Any, capacity: int, slots: Any) -> Sampler:
    """Make a sampler of what `sampler_state` returned, for a table of so many slots.

    Raises
    ------
    FormatError
        If it is nothing of that kind, or does not fit the slots.
    """
    try:
        return _SAMPLERS[state["kind"]].from_state_dict(capacity, slots, state["known"])
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(f"the state of a sampler must be one that a buffer made: {error}") from error


# Tables


def table_state(table: Table, ring: int | None = None) -> State:
    """Return all there is to know of a table: rings, rows that count, final observations."""
    state = table.state_dict(ring)
    finals = state["finals"]
    return state | {
        "stores": stores_state(state["stores"]),
        "columns": _shown(state["columns"]),
        "finals": None if finals is None else finals | {"found": _shown(finals["found"])},
    }


def table_of(state: Mapping[str, Any], stores: Stores | None = None) -> Table:
    """Make a table of what `table_state` returned.

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
            stores = stores_of(state["stores"])
        finals = state["finals"]
        whole = {
            "rings": state["rings"],
            "stores": stores,
            "columns": _columns(state["columns"]),
            "finals": None if finals is None else finals | {"found": _columns(finals["found"])},
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


def check_final_shapes(table: Table) -> None:
    """Check that final observations have the names and row shapes of observations, in whose places they are put.

    Raises
    ------
    FormatError
        If they have not; names the column.
    """
    if table.finals is None or not table.finals.known or "obs" not in table.columns.tree:
        return
    none = np.zeros(0, np.intp)
    shapes = [
        {path: store.to_column(none).row_shape for path, store in leaves_of(columns.tree[name])}
        for columns, name in ((table.columns, "obs"), (table.finals.columns, NAME))
    ]
    for path, shape in shapes[0].items():
        if shapes[1].get(path) != shape:
            name = ".".join((NAME, *path))
            raise FormatError(f"column {name!r} must have rows of shape {shape} as observations have, it has not")


def stores_state(stores: Stores) -> State:
    """Return what makes the stores of a table, as plain values."""
    return {"compress": stores.compress, "ragged": stores.ragged, "most_open": stores.most_open}


def stores_of(state: Mapping[str, Any]) -> Stores:
    """Make what makes stores of its plain form."""
    compress, ragged = (tuple(map(str, state[name])) for name in ("compress", "ragged"))
    return Stores(compress=compress, ragged=ragged, most_open=int(state["most_open"]))


def _shown(found: State) -> State:
    """Put arrays and tensors in the place of columns that have one."""
    return {**found, "columns": [column.values for column in found["columns"]]}


def _columns(found: Mapping[str, Any]) -> State:
    """Put columns in the place of what `_shown` put there, and check that there are as many as there must be."""
    columns = [_column(values, kind) for values, kind in zip(found["columns"], found["kinds"], strict=True)]
    if len(found["row_shapes"]) != len(columns):
        raise FormatError(f"the state of {len(columns)} columns must have as many row shapes")
    return {**found, "columns": columns}


def _column(values: Any, kind: str) -> Column:
    if isinstance(values, Column):
        return values
    return as_column(np.fromiter(values, object, len(values)) if kind == "object" else values, "column")


def check_rings(state: Mapping[str, Any]) -> None:
    """Check that the state of rings is one that rings can be in.

    Raises
    ------
    FormatError
        If it is not.

    Examples
    --------
    >>> table = Table([4], Stores(), keeps_next=True, last_frame=False)
    >>> state = table.rings.state_dict()
    >>> check_rings(state)
    >>> check_rings(state | {"cursors": np.array([7])})
    Traceback (most recent call last):
    samplebatch.errors.FormatError: the state of rings must have cursors and sizes within their slots, it has not; ...
    """
    try:
        parts = {name: np.asarray(state[name]) for name in _RINGS}
        returns, together = np.asarray(state["returns"], np.float64), bool(state["together"])
        n = len(parts["maxsizes"])
        if not n or any(part.shape != (n,) or part.dtype.kind not in "iu" for part in parts.values()):
            raise ValueError("its parts must be whole numbers, one for each ring")
        if returns.shape[:1] != (n,):
            raise ValueError("it must have a return for each ring")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the state of rings must be whole, it is not: {error}") from error
    maxsizes, cursors, sizes, writes, began, starts, origins = (part.astype(np.int64) for part in parts.values())
    bases = np.cumsum(maxsizes) - maxsizes
    places = starts - bases
    inside = (
        (maxsizes >= 0)
        & (sizes >= 0)
        & (sizes <= maxsizes)
        & (cursors >= 0)
        & (cursors < np.maximum(maxsizes, 1))
        & ((sizes == maxsizes) | (cursors == sizes))
        & (places >= 0)
        & (places < np.maximum(maxsizes, 1))
        & (writes - origins >= sizes)
        & (origins >= 0)
        & (began <= writes)
    )
    alike = all(len(set(part.tolist())) == 1 for part in (maxsizes, cursors, sizes, writes))
    if not inside.all() or (together and not alike):
        raise FormatError(
            "the state of rings must have cursors and sizes within their slots, it has not; it is damaged"
        )


def check_finals(rows: Any, owners: Any, room: int, rings: Rings) -> None:
    """Check that final observations have rows of their own, and belong to slots.

    Parameters
    ----------
    rows, owners
        For each observation its row, and one more than the slot that it belongs to.
    room
        How many rows there are.

    Raises
    ------
    FormatError
        If they do not.
    """
    own = len(set(rows.tolist())) == len(rows) == len(owners)
    inside = ((rows >= 0) & (rows < room)).all() and ((owners > 0) & (owners <= rings.capacity)).all()
    if not own or not inside or not rings.n <= room <= len(rows) + 2 * rings.n + 64:
        raise FormatError("final observations must have rows of their own for slots, they have not; it is damaged")


def check_structure(tree: Any, count: int) -> None:
    """Check that what says how columns are nested, and from outside, names each of so many columns once.

    Raises
    ------
    FormatError
        If it does not.
    """
    places: list[Any] = []
    left = [tree]
    while left:
        inner = left.pop()
        if isinstance(inner, dict) and all(isinstance(name, str) for name in inner):
            left += inner.values()
        else:
            places.append(inner)
    if any(type(place) is not int for place in places) or sorted(places) != list(range(count)):
        raise FormatError(f"the structure of {count} columns must name each of them once, it does not; it is damaged")


def structure_of(columns: Columns) -> State:
    """Return the structure of columns as `Columns.state_dict` does, without any rows."""
    return columns.state_dict(np.zeros(0, np.intp))

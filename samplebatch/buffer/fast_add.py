"""Compiled fast path of `add` for batches with the columns, dtypes and shapes of the last one.

A collector adds the same columns repeatedly. After `Table.add` has validated and converted one batch,
`compile_fast_add` generates a function for batches like it, as `dataclasses` generates an `__init__`: it checks every
value once and writes it to its slot. Any other batch is passed to `Table.add`. The source contains no user data: names
and arrays are passed as variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch.batch.nested.node import KINDS, NODE
from samplebatch.buffer.final_observations import FinalObservations
from samplebatch.buffer.ring import Added
from samplebatch.buffer.store import DenseStore, ObjectStore, Store
from samplebatch.buffer.stores import OBSERVATIONS

if TYPE_CHECKING:
    from samplebatch.buffer.table import Table

FastAdd = Callable[[dict[str, Any]], Added | None]
"""Adds the values of a batch by name; or returns None without any effect."""

_ndarray = np.ndarray
_OBJECT = np.dtype(object)
_WORDS = frozenset((str, bytes, type(None)))
"""Types that NumPy stores in object arrays without inspection."""

_MADE = ("rew", "terminated", "truncated", "done")

_ONE_STEP = """
    slot = rings.cursor
    {release}
    {writes}
    rew_memory[slot] = rew
    terminated_memory[slot] = terminated
    truncated_memory[slot] = truncated
    if terminated or truncated:
        done_memory[slot] = True
        {keep}
        found = rings.advance(None, ended, rew[None])
        {listen_found}
        return found
    done_memory[slot] = False
    {keep_next}
    found = rings.run_on({number})
    {listen_found}
    return found
"""

_ONE_STEP_EACH = """
    {slots}
    {release}
    done = logical_or(terminated, truncated)
    {writes}
    found = rings.{advance}
    slots = found[0]
    rew_memory[slots] = rew
    terminated_memory[slots] = terminated
    truncated_memory[slots] = truncated
    done_memory[slots] = done
    {keep}
    {listen_found}
    return found
"""
# Indexing by an array of slots is fastest for single numbers, and slowest for rows.


class _Text:
    """Source lines of a function, and its variables."""

    def __init__(self, lead: tuple[int, ...]) -> None:
        self.lead = lead
        self.checks: list[str] = []
        self.writes: list[str] = []
        self.final_writes: list[str] = []
        self.names: dict[str, Any] = {"ndarray": _ndarray}

    def name(self, value: Any) -> str:
        """Create a variable for a value."""
        name = f"_{len(self.names)}"
        self.names[name] = value
        return name

    def columns(
        self, values: dict[str, Any], tree: Any, where: str, writes: list[str], slot: str, frame: str = ""
    ) -> bool:
        """Generate checks and writes of columns; return False if a store would have to convert rows.

        For values under observation names, `frame` is the index expression of the newest frame.
        """
        for name, value in values.items():
            store, key, local = tree.get(name), self.name(name), f"v{len(self.checks)}"
            self.checks.append(f"{local} = {where}[{key}]")
            column_frame = frame if where != "held" or name in OBSERVATIONS else ""
            if type(value) is _ndarray and isinstance(store, Store):
                if not self.check_rows(local, value, store, column_frame):
                    return False
                writes.append(f"{self.name(store.values)}[{slot}] = {local}")
            elif (
                type(store) is ObjectStore
                and not self.lead
                and not store.shape
                and type(value) in _WORDS
                and not column_frame
            ):
                self.checks.append(f"if type({local}) not in {self.name(_WORDS)}: return None")
                writes.append(f"{self.name(store.values)}[{slot}] = {local}")
            elif KINDS[type(value)] == NODE and type(store) is dict and store.keys() == value.__dict__.keys():
                self.checks += [f"{local} = {local}.__dict__", f"if len({local}) != {len(store)}: return None"]
                if not self.columns(value.__dict__, store, local, writes, slot, column_frame):
                    return False
            else:
                return False
        return True

    def check_rows(self, local: str, value: Any, store: Store, frame: str) -> bool:
        """Generate the check of an array that its store accepts unchanged; return False if it does not."""
        if type(store) is DenseStore:
            shape, dtype = store.row_shape, store.dtype
        elif type(store) is ObjectStore and self.lead:
            shape, dtype = store.shape, _OBJECT
        else:
            return False
        if value.dtype is not dtype:
            return False
        if frame:
            # The last frame of other types could also be an array.
            self.checks += [f"if type({local}) is not ndarray: return None", f"{local} = {local}{frame}"]
        self.check_array(local, (*self.lead, *shape), f"{local}.dtype is not {self.name(dtype)}")
        return True

    def check_array(self, local: str, shape: tuple[int, ...], wrong_dtype: str) -> None:
        wrong_shape = f"{local}.shape != {self.name(shape)}" if shape else f"{local}.ndim"
        self.checks.append(f"if type({local}) is not ndarray or {wrong_dtype} or {wrong_shape}: return None")


def compile_fast_add(table: Table, values: dict[str, Any], n: int | None) -> FastAdd | None:
    """Compile a fast `add` for batches like the last one; None if they require the general path."""
    tree, finals, rings = table.columns.tree, table.finals, table.rings
    names = set(values)
    has_next = finals is None or "obs_next" in names
    is_complete = names >= {"rew", "terminated", "truncated"} and {*names, "done"} >= tree.keys() and has_next
    stores = [tree.get(name) for name in _MADE]
    if not is_complete or table.journal is not None or any(type(s) is not DenseStore for s in stores):
        return None
    lead = () if n is None else (n,)
    text = _Text(lead)
    other_values = {name: value for name, value in values.items() if name not in _MADE}
    frame = ("[-1]" if n is None else "[:, -1]") if table.last_frame else ""
    if finals is not None:
        following = {"obs_next": other_values.pop("obs_next")}
        rows = "0" if n is None else f"slice(0, {rings.n})"
        if not text.columns(following, finals.columns.tree, "held", text.final_writes, rows, frame):
            return None
    if not text.columns(other_values, tree, "held", text.writes, "slot", frame):
        return None
    for name in ("rew", "terminated", "truncated"):
        text.checks.append(f"{name} = held[{name!r}]")
        shape = (*lead, *tree[name].row_shape)
        dtype = f"{name}.dtype is not {name}_dtype"
        # Any numeric reward is accepted, because NumPy converts it on writing; flags must be boolean.
        text.check_array(name, shape, f"({dtype} and {name}.dtype.kind not in 'biuf')" if name == "rew" else dtype)
    if "done" in names:
        text.checks.append("held['done']")
    source = _source(text, table, single=n is None)
    variables = text.names | {f"{name}_memory": tree[name].values for name in _MADE}
    variables |= {f"{name}_dtype": tree[name].dtype for name in _MADE}
    variables |= {
        "count": len(names),
        "ended": np.ones(1, np.bool_),
        "finals": finals,
        "keep_all": _keep_all,
        "listener": table.listener,
        "logical_or": np.logical_or,
        "first": np.zeros(1, np.intp),
        "array": np.array,
        "rings": rings,
    }
    exec(source, variables)
    function: FastAdd = variables["fast_add"]
    return function


def _source(text: _Text, table: Table, *, single: bool) -> str:
    """Assemble the source of the function."""
    has_finals, one_ring = table.finals is not None, table.rings.n == 1
    has_listener = table.listener is not None
    row_shape = table.columns.tree["rew"].row_shape
    after = [*text.final_writes, "finals.owners[0] = slot + 1"] if single else text.final_writes
    parts = {
        "release": ["finals.release(slot)"] if has_finals else [],
        "writes": text.writes,
        "keep_next": after if has_finals else [],
        "keep": [],
        "number": ["rew.item()" if not row_shape else "rew"],
        "slots": ["slot = slice(rings.cursor, rings.cursor + 1)" if one_ring else "slot = rings.targets(None)"],
        "advance": ["advance(None, done, rew)" if one_ring else "advance_all(done, rew)"],
        "listen_found": ["listener.on_add(found[0])"] if has_listener else [],
    }
    if has_finals and single:
        parts["keep"] = [*after, "if truncated and not terminated: finals.keep_from(first, array([slot]))"]
    elif has_finals:
        parts["keep"] = [*after, "keep_all(finals, slots, terminated, truncated)"]
    body = []
    for line in (_ONE_STEP if single else _ONE_STEP_EACH).strip("\n").split("\n"):
        head, brace, name = line.strip().partition("{")
        margin = line[: len(line) - len(line.lstrip())]
        if brace and not head and name.endswith("}"):
            body += [margin + part for part in parts[name[:-1]]]
        else:
            body.append(line.format(**{key: value[0] if value else "" for key, value in parts.items()}))
    checks = "\n".join(f"        {line}" for line in text.checks)
    return (
        f"def fast_add(held):\n    if len(held) != count: return None\n    try:\n{checks}\n"
        "    except (KeyError, AttributeError, IndexError):\n        return None\n" + "\n".join(body) + "\n"
    )


def _keep_all(finals: FinalObservations, slots: Any, terminated: Any, truncated: Any) -> None:
    """Store the final observations of a step of every ring."""
    finals.owners[: len(slots)] = slots + 1
    cut = truncated & ~terminated
    if np.count_nonzero(cut):
        finals.keep_from(np.flatnonzero(cut), slots[cut])

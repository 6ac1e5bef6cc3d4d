"""Fast `add`: a function compiled for batches of the same columns, dtypes and shapes as the last one.

A collector adds the same columns again and again. After `Table.add` has checked and converted every column of one
batch, `compile_fast_add` writes a function for the batches like it, as `dataclasses` writes an `__init__`: it checks
every value once and writes it to its slot. A batch that differs in anything is left to `Table.add`. The text of the
function holds nothing that a user has given: names and arrays are its variables.
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
"""Takes the values of a batch by name, and adds them; or returns None, and has done nothing."""

_ndarray = np.ndarray
_OBJECT = np.dtype(object)
_WORDS = frozenset((str, bytes, type(None)))
"""Types of objects that NumPy puts into an array of objects without a look inside."""

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
# An array of slots is the fastest index into single numbers, and the slowest into rows.


class _Text:
    """The lines of a function, and its variables."""

    def __init__(self, lead: tuple[int, ...]) -> None:
        self.lead = lead
        self.checks: list[str] = []
        self.writes: list[str] = []
        self.final_writes: list[str] = []
        self.names: dict[str, Any] = {"ndarray": _ndarray}

    def name(self, value: Any) -> str:
        """Return a new variable for a value."""
        name = f"_{len(self.names)}"
        self.names[name] = value
        return name

    def columns(
        self, held: dict[str, Any], tree: Any, where: str, writes: list[str], slot: str, frame: str = ""
    ) -> bool:
        """Word the checks and writes of columns; return False if one is of rows that its store would have to convert.

        Of the values under names of observations, `frame` is the index of the newest frame.
        """
        for name, value in held.items():
            store, key, local = tree.get(name), self.name(name), f"v{len(self.checks)}"
            self.checks.append(f"{local} = {where}[{key}]")
            taken = frame if where != "held" or name in OBSERVATIONS else ""
            if type(value) is _ndarray and isinstance(store, Store):
                if not self.check_rows(local, value, store, taken):
                    return False
                writes.append(f"{self.name(store.values)}[{slot}] = {local}")
            elif (
                type(store) is ObjectStore and not self.lead and not store.shape and type(value) in _WORDS and not taken
            ):
                self.checks.append(f"if type({local}) not in {self.name(_WORDS)}: return None")
                writes.append(f"{self.name(store.values)}[{slot}] = {local}")
            elif KINDS[type(value)] == NODE and type(store) is dict and store.keys() == value.__dict__.keys():
                self.checks += [f"{local} = {local}.__dict__", f"if len({local}) != {len(store)}: return None"]
                if not self.columns(value.__dict__, store, local, writes, slot, taken):
                    return False
            else:
                return False
        return True

    def check_rows(self, local: str, value: Any, store: Store, frame: str) -> bool:
        """Word the check of an array that its store takes as it is; return False if it does not."""
        if type(store) is DenseStore:
            shape, dtype = store.row_shape, store.dtype
        elif type(store) is ObjectStore and self.lead:
            shape, dtype = store.shape, _OBJECT
        else:
            return False
        if value.dtype is not dtype:
            return False
        if frame:
            # Of other values than arrays the last frame might be an array, too.
            self.checks += [f"if type({local}) is not ndarray: return None", f"{local} = {local}{frame}"]
        self.check_array(local, (*self.lead, *shape), f"{local}.dtype is not {self.name(dtype)}")
        return True

    def check_array(self, local: str, shape: tuple[int, ...], wrong_dtype: str) -> None:
        wrong_shape = f"{local}.shape != {self.name(shape)}" if shape else f"{local}.ndim"
        self.checks.append(f"if type({local}) is not ndarray or {wrong_dtype} or {wrong_shape}: return None")


def compile_fast_add(table: Table, held: dict[str, Any], n: int | None) -> FastAdd | None:
    """Compile a fast `add` for batches like one that has just been added; None if they need the general one."""
    tree, finals, rings = table.columns.tree, table.finals, table.rings
    names = set(held)
    given_next = finals is None or "obs_next" in names
    whole = names >= {"rew", "terminated", "truncated"} and {*names, "done"} >= tree.keys() and given_next
    stores = [tree.get(name) for name in _MADE]
    if not whole or table.journal is not None or any(type(s) is not DenseStore for s in stores):
        return None
    lead = () if n is None else (n,)
    text = _Text(lead)
    rest = {name: value for name, value in held.items() if name not in _MADE}
    frame = ("[-1]" if n is None else "[:, -1]") if table.last_frame else ""
    if finals is not None:
        following = {"obs_next": rest.pop("obs_next")}
        rows = "0" if n is None else f"slice(0, {rings.n})"
        if not text.columns(following, finals.columns.tree, "held", text.final_writes, rows, frame):
            return None
    if not text.columns(rest, tree, "held", text.writes, "slot", frame):
        return None
    for name in ("rew", "terminated", "truncated"):
        text.checks.append(f"{name} = held[{name!r}]")
        shape = (*lead, *tree[name].row_shape)
        dtype = f"{name}.dtype is not {name}_dtype"
        # Any number is a reward, which NumPy converts on writing; not any is a flag.
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
    found: FastAdd = variables["fast_add"]
    return found


def _source(text: _Text, table: Table, *, single: bool) -> str:
    """Put the lines of a function together."""
    kept, one_ring = table.finals is not None, table.rings.n == 1
    told = table.listener is not None
    row_shape = table.columns.tree["rew"].row_shape
    after = [*text.final_writes, "finals.owners[0] = slot + 1"] if single else text.final_writes
    parts = {
        "release": ["finals.release(slot)"] if kept else [],
        "writes": text.writes,
        "keep_next": after if kept else [],
        "keep": [],
        "number": ["rew.item()" if not row_shape else "rew"],
        "slots": ["slot = slice(rings.cursor, rings.cursor + 1)" if one_ring else "slot = rings.targets(None)"],
        "advance": ["advance(None, done, rew)" if one_ring else "advance_all(done, rew)"],
        "listen_found": ["listener.on_add(found[0])"] if told else [],
    }
    if kept and single:
        parts["keep"] = [*after, "if truncated and not terminated: finals.keep_from(first, array([slot]))"]
    elif kept:
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
    """Keep the observations after a step of every ring that are final."""
    finals.owners[: len(slots)] = slots + 1
    cut = truncated & ~terminated
    if np.count_nonzero(cut):
        finals.keep_from(np.flatnonzero(cut), slots[cut])

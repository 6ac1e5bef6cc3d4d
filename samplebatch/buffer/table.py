"""Storage of every replay buffer: the rows of ring buffers, in columns."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE
from samplebatch.buffer.columns import Columns, Ready
from samplebatch.buffer.final_observations import OWNER, FinalObservations
from samplebatch.buffer.ring import Added, Flags, Ints, Rings
from samplebatch.buffer.store import DenseStore, ObjectStore, Slots, Store
from samplebatch.buffer.stores import OBSERVATIONS, Stores
from samplebatch.buffer.writing import FLAGS, Series, check_nan, convert_step, numbers, rows_at
from samplebatch.errors import (
    ColumnMismatchError,
    ColumnNotFoundError,
    RingError,
)

if TYPE_CHECKING:
    from _thread import RLock


# `valuerefs` copies at once, while other threads may add locks.
_locks: weakref.WeakValueDictionary[int, RLock] = weakref.WeakValueDictionary()
_forking = threading.RLock()
_acquired: list[RLock] = []


def new_lock() -> RLock:
    """Create a reentrant lock that is not held in forked children.

    A thread that holds one of these locks must not acquire another of these locks, because a fork could then block
    forever.
    """
    lock = threading.RLock()
    _locks[id(lock)] = lock
    return lock


def _acquire_all() -> None:
    _forking.acquire()
    for lock in filter(None, (reference() for reference in _locks.valuerefs())):
        lock.acquire()
        _acquired.append(lock)


def _release_all() -> None:
    while _acquired:
        _acquired.pop().release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all)


_count = np.count_nonzero
SAMPLED = "sampled"
"""Column that marks rows sampled with `once`."""

_NONE: Flags = np.zeros(0, np.bool_)
_NO_ROWS: Ints = np.zeros(0, np.intp)


class Journal(Protocol):
    """Write-ahead log of a table's changes, for example in a folder."""

    def begin(self, overwritten: Sequence[tuple[Iterable[str], Slots]]) -> None:
        """Save the rows in the given columns and slots before these rows are overwritten."""

    def commit(self) -> None:
        """Commit a written step and the cursors of the rings."""

    def mirror_weights(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Store a sampler's weights of all slots; return the array to which later weight changes must be copied."""

    def flush(self) -> None:
        """Commit all changes that have not been committed, and sync all data to disk."""

    def close(self) -> None:
        """Commit all changes that have not been committed, and close the log; idempotent."""


class Listener(Protocol):
    """Observer of added and removed rows, such as a sampler."""

    def on_add(self, slots: Ints) -> None:
        """Update the observer's state for rows that have been written to slots."""

    def on_remove(self, slots: Ints) -> None:
        """Update the observer's state for slots that no longer have rows."""


class Table:
    """Storage of every replay buffer: rows of one or several ring buffers, with their columns.

    stores: factory of the column stores.
    keeps_next: whether next observations are stored as a column. If false, next observations are read from the
        following steps, and only final observations are stored separately.
    last_frame: whether to store only the newest frame of stacked observations.

    fast_add: function that `compile_fast_add` compiled for batches with the layout of the last batch; None if no
        function has been compiled.
    journal: write-ahead log; None for a table in memory.
    listener: observer of added and removed rows; None if there is no observer.
    action_unit: unit of the rows' actions; None if unknown.
    lock: lock that a thread holds while it reads or writes rows. Buffers hold the lock across sampling and gathering,
        so that the rows are consistent.
    max_gather_nbytes: maximum size in bytes of the rows that one call gathers; None for no limit.
    """

    __slots__ = (
        "_general_only", "action_unit", "columns", "fast_add", "finals", "journal", "keeps_next", "last_frame",
        "listener", "lock", "max_gather_nbytes", "raise_on_nan", "rings",
    )  # fmt: skip

    def __init__(self, maxsizes: Sequence[int], stores: Stores, *, keeps_next: bool, last_frame: bool) -> None:
        self.lock = new_lock()
        self.max_gather_nbytes: int | None = None
        self.action_unit: ActionUnit | None = None
        self.rings = Rings(maxsizes)
        self.columns = Columns(self.rings.capacity, stores)
        self.keeps_next = keeps_next
        self.last_frame = last_frame
        self.journal: Journal | None = None
        self.listener: Listener | None = None
        self.fast_add: FastAdd | None = None
        self.raise_on_nan = False
        self._general_only: tuple[Any, ...] = ()
        self.finals = (
            None if keeps_next else FinalObservations(self.rings.n, self.rings.capacity, stores, self.forget_fast_add)
        )

    @property
    def done(self) -> Flags:
        """Whether an episode ended with each step: one flag per slot; empty before the first step."""
        store = self.columns.tree.get("done")
        return _NONE if store is None else store.values

    def forget_fast_add(self) -> None:
        """Discard the compiled `fast_add`; must be called if a store, the memory of a store or the listener changes."""
        self.fast_add = None
        self._general_only = ()

    def compile_fast_add(self, values: dict[str, Any], n: int | None) -> None:
        """Compile `fast_add` for batches with the layout of the last added batch, unless `fast_add` exists already."""
        form = (n, *values)
        if self.fast_add is None and not self.raise_on_nan and form != self._general_only:
            self.fast_add = compile_fast_add(self, values, n)
            self._general_only = () if self.fast_add else form

    # Adding

    def add(self, step: dict[str, Any], n: int, rings: Ints | None = None, *, single: bool = False) -> Added:
        """Add one step to each of n rings; see `Rings.advance`.

        step: values by name, as in a `Batch`.
        rings: ring of each row, shape (n,); rows of the same ring are successive steps. If `rings` is None, the rows
            belong to all rings in order.
        single: whether the values are one step without a leading axis.
        """
        values, obs_next = self._complete(step, n, single=single)
        if rings is not None and (n > self.rings.n or len(set(rings.tolist())) < n):
            return self._add_series(values, obs_next, rings)
        self._write(values, obs_next, rings, n, single=single)
        rew, done = values["rew"], values["done"]
        added = self.rings.advance(rings, done[None] if single else done, rew[None] if single else rew)
        self._notify(added[0])
        return added

    def _add_series(self, values: dict[str, Any], obs_next: Any, numbers: Ints) -> Added:
        if not self.rings.even and not self.rings.maxsizes[numbers].all():
            raise RingError("a buffer must have slots to add steps, got a ring without slots; pass a size")
        series = Series(self.rings, numbers)
        rew, done, slots, newest = values["rew"], values["done"], series.slots, series.newest
        target: Slots = series.target
        if series.lasting is not None or self.finals is not None:
            self._fit(values, obs_next, len(numbers))
        if series.lasting is not None:
            lasting = series.lasting
            lasting_rows = Batch(now=values, after=obs_next)[lasting]
            values, obs_next = lasting_rows.now.__dict__, lasting_rows.after
            slots, newest = slots[lasting], np.searchsorted(lasting, newest)
            target = slots
        prepared = self.columns.fit(values, len(slots))
        ends = _NO_ROWS
        if self.finals is not None or self.journal is not None:
            ends = (values["truncated"] & ~values["terminated"]).nonzero()[0]
            self._begin(slots, series.rings, len(ends))
        if self.finals is not None:
            self.finals.release(slots)
        self._put(prepared, target, rew.shape[1:])
        if self.finals is not None and obs_next is not None:
            # Allocate first: allocation replaces the stores that rows are validated for.
            self.finals.rows_for(len(ends))
            latest = self.finals.fit(rows_at(obs_next, newest), len(newest), single=False)
            self.finals.write(latest, series.rings, slots[newest], np.zeros(len(newest), np.bool_))
            if len(ends):
                self.finals.keep(self.finals.fit(rows_at(obs_next, ends), len(ends), single=False), slots[ends])
        added = series.advance(done, rew)
        self._notify(slots)
        return added

    def _fit(self, values: dict[str, Any], obs_next: Any, n: int) -> None:
        """Raise the errors that adding n rows would raise, without changing the table."""
        self.columns.fit(values, n)
        if self.finals is not None and obs_next is not None:
            self.finals.fit(obs_next, n, single=False)

    def check(self, rows: Mapping[str, Any], n: int, *, stored: bool = True) -> None:
        """Raise the errors that `append` (or `add`, if `stored` is false) would raise, without changing the table."""
        self._fit(*self._complete(rows, n, single=False, stored=stored), n)

    def append(self, ring: int, rows: dict[str, Any], count: int, gaps: Ints | None = None) -> Ints:
        """Add rows to a ring without extending or ending the ring's running episode.

        rows: values by name, as returned by `gather.rows_at`.
        count: number of rows to count as added; `rows` contains the last of these rows, at most one per slot of the
            ring.
        gaps: positions of rows that do not end their episode, but are not followed by the next step of the episode; the
            position of the last row may be omitted.

        Returns: slots of the added rows in order, shape (count,).
        """
        n = min(count, int(self.rings.maxsizes[ring]))
        values, obs_next = self._complete(rows, n, single=False, stored=True)
        prepared = self.columns.fit(values, n)
        finals = self.finals if obs_next is not None else None
        final_indices = pending_slots = np.zeros(0, np.intp)
        if finals is not None:
            is_apart = values["truncated"].copy()
            is_apart[n - 1] = True
            if gaps is not None:
                is_apart[gaps] = True
            final_indices = np.flatnonzero(is_apart & ~values["terminated"])
            # Allocate first: allocation replaces the stores that rows are validated for.
            finals.rows_for(len(final_indices) + 1)
            final_ready = (
                finals.fit(rows_at(obs_next, final_indices), len(final_indices), single=False)
                if len(final_indices)
                else None
            )
        if self.finals is not None:
            # The observation after the previous newest row is only in its ring's row, which is overwritten.
            pending_slots = self.rings.unfinished(self.done)
            pending_slots = pending_slots[self.rings.ring_of(pending_slots) == ring]
        slots = self.rings.append(ring, count)
        written = slots[count - n :]
        pending_slots = pending_slots[~np.isin(pending_slots, written)]
        self._begin(written, np.array([ring]), len(final_indices) + len(pending_slots))
        if self.finals is not None:
            self.finals.release(written)
            self.finals.keep_newest(ring, pending_slots)
            self.finals.owners[ring] = 0
        self._put(prepared, written, values["rew"].shape[1:])
        if finals is not None and final_ready is not None:
            finals.keep(final_ready, written[final_indices])
        self._notify(written)
        return slots

    def fill(self, rows: dict[str, Any], start: int, stop: int, *, keep: bool = False) -> None:
        """Write rows to the slots from `start` to `stop`; the number of stored rows does not change."""
        n = stop - start
        values, obs_next = self._complete(rows, n, single=False)
        prepared = self.columns.fit(values, n, keep=keep and self.journal is None)
        cut = np.flatnonzero(values["truncated"] & ~values["terminated"])
        finals = self.finals if obs_next is not None else None
        final_ready = finals.fit(rows_at(obs_next, cut), len(cut), single=False) if finals is not None else None
        slots = np.arange(start, stop)
        self._begin(slots, slice(0, self.rings.n), len(cut))
        if self.finals is not None:
            self.finals.forget(start, stop)
        self._put(prepared, slice(start, stop), values["rew"].shape[1:])
        if finals is not None and final_ready is not None and len(cut):
            finals.columns.write(Ready([], final_ready.new), slots[:0])
            finals.keep(final_ready, slots[cut])
        self._commit()

    def check_column(self, name: str, value: Any, n: int) -> Ready:
        """Validate and convert n rows of one column, without changes to the table."""
        if name == "done":
            raise ColumnMismatchError("column 'done' is computed from 'terminated' and 'truncated'; set those")
        if name in ("rew", *FLAGS):
            value = numbers(value, name, (n,), np.float64 if name == "rew" else np.bool_)
        if self.raise_on_nan:
            check_nan({name: value})
        return self.columns.fit_only(name, value, n)

    def set_column(self, name: str, value: Any, slots: Ints, default: float | None) -> None:
        """Set values of one column; in a new column, other slots receive the default or the dtype's missing value."""
        prepared = self.check_column(name, value, len(slots))
        blanks = self.columns.fit_others(prepared, slots, default)
        self._begin(slots, slice(0, 0), 0)
        self.forget_fast_add()
        self.columns.write(Ready(blanks, prepared.new), slice(0, self.columns.slots))
        self.columns.write(Ready(prepared.rows, []), slots)
        if name in FLAGS and "done" in self.columns.tree:
            ended = [self.columns.tree[flag].values[slots] for flag in FLAGS]
            self.done[slots] = ended[0] | ended[1]
        self._commit()

    def truncate_newest(self, slot: int) -> None:
        """Truncate the running episode of a ring at the ring's newest step, whose slot is `slot`."""
        slots = np.array([slot])
        ring = int(self.rings.ring_of(slots)[0])
        self._begin(slots, np.array([ring]), 1)
        if self.finals is not None:
            # The next step overwrites the ring's pending final observation.
            self.finals.keep_newest(ring, slots)
        self.columns.tree["truncated"].values[slots] = True
        self.done[slots] = True
        self.rings.end_episode(ring)
        self._commit()

    def mark_sampled(self, slots: Ints) -> None:
        """Set the flag `sampled` of rows; a step that overwrites a slot clears the slot's flag."""
        if SAMPLED not in self.columns.tree:
            self.set_column(SAMPLED, np.ones(len(slots), np.bool_), slots, None)
            return
        self._begin(slots, slice(0, 0), 0)
        self.columns.tree[SAMPLED].values[slots] = True
        self._commit()

    def _write(self, values: dict[str, Any], obs_next: Any, rings: Ints | None, n: int, *, single: bool) -> None:
        prepared = self.columns.fit(values, n, single=single)
        finals = self.finals if obs_next is not None else None
        final_ready = finals.fit(obs_next, n, single=single) if finals is not None else None
        slots = self.rings.targets(rings)
        if not self.rings.capacity:
            raise RingError("a buffer must have slots to add steps, got one without; pass a size")
        cut = values["truncated"] & ~values["terminated"]
        rows: Slots = slice(0, self.rings.n) if rings is None else rings
        self._begin(slots, rows, int(_count(cut)))
        if self.finals is not None:
            self.finals.release(slots)
        self._put(prepared, slots, values["rew"].shape[0 if single else 1 :])
        if finals is not None and final_ready is not None:
            numbers = np.arange(slots, slots + 1) if isinstance(slots, int) else self._numbers(slots)
            finals.write(final_ready, rows, numbers, np.atleast_1d(cut))

    def _put(self, prepared: Ready, slots: Slots, rew_shape: tuple[int, ...]) -> None:
        if prepared.new:
            self.forget_fast_add()
        if "rew" not in self.columns.tree:
            self.rings.expect(rew_shape)
        self.columns.write(prepared, slots)

    def _numbers(self, slots: Ints | slice) -> Ints:
        return np.arange(slots.start, slots.stop, slots.step) if isinstance(slots, slice) else slots

    def _begin(self, slots: Slots, rings: Slots, cut: int) -> None:
        """Log the rows that a write with `cut` truncations will overwrite."""
        if self.journal is None:
            return
        overwritten: list[tuple[Iterable[str], Slots]] = [([store.name for _, store in self.columns.leaves()], slots)]
        if self.finals is not None:
            # Allocate first: allocation changes names and rows.
            rows = self.finals.rows_touched(slots, cut)
            names = [OWNER, *(store.name for _, store in self.finals.columns.leaves())]
            overwritten += [(names, rings), (names, rows)]
        self.journal.begin(overwritten)

    def _notify(self, slots: Ints) -> None:
        if self.listener is not None:
            self.listener.on_add(slots)
        self._commit()

    def _commit(self) -> None:
        if self.journal is not None:
            self.journal.commit()

    def _complete(
        self, step: Mapping[str, Any], n: int, *, single: bool, stored: bool = False
    ) -> tuple[dict[str, Any], Any]:
        """Convert rewards and flags, compute `done`, and return the next observations separately.

        If `stored` is true, the values were read from a table and already consist of single frames.
        """
        values = convert_step(step, n, single=single, last_frame=self.last_frame and not stored)
        if not stored and not self.columns.tree:
            self.columns.stores.check_names(values)
        if self.raise_on_nan:
            check_nan(values)
        if not self.keeps_next:
            return values, values.pop("obs_next", None)
        if "obs_next" in self.columns.tree and "obs_next" not in values:
            raise ColumnNotFoundError(
                "a step must have column 'obs_next', as earlier steps; pass it in all steps or in none"
            )
        return values, None

    # Emptying

    def reset(self, rings: Sequence[int] | None = None, *, keep_statistics: bool = False) -> None:
        """Empty some rings or all rings; the values of removed rows stay in memory until the slots are overwritten."""
        if self.journal is not None:
            # No column changes, but weights and row owners do.
            changed: list[tuple[Iterable[str], Slots]] = [((), self.rings.stored_slots())]
            if self.finals is not None:
                changed.append(([OWNER], np.flatnonzero(self.finals.owners)))
            self.journal.begin(changed)
        if self.finals is not None:
            edges = self.rings.edges
            for ring in range(self.rings.n) if rings is None else rings:
                self.finals.forget(int(edges[ring]), int(edges[ring + 1]))
        if self.listener is not None:
            for part in (None,) if rings is None else rings:
                self.listener.on_remove(self.rings.chronological(part))
        self.rings.reset(rings, keep_statistics=keep_statistics)
        if not len(self.rings):
            self.action_unit = None
        self._commit()

    # State

    def state_dict(self, ring: int | None = None) -> dict[str, Any]:
        """Return the state of one ring or of all rings, including the stored rows, for `from_state_dict`."""
        rings = self.rings
        slots = rings.stored_slots() if ring is None else np.sort(rings.chronological(ring))
        start, stop = (0, rings.capacity) if ring is None else rings.edges[ring : ring + 2].tolist()
        return {
            "rings": rings.state_dict(ring),
            "stores": self.columns.stores,
            "columns": self.columns.state_dict(slots),
            "finals": None if self.finals is None else self.finals.state_dict(start, stop, ring),
            "keeps_next": self.keeps_next,
            "last_frame": self.last_frame,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Create a table from a `state_dict`."""
        maxsizes = np.asarray(state["rings"]["maxsizes"]).tolist()
        table = cls(maxsizes, state["stores"], keeps_next=state["keeps_next"], last_frame=state["last_frame"])
        table.rings.load_state_dict(state["rings"])
        table.columns.load_state_dict(table.rings.stored_slots(), state["columns"])
        if table.finals is not None and state["finals"] is not None:
            table.finals.load_state_dict(state["finals"])
        return table


# Compiled fast path of `add` for batches with the columns, dtypes and shapes of the last one
#
# A collector adds the same columns repeatedly. After `Table.add` has validated and converted one batch,
# `compile_fast_add` generates a function for batches like it, as `dataclasses` generates an `__init__`: it checks every
# value once and writes it to its slot. Any other batch is passed to `Table.add`. The source contains no user data:
# names and arrays are passed as variables.

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
    {layout}
    {slots}
    {release}
    {writes}
    if terminated.tobytes() != unset or truncated.tobytes() != unset:
        done = logical_or(terminated, truncated)
        found = rings.{advance}
    else:
        done = terminated
        found = rings.{run_on}
    slots = found[0]
    rew_memory[slots] = rew
    terminated_memory[slots] = terminated
    truncated_memory[slots] = truncated
    done_memory[slots] = done
    {keep}
    {listen_found}
    return found
"""
# Indexing by an array of slots is fastest for single numbers, and slowest for rows: these are written by one number to
# a view with the axis of rings second, while all rings have one cursor.


class _Text:
    """Source lines of a generated function, and the variables that the lines use."""

    def __init__(self, lead: tuple[int, ...], rings: Rings) -> None:
        self.lead = lead
        self.rings = rings
        self.checks: list[str] = []
        self.writes: list[str] = []
        self.final_writes: list[str] = []
        self.names: dict[str, Any] = {"ndarray": _ndarray}

    def name(self, value: Any) -> str:
        name = f"_{len(self.names)}"
        self.names[name] = value
        return name

    def in_lockstep(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """View the rows of all slots by position in the ring and by ring, shape (slots per ring, rings, ...)."""
        return values.reshape(self.rings.n, self.rings.even, *values.shape[1:]).swapaxes(0, 1)

    def columns(
        self, values: dict[str, Any], tree: Any, where: str, writes: list[str], slot: str, frame: str = ""
    ) -> bool:
        """Generate code that checks and writes columns; return False if a store must convert rows of a column.

        `frame` is the index expression of the newest frame in columns of observations.
        """
        for name, value in values.items():
            store, key, local = tree.get(name), self.name(name), f"v{len(self.checks)}"
            self.checks.append(f"{local} = {where}[{key}]")
            column_frame = frame if where != "held" or name in OBSERVATIONS else ""
            if type(value) is _ndarray and isinstance(store, Store):
                if not self.check_rows(local, value, store, column_frame):
                    return False
                rows = self.in_lockstep(store.values) if slot == "cursor" else store.values
                writes.append(f"{self.name(rows)}[{slot}] = {local}")
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
        """Generate code that checks an array; return False if the store does not accept the array unchanged."""
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
    """Compile a fast `add` for batches with the last batch's layout; return None if the layout requires `Table.add`."""
    tree, finals, rings = table.columns.tree, table.finals, table.rings
    names = set(values)
    has_next = finals is None or "obs_next" in names
    is_complete = names >= {"rew", "terminated", "truncated"} and {*names, "done"} >= tree.keys() and has_next
    stores = [tree.get(name) for name in _MADE]
    if not is_complete or table.journal is not None or any(type(s) is not DenseStore for s in stores):
        return None
    lead = () if n is None else (n,)
    text = _Text(lead, rings)
    other_values = {name: value for name, value in values.items() if name not in _MADE}
    frame = ("[-1]" if n is None else "[:, -1]") if table.last_frame else ""
    if finals is not None:
        following = {"obs_next": other_values.pop("obs_next")}
        rows = "0" if n is None else f"slice(0, {rings.n})"
        if not text.columns(following, finals.columns.tree, "held", text.final_writes, rows, frame):
            return None
    in_lockstep = n is not None and rings.n > 1 and rings.together
    if not text.columns(other_values, tree, "held", text.writes, "cursor" if in_lockstep else "slot", frame):
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
        "forget": table.forget_fast_add,
        "array": np.array,
        "rings": rings,
        "unset": bytes(n or 1),
    }
    exec(source, variables)
    function: FastAdd = variables["fast_add"]
    return function


def _source(text: _Text, table: Table, *, single: bool) -> str:
    has_finals, rings = table.finals is not None, table.rings
    one_ring = rings.n == 1
    has_listener = table.listener is not None
    row_shape = table.columns.tree["rew"].row_shape
    if one_ring:
        slots = "slot = slice(rings.cursor, rings.cursor + 1)"
        run_on = "run_on(rew[0])" if row_shape else "run_on(rew.item())"
    elif rings.together:
        slots, run_on = "cursor = rings.cursor", "run_on_all(rew)"
    else:
        slots, run_on = "slot = rings.targets(None)", "advance_all(done, rew)"
    after = [*text.final_writes, "finals.owners[0] = slot + 1"] if single else text.final_writes
    parts = {
        "release": [f"finals.release({'rings.targets(None)' if slots.startswith('cursor') else 'slot'})"] * has_finals,
        "writes": text.writes,
        "keep_next": after if has_finals else [],
        "keep": [],
        "number": ["rew.item()" if not row_shape else "rew"],
        "layout": [] if one_ring else [f"if rings.together is not {rings.together}: return forget()"],
        "slots": [slots],
        "advance": ["advance(None, done, rew)" if one_ring else "advance_all(done, rew)"],
        "run_on": [run_on],
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
    finals.owners[: len(slots)] = slots + 1
    cut = truncated & ~terminated
    if np.count_nonzero(cut):
        finals.keep_from(np.flatnonzero(cut), slots[cut])

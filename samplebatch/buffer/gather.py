"""Functions that gather rows from a table, with stacked frames, next observations and n-step targets."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Final

import numpy as np

from samplebatch.arguments import fraction, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.buffer.columns import copy_rows, leaves_of, take_rows
from samplebatch.buffer.final_observations import patch
from samplebatch.buffer.ring import Flags, Ints
from samplebatch.buffer.store import DenseStore, Range
from samplebatch.buffer.stores import CompressedStore
from samplebatch.buffer.table import Table
from samplebatch.column import threads
from samplebatch.errors import CapacityError, ColumnNotFoundError, near_names, no_such_column
from samplebatch.returns.arrays import nstep_of_rings

ORDER: Final = ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next", "info", "policy")
"""Names that all rows have, in this order, even if never added; other names follow."""

STACKED: Final = frozenset(("obs", "obs_next", "info", "policy"))
"""Names of columns whose steps are stacked."""

_count = np.count_nonzero


def rows_at(table: Table, slots: Ints, stack: int, skip: Container[str] = ()) -> dict[str, Any]:
    """Gather all columns of the steps in `slots`; the leading shape of the values is the shape (...) of `slots`.

    If `stack` exceeds 1, observations, info and policy have the leading shape (..., stack) and contain the last `stack`
    steps of the episode up to the slot, oldest first. Columns in `skip` are omitted.
    """
    tree = table.columns.tree
    if "obs" not in tree:
        raise nothing_added()
    if skip:
        tree = {name: column for name, column in tree.items() if name not in skip}
    around = (slots, None, None) if stack == 1 and table.keeps_next else _around(table, slots, stack)
    if table.max_gather_nbytes is not None:
        _check_gather(table, slots, around)
    columns: dict[str, Any] = {}
    for name in ORDER:
        column = tree.get(name)
        if column is not None:
            column_slots = around[0] if name in STACKED else slots
            # Most columns are arrays, gathered without an additional call.
            columns[name] = column.take(column_slots) if type(column) is DenseStore else take_rows(column, column_slots)
        elif name == "obs_next" and not table.keeps_next:
            columns[name] = next_observations(table, slots, around)
        else:
            columns[name] = node(Batch, {})
    if len(tree) > len(ORDER) or not tree.keys() <= columns.keys():
        for name, column in tree.items():
            if name not in columns:
                columns[name] = take_rows(column, slots)
    return columns


def _check_gather(table: Table, slots: Ints, around: Around) -> None:
    tree = table.columns.tree
    total = sum([gathered_nbytes(column, around[0] if name in STACKED else slots) for name, column in tree.items()])
    if not table.keeps_next:
        total += gathered_nbytes(tree["obs"], around[1])
    check_gathered_nbytes(table, total)


def gathered_nbytes(tree: Any, slots: Ints) -> int:
    """Return the size in bytes of a column's rows at the given slots; the column may be nested."""
    if type(tree) is dict:
        return sum([gathered_nbytes(inner, slots) for inner in tree.values()])
    return int(tree.gathered_nbytes(slots))


def check_gathered_nbytes(table: Table, nbytes: int) -> None:
    """Raise CapacityError if a size in bytes exceeds the table's `max_gather_nbytes`."""
    limit = table.max_gather_nbytes
    if limit is not None and nbytes > limit:
        raise CapacityError(f"a sample must have at most {limit} bytes, got {nbytes}")


def check_gathered_rows(table: Table, rows: int) -> None:
    """Raise CapacityError if `rows` rows exceed `max_gather_nbytes`; ragged and object columns are not counted."""
    if table.max_gather_nbytes is not None:
        stores = [store for _, store in leaves_of(table.columns.tree)]
        first_slot = np.zeros(1, np.intp)
        fixed = sum(
            store.gathered_nbytes(first_slot) for store in stores if isinstance(store, DenseStore | CompressedStore)
        )
        check_gathered_nbytes(table, rows * max(fixed, 1))


def rows_in(table: Table, ranges: list[Range], stack: int) -> dict[str, Any]:
    """Copy and concatenate all columns of the steps in several slot ranges; see `rows_at`."""
    tree = table.columns.tree
    if "obs" not in tree:
        raise nothing_added()
    if stack > 1:
        return rows_at(table, slots_in(ranges), stack)
    columns: dict[str, Any] = {}
    jobs: list[threads.Job] = []
    for name in (*ORDER, *tree):
        if name in columns:
            continue
        if name in tree:
            columns[name] = copy_rows(tree[name], ranges, jobs)
        elif name == "obs_next" and not table.keeps_next:
            slots = slots_in(ranges)
            columns[name] = next_observations(table, slots, _around(table, slots, stack))
        else:
            columns[name] = node(Batch, {})
    if jobs:
        if sum([nbytes for nbytes, _ in jobs]) >= threads.WORTHWHILE:
            threads.share(jobs)
        else:
            for _, copy in jobs:
                copy()
    return columns


def slots_in(ranges: list[Range]) -> Ints:
    """Concatenate the slots of several ranges.

    >>> slots_in([(7, 9), (0, 2)])
    array([7, 8, 0, 1])
    """
    if len(ranges) == 1:
        return np.arange(*ranges[0])
    return np.concatenate([np.zeros(0, np.intp), *(np.arange(start, stop) for start, stop in ranges)])


def column_at(table: Table, name: str, slots: Ints, stack: int) -> Any:
    """Gather one column, which may be nested; if `stack` exceeds 1, an axis of frames follows the axes of `slots`."""
    tree = table.columns.tree
    if name == "obs_next" and not table.keeps_next and "obs" in tree:
        if table.max_gather_nbytes is not None:
            check_gathered_nbytes(table, gathered_nbytes(tree["obs"], slots) * stack)
        return next_observations(table, slots, _around(table, slots, stack))
    if name not in tree:
        raise ColumnNotFoundError(f"no column {name!r}; {near_names(name, tree)}")
    frames = table.rings.frames(slots, stack, table.done) if stack > 1 else slots
    if table.max_gather_nbytes is not None:
        check_gathered_nbytes(table, gathered_nbytes(tree[name], frames))
    return take_rows(tree[name], frames)


Around = tuple[Ints, Any, Any]
"""Frames of slots, frames of the following steps, and whether the slots are the last of their episodes; without
stacking, the slots and the following slots. If next observations are stored, only the first item."""


def _around(table: Table, slots: Ints, stack: int) -> Around:
    rings, done = table.rings, table.done
    if stack == 1:
        if table.keeps_next:
            return slots, None, None
        after = rings.next(slots, done)
        return slots, after, after == slots
    if table.keeps_next:
        return rings.frames(slots, stack, done), None, None
    window = rings.window_of_one(slots, stack, done)
    if window is not None:
        return window
    frame_slots, after = rings.frames(slots, stack, done), rings.next(slots, done)
    return frame_slots, np.concatenate([frame_slots[..., 1:], after[..., None]], -1), after == slots


def next_observations(table: Table, slots: Ints, around: Around) -> Any:
    """Gather next observations that are not stored with their steps.

    In general, the next observation of a step is the observation of the following step. For a truncated step and for
    the newest step of a running episode, the next observation is the stored final observation. For a terminated step,
    the step's own observation is returned.
    """
    frame_slots, after, last = around
    stacked = frame_slots is not slots
    column = table.columns.tree["obs"]
    terminated = table.columns.tree["terminated"].values.take(slots) if _count(last) else last
    if stacked and _count(last):
        after = np.where((last & terminated)[..., None], frame_slots, after)
    observations = take_rows(column, after)
    where, rows = final_rows(table, slots, last & ~terminated)
    if not len(rows):
        return observations
    if stacked:
        where = (*where, np.full(len(where[0]), -1))
    return patch(observations, where, table.finals.take(rows))  # type: ignore[union-attr]


def final_rows(table: Table, slots: Ints, last: Flags) -> tuple[tuple[Ints, ...], Ints]:
    """Locate the final observations of steps without a stored next step.

    last: whether each step is the last stored step of an episode that was not terminated, in the shape of `slots`.

    Returns: index of the slots that have a final observation, and the rows of these observations in `table.finals`,
    shape (k,).
    """
    finals = table.finals
    if finals is None or not finals.known or not (finals.num_permanent or _count(last)):
        return (np.zeros(0, np.intp),) * slots.ndim, np.zeros(0, np.intp)
    if finals.num_permanent:
        # The following steps may have been removed.
        last = last | finals.has_rows(slots)
    cut = np.nonzero(last)
    cut_slots = slots[cut]
    rows, is_valid = finals.find(cut_slots, table.rings.ring_of(cut_slots))
    return tuple(part[is_valid] for part in cut), rows[is_valid]


def nothing_added() -> ColumnNotFoundError:
    """Create the error for access to a column before the first step has been added."""
    return ColumnNotFoundError("no column 'obs': nothing has been added to the buffer yet")


def show_slots(table: Table, name: str, start: int, stop: int) -> Any:
    """Return the rows of a slot range, as a view if possible; used for the column attributes of buffers."""
    return _show(table.columns.tree[name], start, stop)


def _show(node_value: Any, start: int, stop: int) -> Any:
    if type(node_value) is dict:
        return node(Batch, {name: _show(inner, start, stop) for name, inner in node_value.items()})
    values = node_value.values
    return values if stop - start == node_value.slots else values[start:stop]


def nbytes_of(table: Table) -> int:
    """Return the size of all columns in bytes, including final observations."""
    total = table.columns.nbytes
    return total if table.finals is None else total + sum(s.nbytes for _, s in leaves_of(table.finals.columns.tree))


def check_window(table: Table, n_step: int | None, gamma: float) -> None:
    """Validate `n_step` and `gamma` before sampling; `n_step` is None for single steps."""
    fraction("gamma", gamma)
    if n_step is not None:
        whole("n_step", n_step, 1)
        tree = table.columns.tree
        if table.keeps_next and tree and "obs_next" not in tree:
            raise no_such_column("obs_next", tree)


def nstep_columns(table: Table, slots: Ints, n_step: int, gamma: float, stack: int) -> dict[str, Any]:
    """Compute the columns that n-step sampling adds to the sampled rows, or replaces in these rows.

    The sum for a row ends at the row's `n_step`-th step, at the end of the episode, or at the ring's newest step,
    whichever is first.

    Returns: `returns`, the discounted sum of the rewards, in the shape of the rewards; `discount`, gamma to the power
    of the number of steps, or 0 if the last step is terminated, shape (n,). If `n_step` exceeds 1, also `obs_next`, the
    observation after the last step.
    """
    rings, tree = table.rings, table.columns.tree
    if n_step == 1:
        # Rewards and next observations of the rows themselves.
        terminated = tree["terminated"].values[slots]
        return {"returns": tree["rew"].values[slots].astype(np.float64), "discount": np.where(terminated, 0.0, gamma)}
    flags = tree["terminated"].values, table.done
    targets = nstep_of_rings(tree["rew"].values, *flags, rings.edges, rings.last_index, slots, n_step, gamma)
    obs_next = column_at(table, "obs_next", targets.last, stack)
    return {"returns": targets.returns, "discount": targets.discount, "obs_next": obs_next}

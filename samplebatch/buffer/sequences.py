"""Sampling of entire episodes, and of sequences of steps within episodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import errors, names
from samplebatch.arguments import whole
from samplebatch.batch.flags import column_names
from samplebatch.batch.nested.node import KINDS, NODE, TENSOR, node
from samplebatch.buffer.gather import check_gathered_rows, column_at, rows_at
from samplebatch.buffer.ring import Flags, Ints, Rings
from samplebatch.buffer.samplers import Prioritized, Sampler, draw_from
from samplebatch.buffer.table import Table


class Episodes(NamedTuple):
    """First slots, lengths and completeness of episodes, in time order per ring, one ring after another."""

    first: Ints
    """Slot of the first stored step of each episode."""
    length: Ints
    """Number of stored steps of each episode, contiguous in its ring."""
    finished: Flags
    """Whether the last step has been added; False for a ring's running episode."""
    complete: Flags
    """Whether the first step is stored; False if a ring's oldest episode may be partially overwritten."""

    def slots(self, rings: Rings, chosen: Ints) -> tuple[Ints, Ints]:
        """Concatenate the slots of episodes; return the slots, and the boundaries of the episodes in the result.

        Returns: slots, shape (sum of lengths,), and cumulative lengths from 0, shape (k + 1,).
        """
        lengths = self.length[chosen]
        ends = np.concatenate([np.zeros(1, np.intp), np.cumsum(lengths)])
        steps = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
        return shift_slots(rings, np.repeat(self.first[chosen], lengths), steps), ends


def find_episodes(rings: Rings, done: Flags, ring: int | None = None) -> Episodes:
    """Return the episodes of one ring or of all rings.

    If rows of a ring have been overwritten, the ring's oldest episode is treated as incomplete, because the episode's
    first steps may be missing.

    >>> rings, done = Rings([5]), np.array([False, False, True, False, True])
    >>> for end in (False, True, True, False, True, False, False, True):
    ...     added = rings.advance(None, np.array([end]), np.zeros(1))
    >>> find_episodes(rings, done)
    Episodes(first=array([3, 0]), length=array([2, 3]), finished=array([ True,  True]),
        complete=array([False,  True]))
    """
    bases, sizes = rings.bases, rings.sizes_of_all()
    oldest = np.where(sizes == rings.maxsizes, rings.cursors_of_all(), 0)
    low, high = (0, rings.capacity) if ring is None else (int(bases[ring]), int(rings.edges[ring + 1]))
    ends = np.flatnonzero(done[low:high]) + low
    of = rings.ring_of(ends)
    ends, of = (part[ends - bases[of] < sizes[of]] for part in (ends, of))
    # The newest step of a ring is the last stored step of its episode, even if the episode is running.
    newest = rings.unfinished(done)
    newest = newest[(newest >= low) & (newest < high)]
    finished = np.arange(len(ends) + len(newest)) < len(ends)
    ends = np.concatenate([ends, newest])
    of = np.concatenate([of, rings.ring_of(newest)])
    age = (ends - bases[of] - oldest[of]) % np.maximum(rings.maxsizes[of], 1)
    order = np.argsort(bases[of] + age)
    ends, of, age, finished = ends[order], of[order], age[order], finished[order]
    leads = np.ones(len(ends), np.bool_)
    leads[1:] = of[1:] != of[:-1]
    began = np.zeros(len(ends), np.intp)
    began[1:] = np.where(leads[1:], 0, age[:-1] + 1)
    length = age - began + 1
    is_complete = ~leads | ~rings.overwritten()[of]
    return Episodes(shift_slots(rings, ends, 1 - length), length, finished, is_complete)


_FIRST_LOOK = 32
"""Initial search range in steps; each further search doubles it for episodes that continue."""


def steps_after(rings: Rings, done: Flags, slots: Ints, limit: int) -> Ints:
    """Count the stored steps that follow each step in the same episode, up to `limit`.

    >>> rings, done = Rings([4]), np.array([False, True, False, False])
    >>> for end in (0, 1, 0, 0, 0):
    ...     added = rings.advance(None, np.array([end]), np.zeros(1))
    >>> steps_after(rings, np.array([False, True, False, False]), np.array([1, 2, 3, 0]), 9)
    array([0, 2, 1, 0])
    """
    return _run(rings, done, slots, limit, forward=True)


def steps_before(rings: Rings, done: Flags, slots: Ints, limit: int) -> Ints:
    """Count the stored steps that precede each step in the same episode, up to `limit`; see `steps_after`."""
    return _run(rings, done, slots, limit, forward=False)


def shift_slots(rings: Rings, slots: Ints, by: Ints) -> Ints:
    """Return the slots `by` steps after (if `by` is negative, before) the given slots in the same ring.

    Shapes are broadcast. The rings must have rows at the returned slots.
    """
    ring = rings.ring_of(slots)
    base, size = rings.bases[ring], rings.sizes_of_all()[ring]
    moved: Ints = base + (slots - base + by) % size
    return moved


def _run(rings: Rings, done: Flags, slots: Ints, limit: int, *, forward: bool) -> Ints:
    ring = rings.ring_of(slots)
    base, size = rings.bases[ring], rings.sizes_of_all()[ring]
    offset, last = slots - base, rings.last_index[ring] - base
    counts = np.full(len(slots), limit, np.intp)
    pending = np.arange(len(slots))
    num_seen, width = 0, _FIRST_LOOK
    while len(pending) and num_seen < limit:
        steps = np.arange(num_seen, min(num_seen + width, limit))
        at = offset[pending, None] + (steps if forward else -1 - steps)
        at %= size[pending, None]
        # True at an episode's last step when searching forward, and at the previous episode's last step when backward.
        over = done[at + base[pending, None]] | (at == last[pending, None])
        ended = over.any(1)
        counts[pending[ended]] = num_seen + over[ended].argmax(1)
        pending = pending[~ended]
        num_seen, width = num_seen + len(steps), 2 * width
    return counts


# Draws


def draw_episodes(
    table: Table,
    ring: int | None,
    n: int | None,
    rng: np.random.Generator,
    *,
    unfinished: bool,
    where: Any = None,
) -> tuple[Ints, Ints]:
    """Sample episodes; return the concatenated slots of k episodes, and their boundaries, shape (k + 1,)."""
    if "obs" not in table.columns.tree:
        candidates = np.zeros(0, np.intp)
    else:
        episodes = find_episodes(table.rings, table.done, ring)
        candidates = np.flatnonzero(episodes.complete if unfinished else episodes.complete & episodes.finished)
        if where is not None and len(candidates):
            candidates = select_episodes(table, episodes, candidates, where)
    chosen = candidates[:0]
    if n is None:
        chosen = rng.permutation(candidates)
    elif n == 0:
        chosen = candidates
    elif n > 0:
        if not len(candidates):
            raise errors.EmptyBufferError("a buffer must have a complete episode to sample, got none; add more steps")
        chosen = candidates[rng.integers(0, len(candidates), n)]
    if not len(chosen):
        return chosen, chosen
    check_gathered_rows(table, int(episodes.length[chosen].sum()))
    return episodes.slots(table.rings, chosen)


def select_episodes(table: Table, episodes: Episodes, candidates: Ints, where: Any) -> Ints:
    """Return the numbers of the candidate episodes that an Arrow expression selects, shape (k,)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(where, pc.Expression):
        raise errors.ColumnTypeError(
            f"where must be an Arrow expression, got a {type(where).__name__}; see pyarrow.compute"
        )
    first, length = episodes.first[candidates], episodes.length[candidates]
    last = shift_slots(table.rings, first, length - 1)
    columns: dict[str, Any] = {}
    for path, store in table.columns.leaves():
        if store.row_shape == () and store.dtype is not None and store.dtype.kind in "biuf":
            columns[".".join(path)] = np.asarray(store.take(first))
    slots, ends = episodes.slots(table.rings, candidates)
    rewards = table.columns.tree["rew"].values[slots]
    if rewards.ndim == 1:
        columns["return"] = np.add.reduceat(rewards, ends[:-1])
    columns |= {name: table.columns.tree[name].values[last] for name in ("terminated", "truncated")}
    columns |= {"length": length, _POSITION: np.arange(len(candidates))}
    try:
        selected = pa.table(columns).filter(where)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        names_found = ", ".join(sorted(columns.keys() - {_POSITION}))
        raise errors.ColumnNotFoundError(f"where must name columns of episodes, {names_found}: {error}") from error
    selected_candidates: Ints = candidates[selected[_POSITION].to_numpy()]
    return selected_candidates


_POSITION = "samplebatch/position"
"""Column of episode numbers, in addition to the columns that an expression may name."""


def draw_stretches(
    table: Table,
    ring: int | None,
    sampler: Sampler,
    count: int,
    length: int,
    burn_in: int,
    rng: np.random.Generator,
) -> Ints:
    """Sample runs of `length` steps within episodes; return the slot of each run's first step after burn-in.

    Runs are sampled uniformly or, with a prioritized sampler, in proportion to the weights of the returned slots.
    """
    total = 0
    if "obs" in table.columns.tree:
        episodes = find_episodes(table.rings, table.done, ring)
        stretches = np.cumsum(np.maximum(episodes.length - length + 1, 0))
        total = int(stretches[-1]) if len(stretches) else 0
    if not total:
        raise errors.EmptyBufferError(
            f"a buffer must have an episode of {length} steps to sample, got none; add more, or allow padding"
        )
    picked = np.arange(total) if isinstance(sampler, Prioritized) else rng.integers(0, total, count)
    episode = np.searchsorted(stretches, picked, "right")
    offset = picked - stretches[episode] + episodes.length[episode] - length + 1
    starts = shift_slots(table.rings, episodes.first[episode], offset + burn_in)
    return draw_from(starts, sampler, count, rng) if isinstance(sampler, Prioritized) else starts


# Rows


def sequence_rows(
    table: Table, start_slots: Ints, length: int, burn_in: int, stack: int, per_sequence: tuple[str, ...] = ()
) -> tuple[dict[str, Any], Ints]:
    """Gather one sequence per step in `start_slots`, shape (n,); see `get_sequences`.

    Returns: the columns, including `mask` and `burn_in`, and the slots of the steps, shape (n, length), with -1 for
    padding.
    """
    rings, done = table.rings, table.done
    before = (
        steps_before(rings, done, start_slots, burn_in)
        if burn_in and len(start_slots)
        else np.zeros(len(start_slots), np.intp)
    )
    after = steps_after(rings, done, start_slots, length - 1) if len(start_slots) else before
    count = np.minimum(before + 1 + after, length)[:, None]
    steps = np.arange(length)
    mask = steps < count
    offsets = np.minimum(steps, count - 1) - before[:, None]
    slots = shift_slots(rings, start_slots[:, None], offsets) if len(start_slots) else offsets
    columns = rows_at(table, slots, stack, per_sequence)
    padding = ~mask
    if padding.any():
        columns = {name: _blank_out(value, padding) for name, value in columns.items()}
    columns |= {name: column_at(table, name, slots[:, 0], stack) for name in per_sequence}
    columns |= {names.MASK: mask, names.BURN_IN: steps < before[:, None]}
    return columns, np.where(mask, slots, -1)


def check_sequences(table: Table, length: int, burn_in: int, per_sequence: Any = ()) -> tuple[str, ...]:
    """Validate the arguments of `get_sequences`, and return `per_sequence` as a tuple of column names.

    Raises ColumnMismatchError if the rows already have a column `mask` or `burn_in`.
    """
    tree = table.columns.tree
    declared = column_names("per_sequence", per_sequence) if per_sequence else ()
    for name in declared:
        if name not in tree and (name != "obs_next" or table.keeps_next):
            raise errors.ArgumentError(
                f"per_sequence must name columns of the rows, got {name!r}; {errors.near_names(name, tree)}"
            )
    if whole("burn_in", burn_in) >= whole("length", length, 1):
        raise errors.SequenceError(f"burn_in must be less than length {length}, got {burn_in}")
    for name in (names.MASK, names.BURN_IN):
        if name in tree:
            raise errors.ColumnMismatchError(f"rows must not have a column {name!r}, which sequences add; rename it")
    return declared


def _blank_out(value: Any, where: npt.NDArray[np.bool_]) -> Any:
    kind = KINDS[type(value)]
    if kind == NODE:
        return node(type(value), {name: _blank_out(inner, where) for name, inner in value.__dict__.items()})
    if kind == TENSOR:
        value[np.nonzero(where)] = 0
    else:
        value[where] = None if value.dtype.kind == "O" else np.zeros((), value.dtype)
    return value

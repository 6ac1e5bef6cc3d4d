"""Write positions and running episodes of n ring buffers (rings).

This module contains only index arithmetic; rows are stored in `columns`. While all rings are written in lockstep,
adding one step of every environment takes as long as adding a step of a single environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.errors import EmptyBufferError, FormatError, RingError

Ints = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

_UINTP = np.dtype(np.uintp)

Added = tuple[Ints, npt.NDArray[Any], Ints, Ints]
"""Slots of new steps, returns and lengths of the episodes that they ended (otherwise 0), first slots of episodes."""

_add = np.add
_count = np.count_nonzero
_zeros = np.zeros
_INTP = np.dtype(np.intp)


_AHEAD = 1 << 12
"""Number of precomputed slots."""


class Rings:
    """Index arithmetic of n ring buffers for `Table`: cursors, sizes and running episodes.

    A ring is a contiguous range of slots that is written cyclically; the ranges of the rings are adjacent. While all
    rings are written in lockstep, the rings share one cursor. Methods that search for previous or next steps in an
    episode require `done`, the episode-end flags of all slots.

    maxsizes, bases: number of slots and first slot of each ring, shape (n,).
    edges: first slot of each ring, and the total number of slots; shape (n + 1,).
    even: number of slots per ring if all rings have the same size, otherwise 0.
    together: whether all rings share `cursor`, `size` and `writes`. Otherwise `cursors`, `sizes` and `written` have one
        entry per ring, shape (n,).
    origins: write count of each ring when it was last empty, shape (n,).
    nothing: initial return of an episode, which is zero, in the shape of one reward.
    ep_return, began, ep_start: return of each running episode, write count of the ring when the episode began, and
        first slot of the episode; shape (n, ...). A single ring has scalars.

    >>> rings = Rings([3, 3])
    >>> for _ in range(4):
    ...     slots, *_ = rings.advance(None, np.zeros(2, bool), np.ones(2))
    >>> slots, len(rings), rings.chronological()
    (array([0, 3]), 6, array([1, 2, 0, 4, 5, 3]))
    >>> rings.advance(np.array([1]), np.array([True]), np.ones(1))
    (array([4]), array([5.]), array([5]), array([3]))
    """

    __slots__ = (
        "_no_end", "_slots_to_come", "_unended", "bases", "began", "capacity", "cursor", "cursors", "edges",
        "ep_return", "ep_start", "even", "maxsizes", "n", "nothing", "origins", "size", "sizes", "together", "writes",
        "written",
    )  # fmt: skip

    def __init__(self, maxsizes: Sequence[int]) -> None:
        self.n = len(maxsizes)
        self.maxsizes: Ints = np.array(maxsizes, _INTP)
        self.edges: Ints = np.concatenate([_zeros(1, _INTP), np.cumsum(self.maxsizes)])
        self.bases: Ints = self.edges[:-1]
        self.capacity = int(self.edges[-1])
        self.even = int(maxsizes[0]) if len(set(maxsizes)) == 1 else 0
        self.together = bool(self.even) or self.n == 1
        self.cursor = self.size = self.writes = 0
        self.cursors: Ints = _zeros(0, _INTP)
        self.sizes: Ints = _zeros(0, _INTP)
        self.written: Ints = _zeros(0, _INTP)
        self.origins: Ints = _zeros(self.n, _INTP)
        if not self.together:
            self._separate()
        self.nothing: Any = 0.0
        self._no_end = self._no_ends(())
        self.ep_return: Any = _zeros(self.n)
        self.began: Any = _zeros(self.n, _INTP)
        self.ep_start: Any = self.bases.copy()
        self._slots_to_come: Iterator[Ints] = iter(())
        if self.n == 1:
            self._begin_episode(0, 0, 0.0)
        self._share()

    def _separate(self) -> None:
        self.cursors = np.full(self.n, self.cursor, _INTP)
        self.sizes = np.full(self.n, self.size, _INTP)
        self.written = np.full(self.n, self.writes, _INTP)
        self.together = False

    def __len__(self) -> int:
        return self.size * self.n if self.together else int(self.sizes.sum())

    def sizes_of_all(self) -> Ints:
        """Return the number of rows per ring, shape (n,)."""
        return np.full(self.n, self.size, _INTP) if self.together else self.sizes.copy()

    def cursors_of_all(self) -> Ints:
        """Return the position at which the next row of each ring is written, shape (n,)."""
        return np.full(self.n, self.cursor, _INTP) if self.together else self.cursors.copy()

    def ring_of(self, slots: Ints) -> Ints:
        """Return the ring of each slot in [0, capacity)."""
        if self.even:
            return slots // self.even
        return np.searchsorted(self.edges, slots, "right") - 1

    # Neighbours

    def window_of_one(self, slots: Ints, count: int, done: Flags) -> tuple[Ints, Ints, Flags] | None:
        """Return each slot's frames, the frames of the next step, and whether the slot's step is the episode's last.

        This method is a fast path of `frames` and `next` for a single ring in which every frame has a row and no stack
        wraps around. In all other cases, the method returns None. Frames are as in `frames`. After the last stored step
        of an episode, the frames of the next step repeat the last step's frame.
        """
        window = slots[..., None] + np.arange(1 - count, 2)
        if self.n > 1 or _count(window.view(_UINTP) >= self.size):
            return None
        ends = done.take(window[..., :-1])
        if self.cursor and self.size == self.capacity:
            # Otherwise no slot after the last written one has a row, so it is not in the window.
            ends |= window[..., :-1] == self._last
        final = ends[..., -1]
        if not _count(ends):
            return window[..., :-1], window[..., 1:], final
        first = (ends[..., :-1] * np.arange(1, count)).max(-1, keepdims=True)
        oldest = window[..., :1]
        after = oldest + np.maximum(np.arange(1, count + 1), first)
        after[..., -1] -= final
        return oldest + np.maximum(np.arange(count), first), after, final

    def prev_within(self, slots: Ints, done: Flags) -> Ints | None:
        """Fast path of `prev` for a single ring in which all slots and their predecessors have rows.

        Returns None in all other cases, for example if a slot is out of bounds.
        """
        previous: Ints = slots - 1
        # `in` on bytes finds a set flag faster than NumPy counts flags.
        if self.n > 1 or 1 in (previous.view(_UINTP) >= self.size - 1).tobytes():
            return None
        first = done.take(previous)
        first |= slots == self.cursor
        previous += first
        return previous

    def next_within(self, slots: Ints, done: Flags) -> Ints | None:
        """Fast path of `next` for a single ring in which all slots and their successors have rows.

        Returns None in all other cases, for example if a slot is out of bounds.
        """
        if self.n > 1 or not self.size or 1 in (slots.view(_UINTP) >= self.size - 1).tobytes():
            return None
        final = done.take(slots)
        final |= slots == self._last
        following: Ints = slots + 1
        following -= final
        return following

    @property
    def _last(self) -> int:
        """Last written slot of the only ring."""
        return (self.cursor or self.capacity) - 1

    def prev(self, slots: Ints, done: Flags) -> Ints:
        """Return the slot of the previous step in the episode; for the first step, return its own slot."""
        length = (self.size or 1) if self.n == 1 else self.capacity // self.n
        if self.n > 1 and (not self.together or self.size < length):
            base, offset, size, last = self._offsets_of(slots)
            before = (offset - 1) % size
            first = done.take(before + base) | (before == last)
            result: Ints = (before + first) % size + base
            return result
        # One ring and full rings need no divisions.
        offset = slots if self.n == 1 else slots % length
        previous: Ints = slots - 1
        wraps = offset == 0
        wrapped = _count(wraps)
        if wrapped:
            previous[wraps] += length
        first = done.take(previous)
        first |= offset == self.cursor % length
        if wrapped:
            return np.where(first, slots, previous)
        previous += first
        return previous

    def next(self, slots: Ints, done: Flags) -> Ints:
        """Return the slot of the next step in the episode; for the last stored step, return its own slot."""
        length = (self.size or 1) if self.n == 1 else self.capacity // self.n
        if self.n > 1 and (not self.together or self.size < length):
            base, offset, size, last = self._offsets_of(slots)
            final = done.take(offset + base) | (offset == last)
            result: Ints = (offset + 1 - final) % size + base
            return result
        offset = slots if self.n == 1 else slots % length
        final = done.take(slots)
        final |= offset == (self.cursor or length) - 1
        following: Ints = slots + 1
        following -= final
        wraps = offset == length - 1
        if _count(wraps):
            following[wraps & ~final] -= length
        return following

    def frames(self, slots: Ints, count: int, done: Flags) -> Ints:
        """Return the slots of the last `count` steps up to and including each slot, oldest first; shape (..., count).

        If the episode has fewer steps up to the slot, the first step of the episode is repeated.
        """
        return self._back(slots, count, done)[0]

    def has_frames(self, slots: Ints, count: int, done: Flags) -> Flags:
        """Return whether each slot's episode has at least `count` stored steps up to and including the slot."""
        window = self.window_of_one(slots, count, done)
        if window is not None:
            complete: Flags = window[0][..., 0] == slots - (count - 1)
            return complete
        reach: Flags = self._back(slots, count, done)[1] >= count - 1
        return reach

    def _back(self, slots: Ints, count: int, done: Flags) -> tuple[Ints, Ints]:
        """Return the same slots as `frames`, and how many of the `count - 1` preceding steps belong to the episode."""
        base, offset, size, last = self._offsets_of(slots)
        offset = offset[..., None]
        if self.n > 1:
            base = base[..., None]
            if not self.together:
                size, last = size[..., None], last[..., None]
        stops = np.ones((*slots.shape, count), np.bool_)
        earlier = (offset - np.arange(1, count)) % size
        np.equal(earlier, last, stops[..., :-1])
        if self.n > 1:
            earlier += base
        stops[..., :-1] |= done.take(earlier)
        reach = stops.argmax(-1)
        frames = offset - np.minimum(np.arange(count - 1, -1, -1), reach[..., None])
        frames %= size
        if self.n > 1:
            frames += base
        return frames, reach

    def _offsets_of(self, slots: Ints) -> tuple[Any, Ints, Any, Any]:
        """Return each slot's ring start and offset in the ring, and the ring's size and last written offset."""
        if self.n == 1:
            return 0, slots, self.size or 1, (self.cursor or self.capacity) - 1
        if self.together:
            offset = slots % self.even
            return slots - offset, offset, self.size or 1, (self.cursor or self.even) - 1
        ring = self.ring_of(slots)
        base = self.bases[ring]
        last = (self.cursors[ring] - 1) % self.maxsizes[ring]
        return base, slots - base, self.sizes[ring].clip(1), last

    @property
    def last_index(self) -> Ints:
        """Last written slot of each ring, or the first slot of an empty ring; shape (n,)."""
        if self.together:
            return self.bases + ((self.cursor or (self.capacity // self.n)) - 1 if self.size else 0)
        return self.bases + np.where(self.sizes, (self.cursors - 1) % self.maxsizes.clip(1), 0)

    def unfinished(self, done: Flags) -> Ints:
        """Return the newest slot of each ring that has a running episode."""
        last = self.last_index[self.sizes_of_all() > 0]
        return last[~done[last]]

    def generation(self, slots: Ints) -> Ints:
        """Return how often each slot has been overwritten; -1 for a slot that has never been written.

        Emptying a ring counts as an overwrite of all its slots.
        """
        if self.together:
            maxsize = self.capacity // self.n
            generations: Ints = (self.writes - 1 - slots % maxsize) // maxsize
            return generations
        ring = self.ring_of(slots)
        generations = (self.written[ring] - 1 - (slots - self.bases[ring])) // self.maxsizes[ring]
        return generations

    def holds(self, slots: Ints) -> Flags:
        """Return whether each slot in [0, capacity) has a row."""
        has_row: Flags
        if self.together:
            length = self.capacity // self.n
            has_row = (slots % length if self.n > 1 else slots) < self.size
        else:
            ring = self.ring_of(slots)
            has_row = slots - self.bases[ring] < self.sizes[ring]
        return has_row

    def overwritten(self) -> Flags:
        """Return whether each ring has overwritten rows since it was last empty, shape (n,)."""
        written = self.writes if self.together else self.written
        is_overwritten: Flags = written - self.origins > self.maxsizes
        return is_overwritten

    # All rows

    def stretches(self, ring: int) -> list[tuple[int, int]]:
        """Return the slot ranges of a ring's rows as at most two pairs of start and stop, oldest rows first."""
        base = int(self.bases[ring])
        cursor, size = self._cursor_and_size(ring)
        if not size:
            return []
        if size < self.maxsizes[ring] or not cursor:
            return [(base, base + size)]
        return [(base + cursor, base + size), (base, base + cursor)]

    def _cursor_and_size(self, ring: int) -> tuple[int, int]:
        if self.together:
            return self.cursor, self.size
        return int(self.cursors[ring]), int(self.sizes[ring])

    def chronological(self, ring: int | None = None) -> Ints:
        """Return the slots of all rows of one ring, or of all rings one after another, oldest rows first."""
        if ring is None and self.together:
            order = np.concatenate([_zeros(0, _INTP), *(np.arange(*pair) for pair in self.stretches(0))])
            return order if self.n == 1 else (self.bases[:, None] + order).ravel()
        rings = range(self.n) if ring is None else (ring,)
        pairs = [np.arange(*pair) for number in rings for pair in self.stretches(number)]
        return np.concatenate([_zeros(0, _INTP), *pairs])

    def newest(self, count: int, ring: int | None = None) -> Ints:
        """Return the slots of the newest rows, at most `count` per ring, oldest first."""
        rings = range(self.n) if ring is None else (ring,)
        parts = [self.chronological(number) for number in rings]
        return np.concatenate([_zeros(0, _INTP), *(part[max(len(part) - count, 0) :] for part in parts)])

    def writes_of_all(self) -> Ints:
        """Return the write count of each ring, shape (n,)."""
        return np.full(self.n, self.writes, _INTP) if self.together else self.written.copy()

    def slots_since(self, writes: Ints) -> Ints:
        """Return the slots of stored rows that were written after `writes_of_all` had returned `writes`.

        Examples
        --------
        >>> rings = Rings([3])
        >>> for _ in range(4):
        ...     added = rings.advance(None, np.zeros(1, bool), np.ones(1))
        >>> rings.slots_since(np.array([2])), rings.slots_since(np.array([0]))
        (array([0, 2]), array([0, 2, 1]))
        """
        counts = np.minimum(self.writes_of_all() - writes, self.sizes_of_all())
        ring = np.repeat(np.arange(self.n), counts)
        age = np.arange(len(ring)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots: Ints = self.bases[ring] + (self.cursors_of_all()[ring] - 1 - age) % self.maxsizes[ring]
        return slots

    def stored_slots(self) -> Ints:
        """Return the slots of all rows in ascending order."""
        if self.capacity == len(self):
            return np.arange(self.capacity)
        if self.together:
            return (self.bases[:, None] + np.arange(self.size)).ravel()
        return np.concatenate([base + np.arange(size) for base, size in zip(self.bases, self.sizes, strict=True)])

    def draw(self, count: int, rng: np.random.Generator, ring: int | None = None) -> Ints:
        """Sample slots of rows uniformly with replacement."""
        if ring is not None:
            total = self._cursor_and_size(ring)[1]
        else:
            total = self.size * self.n if self.together else int(self.sizes.sum())
        if count and not total:
            raise EmptyBufferError("a buffer must have rows to sample, got an empty buffer; add some first")
        # Twice as fast as exact integers, and uniform up to the 53 bits of a float. The largest float below 1 times an
        # integer below 2**53 is less than the integer, including rounding.
        fractions = rng.random(count)
        fractions *= total
        picked: Ints = fractions.astype(_INTP)
        if ring is not None:
            picked += int(self.bases[ring])
            return picked
        if total == self.capacity or self.n == 1:
            return picked
        if self.together:
            ring_of, offset = np.divmod(picked, self.size)
            return ring_of * self.even + offset
        ends = np.cumsum(self.sizes)
        ring_of = np.searchsorted(ends, picked, "right")
        slots: Ints = picked - (ends - self.sizes)[ring_of] + self.bases[ring_of]
        return slots

    def interval(self, start: int, stop: int) -> Ints:
        """Return the slots from `start` to `stop` (exclusive) within one ring, wrapping around at the ring's end."""
        if start == stop and 0 <= start <= self.capacity:
            return _zeros(0, _INTP)
        inside = 0 <= start < self.capacity and 0 < stop <= self.capacity
        ring, ring_of_stop = self.ring_of(np.array([start, stop - 1])) if inside else (0, 1)
        if ring != ring_of_stop:
            raise RingError(f"start and stop must be within one ring, got {start} and {stop}")
        if start <= stop:
            return np.arange(start, stop)
        return np.concatenate([np.arange(start, self.edges[ring + 1]), np.arange(self.edges[ring], stop)])

    def expect(self, row_shape: tuple[int, ...]) -> None:
        """Set the shape of rewards, and reset the returns of running episodes."""
        self.nothing = _zeros(row_shape) if row_shape else 0.0
        self._no_end = self._no_ends(row_shape)
        if self.n == 1:
            self._begin_episode(self.began, self.ep_start, self.nothing)
        else:
            self.ep_return = _zeros((self.n, *row_shape))
            self._share()

    # Writing

    def targets(self, rings: Ints | None) -> Ints | slice | int:
        """Return the slots to which the next step of the given rings will be written, without advancing the rings."""
        if rings is None:
            if self.together:
                return self.cursor if self.n == 1 else slice(self.cursor, self.capacity, self.even)
            return self.bases + self.cursors
        return self.bases[rings] + (self.cursor if self.together else self.cursors[rings])

    def run_on(self, rew: Any) -> Added:
        """Advance the only ring by a step that ends no episode; see `advance`.

        All returned arrays except the slots are read-only and shared between steps.
        """
        after = self.cursor + 1
        try:
            slots = next(self._slots_to_come)
        except StopIteration:
            slots = self._next_slots()
        self.writes += 1
        if after > self.size:
            self.size = after
        self.cursor = after if after < self.capacity else 0
        # Not in place, because all episodes share the initial zeros.
        self.ep_return = self.ep_return + rew
        starts, returns, lengths = self._unended
        return slots, returns, lengths, starts

    def _next_slots(self) -> Ints:
        """Precompute the slots of the next few steps; return the slots of the first of these steps."""
        length = self.capacity // self.n
        offsets = np.arange(self.cursor, min(self.cursor + max(_AHEAD // self.n, 1), length))
        self._slots_to_come = iter(offsets[:, None] + self.bases)
        return next(self._slots_to_come)

    def advance(self, rings: Ints | None, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        """Advance rings by one step.

        rings: numbers of k different rings, shape (k,); None for all rings in order.
        done: whether an episode ended with the step, shape (k,).
        rew: rewards, shape (k, ...).
        """
        if self.n == 1:
            return self._advance_single(done, rew)
        if rings is None:
            return self.advance_all(done, rew)
        if self.together:
            self._separate()
        offsets = self.cursors[rings]
        maxsizes, bases = self.maxsizes[rings], self.bases[rings]
        after = (offsets + 1) % maxsizes
        self.cursors[rings] = after
        self.sizes[rings] = np.minimum(self.sizes[rings] + 1, maxsizes)
        self.written[rings] += 1
        totals = self.ep_return[rings] + rew
        self.ep_return[rings] = totals
        starts = self.ep_start[rings]
        if not _count(done):
            return bases + offsets, _zeros(totals.shape), _zeros(len(rings), _INTP), starts
        ended = rings[done]
        returns, lengths = _zeros(totals.shape), _zeros(len(rings), _INTP)
        returns[done] = totals[done]
        lengths[done] = self.written[ended] - self.began[ended]
        self.began[ended] = self.written[ended]
        self.ep_start[ended] = bases[done] + after[done]
        self.ep_return[ended] = 0.0
        self._share()
        return bases + offsets, returns, lengths, starts

    def _advance_single(self, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        number = rew[0] if rew.ndim > 1 else rew.item()
        if not done[0]:
            return self.run_on(number)
        total, start = self.ep_return + number, self.ep_start
        slots, *_ = self.run_on(number)
        lengths = np.array([self.writes - self.began])
        self._begin_episode(self.writes, self.cursor, self.nothing)
        return slots, np.array([total]), lengths, np.array([start])

    def advance_run(self, done: Flags, rew: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], Ints, Ints]:
        """Advance the only ring by k successive steps.

        done: whether an episode ended with each step, shape (k,).
        rew: rewards, shape (k, ...).

        Returns: the return and the length of the episode that ended with each step, or 0 if no episode ended, and the
        first slot of each step's episode; three arrays of length k.

        >>> rings = Rings([4])
        >>> rings.advance_run(np.array([False, True, False]), np.array([1.0, 2.0, 4.0]))
        (array([0., 3., 0.]), array([0, 2, 0]), array([0, 0, 2]))
        >>> rings.advance(None, np.array([True]), np.array([8.0]))
        (array([3]), array([12.]), array([2]), array([2]))
        """
        count, cursor, writes = len(done), self.cursor, self.writes
        returns, lengths, firsts = _zeros(rew.shape), _zeros(count, _INTP), np.empty(count, _INTP)
        began, first, total, start = self.began, self.ep_start, self.ep_return, 0
        for end in done.nonzero()[0].tolist():
            stop = end + 1
            firsts[start:stop] = first
            returns[end], lengths[end] = _sum_onto(total, rew[start:stop]), writes + stop - began
            began, first, total, start = writes + stop, (cursor + stop) % self.capacity, self.nothing, stop
        firsts[start:] = first
        if start < count:
            total = _sum_onto(total, rew[start:])
        self.writes, self.cursor = writes + count, (cursor + count) % self.capacity
        self.size = min(self.size + count, self.capacity)
        self._slots_to_come = iter(())
        if began == self.began:
            self.ep_return = total
        else:
            self._begin_episode(began, first, total)
        return returns, lengths, firsts

    def _begin_episode(self, began: int, start: int, total: Any) -> None:
        """Set the start (write count and slot) and the return of the running episode in the only ring."""
        self.began, self.ep_start, self.ep_return = began, start, total
        self._share()

    def end_episode(self, ring: int) -> None:
        """End the running episode of a ring after its newest step."""
        together = self.together
        written, offset = (self.writes, self.cursor) if together else (int(self.written[ring]), int(self.cursors[ring]))
        start = int(self.bases[ring]) + offset
        if self.n == 1:
            self._begin_episode(written, start, self.nothing)
        else:
            self.began[ring], self.ep_start[ring], self.ep_return[ring] = written, start, 0.0
            self._share()

    def _no_ends(self, row_shape: tuple[int, ...]) -> tuple[npt.NDArray[np.float64], Ints]:
        """Return the read-only returns and lengths that are reported for a step that ends no episode."""
        returns, lengths = _zeros((self.n, *row_shape)), _zeros(self.n, _INTP)
        returns.flags.writeable = lengths.flags.writeable = False
        return returns, lengths

    def _share(self) -> None:
        """Rebuild the arrays that are shared by all steps until an episode ends."""
        starts = np.array(self.ep_start).reshape(self.n)
        starts.flags.writeable = False
        self._unended = starts, *self._no_end

    def advance_all(self, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        """Advance all rings by one step each, if there are several rings; see `advance`.

        If the step ends no episode, all returned arrays except the slots are read-only and shared between steps.
        """
        written: Any
        after: Any
        if self.together:
            slots, returns, lengths, starts = self.run_on_all(rew)
            written, after = self.writes, self.cursor
        else:
            slots = self.bases + self.cursors
            self.written = written = self.written + 1
            after = (self.cursors + 1) % self.maxsizes
            self.cursors = after
            self.sizes = np.minimum(self.sizes + 1, self.maxsizes)
            self.ep_return += rew
            starts, returns, lengths = self._unended
        if done.tobytes().count(0) == self.n:
            return slots, returns, lengths, starts
        totals = self.ep_return
        returns, lengths = returns.copy(), lengths.copy()
        returns[done] = totals[done]
        lengths[done] = (written - self.began)[done]
        np.copyto(self.began, written, where=done)
        np.copyto(self.ep_start, self.bases + after, where=done)
        totals[done] = 0.0
        self._share()
        return slots, returns, lengths, starts

    def run_on_all(self, rew: npt.NDArray[np.float64]) -> Added:
        """Advance all rings in lockstep by one step that ends no episode; see `advance_all`."""
        try:
            slots = next(self._slots_to_come)
        except StopIteration:
            slots = self._next_slots()
        self.writes += 1
        after = self.cursor + 1
        if after > self.size:
            self.size = after
        self.cursor = after if after < self.even else 0
        totals = self.ep_return
        _add(totals, rew, totals)
        starts, returns, lengths = self._unended
        return slots, returns, lengths, starts

    def append(self, ring: int, count: int) -> Ints:
        """Advance a ring by `count` rows that belong to no running episode; return the slots of these rows.

        The running episode is neither ended nor extended.
        """
        base, maxsize = int(self.bases[ring]), int(self.maxsizes[ring])
        self._slots_to_come = iter(())
        if self.n == 1:
            offset, self.size = self.cursor, min(self.size + count, maxsize)
            self.cursor = (offset + count) % maxsize if maxsize else 0
            self.writes += count
            self.began += count
        else:
            if self.together:
                self._separate()
            offset = int(self.cursors[ring])
            self.sizes[ring] = min(int(self.sizes[ring]) + count, maxsize)
            self.cursors[ring] = (offset + count) % maxsize if maxsize else 0
            self.written[ring] += count
            self.began[ring] += count
        return base + np.arange(offset, offset + count) % max(maxsize, 1)

    def reset(self, rings: Iterable[int] | None = None, *, keep_statistics: bool = False) -> None:
        """Empty rings; None for all."""
        chosen = list(range(self.n) if rings is None else rings)
        if len(chosen) == self.n:
            # With an equal write count, the rings can be in lockstep again.
            lengths = (self.writes if self.together else self.written) - self.began
            written = _next_round(np.full(self.n, self.writes, _INTP) if self.together else self.written, self.maxsizes)
            self.cursor = self.size = 0
            self._slots_to_come = iter(())
            self.writes = int(written.max())
            self.together = bool(self.even) or self.n == 1
            if not self.together:
                self._separate()
                self.written = written
            started = written if not self.together else self.writes
            self.origins[:] = started
            self.began = started - lengths if keep_statistics else started + 0 * self.began
            if self.n == 1:
                self._begin_episode(self.began, 0, self.ep_return)
            else:
                self.ep_start = self.bases.copy()
                self._share()
            if not keep_statistics:
                self.expect(np.shape(self.nothing))
            return
        if self.together:
            self._separate()
        for ring in chosen:
            length = int(self.written[ring] - self.began[ring])
            self.cursors[ring] = self.sizes[ring] = 0
            self.origins[ring] = self.written[ring] = _next_round(self.written[ring], self.maxsizes[ring])
            self.began[ring] = self.written[ring] - (length if keep_statistics else 0)
            self.ep_start[ring] = self.bases[ring]
            if not keep_statistics:
                self.ep_return[ring] = 0.0
        self._share()

    # State

    def state_dict(self, ring: int | None = None) -> dict[str, Any]:
        """Return the state of one ring or of all rings as numbers and arrays, for `load_state_dict`.

        >>> rings = Rings([4])
        >>> slots, *_ = rings.advance(None, np.array([False]), np.array([1.5]))
        >>> again = Rings([4])
        >>> again.load_state_dict(rings.state_dict())
        >>> again.advance(None, np.array([True]), np.array([1.0]))
        (array([1]), array([2.5]), array([2]), array([0]))
        """
        written = np.full(self.n, self.writes, _INTP) if self.together else self.written.copy()
        state = {
            "maxsizes": self.maxsizes.copy(),
            "cursors": self.cursors_of_all(),
            "sizes": self.sizes_of_all(),
            "writes": written,
            "began": np.array(self.began).reshape(self.n),
            "starts": np.array(self.ep_start).reshape(self.n),
            "returns": np.array(self.ep_return).reshape(self.n, *np.shape(self.nothing)),
            "origins": self.origins.copy(),
        }
        if ring is None:
            return state | {"together": self.together}
        state = {name: part[ring : ring + 1] for name, part in state.items()}
        return state | {"starts": state["starts"] - self.bases[ring], "together": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of rings whose sizes equal the sizes of these rings."""
        if not np.array_equal(state["maxsizes"], self.maxsizes):
            actual, expected = np.asarray(state["maxsizes"]).tolist()[:8], self.maxsizes.tolist()[:8]
            raise FormatError(f"the state must have rings of {expected} slots, got {actual}")
        cursors, sizes, writes = (np.array(state[name], _INTP) for name in ("cursors", "sizes", "writes"))
        self.together = bool(state["together"])
        if self.together:
            self.cursor, self.size, self.writes = int(cursors[0]), int(sizes[0]), int(writes[0])
        else:
            self.cursors, self.sizes, self.written = cursors, sizes, writes
        self.began, self.ep_start = np.array(state["began"], _INTP), np.array(state["starts"], _INTP)
        self.origins = np.array(state["origins"], _INTP)
        returns = np.array(state["returns"], np.float64)
        self._slots_to_come = iter(())
        self.expect(returns.shape[1:])
        self.ep_return = returns
        if self.n == 1:
            total = returns[0] if returns.ndim > 1 else float(returns[0])
            self._begin_episode(int(self.began[0]), int(self.ep_start[0]), total)

    def take_over(self, ring: int, state: dict[str, Any]) -> None:
        """Restore one ring from the `state_dict` of another ring of equal size."""
        values = {name: state[name][0] for name in state if name not in ("maxsizes", "together")}
        self._slots_to_come = iter(())
        self.origins[ring] = values["origins"]
        total = values["returns"]
        if self.n == 1:
            self.cursor, self.size, self.writes = (int(values[name]) for name in ("cursors", "sizes", "writes"))
            self._begin_episode(int(values["began"]), int(values["starts"]), total if total.ndim else float(total))
            return
        if self.together:
            self._separate()
        self.cursors[ring], self.sizes[ring], self.written[ring] = values["cursors"], values["sizes"], values["writes"]
        self.began[ring], self.ep_start[ring] = values["began"], values["starts"] + self.bases[ring]
        if np.shape(total) == np.shape(self.nothing):
            self.ep_return[ring] = total
        self._share()

    def unite(self) -> None:
        """Switch to a shared cursor if the cursors, sizes and write counts of all rings are equal."""
        positions = set(zip(self.cursors.tolist(), self.sizes.tolist(), self.written.tolist(), strict=True))
        if self.together or not self.even or len(positions) > 1:
            return
        self.cursor, self.size, self.writes = int(self.cursors[0]), int(self.sizes[0]), int(self.written[0])
        self.together = True
        self._slots_to_come = iter(())


def _sum_onto(total: Any, rew: npt.NDArray[np.float64]) -> Any:
    """Add rewards to a total in sequence, so that the result is rounded as if each step were added by its own call."""
    sums = np.add.accumulate(np.concatenate([np.reshape(total, (1, *rew.shape[1:])), rew]))[-1]
    return sums if rew.ndim > 1 else sums.item()


def _next_round(written: Any, maxsizes: Any) -> Any:
    """Return a write count above `written` at which a cycle of the ring starts, so that no generation repeats."""
    return (-(-written // np.maximum(maxsizes, 1)) + 1) * maxsizes

"""Rings: write positions and running episodes of n ring buffers at once.

This module does the arithmetic and holds no rows. As long as all rings are written together, a step of all environments
costs no more than a step of one.
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
"""Slots of new steps, returns and lengths of the episodes that ended with them (zero for others), first slots."""

_count = np.count_nonzero
_zeros = np.zeros
_INTP = np.dtype(np.intp)


_AHEAD = 1 << 12
"""Slots that are computed ahead of their use."""


class Rings:
    """Ring buffers of slots for `Table`: the cursors, sizes and running episodes of n of them.

    A ring is a range of slots that is written from the first to the last, and from the first again; rings lie one after
    the other. As long as all are written together, one cursor serves them all. Methods that look for neighbours in an
    episode take the flags of all slots, `done`.

    Attributes
    ----------
    n
        How many rings there are.
    maxsizes, bases
        Slots and first slot of each ring, shape (n,).
    edges
        First slot of each ring, and the number of slots of all; shape (n + 1,).
    capacity
        The number of slots.
    even
        The slots of one ring if all have as many, else 0.
    together
        Whether `cursor`, `size` and `writes` are those of each ring. Otherwise `cursors`, `sizes` and `written` have
        one entry a ring, shape (n,).
    origins
        The writes of each ring when it was empty the last time, shape (n,).
    nothing
        The return of no step: zero, of the shape of one reward.
    ep_return, began, ep_start
        Of the running episodes: their returns, the writes of their rings when they began, their first slots; shape
        (n, ...). Of a single ring they are plain numbers.

    Examples
    --------
    >>> rings = Rings([3, 3])
    >>> for _ in range(4):
    ...     slots, *_ = rings.advance(None, np.zeros(2, bool), np.ones(2))
    >>> slots, len(rings), rings.chronological()
    (array([0, 3]), 6, array([1, 2, 0, 4, 5, 3]))
    >>> rings.advance(np.array([1]), np.array([True]), np.ones(1))
    (array([4]), array([5.]), array([5]), array([3]))
    """

    __slots__ = (
        "_slots_to_come", "_unended", "bases", "began", "capacity", "cursor", "cursors", "edges", "ep_return",
        "ep_start", "even", "maxsizes", "n", "nothing", "origins", "size", "sizes", "together", "writes", "written",
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
        """Return how many slots of each ring hold rows, shape (n,)."""
        return np.full(self.n, self.size, _INTP) if self.together else self.sizes.copy()

    def cursors_of_all(self) -> Ints:
        """Return where in each ring the next row goes, shape (n,)."""
        return np.full(self.n, self.cursor, _INTP) if self.together else self.cursors.copy()

    def ring_of(self, slots: Ints) -> Ints:
        """Return the ring of each slot in [0, capacity)."""
        if self.even:
            return slots // self.even
        return np.searchsorted(self.edges, slots, "right") - 1

    # Neighbours

    def window_of_one(self, slots: Ints, count: int, done: Flags) -> tuple[Ints, Ints, Flags] | None:
        """Return the frames of each slot, those of the one after it, and whether it is the last of its episode.

        That is the common case of `frames` and `next`: one ring, every frame holds a row, and none lies past an edge of
        the ring. In any other, the result is None.

        Frames are those of `frames`. After an episode's last step that is there, the step itself is once more the
        newest frame.
        """
        window = slots[..., None] + np.arange(1 - count, 2)
        if self.n > 1 or _count(window.view(_UINTP) >= self.size):
            return None
        ends = done.take(window[..., :-1])
        if self.cursor and self.size == self.capacity:
            # Otherwise the slot written last has none behind it, and is not here.
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
        """Return what `prev` returns if there is one ring and each slot and the slot before it have rows, else None.

        The check covers the bounds of the slots, too, so the caller needs none of its own.
        """
        previous: Ints = slots - 1
        # `in` finds a byte that is set sooner than NumPy counts the flags.
        if self.n > 1 or 1 in (previous.view(_UINTP) >= self.size - 1).tobytes():
            return None
        first = done.take(previous)
        first |= slots == self.cursor
        previous += first
        return previous

    def next_within(self, slots: Ints, done: Flags) -> Ints | None:
        """Return what `next` returns if there is one ring and each slot and the slot after it have rows, else None.

        The check covers the bounds of the slots, too, so the caller needs none of its own.
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
        """The slot written last of the only ring."""
        return (self.cursor or self.capacity) - 1

    def prev(self, slots: Ints, done: Flags) -> Ints:
        """Return the slot of the step before each, in its episode; of an episode's first step, that step's own."""
        length = (self.size or 1) if self.n == 1 else self.capacity // self.n
        if self.n > 1 and (not self.together or self.size < length):
            base, place, size, last = self._places(slots)
            before = (place - 1) % size
            first = done.take(before + base) | (before == last)
            result: Ints = (before + first) % size + base
            return result
        # For one ring, and for full ones, the same without divisions.
        place = slots if self.n == 1 else slots % length
        found: Ints = slots - 1
        wraps = place == 0
        wrapped = _count(wraps)
        if wrapped:
            found[wraps] += length
        first = done.take(found)
        first |= place == self.cursor % length
        if wrapped:
            return np.where(first, slots, found)
        found += first
        return found

    def next(self, slots: Ints, done: Flags) -> Ints:
        """Return the slot of the step after each, in its episode; of the last one that is there, that step's own."""
        length = (self.size or 1) if self.n == 1 else self.capacity // self.n
        if self.n > 1 and (not self.together or self.size < length):
            base, place, size, last = self._places(slots)
            final = done.take(place + base) | (place == last)
            result: Ints = (place + 1 - final) % size + base
            return result
        place = slots if self.n == 1 else slots % length
        final = done.take(slots)
        final |= place == (self.cursor or length) - 1
        found: Ints = slots + 1
        found -= final
        wraps = place == length - 1
        if _count(wraps):
            found[wraps & ~final] -= length
        return found

    def frames(self, slots: Ints, count: int, done: Flags) -> Ints:
        """Return the slots of the `count` newest steps up to each, oldest first; shape (..., count).

        An episode's first step is repeated where the episode has fewer.
        """
        return self._back(slots, count, done)[0]

    def has_frames(self, slots: Ints, count: int, done: Flags) -> Flags:
        """Tell of each slot whether its episode has `count` steps up to it."""
        found = self.window_of_one(slots, count, done)
        if found is not None:
            whole: Flags = found[0][..., 0] == slots - (count - 1)
            return whole
        reach: Flags = self._back(slots, count, done)[1] >= count - 1
        return reach

    def _back(self, slots: Ints, count: int, done: Flags) -> tuple[Ints, Ints]:
        """Return the slots of `frames`, and the number of steps before each slot in its episode, up to `count - 1`."""
        base, place, size, last = self._places(slots)
        place = place[..., None]
        if self.n > 1:
            base = base[..., None]
            if not self.together:
                size, last = size[..., None], last[..., None]
        stops = np.ones((*slots.shape, count), np.bool_)
        earlier = (place - np.arange(1, count)) % size
        np.equal(earlier, last, stops[..., :-1])
        if self.n > 1:
            earlier += base
        stops[..., :-1] |= done.take(earlier)
        reach = stops.argmax(-1)
        found = place - np.minimum(np.arange(count - 1, -1, -1), reach[..., None])
        found %= size
        if self.n > 1:
            found += base
        return found, reach

    def _places(self, slots: Ints) -> tuple[Any, Ints, Any, Any]:
        """Return, for each slot, its ring's first slot, its place there, how many places count, and the last one."""
        if self.n == 1:
            return 0, slots, self.size or 1, (self.cursor or self.capacity) - 1
        if self.together:
            place = slots % self.even
            return slots - place, place, self.size or 1, (self.cursor or self.even) - 1
        ring = self.ring_of(slots)
        base = self.bases[ring]
        last = (self.cursors[ring] - 1) % self.maxsizes[ring]
        return base, slots - base, self.sizes[ring].clip(1), last

    @property
    def last_index(self) -> Ints:
        """The slot written last in each ring, the first one if there is none; shape (n,)."""
        if self.together:
            return self.bases + ((self.cursor or (self.capacity // self.n)) - 1 if self.size else 0)
        return self.bases + np.where(self.sizes, (self.cursors - 1) % self.maxsizes.clip(1), 0)

    def unfinished(self, done: Flags) -> Ints:
        """Return the newest slot of each ring with a running episode."""
        last = self.last_index[self.sizes_of_all() > 0]
        return last[~done[last]]

    def generation(self, slots: Ints) -> Ints:
        """Return how often each slot has been overwritten since the beginning: -1 if it never was written.

        Emptying a ring counts as writing over all of its slots.
        """
        if self.together:
            maxsize = self.capacity // self.n
            found: Ints = (self.writes - 1 - slots % maxsize) // maxsize
            return found
        ring = self.ring_of(slots)
        found = (self.written[ring] - 1 - (slots - self.bases[ring])) // self.maxsizes[ring]
        return found

    def holds(self, slots: Ints) -> Flags:
        """Tell of each slot in [0, capacity) whether it holds a row."""
        found: Flags
        if self.together:
            length = self.capacity // self.n
            found = (slots % length if self.n > 1 else slots) < self.size
        else:
            ring = self.ring_of(slots)
            found = slots - self.bases[ring] < self.sizes[ring]
        return found

    def overwritten(self) -> Flags:
        """Tell of each ring whether rows have been overwritten since it was empty, shape (n,)."""
        written = self.writes if self.together else self.written
        found: Flags = written - self.origins > self.maxsizes
        return found

    # All rows

    def stretches(self, ring: int) -> list[tuple[int, int]]:
        """Return where the rows of one ring lie, oldest first: as one or two pairs of start and stop."""
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
        """Return the slots of all rows of one ring, or of all rings in succession, oldest first."""
        if ring is None and self.together:
            order = np.concatenate([_zeros(0, _INTP), *(np.arange(*pair) for pair in self.stretches(0))])
            return order if self.n == 1 else (self.bases[:, None] + order).ravel()
        rings = range(self.n) if ring is None else (ring,)
        pairs = [np.arange(*pair) for one in rings for pair in self.stretches(one)]
        return np.concatenate([_zeros(0, _INTP), *pairs])

    def newest(self, count: int, ring: int | None = None) -> Ints:
        """Return the slots of the newest rows, at most `count` of each ring, oldest first."""
        rings = range(self.n) if ring is None else (ring,)
        parts = [self.chronological(one) for one in rings]
        return np.concatenate([_zeros(0, _INTP), *(part[max(len(part) - count, 0) :] for part in parts)])

    def stored_slots(self) -> Ints:
        """Return the slots of all rows as they lie."""
        if self.capacity == len(self):
            return np.arange(self.capacity)
        if self.together:
            return (self.bases[:, None] + np.arange(self.size)).ravel()
        return np.concatenate([base + np.arange(size) for base, size in zip(self.bases, self.sizes, strict=True)])

    def draw(self, count: int, rng: np.random.Generator, ring: int | None = None) -> Ints:
        """Draw slots of rows, each with equal probability, with replacement."""
        if ring is not None:
            total = self._cursor_and_size(ring)[1]
        else:
            total = self.size * self.n if self.together else int(self.sizes.sum())
        if count and not total:
            raise EmptyBufferError("a buffer must have rows to draw from, it has none; add some first")
        # Twice as fast as bit-exact whole numbers, and as likely as any other up to the 53 bits of a float. The largest
        # float below 1 times a whole number below 2**53 is less than that number, rounding included.
        fractions = rng.random(count)
        fractions *= total
        picked: Ints = fractions.astype(_INTP)
        if ring is not None:
            picked += int(self.bases[ring])
            return picked
        if total == self.capacity or self.n == 1:
            return picked
        if self.together:
            ring_of, place = np.divmod(picked, self.size)
            return ring_of * self.even + place
        ends = np.cumsum(self.sizes)
        ring_of = np.searchsorted(ends, picked, "right")
        found: Ints = picked - (ends - self.sizes)[ring_of] + self.bases[ring_of]
        return found

    def interval(self, start: int, stop: int) -> Ints:
        """Return the slots from `start` up to `stop`, both of one ring; past the ring's end they go on at its start."""
        if start == stop and 0 <= start <= self.capacity:
            return _zeros(0, _INTP)
        inside = 0 <= start < self.capacity and 0 < stop <= self.capacity
        ring, ring_of_stop = self.ring_of(np.array([start, stop - 1])) if inside else (0, 1)
        if ring != ring_of_stop:
            raise RingError(f"start and stop must lie within one ring, got {start} and {stop}")
        if start <= stop:
            return np.arange(start, stop)
        return np.concatenate([np.arange(start, self.edges[ring + 1]), np.arange(self.edges[ring], stop)])

    def expect(self, row_shape: tuple[int, ...]) -> None:
        """Set the shape of rewards, and the returns of running episodes to zero."""
        self.nothing = _zeros(row_shape) if row_shape else 0.0
        if self.n == 1:
            self._begin_episode(self.began, self.ep_start, self.nothing)
        else:
            self.ep_return = _zeros((self.n, *row_shape))
            self._share()

    # Writing

    def targets(self, rings: Ints | None) -> Ints | slice | int:
        """Return the slots that the next step of some rings, or of all, goes to; nothing is changed."""
        if rings is None:
            if self.together:
                return self.cursor if self.n == 1 else slice(self.cursor, self.capacity, self.even)
            return self.bases + self.cursors
        return self.bases[rings] + (self.cursor if self.together else self.cursors[rings])

    def run_on(self, rew: Any) -> Added:
        """Count a step of the only ring as written that ends no episode; see `advance`.

        All but the slot is the same for many steps: these arrays are shared, and read-only.
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
        # Not in place: the zeros at an episode's beginning are for all episodes.
        self.ep_return = self.ep_return + rew
        starts, returns, lengths = self._unended
        return slots, returns, lengths, starts

    def _next_slots(self) -> Ints:
        """Precompute the slots of many steps; return those of the next step."""
        length = self.capacity // self.n
        places = np.arange(self.cursor, min(self.cursor + max(_AHEAD // self.n, 1), length))
        self._slots_to_come = iter(places[:, None] + self.bases)
        return next(self._slots_to_come)

    def advance(self, rings: Ints | None, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        """Count a step of some rings, or of all, as written.

        Parameters
        ----------
        rings
            Numbers of k rings, none twice, shape (k,); None for all in order.
        done
            Whether an episode ended with the step, shape (k,).
        rew
            Rewards, shape (k, ...).
        """
        if self.n == 1:
            return self._advance_single(done, rew)
        if rings is None:
            return self.advance_all(done, rew)
        if self.together:
            self._separate()
        places = self.cursors[rings]
        maxsizes, bases = self.maxsizes[rings], self.bases[rings]
        after = (places + 1) % maxsizes
        self.cursors[rings] = after
        self.sizes[rings] = np.minimum(self.sizes[rings] + 1, maxsizes)
        self.written[rings] += 1
        totals = self.ep_return[rings] + rew
        self.ep_return[rings] = totals
        starts = self.ep_start[rings]
        if not _count(done):
            return bases + places, _zeros(totals.shape), _zeros(len(rings), _INTP), starts
        ended = rings[done]
        returns, lengths = _zeros(totals.shape), _zeros(len(rings), _INTP)
        returns[done] = totals[done]
        lengths[done] = self.written[ended] - self.began[ended]
        self.began[ended] = self.written[ended]
        self.ep_start[ended] = bases[done] + after[done]
        self.ep_return[ended] = 0.0
        self._share()
        return bases + places, returns, lengths, starts

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
        """Count successive steps of the only ring as written.

        Parameters
        ----------
        done
            Whether an episode ended with each step, shape (k,).
        rew
            Rewards, shape (k, ...).

        Returns
        -------
        Return and length of the episode that each step ended, or 0, and the first slot of each step's episode.

        Examples
        --------
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
        self._begin_episode(began, first, total)
        return returns, lengths, firsts

    def _begin_episode(self, began: int, start: int, total: Any) -> None:
        """Set the running episode of the only ring: its first write, its first slot, its return."""
        self.began, self.ep_start, self.ep_return = began, start, total
        self._share()

    def end_episode(self, ring: int) -> None:
        """Let the running episode of a ring end with its newest step."""
        together = self.together
        written, place = (self.writes, self.cursor) if together else (int(self.written[ring]), int(self.cursors[ring]))
        start = int(self.bases[ring]) + place
        if self.n == 1:
            self._begin_episode(written, start, self.nothing)
        else:
            self.began[ring], self.ep_start[ring], self.ep_return[ring] = written, start, 0.0
            self._share()

    def _share(self) -> None:
        """Rebuild the arrays that steps share which end no episode."""
        nothing = _zeros((self.n, *np.shape(self.nothing)))
        self._unended = np.array(self.ep_start).reshape(self.n), nothing, _zeros(self.n, _INTP)
        for array in self._unended:
            array.flags.writeable = False

    def advance_all(self, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        """Count a step of all of several rings as written; see `advance`.

        Of steps none of which ends an episode, all but the slots are the same: these arrays are shared, and read-only.
        """
        written: Any
        after: Any
        if self.together:
            try:
                slots = next(self._slots_to_come)
            except StopIteration:
                slots = self._next_slots()
            self.writes = written = self.writes + 1
            after = self.cursor + 1
            if after > self.size:
                self.size = after
            self.cursor = after = after if after < self.even else 0
        else:
            slots = self.bases + self.cursors
            self.written = written = self.written + 1
            after = (self.cursors + 1) % self.maxsizes
            self.cursors = after
            self.sizes = np.minimum(self.sizes + 1, self.maxsizes)
        totals = self.ep_return
        totals += rew
        starts, returns, lengths = self._unended
        if done.tobytes().count(0) == self.n:
            return slots, returns, lengths, starts
        returns, lengths = returns.copy(), lengths.copy()
        returns[done] = totals[done]
        lengths[done] = (written - self.began)[done]
        np.copyto(self.began, written, where=done)
        np.copyto(self.ep_start, self.bases + after, where=done)
        totals[done] = 0.0
        self._share()
        return slots, returns, lengths, starts

    def append(self, ring: int, count: int) -> Ints:
        """Count rows of one ring as written that belong to no running episode; return their slots.

        The running episode is neither ended nor lengthened.
        """
        base, maxsize = int(self.bases[ring]), int(self.maxsizes[ring])
        self._slots_to_come = iter(())
        if self.n == 1:
            place, self.size = self.cursor, min(self.size + count, maxsize)
            self.cursor = (place + count) % maxsize if maxsize else 0
            self.writes += count
            self.began += count
        else:
            if self.together:
                self._separate()
            place = int(self.cursors[ring])
            self.sizes[ring] = min(int(self.sizes[ring]) + count, maxsize)
            self.cursors[ring] = (place + count) % maxsize if maxsize else 0
            self.written[ring] += count
            self.began[ring] += count
        return base + np.arange(place, place + count) % max(maxsize, 1)

    def reset(self, rings: Iterable[int] | None = None, *, keep_statistics: bool = False) -> None:
        """Empty some rings, or all."""
        chosen = list(range(self.n) if rings is None else rings)
        if len(chosen) == self.n:
            # With one number of writes for all, the rings can go together again.
            lengths = (self.writes if self.together else self.written) - self.began
            written = _next_round(np.full(self.n, self.writes, _INTP) if self.together else self.written, self.maxsizes)
            self.cursor = self.size = 0
            self._slots_to_come = iter(())
            self.writes = int(written.max())
            self.together = bool(self.even) or self.n == 1
            if not self.together:
                self._separate()
                self.written = written
            begun = written if not self.together else self.writes
            self.origins[:] = begun
            self.began = begun - lengths if keep_statistics else begun + 0 * self.began
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

    # Carrying on elsewhere

    def state_dict(self, ring: int | None = None) -> dict[str, Any]:
        """Return the state of all rings, or of one, as plain numbers and arrays for `load_state_dict`.

        Examples
        --------
        >>> rings = Rings([4])
        >>> slots, *_ = rings.advance(None, np.array([False]), np.array([1.5]))
        >>> again = Rings([4])
        >>> again.load_state_dict(rings.state_dict())
        >>> again.advance(None, np.array([True]), np.array([1.0]))
        (array([1]), array([2.5]), array([2]), array([0]))
        """
        written = np.full(self.n, self.writes, _INTP) if self.together else self.written.copy()
        found = {
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
            return found | {"together": self.together}
        found = {name: part[ring : ring + 1] for name, part in found.items()}
        return found | {"starts": found["starts"] - self.bases[ring], "together": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of rings of the same sizes."""
        if not np.array_equal(state["maxsizes"], self.maxsizes):
            found, wanted = np.asarray(state["maxsizes"]).tolist()[:8], self.maxsizes.tolist()[:8]
            raise FormatError(f"the state must be of rings of {wanted} slots, got one of {found}")
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
        """Continue one ring from the `state_dict` of another of its size."""
        found = {name: state[name][0] for name in state if name not in ("maxsizes", "together")}
        self._slots_to_come = iter(())
        self.origins[ring] = found["origins"]
        total = found["returns"]
        if self.n == 1:
            self.cursor, self.size, self.writes = (int(found[name]) for name in ("cursors", "sizes", "writes"))
            self._begin_episode(int(found["began"]), int(found["starts"]), total if total.ndim else float(total))
            return
        if self.together:
            self._separate()
        self.cursors[ring], self.sizes[ring], self.written[ring] = found["cursors"], found["sizes"], found["writes"]
        self.began[ring], self.ep_start[ring] = found["began"], found["starts"] + self.bases[ring]
        if np.shape(total) == np.shape(self.nothing):
            self.ep_return[ring] = total
        self._share()

    def unite(self) -> None:
        """Give all rings one cursor again if their positions are equal."""
        places = set(zip(self.cursors.tolist(), self.sizes.tolist(), self.written.tolist(), strict=True))
        if self.together or not self.even or len(places) > 1:
            return
        self.cursor, self.size, self.writes = int(self.cursors[0]), int(self.sizes[0]), int(self.written[0])
        self.together = True
        self._slots_to_come = iter(())


def _sum_onto(total: Any, rew: npt.NDArray[np.float64]) -> Any:
    """Add rewards to a total in the order of the steps, as single steps add them."""
    if rew.ndim == 1:
        for reward in rew.tolist():
            total += reward
        return total
    return np.add.accumulate(np.concatenate([np.reshape(total, (1, *rew.shape[1:])), rew]))[-1]


def _next_round(written: Any, maxsizes: Any) -> Any:
    """Return the next write number that starts a round, so that no generation of a slot repeats."""
    return (-(-written // np.maximum(maxsizes, 1)) + 1) * maxsizes

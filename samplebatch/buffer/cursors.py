"""Cursors: the write position of each of n ring buffers, and the order and neighbours of slots that follow from it.

A ring is a range of slots that is written from the first to the last, and from the first again; rings lie one after the
other. Methods that look for neighbours in an episode take the flags of all slots, `done`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.errors import EmptyBufferError, RingError

Ints = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

_count = np.count_nonzero
_zeros = np.zeros
_INTP = np.dtype(np.intp)
_UINTP = np.dtype(np.uintp)
_logical_not = np.logical_not


class Cursors:
    """Write position and number of rows of each of n ring buffers, for `Rings`, which adds their episodes.

    As long as all rings are written together, one cursor serves them all.

    Parameters
    ----------
    maxsizes
        Slots of each ring.

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
    """

    __slots__ = (
        "bases",
        "capacity",
        "cursor",
        "cursors",
        "edges",
        "even",
        "maxsizes",
        "n",
        "origins",
        "size",
        "sizes",
        "together",
        "writes",
        "written",
    )

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

    def _separate(self) -> None:
        """Give every ring a cursor of its own."""
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

    # The common case: one ring, every given slot holds a row, and no neighbour lies past an edge of the ring.

    def prev_of_one(self, slots: Ints, done: Flags) -> Ints | None:
        """Find the previous steps as `prev` does in the common case; None in any other."""
        found: Ints = slots - 1
        # Among bytes, a flag that is set is found sooner than NumPy counts.
        if self.n > 1 or 1 in (found.view(_UINTP) >= self.size).tobytes():
            return None
        first = done.take(found)
        first |= slots == self.cursor
        found += first
        return found

    def next_of_one(self, slots: Ints, done: Flags) -> Ints | None:
        """Find the next steps as `next` does in the common case; None in any other."""
        if self.n > 1 or not self.size or 1 in (slots.view(_UINTP) >= self.size - 1).tobytes():
            return None
        final = done.take(slots)
        final |= slots == self._last
        found: Ints = slots + _logical_not(final, final)
        return found

    def window_of_one(self, slots: Ints, count: int, done: Flags) -> tuple[Ints, Ints, Flags] | None:
        """Return the frames of each slot, those of the one after it, and whether it is the last of its episode.

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

    @property
    def _last(self) -> int:
        """The slot written last of the only ring."""
        return (self.cursor or self.capacity) - 1

    def prev(self, slots: Ints, done: Flags) -> Ints:
        """Return the slot of the step before each, in its episode; of an episode's first step, that step's own."""
        length = self.capacity // self.n
        if not self.together or self.size < length:
            base, place, size, last = self._places(slots)
            before = (place - 1) % size
            first = done.take(before + base) | (before == last)
            result: Ints = (before + first) % size + base
            return result
        # For full rings the same, without divisions.
        place = slots if self.n == 1 else slots % length
        found: Ints = slots - 1
        wraps = place == 0
        wrapped = _count(wraps)
        if wrapped:
            found[wraps] += length
        first = done.take(found)
        first |= place == self.cursor
        if wrapped:
            return np.where(first, slots, found)
        found += first
        return found

    def next(self, slots: Ints, done: Flags) -> Ints:
        """Return the slot of the step after each, in its episode; of the last one that is there, that step's own."""
        length = self.capacity // self.n
        if not self.together or self.size < length:
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
        """Return how often each slot has been written over since the beginning: -1 if it never was written.

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
        """Tell of each ring whether rows have been written over since it was empty, shape (n,)."""
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
        """Return the slots of all rows of one ring, or of all rings one after the other, oldest first."""
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
        """Draw slots of rows, each as likely as any other, with replacement.

        Raises
        ------
        EmptyBufferError
            If there are no rows, and any are asked for.
        """
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
        """Return the slots from `start` up to `stop`, both of one ring; past the ring's end they go on at its start.

        Raises
        ------
        RingError
            If the two are not of one ring.
        """
        if start == stop and 0 <= start <= self.capacity:
            return _zeros(0, _INTP)
        inside = 0 <= start < self.capacity and 0 < stop <= self.capacity
        ring, ring_of_stop = self.ring_of(np.array([start, stop - 1])) if inside else (0, 1)
        if ring != ring_of_stop:
            raise RingError(f"start and stop must lie within one ring, got {start} and {stop}")
        if start <= stop:
            return np.arange(start, stop)
        return np.concatenate([np.arange(start, self.edges[ring + 1]), np.arange(self.edges[ring], stop)])

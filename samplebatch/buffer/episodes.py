"""Episodes in rings: the slots of each, and the steps before and after a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from samplebatch.buffer.ring import Flags, Ints, Rings


class Episodes(NamedTuple):
    """First slots and lengths of the episodes in rings: ring by ring, in time order."""

    first: Ints
    """The slot of each one's first step that is there."""
    length: Ints
    """How many of its steps are there, from that slot on, in its ring."""
    finished: Flags
    """Whether its last step has been added: the newest episode of a ring may run on."""
    whole: Flags
    """Whether its first step is there: the oldest episode of a ring may have been written over in part."""

    def slots(self, rings: Rings, chosen: Ints) -> tuple[Ints, Ints]:
        """Return the slots of the steps of some episodes, one after the other, and where each begins among them.

        Returns
        -------
        tuple
            Slots, shape (sum of lengths,), and the running sum of the lengths, from 0 on, shape (k + 1,).
        """
        lengths = self.length[chosen]
        ends = np.concatenate([np.zeros(1, np.intp), np.cumsum(lengths)])
        steps = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
        return shift_slots(rings, np.repeat(self.first[chosen], lengths), steps), ends


def find_episodes(rings: Rings, done: Flags, ring: int | None = None) -> Episodes:
    """Find the episodes of one ring, or of all.

    Of the oldest one in a ring whose first rows have been written over, nothing tells whether it is whole: it counts
    as cut.

    Parameters
    ----------
    rings, done
        Of a table.
    ring
        The number of one ring; None for all.

    Examples
    --------
    >>> rings, done = Rings([5]), np.array([False, False, True, False, True])
    >>> for end in (False, True, True, False, True, False, False, True):
    ...     added = rings.advance(None, np.array([end]), np.zeros(1))
    >>> find_episodes(rings, done)
    Episodes(first=array([3, 0]), length=array([2, 3]), finished=array([ True,  True]), whole=array([False,  True]))
    """
    bases, sizes = rings.bases, rings.sizes_of_all()
    oldest = np.where(sizes == rings.maxsizes, rings.cursors_of_all(), 0)
    low, high = (0, rings.capacity) if ring is None else (int(bases[ring]), int(rings.edges[ring + 1]))
    ends = np.flatnonzero(done[low:high]) + low
    of = rings.ring_of(ends)
    ends, of = (part[ends - bases[of] < sizes[of]] for part in (ends, of))
    # The newest step of a ring is the last of its episode that is there, ended or not.
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
    whole = ~leads | ~rings.overwritten()[of]
    return Episodes(shift_slots(rings, ends, 1 - length), length, finished, whole)


_FIRST_LOOK = 32
"""Steps that are looked at first; each further look takes twice as many, of those whose episode runs on."""


def steps_after(rings: Rings, done: Flags, slots: Ints, limit: int) -> Ints:
    """Count the steps that follow each in its episode, as far as the ring has them.

    Parameters
    ----------
    rings, done
        Of a table.
    slots
        Slots of rows, shape (k,).
    limit
        The most to count.

    Examples
    --------
    >>> rings, done = Rings([4]), np.array([False, True, False, False])
    >>> for end in (0, 1, 0, 0, 0):
    ...     added = rings.advance(None, np.array([end]), np.zeros(1))
    >>> steps_after(rings, np.array([False, True, False, False]), np.array([1, 2, 3, 0]), 9)
    array([0, 2, 1, 0])
    """
    return _run(rings, done, slots, limit, forward=True)


def steps_before(rings: Rings, done: Flags, slots: Ints, limit: int) -> Ints:
    """Count the steps that come before each in its episode, as far as the ring has them; see `steps_after`."""
    return _run(rings, done, slots, limit, forward=False)


def shift_slots(rings: Rings, slots: Ints, by: Ints) -> Ints:
    """Return the slots `by` steps later in their rings, or earlier for negative numbers.

    Shapes are broadcast. The rings must have rows there.
    """
    ring = rings.ring_of(slots)
    base, size = rings.bases[ring], rings.sizes_of_all()[ring]
    moved: Ints = base + (slots - base + by) % size
    return moved


def _run(rings: Rings, done: Flags, slots: Ints, limit: int, *, forward: bool) -> Ints:
    ring = rings.ring_of(slots)
    base, size = rings.bases[ring], rings.sizes_of_all()[ring]
    place, last = slots - base, rings.last_index[ring] - base
    found = np.full(len(slots), limit, np.intp)
    left = np.arange(len(slots))
    seen, width = 0, _FIRST_LOOK
    while len(left) and seen < limit:
        steps = np.arange(seen, min(seen + width, limit))
        at = place[left, None] + (steps if forward else -1 - steps)
        at %= size[left, None]
        # True at an episode's last step, where it ends forward, and where the next episode ends backward.
        over = done[at + base[left, None]] | (at == last[left, None])
        ended = over.any(1)
        found[left[ended]] = seen + over[ended].argmax(1)
        left = left[~ended]
        seen, width = seen + len(steps), 2 * width
    return found

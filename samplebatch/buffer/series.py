"""Series: several steps of each of some rings, counted as if they had been written one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.buffer.ring import Added, Flags, Ints, Rings

_INTP = np.dtype(np.intp)


class Series:
    """Where k steps go that are given in order of time, and what follows for the episodes of their rings.

    Parameters
    ----------
    rings
        The rings, which are looked at, and not changed before `advance`.
    numbers
        The ring of each step, shape (k,).

    Attributes
    ----------
    slots
        The slot of each step, shape (k,).
    lasting
        The steps that no later one is written over, shape (l,), ascending; None for all.
    rings, newest
        The rings that get steps, ascending, and the newest step of each.

    Examples
    --------
    >>> rings = Rings([2, 2])
    >>> series = Series(rings, np.array([0, 0, 1, 0]))
    >>> series.slots, series.lasting, series.newest
    (array([0, 1, 2, 0]), array([1, 2, 3]), array([3, 2]))
    >>> series.advance(np.array([False, True, False, False]), np.array([1.0, 2.0, 4.0, 8.0]))
    (array([0, 1, 2, 0]), array([0., 3., 0., 0.]), array([0, 2, 0, 0]), array([0, 0, 2, 0]))
    """

    def __init__(self, rings: Rings, numbers: Ints) -> None:
        self._all = rings
        # NumPy sorts short integers by radix, in linear time.
        key = numbers.astype(np.uint16) if rings.n <= 1 << 16 else numbers
        self._order: Ints = key.argsort(kind="stable")
        self._ring: Ints = numbers[self._order]
        self._counts = np.bincount(numbers, minlength=rings.n)
        self._stops = np.cumsum(self._counts)
        # Steps of the ring before each.
        self._rank = np.arange(len(numbers)) - (self._stops - self._counts)[self._ring]
        cursors, maxsizes = rings.cursors_of_all(), rings.maxsizes
        places = (cursors[self._ring] + self._rank) % maxsizes[self._ring]
        self.slots: Ints = np.empty(len(numbers), _INTP)
        self.slots[self._order] = rings.bases[self._ring] + places
        self.rings: Ints = self._counts.nonzero()[0]
        self.newest: Ints = self._order[self._stops[self.rings] - 1]
        self.lasting: Ints | None = None
        if (self._counts > maxsizes).any():
            self.lasting = np.sort(self._order[self._rank >= (self._counts - maxsizes)[self._ring]])

    def advance(self, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        """Count the steps as written; see `Rings.advance`.

        Parameters
        ----------
        done
            Whether an episode ended with each, shape (k,).
        rew
            Rewards, shape (k, ...).
        """
        rings, order, ring = self._all, self._order, self._ring
        state = rings.state()
        done, rew, slots = done[order], rew[order], self.slots[order]
        written = state["writes"][ring] + self._rank
        # A run is what a ring gets of one episode.
        opens = self._rank == 0
        begins = opens.copy()
        begins[1:] |= done[:-1]
        starts = begins.nonzero()[0]
        lasts = np.append(starts[1:], len(ring)) - 1
        run = begins.cumsum() - 1
        goes_on, ring_of = opens[starts], ring[starts]
        began = np.where(goes_on, state["began"][ring_of], written[starts])
        first_slots = np.where(goes_on, state["starts"][ring_of], slots[starts])
        totals = _sums(np.where(_as_wide(goes_on, rew), state["returns"][ring_of], 0.0), rew, run)
        lengths = written[lasts] + 1 - began
        ended = done[lasts]

        returns, lens, firsts = np.zeros(rew.shape), np.zeros(len(ring), _INTP), np.empty(len(ring), _INTP)
        closing = order[lasts[ended]]
        returns[closing] = totals[ended]
        lens[closing] = lengths[ended]
        firsts[order] = first_slots[run]

        # What the last run of each ring leaves behind.
        final = np.append(goes_on[1:], True)
        changed, over = ring_of[final], ended[final]
        state["writes"] += self._counts
        state["cursors"] = (state["cursors"] + self._counts) % np.maximum(rings.maxsizes, 1)
        state["sizes"] = np.minimum(state["sizes"] + self._counts, rings.maxsizes)
        state["began"][changed] = np.where(over, state["writes"][changed], began[final])
        begun = rings.bases[changed] + state["cursors"][changed]
        state["starts"][changed] = np.where(over, begun, first_slots[final])
        state["returns"][changed] = np.where(_as_wide(over, rew), 0.0, totals[final])
        alike = all(len(set(state[name].tolist())) == 1 for name in ("cursors", "sizes", "writes"))
        state["together"] = rings.n == 1 or (bool(rings.even) and alike)
        rings.restore(state)
        return self.slots, returns, lens, firsts


def _sums(before: npt.NDArray[np.float64], rew: npt.NDArray[np.float64], run: Ints) -> npt.NDArray[np.float64]:
    """Add up the rewards of each run one after the other, as they would be if they came one by one."""
    count = len(before)
    runs = np.concatenate([np.arange(count), run])
    values = np.concatenate([before, rew]).reshape(len(runs), -1)
    sums = np.zeros((count, values.shape[1]))
    for place, column in enumerate(values.T):
        sums[:, place] = np.bincount(runs, column, minlength=count)
    return sums.reshape(before.shape)


def _as_wide(flags: Flags, like: npt.NDArray[Any]) -> Flags:
    """Give flags axes for the shape of a row."""
    return flags.reshape(len(flags), *(1,) * (like.ndim - 1))

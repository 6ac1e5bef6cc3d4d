"""DrawsLeft: how often each step of a replay table may still be sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.samplers import Prioritized
from samplebatch.errors import FormatError

Slots = npt.NDArray[np.intp]

_ROUNDS = 3
"""Rounds of drawing and refusing before all steps are looked at."""


class DrawsLeft:
    """The draws that are left of each slot of a buffer, for tables that limit how often a step is sampled.

    Parameters
    ----------
    capacity
        Slots of the buffer.
    most
        How often each step may be sampled.

    Attributes
    ----------
    counts
        The draws that are left of each slot, 0 where there is no step; shape (capacity,).
    total
        Their sum.
    """

    def __init__(self, capacity: int, most: int) -> None:
        self.counts = np.zeros(capacity, np.int64)
        self.most = most
        self.total = 0

    def renew(self, slots: Slots) -> None:
        """Note that new steps were written to slots."""
        slots = np.unique(slots)
        self.total += len(slots) * self.most - int(self.counts[slots].sum())
        self.counts[slots] = self.most

    def spent(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Tell of each slot whether no draws are left."""
        found: npt.NDArray[np.bool_] = self.counts[slots] == 0
        return found

    @contextmanager
    def draw(self, buffer: ReplayBuffer, n: int) -> Iterator[Slots]:
        """Draw n slots as a buffer does, one after the other, and take those that are spent out of it afterwards.

        Rows are to be gathered within the block, where their priorities still are as they were. There must be as many
        draws left.
        """
        sampler = buffer._sampler if isinstance(buffer._sampler, Prioritized) else None
        found = np.zeros(0, np.intp)
        spent: list[Slots] = []
        weights: list[npt.NDArray[np.float64]] = []
        rounds = 0
        while len(found) < n:
            rounds += 1
            picked = self._pick(buffer, n - len(found), by_count=sampler is None and rounds > _ROUNDS)
            picked = picked[_ordinals(picked) < self.counts[picked]]
            np.subtract.at(self.counts, picked, 1)
            found = np.concatenate([found, picked])
            gone = np.unique(picked[self.counts[picked] == 0])
            if sampler is not None and len(gone):
                spent.append(gone)
                weights.append(sampler.tree.get(gone))
                sampler.on_remove(gone)
        self.total -= n
        if sampler is not None and spent:
            sampler.tree.set(np.concatenate(spent), np.concatenate(weights))
        try:
            yield found
        finally:
            if sampler is not None and spent:
                sampler.on_remove(np.concatenate(spent))

    def _pick(self, buffer: ReplayBuffer, n: int, *, by_count: bool) -> Slots:
        """Draw n slots, some of which may be spent; if `by_count`, none is at first."""
        if by_count:
            left = np.flatnonzero(self.counts)
            return left[buffer._rng.integers(0, len(left), n)]
        return buffer._draw(n)

    def set_most(self, buffer: ReplayBuffer, most: int) -> None:
        """Change how often each step may be sampled; draws so far count."""
        held = buffer._table.rings.stored_slots()
        revived = held[self.counts[held] == 0]
        self.counts[held] = np.maximum(self.counts[held] + most - self.most, 0)
        self.most, self.total = most, int(self.counts.sum())
        if isinstance(buffer._sampler, Prioritized):
            buffer._sampler.on_add(revived[self.counts[revived] > 0])
            buffer._sampler.on_remove(held[self.counts[held] == 0])

    def lift(self, buffer: ReplayBuffer) -> None:
        """Let spent steps be drawn again, with the largest priority so far."""
        held = buffer._table.rings.stored_slots()
        if isinstance(buffer._sampler, Prioritized):
            buffer._sampler.on_add(held[self.counts[held] == 0])

    def load(self, counts: npt.NDArray[np.int64]) -> None:
        """Carry on from the counts of another.

        Raises
        ------
        FormatError
            If they are of other slots, or more than there may be.
        """
        if counts.shape != self.counts.shape or (counts < 0).any() or (counts > self.most).any():
            raise FormatError(
                f"the draws left must be from 0 to {self.most} for {len(self.counts)} slots, they are not"
            )
        self.counts = counts.astype(np.int64)
        self.total = int(counts.sum())


def _ordinals(values: Slots) -> Slots:
    """Return how often each value stands before itself.

    Examples
    --------
    >>> _ordinals(np.array([5, 2, 5, 5, 2]))
    array([0, 0, 1, 2, 1])
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([np.ones(1, np.bool_), ordered[1:] != ordered[:-1]]))
    found = np.empty(len(values), np.intp)
    found[order] = np.arange(len(values)) - np.repeat(starts, np.diff(np.append(starts, len(values))))
    return found

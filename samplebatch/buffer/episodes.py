"""Whole episodes: where they lie in the rings, and samples of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.ring import Flags, Ints, Rings
from samplebatch.buffer.rows import Rows
from samplebatch.buffer.spans import shifted
from samplebatch.errors import EmptyBufferError


class Episodes(NamedTuple):
    """Where the episodes of rings lie: ring by ring, in time order."""

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
        return shifted(rings, np.repeat(self.first[chosen], lengths), steps), ends


def episodes_of(rings: Rings, done: Flags, ring: int | None = None) -> Episodes:
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
    >>> episodes_of(rings, done)
    Episodes(first=array([3, 0]), length=array([2, 3]), finished=array([ True,  True]), whole=array([False,  True]))
    """
    bases, sizes = rings.bases, rings.sizes_of_all()
    oldest = np.where(sizes == rings.maxsizes, rings.cursors_of_all(), 0)
    low, high = (0, rings.capacity) if ring is None else (int(bases[ring]), int(rings.edges[ring + 1]))
    ends = np.flatnonzero(done[low:high]) + low
    of = rings.ring_of(ends)
    ends, of = (part[ends - bases[of] < sizes[of]] for part in (ends, of))
    # The newest step of a ring ends what is there of its episode, in whichever way.
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
    return Episodes(shifted(rings, ends, 1 - length), length, finished, whole)


if TYPE_CHECKING:
    _Base = Rows
else:
    # At run time no base, so that buffers derive from `Rows` along one way.
    _Base = object


class EpisodeSampling(_Base):
    """Rows that can be had by whole episodes."""

    if TYPE_CHECKING:
        _rng: np.random.Generator

    def sample_episodes(self, n: int | None, *, unfinished: bool = False) -> tuple[list[Batch], list[Ints]]:
        """Draw whole episodes with replacement, each as likely as any other.

        An episode is whole if all of its steps are there. Of the oldest one in a ring whose first rows have been
        written over, nothing tells, so it is left out.

        Parameters
        ----------
        n
            How many; 0 for all in time order, ring by ring, None for all in random order, a negative number for none.
        unfinished
            Whether those that run on may be drawn, too.

        Returns
        -------
        episodes
            Their rows in time order, as `buf[...]` gives them: slices of one copy.
        indices
            Where the rows are, an array for each episode.

        Raises
        ------
        ArgumentError
            If `n` is no whole number.
        EmptyBufferError
            If there is no episode to draw from.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer
        >>> buf = ReplayBuffer(8)
        >>> for i in range(7):
        ...     added = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=i in (2, 5), truncated=False, obs_next=i + 1))
        >>> episodes, indices = buf.sample_episodes(0)
        >>> [episode.obs.tolist() for episode in episodes], indices[1]
        ([[0, 1, 2], [3, 4, 5]], array([3, 4, 5]))
        """
        if n is not None:
            whole("n", n, None)
        with self._table.lock:
            slots, ends = self._drawn_episodes(n, unfinished=unfinished)
            if not len(slots):
                return [], []
            rows, indices = self._rows(slots), slots - self._start
        cuts = [slice(*pair) for pair in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        return [rows[cut] for cut in cuts], [indices[cut] for cut in cuts]

    def _drawn_episodes(self, n: int | None, *, unfinished: bool) -> tuple[Ints, Ints]:
        """Draw episodes, and return the slots of their steps and where each begins among them."""
        table = self._table
        if "obs" not in table.columns.tree:
            candidates = np.zeros(0, np.intp)
        else:
            found = episodes_of(table.rings, table.done, self._ring)
            candidates = np.flatnonzero(found.whole if unfinished else found.whole & found.finished)
        chosen = candidates[:0]
        if n is None:
            chosen = self._rng.permutation(candidates)
        elif n == 0:
            chosen = candidates
        elif n > 0:
            if not len(candidates):
                raise EmptyBufferError("a buffer must have a whole episode to draw from, it has none; add more steps")
            chosen = candidates[self._rng.integers(0, len(candidates), n)]
        return found.slots(table.rings, chosen) if len(chosen) else (chosen, chosen)

"""CachedReplayBuffer: whole episodes in one main buffer, however many environments they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.gather import rows_at
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Added, Ints
from samplebatch.buffer.vector import ReplayBufferManager
from samplebatch.buffer.writing import drop_empty, step_values
from samplebatch.errors import ColumnTypeError


class CachedReplayBuffer(ReplayBufferManager):
    """A main buffer, and a cache for each environment, from which finished episodes move to the main buffer.

    So the main buffer holds every episode in one piece, although environments take turns. Indices count the main
    buffer's slots first, then those of the caches.

    Parameters
    ----------
    main_buffer
        Where finished episodes go; becomes a part of this one, with the rows it has. With a size of 0 they go nowhere.
    cached_buffer_num
        How many environments there are.
    max_episode_length
        Slots of each cache; of a longer episode the newest steps are kept.

    Attributes
    ----------
    main_buffer, cached_buffers
        The parts: a buffer, and an array of them.
    cached_buffer_num
        As given.

    Raises
    ------
    ArgumentError
        If `cached_buffer_num` or `max_episode_length` is no whole number from 1 on.
    ColumnTypeError
        If the main buffer is of a kind that draws otherwise than uniformly.

    Examples
    --------
    >>> buf = CachedReplayBuffer(ReplayBuffer(10), cached_buffer_num=2, max_episode_length=5)
    >>> for ends in ([False, False], [True, False]):
    ...     index, returns, lengths, starts = buf.add(
    ...         Batch(obs=[0, 1], act=[0, 0], rew=[1.0, 1.0], terminated=ends, truncated=[False, False])
    ...     )
    >>> index, starts, lengths
    (array([ 1, 16]), array([ 0, 15]), array([2, 0]))
    >>> len(buf.main_buffer), len(buf.cached_buffers[0]), len(buf)
    (2, 0, 4)
    """

    def __init__(self, main_buffer: ReplayBuffer, cached_buffer_num: int, max_episode_length: int) -> None:
        cached_buffer_num = whole("cached_buffer_num", cached_buffer_num, 1)
        max_episode_length = whole("max_episode_length", max_episode_length, 1)
        if type(main_buffer) is not ReplayBuffer:
            raise ColumnTypeError(
                "the main buffer of a cached buffer must be a ReplayBuffer, which draws uniformly, got a "
                f"{type(main_buffer).__name__}"
            )
        options = main_buffer.options | {"stack_num": main_buffer.stack_num}
        caches = [
            ReplayBuffer(max_episode_length, random_seed=main_buffer._seed, **options) for _ in range(cached_buffer_num)
        ]
        super().__init__([main_buffer, *caches])
        self.cached_buffer_num = cached_buffer_num
        self._order = list(range(cached_buffer_num))

    @property
    def main_buffer(self) -> ReplayBuffer:
        """The main buffer."""
        main: ReplayBuffer = self.buffers[0]
        return main

    @property
    def cached_buffers(self) -> npt.NDArray[Any]:
        """The caches, in an array of objects."""
        return self.buffers[1:]

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        **columns: Any,
    ) -> Added:
        """Add a step of each environment, or of some; episodes that end with it move to the main buffer.

        Parameters
        ----------
        batch
            Values by name, with a leading axis: one row for each cache, or for each of `buffer_ids`. The older form
            gives them as keywords.
        buffer_ids
            The caches that the rows are for, the main buffer not counted, shape (k,); None for all in order.

        Returns
        -------
        tuple
            Four arrays of length k: indices, returns, lengths and first indices as `ReplayBufferManager.add` returns
            them; of an episode that moved, the indices of its last and first step in the main buffer, -1 if that has no
            slots.

        Raises
        ------
        SampleBatchError
            As `ReplayBufferManager.add` does. Nothing has changed then.
        """
        held = step_values(batch, columns)
        rings = None if buffer_ids is None else self._rings_of(buffer_ids)
        chosen = np.arange(1, self.buffer_num) if rings is None else rings + 1
        table = self._table
        with table.lock:
            if rings is not None and len(set(rings.tolist())) < len(rings):
                table.check(held, len(rings), stored=False)
                return self._add_in_turns(Batch(held), rings)
            slots, returns, lengths, starts = table.add(held, len(chosen), chosen)
            for position in np.flatnonzero(table.done[slots]).tolist():
                slots[position], starts[position] = self._move(int(chosen[position]))
        return slots, returns, lengths, starts

    def _add_in_turns(self, rows: Batch, rings: Ints) -> Added:
        """Add rows, as many at once as are for different caches: an episode that ends moves before another row."""
        starts, taken = [0], set[int]()
        for row, ring in enumerate(rings.tolist()):
            if ring in taken:
                starts.append(row)
                taken.clear()
            taken.add(ring)
        stops = [*starts[1:], len(rings)]
        found = [self.add(rows[start:stop], rings[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        slots, returns, lengths, begins = (np.concatenate(part) for part in zip(*found, strict=True))
        return slots, returns, lengths, begins

    def _move(self, ring: int) -> tuple[int, int]:
        """Move the rows of a cache to the main buffer; return the slots of the last and of the first."""
        table = self._table
        slots = table.rings.chronological(ring)
        first = last = -1
        size = int(table.rings.maxsizes[0])
        if size and len(slots):
            rows = drop_empty(rows_at(table, slots[-size:], 1))
            moved = table.append(0, rows, len(slots))
            first, last = int(moved[0]), int(moved[-1])
        table.reset([ring])
        return last, first

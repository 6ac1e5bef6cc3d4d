"""Sampling of a buffer's rows: single steps, minibatches, episodes, and sequences for recurrent learners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, TENSOR, node
from samplebatch.buffer.episodes import find_episodes, shift_slots, steps_after, steps_before
from samplebatch.buffer.gather import check_window, nstep_columns, rows_at
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.rows import Rows
from samplebatch.buffer.samplers import Uniform, whole_stacks
from samplebatch.errors import ColumnMismatchError, EmptyBufferError, SequenceError

_INTP = np.dtype(np.intp)
_GAMMA = 0.99
"""The discount of a step, unless another is given."""

_zeros = np.zeros


class Sampling(Rows):
    """The sampling methods of `ReplayBuffer`: batches of rows, minibatches, whole episodes and sequences."""

    _rng: np.random.Generator
    options: dict[str, Any]

    # Steps

    def sample(self, batch_size: int | None, *, n_step: int | None = None, gamma: float = _GAMMA) -> tuple[Batch, Ints]:
        """Draw rows; see `sample_indices`.

        Parameters
        ----------
        batch_size
            How many, as `sample_indices` takes it.
        n_step
            The most steps that each row stands for. The rows then have two columns more: `returns`, the discounted sum
            of the rewards of up to `n_step` steps of the episode, and `discount`, the factor of the bootstrap value at
            `obs_next`, now the observation after the last of them: `gamma` to the number of the steps, or 0 where the
            last is terminated. None: each row is a step.
        gamma
            The discount of a step.

        Returns
        -------
        batch
            The rows, as `buf[indices]` gives them.
        indices
            Where they are.

        Raises
        ------
        EmptyBufferError
            If there is no row to draw from.
        ArgumentError
            If `batch_size` is no whole number, `n_step` none from 1 on, or `gamma` none from 0 to 1. Nothing is drawn
            then.
        ColumnNotFoundError
            If rows are to stand for several steps, and have no next observations. Nothing is drawn then.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer
        >>> buf = ReplayBuffer(8)
        >>> for i in range(5):
        ...     added = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=i == 4, truncated=False, obs_next=i + 1))
        >>> batch, indices = buf.sample(0, n_step=3, gamma=0.5)
        >>> batch.returns, batch.discount, batch.obs_next
        (array([1.75, 1.75, 1.75, 1.5 , 1.  ]), array([0.125, 0.125, 0.   , 0.   , 0.   ]), array([3, 4, 5, 5, 5]))
        """
        with self._table.lock:
            if n_step is not None or gamma != _GAMMA:
                check_window(self._table, n_step, gamma)
            slots = self._draw(batch_size)
            rows = self._rows(slots)
            if n_step is not None:
                rows.__dict__.update(nstep_columns(self._table, slots, n_step, gamma, self.stack_num))
        return rows, slots - self._start if self._start else slots

    def sample_indices(self, batch_size: int | None) -> Ints:
        """Draw indices of rows with replacement.

        Parameters
        ----------
        batch_size
            How many; 0 for all in time order, None for all in random order, a negative number for none.

        Raises
        ------
        EmptyBufferError
            If there is no row to draw from.
        ArgumentError
            If `batch_size` is no whole number.
        """
        with self._table.lock:
            return self._draw(batch_size) - self._start

    def _draw(self, batch_size: int | None) -> Ints:
        if batch_size is not None:
            batch_size = whole("batch_size", batch_size, None)
        frames = self.stack_num if self.options["sample_avail"] else 1
        if batch_size is not None and batch_size > 0:
            sampler = self._sampler
            if type(sampler) is Uniform:
                sampler.frames = frames
            return sampler.draw(self._table, self._ring, batch_size, self._rng)
        if batch_size is not None and batch_size < 0:
            return _zeros(0, _INTP)
        every = whole_stacks(self._table, self._ring, frames)
        return every if batch_size == 0 else self._rng.permutation(every)

    def minibatches(
        self, batch_size: int, *, epochs: int = 1, shuffle: bool = True, drop_last: bool = False
    ) -> Iterator[tuple[Batch, Ints]]:
        """Go over all rows in batches, each row once an epoch.

        Parameters
        ----------
        batch_size
            Rows in a batch.
        epochs
            How often to go over the rows.
        shuffle
            Whether to draw a new order for each epoch; otherwise they come in time order.
        drop_last
            Whether to leave out a last batch with fewer rows.

        Yields
        ------
        The rows and their indices, as `sample` returns them.

        Raises
        ------
        ArgumentError
            If `batch_size` is no whole number from 1 on, or `epochs` none from 0 on.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer
        >>> buf = ReplayBuffer(8)
        >>> for i in range(5):
        ...     added = buf.add(Batch(obs=i, act=0, rew=0, terminated=False, truncated=False))
        >>> [batch.obs.tolist() for batch, _ in buf.minibatches(2, shuffle=False)]
        [[0, 1], [2, 3], [4]]
        """
        whole("batch_size", batch_size, 1)
        for _ in range(whole("epochs", epochs)):
            every = self.sample_indices(None if shuffle else 0)
            for start in range(0, len(every), batch_size):
                indices = every[start : start + batch_size]
                if len(indices) == batch_size or not drop_last:
                    yield self[indices], indices

    def split(
        self, size: int, shuffle: bool = True, merge_last: bool = False, *, rng: np.random.Generator | None = None
    ) -> Iterator[Batch]:
        """Go over all rows in batches of a size; see `Batch.split`. The order is the buffer's own draw by default."""
        rows: Batch = self[:]
        return rows.split(size, shuffle, merge_last, rng=self._rng if rng is None else rng)

    # Episodes

    def sample_episodes(self, n: int | None, *, unfinished: bool = False) -> tuple[list[Batch], list[Ints]]:
        """Draw whole episodes with replacement, each as likely as any other.

        An episode is whole if all of its steps are there. Of the oldest one in a ring whose first rows have been
        written over, nothing tells, so it is left out.

        Parameters
        ----------
        n
            How many; 0 for all in time order, ring by ring, None for all in random order, a negative number for none.
        unfinished
            Whether running episodes may be drawn, too.

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
            slots, ends = self._draw_episodes(n, unfinished=unfinished)
            if not len(slots):
                return [], []
            rows, indices = self._rows(slots), slots - self._start
        cuts = [slice(*pair) for pair in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        return [rows[cut] for cut in cuts], [indices[cut] for cut in cuts]

    def _draw_episodes(self, n: int | None, *, unfinished: bool) -> tuple[Ints, Ints]:
        """Draw episodes, and return the slots of their steps and where each begins among them."""
        table = self._table
        if "obs" not in table.columns.tree:
            candidates = np.zeros(0, np.intp)
        else:
            found = find_episodes(table.rings, table.done, self._ring)
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

    # Sequences

    def sample_sequences(
        self, batch_size: int | None, length: int, *, burn_in: int = 0, padded: bool = True
    ) -> tuple[Batch, Ints]:
        """Draw steps, and return the sequences that begin with them; none crosses an episode or the write cursor.

        Each step is drawn as `sample` draws it: as likely as any other, or by its priority.

        Parameters
        ----------
        batch_size
            How many, as `sample_indices` takes it.
        length, burn_in
            As `get_sequences` takes them.
        padded
            Whether sequences may be shorter. If not, one is drawn of all stretches of `length` steps of an episode,
            uniformly and without regard to priorities, and its first `burn_in` steps only warm up the state.

        Returns
        -------
        batch, indices
            As `get_sequences` returns them.

        Raises
        ------
        EmptyBufferError
            If there is nothing to draw from.
        ArgumentError, ColumnMismatchError, SequenceError
            As `get_sequences` does. Nothing is drawn then.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer
        >>> buf = ReplayBuffer(8)
        >>> for i in range(7):
        ...     added = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=i == 3, truncated=False, obs_next=i + 1))
        >>> batch, indices = buf.sample_sequences(32, 3)
        >>> batch.obs.shape, bool((batch.obs == np.where(batch.mask, indices, 0)).all())
        ((32, 3), True)
        >>> np.unique(buf.sample_sequences(32, 3, padded=False)[0].obs, axis=0).tolist()
        [[0, 1, 2], [1, 2, 3], [4, 5, 6]]
        """
        _check_length(length, burn_in)
        with self._table.lock:
            self._check_names()
            if padded or batch_size is None or batch_size < 1:
                return self._sequences(self._draw(batch_size), length, burn_in)
            return self._sequences(self._draw_stretches(batch_size, length, burn_in), length, burn_in)

    def _draw_stretches(self, batch_size: int, length: int, burn_in: int) -> Ints:
        """Draw stretches of `length` steps, and return the slots of their first steps after burn-in."""
        whole("batch_size", batch_size)
        table, rng = self._table, self._rng
        count = 0
        if "obs" in table.columns.tree:
            found = find_episodes(table.rings, table.done, self._ring)
            stretches = np.cumsum(np.maximum(found.length - length + 1, 0))
            count = int(stretches[-1]) if len(stretches) else 0
        if not count:
            raise EmptyBufferError(
                f"a buffer must have an episode of {length} steps to draw from, it has none; add more, or allow padding"
            )
        picked = rng.integers(0, count, batch_size)
        episode = np.searchsorted(stretches, picked, "right")
        place = picked - stretches[episode] + found.length[episode] - length + 1
        return shift_slots(table.rings, found.first[episode], place + burn_in)

    def get_sequences(self, index: Any, length: int, *, burn_in: int = 0) -> tuple[Batch, Ints]:
        """Return the sequences that begin with some steps; none crosses an episode or the write cursor.

        A sequence has up to `burn_in` steps that come before, the step itself, and those that follow, `length` in all
        at the most. Where the episode has fewer, zeros (None for objects) stand at the end.

        Parameters
        ----------
        index
            The steps, as between brackets; n of them.
        length
            Steps of a sequence.
        burn_in
            How many of them may come before the given step. They are there to warm up the state of a recurrent learner.

        Returns
        -------
        batch
            The columns of `buf[...]`, of shape (n, length, ...), and two more of shape (n, length): `mask`, whether a
            step is there, and `burn_in`, whether it only warms up the state. Of a prioritized buffer `weight` and
            `generation` have shape (n,): they are those of the given steps, `indices[range(n), batch.burn_in.sum(1)]`.
        indices
            Where the steps are, shape (n, length); -1 where there is none.

        Raises
        ------
        ColumnMismatchError
            If rows have a column `mask` or `burn_in` already.
        RowIndexError
            If an index lies outside.
        SequenceError
            If `burn_in` leaves no step.
        ArgumentError
            If `length` is no whole number from 1 on, or `burn_in` none from 0 on.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer
        >>> buf = ReplayBuffer(8)
        >>> for i in range(1, 8):
        ...     added = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=i == 3, truncated=False, obs_next=i + 1))
        >>> batch, indices = buf.get_sequences([0, 2, 4], 4, burn_in=1)
        >>> batch.obs, indices
        (array([[1, 2, 3, 0],
               [2, 3, 0, 0],
               [4, 5, 6, 7]]), array([[ 0,  1,  2, -1],
               [ 1,  2, -1, -1],
               [ 3,  4,  5,  6]]))
        >>> batch.burn_in.sum(1), batch.mask.sum(1)
        (array([0, 1, 1]), array([3, 2, 4]))
        """
        _check_length(length, burn_in)
        with self._table.lock:
            return self._sequences(self._slots(index).reshape(-1), length, burn_in)

    def _sequences(self, given: Ints, length: int, burn_in: int) -> tuple[Batch, Ints]:
        """Return the sequences that begin with the steps in given slots, shape (n,)."""
        table = self._table
        rings, done = table.rings, table.done
        self._check_names()
        before = steps_before(rings, done, given, burn_in) if burn_in and len(given) else np.zeros(len(given), np.intp)
        after = steps_after(rings, done, given, length - 1) if len(given) else before
        count = np.minimum(before + 1 + after, length)[:, None]
        steps = np.arange(length)
        mask = steps < count
        offsets = np.minimum(steps, count - 1) - before[:, None]
        slots = shift_slots(rings, given[:, None], offsets) if len(given) else offsets
        held = rows_at(table, slots, self.stack_num)
        padding = ~mask
        if padding.any():
            held = {name: _blank_out(value, padding) for name, value in held.items()}
        held.update(self._sampler.columns(table, given))
        held |= {names.MASK: mask, names.BURN_IN: steps < before[:, None]}
        return node(Batch, held), np.where(mask, slots - self._start, -1)

    def _check_names(self) -> None:
        for name in (names.MASK, names.BURN_IN):
            if name in self._table.columns.tree:
                raise ColumnMismatchError(f"sequences have a column {name!r} of their own; rename that of the rows")


def _check_length(length: int, burn_in: int) -> None:
    if whole("burn_in", burn_in) >= whole("length", length, 1):
        raise SequenceError(f"burn_in must leave a step of a sequence of length {length}, got {burn_in}")


def _blank_out(value: Any, where: npt.NDArray[np.bool_]) -> Any:
    """Put zeros, None for objects, in place of some rows."""
    kind = KINDS[type(value)]
    if kind == NODE:
        return node(type(value), {name: _blank_out(inner, where) for name, inner in value.__dict__.items()})
    if kind == TENSOR:
        value[np.nonzero(where)] = 0
    else:
        value[where] = None if value.dtype.kind == "O" else np.zeros((), value.dtype)
    return value

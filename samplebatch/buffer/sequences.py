"""Sequences of steps for recurrent learners: cut out of episodes, padded to one length, with burn-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, TENSOR, node
from samplebatch.buffer.episodes import EpisodeSampling, episodes_of
from samplebatch.buffer.reading import rows_at
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.spans import shifted, steps_after, steps_before
from samplebatch.errors import ColumnMismatchError, EmptyBufferError, SequenceError


class SequenceSampling(EpisodeSampling):
    """Rows that can be had as sequences."""

    if TYPE_CHECKING:

        def _drawn(self, batch_size: int | None) -> Ints: ...

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
            each as likely as any other, whatever the priorities, and its first `burn_in` steps only warm up the state.

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
                return self._sequences(self._drawn(batch_size), length, burn_in)
            return self._sequences(self._drawn_stretches(batch_size, length, burn_in), length, burn_in)

    def _drawn_stretches(self, batch_size: int, length: int, burn_in: int) -> Ints:
        """Draw stretches of `length` steps, and return the slots of their first steps after burn-in."""
        whole("batch_size", batch_size)
        table, rng = self._table, self._rng
        count = 0
        if "obs" in table.columns.tree:
            found = episodes_of(table.rings, table.done, self._ring)
            stretches = np.cumsum(np.maximum(found.length - length + 1, 0))
            count = int(stretches[-1]) if len(stretches) else 0
        if not count:
            raise EmptyBufferError(
                f"a buffer must have an episode of {length} steps to draw from, it has none; add more, or allow padding"
            )
        picked = rng.integers(0, count, batch_size)
        episode = np.searchsorted(stretches, picked, "right")
        place = picked - stretches[episode] + found.length[episode] - length + 1
        return shifted(table.rings, found.first[episode], place + burn_in)

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
            What `buf[...]` gives, of shape (n, length, ...), and two columns more of shape (n, length): `mask`, whether
            a step is there, and `burn_in`, whether it only warms up the state. Of a prioritized buffer `weight` and
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
        slots = shifted(rings, given[:, None], offsets) if len(given) else offsets
        held = rows_at(table, slots, self.stack_num)
        padding = ~mask
        if padding.any():
            held = {name: _blanked(value, padding) for name, value in held.items()}
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


def _blanked(value: Any, where: npt.NDArray[np.bool_]) -> Any:
    """Put zeros, None for objects, in place of some rows."""
    kind = KINDS[type(value)]
    if kind == NODE:
        return node(type(value), {name: _blanked(inner, where) for name, inner in value.__dict__.items()})
    if kind == TENSOR:
        value[np.nonzero(where)] = 0
    else:
        value[where] = None if value.dtype.kind == "O" else np.zeros((), value.dtype)
    return value

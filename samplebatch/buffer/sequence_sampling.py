"""Sampling of whole episodes, and of sequences for recurrent learners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, TENSOR, node
from samplebatch.buffer.episodes import find_episodes, shift_slots, steps_after, steps_before
from samplebatch.buffer.gather import rows_at
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.sampling import Sampling, convert_rows
from samplebatch.errors import ColumnMismatchError, EmptyBufferError, SequenceError

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Device
    from samplebatch.batch.targets import Floats


class SequenceSampling(Sampling):
    """The methods of `ReplayBuffer` that sample steps in their order: whole episodes, and sequences."""

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
        self,
        batch_size: int | None,
        length: int,
        *,
        burn_in: int = 0,
        padded: bool = True,
        device: Device | None = None,
        floats: Floats | None = None,
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
        device, floats
            As `sample` takes them.

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
        DeviceError
            If torch cannot use the device. Nothing is drawn then.

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
        delivery = Delivery(device, floats)
        with self._table.lock:
            self._check_names()
            if padded or batch_size is None or batch_size < 1:
                slots = self._draw(batch_size)
            else:
                slots = self._draw_stretches(batch_size, length, burn_in)
            found = self._sequences(slots, length, burn_in)
        return delivery.one(found, convert_rows)

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
        held["rew"] = self._cast_rewards(held["rew"])
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

"""Sampling of a buffer's rows: single steps, and minibatches of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch.arguments import whole
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.tensors import tree_to
from samplebatch.buffer.gather import check_window
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.samplers import Uniform, whole_stacks
from samplebatch.buffer.shown_rows import ShownRows

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Device
    from samplebatch.batch.targets import Floats, Target

_INTP = np.dtype(np.intp)
_GAMMA = 0.99
"""The discount of a step, unless another is given."""

_zeros = np.zeros


class Sampling(ShownRows):
    """The methods of `ReplayBuffer` that sample single steps: batches of rows, and minibatches."""

    _rng: np.random.Generator
    options: dict[str, Any]

    # Steps

    def sample(
        self,
        batch_size: int | None,
        *,
        n_step: int | None = None,
        gamma: float = _GAMMA,
        device: Device | None = None,
        floats: Floats | None = None,
    ) -> tuple[Batch, Ints]:
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
        device
            The device of tensors that the rows come as; None for arrays. Rows that vary in shape come as an array of
            tensors. Other objects stay as they are.
        floats
            The dtype of floating-point columns, torch's or NumPy's, or its name; None for their own. Integers, flags
            and images are left alone.

        Returns
        -------
        batch
            The rows, as `buf[indices]` gives them, or as tensors.
        indices
            Where they are, an array.

        Raises
        ------
        EmptyBufferError
            If there is no row to draw from.
        ArgumentError
            If `batch_size` is no whole number, `n_step` none from 1 on, `gamma` no number from 0 to 1, or `floats` no
            floating-point dtype. Nothing is drawn then.
        DeviceError
            If torch cannot use the device. Nothing is drawn then.
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
        if device is not None or floats is not None:
            delivery = Delivery(device, floats)
            return delivery.one(self._sample(batch_size, n_step, gamma), convert_rows)
        return self._sample(batch_size, n_step, gamma)

    def _sample(self, batch_size: int | None, n_step: int | None, gamma: float) -> tuple[Batch, Ints]:
        """Draw rows, and return them as arrays, with their indices."""
        with self._table.lock:
            if n_step is not None or gamma != _GAMMA:
                check_window(self._table, n_step, gamma)
            slots = self._draw(batch_size)
            rows = self._rows(slots)
            if n_step is not None:
                rows.__dict__.update(self._nstep_columns(slots, n_step, gamma))
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
        if batch_size is not None and type(batch_size) is not int:
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
        self,
        batch_size: int,
        *,
        epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        device: Device | None = None,
        floats: Floats | None = None,
        prefetch: int = 0,
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
        device, floats
            As `sample` takes them.
        prefetch
            How many batches to make ahead of the one that is handed out: their rows are those of that moment. On a GPU
            they are copied from page-locked memory, on a stream of their own, while the learner computes.

        Yields
        ------
        The rows and their indices, as `sample` returns them.

        Raises
        ------
        ArgumentError
            If `batch_size` is no whole number from 1 on, or `epochs` or `prefetch` none from 0 on; if `floats` is no
            floating-point dtype; if batches are made ahead for no device.
        DeviceError
            If torch cannot use the device.

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
        whole("epochs", epochs)
        delivery = Delivery(device, floats, prefetch)
        return delivery.each(self._minibatches(batch_size, epochs, shuffle, drop_last), convert_rows)

    def _minibatches(
        self, batch_size: int, epochs: int, shuffle: bool, drop_last: bool
    ) -> Iterator[tuple[Batch, Ints]]:
        for _ in range(epochs):
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


def convert_rows(rows: tuple[Batch, Ints], target: Target) -> tuple[Batch, Ints]:
    """Convert rows to a target's form, and keep their indices as they are."""
    return tree_to(rows[0], target), rows[1]

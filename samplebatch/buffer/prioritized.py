"""Prioritized replay buffers: rows are drawn in proportion to their priorities, and weighted to make up for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.delivery import as_array
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Flags, Ints
from samplebatch.buffer.samplers import Prioritized, exponent
from samplebatch.buffer.sum_tree import SegmentTree
from samplebatch.buffer.vector import ReplayBufferManager
from samplebatch.buffer.views import slots_of
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError, RingError, RowIndexError

if TYPE_CHECKING:
    import torch


class PrioritizedReplayBuffer(ReplayBuffer):
    """A replay buffer of one environment with prioritized sampling.

    A new step enters with the largest priority so far. Rows have two columns more: `weight`, by which
    the losses of rows are multiplied to make up for how often they are drawn, and `generation`, to be handed back to
    `update_weight`.

    Parameters
    ----------
    size
        Capacity in steps.
    alpha
        How much priorities count: 0 for all rows equally likely, 1 for likelihoods proportional to priorities.
    beta
        How much weights make up for it: 0 for not at all, 1 for fully.
    weight_norm
        Whether to divide weights by the largest that are read together, so that they only scale down.
    stratified
        Whether each of n draws has an n-th of the sum of all to itself: the rows come in the order of their slots, and
        how often each is drawn differs less from the expectation.
    storage
        New folder for the rows; see `ReplayBuffer`.
    **kwargs
        As for `ReplayBuffer`. `sample_avail` has no effect: rows with fewer frames are drawn as well.

    Raises
    ------
    PriorityError
        If alpha or beta is negative or no number.

    Examples
    --------
    >>> from samplebatch import Batch
    >>> buf = PrioritizedReplayBuffer(size=4, alpha=1.0, beta=1.0)
    >>> for i in range(4):
    ...     added = buf.add(Batch(obs=i, act=0, rew=0.0, terminated=False, truncated=False))
    >>> buf.update_weight([0, 1, 2, 3], [1.0, 1.0, 2.0, 4.0])
    >>> batch, indices = buf.sample(80_000)
    >>> (np.bincount(indices) / 10_000).round(1)
    array([1., 1., 2., 4.])
    >>> buf[[1, 2, 3]].weight.round(3)
    array([1.  , 0.5 , 0.25])
    """

    _sampler: Prioritized

    def __init__(
        self,
        size: int,
        alpha: float,
        beta: float,
        weight_norm: bool = True,
        *,
        stratified: bool = False,
        storage: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(size, **kwargs)
        self.options |= {"alpha": alpha, "beta": beta, "weight_norm": weight_norm}
        if stratified:
            self.options["stratified"] = True
        self._prioritize()
        self._keep_in(storage)

    def _prioritize(self) -> None:
        alpha, beta, weight_norm = (self.options[name] for name in ("alpha", "beta", "weight_norm"))
        stratified = self.options.get("stratified", False)
        self._use(Prioritized(self.maxsize, alpha, beta, weight_norm=weight_norm, stratified=stratified))

    @property
    def weight(self) -> SegmentTree:
        """Priorities to the power of alpha, one a slot and 0 where there is no row, as a tree of sums."""
        if self._ring is not None:
            raise RingError("the weights of all rings lie in one tree; read `weight` of the whole buffer")
        return SegmentTree._over(self._sampler.tree)

    def update_weight(
        self,
        index: Any,
        new_weight: Any,
        *,
        generation: npt.NDArray[np.integer[Any]] | torch.Tensor | Sequence[int] | None = None,
        burn_in: Any = None,
    ) -> None:
        """Give rows new priorities.

        The indices of sequences, shape (n, length), take one priority per sequence, shape (n,). It goes to the step
        that the sequence was drawn by, the first one after burn-in. Priorities of shape (n, length) go to each step;
        those of padding, index -1, are left out.

        Parameters
        ----------
        index
            Index of n rows, as in `buf[index]`. On duplicates the last priority wins.
        new_weight
            Priorities, shape (n,) or one for all; an array or a tensor. Their signs do not count.
        generation
            The `generation` of the rows when they were sampled, shape (n,). Priorities of rows that have been written
            over since, or removed, are dropped then: they belong to steps that are no longer stored.
        burn_in
            The column `burn_in` of sequences, shape (n, length), if they were sampled with burn-in.

        Raises
        ------
        ColumnLengthError
            If there are not n priorities, or not n generations; or if `burn_in` is not of the shape of the indices.
        ColumnTypeError
            If priorities are no numbers.
        PriorityError
            If a priority is NaN or too large. Nothing has changed then.
        RowIndexError
            If an index is out of range, or, without generations, there is no row.

        Examples
        --------
        >>> from samplebatch import Batch
        >>> buf = PrioritizedReplayBuffer(2, alpha=1.0, beta=1.0)
        >>> for i in range(2):
        ...     added = buf.add(Batch(obs=i, act=0, rew=0.0, terminated=False, truncated=False))
        >>> generation = buf[[0, 1]].generation
        >>> added = buf.add(Batch(obs=2, act=0, rew=0.0, terminated=False, truncated=False))
        >>> buf.update_weight([0, 1], [7.0, 4.0], generation=generation)
        >>> buf.weight[:].round(6)
        array([1., 4.])
        """
        index, new_weight = rows_of_sequences(index, new_weight, burn_in)
        slots = np.ascontiguousarray(slots_of(self, index)).reshape(-1)
        priorities = _numbers(new_weight, len(slots))
        known = None if generation is None else as_array(generation).reshape(-1)
        if known is not None and len(known) != len(slots):
            raise ColumnLengthError(f"column 'generation' must have {len(slots)} rows, one a row, got {len(known)}")
        with self._table.lock:
            there = self._table.rings.holds(slots)
            if known is None:
                self._check_written(slots, there)
            else:
                there &= self._table.rings.generation(slots) == known
                if not there.all():
                    slots, priorities = slots[there], priorities[there]
            self._sampler.update(slots, priorities)

    def init_weight(self, index: Any) -> None:
        """Give rows the priority with which new ones enter, the largest so far.

        Raises
        ------
        RowIndexError
            If an index is out of range, or there is no row.

        Examples
        --------
        >>> from samplebatch import Batch
        >>> buf = PrioritizedReplayBuffer(2, alpha=1.0, beta=1.0)
        >>> for i in range(2):
        ...     added = buf.add(Batch(obs=i, act=0, rew=0.0, terminated=False, truncated=False))
        >>> buf.update_weight([0, 1], [4.0, 0.5])
        >>> buf.init_weight(1)
        >>> buf.weight[:].round(6)
        array([4., 4.])
        """
        slots = slots_of(self, index).reshape(-1)
        with self._table.lock:
            self._check_written(slots, self._table.rings.holds(slots))
            self._sampler.on_add(slots)

    def _check_written(self, slots: Ints, there: Flags) -> None:
        """Raise RowIndexError if one of the slots has no row."""
        if not there.all():
            missing = int(slots[~there][0]) - self._start
            raise RowIndexError(f"index {missing} must be of a row to be given a priority, its slot is empty")

    def get_weight(self, index: Any) -> Any:
        """Return the importance weights of rows, not divided by the largest: a number for one index, else an array.

        Examples
        --------
        >>> from samplebatch import Batch
        >>> buf = PrioritizedReplayBuffer(2, alpha=1.0, beta=0.5)
        >>> for i in range(2):
        ...     added = buf.add(Batch(obs=i, act=0, rew=0.0, terminated=False, truncated=False))
        >>> buf.update_weight([0], [4.0])
        >>> buf.get_weight([0, 1]).round(6), round(buf.get_weight(0), 6)
        (array([0.5, 1. ]), 0.5)
        """
        slots = slots_of(self, index)
        with self._table.lock:
            weights = self._sampler.importance(slots.reshape(-1))
        return weights.reshape(slots.shape) if slots.ndim else float(weights[0])

    def set_beta(self, beta: float) -> None:
        """Set the exponent of importance weights, which usually grows to 1 in the course of training.

        Raises
        ------
        PriorityError
            If beta is negative or no number.
        """
        self._sampler.beta = exponent("beta", beta)


class PrioritizedReplayBufferManager(PrioritizedReplayBuffer, ReplayBufferManager):
    """Several prioritized buffers as one, from all of which rows are drawn by their priorities.

    Parameters
    ----------
    buffer_list
        The buffers, made with the same options. They become parts of the new buffer, with their rows and priorities.

    Raises
    ------
    ColumnMismatchError
        If a part is not prioritized; or as `ReplayBufferManager` does.
    """

    _part_kind = PrioritizedReplayBuffer

    def __init__(self, buffer_list: Sequence[ReplayBuffer]) -> None:
        buffers = list(buffer_list)
        for buffer in buffers:
            if not isinstance(buffer, PrioritizedReplayBuffer):
                raise ColumnMismatchError(f"the parts must be prioritized buffers, got a {type(buffer).__name__}")
        ReplayBufferManager.__init__(self, buffers)

    def _set_up(self, maxsizes: Sequence[int], options: Mapping[str, Any], random_seed: int) -> None:
        super()._set_up(maxsizes, options, random_seed)
        self._prioritize()

    def _gather(self, buffers: Sequence[ReplayBuffer]) -> None:
        super()._gather(buffers)
        own = self._sampler
        for ring, buffer in enumerate(buffers):
            known: Any = buffer._sampler
            own.tree.set(self._table.rings.chronological(ring), known.tree.get(slots_of(buffer, slice(None))))
            if known.largest > own.largest:
                own.largest, own.new_weight = known.largest, known.new_weight
            own.smallest = min(own.smallest, known.smallest)


class PrioritizedVectorReplayBuffer(PrioritizedReplayBufferManager):
    """A replay buffer of n environments, one ring per environment, with prioritized sampling from all of them.

    Parameters
    ----------
    total_size
        Capacity in steps of all environments together, rounded up so that each has as many slots.
    buffer_num
        Number of environments.
    storage
        New folder for the rows; see `ReplayBuffer`.
    **kwargs
        As for `PrioritizedReplayBuffer`.

    Raises
    ------
    ArgumentError
        If `total_size` is not a whole number of at least 0, or `buffer_num` not one of at least 1.
    PriorityError
        If alpha or beta is negative or no number.

    Examples
    --------
    >>> from samplebatch import Batch
    >>> buf = PrioritizedVectorReplayBuffer(total_size=8, buffer_num=2, alpha=1.0, beta=1.0)
    >>> flags = np.zeros(2, bool)
    >>> slots, *_ = buf.add(Batch(obs=[0, 1], act=[0, 0], rew=[1.0, 1.0], terminated=flags, truncated=flags))
    >>> buf.update_weight(slots, [0.5, 1.0])
    >>> buf[slots].weight.round(3)
    array([1. , 0.5])
    """

    def __init__(
        self, total_size: int, buffer_num: int, *, storage: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        buffer_num = whole("buffer_num", buffer_num, 1)
        one = PrioritizedReplayBuffer(-(-whole("total_size", total_size) // buffer_num), **kwargs)
        self._set_up([one.maxsize] * buffer_num, one.options, one._seed)
        self._keep_in(storage)


def rows_of_sequences(index: Any, weights: Any, burn_in: Any = None) -> tuple[Any, Any]:
    """Return the rows of sequences that get priorities, and these; anything but indices of sequences as it is.

    Parameters
    ----------
    index
        Rows; of sequences shape (n, length), -1 where there is no step.
    weights
        Priorities: one for all or one per sequence, shape (n,), or one per step, shape (n, length).
    burn_in
        Which steps only warm up the state, shape (n, length); None for none.

    Raises
    ------
    ColumnLengthError
        If `burn_in` is not of the shape of the indices.

    Examples
    --------
    >>> index = np.array([[4, 5, 6], [7, 8, -1]])
    >>> rows_of_sequences(index, [1.0, 2.0])
    (array([4, 7]), array([1., 2.]))
    >>> rows_of_sequences(index, [1.0, 2.0], index == 4)
    (array([5, 7]), array([1., 2.]))
    >>> rows_of_sequences(index, np.ones((2, 3)))
    (array([4, 5, 6, 7, 8]), array([1., 1., 1., 1., 1.]))
    """
    if burn_in is None and getattr(index, "ndim", 1 + (type(index) is list)) != 2:
        return index, weights
    rows = np.asarray(as_array(index))
    if rows.ndim != 2 or rows.dtype.kind not in "iu":
        if burn_in is not None:
            raise ColumnLengthError(f"burn_in must go with indices of sequences, shape (n, length), got {rows.shape}")
        return index, weights
    given = np.asarray(as_array(weights))
    if given.ndim and given.size == rows.size and given.shape != rows.shape[:1]:
        there = rows >= 0
        return rows[there], given.reshape(rows.shape)[there]
    column: Any = 0
    if burn_in is not None:
        warm = np.asarray(as_array(burn_in))
        if warm.shape != rows.shape:
            raise ColumnLengthError(f"burn_in must have the shape of the indices, {rows.shape}, got {warm.shape}")
        column = warm.sum(1)
    return rows[np.arange(len(rows)), column], given


def _numbers(value: Any, n: int) -> npt.NDArray[np.floating[Any]]:
    """Return n priorities, shape (n,), of an array, a tensor or a number: float32 where they are, float64 otherwise."""
    array = as_array(value)
    if array.dtype.kind not in "biuf" and array.size:
        raise ColumnTypeError(f"priorities must be numbers, got dtype {array.dtype}")
    # As a float16, a small priority to the power of alpha could be 0.
    single = array.dtype.kind == "f" and array.dtype.itemsize < 8
    flat: npt.NDArray[Any] = np.ascontiguousarray(array, np.float32 if single else np.float64).reshape(-1)
    if len(flat) != n:
        if array.ndim:
            raise ColumnLengthError(f"column 'weight' must have {n} rows, one a row, got {len(flat)}")
        flat = np.full(n, flat[0], flat.dtype)
    return flat

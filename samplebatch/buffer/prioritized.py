"""Prioritized replay buffers, which sample rows in proportion to priorities and return importance weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import suggest_names, whole
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
    """Replay buffer of one environment with prioritized sampling.

    A new step receives the largest priority that any step has had so far. Rows have two additional columns: `weight`,
    the importance weight that multiplies the loss of the row, and `generation`, which `update_weight` accepts.

    Parameters
    ----------
    size
        Capacity in steps.
    alpha
        Priority exponent: 0 for uniform sampling, 1 for probabilities proportional to priorities.
    beta
        Importance exponent: 0 for equal weights, 1 for full correction of the sampling bias.
    weight_norm
        Whether to divide importance weights by the largest weight of the rows that one call reads, so that weights are
        at most 1.
    stratified
        Whether each of n draws covers one of n equal intervals of the total priority. If true, rows are in slot order,
        and sampling frequencies deviate less from their expectation than with independent draws.
    storage
        New folder for the rows; see `ReplayBuffer`.
    **kwargs
        As in `ReplayBuffer`. `sample_avail` has no effect: rows with an incomplete stack of frames are also sampled.

    Raises
    ------
    PriorityError
        If alpha or beta is negative or not a number.

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

    @suggest_names(capacity="size", maxsize="size", buffer_size="size")
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
        """Segment tree of the slots' priorities to the power of alpha; the value of a slot without a row is 0."""
        if self._ring is not None:
            raise RingError("the weights of all rings are in one tree; read `weight` of the entire buffer")
        return SegmentTree._over(self._sampler.tree)

    def update_weight(
        self,
        index: Any,
        new_weight: Any,
        *,
        generation: npt.NDArray[np.integer[Any]] | torch.Tensor | Sequence[int] | None = None,
        burn_in: Any = None,
    ) -> None:
        """Set priorities of rows.

        If `index` contains the indices of sequences, shape (n, length), priorities can have shape (n,) or (n, length).
        With one priority per sequence, shape (n,), each priority is assigned to the sequence's first step after
        burn-in, because the priority of that step determines the sampling probability of the sequence. Priorities of
        shape (n, length) are assigned to the individual steps; padding (index -1) is skipped.

        Parameters
        ----------
        index
            Index of n rows, as in `buf[index]`. For duplicate rows, the last priority wins.
        new_weight
            Priorities, shape (n,), or one priority for all rows; an array or a tensor. Signs are ignored.
        generation
            `generation` of the rows when they were sampled, shape (n,). Priorities of rows that have since been
            overwritten or removed are discarded.
        burn_in
            Column `burn_in` of sequences that were sampled with burn-in, shape (n, length).

        Raises
        ------
        ColumnLengthError
            If the number of priorities or generations is not n, or `burn_in` does not have the shape of the indices.
        ColumnTypeError
            If priorities are not numbers.
        PriorityError
            If a priority is NaN or too large. An error changes nothing.
        RowIndexError
            If an index is out of range, or if an index has no row and `generation` is None.

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
        generations = None if generation is None else as_array(generation).reshape(-1)
        if generations is not None and len(generations) != len(slots):
            raise ColumnLengthError(
                f"column 'generation' must have {len(slots)} rows, one per row, got {len(generations)}"
            )
        with self._table.lock:
            is_current = self._table.rings.holds(slots)
            if generations is None:
                self._check_written(slots, is_current)
            else:
                is_current &= self._table.rings.generation(slots) == generations
                if not is_current.all():
                    slots, priorities = slots[is_current], priorities[is_current]
            self._sampler.update(slots, priorities)

    def init_weight(self, index: Any) -> None:
        """Set the priority of rows to the largest priority that any step has had so far, like the priority of new rows.

        Raises
        ------
        RowIndexError
            If an index is out of range or has no row.

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

    def _check_written(self, slots: Ints, has_row: Flags) -> None:
        if not has_row.all():
            missing = int(slots[~has_row][0]) - self._start
            raise RowIndexError(f"index {missing} must have a row to get a priority, got an empty slot")

    def get_weight(self, index: Any) -> Any:
        """Return unnormalized importance weights of rows: a number for a single index, otherwise an array.

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
        """Set the importance exponent, which is usually increased to 1 during training.

        Raises
        ------
        PriorityError
            If beta is negative or not a number.
        """
        self._sampler.beta = exponent("beta", beta)


class PrioritizedReplayBufferManager(PrioritizedReplayBuffer, ReplayBufferManager):
    """Replay buffer that combines several prioritized buffers, with prioritized sampling across all rings.

    Parameters
    ----------
    buffer_list
        Prioritized buffers with equal `options`. The buffers, their rows and priorities become parts of the new buffer.

    Raises
    ------
    ColumnMismatchError
        If a buffer is not prioritized; or as in `ReplayBufferManager`.
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
        sampler = self._sampler
        for ring, buffer in enumerate(buffers):
            part_sampler: Any = buffer._sampler
            sampler.tree.set(
                self._table.rings.chronological(ring), part_sampler.tree.get(slots_of(buffer, slice(None)))
            )
            if part_sampler.largest > sampler.largest:
                sampler.largest, sampler.new_weight = part_sampler.largest, part_sampler.new_weight
            sampler.smallest = min(sampler.smallest, part_sampler.smallest)


class PrioritizedVectorReplayBuffer(PrioritizedReplayBufferManager):
    """Replay buffer of n environments, one ring per environment, with prioritized sampling across all rings.

    Parameters
    ----------
    total_size, buffer_num, storage
        As in `VectorReplayBuffer`.
    **kwargs
        As in `PrioritizedReplayBuffer`.

    Raises
    ------
    ArgumentError
        As in `VectorReplayBuffer`.
    PriorityError
        If alpha or beta is negative or not a number.

    Examples
    --------
    >>> from samplebatch import Batch
    >>> buf = PrioritizedVectorReplayBuffer(total_size=8, buffer_num=2, alpha=1.0, beta=1.0)
    >>> flags = np.zeros(2, bool)
    >>> slots, *_ = buf.add(
    ...     Batch(obs=[0, 1], act=[0, 0], rew=[1.0, 1.0], terminated=flags, truncated=flags)
    ... )
    >>> buf.update_weight(slots, [0.5, 1.0])
    >>> buf[slots].weight.round(3)
    array([1. , 0.5])
    """

    @suggest_names(size="total_size", capacity="total_size", buffer_size="total_size", num_envs="buffer_num")
    def __init__(
        self, total_size: int, buffer_num: int, *, storage: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        buffer_num = whole("buffer_num", buffer_num, 1)
        single = PrioritizedReplayBuffer(-(-whole("total_size", total_size) // buffer_num), **kwargs)
        self._set_up([single.maxsize] * buffer_num, single.options, single._seed)
        self._keep_in(storage)


def rows_of_sequences(index: Any, weights: Any, burn_in: Any = None) -> tuple[Any, Any]:
    """Return the indices of the steps to which priorities are assigned, and the priorities.

    If `index` does not contain sequences, `index` and `weights` are returned unchanged.

    index: indices of rows; for sequences, shape (n, length), with -1 for padding.
    weights: one priority for all rows, one priority per sequence, shape (n,), or one priority per step, shape (n,
        length).
    burn_in: mask of steps that only warm up the state, shape (n, length); None without burn-in.

    Raises ColumnLengthError if `burn_in` does not have the shape of the indices.

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
            raise ColumnLengthError(f"burn_in requires indices of sequences, shape (n, length), got {rows.shape}")
        return index, weights
    priorities = np.asarray(as_array(weights))
    if priorities.ndim and priorities.size == rows.size and priorities.shape != rows.shape[:1]:
        is_step = rows >= 0
        return rows[is_step], priorities.reshape(rows.shape)[is_step]
    column: Any = 0
    if burn_in is not None:
        warm = np.asarray(as_array(burn_in))
        if warm.shape != rows.shape:
            raise ColumnLengthError(f"burn_in must have the shape of the indices, {rows.shape}, got {warm.shape}")
        column = warm.sum(1)
    return rows[np.arange(len(rows)), column], priorities


def _numbers(value: Any, n: int) -> npt.NDArray[np.floating[Any]]:
    """Convert an array, a tensor or a number to n priorities, shape (n,), in float32 or float64."""
    array = as_array(value)
    if array.dtype.kind not in "biuf" and array.size:
        raise ColumnTypeError(f"priorities must be numbers, got dtype {array.dtype}")
    # In float16, a small priority to the power of alpha could be 0.
    single = array.dtype.kind == "f" and array.dtype.itemsize < 8
    flat: npt.NDArray[Any] = np.ascontiguousarray(array, np.float32 if single else np.float64).reshape(-1)
    if len(flat) != n:
        if array.ndim:
            raise ColumnLengthError(f"column 'weight' must have {n} rows, one per row, got {len(flat)}")
        flat = np.full(n, flat[0], flat.dtype)
    return flat

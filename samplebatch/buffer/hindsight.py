"""Hindsight experience replay (arXiv:1707.01495): relabelling of samples with goals achieved later in the episode.

`relabel` modifies only sampled copies of rows; stored rows are unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from samplebatch import errors
from samplebatch.arguments import fraction, positive, whole
from samplebatch.batch.delivery import array_of
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, TENSOR, values_of
from samplebatch.buffer.columns import take_rows
from samplebatch.buffer.gather import check_window, final_rows
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.samplers import Sample
from samplebatch.buffer.sequences import shift_slots, steps_after
from samplebatch.buffer.table import Table
from samplebatch.buffer.vector import ReplayBufferManager
from samplebatch.buffer.views import slots_of
from samplebatch.column.casting import cast_exactly

RewardFunction = Callable[[Any, Any], Any]
"""Computes rewards, shape (n,), from achieved and desired goals, both of shape (n, ...)."""

ACHIEVED: Final = "achieved_goal"
DESIRED: Final = "desired_goal"

_GOAL_ATTRIBUTES = ("compute_reward_fn", "horizon", "future_k", "future_p")


def relabel(
    table: Table,
    slots: Ints,
    rows: Batch,
    goals: Any,
    chosen: Ints,
    compute_reward_fn: RewardFunction,
    *,
    n_step: int | None = None,
    gamma: float = 0.99,
    stack: int = 1,
) -> Batch:
    """Relabel sampled rows with new goals, and recompute the rewards of these rows.

    table, slots: source table, and slots of the rows, shape (n,).
    rows: rows that were read from the slots; the rows are modified in place and returned.
    goals, chosen: new goals, shape (k, ...), and the positions of the rows to relabel, shape (k,).
    compute_reward_fn: function that computes the rewards of steps from achieved and desired goals.
    n_step, gamma: arguments of `sample`; if `n_step` is not None, the `returns` of the rows are recomputed.
    stack: number of stacked frames of observations.

    Raises ColumnLengthError if `compute_reward_fn` does not return one reward per goal. Raises ColumnMismatchError if
    the column of desired goals cannot store the achieved goals exactly. Raises ColumnNotFoundError if observations have
    no goals.
    """
    if not len(chosen):
        return rows
    chosen_slots = slots[chosen]
    for name in ("obs", "obs_next"):
        goals_by_name = values_of(rows[name]) or {}
        if DESIRED not in goals_by_name:
            raise _without_goals(f"{name}.{DESIRED}", goals_by_name)
        column = goals_by_name[DESIRED]
        fitting = goals if KINDS[type(column)] == TENSOR else cast_exactly(goals, column.dtype)
        if fitting is None:
            raise errors.ColumnMismatchError(
                f"column '{name}.{DESIRED}' must store achieved goals without loss, got {goals.dtype} for "
                f"{column.dtype}; use the wider dtype for both"
            )
        column[chosen] = fitting[:, None] if stack > 1 else fitting
    if n_step is None or n_step == 1:
        rewards = _rewards(compute_reward_fn, achieved_after(table, chosen_slots), goals, rows.rew.shape[1:])
        rows.rew[chosen] = rewards
        if n_step == 1:
            rows.returns[chosen] = rewards
        return rows
    ahead = steps_after(table.rings, table.done, chosen_slots, n_step - 1)
    counts = np.arange(int(ahead.max(initial=0)) + 1) <= ahead[:, None]
    of, offset = np.nonzero(counts)
    window = shift_slots(table.rings, chosen_slots[of], offset)
    rewards = _rewards(compute_reward_fn, achieved_after(table, window), goals[of], rows.rew.shape[1:])
    rows.rew[chosen] = rewards[offset == 0]
    discounted = rewards * (gamma**offset).reshape(-1, *(1,) * (rewards.ndim - 1))
    rows.returns[chosen] = np.add.reduceat(discounted, np.flatnonzero(offset == 0))
    return rows


def achieved_after(table: Table, slots: Ints) -> Any:
    """Gather the achieved goals of the steps in slots, shape (n,), from the observations after these steps.

    If next observations are not stored, the achieved goal of a terminated step is read from the step's own observation.

    Raises ColumnNotFoundError if observations have no goals.
    """
    tree = table.columns.tree
    name = "obs_next" if table.keeps_next else "obs"
    observations = tree.get(name)
    if not isinstance(observations, dict) or ACHIEVED not in observations:
        raise _without_goals(f"{name}.{ACHIEVED}", observations if isinstance(observations, dict) else {})
    if table.keeps_next:
        return take_rows(observations[ACHIEVED], slots)
    rings = table.rings
    after = rings.next(slots, table.done)
    achieved = take_rows(observations[ACHIEVED], after)
    where, rows = final_rows(table, slots, (after == slots) & ~tree["terminated"].values[slots])
    if len(rows):
        achieved[where] = table.finals.take(rows, (ACHIEVED,))  # type: ignore[union-attr]
    return achieved


def _without_goals(name: str, columns: Mapping[str, Any]) -> errors.ColumnNotFoundError:
    return errors.ColumnNotFoundError(
        f"column {name!r} must exist for hindsight, in observations with observation, {ACHIEVED} and {DESIRED}; "
        f"{errors.near_names(name.split('.')[-1], columns)}"
    )


def _rewards(
    function: RewardFunction, achieved: Any, desired: Any, row_shape: tuple[int, ...]
) -> npt.NDArray[np.float64]:
    returned = function(achieved, desired)
    rewards = np.asarray(array_of(returned) if KINDS[type(returned)] == TENSOR else returned, np.float64)
    if rewards.shape != (len(achieved), *row_shape):
        expected = (len(achieved), *row_shape)
        raise errors.ColumnLengthError(
            f"compute_reward_fn must return rewards of shape {expected}, got {rewards.shape}"
        )
    return rewards


class HERReplayBuffer(ReplayBuffer):
    """Replay buffer of one goal-conditioned environment, with hindsight relabelling of sampled steps.

    Observations are dicts of `observation`, `achieved_goal` and `desired_goal`. `sample` relabels the sampled rows.
    With `n_step`, all rewards in a row's n-step return are recomputed for the row's new goal. `buf[indices]` returns
    the original rows.

    Parameters
    ----------
    size
        Capacity in steps.
    compute_reward_fn
        Function that computes rewards, shape (n,), from achieved and desired goals of n steps, both of shape (n, ...).
    horizon
        Maximum number of steps per episode, and maximum number of steps from which a new goal is chosen.
    future_k
        Reciprocal of the average fraction of sampled steps that retain their original goals, at least 1.
    storage
        Must be None, because a folder cannot store `compute_reward_fn`.
    **kwargs
        As in `ReplayBuffer`.

    Raises
    ------
    StorageError
        If a folder is passed.
    ArgumentError
        If `horizon` is not an integer of at least 1, or `future_k` is less than 1.

    Examples
    --------
    >>> def reached(achieved, desired):
    ...     return (achieved == desired).all(-1).astype(float)
    >>> buf = HERReplayBuffer(8, reached, horizon=4, future_k=4.0)
    >>> def at(n):
    ...     goals = {"achieved_goal": np.array([n]), "desired_goal": np.array([100])}
    ...     return {"observation": n, **goals}
    >>> for n in range(4):
    ...     added = buf.add(
    ...         Batch(
    ...             obs=at(n),
    ...             act=0,
    ...             rew=0.0,
    ...             terminated=False,
    ...             truncated=n == 3,
    ...             obs_next=at(n + 1),
    ...         )
    ...     )
    >>> batch, indices = buf.sample(1000)
    >>> np.unique(batch.obs.desired_goal).tolist()
    [1, 2, 3, 4, 100]
    >>> np.unique(buf[indices].obs.desired_goal).tolist()
    [100]
    >>> reached_goal = batch.obs_next.achieved_goal == batch.obs_next.desired_goal
    >>> bool((batch.rew == reached_goal[:, 0]).all())
    True
    """

    compute_reward_fn: RewardFunction

    def __init__(
        self,
        size: int,
        compute_reward_fn: RewardFunction,
        horizon: int,
        future_k: float = 8.0,
        *,
        storage: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(size, **kwargs)
        self._set_up_goals(compute_reward_fn, horizon, future_k)
        self._keep_in(storage)

    def _set_up_goals(self, compute_reward_fn: RewardFunction, horizon: int, future_k: float) -> None:
        self.compute_reward_fn = compute_reward_fn
        self.horizon = horizon
        self.future_k = future_k

    def _take_goals(self, other: ReplayBuffer) -> None:
        attributes = other.__dict__
        self.__dict__.update({name: attributes[name] for name in _GOAL_ATTRIBUTES if name in attributes})

    def __setstate__(self, state: dict[str, Any]) -> None:
        absent = {"compute_reward_fn", "horizon", "future_k"} - state.keys()
        if absent:
            raise errors.FormatError(
                f"the state of a hindsight buffer must have {min(absent)!r}, got none; it is damaged"
            )
        super().__setstate__(state)

    @property
    def horizon(self) -> int:
        """Maximum number of steps per episode, and of candidate steps for a new goal; settable."""
        return self.__dict__["horizon"]  # type: ignore[no-any-return]

    @horizon.setter
    def horizon(self, value: int) -> None:
        self.__dict__["horizon"] = whole("horizon", value, 1)

    @property
    def future_k(self) -> float:
        """Reciprocal of the fraction of sampled steps that retain their original goals, at least 1; settable."""
        return self.__dict__["future_k"]  # type: ignore[no-any-return]

    @future_k.setter
    def future_k(self, value: float) -> None:
        if not positive("future_k", value) >= 1:
            raise errors.ArgumentError(f"future_k must be at least 1, got {value}")
        self.__dict__["future_k"] = float(value)
        self.__dict__.pop("future_p", None)

    @property
    def future_p(self) -> float:
        """Probability of relabelling a sampled step: 1 - 1 / future_k; settable."""
        probability: float | None = self.__dict__.get("future_p")
        return 1 - 1 / self.future_k if probability is None else probability

    @future_p.setter
    def future_p(self, value: float) -> None:
        # Stored in addition to `future_k`, which rounding would not always invert.
        chance = fraction("future_p", value)
        self.__dict__.update(future_p=chance, future_k=inf if chance == 1 else 1 / (1 - chance))

    def _sample(
        self, batch_size: int | None, n_step: int | None, gamma: float, limits: tuple[int | None, bool] | None
    ) -> Sample[Batch, Ints]:
        """Sample and relabel rows; see `ReplayBuffer.sample` and `rewrite_transitions`.

        With `n_step`, all rewards in a row's n-step return are recomputed for the row's new goal.
        """
        with self._table.lock:
            check_window(self._table, n_step, gamma)
            self._check_goals()
            slots = self._draw(batch_size, limits)
            rows = self._relabel_rows(slots, n_step, gamma)
        return Sample(rows, slots - self._start if self._start else slots)

    def _check_goals(self) -> None:
        tree = self._table.columns.tree
        after = "obs_next" if self._table.keeps_next else "obs"
        for name, goal in ((after, ACHIEVED), ("obs", DESIRED), (after, DESIRED)) if tree else ():
            observations = tree.get(name)
            if not isinstance(observations, dict) or goal not in observations:
                raise _without_goals(f"{name}.{goal}", observations if isinstance(observations, dict) else {})

    def rewrite_transitions(self, indices: Any) -> Batch:
        """Copy rows and relabel each row with probability `future_p`.

        The new goal of a step is chosen uniformly from the goals achieved in the step and in the following steps of its
        episode, up to `horizon` goals. The buffer is unchanged.

        Parameters
        ----------
        indices
            Index of n rows, as in `buf[index]`.

        Raises
        ------
        ColumnNotFoundError
            If observations have no goals.
        ColumnLengthError
            If `compute_reward_fn` does not return one reward per goal.
        ColumnMismatchError
            If the column of desired goals cannot store the achieved goals exactly.
        RowIndexError
            If an index is out of range.
        """
        with self._table.lock:
            return self._relabel_rows(slots_of(self, indices).reshape(-1))

    def _relabel_rows(self, slots: Ints, n_step: int | None = None, gamma: float = 0.99) -> Batch:
        table, rng = self._table, self._rng
        rows = self._rows(slots)
        if n_step is not None:
            rows.__dict__.update(self._nstep_columns(slots, n_step, gamma))
        chosen = np.flatnonzero(rng.random(len(slots)) < self.future_p)
        chosen_slots = slots[chosen]
        ahead = steps_after(table.rings, table.done, chosen_slots, self.horizon - 1)
        goals = achieved_after(table, shift_slots(table.rings, chosen_slots, rng.integers(0, ahead, endpoint=True)))
        how: dict[str, Any] = {"n_step": n_step, "gamma": gamma, "stack": self.stack_num}
        return relabel(table, slots, rows, goals, chosen, self.compute_reward_fn, **how)

    def restore_cache(self) -> None:
        """Do nothing, because sampling does not modify the buffer."""


class HERReplayBufferManager(HERReplayBuffer, ReplayBufferManager):
    """Replay buffer that combines several hindsight buffers.

    Parameters
    ----------
    buffer_list
        Hindsight buffers whose arguments, except for `size`, are equal. The buffers and their rows become parts of the
        new buffer.

    Raises
    ------
    ColumnMismatchError
        If a buffer is not a hindsight buffer, or the relabelling parameters of two buffers differ; or as in
        `ReplayBufferManager`.
    """

    _part_kind = HERReplayBuffer

    def __init__(self, buffer_list: Sequence[ReplayBuffer]) -> None:
        buffers: list[Any] = list(buffer_list)
        for buffer in buffers:
            if not isinstance(buffer, HERReplayBuffer):
                raise errors.ColumnMismatchError(f"the parts must be hindsight buffers, got a {type(buffer).__name__}")
            for name in ("horizon", "future_p", "compute_reward_fn"):
                values = getattr(buffers[0], name), getattr(buffer, name)
                if values[0] != values[1]:
                    raise errors.ColumnMismatchError(
                        f"the parts of a buffer must have the same {name!r}, got {values[0]!r:.80} and "
                        f"{values[1]!r:.80}"
                    )
        ReplayBufferManager.__init__(self, buffers)
        self._take_goals(buffers[0])

    def _part(self, ring: int) -> ReplayBuffer:
        part: Any = super()._part(ring)
        part._take_goals(self)
        return part  # type: ignore[no-any-return]


class HERVectorReplayBuffer(HERReplayBufferManager):
    """Replay buffer of n goal-conditioned environments, one ring per environment.

    Parameters
    ----------
    total_size, buffer_num
        As in `VectorReplayBuffer`.
    compute_reward_fn, horizon, future_k, storage
        As in `HERReplayBuffer`.
    **kwargs
        As in `ReplayBuffer`.

    Raises
    ------
    ArgumentError
        As in `VectorReplayBuffer` and `HERReplayBuffer`.
    StorageError
        If a folder is passed.

    Examples
    --------
    >>> buf = HERVectorReplayBuffer(
    ...     10, 2, lambda achieved, desired: np.zeros(len(achieved)), horizon=5
    ... )
    >>> buf.maxsize, buf.future_p, buf.buffers[1].horizon
    (10, 0.875, 5)
    """

    def __init__(
        self,
        total_size: int,
        buffer_num: int,
        compute_reward_fn: RewardFunction,
        horizon: int,
        future_k: float = 8.0,
        *,
        storage: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        buffer_num = whole("buffer_num", buffer_num, 1)
        single = ReplayBuffer(-(-whole("total_size", total_size) // buffer_num), **kwargs)
        self._set_up([single.maxsize] * buffer_num, single.options, single._seed)
        self._set_up_goals(compute_reward_fn, horizon, future_k)
        self._keep_in(storage)

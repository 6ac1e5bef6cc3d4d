"""Returns, advantages and n-step targets of steps in time order: functions of arrays, batches and buffers.

`discounted_returns`, `gae` and `nstep` take arrays. `compute_episodic_return` and `compute_nstep_return` take a batch,
and a buffer's slots that it comes from, in Tianshou's words.

Throughout, an episode that was *terminated* is over: what would come next is worth 0. One that was *truncated* goes on
unseen, as does one that the last row leaves unfinished: what comes next is worth what the caller's estimate says. The
sums are float64, whatever the dtypes given. The loops are compiled: see `samplebatch.kernels` for what the first call
of a process costs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import fraction, whole
from samplebatch.batch.nested.functions import to_torch_as
from samplebatch.batch.nested.node import KINDS, TENSOR
from samplebatch.batch.nested.tensors import array_of
from samplebatch.column import memory
from samplebatch.column.casting import as_flags
from samplebatch.errors import ColumnLengthError, ColumnTypeError, RowIndexError, SequenceError, no_such_column

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


class NStep(NamedTuple):
    """What n steps from each row brought, and what an estimate of the rest counts."""

    returns: Floats
    """The discounted sum of the rewards, of the shape of the rewards."""
    discount: Floats
    """What an estimate at the observation after `last` is multiplied by: gamma to the number of steps, 0 where the last
    one is terminated; shape (n,)."""
    last: Indices
    """The row of the last step, shape (n,)."""


def gae(
    rewards: npt.ArrayLike,
    terminated: npt.ArrayLike,
    truncated: npt.ArrayLike | None = None,
    *,
    values: npt.ArrayLike,
    next_values: npt.ArrayLike,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
) -> tuple[Floats, Floats]:
    r"""Estimate the returns and advantages of steps, by generalized advantage estimation (arXiv:1506.02438).

    .. math::
        A_t = r_t + \gamma V(s_{t+1}) - V(s_t) + \gamma \lambda A_{t+1}

    where the value of the next state is 0 if the step is terminated, and the last term is 0 if the episode ends with
    the step in whichever way, or with the last row.

    Parameters
    ----------
    rewards
        Of steps in time order, one episode after the other; shape (n,), or (n, m) for m rewards a step.
    terminated, truncated
        Flags, shape (n,). None: no step is truncated.
    values, next_values
        Estimates for the observations that the steps start from and lead to, of the shape of the rewards. An array or
        a tensor.
    gamma, gae_lambda
        The discount of a step, and the decay of the estimate on top of it.

    Returns
    -------
    tuple
        Returns, which are the advantages plus the values, and advantages, of the shape of the rewards.

    Raises
    ------
    ColumnLengthError
        If an array has not as many elements as it must; names it.
    ColumnTypeError
        If an array holds no numbers; names it.

    Examples
    --------
    >>> returns, advantages = gae(
    ...     [1.0, 1.0, 1.0], [0, 0, 1], values=[0.5, 0.5, 0.5], next_values=[0.5, 0.5, 9.0], gamma=0.5, gae_lambda=1.0
    ... )
    >>> returns, advantages
    (array([1.75, 1.5 , 1.  ]), array([1.25, 1.  , 0.5 ]))
    """
    reward = _floats("rewards", rewards)
    over, ended = _flags(terminated, truncated, len(reward))
    estimates = _floats("values", values, reward.shape), _floats("next_values", next_values, reward.shape)
    return _estimated(reward, over, ended, *estimates, gamma, gae_lambda)


def discounted_returns(
    rewards: npt.ArrayLike,
    terminated: npt.ArrayLike,
    truncated: npt.ArrayLike | None = None,
    next_values: npt.ArrayLike | None = None,
    *,
    gamma: float = 0.99,
) -> Floats:
    """Sum each step's reward and the discounted rewards that follow it in its episode.

    Parameters
    ----------
    rewards, terminated, truncated
        As `gae` takes them.
    next_values
        Estimates for the observations that the steps lead to, of the shape of the rewards: they stand for what follows
        a truncated step or an unfinished last row, and count nowhere else. None: nothing follows.
    gamma
        The discount of a step.

    Returns
    -------
    ndarray
        Of the shape of the rewards.

    Raises
    ------
    ColumnLengthError, ColumnTypeError
        As `gae` does.

    Examples
    --------
    >>> discounted_returns([1.0, 1.0, 1.0, 1.0], [0, 1, 0, 0], next_values=[8.0, 8.0, 8.0, 8.0], gamma=0.5)
    array([1.5, 1. , 3.5, 5. ])
    """
    reward = _floats("rewards", rewards)
    over, ended = _flags(terminated, truncated, len(reward))
    following = np.zeros(reward.shape)
    if next_values is not None:
        given = _floats("next_values", next_values, reward.shape)
        ended[-1:] = True
        following[ended] = given[ended]
    returns, _ = _estimated(reward, over, ended, np.zeros(reward.shape), following, gamma, 1.0)
    return returns


def nstep(
    rewards: npt.ArrayLike,
    terminated: npt.ArrayLike,
    truncated: npt.ArrayLike | None = None,
    n_step: int = 3,
    gamma: float = 0.99,
) -> NStep:
    """Sum the discounted rewards of each step and the `n_step - 1` that follow it in its episode.

    A window ends early with the episode, however that ended, and with the last row. The target of a step is then
    `returns + discount * estimate`, with an estimate at the observation after the step `last`.

    Parameters
    ----------
    rewards, terminated, truncated
        As `gae` takes them.
    n_step
        The most steps to sum.
    gamma
        The discount of a step.

    Raises
    ------
    ColumnLengthError, ColumnTypeError
        As `gae` does.
    ArgumentError
        If `n_step` is no whole number from 1 on, or `gamma` none from 0 to 1.

    Examples
    --------
    >>> nstep([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 0], n_step=2, gamma=0.5)
    NStep(returns=array([2. , 3.5, 3. , 4. ]), discount=array([0.25, 0.  , 0.  , 0.5 ]), last=array([1, 2, 2, 3]))
    """
    reward = _floats("rewards", rewards)
    n = len(reward)
    over, ended = _flags(terminated, truncated, n)
    return nstep_of_rings(reward, over, ended, np.array([0, n]), np.array([n - 1]), np.arange(n), n_step, gamma)


def nstep_of_rings(
    rewards: npt.NDArray[Any],
    terminated: npt.NDArray[Any],
    ended: npt.NDArray[Any],
    edges: npt.ArrayLike,
    newest: npt.ArrayLike,
    slots: Indices,
    n_step: int,
    gamma: float,
) -> NStep:
    """Sum the discounted rewards of the steps from each of some slots on, in rings of slots; see `nstep`.

    A window goes on at its ring's first slot after the last, and never past the ring's newest step.

    Parameters
    ----------
    rewards, terminated, ended
        Of all slots, shapes (slots, ...), (slots,) and (slots,); `ended` are those terminated or truncated.
    edges
        The first slot of each ring, and the number of slots; shape (rings + 1,).
    newest
        The slot of each ring's newest step, shape (rings,).
    slots
        Where the windows start, shape (n,).
    n_step, gamma
        The most steps to sum, and the discount of a step.

    Raises
    ------
    RowIndexError
        If a slot is none; names it.
    ArgumentError
        If `n_step` is no whole number from 1 on, or `gamma` none from 0 to 1.

    Examples
    --------
    >>> never = np.zeros(3, bool)
    >>> nstep_of_rings(np.array([1.0, 2.0, 4.0]), never, never, [0, 3], [1], np.array([2, 1]), n_step=3, gamma=1.0)
    NStep(returns=array([7., 2.]), discount=array([1., 1.]), last=array([1, 1]))
    """
    from samplebatch import kernels

    whole("n_step", n_step, 1)
    fraction("gamma", gamma)
    reward = np.ascontiguousarray(rewards, np.float64)
    flat = reward.reshape(len(reward), prod(reward.shape[1:]))
    n = len(slots)
    returns, discount, last = np.empty((n, flat.shape[1])), np.empty(n), np.empty(n, np.intp)
    refused = kernels.windows(
        flat,
        np.ascontiguousarray(terminated, np.bool_),
        np.ascontiguousarray(ended, np.bool_),
        np.ascontiguousarray(edges, np.intp),
        np.ascontiguousarray(newest, np.intp),
        slots,
        n_step,
        gamma,
        returns,
        discount,
        last,
    )
    if refused >= 0:
        raise RowIndexError(f"slot {slots[refused]} must lie in [0, {len(reward)})")
    return NStep(returns.reshape(n, *reward.shape[1:]), discount, last)


def value_mask(buffer: Any, indices: npt.ArrayLike) -> Flags:
    """Tell for slots of a buffer whether the observations they lead to have a value: all but terminated ones.

    >>> from types import SimpleNamespace
    >>> value_mask(SimpleNamespace(terminated=np.array([False, True])), [1, 0, 0])
    array([False,  True,  True])
    """
    mask: Flags = np.logical_not(buffer.terminated[indices])
    return mask


def compute_episodic_return(
    batch: Any,
    buffer: Any = None,
    indices: npt.ArrayLike | None = None,
    v_s_: Any = None,
    v_s: Any = None,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
) -> tuple[Floats, Floats]:
    """Estimate the returns and advantages of a batch's steps, by generalized advantage estimation.

    Parameters
    ----------
    batch
        Steps in time order, one episode after the other: a `Batch`, a `SampleBatch` or a dict with rewards, terminated
        and truncated under Tianshou's names or RLlib's.
    buffer, indices
        The buffer that the batch comes from and its slots, such that the batch is `buffer[indices]`: the buffer knows
        which of them end unfinished episodes. Without a buffer an episode ends where `eps_id` or `agent_index` changes,
        if the batch has them, and with the last row.
    v_s_
        Estimates for the next observations, n elements. None: they are worth 0, which needs a `gae_lambda` of 1.
    v_s
        Estimates for the observations, n elements. None: the estimates for the next observation of the row before
        (the first row takes the last one's).
    gamma, gae_lambda
        The discount of a step, and the decay of the estimate on top of it.

    Returns
    -------
    tuple
        Returns, which are the advantages plus `v_s`, and advantages, of the shape of the rewards.

    Raises
    ------
    ColumnLengthError, ColumnTypeError
        As `gae` does.
    ColumnNotFoundError
        If the batch lacks rewards or flags.
    SequenceError
        If the batch is padded or time-major.
    ValueError
        If there is no `v_s_`, and `gae_lambda` is not 1.

    Examples
    --------
    >>> from samplebatch import Batch
    >>> batch = Batch(rew=[1.0, 1.0, 1.0], terminated=[False, False, True], truncated=[False, False, False])
    >>> compute_episodic_return(batch, gamma=0.5, gae_lambda=1.0)
    (array([1.75, 1.5 , 1.  ]), array([1.75, 1.5 , 1.  ]))
    """
    reward, over, ended = _steps(batch)
    if buffer is None:
        _mark_changes(batch, ended)
    else:
        slots = _slots_of(batch, indices, len(reward))
        _mark(ended, slots, np.asarray(buffer.unfinished_index()))
    if v_s_ is None:
        if abs(gae_lambda - 1.0) > 1e-8:
            raise ValueError(f"gae_lambda must be 1 where v_s_ is None, got {gae_lambda}; give v_s_")
        following = np.zeros(reward.shape)
    else:
        following = _floats("v_s_", v_s_, reward.shape)
    if v_s is None:
        values = np.roll(np.where(over.reshape(-1, *(1,) * (reward.ndim - 1)), 0.0, following), 1, axis=0)
    else:
        values = _floats("v_s", v_s, reward.shape)
    return _estimated(reward, over, ended, values, following, gamma, gae_lambda)


def compute_nstep_return(
    batch: Any,
    buffer: Any,
    indices: npt.ArrayLike | None,
    target_q_fn: Callable[[Any, Indices], Any],
    gamma: float = 0.99,
    n_step: int = 1,
) -> Any:
    """Add n-step targets to a batch, under the name `returns`.

    Parameters
    ----------
    batch
        A `Batch`, a `SampleBatch` or a dict of n rows. Without a buffer it must be as for `compute_episodic_return`.
    buffer, indices
        The buffer that the batch comes from and its slots, shape (n,), such that the batch is `buffer[indices]`. None
        and None: the batch itself holds the steps.
    target_q_fn
        Takes the buffer, or the batch where there is none, and the slots or rows of the last step of each window, shape
        (n,). Returns estimates for the observations after them, n rows of any shape: a tensor or an array.
    gamma
        The discount of a step.
    n_step
        The most steps in a window, which the end of an episode and a ring's newest step cut short.

    Returns
    -------
    Batch, SampleBatch or dict
        The batch itself: `returns` has shape (n, k) for k estimates a row, and the estimates' dtype and device. A
        `weight` that the batch has becomes a tensor too if the estimates are one.

    Raises
    ------
    ColumnLengthError
        If batch, indices and estimates do not have as many rows; names them.
    ColumnNotFoundError, ColumnTypeError, SequenceError
        As `compute_episodic_return` does.
    ArgumentError
        If `n_step` is no whole number from 1 on, or `gamma` none from 0 to 1.

    Examples
    --------
    >>> from samplebatch import Batch
    >>> batch = Batch(rew=[1.0, 1.0, 1.0], terminated=[False, False, True], truncated=[False, False, False])
    >>> compute_nstep_return(batch, None, None, lambda batch, rows: np.full(3, 8.0), gamma=0.5, n_step=2).returns
    array([[3.5],
           [1.5],
           [1. ]])
    """
    if buffer is None:
        reward, over, ended = _steps(batch)
        _mark_changes(batch, ended)
        n = len(reward)
        found = nstep_of_rings(reward, over, ended, np.array([0, n]), np.array([n - 1]), np.arange(n), n_step, gamma)
    else:
        slots = _slots_of(batch, indices, len(batch))
        reward, edges, newest = buffer.rew, buffer.subbuffer_edges, buffer.last_index
        found = nstep_of_rings(reward, buffer.terminated, buffer.done, edges, newest, slots, n_step, gamma)
    returns, discount, last = found
    estimates = target_q_fn(batch if buffer is None else buffer, last)
    tensor = KINDS[type(estimates)] == TENSOR
    array = array_of(estimates) if tensor else np.asarray(estimates)
    n = len(last)
    if not array.ndim or len(array) != n:
        raise ColumnLengthError(f"estimates must have {n} rows, one a window, got shape {array.shape}")
    summed, following = returns.reshape(n, -1), array.reshape(n, -1)
    if summed.shape[1] not in (1, following.shape[1]):
        raise ColumnLengthError(
            f"estimates must have {summed.shape[1]} values a row, as the rewards have, got {following.shape[1]}"
        )
    targets = summed + discount[:, None] * following
    if tensor:
        batch["returns"] = to_torch_as(targets, estimates)
        if "weight" in batch:
            batch["weight"] = to_torch_as(batch["weight"], estimates)
    else:
        batch["returns"] = targets.astype(array.dtype, copy=False) if array.dtype.kind == "f" else targets
    return batch


def _estimated(
    rewards: Floats, terminated: Flags, ended: Flags, values: Floats, next_values: Floats, gamma: float, decay: float
) -> tuple[Floats, Floats]:
    """Run the compiled estimate over each column of rewards."""
    from samplebatch import kernels

    gamma, decay = fraction("gamma", gamma), fraction("gae_lambda", decay)
    if rewards.ndim == 1:
        advantages, returns = memory.empty(rewards.shape, rewards.dtype), memory.empty(rewards.shape, rewards.dtype)
        kernels.gae(rewards, terminated, ended, values, next_values, gamma, decay, advantages, returns)
        return returns, advantages
    n, m = len(rewards), prod(rewards.shape[1:])
    columns = [np.ascontiguousarray(array.reshape(n, m).T) for array in (rewards, values, next_values)]
    found = np.empty((2, m, n))
    for column, (reward, value, following) in enumerate(zip(*columns, strict=True)):
        advantages, returns = found[:, column]
        kernels.gae(reward, terminated, ended, value, following, gamma, decay, advantages, returns)
    advantages, returns = (np.ascontiguousarray(part.T).reshape(rewards.shape) for part in found)
    return returns, advantages


def _numbers(name: str, value: Any) -> npt.NDArray[Any]:
    array = array_of(value) if KINDS[type(value)] == TENSOR else np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ColumnTypeError(f"{name!r} must hold numbers, got dtype {array.dtype}")
    return array


def _floats(name: str, value: Any, shape: tuple[int, ...] | None = None) -> Floats:
    """Return an array, tensor or list as float64, in a shape if one is given that it has the elements for."""
    array = np.ascontiguousarray(_numbers(name, value), np.float64)
    if shape is None or array.shape == shape:
        return array
    if array.size != prod(shape):
        raise ColumnLengthError(f"{name!r} must have {prod(shape)} elements, as the rewards have, got {array.size}")
    return array.reshape(shape)


def _flags(terminated: Any, truncated: Any, n: int) -> tuple[Flags, Flags]:
    """Return which of n steps are terminated, and which end an episode in whichever way; the second array is new."""
    read = []
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if value is not None:
            flags = np.ascontiguousarray(as_flags(_numbers(name, value), name)).reshape(-1)
            if len(flags) != n:
                raise ColumnLengthError(f"{name!r} must have {n} rows, one for each reward, got {len(flags)}")
            read.append(flags)
    return read[0], read[0] | read[-1]


def _column(batch: Any, name: str) -> Any:
    """Return a batch's column by Tianshou's name or RLlib's, or None."""
    for known in (name, names.TO_FLAT[name]):
        if known in batch:
            return batch[known]
    return None


def _steps(batch: Any) -> tuple[Floats, Flags, Flags]:
    """Return a batch's rewards, which of its steps are terminated, and in a new array which end an episode."""
    for layout in ("zero_padded", "time_major"):
        if layout not in batch and getattr(batch, layout, False) is True:
            raise SequenceError(f"steps must lie one after the other, got a batch that is {layout}")
    rewards, terminated = _column(batch, "rew"), _column(batch, "terminated")
    if terminated is None:
        # What an older interface calls done is that it is over.
        terminated = _column(batch, "done")
    for name, column in (("rew", rewards), ("terminated", terminated)):
        if column is None:
            raise no_such_column(name, batch.keys())
    reward = _floats("rew", rewards)
    return reward, *_flags(terminated, _column(batch, "truncated"), len(reward))


def _slots_of(batch: Any, indices: npt.ArrayLike | None, n: int) -> Indices:
    if indices is None:
        raise ValueError("indices must say which slots of the buffer the batch has, got None")
    slots = np.ascontiguousarray(indices, np.intp)
    if slots.shape != (n,):
        raise ColumnLengthError(f"indices must have {n} rows, one for each of the batch's, got shape {slots.shape}")
    return slots


def _mark(ended: Flags, slots: Indices, unfinished: Indices) -> None:
    """Mark the rows that end unfinished episodes."""
    if len(unfinished) <= 4:
        for slot in unfinished:
            ended |= slots == slot
    elif len(slots):
        table = np.zeros(max(int(slots.max()), int(unfinished.max())) + 1, bool)
        table[unfinished] = True
        ended |= table[slots]


def _mark_changes(batch: Any, ended: Flags) -> None:
    """Mark the rows after which another episode or agent begins, where a batch says which is which."""
    for name in (names.EPS_ID, names.AGENT_INDEX):
        if name in batch:
            ids = np.asarray(batch[name])
            ended[:-1] |= ids[1:] != ids[:-1]

"""Returns and advantages of batches and of buffers' slots, in Tianshou's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.delivery import array_of
from samplebatch.batch.nested.functions import to_torch_as
from samplebatch.batch.nested.node import KINDS, TENSOR
from samplebatch.errors import ColumnLengthError, SequenceError, no_such_column
from samplebatch.returns.arrays import (
    Flags,
    Floats,
    Indices,
    VTrace,
    as_episode_flags,
    as_floats,
    estimate_advantages,
    nstep_of_rings,
    vtrace,
)


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
    reward, over, ended = _mark_ends(batch, buffer, indices)
    if v_s_ is None:
        if abs(gae_lambda - 1.0) > 1e-8:
            raise ValueError(f"gae_lambda must be 1 where v_s_ is None, got {gae_lambda}; give v_s_")
        following = np.zeros(reward.shape)
    else:
        following = as_floats("v_s_", v_s_, reward.shape)
    if v_s is None:
        values = np.roll(np.where(over.reshape(-1, *(1,) * (reward.ndim - 1)), 0.0, following), 1, axis=0)
    else:
        values = as_floats("v_s", v_s, reward.shape)
    return estimate_advantages(reward, over, ended, values, following, gamma, gae_lambda)


def compute_vtrace_return(
    batch: Any,
    buffer: Any = None,
    indices: npt.ArrayLike | None = None,
    *,
    v_s_: Any,
    v_s: Any,
    log_ratios: Any,
    gamma: float = 0.99,
    **options: Any,
) -> VTrace:
    """Estimate V-trace targets and advantages of a batch's steps.

    Parameters
    ----------
    batch, buffer, indices
        As `compute_episodic_return` takes them.
    v_s_, v_s
        Estimates for the next observations and for the observations, n elements each.
    log_ratios
        Log-probability of each action under the target policy minus that under the behaviour policy, n elements.
    gamma, **options
        As `samplebatch.returns.vtrace` takes them: `vtrace_lambda`, `rho_clip`, `c_clip`, `advantage_rho_clip`.

    Returns
    -------
    VTrace
        Targets and advantages, of the shape of the rewards.

    Raises
    ------
    ColumnNotFoundError, SequenceError
        As `compute_episodic_return` does.
    ColumnLengthError, ColumnTypeError, ArgumentError
        As `samplebatch.returns.vtrace` does.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> batch = SampleBatch(rewards=[1.0, 1.0], terminateds=[False, True], eps_id=[3, 3])
    >>> compute_vtrace_return(batch, v_s_=[0.5, 9.0], v_s=[0.5, 0.5], log_ratios=[0.0, 0.0], gamma=0.5).returns
    array([1.5, 1. ])
    """
    reward, over, ended = _mark_ends(batch, buffer, indices)
    estimates = {"values": v_s, "next_values": v_s_}
    return vtrace(reward, over, ended, **estimates, log_ratios=log_ratios, gamma=gamma, **options)


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
    reward = as_floats("rew", rewards)
    return reward, *as_episode_flags(terminated, _column(batch, "truncated"), len(reward))


def _mark_ends(batch: Any, buffer: Any, indices: npt.ArrayLike | None) -> tuple[Floats, Flags, Flags]:
    """Return rewards, terminated steps, and steps after which the next row does not continue the episode."""
    reward, over, ended = _steps(batch)
    if buffer is None:
        _mark_changes(batch, ended)
    else:
        slots = _slots_of(batch, indices, len(reward))
        _mark(ended, slots, np.asarray(buffer.unfinished_index()))
    return reward, over, ended


def _slots_of(batch: Any, indices: npt.ArrayLike | None, n: int) -> Indices:
    if indices is None:
        raise ValueError("indices must say which slots of the buffer the batch has, got None")
    slots = np.ascontiguousarray(indices, np.intp)
    if slots.shape != (n,):
        raise ColumnLengthError(f"indices must have {n} rows, one for each of the batch's, got shape {slots.shape}")
    return slots


def _mark(ended: Flags, slots: Indices, unfinished: Indices) -> None:
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

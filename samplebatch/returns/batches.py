"""Returns and advantages of batches and buffer slots, with Tianshou's interface."""

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
from samplebatch.returns import arrays


def value_mask(buffer: Any, indices: npt.ArrayLike) -> arrays.Flags:
    """Return, for each slot, whether the next observation has a value: True unless the slot is terminated.

    >>> from types import SimpleNamespace
    >>> value_mask(SimpleNamespace(terminated=np.array([False, True])), [1, 0, 0])
    array([False,  True,  True])
    """
    mask: arrays.Flags = np.logical_not(buffer.terminated[indices])
    return mask


def compute_episodic_return(
    batch: Any,
    buffer: Any = None,
    indices: npt.ArrayLike | None = None,
    v_s_: Any = None,
    v_s: Any = None,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
) -> tuple[arrays.Floats, arrays.Floats]:
    """Estimate returns and advantages of a batch by generalized advantage estimation (arXiv:1506.02438).

    Parameters
    ----------
    batch
        Steps in time order, episode by episode: a `Batch`, a `SampleBatch` or a dict. Rewards, terminated flags and
        truncated flags have Tianshou's or RLlib's names.
    buffer, indices
        Buffer and slots from which the batch was sampled (`buffer[indices]`); the buffer determines which episodes are
        unfinished. Without a buffer, an episode ends where `eps_id` or `agent_index` (if present) changes, and at the
        last row.
    v_s_
        Estimates for the next observations, n elements. None represents zeros and requires a `gae_lambda` of 1.
    v_s
        Estimates for the observations, n elements. If `v_s` is None, each row uses `v_s_` of the previous row, and the
        first row uses `v_s_` of the last row.
    gamma, gae_lambda
        Discount per step, and decay of the estimates.

    Returns
    -------
    tuple
        Returns (advantages plus `v_s`) and advantages, each with the same shape as the rewards.

    Raises
    ------
    ColumnLengthError, ColumnTypeError
        As in `gae`.
    ColumnNotFoundError
        If the batch lacks rewards or flags.
    SequenceError
        If the batch is padded or time-major.
    ValueError
        If `v_s_` is None and `gae_lambda` is not 1.

    Examples
    --------
    >>> from samplebatch import Batch
    >>> batch = Batch(
    ...     rew=[1.0, 1.0, 1.0],
    ...     terminated=[False, False, True],
    ...     truncated=[False, False, False],
    ... )
    >>> compute_episodic_return(batch, gamma=0.5, gae_lambda=1.0)
    (array([1.75, 1.5 , 1.  ]), array([1.75, 1.5 , 1.  ]))
    """
    reward, over, ended = _mark_ends(batch, buffer, indices)
    if v_s_ is None:
        if abs(gae_lambda - 1.0) > 1e-8:
            raise ValueError(f"gae_lambda must be 1 if v_s_ is None, got {gae_lambda}; pass v_s_")
        following = np.zeros(reward.shape)
    else:
        following = arrays.as_floats("v_s_", v_s_, reward.shape)
    if v_s is None:
        values = np.roll(np.where(over.reshape(-1, *(1,) * (reward.ndim - 1)), 0.0, following), 1, axis=0)
    else:
        values = arrays.as_floats("v_s", v_s, reward.shape)
    return arrays.estimate_advantages(reward, over, ended, values, following, gamma, gae_lambda)


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
) -> arrays.VTrace:
    """Estimate V-trace targets and advantages of a batch's steps.

    Parameters
    ----------
    batch, buffer, indices
        As in `compute_episodic_return`.
    v_s_, v_s
        Estimates for the next observations and for the observations, n elements each.
    log_ratios
        Log-probability of each action under the target policy minus its log-probability under the behaviour policy, n
        elements.
    gamma, **options
        As in `samplebatch.returns.vtrace`: `vtrace_lambda`, `rho_clip`, `c_clip`, `advantage_rho_clip`.

    Returns
    -------
    VTrace
        Targets and advantages, each with the same shape as the rewards.

    Raises
    ------
    ColumnNotFoundError, SequenceError
        As in `compute_episodic_return`.
    ColumnLengthError, ColumnTypeError, ArgumentError
        As in `samplebatch.returns.vtrace`.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> batch = SampleBatch(rewards=[1.0, 1.0], terminateds=[False, True], eps_id=[3, 3])
    >>> compute_vtrace_return(
    ...     batch, v_s_=[0.5, 9.0], v_s=[0.5, 0.5], log_ratios=[0.0, 0.0], gamma=0.5
    ... ).returns
    array([1.5, 1. ])
    """
    reward, over, ended = _mark_ends(batch, buffer, indices)
    estimates = {"values": v_s, "next_values": v_s_}
    return arrays.vtrace(reward, over, ended, **estimates, log_ratios=log_ratios, gamma=gamma, **options)


def compute_nstep_return(
    batch: Any,
    buffer: Any,
    indices: npt.ArrayLike | None,
    target_q_fn: Callable[[Any, arrays.Indices], Any],
    gamma: float = 0.99,
    n_step: int = 1,
) -> Any:
    """Add n-step targets to a batch as `returns`.

    Parameters
    ----------
    batch
        A `Batch`, a `SampleBatch` or a dict of n rows. Without a buffer, episodes end at the same rows as in
        `compute_episodic_return`.
    buffer, indices
        Buffer and slots from which the batch was sampled (`buffer[indices]`), shape (n,). If None, the batch itself
        contains the steps.
    target_q_fn
        Function of the buffer (or batch) and the slots (or rows) of each window's last step, shape (n,). The function
        returns estimates for the next observations as a tensor or an array with n rows of any shape.
    gamma
        Discount per step.
    n_step
        Maximum number of steps per window; a window ends earlier at the end of its episode or at its ring's newest
        step.

    Returns
    -------
    Batch, SampleBatch or dict
        The batch itself: `returns` has shape (n, k) for k estimates per row, and the dtype and device of the estimates.
        If the estimates are tensors, a `weight` in the batch also becomes a tensor.

    Raises
    ------
    ColumnLengthError
        If the batch, the indices and the estimates do not have the same length.
    ColumnNotFoundError, ColumnTypeError, SequenceError
        As in `compute_episodic_return`.
    ArgumentError
        If `n_step` is not a positive integer, or `gamma` is not in [0, 1].

    Examples
    --------
    >>> from samplebatch import Batch
    >>> batch = Batch(
    ...     rew=[1.0, 1.0, 1.0],
    ...     terminated=[False, False, True],
    ...     truncated=[False, False, False],
    ... )
    >>> compute_nstep_return(
    ...     batch, None, None, lambda batch, rows: np.full(3, 8.0), gamma=0.5, n_step=2
    ... ).returns
    array([[3.5],
           [1.5],
           [1. ]])
    """
    if buffer is None:
        reward, over, ended = _steps(batch)
        _mark_changes(batch, ended)
        n = len(reward)
        windows = arrays.nstep_of_rings(
            reward, over, ended, np.array([0, n]), np.array([n - 1]), np.arange(n), n_step, gamma
        )
    else:
        slots = _slots_of(batch, indices, len(batch))
        reward, edges, newest = buffer.rew, buffer.subbuffer_edges, buffer.last_index
        windows = arrays.nstep_of_rings(reward, buffer.terminated, buffer.done, edges, newest, slots, n_step, gamma)
    returns, discount, last = windows
    estimates = target_q_fn(batch if buffer is None else buffer, last)
    is_tensor = KINDS[type(estimates)] == TENSOR
    array = array_of(estimates) if is_tensor else np.asarray(estimates)
    n = len(last)
    if not array.ndim or len(array) != n:
        raise ColumnLengthError(f"estimates must have {n} rows, one per window, got shape {array.shape}")
    summed, following = returns.reshape(n, -1), array.reshape(n, -1)
    if summed.shape[1] not in (1, following.shape[1]):
        raise ColumnLengthError(
            f"estimates must have {summed.shape[1]} values per row like the rewards, got {following.shape[1]}"
        )
    targets = summed + discount[:, None] * following
    if is_tensor:
        batch["returns"] = to_torch_as(targets, estimates)
        if "weight" in batch:
            batch["weight"] = to_torch_as(batch["weight"], estimates)
    else:
        batch["returns"] = targets.astype(array.dtype, copy=False) if array.dtype.kind == "f" else targets
    return batch


def _column(batch: Any, name: str) -> Any:
    for candidate in (name, names.TO_FLAT[name]):
        if candidate in batch:
            return batch[candidate]
    return None


def _steps(batch: Any) -> tuple[arrays.Floats, arrays.Flags, arrays.Flags]:
    """Return rewards and terminated flags of a batch, and a new mask of steps that end an episode."""
    for layout in ("zero_padded", "time_major"):
        if layout not in batch and getattr(batch, layout, False) is True:
            raise SequenceError(f"steps must be contiguous rows, got a batch that is {layout}")
    rewards, terminated = _column(batch, "rew"), _column(batch, "terminated")
    if terminated is None:
        # Older interfaces call terminated steps done.
        terminated = _column(batch, "done")
    for name, column in (("rew", rewards), ("terminated", terminated)):
        if column is None:
            raise no_such_column(name, batch.keys())
    reward = arrays.as_floats("rew", rewards)
    return reward, *arrays.as_episode_flags(terminated, _column(batch, "truncated"), len(reward))


def _mark_ends(
    batch: Any, buffer: Any, indices: npt.ArrayLike | None
) -> tuple[arrays.Floats, arrays.Flags, arrays.Flags]:
    """Return rewards, terminated flags, and a mask of rows whose next row does not continue the episode."""
    reward, over, ended = _steps(batch)
    if buffer is None:
        _mark_changes(batch, ended)
    else:
        slots = _slots_of(batch, indices, len(reward))
        _mark(ended, slots, np.asarray(buffer.unfinished_index()))
    return reward, over, ended


def _slots_of(batch: Any, indices: npt.ArrayLike | None, n: int) -> arrays.Indices:
    if indices is None:
        raise ValueError("indices must be the slots of the batch in the buffer, got None")
    slots = np.ascontiguousarray(indices, np.intp)
    if slots.shape != (n,):
        raise ColumnLengthError(f"indices must have {n} rows like the batch, got shape {slots.shape}")
    return slots


def _mark(ended: arrays.Flags, slots: arrays.Indices, unfinished: arrays.Indices) -> None:
    if len(unfinished) <= 4:
        for slot in unfinished:
            ended |= slots == slot
    elif len(slots):
        table = np.zeros(max(int(slots.max()), int(unfinished.max())) + 1, bool)
        table[unfinished] = True
        ended |= table[slots]


def _mark_changes(batch: Any, ended: arrays.Flags) -> None:
    """Mark the last row of each run of equal `eps_id` and `agent_index`."""
    for name in (names.EPS_ID, names.AGENT_INDEX):
        if name in batch:
            ids = np.asarray(batch[name])
            ended[:-1] |= ids[1:] != ids[:-1]

"""Returns and advantages of arrays and ragged columns."""

from __future__ import annotations

from math import inf, prod
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from samplebatch import deferred_kernels
from samplebatch.arguments import fraction, positive, suggest_names, whole
from samplebatch.batch.delivery import as_array
from samplebatch.column import memory
from samplebatch.column.casting import as_flags
from samplebatch.column.ragged_math import accumulate_floats, check_alike
from samplebatch.column.ragged_rows import RaggedRows
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnTypeError, RowIndexError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


class NStep(NamedTuple):
    """N-step returns of rows, with the discounts of the rows' bootstrap values."""

    returns: Floats
    """Discounted sums of rewards, of the shape of the rewards."""
    discount: Floats
    """Factor of the bootstrap value at the observation after `last`, shape (n,): gamma to the number of steps, 0 if the
    step `last` is terminated.
    """
    last: Indices
    """Row of the last step of each window, shape (n,)."""


@overload
def gae(
    rewards: RaggedRows,
    terminated: None = None,
    truncated: None = None,
    *,
    values: Any,
    next_values: npt.ArrayLike | None = None,
    gamma: float | None = None,
    gae_lambda: float | None = None,
) -> tuple[Any, Any]: ...


@overload
def gae(
    rewards: npt.ArrayLike,
    terminated: npt.ArrayLike | None = None,
    truncated: npt.ArrayLike | None = None,
    *,
    values: Any,
    next_values: npt.ArrayLike | None = None,
    gamma: float | None = None,
    gae_lambda: float | None = None,
) -> tuple[Floats, Floats]: ...


@suggest_names(lam="gae_lambda", lambda_="gae_lambda", discount="gamma", dones="terminated")
def gae(
    rewards: Any,
    terminated: npt.ArrayLike | None = None,
    truncated: npt.ArrayLike | None = None,
    *,
    values: Any,
    next_values: npt.ArrayLike | None = None,
    gamma: float | None = None,
    gae_lambda: float | None = None,
) -> tuple[Any, Any]:
    r"""Estimate returns and advantages by generalized advantage estimation (arXiv:1506.02438).

    .. math::
        A_t = r_t + \gamma V(s_{t+1}) - V(s_t) + \gamma \lambda A_{t+1}

    The value of the next state is 0 if the step is terminated. The term with A_{t+1} is 0 if step t ends its episode or
    is the last row.

    Parameters
    ----------
    rewards
        Rewards of steps in time order, episode by episode, shape (n,), or (n, m) for m rewards per step. Alternatively,
        a ragged column of rewards in which each row is one trajectory, such as the tokens of a completion.
    terminated, truncated
        Flags, shape (n,); `truncated` is optional. Flags must be None for ragged rewards.
    values
        Value estimates for the observations of the steps, with the same shape as the rewards: an array, a tensor or a
        ragged column.
    next_values
        Value estimates for the observations after the steps, with the same shape as the rewards. For ragged rewards,
        one estimate after the last element of each row, shape (rows,), which is 0 for a terminated row; None if all
        rows are terminated.
    gamma, gae_lambda
        Discount per step, and decay of the estimates. The defaults are 0.99 and 0.95, or 1 and 1 for ragged rewards.

    Returns
    -------
    tuple
        Returns (advantages plus values) and advantages, each with the same shape as the rewards. The dtype is float64,
        except that ragged results have the dtype of floating-point rewards.

    Raises
    ------
    ColumnLengthError
        If the number of elements of an array does not match the rewards.
    ColumnTypeError
        If an array is not numeric, or only one of rewards and values is ragged.
    ArgumentError
        If `gamma` or `gae_lambda` is not in [0, 1], an argument is missing, or flags are passed for ragged rewards.

    Examples
    --------
    >>> returns, advantages = gae(
    ...     [1.0, 1.0, 1.0],
    ...     [0, 0, 1],
    ...     values=[0.5, 0.5, 0.5],
    ...     next_values=[0.5, 0.5, 9.0],
    ...     gamma=0.5,
    ...     gae_lambda=1.0,
    ... )
    >>> returns, advantages
    (array([1.75, 1.5 , 1.  ]), array([1.25, 1.  , 0.5 ]))
    >>> from samplebatch import SampleBatch
    >>> batch = SampleBatch(
    ...     rewards=[[0.0, 1.0], [1.0]],
    ...     values=[[0.5, 0.5], [0.25]],
    ...     ragged=["rewards", "values"],
    ... )
    >>> [list(rows) for rows in gae(batch["rewards"], values=batch["values"], gamma=0.5)]
    [[array([0.5, 1. ]), array([1.])], [array([0. , 0.5]), array([0.75])]]
    """
    if isinstance(rewards, RaggedRows):
        _require_no_flags(terminated, truncated)
        discount, decay = 1.0 if gamma is None else gamma, 1.0 if gae_lambda is None else gae_lambda
        return _gae_of_rows(rewards, values, next_values, gamma=discount, gae_lambda=decay)
    if next_values is None:
        raise ArgumentError("next_values must be an array of the shape of the rewards, got None")
    reward = as_floats("rewards", rewards)
    over, ended = as_episode_flags(_require_flags(terminated), truncated, len(reward))
    estimates = as_floats("values", values, reward.shape), as_floats("next_values", next_values, reward.shape)
    discount, decay = 0.99 if gamma is None else gamma, 0.95 if gae_lambda is None else gae_lambda
    return estimate_advantages(reward, over, ended, *estimates, discount, decay)


class VTrace(NamedTuple):
    """V-trace targets of a critic, and advantages for a policy gradient."""

    returns: Floats
    """Targets of the critic, of the shape of the rewards."""
    advantages: Floats
    """Advantages weighted by clipped importance ratios, of the shape of the rewards."""


def vtrace(
    rewards: Any,
    terminated: npt.ArrayLike | None = None,
    truncated: npt.ArrayLike | None = None,
    *,
    values: Any,
    next_values: npt.ArrayLike | None = None,
    log_ratios: Any,
    gamma: float | None = None,
    vtrace_lambda: float = 1.0,
    rho_clip: float | None = 1.0,
    c_clip: float | None = 1.0,
    advantage_rho_clip: float | None = 1.0,
) -> VTrace:
    r"""Estimate off-policy targets and advantages by V-trace (Espeholt et al., IMPALA, arXiv:1802.01561, section 4).

    .. math::
        v_t = V(s_t) + \delta_t + \gamma c_t (v_{t+1} - V(s_{t+1})), \quad
        \delta_t = \rho_t (r_t + \gamma V(s_{t+1}) - V(s_t)), \quad
        A_t = \rho_t (r_t + \gamma v_{t+1} - V(s_t))

    with :math:`\rho_t = \min(\bar\rho, \pi(a_t|s_t) / \mu(a_t|s_t))` and
    :math:`c_t = \lambda \min(\bar c, \pi(a_t|s_t) / \mu(a_t|s_t))`. The value of the next state is 0 if the step is
    terminated. At the last step of an episode, and in the last row, :math:`v_{t+1}` is :math:`V(s_{t+1})`.

    Parameters
    ----------
    rewards, terminated, truncated, values, next_values
        As in `gae`.
    log_ratios
        Log-probability of each action under the target policy minus its log-probability under the behaviour policy,
        shape (n,). For ragged rewards, a ragged column with the same row lengths as the rewards.
    gamma, vtrace_lambda
        Discount per step (default: 0.99; for ragged rewards 1), and decay of the trace (remark 2 of the paper).
    rho_clip, c_clip
        Upper bounds of the importance ratios in temporal differences and in traces respectively; None for no bound.
    advantage_rho_clip
        Upper bound of the importance ratio that weights an advantage; None for no bound.

    Returns
    -------
    VTrace
        Targets and advantages, each with the shape and dtype of the results of `gae`.

    Raises
    ------
    ColumnLengthError, ColumnTypeError
        As in `gae`.
    ArgumentError
        As in `gae`, or if a clip threshold is not a positive number.

    Examples
    --------
    >>> targets = vtrace(
    ...     [1.0, 1.0],
    ...     [0, 1],
    ...     values=[0.5, 0.5],
    ...     next_values=[0.5, 9.0],
    ...     log_ratios=np.log([2.0, 0.5]),
    ...     gamma=0.5,
    ... )
    >>> targets.returns, targets.advantages
    (array([1.375, 0.75 ]), array([0.875, 0.25 ]))
    """
    clips = rho_clip, c_clip, advantage_rho_clip
    if isinstance(rewards, RaggedRows):
        _require_no_flags(terminated, truncated)
        discount = 1.0 if gamma is None else gamma
        return _vtrace_of_rows(rewards, values, log_ratios, next_values, discount, vtrace_lambda, *clips)
    if next_values is None:
        raise ArgumentError("next_values must be an array of the shape of the rewards, got None")
    discount = 0.99 if gamma is None else gamma
    reward = as_floats("rewards", rewards)
    over, ended = as_episode_flags(_require_flags(terminated), truncated, len(reward))
    estimates = as_floats("values", values, reward.shape), as_floats("next_values", next_values, reward.shape)
    ratios = as_floats("log_ratios", log_ratios, reward.shape[:1])
    return estimate_vtrace(reward, over, ended, *estimates, ratios, discount, vtrace_lambda, *clips)


@overload
def discounted_returns(
    rewards: RaggedRows,
    terminated: None = None,
    truncated: None = None,
    next_values: npt.ArrayLike | None = None,
    *,
    gamma: float | None = None,
) -> Any: ...


@overload
def discounted_returns(
    rewards: npt.ArrayLike,
    terminated: npt.ArrayLike | None = None,
    truncated: npt.ArrayLike | None = None,
    next_values: npt.ArrayLike | None = None,
    *,
    gamma: float | None = None,
) -> Floats: ...


def discounted_returns(
    rewards: Any,
    terminated: npt.ArrayLike | None = None,
    truncated: npt.ArrayLike | None = None,
    next_values: npt.ArrayLike | None = None,
    *,
    gamma: float | None = None,
) -> Any:
    """Sum the discounted rewards from each step to the end of its episode.

    Parameters
    ----------
    rewards, terminated, truncated
        As in `gae`.
    next_values
        Estimates at the observations after the steps, of the shape of the rewards. The estimate after a truncated step
        or an unfinished last row replaces the rewards of later steps; other estimates are ignored. For ragged rewards,
        one estimate per row, as in `gae`. None represents zeros.
    gamma
        Discount per step. The default is 0.99, or 1 for ragged rewards.

    Returns
    -------
    ndarray, RaggedColumn or RaggedTorchColumn
        Sums in the shape of the rewards; dtype as in `gae`.

    Raises
    ------
    ColumnLengthError, ColumnTypeError, ArgumentError
        As in `gae`.

    Examples
    --------
    >>> discounted_returns(
    ...     [1.0, 1.0, 1.0, 1.0], [0, 1, 0, 0], next_values=[8.0, 8.0, 8.0, 8.0], gamma=0.5
    ... )
    array([1.5, 1. , 3.5, 5. ])
    >>> from samplebatch import SampleBatch
    >>> rewards = SampleBatch(rewards=[[1.0, 1.0, 1.0], [2.0]])["rewards"]
    >>> list(discounted_returns(rewards, next_values=[8.0, 0.0], gamma=0.5))
    [array([2.75, 3.5 , 5.  ]), array([2.])]
    """
    if isinstance(rewards, RaggedRows):
        _require_no_flags(terminated, truncated)
        return _discounted_returns_of_rows(rewards, next_values, gamma=1.0 if gamma is None else gamma)
    reward = as_floats("rewards", rewards)
    over, ended = as_episode_flags(_require_flags(terminated), truncated, len(reward))
    following = np.zeros(reward.shape)
    if next_values is not None:
        estimates = as_floats("next_values", next_values, reward.shape)
        ended[-1:] = True
        following[ended] = estimates[ended]
    discount = 0.99 if gamma is None else gamma
    returns, _ = estimate_advantages(reward, over, ended, np.zeros(reward.shape), following, discount, 1.0)
    return returns


def _require_flags(terminated: npt.ArrayLike | None) -> npt.ArrayLike:
    if terminated is None:
        raise ArgumentError("terminated must be an array with one flag per step, got None")
    return terminated


def _require_no_flags(terminated: Any, truncated: Any) -> None:
    for name, flags in (("terminated", terminated), ("truncated", truncated)):
        if flags is not None:
            raise ArgumentError(
                f"{name} must be None for ragged rewards, got {type(flags).__name__}; pass the estimate after each "
                "row's last element as next_values"
            )


def nstep(
    rewards: npt.ArrayLike,
    terminated: npt.ArrayLike,
    truncated: npt.ArrayLike | None = None,
    n_step: int = 3,
    gamma: float = 0.99,
) -> NStep:
    """Sum the discounted rewards of each step and of up to `n_step - 1` following steps of its episode.

    A window has fewer than `n_step` steps if its episode or the array ends earlier. The target of a step is
    `returns + discount * estimate`, where the estimate refers to the observation after step `last`.

    Parameters
    ----------
    rewards, terminated, truncated
        Arrays as in `gae`.
    n_step
        Maximum number of steps per window.
    gamma
        Discount per step.

    Raises
    ------
    ColumnLengthError, ColumnTypeError
        As in `gae`.
    ArgumentError
        If `n_step` is not a positive integer, or `gamma` is not in [0, 1].

    Examples
    --------
    >>> nstep([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 0], n_step=2, gamma=0.5)
    NStep(returns=array([2. , 3.5, 3. , 4. ]), discount=array([0.25, 0.  , 0.  , 0.5 ]),
        last=array([1, 2, 2, 3]))
    """
    reward = as_floats("rewards", rewards)
    n = len(reward)
    over, ended = as_episode_flags(terminated, truncated, n)
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
    """Sum the discounted rewards from slots of ring buffers; see `nstep`.

    A window wraps around at the end of its ring, and ends no later than the ring's newest step.

    rewards, terminated, ended: all slots, shapes (slots, ...), (slots,) and (slots,); `ended` is terminated or
        truncated.
    edges: first slot of each ring, and the number of slots; shape (rings + 1,).
    newest: slot of each ring's newest step, shape (rings,).
    slots: first slot of each window, shape (n,).
    n_step, gamma: maximum number of steps per window, and discount per step.

    Raises RowIndexError if a slot is out of range. Raises ArgumentError if `n_step` is not a positive integer, or
    `gamma` is not in [0, 1].

    >>> never = np.zeros(3, bool)
    >>> nstep_of_rings(
    ...     np.array([1.0, 2.0, 4.0]),
    ...     never,
    ...     never,
    ...     [0, 3],
    ...     [1],
    ...     np.array([2, 1]),
    ...     n_step=3,
    ...     gamma=1.0,
    ... )
    NStep(returns=array([7., 2.]), discount=array([1., 1.]), last=array([1, 1]))
    """
    whole("n_step", n_step, 1)
    fraction("gamma", gamma)
    reward, ends = np.asarray(rewards), np.ascontiguousarray(edges, np.intp)
    is_ready = reward.dtype == np.float64 and reward.flags.c_contiguous
    # Rewards of other dtypes are converted in the windows only: a ring may have millions of others.
    flat = reward.reshape(len(reward), prod(reward.shape[1:])) if is_ready else np.empty((len(reward), 0))
    n = len(slots)
    returns, discount, last = np.empty((n, flat.shape[1])), np.empty(n), np.empty(n, np.intp)
    invalid = deferred_kernels.windows(
        flat,
        np.ascontiguousarray(terminated, np.bool_),
        np.ascontiguousarray(ended, np.bool_),
        ends,
        np.ascontiguousarray(newest, np.intp),
        slots,
        n_step,
        gamma,
        returns,
        discount,
        last,
    )
    if invalid >= 0:
        raise RowIndexError(f"slot must be in [0, {len(reward)}), got {slots[invalid]}")
    if not is_ready:
        return NStep(_sum_windows(reward, ends, slots, last, gamma), discount, last)
    return NStep(returns.reshape(n, *reward.shape[1:]), discount, last)


def _sum_windows(
    rewards: npt.NDArray[Any], edges: Indices, slots: Indices, last: Indices, gamma: float
) -> npt.NDArray[np.float64]:
    """Sum the discounted rewards of each window; rewards outside the windows are not read."""
    ring = np.searchsorted(edges, slots, side="right") - 1
    start, stop = edges[ring], edges[ring + 1]
    steps = (last - slots) % (stop - start) + 1
    returns, factor, slot = np.zeros((len(slots), *rewards.shape[1:])), 1.0, slots
    for step in range(steps.max(initial=0)):
        within = steps > step
        returns[within] += factor * rewards[slot[within]].astype(np.float64)
        factor *= gamma
        slot = np.where(slot + 1 < stop, slot + 1, start)
    return returns


def estimate_advantages(
    rewards: Floats, terminated: Flags, ended: Flags, values: Floats, next_values: Floats, gamma: float, decay: float
) -> tuple[Floats, Floats]:
    """Estimate returns and advantages separately for each of several rewards per step."""
    gamma, decay = fraction("gamma", gamma), fraction("gae_lambda", decay)
    if rewards.ndim == 1:
        advantages, returns = memory.empty(rewards.shape, rewards.dtype), memory.empty(rewards.shape, rewards.dtype)
        deferred_kernels.gae(rewards, terminated, ended, values, next_values, gamma, decay, advantages, returns)
        return returns, advantages
    n, m = len(rewards), prod(rewards.shape[1:])
    columns = [np.ascontiguousarray(array.reshape(n, m).T) for array in (rewards, values, next_values)]
    results = np.empty((2, m, n))
    for column, (reward, value, following) in enumerate(zip(*columns, strict=True)):
        advantages, returns = results[:, column]
        deferred_kernels.gae(reward, terminated, ended, value, following, gamma, decay, advantages, returns)
    advantages, returns = (np.ascontiguousarray(part.T).reshape(rewards.shape) for part in results)
    return returns, advantages


def estimate_vtrace(
    rewards: Floats,
    terminated: Flags,
    ended: Flags,
    values: Floats,
    next_values: Floats,
    log_ratios: Floats,
    gamma: float,
    vtrace_lambda: float,
    rho_clip: float | None,
    c_clip: float | None,
    advantage_rho_clip: float | None,
) -> VTrace:
    """Estimate V-trace targets and advantages separately for each of several rewards per step."""
    from samplebatch import kernels

    gamma, decay = fraction("gamma", gamma), fraction("vtrace_lambda", vtrace_lambda)
    bounds = {"rho_clip": rho_clip, "c_clip": c_clip, "advantage_rho_clip": advantage_rho_clip}
    rho, trace, weight = (inf if bound is None else positive(name, bound) for name, bound in bounds.items())
    n, m = len(rewards), prod(rewards.shape[1:])
    estimates = np.empty((2, m, n))
    columns = [np.ascontiguousarray(array.reshape(n, m).T) for array in (rewards, values, next_values)]
    for column, (reward, value, following) in enumerate(zip(*columns, strict=True)):
        inputs = reward, terminated, ended, value, following, log_ratios
        kernels.vtrace(*inputs, gamma, decay, rho, trace, weight, estimates[0, column], estimates[1, column])
    advantages, returns = (np.ascontiguousarray(part.T).reshape(rewards.shape) for part in estimates)
    return VTrace(returns, advantages)


def _numbers(name: str, value: Any) -> npt.NDArray[Any]:
    array = as_array(value)
    if array.dtype.kind not in "biuf":
        raise ColumnTypeError(f"{name!r} must contain numbers, got dtype {array.dtype}")
    return array


def as_floats(name: str, value: Any, shape: tuple[int, ...] | None = None) -> Floats:
    """Convert an array, tensor or list to float64, reshaped to `shape` if passed."""
    array = np.ascontiguousarray(_numbers(name, value), np.float64)
    if shape is None or array.shape == shape:
        return array
    if array.size != prod(shape):
        raise ColumnLengthError(f"{name!r} must have {prod(shape)} elements like the rewards, got {array.size}")
    return array.reshape(shape)


def as_episode_flags(terminated: Any, truncated: Any, n: int) -> tuple[Flags, Flags]:
    """Return the terminated flags, and a new mask of steps that end an episode."""
    episode_flags = []
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if value is not None:
            flags = np.ascontiguousarray(as_flags(_numbers(name, value), name)).reshape(-1)
            if len(flags) != n:
                raise ColumnLengthError(f"{name!r} must have {n} rows, one per reward, got {len(flags)}")
            episode_flags.append(flags)
    return episode_flags[0], episode_flags[0] | episode_flags[-1]


# -- ragged rewards ----------------------------------------------------------------------------------------------------


def _gae_of_rows(
    rewards: Any,
    values: Any,
    next_values: npt.ArrayLike | None,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Any, Any]:
    from samplebatch import kernels

    _require_rows("rewards", rewards)
    _require_rows("values", values)
    check_alike(rewards, values, "values")
    reward, value = _floats(rewards), _floats(values)
    advantages, returns = (
        memory.empty(reward.shape, np.dtype(np.float64)),
        memory.empty(reward.shape, np.dtype(np.float64)),
    )
    offsets = np.ascontiguousarray(rewards.layout[0], np.intp)
    gamma, gae_lambda = fraction("gamma", gamma), fraction("gae_lambda", gae_lambda)
    kernels.gae_rows(reward, value, _last(rewards, next_values), offsets, gamma, gae_lambda, advantages, returns)
    return _like(rewards, returns), _like(rewards, advantages)


def _vtrace_of_rows(
    rewards: Any, values: Any, log_ratios: Any, next_values: npt.ArrayLike | None, gamma: float, *clips: Any
) -> VTrace:
    _require_rows("rewards", rewards)
    for name, rows in (("values", values), ("log_ratios", log_ratios)):
        _require_rows(name, rows)
        check_alike(rewards, rows, name)
    reward, value, last = _floats(rewards), _floats(values), _last(rewards, next_values)
    offsets = np.asarray(rewards.layout[0])
    has_steps = offsets[1:] > offsets[:-1]
    ended, following = np.zeros(len(reward), np.bool_), np.zeros(len(reward))
    following[:-1] = value[1:]
    ends = offsets[1:][has_steps] - 1
    ended[ends], following[ends] = True, last[has_steps]
    targets, advantages = estimate_vtrace(
        reward, np.zeros_like(ended), ended, value, following, _floats(log_ratios), gamma, *clips
    )
    return VTrace(_like(rewards, targets), _like(rewards, advantages))


def _discounted_returns_of_rows(rewards: Any, next_values: npt.ArrayLike | None, *, gamma: float) -> Any:
    _require_rows("rewards", rewards)
    gamma = fraction("gamma", gamma)
    offsets = rewards.layout[0]
    return _like(
        rewards, accumulate_floats(_floats(rewards), offsets, _last(rewards, next_values), gamma, backwards=True)
    )


def _require_rows(name: str, rows: Any) -> None:
    if not isinstance(rows, RaggedRows):
        raise ColumnTypeError(f"{name} must be a ragged column, got {type(rows).__name__}")
    if rows.ndim > 1:
        raise ColumnTypeError(f"{name} must have rows of one dimension, got {rows.ndim}")


def _floats(rows: RaggedRows) -> npt.NDArray[np.float64]:
    flat = rows.flat
    return np.ascontiguousarray(flat if isinstance(flat, np.ndarray) else flat.double().cpu().numpy(), np.float64)


def _last(rows: RaggedRows, values: Any) -> npt.NDArray[np.float64]:
    if values is None:
        return np.zeros(len(rows))
    last = np.ascontiguousarray(values.cpu() if hasattr(values, "cpu") else values, np.float64)
    if last.shape != (len(rows),):
        raise ColumnLengthError(f"next_values must have {len(rows)} rows, one per row of rewards, got {last.shape}")
    return last


def _like(rows: RaggedRows, elements: npt.NDArray[np.float64]) -> Any:
    """Return elements as a ragged column with the rows, floating-point dtype and device of another column."""
    flat = rows.flat
    if isinstance(flat, np.ndarray):
        cast: Any = elements.astype(flat.dtype, copy=False) if flat.dtype.kind == "f" else elements
    else:
        import torch

        cast = torch.from_numpy(elements).to(flat.device)
        cast = cast.to(flat.dtype) if flat.is_floating_point() else cast
    return type(rows)(cast, *rows.layout)

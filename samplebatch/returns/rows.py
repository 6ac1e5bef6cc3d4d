"""Returns and advantages of ragged columns: each row is one trajectory, such as the tokens of a completion."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import fraction
from samplebatch.column import memory
from samplebatch.column.ragged_math import accumulate_floats, check_alike
from samplebatch.column.ragged_rows import RaggedRows
from samplebatch.errors import ColumnLengthError, ColumnTypeError
from samplebatch.returns.arrays import estimate_vtrace

_FLOAT64 = np.dtype(np.float64)


def gae_of_rows(
    rewards: Any,
    values: Any,
    last_values: npt.ArrayLike | None = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
) -> tuple[Any, Any]:
    """Estimate the returns and advantages of rows, by generalized advantage estimation (arXiv:1506.02438).

    Row i is one trajectory: its last element is terminated, unless `last_values` has an estimate of what follows.

    Parameters
    ----------
    rewards, values
        Ragged columns of numbers with rows of the same lengths: rewards, and estimates at the steps or tokens.
    last_values
        Estimates of what follows each row, shape (n,): 0 for terminated rows. None: all rows are terminated.
    gamma, gae_lambda
        The discount of a step, and the decay of the estimate on top of it.

    Returns
    -------
    tuple
        Returns, which are the advantages plus the values, and advantages: ragged columns of the rows' lengths, in
        `rewards`' dtype if it is one of floats, else float64. The sums are float64.

    Raises
    ------
    ColumnLengthError
        If the columns have other lengths than each other, or there is not one last value per row.
    ColumnTypeError
        If a column is not ragged, or has rows of more than one dimension.
    ArgumentError
        If `gamma` or `gae_lambda` is no number from 0 to 1.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> batch = SampleBatch(rewards=[[0.0, 1.0], [1.0]], values=[[0.5, 0.5], [0.25]], ragged=["rewards", "values"])
    >>> returns, advantages = gae_of_rows(batch["rewards"], batch["values"], gamma=0.5)
    >>> list(returns), list(advantages)
    ([array([0.5, 1. ]), array([1.])], [array([0. , 0.5]), array([0.75])])
    """
    from samplebatch import kernels

    _require_rows("rewards", rewards)
    _require_rows("values", values)
    check_alike(rewards, values, "values")
    reward, value = _floats(rewards), _floats(values)
    advantages, returns = memory.empty(reward.shape, _FLOAT64), memory.empty(reward.shape, _FLOAT64)
    offsets = np.ascontiguousarray(rewards.layout[0], np.intp)
    gamma, gae_lambda = fraction("gamma", gamma), fraction("gae_lambda", gae_lambda)
    kernels.gae_rows(reward, value, _last(rewards, last_values), offsets, gamma, gae_lambda, advantages, returns)
    return _like(rewards, returns), _like(rewards, advantages)


def vtrace_of_rows(
    rewards: Any,
    values: Any,
    log_ratios: Any,
    last_values: npt.ArrayLike | None = None,
    *,
    gamma: float = 1.0,
    vtrace_lambda: float = 1.0,
    rho_clip: float | None = 1.0,
    c_clip: float | None = 1.0,
    advantage_rho_clip: float | None = 1.0,
) -> tuple[Any, Any]:
    """Estimate V-trace targets and advantages of rows (Espeholt et al., IMPALA, arXiv:1802.01561, section 4).

    Row i is one trajectory: its last element is terminated, unless `last_values` estimates what follows.

    Parameters
    ----------
    rewards, values, last_values
        As `gae_of_rows` takes them.
    log_ratios
        Ragged column of rows of the same lengths: log-probability of each action or token under the target policy
        minus that under the behaviour policy.
    gamma, vtrace_lambda, rho_clip, c_clip, advantage_rho_clip
        As `vtrace` takes them.

    Returns
    -------
    tuple
        Targets and advantages: ragged columns of the rows' lengths, in the dtype that `gae_of_rows` has.

    Raises
    ------
    ColumnLengthError, ColumnTypeError
        As `gae_of_rows` does.
    ArgumentError
        As `vtrace` does.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> columns = {"rewards": [[0.0, 1.0], [1.0]], "values": [[0.5, 0.5], [0.25]], "ratios": [[0.0, 0.0], [1.0]]}
    >>> batch = SampleBatch(columns, ragged=list(columns))
    >>> targets, advantages = vtrace_of_rows(batch["rewards"], batch["values"], batch["ratios"], gamma=0.5)
    >>> list(targets), list(advantages)
    ([array([0.5, 1. ]), array([1.])], [array([0. , 0.5]), array([0.75])])
    """
    _require_rows("rewards", rewards)
    for name, rows in (("values", values), ("log_ratios", log_ratios)):
        _require_rows(name, rows)
        check_alike(rewards, rows, name)
    reward, value, last = _floats(rewards), _floats(values), _last(rewards, last_values)
    offsets = np.asarray(rewards.layout[0])
    has_steps = offsets[1:] > offsets[:-1]
    ended, following = np.zeros(len(reward), np.bool_), np.zeros(len(reward))
    following[:-1] = value[1:]
    ends = offsets[1:][has_steps] - 1
    ended[ends], following[ends] = True, last[has_steps]
    clips = rho_clip, c_clip, advantage_rho_clip
    targets, advantages = estimate_vtrace(
        reward, np.zeros_like(ended), ended, value, following, _floats(log_ratios), gamma, vtrace_lambda, *clips
    )
    return _like(rewards, targets), _like(rewards, advantages)


def discounted_returns_of_rows(rewards: Any, last_values: npt.ArrayLike | None = None, *, gamma: float = 1.0) -> Any:
    """Sum each element's reward and the discounted rewards that follow it in its row.

    Parameters
    ----------
    rewards, last_values, gamma
        As `gae_of_rows` takes them.

    Returns
    -------
    RaggedColumn or RaggedTorchColumn
        Rows of the same lengths, in the dtype that `gae_of_rows` has.

    Raises
    ------
    ColumnLengthError, ColumnTypeError, ArgumentError
        As `gae_of_rows` does.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> rewards = SampleBatch(rewards=[[1.0, 1.0, 1.0], [2.0]])["rewards"]
    >>> list(discounted_returns_of_rows(rewards, [8.0, 0.0], gamma=0.5))
    [array([2.75, 3.5 , 5.  ]), array([2.])]
    """
    _require_rows("rewards", rewards)
    gamma = fraction("gamma", gamma)
    offsets = rewards.layout[0]
    return _like(
        rewards, accumulate_floats(_floats(rewards), offsets, _last(rewards, last_values), gamma, backwards=True)
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
        raise ColumnLengthError(f"last_values must have {len(rows)} rows, one per row of rewards, got {last.shape}")
    return last


def _like(rows: RaggedRows, elements: npt.NDArray[np.float64]) -> Any:
    """Return elements in the rows of a column: in its dtype if that is one of floats, and on its device."""
    flat = rows.flat
    if isinstance(flat, np.ndarray):
        cast: Any = elements.astype(flat.dtype, copy=False) if flat.dtype.kind == "f" else elements
    else:
        import torch

        cast = torch.from_numpy(elements).to(flat.device)
        cast = cast.to(flat.dtype) if flat.is_floating_point() else cast
    return type(rows)(cast, *rows.layout)

"""GAE and n-step returns of trajectories, as hooks of `postprocess`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import fraction, whole
from samplebatch.batch.nested.functions import to_numpy, to_torch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ColumnLengthError, ColumnNotFoundError
from samplebatch.names import PolicyID
from samplebatch.returns.arrays import gae, nstep
from samplebatch.rollout.postprocessing import TrajectoryColumns

Values = str | Callable[[Any], Any]
"""Where estimates come from: a column, or a function of observations (n rows to n numbers), a torch module for one."""


class GAE(TrajectoryColumns):
    """Adds `advantages` and `value_targets`, by generalized advantage estimation; see `samplebatch.returns.gae`.

    What follows a terminated step is worth 0. What follows a truncated one, or the last one of a part of an episode, is
    worth what the estimate says of the observation that it led to.

    Parameters
    ----------
    values
        Estimates for the observations: a column, or a function of observations, which is called once for all of a
        policy's steps. Or one of these for each policy, by id; others are left as they are. Collectors that are given
        their policies by id refuse an id that none of them has.
    bootstrap
        Estimates for the observations that steps lead to, where no step follows: a function of observations, or a
        column with such an estimate in every row. By default the function that `values` is.
    gamma, lambda_
        The discount of a step, and the decay of the estimate on top of it.

    Examples
    --------
    >>> from samplebatch.rollout.postprocessing import postprocess
    >>> steps = SampleBatch(
    ...     eps_id=[7, 7, 8],
    ...     obs=[1.0, 2.0, 3.0],
    ...     new_obs=[2.0, 9.0, 4.0],
    ...     rewards=[1.0, 1.0, 1.0],
    ...     terminateds=[False, True, False],
    ...     truncateds=[False, False, True],
    ... )
    >>> found = postprocess(steps, [GAE(lambda obs: obs, gamma=0.5, lambda_=1.0)])
    >>> found["value_targets"].tolist(), found["advantages"].tolist()
    ([1.5, 1.0, 3.0], [0.5, -1.0, 0.0])
    """

    def __init__(
        self,
        values: Values | Mapping[PolicyID, Values] = names.VF_PREDS,
        *,
        bootstrap: Values | Mapping[PolicyID, Values] | None = None,
        gamma: float = 0.99,
        lambda_: float = 0.95,
    ) -> None:
        self._values = values
        self._bootstrap = bootstrap
        self._gamma = fraction("gamma", gamma)
        self._lambda = fraction("lambda_", lambda_)
        self.named_policies = [name for own in (values, bootstrap) if isinstance(own, Mapping) for name in own]

    def columns(self, policy_id: PolicyID, steps: SampleBatch, last: npt.NDArray[np.bool_]) -> Mapping[str, Any]:
        """Work the two columns out, in the dtype of the estimates.

        Raises
        ------
        ColumnNotFoundError
            If the estimates' column is not there, or there is nothing to estimate what follows the last steps by.
        ColumnLengthError
            If there are not as many estimates as steps.
        """
        source = _of_policy(self._values, policy_id)
        if source is None:
            return {}
        rewards = np.asarray(steps[names.REWARDS])
        terminated, truncated = np.asarray(steps[names.TERMINATEDS]), np.asarray(steps[names.TRUNCATEDS])
        estimates = _estimates(source, steps, names.OBS)
        values = _reshape(estimates, rewards.shape)
        following = np.zeros(rewards.shape)
        following[:-1] = values[1:]
        rows = np.flatnonzero((last | (truncated != 0)) & (terminated == 0))
        if len(rows):
            beyond = _of_policy(self._bootstrap, policy_id)
            if beyond is None and isinstance(source, str):
                raise ColumnNotFoundError(
                    f"what follows the last steps must be estimated, and column {source!r} says nothing of it; give "
                    "GAE a bootstrap, a function of observations or a column"
                )
            found = _estimates(source if beyond is None else beyond, steps.take(rows), names.NEXT_OBS)
            following[rows] = _reshape(found, following[rows].shape)
        targets, advantages = gae(
            rewards,
            terminated,
            (truncated != 0) | last,
            values=values,
            next_values=following,
            gamma=self._gamma,
            gae_lambda=self._lambda,
        )
        dtype = estimates.dtype if estimates.dtype.kind == "f" else np.dtype(np.float64)
        return {names.ADVANTAGES: advantages.astype(dtype), names.VALUE_TARGETS: targets.astype(dtype)}


class NStepReturns(TrajectoryColumns):
    """Adds `returns` and `discount`, and makes `new_obs` the next observation of the last of n steps.

    The target of a step is then `returns + discount * estimate(new_obs)`. Fewer steps count where the trajectory ends
    before; after a terminated one `discount` is 0. See `samplebatch.returns.nstep`.

    Parameters
    ----------
    n_step
        The most steps to sum.
    gamma
        The discount of a step.

    Raises
    ------
    ArgumentError
        If `n_step` is no whole number from 1 on, or `gamma` none from 0 to 1.

    Examples
    --------
    >>> from samplebatch.rollout.postprocessing import postprocess
    >>> steps = SampleBatch(
    ...     eps_id=[7, 7, 7],
    ...     new_obs=[1, 2, 3],
    ...     rewards=[1.0, 2.0, 3.0],
    ...     terminateds=[False, False, False],
    ...     truncateds=[False, False, False],
    ... )
    >>> found = postprocess(steps, [NStepReturns(2, gamma=0.5)])
    >>> found["returns"].tolist(), found["discount"].tolist(), found["new_obs"].tolist()
    ([2.0, 3.5, 3.0], [0.25, 0.25, 0.5], [2, 3, 3])
    """

    def __init__(self, n_step: int, *, gamma: float = 0.99) -> None:
        self._n_step = whole("n_step", n_step, 1)
        self._gamma = fraction("gamma", gamma)

    def columns(self, policy_id: PolicyID, steps: SampleBatch, last: npt.NDArray[np.bool_]) -> Mapping[str, Any]:
        """Work the columns out."""
        ended = (np.asarray(steps[names.TRUNCATEDS]) != 0) | last
        found = nstep(steps[names.REWARDS], steps[names.TERMINATEDS], ended, self._n_step, self._gamma)
        columns = {names.RETURNS: found.returns, names.DISCOUNT: found.discount}
        if names.NEXT_OBS in steps:
            columns[names.NEXT_OBS] = steps.select(names.NEXT_OBS).take(found.last)[names.NEXT_OBS]
        return columns


def _of_policy(source: Values | Mapping[PolicyID, Values] | None, policy_id: PolicyID) -> Values | None:
    return source.get(policy_id) if isinstance(source, Mapping) else source


def _reshape(estimates: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Give estimates the shape of their rewards, without the axis of length 1 that a network's output has."""
    if estimates.size != math.prod(shape):
        raise ColumnLengthError(f"estimates must be of shape {shape}, as rewards are, got {estimates.shape}")
    return estimates.reshape(shape)


def _estimates(source: Values, steps: SampleBatch, observations: str) -> npt.NDArray[Any]:
    """Read a column, or ask a function about observations."""
    if isinstance(source, str):
        return np.asarray(steps[source])
    given = getattr(steps.select(observations).as_batch(), observations)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(source, torch.nn.Module):
        return np.asarray(to_numpy(source(given)))
    with torch.no_grad():
        weight = next(source.parameters(), None)
        device, dtype = ("cpu", None) if weight is None else (weight.device, weight.dtype)
        return np.asarray(to_numpy(source(to_torch(given, dtype=dtype, device=device))))

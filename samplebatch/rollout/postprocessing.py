"""Hooks that collectors apply to each collected trajectory, such as advantage estimation."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from samplebatch import errors, names
from samplebatch.arguments import fraction, suggest_names, whole
from samplebatch.batch.concat import join
from samplebatch.batch.episodes import by_stream, run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.functions import to_numpy, to_torch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.names import PolicyID
from samplebatch.returns.arrays import gae, nstep


@dataclass(frozen=True)
class Trajectory:
    """Steps of one agent in one episode, as passed to hooks.

    A trajectory contains only the steps in one batch, so the episode may be incomplete.

    Attributes
    ----------
    agent
        Agent id if known, otherwise the `agent_index`.
    policy_id
        Policy that acted for the agent.
    eps_id
        Episode id.
    steps
        Steps of the trajectory in time order.
    """

    agent: Any
    policy_id: PolicyID
    eps_id: Any
    steps: SampleBatch

    @property
    def ended(self) -> bool:
        """Whether the last step is terminated or truncated; otherwise, the episode continues in another batch."""
        return bool(np.asarray(self.steps[names.DONES])[-1])


def in_order(steps: SampleBatch) -> tuple[SampleBatch, npt.NDArray[np.intp]]:
    """Sort a batch so that the steps of each trajectory are contiguous and in time order.

    A trajectory is identified by `eps_id` and, if the column exists, `agent_index`; trajectories are ordered by their
    first rows. Without `t`, the order of the steps in a trajectory is unchanged.

    Returns
    -------
    tuple
        The sorted batch, or `steps` itself if its rows were already in this order, and the index of the first row of
        each trajectory, shape (k,).

    Examples
    --------
    >>> steps = SampleBatch(eps_id=[7, 8, 7], t=[1, 0, 0], rewards=[1.0, 2.0, 3.0])
    >>> ordered, starts = in_order(steps)
    >>> ordered["rewards"].tolist(), starts
    ([3.0, 1.0, 2.0], array([0, 2]))
    """
    if not steps.count:
        return steps, np.empty(0, np.intp)
    if steps.zero_padded or steps.time_major:
        raise errors.SequenceError(
            "batches must be neither padded nor time-major to be split into trajectories, got "
            f"zero_padded={steps.zero_padded}, time_major={steps.time_major}"
        )
    if names.EPS_ID not in steps:
        hint = errors.near_names(names.EPS_ID, steps.column_names)
        raise errors.ColumnNotFoundError(f"column {names.EPS_ID!r} must exist to separate trajectories; {hint}")
    keys = [np.asarray(steps[name]) for name in (names.EPS_ID, names.AGENT_INDEX) if name in steps]
    starts = run_starts(*keys)
    t = np.asarray(steps[names.T]) if names.T in steps else None
    is_contiguous = len({*zip(*(key[starts].tolist() for key in keys), strict=True)}) == len(starts)
    if is_contiguous and (t is None or _rises(t, starts)):
        return steps, starts
    order = by_stream(*keys, t=t)
    starts = run_starts(*(key[order] for key in keys))
    # In order of each trajectory's first row, regardless of its time.
    first = np.minimum.reduceat(order, starts)
    lengths = np.diff(np.append(starts, len(order)))
    row_order = np.argsort(np.repeat(first, lengths), kind="stable")
    return steps.take(order[row_order]), np.append(0, lengths[np.argsort(first)].cumsum())[:-1]


def cut(
    policy_id: PolicyID, steps: SampleBatch, starts: npt.NDArray[np.intp], agents: Mapping[tuple[int, int], Any]
) -> list[Trajectory]:
    """Split a batch into views of its trajectories; `agents` maps pairs of `env_id` and `agent_index` to agent ids."""
    eps_id = np.asarray(steps[names.EPS_ID])
    env_id, index = (
        np.asarray(steps[name]) if name in steps else np.zeros(steps.count, int)
        for name in (names.ENV_ID, names.AGENT_INDEX)
    )
    trajectories = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), steps.count], strict=True):
        agent = int(index[start])
        agent = agents.get((int(env_id[start]), agent), agent)
        trajectories.append(
            Trajectory(agent, policy_id, eps_id[start : start + 1].tolist()[0], steps.slice(start, stop))
        )
    return trajectories


def _rises(t: npt.NDArray[Any], starts: npt.NDArray[np.intp]) -> bool:
    rising = np.append(True, t[1:] > t[:-1])
    rising[starts] = True
    return bool(rising.all())


Hook = Callable[[Trajectory, Mapping[Any, Trajectory]], SampleBatch | None]
"""Function of a trajectory and a mapping by agent of the episode's other trajectories, unchanged by this hook.

It returns the new steps of the trajectory, of any number, or None for `trajectory.steps`, to which it may have added
columns.
"""


class TrajectoryColumns(ABC):
    """Base class of hooks that compute columns for all trajectories of a policy, or for one trajectory, per call.

    Attributes
    ----------
    named_policies
        Policy ids that the hook requires; empty by default. Collectors reject ids without a policy, unless one policy
        acts for all agents.
    """

    named_policies: Collection[PolicyID] = ()

    @abstractmethod
    def columns(self, policy_id: PolicyID, steps: SampleBatch, last: npt.NDArray[np.bool_]) -> Mapping[str, Any]:
        """Compute new columns or replacements for existing columns.

        Parameters
        ----------
        policy_id
            Policy that acted in the steps.
        steps
            Steps of all trajectories; the steps of each trajectory are contiguous and in time order.
        last
            Whether each step is the last step of its trajectory in the batch, shape (n,). If a last step is neither
            terminated nor truncated, the episode continues in another batch.
        """

    def __call__(self, trajectory: Trajectory, others: Mapping[Any, Trajectory]) -> SampleBatch:
        """Add the computed columns to one trajectory."""
        steps = trajectory.steps
        last = np.arange(steps.count) == steps.count - 1
        return _replace_columns(steps, self.columns(trajectory.policy_id, steps, last))


@overload
def postprocess(
    batch: SampleBatch, hooks: Sequence[Hook], *, agents: Mapping[tuple[int, int], Any] | None = None
) -> SampleBatch: ...
@overload
def postprocess(
    batch: MultiAgentBatch, hooks: Sequence[Hook], *, agents: Mapping[tuple[int, int], Any] | None = None
) -> MultiAgentBatch: ...
def postprocess(
    batch: SampleBatch | MultiAgentBatch,
    hooks: Sequence[Hook],
    *,
    agents: Mapping[tuple[int, int], Any] | None = None,
) -> SampleBatch | MultiAgentBatch:
    """Apply hooks in order to every trajectory in a batch.

    Parameters
    ----------
    batch
        A batch with `eps_id`, and `agent_index` if there are several agents. The batch is not modified; the result
        shares unchanged columns with the batch.
    hooks
        Hooks in order of application.
    agents
        Mapping from pairs of `env_id` and `agent_index` to the agent ids that hooks receive; if None, hooks receive the
        `agent_index`.

    Returns
    -------
    SampleBatch or MultiAgentBatch
        A batch of the same class and with the same number of environment steps as `batch`. The steps of each trajectory
        are contiguous and in time order.

    Raises
    ------
    ColumnNotFoundError
        If `eps_id` or a column that a hook requires is missing.
    ColumnTypeError
        If a hook returns a value other than a batch or None.
    ColumnMismatchError
        If a hook returns different columns for trajectories of the same policy.
    SequenceError
        If the batch is padded or time-major.
    ArgumentError
        If `hooks` is not a sequence of functions.
    PolicyNotFoundError
        If a hook requires a policy other than `default_policy` and `batch` is a `SampleBatch`.

    Examples
    --------
    >>> def best(trajectory, others):
    ...     mine = trajectory.steps["rewards"].sum()
    ...     best = all(mine >= other.steps["rewards"].sum() for other in others.values())
    ...     trajectory.steps["best"] = [best] * len(trajectory.steps)
    >>> steps = SampleBatch(eps_id=[7, 7, 7], agent_index=[0, 0, 1], rewards=[1.0, 2.0, 4.0])
    >>> postprocess(steps, [best])["best"].tolist()
    [False, False, True]
    """
    hooks = check_hooks(hooks, (names.DEFAULT_POLICY_ID,) if isinstance(batch, SampleBatch) else None)
    policies = {
        policy_id: in_order(steps.copy(shallow=True))
        for policy_id, steps in batch.as_multi_agent().policy_batches.items()
    }
    for hook in hooks:
        if isinstance(hook, TrajectoryColumns):
            for policy_id, (steps, starts) in policies.items():
                if steps.count:
                    last = np.zeros(steps.count, np.bool_)
                    last[starts - 1] = True
                    policies[policy_id] = _replace_columns(steps, hook.columns(policy_id, steps, last)), starts
        else:
            policies = _call(hook, policies, agents or {})
    done = {policy_id: steps for policy_id, (steps, _) in policies.items()}
    return done[names.DEFAULT_POLICY_ID] if isinstance(batch, SampleBatch) else MultiAgentBatch(done, batch.count)


def check_hooks(
    hooks: Sequence[Hook], policies: Collection[PolicyID] | None = None, *, buffer: Any = None
) -> tuple[Hook, ...]:
    """Validate the hooks of a collector and return them as a tuple.

    >>> check_hooks({})
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: hooks must be a sequence of hooks, such as [hook], got
        a dict
    """
    if not isinstance(hooks, Sequence):
        raise errors.ArgumentError(f"hooks must be a sequence of hooks, such as [hook], got a {type(hooks).__name__}")
    for hook in hooks:
        if not callable(hook):
            raise errors.ArgumentError(f"hooks must be functions of a trajectory, got a {type(hook).__name__}")
        for policy_id in hook.named_policies if isinstance(hook, TrajectoryColumns) else ():
            if policies is not None and policy_id not in policies:
                raise errors.PolicyNotFoundError(
                    f"{type(hook).__name__} must name policies, got {policy_id!r}; "
                    f"{errors.near_names(policy_id, policies)}"
                )
    if hooks and buffer is not None:
        raise errors.ArgumentError(
            f"hooks must be empty with a buffer, because they apply to batches, got {len(hooks)}; compute columns of "
            "samples"
        )
    return tuple(hooks)


Policies = dict[str, tuple[SampleBatch, npt.NDArray[np.intp]]]


def _call(hook: Hook, policies: Policies, agents: Mapping[tuple[int, int], Any]) -> Policies:
    trajectories = {
        policy_id: cut(policy_id, steps, starts, agents)
        for policy_id, (steps, starts) in policies.items()
        if len(starts)
    }
    episodes: dict[Any, list[Trajectory]] = {}
    for of_policy in trajectories.values():
        for trajectory in of_policy:
            episodes.setdefault(trajectory.eps_id, []).append(trajectory)
    done = dict(policies)
    for policy_id, of_policy in trajectories.items():
        results = []
        for trajectory in of_policy:
            others = {other.agent: other for other in episodes[trajectory.eps_id] if other is not trajectory}
            steps = trajectory.steps.copy(shallow=True)
            result = hook(Trajectory(trajectory.agent, policy_id, trajectory.eps_id, steps), others)
            if not isinstance(result, (SampleBatch, type(None))):
                raise errors.ColumnTypeError(
                    f"a hook must return a SampleBatch or None for a trajectory, got a {type(result).__name__}"
                )
            results.append(steps if result is None else result)
        lengths = [result.count for result in results if result.count]
        done[policy_id] = join(results), np.cumsum([0, *lengths])[:-1]
    return done


def _replace_columns(steps: SampleBatch, columns: Mapping[str, Any]) -> SampleBatch:
    changed = steps.copy(shallow=True)
    for name, values in columns.items():
        changed[name] = values
    return changed


Values = str | Callable[[Any], Any]
"""Source of value estimates: a column, or a function of observations (n rows to n numbers) such as a module."""


class GAE(TrajectoryColumns):
    """Hook for generalized advantage estimation: adds `advantages` and `value_targets`; see `samplebatch.returns.gae`.

    The bootstrap value after a terminated step is 0. After a truncated step, or at the end of an unfinished trajectory,
    the bootstrap value is the estimate for the step's next observation.

    Parameters
    ----------
    values
        Value estimates for observations: a column, or a function of observations, which is called once for all steps of
        a policy. Alternatively, a mapping from policy ids to columns or functions; batches of other policies are
        unchanged. Collectors reject ids without a policy, unless one policy acts for all agents.
    bootstrap
        Value estimates for the next observation of truncated steps and of the last steps of trajectories: a function of
        observations, or a column. The default is `values` if `values` is a function.
    gamma, lambda_
        Discount factor and decay of the advantage estimate, both per step.

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
    >>> result = postprocess(steps, [GAE(lambda obs: obs, gamma=0.5, lambda_=1.0)])
    >>> result["value_targets"].tolist(), result["advantages"].tolist()
    ([1.5, 1.0, 3.0], [0.5, -1.0, 0.0])
    """

    @suggest_names(lam="lambda_", gae_lambda="lambda_", discount="gamma", critic="values")
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
        self.named_policies = [
            name for by_policy in (values, bootstrap) if isinstance(by_policy, Mapping) for name in by_policy
        ]

    def columns(self, policy_id: PolicyID, steps: SampleBatch, last: npt.NDArray[np.bool_]) -> Mapping[str, Any]:
        """Compute advantages and value targets, which have the dtype of the value estimates.

        Raises
        ------
        ColumnNotFoundError
            If the column of estimates is missing, or if `values` is a column, `bootstrap` is None, and bootstrap values
            are required.
        ColumnLengthError
            If the number of estimates differs from the number of steps.
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
                raise errors.ColumnNotFoundError(
                    f"bootstrap values must be estimated for the last steps, got only column {source!r}; give GAE a "
                    "bootstrap, a function of observations or a column"
                )
            next_values = _estimates(source if beyond is None else beyond, steps.take(rows), names.NEXT_OBS)
            following[rows] = _reshape(next_values, following[rows].shape)
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
    """Hook for n-step returns: adds `returns` and `discount`, and sets `new_obs` to the observation after n steps.

    The target of a step is `returns + discount * estimate(new_obs)`. At the end of a trajectory, fewer than n steps are
    summed. If the last summed step is terminated, `discount` is 0. See `samplebatch.returns.nstep`.

    Parameters
    ----------
    n_step
        Maximum number of steps to sum.
    gamma
        Discount factor per step.

    Raises
    ------
    ArgumentError
        If `n_step` is not a positive integer, or `gamma` is not in [0, 1].

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
    >>> result = postprocess(steps, [NStepReturns(2, gamma=0.5)])
    >>> result["returns"].tolist(), result["discount"].tolist(), result["new_obs"].tolist()
    ([2.0, 3.5, 3.0], [0.25, 0.25, 0.5], [2, 3, 3])
    """

    def __init__(self, n_step: int, *, gamma: float = 0.99) -> None:
        self._n_step = whole("n_step", n_step, 1)
        self._gamma = fraction("gamma", gamma)

    def columns(self, policy_id: PolicyID, steps: SampleBatch, last: npt.NDArray[np.bool_]) -> Mapping[str, Any]:
        """Compute returns, discounts and next observations."""
        ended = (np.asarray(steps[names.TRUNCATEDS]) != 0) | last
        targets = nstep(steps[names.REWARDS], steps[names.TERMINATEDS], ended, self._n_step, self._gamma)
        columns = {names.RETURNS: targets.returns, names.DISCOUNT: targets.discount}
        if names.NEXT_OBS in steps:
            columns[names.NEXT_OBS] = steps.select(names.NEXT_OBS).take(targets.last)[names.NEXT_OBS]
        return columns


def _of_policy(source: Values | Mapping[PolicyID, Values] | None, policy_id: PolicyID) -> Values | None:
    return source.get(policy_id) if isinstance(source, Mapping) else source


def _reshape(estimates: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Reshape estimates to the shape of rewards; network outputs may have an extra axis of length 1."""
    if estimates.size != math.prod(shape):
        raise errors.ColumnLengthError(f"estimates must have the shape of the rewards, {shape}, got {estimates.shape}")
    return estimates.reshape(shape)


def _estimates(source: Values, steps: SampleBatch, observations: str) -> npt.NDArray[Any]:
    if isinstance(source, str):
        if source not in steps:
            raise errors.ColumnNotFoundError(
                "estimates of values must be passed to GAE as a column, a function of observations or a module: "
                f"{errors.no_such_column(source, steps.keys())}"
            )
        return np.asarray(steps[source])
    rows = getattr(steps.select(observations).as_batch(), observations)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(source, torch.nn.Module):
        return np.asarray(to_numpy(source(rows)))
    with torch.no_grad():
        weight = next(source.parameters(), None)
        device, dtype = ("cpu", None) if weight is None else (weight.device, weight.dtype)
        return np.asarray(to_numpy(source(to_torch(rows, dtype=dtype, device=device))))

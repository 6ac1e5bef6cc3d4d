"""Postprocessing: hooks applied to each trajectory once it is collected, before it goes into train batches.

A hook is called on every trajectory, with those of the other agents of the same episode beside it. Ready ones, which
work on all trajectories of a policy at once, are `GAE` and `NStepReturns`.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import fraction, suggest_names, whole
from samplebatch.batch.concat import join
from samplebatch.batch.episodes import by_stream, run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.functions import to_numpy, to_torch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import (
    ArgumentError,
    ColumnLengthError,
    ColumnNotFoundError,
    ColumnTypeError,
    PolicyNotFoundError,
    SequenceError,
    near_names,
    no_such_column,
)
from samplebatch.names import PolicyID
from samplebatch.returns.arrays import gae, nstep


@dataclass(frozen=True)
class Trajectory:
    """The steps of one agent in one episode that a batch has, all or a part; hooks are called on it.

    Attributes
    ----------
    agent
        The agent's id where it is known, else its `agent_index`.
    policy_id
        The policy that acted for it.
    eps_id
        The episode.
    steps
        Its steps, in order.
    """

    agent: Any
    policy_id: PolicyID
    eps_id: Any
    steps: SampleBatch

    @property
    def ended(self) -> bool:
        """Whether the last step terminates or truncates the agent; if not, its episode goes on in another batch."""
        return bool(np.asarray(self.steps[names.DONES])[-1])


def in_order(steps: SampleBatch) -> tuple[SampleBatch, npt.NDArray[np.intp]]:
    """Bring the steps of each trajectory together, in order of time.

    Trajectories are told apart by `eps_id` and, where there is one, `agent_index`; they keep the order in which they
    begin. Where there is no `t`, their steps keep theirs.

    Returns
    -------
    tuple
        The batch, which is the given one where its rows lie so already; and the row where each trajectory begins,
        shape (k,).

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
        raise SequenceError("trajectories are cut out of batches that are neither padded nor time-major")
    if names.EPS_ID not in steps:
        raise ColumnNotFoundError(f"column {names.EPS_ID!r} must be there to tell trajectories apart")
    keys = [np.asarray(steps[name]) for name in (names.EPS_ID, names.AGENT_INDEX) if name in steps]
    starts = run_starts(*keys)
    t = np.asarray(steps[names.T]) if names.T in steps else None
    whole = len({*zip(*(key[starts].tolist() for key in keys), strict=True)}) == len(starts)
    if whole and (t is None or _rises(t, starts)):
        return steps, starts
    order = by_stream(*keys, t=t)
    starts = run_starts(*(key[order] for key in keys))
    # By the first row of each, wherever in time that is.
    first = np.minimum.reduceat(order, starts)
    lengths = np.diff(np.append(starts, len(order)))
    place = np.argsort(np.repeat(first, lengths), kind="stable")
    return steps.take(order[place]), np.append(0, lengths[np.argsort(first)].cumsum())[:-1]


def cut(
    policy_id: PolicyID, steps: SampleBatch, starts: npt.NDArray[np.intp], agents: Mapping[tuple[int, int], Any]
) -> list[Trajectory]:
    """View the trajectories of a batch in their order; `agents` has their ids by `env_id` and `agent_index`."""
    eps_id = np.asarray(steps[names.EPS_ID])
    env_id, index = (
        np.asarray(steps[name]) if name in steps else np.zeros(steps.count, int)
        for name in (names.ENV_ID, names.AGENT_INDEX)
    )
    found = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), steps.count], strict=True):
        agent = int(index[start])
        agent = agents.get((int(env_id[start]), agent), agent)
        found.append(Trajectory(agent, policy_id, eps_id[start : start + 1].tolist()[0], steps.slice(start, stop)))
    return found


def _rises(t: npt.NDArray[Any], starts: npt.NDArray[np.intp]) -> bool:
    rising = np.append(True, t[1:] > t[:-1])
    rising[starts] = True
    return bool(rising.all())


Hook = Callable[[Trajectory, Mapping[Any, Trajectory]], SampleBatch | None]
"""Called on a trajectory and, by agent, on the other agents' in the same episode, as they were before this hook.

Returns the trajectory's steps as they shall be, of any number; None for `trajectory.steps`, to which it may have added
columns.
"""


class TrajectoryColumns(ABC):
    """Works out columns for all trajectories of a policy at once; it can also be called on one, as any hook.

    Attributes
    ----------
    named_policies
        Policies that must be there, as it names them: collectors that know theirs refuse others. By default none.
    """

    named_policies: Collection[PolicyID] = ()

    @abstractmethod
    def columns(self, policy_id: PolicyID, steps: SampleBatch, last: npt.NDArray[np.bool_]) -> Mapping[str, Any]:
        """Work out columns, new ones or others in the place of those that are there.

        Parameters
        ----------
        policy_id
            The policy that acted.
        steps
            The steps of each trajectory together, in order of time.
        last
            Marks the last step that the batch has of each trajectory, shape (n,). Where that is neither terminated nor
            truncated, the episode goes on in another batch.
        """

    def __call__(self, trajectory: Trajectory, others: Mapping[Any, Trajectory]) -> SampleBatch:
        """Add the columns to the steps of one trajectory."""
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
    """Apply hooks to every trajectory in a batch, one hook after the other.

    Parameters
    ----------
    batch
        A batch with `eps_id`, and `agent_index` where there are several agents. It stays as it is; columns that no hook
        changes are shared.
    hooks
        The hooks, in the order in which they are applied.
    agents
        The ids of agents, by `env_id` and `agent_index`, where they shall stand for the indices.

    Returns
    -------
    SampleBatch or MultiAgentBatch
        A batch of the same type, and of as many environment steps. The steps of each trajectory are together, in order.

    Raises
    ------
    ColumnNotFoundError
        If there is no `eps_id`, or a hook needs a column that is not there.
    ColumnTypeError
        If a hook returns anything but a batch or None.
    ColumnMismatchError
        If a hook returns other columns for some trajectories of a policy than for others.
    SequenceError
        If the batch is padded or time-major.
    ArgumentError
        If the hooks are no sequence of hooks.
    PolicyNotFoundError
        If a hook names a policy other than `default_policy`, which is that of every `SampleBatch`, and gets one.

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
    """Return the hooks of a collector as a tuple.

    Examples
    --------
    >>> check_hooks({})
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: hooks must be a sequence of hooks, such as [hook], got a dict
    """
    if not isinstance(hooks, Sequence):
        raise ArgumentError(f"hooks must be a sequence of hooks, such as [hook], got a {type(hooks).__name__}")
    for hook in hooks:
        if not callable(hook):
            raise ArgumentError(f"hooks must be functions of a trajectory, got a {type(hook).__name__}")
        for policy_id in hook.named_policies if isinstance(hook, TrajectoryColumns) else ():
            if policies is not None and policy_id not in policies:
                raise PolicyNotFoundError(
                    f"{type(hook).__name__} must name policies, got {policy_id!r}; {near_names(policy_id, policies)}"
                )
    if hooks and buffer is not None:
        raise ArgumentError("hooks must be for batches, and with a buffer there are none; work out columns of samples")
    return tuple(hooks)


Policies = dict[str, tuple[SampleBatch, npt.NDArray[np.intp]]]


def _call(hook: Hook, policies: Policies, agents: Mapping[tuple[int, int], Any]) -> Policies:
    trajectories = {
        policy_id: cut(policy_id, steps, starts, agents)
        for policy_id, (steps, starts) in policies.items()
        if len(starts)
    }
    episodes: dict[Any, list[Trajectory]] = {}
    for own in trajectories.values():
        for trajectory in own:
            episodes.setdefault(trajectory.eps_id, []).append(trajectory)
    done = dict(policies)
    for policy_id, own in trajectories.items():
        results = []
        for trajectory in own:
            others = {other.agent: other for other in episodes[trajectory.eps_id] if other is not trajectory}
            steps = trajectory.steps.copy(shallow=True)
            result = hook(Trajectory(trajectory.agent, policy_id, trajectory.eps_id, steps), others)
            if not isinstance(result, (SampleBatch, type(None))):
                raise ColumnTypeError(
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
    if isinstance(source, str):
        if source not in steps:
            raise ColumnNotFoundError(
                "estimates of values must be given to GAE as a column, a function of observations or a module: "
                f"{no_such_column(source, steps.keys())}"
            )
        return np.asarray(steps[source])
    given = getattr(steps.select(observations).as_batch(), observations)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(source, torch.nn.Module):
        return np.asarray(to_numpy(source(given)))
    with torch.no_grad():
        weight = next(source.parameters(), None)
        device, dtype = ("cpu", None) if weight is None else (weight.device, weight.dtype)
        return np.asarray(to_numpy(source(to_torch(given, dtype=dtype, device=device))))

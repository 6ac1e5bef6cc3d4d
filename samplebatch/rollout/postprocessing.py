"""Postprocessing: hooks applied to each trajectory once it is collected, before it goes into train batches.

A hook is called on every trajectory, with those of the other agents of the same episode beside it. Ready ones, which
work on all trajectories of a policy at once, are `GAE` and `NStepReturns`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.concat import join
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ArgumentError, ColumnTypeError, PolicyNotFoundError, near_names
from samplebatch.names import PolicyID
from samplebatch.rollout.trajectories import Trajectory, cut, in_order

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

    Parameters
    ----------
    hooks
        The hooks of a collector or of workers.
    policies
        The ids of all policies that there are; None where these are not known.
    buffer
        Where steps go in place of a batch; None if there are batches.

    Raises
    ------
    ArgumentError
        If they are no sequence of hooks, such as a single one; or there are some, and a buffer.
    PolicyNotFoundError
        If one of them names a policy that is not there.

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
    """Call a hook on every trajectory."""
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

"""Tasks: the work of one rollout worker, fragment by fragment, in any process."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.agents import action_space_of, observation_space_of, policy_by_kind
from samplebatch.env.as_environments import as_environments, make_all
from samplebatch.env.base import Environments
from samplebatch.env.environment_list import EnvironmentList
from samplebatch.env.registry import environment_kind, make_environment
from samplebatch.errors import EnvironmentSpecError, PolicySpecError
from samplebatch.policy.source import load_weights, make_policy
from samplebatch.rollout.collector import Collector
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from samplebatch.rollout.postprocessing import postprocess
from samplebatch.transport.subscription import Subscription
from samplebatch.workers.spec import WorkerSpec

Count = Callable[[int], None]
"""Called with the number of environment steps that were just made."""

Fragment = SampleBatch | MultiAgentBatch


class Task(ABC):
    """The work of one worker.

    Parameters
    ----------
    spec
        What is to be done.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._policy: Any = None
        self._version = 0

    def refresh(self, subscription: Subscription) -> None:
        """Give the policy the newest weights, unless it has them.

        Raises
        ------
        PolicySpecError
            If it takes none.
        """
        if subscription.version > self._version:
            newest = subscription.latest()
            load_weights(self._policy, newest.value)
            self._version = newest.version

    @abstractmethod
    def next(self) -> Fragment | None:
        """Collect the next fragment; None if all is done."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""


class SingleAgentTask(Task):
    """The work of a worker that steps Gymnasium's environments."""

    def __init__(self, spec: WorkerSpec, count_steps: Count, first: Any) -> None:
        super().__init__(spec)
        self._environments = environments = _as_environments(spec, first)
        count = environments.num_envs
        self._first_env_id = spec.index * count
        given = spec.policy()
        if isinstance(given, Mapping):
            given = _only_policy(given)
        self._policy = make_policy(given, environments.observation_space, environments.action_space)
        self._collector = Collector(
            self._policy,
            environments,
            seed=spec.seed,
            exploration_noise=spec.exploration_noise,
            map_action=spec.map_action,
            first_unroll_id=spec.first_unroll_id,
            first_env_id=self._first_env_id,
        )
        self._collector.count_steps = count_steps
        self._left = spec.n_step
        self._episodes_left = None if spec.n_episode is None else _even(spec.n_episode, count)

    def next(self) -> Fragment | None:
        """Collect the next fragment; see `Task.next`."""
        count, left = self._environments.num_envs, self._left
        if left == 0 or (self._episodes_left is not None and not self._episodes_left.any()):
            return None
        length = max(1, self._spec.fragment_length // count)
        if left is not None:
            length = min(length, -(-left // count))
        batch = self._collector.collect(n_step=count * length).batch or SampleBatch()
        batch[names.WEIGHTS_VERSION] = np.full(len(batch), self._version)
        batch = self._cut(batch)
        return postprocess(batch, self._spec.hooks) if self._spec.hooks else batch

    def _cut(self, batch: SampleBatch) -> SampleBatch:
        """Leave out steps beyond those wanted."""
        if self._left is not None:
            beyond = len(batch) - self._left
            self._left = max(0, -beyond)
            if beyond > 0:
                # All but the first environments made one step too many.
                ends = np.append(run_starts(np.asarray(batch[names.ENV_ID]))[1:], len(batch)) - 1
                return batch.take(np.delete(np.arange(len(batch)), ends[-beyond:]))
        if self._episodes_left is None:
            return batch
        env = np.asarray(batch[names.ENV_ID]) - self._first_env_id
        done = np.asarray(batch[names.TERMINATEDS]) | np.asarray(batch[names.TRUNCATEDS])
        ended = done.cumsum() - done
        starts = run_starts(env)
        ended -= np.repeat(ended[starts], np.diff(np.append(starts, len(env))))
        wanted = ended < self._episodes_left[env]
        made = np.bincount(env[done], minlength=len(self._episodes_left))
        self._episodes_left = np.maximum(self._episodes_left - made, 0)
        return batch if wanted.all() else batch.take(np.flatnonzero(wanted))

    def close(self) -> None:
        """Close the environments."""
        self._collector.close()


class MultiAgentTask(Task):
    """The work of a worker that steps environments of several agents."""

    def __init__(self, spec: WorkerSpec, count_steps: Count, first: Any) -> None:
        super().__init__(spec)
        environments = [first, *(make_environment(spec.env) for _ in range(spec.num_envs - 1))]
        mapping = policy_by_kind(first) if spec.policy_mapping is None else spec.policy_mapping
        given = spec.policy()
        if isinstance(given, Mapping):
            self._policy = {policy: make_policy(one, *_spaces(first, mapping, policy)) for policy, one in given.items()}
        else:
            self._policy = make_policy(given, *_spaces(first, mapping, None))
        self._collector = MultiAgentCollector(
            environments,
            policy=self._policy,
            policy_mapping=mapping,
            seed=spec.seed,
            first_unroll_id=spec.first_unroll_id,
            first_env_id=spec.index * spec.num_envs,
        )
        self._collector.count_steps = count_steps
        self._steps_left, self._episodes_left = spec.n_step, spec.n_episode

    def next(self) -> Fragment | None:
        """Collect the next fragment; see `Task.next`."""
        if self._steps_left == 0 or self._episodes_left == 0:
            return None
        if self._episodes_left is not None:
            episodes = min(self._episodes_left, self._spec.num_envs)
            batch = self._collector.collect(n_episode=episodes).batch or MultiAgentBatch({}, 0)
            self._episodes_left -= episodes
        else:
            length = self._spec.fragment_length
            n_step = length if self._steps_left is None else min(length, self._steps_left)
            batch = self._collector.collect(n_step=n_step).batch or MultiAgentBatch({}, 0)
            if self._steps_left is not None:
                self._steps_left -= batch.count
        for steps in batch.policy_batches.values():
            steps[names.WEIGHTS_VERSION] = np.full(steps.count, self._version)
        return self._collector.postprocess(batch, self._spec.hooks) if self._spec.hooks else batch

    def close(self) -> None:
        """Close the environments."""
        self._collector.close()


def make_task(spec: WorkerSpec, count_steps: Count) -> Task:
    """Make the task that a spec asks for, with its environments.

    Parameters
    ----------
    spec
        What is to be done.
    count_steps
        Called with the number of environment steps that were just made.

    Raises
    ------
    EnvironmentSpecError
        If the environment cannot be made, or several vector environments are asked for.
    PolicySpecError
        If the policy cannot be made.
    """
    first = make_environment(spec.env)
    try:
        kind = environment_kind(first)
        return (SingleAgentTask if kind in ("gymnasium", "vector") else MultiAgentTask)(spec, count_steps, first)
    except BaseException:
        with contextlib.suppress(Exception):
            first.close()
        raise


def _as_environments(spec: WorkerSpec, first: Any) -> Environments:
    """Put a worker's environments behind one interface."""
    is_vector = environment_kind(first) == "vector"
    if is_vector and spec.num_envs > 1:
        raise EnvironmentSpecError(
            f"envs_per_worker must be 1 where the environment is a vector environment, got {spec.num_envs}"
        )
    if is_vector:
        return as_environments(first)
    return EnvironmentList([first, *make_all([spec.env] * (spec.num_envs - 1))])


def _only_policy(policies: Mapping[str, Any]) -> Any:
    if list(policies) != [names.DEFAULT_POLICY_ID]:
        raise PolicySpecError(
            f"an environment of one agent must have one policy, or {{{names.DEFAULT_POLICY_ID!r}: policy}}, got "
            f"{', '.join(map(repr, policies)) or 'none'}"
        )
    return policies[names.DEFAULT_POLICY_ID]


def _spaces(environment: Any, mapping: Any, policy_id: str | None) -> tuple[Any, Any]:
    """Find the spaces of a policy's first agent, or of the first of all; (None, None) where they are not known."""
    for agent in getattr(environment, "possible_agents", ()):
        own = mapping.get(agent) if isinstance(mapping, Mapping) else mapping(agent)
        if policy_id in (None, own):
            return observation_space_of(environment, agent), action_space_of(environment, agent)
    return None, None


def _even(total: int, count: int) -> npt.NDArray[np.int64]:
    """Share a number out evenly, the first get one more."""
    return total // count + (np.arange(count) < total % count)

"""Tasks: the work of one rollout worker, fragment by fragment, in whatever process it is done."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.agents import policy_by_kind
from samplebatch.env.base import Environments
from samplebatch.env.gymnasium import as_environments
from samplebatch.env.registry import Environment, environment_kind, make_environment
from samplebatch.errors import EnvironmentSpecError, PolicySpecError, require
from samplebatch.policy.deciding import seed_number
from samplebatch.policy.random_by_environment import RandomByEnvironment
from samplebatch.policy.source import load_weights, made_policy
from samplebatch.rollout.postprocessing import postprocess
from samplebatch.transport.reservation import Reservation
from samplebatch.transport.subscription import Subscription
from samplebatch.workers.slot_multi_agent import Reserve, SlotMultiAgentCollector
from samplebatch.workers.slot_steps import SlotCollector
from samplebatch.workers.spec import Plan, seeds_at

_POLICY, _RANDOM, _ENVIRONMENT = range(3)
"""Places of seeds, as in `MultiAgentCollector`."""


Made = Callable[[int], None]
"""Called with the number of steps that were just made."""


class Fragment(NamedTuple):
    """Steps that are to be sent, and the slot that columns of them lie in."""

    batch: SampleBatch | MultiAgentBatch
    slot: Reservation | None


class Task(ABC):
    """The work of one worker.

    Parameters
    ----------
    plan
        What is to be done.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
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
    def next(self, reserve: Reserve | None) -> Fragment | None:
        """Make the next fragment; None if all is done.

        Parameters
        ----------
        reserve
            Takes a slot for it; None if there are no slots.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""


class SingleAgentTask(Task):
    """The work of a worker that steps Gymnasium's environments."""

    def __init__(self, plan: Plan, made: Made, first: Any) -> None:
        super().__init__(plan)
        self._environments = environments = _vector(plan, first, made)
        count = environments.num_envs
        self._env_ids = plan.index * count + np.arange(count)
        numbers = self._env_ids.tolist()
        given = plan.policy()
        if isinstance(given, Mapping):
            given = _only_policy(given)
        self._policy = policy = made_policy(given, environments.observation_space, environments.action_space)
        space = environments.action_space if isinstance(policy, str) else policy
        if isinstance(policy, (str, require("gymnasium", "envs").Space)):
            policy = RandomByEnvironment(space, [seeds_at(plan.seed, _RANDOM, env_id) for env_id in numbers])
        self._collector = SlotCollector(
            policy,
            environments,
            env_seeds=[seed_number(seeds_at(plan.seed, _ENVIRONMENT, env_id)) for env_id in numbers],
            seed=seeds_at(plan.seed, _POLICY, plan.index),
            first_unroll_id=plan.first_unroll_id,
            first_env_id=numbers[0],
        )
        self._unroll_id = plan.first_unroll_id
        self._left = plan.env_steps
        self._episodes_left = None if plan.episodes is None else _even(plan.episodes, count)
        self._columns: tuple[str, ...] = ()

    def next(self, reserve: Reserve | None) -> Fragment | None:
        """Make the next fragment; see `Task.next`."""
        count, left = self._environments.num_envs, self._left
        if left == 0 or (self._episodes_left is not None and not self._episodes_left.any()):
            return None
        length = max(1, self._plan.fragment_length // count)
        if left is not None:
            length = min(length, -(-left // count))
        slot = None
        if self._columns and reserve is not None and (left is None or left >= count * length):
            slot = self._opened(reserve(count * length), length)
        stats = self._collector.collect(n_step=count * length)
        written = self._collector.steps.written
        if written is not None and slot is not None:
            slot[names.ENV_ID][:] = self._env_ids[0] + written.env_id
            slot[names.EPS_ID][:] = written.eps_id
            slot[names.T][:] = written.t
            slot[names.AGENT_INDEX][:] = 0
            slot[names.UNROLL_ID][:] = self._unroll_id
            slot[names.WEIGHTS_VERSION][:] = self._version
            batch = SampleBatch({name: written.infos if name == names.INFOS else slot[name] for name in self._columns})
        else:
            if slot is not None:
                slot.cancel()
            slot, batch = None, stats.batch or SampleBatch()
            batch[names.ENV_ID] = self._env_ids[0] + batch[names.ENV_ID]
            batch[names.WEIGHTS_VERSION] = np.full(len(batch), self._version)
            self._columns = tuple(batch)
        self._unroll_id += 1
        batch = self._cut(batch)
        if self._plan.hooks:
            batch = postprocess(batch, self._plan.hooks)
        return Fragment(batch, slot)

    def _opened(self, slot: Reservation | None, length: int) -> Reservation | None:
        """Let the next steps be written to a slot, if it has a place for all of their columns."""
        recorded = self._collector.steps.recorded
        if slot is None or not {*recorded, names.WEIGHTS_VERSION} <= set(slot):
            if slot is not None:
                slot.cancel()
            return None
        self._collector.steps.open({name: slot[name] for name in recorded}, length)
        return slot

    def _cut(self, batch: SampleBatch) -> SampleBatch:
        """Leave out what is beyond what is to be made."""
        if self._left is not None:
            beyond = len(batch) - self._left
            self._left = max(0, -beyond)
            if beyond > 0:
                # All but the first environments made one step too many.
                ends = np.append(run_starts(np.asarray(batch[names.ENV_ID]))[1:], len(batch)) - 1
                return batch.take(np.delete(np.arange(len(batch)), ends[-beyond:]))
        if self._episodes_left is None:
            return batch
        env = np.asarray(batch[names.ENV_ID]) - self._env_ids[0]
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

    def __init__(self, plan: Plan, made: Made, first: Any) -> None:
        super().__init__(plan)
        environments = [first, *(make_environment(plan.environment) for _ in range(plan.envs - 1))]
        mapping = policy_by_kind(first) if plan.policy_mapping is None else plan.policy_mapping
        given = plan.policy()
        if isinstance(given, Mapping):
            self._policy = {policy: made_policy(one, *_spaces(first, mapping, policy)) for policy, one in given.items()}
        else:
            self._policy = made_policy(given, *_spaces(first, mapping, None))
        self._collector = SlotMultiAgentCollector(
            [_Counted(environment, made) for environment in environments],
            policies=self._policy,
            policy_mapping=mapping,
            seed=plan.seed,
            hooks=plan.hooks,
            first_unroll_id=plan.first_unroll_id,
            first_env_id=plan.index * plan.envs,
        )
        self._steps_left, self._episodes_left = plan.env_steps, plan.episodes

    def next(self, reserve: Reserve | None) -> Fragment | None:
        """Make the next fragment; see `Task.next`."""
        if self._steps_left == 0 or self._episodes_left == 0:
            return None
        self._collector.weights_version = self._version
        self._collector.reserve = reserve
        if self._episodes_left is not None:
            episodes = min(self._episodes_left, self._plan.envs)
            batch = self._collector.collect(episodes=episodes)
            self._episodes_left -= episodes
        else:
            length = self._plan.fragment_length
            batch = self._collector.collect(length if self._steps_left is None else min(length, self._steps_left))
            if self._steps_left is not None:
                self._steps_left -= batch.count
        return Fragment(batch, self._collector.slot)

    def close(self) -> None:
        """Close the environments."""
        self._collector.close()


def task_of(plan: Plan, made: Made) -> Task:
    """Make the task that a plan asks for, with its environments.

    Parameters
    ----------
    plan
        What is to be done.
    made
        Called with the number of steps that were just made.

    Raises
    ------
    EnvironmentSpecError
        If the environment cannot be made, or several vector environments are asked for.
    PolicySpecError
        If the policy cannot be made.
    """
    first = make_environment(plan.environment)
    try:
        kind = environment_kind(first)
        return (SingleAgentTask if kind in ("gymnasium", "vector") else MultiAgentTask)(plan, made, first)
    except BaseException:
        with contextlib.suppress(Exception):
            first.close()
        raise


class _Counted:
    """An environment of several agents whose steps are counted as they are made."""

    def __init__(self, environment: Any, made: Made) -> None:
        self._environment = environment
        self._count = made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def step(self, actions: Any) -> Any:
        """Step the environment; a dead agent's last turn is no step."""
        result = self._environment.step(actions)
        if actions is not None:
            self._count(1)
        return result


def _vector(plan: Plan, first: Any, made: Made) -> Environments:
    """Put a worker's environments behind one interface, their steps counted as they are made."""
    is_vector = environment_kind(first) == "vector"
    if is_vector and plan.envs > 1:
        raise EnvironmentSpecError(
            f"envs_per_worker must be 1 where the environment is a vector environment, got {plan.envs}"
        )
    if not is_vector and plan.envs == 1:
        _count_steps(first, lambda *_: made(1))
        return as_environments(first)
    vector, several = require("gymnasium.vector", "envs"), first
    if not is_vector:
        makers: list[Callable[[], Any]] = [lambda: first]
        makers += [partial(_made, plan.environment)] * (plan.envs - 1)
        # Like a single one, which begins anew at once: every step is one of every environment.
        several = vector.SyncVectorEnv(makers, autoreset_mode=vector.AutoresetMode.SAME_STEP)
    environments = as_environments(several)
    count = environments.num_envs
    voids = 0

    def stepped(terminateds: Any, truncateds: Any) -> None:
        nonlocal voids
        made(count - voids)
        if environments.resets_later:
            # Of these, the next step is a reset; that itself ends nothing.
            voids = int(np.count_nonzero(terminateds | truncateds))

    _count_steps(several, stepped)
    return environments


def _count_steps(environment: Any, stepped: Callable[[Any, Any], None]) -> None:
    """Let an environment's steps be counted: in its own method, for a wrapper would stand before what it is."""
    step = environment.step

    def counted(actions: Any) -> Any:
        result = step(actions)
        stepped(result[2], result[3])
        return result

    environment.step = counted


def _made(environment: Environment) -> Any:
    return make_environment(environment)


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
            space_of = getattr(environment, "observation_space", None)
            return None if space_of is None else space_of(agent), environment.action_space(agent)
    return None, None


def _even(total: int, count: int) -> npt.NDArray[np.int64]:
    """Share a number out evenly, the first get one more."""
    return total // count + (np.arange(count) < total % count)

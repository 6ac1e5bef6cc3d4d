"""Tasks that rollout workers execute to collect fragments, and requests to workers."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.builder import PolicyMapping
from samplebatch.batch.episodes import run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.agents import Episode, PolicyOfAgents, action_space_of, observation_space_of, policy_by_kind
from samplebatch.env.as_environments import as_environments, make_all
from samplebatch.env.base import Environments
from samplebatch.env.gymnasium import EnvironmentList
from samplebatch.env.registry import Environment, environment_kind, make_environment
from samplebatch.env.seeds import PROCESS, generators_state, load_generators, seeds_at
from samplebatch.errors import EnvironmentSpecError, PolicySpecError
from samplebatch.policy.as_policy import unwrap_policy
from samplebatch.policy.source import load_weights, make_policy
from samplebatch.rollout.collector import Collector, RemoteBuffer
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from samplebatch.rollout.postprocessing import postprocess
from samplebatch.rollout.statistics import EpisodeStatistics, RunningStatistics
from samplebatch.transport.broadcast import Publication

Fragment = SampleBatch | MultiAgentBatch


class Collected(NamedTuple):
    """Fragment, with statistics of the episodes that end in the fragment."""

    fragment: Fragment
    ended: EpisodeStatistics


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker's environments and policy, pickled and sent to the worker's process.

    - `index`: index of the worker, counted from 0.
    - `envs`: ids or functions that create the worker's environments.
    - `policy`: function that creates the policy or, with several agents, a mapping from policy ids to policies.
    - `num_envs`: number of environments; their `env_id` starts at `index * num_envs`.
    - `policy_mapping`, `exploration_noise`, `map_action`, `hooks`, `infos`: arguments of `RolloutWorkers`.
    - `seed`: seed of the run, or a derived seed if the worker is a replacement.
    - `first_unroll_id`: `unroll_id` of the worker's first fragment.
    - `earlier_versions`: number of publications before the run was resumed; this number is added to each weights
      version of the resumed run.
    - `buffer`: buffer to which the worker writes its steps; if None, the worker sends its steps to the parent process.
    """

    index: int
    envs: tuple[Environment, ...]
    policy: Callable[[], Any]
    num_envs: int
    policy_mapping: PolicyMapping | None
    exploration_noise: Any
    map_action: Any
    hooks: Sequence[Any]
    seed: np.random.SeedSequence
    infos: bool = True
    first_unroll_id: int = 0
    earlier_versions: int = 0
    buffer: RemoteBuffer | None = None

    @property
    def env_ids(self) -> range:
        """`env_id` of each environment in `envs`; undefined if an entry of `envs` creates a vector environment."""
        return range(self.index * self.num_envs, (self.index + 1) * self.num_envs)


@dataclass(frozen=True)
class Request:
    """Request to one worker to collect steps; the request is pickled and sent to the worker's process.

    - `n_step`, `n_episode`: number of steps or episodes to collect; unlimited if both are None.
    - `fragment_length`: environment steps per fragment; None for a single fragment.
    - `random`, `render`, `reset_before_collect`, `gym_reset_kwargs`: as in `RolloutWorkers.collect`.
    """

    n_step: int | None = None
    n_episode: int | None = None
    fragment_length: int | None = None
    random: bool = False
    render: float | None = None
    reset_before_collect: bool = False
    gym_reset_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class StateRequest(Request):
    """Request to one worker to return or restore its state; the request is pickled and sent to the worker's process.

    - `state`: state to restore; None to return the worker's state.
    - `earlier_versions`: as in `WorkerSpec`; only used if `state` is not None.
    """

    state: Mapping[str, Any] | None = None
    earlier_versions: int = 0


def shares(total: int | None, workers: int, envs: int) -> list[int | None]:
    """Distribute a number of steps or episodes evenly over environments, and return the number for each worker.

    If the total is not divisible by the number of environments, the first environments receive one step or episode more
    than the others. The number for an environment does not depend on the worker that steps the environment.

    >>> shares(10, 2, 2), shares(10, 4, 1), shares(None, 2, 1)
    ([6, 4], [3, 3, 2, 2], [None, None])
    """
    if total is None:
        return [None] * workers
    per_env, extra = divmod(total, workers * envs)
    return [per_env * envs + min(max(extra - index * envs, 0), envs) for index in range(workers)]


Count = Callable[[int], None]
"""Function of the number of environment steps just completed."""


class WeightsSource(Protocol):
    """Interface through which a worker reads the run's weights; `Subscription` implements the interface."""

    @property
    def version(self) -> int:
        """Version of the newest weights; 0 before the first publication."""

    def latest(self) -> Publication:
        """Copy the newest weights; requires that a version has been published."""


_COUNTED = frozenset(
    (
        names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS, names.EPS_ID, names.ENV_ID, names.AGENT_INDEX, names.T,
        names.UNROLL_ID, names.EPS_DONE, names.WEIGHTS_VERSION,
    )
)  # fmt: skip
"""Columns of a fragment that are sent to the parent if the worker writes the steps to a buffer."""


class Task(ABC):
    """Base class of worker tasks, which collect the fragments of a request one at a time.

    - `episodes`: statistics of unfinished episodes, accumulated over fragments.
    """

    _collector: Collector | MultiAgentCollector

    def __init__(self, spec: WorkerSpec, weights: WeightsSource) -> None:
        self._spec = spec
        self._source = weights
        self._policy: Any = None
        self._version = 0
        self._request: Request | None = None
        self._has_gaps = False
        self.episodes = RunningStatistics()

    @property
    @abstractmethod
    def num_envs(self) -> int:
        """Number of environments."""

    def begin(self, request: Request) -> None:
        """Start a request; subsequent calls to `next` collect the request's fragments."""
        self._request = request
        reset_kwargs = request.gym_reset_kwargs
        seed = None if reset_kwargs is None else reset_kwargs.get("seed")
        if reset_kwargs is not None and seed is not None:
            # An integer is the seed of `env_id` 0; each further environment has the next integer.
            first = self._spec.index * self.num_envs
            is_number = isinstance(seed, int | np.integer)
            reset_kwargs = {
                **reset_kwargs,
                "seed": int(seed) + first if is_number else seed[first : first + self.num_envs],
            }
        self._options: dict[str, Any] = {
            "random": request.random,
            "render": request.render,
            "reset_before_collect": request.reset_before_collect,
            "gym_reset_kwargs": reset_kwargs,
        }

    def next(self) -> Fragment | None:
        """Collect the next fragment with the newest weights; return None if the request is complete."""
        if self._request is None:
            return None
        if self._source.version > self._version:
            newest = self._source.latest()
            load_weights(self._policy, newest.value)
            self._version = newest.version
        self._collector.constants[names.WEIGHTS_VERSION] = self._spec.earlier_versions + self._version
        fragment = self._collect(self._request)
        return fragment if self._spec.buffer is None else self._write(fragment, self._spec.buffer)

    def count_ended(self, fragment: Fragment) -> EpisodeStatistics:
        """Return the statistics of the episodes that end in a fragment."""
        ended = self.episodes.advance(fragment)
        # Episodes with omitted steps never end.
        self.episodes.forget_cut_off(fragment)
        return ended

    def _write(self, fragment: Fragment, buffer: RemoteBuffer) -> Fragment:
        """Write a fragment to a buffer in another process; return the fragment with only the columns for statistics."""
        buffer._add_fragment(fragment)
        if self._request is None:
            buffer.flush()
        if isinstance(fragment, MultiAgentBatch):
            counted = {policy: select_counted(steps) for policy, steps in fragment.policy_batches.items()}
            return MultiAgentBatch(counted, fragment.env_steps())
        return select_counted(fragment)

    @abstractmethod
    def _collect(self, request: Request) -> Fragment:
        """Collect the next fragment of a request; after the last fragment, set the current request to None."""

    def state_dict(self) -> dict[str, Any]:
        """Return the picklable state of the task between two requests, for `load_state_dict`."""
        return {
            "collector": self._collector.state_dict(),
            "exploration": {policy_id: policy.get_exploration_state() for policy_id, policy in self._exploring()},
            "has_gaps": self._has_gaps,
            "episodes": self.episodes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], earlier_versions: int) -> None:
        """Restore the state of a task with the same arguments as this task; the environments are unpickled."""
        self._collector.load_state_dict(state["collector"], allow_pickle=True)
        drifts = state.get("exploration", {})
        for policy_id, policy in self._exploring():
            if policy_id in drifts:
                policy.set_exploration_state(drifts[policy_id])
        self._has_gaps = state["has_gaps"]
        self.episodes.load_state_dict(state["episodes"])
        self._spec = replace(self._spec, earlier_versions=earlier_versions)

    def _exploring(self) -> list[tuple[Any, Any]]:
        """Return pairs of id and policy for the policies whose exploration state is not part of the weights."""
        policies = self._policy if isinstance(self._policy, Mapping) else {names.DEFAULT_POLICY_ID: self._policy}
        owners = [(policy_id, unwrap_policy(policy)) for policy_id, policy in policies.items()]
        return [(policy_id, policy) for policy_id, policy in owners if hasattr(policy, "get_exploration_state")]

    def close(self) -> None:
        """Close the environments."""
        self._collector.close()


class SingleAgentTask(Task):
    """Task of a worker with Gymnasium environments."""

    def __init__(self, spec: WorkerSpec, weights: WeightsSource, count_steps: Count, first: Any) -> None:
        super().__init__(spec, weights)
        self._environments = environments = _as_environments(spec, first)
        self._first_env_id = spec.index * environments.num_envs
        policy = spec.policy()
        if isinstance(policy, Mapping):
            policy = _only_policy(policy)
        self._policy = make_policy(policy, environments.observation_space, environments.action_space)
        self._collector: Collector = Collector(
            self._policy,
            cast(Any, environments),
            seed=spec.seed,
            exploration_noise=spec.exploration_noise,
            map_action=spec.map_action,
            infos=spec.infos,
            worker_index=spec.index,
        )
        self._collector._unroll_id = spec.first_unroll_id
        self._collector.count_steps = count_steps

    @property
    def num_envs(self) -> int:
        return self._environments.num_envs

    def begin(self, request: Request) -> None:
        super().begin(request)
        if self._has_gaps and not request.reset_before_collect:
            # Steps were omitted, so no episode can continue.
            self._collector.reset_env()
        self._has_gaps = False
        self._left = request.n_step
        self._episodes_left = None if request.n_episode is None else _even(request.n_episode, self.num_envs)

    def _collect(self, request: Request) -> Fragment:
        if request.fragment_length is None:
            self._request = None
            stats = self._collector.collect(request.n_step, request.n_episode, **self._options)
            batch = stats.batch or SampleBatch()
        else:
            count, left = self.num_envs, self._left
            length = max(1, request.fragment_length // count)
            if left is not None:
                length = min(length, -(-left // count))
            batch = self._cut(self._collector.collect(n_step=count * length).batch or SampleBatch())
            if self._left == 0 or (self._episodes_left is not None and not self._episodes_left.any()):
                self._request = None
        return postprocess(batch, self._spec.hooks) if self._spec.hooks else batch

    def _cut(self, batch: SampleBatch) -> SampleBatch:
        if self._left is not None:
            beyond = len(batch) - self._left
            self._left = max(0, -beyond)
            if beyond > 0:
                # All but the first environments have one extra step.
                ends = np.append(run_starts(np.asarray(batch[names.ENV_ID]))[1:], len(batch)) - 1
                self._has_gaps = True
                return batch.take(np.delete(np.arange(len(batch)), ends[-beyond:]))
        if self._episodes_left is None:
            return batch
        env = np.asarray(batch[names.ENV_ID]) - self._first_env_id
        done = np.asarray(batch[names.TERMINATEDS]) | np.asarray(batch[names.TRUNCATEDS])
        ended = done.cumsum() - done
        starts = run_starts(env)
        ended -= np.repeat(ended[starts], np.diff(np.append(starts, len(env))))
        is_requested = ended < self._episodes_left[env]
        finished = np.bincount(env[done], minlength=len(self._episodes_left))
        self._episodes_left = np.maximum(self._episodes_left - finished, 0)
        if is_requested.all():
            return batch
        self._has_gaps = True
        return batch.take(np.flatnonzero(is_requested))


class MultiAgentTask(Task):
    """Task of a worker with multi-agent environments."""

    def __init__(self, spec: WorkerSpec, weights: WeightsSource, count_steps: Count, first: Any) -> None:
        super().__init__(spec, weights)
        environments = [first, *make_all(spec.envs[1:])]
        mapping = policy_by_kind(first) if spec.policy_mapping is None else spec.policy_mapping
        unchecked = spec.policy()
        if isinstance(unchecked, Mapping):
            self._policy = {
                policy: make_policy(member, *_spaces(first, mapping, policy)) for policy, member in unchecked.items()
            }
        else:
            self._policy = make_policy(unchecked, *_spaces(first, mapping, None))
        self._collector: MultiAgentCollector = MultiAgentCollector(
            self._policy,
            environments,
            policy_mapping=mapping,
            exploration_noise=spec.exploration_noise,
            map_action=spec.map_action,
            infos=spec.infos,
            hooks=spec.hooks,
            seed=spec.seed,
            worker_index=spec.index,
        )
        self._collector._unroll_id = spec.first_unroll_id
        self._collector.count_steps = count_steps

    @property
    def num_envs(self) -> int:
        return self._spec.num_envs

    def begin(self, request: Request) -> None:
        super().begin(request)
        self._steps_left, self._episodes_left = request.n_step, request.n_episode

    def _collect(self, request: Request) -> Fragment:
        length = request.fragment_length
        if self._episodes_left is not None:
            episodes = self._episodes_left if length is None else min(self._episodes_left, self.num_envs)
            self._episodes_left -= episodes
            batch = self._collector.collect(n_episode=episodes, **self._options).batch
        else:
            bounds = [bound for bound in (length, self._steps_left) if bound is not None]
            batch = self._collector.collect(n_step=min(bounds), **self._options).batch
            if self._steps_left is not None:
                self._steps_left -= batch.count
        if 0 in (self._steps_left, self._episodes_left):
            self._request = None
        return batch


def make_task(spec: WorkerSpec, weights: WeightsSource, count_steps: Count) -> Task:
    """Create the task of a worker, with its environments."""
    first = make_environment(spec.envs[0])
    try:
        kind = environment_kind(first)
        task = SingleAgentTask if kind in ("gymnasium", "vector") else MultiAgentTask
        return task(spec, weights, count_steps, first)
    except BaseException:
        with contextlib.suppress(Exception):
            first.close()
        raise


def answer(task: Task, request: StateRequest) -> dict[str, Any]:
    """Restore a task from the state in a request, or return the task's state.

    If the state cannot be saved, the result contains the reason under the key `refused`.
    """
    if request.state is not None:
        task.load_state_dict(request.state["task"], request.earlier_versions)
        return {}
    try:
        return {"task": task.state_dict(), "generators": None}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _as_environments(spec: WorkerSpec, first: Any) -> Environments:
    is_vector = environment_kind(first) == "vector"
    if is_vector and spec.num_envs > 1:
        raise EnvironmentSpecError(f"envs_per_worker must be 1 for a vector environment, got {spec.num_envs}")
    if is_vector:
        return as_environments(first)
    return EnvironmentList([first, *make_all(spec.envs[1:])])


def _only_policy(policies: Mapping[str, Any]) -> Any:
    if list(policies) != [names.DEFAULT_POLICY_ID]:
        raise PolicySpecError(
            f"a single-agent environment must have one policy, or {{{names.DEFAULT_POLICY_ID!r}: policy}}, got "
            f"{', '.join(map(repr, policies)) or 'none'}"
        )
    return policies[names.DEFAULT_POLICY_ID]


def _spaces(environment: Any, mapping: Any, policy_id: str | None) -> tuple[Any, Any]:
    """Return the spaces of a policy's first agent, or of the environment's first agent if `policy_id` is None.

    Both spaces are None if the agent does not exist.
    """
    policy_of, agents = PolicyOfAgents(mapping), getattr(environment, "possible_agents", ())
    # If roles change between episodes, check the first two episodes.
    for number in range(2 if policy_of.sees_episodes else 1):
        for agent in agents:
            agent_policy = (
                mapping.get(agent) if isinstance(mapping, Mapping) else policy_of(agent, Episode(0, 0, number))
            )
            if policy_id in (None, agent_policy):
                return observation_space_of(environment, agent), action_space_of(environment, agent)
    return None, None


def select_counted(steps: SampleBatch) -> SampleBatch:
    """Select the columns that episode statistics require."""
    return steps.select(*[name for name in steps if name in _COUNTED])


def _even(total: int, count: int) -> npt.NDArray[np.int64]:
    return total // count + (np.arange(count) < total % count)


def start_task(spec: WorkerSpec, weights: WeightsSource, count_steps: Count, *, threads: int = 1) -> Task:
    """In a worker process, create the worker's task and seed the global random generators.

    - `spec`, `weights`, `count_steps`: as in `make_task`.
    - `threads`: number of torch threads; used if the policy or the environments import torch.
    """
    seeds = seeds_at(spec.seed, PROCESS, spec.index)
    _seed(seeds)
    task = make_task(spec, weights, count_steps)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
        _seed(seeds)
    return task


def exchange_state(task: Task, request: StateRequest) -> bytes | None:
    """Restore the state in a request, or return the pickled state; states include the global random generators."""
    reply = answer(task, request)
    if request.state is not None:
        load_generators(request.state["generators"])
        return None
    try:
        return pickle.dumps(reply if "refused" in reply else {**reply, "generators": generators_state()})
    except Exception as error:
        return pickle.dumps({"refused": f"{type(error).__name__}: {error}"})


def _seed(seeds: np.random.SeedSequence) -> None:
    """Seed the global random generators, which torch distributions use, so that workers draw different numbers."""
    words = seeds.generate_state(3).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(words[2])

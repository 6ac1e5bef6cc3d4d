"""Collector of steps in multi-agent environments."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from samplebatch import names
from samplebatch.batch.action_unit import common_unit
from samplebatch.batch.builder import PolicyMapping
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.env.agents import AgentGroup, AgentOutcomes, MultiAgentAdapter, PolicyOfAgents, policy_by_kind
from samplebatch.env.as_environments import adapt_agents, bind_arguments, make_several
from samplebatch.env.registry import MultiAgentEnvLike
from samplebatch.env.seeds import ENVIRONMENT, POLICY, RANDOM, as_seeds, seed_number, seeds_at, seeds_of_reset
from samplebatch.env.stacking import stack_rows
from samplebatch.errors import PolicyNotFoundError, near_names
from samplebatch.names import PolicyID
from samplebatch.policy.action_map import ActionMap
from samplebatch.policy.agents import AgentActor, Noise, PolicyActors, PolicyAgents, RandomAgents, check_options
from samplebatch.policy.as_policy import CollectorPolicy, is_random
from samplebatch.rollout.collector import BaseCollector, RemoteBuffer, check_buffer, check_order
from samplebatch.rollout.followed_weights import PublishedWeightsSource, WeightsSubscription
from samplebatch.rollout.postprocessing import Hook, check_hooks, postprocess
from samplebatch.rollout.recorder import Block, Recorder, Step, Streams, rows_of_block
from samplebatch.rollout.statistics import CollectStats, RunningStatistics, report

if TYPE_CHECKING:
    from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer


class MultiAgentCollector(BaseCollector[MultiAgentBatch]):
    """Collector of steps in multi-agent environments: every step of every agent is stored in a buffer or a batch.

    Agents may act simultaneously or in turns, and may join and leave during an episode. Each policy computes the
    actions of its agents in all environments in one call.

    Batches have the columns `obs`, `new_obs`, `actions`, `rewards` (float64), `terminateds`, `truncateds`, `infos`,
    further policy outputs (see `Collector`), and

    - `eps_id`: the episode, identified by 63 random bits that differ between processes and runs, regardless of the
      seed;
    - `env_id`: the environment;
    - `agent_index`: index of the agent in the environment's `possible_agents`; an agent that `possible_agents` lacks
      has an index of at least `len(possible_agents)`;
    - `t`: number of environment steps since the episode started; all agents of a step have the same `t`, including
      agents that joined later. In turn-based environments, every turn is a step;
    - `eps_done`: whether the step is the last of its episode, for all agents;
    - `unroll_id`: the number of the batch for which the step was collected.

    Rows are sorted by `env_id`, `agent_index` and time, so that the steps of each agent are contiguous. An unfinished
    episode continues in the next batch. In turn-based environments, a step is returned once all agents that acted up to
    that step have observed the outcomes of their actions.

    With `n_step`, `collect` performs exactly `n_step` environment steps in total; the step counts of any two
    environments differ by at most one. With `n_episode`, `collect` completes the first `n_episode` episodes to start,
    so that the result is not biased towards short episodes. Unfinished episodes from earlier calls to `collect`
    count as the first episodes to start. No other episodes are stepped. The attribute `policies` of the result
    contains statistics per policy. `reset_env` returns observations and infos by agent, one dict per environment.

    Parameters
    ----------
    policy
        Anything that `as_policy` accepts, or `"random"`, which respects an `action_mask` in observations or infos; or a
        mapping from policy ids to such policies.
    env
        A PettingZoo environment of the parallel or the AEC interface, a `MultiAgentEnv` of RLlib, an environment id, or
        a function that creates an environment (see `make_environment`); or a list of environments, ids and functions,
        whose interfaces may differ. Only `close` closes the environments.
    buffer
        A `MultiAgentReplayBuffer` to which steps are added; None to return the steps as a batch.
    policy_mapping
        Policy id of each agent: a mapping from agent ids to policy ids, a function of the agent id, or a function of
        agent id and `Episode`, which is called in every episode. By default, one policy per kind of agent (see
        `policy_by_kind`).
    num_envs
        Number of environments to create if `env` is a single id or function; 1 by default.
    env_kwargs
        Keyword arguments for the functions or ids that create environments.
    map_action
        Mapping from policy actions to environment actions, as in `Collector`; or a dict of such mappings by policy id.
        The unmapped actions are stored. Random actions are drawn from the environments' spaces; with `"scale"`, the
        stored random actions are scaled to [-1, 1].
    exploration_noise
        Whether to call a policy's `add_exploration_noise` on its actions; or a function of actions and batch that
        returns actions with noise; or a mapping from policy ids to such values, in which case omitted policies have no
        noise. `"random"` policies have no noise.
    seed
        Seed of environments and actions; collectors with equal seeds and deterministic policies collect the same data,
        except for `eps_id`. The data of an `env_id` do not depend on the number of environments, provided that each
        policy's actions are also independent of this number.
    hooks
        Hooks to apply to each trajectory, or part of a trajectory, in a batch (see `postprocess`); only without a
        buffer.
    infos
        Whether to store infos; policies always receive them.
    worker_index, weights
        As in `Collector`.

    Raises
    ------
    EnvironmentSpecError
        If `env` is of an unknown type, or is not a multi-agent environment.
    PolicyNotFoundError
        If `exploration_noise`, `map_action` or one of the `hooks` names a policy that `policy` lacks.
    PolicySpecError
        If `exploration_noise` is passed although all policies to which it applies are `"random"`.
    ArgumentError
        If `num_envs` is not a positive integer or differs from the number of environments in `env`; if the buffer is
        not a multi-agent buffer; if both a buffer and `hooks` are passed; or if `seed` is invalid.

    Examples
    --------
    >>> collector = MultiAgentCollector("random", "mpe2/simple_tag_v3", seed=1)
    >>> stats = collector.collect(n_step=40)
    >>> batch = stats.batch
    >>> batch.count, {policy: len(steps) for policy, steps in batch.policy_batches.items()}
    (40, {'adversary': 120, 'agent': 40})
    >>> stay = {"adversary": lambda obs: np.zeros(len(obs), int), "agent": "random"}
    >>> batch = (
    ...     MultiAgentCollector(stay, "mpe2/simple_tag_v3", num_envs=4, seed=1)
    ...     .collect(n_episode=6)
    ...     .batch
    ... )
    >>> batch.count, batch["adversary"]["actions"].any()
    (150, np.False_)
    """

    _saved_names = (*BaseCollector._saved_names, "_next", "_recorded", "_ended", "_policy_seeds", "_environment_seeds")

    def __init__(
        self,
        policy: CollectorPolicy | Mapping[PolicyID, CollectorPolicy],
        env: MultiAgentEnvLike,
        buffer: MultiAgentReplayBuffer | RemoteBuffer | None = None,
        *,
        policy_mapping: PolicyMapping | None = None,
        num_envs: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        exploration_noise: Noise | Mapping[PolicyID, Noise] = False,
        map_action: ActionMap | Mapping[PolicyID, ActionMap] | None = None,
        hooks: Sequence[Hook] = (),
        seed: int | np.random.SeedSequence | None = None,
        infos: bool = True,
        worker_index: int = 0,
        weights: WeightsSubscription | PublishedWeightsSource | None = None,
    ) -> None:
        check_order("MultiAgentCollector", policy, env)
        policies = list(policy) if isinstance(policy, Mapping) else None
        check_hooks(hooks, policies, buffer=buffer)
        seeds = as_seeds(seed)
        environments = make_several(bind_arguments(env, env_kwargs), num_envs)
        super().__init__(policy, cast(Any, buffer), len(environments), hooks, policies, worker_index, weights)
        check_buffer(buffer, self.num_envs, several=True)
        self._policy_seeds, random_seeds, self._environment_seeds = (
            seeds_at(seeds, key) for key in (POLICY, RANDOM, ENVIRONMENT)
        )
        env_ids = range(worker_index * self.num_envs, (worker_index + 1) * self.num_envs)
        policy_of = PolicyOfAgents(policy_by_kind(environments[0]) if policy_mapping is None else policy_mapping)
        self._adapters = [
            adapt_agents(environment, env_id, seed_number(seeds_at(self._environment_seeds, env_id)), policy_of)
            for environment, env_id in zip(environments, env_ids, strict=True)
        ]
        self._turns = {adapter.env_id: TurnQueue() for adapter in self._adapters if not adapter.together}
        self._random = RandomAgents({env_id: seeds_at(random_seeds, env_id) for env_id in env_ids})
        self._noise = check_options("exploration_noise", exploration_noise, policy)
        self._map_action = check_options("map_action", map_action, policy)
        self._episodes = RunningStatistics()
        self._ended: list[int] = []
        self._actors = PolicyActors(self._make_actor)
        self._recorder = Recorder(infos=infos)
        self._recorded = 0
        self._acting: list[list[AgentGroup]] = []
        """Groups that acted last in each environment; empty if that step failed."""
        self._steps: dict[PolicyID, PolicyStep] = {}
        self._next = 0
        self._acts_at_random = False

    @property
    def environments(self) -> list[Any]:
        """Environments in order of `env_id`."""
        return [adapter.environment for adapter in self._adapters]

    def _close(self) -> None:
        for adapter in self._adapters:
            adapter.environment.close()

    def _reset_env(self, **arguments: Any) -> tuple[list[dict[Any, Any]], list[dict[Any, Any]]]:
        self._leave_episodes()
        seeds = seeds_of_reset(self.num_envs, None, arguments.pop("seed", None))
        for adapter, seed in zip(self._adapters, seeds, strict=True):
            self._begin(adapter, **(arguments if seed is None else {"seed": seed, **arguments}))
        observations: list[dict[Any, Any]] = [{} for _ in self._adapters]
        infos: list[dict[Any, Any]] = [{} for _ in self._adapters]
        for i, adapter in enumerate(self._adapters):
            for group in adapter.groups:
                observations[i].update(zip(group.agents, group.observations, strict=True))
                infos[i].update(zip(group.agents, group.infos, strict=True))
        return observations, infos

    def _leave_episodes(self) -> None:
        for adapter in self._adapters:
            adapter.abandon()
        for turns in self._turns.values():
            turns.clear()
        self._episodes.clear()
        self._acting = []

    def _parts(self) -> Mapping[str, Any]:
        turns = {f"turns {env_id}": turns for env_id, turns in self._turns.items()}
        return {
            "recorder": self._recorder,
            "episodes": self._episodes,
            "random": self._random,
            "actors": self._actors,
            **turns,
        }

    def _environment_parts(self) -> Sequence[Any]:
        return self._adapters

    def _begin_with_new_seeds(self) -> None:
        self._leave_episodes()
        for adapter in self._adapters if self._unroll_id else ():
            adapter.reseed(seed_number(seeds_at(self._environment_seeds, adapter.env_id, self._unroll_id)))

    def _needs_reset(self, gym_reset_kwargs: dict[str, Any] | None) -> bool:
        # Episodes start with the first step of an environment.
        return bool(gym_reset_kwargs) and not any(adapter.in_episode for adapter in self._adapters)

    def _prepare(self, *, random: bool) -> None:
        if random != self._acts_at_random and (self._recorded or any(self._turns.values())):
            for actor in self._actors.values():
                common_unit([actor.action_unit, actor.random_unit])
        self._acts_at_random = random

    def _break_off(self) -> None:
        for adapter in self._adapters:
            adapter.keep_observations()

    def _report(self, constants: Mapping[str, int], began: float) -> CollectStats[MultiAgentBatch]:
        for adapter in self._adapters:
            adapter.keep_observations()
        env_steps, self._recorded = self._recorded, 0
        batches = self._recorder.take(constants, self._episodes)
        ended, self._ended = self._episodes.end(self._ended), []
        for policy_id, steps in batches.items():
            actor = self._actors[policy_id]
            steps.action_unit = actor.random_unit if self._acts_at_random else actor.action_unit
        batch = MultiAgentBatch._of(batches, env_steps)
        if self._hooks:
            agents = {
                (adapter.env_id, index): agent
                for adapter in self._adapters
                for index, agent in enumerate(adapter.agents)
            }
            batch = postprocess(batch, self._hooks, agents=agents)
        if self._remote is not None:
            self._remote._add_fragment(batch)
        elif self.buffer is not None:
            self.buffer.add(batch)
        counts = {policy_id: steps.count for policy_id, steps in batch.policy_batches.items()}
        returned = batch if self.buffer is None else None
        return report(batch.count, counts, ended, time.perf_counter() - began, returned)

    def _collect_steps(self, n_step: int, *, random: bool, render: float | None) -> None:
        adapters = self._adapters
        if self._turns:
            self._record_turns(adapters, n_step - self._recorded)
        while self._recorded < n_step:
            count = min(n_step - self._recorded, len(adapters))
            chosen = adapters
            if count < len(adapters):
                chosen = [adapters[(self._next + i) % len(adapters)] for i in range(count)]
                self._next = (self._next + count) % len(adapters)
            for adapter in chosen:
                if not adapter.groups:
                    self._begin(adapter)
            self._step(chosen, render)
            if self._turns:
                self._record_turns(adapters, n_step - self._recorded)

    def _collect_episodes(self, n_episode: int, *, random: bool, render: float | None) -> None:
        # Unfinished episodes started first.
        chosen = sorted(self._adapters, key=lambda adapter: not adapter.in_episode)[:n_episode]
        started = len(chosen)
        for adapter in chosen:
            if not adapter.in_episode:
                self._begin(adapter)
        going = chosen
        while going:
            self._step(going, render)
            for adapter in going:
                if not adapter.in_episode and started < n_episode:
                    self._begin(adapter)
                    started += 1
            going = [adapter for adapter in going if adapter.in_episode]
        if self._turns:
            self._record_turns(chosen, None)

    def _begin(self, adapter: MultiAgentAdapter, **arguments: Any) -> None:
        adapter.reset(**arguments)
        self._actors.forget(adapter.env_id)

    def _step(self, adapters: Sequence[MultiAgentAdapter], render: float | None) -> None:
        acting = [adapter.groups for adapter in adapters]
        steps = self._steps if acting == self._acting else self._group(acting)
        self._acting = []
        for step in steps.values():
            step.ask(random=self._acts_at_random)
        stepped: list[MultiAgentAdapter] = []
        outcomes: dict[AgentGroup, AgentOutcomes] = {}
        try:
            for adapter, groups in zip(adapters, acting, strict=True):
                actions = []
                for group in groups:
                    step = steps[group.policy_id]
                    actions.append(step.actions[step.parts[group]])
                group_outcomes = self._let_act(adapter, actions)
                if adapter.together:
                    stepped.append(adapter)
                    outcomes.update(zip(groups, group_outcomes, strict=True))
                else:
                    self._queue_turns(adapter, groups, steps, group_outcomes)
        finally:
            # Completed steps are recorded even if another environment has failed.
            self._record(steps.values(), stepped, outcomes)
        self._acting, self._steps = acting, steps
        if render is not None:
            for adapter in adapters:
                adapter.environment.render()
            if render > 0:
                time.sleep(render)

    def _group(self, acting: list[list[AgentGroup]]) -> dict[PolicyID, PolicyStep]:
        by_policy: dict[PolicyID, list[AgentGroup]] = {}
        for group in chain.from_iterable(acting):
            by_policy.setdefault(group.policy_id, []).append(group)
        steps = {}
        for policy_id, groups in by_policy.items():
            steps[policy_id] = PolicyStep(policy_id, self._actors[policy_id], groups)
        return steps

    def _let_act(self, adapter: MultiAgentAdapter, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        """Step an environment; if the step fails, abandon the episode, because the environment's state is unknown."""
        try:
            outcomes = adapter.step(actions)
        except BaseException:
            adapter.abandon()
            if not adapter.together:
                self._turns[adapter.env_id].break_off()
            raise
        if self.count_steps is not None:
            self.count_steps(1)
        return outcomes

    def _record(
        self,
        steps: Iterable[PolicyStep],
        adapters: Sequence[MultiAgentAdapter],
        outcomes: Mapping[AgentGroup, AgentOutcomes],
    ) -> None:
        """Record the rows of all policies; if any row is rejected, record no row and abandon the episodes."""
        try:
            self._recorder.append([rows for step in steps if (rows := step.end(outcomes)) is not None])
        except BaseException:
            for adapter in adapters:
                adapter.abandon()
            raise
        self._recorded += len(adapters)
        for adapter in adapters:
            if not adapter.groups:
                self._ended.append(adapter.eps_id)

    def _queue_turns(
        self,
        adapter: MultiAgentAdapter,
        groups: Sequence[AgentGroup],
        steps: Mapping[PolicyID, PolicyStep],
        outcomes: Sequence[AgentOutcomes],
    ) -> None:
        """Queue the turns of a step, and add the outcomes that arrived in this step to the queued turns."""
        turns = self._turns[adapter.env_id]
        for group in groups:
            step = steps[group.policy_id]
            first = step.parts[group].start
            for i, agent in enumerate(group.agents):
                columns = {name: rows_of_block(block, [first + i]) for name, block in step.columns.items()}
                row = slice(i, i + 1)
                streams = Streams(group.eps_ids[row], group.env_ids[row], group.indices[row])
                turns.begin(agent, Step(group.policy_id, columns, streams, step.t[first : first + 1]))
        turns.finish(outcomes)
        if not adapter.in_episode:
            turns.end()

    def _record_turns(self, adapters: Sequence[MultiAgentAdapter], limit: int | None) -> None:
        for adapter in adapters:
            turns = self._turns.get(adapter.env_id)
            if turns is None or (limit is not None and limit <= 0):
                continue
            for step in turns.complete(limit):
                for turn in step:
                    self._recorder.append([turn])
                self._recorded += 1
                self._ended += {int(turn.streams.eps_id[0]) for turn in step if turn.columns[names.EPS_DONE][0]}
                limit = None if limit is None else limit - 1

    def _make_actor(self, policy_id: PolicyID) -> AgentActor:
        policy = self.policy
        if isinstance(policy, Mapping):
            if policy_id not in policy:
                raise PolicyNotFoundError(f"policy must have {policy_id!r}; {near_names(policy_id, policy)}")
            policy = policy[policy_id]
        mapped = self._map_action.get(policy_id) if isinstance(self._map_action, Mapping) else self._map_action
        seeds = seeds_at(self._policy_seeds, *names.policy_seed(policy_id))
        random = self._random
        if mapped == "scale":
            env_ids = [adapter.env_id for adapter in self._adapters]
            random = RandomAgents({env_id: seeds_at(seeds, env_id) for env_id in env_ids}, map_action=mapped)
        if is_random(policy):
            return random
        noise = self._noise.get(policy_id, False) if isinstance(self._noise, Mapping) else self._noise
        return PolicyAgents(policy, seeds, random, exploration_noise=noise, map_action=mapped)


class PolicyStep:
    """Next step of all acting agents of a policy: observations, streams and, after `ask`, actions.

    If all agents of a step act again, the next observations of the step are reused as observations of the following
    step.

    - `parts`: slice of rows of each agent group.
    """

    __slots__ = ("_actor", "actions", "columns", "groups", "observations", "parts", "policy_id", "streams", "t")

    def __init__(self, policy_id: PolicyID, actor: AgentActor, groups: list[AgentGroup]) -> None:
        self.policy_id = policy_id
        self.groups = groups
        self.parts: dict[AgentGroup, slice] = {}
        self.actions: Sequence[Any] = ()
        self.columns: dict[str, Block] = {}
        self._actor = actor
        observations: list[Any] = []
        streams: list[Streams] = []
        t: list[int] = []
        for group in groups:
            self.parts[group] = slice(len(t), len(t) + len(group.agents))
            observations += group.observations
            streams.append(Streams(group.eps_ids, group.env_ids, group.indices))
            t += [group.adapter.t] * len(group.agents)
        self.observations: Block = stack_rows(names.OBS, observations)
        self.streams = streams[0] if len(streams) == 1 else Streams(*map(np.concatenate, zip(*streams, strict=True)))
        self.t = np.array(t)

    def ask(self, *, random: bool) -> None:
        """Compute the actions of all agents of the policy, or draw random actions."""
        observations = self.observations
        decide = self._actor.draw if random else self._actor.act
        self.actions, self.columns = decide(self.groups, observations if isinstance(observations, np.ndarray) else None)
        self.columns[names.OBS] = observations

    def end(self, outcomes: Mapping[AgentGroup, AgentOutcomes]) -> Step | None:
        """Return the rows of the agents that have outcomes, and advance to the next step; None without outcomes."""
        groups, columns, streams, t = self.groups, self.columns, self.streams, self.t
        if not outcomes.keys() >= self.parts.keys():
            groups = [group for group in groups if group in outcomes]
            if not groups:
                return None
            rows = [row for group in groups for row in range(self.parts[group].start, self.parts[group].stop)]
            columns = {name: rows_of_block(block, rows) for name, block in columns.items()}
            streams, t = Streams(*[part[rows] for part in streams]), t[rows]
        over: list[bool] = []
        for group in groups:
            over += [not group.adapter.groups] * len(group.agents)
        columns[names.EPS_DONE] = over
        joined: Sequence[Any] = outcomes[groups[0]]
        if len(groups) > 1:
            # Rows of several environments are concatenated.
            joined = [[*chain.from_iterable(part)] for part in zip(*map(outcomes.__getitem__, groups), strict=True)]
        _, observations, columns[names.REWARDS], columns[names.TERMINATEDS], columns[names.TRUNCATEDS], infos = joined
        columns[names.NEXT_OBS] = self.observations = stack_rows(names.NEXT_OBS, observations)
        self.t = self.t + 1
        return Step(self.policy_id, columns, streams, t, infos)


class TurnQueue:
    """Queue of one environment's turns that have not been recorded yet, oldest first.

    An agent may observe the outcome of its action after other agents have observed outcomes of later actions. Fragments
    contain only complete environment steps: the turns of a step are removed from the queue together, once the outcomes
    of all turns up to and including that step are known.
    """

    def __init__(self) -> None:
        self._turns: deque[Step] = deque()
        self._waiting: dict[Any, Step] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def clear(self) -> None:
        """Discard all turns."""
        self._turns.clear()
        self._waiting = {}

    def state_dict(self) -> Any:
        """Return the turns, for `load_state_dict`."""
        return copy.deepcopy((self._turns, self._waiting))

    def load_state_dict(self, state: Any) -> None:
        """Restore turns from `state_dict`."""
        self._turns, self._waiting = copy.deepcopy(state)

    def break_off(self) -> None:
        """Discard the turns whose outcomes will never be known."""
        steps = self.complete(None)
        self.clear()
        self._turns += chain.from_iterable(steps)

    def begin(self, agent: Any, turn: Step) -> None:
        """Add a turn (a step of one agent) whose outcome is not yet known."""
        turn.columns[names.EPS_DONE] = [False]
        self._turns.append(turn)
        self._waiting[agent] = turn

    def finish(self, outcomes: Sequence[AgentOutcomes]) -> None:
        """Add outcomes to the turns of agents that have observed the outcomes of their actions."""
        for (agent,), observations, rewards, terminateds, truncateds, infos in outcomes:
            turn = self._waiting.pop(agent)
            turn.columns |= {
                names.NEXT_OBS: stack_rows(names.NEXT_OBS, observations),
                names.REWARDS: rewards,
                names.TERMINATEDS: terminateds,
                names.TRUNCATEDS: truncateds,
            }
            turn.infos = list(infos)

    def end(self) -> None:
        """Mark the newest step as the last step of its episode."""
        newest = _env_step(self._turns[-1]) if self._turns else None
        for turn in takewhile(lambda turn: _env_step(turn) == newest, reversed(self._turns)):
            turn.columns[names.EPS_DONE] = [True]

    def complete(self, limit: int | None) -> list[list[Step]]:
        """Remove and return the turns of up to `limit` complete environment steps, or of all complete steps if None."""
        completed: list[list[Step]] = []
        turns = self._turns
        while turns and len(completed) != limit:
            first = _env_step(turns[0])
            step = [*takewhile(lambda turn, first=first: _env_step(turn) == first, turns)]  # type: ignore[misc]
            if any(names.NEXT_OBS not in turn.columns for turn in step):
                break
            completed.append([turns.popleft() for _ in step])
        return completed


def _env_step(turn: Step) -> tuple[int, int]:
    return int(turn.streams.eps_id[0]), int(turn.t[0])

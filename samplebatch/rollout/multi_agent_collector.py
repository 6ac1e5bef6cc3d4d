"""MultiAgentCollector: steps environments of several agents into multi-agent batches."""

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
    """Step environments of several agents, and keep every step of every agent.

    Agents may act together or take turns, and may come and go within an episode. All agents of a policy, in all
    environments, are decided for in one call.

    The batches have the columns `obs`, `new_obs`, `actions`, `rewards` (float64), `terminateds`, `truncateds`, `infos`,
    what else the policy says (see `Collector`), and

    - `eps_id`: the episode, 63 random bits, unlike every other process's and every earlier run's, whatever the seed;
    - `env_id`: the environment;
    - `agent_index`: the agent's place in the environment's `possible_agents`, those that it does not name after them;
    - `t`: environment steps since the episode began, for all agents alike, so that those who join late line up with the
      others. Where agents take turns, every turn is a step;
    - `eps_done`: whether the step is the last of its episode, for all agents;
    - `unroll_id`: the batch that the steps were collected in.

    In a batch the steps of each agent lie together, in order of time, by `env_id` and `agent_index`. An episode that
    has not ended goes on in the next batch. Where agents take turns, a step goes into a batch once all agents that
    acted until then have seen what came of it.

    With `n_step`, `collect` makes exactly as many steps of all environments together, as many in each, give or take
    one. With `n_episode`, those episodes count that begin first, so that long ones are as likely as short ones;
    episodes that are under way come before new ones, and no other episode is stepped. In the report, `policies` has one
    for each policy. `reset_env` returns observations and infos by agent, a dict for each environment.

    Parameters
    ----------
    policy
        Anything that `as_policy` takes, or `"random"`, which honours an `action_mask` among the observations or infos;
        or a mapping of policy ids to one of these each.
    env
        A PettingZoo environment of either interface, a `MultiAgentEnv` of RLlib's, the name of one or a function that
        makes one (see `make_environment`); or a list of these, in which they may be mixed. Environments are not
        closed, unless by `close`.
    buffer
        A `MultiAgentReplayBuffer` that the steps are added to; None to return them as a batch.
    policy_mapping
        The policy that acts for an agent: a mapping, a function of the agent id, or one of agent id and `Episode`,
        which is asked in every episode. By default one policy for each kind of agent (see `policy_by_kind`).
    num_envs
        How many environments to make of one name or function, by default 1.
    env_kwargs
        Keyword arguments of the functions or ids that make environments.
    map_action
        How actions become what the environments take, as for `Collector`; or one by policy id. Kept are the actions
        before. Random actions are drawn from the environments' spaces themselves: of these only `"scale"` keeps
        others, from [-1, 1].
    exploration_noise
        Whether a policy's `add_exploration_noise` is called on what it decided; or what is called, on actions and
        batch, in its place; or one of these by policy id, where those that are not named get no noise. Policies that
        are `"random"` have none.
    seed
        Seed of environments and actions; the same seed gives the same data, `eps_id` aside. What happens in the
        environment of one `env_id` does not depend on how many others there are, as long as policies see to it.
    hooks
        Applied to each trajectory, to the part of it that a batch has: see `postprocess`; only without a buffer.
    infos
        Whether to keep the infos; policies see them in any case.
    worker_index, weights
        As for `Collector`.

    Raises
    ------
    EnvironmentSpecError
        If there is no such environment, or it is none of several agents.
    PolicyNotFoundError
        If `exploration_noise`, `map_action` or one of the `hooks` names a policy that `policy` lacks.
    PolicySpecError
        If `exploration_noise` is for a policy that is `"random"` alone, or names it.
    ArgumentError
        If `num_envs` is no whole number from 1 on, or another number than that of the environments given; if the buffer
        is none of several agents, there are both a buffer and `hooks`, or `seed` is none.

    Examples
    --------
    >>> collector = MultiAgentCollector("random", "mpe2/simple_tag_v3", seed=1)
    >>> stats = collector.collect(n_step=40)
    >>> batch = stats.batch
    >>> batch.count, {policy: len(steps) for policy, steps in batch.policy_batches.items()}
    (40, {'adversary': 120, 'agent': 40})
    >>> stay = {"adversary": lambda obs: np.zeros(len(obs), int), "agent": "random"}
    >>> batch = MultiAgentCollector(stay, "mpe2/simple_tag_v3", num_envs=4, seed=1).collect(n_episode=6).batch
    >>> batch.count, batch["adversary"]["actions"].any()
    (150, np.False_)
    """

    _kept = (*BaseCollector._kept, "_next", "_recorded", "_ended", "_policy_seeds", "_environment_seeds")

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
        made = make_several(bind_arguments(env, env_kwargs), num_envs)
        super().__init__(policy, cast(Any, buffer), len(made), hooks, policies, worker_index, weights)
        check_buffer(buffer, self.num_envs, several=True)
        self._policy_seeds, random_seeds, self._environment_seeds = (
            seeds_at(seeds, place) for place in (POLICY, RANDOM, ENVIRONMENT)
        )
        env_ids = range(worker_index * self.num_envs, (worker_index + 1) * self.num_envs)
        policy_of = PolicyOfAgents(policy_by_kind(made[0]) if policy_mapping is None else policy_mapping)
        self._adapters = [
            adapt_agents(one, env_id, seed_number(seeds_at(self._environment_seeds, env_id)), policy_of)
            for one, env_id in zip(made, env_ids, strict=True)
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
        """The groups that acted last in each environment; none if that step failed."""
        self._steps: dict[PolicyID, PolicyStep] = {}
        self._next = 0
        self._acts_at_random = False

    @property
    def environments(self) -> list[Any]:
        """The environments, in the order of their `env_id`."""
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
        for place, adapter in enumerate(self._adapters):
            for group in adapter.groups:
                observations[place].update(zip(group.agents, group.observations, strict=True))
                infos[place].update(zip(group.agents, group.infos, strict=True))
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
        # Episodes begin when an environment is first stepped.
        return bool(gym_reset_kwargs) and not any(adapter.in_episode for adapter in self._adapters)

    def _prepare(self, *, random: bool) -> None:
        if random != self._acts_at_random and (self._recorded or any(self._turns.values())):
            for actor in self._actors.values():
                common_unit([actor.action_unit, actor.drawn_unit])
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
            steps.action_unit = actor.drawn_unit if self._acts_at_random else actor.action_unit
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
        kept = batch if self.buffer is None else None
        return report(batch.count, counts, ended, time.perf_counter() - began, kept)

    def _collect_steps(self, wanted: int, *, random: bool, render: float | None) -> None:
        adapters = self._adapters
        if self._turns:
            self._record_turns(adapters, wanted - self._recorded)
        while self._recorded < wanted:
            count = min(wanted - self._recorded, len(adapters))
            chosen = adapters
            if count < len(adapters):
                chosen = [adapters[(self._next + i) % len(adapters)] for i in range(count)]
                self._next = (self._next + count) % len(adapters)
            for adapter in chosen:
                if not adapter.groups:
                    self._begin(adapter)
            self._step(chosen, render)
            if self._turns:
                self._record_turns(adapters, wanted - self._recorded)

    def _collect_episodes(self, wanted: int, *, random: bool, render: float | None) -> None:
        # Those under way began first.
        chosen = sorted(self._adapters, key=lambda adapter: not adapter.in_episode)[:wanted]
        begun = len(chosen)
        for adapter in chosen:
            if not adapter.in_episode:
                self._begin(adapter)
        going = chosen
        while going:
            self._step(going, render)
            for adapter in going:
                if not adapter.in_episode and begun < wanted:
                    self._begin(adapter)
                    begun += 1
            going = [adapter for adapter in going if adapter.in_episode]
        if self._turns:
            self._record_turns(chosen, None)

    def _begin(self, adapter: MultiAgentAdapter, **arguments: Any) -> None:
        adapter.reset(**arguments)
        self._actors.forget(adapter.env_id)

    def _step(self, adapters: Sequence[MultiAgentAdapter], render: float | None) -> None:
        """Ask every policy once for all agents that act next, let these act, and record the step."""
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
                found = self._let_act(adapter, actions)
                if adapter.together:
                    stepped.append(adapter)
                    outcomes.update(zip(groups, found, strict=True))
                else:
                    self._queue_turns(adapter, groups, steps, found)
        finally:
            # Steps that were made are recorded, even if another environment has failed.
            self._record(steps.values(), stepped, outcomes)
        self._acting, self._steps = acting, steps
        if render is not None:
            for adapter in adapters:
                adapter.environment.render()
            if render > 0:
                time.sleep(render)

    def _group(self, acting: list[list[AgentGroup]]) -> dict[PolicyID, PolicyStep]:
        """Begin the step of each policy whose agents act next."""
        by_policy: dict[PolicyID, list[AgentGroup]] = {}
        for group in chain.from_iterable(acting):
            by_policy.setdefault(group.policy_id, []).append(group)
        return {policy_id: PolicyStep(policy_id, self._actors[policy_id], own) for policy_id, own in by_policy.items()}

    def _let_act(self, adapter: MultiAgentAdapter, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        """Step an environment; if that fails, its episode is over, for nobody knows how far it got."""
        try:
            found = adapter.step(actions)
        except BaseException:
            adapter.abandon()
            if not adapter.together:
                self._turns[adapter.env_id].break_off()
            raise
        if self.count_steps is not None:
            self.count_steps(1)
        return found

    def _record(
        self,
        steps: Iterable[PolicyStep],
        adapters: Sequence[MultiAgentAdapter],
        outcomes: Mapping[AgentGroup, AgentOutcomes],
    ) -> None:
        """Record the rows of all policies, or of none if those of one do not fit: then the episodes are over."""
        try:
            self._recorder.append_together(filter(None, [step.end(outcomes) for step in steps]))
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
        """Let the turns of a step wait for their outcomes, and complete those that have one by now."""
        turns = self._turns[adapter.env_id]
        for group in groups:
            step = steps[group.policy_id]
            first = step.parts[group].start
            for place, agent in enumerate(group.agents):
                columns = {name: rows_of_block(block, [first + place]) for name, block in step.columns.items()}
                turns.begin(agent, Turn(group, place, columns, int(step.t[first])))
        turns.finish(outcomes)
        if not adapter.in_episode:
            turns.end()

    def _record_turns(self, adapters: Sequence[MultiAgentAdapter], limit: int | None) -> None:
        """Record turns that are complete, at most `limit`, environment by environment."""
        for adapter in adapters:
            turns = self._turns.get(adapter.env_id)
            if turns is None or (limit is not None and limit <= 0):
                continue
            for step in turns.complete(limit):
                for turn in step:
                    self._recorder.append(turn.policy_id, turn.columns, turn.streams, turn.t, turn.infos)
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
    """The step of all agents of a policy that act next: observations, streams and, once it was asked, actions.

    Where the same agents act in the next step, its observations are the next ones of this.

    Attributes
    ----------
    parts
        The rows of each group.
    """

    __slots__ = ("_actor", "actions", "columns", "groups", "observations", "parts", "policy_id", "streams", "t")

    def __init__(self, policy_id: PolicyID, actor: AgentActor, groups: list[AgentGroup]) -> None:
        self.policy_id = policy_id
        self.groups = groups
        self.parts: dict[AgentGroup, slice] = {}
        self.actions: Sequence[Any] = ()
        self.columns: dict[str, Block] = {}
        self._actor = actor
        seen: list[Any] = []
        streams: list[Streams] = []
        t: list[int] = []
        for group in groups:
            self.parts[group] = slice(len(t), len(t) + len(group.agents))
            seen += group.observations
            streams.append(Streams(group.eps_ids, group.env_ids, group.indices))
            t += [group.adapter.t] * len(group.agents)
        self.observations: Block = stack_rows(names.OBS, seen)
        self.streams = streams[0] if len(streams) == 1 else Streams(*map(np.concatenate, zip(*streams, strict=True)))
        self.t = np.array(t)

    def ask(self, *, random: bool) -> None:
        """Ask the policy for the actions of all of its agents, or draw them."""
        seen = self.observations
        decide = self._actor.draw if random else self._actor.act
        self.actions, self.columns = decide(self.groups, seen if isinstance(seen, np.ndarray) else None)
        self.columns[names.OBS] = seen

    def end(self, outcomes: Mapping[AgentGroup, AgentOutcomes]) -> Step | None:
        """Return the rows of agents that acted at once, and advance; None if there are no outcomes for them."""
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
            # Those of several environments are laid end to end.
            joined = [[*chain.from_iterable(part)] for part in zip(*map(outcomes.__getitem__, groups), strict=True)]
        _, seen, columns[names.REWARDS], columns[names.TERMINATEDS], columns[names.TRUNCATEDS], infos = joined
        columns[names.NEXT_OBS] = self.observations = stack_rows(names.NEXT_OBS, seen)
        self.t = self.t + 1
        return self.policy_id, columns, streams, t, infos


class Turn:
    """One agent's decision, and its outcome once the agent has seen that.

    Attributes
    ----------
    policy_id
        The agent's policy.
    columns
        The columns that are known by now: arrays of shape (1, ...), or lists of one value.
    streams, t
        Its episode, stream and time, shape (1,).
    step
        The environment step that it is part of: the episode and the time.
    infos
        Its info, in a list; None until the outcome is there.
    """

    __slots__ = ("columns", "infos", "policy_id", "step", "streams", "t")

    def __init__(self, group: AgentGroup, place: int, columns: dict[str, Block], t: int) -> None:
        self.policy_id = group.policy_id
        self.columns: dict[str, Block] = {**columns, names.EPS_DONE: [False]}
        own = slice(place, place + 1)
        self.streams = Streams(group.eps_ids[own], group.env_ids[own], group.indices[own])
        self.t = np.array([t])
        self.step = (group.adapter.eps_id, t)
        self.infos: list[Any] | None = None


class TurnQueue:
    """Turns of one environment that are not recorded, oldest first.

    An agent may see the outcome of its action after others have seen those of later ones. A fragment takes complete
    environment steps only: turns leave the queue in order, those of a step together, once all outcomes up to theirs are
    there.
    """

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()
        self._waiting: dict[Any, Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def clear(self) -> None:
        """Forget all turns."""
        self._turns.clear()
        self._waiting = {}

    def state_dict(self) -> Any:
        """Return the turns, for `load_state_dict`."""
        return copy.deepcopy((self._turns, self._waiting))

    def load_state_dict(self, state: Any) -> None:
        """Go on with the turns of another queue."""
        self._turns, self._waiting = copy.deepcopy(state)

    def break_off(self) -> None:
        """Drop turns that will never be complete."""
        steps = self.complete(None)
        self.clear()
        self._turns += chain.from_iterable(steps)

    def begin(self, agent: Any, turn: Turn) -> None:
        """Let a turn wait for its outcome."""
        self._turns.append(turn)
        self._waiting[agent] = turn

    def finish(self, outcomes: Sequence[AgentOutcomes]) -> None:
        """Complete the turns of agents that have seen their outcomes."""
        for (agent,), seen, rewards, terminateds, truncateds, infos in outcomes:
            turn = self._waiting.pop(agent)
            turn.columns |= {
                names.NEXT_OBS: stack_rows(names.NEXT_OBS, seen),
                names.REWARDS: rewards,
                names.TERMINATEDS: terminateds,
                names.TRUNCATEDS: truncateds,
            }
            turn.infos = list(infos)

    def end(self) -> None:
        """Mark the turns of the newest step as the last of their episode."""
        newest = self._turns[-1].step if self._turns else None
        for turn in takewhile(lambda turn: turn.step == newest, reversed(self._turns)):
            turn.columns[names.EPS_DONE] = [True]

    def complete(self, limit: int | None) -> list[list[Turn]]:
        """Take the turns of complete environment steps off the queue, step by step, at most `limit`."""
        found: list[list[Turn]] = []
        turns = self._turns
        while turns and len(found) != limit:
            first = turns[0].step
            step = [*takewhile(lambda turn, first=first: turn.step == first, turns)]  # type: ignore[misc]
            if any(turn.infos is None for turn in step):
                break
            found.append([turns.popleft() for _ in step])
        return found

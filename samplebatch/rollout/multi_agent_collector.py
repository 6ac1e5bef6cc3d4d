"""MultiAgentCollector: steps environments of several agents into multi-agent batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.multi_agent_builder import PolicyMapping
from samplebatch.env.agent_adapter import AgentOutcomes, MultiAgentAdapter
from samplebatch.env.agents import PolicyOfAgents, policy_by_kind
from samplebatch.env.as_environments import bind_arguments
from samplebatch.env.multi_agent import adapt_agents, make_several
from samplebatch.env.registry import MultiAgentEnvLike
from samplebatch.env.seeds import ENVIRONMENT, POLICY, RANDOM, as_seeds, seed_number, seeds_at
from samplebatch.errors import EnvironmentSpecError, PolicyNotFoundError, near_names
from samplebatch.names import PolicyID
from samplebatch.policy.action_map import ActionMap
from samplebatch.policy.agents import AgentActor, Noise, PolicyActors, PolicyAgents, RandomAgents, check_options
from samplebatch.policy.as_policy import CollectorPolicy, evaluation_mode, is_random
from samplebatch.rollout.agent_steps import JointStep, Outcomes, Share
from samplebatch.rollout.buffers import RemoteBuffer, as_remote, check_buffer
from samplebatch.rollout.collect_statistics import CollectStats, check_amounts, report
from samplebatch.rollout.postprocessing import Hook, check_hooks, postprocess
from samplebatch.rollout.recorder import Recorder, rows_of_block
from samplebatch.rollout.resuming import Resumable
from samplebatch.rollout.statistics import OpenReturns
from samplebatch.rollout.turns import Turn, TurnQueue

if TYPE_CHECKING:
    from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer


class MultiAgentCollector(Resumable):
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

    Parameters
    ----------
    env
        A PettingZoo environment of either interface, a `MultiAgentEnv` of RLlib's, the name of one or a function that
        makes one (see `environment_factory`); or a list of these, in which they may be mixed. Environments are not
        closed, unless by `close`.
    policy
        Anything that `as_policy` takes, or `"random"`, which honours an `action_mask` among the observations or infos;
        or a mapping of policy ids to one of these each.
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
    first_unroll_id
        The `unroll_id` of the first batch; those after it count on.
    first_env_id
        The `env_id` of the first environment; those after it count on.

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
    >>> collector = MultiAgentCollector("mpe2/simple_tag_v3", seed=1)
    >>> stats = collector.collect(n_step=40)
    >>> batch = stats.batch
    >>> batch.count, {policy: len(steps) for policy, steps in batch.policy_batches.items()}
    (40, {'adversary': 120, 'agent': 40})
    >>> stay = {"adversary": lambda obs: np.zeros(len(obs), int), "agent": "random"}
    >>> batch = MultiAgentCollector("mpe2/simple_tag_v3", policy=stay, num_envs=4, seed=1).collect(n_episode=6).batch
    >>> batch.count, batch["adversary"]["actions"].any()
    (150, np.False_)
    """

    _kept = ("_next", "_unroll_id", "_recorded", "_policy_seeds", "_environment_seeds")

    def __init__(
        self,
        env: MultiAgentEnvLike,
        policy: CollectorPolicy | Mapping[PolicyID, CollectorPolicy] = "random",
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
        first_unroll_id: int = 0,
        first_env_id: int = 0,
    ) -> None:
        self._hooks = check_hooks(hooks, policy if isinstance(policy, Mapping) else None, buffer=buffer)
        seeds = as_seeds(seed)
        made = make_several(bind_arguments(env, env_kwargs), num_envs)
        self._policy_seeds, random_seeds, self._environment_seeds = (
            seeds_at(seeds, place) for place in (POLICY, RANDOM, ENVIRONMENT)
        )
        self.num_envs = len(made)
        numbers = range(first_env_id, first_env_id + self.num_envs)
        policy_of = PolicyOfAgents(policy_by_kind(made[0]) if policy_mapping is None else policy_mapping)
        self._adapters = [
            adapt_agents(one, number, seed_number(seeds_at(self._environment_seeds, number)), policy_of)
            for one, number in zip(made, numbers, strict=True)
        ]
        self._turns = {adapter.env_id: TurnQueue() for adapter in self._adapters if not adapter.together}
        self._random = RandomAgents({number: seeds_at(random_seeds, number) for number in numbers})
        self.policy, self.buffer = policy, cast(Any, buffer)
        self._remote = as_remote(buffer)
        check_buffer(buffer, self.num_envs, several=True)
        self._evaluation_mode = evaluation_mode(policy)
        self._noise = check_options("exploration_noise", exploration_noise, policy)
        self._map_action = check_options("map_action", map_action, policy)
        self._open = OpenReturns()
        self._closed = False
        self._actors = PolicyActors(self._make_actor)
        self._recorder = Recorder(infos=infos)
        self._recorded = 0
        self._joint: JointStep | None = None
        self._next = 0
        self._unroll_id = first_unroll_id
        self.count_steps: Callable[[int], None] | None = None
        self.constants: dict[str, int] = {}

    @property
    def environments(self) -> list[Any]:
        """The environments, in the order of their `env_id`."""
        return [adapter.environment for adapter in self._adapters]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all environments."""
        if not self._closed:
            self._closed = True
            for adapter in self._adapters:
                adapter.environment.close()

    def reset(self, reset_buffer: bool = True, reset_stats: bool = True) -> None:
        """Empty the buffer, leave the episodes under way, and drop turns that no batch has.

        The next batch begins with new episodes.

        Parameters
        ----------
        reset_buffer
            Whether to empty the buffer, if there is one.
        reset_stats
            As for `Collector.reset`; there are no counts here.
        """
        if reset_buffer and self.buffer is not None:
            self.buffer.reset()
        for adapter in self._adapters:
            adapter.abandon()
        for turns in self._turns.values():
            turns.clear()
        self._open.clear()
        self._joint = None

    def _parts(self) -> Mapping[str, Any]:
        turns = {f"turns {env_id}": turns for env_id, turns in self._turns.items()}
        return {"recorder": self._recorder, "open": self._open, "random": self._random, "actors": self._actors, **turns}

    def _environment_parts(self) -> Sequence[Any]:
        return self._adapters

    def _begin_with_new_seeds(self) -> None:
        self.reset(reset_buffer=False)
        for adapter in self._adapters if self._unroll_id else ():
            adapter.reseed(seed_number(seeds_at(self._environment_seeds, adapter.env_id, self._unroll_id)))

    def collect(self, n_step: int | None = None, n_episode: int | None = None) -> CollectStats[MultiAgentBatch]:
        """Step the environments, and report on the steps of all agents.

        Parameters
        ----------
        n_step
            How many steps of all environments together: as many in each, give or take one.
        n_episode
            How many episodes end: those that begin first, so that long ones are as likely as short ones. Episodes that
            are under way come before new ones. No other episode is stepped.

        Returns
        -------
        CollectStats
            The report, with the batch in it unless there is a buffer; `policies` has one for each policy.

        Raises
        ------
        EnvironmentSpecError
            If an environment does not keep to its interface, which names the agent; or the collector has been closed.
        PolicyNotFoundError
            If an agent has no policy, or `policy` lacks it.
        PolicySpecError
            If a policy does not answer with actions.
        ColumnMismatchError
            If observations, actions or rewards of one policy's agents differ in shape, or in dtype beyond what can be
            widened.
        ArgumentError
            If not exactly one of the numbers is positive.
        """
        began = time.perf_counter()
        batch = self.collect_batch(n_step, n_episode)
        ended = self._open.add(batch)
        if self._hooks:
            batch = self.postprocess(batch, self._hooks)
        if self._remote is not None:
            self._remote.add_fragment(batch)
        elif self.buffer is not None:
            self.buffer.add(batch)
        counts = {policy_id: steps.count for policy_id, steps in batch.policy_batches.items()}
        kept = batch if self.buffer is None else None
        return report(batch.count, counts, ended, time.perf_counter() - began, kept)

    def collect_batch(self, n_step: int | None = None, n_episode: int | None = None) -> MultiAgentBatch:
        """Step the environments as `collect` does, and return the steps alone: no hooks, no buffer, no report."""
        check_amounts(n_step, n_episode)
        if self._closed:
            raise EnvironmentSpecError("the environments must be open to be stepped, and the collector has been closed")
        try:
            with self._evaluation_mode:
                if n_step:
                    self._collect_steps(n_step)
                else:
                    self._collect_episodes(n_episode or 0)
        finally:
            for adapter in self._adapters:
                adapter.keep_observations()
        recorded, self._recorded = self._recorded, 0
        constants = {names.UNROLL_ID: self._unroll_id, **self.constants}
        self._unroll_id += 1
        return MultiAgentBatch._of(self._recorder.take(constants), recorded)

    def postprocess(self, batch: MultiAgentBatch, hooks: Sequence[Hook]) -> MultiAgentBatch:
        """Apply hooks to the trajectories of a batch of this collector, which tells them the ids of agents."""
        agents = {
            (adapter.env_id, index): agent for adapter in self._adapters for index, agent in enumerate(adapter.agents)
        }
        return postprocess(batch, hooks, agents=agents)

    def _collect_steps(self, env_steps: int) -> None:
        adapters = self._adapters
        if self._turns:
            self._record_turns(adapters, env_steps - self._recorded)
        while self._recorded < env_steps:
            count = min(env_steps - self._recorded, len(adapters))
            chosen = adapters
            if count < len(adapters):
                chosen = [adapters[(self._next + i) % len(adapters)] for i in range(count)]
                self._next = (self._next + count) % len(adapters)
            for adapter in chosen:
                if not adapter.groups:
                    self._begin(adapter)
            self._step(chosen)
            if self._turns:
                self._record_turns(adapters, env_steps - self._recorded)

    def _collect_episodes(self, episodes: int) -> None:
        # Those under way began first.
        chosen = sorted(self._adapters, key=lambda adapter: not adapter.in_episode)[:episodes]
        begun = len(chosen)
        for adapter in chosen:
            if not adapter.in_episode:
                self._begin(adapter)
        going = chosen
        while going:
            self._step(going)
            for adapter in going:
                if not adapter.in_episode and begun < episodes:
                    self._begin(adapter)
                    begun += 1
            going = [adapter for adapter in going if adapter.in_episode]
        if self._turns:
            self._record_turns(chosen, None)

    def _begin(self, adapter: MultiAgentAdapter) -> None:
        adapter.reset()
        self._actors.forget(adapter.env_id)

    def _step(self, adapters: Sequence[MultiAgentAdapter]) -> None:
        """Ask every policy once for all agents that act next, let these act, and record the step."""
        acting = [adapter.groups for adapter in adapters]
        joint, self._joint = self._joint, None
        if joint is None or acting != joint.acting:
            joint = JointStep(acting, self._actors)
        for step in joint.policy_steps:
            step.ask()
        outcomes: dict[MultiAgentAdapter, list[AgentOutcomes]] = {}
        try:
            for adapter, shares in zip(adapters, joint.shares, strict=True):
                found = self._let_act(adapter, [step.actions[part] for _, step, part in shares])
                if adapter.together:
                    outcomes[adapter] = found
                else:
                    self._queue_turns(adapter, shares, found)
        finally:
            # Steps that were made are recorded, even if another environment has failed.
            self._record(joint, outcomes)
        self._joint = joint

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

    def _record(self, joint: JointStep, outcomes: Outcomes) -> None:
        """Record the rows of all policies, or of none if those of one do not fit: then the episodes are over."""
        try:
            self._recorder.append_together(
                [own for step in joint.policy_steps if (own := step.end(outcomes)) is not None]
            )
        except BaseException:
            for adapter in outcomes:
                adapter.abandon()
            raise
        self._recorded += len(outcomes)

    def _queue_turns(
        self,
        adapter: MultiAgentAdapter,
        shares: Sequence[Share],
        outcomes: Sequence[AgentOutcomes],
    ) -> None:
        """Let the turns of a step wait for their outcomes, and complete those that have one by now."""
        turns = self._turns[adapter.env_id]
        for group, step, part in shares:
            for place, agent in enumerate(group.agents):
                columns = {name: rows_of_block(block, [part.start + place]) for name, block in step.columns.items()}
                turns.begin(agent, Turn(group, place, columns, int(step.t[part.start])))
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
                limit = None if limit is None else limit - 1

    def _make_actor(self, policy_id: PolicyID) -> AgentActor:
        policy = self.policy
        if isinstance(policy, Mapping):
            if policy_id not in policy:
                raise PolicyNotFoundError(f"policy must have {policy_id!r}; {near_names(policy_id, policy)}")
            policy = policy[policy_id]
        mapped = self._map_action.get(policy_id) if isinstance(self._map_action, Mapping) else self._map_action
        seeds = seeds_at(self._policy_seeds, *names.policy_seed(policy_id))
        if is_random(policy):
            if mapped != "scale":
                return self._random
            env_ids = [adapter.env_id for adapter in self._adapters]
            return RandomAgents({env_id: seeds_at(seeds, env_id) for env_id in env_ids}, map_action=mapped)
        noise = self._noise.get(policy_id, False) if isinstance(self._noise, Mapping) else self._noise
        return PolicyAgents(policy, seeds, exploration_noise=noise, map_action=mapped)

"""MultiAgentCollector: steps environments of several agents into multi-agent batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.multi_agent_builder import PolicyMapping
from samplebatch.env.agents import policy_by_kind
from samplebatch.env.pettingzoo import Run, run_of
from samplebatch.env.registry import make_environment
from samplebatch.env.teams import Key, Team
from samplebatch.errors import PolicyNotFoundError, PolicySpecError, near_names
from samplebatch.policy.deciding import Decider, Noise, PolicyDecider, RandomDecider, seed_number
from samplebatch.rollout.fragment_rows import FragmentRows, PolicyRows
from samplebatch.rollout.places import Forecast
from samplebatch.rollout.postprocessing import Hook, postprocess

_RANDOM = "random"
_NO_ROWS = FragmentRows(Forecast(None, {}, {}))


class MultiAgentCollector:
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

    In a batch the steps of each agent lie together, in order. An episode goes on in the next batch if it has not ended.
    Where agents take turns, a step goes into a batch once all agents that acted until then have seen what came of it.

    Parameters
    ----------
    environment
        A PettingZoo environment of either interface, several, or the name of one or a function that makes one (see
        `environment_factory`). They are not closed, unless by `close`.
    policies
        Who decides, by policy id: anything that `as_policy` takes, or `"random"`, which honours an `action_mask` among
        the observations or infos. Or one for all of them. By default all act at random.
    policy_mapping
        The policy that acts for an agent, by agent id. By default one policy for each kind of agent (see
        `policy_by_kind`).
    envs
        How many environments to make, where a name or a function is given.
    exploration_noise
        Whether a policy's `add_exploration_noise` is called on what it decided; or what is called, on actions and
        batch, in its place; or one of these by policy id, where those that are not named get no noise. Policies that
        are `"random"` get none in any case.
    seed
        Seed of environments and actions; the same seed gives the same data, `eps_id` aside. What happens in the
        environment of one `env_id` does not depend on how many others there are, as long as policies see to it.
    hooks
        What is applied to each trajectory, to the part of it that a batch has: see `postprocess`.
    first_unroll_id
        The `unroll_id` of the first batch; those after it count on.
    first_env_id
        The `env_id` of the first environment; those after it count on.

    Raises
    ------
    EnvironmentSpecError
        If there is no such environment, or it is none of several agents.
    PolicyNotFoundError
        If `exploration_noise` names a policy that `policies` lacks.
    PolicySpecError
        If `exploration_noise` names a policy that is `"random"`.
    ValueError
        If `envs` is not positive.

    Examples
    --------
    >>> collector = MultiAgentCollector("mpe2/simple_tag_v3", seed=1)
    >>> batch = collector.collect(40)
    >>> batch.count, {policy: len(steps) for policy, steps in batch.policy_batches.items()}
    (40, {'adversary': 120, 'agent': 40})
    >>> stay = {"adversary": lambda obs: np.zeros(len(obs), int), "agent": "random"}
    >>> batch = MultiAgentCollector("mpe2/simple_tag_v3", policies=stay, envs=4, seed=1).collect(episodes=6)
    >>> batch.count, batch["adversary"]["actions"].any()
    (150, np.False_)
    """

    def __init__(
        self,
        environment: Any,
        *,
        policies: Mapping[str, Any] | Any = _RANDOM,
        policy_mapping: PolicyMapping | None = None,
        envs: int = 1,
        exploration_noise: Noise | Mapping[str, Noise] = False,
        seed: int | np.random.SeedSequence | None = None,
        hooks: Sequence[Hook] = (),
        first_unroll_id: int = 0,
        first_env_id: int = 0,
    ) -> None:
        seeds = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        made = _made(environment, envs)
        self._policy_seeds, random_seeds, environment_seeds = (_child(seeds, place) for place in range(3))
        numbers = range(first_env_id, first_env_id + len(made))
        self._mapping = policy_by_kind(made[0]) if policy_mapping is None else policy_mapping
        self._runs = [
            run_of(one, number, seed_number(_child(environment_seeds, number)), self._mapped)
            for one, number in zip(made, numbers, strict=True)
        ]
        self._all_together = all(run.together for run in self._runs)
        self._random = RandomDecider({number: _child(random_seeds, number) for number in numbers})
        self._policies = policies
        self._noise = _noise_by_policy(exploration_noise, policies)
        self._deciders: dict[str, Decider] = {}
        self._is_open = False
        self._rows = _NO_ROWS
        self._ranks: dict[int, int] = {}
        self._last: dict[str, dict[Key, int]] = {}
        self._written = dict.fromkeys(numbers, 0)
        self._last_written: dict[int, int] = {}
        self._hooks = tuple(hooks)
        self._next = 0
        self._unroll_id = first_unroll_id

    @property
    def environments(self) -> list[Any]:
        """The environments, in the order of their `env_id`."""
        return [run.environment for run in self._runs]

    def close(self) -> None:
        """Close all environments."""
        for run in self._runs:
            run.environment.close()

    def reset(self) -> None:
        """Forget the episodes under way, and what no batch has of them: the next batch begins with new ones."""
        for run in self._runs:
            run.abandon()

    def collect(self, env_steps: int | None = None, *, episodes: int | None = None) -> MultiAgentBatch:
        """Make steps, and return what all agents saw and did in them.

        Parameters
        ----------
        env_steps
            How many steps of all environments together the batch has: as many in each, give or take one.
        episodes
            How many episodes end in the batch: those that begin first, so that long ones are as likely as short ones.
            Episodes that are under way come before new ones. No other episode is stepped.

        Raises
        ------
        EnvironmentSpecError
            If an environment does not keep to its interface; names the agent.
        PolicyNotFoundError
            If an agent has no policy, or `policies` lacks it.
        PolicySpecError
            If a policy does not answer with actions.
        ColumnMismatchError
            If observations, actions or rewards of one policy's agents differ in shape, or in dtype beyond what can be
            widened.
        ValueError
            If not exactly one of the numbers is given, or it is not positive.
        """
        given = [number for number in (env_steps, episodes) if number is not None]
        if len(given) != 1 or given[0] < 1:
            raise ValueError(f"one of env_steps and episodes must be given, at least 1, got {env_steps} and {episodes}")
        if not self._is_open:
            self._rows = self._opened(Forecast(self._shares(env_steps), self._last, self._last_written))
            self._is_open = True
            for run in self._runs:
                for team in run.teams:
                    team.owner = None
        try:
            self._ranks = {run.env_id: rank for rank, run in enumerate(self._runs)}
            if env_steps is not None:
                self._collect_steps(env_steps)
            else:
                self._collect_episodes(given[0])
        finally:
            for run in self._runs:
                run.keep()
        batch = self._batch(by_environment=env_steps is None)
        if not self._hooks:
            return batch
        agents = {(run.env_id, index): agent for run in self._runs for index, agent in enumerate(run.agents)}
        return postprocess(batch, self._hooks, agents=agents)

    def _opened(self, forecast: Forecast) -> FragmentRows:
        """Begin a batch."""
        return FragmentRows(forecast)

    def _stamps(self) -> dict[str, int]:
        """Return what is the same in all rows of the batch."""
        return {names.UNROLL_ID: self._unroll_id}

    def _batch(self, *, by_environment: bool) -> MultiAgentBatch:
        """Make a batch of what is written down; agents in the order in which they acted, or by environment."""
        rows, written = self._rows, self._written
        for run in self._runs:
            # Those of an environment that raised, and was not stepped since.
            written[run.env_id] += run.written
            run.written = 0
        self._is_open, self._rows, self._written = False, _NO_ROWS, dict.fromkeys(written, 0)
        self._last, self._last_written = rows.counts(), written
        batch = MultiAgentBatch(
            rows.build(self._stamps(), self._ranks if by_environment else None), sum(written.values())
        )
        self._unroll_id += 1
        return batch

    def _shares(self, env_steps: int | None) -> dict[int, int] | None:
        """Share steps out to the environments, which take turns; None if it is not known how many there are."""
        if env_steps is None:
            return None
        count = len(self._runs)
        return {
            run.env_id: (env_steps + count - 1 - (place - self._next) % count) // count
            for place, run in enumerate(self._runs)
        }

    def _collect_steps(self, env_steps: int) -> None:
        runs = self._runs
        left = env_steps - self._deliver(runs, env_steps)
        while left > 0:
            count = min(left, len(runs))
            chosen = [runs[(self._next + i) % len(runs)] for i in range(count)]
            self._next = (self._next + count) % len(runs)
            for run in chosen:
                if not run.in_episode:
                    self._begin(run)
            self._step(chosen)
            left -= self._deliver(runs, left)

    def _collect_episodes(self, episodes: int) -> None:
        # Those under way began first.
        chosen = sorted(self._runs, key=lambda run: not run.in_episode)[:episodes]
        begun = len(chosen)
        self._ranks = {run.env_id: rank for rank, run in enumerate(chosen)}
        for run in chosen:
            if not run.in_episode:
                self._begin(run)
        going = chosen
        while going:
            self._step(going)
            for run in going:
                if not run.in_episode and begun < episodes:
                    self._begin(run)
                    begun += 1
            going = [run for run in going if run.in_episode]
        self._deliver(chosen)

    def _begin(self, run: Run) -> None:
        run.begin()
        for decider in self._deciders.values():
            decider.forget(run.env_id)

    def _step(self, runs: Sequence[Run]) -> None:
        """Let all agents of some runs act that are to."""
        groups: dict[str, list[Team]] = {}
        new: list[Team] = []
        for run in runs:
            for team in run.teams:
                if team.owner is None and run.together:
                    new.append(team)
                group = groups.get(team.policy_id)
                if group is None:
                    groups[team.policy_id] = [team]
                else:
                    group.append(team)
        if new:
            self._rows.place(sorted(new, key=lambda team: self._ranks[team.run.env_id]))
        for policy_id, teams in groups.items():
            self._decide(policy_id, teams)
        for run in runs:
            try:
                run.act()
            except BaseException:
                # How far the environment got is not known.
                run.break_off()
                raise

    def _decide(self, policy_id: str, teams: list[Team]) -> None:
        """Let the agents of one policy decide, and write down what they see and do if they act together."""
        together = teams
        if not self._all_together:
            together = [team for team in teams if team.run.together]
            teams = [*together, *(team for team in teams if not team.run.together)]
        rows: PolicyRows | None = together[0].owner if together else None
        seen = None if rows is None else rows.begin(together)
        decider = self._deciders.get(policy_id) or self._decider(policy_id)
        decided = decider.decide(teams, seen if len(together) == len(teams) else None)
        at, actions = 0, decided.actions
        for team in teams:
            team.decided, team.at = decided, at
            at += len(team.agents)
            team.actions = actions[team.at : at]
        if rows is not None:
            rows.decided(decided)

    def _deliver(self, runs: Sequence[Run], most: int | None = None) -> int:
        """Count the steps that were written down, write down those that are whole by now, and return how many."""
        delivered = 0
        for run in runs:
            steps, run.written = run.written, 0
            while run.whole and delivered + steps != most:
                team, row = run.whole.popleft()
                self._rows.of(team.policy_id).add(team.keys[0], row)
                steps += 1
            self._written[run.env_id] += steps
            delivered += steps
        return delivered

    def _mapped(self, agent: Any) -> str:
        mapping = self._mapping
        if not isinstance(mapping, Mapping):
            return mapping(agent)
        if agent not in mapping:
            raise PolicyNotFoundError(
                f"agent {agent!r} must have a policy in policy_mapping; {near_names(agent, mapping)}"
            )
        return mapping[agent]

    def _decider(self, policy_id: str) -> Decider:
        policy = self._policies
        if isinstance(policy, Mapping):
            if policy_id not in policy:
                raise PolicyNotFoundError(f"policies must have {policy_id!r}; {near_names(policy_id, policy)}")
            policy = policy[policy_id]
        if isinstance(policy, str) and policy == _RANDOM:
            made: Decider = self._random
        else:
            noise = self._noise.get(policy_id, False) if isinstance(self._noise, Mapping) else self._noise
            made = PolicyDecider(policy, _child(self._policy_seeds, *policy_id.encode()), exploration_noise=noise)
        self._deciders[policy_id] = made
        return made


def _made(environment: Any, envs: int) -> list[Any]:
    if envs < 1:
        raise ValueError(f"envs must be at least 1, got {envs}")
    if isinstance(environment, (list, tuple)):
        return list(environment)
    if isinstance(environment, (str, type)) or not hasattr(environment, "step"):
        return [make_environment(environment) for _ in range(envs)]
    return [environment]


def _noise_by_policy(noise: Noise | Mapping[str, Noise], policies: Any) -> Noise | Mapping[str, Noise]:
    """Check that all policies that are to explore are there, and are none that act at random."""
    if isinstance(noise, Mapping):
        for policy_id, wanted in noise.items():
            if isinstance(policies, Mapping) and policy_id not in policies:
                raise PolicyNotFoundError(
                    f"exploration_noise must name policies, got {policy_id!r}; {near_names(policy_id, policies)}"
                )
            policy = policies[policy_id] if isinstance(policies, Mapping) else policies
            if wanted and isinstance(policy, str) and policy == _RANDOM:
                raise PolicySpecError(f"policy {policy_id!r} must decide by itself to explore, and acts at random")
    return noise


def _child(seeds: np.random.SeedSequence, *place: int) -> np.random.SeedSequence:
    """Return the seeds of a place, whatever else was spawned before."""
    return np.random.SeedSequence(seeds.entropy, spawn_key=(*seeds.spawn_key, *place), pool_size=seeds.pool_size)

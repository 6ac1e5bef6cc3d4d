"""MultiAgentCollector: steps one environment into multi-agent batches."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.multi_agent_builder import MultiAgentBatchBuilder, PolicyMapping
from samplebatch.errors import EnvironmentSpecError
from samplebatch.rollout.agents import agent_positions, policy_by_kind
from samplebatch.rollout.environments import ParallelEnvironment

_DTYPES = {names.REWARDS: np.float64, names.TERMINATEDS: np.bool_, names.TRUNCATEDS: np.bool_}
"""Fixed, so that a reward of 0 in one fragment and 0.5 in the next can be joined."""


class MultiAgentCollector:
    """Step a parallel environment with random actions, and keep every step of every agent.

    The batches have the columns `obs`, `new_obs`, `actions`, `rewards` (float64), `terminateds`, `truncateds`,
    `infos`, and

    - `eps_id`: the episode, 63 random bits, unlike every other process's and every earlier run's, whatever the seed;
    - `agent_index`: the agent's place in the environment's `possible_agents`, those that it does not name after them;
    - `t`: steps since the episode began, for all agents alike, so that those who join late line up with the others;
    - `unroll_id`: the batch that the steps were collected in.

    An episode goes on in the next batch if it has not ended. Agents may come and go within it.

    Parameters
    ----------
    environment
        The environment. It is stepped, and not closed.
    policy_mapping
        The policy that acts for an agent, by agent id. By default one policy for each kind of agent (see
        `policy_by_kind`).
    seed
        Seed of the environment and of the actions; the same seed gives the same data, `eps_id` aside.
    first_unroll_id
        The `unroll_id` of the first batch; those after it count on.

    Examples
    --------
    >>> from samplebatch.rollout.environments import make_environment
    >>> collector = MultiAgentCollector(make_environment("mpe2/simple_tag_v3"), seed=1)
    >>> batch = collector.collect(40)
    >>> batch.count, {policy: len(steps) for policy, steps in batch.policy_batches.items()}
    (40, {'adversary': 120, 'agent': 40})
    """

    def __init__(
        self,
        environment: ParallelEnvironment,
        *,
        policy_mapping: PolicyMapping | None = None,
        seed: int | np.random.SeedSequence | None = None,
        first_unroll_id: int = 0,
    ) -> None:
        seeds = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        environment_seeds, self._action_seeds = seeds.spawn(2)
        self._environment = environment
        self._seed: int | None = _number(environment_seeds)
        self._builder = MultiAgentBatchBuilder(
            policy_by_kind(environment) if policy_mapping is None else policy_mapping, dtypes=_DTYPES
        )
        self._positions = agent_positions(environment)
        self._spaces: dict[Any, Any] = {}
        self._observations: dict[Any, Any] = {}
        self._eps_id = 0
        self._t = 0
        self._in_episode = False
        self._unroll_id = first_unroll_id

    def collect(self, env_steps: int) -> MultiAgentBatch:
        """Make so many steps of the environment, and return what all agents saw and did in them.

        Raises
        ------
        EnvironmentSpecError
            If the environment does not keep to the parallel interface; names the agent.
        ColumnMismatchError
            If observations, actions or rewards of one policy's agents differ in shape, or in dtype beyond what can be
            widened.
        """
        for _ in range(env_steps):
            self._step()
        batch = self._builder.build_and_reset()
        for steps in batch.policy_batches.values():
            steps[names.UNROLL_ID] = np.full(len(steps), self._unroll_id)
        self._unroll_id += 1
        return batch

    def _begin_episode(self) -> None:
        # Only the first reset is seeded: the environment's generator then runs on, and no two episodes are alike.
        observations, _ = self._environment.reset(seed=self._seed)
        if not self._environment.agents:
            raise EnvironmentSpecError("an environment must have agents after reset, and it has none")
        self._seed = None
        self._observations = _kept(observations)
        self._eps_id = secrets.randbits(63)
        self._t = 0
        self._in_episode = True

    def _step(self) -> None:
        if not self._in_episode:
            self._begin_episode()
        environment, before = self._environment, self._observations
        agents = list(environment.agents)
        _check("an observation", before, agents)
        actions = {agent: self._space(agent).sample() for agent in agents}
        after, rewards, terminations, truncations, infos = environment.step(actions)
        _check("an observation", after, agents)
        _check("a reward", rewards, agents)
        _check("a termination flag", terminations, agents)
        _check("a truncation flag", truncations, agents)
        add_values, positions = self._builder.add_values, self._positions
        for agent in agents:
            add_values(
                agent,
                obs=before[agent],
                new_obs=after[agent],
                actions=actions[agent],
                rewards=rewards[agent],
                terminateds=bool(terminations[agent]),
                truncateds=bool(truncations[agent]),
                infos=infos.get(agent),
                eps_id=self._eps_id,
                agent_index=positions[agent],
                t=self._t,
            )
        self._builder.end_env_step()
        self._t += 1
        self._observations = _kept(after)
        ended = all(terminations[agent] or truncations[agent] for agent in agents)
        self._in_episode = bool(environment.agents) and not (ended and set(environment.agents) <= set(agents))

    def _space(self, agent: Any) -> Any:
        space = self._spaces.get(agent)
        if space is None:
            self._spaces[agent] = space = self._environment.action_space(agent)
            space.seed(_number(self._action_seeds.spawn(1)[0]))
            self._positions.setdefault(agent, len(self._positions))
        return space


def _number(seeds: np.random.SeedSequence) -> int:
    return int(seeds.generate_state(1)[0])


def _kept(value: Any) -> Any:
    """Copy observations that the environment may overwrite in its next step."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    if type(value) is tuple or type(value) is list:
        return type(value)(_kept(item) for item in value)
    return value


def _check(part: str, by_agent: Mapping[Any, Any], agents: Iterable[Any]) -> None:
    for agent in agents:
        if agent not in by_agent:
            raise EnvironmentSpecError(
                f"an environment must give {part} for every agent that acts, and gave none for {agent!r}"
            )

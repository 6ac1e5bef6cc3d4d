"""Runs: one multi-agent environment each, its episode under way, and the steps that are whole.

A step is whole once every agent that acted in it has seen what came of it. Where agents act together that is at once;
where they take turns, an agent sees it at its next turn. Steps are handed out whole and in order.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from samplebatch import names
from samplebatch.errors import EnvironmentSpecError
from samplebatch.rollout.agents import agent_positions
from samplebatch.rollout.environments import AECEnvironment, ParallelEnvironment, environment_kind
from samplebatch.rollout.episode_ends import EPS_DONE

Row = dict[str, Any]
"""What one agent saw and did in one step, by column."""

_OPEN: Any = object()
"""Stands in a row for what the agent has not seen yet."""


class Waiting(NamedTuple):
    """An agent that is to act."""

    agent: Any
    observation: Any
    info: Any
    begins: bool
    """Whether it has not acted yet, since the episode began or it came back to life."""


class Decision(NamedTuple):
    """What an agent does."""

    action: Any
    """The action as the environment takes it."""
    kept: Any
    """The action as the row has it: as the policy gave it."""
    extras: dict[str, Any]
    """Further columns, such as the action's probability."""


class Run(ABC):
    """An environment, and the episode that is under way in it.

    Parameters
    ----------
    environment
        The environment.
    env_id
        Its number, which its rows carry.
    seed
        Seed of its first reset. Its generator then runs on, so that no two episodes are alike.

    Attributes
    ----------
    waiting
        The agents that are to act; none unless an episode is under way.
    whole
        The steps that are whole, in order: the row of every agent that acted in them.
    """

    def __init__(self, environment: Any, env_id: int, seed: int) -> None:
        self.environment = environment
        self.env_id = env_id
        self.waiting: list[Waiting] = []
        self.whole: deque[list[tuple[Any, Row]]] = deque()
        self._seed: int | None = seed
        self._positions = agent_positions(environment)
        self._eps_id = 0
        self._t = 0

    @property
    def agents(self) -> list[Any]:
        """All agents that there may be or have been, by their `agent_index`."""
        return list(self._positions)

    @property
    def in_episode(self) -> bool:
        """Whether an episode is under way."""
        return bool(self.waiting)

    def begin(self) -> None:
        """Begin an episode.

        Raises
        ------
        EnvironmentSpecError
            If there is nobody to act in it.
        """
        seed, self._seed = self._seed, None
        self._eps_id = secrets.randbits(63)
        self._t = 0
        self._reset(seed)
        if not self.waiting:
            raise EnvironmentSpecError("an environment must have agents after reset, and it has none")

    def abandon(self) -> None:
        """Forget the episode that is under way, and what no batch has of it."""
        self.waiting = []
        self.whole.clear()

    @abstractmethod
    def _reset(self, seed: int | None) -> None:
        """Reset the environment, and find out who is to act."""

    @abstractmethod
    def act(self, decisions: Mapping[Any, Decision]) -> None:
        """Let every agent that is waiting act.

        Raises
        ------
        EnvironmentSpecError
            If the environment does not keep to its interface; names the agent.
        """

    def _row(self, waiting: Waiting, decision: Decision) -> Row:
        """Begin an agent's row."""
        position = self._positions.setdefault(waiting.agent, len(self._positions))
        return {
            names.OBS: waiting.observation,
            names.NEXT_OBS: _OPEN,
            names.ACTIONS: decision.kept,
            names.REWARDS: _OPEN,
            names.TERMINATEDS: _OPEN,
            names.TRUNCATEDS: _OPEN,
            names.INFOS: _OPEN,
            **decision.extras,
            names.EPS_ID: self._eps_id,
            names.ENV_ID: self.env_id,
            names.AGENT_INDEX: position,
            names.T: self._t,
            EPS_DONE: False,
        }


class ParallelRun(Run):
    """A run of an environment whose agents act together."""

    environment: ParallelEnvironment

    def _reset(self, seed: int | None) -> None:
        observations, infos = self.environment.reset(seed=seed)
        self._wait(self.environment.agents, observations, infos, ())

    def _wait(
        self,
        agents: Iterable[Any],
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        going_on: Collection[Any],
    ) -> None:
        agents = list(agents)
        _check("an observation", observations, agents)
        self.waiting = [
            Waiting(agent, _kept(observations[agent]), infos.get(agent, {}), agent not in going_on) for agent in agents
        ]

    def act(self, decisions: Mapping[Any, Decision]) -> None:
        """Let every agent act at once."""
        environment, waiting = self.environment, self.waiting
        agents = [waits.agent for waits in waiting]
        actions = {agent: decisions[agent].action for agent in agents}
        observations, rewards, terminations, truncations, infos = environment.step(actions)
        _check("an observation", observations, agents)
        _check("a reward", rewards, agents)
        _check("a termination flag", terminations, agents)
        _check("a truncation flag", truncations, agents)
        rows = []
        staying = environment.agents
        going_on = {agent for agent in agents if not (terminations[agent] or truncations[agent])}
        ended = not staying or (not going_on and set(staying) <= set(agents))
        for agent, waits in zip(agents, waiting, strict=True):
            row = self._row(waits, decisions[agent])
            row[names.NEXT_OBS] = _kept(observations[agent])
            row[names.REWARDS] = rewards[agent]
            row[names.TERMINATEDS] = bool(terminations[agent])
            row[names.TRUNCATEDS] = bool(truncations[agent])
            row[names.INFOS] = infos.get(agent, {})
            row[EPS_DONE] = ended
            rows.append((agent, row))
        self.whole.append(rows)
        self._t += 1
        self._wait(() if ended else staying, observations, infos, going_on)


class AECRun(Run):
    """A run of an environment whose agents take turns.

    Every turn of a living agent is a step. Its row is whole at the agent's next turn, be it a dead agent's last: the
    reward is then what it got since, that of the others' turns included. What an agent gets before it acts for the
    first time counts with its first action.
    """

    environment: AECEnvironment

    def __init__(self, environment: AECEnvironment, env_id: int, seed: int) -> None:
        super().__init__(environment, env_id, seed)
        self._steps: deque[tuple[Any, Row]] = deque()
        self._open: dict[Any, Row] = {}
        self._early: dict[Any, Any] = {}

    def abandon(self) -> None:
        """Forget the episode that is under way, and what no batch has of it."""
        super().abandon()
        self._steps.clear()
        self._open = {}

    def _reset(self, seed: int | None) -> None:
        self._early = {}
        self.environment.reset(seed=seed)
        self._go_on()

    def act(self, decisions: Mapping[Any, Decision]) -> None:
        """Let the agent act whose turn it is."""
        (waits,) = self.waiting
        decision = decisions[waits.agent]
        row = self._row(waits, decision)
        self.environment.step(decision.action)
        self._open[waits.agent] = row
        self._steps.append((waits.agent, row))
        self._t += 1
        self._go_on()

    def _go_on(self) -> None:
        """Take the dead out, and find out whose turn it is."""
        environment = self.environment
        self.waiting = []
        while environment.agents and not self.waiting:
            agent = environment.agent_selection
            observation, reward, terminated, truncated, info = environment.last()
            if observation is None:
                raise EnvironmentSpecError(
                    f"an environment must give an observation for every agent whose turn it is, and gave none for "
                    f"{agent!r}"
                )
            observation = _kept(observation)
            begins = not self._close(agent, observation, reward, bool(terminated), bool(truncated), info)
            if not (terminated or truncated):
                self.waiting = [Waiting(agent, observation, info, begins)]
                break
            environment.step(None)
            if agent in environment.agents:
                raise EnvironmentSpecError(
                    f"an environment must take a dead agent out when it is stepped with None, and kept {agent!r}"
                )
        if not self.waiting and self._open:
            raise EnvironmentSpecError(
                "an environment must let every agent that acted see what came of it before the episode ends, and did "
                f"not let {next(iter(self._open))!r}"
            )
        if not self.waiting and self._steps:
            self._steps[-1][1][EPS_DONE] = True
        while self._steps and self._steps[0][1][names.NEXT_OBS] is not _OPEN:
            self.whole.append([self._steps.popleft()])

    def _close(self, agent: Any, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> bool:
        """Complete the row of an agent's last action; if there is none, say so, and keep the reward for the first."""
        row = self._open.pop(agent, None)
        if row is None:
            self._early[agent] = reward
            return False
        row[names.NEXT_OBS] = observation
        row[names.REWARDS] = reward + self._early.pop(agent, 0)
        row[names.TERMINATEDS] = terminated
        row[names.TRUNCATEDS] = truncated
        row[names.INFOS] = info
        return True


def run_of(environment: Any, env_id: int, seed: int) -> Run:
    """Make the run of an environment.

    Raises
    ------
    EnvironmentSpecError
        If it is none of several agents.
    """
    kind = environment_kind(environment)
    if kind == "parallel":
        return ParallelRun(environment, env_id, seed)
    if kind == "aec":
        return AECRun(environment, env_id, seed)
    raise EnvironmentSpecError(
        f"an environment of several agents must have one of PettingZoo's interfaces, got a "
        f"{type(environment).__name__}, which Collector steps"
    )


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

"""Runs: one multi-agent environment each, its episode under way, and the steps that are whole.

A step is whole once every agent that acted in it has seen what came of it. Where agents act together that is at once,
and it is written down at once; where they take turns, an agent sees it at its next turn, and until then its row is kept
here. Steps are handed out whole and in order.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.column.exact import BOOL, BOOLS, FLOAT, FLOATS, Refuse, exact_number
from samplebatch.env.agents import agent_positions
from samplebatch.env.registry import AECEnvironment, ParallelEnvironment, environment_kind
from samplebatch.env.teams import Outcome, Team
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, EnvironmentSpecError

Row = dict[str, Any]
"""What one agent saw and did in one step, by column."""

_OPEN: Any = object()
"""Stands in a row for what the agent has not seen yet."""

_NOTHING: dict[str, Any] = {}


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
    policy_of
        The policy that acts for an agent.

    Attributes
    ----------
    teams
        The agents that are to act, by policy; none unless an episode is under way.
    whole
        The rows that are whole and not written down, in order, with their agents' teams.
    written
        Steps that were written down since somebody set it to zero.
    eps_id, t
        The episode, and the environment steps since it began.
    """

    together: bool
    """Whether agents act together, rather than take turns."""

    def __init__(self, environment: Any, env_id: int, seed: int, policy_of: Callable[[Any], str]) -> None:
        self.environment = environment
        self.env_id = env_id
        self.teams: list[Team] = []
        self.whole: deque[tuple[Team, Row]] = deque()
        self.written = self.eps_id = self.t = 0
        self._seed: int | None = seed
        self._positions = agent_positions(environment)
        self._policy_of = policy_of
        self._policies: dict[Any, str] = {}

    @property
    def agents(self) -> list[Any]:
        """All agents that there may be or have been, by their `agent_index`."""
        return list(self._positions)

    @property
    def in_episode(self) -> bool:
        """Whether an episode is under way."""
        return bool(self.teams)

    def begin(self) -> None:
        """Begin an episode.

        Raises
        ------
        EnvironmentSpecError
            If there is nobody to act in it.
        """
        seed, self._seed = self._seed, None
        self.eps_id = secrets.randbits(63)
        self.t = 0
        self._reset(seed)
        if not self.teams:
            raise EnvironmentSpecError("an environment must have agents after reset, and it has none")

    def abandon(self) -> None:
        """Forget the episode that is under way, and what no batch has of it."""
        self.break_off()
        self.whole.clear()

    def break_off(self) -> None:
        """End the episode that is under way, whose environment has failed, and keep the rows that are complete."""
        self.teams = []

    def keep(self) -> None:
        """Copy the last observations, which the environment may write over."""
        for team in self.teams:
            team.observations = list(map(kept, team.observations))

    def refusing(self, agent: Any) -> Refuse:
        """Make errors for values that the environment returned for an agent in the newest step."""
        where = f"for agent {agent!r} from environment {self.env_id} in step {self.t}"
        return lambda sentence, _: EnvironmentSpecError(f"{sentence} {where}")

    @abstractmethod
    def _reset(self, seed: int | None) -> None:
        """Reset the environment, and find out who is to act."""

    @abstractmethod
    def act(self) -> None:
        """Let every team act.

        Raises
        ------
        EnvironmentSpecError
            If the environment does not keep to its interface; names the agent.
        """

    def _teams(
        self,
        agents: Iterable[Any],
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        going_on: Collection[Any],
    ) -> list[Team]:
        """Put agents together whose policy is the same; who is not going on begins."""
        policies, positions = self._policies, self._positions
        by_policy: dict[str, list[Any]] = {}
        for agent in agents:
            policy_id = policies.get(agent)
            if policy_id is None:
                policy_id = policies[agent] = self._policy_of(agent)
                positions.setdefault(agent, len(positions))
            by_policy.setdefault(policy_id, []).append(agent)
        teams = []
        for policy_id, own in by_policy.items():
            team = Team(self, policy_id, own, [positions[agent] for agent in own])
            team.observations = [observations[agent] for agent in own]
            team.infos = [infos.get(agent, {}) for agent in own]
            begins = [agent not in going_on for agent in own]
            team.begins = begins if any(begins) else None
            teams.append(team)
        return teams


class ParallelRun(Run):
    """A run of an environment whose agents act together."""

    environment: ParallelEnvironment
    together = True
    _agents: Sequence[Any] = ()

    def _reset(self, seed: int | None) -> None:
        observations, infos = self.environment.reset(seed=seed)
        self._wait(list(self.environment.agents), observations, infos, ())

    def _wait(
        self, agents: list[Any], observations: Mapping[Any, Any], infos: Mapping[Any, Any], going_on: Collection[Any]
    ) -> None:
        _check("an observation", observations, agents)
        self._refuse_none([observations[agent] for agent in agents], agents)
        self._agents = agents
        self.teams = self._teams(agents, observations, infos, going_on)

    def act(self) -> None:
        """Let every team act at once, and write down what came of it."""
        environment, agents, teams = self.environment, self._agents, self.teams
        if len(teams) == 1:
            actions = dict(zip(agents, teams[0].actions, strict=True))
        else:
            decided = {agent: action for team in teams for agent, action in zip(team.agents, team.actions, strict=True)}
            # The environment may look at them in its order.
            actions = {agent: decided[agent] for agent in agents}
        observations, rewards, terminations, truncations, infos = environment.step(actions)
        ended, came = False, []
        try:
            for team in teams:
                of_each = team.of_each
                seen, paid = of_each(observations), of_each(rewards)
                gone, cut = of_each(terminations), of_each(truncations)
                if not FLOATS.issuperset(map(type, paid)):
                    paid = self._exact(names.REWARDS, paid, FLOAT, team)
                if not BOOLS.issuperset(map(type, (*gone, *cut))):
                    gone = self._exact(names.TERMINATEDS, gone, BOOL, team)
                    cut = self._exact(names.TRUNCATEDS, cut, BOOL, team)
                if NoneType in map(type, seen):
                    self._refuse_none(seen, team.agents)
                self._check_shapes(seen, team)
                ended = ended or any(gone) or any(cut)
                came.append((seen, paid, gone, cut))
        except KeyError:
            _check("an observation", observations, agents)
            _check("a reward", rewards, agents)
            _check("a termination flag", terminations, agents)
            _check("a truncation flag", truncations, agents)
            raise
        staying = list(environment.agents)
        goes_on = not ended and staying == agents
        over = False
        if not goes_on:
            going_on = {agent for agent in agents if not (terminations[agent] or truncations[agent])}
            over = not staying or (not going_on and set(staying) <= set(agents))
        for team, (seen, paid, gone, cut) in zip(teams, came, strict=True):
            try:
                said = team.of_each(infos)
            except KeyError:
                said = tuple(infos.get(agent, _NOTHING) for agent in team.agents)
            try:
                team.owner.finish(team, Outcome(seen, paid, gone, cut, said, ended=ended, eps_done=over))
            except (ColumnMismatchError, ColumnTypeError) as error:
                raise type(error)(f"{error} (environment {self.env_id}, step {self.t})") from None
            team.observations, team.infos, team.begins = seen, said, None
        self.t += 1
        self.written += 1
        if not goes_on:
            self._wait([] if over else staying, observations, infos, going_on)

    def _exact(self, name: str, values: Iterable[Any], dtype: np.dtype[Any], team: Team) -> tuple[Any, ...]:
        """Convert a number of each agent exactly."""
        return tuple(
            exact_number(name, value, dtype, self.refusing(agent))
            for agent, value in zip(team.agents, values, strict=True)
        )

    def _check_shapes(self, observations: Sequence[Any], team: Team) -> None:
        """Refuse observations of another shape before a row of the step is written."""
        for place, (new, old) in enumerate(zip(observations, team.observations, strict=True)):
            if type(new) is np.ndarray and type(old) is np.ndarray and new.shape != old.shape:
                refuse = self.refusing(team.agents[place])
                raise refuse(f"column {names.NEXT_OBS!r} must have rows of shape {old.shape}, got {new.shape}", None)

    def _refuse_none(self, observations: Iterable[Any], agents: Iterable[Any]) -> None:
        for agent, observation in zip(agents, observations, strict=True):
            if observation is None:
                raise self.refusing(agent)(f"column {names.NEXT_OBS!r} must hold an observation, got None", None)


class AECRun(Run):
    """A run of an environment whose agents take turns.

    Every turn of a living agent is a step. Its row is whole at the agent's next turn, be it a dead agent's last: the
    reward is then what it got since, that of the others' turns included. What an agent gets before it acts for the
    first time counts with its first action.
    """

    environment: AECEnvironment
    together = False

    def __init__(self, environment: AECEnvironment, env_id: int, seed: int, policy_of: Callable[[Any], str]) -> None:
        super().__init__(environment, env_id, seed, policy_of)
        self._steps: deque[tuple[Team, Row]] = deque()
        self._open: dict[Any, Row] = {}
        self._early: dict[Any, Any] = {}

    def break_off(self) -> None:
        """End the episode that is under way; see `Run.break_off`."""
        super().break_off()
        self._steps.clear()
        self._open = {}

    def _reset(self, seed: int | None) -> None:
        self._early = {}
        self.environment.reset(seed=seed)
        self._go_on()

    def act(self) -> None:
        """Let the agent act whose turn it is."""
        (team,) = self.teams
        (agent,) = team.agents
        action, further = team.decided.row(team.at)
        row = {
            names.OBS: team.observations[0],
            names.NEXT_OBS: _OPEN,
            names.ACTIONS: action,
            names.REWARDS: _OPEN,
            names.TERMINATEDS: _OPEN,
            names.TRUNCATEDS: _OPEN,
            names.INFOS: _OPEN,
            **further,
            names.EPS_ID: self.eps_id,
            names.ENV_ID: self.env_id,
            names.AGENT_INDEX: team.indices[0],
            names.T: self.t,
            names.EPS_DONE: False,
        }
        self.environment.step(team.actions[0])
        self._open[agent] = row
        self._steps.append((team, row))
        self.t += 1
        self._go_on()

    def _go_on(self) -> None:
        """Take the dead out, and find out whose turn it is."""
        environment = self.environment
        self.teams = []
        while environment.agents and not self.teams:
            agent = environment.agent_selection
            observation, reward, terminated, truncated, info = environment.last()
            if observation is None:
                raise EnvironmentSpecError(
                    f"an environment must give an observation for every agent whose turn it is, and gave none for "
                    f"{agent!r}"
                )
            observation = kept(observation)
            refuse = self.refusing(agent)
            reward = exact_number(names.REWARDS, reward, FLOAT, refuse)
            terminated = bool(exact_number(names.TERMINATEDS, terminated, BOOL, refuse))
            truncated = bool(exact_number(names.TRUNCATEDS, truncated, BOOL, refuse))
            begins = not self._close(agent, observation, reward, terminated, truncated, info)
            if not (terminated or truncated):
                self.teams = self._teams([agent], {agent: observation}, {agent: info}, () if begins else (agent,))
                break
            environment.step(None)
            if agent in environment.agents:
                raise EnvironmentSpecError(
                    f"an environment must take a dead agent out when it is stepped with None, and kept {agent!r}"
                )
        if not self.teams and self._open:
            raise EnvironmentSpecError(
                "an environment must let every agent that acted see what came of it before the episode ends, and did "
                f"not let {next(iter(self._open))!r}"
            )
        if not self.teams and self._steps:
            self._steps[-1][1][names.EPS_DONE] = True
        while self._steps and self._steps[0][1][names.NEXT_OBS] is not _OPEN:
            self.whole.append(self._steps.popleft())

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


def run_of(environment: Any, env_id: int, seed: int, policy_of: Callable[[Any], str]) -> Run:
    """Make the run of an environment.

    Raises
    ------
    EnvironmentSpecError
        If it is none of several agents.
    """
    kind = environment_kind(environment)
    if kind == "parallel":
        return ParallelRun(environment, env_id, seed, policy_of)
    if kind == "aec":
        return AECRun(environment, env_id, seed, policy_of)
    raise EnvironmentSpecError(
        f"an environment of several agents must have one of PettingZoo's interfaces, got a "
        f"{type(environment).__name__}, which Collector steps"
    )


def kept(value: Any) -> Any:
    """Copy observations that the environment may overwrite in its next step."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    if type(value) is tuple or type(value) is list:
        return type(value)(kept(item) for item in value)
    return value


def _check(part: str, by_agent: Mapping[Any, Any], agents: Iterable[Any]) -> None:
    for agent in agents:
        if agent not in by_agent:
            raise EnvironmentSpecError(
                f"an environment must give {part} for every agent that acts, and gave none for {agent!r}"
            )

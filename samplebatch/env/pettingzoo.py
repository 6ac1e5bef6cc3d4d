"""PettingZoo's environments behind one interface: agents that act at once, or in turns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.column.casting import BOOL, BOOLS, FLOAT, FLOATS, exact_number
from samplebatch.env.agents import AgentGroup, AgentOutcomes, MultiAgentAdapter, PolicyOfAgents, copy_observation
from samplebatch.env.registry import AECEnvironment, ParallelEnvironment
from samplebatch.errors import EnvironmentSpecError

Numbers = tuple[Any, ...]

_ndarray = np.ndarray
_new_tuple = tuple.__new__
"""Makes a named tuple without a call of Python code."""
_shape_of = attrgetter("shape")
_NO_INFO: dict[str, Any] = {}


class ParallelAdapter(MultiAgentAdapter):
    """Adapter of an environment in which all agents act at once."""

    environment: ParallelEnvironment
    together = True
    _agents: Sequence[Any] = ()

    def _reset(self, seed: int | None, **arguments: Any) -> None:
        observations, infos = self.environment.reset(seed=seed, **arguments)
        self._await(list(self.environment.agents), observations, infos, ())

    def _await(
        self, agents: list[Any], observations: Mapping[Any, Any], infos: Mapping[Any, Any], going_on: Collection[Any]
    ) -> None:
        """Let agents be the next to act."""
        _check("an observation", observations, agents)
        self._refuse_none(map(observations.__getitem__, agents), agents)
        self._agents = agents
        self.groups = self._group(agents, observations, infos, going_on)

    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        environment, agents, groups = self.environment, self._agents, self.groups
        if len(groups) == 1:
            given = dict(zip(agents, actions[0], strict=True))
        else:
            # The environment may look at them in its order.
            given = dict.fromkeys(agents)
            for group, own in zip(groups, actions, strict=True):
                given.update(zip(group.agents, own, strict=True))
        answers = observations, rewards, terminations, truncations, infos = environment.step(given)
        try:
            outcomes = [self._advance(group, answers) for group in groups]
        except KeyError:
            _check("an observation", observations, agents)
            _check("a reward", rewards, agents)
            _check("a termination flag", terminations, agents)
            _check("a truncation flag", truncations, agents)
            raise
        self.t += 1
        staying = list(environment.agents)
        if staying == agents and not [own for own in outcomes if True in own.terminateds or True in own.truncateds]:
            return outcomes
        going_on = {agent for agent in agents if not (terminations[agent] or truncations[agent])}
        is_over = not staying or (not going_on and set(staying) <= set(agents))
        self._await([] if is_over else staying, observations, infos, going_on)
        return outcomes

    def _advance(self, group: AgentGroup, answers: Sequence[Mapping[Any, Any]]) -> AgentOutcomes:
        """Pick the outcomes of a group out of the environment's answers, and let it go on with them."""
        pick = group.pick
        observations, rewards, terminations, truncations, infos = answers
        seen, paid, terminateds, truncateds = pick(observations), pick(rewards), pick(terminations), pick(truncations)
        if [*map(type, paid + terminateds + truncateds)] != group.number_types:
            paid, terminateds, truncateds = self._convert(paid, terminateds, truncateds, group)
        try:
            alike = [*map(_shape_of, seen)] == group.shapes
        except AttributeError:
            alike = False
        if not alike:
            self._check_observations(seen, group)
        try:
            said = pick(infos)
        except KeyError:
            said = tuple([infos.get(agent, _NO_INFO) for agent in group.agents])
        group.observations, group.infos, group.begins = seen, said, None
        return _new_tuple(AgentOutcomes, (group.agents, seen, paid, terminateds, truncateds, said))

    def _convert(self, paid: Numbers, terminateds: Numbers, truncateds: Numbers, group: AgentGroup) -> list[Numbers]:
        """Convert rewards and flags exactly."""
        if FLOATS.issuperset(map(type, paid)) and BOOLS.issuperset(map(type, terminateds + truncateds)):
            group.number_types = [*map(type, paid + terminateds + truncateds)]
            return [paid, terminateds, truncateds]
        of_agents = [self.refusing(agent) for agent in group.agents]
        parts = [
            (names.REWARDS, FLOAT, paid),
            (names.TERMINATEDS, BOOL, terminateds),
            (names.TRUNCATEDS, BOOL, truncateds),
        ]
        return [
            tuple([exact_number(name, one, dtype, refuse) for one, refuse in zip(values, of_agents, strict=True)])
            for name, dtype, values in parts
        ]

    def _check_observations(self, observations: Sequence[Any], group: AgentGroup) -> None:
        """Refuse observations that are not there or of another shape, before a row of the step is recorded."""
        self._refuse_none(observations, group.agents)
        for place, (new, old) in enumerate(zip(observations, group.observations, strict=True)):
            if type(new) is _ndarray and type(old) is _ndarray and new.shape != old.shape:
                refuse = self.refusing(group.agents[place])
                raise refuse(f"column {names.NEXT_OBS!r} must have rows of shape {old.shape}, got {new.shape}", None)
        group.shapes = [new.shape if type(new) is _ndarray else None for new in observations]

    def _refuse_none(self, observations: Iterable[Any], agents: Iterable[Any]) -> None:
        for agent, observation in zip(agents, observations, strict=True):
            if observation is None:
                raise self.refusing(agent)(f"column {names.NEXT_OBS!r} must hold an observation, got None", None)


class TurnBasedAdapter(MultiAgentAdapter):
    """Adapter of an environment in which agents take turns.

    Every turn of a living agent is a step. Its outcome is known at the agent's next turn, be it a dead agent's last:
    the reward is then all that it got since, during the others' turns, too. A reward that an agent gets before it acts
    for the first time counts with its first action.
    """

    environment: AECEnvironment
    together = False

    def __init__(self, environment: AECEnvironment, env_id: int, seed: int, policy_of: PolicyOfAgents) -> None:
        super().__init__(environment, env_id, seed, policy_of)
        self._acted: dict[Any, None] = {}
        """Agents that have not seen the outcome of their last action."""
        self._early: dict[Any, Any] = {}
        """Rewards of agents from before their first action."""

    def abandon(self) -> None:
        super().abandon()
        self._acted = {}

    def _reset(self, seed: int | None, **arguments: Any) -> None:
        self._early = {}
        self._acted = {}
        self.environment.reset(seed=seed, **arguments)
        self._next_turn()

    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        (group,) = self.groups
        ((action,),) = actions
        self.environment.step(action)
        self._acted[group.agents[0]] = None
        self.t += 1
        return self._next_turn()

    def _next_turn(self) -> list[AgentOutcomes]:
        """Step dead agents out until it is a living one's turn, and return the outcomes that are seen on the way."""
        environment = self.environment
        outcomes: list[AgentOutcomes] = []
        self.groups = []
        while environment.agents:
            agent = environment.agent_selection
            observation, reward, terminated, truncated, info = environment.last()
            if observation is None:
                raise EnvironmentSpecError(
                    f"an environment must give an observation for every agent whose turn it is, and gave none for "
                    f"{agent!r}"
                )
            observation = copy_observation(observation)
            refuse = self.refusing(agent)
            reward = exact_number(names.REWARDS, reward, FLOAT, refuse)
            terminated = bool(exact_number(names.TERMINATEDS, terminated, BOOL, refuse))
            truncated = bool(exact_number(names.TRUNCATEDS, truncated, BOOL, refuse))
            begins = agent not in self._acted
            if begins:
                self._early[agent] = reward
            else:
                del self._acted[agent]
                reward += self._early.pop(agent, 0)
                outcomes.append(AgentOutcomes([agent], [observation], [reward], [terminated], [truncated], [info]))
            if not (terminated or truncated):
                self.groups = self._group([agent], {agent: observation}, {agent: info}, () if begins else (agent,))
                return outcomes
            environment.step(None)
            if agent in environment.agents:
                raise EnvironmentSpecError(
                    f"an environment must take a dead agent out when it is stepped with None, and kept {agent!r}"
                )
        if self._acted:
            raise EnvironmentSpecError(
                "an environment must let every agent that acted see what came of it before the episode ends, and did "
                f"not let {next(iter(self._acted))!r}"
            )
        return outcomes


def _check(part: str, by_agent: Mapping[Any, Any], agents: Iterable[Any]) -> None:
    for agent in agents:
        if agent not in by_agent:
            raise EnvironmentSpecError(
                f"an environment must give {part} for every agent that acts, and gave none for {agent!r}"
            )

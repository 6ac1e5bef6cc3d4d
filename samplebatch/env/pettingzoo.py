"""Adapters of PettingZoo environments, parallel and turn-based."""

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
"""Creates a named tuple without executing Python code."""
_shape_of = attrgetter("shape")
_NO_INFO: dict[str, Any] = {}


class ParallelAdapter(MultiAgentAdapter):
    """Adapter of a parallel environment, in which agents act simultaneously."""

    environment: ParallelEnvironment
    together = True
    _agents: Sequence[Any] = ()

    def _reset(self, seed: int | None, **arguments: Any) -> None:
        observations, infos = self.environment.reset(seed=seed, **arguments)
        self._await(list(self.environment.agents), observations, infos, ())

    def _await(
        self, agents: list[Any], observations: Mapping[Any, Any], infos: Mapping[Any, Any], going_on: Collection[Any]
    ) -> None:
        _check("an observation", observations, agents)
        self._refuse_none(map(observations.__getitem__, agents), agents)
        self._agents = agents
        self.groups = self._group(agents, observations, infos, going_on)

    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        environment, agents, groups = self.environment, self._agents, self.groups
        if len(groups) == 1:
            actions_by_agent = dict(zip(agents, actions[0], strict=True))
        else:
            # The environment may iterate over the actions in order of its agents.
            actions_by_agent = dict.fromkeys(agents)
            for group, group_actions in zip(groups, actions, strict=True):
                actions_by_agent.update(zip(group.agents, group_actions, strict=True))
        answers = observations, rewards, terminations, truncations, infos = environment.step(actions_by_agent)
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
        if staying == agents and not [
            group_actions
            for group_actions in outcomes
            if True in group_actions.terminateds or True in group_actions.truncateds
        ]:
            return outcomes
        going_on = {agent for agent in agents if not (terminations[agent] or truncations[agent])}
        is_over = not staying or (not going_on and set(staying) <= set(agents))
        self._await([] if is_over else staying, observations, infos, going_on)
        return outcomes

    def _advance(self, group: AgentGroup, answers: Sequence[Mapping[Any, Any]]) -> AgentOutcomes:
        """Select the outcomes of a group from the environment's step result and update the group."""
        pick = group.pick
        observations, rewards, terminations, truncations, infos = answers
        new_observations, paid, terminateds, truncateds = (
            pick(observations),
            pick(rewards),
            pick(terminations),
            pick(truncations),
        )
        if [*map(type, paid + terminateds + truncateds)] != group.number_types:
            paid, terminateds, truncateds = self._convert(paid, terminateds, truncateds, group)
        try:
            alike = [*map(_shape_of, new_observations)] == group.shapes
        except AttributeError:
            alike = False
        if not alike:
            self._check_observations(new_observations, group)
        try:
            agent_infos = pick(infos)
        except KeyError:
            agent_infos = tuple([infos.get(agent, _NO_INFO) for agent in group.agents])
        group.observations, group.infos, group.begins = new_observations, agent_infos, None
        return _new_tuple(AgentOutcomes, (group.agents, new_observations, paid, terminateds, truncateds, agent_infos))

    def _convert(self, paid: Numbers, terminateds: Numbers, truncateds: Numbers, group: AgentGroup) -> list[Numbers]:
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
            tuple([exact_number(name, value, dtype, refuse) for value, refuse in zip(values, of_agents, strict=True)])
            for name, dtype, values in parts
        ]

    def _check_observations(self, observations: Sequence[Any], group: AgentGroup) -> None:
        """Reject missing observations and changed shapes before a row of the step is recorded."""
        self._refuse_none(observations, group.agents)
        for index, (new, old) in enumerate(zip(observations, group.observations, strict=True)):
            if type(new) is _ndarray and type(old) is _ndarray and new.shape != old.shape:
                refuse = self.refusing(group.agents[index])
                raise refuse(f"column {names.NEXT_OBS!r} must have rows of shape {old.shape}, got {new.shape}", None)
        group.shapes = [new.shape if type(new) is _ndarray else None for new in observations]

    def _refuse_none(self, observations: Iterable[Any], agents: Iterable[Any]) -> None:
        for agent, observation in zip(agents, observations, strict=True):
            if observation is None:
                raise self.refusing(agent)(f"column {names.NEXT_OBS!r} must hold an observation, got None", None)


class TurnBasedAdapter(MultiAgentAdapter):
    """Adapter of a turn-based environment.

    Every turn of a living agent is a step. Its outcome is known at the agent's next turn, or at its last turn if it is
    dead. The reward is the sum of all rewards since its action, including rewards during other agents' turns. Rewards
    before an agent's first action are added to the first action's reward.
    """

    environment: AECEnvironment
    together = False

    def __init__(self, environment: AECEnvironment, env_id: int, seed: int, policy_of: PolicyOfAgents) -> None:
        super().__init__(environment, env_id, seed, policy_of)
        self._acted: dict[Any, None] = {}
        """Agents that have not observed the outcome of their last action."""
        self._early: dict[Any, Any] = {}
        """Rewards of agents before their first action."""

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
        """Remove dead agents until a living agent's turn, and return the outcomes observed meanwhile."""
        environment = self.environment
        outcomes: list[AgentOutcomes] = []
        self.groups = []
        while environment.agents:
            agent = environment.agent_selection
            observation, reward, terminated, truncated, info = environment.last()
            if observation is None:
                raise EnvironmentSpecError(
                    f"an environment must return an observation for the agent whose turn it is, got none for {agent!r}"
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
                    f"an environment must remove a dead agent that is stepped with None, got {agent!r} again"
                )
        if self._acted:
            raise EnvironmentSpecError(
                "an environment must give every agent that acted a last turn before the episode ends, got none for "
                f"{next(iter(self._acted))!r}"
            )
        return outcomes


def _check(part: str, by_agent: Mapping[Any, Any], agents: Iterable[Any]) -> None:
    for agent in agents:
        if agent not in by_agent:
            raise EnvironmentSpecError(
                f"an environment must return {part} for every agent that acts, got none for {agent!r}"
            )

"""PettingZoo's environments behind one interface: agents that act at once, or in turns.

An adapter holds one environment and the episode under way in it. `groups` are the agents that act next; `step` lets
them act, and returns the outcomes that are known by then. Where agents act at once, these are the outcomes of that
step. Where they take turns, an agent sees the outcome of its action at its next turn.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.column.exact import BOOL, BOOLS, FLOAT, FLOATS, Refuse, exact_number
from samplebatch.env.agents import Episode, PolicyOfAgents, agent_positions
from samplebatch.env.registry import AECEnvironment, ParallelEnvironment
from samplebatch.errors import EnvironmentSpecError
from samplebatch.names import PolicyID

Ints = npt.NDArray[np.int64]
Numbers = tuple[Any, ...]

_ndarray = np.ndarray
_new_tuple = tuple.__new__
"""Makes a named tuple without a call of Python code."""
_shape_of = attrgetter("shape")
_NO_INFO: dict[str, Any] = {}


class AgentGroup:
    """Agents of one environment that share a policy and act at once; a collector asks the policy for all of them.

    Attributes
    ----------
    adapter
        Their environment.
    policy_id
        Their policy.
    agents
        Their ids, k of them.
    keys
        The pair of `env_id` and agent id of each.
    env_ids, indices, eps_ids
        The `env_id`, `agent_index` and `eps_id` of each, shape (k,).
    observations, infos
        The newest of each, as the environment gave it, which may write over it in its next step.
    begins
        Whether each has not acted yet, since the episode began or since it came back to life; None for nobody.
    pick
        Takes the values of these agents out of a mapping by agent: a tuple.
    number_types
        The types of their last rewards and flags that columns hold as they are: those of such types need no look.
    shapes
        The shapes of their last observations; None for one that is no array.
    """

    __slots__ = (
        "adapter",
        "agents",
        "begins",
        "env_ids",
        "eps_ids",
        "indices",
        "infos",
        "keys",
        "number_types",
        "observations",
        "pick",
        "policy_id",
        "shapes",
    )

    def __init__(self, adapter: MultiAgentAdapter, policy_id: PolicyID, agents: list[Any], indices: list[int]) -> None:
        self.adapter = adapter
        self.policy_id = policy_id
        self.agents = agents
        self.keys = [(adapter.env_id, agent) for agent in agents]
        count = len(agents)
        self.env_ids: Ints = np.full(count, adapter.env_id)
        self.eps_ids: Ints = np.full(count, adapter.eps_id)
        self.indices: Ints = np.array(indices)
        self.pick: Callable[[Any], tuple[Any, ...]] = itemgetter(*agents) if count > 1 else _pick_only(agents[0])
        self.observations: Sequence[Any] = ()
        self.infos: Sequence[Any] = ()
        self.begins: list[bool] | None = None
        self.number_types: list[type] = []
        self.shapes: list[tuple[int, ...] | None] = []


class AgentOutcomes(NamedTuple):
    """Outcomes of the actions of some agents, an item an agent: the step result of a multi-agent adapter."""

    agents: Sequence[Any]
    observations: Sequence[Any]
    rewards: Sequence[Any]
    terminateds: Sequence[Any]
    truncateds: Sequence[Any]
    infos: Sequence[Any]


class MultiAgentAdapter(ABC):
    """One environment of several agents, and the episode under way in it, for multi-agent collectors.

    Parameters
    ----------
    environment
        The environment.
    env_id
        Its number, which its rows carry.
    seed
        Seed of its first reset. Its generator then runs on, so that no two episodes are alike.
    policy_of
        The policy of an agent, by its id and the episode.

    Attributes
    ----------
    groups
        The agents that act next, by policy; none unless an episode is under way.
    eps_id, t
        The episode, and its environment steps so far.
    """

    together: bool
    """Whether agents act at once, rather than take turns."""

    def __init__(self, environment: Any, env_id: int, seed: int, policy_of: PolicyOfAgents) -> None:
        self.environment = environment
        self.env_id = env_id
        self.groups: list[AgentGroup] = []
        self.eps_id = self.t = 0
        self._seed: int | None = seed
        self._positions = agent_positions(environment)
        self._policy_of = policy_of
        self._episodes = 0
        self._policies: dict[Any, PolicyID] = {}

    @property
    def agents(self) -> list[Any]:
        """All agents that are possible or have been there, by their `agent_index`."""
        return list(self._positions)

    @property
    def in_episode(self) -> bool:
        """Whether an episode is under way."""
        return bool(self.groups)

    def reset(self) -> None:
        """Begin an episode.

        Raises
        ------
        EnvironmentSpecError
            If there is nobody to act in it.
        """
        seed, self._seed = self._seed, None
        self.eps_id = secrets.randbits(63)
        self.t = 0
        self._episodes += 1
        if self._policy_of.sees_episodes:
            self._policies = {}
        self._reset(seed)
        if not self.groups:
            raise EnvironmentSpecError("an environment must have agents after reset, and it has none")

    def abandon(self) -> None:
        """Leave the episode that is under way."""
        self.groups = []

    def reseed(self, seed: int) -> None:
        """Seed the next reset."""
        self._seed = seed

    def keep_observations(self) -> None:
        """Copy the newest observations, which the environment may write over."""
        for group in self.groups:
            group.observations = [copy_observation(observation) for observation in group.observations]

    def refusing(self, agent: Any) -> Refuse:
        """Make errors for values that the environment returned for an agent in the newest step."""
        where = f"for agent {agent!r} from environment {self.env_id} in step {self.t}"
        return lambda sentence, _: EnvironmentSpecError(f"{sentence} {where}")

    @abstractmethod
    def _reset(self, seed: int | None) -> None:
        """Reset the environment, and find the agents that act first."""

    @abstractmethod
    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        """Let the agents act.

        Parameters
        ----------
        actions
            An action for each agent of each of the `groups`, as the environment takes it.

        Returns
        -------
        list
            The outcomes that are known with this step. Where agents act at once, one for each of the groups that acted.

        Raises
        ------
        EnvironmentSpecError
            If the environment does not keep to its interface; names the agent.
        """

    def _group(
        self,
        agents: Iterable[Any],
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        going_on: Collection[Any],
    ) -> list[AgentGroup]:
        """Group agents by policy; those that are not going on begin."""
        policies, positions = self._policies, self._positions
        episode = Episode(self.eps_id, self.env_id, self._episodes - 1)
        by_policy: dict[PolicyID, list[Any]] = {}
        for agent in agents:
            policy_id = policies.get(agent)
            if policy_id is None:
                policy_id = policies[agent] = self._policy_of(agent, episode)
                positions.setdefault(agent, len(positions))
            by_policy.setdefault(policy_id, []).append(agent)
        groups = []
        for policy_id, own in by_policy.items():
            group = AgentGroup(self, policy_id, own, [positions[agent] for agent in own])
            group.observations = [observations[agent] for agent in own]
            group.infos = [infos.get(agent, {}) for agent in own]
            begins = [agent not in going_on for agent in own]
            group.begins = begins if any(begins) else None
            groups.append(group)
        return groups


class ParallelAdapter(MultiAgentAdapter):
    """Adapter of an environment in which all agents act at once."""

    environment: ParallelEnvironment
    together = True
    _agents: Sequence[Any] = ()

    def _reset(self, seed: int | None) -> None:
        observations, infos = self.environment.reset(seed=seed)
        self._await(list(self.environment.agents), observations, infos, ())

    def _await(
        self, agents: list[Any], observations: Mapping[Any, Any], infos: Mapping[Any, Any], going_on: Collection[Any]
    ) -> None:
        """Let agents be the next to act."""
        _check("an observation", observations, agents)
        self._refuse_none([observations[agent] for agent in agents], agents)
        self._agents = agents
        self.groups = self._group(agents, observations, infos, going_on)

    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        """Let all agents act at once; see `MultiAgentAdapter.step`."""
        environment, agents, groups = self.environment, self._agents, self.groups
        if len(groups) == 1:
            given = dict(zip(agents, actions[0], strict=True))
        else:
            pairs = zip(groups, actions, strict=True)
            by_agent = {agent: action for group, own in pairs for agent, action in zip(group.agents, own, strict=True)}
            # The environment may look at them in its order.
            given = {agent: by_agent[agent] for agent in agents}
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
        """Leave the episode that is under way."""
        super().abandon()
        self._acted = {}

    def _reset(self, seed: int | None) -> None:
        self._early = {}
        self._acted = {}
        self.environment.reset(seed=seed)
        self._next_turn()

    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        """Let the selected agent act; see `MultiAgentAdapter.step`."""
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


def copy_observation(value: Any) -> Any:
    """Copy an observation that the environment may write over in its next step."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: copy_observation(item) for key, item in value.items()}
    if type(value) is tuple or type(value) is list:
        return type(value)(copy_observation(item) for item in value)
    return value


def _pick_only(agent: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda by_agent: (by_agent[agent],)


def _check(part: str, by_agent: Mapping[Any, Any], agents: Iterable[Any]) -> None:
    for agent in agents:
        if agent not in by_agent:
            raise EnvironmentSpecError(
                f"an environment must give {part} for every agent that acts, and gave none for {agent!r}"
            )

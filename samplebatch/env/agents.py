"""Adapters of multi-agent environments: the base class, and adapters for RLlib and both PettingZoo interfaces.

An adapter contains one environment and the environment's current episode. `groups` are the agents that act next. `step`
executes the actions of the agents in `groups` and returns all outcomes that are known. If agents act simultaneously,
`step` returns the outcomes of the executed actions. In turn-based environments, an agent observes the outcome of its
action at its next turn.
"""

from __future__ import annotations

import copy
import inspect
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.builder import PolicyMapping
from samplebatch.column.casting import BOOL, BOOLS, FLOAT, FLOATS, Refuse, exact_number
from samplebatch.env.environment_state import load_environments, save_environments
from samplebatch.env.registry import AECEnvironment, ParallelEnvironment
from samplebatch.errors import EnvironmentSpecError, PolicyNotFoundError, near_names
from samplebatch.names import PolicyID

_NUMBERED = re.compile(r"(?P<kind>.*[^_\d])_?\d+")


def policy_by_kind(environment: Any) -> Callable[[Any], str]:
    """Return a function that maps each agent to a policy by kind; the kind is the agent id without its trailing number.

    If agents of the same kind have different spaces, the agents cannot share a batch, and each agent has its own
    policy.

    - `environment`: a PettingZoo environment with the parallel or the AEC interface, or a `MultiAgentEnv` of RLlib.

    >>> from samplebatch.env.registry import make_environment
    >>> mapping = policy_by_kind(make_environment("mpe2/simple_tag_v3"))
    >>> [mapping(agent) for agent in ("adversary_0", "adversary_2", "agent_0")]
    ['adversary', 'adversary', 'agent']
    """
    spaces: dict[str, Any] = {}
    mixed = set()
    for agent in getattr(environment, "possible_agents", ()):
        spaces_of_agent = (observation_space_of(environment, agent), action_space_of(environment, agent))
        if spaces.setdefault(kind_of(agent), spaces_of_agent) != spaces_of_agent:
            mixed.add(kind_of(agent))
    return partial(_policy_of, mixed=frozenset(mixed))


def _policy_of(agent: Any, *, mixed: frozenset[str]) -> str:
    kind = kind_of(agent)
    return str(agent) if kind in mixed else kind


def kind_of(agent: Any) -> str:
    """Return an agent id without its trailing number.

    >>> [kind_of(agent) for agent in ("agent_0", "walker12", "red_knight", 3)]
    ['agent', 'walker', 'red_knight', 'agent']
    """
    if isinstance(agent, int):
        return "agent"
    match = _NUMBERED.fullmatch(str(agent))
    return match["kind"] if match else str(agent)


def observation_space_of(environment: Any, agent: Any) -> Any:
    """Return the observation space of an agent; None if the environment does not declare observation spaces.

    >>> from samplebatch.env.registry import make_environment
    >>> observation_space_of(make_environment("mpe2/simple_spread_v3"), "agent_0").shape
    (18,)
    """
    # RLlib's environments have attributes of these names, which are not functions.
    space_of = getattr(environment, "get_observation_space", None) or getattr(environment, "observation_space", None)
    return None if space_of is None else space_of(agent)


def action_space_of(environment: Any, agent: Any) -> Any:
    """Return the action space of an agent."""
    space_of = getattr(environment, "get_action_space", None) or environment.action_space
    return space_of(agent)


class Episode(NamedTuple):
    """Episode that is passed to a policy mapping, for self-play in which agents switch policies between episodes.

    Attributes
    ----------
    eps_id
        Unique episode id of 63 random bits.
    env_id
        `env_id` of the episode's environment.
    number
        Number of earlier episodes in the same environment. Unlike `eps_id`, `number` is the same in repeated runs.
    """

    eps_id: int
    env_id: int
    number: int

    @property
    def id_(self) -> int:
        """Alias of `eps_id`, for policy mapping functions that were written for RLlib."""
        return self.eps_id


class PolicyOfAgents:
    """Mapping from agents, or agents and episodes, to policies in a multi-agent collector.

    - `mapping`: a mapping from agent ids to policy ids, or a function of the agent id, or of the agent id and the
      `Episode`. A function receives the episode if it has a second parameter without a default, a parameter named
      `episode`, or `*args`.

    Instance attributes:
    - `sees_episodes`: whether an agent may have different policies in different episodes.

    >>> by_turns = PolicyOfAgents(
    ...     lambda agent, episode: "even" if (agent + episode.number) % 2 == 0 else "odd"
    ... )
    >>> [by_turns(agent, Episode(7, 0, number)) for number in range(2) for agent in range(2)]
    ['even', 'odd', 'odd', 'even']
    """

    def __init__(self, mapping: PolicyMapping) -> None:
        self._mapping = mapping
        self.sees_episodes = not isinstance(mapping, Mapping) and _takes_episode(mapping)

    def __call__(self, agent: Any, episode: Episode) -> PolicyID:
        """Return the policy id of an agent."""
        mapping = self._mapping
        if not isinstance(mapping, Mapping):
            return mapping(agent, episode) if self.sees_episodes else mapping(agent)
        if agent not in mapping:
            raise PolicyNotFoundError(
                f"agent {agent!r} must have a policy in policy_mapping; {near_names(agent, mapping)}"
            )
        return mapping[agent]


def _takes_episode(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return True
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "episode")


def agent_positions(environment: Any) -> dict[Any, int]:
    """Return the index of each agent in `possible_agents` of an environment.

    >>> from samplebatch.env.registry import make_environment
    >>> agent_positions(make_environment("mpe2/simple_spread_v3"))
    {'agent_0': 0, 'agent_1': 1, 'agent_2': 2}
    """
    possible: Iterable[Any] = getattr(environment, "possible_agents", ())
    return {agent: position for position, agent in enumerate(possible)}


Ints = npt.NDArray[np.int64]

_APART = frozenset({"environment", "env_id", "groups", "_policy_of"})
"""Attributes of adapters that are not part of the state or are saved in another form."""


class AgentGroup:
    """Agents of one environment that share a policy and act simultaneously; their actions are computed together.

    - `adapter`: adapter of the agents' environment.
    - `policy_id`: policy of the agents.
    - `agents`: ids of the k agents.
    - `keys`: pair of `env_id` and agent id of each agent.
    - `env_ids`, `indices`, `eps_ids`: `env_id`, `agent_index` and `eps_id` of each agent, shape (k,).
    - `observations`, `infos`: newest observation and info of each agent, which the environment may overwrite in its
      next step.
    - `begins`: whether the next action of each agent is its first since the episode started or the agent rejoined; None
      if no agent's next action is its first.
    - `pick`: function that selects the agents' values from a mapping, as a tuple.
    - `number_types`: types of the last rewards and flags that required no conversion; values of the same types are not
      checked again.
    - `shapes`: shapes of the agents' last observations; None for an observation that is not an array.
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

    def __init__(
        self, adapter: MultiAgentAdapter, policy_id: PolicyID, agents: list[Any], positions: Mapping[Any, int]
    ) -> None:
        self.adapter = adapter
        self.policy_id = policy_id
        self.agents = agents
        self.keys = [*zip(repeat(adapter.env_id), agents, strict=False)]
        count = len(agents)
        self.env_ids: Ints = np.full(count, adapter.env_id)
        self.eps_ids: Ints = np.full(count, adapter.eps_id)
        self.pick: Callable[[Any], tuple[Any, ...]] = itemgetter(*agents) if count > 1 else _pick_only(agents[0])
        self.indices: Ints = np.array(self.pick(positions))
        self.observations: Sequence[Any] = ()
        self.infos: Sequence[Any] = ()
        self.begins: list[bool] | None = None
        self.number_types: list[type] = []
        self.shapes: list[tuple[int, ...] | None] = []


class AgentOutcomes(NamedTuple):
    """Outcomes of some agents' actions in a step of a multi-agent adapter; each field has one item per agent."""

    agents: Sequence[Any]
    observations: Sequence[Any]
    rewards: Sequence[Any]
    terminateds: Sequence[Any]
    truncateds: Sequence[Any]
    infos: Sequence[Any]


class MultiAgentAdapter(ABC):
    """Base class of adapters for one multi-agent environment and the environment's current episode.

    - `environment`: the environment.
    - `env_id`: index of the environment, stored in the column `env_id`.
    - `seed`: seed of the first reset. Later resets continue the environment's random generator, so that episodes
      differ.
    - `policy_of`: function that maps an agent id and an episode to a policy id.

    Instance attributes:
    - `groups`: agents that act next, grouped by policy; empty if no episode is running.
    - `eps_id`, `t`: id of the current episode, and number of environment steps since the episode started.
    """

    together: bool
    """Whether agents act simultaneously, rather than in turns."""

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
        """All possible agents and all agents of earlier steps, in order of `agent_index`."""
        return list(self._positions)

    @property
    def in_episode(self) -> bool:
        """Whether an episode is running."""
        return bool(self.groups)

    def reset(self, **arguments: Any) -> None:
        """Start an episode; the arguments, which may include a `seed`, are passed to the environment's `reset`."""
        seed, self._seed = arguments.pop("seed", self._seed), None
        self.eps_id = secrets.randbits(63)
        self.t = 0
        self._episodes += 1
        if self._policy_of.sees_episodes:
            self._policies = {}
        self._reset(seed, **arguments)
        if not self.groups:
            raise EnvironmentSpecError("an environment must have agents after reset, got none")

    def abandon(self) -> None:
        """Abandon the current episode."""
        self.groups = []

    def reseed(self, seed: int) -> None:
        """Seed the next reset."""
        self._seed = seed

    def keep_observations(self) -> None:
        """Copy the newest observations, which the environment may overwrite."""
        for group in self.groups:
            group.observations = [copy_observation(observation) for observation in group.observations]

    def refusing(self, agent: Any) -> Refuse:
        """Return a function that creates errors for invalid values of an agent in the latest step."""
        where = f"for agent {agent!r} from environment {self.env_id} in step {self.t}"
        return lambda sentence, _: EnvironmentSpecError(f"{sentence} {where}")

    def state_dict(self) -> dict[str, Any]:
        """Return the picklable state of the environment and the episode, for `load_state_dict`."""
        groups = [
            (group.policy_id, group.agents, group.observations, group.infos, group.begins) for group in self.groups
        ]
        values = {name: value for name, value in vars(self).items() if name not in _APART}
        return {"saved": save_environments([self.environment]), **copy.deepcopy({"values": values, "groups": groups})}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore the state of an adapter with this adapter's arguments; return whether the state was restored."""
        if not load_environments([self.environment], state["saved"]):
            return False
        vars(self).update(copy.deepcopy(state["values"]))
        self.groups = []
        for policy_id, agents, observations, infos, begins in copy.deepcopy(state["groups"]):
            group = AgentGroup(self, policy_id, agents, self._positions)
            group.observations, group.infos, group.begins = observations, infos, begins
            self.groups.append(group)
        return True

    @abstractmethod
    def _reset(self, seed: int | None, **arguments: Any) -> None:
        """Reset the environment and set `groups` to the agents that act first."""

    @abstractmethod
    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        """Step the environment with actions of the agents in `groups`.

        - `actions`: for each group, one action per agent, in the environment's units.
        """

    def _group(
        self,
        agents: Iterable[Any],
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        continuing: Collection[Any],
    ) -> list[AgentGroup]:
        """Group agents by policy; agents that are not in `continuing` start a trajectory."""
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
        for policy_id, policy_agents in by_policy.items():
            group = AgentGroup(self, policy_id, policy_agents, positions)
            group.observations = group.pick(observations)
            group.infos = [infos.get(agent, {}) for agent in policy_agents]
            begins = [agent not in continuing for agent in policy_agents]
            group.begins = begins if any(begins) else None
            groups.append(group)
        return groups


def _pick_only(agent: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda by_agent: (by_agent[agent],)


def copy_observation(value: Any) -> Any:
    """Copy an observation that the environment may overwrite in its next step."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: copy_observation(item) for key, item in value.items()}
    if type(value) is tuple or type(value) is list:
        return type(value)(copy_observation(item) for item in value)
    return value


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
        self, agents: list[Any], observations: Mapping[Any, Any], infos: Mapping[Any, Any], continuing: Collection[Any]
    ) -> None:
        _check("an observation", observations, agents)
        self._refuse_none(map(observations.__getitem__, agents), agents)
        self._agents = agents
        self.groups = self._group(agents, observations, infos, continuing)

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
        outcomes: list[AgentOutcomes] = []
        is_ending = False
        try:
            for group in groups:
                outcomes.append(group_outcomes := self._advance(group, answers))
                is_ending |= True in group_outcomes.terminateds or True in group_outcomes.truncateds
        except KeyError:
            _check("an observation", observations, agents)
            _check("a reward", rewards, agents)
            _check("a termination flag", terminations, agents)
            _check("a truncation flag", truncations, agents)
            raise
        self.t += 1
        staying = list(environment.agents)
        if staying == agents and not is_ending:
            return outcomes
        continuing = {agent for agent in agents if not (terminations[agent] or truncations[agent])}
        is_over = not staying or (not continuing and set(staying) <= set(agents))
        self._await([] if is_over else staying, observations, infos, continuing)
        return outcomes

    def _advance(self, group: AgentGroup, answers: Sequence[Mapping[Any, Any]]) -> AgentOutcomes:
        """Select a group's outcomes from the environment's step result, and update the group."""
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
        """Reject missing observations and changed observation shapes before any row of the step is recorded."""
        self._refuse_none(observations, group.agents)
        for index, (new, old) in enumerate(zip(observations, group.observations, strict=True)):
            if type(new) is _ndarray and type(old) is _ndarray and new.shape != old.shape:
                refuse = self.refusing(group.agents[index])
                raise refuse(f"column {names.NEXT_OBS!r} must have rows of shape {old.shape}, got {new.shape}", None)
        group.shapes = [new.shape if type(new) is _ndarray else None for new in observations]

    def _refuse_none(self, observations: Iterable[Any], agents: Iterable[Any]) -> None:
        for agent, observation in zip(agents, observations, strict=True):
            if observation is None:
                raise self.refusing(agent)(f"column {names.NEXT_OBS!r} must contain an observation, got None", None)


class TurnBasedAdapter(MultiAgentAdapter):
    """Adapter of a turn-based environment.

    Every turn of a living agent is a step. The outcome of a step is known at the agent's next turn, even if the agent
    is dead by then. The reward of a step is the sum of all rewards since the agent's action, including rewards during
    other agents' turns. Rewards before an agent's first action are added to the first action's reward.
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
        """Remove dead agents until the turn of a living agent; return the outcomes observed before that turn."""
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


_ALL = "__all__"


class RLlibAdapter(MultiAgentAdapter):
    """Adapter of an RLlib `MultiAgentEnv` for multi-agent collectors.

    The reward of a step is the sum of the agent's rewards since its action; rewards before its first action are added
    to the first action's reward. `"__all__"` ends the episode for all remaining agents. If a terminated agent receives
    no new observation, its last observation is used.
    """

    together = False

    def __init__(self, environment: Any, env_id: int, seed: int, policy_of: PolicyOfAgents) -> None:
        super().__init__(environment, env_id, seed, policy_of)
        self._waiting: dict[Any, float] = {}
        """Rewards of agents that have not observed the outcome of their last action."""
        self._early: dict[Any, float] = {}
        """Rewards of agents that have not acted yet."""
        self._last_observations: dict[Any, Any] = {}
        """Newest observation of each agent."""

    def abandon(self) -> None:
        super().abandon()
        self._waiting, self._early, self._last_observations = {}, {}, {}

    def _reset(self, seed: int | None, **arguments: Any) -> None:
        self.abandon()
        observations, infos = self.environment.reset(seed=seed, **arguments)
        self._await(observations, infos, ())

    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        pairs = zip(self.groups, actions, strict=True)
        actions_by_agent = {
            agent: action
            for group, group_actions in pairs
            for agent, action in zip(group.agents, group_actions, strict=True)
        }
        self._waiting |= {agent: self._early.pop(agent, 0.0) for agent in actions_by_agent}
        outcomes, is_over = self._advance(actions_by_agent)
        while not (self.groups or is_over):
            # If no agent acts next, step the environment without actions.
            more, is_over = self._advance({})
            outcomes += more
        return outcomes

    def _advance(self, actions: dict[Any, Any]) -> tuple[list[AgentOutcomes], bool]:
        """Step the environment once; return the observed outcomes and whether the episode has ended."""
        observations, rewards, terminateds, truncateds, infos = self.environment.step(actions)
        for agent, reward in rewards.items():
            pending = self._waiting if agent in self._waiting else self._early
            pending[agent] = pending.get(agent, 0.0) + exact_number(names.REWARDS, reward, FLOAT, self.refusing(agent))
        all_terminate = self._flag(names.TERMINATEDS, terminateds, _ALL)
        all_truncate = self._flag(names.TRUNCATEDS, truncateds, _ALL)
        outcomes: list[AgentOutcomes] = []
        acting: dict[Any, Any] = {}
        for agent in {**self._waiting, **observations}:
            terminated = all_terminate or self._flag(names.TERMINATEDS, terminateds, agent)
            truncated = self._flag(names.TRUNCATEDS, truncateds, agent) or (all_truncate and not terminated)
            ends = terminated or truncated
            if agent in self._waiting and (ends or agent in observations):
                reward = self._waiting.pop(agent)
                observation = self._last(agent, observations, truncated=truncated and not terminated)
                info = infos.get(agent, {})
                outcomes.append(AgentOutcomes([agent], [observation], [reward], [terminated], [truncated], [info]))
            if agent in observations and not ends:
                acting[agent] = observations[agent]
        self.t += 1
        self._await(acting, infos, {outcome.agents[0] for outcome in outcomes})
        return outcomes, all_terminate or all_truncate

    def _await(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any], continuing: Collection[Any]) -> None:
        for agent, observation in observations.items():
            if observation is None:
                raise self.refusing(agent)(f"column {names.OBS!r} must contain an observation, got None", None)
        # The environment may overwrite observations before the outcomes of actions are known.
        copies = {agent: copy_observation(observation) for agent, observation in observations.items()}
        self._last_observations |= copies
        self.groups = self._group(copies, copies, infos, continuing)

    def _last(self, agent: Any, observations: Mapping[Any, Any], *, truncated: bool) -> Any:
        if agent in observations:
            return observations[agent]
        if truncated:
            requirement = f"column {names.NEXT_OBS!r} must have a final observation for a truncated agent, got none"
            raise self.refusing(agent)(requirement, None)
        return self._last_observations[agent]

    def _flag(self, name: str, flags: Mapping[Any, Any], agent: Any) -> bool:
        return bool(exact_number(name, flags.get(agent, False), BOOL, self.refusing(agent)))

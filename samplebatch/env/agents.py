"""Environments of several agents: which agents share a policy, the adapter interface, and the groups that act next.

An adapter holds one environment and the episode under way in it. `groups` are the agents that act next; `step` lets
them act, and returns the outcomes that are known by then. Where agents act at once, these are the outcomes of that
step. Where they take turns, an agent sees the outcome of its action at its next turn.
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
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.batch.builder import PolicyMapping
from samplebatch.column.casting import Refuse
from samplebatch.env.environment_state import load_environments, save_environments
from samplebatch.errors import EnvironmentSpecError, PolicyNotFoundError, near_names
from samplebatch.names import PolicyID

_NUMBERED = re.compile(r"(?P<kind>.*[^_\d])_?\d+")


def policy_by_kind(environment: Any) -> Callable[[Any], str]:
    """Map the agents of one kind to one policy: an agent's id without the number at its end.

    Agents whose ids differ in the number alone but whose spaces differ cannot share a batch, and get a policy each.

    Parameters
    ----------
    environment
        A PettingZoo environment, of either interface, or a `MultiAgentEnv` of RLlib's.

    Examples
    --------
    >>> from samplebatch.env.registry import make_environment
    >>> mapping = policy_by_kind(make_environment("mpe2/simple_tag_v3"))
    >>> [mapping(agent) for agent in ("adversary_0", "adversary_2", "agent_0")]
    ['adversary', 'adversary', 'agent']
    """
    spaces: dict[str, Any] = {}
    mixed = set()
    for agent in getattr(environment, "possible_agents", ()):
        own = (observation_space_of(environment, agent), action_space_of(environment, agent))
        if spaces.setdefault(kind_of(agent), own) != own:
            mixed.add(kind_of(agent))
    return partial(_policy_of, mixed=frozenset(mixed))


def _policy_of(agent: Any, *, mixed: frozenset[str]) -> str:
    kind = kind_of(agent)
    return str(agent) if kind in mixed else kind


def kind_of(agent: Any) -> str:
    """Take the number off the end of an agent's id.

    >>> [kind_of(agent) for agent in ("agent_0", "walker12", "red_knight", 3)]
    ['agent', 'walker', 'red_knight', 'agent']
    """
    if isinstance(agent, int):
        return "agent"
    found = _NUMBERED.fullmatch(str(agent))
    return found["kind"] if found else str(agent)


def observation_space_of(environment: Any, agent: Any) -> Any:
    """Return the space of an agent's observations; None where the environment does not tell.

    >>> from samplebatch.env.registry import make_environment
    >>> observation_space_of(make_environment("mpe2/simple_spread_v3"), "agent_0").shape
    (18,)
    """
    # RLlib's environments have the same names for their spaces, but no function.
    space_of = getattr(environment, "get_observation_space", None) or getattr(environment, "observation_space", None)
    return None if space_of is None else space_of(agent)


def action_space_of(environment: Any, agent: Any) -> Any:
    """Return the space of an agent's actions."""
    space_of = getattr(environment, "get_action_space", None) or environment.action_space
    return space_of(agent)


class Episode(NamedTuple):
    """The episode that a policy mapping is asked about, for self-play in which seats change.

    Attributes
    ----------
    eps_id
        Its id, unlike any other: 63 random bits.
    env_id
        Its environment.
    number
        How many episodes the environment had before; the same in every run, unlike `eps_id`.
    """

    eps_id: int
    env_id: int
    number: int

    @property
    def id_(self) -> int:
        """The id by the name under which RLlib's mapping functions read it."""
        return self.eps_id


class PolicyOfAgents:
    """The policies of agents as users map them, by agent or by agent and episode, for multi-agent collectors.

    Parameters
    ----------
    mapping
        A mapping from agent ids to policy ids, or a function of the agent id, or of the agent id and the `Episode`. A
        function gets the episode if it has a second parameter without a default, one named `episode`, or any number.

    Attributes
    ----------
    sees_episodes
        Whether the policy of an agent may be another in every episode.

    Examples
    --------
    >>> by_turns = PolicyOfAgents(lambda agent, episode: "even" if (agent + episode.number) % 2 == 0 else "odd")
    >>> [by_turns(agent, Episode(7, 0, number)) for number in range(2) for agent in range(2)]
    ['even', 'odd', 'odd', 'even']
    """

    def __init__(self, mapping: PolicyMapping) -> None:
        self._mapping = mapping
        self.sees_episodes = not isinstance(mapping, Mapping) and _takes_episode(mapping)

    def __call__(self, agent: Any, episode: Episode) -> PolicyID:
        """Find the policy that acts for an agent."""
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
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return True
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return len(by_place) > 1 and (by_place[1].default is inspect.Parameter.empty or by_place[1].name == "episode")


def agent_positions(environment: Any) -> dict[Any, int]:
    """Number the agents that the environment says are possible, in its order.

    >>> from samplebatch.env.registry import make_environment
    >>> agent_positions(make_environment("mpe2/simple_spread_v3"))
    {'agent_0': 0, 'agent_1': 1, 'agent_2': 2}
    """
    possible: Iterable[Any] = getattr(environment, "possible_agents", ())
    return {agent: position for position, agent in enumerate(possible)}


Ints = npt.NDArray[np.int64]

_APART = frozenset({"environment", "env_id", "groups", "_policy_of"})
"""Attributes of adapters that are no part of their state, or are saved in another form."""


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

    def reset(self, **arguments: Any) -> None:
        """Begin an episode, with arguments of the environment's own `reset`, of which a `seed` takes precedence."""
        seed, self._seed = arguments.pop("seed", self._seed), None
        self.eps_id = secrets.randbits(63)
        self.t = 0
        self._episodes += 1
        if self._policy_of.sees_episodes:
            self._policies = {}
        self._reset(seed, **arguments)
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environment and the episode, which can be pickled, for `load_state_dict`."""
        groups = [
            (group.policy_id, group.agents, group.observations, group.infos, group.begins) for group in self.groups
        ]
        values = {name: value for name, value in vars(self).items() if name not in _APART}
        return {"saved": save_environments([self.environment]), **copy.deepcopy({"values": values, "groups": groups})}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue where an environment made alike was; return whether that could be saved."""
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
        """Reset the environment, and find the agents that act first."""

    @abstractmethod
    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        """Let the agents act.

        Parameters
        ----------
        actions
            An action for each agent of each of the `groups`, as the environment takes it.
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
            group = AgentGroup(self, policy_id, own, positions)
            group.observations = group.pick(observations)
            group.infos = [infos.get(agent, {}) for agent in own]
            begins = [agent not in going_on for agent in own]
            group.begins = begins if any(begins) else None
            groups.append(group)
        return groups


def _pick_only(agent: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda by_agent: (by_agent[agent],)


def copy_observation(value: Any) -> Any:
    """Copy an observation that the environment may write over in its next step."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: copy_observation(item) for key, item in value.items()}
    if type(value) is tuple or type(value) is list:
        return type(value)(copy_observation(item) for item in value)
    return value

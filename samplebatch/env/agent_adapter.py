"""MultiAgentAdapter: environments of several agents behind one interface, and the groups of agents that act next.

An adapter holds one environment and the episode under way in it. `groups` are the agents that act next; `step` lets
them act, and returns the outcomes that are known by then. Where agents act at once, these are the outcomes of that
step. Where they take turns, an agent sees the outcome of its action at its next turn.
"""

from __future__ import annotations

import copy
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.column.exact import Refuse
from samplebatch.env.agents import Episode, PolicyOfAgents, agent_positions
from samplebatch.env.environment_state import load_environments, save_environments
from samplebatch.errors import EnvironmentSpecError
from samplebatch.names import PolicyID

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environment and the episode, which can be pickled, for `load_state_dict`."""
        groups = [
            (group.policy_id, group.agents, group.observations, group.infos, group.begins) for group in self.groups
        ]
        values = {name: value for name, value in vars(self).items() if name not in _APART}
        return {"saved": save_environments([self.environment]), **copy.deepcopy({"values": values, "groups": groups})}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue where an environment made alike was; return whether that could be saved.

        Raises
        ------
        EnvironmentSpecError
            If it is of another class.
        """
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

"""Policies of multi-agent collectors; in each step, every policy is called once for its agents in all environments."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from samplebatch import errors, names
from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.env.agents import AgentGroup, action_space_of, observation_space_of
from samplebatch.env.seeds import seed_number
from samplebatch.env.spaces import Leaf, SpaceLayout, column_names
from samplebatch.names import PolicyID
from samplebatch.policy import action_map
from samplebatch.policy.actor import Actor, check_noise
from samplebatch.policy.as_policy import is_random
from samplebatch.policy.random import RandomDraws
from samplebatch.policy.state import detach, put, take

_MASK = "action_mask"

_new_tuple = tuple.__new__
"""Constructor of named tuples that runs no Python code."""

Noise = bool | Callable[[Any, Any], Any]
"""Whether to call the policy's `add_exploration_noise`; or a function of actions and batch to call instead."""


class AgentActions(NamedTuple):
    """Actions of n agents of one policy, and the columns to record.

    - `actions`: one action per agent, in the unit of the environment.
    - `columns`: columns by dotted name: `actions` in the unit of the policy, and further columns of the policy such as
      log-probabilities. Arrays of shape (n, ...), or lists of n values.
    """

    actions: Sequence[Any]
    columns: dict[str, Any]


class AgentActor(ABC):
    """Policy of a group of agents; a multi-agent collector calls the policy once per step for the entire group.

    - `action_unit`: unit of the recorded actions; None if unknown or before the first action.
    """

    action_unit: ActionUnit | None = None

    @abstractmethod
    def act(self, groups: Sequence[AgentGroup], stacked_obs: Leaf | None) -> AgentActions:
        """Return one action per agent.

        - `groups`: groups of agents; actions are returned in this order.
        - `stacked_obs`: observations of all agents, shape (n, ...); None if an observation is nested.
        """

    def draw(self, groups: Sequence[AgentGroup], stacked_obs: Leaf | None) -> AgentActions:
        """Return one random action per agent; accepts the same arguments as `act`."""
        return self.act(groups, stacked_obs)

    @property
    def random_unit(self) -> ActionUnit | None:
        """Unit of recorded random actions."""
        return self.action_unit

    def forget(self, env_id: int) -> None:
        """Reset the recurrent states of an environment's agents at the start of an episode."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the actor's picklable state for `load_state_dict`: its random generators and recurrent states."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore random generators and recurrent states from `state_dict` of an actor with an equivalent policy."""


class RandomAgents(AgentActor):
    """Random actions for agents of multi-agent collectors, with one random generator per agent.

    Actions are restricted by an `action_mask` in the agent's dict observation, or else in the agent's info.
    """

    def __init__(
        self, seeds: Mapping[int, np.random.SeedSequence], *, map_action: action_map.ActionMap | None = None
    ) -> None:
        self._seeds, self._map_action = seeds, action_map.random_action_map(map_action)
        self._scale: Callable[[Any], Any] | None = None
        self._draws: dict[tuple[int, Any], RandomDraws] = {}

    def act(self, groups: Sequence[AgentGroup], stacked_obs: Leaf | None) -> AgentActions:
        """Return one random action per agent."""
        actions = []
        for group in groups:
            for position, key in enumerate(group.keys):
                draws = self._draws.get(key)
                if draws is None:
                    draws = self._draws[key] = self._create_draws(group, group.agents[position])
                actions.append(draws.next(_action_mask(group.observations[position], group.infos[position])))
        if self._map_action is None or not actions:
            return AgentActions(actions, {names.ACTIONS: actions})
        if self._scale is None:
            # Agents of a policy share an action space.
            first = groups[0]
            space = action_space_of(first.adapter.environment, first.agents[0])
            self._scale = action_map.make_action_map(self._map_action, space)
        recorded = np.stack(actions)
        return AgentActions(list(self._scale(recorded)), {names.ACTIONS: recorded})

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the random generators, and prefetched actions; see `AgentActor.state_dict`."""
        draws = {key: agent_draws.state_dict() for key, agent_draws in self._draws.items()}
        return {"seeds": copy.deepcopy(self._seeds), "draws": draws, "action_unit": self.action_unit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the random generators; see `AgentActor.load_state_dict`."""
        self._seeds, self.action_unit = copy.deepcopy(state["seeds"]), state.get("action_unit")
        self._draws = {key: RandomDraws.from_state_dict(agent_draws) for key, agent_draws in state["draws"].items()}

    def _create_draws(self, group: AgentGroup, agent: Any) -> RandomDraws:
        space = action_space_of(group.adapter.environment, agent)
        self.action_unit = common_unit([self.action_unit, action_map.unit_of_actions(None, self._map_action, space)])
        space = action_map.space_to_draw(self._map_action, space)
        return RandomDraws(space, seed_number(self._seeds[group.adapter.env_id].spawn(1)[0]))


class PolicyAgents(AgentActor):
    """Policy that acts for several agents in one call, with exploration noise and one recurrent state per agent.

    The policy is called as described in `as_policy`, with one row per agent; `batch.info` is an array of dicts. An
    agent's recurrent state is zero at the start of its episode.
    """

    def __init__(
        self,
        policy: Any,
        seed: np.random.SeedSequence,
        random: RandomAgents,
        *,
        exploration_noise: Noise = False,
        map_action: action_map.ActionMap | None = None,
    ) -> None:
        self._policy = policy
        self._map_action = map_action
        self._noise = exploration_noise
        self._seed = seed
        self._random = random
        self._states = _States()
        self._actor: Actor | None = None
        self._loaded: Mapping[str, Any] | None = None

    def forget(self, env_id: int) -> None:
        """Reset the recurrent states of an environment's agents at the start of an episode."""
        self._states.forget(env_id)

    def act(self, groups: Sequence[AgentGroup], stacked_obs: Leaf | None) -> AgentActions:
        """Call the policy for all agents and return one action per agent."""
        actor = self._actor or self._create_actor(groups[0])
        layout = self._observations
        observations = _stack_observations(groups, layout) if stacked_obs is None or not layout.plain else [stacked_obs]
        if layout.plain and observations[0].shape[1:] != self._row_shape:
            raise _shape_error(groups, self._row_shape)
        count = len(observations[0])
        infos: Any = None
        if actor.takes_batch:
            # An array of dicts, because agents may have infos with different keys.
            infos = np.fromiter([info or {} for group in groups for info in group.infos], object, count)
        result = actor.act(observations, infos, self._states.gather(groups, count), count)
        if result.state is not None:
            self._states.keep([key for group in groups for key in group.keys], result.state)
        layout, columns = self._actions, result.columns
        for name in self._obs_names:
            del columns[name]
        if layout.plain:
            return _new_tuple(AgentActions, (list(result.actions[0]), columns))
        recorded = layout.nest_each([columns.pop(name) for name in self._action_names], count)
        return AgentActions(list(layout.nest_each(result.actions, count)), {names.ACTIONS: list(recorded), **columns})

    def draw(self, groups: Sequence[AgentGroup], stacked_obs: Leaf | None) -> AgentActions:
        """Return one random action per agent, and reset the agents' recurrent states to zero."""
        actor = self._actor or self._create_actor(groups[0])
        self._states.drop([key for group in groups for key in group.keys])
        random_actions = self._random.act(groups, stacked_obs)
        if not actor.unmaps_random:
            return random_actions
        recorded, actions = actor.unmap(np.stack(random_actions.actions))
        return AgentActions(list(actions), {names.ACTIONS: recorded})

    @property
    def random_unit(self) -> ActionUnit | None:
        """Unit of recorded random actions."""
        return None if self._actor is None else self._actor.random_unit

    def state_dict(self) -> dict[str, Any]:
        """Return the recurrent states and random generators; see `AgentActor.state_dict`."""
        actor_state = self._loaded if self._actor is None else self._actor.state_dict()
        return {"states": self._states.state_dict(), "actor": actor_state, "random": self._random.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore recurrent states and random generators; see `AgentActor.load_state_dict`."""
        self._states.load_state_dict(state["states"])
        self._random.load_state_dict(state["random"])
        self._loaded = state["actor"]
        if self._actor is not None and self._loaded is not None:
            self._actor.load_state_dict(self._loaded)

    def _create_actor(self, first: AgentGroup) -> Actor:
        environment, agent = first.adapter.environment, first.agents[0]
        observation_space = observation_space_of(environment, agent)
        if observation_space is None:
            raise errors.EnvironmentSpecError(
                f"an environment must declare an observation space for every agent of a policy, got none for {agent!r}"
            )
        self._observations = observations = SpaceLayout(observation_space)
        self._row_shape: tuple[int, ...] = observations.spaces[0].shape if observations.plain else ()
        action_space = action_space_of(environment, agent)
        self._actions = actions = SpaceLayout(action_space)
        self._action_names = column_names(names.ACTIONS, actions)
        self._obs_names = column_names(names.OBS, observations)
        actor = self._actor = Actor(
            self._policy,
            observations,
            actions,
            action_space,
            seed=self._seed,
            exploration_noise=self._noise,
            map_action=self._map_action,
        )
        self.action_unit = actor.action_unit
        if self._loaded is not None:
            actor.load_state_dict(self._loaded)
        return actor


_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "exploration_noise": check_noise,
    "map_action": action_map.check_action_map,
}
"""Validators of the options that may be specified per policy."""
_OF_DECISIONS = frozenset({"exploration_noise"})
"""Options that have no effect on random actions and are rejected for random policies."""


def check_options(name: str, options: Any, policy: Any) -> Any:
    """Validate a collector option, which may be a mapping from policy ids to values.

    Raises PolicyNotFoundError if the mapping contains a policy id that does not exist in the collector. Raises
    PolicySpecError if the value is not supported, or exploration noise is enabled for a random policy.
    """
    by_id = isinstance(options, Mapping)
    for option in options.values() if by_id else (options,):
        _CHECKS[name](option)
    needs_decisions = name in _OF_DECISIONS
    for policy_id, option in options.items() if by_id else ():
        if isinstance(policy, Mapping) and policy_id not in policy:
            raise errors.PolicyNotFoundError(
                f"{name} must name policies, got {policy_id!r}; {errors.near_names(policy_id, policy)}"
            )
        agents_policy = policy[policy_id] if isinstance(policy, Mapping) else policy
        if option and needs_decisions and is_random(agents_policy):
            raise errors.PolicySpecError(f"{name} must be False for policy {policy_id!r}, which is random")
    if not by_id and options and needs_decisions and is_random(policy):
        raise errors.PolicySpecError(f"{name} must be False for a random policy")
    return options


class PolicyActors:
    """Actors of a multi-agent collector by policy id; each actor is created on first use."""

    def __init__(self, create: Callable[[PolicyID], AgentActor]) -> None:
        self._create = create
        self._actors: dict[PolicyID, AgentActor] = {}

    def __getitem__(self, policy_id: PolicyID) -> AgentActor:
        actor = self._actors.get(policy_id)
        if actor is None:
            actor = self._actors[policy_id] = self._create(policy_id)
        return actor

    def values(self) -> Collection[AgentActor]:
        """Actors created so far."""
        return self._actors.values()

    def forget(self, env_id: int) -> None:
        """Reset the recurrent states of an environment's agents at the start of an episode."""
        for actor in self._actors.values():
            actor.forget(env_id)

    def state_dict(self) -> dict[PolicyID, Any]:
        """Return the state of each actor by policy id."""
        return {policy_id: actor.state_dict() for policy_id, actor in self._actors.items()}

    def load_state_dict(self, state: Mapping[PolicyID, Any]) -> None:
        """Restore the result of `state_dict`; existing actors are replaced."""
        self._actors = {}
        for policy_id, actor_state in state.items():
            self[policy_id].load_state_dict(actor_state)


class _States:
    """Recurrent states of agents; each agent's state is one row of a state that the policy returned."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, Any], tuple[Any, int]] = {}

    def gather(self, groups: Sequence[AgentGroup], count: int) -> Any:
        """Return the states of `count` agents, with zeros for agents without a state; None if no agent has a state."""
        stored_rows = self._rows
        if not stored_rows:
            return None
        sources: dict[int, tuple[Any, list[int], list[int]]] = {}
        agents = [pair for group in groups for pair in zip(group.keys, group.begins or repeat(False), strict=False)]
        for position, (key, begins) in enumerate(agents):
            stored_row = None if begins else stored_rows.get(key)
            if stored_row is not None:
                state, row = stored_row
                _, positions, rows = sources.setdefault(id(state), (state, [], []))
                positions.append(position)
                rows.append(row)
        joined: Any = None
        for state, positions, rows in sources.values():
            joined = put(joined, np.array(positions), take(state, np.array(rows)), count)
        return joined

    def keep(self, keys: Sequence[tuple[int, Any]], state: Any) -> None:
        """Store the rows of a state that the policy returned for `keys`."""
        self._rows.update((key, (state, row)) for row, key in enumerate(keys))

    def state_dict(self) -> dict[tuple[int, Any], Any]:
        """Return a copy of each agent's state; each copy has one row."""
        return {key: detach(take(state, np.array([row]))) for key, (state, row) in self._rows.items()}

    def load_state_dict(self, state: Mapping[tuple[int, Any], Any]) -> None:
        """Replace the states of all agents with the result of `state_dict`."""
        self._rows = {key: (agent_state, 0) for key, agent_state in state.items()}

    def drop(self, keys: Iterable[tuple[int, Any]]) -> None:
        """Delete the states of agents."""
        for key in keys if self._rows else ():
            self._rows.pop(key, None)

    def forget(self, env_id: int) -> None:
        """Delete the states of an environment's agents."""
        for key in [key for key in self._rows if key[0] == env_id]:
            del self._rows[key]


def _action_mask(observation: Any, info: Any) -> Any:
    mask = observation.get(_MASK) if isinstance(observation, dict) else None
    if mask is None and isinstance(info, dict):
        mask = info.get(_MASK)
    return mask.astype(np.int8) if isinstance(mask, np.ndarray) else mask


def _stack_observations(groups: Sequence[AgentGroup], layout: SpaceLayout) -> list[Leaf]:
    if layout.plain:
        try:
            return [np.stack([value for group in groups for value in group.observations])]
        except ValueError:
            raise _shape_error(groups, layout.spaces[0].shape) from None
    leaves = [
        layout.flatten_one(value, names.OBS, group.adapter.refusing(agent))
        for group in groups
        for agent, value in zip(group.agents, group.observations, strict=True)
    ]
    return [np.concatenate(parts) for parts in zip(*leaves, strict=True)]


def _shape_error(groups: Sequence[AgentGroup], shape: tuple[int, ...]) -> errors.SampleBatchError:
    group, agent, agent_shape = next(
        (group, agent, np.shape(value))
        for group in groups
        for agent, value in zip(group.agents, group.observations, strict=True)
        if np.shape(value) != shape
    )
    return group.adapter.refusing(agent)(
        f"column {names.OBS!r} must have rows of shape {shape}, got {agent_shape}", None
    )

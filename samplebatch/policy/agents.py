"""Policies of several agents: asked once per step for all agents of a policy, in all environments."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from samplebatch import names
from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.env.agents import AgentGroup, action_space_of, observation_space_of
from samplebatch.env.seeds import seed_number
from samplebatch.env.spaces import Leaf, SpaceLayout, column_names
from samplebatch.errors import (
    EnvironmentSpecError,
    PolicyNotFoundError,
    PolicySpecError,
    SampleBatchError,
    near_names,
)
from samplebatch.names import PolicyID
from samplebatch.policy.action_map import (
    ActionMap,
    check_action_map,
    make_action_map,
    map_of_draws,
    space_to_draw,
    unit_of_actions,
)
from samplebatch.policy.actor import Actor, check_noise
from samplebatch.policy.as_policy import is_random
from samplebatch.policy.random import RandomPolicy, draws_as_random_policy
from samplebatch.policy.state import detach, put, take

_MASK = "action_mask"
_AHEAD = 64
"""Actions of an agent that are drawn at once: drawing one takes as long as drawing many."""

_new_tuple = tuple.__new__
"""Makes a named tuple without a call of Python code."""

Noise = bool | Callable[[Any, Any], Any]
"""Whether a policy's `add_exploration_noise` is called; or what is called, on actions and batch, in its place."""


class AgentActions(NamedTuple):
    """Actions of n agents of one policy, and the columns of its decision.

    Attributes
    ----------
    actions
        The action of each, as the environment takes it.
    columns
        `actions` as the policy gave them, and all else that it wants kept, such as the actions' probabilities, by
        dotted name: arrays of shape (n, ...), or lists of n values.
    """

    actions: Sequence[Any]
    columns: dict[str, Any]


class AgentActor(ABC):
    """The policy of some agents, asked once per step for all of them by a multi-agent collector.

    Attributes
    ----------
    action_unit
        The unit of the actions that are recorded; None if unknown, or nothing was recorded yet.
    """

    action_unit: ActionUnit | None = None

    @abstractmethod
    def act(self, groups: Sequence[AgentGroup], seen: Leaf | None) -> AgentActions:
        """Decide on an action for each agent.

        Parameters
        ----------
        groups
            The agents, one group after the other.
        seen
            Their observations, shape (n, ...); None where an observation is nested.
        """

    def draw(self, groups: Sequence[AgentGroup], seen: Leaf | None) -> AgentActions:
        """Draw an action for each agent at random; takes what `act` takes."""
        return self.act(groups, seen)

    @property
    def drawn_unit(self) -> ActionUnit | None:
        """The unit of the random actions that are recorded."""
        return self.action_unit

    def forget(self, env_id: int) -> None:
        """Drop the states of the agents of an environment in which an episode begins."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the generators and the agents' states, which can be pickled, for `load_state_dict`."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the actor of a policy made alike was."""


class RandomAgents(AgentActor):
    """Random actions of agents of multi-agent collectors, drawn for each by a generator of its own.

    Where an observation is a dict with an `action_mask`, or else the info has one, only actions are drawn that it
    allows.
    """

    def __init__(self, seeds: Mapping[int, np.random.SeedSequence], *, map_action: ActionMap | None = None) -> None:
        self._seeds, self._map_action = seeds, map_of_draws(map_action)
        self._scale: Callable[[Any], Any] | None = None
        self._draws: dict[tuple[int, Any], _Draws] = {}

    def act(self, groups: Sequence[AgentGroup], seen: Leaf | None) -> AgentActions:
        """Draw an action for each agent."""
        actions = []
        for group in groups:
            for place, key in enumerate(group.keys):
                draws = self._draws.get(key)
                if draws is None:
                    draws = self._draws[key] = self._begin(group, group.agents[place])
                actions.append(draws.next(_mask(group.observations[place], group.infos[place])))
        if self._map_action is None or not actions:
            return AgentActions(actions, {names.ACTIONS: actions})
        if self._scale is None:
            # Agents of a policy have one space.
            first = groups[0]
            space = action_space_of(first.adapter.environment, first.agents[0])
            self._scale = make_action_map(self._map_action, space)
        drawn = np.stack(actions)
        return AgentActions(list(self._scale(drawn)), {names.ACTIONS: drawn})

    def state_dict(self) -> dict[str, Any]:
        """Return the generators, and the actions that are drawn already; see `AgentActor.state_dict`."""
        draws = {key: own.state_dict() for key, own in self._draws.items()}
        return {"seeds": copy.deepcopy(self._seeds), "draws": draws, "action_unit": self.action_unit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where other draws were; see `AgentActor.load_state_dict`."""
        self._seeds, self.action_unit = copy.deepcopy(state["seeds"]), state.get("action_unit")
        self._draws = {key: _Draws.from_state_dict(own) for key, own in state["draws"].items()}

    def _begin(self, group: AgentGroup, agent: Any) -> _Draws:
        space = action_space_of(group.adapter.environment, agent)
        self.action_unit = common_unit([self.action_unit, unit_of_actions(None, self._map_action, space)])
        space = space_to_draw(self._map_action, space)
        return _Draws(space, seed_number(self._seeds[group.adapter.env_id].spawn(1)[0]))


class _Draws:
    """The random actions of one agent: drawn ahead, or by its space where that has a mask or draws in its own way."""

    def __init__(self, space: Any, seed: int) -> None:
        # A copy: agents may share the space, and the environment may draw from it too.
        self._space = copy.deepcopy(space)
        self._space.seed(seed)
        # Where a mask comes and goes, the draws of one generator must not repeat those of the other.
        apart = np.random.SeedSequence(seed).spawn(1)[0]
        self._policy = RandomPolicy(self._space, seed=apart) if draws_as_random_policy(space) else None
        self._ahead: list[Any] = []

    def next(self, mask: Any) -> Any:
        """Return the next action; spaces of one's own may know nothing of masks."""
        if mask is not None:
            return self._space.sample(mask)
        if not self._ahead:
            if self._policy is None:
                return self._space.sample()
            self._ahead = list(self._policy.sample(_AHEAD))
        return self._ahead.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the generators, and the actions that are drawn already."""
        policy = None if self._policy is None else self._policy.state_dict()
        return {"space": copy.deepcopy(self._space), "policy": policy, "ahead": list(self._ahead)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> _Draws:
        """Go on where another's draws were."""
        own = cls(state["space"], 0)
        own._space, own._ahead = copy.deepcopy(state["space"]), list(state["ahead"])
        if own._policy is not None:
            own._policy.load_state_dict(state["policy"])
        return own


class PolicyAgents(AgentActor):
    """A policy of several agents, asked once for all of them, with exploration and a state for each.

    The policy is called as `as_policy` says, with a row an agent; `batch.info` is an array of dicts. What it carries
    from step to step is kept for every agent, and is zero where an agent's episode begins.
    """

    def __init__(
        self,
        policy: Any,
        seed: np.random.SeedSequence,
        random: RandomAgents,
        *,
        exploration_noise: Noise = False,
        map_action: ActionMap | None = None,
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
        """Drop the states of the agents of an environment in which an episode begins."""
        self._states.forget(env_id)

    def act(self, groups: Sequence[AgentGroup], seen: Leaf | None) -> AgentActions:
        """Ask the policy for an action of each agent."""
        actor = self._actor or self._make_actor(groups[0])
        layout = self._observations
        observations = _stack(groups, layout) if seen is None or not layout.plain else [seen]
        if layout.plain and observations[0].shape[1:] != self._row_shape:
            raise _wrong_shape(groups, self._row_shape)
        count = len(observations[0])
        infos: Any = None
        if actor.takes_batch:
            # Agents need not tell the same of themselves: an array of dicts.
            infos = np.fromiter([info or {} for group in groups for info in group.infos], object, count)
        result = actor.act(observations, infos, self._states.gather(groups, count), count)
        if result.state is not None:
            self._states.keep([key for group in groups for key in group.keys], result.state)
        layout, columns = self._actions, result.columns
        for name in self._seen_names:
            del columns[name]
        if layout.plain:
            return _new_tuple(AgentActions, (list(result.actions[0]), columns))
        own = layout.nest_each([columns.pop(name) for name in self._action_names], count)
        return AgentActions(list(layout.nest_each(result.actions, count)), {names.ACTIONS: list(own), **columns})

    def draw(self, groups: Sequence[AgentGroup], seen: Leaf | None) -> AgentActions:
        """Draw an action for each agent, which then has no state."""
        actor = self._actor or self._make_actor(groups[0])
        self._states.drop([key for group in groups for key in group.keys])
        drawn = self._random.act(groups, seen)
        if not actor.maps_drawn_back:
            return drawn
        kept, actions = actor.unmap(np.stack(drawn.actions))
        return AgentActions(list(actions), {names.ACTIONS: kept})

    @property
    def drawn_unit(self) -> ActionUnit | None:
        """The unit of the random actions that are recorded."""
        return None if self._actor is None else self._actor.drawn_unit

    def state_dict(self) -> dict[str, Any]:
        """Return the agents' states, and the generators of a policy that is a space; see `AgentActor.state_dict`."""
        drawn = self._loaded if self._actor is None else self._actor.state_dict()
        return {"states": self._states.state_dict(), "actor": drawn, "random": self._random.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the agents of another collector were; see `AgentActor.load_state_dict`."""
        self._states.load_state_dict(state["states"])
        self._random.load_state_dict(state["random"])
        self._loaded = state["actor"]
        if self._actor is not None and self._loaded is not None:
            self._actor.load_state_dict(self._loaded)

    def _make_actor(self, first: AgentGroup) -> Actor:
        environment, agent = first.adapter.environment, first.agents[0]
        observation_space = observation_space_of(environment, agent)
        if observation_space is None:
            raise EnvironmentSpecError(
                f"an environment must tell the observation space of an agent that a policy acts for, and {agent!r} has "
                "none"
            )
        self._observations = observations = SpaceLayout(observation_space)
        self._row_shape: tuple[int, ...] = observations.spaces[0].shape if observations.plain else ()
        action_space = action_space_of(environment, agent)
        self._actions = actions = SpaceLayout(action_space)
        self._action_names = column_names(names.ACTIONS, actions)
        self._seen_names = column_names(names.OBS, observations)
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


_CHECKS: Mapping[str, Callable[[Any], None]] = {"exploration_noise": check_noise, "map_action": check_action_map}
"""Checks of the options that a policy may have each its own of."""
_OF_DECISIONS = frozenset({"exploration_noise"})
"""Those that change a policy's decisions, which random actions are not."""


def check_options(name: str, options: Any, policy: Any) -> Any:
    """Check that all policies that an option of a collector names are there, and that noise is not for random ones.

    Raises
    ------
    PolicyNotFoundError
        If one is not there.
    PolicySpecError
        If one acts at random and is to have noise, or the option stands for nothing.
    """
    by_id = isinstance(options, Mapping)
    for wanted in options.values() if by_id else (options,):
        _CHECKS[name](wanted)
    needs_decisions = name in _OF_DECISIONS
    for policy_id, wanted in options.items() if by_id else ():
        if isinstance(policy, Mapping) and policy_id not in policy:
            raise PolicyNotFoundError(f"{name} must name policies, got {policy_id!r}; {near_names(policy_id, policy)}")
        own = policy[policy_id] if isinstance(policy, Mapping) else policy
        if wanted and needs_decisions and is_random(own):
            raise PolicySpecError(f"policy {policy_id!r} must decide by itself to have {name}, and acts at random")
    if not by_id and options and needs_decisions and is_random(policy):
        raise PolicySpecError(f"a policy must decide by itself to have {name}, and acts at random")
    return options


class PolicyActors:
    """The actors of a multi-agent collector by policy, each made when its policy is first asked."""

    def __init__(self, make: Callable[[PolicyID], AgentActor]) -> None:
        self._make = make
        self._actors: dict[PolicyID, AgentActor] = {}

    def __getitem__(self, policy_id: PolicyID) -> AgentActor:
        actor = self._actors.get(policy_id)
        if actor is None:
            actor = self._actors[policy_id] = self._make(policy_id)
        return actor

    def values(self) -> Collection[AgentActor]:
        """The actors that were made."""
        return self._actors.values()

    def forget(self, env_id: int) -> None:
        """Drop the states of the agents of an environment in which an episode begins."""
        for actor in self._actors.values():
            actor.forget(env_id)

    def state_dict(self) -> dict[PolicyID, Any]:
        """Return the state of each actor, for `load_state_dict`."""
        return {policy_id: actor.state_dict() for policy_id, actor in self._actors.items()}

    def load_state_dict(self, state: Mapping[PolicyID, Any]) -> None:
        """Go on where the actors of policies made alike were."""
        self._actors = {}
        for policy_id, own in state.items():
            self[policy_id].load_state_dict(own)


class _States:
    """The recurrent state of each agent: a row of a state that the policy returned."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, Any], tuple[Any, int]] = {}

    def gather(self, groups: Sequence[AgentGroup], count: int) -> Any:
        """Return the state of the agents, zero for those that begin; None if that is all of them."""
        held = self._held
        if not held:
            return None
        sources: dict[int, tuple[Any, list[int], list[int]]] = {}
        asked = [pair for group in groups for pair in zip(group.keys, group.begins or repeat(False), strict=False)]
        for place, (key, begins) in enumerate(asked):
            found = None if begins else held.get(key)
            if found is not None:
                state, row = found
                _, places, rows = sources.setdefault(id(state), (state, [], []))
                places.append(place)
                rows.append(row)
        joined: Any = None
        for state, places, rows in sources.values():
            joined = put(joined, np.array(places), take(state, np.array(rows)), count)
        return joined

    def keep(self, keys: Sequence[tuple[int, Any]], state: Any) -> None:
        """Keep the state that the policy returned."""
        self._held.update((key, (state, row)) for row, key in enumerate(keys))

    def state_dict(self) -> dict[tuple[int, Any], Any]:
        """Return the state of each agent, of one row."""
        return {key: detach(take(state, np.array([row]))) for key, (state, row) in self._held.items()}

    def load_state_dict(self, state: Mapping[tuple[int, Any], Any]) -> None:
        """Go on with the states of other agents."""
        self._held = {key: (own, 0) for key, own in state.items()}

    def drop(self, keys: Iterable[tuple[int, Any]]) -> None:
        """Forget some agents."""
        for key in keys if self._held else ():
            self._held.pop(key, None)

    def forget(self, env_id: int) -> None:
        """Forget the agents of an environment."""
        for key in [key for key in self._held if key[0] == env_id]:
            del self._held[key]


def _mask(observation: Any, info: Any) -> Any:
    mask = observation.get(_MASK) if isinstance(observation, dict) else None
    if mask is None and isinstance(info, dict):
        mask = info.get(_MASK)
    return mask.astype(np.int8) if isinstance(mask, np.ndarray) else mask


def _stack(groups: Sequence[AgentGroup], layout: SpaceLayout) -> list[Leaf]:
    if layout.plain:
        try:
            return [np.stack([value for group in groups for value in group.observations])]
        except ValueError:
            raise _wrong_shape(groups, layout.spaces[0].shape) from None
    leaves = [
        layout.flatten_one(value, names.OBS, group.adapter.refusing(agent))
        for group in groups
        for agent, value in zip(group.agents, group.observations, strict=True)
    ]
    return [np.concatenate(parts) for parts in zip(*leaves, strict=True)]


def _wrong_shape(groups: Sequence[AgentGroup], shape: tuple[int, ...]) -> SampleBatchError:
    group, agent, found = next(
        (group, agent, np.shape(value))
        for group in groups
        for agent, value in zip(group.agents, group.observations, strict=True)
        if np.shape(value) != shape
    )
    return group.adapter.refusing(agent)(f"column {names.OBS!r} must have rows of shape {shape}, got {found}", None)

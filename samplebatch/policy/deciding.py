"""Deciders: what the agents of one policy do, all at once."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from samplebatch import names
from samplebatch.env.spaces import Layout, Leaf, column_names
from samplebatch.env.teams import Key, Team
from samplebatch.errors import EnvironmentSpecError, SampleBatchError
from samplebatch.policy.choices import Chooser
from samplebatch.policy.state import put, taken

_MASK = "action_mask"

Noise = bool | Callable[[Any, Any], Any]
"""Whether a policy's `add_exploration_noise` is called; or what is called, on actions and batch, in its place."""


class Decided(NamedTuple):
    """What n agents do.

    Attributes
    ----------
    actions
        The action of each, as the environment takes it.
    kept
        The action of each as its row has it, as the policy gave it; None if they are a column.
    columns
        What else its row has, such as the action's probability, by dotted name: arrays of shape (n, ...).
    """

    actions: Sequence[Any]
    kept: Sequence[Any] | None
    columns: dict[str, Leaf]

    def row(self, place: int) -> tuple[Any, dict[str, Any]]:
        """Return the action of one agent, as its row has it, and the further columns."""
        further = {name: column[place] for name, column in self.columns.items()}
        action = further.pop(names.ACTIONS) if self.kept is None else self.kept[place]
        return action, _tree(further) if further else further


class Decider(ABC):
    """Decides for all agents of one policy."""

    @abstractmethod
    def decide(self, teams: Sequence[Team], seen: Leaf | None) -> Decided:
        """Decide what each of the agents does.

        Parameters
        ----------
        teams
            The agents, one team after the other.
        seen
            Their observations, where these are numbers and lie together already.
        """

    def forget(self, env_id: int) -> None:
        """Forget what agents of an environment carry, in which an episode begins."""
        return None


class RandomDecider(Decider):
    """Lets every agent act at random, by a generator of its own.

    Where an observation is a dict with an `action_mask`, or else the info has one, only actions are drawn that it
    allows.

    Parameters
    ----------
    seeds
        What the generators of the agents of each environment are seeded by, by `env_id`.
    """

    def __init__(self, seeds: Mapping[int, np.random.SeedSequence]) -> None:
        self._seeds = seeds
        self._spaces: dict[Key, Any] = {}

    def decide(self, teams: Sequence[Team], seen: Leaf | None) -> Decided:
        """Draw an action for each of the agents."""
        actions = []
        for team in teams:
            for place, key in enumerate(team.keys):
                space = self._spaces.get(key)
                if space is None:
                    space = self._spaces[key] = self._space(team, team.agents[place])
                mask = _mask(team.observations[place], team.infos[place])
                # Spaces of one's own may know nothing of masks.
                actions.append(space.sample() if mask is None else space.sample(mask))
        return Decided(actions, actions, {})

    def _space(self, team: Team, agent: Any) -> Any:
        # A copy: agents may share the space, and the environment may draw from it too.
        space = copy.deepcopy(team.run.environment.action_space(agent))
        space.seed(seed_number(self._seeds[team.run.env_id].spawn(1)[0]))
        return space


class PolicyDecider(Decider):
    """Asks a policy, once for all of its agents.

    The policy is called as `as_policy` says, with a row an agent; `batch.info` is an array of dicts. What it carries
    from step to step is kept for every agent, and is zero where an agent's episode begins.

    Parameters
    ----------
    policy
        Whatever `as_policy` takes.
    seed
        Seed of the draws, where the policy is a space.
    exploration_noise
        As for `Chooser`.
    """

    def __init__(self, policy: Any, seed: np.random.SeedSequence, *, exploration_noise: Noise = False) -> None:
        self._policy = policy
        self._noise = exploration_noise
        self._seed = seed
        self._states = _States()
        self._chooser: Chooser | None = None

    def forget(self, env_id: int) -> None:
        """Forget what agents of an environment carry, in which an episode begins."""
        self._states.forget(env_id)

    def decide(self, teams: Sequence[Team], seen: Leaf | None) -> Decided:
        """Ask the policy what the agents do."""
        chooser = self._chooser
        if chooser is None:
            chooser = self._chooser = self._made(teams[0])
        layout = self._observations
        observations = _stacked(teams, layout) if seen is None or not layout.plain else [seen]
        if layout.plain and observations[0].shape[1:] != layout.spaces[0].shape:
            raise _wrong_shape(teams, layout.spaces[0].shape)
        count = len(observations[0])
        infos: Any = None
        if chooser.takes_batch:
            # Agents need not tell the same of themselves: an array of dicts.
            infos = np.fromiter([info or {} for team in teams for info in team.infos], object, count)
        choice = chooser.choose(observations, infos, self._states.of(teams, count), count)
        if choice.state is not None:
            self._states.keep([key for team in teams for key in team.keys], choice.state)
        layout, columns = self._actions, choice.columns
        for name in self._seen_names:
            del columns[name]
        if layout.plain:
            return Decided(list(choice.actions[0]), None, columns)
        leaves = [columns.pop(name) for name in self._action_names]
        taken_apart = (choice.actions, leaves)
        actions, own = ([layout.nest([leaf[row] for leaf in of]) for row in range(count)] for of in taken_apart)
        return Decided(actions, own, columns)

    def _made(self, first: Team) -> Chooser:
        environment, agent = first.run.environment, first.agents[0]
        space_of = getattr(environment, "observation_space", None)
        if space_of is None:
            raise EnvironmentSpecError(
                f"an environment must tell the observation space of an agent that a policy acts for, and {agent!r} has "
                "none"
            )
        self._observations = observations = Layout(space_of(agent))
        action_space = environment.action_space(agent)
        self._actions = actions = Layout(action_space)
        self._action_names = column_names(names.ACTIONS, actions)
        self._seen_names = column_names(names.OBS, observations)
        return Chooser(
            self._policy, observations, actions, action_space, seed=self._seed, exploration_noise=self._noise
        )


class _States:
    """What a policy carries for each agent: a row of a state that it returned."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[Any, int]] = {}

    def of(self, teams: Sequence[Team], count: int) -> Any:
        """Return the state of the agents, zero for those that begin; None if that is all of them."""
        held = self._held
        if not held:
            return None
        sources: dict[int, tuple[Any, list[int], list[int]]] = {}
        asked = [pair for team in teams for pair in zip(team.keys, team.begins or repeat(False), strict=False)]
        for place, (key, begins) in enumerate(asked):
            found = None if begins else held.get(key)
            if found is not None:
                state, row = found
                _, places, rows = sources.setdefault(id(state), (state, [], []))
                places.append(place)
                rows.append(row)
        joined: Any = None
        for state, places, rows in sources.values():
            joined = put(joined, np.array(places), taken(state, np.array(rows)), count)
        return joined

    def keep(self, keys: Sequence[Key], state: Any) -> None:
        """Keep what the policy returned."""
        self._held.update((key, (state, row)) for row, key in enumerate(keys))

    def forget(self, env_id: int) -> None:
        """Forget the agents of an environment."""
        for key in [key for key in self._held if key[0] == env_id]:
            del self._held[key]


def seed_number(seeds: np.random.SeedSequence) -> int:
    """Return a seed for what takes a single number."""
    return int(seeds.generate_state(1)[0])


def _mask(observation: Any, info: Any) -> Any:
    mask = observation.get(_MASK) if isinstance(observation, dict) else None
    if mask is None and isinstance(info, dict):
        mask = info.get(_MASK)
    return mask.astype(np.int8) if isinstance(mask, np.ndarray) else mask


def _stacked(teams: Sequence[Team], layout: Layout) -> list[Leaf]:
    """Lay the observations of several agents one under the other, leaf by leaf."""
    if layout.plain:
        try:
            return [np.stack([value for team in teams for value in team.observations])]
        except ValueError:
            raise _wrong_shape(teams, layout.spaces[0].shape) from None
    leaves = [
        layout.flatten_one(value, names.OBS, team.run.refusing(agent))
        for team in teams
        for agent, value in zip(team.agents, team.observations, strict=True)
    ]
    return [np.concatenate(parts) for parts in zip(*leaves, strict=True)]


def _wrong_shape(teams: Sequence[Team], shape: tuple[int, ...]) -> SampleBatchError:
    """Word the error for the first observation that has not the shape of its space."""
    team, agent, found = next(
        (team, agent, np.shape(value))
        for team in teams
        for agent, value in zip(team.agents, team.observations, strict=True)
        if np.shape(value) != shape
    )
    return team.run.refusing(agent)(f"column {names.OBS!r} must have rows of shape {shape}, got {found}", None)


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest values by their dotted names."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *folders, name = path.split(".")
        folder = tree
        for part in folders:
            folder = folder.setdefault(part, {})
        folder[name] = value
    return tree

"""Deciders: what the agents of one policy do, all at once."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from samplebatch import names
from samplebatch.errors import EnvironmentSpecError
from samplebatch.rollout.choices import Chooser, column_names
from samplebatch.rollout.policy_state import put, taken
from samplebatch.rollout.runs import Decision, Run, Waiting
from samplebatch.rollout.spaces import Layout, Leaf

_MASK = "action_mask"
_NONE: dict[str, Any] = {}

Key = tuple[int, Any]
"""What tells an agent from those of other environments: `env_id` and the agent's id."""


class Asked(NamedTuple):
    """An agent that is to act, and the run it acts in."""

    run: Run
    waiting: Waiting

    @property
    def key(self) -> Key:
        """What tells the agent from all others."""
        return self.run.env_id, self.waiting.agent


class Decider(ABC):
    """Decides for all agents of one policy."""

    @abstractmethod
    def decide(self, asked: Sequence[Asked]) -> list[Decision]:
        """Decide what each of the agents does."""

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

    def decide(self, asked: Sequence[Asked]) -> list[Decision]:
        """Draw an action for each of the agents."""
        actions = [_drawn(self._space(one), _mask(one.waiting)) for one in asked]
        return [Decision(action, action, _NONE) for action in actions]

    def _space(self, one: Asked) -> Any:
        space = self._spaces.get(one.key)
        if space is None:
            # A copy: agents may share the space, and the environment may draw from it too.
            space = copy.deepcopy(one.run.environment.action_space(one.waiting.agent))
            space.seed(seed_number(self._seeds[one.run.env_id].spawn(1)[0]))
            self._spaces[one.key] = space
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
    """

    def __init__(self, policy: Any, seed: np.random.SeedSequence) -> None:
        self._policy = policy
        self._seed = seed
        self._states = _States()
        self._chooser: Chooser | None = None

    def forget(self, env_id: int) -> None:
        """Forget what agents of an environment carry, in which an episode begins."""
        self._states.forget(env_id)

    def decide(self, asked: Sequence[Asked]) -> list[Decision]:
        """Ask the policy what the agents do."""
        chooser = self._chooser
        if chooser is None:
            chooser = self._chooser = self._made(asked[0])
        count = len(asked)
        observations = _stacked([one.waiting.observation for one in asked], self._observations)
        # Agents need not tell the same of themselves: an array of dicts.
        infos: Any = np.empty(count, object)
        infos[:] = [one.waiting.info or {} for one in asked]
        keys = [one.key for one in asked]
        state = self._states.of(keys, [one.waiting.begins for one in asked])
        choice = chooser.choose(observations, infos, state, count)
        if choice.state is not None:
            self._states.keep(keys, choice.state)
        layout, columns = self._actions, choice.columns
        kept = [columns[name] for name in self._action_names]
        extras = [(name.split("."), column) for name, column in columns.items() if name not in self._known]
        return [
            Decision(
                layout.nest([leaf[row] for leaf in choice.actions]),
                layout.nest([leaf[row] for leaf in kept]),
                _tree([(path, column[row]) for path, column in extras]),
            )
            for row in range(count)
        ]

    def _made(self, first: Asked) -> Chooser:
        environment, agent = first.run.environment, first.waiting.agent
        space_of = getattr(environment, "observation_space", None)
        if space_of is None:
            raise EnvironmentSpecError(
                f"an environment must tell the observation space of an agent that a policy acts for, and {agent!r} has "
                "none"
            )
        self._observations = Layout(space_of(agent))
        action_space = environment.action_space(agent)
        self._actions = Layout(action_space)
        self._action_names = column_names(names.ACTIONS, self._actions)
        self._known = {*self._action_names, *column_names(names.OBS, self._observations)}
        return Chooser(self._policy, self._observations, self._actions, action_space, seed=self._seed)


class _States:
    """What a policy carries for each agent: a row of a state that it returned."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[Any, int]] = {}

    def of(self, keys: Sequence[Key], begins: Sequence[bool]) -> Any:
        """Return the state of the agents, zero for those that begin; None if that is all of them."""
        sources: dict[int, tuple[Any, list[int], list[int]]] = {}
        for place, (key, begin) in enumerate(zip(keys, begins, strict=True)):
            if not begin and key in self._held:
                state, row = self._held[key]
                _, places, rows = sources.setdefault(id(state), (state, [], []))
                places.append(place)
                rows.append(row)
        joined: Any = None
        for state, places, rows in sources.values():
            joined = put(joined, np.array(places), taken(state, np.array(rows)), len(keys))
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


def _mask(waiting: Waiting) -> Any:
    observation, info = waiting.observation, waiting.info
    mask = observation.get(_MASK) if isinstance(observation, dict) else None
    if mask is None and isinstance(info, dict):
        mask = info.get(_MASK)
    return mask.astype(np.int8) if isinstance(mask, np.ndarray) else mask


def _stacked(observations: Sequence[Any], layout: Layout) -> list[Leaf]:
    """Lay the observations of several agents one under the other, leaf by leaf."""
    if layout.plain:
        return [np.stack(observations)]
    leaves = [layout.flatten_one(observation) for observation in observations]
    return [np.concatenate(parts) for parts in zip(*leaves, strict=True)]


def _tree(leaves: Sequence[tuple[list[str], Any]]) -> dict[str, Any]:
    """Nest values by their paths."""
    tree: dict[str, Any] = {}
    for (*folders, name), value in leaves:
        folder = tree
        for part in folders:
            folder = folder.setdefault(part, {})
        folder[name] = value
    return tree


def _drawn(space: Any, mask: Any) -> Any:
    # Spaces of one's own may know nothing of masks.
    return space.sample() if mask is None else space.sample(mask)

"""RandomPolicy: draws actions from a space, for all environments at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, node
from samplebatch.env.spaces import Leaf, SpaceLayout
from samplebatch.errors import require

Draw = Callable[[int], Leaf]
"""Draws so many values of a leaf's space: shape (n, ...)."""


class RandomPolicy:
    """Acts at random: every action of the space is as likely as any other, as with `space.sample()`.

    Values without bounds are drawn from a normal distribution, those with one bound from an exponential one that
    begins there.

    Parameters
    ----------
    action_space
        A Gymnasium space, of one environment. It is not changed: its own generator is not used.
    seed
        The seed of the draws, or a generator to draw from.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> policy = RandomPolicy(spaces.Discrete(3), seed=0)
    >>> policy(Batch(obs=np.zeros((5, 4)))).act
    array([2, 1, 1, 0, 0])
    >>> RandomPolicy(spaces.Box(-2, 2, (1,)), seed=0).sample(2).dtype
    dtype('float32')
    """

    def __init__(
        self, action_space: Any, *, seed: int | np.random.SeedSequence | np.random.Generator | None = None
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self.action_space = action_space
        self._layout = layout = SpaceLayout(action_space)
        # Spaces without arrays (texts, graphs, sequences) know best how to draw from themselves.
        self._own = [None if layout.is_numeric(leaf) else copy.deepcopy(leaf) for leaf in layout.spaces]
        self._draws = [
            _draw_of(leaf, self._rng) if own is None else _draw_objects(own, self._rng)
            for leaf, own in zip(layout.spaces, self._own, strict=True)
        ]

    def __call__(self, batch: Batch, state: Any = None) -> Batch:
        """Draw an action for every row of `batch.obs`."""
        return node(Batch, {"act": self.sample(_rows(batch.obs))})

    def sample(self, rows: int) -> Any:
        """Draw so many actions: an array of shape (rows, ...), or a batch of them for dict and tuple spaces."""
        return self._layout.batch([draw(rows) for draw in self._draws])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators, which can be pickled."""
        return {"generator": self._rng.bit_generator.state, "spaces": copy.deepcopy(self._own)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the draws of a policy of the same space where its `state_dict` was.

        >>> from gymnasium import spaces
        >>> policy, again = (RandomPolicy(spaces.Discrete(99), seed=seed) for seed in (1, 2))
        >>> again.load_state_dict(policy.state_dict())
        >>> (policy.sample(5) == again.sample(5)).all()
        np.True_
        """
        self._rng.bit_generator.state = state["generator"]
        for own, known in zip(self._own, copy.deepcopy(state["spaces"]), strict=True):
            if own is not None:
                own.__dict__.update(known.__dict__)


def draws_as_random_policy(space: Any) -> bool:
    """Tell whether `RandomPolicy` draws from a space as its own `sample` does: one array, of a class of Gymnasium's.

    >>> from gymnasium import spaces
    >>> [draws_as_random_policy(space) for space in (spaces.Discrete(3), spaces.Text(4), spaces.Tuple([]))]
    [True, False, False]
    """
    spaces = require("gymnasium.spaces", "envs")
    return type(space) in (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)


def _rows(observations: Any) -> int:
    while KINDS[type(observations)] == NODE:
        observations = next(iter(observations.__dict__.values()))
    return len(observations)


def _draw_objects(space: Any, rng: np.random.Generator) -> Draw:
    space.seed(int(rng.integers(1 << 31)))
    return lambda rows: np.fromiter((space.sample() for _ in range(rows)), object, rows)


def _draw_of(space: Any, rng: np.random.Generator) -> Draw:
    spaces = require("gymnasium.spaces", "envs")
    if isinstance(space, spaces.Discrete):
        first, stop, dtype = int(space.start), int(space.start + space.n), space.dtype
        return lambda rows: rng.integers(first, stop, rows, dtype)
    if isinstance(space, spaces.MultiDiscrete):
        low, high = space.start.astype(space.dtype), (space.start + space.nvec).astype(space.dtype)
        return lambda rows: rng.integers(low, high, (rows, *space.shape), space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return lambda rows: rng.integers(0, 2, (rows, *space.shape), space.dtype)
    return _box(space, rng)


def _box(space: Any, rng: np.random.Generator) -> Draw:
    low, high, dtype, shape = space.low, space.high, space.dtype, space.shape
    if dtype.kind in "iu":
        return lambda rows: rng.integers(low, high, (rows, *shape), dtype, endpoint=True)
    below, above = space.bounded_below, space.bounded_above
    both = below & above
    floor = np.where(both, low, 0.0)
    extent = np.where(both, high, 0.0) - floor
    if both.all():
        return lambda rows: (floor + extent * rng.random((rows, *shape))).astype(dtype)

    def draw(rows: int) -> npt.NDArray[Any]:
        size = (rows, *shape)
        inside = floor + extent * rng.random(size)
        tail = rng.exponential(size=size)
        outside = np.where(below, low + tail, np.where(above, high - tail, rng.standard_normal(size)))
        return np.where(both, inside, outside).astype(dtype)

    return draw


_AHEAD = 256
"""Actions that are drawn at once: drawing one takes as long as drawing hundreds."""


class RandomByEnvironment:
    """Random actions, drawn by a generator for each environment, for collectors of one agent.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> seeds = np.random.SeedSequence(1).spawn(3)
    >>> three = RandomByEnvironment(spaces.Discrete(9), range(3), seeds)
    >>> one = RandomByEnvironment(spaces.Discrete(9), range(2, 3), seeds[2:])
    >>> all_ids, own_id = (Batch(info=Batch(env_id=np.array(ids))) for ids in ([0, 1, 2], [2]))
    >>> [three(all_ids)["act"][2] == one(own_id)["act"][0] for _ in range(300)] == [True] * 300
    True
    """

    def __init__(self, action_space: Any, env_ids: range, seeds: Sequence[np.random.SeedSequence]) -> None:
        self._layout = SpaceLayout(action_space)
        self._policies = [RandomPolicy(action_space, seed=seed) for seed in seeds]
        self._first = env_ids.start
        drawn = [self._layout.flatten(policy.sample(_AHEAD)) for policy in self._policies]
        self._drawn: list[Leaf] = [np.stack(leaves) for leaves in zip(*drawn, strict=True)]
        self._at: npt.NDArray[np.intp] = np.zeros(len(self._policies), np.intp)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Draw an action for every environment in `batch.info.env_id`."""
        envs = batch.info.env_id - self._first
        at = self._at[envs]
        for env in envs[at == _AHEAD].tolist():
            self._draw_ahead(env)
        at = self._at[envs]
        self._at[envs] = at + 1
        return {"act": self._layout.batch([leaf[envs, at] for leaf in self._drawn])}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators, and the actions that are drawn already; it can be pickled."""
        drawn = [leaf.copy() for leaf in self._drawn]
        return {"policies": [own.state_dict() for own in self._policies], "drawn": drawn, "at": self._at.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the draws for as many environments where their `state_dict` was."""
        for own, known in zip(self._policies, state["policies"], strict=True):
            own.load_state_dict(known)
        self._drawn = [leaf.copy() for leaf in state["drawn"]]
        self._at = state["at"].copy()

    def _draw_ahead(self, env: int) -> None:
        leaves = self._layout.flatten(self._policies[env].sample(_AHEAD))
        for drawn, leaf in zip(self._drawn, leaves, strict=True):
            drawn[env] = leaf
        self._at[env] = 0

"""Random policies: one generator for all environments, one generator per environment, and one generator per agent."""

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

Sampler = Callable[[int], Leaf]
"""Function from a number of rows to samples of a leaf's space, shape (rows, ...)."""


class RandomPolicy:
    """Policy that samples actions with the distribution of `space.sample()`.

    The distribution is uniform for values with two bounds, normal for values without bounds, and exponential from the
    bound for values with one bound.

    Parameters
    ----------
    action_space
        Action space of one environment; sampling does not use or change the generator of the space.
    seed
        Seed or generator for the random actions.

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
        # Text, graph and sequence spaces have no array representation and sample from copies of themselves.
        self._object_spaces = [None if layout.is_numeric(leaf) else copy.deepcopy(leaf) for leaf in layout.spaces]
        self._samplers = [
            _sampler(leaf, self._rng) if object_space is None else _object_sampler(object_space, self._rng)
            for leaf, object_space in zip(layout.spaces, self._object_spaces, strict=True)
        ]

    def __call__(self, batch: Batch, state: Any = None) -> Batch:
        """Return a random action for every row of `batch.obs`."""
        return node(Batch, {"act": self.sample(_rows(batch.obs))})

    def sample(self, rows: int) -> Any:
        """Return random actions: an array of shape (rows, ...), or a batch of arrays for dict and tuple spaces."""
        return self._layout.batch([sampler(rows) for sampler in self._samplers])

    def state_dict(self) -> dict[str, Any]:
        """Return the picklable state of the generators."""
        return {"generator": self._rng.bit_generator.state, "spaces": copy.deepcopy(self._object_spaces)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generators from the `state_dict` of a policy with the same space.

        >>> from gymnasium import spaces
        >>> policy, again = (RandomPolicy(spaces.Discrete(99), seed=seed) for seed in (1, 2))
        >>> again.load_state_dict(policy.state_dict())
        >>> (policy.sample(5) == again.sample(5)).all()
        np.True_
        """
        self._rng.bit_generator.state = state["generator"]
        for space, saved_space in zip(self._object_spaces, copy.deepcopy(state["spaces"]), strict=True):
            if space is not None:
                space.__dict__.update(saved_space.__dict__)


def _rows(observations: Any) -> int:
    while KINDS[type(observations)] == NODE:
        observations = next(iter(observations.__dict__.values()))
    return len(observations)


def _object_sampler(space: Any, rng: np.random.Generator) -> Sampler:
    space.seed(int(rng.integers(1 << 31)))
    return lambda rows: np.fromiter((space.sample() for _ in range(rows)), object, rows)


def _sampler(space: Any, rng: np.random.Generator) -> Sampler:
    spaces = require("gymnasium.spaces", "envs")
    if isinstance(space, spaces.Discrete):
        first, stop, dtype = int(space.start), int(space.start + space.n), space.dtype
        return lambda rows: rng.integers(first, stop, rows, dtype)
    if isinstance(space, spaces.MultiDiscrete):
        low, high = space.start.astype(space.dtype), (space.start + space.nvec).astype(space.dtype)
        return lambda rows: rng.integers(low, high, (rows, *space.shape), space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return lambda rows: rng.integers(0, 2, (rows, *space.shape), space.dtype)
    return _box_sampler(space, rng)


def _box_sampler(space: Any, rng: np.random.Generator) -> Sampler:
    low, high, dtype, shape = space.low, space.high, space.dtype, space.shape
    if dtype.kind in "iu":
        return lambda rows: rng.integers(low, high, (rows, *shape), dtype, endpoint=True)
    below, above = space.bounded_below, space.bounded_above
    bounded = below & above
    floor = np.where(bounded, low, 0.0)
    extent = np.where(bounded, high, 0.0) - floor
    if bounded.all():
        return lambda rows: (floor + extent * rng.random((rows, *shape))).astype(dtype)

    def sample(rows: int) -> npt.NDArray[Any]:
        size = (rows, *shape)
        inside = floor + extent * rng.random(size)
        tail = rng.exponential(size=size)
        outside = np.where(below, low + tail, np.where(above, high - tail, rng.standard_normal(size)))
        return np.where(bounded, inside, outside).astype(dtype)

    return sample


_PREFETCHED = 256
"""Number of actions that are sampled at once per environment: one action costs as much as hundreds."""


class RandomByEnvironment:
    """Random actions for single-agent collectors, with one generator per environment.

    >>> from gymnasium import spaces
    >>> seeds = np.random.SeedSequence(1).spawn(3)
    >>> policy = RandomByEnvironment(spaces.Discrete(9), range(3), seeds)
    >>> last_env_policy = RandomByEnvironment(spaces.Discrete(9), range(2, 3), seeds[2:])
    >>> all_envs, last_env = (
    ...     Batch(info=Batch(env_id=np.array(ids))) for ids in ([0, 1, 2], [2])
    ... )
    >>> [
    ...     policy(all_envs)["act"][2] == last_env_policy(last_env)["act"][0]
    ...     for _ in range(300)
    ... ] == [True] * 300
    True
    """

    def __init__(self, action_space: Any, env_ids: range, seeds: Sequence[np.random.SeedSequence]) -> None:
        self._layout = SpaceLayout(action_space)
        self._policies = [RandomPolicy(action_space, seed=seed) for seed in seeds]
        self._first_env_id = env_ids.start
        samples = [self._layout.flatten(policy.sample(_PREFETCHED)) for policy in self._policies]
        self._prefetched: list[Leaf] = [np.stack(leaves) for leaves in zip(*samples, strict=True)]
        self._positions: npt.NDArray[np.intp] = np.zeros(len(self._policies), np.intp)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return a random action for every environment in `batch.info.env_id`."""
        envs = batch.info.env_id - self._first_env_id
        positions = self._positions[envs]
        for env in envs[positions == _PREFETCHED].tolist():
            self._prefetch(env)
        positions = self._positions[envs]
        self._positions[envs] = positions + 1
        return {"act": self._layout.batch([leaf[envs, positions] for leaf in self._prefetched])}

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's picklable state: random generators and prefetched actions."""
        prefetched = [leaf.copy() for leaf in self._prefetched]
        return {
            "policies": [policy.state_dict() for policy in self._policies],
            "drawn": prefetched,
            "at": self._positions.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict` of a policy for the same number of environments."""
        for policy, policy_state in zip(self._policies, state["policies"], strict=True):
            policy.load_state_dict(policy_state)
        self._prefetched = [leaf.copy() for leaf in state["drawn"]]
        self._positions = state["at"].copy()

    def _prefetch(self, env: int) -> None:
        leaves = self._layout.flatten(self._policies[env].sample(_PREFETCHED))
        for prefetched, leaf in zip(self._prefetched, leaves, strict=True):
            prefetched[env] = leaf
        self._positions[env] = 0


_PREFETCHED_PER_AGENT = 64
"""Number of actions that are sampled at once per agent."""


class RandomDraws:
    """Random actions of one agent: prefetched, or sampled one by one for masks and custom `sample` methods."""

    def __init__(self, space: Any, seed: int) -> None:
        # A copy, because other agents or the environment may sample from the same space.
        self._space = copy.deepcopy(space)
        self._space.seed(seed)
        # Separate seeds: with an occasional mask, both generators are used and must not repeat each other.
        policy_seed = np.random.SeedSequence(seed).spawn(1)[0]
        self._policy = RandomPolicy(self._space, seed=policy_seed) if _draws_as_random_policy(space) else None
        self._prefetched: list[Any] = []

    def next(self, mask: Any) -> Any:
        """Return the next action; a `mask` of None is not passed on, because custom spaces may not accept masks."""
        if mask is not None:
            return self._space.sample(mask)
        if not self._prefetched:
            if self._policy is None:
                return self._space.sample()
            self._prefetched = list(self._policy.sample(_PREFETCHED_PER_AGENT))
        return self._prefetched.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the random generators and prefetched actions."""
        policy = None if self._policy is None else self._policy.state_dict()
        return {"space": copy.deepcopy(self._space), "policy": policy, "ahead": list(self._prefetched)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RandomDraws:
        """Create random actions that continue from the result of `state_dict`."""
        draws = cls(state["space"], 0)
        draws._space, draws._prefetched = copy.deepcopy(state["space"]), list(state["ahead"])
        if draws._policy is not None:
            draws._policy.load_state_dict(state["policy"])
        return draws


def _draws_as_random_policy(space: Any) -> bool:
    """Return whether `RandomPolicy` can sample like `space.sample`: only for Gymnasium's own single-array classes.

    >>> from gymnasium import spaces
    >>> [
    ...     _draws_as_random_policy(space)
    ...     for space in (spaces.Discrete(3), spaces.Text(4), spaces.Tuple([]))
    ... ]
    [True, False, False]
    """
    spaces = require("gymnasium.spaces", "envs")
    return type(space) in (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)

"""RandomByEnvironment: random actions that do not depend on how many environments there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.env.spaces import Leaf, SpaceLayout
from samplebatch.policy.random import RandomPolicy

_AHEAD = 256
"""Actions that are drawn at once: drawing one takes as long as drawing hundreds."""


class RandomByEnvironment:
    """Random actions, drawn by a generator for each environment, for collectors of one agent.

    Parameters
    ----------
    action_space
        The space of one environment's actions.
    env_ids
        The `env_id` of each environment, counting on from the first.
    seeds
        The seed of each environment.

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

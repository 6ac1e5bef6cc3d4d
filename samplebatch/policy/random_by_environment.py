"""RandomByEnvironment: random actions that do not depend on how many environments there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from samplebatch.batch.nested.batch import Batch
from samplebatch.env.spaces import Layout, Leaf
from samplebatch.policy.random import RandomPolicy

_AHEAD = 256
"""Steps that are drawn at once: drawing one action takes as long as drawing hundreds."""


class RandomByEnvironment:
    """Acts at random, with a generator for each environment.

    Parameters
    ----------
    action_space
        The space of one environment's actions.
    seeds
        The seed of each environment.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> seeds = np.random.SeedSequence(1).spawn(3)
    >>> three, one = (RandomByEnvironment(spaces.Discrete(9), own) for own in (seeds, seeds[2:]))
    >>> [three(Batch())["act"][2] == one(Batch())["act"][0] for _ in range(300)] == [True] * 300
    True
    """

    def __init__(self, action_space: Any, seeds: Sequence[np.random.SeedSequence]) -> None:
        self._layout = Layout(action_space)
        self._policies = [RandomPolicy(action_space, seed=seed) for seed in seeds]
        self._drawn: list[Leaf] = []
        self._at = _AHEAD

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Draw an action for every environment."""
        if self._at == _AHEAD:
            each = [self._layout.flatten(policy.sample(_AHEAD)) for policy in self._policies]
            self._drawn = [np.stack(leaves, 1) for leaves in zip(*each, strict=True)]
            self._at = 0
        at = self._at
        self._at = at + 1
        return {"act": self._layout.batch([leaf[at] for leaf in self._drawn])}

"""Policies of continuous actions that explore by noise: the base of those of TD3 and SAC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from samplebatch.batch.nested.batch import Batch
from samplebatch.learn.exploration import BaseNoise, GaussianNoise
from samplebatch.learn.policy import Policy


class ContinuousPolicyWithExplorationNoise(Policy):
    """Base of policies of continuous actions, which collectors may be told to explore with noise.

    Parameters
    ----------
    exploration_noise
        Makes noise of a shape; `"default"` for normal noise with a standard deviation of 0.1; None for none.
    action_space, action_scaling, **options
        As `Policy` takes them; actions are a Box, and scaled by default.

    Raises
    ------
    PolicySpecError
        If the action space is no Box, or has no bounds to scale to.
    """

    _action_spaces = spaces.Box
    _action_words = "a Box"

    def __init__(
        self,
        *,
        exploration_noise: BaseNoise | Literal["default"] | None = None,
        action_space: gymnasium.Space[Any],
        action_scaling: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(action_space, action_scaling=action_scaling, **options)
        self.exploration_noise = GaussianNoise(sigma=0.1) if exploration_noise == "default" else exploration_noise

    def add_exploration_noise(self, act: Any, batch: Batch) -> Any:
        """Add noise to actions, in their dtype, if the policy has some."""
        if self.exploration_noise is None:
            return act
        noisy = np.asarray(act) + self.exploration_noise(act.shape)
        return noisy.astype(act.dtype, copy=False)

    def get_exploration_state(self) -> dict[str, Any]:
        """Return the state of the noise, if the policy has some."""
        return {} if self.exploration_noise is None else self.exploration_noise.state_dict()

    def set_exploration_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the noise from a state that `get_exploration_state` returned."""
        if self.exploration_noise is not None:
            self.exploration_noise.load_state_dict(dict(state))

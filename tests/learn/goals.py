"""Small environments with goals: a point that is to come near a place, and bits that are to become others."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete


def _goal_space(position: Any) -> Any:
    return Dict({"observation": position, "achieved_goal": position, "desired_goal": position})


class PointReaching(gymnasium.Env[Any, Any]):
    """Point in a square that moves by up to 0.25 per step and axis; episodes are truncated after 12 steps."""

    observation_space = _goal_space(Box(-1.0, 1.0, (2,), np.float32))
    action_space = Box(-1.0, 1.0, (2,), np.float32)

    def _observation(self) -> dict[str, Any]:
        return {"observation": self._position, "achieved_goal": self._position, "desired_goal": self._goal}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._goal = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self._position, self._steps = np.zeros(2, np.float32), 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._position = np.clip(self._position + 0.25 * np.asarray(action, np.float32), -1, 1)
        self._steps += 1
        reward = float(point_reward(self._position[None], self._goal[None])[0])
        return self._observation(), reward, False, self._steps >= 12, {}


def point_reward(achieved: Any, desired: Any) -> Any:
    """Return 0 for points within 0.2 of their goals, -1 for others."""
    return np.where(np.linalg.norm(achieved - desired, axis=-1) < 0.2, 0.0, -1.0)


class BitFlipping(gymnasium.Env[Any, Any]):
    """Ten bits, one of which a step flips; episodes end when all bits equal the goal, or after 10 steps.

    Source: Andrychowicz et al. (2017), "Hindsight experience replay", section 3.1.
    """

    BITS = 10
    observation_space = _goal_space(Box(0.0, 1.0, (BITS,), np.float32))
    action_space = Discrete(BITS)

    def _observation(self) -> dict[str, Any]:
        bits = self._bits.copy()
        return {"observation": bits, "achieved_goal": bits, "desired_goal": self._goal}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._bits, self._goal = self.np_random.integers(0, 2, (2, self.BITS)).astype(np.float32)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._bits[action] = 1 - self._bits[action]
        self._steps += 1
        reward = float(bit_reward(self._bits[None], self._goal[None])[0])
        return self._observation(), reward, reward == 0.0, self._steps >= self.BITS, {}


def bit_reward(achieved: Any, desired: Any) -> Any:
    """Return 0 for bits that are all as their goals have them, -1 for others."""
    return np.where((achieved == desired).all(-1), 0.0, -1.0)

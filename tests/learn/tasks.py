"""Small environments that are learned in seconds: by the moment, by memory, and with forbidden actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Match(gymnasium.Env[Any, Any]):
    """Environment that rewards the choice that the observation shows; episodes have eight steps."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space: Any = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def _show(self) -> Any:
        self.shown = int(self.np_random.integers(3))
        return np.eye(3, dtype=np.float32)[self.shown]

    def step(self, action: Any) -> Any:
        reward = self._reward(action)
        self.steps += 1
        return self._show(), reward, False, self.steps == 8, {}

    def _reward(self, action: Any) -> float:
        return float(action == self.shown)


class Aim(Match):
    """Environment that rewards actions near the observed number."""

    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)

    def _reward(self, action: Any) -> float:
        return -float(abs(action[0] - (self.shown - 1)))


class Recall(Match):
    """Environment that shows a choice once, and rewards it three steps later."""

    def _show(self) -> Any:
        if self.steps == 0:
            return super()._show()
        return np.zeros(3, np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        over = self.steps == 4
        return self._show(), float(over and action == self.shown), over, False, {}


class Masked(Match):
    """Environment that allows two of three choices per step and rewards the shown one; other choices raise an error."""

    observation_space = spaces.Dict(  # type: ignore[assignment]
        obs=spaces.Box(-1.0, 1.0, (3,), np.float32), mask=spaces.MultiBinary(3)
    )

    def _show(self) -> Any:
        text = super()._show()
        self.mask = np.ones(3, np.int8)
        self.mask[(self.shown + 1 + int(self.np_random.integers(2))) % 3] = 0
        return {"obs": text, "mask": self.mask}

    def step(self, action: Any) -> Any:
        assert self.mask[action], "a forbidden choice"
        return super().step(action)

"""Small Gymnasium environments, each with a habit of its own."""

from __future__ import annotations

import signal
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


def make_cart_pole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


class Ladder(gymnasium.Env):
    """Episodes of a given length; an observation is (number, episode, step), the reward 100 * number + step.

    `truncates`: whether episodes are truncated instead of terminated. `with_infos`: whether infos of steps contain the
    step, and infos of resets contain the episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human"]}

    def __init__(self, number: int, length: int = 4, *, truncates: bool = False, with_infos: bool = False) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._number, self._length, self._truncates, self._with_infos = number, length, truncates, with_infos
        self._episode = -1
        self.made: list[Any] = []
        self.resets: list[Any] = []
        self.renders = 0
        self.closed = False

    def _observe(self) -> Any:
        return np.array([self._number, self._episode, self._step], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets.append((seed, options))
        self._episode += 1
        self._step = 0
        return self._observe(), {"episode_number": self._episode} if self._with_infos else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._step < self._length, "stepped beyond the end"
        self.made.append(action)
        self._step += 1
        over = self._step == self._length
        info = {"step": self._step, "name": f"step {self._step}"} if self._with_infos else {}
        return (
            self._observe(),
            100.0 * self._number + self._step,
            over and not self._truncates,
            over and self._truncates,
            info,
        )

    def render(self) -> None:
        self.renders += 1

    def close(self) -> None:
        self.closed = True


class Reusing(Ladder):
    """Ladder that writes every observation into one array and every info into one dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._array = np.zeros(3, np.float32)
        self._info: dict[str, Any] = {}

    def _observe(self) -> Any:
        self._array[:] = self._number, self._episode, self._step
        return self._array

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *others, info = super().step(action)
        self._info.update(info)
        return (*others, self._info)  # type: ignore[return-value]


class Nested(Ladder):
    """Ladder whose observations and actions have several parts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observation_space = spaces.Dict(
            eyes=spaces.Tuple([spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(100)]), mouth=spaces.Text(9)
        )
        self.action_space = spaces.Dict(
            hands=spaces.MultiDiscrete([2, 3]), feet=spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(2)])
        )

    def _observe(self) -> Any:
        eye = np.array([self._number, self._episode], np.float32)
        return {"eyes": (eye, np.int64(self._step)), "mouth": f"{self._number}/{self._step}"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return super().step(action)


class Failing(Ladder):
    """Ladder that raises an error in its tenth step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if len(self.made) == 9:
            self.made.append(action)
            raise RuntimeError("the rung broke")
        return super().step(action)


class Walk(gymnasium.Env):
    """Random walk that ends three steps from the start; the reward is the continuous action."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-5, 5, (1,), np.float64)
        self.action_space = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)
        self.made: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._position = 0
        return np.array([0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.made.append(np.array(action))
        self._position += 1 if self.np_random.random() < 0.5 else -1
        return np.array([float(self._position)]), float(action[0]), abs(self._position) == 3, False, {}


class Watched(Ladder):
    """Ladder that counts its steps in shared memory, and waits in every step until its gate is open.

    It uses no locks, so that its process can be killed at any time.
    """

    def __init__(
        self, *args: Any, steps: Any = None, renders: Any = None, gate: Any = None, pause_s: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._steps, self._rendered, self._gate, self._pause_s = steps, renders, gate, pause_s

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        # Where a display of pygame's was opened before, processes forked from there would not end when they are told.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while self._gate is not None and not self._gate.value:
            time.sleep(0.001)
        time.sleep(self._pause_s)
        if self._steps is not None:
            self._steps[self._number] += 1
        return super().step(action)

    def render(self) -> None:
        self._rendered[self._number] += 1

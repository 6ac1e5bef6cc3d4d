"""Tasks of the learning benchmark: environments, budgets, hyperparameters, and measured returns.

All contestants use the same environments, networks, optimizers, hyperparameters and numbers of environment steps. Each
contestant learns with its own collectors, buffers, algorithms and trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

Act = Callable[[Any, Any], tuple[Any, Any]]
"""Deterministic policy: maps an observation and a recurrent state to an action and the next state."""


@dataclass(frozen=True)
class Task:
    """Learning task: environment, budget of environment steps or offline updates, and hyperparameters."""

    name: str
    make: Callable[[], Any]
    steps: int
    envs: int
    hidden: tuple[int, ...]
    lr: float
    gamma: float
    options: dict[str, Any] = field(default_factory=dict)
    episodes: int = 20
    """Number of episodes in which the trained policy is evaluated."""
    agents: int = 1
    """Number of agents that act in each environment step; several agents form a team."""


@dataclass
class Curve:
    """Learning curve: the return of each training episode, and the number of environment steps at its end."""

    steps: int = 0
    points: list[tuple[int, float]] = field(default_factory=list)

    def watch(self, make: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap `make` so that the environments record their steps and returns in this curve."""
        return lambda: Watched(make(), self)


class Watched(gymnasium.Wrapper):  # type: ignore[misc, type-arg]
    """Environment that records its steps and returns in a curve."""

    def __init__(self, env: Any, curve: Curve) -> None:
        super().__init__(env)
        self._curve, self._return = curve, 0.0

    def reset(self, **options: Any) -> Any:
        self._return = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self._curve.steps += 1
        self._return += float(result[1])
        if result[2] or result[3]:
            self._curve.points.append((self._curve.steps, self._return))
        return result


def play(make: Callable[[], Any], act: Act, episodes: int, seed: int = 10_000) -> list[float]:
    """Run episodes in a new environment and return their returns."""
    env, returns = make(), []
    for number in range(episodes):
        obs, _ = env.reset(seed=seed + number)
        state, total, done = None, 0.0, False
        while not done:
            action, state = act(obs, state)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


class Masked(gymnasium.ObservationWrapper):  # type: ignore[misc, type-arg]
    """CartPole without velocities, which a policy with memory must infer."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        space = env.observation_space
        self.observation_space = gymnasium.spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[[0, 2]]


class BitFlipping(gymnasium.Env[Any, Any]):
    """Environment in which each action flips one bit until all bits equal a goal; section 3.1 of the HER paper.

    Andrychowicz et al. (2017), https://arxiv.org/abs/1707.01495.
    """

    def __init__(self, bits: int = 8) -> None:
        bits_space = gymnasium.spaces.Box(0.0, 1.0, (bits,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(
            dict.fromkeys(("observation", "achieved_goal", "desired_goal"), bits_space)
        )
        self.action_space = gymnasium.spaces.Discrete(bits)
        self._bits, self._goal = np.zeros((2, bits), np.float32)

    def _observation(self) -> dict[str, Any]:
        return {"observation": self._bits, "achieved_goal": self._bits, "desired_goal": self._goal}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._bits, self._goal = self.np_random.integers(0, 2, (2, len(self._bits))).astype(np.float32)
        self._steps_left = len(self._bits)
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._bits = self._bits.copy()
        self._bits[int(action)] = 1 - self._bits[int(action)]
        self._steps_left -= 1
        reward = float(reached(self._bits, self._goal))
        return self._observation(), reward, reward == 0.0, self._steps_left == 0, {}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return reached(achieved, desired)


def reached(achieved: Any, desired: Any) -> Any:
    """Return 0 for rows whose bits all equal the goal, otherwise -1."""
    return np.where((np.asarray(achieved) == np.asarray(desired)).all(-1), 0.0, -1.0)


def _cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


def _pendulum() -> Any:
    return gymnasium.make("Pendulum-v1")


def _masked() -> Any:
    return Masked(_cartpole())


def _half_cheetah() -> Any:
    return gymnasium.make("HalfCheetah-v4")


def _spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


_DISCRETE = {"size": 20_000, "start": 1000, "batch": 64, "every": 8, "updates": 4, "n_step": 3, "target": 250}
_ATOMS = _DISCRETE | {"atoms": 51, "v_min": 0.0, "v_max": 100.0, "epsilon": 0.05, "fraction": 0.25}
_PPO = {"n_steps": 128, "epochs": 10, "batch": 256, "lambda": 0.95, "clip": 0.2, "entropy": 0.0, "norm": 0.5}
_A2C = {"n_steps": 16, "epochs": 1, "batch": None, "lambda": 0.95, "entropy": 0.01, "norm": 0.5}

TASKS = {
    task.name: task
    for task in (
        Task("ppo", _cartpole, 50_176, 8, (64, 64), 1e-3, 0.98, _PPO | {"n_steps": 32, "lambda": 0.8, "epochs": 20}),
        Task("a2c", _cartpole, 100_352, 8, (64, 64), 1e-3, 0.99, _A2C),
        # Hyperparameters of CleanRL's ppo_continuous_action; observations and rewards are normalized.
        Task("cheetah", _half_cheetah, 1_003_520, 1, (64, 64), 3e-4, 0.99, _PPO | {"n_steps": 2048, "batch": 64}),
        Task(
            "dqn", _cartpole, 50_000, 1, (256, 256), 2.3e-3, 0.99,
            {"size": 100_000, "start": 1000, "batch": 64, "every": 256, "updates": 128, "target": 128, "epsilon": 0.04,
             "fraction": 0.16},
        ),
        Task(
            "sac", _pendulum, 8_000, 1, (64, 64), 1e-3, 0.99,
            {"size": 50_000, "start": 500, "batch": 256, "every": 1, "updates": 1, "tau": 0.005},
        ),
        Task(
            "td3", _pendulum, 8_000, 1, (64, 64), 1e-3, 0.98,
            {"size": 50_000, "start": 500, "batch": 256, "every": 1, "updates": 1, "tau": 0.005, "noise": 0.1},
        ),
        Task(
            "ddpg", _pendulum, 8_000, 1, (64, 64), 1e-3, 0.98,
            {"size": 50_000, "start": 500, "batch": 256, "every": 1, "updates": 1, "tau": 0.005, "noise": 0.1},
        ),
        # 3-step returns, one gradient step per two environment steps; discounted CartPole returns reach 100.
        Task("c51", _cartpole, 20_000, 1, (128, 128), 1e-3, 0.99, _ATOMS),
        Task("qrdqn", _cartpole, 20_000, 1, (128, 128), 1e-3, 0.99, _ATOMS),
        Task("rainbow", _cartpole, 20_000, 1, (128, 128), 1e-3, 0.99, _ATOMS | {"alpha": 0.5, "beta": 0.4}),
        Task("dsac", _cartpole, 20_000, 1, (128, 128), 1e-3, 0.99, _DISCRETE | {"tau": 0.005, "alpha": 0.05}),
        Task(
            "her", BitFlipping, 20_000, 1, (64, 64), 1e-3, 0.95,
            {"size": 50_000, "start": 500, "batch": 128, "every": 16, "updates": 16, "target": 100, "epsilon": 0.1,
             "fraction": 0.2, "horizon": 8},
            episodes=100,
        ),
        Task("bc", _cartpole, 2_000, 0, (64, 64), 1e-3, 0.99, {"batch": 256}),
        # `weight` and `tau` are Tianshou's defaults.
        Task("cql", _pendulum, 5_000, 0, (64, 64), 1e-3, 0.99, {"batch": 256, "tau": 0.005, "weight": 1.0}),
        Task("iql", _pendulum, 5_000, 0, (64, 64), 1e-3, 0.99, {"batch": 256, "tau": 0.005}),
        Task("recurrent", _masked, 100_352, 8, (64,), 1e-3, 0.98, _PPO | {"state": 64}),
        Task(
            "mappo", _spread, 64_000, 32, (64, 64), 2e-3, 0.95,
            _PPO | {"n_steps": 100, "batch": 400, "entropy": 0.01, "norm": 10.0},
            episodes=100, agents=3,
        ),
    )
}  # fmt: skip
"""Tasks by name. The budgets allow all contestants to learn in a few minutes per run."""

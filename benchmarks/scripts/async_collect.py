"""Steps per second if one environment is ten times slower than the others: synchronous and asynchronous collection.

    python -m benchmarks.scripts async_collect --envs 8 --pause-ms 1

Each environment sleeps in its own process. `Collector` steps all environments of an AsyncVectorEnv together;
`AsyncCollector` steps the ready environments. Tianshou's `AsyncCollector` with `SubprocVectorEnv` waits for the same
number of environments. All contestants fill a buffer with one ring per environment, which Tianshou requires. The
contestants alternate in rounds; the best round of each contestant is reported.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from samplebatch import AsyncCollector, Collector, VectorReplayBuffer

SLOWER = 10
EPISODE = 100
CAPACITY = 20_000


class Sleeping(gymnasium.Env):
    """Environment whose steps sleep for a given time."""

    observation_space = spaces.Box(-1, 1, (8,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, pause_s: float) -> None:
        self._pause_s, self._t = pause_s, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._pause_s)
        self._t += 1
        return np.full(8, self._t / EPISODE, np.float32), 1.0, self._t == EPISODE, False, {}


def makers(num_envs: int, pause_s: float) -> list[Callable[[], Sleeping]]:
    """Return functions that create the environments; the first environment is slow."""
    return [partial(Sleeping, pause_s * (SLOWER if env == 0 else 1)) for env in range(num_envs)]


def policy(obs: Any) -> Any:
    """Return zeros as actions, at almost no cost."""
    return np.zeros(len(obs), np.int64)


def synchronous(envs: list[Any]) -> Any:
    """Create a `Collector`."""
    return Collector(policy, gymnasium.vector.AsyncVectorEnv(envs), VectorReplayBuffer(CAPACITY, len(envs)))


def asynchronous(envs: list[Any], wait_num: int) -> Any:
    """Create an `AsyncCollector`."""
    return AsyncCollector(policy, envs, VectorReplayBuffer(CAPACITY, len(envs)), wait_num=wait_num)


def tianshou_asynchronous(envs: list[Any], wait_num: int) -> Any:
    """Create Tianshou's `AsyncCollector`."""
    from tianshou.algorithm.algorithm_base import Policy
    from tianshou.data import AsyncCollector as Theirs
    from tianshou.data import Batch
    from tianshou.data import VectorReplayBuffer as TheirBuffer
    from tianshou.env import SubprocVectorEnv

    class Same(Policy):  # type: ignore[misc]
        """Policy with the same actions; Tianshou's collector requires a state and a `policy` entry."""

        def forward(self, batch: Any, state: Any = None, **_: Any) -> Any:
            rows = len(batch.obs)
            return Batch(act=policy(batch.obs), policy=Batch(none=np.zeros(rows)), state=np.zeros((rows, 1)))

    with warnings.catch_warnings():
        # Tianshou warns that it may collect more steps than requested.
        warnings.simplefilter("ignore")
        collector = Theirs(
            Same(Sleeping.action_space),
            SubprocVectorEnv(envs, wait_num=wait_num),
            TheirBuffer(CAPACITY, len(envs)),
        )
    collector.reset()
    return collector


def measure(num_envs: int, pause_s: float, steps: int, rounds: int) -> dict[str, float]:
    """Return the steps per second of each contestant."""
    envs = makers(num_envs, pause_s)
    collectors = {
        "Collector": synchronous(envs),
        "AsyncCollector": asynchronous(envs, 1),
        "AsyncCollector, half": asynchronous(envs, max(1, num_envs // 2)),
        "Tianshou": tianshou_asynchronous(envs, 1),
        "Tianshou, half": tianshou_asynchronous(envs, max(1, num_envs // 2)),
    }
    best = dict.fromkeys(collectors, 0.0)
    for _ in range(rounds):
        for name, collector in collectors.items():
            start = time.perf_counter()
            collected = collector.collect(n_step=steps).n_collected_steps
            best[name] = max(best[name], collected / (time.perf_counter() - start))
    for collector in collectors.values():
        (collector if hasattr(collector, "__exit__") else collector.env).close()
    return best


def main(arguments: list[str] | None = None) -> int:
    """Measure the contestants and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts async_collect", description=__doc__)
    parser.add_argument("--envs", type=int, default=8, help="number of environments, including the slow environment")
    parser.add_argument("--pause-ms", type=float, default=1.0, help="duration of a step of the other environments")
    parser.add_argument("--steps", type=int, default=1000, help="steps per call of collect")
    parser.add_argument("--rounds", type=int, default=3, help="calls of collect per contestant")
    options = parser.parse_args(arguments)
    rates = measure(options.envs, options.pause_ms / 1e3, options.steps, options.rounds)
    bound = (options.envs - 1 + 1 / SLOWER) / (options.pause_ms / 1e3)
    for name, speed in rates.items():
        print(f"{name:24}{speed:10.0f} steps/s{speed / bound:8.1%} of the environments' limit")
    return 0

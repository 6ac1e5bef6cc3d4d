"""Steps per second of environments with one that is ten times slower: stepped together, and individually.

    python -m benchmarks.scripts async_collect --envs 8 --pause-ms 1

Environments only sleep, each in its own process. `Collector` steps the environments of an AsyncVectorEnv together,
`AsyncCollector` the ready environments, compared with Tianshou's `AsyncCollector` with its `SubprocVectorEnv`, which
waits for as many. All contestants fill a buffer with one ring per environment, which Tianshou requires. Contestants
alternate in rounds, and the best round counts.
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
    """Environment with slow steps."""

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
        """Sleep."""
        time.sleep(self._pause_s)
        self._t += 1
        return np.full(8, self._t / EPISODE, np.float32), 1.0, self._t == EPISODE, False, {}


def makers(num_envs: int, pause_s: float) -> list[Callable[[], Sleeping]]:
    """Return what makes the environments; the first is the slow one."""
    return [partial(Sleeping, pause_s * (SLOWER if env == 0 else 1)) for env in range(num_envs)]


def policy(obs: Any) -> Any:
    """Act, at no cost."""
    return np.zeros(len(obs), np.int64)


def together(envs: list[Any]) -> Any:
    """Make `Collector`."""
    return Collector(policy, gymnasium.vector.AsyncVectorEnv(envs), VectorReplayBuffer(CAPACITY, len(envs)))


def one_by_one(envs: list[Any], wait_num: int) -> Any:
    """Make `AsyncCollector`."""
    return AsyncCollector(policy, envs, VectorReplayBuffer(CAPACITY, len(envs)), wait_num=wait_num)


def of_tianshou(envs: list[Any], wait_num: int) -> Any:
    """Make Tianshou's AsyncCollector."""
    from tianshou.algorithm.algorithm_base import Policy
    from tianshou.data import AsyncCollector as Theirs
    from tianshou.data import Batch
    from tianshou.data import VectorReplayBuffer as TheirBuffer
    from tianshou.env import SubprocVectorEnv

    class Same(Policy):  # type: ignore[misc]
        """The same policy; without a state and something to keep, theirs fails."""

        def forward(self, batch: Any, state: Any = None, **_: Any) -> Any:
            rows = len(batch.obs)
            return Batch(act=policy(batch.obs), policy=Batch(none=np.zeros(rows)), state=np.zeros((rows, 1)))

    with warnings.catch_warnings():
        # That it may collect more than it is asked for.
        warnings.simplefilter("ignore")
        collector = Theirs(
            Same(Sleeping.action_space),
            SubprocVectorEnv(envs, wait_num=wait_num),
            TheirBuffer(CAPACITY, len(envs)),
        )
    collector.reset()
    return collector


def measure(num_envs: int, pause_s: float, steps: int, rounds: int) -> dict[str, float]:
    """Return the steps per second of everybody."""
    envs = makers(num_envs, pause_s)
    collectors = {
        "Collector": together(envs),
        "AsyncCollector": one_by_one(envs, 1),
        "AsyncCollector, half": one_by_one(envs, max(1, num_envs // 2)),
        "Tianshou": of_tianshou(envs, 1),
        "Tianshou, half": of_tianshou(envs, max(1, num_envs // 2)),
    }
    best = dict.fromkeys(collectors, 0.0)
    for _ in range(rounds):
        for who, collector in collectors.items():
            began = time.perf_counter()
            collected = collector.collect(n_step=steps).n_collected_steps
            best[who] = max(best[who], collected / (time.perf_counter() - began))
    for collector in collectors.values():
        (collector if hasattr(collector, "__exit__") else collector.env).close()
    return best


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts async_collect", description=__doc__)
    parser.add_argument("--envs", type=int, default=8, help="environments, one of them slow")
    parser.add_argument("--pause-ms", type=float, default=1.0, help="how long a step of the others takes")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a call of collect")
    parser.add_argument("--rounds", type=int, default=3, help="calls of each")
    options = parser.parse_args(arguments)
    rates = measure(options.envs, options.pause_ms / 1e3, options.steps, options.rounds)
    bound = (options.envs - 1 + 1 / SLOWER) / (options.pause_ms / 1e3)
    for who, speed in rates.items():
        print(f"{who:24}{speed:10.0f} steps/s{speed / bound:8.1%} of what the environments can do")
    return 0

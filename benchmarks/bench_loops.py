"""`loops.*`: hand-written training loops from their first step, in microseconds of processor time.

`loops.ppo` is the loop of single-file implementations with preallocated arrays (bare), and the same with a collector,
`GAE` and `minibatches` (ours). `loops.dqn` is one with Stable-Baselines3's replay buffer, and the same with a collector
and our replay buffer. Networks, losses and numbers of updates are the same, on one thread of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

from benchmarks.harness import Row, Way, row

ITERATIONS, DQN_STEPS = 5, 3000


def clocked(train: Callable[[Any], Any]) -> Way:
    """Time entire trainings on one torch thread."""

    def setup(lib: Any, data: Any) -> Callable[[], float]:
        import torch

        def learn() -> float:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                start = process_time()
                train(lib)
                return process_time() - start
            finally:
                torch.set_num_threads(threads)

        return learn

    return Way(setup, clocked=True)


def ppo(with_collector: bool) -> Way:
    """Train PPO for some iterations."""

    def train(_: Any) -> None:
        from benchmarks import loops

        loop = loops.ppo_with_collector if with_collector else loops.ppo_with_arrays
        loop(0, ITERATIONS, list(range(loops.NUM_ENVS)))

    return clocked(train)


def dqn_with_sb3(_: Any) -> None:
    """Train DQN with the buffer of Stable-Baselines3."""
    from stable_baselines3.common import buffers

    from benchmarks import loops

    loops.dqn_with_sb3(buffers, 0, DQN_STEPS)


def dqn_with_collector(_: Any) -> None:
    """Train DQN with our collector and buffer."""
    from benchmarks import loops

    loops.dqn_with_collector(0, DQN_STEPS)


ROWS: list[Row] = [
    row("loops.ppo", lambda: None, view=None, bar=1.03, ours=ppo(True), bare=ppo(False)),
    row("loops.dqn", lambda: None, view=None, ours=clocked(dqn_with_collector), sb3=clocked(dqn_with_sb3)),
]

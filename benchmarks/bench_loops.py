"""`loops.*`: hand-written training loops from their first step, in microseconds of processor time.

`loops.ppo` is the loop of single-file implementations with preallocated arrays (bare), and the same with a collector,
`GAE` and `minibatches` (ours). `loops.dqn` and `loops.sac` are loops with Stable-Baselines3's replay buffer, and the
same with a collector and our replay buffer. Networks, losses and numbers of updates are the same, on one torch thread.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

from benchmarks.harness import Row, Way, row

ITERATIONS, DQN_STEPS, SAC_STEPS = 5, 3000, 600


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


def off_policy(name: str, steps: int, *, with_collector: bool) -> Way:
    """Train DQN or SAC for some steps, with our collector and buffer or with Stable-Baselines3's buffer."""

    def train(_: Any) -> None:
        from benchmarks import loops

        if with_collector:
            getattr(loops, f"{name}_with_collector")(0, steps)
            return
        from stable_baselines3.common import buffers

        getattr(loops, f"{name}_with_sb3")(buffers, 0, steps)

    return clocked(train)


def off_policy_row(name: str, steps: int) -> Row:
    """Declare a row of an off-policy loop."""
    ways = {who: off_policy(name, steps, with_collector=who == "ours") for who in ("ours", "sb3")}
    return row(f"loops.{name}", lambda: None, view=None, **ways)


ROWS: list[Row] = [
    row("loops.ppo", lambda: None, view=None, bar=1.03, ours=ppo(True), bare=ppo(False)),
    off_policy_row("dqn", DQN_STEPS),
    off_policy_row("sac", SAC_STEPS),
]

"""`loops.*`: hand-written training loops from their first step, in microseconds of processor time.

In `loops.ppo`, `bare` is the loop of single-file implementations with preallocated arrays; `ours` is the same loop with
our collector, `GAE` and `minibatches`. In `loops.dqn` and `loops.sac`, `sb3` uses Stable-Baselines3's replay buffer;
`ours` is the same loop with our collector and replay buffer. The loops of a row have the same networks, losses and
number of updates, and run with one torch thread.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

from benchmarks.harness import Row, Way, row

ITERATIONS, DQN_STEPS, SAC_STEPS = 5, 3000, 600


def clocked(train: Callable[[Any], Any]) -> Way:
    """Time entire training runs with one torch thread."""

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
    """Train PPO for `ITERATIONS` iterations."""

    def train(_: Any) -> None:
        from benchmarks import loops

        loop = loops.ppo_with_collector if with_collector else loops.ppo_with_arrays
        loop(0, ITERATIONS, list(range(loops.NUM_ENVS)))

    return clocked(train)


def off_policy(name: str, steps: int, *, with_collector: bool) -> Way:
    """Train DQN or SAC with our collector and buffer, or with Stable-Baselines3's buffer."""

    def train(_: Any) -> None:
        from benchmarks import loops

        if with_collector:
            getattr(loops, f"{name}_with_collector")(0, steps)
            return
        from stable_baselines3.common import buffers

        getattr(loops, f"{name}_with_sb3")(buffers, 0, steps)

    return clocked(train)


def off_policy_row(name: str, steps: int) -> Row:
    """Declare the row of an off-policy loop."""
    ways = {key: off_policy(name, steps, with_collector=key == "ours") for key in ("ours", "sb3")}
    return row(f"loops.{name}", lambda: None, view=None, **ways)


ROWS: list[Row] = [
    row("loops.ppo", lambda: None, view=None, bar=1.03, ours=ppo(True), bare=ppo(False)),
    off_policy_row("dqn", DQN_STEPS),
    off_policy_row("sac", SAC_STEPS),
]

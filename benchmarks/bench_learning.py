"""`learning.*`: short training runs, in microseconds for collecting, storing, sampling and updates.

All contestants learn the same task with the same networks and hyperparameters, on one torch thread. Each contestant
uses its own collectors, buffers and trainers, as in the learning curves (`benchmarks.scripts.learning_curves`), which
show the quality of learning. Each call is a new training, short enough to repeat for a median. Setup is not timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.harness import Row, Way, row
from benchmarks.scripts.learning_curves import CONTESTANTS, runs_of
from benchmarks.training.tasks import TASKS, Curve

STEPS = {"ppo": 2048, "dqn": 2024, "sac": 700, "td3": 700, "her": 1012, "mappo": 3200}
"""Environment steps per call by task: a few hundred updates after the algorithm's initial steps."""

PLAIN = ("dqn", "sac")
"""Tasks that have a plain loop with CleanRL's algorithm."""


def learner(contestant: str, lib: Any, name: str) -> Callable[[], float]:
    """Return a function that sets up and times one training."""
    import torch

    task = replace(TASKS[name], steps=STEPS[name])
    runs = runs_of(contestant)

    def learn() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
            train = runs[name](task, Curve(), 0)
            start = perf_counter()
            train()
            seconds = perf_counter() - start
        torch.set_num_threads(threads)
        return seconds

    return learn


ROWS: list[Row] = [
    row(
        f"learning.{name}",
        partial(str, name),
        view=None,
        **{
            contestant: Way(partial(learner, contestant), clocked=True)
            for contestant in CONTESTANTS
            if contestant != "cleanrl" or name in PLAIN
        },
    )
    for name in STEPS
]

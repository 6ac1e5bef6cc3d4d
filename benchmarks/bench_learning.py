"""`learning.*`: a short training from its first step, in microseconds: collecting, storing, sampling and updates.

All contestants learn the same task with the same networks and hyperparameters, each with its own collectors, buffers
and trainers, as in the learning curves (`benchmarks.scripts.learning_curves`), on one torch thread. A call is a new
short training, so that there are enough calls for a median; setup is not timed. The curves show the quality of
learning.
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
"""Environment steps per call by task: some hundred updates after the initial steps of the algorithm."""

PLAIN = ("dqn", "sac")
"""Tasks for which there is a plain loop with CleanRL's algorithm."""


def learner(who: str, lib: Any, name: str) -> Callable[[], float]:
    """Return a function that sets up and times one training."""
    import torch

    task = replace(TASKS[name], steps=STEPS[name])
    runs = runs_of(who)

    def learn() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            train = runs[name](task, Curve(), 0)
            began = perf_counter()
            train()
            seconds = perf_counter() - began
        torch.set_num_threads(threads)
        return seconds

    return learn


ROWS: list[Row] = [
    row(
        f"learning.{name}",
        partial(str, name),
        view=None,
        **{who: Way(partial(learner, who), clocked=True) for who in CONTESTANTS if who != "cleanrl" or name in PLAIN},
    )
    for name in STEPS
]

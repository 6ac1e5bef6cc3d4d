"""Work of a worker in a process of its own: its generators, its task, and the exchange of its state."""

from __future__ import annotations

import pickle
import random
import sys

import numpy as np

from samplebatch.env.seeds import PROCESS, seeds_at
from samplebatch.workers.generators import generators_state, load_generators
from samplebatch.workers.spec import StateRequest, WorkerSpec
from samplebatch.workers.task import Count, Task, WeightsSource, answer, make_task


def start_task(spec: WorkerSpec, weights: WeightsSource, count_steps: Count, *, threads: int = 1) -> Task:
    """Make the task of a worker that has this process for itself, and seed the process's own generators.

    Parameters
    ----------
    spec, weights, count_steps
        As for `make_task`.
    threads
        How many threads torch may use, if the policy or the environments import it.

    Raises
    ------
    EnvironmentSpecError, PolicySpecError
        As `make_task` does.
    """
    seeds = seeds_at(spec.seed, PROCESS, spec.index)
    _seed(seeds)
    task = make_task(spec, weights, count_steps)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
        _seed(seeds)
    return task


def exchange_state(task: Task, request: StateRequest) -> bytes | None:
    """Go on from the state in a request, or return the own, pickled, that of the process's generators included."""
    told = answer(task, request)
    if request.state is not None:
        load_generators(request.state["generators"])
        return None
    try:
        return pickle.dumps(told if "refused" in told else {**told, "generators": generators_state()})
    except Exception as error:
        return pickle.dumps({"refused": f"{type(error).__name__}: {error}"})


def _seed(seeds: np.random.SeedSequence) -> None:
    """Seed the process's own generators, which torch's distributions draw from: else all workers draw the same."""
    words = seeds.generate_state(3).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(words[2])

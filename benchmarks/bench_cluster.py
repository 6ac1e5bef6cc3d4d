"""`cluster.*`: environment steps from 1, 2, 4 and 8 workers, in microseconds for 4,000 small steps or 400 of images.

`ours` are workers in processes, `ray` the same workers as actors on a Ray cluster of one node; the actors request no
CPUs by name, so that there may be more actors than cores. A call is a `collect` of all workers together, until the
learner has the batch. The cost of environments is negligible: the rows measure collecting a step, sending it to the
learner, and joining it to a batch. An image is 84 x 84 x 4 bytes, and each step has two.
"""

from __future__ import annotations

import weakref
from functools import partial
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

from benchmarks.harness import Row, Way

WORKERS = (1, 2, 4, 8)
EPISODE = 200


class Small(gymnasium.Env[Any, Any]):
    """Episodes of 200 steps with observations of 17 numbers, computed from the number of the step."""

    action_space = gymnasium.spaces.Discrete(4)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (17,), np.float32)

    def __init__(self) -> None:
        self._step = 0
        self._seen = np.random.default_rng(0).normal(size=(EPISODE + 1, 17)).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._step = 0
        return self._seen[0].copy(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._seen[self._step].copy(), 1.0, self._step == EPISODE, False, {}


class Images(Small):
    """The same episodes with 16 different images as observations."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)

    def __init__(self) -> None:
        self._step = 0
        frames = np.random.default_rng(0).integers(256, size=(16, 84, 84, 4), dtype=np.uint8)
        self._seen = [frames[number % 16] for number in range(EPISODE + 1)]


class Collecting:
    """Workers that collect a number of steps per call, and are stopped when the object is deleted."""

    def __init__(self, env: Any, steps: int, backend: Any, workers: int) -> None:
        from samplebatch import RolloutWorkers
        from samplebatch.rollout import RayOptions

        options = {"ray_options": RayOptions(num_cpus=0)} if backend == "ray" else {}
        self._steps = steps
        self._workers = RolloutWorkers("random", env, num_workers=workers, backend=backend, seed=0, **options)
        self._workers.__enter__()
        weakref.finalize(self, self._workers.stop)
        # All workers have started now.
        self._workers.collect(n_step=workers)

    def __call__(self) -> float:
        began = perf_counter()
        self._workers.collect(n_step=self._steps)
        return perf_counter() - began


def _way(env: Any, steps: int, backend: str) -> Way:
    return Way(lambda _, workers: Collecting(env, steps, backend, workers), clocked=True)


ROWS = [
    Row(
        f"cluster.{name}.{workers}",
        partial(int, workers),
        {"ours": _way(env, steps, "process"), "ray": _way(env, steps, "ray")},
        view=None,
        # Both are ours: neither has to be faster.
        level=float("inf"),
    )
    for name, env, steps in (("small", Small, 4000), ("images", Images, 400))
    for workers in WORKERS
]

"""`cluster.*`: collection by 1, 2, 4 and 8 workers, in microseconds for 4,000 small steps or 400 image steps.

`ours` runs the workers in processes; `ray` runs the same workers as actors on a Ray cluster of one node. The actors
request no CPUs, so that there may be more actors than cores. A call is one `collect` by all workers; it returns when
the learner has the batch. The cost of the environments is negligible: the rows measure collecting steps, sending them
to the learner, and concatenating them. An image occupies 84 x 84 x 4 bytes, and each step contains two images.
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
    """Environment with episodes of 200 steps; the step number determines the observation of 17 numbers."""

    action_space = gymnasium.spaces.Discrete(4)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (17,), np.float32)

    def __init__(self) -> None:
        self._step = 0
        self._observations = np.random.default_rng(0).normal(size=(EPISODE + 1, 17)).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._step = 0
        return self._observations[0].copy(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._observations[self._step].copy(), 1.0, self._step == EPISODE, False, {}


class Images(Small):
    """Environment with the episodes of `Small` and 16 different images as observations."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)

    def __init__(self) -> None:
        self._step = 0
        frames = np.random.default_rng(0).integers(256, size=(16, 84, 84, 4), dtype=np.uint8)
        self._observations = [frames[number % 16] for number in range(EPISODE + 1)]


class TimedCollect:
    """Timed call that collects steps with workers; the workers stop when the object is deleted."""

    def __init__(self, env: Any, steps: int, backend: Any, workers: int) -> None:
        from samplebatch import RolloutWorkers
        from samplebatch.rollout import RayOptions

        options = {"ray_options": RayOptions(num_cpus=0)} if backend == "ray" else {}
        self._steps = steps
        self._workers = RolloutWorkers("random", env, num_workers=workers, backend=backend, seed=0, **options)
        self._workers.__enter__()
        weakref.finalize(self, self._workers.stop)
        # This call returns after all workers have started.
        self._workers.collect(n_step=workers)

    def __call__(self) -> float:
        start = perf_counter()
        self._workers.collect(n_step=self._steps)
        return perf_counter() - start


def _way(env: Any, steps: int, backend: str) -> Way:
    return Way(lambda _, workers: TimedCollect(env, steps, backend, workers), clocked=True)


ROWS = [
    Row(
        f"cluster.{name}.{workers}",
        partial(int, workers),
        {"ours": _way(env, steps, "process"), "ray": _way(env, steps, "ray")},
        view=None,
        # Both contestants are ours: neither must be faster.
        level=float("inf"),
    )
    for name, env, steps in (("small", Small, 4000), ("images", Images, 400))
    for workers in WORKERS
]

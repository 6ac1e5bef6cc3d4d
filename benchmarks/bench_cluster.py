"""`cluster.*`: environment steps from 1, 2, 4 and 8 workers, in microseconds for 4,000 small steps or 400 of images.

`ours` are workers in processes, `ray` the same workers as actors of Ray on a cluster of one node, whose actors take no
CPU by name, so that there may be more of them than cores. A call is a `collect` of all workers together, until the
learner has the batch. Environments cost next to nothing: what is measured is what it takes to collect a step, to carry
it to the learner, and to join it to a batch. An image is 84 x 84 x 4 bytes, and each step has two.
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
    """Episodes of 200 steps with observations of 17 numbers, that follow from the number of the step."""

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
    """The same with images, of which there are 16."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)

    def __init__(self) -> None:
        self._step = 0
        frames = np.random.default_rng(0).integers(256, size=(16, 84, 84, 4), dtype=np.uint8)
        self._seen = [frames[number % 16] for number in range(EPISODE + 1)]


class Collecting:
    """Workers that collect as many steps with each call, and are stopped when nobody calls them any more."""

    def __init__(self, env: Any, steps: int, backend: Any, workers: int) -> None:
        from samplebatch import RolloutWorkers
        from samplebatch.rollout import RayOptions

        given = {"ray_options": RayOptions(num_cpus=0)} if backend == "ray" else {}
        self._steps = steps
        self._workers = RolloutWorkers("random", env, num_workers=workers, backend=backend, seed=0, **given)
        self._workers.__enter__()
        weakref.finalize(self, self._workers.stop)
        # From here on, all have started.
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
        # Both are ours: neither has to be ahead of the other.
        level=float("inf"),
    )
    for name, env, steps in (("small", Small, 4000), ("images", Images, 400))
    for workers in WORKERS
]

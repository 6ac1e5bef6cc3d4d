"""Experience that conversions are tried on: two episodes in whose values the episode and the step can be read."""

from __future__ import annotations

from typing import Any

import numpy as np

from samplebatch import SampleBatch

LENGTHS = (3, 2)
"""Steps of the episodes: the first terminates, the second is truncated."""


def observations(first: int, n: int, *, nested: bool) -> Any:
    x = np.arange(first, first + n, dtype=np.float32)[:, None] + np.float32([0, 0.5])
    if not nested:
        return x
    return {"x": x, "camera": np.repeat(x[:, :1, None], 4, 1).astype(np.uint8), "pair": (x[:, 0], x[:, 1])}


def episode(number: int, n: int, *, nested: bool = False) -> dict[str, Any]:
    last = np.arange(n) == n - 1
    return {
        "obs": observations(10 * number, n, nested=nested),
        "new_obs": observations(10 * number + 1, n, nested=nested),
        "actions": np.arange(n) % 2 + number % 2,
        "rewards": np.arange(n) + number / 2,
        "terminateds": last & (number % 2 == 0),
        "truncateds": last & (number % 2 == 1),
        "eps_id": np.full(n, number),
        "t": np.arange(n),
    }


def two_episodes(*, nested: bool = False) -> SampleBatch:
    return SampleBatch.concat(*(SampleBatch(episode(i, n, nested=nested)) for i, n in enumerate(LENGTHS)))

"""Steps of environments to fill buffers with, and the buffers to fill: what tests of keeping them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from samplebatch import Batch
from samplebatch.buffer.prioritized import PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.vector import CachedReplayBuffer, ReplayBufferManager, VectorReplayBuffer
from samplebatch.storage.buffers.state import plain

Make = Callable[..., Any]


def numbers(i: int, n: int) -> dict[str, Any]:
    """Create step i of n environments with numeric values that identify the step."""
    achieved = i + 1000.0 * np.arange(n)
    ends = (i + np.arange(n)) % 7 == 6
    return {
        "obs": {"x": (achieved[:, None] + np.zeros(3)).astype(np.float32), "image": _images(i, n)},
        "act": achieved.astype(np.int32),
        "rew": achieved,
        "terminated": ends,
        "truncated": ~ends & ((i + np.arange(n)) % 5 == 4),
        "obs_next": {"x": (achieved[:, None] + np.ones(3)).astype(np.float32), "image": _images(i + 1, n)},
        "info": {"lives": np.full(n, i % 3), "empty": {}},
        "policy": {"logits": achieved[:, None] * [1.0, 2.0]},
    }


def _images(i: int, n: int) -> np.ndarray:
    return np.full((n, 12, 12), i % 250, np.uint8)


def mixed(i: int, n: int) -> dict[str, Any]:
    """Return step i of n environments, with objects, strings, dates and rows of varying shape."""
    rows = np.empty(n, object)
    for k in range(n):
        rows[k] = np.arange((i + k) % 4, dtype=np.int64)
    return numbers(i, n) | {
        "obs": {"cloud": rows, "x": numbers(i, n)["obs"]["x"]},
        "obs_next": {"cloud": np.roll(rows, 1), "x": numbers(i, n)["obs_next"]["x"]},
        "info": {
            "text": np.array([f"é{i}", None][i % 2 : i % 2 + 1] * n, object),
            "objects": np.fromiter([{"step": i, "ring": k} for k in range(n)], object, n),
            "when": np.full(n, np.datetime64("2020-01-01", "s") + i),
        },
    }


def step(i: int, n: int, values: Make = numbers) -> Batch:
    """Return step i as a batch, without a leading axis for a single environment."""
    batch = Batch(values(i, max(n, 1)))
    return batch if n else batch[0]


BUFFERS: dict[str, tuple[Make, int]] = {
    "plain": (lambda **options: ReplayBuffer(20, **options), 0),
    "stacked": (lambda **options: ReplayBuffer(20, stack_num=3, ignore_obs_next=True, **options), 0),
    "vector": (lambda **options: VectorReplayBuffer(21, 3, **options), 3),
    "vector ignoring next": (lambda **options: VectorReplayBuffer(21, 3, ignore_obs_next=True, **options), 3),
    "prioritized": (lambda **options: PrioritizedReplayBuffer(20, alpha=0.6, beta=0.4, **options), 0),
    "prioritized vector": (
        lambda **options: PrioritizedVectorReplayBuffer(
            21, 3, alpha=0.6, beta=0.4, weight_norm=False, stratified=True, stack_num=2, **options
        ),
        3,
    ),
}
"""Makers of buffers that can be kept in folders too, and their numbers of environments; 0 for single steps."""

OTHERS: dict[str, tuple[Make, int]] = {
    "manager": (lambda: ReplayBufferManager([ReplayBuffer(4), ReplayBuffer(9)]), 2),
    "cached": (lambda: CachedReplayBuffer(ReplayBuffer(20), 2, 9), 2),
    "compressed": (lambda: VectorReplayBuffer(21, 3, compress=("obs.image", "obs_next.image")), 3),
    "compressed, stacked": (lambda: ReplayBuffer(20, stack_num=2, ignore_obs_next=True, compress=True), 0),
}


def fill(buffer: Any, n: int, start: int, stop: int, values: Make = numbers) -> list[Any]:
    """Add steps and return the results of `add`; set priorities in prioritized buffers."""
    added = []
    for i in range(start, stop):
        added.append(buffer.add(step(i, n, values)))
        if hasattr(buffer, "update_weight") and i % 4 == 3:
            buffer.update_weight(added[-1][0], np.full(max(n, 1), 0.1 + i % 11))
    return added


def assert_same_rows(a: Any, b: Any) -> None:
    """Check that two buffers have equal rows in equal slots, including neighbours and final observations."""
    assert len(a) == len(b)
    if not len(a):
        return
    for index in (slice(None), a.sample_indices(0)):
        assert a[index] == b[index]
        assert list(a[index].__dict__) == list(b[index].__dict__)
    every = a.sample_indices(0)
    assert np.array_equal(every, b.sample_indices(0))
    for name in ("prev", "next"):
        assert np.array_equal(getattr(a, name)(every), getattr(b, name)(every))
    assert np.array_equal(a.unfinished_index(), b.unfinished_index())
    assert np.array_equal(a.last_index, b.last_index)


def assert_go_on_alike(a: Any, b: Any, n: int, start: int, values: Make = numbers) -> None:
    """Check that two buffers are equal, and remain equal after further operations, including draws."""
    assert type(a) is type(b)
    assert (a.maxsize, plain(a.options), a.stack_num) == (b.maxsize, plain(b.options), b.stack_num)
    assert_same_rows(a, b)
    for i in range(start, start + 30, 10):
        for actual, expected in zip(fill(a, n, i, i + 10, values), fill(b, n, i, i + 10, values), strict=True):
            assert all(map(np.array_equal, actual, expected))
        (rows, indices), (other_rows, other_indices) = a.sample(5), b.sample(5)
        assert np.array_equal(indices, other_indices)
        assert rows == other_rows
    assert_same_rows(a, b)

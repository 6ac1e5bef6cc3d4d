"""Slices of buffers, which copy ranges of slots, against index arrays, which gather slots, on random buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, PrioritizedVectorReplayBuffer, ReplayBuffer, ReplayBufferManager, VectorReplayBuffer
from samplebatch.column import threads
from samplebatch.column.ragged import RaggedColumn

LEADING = ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next", "info", "policy")


def random_buffer(rng: np.random.Generator) -> ReplayBuffer:
    """Return a buffer of one to four rings with random options and columns; rows may have been overwritten."""
    rings = int(rng.integers(1, 5))
    options: dict[str, Any] = {"stack_num": int(rng.integers(1, 4)), "ragged": "tokens"}
    options["ignore_obs_next"] = bool(rng.integers(2))
    if rng.integers(2):
        options["compress"] = "obs.frame"
    if rng.integers(2):
        options["reward_dtype"] = "float32"
    kind = rng.integers(3) if rings > 1 else 0
    slots = rings * int(rng.integers(1, 8))
    buffer: ReplayBuffer
    if kind == 0:
        rings, buffer = 1, ReplayBuffer(slots, **options)
    elif kind == 1:
        buffer = VectorReplayBuffer(slots, rings, **options)
    else:
        buffer = PrioritizedVectorReplayBuffer(slots, rings, alpha=0.6, beta=0.4, **options)
    numbers = iter(range(100_000))
    for _ in range(int(rng.integers(1, 40))):
        chosen = np.flatnonzero(rng.integers(0, 3, rings)) if rings > 1 else np.zeros(1, np.intp)
        if not len(chosen):
            continue
        ids = np.array([next(numbers) for _ in chosen])
        frame = (ids[:, None, None] * np.arange(1, 7).reshape(2, 3)).astype(np.uint8)
        observations = {"frame": frame, "number": ids.astype(np.float32)}
        rows: dict[str, Any] = {
            "obs": Batch(observations),
            "act": ids,
            "rew": ids / 2,
            "terminated": rng.integers(0, 5, len(ids)) == 0,
            "truncated": rng.integers(0, 5, len(ids)) == 0,
            "obs_next": Batch({name: values + values.dtype.type(1) for name, values in observations.items()}),
            "info": Batch(note=np.array([{"id": number} for number in ids.tolist()], object)),
            "tokens": RaggedColumn.from_rows([np.arange(number % 5) for number in ids]),
        }
        buffer.add(Batch(rows), buffer_ids=chosen)
    return buffer


def stored_slots(buffer: ReplayBuffer) -> list[list[int]]:
    """List the stored slots of each ring, oldest first."""
    edges, last = buffer.subbuffer_edges.tolist(), buffer.last_index.tolist()
    parts = list(buffer.buffers) if isinstance(buffer, ReplayBufferManager) else [buffer]
    actual = []
    for start, stop, newest, part in zip(edges[:-1], edges[1:], last, parts, strict=True):
        oldest = newest - len(part) + 1
        actual.append([start + (oldest - start + step) % (stop - start) for step in range(len(part))])
    return actual


def assert_same(rows: Batch, expected: Batch) -> None:
    assert list(rows.keys()) == list(expected.keys())
    assert tuple(rows.keys())[: len(LEADING)] == LEADING
    for name, values in rows.items():
        other = expected[name]
        assert type(values) is type(other), name
        if isinstance(values, Batch):
            assert values == other, name
        elif isinstance(values, np.ndarray):
            assert (values.dtype, values.shape) == (other.dtype, other.shape), name
            np.testing.assert_array_equal(values, other)
        else:
            assert [row.tolist() for row in values] == [row.tolist() for row in other], name


@pytest.mark.parametrize("seed", range(60))
def test_slices_return_the_same_rows_as_index_arrays(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    if seed % 2:
        monkeypatch.setattr(threads, "WORTHWHILE", 0)
    buffer = random_buffer(rng)
    if not len(buffer):
        pytest.skip("no rows were added")
    by_ring = stored_slots(buffer)
    in_time_order = [slot for slots in by_ring for slot in slots]
    assert_same(buffer[:], buffer[np.array(in_time_order)])
    stored = sorted(in_time_order)
    for _ in range(10):
        bounds = [None if rng.integers(4) == 0 else int(rng.integers(-9, len(buffer) + 9)) for _ in range(2)]
        index = slice(*bounds, rng.choice(np.array([None, 1, 1, 2, -1], object)))
        if index == slice(None):
            continue
        assert_same(buffer[index], buffer[np.array(stored[index], np.intp)])
    parts = buffer.buffers if isinstance(buffer, ReplayBufferManager) else ()
    for part, slots, start in zip(parts, by_ring, buffer.subbuffer_edges.tolist(), strict=False):
        if len(part):
            assert_same(part[:], part[np.array(slots) - start])
            assert_same(part[1:3], part[np.array(sorted(slots), np.intp)[1:3] - start])

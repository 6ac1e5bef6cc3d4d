"""Complete episodes: their list, and samples of episodes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    CachedReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    VectorReplayBuffer,
)
from samplebatch.errors import EmptyBufferError
from tests.buffer.oracle import Oracle, Ring, Step, batch_of, step, steps


def stream(seed: int, sizes: list[int], count: int, **options: Any) -> tuple[Any, Oracle]:
    """Return a buffer with rings of given sizes and random steps, and its oracle."""
    rng = np.random.default_rng(seed)
    buf: Any = ReplayBufferManager([ReplayBuffer(size, **options) for size in sizes])
    oracle = Oracle(sizes)
    number = 0
    for _ in range(count):
        chosen = np.flatnonzero(rng.random(len(sizes)) < 0.8)
        if not len(chosen):
            continue
        ends = rng.random((2, len(chosen))) < 0.15
        new = [Step(number + i, -1, 1.0, *map(bool, ends[:, i])) for i in range(len(chosen))]
        number += len(chosen)
        buf.add(batch_of(new), buffer_ids=chosen)
        oracle.add(new, chosen.tolist())
        if rng.random() < 0.02:
            buf.reset()
            oracle.reset()
    return buf, oracle


def whole(oracle: Oracle | Ring, *, unfinished: bool) -> list[list[int]]:
    return [indices for indices, finished, is_present in oracle.episodes() if is_present and (finished or unfinished)]


SIZES = [[7], [1, 4], [9, 9, 9], [3, 12, 5, 1]]


@pytest.mark.parametrize("seed", range(0, 12, 2))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("unfinished", [False, True])
def test_all_episodes(seed: int, sizes: list[int], unfinished: bool) -> None:
    buf, oracle = stream(seed, sizes, 1 + 4 * seed)
    expected = whole(oracle, unfinished=unfinished)
    actual, indices = buf.sample_episodes(0, unfinished=unfinished)
    assert [part.tolist() for part in indices] == expected
    assert len(actual) == len(expected)
    for episode, rows in zip(actual, expected, strict=True):
        assert episode == buf[rows]
    shuffled, order = buf.sample_episodes(None, unfinished=unfinished)
    assert sorted(part.tolist() for part in order) == sorted(expected)
    assert [len(episode) for episode in shuffled] == [len(part) for part in order]
    again = pickle.loads(pickle.dumps(buf))
    assert [part.tolist() for part in again.sample_episodes(0, unfinished=unfinished)[1]] == expected
    for ring, part in enumerate(buf.buffers):
        ours = whole(oracle.rings[ring], unfinished=unfinished)
        assert [rows.tolist() for rows in part.sample_episodes(0, unfinished=unfinished)[1]] == ours


@pytest.mark.parametrize("unfinished", [False, True])
def test_episodes_are_equally_likely(unfinished: bool) -> None:
    buf, oracle = stream(3, [20, 30, 25], 60)
    expected = {tuple(rows): 0 for rows in whole(oracle, unfinished=unfinished)}
    n = 20_000
    actual, indices = buf.sample_episodes(n, unfinished=unfinished)
    for episode, rows in zip(actual, indices, strict=True):
        expected[tuple(rows.tolist())] += 1
        assert len(episode) == len(rows)
    share = n / len(expected)
    assert len(expected) > 8
    assert all(abs(count - share) < 5 * share**0.5 for count in expected.values())


def test_sampled_rows_equal_rows_read_by_index() -> None:
    buf = PrioritizedReplayBuffer(20, alpha=1.0, beta=1.0, stack_num=2, ignore_obs_next=True)
    for n in range(12):
        buf.add(step(n, truncated=n in (3, 8)))
    (first, second), (rows, others) = buf.sample_episodes(0)
    assert first.obs.tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
    assert second.obs_next.tolist() == [[4, 5], [5, 6], [6, 7], [7, 8], [8, 9]]
    assert second.weight.shape == second.generation.shape == (5,)
    assert [*rows.tolist(), *others.tolist()] == list(range(9))
    assert first.obs.base is not None


def test_an_episode_that_fills_the_ring_is_complete() -> None:
    buf = VectorReplayBuffer(8, 2)
    for round_ in range(3):
        for n in range(4):
            buf.add(steps([n, n + 10], truncated=[n == 3] * 2))
        assert [part.tolist() for part in buf.sample_episodes(0)[1]] == [[0, 1, 2, 3], [4, 5, 6, 7]], round_
        buf.reset()
    for n in range(5):
        buf.add(steps([n, n + 10], truncated=[n == 3] * 2))
    assert buf.sample_episodes(0)[1] == []


def test_partly_overwritten_episodes_are_not_sampled() -> None:
    buf = ReplayBuffer(6)
    for n in range(7):
        buf.add(step(n, terminated=n in (2, 4)))
    assert [part.tolist() for part in buf.sample_episodes(0)[1]] == [[3, 4]]
    assert [part.tolist() for part in buf.sample_episodes(0, unfinished=True)[1]] == [[3, 4], [5, 0]]
    for n in range(7, 40):
        buf.add(step(n))
    with pytest.raises(EmptyBufferError, match="complete episode"):
        buf.sample_episodes(1, unfinished=True)
    assert buf.sample_episodes(0, unfinished=True) == ([], [])
    assert buf.sample_episodes(-1) == ([], [])


def test_episodes_are_sampled_from_main_buffer_and_caches() -> None:
    buf = CachedReplayBuffer(ReplayBuffer(9), 2, 5)
    for n in range(13):
        buf.add(steps([n, n + 100], terminated=[n % 3 == 2, n % 4 == 3]))
    main = [episode.obs.tolist() for episode in buf.main_buffer.sample_episodes(0)[0]]
    assert main == [[9, 10, 11], [108, 109, 110, 111]]
    actual, _ = buf.sample_episodes(0, unfinished=True)
    assert [episode.obs.tolist() for episode in actual[2:]] == [[12], [112]]


@pytest.mark.parametrize("how", ["state", "file", "folder"])
def test_episode_completeness_is_preserved(how: str, tmp_path: Path) -> None:
    for count, expected in ((4, [[0, 1, 2, 3]]), (8, []), (10, [])):
        path = tmp_path / (f"{count}.arrow" if how == "file" else f"{how}{count}")
        buf = ReplayBuffer(4, storage=path) if how == "folder" else ReplayBuffer(4)
        buf.add(step(0))
        buf.reset()
        for n in range(count):
            buf.add(step(n, terminated=n == 3))
        if how == "state":
            again = ReplayBuffer(4)
            again.load_state_dict(buf.state_dict())
        elif how == "file":
            buf.save(path)
            again = ReplayBuffer.load(path)
        else:
            buf.close()
            again = ReplayBuffer.open(path)
        assert [part.tolist() for part in again.sample_episodes(0)[1]] == expected
        again.close()


def test_an_empty_buffer() -> None:
    for buf in (ReplayBuffer(3), VectorReplayBuffer(6, 2), ReplayBuffer(0)):
        assert buf.sample_episodes(0) == ([], [])
        with pytest.raises(EmptyBufferError):
            buf.sample_episodes(2)

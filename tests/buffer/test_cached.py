"""CachedReplayBuffer: episodes in one piece."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from samplebatch import CachedReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from samplebatch.errors import ArgumentError, ColumnTypeError, RingError
from tests.buffer.oracle import step, steps


def test_episodes_are_contiguous() -> None:
    """Environments alternate; the rows of each episode are contiguous in the main buffer."""
    buf = CachedReplayBuffer(ReplayBuffer(40, stack_num=2, ignore_obs_next=True), 3, 10)
    lengths, clock, number = (3, 5, 4), [0, 0, 0], [0, 100, 200]
    for _ in range(24):
        ends = [clock[i] + 1 == lengths[i] for i in range(3)]
        buf.add(steps(list(number), truncated=ends, obs_next=[n + 50 for n in number]))
        clock = [0 if end else at + 1 for at, end in zip(clock, ends, strict=True)]
        number = [n + 1 for n in number]
    main = buf.main_buffer
    rows = main[:]
    starts = np.flatnonzero(rows.obs[:, 0] == rows.obs[:, 1])
    ends = np.flatnonzero(rows.done)
    assert len(main) == 40
    for start, end in zip(ends[:-1] + 1, ends[1:], strict=True):
        assert np.diff(rows.obs[start : end + 1, 1]).tolist() == [1] * (end - start)
        assert start in starts
    assert (rows.obs_next[ends, 1] == rows.obs[ends, 1] + 50).all()
    inner = np.setdiff1d(np.arange(40), ends)
    assert (rows.obs_next[inner, 1] == rows.obs[inner, 1] + 1).all()
    assert [len(cache) for cache in buf.cached_buffers] == [0, 4, 0]


def test_long_episodes_keep_their_newest_steps() -> None:
    buf = CachedReplayBuffer(ReplayBuffer(10), 1, 3)
    for n in range(5):
        actual = buf.add(steps([n], rew=[1.0], terminated=[n == 4]))
    assert [part.tolist() for part in actual] == [[2], [5.0], [5], [0]]
    assert buf.main_buffer[:].obs.tolist() == [2, 3, 4]


def test_episodes_longer_than_the_main_buffer() -> None:
    buf = CachedReplayBuffer(ReplayBuffer(2), 1, 5)
    for n in range(4):
        actual = buf.add(steps([n], terminated=[n == 3]))
    assert [part.tolist() for part in actual][::3] == [[1], [0]]
    assert buf.main_buffer[:].obs.tolist() == [2, 3]


def test_existing_rows_of_the_main_buffer_are_kept() -> None:
    main = ReplayBuffer(6)
    for n in range(4):
        main.add(step(n, terminated=n == 1))
    buf = CachedReplayBuffer(main, 2, 4)
    assert buf.main_buffer is main
    buf.add(steps([50, 60], terminated=[True, False]))
    assert main[:].obs.tolist() == [0, 1, 2, 3, 50]
    assert buf[:].obs.tolist() == [0, 1, 2, 3, 50, 60]
    assert (buf.maxsize, len(buf)) == (14, 6)


@pytest.mark.parametrize("ids", [[2], [-1], [0, 1, 2]])
def test_ids_do_not_count_the_main_buffer(ids: list[int]) -> None:
    buf = CachedReplayBuffer(ReplayBuffer(6), 2, 4)
    with pytest.raises(RingError, match="buffer_ids"):
        buf.add(steps(ids), buffer_ids=ids)
    assert len(buf) == 0


def test_one_cache_id_may_be_repeated_in_one_call() -> None:
    """Episodes added together are moved like episodes added one by one."""

    def create() -> CachedReplayBuffer:
        return CachedReplayBuffer(ReplayBuffer(9, ignore_obs_next=True), 2, 4)

    ids, ends = [0, 0, 1, 0, 0], [False, True, False, False, True]
    rows = steps([1, 2, 3, 4, 5], truncated=ends, obs_next=[11, 12, 13, 14, 15])
    together, apart = create(), create()
    actual = together.add(rows, buffer_ids=ids)
    singles = [apart.add(rows[i : i + 1], buffer_ids=[ring]) for i, ring in enumerate(ids)]
    assert [part.tolist() for part in actual] == [[item[k][0] for item in singles] for k in range(4)]
    assert (together[:] == apart[:]) is True


def test_sizes_must_be_positive() -> None:
    for number, length in ((0, 5), (2, 0), (-1, 3)):
        with pytest.raises(ArgumentError, match="must be a whole number from 1"):
            CachedReplayBuffer(ReplayBuffer(5), number, length)


def test_the_main_buffer_must_be_plain() -> None:
    with pytest.raises(ColumnTypeError, match="samples uniformly, got a PrioritizedReplayBuffer"):
        CachedReplayBuffer(PrioritizedReplayBuffer(10, 0.6, 0.4), 2, 5)


def test_pickles_contain_the_main_buffer_and_the_caches() -> None:
    buf: Any = CachedReplayBuffer(ReplayBuffer(7), 2, 4)
    for n in range(5):
        buf.add(steps([n, n + 10], terminated=[n == 2, n == 3]))
    again = pickle.loads(pickle.dumps(buf))
    assert (again.cached_buffer_num, len(again.cached_buffers)) == (2, 2)
    for _ in range(2):
        assert (again[:] == buf[:]) is True
        actual = [[x.tolist() for x in item.add(steps([7, 8], terminated=[True, False]))] for item in (buf, again)]
        assert actual[0] == actual[1]
    assert again.main_buffer[:].obs.tolist() == buf.main_buffer[:].obs.tolist()


def test_cached_buffers_move_finished_episodes() -> None:
    buf = CachedReplayBuffer(ReplayBuffer(10), cached_buffer_num=4, max_episode_length=5)
    assert buf.maxsize == 30
    assert buf.cached_buffer_num == 4
    actual = buf.add(steps([1], rew=[1], terminated=[False]), buffer_ids=[1])
    assert [part.tolist() for part in actual] == [[15], [0.0], [0], [15]]
    actual = buf.add(steps([2], rew=[2], terminated=[True]), buffer_ids=[3])
    assert [part.tolist() for part in actual] == [[0], [2.0], [1], [0]]
    actual = buf.add(steps([3, 4], rew=[3, 4], terminated=[False, True]), buffer_ids=[3, 1])
    assert [part.tolist() for part in actual] == [[25, 2], [0.0, 5.0], [0, 2], [25, 1]]
    assert [len(part) for part in buf.buffers] == [3, 0, 0, 0, 1]
    assert len(buf) == 4
    assert buf.main_buffer.obs[:3].tolist() == [2, 1, 4]
    assert len(buf.cached_buffers) == 4
    assert buf.unfinished_index().tolist() == [25]
    assert buf.sample_indices(0).tolist() == [0, 1, 2, 25]
    assert buf.prev([0, 1, 2, 25]).tolist() == [0, 1, 1, 25]


def test_cached_buffer_without_a_main_buffer() -> None:
    buf = CachedReplayBuffer(ReplayBuffer(0), 2, 5)
    buf.add(steps([0, 1], rew=[1, 1]))
    actual = buf.add(steps([2, 3], rew=[1, 1], terminated=[True, False]))
    assert [part.tolist() for part in actual] == [[-1, 6], [2.0, 0.0], [2, 0], [-1, 5]]
    assert len(buf) == 2

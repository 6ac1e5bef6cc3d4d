"""Buffers of several rings."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    HERVectorReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    VectorReplayBuffer,
)
from samplebatch.errors import (
    ArgumentError,
    ColumnMismatchError,
    ColumnTypeError,
    RingError,
    SampleBatchError,
)
from tests.buffer.oracle import step, steps


def filled(kind: str = "vector", rounds: int = 5, **options: Any) -> Any:
    """Return three rings of 4 slots; observations 0, 1, ..., 100, 101, ..., 200, ... identify ring and time."""
    if kind == "vector":
        buf: Any = VectorReplayBuffer(12, 3, **options)
    else:
        buf = ReplayBufferManager([ReplayBuffer(4, **options) for _ in range(3)])
    for n in range(rounds):
        buf.add(steps([n, n + 100, n + 200], truncated=[n == 2, False, n == 3]))
    return buf


def test_rings_share_one_cursor_as_long_as_possible() -> None:
    buf = filled()
    assert buf._table.rings.together
    buf.add(steps([5, 105, 205]), buffer_ids=[0, 1, 2])
    buf.add(steps([6, 106, 206]), buffer_ids=np.arange(3))
    assert buf._table.rings.together
    buf.add(steps([107]), buffer_ids=[1])
    assert not buf._table.rings.together
    assert buf[:].obs.tolist() == [3, 4, 5, 6, 104, 105, 106, 107, 203, 204, 205, 206]
    buf.add(steps([7, 108, 207]))
    assert buf[:].obs.tolist() == [4, 5, 6, 7, 105, 106, 107, 108, 204, 205, 206, 207]


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 2], [0]])
def test_rows_are_stored_in_the_rings_of_buffer_ids(order: list[int]) -> None:
    buf, plain = filled(), filled()
    rows = steps([7 + 100 * i for i in order], rew=[i + 1.0 for i in order], terminated=[True] * len(order))
    actual = buf.add(rows, buffer_ids=order)
    for position, ring in enumerate(order):
        expected = plain.add(rows[position : position + 1], buffer_ids=[ring])
        assert [part[position] for part in actual] == [part[0] for part in expected]
    assert buf[:].obs.tolist() == plain[:].obs.tolist()
    assert repr(buf._meta) == repr(plain._meta)


@pytest.mark.parametrize("ignore", [True, False])
def test_one_buffer_id_may_be_repeated(ignore: bool) -> None:
    buf, plain = filled(ignore_obs_next=ignore), filled(ignore_obs_next=ignore)
    ids = [1, 1, 0, 1]
    rows = steps([11, 12, 13, 14], truncated=[False, True, False, False], obs_next=[1000, 1001, 1002, 1003], extra=ids)
    actual = buf.add(rows, buffer_ids=ids)
    singles = [plain.add(rows[i : i + 1], buffer_ids=[ring]) for i, ring in enumerate(ids)]
    assert [part.tolist() for part in actual] == [[item[k][0] for item in singles] for k in range(4)]
    assert (buf[:] == plain[:]) is True
    following = [11, 12, 1001, 1003] if ignore else [105, 1000, 1001, 1003]
    assert buf[:].obs_next.tolist()[-8:-4] == following
    before = repr(buf._meta), len(buf)
    with pytest.raises(SampleBatchError, match="'act'"):
        buf.add(steps([1, 2], act=[0.5, 1]), buffer_ids=[1, 1])
    assert (repr(buf._meta), len(buf)) == before


@pytest.mark.parametrize("ids", [[3], [-1], [0.5], [[0]], ["0"], 1])
def test_unknown_buffers_are_rejected(ids: Any) -> None:
    buf = filled()
    with pytest.raises(RingError, match="buffer_ids"):
        buf.add(steps([1]), buffer_ids=ids)
    assert len(buf) == 12


def test_parts_are_buffers_on_the_same_memory() -> None:
    buf = filled(ignore_obs_next=True, stack_num=2)
    part = buf.buffers[2]
    assert buf.buffers[2] is part
    assert type(part) is ReplayBuffer
    assert (len(part), part.maxsize, part.last_index.tolist(), part.subbuffer_edges.tolist()) == (4, 4, [0], [0, 4])
    actual = part.add(step(210, rew=2, terminated=1))
    assert [x.tolist() for x in actual] == [[1], [206.0], [2], [0]]
    assert buf.last_index.tolist() == [0, 4, 9]
    assert part.add(steps([211]), buffer_ids=[0])[0].tolist() == [2]
    assert part[:].obs.tolist() == [[203, 203], [204, 204], [204, 210], [211, 211]]
    assert part[:].obs_next[:, -1].tolist() == [204, 210, 210, 212]
    assert buf[[8, 9, 10, 11]].obs.tolist() == part[[0, 1, 2, 3]].obs.tolist()
    assert part.next([3, 0, 1]).tolist() == [3, 1, 1]
    assert part.prev(1) == 0
    assert part.get(1, "obs").tolist() == [204, 210]
    assert part.get_buffer_indices(3, 2).tolist() == [3, 0, 1]
    with pytest.raises(RingError):
        part.get_buffer_indices(3, 5)
    with pytest.raises(IndexError):
        part[4]
    assert part[-1].act == 203
    assert set(part.sample_indices(50)) == {0, 1, 2, 3}
    assert part.sample(0)[1].tolist() == [3, 0, 1, 2]
    assert part.unfinished_index().tolist() == [2]
    assert [rows.act.tolist() for rows, _ in part.minibatches(3, shuffle=False)] == [[203, 204, 210], [211]]
    part.reset()
    assert (len(part), len(buf)) == (0, 8)
    assert buf.unfinished_index().tolist() == [0, 4]
    assert part.unfinished_index().tolist() == []


def test_parts_have_separate_draws() -> None:
    buf = VectorReplayBuffer(2000, 2)
    for n in range(1000):
        buf.add(steps([n, n]))
    first, second = (part.sample_indices(20).tolist() for part in buf.buffers)
    assert first != second


def test_parts_can_be_updated_set_and_pickled() -> None:
    buf = filled(ignore_obs_next=True)
    other = ReplayBuffer(3, ignore_obs_next=True)
    for n in range(2):
        other.add(step(n + 50, truncated=n == 0, obs_next=n + 500))
    part = buf.buffers[1]
    assert part.update(other).tolist() == [1, 2]
    assert part[:].obs.tolist() == [103, 104, 50, 51]
    assert part[:].obs_next.tolist() == [104, 105, 500, 501]
    part.set_array_at_key(np.arange(4) * 2, "act")
    assert buf.act.tolist()[3:9] == [3, 0, 2, 4, 6, 204]
    again = pickle.loads(pickle.dumps(part))
    assert (again.maxsize, again._ring, again.subbuffer_edges.tolist()) == (4, None, [0, 4])
    assert again[:].obs_next.tolist() == part[:].obs_next.tolist()
    assert [x.tolist() for x in again.add(step(9, rew=1, terminated=1))] == [
        x.tolist() for x in part.add(step(9, rew=1, terminated=1))
    ]
    part.dropnull()
    assert part[:].obs.tolist() == again[:].obs.tolist()


@pytest.mark.parametrize("kind", ["vector", "manager"])
@pytest.mark.parametrize("rounds", [0, 2, 5])
def test_pickles_contain_all_rings(kind: str, rounds: int) -> None:
    buf = filled(kind, rounds, ignore_obs_next=True)
    if rounds:
        buf.add(steps([50]), buffer_ids=[1])
    again = pickle.loads(pickle.dumps(buf))
    assert type(again) is type(buf)
    for _ in range(3):
        if rounds:
            assert (again[:] == buf[:]) is True
        rows = steps([1, 2, 3], terminated=[False, True, True])
        actual = [[x.tolist() for x in item.add(rows)] for item in (buf, again)]
        assert actual[0] == actual[1]
    assert [len(part) for part in again.buffers] == [len(part) for part in buf.buffers]
    again.buffers[0].add(step(77))
    assert 77 in again.obs
    assert 77 not in buf.obs


def test_managers_copy_existing_rows() -> None:
    buffers = [ReplayBuffer(size, ignore_obs_next=True) for size in (3, 5, 2)]
    for i, buf in enumerate(buffers[:2]):
        for n in range(4):
            buf.add(step(n + 10 * i, truncated=n == 1, obs_next=n + 10 * i + 100, rew=1.0))
    expected = [buf[:] for buf in buffers[:2]]
    manager = ReplayBufferManager(buffers)
    assert manager.buffers.tolist() == buffers
    assert [len(buf) for buf in buffers] == [3, 4, 0]
    for buf, rows in zip(buffers, expected, strict=False):
        assert (buf[:] == rows) is True
    assert manager.last_index.tolist() == [0, 6, 8]
    actual = manager.add(steps([50, 60, 70], rew=[1.0, 1.0, 1.0], terminated=[True] * 3))
    assert [part.tolist() for part in actual] == [[1, 7, 8], [3.0, 3.0, 1.0], [3, 3, 1], [2, 5, 8]]
    buffers[2].add(step(71))
    assert manager[:].obs.tolist() == [2, 3, 50, 10, 11, 12, 13, 60, 70, 71]
    assert (len(manager), manager.maxsize) == (10, 10)


def test_managers_of_equal_buffers_use_one_cursor() -> None:
    buffers = [ReplayBuffer(4) for _ in range(2)]
    for n in range(5):
        for buf in buffers:
            buf.add(step(n))
    manager = ReplayBufferManager(buffers)
    assert manager._table.rings.together
    assert manager.add(steps([7, 8], terminated=[True, True]))[2].tolist() == [6, 6]
    single = ReplayBuffer(4)
    single.add(step(3, rew=2))
    manager = ReplayBufferManager([single])
    assert [part.tolist() for part in manager.add(steps([4], rew=[1.0], terminated=[True]))] == [[1], [3.0], [2], [0]]
    assert single[:].obs.tolist() == [3, 4]


def test_incompatible_buffers_are_rejected() -> None:
    first = ReplayBuffer(3)
    for parts, error, words in (
        ([], ColumnMismatchError, "none"),
        ([first, first], ColumnMismatchError, "got a repeated one"),
        ([first, VectorReplayBuffer(4, 2)], ColumnTypeError, "VectorReplayBuffer"),
        ([first, "buffer"], ColumnTypeError, "str"),
        ([first, ReplayBuffer(3, stack_num=2)], ColumnMismatchError, "'stack_num'"),
        ([first, ReplayBuffer(3, ignore_obs_next=True)], ColumnMismatchError, "'ignore_obs_next'"),
    ):
        with pytest.raises(error, match=words):
            ReplayBufferManager(parts)  # type: ignore[arg-type]
    assert first._ring is None
    for number in (0, -1):
        with pytest.raises(ArgumentError, match="buffer_num"):
            VectorReplayBuffer(10, number)


def test_vector_buffers_of_one_ring() -> None:
    buf = VectorReplayBuffer(3, 1, ignore_obs_next=True)
    for n in range(5):
        actual = buf.add(steps([n], truncated=[n == 3], obs_next=[n + 10]))
    assert [part.tolist() for part in actual] == [[1], [0.0], [0], [1]]
    assert buf[:].obs_next.tolist() == [3, 13, 14]
    assert buf.buffers[0][:].obs.tolist() == [2, 3, 4]


def test_stacked_frames_belong_to_one_ring() -> None:
    buf = filled(stack_num=3)
    assert buf[[4, 8, 11, 1]].obs.tolist() == [[102, 103, 104], [204, 204, 204], [201, 202, 203], [1, 1, 1]]
    buf.add(steps([50]), buffer_ids=[0])
    assert buf[[4, 1, 0]].obs.tolist() == [[102, 103, 104], [3, 4, 50], [3, 3, 4]]


def test_the_newest_rows_of_each_ring() -> None:
    buf = filled()
    buf.add(steps([50]), buffer_ids=[2])
    assert buf.latest(2).obs.tolist() == [3, 4, 103, 104, 204, 50]
    assert len(buf.latest(100)) == 12
    assert len(buf.latest(0)) == 0


def test_the_older_form_with_keywords() -> None:
    buf = VectorReplayBuffer(6, 2)
    rows = {"obs": [1, 2], "act": [1, 2], "rew": [1.0, 2.0], "obs_next": [2, 3], "info": [{"a": 1}, {"a": 2}]}
    actual = buf.add(done=[0, 1], **rows)
    assert [part.tolist() for part in actual] == [[0, 3], [0.0, 2.0], [0, 1], [0, 3]]
    assert buf.info.a.tolist() == [1, 0, 0, 2, 0, 0]
    buf.add(Batch(terminated=[True], truncated=[False], **{k: v[:1] for k, v in rows.items()}), buffer_ids=[1])
    assert buf.terminated.tolist() == [False, False, False, True, True, False]


def wrapped(**options: Any) -> ReplayBuffer:
    buf = ReplayBuffer(10, **options)
    for n in range(13):
        buf.add(step(n, terminated=n == 6))
    return buf


def managed(kind: type = VectorReplayBuffer) -> Any:
    buf = kind(9, 3) if kind is VectorReplayBuffer else kind([ReplayBuffer(3) for _ in range(3)])
    for n in range(4):
        buf.add(steps([n, n + 10, n + 20], terminated=[n == 1, False, n == 3]))
    buf.add(steps([4]), buffer_ids=[1])
    return buf


def test_vector_buffers_keep_extra_keys() -> None:
    """Tianshou's vector buffers drop extra keys."""
    buf = VectorReplayBuffer(6, 2)
    buf.add(steps([0, 1], extra=[5, 6]))
    assert buf[[0, 3]].extra.tolist() == [5, 6]
    assert buf.buffers[1].extra.tolist() == [6, 0, 0]


def test_vector_add_returns() -> None:
    buf = VectorReplayBuffer(9, 3)
    buf.add(steps([0, 1, 2], rew=[1, 2, 3]))
    actual = buf.add(steps([3, 4], rew=[10, 20], terminated=[True, False]), buffer_ids=[2, 0])
    assert [part.tolist() for part in actual] == [[7, 1], [13.0, 0.0], [2, 0], [6, 0]]
    actual = buf.add(steps([5, 6, 7]))
    assert [part.tolist() for part in actual] == [[2, 4, 8], [0.0] * 3, [0] * 3, [0, 3, 8]]


@pytest.mark.parametrize("kind", [VectorReplayBuffer, ReplayBufferManager])
def test_managers_accept_lists_integers_and_negative_indices(kind: type) -> None:
    buf = managed(kind)
    assert buf.prev(list(range(9))).tolist() == [2, 1, 2, 5, 3, 5, 8, 7, 7]
    assert buf.next(np.arange(9)).tolist() == [0, 1, 0, 4, 4, 3, 6, 8, 6]
    assert buf.prev(0) == 2
    assert buf.next(3) == 4
    assert buf.prev(-1) == buf.prev(8)
    assert buf.next([-1, -2]).tolist() == buf.next([8, 7]).tolist()
    assert buf.last_index.tolist() == [0, 4, 6]
    assert buf.unfinished_index().tolist() == [0, 4]
    assert buf[-1].obs == 22
    assert buf.subbuffer_edges.tolist() == [0, 3, 6, 9]
    assert isinstance(buf, ReplayBufferManager)
    assert isinstance(buf, ReplayBuffer)


def test_managers_cannot_be_updated() -> None:
    for buf in (managed(), managed(ReplayBufferManager), CachedReplayBuffer(ReplayBuffer(5), 2, 3)):
        with pytest.raises(NotImplementedError):
            buf.update(wrapped())


def test_the_buffers_of_a_manager_share_its_memory() -> None:
    buf = managed()
    assert [len(part) for part in buf.buffers] == [3, 3, 3]
    assert buf.buffers[1].obs.tolist() == buf.obs[3:6].tolist() == [13, 4, 12]
    assert np.shares_memory(buf.buffers[1].obs, buf.obs)
    buf.add(steps([77]), buffer_ids=[1])
    assert buf.buffers[1].obs.tolist() == [13, 4, 77]
    assert buf.buffers[1][:].obs.tolist() == [13, 4, 77]
    assert buf.buffers[1].prev(2) == 1
    assert buf.buffers[1].unfinished_index().tolist() == [2]


def test_total_size_is_rounded_up() -> None:
    buf = VectorReplayBuffer(10, 3)
    assert (buf.maxsize, buf.buffer_num, [part.maxsize for part in buf.buffers]) == (12, 3, [4, 4, 4])
    assert HERVectorReplayBuffer(10, 3, compute_reward_fn=lambda a, g: a, horizon=5).maxsize == 12
    assert PrioritizedVectorReplayBuffer(10, 3, alpha=0.6, beta=0.4).maxsize == 12

"""Steps added together equal steps added one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    VectorReplayBuffer,
)
from samplebatch.errors import ColumnMismatchError, RingError
from tests.buffer.oracle import KINDS, steps

MAKERS: dict[str, Any] = {
    "vector": lambda sizes, **options: VectorReplayBuffer(sizes[0] * len(sizes), len(sizes), **options),
    "manager": lambda sizes, **options: ReplayBufferManager([ReplayBuffer(size, **options) for size in sizes]),
    "prioritized": lambda sizes, **options: PrioritizedVectorReplayBuffer(
        sizes[0] * len(sizes), len(sizes), alpha=0.5, beta=0.4, **options
    ),
    "cached": lambda sizes, **options: CachedReplayBuffer(ReplayBuffer(9, **options), len(sizes), sizes[0]),
}


def rows(rng: np.random.Generator, first: int, count: int, kind: str) -> Batch:
    """Return steps with random ends and unique observations."""
    numbers = np.arange(first, first + 2 * count, 2)
    ends = rng.random((2, count)) < 0.15
    return steps(
        numbers.tolist(),
        obs=KINDS[kind](numbers),
        obs_next=KINDS[kind](numbers + 1),
        rew=rng.random(count),
        terminated=ends[0],
        truncated=ends[1],
    )


def same(buf: Any, plain: Any) -> None:
    """Compare two buffers, including their behaviour after further steps."""
    assert repr(buf._meta) == repr(plain._meta)
    assert (buf[:] == plain[:]) is True
    assert buf.unfinished_index().tolist() == plain.unfinished_index().tolist()
    assert buf.last_index.tolist() == plain.last_index.tolist()
    every = buf.sample_indices(0)
    assert every.tolist() == plain.sample_indices(0).tolist()
    assert buf.prev(every).tolist() == plain.prev(every).tolist()
    assert buf.next(every).tolist() == plain.next(every).tolist()
    mine, other = buf._table.rings.state_dict(), plain._table.rings.state_dict()
    for name in mine.keys() - {"together"}:
        np.testing.assert_array_equal(mine[name], other[name], err_msg=name)


@settings(max_examples=60, deadline=None)
@given(
    maker=st.sampled_from([*MAKERS]),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    kind=st.sampled_from(["number", "vector", "nested", "objects", "ragged"]),
    portions=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    ignore=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_rows_added_together_equal_rows_added_one_by_one(
    maker: str, sizes: list[int], kind: str, portions: list[int], ignore: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    buf, plain = (MAKERS[maker](sizes, ignore_obs_next=ignore) for _ in range(2))
    first = 0
    for count in portions:
        batch, ids = rows(rng, first, count, kind), rng.integers(0, len(sizes), count)
        first += 2 * count
        actual = buf.add(batch, buffer_ids=ids)
        singles = [plain.add(batch[i : i + 1], buffer_ids=ids[i : i + 1]) for i in range(count)]
        for part, one_by_one in zip(actual, zip(*singles, strict=True), strict=True):
            np.testing.assert_array_equal(part, np.concatenate(one_by_one))
        same(buf, plain)
    if maker == "prioritized":
        every = buf.sample_indices(0)
        np.testing.assert_array_equal(buf.get_weight(every), plain.get_weight(every))
    one_each = rows(rng, first, len(sizes), kind)
    for part, other in zip(buf.add(one_each), plain.add(one_each), strict=True):
        np.testing.assert_array_equal(part, other)
    same(buf, plain)


@pytest.mark.parametrize("options", [{}, {"stack_num": 2, "save_only_last_obs": True}, {"ignore_obs_next": True}])
@pytest.mark.parametrize("count", [3, 11])
def test_a_buffer_of_one_ring_accepts_repeated_zero_buffer_ids(options: dict[str, Any], count: int) -> None:
    rng = np.random.default_rng(count)
    buf, plain = ReplayBuffer(5, **options), ReplayBuffer(5, **options)
    batch = rows(rng, 0, count, "vector")
    actual = buf.add(batch, buffer_ids=[0] * count)
    singles = [plain.add(batch[i]) for i in range(count)]
    for part, one_by_one in zip(actual, zip(*singles, strict=True), strict=True):
        np.testing.assert_array_equal(part, np.concatenate(one_by_one))
    same(buf, plain)
    part = VectorReplayBuffer(10, 2, **options).buffers[1]
    assert part.add(batch, buffer_ids=[0] * count)[0].tolist() == actual[0].tolist()


def test_many_episodes_in_one_addition_to_one_ring() -> None:
    rng = np.random.default_rng(0)
    buf, plain = ReplayBuffer(90), ReplayBuffer(90)
    for first in (0, 400):
        batch = rows(rng, first, 120, "number")
        assert np.count_nonzero(batch.terminated | batch.truncated) > 20
        added = buf.add(batch, buffer_ids=np.zeros(120, int))
        singles = [plain.add(batch[i : i + 1], buffer_ids=[0]) for i in range(120)]
        for part, one_by_one in zip(added, zip(*singles, strict=True), strict=True):
            np.testing.assert_array_equal(part, np.concatenate(one_by_one))
        same(buf, plain)


def test_rings_share_one_cursor_after_equal_numbers_of_rows() -> None:
    buf = VectorReplayBuffer(20, 2)
    buf.add(steps(range(6)), buffer_ids=[0, 1, 1, 0, 1, 0])
    assert buf._table.rings.together
    buf.add(steps(range(3)), buffer_ids=[0, 1, 1])
    assert not buf._table.rings.together


def test_rewards_of_several_parts() -> None:
    buf, plain = VectorReplayBuffer(8, 2), VectorReplayBuffer(8, 2)
    batch = steps(range(6), rew=np.arange(12.0).reshape(6, 2), terminated=[0, 0, 1, 0, 1, 0])
    actual = buf.add(batch, buffer_ids=[0, 1, 0, 0, 1, 0])
    singles = [plain.add(batch[i : i + 1], buffer_ids=[ring]) for i, ring in enumerate([0, 1, 0, 0, 1, 0])]
    np.testing.assert_array_equal(actual[1], np.concatenate([single[1] for single in singles]))


def test_rows_added_to_a_buffer_in_a_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    buf = VectorReplayBuffer(12, 3, storage=str(tmp_path / "steps"), ignore_obs_next=True)
    plain = VectorReplayBuffer(12, 3, ignore_obs_next=True)
    for first in (0, 100, 200):
        batch, ids = rows(rng, first, 20, "vector"), rng.integers(0, 3, 20)
        buf.add(batch, buffer_ids=ids)
        plain.add(batch, buffer_ids=ids)
    buf.close()
    again = VectorReplayBuffer.open(str(tmp_path / "steps"))
    same(again, plain)
    again.close()


def test_rejected_rows_do_not_change_the_buffer() -> None:
    buf = VectorReplayBuffer(8, 2, ignore_obs_next=True)
    buf.add(steps([0, 10]))
    before = repr(buf._meta), buf.last_index.tolist()
    with pytest.raises(ColumnMismatchError, match="'obs'"):
        buf.add(steps(range(3), obs=np.zeros((3, 2))), buffer_ids=[0, 0, 1])
    with pytest.raises(ColumnMismatchError, match="'obs_next'"):
        buf.add(steps(range(3), obs_next=np.zeros((3, 2))), buffer_ids=[0, 0, 1])
    assert (repr(buf._meta), buf.last_index.tolist()) == before
    with pytest.raises(RingError, match="slots"):
        ReplayBufferManager([ReplayBuffer(3), ReplayBuffer(0)]).add(steps(range(2)), buffer_ids=[1, 1])

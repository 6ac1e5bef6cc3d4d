"""Steps moved from one buffer to another, where next observations are not stored with them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, CachedReplayBuffer, ReplayBuffer, VectorReplayBuffer
from tests.buffer.oracle import step, steps

KINDS: dict[str, Any] = {
    "number": lambda n: n,
    "nested": lambda n: {"a": {"b": n}, "c": np.array([n, n])},
    "ragged": lambda n: np.full(n % 3, n),
}


def filled(kind: str, size: int, ends: str) -> tuple[ReplayBuffer, list[int]]:
    """Add one step per letter; t and c end an episode. Return the buffer and the next observations."""
    buf = ReplayBuffer(size, ignore_obs_next=True, ragged=kind == "ragged")
    following = []
    for n, end in enumerate(ends):
        obs, after = KINDS[kind](10 * n), KINDS[kind](10 * n + (5 if end in "tc" else 10))
        buf.add(step(n, obs=obs, obs_next=after, terminated=end == "t", truncated=end == "c"))
        following.append(10 * n + {"t": 0, "c": 5}.get(end, 10))
    return buf, following


def numbers(kind: str, obs: Any) -> list[int]:
    actual = obs.a.b if kind == "nested" else [row[0] if len(row) else -1 for row in obs] if kind == "ragged" else obs
    return np.asarray(actual).tolist()


def expected(kind: str, following: list[int]) -> list[int]:
    return [n if kind != "ragged" or n % 3 else -1 for n in following]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("ends", ["r", "c", "t", "rrr", "crr", "rccr", "tcrtccc", "ccccccccr"])
@pytest.mark.parametrize("started", [False, True])
def test_final_observations_are_moved_with_their_rows(kind: str, ends: str, started: bool) -> None:
    other, following = filled(kind, 6, ends)
    buf = ReplayBuffer(20, ignore_obs_next=True, ragged=kind == "ragged")
    if started:
        for n in (7, 8):
            buf.add(step(n, obs=KINDS[kind](n), obs_next=KINDS[kind](n + 1), truncated=1))
        following = [8, 9, *following[-6:]]
    buf.update(other)
    assert numbers(kind, buf[:].obs_next) == expected(kind, following)[-len(buf) :]
    assert numbers(kind, other[:].obs_next) == expected(kind, following)[-len(other) :]


def test_rows_without_a_successor_keep_their_final_observation() -> None:
    source = VectorReplayBuffer(8, 2, ignore_obs_next=True)
    for n in range(3):
        source.add(steps([n, n + 100], obs_next=[n + 1, n + 101]))
    for stack_num in (1, 2):
        buf = ReplayBuffer(20, ignore_obs_next=True, stack_num=stack_num)
        for n in (40, 50):
            buf.add(step(n, obs_next=n + 5, truncated=n == 40))
        buf.update(source)
        buf.add(step(60, obs_next=61))
        expected = [45, 55, 1, 2, 3, 101, 102, 103, 61]
        following = buf[:].obs_next
        assert (following if stack_num == 1 else following[:, -1]).tolist() == expected
        again = pickle.loads(pickle.dumps(buf))
        assert again[:].obs_next.tolist() == following.tolist()
        assert buf.sample(0, n_step=1)[0].obs_next.tolist() == following.tolist()
        for n in range(61, 90):
            buf.add(step(n))
            rows = buf[:]
            newest = rows.obs if stack_num == 1 else rows.obs[:, -1]
            after = rows.obs_next if stack_num == 1 else rows.obs_next[:, -1]
            assert after[newest >= 60].tolist() == (newest[newest >= 60] + 1).tolist()
        assert after.tolist() == (newest + 1).tolist()


@pytest.mark.parametrize("ends", ["rr", "crr", "tc", "ct", "r" * 5, "c" * 40, "cr" * 20])
def test_final_observations_moved_into_a_folder_are_stored_there(ends: str, tmp_path: Path) -> None:
    other, following = filled("nested", 60, ends)
    buf = ReplayBuffer(100, ignore_obs_next=True, storage=tmp_path / "steps")
    buf.update(other)
    assert numbers("nested", buf[:].obs_next) == following
    buf.close()
    with ReplayBuffer.open(tmp_path / "steps") as again:
        assert numbers("nested", again[:].obs_next) == following
        again.update(other)
        assert numbers("nested", again[:].obs_next) == following * 2


def test_rows_next_to_dropped_rows_keep_next_observations() -> None:
    buf = ReplayBuffer(10, ignore_obs_next=True)
    for n in range(7):
        buf.add(step(n, obs=float(n), obs_next=n + 1.0, act=np.nan if n in (2, 3, 6) else float(n), truncated=n == 1))
    buf.dropnull()
    assert buf[:].obs.tolist() == [0.0, 1.0, 4.0, 5.0]
    assert buf[:].obs_next.tolist() == [1.0, 2.0, 5.0, 6.0]
    buf.add(step(7, obs=7.0, obs_next=8.0, act=7.0))
    assert buf[:].obs_next.tolist() == [1.0, 2.0, 5.0, 6.0, 8.0]


def test_finished_episodes_are_moved_with_their_final_observation() -> None:
    buf = CachedReplayBuffer(ReplayBuffer(10, ignore_obs_next=True), 2, 5)
    for n in range(4):
        buf.add(steps([n, n + 50], truncated=[n == 2, False], terminated=[False, n == 3]))
    rows = buf[:]
    assert rows.obs.tolist() == [0, 1, 2, 50, 51, 52, 53, 3]
    assert rows.obs_next.tolist() == [1, 2, 3, 51, 52, 53, 53, 4]


def test_ragged_observations_without_truncation_are_moved() -> None:
    buf = CachedReplayBuffer(ReplayBuffer(4, ignore_obs_next=True, ragged=True), 1, 5)
    obs = np.empty(1, object)
    for n in range(3):
        obs[0] = np.full(n, n, np.int32)
        buf.add(
            Batch(obs=obs.copy(), act=[0], rew=[0.0], terminated=[n == 2], truncated=[False], obs_next=obs.copy()),
            buffer_ids=[0],
        )
    assert [row.tolist() for row in buf[:].obs_next] == [[1], [2, 2], [2, 2]]

"""Regressions of faults in Tianshou's buffers. Docstrings describe Tianshou's behaviour."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    HERReplayBuffer,
    HERVectorReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferManager,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SegmentTree,
    VectorReplayBuffer,
)
from samplebatch.errors import SampleBatchError
from tests.buffer.oracle import step, steps


def test_latest_returns_the_newest_rows() -> None:
    """Tianshou: `buf[0:5]` is in storage order and `buf[:]` in time order. `latest` is unambiguous."""
    buf = ReplayBuffer(6)
    for n in range(9):
        buf.add(step(n))
    assert buf[:].obs.tolist() == [3, 4, 5, 6, 7, 8]
    assert buf[0:6].obs.tolist() == [6, 7, 8, 3, 4, 5]
    for n in range(7):
        assert buf.latest(n).obs.tolist() == [3, 4, 5, 6, 7, 8][6 - n :]


@pytest.mark.parametrize("stack_num", [1, 3])
def test_the_final_observation_of_a_truncated_episode(stack_num: int) -> None:
    """Tianshou: if next observations are not stored, a truncated step repeats its own observation."""
    buf = ReplayBuffer(7, stack_num=stack_num, ignore_obs_next=True)
    obs = 0
    for n in range(12):
        buf.add(step(obs, terminated=n == 10, truncated=n in (1, 4, 8)))
        obs += 100 if n in (1, 4, 8, 10) else 1
    # Of 12 steps the newest 7 are there; their episodes are 201 (the first was overwritten), 202, then 301 and on.
    rows = buf[:]
    newest = rows.obs if stack_num == 1 else rows.obs[:, -1]
    following = rows.obs_next if stack_num == 1 else rows.obs_next[:, -1]
    expected = np.where(rows.terminated, newest, newest + 1)
    assert following.tolist() == expected.tolist()
    if stack_num == 3:
        cut = rows.truncated | (np.arange(7) == 6)
        assert (rows.obs_next[cut, :2] == rows.obs[cut, 1:]).all()


def test_the_final_observation_at_the_write_cursor() -> None:
    """Tianshou: the newest step of a running episode repeats its own observation as the next one."""
    buf = VectorReplayBuffer(8, 2, ignore_obs_next=True)
    for n in range(6):
        buf.add(steps([n, n + 50], truncated=[False, n == 3]))
        rows = buf[buf.sample_indices(0)]
        assert rows.obs_next.tolist() == (rows.obs + 1).tolist()
    buf.add(steps([6]), buffer_ids=[0])
    assert buf[:].obs_next.tolist() == (buf[:].obs + 1).tolist()


@pytest.mark.parametrize("name", ["act", "obs"])
def test_an_integer_column_never_rounds(name: str) -> None:
    """Tianshou: the first value fixes the dtype, so 0.7 becomes 0."""
    buf = ReplayBuffer(3)
    buf.add(step(0))
    with pytest.raises(SampleBatchError, match=f"'{name}'"):
        buf.add(step(1, **{name: 0.7}))
    assert len(buf) == 1
    for rew in (1, 0.7):
        buf.add(step(1, rew=rew))
    assert buf.rew.tolist() == [0.0, 1.0, 0.7]


def filled(kind: type, **options: Any) -> Any:
    vector = kind in (PrioritizedVectorReplayBuffer, HERVectorReplayBuffer, VectorReplayBuffer)
    buf = kind(64, *(2,) * vector, **options)
    rng = np.random.default_rng(0)
    for n in range(30):
        goals = {
            "observation": rng.random((2, 1)),
            "achieved_goal": rng.random((2, 1)),
            "desired_goal": np.zeros((2, 1)),
        }
        rows = steps([n, n], obs=goals, obs_next=goals, truncated=[n % 6 == 5] * 2)
        if vector:
            buf.add(rows)
        else:
            buf.add(rows[0])
            buf.add(rows[1])
    return buf


def same_goal(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return -(achieved != desired).any(-1).astype(float)


PRIORITIES = {"alpha": 0.6, "beta": 0.4}
HINDSIGHT = {"compute_reward_fn": same_goal, "horizon": 6}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PrioritizedReplayBuffer, PRIORITIES),
        (PrioritizedVectorReplayBuffer, PRIORITIES),
        (HERReplayBuffer, HINDSIGHT),
        (HERVectorReplayBuffer, HINDSIGHT),
        (VectorReplayBuffer, {}),
    ],
)
def test_draws_depend_on_the_seed_of_the_buffer(kind: type, options: dict[str, Any]) -> None:
    """Tianshou: prioritized and hindsight sampling draw from NumPy's global generator."""

    def draw(seed: int, disturbed: int) -> list[Any]:
        buf = filled(kind, random_seed=seed, **options)
        actual = []
        for _ in range(4):
            np.random.seed(disturbed)
            batch, indices = buf.sample(8)
            actual.append([indices.tolist(), batch.rew.tolist(), batch.obs.desired_goal.tolist()])
        return actual

    assert draw(1, 5) == draw(1, 6)
    assert draw(1, 5) != draw(2, 5)


def test_rings_of_one_buffer_have_separate_draws() -> None:
    """Tianshou: all buffers of a vector have the same seed, so they draw the same positions."""
    buf = VectorReplayBuffer(4000, 2)
    for n in range(2000):
        buf.add(steps([n, n]))
    indices = buf.sample_indices(600)
    first, second = indices[indices < 2000], indices[indices >= 2000] - 2000
    shorter = min(len(first), len(second))
    assert first[:shorter].tolist() != second[:shorter].tolist()


def test_a_pickle_contains_only_live_rows() -> None:
    """Tianshou: a buffer with 1 of 100,000 rows has a pickle of 18 MB."""
    buf = ReplayBuffer(100_000)
    buf.add(step(0, obs=np.zeros(17, np.float32), obs_next=np.ones(17, np.float32)))
    stored = pickle.dumps(buf)
    assert len(stored) < 20_000
    again = pickle.loads(stored)
    assert (len(again), again.maxsize) == (1, 100_000)
    assert again[0].obs_next.tolist() == [1.0] * 17
    again.add(step(1, obs=np.ones(17, np.float32), obs_next=np.ones(17, np.float32)))
    assert again.prev(1) == 0


# What else running it has shown


def test_a_rejected_add_changes_nothing() -> None:
    """Tianshou: the cursor moves before the rows are validated."""
    buf = ReplayBuffer(4)
    buf.add(step(0, obs=np.zeros(2)))
    for bad in ({"obs": np.zeros(3)}, {"act": [1, 2]}, {"rew": "x"}, {"obs": {"a": 1}}, {"info": {"n": 1}, "act": "x"}):
        with pytest.raises((SampleBatchError, ValueError, TypeError)):
            buf.add(step(1, **{"obs": np.ones(2)} | bad))
        assert (len(buf), buf.last_index.tolist(), buf.sample_indices(0).tolist()) == (1, [0], [0])
        assert buf.obs.tolist() == [[0.0, 0.0]] * 4
    assert [part.tolist() for part in buf.add(step(1, obs=np.ones(2), terminated=1))] == [[1], [1.0], [2], [0]]
    assert buf[:].info.is_empty()


def test_set_beta_changes_the_weights_of_a_vector_buffer() -> None:
    """Tianshou: `set_beta` of a vector buffer changes only the beta of its parts, which is not used."""
    buf = PrioritizedVectorReplayBuffer(8, 2, alpha=1.0, beta=0.5)
    for n in range(3):
        buf.add(steps([n, n]))
    buf.update_weight(np.array([0, 5]), np.array([4.0, 1.0]))
    before = buf[[0, 5]].weight
    buf.set_beta(1.0)
    assert before.tolist() == pytest.approx([0.5, 1.0], rel=1e-5)
    assert buf[[0, 5]].weight.tolist() == pytest.approx([0.25, 1.0], rel=1e-5)


def test_weight_norm_applies_to_vector_buffers() -> None:
    """Tianshou: managers ignore `weight_norm`."""
    buf = PrioritizedVectorReplayBuffer(8, 2, alpha=1.0, beta=1.0, weight_norm=False)
    buf.add(steps([0, 1]))
    buf.update_weight(np.array([0, 4]), np.array([4.0, 2.0]))
    weights = buf.get_weight(np.array([0, 4]))
    assert weights.max() != pytest.approx(1.0) or weights.min() != pytest.approx(0.5)
    assert buf[[0, 4]].weight.tolist() == pytest.approx(weights.tolist())
    manager = PrioritizedReplayBufferManager(
        [PrioritizedReplayBuffer(4, alpha=1.0, beta=1.0, weight_norm=False) for _ in range(2)]
    )
    manager.add(steps([0, 1]))
    manager.update_weight(np.array([0, 4]), np.array([4.0, 2.0]))
    assert manager[[0, 4]].weight.tolist() == pytest.approx(manager.get_weight(np.array([0, 4])).tolist())


def test_prefix_sum_search_does_not_modify_its_argument() -> None:
    """Tianshou: the search decrements its argument in place."""
    tree = SegmentTree(4)
    tree[np.arange(4)] = np.ones(4)
    values = np.array([0.5, 2.5])
    tree.get_prefix_sum_idx(values)
    assert values.tolist() == [0.5, 2.5]
    index = np.array([1, 2])
    tree[index] = np.array([2.0, 3.0])
    assert index.tolist() == [1, 2]


def test_zero_priorities_are_never_drawn() -> None:
    """Tianshou: a value at the boundary of two items selects the first one, even if its weight is zero."""
    tree = SegmentTree(5)
    tree[np.arange(5)] = np.array([0.0, 1.0, 0.0, 1.0, 0.0])
    actual = tree.get_prefix_sum_idx(np.linspace(0.0, 2.0, 1000, endpoint=False))
    assert set(actual.tolist()) <= {1, 3}


def test_slices_of_partly_filled_vector_buffers_contain_only_rows() -> None:
    """Tianshou: `buf[2:6]` includes slots that were never written."""
    buf = VectorReplayBuffer(12, 3)
    buf.add(steps([1, 2, 3]))
    buf.add(steps([4, 5, 6]))
    assert sorted(buf[0:6].obs.tolist()) == [1, 2, 3, 4, 5, 6]


def test_names_of_methods_may_be_extra_keys_of_rows() -> None:
    """Tianshou: a key named like a method of the buffer is stored, but reading it returns the method."""
    buf = ReplayBuffer(3)
    buf.add(Batch(obs=0, act=0, rew=0, terminated=0, truncated=0, obs_next=1, info={}, latest=5))
    assert buf[:]["latest"].tolist() == [5]


def test_a_pickled_vector_buffer_shares_memory_with_its_parts() -> None:
    """Tianshou: unpickled parts have separate memory and do not see added rows."""
    buf = VectorReplayBuffer(6, 2)
    buf.add(steps([0, 1]))
    again = pickle.loads(pickle.dumps(buf))
    again.add(steps([2, 3], terminated=[True, False]))
    assert again.buffers[1].obs.tolist() == [1, 3, 0]
    assert again.unfinished_index().tolist() == [4]
    assert len(again.buffers[0]) == 2

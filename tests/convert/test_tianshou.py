"""Tianshou's batches and buffers continue from the state of ours, and the reverse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import samplebatch
from samplebatch import Batch
from samplebatch.convert import from_tianshou, to_tianshou
from samplebatch.errors import ColumnTypeError

data = pytest.importorskip("tianshou.data")


def reward(achieved: Any, desired: Any) -> Any:
    return -np.abs(np.asarray(achieved) - np.asarray(desired)).sum(-1)


def goals(i: int, n: int) -> dict[str, Any]:
    achieved = i + 100.0 * np.arange(n)
    return {name: np.stack([achieved, achieved + 1], 1) for name in ("observation", "achieved_goal", "desired_goal")}


PRIORITIES = {"alpha": 0.6, "beta": 0.4}
HINDSIGHT = {"compute_reward_fn": reward, "horizon": 5, "future_k": 4}
MAKERS: dict[str, Any] = {
    "ReplayBuffer": lambda of: of.ReplayBuffer(7),
    "stacked": lambda of: of.ReplayBuffer(7, stack_num=2, ignore_obs_next=True),
    "PrioritizedReplayBuffer": lambda of: of.PrioritizedReplayBuffer(7, **PRIORITIES),
    "HERReplayBuffer": lambda of: of.HERReplayBuffer(7, **HINDSIGHT),
    "VectorReplayBuffer": lambda of: of.VectorReplayBuffer(14, 2),
    "PrioritizedVectorReplayBuffer": lambda of: of.PrioritizedVectorReplayBuffer(14, 2, **PRIORITIES),
    "HERVectorReplayBuffer": lambda of: of.HERVectorReplayBuffer(14, 2, **HINDSIGHT),
    "ReplayBufferManager": lambda of: of.ReplayBufferManager([of.ReplayBuffer(5), of.ReplayBuffer(9)]),
    "CachedReplayBuffer": lambda of: of.CachedReplayBuffer(of.ReplayBuffer(9), 2, 5),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def fill(buffer: Any, batch: Any, start: int, stop: int) -> list[Any]:
    """Add steps; return the result of `add` for each."""
    n = int(getattr(buffer, "buffer_num", 1)) - ("Cached" in type(buffer).__name__)
    infos = []
    for i in range(start, stop):
        obs, following = (goals(k, n) for k in (i, i + 1))
        if "HER" not in type(buffer).__name__:
            obs, following = obs["observation"], following["observation"]
        values = {
            "obs": obs,
            "act": np.arange(n) + i,
            "rew": np.arange(n) + i / 2,
            "terminated": np.array([(i + k) % 4 == 3 for k in range(n)]),
            "truncated": np.zeros(n, bool),
            "obs_next": following,
            "info": {"lives": np.full(n, i)},
        }
        infos.append([np.asarray(part).tolist() for part in buffer.add(batch(values), buffer_ids=np.arange(n))])
    return infos


def assert_same(theirs: Any, ours: Any) -> None:
    assert type(theirs).__name__ == type(ours).__name__
    assert len(theirs) == len(ours)
    indices = ours.sample_indices(0)
    if "HER" not in type(ours).__name__:
        # Tianshou's hindsight rewrites the rows that it draws.
        assert np.array_equal(indices, theirs.sample_indices(0))
    assert np.array_equal(theirs.last_index, ours.last_index)
    assert np.array_equal(theirs.unfinished_index(), ours.unfinished_index())
    for name in ("act", "rew", "terminated", "truncated", "done"):
        assert np.array_equal(getattr(theirs[indices], name), getattr(ours[indices], name)), name
    assert Batch(obs=theirs[indices].obs) == Batch(obs=ours[indices].obs)
    assert np.array_equal(theirs[indices].info.lives, ours[indices].info.lives)
    assert np.array_equal(theirs.prev(indices), ours.prev(indices))
    assert np.array_equal(theirs.next(indices), ours.next(indices))
    if hasattr(theirs, "get_weight"):
        assert np.allclose(theirs.get_weight(indices), ours.get_weight(indices))


@each
@pytest.mark.parametrize("steps", [3, 12])
def test_a_tianshou_buffer_is_converted_and_continues(make: Any, steps: int) -> None:
    theirs = make(data)
    fill(theirs, data.Batch, 0, steps)
    if hasattr(theirs, "update_weight"):
        theirs.update_weight(theirs.sample_indices(0)[:2], np.array([3.0, 0.5]))
    ours = from_tianshou(theirs)
    assert type(ours).__module__.startswith("samplebatch.")
    assert_same(theirs, ours)
    twin = make(data)
    fill(twin, data.Batch, 0, steps)
    assert fill(ours, Batch, steps, steps + 6) == fill(twin, data.Batch, steps, steps + 6)


@each
@pytest.mark.parametrize("steps", [3, 12])
def test_a_buffer_is_converted_to_tianshou_and_continues(make: Any, steps: int) -> None:
    ours = make(samplebatch)
    fill(ours, Batch, 0, steps)
    if hasattr(ours, "update_weight"):
        ours.update_weight(ours.sample_indices(0)[:2], np.array([3.0, 0.5]))
    theirs = to_tianshou(ours)
    assert type(theirs) is getattr(data, type(ours).__name__)
    assert_same(theirs, ours)
    assert fill(theirs, data.Batch, steps, steps + 6) == fill(ours, Batch, steps, steps + 6)
    if "HER" not in type(ours).__name__ and "Prioritized" not in type(ours).__name__:
        assert_same(theirs, ours)
    assert len(theirs.sample(4)[1]) == 4


def test_rows_of_a_tianshou_buffer_are_not_copied() -> None:
    theirs = data.ReplayBuffer(7)
    fill(theirs, data.Batch, 0, 5)
    ours = from_tianshou(theirs)
    assert np.shares_memory(ours.obs, theirs.obs)
    assert np.shares_memory(ours.rew, theirs.rew)


def test_an_empty_buffer() -> None:
    assert len(from_tianshou(data.ReplayBuffer(3))) == 0
    assert len(to_tianshou(samplebatch.ReplayBuffer(3))) == 0


def test_batches_share_arrays_in_both_directions() -> None:
    theirs = data.Batch(obs={"x": np.ones((2, 3))}, act=np.arange(2), info=data.Batch())
    ours = from_tianshou(theirs)
    assert isinstance(ours, Batch)
    assert ours.obs.x is theirs.obs.x
    back = to_tianshou(ours)
    assert isinstance(back, data.Batch)
    assert isinstance(back.obs, data.Batch)
    assert back.obs.x is theirs.obs.x
    assert back == theirs


def test_a_flat_batch_gets_tianshous_names() -> None:
    flat = samplebatch.SampleBatch(obs=[[1.0]], new_obs=[[2.0]], rewards=[1.0])
    assert set(to_tianshou(flat).get_keys()) == {"obs", "obs_next", "rew"}


def test_other_objects_are_rejected() -> None:
    with pytest.raises(ColumnTypeError, match="thing must be a Tianshou Batch or buffer, got a int"):
        from_tianshou(3)  # type: ignore[arg-type]
    with pytest.raises(ColumnTypeError, match="source must be a batch or a buffer, got a int"):
        to_tianshou(3)

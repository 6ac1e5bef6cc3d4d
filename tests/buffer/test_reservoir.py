"""Reservoir buffer: every step that was ever added is stored with the same probability."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplebatch
from samplebatch import Batch, CachedReplayBuffer, Collector, ReplayBuffer, ReservoirReplayBuffer, SampleBatch
from samplebatch.errors import ArgumentError, ColumnLengthError, FormatError


def steps(first: int, count: int) -> Batch:
    numbers = np.arange(first, first + count)
    flags = np.zeros(count, bool)
    return Batch(obs=numbers, act=numbers, rew=numbers * 1.0, terminated=flags, truncated=flags, obs_next=numbers + 1)


@pytest.mark.parametrize("part", [1, 3, 40])
def test_each_step_is_stored_with_the_same_probability(part: int) -> None:
    counts, rounds = np.zeros(40), 400
    for seed in range(rounds):
        buffer = ReservoirReplayBuffer(8, random_seed=seed)
        for first in range(0, 40, part):
            buffer.add(steps(first, min(part, 40 - first)))
        assert (len(buffer), buffer.seen) == (8, 40)
        counts[buffer.obs] += 1
    # Binomial counts: five standard deviations of 40 numbers.
    assert np.abs(counts - rounds / 5).max() < 5 * np.sqrt(rounds * 0.2 * 0.8)


def test_rows_are_not_split_and_indices_locate_them() -> None:
    buffer = ReservoirReplayBuffer(5, random_seed=2)
    for first in range(0, 90, 9):
        indices, returns, lengths, _ = buffer.add(steps(first, 9))
        stored = np.flatnonzero(indices >= 0)
        np.testing.assert_array_equal(buffer.obs[indices[stored]], first + stored)
        assert not returns.any()
        assert not lengths.any()
    batch, rows = buffer.sample(64)
    np.testing.assert_array_equal(batch.obs, buffer.obs[rows])
    np.testing.assert_array_equal(batch.obs_next, batch.obs + 1)
    np.testing.assert_array_equal(batch.rew, batch.act)


def test_a_reservoir_of_one_row_and_an_empty_one() -> None:
    buffer = ReservoirReplayBuffer(1)
    assert len(buffer) == 0
    assert buffer.extend(SampleBatch(obs=np.zeros(0), actions=np.zeros(0), rewards=np.zeros(0))).tolist() == []
    buffer.add(steps(0, 200))
    assert (len(buffer), buffer.seen) == (1, 200)
    with pytest.raises(ArgumentError, match="size must be"):
        ReservoirReplayBuffer(0)
    with pytest.raises(ColumnLengthError, match=r"must have 3 rows, as buffer_ids, got 2"):
        buffer.add(steps(0, 2), buffer_ids=[0, 1, 2])


def test_fragments_are_added() -> None:
    buffer = ReservoirReplayBuffer(30)
    rows = SampleBatch(
        obs=np.arange(50), actions=np.zeros(50), rewards=np.ones(50), terminateds=[False] * 50,
        new_obs=np.arange(1, 51), eps_id=[7] * 50, t=np.arange(50),
    )  # fmt: skip
    indices = buffer.extend(rows)
    assert (len(buffer), buffer.seen, len(indices)) == (30, 50, 50)
    np.testing.assert_array_equal(buffer[:].obs_next, buffer[:].obs + 1)


def test_a_collector_fills_a_reservoir() -> None:
    buffer = ReservoirReplayBuffer(40, random_seed=3)
    with Collector("random", "CartPole-v1", buffer, num_envs=4, seed=1) as collector:
        collector.collect(n_step=200)
    assert (len(buffer), buffer.seen) == (40, 200)
    assert buffer.sample(16)[0].obs.shape == (16, 4)


@pytest.mark.parametrize("way", ["file", "pickle", "state"])
def test_a_saved_reservoir_continues_with_the_same_draws(way: str, tmp_path: Path) -> None:
    buffer: Any = ReservoirReplayBuffer(6, random_seed=4)
    buffer.add(steps(0, 100))
    if way == "file":
        buffer.save(tmp_path / "buffer.arrow")
        again = samplebatch.load(tmp_path / "buffer.arrow")
    elif way == "pickle":
        again = pickle.loads(pickle.dumps(buffer))
    else:
        again = ReservoirReplayBuffer(6)
        again.load_state_dict(buffer.state_dict())
    assert type(again) is ReservoirReplayBuffer
    for item in (buffer, again):
        item.add(steps(100, 100))
    assert again.seen == 200
    np.testing.assert_array_equal(again.obs, buffer.obs)
    np.testing.assert_array_equal(again.sample(20)[1], buffer.sample(20)[1])


@pytest.mark.parametrize("observed", [-1, 2, "many", None])
def test_a_state_with_a_wrong_count_is_rejected(observed: Any) -> None:
    buffer = ReservoirReplayBuffer(6)
    buffer.add(steps(0, 10))
    state = buffer.state_dict()
    state["own"]["seen"] = observed
    with pytest.raises(FormatError, match="seen"):
        ReservoirReplayBuffer(6).load_state_dict({name: part for name, part in state.items() if name != "checksums"})


def test_a_cached_buffer_is_loaded_without_its_class(tmp_path: Path) -> None:
    buffer = CachedReplayBuffer(ReplayBuffer(10), 2, 4)
    buffer.save(tmp_path / "cached.arrow")
    assert type(samplebatch.load(tmp_path / "cached.arrow")) is CachedReplayBuffer

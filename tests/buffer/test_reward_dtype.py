"""Rewards, returns and discounts in the dtype that the buffer's `reward_dtype` specifies."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    CachedReplayBuffer,
    HERReplayBuffer,
    MultiAgentReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    SampleBatch,
    VectorReplayBuffer,
)
from samplebatch.errors import ArgumentError, ColumnMismatchError
from tests.buffer.oracle import step, steps

SINGLE: dict[str, Any] = {"reward_dtype": "float32"}


def filled(**options: Any) -> ReplayBuffer:
    buf = ReplayBuffer(8, **options)
    for n in range(6):
        buf.add(step(n, rew=n / 10, terminated=n == 5))
    return buf


def test_rows_have_rewards_of_the_dtype_and_the_memory_is_exact() -> None:
    buf, exact = filled(**SINGLE), filled()
    assert (buf.rew.dtype, buf.rew[1]) == (np.float64, 0.1)
    some = np.array([1, 3])
    rows = [buf[:], buf[1:3], buf[some], buf[[2]], buf[1], buf.latest(2), buf.sample(4)[0], next(iter(buf))]
    rows += [buf.sample_sequences(3, 2)[0], buf.sample_episodes(1)[0][0], next(buf.minibatches(3))[0]]
    assert {row.rew.dtype for row in rows} == {np.dtype(np.float32)}
    assert buf.get(some, "rew").dtype == np.float32
    assert np.array_equal(buf[:].rew, exact[:].rew.astype(np.float32))
    assert buf.add(step(9, rew=0.1, terminated=True))[1].dtype == np.float64


def test_rows_without_rewards_have_none() -> None:
    buf = ReplayBuffer(2, **SINGLE)
    buf.set_array_at_key(np.arange(2), "obs")
    for rows in (buf[np.array([1])], buf[:1]):
        assert rows.rew.is_empty()


def test_returns_and_discounts_are_summed_in_float64_and_then_cast() -> None:
    rows, exact = (filled(**options).sample(0, n_step=3, gamma=0.9)[0] for options in (SINGLE, {}))
    assert rows.returns.dtype == rows.discount.dtype == np.float32
    assert np.array_equal(rows.returns, exact.returns.astype(np.float32))
    assert np.array_equal(rows.discount, exact.discount.astype(np.float32))
    assert exact.returns.dtype == exact.discount.dtype == np.float64


def test_hindsight_rewards() -> None:
    buf = HERReplayBuffer(
        8, lambda achieved, desired: np.full(len(achieved), 0.1), horizon=4, future_k=np.inf, **SINGLE
    )
    goals = {"observation": np.zeros(1), "achieved_goal": np.zeros(1), "desired_goal": np.ones(1)}
    for n in range(4):
        buf.add(step(n, obs=goals, obs_next=goals, rew=0.0))
    batch, _ = buf.sample(5, n_step=2, gamma=1.0)
    assert batch.rew.dtype == batch.returns.dtype == np.float32
    assert (batch.rew == np.float32(0.1)).all()


def test_every_kind_of_buffer_accepts_reward_dtype() -> None:
    cached = CachedReplayBuffer(ReplayBuffer(8, **SINGLE), 2, 4)
    prioritized = PrioritizedVectorReplayBuffer(8, 2, alpha=1.0, beta=1.0, **SINGLE)
    manager = ReplayBufferManager([ReplayBuffer(4, **SINGLE), ReplayBuffer(4, **SINGLE)])
    for buf in (cached, prioritized, manager, VectorReplayBuffer(8, 2, **SINGLE)):
        buf.add(steps([1, 2], rew=[0.1, 0.2], terminated=[True, True]))
        assert buf[:].rew.dtype == buf.buffers[0][:].rew.dtype == np.float32
    with pytest.raises(ColumnMismatchError, match="must have the same 'reward_dtype'"):
        ReplayBufferManager([ReplayBuffer(4, **SINGLE), ReplayBuffer(4)])
    with pytest.raises(ArgumentError, match="reward_dtype must be one of 'float32', 'float64'"):
        ReplayBuffer(4, reward_dtype="float16")  # type: ignore[arg-type]


def test_batches_of_several_policies_have_rewards_of_the_dtype() -> None:
    buf = MultiAgentReplayBuffer(8, **SINGLE)
    batch = SampleBatch(obs=[0, 1], new_obs=[1, 2], actions=[0, 0], rewards=[0.1, 0.2], terminateds=[False, True])
    buf.add(batch.as_multi_agent())
    rows = buf.sample(0, n_step=2).batch["default_policy"]
    assert {rows[name].dtype for name in ("rewards", "returns", "discount")} == {np.dtype(np.float32)}


@pytest.mark.parametrize("way", ["pickle", "arrow", "hdf5", "folder"])
def test_the_reward_dtype_is_saved_with_the_buffer(way: str, tmp_path: Path) -> None:
    buf = filled(**SINGLE)
    if way == "pickle":
        again = pickle.loads(pickle.dumps(buf))
    elif way == "arrow":
        buf.save(tmp_path / "rows.arrow")
        again = ReplayBuffer.load(tmp_path / "rows.arrow")
    elif way == "hdf5":
        pytest.importorskip("h5py")
        buf.save_hdf5(tmp_path / "rows.hdf5")
        again = ReplayBuffer.load_hdf5(tmp_path / "rows.hdf5", allow_pickle=True)
    else:
        with ReplayBuffer(8, storage=tmp_path / "rows", **SINGLE) as stored:
            stored.update(buf)
        again = ReplayBuffer.open(tmp_path / "rows")
    assert (again[:].rew.dtype, again.rew.dtype) == (np.float32, np.float64)
    assert np.array_equal(again.rew[:6], buf.rew[:6])
    again.close()

"""Rows of datasets and buffers mixed by a ratio, with priorities that find their way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, Dataset, MixedSampler, PrioritizedReplayBuffer, ReplayBuffer, SampleBatch
from samplebatch.errors import ArgumentError, ColumnMismatchError, EmptyBufferError, FormatError
from tests.optional import torch


def offline(folder: Path, n: int = 50) -> Dataset:
    dataset = Dataset(folder)
    dataset.extend(
        SampleBatch(
            obs=np.arange(n) + 1000.0,
            actions=np.zeros(n, int),
            rewards=np.ones(n),
            terminateds=np.zeros(n, bool),
            truncateds=np.zeros(n, bool),
            dones=np.zeros(n, bool),
            new_obs=np.arange(n) + 1001.0,
        )
    )
    return dataset


def online(buffer: Any = None, n: int = 30) -> Any:
    buffer = ReplayBuffer(100) if buffer is None else buffer
    for i in range(n):
        buffer.add(Batch(obs=float(i), act=0, rew=1.0, terminated=False, truncated=False, obs_next=i + 1.0))
    return buffer


def test_rows_have_the_configured_ratio(tmp_path: Path) -> None:
    sampler = MixedSampler({"offline": offline(tmp_path), "online": online()}, {"offline": 1, "online": 3})
    counts = np.zeros(2)
    for _ in range(200):
        batch, indices = sampler.sample(10)
        assert np.array_equal(batch.obs, np.where(indices.source == 0, indices.row + 1000.0, indices.row))
        assert np.bincount(indices.source, minlength=2)[0] in (2, 3)
        counts += np.bincount(indices.source, minlength=2)
    assert abs(counts[0] / counts.sum() - 0.25) < 0.02
    sampler.weights = {"online": 5}
    assert sampler.weights == {"offline": 0.0, "online": 1.0}
    assert set(sampler.sample(10)[1].source) == {1}


def test_the_same_seed_draws_the_same_rows(tmp_path: Path) -> None:
    offline(tmp_path)
    sample = [MixedSampler({"a": Dataset(tmp_path), "b": online()}, seed=7).sample(32)[1] for _ in range(2)]
    assert np.array_equal(sample[0].row, sample[1].row)
    assert np.array_equal(sample[0].source, sample[1].source)
    assert len(set(sample[0].source[:8])) == 2


def test_columns_of_only_one_source_are_rejected_or_dropped(tmp_path: Path) -> None:
    sources = {"data": offline(tmp_path), "replay": online()}
    sources["replay"].add(
        Batch(obs=1.0, act=0, rew=1.0, terminated=False, truncated=False, obs_next=2.0, info={"lives": 3})
    )
    with pytest.raises(ColumnMismatchError, match=r"'info'.*got it from 'replay' but not from 'data'"):
        MixedSampler(sources).sample(4)
    batch, _ = MixedSampler(sources, missing="drop").sample(4)
    assert "info" not in batch
    assert set(batch.__dict__) == {"obs", "act", "rew", "terminated", "truncated", "done", "obs_next"}


@pytest.mark.parametrize("info", [np.array([{}] * 5), np.array([None] * 5), Batch(inner=Batch())], ids=repr)
def test_an_empty_info_column_is_ignored(tmp_path: Path, info: Any) -> None:
    columns = {name: np.zeros(5) for name in ("obs", "act", "rew", "obs_next")}
    flags = {name: np.zeros(5, bool) for name in ("terminated", "truncated", "done")}
    dataset = Dataset(tmp_path)
    dataset.extend(Batch(**columns, **flags, info=info).as_sample_batch(convention="rllib"))
    batch, _ = MixedSampler({"data": dataset, "replay": online()}).sample(6)
    assert set(batch.__dict__) == {*columns, *flags}


def test_info_columns_of_both_sources_are_kept_even_if_mostly_empty(tmp_path: Path) -> None:
    sources = {}
    for name, lives in (("one", {}), ("two", {"lives": 3})):
        sources[name] = Dataset(tmp_path / name)
        sources[name].extend(SampleBatch(obs=[1.0, 2.0], infos=np.array([lives, {}])))
    batch, _ = MixedSampler(sources).sample(16)
    assert len(batch.info) == 16


def test_priorities_are_returned_to_the_buffer_of_their_rows(tmp_path: Path) -> None:
    buffers = [online(PrioritizedReplayBuffer(40, alpha=1.0, beta=1.0)) for _ in range(2)]
    sampler = MixedSampler({"data": offline(tmp_path), "one": buffers[0], "two": buffers[1]})
    batch, indices = sampler.sample(60)
    assert (batch.weight[indices.source == 0] == 1).all()
    priorities = indices.source * 10.0 + 1
    sampler.update_weight(indices, priorities, generation=batch.generation)
    for number, buffer in enumerate(buffers, 1):
        rows = np.unique(indices.row[indices.source == number])
        assert buffer.weight[rows] == pytest.approx(number * 10.0 + 1)
        others = np.setdiff1d(np.arange(30), rows)
        assert (buffer.weight[others] == 1).all()
    with pytest.raises(ArgumentError, match="shape"):
        sampler.update_weight(indices, priorities[:3], generation=batch.generation)


def test_rows_are_tensors_and_their_priorities_are_returned_as_such(tmp_path: Path) -> None:
    buffer = online(PrioritizedReplayBuffer(40, alpha=1.0, beta=1.0))
    sampler = MixedSampler({"data": offline(tmp_path), "replay": buffer})
    batch, indices = sampler.sample(20, device="cpu", floats="float32")
    assert [batch[name].dtype for name in ("obs", "act", "terminated")] == [torch.float32, torch.int64, torch.bool]
    assert isinstance(indices.source, np.ndarray)
    sampler.update_weight(indices, torch.full((20,), 9.0, requires_grad=True), generation=batch.generation)
    assert buffer.weight[np.unique(indices.row[indices.source == 1])] == pytest.approx(9.0)
    assert sampler.sample(4, floats="float32")[0].rew.dtype == np.float32


def test_priorities_of_overwritten_rows_are_dropped() -> None:
    buffer = online(PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0), 8)
    sampler = MixedSampler({"replay": buffer})
    batch, indices = sampler.sample(8)
    online(buffer, 8)
    sampler.update_weight(indices, np.full(8, 50.0), generation=batch.generation)
    assert buffer.weight[:8].max() == 1


def test_an_empty_source_is_reported(tmp_path: Path) -> None:
    sampler = MixedSampler({"data": offline(tmp_path), "replay": ReplayBuffer(5)})
    with pytest.raises(EmptyBufferError, match="'replay'"):
        sampler.sample(4)
    sampler.weights = {"data": 1.0}
    assert len(sampler.sample(4)[0]) == 4


@pytest.mark.parametrize(
    "weights", [{"data": -1.0, "replay": 1.0}, {"data": 0.0}, {"date": 1.0}, {"data": float("nan")}, {}]
)
def test_invalid_weights_are_rejected(tmp_path: Path, weights: dict[str, float]) -> None:
    sources = {"data": offline(tmp_path), "replay": online()}
    with pytest.raises(ArgumentError, match="weights"):
        MixedSampler(sources, weights)
    with pytest.raises(ArgumentError, match="sources"):
        MixedSampler({})
    with pytest.raises(ArgumentError, match="sources must be buffers and datasets by name, got a list"):
        MixedSampler(list(sources.values()))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="missing"):
        MixedSampler(sources, missing="keep")  # type: ignore[arg-type]


def test_a_sampler_and_a_dataset_resume_their_draws_from_a_state(tmp_path: Path) -> None:
    dataset, buffer = offline(tmp_path), online()
    sampler = MixedSampler({"offline": dataset, "online": buffer}, {"offline": 1, "online": 2}, seed=1)
    sampler.sample(7)
    states = sampler.state_dict(), dataset.state_dict()
    mixed, rows = sampler.sample(7)[1].source.tolist(), dataset.sample(9)[1].tolist()
    again = MixedSampler(sampler.sources, seed=5)
    again.load_state_dict(states[0])
    dataset.load_state_dict(states[1])
    assert again.weights == sampler.weights
    assert again.sample(7)[1].source.tolist() == mixed
    assert dataset.sample(9)[1].tolist() == rows


def test_states_of_something_else_are_rejected(tmp_path: Path) -> None:
    dataset = offline(tmp_path)
    sampler = MixedSampler({"offline": dataset, "online": online()})
    for other in ({}, {**sampler.state_dict(), "shares": np.ones(3)}):
        with pytest.raises(FormatError, match="must have 2 shares"):
            sampler.load_state_dict(other)
    with pytest.raises(FormatError, match="the state of a generator"):
        dataset.load_state_dict({})

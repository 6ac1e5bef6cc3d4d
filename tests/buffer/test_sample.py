"""Sample: the result of every sample method unpacks as a pair and has weights and generations."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    Dataset,
    HERReplayBuffer,
    MixedSampler,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    Sample,
    SampleBatch,
)


def fill(buffer: Any, n: int = 6) -> Any:
    for i in range(n):
        buffer.add(Batch(obs=float(i), act=0, rew=1.0, terminated=i == n - 1, truncated=False, obs_next=i + 1.0))
    return buffer


def agents(**options: Any) -> MultiAgentReplayBuffer:
    buffer = MultiAgentReplayBuffer(8, **options)
    rows = SampleBatch(obs=[1.0, 2.0], actions=[0, 1], rewards=[0.0, 1.0], terminateds=[False, True])
    buffer.add(MultiAgentBatch({"walker": rows}, 2))
    return buffer


def test_every_sample_method_returns_a_sample(tmp_path: Path) -> None:
    buffer = fill(ReplayBuffer(8))
    dataset = Dataset(tmp_path / "steps")
    dataset.extend(buffer.to_sample_batch().as_batch())
    goals = HERReplayBuffer(8, lambda achieved, desired: np.zeros(len(achieved)), horizon=4)
    samples = [
        buffer.sample(3),
        buffer.sample(3, n_step=2),
        buffer.sample_sequences(2, 2),
        buffer.get_sequences([0, 1], 2),
        buffer.sample_episodes(1),
        next(buffer.minibatches(2)),
        goals.sample(0) if len(goals) else fill(ReplayBuffer(8)).sample(0),
        agents().sample(2),
        dataset.sample(2),
        MixedSampler({"online": fill(ReplayBuffer(8))}).sample(2),
    ]
    for sample in samples:
        batch, indices = sample
        assert isinstance(sample, Sample)
        assert sample.batch is batch
        assert sample.indices is indices
        assert sample.weights is None
        assert sample.generation is None


def test_samples_by_priority_have_weights_and_generations() -> None:
    buffer = fill(PrioritizedReplayBuffer(4, alpha=1.0, beta=1.0))
    for sample in (buffer.sample(5), buffer.sample_sequences(5, 2)):
        assert sample.weights is sample.batch.weight
        assert sample.generation is sample.batch.generation
    sampled = agents(kind=PrioritizedReplayBuffer, alpha=1.0, beta=1.0).sample(4)
    assert sampled.weights["walker"] is sampled.batch["walker"]["weights"]
    assert sampled.generation["walker"].tolist() == [0] * 4
    assert sampled.indices["walker"].tolist() == sampled.batch["walker"]["batch_indexes"].tolist()


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, lambda sample: pickle.loads(pickle.dumps(sample))])
def test_samples_can_be_copied_and_pickled(change: Any) -> None:
    original = Sample(Batch(a=[1, 2]), np.array([3, 4]), weights=np.ones(2))
    again = change(original)
    assert type(again) is Sample
    assert again.batch == original.batch
    assert again.indices.tolist() == [3, 4]
    assert again.weights.tolist() == [1.0, 1.0]
    assert again.generation is None

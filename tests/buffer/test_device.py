"""Samples, minibatches and sequences of buffers as tensors, in the floats of a learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    HERReplayBuffer,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
)
from samplebatch.batch.delivery import TorchTarget
from samplebatch.errors import ArgumentError, DeviceError
from tests.optional import torch


def fill(buffer: Any, steps: int = 6, **more: Any) -> Any:
    for i in range(steps):
        step = Batch(obs=np.full((2, 2), i, np.uint8), act=i, rew=i / 2, terminated=i == 3, truncated=False, **more)
        step.obs_next = step.obs + 1
        buffer.add(step if len(buffer.subbuffer_edges) == 2 else Batch.stack([step]), None)
    return buffer


def vector() -> VectorReplayBuffer:
    buffer = VectorReplayBuffer(16, 2)
    for i in range(4):
        rows = {"obs": np.full((2, 2), i, np.uint8), "act": [i, i], "rew": [i / 2, i / 2]}
        buffer.add(Batch(rows, terminated=[False, True], truncated=[False, False], obs_next=np.zeros((2, 2), np.uint8)))
    return buffer


@pytest.mark.parametrize("floats", [torch.float32, np.float32, "float32"], ids=repr)
def test_a_sample_contains_tensors(floats: Any) -> None:
    plain, where = fill(ReplayBuffer(8)).sample(5)
    batch, indices = fill(ReplayBuffer(8)).sample(5, device="cpu", floats=floats)
    assert isinstance(indices, np.ndarray)
    assert indices.tolist() == where.tolist()
    assert batch.rew.dtype == torch.float32
    assert (batch.obs.dtype, batch.act.dtype, batch.done.dtype) == (torch.uint8, torch.int64, torch.bool)
    assert batch.rew.tolist() == plain.rew.tolist()
    assert batch.obs_next.tolist() == plain.obs_next.tolist()


def test_floats_without_a_device_returns_arrays() -> None:
    batch, _ = fill(ReplayBuffer(8)).sample(5, floats="float32")
    assert batch.rew.dtype == np.float32
    assert batch.obs.dtype == np.uint8
    targets, _ = fill(ReplayBuffer(8)).sample(5, n_step=3, floats="float32")
    assert targets.returns.dtype == targets.discount.dtype == np.float32


def test_objects_are_unchanged() -> None:
    batch, _ = fill(ReplayBuffer(8), info={"note": "x", "lives": 3}).sample(2, device="cpu")
    assert batch.info.note.tolist() == ["x", "x"]
    assert batch.info.lives.tolist() == [3, 3]
    assert isinstance(batch.info.lives, torch.Tensor)


@pytest.mark.parametrize("wrong", [{"floats": "int8"}, {"device": "cpu", "floats": 7}], ids=str)
def test_an_invalid_floats_argument_draws_no_sample(wrong: Any) -> None:
    buffer = fill(ReplayBuffer(8))
    with pytest.raises(ArgumentError, match="floats must be one of"):
        buffer.sample(2, **wrong)
    with pytest.raises(ArgumentError, match="floats must be one of"):
        buffer.sample_sequences(2, 2, **wrong)
    assert buffer.sample(5)[1].tolist() == fill(ReplayBuffer(8)).sample(5)[1].tolist()


def test_sequences_are_tensors() -> None:
    batch, indices = fill(ReplayBuffer(8)).sample_sequences(4, 3, device="cpu", floats="float32")
    assert (batch.rew.dtype, batch.mask.dtype, tuple(batch.obs.shape)) == (torch.float32, torch.bool, (4, 3, 2, 2))
    assert isinstance(indices, np.ndarray)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_minibatches_are_tensors(prefetch: int) -> None:
    plain = list(fill(ReplayBuffer(8)).minibatches(4, epochs=2))
    result = list(fill(ReplayBuffer(8)).minibatches(4, epochs=2, device="cpu", floats="float32", prefetch=prefetch))
    assert [(b.rew.tolist(), i.tolist()) for b, i in result] == [(b.rew.tolist(), i.tolist()) for b, i in plain]
    assert {b.rew.dtype for b, _ in result} == {torch.float32}
    with pytest.raises(ArgumentError, match="prefetch must be 0 without a device"):
        fill(ReplayBuffer(8)).minibatches(2, prefetch=2)


def test_wrong_arguments_of_minibatches_are_rejected_immediately() -> None:
    with pytest.raises(ArgumentError, match="batch_size must be a whole number from 1"):
        fill(ReplayBuffer(8)).minibatches(0)


def test_an_unavailable_device_is_rejected_immediately() -> None:
    buffer = fill(ReplayBuffer(8))
    with pytest.raises(DeviceError, match="got 'gpu'"):
        buffer.sample(2, device="gpu")
    with pytest.raises(DeviceError, match="got 'gpu'"):
        buffer.minibatches(2, device="gpu")


def test_samples_of_vector_buffers_and_their_parts_are_tensors() -> None:
    for buffer in (vector(), vector().buffers[1]):
        batch, _ = buffer.sample(3, device="cpu", floats="float32")
        assert batch.rew.dtype == torch.float32
        assert batch.obs.dtype == torch.uint8


def test_priorities_may_be_updated_with_tensors() -> None:
    buffer = fill(PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0))
    batch, indices = buffer.sample(4, device="cpu", floats="float32")
    assert batch.weight.dtype == torch.float32
    assert batch.generation.dtype == torch.int64
    buffer.update_weight(indices, batch.rew + 1, generation=batch.generation)
    assert buffer.weight[indices].round(5).tolist() == (batch.rew + 1).double().numpy().round(5).tolist()


def test_relabelled_samples_are_tensors() -> None:
    buffer = HERReplayBuffer(
        8, lambda actual, expected: (actual == expected).all(-1).astype(float), horizon=4, future_k=4.0
    )
    for n in range(4):
        goals = {"observation": n, "achieved_goal": np.array([n]), "desired_goal": np.array([9])}
        buffer.add(Batch(obs=goals, act=0, rew=0.0, terminated=False, truncated=n == 3, obs_next=goals))
    batch, _ = buffer.sample(64, device="cpu", floats="float32")
    assert batch.rew.dtype == torch.float32
    assert batch.obs.desired_goal.dtype == torch.int64
    assert bool((batch.obs.desired_goal != 9).any())


def test_policies_are_tensors() -> None:
    rows = {"obs": np.zeros((4, 2), np.float32), "actions": [0] * 4, "rewards": [0.5] * 4, "dones": [False] * 4}
    buffer = MultiAgentReplayBuffer(8, kind=PrioritizedReplayBuffer, alpha=1.0, beta=1.0)
    buffer.add(MultiAgentBatch({"walker": SampleBatch(rows)}, 4))
    batch = buffer.sample(3, device="cpu", floats="float32").batch
    assert batch["walker"]["rewards"].dtype == torch.float32
    assert batch["walker"]["actions"].dtype == torch.int64
    buffer.update_priorities(batch, {"walker": torch.full((3,), 7.0)})
    with pytest.raises(ArgumentError, match="floats must be one of"):
        buffer.sample(3, floats="int8")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_priorities_on_a_gpu_are_copied_to_the_host() -> None:
    buffer = fill(PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0))
    batch, indices = buffer.sample(4, device="cuda", floats="float32")
    assert batch.rew.is_cuda
    buffer.update_weight(indices, batch.rew + 1, generation=batch.generation)
    assert [b.obs.is_cuda for b, _ in buffer.minibatches(4, device="cuda", prefetch=2)] == [True, True]


def test_rows_of_varying_shape_become_tensors_that_share_memory() -> None:
    buffer = ReplayBuffer(8, ragged="obs")
    for i in range(4):
        buffer.add(Batch(obs=np.full((i + 1, 2), i / 2), act=0, rew=0.0, terminated=False, truncated=False))
    for rows, dtype in (
        (buffer.sample(0, device="cpu")[0].obs, torch.float64),
        (buffer.sample(0, device="cpu", floats="float32")[0].obs, torch.float32),
        (buffer.sample(0, floats="float32")[0].obs, np.float32),
        (buffer[:].to_torch().obs, torch.float64),
        (buffer[:].to_torch().to_numpy().obs, np.float64),
    ):
        assert [row.dtype for row in rows] == [dtype] * 4
        assert [row.tolist() for row in rows] == [[[i / 2] * 2] * (i + 1) for i in range(4)]
    tensors = buffer.sample(0, device="cpu")[0].obs
    assert len({row.untyped_storage().data_ptr() for row in tensors}) == 1


@pytest.mark.parametrize(
    "rows", [[np.zeros(1), np.zeros(1, np.float32)], [np.zeros(1), None], [np.array(["a"])]], ids=str
)
def test_rows_of_mixed_dtypes_or_objects_are_unchanged(rows: list[Any]) -> None:
    stored = np.fromiter(rows, object, len(rows))
    retained = TorchTarget(keep_objects=True).from_array(stored)
    assert retained is stored

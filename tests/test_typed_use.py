"""A user's script over batches, buffers, channels, returns and files passes mypy's strict mode, without a cast."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strict_mypy import check_types

SOURCE = """
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from samplebatch import (
    Batch, MultiAgentBatch, MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer, SampleBatch,
    SampleBatchBuilder, VectorReplayBuffer, broadcast, channel, concat_samples, gather, read_arrow, read_parquet,
    write_arrow, write_parquet,
)
from samplebatch.batch import PrioritizedBatch
from samplebatch.returns import discounted_returns, gae

Array = npt.NDArray[Any]


def rewards_of(batch: SampleBatch) -> npt.NDArray[np.float32]:
    return batch["rewards"]


def make() -> SampleBatch:
    batch = SampleBatch(obs={"camera": np.zeros((4, 2))}, rewards=np.ones(4), eps_id=[0, 0, 1, 1])
    batch["returns"] = np.cumsum(batch["rewards"])
    batch["camera"] = batch["obs"]["camera"]
    ends = batch[:2]["rewards"].shape[0] + batch[batch["rewards"] > 0].count
    joined = concat_samples(batch.split_by_episode())
    assert isinstance(joined, SampleBatch) and ends
    built = SampleBatchBuilder()
    built.add_values(obs=np.zeros(2), rewards=1.0)
    return joined.shuffle(0).concat(built.build_and_reset())


def train(batch: SampleBatch) -> torch.Tensor:
    tensors = batch.to_torch(floats=torch.float32, device="cpu")
    loss: torch.Tensor = tensors["rewards"].to("cpu").sum() + tensors[:2]["obs"].mean()
    for part in batch.minibatches(2, device="cpu", floats="float32", prefetch=2):
        loss = loss - part["rewards"].requires_grad_().sum()
    for plain in batch.minibatches(2, floats=np.float32):
        loss = loss + float(plain["rewards"].sum())
    return loss


def replay(buffer: PrioritizedReplayBuffer) -> Array:
    index, episode_return, length, start = buffer.add(Batch(obs=1, act=0, rew=0.0, terminated=False, truncated=False))
    batch, indices = buffer.sample(4, n_step=3, gamma=0.9)
    buffer.update_weight(indices, np.ones(4), generation=batch.generation)
    known: PrioritizedBatch[Array] = batch
    several: ReplayBuffer = VectorReplayBuffer(10, 2)
    for part, where in several.minibatches(2, device="cpu"):
        print(part.obs, where.tolist(), len(part))
    print(index.tolist(), length[0], start, episode_return.sum(), MultiAgentReplayBuffer(8).sample(0).batch.count)
    return known.weight * known.rew


def agents(batch: MultiAgentBatch) -> Iterator[tuple[str, torch.Tensor]]:
    for policy, steps in batch.to_torch().items():
        yield str(policy), steps["rewards"]
    for part in batch.minibatches(2, lockstep=True, device="cpu", floats="float32", prefetch=1):
        yield "walker", part["walker"]["rewards"].square()
    for plain in batch.minibatches(2, floats="float32"):
        print(plain["walker"]["rewards"].dtype)
    first = batch["walker"]["rewards"]
    print(first.mean(), [part.env_steps() for part in batch.timeslices(2)])


def send() -> None:
    producer, consumer = channel(1 << 20)
    producer.send(make())
    received = consumer.recv()
    if isinstance(received, SampleBatch):
        print(rewards_of(received))
    with producer.reserve({"obs": ("f4", (4,))}, 3) as block:
        block["obs"][:] = 0
    publisher, subscription = broadcast(1 << 16)
    print(publisher.publish({"w": np.zeros(3)}) + 1)
    update = subscription.latest()
    if update is not None:
        print(update.version, update.value["w"])
    for batch in gather([consumer]):
        print(len(batch))


def files(folder: Path) -> SampleBatch:
    write_arrow(make(), folder / "steps.arrow")
    write_parquet(make(), folder / "steps.parquet")
    print(len(read_parquet(folder / "steps.parquet")))
    read = read_arrow(folder / "steps.arrow")
    assert isinstance(read, SampleBatch)
    return read


def targets(steps: SampleBatch) -> npt.NDArray[np.float64]:
    returns, advantages = gae(steps["rewards"], steps["terminateds"], values=np.zeros(4), next_values=np.zeros(4))
    return advantages + returns + discounted_returns(steps["rewards"], steps["terminateds"], gamma=0.9)


reveal_type(make()["rewards"])
reveal_type(make()[:2]["rewards"])
reveal_type(make().to_torch()["rewards"])
reveal_type(MultiAgentBatch({"p": make()}, 4).to_torch()["p"]["rewards"])
make().nope
"""


@pytest.mark.long
def test_a_script_under_strict_mypy(tmp_path: Path) -> None:
    revealed, errors = check_types(SOURCE, tmp_path)
    array = "ndarray[tuple[Any, ...], dtype[Any]]"
    assert revealed == [array, array, "Tensor", "Tensor"]
    assert len(errors) == 1, errors
    assert 'has no attribute "nope"' in errors[0]

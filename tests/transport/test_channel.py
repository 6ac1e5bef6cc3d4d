"""A channel: batches arrive as they were, in order, in any process, or there is a clear end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from samplebatch import Batch, MultiAgentBatch, SampleBatch, channel
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.producer import Producer
from tests.batch.every_kind import in_sequences, with_every_kind

METHODS = ("fork", "forkserver", "spawn")
AnyBatch = SampleBatch | MultiAgentBatch | Batch


def steps(n: int = 4, seed: int = 0) -> SampleBatch:
    rng = np.random.default_rng(seed)
    return SampleBatch(
        obs={"camera": rng.integers(0, 255, (n, 4, 4), np.uint8), "arm": rng.random((n, 3))},
        rewards=rng.random(n),
        terminateds=rng.random(n) < 0.5,
    )


def some_batches() -> list[AnyBatch]:
    return [
        steps(),
        steps(7),
        SampleBatch(obs=np.arange(400_000.0).reshape(-1, 2)),
        in_sequences(padded=False),
        in_sequences(padded=True),
        SampleBatch(),
        SampleBatch(obs=np.zeros((0, 3))),
        MultiAgentBatch({"walker": steps(3), "guard": in_sequences(padded=True)}, 3),
        MultiAgentBatch({}, 0),
        Batch(obs=Batch(x=np.arange(3), later=Batch()), act=torch.arange(3), info=None, tag="a", k=np.float32(2)),
        Batch(),
    ]


@pytest.fixture
def ends() -> Iterator[tuple[Producer, Consumer]]:
    producer, consumer = channel(1 << 20)
    yield producer, consumer
    producer.close()
    consumer.close()


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("n", [1, 17])
def test_every_kind_of_column_arrives(n: int, allow_pickle: bool) -> None:
    batch = with_every_kind(n)
    if not allow_pickle:
        batch = batch.drop("objects", "infos mixed") if n > 1 else batch.drop("objects")
    producer, consumer = channel(1 << 20, allow_pickle=allow_pickle)
    with producer, consumer:
        for _ in range(3):
            producer.send(batch)
            got = consumer.recv(timeout_s=5)
            assert got == batch
            assert [got.column(name).kind for name in got.column_names] == [
                batch.column(name).kind for name in batch.column_names
            ]


@pytest.mark.parametrize("batch", some_batches(), ids=lambda batch: type(batch).__name__)
def test_every_batch_arrives(batch: AnyBatch) -> None:
    producer, consumer = channel(8 << 20)
    with producer, consumer:
        for _ in range(2):
            producer.send(batch)
            got = consumer.recv(timeout_s=5)
            assert type(got) is type(batch)
            assert got == batch
            if isinstance(batch, SampleBatch):
                assert got._flags == batch._flags


def produce(producer: Producer) -> None:
    with producer:
        for batch in some_batches():
            producer.send(batch, timeout_s=20)


@pytest.mark.parametrize("method", METHODS)
def test_the_producer_goes_to_a_child(method: str) -> None:
    producer, consumer = channel(8 << 20)
    child = multiprocessing.get_context(method).Process(target=produce, args=(producer,))
    child.start()
    producer.close()
    with consumer:
        for got, wanted in zip(consumer, some_batches(), strict=True):
            assert got == wanted
    child.join()
    assert child.exitcode == 0

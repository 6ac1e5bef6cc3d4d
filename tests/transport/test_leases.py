"""Leases: a slot is the receiver's for as long as anything looks at it, and goes back when nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from samplebatch import SampleBatch, channel
from samplebatch.errors import ChannelTimeoutError
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.producer import Producer

ROWS = 1000


def steps(value: float = 0.0) -> SampleBatch:
    return SampleBatch(obs=np.full((ROWS, 8), value, np.float32), rewards=np.full(ROWS, value))


@pytest.fixture
def ends() -> Iterator[tuple[Producer, Consumer]]:
    """Return a channel with room for one batch of `steps`, and not for two."""
    producer, consumer = channel(60_000, allow_pickle=True)
    yield producer, consumer
    producer.close()
    consumer.close()


def is_free(producer: Producer, consumer: Consumer) -> bool:
    """Tell whether the slot has come back: another batch finds room, and is received."""
    try:
        producer.send(steps(1.0), timeout_s=0)
    except ChannelTimeoutError:
        return False
    consumer.recv(timeout_s=1)
    return True


HOLDERS: dict[str, Callable[[SampleBatch], Any]] = {
    "batch": lambda batch: batch,
    "array": lambda batch: batch["obs"],
    "row": lambda batch: batch["obs"][5],
    "strided": lambda batch: batch["obs"][::-3, 2],
    "view": lambda batch: batch["obs"].view(np.uint8).reshape(-1),
    "element": lambda batch: batch["rewards"][3:4].reshape(()),
    "slice": lambda batch: batch[10:20],
    "slice of a slice": lambda batch: batch[10:20][2:3]["rewards"],
    "column": lambda batch: batch.column("rewards"),
    "shallow copy": lambda batch: batch.copy(shallow=True),
    "tensor": lambda batch: torch.from_numpy(batch["obs"]),
    "view of a tensor": lambda batch: batch.column("obs").to_torch()[3:].view(-1),
    "Arrow array": lambda batch: batch.column("obs").to_arrow(),
    "Arrow table": lambda batch: batch.to_arrow().slice(5, 5),
    "memoryview": lambda batch: memoryview(batch["rewards"]),
    "bytes in Arrow": lambda batch: pa.py_buffer(batch["rewards"]),
    "nested batch": lambda batch: batch.as_batch(),
    "row of a nested batch": lambda batch: batch.as_batch()[1:2],
    "rows": lambda batch: next(iter(batch.rows())),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_anything_over_the_slot_holds_it(ends: tuple[Producer, Consumer], holder: Callable[[SampleBatch], Any]) -> None:
    producer, consumer = ends
    for _ in range(3):
        producer.send(steps(7.0))
        batch = consumer.recv(timeout_s=1)
        assert isinstance(batch, SampleBatch)
        held = holder(batch)
        del batch
        assert not is_free(producer, consumer)
        del held
        assert is_free(producer, consumer)

"""Leases: a block belongs to the receiver until its last view is deleted."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import Batch, MultiAgentBatch, SampleBatch, channel
from samplebatch.errors import ChannelClosedError, ChannelTimeoutError, LeaseError
from samplebatch.transport.arena import ReturnPipe
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.producer import Producer
from tests.batch.every_kind import in_sequences, with_every_kind
from tests.optional import torch

ROWS = 1000


def steps(value: float = 0.0) -> SampleBatch:
    return SampleBatch(obs=np.full((ROWS, 8), value, np.float32), rewards=np.full(ROWS, value))


@pytest.fixture
def ends() -> Iterator[tuple[Producer, Consumer]]:
    """Return a channel whose arena can store one batch of `steps` but not two."""
    producer, consumer = channel(60_000, allow_pickle=True)
    yield producer, consumer
    producer.close()
    consumer.close()


def is_free(producer: Producer, consumer: Consumer) -> bool:
    """Return whether the block was released, so that another batch can be sent and received."""
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
def test_any_view_of_a_block_retains_it(ends: tuple[Producer, Consumer], holder: Callable[[SampleBatch], Any]) -> None:
    producer, consumer = ends
    for _ in range(3):
        producer.send(steps(7.0))
        batch = consumer.recv(timeout_s=1)
        assert isinstance(batch, SampleBatch)
        stored = holder(batch)
        del batch
        assert not is_free(producer, consumer)
        del stored
        assert is_free(producer, consumer)


def test_blocks_are_returned_in_any_order() -> None:
    producer, consumer = channel(1 << 20)
    with producer, consumer:
        order = random.Random(0)
        for _ in range(5):
            stored = []
            with pytest.raises(ChannelTimeoutError):  # noqa: PT012
                while True:
                    producer.send(steps(len(stored)), timeout_s=0)
                    stored.append(consumer.recv(timeout_s=1)["obs"][0])
            assert len(stored) > 10
            assert [row[0] for row in stored] == list(range(len(stored)))
            order.shuffle(stored)
            while stored:
                stored.pop()
                producer.send(steps(), timeout_s=0)
                consumer.recv(timeout_s=1)


def test_receivers_may_modify_received_arrays(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    batch = steps(1.0)
    producer.send(batch)
    actual = consumer.recv(timeout_s=1)
    actual["obs"][:] = 5
    actual["rewards"] += 1
    assert actual["obs"].sum() == 5 * actual["obs"].size
    assert batch == steps(1.0)


@pytest.mark.parametrize("make", [lambda: with_every_kind(20), lambda: in_sequences(padded=True)])
def test_columns_of_every_kind_retain_the_block(make: Callable[[], SampleBatch]) -> None:
    expected = make()
    producer, consumer = channel(1 << 17, allow_pickle=True)
    with producer, consumer:
        producer.send(expected)
        batch = consumer.recv(timeout_s=1)
        assert isinstance(batch, SampleBatch)
        names = batch.column_names
        for name in names:
            column = batch.column(name)
            del batch
            for _ in range(9):
                producer.send(SampleBatch(a=np.full(9000, 255, np.uint8)), timeout_s=1)
                consumer.recv(timeout_s=1)
            assert column.equals(expected.column(name)), name
            del column
            producer.send(expected)
            batch = consumer.recv(timeout_s=1)
        del batch
        producer._blocks.collect()
        assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes


def test_many_threads_may_release_blocks() -> None:
    producer, consumer = channel(1 << 18)
    with producer, consumer:
        shelves: list[list[Any]] = [[] for _ in range(4)]
        stop = threading.Event()

        def let_go(shelf: list[Any]) -> None:
            while not stop.is_set() or shelf:
                if shelf:
                    shelf.pop()

        threads = [threading.Thread(target=let_go, args=(shelf,)) for shelf in shelves]
        for thread in threads:
            thread.start()
        for i in range(300):
            producer.send(SampleBatch(i=np.full(500, i)), timeout_s=10)
            array = consumer.recv(timeout_s=10)["i"]
            assert (array == i).all()
            shelves[i % 4].append(array)
        del array
        stop.set()
        for thread in threads:
            thread.join()
        producer._blocks.collect()
        assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes


def test_the_garbage_collector_may_release_blocks_at_any_time() -> None:
    """The garbage collector returns blocks of arrays in cycles while another block is returned."""

    class Knot:
        def __init__(self, array: Any) -> None:
            self.array, self.itself = array, self

    threshold = gc.get_threshold()
    producer, consumer = channel(1 << 19)
    with producer, consumer:
        try:
            gc.set_threshold(5, 2, 2)
            for i in range(1000):
                producer.send(SampleBatch(i=np.full(100, i)), timeout_s=10)
                array = consumer.recv(timeout_s=10)["i"]
                assert array[0] == i
                Knot(array)
        finally:
            gc.set_threshold(*threshold)
        del array
        gc.collect()
        producer._blocks.collect()
        assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes


def test_no_block_is_lost_when_the_pipe_is_full() -> None:
    count = 10_000
    producer, consumer = channel(64 * (count + 16))
    with producer, consumer:
        stored = []
        for i in range(count):
            producer.send(SampleBatch(i=[i]), timeout_s=0)
            stored.append(consumer.recv(timeout_s=0)["i"])
        assert [array.item() for array in stored] == list(range(count))
        # More than a pipe holds, while nobody reads.
        stored.clear()
        assert consumer._return_pipe._pending
        producer._blocks.collect()
        with pytest.raises(ChannelTimeoutError):
            consumer.recv(timeout_s=0.1)
        producer._blocks.collect()
        assert not consumer._return_pipe._pending
        assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes


def test_a_block_whose_return_was_interrupted_is_reclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = channel(1 << 16)
    with producer, consumer:
        producer.send(SampleBatch(a=[1]))
        batch = consumer.recv(timeout_s=1)
        monkeypatch.setattr(consumer._return_pipe, "_process", 0)
        del batch
        monkeypatch.undo()
        assert len(producer._blocks.lent) == 1
        with pytest.raises(ChannelTimeoutError):
            consumer.recv(timeout_s=0.2)
        producer._blocks.collect()
        assert not producer._blocks.lent


def test_a_block_returned_twice_is_released_once(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    producer.send(steps())
    batch = consumer.recv(timeout_s=1)
    ident = next(iter(consumer._return_pipe.lent))
    del batch
    consumer._return_pipe.give(ident)
    producer.send(steps())
    consumer._return_pipe.give(ident)
    producer._blocks.collect()
    assert len(producer._blocks.lent) == 1
    assert producer._blocks.arena.free_nbytes < producer._blocks.arena.nbytes


def test_arrays_remain_valid_after_both_ends_are_closed() -> None:
    producer, consumer = channel(1 << 17)
    producer.send(steps(3.0))
    batch = consumer.recv(timeout_s=1)
    producer.close()
    assert (batch["obs"] == 3).all()
    consumer.close()
    rewards = batch["rewards"]
    del batch, producer, consumer
    gc.collect()
    assert (rewards == 3).all()
    rewards[:] = 4


def test_a_forked_child_returns_no_blocks(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    producer.send(steps(2.0))
    batch = consumer.recv(timeout_s=1)

    def drop() -> None:
        nonlocal batch
        assert (batch["obs"] == 2).all()
        del batch
        gc.collect()

    child = multiprocessing.get_context("fork").Process(target=drop)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert not is_free(producer, consumer)
    del batch
    assert is_free(producer, consumer)


def test_the_return_pipe_is_closed_with_its_last_user() -> None:
    before = len(os.listdir("/proc/self/fd"))
    producer, consumer = channel(1 << 17)
    producer.send(steps())
    batch = consumer.recv(timeout_s=1)
    returns = weakref.ref(consumer._return_pipe)
    consumer.close()
    producer.close()
    assert returns() is None
    del producer, consumer
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(batch) == ROWS


def test_closed_ends_retain_no_memory() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as lines:
            return sum("memfd:samplebatch" in line for line in lines)

    before = mapped()
    producer, consumer = channel(1 << 17)
    for n in (10, 20):
        producer.send(steps()[:n])
        consumer.recv(timeout_s=1)
    block = producer.reserve({"obs": ("f4", (8,))}, 10)
    producer.send(steps()[:30])
    batch = consumer.recv(timeout_s=1)
    assert mapped() == before + 1
    producer.close()
    consumer.close()
    assert mapped() == before + 1
    for use in (block.commit, lambda: block["obs"]):
        with pytest.raises(ChannelClosedError):
            use()
    assert batch["obs"].shape == (30, 8)
    del batch
    assert mapped() == before
    assert consumer.capacity_nbytes == producer.capacity_nbytes == 1 << 17


class TestLease:
    """Leases of a batch for a `with` statement."""

    def test_returns_the_block_at_the_end(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.send(steps(2.0))
        with consumer.lease(timeout_s=1) as batch:
            total = batch["rewards"].sum()
            assert not is_free(producer, consumer)
        assert total == 2 * ROWS
        assert list(batch) == []
        assert is_free(producer, consumer)

    @pytest.mark.parametrize("holder", list(HOLDERS.values())[1:], ids=list(HOLDERS)[1:])
    def test_arrays_retained_after_it_raise_an_error(
        self, ends: tuple[Producer, Consumer], holder: Callable[[SampleBatch], Any]
    ) -> None:
        producer, consumer = ends
        producer.send(steps(6.0))
        with pytest.raises(LeaseError, match="outlive the with statement"), consumer.lease(timeout_s=1) as batch:
            stored = holder(batch)
        assert not is_free(producer, consumer)
        del stored
        assert is_free(producer, consumer)

    def test_arrays_retained_after_it_remain_valid(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.send(steps(6.0))
        with pytest.raises(LeaseError), consumer.lease(timeout_s=1) as batch:
            rewards = batch["rewards"]
        with pytest.raises(ChannelTimeoutError):
            producer.send(steps(1.0), timeout_s=0)
        assert rewards.sum() == 6 * ROWS

    @pytest.mark.parametrize(
        "make",
        [
            lambda: with_every_kind(20),
            lambda: in_sequences(padded=False),
            lambda: MultiAgentBatch({"a": steps(1.0)[:50], "b": in_sequences(padded=True)}, 50),
            lambda: Batch(
                obs=Batch(x=np.arange(30).reshape(10, 3), y=torch.arange(10.0)),
                act=np.arange(10.0),
                grad=torch.ones(3, requires_grad=True),
                scalar=np.array(3.0),
                info=None,
                objects=np.array([{"a": 1}, None], object),
            ),
        ],
        ids=["every kind", "sequences", "multi-agent", "nested"],
    )
    def test_every_kind_of_batch_can_be_leased(self, make: Callable[[], Any]) -> None:
        expected = make()
        producer, consumer = channel(1 << 19, allow_pickle=True)
        with producer, consumer:
            for _ in range(2):
                producer.send(expected)
                with consumer.lease(timeout_s=1) as batch:
                    assert batch == expected
                producer._blocks.collect()
                assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes

    def test_a_batch_of_only_objects_can_be_leased(self) -> None:
        producer, consumer = channel(1 << 16)
        with producer, consumer:
            producer.send(SampleBatch(infos=[{"a": 1}, {}]))
            with consumer.lease(timeout_s=1) as batch:
                infos = batch["infos"]
            assert infos.tolist() == [{"a": 1}, {}]
            producer._blocks.collect()
            assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes

    def test_an_exception_does_not_change_the_batch(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.send(steps(3.0))
        with pytest.raises(ZeroDivisionError), consumer.lease(timeout_s=1) as batch:
            _ = 1 // 0
        assert batch == steps(3.0)
        del batch
        assert is_free(producer, consumer)

    def test_columns_added_by_the_caller_remain_valid(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.send(steps())
        achieved = np.arange(ROWS)
        with consumer.lease(timeout_s=1) as batch:
            batch["own"] = achieved
        assert is_free(producer, consumer)
        assert achieved.sum() > 0


def test_a_signal_while_a_block_is_returned_loses_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    returns = ReturnPipe()
    returns.open(writer)
    write = os.write
    recorded: list[int] = []

    def interrupted(descriptor: int, data: bytes) -> int:
        recorded.append(int.from_bytes(data, "little"))
        if len(recorded) == 2:
            write(descriptor, data)
            raise KeyboardInterrupt
        return write(descriptor, data)

    monkeypatch.setattr("samplebatch.transport.arena._write", interrupted)
    returns.give(1)
    with pytest.raises(KeyboardInterrupt):
        returns.give(2)
    returns.give(3)
    assert recorded == [1, 2, 2, 3]
    assert returns.flush()
    del returns
    assert len(os.read(reader, 100)) == 32
    os.close(reader)

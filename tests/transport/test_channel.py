"""Channels: batches arrive unchanged and in order in any process, or the stream ends with an error."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, MultiAgentBatch, SampleBatch, channel, concat_samples, gather
from samplebatch.errors import (
    CapacityError,
    ChannelClosedError,
    ChannelTimeoutError,
    ColumnTypeError,
    EndOfStreamError,
    OwnershipError,
    PeerDiedError,
    UntrustedPickleError,
    WorkerError,
)
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.producer import Producer
from samplebatch.transport.wire import HELLO, pack
from tests.batch.every_kind import in_sequences, with_every_kind
from tests.optional import torch
from tests.transport.channel_children import (
    AnyBatch,
    consume,
    echo,
    idle,
    leave,
    pass_on,
    produce,
    produce_from_queue,
    send_many,
    some_batches,
    steps,
)

METHODS = ("fork", "forkserver", "spawn")


@pytest.fixture
def ends() -> Iterator[tuple[Producer, Consumer]]:
    producer, consumer = channel(1 << 20)
    yield producer, consumer
    producer.close()
    consumer.close()


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("n", [1, 17])
def test_every_kind_of_column_is_received(n: int, allow_pickle: bool) -> None:
    batch = with_every_kind(n)
    if not allow_pickle:
        batch = batch.drop("objects", "infos mixed") if n > 1 else batch.drop("objects")
    producer, consumer = channel(1 << 20, allow_pickle=allow_pickle)
    with producer, consumer:
        for _ in range(3):
            producer.send(batch)
            actual = consumer.recv(timeout_s=5)
            assert actual == batch
            assert [actual.column(name).kind for name in actual.column_names] == [
                batch.column(name).kind for name in batch.column_names
            ]


WITH_TENSORS = [
    in_sequences(padded=True),
    Batch(obs=Batch(x=torch.zeros(3, 2), later=Batch()), act=torch.arange(3)),
]


@pytest.mark.parametrize("batch", [*some_batches(), *WITH_TENSORS], ids=lambda batch: type(batch).__name__)
def test_every_batch_is_received(batch: AnyBatch) -> None:
    producer, consumer = channel(8 << 20)
    with producer, consumer:
        for _ in range(2):
            producer.send(batch)
            actual = consumer.recv(timeout_s=5)
            assert type(actual) is type(batch)
            assert actual == batch
            if isinstance(batch, SampleBatch):
                assert actual._flags == batch._flags


@pytest.mark.parametrize("method", METHODS)
def test_the_producer_can_be_sent_to_a_child(method: str) -> None:
    producer, consumer = channel(8 << 20)
    child = multiprocessing.get_context(method).Process(target=produce, args=(producer,))
    child.start()
    producer.close()
    with consumer:
        for actual, expected in zip(consumer, some_batches(), strict=True):
            assert actual == expected
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("method", METHODS)
def test_both_ends_can_be_sent_to_a_child_and_returned(method: str) -> None:
    producer, theirs = channel(1 << 20)
    mine, consumer = channel(1 << 20)
    child = multiprocessing.get_context(method).Process(target=echo, args=(theirs, mine))
    child.start()
    theirs.close()
    mine.close()
    with producer, consumer:
        for i in range(20):
            producer.send(steps(seed=i), timeout_s=20)
            assert consumer.recv(timeout_s=20) == steps(seed=i)
        producer.close()
        with pytest.raises(EndOfStreamError):
            consumer.recv(timeout_s=20)
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_end_can_be_sent_through_a_queue(method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=produce_from_queue, args=(queue,))
    child.start()
    producer, consumer = channel(8 << 20)
    queue.put(producer)
    with consumer:
        assert sum(1 for _ in consumer) == len(some_batches())
    child.join()
    producer.close()
    queue.close()
    queue.join_thread()


class TestEndOfStream:
    """End-of-stream notifications."""

    def test_is_clean_when_the_producer_closes(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        for seed in range(3):
            producer.send(steps(seed=seed))
        producer.close()
        assert wait([consumer], timeout=1) == [consumer]
        assert [batch == steps(seed=i) for i, batch in enumerate(consumer)] == [True] * 3
        for _ in range(2):
            assert consumer.poll()
            assert wait([consumer], timeout=0) == [consumer]
            with pytest.raises(EOFError):
                consumer.recv(timeout_s=0)

    def test_is_clean_when_nothing_was_sent(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.close()
        assert list(consumer) == []

    def test_is_reported_even_if_the_pipe_is_full(self) -> None:
        producer, consumer = channel(1 << 20)
        sent = 0
        with pytest.raises(ChannelTimeoutError, match="pipe"):  # noqa: PT012
            while True:
                producer.send(SampleBatch(i=[sent]), timeout_s=0)
                sent += 1
        # As a forked sibling has it: the pipe does not end.
        retained = os.dup(producer._pipe)
        producer.close()
        assert [batch["i"].item() for batch in consumer] == list(range(sent))
        os.close(retained)
        consumer.close()

    def test_is_reported_when_the_producer_is_deleted(self) -> None:
        producer, consumer = channel(1 << 16)
        producer.send(steps(2))
        del producer
        assert [len(batch) for batch in consumer] == [2]
        consumer.close()

    def test_reports_that_the_producer_failed(self) -> None:
        producer, consumer = channel(1 << 16)
        producer.send(steps(2))
        producer.fail("the floor is lava", "line 3\n" * 5000 + "the end")
        producer.close()
        assert len(consumer.recv(timeout_s=1)) == 2
        with pytest.raises(WorkerError, match="the floor is lava") as caught:
            consumer.recv(timeout_s=1)
        assert caught.value.__notes__[0].endswith("line 3\nthe end")
        with pytest.raises(EndOfStreamError):
            consumer.recv(timeout_s=1)
        consumer.close()

    def test_reports_the_exception_that_ended_a_with_block(self) -> None:
        producer, consumer = channel(1 << 16)
        with pytest.raises(ZeroDivisionError), producer:
            producer.send(SampleBatch(a=[1 // 0]))
        with pytest.raises(WorkerError, match="ZeroDivisionError") as caught:
            consumer.recv(timeout_s=1)
        assert "1 // 0" in caught.value.__notes__[0]
        consumer.close()

    @pytest.mark.parametrize(
        ("error", "is_reported"),
        [(KeyboardInterrupt(), True), (SystemExit(3), True), (SystemExit(0), False), (GeneratorExit(), False)],
        ids=repr,
    )
    def test_reports_only_errors_that_ended_a_with_block(self, error: BaseException, is_reported: bool) -> None:
        producer, consumer = channel(1 << 16)
        with pytest.raises(type(error)), producer:
            raise error
        with pytest.raises(WorkerError if is_reported else EndOfStreamError):
            consumer.recv(timeout_s=1)
        consumer.close()

    def test_a_failure_requires_no_free_block(self) -> None:
        producer, consumer = channel(1 << 12)
        with pytest.raises(ChannelTimeoutError):  # noqa: PT012
            while True:
                producer.send(SampleBatch(a=np.zeros(100)), timeout_s=0)
        producer.fail("no room to move")
        with pytest.raises(WorkerError, match="no room"):
            list(consumer)
        producer.close()
        consumer.close()


@pytest.mark.parametrize("how", ["return", "raise", "exit", "kill"])
def test_a_process_ends_without_closing(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    producer, consumer = channel(1 << 20)
    child = multiprocessing.get_context("fork").Process(target=leave, args=(producer, how))
    child.start()
    # The parent's copy of the other end stays open: that must not hide anything.
    assert consumer.recv(timeout_s=10) == steps(3)
    expected = {"return": EndOfStreamError, "raise": WorkerError}.get(how, PeerDiedError)
    assert wait([consumer], timeout=10) == [consumer]
    with pytest.raises(expected) as caught:
        consumer.recv(timeout_s=10)
    if how == "raise":
        assert "the dog ate it" in str(caught.value)
    if expected is PeerDiedError:
        assert str(child.pid) in str(caught.value)
        with pytest.raises(PeerDiedError):
            consumer.recv(timeout_s=0)
        assert consumer.poll()
        assert wait([consumer], timeout=0) == [consumer]
    child.join()
    producer.close()
    consumer.close()


@pytest.mark.parametrize(("method", "how"), [("fork", "return"), ("fork", "kill"), ("spawn", "kill")])
def test_a_process_ends_without_having_used_its_end(method: str, how: str) -> None:
    """The exit is detected although the parent and a sibling have copies of the end."""
    context = multiprocessing.get_context(method)
    producer, mine = channel(1 << 14)
    to_child, consumer = channel(1 << 14)
    children = [
        context.Process(target=idle, args=(producer, None, how)),
        context.Process(target=idle, kwargs={"end": consumer, "other": None, "how": how}),
    ]
    for child in children:
        child.start()
    with pytest.raises(EndOfStreamError if how == "return" else PeerDiedError):
        mine.recv(timeout_s=30)
    with pytest.raises(ChannelClosedError if how == "return" else PeerDiedError):  # noqa: PT012
        while True:
            to_child.send(steps(50), timeout_s=30)
    for child in children:
        child.join()
    for end in (producer, mine, to_child, consumer):
        end.close()


def test_an_unused_end_can_be_passed_on() -> None:
    context = multiprocessing.get_context("fork")
    first, second, arrived = context.Queue(), context.Queue(), context.Event()
    children = [
        context.Process(target=pass_on, args=(first, second, arrived)),
        context.Process(target=produce_from_queue, args=(second,)),
    ]
    for child in children:
        child.start()
    producer, consumer = channel(8 << 20)
    first.put(producer)
    assert sum(1 for _ in consumer) == len(some_batches())
    arrived.set()
    for child in children:
        child.join()
    for queue in (first, second):
        queue.close()
        queue.join_thread()
    producer.close()
    consumer.close()


@pytest.mark.parametrize("how", ["close", "return", "exit", "kill"])
def test_the_producer_is_notified_when_the_consumer_has_ended(how: str) -> None:
    producer, consumer = channel(1 << 14)
    child = multiprocessing.get_context("fork").Process(target=consume, args=(consumer, 2, how))
    child.start()
    expected = ChannelClosedError if how in ("close", "return") else PeerDiedError
    with pytest.raises(expected):  # noqa: PT012
        while True:
            producer.send(steps(50), timeout_s=10)
    # Once more, with no need to wait for anything.
    with pytest.raises(expected):
        producer.send(steps(50), timeout_s=10)
    child.kill()
    child.join()
    producer.close()
    consumer.close()


def test_the_producer_is_notified_while_blocks_are_free() -> None:
    producer, consumer = channel(1 << 20)
    child = multiprocessing.get_context("fork").Process(target=consume, args=(consumer, 1, "kill"))
    child.start()
    producer.send(steps(1))
    child.join()
    with pytest.raises(PeerDiedError):  # noqa: PT012
        for _ in range(100):
            producer.send(steps(1), timeout_s=0)
            time.sleep(0.005)
    producer.close()
    consumer.close()


def full_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):  # noqa: PT012
        while True:
            os.write(writer, bytes(64))
    return reader, writer


class TestBackPressure:
    """Sending waits for the consumer."""

    def test_waits_for_a_block(self) -> None:
        producer, consumer = channel(1 << 16)
        with producer, consumer:
            batch = SampleBatch(a=np.zeros(6000))
            producer.send(batch)
            began = time.monotonic()
            with pytest.raises(ChannelTimeoutError, match="retains 1 messages"):
                producer.send(batch, timeout_s=0.1)
            assert 0.09 < time.monotonic() - began < 5
            stored = consumer.recv()

            def let_go() -> None:
                nonlocal stored
                time.sleep(0.1)
                del stored

            thread = threading.Thread(target=let_go)
            thread.start()
            producer.send(batch, timeout_s=10)
            thread.join()
            assert consumer.recv(timeout_s=1) == batch

    @pytest.mark.parametrize("waits_for", ["block", "pipe"])
    def test_an_interrupted_wait_loses_no_block(self, waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
        producer, consumer = channel(1 << 16)
        with producer, consumer:
            large = SampleBatch(a=np.zeros(6000))
            if waits_for == "block":
                producer.send(large)
            else:
                retained = os.dup(producer._pipe)
                full = full_pipe()
                os.dup2(full[1], producer._pipe)

            def interrupted(*_: Any) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(producer, "_wait", interrupted)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    producer.send(large)
                block = None
                with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                    block = producer.reserve({"a": "f8"}, 6000)
                    block.commit()
                del block
            monkeypatch.undo()
            if waits_for == "pipe":
                os.dup2(retained, producer._pipe)
                for descriptor in (*full, retained):
                    os.close(descriptor)
            else:
                assert consumer.recv(timeout_s=1) == large
            gc.collect()
            producer._blocks.collect()
            assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes
            producer.send(large, timeout_s=0)
            assert consumer.recv(timeout_s=1) == large

    def test_nothing_is_sent_on_a_timeout(self) -> None:
        producer, consumer = channel(1 << 16)
        with producer, consumer:
            producer.send(SampleBatch(a=np.zeros(6000)))
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    producer.send(SampleBatch(other=np.ones(5000)), timeout_s=0.01)
                with pytest.raises(TimeoutError):
                    producer.reserve({"b": "f8"}, 5000, timeout_s=0.01)
            assert len(consumer.recv(timeout_s=0)) == 6000
            with pytest.raises(ChannelTimeoutError, match="0 s"):
                consumer.recv(timeout_s=0)
            producer.send(SampleBatch(other=np.ones(5000)), timeout_s=0)
            assert consumer.recv(timeout_s=0)["other"].sum() == 5000

    def test_a_slow_consumer_slows_the_producer(self) -> None:
        producer, consumer = channel(40_000)
        arrived: list[int] = []

        def slowly() -> None:
            for batch in consumer:
                time.sleep(0.01)
                arrived.append(int(batch["i"][0]))

        thread = threading.Thread(target=slowly)
        thread.start()
        ahead = []
        for i in range(30):
            producer.send(SampleBatch(i=np.full(1000, i)), timeout_s=10)
            ahead.append(i - len(arrived))
        producer.close()
        thread.join()
        consumer.close()
        assert arrived == list(range(30))
        assert max(ahead) <= 6


class TestBatchesLargerThanTheArena:
    """Batches that do not fit into the arena."""

    def test_is_rejected_with_both_sizes(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        with pytest.raises(CapacityError, match=r"1048576 bytes, got 1600\d\d\d"):
            producer.send(SampleBatch(a=np.zeros(200_000)))
        with pytest.raises(CapacityError, match=r"1048576 bytes, got 1600\d\d\d"):
            producer.reserve({"a": "f8"}, 200_000)
        with pytest.raises(ChannelTimeoutError):
            consumer.recv(timeout_s=0)

    @pytest.mark.parametrize(
        "batch",
        [
            SampleBatch(a=np.arange(300_000.0), infos=[{}] * 300_000),
            SampleBatch(a=np.arange(3e5), seq_lens=[99_999, 1, 100_000, 80_000, 20_000], state_in_0=np.arange(5)),
            MultiAgentBatch(
                {
                    "one": SampleBatch(a=np.arange(2e5), t=np.arange(200_000), eps_id=np.zeros(200_000, int)),
                    "two": SampleBatch(b=np.arange(2e5), t=np.arange(200_000), eps_id=np.zeros(200_000, int)),
                },
                200_000,
            ),
            Batch(obs={"a": np.arange(300_000.0)}, act=np.arange(300_000)),
        ],
        ids=["rows", "sequences", "multi-agent", "nested"],
    )
    def test_is_split_if_allowed(self, batch: AnyBatch) -> None:
        producer, consumer = channel(1_700_000)
        arrived: list[AnyBatch] = []
        thread = threading.Thread(target=lambda: arrived.extend(part[:].copy() for part in consumer))
        if isinstance(batch, MultiAgentBatch):
            thread = threading.Thread(target=lambda: arrived.extend(part.copy() for part in consumer))
        thread.start()
        with pytest.raises(CapacityError):
            producer.send(batch)
        producer.send(batch, timeout_s=10, split=True)
        producer.close()
        thread.join()
        consumer.close()
        assert len(arrived) > 1
        if isinstance(batch, Batch):
            assert Batch.cat(arrived) == batch
        else:
            joined = concat_samples(arrived)
            assert joined == batch

    @pytest.mark.parametrize(
        "batch",
        [
            SampleBatch(a=np.zeros((1, 300_000))),
            SampleBatch(a=np.zeros(300_000), seq_lens=[300_000]),
            MultiAgentBatch({"one": SampleBatch(a=np.zeros(300_000))}, 300_000),
            Batch(a=np.zeros((1, 300_000))),
        ],
        ids=["one row", "one sequence", "no steps", "nested"],
    )
    def test_is_rejected_if_it_cannot_be_split(self, ends: tuple[Producer, Consumer], batch: AnyBatch) -> None:
        producer, consumer = ends
        with pytest.raises(CapacityError, match="larger"):
            producer.send(batch, split=True)
        with pytest.raises(ChannelTimeoutError):
            consumer.recv(timeout_s=0)


class TestOwnership:
    """An end belongs to one process."""

    @pytest.mark.parametrize("end", [0, 1])
    def test_a_second_process_is_rejected(self, end: int) -> None:
        ends = channel(1 << 16)
        use = (lambda: ends[0].send(steps(1)), lambda: ends[1].poll())[end]
        use()
        results = multiprocessing.get_context("fork").Queue()

        def also() -> None:
            try:
                use()
            except OwnershipError as error:
                results.put(str(error))

        child = multiprocessing.get_context("fork").Process(target=also)
        child.start()
        assert str(os.getpid()) in results.get(timeout=10)
        child.join()
        use()
        for part in ends:
            part.close()

    def test_a_used_end_is_not_sent(self, ends: tuple[Producer, Consumer]) -> None:
        producer, _ = ends
        producer.send(steps(1))
        with pytest.raises(OwnershipError, match="before its first use"):
            multiprocessing.get_context("spawn").Process(target=produce, args=(producer,)).start()

    def test_an_end_is_not_pickled_otherwise(self, ends: tuple[Producer, Consumer]) -> None:
        for end in ends:
            with pytest.raises(TypeError, match="multiprocessing"):
                pickle.dumps(end)

    def test_closing_the_copy_of_a_child_does_not_affect_the_parent(self) -> None:
        producer, consumer = channel(1 << 16)
        producer.send(steps(2))
        child = multiprocessing.get_context("fork").Process(target=lambda: (producer.close(), consumer.close()))
        child.start()
        child.join()
        producer.send(steps(3))
        assert [len(consumer.recv(timeout_s=1)) for _ in range(2)] == [2, 3]
        producer.close()
        assert list(consumer) == []
        consumer.close()

    def test_a_closed_end_is_rejected(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        producer.close()
        consumer.close()
        producer.close()
        for use in (lambda: producer.send(steps()), consumer.recv, consumer.poll, consumer.fileno):
            with pytest.raises(ChannelClosedError, match="closed"):
                use()


class TestWaiting:
    """Waiting for a message without receiving it."""

    def test_poll(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        assert not consumer.poll()
        began = time.monotonic()
        assert not consumer.poll(0.15)
        assert time.monotonic() - began > 0.14
        producer.send(steps())
        assert consumer.poll()
        assert consumer.poll(None)
        consumer.recv()
        assert not consumer.poll()

    def test_recv_respects_its_timeout(self, ends: tuple[Producer, Consumer]) -> None:
        _, consumer = ends
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            consumer.recv(timeout_s=0.15)
        assert 0.14 < time.monotonic() - began < 5

    def test_wait_accepts_several_consumers_at_once(self) -> None:
        ends = [channel(1 << 16) for _ in range(3)]
        consumers = [consumer for _, consumer in ends]
        assert wait(consumers, timeout=0) == []
        ends[1][0].send(steps(1))
        assert wait(consumers, timeout=5) == [consumers[1]]
        consumers[1].recv(timeout_s=0)
        assert wait(consumers, timeout=0) == []
        for producer, consumer in ends:
            producer.close()
            consumer.close()

    def test_asyncio(self) -> None:
        producer, consumer = channel(8 << 20)
        child = multiprocessing.get_context("fork").Process(target=produce, args=(producer,))

        async def receive() -> int:
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[int] = loop.create_future()
            count = 0

            def prepare() -> None:
                nonlocal count
                try:
                    consumer.recv(timeout_s=0)
                    count += 1
                except EndOfStreamError:
                    loop.remove_reader(consumer)
                    ended.set_result(count)

            loop.add_reader(consumer, prepare)
            return await asyncio.wait_for(ended, 20)

        # Before the loop has threads.
        child.start()
        producer.close()
        assert asyncio.run(receive()) == len(some_batches())
        child.join()
        consumer.close()

    def test_a_reservation_identifies_the_producer(self) -> None:
        """A process that dies during its first reservation is detected by waiting on the descriptor."""
        producer, consumer = channel(1 << 16)
        descriptor = consumer.fileno()

        def reserve_and_die() -> None:
            producer.reserve({"a": "f8"}, 10)
            os.kill(os.getpid(), signal.SIGKILL)

        child = multiprocessing.get_context("fork").Process(target=reserve_and_die)
        child.start()
        error = None
        while error is None:
            assert wait([descriptor], timeout=10)
            try:
                consumer.recv(timeout_s=0)
            except TimeoutError:
                continue
            except PeerDiedError as died:
                error = died
        child.join()
        producer.close()
        consumer.close()


class TestPickledObjects:
    """Validation of received messages and permission to unpickle."""

    def test_nothing_is_pickled_unless_allowed(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        for batch in (
            SampleBatch(a=[1, 2], sets=np.array([{1}, {2}])),
            MultiAgentBatch({"p": SampleBatch(sets=np.array([{1}, {2}]))}, 2),
            Batch(a=[1], sets={"deep": object()}),
        ):
            with pytest.raises(UntrustedPickleError, match=r"'sets(\.deep)?'.*allow_pickle"):
                producer.send(batch)
        with pytest.raises(ChannelTimeoutError):
            consumer.recv(timeout_s=0)

    def test_nothing_is_unpickled_unless_allowed(self) -> None:
        producer, consumer = channel(1 << 16)
        producer._allow_pickle = True
        with producer, consumer:
            producer.send(SampleBatch(sets=np.array([{1}, {2}])))
            producer.send(steps())
            with pytest.raises(UntrustedPickleError, match="'sets'"):
                consumer.recv(timeout_s=1)
            assert consumer.recv(timeout_s=1) == steps()
            gc.collect()
            producer._blocks.collect()
            assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes

    def test_objects_that_are_not_batches_are_rejected(self, ends: tuple[Producer, Consumer]) -> None:
        producer, _ = ends
        with pytest.raises(ColumnTypeError, match="a dict"):
            producer.send({"a": 1})  # type: ignore[arg-type]
        for capacity in (0, -5):
            with pytest.raises(ValueError, match="whole number from 1"):
                channel(capacity)


def test_no_file_descriptor_is_leaked() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        producer, consumer = channel(1 << 16)
        child = multiprocessing.get_context("fork").Process(target=leave, args=(producer, "kill"))
        child.start()
        producer.close()
        consumer.recv(timeout_s=10)
        with pytest.raises(PeerDiedError):
            consumer.recv(timeout_s=10)
        child.join()
        child.close()
        consumer.close()
    del producer, consumer
    assert len(os.listdir("/proc/self/fd")) == before


def test_schemas_are_sent_again_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samplebatch.transport.encode._MAX_SCHEMAS", 4)
    producer, consumer = channel(1 << 20)
    with producer, consumer:
        order = np.random.default_rng(0).integers(0, 9, 100).tolist()
        for i in order:
            producer.send(SampleBatch({f"column {i}": [i]}))
            assert consumer.recv(timeout_s=1) == SampleBatch({f"column {i}": [i]})
        assert len(consumer._decoder._schemas) <= 4


@pytest.mark.parametrize("free", [0, 1, 2, 3, 4])
def test_a_channel_without_free_descriptors_leaks_none(free: int) -> None:
    stored = [os.open(os.devnull, os.O_RDONLY)]
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                stored.append(os.dup(stored[0]))
        for descriptor in stored[-free:] if free else []:
            os.close(descriptor)
        del stored[len(stored) - free :]
        with pytest.raises(OSError, match="Too many open files"):
            channel(1 << 12)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) == before + len(stored) - 1
    for descriptor in stored:
        os.close(descriptor)


def test_messages_without_a_batch_do_not_extend_a_timeout() -> None:
    producer, consumer = channel(1 << 12)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with contextlib.suppress(BlockingIOError):
                os.write(producer._pipe, pack(HELLO))

    producer.reserve({"a": "f8"}, 1).cancel()
    thread = threading.Thread(target=flood)
    thread.start()
    started = time.monotonic()
    try:
        for timeout_s in (0.3, 0.0):
            with pytest.raises(ChannelTimeoutError):
                consumer.recv(timeout_s=timeout_s)
    finally:
        stop.set()
        thread.join()
    assert 0.29 < time.monotonic() - started < 5
    producer.close()
    consumer.close()


@pytest.mark.parametrize("timeout_s", [-1, -0.001, float("nan")])
def test_times_that_make_no_sense(ends: tuple[Producer, Consumer], timeout_s: float) -> None:
    producer, consumer = ends
    block = producer.reserve({"a": "f8"}, 1)
    for use in (
        lambda: producer.send(steps(), timeout_s=timeout_s),
        lambda: producer.reserve({"a": "f8"}, 1, timeout_s=timeout_s),
        lambda: block.commit(timeout_s=timeout_s),
        lambda: consumer.recv(timeout_s),
        lambda: consumer.poll(timeout_s),
        lambda: consumer.lease(timeout_s).__enter__(),
    ):
        with pytest.raises(ValueError, match="timeout_s must be None or a number of seconds from 0"):
            use()
    block.cancel()


class TestClosingFromAnotherThread:
    """A thread closes an end while another thread waits on it."""

    @pytest.mark.parametrize("use", [Consumer.recv, lambda consumer: consumer.poll(None)], ids=["recv", "poll"])
    def test_wakes_a_waiting_consumer(self, use: Callable[[Consumer], Any], ends: tuple[Producer, Consumer]) -> None:
        _, consumer = ends
        thread = threading.Timer(0.1, consumer.close)
        thread.start()
        with pytest.raises(ChannelClosedError, match="consumer must be open"):
            use(consumer)
        thread.join()

    def test_wakes_a_producer_that_waits_for_a_block(self) -> None:
        producer, consumer = channel(1 << 12)
        producer.send(SampleBatch(a=np.zeros(400)))
        thread = threading.Timer(0.1, producer.close)
        thread.start()
        with pytest.raises(ChannelClosedError, match="producer must be open"):
            producer.send(SampleBatch(a=np.zeros(400)))
        thread.join()
        consumer.close()


class TestGarbage:
    """Unreachable batches in reference cycles do not block their producer."""

    @pytest.fixture(autouse=True)
    def little_to_look_at(self) -> Iterator[None]:
        """Freeze existing objects to shorten garbage collections."""
        gc.collect()
        gc.freeze()
        gc.disable()
        yield
        gc.enable()
        gc.unfreeze()

    def test_of_the_consumer_is_collected_while_it_waits(self) -> None:
        producer, consumer = channel(1 << 14)
        child = multiprocessing.get_context("fork").Process(target=send_many, args=(producer, 6))
        child.start()
        producer.close()
        for i in range(6):
            batch = consumer.recv(timeout_s=20)
            assert batch["i"][0] == i
            cycle: list[Any] = [batch]
            cycle.append(cycle)
            del batch, cycle
        with pytest.raises(EndOfStreamError):
            consumer.recv(timeout_s=20)
        child.join()
        consumer.close()

    def test_of_the_producer_is_collected_while_it_waits(self) -> None:
        producer, consumer = channel(1 << 14)
        for _ in range(4):
            block = producer.reserve({"a": "f8"}, 1500, timeout_s=20)
            cycle: list[Any] = [block, block["a"]]
            cycle.append(cycle)
            del block, cycle
        producer.close()
        consumer.close()

    def test_is_not_collected_without_need(self, monkeypatch: pytest.MonkeyPatch) -> None:
        collections = []
        monkeypatch.setattr("samplebatch.transport.consumer.gc.collect", lambda: collections.append(1))
        producer, consumer = channel(1 << 14)
        producer.send(SampleBatch(a=np.zeros(10)))
        stored = consumer.recv(timeout_s=1)
        with pytest.raises(ChannelTimeoutError):
            consumer.recv(timeout_s=0.3)
        assert not collections
        del stored
        producer.close()
        consumer.close()


def test_a_closed_producer_needs_no_consumer() -> None:
    producer, consumer = channel(1 << 16)
    producer.send(steps())
    producer.close()
    consumer.close()


class TestWithoutEpollAndPidfd:
    """Systems without epoll and process file descriptors."""

    @pytest.fixture(autouse=True)
    def plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("samplebatch.transport.peers._HAS_EPOLL", False)
        monkeypatch.delattr(os, "pidfd_open", raising=False)

    def test_batches_are_received(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        assert wait([consumer], timeout=0) == []
        thread = threading.Timer(0.1, producer.send, [steps()])
        thread.start()
        assert wait([consumer], timeout=10) == [consumer]
        assert consumer.recv(timeout_s=1) == steps()
        thread.join()
        with pytest.raises(ChannelTimeoutError):
            consumer.recv(timeout_s=0.05)
        producer.close()
        assert not list(consumer)
        assert wait([consumer], timeout=0) == [consumer]

    def test_dead_peers_are_detected(self) -> None:
        producer, mine = channel(1 << 14)
        to_child, consumer = channel(1 << 14)
        context = multiprocessing.get_context("fork")
        children = [
            context.Process(target=leave, args=(producer, "kill")),
            context.Process(target=consume, args=(consumer, 1, "kill")),
        ]
        for child in children:
            child.start()
        assert list(gather([mine], raise_lost=False)) == [steps(3)]
        with pytest.raises(PeerDiedError):
            mine.recv(timeout_s=10)
        with pytest.raises(PeerDiedError):  # noqa: PT012
            while True:
                to_child.send(steps(50), timeout_s=10)
        for child in children:
            child.join()
        for end in (producer, mine, to_child, consumer):
            end.close()

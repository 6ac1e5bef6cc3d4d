"""Gathering: batches of all ready producers in fair order, and reports of dead producers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest

from samplebatch import SampleBatch, channel, gather
from samplebatch.errors import (
    ChannelClosedError,
    ChannelTimeoutError,
    EndOfStreamError,
    FormatError,
    OwnershipError,
    PeerDiedError,
    UntrustedPickleError,
    WorkerError,
)
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.producer import Producer


def ends(count: int, capacity_nbytes: int = 1 << 16) -> tuple[list[Producer], list[Consumer]]:
    result = [channel(capacity_nbytes) for _ in range(count)]
    return [producer for producer, _ in result], [consumer for _, consumer in result]


def close(*ends: Producer | Consumer) -> None:
    for end in ends:
        end.close()


def test_each_is_served_once_before_one_is_again() -> None:
    producers, consumers = ends(4)
    for producer, count in zip(producers, (5, 2, 0, 3), strict=True):
        for i in range(count):
            producer.send(SampleBatch(i=[i]))
        producer.close()
    gathering = gather(consumers)
    served = []
    for batch in gathering:
        assert gathering.source is not None
        served.append((consumers.index(gathering.source), batch["i"].item()))
    assert [turn for _, turn in served] == sorted(turn for _, turn in served)
    assert Counter(source for source, _ in served) == {0: 5, 1: 2, 3: 3}
    assert len(gathering) == 0
    assert gathering.lost == {}
    for _ in range(2):
        with pytest.raises(EndOfStreamError):
            gathering.recv(timeout_s=0)
    close(*consumers)


def test_a_fast_producer_does_not_starve_others() -> None:
    producers, consumers = ends(3)
    gathering = gather(consumers)
    for i in range(50):
        producers[0].send(SampleBatch(i=[i]))
    producers[2].send(SampleBatch(i=[0]))
    first = []
    for _ in range(20):
        gathering.recv(timeout_s=1)
        first.append(gathering.source)
        producers[0].send(SampleBatch(i=[0]))
    assert consumers[2] in first[:2]
    gathering.close()
    close(*producers, *consumers)


def test_waiting_without_batches_times_out() -> None:
    producers, consumers = ends(2)
    gathering = gather(consumers)
    began = time.monotonic()
    with pytest.raises(ChannelTimeoutError):
        gathering.recv(timeout_s=0.15)
    assert 0.14 < time.monotonic() - began < 5
    with pytest.raises(ChannelTimeoutError):
        gathering.recv(timeout_s=0)
    thread = threading.Timer(0.1, producers[1].send, [SampleBatch(a=[1])])
    thread.start()
    assert gathering.recv(timeout_s=10) == SampleBatch(a=[1])
    thread.join()
    close(*producers)
    assert list(gathering) == []
    close(*consumers)
    assert list(gather([])) == []


def work(producer: Producer, index: int, count: int) -> None:
    with producer:
        for i in range(count):
            producer.send(SampleBatch(worker=np.full(10, index), i=np.full(10, i)), timeout_s=60)


@pytest.mark.long
def test_a_hundred_producers() -> None:
    """Each forked process inherits the descriptors of the processes before it."""
    count = 100
    producers, consumers = ends(count)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=work, args=(producer, i, 20)) for i, producer in enumerate(producers)]
    for child in children:
        child.start()
    close(*producers)
    expected = [0] * count
    for batch in gather(consumers):
        worker = int(batch["worker"][0])
        assert (batch["i"] == expected[worker]).all()
        expected[worker] += 1
    assert expected == [20] * count
    for child in children:
        child.join()
    close(*consumers)


def die(producer: Producer, index: int) -> None:
    if index == 0:
        with producer:
            return
    for _ in range(index):
        producer.send(SampleBatch(worker=[index]))
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 2:
        raise ValueError("lost my way")
    producer.close()


@pytest.mark.parametrize("raise_lost", [True, False])
def test_dead_producers_are_reported(raise_lost: bool, capfd: pytest.CaptureFixture[str]) -> None:
    producers, consumers = ends(4)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=die, args=(producer, i)) for i, producer in enumerate(producers)]
    for child in children:
        child.start()
    gathering = gather(consumers, raise_lost=raise_lost)
    arrived = []
    if raise_lost:
        with pytest.raises(WorkerError, match=r"all 4 producers .* these did not: 1, 2"):
            arrived.extend(int(batch["worker"][0]) for batch in gathering)
        arrived = [1, 2, 2, 3, 3, 3]
    else:
        arrived = [int(batch["worker"][0]) for batch in gathering]
    assert sorted(arrived) == [1, 2, 2, 3, 3, 3]
    assert {consumers.index(consumer) for consumer in gathering.lost} == {1, 2}
    assert isinstance(gathering.lost[consumers[1]], PeerDiedError)
    assert isinstance(gathering.lost[consumers[2]], WorkerError)
    for child in children:
        child.join()
    close(*producers, *consumers)


def test_the_others_continue() -> None:
    producers, consumers = ends(2)
    gathering = gather(consumers, raise_lost=False)
    os.write(producers[0]._pipe, b"x" * 64)
    producers[1].send(SampleBatch(a=[1]))
    assert gathering.recv(timeout_s=1) == SampleBatch(a=[1])
    producers[1].send(SampleBatch(a=[2]))
    assert gathering.recv(timeout_s=1) == SampleBatch(a=[2])
    assert isinstance(gathering.lost[consumers[0]], FormatError)
    assert len(gathering) == 1
    # One that takes the place of the one that is lost.
    producer, consumer = channel(1 << 16)
    gathering.add(consumer)
    producer.send(SampleBatch(a=[3]))
    assert gathering.recv(timeout_s=1) == SampleBatch(a=[3])
    assert gathering.source is consumer
    close(*producers, producer)
    assert list(gathering) == []
    close(*consumers, consumer)


def test_pickles_without_permission_raise_an_error() -> None:
    producers, consumers = ends(1)
    producers[0]._allow_pickle = True
    producers[0].send(SampleBatch(a=np.array([{1}])))
    producers[0].send(SampleBatch(a=[1]))
    gathering = gather(consumers)
    with pytest.raises(UntrustedPickleError):
        gathering.recv(timeout_s=1)
    assert gathering.recv(timeout_s=1) == SampleBatch(a=[1])
    close(*producers, *consumers)


def test_a_closed_consumer_is_omitted() -> None:
    producers, consumers = ends(2)
    gathering = gather(consumers)
    consumers[0].close()
    producers[1].send(SampleBatch(a=[1]))
    assert gathering.recv(timeout_s=1) == SampleBatch(a=[1])
    producers[1].close()
    assert list(gathering) == []
    with pytest.raises(ChannelClosedError):
        gather(consumers)
    close(*producers, *consumers)


def test_a_consumer_is_gathered_from_once() -> None:
    (producer,), (consumer,) = ends(1)
    with pytest.raises(OwnershipError, match="once"):
        gather([consumer, consumer])
    gathering = gather([consumer])
    with pytest.raises(OwnershipError, match="once"):
        gathering.add(consumer)
    producer.send(SampleBatch(a=[1]))
    assert gathering.recv(timeout_s=1) == SampleBatch(a=[1])
    gathering.close()
    for use in (gathering.recv, lambda: gathering.add(consumer)):
        with pytest.raises(ChannelClosedError, match="a gathering must be open"):
            use()
    close(producer, consumer)


def test_a_consumer_closed_during_the_wait_is_omitted() -> None:
    producers, consumers = ends(2)
    gathering = gather(consumers)
    thread = threading.Timer(0.1, close, consumers)
    thread.start()
    assert list(gathering) == []
    assert gathering.lost == {}
    thread.join()
    close(*producers)


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
def test_times_that_make_no_sense(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s must be None or a number of seconds from 0"):
        gather([]).recv(timeout_s)

"""Child processes of the tests of broadcasts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import zlib
from typing import Any

import numpy as np

from samplebatch import SampleBatch, broadcast
from samplebatch.errors import EndOfStreamError, PeerDiedError, SampleBatchError
from samplebatch.transport.broadcast import Publisher, Subscription
from samplebatch.transport.region import Region, SharedCounters

TORN = 3


def checked(seed: int, rows: int = 20_000) -> SampleBatch:
    """Create a batch that contains its own checksum."""
    values = np.arange(rows, dtype=np.int64) * (seed + 1)
    return SampleBatch(values=values, checksum=np.full(rows // 100, zlib.crc32(values)).repeat(100))


def is_whole(batch: SampleBatch) -> bool:
    return zlib.crc32(batch["values"]) == batch["checksum"][0] == batch["checksum"][-1]


def tell_latest(subscription: Subscription, answers: Any) -> None:
    with subscription:
        actual = subscription.latest(timeout_s=60)
        answers.put((actual.version, actual.value))


def publish_and_end(publisher: Publisher, count: int) -> None:
    for i in range(count):
        publisher.publish({"i": np.array([i])})


def publish_and_stay(publisher: Publisher, stop: Any) -> None:
    publisher.publish({"i": np.array([0])})
    stop.recv()


def do_nothing(publisher: Publisher, how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "close":
        publisher.close()


def wait_for_first(subscription: Subscription, answers: Any) -> None:
    try:
        subscription.wait_for(1, timeout_s=60)
    except SampleBatchError as error:
        answers.send(type(error).__name__)


def make_and_die(answers: Any) -> None:
    """Create a broadcast, send it to another process, and exit before the first publication."""
    publisher, subscription = broadcast(1 << 12)
    multiprocessing.get_context("fork").Process(target=wait_for_first, args=(subscription, answers)).start()
    os.kill(os.getpid(), signal.SIGKILL)
    publisher.close()


def publish_for_ever(publisher: Publisher) -> None:
    for i in range(1 << 40):
        publisher.publish(checked(i, rows=10_000 + 1000 * (i % 10)))


def read_for_ever(subscription: Subscription, counter: Region) -> None:
    """Read and count new publications; exit with a status that reports torn publications."""
    count = SharedCounters(counter.array, 1)
    version = 0
    while True:
        try:
            actual = subscription.wait_for(version + 1, timeout_s=30)
        except (EndOfStreamError, PeerDiedError):
            os._exit(0)
        if actual.version <= version or not is_whole(actual.value):
            os._exit(TORN)
        version = actual.version
        count[0] += 1


def try_to_publish(publisher: Publisher, answers: Any) -> None:
    try:
        publisher.publish({})
    except SampleBatchError as error:
        answers.put(f"{type(error).__name__}: {error}")

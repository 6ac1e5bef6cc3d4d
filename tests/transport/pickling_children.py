"""Child processes of the tests of shared pickling."""

from __future__ import annotations

import os
import time
import zlib
from typing import Any

import numpy as np

from samplebatch import SampleBatch, enable_shared_pickling
from samplebatch.transport.region import Region, SharedCounters


def echo(inbox: Any, outbox: Any) -> None:
    """Return every received value through shared memory until None is received."""
    enable_shared_pickling()
    for value in iter(inbox.get, None):
        outbox.put(value)


def put_and_end(outbox: Any, count: int, linger_s: float) -> None:
    enable_shared_pickling(linger_s=linger_s)
    for i in range(count):
        outbox.put(checked(i))


def checked(seed: int, rows: int = 30_000) -> SampleBatch:
    """Create a batch that contains its own checksum."""
    values = np.random.default_rng(seed).standard_normal(rows)
    return SampleBatch(values=values, checksum=np.full(rows, zlib.crc32(values)))


def is_whole(batch: SampleBatch) -> bool:
    return zlib.crc32(batch["values"]) == batch["checksum"][0] == batch["checksum"][-1]


def send_for_ever(outbox: Any) -> None:
    enable_shared_pickling()
    for i in range(1 << 30):
        outbox.put(checked(i % 20, rows=9_000 + 1000 * (i % 8)))


def receive_for_ever(inbox: Any, counter: Region) -> None:
    received = SharedCounters(counter.array, 1)
    stored: list[SampleBatch] = []
    while True:
        stored = [*stored[-3:], inbox.get()]
        if not all(map(is_whole, stored)):
            os._exit(3)
        received[0] += 1


def made(seed: int) -> SampleBatch:
    """Create a batch in a worker of a pool."""
    enable_shared_pickling()
    batch = checked(seed)
    batch["pid"] = np.full(len(batch), os.getpid())
    return batch


def receive_later(inbox: Any, completed: Any) -> None:
    completed.wait(30)
    time.sleep(0.1)
    batch = inbox.recv()
    os._exit(0 if is_whole(batch) else 3)

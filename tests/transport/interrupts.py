"""Channels, gatherings, broadcasts and queues under signals whose handler raises, at random moments of each operation.

    python tests/transport/interrupts.py channel --interrupts 20000

One process sends numbered batches with checksums and receives them, under a timer that is set again for each operation.
An operation that is interrupted is done again: `Producer.sent` and `Publisher.version` say whether a batch has gone;
`recv` hands out each batch until it was taken. Raises on the first batch that is lost, doubled, torn or out of order,
and if memory is missing at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import random
import signal
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any
from zlib import crc32

import numpy as np

from samplebatch import (
    SampleBatch,
    broadcast,
    channel,
    concat_samples,
    disable_shared_pickling,
    enable_shared_pickling,
    gather,
)
from samplebatch.errors import ChannelTimeoutError
from samplebatch.transport import shared_pickling
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.producer import Producer

CAPACITY = 1 << 16
AGAIN_S = 3e-6
"""Delay of a second signal."""

COLUMNS = {"payload": ("f8", (16,)), "number": "i8", "checksum": "i8"}
DELAYS_S = (20e-6, 60e-6, 200e-6, 2e-3)
"""Longest delays of a signal: an operation takes about the second, and the last is longer than any."""


class Interruption(Exception):
    """Exception that the signal handler raises."""


armed = [0]
"""Signals that may still raise. One that another thread has caught may be seen to after the timer was stopped."""


def _raise(*_: Any) -> None:
    if armed[0]:
        armed[0] -= 1
        if armed[0]:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        raise Interruption


@contextlib.contextmanager
def timer() -> Iterator[None]:
    """Install a handler of the timer's signal that raises an exception."""
    before = signal.signal(signal.SIGALRM, _raise)
    # What is raised while something is garbage collected can be told nobody; to pass over it must not be interrupted.
    hook, sys.unraisablehook = sys.unraisablehook, deque[Any](maxlen=0).append
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def made(number: int) -> SampleBatch:
    rows = 1 + number * 7919 % 40
    payload = np.random.default_rng(number).random((rows, 16))
    batch = SampleBatch(payload=payload, number=np.full(rows, number), checksum=np.full(rows, crc32(payload)))
    # Others have metadata, and some a schema that is new.
    if number % 3 == 0:
        batch["infos"] = np.array([{"step": i} for i in range(rows)])
    if number % 5 == 0:
        batch[f"extra {number % 35}"] = np.zeros(rows)
    return batch


class Struck(ABC):
    """Operations of one kind of transport that signals interrupt."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.interrupts = 0
        self.received = 0

    def strike(self, act: Callable[[], None]) -> bool:
        """Run an operation that a signal may interrupt; occasionally, a second signal follows immediately.

        Returns
        -------
        Whether there was nothing to receive, or no memory to send.
        """
        delay_s = 1e-6 + self.chance.random() * self.chance.choice(DELAYS_S)
        timed_out = False
        try:
            armed[0] = 1 + (self.chance.random() < 0.2)
            try:
                signal.setitimer(signal.ITIMER_REAL, delay_s)
                act()
            except ChannelTimeoutError:
                timed_out = True
            finally:
                armed[0] = 0
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interruption:
            self.interrupts += 1
        return timed_out

    def run(self, interrupts: int) -> None:
        """Run random operations until `interrupts` of them were interrupted, then check that nothing is missing."""
        steps = self.steps()
        while self.interrupts < interrupts:
            self.chance.choice(steps)()
        self.finish()

    @abstractmethod
    def steps(self) -> tuple[Callable[[], None], ...]:
        """Return the operations, which are selected uniformly."""

    @abstractmethod
    def finish(self) -> None:
        """Receive the remaining batches; raise an error if one is missing."""


def check(batch: Any, number: int) -> None:
    """Raise an error unless a batch is intact and has this number."""
    assert set(batch["number"].tolist()) == {number}, "a batch is lost, doubled or out of order"
    assert set(batch["checksum"].tolist()) == {crc32(batch["payload"])}, "a batch is torn"


class Stream(Struck):
    """Both ends of a channel, and the batches that it has transferred."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.producer, self.consumer = channel(CAPACITY)
        self.held: deque[Any] = deque()
        self.arrived: SampleBatch | None = None

    def attempt(self, act: Callable[[], None]) -> None:
        """Run an operation under signals; free space if there was none."""
        if self.strike(act):
            self.take_in()
            self.held.clear()

    def send(self) -> None:
        number = self.producer.sent
        batch = made(number)
        self.attempt(lambda: self.producer.send(batch, timeout_s=0))
        assert self.producer.sent in (number, number + 1)

    def fill(self) -> None:
        number = self.producer.sent
        batch = made(number)
        cancels = self.chance.random() < 0.2

        def act() -> None:
            block = self.producer.reserve(COLUMNS, len(batch) + 3, timeout_s=0)
            for name in COLUMNS:
                block[name][: len(batch)] = batch[name]
            if cancels:
                block.cancel()
            else:
                block.commit(len(batch), timeout_s=0)

        self.attempt(act)
        assert self.producer.sent in (number, number + 1)

    def receive(self) -> None:
        self.arrived = None

        def act() -> None:
            self.arrived = self.consumer.recv(timeout_s=0)

        self.attempt(act)
        self.check(self.arrived)
        self.arrived = None

    def take_in(self) -> None:
        with contextlib.suppress(ChannelTimeoutError):
            while True:
                self.check(self.consumer.recv(timeout_s=0))

    def check(self, batch: Any) -> None:
        if batch is not None:
            check(batch, self.received)
            self.received += 1
            self.held.append(batch["payload"][1:])

    def let_go(self) -> None:
        def act() -> None:
            while len(self.held) > 3:
                self.held.popleft()

        self.attempt(act)

    def steps(self) -> tuple[Callable[[], None], ...]:
        return self.send, self.fill, self.receive, self.receive, self.let_go

    def finish(self) -> None:
        self.take_in()
        assert self.received == self.producer.sent
        self.held.clear()
        self.whole(self.producer, self.consumer)

    def whole(self, producer: Producer, consumer: Consumer) -> None:
        consumer._return_pipe.recover()
        assert not consumer._lent
        producer._blocks.collect()
        blocks = producer._blocks
        assert not blocks.lent
        assert not blocks.reserved
        assert blocks.arena.free_nbytes == blocks.arena.nbytes, "blocks are lost"
        assert producer.reserve({"a": "u1"}, CAPACITY, timeout_s=0) is not None


class GatheredStreams(Struck):
    """Three channels that one gathering receives from."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.streams = [Stream(seed + i) for i in range(3)]
        self.batches = gather([stream.consumer for stream in self.streams])
        self.arrived: Any = None

    def send(self) -> None:
        """Send a batch on one channel, marked with the channel's index."""
        position = self.chance.randrange(len(self.streams))
        producer = self.streams[position].producer
        number = producer.sent
        batch = made(number)
        batch["place"] = np.full(len(batch), position)
        if self.strike(lambda: producer.send(batch, timeout_s=0)):
            self.receive()
        assert producer.sent in (number, number + 1)

    def receive(self) -> None:
        self.arrived = None

        def act() -> None:
            self.arrived = self.batches.recv(timeout_s=0)

        self.strike(act)
        self.take(self.arrived)

    def take(self, batch: Any) -> None:
        if batch is not None:
            stream = self.streams[int(batch["place"][0])]
            assert self.batches.source is stream.consumer
            check(batch, stream.received)
            stream.received += 1
            self.received += 1

    def steps(self) -> tuple[Callable[[], None], ...]:
        return self.send, self.send, self.receive, self.receive

    def finish(self) -> None:
        self.arrived = None
        with contextlib.suppress(ChannelTimeoutError):
            while True:
                self.take(self.batches.recv(timeout_s=0))
        for stream in self.streams:
            assert stream.received == stream.producer.sent
            stream.whole(stream.producer, stream.consumer)


class Broadcast(Struck):
    """Both ends of a broadcast, in which a publication is atomic."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.publisher, self.subscription = broadcast(CAPACITY)
        self.published: int | None = None

    def publish(self) -> None:
        """Publish the next number; an interrupted publication has either happened or is repeated."""
        number = self.publisher.version + 1
        batch = made(number)
        self.strike(lambda: self.expect(self.publisher.publish(batch), number))
        assert self.publisher.version in (number - 1, number)

    @staticmethod
    def expect(version: int, number: int) -> None:
        assert version == number

    def read(self) -> None:
        if not self.publisher.version:
            return
        read: list[Any] = []
        self.strike(lambda: read.append(self.subscription.latest(timeout_s=0)))
        if read:
            self.take(read[0])

    def take(self, publication: Any) -> None:
        assert publication.version == self.publisher.version
        check(publication.value, publication.version)
        self.received += 1

    def steps(self) -> tuple[Callable[[], None], ...]:
        return self.publish, self.read

    def finish(self) -> None:
        self.publish()
        self.take(self.subscription.latest(timeout_s=1))
        self.publisher.close()
        self.subscription.close()


class Queue(Struck):
    """Pickled batches in shared memory; an interrupted batch does not affect the others."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        enable_shared_pickling(keep_nbytes=4 << 20)
        self.under_way: deque[tuple[int, bytes]] = deque()
        self.number = 0

    def put(self) -> None:
        self.number += 1
        batch = concat_samples([made(self.number)] * 40)
        batch["checksum"] = np.full(len(batch), crc32(batch["payload"]))
        pickled: list[bytes] = []
        self.strike(lambda: pickled.append(bytes(ForkingPickler.dumps(batch))))
        self.under_way.extend((self.number, item) for item in pickled)
        if len(self.under_way) > 8:
            self.get()

    def get(self) -> None:
        """Receive the oldest batch; it may be lost if its receipt is interrupted, as it can be received only once."""
        if self.under_way:
            number, pickled = self.under_way.popleft()
            actual: list[Any] = []
            self.strike(lambda: actual.append(pickle.loads(pickled)))
            for batch in actual:
                check(batch, number)
                self.received += 1

    def steps(self) -> tuple[Callable[[], None], ...]:
        return self.put, self.get

    def finish(self) -> None:
        while self.under_way:
            number, pickled = self.under_way.popleft()
            check(pickle.loads(pickled), number)
        memory = shared_pickling._queue_memory
        assert not memory._lock.locked()
        assert memory.unreceived <= self.interrupts
        memory.close()
        disable_shared_pickling()


KINDS: dict[str, type[Struck]] = {"channel": Stream, "gather": GatheredStreams, "broadcast": Broadcast, "queue": Queue}


def main(kind: str, interrupts: int, seed: int) -> None:
    """Run until `interrupts` operations were interrupted."""
    with timer():
        struck = KINDS[kind](seed)
        struck.run(interrupts)
    print(f"{struck.interrupts} interrupts, {struck.received} batches")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS, nargs="?", default="channel")
    parser.add_argument("--interrupts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.kind, options.interrupts, options.seed)

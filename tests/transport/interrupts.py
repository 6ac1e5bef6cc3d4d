"""A channel under signals whose handler raises, at random moments of everything that its ends do.

    python tests/transport/interrupts.py --interrupts 20000

One process sends numbered batches with checksums and receives them, under a timer that is set anew for each operation.
An operation that is interrupted is done again: `Producer.sent` says whether a batch has gone, and `recv` hands out each
batch until it was taken. Raises on the first that is lost, doubled, torn or out of order, and if a block is missing at
the end.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import numpy as np

from samplebatch import SampleBatch, channel
from samplebatch.errors import ChannelTimeoutError
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.producer import Producer

CAPACITY = 1 << 16
AGAIN_S = 3e-6
"""Delay of a second signal."""

LIKE = {"payload": ("f8", (16,)), "number": "i8", "checksum": "i8"}
DELAYS_S = (20e-6, 60e-6, 200e-6, 2e-3)
"""Longest delays of a signal: an operation takes about the second, and the last is longer than any."""


class Interruption(Exception):
    """What the handler raises."""


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
    """Have the timer's signal raise."""
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


class Stream:
    """Both ends of a channel, and what has gone through it."""

    def __init__(self, seed: int) -> None:
        self.producer, self.consumer = channel(CAPACITY)
        self.chance = random.Random(seed)
        self.interrupts = 0
        self.received = 0
        self.held: deque[Any] = deque()
        self.arrived: SampleBatch | None = None

    def strike(self, act: Callable[[], None]) -> None:
        """Do something, which a signal may end at some moment; now and then one more comes right after it."""
        delay_s = 1e-6 + self.chance.random() * self.chance.choice(DELAYS_S)
        was_full = False
        try:
            armed[0] = 1 + (self.chance.random() < 0.2)
            try:
                signal.setitimer(signal.ITIMER_REAL, delay_s)
                act()
            except ChannelTimeoutError:
                was_full = True
            finally:
                armed[0] = 0
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interruption:
            self.interrupts += 1
        if was_full:
            self.take_in()
            self.held.clear()

    def send(self) -> None:
        number = self.producer.sent
        batch = made(number)
        self.strike(lambda: self.producer.send(batch, timeout_s=0))
        assert self.producer.sent in (number, number + 1)

    def fill(self) -> None:
        number = self.producer.sent
        batch = made(number)
        cancels = self.chance.random() < 0.2

        def act() -> None:
            block = self.producer.reserve(LIKE, len(batch) + 3, timeout_s=0)
            for name in LIKE:
                block[name][: len(batch)] = batch[name]
            if cancels:
                block.cancel()
            else:
                block.commit(len(batch), timeout_s=0)

        self.strike(act)
        assert self.producer.sent in (number, number + 1)

    def receive(self) -> None:
        self.arrived = None

        def act() -> None:
            self.arrived = self.consumer.recv(timeout_s=0)

        self.strike(act)
        self.check(self.arrived)
        self.arrived = None

    def take_in(self) -> None:
        with contextlib.suppress(ChannelTimeoutError):
            while True:
                self.check(self.consumer.recv(timeout_s=0))

    def check(self, batch: Any) -> None:
        if batch is not None:
            assert set(batch["number"].tolist()) == {self.received}, "a batch is lost, doubled or out of order"
            assert set(batch["checksum"].tolist()) == {crc32(batch["payload"])}, "a batch is torn"
            self.received += 1
            self.held.append(batch["payload"][1:])

    def let_go(self) -> None:
        def act() -> None:
            while len(self.held) > 3:
                self.held.popleft()

        self.strike(act)

    def run(self, interrupts: int) -> None:
        steps = (self.send, self.fill, self.receive, self.receive, self.let_go)
        while self.interrupts < interrupts:
            self.chance.choice(steps)()
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


def main(interrupts: int, seed: int) -> None:
    """Run until there were so many."""
    with timer():
        stream = Stream(seed)
        stream.run(interrupts)
    print(f"{stream.interrupts} interrupts, {stream.received} batches")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interrupts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.interrupts, options.seed)

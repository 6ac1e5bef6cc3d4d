"""Rounds of two processes, one of which is killed at a random moment; the other must be told so, in time.

    python tests/transport/kill_rounds.py --method fork --rounds 100

Every batch carries its number and a checksum. Prints how the survivors ended; raises on the first that saw half a
batch, missed one, hung, or left a descriptor or a name in /dev/shm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import time
from collections import Counter, deque
from itertools import count
from typing import Any
from zlib import crc32

import leaks
import numpy as np

import samplebatch
from samplebatch import SampleBatch
from samplebatch.errors import PeerDiedError

CAPACITY = 1 << 18
COLUMNS = {"payload": ("f8", (16,)), "number": "i8", "checksum": "i8"}
START_S = {"fork": 0.05, "forkserver": 0.7, "spawn": 0.7}
"""Seconds that a process takes to start, about."""

GRACE_S = 20.0
"""Seconds after which a survivor that has not ended is taken to hang."""


def rows_of(number: int) -> int:
    """Return the number of rows of a batch: from one to a third of the arena."""
    return 1 + number * 7919 % 600


def fill(columns: Any, number: int, rows: int) -> None:
    """Write a batch in place."""
    columns["payload"][:rows] = np.random.default_rng(number).random((rows, 16))
    columns["number"][:rows] = number
    columns["checksum"][:rows] = crc32(columns["payload"][:rows])


def check(batch: SampleBatch, number: int) -> None:
    """Compare a batch with the sent batch."""
    assert len(batch) == rows_of(number), (len(batch), number)
    assert set(batch["number"].tolist()) == {number}
    assert set(batch["checksum"].tolist()) == {crc32(batch["payload"])}, number


def sends(producer: Any) -> None:
    """Send batches indefinitely: every second batch is copied, the others are written into larger reservations."""
    number = 0
    with producer:
        while True:
            rows = rows_of(number)
            if number % 2:
                with producer.reserve(COLUMNS, rows + number % 5) as block:
                    fill(block, number, rows)
                    block.commit(rows)
            else:
                columns = {"payload": np.empty((rows, 16)), "number": np.empty(rows, np.int64)}
                columns["checksum"] = np.empty(rows, np.int64)
                fill(columns, number, rows)
                producer.send(SampleBatch(columns))
            number += 1


def receives(consumer: Any, keeps: int) -> None:
    """Receive and verify batches indefinitely; retain the newest few batches, or all."""
    retained: deque[Any] = deque(maxlen=keeps or None)
    for number, batch in enumerate(consumer):
        check(batch, number)
        retained.append(batch["payload"][1:])


def kill_later(pid: int, delay_s: float) -> int:
    """Kill a process after a delay from a separate process; return the id of that process."""
    killer = os.fork()
    if not killer:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)
    return killer


def producer_dies(context: Any, chance: random.Random) -> str:
    """Kill the producer while it starts, or while its batches are received."""
    producer, consumer = samplebatch.channel(CAPACITY)
    process = context.Process(target=sends, args=(producer,))
    process.start()
    producer.close()
    early = chance.random() < 0.3
    killer = kill_later(process.pid, chance.random() ** 2 * START_S[context.get_start_method()]) if early else None
    number, ended = 0, None
    with consumer:
        while ended is None:
            try:
                check(consumer.recv(timeout_s=GRACE_S), number)
            except PeerDiedError:
                when = "" if number else " before its first batch"
                ended = f"the consumer was told that the producer died{when}"
            number += 1
            killer = killer or kill_later(process.pid, chance.random() * 0.06)
    os.waitpid(killer, 0)
    process.join()
    assert process.exitcode == -signal.SIGKILL, process.exitcode
    return ended


def consumer_dies(context: Any, chance: random.Random) -> str:
    """Kill the consumer while it receives, or while the producer waits for a block that the consumer retains."""
    producer, consumer = samplebatch.channel(CAPACITY)
    keeps = chance.choice([1, 2, 0])
    process = context.Process(target=receives, args=(consumer, keeps))
    process.start()
    consumer.close()
    max_s = START_S[context.get_start_method()] * (2 if chance.random() < 0.7 else 0.3)
    killer = kill_later(process.pid, chance.random() * max_s)
    number, ended = 0, None
    with producer:
        while ended is None:
            try:
                with producer.reserve(COLUMNS, rows_of(number), timeout_s=GRACE_S) as block:
                    fill(block, number, rows_of(number))
                    block.commit(timeout_s=GRACE_S)
                number += 1
            except PeerDiedError:
                ended = "the producer was told that the consumer died"
    os.waitpid(killer, 0)
    process.join()
    assert process.exitcode == -signal.SIGKILL, process.exitcode
    return ended


def publisher_dies(context: Any, chance: random.Random) -> str:
    """Kill the publisher of a broadcast while it starts, or while it publishes."""
    publisher, subscription = samplebatch.broadcast(CAPACITY)
    process = context.Process(target=publishes, args=(publisher,))
    process.start()
    publisher.close()
    killer = kill_later(process.pid, chance.random() * 1.5 * START_S[context.get_start_method()])
    version = 0
    with subscription:
        while True:
            try:
                actual = subscription.wait_for(version + 1, timeout_s=GRACE_S)
            except PeerDiedError:
                break
            assert actual.version > version
            version = actual.version
            check(actual.value, version)
    os.waitpid(killer, 0)
    process.join()
    assert process.exitcode == -signal.SIGKILL, process.exitcode
    return f"the subscriber was told that the publisher died{'' if version else ' before its first publication'}"


def publishes(publisher: Any) -> None:
    """Publish indefinitely."""
    for number in count(1):
        rows = rows_of(number)
        columns = {"payload": np.empty((rows, 16)), "number": np.empty(rows, np.int64)}
        columns["checksum"] = np.empty(rows, np.int64)
        fill(columns, number, rows)
        publisher.publish(SampleBatch(columns))


def main(method: str, rounds: int, seed: int) -> None:
    context = multiprocessing.get_context(method)
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    with leaks.nothing_left():
        for number in range(rounds):
            ends[(producer_dies, consumer_dies, publisher_dies)[number % 3](context, chance)] += 1
    for how, times in sorted(ends.items()):
        print(f"{times:4d} times {how}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=["fork", "forkserver", "spawn"], default="fork")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.method, options.rounds, options.seed)

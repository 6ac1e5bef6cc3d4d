"""A soak of a queue: each fragment is read once, is still there, or was lost with a process that was killed.

By hand: ``python -m tests.service.queue_soak --seconds 600``. Writers number their fragments, and note when they send
each and how many were acknowledged; readers note each fragment that they get. They ask for one fragment at a time, so
that a killed service or reader takes one fragment a reader with it at the most, beside those acknowledged since the
checkpoint that the service came back with. A fragment that it had handed out since then is handed out again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from samplebatch import SampleBatch
from samplebatch.errors import LimitTimeoutError
from samplebatch.service import ReplayClient, ReplayTable
from samplebatch.service.checkpoint import Checkpoints
from tests.service.soak import end_process, serve_tables, start_process
from tests.service.soak_accounts import note, noted_at, notes

MODULE = "tests.service.queue_soak"
ROWS = 50
Spans = Sequence[tuple[float, float]]


def queue(capacity: int) -> ReplayTable:
    """Create the queue of all writers and readers."""
    return ReplayTable("queue", kind="queue", capacity=capacity)


def fragment(writer: int, number: int) -> SampleBatch[Any]:
    """Create a fragment whose rows all identify it."""
    return SampleBatch(obs=np.tile([writer, number], (ROWS, 1)), rewards=np.arange(ROWS) + number / 8)


# The processes


def write_fragments(uri: str, folder: Path, writer: int) -> None:
    """Write numbered fragments until SIGTERM is received."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    path, number, stream, streams = folder / f"writer.{writer}", 0, None, 0
    with ReplayClient(uri, "queue", writer=f"writer {writer}", reconnect_s=600.0) as client:
        while not ended.is_set():
            if client._only._writer._stream is not stream:
                stream, streams = client._only._writer._stream, streams + 1
            note(path, number + 1, client.written.fragments, streams)
            client.extend(fragment(writer, number))
            number += 1
            ended.wait(0.01)
        client.flush()
        note(path, number, client.written.fragments, streams + 1)


def read_fragments(uri: str, folder: Path, reader: int) -> None:
    """Read fragments, verify all rows and log the fragment numbers until SIGTERM is received."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with ReplayClient(uri, "queue", timeout_s=0.3, reconnect_s=600.0) as client:
        while not ended.is_set():
            try:
                actual, _ = client.sample(1)
            except LimitTimeoutError:
                continue
            writer, number = map(int, actual["obs"][0])
            assert actual == fragment(writer, number)
            note(folder / f"reader.{reader}", writer, number)


# The account


def account_queue(
    lines: list[list[float]], readings: Mapping[int, list[float]], left: Mapping[int, int], losses: Spans
) -> tuple[list[str], Counter[str]]:
    """Compare the fragments of one writer with its log.

    Parameters
    ----------
    lines
        Time at which a fragment was sent, its number from 1, the number of acknowledged fragments, and the number of
        opened streams.
    readings
        Times at which each fragment was read.
    left
        Number of occurrences of each fragment in the queue at the end.
    losses
        Time spans whose writes a service lost when it was killed.

    Returns
    -------
    faults
        Faults: fragments that were never sent, or occur too often.
    sums
        Counts, including `"on their way"`: lost fragments that were acknowledged outside `losses`.
    """
    sent, acknowledged = int(max(line[1] for line in lines)), 0
    received = np.full(sent, np.inf)
    for moment, _, known, _ in lines:
        received[acknowledged : int(known)] = moment
        acknowledged = max(acknowledged, int(known))
    faults = [f"fragment {number} was never sent" for number in {*readings, *left} if number >= sent]
    sums = Counter({"sent": sent, "acknowledged": acknowledged})
    for number in range(sent):
        actual = [*sorted(readings.get(number, [])), *[np.inf] * left.get(number, 0)]
        if not actual and np.isfinite(received[number]):
            forgotten = any(since <= received[number] <= noted_at(lines, kill) for since, kill in losses)
            sums["lost by a restart" if forgotten else "on their way"] += 1
        if len(actual) > 1:
            sums["handed out again"] += 1
            again = all(
                any(since <= first and kill <= then for since, kill in losses) for first, then in pairwise(actual)
            )
            if not again:
                faults.append(f"fragment {number} was read at {actual}")
    return faults, sums


# The parent


class QueueSoak:
    """Service with a queue, and writer and reader processes, some of which are killed while they run."""

    def __init__(self, folder: Path, writers: int, readers: int, capacity: int, seed: int = 0) -> None:
        self._folder, self._capacity, self._rng, self._port = folder, capacity, random.Random(seed), 0
        self._kills: list[tuple[float, int]] = []
        self._killed_readers = 0
        self._server = self._start_server()
        self._writers = [self._start("write", number) for number in range(writers)]
        self._readers = [self._start("read", number) for number in range(readers)]
        self._number = readers
        while len([*folder.glob("writer.*"), *folder.glob("reader.*")]) < writers + 1:
            time.sleep(0.05)

    def _start(self, role: str, number: int) -> subprocess.Popen[str]:
        return start_process(MODULE, role, f"grpc://127.0.0.1:{self._port}", self._folder, number)

    def _start_server(self) -> subprocess.Popen[str]:
        server = start_process(MODULE, "serve", self._port, self._folder, self._capacity)
        assert server.stdout is not None
        self._port, self._restored = map(int, server.stdout.readline().split())
        return server

    def kill_server(self) -> None:
        """Kill the service and restart it from its newest checkpoint."""
        end_process(self._server)
        moment = time.monotonic()
        self._server = self._start_server()
        self._kills.append((moment, self._restored))

    def kill_reader(self) -> None:
        """Kill a reader and start another one."""
        end_process(self._readers.pop(self._rng.randrange(len(self._readers))))
        self._killed_readers += 1
        self._readers.append(self._start("read", self._number))
        self._number += 1

    def run(self, seconds: float, kill_every: float) -> None:
        """Alternately kill the service and a reader, at least twice each, while all processes run."""
        end = time.monotonic() + seconds
        turns_due = min(4, int(seconds / kill_every))
        turns = 0
        while (left := end - time.monotonic()) > 0 or turns < turns_due:
            time.sleep(min(kill_every, left) if left > 0 else kill_every)
            if time.monotonic() < end or turns < turns_due:
                (self.kill_reader if turns % 2 else self.kill_server)()
                turns += 1

    def end(self) -> tuple[list[str], dict[str, int]]:
        """Stop all clients; return the faults and figures of the account."""
        for client in self._writers:
            client.terminate()
        codes = [client.wait(120) for client in self._writers]
        for client in self._readers:
            client.terminate()
        codes += [client.wait(120) for client in self._readers]
        # The signal ends those that have not begun.
        faults = [f"a client ended with {code}" for code in codes if code not in (0, -signal.SIGTERM)]
        with ReplayClient(f"grpc://127.0.0.1:{self._port}", "queue") as client:
            client.checkpoint()
        self.close()
        actual, figures = self._account()
        return faults + actual, figures

    def _account(self) -> tuple[list[str], dict[str, int]]:
        table = queue(self._capacity)
        Checkpoints(self._folder / "checkpoints").restore([table])
        left: dict[int, Counter[int]] = defaultdict(Counter)
        while len(table):
            writer, number = map(int, table.sample(1).batch["obs"][0])
            left[writer][number] += 1
        readings: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for path in self._folder.glob("reader.*"):
            for moment, writer, number in notes(path):
                readings[int(writer)][int(number)].append(moment)
        began = {int(number): moment for _, number, moment in notes(self._folder / "checkpoints.began")}
        losses = [
            (max((at for first, at in began.items() if first <= restored), default=0.0), kill)
            for kill, restored in self._kills
        ]
        faults: list[str] = []
        sums: Counter[str] = Counter()
        for path in self._folder.glob("writer.*"):
            writer = int(path.suffix[1:])
            actual = account_queue(notes(path), readings[writer], left[writer], losses)
            faults += [f"writer {writer}: {fault}" for fault in actual[0]]
            sums.update(actual[1])
        sums["read"] = sum(len(moments) for part in readings.values() for moments in part.values())
        sums["still there"] = sum(part.total() for part in left.values())
        sums["service killed"], sums["readers killed"] = len(self._kills), self._killed_readers
        maximum = len(self._readers) * len(self._kills) + self._killed_readers
        if sums["on their way"] > maximum:
            faults.append(f"{sums['on their way']} fragments are lost, and {maximum} were on their way at the most")
        return faults, dict(sums)

    def close(self) -> None:
        """Stop all processes."""
        for process in (*self._writers, *self._readers, self._server):
            end_process(process)

    def __enter__(self) -> QueueSoak:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Run one process of the soak test, or the entire test."""
    if sys.argv[1:2] == ["serve"]:
        serve_tables(int(sys.argv[2]), Path(sys.argv[3]), [queue(int(sys.argv[4]))])
    elif sys.argv[1:2] in (["write"], ["read"]):
        work = write_fragments if sys.argv[1] == "write" else read_fragments
        work(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
        parser.add_argument("--seconds", type=float, default=600.0)
        parser.add_argument("--writers", type=int, default=4)
        parser.add_argument("--readers", type=int, default=2)
        parser.add_argument("--capacity", type=int, default=64, help="fragments")
        parser.add_argument("--kill-every", type=float, default=15.0, metavar="SECONDS")
        parser.add_argument("--seed", type=int, default=0)
        options = parser.parse_args()
        with tempfile.TemporaryDirectory() as folder:
            sizes = (options.writers, options.readers, options.capacity, options.seed)
            with QueueSoak(Path(folder), *sizes) as soak:
                soak.run(options.seconds, options.kill_every)
                faults, figures = soak.end()
        print(json.dumps(figures, indent=1))
        print("\n".join(faults[:20]) or "every fragment is accounted for")
        sys.exit(bool(faults))


if __name__ == "__main__":
    main()

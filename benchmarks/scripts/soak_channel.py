"""Soak test of a channel: many messages must arrive intact and in order, with constant memory.

    python -m benchmarks.scripts soak_channel --seconds 5
    python -m benchmarks.scripts soak_channel --messages 10000000 --seconds 3600

The first phase sends small messages; the second phase sends messages of mixed sizes. A child process sends the
messages. The main process receives the messages, and retains some batches, so that blocks are returned out of order.
Private memory and file descriptors of both processes are read after a tenth of each phase and at its end; the exit
status is 1 if they have grown. The channel's arena is shared memory, reserved when the channel is created.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from samplebatch import SampleBatch, channel

SMALL_ROWS = (6,)
MIXED_ROWS = (6, 40, 400, 6, 4_000, 23_000, 100, 6, 90_000, 1_000)
"""Rows of messages from 1 KB to 16 MB."""

CAPACITY_NBYTES = 96 << 20
MAX_KEPT_BATCHES = 7
GROWTH_NBYTES = 8 << 20
"""Allowed growth of private memory in bytes, because allocators retain some freed memory."""

CHECK_INTERVAL = 64


@dataclass(frozen=True)
class Footprint:
    """Memory and file descriptors of a process."""

    private_nbytes: int
    shared_nbytes: int
    descriptors: int

    @classmethod
    def of_this_process(cls) -> Footprint:
        """Measure the calling process."""
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        private, shared = (int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
        return cls(private, shared, len(os.listdir("/proc/self/fd")))

    def __str__(self) -> str:
        return (
            f"{self.private_nbytes / 1e6:.1f} MB private, {self.shared_nbytes / 1e6:.1f} MB shared, "
            f"{self.descriptors} descriptors"
        )


@dataclass(frozen=True)
class Phase:
    """Phase of the test, with messages of given sizes, limited by number and duration."""

    name: str
    rows: tuple[int, ...]
    messages: float
    seconds: float

    def is_over(self, sent: int, start: float, part: float = 1.0) -> bool:
        """Return whether the fraction `part` of the phase is complete, after `sent` messages since `start`."""
        return sent >= part * self.messages or time.monotonic() - start >= part * self.seconds


@dataclass
class Report:
    """Result of a process in a phase: its footprint after a tenth of the phase and at the end."""

    early: Footprint
    late: Footprint
    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def has_grown(self) -> bool:
        """Whether private memory or the number of descriptors has grown during the phase."""
        return (
            self.late.private_nbytes > self.early.private_nbytes + GROWTH_NBYTES
            or self.late.descriptors > self.early.descriptors
        )


def _columns(rows: int) -> dict[str, Any]:
    return {
        "number": np.zeros(rows, np.int64),
        "obs": np.zeros((rows, 17), np.float32),
        "actions": np.zeros((rows, 6), np.float32),
        "new_obs": np.zeros((rows, 17), np.float32),
        "rewards": np.zeros(rows, np.float32),
    }


def _produce(producer: Any, phases: list[Phase], reports: Connection) -> None:
    """Send numbered batches from the child process; every fourth batch is written in place."""
    with producer:
        number = 0
        for phase in phases:
            batches = [SampleBatch(_columns(rows)) for rows in phase.rows]
            first, start, early = number, time.monotonic(), None
            while not phase.is_over(number - first, start):
                for _ in range(CHECK_INTERVAL):
                    batch = batches[number % len(batches)]
                    if number % 4:
                        batch["number"][:] = number
                        batch["rewards"][-1] = number % 1000
                        producer.send(batch)
                    else:
                        columns = {name: (values.dtype, values.shape[1:]) for name, values in batch.items()}
                        with producer.reserve(columns, len(batch)) as block:
                            block["number"][:] = number
                            block["rewards"][-1] = number % 1000
                    number += 1
                if early is None and phase.is_over(number - first, start, 0.1):
                    early = Footprint.of_this_process()
            late = Footprint.of_this_process()
            reports.send(Report(early or late, late, number - first))
            # An empty batch ends the phase.
            producer.send(batches[0][:0])


def _consume(consumer: Any, phases: list[Phase]) -> Iterator[Report]:
    """Receive and verify every batch; retain up to `MAX_KEPT_BATCHES` batches and release them out of order."""
    number = 0
    random = np.random.default_rng(1)
    for phase in phases:
        kept_batches: deque[Any] = deque()
        report: Report | None = None
        first, start, nbytes = number, time.monotonic(), 0
        while len(batch := consumer.recv(timeout_s=60)):
            numbers = batch["number"]
            if not numbers[0] == numbers[-1] == number or batch["rewards"][-1] != number % 1000:
                raise AssertionError(f"message {number} is torn or missing")
            nbytes += batch.size_bytes()
            kept_batches.append(batch)
            if len(kept_batches) > MAX_KEPT_BATCHES:
                kept_batches.rotate(int(random.integers(MAX_KEPT_BATCHES)))
                kept_batches.popleft()
            del batch, numbers
            number += 1
            if report is None and number % CHECK_INTERVAL == 0 and phase.is_over(number - first, start, 0.1):
                report = Report(Footprint.of_this_process(), Footprint.of_this_process())
        kept_batches.clear()
        late = Footprint.of_this_process()
        early = report.early if report else late
        yield Report(early, late, number - first, nbytes, time.monotonic() - start)


def soak(phases: list[Phase]) -> bool:
    """Run the phases, print the footprints of both processes, and return whether memory stayed constant."""
    context = multiprocessing.get_context("spawn")
    producer, consumer = channel(CAPACITY_NBYTES)
    reports, remote = context.Pipe(duplex=False)
    child = context.Process(target=_produce, args=(producer, phases, remote))
    child.start()
    producer.close()
    remote.close()
    try:
        flat = _report(phases, consumer, reports)
        child.join()
        return flat and child.exitcode == 0
    finally:
        child.kill()
        child.join()
        consumer.close()


def _report(phases: list[Phase], consumer: Any, reports: Connection) -> bool:
    flat = True
    for phase, received in zip(phases, _consume(consumer, phases), strict=True):
        sent: Report = reports.recv()
        print(
            f"{phase.name}: {received.messages} messages in {received.seconds:.1f} s, "
            f"{received.messages / received.seconds:.0f} messages/s, "
            f"{received.nbytes / received.seconds / 1e6:.0f} MB/s"
        )
        for name, report in (("consumer", received), ("producer", sent)):
            print(f"  {name} early: {report.early}")
            print(f"  {name} late:  {report.late}{'  GROWN' if report.has_grown else ''}", flush=True)
            flat = flat and not report.has_grown
    return flat


def main(arguments: list[str] | None = None) -> int:
    """Run the soak test; return 0 if memory stayed constant."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scripts soak_channel", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="maximum duration of both phases together")
    parser.add_argument(
        "--messages",
        type=float,
        default=float("inf"),
        help="maximum number of small messages; a hundredth of it for mixed messages",
    )
    options = parser.parse_args(arguments)
    half = options.seconds / 2
    phases = [
        Phase("small", SMALL_ROWS, options.messages, half),
        Phase("mixed", MIXED_ROWS, options.messages / 100, half),
    ]
    flat = soak(phases)
    print("memory is flat" if flat else "memory is not flat")
    return 0 if flat else 1

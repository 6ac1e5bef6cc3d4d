"""A soak of the replay service: processes write and learn, some are killed, and every step is accounted for.

By hand: ``python -m tests.service.soak --seconds 600 --kill-server-every 60``. Writers number their steps, and note
when they send a fragment and how many rows were acknowledged, in files that outlive them. In the end the rows of the
table are held against these notes:

- none that was not sent, and no part of a fragment;
- all that were acknowledged, but for those that the full ring has written over, oldest first, and those acknowledged
  between the beginning of the checkpoint that the service was restored from and the moment at which it was killed;
- none twice, but for fragments that were under way when the service was killed.

A slow client comes and goes: it has a stream of large samples, and takes one every other second. The rates of the
others are told for the time with it and the time without it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from samplebatch import SampleBatch
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from samplebatch.service.checkpoint import Checkpoints
from tests.service.soak_accounts import STEPS, account, heard_at, note, notes, rate

ROOT = Path(__file__).parents[2]
MODULE = "tests.service.soak"
CHECKPOINT_EVERY_S = 2.0


def table(capacity: int) -> ReplayTable:
    """Create the table of all writers."""
    return ReplayTable("soak", kind="prioritized", capacity=capacity, alpha=0.6, beta=0.4, seed=0)


def reward(writer: Any, step: Any) -> Any:
    """Return the reward of a step, which identifies the step, so that learners can verify rows."""
    return (writer * 7919 + step) % 1000 / 8


# What the processes do


def serve_tables(port: int, folder: Path, tables: list[ReplayTable]) -> None:
    """Serve tables from their newest checkpoint; print the port and the checkpoint's number."""
    checkpoints, began = Checkpoints(folder / "checkpoints"), folder / "checkpoints.began"
    restored = checkpoints.restore(tables)

    def write() -> Path:
        path = folder / "checkpoint"
        moment = time.monotonic()
        path = checkpoints.write(tables).path
        note(began, int(path.name.rpartition("-")[2]), moment)
        return path

    with ReplayServer(tables, port=port, checkpoint=write) as server:
        print(server.port, int(restored.name.rpartition("-")[2]) if restored else 0, flush=True)
        while True:
            time.sleep(CHECKPOINT_EVERY_S)
            write()


def write_steps(uri: str, folder: Path, number: int, rate: float) -> None:
    """Write numbered fragments until SIGTERM is received."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    path, step = folder / f"writer.{number}", 0
    stream, streams = None, 0
    with ReplayClient(uri, "soak", writer=f"writer {number}", reconnect_s=600.0) as client:
        while not ended.is_set():
            steps = np.arange(step, step + STEPS)
            step += STEPS
            if client._only._writer._stream is not stream:
                stream, streams = client._only._writer._stream, streams + 1
            note(path, step, client.written.rows, streams)
            obs = np.stack([np.full(STEPS, number), steps], 1)
            client.extend(
                SampleBatch(
                    obs=obs, new_obs=obs + np.array([0, 1]), actions=steps % 4, rewards=reward(number, steps),
                    terminateds=steps == steps[-1], truncateds=np.zeros(STEPS, bool),
                )
            )  # fmt: skip
            ended.wait(1 / rate if rate else 0.0)
        client.flush()
        note(path, step, client.written.rows, streams + 1)


def learn(uri: str, folder: Path, number: int) -> None:
    """Sample, verify every row and update priorities until SIGTERM is received."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    path, sampled = folder / f"learner.{number}", 0
    with ReplayClient(uri, "soak", prefetch=2, reconnect_s=600.0) as client:
        while not ended.is_set():
            batch, indices = client.sample(256)
            assert (batch.rew == reward(batch.obs[:, 0], batch.obs[:, 1])).all()
            assert (batch.obs_next - batch.obs == [0, 1]).all()
            client.update_weight(indices, batch.rew + 0.1, generation=batch.generation)
            sampled += 1
            if sampled % 20 == 1:
                note(path, sampled)


def dawdle(uri: str, folder: Path, number: int) -> None:
    """Read a stream slowly between SIGUSR1 and SIGUSR2, repeatedly, until killed."""
    active = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: active.set())
    signal.signal(signal.SIGUSR2, lambda *_: active.clear())
    with ReplayClient(uri, "soak", reconnect_s=600.0, shared_memory=False) as client:
        print("ready", flush=True)
        selected = 0
        while active.wait():
            for batch in client.stream(16_384, prefetch=8):
                assert (batch.rew == reward(batch.obs[:, 0], batch.obs[:, 1])).all()
                selected += 1
                note(folder / f"slow.{number}", selected)
                time.sleep(2.0)
                if not active.is_set():
                    break


# The parent


def start_process(module: str, *arguments: Any) -> subprocess.Popen[str]:
    """Start a process of a soak test: a module with arguments."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip


def end_process(process: subprocess.Popen[str]) -> None:
    """Kill a process of a soak test and wait for its end."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@dataclass
class Report:
    """Results of a soak test."""

    faults: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


class Soak:
    """Service and client processes, some of which are killed and stopped while they run."""

    def __init__(self, folder: Path, writers: int, learners: int, capacity: int, rate: float, seed: int) -> None:
        self.folder, self._capacity, self._rate = folder, capacity, rate
        self._rng = random.Random(seed)
        self._numbers = iter(range(1 << 30))
        self._port = 0
        self._kills: list[tuple[float, int]] = []
        """When the service was killed, and the number of the checkpoint that it came back with."""
        self.killed = self.stopped = 0
        self._server = self._start_server()
        self._slow = start_process(MODULE, "dawdle", f"grpc://127.0.0.1:{self._port}", folder, 0)
        assert self._slow.stdout is not None
        self._slow.stdout.readline()
        self._windows: list[tuple[float, bool]] = []
        """When the slow client came or went, and which."""
        self._clients: dict[subprocess.Popen[str], str] = {}
        for role, count in (("write", writers), ("learn", learners)):
            for _ in range(count):
                self._start_client(role)
        while len(list(folder.glob("writer.*"))) < writers:
            time.sleep(0.05)

    def _start_server(self) -> subprocess.Popen[str]:
        server = start_process(MODULE, "serve", self._port, self.folder, self._capacity)
        assert server.stdout is not None
        port, self.restored = map(int, server.stdout.readline().split())
        self._port = port
        return server

    def _start_client(self, role: str) -> None:
        uri = f"grpc://127.0.0.1:{self._port}"
        rate = [self._rate] if role == "write" else []
        self._clients[start_process(MODULE, role, uri, self.folder, next(self._numbers), *rate)] = role

    def kill_server(self) -> None:
        """Kill the service and restart it from its newest checkpoint."""
        end_process(self._server)
        moment = time.monotonic()
        self._server = self._start_server()
        self._kills.append((moment, self.restored))

    def kill_client(self) -> None:
        """Kill a client and start another one."""
        client = self._rng.choice(list(self._clients))
        role = self._clients.pop(client)
        end_process(client)
        self.killed += 1
        self._start_client(role)

    def stop_client(self, seconds: float) -> None:
        """Suspend a client for some seconds."""
        client = self._rng.choice(list(self._clients))
        client.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        client.send_signal(signal.SIGCONT)
        self.stopped += 1

    def turn_slow(self) -> None:
        """Start or stop reading in the slow client."""
        is_there = not (self._windows and self._windows[-1][1])
        self._slow.send_signal(signal.SIGUSR1 if is_there else signal.SIGUSR2)
        self._windows.append((time.monotonic(), is_there))

    def run(self, seconds: float, kill_server_every: float, disturb_every: float, slow_every: float) -> None:
        """Run all processes; kill and stop some of them, and start and stop the slow client.

        The run exceeds ``seconds`` if the service would otherwise not have been killed at least once.
        """
        now = time.monotonic()
        end, next_kill, next_turn = now + seconds, now + kill_server_every, now + slow_every
        self._windows.append((now, False))
        kills_due = 2 if 0 < kill_server_every <= seconds / 2 else 0
        while (now := time.monotonic()) < end or len(self._kills) < kills_due:
            if now >= next_turn:
                self.turn_slow()
                next_turn = now + slow_every
            if kill_server_every and now >= next_kill:
                self.kill_server()
                next_kill = time.monotonic() + kill_server_every
            elif disturb_every:
                self._rng.choice((self.kill_client, lambda: self.stop_client(self._rng.uniform(0.1, 2.0))))()
            time.sleep(min(disturb_every or 0.5, max(0.05, end - time.monotonic())))

    def end(self) -> Report:
        """Stop the clients and account for every step."""
        report = Report()
        self._windows.append((time.monotonic(), False))
        if self._slow.poll() is not None:
            report.faults.append(f"the slow client ended with {self._slow.returncode}")
        # It may wait for a sample.
        end_process(self._slow)
        for client in self._clients:
            client.terminate()
        for client, role in self._clients.items():
            # The signal ends those that have not begun.
            if (code := client.wait(120)) not in (0, -signal.SIGTERM):
                report.faults.append(f"a client that was to {role} ended with {code}")
        with ReplayClient(f"grpc://127.0.0.1:{self._port}", "soak") as client:
            info = client.info()
            client.checkpoint()
        self.close()
        rows = table(self._capacity)
        Checkpoints(self.folder / "checkpoints").restore([rows])
        self._account(rows, report)
        report.figures |= {
            "rows": info["size"], "inserted": info["inserted"], "sampled": info["sampled"],
            "samples": sum(line[-1][1] for line in map(notes, self.folder.glob("learner.*")) if line),
            "clients killed": self.killed, "clients stopped": self.stopped, "service killed": len(self._kills),
            "samples of the slow client": len(notes(self.folder / "slow.0")),
        }  # fmt: skip
        for slow in (False, True):
            beside = "beside the slow client" if slow else "without it"
            spans = [span for span, is_there in self._spans() if is_there is slow]
            report.figures[f"rows/s {beside}"] = rate(self.folder.glob("writer.*"), 2, spans)
            report.figures[f"samples/s {beside}"] = rate(self.folder.glob("learner.*"), 1, spans)
        return report

    def _spans(self) -> list[tuple[tuple[float, float], bool]]:
        """List the time spans with and without the slow client."""
        return [
            ((start, stop), is_there)
            for (start, is_there), (stop, _) in zip(self._windows, self._windows[1:], strict=False)
        ]

    def _account(self, rows: ReplayTable, report: Report) -> None:
        """Compare the rows of the table with the logs of all writers."""
        buffer = rows._items.buffer  # type: ignore[attr-defined]
        stored = np.asarray(buffer[:].obs)
        oldest, removed = (-1, -1), -np.inf
        if len(rows) == rows.capacity:
            writer, step = map(int, stored[(int(buffer.last_index[0]) + 1) % len(rows)])
            oldest, removed = (writer, step), heard_at(notes(self.folder / f"writer.{writer}"), step)
        began = {int(number): moment for _, number, moment in notes(self.folder / "checkpoints.began")}
        # A checkpoint that was whole when the service was killed may have no note: it is no older than the one before.
        losses = [
            (max((at for first, at in began.items() if first <= number), default=0.0), kill)
            for kill, number in self._kills
        ]
        sums: Counter[str] = Counter()
        for path in self.folder.glob("writer.*"):
            number = int(path.suffix[1:])
            counted = np.bincount(stored[stored[:, 0] == number, 1])
            if number == oldest[0]:
                # The first steps of the oldest fragment were written over.
                counted[oldest[1] - oldest[1] % STEPS : oldest[1]] += 1
            actual = account(notes(path), counted, losses, [kill for kill, _ in self._kills], removed)
            report.faults += [f"writer {number}: {fault}" for fault in actual[0]]
            sums.update(actual[1])
        report.figures |= sums

    def close(self) -> None:
        """Stop all processes."""
        for process in (*self._clients, self._slow, self._server):
            end_process(process)

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Run one process of the soak test, or the entire test."""
    if sys.argv[1:2] == ["serve"]:
        serve_tables(int(sys.argv[2]), Path(sys.argv[3]), [table(int(sys.argv[4]))])
    elif sys.argv[1:2] == ["write"]:
        write_steps(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    elif sys.argv[1:2] == ["dawdle"]:
        dawdle(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["learn"]:
        learn(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(prog="python -m tests.service.soak", description=__doc__)
        parser.add_argument("--seconds", type=float, default=600.0)
        parser.add_argument("--writers", type=int, default=8)
        parser.add_argument("--learners", type=int, default=2)
        parser.add_argument("--capacity", type=int, default=100_000, help="steps; older ones are written over")
        parser.add_argument(
            "--rate", type=float, default=20.0, help="fragments a second of each writer; 0 for no limit"
        )
        parser.add_argument("--kill-server-every", type=float, default=0.0, metavar="SECONDS")
        parser.add_argument("--disturb-every", type=float, default=3.0, metavar="SECONDS", help="kill or stop a client")
        parser.add_argument(
            "--slow-every", type=float, default=20.0, metavar="SECONDS", help="let the slow client come, or go"
        )
        parser.add_argument("--seed", type=int, default=0)
        options = parser.parse_args()
        with tempfile.TemporaryDirectory() as folder:
            sizes = (options.writers, options.learners, options.capacity, options.rate, options.seed)
            with Soak(Path(folder), *sizes) as soak:
                soak.run(options.seconds, options.kill_server_every, options.disturb_every, options.slow_every)
                report = soak.end()
        print(json.dumps(report.figures, indent=1))
        print("\n".join(report.faults[:20]) or "every step is accounted for")
        sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()

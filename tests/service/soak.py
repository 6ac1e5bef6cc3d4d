"""A soak of the replay service: processes write and learn, some are killed, and every step is accounted for.

By hand: ``python -m tests.service.soak --seconds 600 --kill-server-every 60``. Writers number their steps, and note
when they send a fragment and how many rows were acknowledged, in files that outlive them. In the end the rows of the
table are held against these notes:

- none that was not sent, and no part of a fragment;
- all that were acknowledged, but for those acknowledged between the beginning of the checkpoint that the service was
  restored from and the moment at which it was killed;
- none twice, but for fragments that were under way when the service was killed.
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

ROOT = Path(__file__).parents[2]
STEPS = 50
"""Steps of a fragment."""
CHECKPOINT_EVERY_S = 5.0


def table(capacity: int) -> ReplayTable:
    """Make the table that all write to."""
    return ReplayTable("soak", kind="prioritized", capacity=capacity, alpha=0.6, beta=0.4, seed=0)


def reward(writer: Any, step: Any) -> Any:
    """Return the reward that belongs to a step, by which a learner knows that a row is whole."""
    return (writer * 7919 + step) % 1000 / 8


def note(path: Path, *values: Any) -> None:
    """Append a line with the time to a file, at once: whoever writes may be killed at any moment."""
    line = " ".join(map(str, (time.monotonic(), *values))) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def notes(path: Path) -> list[list[float]]:
    """Read the lines of a file."""
    return [[float(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


# What the processes do


def serve(port: int, folder: Path, capacity: int) -> None:
    """Serve the table from its newest checkpoint, and write others."""
    tables, checkpoints, began = [table(capacity)], Checkpoints(folder / "checkpoints"), folder / "checkpoints.began"
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
    """Write numbered fragments until SIGTERM comes."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    path, step = folder / f"writer.{number}", 0
    stream, streams = None, 0
    with ReplayClient(uri, "soak", writer=f"writer {number}", reconnect_s=120.0) as client:
        while not ended.is_set():
            steps = np.arange(step, step + STEPS)
            step += STEPS
            if client._writer._stream is not stream:
                stream, streams = client._writer._stream, streams + 1
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
    """Draw samples, look at every row, and give priorities, until SIGTERM comes."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    path, drawn = folder / f"learner.{number}", 0
    with ReplayClient(uri, "soak", prefetch=2, reconnect_s=120.0) as client:
        while not ended.is_set():
            batch, indices = client.sample(256)
            assert (batch.rew == reward(batch.obs[:, 0], batch.obs[:, 1])).all()
            assert (batch.obs_next - batch.obs == [0, 1]).all()
            client.update_weight(indices, batch.rew + 0.1, generation=batch.generation)
            drawn += 1
            if drawn % 20 == 1:
                note(path, drawn)


# The parent


@dataclass
class Report:
    """The figures of a soak."""

    faults: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


class Soak:
    """A service and its clients in processes, some of which are killed and stopped while they run."""

    def __init__(self, folder: Path, writers: int, learners: int, capacity: int, rate: float, seed: int) -> None:
        self.folder, self._capacity, self._rate = folder, capacity, rate
        self._rng = random.Random(seed)
        self._numbers = iter(range(1 << 30))
        self._port = 0
        self._kills: list[tuple[float, int]] = []
        """When the service was killed, and the number of the checkpoint that it came back with."""
        self.killed = self.stopped = 0
        self._server = self._start_server()
        self._clients: dict[subprocess.Popen[str], str] = {}
        for role, count in (("write", writers), ("learn", learners)):
            for _ in range(count):
                self._start_client(role)

    def _start(self, *arguments: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.service.soak", *map(str, arguments)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip

    def _start_server(self) -> subprocess.Popen[str]:
        server = self._start("serve", self._port, self.folder, self._capacity)
        assert server.stdout is not None
        port, self.restored = map(int, server.stdout.readline().split())
        self._port = port
        return server

    def _start_client(self, role: str) -> None:
        uri = f"grpc://127.0.0.1:{self._port}"
        rate = [self._rate] if role == "write" else []
        self._clients[self._start(role, uri, self.folder, next(self._numbers), *rate)] = role

    def kill_server(self) -> None:
        """Kill the service, and start it from its newest checkpoint."""
        _end(self._server)
        moment = time.monotonic()
        self._server = self._start_server()
        self._kills.append((moment, self.restored))

    def kill_client(self) -> None:
        """Kill a client, and start another one."""
        client = self._rng.choice(list(self._clients))
        role = self._clients.pop(client)
        _end(client)
        self.killed += 1
        self._start_client(role)

    def stop_client(self, seconds: float) -> None:
        """Stop a client for a while."""
        client = self._rng.choice(list(self._clients))
        client.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        client.send_signal(signal.SIGCONT)
        self.stopped += 1

    def run(self, seconds: float, kill_server_every: float, disturb_every: float) -> None:
        """Let all run, and kill and stop some of them."""
        now = time.monotonic()
        end, next_kill = now + seconds, now + kill_server_every
        while (now := time.monotonic()) < end:
            if kill_server_every and now >= next_kill:
                self.kill_server()
                next_kill = time.monotonic() + kill_server_every
            elif disturb_every:
                self._rng.choice((self.kill_client, lambda: self.stop_client(self._rng.uniform(0.1, 2.0))))()
            time.sleep(min(disturb_every or 0.5, max(0.0, end - time.monotonic())))

    def end(self) -> Report:
        """End the clients, and account for every step."""
        report = Report()
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
        }  # fmt: skip
        return report

    def _account(self, rows: ReplayTable, report: Report) -> None:
        """Hold the rows of the table against the notes of all writers."""
        kept = np.asarray(rows._items.buffer[:].obs)  # type: ignore[attr-defined]
        began = {int(number): moment for _, number, moment in notes(self.folder / "checkpoints.began")}
        # A checkpoint that was whole when the service was killed may have no note: it is no older than the one before.
        losses = [
            (max((at for one, at in began.items() if one <= number), default=0.0), kill) for kill, number in self._kills
        ]
        sums: Counter[str] = Counter()
        for path in self.folder.glob("writer.*"):
            number = int(path.suffix[1:])
            counted = np.bincount(kept[kept[:, 0] == number, 1], minlength=1)
            found = account(notes(path), counted, losses, [kill for kill, _ in self._kills])
            report.faults += [f"writer {number}: {fault}" for fault in found[0]]
            sums.update(found[1])
        report.figures |= sums

    def close(self) -> None:
        """End all processes."""
        for process in (*self._clients, self._server):
            _end(process)

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def account(
    lines: list[list[float]], counted: Any, losses: list[tuple[float, float]], kills: list[float]
) -> tuple[list[str], Counter[str]]:
    """Hold the rows of one writer against its notes.

    Parameters
    ----------
    lines
        When a fragment was sent, the number of rows up to its end, how many were known to be acknowledged, and how
        many streams had been opened.
    counted
        How often each of its rows is in the table.
    losses
        Spans of time in which acknowledged rows may have been lost.
    kills
        When the service was killed.
    """
    faults, sums = [], Counter[str]()
    fragments = int(lines[-1][1]) // STEPS
    if len(counted) > fragments * STEPS:
        faults.append(f"row {len(counted) - 1} was never sent")
    times = np.zeros((fragments, STEPS), np.int64)
    times.reshape(-1)[: len(counted)] = counted[: times.size]
    acknowledged = 0
    heard = np.full(fragments, np.inf)
    sent = np.full(fragments, np.inf)
    for moment, rows, known, _ in lines:
        sent[int(rows) // STEPS - 1] = min(moment, sent[int(rows) // STEPS - 1])
        heard[acknowledged : int(known) // STEPS] = moment
        acknowledged = int(known) // STEPS
    for fragment in np.flatnonzero((times != times[:, :1]).any(1)):
        faults.append(f"fragment {fragment} is there in part")
    often = times[:, 0]
    for fragment in np.flatnonzero((often == 0) & np.isfinite(heard)):
        if not any(since <= heard[fragment] <= _noted(lines, kill) for since, kill in losses):
            faults.append(f"fragment {fragment}, sent at {sent[fragment]:.2f}, is lost")
    for fragment in np.flatnonzero(often > 1):
        if not any(sent[fragment] <= kill <= heard[fragment] for kill in kills):
            faults.append(f"fragment {fragment}, sent at {sent[fragment]:.2f}, is there {often[fragment]} times")
    sums.update(
        {
            "sent": fragments * STEPS,
            "acknowledged": acknowledged * STEPS,
            "acknowledged and lost": STEPS * int(np.count_nonzero((often == 0) & np.isfinite(heard))),
            "twice": STEPS * int(np.count_nonzero(often > 1)),
            "not acknowledged and there": STEPS * int(np.count_nonzero((often > 0) & np.isinf(heard))),
        }
    )
    return faults, sums


def _noted(lines: list[list[float]], kill: float) -> float:
    """Return when a writer had noted all that was acknowledged before a kill.

    It may read such acknowledgements until it opens another stream, which its next line tells.
    """
    before = [streams for moment, _, _, streams in lines if moment <= kill]
    return next((moment for moment, _, _, streams in lines if moment > kill and [streams] != before[-1:]), np.inf)


def main() -> None:
    """Run one of the processes, or the whole."""
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["write"]:
        write_steps(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    elif sys.argv[1:2] == ["learn"]:
        learn(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(prog="python -m tests.service.soak", description=__doc__)
        parser.add_argument("--seconds", type=float, default=600.0)
        parser.add_argument("--writers", type=int, default=8)
        parser.add_argument("--learners", type=int, default=2)
        parser.add_argument("--capacity", type=int, default=5_000_000)
        parser.add_argument(
            "--rate", type=float, default=20.0, help="fragments a second of each writer; 0 for no limit"
        )
        parser.add_argument("--kill-server-every", type=float, default=0.0, metavar="SECONDS")
        parser.add_argument("--disturb-every", type=float, default=3.0, metavar="SECONDS", help="kill or stop a client")
        parser.add_argument("--seed", type=int, default=0)
        asked = parser.parse_args()
        with tempfile.TemporaryDirectory() as folder:
            sizes = (asked.writers, asked.learners, asked.capacity, asked.rate, asked.seed)
            with Soak(Path(folder), *sizes) as soak:
                soak.run(asked.seconds, asked.kill_server_every, asked.disturb_every)
                report = soak.end()
        print(json.dumps(report.figures, indent=1))
        print("\n".join(report.faults[:20]) or "every step is accounted for")
        sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()

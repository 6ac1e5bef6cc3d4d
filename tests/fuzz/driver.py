"""Fuzzing: damaged bytes are read in a process of its own, under a limit of memory and of time.

A target says how whole samples are made and how they are read. Each case is a sample with a few changes, drawn from a
seed and the number of the case, so that any can be repeated. Reading it must end in right data, or in an error of the
library's; anything else (another exception, lack of memory, no answer in time, death of the process) is a fault.

The number of cases for each target is the environment variable ``FUZZ_CASES``, five times as many among the long tests;
the seed is ``FUZZ_SEED``::

    FUZZ_CASES=10000 FUZZ_SEED=1 python -m pytest tests/fuzz
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Protocol

from tests.fuzz.mutations import Files, mutate_files

CASES = int(os.environ.get("FUZZ_CASES", "60"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
CASE_TIMEOUT_S = 20.0
START_TIMEOUT_S = 120.0
_MOST_FAULTS = 20
"""Faults after which a run ends: more would say the same."""

ROOT = Path(__file__).parents[2]


class Target(Protocol):
    """Format to fuzz: its samples, and the function that reads it."""

    def samples(self, folder: Path) -> list[Any]:
        """Create valid samples; the folder may be used for them."""

    def mutate(self, sample: Any, rng: Random) -> Any:
        """Return a changed copy of a sample."""

    def read(self, sample: Any, folder: Path) -> None:
        """Read a sample and use its contents; the folder is empty, and is not removed between samples."""


class FileTarget:
    """Format whose samples are files."""

    def mutate(self, sample: Files, rng: Random) -> Files:
        return mutate_files(sample, rng)


def files_of(folder: Path) -> Files:
    """Read all files under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def written(files: Files, folder: Path) -> Path:
    """Write files into a folder and return the folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


class Reader:
    """Forked process that reads the cases of a target."""

    def __init__(self, target: str, folder: str, log: Path) -> None:
        requests, answers = os.pipe(), os.pipe()
        with log.open("w") as file:
            self.pid = _ask_forker([target, folder], [requests[0], answers[1], file.fileno()])
        os.close(requests[0])
        os.close(answers[1])
        self.stdin, self.stdout = os.fdopen(requests[1], "w"), os.fdopen(answers[0])

    def end(self) -> int:
        """Kill the process if it is running; return its exit code."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        return _ask_forker(self.pid, [])


@cache
def _forker() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that forks readers."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with far:
        process = subprocess.Popen([sys.executable, "-m", "tests.fuzz.child"], stdin=far, cwd=ROOT, env=environment)
    atexit.register(process.kill)
    return process, near


def _ask_forker(request: object, files: list[int]) -> int:
    _, requests = _forker()
    socket.send_fds(requests, [json.dumps(request).encode()], files)
    answer: int = json.loads(requests.recv(1 << 16) or "0")
    return answer


class Child:
    """Client of the reader process, which is restarted after it dies."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.folder = tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.log = Path(self.folder) / "log"
        self.process: Reader | None = None

    def ask(self, seed: int, case: int) -> tuple[str, str]:
        """Return the outcome of a case, and the error, if any."""
        if self.process is None:
            self._start()
        process = self.process
        assert process is not None
        process.stdin.write(json.dumps((seed, case)) + "\n")
        process.stdin.flush()
        answer = self._answer(CASE_TIMEOUT_S)
        if answer is None:
            self._stop()
            return "timeout", f"no answer in {CASE_TIMEOUT_S} s"
        if not answer:
            code = process.end()
            self.process = None
            return "death", f"the process ended with {code}"
        outcome, error = json.loads(answer)
        return outcome, error

    def _start(self) -> None:
        self.process = Reader(self.target, self.folder, self.log)
        completed = self._answer(START_TIMEOUT_S)
        if completed != "ready\n":
            raise AssertionError(
                f"whole samples of {self.target} must be read, got {completed!r}: {self.log.read_text()[-3000:]}"
            )

    def _answer(self, timeout_s: float) -> str | None:
        assert self.process is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        return self.process.stdout.readline() if readable else None

    def _stop(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def fuzz(
    target: str, cases: int = CASES, seed: int = SEED, most_faults: int = _MOST_FAULTS, first: int = 0
) -> tuple[Counter[str], list[str]]:
    """Read damaged samples of a target; seed and case number determine the changes of each sample.

    Parameters
    ----------
    target
        Module and name of the target, joined by a colon.
    cases, first
        Number of cases, and number of the first case.
    seed
        Seed of the changes.
    most_faults
        Number of faults after which fuzzing ends.

    Returns
    -------
    outcomes
        Counts of ``"read"``, ``"refused"`` and each kind of fault.
    faults
        One line per fault, with the case that reproduces it.
    """
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    child = Child(target)
    try:
        for case in range(first, first + cases):
            outcome, error = child.ask(seed, case)
            outcomes[outcome] += 1
            if outcome not in ("read", "refused"):
                faults.append(f"{target} seed {seed} case {case}: {outcome}: {error}")
                if len(faults) >= most_faults:
                    break
    finally:
        child.close()
    return outcomes, faults

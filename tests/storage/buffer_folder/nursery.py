"""Processes that are killed in the midst of their work, many of them, without paying for their imports each time.

Run as a program it imports what they need once, and forks one for each line that it reads: `FUNCTION ARGUMENT`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[3]


class Nursery:
    """Process that starts and kills children."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, work: str, argument: str) -> int:
        """Start a child, wait until its work starts, and return its process id."""
        return self._ask(f"{work} {argument}")

    def kill(self, pid: int) -> int:
        """Kill a child; return the signal that ended it, which is not 9 if it had ended before."""
        # It stays a zombie until it is waited for, so the id is still its own.
        os.kill(pid, signal.SIGKILL)
        return -self._ask(f"wait {pid}")

    def kill_after(self, delay_s: float, work: str, argument: str) -> int:
        """Start a child, kill it after a delay, and return the signal that ended it."""
        pid = self.start(work, argument)
        time.sleep(delay_s)
        return self.kill(pid)

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def nursery(module: str) -> Iterator[Nursery]:
    """Start a process that forks workers: functions in the dict `WORK` of a module."""
    process = subprocess.Popen(
        [sys.executable, __file__, module],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Nursery(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def serve(work: dict[str, Callable[[str], None]]) -> None:
    """Fork a child for each line of standard input; wait for the child on request."""
    for line in sys.stdin:
        name, argument = line.split()
        if name == "wait":
            _, status = os.waitpid(int(argument), 0)
            os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        elif not os.fork():
            # Whoever was to kill it may have been killed.
            signal.alarm(60)
            try:
                work[name](argument)
            finally:
                os._exit(1)


def forked() -> int:
    """Fork this process; the child must exit by `os._exit`."""
    with warnings.catch_warnings():
        # From Python 3.12 on there is one wherever a library has started threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def started() -> None:
    """Notify the test from a child process that the work starts."""
    os.write(1, f"{os.getpid()}\n".encode())


def payload(steps: np.ndarray, width: int) -> np.ndarray:
    """Return rows that repeat their number, so that torn rows can be detected."""
    return np.repeat(np.asarray(steps, np.int64)[:, None], width, 1)


if __name__ == "__main__":
    import importlib

    sys.modules["tests.storage.buffer_folder.nursery"] = sys.modules["__main__"]
    serve(importlib.import_module(sys.argv[1]).WORK)

"""Both cores: large copies shared between the calling thread and one helper.

NumPy lets go of the interpreter while it copies, and one core alone does not use all of the memory's bandwidth. The
helper is started when it is first of use, and stays: starting a thread costs more than most copies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

WORTHWHILE = 2 << 20
"""Bytes from which sharing a copy pays; below, handing it over costs more than it gains."""

_Job = Callable[[], object]


class _Helper:
    """A thread that runs one job at a time for whoever holds its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="samplebatch-copies", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def join(self) -> None:
        error = self._ends.get()
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except BaseException as error:  # carried over to the thread that waits for it
                self._ends.put(error)
            else:
                self._ends.put(None)
            # What the job holds must not live until the next one comes.
            del job


_helper = _Helper()
_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forget_helper() -> None:
    """Start anew in a forked child, which has none of its parent's threads."""
    global _helper
    _helper = _Helper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helper)


def both(one: _Job, other: _Job) -> None:
    """Run two jobs, at the same time if the helper is free, else one after the other.

    Raises
    ------
    BaseException
        What either job raises, once both have ended.

    Examples
    --------
    >>> done = []
    >>> both(lambda: done.append(1), lambda: done.append(2))
    >>> sorted(done)
    [1, 2]
    """
    helper = _helper
    if _usable < 2 or not helper.lock.acquire(blocking=False):
        one()
        other()
        return
    try:
        helper.start(one)
        try:
            other()
        finally:
            helper.join()
    finally:
        helper.lock.release()


def each(jobs: Mapping[str, Callable[[], T]], nbytes: Mapping[str, int]) -> dict[str, T]:
    """Run a job for each column, shared between two threads by the bytes that each moves.

    Where one column has most of the bytes, the jobs run in order, so that this one can share its own.

    Parameters
    ----------
    jobs
        What to run, by name.
    nbytes
        Bytes that each moves; names that are left out move none to speak of.

    Returns
    -------
    dict
        The results, in the jobs' order.
    """
    total = sum(nbytes.values())
    if total < WORTHWHILE or max(nbytes.values()) > 0.6 * total:
        return {name: job() for name, job in jobs.items()}
    halves: tuple[list[str], list[str]] = ([], [])
    weights = [0, 0]
    for name in sorted(jobs, key=lambda name: -nbytes.get(name, 0)):
        lighter = 0 if weights[0] <= weights[1] else 1
        halves[lighter].append(name)
        weights[lighter] += nbytes.get(name, 0)
    results: dict[str, T] = {}

    def run(names: list[str]) -> None:
        for name in names:
            results[name] = jobs[name]()

    both(lambda: run(halves[0]), lambda: run(halves[1]))
    return {name: results[name] for name in jobs}

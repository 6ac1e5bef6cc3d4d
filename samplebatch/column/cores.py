"""Both cores: large copies shared between the calling thread and one helper.

NumPy lets go of the interpreter while it copies, and one core alone does not use all of the memory's bandwidth. A copy
is cut into pieces that both threads take from one queue, so that a helper whose core is busy elsewhere delays nothing:
the caller does what the helper does not get to. The helper is started when it is first of use, and stays, because
starting a thread costs more than most copies.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

WORTHWHILE = 2 << 20
"""Bytes from which sharing a copy pays; below, handing it over costs more than it gains."""

_PIECE_NBYTES = 512 << 10
"""Bytes in one piece, about: many times the cost of taking it, and soon done when the other thread waits for it."""

Job = Callable[[], object]
_Shared = tuple[deque[Job], SimpleQueue[BaseException | None]]


class _Helper:
    """A thread that takes jobs from whatever queue it is shown."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[_Shared] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def show(self, shared: _Shared) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="samplebatch-copies", daemon=True)
                    self._thread.start()
        self._inbox.put(shared)

    def _run(self) -> None:
        while True:
            jobs, ends = self._inbox.get()
            while jobs:
                try:
                    job = jobs.popleft()
                except IndexError:
                    break
                error: BaseException | None = None
                try:
                    job()
                except BaseException as raised:  # carried over to the caller
                    error = raised
                # What a job holds must not live until the next one comes.
                del job
                ends.put(error)
            del jobs, ends


_helper = _Helper()
_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forget_helper() -> None:
    """Start anew in a forked child, which has none of its parent's threads."""
    global _helper
    _helper = _Helper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helper)


def share(jobs: Iterable[Job]) -> None:
    """Run jobs, on the calling thread and as far as it gets to it on the helper; return when all have ended.

    Raises
    ------
    BaseException
        What a job raises, once those under way have ended; the others are not run.

    Examples
    --------
    >>> done = []
    >>> share([lambda: done.append(1), lambda: done.append(2)])
    >>> sorted(done)
    [1, 2]
    """
    left = deque(jobs)
    if _usable < 2:
        while left:
            left.popleft()()
        return
    ends: SimpleQueue[BaseException | None] = SimpleQueue()
    taken = len(left)
    _helper.show((left, ends))
    error: BaseException | None = None
    try:
        while left:
            try:
                job = left.popleft()
            except IndexError:
                break
            taken -= 1
            job()
    except BaseException as raised:
        error = raised
        # Whatever is left now is nobody's.
        while left:
            try:
                left.popleft()
            except IndexError:
                break
            taken -= 1
    for _ in range(taken):
        error = ends.get() or error
    if error is not None:
        raise error


def each(jobs: Mapping[str, Callable[[], T]], nbytes: Mapping[str, int]) -> dict[str, T]:
    """Run a job for each column, shared where they move many bytes together.

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
    if sum(nbytes.values()) < WORTHWHILE:
        return {name: job() for name, job in jobs.items()}
    results: dict[str, T] = {}

    def run(name: str) -> Callable[[], None]:
        def job() -> None:
            results[name] = jobs[name]()

        return job

    share([run(name) for name in sorted(jobs, key=lambda name: -nbytes.get(name, 0))])
    return {name: results[name] for name in jobs}


def pieces(rows: int, nbytes: int) -> Iterator[slice]:
    """Cut so many rows of so many bytes together into slices of one piece each.

    Examples
    --------
    >>> list(pieces(10, 2 << 20))
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    step = max(1, -(-rows * _PIECE_NBYTES // nbytes)) if nbytes else max(1, rows)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))

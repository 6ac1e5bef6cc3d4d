"""Threads: large copies shared between the calling thread and one helper thread.

NumPy releases the interpreter lock during a copy, and one core does not saturate the memory bandwidth. A copy is split
into a few shares in a queue that both threads consume, so a helper whose core is busy causes little delay. The number
of shares is small because a thread may wait for the interpreter lock after each copy. The helper starts on first use
and persists, because starting a thread takes longer than most copies.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

WORTHWHILE = 2 << 20
"""Minimum size in bytes of a copy that is faster on two threads."""

PIECE_NBYTES = 512 << 10
"""Approximate bytes per job."""

_SHARES = 4
"""Number of shares that jobs are grouped into."""

Job = tuple[int, Callable[[], object]]
"""Number of bytes that a job moves, and the call that moves them."""

_Work = Callable[[], None]
_Shared = tuple[deque[_Work], SimpleQueue[BaseException | None]]


class _Helper:
    """Helper thread of `share` that runs jobs from submitted queues."""

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
                # Release the job's arrays before waiting for the next one.
                del job
                ends.put(error)
            del jobs, ends


_helper = _Helper()
_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forget_helper() -> None:
    """Replace the helper in a forked child, because the child does not inherit the helper's thread."""
    global _helper
    _helper = _Helper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helper)


def share(jobs: Sequence[Job]) -> None:
    """Run jobs on the calling thread and the helper thread; return when all jobs have finished.

    Raises
    ------
    BaseException
        The error of a job, raised after all running jobs have finished; pending jobs are skipped.

    Examples
    --------
    >>> done = []
    >>> share([(1 << 20, lambda: done.append(1)), (1 << 20, lambda: done.append(2))])
    >>> sorted(done)
    [1, 2]
    """
    if _usable < 2:
        for _, call in jobs:
            call()
        return
    left = deque(_cut_shares(jobs))
    ends: SimpleQueue[BaseException | None] = SimpleQueue()
    with_helper = len(left)
    _helper.show((left, ends))
    error: BaseException | None = None
    try:
        while left:
            try:
                job = left.popleft()
            except IndexError:
                break
            with_helper -= 1
            job()
    except BaseException as raised:
        error = raised
        # Discard the remaining shares.
        while left:
            try:
                left.popleft()
            except IndexError:
                break
            with_helper -= 1
    for _ in range(with_helper):
        error = ends.get() or error
    if error is not None:
        raise error


def _cut_shares(jobs: Sequence[Job]) -> Iterator[_Work]:
    share_nbytes = sum([nbytes for nbytes, _ in jobs]) / _SHARES
    calls: list[Callable[[], object]] = []
    moved = 0
    for nbytes, call in jobs:
        calls.append(call)
        moved += nbytes
        if moved >= share_nbytes:
            yield partial(_run_all, calls)
            calls, moved = [], 0
    if calls:
        yield partial(_run_all, calls)


def _run_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def pieces(rows: int, nbytes: int) -> Iterator[slice]:
    """Yield slices of rows, each with about `PIECE_NBYTES` bytes; all rows have `nbytes` bytes in total.

    >>> list(pieces(10, 2 << 20))
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    step = max(1, -(-rows * PIECE_NBYTES // nbytes)) if nbytes else max(1, rows)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def copy_all(targets: Sequence[npt.NDArray[Any]], sources: Sequence[npt.NDArray[Any]], nbytes: int) -> None:
    """Copy each source to the corresponding target; source and target have equal dtype and shape.

    targets, sources: equally many arrays.
    nbytes: approximate total bytes.

    >>> targets = [np.zeros(2), np.zeros(1, int)]
    >>> copy_all(targets, [np.ones(2), np.array([3])], nbytes=24)
    >>> targets
    [array([1., 1.]), array([3])]
    """
    if nbytes < WORTHWHILE:
        for target, source in zip(targets, sources, strict=True):
            target[...] = source
        return
    jobs: list[Job] = []
    for target, source in zip(targets, sources, strict=True):
        if target.ndim:
            parts = [(target[part], source[part]) for part in pieces(len(target), target.nbytes)]
            jobs += [(to.nbytes, partial(np.copyto, to, piece)) for to, piece in parts]
        else:
            target[...] = source
    share(jobs)

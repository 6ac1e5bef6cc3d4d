"""WorkerCounters: progress counters of workers, in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.transport.region import Region

_NBYTES = 64
"""Bytes of each worker's line: a cache line, which no other process writes to."""

MADE, SENT, FRAGMENTS, READY = range(4)
"""Words of a line: environment steps made that were sent or may yet be, those of them that were sent, the messages that
the worker has sent, and how many environments it has made."""


class WorkerCounters:
    """A line of numbers for each worker, which that worker alone writes, and which stays when it is killed.

    Parameters
    ----------
    region
        The memory of the board.

    Examples
    --------
    >>> board = WorkerCounters.create(2)
    >>> board.line(1)[MADE] += 3
    >>> int(board.line(1)[MADE]), int(board.line(0)[MADE])
    (3, 0)
    >>> board.close()
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self._words: npt.NDArray[np.int64] = region.array.view(np.int64).reshape(-1, _NBYTES // 8)

    @classmethod
    def create(cls, workers: int) -> WorkerCounters:
        """Make the counters of some workers.

        Raises
        ------
        SharedMemoryError
            If so much shared memory is not free.
        """
        return cls(Region.create(workers * _NBYTES))

    def line(self, index: int) -> npt.NDArray[np.int64]:
        """Return the numbers of a worker."""
        line: npt.NDArray[Any] = self._words[index]
        return line

    def clear(self, index: int) -> None:
        """Set the numbers of a worker to 0, before another takes its place."""
        self._words[index] = 0

    def close(self) -> None:
        """Let go of the memory."""
        self._words = np.zeros((0, 0), np.int64)
        self.region.close()

"""Arena: which bytes of a block of memory are taken, and which are free to be taken again.

Memory that was in use a moment ago is faster to write than memory that was not, so what is given back is handed out
first. Small slots lie at the end of the block and large ones at its beginning, so that a small one that is kept for
long does not stand between large ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from samplebatch.column.memory import ALIGNMENT

SMALL_NBYTES: Final = 1 << 16
"""Slots up to this size are kept for others of their size when they are given back."""

_UP = ALIGNMENT - 1


def slot_nbytes(nbytes: int) -> int:
    """Round the size of a slot up: a small one to one of few sizes, at most an eighth larger, to be reused for others.

    >>> [slot_nbytes(n) for n in (0, 1, 64, 1000, 1025, 5000, 100_000)]
    [64, 64, 64, 1024, 1152, 5120, 100032]
    """
    step = ALIGNMENT if nbytes <= 8 * ALIGNMENT or nbytes > SMALL_NBYTES else 1 << (nbytes - 1).bit_length() - 4
    up = max(step, ALIGNMENT) - 1
    return max(ALIGNMENT, nbytes + up & ~up)


class Arena:
    """The free and taken bytes of a block.

    Parameters
    ----------
    start, stop
        Where the block begins and ends, both aligned.
    taken
        Ranges of it that are taken already: where each begins, and its size.

    Examples
    --------
    >>> arena = Arena(0, 1 << 20)
    >>> start = arena.take(200_000)
    >>> start, arena.take(1 << 20) is None
    (0, True)
    >>> arena.give(start, 200_000)
    >>> arena.free_nbytes == arena.nbytes
    True
    """

    def __init__(self, start: int, stop: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        self.nbytes = stop - start
        self.free_nbytes = 0
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._kept: dict[int, list[int]] = {}
        for at, nbytes in (*sorted(taken), (stop, 0)):
            if start < at:
                self._starts.append(start)
                self._stops.append(at)
                self.free_nbytes += at - start
            start = at + nbytes

    def take(self, nbytes: int) -> int | None:
        """Take so many bytes, and return where they begin; None if no free range is as long.

        Parameters
        ----------
        nbytes
            A size that `slot_nbytes` gives.
        """
        kept = self._kept.get(nbytes)
        if kept:
            self.free_nbytes -= nbytes
            return kept.pop()
        if nbytes > self.free_nbytes:
            return None
        start = self._cut(nbytes)
        if start is None and self._kept:
            self._merge_kept()
            start = self._cut(nbytes)
        if start is not None:
            self.free_nbytes -= nbytes
        return start

    def is_warm(self, nbytes: int) -> bool:
        """Tell whether a slot of this size was given back and is there to be taken."""
        return bool(self._kept.get(nbytes))

    def give(self, start: int, nbytes: int) -> None:
        """Give back what `take` gave."""
        self.free_nbytes += nbytes
        if nbytes > SMALL_NBYTES:
            self._merge(start, start + nbytes)
        elif nbytes in self._kept:
            self._kept[nbytes].append(start)
        else:
            self._kept[nbytes] = [start]

    def _cut(self, nbytes: int) -> int | None:
        """Take a piece off the first free range that is long enough, or, if it is small, off the last."""
        starts, stops = self._starts, self._stops
        small = nbytes <= SMALL_NBYTES
        for i in reversed(range(len(starts))) if small else range(len(starts)):
            start, stop = starts[i], stops[i]
            if stop - start < nbytes:
                continue
            if stop - start == nbytes:
                del starts[i], stops[i]
                return start
            if small:
                stops[i] = stop - nbytes
                return stop - nbytes
            starts[i] = start + nbytes
            return start
        return None

    def _merge_kept(self) -> None:
        kept, self._kept = self._kept, {}
        for nbytes, own in kept.items():
            for start in own:
                self._merge(start, start + nbytes)

    def _merge(self, start: int, stop: int) -> None:
        """Put a range among the free ones, joined to those that it touches."""
        starts, stops = self._starts, self._stops
        i = bisect_left(starts, start)
        joins_left = i > 0 and stops[i - 1] == start
        joins_right = i < len(starts) and starts[i] == stop
        if joins_left and joins_right:
            stops[i - 1] = stops[i]
            del starts[i], stops[i]
        elif joins_left:
            stops[i - 1] = stop
        elif joins_right:
            starts[i] = start
        else:
            starts.insert(i, start)
            stops.insert(i, stop)

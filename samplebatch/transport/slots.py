"""Slots: which slots of the arena the consumer has, and which are there to be filled."""

from __future__ import annotations

import os
from collections import deque

from samplebatch.transport.arena import Arena, slot_nbytes

Slot = tuple[int, int]
"""Where a slot begins, and its size."""

_FEWEST_NBYTES = 1 << 17
"""Bytes of slots that are taken before it is asked which have come back: that costs a call, whatever it brings, and so
few bytes stay in the processor's cache."""

_PART = 4
"""Part of what is lent that is taken before asking again, so that a consumer that gives nothing back is not asked each
time. There are never more slots than are under way at once, and this part more."""

_MOST_BACK = 4096


class Slots:
    """The slots of an arena.

    Parameters
    ----------
    start, stop
        Where the arena begins and ends.
    back
        The pipe through which the consumer gives slots back, by the number of their message. It never waits.

    Attributes
    ----------
    arena
        What is free of it.
    lent
        The slots that the consumer has, by the number of their message.
    dropped
        Slots that nobody wants any more; they may be put here at any moment, by any thread.
    """

    def __init__(self, start: int, stop: int, back: int) -> None:
        self.arena = Arena(start, stop)
        self.lent: dict[int, tuple[Slot, ...]] = {}
        self.dropped: deque[Slot] = deque()
        self._back = back
        self._taken_nbytes = 0
        self._ask_at_nbytes = _FEWEST_NBYTES

    def take(self, nbytes: int) -> Slot | None:
        """Take a slot of at least so many bytes; None if none is free."""
        arena = self.arena
        size = slot_nbytes(nbytes)
        if size > arena.nbytes:
            size = arena.nbytes
        self._taken_nbytes += size
        if self._taken_nbytes > self._ask_at_nbytes and not arena.is_warm(size):
            self.collect()
        start = arena.take(size)
        if start is None:
            self.collect()
            start = arena.take(size)
            if start is None:
                return None
        return start, size

    def give(self, slots: tuple[Slot, ...]) -> None:
        """Make slots free."""
        for start, nbytes in slots:
            self.arena.give(start, nbytes)

    def collect(self) -> None:
        """Make the slots free that the consumer has given back, and those that nobody wants any more."""
        arena = self.arena
        while self.dropped:
            arena.give(*self.dropped.popleft())
        while True:
            try:
                raw = os.read(self._back, _MOST_BACK)
            except BlockingIOError:
                break
            for ident in memoryview(raw).cast("Q"):
                # One that is not lent was given back twice, or says that the consumer has come or gone.
                self.give(self.lent.pop(ident, ()))
            if len(raw) < _MOST_BACK:
                break
        self._taken_nbytes = 0
        self._ask_at_nbytes = max(_FEWEST_NBYTES, (arena.nbytes - arena.free_nbytes) // _PART)

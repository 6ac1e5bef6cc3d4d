"""Slots: which slots of the arena the consumer has, and which are there to be filled."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

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

    `lent` and `reserved` say which slots are taken, and each changes by one store; the arena is made to fit them. A
    signal handler may raise between any two calls, so whoever takes a slot leaves the word `is_settled` down until the
    slot is in one of the two. Who finds it down makes the arena from them again.

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
    reserved
        The slots that reservations have, by where they begin, each with a reference to who keeps it: when that is gone,
        the slot is free.
    is_settled
        Whether every slot that was taken is among those lent or reserved.
    sending
        Number of the newest message.
    is_sent
        Whether it was written.
    sent
        Number of messages that were written before it.
    starved_since
        When it was first asked how long there has been no slot; None if there is one. The caller sets that.
    """

    def __init__(self, start: int, stop: int, back: int) -> None:
        self._start, self._stop = start, stop
        self.arena = Arena(start, stop)
        self.lent: dict[int, tuple[Slot, ...]] = {}
        self.reserved: dict[int, tuple[Slot, Callable[[], Any]]] = {}
        self.is_settled = True
        self.sending = 0
        self.is_sent = False
        self.sent = 0
        self.starved_since: float | None = None
        self._back = ((back,), (_MOST_BACK,))
        self._returned: list[bytes] = []
        self._taken_nbytes = 0
        self._ask_at_nbytes = _FEWEST_NBYTES

    def take(self, nbytes: int) -> Slot | None:
        """Take a slot of at least so many bytes; None if none is free.

        The caller raises `is_settled` once it has put the slot among those lent or reserved.
        """
        if not self.is_settled:
            self.settle()
        self.is_settled = False
        arena = self.arena
        size = slot_nbytes(nbytes)
        if size > arena.nbytes:
            size = arena.nbytes
        self._taken_nbytes += size
        if self._taken_nbytes > self._ask_at_nbytes and not arena.is_warm(size):
            self._collect()
        start = arena.take(size)
        if start is None:
            self._collect()
            start = arena.take(size)
            if start is None:
                self.is_settled = True
                return None
        return start, size

    @property
    def starved_for_s(self) -> float:
        """Seconds for which there has been no slot, since this was first asked."""
        if self.starved_since is None:
            self.starved_since = time.monotonic()
        return time.monotonic() - self.starved_since

    def collect(self) -> None:
        """Make the slots free that the consumer has given back, and those that no reservation has any more."""
        self.settle()
        self.is_settled = False
        self._collect()
        self.is_settled = True

    def settle(self) -> None:
        """Find out which slots are free, where that is in doubt: those that are neither lent nor reserved."""
        if self.is_settled:
            return
        if not self.is_sent:
            self.lent.pop(self.sending, None)
        lent = [slot for slots in self.lent.values() for slot in slots]
        gone = {start for start, _ in lent}
        reserved = {
            start: (slot, keeper)
            for start, (slot, keeper) in self.reserved.items()
            if start not in gone and keeper() is not None
        }
        self.arena = Arena(self._start, self._stop, [*lent, *(slot for slot, _ in reserved.values())])
        self.reserved = reserved
        self.is_settled = True

    def _collect(self) -> None:
        arena = self.arena
        for start, (slot, keeper) in list(self.reserved.items()):
            if keeper() is None:
                del self.reserved[start]
                arena.give(*slot)
        returned = self._returned
        while True:
            with contextlib.suppress(BlockingIOError):
                # One call reads and keeps it: between two, a signal could lose what was read.
                returned.extend(map(os.read, *self._back))
            if not returned:
                break
            raw = returned[0]
            for ident in memoryview(raw).cast("Q"):
                # One that is not lent was given back twice, or says that the consumer has come or gone.
                for start, nbytes in self.lent.pop(ident, ()):
                    arena.give(start, nbytes)
            del returned[0]
            if not returned and len(raw) < _MOST_BACK:
                break
        self._taken_nbytes = 0
        self._ask_at_nbytes = max(_FEWEST_NBYTES, (arena.nbytes - arena.free_nbytes) // _PART)

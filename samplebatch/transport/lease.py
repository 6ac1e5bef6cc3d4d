"""Lease: the life of a slot at the consumer.

The arrays of a batch lie in its slot and keep a `Lease` alive, and so does everything made of them: slices, tensors,
Arrow arrays. When the last one is gone, in whatever order and on whatever thread, the slot's number goes back to the
producer.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from struct import Struct
from typing import Final

import numpy as np

from samplebatch.transport.channel_end import this_process

HELLO_IDENT: Final = (1 << 64) - 1
GOODBYE_IDENT: Final = (1 << 64) - 2
"""What goes back in place of a message's number when the consumer has taken hold of its end, or closes it."""

pack_ident = Struct("=Q").pack
_write = os.write


class Lease(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """The bytes of a slot, shape (nbytes,): what the arrays over it hang on.

    Attributes
    ----------
    first
        The lease of the message's first slot, where this is another slot of it.
    """

    __slots__ = ("first",)
    first: Lease


class Tie(weakref.ref[Lease]):
    """What notices that a lease is gone.

    Attributes
    ----------
    ident
        The number of its message.
    """

    __slots__ = ("ident",)
    ident: int


class Returns:
    """The pipe that slots go back through: a number of 8 bytes each, which is written at once or not at all.

    A slot may be given back at any moment, in the middle of giving back another and from several threads: so nothing is
    locked. A number that is not written for certain is written again; the producer takes each but once.

    Attributes
    ----------
    descriptor
        The pipe; -1 before `open`.
    lent
        The ties of the leases that are out, by number.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._process = 0
        self._pending: deque[int] = deque()
        self.lent: dict[int, Tie] = {}

    def open(self, descriptor: int) -> None:
        """Give slots back through a pipe, which belongs to this object from here on, and in this process."""
        self._process = this_process[0]
        self.descriptor = descriptor

    def gone(self, tie: Tie) -> None:
        """Give back what a lease stood for; the lease's tie calls it."""
        self.give(tie.ident)

    def give(self, ident: int) -> None:
        """Give back the slots of a message."""
        if self._process != this_process[0]:
            # A forked child has copies of leases that are its parent's.
            return
        self._pending.append(ident)
        self.lent.pop(ident, None)
        self.flush()

    def flush(self) -> bool:
        """Write the numbers that are pending, as far as the pipe takes them; tell whether it took all."""
        pending = self._pending
        while pending:
            try:
                ident = pending[0]
                _write(self.descriptor, pack_ident(ident))
                pending.remove(ident)
            except (IndexError, ValueError):
                # Another thread has been faster.
                continue
            except BlockingIOError:
                return False
            except OSError:
                # The producer is gone.
                pending.clear()
        return True

    @property
    def is_behind(self) -> bool:
        """Whether there are numbers that the pipe did not take."""
        return bool(self._pending)

    def recover(self) -> None:
        """Give back the slots whose leases are gone without having done so, because a signal came in between."""
        for ident, tie in list(self.lent.items()):
            if tie() is None:
                self.give(ident)

    def close(self) -> None:
        """Take nothing back any more: the arrays that are out stay as they are."""
        self.lent.clear()

    def __del__(self) -> None:
        # Not before: a thread that is giving back a slot must not write to a file that got the same number.
        if self.descriptor >= 0:
            os.close(self.descriptor)

"""Lease: the receiver's hold on a block, and the pipe by which blocks return.

The arrays of a batch lie in its block and keep a `Lease` alive, and so does everything made of them: slices, tensors,
Arrow arrays. When the last one is gone, in any order and on any thread, the block's number goes back to the
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
"""Goes back in place of a message's number when the consumer has taken hold of its end, or closes it."""

pack_ident = Struct("=Q").pack
_write = os.write


class Lease(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """The receiver's hold on a block: its bytes, shape (nbytes,), which every array over it keeps alive.

    Attributes
    ----------
    first
        The lease of the message's first block, where this is another block of it.
    """

    __slots__ = ("first",)
    first: Lease


class LeaseRef(weakref.ref[Lease]):
    """The weak reference to a lease that returns its block when the lease is gone.

    Attributes
    ----------
    ident
        The number of its message.
    """

    __slots__ = ("ident",)
    ident: int


class ReturnPipe:
    """The pipe that blocks go back through: a number of 8 bytes each, which is written at once or not at all.

    A block may be given back at any moment, in the middle of giving back another and from several threads: so nothing
    is locked. A number that is not written for certain is written again; the producer takes each but once.

    Attributes
    ----------
    descriptor
        The pipe; -1 before `open`.
    lent
        The references of the leases that are out, by number.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._process = 0
        self._pending: deque[int] = deque()
        self.lent: dict[int, LeaseRef] = {}

    def open(self, descriptor: int) -> None:
        """Give blocks back through a pipe, which belongs to this object from here on, and in this process."""
        self._process = this_process[0]
        self.descriptor = descriptor

    def gone(self, reference: LeaseRef) -> None:
        """Return the block of a lease that is gone; the lease's reference calls it."""
        self.give(reference.ident)

    def give(self, ident: int) -> None:
        """Give back the blocks of a message."""
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
        """Return the blocks of leases that are gone and did not do so because a signal interrupted them."""
        for ident, reference in list(self.lent.items()):
            if reference() is None:
                self.give(ident)

    def close(self) -> None:
        """Take nothing back any more: the arrays that are out stay as they are."""
        self.lent.clear()

    def __del__(self) -> None:
        # Not before: a thread that is giving back a block must not write to a file that got the same number.
        if self.descriptor >= 0:
            os.close(self.descriptor)

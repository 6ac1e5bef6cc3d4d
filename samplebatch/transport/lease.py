"""Lease: the life of a slot at the consumer.

The arrays of a batch lie in its slot and keep a `Lease` alive, and so does everything made of them: slices, tensors,
Arrow arrays. When the last one is gone, in whatever order and on whatever thread, the slot's number goes back to the
producer.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from struct import Struct
from typing import Any, Final

import numpy as np

HELLO_IDENT: Final = (1 << 64) - 1
GOODBYE_IDENT: Final = (1 << 64) - 2
"""What goes back in place of a message's number when the consumer has taken hold of its end, or closes it."""

_pack = Struct("=Q").pack
_write = os.write
_getpid = os.getpid


class Returns:
    """The pipe that slots go back through: a number of 8 bytes each, which is written at once or not at all.

    A slot may be given back at any moment, in the middle of giving back another and from several threads: so nothing is
    locked. A number that is not written for certain is written again; the producer takes each but once.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process = _getpid()
        self._pending: deque[int] = deque()
        self.lent: dict[int, weakref.ref[Lease]] = {}
        """The leases that are out, by number."""

    def give(self, ident: int) -> None:
        """Give back the slots of a message."""
        if _getpid() != self._process:
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
                _write(self._descriptor, _pack(ident))
            except IndexError:
                break
            except BlockingIOError:
                return False
            except OSError:
                # The producer is gone.
                pending.clear()
                break
            with contextlib.suppress(ValueError):
                pending.remove(ident)
        return True

    def recover(self) -> None:
        """Give back the slots whose leases are gone without having done so, because a signal came in between."""
        for ident, lease in list(self.lent.items()):
            if lease() is None:
                self.give(ident)

    def __del__(self) -> None:
        os.close(self._descriptor)


class Lease(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """The bytes of a slot, shape (nbytes,): what the arrays over it hang on.

    Attributes
    ----------
    returns
        Where it goes when it is gone.
    ident
        The number of its message.
    batch
        The batch that came with it.
    first
        The lease of the message's first slot, where this is another slot of it.
    """

    __slots__ = ("batch", "first", "ident", "returns")
    first: Lease
    returns: Returns
    ident: int
    batch: weakref.ref[Any]

    def __del__(self) -> None:
        # A slice of the bytes themselves has none of the attributes: it holds the lease, and is none.
        returns = getattr(self, "returns", None)
        if returns is not None:
            returns.give(self.ident)

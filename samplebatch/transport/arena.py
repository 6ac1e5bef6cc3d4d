"""Allocation of blocks in the shared memory of a channel (the arena).

Recently used memory is faster to write than unused memory, so returned blocks are reused first. Small blocks are
allocated at the end of the arena, and large blocks at its start, so that long-lived small blocks do not fragment the
space for large blocks.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any, Final

import numpy as np

from samplebatch.column.memory import ALIGNMENT
from samplebatch.transport.channel_end import this_process

HELLO_IDENT: Final = (1 << 64) - 1
GOODBYE_IDENT: Final = (1 << 64) - 2
"""Sent instead of a message number when the consumer binds or closes its end."""

pack_ident = Struct("=Q").pack
_write = os.write


class Lease(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Consumer-side bytes of a block, shape (nbytes,); deleting the last view returns the block to the producer.

    - `first`: lease of the message's first block; the leases of the message's other blocks reference it.
    """

    __slots__ = ("first",)
    first: Lease


class LeaseRef(weakref.ref[Lease]):
    """Weak reference to a lease; its callback returns the lease's block when the lease is deleted.

    - `ident`: number of the message that contains the block.
    """

    __slots__ = ("ident",)
    ident: int


class ReturnPipe:
    """Pipe through which a consumer returns blocks by message number; each number is 8 bytes and is written atomically.

    The pipe has no lock, because a signal handler may return a block while it interrupts the return of another block.
    If it is unknown after an interrupt whether a number was written, the number is written again; the producer
    processes each number only once.

    - `descriptor`: descriptor of the pipe; -1 before `open`.
    - `lent`: weak references to the existing leases, by message number.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._process = 0
        self._pending: deque[int] = deque()
        self.lent: dict[int, LeaseRef] = {}

    def open(self, descriptor: int) -> None:
        """Set the pipe's descriptor for blocks that this process receives; this object then owns the descriptor."""
        self._process = this_process[0]
        self.descriptor = descriptor

    def on_deleted(self, reference: LeaseRef) -> None:
        """Return a deleted lease's block to the producer; this method is the callback of the lease's weak reference."""
        self.give(reference.ident)

    def give(self, ident: int) -> None:
        """Return all blocks of a message to the producer."""
        if self._process != this_process[0]:
            # The leases in a forked child are copies of its parent's leases.
            return
        self._pending.append(ident)
        self.lent.pop(ident, None)
        self.flush()

    def flush(self) -> bool:
        """Write pending message numbers until the pipe is full; return whether all numbers were written."""
        pending = self._pending
        while pending:
            try:
                ident = pending[0]
                _write(self.descriptor, pack_ident(ident))
                pending.remove(ident)
            except (IndexError, ValueError):
                # Another thread has removed the number.
                continue
            except BlockingIOError:
                return False
            except OSError:
                # The producer has closed its end or died.
                pending.clear()
        return True

    @property
    def is_behind(self) -> bool:
        """Whether message numbers are pending because the pipe was full."""
        return bool(self._pending)

    def recover(self) -> None:
        """Repeat interrupted returns of blocks whose leases were deleted."""
        for ident, reference in list(self.lent.items()):
            if reference() is None:
                self.give(ident)

    def close(self) -> None:
        """Stop returning blocks; existing arrays remain valid."""
        self.lent.clear()

    def __del__(self) -> None:
        # Closed last: a thread that is returning a block must not write to another file with the same descriptor
        # number.
        if self.descriptor >= 0:
            os.close(self.descriptor)


SMALL_NBYTES: Final = 1 << 16
"""Maximum size in bytes of blocks that are cached by size after their return."""

Block = tuple[int, int]
"""Offset and size of a block in bytes."""

_MIN_NBYTES = 1 << 17
"""Bytes allocated between two checks for returned blocks; a check costs a call, and so few bytes stay cached."""

_PART = 4
"""Fraction of the lent bytes that is allocated between two checks, to limit the checks while a consumer returns
nothing. The blocks in use exceed the blocks in flight by at most this fraction."""

_MAX_BACK = 4096

_UP = ALIGNMENT - 1


def block_nbytes(nbytes: int) -> int:
    """Round up the size of a block to a multiple of 64 bytes.

    Small sizes are also rounded up to a size class, so that blocks can be reused.

    >>> [block_nbytes(n) for n in (0, 1, 64, 1000, 1025, 5000, 100_000)]
    [64, 64, 64, 1024, 1152, 5120, 100032]
    """
    step = ALIGNMENT if nbytes <= 8 * ALIGNMENT or nbytes > SMALL_NBYTES else 1 << (nbytes - 1).bit_length() - 4
    up = max(step, ALIGNMENT) - 1
    return max(ALIGNMENT, nbytes + up & ~up)


class Arena:
    """Allocator of byte ranges within an arena, used by `Blocks`.

    - `start`, `stop`: aligned start and end offset of the arena, in bytes.
    - `allocated`: start and size of each range that is already allocated.

    >>> arena = Arena(0, 1 << 20)
    >>> start = arena.take(200_000)
    >>> start, arena.take(1 << 20) is None
    (0, True)
    >>> arena.give(start, 200_000)
    >>> arena.free_nbytes == arena.nbytes
    True
    """

    def __init__(self, start: int, stop: int, allocated: Iterable[tuple[int, int]] = ()) -> None:
        self.nbytes = stop - start
        self.free_nbytes = 0
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._reusable: dict[int, list[int]] = {}
        for at, nbytes in (*sorted(allocated), (stop, 0)):
            if start < at:
                self._starts.append(start)
                self._stops.append(at)
                self.free_nbytes += at - start
            start = at + nbytes

    def take(self, nbytes: int) -> int | None:
        """Allocate a range of bytes and return the start of the range; return None if no free range is long enough.

        - `nbytes`: size of the range in bytes, as returned by `block_nbytes`.
        """
        reusable = self._reusable.get(nbytes)
        if reusable:
            self.free_nbytes -= nbytes
            return reusable.pop()
        if nbytes > self.free_nbytes:
            return None
        start = self._cut(nbytes)
        if start is None and self._reusable:
            self._merge_kept()
            start = self._cut(nbytes)
        if start is not None:
            self.free_nbytes -= nbytes
        return start

    def is_warm(self, nbytes: int) -> bool:
        """Return whether a recently returned block of `nbytes` bytes is free."""
        return bool(self._reusable.get(nbytes))

    def give(self, start: int, nbytes: int) -> None:
        """Free a range that `take` allocated."""
        self.free_nbytes += nbytes
        if nbytes > SMALL_NBYTES:
            self._merge(start, start + nbytes)
        elif nbytes in self._reusable:
            self._reusable[nbytes].append(start)
        else:
            self._reusable[nbytes] = [start]

    def _cut(self, nbytes: int) -> int | None:
        """Allocate a block from the first or the last free range that is long enough.

        Large blocks are allocated at the start of the first range, and small blocks at the end of the last range.
        """
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
        reusable, self._reusable = self._reusable, {}
        for nbytes, starts in reusable.items():
            for start in starts:
                self._merge(start, start + nbytes)

    def _merge(self, start: int, stop: int) -> None:
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


class Blocks:
    """Producer-side allocator of blocks, with records of the blocks that are lent to the consumer or reserved.

    `lent` and `reserved` contain all allocated blocks. Each change of `lent` or `reserved` is a single operation, and
    `arena` can be rebuilt from these two dicts. A signal handler may raise between any two calls, so `is_settled` is
    false until an allocated block is in `lent` or `reserved`. If `is_settled` is false, the next call to `take`,
    `collect` or `settle` rebuilds the arena.

    - `start`, `stop`: start and end offset of the arena, in bytes.
    - `back`: non-blocking pipe through which the consumer returns blocks by message number.

    The attributes are:
    - `arena`: allocator of the free bytes.
    - `lent`: blocks held by the consumer, by message number.
    - `reserved`: blocks of reservations by offset, each with a weak reference to the block's owner; a block is freed
      after its owner has been deleted.
    - `is_settled`: whether every allocated block is in `lent` or `reserved`.
    - `sending`: number of the newest message.
    - `is_sent`: whether the newest message was written.
    - `sent`: number of messages that were written before the newest message.
    - `starved_since`: time of the first `starved_for_s` call since an allocation failed; the caller resets it to None.
    """

    def __init__(self, start: int, stop: int, back: int) -> None:
        self._start, self._stop = start, stop
        self.arena = Arena(start, stop)
        self.lent: dict[int, tuple[Block, ...]] = {}
        self.reserved: dict[int, tuple[Block, Callable[[], Any]]] = {}
        self.is_settled = True
        self.sending = 0
        self.is_sent = False
        self.sent = 0
        self.starved_since: float | None = None
        self._back = ((back,), (_MAX_BACK,))
        self._returned: list[bytes] = []
        self._taken_nbytes = 0
        self._ask_at_nbytes = _MIN_NBYTES

    def take(self, nbytes: int) -> Block | None:
        """Allocate a block of at least `nbytes` bytes; return None if there is not enough contiguous free memory.

        The caller sets `is_settled` to True after adding the block to `lent` or `reserved`.
        """
        if not self.is_settled:
            self.settle()
        self.is_settled = False
        arena = self.arena
        size = block_nbytes(nbytes)
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
        """Seconds since `starved_since`; if `starved_since` is None, it is set to the current time."""
        if self.starved_since is None:
            self.starved_since = time.monotonic()
        return time.monotonic() - self.starved_since

    def collect(self) -> None:
        """Free the blocks that the consumer has returned, and reserved blocks whose owner has been deleted."""
        self.settle()
        self.is_settled = False
        self._collect()
        self.is_settled = True

    def settle(self) -> None:
        """Rebuild the arena after an interrupt, so that all memory that is neither lent nor reserved is free."""
        if self.is_settled:
            return
        if not self.is_sent:
            self.lent.pop(self.sending, None)
        lent = [block for blocks in self.lent.values() for block in blocks]
        lent_starts = {start for start, _ in lent}
        reserved = {
            start: (block, keeper)
            for start, (block, keeper) in self.reserved.items()
            if start not in lent_starts and keeper() is not None
        }
        self.arena = Arena(self._start, self._stop, [*lent, *(block for block, _ in reserved.values())])
        self.reserved = reserved
        self.is_settled = True

    def _collect(self) -> None:
        arena = self.arena
        for start, (block, keeper) in list(self.reserved.items()):
            if keeper() is None:
                del self.reserved[start]
                arena.give(*block)
        returned = self._returned
        while True:
            with contextlib.suppress(BlockingIOError):
                # One call reads and stores the numbers: a signal between two calls could lose them.
                returned.extend(map(os.read, *self._back))
            if not returned:
                break
            raw = returned[0]
            for ident in memoryview(raw).cast("Q"):
                # An unknown number was returned twice, or announces that the consumer has connected or closed.
                for start, nbytes in self.lent.pop(ident, ()):
                    arena.give(start, nbytes)
            del returned[0]
            if not returned and len(raw) < _MAX_BACK:
                break
        self._taken_nbytes = 0
        self._ask_at_nbytes = max(_MIN_NBYTES, (arena.nbytes - arena.free_nbytes) // _PART)

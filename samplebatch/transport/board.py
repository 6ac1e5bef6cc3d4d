"""Board: the shared memory of a broadcast, in which the next publication is written beside the ones that are read.

::

            block 0  block 1  block 2
    holds   3        4        5        newest: 5; publication 6 goes where 3 lies

Publications go to the blocks in turn. Each block says which one it holds, and none while one is written to it. A reader
copies the newest, and looks after that whether the block still says the same: if not, the reader was too slow, and
takes what is newest then. Readers write nothing, so there is nothing that a writer could wait for.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from samplebatch.errors import FormatError
from samplebatch.transport.peers import ProcessIdentity, is_alive
from samplebatch.transport.region import Region
from samplebatch.transport.schema import align
from samplebatch.transport.shared_counters import NBYTES, SharedCounters, fence

_PAGE: Final = os.sysconf("SC_PAGESIZE")
_MAGIC: Final = int.from_bytes(b"SBBOARD1", "little")
_MAGIC_WORD, _BLOCKS, _STATUS, _PID, _STARTED, _PUBLISHES = range(6)
_HOLDS, _VALUES_NBYTES, _HEAD_NBYTES, _HEAD_SUM = range(4)
_BOARD_WORDS = 8
_BLOCK_WORDS = 8
_WORDS = _PAGE // NBYTES

MIN_BLOCKS: Final = 2
MAX_BLOCKS: Final = (_WORDS - _BOARD_WORDS) // _BLOCK_WORDS


class Status(NamedTuple):
    """How far a broadcast is.

    Attributes
    ----------
    newest
        Number of the newest publication; 0 if there is none yet.
    closed
        Whether there will be no more.
    """

    newest: int
    closed: bool


class Content(NamedTuple):
    """The bytes of one publication in its block.

    Attributes
    ----------
    values
        The bytes of the values, shape (nbytes,).
    head
        The bytes that describe them, copied.
    head_sum
        The checksum that they must have.
    """

    values: npt.NDArray[np.uint8]
    head: bytes
    head_sum: int


class Board:
    """The blocks of a broadcast, and the counters that name the publication in each.

    Parameters
    ----------
    region
        The region that `create` laid out, in this process or another.

    Attributes
    ----------
    blocks
        Number of blocks.
    block_nbytes
        Bytes of a block: those of values and description together.

    Raises
    ------
    FormatError
        If `create` has not laid it out.
    """

    def __init__(self, region: Region) -> None:
        words = SharedCounters(region.array, _WORDS) if region.nbytes > _PAGE else None
        # Read once: the other processes may write to it.
        blocks = 0 if words is None else words[_BLOCKS]
        if words is None or words[_MAGIC_WORD] != _MAGIC or not MIN_BLOCKS <= blocks <= MAX_BLOCKS:
            raise FormatError(f"a broadcast's memory must be laid out as one, and these {region.nbytes} bytes are not")
        self.region = region
        self.blocks = blocks
        self.block_nbytes = (region.nbytes - _PAGE) // self.blocks
        self._words = words
        self._memory = region.array

    @classmethod
    def create(cls, block_nbytes: int, blocks: int) -> Self:
        """Lay out blocks of `block_nbytes` bytes each, rounded up to pages.

        Raises
        ------
        SharedMemoryError
            If so much memory is not free.
        """
        block_nbytes = -(-block_nbytes // _PAGE) * _PAGE
        region = Region.create(_PAGE + blocks * block_nbytes)
        words = SharedCounters(region.array, _WORDS)
        words[_BLOCKS], words[_MAGIC_WORD] = blocks, _MAGIC
        board = cls(region)
        board.hold()
        return board

    def read_only(self) -> Self:
        """View the board without the right to write to it, here and wherever that view is sent."""
        return type(self)(self.region.read_only())

    @property
    def status(self) -> Status:
        """How far the broadcast is."""
        word = self._words[_STATUS]
        return Status(word >> 1, bool(word & 1))

    @property
    def writer(self) -> ProcessIdentity:
        """The process that publishes, or is to begin with it."""
        pid = self._words[_PID]
        fence()
        return ProcessIdentity(pid, self._words[_STARTED])

    def wait(self, seen: Status, timeout_s: float) -> None:
        """Wait until the status is another than the one seen, or the time is over, or for no reason at all."""
        self._words.wait(_STATUS, seen.newest << 1 | seen.closed, timeout_s)

    # -- writing -------------------------------------------------------------------------------------------------------

    def claim(self) -> ProcessIdentity:
        """Become the process that publishes, unless another that still runs does; return which process does then."""
        return self._enter(publishes=1)

    def hold(self) -> ProcessIdentity:
        """Become the process that is to publish, and is missed if it dies before; returns as `claim` does."""
        return self._enter(publishes=0)

    def _enter(self, publishes: int) -> ProcessIdentity:
        own, words = ProcessIdentity.own(), self._words
        # The system lets go of the lock if this process dies.
        fcntl.lockf(self.region.fileno(), fcntl.LOCK_EX, NBYTES, _PID * NBYTES)
        try:
            writer = self.writer
            if words[_PUBLISHES] and (writer == own or is_alive(writer)):
                return writer
            words[_PUBLISHES] = 0
            words[_STARTED] = own.started
            fence()
            words[_PID] = own.pid
            words[_PUBLISHES] = publishes
            return own
        finally:
            fcntl.lockf(self.region.fileno(), fcntl.LOCK_UN, NBYTES, _PID * NBYTES)

    def begin(self) -> npt.NDArray[np.uint8]:
        """Return the block of the next publication, shape (block_nbytes,), which holds none from here on."""
        version = self.status.newest + 1
        self._words[self._word(version) + _HOLDS] = 0
        fence()
        return self._block(version)

    def publish(self, values_nbytes: int, head_nbytes: int, head_sum: int) -> int:
        """Commit the block that was written as the newest publication, wake waiting readers, and return its number.

        Parameters
        ----------
        values_nbytes
            Bytes of the values, from the block's beginning on.
        head_nbytes
            Bytes of their description, which begins at the next aligned place.
        head_sum
            Its checksum.
        """
        version = self.status.newest + 1
        at = self._word(version)
        words = self._words
        words[at + _VALUES_NBYTES], words[at + _HEAD_NBYTES], words[at + _HEAD_SUM] = (
            values_nbytes,
            head_nbytes,
            head_sum,
        )
        fence()
        words[at + _HOLDS] = version
        fence()
        words[_STATUS] = version << 1
        words.wake(_STATUS)
        return version

    def close(self) -> None:
        """Say that there will be no more publications."""
        self._words[_STATUS] |= 1
        self._words.wake(_STATUS)

    # -- reading -------------------------------------------------------------------------------------------------------

    def content(self, version: int) -> Content | None:
        """Find a publication, or None if it is not there any more.

        Raises
        ------
        FormatError
            If it does not lie within its block.
        """
        at = self._word(version)
        if not self.still_holds(version):
            return None
        _, values_nbytes, head_nbytes, head_sum = (self._words[at + i] for i in range(4))
        start = align(values_nbytes)
        if start + head_nbytes > self.block_nbytes:
            if not self.still_holds(version):
                return None
            raise FormatError(
                f"a publication must lie within its block of {self.block_nbytes} bytes, got {start + head_nbytes}"
            )
        block = self._block(version)
        head = block[start : start + head_nbytes].tobytes()
        return Content(block[:values_nbytes], head, head_sum) if self.still_holds(version) else None

    def still_holds(self, version: int) -> bool:
        """Tell whether a publication is there, and everything read of it since it was found is its own."""
        fence()
        return self._words[self._word(version) + _HOLDS] == version

    def _word(self, version: int) -> int:
        return _BOARD_WORDS + version % self.blocks * _BLOCK_WORDS

    def _block(self, version: int) -> npt.NDArray[np.uint8]:
        start = _PAGE + version % self.blocks * self.block_nbytes
        return self._memory[start : start + self.block_nbytes]

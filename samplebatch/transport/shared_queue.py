"""Shared memory for messages whose receivers are unknown when the messages are sent.

Each message is stored in its own region, called a parcel. The pickle contains the region's address; the process that
unpickles the address opens the sender's descriptor and maps the region. The words at the start of a region record the
region's state and owner::

    FREE --send--> SENT --receive--> HELD --last view gone--> FREE

The sender writes the first transition, and the receiver writes the second and third transitions. The transitions
require no lock, so a dead process cannot leave a lock acquired. On every send, the sender checks the oldest parcels:
the sender reuses free parcels soon after their release and frees the parcels of dead receivers.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import reduction
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.column.memory import ALIGNMENT
from samplebatch.column.threads import copy_all
from samplebatch.errors import FormatError, PeerDiedError, SharedMemoryError
from samplebatch.transport.peers import ProcessIdentity, is_alive
from samplebatch.transport.region import Region, SharedCounters, fence

MAX_PARCELS: Final = 128
"""Maximum number of regions of a process; each needs a descriptor."""

_FREE, _SENT, _HELD = range(3)
_TOKEN, _GENERATION, _STATE, _RECEIVER, _RECEIVER_STARTED, _WORDS = range(6)
_HEAD_NBYTES = ALIGNMENT
_PAGE = os.sysconf("SC_PAGESIZE")
_LOOKED_AT = 8
_LOOK_S = 0.2
"""Seconds between two checks whether the process that holds a parcel still runs."""
_HAS_PATHS = os.path.isdir("/proc/self/fd")

Span = tuple[int, int]
"""Offset and size in bytes of a buffer in its parcel."""


class Address(NamedTuple):
    """Address of a parcel.

    - `handle`: path of the sender's descriptor, or a duplicate that `multiprocessing` provides.
    - `token`: random number at the start of the region, which detects another file with the same descriptor number.
    - `generation`: number of the message in this region.
    - `nbytes`: size of the region in bytes.
    - `is_reused`: whether the sender reuses the region. If `is_reused` is false, the receiver releases the region's
      pages.
    """

    handle: Any
    token: int
    generation: int
    nbytes: int
    is_reused: bool


class _Parcel:
    """Region that contains one message, in the sending process."""

    def __init__(self, nbytes: int, *, is_reused: bool) -> None:
        self.region = Region.create(nbytes)
        self.nbytes = nbytes
        self.is_reused = is_reused
        self.words = SharedCounters(self.region.array, _WORDS)
        # A private copy, because receivers may write to the words.
        self._token, self._generation = secrets.randbits(63), 0  # messages carry signed numbers
        self._next_look_s = 0.0

    def seal(self, *, by_path: bool) -> Address:
        words = self.words
        self._generation += 1
        words[_TOKEN], words[_GENERATION] = self._token, self._generation
        fence()
        words[_STATE] = _SENT
        self._next_look_s = time.monotonic() + _LOOK_S
        file = self.region.fileno()
        handle = f"/proc/{os.getpid()}/fd/{file}" if by_path else reduction.DupFd(file)
        return Address(handle, self._token, self._generation, self.nbytes, self.is_reused)

    def is_abandoned(self) -> bool:
        """Return whether the parcel's receiver is dead; False if the next periodic check is not due yet."""
        words, now_s = self.words, time.monotonic()
        if words[_STATE] != _HELD or now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + _LOOK_S
        return not is_alive(ProcessIdentity(words[_RECEIVER], words[_RECEIVER_STARTED]))


class SharedQueueMemory:
    """Shared memory of a process for batches in `multiprocessing` queues and pipes.

    - `keep_nbytes`: maximum size in bytes of the memory that is retained for further messages; `keep` changes the
      limit.
    - `by_path`: whether receivers can open the sender's descriptors by path.

    >>> memory = SharedQueueMemory(keep_nbytes=1 << 20)
    >>> address, spans = memory.send([np.arange(3)])
    >>> [np.frombuffer(buffer, int).tolist() for buffer in receive(address, spans)]
    [[0, 1, 2]]
    >>> memory.close()
    """

    def __init__(self, keep_nbytes: int, *, by_path: bool = _HAS_PATHS) -> None:
        self.keep_nbytes = keep_nbytes
        self._by_path = by_path
        self._lock = threading.Lock()
        self._sent: deque[_Parcel] = deque()
        self._retained: list[_Parcel] = []
        self._filling: set[int] = set()
        """Threads that are filling a parcel; an interrupted thread remains in the set until it sends again."""

    def send(self, buffers: Sequence[Any]) -> tuple[Address, list[Span]] | None:
        """Copy buffers into a parcel.

        Returns
        -------
        Address of the parcel and span of each buffer; None if too many parcels are in transit or memory is exhausted.
        """
        arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        spans, end = [], _HEAD_NBYTES
        for array in arrays:
            spans.append((end, array.nbytes))
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT

        def copy(memory: npt.NDArray[np.uint8]) -> None:
            copy_all([memory[start : start + nbytes] for start, nbytes in spans], arrays, end)

        address = self._fill(end, copy)
        return None if address is None else (address, spans)

    def write(self, nbytes: int, write: Callable[[npt.NDArray[np.uint8]], object]) -> tuple[Address, Span] | None:
        """Send a parcel with one buffer that a function fills.

        - `nbytes`: size of the buffer in bytes.
        - `write`: function that fills the memory, shape (nbytes,). If the function raises an error, the parcel is not
          sent.

        Returns
        -------
        As in `send`.
        """
        span = _HEAD_NBYTES, nbytes
        address = self._fill(sum(span), lambda memory: write(memory[_HEAD_NBYTES : _HEAD_NBYTES + nbytes]))
        return None if address is None else (address, span)

    def _fill(self, nbytes: int, write: Callable[[npt.NDArray[np.uint8]], object]) -> Address | None:
        with self._lock:
            provide_parcel = self._find(nbytes)
            if provide_parcel is None:
                return None
            self._filling.add(threading.get_ident())
        try:
            parcel = provide_parcel()
            write(parcel.region.array)
            address = parcel.seal(by_path=self._by_path)
        except (SharedMemoryError, OSError):
            return None
        finally:
            with self._lock:
                self._filling.discard(threading.get_ident())
        with self._lock:
            self._sent.append(parcel)
        return address

    def keep(self, nbytes: int) -> None:
        """Set the maximum number of bytes to retain for reuse, and free retained memory that exceeds the limit."""
        with self._lock:
            self.keep_nbytes = nbytes
            self._take_back(MAX_PARCELS)
            self._make_room(0)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all regions that are in transit or retained."""
        with self._lock:
            return sum(parcel.nbytes for parcel in (*self._sent, *self._retained))

    @property
    def lent_nbytes(self) -> int:
        """Size in bytes of the regions that are in transit or held by running receivers."""
        with self._lock:
            self._take_back(MAX_PARCELS)
            return sum(parcel.nbytes for parcel in self._sent)

    @property
    def unreceived(self) -> int:
        """Number of messages that have not been received."""
        with self._lock:
            return sum(parcel.words[_STATE] == _SENT for parcel in self._sent)

    def wait_until_received(self, timeout_s: float, *, while_true: Callable[[], bool] = lambda: True) -> None:
        """Wait until every message has been received, the timeout elapses or `while_true` returns False."""
        deadline = time.monotonic() + timeout_s
        while self.unreceived and time.monotonic() < deadline and while_true():
            time.sleep(0.005)

    def close(self) -> None:
        """Free all regions. Messages that have been received remain valid in the receivers; other messages are lost."""
        with self._lock:
            parcels = [*self._sent, *self._retained]
            self._sent.clear()
            self._retained.clear()
        for parcel in parcels:
            parcel.region.close()

    def _find(self, nbytes: int) -> Callable[[], _Parcel] | None:
        """Return a function that returns a reused or new parcel; return None if too many parcels are in transit."""
        self._take_back(_LOOKED_AT)
        size = _round_up(nbytes)
        fitting = [parcel for parcel in self._retained if size <= parcel.nbytes <= 2 * size]
        if fitting:
            parcel = min(fitting, key=lambda candidate: candidate.nbytes)
            self._retained.remove(parcel)
            return lambda: parcel
        if len(self._sent) + len(self._filling) >= MAX_PARCELS:
            self._take_back(MAX_PARCELS)
            if len(self._sent) + len(self._filling) >= MAX_PARCELS:
                return None
        room = self._make_room(size)
        return partial(_make_parcel, size, nbytes, is_reused=room >= size)

    def _make_room(self, nbytes: int) -> int:
        """Free least recently used regions until `nbytes` more bytes fit into `keep_nbytes`; return the unused part."""
        room = self.keep_nbytes - sum(parcel.nbytes for parcel in (*self._sent, *self._retained) if parcel.is_reused)
        while self._retained and (
            room < nbytes or len(self._sent) + len(self._retained) + len(self._filling) >= MAX_PARCELS
        ):
            oldest = self._retained.pop(0)
            room += oldest.nbytes
            oldest.region.close()
        return room

    def _take_back(self, count: int) -> None:
        """Check the oldest parcels in transit, and reclaim released parcels."""
        for _ in range(min(count, len(self._sent))):
            # Only parcels without a receiver leave the queue: a signal may arrive between any two calls.
            parcel = self._sent[0]
            if parcel.words[_STATE] == _FREE and parcel.is_reused:
                del self._sent[0]
                self._retained.append(parcel)
            elif parcel.words[_STATE] == _FREE or parcel.is_abandoned():
                # Memory of a dead process is not reused: its forked children may still read it.
                del self._sent[0]
                parcel.region.close()
            else:
                self._sent.rotate(-1)


def _make_parcel(nbytes: int, used_nbytes: int, *, is_reused: bool) -> _Parcel:
    parcel = _Parcel(nbytes, is_reused=is_reused)
    parcel.region.warm(0, used_nbytes)
    return parcel


class _Hold:
    """Parcel in the receiving process; the parcel is released when the last array that views the parcel is deleted."""

    def __init__(self, region: Region, address: Address) -> None:
        words = SharedCounters(region.array, _WORDS)
        if words[_TOKEN] != address.token or words[_GENERATION] != address.generation or words[_STATE] != _SENT:
            raise FormatError("a batch in shared memory must be received only once, got one received before")
        words[_RECEIVER], words[_RECEIVER_STARTED] = identity = _own_identity()
        fence()
        words[_STATE] = _HELD
        self._words, self._region, self._is_reused, self._process = words, region, address.is_reused, identity.pid
        self.__array_interface__ = region.array.__array_interface__

    def __del__(self) -> None:
        # A forked child has a copy of this object, but does not hold the parcel. The sender detects the process's end.
        if getattr(self, "_process", None) != os.getpid() or sys.is_finalizing():
            return
        if not self._is_reused:
            self._region.discard(_PAGE)
        fence()
        self._words[_STATE] = _FREE


_identity: ProcessIdentity | None = None


def _own_identity() -> ProcessIdentity:
    global _identity
    if _identity is None or _identity.pid != os.getpid():
        _identity = ProcessIdentity.own()
    return _identity


def receive(address: Address, spans: Sequence[Span]) -> list[npt.NDArray[np.uint8]]:
    """Map a parcel, and view its buffers. The receiver holds the parcel until the last view is deleted.

    Raises PeerDiedError if the sender has ended. Raises FormatError if the message was received before, or the parcel
    does not match the address. Raises OSError if the system does not permit this process to open the sender's
    descriptors.
    """
    region = Region.attach(_open(address.handle), address.nbytes)
    region.close_descriptor()
    for start, nbytes in spans:
        if not (start >= _HEAD_NBYTES and nbytes >= 0 and start + nbytes <= region.nbytes):
            raise FormatError(
                f"a buffer must be within {region.nbytes} bytes of shared memory, got {nbytes} bytes at {start}"
            )
    array = np.asarray(_Hold(region, address))
    return [array[start : start + nbytes] for start, nbytes in spans]


def _open(handle: Any) -> int:
    if not isinstance(handle, str):
        descriptor: int = handle.detach()
        return descriptor
    try:
        return os.open(handle, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerDiedError(
            f"a batch in shared memory must be received while its sender runs, got one whose {handle} no longer "
            "exists; keep the sending process running until then"
        ) from error
    except OSError as error:
        error.add_note(
            "To receive a batch in shared memory, a process must have the right to open its sender's descriptors; "
            "batches that are pickled completely do not need it."
        )
        raise


def _round_up(nbytes: int) -> int:
    """Round a size up to full pages, or by less than 1/64 if large, so that messages of similar size reuse a region.

    >>> _round_up(1), _round_up(100_000), _round_up(16 << 20)
    (4096, 102400, 16777216)
    """
    grain = max(_PAGE, 1 << max(0, nbytes.bit_length() - 7))
    return -(-nbytes // grain) * grain

"""Base class of channel ends: ownership of the end, and monitoring of the process at the other end.

The memory of a channel starts with a header, in which each end records its process and its state::

    FREE --given to a process that starts--> GIVEN --it has started--> BOUND --close, or a process that exits--> CLOSED
      |                                                                  ^
      +--closed by its creator, unused--> LEFT                           +--used by any process-- FREE, GIVEN, LEFT

If the descriptors of an end are closed but the header does not record a close, the end's process has died, possibly
before it bound the end. A dead process does not always cause an end of file on its pipe, because forked processes may
still have the pipe's descriptors open. Therefore each channel end also watches the process of the other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import traceback
import weakref
from collections.abc import Iterator
from multiprocessing import util
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from samplebatch.errors import ChannelClosedError, OwnershipError, PeerDiedError, SampleBatchError
from samplebatch.transport import peers
from samplebatch.transport.region import Region, fence
from samplebatch.transport.wire import pack_metadata

HEADER_NBYTES: Final = 1 << 14
"""Size of the header at the start of the region in bytes; the arena follows."""

FAILURE_START: Final = 1 << 12
FAILURE_NBYTES: Final = HEADER_NBYTES - FAILURE_START
"""Offset in the header of a producer's error, which is reported without waiting for a block."""

_MAX_REASON, _MAX_DETAILS = FAILURE_NBYTES // 36, FAILURE_NBYTES // 9
"""Maximum length in characters: JSON may need six bytes per character, twelve per surrogate pair."""

PRODUCER: Final = 8
CONSUMER: Final = 16
"""Offset in the header of the words of each end."""

STATE, _PID, _STARTED, WATCHED = range(4)
FREE, _BOUND, CLOSED, _GIVEN, _LEFT = range(5)
_UNCLAIMED: Final = (FREE, _GIVEN, _LEFT)

LOOK_S: Final = 0.1
"""Maximum delay in seconds until the process that binds the other end is noticed."""

_NAMES = {PRODUCER: "producer", CONSUMER: "consumer"}
this_process = [os.getpid()]
"""Id of this process, in a list so that a fork updates it for all modules."""


def _update_this_process() -> None:
    this_process[0] = os.getpid()


os.register_at_fork(after_in_child=_update_this_process)


LONG_S: Final = 1.0
"""Maximum seconds between two checks of a waiting end."""


class Memory(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes of a region.

    NumPy replaces the base of a view with the base's own base if the base's base has the view's class. Arrays over a
    block must keep the block alive, so the region's bytes have a class that differs from the classes of blocks and
    arrays.
    """

    __slots__ = ()


class ChannelEnd(peers.Transferable):
    """Base class of `Producer` and `Consumer`; an end belongs to the first process that uses the end."""

    _side: int
    _peer_side: int
    _pipe: int
    _back: int

    def __init__(self, region: Region, *, allow_pickle: bool = False, recipients: dict[int, peers.Recipient]) -> None:
        self._region: Region | None = region
        self._memory = region.array.view(Memory)
        self._capacity_nbytes = region.nbytes - HEADER_NBYTES
        self._words = region.memory[:FAILURE_START].cast("Q")
        self._allow_pickle = allow_pickle
        self._recipients = recipients
        """Processes that received ends of the channel from this process, by end, shared by both ends."""
        self._made_in = this_process[0]
        self._holder = 0
        """Process that this end belongs to, or belonged to; None if unknown."""
        self._owner = 0
        """The same process, once it has used the end."""
        self._watch: peers.ProcessWatch | None = None
        self._peer_fd: int | None = None
        """Descriptor that is readable after the death of the watched process of the other end, if supported."""
        self._peer_dead = False
        self._at_exit = self._register_at_exit()
        util.register_after_fork(self, type(self)._after_fork)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called in this process."""
        return self._region is None

    @property
    def capacity_nbytes(self) -> int:
        """Size of the arena in bytes: maximum total size of batches in flight and batches that the consumer uses."""
        return self._capacity_nbytes

    # -- ownership -----------------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        """Bind this end to this process, unless the end is already bound to it.

        Raises OwnershipError if another process has bound this end. Raises ChannelClosedError if this end is closed.
        """
        if self._owner != this_process[0]:
            self._bind()

    def _hold(self) -> bool:
        """Record this process as the end's holder; return False if another process has already claimed the end.

        A process that receives an end calls this method immediately, so that the death of the process is detected even
        before the first use of the end. Until its first use of the end, the process may pass the end to another
        process.
        """
        region, words, side = self._region, self._words, self._side
        if region is None or self._is_held():
            return region is not None
        with _claim(region, side):
            if words[side + STATE] not in _UNCLAIMED:
                return False
            # Before the header is written: a signal in between leaves an end that can be claimed again.
            self._holder = this_process[0]
            self._write_state(_BOUND)
        self._greet()
        return True

    def _is_held(self) -> bool:
        """Return whether the header records this process as the holder of the end."""
        words, side, pid = self._words, self._side, this_process[0]
        return self._holder == pid == words[side + _PID] and words[side + STATE] not in _UNCLAIMED

    def _write_state(self, state: int) -> None:
        words, side = self._words, self._side
        words[side + _PID], words[side + _STARTED] = peers.ProcessIdentity.own()
        fence()
        words[side + STATE] = state

    def _greet(self) -> None:
        """Notify the other end, if it is waiting, that it must watch this process."""

    def _bind(self) -> None:
        name = _NAMES[self._side]
        if self._region is None:
            raise self._closed_error()
        if not self._hold():
            raise OwnershipError(
                f"a {name} must be used by process {self._words[self._side + _PID]}, which used it first, got process "
                f"{this_process[0]}; create one channel per process"
            )
        self._begin()
        self._owner = this_process[0]

    def _begin(self) -> None:
        """Prepare the end for its first use in this process; called again if a signal interrupted the first call."""

    def _closed_error(self) -> ChannelClosedError:
        return ChannelClosedError(f"the {_NAMES[self._side]} must be open to be used, got a closed one")

    def _was_closed_meanwhile(self, error: Exception) -> bool:
        """Return whether an operation failed because another thread has closed this end."""
        return self._region is None and not isinstance(error, SampleBatchError)

    def _after_fork(self) -> None:
        """Claim this end in a forked child whose arguments contain it."""
        if any(value is self for value in peers.arguments_of(multiprocessing.current_process())):
            self._hold()
        if self._is_held():
            # The fork has cleared the exit handlers of the child.
            self._at_exit = self._register_at_exit()

    def _register_at_exit(self) -> util.Finalize:
        return util.Finalize(None, _close_at_exit, (weakref.ref(self),), exitpriority=100)

    def _hand_over(self) -> tuple[Region, int, int]:
        """Return memory and pipes for the process that receives this end; reject an end that has been used."""
        name = _NAMES[self._side]
        if self._region is None:
            raise ChannelClosedError(f"the {name} must be open to be sent to a process, got a closed one")
        if not self._give(peers.Recipient.find_spawning()):
            raise OwnershipError(
                f"the {name} must be sent to another process before its first use, got one of process "
                f"{self._words[self._side + _PID]}; create another channel"
            )
        return self._region, self._pipe, self._back

    def _give(self, recipient: peers.Recipient | None) -> bool:
        region, words, side = self._region, self._words, self._side
        if region is None:
            return False
        with _claim(region, side):
            is_own = self._is_held() and not self._owner
            if words[side + STATE] not in _UNCLAIMED and not is_own:
                return False
            self._holder = 0
            self._write_state(_GIVEN)
        self._recipients.pop(side, None)
        if recipient is not None:
            self._recipients[side] = recipient
        return True

    # -- the other end -------------------------------------------------------------------------------------------------

    def _peer_state(self) -> int:
        return int(self._words[self._peer_side + STATE])

    def _peer_was_left(self) -> bool:
        """Return whether the other end has been closed."""
        return self._peer_state() in (CLOSED, _LEFT)

    def _peer_identity(self) -> peers.ProcessIdentity:
        words, side = self._words, self._peer_side
        return peers.ProcessIdentity(int(words[side + _PID]), int(words[side + _STARTED]))

    def _look(self) -> None:
        """Start watching the process of the other end, if that process has bound the end and is not watched yet."""
        if self._watch is not None or self._peer_state() not in (_BOUND, CLOSED):
            return
        # After this fence, everything that the process wrote before its state is visible.
        fence()
        identity = self._peer_identity()
        if identity.pid == this_process[0]:
            return
        self._watch = peers.ProcessWatch(identity)
        if self._watch.fileno() >= 0:
            self._await_too(self._watch.fileno())
            self._peer_fd = self._watch.fileno()
        self._peer_has_died()

    def _await_too(self, descriptor: int) -> None:
        """Add a descriptor that ends this end's waits when the descriptor is readable."""
        raise NotImplementedError

    def _await_no_more(self, descriptor: int) -> None:
        """Remove a descriptor that `_await_too` has added."""
        raise NotImplementedError

    def _peer_has_died(self) -> bool:
        """Return whether the process that holds, or will receive, the other end has died."""
        if self._watch is None:
            self._look()
        if not self._peer_dead:
            if self._watch is None:
                self._peer_dead = self._is_orphaned()
            elif not self._watch.is_alive():
                self._peer_dead = self._watch.identity == self._peer_identity()
                if not self._peer_dead:
                    # The dead process had sent the end to another process.
                    self._unwatch()
        return self._peer_dead

    def _is_orphaned(self) -> bool:
        """Return whether the process that created or received the other end died before any process claimed it."""
        state, identity = self._peer_state(), self._peer_identity()
        is_own = identity.pid == this_process[0]
        if state == FREE:
            is_over = not is_own and not peers.is_alive(identity)
        else:
            recipient = self._recipients.get(self._peer_side) if state == _GIVEN and is_own else None
            is_over = recipient is not None and recipient.has_ended()
        # Before its end, the process may have claimed the channel end or sent it to another process.
        return is_over and state == self._peer_state() and identity == self._peer_identity()

    def _unwatch(self) -> None:
        watch, self._watch = self._watch, None
        descriptor, self._peer_fd = self._peer_fd, None
        if descriptor is not None:
            self._await_no_more(descriptor)
        if watch is not None:
            watch.close()

    def _peer_died(self) -> PeerDiedError:
        name, state = _NAMES[self._peer_side], self._peer_state()
        if state in _UNCLAIMED:
            return PeerDiedError(
                f"the {name} must be closed by the process that has it, which died before it attached to the memory"
            )
        return PeerDiedError(
            f"the {name} must be closed before its process ends, got process {self._peer_identity().pid} that died "
            "without closing it"
        )

    # -- closing -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close this end. Safe to call twice."""
        if self._region is None:
            return
        is_holder = self._is_held()
        if is_holder:
            self._words[self._side + STATE] = CLOSED
        elif self._made_in == this_process[0]:
            self._leave()
        self._at_exit.cancel()
        self._region = None
        self._shut(notify=is_holder)
        self._peer_fd = None
        if self._watch is not None:
            self._watch.close()
        self._owner = self._holder = 0
        # A closed end does not retain its memory.
        self._memory = np.empty(0, np.uint8).view(Memory)
        self._words = memoryview(b"").cast("Q")

    def _is_another_processes(self) -> bool:
        """Return whether another process holds this end or will receive this end."""
        return not self._is_held() and self._words[self._side + STATE] != FREE

    def _leave(self) -> None:
        """Record that the creating process closed this end without using or sending it."""
        region, words, side = self._region, self._words, self._side
        if region is not None:
            with _claim(region, side):
                if words[side + STATE] == FREE:
                    words[side + STATE] = _LEFT

    def _shut(self, *, notify: bool) -> None:
        """Close the pipes; if `notify` is true, notify the other end first."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        """Report to the other end, if possible, the error that ends this process."""

    def __enter__(self) -> Self:
        # The end of a process that has sent nothing must be detected, too.
        self._acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not _is_orderly(error):
            self._fail(error)
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_region", None) is None:
            return
        if self._holder == this_process[0] and not self._owner:
            # A process that deletes an unused end, for example because its startup failed, has not ended normally.
            self._holder = 0
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} must be pickled by multiprocessing, got another pickler")


def _close_at_exit(reference: weakref.ref[ChannelEnd]) -> None:
    """Close the end of an exiting process, which then does not appear dead; report the process's error, if any."""
    end = reference()
    if end is None:
        return
    if end._is_another_processes():
        end.close()
        return
    error = peers.exit_error()
    end.__exit__(None if error is None else type(error), error, None)


def _is_orderly(error: BaseException) -> bool:
    """Return whether an exception is the normal end of a process or a generator."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)


def describe_error(error: BaseException) -> tuple[str, str]:
    """Format an error as one line, and return the line and the traceback."""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def pack_failure(reason: str, details: str) -> bytes:
    """Encode the reason and the details of a failure for the header; long texts are truncated at their start."""
    return pack_metadata({"reason": reason[-_MAX_REASON:], "details": details[-_MAX_DETAILS:]})


@contextlib.contextmanager
def _claim(region: Region, side: int) -> Iterator[None]:
    """Acquire the lock for claiming an end; the system releases the lock if this process dies."""
    try:
        descriptor = region.fileno()
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, side)
    except (OSError, ValueError):
        # Without locks on the memory, simultaneous first uses by two processes are not detected.
        yield
        return
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, side)

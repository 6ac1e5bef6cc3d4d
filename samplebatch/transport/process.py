"""Which process it is at the other end, and whether it still runs."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import NamedTuple, Self

_PROC = Path("/proc")
_MAX_PID = (1 << 31) - 1
"""No process has a higher number: what says so is no word of a process that was there."""


class Identity(NamedTuple):
    """A process, told apart from a later one with the same number.

    Attributes
    ----------
    pid
        Its number.
    started
        When it began, in the system's ticks since it booted; 0 where the system does not tell.
    """

    pid: int
    started: int

    @classmethod
    def own(cls) -> Self:
        """Return the calling process's.

        >>> Identity.own().pid == os.getpid()
        True
        """
        pid = os.getpid()
        return cls(pid, (_state_of(pid) or ("", 0))[1])


class Watch:
    """A process that is watched.

    Where there are descriptors of processes it holds one, which is readable once the process has ended.

    Parameters
    ----------
    identity
        The process, as it has told of itself.

    Examples
    --------
    >>> watch = Watch(Identity.own())
    >>> watch.is_alive()
    True
    >>> watch.close()
    >>> Watch(Identity(os.getpid(), started=1)).is_alive()
    False
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._descriptor = _open(identity.pid)
        # Asked after opening: what is open now is this process, or it is gone.
        self._is_over = not _is_there(identity)

    def fileno(self) -> int:
        """Return the descriptor, or -1 if there is none."""
        return self._descriptor

    def is_alive(self) -> bool:
        """Tell whether the process still runs. One that has ended and waits for its parent does not."""
        if not self._is_over:
            self._is_over = self._has_ended()
        return not self._is_over

    def _has_ended(self) -> bool:
        if self._descriptor < 0:
            return not _is_there(self.identity)
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptor; `is_alive` may still be asked."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()


def is_alive(identity: Identity) -> bool:
    """Tell whether a process still runs, without watching it any longer.

    >>> is_alive(Identity.own()), is_alive(Identity(os.getpid(), started=1))
    (True, False)
    """
    return _is_there(identity)


def _open(pid: int) -> int:
    if not hasattr(os, "pidfd_open") or not 0 < pid <= _MAX_PID:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        # It has ended, the kernel has no such descriptors, or there are too many: asking by number does as well.
        return -1


def _is_there(identity: Identity) -> bool:
    if not 0 < identity.pid <= _MAX_PID:
        return False
    try:
        os.kill(identity.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It is somebody else's, so it is there.
        pass
    found = _state_of(identity.pid)
    if found is None:
        return not _PROC.joinpath("self/stat").exists()
    state, started = found
    return state not in "ZX" and identity.started in (0, started)


def _state_of(pid: int) -> tuple[str, int] | None:
    """Return a process's state and when it began, or None if it is gone or the system does not tell."""
    try:
        line = _PROC.joinpath(str(pid), "stat").read_text()
    except OSError:
        return None
    # The name of its program comes before, in parentheses, and may hold anything.
    fields = line[line.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])

"""Poller: descriptors that are waited on together, and one that stands for all of them."""

from __future__ import annotations

import select
import sys
from typing import Any, Final

_HAS_EPOLL: Final = sys.platform == "linux"


class Poller:
    """Descriptors to be waited on until one of them is readable.

    Parameters
    ----------
    *descriptors
        Some of them; more can be registered.

    Examples
    --------
    >>> import os
    >>> reader, writer = os.pipe()
    >>> poller = Poller(reader)
    >>> poller.poll(0.0)
    []
    >>> _ = os.write(writer, b"x")
    >>> poller.poll(None) == [reader]
    True
    >>> poller.close(), os.close(reader), os.close(writer)
    (None, None, None)
    """

    def __init__(self, *descriptors: int) -> None:
        self._first = descriptors[0] if descriptors else -1
        self._poll: Any = select.epoll() if _HAS_EPOLL else select.poll()
        for descriptor in descriptors:
            self.register(descriptor)

    def register(self, descriptor: int) -> None:
        """Wait on one more."""
        self._poll.register(descriptor, select.POLLIN)

    def replace(self, descriptor: int, other: int) -> None:
        """Wait on another descriptor in place of one."""
        self.unregister(descriptor)
        self.register(other)
        if self._first == descriptor:
            self._first = other

    def unregister(self, descriptor: int) -> None:
        """Wait on one less."""
        self._poll.unregister(descriptor)

    def poll(self, timeout_s: float | None) -> list[int]:
        """Wait until one or more are readable, for at most so many seconds, and return which."""
        if timeout_s is None:
            found = self._poll.poll()
        else:
            found = self._poll.poll(timeout_s if _HAS_EPOLL else timeout_s * 1000)
        return [descriptor for descriptor, _ in found]

    def wait(self, timeout_s: float) -> None:
        """Wait as `poll` does, whichever it is."""
        self._poll.poll(timeout_s if _HAS_EPOLL else timeout_s * 1000)

    def fileno(self) -> int:
        """Return a descriptor that is readable when one of them is; without epoll, the first of them."""
        return int(self._poll.fileno()) if _HAS_EPOLL else self._first

    def close(self) -> None:
        """Wait on none of them any more; they stay open."""
        if _HAS_EPOLL:
            self._poll.close()

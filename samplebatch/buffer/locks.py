"""Locks of buffers: one thread at a time reads the rows of a buffer, or changes them.

A process must not be forked while another thread changes a buffer: the child would have half of the change, and a lock
that nobody releases. So a fork waits for all locks.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _thread import RLock

# `valuerefs` copies at once, while other threads may add.
_locks: weakref.WeakValueDictionary[int, RLock] = weakref.WeakValueDictionary()
_forking = threading.RLock()
_held: list[RLock] = []


def new_lock() -> RLock:
    """Make a lock that its thread may take several times, and that is free in a forked child.

    Who holds one takes no other, or a fork could wait for ever.
    """
    lock = threading.RLock()
    _locks[id(lock)] = lock
    return lock


def _take_all() -> None:
    _forking.acquire()
    for lock in filter(None, (reference() for reference in _locks.valuerefs())):
        lock.acquire()
        _held.append(lock)


def _release_all() -> None:
    while _held:
        _held.pop().release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take_all, after_in_parent=_release_all, after_in_child=_release_all)

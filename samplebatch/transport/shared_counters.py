"""SharedCounters: numbers in shared memory, by which processes tell each other where they stand."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

NBYTES = 8
"""Bytes of a counter."""

_FUTEX_CALLS = {
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "loongarch64": 98,
    "ppc64le": 221,
    "s390x": 238,
}
"""Number of the system call on 64-bit Linux, by machine."""

_FUTEX = _FUTEX_CALLS.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 1 << 32 else None
_WAIT, _WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1
_LOW_HALF = 0 if sys.byteorder == "little" else 4
_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 2e-3


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_call = ctypes.CDLL(None, use_errno=True).syscall
_call.restype = ctypes.c_long
_lock = threading.Lock()


def _forget_lock() -> None:
    """Take a new one in a forked child: another thread may have held its parent's."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def fence() -> None:
    """Let no access to memory move across, in either direction.

    x86 keeps writes in order and reads in order by itself; ARM and others do not. Python has no fence, but a lock that
    is freed orders what came before it, one that is taken what comes after it, and the two keep their order.
    """
    with _lock:
        pass
    with _lock:
        pass


class SharedCounters:
    """Numbers of 64 bits in shared memory, each with one writer at a time, for boards and parcels.

    A number is read and written as a whole: nobody sees half of one.

    Parameters
    ----------
    memory
        The bytes, at an address that is a multiple of 8. They live as long as the counters.
    count
        Number of counters.

    Examples
    --------
    >>> counters = SharedCounters(np.zeros(64, np.uint8), 8)
    >>> counters[3] = 2**64 - 1
    >>> counters[3], counters[0]
    (18446744073709551615, 0)
    """

    __slots__ = ("_address", "_base", "_values")

    def __init__(self, memory: npt.NDArray[np.uint8], count: int) -> None:
        self._base = memory
        self._address = memory.ctypes.data
        self._values: Any = memory[: count * NBYTES].data.cast("Q")

    def __getitem__(self, index: int) -> int:
        value: int = self._values[index]
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self._values[index] = value

    def wait(self, index: int, seen: int, timeout_s: float) -> None:
        """Wait until a counter differs from the number seen, or the time is over; it may return earlier.

        The memory may be read-only.

        Parameters
        ----------
        index
            Of the counter.
        seen
            The number that it had.
        timeout_s
            Seconds to wait at the most.
        """
        if _FUTEX is None:
            self._watch(index, seen, timeout_s)
            return
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        # The kernel compares the lower half once more before it lets the thread sleep, so no change is missed.
        _call(_FUTEX, self._half(index), _WAIT, ctypes.c_uint(seen & 0xFFFFFFFF), ctypes.byref(timeout), None, 0)

    def wake(self, index: int) -> None:
        """Wake the threads of all processes that wait for a counter."""
        if _FUTEX is not None:
            _call(_FUTEX, self._half(index), _WAKE, _EVERYBODY, None, None, 0)

    def _half(self, index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + index * NBYTES + _LOW_HALF)

    def _watch(self, index: int, seen: int, timeout_s: float) -> None:
        """Look again and again, ever less often."""
        deadline = time.monotonic() + timeout_s
        nap_s = _SHORTEST_NAP_S
        while self._values[index] == seen:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(nap_s, left_s))
            nap_s = min(nap_s * 2, _LONGEST_NAP_S)

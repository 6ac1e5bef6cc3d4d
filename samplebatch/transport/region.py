"""Anonymous shared memory (a region), which is passed to other processes by its descriptor."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from multiprocessing import reduction
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from samplebatch.errors import FormatError, SharedMemoryError

_STEP_NBYTES = 64 << 20
"""Bytes reserved by one call, so that a signal that interrupts it costs little."""

_UNASKED_NBYTES = 1 << 20
"""Maximum bytes that are reserved without a check of free memory, which would take longer than reserving them."""

_HAS_MEMFD = hasattr(os, "memfd_create")

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0
"""Seals against truncation: a process that reads a page beyond the end of a file is killed."""

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_HAS_POPULATE = sys.platform == "linux"
_NAMED_FOLDER = "/dev/shm"

_MEMINFO = "/proc/meminfo"
_GROUPS = "/proc/self/cgroup"
_MOUNT = "/sys/fs/cgroup"
_MAX_NBYTES = 1 << 16

_system = ctypes.CDLL(None, use_errno=True)
_mmap = _system.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _system.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _system.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """Mapped pages, which are unmapped when the last array that views them is deleted.

    `mmap.mmap` is not used, because an `mmap` object keeps a duplicate descriptor open while any view exists.
    """

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
        if address is None or address == _MAP_FAILED:
            raise _no_memory(nbytes, ctypes.get_errno(), free_nbytes())
        self.address: int = address
        self.nbytes = nbytes
        self._unmap = partial(_munmap, address, nbytes)
        self.__array_interface__ = {"data": (address, not writable), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Most kernels reject huge pages for shared memory, which is not an error here.
            _madvise(address, nbytes, mmap.MADV_HUGEPAGE)

    def __del__(self) -> None:
        if hasattr(self, "_unmap"):
            self._unmap()


class Region:
    """Anonymous shared memory, identified by a descriptor.

    A region can be sent to child processes like the ends of a `multiprocessing.Pipe`: as an argument under every start
    method, and through the queues and pipes of `multiprocessing`. The system frees the pages after every process with a
    mapping or descriptor of the region has closed the region or died, so no memory leaks.

    `create` reserves every page, so that a lack of memory raises an error immediately, instead of causing a fatal
    signal later.

    - `nbytes`: requested size of the memory in bytes.
    - `writable`: whether this process has mapped the memory for writing.

    >>> with Region.create(1000) as region:
    ...     region.memory[:5] = b"hello"
    ...     bytes(region.memory[:5]), region.nbytes, region.address % 64
    (b'hello', 1000, 0)
    """

    # At the exit of the process, regions may outlive the modules that they use.
    _close = staticmethod(os.close)

    def __init__(self, descriptor: int, mapping: _Mapping, *, sealed: bool, writable: bool) -> None:
        self._descriptor = descriptor
        self._mapping: _Mapping | None = mapping
        self._sealed = sealed
        self.nbytes = mapping.nbytes
        self.writable = writable

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Create a region that contains zeros, and reserve all pages of the region.

        - `nbytes`: size in bytes, positive.

        Raises ValueError if the size is not positive. Raises SharedMemoryError if there is not enough free memory.
        """
        return cls._create(nbytes, named=not _HAS_MEMFD)

    @classmethod
    def _create(cls, nbytes: int, *, named: bool) -> Self:
        if nbytes <= 0:
            raise ValueError(f"a region must have a positive number of bytes, got {nbytes}")
        descriptor = _open_named() if named else os.memfd_create("samplebatch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _reserve(descriptor, nbytes, named=named)
            if not named:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, _Mapping(descriptor, nbytes, writable=True), sealed=not named, writable=True)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int, nbytes: int, *, sealed: bool = _HAS_MEMFD, writable: bool = True) -> Self:
        """Map the memory of a region that another process created.

        - `descriptor`: descriptor of the memory in this process. The region then owns the descriptor, which is closed
          after an error.
        - `nbytes`: expected size of the region in bytes.
        - `sealed`: whether the memory must be sealed against shrinking; `create` seals the memory if the system
          supports seals.
        - `writable`: whether to map the memory for writing; otherwise NumPy rejects writes.

        Raises FormatError if the memory does not have the expected size, is not shared memory, or is not sealed
        although `sealed` is true. Raises SharedMemoryError if the memory cannot be mapped.
        """
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not 0 < nbytes == status.st_size:
                raise FormatError(f"a region must be a file of {nbytes} bytes, got one of {status.st_size}")
            if sealed and not _is_sealed(descriptor):
                raise FormatError(f"a region of {nbytes} bytes must be sealed against shrinking, got one without seals")
            mapping = _Mapping(descriptor, nbytes, writable=writable)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, mapping, sealed=sealed, writable=writable)

    def read_only(self) -> Self:
        """Map the memory again, as a read-only region; processes that receive the new region also map it read-only."""
        return self.attach(os.dup(self.fileno()), self.nbytes, sealed=self._sealed, writable=False)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._mapping is None

    @property
    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Memory as an array of bytes, shape (nbytes,); the array keeps the pages mapped.

        Raises ValueError if the region is closed.
        """
        return np.asarray(self._open())

    @property
    def memory(self) -> memoryview:
        """Memory as a memoryview, which keeps the pages mapped.

        Raises ValueError if the region is closed.
        """
        return self.array.data

    @property
    def address(self) -> int:
        """Page-aligned address of the memory in this process.

        Raises ValueError if the region is closed.
        """
        return self._open().address

    def fileno(self) -> int:
        """Return the descriptor; raises ValueError if the region or its descriptor is closed."""
        if self._descriptor < 0:
            raise ValueError("the region's descriptor is closed")
        return self._descriptor

    def warm(self, start: int = 0, stop: int | None = None) -> None:
        """Map all pages of a range in one call, instead of one page per first access.

        The first copy into unmapped pages takes several times as long as later copies. Mapping all pages in one call
        takes less time than it saves in the first copy. The call has no effect on kernels that do not support it.

        - `start`, `stop`: start and end of the range in bytes; the range is extended to page boundaries.
        """
        mapping = self._open()
        start -= start % mmap.PAGESIZE
        stop = self.nbytes if stop is None else min(stop, self.nbytes)
        if start < stop and _HAS_POPULATE:
            _madvise(
                mapping.address + start, stop - start, _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
            )

    def discard(self, start: int) -> None:
        """Release the pages after an offset to the system; afterwards, all processes read zeros in these pages.

        Later writes allocate new pages if memory is available. The call has no effect on systems that do not support
        it.

        - `start`: offset in bytes, rounded up to a page boundary.
        """
        mapping = self._open()
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < self.nbytes and hasattr(mmap, "MADV_REMOVE"):
            _madvise(mapping.address + start, self.nbytes - start, mmap.MADV_REMOVE)

    def close_descriptor(self) -> None:
        """Close the descriptor but keep the memory mapped; afterwards the region cannot be sent to another process."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._close(descriptor)

    def close(self) -> None:
        """Release the memory, but keep it mapped while arrays or views of the memory exist; idempotent."""
        self._mapping = None
        self.close_descriptor()

    def _open(self) -> _Mapping:
        if self._mapping is None:
            raise ValueError("the region is closed")
        return self._mapping

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close_descriptor()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Region must be pickled by multiprocessing, got another pickler")

    def __repr__(self) -> str:
        return f"<Region of {self.nbytes} bytes{', closed' if self.closed else ''}>"


def _attach(duplicate: Any, nbytes: int, sealed: bool, writable: bool) -> Region:
    return Region.attach(duplicate.detach(), nbytes, sealed=sealed, writable=writable)


def _reduce(region: Region) -> tuple[Any, ...]:
    duplicate = reduction.DupFd(region.fileno())
    return _attach, (duplicate, region.nbytes, region._sealed, region.writable)


reduction.register(Region, _reduce)


def _open_named() -> int:
    posix = import_module("_posixshmem")
    # macOS limits the length of the name.
    name = f"/sb-{secrets.token_hex(12)}"
    try:
        descriptor: int = posix.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    finally:
        # Executed even if a signal handler raises before the descriptor is assigned.
        with contextlib.suppress(FileNotFoundError):
            posix.shm_unlink(name)
    return descriptor


def _is_sealed(descriptor: int) -> bool:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def _reserve(descriptor: int, nbytes: int, *, named: bool) -> None:
    if nbytes > _UNASKED_NBYTES:
        free = _obtainable_nbytes(named=named)
        if free is not None and nbytes > free:
            raise _no_memory(nbytes, errno.ENOSPC, free)
    try:
        os.ftruncate(descriptor, nbytes)
        if hasattr(os, "posix_fallocate"):
            for start in range(0, nbytes, _STEP_NBYTES):
                os.posix_fallocate(descriptor, start, min(_STEP_NBYTES, nbytes - start))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT, errno.EINVAL):
            raise
        raise _no_memory(nbytes, error.errno, _obtainable_nbytes(named=named)) from error


def _obtainable_nbytes(*, named: bool) -> int | None:
    candidates = [free_nbytes(), free_in_folder(_NAMED_FOLDER) if named else None]
    return min((nbytes for nbytes in candidates if nbytes is not None), default=None)


def _no_memory(nbytes: int, number: int | None, free: int | None) -> SharedMemoryError:
    left = "an unknown number" if free is None else f"{free} free bytes"
    why = f" ({os.strerror(number)})" if number else ""
    return SharedMemoryError(
        f"{nbytes} bytes of shared memory must be free, got {left}{why}; request fewer, or raise the limit"
    )


def free_nbytes() -> int | None:
    """Return the estimated free memory in bytes; None if the system does not report it.

    The kernel allocates each page of shared memory on demand; if memory runs out, the kernel kills a process instead of
    returning an error. Therefore callers that reserve a large region check this estimate first. Other processes may
    allocate the memory at any time. The estimate counts the page cache as free memory.

    >>> free = free_nbytes()
    >>> free is None or free > 0
    True
    """
    estimates = [nbytes for nbytes in (_machine(), *_control_groups()) if nbytes is not None]
    return max(0, min(estimates)) if estimates else None


def _machine() -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in _text(_MEMINFO).splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def _control_groups() -> Iterator[int | None]:
    """Yield the remaining bytes of each control group (cgroup v1 or v2) that limits the process."""
    try:
        lines = _text(_GROUPS).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for mount in (_MOUNT, f"{_MOUNT}/unified"):
                yield from _levels(mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _levels(f"{_MOUNT}/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _levels(mount: str, path: str, limit: str, usage: str, prefix: str) -> Iterator[int | None]:
    # In a container the path may be the host's, which is not mounted; the container's own group is at the top.
    names = path.strip("/").split("/") if path.strip("/") else []
    for depth in range(len(names), -1, -1):
        level = "/".join([mount, *names[:depth]])
        yield _left(f"{level}/{limit}", f"{level}/{usage}", f"{level}/memory.stat", prefix)


def _left(limit: str, usage: str, statistics: str, prefix: str) -> int | None:
    try:
        limit_text = _text(limit).strip()
        if limit_text == "max":
            return None
        used_nbytes = int(_text(usage))
        fields = dict(line.split(" ", 1) for line in _text(statistics).splitlines())
        files = sum(int(fields[f"{prefix}{which}_file"]) for which in ("active", "inactive"))
        return int(limit_text) - used_nbytes + files
    except (OSError, KeyError, ValueError):
        return None


def _text(path: str) -> str:
    """Read a small kernel file with one system call."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _MAX_NBYTES).decode()
    finally:
        os.close(descriptor)


def free_in_folder(folder: str) -> int | None:
    """Return the free space of a folder's file system in bytes; None if the folder does not exist.

    >>> free_in_folder("/no/such/folder")
    """
    try:
        statistics = os.statvfs(folder)
    except OSError:
        return None
    return statistics.f_bavail * statistics.f_frsize


NBYTES = 8
"""Size of a counter in bytes."""

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
    """Create a new lock in a forked child, because a thread of the parent may have held the inherited lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def fence() -> None:
    """Prevent the reordering of memory accesses across this call, in either direction.

    x86 processors preserve the order of writes and the order of reads; ARM and other processors do not. Python has no
    memory fence, but releasing a lock orders earlier accesses before the release, and acquiring a lock orders later
    accesses after the acquisition. The release and the acquisition of the lock are not reordered.
    """
    with _lock:
        pass
    with _lock:
        pass


class SharedCounters:
    """Atomic 64-bit counters in shared memory; only one thread at a time may write to a counter.

    - `memory`: bytes at an address that is a multiple of 8, kept alive by this object.
    - `count`: number of counters.

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

    def wait(self, index: int, last_value: int, timeout_s: float) -> None:
        """Wait until a counter differs from `last_value` or the timeout elapses; may return earlier.

        The memory may be read-only.

        - `index`: index of the counter.
        - `last_value`: last known value.
        - `timeout_s`: maximum time to wait, in seconds.
        """
        if _FUTEX is None:
            self._watch(index, last_value, timeout_s)
            return
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        # The kernel compares the lower half again before the thread sleeps, so no change is missed.
        _call(_FUTEX, self._half(index), _WAIT, ctypes.c_uint(last_value & 0xFFFFFFFF), ctypes.byref(timeout), None, 0)

    def wake(self, index: int) -> None:
        """Wake the threads of all processes that wait for a counter."""
        if _FUTEX is not None:
            _call(_FUTEX, self._half(index), _WAKE, _EVERYBODY, None, None, 0)

    def _half(self, index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + index * NBYTES + _LOW_HALF)

    def _watch(self, index: int, last_value: int, timeout_s: float) -> None:
        """Poll with increasing pauses."""
        deadline = time.monotonic() + timeout_s
        nap_s = _SHORTEST_NAP_S
        while self._values[index] == last_value:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(nap_s, left_s))
            nap_s = min(nap_s * 2, _LONGEST_NAP_S)

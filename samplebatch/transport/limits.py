"""How much memory may still be taken: by the machine, and by the control groups that the process is in.

The kernel reserves pages of shared memory one by one, and where they run out it kills a process rather than refuse. So
whoever reserves much of it asks here first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

_MEMINFO = "/proc/meminfo"
_GROUPS = "/proc/self/cgroup"
_MOUNT = "/sys/fs/cgroup"
_MOST_NBYTES = 1 << 16


def free_nbytes() -> int | None:
    """Return the bytes of memory that may still be taken, or None where the system does not tell.

    It is an estimate, which others may have spent a moment later. Memory that only caches files counts as free.

    Examples
    --------
    >>> free = free_nbytes()
    >>> free is None or free > 0
    True
    """
    found = [nbytes for nbytes in (_machine(), *_control_groups()) if nbytes is not None]
    return max(0, min(found)) if found else None


def _machine() -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in _text(_MEMINFO).splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def _control_groups() -> Iterator[int | None]:
    """Yield what is left in each group that bounds the process, of both versions of the interface."""
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
        most = _text(limit).strip()
        if most == "max":
            return None
        taken = int(_text(usage))
        fields = dict(line.split(" ", 1) for line in _text(statistics).splitlines())
        files = sum(int(fields[f"{prefix}{which}_file"]) for which in ("active", "inactive"))
        return int(most) - taken + files
    except (OSError, KeyError, ValueError):
        return None


def _text(path: str) -> str:
    """Read one of the kernel's small files, in one piece and without the layers that other files need."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _MOST_NBYTES).decode()
    finally:
        os.close(descriptor)


def free_in_folder(folder: str) -> int | None:
    """Return the free bytes of the file system that a folder is on, or None where there is no such folder.

    >>> free_in_folder("/no/such/folder")
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize

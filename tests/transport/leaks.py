"""Checks for leaked descriptors and names in the folder of shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from multiprocessing import forkserver, reduction, resource_tracker
from pathlib import Path

SHARED = Path("/dev/shm")


def descriptors() -> list[str]:
    """List the targets of the open descriptors."""
    actual = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            actual.append(os.readlink(f"/proc/self/fd/{name}").split(" ")[0])
    return sorted(actual)


def names() -> set[str]:
    """List the names in shared memory; the library creates only short-lived names."""
    return {path.name for path in SHARED.iterdir() if path.name.startswith("sb-")}


@contextlib.contextmanager
def nothing_left(grace_s: float = 5.0) -> Iterator[None]:
    """Check that the body leaves no additional descriptors and no names."""
    # What a session has once, it keeps.
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    os.close(reduction.DupFd(0).detach())
    # Young garbage only: a session has much that is old, and what it holds is in the count.
    gc.collect(1)
    before = descriptors()
    yield
    deadline = time.monotonic() + grace_s
    after = descriptors()
    while len(after) > len(before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
        after = descriptors()
    assert len(after) <= len(before), sorted(set(after) - set(before)) or after
    assert not names()

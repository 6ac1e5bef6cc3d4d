"""Remove what only Linux has from a process and its children, as macOS has it: for `tests/test_posix_only.py`.

Python imports this module at start if its folder is on PYTHONPATH. Files of `/proc`, `/sys` and `/dev/shm` do not
exist, memory has no seals, processes have no descriptors, and `multiprocessing` spawns. Modules that check
`sys.platform` get "darwin"; other libraries are compiled for Linux, so they still see it.
"""

import builtins
import errno
import fcntl
import importlib.abc
import importlib.machinery
import io
import mmap
import multiprocessing
import os
import select
import sys
import tempfile

MISSING = {
    os: (
        "eventfd",
        "memfd_create",
        "pidfd_open",
        "posix_fallocate",
        "sched_getaffinity",
        "sched_setaffinity",
        "O_TMPFILE",
    ),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_GROW", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_OFD_SETLK"),
    mmap: ("MADV_HUGEPAGE", "MADV_REMOVE", "MAP_POPULATE"),
    select: ("epoll",),
}
FOLDERS = ("/proc", "/sys", "/dev/shm")
PLATFORM_CHECKED_BY = {"samplebatch.transport.region", "samplebatch.transport.peers"}


def is_hidden(path):
    try:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    except (TypeError, ValueError):
        return False
    return any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS)


def hiding(function):
    def call(path, *arguments, **keywords):
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *arguments, **keywords)

    return call


class PlatformLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        platform, sys.platform = sys.platform, "darwin"
        try:
            super().exec_module(module)
        finally:
            sys.platform = platform


class PlatformFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PLATFORM_CHECKED_BY:
            return None
        import numpy  # noqa: F401 - it must see the real platform

        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        spec.loader = PlatformLoader(name, spec.origin)
        return spec


for owner, names in MISSING.items():
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)
tempfile._O_TMPFILE_WORKS = False
builtins.open = io.open = hiding(io.open)
for name in ("open", "stat", "lstat", "statvfs", "listdir", "scandir", "readlink"):
    setattr(os, name, hiding(getattr(os, name)))
sys.meta_path.insert(0, PlatformFinder())
if multiprocessing.get_start_method(allow_none=True) is None:
    multiprocessing.set_start_method("spawn")

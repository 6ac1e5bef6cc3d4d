"""Files of a buffer's folder: locks, reserved disk space, atomic writes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samplebatch.errors import FormatError, StorageError

_CHECKSUM = "checksum"
"""Key of a JSON object's checksum, among its others."""

_MAX_PARTS = 512
"""Parts that one call writes: half of the limit of Linux."""


def open_locked(path: Path) -> int:
    """Open a file and lock it until it is closed or the process ends.

    Raises
    ------
    StorageError
        If it is locked already, here or in another process.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StorageError(
            f"{str(path.parent)!r} must not be open elsewhere, and another buffer has it open"
        ) from error
    return fd


def reserve(fd: int, nbytes: int, what: str) -> None:
    """Reserve disk blocks for a file: a full disk is noticed here, not when rows are written.

    Raises
    ------
    StorageError
        If the disk has no room; says what needs it.
    """
    if not nbytes:
        return
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:
            blank = memoryview(bytes(1 << 20))
            for at in range(0, nbytes, len(blank)):
                write_at(fd, [blank[: nbytes - at]], at)
    except OSError as error:
        hint = "; free some, or make the buffer smaller" if error.errno in (errno.ENOSPC, errno.EFBIG) else ""
        raise StorageError(
            error.errno, f"{what} must have room for {nbytes} bytes on the disk: {error.strerror}{hint}"
        ) from error


def write_at(fd: int, parts: Sequence[memoryview], at: int) -> None:
    """Write all parts, one after the other, from an offset on."""
    for first in range(0, len(parts), _MAX_PARTS):
        some = list(parts[first : first + _MAX_PARTS])
        while some:
            written = os.pwritev(fd, some, at)
            at += written
            while some and written >= some[0].nbytes:
                written -= some.pop(0).nbytes
            if written:
                some[0] = some[0][written:]


def write_plain(path: Path, plain: dict[str, Any]) -> None:
    """Write a JSON object with a checksum, atomically; durable after a sync only."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(plain_bytes(plain))
    temporary.replace(path)


def plain_bytes(plain: dict[str, Any]) -> bytes:
    """Return a JSON object with a checksum, as `read_plain` reads it."""
    return json.dumps({**plain, _CHECKSUM: _checksum(plain)}).encode()


def read_plain(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises
    ------
    FormatError
        If the file is not there, is none, or has changed. One by an older version has no checksum to tell by.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{str(path)!r} must be a whole file of a buffer, it is not: {error}") from error
    if not isinstance(plain, dict):
        raise FormatError(f"{str(path)!r} must be a file of a buffer, it is another")
    expected = plain.pop(_CHECKSUM, None)
    if expected is not None and expected != _checksum(plain):
        raise FormatError(f"{str(path)!r} must have what was written to it, and it has changed; it is damaged")
    return plain


def _checksum(plain: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(plain).encode())


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder, is on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Detection of file formats, reading of files as bytes, and atomic replacement of files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa

from samplebatch.errors import FormatError, StorageError


def file_bytes(name: str, *, memory_map: bool) -> pa.Buffer:
    """Return all bytes of a file, memory-mapped or read; a mapped file is loaded lazily."""
    try:
        with pa.memory_map(name) if memory_map else pa.OSFile(name) as source:
            if not memory_map or not source.size():
                return source.read_buffer()
            # For a buffer of the entire file, Arrow would ask the system to load all of it.
            first = source.read_buffer(1)
            return pa.foreign_buffer(first.address, source.size(), first)
    except OSError as error:
        # Same attributes as Python's own error, with a separate file name.
        number = error.errno or (errno.EISDIR if os.path.isdir(name) else errno.EIO)
        raise OSError(number, os.strerror(number), name) from error


def check_magic(data: pa.Buffer, magic: bytes, form: str, name: str) -> None:
    """Raise FormatError if the bytes of a file do not start with the magic of its format."""
    if data[: len(magic)].to_pybytes() != magic:
        article = "an" if form == "Arrow" else "a"
        raise FormatError(f"{name!r} must be {article} {form} file, got other first bytes")


Form = Literal["Arrow", "Parquet", "HDF5"]

SUFFIXES: dict[str, Form] = {
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".ipc": "Arrow",
    ".parquet": "Parquet",
    ".hdf5": "HDF5",
    ".h5": "HDF5",
}
"""Format of each file suffix."""

_MAGIC: dict[bytes, Form] = {b"ARROW1": "Arrow", b"PAR1": "Parquet", b"\x89HDF\r\n\x1a\n": "HDF5"}

_OTHERS = frozenset(
    (".csv", ".gz", ".json", ".jsonl", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".tfrecord", ".txt", ".zip")
)
"""Suffixes of other formats, which are rejected."""


def _suffix_of(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(os.fspath(path).rstrip(os.sep))[1].lower()


def check_suffix(path: str | os.PathLike[str], form: Form) -> None:
    """Raise FormatError unless the suffix of a path belongs to the format.

    >>> check_suffix("steps.csv", "Arrow")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: the suffix of 'steps.csv' must be '.arrow',
        '.feather' or '.ipc', got '.csv'
    """
    suffix = _suffix_of(path)
    if suffix in _OTHERS or SUFFIXES.get(suffix, form) != form:
        suffixes = [repr(accepted) for accepted, other in SUFFIXES.items() if other == form]
        expected = " or ".join([", ".join(suffixes[:-1]), suffixes[-1]] if suffixes[1:] else suffixes)
        raise FormatError(f"the suffix of {os.fspath(path)!r} must be {expected}, got {suffix!r}")


def form_to_write(path: str | os.PathLike[str]) -> Form | None:
    """Return the format that a path's suffix specifies; None if the path has no suffix, as for a folder."""
    suffix = _suffix_of(path)
    if not suffix or os.path.isdir(path):
        return None
    form = SUFFIXES.get(suffix)
    if form is None:
        raise FormatError(
            f"{os.fspath(path)!r} must end in one of {', '.join(SUFFIXES)}, or be a folder without suffix, got "
            f"{suffix!r}"
        )
    return form


def form_of_file(path: str | os.PathLike[str]) -> Form:
    """Detect the format of a file from its first or last bytes, or from its suffix if these bytes are damaged."""
    return form_of_bytes(file_bytes(os.fspath(path), memory_map=True), path)


def form_of_bytes(data: pa.Buffer, path: str | os.PathLike[str]) -> Form:
    """Detect the format of a file that is already in memory; see `form_of_file`."""
    start, end = data[:8].to_pybytes(), data[-8:].to_pybytes()
    for magic, form in _MAGIC.items():
        if start.startswith(magic) or (end.endswith(magic) and form != "HDF5"):
            return form
    named = SUFFIXES.get(_suffix_of(path))
    if named is None:
        raise FormatError(f"{os.fspath(path)!r} must be an Arrow, Parquet or HDF5 file, got other first bytes")
    return named


_DESCRIPTORS = "/proc/self/fd"
"""Folder with a link to each open file, used to name an unnamed file."""


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a path is not writable; the check creates and removes a temporary file."""
    temporary, file = _open_beside(_target(path), path)
    file.close()
    os.unlink(temporary)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True, unnamed: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` if the `with` block succeeds, and is removed otherwise.

    path: path to replace.
    durable: whether to sync the file to disk before it replaces the path.
    unnamed: whether the temporary file has no name, if the file system supports unnamed files. Other processes cannot
    see an unnamed file, and the file does not remain if the writing process is killed.

    Raises OSError if the path is a folder or not writable, or the disk is full; the error's `filename` is the path.
    """
    target = _target(path)
    hidden = _open_unnamed(target) if unnamed else None
    temporary, file = (_temporary_name(target), hidden) if hidden is not None else _open_beside(target, path)
    try:
        with file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if hidden is not None and _name_file(hidden, target, temporary):
                return
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, temporary):
            # A full disk is reported by a write, which does not know the path.
            error.filename = os.fspath(path)
        raise


def _target(path: str | os.PathLike[str]) -> str:
    target = os.path.join(os.getcwd(), os.fspath(path))
    try:
        mode = os.lstat(target).st_mode
        if stat.S_ISLNK(mode):
            # A link is preserved; its target is replaced.
            target = os.path.realpath(target)
            mode = os.stat(target).st_mode
    except OSError:
        return target
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{os.fspath(path)!r} must be a file, got a folder")
    if not os.access(target, os.W_OK):
        raise PermissionError(f"{os.fspath(path)!r} must be writable, got a read-only file")
    return target


def _open_beside(target: str, path: str | os.PathLike[str]) -> tuple[str, BinaryIO]:
    folder = os.path.dirname(target)
    temporary = _temporary_name(target)
    try:
        return temporary, open(temporary, "x+b")
    except OSError as error:
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{os.fspath(path)!r} must be in an existing folder, got no {folder!r}; create it first"
            ) from None
        raise type(error)(f"{target!r} must be in a writable folder: {error.strerror}") from error


def _temporary_name(target: str) -> str:
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")


def _open_unnamed(target: str) -> BinaryIO | None:
    """Open an unnamed file in the folder of a target; None if the file system does not support unnamed files."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir(_DESCRIPTORS):
        return None
    try:
        return os.fdopen(os.open(os.path.dirname(target), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), "w+b")
    except OSError:
        return None


def _name_file(file: BinaryIO, target: str, temporary: str) -> bool:
    """Link an unnamed file to its target, or to a temporary name; return whether the target was linked."""
    fd = file.fileno()
    try:
        for name in (target, temporary):
            # Python follows the link only if there is a `src_dir_fd`, which an absolute path ignores.
            with contextlib.suppress(FileExistsError):
                os.link(f"{_DESCRIPTORS}/{fd}", name, src_dir_fd=fd)
                return name is target
    except OSError:
        # Some sandboxes create unnamed files but refuse to link them.
        file.seek(0)
        with open(temporary, "xb") as named:
            shutil.copyfileobj(file, named, 1 << 20)
            named.flush()
            os.fsync(named.fileno())
    return False


_CHECKSUM = "checksum"
"""Key of the checksum in a JSON object."""

_MAX_PARTS = 512
"""Maximum number of buffers per write call: half of Linux's limit."""


def open_locked(path: Path, requirement: str = "must not be open elsewhere") -> int:
    """Open and lock the lock file of a folder; the lock is released when the file is closed or the process ends.

    A forked child shares the lock and must close the file.

    path: the lock file, created if it does not exist. The file contains the process id of the lock's owner, for error
    messages. requirement: requirement on the folder that an error message states.

    Raises StorageError if this or another process has already locked the folder, or if the file system does not support
    locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    folder = str(path.parent)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = _lock_owner(fd)
        os.close(fd)
        raise StorageError(f"{folder!r} {requirement}, and {owner} has it open") from error
    except OSError as error:
        os.close(fd)
        raise StorageError(
            error.errno, f"a folder must be on a file system with locks, got {error.strerror}", folder
        ) from error
    # The owner is only used in errors, so a full disk is ignored here.
    with contextlib.suppress(OSError):
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    return fd


def _lock_owner(fd: int) -> str:
    try:
        pid, host = os.pread(fd, 512, 0).decode().split()
        if int(pid) == os.getpid() and host == socket.gethostname():
            return "this process"
        return f"process {int(pid)}" if host == socket.gethostname() else f"process {int(pid)} on {host!r}"
    except (OSError, ValueError):
        return "another process"


def reserve(fd: int, nbytes: int, what: str) -> None:
    """Reserve disk blocks for a file, so that a full disk is detected before rows are written.

    Raises StorageError if the disk is full; `what` is the subject of the error message.
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
    """Write buffers one after another into a file, starting at an offset."""
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
    """Write a JSON object with a checksum atomically; the file is durable only after a sync."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(plain_bytes(plain))
    temporary.replace(path)


def plain_bytes(plain: dict[str, Any]) -> bytes:
    """Encode a JSON object with a checksum for `read_plain`."""
    return json.dumps({**plain, _CHECKSUM: _checksum(plain)}).encode()


def read_plain(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file and verify its checksum; files of older versions have no checksum.

    Raises FormatError if the file is missing, does not contain a JSON object, or does not match its checksum.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{str(path)!r} must be an intact file of a buffer: {error}") from error
    if not isinstance(plain, dict):
        raise FormatError(f"{str(path)!r} must contain a JSON object, got a {type(plain).__name__}")
    expected = plain.pop(_CHECKSUM, None)
    if expected is not None and expected != _checksum(plain):
        raise FormatError(f"{str(path)!r} must match its checksum, got changed bytes; it is damaged")
    return plain


def _checksum(plain: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(plain).encode())


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

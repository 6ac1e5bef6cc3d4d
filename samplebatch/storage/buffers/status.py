"""Status of a buffer folder: whether it is open or closed, and checksums of all files of a closed folder.

`status.json` of an open folder records the inodes of the folder's files. `status.json` of a closed folder records the
inode, change time and checksums per MiB of each file. `status.json` is replaced when the folder is opened or closed,
not on every step.

- A closed folder is intact if each file has its recorded change time or matches its checksums. A mixture of files from
  different states is rejected.
- The files of an open folder must have the inodes that the process recorded when it opened the folder. If the process
  that opened the folder was killed, its writes persist in the same files. A copy of an open folder has different inodes
  and may mix states, so the copy is rejected.
- A crash of the machine loses unflushed writes, so a folder that was open during a crash is rejected.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from samplebatch.arguments import describe_value
from samplebatch.column.checksum import BLOCK_NBYTES, checksum
from samplebatch.errors import FormatError
from samplebatch.storage.files import read_plain, sync, write_plain

ABOUT, LOCK, STATUS = "buffer.json", "lock", "status.json"

BUFFER_FILE = "buffer.arrow"
"""The only file in the folder of a buffer that cannot be memory-mapped."""

VERSION = 2
_NO_STATUS = 1
"""Version of folders without a status, which is added when they are opened."""

_SETTLED_NS = 50_000_000
"""Nanoseconds after which another change of a file changes its change time: several ticks of the system clock."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class FileState(NamedTuple):
    """Recorded state of a file in a closed folder, including checksums in block order."""

    inode: int
    changed_ns: int
    nbytes: int
    blocks: list[int]


class FolderStatus:
    """Status of a folder and its files, managed by `BufferFolder`.

    files: recorded file states by name; if the folder is open, only the inodes are valid.
    boot: identifier of the system boot in which the folder was opened.
    written_ns: time at which the status was written, in nanoseconds.
    """

    def __init__(
        self, folder: Path, *, closed: bool, files: dict[str, FileState], boot: str = "", written_ns: int = 0
    ) -> None:
        self.folder = folder
        self.closed = closed
        self._files = files
        self._boot = boot
        self._written_ns = written_ns

    @classmethod
    def read(cls, folder: Path, version: int) -> Self | None:
        """Read the status of a folder; return None for a folder version without status files.

        Raises FormatError if the status is missing or damaged.
        """
        if version == _NO_STATUS:
            return None
        path = folder / STATUS
        plain = read_plain(path)
        try:
            files = {
                str(name): FileState(int(inode), int(changed_ns), int(nbytes), list(map(int, blocks)))
                for name, (inode, changed_ns, nbytes, blocks) in plain["files"].items()
            }
            closed, boot = bool(plain["closed"]), str(plain["boot"])
            for name in files:
                if Path(name).name != name:
                    raise ValueError(f"a file must be in the folder, got {describe_value(name)}")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise FormatError(f"{str(path)!r} must list the files of a buffer: {error!r}") from error
        return cls(folder, closed=closed, files=files, boot=boot, written_ns=path.stat().st_mtime_ns)

    def check_closed(self, *, always: bool) -> None:
        """Check that the files of a closed folder are unchanged since the folder was closed.

        always: whether to read and verify files even if their change time is unchanged.

        Raises FormatError if a file is missing or has changed.
        """
        for _, _, fault in self.faults(always=always):
            if fault:
                raise FormatError(fault)

    def faults(self, *, always: bool) -> Iterator[tuple[str, int, str]]:
        """Compare each file of a closed folder with its checksums.

        always: as in `check_closed`.

        Yields the file name, the size in bytes when the folder was closed, and a description of the damage (empty if
        the file is intact).
        """
        for name, closed in self._files.items():
            path = self.folder / name
            try:
                now = _state(path, None if always else self._settled(name))
            except FileNotFoundError:
                yield name, closed.nbytes, f"{str(path)!r} must exist, as when it was closed, got no file; damaged"
                continue
            yield name, closed.nbytes, self._difference(name, now, closed)

    def _difference(self, name: str, now: FileState, closed: FileState) -> str:
        if (now.nbytes, now.blocks) == (closed.nbytes, closed.blocks):
            return ""
        where = ""
        if len(now.blocks) == len(closed.blocks):
            pairs = enumerate(zip(now.blocks, closed.blocks, strict=True))
            start = BLOCK_NBYTES * next((i for i, (first, other) in pairs if first != other), 0)
            where = f", the first of them between {start} and {min(start + BLOCK_NBYTES, closed.nbytes)}"
        return (
            f"{str(self.folder / name)!r} must have the bytes{self._of_column(name)} that it was closed with, got "
            f"changed bytes{where}; the folder is damaged, or mixed from two"
        )

    def check_open(self, names: Iterable[str] | None = None) -> None:
        """Check that no file of an open folder has been replaced since the folder was opened.

        names: names of the files to check; None for all recorded files that exist.

        Raises FormatError if a file has been replaced or the machine has crashed since the folder was opened.
        """
        where = repr(str(self.folder))
        for name in self._files if names is None else names:
            path = self.folder / name
            # Missing files are reported elsewhere.
            if path.exists() and (name not in self._files or self._files[name].inode != path.stat().st_ino):
                raise FormatError(
                    f"{where} must be the folder that was open, got another file {name!r}: it was copied "
                    "without being closed, so its rows may be torn; open with verify=False to accept them"
                )
        if self._boot != _boot():
            raise FormatError(
                f"{where} must be closed or flushed before a crash of the machine, got an open folder whose unflushed "
                "rows may be lost; open with verify=False to accept the remaining rows"
            )

    def write_open(self, names: Iterable[str]) -> None:
        """Write the status of an open folder; record the files in `names` in addition to the files recorded before."""
        inodes = {name: state.inode for name, state in self._files.items() if not self.closed}
        inodes |= {name: os.stat(self.folder / name).st_ino for name in names}
        self._write({name: FileState(inode, 0, 0, []) for name, inode in inodes.items()}, closed=False)

    def write_closed(self, names: Iterable[str], before: Self | None) -> None:
        """Write the status of a closed folder with checksums of all files; the files must have been synced to disk.

        before: status that was read when the closed folder was opened; None if the folder was not closed. Files that
        have not changed since the folder was opened are not read.
        """
        settled = {} if before is None else {name: before._settled(name) for name in before._files}
        self._write({name: _state(self.folder / name, settled.get(name)) for name in names}, closed=True)
        sync(self.folder / STATUS)
        sync(self.folder)

    def _write(self, files: dict[str, FileState], *, closed: bool) -> None:
        boot = _boot()
        write_plain(self.folder / STATUS, {"closed": closed, "boot": boot, "files": files})
        self.closed, self._files, self._boot = closed, files, boot

    def _settled(self, name: str) -> FileState | None:
        """Return the recorded state of a file; None if the recorded change time is too recent to be reliable."""
        state = self._files.get(name)
        return state if state and self.closed and state.changed_ns < self._written_ns - _SETTLED_NS else None

    def _of_column(self, name: str) -> str:
        for path in self.folder.glob("layout.*.json"):
            with contextlib.suppress(FormatError, AttributeError, TypeError, KeyError):
                for column, entry in read_plain(path)["columns"].items():
                    if f"{entry['file']}.column" == name:
                        return f" of column {column!r}"
        return ""


def read_about(folder: Path) -> tuple[int, dict[str, Any]]:
    """Read the format version of a folder, and the description of the folder's buffer.

    Raises FormatError if the description is missing or has an unsupported version.
    """
    path = folder / ABOUT
    plain = read_plain(path)
    version, about = plain.get("version"), plain.get("about")
    if version not in (_NO_STATUS, VERSION):
        actual = describe_value(version)
        raise FormatError(f"{str(path)!r} must have version {_NO_STATUS} or {VERSION}, got version {actual}")
    if not isinstance(about, dict):
        raise FormatError(f"{str(path)!r} must describe a buffer in a dict, got {describe_value(about)}; it is damaged")
    return version, about


def _state(path: Path, settled: FileState | None) -> FileState:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        stamp = status.st_ino, status.st_ctime_ns, status.st_size
        if settled is not None and settled[:3] == stamp:
            return settled
        return FileState(*stamp, _blocks(fd, status.st_size))
    finally:
        os.close(fd)


def _blocks(fd: int, nbytes: int) -> list[int]:
    """Compute the checksums of a file's blocks; blocks that were never written are not read."""
    buffer = memoryview(bytearray(min(nbytes, BLOCK_NBYTES)))
    zeros = checksum(buffer)
    checksums = []
    data_at = -1
    for start in range(0, nbytes, BLOCK_NBYTES):
        block = buffer[: min(BLOCK_NBYTES, nbytes - start)]
        if data_at < start:
            data_at = _next_data(fd, start, nbytes)
        if data_at >= start + len(block) and len(block) == len(buffer):
            checksums.append(zeros)
            continue
        remaining, at = block, start
        while remaining.nbytes and (count := os.preadv(fd, [remaining], at)):
            remaining, at = remaining[count:], at + count
        checksums.append(checksum(block[: len(block) - remaining.nbytes]))
    return checksums


def _next_data(fd: int, start: int, nbytes: int) -> int:
    """Return the first offset at or after `start` that may contain data, or the end of the file if no data follows."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        # Other errors mean that the file system does not support the query.
        return nbytes if error.errno == errno.ENXIO else start


def _boot() -> str:
    """Return the identifier of the current system boot; empty if the identifier is unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""

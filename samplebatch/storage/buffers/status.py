"""The status of a folder: whether it was closed, and then the checksums of all its files.

`status.json` says either that the folder is open, and which files (by inode) it has, or that it was closed, and of
every file its inode, its time of change, and a checksum for each MiB. It is replaced when a folder is opened and when
it is closed; a step has nothing to do with it.

- A closed folder is whole if its files are those that were closed: untouched since, which the system's time of change
  says without a look at the rows, or else with the same checksums. Files of two states do not pass.
- A folder that is open belongs to the files that the process had. If that process was killed, they are still those, and
  all that it had written is there. A copy has others, and each was copied at another moment: it is rejected.
- If the machine went down since, what the system had not yet written to the disk is lost: rejected, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from samplebatch.column.checksum import BLOCK_NBYTES, checksum
from samplebatch.errors import FormatError
from samplebatch.storage.files import read_plain, sync, write_plain

ABOUT, LOCK, STATUS = "buffer.json", "lock", "status.json"

BUFFER_FILE = "buffer.arrow"
"""The only file in the folder of a buffer whose rows cannot be mapped."""

VERSION = 2
_NO_STATUS = 1
"""The version of folders without a status. They are read, and have a status from then on."""

_SETTLED_NS = 50_000_000
"""Nanoseconds after which a file that changes again has another time of change: some ticks of the system's clock."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class FileState(NamedTuple):
    """One file of a closed folder, its checksums in the order of its blocks."""

    inode: int
    changed_ns: int
    nbytes: int
    blocks: list[int]


class FolderStatus:
    """The status of a folder, kept by `BufferFolder`: open or closed, and its files.

    Parameters
    ----------
    folder
        The folder.
    closed
        Whether it was closed.
    files
        The states of a closed folder's files by name, and the inodes alone of an open one's.
    boot
        Which start of the machine an open folder is of.
    written_ns
        When that was written.
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
        """Read the status; None if the folder is of a version that has none.

        Raises
        ------
        FormatError
            If it is not there, or damaged.
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
            if any(Path(name).name != name for name in files):
                raise ValueError("one is in another folder")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise FormatError(f"{str(path)!r} must list the files of a buffer, it does not: {error!r}") from error
        return cls(folder, closed=closed, files=files, boot=boot, written_ns=path.stat().st_mtime_ns)

    def check_closed(self, *, always: bool) -> None:
        """Check that the files are as they were when the folder was closed.

        Parameters
        ----------
        always
            Whether to read also the files that the system says nobody has touched since.

        Raises
        ------
        FormatError
            If a file is missing, or has other bytes; names it, and its column.
        """
        for _, _, fault in self.faults(always=always):
            if fault:
                raise FormatError(fault)

    def faults(self, *, always: bool) -> Iterator[tuple[str, int, str]]:
        """Compare the files of a closed folder with their checksums, in succession.

        Parameters
        ----------
        always
            As in `check_closed`.

        Yields
        ------
        tuple
            The name of a file, the bytes that it had, and a sentence that says how it differs; empty if it does not.
        """
        for name, closed in self._files.items():
            path = self.folder / name
            try:
                now = _state(path, None if always else self._settled(name))
            except FileNotFoundError:
                yield name, closed.nbytes, f"{str(path)!r} must be there as it was closed, and it is not; damaged"
                continue
            yield name, closed.nbytes, self._difference(name, now, closed)

    def _difference(self, name: str, now: FileState, closed: FileState) -> str:
        if (now.nbytes, now.blocks) == (closed.nbytes, closed.blocks):
            return ""
        where = ""
        if len(now.blocks) == len(closed.blocks):
            pairs = enumerate(zip(now.blocks, closed.blocks, strict=True))
            start = BLOCK_NBYTES * next((i for i, (one, other) in pairs if one != other), 0)
            where = f", the first of them between {start} and {min(start + BLOCK_NBYTES, closed.nbytes)}"
        return (
            f"{str(self.folder / name)!r} must have the bytes{self._of_column(name)} that it was closed with, and some "
            f"have changed{where}; the folder is damaged, or mixed from two"
        )

    def check_open(self, names: Iterable[str] | None = None) -> None:
        """Check that the files of an open folder are those of the process that opened it last.

        Parameters
        ----------
        names
            Which files; all that it had, and that are still there, if None.

        Raises
        ------
        FormatError
            If they are not, or the machine went down since.
        """
        where = repr(str(self.folder))
        for name in self._files if names is None else names:
            path = self.folder / name
            # Others say of a file that it is missing.
            if path.exists() and (name not in self._files or self._files[name].inode != path.stat().st_ino):
                raise FormatError(
                    f"{where} must be the folder that was open, and {name!r} is another file than then: it was copied "
                    "without being closed, so its rows may be torn; open with verify=False to take them as they are"
                )
        if self._boot != _boot():
            raise FormatError(
                f"{where} was open when the machine went down, so rows may be lost that were not flushed; "
                "open with verify=False to take them as they are"
            )

    def write_open(self, names: Iterable[str]) -> None:
        """Write the status of an open folder: these files, beside those that it is known to have."""
        known = {name: state.inode for name, state in self._files.items() if not self.closed}
        known |= {name: os.stat(self.folder / name).st_ino for name in names}
        self._write({name: FileState(inode, 0, 0, []) for name, inode in known.items()}, closed=False)

    def write_closed(self, names: Iterable[str], before: Self | None) -> None:
        """Write the status of a closed folder: the checksums of these files, which must be on the disk.

        Parameters
        ----------
        names
            The files.
        before
            The status of the folder when it was opened, if it was closed then: what has not been touched since is not
            read again.
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
        """Return the state that a file was closed with, if a change since would show in its time of change."""
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
    """Read the version of a folder, and the description of its buffer.

    Raises
    ------
    FormatError
        If they are not there, or of a version that cannot be read.
    """
    path = folder / ABOUT
    plain = read_plain(path)
    version, about = plain.get("version"), plain.get("about")
    if version not in (_NO_STATUS, VERSION):
        raise FormatError(f"{str(path)!r} is of version {version}, this library reads {_NO_STATUS} and {VERSION}")
    if not isinstance(about, dict):
        raise FormatError(f"{str(path)!r} must describe a buffer, it does not; it is damaged")
    return version, about


def _state(path: Path, settled: FileState | None) -> FileState:
    """Read the state of a file; its checksums only if it was touched since it had the state given."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        stamp = found.st_ino, found.st_ctime_ns, found.st_size
        if settled is not None and settled[:3] == stamp:
            return settled
        return FileState(*stamp, _blocks(fd, found.st_size))
    finally:
        os.close(fd)


def _blocks(fd: int, nbytes: int) -> list[int]:
    """Compute the checksums of a file's blocks; those that were never written are not read."""
    buffer = memoryview(bytearray(min(nbytes, BLOCK_NBYTES)))
    zeros = checksum(buffer)
    found = []
    data_at = -1
    for start in range(0, nbytes, BLOCK_NBYTES):
        block = buffer[: min(BLOCK_NBYTES, nbytes - start)]
        if data_at < start:
            data_at = _next_data(fd, start, nbytes)
        if data_at >= start + len(block) and len(block) == len(buffer):
            found.append(zeros)
            continue
        rest, at = block, start
        while rest.nbytes and (count := os.preadv(fd, [rest], at)):
            rest, at = rest[count:], at + count
        found.append(checksum(block[: len(block) - rest.nbytes]))
    return found


def _next_data(fd: int, start: int, nbytes: int) -> int:
    """Find the first byte from a place on that may have been written; the file's end if there is none."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        # Other errors are those of file systems that do not know.
        return nbytes if error.errno == errno.ENXIO else start


def _boot() -> str:
    """Return the identity of this boot of the machine; empty if unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""

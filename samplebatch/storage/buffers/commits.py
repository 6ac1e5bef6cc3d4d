"""Commit records and undo log of a folder: the state after each step, and the rows that a step overwrites.

::

    commit.0  .1   the state after a step, written in turn
    undo           the rows that the step in progress overwrites, as they were
    intent         which rows these are, and after which step

Commits and intent have a checksum. A process that is killed leaves behind everything it had written, in the order in
which it had: so an intent that is whole has its rows, and a commit that is whole has its columns.
"""

from __future__ import annotations

import os
import struct
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from samplebatch.errors import FormatError, StorageError
from samplebatch.storage.files import reserve, write_at

VERSION = 1
INTENT, UNDO = "intent", "undo"
COMMITS = ("commit.0", "commit.1")
FILES = (*COMMITS, INTENT, UNDO)

_HEAD = struct.Struct("<8sIIQQQ")
"""Magic, version, CRC-32 of all that follows it, number of the step, number of the layout, bytes that follow."""

_CHECKED_FROM = 16
_COMMIT_MAGIC, _INTENT_MAGIC = b"SBCOMMIT", b"SBINTENT"
_RESERVED_NBYTES = 1 << 12


class Record(NamedTuple):
    """A commit record or intent: number of the step, number of the layout of columns, payload."""

    step: int
    layout: int
    payload: bytes


class Commits:
    """The open log files of a `BufferFolder`; `create` and `open` make one.

    Attributes
    ----------
    last
        The last commit.
    pending
        What `keep` was told of a step that has not been committed, or None.

    close
        Call it to close the files; that happens by itself when the object is gone.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> commits = Commits.create(folder, 0, b"nothing")
    >>> commits.keep(b"row 3", [memoryview(b"as it was")])
    >>> commits.close()  # in the midst of a step
    >>> commits = Commits.open(folder)
    >>> commits.last.payload, commits.pending, commits.kept(0, 9)
    (b'nothing', b'row 3', bytearray(b'as it was'))
    >>> commits.close()
    """

    def __init__(self, folder: Path, last: Record) -> None:
        self.folder = folder
        self.last = last
        self.pending: bytes | None = None
        self._files: dict[str, int] = {}
        self.close = weakref.finalize(self, _close, self._files)

    @classmethod
    def create(cls, folder: Path, layout: int, state: bytes) -> Self:
        """Create the files, and commit a first state as step 1.

        Raises
        ------
        StorageError
            If the disk has no room.
        """
        made = cls(folder, Record(0, layout, b""))
        try:
            for name in FILES:
                made._files[name] = fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                reserve(fd, _RESERVED_NBYTES, repr(str(folder / name)))
            made.commit(layout, state)
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the files, and read the last commit and the pending intent.

        Raises
        ------
        FormatError
            If a file is missing, none of the commits is whole, or the newest of them is not.
        """
        made = cls(folder, Record(0, 0, b""))
        try:
            for name in FILES:
                made._files[name] = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
            made._find()
        except FileNotFoundError as error:
            made.close()
            raise FormatError(f"{str(error.filename)!r} must be there, and it is not; the buffer is damaged") from error
        except BaseException:
            made.close()
            raise
        return made

    def _find(self) -> None:
        commits = [record for name in COMMITS if (record := self._read(name, _COMMIT_MAGIC)) is not None]
        if not commits:
            raise FormatError(f"{str(self.folder)!r} must have one whole commit, and has none; it is damaged")
        self.last = max(commits)
        intent = self._read(INTENT, _INTENT_MAGIC)
        if intent is None or intent.step < self.last.step:
            return
        if intent.step > self.last.step:
            raise FormatError(
                f"{str(self.folder)!r} must have the commit of step {intent.step}, and it has that of step "
                f"{self.last.step} as the last; it is damaged"
            )
        self.pending = intent.payload

    def keep(self, which: bytes, rows: Sequence[memoryview]) -> None:
        """Write rows that are about to be overwritten to the undo log, and then the intent that names them.

        Raises
        ------
        StorageError
            If the disk has no room.
        """
        try:
            write_at(self._files[UNDO], rows, 0)
            self._write(INTENT, _INTENT_MAGIC, Record(self.last.step, self.last.layout, which))
        except OSError as error:
            where = repr(str(self.folder))
            raise StorageError(
                error.errno, f"{where} must have room for the rows that a step overwrites: {error.strerror}"
            ) from error
        self.pending = which

    def withdraw(self) -> None:
        """Withdraw the intent: the rows are back in their places."""
        self._write(INTENT, _INTENT_MAGIC, Record(0, 0, b""))
        self.pending = None

    def kept(self, at: int, nbytes: int) -> bytearray:
        """Read bytes of the undo log from an offset on."""
        found = bytearray(nbytes)
        rest = memoryview(found)
        while rest.nbytes and (count := os.preadv(self._files[UNDO], [rest], at)):
            rest = rest[count:]
            at += count
        if rest.nbytes:
            raise FormatError(f"{str(self.folder / UNDO)!r} must have {nbytes} bytes more than it has; it is damaged")
        return found

    def commit(self, layout: int, state: bytes) -> None:
        """Write the commit record of a step."""
        record = Record(self.last.step + 1, layout, state)
        self._write(COMMITS[record.step % 2], _COMMIT_MAGIC, record)
        self.last = record
        self.pending = None

    def flush(self) -> None:
        """Wait until the files are on the disk."""
        for fd in self._files.values():
            os.fsync(fd)

    def forget_rows(self) -> None:
        """Truncate the undo log."""
        os.ftruncate(self._files[UNDO], _RESERVED_NBYTES)

    def _read(self, name: str, magic: bytes) -> Record | None:
        """Read a record; None if it is torn."""
        fd = self._files[name]
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        found, version, checksum, step, layout, nbytes = _HEAD.unpack(head)
        if found != magic or nbytes > os.fstat(fd).st_size:
            return None
        if version != VERSION:
            raise FormatError(f"{str(self.folder / name)!r} is of version {version}, this library reads {VERSION}")
        payload = os.pread(fd, nbytes, _HEAD.size)
        if len(payload) < nbytes or _checksum(head, payload) != checksum:
            return None
        return Record(step, layout, payload)

    def _write(self, name: str, magic: bytes, record: Record) -> None:
        fields = record.step, record.layout, len(record.payload)
        checksum = _checksum(_HEAD.pack(magic, VERSION, 0, *fields), record.payload)
        head = _HEAD.pack(magic, VERSION, checksum, *fields)
        write_at(self._files[name], [memoryview(head + record.payload)], 0)


def _checksum(head: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(head[_CHECKED_FROM:]))


def _close(files: dict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])

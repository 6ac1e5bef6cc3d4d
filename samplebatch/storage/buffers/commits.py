"""Commit records and undo log of a buffer folder.

::

        commit.0  .1   state after a step, written alternately
        undo           previous contents of the rows that the current step overwrites
        intent         location of the undo rows, and number of the previous step

Commits and intent have checksums. All writes of a killed process persist in order, so a valid intent has its rows, and
a valid commit has its columns.
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
"""Magic, version, CRC-32 of the following bytes, step number, layout number, size of the payload."""

_CHECKED_FROM = 16
_COMMIT_MAGIC, _INTENT_MAGIC = b"SBCOMMIT", b"SBINTENT"
_RESERVED_NBYTES = 1 << 12


class Record(NamedTuple):
    """Commit record or intent: step number, number of the column layout, payload."""

    step: int
    layout: int
    payload: bytes


class Commits:
    """Open log files of a `BufferFolder`; created by `create` or `open`.

    Attributes
    ----------
    last
        Last commit.
    pending
        Intent of a step that is not committed, or None.

    close
        Closes the files; also called when the object is garbage-collected.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> commits = Commits.create(folder, 0, b"nothing")
    >>> commits.keep(b"row 3", [memoryview(b"as it was")])
    >>> commits.close()  # before the step is committed
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
        """Create the files and commit a first state as step 1.

        Raises
        ------
        StorageError
            If the disk is full.
        """
        commits = cls(folder, Record(0, layout, b""))
        try:
            for name in FILES:
                commits._files[name] = fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                reserve(fd, _RESERVED_NBYTES, repr(str(folder / name)))
            commits.commit(layout, state)
        except BaseException:
            commits.close()
            raise
        return commits

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the files and read the last commit and the pending intent.

        Raises
        ------
        FormatError
            If a file is missing, no commit is valid, or the newest commit is damaged.
        """
        commits = cls(folder, Record(0, 0, b""))
        try:
            for name in FILES:
                commits._files[name] = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
            commits._find()
        except FileNotFoundError as error:
            commits.close()
            raise FormatError(f"{str(error.filename)!r} must exist, got no file; the buffer is damaged") from error
        except BaseException:
            commits.close()
            raise
        return commits

    def _find(self) -> None:
        commits = [record for name in COMMITS if (record := self._read(name, _COMMIT_MAGIC)) is not None]
        if not commits:
            raise FormatError(f"{str(self.folder)!r} must have a valid commit, got none; it is damaged")
        self.last = max(commits)
        intent = self._read(INTENT, _INTENT_MAGIC)
        if intent is None or intent.step < self.last.step:
            return
        if intent.step > self.last.step:
            raise FormatError(
                f"{str(self.folder)!r} must have the commit of step {intent.step}, got step "
                f"{self.last.step} as the last; it is damaged"
            )
        self.pending = intent.payload

    def keep(self, which: bytes, rows: Sequence[memoryview]) -> None:
        """Write rows to the undo log before they are overwritten, then the intent that locates them.

        Raises
        ------
        StorageError
            If the disk is full.
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
        """Withdraw the intent after the rows are restored."""
        self._write(INTENT, _INTENT_MAGIC, Record(0, 0, b""))
        self.pending = None

    def kept(self, at: int, nbytes: int) -> bytearray:
        """Read bytes of the undo log at an offset."""
        data = bytearray(nbytes)
        remaining = memoryview(data)
        while remaining.nbytes and (count := os.preadv(self._files[UNDO], [remaining], at)):
            remaining = remaining[count:]
            at += count
        if remaining.nbytes:
            raise FormatError(f"{str(self.folder / UNDO)!r} must have {remaining.nbytes} more bytes; it is damaged")
        return data

    def commit(self, layout: int, state: bytes) -> None:
        """Write the commit record of a step."""
        record = Record(self.last.step + 1, layout, state)
        self._write(COMMITS[record.step % 2], _COMMIT_MAGIC, record)
        self.last = record
        self.pending = None

    def flush(self) -> None:
        """Sync the files to disk."""
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
        actual_magic, version, checksum, step, layout, nbytes = _HEAD.unpack(head)
        if actual_magic != magic or nbytes > os.fstat(fd).st_size:
            return None
        if version != VERSION:
            raise FormatError(f"{str(self.folder / name)!r} must have version {VERSION}, got version {version}")
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

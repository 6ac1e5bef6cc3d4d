"""Folder that contains a buffer's memory-mapped columns and a write-ahead log of the buffer's state.

::

        buffer.json              description of the buffer, written once
        status.json              whether the folder is closed, with checksums of all files; see `status`
        layout.<n>.json          name, dtype, shape and file of each column, and the buffer's notes
        <n>.column               rows of one column in all slots, as in memory
        lock                     locked by the process that has the folder open
        commit.0  .1             state after a step, written alternately
        undo                     previous contents of the rows that the current step overwrites
        intent                   location of the undo rows, and number of the previous step

A step copies the rows that it will overwrite to `undo`, records their location in `intent`, writes the columns, and
commits. Mapped and written data is in the page cache of the operating system, so all writes of a killed process
persist. On opening, the newest valid commit determines the state. If `intent` is newer than the newest valid commit,
the columns may be partially written, and the rows are restored from `undo`. Therefore no partially written row is read
and no committed row is lost. A crash of the machine loses data that was not synced; `flush` syncs all data.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import describe_value
from samplebatch.buffer.store import Slots
from samplebatch.column.types import named_dtype
from samplebatch.errors import ColumnTypeError, FormatError, StorageError
from samplebatch.storage.buffers.status import ABOUT, BUFFER_FILE, LOCK, STATUS, VERSION, FolderStatus, read_about
from samplebatch.storage.files import open_locked, read_plain, reserve, sync, write_at, write_plain

_COMMIT_VERSION = 1
INTENT, UNDO = "intent", "undo"
COMMITS = ("commit.0", "commit.1")
FILES = (*COMMITS, INTENT, UNDO)

_HEAD = struct.Struct("<8sIIQQQ")
"""Magic, version, CRC-32 of the following bytes, step number, layout number, size of the payload."""

_CHECKED_FROM = 16
_COMMIT_MAGIC, _INTENT_MAGIC = b"SBCOMMIT", b"SBINTENT"
_RESERVED_NBYTES = 1 << 12


class Record(NamedTuple):
    """Commit or intent record: step number, number of the column layout, and payload."""

    step: int
    layout: int
    payload: bytes


class Commits:
    """Write-ahead log files of a `BufferFolder`; `create` and `open` return an instance.

    pending: intent of a step that has not been committed, or None.
    close: function that closes the files; also called when the object is garbage-collected.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> commits = Commits.create(folder, 0, b"nothing")
    >>> commits.keep(b"row 3", [memoryview(b"as it was")])
    >>> commits.close()  # before the step is committed
    >>> commits = Commits.open(folder)
    >>> commits.last.payload, commits.pending, commits.undo_bytes(0, 9)
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
        """Create the files and commit the initial state as step 1.

        Raises StorageError if the disk is full.
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

        Raises FormatError if a file is missing, no commit is valid, or the newest commit is damaged.
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
        """Write rows to the undo log before they are overwritten, then write the intent that records their location.

        Raises StorageError if the disk is full.
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
        """Delete the intent after the rows have been restored."""
        self._write(INTENT, _INTENT_MAGIC, Record(0, 0, b""))
        self.pending = None

    def undo_bytes(self, at: int, nbytes: int) -> bytearray:
        """Read bytes of the undo log at an offset."""
        data = bytearray(nbytes)
        remaining = memoryview(data)
        while remaining.nbytes and (count := os.preadv(self._files[UNDO], [remaining], at)):
            remaining = remaining[count:]
            at += count
        if remaining.nbytes:
            raise FormatError(
                f"{str(self.folder / UNDO)!r} must have {nbytes} overwritten bytes, got "
                f"{nbytes - remaining.nbytes}; it is damaged"
            )
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
        """Read a record; return None if the record is only partially written."""
        fd = self._files[name]
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        actual_magic, version, checksum, step, layout, nbytes = _HEAD.unpack(head)
        if actual_magic != magic or nbytes > os.fstat(fd).st_size:
            return None
        if version != _COMMIT_VERSION:
            raise FormatError(f"{str(self.folder / name)!r} must have version {_COMMIT_VERSION}, got version {version}")
        payload = os.pread(fd, nbytes, _HEAD.size)
        if len(payload) < nbytes or _checksum(head, payload) != checksum:
            return None
        return Record(step, layout, payload)

    def _write(self, name: str, magic: bytes, record: Record) -> None:
        fields = record.step, record.layout, len(record.payload)
        checksum = _checksum(_HEAD.pack(magic, _COMMIT_VERSION, 0, *fields), record.payload)
        head = _HEAD.pack(magic, _COMMIT_VERSION, checksum, *fields)
        write_at(self._files[name], [memoryview(head + record.payload)], 0)


def _checksum(head: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(head[_CHECKED_FROM:]))


def _close(files: dict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])


_LAYOUT, _COLUMN = "layout.{}.json", "{}.column"
_ENTRY = struct.Struct("<QQ")
"""Entry of an intent: number of files and slots that follow; the undo log has their rows in order of files."""

Overwritten = Sequence[tuple[Iterable[str], Slots]]
"""Rows that a step overwrites: names of columns with slots."""

_open_folders: weakref.WeakSet[BufferFolder] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for folder in list(_open_folders):
        folder._abandon("only the process that opened it can, and this one was forked from it")


os.register_at_fork(after_in_child=_leave_to_parent)


class _Column(NamedTuple):
    """Column of a folder: file number, array, memory mapping of the file, and row size in bytes."""

    file: int
    values: npt.NDArray[Any]
    mapping: mmap.mmap | None
    row_nbytes: int


class BufferFolder:
    """Folder of memory-mapped columns with a write-ahead log, used by `FolderJournal`.

    about: description of the buffer, written when the folder is created; plain values.
    notes: plain values that describe the buffer's columns, set by `note`.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> folder = BufferFolder.create(path, {"size": 4}, b"no rows")
    >>> obs = folder.allocate("obs", (4, 2), np.dtype(np.float32))
    >>> folder.begin([])
    >>> obs[0] = 1.0, 2.0
    >>> folder.commit(b"one row")
    >>> folder.close()
    >>> folder = BufferFolder.open(path)
    >>> folder.about, folder.state, folder.columns["obs"][0]
    ({'size': 4}, b'one row', array([1., 2.], dtype=float32))
    >>> folder.close()
    """

    def __init__(self, path: Path, lock: int, commits: Commits, about: dict[str, Any]) -> None:
        self.path = path
        self.about = about
        self.notes: Any = None
        self._commits = commits
        self._status = FolderStatus(path, closed=False, files={})
        self._opened_from: FolderStatus | None = None
        self._closed = ""
        self._columns: dict[str, _Column] = {}
        self._layout = 0
        self._layout_changed = False
        self._next_file = 0
        self._committed: frozenset[int] = frozenset()
        self._unlock = weakref.finalize(self, os.close, lock)
        _open_folders.add(self)

    @classmethod
    def create(cls, path: str | os.PathLike[str], about: dict[str, Any], state: bytes) -> Self:
        """Create and lock a folder for a buffer.

        path: folder that does not exist or is empty; its parent folder must exist.
        about: description of the buffer; must be JSON-serializable.

        Raises StorageError if the folder is not empty, another process creates a buffer in it, or the disk is full.
        Raises OSError if the folder cannot be created.
        """
        folder = Path(path).absolute()
        folder.mkdir(exist_ok=True)
        _check_free(folder)
        lock = open_locked(folder / LOCK)
        try:
            # Another process may have created a buffer in the meantime.
            _check_free(folder)
            for entry in folder.iterdir():
                if entry.name != LOCK:
                    entry.unlink()
            write_plain(folder / _LAYOUT.format(0), {"columns": {}, "notes": None})
            files = Commits.create(folder, 0, state)
            buffer_folder = cls(folder, lock, files, about)
            buffer_folder._status.write_open(FILES)
            write_plain(folder / ABOUT, {"version": VERSION, "about": about})
        except BaseException:
            os.close(lock)
            raise
        return buffer_folder

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool | None = None) -> Self:
        """Lock a folder, verify it, and restore the last committed state.

        verify: whether to verify all files against the checksums that were written when the folder was closed. None
        verifies only files that have changed since the folder was closed. False also accepts a folder that was copied
        while open, or that was open when the machine crashed.

        Raises StorageError if another process has opened the folder, or the folder contains no buffer. Raises
        FormatError if a size, checksum, dtype or version is invalid, or if the folder was not closed and its files have
        been replaced.
        """
        folder = Path(path).absolute()
        if not (folder / ABOUT).is_file():
            hint = f"; load {str(folder / BUFFER_FILE)!r}" if (folder / BUFFER_FILE).is_file() else ""
            raise StorageError(f"{str(path)!r} must be the folder of a buffer, got one without {ABOUT!r}{hint}")
        lock = open_locked(folder / LOCK)
        try:
            version, about = read_about(folder)
            status = None if verify is False else FolderStatus.read(folder, version)
            if status is not None and status.closed:
                status.check_closed(always=verify is True)
            elif status is not None:
                status.check_open(FILES)
            files = Commits.open(folder)
        except BaseException:
            os.close(lock)
            raise
        buffer_folder = cls(folder, lock, files, about)
        try:
            buffer_folder._map_layout(files.last.layout)
            if status is not None and not status.closed:
                status.check_open(buffer_folder._file_names())
            buffer_folder._opened_from = status
            buffer_folder._status.write_open(buffer_folder._file_names())
            if version != VERSION:
                write_plain(folder / ABOUT, {"version": VERSION, "about": about})
            buffer_folder._undo()
            buffer_folder._remove_strays()
        except BaseException:
            buffer_folder._abandon("it could not be opened")
            raise
        return buffer_folder

    # Columns

    @property
    def state(self) -> bytes:
        """State of the last commit."""
        return self._commits.last.payload

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays by column name."""
        return {name: column.values for name, column in self._columns.items()}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Create a column of zeros in its own file; the next commit adds the column to the buffer.

        Disk blocks of the entire file are reserved, because a write to an unreserved block of a mapped file terminates
        the process if the disk is full. At the next commit, the column replaces an existing column of the same name.

        Raises StorageError if the disk is full, or the folder is closed.
        """
        self._check_open()
        path = self.path / _COLUMN.format(self._next_file)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            reserve(fd, dtype.itemsize * prod(shape), f"column {name!r}")
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self._columns[name] = column = self._map(name, self._next_file, shape, dtype)
        self._next_file += 1
        self._layout_changed = True
        return column.values

    def note(self, notes: Any) -> None:
        """Set the notes about the columns; notes must be JSON-serializable and are committed with the columns."""
        if notes != self.notes:
            self.notes = notes
            self._layout_changed = True

    def _map(self, name: str, file: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Column:
        nbytes = dtype.itemsize * prod(shape)
        path = self.path / _COLUMN.format(file)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise FormatError(f"{str(path)!r} must contain column {name!r}, got no file; damaged") from error
        try:
            size = os.fstat(fd).st_size
            if size != nbytes:
                raise FormatError(f"{str(path)!r} must have the {nbytes} bytes of column {name!r}, got {size}")
            # An empty file cannot be mapped.
            mapping = mmap.mmap(fd, nbytes) if nbytes else None
        finally:
            os.close(fd)
        values: npt.NDArray[Any] = np.ndarray(shape, dtype, mapping) if mapping else np.empty(shape, dtype)
        return _Column(file, values, mapping, dtype.itemsize * prod(shape[1:]))

    def _map_layout(self, number: int) -> None:
        path = self.path / _LAYOUT.format(number)
        layout = read_plain(path)
        if not isinstance(layout.get("columns"), dict):
            raise FormatError(
                f"{str(path)!r} must have a dict of columns, got {describe_value(layout.get('columns'))}; it is damaged"
            )
        self.notes = layout.get("notes")
        for name, entry in layout["columns"].items():
            try:
                dtype = named_dtype(str(entry["dtype"]))
                file, shape = int(entry["file"]), tuple(map(int, entry["shape"]))
                if min(file, *shape) < 0:
                    raise ValueError(f"its file number and shape must be non-negative, got {file} and {shape}")
            except (ColumnTypeError, KeyError, TypeError, ValueError) as error:
                raise FormatError(f"{str(path)!r} must describe column {name!r}: {error}") from error
            self._columns[name] = self._map(name, file, shape, dtype)
        self._layout = number
        self._committed = frozenset(column.file for column in self._columns.values())
        self._next_file = max(self._committed, default=-1) + 1

    def _write_layout(self) -> None:
        columns = {
            name: {"file": column.file, "dtype": column.values.dtype.str, "shape": column.values.shape}
            for name, column in self._columns.items()
        }
        write_plain(self.path / _LAYOUT.format(self._layout), {"columns": columns, "notes": self.notes})

    def _file_names(self) -> list[str]:
        """List the names of the files that steps modify."""
        return [*FILES, *(_COLUMN.format(column.file) for column in self._columns.values())]

    def _remove_strays(self) -> None:
        retained = {_LAYOUT.format(self._layout), *(_COLUMN.format(file) for file in self._committed)}
        for entry in self.path.iterdir():
            ours = entry.name.startswith("layout.") or entry.name.endswith((".column", ".tmp"))
            if ours and entry.name not in retained:
                entry.unlink()

    # Steps

    def begin(self, overwritten: Overwritten) -> None:
        """Write the rows that the next step will overwrite to the undo log.

        If an error prevented the commit of the previous step, the rows of that step are restored first.

        overwritten: rows that the step will overwrite; rows that the last committed state does not contain can be
        omitted.

        Raises StorageError if the disk is full, or the folder is closed. The folder is unchanged after an error.
        """
        self._check_open()
        self._undo()
        entries: list[bytes] = []
        rows: list[memoryview] = []
        for names, slots in overwritten:
            columns = [column for name in names if (column := self._columns[name]).file in self._committed]
            if not columns:
                continue
            numbers = slots
            if isinstance(slots, slice):
                numbers = np.arange(len(columns[0].values))[slots]
            overwritten_slots = np.array([numbers], np.int64).reshape(-1)
            if not len(overwritten_slots):
                continue
            rows += [_rows_of(column, slots, overwritten_slots) for column in columns if column.row_nbytes]
            files = [column.file for column in columns if column.row_nbytes]
            entries.append(
                _ENTRY.pack(len(files), len(overwritten_slots))
                + np.array([*files], np.int64).tobytes()
                + overwritten_slots.tobytes()
            )
        if entries:
            self._commits.keep(b"".join(entries), rows)

    def commit(self, state: bytes) -> None:
        """Write the commit record of a step whose columns have been written.

        Raises StorageError if the record cannot be written; the folder is then closed in the state of the last commit.
        """
        self._check_open()
        changed = self._layout_changed
        try:
            if changed:
                self._layout += 1
                self._write_layout()
                self._status.write_open(self._file_names())
            self._commits.commit(self._layout, state)
        except OSError as error:
            self._abandon("a step could not be committed")
            raise StorageError(
                error.errno, f"{str(self.path)!r} must be writable to commit a step, and is closed: {error.strerror}"
            ) from error
        if changed:
            self._layout_changed = False
            self._committed = frozenset(column.file for column in self._columns.values())
            self._remove_strays()

    def _undo(self) -> None:
        """Roll back an uncommitted step by restoring the rows that it overwrote; idempotent."""
        entries = self._commits.pending
        if entries is None:
            return
        by_file = {column.file: column for column in self._columns.values()}
        at = position = 0
        while position < len(entries):
            count, length = _ENTRY.unpack_from(entries, position)
            numbers = np.frombuffer(entries, np.int64, count + length, position + _ENTRY.size)
            position += _ENTRY.size + numbers.nbytes
            for file in numbers[:count].tolist():
                column = by_file[file]
                nbytes = column.row_nbytes * length
                rows = np.frombuffer(self._commits.undo_bytes(at, nbytes), column.values.dtype)
                column.values[numbers[count:]] = rows.reshape(length, *column.values.shape[1:])
                at += nbytes
        self._commits.withdraw()

    # Closing

    def flush(self) -> None:
        """Sync all committed data to disk, columns before commit records.

        Raises StorageError if the folder is closed. Raises OSError if the data cannot be written.
        """
        self._check_open()
        for column in self._columns.values():
            if column.mapping is not None:
                column.mapping.flush()
        self._commits.flush()
        for name in (ABOUT, STATUS, _LAYOUT.format(self._layout), ""):
            sync(self.path / name)

    def close(self) -> None:
        """Sync all data, write checksums and unlock the folder; idempotent. Existing arrays remain readable."""
        if not self._closed:
            self._undo()
            self._commits.forget_rows()
            self.flush()
            others = [ABOUT, _LAYOUT.format(self._layout)]
            self._status.write_closed([*others, *self._file_names()], self._opened_from)
            self._abandon("it was closed")

    @property
    def closed(self) -> bool:
        """Whether the folder is closed; a closed folder rejects steps."""
        return bool(self._closed)

    def _abandon(self, why: str) -> None:
        """Release the lock and close the files without further writes."""
        self._closed = self._closed or why
        self._commits.close()
        self._unlock()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the buffer in {str(self.path)!r} must be open to be written to: {self._closed}")


def _check_free(folder: Path) -> None:
    if (folder / ABOUT).exists():
        raise StorageError(f"{str(folder)!r} must be a new folder, got an existing buffer; open it with open()")
    # Files of an interrupted `create` may be removed.
    written = [_LAYOUT.format(0), STATUS, ABOUT]
    ours = {LOCK, *FILES, *written[:2], *(f"{name}.tmp" for name in written)}
    strange = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
    if strange:
        raise StorageError(f"{str(folder)!r} must be a new or empty folder, got one with {strange[0]!r}")


def _rows_of(column: _Column, slots: Slots, numbers: npt.NDArray[np.int64]) -> memoryview:
    """Return the bytes of rows: a view for a single row, a copy for several rows."""
    if isinstance(slots, int):
        assert column.mapping is not None
        return memoryview(column.mapping)[slots * column.row_nbytes : (slots + 1) * column.row_nbytes]
    return column.values[numbers].reshape(-1).view(np.uint8).data

"""BufferFolder: a folder that holds a buffer, its columns mapped into memory and its state committed step by step.

::

    buffer.json              what the buffer is; written once
    status.json              whether the folder was closed, and then checksums of all files; see `folder_status`
    layout.<n>.json          name, dtype, shape and file of each column, and what the buffer notes about them
    <n>.column               the rows of one column in all slots, as they lie in memory
    lock                     locked by the process that has the folder open
    commit.0  .1, intent, undo   see `commits`

A step copies the rows that it will overwrite to `undo`, says so in `intent`, writes the columns, and commits. What is
mapped or written belongs to the system and outlives the process: whenever that is killed, everything it had written is
there. On opening, the newest whole commit says what the state was; if an intent followed it, the columns may be written
in part, and the rows are put back. So no torn row is ever read, and no committed one is missing. A machine that goes
down, as opposed to a process, loses what the system had not yet written to the disk; `flush` waits for that.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from samplebatch.buffer.store import Slots
from samplebatch.column.types import named_dtype
from samplebatch.errors import ColumnTypeError, FormatError, StorageError
from samplebatch.storage.buffers.commits import FILES, Commits
from samplebatch.storage.buffers.status import ABOUT, BUFFER_FILE, LOCK, STATUS, VERSION, FolderStatus, read_about
from samplebatch.storage.files import open_locked, read_plain, reserve, sync, write_plain

_LAYOUT, _COLUMN = "layout.{}.json", "{}.column"
_ENTRY = struct.Struct("<QQ")
"""In an intent: how many files and how many slots follow, the rows of which are kept file by file."""

Overwritten = Sequence[tuple[Iterable[str], Slots]]
"""Which rows a step overwrites: names of columns, and slots of each of them."""

_open_folders: weakref.WeakSet[BufferFolder] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for folder in list(_open_folders):
        folder._abandon("only the process that opened it can, and this one was forked from it")


os.register_at_fork(after_in_child=_leave_to_parent)


class _Column(NamedTuple):
    """The number of a column's file, its array, the mapping below that, and the bytes of a row."""

    file: int
    values: npt.NDArray[Any]
    mapping: mmap.mmap | None
    row_nbytes: int


class BufferFolder:
    """A folder of mapped columns behind a write-ahead log, used by `FolderJournal`; `create` and `open` make one.

    Attributes
    ----------
    path
        The folder.
    about
        What the buffer said about itself when the folder was made: plain values.
    notes
        What the buffer says about its columns: plain values, set by `note`.

    Examples
    --------
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
        """Create a folder for a buffer, and lock it.

        Parameters
        ----------
        path
            A folder that does not exist, or has nothing in it. The folder it lies in must exist.
        about
            What the buffer says about itself, plain enough for JSON.
        state
            What is committed first.

        Raises
        ------
        StorageError
            If there is something in the folder, another process makes a buffer in it, or the disk is full.
        OSError
            If it cannot be made.
        """
        folder = Path(path).absolute()
        folder.mkdir(exist_ok=True)
        _check_free(folder)
        lock = open_locked(folder / LOCK)
        try:
            # Another process may have been faster.
            _check_free(folder)
            for entry in folder.iterdir():
                if entry.name != LOCK:
                    entry.unlink()
            write_plain(folder / _LAYOUT.format(0), {"columns": {}, "notes": None})
            files = Commits.create(folder, 0, state)
            made = cls(folder, lock, files, about)
            made._status.write_open(FILES)
            write_plain(folder / ABOUT, {"version": VERSION, "about": about})
        except BaseException:
            os.close(lock)
            raise
        return made

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool | None = None) -> Self:
        """Lock a folder, check it, and bring it to the state after the last step that was committed.

        Parameters
        ----------
        path
            The folder.
        verify
            Whether to hold all files against the checksums that they were closed with; by default those that were
            touched since. If false, a folder is taken that was copied without being closed, or whose machine went down.

        Raises
        ------
        StorageError
            If another process has it open, or there is no buffer in it.
        FormatError
            If its files are not what they claim to be: a size, a checksum, a dtype or a version is wrong; if they were
            not closed, and are not those that were open.
        """
        folder = Path(path).absolute()
        if not (folder / ABOUT).is_file():
            hint = f"; load {str(folder / BUFFER_FILE)!r}" if (folder / BUFFER_FILE).is_file() else ""
            raise StorageError(f"{str(path)!r} must be the folder of a buffer, and there is no {ABOUT!r} in it{hint}")
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
        made = cls(folder, lock, files, about)
        try:
            made._map_layout(files.last.layout)
            if status is not None and not status.closed:
                status.check_open(made._file_names())
            made._opened_from = status
            made._status.write_open(made._file_names())
            if version != VERSION:
                write_plain(folder / ABOUT, {"version": VERSION, "about": about})
            made._undo()
            made._remove_strays()
        except BaseException:
            made._abandon("it could not be opened")
            raise
        return made

    # Columns

    @property
    def state(self) -> bytes:
        """The state of the last commit."""
        return self._commits.last.payload

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name."""
        return {name: column.values for name, column in self._columns.items()}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Create a column of zeros in a file of its own; it belongs to the buffer from the next commit on.

        The whole file is reserved, so that a disk that is full says so here, and not by a signal when rows are written.
        A column takes the place of another of its name from the next commit on.

        Raises
        ------
        StorageError
            If the disk has no room for it, or the folder is closed.
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
        """Set the notes about the columns, plain enough for JSON; they are committed together with them."""
        if notes != self.notes:
            self.notes = notes
            self._layout_changed = True

    def _map(self, name: str, file: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Column:
        nbytes = dtype.itemsize * prod(shape)
        path = self.path / _COLUMN.format(file)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise FormatError(f"{str(path)!r} must hold column {name!r}, and it is not there; damaged") from error
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
            raise FormatError(f"{str(path)!r} must list columns, it does not; it is damaged")
        self.notes = layout.get("notes")
        for name, entry in layout["columns"].items():
            try:
                dtype = named_dtype(str(entry["dtype"]))
                file, shape = int(entry["file"]), tuple(map(int, entry["shape"]))
                if min(file, *shape) < 0:
                    raise ValueError("a number is below zero")
            except (ColumnTypeError, KeyError, TypeError, ValueError) as error:
                raise FormatError(f"{str(path)!r} must describe column {name!r}, it does not: {error}") from error
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
        """List the files that change with steps."""
        return [*FILES, *(_COLUMN.format(column.file) for column in self._columns.values())]

    def _remove_strays(self) -> None:
        """Remove files of layouts that are not committed."""
        kept = {_LAYOUT.format(self._layout), *(_COLUMN.format(file) for file in self._committed)}
        for entry in self.path.iterdir():
            ours = entry.name.startswith("layout.") or entry.name.endswith((".column", ".tmp"))
            if ours and entry.name not in kept:
                entry.unlink()

    # Steps

    def begin(self, overwritten: Overwritten) -> None:
        """Write the undo log of the next step: the rows that it will overwrite.

        If the step before was not committed, because something was raised, its rows are put back first.

        Parameters
        ----------
        overwritten
            The rows, as far as the last state shows them: others need not be kept.

        Raises
        ------
        StorageError
            If the disk is full, or the folder is closed. Nothing has changed then.
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
            kept = np.array([numbers], np.int64).reshape(-1)
            if not len(kept):
                continue
            rows += [_rows_of(column, slots, kept) for column in columns if column.row_nbytes]
            files = [column.file for column in columns if column.row_nbytes]
            entries.append(_ENTRY.pack(len(files), len(kept)) + np.array([*files], np.int64).tobytes() + kept.tobytes())
        if entries:
            self._commits.keep(b"".join(entries), rows)

    def commit(self, state: bytes) -> None:
        """Write the commit record of a step: its columns are written, and this is the state.

        Raises
        ------
        StorageError
            If that cannot be written. The folder is closed then, and opens in the state of the last commit.
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
                error.errno, f"{str(self.path)!r} must take a step, and could not, and is closed: {error.strerror}"
            ) from error
        if changed:
            self._layout_changed = False
            self._committed = frozenset(column.file for column in self._columns.values())
            self._remove_strays()

    def _undo(self) -> None:
        """Roll back a step that was not committed: put its overwritten rows back. Idempotent."""
        entries = self._commits.pending
        if entries is None:
            return
        by_file = {column.file: column for column in self._columns.values()}
        at = place = 0
        while place < len(entries):
            count, length = _ENTRY.unpack_from(entries, place)
            numbers = np.frombuffer(entries, np.int64, count + length, place + _ENTRY.size)
            place += _ENTRY.size + numbers.nbytes
            for file in numbers[:count].tolist():
                column = by_file[file]
                nbytes = column.row_nbytes * length
                rows = np.frombuffer(self._commits.kept(at, nbytes), column.values.dtype)
                column.values[numbers[count:]] = rows.reshape(length, *column.values.shape[1:])
                at += nbytes
        self._commits.withdraw()

    # Closing

    def flush(self) -> None:
        """Wait until everything that was committed is on the disk: the columns first.

        Raises
        ------
        StorageError
            If the folder is closed.
        OSError
            If the disk fails.
        """
        self._check_open()
        for column in self._columns.values():
            if column.mapping is not None:
                column.mapping.flush()
        self._commits.flush()
        for name in (ABOUT, STATUS, _LAYOUT.format(self._layout), ""):
            sync(self.path / name)

    def close(self) -> None:
        """Flush, write checksums and unlock; closing again does nothing. Arrays that are still around can be read."""
        if not self._closed:
            self._undo()
            self._commits.forget_rows()
            self.flush()
            others = [ABOUT, _LAYOUT.format(self._layout)]
            self._status.write_closed([*others, *self._file_names()], self._opened_from)
            self._abandon("it was closed")

    @property
    def closed(self) -> bool:
        """Whether the folder takes no more steps."""
        return bool(self._closed)

    def _abandon(self, why: str) -> None:
        """Release lock and files as they are."""
        self._closed = self._closed or why
        self._commits.close()
        self._unlock()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the buffer in {str(self.path)!r} must be open to be written to: {self._closed}")


def _check_free(folder: Path) -> None:
    if (folder / ABOUT).exists():
        raise StorageError(f"{str(folder)!r} must be a new folder, and it holds a buffer; open that with open()")
    # What is left of a folder whose making was cut short may go.
    written = [_LAYOUT.format(0), STATUS, ABOUT]
    ours = {LOCK, *FILES, *written[:2], *(f"{name}.tmp" for name in written)}
    strange = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
    if strange:
        raise StorageError(f"{str(folder)!r} must be a new folder or an empty one, and it holds {strange[0]!r}")


def _rows_of(column: _Column, slots: Slots, numbers: npt.NDArray[np.int64]) -> memoryview:
    """Return the bytes of rows: a view of a single row, otherwise gathered."""
    if isinstance(slots, int):
        assert column.mapping is not None
        return memoryview(column.mapping)[slots * column.row_nbytes : (slots + 1) * column.row_nbytes]
    return column.values[numbers].reshape(-1).view(np.uint8).data

"""Commit log of a dataset with one line per commit; writers lock the folder, and readers need no lock.

The log is a Parquet file without rows, so that other readers of the folder treat the log as an empty part:

    PAR1                  magic
        0123abcd {...}        one line per commit: CRC-32 and JSON
        89abcdef              seal: CRC-32 of all following bytes, or dashes
    footer                schema of the dataset, no row groups; its length; PAR1

An append overwrites the previous seal and footer with the next line, dashes and a footer in one call. Once the line,
the dashes and the footer are on disk, the new seal replaces the dashes. The last line of a sealed log is therefore
complete, and a damaged line can be distinguished from a truncated line. In format version 1, the log was a text file
that consisted of the lines alone.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import ipc

from samplebatch.arguments import describe_value
from samplebatch.errors import FormatError
from samplebatch.storage import checksums
from samplebatch.storage.files import replacing, write_at
from samplebatch.storage.tables.parquet import schema_to_store

LOG = "_commits.parquet"
_TEXT_LOG = "_commits"
"""Log of format version 1."""

LOGS = (LOG, _TEXT_LOG)
"""File names of the log by format version; a folder contains one of them."""

_LOCK = ".lock"
_VERSION = 2
_READABLE = (1, 2)
_MAGIC = checksums.PARQUET.magic
_OPEN_SEAL = b"--------\n"
_LINE = re.compile(rb"[0-9a-f]{8} \{[ -~]*\}")


class Part(NamedTuple):
    """Committed file of a dataset.

    groups: number of rows per row group.
    nbytes: size in bytes of the rows in memory.
    policies: pairs of policy id and number of rows, in row order; None for a batch without policies.
    """

    name: str
    size: int
    groups: list[int]
    nbytes: int
    policies: list[tuple[str, int]] | None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self.groups)


class Snapshot(NamedTuple):
    """State of a dataset after a commit.

    about: common type, schema and action units of all batches. Empty before the first commit.
    parts: the parts in row order.
    nbytes: size of the log up to the commit, in bytes.
    torn: number of bytes after the commit that form no complete line; an active or killed writer wrote these bytes.
    is_sealed: whether a valid seal follows the last line of the log.
    """

    about: dict[str, Any]
    parts: list[Part]
    nbytes: int
    torn: int
    is_sealed: bool


class CommitLog:
    """Log file in a dataset's folder; one process at a time appends commits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / LOG

    @property
    def path(self) -> Path | None:
        """Path of the log of either format version; None if the folder contains no log."""
        # A writer may rename a version 1 log between two checks.
        return next((path for name in (*LOGS, LOG) if (path := self._folder / name).exists()), None)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Acquire the writer lock of the folder, waiting for other writers, and hold it during the `with` block."""
        fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def read(self) -> Snapshot:
        """Read all commits of the log.

        Raises FormatError if a complete line of the log is damaged.
        """
        data = self._bytes()
        while True:
            try:
                return self._parse(*data)
            except FormatError:
                # A read during an append may return bytes from before and after it.
                again = self._bytes()
                if again == data:
                    raise
                data = again

    def append(self, entry: dict[str, Any], state: Snapshot) -> None:
        """Append an entry to the log, and sync the log to disk (lock held); the log is unchanged if the write fails."""
        text = json.dumps(entry).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        about = {**state.about, **entry.get("about", {})}
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            start = line if state.nbytes else _MAGIC + line
            footer = _footer(about)
            try:
                _write(fd, start + _OPEN_SEAL + footer, state.nbytes)
            except OSError:
                with contextlib.suppress(OSError):
                    _write(fd, _tail(state.about), state.nbytes)
                raise
            os.fsync(fd)
            os.pwrite(fd, _seal(footer), state.nbytes + len(start))
        finally:
            os.close(fd)

    def repair(self, state: Snapshot) -> None:
        """Upgrade a log of format version 1, and replace an incomplete last line (lock held)."""
        old = self._folder / _TEXT_LOG
        if old.exists():
            # One log exists at any time: its bytes are replaced before it is renamed.
            lines = old.read_bytes()
            if not lines.startswith(_MAGIC):
                start = _MAGIC * bool(state.nbytes)
                with replacing(old, unnamed=True) as file:
                    file.write(start + lines[: state.nbytes] + _tail(state.about))
            os.rename(old, self._path)
        elif not state.is_sealed:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                _write(fd, _tail(state.about), state.nbytes)
                os.fsync(fd)
            finally:
                os.close(fd)

    def _bytes(self) -> tuple[str, bytes]:
        for name in (*LOGS, LOG):
            with contextlib.suppress(FileNotFoundError):
                return name, (self._folder / name).read_bytes()
        return LOG, b""

    def _parse(self, name: str, data: bytes) -> Snapshot:
        start = 0 if name == _TEXT_LOG and not data.startswith(_MAGIC) else len(_MAGIC)
        sealed = None
        if not start:
            end = data.rfind(b"\n") + 1
        elif data.startswith(_MAGIC):
            sealed = _sealed_end(data)
            end = _torn_end(data) if sealed is None else sealed
        elif _MAGIC.startswith(data) or not data[:start].strip(b"\0"):
            start = end = 0
        else:
            raise FormatError(f"{str(self._folder / name)!r} must start with {_MAGIC!r}, got {data[:start]!r}")
        about: dict[str, Any] = {}
        parts: list[Part] = []
        lines = data[start:end].split(b"\n")
        for i, line in enumerate(lines if lines[-1] else lines[:-1]):
            entry = _entry(line)
            try:
                if entry is None:
                    raise ValueError("it must match its checksum, got changed bytes")
                _apply(entry, about, parts)
            except (KeyError, TypeError, ValueError) as error:
                raise FormatError(
                    f"{str(self._folder / name)!r} must have the commits that were written, got a damaged line "
                    f"{i + 1}: {error!r}"
                ) from error
        if not about:
            return Snapshot({}, [], 0, len(data), is_sealed=not data)
        # A line before an open seal is complete: its writer was interrupted before it wrote the seal.
        torn = 0 if sealed is not None or data.startswith(_OPEN_SEAL, end) else len(data) - end
        return Snapshot(about, parts, end, torn, is_sealed=sealed is not None or not (start or torn))


def begin(about: dict[str, Any]) -> dict[str, Any]:
    """Return a log entry that sets or extends the properties of all batches."""
    return {"version": _VERSION, "about": about}


def add(part: Part, instead: list[str]) -> dict[str, Any]:
    """Return the log entry of a part that is appended, or that replaces the consecutive parts in `instead`."""
    return {"part": part._asdict(), "instead": instead}


def encode_schema(schema: pa.Schema) -> str:
    """Encode the in-memory schema of batches for a log entry."""
    return base64.b64encode(schema.remove_metadata().serialize().to_pybytes()).decode()


def schema_in(about: dict[str, Any]) -> pa.Schema:
    """Decode the in-memory schema of batches from the properties in a log."""
    try:
        return ipc.read_schema(pa.py_buffer(base64.b64decode(about["schema"])))
    except (KeyError, TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise FormatError(f"the log of a dataset must have an intact schema of its parts: {error!r}") from error


def hide_rows(path: Path, nbytes: int, about: dict[str, Any]) -> None:
    """Append a footer without row groups to the prefix of a file, so that readers ignore the rows in the prefix."""
    footer = _footer(about)
    with open(path, "r+b") as file:
        file.seek(nbytes)
        if file.read() != footer:
            _write(file.fileno(), footer, nbytes)
            os.fsync(file.fileno())


def _footer(about: dict[str, Any]) -> bytes:
    """Return the bytes that follow the magic in a Parquet file with the parts' schema and no rows."""
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.ParquetWriter(file, schema_to_store(schema_in(about)), version="2.6").close()
    return file.getvalue()[len(_MAGIC) :]


def _seal(footer: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(footer)


def _tail(about: dict[str, Any]) -> bytes:
    """Return the seal and footer of a log; empty for a log without entries."""
    if not about:
        return b""
    footer = _footer(about)
    return _seal(footer) + footer


def _sealed_end(data: bytes) -> int | None:
    """Return the end offset of the lines that match the seal; None if the seal is invalid."""
    if data[-len(_MAGIC) :] != _MAGIC:
        return None
    footer = len(data) - 2 * len(_MAGIC) - int.from_bytes(data[-2 * len(_MAGIC) : -len(_MAGIC)], "little")
    end = footer - len(_OPEN_SEAL)
    return end if end >= len(_MAGIC) and data[end:footer] == _seal(data[footer:]) else None


def _torn_end(data: bytes) -> int:
    """Return the end offset of the complete lines of an unsealed log; damaged lines are included."""
    end = len(_MAGIC)
    while (line_end := data.find(b"\n", end) + 1) and _entry(data[end : line_end - 1]) is not None:
        end = line_end
    position = end
    for line in data[end:].split(b"\n")[:-1]:
        next_position = position + len(line) + 1
        if (position == end and _LINE.fullmatch(line)) or _entry(line) is not None:
            end = next_position
        position = next_position
    return end


def _write(fd: int, data: bytes, at: int) -> None:
    """Overwrite a file from an offset to the end of the file."""
    write_at(fd, [memoryview(data)], at)
    os.ftruncate(fd, at + len(data))


def _entry(line: bytes) -> dict[str, Any] | None:
    """Decode a line of the log; return None if the checksum does not match."""
    try:
        if int(line[:8], 16) != zlib.crc32(line[9:]):
            return None
        entry = json.loads(line[9:])
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _apply(entry: dict[str, Any], about: dict[str, Any], parts: list[Part]) -> None:
    if "about" in entry:
        if entry["version"] not in _READABLE:
            raise ValueError(f"version must be one of {_READABLE}, got {describe_value(entry['version'])}")
        about.update(entry["about"])
        return
    if not about:
        raise ValueError("the type and schema of batches must precede parts, got a part first")
    part = _part(entry["part"])
    instead = list(entry["instead"])
    names = [older.name for older in parts]
    at = names.index(instead[0]) if instead else len(parts)
    if names[at : at + len(instead)] != instead:
        raise ValueError(f"replaced parts must be consecutive, got {len(instead)} others")
    parts[at : at + len(instead)] = [part]


def _part(plain: dict[str, Any]) -> Part:
    part = Part(**plain)
    counts = [part.size, part.nbytes, *part.groups]
    if os.path.basename(part.name) != part.name:
        raise ValueError(f"a part must have a name without folders, got {describe_value(part.name)}")
    for count in counts:
        if type(count) is not int or count < 0:
            raise ValueError(f"counts of a part must be integers of at least 0, got {describe_value(count)}")
    policies = None if part.policies is None else [(policy, int(rows)) for policy, rows in part.policies]
    return part._replace(policies=policies)

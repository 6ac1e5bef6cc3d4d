"""The log of a dataset's parts: one line for each commit, written under a lock, read by anybody at any time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from samplebatch.errors import FormatError

LOG = "_commits"
_LOCK = ".lock"
_VERSION = 1


class Part(NamedTuple):
    """One committed file of a dataset.

    Attributes
    ----------
    name
        Its name.
    size
        Its bytes.
    groups
        Rows of each of its row groups.
    nbytes
        Bytes of its rows in memory.
    policies
        Pairs of a policy's id and the number of its rows, in order; None where there are no policies.
    """

    name: str
    size: int
    groups: list[int]
    nbytes: int
    policies: list[tuple[str, int]] | None

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(self.groups)


class Snapshot(NamedTuple):
    """The state of a dataset after some commit.

    Attributes
    ----------
    about
        What the first batch said of all: the type, and the schema. Empty before.
    parts
        The parts, in the order of their rows.
    nbytes
        Bytes of the log up to that commit.
    torn
        Bytes behind it that are no whole line: of a writer that is at work, or that was killed.
    """

    about: dict[str, Any]
    parts: list[Part]
    nbytes: int
    torn: int


class CommitLog:
    """The log file of a dataset's folder, appended to by one process at a time.

    Parameters
    ----------
    folder
        The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / LOG

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder's writers, once all others have let go of it."""
        fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def read(self) -> Snapshot:
        """Read all commits.

        Raises
        ------
        FormatError
            If a whole line has changed.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return Snapshot({}, [], 0, 0)
        about: dict[str, Any] = {}
        parts: list[Part] = []
        place = 0
        lines = data.split(b"\n")
        for i, line in enumerate(lines[:-1]):
            entry = _entry(line)
            try:
                if entry is None:
                    raise ValueError("it has changed")
                _apply(entry, about, parts)
            except (KeyError, TypeError, ValueError) as error:
                raise FormatError(
                    f"{str(self._path)!r} must have the commits that were written, line {i + 1} is none: {error!r}"
                ) from error
            place += len(line) + 1
        return Snapshot(about, parts, place, len(data) - place)

    def append(self, entry: dict[str, Any], at: int) -> None:
        """Commit an entry behind the first bytes of the log, durably; the lock must be held."""
        text = json.dumps(entry).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, at)
            os.pwrite(fd, line, at)
            os.fsync(fd)
        finally:
            os.close(fd)


def begin(about: dict[str, Any]) -> dict[str, Any]:
    """Return the first entry of a log."""
    return {"version": _VERSION, "about": about}


def add(part: Part, instead: list[str]) -> dict[str, Any]:
    """Return the entry of a part, in place of none or of some that follow each other."""
    return {"part": part._asdict(), "instead": instead}


def _entry(line: bytes) -> dict[str, Any] | None:
    """Read a line, or return None if it has changed."""
    try:
        if int(line[:8], 16) != zlib.crc32(line[9:]):
            return None
        entry = json.loads(line[9:])
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _apply(entry: dict[str, Any], about: dict[str, Any], parts: list[Part]) -> None:
    if "about" in entry:
        if entry["version"] != _VERSION:
            raise ValueError(f"version {entry['version']}, this library reads {_VERSION}")
        about.update(entry["about"])
        return
    part = _part(entry["part"])
    instead = list(entry["instead"])
    names = [older.name for older in parts]
    at = names.index(instead[0]) if instead else len(parts)
    if names[at : at + len(instead)] != instead:
        raise ValueError("parts that are replaced must follow each other")
    parts[at : at + len(instead)] = [part]


def _part(plain: dict[str, Any]) -> Part:
    part = Part(**plain)
    counts = [part.size, part.nbytes, *part.groups]
    if os.path.basename(part.name) != part.name or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("a part has a name without folders, and counts")
    policies = None if part.policies is None else [(policy, int(rows)) for policy, rows in part.policies]
    return part._replace(policies=policies)

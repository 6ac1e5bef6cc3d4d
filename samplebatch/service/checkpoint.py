"""Checkpoints: the tables of a service in a folder, written while writers and learners go on."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samplebatch.arguments import whole
from samplebatch.errors import ColumnMismatchError, FormatError, StorageError
from samplebatch.service.table import ReplayTable
from samplebatch.service.table_files import read_state, write_state
from samplebatch.storage.buffer_folder.files import plain_bytes, read_plain, sync
from samplebatch.storage.buffer_state import plain
from samplebatch.storage.damage import name_damage

_MANIFEST = "tables.json"
_NAME = re.compile(r"checkpoint-(\d{9,})")
_PARTIAL = ".checkpoint-"
_VERSION = 1
_SAME = ("kind", "items", "remover", "capacity")
"""Facts of a table that its checkpoint must share."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is written, for logs.

    Attributes
    ----------
    path
        Its folder.
    sizes
        How many items of each table it has, by the table's name.
    nbytes
        Bytes of its files.
    seconds
        Seconds that it took.
    """

    path: Path
    sizes: Mapping[str, int]
    nbytes: int
    seconds: float


class Checkpoints:
    """The checkpoints of a service in a folder, for a server that is to carry on after a crash.

    Each table is written as it is at one moment; the moments of two tables differ. Nobody who inserts waits longer than
    a few megabytes take to be copied in memory. A checkpoint is a folder of its own that gets its name when all of it
    is on the disk, so that whoever is killed leaves whole ones only.

    Parameters
    ----------
    folder
        Where checkpoints lie; made if it is not there.
    keep
        How many to keep, the newest.
    allow_pickle
        Whether columns may be unpickled that Arrow has no type for, when tables are restored.

    Raises
    ------
    ArgumentError
        If `keep` is no whole number from 1.
    StorageError
        If the folder holds other files, or is a file.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import SampleBatch
    >>> from samplebatch.service import ReplayTable
    >>> table = ReplayTable("queue", kind="fifo", capacity=4)
    >>> inserted = table.insert(SampleBatch(obs=[1, 2]))
    >>> checkpoints = Checkpoints(tempfile.mkdtemp() + "/service")
    >>> checkpoints.write([table]).path.name
    'checkpoint-000000001'
    >>> again = ReplayTable("queue", kind="fifo", capacity=4)
    >>> checkpoints.restore([again]).name, again.sample(1).batch["obs"]
    ('checkpoint-000000001', array([1, 2]))
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 1, allow_pickle: bool = False) -> None:
        self.folder = Path(folder)
        self._keep = whole("keep", keep, 1)
        self._allow_pickle = allow_pickle
        self._lock = threading.Lock()
        if self.folder.exists():
            others = [] if not self.folder.is_dir() else [path for path in self.folder.iterdir() if not _is_own(path)]
            if others or not self.folder.is_dir():
                found = f"has {others[0].name!r}" if others else "is a file"
                raise StorageError(f"{str(self.folder)!r} must be a folder of checkpoints or a new one, it {found}")
        self.folder.mkdir(parents=True, exist_ok=True)

    def paths(self) -> list[Path]:
        """List the folders of whole checkpoints, oldest first."""
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))

    def write(self, tables: Iterable[ReplayTable]) -> Checkpoint:
        """Write all tables, one after the other; older checkpoints go then. One call at a time writes.

        Raises
        ------
        ColumnTypeError
            If a column holds objects that cannot be pickled; names it.
        OSError
            If the disk is full or fails. Older checkpoints stay then.
        """
        with self._lock:
            begun = time.monotonic()
            self._drop_partial()
            partial = self.folder / f"{_PARTIAL}{secrets.token_hex(8)}"
            partial.mkdir()
            try:
                sizes = self._fill(partial, tables)
                known = self.paths()
                number = int(known[-1].name.rpartition("-")[2]) + 1 if known else 1
                path = partial.rename(self.folder / f"checkpoint-{number:09}")
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync(self.folder)
            for older in known[: len(known) + 1 - self._keep]:
                # By another name first, so that nobody takes half of one for a whole one.
                shutil.rmtree(older.rename(self.folder / f"{_PARTIAL}{secrets.token_hex(8)}"), ignore_errors=True)
            nbytes = sum(file.stat().st_size for file in path.iterdir())
            return Checkpoint(path, sizes, nbytes, time.monotonic() - begun)

    def _fill(self, folder: Path, tables: Iterable[ReplayTable]) -> dict[str, int]:
        """Write the files of all tables, and then the manifest; return how many items they have."""
        found: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for number, table in enumerate(tables):
            info = table.info()
            about = {name: info[name] for name in _SAME}
            state = table.freeze()
            sizes[table.name] = len(state["fragments"] if "fragments" in state else state["buffer"])
            found[table.name] = about | {"state": plain(write_state(state, folder, str(number)))}
        with (folder / _MANIFEST).open("xb") as file:
            file.write(plain_bytes({"version": _VERSION, "tables": found}))
            file.flush()
            os.fsync(file.fileno())
        sync(folder)
        return sizes

    def _drop_partial(self) -> None:
        """Remove the files of a killed writer."""
        for path in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)

    def restore(self, tables: Iterable[ReplayTable]) -> Path | None:
        """Let tables carry on from the newest checkpoint; those that it does not have stay as they are.

        Returns
        -------
        The checkpoint's folder; None if there is no checkpoint.

        Raises
        ------
        FormatError
            If the checkpoint is damaged; names the file.
        ColumnMismatchError
            If a table was of another kind, capacity or options.
        StorageError
            If the checkpoint has a table that is not among these, whose items would be lost with the next one.
        UntrustedPickleError
            If a column is pickled, and that is not allowed; names it.
        """
        paths = self.paths()
        if not paths:
            return None
        path = paths[-1]
        manifest = read_plain(path / _MANIFEST)
        if manifest.get("version") != _VERSION or not isinstance(manifest.get("tables"), dict):
            raise FormatError(f"{str(path)!r} must be a checkpoint of version {_VERSION}, it is not")
        known = {table.name: table for table in tables}
        for name, about in manifest["tables"].items():
            if name not in known:
                raise StorageError(
                    f"{str(path)!r} has a table {name!r}, which would be lost; serve it, or another folder"
                )
            info = known[name].info()
            for fact in (*_SAME, "state"):
                if not isinstance(about, dict) or fact not in about:
                    raise FormatError(f"{str(path)!r} must tell the {fact} of table {name!r}, it does not")
            for fact in _SAME:
                if about[fact] != info[fact]:
                    raise ColumnMismatchError(
                        f"table {name!r} must have {fact} {about[fact]!r}, as in {str(path)!r}, got {info[fact]!r}"
                    )
        for name, about in manifest["tables"].items():
            with name_damage(repr(str(path))):
                state = read_state(about["state"], path, allow_pickle=self._allow_pickle)
            known[name].load_state_dict(state)
        return path


def _is_own(path: Path) -> bool:
    return path.name.startswith(_PARTIAL) or _NAME.fullmatch(path.name) is not None

"""Checkpoints: snapshots of a replay service's tables in a folder, written while clients insert and sample."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import threading
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from samplebatch import errors
from samplebatch.arguments import whole
from samplebatch.batch.arrow import metadata_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.service.row_table import RowTable
from samplebatch.service.table import ReplayTable
from samplebatch.service.weights import Published, PublishedWeights
from samplebatch.storage.buffers.file import read_buffer
from samplebatch.storage.buffers.state import plain
from samplebatch.storage.files import open_locked, plain_bytes, read_plain, sync
from samplebatch.storage.foreign.damage import name_damage
from samplebatch.storage.tables.arrow import arrow_writer, open_arrow, read_arrow, write_arrow
from samplebatch.storage.tables.batches import batch_in, to_table

_MANIFEST = "tables.json"
_LOCK = "lock"
_NAME = re.compile(r"checkpoint-(\d{9,})")
_PARTIAL = ".checkpoint-"
_VERSION = 1
_SAME = ("kind", "items", "remover", "capacity")
"""Entries of a table's `info` that must equal those in its checkpoint."""

_open_checkpoints: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


@dataclass(frozen=True)
class Checkpoint:
    """Summary of a complete checkpoint, for logs.

    Attributes
    ----------
    path
        Folder of the checkpoint.
    sizes
        Number of items in each table, by table name.
    nbytes
        Total size of the files in bytes.
    seconds
        Duration of the write in seconds.
    """

    path: Path
    sizes: Mapping[str, int]
    nbytes: int
    seconds: float


class Checkpoints:
    """Folder of checkpoints, from which a replay service resumes after a crash.

    Tables are snapshotted one at a time; writes acknowledged after a table's snapshot are not in the checkpoint.
    Inserts are blocked only while a few megabytes are copied in memory. Each checkpoint is a separate folder, which is
    renamed to its final name after all its files are on disk. A process that is killed during a write therefore leaves
    no incomplete checkpoint that `restore` would read.

    The folder is locked for one process until `close` is called, the object is deleted, or the process ends. A forked
    child does not inherit the lock; `write` and `restore` acquire it in the child if the parent has released it.

    Parameters
    ----------
    folder
        Path of the folder, which is created if it does not exist.
    keep
        Number of newest checkpoints to retain.
    allow_pickle
        Whether `restore` may unpickle columns that have no Arrow type.

    Raises
    ------
    ArgumentError
        If `keep` is not a positive integer.
    StorageError
        If the path is a file, or the folder contains files other than checkpoints or is used by another process.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import SampleBatch
    >>> from samplebatch.service import ReplayTable
    >>> table = ReplayTable("queue", kind="fifo", capacity=4)
    >>> inserted = table.extend(SampleBatch(obs=[1, 2]))
    >>> folder = tempfile.mkdtemp() + "/service"
    >>> with Checkpoints(folder) as checkpoints:
    ...     checkpoints.write([table]).path.name
    'checkpoint-000000001'
    >>> again = ReplayTable("queue", kind="fifo", capacity=4)
    >>> with Checkpoints(folder) as checkpoints:
    ...     checkpoints.restore([again]).name, again.sample(1).batch["obs"]
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
                finding = f"a folder with {others[0].name!r}" if others else "a file"
                raise errors.StorageError(f"{str(self.folder)!r} must be a folder of checkpoints or new, got {finding}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._unlock: weakref.finalize[[int], Checkpoints] | None = None
        self._closed = False
        self._claim()
        _open_checkpoints.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock on the folder; idempotent."""
        with self._lock:
            self._closed = True
            self._release()

    def _claim(self) -> None:
        if self._closed:
            raise errors.StorageError(f"the checkpoints of {str(self.folder)!r} must be open, got closed ones")
        if self._unlock is None:
            descriptor = open_locked(self.folder / _LOCK, "must be used by one service at a time")
            self._unlock = weakref.finalize(self, os.close, descriptor)

    def _release(self) -> None:
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()

    def paths(self) -> list[Path]:
        """List the folders of complete checkpoints, oldest first."""
        paths = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: int(path.name.rpartition("-")[2]))

    def write(self, tables: Iterable[ReplayTable | RowTable], weights: PublishedWeights | None = None) -> Checkpoint:
        """Write a checkpoint, then remove all but the newest `keep` checkpoints. Concurrent calls are serialized.

        Parameters
        ----------
        tables
            Tables of a service.
        weights
            Published weights of the service (`ReplayServer.weights`), written with their versions; None to omit them.

        Raises
        ------
        ColumnTypeError
            If a column contains objects that cannot be pickled.
        OSError
            If the disk is full or fails. Existing checkpoints are retained.
        StorageError
            If another process uses the folder, or this object is closed.
        """
        with self._lock, _name_failure(self.folder):
            self._claim()
            started = time.monotonic()
            self._drop_partial()
            partial = self.folder / f"{_PARTIAL}{secrets.token_hex(8)}"
            partial.mkdir()
            try:
                sizes = self._fill(partial, tables, weights)
                paths = self.paths()
                number = int(paths[-1].name.rpartition("-")[2]) + 1 if paths else 1
                path = partial.rename(self.folder / f"checkpoint-{number:09}")
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync(self.folder)
            for older in paths[: len(paths) + 1 - self._keep]:
                # Rename before the removal, so that no reader sees an incomplete checkpoint.
                shutil.rmtree(older.rename(self.folder / f"{_PARTIAL}{secrets.token_hex(8)}"), ignore_errors=True)
            nbytes = sum(file.stat().st_size for file in path.iterdir())
            return Checkpoint(path, sizes, nbytes, time.monotonic() - started)

    def _fill(
        self, folder: Path, tables: Iterable[ReplayTable | RowTable], weights: PublishedWeights | None
    ) -> dict[str, int]:
        """Write the files of all tables, then the manifest; return the number of items per table."""
        described: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for number, table in enumerate(tables):
            info = table.info()
            about = {name: info[name] for name in _SAME}
            state = table.freeze()
            items = state["fragments"] if "fragments" in state else state["buffer"]
            sizes[table.name] = state["size"] if isinstance(table, RowTable) else len(items)
            described[table.name] = about | {"state": plain(write_state(state, folder, str(number)))}
        with (folder / _MANIFEST).open("xb") as file:
            published = _write_weights(folder, {} if weights is None else weights.state())
            file.write(plain_bytes({"version": _VERSION, "tables": described, "weights": published}))
            file.flush()
            os.fsync(file.fileno())
        sync(folder)
        return sizes

    def _drop_partial(self) -> None:
        for path in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)

    def restore(self, tables: Iterable[ReplayTable | RowTable], weights: PublishedWeights | None = None) -> Path | None:
        """Restore tables from the newest checkpoint; tables that are not in the checkpoint remain unchanged.

        Parameters
        ----------
        tables
            Tables of a service.
        weights
            Object that receives the weights of the checkpoint and their versions, for `ReplayServer`; None to ignore
            them.

        Returns
        -------
        Folder of the checkpoint; None if there is no checkpoint.

        Raises
        ------
        FormatError
            If the checkpoint is damaged.
        ColumnMismatchError
            If the kind, capacity or an option of a table differs from the value in the checkpoint.
        StorageError
            If the checkpoint contains a table that is not in `tables`; the next checkpoint would discard this table's
            items. If another process uses the folder, or this object is closed.
        UntrustedPickleError
            If a column is pickled and `allow_pickle` is false.
        """
        with self._lock:
            self._claim()
        paths = self.paths()
        if not paths:
            return None
        path = paths[-1]
        manifest = read_plain(path / _MANIFEST)
        if manifest.get("version") != _VERSION or not isinstance(manifest.get("tables"), dict):
            actual = f"version {manifest.get('version')!r:.40}" if "version" in manifest else "no version"
            raise errors.FormatError(
                f"{str(path)!r} must be a checkpoint of version {_VERSION} with tables, got {actual}"
            )
        served = {table.name: table for table in tables}
        for name, about in manifest["tables"].items():
            if name not in served:
                raise errors.StorageError(
                    f"tables must include {name!r}, which {str(path)!r} has and the next checkpoint would lose; serve "
                    "it, or use another folder"
                )
            info = served[name].info()
            for fact in (*_SAME, "state"):
                if not isinstance(about, dict) or fact not in about:
                    raise errors.FormatError(f"{str(path)!r} must declare the {fact} of table {name!r}, got none")
            for fact in _SAME:
                if about[fact] != info[fact]:
                    raise errors.ColumnMismatchError(
                        f"table {name!r} must have {fact} {about[fact]!r}, as in {str(path)!r}, got {info[fact]!r}"
                    )
        published = _read_weights(path, manifest.get("weights", []))
        for name, about in manifest["tables"].items():
            with _name_damage(path, f"table {name!r}"):
                served[name].load_state_dict(read_state(about["state"], path, allow_pickle=self._allow_pickle))
        if weights is not None:
            weights.load(published.state())
        return path


def _write_weights(folder: Path, state: Mapping[str, Published]) -> list[dict[str, Any]]:
    """Write each named set of weights to a separate file, and return the manifest entries."""
    entries = []
    for number, (name, (version, epoch, stream)) in enumerate(state.items()):
        path = folder / f"weights-{number}.arrow"
        with path.open("xb") as file:
            file.write(stream)
            file.flush()
            os.fsync(file.fileno())
        about = {"name": name, "version": version, "epoch": epoch, "file": path.name, "crc32": zlib.crc32(stream)}
        entries.append(about)
    return entries


def _read_weights(folder: Path, described: Any) -> PublishedWeights:
    """Read the weights of a checkpoint; raises FormatError if a file does not match its manifest entry."""
    state: dict[str, Published] = {}
    weights = PublishedWeights()
    with _name_damage(folder, "weights"):
        for about in described:
            path = file_in(folder, about["file"])
            stream = pa.py_buffer(path.read_bytes())
            if zlib.crc32(stream) != about["crc32"] or about["name"] in state:
                raise errors.FormatError(
                    f"{str(path)!r} must have the checksum of its manifest entry, got damaged weights"
                )
            state[about["name"]] = Published(about["version"], about["epoch"], stream)
        weights.load(state)
    return weights


def _is_own(path: Path) -> bool:
    return path.name == _LOCK or path.name.startswith(_PARTIAL) or _NAME.fullmatch(path.name) is not None


@contextmanager
def _name_failure(folder: Path) -> Iterator[None]:
    """Convert an OSError of a write to a StorageError that contains the folder and the cause."""
    try:
        yield
    except errors.StorageError:
        raise
    except OSError as error:
        cause = error.strerror or str(error).partition("\n")[0]
        raise errors.StorageError(
            error.errno or errno.EIO, f"a checkpoint cannot be written: {cause}", str(folder)
        ) from error


@contextmanager
def _name_damage(folder: Path, what: str) -> Iterator[None]:
    """Convert errors about invalid values in a checkpoint to an error that contains the checkpoint's path."""
    try:
        with name_damage(repr(str(folder))):
            yield
    except (errors.ArgumentError, errors.CapacityError, errors.FormatError, errors.PriorityError) as error:
        if str(folder) in str(error):
            raise
        kind = errors.CapacityError if isinstance(error, errors.CapacityError) else errors.FormatError
        raise kind(f"{str(folder)!r} must have valid values for {what}: {error}") from error


def _release_in_child() -> None:
    for checkpoints in list(_open_checkpoints):
        checkpoints._lock = threading.Lock()
        checkpoints._release()


os.register_at_fork(after_in_child=_release_in_child)


Plain = dict[str, Any]
_LEFT = "left"


def write_state(state: Mapping[str, Any], folder: Path, stem: str) -> Plain:
    """Write the frozen state of a table to files whose names start with `stem`.

    Return the state with file names in place of the written data, for `read_state`.

    Raises ColumnTypeError if a column contains objects that cannot be pickled. Raises OSError if a file cannot be
    written.
    """
    values = {name: value for name, value in state.items() if name not in ("buffer", _LEFT, "fragments")}
    if "fragments" in state:
        return values | {"fragments": _write_fragments(state["fragments"], folder, stem)}
    with state["buffer"] as buffer:
        buffer.write(folder / f"{stem}.arrow")
    if state[_LEFT] is not None:
        write_arrow(SampleBatch({_LEFT: state[_LEFT]}), folder / f"{stem}-{_LEFT}.arrow")
    return values | {"buffer": f"{stem}.arrow", _LEFT: None if state[_LEFT] is None else f"{stem}-{_LEFT}.arrow"}


def read_state(plain: Plain, folder: Path, *, allow_pickle: bool = False) -> Plain:
    """Read the state of a table from the result of `write_state` and the files.

    Raises FormatError if a file is damaged, was replaced, or is outside the folder. Raises UntrustedPickleError if a
    column is pickled and `allow_pickle` is false. Raises OSError if a file cannot be read.
    """
    if "fragments" in plain:
        return plain | {"fragments": _read_fragments(plain["fragments"], folder, allow_pickle=allow_pickle)}
    left = plain[_LEFT]
    return plain | {
        "buffer": read_buffer(ReplayBuffer, file_in(folder, plain["buffer"]), allow_pickle=allow_pickle, missing={}),
        _LEFT: None if left is None else np.array(read_arrow(file_in(folder, left), memory_map=False)[_LEFT]),
    }


def file_in(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; raises FormatError if the path is outside the folder."""
    if Path(name).name != name:
        raise errors.FormatError(f"the files of a table must be in its folder, got {name!r}")
    return folder / name


def _write_fragments(fragments: Iterable[Any], folder: Path, stem: str) -> Plain:
    """Write fragments as record batches, one file per schema."""
    files: dict[bytes, tuple[int, Any]] = {}
    about: dict[bytes, int] = {}
    locations: list[list[int]] = []
    with ExitStack() as stack:
        for fragment in fragments:
            table = to_table(fragment).combine_chunks()
            # The metadata of batches, such as the number of steps, differs between fragments.
            schema = table.schema.remove_metadata()
            form = schema.serialize().to_pybytes()
            if form not in files:
                path = folder / f"{stem}-{len(files)}.arrow"
                files[form] = len(files), stack.enter_context(arrow_writer(path, schema))
            number, writer = files[form]
            metadata = json.dumps({key.decode(): text.decode() for key, text in (table.schema.metadata or {}).items()})
            writer.write_batch(pa.record_batch([column.chunk(0) for column in table.columns], schema=schema))
            locations.append([number, about.setdefault(metadata.encode(), len(about))])
    return {
        "files": [f"{stem}-{i}.arrow" for i in range(len(files))],
        "about": [*map(json.loads, about)],
        "places": locations,
    }


def _read_fragments(plain: Plain, folder: Path, *, allow_pickle: bool = False) -> list[Any]:
    files = [open_arrow(file_in(folder, name), memory_map=False) for name in plain["files"]]
    groups = [0] * len(files)
    fragments = []
    for number, about in plain["places"]:
        file, bound = files[number]
        table = file.read([groups[number]], file.schema.names, bound)
        groups[number] += 1
        table = table.replace_schema_metadata(plain["about"][about])
        requirement = f"{file.name!r} must be of fragments of a table"
        fragments.append(batch_in(table, metadata_of(table.schema), requirement, bound, allow_pickle=allow_pickle))
    if any(file.num_groups != count for (file, _), count in zip(files, groups, strict=True)):
        raise errors.FormatError("the files of a table must have the fragments that its state lists, got more or fewer")
    return fragments

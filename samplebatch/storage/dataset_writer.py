"""Writing of datasets: parts that are appended and committed, or joined; remains of killed writers are removed."""

from __future__ import annotations

import base64
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import ipc

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.arrow import holds_objects
from samplebatch.column.types import DTYPE_KEY
from samplebatch.errors import ColumnMismatchError, FormatError, near_names
from samplebatch.storage.batch_table import AnyBatch, join, to_table
from samplebatch.storage.buffer_folder.files import sync
from samplebatch.storage.commit_log import LOG, Part, Snapshot, add, begin
from samplebatch.storage.parquet import open_parquet, write_parquet

if TYPE_CHECKING:
    from samplebatch.storage.dataset_rows import DatasetRows

_PART = re.compile(r"part-(\d{6,})-[0-9a-f]{8}\.parquet")
_TEMPORARY = re.compile(r"\.part-\d{6,}-[0-9a-f]{8}\.parquet\.[0-9a-f]+\.tmp")


class DatasetWriter:
    """Appends and joins the parts of a dataset, under the lock of its folder; held by `Dataset`.

    Parameters
    ----------
    folder
        The folder.
    rows
        The dataset's rows, which take in each commit.

    Attributes
    ----------
    dropped
        What writers that were killed had begun and not committed, a sentence each.
    """

    def __init__(self, folder: Path, rows: DatasetRows) -> None:
        self._folder = folder
        self._rows = rows
        self._recovered = False
        self.dropped: tuple[str, ...] = ()

    def append(self, batch: AnyBatch, compression: str) -> Path:
        """Write and commit a part; see `Dataset.append`."""
        kind = type(batch).__name__
        if not isinstance(batch, SampleBatch | MultiAgentBatch | Batch):
            raise ColumnMismatchError(f"a dataset must have batches, got a {kind}")
        schema = to_table(batch).schema
        self._folder.mkdir(exist_ok=True)
        log = self._rows.log
        with log.locked():
            state = self._recover(log.read())
            if state.about:
                _check_alike(state.about, kind, schema)
            else:
                log.append(begin({"type": kind, "schema": _encode(schema)}), state.nbytes)
                state = log.read()
            part = self._write(batch, state, compression)
            log.append(add(part, []), state.nbytes)
            sync(self._folder)
            self._rows.adopt(log.read())
        return self._folder / part.name

    def compact(self, nbytes: int, compression: str, read: Callable[[Path], AnyBatch]) -> int:
        """Join small parts; see `Dataset.compact`."""
        log = self._rows.log
        fewer = 0
        if not self._folder.exists():
            return 0
        with log.locked():
            state = self._recover(log.read())
            for run in _small_runs(state.parts, nbytes):
                joined = join([read(self._folder / part.name) for part in run])
                part = self._write(joined, state, compression)
                log.append(add(part, [older.name for older in run]), state.nbytes)
                sync(self._folder)
                for older in run:
                    (self._folder / older.name).unlink()
                fewer += len(run) - 1
                state = log.read()
            self._rows.adopt(state)
        return fewer

    def _write(self, batch: AnyBatch, state: Snapshot, compression: str) -> Part:
        """Write the file of a part, which is not committed yet."""
        number = max((_number(part.name) for part in state.parts), default=-1) + 1
        path = self._folder / f"part-{number:06d}-{secrets.token_hex(4)}.parquet"
        write_parquet(batch, path, compression=compression)
        file, _ = open_parquet(path, verify=False)
        policies = (
            [(policy, part.count) for policy, part in batch.items()] if isinstance(batch, MultiAgentBatch) else None
        )
        return Part(path.name, path.stat().st_size, file.group_rows, to_table(batch).nbytes, policies)

    def _recover(self, state: Snapshot) -> Snapshot:
        """Remove files that are not committed: under the lock, nobody is at work on them."""
        if self._recovered:
            return state
        check_log(self._folder, state)
        known = {part.name for part in state.parts}
        dropped = []
        for entry in sorted(os.listdir(self._folder)):
            if _TEMPORARY.fullmatch(entry):
                (self._folder / entry).unlink()
                dropped.append(f"{entry} was not written to its end")
            elif _PART.fullmatch(entry) and entry not in known:
                # Kept, under a name that no reader looks at: should the log have been cut short, the rows are there.
                (self._folder / entry).rename(self._folder / f".{entry}.dropped")
                dropped.append(f"{entry} was written and not committed")
        if state.torn:
            dropped.append(f"{state.torn} bytes of a commit were written and not all of it")
        self.dropped = tuple(dropped)
        self._recovered = True
        return state


def check_log(folder: Path, state: Snapshot) -> None:
    """Refuse a folder that has parts and no log, such as a copy of which that was left out.

    Raises
    ------
    FormatError
        If it is such a folder.
    """
    if not state.about and folder.is_dir() and any(map(_PART.fullmatch, os.listdir(folder))):
        raise FormatError(f"{str(folder)!r} must be a new folder or one with a log, it has parts and no {LOG!r}")


def _small_runs(parts: list[Part], nbytes: int) -> list[list[Part]]:
    """Group parts that follow each other and are small enough to be joined, as many as fit."""
    runs: list[list[Part]] = [[]]
    for part in parts:
        if sum(held.nbytes for held in runs[-1]) + part.nbytes > nbytes:
            runs.append([])
        runs[-1].append(part)
    return [run for run in runs if len(run) > 1]


def _number(name: str) -> int:
    found = _PART.fullmatch(name)
    return int(found[1]) if found else -1


def _encode(schema: pa.Schema) -> str:
    return base64.b64encode(schema.remove_metadata().serialize().to_pybytes()).decode()


def _check_alike(about: dict[str, Any], kind: str, schema: pa.Schema) -> None:
    """Refuse a batch of another type or with other columns than those before it."""
    if about["type"] != kind:
        raise ColumnMismatchError(f"batches of the dataset must be of type {about['type']}, got a {kind}")
    if kind == "MultiAgentBatch":
        return
    wanted = ipc.read_schema(pa.py_buffer(base64.b64decode(about["schema"])))
    for name in schema.names:
        if name not in wanted.names:
            raise ColumnMismatchError(f"the dataset has no column {name!r}; {near_names(name, wanted.names)}")
    for field in wanted:
        if field.name not in schema.names:
            raise ColumnMismatchError(f"column {field.name!r} must be there as in the dataset, it is missing")
        given = schema.field(field.name)
        if not _is_alike(given, field):
            raise ColumnMismatchError(f"column {field.name!r} must be {field.type} as in the dataset, got {given.type}")


def _is_alike(given: pa.Field, field: pa.Field) -> bool:
    """Tell whether columns can be joined: objects may differ in form, and strings in width."""
    if holds_objects(field) and holds_objects(given):
        return True
    kinds = [(own.metadata or {}).get(DTYPE_KEY, b"")[1:2] for own in (given, field)]
    if kinds[0] == kinds[1] and kinds[0] in (b"S", b"U"):
        return bool(pa.types.is_fixed_size_binary(given.type) and pa.types.is_fixed_size_binary(field.type))
    return bool(given.equals(field, check_metadata=True))

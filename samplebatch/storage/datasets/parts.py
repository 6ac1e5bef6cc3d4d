"""Parts of a dataset: reading by row number, appending, merging, and recovery after a writer was killed."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import set_unit
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.arrow import column_from_arrow, holds_objects
from samplebatch.column.convert import match_ragged
from samplebatch.column.interface import Column
from samplebatch.column.memory import MemoryBound
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.text import TextColumn
from samplebatch.errors import ArgumentError, ColumnMismatchError, FormatError, PolicyNotFoundError, near_names
from samplebatch.names import PolicyID
from samplebatch.storage.datasets import commit_log
from samplebatch.storage.files import sync
from samplebatch.storage.tables.batches import (
    AnyBatch,
    Filters,
    RowFilter,
    choose,
    join,
    read_batch,
    read_group,
    take_rows,
    to_table,
)
from samplebatch.storage.tables.parquet import ParquetTable, open_parquet, write_parquet

Rows = npt.NDArray[np.int64]
Units = dict[PolicyID | None, ActionUnit]
"""Action units of a dataset by policy; key None without policies."""
_Result = TypeVar("_Result")

_MAX_OPEN = 64
"""Maximum number of open files."""


class DatasetRows:
    """Rows of all parts of a dataset, numbered in append order.

    Row numbers remain valid after a compaction, which merges consecutive parts. If a file is missing, the log is read
    again to locate the rows of the file.

    columns: names of the columns to read; None for all columns.
    filters: conditions on the rows; None for all rows.
    policy: policy whose rows are selected; None for the rows of all policies.
    allow_pickle, max_nbytes: as in `Dataset`.
    cache_nbytes: maximum size of cached row groups in bytes.
    """

    def __init__(
        self,
        folder: Path,
        columns: Sequence[str] | None,
        filters: Filters | None,
        policy: str | None,
        *,
        allow_pickle: bool = False,
        max_nbytes: int | None = None,
        cache_nbytes: int = 0,
    ) -> None:
        self.folder = folder
        self.log = commit_log.CommitLog(folder)
        self._columns = columns
        self._filters = filters
        self._policy = policy
        self._allow_pickle = allow_pickle
        self._max_nbytes = max_nbytes
        self._cache_nbytes = cache_nbytes
        self._cache: OrderedDict[tuple[str, int], tuple[AnyBatch, int]] = OrderedDict()
        self._open: OrderedDict[str, ParquetTable] = OrderedDict()
        self.reload()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict(), "_open": OrderedDict()}

    def reload(self) -> None:
        """Read the log, and update the snapshot to the newest commit.

        Raises FormatError in the same cases as `adopt`.
        """
        while True:
            snapshot = self.log.read()
            try:
                return self.adopt(snapshot)
            except FormatError:
                # Joined parts are deleted after the commit of their replacement.
                if self.log.read().nbytes == snapshot.nbytes:
                    raise

    def adopt(self, snapshot: commit_log.Snapshot) -> None:
        """Replace the current snapshot of the dataset after checking the files of the new snapshot.

        Raises FormatError if a part is missing or the size of a part has changed.
        """
        if snapshot.parts:
            sizes: dict[str, int] = {}
            for entry in os.scandir(self.folder):
                # Joined parts may be deleted in the meantime.
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
            for part in snapshot.parts:
                if sizes.get(part.name) != part.size:
                    nbytes = f"{sizes[part.name]} bytes" if part.name in sizes else "no file"
                    raise FormatError(
                        f"part {part.name!r} in {str(self.folder)!r} must have the committed {part.size} bytes, got "
                        f"{nbytes}"
                    )
        self._units = units_in(snapshot.about)
        self.snapshot = snapshot
        groups = [(part, group) for part in snapshot.parts for group in range(len(part.groups))]
        self._groups = groups
        counts = [part.groups[group] for part, group in groups]
        self._starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        # Fewer rows are selected than stored if parts were joined with later ones.
        self._counted = sum(self._count_rows(number) for number in range(len(groups)))
        for name in ("_index", "bounds"):
            self.__dict__.pop(name, None)

    def __len__(self) -> int:
        return self._counted if self._index is None else len(self._index)

    @property
    def row_nbytes(self) -> float:
        """Mean size of a row in memory, in bytes."""
        return sum(part.nbytes for part in self.snapshot.parts) / max(1, int(self._starts[-1]))

    @cached_property
    def bounds(self) -> Rows:
        """Number of the first selected row of each row group, followed by the total number of selected rows."""
        index = self._index
        return np.minimum(self._starts, self._counted) if index is None else np.searchsorted(index, self._starts)

    def take(self, rows: Rows) -> AnyBatch:
        """Read selected rows by row number, in the order of `rows`."""
        if self.is_multi_agent:
            policies = ", ".join(map(repr, self._policies()))
            raise ArgumentError(f"rows must be of one policy to be read, got {policies}; pass policy=...")
        return self._with_units(self._find(lambda: self._take(rows if self._index is None else self._index[rows])))

    def _find(self, read: Callable[[], _Result]) -> _Result:
        """Read from the parts, and retry if the parts were compacted in the meantime."""
        while True:
            try:
                return read()
            except FileNotFoundError:
                self.adopt_compacted()

    @property
    def is_multi_agent(self) -> bool:
        """Whether the rows belong to several policies and no policy is selected."""
        return self._policy is None and any(part.policies is not None for part in self.snapshot.parts)

    def read(self, *, verify: bool | None = None) -> AnyBatch:
        """Read all selected rows, or the rows of all policies if no policy is selected."""
        # If columns or rows are excluded, pages are verified when they are read.
        if verify or (verify is None and self._columns is None and self._filters is None):
            self._find(self._verify_parts)
        if self._policy is not None or not self.snapshot.parts:
            return self.take(np.arange(len(self)))
        return self._with_units(self._find(self._read_parts))

    @property
    def action_unit(self) -> ActionUnit | None:
        """Unit of the actions; None if the unit is unknown or the rows belong to several policies."""
        return self._units.get(self._policy)

    def _with_units(self, batch: AnyBatch) -> AnyBatch:
        """Set the action units of a batch to the dataset's units, because the unit of some parts may be unknown."""
        if self._units:
            parts = batch.policy_batches if isinstance(batch, MultiAgentBatch) else {self._policy: batch}
            for policy, part in parts.items():
                unit = self._units.get(policy)
                if unit is not None and isinstance(part, Batch):
                    set_unit(part, unit)
                elif unit is not None:
                    part.action_unit = unit
        return batch

    def _verify_parts(self) -> None:
        for part in self.snapshot.parts:
            open_parquet(self.folder / part.name, verify=True)

    def schema(self) -> pa.Schema:
        """Return the schema of the first part without its metadata."""
        return self._find(lambda: self.file(self.snapshot.parts[0]).schema.remove_metadata())

    def columns(self) -> Mapping[str, Column]:
        """Return the requested columns without rows, created from the schema; empty if the dataset has no parts."""
        if not self.snapshot.parts:
            return {}
        empty = self.schema().empty_table()
        chosen = empty.select(choose(self._columns, empty.column_names, repr(str(self.folder))))
        # There are no rows to unpickle.
        return SampleBatch.from_arrow(chosen, allow_pickle=True)._all()

    def _read_parts(self) -> AnyBatch:
        if self._counted < self._starts[-1] and not self.is_multi_agent:
            return self._take(np.arange(self._counted) if self._index is None else self._index)
        batches = []
        for part in self.snapshot.parts:
            file = self.file(part)
            bound = MemoryBound(repr(file.name), part.size, self._max_nbytes)
            requirement = f"{file.name!r} must be a part of a dataset"
            trust = {"allow_pickle": self._allow_pickle}
            batches.append(read_batch(file, bound, requirement, self._columns, self._filters, **trust))
        return join(batches)

    def only(self, columns: Sequence[str]) -> AnyBatch:
        """Read only the columns with the given names, for all selected rows."""
        other = copy.copy(self)
        other.__dict__.update(_columns=columns, _cache=OrderedDict(), _cache_nbytes=0)
        return other.take(np.arange(len(self)))

    def adopt_compacted(self) -> None:
        """Locate the rows in the merged parts after a compaction.

        Raises FormatError if rows are missing.
        """
        counted = self._counted
        required = counted if self._policy is None else int(self._starts[-1])
        # Joined parts are ordered by policy: row order within a policy is preserved, row numbers change.
        preserved_names = ("bounds", "_index") if self._policy is None else ("bounds",)
        preserved = {name: self.__dict__[name] for name in preserved_names if name in self.__dict__}
        while True:
            snapshot = self.log.read()
            total, parts = 0, []
            for part in snapshot.parts:
                if total < required:
                    parts.append(part)
                    total += part.rows
            if total < required:
                raise FormatError(f"{str(self.folder)!r} must have the {required} rows of its last state, got {total}")
            try:
                self.adopt(snapshot._replace(parts=parts))
            except FormatError:
                if self.log.read().nbytes == snapshot.nbytes:
                    raise
            else:
                # The last part may contain later rows; they are excluded until `reload`.
                self._counted = counted
                self.__dict__.update(preserved)
                return

    def _take(self, rows: Rows) -> AnyBatch:
        if not len(rows):
            return self._empty()
        owners = np.searchsorted(self._starts, rows, "right") - 1
        order = np.argsort(owners, kind="stable")
        cuts = np.flatnonzero(np.diff(owners[order])) + 1
        batches = []
        for positions in np.split(order, cuts):
            group = int(owners[positions[0]])
            batches.append(self._rows_of(self._group(group), rows[positions] - self._starts[group], group))
        joined = join(batches)
        if len(batches) == 1 or np.array_equal(order, np.arange(len(order))):
            return joined
        inverse = np.empty(len(order), np.int64)
        inverse[order] = np.arange(len(order))
        return take_rows(joined, inverse)

    def _rows_of(self, batch: AnyBatch, rows: Rows, group: int) -> AnyBatch:
        part, number = self._groups[group]
        if len(rows) == part.groups[number] and np.array_equal(rows, np.arange(len(rows))):
            return batch
        return take_rows(batch, rows)

    def _empty(self) -> AnyBatch:
        if not self._groups:
            raise FormatError(f"{str(self.folder)!r} must have parts to be read, got none")
        return take_rows(self._group(0), np.zeros(0, np.int64))

    def _group(self, number: int) -> AnyBatch:
        part, group = self._groups[number]
        key = (part.name, group)
        batch, nbytes = self._cache.pop(key, (None, 0))
        if batch is None:
            file = self.file(part)
            bound = MemoryBound(repr(file.name), part.size, self._max_nbytes)
            batch = read_group(file, group, self._columns, bound, allow_pickle=self._allow_pickle)
            if self._policy is not None and isinstance(batch, MultiAgentBatch) and self._policy in batch:
                batch = batch[self._policy]
            nbytes = part.nbytes * part.groups[group] // max(1, part.rows)
        self._cache[key] = batch, nbytes
        cached_nbytes = sum(nbytes for _, nbytes in self._cache.values())
        while cached_nbytes > self._cache_nbytes and len(self._cache) > 1:
            cached_nbytes -= self._cache.popitem(last=False)[1][1]
        return batch

    def file(self, part: commit_log.Part) -> ParquetTable:
        """Return the open file of a part; a file that is not open yet is opened."""
        file = self._open.pop(part.name, None)
        if file is None:
            file, _ = open_parquet(self.folder / part.name, verify=None, max_nbytes=self._max_nbytes)
            if file.group_rows != part.groups:
                raise FormatError(f"{file.name!r} must have the row groups that were committed, got others")
        self._open[part.name] = file
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return file

    @cached_property
    def _index(self) -> Rows | None:
        """Numbers of the selected rows; None if all rows are selected."""
        return None if self._filters is None and self._policy is None else self._find(self._find_index)

    def _find_index(self) -> Rows:
        policies = self._policies()
        if self._policy is not None and self._policy not in policies and self.snapshot.parts:
            raise PolicyNotFoundError(f"no policy {self._policy!r}; {near_names(self._policy, policies)}")
        selected = [self._selected_rows(number) for number in range(len(self._groups))]
        index = np.concatenate([np.zeros(0, np.int64), *selected])
        return index[index < self._stop()]

    def _stop(self) -> int:
        """Return the number of the row after the last selected row; filters are ignored."""
        remaining = self._counted
        for number, start in enumerate(self._starts.tolist()[:-1]):
            count = self._count_rows(number)
            if remaining <= count:
                return int(start + remaining)
            remaining -= count
        return int(self._starts[-1])

    def _count_rows(self, number: int) -> int:
        """Count the rows of the selected policy in a row group, or all rows if no policy is selected."""
        part, group = self._groups[number]
        return part.groups[group] if self._policy is None or _policy_of(part, group) == self._policy else 0

    def _policies(self) -> list[str]:
        return sorted({policy for part in self.snapshot.parts for policy, rows in part.policies or () if rows})

    def _selected_rows(self, number: int) -> Rows:
        part, group = self._groups[number]
        start, rows = int(self._starts[number]), self._count_rows(number)
        if not rows:
            return np.zeros(0, np.int64)
        if self._filters is None:
            return np.arange(start, start + rows)
        file = self.file(part)
        condition = RowFilter(self._filters, file.schema, repr(file.name))
        if group not in file.matching(condition):
            return np.zeros(0, np.int64)
        bound = MemoryBound(repr(file.name), part.size, self._max_nbytes)
        return start + condition.rows(file.read([group], condition.names, bound))


def units_in(about: Mapping[str, Any]) -> Units:
    """Decode the action unit of each policy from the properties in a dataset's log."""
    try:
        return {policy: ActionUnit.from_description(plain) for policy, plain in about.get("action_units", ())}
    except (ValueError, TypeError) as error:
        raise FormatError(f"the log of a dataset must have valid units of actions: {error}") from error


def describe_units(units: Units) -> dict[str, Any]:
    """Encode action units for the log; the result is empty if all units are unknown."""
    plain = [(policy, unit.describe()) for policy, unit in units.items()]
    return {"action_units": plain} if plain else {}


def merge_units(units: Units, batch: AnyBatch) -> Units:
    """Merge the action units of a dataset and a batch.

    Raises ColumnMismatchError if the units differ.
    """
    parts = batch.policy_batches if isinstance(batch, MultiAgentBatch) else {None: batch}
    merged = dict(units)
    for policy, part in parts.items():
        unit = common_unit([units.get(policy), part.action_unit])
        if unit is not None:
            merged[policy] = unit
    return merged


def _policy_of(part: commit_log.Part, group: int) -> str | None:
    """Return the policy of a row group; each row group contains rows of a single policy."""
    start, stop = sum(part.groups[:group]), 0
    for policy, rows in part.policies or ():
        stop += rows
        if start < stop:
            return policy
    return None


_PART = re.compile(r"part-(\d{6,})-[0-9a-f]{8}\.parquet")
_TEMPORARY = re.compile(r"\.(?:part-\d{6,}-[0-9a-f]{8}\.parquet|_commits)\.[0-9a-f]+\.tmp")
_DROPPED = re.compile(r"_dropped-(\d+)-part-\d{6,}-[0-9a-f]{8}\.parquet")
_DROPPED_1 = re.compile(r"\.(part-\d{6,}-[0-9a-f]{8}\.parquet)\.dropped")
"""Dropped part in a folder of format version 1."""


class DatasetWriter:
    """Writer that appends and merges the parts of a dataset under the folder's lock; used by `Dataset`.

    dropped: descriptions of uncommitted writes that this writer discarded after other writers had been killed.
    """

    def __init__(self, folder: Path, rows: DatasetRows) -> None:
        self._folder = folder
        self._rows = rows
        self._recovered = False
        self.dropped: tuple[str, ...] = ()

    def extend(self, batch: AnyBatch, compression: str) -> Path:
        """Write a part and commit it to the log; see `Dataset.extend`."""
        kind = type(batch).__name__
        if not isinstance(batch, SampleBatch | MultiAgentBatch | Batch):
            raise ColumnMismatchError(f"a dataset must be extended by a batch, got a {kind}")
        schema = to_table(batch).schema
        self._folder.mkdir(exist_ok=True)
        log = self._rows.log
        with log.locked():
            state = self._recover(log.read())
            known_units = units_in(state.about)
            units = merge_units(known_units, batch)
            about = describe_units(units) if units != known_units else {}
            if state.about:
                matched = _match(batch, state.about)
                if matched is not batch:
                    batch, schema = matched, to_table(matched).schema
                _check_alike(state.about, kind, schema)
            else:
                about = {"type": kind, "schema": commit_log.encode_schema(schema), **about}
            if about:
                log.append(commit_log.begin(about), state)
                state = log.read()
            part = self._write(batch, state, compression)
            log.append(commit_log.add(part, []), state)
            sync(self._folder)
            self._rows.adopt(log.read())
        return self._folder / part.name

    def compact(self, nbytes: int, compression: str, read: Callable[[Path], AnyBatch]) -> int:
        """Merge small parts; see `Dataset.compact`."""
        log = self._rows.log
        fewer = 0
        if not self._folder.exists():
            return 0
        with log.locked():
            state = self._recover(log.read())
            for run in _small_runs(state.parts, nbytes):
                joined = join([read(self._folder / part.name) for part in run])
                part = self._write(joined, state, compression)
                log.append(commit_log.add(part, [older.name for older in run]), state)
                sync(self._folder)
                for older in run:
                    (self._folder / older.name).unlink()
                fewer += len(run) - 1
                state = log.read()
            self._rows.adopt(state)
        return fewer

    def _write(self, batch: AnyBatch, state: commit_log.Snapshot, compression: str) -> commit_log.Part:
        number = max((_number(part.name) for part in state.parts), default=-1) + 1
        path = self._folder / f"part-{number:06d}-{secrets.token_hex(4)}.parquet"
        write_parquet(batch, path, compression=compression)
        file, _ = open_parquet(path, verify=False)
        policies = (
            [(policy, part.count) for policy, part in batch.items()] if isinstance(batch, MultiAgentBatch) else None
        )
        return commit_log.Part(path.name, path.stat().st_size, file.group_rows, to_table(batch).nbytes, policies)

    def _recover(self, state: commit_log.Snapshot) -> commit_log.Snapshot:
        """Remove temporary files and hide uncommitted parts that killed writers have left (lock held)."""
        if self._recovered:
            return state
        check_log(self._folder, state)
        dropped = []
        if state.torn:
            dropped.append(f"{state.torn} bytes of a commit were written incompletely")
        self._rows.log.repair(state)
        state = self._rows.log.read()
        committed = {part.name for part in state.parts}
        for entry in sorted(os.listdir(self._folder)):
            if _TEMPORARY.fullmatch(entry):
                (self._folder / entry).unlink()
                dropped.append(f"{entry} was written incompletely")
            elif _PART.fullmatch(entry) and entry not in committed:
                # The file is retained without visible rows: if the log was truncated, the rows can be recovered.
                self._hide(entry, entry, state)
                dropped.append(f"{entry} was written and not committed")
            elif older := _DROPPED_1.fullmatch(entry):
                self._hide(entry, older[1], state)
            elif hidden := _DROPPED.fullmatch(entry):
                commit_log.hide_rows(self._folder / entry, int(hidden[1]), state.about)
        self.dropped = tuple(dropped)
        self._recovered = True
        return state

    def _hide(self, entry: str, name: str, state: commit_log.Snapshot) -> None:
        """Append a footer without row groups to an uncommitted part, and add the part's size to the file name."""
        path = self._folder / entry
        nbytes = path.stat().st_size
        hidden = path.rename(self._folder / f"_dropped-{nbytes}-{name}")
        commit_log.hide_rows(hidden, nbytes, state.about)


def check_log(folder: Path, state: commit_log.Snapshot) -> None:
    """Raise FormatError if a folder contains two logs, or parts without a log, as in an incomplete copy."""
    if all((folder / name).exists() for name in commit_log.LOGS):
        raise FormatError(f"{str(folder)!r} must have one log, got {' and '.join(map(repr, commit_log.LOGS))}")
    if not state.about and folder.is_dir() and any(map(_PART.fullmatch, os.listdir(folder))):
        raise FormatError(
            f"{str(folder)!r} must be a new folder or one with a log, got parts without {commit_log.LOG!r}"
        )


def _small_runs(parts: list[commit_log.Part], nbytes: int) -> list[list[commit_log.Part]]:
    runs: list[list[commit_log.Part]] = [[]]
    for part in parts:
        if sum(part_in_run.nbytes for part_in_run in runs[-1]) + part.nbytes > nbytes:
            runs.append([])
        runs[-1].append(part)
    return [run for run in runs if len(run) > 1]


def _number(name: str) -> int:
    match = _PART.fullmatch(name)
    return int(match[1]) if match else -1


def _match(batch: AnyBatch, about: dict[str, Any]) -> AnyBatch:
    """Convert columns of a batch to ragged columns if the columns are ragged in the dataset's schema.

    If rows have equal shapes or no elements, a batch can have a regular column where the dataset has a ragged column.
    """
    if isinstance(batch, MultiAgentBatch) or about["type"] == "MultiAgentBatch":
        return batch
    flat = batch if isinstance(batch, SampleBatch) else batch.as_sample_batch()
    columns = flat._all()
    matched = {}
    for field in commit_log.schema_in(about):
        if field.name in columns and not holds_objects(field) and RaggedColumn.reads(field.type):
            model: Any = column_from_arrow(pa.array([], field.type), field)
            column = match_ragged(columns[field.name], model.dtype, model.ndim, field.name)
            if column is not columns[field.name]:
                matched[field.name] = column
    if not matched:
        return batch
    converted = flat._with({**columns, **matched})
    return converted if isinstance(batch, SampleBatch) else converted.as_batch()


def _check_alike(about: dict[str, Any], kind: str, schema: pa.Schema) -> None:
    """Raise ColumnMismatchError if a batch has another type or other columns than earlier batches."""
    if about["type"] != kind:
        raise ColumnMismatchError(f"batches of the dataset must be of type {about['type']}, got a {kind}")
    if kind == "MultiAgentBatch":
        return
    expected = commit_log.schema_in(about)
    for name in schema.names:
        if name not in expected.names:
            raise ColumnMismatchError(f"the dataset has no column {name!r}; {near_names(name, expected.names)}")
    for field in expected:
        if field.name not in schema.names:
            raise ColumnMismatchError(f"column {field.name!r} must exist, as in the dataset, got a batch without it")
        new_field = schema.field(field.name)
        if not _is_alike(new_field, field):
            hint = "; declare it ragged in every batch: ragged=" if RaggedColumn.reads(new_field.type) else ""
            raise ColumnMismatchError(
                f"column {field.name!r} must be {field.type} as in the dataset, got {new_field.type}{hint}"
            )


def _is_alike(new_field: pa.Field, field: pa.Field) -> bool:
    """Return whether two columns can be concatenated; the Arrow types of objects and the layouts of text may differ."""
    if holds_objects(field) and holds_objects(new_field):
        return True
    texts = [TextColumn.form_of(candidate.type, candidate.metadata or {}) for candidate in (new_field, field)]
    if all(texts):
        return texts[0] == texts[1]
    if any(texts):
        # Earlier versions stored some text as objects.
        objects, text = (new_field, texts[1]) if texts[0] is None else (field, texts[0])
        return holds_objects(objects) and TextColumn.form_of(objects.type, {}) == text
    return bool(new_field.equals(field, check_metadata=True))

"""Rows of a dataset by their numbers, read from the parts that have them; held by `Dataset`."""

from __future__ import annotations

import contextlib
import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.errors import ArgumentError, FormatError, PolicyNotFoundError, near_names
from samplebatch.storage.batch_table import AnyBatch, join, read_batch, read_group, take_rows
from samplebatch.storage.commit_log import CommitLog, Part, Snapshot
from samplebatch.storage.parquet import open_parquet
from samplebatch.storage.selection import Filters, RowFilter, choose
from samplebatch.storage.table_file import ParquetTable

Rows = npt.NDArray[np.int64]
_Found = TypeVar("_Found")

_MAX_OPEN = 64
"""Files that are held open."""


class DatasetRows:
    """The rows of the parts of a dataset, numbered through in the order in which they were appended.

    The numbers outlast compaction, which joins parts that follow each other: whoever misses a file looks at the log
    again, and finds its rows elsewhere.

    Parameters
    ----------
    folder
        The folder.
    columns
        The columns that are read; None for all.
    filters
        Conditions on the rows that count; None if all do.
    policy
        Whose rows count, where there are policies.
    allow_pickle, max_nbytes
        As of every reader.
    cache_nbytes
        Bytes of row groups that stay in memory after they were read.
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
        self.log = CommitLog(folder)
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
        """Adopt the newest commits; raises as `adopt` does."""
        while True:
            snapshot = self.log.read()
            try:
                return self.adopt(snapshot)
            except FormatError:
                # Parts go when they are joined, a moment after that is committed.
                if self.log.read().nbytes == snapshot.nbytes:
                    raise

    def adopt(self, snapshot: Snapshot) -> None:
        """Take a state of the dataset for the current one, after checking that its files are there.

        Raises
        ------
        FormatError
            If a part is missing, or has another size than it was written with; names it.
        """
        if snapshot.parts:
            sizes: dict[str, int] = {}
            for entry in os.scandir(self.folder):
                # Parts that were joined go meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
            for part in snapshot.parts:
                if sizes.get(part.name) != part.size:
                    fault = "is missing" if part.name not in sizes else "has another size than was committed"
                    raise FormatError(f"{str(self.folder)!r} must have all of its parts, and {part.name!r} {fault}")
        self.snapshot = snapshot
        groups = [(part, group) for part in snapshot.parts for group in range(len(part.groups))]
        self._groups = groups
        counts = [part.groups[group] for part, group in groups]
        self._starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        # Fewer rows count than there are once parts were joined with later ones.
        self._counted = sum(self._own_rows(number) for number in range(len(groups)))
        for name in ("_index", "bounds"):
            self.__dict__.pop(name, None)

    def __len__(self) -> int:
        return self._counted if self._index is None else len(self._index)

    @property
    def row_nbytes(self) -> float:
        """Bytes of a row in memory, on the average."""
        return sum(part.nbytes for part in self.snapshot.parts) / max(1, int(self._starts[-1]))

    @cached_property
    def bounds(self) -> Rows:
        """Where row groups begin among the rows that count, and where the last of them ends."""
        index = self._index
        return np.minimum(self._starts, self._counted) if index is None else np.searchsorted(index, self._starts)

    def take(self, rows: Rows) -> AnyBatch:
        """Read rows that count, by their numbers, in the order given.

        Raises
        ------
        FormatError
            If a part is missing or damaged.
        """
        if self.is_multi_agent:
            found = ", ".join(map(repr, self._policies()))
            raise ArgumentError(f"rows must be of one policy to be read; pass policy=..., one of {found}")
        return self._find(lambda: self._take(rows if self._index is None else self._index[rows]))

    def _find(self, read: Callable[[], _Found]) -> _Found:
        """Read from the parts, and once more if they were compacted meanwhile: the same rows are in others then."""
        while True:
            try:
                return read()
            except FileNotFoundError:
                self.adopt_compacted()

    @property
    def is_multi_agent(self) -> bool:
        """Whether rows are of several policies, none of which was chosen."""
        return self._policy is None and any(part.policies is not None for part in self.snapshot.parts)

    @property
    def is_whole(self) -> bool:
        """Whether neither columns nor filters leave anything out."""
        return self._columns is None and self._filters is None

    def read(self) -> AnyBatch:
        """Read all rows that count, part by part; those of several policies if none was chosen."""
        if self._policy is not None or not self.snapshot.parts:
            return self.take(np.arange(len(self)))
        return self._find(self._read_parts)

    def check(self) -> None:
        """Hold all bytes of the parts against their checksums.

        Raises
        ------
        FormatError
            If some have changed; names the columns.
        """
        self._find(self._check_parts)

    def _check_parts(self) -> None:
        for part in self.snapshot.parts:
            open_parquet(self.folder / part.name, verify=True)

    def schema(self) -> pa.Schema:
        """Return the schema of the first part, without metadata."""
        return self._find(lambda: self.file(self.snapshot.parts[0]).schema.remove_metadata())

    def columns(self) -> Mapping[str, Column]:
        """Return the columns that are read, without rows, by the schema alone; empty if there is no part."""
        if not self.snapshot.parts:
            return {}
        empty = self.schema().empty_table()
        chosen = empty.select(choose(self._columns, empty.column_names, repr(str(self.folder))))
        # There is no row that could be unpickled.
        return SampleBatch.from_arrow(chosen, allow_pickle=True)._all()

    def _read_parts(self) -> AnyBatch:
        if self._counted < self._starts[-1] and not self.is_multi_agent:
            return self._take(np.arange(self._counted) if self._index is None else self._index)
        found = []
        for part in self.snapshot.parts:
            file = self.file(part)
            bound = MemoryBound(repr(file.name), part.size, self._max_nbytes)
            must = f"{file.name!r} must be a part of a dataset"
            trust = {"allow_pickle": self._allow_pickle}
            found.append(read_batch(file, bound, must, self._columns, self._filters, **trust))
        return join(found)

    def only(self, columns: Sequence[str]) -> AnyBatch:
        """Read some columns of all rows that count."""
        other = copy.copy(self)
        other.__dict__.update(_columns=columns, _cache=OrderedDict(), _cache_nbytes=0)
        return other.take(np.arange(len(self)))

    def adopt_compacted(self) -> None:
        """Look for the rows in the parts that have replaced those they were in.

        Raises
        ------
        FormatError
            If they are in none.
        """
        counted = self._counted
        known = counted if self._policy is None else int(self._starts[-1])
        # Joined parts lie policy by policy: rows of one keep their order, and go to other places.
        kept_names = ("bounds", "_index") if self._policy is None else ("bounds",)
        held = {name: self.__dict__[name] for name in kept_names if name in self.__dict__}
        while True:
            snapshot = self.log.read()
            total, kept = 0, []
            for part in snapshot.parts:
                if total < known:
                    kept.append(part)
                    total += part.rows
            if total < known:
                raise FormatError(f"{str(self.folder)!r} must have the rows that it had, and some of them are gone")
            try:
                self.adopt(snapshot._replace(parts=kept))
            except FormatError:
                if self.log.read().nbytes == snapshot.nbytes:
                    raise
            else:
                # The last part may have rows that came later, too: they do not count before `reload`.
                self._counted = counted
                self.__dict__.update(held)
                return

    def _take(self, rows: Rows) -> AnyBatch:
        if not len(rows):
            return self._empty()
        owners = np.searchsorted(self._starts, rows, "right") - 1
        order = np.argsort(owners, kind="stable")
        cuts = np.flatnonzero(np.diff(owners[order])) + 1
        found = []
        for places in np.split(order, cuts):
            group = int(owners[places[0]])
            found.append(self._rows_of(self._group(group), rows[places] - self._starts[group], group))
        joined = join(found)
        if len(found) == 1 or np.array_equal(order, np.arange(len(order))):
            return joined
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return take_rows(joined, back)

    def _rows_of(self, batch: AnyBatch, rows: Rows, group: int) -> AnyBatch:
        part, number = self._groups[group]
        if len(rows) == part.groups[number] and np.array_equal(rows, np.arange(len(rows))):
            return batch
        return take_rows(batch, rows)

    def _empty(self) -> AnyBatch:
        if not self._groups:
            raise FormatError(f"{str(self.folder)!r} must have parts to be read, it has none")
        return take_rows(self._group(0), np.zeros(0, np.int64))

    def _group(self, number: int) -> AnyBatch:
        """Read a row group, or find it among those that were read last."""
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
        held = sum(nbytes for _, nbytes in self._cache.values())
        while held > self._cache_nbytes and len(self._cache) > 1:
            held -= self._cache.popitem(last=False)[1][1]
        return batch

    def file(self, part: Part) -> ParquetTable:
        """Open the file of a part, or find it among those that are open."""
        file = self._open.pop(part.name, None)
        if file is None:
            file, _ = open_parquet(self.folder / part.name, verify=None, max_nbytes=self._max_nbytes)
            if file.group_rows != part.groups:
                raise FormatError(f"{file.name!r} must have the row groups that were committed, it has others")
        self._open[part.name] = file
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return file

    @cached_property
    def _index(self) -> Rows | None:
        """The rows that count; None if all do."""
        return None if self._filters is None and self._policy is None else self._find(self._find_index)

    def _find_index(self) -> Rows:
        known = self._policies()
        if self._policy is not None and self._policy not in known and self.snapshot.parts:
            raise PolicyNotFoundError(f"no policy {self._policy!r}; {near_names(self._policy, known)}")
        kept = [self._kept(number) for number in range(len(self._groups))]
        index = np.concatenate([np.zeros(0, np.int64), *kept])
        return index[index < self._stop()]

    def _stop(self) -> int:
        """Find the number behind the last row that counts, filters aside."""
        left = self._counted
        for number, start in enumerate(self._starts.tolist()[:-1]):
            own = self._own_rows(number)
            if left <= own:
                return int(start + left)
            left -= own
        return int(self._starts[-1])

    def _own_rows(self, number: int) -> int:
        """Count the rows of a row group that are of the policy, or all where none was chosen."""
        part, group = self._groups[number]
        return part.groups[group] if self._policy is None or _policy_of(part, group) == self._policy else 0

    def _policies(self) -> list[str]:
        return sorted({policy for part in self.snapshot.parts for policy, rows in part.policies or () if rows})

    def _kept(self, number: int) -> Rows:
        """Find the rows of a row group that count."""
        part, group = self._groups[number]
        start, rows = int(self._starts[number]), self._own_rows(number)
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


def _policy_of(part: Part, group: int) -> str | None:
    """Tell the policy of a row group's rows: none has rows of two policies."""
    start, stop = sum(part.groups[:group]), 0
    for policy, rows in part.policies or ():
        stop += rows
        if start < stop:
            return policy
    return None

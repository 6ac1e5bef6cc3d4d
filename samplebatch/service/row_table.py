"""RowTable: table of keyed rows, which writers complete column by column and each consumer takes once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np

from samplebatch import errors
from samplebatch.arguments import choice, count_of, positive, whole
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.table import new_lock
from samplebatch.column.convert import Ragged, ragged_dtypes
from samplebatch.service.limiter import Hold, IsCancelled, WaitingRoom
from samplebatch.service.protocol import TakenNumbers, short_text
from samplebatch.service.row_store import (
    UNKNOWN,
    Ints,
    RowStore,
    SelectionColumns,
    Write,
    keys_array,
    list_keys,
    unknown_keys,
)
from samplebatch.storage.buffers.state import generator_from_state, generator_state
from samplebatch.storage.foreign.damage import name_damage

MAX_ROWS: Final = 1 << 16
"""Maximum number of rows per request; bounds the time for which a request occupies the lock."""

MAX_REMOVED_KEYS: Final = 1 << 16
"""Maximum number of removed keys that a table remembers, unless its capacity is larger."""

_MAX_NBYTES: Final = 1 << 34

_REMOVALS: Final = ("taken", "evicted", "removed")
"""Reasons why a row was removed."""


@dataclass(frozen=True)
class Selection:
    """A request for complete rows.

    - `n`: maximum number of rows.
    - `columns`: columns that the rows must have; None for all columns that the table has during the selection.
    - `at_least`: minimum number of rows; None for `n`.
    - `by_group`: whether to select only complete groups.
    - `max_tokens`: maximum total number of tokens; None for no limit.
    - `max_lag`: maximum number of versions by which a row is older than the newest weights; None for no limit.
    """

    n: int
    columns: tuple[str, ...] | None = None
    at_least: int | None = None
    by_group: bool = False
    max_tokens: int | None = None
    max_lag: int | None = None

    @classmethod
    def of(cls, n: Any, options: Mapping[str, Any]) -> Selection:
        """Validate a request.

        Raises ArgumentError if an option is invalid or out of range. Raises CapacityError if `n` exceeds `MAX_ROWS`.
        """
        count = whole("n", n, 1)
        if count > MAX_ROWS:
            raise errors.CapacityError(f"n must be at most {MAX_ROWS} rows, got {count}")
        arguments: dict[str, Any] = {"columns": check_columns(options.get("columns"))}
        for name in ("at_least", "max_tokens", "max_lag"):
            value = options.get(name)
            arguments[name] = None if value is None else whole(name, value, 0 if name == "max_lag" else 1)
        if (arguments["at_least"] or 0) > count:
            raise errors.ArgumentError(f"at_least must be at most n, {count}, got {arguments['at_least']}")
        by_group = options.get("by_group", False)
        if not isinstance(by_group, bool):
            raise errors.ArgumentError(f"by_group must be true or false, got a {type(by_group).__name__}")
        return cls(count, by_group=by_group, **arguments)


def check_columns(columns: Any) -> tuple[str, ...] | None:
    """Validate column names and return them as a tuple; None is returned unchanged.

    Raises ArgumentError if `columns` is not a non-empty list of unique names.
    """
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, list | tuple):
        raise errors.ArgumentError(f"columns must be a list of names, got a {type(columns).__name__}")
    names = tuple(short_text("a column", name) for name in columns)
    if len(set(names)) < len(names) or not names:
        raise errors.ArgumentError(
            f"columns must be one or more unique names, got {len(names)} names, {len(set(names))} of them unique"
        )
    return names


@dataclass(eq=False)
class Lease:
    """Rows that `RowTable.lease` reserved for a consumer.

    - `consumer`: name of the consumer.
    - `reader`, `number`: name of the client and number of its request; "" and 0 for requests of this process.
    - `numbers`: row numbers.
    - `gather`: function that gathers the columns without the lock.
    - `held_s`: seconds for which the table blocked the request.
    """

    consumer: str
    reader: str
    number: int
    numbers: Ints
    gather: Any
    held_s: float


class RowTable:
    """Table of keyed rows: writers add columns at any time, and each consumer takes each row once.

    A row is complete for a consumer once the row has all columns that the consumer requests. A row is removed once all
    consumers have taken it. The table is thread-safe. A `RowClient` accesses the table through a `ReplayServer`.

    Parameters
    ----------
    name
        Name of the table.
    capacity
        Maximum number of rows.
    consumers
        Names of the consumers. If `consumers` is empty, rows remain in the table until they are removed explicitly.
    max_nbytes
        Maximum size in bytes. Additional columns of existing rows may increase the size up to twice this limit.
    remover
        `"none"`: `put` blocks while new rows would exceed `capacity` or `max_nbytes`. `"fifo"`: the oldest rows are
        evicted, even if consumers have not taken them.
    group
        Name of a column of integers or text that identifies the group of each row, for `by_group`.
    group_size
        Number of rows in a complete group. If `group_size` is None, a group is complete once all existing rows of the
        group are complete.
    version
        Name of an integer column: the version of the weights that generated each row, for `max_lag`.
    max_lag
        Maximum number of versions by which a row is older than the newest version; older rows are evicted. The newest
        version is the maximum over the `version` column and the versions of published weights.
    length
        Name of the column that determines each row's number of tokens, for `max_tokens`. The column is stored as ragged
        unless it contains one integer per row.
    ragged
        Names of ragged columns, or a mapping of names to element dtypes. These columns are stored as ragged even if all
        rows of a put have the same shape.
    seed
        Seed of the random generator of `sample`; None for a random seed.

    Raises
    ------
    ArgumentError
        If an argument is invalid or out of range.

    Attributes
    ----------
    name, kind, unit, remover, capacity
        Values of the arguments; `kind` and `unit` are always `"rows"`.

    Examples
    --------
    >>> table = RowTable("rollouts", 100)
    >>> table.put([7, 8], {"prompt": ["two", "three"]})
    array([7, 8])
    >>> table.put([8], {"answer": [3.0]})
    array([8])
    >>> batch = table.take(1, columns=["prompt", "answer"])
    >>> batch["key"], batch["prompt"].tolist(), batch["answer"]
    (array([8]), ['three'], array([3.]))
    """

    kind: Final = "rows"
    unit: Final = "rows"

    def __init__(
        self,
        name: str,
        capacity: int,
        *,
        consumers: Sequence[str] = ("trainer",),
        max_nbytes: int = _MAX_NBYTES,
        remover: str = "none",
        group: str | None = None,
        group_size: int | None = None,
        version: str | None = None,
        max_lag: int | None = None,
        length: str | None = None,
        ragged: Ragged = (),
        seed: int | None = None,
    ) -> None:
        self.name = name
        self.capacity = whole("capacity", capacity, 1)
        self._max_nbytes = whole("max_nbytes", max_nbytes, 1)
        if remover not in ("none", "fifo"):
            raise errors.ArgumentError(f"remover must be 'none' or 'fifo', got {remover!r}")
        self.remover = remover
        if isinstance(consumers, str) or len(set(consumers)) < len(consumers):
            raise errors.ArgumentError(f"consumers must be a list of unique names, got {consumers!r}")
        if group_size is not None and group is None:
            raise errors.ArgumentError("group must be passed with group_size, got none")
        if max_lag is not None and version is None:
            raise errors.ArgumentError("version must be passed with max_lag, got none")
        self._group_size = None if group_size is None else whole("group_size", group_size, 1)
        self._max_lag = None if max_lag is None else whole("max_lag", max_lag)
        self._rows = RowStore(
            [short_text("a consumer", consumer) for consumer in consumers],
            SelectionColumns(group, version, length, ragged_dtypes(ragged)),
        )
        self._rng = np.random.default_rng(seed)
        self._lock = new_lock()
        self._room = WaitingRoom(name, self._lock)
        self._written = TakenNumbers()
        self._committed = TakenNumbers()
        """Number of the latest committed take per reader."""
        self._started = TakenNumbers()
        """Number of the latest started or voided take per reader."""
        self._leases: dict[str, Lease] = {}
        """Current lease per reader."""
        self._inserted = self._sampled = self._evicted = 0
        self._removed_keys: dict[Any, str] = {}
        """Keys of the latest removed rows, oldest first, each with one of `_REMOVALS`."""
        self._version = UNKNOWN

    def __len__(self) -> int:
        with self._lock:
            return len(self._rows)

    def __repr__(self) -> str:
        return f"RowTable({self.name!r}, {len(self)} of {self.capacity} rows)"

    # Writing

    def put(
        self,
        keys: Any,
        columns: Mapping[str, Any],
        *,
        update: bool | None = None,
        writer: str = "",
        stream: str = "",
        number: int = 0,
        timeout_s: float | None = None,
        is_cancelled: IsCancelled | None = None,
    ) -> Ints | list[str]:
        """Store columns of rows and create the rows whose keys are unknown.

        The operation is atomic: if an error is raised, nothing is stored.

        Parameters
        ----------
        keys
            One integer or string per row, n in total; None to assign new integers.
        columns
            Mapping of names to arrays, lists or columns with n rows each, or a `SampleBatch`. Arrays are not copied: do
            not modify them afterwards.
        update
            If True, all keys must exist. If False, no key may exist. If None, new and existing keys are accepted.
        writer, stream, number
            Writer, stream and sequence number of this put. A put is ignored as a duplicate if its number is not greater
            than the stream's last number.
        timeout_s
            Maximum waiting time in seconds while the put is blocked; None to wait without limit, 0 not to wait.
        is_cancelled
            Function that returns whether the caller has cancelled a blocked put; a cancelled put raises AbandonedError.

        Returns
        -------
        The keys: an integer array of shape (n,), or a list of strings.

        Raises
        ------
        ArgumentError
            If a key is repeated, a row already has one of the columns, or `update` is False and a key exists.
        RowIndexError
            If `update` is True and a key is unknown, or `update` is None and a key's row was taken, evicted or removed;
            pass `update=False` to create the row again.
        ColumnLengthError, ColumnTypeError, ColumnMismatchError
            If a column does not have one row per key, contains Python objects, or differs from earlier puts in kind,
            dtype or row shape.
        CapacityError
            If the put has more than 65,536 rows, or exceeds the table's capacity or size limit.
        LimitTimeoutError
            If the put is still blocked after `timeout_s`.
        TableClosedError
            If the table was closed before the call, or is closed during the wait.
        """
        write = self._rows.prepare(keys, columns)
        limit = min(MAX_ROWS, self.capacity)
        if write.count > limit:
            raise errors.CapacityError(f"a put must have at most {limit} rows, got {write.count}")
        if write.nbytes > self._max_nbytes:
            raise errors.CapacityError(f"a put must have at most {self._max_nbytes} bytes, got {write.nbytes}")
        if not write.count:
            return keys_array([])
        with self._lock:
            was_taken = partial(self._written.includes, writer, stream, number)
            self._room.admit(
                writer,
                "insert",
                lambda: None if was_taken() or self._removed_of(write, update) else self._hold_put(write),
                _seconds(timeout_s),
                is_cancelled,
            )
            if was_taken():
                return keys_array(write.keys or [])
            removed = self._removed_of(write, update)
            if removed:
                raise errors.RowIndexError(
                    f"keys must not belong to removed rows, got {len(removed)} of {write.count}, first "
                    f"{removed[0]!r}, which was {self._removed_keys[removed[0]]}; put the others, or pass update=False "
                    "to create the rows again"
                )
            if self._rows.nbytes + write.nbytes > 2 * self._max_nbytes:
                raise errors.CapacityError(
                    f"columns of existing rows must keep the table below {2 * self._max_nbytes} bytes, got "
                    f"{self._rows.nbytes + write.nbytes}"
                )
            created = self._rows.new_rows(write)
            stored = self._rows.write(write, update)
            self._written.note(writer, stream, number)
            self._inserted += created
            if self._removed_keys:
                for key in write.keys or ():
                    self._removed_keys.pop(key, None)
            if self._rows.selection_columns.version in write.columns:
                versions = self._rows.selection_values("version")[self._rows.candidates()]
                self._version = max(self._version, int(versions.max(initial=UNKNOWN)))
            self._evict()
            self._room.wake()
            return stored

    def _removed_of(self, write: Write, update: bool | None) -> list[Any]:
        if update is not None or not self._removed_keys:
            return []
        return [key for key in write.keys or () if key in self._removed_keys]

    def _hold_put(self, write: Write) -> Hold | None:
        created = self._rows.new_rows(write)
        if not created or self.remover == "fifo":
            return None
        size = len(self._rows)
        if size + created > self.capacity:
            return Hold(f"it has {size} of {self.capacity} rows, no room for {created} more", needs_room=True)
        if size and self._rows.nbytes + write.nbytes > self._max_nbytes:
            return Hold(f"it has {self._rows.nbytes} of {self._max_nbytes} bytes", needs_room=True)
        return None

    def _evict(self) -> None:
        """Remove rows that exceed `max_lag`; with remover `"fifo"`, also remove the oldest rows to meet the limits."""
        rows = self._rows
        if self._max_lag is not None and self._version != UNKNOWN:
            versions = rows.selection_values("version")
            is_old = rows.candidates() & (versions != UNKNOWN) & (versions < self._version - self._max_lag)
            self._drop(rows.numbers_at(np.flatnonzero(is_old)))
        if self.remover == "fifo":
            self._drop(rows.oldest(max(len(rows) - self.capacity, 0)))
            while rows.nbytes > self._max_nbytes and len(rows) > 1:
                self._drop(rows.oldest(max(len(rows) // 8, 1)))

    def _drop(self, numbers: Ints) -> None:
        if not len(numbers):
            return
        self._evicted += len(numbers)
        keys = self._rows.keys_of(numbers)
        self._rows.remove(numbers)
        self._remember(keys, "evicted")

    def _remember(self, keys: Ints | list[str], removal: str) -> None:
        """Remember the keys of removed rows, so that columns that arrive later do not create the rows again."""
        self._removed_keys.update(dict.fromkeys(keys if isinstance(keys, list) else keys.tolist(), removal))
        excess = len(self._removed_keys) - max(MAX_REMOVED_KEYS, self.capacity)
        for key in list(islice(self._removed_keys, max(excess, 0))):
            del self._removed_keys[key]

    def reserve_keys(self, count: int) -> int:
        """Reserve `count` consecutive integer keys for a writer and return the first key.

        Raises
        ------
        ArgumentError, CapacityError
            If `count` is not an integer from 1 to 65,536.
        """
        if whole("count", count, 1) > MAX_ROWS:
            raise errors.CapacityError(f"count must be at most {MAX_ROWS} keys, got {count}")
        with self._lock:
            first = self._rows.next_key
            self._rows.next_key += count
            return first

    def taken(self, writer: str, stream: str = "") -> int:
        """Return the sequence number of the last stored put of a writer's stream; 0 if there is no such put."""
        with self._lock:
            return self._written.last(writer, stream)

    def set_version(self, version: int) -> None:
        """Record the version of published weights and evict rows that exceed `max_lag`."""
        with self._lock:
            self._version = max(self._version, version)
            self._evict()
            self._room.wake()

    # Reading

    def wait(
        self,
        keys_or_count: Any,
        *,
        columns: Sequence[str] | None = None,
        timeout_s: float | None = None,
        reader: str = "",
        is_cancelled: IsCancelled | None = None,
    ) -> Ints | list[str]:
        """Wait until rows have the requested columns.

        Parameters
        ----------
        keys_or_count
            Keys of the rows to wait for, which need not exist yet; or the number of rows to wait for.
        columns
            Columns that the rows must have; None for all columns that the table has during the check.
        timeout_s
            Maximum waiting time in seconds; None to wait without limit, 0 not to wait.
        reader, is_cancelled
            As in `lease`.

        Returns
        -------
        The keys that were passed; if a number was passed, the keys of the oldest complete rows.

        Raises
        ------
        LimitTimeoutError
            If too few rows are complete after `timeout_s`; the message counts the rows that lack each column.
        ArgumentError, CapacityError, TableClosedError
            In the same cases as `take`.
        """
        names = check_columns(columns)
        keys: list[Any] | None = None
        if isinstance(keys_or_count, int | np.integer) or np.ndim(keys_or_count) == 0:
            count = whole("count", keys_or_count, 1)
        else:
            keys = _nonempty_keys(keys_or_count)
            count = len(keys)
        if count > MAX_ROWS:
            raise errors.CapacityError(f"keys_or_count must be at most {MAX_ROWS} rows, got {count}")
        selected: list[Ints] = []
        with self._lock:
            self._room.admit(
                reader,
                "sample",
                lambda: self._hold_wait(keys, count, names, selected),
                _seconds(timeout_s),
                is_cancelled,
            )
            return keys_array(keys) if keys is not None else self._rows.keys_of(selected[-1])

    def _hold_wait(
        self, keys: list[Any] | None, count: int, names: tuple[str, ...] | None, selected: list[Ints]
    ) -> Hold | None:
        rows = self._rows
        columns = tuple(rows.forms) if names is None else names
        if keys is None:
            exists = rows.candidates()
            complete = np.flatnonzero(rows.complete(exists, columns))[:count]
            selected[:] = [rows.numbers_at(complete)]
            num_complete = len(complete)
            unknown = max(count - int(exists.sum()), 0)
        else:
            numbers = rows.find(keys)
            exists = rows.mask_of(numbers[numbers >= 0])
            num_complete = int(rows.complete(exists, columns).sum())
            unknown = int((numbers < 0).sum())
        if num_complete >= count:
            return None
        return Hold(
            _describe_missing_rows(count, num_complete, rows.lacking(exists, columns), unknown), needs_items=True
        )

    def take(
        self,
        n: int,
        *,
        columns: Sequence[str] | None = None,
        consumer: str = "trainer",
        timeout_s: float | None = None,
        **options: Any,
    ) -> SampleBatch[Any]:
        """Take the oldest complete rows; no other `take` by this consumer returns these rows.

        Parameters
        ----------
        n
            Maximum number of rows.
        columns
            Columns to return, which the rows must have; None for all columns that the table has during the selection.
        consumer
            Name of one of the table's consumers.
        timeout_s
            Maximum waiting time in seconds; None to wait without limit, 0 not to wait.
        **options
            `at_least`, `by_group`, `max_tokens` and `max_lag`, as in `RowClient.take`.

        Returns
        -------
        SampleBatch
            The columns, and the keys as column `key`.

        Raises
        ------
        LimitTimeoutError
            If too few rows are complete after `timeout_s`; the message counts the rows that lack each column.
        ArgumentError
            If an argument is invalid, or the table was created without the column that an option requires.
        CapacityError
            If `n` exceeds 65,536, or a single row or group exceeds `n` or `max_tokens`.
        TableClosedError
            If the table was closed before the call, or is closed during the wait.
        """
        lease = self.lease(Selection.of(n, {"columns": columns, **options}), consumer, timeout_s=timeout_s)
        batch: SampleBatch[Any] = lease.gather()
        self.commit(lease)
        return batch

    def lease(
        self,
        selection: Selection,
        consumer: str,
        *,
        reader: str = "",
        number: int = 0,
        timeout_s: float | None = None,
        is_cancelled: IsCancelled | None = None,
        max_nbytes: int | None = None,
    ) -> Lease:
        """Reserve rows for a consumer until `commit` or `release` is called.

        Parameters
        ----------
        selection, consumer, timeout_s
            As in `take`.
        reader, number
            Name of the client and sequence number of its request; 0 for a request without a number.
        is_cancelled
            As in `put`.
        max_nbytes
            Maximum estimated size of the rows in bytes; None for no limit.

        Raises
        ------
        AbandonedError
            If the reader has already sent this request or a later request, or `is_cancelled` returns True.
        SampleBatchError
            In the same cases as `take`; CapacityError is also raised if the rows exceed `max_nbytes`.
        """
        if consumer not in self._rows.consumers:
            raise errors.ArgumentError(
                f"consumer must be a consumer of table {self.name!r}, got {consumer!r}; "
                f"{errors.near_names(consumer, self._rows.consumers)}"
            )
        result: list[Ints | errors.SampleBatchError] = []
        with self._lock:
            self._start_take(reader, number)
            hold = partial(self._hold_selection, selection, consumer, result, None)
            held_s = self._room.admit(reader, "sample", hold, _seconds(timeout_s), is_cancelled)
            if number and self._started.last(reader, "") != number:
                raise errors.AbandonedError(f"table {self.name!r} selected rows for a repeated request")
            numbers = _selected(result)
            gather = self._view(numbers, selection, max_nbytes)
            self._rows.lease(consumer, numbers)
            lease = Lease(consumer, reader, number, numbers, gather, held_s)
            if number:
                self._leases[reader] = lease
            return lease

    def _start_take(self, reader: str, number: int) -> None:
        """Record a take of a reader and release the reader's uncommitted lease."""
        if not number:
            return
        if self._started.includes(reader, "", number):
            raise errors.AbandonedError(f"table {self.name!r} received a repeated request")
        self._started.note(reader, "", number)
        previous_lease = self._leases.get(reader)
        if previous_lease is not None:
            self._return(previous_lease)

    def commit(self, lease: Lease) -> bool:
        """Mark leased rows as taken; return whether the lease was valid."""
        with self._lock:
            if lease.number and self._leases.pop(lease.reader, None) is not lease:
                return False
            self._remember(self._rows.commit(lease.consumer, lease.numbers), "taken")
            self._committed.note(lease.reader, "", lease.number)
            self._sampled += len(lease.numbers)
            self._room.wake()
            return True

    def release(self, lease: Lease) -> None:
        """Make the rows of an uncommitted lease available again."""
        with self._lock:
            if not lease.number or self._leases.get(lease.reader) is lease:
                self._return(lease)

    def _return(self, lease: Lease) -> None:
        self._leases.pop(lease.reader, None)
        self._rows.release(lease.consumer, lease.numbers)
        self._room.wake()

    def settle(self, reader: str, number: int) -> bool:
        """Return whether a reader's take was committed; an uncommitted take becomes void."""
        with self._lock:
            if self._committed.last(reader, "") >= number:
                return True
            lease = self._leases.get(reader)
            if lease is not None and lease.number <= number:
                self._return(lease)
            if self._started.last(reader, "") < number:
                self._started.note(reader, "", number)
            return False

    def sample(
        self,
        n: int,
        *,
        columns: Sequence[str] | None = None,
        timeout_s: float | None = None,
        seed: int | None = None,
        reader: str = "",
        is_cancelled: IsCancelled | None = None,
        max_nbytes: int | None = None,
        **options: Any,
    ) -> SampleBatch[Any]:
        """Sample complete rows or groups uniformly without replacement; the rows remain in the table.

        Parameters
        ----------
        n, columns, timeout_s, **options
            As in `take`.
        seed
            Seed of a random generator for this sample only; None to use the table's generator.
        reader, is_cancelled, max_nbytes
            As in `lease`.

        Raises
        ------
        SampleBatchError
            In the same cases as `lease`.
        """
        selection = Selection.of(n, {"columns": columns, **options})
        rng = self._rng if seed is None else np.random.default_rng(whole("seed", seed))
        result: list[Ints | errors.SampleBatchError] = []
        with self._lock:
            hold = partial(self._hold_selection, selection, None, result, rng)
            self._room.admit(reader, "sample", hold, _seconds(timeout_s), is_cancelled)
            numbers = _selected(result)
            gather = self._view(numbers, selection, max_nbytes)
            self._sampled += len(numbers)
        batch: SampleBatch[Any] = gather()
        return batch

    def get(
        self, keys: Any, *, columns: Sequence[str] | None = None, max_nbytes: int | None = None
    ) -> SampleBatch[Any]:
        """Return columns of the rows with the given keys, in the order of the keys; the rows remain in the table.

        Raises
        ------
        RowIndexError
            If a key is unknown.
        ArgumentError
            If a row lacks a column, or `keys` is empty or invalid.
        CapacityError
            If there are more than 65,536 keys, or the rows exceed `max_nbytes`.
        """
        names, key_list = check_columns(columns), _nonempty_keys(keys)
        if len(key_list) > MAX_ROWS:
            raise errors.CapacityError(f"keys must contain at most {MAX_ROWS} keys, got {len(key_list)}")
        with self._lock:
            numbers = self._rows.find(key_list)
            if (numbers < 0).any():
                raise unknown_keys(key_list, numbers >= 0)
            columns = tuple(self._rows.forms) if names is None else names
            lacking = self._rows.lacking(self._rows.mask_of(numbers), columns)
            if lacking:
                raise errors.ArgumentError(
                    f"rows must have the requested columns, {_describe_missing_columns(lacking)}"
                )
            gather = self._view(numbers, Selection(len(key_list), columns), max_nbytes)
        batch: SampleBatch[Any] = gather()
        return batch

    def remove(self, keys: Any) -> int:
        """Remove rows by key; return the number of removed rows."""
        key_list = _nonempty_keys(keys)
        with self._lock:
            numbers = np.unique(self._rows.find(key_list))
            numbers = numbers[numbers >= 0]
            keys_of_rows = self._rows.keys_of(numbers)
            self._rows.remove(numbers)
            self._remember(keys_of_rows, "removed")
            self._room.wake()
            return len(numbers)

    def _view(self, numbers: Ints, selection: Selection, max_nbytes: int | None) -> Any:
        columns = tuple(self._rows.forms) if selection.columns is None else selection.columns
        if max_nbytes is not None:
            nbytes = self._rows.nbytes_of(numbers, columns)
            if nbytes > max_nbytes:
                raise errors.CapacityError(
                    f"rows must have at most {max_nbytes} bytes, got about {nbytes}; request fewer rows"
                )
        return self._rows.view(numbers, columns)

    def _hold_selection(
        self,
        selection: Selection,
        consumer: str | None,
        result: list[Ints | errors.SampleBatchError],
        rng: np.random.Generator | None,
    ) -> Hold | None:
        """Store the selected rows or an error in `result`, or return why too few rows can be selected."""
        try:
            positions, why = self._find_rows(selection, consumer, rng)
        except errors.SampleBatchError as error:
            # Do not raise the error here: `info` also calls this method, for each blocked request.
            result[:] = [error]
            return None
        if why:
            return Hold(why, needs_items=True)
        result[:] = [self._rows.numbers_at(positions)]
        return None

    def _find_rows(
        self, selection: Selection, consumer: str | None, rng: np.random.Generator | None
    ) -> tuple[Ints, str]:
        """Return the positions of selected rows, and the reason if too few rows are selected, else an empty string."""
        rows = self._rows
        columns = tuple(rows.forms) if selection.columns is None else selection.columns
        available = rows.candidates(consumer)
        complete = rows.complete(available, columns)
        for option, role in (("max_tokens", "length"), ("max_lag", "version"), ("by_group", "group")):
            value = getattr(selection, option)
            if value is None or value is False:
                continue
            if getattr(rows.selection_columns, role) is None:
                raise errors.ArgumentError(f"table {self.name!r} must have {role}= to select by {option}, got none")
            complete &= rows.selection_values(role) != UNKNOWN
        if selection.max_lag is not None and self._version != UNKNOWN:
            complete &= rows.selection_values("version") >= self._version - selection.max_lag
        positions, is_full = self._select(available, np.flatnonzero(complete), selection, rng)
        required = selection.n if selection.at_least is None else selection.at_least
        if len(positions) >= required or is_full:
            return positions, ""
        unknown = max(required - int(available.sum()), 0)
        return positions, _describe_missing_rows(required, len(positions), rows.lacking(available, columns), unknown)

    def _select(
        self, available: Any, complete: Ints, selection: Selection, rng: np.random.Generator | None
    ) -> tuple[Ints, bool]:
        """Return positions of rows or groups within the limits, and whether a limit excluded the next row or group."""
        rows = self._rows
        if not len(complete):
            return complete, False
        if selection.by_group:
            groups = rows.selection_values("group")
            codes, firsts, group_ranks, counts = np.unique(
                groups[complete], return_index=True, return_inverse=True, return_counts=True
            )
            all_codes, totals = np.unique(groups[available & (groups != UNKNOWN)], return_counts=True)
            expected = np.maximum(totals[np.searchsorted(all_codes, codes)], self._group_size or 1)
            order = np.argsort(firsts) if rng is None else rng.permutation(len(codes))
            order = order[counts[order] == expected[order]]
        else:
            if selection.max_tokens is None:
                return _pick(complete, selection.n, rng), False
            group_ranks, counts = np.arange(len(complete)), np.ones(len(complete), np.int64)
            order = group_ranks if rng is None else rng.permutation(len(complete))
        if not len(order):
            return complete[:0], False
        sizes = counts[order]
        is_within = np.cumsum(sizes) <= selection.n
        if selection.max_tokens is not None:
            tokens = np.bincount(group_ranks, rows.selection_values("length")[complete], len(counts))[order]
            is_within &= np.cumsum(tokens) <= selection.max_tokens
        num_selected = int(is_within.argmin()) if not is_within.all() else len(is_within)
        if not num_selected:
            unit = "group" if selection.by_group else "row"
            if sizes[0] > selection.n:
                raise errors.CapacityError(f"the next {unit} must have at most n = {selection.n} rows, got {sizes[0]}")
            raise errors.CapacityError(
                f"the next {unit} must have at most max_tokens = {selection.max_tokens} tokens, got {int(tokens[0])}"
            )
        rank = np.full(len(counts), len(order))
        rank[order[:num_selected]] = np.arange(num_selected)
        ranks = rank[group_ranks]
        positions = complete[np.argsort(ranks, kind="stable")][: int(sizes[:num_selected].sum())]
        return positions, num_selected < len(order)

    # The table

    def reset(self) -> None:
        """Remove all rows and columns, void all leases and reset all counts."""
        with self._lock:
            self._rows.clear()
            self._leases.clear()
            self._removed_keys.clear()
            self._inserted = self._sampled = self._evicted = 0
            self._version = UNKNOWN
            self._room.wake()

    def info(self) -> dict[str, Any]:
        """Return the state of the table as plain values.

        Returns
        -------
        dict
            The entries of `ReplayTable.info` and three further entries: `consumers`, the number of `evicted` rows, and
            the newest `version` (None if unknown). Entry `columns` maps each column name to the column's dtype and row
            shape.
        """
        with self._lock:
            rows = self._rows
            return {
                "name": self.name,
                "kind": self.kind,
                "items": self.unit,
                "remover": self.remover,
                "size": len(rows),
                "capacity": self.capacity,
                "nbytes": rows.nbytes,
                "weight": float(len(rows)),
                "inserted": self._inserted,
                "sampled": self._sampled,
                "evicted": self._evicted,
                "limits": {"min_size": 1, "samples_per_insert": None, "error_buffer": None, "max_times_sampled": 0},
                "columns": {name: f"{form[1]}{_shape(form[2])}" for name, form in rows.forms.items()},
                "consumers": list(rows.consumers),
                "version": None if self._version == UNKNOWN else self._version,
                "held_back": self._room.held_back(),
                "closed": self._room.closed,
            }

    def freeze(self) -> dict[str, Any]:
        """Return a snapshot for `Checkpoints`; the snapshot's columns are gathered without the lock.

        In the snapshot, leased rows are marked as not taken.
        """
        with self._lock:
            return self._rows.freeze() | {
                "size": len(self._rows),
                "written": self._written.state(),
                "committed": self._committed.state(),
                "removed_keys": [list(self._removed_keys), list(self._removed_keys.values())],
                "counts": [self._inserted, self._sampled, self._evicted],
                "version": None if self._version == UNKNOWN else self._version,
                "generator": generator_state(self._rng),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a table with the same arguments; existing leases become void.

        Raises
        ------
        ColumnMismatchError, FormatError
            If the state contains consumers or columns that do not fit this table, or is incomplete. The table remains
            unchanged.
        """
        with self._lock, name_damage("the state of a table"):
            rows = RowStore(self._rows.consumers, self._rows.selection_columns)
            rows.load(state)
            if len(rows) > self.capacity:
                raise errors.FormatError(f"the state must have at most {self.capacity} rows, got {len(rows)}")
            written, committed = (TakenNumbers.from_state(state[name]) for name in ("written", "committed"))
            counts = [count_of("counts", count) for count in state["counts"]]
            version = UNKNOWN if state["version"] is None else whole("version", state["version"], None)
            rng = generator_from_state(state["generator"])
            keys, removals = state.get("removed_keys", [[], []])
            removals = [choice("removed_keys", removal, _REMOVALS) for removal in removals]
            removed_keys = dict(zip(list_keys(keys) or [], removals, strict=True))
            self._inserted, self._sampled, self._evicted = counts
            self._rows, self._rng, self._version = rows, rng, version
            self._written, self._committed = written, committed
            self._started = TakenNumbers.from_state(committed.state())
            self._removed_keys = removed_keys
            self._leases.clear()
            self._room.wake()

    @property
    def closed(self) -> bool:
        """Whether the table is closed."""
        return self._room.closed

    def close(self) -> None:
        """Close the table; blocked and later puts, waits, takes and samples raise TableClosedError."""
        with self._lock:
            self._room.close()


def _selected(result: list[Ints | errors.SampleBatchError]) -> Ints:
    selected = result[-1]
    if isinstance(selected, errors.SampleBatchError):
        raise selected
    return selected


def _pick(candidates: Ints, n: int, rng: np.random.Generator | None) -> Ints:
    if rng is None:
        return candidates[:n]
    return rng.choice(candidates, min(n, len(candidates)), replace=False)


def _nonempty_keys(keys: Any) -> list[Any]:
    key_list = list_keys(keys)
    if not key_list:
        raise errors.ArgumentError("keys must contain at least one key, got none")
    return key_list


def _describe_missing_rows(count: int, num_complete: int, lacking: Mapping[str, int], unknown: int) -> str:
    """Describe why too few rows are complete, including the number of rows that lack each column."""
    reasons = [f"{count} rows are requested, and {num_complete} are complete"]
    if lacking:
        reasons.append(_describe_missing_columns(lacking))
    if unknown:
        reasons.append(f"{unknown} rows do not exist yet")
    return "; ".join(reasons)


def _describe_missing_columns(lacking: Mapping[str, int]) -> str:
    named = sorted(lacking.items(), key=lambda item: -item[1])[:8]
    more = f" and {len(lacking) - len(named)} more columns" if len(lacking) > len(named) else ""
    return ", ".join(f"{count} lack {name!r}" for name, count in named) + more


def _shape(shape: tuple[int | None, ...]) -> str:
    return f"[{'x'.join('?' if extent is None else str(extent) for extent in shape)}]" if shape else ""


def _seconds(timeout_s: float | None) -> float | None:
    return timeout_s if not timeout_s else positive("timeout_s", timeout_s)

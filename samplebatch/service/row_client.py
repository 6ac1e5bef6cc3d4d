"""RowClient: client of a row table in a replay service."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np
import pyarrow as pa

from samplebatch.arguments import positive, whole
from samplebatch.batch.flags import Flags
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column import memory
from samplebatch.errors import ArgumentError, FormatError, SampleBatchError, ServiceError
from samplebatch.service.answers import AnswerReader
from samplebatch.service.connection import TableConnection, read_nonce
from samplebatch.service.fragments import as_record_batch
from samplebatch.service.protocol import Draw, Fragment, LostError, read_error, read_json, short_text, write_json
from samplebatch.service.row_store import KEY, Ints, check_column, keys_array, list_keys
from samplebatch.service.row_table import Selection, check_columns
from samplebatch.service.samples import cut_inline, have_same_columns, read_stream, split_inline, take
from samplebatch.service.streams import FragmentWriter, new_name, receive_message

if TYPE_CHECKING:
    from samplebatch.service.link import Link
    from samplebatch.transport.broadcast import Publication

T = TypeVar("T")

_MAX_WRITERS: Final = 8
"""Maximum number of open put streams of a client, one per schema."""
_KEYS: Final = 4096
"""Minimum number of keys that a client reserves at once."""


class RowClient:
    """Client of a row table in a replay service.

    The method `put` returns once the service has stored the columns. The method `take` returns once the service has
    marked the rows as taken. After a connection loss, the client reconnects and repeats unacknowledged requests; a
    repeated request takes effect only once. If a client dies, rows in transit to the client return to the table.

    If the client and the service run on the same machine, rows are received through shared memory and are read-only.
    The client is thread-safe; puts and reads do not block each other. A pickled client connects in the process that
    unpickles it; a forked child cannot use its parent's client. Ctrl-C interrupts a blocked call; an interrupted put
    may still be stored.

    Parameters
    ----------
    uri
        Address of the service, such as `"grpc://127.0.0.1:5000"`.
    table
        Name of a `RowTable` of the service.
    token
        Access token of the service; None if the service requires no token.
    tls_root_certs
        Path of the trusted certificates in PEM format; None for the system's certificates.
    writer
        Name that identifies the client as a writer, at most 256 bytes in UTF-8; None for a unique name.
    timeout_s
        Default number of seconds to wait for rows or free space; None for no limit.
    reconnect_s
        Number of seconds to retry while the service is unreachable.
    shared_memory
        Whether to receive rows through shared memory if the service runs on this machine.

    Raises
    ------
    ArgumentError
        If `uri` is not a valid address, or `timeout_s` or `reconnect_s` is not positive.
    CapacityError
        If the writer's name exceeds 256 bytes.
    OSError
        If the certificates cannot be read.
    OwnershipError
        If a parent process used a replay service before this process was forked.

    Attributes
    ----------
    uri, table
        Values of the arguments.
    writer
        The writer's name, generated if the argument is None.

    Examples
    --------
    >>> from samplebatch.service import ReplayServer, RowClient, RowTable
    >>> with (
    ...     ReplayServer([RowTable("rollouts", 100)]) as server,
    ...     RowClient(server.uri, "rollouts") as rows,
    ... ):
    ...     keys = rows.put(None, {"prompt": ["two", "three"], "ids": [[5, 6], [7]]})
    ...     _ = rows.put(keys, {"reward": [0.0, 1.0]})
    ...     batch = rows.take(2, columns=["ids", "reward"])
    >>> batch["ids"][0], batch["reward"], batch["key"]
    (array([5, 6]), array([0., 1.]), array([0, 1]))
    """

    def __init__(
        self,
        uri: str,
        table: str,
        *,
        token: str | None = None,
        tls_root_certs: str | os.PathLike[str] | None = None,
        writer: str | None = None,
        timeout_s: float | None = None,
        reconnect_s: float = 60.0,
        shared_memory: bool = True,
    ) -> None:
        if not isinstance(uri, str):
            raise ArgumentError(
                f"uri must be the address of one service, got a {type(uri).__name__}; use one RowClient per service, "
                "and send all rows of a group to the same one"
            )
        self.uri, self.table = uri, table
        self.writer = new_name() if writer is None else short_text("writer", writer)
        self._timeout_s = None if timeout_s is None else positive("timeout_s", timeout_s)
        options: dict[str, Any] = {
            "token": token,
            "tls_root_certs": tls_root_certs,
            "reconnect_s": reconnect_s,
            "shared_memory": shared_memory,
        }
        self._pickled = {**options, "writer": writer, "timeout_s": timeout_s}
        self._connection = TableConnection(uri, table, writer=self.writer, **options)
        self._put_link, self._read_link = self._connection.new_link(), self._connection.new_link()
        self._put_lock, self._read_lock = threading.RLock(), threading.RLock()
        self._writers: dict[bytes, FragmentWriter] = {}
        """Put streams by column schema."""
        self._keys = range(0)
        """Reserved keys that are not used yet."""
        self._shared_memory = shared_memory
        self._session: _Session | None = None
        self._reader = new_name()
        self._number = 0
        """Sequence number of the latest take."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RowClient({self.uri!r}, {self.table!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.uri, self.table, self._pickled)

    def close(self) -> None:
        """Close the connection; pending requests of other threads raise ServiceError. Idempotent."""
        if self._connection.is_forked:
            return
        self._connection.close()
        session = self._session
        if session is not None:
            session.cancel()
        with self._put_lock:
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()
            self._put_link.close()
        with self._read_lock:
            self._drop_session()
            self._read_link.close()

    # Writing

    def put(
        self,
        keys: Any,
        columns: Mapping[str, Any],
        *,
        update: bool | None = None,
        timeout_s: float | None = None,
    ) -> Ints | list[str]:
        """Store columns of rows; each unknown key creates a row. A put is atomic.

        Parameters
        ----------
        keys
            Integers or strings, one per row, n keys; None to assign new integer keys.
        columns
            Arrays or lists by column name, or a `SampleBatch`, with n rows per column and without Python objects.
        update
            True if all keys must exist, False if no key may exist; None accepts existing and new keys.
        timeout_s
            Seconds to wait for free space in the table; None for the client's default.

        Returns
        -------
        Integer keys as an array, shape (n,), or string keys as a list.

        Raises
        ------
        ArgumentError
            If a key is repeated, a row already has one of the columns, or a key exists and `update` is False.
        RowIndexError
            If `update` is True and a key is unknown, or `update` is None and a key's row was taken, evicted or removed;
            pass `update=False` to create the row again.
        ColumnLengthError, ColumnTypeError, ColumnMismatchError
            If a column's length differs from the number of keys, a column contains Python objects, or its dtype or row
            shape differs from earlier rows.
        CapacityError
            If the rows exceed the table's capacity or the limits of a request.
        LimitTimeoutError
            If the table is still full at the deadline; nothing is stored.
        ServiceError
            If the service is unreachable for `reconnect_s` seconds. The service may nevertheless have stored the rows.
        """
        self._connection.check_open()
        batch = columns if isinstance(columns, SampleBatch) else SampleBatch(dict(columns))
        key_list = list_keys(keys)
        data = dict(batch._all())
        if KEY in data:
            raise ArgumentError(f"columns must not contain {KEY!r}, which is reserved for the keys")
        if not data:
            raise ArgumentError("columns must contain at least one column, got none")
        count = len(next(iter(data.values()))) if key_list is None else len(key_list)
        for name, column in data.items():
            data[name] = check_column(name, column, count)
        if not count:
            return keys_array([])
        with self._put_lock:
            if key_list is None:
                key_list = list(self._assign_keys(count))
            columns_of_keys = SampleBatch({KEY: key_list})._all()
            rows = as_record_batch(SampleBatch._of({**columns_of_keys, **data}, {}, Flags()).to_arrow())
            self._put(rows, Fragment(timeout_s=self._limit(timeout_s), update=update))
        return keys_array(key_list)

    def _put(self, rows: pa.RecordBatch, fragment: Fragment) -> None:
        """Send rows through their schema's stream and wait for the acknowledgement."""
        schema = rows.schema.remove_metadata().serialize().to_pybytes()
        writer = self._writers.get(schema)
        if writer is None:
            while len(self._writers) >= _MAX_WRITERS:
                self._writers.pop(next(iter(self._writers))).close()
            writer = FragmentWriter(self._put_link, self.table, self.writer, 1)
            self._writers[schema] = writer
        try:
            writer.put(rows, fragment)
            writer.flush()
        except BaseException as error:
            # A rejection leaves the stream usable. After an interrupt, an acknowledgement is still pending.
            if isinstance(error, ServiceError) or not isinstance(error, SampleBatchError):
                self._writers.pop(schema).close()
            raise

    def _assign_keys(self, count: int) -> range:
        if len(self._keys) < count:
            size = max(count, _KEYS)
            with self._read_lock:
                first = whole("first", self._ask({"ask": "reserve", "count": size})[0].get("first"))
            self._keys = range(first, first + size)
        keys, self._keys = self._keys[:count], self._keys[count:]
        return keys

    # Reading

    def wait(
        self, keys_or_count: Any, *, columns: Sequence[str] | None = None, timeout_s: float | None = None
    ) -> Ints | list[str]:
        """Wait until rows have all of the given columns.

        Parameters
        ----------
        keys_or_count
            Keys of rows, including rows that do not exist yet, or the number of complete rows to wait for.
        columns
            Columns that the rows must have; None requires all current columns of the table.
        timeout_s
            Seconds to wait; None for the client's default.

        Returns
        -------
        The given keys; if a number was given, the keys of the oldest complete rows.

        Raises
        ------
        LimitTimeoutError
            If rows are incomplete at the deadline; the message states how many rows lack each missing column.
        ServiceError
            If the service is unreachable.
        SampleBatchError
            If the service rejects an argument.
        """
        request: dict[str, Any] = {"ask": "wait", "columns": _names(columns), "timeout_s": self._limit(timeout_s)}
        if np.ndim(keys_or_count) == 0 and not isinstance(keys_or_count, str | bytes):
            request["count"] = whole("count", keys_or_count, 1)
            _, batch = self._ask(request)
            return keys_array(list_keys(_rows(batch)._all()[KEY]))
        keys = list_keys(keys_or_count)
        self._ask(request, keys)
        return keys_array(keys)

    def take(
        self,
        n: int,
        *,
        columns: Sequence[str] | None = None,
        consumer: str = "trainer",
        timeout_s: float | None = None,
        at_least: int | None = None,
        by_group: bool = False,
        max_tokens: int | None = None,
        max_lag: int | None = None,
    ) -> SampleBatch[Any]:
        """Take the oldest complete rows; no other `take` of the same consumer, in any process, returns these rows.

        Parameters
        ----------
        n
            Maximum number of rows.
        columns
            Columns to return, or None to return all current columns of the table; rows that lack one of the columns are
            not taken.
        consumer
            Name of one of the table's consumers.
        timeout_s
            Seconds to wait; None for the client's default.
        at_least
            Minimum number of rows; None for n.
        by_group
            Whether to select only entire groups.
        max_tokens
            Maximum total number of tokens; fewer than n rows are returned if the next row would exceed the limit.
        max_lag
            Maximum difference between the version of the newest weights and the version of a row.

        Returns
        -------
        SampleBatch
            Rows with the requested columns, and their keys in column `key`.

        Raises
        ------
        LimitTimeoutError
            If too few rows are complete at the deadline; the message states how many rows lack each missing column.
        CapacityError
            If n exceeds the limit of a request, or the oldest row or group alone exceeds n rows, `max_tokens` or the
            size limit of an answer.
        ServiceError
            If the service is unreachable.
        SampleBatchError
            If the service rejects an argument.
        """
        request = {
            **_request("take", n, columns, at_least, by_group, max_tokens, max_lag),
            "consumer": short_text("consumer", consumer),
            "timeout_s": self._limit(timeout_s),
            "reader": self._reader,
        }
        received: SampleBatch[Any] | None = None

        def attempt() -> SampleBatch[Any]:
            nonlocal received
            if received is not None:
                # The acknowledgement of a commit was lost.
                settle = {"ask": "settle", "reader": self._reader, "number": self._number}
                if self._open_session().ask(settle)[0].get("committed") is True:
                    return received
                received = None
            while True:
                self._number += 1
                session = self._open_session()
                received = _rows(session.ask({**request, "number": self._number})[1])
                if session.ask({"ask": "commit"})[0].get("committed") is True:
                    return received
                received = None

        with self._read_lock:
            return self._retry(attempt)

    def sample(
        self,
        n: int,
        *,
        columns: Sequence[str] | None = None,
        timeout_s: float | None = None,
        at_least: int | None = None,
        by_group: bool = False,
        max_tokens: int | None = None,
        max_lag: int | None = None,
        seed: int | None = None,
    ) -> SampleBatch[Any]:
        """Sample complete rows or groups uniformly without replacement; the rows remain in the table.

        Parameters
        ----------
        n, columns, timeout_s, at_least, by_group, max_tokens, max_lag
            As in `take`.
        seed
            Seed of a random generator for this sample only; None for the table's generator.

        Raises
        ------
        SampleBatchError
            As in `take`.
        """
        request = _request("sample", n, columns, at_least, by_group, max_tokens, max_lag)
        return _rows(self._ask({**request, "seed": seed, "timeout_s": self._limit(timeout_s)})[1])

    def get(self, keys: Any, *, columns: Sequence[str] | None = None) -> SampleBatch[Any]:
        """Return columns of rows in the order of `keys`, without waiting; the rows remain in the table.

        Raises
        ------
        RowIndexError
            If a key is unknown.
        ArgumentError
            If a row lacks a requested column.
        ServiceError
            If the service is unreachable.
        """
        return _rows(self._ask({"ask": "get", "columns": _names(columns)}, list_keys(keys))[1])

    def remove(self, keys: Any) -> int:
        """Remove rows by key; return the number of removed rows. Raises ServiceError if the service is unreachable."""
        return whole("removed", self._ask({"ask": "remove"}, list_keys(keys))[0].get("removed"))

    def _limit(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s and positive("timeout_s", timeout_s)

    def _ask(self, request: Mapping[str, Any], keys: list[Any] | None = None) -> tuple[dict[str, Any], Any]:
        """Send a repeatable request; return the answer and the answer's rows (None without rows)."""
        with self._read_lock:
            return self._retry(lambda: self._open_session().ask(request, keys))

    def _retry(self, attempt: Callable[[], T]) -> T:
        try:
            return self._read_link.retry(attempt, self._drop_session)
        except SampleBatchError:
            raise
        except BaseException:
            # After an interrupt, an answer is still pending.
            self._drop_session()
            raise

    def _open_session(self) -> _Session:
        self._connection.check_open()
        if self._session is not None and self._session.is_broken:
            self._drop_session()
        if self._session is None:
            nonce = read_nonce(self._read_link) if self._shared_memory else None
            self._session = _Session(self._read_link, self.table, nonce)
            self._connection.check_open()
        return self._session

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    # Weights and the table

    def publish(self, weights: Mapping[str, Any], name: str = "") -> int:
        """Publish weights to all clients of the service and return the new version; see `ReplayClient.publish`."""
        return self._connection.publish(weights, name)

    def latest(self, newer_than: int = 0, name: str = "") -> Publication | None:
        """Return the newest weights; None if their version is at most `newer_than`. See `ReplayClient.latest`."""
        return self._connection.latest(newer_than, name)

    def __len__(self) -> int:
        return int(self.info()["size"])

    def info(self) -> dict[str, Any]:
        """Return the state of the table; see `RowTable.info`."""
        return self._connection.table_info()

    def reset(self) -> None:
        """Remove all rows of the table."""
        self._connection.reset()

    def checkpoint(self) -> str:
        """Write a checkpoint of all tables to the service's disk and return the checkpoint's path."""
        return self._connection.checkpoint()


class _Session:
    """Bidirectional stream of a client with at most one request in flight."""

    def __init__(self, link: Link, table: str, nonce: str | None) -> None:
        self._link = link
        self._writer, self._reader = link.exchange(Draw(table, nonce=nonce))
        self._answers = AnswerReader(_Messages(link, self._reader).read, self._reader.cancel, self._writer.close)
        self._schema: pa.Schema | None = None
        self._is_cancelled = False

    def ask(self, request: Mapping[str, Any], keys: list[Any] | None = None) -> tuple[dict[str, Any], Any]:
        """Send a request; return the answer and the answer's rows (None without rows).

        Raises LostError if the connection is lost. Raises SampleBatchError if the service rejects the request.
        """
        metadata = write_json({name: value for name, value in request.items() if value is not None})
        self._answers.expect(1)
        with self._link.errors:
            if keys is None:
                self._writer.write_metadata(metadata)
            else:
                rows = as_record_batch(SampleBatch({KEY: keys}).to_arrow())
                if self._schema is None:
                    self._writer.begin(rows.schema)
                    self._schema = rows.schema
                elif not have_same_columns(rows.schema, self._schema):
                    raise LostError("keys of another type require another stream")
                self._writer.write_with_metadata(rows, metadata)
        head, streams = cut_inline(self._receive())
        answer = read_json(head, "an answer")
        if "error" in answer:
            raise read_error(answer)
        if "at" in answer:
            return answer, _read_rows(take(answer["at"]))
        if "streams" in answer:
            return answer, _read_rows(split_inline(streams, answer["streams"])[0])
        return answer, None

    def _receive(self) -> Any:
        try:
            return self._answers.next()
        except LostError:
            if self._is_cancelled:
                raise ServiceError("the client must be open, got a closed one") from None
            raise

    @property
    def is_broken(self) -> bool:
        return self._answers.is_broken

    def cancel(self) -> None:
        """Cancel the pending request of another thread."""
        self._is_cancelled = True
        self._reader.cancel()

    def close(self) -> None:
        self._answers.close()


class _Messages:
    """Message source of a session for its `AnswerReader`."""

    def __init__(self, link: Link, reader: Any) -> None:
        self._errors, self._reader = link.errors, reader

    def read(self) -> list[Any]:
        return [receive_message(self._errors, self._reader)]


def _read_rows(stream: Any) -> SampleBatch[Any]:
    """View the rows of an Arrow stream; the bytes of a misaligned stream are copied first."""
    if stream.ctypes.data % memory.ALIGNMENT:
        stream = memory.copy_of(stream)
        stream.flags.writeable = False
    return SampleBatch.from_arrow(pa.Table.from_batches([read_stream(stream)]))


def _rows(batch: Any) -> SampleBatch[Any]:
    if not isinstance(batch, SampleBatch) or KEY not in batch:
        raise FormatError(f"an answer must have rows with a column {KEY!r}, got none")
    return batch


def _names(columns: Any) -> list[str] | None:
    names = check_columns(None if columns is None or isinstance(columns, str) else list(columns))
    if isinstance(columns, str):
        raise ArgumentError(f"columns must be a list of names, got {columns!r}")
    return None if names is None else list(names)


def _request(
    ask: str, n: Any, columns: Any, at_least: Any, by_group: Any, max_tokens: Any, max_lag: Any
) -> dict[str, Any]:
    options = {"at_least": at_least, "by_group": by_group, "max_tokens": max_tokens, "max_lag": max_lag}
    selection = Selection.of(n, {"columns": _names(columns), **options})
    return {
        "ask": ask,
        "n": selection.n,
        "columns": None if selection.columns is None else list(selection.columns),
        "at_least": selection.at_least,
        "by_group": selection.by_group,
        "max_tokens": selection.max_tokens,
        "max_lag": selection.max_lag,
    }


def _restore(uri: str, table: str, options: dict[str, Any]) -> RowClient:
    return RowClient(uri, table, **options)

"""FragmentWriter: a client's stream of fragments, of which some are under way before the first is acknowledged."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from samplebatch.errors import SampleBatchError, ServiceError
from samplebatch.service.protocol import Fragment, LostError, read_json, write_json
from samplebatch.service.samples import batch_text, have_same_columns

if TYPE_CHECKING:
    from samplebatch.service.link import Link

T = TypeVar("T")


@dataclass
class WriteCounts:
    """The fragments and rows of a writer, for `ReplayClient.written`.

    Attributes
    ----------
    sent
        Fragments that were given to be sent; those that are neither acknowledged nor refused are under way.
    fragments, rows
        Those that the service has acknowledged: each is in the table, once.
    refused
        Fragments that the service has refused, each with an error.
    held_s
        Seconds that the limits of the table held fragments back.
    """

    sent: int = 0
    fragments: int = 0
    rows: int = 0
    refused: int = 0
    held_s: float = 0.0


class FragmentWriter:
    """A client's stream of fragments, of which some are under way before the first is acknowledged.

    A fragment is kept until its acknowledgement. When the connection is lost, those that the service had not taken are
    sent again: fragments are numbered, so that none is taken twice.

    Parameters
    ----------
    link
        The connection.
    table
        The table's name.
    name
        The writer's name: the steps of each of its environments go to a ring of their own.
    max_unacknowledged
        Fragments that may be under way at once.
    """

    def __init__(self, link: Link, table: str, name: str, max_unacknowledged: int) -> None:
        self._link = link
        self._table = table
        self.name = name
        self._max = max_unacknowledged
        self._own = new_name()
        """The name of this stream of the writer, which other processes may write for, too."""
        self._number = 0
        self._pending: deque[tuple[pa.RecordBatch, Fragment]] = deque()
        """Fragments that have not been acknowledged, oldest first."""
        self._written = 0
        """How many of them have been written to the stream that is open."""
        self._stream: tuple[Any, Any] | None = None
        self._schema: pa.Schema | None = None
        self.counts = WriteCounts()

    def put(self, rows: pa.RecordBatch, fragment: Fragment) -> None:
        """Send a fragment; wait for earlier ones to be acknowledged, if too many are under way.

        Raises
        ------
        ServiceError
            If the service cannot be reached; where too many are under way, this one is not sent then.
        SampleBatchError
            If it refuses a fragment, this one or an earlier one. That one is dropped; the others are not.
        """
        try:
            while len(self._pending) >= self._max:
                self._advance()
        except SampleBatchError:
            if len(self._pending) < self._max:
                # An earlier one was refused: there is room for this one, which goes with the next that is sent.
                self._keep(rows, fragment)
            raise
        self._keep(rows, fragment)
        self._link.retry(self._write)

    def _keep(self, rows: pa.RecordBatch, fragment: Fragment) -> None:
        """Number a fragment, and keep it until it is acknowledged."""
        self._number += 1
        self.counts.sent += 1
        self._pending.append((rows, replace(fragment, number=self._number)))

    def flush(self) -> None:
        """Wait until all fragments are acknowledged; raises as `put` does."""
        while self._pending:
            self._advance()

    def _advance(self) -> None:
        """Wait for the next acknowledgement."""
        self._link.retry(self._receive)

    def _write(self) -> None:
        """Write the fragments that are not under way, on a new stream if need be."""
        if self._stream is None:
            self._open()
        while self._written < len(self._pending):
            rows, fragment = self._pending[self._written]
            if self._schema is None or not have_same_columns(rows.schema, self._schema):
                # The order of the streams is that of the fragments.
                while self._written:
                    self._receive()
                self._close_stream()
                self._open()
                continue
            told = replace(fragment, batch=batch_text(rows.schema, self._schema)).write()
            self._use_stream(partial(_write, rows, told))
            self._written += 1

    def _use_stream(self, use: Callable[[tuple[Any, Any]], T]) -> T:
        """Use the stream; if that fails, it is over, and a fragment that was refused is dropped."""
        if self._stream is None:
            raise ServiceError("the stream of fragments must be open, it is not")
        try:
            with self._link.errors():
                return use(self._stream)
        except LostError:
            # Nothing is refused, though the service may tell which fragment it was at when it was stopped.
            self._close_stream()
            raise
        except SampleBatchError as error:
            self._close_stream()
            refused = vars(error).get("fragment")
            if refused is not None:
                # The service takes fragments in their order, and none after one that it refuses.
                self._drop_until(refused - 1)
                self._pending.popleft()
                self.counts.refused += 1
            raise

    def _open(self) -> None:
        """Open a stream, and drop the fragments that the service has taken already."""
        self._drop_taken()
        if not self._pending:
            return
        self._schema = self._pending[0][0].schema
        self._stream = self._link.put((self._table, self.name, self._own), self._schema)

    def _drop_taken(self) -> None:
        if not self._number:
            return
        request = {"table": self._table, "writer": self.name, "stream": self._own}
        (raw,) = self._link.act("acknowledged", write_json(request))
        self._drop_until(read_json(raw, "an acknowledgement").get("number", 0))

    def _drop_until(self, number: int) -> None:
        """Count the fragments up to a number as acknowledged."""
        while self._pending and self._pending[0][1].number <= number:
            self._count(self._pending.popleft()[0].num_rows, 0.0)

    def _receive(self) -> None:
        """Read an acknowledgement of the oldest fragment."""
        if not self._written:
            self._write()
        if not self._pending:
            return
        told = read_json(self._use_stream(_read), "an acknowledgement")
        rows, _ = self._pending.popleft()
        self._written -= 1
        self._count(rows.num_rows, float(told.get("held_s", 0.0)))

    def _count(self, rows: int, held_s: float) -> None:
        self.counts.fragments += 1
        self.counts.rows += rows
        self.counts.held_s += held_s

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        self._written, self._schema = 0, None
        if stream is not None:
            close_quietly(stream[0])

    def close(self) -> None:
        """End the stream; fragments that are not acknowledged are forgotten, and nobody waits for them."""
        if self._pending and self._stream is not None:
            # The service ends its side when it is done with what it has got, which limits may hold back for ever.
            threading.Thread(target=close_quietly, args=self._stream[:1], name="samplebatch-end", daemon=True).start()
            self._stream = None
        self._pending.clear()
        self._close_stream()


def _write(rows: pa.RecordBatch, told: bytes, stream: tuple[Any, Any]) -> None:
    stream[0].write_with_metadata(rows, told)


def _read(stream: tuple[Any, Any]) -> Any:
    """Read the bytes of an acknowledgement.

    Raises
    ------
    LostError, pyarrow.ArrowException
        If the stream has ended.
    """
    writer, reader = stream
    raw = reader.read()
    if raw is None:
        # It may have ended with an error, which only closing our side tells.
        writer.close()
        raise LostError("the service has ended the stream")
    return raw


def new_name() -> str:
    """Make a name that no other writer or stream has."""
    return secrets.token_hex(8)


def close_quietly(writer: Any) -> None:
    """End our side of a stream; the other side may have ended it before, with an error that was told then."""
    try:
        writer.close()
    except (OSError, pa.ArrowException):
        return

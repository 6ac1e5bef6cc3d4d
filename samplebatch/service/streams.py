"""FragmentWriter and SampleSession: streams between a client and a service."""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
import pyarrow as pa

from samplebatch import names
from samplebatch.buffer.samplers import Sample
from samplebatch.errors import SampleBatchError, ServiceError
from samplebatch.service.protocol import MAX_ASKED, Draw, Fragment, LostError, read_error, read_json, write_json
from samplebatch.service.samples import SampleReader, batch_text, cut_inline, have_same_columns, split_inline, take

if TYPE_CHECKING:
    from samplebatch.service.link import Link


T = TypeVar("T")


@dataclass
class WriteCounts:
    """Counts of a writer's fragments and rows, for `ReplayClient.written`.

    Attributes
    ----------
    sent
        Fragments sent; fragments neither acknowledged nor rejected are in flight.
    fragments, rows
        Acknowledged fragments and their rows, each inserted exactly once.
    refused
        Fragments that the service has rejected, each with an error.
    held_s
        Seconds for which limits of the table blocked fragments.
    """

    sent: int = 0
    fragments: int = 0
    rows: int = 0
    refused: int = 0
    held_s: float = 0.0


class FragmentWriter:
    """Stream of a writer's fragments, several of them in flight.

    Fragments are retained until they are acknowledged. After a lost connection, fragments that the service has not
    inserted are sent again; their numbers prevent a second insertion.

    - `link`: connection to the service.
    - `table`: name of the table.
    - `name`: name of the writer; each of its environments has a ring in the table.
    - `max_unacknowledged`: maximum number of fragments in flight.
    - `wait`: wrapper of the blocking read of an acknowledgement, such as `interruptible`; None to call it directly.
    """

    def __init__(
        self,
        link: Link,
        table: str,
        name: str,
        max_unacknowledged: int,
        wait: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        self._link = link
        self._wait = wait
        self._table = table
        self.name = name
        self._max = max_unacknowledged
        self._stream_name = new_name()
        """Name of this stream; other processes may write streams under the same writer's name."""
        self._number = 0
        self.pending: deque[tuple[pa.RecordBatch, Fragment]] = deque()
        """Fragments that have not been acknowledged, oldest first."""
        self._written = 0
        """Number of pending fragments that were written to the open stream."""
        self._stream: tuple[Any, Any] | None = None
        self._schema: pa.Schema | None = None
        self.counts = WriteCounts()

    def put(self, rows: pa.RecordBatch, fragment: Fragment) -> None:
        """Send a fragment; wait for acknowledgements first if too many fragments are in flight.

        Raises ServiceError if the service cannot be reached; the fragment is not sent if too many fragments are in
        flight. Raises SampleBatchError if the service rejects this fragment or an earlier one; only the rejected
        fragment is discarded.
        """
        try:
            while len(self.pending) >= self._max:
                self._advance()
        except SampleBatchError:
            if len(self.pending) < self._max:
                # An earlier fragment was rejected, which frees a place; this fragment is sent with the next one.
                self._keep(rows, fragment)
            raise
        self._keep(rows, fragment)
        self._link.retry(self._write)

    def _keep(self, rows: pa.RecordBatch, fragment: Fragment) -> None:
        """Number a fragment and retain it until it is acknowledged."""
        self._number += 1
        self.counts.sent += 1
        self.pending.append((rows, replace(fragment, number=self._number)))

    def flush(self) -> None:
        """Wait until all fragments are acknowledged; raises the same errors as `put`."""
        while self.pending:
            self._advance()

    def _advance(self) -> None:
        self._link.retry(self._receive)

    def _write(self) -> None:
        """Write the fragments that are not in flight, on a new stream if necessary."""
        if self._stream is None:
            self._open()
        while self._written < len(self.pending):
            rows, fragment = self.pending[self._written]
            if self._schema is None or not have_same_columns(rows.schema, self._schema):
                # The order of the streams is the order of the fragments.
                while self._written:
                    self._receive()
                self._close_stream()
                self._open()
                continue
            metadata = replace(fragment, batch=batch_text(rows.schema, self._schema)).write()
            self._use_stream(partial(_write, rows, metadata))
            self._written += 1

    def _use_stream(self, use: Callable[[tuple[Any, Any]], T]) -> T:
        """Call a function with the stream; if it fails, close the stream and discard a rejected fragment."""
        if self._stream is None:
            raise ServiceError("the stream of fragments must be open, got a closed one")
        try:
            with self._link.errors:
                return use(self._stream)
        except LostError:
            # Nothing was rejected, though a stopped service may name the fragment in progress.
            self._close_stream()
            raise
        except SampleBatchError as error:
            self._close_stream()
            refused = vars(error).get("fragment")
            if refused is not None:
                # The service inserts fragments in order, and none after a rejected one.
                self._drop_until(refused - 1)
                self.pending.popleft()
                self.counts.refused += 1
            raise

    def _open(self) -> None:
        """Open a stream and discard the fragments that the service has already inserted."""
        self._drop_acknowledged()
        if not self.pending:
            return
        self._schema = self.pending[0][0].schema
        self._stream = self._link.put((self._table, self.name, self._stream_name), self._schema)

    def _drop_acknowledged(self) -> None:
        if not self._number:
            return
        request = {"table": self._table, "writer": self.name, "stream": self._stream_name}
        (raw,) = self._link.act("acknowledged", write_json(request))
        self._drop_until(read_json(raw, "an acknowledgement").get("number", 0))

    def _drop_until(self, number: int) -> None:
        """Count the fragments up to a number as acknowledged."""
        while self.pending and self.pending[0][1].number <= number:
            self._count(self.pending.popleft()[0].num_rows, 0.0)

    def _receive(self) -> None:
        if not self._written:
            self._write()
        if not self.pending:
            return
        answer = read_json(self._use_stream(self._read), "an acknowledgement")
        rows, _ = self.pending.popleft()
        self._written -= 1
        self._count(rows.num_rows, float(answer.get("held_s", 0.0)))

    def _read(self, stream: tuple[Any, Any]) -> Any:
        writer, reader = stream
        raw = reader.read() if self._wait is None else self._wait(reader.read)
        if raw is None:
            # The stream may have ended with an error, which only closing our side reports.
            writer.close()
            raise LostError("the service has ended the stream")
        return raw

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
        """End the stream without waiting; fragments that are not acknowledged are discarded."""
        if self.pending and self._stream is not None:
            # The service ends its side after inserting what it has received, which limits may block indefinitely.
            threading.Thread(target=close_quietly, args=self._stream[:1], name="samplebatch-end", daemon=True).start()
            self._stream = None
        self.pending.clear()
        self._close_stream()


def _write(rows: pa.RecordBatch, metadata: bytes, stream: tuple[Any, Any]) -> None:
    stream[0].write_with_metadata(rows, metadata)


def interruptible(read: Callable[[], T]) -> T:
    """Call a function that blocks in Flight; signal handlers of the main thread, such as Ctrl-C, run meanwhile.

    After an interrupt, a thread still waits for the function, so the caller must end the stream.
    """
    if threading.current_thread() is not threading.main_thread():
        return read()
    results: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((read(), None))
        except BaseException as error:  # carried over to the caller
            results.put((None, error))

    threading.Thread(target=run, name="samplebatch-read", daemon=True).start()
    result, error = results.get()
    if error is not None:
        raise error
    return cast("T", result)


def new_name() -> str:
    """Create a unique name of a writer or stream."""
    return secrets.token_hex(8)


def close_quietly(writer: Any) -> None:
    """Close this side of a stream; ignore the error that ended the other side, which was already reported."""
    try:
        writer.close()
    except (OSError, pa.ArrowException):
        return


_UPDATES: Final = pa.schema(
    [
        pa.field(names.BATCH_INDEXES, pa.int64(), nullable=False),
        pa.field(names.PRIORITY, pa.float64(), nullable=False),
        pa.field(names.GENERATION, pa.int64(), nullable=False),
    ]
)
_LARGE_NBYTES: Final = 1 << 16
"""Size in bytes from which a message is large, and the cost of a separate request is negligible."""
_MAX_UPDATES: Final = 64
"""Maximum number of updates with unread answers: gRPC blocks a service whose answers are not read."""


class SampleSession:
    """Session of a learner for samples of one kind, with a prefetch queue, and for priority updates.

    The service answers in order. If samples are prefetched, a thread receives them while the learner computes.

    - `link`: connection to the service.
    - `draw`: request for the samples.
    - `ahead`: number of prefetched samples.
    - `nonce`: secret that proves to the service that this client can map its memory; None to receive samples in
      messages.
    """

    def __init__(self, link: Link, draw: Draw, ahead: int, nonce: str | None) -> None:
        self._link = link
        self._writer, self._reader = link.exchange(replace(draw, nonce=nonce, ahead=ahead > 0))
        self._samples = SampleReader()
        self._ahead = ahead
        self._requested = 0
        """Number of samples requested and not returned yet."""
        self._updates = 0
        """Number of updates sent and not answered."""
        self._are_large = False
        """Whether each sample has its own message."""
        self._has_started = False
        self._is_cancelled = False
        self._received: deque[Sample[Any, Any] | SampleBatchError] = deque()
        """Prefetched samples, or their errors."""
        self._answers: queue.Queue[Any] | None = None
        if ahead:
            self._answers = queue.Queue(ahead + 1)
            self._reading = threading.Thread(target=self._read_ahead, name="samplebatch-read", daemon=True)
            self._closed = threading.Event()
            self._reading.start()

    def next(self) -> Sample[Any, Any]:
        """Return the next sample, and request further samples ahead.

        Raises LostError if the connection is lost. Raises SampleBatchError if the service rejects the request; the
        session stays open.
        """
        self._request(1)
        while not self._received:
            self._receive_answer()
        sample = self._received.popleft()
        self._requested -= 1
        if isinstance(sample, SampleBatchError):
            raise sample
        # Small samples share a request and a message; each large one has its own.
        if self._ahead and self._requested <= (self._ahead - 1 if self._are_large else self._ahead // 2):
            # The sample was received; the next call reports a connection that was lost since.
            with suppress(SampleBatchError):
                self._request(self._ahead)
        return sample

    def _request(self, count: int) -> None:
        """Request samples until that many are in flight or received."""
        missing = count - self._requested
        with self._link.errors:
            while missing > 0:
                part = min(missing, MAX_ASKED)
                self._writer.write_metadata(b"{}" if part == 1 else write_json({"count": part}))
                self._requested += part
                missing -= part

    def update(self, indices: Any, priorities: Any, generations: Any) -> None:
        """Send new priorities of rows, shape (n,) each; generations may be None. `settle` reports errors.

        Raises LostError if the connection is lost.
        """
        row_generations = np.zeros(len(indices), np.int64) if generations is None else generations
        rows = pa.RecordBatch.from_arrays(
            [pa.array(values) for values in (indices, priorities, row_generations)], schema=_UPDATES
        )
        with self._link.errors:
            if not self._has_started:
                self._writer.begin(_UPDATES)
                self._has_started = True
            self._writer.write_with_metadata(rows, write_json({"any_generation": generations is None}))
        self._updates += 1
        while self._updates > _MAX_UPDATES and not self._requested:
            self._receive_answer()

    @property
    def is_waiting(self) -> bool:
        """Whether samples were requested that have not been returned."""
        return self._requested > 0

    @property
    def has_updates(self) -> bool:
        """Whether there are updates to wait for."""
        return self._updates > 0 and not self._is_cancelled

    def settle(self) -> None:
        """Wait until the service has applied all updates or the call is cancelled; raises the errors of `next`."""
        while self.has_updates:
            self._receive_answer()

    def _receive_answer(self) -> None:
        if self._answers is None:
            answer = self._read()
        else:
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                raise answer
        if isinstance(answer, list):
            self._received.extend(answer)
            return
        if "updated" in answer:
            self._updates -= 1
        elif answer.get("of") == "update":
            self._updates -= 1
            raise read_error(answer)
        else:
            self._received.append(read_error(answer))

    def _read(self) -> list[Sample[Any, Any]] | dict[str, Any]:
        """Read an answer: samples, or the metadata of an update or error."""
        head, streams = cut_inline(self._receive())
        metadata = read_json(head, "an answer")
        if "at" in metadata:
            self._are_large = True
            return [self._samples.read(take(metadata["at"]), metadata)]
        if "streams" not in metadata:
            return metadata
        self._are_large = streams.nbytes >= _LARGE_NBYTES
        return [self._samples.read(stream, metadata) for stream in split_inline(streams, metadata["streams"])]

    def _receive(self) -> Any:
        try:
            with self._link.errors:
                chunk = self._reader.read_chunk()
        except (StopIteration, LostError) as error:
            if self._is_cancelled:
                raise ServiceError("the client must be open, got a closed one") from None
            if isinstance(error, LostError):
                raise
            raise LostError("the service has ended the session") from None
        return b"" if chunk.app_metadata is None else chunk.app_metadata

    def _read_ahead(self) -> None:
        """Read answers until the session is closed or the connection is lost."""
        answers = self._answers
        assert answers is not None
        while not self._closed.is_set():
            answer: Any
            try:
                answer = self._read()
            except Exception as error:
                answer = error
            while not self._closed.is_set():
                try:
                    answers.put(answer, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if isinstance(answer, BaseException):
                return

    def cancel(self) -> None:
        """Interrupt a thread that waits for an answer; thread-safe."""
        self._is_cancelled = True
        self._reader.cancel()

    def close(self) -> None:
        """End the session."""
        if self._answers is not None:
            self._closed.set()
        self._reader.cancel()
        close_quietly(self._writer)

"""FragmentWriter and SampleSession: a client's streams to and from a replay service."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from samplebatch import names
from samplebatch.buffer.samplers import Sample
from samplebatch.errors import FormatError, SampleBatchError, ServiceError
from samplebatch.service.answers import AnswerReader, InterruptibleCalls
from samplebatch.service.protocol import MAX_ASKED, Draw, Fragment, LostError, read_error, read_json, write_json
from samplebatch.service.samples import SampleReader, batch_text, cut_inline, have_same_columns, split_inline, take

if TYPE_CHECKING:
    from samplebatch.service.link import Link


@dataclass
class WriteCounts:
    """Fragment and row counts of a writer, the value of `ReplayClient.written`.

    Attributes
    ----------
    sent
        Number of sent fragments, including fragments in flight (neither acknowledged nor rejected yet).
    fragments, rows
        Number of acknowledged fragments and number of their rows, each inserted exactly once.
    refused
        Number of fragments that the service rejected; each rejection raised an error.
    held_s
        Total time for which the table's limits blocked fragments, in seconds.
    """

    sent: int = 0
    fragments: int = 0
    rows: int = 0
    refused: int = 0
    held_s: float = 0.0


class _Pending(NamedTuple):
    rows: pa.RecordBatch
    fragment: Fragment
    nbytes: int


_WINDOW_NBYTES: Final = 60_000
"""Bytes that a connection buffers while the service does not read: slightly less than an HTTP/2 flow-control window."""


class FragmentWriter:
    """Sender of a writer's fragments, with a bounded number of fragments in flight.

    Each fragment is retained until it is acknowledged or rejected. If the connection is lost, or an interrupt leaves
    the stream in an unknown state, a new stream sends the fragments that the service has not inserted. Sequence numbers
    prevent duplicate insertions.

    - `link`: connection to the service.
    - `table`: name of the table.
    - `name`: name of the writer; tables of steps assign rings to the writer's environments.
    - `max_unacknowledged`: maximum number of fragments in flight.
    """

    def __init__(self, link: Link, table: str, name: str, max_unacknowledged: int) -> None:
        self._link = link
        self._table = table
        self.name = name
        self._max_unacknowledged = max_unacknowledged
        self._stream_name = new_name()
        """Name under which the service counts these fragments; other processes may use the same writer name."""
        self._last_number = 0
        """Sequence number of the newest fragment."""
        self.pending: deque[_Pending] = deque()
        """Fragments that have not been acknowledged, oldest first."""
        self._written = self._written_nbytes = 0
        """Number and total bytes of the pending fragments that were written to the open stream."""
        self._stream: Any = None
        """Writer of the open stream."""
        self._answers: AnswerReader[Any] | None = None
        """Acknowledgements of the open stream."""
        self._calls = InterruptibleCalls()
        self._schema: pa.Schema | None = None
        self.counts = WriteCounts()

    def put(self, rows: pa.RecordBatch, fragment: Fragment) -> None:
        """Send a fragment; block first while `max_unacknowledged` fragments are pending.

        Raises ServiceError if the service cannot be reached; the fragment is then retained only if fewer than
        `max_unacknowledged` fragments are pending. Raises SampleBatchError if the service rejects this fragment or an
        earlier fragment; only the rejected fragment is discarded.
        """
        try:
            while len(self.pending) >= self._max_unacknowledged:
                self._advance()
        except SampleBatchError:
            if len(self.pending) < self._max_unacknowledged:
                # The rejection of an earlier fragment has made room for this fragment; the next call sends it.
                self._append(rows, fragment)
            raise
        self._append(rows, fragment)
        self._link.retry(self._write)

    def _append(self, rows: pa.RecordBatch, fragment: Fragment) -> None:
        self._last_number += 1
        self.counts.sent += 1
        self.pending.append(_Pending(rows, replace(fragment, number=self._last_number), rows.get_total_buffer_size()))

    def flush(self) -> None:
        """Wait until all pending fragments are acknowledged. Raises the same errors as `put`."""
        while self.pending:
            self._advance()

    def _advance(self) -> None:
        self._link.retry(self._receive)

    def _write(self) -> None:
        """Write the pending fragments that are not in flight; open a new stream if necessary."""
        if self._stream is None:
            self._open()
        while self._written < len(self.pending):
            rows, fragment, nbytes = self.pending[self._written]
            if self._schema is None or not have_same_columns(rows.schema, self._schema):
                # Wait for all acknowledgements before opening a stream, so that fragments are inserted in order.
                while self._written:
                    self._receive()
                self._close_stream()
                self._open()
                continue
            text = batch_text(rows.schema, self._schema)
            metadata = (fragment if text is None else replace(fragment, batch=text)).write()
            try:
                self._send(rows, metadata, nbytes)
                self._written_nbytes += nbytes
                self._written += 1
            except SampleBatchError as error:
                self._fail(error)
            except BaseException:
                self._abandon_stream()
                raise

    def _send(self, rows: pa.RecordBatch, metadata: bytes, nbytes: int) -> None:
        if self._stream is None or self._answers is None:
            raise ServiceError("the stream of fragments must be open, got a closed one")
        self._answers.expect(1)
        write = partial(self._stream.write_with_metadata, rows, metadata)
        with self._link.errors:
            if self._written_nbytes + nbytes > _WINDOW_NBYTES:
                # The write blocks if the table's limits block the service, which then does not read.
                self._calls.call(write)
            else:
                write()

    def _fail(self, error: SampleBatchError) -> NoReturn:
        """Close the stream after an error, discard the fragment that the service rejected, and raise the error."""
        if self._answers is not None and self._answers.is_broken:
            # If the service ended the stream with an error, only closing the writer reports this error.
            try:
                with self._link.errors:
                    self._stream.close()
            except SampleBatchError as cause:
                error = cause
        self._close_stream()
        # A lost connection rejects no fragment, although the error of a stopped service may name one.
        rejected_number = None if isinstance(error, LostError) else vars(error).get("fragment")
        if rejected_number is not None:
            # The service inserts fragments in order, and inserts no fragment of a stream after a rejected fragment.
            self._drop_until(rejected_number - 1)
            self.pending.popleft()
            self.counts.refused += 1
        raise error

    def _open(self) -> None:
        """Discard the fragments that the service has inserted, then open a stream if any fragments are pending."""
        self._drop_acknowledged()
        if not self.pending:
            return
        schema = self.pending[0].rows.schema
        writer, reader = self._link.put((self._table, self.name, self._stream_name), schema)
        acknowledgements = _Acknowledgements(self._link, reader)
        self._answers = AnswerReader(acknowledgements.read, writer.done_writing, writer.close)
        self._stream, self._schema = writer, schema

    def _drop_acknowledged(self) -> None:
        if not self._last_number:
            return
        request = {"table": self._table, "writer": self.name, "stream": self._stream_name}
        (raw,) = self._link.act("acknowledged", write_json(request))
        self._drop_until(read_json(raw, "an acknowledgement").get("number", 0))

    def _drop_until(self, number: int) -> None:
        """Remove pending fragments up to a sequence number, and count them as acknowledged."""
        while self.pending and self.pending[0].fragment.number <= number:
            self._count(self.pending.popleft().rows.num_rows, 0.0)

    def _receive(self) -> None:
        if not self._written:
            self._write()
        if not self.pending:
            return
        if self._answers is None:
            raise ServiceError("the stream of fragments must be open, got a closed one")
        # An interrupt while waiting changes nothing.
        self._answers.wait()
        try:
            held_s = float(read_json(self._answers.next(), "an acknowledgement").get("held_s", 0.0))
            rows, _, nbytes = self.pending.popleft()
            self._written -= 1
            self._written_nbytes -= nbytes
            self._count(rows.num_rows, held_s)
        except SampleBatchError as error:
            self._fail(error)
        except BaseException:
            self._abandon_stream()
            raise

    def _count(self, rows: int, held_s: float) -> None:
        self.counts.fragments += 1
        self.counts.rows += rows
        self.counts.held_s += held_s

    def _close_stream(self) -> None:
        """Close the stream without waiting; the service still inserts the fragments that it has received."""
        answers, self._answers = self._answers, None
        self._stream, self._schema = None, None
        self._written = self._written_nbytes = 0
        if answers is not None:
            answers.close()

    def _abandon_stream(self) -> None:
        """Close the stream as soon as an interrupted write completes, without waiting for this write."""
        if self._answers is not None:
            self._calls.finish(self._answers.close)
            self._answers = None
        self._close_stream()

    def close(self) -> None:
        """Close the stream without waiting, and discard the unacknowledged fragments."""
        self.pending.clear()
        self._abandon_stream()


class _Acknowledgements:
    def __init__(self, link: Link, reader: Any) -> None:
        self._errors, self._reader = link.errors, reader

    def read(self) -> list[Any]:
        with self._errors:
            raw = self._reader.read()
        if raw is None:
            raise LostError("the service has ended the stream")
        return [raw]


def new_name() -> str:
    """Create a unique name for a writer or stream."""
    return secrets.token_hex(8)


_UPDATES: Final = pa.schema(
    [
        pa.field(names.BATCH_INDEXES, pa.int64(), nullable=False),
        pa.field(names.PRIORITY, pa.float64(), nullable=False),
        pa.field(names.GENERATION, pa.int64(), nullable=False),
    ]
)
_LARGE_NBYTES: Final = 1 << 16
"""Minimum bytes of a large message, for which the cost of a separate request is negligible."""
_MAX_UPDATES: Final = 64
"""Maximum number of updates with unread answers, because gRPC blocks a service whose answers are not read."""


class SampleSession:
    """Session of a learner with a service, for repetitions of one sample request, prefetching and priority updates.

    The service answers requests in order. A thread receives the answers, so samples are prefetched while the learner
    computes. If an interrupt ends a wait for a sample, the next call returns this sample.

    - `link`: connection to the service.
    - `draw`: sample request that the session repeats.
    - `ahead`: number of samples to prefetch; 0 disables prefetching.
    - `nonce`: secret that proves to the service that this client can map the service's memory; None to receive all
      samples in messages.
    """

    def __init__(self, link: Link, draw: Draw, ahead: int, nonce: str | None) -> None:
        self._link = link
        self._writer, self._reader = link.exchange(replace(draw, nonce=nonce, ahead=ahead > 0))
        self._messages = _Messages(link, self._reader)
        self._answers = AnswerReader(self._messages.read, self._reader.cancel, self._writer.close)
        self._counting = _Counting(self._answers)
        self._ahead = ahead
        self._requested = 0
        """Number of samples requested and not returned yet."""
        self._updates = 0
        """Number of updates whose answers have not been read."""
        self._received: deque[Sample[Any, Any] | SampleBatchError] = deque()
        """Samples that have been received and not returned, or the errors of their requests."""
        self._has_started = False
        self._is_cancelled = False

    @property
    def is_broken(self) -> bool:
        """Whether the session must be replaced: an error ended it, or an interrupt left it in an unknown state."""
        return self._answers.is_broken

    def next(self) -> Sample[Any, Any]:
        """Return the next sample, and request samples to prefetch.

        Raises LostError if the connection is lost. Raises SampleBatchError if the service rejects a request (the
        session remains usable) or a sample is invalid (the session is broken).
        """
        self._request(1)
        while not self._received:
            self._receive_answer()
        sample = self._return_received()
        if isinstance(sample, SampleBatchError):
            raise sample
        # Small samples share requests and messages; each large sample has a separate request and message.
        if self._ahead and self._requested <= (self._ahead - 1 if self._messages.are_large else self._ahead // 2):
            # Return the received sample; the next call raises the error of a lost connection.
            with suppress(SampleBatchError):
                self._request(self._ahead)
        return sample

    def _return_received(self) -> Sample[Any, Any] | SampleBatchError:
        with self._counting:
            sample = self._received.popleft()
            self._requested -= 1
        return sample

    def _request(self, count: int) -> None:
        """Request samples until `count` samples are in flight or received."""
        missing = count - self._requested
        with self._counting:
            while missing > 0:
                part = min(missing, MAX_ASKED)
                self._answers.expect(part)
                with self._link.errors:
                    self._writer.write_metadata(b"{}" if part == 1 else write_json({"count": part}))
                self._requested += part
                missing -= part

    def update(self, indices: Any, priorities: Any, generations: Any) -> None:
        """Send new priorities of rows; a later call or `settle` raises the service's errors.

        The arguments have shape (n,). If `generations` is None, rows are updated even if they were overwritten.

        Raises LostError if the connection is lost.
        """
        row_generations = np.zeros(len(indices), np.int64) if generations is None else generations
        rows = pa.RecordBatch.from_arrays(
            [pa.array(values) for values in (indices, priorities, row_generations)], schema=_UPDATES
        )
        with self._counting:
            self._answers.expect(1)
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
        """Whether any requested sample has not been returned yet."""
        return self._requested > 0

    @property
    def has_updates(self) -> bool:
        """Whether `settle` would wait: some updates are unanswered, and the session is neither cancelled nor broken."""
        return self._updates > 0 and not self._is_cancelled and not self.is_broken

    def settle(self) -> None:
        """Wait until the service has answered all updates, or the session is cancelled. Raises as `next` does."""
        while self.has_updates:
            self._receive_answer()

    def _receive_answer(self) -> None:
        # An interrupt while waiting changes nothing.
        self._answers.wait()
        with self._counting:
            try:
                answer = self._answers.next()
            except LostError:
                if self._is_cancelled:
                    raise ServiceError("the client must be open, got a closed one") from None
                raise
            if not isinstance(answer, dict):
                self._check_requested("a sample", self._requested - len(self._received))
                self._received.append(answer)
            elif "updated" in answer or answer.get("of") == "update":
                self._check_requested("the answer to an update", self._updates)
                self._updates -= 1
                if "updated" not in answer:
                    raise read_error(answer)
            else:
                self._check_requested("an error", self._requested - len(self._received))
                self._received.append(read_error(answer))

    def _check_requested(self, answer: str, requested: int) -> None:
        if not requested:
            self._answers.is_broken = True
            raise FormatError(f"an answer of a service must have a request, got {answer} that was not requested")

    def cancel(self) -> None:
        """Interrupt a call that waits for an answer; thread-safe."""
        self._is_cancelled = True
        self._reader.cancel()

    def close(self) -> None:
        """End the session."""
        self._answers.close()


class _Counting:
    """Context manager for changes of a session's counts; an interrupt marks the stream as broken."""

    __slots__ = ("_answers",)

    def __init__(self, answers: AnswerReader[Any]) -> None:
        self._answers = answers

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, SampleBatchError):
            self._answers.is_broken = True


class _Messages:
    """Source of a session's answers for an AnswerReader: samples, and metadata of updates and errors."""

    def __init__(self, link: Link, reader: Any) -> None:
        self._errors, self._reader = link.errors, reader
        self._samples = SampleReader()
        self.are_large = False
        """Whether each sample has its own message."""

    def read(self) -> Sequence[Sample[Any, Any] | dict[str, Any]]:
        head, streams = cut_inline(receive_message(self._errors, self._reader))
        metadata = read_json(head, "an answer")
        if "at" in metadata:
            self.are_large = True
            return [self._samples.read(take(metadata["at"]), metadata)]
        if "streams" not in metadata:
            return [metadata]
        self.are_large = streams.nbytes >= _LARGE_NBYTES
        return [self._samples.read(stream, metadata) for stream in split_inline(streams, metadata["streams"])]


def receive_message(errors: Any, reader: Any) -> Any:
    """Wait for the next message of a session, and return its bytes.

    Raises LostError if the service has ended the session. `errors`, the context manager of the link, translates Flight
    errors.
    """
    try:
        with errors:
            metadata = reader.read_chunk().app_metadata
    except StopIteration:
        raise LostError("the service has ended the session") from None
    return b"" if metadata is None else metadata

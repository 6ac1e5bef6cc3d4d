"""FragmentWriter and SampleSession: streams between a client and a service."""

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


class _Pending(NamedTuple):
    """Fragment that has not been acknowledged."""

    rows: pa.RecordBatch
    fragment: Fragment
    nbytes: int


_WINDOW_NBYTES: Final = 60_000
"""Size in bytes of the fragments that a connection accepts although the service does not read: an HTTP/2 window."""


class FragmentWriter:
    """Stream of a writer's fragments, several of them in flight.

    Fragments are retained until they are acknowledged. After a lost connection, fragments that the service has not
    inserted are sent again; their numbers prevent a second insertion. So do the fragments of a stream that is abandoned
    because an interrupt left it in an unknown state.

    - `link`: connection to the service.
    - `table`: name of the table.
    - `name`: name of the writer; each of its environments has a ring in the table.
    - `max_unacknowledged`: maximum number of fragments in flight.
    """

    def __init__(self, link: Link, table: str, name: str, max_unacknowledged: int) -> None:
        self._link = link
        self._table = table
        self.name = name
        self._max = max_unacknowledged
        self._stream_name = new_name()
        """Name of this stream; other processes may write streams under the same writer's name."""
        self._number = 0
        self.pending: deque[_Pending] = deque()
        """Fragments that have not been acknowledged, oldest first."""
        self._written = self._written_nbytes = 0
        """Number and size in bytes of the pending fragments that were written to the open stream."""
        self._stream: Any = None
        """Writer of the open stream."""
        self._answers: AnswerReader[Any] | None = None
        """Acknowledgements of the open stream."""
        self._calls = InterruptibleCalls()
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
        self.pending.append(_Pending(rows, replace(fragment, number=self._number), rows.get_total_buffer_size()))

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
            rows, fragment, nbytes = self.pending[self._written]
            if self._schema is None or not have_same_columns(rows.schema, self._schema):
                # The order of the streams is the order of the fragments.
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
                # A service that limits block does not read.
                self._calls.call(write)
            else:
                write()

    def _fail(self, error: SampleBatchError) -> NoReturn:
        """Close the stream after an error, discard a rejected fragment, and raise the error."""
        if self._answers is not None and self._answers.is_broken:
            # The stream may have ended with an error, which only closing our side reports.
            try:
                with self._link.errors:
                    self._stream.close()
            except SampleBatchError as cause:
                error = cause
        self._close_stream()
        # A lost stream has rejected nothing, though a stopped service may name the fragment in progress.
        refused = None if isinstance(error, LostError) else vars(error).get("fragment")
        if refused is not None:
            # The service inserts fragments in order, and none after a rejected one.
            self._drop_until(refused - 1)
            self.pending.popleft()
            self.counts.refused += 1
        raise error

    def _open(self) -> None:
        """Open a stream and discard the fragments that the service has already inserted."""
        self._drop_acknowledged()
        if not self.pending:
            return
        schema = self.pending[0].rows.schema
        writer, reader = self._link.put((self._table, self.name, self._stream_name), schema)
        acknowledgements = _Acknowledgements(self._link, reader)
        self._answers = AnswerReader(acknowledgements.read, writer.done_writing, writer.close)
        self._stream, self._schema = writer, schema

    def _drop_acknowledged(self) -> None:
        if not self._number:
            return
        request = {"table": self._table, "writer": self.name, "stream": self._stream_name}
        (raw,) = self._link.act("acknowledged", write_json(request))
        self._drop_until(read_json(raw, "an acknowledgement").get("number", 0))

    def _drop_until(self, number: int) -> None:
        """Count the fragments up to a number as acknowledged."""
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
        """End the stream without waiting; the service ends its side after inserting what it has received."""
        answers, self._answers = self._answers, None
        self._stream, self._schema = None, None
        self._written = self._written_nbytes = 0
        if answers is not None:
            answers.close()

    def _abandon_stream(self) -> None:
        """End the stream after an interrupt; a fragment that is being written is sent first, without waiting."""
        if self._answers is not None:
            self._calls.finish(self._answers.close)
            self._answers = None
        self._close_stream()

    def close(self) -> None:
        """End the stream without waiting; fragments that are not acknowledged are discarded."""
        self.pending.clear()
        self._abandon_stream()


class _Acknowledgements:
    """Acknowledgements of a stream of fragments, for an AnswerReader."""

    def __init__(self, link: Link, reader: Any) -> None:
        self._errors, self._reader = link.errors, reader

    def read(self) -> list[Any]:
        with self._errors:
            raw = self._reader.read()
        if raw is None:
            raise LostError("the service has ended the stream")
        return [raw]


def new_name() -> str:
    """Create a unique name of a writer or stream."""
    return secrets.token_hex(8)


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

    The service answers in order. A thread receives the answers, so samples are prefetched while the learner computes. A
    sample whose wait was interrupted is returned by the next call.

    - `link`: connection to the service.
    - `draw`: request for the samples.
    - `ahead`: number of prefetched samples.
    - `nonce`: secret that proves to the service that this client can map its memory; None to receive samples in
      messages.
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
        """Number of updates sent and not answered."""
        self._received: deque[Sample[Any, Any] | SampleBatchError] = deque()
        """Samples that were received while waiting for updates, or their errors."""
        self._has_started = False
        self._is_cancelled = False

    @property
    def is_broken(self) -> bool:
        """Whether the session must be replaced: it has ended with an error, or was interrupted in an unknown state."""
        return self._answers.is_broken

    def next(self) -> Sample[Any, Any]:
        """Return the next sample, and request further samples ahead.

        Raises LostError if the connection is lost. Raises SampleBatchError if the service rejects the request; the
        session stays open. Raises SampleBatchError if a sample is invalid; the session is broken.
        """
        self._request(1)
        while not self._received:
            self._receive_answer()
        sample = self._return_received()
        if isinstance(sample, SampleBatchError):
            raise sample
        # Small samples share a request and a message; each large one has its own.
        if self._ahead and self._requested <= (self._ahead - 1 if self._messages.are_large else self._ahead // 2):
            # The sample was received; the next call reports a connection that was lost since.
            with suppress(SampleBatchError):
                self._request(self._ahead)
        return sample

    def _return_received(self) -> Sample[Any, Any] | SampleBatchError:
        with self._counting:
            sample = self._received.popleft()
            self._requested -= 1
        return sample

    def _request(self, count: int) -> None:
        """Request samples until that many are in flight or received."""
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
        """Send new priorities of rows, shape (n,) each; generations may be None. `settle` reports errors.

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
        """Whether samples were requested that have not been returned."""
        return self._requested > 0

    @property
    def has_updates(self) -> bool:
        """Whether there are updates to wait for."""
        return self._updates > 0 and not self._is_cancelled and not self.is_broken

    def settle(self) -> None:
        """Wait until the service has applied all updates or the call is cancelled; raises the errors of `next`."""
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
        """Interrupt a thread that waits for an answer; thread-safe."""
        self._is_cancelled = True
        self._reader.cancel()

    def close(self) -> None:
        """End the session."""
        self._answers.close()


class _Counting:
    """Context in which requests and answers are counted: an interrupt marks the stream as broken."""

    __slots__ = ("_answers",)

    def __init__(self, answers: AnswerReader[Any]) -> None:
        self._answers = answers

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, SampleBatchError):
            self._answers.is_broken = True


class _Messages:
    """Messages of a session, for an AnswerReader: samples, and the metadata of updates and errors."""

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

    Raises LostError if the service has ended the session, or as the context `errors` of the link.
    """
    try:
        with errors:
            metadata = reader.read_chunk().app_metadata
    except StopIteration:
        raise LostError("the service has ended the session") from None
    return b"" if metadata is None else metadata

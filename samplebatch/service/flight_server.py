"""FlightServer: Arrow Flight server of a replay service, and sessions of its clients; imports `pyarrow.flight`."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import flight

from samplebatch import errors
from samplebatch.arguments import describe_value, whole
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.service import protocol, samples
from samplebatch.service.flight_process import flight_process
from samplebatch.service.fragments import FragmentDecoder, as_record_batch, read_fragment
from samplebatch.service.items import Sample
from samplebatch.service.requests import RequestHandler
from samplebatch.service.row_store import KEY, list_keys
from samplebatch.service.row_table import Lease, RowTable, Selection

_OPTIONS: Final = ("columns", "at_least", "by_group", "max_tokens", "max_lag")


class RowSession:
    """Session that answers, in order, the requests of one client to a row table.

    Rows that the client takes are leased until the client confirms receipt; unconfirmed rows return to the table.

    - `service`, `table`: the request handler and the row table.
    - `writer`: Flight stream to which answers are written.
    - `memory`: shared memory for rows; None to send all rows in messages.
    - `context`: Flight's call context.
    """

    def __init__(
        self, service: RequestHandler, table: RowTable, writer: Any, memory: samples.SampleMemory | None, context: Any
    ) -> None:
        self._service, self._table, self._writer = service, table, writer
        self._memory, self._context = memory, context
        self._lease: Lease | None = None
        self._answers: dict[str, Callable[[dict[str, Any], Any], None]] = {
            "take": self._take,
            "commit": self._commit,
            "settle": self._settle,
            "wait": self._wait,
            "sample": self._sample,
            "get": self._get,
            "remove": self._remove,
            "reserve": self._reserve,
        }

    def __enter__(self) -> RowSession:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lease is not None:
            self._table.release(self._lease)
        if self._memory is not None:
            self._memory.close()

    def answer(self, chunk: Any) -> None:
        """Answer one request; an error is sent as the answer, and the session remains open."""
        try:
            request = protocol.read_request(chunk.app_metadata or b"", "the request")
            keys = None if chunk.data is None else self._read_keys(chunk.data)
            ask = request.pop("ask", None)
            if ask is None:
                raise errors.ArgumentError(
                    f"table {self._table.name!r} must contain steps or fragments, got rows; use a RowClient"
                )
            if not isinstance(ask, str) or ask not in self._answers:
                raise errors.FormatError(
                    f"'ask' must be a known action, got {describe_value(ask)}; {errors.near_names(ask, self._answers)}"
                )
            self._answers[ask](request, keys)
        except errors.AbandonedError:
            raise
        except (errors.SampleBatchError, pa.ArrowInvalid) as error:
            rejection = (
                error
                if isinstance(error, errors.SampleBatchError)
                else errors.FormatError(f"keys must be Arrow data: {error}")
            )
            self._write_answer(protocol.describe_error(rejection))

    def _read_keys(self, rows: pa.RecordBatch) -> Any:
        """Validate and return the keys attached to a request.

        Raises SampleBatchError if the rows are not valid keys or exceed the size limit. Raises pyarrow.ArrowInvalid if
        the buffers of the rows do not match the schema.
        """
        self._service.check_nbytes("keys", rows.nbytes)
        rows.validate()
        batch = read_fragment(rows)
        if isinstance(batch, MultiAgentBatch):
            raise errors.FormatError(f"keys must be one column {KEY!r}, got columns by policy")
        if list(batch.column_names) != [KEY]:
            listed = ", ".join(map(repr, batch.column_names))[:80] or "no columns"
            raise errors.FormatError(f"keys must be one column {KEY!r}, got {listed}")
        return list_keys(batch._all()[KEY])

    # Requests

    def _take(self, request: dict[str, Any], _: Any) -> None:
        protocol.check_names(request, ("n", "consumer", "reader", "number", "timeout_s", *_OPTIONS), "the request")
        self._drop_lease()
        number = request.get("number")
        if not isinstance(number, int) or number < 1:
            raise errors.FormatError(f"'number' must be an integer from 1, got {str(number)[:80]!r}")
        lease = self._table.lease(
            Selection.of(request.get("n"), request),
            protocol.short_text("consumer", request.get("consumer")),
            reader=protocol.short_text("reader", request.get("reader")),
            number=number,
            timeout_s=_seconds(request),
            is_cancelled=self._context.is_cancelled,
            max_nbytes=self._service.bounds.message_nbytes,
        )
        self._lease = lease
        try:
            self._send(lease.gather())
        except errors.SampleBatchError:
            self._drop_lease()
            raise

    def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._table.release(lease)

    def _commit(self, request: dict[str, Any], _: Any) -> None:
        protocol.check_names(request, (), "the request")
        lease, self._lease = self._lease, None
        self._write_answer({"committed": lease is not None and self._table.commit(lease)})

    def _settle(self, request: dict[str, Any], _: Any) -> None:
        protocol.check_names(request, ("reader", "number"), "the request")
        number = request.get("number")
        if not isinstance(number, int):
            raise errors.FormatError("the request must have a number, got none")
        self._write_answer(
            {"committed": self._table.settle(protocol.short_text("reader", request.get("reader")), number)}
        )

    def _wait(self, request: dict[str, Any], keys: Any) -> None:
        protocol.check_names(request, ("count", "reader", "columns", "timeout_s"), "the request")
        ready_keys = self._table.wait(
            request.get("count", 0) if keys is None else keys,
            columns=request.get("columns"),
            timeout_s=_seconds(request),
            reader=protocol.short_text("reader", request.get("reader", "")),
            is_cancelled=self._context.is_cancelled,
        )
        if keys is None:
            self._send(SampleBatch({KEY: ready_keys}))
        else:
            self._write_answer({"ready": len(ready_keys)})

    def _sample(self, request: dict[str, Any], _: Any) -> None:
        protocol.check_names(request, ("n", "reader", "seed", "timeout_s", *_OPTIONS), "the request")
        batch = self._table.sample(
            request.pop("n", None),
            timeout_s=_seconds(request),
            seed=request.pop("seed", None),
            reader=protocol.short_text("reader", request.pop("reader", "")),
            is_cancelled=self._context.is_cancelled,
            max_nbytes=self._service.bounds.message_nbytes,
            **{name: value for name, value in request.items() if name in _OPTIONS},
        )
        self._send(batch)

    def _get(self, request: dict[str, Any], keys: Any) -> None:
        protocol.check_names(request, ("columns",), "the request")
        nbytes = self._service.bounds.message_nbytes
        self._send(self._table.get(_require_keys(keys), columns=request.get("columns"), max_nbytes=nbytes))

    def _remove(self, request: dict[str, Any], keys: Any) -> None:
        protocol.check_names(request, (), "the request")
        self._write_answer({"removed": self._table.remove(_require_keys(keys))})

    def _reserve(self, request: dict[str, Any], _: Any) -> None:
        protocol.check_names(request, ("count",), "the request")
        self._write_answer({"first": self._table.reserve_keys(request.get("count", 0))})

    # Answers

    def _send(self, batch: SampleBatch[Any]) -> None:
        """Send rows, or only the address of the rows if the rows fit into shared memory."""
        stream = samples.RowsStream(as_record_batch(batch.to_arrow()))
        self._service.check_nbytes("rows", stream.nbytes)
        address = None if self._memory is None else self._memory.put(stream)
        if address is not None:
            self._write_answer({"at": address})
        else:
            self._writer.write_metadata(pa.py_buffer(samples.inline([stream])))

    def _write_answer(self, answer: Mapping[str, Any]) -> None:
        self._writer.write_metadata(pa.py_buffer(protocol.write_json(answer)))


def _seconds(request: Mapping[str, Any]) -> float | None:
    value = request.get("timeout_s")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
        raise errors.ArgumentError(f"timeout_s must be a number from 0, got {describe_value(value)}")
    return None if value is None or np.isinf(value) else value


def _require_keys(keys: Any) -> Any:
    if keys is None:
        raise errors.FormatError("the request must have keys, got none")
    return keys


_AHEAD_NBYTES: Final = 1 << 18
"""Minimum size in bytes of a sample that a separate thread sends while the next sample is drawn."""

_ONE_SAMPLE: Final = b"{}"
"""Request for one sample, the most common request."""

_NOT_ARROW: Final = "the message must be complete Arrow data, got invalid data: {}"

_log = logging.getLogger(__name__)


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Flight server of a replay service, for `ReplayServer`.

    Each call runs in its own thread, so a slow reader does not delay other clients. A call stores at most two samples
    or one fragment in memory.

    - `service`: handler of the requests.
    - `location`: address as a URI.
    - `token`: token that each call must contain; None for no authentication.
    - `tls`: certificate and private key in PEM format; None to serve without encryption.

    Raises OwnershipError if this process was forked from a process that used Flight.
    """

    def __init__(
        self, service: RequestHandler, location: str, token: str | None = None, tls: tuple[bytes, bytes] | None = None
    ) -> None:
        options: dict[str, Any] = {} if tls is None else {"tls_certificates": [tls]}
        if token is not None:
            options["middleware"] = {"token": _Guard(token)}
        flight_process.check()
        self._service = service
        self._secret = samples.Secret()
        super().__init__(location, **options)
        flight_process.register(self)

    def close(self) -> None:
        """Release the memory that is shared with clients."""
        self._secret.close()

    # Fragments

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Insert the fragments of a writer and acknowledge each fragment."""
        with _flight_errors():
            target, decoder = self._parse_path(descriptor), FragmentDecoder()
            while (chunk := _next(reader)) is not None:
                fragment = protocol.Fragment.read(chunk.app_metadata)
                try:
                    acknowledgement = self._service.insert(*target, chunk.data, fragment, context.is_cancelled, decoder)
                except (errors.SampleBatchError, pa.ArrowException) as error:
                    rejection = _as_library_error(error)
                    rejection.fragment = fragment.number  # type: ignore[attr-defined]
                    raise rejection from None
                # Release the fragment before waiting for the next one.
                del chunk
                if not _acknowledge(writer, acknowledgement):
                    return

    def _parse_path(self, descriptor: Any) -> tuple[Any, str, str]:
        path = [part.decode(errors="replace") for part in descriptor.path or ()]
        if not 1 <= len(path) <= 3:
            raise errors.FormatError(
                f"a path must be a table, or a table, a writer and a stream, got {len(path)} parts"
            )
        table, writer, stream = (*path, "", "")[:3]
        return self._service.table(table), protocol.short_text("writer", writer), protocol.short_text("stream", stream)

    # Samples

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Stream samples, one record batch per sample."""
        with _flight_errors():
            draw = protocol.Draw.read(ticket.ticket, "the ticket")
            first = self._draw(draw, context)
            return flight.GeneratorStream(first.batch.schema, self._samples(draw, first, context))

    def _draw(self, draw: protocol.Draw, context: Any) -> samples.Packed:
        return self._service.pack(self._service.sample(draw, context.peer(), context.is_cancelled))

    def _samples(
        self, draw: protocol.Draw, first: samples.Packed, context: Any
    ) -> Iterator[tuple[pa.RecordBatch, Any]]:
        """Yield samples; the next sample is drawn while the current sample is sent."""
        remaining = draw.count
        with _flight_errors(), ThreadPoolExecutor(1, "samplebatch-draw") as pool:
            sample = first
            while True:
                remaining = None if remaining is None else remaining - 1
                next_sample = pool.submit(self._draw, draw, context) if remaining != 0 else None
                schema = sample.batch.schema
                if not samples.have_same_columns(schema, first.batch.schema):
                    raise errors.FormatError("the columns of the table have changed; open another stream")
                metadata = {**sample.metadata, "batch": samples.batch_text(schema, first.batch.schema)}
                yield sample.batch, pa.py_buffer(protocol.write_json(metadata))
                if next_sample is None:
                    return
                sample = next_sample.result()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answer, in order, the requests of a learner or of a row table's client in one session."""
        with _flight_errors():
            draw = protocol.Draw.read(descriptor.command or b"", "the command")
            memory = self._secret.open(draw.nonce, self._service.bounds.shared_nbytes) if draw.nonce else None
            session: RowSession | _Session
            table = self._service.table(draw.table)
            if isinstance(table, RowTable):
                session = RowSession(self._service, table, writer, memory, context)
            else:
                session = _Session(self._service, draw, writer, memory, context)
            with session:
                while (chunk := _next(reader)) is not None:
                    session.answer(chunk)

    # Actions

    def do_action(self, context: Any, action: Any) -> Any:
        """Perform an action."""
        with _flight_errors():
            body = pa.py_buffer(b"") if action.body is None else action.body
            if action.type == "attach":
                return [pa.py_buffer(protocol.write_json(self._secret.address()))]
            return [pa.py_buffer(result) for result in self._service.act(action.type, body)]

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        """List the actions."""
        return list(protocol.ACTIONS.items())

    # Descriptions

    def list_flights(self, context: Any, criteria: Any) -> Iterator[Any]:
        """Describe all tables."""
        with _flight_errors():
            return iter([self._describe(name) for name in self._service.tables])

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        """Return the Flight description of the table whose name is the descriptor's path."""
        with _flight_errors():
            return self._describe(self._parse_path(descriptor)[0].name)

    def get_schema(self, context: Any, descriptor: Any) -> Any:
        """Return the schema of a table's last fragment; the schema is empty before the first fragment."""
        with _flight_errors():
            return flight.SchemaResult(self._service.schema(self._parse_path(descriptor)[0].name))

    def _describe(self, name: str) -> Any:
        table = self._service.table(name)
        ticket = flight.Ticket(protocol.Draw(name).write())
        return flight.FlightInfo(
            self._service.schema(name),
            flight.FlightDescriptor.for_path(name),
            [flight.FlightEndpoint(ticket, [])],
            len(table),
            -1,
        )


class _Session:
    """Session that answers, in order, the requests of one learner.

    If the learner prefetches, a separate thread sends a large sample while the next sample is drawn. The next large
    sample waits until the thread has sent the current sample. Small samples of one request are sent in one message.
    """

    def __init__(
        self,
        service: RequestHandler,
        draw: protocol.Draw,
        writer: Any,
        memory: samples.SampleMemory | None,
        context: Any,
    ) -> None:
        self._service, self._draw, self._writer, self._memory, self._context = service, draw, writer, memory, context
        self._table = service.replay_table(draw.table)
        self._samples = samples.SampleWriter()
        self._small: list[samples.Stream] = []
        """Drawn samples that will share a message."""
        self._nonblocking_draw = replace(draw, timeout_s=0.0)
        self._pool = ThreadPoolExecutor(1, "samplebatch-send")
        self._sending: Future[None] | None = None

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        if self._memory is not None:
            self._memory.close()

    def answer(self, chunk: Any) -> None:
        """Answer one request; an error is sent as the answer, and the session remains open."""
        if chunk.data is not None:
            self._answer("update", lambda: self._update(chunk))
            return
        try:
            count = _read_count(chunk.app_metadata)
        except errors.SampleBatchError as error:
            self._write_answer({**protocol.describe_error(error), "of": "sample"})
            return
        for _ in range(count):
            self._answer("sample", lambda: self._send(self._next_sample()))
        self._send_small()

    def _answer(self, of: str, answer: Callable[[], None]) -> None:
        try:
            answer()
        except (errors.SampleBatchError, pa.ArrowInvalid) as error:
            if isinstance(error, flight.FlightError):
                raise
            self._write_answer({**protocol.describe_error(_as_library_error(error)), "of": of})

    def _update(self, chunk: Any) -> None:
        metadata = protocol.read_request(chunk.app_metadata or b"{}", "the metadata of an update")
        any_generation = metadata.get("any_generation") is True
        self._write_answer({"updated": self._service.update(self._table, chunk.data, any_generation=any_generation)})

    def _next_sample(self) -> Sample:
        """Draw a sample; if a limit blocks the draw, send the samples that are already drawn and wait."""
        peer, is_cancelled = self._context.peer(), self._context.is_cancelled
        if self._small:
            try:
                return self._service.sample(self._nonblocking_draw, peer, is_cancelled)
            except errors.LimitTimeoutError:
                self._send_small()
        return self._service.sample(self._draw, peer, is_cancelled)

    def _send(self, sample: Sample) -> None:
        """Send a sample, or only the sample's address if it fits into shared memory."""
        stream, metadata = self._samples.prepare(sample)
        self._service.check_nbytes("a sample", stream.nbytes)
        address = None if self._memory is None else self._memory.put(stream)
        if address is not None:
            self._write_answer({**metadata, "at": address})
        elif metadata or stream.nbytes >= _AHEAD_NBYTES:
            self._send_streams([stream], metadata)
        else:
            self._small.append(stream)
            if len(self._small) >= samples.MAX_INLINE or sum(stream.nbytes for stream in self._small) >= _AHEAD_NBYTES:
                self._send_small()

    def _send_small(self) -> None:
        small, self._small = self._small, []
        if small:
            self._write_streams(small, {})

    def _send_streams(self, streams: list[samples.Stream], metadata: Mapping[str, Any]) -> None:
        """Send pending small samples, then `streams`; a thread sends large streams if the learner prefetches."""
        self._send_small()
        if self._draw.ahead and streams[0].nbytes >= _AHEAD_NBYTES:
            self._wait()
            self._sending = self._pool.submit(self._write_message, streams, metadata)
        else:
            self._write_streams(streams, metadata)

    def _write_streams(self, streams: list[samples.Stream], metadata: Mapping[str, Any]) -> None:
        self._wait()
        self._write_message(streams, metadata)

    def _write_message(self, streams: list[samples.Stream], metadata: Mapping[str, Any]) -> None:
        self._writer.write_metadata(pa.py_buffer(samples.inline(streams, metadata)))

    def _write_answer(self, answer: Mapping[str, Any]) -> None:
        self._send_small()
        self._wait()
        self._writer.write_metadata(pa.py_buffer(protocol.write_json(answer)))

    def _wait(self) -> None:
        """Wait until the thread has sent the current sample; raises the error of a failed send."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()


def _read_count(raw: Any) -> int:
    """Return the number of requested samples; raises the same errors as `read_request` and `whole`."""
    if raw is None or (raw.size == len(_ONE_SAMPLE) and raw.to_pybytes() == _ONE_SAMPLE):
        return 1
    request = protocol.read_request(raw, "the metadata of a request")
    protocol.check_names(request, ("count",), "the metadata of a request")
    count = whole("count", request.get("count", 1), 1)
    if count > protocol.MAX_ASKED:
        raise errors.ArgumentError(f"count must be at most {protocol.MAX_ASKED}, got {count}; send several requests")
    return count


class _Guard(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Flight middleware that rejects calls without the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = protocol.header(token).encode()

    def start_call(self, info: Any, headers: Mapping[str, Any]) -> None:
        values: Any = next((values for name, values in headers.items() if name.lower() == "authorization"), [])
        if not values or not hmac.compare_digest(str(values[0]).encode(), self._expected):
            rejection = errors.AccessError(
                f"a call must have the token of the service, got {'another token' if values else 'no token'}; "
                "pass it to the client as token="
            )
            raise flight.FlightUnauthenticatedError(str(rejection), protocol.write_error(rejection))


def _acknowledge(writer: Any, acknowledgement: Mapping[str, Any]) -> bool:
    try:
        writer.write(pa.py_buffer(protocol.write_json(acknowledgement)))
    except OSError:
        # The writer may have been killed, which is not an error of the service.
        return False
    return True


def _next(reader: Any) -> Any:
    """Read the next message of a stream; None if the client has closed its side of the stream."""
    try:
        return reader.read_chunk()
    except StopIteration:
        return None
    except OSError as error:
        # Arrow raises OSError for an incomplete schema.
        raise errors.FormatError(_NOT_ARROW.format(_first_line(error))) from error


@contextmanager
def _flight_errors() -> Iterator[None]:
    """Translate errors into Flight errors that describe a library error and contain no traceback."""
    try:
        yield
    except flight.FlightError:
        raise
    except (errors.SampleBatchError, pa.ArrowException) as error:
        translated = _as_library_error(error)
        kind = flight.FlightTimedOutError if isinstance(translated, TimeoutError) else flight.FlightServerError
        raise kind(protocol.describe_error(translated)["message"], protocol.write_error(translated)) from None
    except Exception as error:
        _log.exception("a call of a client failed")
        failure = errors.ServiceError(f"the service failed with a {type(error).__name__}; see the service's log")
        raise flight.FlightInternalError(str(failure), protocol.write_error(failure)) from None


def _as_library_error(error: Exception) -> errors.SampleBatchError:
    """Return a library error unchanged; convert an error from Arrow to FormatError."""
    if isinstance(error, errors.SampleBatchError):
        return error
    return errors.FormatError(_NOT_ARROW.format(_first_line(error)))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

"""Link: connection of a client to one service; imports `pyarrow.flight`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyarrow import flight

from samplebatch.errors import AccessError, ArgumentError, SampleBatchError, ServiceError
from samplebatch.service.answers import InterruptibleCalls
from samplebatch.service.flight_process import flight_process
from samplebatch.service.protocol import Draw, LostError, header, read_error, read_json

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Initial and maximum pause between attempts, in seconds; the pause doubles after each failure."""
_OPTIONS: Final = [
    # With a shared pool, this client would wait for the connections of other clients.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_UNTRUSTED: Final = ("certificate verify failed", "is not in peer certificate")
"""Parts of gRPC's messages about a certificate that is untrusted or was issued for another address."""


class _Errors:
    """Context manager that translates Flight errors of a link into library errors.

    Raises LostError if the connection was lost during the call. Raises AccessError if the service's certificate is not
    trusted. Raises SampleBatchError if the service rejected the call.
    """

    __slots__ = ("_uri",)

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, flight.FlightError):
            details = error.extra_info
            if details:
                raise read_error(_read(details, error)) from None
            sentence = _sentence(error)
            if any(sign in sentence for sign in _UNTRUSTED):
                # Not LostError: a retry would fail again.
                raise AccessError(
                    f"the certificate of the service at {self._uri} must be issued for this address and verified by "
                    f"tls_root_certs, got another certificate: {sentence}"
                ) from error
            raise LostError(sentence) from error
        if isinstance(error, pa.ArrowException):
            raise LostError(_sentence(error)) from error


class Patience:
    """Exponential backoff with jitter between calls to an unreachable service.

    - `uri`: address of the service, for the error message.
    - `reconnect_s`: maximum duration of the retries, in seconds after the first failure.
    """

    def __init__(self, uri: str, reconnect_s: float) -> None:
        self._uri, self._reconnect_s = uri, reconnect_s
        self._failures, self._started, self._pause_s = 0, 0.0, _FIRST_PAUSE_S

    def wait(self, error: LostError) -> None:
        """Pause after a failure. Raises ServiceError if `reconnect_s` seconds have elapsed since the first failure."""
        self._failures += 1
        if self._failures == 1:
            # The time before the first failure is excluded: table limits may have blocked the call for a long time.
            self._started = time.monotonic()
        waited_s = time.monotonic() - self._started
        if waited_s >= self._reconnect_s:
            raise ServiceError(
                f"the replay service at {self._uri} must be reachable, got no answer for {waited_s:.0f} s in "
                f"{self._failures} attempts: {error}"
            ) from error
        # Jitter prevents all clients of a lost service from reconnecting at the same time.
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        time.sleep(min(pause_s, self._reconnect_s - waited_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class Link:
    """Connection of a client to one service.

    - `uri`: address of the service.
    - `token`: access token; None if the service requires no token.
    - `tls_root_certs`: content of a PEM file with the certificates that verify the service's certificate; None for the
      system's certificates.
    - `reconnect_s`: seconds for which an unreachable service is retried.

    Raises ArgumentError if the address is invalid, or `tls_root_certs` contains no certificate. Raises OwnershipError
    if this process was forked from a process that used Flight.
    """

    def __init__(self, uri: str, token: str | None, tls_root_certs: bytes | None, reconnect_s: float) -> None:
        flight_process.check()
        self.uri = uri
        self._process = os.getpid()
        self._reconnect_s = reconnect_s
        headers = [] if token is None else [(b"authorization", header(token).encode())]
        self._call = flight.FlightCallOptions(headers=headers)
        self._arguments: dict[str, Any] = {"generic_options": _OPTIONS}
        if tls_root_certs is not None:
            if _CERTIFICATE not in tls_root_certs:
                raise ArgumentError(
                    "tls_root_certs must be a file with PEM certificates, got a file without a certificate"
                )
            self._arguments["tls_root_certs"] = tls_root_certs
        self.errors = _Errors(uri)
        """Context manager for Flight calls."""
        self._calls = InterruptibleCalls()
        self._client = self._connect()

    def _connect(self) -> Any:
        try:
            client = flight.connect(self.uri, **self._arguments)
        except (pa.ArrowException, ValueError) as error:
            raise ArgumentError(
                f"uri must be an address such as 'grpc://host:5000', got {self.uri!r}: {_sentence(error)}"
            ) from error
        flight_process.register(client)
        return client

    def retry(
        self, call: Callable[[], T], on_lost: Callable[[], None] | None = None, patience: Patience | None = None
    ) -> T:
        """Repeat a call until the service can be reached, and return the result.

        - `call`: function without arguments.
        - `on_lost`: function that is called after each failure.
        - `patience`: result of `recover` if the call has already failed once.

        Raises ServiceError if the service cannot be reached for `reconnect_s` seconds. Errors of the call other than
        LostError are raised unchanged.
        """
        while True:
            try:
                return call()
            except LostError as error:
                patience = self.recover(error, on_lost, patience)

    def recover(
        self, error: LostError, on_lost: Callable[[], None] | None = None, patience: Patience | None = None
    ) -> Patience:
        """Pause after a failed call, then reconnect; raises ServiceError in the same cases as `retry`."""
        if on_lost is not None:
            on_lost()
        patience = patience or Patience(self.uri, self._reconnect_s)
        patience.wait(error)
        self._client.close()
        self._client = self._connect()
        return patience

    def patience(self) -> Patience:
        """Create the backoff for a series of failed calls."""
        return Patience(self.uri, self._reconnect_s)

    def act(self, action: str, body: Any = b"") -> list[Any]:
        """Execute a Flight action of the service and return the bodies of its results.

        Raises LostError if the connection is lost. Raises SampleBatchError if the service rejects the action.
        """
        return self._interruptible(
            lambda: [result.body for result in self._client.do_action(flight.Action(action, body), self._call)],
            lambda _: None,
        )

    def put(self, path: tuple[str, ...], schema: pa.Schema) -> tuple[Any, Any]:
        """Open a stream of fragments; return the writer of fragments and the reader of acknowledgements."""
        descriptor = flight.FlightDescriptor.for_path(*path)
        return self._interruptible(
            lambda: self._register(self._client.do_put(descriptor, schema, self._call)),
            lambda stream: stream[0].close(),
        )

    def exchange(self, draw: Draw) -> tuple[Any, Any]:
        """Open a sampling session; return the writer of requests and the reader of answers."""
        descriptor = flight.FlightDescriptor.for_command(draw.write())
        return self._interruptible(
            lambda: self._register(self._client.do_exchange(descriptor, self._call)),
            lambda stream: stream[1].cancel(),
        )

    @staticmethod
    def _register(stream: tuple[Any, Any]) -> tuple[Any, Any]:
        flight_process.register(*stream)
        return stream

    def _interruptible(self, call: Callable[[], T], discard: Callable[[T], Any]) -> T:
        """Return the result of a Flight call; if a signal interrupts the wait, `discard` receives the late result."""
        results: list[T] = []

        def run() -> None:
            with self.errors:
                results.append(call())

        try:
            self._calls.call(run)
        except SampleBatchError:
            raise
        except BaseException:
            self._calls.finish(lambda: discard(results[0]))
            raise
        return results[0]

    def close(self) -> None:
        """Close the connection; do nothing in a forked child."""
        if self._process == os.getpid():
            self._client.close()
            self._calls.finish(lambda: None)


def _read(details: bytes, error: Exception) -> dict[str, Any]:
    try:
        return read_json(details, "an error")
    except SampleBatchError:
        return {"message": _sentence(error)}


def _sentence(error: Exception) -> str:
    return str(error).split(". gRPC client debug context", 1)[0].splitlines()[0]

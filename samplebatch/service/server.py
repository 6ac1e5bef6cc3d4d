"""ReplayServer: Arrow Flight server of replay tables, for writers and learners on any machine."""

from __future__ import annotations

import atexit
import os
import socket
import ssl
import stat
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, Self

from samplebatch.arguments import whole
from samplebatch.errors import ArgumentError, OwnershipError, SampleBatchError, ServiceError
from samplebatch.service.requests import Bounds, RequestHandler
from samplebatch.service.row_table import RowTable
from samplebatch.service.table import ReplayTable
from samplebatch.service.weights import PublishedWeights

if TYPE_CHECKING:
    from samplebatch.service.flight_server import FlightServer

Pair = tuple[str | os.PathLike[str], str | os.PathLike[str]]
"""Paths of a PEM certificate and of its private key."""

_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
_OTHER_KEY: Final = {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"}
"""OpenSSL's reasons if a key belongs to another certificate; the last if only one of the two uses elliptic curves."""
_OUT_OF_DATE: Final = {9, 10}
"""OpenSSL's codes for certificates that are not yet valid or have expired."""


def read_pair(tls: Pair, names: tuple[str, str] = ("tls[0]", "tls[1]")) -> tuple[bytes, bytes]:
    """Read and validate a certificate and its private key.

    - `tls`: paths of the certificate and the private key.
    - `names`: names of the two arguments or options in error messages.

    Raises ArgumentError if a file contains no PEM certificate or private key, or the key is encrypted or belongs to
    another certificate. Raises OSError if a file cannot be read.
    """
    certificate, key = (_read(path, name) for path, name in zip(tls, names, strict=True))
    first, second = (repr(os.fspath(path)) for path in tls)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls[0])
    except ssl.SSLError as error:
        state = "a damaged one" if _CERTIFICATE in certificate else "none"
        raise ArgumentError(f"{names[0]} must be a file with a PEM certificate, got {state} in {first}") from error
    try:
        _server_context(tls)
    except _EncryptedKey as error:
        raise ArgumentError(
            f"{names[1]} must be a private key without a passphrase, got an encrypted one in {second}"
        ) from error
    except ssl.SSLError as error:
        if error.reason in _OTHER_KEY:
            raise ArgumentError(
                f"{names[1]} must be the private key of the certificate in {first}, got the key of another in {second}"
            ) from error
        state = "a damaged one" if _KEY in key else "none"
        raise ArgumentError(f"{names[1]} must be a file with a PEM private key, got {state} in {second}") from error
    return certificate, key


def find_expiry(tls: Pair) -> str | None:
    """Return why clients will reject a certificate that has expired or is not yet valid; None for other certificates.

    The check is an in-memory handshake with a client that trusts only this certificate.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(tls[0])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = _server_context(tls).wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (asking, answering, asking):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OUT_OF_DATE:
            return f"clients will reject the certificate in {os.fspath(tls[0])!r}: {error.verify_message}"
    except ssl.SSLError:
        return None
    return None


class _EncryptedKey(Exception):
    """Raised for an encrypted private key, instead of prompting for a passphrase in the terminal."""


def _refuse_passphrase() -> str:
    raise _EncryptedKey


def _server_context(tls: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Flight itself rejects weak keys.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_cert_chain(*tls, password=_refuse_passphrase)
    return context


def _read(path: str | os.PathLike[str], name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        # The constructor of OSError selects the subclass by errno.
        sentence = f"{name} must be a file that can be read, got {error.strerror}"
        raise OSError(error.errno, sentence, os.fspath(path)) from error


_GRACE_S: Final = 0.25
"""Time in seconds for which a closing server waits for running calls before it shuts down their connections."""
_DESCRIPTORS: Final = "/proc/self/fd"


class ReplayServer:
    """Arrow Flight server of replay tables, for writers and learners on any machine.

    The method `start` and the context manager serve in background threads; the method `serve` blocks the calling
    thread. The default `host` accepts only connections from this machine. If `token` is None, every client that can
    connect may read and write.

    Parameters
    ----------
    tables
        Tables to serve; `close` also closes the tables.
    host, port
        Address of the server; port 0 selects a free port.
    token
        Access token that clients must send; None for no authentication.
    tls
        Paths of a PEM certificate and of its private key; None to serve without encryption. If the certificate has
        expired or is not yet valid, a warning is issued.
    checkpoint
        Function that writes a checkpoint and returns its path, called when a client requests a checkpoint; None to
        reject requests for checkpoints.
    weights
        Initial weights, for example restored by `Checkpoints.restore`; None to start without weights.
    max_message_nbytes
        Maximum size of a fragment, a sample or weights, in bytes; larger messages are rejected.
    max_shared_nbytes
        Maximum shared memory in bytes for the samples of one client on this machine. Samples that do not fit are sent
        over the connection.

    Raises
    ------
    ArgumentError
        If two tables have the same name, a number is out of range, `tls` contains no PEM certificate or private key, or
        the key is encrypted or belongs to another certificate.
    ServiceError
        If the server cannot listen at the address.
    OSError
        If the certificate or private key file of `tls` cannot be read.
    OwnershipError
        If this process was forked from a process that used a replay service; a forked child has no gRPC threads.

    Attributes
    ----------
    tables
        Tables by name.
    host, port
        Address of the server.
    weights
        Weights that clients have published, for `Checkpoints.write`.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
    >>> steps = SampleBatch(
    ...     obs=[1, 2], actions=[0, 1], rewards=[0.0, 1.0], terminateds=[False, True]
    ... )
    >>> with ReplayServer([ReplayTable("replay", capacity=1000)]) as server:
    ...     with ReplayClient(server.uri, "replay") as buffer:
    ...         buffer.extend(steps)
    ...         batch, indices = buffer.sample(32)
    >>> batch.rew.shape
    (32,)
    """

    def __init__(
        self,
        tables: Iterable[ReplayTable | RowTable],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: Pair | None = None,
        checkpoint: Callable[[], Any] | None = None,
        weights: PublishedWeights | None = None,
        max_message_nbytes: int = Bounds.message_nbytes,
        max_shared_nbytes: int = Bounds.shared_nbytes,
    ) -> None:
        bounds = Bounds(
            whole("max_message_nbytes", max_message_nbytes, 1), whole("max_shared_nbytes", max_shared_nbytes)
        )
        self.tables: Mapping[str, ReplayTable | RowTable] = _by_name(tables)
        self.host = host
        self._scheme = "grpc" if tls is None else "grpc+tls"
        pem = None if tls is None else read_pair(tls)
        expiry = None if tls is None else find_expiry(tls)
        if expiry is not None:
            warnings.warn(expiry, stacklevel=2)
        self._service = RequestHandler(self.tables, bounds, checkpoint, weights)
        self.weights = self._service.weights
        self._endpoint = _listen(self._service, f"{self._scheme}://{_in_uri(host)}:{whole('port', port)}", token, pem)
        self.port: int = self._endpoint.port
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        _servers.add(self)
        # At interpreter exit, Flight would wait for the open streams of clients, including those of this process.
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def uri(self) -> str:
        """Address for clients."""
        return f"{self._scheme}://{_in_uri(self.host)}:{self.port}"

    def start(self) -> Self:
        """Serve in background threads until `close` is called; a `with` statement calls `start` and `close`."""
        self._check_process()
        if self._thread is None:
            # Flight's `serve` would replace the signal handlers of the process.
            self._thread = threading.Thread(target=self._endpoint.wait, name="samplebatch-serve", daemon=True)
            self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self) -> None:
        """Block and serve until another thread calls `close`, or a signal terminates the process."""
        self._check_process()
        self._endpoint.serve()

    def close(self) -> None:
        """Close the tables, end all calls, and stop listening. Closing again does nothing.

        In a forked child, `close` does nothing; the parent process continues to serve.
        """
        if self._process != os.getpid():
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self._at_exit)
            self._service.close()
            stopping = threading.Thread(target=self._endpoint.shutdown, name="samplebatch-stop", daemon=True)
            stopping.start()
            stopping.join(_GRACE_S)
            while stopping.is_alive():
                # Flight's shutdown waits for every open stream, and clients may keep streams open indefinitely.
                _cut_connections(self.port)
                stopping.join(_GRACE_S)
            if self._thread is not None:
                self._thread.join()
            self._endpoint.close()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise OwnershipError("a replay server must serve in the process that created it, got a forked child")


_servers: Final[weakref.WeakSet[ReplayServer]] = weakref.WeakSet()
"""Servers whose sockets a forked child closes."""


def _leave_sockets_to_parent() -> None:
    """Close inherited sockets, because they would otherwise accept connections after the parent process exits."""
    ports = {server.port for server in list(_servers)}
    for descriptor, port, _ in _sockets() if ports else ():
        if port in ports:
            os.close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_sockets_to_parent)


def _close(server: weakref.ref[ReplayServer]) -> None:
    referent = server()
    if referent is not None:
        referent.close()


def _by_name(tables: Iterable[ReplayTable | RowTable]) -> dict[str, ReplayTable | RowTable]:
    tables_by_name: dict[str, ReplayTable | RowTable] = {}
    if not isinstance(tables, Iterable):
        raise ArgumentError(
            f"tables must be a list of ReplayTable or RowTable, got a {type(tables).__name__}; pass [table]"
        )
    for table in tables:
        if not hasattr(table, "info"):
            raise ArgumentError(f"tables must be a list of ReplayTable or RowTable, got a {type(table).__name__}")
        if tables_by_name.setdefault(table.name, table) is not table:
            raise ArgumentError(f"tables must have different names, got {table.name!r} twice")
    if not tables_by_name:
        raise ArgumentError("a replay server must have a table, got none")
    return tables_by_name


def _in_uri(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listen(service: RequestHandler, location: str, token: str | None, tls: tuple[bytes, bytes] | None) -> FlightServer:
    from samplebatch.service.flight_server import FlightServer

    try:
        return FlightServer(service, location, token, tls)
    except SampleBatchError:
        raise
    except Exception as error:
        raise ServiceError(f"a replay server cannot listen at {location}: {error}") from error


def _cut_connections(port: int) -> None:
    for descriptor, local_port, listens in _sockets():
        if local_port == port and not listens:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, int, bool]]:
    """Yield the file descriptor, the local port and whether the socket listens, for each TCP socket of this process."""
    if not os.path.isdir(_DESCRIPTORS):
        return
    for name in os.listdir(_DESCRIPTORS):
        try:
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                address = connection.getsockname()
                listens = bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        except OSError:
            # Another thread has closed the socket.
            continue
        if isinstance(address, tuple):
            yield descriptor, address[1], listens


_CONTENT = "text/plain; version=0.0.4; charset=utf-8"
_FACTS = (
    ("size", "gauge", "Items in the table."),
    ("capacity", "gauge", "Maximum number of items in the table."),
    ("nbytes", "gauge", "Memory of the items in bytes."),
    ("inserted", "counter", "Items inserted since the table was empty."),
    ("sampled", "counter", "Items sampled since the table was empty."),
)
_LIMITS = (
    ("min_size", "Minimum number of items before sampling starts."),
    ("samples_per_insert", "Number of samples permitted per insert."),
    ("error_buffer", "Maximum number of samples ahead or behind."),
    ("max_times_sampled", "Maximum number of times that each item may be sampled, 0 for no limit."),
)
_TIMEOUT_S = 10.0


def render_metrics(infos: Iterable[dict[str, Any]]) -> str:
    """Format the state of tables in Prometheus's text format.

    - `infos`: results of `ReplayTable.info`, one per table.

    >>> table = ReplayTable("replay", capacity=100)
    >>> print(render_metrics([table.info()]).splitlines()[2])
    samplebatch_table_size{table="replay"} 0
    """
    tables = list(infos)
    lines: list[str] = []
    for name, kind, help_text in _FACTS:
        metric = f"samplebatch_table_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} {kind}"]
        lines += [f"{metric}{_labels(table=info['name'])} {info[name]}" for info in tables]
    for name, help_text in _LIMITS:
        metric = f"samplebatch_table_{name}"
        lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} gauge"]
        values = [(info["name"], info["limits"][name]) for info in tables]
        lines += [f"{metric}{_labels(table=table)} {value}" for table, value in values if value is not None]
    return "\n".join([*lines, *_blocked_requests(tables), ""])


def _blocked_requests(infos: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of two metrics: number of blocked requests, and longest waiting time in seconds."""
    now = time.time()
    count, longest = "samplebatch_table_held_back", "samplebatch_table_held_back_seconds"
    values: dict[str, list[str]] = {count: [], longest: []}
    for info in infos:
        for action in ("insert", "sample"):
            since = [request["since"] for request in info["held_back"] if request["action"] == action]
            labels = _labels(table=info["name"], action=action)
            values[count].append(f"{count}{labels} {len(since)}")
            values[longest].append(f"{longest}{labels} {max([now - min(since, default=now), 0.0]):.3f}")
    for metric, help_text in (
        (count, "Requests that are blocked by a limit."),
        (longest, "Seconds for which the oldest blocked request has waited."),
    ):
        yield from (f"# HELP {metric} {help_text}", f"# TYPE {metric} gauge", *values[metric])


def _labels(**labels: str) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


class MetricsServer:
    """HTTP server that exports metrics of replay tables at `/metrics`, for Prometheus on this machine.

    Parameters
    ----------
    tables
        Tables whose metrics are exported.
    port
        Port of the loopback interface; 0 selects a free port.

    Raises
    ------
    ArgumentError
        If `port` is not a non-negative integer.
    ServiceError
        If the server cannot listen at the port.

    Attributes
    ----------
    url
        URL of the metrics.

    Examples
    --------
    >>> from urllib.request import urlopen
    >>> with MetricsServer([ReplayTable("replay", capacity=100)]) as server:
    ...     text = urlopen(server.url).read().decode()
    >>> 'samplebatch_table_capacity{table="replay"} 100' in text.splitlines()
    True
    """

    def __init__(self, tables: Iterable[ReplayTable | RowTable], *, port: int = 0) -> None:
        handler = type("_Handler", (_Handler,), {"tables": list(tables)})
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", whole("port", port)), handler)
        except (OSError, OverflowError) as error:
            raise ServiceError(f"the metrics server cannot listen at port {port}: {error}") from error
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/metrics"
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, name="samplebatch-metrics", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. In a forked child, only the inherited socket is closed."""
        if self._thread is not None and self._process == os.getpid():
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    tables: list[ReplayTable | RowTable]
    timeout = _TIMEOUT_S
    server_version = "samplebatch"

    def do_GET(self) -> None:
        """Send the metrics for `/` and `/metrics`, and status 404 for other paths."""
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = render_metrics(table.info() for table in self.tables).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _CONTENT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Suppress the log of requests, because Prometheus sends a request every few seconds."""
        return None

"""ReplayServer: replay tables behind Arrow Flight, for writers and learners on any machine."""

from __future__ import annotations

import atexit
import os
import socket
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from samplebatch.arguments import whole
from samplebatch.errors import ArgumentError, SampleBatchError, ServiceError
from samplebatch.service.certificates import Pair, find_expiry, read_pair
from samplebatch.service.service import Bounds, Service
from samplebatch.service.table import ReplayTable

if TYPE_CHECKING:
    from samplebatch.service.endpoint import Endpoint

_GRACE_S: Final = 0.25
"""Seconds that clients have to end their calls once the server closes."""
_DESCRIPTORS: Final = "/proc/self/fd"


class ReplayServer:
    """Replay tables behind Arrow Flight, for writers and learners on any machine.

    As a context manager, or once it is started, it serves from threads of its own; `serve` does so in the foreground.
    Only this machine can reach it unless `host` says otherwise, and without a token anybody who can reach it may read
    and write.

    Parameters
    ----------
    tables
        The tables; they are closed with the server.
    host, port
        The address to listen at; port 0 for any that is free.
    token
        A word that clients must bring; None to serve everybody.
    tls
        The paths of a certificate and of its private key, in PEM; None to serve in plain text. A certificate that has
        expired is served with a warning.
    checkpoint
        Writes all tables to the disk and returns where, for clients that ask for it; None where there is nowhere to.
    max_message_nbytes
        Bytes of a fragment, of a sample or of weights; larger ones are refused.
    max_shared_nbytes
        Bytes of shared memory that samples for one client on this machine may lie in; those beyond are sent.

    Raises
    ------
    ArgumentError
        If two tables have one name, a number is not of its values, `tls` has no certificate or no private key in PEM,
        or the key is encrypted or of another certificate.
    ServiceError
        If it cannot listen at the address.
    OSError
        If a file of `tls` cannot be read.

    Attributes
    ----------
    tables
        The tables, by their names.
    host, port
        The address.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
    >>> with ReplayServer([ReplayTable("replay", capacity=1000)]) as server:
    ...     with ReplayClient(server.uri, "replay") as buffer:
    ...         buffer.extend(SampleBatch(obs=[1, 2], actions=[0, 1], rewards=[0.0, 1.0], terminateds=[False, True]))
    ...         batch, indices = buffer.sample(32)
    >>> batch.rew.shape
    (32,)
    """

    def __init__(
        self,
        tables: Iterable[ReplayTable],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: Pair | None = None,
        checkpoint: Callable[[], Any] | None = None,
        max_message_nbytes: int = Bounds.message_nbytes,
        max_shared_nbytes: int = Bounds.shared_nbytes,
    ) -> None:
        bounds = Bounds(
            whole("max_message_nbytes", max_message_nbytes, 1), whole("max_shared_nbytes", max_shared_nbytes)
        )
        self.tables: Mapping[str, ReplayTable] = _by_name(tables)
        self.host = host
        self._scheme = "grpc" if tls is None else "grpc+tls"
        pem = None if tls is None else read_pair(tls)
        expiry = None if tls is None else find_expiry(tls)
        if expiry is not None:
            warnings.warn(expiry, stacklevel=2)
        self._service = Service(self.tables, bounds, checkpoint)
        self._endpoint = _listen(self._service, f"{self._scheme}://{_in_uri(host)}:{whole('port', port)}", token, pem)
        self.port: int = self._endpoint.port
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()
        self._closed = False
        # At the interpreter's exit, Flight would wait for the streams of clients that are open, in this process too.
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def uri(self) -> str:
        """The address for clients."""
        return f"{self._scheme}://{_in_uri(self.host)}:{self.port}"

    def start(self) -> Self:
        """Serve from threads of its own until `close` is called; a context manager does both."""
        if self._thread is None:
            # Not its own `serve`, which would take the signals of the process over.
            self._thread = threading.Thread(target=self._endpoint.wait, name="samplebatch-serve", daemon=True)
            self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self) -> None:
        """Serve until `close` is called by another thread, or a signal ends the process."""
        self._endpoint.serve()

    def close(self) -> None:
        """Close the tables, end all calls, and stop to listen. Calling it again does nothing."""
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
                # Flight waits for every open stream, and a client may keep one for as long as it lives.
                _cut_connections(self.port)
                stopping.join(_GRACE_S)
            if self._thread is not None:
                self._thread.join()
            self._endpoint.close()


def _close(server: weakref.ref[ReplayServer]) -> None:
    """Close a server that is still there."""
    found = server()
    if found is not None:
        found.close()


def _by_name(tables: Iterable[ReplayTable]) -> dict[str, ReplayTable]:
    found: dict[str, ReplayTable] = {}
    for table in tables:
        if found.setdefault(table.name, table) is not table:
            raise ArgumentError(f"tables must have names of their own, and two are named {table.name!r}")
    if not found:
        raise ArgumentError("a replay server must have a table, it has none")
    return found


def _in_uri(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listen(service: Service, location: str, token: str | None, tls: tuple[bytes, bytes] | None) -> Endpoint:
    from samplebatch.service.endpoint import Endpoint

    try:
        return Endpoint(service, location, token, tls)
    except SampleBatchError:
        raise
    except Exception as error:
        raise ServiceError(f"a replay server must be able to listen at {location}, it is not: {error}") from error


def _cut_connections(port: int) -> None:
    """Shut down the connections of this process that have the port on their own side."""
    if not os.path.isdir(_DESCRIPTORS):
        return
    for name in os.listdir(_DESCRIPTORS):
        try:
            descriptor = int(name)
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    own = connection.getsockname()
                    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if isinstance(own, tuple) and own[1] == port and not listens:
                        connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It was closed meanwhile.
            continue

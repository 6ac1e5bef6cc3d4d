"""RemoteTable: a client's connection to one table of one service: its streams, and all that is no row of the table."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from samplebatch.arguments import positive, whole
from samplebatch.errors import ArgumentError, OwnershipError, ServiceError
from samplebatch.service.drawing import SampleSession
from samplebatch.service.fragment_forms import FragmentEncoder
from samplebatch.service.local_memory import read_secret
from samplebatch.service.open_steps import Environment, OpenSteps
from samplebatch.service.protocol import Draw, Fragment, LostError, read_json, short_text, write_json
from samplebatch.service.weights import pack_weights, unpack_weights
from samplebatch.service.writing import FragmentWriter, new_name
from samplebatch.transport.subscription import Publication

if TYPE_CHECKING:
    from samplebatch.service.link import Link, Patience
    from samplebatch.service.samples import Drawn

T = TypeVar("T")

_MAX_SESSIONS: Final = 4
"""Kinds of samples that a client has streams of at once."""
_END_S: Final = 1.0
"""Seconds that ending waits for other threads."""


class RemoteTable:
    """The methods of `ReplayClient` that neither send nor draw rows: its connection, the table's state, and weights."""

    def __init__(
        self,
        uri: str,
        table: str,
        *,
        token: str | None = None,
        tls_root_certs: str | os.PathLike[str] | None = None,
        writer: str | None = None,
        prefetch: int = 0,
        max_unacknowledged: int = 8,
        timeout_s: float | None = None,
        reconnect_s: float = 60.0,
        fragment_steps: int = 1,
        shared_memory: bool = True,
    ) -> None:
        self.uri, self.table = uri, table
        self.writer = new_name() if writer is None else short_text("writer", writer)
        self._prefetch = whole("prefetch", prefetch)
        self._max_unacknowledged = whole("max_unacknowledged", max_unacknowledged, 1)
        self._timeout_s = None if timeout_s is None else positive("timeout_s", timeout_s)
        self._reconnect_s = positive("reconnect_s", reconnect_s)
        self._fragment_steps = whole("fragment_steps", fragment_steps, 1)
        self._shared_memory = shared_memory
        self._token, self._tls_root_certs = token, tls_root_certs
        self._lock = threading.RLock()
        self._draws: dict[Any, Draw] = {}
        """Requests that were checked, by what was asked for."""
        self._closed = self._ended = False
        self._process = os.getpid()
        self._connect()

    def _connect(self) -> None:
        """Make a connection, which opens when it is first used."""
        self._certificates = None
        if self._tls_root_certs is not None:
            with open(self._tls_root_certs, "rb") as file:
                self._certificates = file.read()
        self._link = self._new_link()
        self._writer = FragmentWriter(self._link, self.table, self.writer, self._max_unacknowledged)
        self._encoder = FragmentEncoder()
        self._open_steps = OpenSteps(self._fragment_steps)
        self._sessions: OrderedDict[Draw, SampleSession] = OrderedDict()
        self._streaming: set[SampleSession] = set()
        """The sessions of streams, which their readers use without the lock."""
        self._nonce: str | None = None
        self._has_asked = not self._shared_memory
        self._holds_steps: bool | None = None

    def _new_link(self) -> Link:
        from samplebatch.service.link import Link

        return Link(self.uri, self._token, self._certificates, self._reconnect_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self._end()

    def close(self) -> None:
        """Wait until all fragments are acknowledged, and close the connection. Closing again does nothing.

        Another thread that waits for a sample gets an error.

        Raises
        ------
        SampleBatchError
            As `flush` does; the connection is closed then, too.
        """
        if self._ended:
            return
        self._cancel_draws()
        try:
            with self._lock:
                self._check_process()
                self._flush()
        finally:
            self._end()

    def _cancel_draws(self) -> None:
        """Let no thread wait for a sample, and so keep the lock, for as long as limits hold it back."""
        self._closed = True
        for session in (*list(self._sessions.values()), *list(self._streaming)):
            session.cancel()

    def _end(self) -> None:
        """Close the connection, and forget the fragments that are not acknowledged."""
        self._cancel_draws()
        if self._lock.acquire(timeout=_END_S):
            try:
                self._hang_up()
            finally:
                self._lock.release()
        else:
            # A thread waits until its fragments are taken, which limits may hold back for ever.
            threading.Thread(target=self._hang_up, name="samplebatch-end", daemon=True).start()

    def _hang_up(self) -> None:
        """Close all streams and the connection, once no thread uses them."""
        with self._lock:
            self._ended = True
            self._open_steps.clear()
            self._writer.close()
            while self._sessions:
                self._sessions.popitem()[1].close()
            self._link.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r}, {self.table!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = {
            "token": self._token,
            "tls_root_certs": self._tls_root_certs,
            "writer": self.writer,
            "prefetch": self._prefetch,
            "max_unacknowledged": self._max_unacknowledged,
            "timeout_s": self._timeout_s,
            "reconnect_s": self._reconnect_s,
            "fragment_steps": self._fragment_steps,
            "shared_memory": self._shared_memory,
        }
        return _restore, (type(self), self.uri, self.table, options)

    # Streams

    def flush(self) -> None:
        """Wait until the service has acknowledged all fragments of this client; raises as `extend` does."""
        with self._lock:
            self._open()
            self._flush()

    def _flush(self) -> None:
        self._send_steps(self._open_steps.groups())
        self._writer.flush()

    def _send_steps(self, groups: list[list[Environment]]) -> None:
        """Send the steps that are kept of some environments, a fragment for each list of them."""
        for environments in groups:
            rows = self._encoder.encode(self._open_steps.join(environments))
            sent = self._writer.counts.sent
            try:
                self._writer.put(rows, Fragment(timeout_s=self._timeout_s))
            finally:
                # An error may be that of an earlier fragment, and this one on its way.
                if self._writer.counts.sent > sent:
                    self._open_steps.drop(environments)

    def _with_session(self, draw: Draw, use: Callable[[SampleSession], T]) -> T:
        """Use the stream of a kind of samples, and drop it if its connection is gone."""
        self._flush()
        session = self._sessions.pop(draw, None)
        try:
            for other in self._sessions.values():
                other.settle()
            if session is None:
                session = self._new_session(draw, self._prefetch)
            while len(self._sessions) >= _MAX_SESSIONS:
                oldest = self._sessions.pop(next(iter(self._sessions)))
                oldest.close()
            self._sessions[draw] = session
            self._check_open()  # closing cancels the sessions that it finds
            return use(session)
        except LostError:
            while self._sessions:
                self._sessions.popitem()[1].close()
            self._forget_nonce()
            raise

    def _stream(self, draw: Draw, ahead: int) -> Generator[Drawn, None, None]:
        """Yield samples of a session of their own; where its connection is lost, go on with another one.

        Its connection is its own, too: the lock may be held by a thread whose fragments wait for this one to read.
        """
        self._open()
        link = self._new_link()
        session: SampleSession | None = None
        patience: Patience | None = None
        try:
            while True:
                try:
                    if session is None:
                        session = self._open_stream(link, draw, ahead)
                    drawn = session.next()
                except LostError as error:
                    self._close_stream(session)
                    session = None
                    patience = patience or link.patience()
                    patience.wait(error)
                    continue
                patience = None
                yield drawn
                del drawn
        finally:
            self._close_stream(session)
            link.close()

    def _open_stream(self, link: Link, draw: Draw, ahead: int) -> SampleSession:
        """Open the session of a stream, once the service can be reached."""
        self._open()
        # A session opens though nobody is there; and another service has another secret.
        link.retry(lambda: link.act("info", write_json({"table": self.table})))
        nonce = _read_nonce(link) if self._shared_memory else None
        session = link.retry(lambda: SampleSession(link, draw, ahead, nonce))
        self._streaming.add(session)
        self._check_open()  # closing cancels the sessions that it finds
        return session

    def _close_stream(self, session: SampleSession | None) -> None:
        if session is not None:
            self._streaming.discard(session)
            session.close()

    def _new_session(self, draw: Draw, ahead: int) -> SampleSession:
        return SampleSession(self._link, draw, ahead, self._find_nonce())

    def _forget_nonce(self) -> None:
        """Forget the secret of a service that may have been started again."""
        self._has_asked = not self._shared_memory
        self._nonce = None

    def _find_nonce(self) -> str | None:
        """Return the secret by which the service knows that this process is on its machine, if it is."""
        if not self._has_asked:
            self._nonce = _read_nonce(self._link)
            self._has_asked = True
        return self._nonce

    def _settle(self) -> None:
        """Wait until all fragments and updates of this client have been carried out."""
        with self._lock:
            self._open()
            self._flush()
            for session in self._sessions.values():
                session.settle()

    def _answer(self, action: str, body: Any = b"") -> dict[str, Any]:
        """Carry out an action with one result, and return it."""
        with self._lock:
            self._open()
            (raw,) = self._link.retry(lambda: self._link.act(action, body))
        return read_json(raw, "an answer")

    def _open(self) -> None:
        self._check_open()
        self._check_process()

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError("the client must be open to be used, it has been closed")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            # The threads of gRPC are not there in a forked child, which would wait for them for ever.
            raise OwnershipError(
                "a client of a service cannot be used in a forked child; start processes by 'spawn' or 'forkserver', "
                "which pickle it"
            )

    # Weights

    def publish(self, weights: Mapping[str, Any], name: str = "") -> int:
        """Publish weights for all clients of the service, in place of those before.

        Parameters
        ----------
        weights
            A dict of arrays and tensors, flat or nested, such as a `state_dict()`; they are copied.
        name
            The name to publish them under, where there are several models.

        Returns
        -------
        Their version: 1 for the first of this name.

        Raises
        ------
        ColumnTypeError, CapacityError, ServiceError
            If they are no such dict, too large, or the service cannot be reached.
        """
        return int(self._answer("publish", pack_weights(weights, name))["version"])

    def latest(self, newer_than: int = 0, name: str = "") -> Publication | None:
        """Return the newest weights.

        Parameters
        ----------
        newer_than
            The version that is known already.
        name
            The name that they are published under.

        Returns
        -------
        Their `version` and `value`; None if there are none that are newer.

        Raises
        ------
        ServiceError
            If the service cannot be reached.
        """
        with self._lock:
            self._open()
            request = write_json({"name": name, "newer_than": whole("newer_than", newer_than)})
            answer, *weights = self._link.retry(lambda: self._link.act("latest", request))
        version = int(read_json(answer, "an answer")["version"])
        return Publication(version, unpack_weights(weights[0])[1]) if weights else None

    # The table

    def __len__(self) -> int:
        return int(self.info()["size"])

    def info(self) -> dict[str, Any]:
        """Return how things stand, as `ReplayTable.info` does, once the fragments of this client are in the table."""
        self._settle()
        return self._table_info()

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty the table. `keep_statistics` must be false: episodes under way do not go on."""
        if keep_statistics:
            raise ArgumentError("keep_statistics must be false for a table of a service, whose writers may be many")
        self._settle()
        self._answer("reset", write_json({"table": self.table}))

    def set_limits(self, **limits: Any) -> dict[str, Any]:
        """Change limits of the table while it is used, as `ReplayTable.set_limits` does, and return `info`."""
        return self._answer("limits", write_json({"table": self.table, **limits}))

    def checkpoint(self) -> str:
        """Let the service write all tables to the disk, and return where it did.

        Raises
        ------
        ArgumentError
            If the service has no folder for checkpoints.
        """
        self._settle()
        return str(self._answer("checkpoint")["path"])

    def _table_info(self) -> dict[str, Any]:
        """Return the state of the table at once, also while other calls of this client wait."""
        return self._answer("info", write_json({"table": self.table}))


def _read_nonce(link: Link) -> str | None:
    """Ask a service for the place of its secret, and read that; None if it is on another machine."""
    (raw,) = link.retry(lambda: link.act("attach"))
    return read_secret(read_json(raw, "an answer"))


def _restore(kind: type[RemoteTable], uri: str, table: str, options: dict[str, Any]) -> RemoteTable:
    """Make a client of a pickled one."""
    return kind(uri, table, **options)

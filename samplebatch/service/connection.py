"""TableConnection: connection of a client to a table of one replay service."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from samplebatch import errors, names
from samplebatch.arguments import positive, whole
from samplebatch.batch.concat import join
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.samplers import Sample
from samplebatch.service.flight_process import flight_process
from samplebatch.service.fragments import FragmentEncoder, step_rows, with_info_columns
from samplebatch.service.protocol import Draw, Fragment, LostError, read_json, text, write_json
from samplebatch.service.samples import read_secret
from samplebatch.service.streams import FragmentWriter, SampleSession, WriteCounts
from samplebatch.service.weights import pack_weights, unpack_weights
from samplebatch.transport.broadcast import Publication

if TYPE_CHECKING:
    from samplebatch.service.link import Link, Patience


Environment = int | None
"""Number of an environment; None for a single environment without a number."""


class OpenSteps:
    """Buffer of a client's single steps, grouped by environment until a fragment is complete.

    - `count`: number of steps per environment that complete a fragment; the end of an episode completes a shorter
      fragment.

    >>> steps = OpenSteps(3)
    >>> for t in range(3):
    ...     steps.add(SampleBatch(obs=[t, -t], dones=[False, t == 1], env_id=[0, 1]))
    >>> steps.complete(), steps.join([0])["obs"]
    ([0, 1], array([0, 1, 2]))
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: dict[Environment, list[SampleBatch]] = {}
        self._form: Any = None
        self._added: list[Environment] = []
        """Environments of the last added step."""
        self._ended: set[Environment] = set()
        """Environments whose episode has ended."""

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def fits(self, rows: SampleBatch) -> bool:
        """Return whether rows have the same columns, dtypes and shapes as the buffered steps."""
        return not self._rows or self._form == _form_of(rows)

    def add(self, rows: SampleBatch) -> None:
        """Add a step with one row per environment; the rows are not copied."""
        self._form = _form_of(rows)
        numbered = names.ENV_ID in rows
        self._added = rows[names.ENV_ID].tolist() if numbered else [None]
        dones = rows[names.DONES].tolist()
        for row, (environment, done) in enumerate(zip(self._added, dones, strict=True)):
            self._rows.setdefault(environment, []).append(rows[row : row + 1])
            if done:
                self._ended.add(environment)

    def undo(self) -> None:
        """Remove the last added step, if it has not been sent."""
        for environment in reversed(self._added):
            rows = self._rows.get(environment, [])
            if rows:
                rows.pop()
            if not rows:
                self._rows.pop(environment, None)
            self._ended.discard(environment)
        self._added = []

    def complete(self) -> list[Environment]:
        """Return the environments that have `count` steps or whose episode has ended."""
        full = [environment for environment, rows in self._rows.items() if len(rows) >= self._count]
        return sorted({*full, *self._ended}, key=str)

    def groups(self) -> list[list[Environment]]:
        """Return all environments, grouped by fragment; all environments with an id share one fragment."""
        single: list[Environment] = [None] if None in self._rows else []
        numbered: list[Environment] = [environment for environment in self._rows if environment is not None]
        return [group for group in (single, numbered) if group]

    def join(self, environments: list[Environment]) -> SampleBatch:
        """Concatenate the steps of environments in the given order."""
        return join([row for environment in environments for row in self._rows[environment]])

    def drop(self, environments: list[Environment]) -> None:
        """Discard the steps of environments."""
        for environment in environments:
            del self._rows[environment]
            self._ended.discard(environment)
        self._added = []

    def clear(self) -> None:
        """Discard all steps."""
        self.drop(list(self._rows))


def _form_of(rows: SampleBatch) -> Any:
    columns = [(name, column.kind, column.dtype, column.row_shape) for name, column in rows._all().items()]
    return columns, rows._nested


T = TypeVar("T")

_MAX_DRAWS: Final = 64
"""Maximum number of cached, validated requests of a client."""

_MAX_SESSIONS: Final = 4
"""Maximum number of open sessions of a client."""
_END_S: Final = 1.0
"""Time in seconds for which `close` and `end` wait for other threads to release the lock."""


class TableConnection:
    """Connection of a `ReplayClient` to a table of one service; thread-safe. Parameters as in `ReplayClient`."""

    def __init__(
        self,
        uri: str,
        table: str,
        *,
        writer: str,
        token: str | None = None,
        tls_root_certs: str | os.PathLike[str] | None = None,
        prefetch: int = 0,
        max_unacknowledged: int = 8,
        timeout_s: float | None = None,
        reconnect_s: float = 60.0,
        fragment_steps: int = 1,
        shared_memory: bool = True,
    ) -> None:
        self.uri, self.table = uri, table
        self._prefetch = whole("prefetch", prefetch)
        self._timeout_s = None if timeout_s is None else positive("timeout_s", timeout_s)
        self._reconnect_s = positive("reconnect_s", reconnect_s)
        self._fragment_steps = whole("fragment_steps", fragment_steps, 1)
        self._shared_memory = shared_memory
        self._token = token
        self._certificates = None
        if tls_root_certs is not None:
            with open(tls_root_certs, "rb") as file:
                self._certificates = file.read()
        self._lock = threading.RLock()
        self._draws: dict[Any, Draw] = {}
        """Validated requests by arguments."""
        self._known_weights: dict[str, tuple[int, str]] = {}
        """Version and epoch of the last received or published weights, by name."""
        self._closed = self._ended = False
        self._process = os.getpid()
        flight_process.register_client(self)
        self._link = self.new_link()
        self._writer = FragmentWriter(self._link, table, writer, whole("max_unacknowledged", max_unacknowledged, 1))
        self._encoder = FragmentEncoder()
        self._open_steps = OpenSteps(self._fragment_steps)
        self._sessions: OrderedDict[Draw, SampleSession] = OrderedDict()
        """Sessions by request, the most recently used last."""
        self._streaming: set[SampleSession] = set()
        """Sessions of streams; readers use these sessions without the lock."""
        self._nonce: str | None = None
        self._nonce_is_read = not shared_memory
        self._holds_steps: bool | None = None

    def new_link(self) -> Link:
        """Create another connection to the service."""
        from samplebatch.service.link import Link

        return Link(self.uri, self._token, self._certificates, self._reconnect_s)

    def check_open(self) -> None:
        """Raise ServiceError if the client is closed, or OwnershipError in a forked child."""
        if self._closed:
            raise errors.ServiceError("the client must be open, got a closed one")
        if self._process != os.getpid():
            self._check_process()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            # gRPC's threads do not exist in a forked child, which would wait for them forever.
            raise errors.OwnershipError(
                "a client of a service cannot be used in a forked child; start processes by 'spawn' or 'forkserver', "
                "which pickle it"
            )

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the process that created the client."""
        return self._process != os.getpid()

    # Closing

    def close(self) -> None:
        """Wait until all fragments are acknowledged, then close the connection; raises the same errors as `flush`."""
        if self._ended or self.is_forked:
            return
        self.cancel_draws(idle=False)
        try:
            if not self._lock.acquire(timeout=_END_S):
                # Another thread has requested a sample after `cancel_draws`.
                self.cancel_draws()
                self._lock.acquire()
            try:
                self._flush()
                self._settle_updates()
            finally:
                self._lock.release()
        finally:
            self.end()

    def cancel_draws(self, *, idle: bool = True) -> None:
        """Reject new calls, and interrupt threads that hold the lock while they wait for a sample.

        - `idle`: whether to also cancel idle sessions; their in-flight updates are lost.
        """
        if self.is_forked:
            return
        self._closed = True
        for session in (*list(self._sessions.values()), *list(self._streaming)):
            if idle or session.is_waiting:
                session.cancel()

    def end(self) -> None:
        """Close the connection and discard unacknowledged fragments."""
        if self.is_forked:
            return
        self.cancel_draws()
        if self._lock.acquire(timeout=_END_S):
            try:
                self._hang_up()
            finally:
                self._lock.release()
        else:
            # A thread waits for acknowledgements that limits may delay indefinitely.
            threading.Thread(target=self._hang_up, name="samplebatch-end", daemon=True).start()

    def _hang_up(self) -> None:
        with self._lock:
            self._ended = True
            self._open_steps.clear()
            self._writer.close()
            self._close_sessions()
            self._link.close()

    def _close_sessions(self) -> None:
        while self._sessions:
            self._sessions.popitem()[1].close()

    # Writing

    @property
    def written(self) -> WriteCounts:
        """Counts of sent fragments."""
        return self._writer.counts

    def add(self, batch: Any, buffer_ids: Any, columns: dict[str, Any]) -> None:
        """Send a step, or buffer the step until its fragment is complete."""
        rows = step_rows(batch, buffer_ids, columns)
        # The rows are copied, because the caller may overwrite the values before the service acknowledges them.
        rows = rows if buffer_ids is None else rows.copy()
        if self._fragment_steps == 1:
            self._put(self._encoder.encode(rows), Fragment())
            return
        with self._lock:
            self.check_open()
            if not self._open_steps.fits(rows):
                self._send_steps(self._open_steps.groups())
            self._open_steps.add(rows)
            complete = self._open_steps.complete()
            try:
                self._send_steps([complete] if complete else [])
            except BaseException:
                self._open_steps.undo()
                raise

    def extend(self, batch: Any, priorities: Any = None, key: str | None = None) -> None:
        """Send all steps of a batch as one fragment."""
        single = None if priorities is None or np.ndim(priorities) else float(priorities)
        rows = self._encoder.encode(batch, priorities if single is None else None)
        self._put(rows, Fragment(key=key, priority=single))

    def add_fragment(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Send a fragment from a collector; for a table of steps, infos are converted to separate columns."""
        with self._lock:
            if self._holds_steps is None:
                self._holds_steps = self.table_info()["items"] == "steps"
            rows = with_info_columns(fragment) if self._holds_steps else fragment
            self._put(self._encoder.encode(rows), Fragment())

    def _put(self, rows: Any, fragment: Fragment) -> None:
        with self._lock:
            self.check_open()
            if self._open_steps:
                self._send_steps(self._open_steps.groups())
            if rows.num_rows:
                self._send(rows, Fragment(0, self._timeout_s, fragment.key, fragment.priority))

    def _send_steps(self, groups: list[list[Environment]]) -> None:
        for environments in groups:
            rows = self._encoder.encode(self._open_steps.join(environments))
            num_sent = self._writer.counts.sent
            try:
                self._send(rows, Fragment(timeout_s=self._timeout_s))
            finally:
                # An error may concern an earlier fragment, although this fragment was sent.
                if self._writer.counts.sent > num_sent:
                    self._open_steps.drop(environments)

    def _send(self, rows: Any, fragment: Fragment) -> None:
        """Wait for earlier priority updates and send a fragment; then raise the error of a rejected update."""
        try:
            self._settle_updates()
        except errors.ServiceError:
            raise
        except errors.SampleBatchError:
            self._writer.put(rows, fragment)
            raise
        self._writer.put(rows, fragment)

    def flush(self) -> None:
        """Wait until the service has applied all fragments and updates of this client."""
        with self._lock:
            self.check_open()
            self._flush()
            self._settle_updates()

    def _flush(self) -> None:
        if self._open_steps:
            self._send_steps(self._open_steps.groups())
        self._writer.flush()

    # Sampling

    def _find_draw(self, batch_size: int, mode: str | None, options: Mapping[str, Any]) -> Draw:
        """Validate a request as the service does; equal requests are validated once."""
        # The cache key contains types: True equals 1, but is invalid as a number.
        arguments = batch_size, type(batch_size), mode, *options.items(), *map(type, options.values())
        try:
            return self._draws[arguments]
        except (TypeError, KeyError) as error:
            draw = Draw(self.table, batch_size, mode, timeout_s=self._timeout_s, **options)
            checked = Draw.read(draw.write(), "the request")
            if isinstance(error, KeyError):
                if len(self._draws) >= _MAX_DRAWS:
                    self._draws.clear()
                self._draws[arguments] = checked
            return checked

    def sample(self, batch_size: int, mode: str | None, options: Mapping[str, Any]) -> Sample[Any, Any]:
        """Return the next sample for a request; the first sample of a request opens a session."""
        draw = self._find_draw(batch_size, mode, options)
        with self._lock:
            self.check_open()
            try:
                return self._session(draw).next()
            except LostError as error:
                patience = self._link.recover(error, self._drop_sessions)
            return self._link.retry(lambda: self._session(draw).next(), self._drop_sessions, patience)

    def update_weight(self, indices: Any, priorities: Any, generations: Any) -> None:
        """Send new priorities in the session of the last sample.

        With prefetching, or after an interrupted sample, updates are sent in a separate session. In the sample's
        session, an update would wait for samples that limits may block, while the next insert waits for the update.
        """
        with self._lock:
            self.check_open()
            draw, session = next(reversed(self._sessions.items()), (Draw(self.table), None))
            if self._prefetch or (session is not None and session.is_waiting):
                draw = Draw(self.table, ahead=False)
            self._link.retry(lambda: self._session(draw).update(indices, priorities, generations), self._drop_sessions)

    def _session(self, draw: Draw) -> SampleSession:
        """Flush fragments, and return the session of a request; open the session if necessary.

        Without prefetching, first wait until the service has answered the priority updates of other sessions.
        """
        if self._open_steps or self._writer.pending:
            self._flush()
        sessions = self._sessions
        if not self._prefetch:
            for request, other in sessions.items():
                if request != draw and other.has_updates:
                    other.settle()
        session = sessions.get(draw)
        if session is not None and session.is_broken:
            sessions.pop(draw).close()
            session = None
        if session is None:
            session = SampleSession(self._link, draw, 0 if draw.ahead is False else self._prefetch, self._find_nonce())
            while len(sessions) >= _MAX_SESSIONS:
                oldest = sessions.pop(next(iter(sessions)))
                oldest.settle()
                oldest.close()
            sessions[draw] = session
        else:
            sessions.move_to_end(draw)
        if self._closed:
            # `cancel_draws` may have missed this session.
            self.check_open()
        return session

    def _drop_sessions(self) -> None:
        """Close the sessions of a lost connection and discard the nonce; a restarted service has a different nonce."""
        self._close_sessions()
        self._nonce_is_read = not self._shared_memory
        self._nonce = None

    def _settle_updates(self) -> None:
        if any(session.has_updates for session in self._sessions.values()):
            self._link.retry(self._settle_sessions, self._drop_sessions)

    def _settle_sessions(self) -> None:
        rejections: list[errors.SampleBatchError] = []
        for session in list(self._sessions.values()):
            while session.has_updates:
                try:
                    session.settle()
                except LostError:
                    raise
                except errors.SampleBatchError as error:
                    rejections.append(error)
        if rejections:
            raise rejections[0]

    def stream(
        self, batch_size: int, mode: str | None, options: Mapping[str, Any], prefetch: int
    ) -> Generator[Sample[Any, Any], None, None]:
        """Yield the samples of a separate session; open another session if the connection is lost.

        The session has its own connection. Another thread may hold the client's lock while a limit blocks the thread's
        fragments until this session draws samples.
        """
        draw = self._find_draw(batch_size, mode, options)
        self.check_open()
        link = self.new_link()
        session: SampleSession | None = None
        patience: Patience | None = None
        try:
            while True:
                self._check_process()
                try:
                    if session is None:
                        session = self._open_stream(link, draw, prefetch)
                    sample = session.next()
                except LostError as error:
                    self._close_stream(session)
                    session = None
                    patience = patience or link.patience()
                    patience.wait(error)
                    continue
                patience = None
                yield sample
                del sample
        finally:
            self._close_stream(session)
            link.close()

    def _open_stream(self, link: Link, draw: Draw, ahead: int) -> SampleSession:
        self.check_open()
        # Opening a session succeeds even if no service is running, and a restarted service has another secret.
        link.retry(lambda: link.act("info", write_json({"table": self.table})))
        nonce = link.retry(lambda: read_nonce(link)) if self._shared_memory else None
        session = link.retry(lambda: SampleSession(link, draw, ahead, nonce))
        self._streaming.add(session)
        self.check_open()  # `cancel_draws` may have missed this session
        return session

    def _close_stream(self, session: SampleSession | None) -> None:
        if session is not None and not self.is_forked:
            self._streaming.discard(session)
            session.close()

    def _find_nonce(self) -> str | None:
        """Return the secret that proves that the client and the service share a machine; None if they do not."""
        if not self._nonce_is_read:
            self._nonce = self._link.retry(lambda: read_nonce(self._link))
            self._nonce_is_read = True
        return self._nonce

    # Weights

    def publish(self, weights: Mapping[str, Any], name: str) -> int:
        """Publish weights; return their version."""
        with self._lock:
            return self.publish_packed(pack_weights(weights, name, self._known_weights.get(name, (0, ""))[0]), name)

    def publish_packed(self, packed: Any, name: str) -> int:
        """Publish the result of `pack_weights`; return the version of the weights."""
        with self._lock:
            self._known_weights[name] = version = _read_version(self._act("publish", packed))
        return version[0]

    def weights_version(self, name: str) -> int:
        """Return the version of the service's newest weights; 0 if the service has no weights."""
        return _read_version(self._act("latest", write_json({"name": name, "version_only": True})))[0]

    def latest(self, newer_than: int, name: str) -> Publication | None:
        """Return the newest weights; None if version `newer_than` is still the newest."""
        with self._lock:
            self.check_open()
            request = {"name": name, "newer_than": whole("newer_than", newer_than)}
            version, epoch = self._known_weights.get(name, (0, ""))
            if version == request["newer_than"] and epoch:
                request["epoch"] = epoch
            body = write_json(request)
            answer, *weights = self._link.retry(lambda: self._link.act("latest", body))
            newest = _read_version(read_json(answer, "an answer"))
            if not weights:
                return None
            self._known_weights[name] = newest
        return Publication(newest[0], unpack_weights(weights[0])[1])

    # The table

    def info(self) -> dict[str, Any]:
        """Return the state of the table after flushing this client's fragments."""
        self.flush()
        return self.table_info()

    def table_info(self) -> dict[str, Any]:
        """Return the state of the table immediately, without flushing."""
        return self._act("info", write_json({"table": self.table}))

    def reset(self) -> None:
        """Remove all items of the table."""
        self.flush()
        self._act("reset", write_json({"table": self.table}))

    def set_limits(self, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Change limits of the table; return the state of the table."""
        return self._act("limits", write_json({"table": self.table, **limits}))

    def checkpoint(self) -> str:
        """Request a checkpoint of all tables from the service; return the path of the checkpoint."""
        self.flush()
        return str(self._act("checkpoint")["path"])

    def _act(self, action: str, body: Any = b"") -> dict[str, Any]:
        with self._lock:
            self.check_open()
            (raw,) = self._link.retry(lambda: self._link.act(action, body))
        return read_json(raw, "an answer")


def _read_version(answer: Mapping[str, Any]) -> tuple[int, str]:
    try:
        return whole("version", answer.get("version")), text("epoch", answer.get("epoch", ""))
    except errors.ArgumentError as error:
        raise errors.FormatError(f"an answer must have the version of weights: {error}") from error


def read_nonce(link: Link) -> str | None:
    """Read the secret of a service from shared memory; None if the service runs on another machine."""
    (raw,) = link.act("attach")
    return read_secret(read_json(raw, "an answer"))

"""ReplayClient: a table of one or several replay services, with the methods of a replay buffer."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import positive, whole
from samplebatch.batch.delivery import Delivery, as_array
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.extending import as_flat, row_ids
from samplebatch.buffer.prioritized import rows_of_sequences
from samplebatch.buffer.sampling import Sample, convert_sample
from samplebatch.errors import (
    ArgumentError,
    ColumnLengthError,
    OwnershipError,
    RowIndexError,
    SampleBatchError,
    ServiceError,
)
from samplebatch.service.connection import TableConnection
from samplebatch.service.flight_process import flight_process
from samplebatch.service.protocol import short_text
from samplebatch.service.streams import WriteCounts, new_name
from samplebatch.service.weights import pack_weights
from samplebatch.transport.broadcast import Publication

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Device, Floats


_WEIGHT_AGE_S: Final = 1.0
"""Seconds for which a shard's weight is believed."""
_MAX_HOMES: Final = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Shard:
    """One of the services that a table is spread over, for `Shards`.

    Attributes
    ----------
    number
        Its place among them.
    connection
        Its connection.
    share
        Its part of the inserts, relative to the others'.
    weight, weighed_at
        The sum of the weights by which its items are drawn, and when it told, in seconds of the monotonic clock.
    lost_at
        When it could not be reached; None if it could.
    """

    number: int
    connection: TableConnection
    share: float
    weight: float = 0.0
    weighed_at: float = -math.inf
    lost_at: float | None = None


class Shards:
    """The services that a table is spread over, for `ReplayClient`.

    One that cannot be reached is left out, and tried again after a while.

    Parameters
    ----------
    connections
        A connection to each.
    shares
        The part of the inserts that each gets, relative to the others.
    retry_s
        Seconds after which one that could not be reached is tried again.
    seed
        Of the generator that draws shards.

    Raises
    ------
    ArgumentError
        If there are none, or not one share above 0 for each.
    """

    def __init__(
        self, connections: Sequence[TableConnection], shares: Sequence[float] | None, retry_s: float, seed: Any
    ) -> None:
        given = [1.0] * len(connections) if shares is None else [positive("a share", share) for share in shares]
        if not connections or len(given) != len(connections):
            raise ArgumentError(f"shares must be one for each address, {len(connections)}, got {len(given)}")
        self.all = [
            Shard(number, connection, share)
            for number, (connection, share) in enumerate(zip(connections, given, strict=True))
        ]
        self._retry_s = positive("retry_s", retry_s)
        self._rng = np.random.default_rng(seed)
        self._homes: dict[Any, Shard] = {}

    def here(self) -> list[Shard]:
        """Return the shards that can be reached, after those that could not be long enough ago are tried again.

        Raises
        ------
        ServiceError
            If none can be reached.
        """
        now = time.monotonic()
        for shard in self.all:
            if shard.lost_at is not None and now - shard.lost_at >= self._retry_s:
                self._try_again(shard)
        found = [shard for shard in self.all if shard.lost_at is None]
        if not found:
            uris = ", ".join(shard.connection.uri for shard in self.all)
            raise ServiceError(f"one of the replay services at {uris} must be reachable, none is")
        return found

    def _try_again(self, shard: Shard) -> None:
        """Send a lost shard the fragments that it has not acknowledged, and take it back if that works."""
        shard.lost_at = None
        try:
            # Not flush alone, which calls no service if there is nothing to send.
            self.on(shard, TableConnection.info)
        except ServiceError:
            return
        _log.warning("the replay service at %s is back", shard.connection.uri)
        self._homes.clear()

    def on(self, shard: Shard, use: Callable[[TableConnection], T]) -> T:
        """Use the connection of a shard; one that cannot be reached is lost for a while.

        Raises
        ------
        ServiceError
            If it cannot be reached.
        SampleBatchError
            As the call does.
        """
        try:
            return use(shard.connection)
        except ServiceError as error:
            if shard.lost_at is None:
                _log.warning("the replay service at %s is left out: %s", shard.connection.uri, error)
            shard.lost_at = time.monotonic()
            self._homes.clear()
            raise

    def on_all(self, use: Callable[[TableConnection], T]) -> list[T]:
        """Use every shard that can be reached, and return the results.

        Raises
        ------
        ServiceError
            If none can be reached.
        SampleBatchError
            As the call does.
        """
        found = []
        for shard in self.here():
            try:
                found.append(self.on(shard, use))
            except ServiceError:
                continue
        if not found:
            self.here()
        return found

    def home(self, key: Any) -> Shard:
        """Return the shard of a stream, by weighted rendezvous hashing: when one is lost, only its streams move.

        Each shard has a number by the hash of the stream and its own address, u in (0, 1); that of the largest
        -share / ln u has the stream (Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005).

        Raises
        ------
        ServiceError
            If none can be reached.
        """
        shards = self.here()
        found = self._homes.get(key)
        if found is None:
            if len(self._homes) >= _MAX_HOMES:
                self._homes.clear()
            found = self._homes[key] = max(shards, key=lambda shard: -shard.share / math.log(_hash(key, shard)))
        return found

    def draw(self) -> Shard:
        """Draw a shard in proportion to the weights of its items; in proportion to the shares while there are none.

        Raises
        ------
        ServiceError
            If none can be reached.
        """
        now = time.monotonic()
        for shard in self.here():
            if now - shard.weighed_at >= _WEIGHT_AGE_S:
                try:
                    shard.weight = float(self.on(shard, TableConnection.info)["weight"])
                    shard.weighed_at = now
                except ServiceError:
                    continue
        shards = self.here()
        weights = np.array([shard.weight for shard in shards])
        if not weights.sum():
            weights = np.array([shard.share for shard in shards])
        return shards[int(self._rng.choice(len(shards), p=weights / weights.sum()))]


def merge(streams: Sequence[Iterator[Any]]) -> Iterator[tuple[int, Any]]:
    """Yield the items of several streams as they come, each with the number of its stream.

    Each is read by a thread of its own, one item ahead. A stream that raises ServiceError is over.

    Raises
    ------
    ServiceError
        If all streams are over, the last with one.
    OwnershipError
        In a forked child, which has none of the threads.
    SampleBatchError
        As a stream does.
    """
    found: queue.Queue[tuple[int, Any]] = queue.Queue(len(streams))
    over = threading.Event()

    def put(item: tuple[int, Any]) -> None:
        while not over.is_set():
            with suppress(queue.Full):
                found.put(item, timeout=0.2)
                return

    def read(number: int, stream: Iterator[Any]) -> None:
        try:
            for item in stream:
                put((number, item))
                del item
                if over.is_set():
                    return
            put((number, ServiceError("the stream has ended")))
        except SampleBatchError as error:
            put((number, error))
        finally:
            stream.close()  # type: ignore[attr-defined]

    threads = [
        threading.Thread(target=read, args=(number, stream), name="samplebatch-merge", daemon=True)
        for number, stream in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    left, process = len(streams), os.getpid()
    try:
        while True:
            if process != os.getpid():
                raise OwnershipError(
                    "a stream of samples must be read by the process that opened it, got a forked child"
                )
            number, item = found.get()
            if isinstance(item, ServiceError):
                left -= 1
                if left:
                    continue
            if isinstance(item, SampleBatchError):
                raise item
            yield number, item
            del item
    finally:
        over.set()


def _hash(key: Any, shard: Shard) -> float:
    """Return a number in (0, 1) by a stream and the address of a shard."""
    digest = hashlib.blake2b(f"{key}\n{shard.connection.uri}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2.0**64


T = TypeVar("T")

_SHARD_BIT: Final = 48
"""Indices have the number of their shard from this bit on; those of a table are far below."""
_MASK: Final = (1 << _SHARD_BIT) - 1
_SUMS: Final = ("size", "capacity", "nbytes", "weight", "inserted", "sampled")


class ReplayClient:
    """A table of one or several replay services, with the methods of a replay buffer, for writers and learners.

    Fragments are sent without waiting for each to be acknowledged; `flush`, and all methods that look at the table,
    wait for those of this client. A sample is drawn when it is asked for, so that with the same seed the samples are
    those of a local buffer; with `prefetch`, some are drawn ahead.

    Where client and service share a machine, large samples are mapped from shared memory; else their arrays lie in the
    memory that they were received in. Arrays that were received are read-only.

    A client that loses the service tries to reach it again, sends the fragments that were not acknowledged once more,
    and goes on. It goes to other processes by pickle, and connects there by itself; a forked child cannot use it, and
    leaves it to its parent when it closes it. Threads may share one.

    With several addresses the table is spread over services. The steps of an environment, or else of an episode, go to
    one service, so that trajectories stay whole; which one is chosen by hashing, in proportion to the shares. Each
    sample comes from one service, which is drawn in proportion to the weight of its table: the number of its items, or
    the sum of their priorities. A row is thus drawn as often as from one table of all rows; weights are asked for once
    a second. A service that cannot be reached is left out, and tried again later; its environments write to the others
    meanwhile. Fragments that it has not acknowledged are kept, and sent once it is back: see `written`.

    Parameters
    ----------
    uri
        The service's address, such as `"grpc://127.0.0.1:5000"`, or a list of the addresses of several services.
    table
        The table's name, which all services have.
    token
        The word that the service wants; None for none.
    tls_root_certs
        Path of the certificates, in PEM, that the service's own is checked by; None for those of the system.
    writer
        The name of the writer, which the service shows, and whose environments have rings of their own; by default one
        that nobody else has. At most 256 bytes in UTF-8.
    prefetch
        How many samples to have drawn ahead of the one that is handed out.
    max_unacknowledged
        How many fragments may be under way before the oldest is acknowledged.
    timeout_s
        Seconds for which the limits of the table may hold back an insert or a sample; None for as long as they do.
    reconnect_s
        Seconds for which to try again where the service cannot be reached; by default 60, or 1 before one of several
        services is left out.
    fragment_steps
        The steps of an environment that `add` makes a fragment of. More of them take less time a step, and are in the
        table later.
    shared_memory
        Whether to map samples from shared memory, where the service is on this machine.
    shares
        The part of the inserts that each service gets, relative to the others; equal parts by default.
    seed
        Seed of the generator that draws one of several services.
    retry_s
        Seconds after which one of several services that could not be reached is tried again.

    Raises
    ------
    ArgumentError
        If a number is not of its values, an address is none, there are no addresses or two are the same, or there is
        not one share above 0 for each.
    CapacityError
        If the writer's name has more than 256 bytes in UTF-8.
    OSError
        If the certificates cannot be read.
    OwnershipError
        If this process was forked from one that used a replay service: gRPC's threads do not exist here.

    Attributes
    ----------
    uris, table, writer
        The addresses, and the names as given.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
    >>> table = ReplayTable("prio", kind="prioritized", capacity=100, alpha=0.6, seed=1)
    >>> with ReplayServer([table]) as server, ReplayClient(server.uri, "prio") as buffer:
    ...     buffer.extend(SampleBatch(obs=[1, 2], actions=[0, 1], rewards=[0.0, 1.0], terminateds=[False, True]))
    ...     batch, indices = buffer.sample(4)
    ...     buffer.update_weight(indices, batch.rew + 1.0, generation=batch.generation)
    ...     len(buffer), bool((batch.obs == indices + 1).all())
    (2, True)

    A table that is spread over two services:

    >>> with (
    ...     ReplayServer([ReplayTable("replay", capacity=100)]) as one,
    ...     ReplayServer([ReplayTable("replay", capacity=100)]) as two,
    ...     ReplayClient([one.uri, two.uri], "replay", seed=0) as buffer,
    ... ):
    ...     steps = np.arange(8)
    ...     buffer.extend(SampleBatch(obs=steps, actions=steps, rewards=steps, terminateds=steps >= 0, eps_id=steps))
    ...     batch, indices = buffer.sample(4)
    ...     len(buffer), batch.obs.shape
    (8, (4,))
    """

    def __init__(
        self,
        uri: str | Sequence[str],
        table: str,
        *,
        token: str | None = None,
        tls_root_certs: str | os.PathLike[str] | None = None,
        writer: str | None = None,
        prefetch: int = 0,
        max_unacknowledged: int = 8,
        timeout_s: float | None = None,
        reconnect_s: float | None = None,
        fragment_steps: int = 1,
        shared_memory: bool = True,
        shares: Sequence[float] | None = None,
        seed: int | None = None,
        retry_s: float = 5.0,
    ) -> None:
        self.uris, self.table = [uri] if isinstance(uri, str) else list(uri), table
        if len(set(self.uris)) < len(self.uris):
            raise ArgumentError("addresses must be different services, some are the same")
        self.writer = new_name() if writer is None else short_text("writer", writer)
        options: dict[str, Any] = {
            "token": token,
            "tls_root_certs": tls_root_certs,
            "writer": self.writer,
            "prefetch": prefetch,
            "max_unacknowledged": max_unacknowledged,
            "timeout_s": timeout_s,
            "reconnect_s": (60.0 if len(self.uris) == 1 else 1.0) if reconnect_s is None else reconnect_s,
            "fragment_steps": fragment_steps,
            "shared_memory": shared_memory,
        }
        self._pickled = {**options, "shares": shares, "seed": seed, "retry_s": retry_s}
        connections = [TableConnection(address, table, **options) for address in self.uris]
        self._shards = Shards(connections, shares, retry_s, seed)
        self._only = connections[0] if len(connections) == 1 else None
        """The connection, if there is one service: shards are for several."""
        self._lock = threading.RLock()
        self._known_versions: dict[str, int] = {}
        """Version of the last weights that were received or published, by name, with several services."""
        self._fragments = 0
        """Number of fragments without a stream; a hash of it selects the service of each."""
        flight_process.register_client(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self._end()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uris[0] if self._only else self.uris!r}, {self.table!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.uris, self.table, self._pickled)

    def close(self) -> None:
        """Wait until all fragments are acknowledged, and close the connections. Closing again does nothing.

        Another thread that waits for a sample gets an error. A forked child only drops the client: the connections and
        the fragments belong to its parent. One of several services that cannot be reached is not waited for.

        Raises
        ------
        SampleBatchError
            As `flush` does; all connections are closed then, too.
        """
        if self._only is not None:
            self._only.close()
            return
        for shard in self._shards.all:
            shard.connection.cancel_draws(idle=False)
        with self._lock, ExitStack() as stack:
            for shard in self._shards.all:
                stack.callback(_close, shard.connection)

    def _end(self) -> None:
        """Close the connections, and forget the fragments that are not acknowledged."""
        for shard in self._shards.all:
            shard.connection.end()

    @property
    def lost(self) -> list[str]:
        """The addresses of the services, of several, that are left out, as they could not be reached."""
        return [shard.connection.uri for shard in self._shards.all if shard.lost_at is not None]

    @property
    def written(self) -> WriteCounts:
        """The fragments and rows that the services have acknowledged, and those that they refused.

        Steps that `fragment_steps` keeps are in no fragment yet.
        """
        if self._only is not None:
            return self._only.written
        counts = [asdict(shard.connection.written) for shard in self._shards.all]
        return WriteCounts(**{name: sum(own[name] for own in counts) for name in counts[0]})

    # Writing

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        **columns: Any,
    ) -> None:
        """Send a step, or one or several steps of some environments.

        With `fragment_steps`, steps are kept until an environment has as many, or its episode ends, and go as one
        fragment. `flush`, and all methods that look at the table, send those that are kept.

        Parameters
        ----------
        batch
            Its values by name, as `ReplayBuffer.add` takes them.
        buffer_ids
            The environment of each row, shape (n,), if the values have a leading axis; None for a single step.

        Raises
        ------
        SampleBatchError
            As `extend` does.
        """
        if self._only is not None:
            self._only.add(batch, buffer_ids, columns)
            return
        if buffer_ids is None:
            self._send("", lambda connection: connection.add(batch, None, columns))
            return
        ids = np.asarray(buffer_ids).reshape(-1)
        steps = Batch({**({} if batch is None else batch), **columns})
        for key, rows in self._partition(ids):
            part, own_ids = (steps, ids) if rows is None else (steps[rows], ids[rows])
            self._send(key, partial(TableConnection.add, batch=part, buffer_ids=own_ids, columns={}))

    def extend(self, batch: Any, *, priorities: Any = None, key: str | None = None) -> None:
        """Send all steps of a batch as one fragment.

        Parameters
        ----------
        batch
            What `ReplayBuffer.extend` takes.
        priorities
            One for each step, shape (n,), or of a table of fragments one number; by default the largest so far.
        key
            The fragment's key, for a table that is read by key.

        Raises
        ------
        ServiceError
            If the service cannot be reached.
        LimitTimeoutError
            If the table's limits hold back a fragment for `timeout_s` seconds; that one is not inserted.
        SampleBatchError
            If the service refuses a fragment, this one or an earlier one; that one is not inserted. Refused in this
            process are what is no batch, and objects that would have to be pickled.

        Notes
        -----
        The fragment is a view of the batch's arrays until the service has acknowledged it, so they must not be written
        over before `flush` has returned.
        """
        if self._only is not None:
            self._only.extend(batch, priorities, key)
            return
        for home, part, rows in self._split(batch):
            own = priorities if rows is None or not np.ndim(priorities) else np.asarray(as_array(priorities))[rows]
            self._send(home, partial(TableConnection.extend, batch=part, priorities=own, key=key))

    def _add_fragment(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Send a fragment of a collector or worker, with the ids of its environments and episodes; raises as `extend`.

        The infos of steps become columns of their own, as in the buffers that collectors write to; infos without
        anything are left out. In tables of fragments they stay as they are.
        """
        if self._only is not None:
            self._only.add_fragment(fragment)
            return
        for home, part, _ in self._split(fragment):
            self._send(home, partial(TableConnection.add_fragment, fragment=part))

    def _split(self, batch: Any) -> Iterator[tuple[Any, Any, npt.NDArray[np.bool_] | None]]:
        """Yield the parts of a batch that go to different services: a key of the service, the part, and its rows.

        Batches of several policies are not split: all of one go where the first environment of the first policy does.
        """
        parts = getattr(batch, "policy_batches", None)
        steps = as_flat(batch if parts is None else next(iter(parts.values()), {}))
        column = next((name for name in (names.ENV_ID, names.EPS_ID) if name in steps), None)
        if column is None or not steps.count:
            self._fragments += 1
            yield self._fragments, batch, None
            return
        ids = row_ids(steps, column, steps.count)
        if parts is not None:
            yield ids[0], batch, None
            return
        for key, rows in self._partition(ids):
            yield key, (steps if rows is None else steps[rows]), rows

    def _partition(self, ids: npt.NDArray[Any]) -> list[tuple[Any, npt.NDArray[np.bool_] | None]]:
        """Partition rows by service: a key of each service, and the mask of its rows; None for all."""
        with self._lock:
            keys: dict[Shard, list[Any]] = {}
            for key in np.unique(ids).tolist():
                keys.setdefault(self._shards.home((self.writer, key)), []).append(key)
        if len(keys) == 1:
            return [(own[0], None) for own in keys.values()]
        return [(own[0], np.isin(ids, own)) for own in keys.values()]

    def _send(self, key: Any, send: Callable[[TableConnection], None]) -> None:
        """Send a fragment to the shard that owns a key; the connection retains it until it is acknowledged."""
        with self._lock:
            while True:
                shard = self._shards.home((self.writer, key))
                sent = shard.connection.written.sent
                try:
                    self._shards.on(shard, send)
                    return
                except ServiceError:
                    if shard.connection.written.sent > sent:
                        return

    def flush(self) -> None:
        """Wait until all fragments and priorities of this client are in the table, of services that can be reached.

        Raises
        ------
        SampleBatchError
            As `extend` does; or if a service refuses priorities.
        """
        self._on_all(TableConnection.flush)

    # Sampling

    def sample(
        self,
        batch_size: int,
        *,
        n_step: int | None = None,
        gamma: float | None = None,
        beta: float | None = None,
        key: str | None = None,
        seed: int | None = None,
        device: Device | None = None,
        floats: Floats | None = None,
    ) -> Sample[Any, Any]:
        """Draw steps, or fragments from a table of fragments.

        Parameters
        ----------
        batch_size
            How many.
        n_step, gamma, device, floats
            As `ReplayBuffer.sample` takes them; the n-step returns are computed by the service.
        beta
            The exponent of importance weights, in place of the table's.
        key
            The key of the fragment, in a table that is read by key.
        seed
            Of a generator for these samples alone; None for the table's own.

        Returns
        -------
        Sample
            The rows: a `Batch`, as the buffer gives them, or fragments as they were inserted; and where they are, for
            `update_weight`, of fragments their numbers.

        Raises
        ------
        ServiceError
            If the service cannot be reached.
        LimitTimeoutError
            If the table's limits hold the sample back for `timeout_s` seconds.
        SampleBatchError
            If the service refuses.
        """
        options = {"n_step": n_step, "gamma": gamma, "beta": beta, "key": key, "seed": seed}
        return Delivery(device, floats).one(self._draw(batch_size, None, options), convert_sample)

    def sample_sequences(
        self,
        batch_size: int,
        length: int,
        *,
        burn_in: int = 0,
        padded: bool = True,
        beta: float | None = None,
        seed: int | None = None,
        device: Device | None = None,
        floats: Floats | None = None,
    ) -> Sample[Batch, Any]:
        """Draw sequences; parameters and result as of `ReplayBuffer.sample_sequences`, raises as `sample` does."""
        options = {"length": length, "burn_in": burn_in, "padded": padded, "beta": beta, "seed": seed}
        return Delivery(device, floats).one(self._draw(batch_size, "sequences", options), convert_sample)

    def sample_episodes(
        self, n: int, *, unfinished: bool = False, seed: int | None = None
    ) -> Sample[list[Batch], list[npt.NDArray[np.int64]]]:
        """Draw whole episodes; result as of `ReplayBuffer.sample_episodes`, raises as `sample` does."""
        return self._draw(n, "episodes", {"unfinished": unfinished, "seed": seed})

    def _draw(self, batch_size: int, mode: str | None, options: Mapping[str, Any]) -> Sample[Any, Any]:
        """Draw a sample from a service; a service that is lost is drawn no more."""
        if self._only is not None:
            return self._only.sample(batch_size, mode, options)
        with self._lock:
            while True:
                shard = self._shards.draw()
                try:
                    drawn = self._shards.on(shard, lambda connection: connection.sample(batch_size, mode, options))
                except ServiceError:
                    continue
                return Sample(drawn.batch, _number(drawn.indices, shard))

    def stream(self, batch_size: int = 1, *, prefetch: int = 2, **options: Any) -> Iterator[Any]:
        """Yield samples without end, some of them drawn ahead.

        From a FIFO table that is read once, this is the receiving end of a channel between machines: each fragment goes
        to one reader. Those that were drawn ahead are lost with a reader that stops.

        Where the service is lost and comes back within `reconnect_s` seconds, the stream goes on with the samples of
        the restarted one, after those that have arrived. Fragments that were on their way are lost, unless the
        checkpoint that it was restored from has them: it hands these out again.

        Parameters
        ----------
        batch_size
            As of `sample`.
        prefetch
            How many samples are drawn ahead of the one that is handed out.
        **options
            Further arguments of `sample`; or `mode`, `"sequences"` or `"episodes"`, and the arguments of that method.

        Yields
        ------
        Fragments as they were inserted; or rows, with their indices as the column `batch_indexes`.

        Raises
        ------
        SampleBatchError
            As `sample` does.
        """
        delivery = Delivery(options.pop("device", None), options.pop("floats", None))
        mode, ahead = options.pop("mode", None), whole("prefetch", prefetch)
        if self._only is not None:
            with closing(self._only.stream(batch_size, mode, options, ahead)) as samples:
                for drawn in samples:
                    yield _deliver(delivery, drawn)
                    del drawn
            return
        with self._lock:
            shards = self._shards.here()
        streams = [shard.connection.stream(batch_size, mode, options, ahead) for shard in shards]
        for number, (batch, indices) in merge(streams):
            yield _deliver(delivery, Sample(batch, _number(indices, shards[number])))
            del batch, indices

    def update_weight(self, index: Any, new_weight: Any, *, generation: Any = None, burn_in: Any = None) -> None:
        """Send new priorities of rows.

        They are in the table before the next fragment of this client is inserted, and, without `prefetch`, before its
        next sample is drawn. `flush` waits for them. Priorities that are on their way when the connection is lost are
        dropped.

        Parameters
        ----------
        index
            The rows, as samples have them; n of them. Of sequences shape (n, length).
        new_weight
            Their priorities, shape (n,) or one for all; arrays or tensors. Of sequences one each, as
            `PrioritizedReplayBuffer.update_weight` takes them.
        generation
            The `generation` of the rows when they were sampled, shape (n,): priorities of rows that have been written
            over since are dropped.
        burn_in
            The column `burn_in` of sequences, shape (n, length), if they were sampled with burn-in.

        Raises
        ------
        ColumnLengthError
            If there are not n priorities, or not n generations; or if `burn_in` is not of the shape of the indices.
        ServiceError
            If the service cannot be reached.
        SampleBatchError
            If the service refuses an earlier update; for this one, the next method that looks at the table raises.
        """
        index, new_weight = rows_of_sequences(index, new_weight, burn_in)
        indices = np.ascontiguousarray(as_array(index), np.int64).reshape(-1)
        given = np.asarray(as_array(new_weight), np.float64)
        priorities = np.full(len(indices), given) if not given.ndim else np.ascontiguousarray(given).reshape(-1)
        known = None if generation is None else np.ascontiguousarray(as_array(generation), np.int64).reshape(-1)
        for name, values in ((names.PRIORITY, priorities), (names.GENERATION, known)):
            if values is not None and len(values) != len(indices):
                raise ColumnLengthError(f"column {name!r} must have {len(indices)} rows, one a row, got {len(values)}")
        if self._only is not None:
            self._only.update_weight(indices, priorities, known)
            return
        owners = indices >> _SHARD_BIT
        if len(indices) and not 0 <= owners.min() <= owners.max() < len(self.uris):
            raise RowIndexError("indices must be those of samples of this client, some are of no service")
        with self._lock:
            for shard in self._shards.here():
                rows = owners == shard.number
                if rows.any():
                    own = None if known is None else known[rows]
                    update = (indices[rows] & _MASK, priorities[rows], own)
                    with suppress(ServiceError):
                        self._shards.on(shard, methodcaller("update_weight", *update))

    def sample_indices(self, batch_size: int | None) -> npt.NDArray[Any]:
        """Refuse to draw indices alone: their rows may be others before they can be asked for.

        Raises
        ------
        ArgumentError
            Always.
        """
        raise ArgumentError(
            "indices cannot be drawn without their rows from a table of a service, where others write meanwhile; use "
            "sample, which gives both"
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
        Their version: 1 for the first of this name. It is above every version of this name that the service or this
        client has had, also after a restart of the service.

        Raises
        ------
        ColumnTypeError, CapacityError, ServiceError
            If they are no such dict, too large, or the service cannot be reached.
        """
        if self._only is not None:
            return self._only.publish(weights, name)
        with self._lock:
            after = max(self._on_all(lambda connection: connection.weights_version(name)))
            packed = pack_weights(weights, name, max(after, self._known_versions.get(name, 0)))
            version = max(self._on_all(lambda connection: connection.publish_packed(packed, name)))
            self._known_versions[name] = version
        return version

    def latest(self, newer_than: int = 0, name: str = "") -> Publication | None:
        """Return the newest weights.

        A service that was restarted from a checkpoint continues with the weights and versions in it, and one without a
        checkpoint counts from 1. In both cases this client receives the next weights, whatever their version: a version
        that is not above `newer_than` is new if the service numbered it in another epoch.

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
        if self._only is not None:
            return self._only.latest(newer_than, name)
        with self._lock:
            versions = {}
            for shard in self._shards.here():
                with suppress(ServiceError):
                    versions[shard] = self._shards.on(shard, lambda connection: connection.weights_version(name))
            for shard in sorted(versions, key=lambda shard: -versions[shard]):
                with suppress(ServiceError):
                    newest = self._shards.on(shard, lambda connection: connection.latest(newer_than, name))
                    if newest is not None:
                        self._known_versions[name] = newest.version
                    return newest
            self._shards.here()
        return None

    # The table

    def __len__(self) -> int:
        return int(self.info()["size"])

    def info(self) -> dict[str, Any]:
        """Return the state of the table, once the fragments of this client are in it.

        Returns
        -------
        dict
            What `ReplayTable.info` returns. With several services the sums of `size`, `capacity`, `nbytes`, `weight`,
            `inserted` and `sampled` over those that can be reached; the lists of `held_back` joined; and `shards`, the
            state of each table by the address of its service.
        """
        if self._only is not None:
            return self._only.info()
        infos = dict(self._on_all(lambda connection: (connection.uri, connection.info())))
        sums: dict[str, Any] = {name: sum(own[name] for own in infos.values()) for name in _SUMS}
        return {**sums, "held_back": [held for own in infos.values() for held in own["held_back"]], "shards": infos}

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty the table. `keep_statistics` must be false: episodes under way do not go on."""
        if keep_statistics:
            raise ArgumentError("keep_statistics must be false for a table of a service, whose writers may be many")
        self._on_all(TableConnection.reset)

    def set_limits(self, **limits: Any) -> dict[str, Any]:
        """Change limits of the table while it is used, as `ReplayTable.set_limits` does, and return `info`."""
        if self._only is not None:
            return self._only.set_limits(limits)
        self._on_all(lambda connection: connection.set_limits(limits))
        return self.info()

    def checkpoint(self) -> list[str]:
        """Let each service write all of its tables to its disk, and return where.

        Raises
        ------
        ArgumentError
            If a service has no folder for checkpoints.
        """
        return self._on_all(TableConnection.checkpoint)

    def _on_all(self, use: Callable[[TableConnection], T]) -> list[T]:
        """Use all services that can be reached, and return the results."""
        if self._only is not None:
            return [use(self._only)]
        with self._lock:
            return self._shards.on_all(use)


def _close(connection: TableConnection) -> None:
    """Close the connection to one of several services, which may be gone."""
    with suppress(ServiceError):
        connection.close()


def _number(indices: Any, shard: Shard) -> Any:
    """Put the number of a shard into indices of its table."""
    if isinstance(indices, list):
        return [_number(own, shard) for own in indices]
    # Padding of sequences is -1 on each.
    return np.where(indices < 0, indices, indices + (shard.number << _SHARD_BIT))


def _deliver(delivery: Delivery, sample: Sample[Any, Any]) -> Any:
    """Return the rows of a sample of a stream, with their indices as a column."""
    batch, indices = delivery.one(sample, convert_sample)
    if isinstance(batch, Batch):
        batch[names.BATCH_INDEXES] = indices
    return batch


def _restore(uris: list[str], table: str, options: dict[str, Any]) -> ReplayClient:
    """Make a client of a pickled one."""
    return ReplayClient(uris, table, **options)

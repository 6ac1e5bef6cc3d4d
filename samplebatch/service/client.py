"""ReplayClient: client of a table on one or several replay services."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch import errors, names
from samplebatch.arguments import describe_value, positive, suggest_names, whole
from samplebatch.batch.delivery import Delivery, as_array
from samplebatch.batch.flags import column_names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.extending import as_flat, row_ids
from samplebatch.buffer.prioritized import rows_of_sequences
from samplebatch.buffer.samplers import Sample, convert_sample
from samplebatch.service.connection import TableConnection
from samplebatch.service.flight_process import flight_process
from samplebatch.service.protocol import short_text
from samplebatch.service.streams import WriteCounts, new_name
from samplebatch.service.weights import pack_weights
from samplebatch.transport.broadcast import Publication

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Device, Floats


_WEIGHT_AGE_S: Final = 1.0
"""Seconds after which a cached shard weight is requested again."""
_MAX_OWNERS: Final = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Shard:
    """Service that stores one shard of a table, for `Shards`.

    - `number`: index of the service.
    - `connection`: connection to the service.
    - `share`: relative weight of this service in the distribution of inserts.
    - `weight`, `weighed_at`: last known sum of the service's sampling weights, and time of the query in seconds of the
      monotonic clock.
    - `lost_at`: monotonic time of the last failure, in seconds; None if the service is reachable.
    """

    number: int
    connection: TableConnection
    share: float
    weight: float = 0.0
    weighed_at: float = -math.inf
    lost_at: float | None = None


class Shards:
    """Services over which a `ReplayClient` shards a table.

    - `connections`: one connection per service.
    - `shares`: relative weight of each service in the distribution of inserts; None for equal weights.
    - `retry_s`: seconds after which an unreachable service is retried.
    - `seed`: seed of the generator that selects the shard of each sample.

    Raises ArgumentError if there are no connections, or `shares` does not contain one positive number per connection.
    """

    def __init__(
        self, connections: Sequence[TableConnection], shares: Sequence[float] | None, retry_s: float, seed: Any
    ) -> None:
        service_shares = (
            [1.0] * len(connections) if shares is None else [positive("a share", share) for share in shares]
        )
        if not connections:
            raise errors.ArgumentError("a client must have the address of one service or more, got no addresses")
        if len(service_shares) != len(connections):
            raise errors.ArgumentError(
                f"shares must have one value per address, {len(connections)}, got {len(service_shares)}"
            )
        self.all = [
            Shard(number, connection, share)
            for number, (connection, share) in enumerate(zip(connections, service_shares, strict=True))
        ]
        self._retry_s = positive("retry_s", retry_s)
        self._rng = np.random.default_rng(seed)
        self._owners: dict[Any, Shard] = {}

    def reachable(self) -> list[Shard]:
        """Retry lost shards after `retry_s` seconds; return reachable shards. Raises ServiceError if all are lost."""
        now = time.monotonic()
        for shard in self.all:
            if shard.lost_at is not None and now - shard.lost_at >= self._retry_s:
                self._retry(shard)
        reachable = [shard for shard in self.all if shard.lost_at is None]
        if not reachable:
            uris = ", ".join(shard.connection.uri for shard in self.all)
            raise errors.ServiceError(f"at least one of the replay services at {uris} must be reachable, got none")
        return reachable

    def _retry(self, shard: Shard) -> None:
        """Resend unacknowledged fragments to a lost shard; on success, mark the shard as reachable."""
        shard.lost_at = None
        try:
            # `info` instead of `flush`: without pending fragments, `flush` does not contact the service.
            self.call(shard, TableConnection.info)
        except errors.ServiceError:
            return
        _log.warning("the replay service at %s is reachable again", shard.connection.uri)
        self._owners.clear()

    def call(self, shard: Shard, use: Callable[[TableConnection], T]) -> T:
        """Call a shard's connection; mark an unreachable shard as lost.

        Raises ServiceError if the service cannot be reached. Other errors of the call are raised unchanged.
        """
        try:
            return use(shard.connection)
        except errors.ServiceError as error:
            if shard.lost_at is None:
                _log.warning(
                    "the replay service at %s cannot be reached and is skipped: %s", shard.connection.uri, error
                )
            shard.lost_at = time.monotonic()
            self._owners.clear()
            raise

    def call_all(self, use: Callable[[TableConnection], T]) -> list[T]:
        """Call every reachable shard and return the results.

        Raises ServiceError if no service can be reached. Errors other than ServiceError are raised unchanged.
        """
        results = []
        for shard in self.reachable():
            try:
                results.append(self.call(shard, use))
            except errors.ServiceError:
                continue
        if not results:
            self.reachable()
        return results

    def owner(self, key: Any) -> Shard:
        """Select the shard of a key by weighted rendezvous hashing.

        Let u in (0, 1) be a hash of the key and a shard's address. The shard with the largest -share / ln u is selected
        (Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005). If a shard is lost, only the keys
        of this shard move to other shards.

        Raises ServiceError if no service can be reached.
        """
        shards = self.reachable()
        shard = self._owners.get(key)
        if shard is None:
            if len(self._owners) >= _MAX_OWNERS:
                self._owners.clear()
            shard = self._owners[key] = max(shards, key=lambda shard: -shard.share / math.log(_hash(key, shard)))
        return shard

    def draw(self) -> Shard:
        """Draw a shard with probability proportional to its weight, or to its share if all weights are 0.

        Raises ServiceError if no service can be reached.
        """
        now = time.monotonic()
        for shard in self.reachable():
            if now - shard.weighed_at >= _WEIGHT_AGE_S:
                try:
                    shard.weight = float(self.call(shard, TableConnection.info)["weight"])
                    shard.weighed_at = now
                except errors.ServiceError:
                    continue
        shards = self.reachable()
        weights = np.array([shard.weight for shard in shards])
        if not weights.sum():
            weights = np.array([shard.share for shard in shards])
        return shards[int(self._rng.choice(len(shards), p=weights / weights.sum()))]


def merge(streams: Sequence[Iterator[Any]]) -> Iterator[tuple[int, Any]]:
    """Yield (stream number, item) from several streams as items arrive.

    Each stream is read by its own thread, one item ahead. A stream ends when it raises ServiceError. Raises
    ServiceError once all streams have ended. Raises OwnershipError in a forked child, because the threads do not exist
    in the child. Errors other than ServiceError are raised unchanged.
    """
    items: queue.Queue[tuple[int, Any]] = queue.Queue(len(streams))
    has_stopped = threading.Event()

    def put(item: tuple[int, Any]) -> None:
        while not has_stopped.is_set():
            with suppress(queue.Full):
                items.put(item, timeout=0.2)
                return

    def read(number: int, stream: Iterator[Any]) -> None:
        try:
            for item in stream:
                put((number, item))
                del item
                if has_stopped.is_set():
                    return
            put((number, errors.ServiceError("the stream has ended")))
        except errors.SampleBatchError as error:
            put((number, error))
        finally:
            stream.close()  # type: ignore[attr-defined]

    threads = [
        threading.Thread(target=read, args=(number, stream), name="samplebatch-merge", daemon=True)
        for number, stream in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    open_streams, process = len(streams), os.getpid()
    try:
        while True:
            if process != os.getpid():
                raise errors.OwnershipError(
                    "a stream of samples must be read by the process that opened it, got a forked child"
                )
            number, item = items.get()
            if isinstance(item, errors.ServiceError):
                open_streams -= 1
                if open_streams:
                    continue
            if isinstance(item, errors.SampleBatchError):
                raise item
            yield number, item
            del item
    finally:
        has_stopped.set()


def _hash(key: Any, shard: Shard) -> float:
    digest = hashlib.blake2b(f"{key}\n{shard.connection.uri}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2.0**64


T = TypeVar("T")

_SHARD_BIT: Final = 48
"""Lowest bit of the shard number in an index; indices within one table are less than 2 ** 48."""
_MASK: Final = (1 << _SHARD_BIT) - 1
_SUMS: Final = ("size", "capacity", "nbytes", "weight", "inserted", "sampled")


class ReplayClient:
    """Client of a table on one or several replay services, with the methods of a replay buffer.

    Fragments are sent without waiting for their acknowledgement. `flush` and all methods that read the table, except
    `stream`, wait until this client's fragments are acknowledged. Without `prefetch`, each sample is drawn when it is
    requested; a client and a local buffer with the same seed therefore return the same samples.

    If the client and the service run on the same machine, large samples are mapped from shared memory. All received
    arrays are read-only.

    A client that loses the connection to its service reconnects, resends unacknowledged fragments and continues. Ctrl-C
    interrupts a blocked call; the next call with the same arguments returns the sample that the interrupted call
    requested. An unpickled client opens its own connections. A forked child cannot use the client; closing the client
    in the child does not affect the parent's connection. Threads may share a client.

    With several addresses, the table is sharded over the services. A hash assigns each environment (or each episode, if
    there are no environment ids) to one service, in proportion to `shares`. A trajectory is split between services only
    if a service becomes unreachable or reachable again. Each sample is drawn from one service. The service is selected
    with probability proportional to the weight of the service's table: the number of items, or the sum of the items'
    priorities. Each row is therefore sampled with the same probability as from a single table. The client requests
    table weights at most once per second. An unreachable service is skipped and retried later; meanwhile, the reachable
    services receive the steps of the unreachable service's environments. Unacknowledged fragments of an unreachable
    service are retained, and resent after a reconnection; `written` reports how many fragments are acknowledged.

    Parameters
    ----------
    uri
        Address of the service, such as `"grpc://127.0.0.1:5000"`, or a list of addresses.
    table
        Name of the table, which must be the same on every service.
    token
        Access token of the service; None if the service requires no token.
    tls_root_certs
        Path of a PEM file with the certificates that verify the service's certificate; the system's certificates by
        default.
    writer
        Name of the writer, at most 256 bytes in UTF-8; a random name by default. The service reports the name and
        assigns rings to the writer's environments.
    prefetch
        Number of samples to prefetch; with 0, each sample is drawn when it is requested.
    max_unacknowledged
        Maximum number of unacknowledged fragments per service; further inserts block.
    timeout_s
        Maximum time in seconds for which the table's limits may block an insert or a sample; unbounded by default.
    reconnect_s
        Seconds for which an unreachable service is retried: by default 60, or 1 if there are several services. With
        several services, a service that is still unreachable after this time is skipped.
    fragment_steps
        Steps per environment that `add` collects into one fragment. Larger fragments reduce the time per step, but
        delay the insertion of steps.
    shared_memory
        Whether to map samples from shared memory if the service is on this machine.
    shares
        Relative weight of each service in the distribution of inserts; equal by default.
    seed
        Seed of the generator that selects the service of each sample, if there are several services.
    retry_s
        Seconds after which a skipped service is retried, if there are several services.

    Raises
    ------
    ArgumentError
        If a number is out of range, an address is invalid or repeated, there are no addresses, or `shares` does not
        contain one positive number per address.
    CapacityError
        If the writer's name has more than 256 bytes in UTF-8.
    OSError
        If the certificates cannot be read.
    OwnershipError
        If this process was forked from a process that used a replay service: gRPC's threads do not exist in the child.

    Attributes
    ----------
    uris
        Addresses of the services.
    table, writer
        Names of the table and of the writer.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
    >>> table = ReplayTable("prio", kind="prioritized", capacity=100, alpha=0.6, seed=1)
    >>> with ReplayServer([table]) as server, ReplayClient(server.uri, "prio") as buffer:
    ...     steps = SampleBatch(
    ...         obs=[1, 2], actions=[0, 1], rewards=[0.0, 1.0], terminateds=[False, True]
    ...     )
    ...     buffer.extend(steps)
    ...     batch, indices = buffer.sample(4)
    ...     buffer.update_weight(indices, batch.rew + 1.0, generation=batch.generation)
    ...     len(buffer), bool((batch.obs == indices + 1).all())
    (2, True)

    A table that is sharded over two services:

    >>> with (
    ...     ReplayServer([ReplayTable("replay", capacity=100)]) as first,
    ...     ReplayServer([ReplayTable("replay", capacity=100)]) as second,
    ...     ReplayClient([first.uri, second.uri], "replay", seed=0) as buffer,
    ... ):
    ...     steps = np.arange(8)
    ...     rows = SampleBatch(obs=steps, actions=steps, rewards=steps, eps_id=steps)
    ...     rows["terminateds"] = steps >= 0
    ...     buffer.extend(rows)
    ...     batch, indices = buffer.sample(4)
    ...     len(buffer), batch.obs.shape
    (8, (4,))
    """

    @suggest_names(address="uri", url="uri", name="table")
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
            raise errors.ArgumentError("addresses must be different, got a repeated one")
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
        """The connection if there is a single service, else None."""
        self._lock = threading.RLock()
        self._known_versions: dict[str, int] = {}
        """Version of the last received or published weights, by name; used with several services."""
        self._fragments = 0
        """Number of fragments without environment or episode ids; each fragment's number is its key."""
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
        """Wait until all fragments are acknowledged, then close the connections. Closing again does nothing.

        If another thread waits for a sample, its call raises ServiceError. In a forked child, `close` sends nothing,
        because the connections and fragments belong to the parent. With several services, unacknowledged fragments of
        an unreachable service are discarded.

        Raises
        ------
        SampleBatchError
            As in `flush`; all connections are closed in any case.
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
        """Close the connections and discard unacknowledged fragments."""
        for shard in self._shards.all:
            shard.connection.end()

    @property
    def lost(self) -> list[str]:
        """Addresses of unreachable services, which are skipped."""
        return [shard.connection.uri for shard in self._shards.all if shard.lost_at is not None]

    @property
    def written(self) -> WriteCounts:
        """Counts of sent, acknowledged and rejected fragments, and of acknowledged rows.

        Steps that `add` has not sent yet are not counted.
        """
        if self._only is not None:
            return self._only.written
        counts = [asdict(shard.connection.written) for shard in self._shards.all]
        return WriteCounts(**{name: sum(count[name] for count in counts) for name in counts[0]})

    # Writing

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        **columns: Any,
    ) -> None:
        """Send a single step, or one or more steps of each environment.

        The client retains an environment's steps until there are `fragment_steps` steps or the episode ends, and then
        sends the steps as one fragment. The next `extend`, `flush` or `sample` also sends retained steps.

        Parameters
        ----------
        batch
            Column values by name, as in `ReplayBuffer.add`.
        buffer_ids
            Environment id of each row, shape (n,), if the values have a leading axis of length n; None for a single
            step.

        Raises
        ------
        SampleBatchError
            As in `extend`.
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
            part, part_ids = (steps, ids) if rows is None else (steps[rows], ids[rows])
            self._send(key, partial(TableConnection.add, batch=part, buffer_ids=part_ids, columns={}))

    def extend(self, batch: Any, *, priorities: Any = None, key: str | None = None) -> None:
        """Send all steps of a batch as one fragment.

        Parameters
        ----------
        batch
            As in `ReplayBuffer.extend`.
        priorities
            Priority of each step, shape (n,), or one number for a table of fragments; default: the largest priority so
            far.
        key
            Key of the fragment, for a table of kind `"key"`.

        Raises
        ------
        ServiceError
            If the service cannot be reached.
        LimitTimeoutError
            If the table's limits block a fragment for `timeout_s` seconds; the blocked fragment is not inserted.
        SampleBatchError
            If the service rejects this fragment or an earlier fragment; the rejected fragment is not inserted. The
            client rejects values other than batches, and objects that require pickling, without sending these values.

        Notes
        -----
        Until the service acknowledges the fragment, the client retains a view of the batch's arrays. Do not overwrite
        these arrays before `flush` has returned.
        """
        if self._only is not None:
            self._only.extend(batch, priorities, key)
            return
        for stream_key, part, rows in self._split(batch):
            part_priorities = (
                priorities if rows is None or not np.ndim(priorities) else np.asarray(as_array(priorities))[rows]
            )
            self._send(stream_key, partial(TableConnection.extend, batch=part, priorities=part_priorities, key=key))

    def _add_fragment(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Send a fragment of a collector or worker with its environment and episode ids; raises the errors of `extend`.

        A table of steps stores infos as separate columns, as buffers do, and omits empty infos.
        """
        if self._only is not None:
            self._only.add_fragment(fragment)
            return
        for stream_key, part, _ in self._split(fragment):
            self._send(stream_key, partial(TableConnection.add_fragment, fragment=part))

    def _split(self, batch: Any) -> Iterator[tuple[Any, Any, npt.NDArray[np.bool_] | None]]:
        """Yield (key, rows, row mask) for each service that owns rows; the mask is None if one service owns all rows.

        A batch of several policies is not split: the first environment id of the first policy selects the service.
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
        """Return (key, row mask) for each service that owns rows; the mask is None if one service owns all rows."""
        with self._lock:
            keys: dict[Shard, list[Any]] = {}
            for key in np.unique(ids).tolist():
                keys.setdefault(self._shards.owner((self.writer, key)), []).append(key)
        if len(keys) == 1:
            return [(owned_keys[0], None) for owned_keys in keys.values()]
        return [(owned_keys[0], np.isin(ids, owned_keys)) for owned_keys in keys.values()]

    def _send(self, key: Any, send: Callable[[TableConnection], None]) -> None:
        """Send a fragment to the shard that owns a key; the connection retains unacknowledged fragments."""
        with self._lock:
            while True:
                shard = self._shards.owner((self.writer, key))
                sent = shard.connection.written.sent
                try:
                    self._shards.call(shard, send)
                    return
                except errors.ServiceError:
                    if shard.connection.written.sent > sent:
                        return

    def flush(self) -> None:
        """Wait until all reachable services have applied this client's inserts and priority updates.

        Raises
        ------
        SampleBatchError
            As in `extend`, or if a service has rejected priorities.
        """
        self._call_all(TableConnection.flush)

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
        """Sample steps from a table of steps, or fragments from a table of fragments.

        Parameters
        ----------
        batch_size
            Number of steps or fragments.
        n_step, gamma, device, floats
            As in `ReplayBuffer.sample`; the service computes n-step returns.
        beta
            Exponent of importance weights; the table's exponent by default.
        key
            Key of the fragment, for a table of kind `"key"`.
        seed
            Seed of a generator for this sample alone; by default, the table's generator is used.

        Returns
        -------
        Sample
            The sample's `batch` contains rows as a `Batch`, as `ReplayBuffer.sample` returns, or fragments as inserted.
            `indices` contains row indices or fragment numbers, for `update_weight`.

        Raises
        ------
        ServiceError
            If the service cannot be reached.
        LimitTimeoutError
            If the table's limits block the sample for `timeout_s` seconds.
        SampleBatchError
            If the service rejects the request.
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
        per_sequence: str | Iterable[str] = (),
        beta: float | None = None,
        seed: int | None = None,
        device: Device | None = None,
        floats: Floats | None = None,
    ) -> Sample[Batch, Any]:
        """Sample sequences, as `ReplayBuffer.sample_sequences` does. Raises the same errors as `sample`."""
        options: dict[str, Any] = {"length": length, "burn_in": burn_in, "padded": padded, "beta": beta, "seed": seed}
        if per_sequence:
            options["per_sequence"] = column_names("per_sequence", per_sequence)
        return Delivery(device, floats).one(self._draw(batch_size, "sequences", options), convert_sample)

    def sample_episodes(
        self, n: int, *, unfinished: bool = False, seed: int | None = None
    ) -> Sample[list[Batch], list[npt.NDArray[np.int64]]]:
        """Sample complete episodes, as `ReplayBuffer.sample_episodes` does. Raises the same errors as `sample`."""
        return self._draw(n, "episodes", {"unfinished": unfinished, "seed": seed})

    def _draw(self, batch_size: int, mode: str | None, options: Mapping[str, Any]) -> Sample[Any, Any]:
        if self._only is not None:
            return self._only.sample(batch_size, mode, options)
        with self._lock:
            while True:
                shard = self._shards.draw()
                try:
                    sample = self._shards.call(shard, lambda connection: connection.sample(batch_size, mode, options))
                except errors.ServiceError:
                    continue
                return Sample(sample.batch, _number(sample.indices, shard))

    def stream(self, batch_size: int = 1, *, prefetch: int = 2, **options: Any) -> Iterator[Any]:
        """Yield samples indefinitely; `prefetch` samples are requested in advance.

        With a table of kind `"queue"`, a stream is the receiving end of a channel between machines: each fragment is
        delivered to exactly one reader. Prefetched fragments are lost if the reader stops.

        If the service becomes unreachable and is reachable again within `reconnect_s` seconds, the stream first yields
        the samples received before the failure and then continues. Fragments in transit are lost, unless the service
        was restored from a checkpoint that contains these fragments. A restored service sends the fragments of its
        checkpoint again.

        Parameters
        ----------
        batch_size
            As in `sample`.
        prefetch
            Number of samples to prefetch.
        **options
            Further arguments of `sample`, or of `sample_sequences` or `sample_episodes` if `mode` is `"sequences"` or
            `"episodes"`.

        Yields
        ------
        Fragments as inserted, lists of episodes, or rows as a `Batch` with their indices in the column `batch_indexes`.

        Raises
        ------
        SampleBatchError
            As in `sample`.
        """
        delivery = Delivery(options.pop("device", None), options.pop("floats", None))
        mode, ahead = options.pop("mode", None), whole("prefetch", prefetch)
        if self._only is not None:
            with closing(self._only.stream(batch_size, mode, options, ahead)) as samples:
                for sample in samples:
                    yield _deliver(delivery, sample)
                    del sample
            return
        with self._lock:
            shards = self._shards.reachable()
        streams = [shard.connection.stream(batch_size, mode, options, ahead) for shard in shards]
        for number, (batch, indices) in merge(streams):
            yield _deliver(delivery, Sample(batch, _number(indices, shards[number])))
            del batch, indices

    def update_weight(self, index: Any, new_weight: Any, *, generation: Any = None, burn_in: Any = None) -> None:
        """Send new priorities of rows.

        The service applies the priorities before it inserts this client's next fragment and, without `prefetch`, before
        it draws this client's next sample. `flush` waits until the priorities are applied. If the connection is lost,
        priorities in transit are discarded.

        Parameters
        ----------
        index
            Indices of n sampled rows, shape (n,), or of n sequences, shape (n, length).
        new_weight
            Priorities as an array or a tensor, shape (n,), or one number for all rows. For sequences, see
            `PrioritizedReplayBuffer.update_weight`.
        generation
            Column `generation` of the sampled rows, shape (n,); priorities of rows overwritten meanwhile are discarded.
        burn_in
            Column `burn_in` of sequences, shape (n, length), if the sequences were sampled with burn-in.

        Raises
        ------
        ColumnLengthError
            If the number of priorities or generations is not n, or `burn_in` does not have the same shape as the
            indices.
        ServiceError
            If the service cannot be reached.
        SampleBatchError
            If the service rejected an earlier update. If the service rejects this update, the next insert, `flush` or
            `sample` raises the error.
        """
        index, new_weight = rows_of_sequences(index, new_weight, burn_in)
        indices = np.ascontiguousarray(as_array(index), np.int64).reshape(-1)
        weights = np.asarray(as_array(new_weight), np.float64)
        priorities = np.full(len(indices), weights) if not weights.ndim else np.ascontiguousarray(weights).reshape(-1)
        generations = None if generation is None else np.ascontiguousarray(as_array(generation), np.int64).reshape(-1)
        for name, values in ((names.PRIORITY, priorities), (names.GENERATION, generations)):
            if values is not None and len(values) != len(indices):
                raise errors.ColumnLengthError(
                    f"column {name!r} must have one value per row, {len(indices)}, got {len(values)}"
                )
        if self._only is not None:
            self._only.update_weight(indices, priorities, generations)
            return
        owners = indices >> _SHARD_BIT
        if len(indices) and not 0 <= owners.min() <= owners.max() < len(self.uris):
            raise errors.RowIndexError(
                "indices must come from samples of this client, got an index of an unknown service"
            )
        with self._lock:
            for shard in self._shards.reachable():
                rows = owners == shard.number
                if rows.any():
                    part_generations = None if generations is None else generations[rows]
                    update = (indices[rows] & _MASK, priorities[rows], part_generations)
                    with suppress(errors.ServiceError):
                        self._shards.call(shard, methodcaller("update_weight", *update))

    def sample_indices(self, batch_size: int | None) -> npt.NDArray[Any]:
        """Raise ArgumentError, because other clients may overwrite rows between sampling and reading.

        Raises
        ------
        ArgumentError
            Always.
        """
        raise errors.ArgumentError(
            "indices of a replay service must be sampled together with their rows, which other clients may overwrite; "
            "use sample, which returns both"
        )

    # Weights

    def publish(self, weights: Mapping[str, Any], name: str = "") -> int:
        """Publish weights for all clients of the service and replace the previous weights.

        Parameters
        ----------
        weights
            Arrays and tensors in a flat or nested dict, such as a `state_dict()`. The values are copied.
        name
            Name of the weights, if there are several models.

        Returns
        -------
        Version of the weights: 1 for the first publication under `name`. Each later publication has a greater
        version than the previous one, even after a restart of the service.

        Raises
        ------
        ColumnTypeError, CapacityError, ServiceError
            If `weights` is not a dict of arrays and tensors, the weights are too large, or the service cannot be
            reached.
        """
        if self._only is not None:
            return self._only.publish(weights, name)
        with self._lock:
            after = max(self._call_all(lambda connection: connection.weights_version(name)))
            packed = pack_weights(weights, name, max(after, self._known_versions.get(name, 0)))
            version = max(self._call_all(lambda connection: connection.publish_packed(packed, name)))
            self._known_versions[name] = version
        return version

    def latest(self, newer_than: int = 0, name: str = "") -> Publication | None:
        """Return the newest weights if they are newer than version `newer_than`.

        A service that is restored from a checkpoint continues its version numbering; a service without a checkpoint
        restarts at version 1. This client receives the next publication after any restart, because weights that another
        run of the service published are always treated as newer.

        Parameters
        ----------
        newer_than
            Version of the caller's weights; 0 if the caller has no weights yet.
        name
            Name of the weights.

        Returns
        -------
        `version` and `value` of the weights; None if there are no newer weights.

        Raises
        ------
        ServiceError
            If the service cannot be reached.
        """
        if self._only is not None:
            return self._only.latest(newer_than, name)
        with self._lock:
            versions = {}
            for shard in self._shards.reachable():
                with suppress(errors.ServiceError):
                    versions[shard] = self._shards.call(shard, lambda connection: connection.weights_version(name))
            for shard in sorted(versions, key=lambda shard: -versions[shard]):
                with suppress(errors.ServiceError):
                    newest = self._shards.call(shard, lambda connection: connection.latest(newer_than, name))
                    if newest is not None:
                        self._known_versions[name] = newest.version
                    return newest
            self._shards.reachable()
        return None

    # The table

    def __len__(self) -> int:
        return int(self.info()["size"])

    def info(self) -> dict[str, Any]:
        """Return the state of the table after all fragments of this client are inserted.

        Returns
        -------
        dict
            State, as returned by `ReplayTable.info`. With several services, `size`, `capacity`, `nbytes`, `weight`,
            `inserted` and `sampled` are sums over the reachable services, and the lists `held_back` are concatenated.
            The additional entry `shards` maps service addresses to table states.
        """
        if self._only is not None:
            return self._only.info()
        infos = dict(self._call_all(lambda connection: (connection.uri, connection.info())))
        sums: dict[str, Any] = {name: sum(info[name] for info in infos.values()) for name in _SUMS}
        return {
            **sums,
            "held_back": [writers for info in infos.values() for writers in info["held_back"]],
            "shards": infos,
        }

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty the table. `keep_statistics` must be false, because running episodes cannot be continued."""
        if keep_statistics:
            raise errors.ArgumentError(
                "keep_statistics must be false for a table of a replay service, which may have several writers, got "
                f"{describe_value(keep_statistics)}"
            )
        self._call_all(TableConnection.reset)

    def set_limits(self, **limits: Any) -> dict[str, Any]:
        """Change the table's limits, as `ReplayTable.set_limits` does, and return the result of `info`."""
        if self._only is not None:
            return self._only.set_limits(limits)
        self._call_all(lambda connection: connection.set_limits(limits))
        return self.info()

    def checkpoint(self) -> list[str]:
        """Write a checkpoint on each service and return the checkpoint paths on the services' disks.

        Raises
        ------
        ArgumentError
            If a service has no checkpoint folder.
        """
        return self._call_all(TableConnection.checkpoint)

    def _call_all(self, use: Callable[[TableConnection], T]) -> list[T]:
        if self._only is not None:
            return [use(self._only)]
        with self._lock:
            return self._shards.call_all(use)


def _close(connection: TableConnection) -> None:
    with suppress(errors.ServiceError):
        connection.close()


def _number(indices: Any, shard: Shard) -> Any:
    """Store a shard's number in the high bits of the indices of the shard's table."""
    if isinstance(indices, list):
        return [_number(array, shard) for array in indices]
    # Padding of sequences, index -1, is unchanged.
    return np.where(indices < 0, indices, indices + (shard.number << _SHARD_BIT))


def _deliver(delivery: Delivery, sample: Sample[Any, Any]) -> Any:
    """Convert a sample for delivery, and add row indices as a column of a `Batch`."""
    batch, indices = delivery.one(sample, convert_sample)
    if isinstance(batch, Batch):
        batch[names.BATCH_INDEXES] = indices
    return batch


def _restore(uris: list[str], table: str, options: dict[str, Any]) -> ReplayClient:
    return ReplayClient(uris, table, **options)

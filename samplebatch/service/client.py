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
from samplebatch.arguments import positive, suggest_names, whole
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
_MAX_HOMES: Final = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Shard:
    """One of several services that share a table, for `Shards`.

    - `number`: index of the service.
    - `connection`: connection to the service.
    - `share`: relative weight of this service in the distribution of inserts.
    - `weight`, `weighed_at`: last known sum of the service's sampling weights, and when it was queried, in seconds of
      the monotonic clock.
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

    An unreachable service is skipped and retried later.

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
        if not connections or len(service_shares) != len(connections):
            raise errors.ArgumentError(
                f"shares must have one value per address, {len(connections)}, got {len(service_shares)}"
            )
        self.all = [
            Shard(number, connection, share)
            for number, (connection, share) in enumerate(zip(connections, service_shares, strict=True))
        ]
        self._retry_s = positive("retry_s", retry_s)
        self._rng = np.random.default_rng(seed)
        self._homes: dict[Any, Shard] = {}

    def here(self) -> list[Shard]:
        """Return the reachable shards, after retrying shards that failed at least `retry_s` seconds ago.

        Raises ServiceError if no service can be reached.
        """
        now = time.monotonic()
        for shard in self.all:
            if shard.lost_at is not None and now - shard.lost_at >= self._retry_s:
                self._try_again(shard)
        reachable = [shard for shard in self.all if shard.lost_at is None]
        if not reachable:
            uris = ", ".join(shard.connection.uri for shard in self.all)
            raise errors.ServiceError(f"at least one of the replay services at {uris} must be reachable, got none")
        return reachable

    def _try_again(self, shard: Shard) -> None:
        """Resend unacknowledged fragments to a lost shard; on success, mark the shard as reachable."""
        shard.lost_at = None
        try:
            # `info` instead of `flush`: without pending fragments, `flush` does not contact the service.
            self.on(shard, TableConnection.info)
        except errors.ServiceError:
            return
        _log.warning("the replay service at %s is back", shard.connection.uri)
        self._homes.clear()

    def on(self, shard: Shard, use: Callable[[TableConnection], T]) -> T:
        """Call a shard's connection; mark the shard as lost if it cannot be reached.

        Raises ServiceError if the service cannot be reached. Raises any other SampleBatchError of the call.
        """
        try:
            return use(shard.connection)
        except errors.ServiceError as error:
            if shard.lost_at is None:
                _log.warning("the replay service at %s is left out: %s", shard.connection.uri, error)
            shard.lost_at = time.monotonic()
            self._homes.clear()
            raise

    def on_all(self, use: Callable[[TableConnection], T]) -> list[T]:
        """Call every reachable shard and return the results.

        Raises ServiceError if no service can be reached. Raises any other SampleBatchError of a call.
        """
        results = []
        for shard in self.here():
            try:
                results.append(self.on(shard, use))
            except errors.ServiceError:
                continue
        if not results:
            self.here()
        return results

    def home(self, key: Any) -> Shard:
        """Select the shard of a key by weighted rendezvous hashing.

        Let u in (0, 1) be a hash of the key and a shard's address. The shard with the largest -share / ln u is selected
        (Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005). If a shard is lost, only the keys
        of this shard move to other shards.

        Raises ServiceError if no service can be reached.
        """
        shards = self.here()
        shard = self._homes.get(key)
        if shard is None:
            if len(self._homes) >= _MAX_HOMES:
                self._homes.clear()
            shard = self._homes[key] = max(shards, key=lambda shard: -shard.share / math.log(_hash(key, shard)))
        return shard

    def draw(self) -> Shard:
        """Draw a shard with probability proportional to its weight, or to its share if all weights are 0.

        Raises ServiceError if no service can be reached.
        """
        now = time.monotonic()
        for shard in self.here():
            if now - shard.weighed_at >= _WEIGHT_AGE_S:
                try:
                    shard.weight = float(self.on(shard, TableConnection.info)["weight"])
                    shard.weighed_at = now
                except errors.ServiceError:
                    continue
        shards = self.here()
        weights = np.array([shard.weight for shard in shards])
        if not weights.sum():
            weights = np.array([shard.share for shard in shards])
        return shards[int(self._rng.choice(len(shards), p=weights / weights.sum()))]


def merge(streams: Sequence[Iterator[Any]]) -> Iterator[tuple[int, Any]]:
    """Yield (stream number, item) from several streams as items arrive.

    Each stream is read by its own thread, one item ahead. A stream ends when it raises ServiceError. Raises
    ServiceError once all streams have ended. Raises OwnershipError in a forked child, where the threads do not exist.
    Raises any other SampleBatchError of a stream.
    """
    items: queue.Queue[tuple[int, Any]] = queue.Queue(len(streams))
    over = threading.Event()

    def put(item: tuple[int, Any]) -> None:
        while not over.is_set():
            with suppress(queue.Full):
                items.put(item, timeout=0.2)
                return

    def read(number: int, stream: Iterator[Any]) -> None:
        try:
            for item in stream:
                put((number, item))
                del item
                if over.is_set():
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
    left, process = len(streams), os.getpid()
    try:
        while True:
            if process != os.getpid():
                raise errors.OwnershipError(
                    "a stream of samples must be read by the process that opened it, got a forked child"
                )
            number, item = items.get()
            if isinstance(item, errors.ServiceError):
                left -= 1
                if left:
                    continue
            if isinstance(item, errors.SampleBatchError):
                raise item
            yield number, item
            del item
    finally:
        over.set()


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

    Fragments are sent without waiting for their acknowledgement. `flush` and all methods that read the table wait until
    this client's fragments are acknowledged. Without `prefetch`, each sample is drawn when it is requested; a client
    and a local buffer with the same seed therefore return equal samples.

    If the client and the service run on the same machine, large samples are mapped from shared memory. All received
    arrays are read-only.

    A client that loses the connection to its service reconnects, resends unacknowledged fragments and continues. Ctrl-C
    interrupts a blocked call; the next call with the same arguments returns the sample that the interrupted call
    requested. An unpickled client opens its own connections. A forked child cannot use the client; closing the client
    in the child does not affect the parent's connection. Threads may share a client.

    With several addresses, the table is sharded over the services. A hash assigns each environment (or each episode, if
    there are no environment ids) to one service, in proportion to `shares`. Trajectories are split only if a service
    becomes unreachable or returns. Each sample comes from one service, which is drawn in proportion to its table's
    weight: the number of items, or the sum of their priorities. Each row is therefore sampled with the same probability
    as from a single table. The client requests table weights at most once per second. An unreachable service is skipped
    and retried later; meanwhile, the other services receive the steps of its environments. Unacknowledged fragments of
    an unreachable service are retained and sent when the service returns: see `written`.

    Parameters
    ----------
    uri
        Address of the service, such as `"grpc://127.0.0.1:5000"`, or a list of addresses.
    table
        Name of the table, which must be the same on every service.
    token
        Access token of the service, if it requires one.
    tls_root_certs
        Path of a PEM file with the certificates that verify the service's certificate; the system's certificates by
        default.
    writer
        Name of the writer, at most 256 bytes in UTF-8; a random name by default. The service reports the name and
        assigns rings to the writer's environments.
    prefetch
        Number of prefetched samples.
    max_unacknowledged
        Maximum number of unacknowledged fragments per service; further inserts block.
    timeout_s
        Maximum seconds for which the table's limits may block an insert or a sample; unbounded by default.
    reconnect_s
        Seconds for which an unreachable service is retried: by default 60, or 1 if there are several services. One of
        several services is then skipped.
    fragment_steps
        Steps per environment that `add` collects into one fragment. Larger fragments cost less time per step but reach
        the table later.
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
        As passed.

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
        """Counts of the fragments and rows that the services acknowledged or rejected.

        Steps that `fragment_steps` retains are not counted yet.
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
        """Send one step, or one or more steps per environment.

        With `fragment_steps`, steps are retained until an environment has that many or its episode ends, and sent as
        one fragment. `flush`, and all methods that read the table, send retained steps.

        Parameters
        ----------
        batch
            Values by name, as in `ReplayBuffer.add`.
        buffer_ids
            Environment of each row, shape (n,), if the values have a leading axis; None for a single step.

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
            If the table's limits block a fragment for `timeout_s` seconds; that fragment is not inserted.
        SampleBatchError
            If the service rejects this fragment or an earlier one; the rejected fragment is not inserted. Values other
            than batches, and objects that require pickling, are rejected before they are sent.

        Notes
        -----
        The fragment is a view of the batch's arrays until the service has acknowledged it: do not overwrite them before
        `flush` has returned.
        """
        if self._only is not None:
            self._only.extend(batch, priorities, key)
            return
        for home, part, rows in self._split(batch):
            part_priorities = (
                priorities if rows is None or not np.ndim(priorities) else np.asarray(as_array(priorities))[rows]
            )
            self._send(home, partial(TableConnection.extend, batch=part, priorities=part_priorities, key=key))

    def _add_fragment(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Send a fragment of a collector or worker with its environment and episode ids; raises the errors of `extend`.

        In tables of steps, infos become separate columns, as in buffers, and empty infos are omitted.
        """
        if self._only is not None:
            self._only.add_fragment(fragment)
            return
        for home, part, _ in self._split(fragment):
            self._send(home, partial(TableConnection.add_fragment, fragment=part))

    def _split(self, batch: Any) -> Iterator[tuple[Any, Any, npt.NDArray[np.bool_] | None]]:
        """Yield the part of a batch for each service: a key of the service, the part, and the mask of its rows.

        Batches of several policies are not split; the first environment of the first policy decides.
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
        """Partition rows by service: a key of each service, and the mask of its rows; None for all rows."""
        with self._lock:
            keys: dict[Shard, list[Any]] = {}
            for key in np.unique(ids).tolist():
                keys.setdefault(self._shards.home((self.writer, key)), []).append(key)
        if len(keys) == 1:
            return [(owned[0], None) for owned in keys.values()]
        return [(owned[0], np.isin(ids, owned)) for owned in keys.values()]

    def _send(self, key: Any, send: Callable[[TableConnection], None]) -> None:
        """Send a fragment to the shard that owns a key; the connection retains it until it is acknowledged."""
        with self._lock:
            while True:
                shard = self._shards.home((self.writer, key))
                sent = shard.connection.written.sent
                try:
                    self._shards.on(shard, send)
                    return
                except errors.ServiceError:
                    if shard.connection.written.sent > sent:
                        return

    def flush(self) -> None:
        """Wait until all reachable services have applied this client's inserts and priority updates.

        Raises
        ------
        SampleBatchError
            As in `extend`; or if a service rejects priorities.
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
            Number of steps or fragments.
        n_step, gamma, device, floats
            As in `ReplayBuffer.sample`; the service computes n-step returns.
        beta
            Exponent of importance weights; the table's by default.
        key
            Key of the fragment, for a table of kind `"key"`.
        seed
            Seed of this sample's own generator; the table's generator by default.

        Returns
        -------
        Sample
            Rows as a `Batch`, like samples of a buffer, or fragments as inserted; and their indices for `update_weight`
            (numbers of fragments).

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
        """Draw sequences; see `ReplayBuffer.sample_sequences`. Raises the same errors as `sample`."""
        options: dict[str, Any] = {"length": length, "burn_in": burn_in, "padded": padded, "beta": beta, "seed": seed}
        if per_sequence:
            options["per_sequence"] = column_names("per_sequence", per_sequence)
        return Delivery(device, floats).one(self._draw(batch_size, "sequences", options), convert_sample)

    def sample_episodes(
        self, n: int, *, unfinished: bool = False, seed: int | None = None
    ) -> Sample[list[Batch], list[npt.NDArray[np.int64]]]:
        """Draw complete episodes; see `ReplayBuffer.sample_episodes`. Raises the same errors as `sample`."""
        return self._draw(n, "episodes", {"unfinished": unfinished, "seed": seed})

    def _draw(self, batch_size: int, mode: str | None, options: Mapping[str, Any]) -> Sample[Any, Any]:
        """Draw a sample from the service, or from a randomly selected reachable service."""
        if self._only is not None:
            return self._only.sample(batch_size, mode, options)
        with self._lock:
            while True:
                shard = self._shards.draw()
                try:
                    sample = self._shards.on(shard, lambda connection: connection.sample(batch_size, mode, options))
                except errors.ServiceError:
                    continue
                return Sample(sample.batch, _number(sample.indices, shard))

    def stream(self, batch_size: int = 1, *, prefetch: int = 2, **options: Any) -> Iterator[Any]:
        """Yield samples indefinitely; some are drawn ahead.

        A stream of a `"queue"` table is the receiving end of a channel between machines: each fragment goes to one
        reader. Fragments that were drawn ahead are lost when their reader stops.

        If the service is lost and returns within `reconnect_s` seconds, the stream continues with its samples, after
        those that have arrived. Fragments in transit are lost, unless the service was restored from a checkpoint that
        contains them; it then sends them again.

        Parameters
        ----------
        batch_size
            As in `sample`.
        prefetch
            Number of samples drawn ahead.
        **options
            Further arguments of `sample`; or `mode`, `"sequences"` or `"episodes"`, and the arguments of that method.

        Yields
        ------
        Fragments as inserted; or rows, with their indices as the column `batch_indexes`.

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
            shards = self._shards.here()
        streams = [shard.connection.stream(batch_size, mode, options, ahead) for shard in shards]
        for number, (batch, indices) in merge(streams):
            yield _deliver(delivery, Sample(batch, _number(indices, shards[number])))
            del batch, indices

    def update_weight(self, index: Any, new_weight: Any, *, generation: Any = None, burn_in: Any = None) -> None:
        """Send new priorities of rows.

        They are applied before this client's next fragment is inserted and, without `prefetch`, before its next sample
        is drawn. `flush` waits for them. Priorities in transit when the connection is lost are discarded.

        Parameters
        ----------
        index
            Indices of n rows, as in samples; shape (n, length) for sequences.
        new_weight
            Priorities as arrays or tensors, shape (n,), or one number for all. One per sequence, as in
            `PrioritizedReplayBuffer.update_weight`.
        generation
            `generation` of the rows when they were sampled, shape (n,): priorities of overwritten rows are discarded.
        burn_in
            Column `burn_in` of sequences, shape (n, length), if they were sampled with burn-in.

        Raises
        ------
        ColumnLengthError
            If there are not n priorities or n generations, or `burn_in` does not have the shape of the indices.
        ServiceError
            If the service cannot be reached.
        SampleBatchError
            If the service rejected an earlier update; the error of this update is raised by the next method that reads
            the table.
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
            raise errors.RowIndexError("indices must come from samples of this client, got some without a service")
        with self._lock:
            for shard in self._shards.here():
                rows = owners == shard.number
                if rows.any():
                    part_generations = None if generations is None else generations[rows]
                    update = (indices[rows] & _MASK, priorities[rows], part_generations)
                    with suppress(errors.ServiceError):
                        self._shards.on(shard, methodcaller("update_weight", *update))

    def sample_indices(self, batch_size: int | None) -> npt.NDArray[Any]:
        """Raise ArgumentError: rows may be replaced between sampling indices and reading them.

        Raises
        ------
        ArgumentError
            Always.
        """
        raise errors.ArgumentError(
            "indices cannot be drawn without their rows from a table of a service, where other clients write; use "
            "sample, which returns both"
        )

    # Weights

    def publish(self, weights: Mapping[str, Any], name: str = "") -> int:
        """Publish weights for all clients of the service; they replace the previous weights.

        Parameters
        ----------
        weights
            Arrays and tensors in a flat or nested dict, such as a `state_dict()`; they are copied.
        name
            Name of the weights, if there are several models.

        Returns
        -------
        Version of the weights: 1 for the first publication of this name, afterwards greater than every previous
        version, even after a restart of the service.

        Raises
        ------
        ColumnTypeError, CapacityError, ServiceError
            If the weights are not such a dict or too large, or the service cannot be reached.
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

        A service that was restored from a checkpoint continues its versions; otherwise versions start at 1. In both
        cases this client receives the next weights, because versions of another epoch of the service are always new.

        Parameters
        ----------
        newer_than
            Version that the caller has.
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
            for shard in self._shards.here():
                with suppress(errors.ServiceError):
                    versions[shard] = self._shards.on(shard, lambda connection: connection.weights_version(name))
            for shard in sorted(versions, key=lambda shard: -versions[shard]):
                with suppress(errors.ServiceError):
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
        """Return the state of the table, after this client's fragments are inserted.

        Returns
        -------
        dict
            As from `ReplayTable.info`. With several services: the sums of `size`, `capacity`, `nbytes`, `weight`,
            `inserted` and `sampled` over the reachable services; the concatenated lists of `held_back`; and `shards`,
            the state of each table by the address of its service.
        """
        if self._only is not None:
            return self._only.info()
        infos = dict(self._on_all(lambda connection: (connection.uri, connection.info())))
        sums: dict[str, Any] = {name: sum(info[name] for info in infos.values()) for name in _SUMS}
        return {
            **sums,
            "held_back": [writers for info in infos.values() for writers in info["held_back"]],
            "shards": infos,
        }

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty the table. `keep_statistics` must be false: running episodes are not continued."""
        if keep_statistics:
            raise errors.ArgumentError(
                "keep_statistics must be false for a table of a service, which may have many writers"
            )
        self._on_all(TableConnection.reset)

    def set_limits(self, **limits: Any) -> dict[str, Any]:
        """Change the table's limits, as `ReplayTable.set_limits` does, and return `info`."""
        if self._only is not None:
            return self._only.set_limits(limits)
        self._on_all(lambda connection: connection.set_limits(limits))
        return self.info()

    def checkpoint(self) -> list[str]:
        """Write a checkpoint on each service, and return the paths on their disks.

        Raises
        ------
        ArgumentError
            If a service has no checkpoint folder.
        """
        return self._on_all(TableConnection.checkpoint)

    def _on_all(self, use: Callable[[TableConnection], T]) -> list[T]:
        """Call all reachable services and return the results."""
        if self._only is not None:
            return [use(self._only)]
        with self._lock:
            return self._shards.on_all(use)


def _close(connection: TableConnection) -> None:
    """Close the connection to one of several services, which may be unreachable."""
    with suppress(errors.ServiceError):
        connection.close()


def _number(indices: Any, shard: Shard) -> Any:
    """Add the number of a shard to indices of its table."""
    if isinstance(indices, list):
        return [_number(array, shard) for array in indices]
    # Padding of sequences is -1 on each.
    return np.where(indices < 0, indices, indices + (shard.number << _SHARD_BIT))


def _deliver(delivery: Delivery, sample: Sample[Any, Any]) -> Any:
    """Return the rows of a sample, with their indices as a column."""
    batch, indices = delivery.one(sample, convert_sample)
    if isinstance(batch, Batch):
        batch[names.BATCH_INDEXES] = indices
    return batch


def _restore(uris: list[str], table: str, options: dict[str, Any]) -> ReplayClient:
    return ReplayClient(uris, table, **options)

"""ShardedReplayClient: a table that is spread over several replay services, with the methods of a replay buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.tensors import as_array
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.extending import as_flat, row_ids
from samplebatch.errors import ArgumentError, RowIndexError, ServiceError
from samplebatch.service.client import ReplayClient
from samplebatch.service.shards import Shard, Shards, merge
from samplebatch.service.writing import WriteCounts, new_name
from samplebatch.transport.subscription import Publication

_SHARD_BIT: Final = 48
"""Indices have the number of their shard from this bit on; those of a table are far below."""
_MASK: Final = (1 << _SHARD_BIT) - 1
_SUMS: Final = ("size", "capacity", "nbytes", "weight", "inserted", "sampled")


class ShardedReplayClient:
    """A table that is spread over several replay services, with a buffer's methods, for writers and learners.

    The steps of an environment, or else of an episode, go to one service, so that trajectories stay whole; which one is
    chosen by hashing, in proportion to the shares. Each sample comes from one service, which is drawn in proportion to
    the weight of its table: the number of its items, or the sum of their priorities. A row is thus drawn as often as
    from one table of all rows; weights are asked for once a second.

    A service that cannot be reached is left out, and tried again later; its environments write to the others
    meanwhile. Fragments that it has not acknowledged are kept, and sent once it is back: see `written`.

    Parameters
    ----------
    uris
        The addresses.
    table
        The table's name, which all services have.
    shares
        The part of the inserts that each gets, relative to the others; equal parts by default.
    seed
        Of the generator that draws services.
    retry_s
        Seconds after which a service that could not be reached is tried again.
    reconnect_s
        Seconds for which to try again before a service is left out.
    **options
        Those of `ReplayClient`.

    Raises
    ------
    ArgumentError
        If there are no addresses, two are the same, or there is not one share above 0 for each; or as of
        `ReplayClient`.

    Attributes
    ----------
    uris, table
        As given.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> from samplebatch.service import ReplayServer, ReplayTable, ShardedReplayClient
    >>> with (
    ...     ReplayServer([ReplayTable("replay", capacity=100)]) as one,
    ...     ReplayServer([ReplayTable("replay", capacity=100)]) as two,
    ...     ShardedReplayClient([one.uri, two.uri], "replay", seed=0) as buffer,
    ... ):
    ...     steps = np.arange(8)
    ...     buffer.extend(SampleBatch(obs=steps, actions=steps, rewards=steps, terminateds=steps >= 0, eps_id=steps))
    ...     batch, indices = buffer.sample(4)
    ...     len(buffer), batch.obs.shape
    (8, (4,))
    """

    def __init__(
        self,
        uris: Sequence[str],
        table: str,
        *,
        shares: Sequence[float] | None = None,
        seed: int | None = None,
        retry_s: float = 5.0,
        reconnect_s: float = 1.0,
        **options: Any,
    ) -> None:
        self.uris, self.table = list(uris), table
        if len(set(self.uris)) < len(self.uris):
            raise ArgumentError("addresses must be different services, some are the same")
        options = {"writer": new_name(), **options, "reconnect_s": reconnect_s}
        self._writer: str = options["writer"]
        self._pickled = {**options, "shares": shares, "seed": seed, "retry_s": retry_s}
        clients = [ReplayClient(uri, table, **options) for uri in self.uris]
        self._shards = Shards(clients, shares, retry_s, seed)
        self._lock = threading.RLock()
        self._fragments = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        for shard in self._shards.all:
            shard.client._end()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uris!r}, {self.table!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.uris, self.table, self._pickled)

    def close(self) -> None:
        """Wait until all fragments are acknowledged, as far as services can be reached, and close the connections.

        Raises
        ------
        SampleBatchError
            If a service refuses a fragment; all connections are closed then, too.
        """
        for shard in self._shards.all:
            shard.client._cancel_draws()
        with self._lock, ExitStack() as stack:
            for shard in self._shards.all:
                stack.callback(_close, shard.client)

    @property
    def lost(self) -> list[str]:
        """The addresses of the services that are left out, as they could not be reached."""
        return [shard.client.uri for shard in self._shards.all if shard.lost_at is not None]

    @property
    def written(self) -> WriteCounts:
        """The fragments and rows of all services; those that are sent and not acknowledged are under way, or kept."""
        counts = [asdict(shard.client.written) for shard in self._shards.all]
        return WriteCounts(**{name: sum(own[name] for own in counts) for name in counts[0]})

    # Writing

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        **columns: Any,
    ) -> None:
        """Send a step, or one or several steps of some environments; parameters as of `ReplayClient.add`.

        Raises
        ------
        SampleBatchError
            As `extend` does.
        """
        if buffer_ids is None:
            self._send("", lambda client: client.add(batch, **columns))
            return
        ids = np.asarray(buffer_ids).reshape(-1)
        steps = Batch({**({} if batch is None else batch), **columns})
        for key, rows in self._by_home(ids):
            part, own = (steps, ids) if rows is None else (steps[rows], ids[rows])
            self._send(key, partial(ReplayClient.add, batch=part, buffer_ids=own))

    def extend(self, batch: Any, *, priorities: Any = None, key: str | None = None) -> None:
        """Send all steps of a batch, a fragment for each service; parameters as of `ReplayClient.extend`.

        Raises
        ------
        ServiceError
            If no service can be reached.
        SampleBatchError
            If a service refuses a fragment, this one or an earlier one.
        """
        for home, part, rows in self._cut(batch):
            own = priorities if rows is None or not np.ndim(priorities) else np.asarray(as_array(priorities))[rows]
            self._send(home, partial(ReplayClient.extend, batch=part, priorities=own, key=key))

    def add_fragment(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Send a fragment of a collector or worker, as `ReplayClient.add_fragment` does; raises as `extend` does."""
        for home, part, _ in self._cut(fragment):
            self._send(home, partial(ReplayClient.add_fragment, fragment=part))

    def _cut(self, batch: Any) -> Iterator[tuple[Any, Any, npt.NDArray[np.bool_] | None]]:
        """Yield the parts of a batch that go to different services: a key of the service, the part, and its rows.

        Batches of several policies are not cut: all of one go where the first environment of the first policy does.
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
        for key, rows in self._by_home(ids):
            yield key, (steps if rows is None else steps[rows]), rows

    def _by_home(self, ids: npt.NDArray[Any]) -> list[tuple[Any, npt.NDArray[np.bool_] | None]]:
        """Tell apart the rows that go to different services: a key of each service, and its rows; None for all."""
        with self._lock:
            keys: dict[Shard, list[Any]] = {}
            for key in np.unique(ids).tolist():
                keys.setdefault(self._shards.home(self._key(key)), []).append(key)
        if len(keys) == 1:
            return [(own[0], None) for own in keys.values()]
        return [(own[0], np.isin(ids, own)) for own in keys.values()]

    def _key(self, key: Any) -> tuple[str, Any]:
        return self._writer, key

    def _send(self, key: Any, send: Callable[[ReplayClient], None]) -> None:
        """Send a fragment to the service of a key. It is kept there, if it is lost after it has taken it."""
        with self._lock:
            while True:
                shard = self._shards.home(self._key(key))
                sent = shard.client.written.sent
                try:
                    self._shards.on(shard, send)
                    return
                except ServiceError:
                    if shard.client.written.sent > sent:
                        return

    def flush(self) -> None:
        """Wait until the services that can be reached have acknowledged all fragments; raises as `extend` does."""
        with self._lock:
            self._shards.on_all(ReplayClient.flush)

    # Sampling

    def sample(self, batch_size: int, **options: Any) -> tuple[Any, Any]:
        """Draw steps or fragments of one service; parameters and result as of `ReplayClient.sample`.

        Raises
        ------
        ServiceError
            If no service can be reached.
        SampleBatchError
            As `ReplayClient.sample` does.
        """
        return self._draw(lambda client: client.sample(batch_size, **options))

    def sample_sequences(self, batch_size: int, length: int, **options: Any) -> tuple[Batch, Any]:
        """Draw sequences; parameters and result as of `ReplayClient.sample_sequences`, raises as `sample` does."""
        return self._draw(lambda client: client.sample_sequences(batch_size, length, **options))

    def sample_episodes(self, n: int, **options: Any) -> tuple[Any, Any]:
        """Draw whole episodes; parameters and result as of `ReplayClient.sample_episodes`, raises as `sample` does."""
        return self._draw(lambda client: client.sample_episodes(n, **options))

    def _draw(self, sample: Callable[[ReplayClient], tuple[Any, Any]]) -> tuple[Any, Any]:
        with self._lock:
            while True:
                shard = self._shards.draw()
                try:
                    batch, indices = self._shards.on(shard, sample)
                except ServiceError:
                    continue
                return batch, _number(indices, shard)

    def stream(self, batch_size: int = 1, *, prefetch: int = 2, **options: Any) -> Iterator[Any]:
        """Yield samples as they come from all services; parameters and result as of `ReplayClient.stream`.

        A service that is gone is left out for good.

        Raises
        ------
        ServiceError
            If no service can be reached, or all are gone.
        SampleBatchError
            As `ReplayClient.stream` does.
        """
        with self._lock:
            shards = self._shards.here()
        streams = [shard.client.stream(batch_size, prefetch=prefetch, **options) for shard in shards]
        for shard, found in merge(streams):
            if isinstance(found, Batch):
                found[names.BATCH_INDEXES] = _number(found[names.BATCH_INDEXES], shards[shard])
            yield found

    def update_weight(self, index: Any, new_weight: Any, *, generation: Any = None) -> None:
        """Send new priorities of rows to the services that they come from, as `ReplayClient.update_weight` does.

        Those of a service that is gone are dropped.

        Raises
        ------
        ServiceError
            If no service can be reached.
        SampleBatchError
            As `ReplayClient.update_weight` does.
        """
        indices = np.asarray(as_array(index), np.int64).reshape(-1)
        weights = np.broadcast_to(np.asarray(as_array(new_weight), np.float64), indices.shape)
        known = None if generation is None else np.asarray(as_array(generation), np.int64).reshape(-1)
        owners = indices >> _SHARD_BIT
        if len(indices) and not 0 <= owners.min() <= owners.max() < len(self.uris):
            raise RowIndexError("indices must be those of samples of this client, some are of no service")
        with self._lock:
            here = self._shards.here()
            for shard in here:
                rows = owners == shard.number
                if not rows.any():
                    continue
                own = None if known is None else known[rows]
                with suppress(ServiceError):
                    self._shards.on(
                        shard,
                        partial(
                            ReplayClient.update_weight,
                            index=indices[rows] & _MASK,
                            new_weight=weights[rows],
                            generation=own,
                        ),
                    )

    def sample_indices(self, batch_size: int | None) -> npt.NDArray[Any]:
        """Refuse to draw indices alone, as `ReplayClient.sample_indices` does.

        Raises
        ------
        ArgumentError
            Always.
        """
        return self._shards.all[0].client.sample_indices(batch_size)

    # Weights

    def publish(self, weights: Mapping[str, Any], name: str = "") -> int:
        """Publish weights on every service, and return the highest version; as `ReplayClient.publish` does."""
        with self._lock:
            return max(self._shards.on_all(lambda client: client.publish(weights, name)))

    def latest(self, newer_than: int = 0, name: str = "") -> Publication | None:
        """Return weights that are newer from the first service that has some; as `ReplayClient.latest` does."""
        with self._lock:
            for shard in self._shards.here():
                with suppress(ServiceError):
                    found = self._shards.on(shard, lambda client: client.latest(newer_than, name))
                    if found is not None:
                        return found
            self._shards.here()
        return None

    # The tables

    def __len__(self) -> int:
        return int(self.info()["size"])

    def info(self) -> dict[str, Any]:
        """Return how things stand on all services that can be reached.

        Returns
        -------
        dict
            The sums of `size`, `capacity`, `nbytes`, `weight`, `inserted` and `sampled`; the lists of `held_back`
            joined; and `shards`, what `ReplayClient.info` returns of each by its address.
        """
        with self._lock:
            found = dict(self._shards.on_all(lambda client: (client.uri, client.info())))
        infos = list(found.values())
        told: dict[str, Any] = {name: sum(own[name] for own in infos) for name in _SUMS}
        return {**told, "held_back": [one for own in infos for one in own["held_back"]], "shards": found}

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty the tables, as `ReplayClient.reset` does."""
        with self._lock:
            self._shards.on_all(lambda client: client.reset(keep_statistics))

    def set_limits(self, **limits: Any) -> dict[str, Any]:
        """Change limits of every table, as `ReplayClient.set_limits` does, and return `info`."""
        with self._lock:
            self._shards.on_all(lambda client: client.set_limits(**limits))
        return self.info()

    def checkpoint(self) -> list[str]:
        """Let every service write all of its tables to its disk, and return where; as `ReplayClient.checkpoint`."""
        with self._lock:
            return self._shards.on_all(ReplayClient.checkpoint)


def _close(client: ReplayClient) -> None:
    """Close a client of a service that may be gone."""
    with suppress(ServiceError):
        client.close()


def _number(indices: Any, shard: Shard) -> Any:
    """Put the number of a shard into indices of its table."""
    if isinstance(indices, list):
        return [_number(own, shard) for own in indices]
    return indices + (shard.number << _SHARD_BIT)


def _restore(uris: list[str], table: str, options: dict[str, Any]) -> ShardedReplayClient:
    """Make a client of a pickled one."""
    return ShardedReplayClient(uris, table, **options)

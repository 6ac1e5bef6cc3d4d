"""Shards: the services that a table is spread over. Inserts go to them by share, draws by weight; any may be gone."""

from __future__ import annotations

import hashlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from samplebatch.arguments import positive
from samplebatch.errors import ArgumentError, SampleBatchError, ServiceError
from samplebatch.service.client import ReplayClient

T = TypeVar("T")

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
    client
        Its client.
    share
        Its part of the inserts, relative to the others'.
    weight, weighed_at
        The sum of the weights by which its items are drawn, and when it told, in seconds of the monotonic clock.
    lost_at
        When it could not be reached; None if it could.
    """

    number: int
    client: ReplayClient
    share: float
    weight: float = 0.0
    weighed_at: float = -math.inf
    lost_at: float | None = None


class Shards:
    """The services that a table is spread over, for `ShardedReplayClient`.

    One that cannot be reached is left out, and tried again after a while.

    Parameters
    ----------
    clients
        A client for each.
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
        self, clients: Sequence[ReplayClient], shares: Sequence[float] | None, retry_s: float, seed: Any
    ) -> None:
        given = [1.0] * len(clients) if shares is None else [positive("a share", share) for share in shares]
        if not clients or len(given) != len(clients):
            raise ArgumentError(f"shares must be one for each address, {len(clients)}, got {len(given)}")
        self.all = [
            Shard(number, client, share) for number, (client, share) in enumerate(zip(clients, given, strict=True))
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
            uris = ", ".join(shard.client.uri for shard in self.all)
            raise ServiceError(f"one of the replay services at {uris} must be reachable, none is")
        return found

    def _try_again(self, shard: Shard) -> None:
        """Send a lost shard the fragments that it has not acknowledged, and take it back if that works."""
        shard.lost_at = None
        try:
            self.on(shard, ReplayClient.flush)
        except ServiceError:
            return
        _log.warning("the replay service at %s is back", shard.client.uri)
        self._homes.clear()

    def on(self, shard: Shard, use: Callable[[ReplayClient], T]) -> T:
        """Use the client of a shard; one that cannot be reached is lost for a while.

        Raises
        ------
        ServiceError
            If it cannot be reached.
        SampleBatchError
            As the call does.
        """
        try:
            return use(shard.client)
        except ServiceError as error:
            if shard.lost_at is None:
                _log.warning("the replay service at %s is left out: %s", shard.client.uri, error)
            shard.lost_at = time.monotonic()
            self._homes.clear()
            raise

    def on_all(self, use: Callable[[ReplayClient], T]) -> list[T]:
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
                    shard.weight = float(self.on(shard, ReplayClient.info)["weight"])
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
    left = len(streams)
    try:
        while True:
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
    digest = hashlib.blake2b(f"{key}\n{shard.client.uri}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2.0**64

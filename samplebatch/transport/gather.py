"""Receiver of batches from many producers, in order of arrival."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Self

from samplebatch import errors
from samplebatch.transport.channel_end import LONG_S
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.encode import AnyBatch
from samplebatch.transport.peers import Poller, deadline_of

_monotonic = time.monotonic


class Gathering:
    """Iterator over the batches that many consumers receive, created by `gather`.

    Attributes
    ----------
    source
        Consumer of the last received batch.
    lost
        Errors of producers that failed or died, by consumer.
    """

    def __init__(self, consumers: Iterable[Consumer], *, raise_lost: bool) -> None:
        self._open: dict[int, Consumer] = {}
        self._poller = Poller()
        self._readable: deque[Consumer] = deque()
        self._closed = False
        self._raise_lost = raise_lost
        self._positions: dict[Consumer, int] = {}
        self.source: Consumer | None = None
        self.lost: dict[Consumer, errors.SampleBatchError] = {}
        for consumer in consumers:
            self.add(consumer)

    def add(self, consumer: Consumer) -> None:
        """Add a consumer, for example for a worker that replaces a dead worker.

        Raises
        ------
        OwnershipError
            If the consumer belongs to another process or has already been added.
        ChannelClosedError
            If the consumer or this `Gathering` is closed.
        """
        self._require_open()
        consumer._acquire()
        if any(consumer is other for other in self._open.values()):
            raise errors.OwnershipError("a consumer must be added once, got one that is already added")
        descriptor = consumer._poller.fileno()
        self._poller.register(descriptor)
        self._open[descriptor] = consumer
        self._positions[consumer] = len(self._positions)

    def _require_open(self) -> None:
        if self._closed:
            raise errors.ChannelClosedError("a gathering must be open to receive from it, got a closed one")

    def __len__(self) -> int:
        """Return the number of consumers whose streams have not ended."""
        return len(self._open)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnyBatch:
        try:
            return self.recv()
        except errors.EndOfStreamError:
            raise StopIteration from None

    def recv(self, timeout_s: float | None = None) -> AnyBatch:
        """Receive the next batch from any of the producers.

        If several consumers have batches, the batches are received round-robin.

        Parameters
        ----------
        timeout_s
            Maximum waiting time in seconds; None for no limit.

        Raises
        ------
        ChannelTimeoutError
            If no batch arrives within `timeout_s`.
        EndOfStreamError
            If all streams have ended.
        WorkerError
            If all streams have ended and some producers failed or died; the message lists the indices of the producers'
            consumers. The attribute `lost` contains each producer's error as soon as the error is detected.
        UntrustedPickleError
            If a column is pickled and the channel does not allow pickles; the batch is lost.
        ChannelClosedError
            If this `Gathering` is closed.
        """
        deadline = deadline_of(timeout_s)
        self._require_open()
        while True:
            while self._readable:
                # Removed only after it was served, so that an interrupted call serves it next.
                batch = self._take(self._readable[0])
                if self._readable:
                    del self._readable[0]
                if batch is not None:
                    return batch
            if not self._open:
                raise self._end_error()
            self._wait(deadline)
            if not self._readable and deadline is not None and _monotonic() >= deadline:
                raise errors.ChannelTimeoutError(f"a batch must arrive within {timeout_s:g} s, got none")

    def _take(self, consumer: Consumer) -> AnyBatch | None:
        """Receive a batch without waiting; return None if no batch is available or the stream has ended."""
        try:
            batch = consumer.recv(timeout_s=0)
        except errors.ChannelTimeoutError:
            return None
        except errors.WorkerError as error:
            # A later message can only describe the end of the stream.
            self.lost[consumer] = error
            return None
        except (errors.EndOfStreamError, errors.PeerDiedError, errors.FormatError, errors.ChannelClosedError) as error:
            if isinstance(error, errors.PeerDiedError | errors.FormatError):
                self.lost.setdefault(consumer, error)
            self._drop(consumer)
            return None
        self.source = consumer
        return batch

    def _drop(self, consumer: Consumer) -> None:
        for descriptor, other in list(self._open.items()):
            if other is consumer:
                if not consumer.closed:
                    self._poller.unregister(descriptor)
                del self._open[descriptor]

    def _wait(self, deadline: float | None) -> None:
        self._readable += [self._open[descriptor] for descriptor in self._poller.poll(0.0)]
        if self._readable:
            return
        wait_s = LONG_S if deadline is None else max(0.0, deadline - _monotonic())
        for consumer in list(self._open.values()):
            if consumer.closed:
                self._drop(consumer)
                continue
            try:
                wait_s = min(wait_s, consumer._tend())
                if consumer._is_over():
                    self._readable.append(consumer)
            except (AttributeError, IndexError, OSError, ValueError) as error:
                if not consumer._was_closed_meanwhile(error):
                    raise
                self._drop(consumer)
        if self._open and not self._readable:
            self._readable += [self._open[descriptor] for descriptor in self._poller.poll(wait_s)]

    def _end_error(self) -> errors.SampleBatchError:
        if not self.lost or not self._raise_lost:
            return errors.EndOfStreamError("a producer must be open to send more, got closed ends from all")
        positions = sorted(self._positions[consumer] for consumer in self.lost)
        first = next(iter(self.lost.values()))
        error = errors.WorkerError(
            f"all {len(self._positions)} producers must close their ends when they have finished, these did not: "
            f"{', '.join(map(str, positions))}; reason of the first: {first}"
        )
        for note in getattr(first, "__notes__", ()):
            error.add_note(note)
        error.__cause__ = first
        return error

    def close(self) -> None:
        """Close this `Gathering`; its consumers stay open. Safe to call twice."""
        self._closed = True
        self._poller.close()
        self._open.clear()
        self._readable.clear()


def gather(consumers: Iterable[Consumer], *, raise_lost: bool = True) -> Gathering:
    """Receive batches from many producers in order of arrival.

    Parameters
    ----------
    consumers
        Consumers of the producers' channels; all must belong to this process.
    raise_lost
        Whether to raise `WorkerError` at the end of all streams if a producer failed or died. The error is raised after
        the batches of all producers have been received.

    Returns
    -------
    Gathering
        Iterator over the batches. The attribute `source` is the consumer of the last received batch, and `lost`
        contains the errors of producers.

    Raises
    ------
    OwnershipError
        If a consumer belongs to another process, or is listed twice.
    ChannelClosedError
        If a consumer is closed.

    Examples
    --------
    >>> from samplebatch import SampleBatch, channel
    >>> ends = [channel(1 << 16) for _ in range(3)]
    >>> for i, (producer, _) in enumerate(ends):
    ...     for _ in range(2):
    ...         producer.send(SampleBatch(worker=[i]))
    ...     producer.close()
    >>> [batch["worker"].item() for batch in gather(consumer for _, consumer in ends)]
    [0, 1, 2, 0, 1, 2]
    """
    return Gathering(consumers, raise_lost=raise_lost)

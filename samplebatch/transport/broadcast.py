"""broadcast: the latest batch or weights, from one process to any number of others."""

from __future__ import annotations

from multiprocessing import reduction
from typing import Any, Final

from samplebatch.arguments import whole
from samplebatch.errors import ArgumentError
from samplebatch.transport.board import MAX_BLOCKS, MIN_BLOCKS, Board
from samplebatch.transport.peers import Recipient
from samplebatch.transport.publisher import Publisher
from samplebatch.transport.region import Region
from samplebatch.transport.subscription import Subscription

DEFAULT_NBYTES: Final = 64 << 20


def broadcast(
    capacity_bytes: int = DEFAULT_NBYTES, *, blocks: int = 3, allow_pickle: bool = False
) -> tuple[Publisher, Subscription]:
    """Make a broadcast: one process publishes, any number of others read the newest publication.

    What is published is a batch (`SampleBatch`, `MultiAgentBatch` or `Batch`) or weights: a dict of arrays or torch
    tensors, flat or nested, such as a `state_dict()`. Each gets a number, from 1 on. Readers that are slow miss some,
    and never see half of one. They come, go and die as they like: the publisher does not know of them, and never waits.

    Both ends go to other processes as the ends of a `multiprocessing.Pipe` do: as arguments of a process under every
    start method, through queues and through pipes. The publisher belongs to the first process that publishes, until it
    dies; the subscription is as good for a hundred processes as for one.

    Parameters
    ----------
    capacity_bytes
        Bytes of the largest publication, with some hundred bytes for the description of each array.
    blocks
        Publications that there is memory for. A reader has the time of `blocks - 1` further publications to copy the
        newest. All memory, `blocks * capacity_bytes`, is reserved at once.
    allow_pickle
        Whether Python objects that Arrow cannot hold are pickled. Unpickling runs code that the publisher chose: only
        for those that you trust.

    Returns
    -------
    publisher
        The end to publish at.
    subscription
        The end to read at, any number of times over.

    Raises
    ------
    ArgumentError
        If the capacity is no whole number from 1, or the blocks are none from 2 to 63.
    SharedMemoryError
        If so much memory is not free.

    Examples
    --------
    >>> import numpy as np
    >>> publisher, subscription = broadcast(1 << 20)
    >>> with publisher, subscription:
    ...     publisher.publish({"layer": {"weight": np.eye(2), "bias": np.zeros(2)}})
    ...     subscription.latest()
    1
    Publication(version=1, value={'layer': {'weight': array([[1., 0.],
           [0., 1.]]), 'bias': array([0., 0.])}})
    """
    capacity_bytes = whole("capacity_bytes", capacity_bytes, 1)
    if whole("blocks", blocks, MIN_BLOCKS) > MAX_BLOCKS:
        raise ArgumentError(f"blocks must be from {MIN_BLOCKS} to {MAX_BLOCKS}, got {blocks}")
    board = Board.create(capacity_bytes, blocks)
    recipients: list[Recipient] = []
    publisher = Publisher(board, allow_pickle=allow_pickle, recipients=recipients)
    return publisher, Subscription(board.read_only(), allow_pickle=allow_pickle, recipients=recipients)


def _attach(cls: type[Publisher | Subscription], region: Region, allow_pickle: bool) -> Any:
    end = cls(Board(region), allow_pickle=allow_pickle, recipients=[])
    if isinstance(end, Publisher):
        end._hold()
    return end


def _reduce(end: Publisher | Subscription) -> tuple[Any, ...]:
    return _attach, (type(end), end._hand_over(), end._allow_pickle)


reduction.register(Publisher, _reduce)
reduction.register(Subscription, _reduce)

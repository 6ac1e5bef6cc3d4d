"""Channel for the transfer of batches between two processes, like a `multiprocessing.Pipe`."""

from __future__ import annotations

import os
from multiprocessing import reduction
from typing import Any, Final

from samplebatch.arguments import whole
from samplebatch.column.memory import ALIGNMENT
from samplebatch.transport.channel_end import FREE, HEADER_NBYTES
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.peers import Recipient
from samplebatch.transport.producer import Producer
from samplebatch.transport.region import Region

DEFAULT_NBYTES: Final = 64 << 20


def channel(capacity_nbytes: int = DEFAULT_NBYTES, *, allow_pickle: bool = False) -> tuple[Producer, Consumer]:
    """Create a channel that transfers batches between two processes in shared memory.

    Both ends can be sent to other processes like the ends of a `multiprocessing.Pipe`: as arguments of a process under
    every start method, through queues and through pipes. An end belongs to the first process that uses it.

    Parameters
    ----------
    capacity_nbytes
        Size in bytes of the arena, which contains batches in flight and batches whose arrays the consumer still uses.
        The memory is reserved immediately.
    allow_pickle
        Whether to pickle Python objects without an Arrow type. Unpickling executes code that the producer supplies:
        allow it only for producers that you trust.

    Returns
    -------
    producer
        Sending end.
    consumer
        Receiving end.

    Raises
    ------
    ArgumentError
        If the capacity is not a positive integer.
    SharedMemoryError
        If there is not enough free memory.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> producer, consumer = channel(1 << 20)
    >>> with producer, consumer:
    ...     producer.send(SampleBatch(obs=[[1.0, 2.0], [3.0, 4.0]]))
    ...     consumer.recv()["obs"]
    array([[1., 2.],
           [3., 4.]])
    """
    capacity_nbytes = whole("capacity_nbytes", capacity_nbytes, 1)
    region = Region.create(HEADER_NBYTES + -(-capacity_nbytes // ALIGNMENT) * ALIGNMENT)
    descriptors: list[int] = []
    try:
        descriptors += _pipe()
        descriptors += _pipe()
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    pipe_reader, pipe_writer, back_reader, back_writer = descriptors
    recipients: dict[int, Recipient] = {}
    producer = Producer(region, pipe_writer, back_reader, allow_pickle=allow_pickle, recipients=recipients)
    consumer = Consumer(region, pipe_reader, back_writer, allow_pickle=allow_pickle, recipients=recipients)
    producer._write_state(FREE)
    consumer._write_state(FREE)
    return producer, consumer


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return reader, writer


def _attach(cls: type[Producer | Consumer], region: Region, pipe: Any, back: Any, allow_pickle: bool) -> Any:
    end = cls(region, pipe.detach(), back.detach(), allow_pickle=allow_pickle, recipients={})
    end._hold()
    return end


def _reduce(end: Producer | Consumer) -> tuple[Any, ...]:
    region, pipe, back = end._hand_over()
    return _attach, (type(end), region, reduction.DupFd(pipe), reduction.DupFd(back), end._allow_pickle)


reduction.register(Producer, _reduce)
reduction.register(Consumer, _reduce)

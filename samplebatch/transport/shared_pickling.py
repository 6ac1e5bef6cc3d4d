"""Transfer of batches in `multiprocessing` queues and pipes through shared memory."""

from __future__ import annotations

import multiprocessing
import operator
import os
import pickle
import sys
from multiprocessing import util
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested import interchange
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.transport.shared_queue import Address, SharedQueueMemory, Span, receive

WORTHWHILE: Final = 128 << 10
"""Size in bytes from which a batch is sent in shared memory; smaller batches are as fast in the pickle."""

KEEP_NBYTES: Final = 256 << 20
"""Default size in bytes of the shared memory that a sending process retains for its next batches."""

LINGER_S: Final = 10.0
"""Seconds for which a child process that has ended its work waits for its batches to be received."""

_AFTER_QUEUES = -10
"""Priority at exit: queues write their remaining items at -5."""

_CLASSES: Final = (SampleBatch, MultiAgentBatch, Batch)

_reducers: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
_queue_memory = SharedQueueMemory(keep_nbytes=0)
_linger_s = LINGER_S
_lingering_process = 0


def enable_shared_pickling(*, keep_nbytes: int = KEEP_NBYTES, linger_s: float = LINGER_S) -> None:
    """Enable shared memory for batches that are sent through `multiprocessing` queues and pipes.

    After this call, this process copies each sent `SampleBatch`, `MultiAgentBatch` and `Batch` once, to shared memory.
    The receiving process reads the batch from the shared memory. The call affects `multiprocessing.Queue` and `Pipe`,
    and the results of `Pool` and `ProcessPoolExecutor`; batches inside other objects are also sent through shared
    memory. Batches of less than 128 KiB remain in the pickle. A received batch is writable and belongs to the receiver;
    the batch's memory is freed when the last array that views the memory is deleted.

    Every sending process must call this function; receiving processes need not call it. A further call replaces the
    settings of the previous call.

    The memory has no name in the file system, so it cannot leak if a process is killed. The sender must run until the
    receiver has received the batch, so an exiting child process waits up to `linger_s` seconds. If the sender is killed
    or calls `os._exit`, batches that were not received are lost. If 128 batches are in transit or shared memory is
    exhausted, further batches remain in the pickle.

    Parameters
    ----------
    keep_nbytes
        Maximum size in bytes of the shared memory that the process retains for reuse. Copying to new memory takes
        several times as long as copying to reused memory. The receiver frees memory that exceeds this size.
    linger_s
        Maximum time in seconds that an exiting child process waits until its batches are received. The child process
        stops waiting if its parent ends.

    Raises
    ------
    ValueError
        If `keep_nbytes` or `linger_s` is negative or not a number.

    Examples
    --------
    >>> import multiprocessing, numpy as np
    >>> from samplebatch import SampleBatch, disable_shared_pickling, enable_shared_pickling
    >>> enable_shared_pickling()
    >>> here, there = multiprocessing.Pipe()
    >>> here.send(SampleBatch(obs=np.ones((1000, 17))))
    >>> there.recv()["obs"].sum()
    np.float64(17000.0)
    >>> disable_shared_pickling()
    >>> here.close(), there.close()
    (None, None)
    """
    global _linger_s
    for name, value in (("keep_nbytes", keep_nbytes), ("linger_s", linger_s)):
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    _queue_memory.keep(keep_nbytes)
    _linger_s = linger_s
    _linger_at_exit()
    for kind in _CLASSES:
        ForkingPickler.register(kind, _reduce)


def disable_shared_pickling() -> None:
    """Stop sending batches through shared memory, and free the retained memory. Safe to call twice.

    Batches in transit still arrive.
    """
    for kind in _CLASSES:
        if _reducers.get(kind) is _reduce:
            del _reducers[kind]
    if "torch.multiprocessing" in sys.modules:
        interchange.register_processes(Batch)
    _queue_memory.keep(0)


def _forget_queue_memory() -> None:
    """Create new memory in a forked child, because the child does not own its parent's messages."""
    global _queue_memory
    _queue_memory = SharedQueueMemory(_queue_memory.keep_nbytes)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_queue_memory)


def _reduce(batch: Any) -> tuple[Any, ...]:
    buffers: list[Any] = []
    head = pickle.dumps(batch, 5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
    if sum([buffer.nbytes for buffer in buffers]) >= WORTHWHILE:
        sent = _queue_memory.send(buffers)
        if sent is not None:
            address, spans = sent
            return _receive, (head, tuple(address), spans)
    return _unpack, (head, [bytearray(buffer) for buffer in buffers])


def _receive(head: bytes, address: tuple[Any, ...], spans: list[Span]) -> Any:
    return pickle.loads(head, buffers=receive(Address(*address), spans))


def _unpack(head: bytes, buffers: list[bytearray]) -> Any:
    return pickle.loads(head, buffers=buffers)


def _linger_at_exit() -> None:
    """In a child process, register an exit handler that waits until all sent batches are received."""
    global _lingering_process
    if multiprocessing.parent_process() is not None and _lingering_process != os.getpid():
        _lingering_process = os.getpid()
        util.Finalize(None, _linger, exitpriority=_AFTER_QUEUES)


# A forked child loses its parent's exit handlers, so it registers its own.
util.register_after_fork(_linger_at_exit, operator.call)


def _linger() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        _queue_memory.wait_until_received(_linger_s, while_true=parent.is_alive)

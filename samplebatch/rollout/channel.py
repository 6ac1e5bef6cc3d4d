"""FragmentChannel: carries fragments from one worker process to its parent.

The rest of the rollout knows these two ends only, so another transport can take their place. Here a fragment is
pickled with its columns out of band, and header and columns are written to a pipe one after the other, without
joining them first.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext

import numpy as np

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.column import memory
from samplebatch.errors import FormatError, WorkerError

_MAGIC = b"SBFR"
_HEAD = struct.Struct("<4scxxxI")
"""Magic, kind of message, number of parts; the parts' lengths follow, 8 bytes each, then the parts."""
_FRAGMENT, _FAILURE = b"F", b"E"
_MAX_PARTS = 1 << 20
_MAX_VECTORS = 512

Message = tuple[bytes, list[memoryview]]


class FragmentSender:
    """The worker's end. It blocks while the pipe is full, which is the back-pressure."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, fragment: MultiAgentBatch) -> None:
        """Send a fragment.

        Raises
        ------
        BrokenPipeError
            If the parent is gone, or listens no longer.
        """
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(fragment, protocol=5, buffer_callback=buffers.append)
        self._write(_FRAGMENT, [memoryview(head), *(buffer.raw() for buffer in buffers)])

    def fail(self, reason: str, details: str = "") -> None:
        """Send word that the worker cannot go on, in place of its next fragment; raises as `send` does."""
        self._write(_FAILURE, [memoryview(reason.encode()), memoryview(details.encode())])

    def close(self) -> None:
        """Close this end; the parent sees the end of the stream after the last fragment."""
        self._connection.close()

    def _write(self, kind: bytes, parts: Sequence[memoryview]) -> None:
        head = _HEAD.pack(_MAGIC, kind, len(parts)) + struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts))
        pending = [memoryview(head), *(part for part in parts if part.nbytes)]
        file = self._connection.fileno()
        while pending:
            _advance(pending, os.writev(file, pending[:_MAX_VECTORS]))


class FragmentReceiver:
    """The parent's end. `multiprocessing.connection.wait` takes it as it is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages = self._read_messages()
        next(self._messages)

    def fileno(self) -> int:
        """Return the descriptor that is readable when more of a fragment, or the end of the stream, is there."""
        return self._connection.fileno()

    def recv(self, timeout_s: float | None = None) -> MultiAgentBatch:
        """Receive the next fragment; its arrays are writable and its own.

        Parameters
        ----------
        timeout_s
            Seconds to wait for the whole of it, or None to wait for ever.

        Raises
        ------
        TimeoutError
            If the fragment is not there in time. What came of it is kept, and the next call goes on from there.
        EOFError
            If the worker closed its end or is gone; half a fragment is dropped.
        WorkerError
            If the worker says that it cannot go on; gives its reason, and its details as a note.
        FormatError
            If what arrives is no fragment.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        message = None
        while message is None:
            self._wait(deadline)
            try:
                message = next(self._messages)
            except StopIteration:
                raise EOFError("the stream ended before") from None
        next(self._messages)
        kind, parts = message
        if kind == _FAILURE:
            error = WorkerError(bytes(parts[0]).decode())
            error.add_note(bytes(parts[1]).decode())
            raise error
        fragment = pickle.loads(parts[0], buffers=parts[1:])
        if not isinstance(fragment, MultiAgentBatch):
            raise FormatError(f"a worker must send a MultiAgentBatch, got a {type(fragment).__name__}")
        return fragment

    def close(self) -> None:
        """Close this end; a worker that sends after that gets BrokenPipeError."""
        self._connection.close()

    def _read_messages(self) -> Iterator[Message | None]:
        """Yield each message once it is whole, and None before every read: how long to wait is the caller's to decide.

        An exception within a read (Ctrl-C too) ends the generator, and with it the stream: where the next message
        begins is then not known any more.
        """
        while True:
            head = bytearray(_HEAD.size)
            yield from self._fill([memoryview(head)])
            magic, kind, count = _HEAD.unpack(head)
            if magic != _MAGIC or kind not in (_FRAGMENT, _FAILURE) or not 0 < count <= _MAX_PARTS:
                raise FormatError("what a worker sent is not a fragment")
            raw = bytearray(8 * count)
            yield from self._fill([memoryview(raw)])
            lengths = np.frombuffer(raw, "<u8").astype(np.int64)
            # One block for all parts, each at an aligned offset.
            padded = (lengths + memory.ALIGNMENT - 1) // memory.ALIGNMENT * memory.ALIGNMENT
            stops = padded.cumsum()
            block = memory.as_bytes(memory.empty((int(stops[-1]),), np.dtype(np.uint8)))
            starts = (stops - padded).tolist()
            parts = [block[start : start + size] for start, size in zip(starts, lengths.tolist(), strict=True)]
            yield from self._fill(parts)
            yield kind, parts

    def _fill(self, targets: Sequence[memoryview]) -> Iterator[None]:
        pending = [target for target in targets if target.nbytes]
        while pending:
            yield None
            read = os.readv(self.fileno(), pending[:_MAX_VECTORS])
            if not read:
                raise EOFError("the worker closed its end, or is gone")
            _advance(pending, read)

    def _wait(self, deadline: float | None) -> None:
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN | select.POLLHUP)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            raise TimeoutError("no whole fragment in time")


def _advance(pending: list[memoryview], nbytes: int) -> None:
    """Take so many bytes, which were written or read, off the front of what is pending."""
    done = 0
    while done < len(pending) and nbytes >= pending[done].nbytes:
        nbytes -= pending[done].nbytes
        done += 1
    del pending[:done]
    if nbytes:
        pending[0] = pending[0][nbytes:]


def fragment_channel(context: BaseContext) -> tuple[FragmentReceiver, FragmentSender]:
    """Make a channel: the parent's end, and the worker's, which goes to it as an argument of its process.

    Examples
    --------
    >>> import multiprocessing
    >>> from samplebatch.batch.sample_batch import SampleBatch
    >>> receiver, sender = fragment_channel(multiprocessing.get_context("spawn"))
    >>> sender.send(MultiAgentBatch({"walker": SampleBatch(rewards=[1.0, 2.0])}, 2))
    >>> receiver.recv(timeout_s=5)["walker"]["rewards"].tolist()
    [1.0, 2.0]
    >>> sender.close(), receiver.close()
    (None, None)
    """
    reader, writer = context.Pipe(duplex=False)
    return FragmentReceiver(reader), FragmentSender(writer)

"""Receiving end of a channel (the consumer)."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from typing import Final, Literal, Self
from zlib import crc32

from samplebatch import errors
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.transport import channel_end, wire
from samplebatch.transport.arena import GOODBYE_IDENT, HELLO_IDENT, ReturnPipe, pack_ident
from samplebatch.transport.decode import Decoder
from samplebatch.transport.encode import AnyBatch
from samplebatch.transport.peers import Poller, Recipient, deadline_of
from samplebatch.transport.region import Region

_FLUSH_S = 0.005
"""Seconds after which blocks are returned again if the pipe was full."""

_GARBAGE_S = 0.05
"""Seconds without a message after which garbage is collected, if the producer waits for a block."""

_IDLE: Final = 16
"""Number of messages awaited without checking first whether they exist; a failed check costs more than twice."""

_monotonic = time.monotonic
_read_into = os.readv


class Consumer(channel_end.ChannelEnd):
    """Receiving end of a channel, created by `samplebatch.channel`.

    A consumer belongs to the first process that uses the consumer. Only one thread at a time may use the consumer, but
    any thread may use the received batches. Iteration yields all batches until the producer closes its end.
    """

    _side = channel_end.CONSUMER
    _peer_side = channel_end.PRODUCER

    def __init__(
        self, region: Region, pipe: int, back: int, *, allow_pickle: bool = False, recipients: dict[int, Recipient]
    ) -> None:
        super().__init__(region, allow_pickle=allow_pickle, recipients=recipients)
        self._pipe = pipe
        self._back = back
        self._return_pipe = ReturnPipe()
        self._lent = self._return_pipe.lent
        self._end: Literal["", "closed", "died", "damaged"] = ""

    def _begin(self) -> None:
        self._message = bytearray(wire.MESSAGE_NBYTES)
        """Last received message; its first byte is 0 after it was processed."""
        self._into = (self._message,)
        self._checked = memoryview(self._message)[: wire.CHECKED_NBYTES]
        self._poller = Poller(self._pipe)
        self._idle = 0
        """Number of further messages to wait for without a check, after a message that was not there yet."""
        self._starved_after = -1
        """Number of the newest message when the producer reported that it waits for a block; -1 otherwise."""
        self._next_collection = 0.0
        self._decoder = Decoder(self._memory, self._return_pipe, allow_pickle=self._allow_pickle)
        self._return_pipe.open(self._back)
        self._return_pipe.give(HELLO_IDENT)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def recv(self, timeout_s: float | None = None) -> AnyBatch:
        """Receive the next batch, whose arrays are views of the memory that the producer wrote.

        The caller owns the arrays and may write to them. The memory of a batch is returned to the producer when the
        last array or view of the batch is deleted.

        Parameters
        ----------
        timeout_s
            Maximum waiting time in seconds; None for no limit.

        Raises
        ------
        ChannelTimeoutError
            If no batch arrives within `timeout_s`.
        EndOfStreamError
            If the producer has closed its end and all batches have been received.
        PeerDiedError
            If the producer's process has died and all complete batches have been received. A batch that was not sent
            completely is lost.
        WorkerError
            If the producer has reported an error; the message contains the reason, and a note contains the details.
        FormatError
            If the received bytes are damaged or are not a channel message. Nothing can be received afterwards.
        UntrustedPickleError
            If a column is pickled and the channel does not allow pickles; the batch is lost.
        OwnershipError
            If another process has used this end.
        ChannelClosedError
            If this end is closed.
        """
        if self._owner != channel_end.this_process[0]:
            self._acquire()
        deadline = None if timeout_s is None else deadline_of(timeout_s)
        message = self._message
        try:
            while True:
                nbytes = wire.MESSAGE_NBYTES
                # The return of an earlier batch was interrupted.
                if not message[0]:
                    if self._idle:
                        self._idle -= 1
                        nbytes = self._await(deadline, timeout_s)
                    else:
                        try:
                            nbytes = _read_into(self._pipe, self._into)
                        except BlockingIOError:
                            self._idle = _IDLE
                            nbytes = self._await(deadline, timeout_s)
                # `unpack` is inlined, without a call per field, because most messages are opened here.
                fields = wire.unpack_fields(message)
                if fields[2] == wire.BATCH and fields[0] == wire.MAGIC and crc32(self._checked) == fields[12]:
                    try:
                        batch = self._decoder.open(fields)
                    except errors.SampleBatchError as error:
                        self._give_up(error)
                        raise
                    # No call before the `return`, so no signal handler can run: this or a later call returns the batch.
                    message[0] = 0
                    self._decoder.unfinished = None
                    return batch
                self._open_other(nbytes)
        except Exception as error:
            if self._was_closed_meanwhile(error):
                raise self._closed_error() from error
            raise

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Return whether `recv` would not wait, because a batch is available or the stream has ended.

        Parameters
        ----------
        timeout_s
            Maximum waiting time in seconds; None for no limit.
        """
        self._acquire()
        deadline = deadline_of(timeout_s)
        try:
            return bool(self._end) or bool(self._message[0]) or self._wait(deadline)
        except Exception as error:
            if self._was_closed_meanwhile(error):
                raise self._closed_error() from error
            raise

    def has_free_half(self) -> bool:
        """Return whether received arrays leave a contiguous half of the arena unused."""
        half, spans = self._capacity_nbytes // 2, []
        for reference in list(self._lent.values()):
            lease = reference()
            if lease is not None:
                spans.append((int(lease.ctypes.data), lease.nbytes))
        free_from = int(self._memory.ctypes.data) + channel_end.HEADER_NBYTES
        stop = free_from + self._capacity_nbytes
        for address, nbytes in sorted(spans):
            if address - free_from >= half:
                return True
            free_from = address + nbytes
        return stop - free_from >= half

    def fileno(self) -> int:
        """Return a descriptor that is readable if `recv` would return or raise without waiting.

        For `multiprocessing.connection.wait`, `select` and asyncio. The descriptor may also become readable without a
        batch, if a producer binds its end or waits for a block. Call `recv(timeout_s=0)` if the descriptor is readable
        without a batch or a call to `recv` was interrupted.
        """
        self._acquire()
        self._look()
        if self._watch is None:
            self._words[channel_end.CONSUMER + channel_end.WATCHED] = 1
            # The message may have arrived in between.
            self._look()
        return self._poller.fileno()

    @contextlib.contextmanager
    def lease(self, timeout_s: float | None = None) -> Iterator[AnyBatch]:
        """Receive the next batch as a context manager; on exit, the batch's memory is returned to the producer.

        After the `with` statement, the batch has no columns. If an exception ends the `with` statement, the batch is
        unchanged, and its memory is returned when the last array that views the memory is deleted.

        Parameters
        ----------
        timeout_s
            Maximum waiting time in seconds; None for no limit.

        Yields
        ------
        SampleBatch, MultiAgentBatch or Batch
            Batch as returned by `recv`.

        Raises
        ------
        LeaseError
            At the end of the `with` statement, if arrays, slices or tensors of the batch still exist. The remaining
            arrays stay valid, and the memory is returned when the last of these arrays is deleted.
        ChannelTimeoutError, EndOfStreamError, PeerDiedError, WorkerError, FormatError, UntrustedPickleError
            As in `recv`.
        OwnershipError, ChannelClosedError
            As in `recv`.

        Examples
        --------
        >>> from samplebatch import SampleBatch, channel
        >>> producer, consumer = channel(1 << 20)
        >>> producer.send(SampleBatch(rewards=[1.0, 2.0]))
        >>> with consumer.lease() as batch:
        ...     print(batch["rewards"].sum())
        3.0
        >>> "rewards" in batch
        False
        >>> producer.close(), consumer.close()
        (None, None)
        """
        batch = self.recv(timeout_s)
        # None if no part of the batch is in the arena.
        reference = self._lent.get(self._decoder.ident)
        yield batch
        _clear(batch)
        if reference is not None and reference() is not None:
            raise errors.LeaseError(
                "a leased batch must have no arrays, slices or tensors that outlive the with statement; copy() those "
                "that are needed longer"
            )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnyBatch:
        try:
            return self.recv()
        except errors.EndOfStreamError:
            raise StopIteration from None

    def _await(self, deadline: float | None, timeout_s: float | None) -> int:
        """Wait for a message and read it into `_into`; return its size in bytes, or 0 if the stream has ended."""
        if (
            self._peer_fd is not None
            and (deadline is None or deadline - _monotonic() > channel_end.LONG_S)
            and not self._return_pipe.is_behind
            and self._starved_after != self._decoder.ident
        ):
            # In most calls, no other work is due before the wait, and any event ends the wait.
            self._poller.wait(channel_end.LONG_S)
            try:
                return _read_into(self._pipe, self._into)
            except BlockingIOError:
                pass
        while not self._end:
            events = self._wait(deadline)
            try:
                return _read_into(self._pipe, self._into)
            except BlockingIOError:
                if not events:
                    raise errors.ChannelTimeoutError(f"a batch must arrive within {timeout_s:g} s, got none") from None
            if self._is_over():
                # All messages that the producer sent before its end are in the pipe.
                with contextlib.suppress(BlockingIOError):
                    return _read_into(self._pipe, self._into)
                self._finish(
                    "closed" if self._words[channel_end.PRODUCER + channel_end.STATE] == channel_end.CLOSED else "died"
                )
        return 0

    def _open_other(self, nbytes: int) -> None:
        """Process a message that contains no batch; raise an error if the message ends the stream."""
        if self._end:
            raise self._end_error()
        if not nbytes:
            self._finish("closed" if self._peer_was_left() else "died")
            raise self._end_error()
        try:
            message = wire.unpack(self._message[:nbytes])
            if message.kind == wire.HELLO:
                self._look()
            elif message.kind == wire.STARVED:
                self._starved_after = self._decoder.ident
            elif message.kind == wire.END:
                self._finish("closed")
                raise self._end_error()
            elif message.kind == wire.FAILURE:
                raise self._failure(message)
            else:
                raise errors.FormatError(f"a message must be of a known kind, got {message.kind}")
        except errors.SampleBatchError as error:
            self._give_up(error)
            raise
        self._message[0] = 0

    def _give_up(self, error: errors.SampleBatchError) -> None:
        if isinstance(error, errors.FormatError):
            self._finish("damaged")
        self._decoder.unfinished = None
        self._message[0] = 0

    def _wait(self, deadline: float | None) -> bool:
        """Wait for a message or the end of the stream; return False after the timeout."""
        while True:
            max_s = self._tend()
            if self._is_over():
                return True
            left = max_s if deadline is None else max(0.0, deadline - _monotonic())
            events = self._poller.poll(min(left, max_s))
            if events:
                if self._peer_fd in events:
                    self._peer_has_died()
                return True
            if self._starved_after == self._decoder.ident:
                self._collect_garbage()
            if left < max_s:
                return False
            self._return_pipe.recover()

    def _is_over(self) -> bool:
        """Return whether the producer can send no further messages; the pipe may still contain unread messages."""
        return self._peer_dead or self._words[channel_end.PRODUCER + channel_end.STATE] == channel_end.CLOSED

    def _tend(self) -> float:
        """Flush returned blocks and check that the producer is alive; return the seconds until the next check."""
        if self._peer_fd is None:
            self._peer_has_died()
        if not self._return_pipe.flush():
            return _FLUSH_S
        if self._starved_after == self._decoder.ident:
            return _GARBAGE_S
        return channel_end.LOOK_S if self._peer_fd is None else channel_end.LONG_S

    def _collect_garbage(self) -> None:
        started = _monotonic()
        if started >= self._next_collection:
            self._starved_after = -1
            if self._lent:
                gc.collect()
            # Frequent requests must not use more than half of the time for collections.
            now = _monotonic()
            self._next_collection = now + (now - started)

    def _await_too(self, descriptor: int) -> None:
        self._poller.register(descriptor)

    def _await_no_more(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)

    def _failure(self, message: wire.Message) -> errors.WorkerError:
        start, nbytes = message.metadata_start, message.metadata_nbytes
        if start != channel_end.FAILURE_START or nbytes > channel_end.FAILURE_NBYTES:
            raise errors.FormatError(
                f"a failure message must have its metadata at offset {channel_end.FAILURE_START}, "
                f"got {nbytes} bytes at {start}"
            )
        metadata = wire.unpack_metadata(self._memory[start : start + nbytes].tobytes(), message.metadata_sum)
        error = errors.WorkerError(str(metadata.get("reason")))
        error.add_note(str(metadata.get("details")))
        return error

    # -- closing -------------------------------------------------------------------------------------------------------

    def _finish(self, how: Literal["closed", "died", "damaged"]) -> None:
        if self._end:
            return
        self._end = how
        if how == "damaged":
            # The producer must not send further messages.
            self._words[channel_end.CONSUMER + channel_end.STATE] = channel_end.CLOSED
        try:
            ended, writer = os.pipe()
        except OSError:
            # If no further descriptor is available, this pipe remains in use; it usually also stays readable.
            return
        # A pipe without writers stays readable, as at the end of a stream.
        os.close(writer)
        self._poller.replace(self._pipe, ended)
        pipe, self._pipe = self._pipe, ended
        os.close(pipe)

    def _end_error(self) -> errors.SampleBatchError:
        if self._end == "closed":
            return errors.EndOfStreamError("the producer must be open to send more, and it has closed its end")
        if self._end == "died":
            return self._peer_died()
        return errors.FormatError("a channel must not have been damaged to be received from, and a message was")

    def _shut(self, *, notify: bool) -> None:
        pipe, self._pipe = self._pipe, -1
        back, self._back = self._back, -1
        if self._return_pipe.descriptor >= 0:
            if notify:
                self._return_pipe.give(GOODBYE_IDENT)
            self._poller.close()
            # Remaining arrays keep the pipe that returns their blocks.
            self._return_pipe.close()
            self._return_pipe = ReturnPipe()
            self._lent = self._return_pipe.lent
            del self._decoder
        else:
            if notify:
                with contextlib.suppress(OSError):
                    os.write(back, pack_ident(GOODBYE_IDENT))
            os.close(back)
        os.close(pipe)


def _clear(batch: AnyBatch) -> None:
    for part in batch.policy_batches.values() if isinstance(batch, MultiAgentBatch) else [batch]:
        part.clear()

"""Producer: the end of a channel that batches are sent from."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import time
from collections.abc import Mapping
from typing import Any
from weakref import ref
from zlib import crc32

import numpy as np
import numpy.typing as npt

from samplebatch.column.threads import copy_all
from samplebatch.errors import CapacityError, ChannelClosedError, ChannelTimeoutError, SampleBatchError
from samplebatch.transport.arena import Block, Blocks
from samplebatch.transport.channel_end import (
    CLOSED,
    CONSUMER,
    FAILURE_START,
    HEADER_NBYTES,
    LONG_S,
    LOOK_S,
    PRODUCER,
    WATCHED,
    ChannelEnd,
    describe_error,
    pack_failure,
    this_process,
)
from samplebatch.transport.encode import AnyBatch, Encoder, halve
from samplebatch.transport.peers import Recipient, deadline_of
from samplebatch.transport.region import Region
from samplebatch.transport.reservation import Reservation
from samplebatch.transport.reservation_spec import Like, ReservationSpec, rows_of
from samplebatch.transport.schema import Plan, Schema
from samplebatch.transport.wire import (
    BATCH,
    DEFINES,
    END,
    FAILURE,
    HELLO,
    MAGIC,
    STARVED,
    VERSION,
    pack,
    pack_body,
    pack_sum,
    put,
    size_of,
    write_metadata,
)

_WATCH_S = 0.05
"""Seconds after which it is noticed at the latest that the consumer's process has died while blocks are still free."""

_STARVED_S = 0.05
"""Seconds without a block after which the consumer is told so."""

_monotonic = time.monotonic
_write = os.write


class Producer(ChannelEnd):
    """The end of a channel that batches are sent from; `samplebatch.channel` makes it.

    It belongs to the first process that uses it, and to one thread of it at a time. As a context manager it closes
    itself, and if an exception ends the `with` statement, the consumer is told of it; to enter the statement is to use
    it. A process that has sent its end to another should close its own copy, as with `multiprocessing.Pipe`.
    """

    _side = PRODUCER
    _peer_side = CONSUMER

    def __init__(
        self, region: Region, pipe: int, back: int, *, allow_pickle: bool = False, recipients: dict[int, Recipient]
    ) -> None:
        super().__init__(region, allow_pickle=allow_pickle, recipients=recipients)
        self._pipe = pipe
        self._back = back

    def _begin(self) -> None:
        self._blocks = Blocks(HEADER_NBYTES, self._memory.nbytes, self._back)
        self._encoder = Encoder(allow_pickle=self._allow_pickle)
        self._reserved: tuple[ReservationSpec, Schema] | None = None
        self._poll = select.poll()
        self._poll.register(self._back, select.POLLIN)
        self._poll.register(self._pipe, 0)
        self._watched_at = _monotonic()
        self._has_asked = False

    def _greet(self) -> None:
        if self._words[CONSUMER + WATCHED]:
            # The consumer waits for a descriptor, and must learn whom to watch while nothing is sent.
            self._say(HELLO)

    def _say(self, kind: int) -> None:
        """Send a message that carries nothing, if there is room for it."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            _write(self._pipe, pack(kind))

    @property
    def sent(self) -> int:
        """Number of batches sent: after a `send` or `commit` that a signal has interrupted, it tells whether it was."""
        return self._blocks.sent + self._blocks.is_sent if self._owner else 0

    def send(self, batch: AnyBatch, timeout_s: float | None = None, *, split: bool = False) -> None:
        """Copy a batch into a block, and send it.

        Parameters
        ----------
        batch
            A `SampleBatch`, `MultiAgentBatch` or `Batch`. Later changes to it do not reach the consumer.
        timeout_s
            Seconds to wait for a block to be free, None for as long as it takes. This is the back-pressure.
        split
            Whether a batch that is larger than half of the arena may go as several, of fewer rows each: rows, whole
            sequences, or the environment steps of a `MultiAgentBatch`. Its parts may have been sent when this raises.

        Raises
        ------
        CapacityError
            If it does not fit in the arena, and may not or cannot be split; names both sizes.
        ChannelTimeoutError
            If no block was free in time. Nothing was sent then. It is the consumer that frees them: a batch larger than
            half of the arena has to wait until that one has let go of every other.
        ChannelClosedError
            If the consumer has closed its end, or this end is closed.
        PeerDiedError
            If the consumer's process has died.
        OwnershipError
            If another process has used this end.
        UntrustedPickleError
            If a column has to be pickled and the channel does not allow it; names the column.
        ColumnTypeError
            If it is no batch, or holds a value that cannot be sent; names the value.

        Examples
        --------
        >>> from samplebatch import SampleBatch, channel
        >>> producer, consumer = channel(1 << 20)
        >>> producer.send(SampleBatch(rewards=[1.0, 2.0]))
        >>> consumer.recv()["rewards"]
        array([1., 2.])
        >>> producer.close(), consumer.close()
        (None, None)
        """
        if self._owner != this_process[0]:
            self._own()
        try:
            self._send(batch, None if timeout_s is None else deadline_of(timeout_s), split=split)
        except Exception as error:
            if self._was_closed_meanwhile(error):
                raise self._closed_error() from error
            raise

    def _send(self, batch: AnyBatch, deadline: float | None, *, split: bool) -> None:
        frame = self._encoder.encode(batch)
        rows = frame.rows
        plan = frame.schema.plan(rows, rows)
        metadata = write_metadata(frame.schema, rows, rows, frame.metadata)
        nbytes = plan.nbytes
        if metadata or frame.buffers:
            nbytes += size_of(metadata, frame.buffers)
        if nbytes > self._blocks.arena.nbytes // 2:
            # A consumer that waits for one part often has the one before still.
            parts = halve(batch) if split else []
            if parts:
                for part in parts:
                    self._send(part, deadline, split=True)
                return
            if nbytes > self._blocks.arena.nbytes:
                hint = "send it with split=True, in smaller parts or through a larger channel"
                raise self._too_large(nbytes, "make the channel larger" if split else hint)
        block = self._take(nbytes, deadline)
        copy_all(plan.targets(self._memory, block[0]), frame.arrays, plan.nbytes)
        metadata_start = block[0] + plan.nbytes
        if metadata:
            put(self._memory, metadata_start, metadata, frame.buffers)
        self._commit(frame.schema, rows, (block,), metadata_start, metadata, deadline)

    def reserve(self, like: Like, rows: int | Mapping[str, int], timeout_s: float | None = None) -> Reservation:
        """Reserve a block with columns to be filled in place, and sent by `Reservation.commit` without a copy.

        Parameters
        ----------
        like
            The columns: a batch of the same ones, with any number of rows, none for instance; or a mapping of each name
            to a dtype, a pair of dtype and row shape, or a mapping again for a nested column.
        rows
            Rows that there is to be room for; of a `MultiAgentBatch`, by policy, or one number for all.
        timeout_s
            Seconds to wait for a block to be free, None for as long as it takes.

        Raises
        ------
        CapacityError
            If the rows do not fit in the arena; names both sizes.
        RowIndexError
            If a number of rows is negative, or not given for every policy.
        ColumnTypeError
            If `like` is neither batch nor mapping, or a `Batch` with values that have no rows.
        ChannelTimeoutError, ChannelClosedError, PeerDiedError, OwnershipError
            As `send` does.
        """
        if self._owner != this_process[0]:
            self._own()
        try:
            return self._reserve(like, rows, None if timeout_s is None else deadline_of(timeout_s))
        except Exception as error:
            if self._was_closed_meanwhile(error):
                raise self._closed_error() from error
            raise

    def _reserve(self, like: Like, rows: int | Mapping[str, int], deadline: float | None) -> Reservation:
        spec, schema = self._reserved or (None, None)
        if spec is None or schema is None or not spec.fits(like):
            spec = ReservationSpec.of(like)
            schema = self._encoder.intern(spec.kind, spec.schema)
            self._reserved = spec, schema
        rooms = rows_of(rows, spec)
        plan = schema.plan(rooms, rooms)
        if plan.nbytes > self._blocks.arena.nbytes:
            raise self._too_large(plan.nbytes, "reserve fewer rows or make the channel larger")
        block = self._take(plan.roomy_nbytes, deadline)
        made = Reservation(self, spec, schema, rooms, plan, block)
        self._blocks.reserved[block[0]] = block, ref(made)
        self._blocks.is_settled = True
        return made

    def _send_reserved(
        self,
        schema: Schema,
        rows: tuple[int, ...],
        rooms: tuple[int, ...],
        block: Block,
        plan: Plan,
        metadata: dict[str, Any],
        buffers: list[npt.NDArray[np.uint8]],
        timeout_s: float | None,
    ) -> None:
        """Send the filled block of a reservation. Where that fails, the block is the reservation's still."""
        deadline = None if timeout_s is None else deadline_of(timeout_s)
        self._blocks.settle()
        text = write_metadata(schema, rows, rooms, metadata)
        metadata_start = block[0] + plan.nbytes
        own: tuple[Block, ...] = ()
        if text:
            nbytes = size_of(text, buffers)
            if nbytes > block[1] - plan.nbytes:
                if nbytes > self._blocks.arena.nbytes:
                    raise self._too_large(nbytes, "give fewer extra columns or make the channel larger")
                own = (self._take(nbytes, deadline),)
                metadata_start = own[0][0]
            put(self._memory, metadata_start, text, buffers)
        self._commit(schema, rows, (block, *own), metadata_start, text, deadline)

    # -- the parts of it -----------------------------------------------------------------------------------------------

    def _commit(
        self, schema: Schema, rows: Any, taken: tuple[Block, ...], at: int, metadata: bytes, deadline: float | None
    ) -> None:
        """Send the message that makes blocks the consumer's; where it raises, `Blocks.is_sent` tells if they are."""
        blocks = self._blocks
        number = schema.number
        start, nbytes = taken[0]
        ident = blocks.sending + 1
        body = pack_body(
            MAGIC,
            VERSION,
            BATCH,
            DEFINES if number is None else 0,
            self._encoder.next_number if number is None else number,
            ident,
            start,
            nbytes,
            at if metadata else 0,
            len(metadata),
            crc32(metadata) if metadata else 0,
            rows[0] if len(rows) == 1 and type(rows[0]) is int else 0,
        )
        raw = body + pack_sum(crc32(body))
        blocks.is_settled = False
        # No call stands between these, so no signal does.
        blocks.sent += blocks.is_sent
        blocks.is_sent = False
        blocks.sending = ident
        blocks.lent[ident] = taken
        self._write(raw, deadline)
        if blocks.reserved:
            blocks.reserved.pop(start, None)
        blocks.is_settled = True
        if number is None:
            self._encoder.mark_known(schema)

    def _write(self, raw: bytes, deadline: float | None) -> None:
        """Write a message; wait while the pipe is full. `Blocks.is_sent` is right wherever this raises."""
        if self._words[CONSUMER] == CLOSED:
            raise self._consumer_closed()
        now = _monotonic()
        if now - self._watched_at > _WATCH_S:
            self._watched_at = now
            self._wait(0.0)
        blocks = self._blocks
        while True:
            try:
                # A signal is dealt with after the call: from there on it is true.
                blocks.is_sent = True
                _write(self._pipe, raw)
                return
            except BlockingIOError:
                blocks.is_sent = False
                self._wait_until(deadline, select.POLLOUT, "the consumer has more messages waiting than a pipe holds")
            except BrokenPipeError:
                blocks.is_sent = False
                raise self._consumer_gone() from None

    def _take(self, nbytes: int, deadline: float | None) -> Block:
        """Take a block; wait while none is free."""
        blocks = self._blocks
        block = blocks.take(nbytes)
        if block is not None:
            return block
        while block is None:
            has_starved = blocks.starved_for_s >= _STARVED_S
            if has_starved and not self._has_asked:
                self._has_asked = True
                self._ask_for_collection()
            why = f"the consumer holds {len(blocks.lent)} messages, and no {nbytes} bytes are free"
            self._wait_until(deadline, 0, why, LONG_S if has_starved else _STARVED_S)
            block = blocks.take(nbytes)
        blocks.starved_since = None
        self._has_asked = False
        return block

    def _ask_for_collection(self) -> None:
        """Look for blocks that are garbage in a cycle of references, in this process or that of the consumer."""
        self._say(STARVED)
        if self._blocks.reserved or self._peer_identity().pid == this_process[0]:
            gc.collect()

    def _wait_until(self, deadline: float | None, events: int, why: str, max_s: float = LONG_S) -> None:
        """Wait for the consumer to do something: to give back a block, or to make room in the pipe.

        Raises
        ------
        ChannelTimeoutError
            If there is no time left.
        ChannelClosedError
            If the consumer has closed its end.
        PeerDiedError
            If its process has died.
        """
        left = None if deadline is None else deadline - _monotonic()
        if left is not None and left <= 0:
            raise ChannelTimeoutError(f"a batch must find room in the time given, and there was none: {why}")
        max_s = min(max_s, LOOK_S if self._peer_fd is None else LONG_S)
        left = max_s if left is None else min(left, max_s)
        self._poll.modify(self._pipe, events)
        try:
            self._wait(left)
        finally:
            self._poll.modify(self._pipe, 0)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for the consumer to do something, and see whether it is still there; raises as `_wait_until` does."""
        if self._words[CONSUMER] == CLOSED:
            raise self._consumer_closed()
        if self._peer_dead or (self._peer_fd is None and self._peer_has_died()):
            raise self._peer_died()
        for descriptor, found in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            is_broken = descriptor == self._pipe and found & select.POLLERR
            if is_broken or (descriptor == self._peer_fd and self._peer_has_died()):
                raise self._consumer_gone()

    def _await_too(self, descriptor: int) -> None:
        self._poll.register(descriptor, select.POLLIN)

    def _await_no_more(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)

    def _consumer_gone(self) -> SampleBatchError:
        """Word the error for a consumer with closed descriptors; it may have closed its end in order before."""
        return self._consumer_closed() if self._peer_was_left() else self._peer_died()

    def _consumer_closed(self) -> ChannelClosedError:
        return ChannelClosedError("the consumer must be open to be sent anything, and it has closed its end")

    def _too_large(self, nbytes: int, hint: str) -> CapacityError:
        most = self._blocks.arena.nbytes
        return CapacityError(f"a batch must fit in the channel's arena of {most} bytes, and it takes {nbytes}; {hint}")

    # -- the end of it -------------------------------------------------------------------------------------------------

    def fail(self, reason: str, details: str = "") -> None:
        """Tell the consumer that this process cannot go on; it gets that as `WorkerError`, after all batches sent.

        Does not wait for anything but room in the pipe, for at most a second. Nothing can be sent after it.

        Parameters
        ----------
        reason
            The failure in one line.
        details
            More of it, such as a traceback; what is too long loses its beginning.

        Raises
        ------
        ChannelClosedError, PeerDiedError, ChannelTimeoutError, OwnershipError
            As `send` does.
        """
        self._own()
        text = pack_failure(reason, details)
        self._memory[FAILURE_START : FAILURE_START + len(text)] = np.frombuffer(text, np.uint8)
        blocks = self._blocks
        blocks.settle()
        blocks.sent += blocks.is_sent
        blocks.is_sent = False
        blocks.sending += 1
        text_at = {"metadata_start": FAILURE_START, "metadata_nbytes": len(text), "metadata_sum": crc32(text)}
        self._write(pack(FAILURE, ident=blocks.sending, **text_at), _monotonic() + 1)
        # It is no batch.
        blocks.is_sent = False

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(OSError, SampleBatchError):
            self.fail(*describe_error(error))

    def _shut(self, *, told: bool) -> None:
        pipe, self._pipe = self._pipe, -1
        back, self._back = self._back, -1
        if told:
            with contextlib.suppress(OSError):
                # A pipe that is full is no harm: who has read it looks at the header before it waits for more.
                os.write(pipe, pack(END))
        os.close(pipe)
        os.close(back)
        if self._owner:
            self._encoder.close()
            self._reserved = None

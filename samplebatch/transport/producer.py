"""Sending end of a channel (the producer), and reserved blocks."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import ref
from zlib import crc32

import numpy as np
import numpy.typing as npt

from samplebatch import errors
from samplebatch.batch.flags import DEFAULT
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.threads import copy_all
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.transport import channel_end, wire
from samplebatch.transport.arena import Block, Blocks
from samplebatch.transport.decode import fixed_column
from samplebatch.transport.encode import AnyBatch, Encoder, PartEncoder, halve
from samplebatch.transport.peers import Recipient, deadline_of
from samplebatch.transport.region import Region
from samplebatch.transport.schema import SAMPLE_BATCH, Place, Plan, Schema, freeze

if TYPE_CHECKING:
    from samplebatch.transport.arena import Block


_BYTE = np.dtype(np.uint8)
_IMMUTABLE = (str, tuple, type, *{type(np.dtype(code)) for code in np.typecodes["All"]})


class ReservedBytes(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes of a reserved block; an unsent block is freed when the last array that views the block is deleted."""

    __slots__ = ()


class Reservation:
    """Reserved block of the arena; the block's columns are filled in place and sent without a copy.

    Created by `Producer.reserve`. `reservation["obs"]` is the array of a column in the block, with arbitrary initial
    values. As a context manager, a reservation sends all rows on exit, unless rows were sent before; an exception
    cancels the reservation.

    Attributes
    ----------
    rows
        Number of reserved rows.

    Examples
    --------
    >>> from samplebatch import channel
    >>> producer, consumer = channel(1 << 20)
    >>> with producer.reserve({"obs": ("f4", (2,)), "rewards": "f8"}, rows=100) as block:
    ...     for t in range(3):
    ...         block["obs"][t] = t
    ...         block["rewards"][t] = 0.5
    ...     block.commit(3)
    >>> batch = consumer.recv()
    >>> batch["obs"].tolist(), batch["rewards"].sum()
    ([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], np.float64(1.5))
    >>> producer.close(), consumer.close()
    (None, None)
    """

    def __init__(self, producer: Producer, schema: Schema, rows: int, plan: Plan, block: Block) -> None:
        self._producer = producer
        self._schema = schema
        self._plan = plan
        self._block = block
        self._is_open = True
        self._root: ReservedBytes | None = None
        self._arrays: dict[str, Any] = {}
        self.rows = rows

    def _places(self) -> dict[str, Place]:
        if not self._is_open:
            raise errors.ReleasedError(
                "a reservation must be open to be used, got one that was committed or cancelled; reserve again"
            )
        return self._plan.names[0]

    def _bytes(self) -> ReservedBytes:
        """Return the bytes of the block; the first call records that arrays may keep the block alive."""
        root = self._root
        if root is None:
            self._producer._acquire()
            root = self._root = ReservedBytes((self._block[1],), _BYTE, self._producer._memory, self._block[0])
            self._producer._blocks.reserved[self._block[0]] = self._block, ref(root)
        return root

    def __getitem__(self, name: str) -> Any:
        block_columns = self._places()
        array = self._arrays.get(name)
        if array is None:
            if name not in block_columns:
                raise errors.no_such_column(name, block_columns)
            array = self._arrays[name] = fixed_column(block_columns[name], self._bytes()).values
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._places())

    def __len__(self) -> int:
        return len(self._places())

    def commit(
        self,
        rows_used: int | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send the reserved rows, in constant time.

        Afterwards, the reserved arrays are read-only in the producer, because the consumer may write to their memory.

        Parameters
        ----------
        rows_used
            Number of rows to send, counted from the first row; None sends all rows.
        extra
            Additional columns by name, copied into the message's blocks. Pass columns that cannot be filled in place,
            such as Python objects, text and rows of varying shape, in `extra`.
        timeout_s
            Maximum time in seconds to wait for a block for the extra columns, and for space in the pipe.

        Raises
        ------
        RowIndexError
            If `rows_used` is negative or greater than the number of reserved rows.
        ColumnMismatchError
            If an extra column has the name of a reserved column.
        ColumnLengthError, SequenceError
            If the extra columns are not valid columns of a batch with `rows_used` rows.
        ReleasedError
            If the reservation has already been sent or cancelled.
        UntrustedPickleError
            If an extra column must be pickled and the channel does not allow pickles.
        ChannelTimeoutError
            If there is no space within `timeout_s`; the reservation is unchanged.
        ChannelClosedError, PeerDiedError, CapacityError, OwnershipError
            As in `Producer.send`.
        """
        self._places()
        self._producer._acquire()
        rows = self.rows if rows_used is None else row_count(rows_used)
        if rows > self.rows:
            raise errors.RowIndexError(f"rows_used must be at most the {self.rows} reserved rows, got {rows}")
        schema = self._schema
        metadata: dict[str, Any] = {}
        buffers: list[npt.NDArray[np.uint8]] = []
        if extra:
            schema, metadata, buffers = self._with_columns(rows, extra)
        blocks = self._producer._blocks
        before = blocks.sending
        try:
            self._producer._send_reserved(
                schema, rows, self.rows, self._block, self._plan, metadata, buffers, timeout_s
            )
        except Exception as error:
            if self._producer._was_closed_meanwhile(error):
                raise self._producer._closed_error() from error
            raise
        finally:
            # There is no call in between, so no signal handler can run: the consumer owns the sent block.
            if blocks.is_sent and blocks.sending != before:
                self._is_open = False
                self._take_back()

    def _with_columns(
        self, rows: int, extra: Mapping[str, Any]
    ) -> tuple[Schema, dict[str, Any], list[npt.NDArray[np.uint8]]]:
        """Return the schema, metadata and buffers of the filled rows and the extra columns."""
        block_columns, root = self._places(), self._bytes()
        added = SampleBatch(extra)
        columns: dict[str, Column] = {
            name: fixed_column(location, root).slice(0, rows) for name, location in block_columns.items()
        }
        encoder = PartEncoder(allow_pickle=self._producer._allow_pickle)
        for name, column in added._all().items():
            if name in block_columns:
                raise errors.ColumnMismatchError(
                    f"column {name!r} must be written in the reservation, got it as an extra column"
                )
            encoder.key.append((name,))
            encoder.variable.append(encoder.dump(name, column))
            columns[name] = column
        # Reject incompatible columns in the producer, not in the consumer.
        batch = SampleBatch._of(columns, added._nested, added._flags)
        key = (*(tuple(location.column) for location in block_columns.values()), *encoder.key)
        schema = self._producer._encoder.intern(SAMPLE_BATCH, (("", key, freeze(added._nested)),))
        metadata: dict[str, Any] = {wire.VARIABLE: [encoder.variable]}
        if batch._flags != DEFAULT:
            metadata[wire.FLAGS] = [wire.plain_flags(batch._flags)]
        return schema, metadata, encoder.buffers

    def cancel(self) -> None:
        """Cancel the reservation. Safe to call twice.

        The block is freed when the last array that views the block is deleted.
        """
        if self._is_open:
            self._is_open = False
            if self._root is None:
                self._producer._blocks.reserved[self._block[0]] = self._block, _nobody
            self._take_back()

    def _take_back(self) -> None:
        for values in self._arrays.values():
            if isinstance(values, np.ndarray):
                values.setflags(write=False)
        self._arrays = {}
        self._root = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.cancel()
        elif self._is_open:
            self.commit()

    def __repr__(self) -> str:
        state = f"{self._block[1]} bytes" if self._is_open else "sent or cancelled"
        return f"<Reservation of {self.rows} rows, {state}>"


def schema_key(columns: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """Create schema entries for columns that are specified by dtype, or by dtype and row shape.

    Raises ColumnTypeError if `columns` is not a mapping, or a column has no fixed number of bytes per row.
    """
    if isinstance(columns, SampleBatch) or not isinstance(columns, Mapping):
        raise errors.ColumnTypeError(
            "columns must be a mapping from names to dtypes or pairs of dtype and row shape, "
            f"got a {type(columns).__name__}"
        )
    return tuple((name, *_key_of(name, value)) for name, value in columns.items())


def _key_of(name: str, value: Any) -> tuple[Any, ...]:
    dtype, row_shape = value if isinstance(value, tuple) else (value, ())
    if isinstance(value, Mapping) or not isinstance(name, str):
        raise _wrong_column(name, value)
    if type(dtype).__module__ == "torch":
        import torch

        column: Column = as_column(torch.empty((0, *row_shape), dtype=dtype), name)
    else:
        try:
            column = as_column(np.empty((0, *row_shape), dtype), name)
        except (TypeError, ValueError):
            raise _wrong_column(name, value) from None
    if isinstance(column, TorchColumn):
        (_, dtype_name, shape), (values,) = column.dump()
        return values.dtype, tuple(shape[1:]), dtype_name, ""
    if isinstance(column, TensorColumn):
        return column.values.dtype, column.values.shape[1:], None, ""
    raise _wrong_column(name, value)


def _wrong_column(name: Any, value: Any) -> errors.ColumnTypeError:
    kind = "a mapping" if isinstance(value, Mapping) else repr(value)
    return errors.ColumnTypeError(
        f"column {name!r} must have a dtype of fixed size, or a pair of dtype and row shape, to be filled in place, "
        f"got {kind}; pass columns of objects, text or varying shape to commit(extra=...)"
    )


def are_same(columns: Mapping[str, Any], previous: Mapping[str, Any]) -> bool:
    """Return whether two mappings have equal names and equal immutable values in the same order."""
    if type(columns) is not dict or len(columns) != len(previous):
        return False
    return all(
        name == other and type(value) in _IMMUTABLE and value == other_value
        for (name, value), (other, other_value) in zip(columns.items(), previous.items(), strict=True)
    )


def row_count(rows: Any) -> int:
    """Validate a number of rows; raises RowIndexError if the value is not a non-negative integer."""
    if not isinstance(rows, int | np.integer) or isinstance(rows, bool) or rows < 0:
        raise errors.RowIndexError(f"rows must be a whole number from 0, got {rows!r}")
    return int(rows)


def _nobody() -> None:
    """Dead weak reference, which replaces the weak reference to the owner of a released block."""


_WATCH_S = 0.05
"""Maximum delay in seconds until the death of the consumer's process is detected while blocks are free."""

_STARVED_S = 0.05
"""Seconds without a free block after which the consumer is notified."""

_monotonic = time.monotonic
_write = os.write


class Producer(channel_end.ChannelEnd):
    """Sending end of a channel, created by `samplebatch.channel`.

    A producer belongs to the first process that uses it. Only one thread at a time may use a producer. As a context
    manager, a producer is closed on exit; if the exit is due to an exception, the exception is first reported to the
    consumer. Entering the `with` statement is the first use of the producer. A process that has sent a producer to
    another process should close its own copy, as with `multiprocessing.Pipe`.
    """

    _side = channel_end.PRODUCER
    _peer_side = channel_end.CONSUMER

    def __init__(
        self, region: Region, pipe: int, back: int, *, allow_pickle: bool = False, recipients: dict[int, Recipient]
    ) -> None:
        super().__init__(region, allow_pickle=allow_pickle, recipients=recipients)
        self._pipe = pipe
        self._back = back

    def _begin(self) -> None:
        self._blocks = Blocks(channel_end.HEADER_NBYTES, self._memory.nbytes, self._back)
        self._encoder = Encoder(allow_pickle=self._allow_pickle)
        self._reserved: tuple[Mapping[str, Any], Schema] | None = None
        self._poll = select.poll()
        self._poll.register(self._back, select.POLLIN)
        self._poll.register(self._pipe, 0)
        self._watched_at = _monotonic()
        self._has_asked = False

    def _greet(self) -> None:
        if self._words[channel_end.CONSUMER + channel_end.WATCHED]:
            # A waiting consumer must know which process to watch even before the first batch.
            self._say(wire.HELLO)

    def _say(self, kind: int) -> None:
        """Send a message that has only a kind and no content, if the pipe has space."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            _write(self._pipe, wire.pack(kind))

    @property
    def sent(self) -> int:
        """Number of batches that have been sent.

        The number shows whether an interrupted `send` or `commit` has succeeded.
        """
        return self._blocks.sent + self._blocks.is_sent if self._owner else 0

    def send(self, batch: AnyBatch, timeout_s: float | None = None, *, split: bool = False) -> None:
        """Copy a batch into a block, and send it.

        Parameters
        ----------
        batch
            A `SampleBatch`, `MultiAgentBatch` or `Batch`. Later changes to the batch do not affect the consumer.
        timeout_s
            Maximum waiting time for a free block (back-pressure), in seconds; None for no limit.
        split
            Whether a batch that is larger than half of the arena may be split and sent in parts. Splits are between
            rows, complete sequences, or environment steps of a `MultiAgentBatch`. After an error, some parts may
            already have been sent.

        Raises
        ------
        CapacityError
            If the batch exceeds the size of the arena, and `split` is false or the batch cannot be split.
        ChannelTimeoutError
            If no block is free within `timeout_s`; nothing is sent. The consumer frees blocks by deleting received
            arrays. Sending a batch larger than half of the arena may have to wait until the consumer has released all
            other batches.
        ChannelClosedError
            If the consumer has closed its end, or this end is closed.
        PeerDiedError
            If the consumer's process has died.
        OwnershipError
            If another process has used this end.
        UntrustedPickleError
            If a column must be pickled and the channel does not allow pickles.
        ColumnTypeError
            If `batch` is not a batch, or contains a value that cannot be sent.

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
        if self._owner != channel_end.this_process[0]:
            self._acquire()
        try:
            self._send(batch, None if timeout_s is None else deadline_of(timeout_s), split=split)
        except Exception as error:
            if self._was_closed_meanwhile(error):
                raise self._closed_error() from error
            raise

    def fits(self, batch: AnyBatch) -> bool:
        """Return whether a batch requires at most half of the arena, so that `send` does not split the batch."""
        frame = self._encoder.encode(batch)
        nbytes = frame.schema.plan(frame.rows, frame.rows).nbytes
        metadata = wire.write_metadata(frame.schema, frame.rows, frame.rows, frame.metadata)
        return nbytes + wire.size_of(metadata, frame.buffers) <= self._blocks.arena.nbytes // 2

    def _send(self, batch: AnyBatch, deadline: float | None, *, split: bool) -> None:
        frame = self._encoder.encode(batch)
        rows = frame.rows
        plan = frame.schema.plan(rows, rows)
        metadata = wire.write_metadata(frame.schema, rows, rows, frame.metadata)
        nbytes = plan.nbytes
        if metadata or frame.buffers:
            nbytes += wire.size_of(metadata, frame.buffers)
        if nbytes > self._blocks.arena.nbytes // 2:
            # The consumer often still uses one part while it waits for the next part.
            parts = halve(batch) if split else []
            if parts:
                for part in parts:
                    self._send(part, deadline, split=True)
                return
            if nbytes > self._blocks.arena.nbytes:
                hint = "send it with split=True, in smaller parts or through a larger channel"
                raise self._too_large(nbytes, "create a larger channel" if split else hint)
        block = self._take(nbytes, deadline)
        copy_all(plan.targets(self._memory, block[0]), frame.arrays, plan.nbytes)
        metadata_start = block[0] + plan.nbytes
        if metadata:
            wire.put(self._memory, metadata_start, metadata, frame.buffers)
        self._commit(frame.schema, rows, (block,), metadata_start, metadata, deadline)

    def reserve(self, columns: Mapping[str, Any], rows: int, timeout_s: float | None = None) -> Reservation:
        """Reserve a block for columns that are filled in place and sent without a copy by `Reservation.commit`.

        Parameters
        ----------
        columns
            NumPy or torch dtype of each column, or a pair of dtype and row shape, by column name.
        rows
            Number of rows to reserve.
        timeout_s
            Maximum waiting time for a free block, in seconds; None for no limit.

        Raises
        ------
        CapacityError
            If the rows exceed the size of the arena.
        RowIndexError
            If `rows` is not a non-negative integer.
        ColumnTypeError
            If `columns` is not a mapping, or a column has no fixed number of bytes per row.
        ChannelTimeoutError, ChannelClosedError, PeerDiedError, OwnershipError
            As in `send`.
        """
        if self._owner != channel_end.this_process[0]:
            self._acquire()
        try:
            return self._reserve(columns, rows, None if timeout_s is None else deadline_of(timeout_s))
        except Exception as error:
            if self._was_closed_meanwhile(error):
                raise self._closed_error() from error
            raise

    def _reserve(self, columns: Mapping[str, Any], rows: int, deadline: float | None) -> Reservation:
        previous, schema = self._reserved or ({}, None)
        if schema is None or not are_same(columns, previous):
            schema = self._encoder.intern(SAMPLE_BATCH, (("", schema_key(columns), ""),))
            self._reserved = dict(columns), schema
        room = row_count(rows)
        plan = schema.plan((room,), (room,))
        if plan.nbytes > self._blocks.arena.nbytes:
            raise self._too_large(plan.nbytes, "reserve fewer rows or create a larger channel")
        block = self._take(plan.roomy_nbytes, deadline)
        reservation = Reservation(self, schema, room, plan, block)
        self._blocks.reserved[block[0]] = block, ref(reservation)
        self._blocks.is_settled = True
        return reservation

    def _send_reserved(
        self,
        schema: Schema,
        rows: int,
        room: int,
        block: Block,
        plan: Plan,
        metadata: dict[str, Any],
        buffers: list[npt.NDArray[np.uint8]],
        timeout_s: float | None,
    ) -> None:
        """Send the filled block of a reservation; the reservation retains the block if an error is raised."""
        deadline = None if timeout_s is None else deadline_of(timeout_s)
        self._blocks.settle()
        text = wire.write_metadata(schema, (rows,), (room,), metadata)
        metadata_start = block[0] + plan.nbytes
        metadata_blocks: tuple[Block, ...] = ()
        if text:
            nbytes = wire.size_of(text, buffers)
            if nbytes > block[1] - plan.nbytes:
                if nbytes > self._blocks.arena.nbytes:
                    raise self._too_large(nbytes, "pass fewer extra columns or create a larger channel")
                metadata_blocks = (self._take(nbytes, deadline),)
                metadata_start = metadata_blocks[0][0]
            wire.put(self._memory, metadata_start, text, buffers)
        self._commit(schema, (rows,), (block, *metadata_blocks), metadata_start, text, deadline)

    # -- sending messages ----------------------------------------------------------------------------------------------

    def _commit(
        self, schema: Schema, rows: Any, used: tuple[Block, ...], at: int, metadata: bytes, deadline: float | None
    ) -> None:
        """Send the message that transfers blocks to the consumer.

        `Blocks.is_sent` records whether the message was written, even if an error is raised.
        """
        blocks = self._blocks
        number = schema.number
        start, nbytes = used[0]
        ident = blocks.sending + 1
        body = wire.pack_body(
            wire.MAGIC,
            wire.VERSION,
            wire.BATCH,
            wire.DEFINES if number is None else 0,
            self._encoder.next_number if number is None else number,
            ident,
            start,
            nbytes,
            at if metadata else 0,
            len(metadata),
            crc32(metadata) if metadata else 0,
            rows[0] if len(rows) == 1 and type(rows[0]) is int else 0,
        )
        raw = body + wire.pack_sum(crc32(body))
        blocks.is_settled = False
        # No call between these statements, so no signal handler can run in between.
        blocks.sent += blocks.is_sent
        blocks.is_sent = False
        blocks.sending = ident
        blocks.lent[ident] = used
        self._write(raw, deadline)
        if blocks.reserved:
            blocks.reserved.pop(start, None)
        blocks.is_settled = True
        if number is None:
            self._encoder.mark_known(schema)

    def _write(self, raw: bytes, deadline: float | None) -> None:
        """Write a message and set `Blocks.is_sent`; wait while the pipe is full."""
        if self._words[channel_end.CONSUMER] == channel_end.CLOSED:
            raise self._consumer_closed()
        now = _monotonic()
        if now - self._watched_at > _WATCH_S:
            self._watched_at = now
            self._wait(0.0)
        blocks = self._blocks
        while True:
            try:
                # A signal handler runs after the call, when the flag is correct.
                blocks.is_sent = True
                _write(self._pipe, raw)
                return
            except BlockingIOError:
                blocks.is_sent = False
                self._wait_until(
                    deadline, select.POLLOUT, "the pipe is full of messages that the consumer has not received"
                )
            except BrokenPipeError:
                blocks.is_sent = False
                raise self._consumer_gone() from None

    def _take(self, nbytes: int, deadline: float | None) -> Block:
        blocks = self._blocks
        block = blocks.take(nbytes)
        if block is not None:
            return block
        while block is None:
            has_starved = blocks.starved_for_s >= _STARVED_S
            if has_starved and not self._has_asked:
                self._has_asked = True
                self._ask_for_collection()
            why = f"the consumer retains {len(blocks.lent)} messages, and no block of {nbytes} bytes is free"
            self._wait_until(deadline, 0, why, channel_end.LONG_S if has_starved else _STARVED_S)
            block = blocks.take(nbytes)
        blocks.starved_since = None
        self._has_asked = False
        return block

    def _ask_for_collection(self) -> None:
        """Request a garbage collection in the consumer and in this process, to free blocks in reference cycles."""
        self._say(wire.STARVED)
        if self._blocks.reserved or self._peer_identity().pid == channel_end.this_process[0]:
            gc.collect()

    def _wait_until(self, deadline: float | None, events: int, why: str, max_s: float = channel_end.LONG_S) -> None:
        """Wait until the consumer returns a block or makes space in the pipe.

        Raises ChannelTimeoutError if the deadline has passed. Raises ChannelClosedError if the consumer has closed its
        end. Raises PeerDiedError if the consumer's process has died.
        """
        left = None if deadline is None else deadline - _monotonic()
        if left is not None and left <= 0:
            raise errors.ChannelTimeoutError(f"a batch must be sent within the timeout: {why}")
        max_s = min(max_s, channel_end.LOOK_S if self._peer_fd is None else channel_end.LONG_S)
        left = max_s if left is None else min(left, max_s)
        self._poll.modify(self._pipe, events)
        try:
            self._wait(left)
        finally:
            self._poll.modify(self._pipe, 0)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for the consumer and check that its process is alive.

        Raises the errors of `_wait_until`, except ChannelTimeoutError.
        """
        if self._words[channel_end.CONSUMER] == channel_end.CLOSED:
            raise self._consumer_closed()
        if self._peer_dead or (self._peer_fd is None and self._peer_has_died()):
            raise self._peer_died()
        for descriptor, event in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            is_broken = descriptor == self._pipe and event & select.POLLERR
            if is_broken or (descriptor == self._peer_fd and self._peer_has_died()):
                raise self._consumer_gone()

    def _await_too(self, descriptor: int) -> None:
        self._poll.register(descriptor, select.POLLIN)

    def _await_no_more(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)

    def _consumer_gone(self) -> errors.SampleBatchError:
        """Create the error for a consumer whose descriptors are closed: ChannelClosedError or PeerDiedError."""
        return self._consumer_closed() if self._peer_was_left() else self._peer_died()

    def _consumer_closed(self) -> errors.ChannelClosedError:
        return errors.ChannelClosedError("the consumer must be open to receive batches, got a closed end")

    def _too_large(self, nbytes: int, hint: str) -> errors.CapacityError:
        max_nbytes = self._blocks.arena.nbytes
        return errors.CapacityError(
            f"a batch must fit in the channel's arena of {max_nbytes} bytes, got {nbytes} bytes; {hint}"
        )

    # -- failing and closing -------------------------------------------------------------------------------------------

    def fail(self, reason: str, details: str = "") -> None:
        """Report to the consumer that this process cannot continue; `recv` raises WorkerError after the last batch.

        This method waits only for space in the pipe, and at most one second. After this call, the producer cannot send
        any further batch.

        Parameters
        ----------
        reason
            Description of the failure in one line.
        details
            Details, such as a traceback; only the end of a long text is sent.

        Raises
        ------
        ChannelClosedError, PeerDiedError, ChannelTimeoutError, OwnershipError
            As in `send`.
        """
        self._acquire()
        text = channel_end.pack_failure(reason, details)
        self._memory[channel_end.FAILURE_START : channel_end.FAILURE_START + len(text)] = np.frombuffer(text, np.uint8)
        blocks = self._blocks
        blocks.settle()
        blocks.sent += blocks.is_sent
        blocks.is_sent = False
        blocks.sending += 1
        text_at = {
            "metadata_start": channel_end.FAILURE_START,
            "metadata_nbytes": len(text),
            "metadata_sum": crc32(text),
        }
        self._write(wire.pack(wire.FAILURE, ident=blocks.sending, **text_at), _monotonic() + 1)
        # A failure is not a batch.
        blocks.is_sent = False

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(OSError, errors.SampleBatchError):
            self.fail(*channel_end.describe_error(error))

    def _shut(self, *, notify: bool) -> None:
        pipe, self._pipe = self._pipe, -1
        back, self._back = self._back, -1
        if notify:
            with contextlib.suppress(OSError):
                # A full pipe is harmless: the consumer reads the header before it waits for further messages.
                os.write(pipe, wire.pack(wire.END))
        os.close(pipe)
        os.close(back)
        if self._owner:
            self._encoder.close()
            self._reserved = None

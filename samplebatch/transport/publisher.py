"""Publisher: the end of a broadcast that publishes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections.abc import Mapping
from multiprocessing import util
from types import TracebackType
from typing import Any, Final, NoReturn, Self
from zlib import crc32

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.threads import copy_all
from samplebatch.errors import CapacityError, ChannelClosedError, ColumnTypeError, OwnershipError
from samplebatch.transport import weights
from samplebatch.transport.board import Board
from samplebatch.transport.encode import Encoder, Frame, bytes_of
from samplebatch.transport.peers import ProcessIdentity, Recipient, Transferable, arguments_of
from samplebatch.transport.region import Region
from samplebatch.transport.schema import align
from samplebatch.transport.wire import ROWS, SCHEMA, pack_metadata

WEIGHTS: Final = "w"
"""Name of the entry of a publication's metadata that tells weights from a batch."""

_getpid = os.getpid


class Publisher(Transferable):
    """The end of a broadcast that publishes; `samplebatch.broadcast` makes it.

    It belongs to the first process that publishes or closes it; when that has died, to the next. Until then it is the
    process that it was given to that readers miss if it dies. Threads may publish at the same time, and go one after
    the other.
    """

    def __init__(self, board: Board, *, allow_pickle: bool = False, recipients: list[Recipient]) -> None:
        self._board: Board | None = board
        self._allow_pickle = allow_pickle
        self._recipients = recipients
        """The process that this process has given the end to, if it did; its subscription knows of it too."""
        self._holder = 0
        """The process that this end was given to, or that made it."""
        self._owner = 0
        """The process that this end has published in."""
        self._publishing = threading.Lock()
        self._encoder = Encoder(allow_pickle=allow_pickle)
        self._described: tuple[Any, bytes] = (None, b"")
        self._at_exit: util.Finalize | None = None
        util.register_after_fork(self, type(self)._after_fork)

    @property
    def version(self) -> int:
        """Number of the newest publication, 0 if there is none yet.

        Raises
        ------
        ChannelClosedError
            If this end is closed.
        """
        return self._open().status.newest

    @property
    def capacity_bytes(self) -> int:
        """Bytes that a publication may have, its description included; raises as `version` does."""
        return self._open().block_nbytes

    @property
    def closed(self) -> bool:
        """Whether `close` has been called in this process."""
        return self._board is None

    def publish(self, value: Any) -> int:
        """Publish a batch or weights in place of the publication before. This never waits for a reader.

        Parameters
        ----------
        value
            A `SampleBatch`, `MultiAgentBatch` or `Batch`, or a dict of arrays and tensors, flat or nested. It is
            copied: readers are not affected by later changes of it. Gradients do not go along with weights.

        Returns
        -------
        The number of the publication, one more than that before.

        Raises
        ------
        CapacityError
            If it has more bytes than the broadcast has room for; names both.
        ColumnTypeError
            If it is neither a batch nor weights, or holds a value that cannot be sent; names the value.
        UntrustedPickleError
            If a value has to be pickled and the broadcast does not allow it; names the value.
        DeviceError
            If a tensor is not in host memory; names it.
        OwnershipError
            If another process publishes.
        ChannelClosedError
            If this end is closed.

        Examples
        --------
        >>> from samplebatch import SampleBatch, broadcast
        >>> publisher, subscription = broadcast(1 << 20)
        >>> publisher.publish(SampleBatch(obs=[1.0, 2.0])), publisher.publish(SampleBatch(obs=[3.0]))
        (1, 2)
        >>> subscription.latest().value["obs"]
        array([3.])
        >>> publisher.close(), subscription.close()
        (None, None)
        """
        board = self._own()
        with self._publishing:
            frame, kind = self._encode(value)
            plan = frame.schema.plan(frame.rows, frame.rows)
            head = self._describe(frame, kind)
            sizes = [align(buffer.nbytes) for buffer in frame.buffers]
            nbytes = plan.nbytes + sum(sizes)
            if nbytes + len(head) > board.block_nbytes:
                raise CapacityError(
                    f"a publication must fit in the broadcast's {board.block_nbytes} bytes, and this one takes "
                    f"{nbytes + len(head)}; make the broadcast larger"
                )
            block = board.begin()
            targets = plan.arrays(block, 0)
            at = plan.nbytes
            for buffer, size in zip(frame.buffers, sizes, strict=True):
                targets.append(block[at : at + buffer.nbytes])
                at += size
            copy_all(targets, [*frame.arrays, *frame.buffers], nbytes)
            block[nbytes : nbytes + len(head)] = bytes_of(head)
            return board.publish(nbytes, len(head), crc32(head))

    def close(self) -> None:
        """Close this end: readers learn that there will be no more, and can still read the newest. Safe to call twice.

        Where another process publishes, nobody learns anything.
        """
        board, self._board = self._board, None
        if board is None:
            return
        if self._owner == _getpid() or (self._holder == _getpid() and board.writer == ProcessIdentity.own()):
            board.close()
        if self._at_exit is not None:
            self._at_exit.cancel()
        board.region.close()

    def _encode(self, value: Any) -> tuple[Frame, int]:
        """Encode a batch or weights; return the frame, and 1 for weights, 0 for a batch."""
        if isinstance(value, SampleBatch | MultiAgentBatch | Batch):
            return self._encoder.encode(value), 0
        if isinstance(value, Mapping):
            return self._encoder.encode(weights.as_batch(value)), 1
        hint = "; pass its state_dict()" if hasattr(value, "state_dict") else ""
        raise ColumnTypeError(
            f"a published value must be a batch, or a dict of arrays and tensors, got a {type(value).__name__}{hint}"
        )

    def _describe(self, frame: Frame, kind: int) -> bytes:
        """Describe a publication; the description of the one before is used again if it fits."""
        key = (frame.schema, frame.rows, kind, frame.metadata)
        if key != self._described[0]:
            described = {**frame.metadata, SCHEMA: frame.schema.describe(), ROWS: frame.rows, WEIGHTS: kind}
            self._described = key, pack_metadata(described)
        return self._described[1]

    def _own(self) -> Board:
        """Become the publishing process, or see that it is this one already."""
        board = self._open()
        if self._owner != _getpid():
            writer = board.claim()
            if writer.pid != _getpid():
                raise OwnershipError(
                    f"a publisher belongs to the first process that publishes, which is process {writer.pid}, and "
                    f"cannot be used by process {_getpid()} too; make a broadcast for each"
                )
            self._owner = writer.pid
            self._recipients.clear()
            self._close_at_exit()
        return board

    def _hold(self) -> None:
        """Note that this process is to publish, so that it is missed if it dies before it has."""
        board = self._board
        if board is not None:
            board.hold()
            self._holder = _getpid()
            self._close_at_exit()

    def _close_at_exit(self) -> None:
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._at_exit = util.Finalize(None, _close, (weakref.ref(self),), exitpriority=100)

    def _after_fork(self) -> None:
        """Hold an end in a child of `multiprocessing` that it was made for, or that has just been given it."""
        process = multiprocessing.current_process()
        if self._holder == _getpid() or any(value is self for value in arguments_of(process)):
            self._hold()

    def _give(self, recipient: Recipient | None) -> bool:
        if self._board is None or self._owner == _getpid():
            return False
        self._holder = 0
        self._recipients[:] = [] if recipient is None else [recipient]
        return True

    def _open(self) -> Board:
        if self._board is None:
            raise ChannelClosedError("a publisher must be open to be used, and it is closed")
        return self._board

    def _hand_over(self) -> Region:
        """Return the memory for another process to publish in, unless this one publishes already."""
        board = self._open()
        if not self._give(Recipient.find_spawning()):
            raise OwnershipError(
                "a publisher must be sent to another process before it has published, and it has; make another one"
            )
        return board.region

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_board", None) is not None:
            # One that loses it unused, as a process does that fails while it starts, has not come to an end in order.
            self._holder = 0
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Publisher goes to other processes by multiprocessing only, and cannot be pickled otherwise")


def _close(reference: weakref.ref[Publisher]) -> None:
    """Close the end of a process that exits in order, so that it is not taken for dead."""
    publisher = reference()
    if publisher is not None:
        publisher.close()

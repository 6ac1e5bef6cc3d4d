"""Broadcast of batches or weights: one process publishes, and any number of processes read the newest publication."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction, util
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt

from samplebatch import errors
from samplebatch.arguments import whole
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import ARRAY, KINDS, TENSOR, Node, node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column import memory
from samplebatch.column.threads import copy_all
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.transport import peers
from samplebatch.transport.decode import DAMAGE, decode
from samplebatch.transport.encode import Encoder, Frame, bytes_of
from samplebatch.transport.region import NBYTES, Region, SharedCounters, fence
from samplebatch.transport.schema import NESTED_BATCH, Fixed, Part, Place, Plan, Schema, align
from samplebatch.transport.wire import ROWS, SCHEMA, pack_metadata, read_rows, unpack_metadata

WEIGHTS: Final = "w"
"""Metadata entry of a publication that distinguishes weights from a batch."""

_getpid = os.getpid

_PAGE: Final = os.sysconf("SC_PAGESIZE")

_MAGIC: Final = int.from_bytes(b"SBBOARD1", "little")

_MAGIC_WORD, _BLOCKS, _STATUS, _PID, _STARTED, _PUBLISHES = range(6)

_HOLDS, _VALUES_NBYTES, _HEAD_NBYTES, _HEAD_SUM = range(4)

_BOARD_WORDS = 8

_BLOCK_WORDS = 8

_WORDS = _PAGE // NBYTES

MIN_BLOCKS: Final = 2

MAX_BLOCKS: Final = (_WORDS - _BOARD_WORDS) // _BLOCK_WORDS

DEFAULT_NBYTES: Final = 64 << 20

_LOOK_S = 0.1
"""Maximum delay in seconds until the death of the publisher's process is detected."""

_MIN_TRIES: Final = 3

_BYTE = np.dtype(np.uint8)

_monotonic = time.monotonic


@dataclass(frozen=True)
class Publication:
    """Private copy of a publication.

    Attributes
    ----------
    version
        Number of the publication.
    value
        Published batch or weights.
    """

    version: int
    value: Any


class Publisher(peers.Transferable):
    """Publishing end of a broadcast, created by `samplebatch.broadcast`.

    A publisher belongs to the first process that publishes a value or closes the publisher. If the owning process dies,
    the publisher belongs to the next process that publishes a value or closes the publisher. Before the first
    publication, readers detect the death of the process that received the publisher. Concurrent calls are serialized.
    """

    def __init__(self, board: Board, *, allow_pickle: bool = False, recipients: list[peers.Recipient]) -> None:
        self._board: Board | None = board
        self._allow_pickle = allow_pickle
        self._recipients = recipients
        """Process that received the end from this process, if any; its subscription is informed too."""
        self._holder = 0
        """Process that received this end, or created it."""
        self._owner = 0
        """The process that this end has published in."""
        self._publishing = threading.Lock()
        self._encoder = Encoder(allow_pickle=allow_pickle)
        self._described: tuple[Any, bytes] = (None, b"")
        self._at_exit: util.Finalize | None = None
        util.register_after_fork(self, type(self)._after_fork)

    @property
    def version(self) -> int:
        """Number of the newest publication; 0 before the first publication.

        Raises
        ------
        ChannelClosedError
            If this end is closed.
        """
        return self._open().status.newest

    @property
    def capacity_nbytes(self) -> int:
        """Maximum size of a publication in bytes, including its description.

        Raises ChannelClosedError if this end is closed.
        """
        return self._open().block_nbytes

    @property
    def closed(self) -> bool:
        """Whether `close` has been called in this process."""
        return self._board is None

    def publish(self, value: Any) -> int:
        """Publish a batch or weights in place of the previous publication. Never waits for readers.

        Parameters
        ----------
        value
            A `SampleBatch`, `MultiAgentBatch` or `Batch`, or a dict of arrays and tensors, flat or nested. The value is
            copied, so later changes to the value do not affect readers. Gradients are not published.

        Returns
        -------
        Number of the publication: the previous publication's number plus one.

        Raises
        ------
        CapacityError
            If the value exceeds the capacity of the broadcast.
        ColumnTypeError
            If the value is neither a batch nor weights, or contains a value that cannot be sent.
        UntrustedPickleError
            If a value must be pickled and the broadcast does not allow pickles.
        DeviceError
            If a tensor is not in host memory.
        OwnershipError
            If another process publishes.
        ChannelClosedError
            If this end is closed.

        Examples
        --------
        >>> from samplebatch import SampleBatch, broadcast
        >>> publisher, subscription = broadcast(1 << 20)
        >>> (
        ...     publisher.publish(SampleBatch(obs=[1.0, 2.0])),
        ...     publisher.publish(SampleBatch(obs=[3.0])),
        ... )
        (1, 2)
        >>> subscription.latest().value["obs"]
        array([3.])
        >>> publisher.close(), subscription.close()
        (None, None)
        """
        board = self._acquire()
        with self._publishing:
            frame, kind = self._encode(value)
            plan = frame.schema.plan(frame.rows, frame.rows)
            head = self._describe(frame, kind)
            sizes = [align(buffer.nbytes) for buffer in frame.buffers]
            nbytes = plan.nbytes + sum(sizes)
            if nbytes + len(head) > board.block_nbytes:
                raise errors.CapacityError(
                    f"a publication must fit in the broadcast's {board.block_nbytes} bytes, got {nbytes + len(head)} "
                    "bytes; create a larger broadcast"
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
        """Close this end and end the broadcast; readers can still read the newest publication. Safe to call twice.

        If the publisher belongs to another process, the broadcast continues.
        """
        board, self._board = self._board, None
        if board is None:
            return
        if self._owner == _getpid() or (self._holder == _getpid() and board.writer == peers.ProcessIdentity.own()):
            board.close()
        if self._at_exit is not None:
            self._at_exit.cancel()
        board.region.close()

    def _encode(self, value: Any) -> tuple[Frame, int]:
        """Encode a batch or weights; return the encoded frame, and 1 for weights or 0 for a batch."""
        if isinstance(value, SampleBatch | MultiAgentBatch | Batch):
            return self._encoder.encode(value), 0
        if isinstance(value, Mapping):
            return self._encoder.encode(weights_to_batch(value)), 1
        hint = "; pass its state_dict()" if hasattr(value, "state_dict") else ""
        raise errors.ColumnTypeError(
            f"a published value must be a batch, or a dict of arrays and tensors, got a {type(value).__name__}{hint}"
        )

    def _describe(self, frame: Frame, kind: int) -> bytes:
        """Serialize the description of a publication, or reuse the previous result if the description is unchanged."""
        key = (frame.schema, frame.rows, kind, frame.metadata)
        if key != self._described[0]:
            described = {**frame.metadata, SCHEMA: frame.schema.describe(), ROWS: frame.rows, WEIGHTS: kind}
            self._described = key, pack_metadata(described)
        return self._described[1]

    def _acquire(self) -> Board:
        """Claim the publisher for this process, unless this process already owns it."""
        board = self._open()
        if self._owner != _getpid():
            writer = board.claim()
            if writer.pid != _getpid():
                raise errors.OwnershipError(
                    f"a publisher must be used by process {writer.pid}, which published first, got process {_getpid()}"
                    "; create one broadcast per process"
                )
            self._owner = writer.pid
            self._recipients.clear()
            self._close_at_exit()
        return board

    def _hold(self) -> None:
        """Register this process as the future publisher, so that readers detect its death."""
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
        process = multiprocessing.current_process()
        if self._holder == _getpid() or any(value is self for value in peers.arguments_of(process)):
            self._hold()

    def _give(self, recipient: peers.Recipient | None) -> bool:
        if self._board is None or self._owner == _getpid():
            return False
        self._holder = 0
        self._recipients[:] = [] if recipient is None else [recipient]
        return True

    def _open(self) -> Board:
        if self._board is None:
            raise errors.ChannelClosedError("a publisher must be open to be used, got a closed one")
        return self._board

    def _hand_over(self) -> Region:
        """Return the memory for the process that receives this end; reject a publisher that has published a value."""
        board = self._open()
        if not self._give(peers.Recipient.find_spawning()):
            raise errors.OwnershipError(
                "a publisher must be sent to another process before its first publication, got one that has published; "
                "create another broadcast"
            )
        return board.region

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_board", None) is not None:
            # A process that deletes an unused end, for example because its startup failed, has not ended normally.
            self._holder = 0
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Publisher must be pickled by multiprocessing, got another pickler")


def _close(reference: weakref.ref[Publisher]) -> None:
    """Close the publisher of a process that exits normally, so that readers do not report the process as dead."""
    publisher = reference()
    if publisher is not None:
        publisher.close()


@dataclass(frozen=True)
class _Description:
    schema: Schema
    plan: Plan
    metadata: dict[str, Any]
    is_weights: bool


class Subscription:
    """Reading end of a broadcast, created by `samplebatch.broadcast`.

    Any number of processes may read at the same time; each process reads a private copy of the publication. Within a
    process, one thread at a time may use a subscription. A subscription maps the memory read-only, so a reader cannot
    damage the weights of other readers.
    """

    def __init__(self, board: Board, *, allow_pickle: bool = False, recipients: Sequence[peers.Recipient] = ()) -> None:
        self._board: Board | None = board
        self._allow_pickle = allow_pickle
        self._recipients = recipients
        self._watch: peers.ProcessWatch | None = None
        self._last: tuple[bytes, _Description] | None = None

    @property
    def version(self) -> int:
        """Number of the newest publication; 0 before the first publication.

        Raises
        ------
        ChannelClosedError
            If this end is closed.
        """
        return self._open().status.newest

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._board is None

    def latest(self, timeout_s: float | None = None, *, into: Mapping[str, Any] | None = None) -> Publication:
        """Copy the newest publication; wait if nothing has been published yet.

        Parameters
        ----------
        timeout_s
            Maximum waiting time in seconds; None for no limit.
        into
            Arrays and tensors to which the weights are copied, such as a model's `state_dict()`; None allocates new
            memory. The names, shapes and dtypes in `into` must match the publication. After a `ChannelTimeoutError`,
            the values in `into` are undefined.

        Returns
        -------
        Number and value of the publication; the value is `into`, or a copy that belongs to the caller.

        Raises
        ------
        ChannelTimeoutError
            If there is no publication within `timeout_s`, or every publication within this time was overwritten before
            it had been copied.
        EndOfStreamError
            If the publisher was closed before the first publication.
        PeerDiedError
            If the publisher's process died before the first publication.
        ColumnMismatchError
            If the publication does not match `into`; the message contains the first difference.
        UntrustedPickleError
            If a value is pickled and the broadcast does not allow pickles.
        FormatError
            If the memory contains no valid publication.
        ChannelClosedError
            If this end is closed.

        Examples
        --------
        >>> import numpy as np
        >>> from samplebatch import broadcast
        >>> publisher, subscription = broadcast(1 << 20)
        >>> publisher.publish({"bias": np.ones(2)})
        1
        >>> weights = {"bias": np.zeros(2)}
        >>> subscription.latest(into=weights).version, weights["bias"]
        (1, array([1., 1.]))
        >>> publisher.close(), subscription.close()
        (None, None)
        """
        return self.wait_for(1, timeout_s, into=into)

    def wait_for(
        self, version: int, timeout_s: float | None = None, *, into: Mapping[str, Any] | None = None
    ) -> Publication:
        """Wait until the newest publication's version is at least `version`, and copy the newest publication.

        Parameters
        ----------
        version
            Version to wait for; to wait for the next publication, pass the last version that was read plus one.
        timeout_s, into
            As in `latest`.

        Returns
        -------
        As in `latest`.

        Raises
        ------
        EndOfStreamError
            If the publisher was closed before it published `version`.
        PeerDiedError
            If the publisher's process died before it published `version`.
        ChannelTimeoutError, ColumnMismatchError, UntrustedPickleError, FormatError, ChannelClosedError
            As in `latest`.
        """
        board = self._open()
        deadline = peers.deadline_of(timeout_s)
        tries = 0
        while True:
            newest = self._await(board, version, deadline)
            content = board.content(newest)
            publication = None if content is None else self._copy(board, newest, content, into)
            if publication is not None:
                return publication
            # The publication was overwritten during the copy.
            tries += 1
            if deadline is not None and tries >= _MIN_TRIES and _monotonic() > deadline:
                raise errors.ChannelTimeoutError(
                    f"a publication must remain until it is copied, got {tries} that were overwritten; publish less "
                    "often, or create the broadcast with more blocks"
                )

    def close(self) -> None:
        """Close this end; subscriptions in other processes remain open. Safe to call twice."""
        board, self._board = self._board, None
        if board is not None:
            board.region.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _await(self, board: Board, version: int, deadline: float | None) -> int:
        while True:
            status = board.status
            if status.newest >= version:
                return status.newest
            missing = f"publication {version} must be published to be read, the newest is {status.newest}"
            if status.closed:
                raise errors.EndOfStreamError(f"{missing}: the publisher has closed its end")
            if self._publisher_has_died(board) and board.status == status:
                raise errors.PeerDiedError(f"{missing}: the publisher's process {board.writer.pid} has died")
            left_s = _LOOK_S if deadline is None else min(_LOOK_S, deadline - _monotonic())
            if left_s <= 0:
                raise errors.ChannelTimeoutError(f"{missing} at the end of the timeout")
            board.wait(status, left_s)

    def _publisher_has_died(self, board: Board) -> bool:
        writer = board.writer
        if writer.pid == _getpid() and self._recipients and self._recipients[0].has_ended():
            # This process has sent the publisher to a process that died while it started.
            return board.writer == writer
        if self._watch is None or self._watch.identity != writer:
            self._watch = peers.ProcessWatch(writer)
        return not self._watch.is_alive()

    def _copy(self, board: Board, version: int, content: Content, into: Mapping[str, Any] | None) -> Publication | None:
        """Copy a publication; return None if the publication was overwritten during the copy."""
        described = self._describe(content)
        if into is not None:
            if not described.is_weights:
                raise errors.ColumnMismatchError(
                    f"publication {version} must be a dict of weights to be copied with into, got a "
                    f"{described.schema.kind}; read it without into"
                )
            write_weights(into, described.schema.parts[0], described.plan.parts[0], content.values)
            return Publication(version, into) if board.still_holds(version) else None
        private = memory.empty(content.values.shape, _BYTE)
        copy_all([private], [content.values], private.nbytes)
        if not board.still_holds(version):
            return None
        schema, plan = described.schema, described.plan
        cut = _cutter(private, plan.nbytes)
        try:
            value = decode(schema, plan, described.metadata, private, cut, allow_pickle=self._allow_pickle)
        except (errors.FormatError, errors.UntrustedPickleError):
            raise
        except DAMAGE as error:
            raise errors.FormatError(f"a publication must match its schema: {error}") from error
        return Publication(
            version, batch_to_weights(value) if isinstance(value, Batch) and described.is_weights else value
        )

    def _describe(self, content: Content) -> _Description:
        """Decode the description of a publication, or reuse the previous result if the description is identical."""
        if self._last is None or self._last[0] != content.head:
            metadata = unpack_metadata(content.head, content.head_sum)
            schema = Schema.read(metadata.pop(SCHEMA, None))
            rows = read_rows(metadata.pop(ROWS, None))
            is_weights = bool(metadata.pop(WEIGHTS, 0))
            if is_weights and schema.kind != NESTED_BATCH:
                raise errors.FormatError(f"weights must be published as a nested batch, got a {schema.kind}")
            try:
                plan = schema.plan(rows, rows)
            except ValueError as error:
                raise errors.FormatError(f"a publication must have the rows of its schema: {error}") from error
            self._last = content.head, _Description(schema, plan, metadata, is_weights)
        described = self._last[1]
        if described.plan.nbytes > len(content.values):
            raise errors.FormatError(
                f"a publication's values must fit in its {len(content.values)} bytes, got {described.plan.nbytes} bytes"
            )
        return described

    def _open(self) -> Board:
        if self._board is None:
            raise errors.ChannelClosedError("a subscription must be open to be used, got a closed one")
        return self._board

    def _hand_over(self) -> Region:
        return self._open().region

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Subscription must be pickled by multiprocessing, got another pickler")


def _cutter(root: npt.NDArray[np.uint8], start: int) -> Callable[[int], npt.NDArray[np.uint8]]:
    """Return a function that slices the buffers of variable columns, each at the next aligned offset."""
    at = start

    def cut(nbytes: int) -> npt.NDArray[np.uint8]:
        nonlocal at
        begin, at = at, at + align(nbytes)
        if begin + nbytes > len(root):
            raise errors.FormatError(
                f"a publication must contain the {nbytes} bytes of a buffer, got {max(0, len(root) - begin)}"
            )
        return root[begin : begin + nbytes]

    return cut


class Status(NamedTuple):
    """Progress of a broadcast.

    - `newest`: number of the newest publication; 0 before the first publication.
    - `closed`: whether the broadcast has ended.
    """

    newest: int
    closed: bool


class Content(NamedTuple):
    """Bytes of a publication in a block.

    - `values`: bytes of the values, shape (nbytes,).
    - `head`: copy of the description.
    - `head_sum`: expected checksum of the description.
    """

    values: npt.NDArray[np.uint8]
    head: bytes
    head_sum: int


class Board:
    """Shared memory of a broadcast, with blocks for publications and counters that record each block's publication.

    - `region`: shared memory that `create` has initialized in this process or in another process.

    Its attributes:
    - `blocks`: number of blocks.
    - `block_nbytes`: size in bytes of a block, which contains values and their description.

    Raises FormatError if `create` has not initialized the region.
    """

    def __init__(self, region: Region) -> None:
        words = SharedCounters(region.array, _WORDS) if region.nbytes > _PAGE else None
        # Read once: other processes may change it.
        blocks = 0 if words is None else words[_BLOCKS]
        if words is None or words[_MAGIC_WORD] != _MAGIC or not MIN_BLOCKS <= blocks <= MAX_BLOCKS:
            raise errors.FormatError(
                f"a broadcast's memory must have its layout, got {region.nbytes} bytes of another layout"
            )
        self.region = region
        self.blocks = blocks
        self.block_nbytes = (region.nbytes - _PAGE) // self.blocks
        self._words = words
        self._memory = region.array

    @classmethod
    def create(cls, block_nbytes: int, blocks: int) -> Self:
        """Create shared memory with blocks of `block_nbytes` bytes each, rounded up to a multiple of the page size.

        Raises SharedMemoryError if there is not enough free memory.
        """
        block_nbytes = -(-block_nbytes // _PAGE) * _PAGE
        region = Region.create(_PAGE + blocks * block_nbytes)
        words = SharedCounters(region.array, _WORDS)
        words[_BLOCKS], words[_MAGIC_WORD] = blocks, _MAGIC
        board = cls(region)
        board.hold()
        return board

    def read_only(self) -> Self:
        """Return a read-only view of this memory; a process that receives the view cannot write to the memory."""
        return type(self)(self.region.read_only())

    @property
    def status(self) -> Status:
        """Progress of the broadcast."""
        word = self._words[_STATUS]
        return Status(word >> 1, bool(word & 1))

    @property
    def writer(self) -> peers.ProcessIdentity:
        """Identity of the publishing process, or of the registered future publisher before the first publication."""
        pid = self._words[_PID]
        fence()
        return peers.ProcessIdentity(pid, self._words[_STARTED])

    def wait(self, last_status: Status, timeout_s: float) -> None:
        """Wait until the status differs from `last_status` or the timeout elapses; may return earlier."""
        self._words.wait(_STATUS, last_status.newest << 1 | last_status.closed, timeout_s)

    # -- writing -------------------------------------------------------------------------------------------------------

    def claim(self) -> peers.ProcessIdentity:
        """Claim the broadcast for this process, unless another running process owns it; return the owner."""
        return self._enter(publishes=1)

    def hold(self) -> peers.ProcessIdentity:
        """Register this process as the future publisher, and return the owner, as `claim` does.

        After the registration, readers detect the death of this process.
        """
        return self._enter(publishes=0)

    def _enter(self, publishes: int) -> peers.ProcessIdentity:
        identity, words = peers.ProcessIdentity.own(), self._words
        # The system releases the lock if this process dies.
        fcntl.lockf(self.region.fileno(), fcntl.LOCK_EX, NBYTES, _PID * NBYTES)
        try:
            writer = self.writer
            if words[_PUBLISHES] and (writer == identity or peers.is_alive(writer)):
                return writer
            words[_PUBLISHES] = 0
            words[_STARTED] = identity.started
            fence()
            words[_PID] = identity.pid
            words[_PUBLISHES] = publishes
            return identity
        finally:
            fcntl.lockf(self.region.fileno(), fcntl.LOCK_UN, NBYTES, _PID * NBYTES)

    def begin(self) -> npt.NDArray[np.uint8]:
        """Invalidate the oldest publication; return its block, shape (block_nbytes,), for the next publication."""
        version = self.status.newest + 1
        self._words[self._word(version) + _HOLDS] = 0
        fence()
        return self._block(version)

    def publish(self, values_nbytes: int, head_nbytes: int, head_sum: int) -> int:
        """Commit the written block as the newest publication, wake waiting readers, and return the new version.

        - `values_nbytes`: size in bytes of the values, which are at the start of the block.
        - `head_nbytes`: size in bytes of the description, which is at the next aligned offset after the values.
        - `head_sum`: checksum of the description.
        """
        version = self.status.newest + 1
        at = self._word(version)
        words = self._words
        words[at + _VALUES_NBYTES], words[at + _HEAD_NBYTES], words[at + _HEAD_SUM] = (
            values_nbytes,
            head_nbytes,
            head_sum,
        )
        fence()
        words[at + _HOLDS] = version
        fence()
        words[_STATUS] = version << 1
        words.wake(_STATUS)
        return version

    def close(self) -> None:
        """Mark the broadcast as ended, and wake waiting readers."""
        self._words[_STATUS] |= 1
        self._words.wake(_STATUS)

    # -- reading -------------------------------------------------------------------------------------------------------

    def content(self, version: int) -> Content | None:
        """Return the bytes of a publication, or None if the publication was overwritten.

        Raises FormatError if the recorded sizes exceed the block.
        """
        at = self._word(version)
        if not self.still_holds(version):
            return None
        _, values_nbytes, head_nbytes, head_sum = (self._words[at + i] for i in range(4))
        start = align(values_nbytes)
        if start + head_nbytes > self.block_nbytes:
            if not self.still_holds(version):
                return None
            raise errors.FormatError(
                f"a publication must fit in its block of {self.block_nbytes} bytes, got {start + head_nbytes} bytes"
            )
        block = self._block(version)
        head = block[start : start + head_nbytes].tobytes()
        return Content(block[:values_nbytes], head, head_sum) if self.still_holds(version) else None

    def still_holds(self, version: int) -> bool:
        """Return whether a publication is intact; if so, the bytes read since the call to `content` are valid."""
        fence()
        return self._words[self._word(version) + _HOLDS] == version

    def _word(self, version: int) -> int:
        return _BOARD_WORDS + version % self.blocks * _BLOCK_WORDS

    def _block(self, version: int) -> npt.NDArray[np.uint8]:
        start = _PAGE + version % self.blocks * self.block_nbytes
        return self._memory[start : start + self.block_nbytes]


def broadcast(
    capacity_nbytes: int = DEFAULT_NBYTES, *, blocks: int = 3, allow_pickle: bool = False
) -> tuple[Publisher, Subscription]:
    """Create a broadcast, in which one process publishes and any number of processes read the newest publication.

    A publication is a batch (`SampleBatch`, `MultiAgentBatch` or `Batch`) or weights: a dict of arrays or torch
    tensors, flat or nested, such as a `state_dict()`. Versions are numbered from 1. Slow readers skip versions, but
    never read a partial version. Readers may start, stop and die at any time, because the publisher neither tracks
    readers nor waits for readers.

    Both ends can be sent to other processes like the ends of a `multiprocessing.Pipe`: as arguments of a process under
    every start method, through queues and through pipes. The publisher belongs to the first process that publishes a
    value, until this process dies; any number of processes may use the subscription.

    Parameters
    ----------
    capacity_nbytes
        Maximum size of a publication in bytes, including a few hundred bytes for the description of each array.
    blocks
        Number of publications that the memory can contain. A reader must finish copying a publication before `blocks -
        1` further publications have been made. `blocks * capacity_nbytes` bytes are reserved immediately.
    allow_pickle
        Whether to pickle Python objects without an Arrow type. Unpickling executes code that the publisher supplies:
        allow it only for publishers that you trust.

    Returns
    -------
    publisher
        Publishing end.
    subscription
        Reading end.

    Raises
    ------
    ArgumentError
        If the capacity is not a positive integer, or `blocks` is not an integer from 2 to 63.
    SharedMemoryError
        If there is not enough free memory.

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
    capacity_nbytes = whole("capacity_nbytes", capacity_nbytes, 1)
    if whole("blocks", blocks, MIN_BLOCKS) > MAX_BLOCKS:
        raise errors.ArgumentError(f"blocks must be from {MIN_BLOCKS} to {MAX_BLOCKS}, got {blocks}")
    board = Board.create(capacity_nbytes, blocks)
    recipients: list[peers.Recipient] = []
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

MAX_DEPTH: Final = 32
"""Keys from the dict of weights to an array."""


def weights_to_batch(weights: Mapping[str, Any], path: str = "", depth: int = 1) -> Batch:
    """View weights as a nested batch; tensors are detached from the autograd graph.

    Raises ColumnTypeError if a name is not a string, or dicts are nested deeper than `MAX_DEPTH`.

    >>> weights_to_batch({"layer.0": {"bias": np.zeros(2)}})["layer.0"]
    Batch(
        bias: array([0., 0.]),
    )
    """
    values: dict[str, Any] = {}
    for name, value in weights.items():
        if not isinstance(name, str):
            raise errors.ColumnTypeError(
                f"weights must have strings as names, got a {type(name).__name__} in {path or 'the dict'}"
            )
        if isinstance(value, Mapping):
            if depth == MAX_DEPTH:
                raise errors.ColumnTypeError(
                    f"weights must be at most {MAX_DEPTH} dicts deep, got another dict in {path + name!r}"
                )
            value = weights_to_batch(value, f"{path}{name}.", depth + 1)
        elif KINDS[type(value)] == TENSOR:
            value = value.detach()
        values[name] = value
    return node(Batch, values)


def batch_to_weights(batch: Node) -> dict[str, Any]:
    """Convert a nested batch of weights to a dict.

    >>> batch_to_weights(weights_to_batch({"layer.0": {"bias": np.zeros(2)}}))
    {'layer.0': {'bias': array([0., 0.])}}
    """
    return {
        name: batch_to_weights(value) if isinstance(value, Node) else value for name, value in batch.__dict__.items()
    }


def write_weights(target: Mapping[str, Any], part: Part, places: Sequence[Place], root: npt.NDArray[np.uint8]) -> None:
    """Copy weights into arrays and tensors with the same names, shapes and dtypes.

    - `target`: destination, such as a model's `state_dict()`.
    - `part`, `places`: descriptions and offsets of the weights.
    - `root`: memory that contains the weights.

    Raises ColumnMismatchError if a name, shape or dtype in `target` differs from the published weights. The message
    contains the first difference, and `target` is unchanged.
    """
    columns = iter(part.columns)
    fixed = iter(places)
    targets = list(_match_targets(target, part.structure, columns, fixed, ""))
    for value, destination in targets:
        values: npt.NDArray[Any] = np.ndarray(destination.shape, destination.column.dtype, root, destination.offset)
        _write_array(value, values, destination)


def _match_targets(target: Any, structure: Any, columns: Any, fixed: Any, path: str) -> Any:
    names = [name for name, _ in structure]
    if not isinstance(target, Mapping):
        raise errors.ColumnMismatchError(
            f"{path[:-1]!r} must be a dict, as in the published weights, got a {type(target).__name__}"
        )
    for name in target:
        if name not in names:
            raise errors.ColumnMismatchError(
                f"the published weights must have {path + str(name)!r}, as into has; {errors.near_names(name, names)}"
            )
    for name, under in structure:
        where = path + name
        if name not in target:
            raise errors.ColumnMismatchError(
                f"into must have {where!r}, as the published weights have; {errors.near_names(name, target)}"
            )
        if under is not None:
            yield from _match_targets(target[name], under, columns, fixed, where + ".")
            continue
        column = next(columns)
        if not isinstance(column, Fixed):
            raise errors.ColumnMismatchError(
                f"{where!r} must be published as an array or tensor to be copied with into"
            )
        destination = next(fixed)
        _check_target(target[name], destination, where)
        yield target[name], destination


def _check_target(value: Any, destination: Place, where: str) -> None:
    column, shape, _ = destination
    kind = KINDS[type(value)]
    required = column.torch or str(column.dtype)
    if kind == ARRAY and column.torch is None:
        actual = str(value.dtype)
    elif kind == TENSOR and column.torch is not None:
        actual = str(value.dtype).removeprefix("torch.")
    else:
        actual = type(value).__name__
        required = f"a tensor of {required}" if column.torch else f"an array of {required}"
    if actual != required or tuple(value.shape) != shape:
        got_shape = tuple(getattr(value, "shape", ()))
        raise errors.ColumnMismatchError(
            f"{where!r} must be {required} of shape {shape}, got {actual} of shape {got_shape}"
        )


def _write_array(value: Any, values: npt.NDArray[Any], destination: Place) -> None:
    if destination.column.torch is None:
        value[...] = values
        return
    # Gradients are not followed through the copy, as in `load_state_dict`.
    tensor = value.detach()
    if tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg():
        (bits,) = TorchColumn(tensor).dump()[1]
        bits[...] = values
    else:
        tensor.copy_(TorchColumn.from_bits(values, destination.column.torch).values)

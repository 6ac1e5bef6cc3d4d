"""Subscription: the end of a broadcast that is read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.column import memory
from samplebatch.column.threads import copy_all
from samplebatch.errors import (
    ChannelClosedError,
    ChannelTimeoutError,
    ColumnMismatchError,
    EndOfStreamError,
    FormatError,
    PeerDiedError,
    UntrustedPickleError,
)
from samplebatch.transport import weights
from samplebatch.transport.board import Board, Content
from samplebatch.transport.decode import DAMAGE, decode
from samplebatch.transport.peers import ProcessWatch, Recipient, deadline_of
from samplebatch.transport.publisher import WEIGHTS
from samplebatch.transport.region import Region
from samplebatch.transport.schema import NESTED_BATCH, Plan, Schema, align
from samplebatch.transport.wire import ROWS, SCHEMA, read_rows, unpack_metadata

_LOOK_S = 0.1
"""Seconds after which it is noticed at the latest that the publisher's process has died."""

_MIN_TRIES: Final = 3
_BYTE = np.dtype(np.uint8)
_monotonic = time.monotonic
_getpid = os.getpid


@dataclass(frozen=True)
class Publication:
    """One publication as a reader gets it: a copy of its own.

    Attributes
    ----------
    version
        Its number.
    value
        The batch or the weights.
    """

    version: int
    value: Any


@dataclass(frozen=True)
class _Description:
    """The decoded description of a publication."""

    schema: Schema
    plan: Plan
    metadata: dict[str, Any]
    is_weights: bool


class Subscription:
    """The end of a broadcast that is read; `samplebatch.broadcast` makes it.

    Any number of processes may read at the same time, each with its own copy of it. In one process it belongs to one
    thread at a time. It maps the memory read-only: a reader cannot spoil the weights of others.
    """

    def __init__(self, board: Board, *, allow_pickle: bool = False, recipients: Sequence[Recipient] = ()) -> None:
        self._board: Board | None = board
        self._allow_pickle = allow_pickle
        self._recipients = recipients
        self._watch: ProcessWatch | None = None
        self._last: tuple[bytes, _Description] | None = None

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
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._board is None

    def latest(self, timeout_s: float | None = None, *, into: Mapping[str, Any] | None = None) -> Publication:
        """Copy the newest publication; if there is none yet, wait for the first.

        Parameters
        ----------
        timeout_s
            Seconds to wait, None for as long as it takes.
        into
            Arrays and tensors to copy weights into, in place of new memory: a model's `state_dict()`, for instance.
            They must have the names, shapes and dtypes of what was published, and are not to be looked at if this
            raises `ChannelTimeoutError`.

        Returns
        -------
        Its number, and a copy that belongs to the caller; with `into`, that.

        Raises
        ------
        ChannelTimeoutError
            If there was nothing in time, or what there was stayed for too short a time to be copied.
        EndOfStreamError
            If the publisher was closed before anything was published.
        PeerDiedError
            If its process died before anything was published.
        ColumnMismatchError
            If what was published does not fit `into`; names the first difference.
        UntrustedPickleError
            If a value is pickled and the broadcast does not allow it; names the value.
        FormatError
            If what lies there is no publication.
        ChannelClosedError
            If this end is closed.

        Examples
        --------
        >>> import numpy as np
        >>> from samplebatch import broadcast
        >>> publisher, subscription = broadcast(1 << 20)
        >>> publisher.publish({"bias": np.ones(2)})
        1
        >>> own = {"bias": np.zeros(2)}
        >>> subscription.latest(into=own).version, own["bias"]
        (1, array([1., 1.]))
        >>> publisher.close(), subscription.close()
        (None, None)
        """
        return self.wait_for(1, timeout_s, into=into)

    def wait_for(
        self, version: int, timeout_s: float | None = None, *, into: Mapping[str, Any] | None = None
    ) -> Publication:
        """Wait until a publication has this number or a higher one, and copy the newest then.

        Parameters
        ----------
        version
            The number; one more than that of the last read waits for the next.
        timeout_s, into
            As for `latest`.

        Returns
        -------
        As `latest` does.

        Raises
        ------
        EndOfStreamError
            If the publisher was closed before it came so far.
        PeerDiedError
            If its process died before it came so far.
        ChannelTimeoutError, ColumnMismatchError, UntrustedPickleError, FormatError, ChannelClosedError
            As `latest` does.
        """
        board = self._open()
        deadline = deadline_of(timeout_s)
        tries = 0
        while True:
            newest = self._await(board, version, deadline)
            content = board.content(newest)
            found = None if content is None else self._copy(board, newest, content, into)
            if found is not None:
                return found
            # It was overwritten in the meantime.
            tries += 1
            if deadline is not None and tries >= _MIN_TRIES and _monotonic() > deadline:
                raise ChannelTimeoutError(
                    f"a publication must stay for as long as it takes to copy it, and {tries} did not; publish less "
                    "often, or make the broadcast with more blocks"
                )

    def close(self) -> None:
        """Close this end, which no other process notices. Safe to call twice."""
        board, self._board = self._board, None
        if board is not None:
            board.region.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _await(self, board: Board, version: int, deadline: float | None) -> int:
        """Wait until a publication has this number or a higher one, and return the newest's."""
        while True:
            status = board.status
            if status.newest >= version:
                return status.newest
            missing = f"publication {version} must come to be read, and the newest is {status.newest}"
            if status.closed:
                raise EndOfStreamError(f"{missing}: the publisher has closed its end")
            if self._publisher_has_died(board) and board.status == status:
                raise PeerDiedError(f"{missing}: the publisher's process {board.writer.pid} has died")
            left_s = _LOOK_S if deadline is None else min(_LOOK_S, deadline - _monotonic())
            if left_s <= 0:
                raise ChannelTimeoutError(f"{missing} after the time given")
            board.wait(status, left_s)

    def _publisher_has_died(self, board: Board) -> bool:
        writer = board.writer
        if writer.pid == _getpid() and self._recipients and self._recipients[0].has_ended():
            # This process has given the publisher to one that died while it started.
            return board.writer == writer
        if self._watch is None or self._watch.identity != writer:
            self._watch = ProcessWatch(writer)
        return not self._watch.is_alive()

    def _copy(self, board: Board, version: int, content: Content, into: Mapping[str, Any] | None) -> Publication | None:
        """Copy a publication; None if it was overwritten in the meantime."""
        described = self._describe(content)
        if into is not None:
            if not described.is_weights:
                raise ColumnMismatchError(
                    f"weights must be published to be copied into others, and publication {version} is a "
                    f"{described.schema.kind}; read it without into"
                )
            weights.write(into, described.schema.parts[0], described.plan.parts[0], content.values)
            return Publication(version, into) if board.still_holds(version) else None
        own = memory.empty(content.values.shape, _BYTE)
        copy_all([own], [content.values], own.nbytes)
        if not board.still_holds(version):
            return None
        schema, plan = described.schema, described.plan
        cut = _cutter(own, plan.nbytes)
        try:
            value = decode(schema, plan, described.metadata, own, cut, allow_pickle=self._allow_pickle)
        except (FormatError, UntrustedPickleError):
            raise
        except DAMAGE as error:
            raise FormatError(f"a publication must say what fits its schema, it does not: {error}") from error
        return Publication(
            version, weights.as_dict(value) if isinstance(value, Batch) and described.is_weights else value
        )

    def _describe(self, content: Content) -> _Description:
        """Read the description of a publication, unless it is the same as that of the one before."""
        if self._last is None or self._last[0] != content.head:
            metadata = unpack_metadata(content.head, content.head_sum)
            schema = Schema.read(metadata.pop(SCHEMA, None))
            rows = read_rows(metadata.pop(ROWS, None))
            is_weights = bool(metadata.pop(WEIGHTS, 0))
            if is_weights and schema.kind != NESTED_BATCH:
                raise FormatError(f"weights must be published as a nested batch, these are a {schema.kind}")
            try:
                plan = schema.plan(rows, rows)
            except ValueError as error:
                raise FormatError(
                    f"a publication must have rows that fit its schema, it has others: {error}"
                ) from error
            self._last = content.head, _Description(schema, plan, metadata, is_weights)
        described = self._last[1]
        if described.plan.nbytes > len(content.values):
            raise FormatError(
                f"a publication's values must fit in its {len(content.values)} bytes, they take {described.plan.nbytes}"
            )
        return described

    def _open(self) -> Board:
        if self._board is None:
            raise ChannelClosedError("a subscription must be open to be used, and it is closed")
        return self._board

    def _hand_over(self) -> Region:
        return self._open().region

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Subscription goes to other processes by multiprocessing only, and cannot be pickled otherwise"
        )


def _cutter(root: npt.NDArray[np.uint8], start: int) -> Callable[[int], npt.NDArray[np.uint8]]:
    """Cut the buffers of variable columns, each behind the other at an aligned place."""
    at = start

    def cut(nbytes: int) -> npt.NDArray[np.uint8]:
        nonlocal at
        begin, at = at, at + align(nbytes)
        if begin + nbytes > len(root):
            raise FormatError(f"a publication must have the {nbytes} bytes of a buffer, it ends before")
        return root[begin : begin + nbytes]

    return cut

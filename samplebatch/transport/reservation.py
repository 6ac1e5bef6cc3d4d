"""Reservation: a block with columns that are filled in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

import numpy as np
import numpy.typing as npt

from samplebatch.batch.flags import DEFAULT
from samplebatch.batch.tree import Structure, unflatten
from samplebatch.column.interface import Column
from samplebatch.errors import (
    ColumnTypeError,
    PolicyNotFoundError,
    ReleasedError,
    RowIndexError,
    near_names,
    no_such_column,
)
from samplebatch.transport.decode import fixed_column
from samplebatch.transport.reservation_spec import CompletePart, ReservationSpec, complete, rows_of
from samplebatch.transport.schema import MULTI_AGENT_BATCH, NESTED_BATCH, SAMPLE_BATCH, Place, Plan, Schema
from samplebatch.transport.wire import ENV_STEPS, FLAGS, VARIABLE, plain_flags

_BYTE = np.dtype(np.uint8)

if TYPE_CHECKING:
    from samplebatch.transport.arena import Block
    from samplebatch.transport.producer import Producer


class ReservedBytes(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """The bytes of a reserved block: when no array looks at them any more and they were not sent, they are free."""

    __slots__ = ()


class Columns(Mapping[str, Any]):
    """The columns of one batch of a reservation, by dotted name; a nested column is handed out nested."""

    def __init__(self, root: ReservedBytes, places: Mapping[str, Place], nested: Mapping[str, Structure]) -> None:
        self._root = root
        self._places = places
        self._nested = nested
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        made = self._made.get(name)
        if made is not None:
            return made
        place = self._places.get(name)
        if place is not None:
            made = self._made[name] = fixed_column(place, self._root).values
            return made
        if name in self._nested:
            return unflatten(name, self._nested[name], self.__getitem__)
        raise no_such_column(name, self._places)

    def column(self, name: str) -> Column:
        """Make the column of a dotted name."""
        return fixed_column(self._places[name], self._root)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def take_back(self) -> None:
        """Make the arrays that were handed out read-only, and hand out none any more."""
        for values in self._made.values():
            if isinstance(values, np.ndarray):
                values.setflags(write=False)
        self._made = {}
        self._places = {}
        del self._root


class Reservation:
    """A block of the arena, laid out for a number of rows, to be filled in place and sent without a copy.

    `Producer.reserve` makes it. `reservation["obs"]` is the array of a column, which lies in the block; of a
    `MultiAgentBatch`, `reservation["policy"]["obs"]`. They hold arbitrary values at first. As a context manager it
    sends all rows at the end if nothing was sent before, and cancels itself if an exception ends it.

    Attributes
    ----------
    rows
        Rows that there is room for; of a `MultiAgentBatch`, by policy.

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

    def __init__(
        self,
        producer: Producer,
        spec: ReservationSpec,
        schema: Schema,
        rooms: tuple[int, ...],
        plan: Plan,
        block: Block,
    ) -> None:
        self._producer = producer
        self._spec = spec
        self._schema = schema
        self._rooms = rooms
        self._plan = plan
        self._block = block
        self._is_open = True
        self._root: ReservedBytes | None = None
        self._parts: list[Columns] = []
        self._by_name: Mapping[str, Any] | None = None

    def _open_columns(self) -> Mapping[str, Any]:
        """Return the columns by name, which are made when they are first asked for."""
        if self._by_name is None:
            self._require_open()
            self._producer._own()
            root = self._root = ReservedBytes((self._block[1],), _BYTE, self._producer._memory, self._block[0])
            self._producer._blocks.reserved[self._block[0]] = self._block, ref(root)
            parts, kind = self._spec.parts, self._spec.kind
            own = [Columns(root, places, part.nested) for part, places in zip(parts, self._plan.names, strict=True)]
            self._parts = own
            if kind == SAMPLE_BATCH:
                self._by_name = own[0]
            elif kind == NESTED_BATCH:
                self._by_name = _tree(parts[0].structure, map(own[0].__getitem__, map(str, count())))
            else:
                self._by_name = {part.label: columns for part, columns in zip(parts, own, strict=True)}
        return self._by_name

    def _require_open(self) -> None:
        if not self._is_open:
            raise ReleasedError("a reservation must be neither sent nor cancelled to be used, and it was; make another")

    @property
    def rows(self) -> Any:
        """Rows that there is room for; of a `MultiAgentBatch`, by policy."""
        if self._spec.kind == MULTI_AGENT_BATCH:
            return {part.label: room for part, room in zip(self._spec.parts, self._rooms, strict=True)}
        return self._rooms[0]

    def __getitem__(self, name: str) -> Any:
        return self._open_columns()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open_columns())

    def __len__(self) -> int:
        return len(self._open_columns())

    def commit(
        self,
        rows_used: int | Mapping[str, int] | None = None,
        *,
        env_steps: int | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send the rows, which takes as long for many as for few.

        The arrays are read-only from then on: the consumer may have them, and write to them.

        Parameters
        ----------
        rows_used
            How many rows of each column are sent, from the first on; all of them by default. Of a `MultiAgentBatch`, by
            policy, or one number for all.
        env_steps
            Steps of the environment that a `MultiAgentBatch` stands for; it must be given for one.
        extra
            Further columns, by name; of a `MultiAgentBatch`, by policy and name. They are copied. Those of the batch
            that the reservation is like have to be given here if they cannot be filled in place: Python objects, rows
            of varying shape, compressed rows, and what has one row for each sequence.
        timeout_s
            Seconds to wait for a block for the extra columns, and for room in the pipe.

        Raises
        ------
        RowIndexError
            If more rows are sent than there is room for, or fewer than none.
        ColumnMismatchError
            If a column that has to be given is not, or one that lies in the block is; names it.
        ColumnLengthError, SequenceError
            If the extra columns do not fit the rows.
        ReleasedError
            If it was sent or cancelled before.
        ChannelTimeoutError
            If there was no room in time; the reservation stays as it is.
        ChannelClosedError, PeerDiedError, CapacityError, OwnershipError
            As `Producer.send` does.
        """
        if not self._is_open:
            self._require_open()
        self._producer._own()
        spec, schema = self._spec, self._schema
        rows = self._rooms if rows_used is None else rows_of(rows_used, spec)
        if rows is not self._rooms:
            for used, room in zip(rows, self._rooms, strict=True):
                if used > room:
                    raise RowIndexError(f"a reservation of {room} rows must be sent with at most as many, got {used}")
        metadata: dict[str, Any] = {}
        buffers: list[npt.NDArray[np.uint8]] = []
        if extra or not spec.is_simple:
            flags = [part.flags for part in spec.parts]
            if extra or any(part.given for part in spec.parts):
                completed = self._complete_parts(rows, extra or {})
                schema = self._producer._encoder.intern(spec.kind, tuple([own.schema for own in completed]))
                flags = [own.flags for own in completed]
                metadata[VARIABLE] = [own.variable for own in completed]
                buffers = [buffer for own in completed for buffer in own.buffers]
            if any(own != DEFAULT for own in flags):
                metadata[FLAGS] = [plain_flags(own) for own in flags]
            if spec.kind == MULTI_AGENT_BATCH:
                if env_steps is None:
                    raise ValueError("env_steps must be given for a MultiAgentBatch, and is not")
                metadata[ENV_STEPS] = int(env_steps)
        blocks = self._producer._blocks
        before = blocks.sending
        try:
            self._producer._send_reserved(
                schema, rows, self._rooms, self._block, self._plan, metadata, buffers, timeout_s
            )
        except Exception as error:
            if self._producer._was_closed_meanwhile(error):
                raise self._producer._closed_error() from error
            raise
        finally:
            # No call comes before this, so no signal does: what was sent is the consumer's.
            if blocks.is_sent and blocks.sending != before:
                self._is_open = False
                self._take_back()

    def _complete_parts(self, rows: tuple[int, ...], extra: Mapping[str, Any]) -> list[CompletePart]:
        spec = self._spec
        if spec.kind == NESTED_BATCH:
            raise ColumnTypeError("a reservation of a Batch takes no extra columns; reserve them too")
        by_label = extra if spec.kind == MULTI_AGENT_BATCH else {"": extra}
        strange = [label for label in by_label if label not in {part.label for part in spec.parts}]
        if strange:
            raise PolicyNotFoundError(f"no policy {strange[0]!r}; {near_names(strange[0], self._open_columns())}")
        self._open_columns()
        completed = []
        for part, columns, used in zip(spec.parts, self._parts, rows, strict=True):
            filled = {name: columns.column(name).slice(0, used) for name in columns}
            own = by_label.get(part.label, {})
            completed.append(complete(part, filled, own, allow_pickle=self._producer._allow_pickle))
        return completed

    def cancel(self) -> None:
        """Send nothing: the block is free again once nothing looks at its arrays any more. Safe to call twice."""
        if self._is_open:
            self._is_open = False
            if self._root is None:
                self._producer._blocks.reserved[self._block[0]] = self._block, _nobody
            self._take_back()

    def _take_back(self) -> None:
        """Take the arrays back, and let go of the block."""
        for columns in self._parts:
            columns.take_back()
        self._root = self._by_name = None
        self._parts = []

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


def _nobody() -> None:
    """Stand for a reference to a keeper that is gone."""


def _tree(structure: Any, columns: Iterator[Any]) -> dict[str, Any]:
    return {name: next(columns) if under is None else _tree(under, columns) for name, under in structure}

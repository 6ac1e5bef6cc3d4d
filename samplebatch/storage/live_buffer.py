"""LiveBuffer: a buffer as it was at one moment, written to a file while threads go on adding to it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from samplebatch.buffer.samplers import Prioritized
from samplebatch.buffer.store import Slots
from samplebatch.buffer.table import Table
from samplebatch.column.interface import Column
from samplebatch.errors import StorageError
from samplebatch.storage.arrow_file import arrow_writer
from samplebatch.storage.prepared_buffer import prepare_buffer, write_rows

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer

_PART_NBYTES = 1 << 22
"""Bytes of rows that are read while the lock is held, about: a few milliseconds."""

Indices = npt.NDArray[np.intp]


class LiveBuffer:
    """A buffer as it is at this moment, for checkpoints: copy on write.

    Rows are read a part at a time, and nobody who adds or samples waits for longer than a part takes. Rows that are
    about to be written over before their turn has come are copied first; the memory that they take is free again once
    they are in the file. Priorities and final observations are copied here.

    Parameters
    ----------
    buffer
        The buffer, in memory.

    Raises
    ------
    StorageError
        If it is kept in a folder, or is being written so already.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        table = buffer._table
        memory = None
        if isinstance(buffer._sampler, Prioritized):
            # Pages that are there already take a copy in a fraction of the time.
            memory = np.full(table.rings.capacity, 0.0)
        with table.lock:
            if table.journal is not None:
                raise StorageError(
                    "a buffer must be in memory, and not be written already, to be written while it is used"
                )
            self._compression = "lz4" if table.columns.stores.compress else "none"
            self._prepared = prepare_buffer(buffer, memory)
            self._rows = _RowsBefore(table, self._prepared.held)

    def __len__(self) -> int:
        return int(self._prepared.held[:, 1].sum())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the buffer to an Arrow file, as `ReplayBuffer.save` does.

        Raises
        ------
        ColumnTypeError
            If a column holds objects that cannot be pickled; names it.
        OSError
            If the file cannot be written.
        """
        parts = write_rows(
            self._prepared, self._rows.read, lambda schema: arrow_writer(path, schema, self._compression), _PART_NBYTES
        )
        for slots in parts:
            self._rows.release(slots)

    def close(self) -> None:
        """Let the buffer go on without copies."""
        self._rows.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


class _RowsBefore:
    """The rows of a table as they were before any further write, as its journal; the lock is held to make one."""

    def __init__(self, table: Table, held: Indices) -> None:
        self._table = table
        self._stores = [store for _, store in table.columns.leaves()]
        self._pending = np.zeros(table.rings.capacity, np.bool_)
        for start, count in held.tolist():
            self._pending[start : start + count] = True
        self._saved: dict[int, list[Column]] = {}
        self._left: dict[int, int] = {}
        # Which of the copies has the row of each slot, from 1, and where; 0 for none.
        self._copy = np.zeros(table.rings.capacity, np.int64)
        self._place = np.zeros(table.rings.capacity, np.intp)
        self._copies = 0
        table.journal = self
        # A compiled addition knows nothing of journals.
        table.forget_fast_add()

    # Of a journal

    def begin(self, overwritten: Sequence[tuple[Iterable[str], Slots]]) -> None:
        """Copy the rows that are about to be overwritten, and are not in the file yet."""
        # The first are those of the table's columns; the others are final observations.
        for names, slots in overwritten[:1]:
            if not any(True for _ in names):
                return
            numbers = (
                np.arange(slots.start, slots.stop, slots.step) if isinstance(slots, slice) else np.atleast_1d(slots)
            )
            self._save(np.unique(numbers[self._pending[numbers]]))

    def _save(self, slots: Indices) -> None:
        if len(slots):
            self._copies += 1
            self._saved[self._copies] = [store.to_column(slots) for store in self._stores]
            self._left[self._copies] = len(slots)
            self._copy[slots], self._place[slots] = self._copies, np.arange(len(slots))
            self._pending[slots] = False

    def commit(self) -> None:
        """Do nothing: the rows before are copied."""
        return None

    def mirror_weights(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return memory for weights that nobody reads."""
        return np.empty_like(weights)

    def flush(self) -> None:
        """Do nothing: the buffer is in memory."""
        return None

    def close(self) -> None:
        """Do nothing: the buffer is in memory."""
        return None

    # Of a reader

    def read(self, place: int, slots: Indices) -> Column:
        """Read rows of one store as they were."""
        store = self._stores[place]
        with self._table.lock:
            copies = self._copy[slots]
            there = copies == 0
            found = [store.to_column(slots[there] if not there.all() else slots)]
            if there.all():
                return found[0]
            order = [np.flatnonzero(there)]
            for copy in np.unique(copies[~there]).tolist():
                own = np.flatnonzero(copies == copy)
                found.append(self._saved[copy][place].take(self._place[slots[own]]))
                order.append(own)
        joined = type(found[0]).concat([part for part in found if len(part)], store.name)
        return joined.take(np.argsort(np.concatenate(order)))

    def release(self, slots: Indices) -> None:
        """Note that the rows of these slots are in the file, and drop the copies of them."""
        with self._table.lock:
            self._pending[slots] = False
            copies, counts = np.unique(self._copy[slots], return_counts=True)
            for copy, count in zip(copies.tolist(), counts.tolist(), strict=True):
                if copy:
                    self._left[copy] -= count
                    if not self._left[copy]:
                        del self._saved[copy], self._left[copy]

    def detach(self) -> None:
        """Stop copying."""
        with self._table.lock:
            if self._table.journal is self:
                self._table.journal = None
            self._saved.clear()

"""Rows of a buffer, put in all at once or column by column, or taken out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE
from samplebatch.batch.nested.values import complete_rows
from samplebatch.buffer.reading import ORDER, rows_at
from samplebatch.buffer.rows import Rows
from samplebatch.errors import ColumnMismatchError, ColumnTypeError


class Filling(Rows):
    """What can be done to the rows of a buffer without a step of an environment."""

    if TYPE_CHECKING:

        def __init__(self, size: int, **options: Any) -> None: ...

    def set_batch(self, batch: Batch | Mapping[str, Any]) -> None:
        """Put rows into all slots; which of them count stays as it is.

        Parameters
        ----------
        batch
            Rows for every slot, `maxsize` of them, under the usual names.

        Raises
        ------
        ColumnMismatchError
            If there are other names.
        ColumnLengthError, ColumnTypeError
            If the rows are not as many as the slots, or a column cannot hold them; names it. Nothing has changed then.
        """
        held = values_given(batch, {})
        unknown = [name for name in held if name not in ORDER]
        if unknown:
            raise ColumnMismatchError(
                f"rows must have the usual names, got {unknown[0]!r}; there are {', '.join(ORDER)}"
            )
        with self._table.lock:
            self._table.fill(held, self._start, self._start + self.maxsize)

    def set_array_at_key(self, seq: Any, key: str, index: Any = None, default_value: float | None = None) -> None:
        """Put values into one column.

        Parameters
        ----------
        seq
            The values; as many as slots, or as the index asks for.
        key
            The column's name, which may be new.
        index
            As between brackets; None for all slots.
        default_value
            What the other slots of a new column hold; None for zeros.

        Raises
        ------
        ColumnLengthError, ColumnMismatchError, ColumnTypeError
            If the column cannot take the values; names it. Nothing has changed then.
        RowIndexError
            If an index lies outside.
        """
        slots = np.arange(self._start, self._start + self.maxsize) if index is None else self._slots(index).reshape(-1)
        with self._table.lock:
            self._table.set_column(key, seq, slots, default_value)

    @classmethod
    def from_data(
        cls,
        obs: Any,
        act: Any,
        rew: Any,
        terminated: Any,
        truncated: Any,
        done: Any,
        obs_next: Any,
        **options: Any,
    ) -> Self:
        """Make a full buffer of rows that are there already, in time order, such as those of a data set.

        Arrays that lie as columns do are kept, not copied: adding steps later overwrites them. Options are those of the
        class, the size aside.

        Raises
        ------
        ColumnLengthError, ColumnTypeError
            If a column has not as many rows as `obs`, or is nothing that can be stored; names it.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer
        >>> obs, flags, never = np.arange(3), np.array([False, False, True]), np.zeros(3, bool)
        >>> buf = ReplayBuffer.from_data(obs, np.zeros(3), np.ones(3), flags, never, flags, obs + 1)
        >>> len(buf), buf.next([0, 1, 2])
        (3, array([1, 2, 2]))
        """
        rows = {"obs": obs, "act": act, "rew": rew, "terminated": terminated, "truncated": truncated}
        size = len(obs)
        buffer = cls(size, **options)
        if size:
            held = {name: value if name == "obs" else np.asarray(value) for name, value in rows.items()}
            held |= {"done": np.asarray(done), "obs_next": obs_next}
            buffer._table.fill(values_given(held, {}), 0, size, keep=True)
            buffer._sampler.added(buffer._table.rings.append(0, size))
        return buffer

    def dropnull(self) -> None:
        """Remove all rows in which anything is NaN, NaT or None; the others move together, in time order."""
        with self._table.lock:
            for ring in range(self._table.rings.n) if self._ring is None else (self._ring,):
                self._drop_null_rows(ring)

    def _drop_null_rows(self, ring: int) -> None:
        slots = self._table.rings.chronological(ring)
        if not len(slots):
            return
        rows = Batch(given_rows(rows_at(self._table, slots, 1)))
        whole = complete_rows(rows, len(slots))
        if not whole.all():
            kept = slots[whole]
            known = self._sampler.live(kept)
            self._table.reset([ring], keep_statistics=True)
            if len(kept):
                places = np.flatnonzero(whole)
                gaps = np.flatnonzero(np.diff(places) > 1)
                moved = self._table.append(ring, rows[places].__dict__, len(kept), gaps)
                self._sampler.moved(moved, known)


def values_given(batch: Any, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the values of what is to be added: a batch, a dict, or columns by name."""
    if batch is None:
        return Batch(columns).__dict__
    if columns:
        raise ColumnTypeError(
            f"a step is given as a batch or by columns, got both; put {next(iter(columns))!r} into the batch"
        )
    return batch.__dict__ if isinstance(batch, Batch) else Batch(batch).__dict__


def given_rows(rows: dict[str, Any]) -> dict[str, Any]:
    """Leave out names that have no values."""
    return {name: value for name, value in rows.items() if KINDS[type(value)] != NODE or value.__dict__}

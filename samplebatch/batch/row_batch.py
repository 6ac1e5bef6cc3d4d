"""RowBatch: columns of equal length, whose rows are cut and gathered together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from samplebatch import names
from samplebatch.batch import large, small
from samplebatch.batch.column_map import ColumnMap
from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.tree import Structure, leaf_names
from samplebatch.column import threads
from samplebatch.column.convert import is_plain
from samplebatch.column.interface import Column, Indices
from samplebatch.column.row_keys import resolve
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import (
    ColumnLengthError,
    ColumnMismatchError,
    ColumnTypeError,
    RowIndexError,
    no_such_column,
)


class RowBatch(ColumnMap):
    """Columns of equal length: one row per step."""

    count: int
    """Steps in the batch; padding is not counted."""
    _flags: Flags = DEFAULT
    _has_sequences = False
    """Whether the steps form sequences, so that `SequenceBatch` sees to the rows."""

    @classmethod
    def _of(
        cls, columns: dict[str, Column], nested: dict[str, Structure] | None = None, flags: Flags = DEFAULT
    ) -> Self:
        """Make a batch of columns that are built already; their rows are counted and checked."""
        new = cls.__new__(cls)
        new._columns = columns
        if nested:
            new._nested = nested
        if flags is not DEFAULT:
            new._flags = flags
        new._count_rows()
        return new

    def _with(self, columns: dict[str, Column], flags: Flags | None = None) -> Self:
        """Make a batch of other columns with this one's structure and flags; the caller sees to `count`."""
        new = type(self).__new__(type(self))
        new._columns = columns
        new.count = self.count
        if self._nested:
            new._nested = self._nested
        flags = self._flags if flags is None else flags
        if flags is not DEFAULT:
            new._flags = flags
        return new

    def __len__(self) -> int:
        return self.count

    def _count_rows(self) -> None:
        """Find the number of steps, and check that every column has that many rows."""
        # len() of the arrays themselves: a column's own is a Python call each.
        lengths = [len(column.values) for column in self._columns.values()]
        self.count = lengths[0] if lengths else 0
        if lengths.count(self.count) != len(lengths):
            counted = _counted_column(self._columns)
            self.count = len(self._columns[counted])
            for name, column in self._columns.items():
                check_length(name, column, self.count, f"as {counted!r} has")

    # -- changing the columns ------------------------------------------------------------------------------------------

    def __setitem__(self, name: str, values: Any) -> None:
        if (
            is_plain(values)
            and name in self._columns
            and len(values) == self.count
            and self._window is None
            and not (self._lent or self._has_sequences)
        ):
            self._columns[name] = TensorColumn(values)
            return
        structure, columns = self._build(name, values)
        gone = set(self._leaves(name)) if name in self else set()
        self._check_assignment(columns, {path: column for path, column in self._all().items() if path not in gone})
        self._adopt(name, structure, columns)
        self._count_rows()

    def _check_assignment(self, columns: dict[str, Column], others: dict[str, Column]) -> None:
        """Check that new columns fit those that stay, before anything is changed."""
        if not others:
            self._with(columns)._count_rows()
            return
        for path, column in columns.items():
            check_length(path, column, self.count, f"as {_counted_column(others)!r} has")

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._count_rows()

    def clear(self) -> None:
        """Take all columns out of the batch."""
        self._columns, self._window, self._lent, self._nested = {}, None, False, {}
        self._count_rows()

    def select(self, *keys: str) -> Self:
        """View only the given columns, in the order asked for; sequences stay with `seq_lens`.

        Raises
        ------
        ColumnNotFoundError
            If one is not there; lists the near names.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> list(SampleBatch(a=[1], b=[2], c=[3]).select("c", "a"))
        ['c', 'a']
        """
        columns = self._all()
        return self._part({path: columns[path] for key in keys for path in self._leaves(key)})

    def drop(self, *keys: str) -> Self:
        """View all columns but the given ones.

        Raises
        ------
        ColumnNotFoundError
            If one is not there; lists the near names.
        SequenceError
            If `seq_lens` goes and columns with a row per sequence stay.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> list(SampleBatch(a=[1], b=[2], c=[3]).drop("b"))
        ['a', 'c']
        """
        gone = {path for key in keys for path in self._leaves(key)}
        return self._part({path: column for path, column in self._all().items() if path not in gone})

    def _part(self, columns: dict[str, Column]) -> Self:
        """Make a batch of some of the columns; of a nested one all or none."""
        nested = {}
        for top, structure in self._nested.items():
            kept = [path in columns for path in leaf_names(top, structure)]
            if any(kept) and not all(kept):
                raise ColumnTypeError(f"the nested column {top!r} must be kept or left out as a whole")
            if any(kept):
                nested[top] = structure
        return self._of(columns, nested, self._flags)

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """View the columns under other names, in the same order.

        Raises
        ------
        ColumnNotFoundError
            If a name is not there; lists the near names.
        ColumnMismatchError
            If two columns would have one name.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> list(SampleBatch(obs=[1], rewards=[2]).rename({"rewards": "rew"}))
        ['obs', 'rew']
        """
        columns, order = self._all(), list(self)
        for old in mapping:
            if old not in order:
                raise no_such_column(old, order)
        for new in mapping.values():
            if not isinstance(new, str):
                raise ColumnTypeError(f"a column's name must be a string, got a {type(new).__name__}")
        renamed = [mapping.get(name, name) for name in order]
        nested = {mapping.get(top, top): structure for top, structure in self._nested.items()}
        for name in renamed:
            if renamed.count(name) > 1 or any(name.startswith(f"{top}.") for top in nested):
                raise ColumnMismatchError(f"column {name!r} must have a name of its own, and another one has it too")
        return self._of(
            {
                new + path[len(old) :]: columns[path]
                for old, new in zip(order, renamed, strict=True)
                for path in self._leaves(old)
            },
            nested,
            self._flags,
        )

    # -- views and copies ----------------------------------------------------------------------------------------------

    def _view(self, start: int, stop: int) -> Self:
        """View steps `start` to `stop` of a batch without sequences, `0 <= start <= stop <= count`."""
        new = object.__new__(type(self))
        new._columns = {}
        new.count = stop - start
        if self._nested:
            new._nested = self._nested
        if self._flags is not DEFAULT:
            new._flags = self._flags
        window = self._window
        if window is None:
            self._lent = True
            new._window = (self._columns, start, stop, 0, 0)
        else:
            new._window = (window[0], window[1] + start, window[1] + stop, 0, 0)
        return new

    def _range(self, start: int, stop: int) -> Self:
        """Answer `batch[start:stop]`."""
        return self._view(start, stop)

    def _get_rows(self, key: Any) -> Self:
        if type(key) is slice:
            start, stop, step = key.indices(self.count)
            if step == 1:
                return self._range(start, stop if stop > start else start)
        rows = resolve(key, self.count)
        if isinstance(rows, int):
            raise RowIndexError(f"a batch hands out no single rows; for a batch of row {key} use take([{key}])")
        return self._gather(np.arange(*rows) if isinstance(rows, tuple) else rows)

    def take(self, indices: Any) -> Self:
        """Gather steps in the given order into a new batch, one copy per column.

        Columns of shape (n, ...) become (k, ...). Where there are sequences, steps that follow each other out of one
        sequence form a sequence of the result, with that one's state; padding is taken out.

        Parameters
        ----------
        indices
            Integers of shape (k,) in [-n, n), or a mask of shape (n,).

        Raises
        ------
        RowIndexError
            If an index lies outside; names the first such one.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> SampleBatch(rewards=[1.0, 2.0, 3.0]).take([2, 0])["rewards"].tolist()
        [3.0, 1.0]
        """
        return self._gather(as_indices(indices, self.count))

    def _gather(self, steps: Indices) -> Self:
        if self._is_large(len(steps)):
            new = self._with(large.gathered(self._all(), steps))
        else:
            new = self._with({name: column.take(steps) for name, column in self._all().items()})
        new.count = len(steps)
        return new

    def copy(self, shallow: bool = False) -> Self:
        """Copy the batch.

        Parameters
        ----------
        shallow
            Whether the copy shares the arrays, so that only its own set of columns is independent.
        """
        if shallow:
            return self._with(self._all().copy())
        columns = small.copied(self._all())
        if columns is None and self._is_large(self.count):
            columns = large.copied(self._all())
        return self._with({name: c.copy() for name, c in self._all().items()} if columns is None else columns)

    def _is_large(self, rows: int) -> bool:
        """Tell whether so many rows have enough bytes for two threads to move."""
        nbytes = sum([column.values.nbytes for column in self._all().values() if type(column) is TensorColumn])
        return nbytes * rows >= threads.WORTHWHILE * self.count > 0

    def _padded_left(self, padding: int) -> Self:
        """Copy the batch with rows of zeros (None for objects) before the first."""
        length = padding + self.count
        positions = np.arange(padding, length)
        new = self._with({name: column.spread(length, positions) for name, column in self._all().items()})
        new.count = length
        return new

    def size_bytes(self) -> int:
        """Return the bytes of all columns in view; of Python objects, their shallow sizes.

        >>> from samplebatch import SampleBatch
        >>> SampleBatch(a=np.zeros((4, 2), np.float32))[1:].size_bytes()
        24
        """
        return sum([column.nbytes for column in self._all().values()])


def as_indices(key: Any, n: int) -> Indices:
    """Turn a mask or integers into row indices in [0, n)."""
    rows = resolve(key, n)
    if isinstance(rows, int):
        raise RowIndexError("rows are gathered by a list of integers or a mask, got a single integer")
    return np.arange(*rows) if isinstance(rows, tuple) else rows


def _counted_column(columns: dict[str, Column]) -> str:
    """Name the column that says how many steps there are: not infos or states, unless there is nothing else."""
    for name in columns:
        if name.partition(".")[0] != names.INFOS and not (names.is_state_in(name) or names.is_state_out(name)):
            return name
    return next(iter(columns))


def check_length(name: str, column: Column, rows: int, why: str) -> None:
    """Check that a column has the rows that it must have.

    Raises
    ------
    ColumnLengthError
        If it has not; names the column, and says why it must.
    """
    if len(column) != rows:
        raise ColumnLengthError(f"column {name!r} must have {rows} rows {why}, got {len(column)}")

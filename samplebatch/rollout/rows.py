"""GrowingRows: columns of rows that arrive some at a time, written where they will be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.column import memory
from samplebatch.column.casting import cast_exactly, wider
from samplebatch.env.spaces import Columns, Leaf
from samplebatch.errors import ColumnLengthError, ColumnMismatchError

_LEAST_ROWS = 256


class GrowingRows:
    """Columns that all have the same rows, with room for more.

    The memory stays with them when they are emptied, and its pages warm.

    Attributes
    ----------
    rows
        How many rows there are.

    Examples
    --------
    >>> rows = GrowingRows()
    >>> rows.append({"a": np.array([1, 2])}, 2)
    >>> rows.append({"a": np.array([0.5])}, 1)
    >>> rows.columns()["a"].tolist()
    [1.0, 2.0, 0.5]
    """

    def __init__(self) -> None:
        self.rows = 0
        self._capacity = 0
        self._columns: Columns = {}

    def reserve(self, rows: int) -> None:
        """Make room for so many rows more."""
        if self.rows + rows > self._capacity:
            self._grow(self.rows + rows)

    def append(self, values: Columns, count: int) -> None:
        """Write `count` rows, given by column as arrays of shape (count, ...).

        Raises
        ------
        ColumnMismatchError
            If the columns are not those of the rows before, or differ in row shape, or in dtype beyond what can be
            widened without loss.
        ColumnLengthError
            If a column has not `count` rows.
        """
        start = self.rows
        stop = start + count
        if stop > self._capacity:
            self._grow(max(stop, 2 * self._capacity, _LEAST_ROWS))
        columns = self._columns
        if len(values) != len(columns):
            columns = self._begin(values)
        where = slice(start, stop)
        for name, given in values.items():
            column = columns.get(name)
            if column is None:
                # The memory of an earlier collection, whose columns had other names.
                column = self._begin(values)[name]
            if given.dtype is column.dtype and given.shape == (count, *column.shape[1:]):
                column[where] = given
            else:
                self._fit(name, given, count)[where] = given
        self.rows = stop

    def extend(self, parts: Mapping[str, Sequence[Leaf]], count: int) -> None:
        """Write `count` rows of each of several steps, given as a list of arrays by column.

        Raises
        ------
        ColumnMismatchError, ColumnLengthError
            As `append` does; the steps before the one that is refused are there then.
        """
        start, steps = self.rows, len(next(iter(parts.values())))
        stop = start + count * steps
        self.reserve(stop - start)
        columns = self._columns
        if columns.keys() != parts.keys():
            columns = self._begin({name: arrays[0] for name, arrays in parts.items()})
        try:
            for name, arrays in parts.items():
                # Refused unless all agree in dtype and row shape, and have so many rows in all.
                np.concatenate(arrays, 0, columns[name][start:stop], casting="no")
        except (TypeError, ValueError):
            for place in range(steps):
                self.append({name: arrays[place] for name, arrays in parts.items()}, count)
        self.rows = stop

    def columns(self) -> Columns:
        """View all rows, column by column."""
        return {name: column[: self.rows] for name, column in self._columns.items()}

    def clear(self) -> None:
        """Empty the columns."""
        self.rows = 0

    def _begin(self, values: Columns) -> Columns:
        """Make columns for values like these, unless there are rows in others."""
        if self.rows:
            raise other_columns([self._columns, values])
        self._columns = {name: _empty(self._capacity, given) for name, given in values.items()}
        return self._columns

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        for name, column in self._columns.items():
            self._columns[name] = grown = _empty(capacity, column)
            grown[: self.rows] = column[: self.rows]

    def _fit(self, name: str, given: Leaf, count: int) -> Leaf:
        """Return the column to write to: another one, of a dtype that holds the given rows as well, if it must be."""
        column = self._columns[name]
        if not given.ndim or len(given) != count:
            raise ColumnLengthError(
                f"column {name!r} must have {count} rows, one for each environment, got "
                f"{len(given) if given.ndim else 'a single value'}"
            )
        if not self.rows:
            self._columns[name] = fresh = _empty(self._capacity, given)
            return fresh
        if given.shape[1:] != column.shape[1:]:
            raise ColumnMismatchError(
                f"column {name!r} must have rows of shape {column.shape[1:]}, as in the steps before, "
                f"got {given.shape[1:]}"
            )
        if cast_exactly(given, column.dtype) is not None:
            return column
        held = column[: self.rows]
        for dtype in wider(column.dtype, given.dtype):
            kept = cast_exactly(held, dtype)
            if kept is not None and cast_exactly(given, dtype) is not None:
                self._columns[name] = widened = _empty(self._capacity, np.empty((0, *column.shape[1:]), dtype))
                widened[: self.rows] = kept
                return widened
        raise ColumnMismatchError(
            f"column {name!r} must hold {column.dtype}, as in the steps before, got {given.dtype} that neither fits it "
            "nor allows a wider dtype without loss"
        )


def other_columns(steps: Sequence[Columns]) -> ColumnMismatchError:
    """Word the error for steps that have not all the same columns."""
    odd = next(name for step in steps for name in step.keys() ^ steps[0].keys())
    return ColumnMismatchError(f"all steps of a collection must have the same columns, some lack {odd!r}")


def _empty(rows: int, like: npt.NDArray[Any]) -> Leaf:
    shape = (rows, *like.shape[1:])
    return np.empty(shape, object) if like.dtype.hasobject else memory.empty(shape, like.dtype)

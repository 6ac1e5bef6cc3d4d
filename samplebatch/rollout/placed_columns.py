"""PlacedColumns: columns of rows that are written in any order, in a slot or in memory of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure, flatten, is_nested, leaf_names, unflatten
from samplebatch.column import memory
from samplebatch.column.casting import cast_exactly
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.env.spaces import Leaf

DTYPES = {names.REWARDS: np.dtype(np.float64), names.TERMINATEDS: np.dtype(bool), names.TRUNCATEDS: np.dtype(bool)}
"""Fixed, so that a reward of 0 in one fragment and 0.5 in the next can be joined."""

_NUMBERS = frozenset("?bBhHiIlLqQefdFD")
_PYTHON: dict[np.dtype[Any], type] = {
    np.dtype(np.bool_): bool,
    np.dtype(np.int64): int,
    np.dtype(np.float64): float,
    np.dtype(np.complex128): complex,
}
_EXACT = 1 << 53
"""Integers up to this one are floats of 64 bits as they are."""
_ndarray = np.ndarray


class Misfit(Exception):
    """There is a value that the columns cannot hold as it is. Nothing was made of what was asked for."""


class PlacedColumns:
    """Columns of numbers, and infos.

    A column is made when its first value is there, which also says its dtype.

    Parameters
    ----------
    given
        Where rows are written, by dotted name; None for memory of their own.
    capacity
        How many rows there are.

    Attributes
    ----------
    by_name
        The columns, by dotted name.
    scalars
        The types of single numbers that each takes as they are.
    nested
        How nested columns are put together.
    infos
        What the environment said of each row.
    """

    def __init__(self, given: Mapping[str, Any] | None, capacity: int) -> None:
        self._given = given
        self.capacity = capacity
        self.by_name: dict[str, Leaf] = {}
        self.scalars: dict[str, frozenset[type]] = {}
        self.nested: dict[str, Structure] = {}
        self.infos: list[Any] = [None] * capacity

    def value(self, name: str, row: int) -> Any:
        """Return one value, nested if it was."""
        return unflatten(name, self.nested.get(name), lambda leaf: self.by_name[leaf][row])

    def batch(self, order: Iterable[str], count: int) -> SampleBatch:
        """Put the first rows of columns together."""
        columns: dict[str, Column] = {}
        for name in order:
            for leaf in leaf_names(name, self.nested.get(name)):
                if leaf == names.INFOS:
                    columns[leaf] = ObjectColumn.from_rows(self.infos[:count])
                    continue
                values = self.by_name[leaf][:count]
                # A short column must not keep a long one's memory alive.
                keeps = self._given is not None or 2 * count >= self.capacity
                columns[leaf] = TensorColumn(values if keeps else memory.copy_of(values))
        return SampleBatch._of(columns, {name: self.nested[name] for name in order if name in self.nested})

    def move(self, count: int, moves: Sequence[tuple[int, int, int]], rest: npt.NDArray[np.intp] | None) -> None:
        """Close the gaps; see `Places.moves`."""
        columns: list[Any] = [*self.by_name.values(), self.infos]
        for column in columns:
            last: Any = None
            if rest is not None:
                last = column.take(rest, 0) if isinstance(column, _ndarray) else [column[row] for row in rest]
            for start, stop, target in moves:
                column[target : target + stop - start] = column[start:stop]
            if last is not None:
                column[count - len(last) : count] = last

    def leave(self, capacity: int) -> None:
        """Go on in memory of their own."""
        self._given = None
        for name, column in self.by_name.items():
            self.by_name[name] = grown = memory.empty((capacity, *column.shape[1:]), column.dtype)
            grown[: self.capacity] = column
        self.infos += [None] * (capacity - len(self.infos))
        self.capacity = capacity

    def column(self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> Leaf:
        """Return a column; if it is new, take it from those that were given, or make it.

        Raises
        ------
        Misfit
            If it would not hold numbers.
        """
        column = self.by_name.get(name)
        if column is not None:
            return column
        if dtype.char not in _NUMBERS or not dtype.isnative:
            raise Misfit
        if self._given is not None:
            column = self._given.get(name)
            if not isinstance(column, _ndarray) or column.dtype != dtype or column.shape[1:] != row_shape:
                self.leave(self.capacity)
                column = None
        if column is None:
            column = memory.empty((self.capacity, *row_shape), dtype)
        self.by_name[name] = column
        scalars = {dtype.type, _PYTHON.get(dtype, dtype.type)}
        self.scalars[name] = frozenset() if row_shape else frozenset(scalars)
        return column

    def put(self, row: int, name: str, value: Any) -> None:
        """Write one value of any kind.

        Raises
        ------
        Misfit
            If it is no number, array or tree of them, or of another dtype, shape or structure than those before.
        """
        if self._write(row, name, value):
            return
        if name == names.INFOS:
            self.infos[row] = kept_info(value)
        elif is_nested(value):
            structure, leaves = flatten(name, value)
            if self.nested.setdefault(name, structure) != structure or name in self.by_name:
                raise Misfit
            for leaf, part in leaves:
                if not self._write(row, leaf, part):
                    self._put_leaf(row, leaf, part)
        elif name in self.nested:
            raise Misfit
        else:
            self._put_leaf(row, name, value)

    def _write(self, row: int, name: str, value: Any) -> bool:
        """Write a value if it is clear at a glance that the column takes it as it is."""
        column = self.by_name.get(name)
        if column is None:
            return False
        kind = type(value)
        if kind is _ndarray:
            fits: bool = value.dtype == column.dtype and value.shape == column.shape[1:]
        elif kind is int and name == names.REWARDS:
            fits = column.ndim == 1 and -_EXACT <= value <= _EXACT
        else:
            fits = kind in self.scalars[name]
        if fits:
            try:
                column[row] = value
            except OverflowError:
                raise Misfit from None
        return fits

    def _put_leaf(self, row: int, name: str, value: Any) -> None:
        column = self.by_name.get(name)
        if value is None or isinstance(value, (str, bytes)):
            raise Misfit
        try:
            array: Leaf | None = np.asarray(value)
        except (ValueError, TypeError, RuntimeError):
            raise Misfit from None
        dtype = DTYPES.get(name)
        if array is not None and dtype is not None and array.dtype.char in _NUMBERS:
            array = cast_exactly(array, dtype)
        if array is None:
            raise Misfit
        if column is None:
            column = self.column(name, array.dtype, array.shape)
        if array.dtype != column.dtype or array.shape != column.shape[1:]:
            raise Misfit
        column[row] = array


def kept_info(info: Any) -> Any:
    """Copy an info one level deep, as environments reuse them."""
    return info.copy() if type(info) in (dict, list, _ndarray) else info

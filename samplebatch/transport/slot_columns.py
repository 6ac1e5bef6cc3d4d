"""SlotColumns: the columns of a batch in its slot, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import cast

import numpy as np
import numpy.typing as npt

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.transport.schema import Place

_ndarray = np.ndarray
_new = object.__new__


class SlotColumns:
    """What stands for the columns in the window of a batch: their places in a slot, which it keeps.

    Parameters
    ----------
    root
        The bytes of the slot.
    places
        Where the columns lie, by name.
    """

    __slots__ = ("_places", "_root")

    def __init__(self, root: npt.NDArray[np.uint8], places: Mapping[str, Place]) -> None:
        self._root = root
        self._places = places

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, name: str) -> Unmade:
        return Unmade(self._root, self._places[name])

    @classmethod
    def batch(
        cls, root: npt.NDArray[np.uint8], places: Mapping[str, Place], rows: int, nested: dict[str, Structure]
    ) -> SampleBatch:
        """Make a batch of arrays without sequences and with no flags set, of which no column is made yet."""
        batch = _new(SampleBatch)
        batch._columns = {}
        batch.count = rows
        batch._window = (cast("dict[str, Column]", cls(root, places)), 0, rows, 0, 0)
        if nested:
            batch._nested = nested
        return batch


class Unmade:
    """A column that is made when it is known which of its rows are wanted."""

    __slots__ = ("_place", "_root")

    def __init__(self, root: npt.NDArray[np.uint8], place: Place) -> None:
        self._root = root
        self._place = place

    def slice(self, start: int, stop: int) -> TensorColumn:
        """Make a column of the rows from `start` to `stop`."""
        (_, dtype, row_shape, _, _), _, offset = self._place
        if start:
            offset += start * prod(row_shape) * dtype.itemsize
        column = _new(TensorColumn)
        column.values = _ndarray((stop - start, *row_shape), dtype, self._root, offset)
        return column

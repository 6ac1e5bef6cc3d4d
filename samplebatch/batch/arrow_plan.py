"""Batches viewed in Arrow files by a plan, which is made once for all files of a schema.

Arrow makes an array for each column and each level of lists in it, and a table of these; for a file of some rows that
takes longer than reading it. A plan goes from the numbers in a record batch's message to the columns at once. It only
takes what the library itself writes: whatever is otherwise is left to Arrow, with its checks and its errors.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from samplebatch import names
from samplebatch.batch.arrow import Parts, TableReader
from samplebatch.column.arrow import FieldReader
from samplebatch.column.arrow_bodies import Body
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn

_ALIGNED = 7
"""Bits of a place that is not one at which every dtype can be read."""


class _Place(NamedTuple):
    """Place of a column's data among the buffers of a body, and its layout there."""

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    row_nbytes: int
    buffer: int


class ViewPlan:
    """Plan by which columns of one schema are viewed in the bodies of files.

    Parameters
    ----------
    places
        The columns to view.
    values
        Values for a row of each array in a body, the columns that are not viewed included.
    reader
        Reader of tables of these columns.
    """

    __slots__ = ("_places", "_reader", "_values")

    def __init__(self, places: list[_Place], values: list[int], reader: TableReader) -> None:
        self._places, self._values, self._reader = places, values, reader

    @classmethod
    def make(cls, schema: pa.Schema, reader: TableReader) -> ViewPlan | None:
        """Make the plan for the columns of a reader in files of a schema; None if one of the schema is no tensor."""
        places: dict[str, _Place] = {}
        values: list[int] = []
        buffers = 0
        for field in schema:
            rows = None if field.name == names.SEQ_LENS else FieldReader(field).fixed_rows()
            if rows is None or field.name in places:
                return None
            # Each array has a buffer of nulls, which none of them uses, and the innermost one of data behind it.
            buffers += len(rows.values) + 1
            row_nbytes = rows.dtype.itemsize * prod(rows.row_shape)
            places[field.name] = _Place(field.name, rows.dtype, rows.row_shape, row_nbytes, buffers - 1)
            values += rows.values
        return cls([places[name] for name in reader.names], values, reader)

    def view(self, data: pa.Buffer, body: Body) -> Parts | None:
        """View a record batch as the parts of a batch; None if it lies in another way than the library writes it."""
        rows, nodes, buffers, start, nbytes = body
        if rows <= 0 or nodes != [(rows * count, 0) for count in self._values]:
            return None
        columns: dict[str, Column] = {}
        for name, dtype, row_shape, row_nbytes, buffer in self._places:
            at, held = buffers[buffer]
            wanted = rows * row_nbytes
            if at < 0 or wanted > held or at + wanted > nbytes or start + at & _ALIGNED:
                return None
            columns[name] = TensorColumn(np.ndarray((rows, *row_shape), dtype, data, start + at))
        return self._reader.parts(columns)

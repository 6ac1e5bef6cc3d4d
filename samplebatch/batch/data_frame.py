"""Data frames of pandas over the columns of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch.batch.nested.tensors import column_of_arrays
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.interface import Column
from samplebatch.errors import require

if TYPE_CHECKING:
    import pandas as pd


def data_frame(columns: Mapping[str, Column]) -> pd.DataFrame:
    """Make a data frame of columns with a row per step each.

    Raises
    ------
    MissingExtraError
        If pandas is not installed.
    """
    pandas = require("pandas", "pandas")
    return pandas.DataFrame({name: _cells(column) for name, column in columns.items()}, copy=False)


def stacked_frame(frames: Mapping[Any, pd.DataFrame], key: str) -> pd.DataFrame:
    """Lay data frames one under the other, with the key of each in the first column."""
    pandas = require("pandas", "pandas")
    parts = []
    for value, frame in frames.items():
        frame.insert(0, key, [value] * len(frame))
        parts.append(frame)
    return pandas.concat(parts, ignore_index=True) if parts else pandas.DataFrame({key: []})


def _cells(column: Column) -> Any:
    """Return the rows of a column as cells: numbers, or an array or object each."""
    values = (column.decompress() if isinstance(column, CompressedColumn) else column_of_arrays(column)).values
    return values if isinstance(values, np.ndarray) and values.ndim == 1 else np.fromiter(values, object, len(column))

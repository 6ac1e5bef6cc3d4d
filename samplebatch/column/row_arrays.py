"""Rows as a user gives them, each an array or a nested list, as arrays of one dtype and number of dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.column.types import common_dtype, storage_of
from samplebatch.errors import ColumnTypeError


def row_arrays(rows: Sequence[Any], name: str) -> tuple[list[npt.NDArray[Any]], np.dtype[Any]]:
    """View rows as arrays, and find the dtype that holds them all without loss.

    Parameters
    ----------
    rows
        Arrays, or nested lists of numbers. An empty list fits any dtype.
    name
        The column's name, for errors.

    Raises
    ------
    ColumnTypeError
        If a row is not an array of one dimension or more, rows differ in their number of dimensions, or no dtype among
        theirs holds the others.

    Examples
    --------
    >>> row_arrays([[1, 2], [0.5]], "x")
    ([array([1, 2]), array([0.5])], dtype('float64'))
    """
    arrays = [_row_array(row, i, name) for i, row in enumerate(rows)]
    ndims = {array.ndim for array in arrays}
    if len(ndims) > 1:
        found = " and ".join(map(str, sorted(ndims)))
        raise ColumnTypeError(f"column {name!r} must have rows of one number of dimensions, got {found}")
    return arrays, _rows_dtype(rows, arrays, name)


def _row_array(row: Any, i: int, name: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(row)
        storage_of(array.dtype.newbyteorder("="))
    except (ValueError, ColumnTypeError) as error:
        raise ColumnTypeError(f"column {name!r} must have rows that are arrays, row {i} is not: {error}") from error
    if not array.ndim:
        found = type(row).__name__
        raise ColumnTypeError(f"column {name!r} must have rows that are arrays, row {i} is a single {found}")
    return array


def _rows_dtype(rows: Sequence[Any], arrays: list[npt.NDArray[Any]], name: str) -> np.dtype[Any]:
    """Find the dtype that holds every row without loss; empty lists have no say."""
    voting = [i for i, row in enumerate(rows) if arrays[i].size or not isinstance(row, list | tuple)]
    dtypes = list(dict.fromkeys(arrays[i].dtype.newbyteorder("=") for i in voting))
    if not dtypes:
        return np.dtype(np.float64)
    dtype = common_dtype(dtypes)
    numbers = all(found.kind in "biufc" for found in dtypes)
    if dtype is None and numbers and all(isinstance(rows[i], list | tuple) for i in voting):
        # Python's numbers have no dtype of their own: NumPy's choice for all of them will do, if it changes none.
        wide = np.result_type(*dtypes)
        if all(np.array_equal(arrays[i].astype(wide).astype(arrays[i].dtype), arrays[i]) for i in voting):
            dtype = wide
    if dtype is None:
        raise ColumnTypeError(
            f"column {name!r} must have rows of one dtype, or one that holds the others without loss, got "
            f"{' and '.join(map(str, dtypes))}; convert them first"
        )
    return dtype

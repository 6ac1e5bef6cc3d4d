"""Number of tokens per row of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.sample_batch import RowLengths, SampleBatch
from samplebatch.column.ragged_rows import RaggedRows
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnTypeError


def ragged_columns(batch: SampleBatch[Any]) -> dict[str, RaggedRows]:
    """Return the ragged columns of a batch by dotted names."""
    columns = {name: batch.column(name) for name in batch.column_names}
    return {name: column for name, column in columns.items() if isinstance(column, RaggedRows)}


def tokens_of(batch: SampleBatch[Any], lengths: RowLengths) -> npt.NDArray[np.int64]:
    """Return the number of tokens per row, shape (n,).

    Raises
    ------
    ArgumentError
        If the ragged columns do not determine the lengths, or lengths are not integers of at least 0.
    ColumnLengthError
        If the number of lengths differs from the number of rows.

    Examples
    --------
    >>> tokens_of(SampleBatch(ids=[[1, 2], [3]], rewards=[0.5, 1.0]), None)
    array([2, 1])
    """
    counts = weights_of(batch, lengths, "lengths")
    if counts.dtype.kind not in "iu":
        raise ArgumentError(f"lengths must be integers, got dtype {counts.dtype}")
    return counts.astype(np.int64, copy=False)


def weights_of(batch: SampleBatch[Any], weights: RowLengths, argument: str) -> npt.NDArray[Any]:
    """Return a finite, non-negative number per row, such as its token count; see `tokens_of`."""
    if weights is None:
        return _common_lengths(batch, argument)
    if isinstance(weights, str):
        column = batch.column(weights)
        if isinstance(column, RaggedRows):
            return column.seq_lens
        numbers: Any = column.to_numpy()
    else:
        numbers = np.asarray(weights.cpu() if hasattr(weights, "cpu") else weights)
    if numbers.shape != (batch.count,):
        raise ColumnLengthError(
            f"{argument} must have {batch.count} rows, one per row of the batch, got {numbers.shape}"
        )
    if not len(numbers):
        return np.zeros(0, np.int64)
    if numbers.dtype.kind not in "biuf":
        raise ColumnTypeError(f"{argument} must be numeric, got dtype {numbers.dtype}")
    if not (np.isfinite(numbers).all() and numbers.min() >= 0):
        row = int(np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))[0])
        raise ArgumentError(f"{argument} must be finite and at least 0, got {numbers[row]} in row {row}")
    return np.asarray(numbers)


def _common_lengths(batch: SampleBatch[Any], argument: str) -> npt.NDArray[np.int64]:
    columns = ragged_columns(batch)
    if not columns:
        raise ArgumentError(f"{argument} must be passed for a batch without ragged columns, got None")
    first, *others = columns.items()
    for name, column in others:
        if not np.array_equal(column.seq_lens, first[1].seq_lens):
            raise ArgumentError(
                f"{argument} must name a column, or give a number for each row, got ragged columns of different "
                f"lengths: {first[0]!r} and {name!r}"
            )
    return first[1].seq_lens

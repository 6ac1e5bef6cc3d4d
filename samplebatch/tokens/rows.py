"""Batches with other rows or columns: repeated rows, and columns of several batches side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from samplebatch.arguments import whole
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

B = TypeVar("B", bound=SampleBatch[Any])


def repeat(batch: B, k: int, *, interleave: bool = True) -> B:
    """Repeat every row, as for several completions of one prompt.

    Parameters
    ----------
    batch
        The batch, n rows.
    k
        How many times each row is there.
    interleave
        Whether the copies of a row follow each other. If not, all rows are repeated in blocks of n.

    Raises
    ------
    ArgumentError
        If `k` is no whole number from 0.

    Examples
    --------
    >>> prompts = SampleBatch(uid=[7, 8])
    >>> repeat(prompts, 2)["uid"].tolist(), repeat(prompts, 2, interleave=False)["uid"].tolist()
    ([7, 7, 8, 8], [7, 8, 7, 8])
    """
    rows, times = np.arange(batch.count), whole("k", k)
    return batch.take(np.repeat(rows, times) if interleave else np.tile(rows, times))


def union(batch: B, other: SampleBatch[Any] | Mapping[str, Any]) -> B:
    """Return a batch with the columns of both, over the same memory.

    Parameters
    ----------
    batch
        The batch.
    other
        A batch, or columns by name, with as many rows. Columns that both have must be equal.

    Raises
    ------
    ColumnLengthError
        If `other` has another number of rows.
    ColumnMismatchError
        If a column of both differs; names it.

    Examples
    --------
    >>> both = union(SampleBatch(ids=[1, 2]), SampleBatch(ids=[1, 2], rewards=[0.5, 1.0]))
    >>> list(both)
    ['ids', 'rewards']
    """
    if not isinstance(other, Mapping):
        raise ColumnTypeError(f"other must be a batch or a mapping of columns, got {type(other).__name__}")
    added = other if isinstance(other, SampleBatch) else SampleBatch(other)
    if added.count != batch.count:
        raise ColumnLengthError(f"other must have {batch.count} rows, got {added.count}")
    for name in added.column_names:
        if name in batch.column_names and not batch.column(name).equals(added.column(name)):
            raise ColumnMismatchError(f"column {name!r} must be equal in both batches, got others; rename or drop one")
    return assign(batch, **{name: added[name] for name in added if name not in batch})


def assign(batch: B, **columns: Any) -> B:
    """Return a batch with more or other columns, over the same memory; the batch itself keeps its columns.

    Raises
    ------
    ColumnLengthError
        If a column has another number of rows; names it.

    Examples
    --------
    >>> batch = SampleBatch(rewards=[1.0, 3.0])
    >>> assign(batch, advantages=batch["rewards"] - 2.0)["advantages"].tolist(), list(batch)
    ([-1.0, 1.0], ['rewards'])
    """
    new = batch.copy(shallow=True)
    new.update(columns)
    return new

"""Repeated rows, and columns of several batches joined side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from samplebatch.arguments import whole
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

B = TypeVar("B", bound=SampleBatch[Any])


def repeat(batch: B, k: int, *, interleave: bool = True) -> B:
    """Repeat every row, for example for several completions of one prompt.

    Parameters
    ----------
    batch
        The batch, n rows.
    k
        Number of copies of each row.
    interleave
        Whether the copies of a row are adjacent. If not, the entire batch is repeated.

    Raises
    ------
    ArgumentError
        If `k` is not an integer of at least 0.

    Examples
    --------
    >>> prompts = SampleBatch(uid=[7, 8])
    >>> repeat(prompts, 2)["uid"].tolist(), repeat(prompts, 2, interleave=False)["uid"].tolist()
    ([7, 7, 8, 8], [7, 8, 7, 8])
    """
    rows, times = np.arange(batch.count), whole("k", k)
    return batch.take(np.repeat(rows, times) if interleave else np.tile(rows, times))


def union(batch: B, other: SampleBatch[Any] | Mapping[str, Any]) -> B:
    """Return a batch with the columns of both, sharing memory.

    Parameters
    ----------
    batch
        The batch.
    other
        A batch, or columns by name, with the same number of rows. Columns that exist in both must be equal.

    Raises
    ------
    ColumnLengthError
        If `other` has another number of rows.
    ColumnMismatchError
        If a column exists in both and differs; names the column.

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
    """Return a batch with added or replaced columns, sharing memory; the original batch is unchanged.

    Raises
    ------
    ColumnLengthError
        If a column has another number of rows; names the column.

    Examples
    --------
    >>> batch = SampleBatch(rewards=[1.0, 3.0])
    >>> assign(batch, advantages=batch["rewards"] - 2.0)["advantages"].tolist(), list(batch)
    ([-1.0, 1.0], ['rewards'])
    """
    new = batch.copy(shallow=True)
    new.update(columns)
    return new

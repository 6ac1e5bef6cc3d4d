"""Batches split into parts for several learners, and joined again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.concat import concat_samples
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


B = TypeVar("B", bound=SampleBatch[Any])
Indices = npt.NDArray[np.intp]


class Parts(list[B], Generic[B]):
    """List of parts of one batch that records the source row of each row.

    Parameters
    ----------
    parts
        The parts.
    rows
        Row indices of the batch for each part.
    totals
        Total weight of each part, such as its tokens.
    count
        Number of rows of the batch.

    Attributes
    ----------
    rows
        Row indices of the batch for each part.
    totals
        Total weight of each part, shape (k,).

    Examples
    --------
    >>> batch = SampleBatch(ids=[[1, 2, 3], [4], [5, 6]])
    >>> parts = balance(batch, 2)
    >>> [part["ids"].lengths.tolist() for part in parts], parts.imbalance
    ([[3], [1, 2]], 1.0)
    >>> list(parts.join()["ids"])
    [array([1, 2, 3]), array([4]), array([5, 6])]
    """

    def __init__(self, parts: Iterable[B], rows: Sequence[Indices], totals: npt.NDArray[Any], count: int) -> None:
        super().__init__(parts)
        self.rows = list(rows)
        self.totals = totals
        self._count = count

    @property
    def imbalance(self) -> float:
        """Largest weight divided by the mean weight; 1 for parts without weight."""
        mean = float(self.totals.mean()) if len(self.totals) else 0.0
        return float(self.totals.max()) / mean if mean else 1.0

    @property
    def inverse(self) -> Indices:
        """Inverse permutation: position of each row of the batch among the rows of all parts, shape (n,)."""
        positions = np.empty(self._count, np.intp)
        order = np.concatenate([*self.rows, np.empty(0, np.intp)])
        # Padding rows follow the rows that they repeat.
        positions[order[::-1]] = np.arange(len(order))[::-1]
        return positions

    def join(self, parts: Sequence[Any] | None = None) -> Any:
        """Join results of the parts in the row order of the batch, without padding.

        Parameters
        ----------
        parts
            Batches, ragged columns, arrays or tensors with as many rows as the parts; the parts themselves if None.

        Raises
        ------
        ColumnLengthError
            If the number of parts or the number of rows of a part differs.
        """
        results = list(self if parts is None else parts)
        sizes, actual = [len(rows) for rows in self.rows], [len(part) for part in results]
        if sizes != actual:
            raise ColumnLengthError(f"parts must have {sizes} rows, got {actual}")
        first = results[0] if results else None
        inverse = self.inverse
        if isinstance(first, SampleBatch):
            joined: Any = concat_samples(results)
            return joined.take(inverse) if len(inverse) else first
        if isinstance(first, RaggedRows):
            return type(first).concat(results, "parts").take(inverse)
        if hasattr(first, "detach"):
            import torch

            return torch.cat(results)[torch.from_numpy(inverse).to(results[0].device)]
        return np.concatenate(results)[inverse]


def chunk(batch: B, n: int, *, pad_to_divisor: bool = False) -> Parts[B]:
    """Split a batch into `n` consecutive parts of nearly equal size.

    Parameters
    ----------
    batch
        The batch.
    n
        Number of parts; some are empty if the batch has fewer rows.
    pad_to_divisor
        Whether to repeat rows, starting with the first, until all parts have equal size. `Parts.join` removes them.

    Returns
    -------
    Parts
        Parts of the batch: views, unless rows are repeated.

    Raises
    ------
    ArgumentError
        If `n` is not an integer of at least 1, or a batch without rows must be padded.

    Examples
    --------
    >>> parts = chunk(SampleBatch(a=[1, 2, 3]), 2, pad_to_divisor=True)
    >>> [part["a"].tolist() for part in parts], parts.join()["a"].tolist()
    ([[1, 2], [3, 1]], [1, 2, 3])
    """
    n, count = whole("n", n, 1), batch.count
    if not pad_to_divisor or count % n == 0:
        edges = np.arange(n + 1) * count // n
        parts = [batch[start:stop] for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
        return Parts(parts, np.split(np.arange(count), edges[1:-1]), np.diff(edges), count)
    if not count:
        raise ArgumentError("a batch must have rows to be padded, got none")
    rows = np.arange(-(-count // n) * n) % count
    chunks = np.split(rows, n)
    return Parts([batch.take(indices) for indices in chunks], chunks, np.full(n, len(rows) // n), count)


def balance(batch: B, k: int, weights: RowLengths = None, *, equal_size: bool = False) -> Parts[B]:
    """Distribute rows over `k` parts of nearly equal weight, such as tokens.

    Rows are assigned by descending weight, each to the lightest part. Rows of the heaviest and the lightest part are
    then swapped as long as that reduces their difference. `Parts.imbalance` is the largest weight divided by the mean.

    Parameters
    ----------
    batch
        The batch.
    k
        Number of parts.
    weights
        Name of a column, or one number per row; default: lengths of the ragged columns.
    equal_size
        Whether part sizes differ by at most one row.

    Raises
    ------
    ArgumentError
        If `k` is not an integer of at least 1, weights are negative or not finite, or ragged columns have different
        lengths and `weights` is None.
    ColumnLengthError
        If the number of weights differs from the number of rows.

    Examples
    --------
    >>> parts = balance(SampleBatch(ids=[[1] * 5, [2] * 3, [3] * 2, [4]]), 2)
    >>> parts.totals.tolist(), [rows.tolist() for rows in parts.rows]
    ([6.0, 5.0], [[0, 3], [1, 2]])
    """
    from samplebatch import kernels

    k = whole("k", k, 1)
    costs = np.ascontiguousarray(weights_of(batch, weights, "weights"), np.float64)
    count = batch.count
    ranks, totals = np.zeros(count, np.intp), np.zeros(k)
    largest = max(-(-count // k), 1) if equal_size else count + 1
    kernels.balance(costs, np.argsort(-costs, kind="stable"), largest, equal_size, ranks, totals)
    order = np.argsort(ranks, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(ranks, minlength=k))[:-1])
    return Parts([batch.take(indices) for indices in rows], rows, np.bincount(ranks, costs, minlength=k), count)

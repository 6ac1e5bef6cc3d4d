"""Packing of rows into bins with a token limit, and splitting of token batches for several learners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.concat import concat_samples
from samplebatch.batch.sample_batch import RowLengths, SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.ragged_padding import places_of
from samplebatch.column.ragged_rows import RaggedRows
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn, TorchColumn
from samplebatch.column.varying_rows import offsets_of
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnMismatchError, ColumnTypeError, SequenceError

B = TypeVar("B", bound=SampleBatch[Any])
Counts = npt.NDArray[np.int64]

POSITION_IDS = "position_ids"
SEGMENT_IDS = "segment_ids"


class PackedBatch(Generic[B]):
    """Bins of concatenated rows of a batch; see `pack`.

    Parameters
    ----------
    batch
        A batch with one row per bin. Each ragged column contains the concatenated tokens of a bin's rows; each column
        with one value per row becomes a ragged column with the values of a bin's rows. The column `position_ids`
        (int64) numbers the tokens of each row from 0; the column `segment_ids` (int32) numbers the rows of each bin.
    rows
        Rows in each bin, as a ragged column.
    lengths
        Number of tokens of each packed row, shape (n,).
    max_tokens
        Maximum number of tokens per bin.

    Attributes
    ----------
    batch, rows, lengths, max_tokens
        The arguments.

    Examples
    --------
    >>> packed = pack(
    ...     SampleBatch(ids=[[1, 2, 3], [4], [5, 6]], rewards=[0.0, 1.0, 2.0]), max_tokens=4
    ... )
    >>> list(packed.batch["ids"]), list(packed.batch["rewards"])
    ([array([1, 2, 3, 4]), array([5, 6])], [array([0., 1.]), array([2.])])
    >>> packed.cu_seqlens[0]
    array([0, 3, 4], dtype=int32)
    >>> list(packed.unpack(packed.batch["ids"] * 10))
    [array([10, 20, 30]), array([40]), array([50, 60])]
    """

    def __init__(self, batch: B, rows: RaggedColumn, lengths: Counts, max_tokens: int) -> None:
        self.batch = batch
        self.rows = rows
        self.lengths = lengths
        self.max_tokens = max_tokens

    def __len__(self) -> int:
        """Return the number of bins."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"PackedBatch({len(self.lengths)} rows in {len(self)} bins, {self.fill:.1%} full)"

    @property
    def fill(self) -> float:
        """Fraction of the bins' total capacity that contains tokens, from 0 to 1."""
        room = len(self) * self.max_tokens
        return float(self.lengths.sum() / room) if room else 1.0

    @property
    def segments(self) -> RaggedColumn:
        """Number of tokens of each row in each bin, as a ragged column."""
        return RaggedColumn(self.lengths[self.rows.flat], self.rows.layout[0])

    @property
    def max_seqlens(self) -> Counts:
        """Number of tokens of the longest row in each bin, shape (bins,)."""
        return np.asarray(self.segments.max())

    @property
    def cu_seqlens(self) -> RaggedColumn:
        """Ragged column of the cumulative sequence lengths of each bin, int32, as FlashAttention expects."""
        segments = self.segments
        offsets = segments.offsets + np.arange(len(self) + 1)
        bounds = np.zeros(int(offsets[-1]), np.int32)
        is_bound = np.ones(len(bounds), np.bool_)
        is_bound[offsets[:-1]] = False
        bounds[is_bound] = segments.cumsum().flat
        return RaggedColumn(bounds, offsets)

    def unpack(self, values: Any) -> Any:
        """Unpack values of the packed tokens into a ragged column with one row per row of the batch.

        Parameters
        ----------
        values
            A ragged column with one row per bin, or an array or tensor of all tokens, shape (m, ...).

        Raises
        ------
        ColumnLengthError
            If the number of values differs from the number of tokens.
        """
        counts = self.lengths[self.rows.flat]
        flat = values
        if isinstance(values, RaggedRows):
            expected = self.segments.sum()
            if len(values) != len(expected):
                raise ColumnLengthError(f"values must have {len(expected)} rows, one per bin, got {len(values)}")
            if (differs := values.seq_lens != expected).any():
                row = int(differs.argmax())
                raise ColumnLengthError(
                    f"values must have one element per token of each bin, got {values.seq_lens[row]} for "
                    f"{expected[row]} tokens in bin {row}"
                )
            trailing = () if values.ndim == 1 or not len(values) else tuple(values.extents[0, 1:].tolist())
            flat = values.flat.reshape(int(counts.sum()), *trailing)
        kind = RaggedColumn if isinstance(flat, np.ndarray) else RaggedTorchColumn
        if len(flat) != counts.sum():
            raise ColumnLengthError(f"values must have one element for each of {counts.sum()} tokens, got {len(flat)}")
        positions = np.empty(len(counts), np.intp)
        positions[self.rows.flat] = np.arange(len(counts))
        return kind.from_lengths(flat, counts).take(positions)


def pack(batch: B, max_tokens: int, lengths: RowLengths = None) -> PackedBatch[B]:
    """Pack rows into bins of at most `max_tokens` tokens by first-fit decreasing.

    Ragged and numeric columns are packed. Columns of text and objects are omitted; `batch.take(packed.rows.flat)`
    returns these columns in the order of the bins.

    Parameters
    ----------
    batch
        The batch.
    max_tokens
        Maximum number of tokens per bin.
    lengths
        Name of a column of tokens or token counts, or one token count per row; default: lengths of the ragged columns.

    Raises
    ------
    ArgumentError
        If a row has more tokens than a bin, `max_tokens` is not an integer of at least 1, or ragged columns have
        different lengths and `lengths` is None.
    ColumnMismatchError
        If the batch has a column `position_ids` or `segment_ids`, or rows of a column cannot be concatenated.
    SequenceError
        If the batch has `seq_lens`.

    Examples
    --------
    >>> batch = SampleBatch(ids=[[1, 2, 3], [4], [5, 6]])
    >>> packed = pack(batch, max_tokens=4)
    >>> packed, packed.batch["segment_ids"][0], packed.batch["position_ids"][0]
    (PackedBatch(3 rows in 2 bins, 75.0% full), array([0, 0, 0, 1], dtype=int32),
     array([0, 1, 2, 0]))
    """
    if "seq_lens" in batch:
        raise SequenceError("a batch must have one row per step to be packed, got 'seq_lens'; drop the column")
    for name in (POSITION_IDS, SEGMENT_IDS):
        if name in batch:
            raise ColumnMismatchError(
                f"column {name!r} must not exist, because packing adds it, got one; drop or rename it"
            )
    counts = tokens_of(batch, lengths)
    bins, used = first_fit(counts, np.argsort(-counts, kind="stable"), max_tokens)
    order = np.argsort(bins, kind="stable")
    sizes = np.bincount(bins, minlength=used)
    columns: dict[str, Column] = {}
    for name in batch.column_names:
        column = batch.column(name)
        if isinstance(column, RaggedRows):
            rows: Any = column.take(order)
            columns[name] = rows.merge(sizes)
        elif isinstance(column, TensorColumn):
            columns[name] = RaggedColumn.from_lengths(column.values[order], sizes)
        elif isinstance(column, TorchColumn):
            columns[name] = RaggedTorchColumn.from_lengths(column.take(order).values, sizes)
    segments = (np.arange(len(order)) - np.repeat(offsets_of(sizes)[:-1], sizes)).astype(np.int32)
    tokens = RaggedColumn(np.repeat(segments, counts[order]), offsets_of(counts[order]))
    positions = RaggedColumn(places_of(tokens), tokens.offsets)
    added: dict[str, Column] = {POSITION_IDS: positions.merge(sizes), SEGMENT_IDS: tokens.merge(sizes)}
    columns |= _beside(batch, added)
    packed = type(batch)(columns)
    return PackedBatch(packed, RaggedColumn(order, offsets_of(sizes)), counts, whole("max_tokens", max_tokens))


def _beside(batch: SampleBatch[Any], columns: dict[str, Column]) -> dict[str, Column]:
    """Move columns to the device of the batch's ragged tensors, if the batch has ragged tensors."""
    tensors = [column for column in ragged_columns(batch).values() if isinstance(column, RaggedTorchColumn)]
    if not tensors:
        return columns
    moved = SampleBatch(columns).to_torch(device=tensors[0].elements.device)
    return {name: moved.column(name) for name in columns}


def first_fit(counts: Counts, order: npt.NDArray[np.intp], max_tokens: int) -> tuple[npt.NDArray[np.intp], int]:
    """Assign rows, in `order`, to the first bin with sufficient capacity; return each row's bin and the number of bins.

    Raises
    ------
    ArgumentError
        If a row has more tokens than a bin.

    Examples
    --------
    >>> first_fit(np.array([3, 1, 2]), np.array([0, 2, 1]), 4)
    (array([0, 0, 1]), 2)
    """
    from samplebatch import kernels

    room = whole("max_tokens", max_tokens, 1)
    if counts.max(initial=0) > room:
        row = int(counts.argmax())
        raise ArgumentError(
            f"max_tokens must be at least {counts[row]}, the tokens of row {row}, got {room}; truncate the rows first"
        )
    ordered = np.empty(len(counts), np.intp)
    tree = np.empty(2 * (1 << max(len(counts) - 1, 0).bit_length()), np.intp)
    used = kernels.first_fit(np.ascontiguousarray(counts[order], np.intp), room, tree, ordered)
    bins = np.empty_like(ordered)
    bins[order] = ordered
    return bins, used


def token_minibatches(
    batch: B,
    max_tokens: int,
    lengths: RowLengths = None,
    epochs: int = 1,
    shuffle: bool = True,
    rng: np.random.Generator | int | None = None,
) -> Iterator[B]:
    """Yield minibatches of at most `max_tokens` tokens; each epoch contains every row once.

    Parameters
    ----------
    batch, max_tokens, lengths
        As in `pack`.
    epochs
        Number of passes over the batch.
    shuffle
        Whether rows are assigned to minibatches in random order, each row to the first minibatch with enough free
        tokens. If false, minibatches are views of consecutive rows.
    rng
        A generator or a seed.

    Raises
    ------
    ArgumentError
        As in `pack`.

    Examples
    --------
    >>> batch = SampleBatch(ids=[[1, 2, 3], [4], [5, 6]])
    >>> [part["ids"].lengths.tolist() for part in token_minibatches(batch, 4, shuffle=False)]
    [[3, 1], [2]]
    """
    counts = tokens_of(batch, lengths)
    rounds, generator = whole("epochs", epochs), np.random.default_rng(rng)
    # Reject invalid arguments here, not when the first minibatch is requested.
    first_fit(counts[:0], np.arange(0), max_tokens)
    if counts.max(initial=0) > max_tokens:
        first_fit(counts, np.arange(len(counts)), max_tokens)
    return _parts(batch, counts, max_tokens, rounds, generator if shuffle else None)


def _parts(batch: B, counts: Counts, max_tokens: int, epochs: int, rng: np.random.Generator | None) -> Iterator[B]:
    ends = np.cumsum(counts)
    for _ in range(epochs):
        if rng is not None:
            bins, used = first_fit(counts, rng.permutation(len(counts)), max_tokens)
            rows = np.split(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins, minlength=used))[:-1])
            yield from (batch.take(rows[part]) for part in rng.permutation(used).tolist())
            continue
        start = 0
        while start < len(counts):
            budget = max_tokens + (int(ends[start - 1]) if start else 0)
            stop = int(np.searchsorted(ends, budget, side="right"))
            yield batch[start:stop]
            start = stop


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
    """Return one finite, non-negative number per row, such as the row's token count; see `tokens_of`."""
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


Indices = npt.NDArray[np.intp]


class Parts(list[B], Generic[B]):
    """List of the parts of a batch, with the index of each part's rows in the batch.

    Parameters
    ----------
    parts
        The parts.
    rows
        For each part, the indices of its rows in the batch.
    totals
        Total weight of each part, such as its number of tokens, shape (k,).
    count
        Number of rows of the batch.

    Attributes
    ----------
    rows, totals
        The arguments.

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
        """Largest weight of a part divided by the mean weight; 1 if all weights are 0."""
        mean = float(self.totals.mean()) if len(self.totals) else 0.0
        return float(self.totals.max()) / mean if mean else 1.0

    @property
    def inverse(self) -> Indices:
        """Inverse permutation, shape (n,): position of each row of the batch in the concatenation of all parts."""
        positions = np.empty(self._count, np.intp)
        order = np.concatenate([*self.rows, np.empty(0, np.intp)])
        # Padding rows follow the rows that they repeat.
        positions[order[::-1]] = np.arange(len(order))[::-1]
        return positions

    def join(self, parts: Sequence[Any] | None = None) -> Any:
        """Concatenate results of the parts in the row order of the batch, without padding.

        Parameters
        ----------
        parts
            Batches, ragged columns, arrays or tensors with as many rows as the parts; the parts themselves if None.

        Raises
        ------
        ColumnLengthError
            If `parts` does not have one value per part, or the number of rows of a value differs from the number of
            rows of its part.
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
        Number of parts; some parts are empty if the batch has fewer than `n` rows.
    pad_to_divisor
        Whether to repeat rows, starting with the first row, until all parts have the same size. `Parts.join` removes
        the repeated rows.

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
    """Distribute rows over `k` parts of nearly equal total weight, such as the number of tokens.

    Rows are assigned by descending weight, each to the lightest part. Afterwards, rows of the heaviest and the lightest
    part are swapped as long as a swap reduces the weight difference between both parts. `Parts.imbalance` is the
    largest weight of a part divided by the mean weight.

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

"""Sequence packing: rows concatenated into bins with a token limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.sample_batch import RowLengths, SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.ragged_padding import places_of
from samplebatch.column.ragged_rows import RaggedRows
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn, TorchColumn
from samplebatch.column.varying_rows import offsets_of
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnMismatchError, SequenceError
from samplebatch.tokens.parts import ragged_columns, tokens_of

B = TypeVar("B", bound=SampleBatch[Any])
Counts = npt.NDArray[np.int64]

POSITION_IDS = "position_ids"
SEGMENT_IDS = "segment_ids"


class PackedBatch(Generic[B]):
    """Rows of a batch concatenated into bins; see `pack`.

    Parameters
    ----------
    batch
        A batch with one row per bin.
    rows
        Rows in each bin.
    lengths
        Number of tokens of each packed row, shape (n,).
    max_tokens
        Maximum number of tokens per bin.

    Attributes
    ----------
    batch
        A batch with one row per bin. Ragged columns contain the concatenated tokens of the bin's rows; columns with one
        value per row contain the values of the bin's rows. `position_ids` counts the tokens of each row from 0, and
        `segment_ids` counts the rows of each bin from 0.
    rows
        Rows in each bin, as a ragged column.
    lengths, max_tokens
        The arguments.

    Examples
    --------
    >>> packed = pack(SampleBatch(ids=[[1, 2, 3], [4], [5, 6]], rewards=[0.0, 1.0, 2.0]), max_tokens=4)
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
        """Fraction of the bins' capacity that contains tokens, from 0 to 1."""
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
        """Cumulative sequence lengths of each bin, int32, as FlashAttention expects: a ragged column."""
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
            if not np.array_equal(values.seq_lens, expected):
                raise ColumnLengthError("values must have as many elements as each bin has tokens, got other lengths")
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

    Ragged and numeric columns are packed. Text and objects are omitted: `batch.take(packed.rows.flat)` returns them in
    the order of the bins.

    Parameters
    ----------
    batch
        The batch.
    max_tokens
        Maximum number of tokens per bin.
    lengths
        Name of a column of tokens or of their counts, or one number per row; default: lengths of the ragged columns.

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
    (PackedBatch(3 rows in 2 bins, 75.0% full), array([0, 0, 0, 1]), array([0, 1, 2, 0]))
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
    segments = np.arange(len(order)) - np.repeat(offsets_of(sizes)[:-1], sizes)
    tokens = RaggedColumn(np.repeat(segments, counts[order]), offsets_of(counts[order]))
    positions = RaggedColumn(places_of(tokens), tokens.offsets)
    added: dict[str, Column] = {POSITION_IDS: positions.merge(sizes), SEGMENT_IDS: tokens.merge(sizes)}
    columns |= _beside(batch, added)
    packed = type(batch)(columns)
    return PackedBatch(packed, RaggedColumn(order, offsets_of(sizes)), counts, whole("max_tokens", max_tokens))


def _beside(batch: SampleBatch[Any], columns: dict[str, Column]) -> dict[str, Column]:
    """Move columns to the device of the batch's ragged tensors, if it has any."""
    tensors = [column for column in ragged_columns(batch).values() if isinstance(column, RaggedTorchColumn)]
    if not tensors:
        return columns
    moved = SampleBatch(columns).to_torch(device=tensors[0].elements.device)
    return {name: moved.column(name) for name in columns}


def first_fit(counts: Counts, order: npt.NDArray[np.intp], max_tokens: int) -> tuple[npt.NDArray[np.intp], int]:
    """Assign rows, in the given order, to the first bin with room; return each row's bin and the number of bins.

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
    """Yield minibatches of at most `max_tokens` tokens, every row once per epoch.

    Parameters
    ----------
    batch, max_tokens, lengths
        As in `pack`.
    epochs
        Passes over the batch.
    shuffle
        Whether rows are assigned to parts in random order, each to the first part with room. If not, parts are views
        of consecutive rows.
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

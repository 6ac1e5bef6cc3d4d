"""Sequences of recurrent models: slicing, gathering and padding batches with a column `seq_lens`.

A batch with `seq_lens` = [l0, l1, ...], shape (s,), stores s sequences contiguously. `state_in_*` and the columns in
the flag `per_sequence` have one row per sequence. All other columns have one row per step, `max_seq_len` rows per
sequence in a padded batch, or shape (T, s, ...) in a time-major batch. Step indices ignore padding: step i of the batch
is step i of the concatenated sequences.

Functions with a parameter `lengths` compute only indices; functions with a parameter `batch` require a batch with
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.bulk import Move, check_length
from samplebatch.batch.episodes import stream_starts
from samplebatch.batch.flags import Flags
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column, Indices, as_indices
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import SequenceError

if TYPE_CHECKING:
    from samplebatch.batch.sample_batch import SampleBatch

B = TypeVar("B", bound="SampleBatch[Any]")

Window = tuple[dict[str, Column], int, int, int, int]
"""Pending slice of a view: the source's columns, a range of their rows, and a range of their sequences."""

Lengths = npt.NDArray[np.int64]


class Cut(NamedTuple):
    """Range of steps, and range of the sequences that contain these steps."""

    start: int
    stop: int
    first: int
    last: int


def snap(lengths: Lengths, start: int, stop: int) -> Cut:
    """Move both ends of a range of steps back to the start of a sequence.

    Adjacent ranges stay adjacent, so no step is lost or duplicated.

    >>> snap(np.array([2, 3, 1]), 0, 3)
    Cut(start=0, stop=2, first=0, last=1)
    >>> snap(np.array([2, 3, 1]), 3, 6)
    Cut(start=2, stop=6, first=1, last=3)
    """
    ends = lengths.cumsum()
    first, last = ends.searchsorted((start, max(start, stop)), "right").tolist()
    bounds = (0, *ends.tolist()) if len(ends) < 16 else np.concatenate(([0], ends))
    return Cut(int(bounds[first]), int(bounds[last]), first, last)


def cut(lengths: Lengths, start: int, stop: int) -> tuple[Cut, Lengths]:
    """Return a range of steps, and the number of its steps in each overlapping sequence, shape (last - first,).

    An empty sequence belongs to the range of steps that ends at the sequence's position.

    >>> cut(np.array([2, 3, 1]), 1, 4)
    (Cut(start=1, stop=4, first=0, last=2), array([1, 2]))
    """
    if stop <= start:
        return Cut(start, start, 0, 0), lengths[:0]
    ends = lengths.cumsum()
    first = int(ends.searchsorted(start, "right")) if start else 0
    last = max(int(ends.searchsorted(stop, "left")) + 1, int(ends.searchsorted(stop, "right")))
    inside = lengths[first:last].copy()
    inside[-1] -= ends[last - 1] - stop
    inside[0] -= start - (ends[first] - lengths[first])
    return Cut(start, stop, first, last), inside


def runs(lengths: Lengths, steps: Indices) -> tuple[Indices, Lengths]:
    """Group gathered steps into runs of adjacent steps from the same source sequence.

    Returns
    -------
    sequences
        Source sequence of each run, shape (r,).
    lengths
        Number of steps in each run, shape (r,).

    Examples
    --------
    >>> runs(np.array([2, 3, 1]), np.array([0, 3, 4, 1]))
    (array([0, 1, 0]), array([1, 2, 1]))
    """
    owner = lengths.cumsum().searchsorted(steps, "right")
    begins = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1]))) if len(owner) else owner
    return owner[begins], np.diff(np.append(begins, len(owner)))


def steps_of(lengths: Lengths, sequences: Indices, starts: Indices) -> Indices:
    """Return the rows of the selected sequences, concatenated.

    sequences: indices of the selected sequences.
    starts: first row of every sequence.

    >>> lengths = np.array([2, 3, 1])
    >>> steps_of(lengths, np.array([1, 0]), lengths.cumsum() - lengths)
    array([2, 3, 4, 0, 1])
    """
    selected = lengths[sequences]
    shift = starts[sequences] - (selected.cumsum() - selected)
    return np.arange(selected.sum()) + np.repeat(shift, selected)


def chop(starts: npt.NDArray[np.intp], count: int, max_seq_len: int) -> Lengths:
    """Cut runs of steps into sequences of at most `max_seq_len` steps; return the sequences' lengths, shape (s,).

    starts: the first step of each run, ascending from 0.
    count: total number of steps in all runs.
    max_seq_len: maximum number of steps per sequence.

    >>> chop(np.array([0, 5]), 7, 3)
    array([3, 2, 2])
    """
    runs = np.diff(starts, append=count)
    pieces = -(-runs // max_seq_len)
    lengths = np.full(int(pieces.sum()), max_seq_len, np.int64)
    lengths[pieces.cumsum() - 1] = runs - (pieces - 1) * max_seq_len
    return lengths


def padded_rows(lengths: Lengths, max_seq_len: int) -> Indices:
    """Return the row of each step after padding every sequence to `max_seq_len` rows.

    >>> padded_rows(np.array([1, 2]), 4)
    array([0, 4, 5])
    """
    shift = np.arange(len(lengths)) * max_seq_len - (lengths.cumsum() - lengths)
    return np.arange(lengths.sum()) + np.repeat(shift, lengths)


def check_fit(lengths: Lengths, max_seq_len: int) -> None:
    """Raise SequenceError if a sequence is longer than the padded length, because padding would lose steps."""
    if len(lengths) and lengths.max() > max_seq_len:
        raise SequenceError(
            f"max_seq_len must be at least the longest sequence, {lengths.max()} steps, got {max_seq_len}; "
            "cut the sequences first"
        )


def pack(lengths: Lengths, size: int) -> Iterator[slice]:
    """Yield slices of consecutive sequences: as many sequences per slice as fit in `size` steps, but at least one."""
    ends = lengths.cumsum()
    first = 0
    while first < len(ends):
        before = ends[first] - lengths[first]
        last = max(first + 1, int(ends.searchsorted(before + size, "right")))
        yield slice(first, last)
        first = last


def as_lengths(values: Any) -> Any:
    """Convert sequence lengths to shape (s,); return None if there are no lengths.

    Lists become int32 arrays, as recurrent models expect; arrays and tensors of other shapes are viewed with shape
    (s,). Raises SequenceError if the lengths are not integers, or are a single integer.
    """
    if values is None:
        return None
    if isinstance(values, (list, tuple)):
        array = np.array(values or [0])
        if array.dtype.kind not in "iu":
            raise SequenceError(f"column {names.SEQ_LENS!r} must contain integers, got {array.dtype}")
        values = array[: len(values)].astype(np.int32)
    if not getattr(values, "ndim", isinstance(values, Column)):
        raise SequenceError(
            f"column {names.SEQ_LENS!r} must be a list of lengths, got a single {type(values).__name__}"
        )
    if getattr(values, "ndim", 1) > 1:
        values = values.reshape(-1)
    return values if len(values) else None


def set_lengths(data: dict[Any, Any]) -> None:
    """Convert the column `seq_lens` of a new batch; remove the column if it contains no lengths."""
    data[names.SEQ_LENS] = as_lengths(data[names.SEQ_LENS])
    if data[names.SEQ_LENS] is None:
        del data[names.SEQ_LENS]


def slice_column(window: Window, name: str, flags: Flags) -> Column:
    """Slice a column of a view from the source batch."""
    source, start, stop, first, last = window
    if is_per_sequence(source, name, flags):
        return source[name].slice(first, last)
    return source[name].slice(start, stop)


def is_per_sequence(columns: Mapping[str, Column], name: str, flags: Flags) -> bool:
    """Return whether a column has one row per sequence; states may have one row per step instead."""
    if names.SEQ_LENS not in columns:
        return False
    if flags.declares(name):
        return True
    return names.is_per_sequence(name) and len(columns[name]) == len(columns[names.SEQ_LENS])


def lengths_of(seq_lens: Column) -> Lengths:
    """Return sequence lengths from any device, shape (s,); raises SequenceError if the lengths are not integers."""
    values = seq_lens.values.cpu().numpy() if isinstance(seq_lens, TorchColumn) else seq_lens.to_numpy()
    if values.dtype.kind not in "iu":
        raise SequenceError(f"column {names.SEQ_LENS!r} must contain integers, got {values.dtype}")
    return values.astype(np.int64)


def like(seq_lens: Column, lengths: Lengths) -> Column:
    """Create a column of sequence lengths with the dtype and device of `seq_lens`."""
    if isinstance(seq_lens, TorchColumn):
        tensor = seq_lens.values.new_tensor(lengths.tolist())
        return TorchColumn(tensor)
    return TensorColumn(lengths.astype(seq_lens.dtype))


# -- sequences of a batch ----------------------------------------------------------------------------------------------


def count_steps(batch: SampleBatch[Any]) -> None:
    """Count the steps, set `max_seq_len`, and validate the length of every column."""
    lengths = batch._lengths()
    if len(lengths) and lengths.min() < 0:
        raise SequenceError(f"column {names.SEQ_LENS!r} must have no negative lengths, got {lengths.min()}")
    batch.count = int(lengths.sum())
    flags = batch._flags
    if flags.max_seq_len is None:
        # The length of padded columns implies the padding.
        steps = (
            len(column)
            for name, column in batch._columns.items()
            if not (names.is_per_sequence(name) or flags.declares(name))
        )
        width = next(steps, 0) // max(len(lengths), 1) if flags.zero_padded else 0
        batch._flags = flags = replace(flags, max_seq_len=max(width, int(lengths.max(initial=0))))
    elif flags.zero_padded:
        check_fit(lengths, flags.max_seq_len)
    for name, column in batch._columns.items():
        check_column(batch, name, column, len(lengths))
    if not flags.time_major:
        return
    extents = {name: len(column) for name, column in batch._columns.items() if not batch._is_per_sequence(name)}
    if extents:
        counted, extent = next(iter(extents.items()))
        for name in extents:
            check_length(name, batch._columns[name], extent, f"as {counted!r} has")
        check_fit(lengths, extent)


def check_column(batch: SampleBatch[Any], name: str, column: Column, s: int) -> None:
    """Raise an error if a column does not have the number of rows that `s` sequences require."""
    if name == names.SEQ_LENS or (names.is_state_in(name) and len(column) == s):
        return
    flags = batch._flags
    if flags.declares(name):
        check_length(name, column, s, f"to match the sequences in {names.SEQ_LENS!r}")
        return
    if flags.time_major:
        if column.row_shape[:1] != (s,):
            raise SequenceError(
                f"column {name!r} must have shape (T, {s}, ...) in a time-major batch of {s} sequences, "
                f"got {(len(column), *column.row_shape)}"
            )
        return
    if names.is_state_in(name) and not flags.zero_padded:
        check_length(name, column, s, f"to match the sequences in {names.SEQ_LENS!r}")
    padding = f"({flags.max_seq_len} for each of {s} sequences) " if flags.zero_padded else ""
    check_length(name, column, stored_rows(batch, s), f"{padding}to match {names.SEQ_LENS!r}")


def stored_rows(batch: SampleBatch[Any], s: int) -> int:
    """Return the number of rows of a step column for `s` sequences, including padding."""
    return s * _width(batch) if batch._flags.zero_padded else batch.count


def _width(batch: SampleBatch[Any]) -> int:
    return int(batch._flags.max_seq_len or 0)


def flags_without(batch: SampleBatch[Any], remaining: Iterable[str]) -> Flags:
    """Reset the sequence flags in a copy of a batch's flags; raises SequenceError if a column requires `seq_lens`."""
    for name in remaining:
        if name != names.SEQ_LENS and batch._is_per_sequence(name):
            raise SequenceError(f"column {name!r} has one row per sequence; drop it together with {names.SEQ_LENS!r}")
    return replace(batch._flags, zero_padded=False, max_seq_len=None, per_sequence=())


def retain(flags: Flags, columns: Iterable[str]) -> Flags:
    """Return flags whose `per_sequence` names only the remaining columns."""
    if not flags.per_sequence:
        return flags
    columns = tuple(columns)
    declared = tuple(name for name in flags.per_sequence if any(names.covers((name,), column) for column in columns))
    return replace(flags, per_sequence=declared)


def _view(batch: B, part: Cut, lengths: Lengths, rows: tuple[int, int]) -> B:
    """View a range of sequences stored in the row range `rows`; `lengths` are the numbers of steps per sequence."""
    source = batch._all()
    batch._lent = True
    flags = batch._flags
    if not flags.zero_padded:
        flags = replace(flags, max_seq_len=int(lengths.max(initial=0)))
    new = batch._with({}, flags)
    new.count = part.stop - part.start
    new._has_sequences = True
    new._window = (source, *rows, part.first, part.last)
    seq_lens = source[names.SEQ_LENS].slice(part.first, part.last)
    unchanged = np.array_equal(lengths_of(seq_lens), lengths)
    new._columns[names.SEQ_LENS] = seq_lens if unchanged else like(seq_lens, lengths)
    return new


def view_whole(batch: B, start: int, stop: int) -> B:
    """View the steps from `start` to `stop`, with both bounds moved back to the start of a sequence."""
    refuse_time_major(batch, "slicing")
    lengths = batch._lengths()
    part = snap(lengths, start, stop)
    width = _width(batch) if batch._flags.zero_padded else None
    rows = (part.start, part.stop) if width is None else (part.first * width, part.last * width)
    return _view(batch, part, lengths[part.first : part.last], rows)


def view_exact(batch: B, start: int, stop: int, first: int | None = None, last: int | None = None) -> B:
    """View the steps from `start` to `stop` without padding.

    `first` and `last` are the range of the steps' sequences, `last` excluded; None if the range is unknown.
    """
    refuse_time_major(batch, "slicing")
    batch = unpadded(batch)
    part, lengths = cut(batch._lengths(), start, stop)
    if first is not None or last is not None:
        if first is None or last is None:
            raise SequenceError("state_start and state_end must be passed together, got only one")
        part, lengths = part._replace(first=first, last=last), batch._lengths()[first:last]
        missing = (stop - start) - int(lengths.sum())
        if missing > 0 or -missing > (lengths[-1] if len(lengths) else 0):
            raise SequenceError(
                f"sequences {first} to {last} have {lengths.sum()} steps, which do not fit the "
                f"{stop - start} steps of the range"
            )
        if missing:
            lengths[-1] += missing
    return _view(batch, part, lengths, (start, stop))


def pad_left(batch: B, padding: int) -> B:
    """Copy a batch, with `padding` rows of zeros (None for objects) before the first row."""
    length = padding + batch.count
    positions = np.arange(padding, length)
    if not batch._has_sequences:
        new = batch._with({name: column.spread(length, positions) for name, column in batch._all().items()})
        new.count = length
        return new
    lengths = batch._lengths()
    if not len(lengths):
        lengths = np.zeros(1, np.int64)
    lengths[0] += padding
    columns = {}
    for name, column in batch._all().items():
        if not batch._is_per_sequence(name):
            columns[name] = column.spread(length, positions)
        else:
            columns[name] = column if len(column) else column.spread(1, np.empty(0, np.intp))
    columns[names.SEQ_LENS] = like(columns[names.SEQ_LENS], lengths)
    new = batch._with(columns, replace(batch._flags, max_seq_len=None))
    new._count_rows()
    return new


def gather_steps(batch: B, steps: Indices) -> B:
    """Gather steps; adjacent gathered steps of one sequence form a new sequence with the source sequence's state."""
    refuse_time_major(batch, "gathering steps")
    batch = unpadded(batch)
    owners, lengths = runs(batch._lengths(), steps)
    return _gather(batch, owners, lengths, steps, replace(batch._flags, max_seq_len=None))


def gather_whole(batch: B, indices: Any) -> B:
    """Gather entire sequences with unchanged padding."""
    _require(batch, "take_sequences")
    refuse_time_major(batch, "gathering sequences")
    lengths = batch._lengths()
    chosen = as_indices(indices, len(lengths))
    padded = batch._flags.zero_padded
    stored = np.full_like(lengths, _width(batch)) if padded else lengths
    rows = steps_of(stored, chosen, stored.cumsum() - stored)
    return _gather(
        batch, chosen, lengths[chosen], rows, batch._flags if padded else replace(batch._flags, max_seq_len=None)
    )


def _gather(batch: B, owners: Indices, lengths: Lengths, rows: Indices, flags: Flags) -> B:
    """Gather stored rows into sequences of `lengths` steps; `owners` are the source sequences of the states."""
    columns = {}
    for name, column in batch._all().items():
        columns[name] = column.take(owners if batch._is_per_sequence(name) else rows)
    columns[names.SEQ_LENS] = like(columns[names.SEQ_LENS], lengths)
    new = batch._with(columns, flags)
    new._count_rows()
    return new


def draw_moves(batch: SampleBatch[Any], rng: np.random.Generator) -> list[Move]:
    """Draw a random order of padded sequences; return, for each column, the order in which to gather its rows."""
    if not batch._flags.zero_padded:
        raise SequenceError(
            "sequences must be padded to be shuffled in place, got unpadded ones; call right_zero_pad() or "
            "take_sequences()"
        )
    refuse_time_major(batch, "gathering sequences")
    order = rng.permutation(len(batch._lengths()))
    width = np.full_like(order, _width(batch))
    rows = steps_of(width, order, width.cumsum() - width)
    columns = batch._own()
    return [(columns, name, order if batch._is_per_sequence(name) else rows) for name in columns]


def each_packed(batch: B, size: int, rng: np.random.Generator | None) -> Iterator[B]:
    """Yield every sequence once, in parts of as many sequences as fit in `size` steps; `rng` None keeps the order."""
    lengths = batch._lengths()
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    for part in pack(lengths[order], size):
        yield gather_whole(batch, order[part])


def rowwise(batch: SampleBatch[Any]) -> dict[str, Column]:
    """Return columns with one row per step: states are repeated, `seq_lens` is 1, padding is removed."""
    refuse_time_major(batch, "reading rows")
    batch = unpadded(batch)
    lengths = batch._lengths()
    owners = np.repeat(np.arange(len(lengths)), lengths)
    columns = {
        name: column.take(owners) if batch._is_per_sequence(name) else column for name, column in batch._all().items()
    }
    columns[names.SEQ_LENS] = TensorColumn(np.ones(batch.count, np.int32))
    return columns


def mask(batch: SampleBatch[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of a padded batch's rows: True for steps, False for padding."""
    return (np.arange(_width(batch)) < batch._lengths()[:, None]).reshape(-1)


def pad(batch: SampleBatch[Any], max_seq_len: int, *, exclude_states: bool) -> None:
    """Implement `SampleBatch.right_zero_pad`."""
    _require(batch, "right_zero_pad")
    refuse_time_major(batch, "padding")
    lengths = batch._lengths()
    check_fit(lengths, whole("max_seq_len", max_seq_len))
    source = unpadded(batch)
    rows, length = padded_rows(lengths, max_seq_len), len(lengths) * max_seq_len
    columns = {}
    for name, column in source._all().items():
        if name == names.SEQ_LENS or source._flags.declares(name) or (exclude_states and source._is_per_sequence(name)):
            columns[name] = column
        elif source._is_per_sequence(name):
            columns[name] = column.spread(length, np.arange(len(lengths)) * max_seq_len)
        else:
            columns[name] = column.spread(length, rows)
    batch._columns, batch._window, batch._lent = columns, None, False
    batch._flags = replace(batch._flags, zero_padded=True, max_seq_len=max_seq_len)


def unpadded(batch: B) -> B:
    """Copy a padded batch without padding; other batches are returned unchanged."""
    if not batch._flags.zero_padded:
        return batch
    lengths = batch._lengths()
    width, numbers = _width(batch), np.arange(len(lengths))
    columns = batch._all()
    # The first row of each sequence contains its padded state.
    states = [name for name in filter(names.is_state_in, columns) if not batch._is_per_sequence(name)]
    source = batch._with({**columns, **{name: columns[name].take(numbers * width) for name in states}})
    flags = replace(batch._flags, zero_padded=False, max_seq_len=None)
    return _gather(source, numbers, lengths, padded_rows(lengths, width), flags)


def to_batch_major(batch: B) -> B:
    """Implement `SampleBatch.to_batch_major`."""
    _require(batch, "to_batch_major")
    if not batch._flags.time_major:
        raise SequenceError("to_batch_major requires a time-major batch, got a batch-major one")
    columns = {}
    width = 0
    for name, column in batch._all().items():
        if batch._is_per_sequence(name):
            columns[name] = column
            continue
        values = column.values.swapaxes(0, 1)
        width = values.shape[1]
        values = values.reshape(-1, *values.shape[2:])
        # NumPy represents bytes as objects: restore the text column.
        text = TextColumn.from_objects(values) if column.kind == "text" and values.dtype.kind == "O" else None
        columns[name] = as_column(values, name) if text is None else text
    flags = replace(batch._flags, time_major=False, zero_padded=True, max_seq_len=width)
    return batch._of(columns, batch._nested, flags)


def _require(batch: SampleBatch[Any], method: str) -> None:
    if not batch._has_sequences:
        raise SequenceError(f"{method} requires a column {names.SEQ_LENS!r}, got a batch without it")


def refuse_time_major(batch: SampleBatch[Any], operation: str) -> None:
    """Raise SequenceError for an operation on steps if the batch is time-major."""
    if batch._has_sequences and batch._flags.time_major:
        raise SequenceError(
            f"{operation} requires one row per step, got a time-major batch; call to_batch_major() first"
        )


def cut_streams(batch: B, max_seq_len: int) -> B:
    """Split a batch without sequences into sequences of at most `max_seq_len` steps; columns are shared."""
    whole("max_seq_len", max_seq_len, 1)
    if batch._has_sequences:
        raise SequenceError("to_sequences requires a batch without sequences, got one with them")
    if not batch.count:
        return batch.copy(shallow=True)
    return divide(batch, chop(stream_starts(batch), batch.count, max_seq_len))


def divide(batch: B, lengths: Lengths) -> B:
    """Divide steps into sequences.

    States and declared columns keep each sequence's first row; other columns are shared.
    """
    firsts = lengths.cumsum() - lengths
    columns = {
        name: column.take(firsts) if names.is_state_in(name) or batch._flags.declares(name) else column
        for name, column in batch._all().items()
    }
    columns[names.SEQ_LENS] = TensorColumn(lengths.astype(np.int32))
    new = batch._with(columns, replace(batch._flags, max_seq_len=None))
    new._count_rows()
    return new

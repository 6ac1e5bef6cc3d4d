"""Sequences: the column `seq_lens`, and the rows and sequences that a cut, a gather or a padding touches.

No other column moves here.

A batch with `seq_lens` = [l0, l1, ...] holds its sequences back to back, or, when padded, each in `max_seq_len` rows.
Steps are counted without padding: step s of the batch is step s of the sequences laid end to end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.column.interface import Column, Indices
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import SequenceError

Lengths = npt.NDArray[np.int64]


class Cut(NamedTuple):
    """A range of steps and the range of sequences that they lie in."""

    start: int
    stop: int
    first: int
    last: int


def snap(lengths: Lengths, start: int, stop: int) -> Cut:
    """Move both ends of a range of steps back to the starts of their sequences.

    Ranges that follow on each other stay so, hence neither lose nor repeat a step.

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
    """Cut a range of steps exactly, inside sequences if it must be.

    Sequences without steps belong to the range that ends where they stand.

    Returns
    -------
    cut
        The range and the sequences that it touches.
    lengths
        Steps of each of them in the range, shape (last - first,).

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
    """Group gathered steps into runs out of one sequence each.

    Returns
    -------
    sequences
        The sequence that each run comes from, shape (r,).
    lengths
        Steps of each run, shape (r,).

    >>> runs(np.array([2, 3, 1]), np.array([0, 3, 4, 1]))
    (array([0, 1, 0]), array([1, 2, 1]))
    """
    owner = lengths.cumsum().searchsorted(steps, "right")
    begins = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1]))) if len(owner) else owner
    return owner[begins], np.diff(np.append(begins, len(owner)))


def steps_of(lengths: Lengths, sequences: Indices, starts: Indices) -> Indices:
    """List the rows of some sequences, one sequence after the other.

    Parameters
    ----------
    lengths
        Steps of every sequence.
    sequences
        The wanted sequences, in the wanted order.
    starts
        Row at which each sequence of the batch begins.

    >>> lengths = np.array([2, 3, 1])
    >>> steps_of(lengths, np.array([1, 0]), lengths.cumsum() - lengths)
    array([2, 3, 4, 0, 1])
    """
    wanted = lengths[sequences]
    shift = starts[sequences] - (wanted.cumsum() - wanted)
    return np.arange(wanted.sum()) + np.repeat(shift, wanted)


def chop(starts: npt.NDArray[np.intp], count: int, max_seq_len: int) -> Lengths:
    """Cut runs of steps into sequences of at most `max_seq_len`, and return the lengths of these, shape (s,).

    Parameters
    ----------
    starts
        The first step of each run, ascending from 0.
    count
        Steps of all runs.
    max_seq_len
        Steps in a sequence at the most.

    Examples
    --------
    >>> chop(np.array([0, 5]), 7, 3)
    array([3, 2, 2])
    """
    runs = np.diff(starts, append=count)
    pieces = -(-runs // max_seq_len)
    lengths = np.full(int(pieces.sum()), max_seq_len, np.int64)
    lengths[pieces.cumsum() - 1] = runs - (pieces - 1) * max_seq_len
    return lengths


def padded_rows(lengths: Lengths, max_seq_len: int) -> Indices:
    """List the rows at which the steps of sequences lie once each occupies `max_seq_len` rows.

    >>> padded_rows(np.array([1, 2]), 4)
    array([0, 4, 5])
    """
    shift = np.arange(len(lengths)) * max_seq_len - (lengths.cumsum() - lengths)
    return np.arange(lengths.sum()) + np.repeat(shift, lengths)


def check_fit(lengths: Lengths, max_seq_len: int) -> None:
    """Check that no sequence is longer than the rows that it is to occupy.

    Raises
    ------
    SequenceError
        If one is: padding would lose steps.
    """
    if len(lengths) and lengths.max() > max_seq_len:
        raise SequenceError(
            f"max_seq_len must be at least the longest sequence, {lengths.max()} steps, got {max_seq_len}; "
            "cut the sequences first"
        )


def pack(lengths: Lengths, size: int) -> Iterator[slice]:
    """Yield slices of consecutive sequences, as many as fit in `size` steps, but at least one."""
    ends = lengths.cumsum()
    first = 0
    while first < len(ends):
        before = ends[first] - lengths[first]
        last = max(first + 1, int(ends.searchsorted(before + size, "right")))
        yield slice(first, last)
        first = last


def as_lengths(values: Any) -> Any:
    """Bring sequence lengths into shape (s,), or return None where there are none.

    Lists become int32, as recurrent models expect them; arrays and tensors of another shape are viewed flat.

    Raises
    ------
    SequenceError
        If they are not integers, or a single one.
    """
    if values is None:
        return None
    if isinstance(values, (list, tuple)):
        array = np.array(values or [0])
        if array.dtype.kind not in "iu":
            raise SequenceError(f"column {names.SEQ_LENS!r} must hold integers, got {array.dtype}")
        values = array[: len(values)].astype(np.int32)
    if not getattr(values, "ndim", isinstance(values, Column)):
        raise SequenceError(
            f"column {names.SEQ_LENS!r} must be a list of lengths, got a single {type(values).__name__}"
        )
    if getattr(values, "ndim", 1) > 1:
        values = values.reshape(-1)
    return values if len(values) else None


def lengths_of(seq_lens: Column) -> Lengths:
    """Read sequence lengths, shape (s,), from any device.

    Raises
    ------
    SequenceError
        If they are not integers.
    """
    values = seq_lens.values.cpu().numpy() if isinstance(seq_lens, TorchColumn) else seq_lens.to_numpy()
    if values.dtype.kind not in "iu":
        raise SequenceError(f"column {names.SEQ_LENS!r} must hold integers, got {values.dtype}")
    return values.astype(np.int64)


def like(seq_lens: Column, lengths: Lengths) -> Column:
    """Make a column of new sequence lengths in the dtype and on the device of the old one."""
    if isinstance(seq_lens, TorchColumn):
        tensor = seq_lens.values.new_tensor(lengths.tolist())
        return TorchColumn(tensor)
    return TensorColumn(lengths.astype(seq_lens.dtype))

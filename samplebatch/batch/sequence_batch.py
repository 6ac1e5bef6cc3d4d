"""SequenceBatch: rows that form sequences, for recurrent models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch import sequences
from samplebatch.batch.column_map import check_length
from samplebatch.batch.flags import Flags
from samplebatch.batch.row_batch import RowBatch, as_indices
from samplebatch.batch.tree import Structure
from samplebatch.column.interface import Column, Indices
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import SequenceError


class SequenceBatch(RowBatch):
    """Rows that form sequences: the part of `SampleBatch` that sees to the column `seq_lens`, of shape (s,).

    With it, `state_in_*` has one row per sequence, all others have one row per step, or `max_seq_len` rows per sequence
    when padded, or shape (T, s, ...) when time-major. Steps are counted without padding everywhere. Without that column
    the batch is a plain `RowBatch`.
    """

    # -- counting ------------------------------------------------------------------------------------------------------

    def _with(self, columns: dict[str, Column], flags: Flags | None = None) -> Self:
        new = super()._with(columns, flags)
        if names.SEQ_LENS in columns:
            new._has_sequences = True
        return new

    def _count_rows(self) -> None:
        self._has_sequences = names.SEQ_LENS in self._columns
        if not self._has_sequences:
            super()._count_rows()
            return
        lengths = self._lengths()
        if len(lengths) and lengths.min() < 0:
            raise SequenceError(f"column {names.SEQ_LENS!r} must have no negative lengths")
        self.count = int(lengths.sum())
        flags = self._flags
        if flags.max_seq_len is None:
            # Columns that came padded tell how far.
            steps = (len(column) for name, column in self._columns.items() if not names.is_per_sequence(name))
            width = next(steps, 0) // max(len(lengths), 1) if flags.zero_padded else 0
            self._flags = flags = replace(flags, max_seq_len=max(width, int(lengths.max(initial=0))))
        elif flags.zero_padded:
            sequences.check_fit(lengths, flags.max_seq_len)
        for name, column in self._columns.items():
            self._check_sequence_column(name, column, len(lengths))
        if flags.time_major:
            self._check_time(lengths)

    def _check_time(self, lengths: sequences.Lengths) -> None:
        """Check that all columns of a time-major batch have one length in time, and that the sequences fit in it."""
        steps = {name: len(column) for name, column in self._columns.items() if not self._is_per_sequence(name)}
        if steps:
            counted, extent = next(iter(steps.items()))
            for name in steps:
                check_length(name, self._columns[name], extent, f"as {counted!r} has")
            sequences.check_fit(lengths, extent)

    def _check_sequence_column(self, name: str, column: Column, s: int) -> None:
        if name == names.SEQ_LENS or (names.is_state_in(name) and len(column) == s):
            return
        if self._flags.time_major:
            if column.row_shape[:1] != (s,):
                raise SequenceError(
                    f"column {name!r} must have shape (T, {s}, ...) in a time-major batch of {s} sequences, "
                    f"got {(len(column), *column.row_shape)}"
                )
            return
        if names.is_state_in(name) and not self._flags.zero_padded:
            check_length(name, column, s, f"for as many sequences as {names.SEQ_LENS!r} has")
        padding = f"({self._flags.max_seq_len} for each of {s} sequences) " if self._flags.zero_padded else ""
        check_length(name, column, self._stored_rows(s), f"{padding}as {names.SEQ_LENS!r} says")

    def _stored_rows(self, s: int) -> int:
        """Return the rows of a column of steps, padding counted, where there are s sequences."""
        return s * (self._flags.max_seq_len or 0) if self._flags.zero_padded else self.count

    def _lengths(self) -> sequences.Lengths:
        """Return the steps of every sequence, shape (s,)."""
        return sequences.lengths_of(self.column(names.SEQ_LENS))

    def _is_per_sequence(self, name: str) -> bool:
        """Tell whether a column has one row per sequence rather than one per step."""
        if not self._has_sequences or not names.is_per_sequence(name):
            return False
        return len(self.column(name)) == len(self.column(names.SEQ_LENS))

    def _set_flags(self, flags: Flags) -> None:
        """Adopt flags that say how rows lie, after checking that the columns lie so."""
        trial = self._with(self._all(), flags)
        trial._count_rows()
        self._flags = trial._flags

    # -- changing the columns ------------------------------------------------------------------------------------------

    def _build(self, name: str, values: Any) -> tuple[Structure, dict[str, Column]]:
        return super()._build(name, sequences.as_lengths(values) if name == names.SEQ_LENS else values)

    def _adopt(self, name: str, structure: Structure, columns: dict[str, Column]) -> None:
        super()._adopt(name, structure, columns)
        if name == names.SEQ_LENS and not self._flags.zero_padded:
            self._flags = replace(self._flags, max_seq_len=None)

    def _check_assignment(self, columns: dict[str, Column], others: dict[str, Column]) -> None:
        if not self._has_sequences and names.SEQ_LENS not in columns:
            super()._check_assignment(columns, others)
            return
        if names.SEQ_LENS in others:
            for path, column in columns.items():
                self._check_sequence_column(path, column, len(others[names.SEQ_LENS]))
        self._with({**others, **columns})._count_rows()

    def __delitem__(self, name: str) -> None:
        if name == names.SEQ_LENS and self._has_sequences:
            self._forget_sequences(self.column_names)
        super().__delitem__(name)

    def clear(self) -> None:
        """Take all columns out of the batch."""
        self._flags = replace(self._flags, zero_padded=False, max_seq_len=None)
        super().clear()

    def _part(self, columns: dict[str, Column]) -> Self:
        if names.SEQ_LENS in columns or not self._has_sequences:
            return super()._part(columns)
        plain = self._with(self._all())
        plain._forget_sequences(columns)
        return super(SequenceBatch, plain)._part(columns)

    def _forget_sequences(self, columns: Iterable[str]) -> None:
        """Drop the flags that go with `seq_lens`, after checking that none of the columns needs it."""
        for name in columns:
            if name != names.SEQ_LENS and self._is_per_sequence(name):
                raise SequenceError(
                    f"column {name!r} has a row for each sequence; drop it together with {names.SEQ_LENS!r}"
                )
        self._flags = replace(self._flags, zero_padded=False, max_seq_len=None)

    # -- views and copies ----------------------------------------------------------------------------------------------

    def _view_sequences(self, cut: sequences.Cut, lengths: sequences.Lengths, rows: tuple[int, int]) -> Self:
        """View some sequences, of which stored rows `rows` are in view, with the given steps in each."""
        source = self._all()
        self._lent = True
        flags = self._flags
        if not flags.zero_padded:
            flags = replace(flags, max_seq_len=int(lengths.max(initial=0)))
        new = self._with({}, flags)
        new.count = cut.stop - cut.start
        new._has_sequences = True
        new._window = (source, *rows, cut.first, cut.last)
        kept = source[names.SEQ_LENS].slice(cut.first, cut.last)
        unchanged = np.array_equal(sequences.lengths_of(kept), lengths)
        new._columns[names.SEQ_LENS] = kept if unchanged else sequences.like(kept, lengths)
        return new

    def _range(self, start: int, stop: int) -> Self:
        return self._snap(start, stop) if self._has_sequences else self._view(start, stop)

    def _snap(self, start: int, stop: int) -> Self:
        self._refuse_time_major("slicing")
        lengths = self._lengths()
        cut = sequences.snap(lengths, start, stop)
        width = self._flags.max_seq_len if self._flags.zero_padded else None
        rows = (cut.start, cut.stop) if width is None else (cut.first * width, cut.last * width)
        return self._view_sequences(cut, lengths[cut.first : cut.last], rows)

    def slice(self, start: int, end: int, state_start: int | None = None, state_end: int | None = None) -> Self:
        """View the steps from `start` to `end`, exactly, even inside sequences.

        A negative start pads that many zero rows (None for objects) on the left, which takes a copy. Where there are
        sequences, `seq_lens` and the states are mended: the first and last sequences may be cut short, each keeps its
        state, and padding is taken out.

        Parameters
        ----------
        start, end
            Range of steps. `end` counts from the end if negative, and is cut to the length if beyond.
        state_start, state_end
            Range of sequences that the steps come from, if known; by default it follows from `seq_lens`.

        Raises
        ------
        SequenceError
            If the given sequences have fewer steps than the range, or only one end of them is given.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> batch = SampleBatch(a=[1, 2, 3, 4, 5, 6], seq_lens=[2, 3, 1])
        >>> part = batch.slice(1, 4)
        >>> part["a"].tolist(), part["seq_lens"].tolist()
        ([2, 3, 4], [1, 2])
        >>> batch.slice(-2, 1)["a"].tolist()
        [0, 0, 1]
        """
        padding = max(0, -start)
        begin, stop, _ = slice(max(0, start), end).indices(self.count)
        stop = max(begin, stop)
        part = self._cut(begin, stop, state_start, state_end) if self._has_sequences else self._view(begin, stop)
        return part._pad_left(padding) if padding else part

    def _cut(self, start: int, stop: int, state_start: int | None, state_end: int | None) -> Self:
        self._refuse_time_major("slicing")
        if self._flags.zero_padded:
            return self._unpad()._cut(start, stop, state_start, state_end)
        cut, lengths = sequences.cut(self._lengths(), start, stop)
        if state_start is not None or state_end is not None:
            if state_start is None or state_end is None:
                raise SequenceError("state_start and state_end must be given together")
            cut, lengths = cut._replace(first=state_start, last=state_end), self._lengths()[state_start:state_end]
            missing = (stop - start) - int(lengths.sum())
            if missing > 0 or -missing > (lengths[-1] if len(lengths) else 0):
                raise SequenceError(
                    f"sequences {state_start} to {state_end} have {lengths.sum()} steps, which do not fit the "
                    f"{stop - start} steps of the range"
                )
            if missing:
                lengths[-1] += missing
        return self._view_sequences(cut, lengths, (start, stop))

    def _pad_left(self, padding: int) -> Self:
        if not self._has_sequences:
            return super()._pad_left(padding)
        length = padding + self.count
        positions = np.arange(padding, length)
        lengths = self._lengths()
        if not len(lengths):
            lengths = np.zeros(1, np.int64)
        lengths[0] += padding
        columns = {}
        for name, column in self._all().items():
            if not self._is_per_sequence(name):
                columns[name] = column.spread(length, positions)
            else:
                columns[name] = column if len(column) else column.spread(1, np.empty(0, np.intp))
        columns[names.SEQ_LENS] = sequences.like(columns[names.SEQ_LENS], lengths)
        new = self._with(columns, replace(self._flags, max_seq_len=None))
        new._count_rows()
        return new

    def _gather(self, steps: Indices) -> Self:
        if not self._has_sequences:
            return super()._gather(steps)
        self._refuse_time_major("gathering steps")
        if self._flags.zero_padded:
            return self._unpad()._gather(steps)
        owners, lengths = sequences.runs(self._lengths(), steps)
        return self._gather_sequences(owners, lengths, steps, replace(self._flags, max_seq_len=None))

    def take_sequences(self, indices: Any) -> Self:
        """Gather whole sequences in the given order into a new batch, states included, padded as this one is.

        Parameters
        ----------
        indices
            Integers of shape (k,) in [-s, s) for s sequences, or a mask of shape (s,).

        Raises
        ------
        SequenceError
            If the batch has no `seq_lens`.
        RowIndexError
            If an index lies outside; names the first such one.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> batch = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 3.0], seq_lens=[1, 2])
        >>> swapped = batch.take_sequences([1, 0])
        >>> swapped["a"].tolist(), swapped["state_in_0"].tolist(), swapped["seq_lens"].tolist()
        ([2, 3, 1], [3.0, 1.0], [2, 1])
        """
        self._require_sequences("take_sequences")
        self._refuse_time_major("gathering sequences")
        lengths = self._lengths()
        chosen = as_indices(indices, len(lengths))
        stored = np.full_like(lengths, self._width()) if self._flags.zero_padded else lengths
        rows = sequences.steps_of(stored, chosen, stored.cumsum() - stored)
        flags = self._flags if self._flags.zero_padded else replace(self._flags, max_seq_len=None)
        return self._gather_sequences(chosen, lengths[chosen], rows, flags)

    def _gather_sequences(self, owners: Indices, lengths: sequences.Lengths, rows: Indices, flags: Flags) -> Self:
        """Gather stored rows that form sequences of the given lengths, with the states of their owners."""
        columns = {}
        for name, column in self._all().items():
            columns[name] = column.take(owners if self._is_per_sequence(name) else rows)
        columns[names.SEQ_LENS] = sequences.like(columns[names.SEQ_LENS], lengths)
        new = self._with(columns, flags)
        new._count_rows()
        return new

    def _shuffle(self, rng: np.random.Generator) -> Self:
        if not self._has_sequences:
            return super()._shuffle(rng)
        if not self._flags.zero_padded:
            raise SequenceError(
                "sequences must be padded to be shuffled in place; call right_zero_pad() or take_sequences()"
            )
        return self.take_sequences(rng.permutation(len(self._lengths())))

    def _epoch(self, size: int, rng: np.random.Generator | None) -> Iterator[Self]:
        if not self._has_sequences:
            yield from super()._epoch(size, rng)
            return
        lengths = self._lengths()
        order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
        for part in sequences.pack(lengths[order], size):
            yield self.take_sequences(order[part])

    def _rowwise(self) -> dict[str, Column]:
        if not self._has_sequences:
            return super()._rowwise()
        self._refuse_time_major("reading rows")
        batch = self._unpad() if self._flags.zero_padded else self
        owners = np.repeat(np.arange(len(batch._lengths())), batch._lengths())
        columns = {
            name: column.take(owners) if batch._is_per_sequence(name) else column
            for name, column in batch._all().items()
        }
        columns[names.SEQ_LENS] = TensorColumn(np.ones(batch.count, np.int32))
        return columns

    # -- padding and time ----------------------------------------------------------------------------------------------

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return which rows of the columns are steps rather than padding, shape (rows,).

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> SampleBatch(a=[1, 2, 3], seq_lens=[1, 2]).right_zero_pad(2).mask().tolist()
        [True, False, True, True]
        """
        if not (self._has_sequences and self._flags.zero_padded):
            return np.ones(self.count, np.bool_)
        return (np.arange(self._width()) < self._lengths()[:, None]).reshape(-1)

    def right_zero_pad(self, max_seq_len: int, exclude_states: bool = True) -> Self:
        """Give every sequence `max_seq_len` rows, in place: zeros (None for objects) after its last step.

        Sets `zero_padded` and `max_seq_len`. A padded batch is padded to the new length.

        Parameters
        ----------
        max_seq_len
            Rows per sequence, at least the longest one's steps.
        exclude_states
            Whether `state_in_*` columns stay as they are. If false, each sequence's state is followed by zeros as well.

        Returns
        -------
        SampleBatch
            This very batch.

        Raises
        ------
        ArgumentError
            If `max_seq_len` is no whole number from 0 on.
        SequenceError
            If the batch has no `seq_lens`, or a sequence has more steps than `max_seq_len`.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> batch = SampleBatch(a=[1, 2, 3], seq_lens=[1, 2])
        >>> batch.right_zero_pad(max_seq_len=4)["a"].tolist()
        [1, 0, 0, 0, 2, 3, 0, 0]
        """
        self._require_sequences("right_zero_pad")
        self._refuse_time_major("padding")
        lengths = self._lengths()
        sequences.check_fit(lengths, whole("max_seq_len", max_seq_len))
        source = self._unpad() if self._flags.zero_padded else self
        rows, length = sequences.padded_rows(lengths, max_seq_len), len(lengths) * max_seq_len
        columns = {}
        for name, column in source._all().items():
            if name == names.SEQ_LENS or (exclude_states and source._is_per_sequence(name)):
                columns[name] = column
            elif source._is_per_sequence(name):
                columns[name] = column.spread(length, np.arange(len(lengths)) * max_seq_len)
            else:
                columns[name] = column.spread(length, rows)
        self._columns, self._window, self._lent = columns, None, False
        self._flags = replace(self._flags, zero_padded=True, max_seq_len=max_seq_len)
        return self

    def _unpad(self) -> Self:
        """Copy a padded batch into one without padding."""
        lengths = self._lengths()
        width, numbers = self._width(), np.arange(len(lengths))
        columns = self._all()
        # States that were padded as well stand in the first row of each sequence.
        states = [name for name in filter(names.is_state_in, columns) if not self._is_per_sequence(name)]
        batch = self._with({**columns, **{name: columns[name].take(numbers * width) for name in states}})
        flags = replace(self._flags, zero_padded=False, max_seq_len=None)
        return batch._gather_sequences(numbers, lengths, sequences.padded_rows(lengths, width), flags)

    def _width(self) -> int:
        """Return the rows that each sequence of a padded batch occupies."""
        return int(self._flags.max_seq_len or 0)

    def to_batch_major(self) -> Self:
        """Copy a time-major batch of sequences, columns of shape (T, B, ...), into a padded one of shape (B * T, ...).

        Raises
        ------
        SequenceError
            If the batch is not time-major or has no sequences.
        """
        self._require_sequences("to_batch_major")
        if not self._flags.time_major:
            raise SequenceError("to_batch_major needs a time-major batch")
        columns = {}
        width = 0
        for name, column in self._all().items():
            if self._is_per_sequence(name):
                columns[name] = column
                continue
            values = column.values.swapaxes(0, 1)
            width = values.shape[1]
            columns[name] = self._build(name, values.reshape(-1, *values.shape[2:]))[1][name]
        flags = replace(self._flags, time_major=False, zero_padded=True, max_seq_len=width)
        return self._of(columns, self._nested, flags)

    def _require_sequences(self, method: str) -> None:
        if not self._has_sequences:
            raise SequenceError(f"{method} needs a column {names.SEQ_LENS!r}, and the batch has none")

    def _refuse_time_major(self, operation: str) -> None:
        if self._has_sequences and self._flags.time_major:
            self._raise_time_major(operation)

    def _raise_time_major(self, operation: str) -> NoReturn:
        raise SequenceError(
            f"{operation} needs rows of steps, and the batch is time-major; call to_batch_major() first"
        )

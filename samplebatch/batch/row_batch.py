"""RowBatch: columns of equal length, whose rows are cut, gathered and padded together, sequences and all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch import sequences
from samplebatch.batch.column_map import ColumnMap
from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.column import cores
from samplebatch.column.convert import is_plain
from samplebatch.column.interface import Column, Indices
from samplebatch.column.row_keys import resolve
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import ColumnLengthError, RowIndexError, SequenceError


class RowBatch(ColumnMap):
    """Columns of equal length, and what goes for their rows.

    With a column `seq_lens` of shape (s,) the rows form s sequences: `state_in_*` has one row per sequence, all others
    have one row per step, or `max_seq_len` rows per sequence when padded. Steps are counted without padding everywhere.
    """

    count: int
    """Steps in the batch; padding is not counted."""
    _flags: Flags = DEFAULT
    _has_sequences = False

    # -- counting -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.count

    def _count_rows(self) -> None:
        """Find the number of steps, and check that every column has the rows that go with it."""
        columns = self._columns
        if names.SEQ_LENS in columns:
            self._count_sequences()
            return
        self._has_sequences = False
        # len() of the arrays themselves: a column's own is a Python call each.
        lengths = [len(column.values) for column in columns.values()]
        self.count = lengths[0] if lengths else 0
        if lengths.count(self.count) != len(lengths):
            counted = _counted_column(columns)
            self.count = len(columns[counted])
            for name, column in columns.items():
                _check_length(name, column, self.count, f"as {counted!r} has")

    def _count_sequences(self) -> None:
        lengths = self._lengths()
        if len(lengths) and lengths.min() < 0:
            raise SequenceError(f"column {names.SEQ_LENS!r} must have no negative lengths")
        self.count = int(lengths.sum())
        self._has_sequences = True
        flags = self._flags
        if flags.max_seq_len is None:
            self._flags = flags = replace(flags, max_seq_len=int(lengths.max()) if len(lengths) else 0)
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
                _check_length(name, self._columns[name], extent, f"as {counted!r} has")
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
        padding = f": {self._flags.max_seq_len} for each of {s} sequences," if self._flags.zero_padded else ""
        _check_length(name, column, self._stored_rows(s), f"{padding} as {names.SEQ_LENS!r} says".lstrip())

    def _stored_rows(self, s: int) -> int:
        """Return the rows of a column of steps, padding counted, where there are s sequences."""
        return s * (self._flags.max_seq_len or 0) if self._flags.zero_padded else self.count

    def _lengths(self) -> sequences.Lengths:
        """Return the steps of every sequence, shape (s,)."""
        return lengths_of(self.column(names.SEQ_LENS))

    def _is_per_sequence(self, name: str) -> bool:
        """Tell whether a column has one row per sequence rather than one per step."""
        if not self._has_sequences or not names.is_per_sequence(name):
            return False
        return len(self.column(name)) == len(self.column(names.SEQ_LENS))

    # -- assignment ---------------------------------------------------------------------------------------------------

    def __setitem__(self, name: str, values: Any) -> None:
        if (
            is_plain(values)
            and name in self._columns
            and len(values) == self.count
            and self._window is None
            and not (self._lent or self._has_sequences)
        ):
            self._columns[name] = TensorColumn(values)
            return
        if name == names.SEQ_LENS:
            values = as_lengths(values)
        structure, columns = self._build(name, values)
        self._check_assignment(name, columns)
        self._adopt(name, structure, columns)
        if name == names.SEQ_LENS and not self._flags.zero_padded:
            self._flags = replace(self._flags, max_seq_len=None)
        self._count_rows()

    def _check_assignment(self, name: str, columns: dict[str, Column]) -> None:
        """Check that assigned columns fit the others, before anything is changed."""
        gone = set() if name not in self else set(self._leaves(name))
        others = {other: column for other, column in self._all().items() if other not in gone}
        if names.SEQ_LENS in others:
            for path, column in columns.items():
                self._check_sequence_column(path, column, len(others[names.SEQ_LENS]))
        if names.SEQ_LENS in columns or self._flags.time_major or not others:
            self._with({**others, **columns})._count_rows()
        elif not self._has_sequences:
            for path, column in columns.items():
                _check_length(path, column, self.count, f"as {_counted_column(others)!r} has")

    def __delitem__(self, name: str) -> None:
        if name == names.SEQ_LENS and name in self:
            self._check_without_sequences(self.column_names)
            self._flags = replace(self._flags, zero_padded=False, max_seq_len=None)
        super().__delitem__(name)
        self._count_rows()

    def _check_without_sequences(self, columns: Iterable[str]) -> None:
        """Check that none of the columns needs `seq_lens`, which is about to go."""
        for name in columns:
            if name != names.SEQ_LENS and self._is_per_sequence(name):
                raise SequenceError(
                    f"column {name!r} has a row for each sequence; drop it together with {names.SEQ_LENS!r}"
                )

    def clear(self) -> None:
        """Take all columns out of the batch."""
        self._columns, self._window, self._lent, self._nested = {}, None, False, {}
        self._flags = replace(self._flags, zero_padded=False, max_seq_len=None)
        self._count_rows()

    # -- views and copies ---------------------------------------------------------------------------------------------

    def _with(self, columns: dict[str, Column], flags: Flags | None = None) -> Self:
        """Make a batch of other columns with this one's structure and flags; the caller sees to `count`."""
        new = type(self).__new__(type(self))
        new._columns = columns
        new.count = self.count
        if self._nested:
            new._nested = self._nested
        flags = self._flags if flags is None else flags
        if flags is not DEFAULT:
            new._flags = flags
        if names.SEQ_LENS in columns:
            new._has_sequences = True
        return new

    def _view(self, start: int, stop: int) -> Self:
        """View steps `start` to `stop` of a batch without sequences, `0 <= start <= stop <= count`."""
        new = object.__new__(type(self))
        new._columns = {}
        new.count = stop - start
        if self._nested:
            new._nested = self._nested
        if self._flags is not DEFAULT:
            new._flags = self._flags
        window = self._window
        if window is None:
            self._lent = True
            new._window = (self._columns, start, stop, 0, 0)
        else:
            new._window = (window[0], window[1] + start, window[1] + stop, 0, 0)
        return new

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
        unchanged = np.array_equal(lengths_of(kept), lengths)
        new._columns[names.SEQ_LENS] = kept if unchanged else _mended(kept, lengths)
        return new

    def _each(self, job: Callable[[Column], Column], rows: int) -> dict[str, Column]:
        """Make a new column of `rows` rows of each column, on both cores where that pays."""
        columns = self._all()
        nbytes = sum([column.values.nbytes for column in columns.values() if type(column) is TensorColumn])
        if nbytes * rows < cores.WORTHWHILE * self.count:
            return {name: job(column) for name, column in columns.items()}
        sizes = {name: column.nbytes for name, column in columns.items() if type(column) is TensorColumn}
        return cores.each({name: partial(job, column) for name, column in columns.items()}, sizes)

    def _get_rows(self, key: Any) -> Self:
        if type(key) is slice and not self._has_sequences:
            start, stop, step = key.indices(self.count)
            if step == 1:
                return self._view(start, stop if stop > start else start)
        rows = resolve(key, self.count)
        if isinstance(rows, tuple):
            return self._snapped(*rows) if self._has_sequences else self._view(*rows)
        if isinstance(rows, int):
            raise RowIndexError(f"a batch hands out no single rows; for a batch of row {key} use take([{key}])")
        return self._gather(rows)

    def _snapped(self, start: int, stop: int) -> Self:
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
        return part._padded_left(padding) if padding else part

    def _cut(self, start: int, stop: int, state_start: int | None, state_end: int | None) -> Self:
        self._refuse_time_major("slicing")
        if self._flags.zero_padded:
            return self._unpadded()._cut(start, stop, state_start, state_end)
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

    def _padded_left(self, padding: int) -> Self:
        length = padding + self.count
        positions = np.arange(padding, length)
        if not self._has_sequences:
            new = self._with({name: column.spread(length, positions) for name, column in self._all().items()})
            new.count = length
            return new
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
        columns[names.SEQ_LENS] = _mended(columns[names.SEQ_LENS], lengths)
        new = self._with(columns, replace(self._flags, max_seq_len=None))
        new._count_rows()
        return new

    def take(self, indices: Any) -> Self:
        """Gather steps in the given order into a new batch, one copy per column.

        Columns of shape (n, ...) become (k, ...). Where there are sequences, steps that follow each other out of one
        sequence form a sequence of the result, with that one's state; padding is taken out.

        Parameters
        ----------
        indices
            Integers of shape (k,) in [-n, n), or a mask of shape (n,).

        Raises
        ------
        RowIndexError
            If an index lies outside; names the first such one.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> SampleBatch(rewards=[1.0, 2.0, 3.0]).take([2, 0])["rewards"].tolist()
        [3.0, 1.0]
        """
        return self._gather(_as_indices(indices, self.count))

    def _gather(self, steps: Indices) -> Self:
        if not self._has_sequences:
            new = self._with(self._each(methodcaller("take", steps), len(steps)))
            new.count = len(steps)
            return new
        self._refuse_time_major("gathering steps")
        if self._flags.zero_padded:
            return self._unpadded()._gather(steps)
        owners, lengths = sequences.runs(self._lengths(), steps)
        return self._gathered(owners, lengths, steps, replace(self._flags, max_seq_len=None))

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
        chosen = _as_indices(indices, len(lengths))
        stored = np.full_like(lengths, self._width()) if self._flags.zero_padded else lengths
        rows = sequences.steps_of(stored, chosen, stored.cumsum() - stored)
        flags = self._flags if self._flags.zero_padded else replace(self._flags, max_seq_len=None)
        return self._gathered(chosen, lengths[chosen], rows, flags)

    def _gathered(self, owners: Indices, lengths: sequences.Lengths, rows: Indices, flags: Flags) -> Self:
        """Gather stored rows that form sequences of the given lengths, with the states of their owners."""
        columns = {}
        for name, column in self._all().items():
            columns[name] = column.take(owners if self._is_per_sequence(name) else rows)
        columns[names.SEQ_LENS] = _mended(columns[names.SEQ_LENS], lengths)
        new = self._with(columns, flags)
        new._count_rows()
        return new

    # -- padding ------------------------------------------------------------------------------------------------------

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

        Sets `zero_padded` and `max_seq_len`. A batch that is padded already is padded anew.

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
        sequences.check_fit(lengths, max_seq_len)
        source = self._unpadded() if self._flags.zero_padded else self
        rows, length = sequences.padded_rows(lengths, max_seq_len), len(lengths) * max_seq_len
        columns = {}
        for name, column in source._all().items():
            if name == names.SEQ_LENS or (exclude_states and source._is_per_sequence(name)):
                columns[name] = column
            elif source._is_per_sequence(name):
                columns[name] = column.spread(length, np.arange(len(lengths)) * max_seq_len)
            elif exclude_states and names.is_state_in(name):
                raise SequenceError(f"column {name!r} has a row for each step; pad it too: exclude_states=False")
            else:
                columns[name] = column.spread(length, rows)
        self._columns, self._window, self._lent = columns, None, False
        self._flags = replace(self._flags, zero_padded=True, max_seq_len=max_seq_len)
        return self

    def _unpadded(self) -> Self:
        """Copy a padded batch into one whose sequences lie back to back."""
        lengths = self._lengths()
        rows = sequences.padded_rows(lengths, self._width())
        flags = replace(self._flags, zero_padded=False, max_seq_len=None)
        return self._gathered(np.arange(len(lengths)), lengths, rows, flags)

    def _width(self) -> int:
        """Return the rows that each sequence of a padded batch occupies."""
        return int(self._flags.max_seq_len or 0)

    def _require_sequences(self, what: str) -> None:
        if not self._has_sequences:
            raise SequenceError(f"{what} needs a column {names.SEQ_LENS!r}, and the batch has none")

    def _refuse_time_major(self, what: str) -> None:
        if self._has_sequences and self._flags.time_major:
            self._raise_time_major(what)

    def _raise_time_major(self, what: str) -> NoReturn:
        raise SequenceError(f"{what} needs rows of steps, and the batch is time-major; call to_batch_major() first")


def _as_indices(key: Any, n: int) -> Indices:
    """Turn a mask or integers into row indices in [0, n)."""
    rows = resolve(key, n)
    if isinstance(rows, int):
        raise RowIndexError("rows are gathered by a list of integers or a mask, got a single integer")
    return np.arange(*rows) if isinstance(rows, tuple) else rows


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


def _counted_column(columns: dict[str, Column]) -> str:
    """Name the column that says how many steps there are: not infos or states, unless there is nothing else."""
    for name in columns:
        if name.partition(".")[0] != names.INFOS and not (names.is_state_in(name) or names.is_state_out(name)):
            return name
    return next(iter(columns))


def _check_length(name: str, column: Column, rows: int, why: str) -> None:
    if len(column) != rows:
        raise ColumnLengthError(f"column {name!r} must have {rows} rows {why}, got {len(column)}")


def lengths_of(seq_lens: Column) -> sequences.Lengths:
    """Read sequence lengths, shape (s,), wherever they lie.

    Raises
    ------
    SequenceError
        If they are not integers.
    """
    values = seq_lens.values.cpu().numpy() if isinstance(seq_lens, TorchColumn) else seq_lens.to_numpy()
    if values.dtype.kind not in "iu":
        raise SequenceError(f"column {names.SEQ_LENS!r} must hold integers, got {values.dtype}")
    return values.astype(np.int64)


def _mended(seq_lens: Column, lengths: sequences.Lengths) -> Column:
    """Make a column of new sequence lengths that is like the old one: of its dtype, and on its device."""
    if isinstance(seq_lens, TorchColumn):
        tensor = seq_lens.values.new_tensor(lengths.tolist())
        return TorchColumn(tensor)
    return TensorColumn(lengths.astype(seq_lens.dtype))

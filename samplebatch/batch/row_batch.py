"""RowBatch: columns of equal length, cut, gathered and reordered by rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self

import numpy as np

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch import bulk
from samplebatch.batch.column_map import ColumnMap, check_length, counted_column
from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.tree import Structure, unflatten
from samplebatch.column.convert import is_plain
from samplebatch.column.interface import Column, Indices
from samplebatch.column.row_keys import resolve
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ArgumentError, RowIndexError


class RowBatch(ColumnMap):
    """Columns of equal length, a row a step: the part of `SampleBatch` that sees to rows."""

    count: int
    """Steps in the batch; padding is not counted."""
    _has_sequences = False
    """Whether the steps form sequences; then `SequenceBatch` cuts and gathers them."""

    @classmethod
    def _of_steps(cls, columns: dict[str, Column], nested: Mapping[str, Structure], count: int) -> Self:
        """Make a batch of built columns that are known to have a row for each of `count` steps, and no sequences."""
        new = cls.__new__(cls)
        new._columns, new.count = columns, count
        if nested:
            new._nested = nested
        return new

    def _with(self, columns: dict[str, Column], flags: Flags | None = None) -> Self:
        """Make a batch of other columns with this one's structure and flags; the caller sets `count`."""
        new = type(self).__new__(type(self))
        new._columns = columns
        new.count = self.count
        if self._nested:
            new._nested = self._nested
        flags = self._flags if flags is None else flags
        if flags is not DEFAULT:
            new._flags = flags
        return new

    def __len__(self) -> int:
        return self.count

    def agent_steps(self) -> int:
        """Return the number of steps, as `MultiAgentBatch.agent_steps` does."""
        return self.count

    def env_steps(self) -> int:
        """Return the number of steps, as `MultiAgentBatch.env_steps` does."""
        return self.count

    def _count_rows(self) -> None:
        """Find the number of steps, none of infos and states alone, and check that every column has that many rows."""
        # len() of the arrays themselves: a column's own is a Python call each. Objects need not be made to be counted.
        columns = self._columns.values()
        lengths = [len(column.values) if type(column) is TensorColumn else len(column) for column in columns]
        self.count = lengths[0] if lengths else 0
        if lengths.count(self.count) != len(lengths):
            counted = counted_column(self._columns)
            self.count = len(self._columns[counted])
            for name, column in self._columns.items():
                check_length(name, column, self.count, f"as {counted!r} has")
        if (
            self.count
            and not names.counts_steps(next(iter(self._columns)))
            and not any(map(names.counts_steps, self._columns))
        ):
            self.count = 0

    # -- changing the columns ------------------------------------------------------------------------------------------

    def __setitem__(self, name: str, values: Any) -> None:
        if (
            is_plain(values)
            and name in self._columns
            and len(values) == self.count > 0
            and self._window is None
            and not (self._lent or self._has_sequences)
        ):
            self._columns[name] = TensorColumn(values)
            return
        structure, columns = self._build(name, values)
        gone = set(self._leaves(name)) if name in self else set()
        self._check_assignment(columns, {path: column for path, column in self._all().items() if path not in gone})
        self._adopt(name, structure, columns)
        self._count_rows()

    def update(self, other: Any = (), /, **columns: Any) -> None:
        """Put several columns, given as a mapping, as pairs or as keywords: all of them, or none if one is refused."""
        before = dict(self.__dict__)
        # So that no column is put into the dict of those before.
        self._lent = True
        try:
            super().update(other, **columns)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _check_assignment(self, columns: dict[str, Column], others: dict[str, Column]) -> None:
        """Check new columns against the remaining ones, before anything is changed."""
        if not others:
            self._with(columns)._count_rows()
            return
        for path, column in columns.items():
            counted = counted_column(others)
            check_length(path, column, len(others[counted]), f"as {counted!r} has")

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._count_rows()

    def clear(self) -> None:
        """Take all columns out of the batch."""
        self._columns, self._window, self._lent, self._nested = {}, None, False, {}
        self._count_rows()

    # -- views and copies ----------------------------------------------------------------------------------------------

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

    def _range(self, start: int, stop: int) -> Self:
        """View the steps of `batch[start:stop]`."""
        return self._view(start, stop)

    def _get_rows(self, key: Any) -> Self:
        if type(key) is slice:
            start, stop, step = key.indices(self.count)
            if step == 1:
                return self._range(start, stop if stop > start else start)
        rows = resolve(key, self.count)
        if isinstance(rows, int):
            raise RowIndexError(f"a batch hands out no single rows; for a batch of row {key} use take([{key}])")
        return self._gather(np.arange(*rows) if isinstance(rows, tuple) else rows)

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
        return self._gather(as_indices(indices, self.count))

    def _gather(self, steps: Indices) -> Self:
        columns = self._all()
        nbytes = bulk.nbytes_of(columns.values(), len(steps), self.count)
        if nbytes <= bulk.BLOCK_NBYTES:
            new = self._with(bulk.gather_small(columns, steps, nbytes))
        elif bulk.is_large(nbytes):
            new = self._with(bulk.gather_large(columns, steps))
        else:
            new = self._with({name: column.take(steps) for name, column in columns.items()})
        new.count = len(steps)
        return new

    def copy(self, shallow: bool = False) -> Self:
        """Copy the batch.

        Parameters
        ----------
        shallow
            Whether the copy shares the arrays, so that only its own set of columns is independent.
        """
        if shallow:
            return self._with(self._all().copy())
        columns = self._all()
        copies = bulk.copy_small(columns)
        if copies is None and bulk.is_large(bulk.nbytes_of(columns.values(), self.count, self.count)):
            copies = bulk.copy_large(columns)
        return self._with({name: c.copy() for name, c in columns.items()} if copies is None else copies)

    def __copy__(self) -> Self:
        return self.copy(shallow=True)

    def __deepcopy__(self, memo: Any) -> Self:
        return self.copy()

    def _pad_left(self, padding: int) -> Self:
        """Copy the batch with rows of zeros (None for objects) before the first."""
        length = padding + self.count
        positions = np.arange(padding, length)
        new = self._with({name: column.spread(length, positions) for name, column in self._all().items()})
        new.count = length
        return new

    def __eq__(self, other: object) -> bool:
        """Tell whether the other batch has the same columns, dtypes and rows, laid out alike; NaN equals NaN."""
        if not isinstance(other, RowBatch):
            return NotImplemented
        mine, theirs = self._all(), other._all()
        return (
            self.count == other.count
            and mine.keys() == theirs.keys()
            and self._nested == other._nested
            and self._flags.zero_padded == other._flags.zero_padded
            and bool(self._flags.time_major) == bool(other._flags.time_major)
            and all(column.equals(theirs[name]) for name, column in mine.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def size_bytes(self) -> int:
        """Return the bytes of all columns in view; of Python objects, their shallow sizes.

        >>> from samplebatch import SampleBatch
        >>> SampleBatch(a=np.zeros((4, 2), np.float32))[1:].size_bytes()
        24
        """
        return sum([column.nbytes for column in self._all().values()])

    # -- order and parts -----------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each step as a dict of its values: scalars, views of array rows, objects; nested where columns are.

        Where there are sequences, padding is left out, `seq_lens` is 1 and states are those of the step's sequence.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> for row in SampleBatch(a=[1, 2], b=[3.0, 4.0]).rows():
        ...     print(row["a"], row["b"])
        1 3.0
        2 4.0
        """
        # Infos and states alone have rows, but count no steps.
        columns = self._rowwise() if self.count else {}
        keys = list(columns)
        for row in zip(*(column.values for column in columns.values()), strict=True):
            flat = dict(zip(keys, row, strict=True))
            yield self._nest(flat) if self._nested else flat

    def _rowwise(self) -> dict[str, Column]:
        """Return columns with one row per step each."""
        return self._all()

    def _nest(self, flat: dict[str, Any]) -> dict[str, Any]:
        return {
            name: unflatten(name, self._nested[name], flat.__getitem__) if name in self._nested else flat[name]
            for name in self
        }

    def shuffle(self, rng: np.random.Generator | int | None = None) -> Self:
        """Shuffle the steps in place; where sequences are padded, whole sequences with their states.

        Parameters
        ----------
        rng
            A generator or a seed; by default, fresh entropy.

        Returns
        -------
        SampleBatch
            This very batch.

        Raises
        ------
        SequenceError
            If there are sequences that are not padded. Whole ones are shuffled by
            `take_sequences(rng.permutation(len(batch["seq_lens"])))`.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> sorted(SampleBatch(a=[1, 2, 3, 4]).shuffle(rng=0)["a"].tolist())
        [1, 2, 3, 4]
        """
        shuffled = self._shuffle(np.random.default_rng(rng))
        self._columns, self._window, self._lent = shuffled._columns, None, False
        return self

    def _shuffle(self, rng: np.random.Generator) -> Self:
        """Gather all rows in random order."""
        if not self.count:
            return self.copy(shallow=True)
        return self._gather(rng.permutation(self.count))

    def timeslices(self, size: int | None = None, num_slices: int | None = None, k: int | None = None) -> list[Self]:
        """Split into consecutive views.

        Parameters
        ----------
        size
            Steps in each view, fewer in the last. Where there are sequences, both ends move back to where theirs
            begins.
        num_slices
            How many views to make, as equal as they can be, later ones the longer.
        k
            Another name for `size`.

        Raises
        ------
        ArgumentError
            If not exactly one of the three is given, or it is no whole number from 1 on.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> [part["a"].tolist() for part in SampleBatch(a=[1, 2, 3, 4, 5]).timeslices(2)]
        [[1, 2], [3, 4], [5]]
        >>> [part["a"].tolist() for part in SampleBatch(a=[1, 2, 3, 4, 5]).timeslices(num_slices=2)]
        [[1, 2], [3, 4, 5]]
        """
        named = {"size": size, "num_slices": num_slices, "k": k}
        given = [whole(name, n, 1) for name, n in named.items() if n is not None]
        if len(given) != 1:
            raise ArgumentError(f"exactly one of size, num_slices and k must be given, got {size}, {num_slices}, {k}")
        if num_slices is not None:
            short, longer = divmod(self.count, num_slices)
            bounds = [short * i + max(0, i - num_slices + longer) for i in range(num_slices + 1)]
        else:
            bounds = [*range(0, self.count, given[0]), self.count]
        part = self._range if self._has_sequences else self._view
        return [part(start, stop) for start, stop in pairwise(bounds)]

    def _minibatches(self, size: int, epochs: int, shuffle: bool, rng: np.random.Generator) -> Iterator[Self]:
        """Yield the parts of some passes over the steps."""
        for _ in range(epochs):
            yield from self._epoch(size, rng if shuffle else None)

    def _epoch(self, size: int, rng: np.random.Generator | None) -> Iterator[Self]:
        """Yield every step once, in parts of `size` steps; in random order, or as views without a generator."""
        if rng is None:
            yield from self.timeslices(size)
            return
        order = rng.permutation(self.count)
        for start in range(0, self.count, size):
            yield self._gather(order[start : start + size])

    # -- flags ---------------------------------------------------------------------------------------------------------

    @property
    def num_grad_updates(self) -> float | None:
        """Gradient updates that the policy had seen, averaged over steps; None if unknown."""
        return self._flags.num_grad_updates

    @num_grad_updates.setter
    def num_grad_updates(self, value: float | None) -> None:
        self._flags = replace(self._flags, num_grad_updates=value)

    @property
    def is_training(self) -> bool:
        """Whether the batch is meant for training rather than for computing actions."""
        return self._flags.is_training

    def set_training(self, training: bool = True) -> None:
        """Set whether the batch is meant for training."""
        self._flags = replace(self._flags, is_training=training)

    @property
    def time_major(self) -> bool | None:
        """Whether step columns have shape (T, B, ...); None if unknown."""
        return self._flags.time_major

    @time_major.setter
    def time_major(self, value: bool | None) -> None:
        self._set_flags(replace(self._flags, time_major=value))

    @property
    def zero_padded(self) -> bool:
        """Whether every sequence occupies `max_seq_len` rows."""
        return self._flags.zero_padded

    @zero_padded.setter
    def zero_padded(self, value: bool) -> None:
        self._set_flags(replace(self._flags, zero_padded=value))

    @property
    def max_seq_len(self) -> int | None:
        """Steps of the longest sequence, or rows per sequence when padded; None without sequences."""
        return self._flags.max_seq_len

    @max_seq_len.setter
    def max_seq_len(self, value: int | None) -> None:
        self._set_flags(replace(self._flags, max_seq_len=value))

    def _set_flags(self, flags: Flags) -> None:
        """Adopt flags that say how rows lie."""
        self._flags = flags


def as_indices(key: Any, n: int) -> Indices:
    """Turn a mask or integers into row indices in [0, n)."""
    rows = resolve(key, n)
    if isinstance(rows, int):
        raise RowIndexError("rows are gathered by a list of integers or a mask, got a single integer")
    return np.arange(*rows) if isinstance(rows, tuple) else rows

"""Reading of a buffer's rows: by index, by name, by their place in an episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, TENSOR, node
from samplebatch.batch.nested.values import any_null, nulls
from samplebatch.buffer.columns import first_row
from samplebatch.buffer.gather import (
    column_at,
    nbytes_of,
    nothing_added,
    nstep_columns,
    rows_at,
    rows_in,
    show_slots,
    slots_in,
)
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.samplers import Sampler, Uniform
from samplebatch.buffer.store import Range
from samplebatch.buffer.stored_batch import set_columns, stored_batch
from samplebatch.buffer.table import Table
from samplebatch.errors import ColumnNotFoundError, ColumnTypeError, RingError, RowIndexError, no_such_column

_INTP = np.dtype(np.intp)
_ndarray = np.ndarray
_count = np.count_nonzero


class _AbsentColumn(NamedTuple):
    """The message of a column that a buffer lacks: near names are looked for when it is read, as `hasattr` never does.

    It is no error of its own: Python suggests methods of near names for `AttributeError` alone.
    """

    kind: str
    name: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind!r} object has no attribute {self.name!r}: {no_such_column(self.name, self.columns)}"


class _Column:
    """A read-only attribute for a column that every step has."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, buffer: Any, owner: type) -> Any:
        return self if buffer is None else buffer._show(self.name)

    def __set__(self, buffer: Any, value: Any) -> None:
        raise ColumnTypeError(
            f"column {self.name!r} is the buffer's own and cannot be set as an attribute; use set_array_at_key"
        )


class Rows:
    """The rows of a `ReplayBuffer`, to be read by index, by name and by their place in an episode.

    Reading takes the lock of the table, whose rows another thread may be adding to. Only the memory of a column, which
    an attribute hands out, is not guarded.

    Attributes
    ----------
    maxsize
        How many slots there are.
    """

    _table: Table
    _sampler: Sampler
    _ring: int | None = None
    _start = 0
    maxsize: int
    options: dict[str, Any]
    obs = _Column()
    act = _Column()
    rew = _Column()
    terminated = _Column()
    truncated = _Column()
    done = _Column()
    obs_next = _Column()
    info = _Column()
    policy = _Column()

    @property
    def stack_num(self) -> int:
        """How many steps to stack where observations, info and policy are read; may be set."""
        return self.__dict__["stack_num"]  # type: ignore[no-any-return]

    @stack_num.setter
    def stack_num(self, value: int) -> None:
        self.__dict__["stack_num"] = whole("stack_num", value, 1)

    def __len__(self) -> int:
        with self._table.lock:
            rings = self._table.rings
            return len(rings) if self._ring is None else int(rings.sizes_of_all()[self._ring])

    def __getattr__(self, name: str) -> Any:
        # Python asks here for columns beside the usual ones, and while a buffer without a table is unpickled.
        if name.startswith("__") or "_table" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._show(name)

    def _show(self, name: str) -> Any:
        try:
            return show_slots(self._table, name, self._start, self._start + self.maxsize)
        except KeyError:
            message = _AbsentColumn(type(self).__name__, name, tuple(self._table.columns.tree))
            raise AttributeError(message) from None

    @property
    def _meta(self) -> Batch:
        """The memory of all columns as a batch, as Tianshou's algorithms know it: a column that is set is the buffer's.

        Setting it sets all columns of a batch, and keeps those that it lacks.
        """
        return stored_batch(self._table, self._start, self._start + self.maxsize, settable=self._ring is None)

    @_meta.setter
    def _meta(self, batch: Batch) -> None:
        set_columns(self._table if self._ring is None else None, batch)

    @property
    def nbytes(self) -> int:
        """Bytes that the slots of all columns occupy; of a part of a vector buffer, those of the whole."""
        return nbytes_of(self._table)

    @property
    def subbuffer_edges(self) -> Ints:
        """First slot of each ring, and the number of slots; shape (rings + 1,)."""
        if self._ring is not None:
            return np.array([0, self.maxsize], _INTP)
        return self._table.rings.edges.copy()

    @property
    def last_index(self) -> Ints:
        """The index written last in each ring, the first one if there is none; shape (rings,)."""
        with self._table.lock:
            last = self._table.rings.last_index
        return last if self._ring is None else last[self._ring : self._ring + 1] - self._start

    def unfinished_index(self) -> Ints:
        """Return the newest index of each ring with a running episode."""
        with self._table.lock:
            last = self._table.rings.unfinished(self._table.done)
        if self._ring is None:
            return last
        return last[(last >= self._start) & (last < self._start + self.maxsize)] - self._start

    # Rows

    def __getitem__(self, index: Any) -> Any:
        """Copy rows: one, a slice, or those of indices of any shape.

        `buf[:]` has all rows in time order, ring by ring. Any other slice counts the rows as they lie in memory, and so
        does `buf[-1]`, of all slots; `latest` has the newest. Rows have `obs`, `act`, `rew`, `terminated`, `truncated`,
        `done`, `obs_next`, `info` and `policy` (empty if never given), then other names. An array of
        indices may name slots that hold no row, whose values are then those of the memory; a single index may not.

        Raises
        ------
        ColumnNotFoundError
            If nothing has been added yet.
        RowIndexError
            If an index lies outside of [-maxsize, maxsize), or is of no such kind; if a single one has no row.
        """
        if isinstance(index, str):
            tree = self._table.columns.tree
            if index not in tree:
                raise no_such_column(index, tree)
            return self._show(index)
        with self._table.lock:
            if type(index) is _ndarray and index.dtype == _INTP and index.ndim:
                return self._rows(self._normal(index))
            if "obs" not in self._table.columns.tree:
                # Before the index is looked at: NumPy tells a sequence by its IndexError.
                raise nothing_added()
            if isinstance(index, slice):
                return self._read_slice(index)
            slots = self._slots(index)
            if slots.ndim:
                return self._rows(slots)
            return first_row(self._rows(self._one(slots)))

    def __iter__(self) -> Iterator[Batch]:
        """Go over the rows in time order, ring by ring; each is copied when its turn comes."""
        for index in self._pick(slice(None)).tolist():
            yield self[index]

    def _pick(self, index: Any) -> Ints:
        with self._table.lock:
            return self._slots(index) - self._start

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        # Otherwise NumPy would make an array of buffers one of their rows.
        held = np.empty((), object)
        held[()] = self
        return held

    def _read_slice(self, index: slice) -> Batch:
        ranges = self._ranges(index)
        if ranges is None:
            return self._rows(self._slots(index))
        held = rows_in(self._table, ranges, self.stack_num)
        held["rew"] = self._cast_rewards(held["rew"])
        return self._finish(held, ranges)

    def _rows(self, slots: Ints) -> Batch:
        # Every sample comes through here: the number is read without its property, and most buffers add nothing.
        held = rows_at(self._table, slots, self.__dict__["stack_num"])
        if "reward_dtype" in self.options:
            held["rew"] = self._cast_rewards(held["rew"])
        if type(self._sampler) is not Uniform:
            held.update(self._sampler.columns(self._table, slots))
        return node(Batch, held)

    def _cast_rewards(self, values: Any) -> Any:
        """Cast rewards, returns or discounts to the dtype that the options ask for; rows without rewards have none."""
        dtype = self.options.get("reward_dtype")
        return values.astype(dtype, copy=False) if dtype and type(values) is _ndarray else values

    def _nstep_columns(self, slots: Ints, n_step: int, gamma: float) -> dict[str, Any]:
        """Compute the columns of n-step rows; see `nstep_columns`."""
        held = nstep_columns(self._table, slots, n_step, gamma, self.stack_num)
        for name in ("returns", "discount"):
            held[name] = self._cast_rewards(held[name])
        return held

    def _finish(self, held: dict[str, Any], ranges: list[Range]) -> Batch:
        if self._sampler.listens:
            held.update(self._sampler.columns(self._table, slots_in(ranges)))
        return node(Batch, held)

    def _ranges(self, index: slice) -> list[Range] | None:
        """Return the ranges of slots that a slice stands for; None if there are too many, or none."""
        rings = self._table.rings
        if index == slice(None):
            chosen = range(rings.n) if self._ring is None else (self._ring,)
            return [pair for ring in chosen for pair in rings.stretches(ring)]
        if rings.n > 1 and self._ring is None and len(rings) < rings.capacity:
            return None
        start, stop, step = index.indices(len(self))
        return [(self._start + start, self._start + max(start, stop))] if step == 1 else None

    def _slots(self, index: Any) -> Ints:
        """Return the slots of the table that an index of this buffer stands for."""
        rings = self._table.rings
        if isinstance(index, slice):
            if index == slice(None):
                return rings.chronological(self._ring)
            stored = rings.stored_slots() if self._ring is None else np.arange(len(self)) + self._start
            return stored[index]
        if isinstance(index, tuple):
            if len(index) != 1:
                raise RowIndexError(f"rows must be picked along one axis, got {len(index)} indices; take columns apart")
            (index,) = index
        if KINDS[type(index)] == TENSOR:
            index = index.numpy(force=True)
        indices = np.asarray(index)
        if not indices.size and indices.dtype.kind == "f":
            indices = indices.astype(_INTP)
        if indices.dtype.kind == "b" and indices.ndim:
            if indices.shape != (self.maxsize,):
                raise RowIndexError(f"a mask must have {self.maxsize} entries, one for each slot, got {indices.shape}")
            indices = np.flatnonzero(indices)
        if indices.dtype.kind not in "iu":
            raise RowIndexError(
                f"rows must be picked by integers, a slice or a mask, got a {type(index).__name__} of dtype "
                f"{indices.dtype}"
            )
        return self._normal(indices.astype(_INTP, copy=False))

    def _one(self, slot: Ints) -> Ints:
        """Return a single slot, shape (), as shape (1,), if it holds a row, or nothing has been added at all."""
        rings = self._table.rings
        if not rings.holds(slot) and "obs" in self._table.columns.tree:
            raise RowIndexError(
                f"index {int(slot) - self._start} must be of a row, nothing is written there; sample_indices(0) has "
                f"the {len(self)} that are"
            )
        return slot.reshape(1)

    def _normal(self, indices: Ints) -> Ints:
        """Return the slots of indices, once they are known to lie inside."""
        maxsize = self.maxsize
        # As unsigned numbers, negative ones lie outside as well.
        if _count(indices.view(np.uintp) >= maxsize):
            outside = (indices < -maxsize) | (indices >= maxsize)
            if outside.any():
                raise RowIndexError(
                    f"index {indices[outside].flat[0]} must lie in [{-maxsize}, {maxsize}) of a buffer of "
                    f"{maxsize} slots"
                )
            indices = indices % maxsize
        return indices + self._start if self._start else indices

    def get(self, index: Any, key: str, default_value: Any = None, stack_num: int | None = None) -> Any:
        """Copy one column of some rows, stacked as the newest steps of their episodes, oldest first.

        Parameters
        ----------
        index
            As between brackets.
        key
            The column's name.
        default_value
            The value to return if there is no such column; None for an error.
        stack_num
            How many steps to stack, `buf.stack_num` if None. With 1 there is no axis for them.

        Raises
        ------
        ColumnNotFoundError
            If there is no such column and no default.
        RowIndexError
            If an index lies outside, or a single one has no row.
        ArgumentError
            If `stack_num` is no whole number from 1 on.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer
        >>> buf = ReplayBuffer(8)
        >>> for i in range(5):
        ...     added = buf.add(Batch(obs=i, act=0, rew=0, terminated=i == 1, truncated=False))
        >>> buf.get([1, 4], "obs", stack_num=3)
        array([[0, 0, 1],
               [2, 3, 4]])
        """
        stack = self.stack_num if stack_num is None else whole("stack_num", stack_num, 1)
        try:
            with self._table.lock:
                slots = self._slots(index)
                found = column_at(self._table, key, slots if slots.ndim else self._one(slots), stack)
        except ColumnNotFoundError:
            if default_value is None:
                raise
            return default_value
        if key == "rew":
            found = self._cast_rewards(found)
        return found if slots.ndim else first_row(found)

    def latest(self, n: int) -> Batch:
        """Copy the newest n rows, or as many as there are, in time order; of several rings, those of each.

        Raises
        ------
        ArgumentError
            If `n` is no whole number from 0 on.
        ColumnNotFoundError
            If nothing has been added yet.
        """
        whole("n", n)
        with self._table.lock:
            return self._rows(self._table.rings.newest(n, self._ring))

    def get_buffer_indices(self, start: int, stop: int) -> Ints:
        """Return the indices from `start` up to `stop`, both of one ring; past the ring's end they go on at its start.

        Raises
        ------
        RingError
            If the two are not of one ring.

        Examples
        --------
        >>> from samplebatch import VectorReplayBuffer
        >>> VectorReplayBuffer(10, 2).get_buffer_indices(8, 7)
        array([8, 9, 5, 6])
        """
        if self._ring is None:
            return self._table.rings.interval(start, stop)
        if not (0 <= start <= self.maxsize and 0 <= stop <= self.maxsize):
            raise RingError(f"start and stop must lie within one ring, got {start} and {stop}")
        return self._table.rings.interval(start + self._start, stop + self._start) - self._start

    # Neighbours

    def prev(self, index: Any) -> Any:
        """Return the index of the step before each in its episode; of an episode's first step, that step's own.

        Raises
        ------
        RowIndexError
            If an index lies outside.
        """
        with self._table.lock:
            rings = self._table.rings
            return self._neighbour(index, rings.prev_of_one, rings.prev)

    def next(self, index: Any) -> Any:
        """Return the index of the step after each in its episode; of the last one that is there, that step's own.

        Raises
        ------
        RowIndexError
            If an index lies outside.
        """
        with self._table.lock:
            rings = self._table.rings
            return self._neighbour(index, rings.next_of_one, rings.next)

    def _neighbour(self, index: Any, find_of_one: Any, find: Any) -> Any:
        table = self._table
        if type(index) is _ndarray and index.dtype == _INTP and index.ndim:
            found = find_of_one(index, table.done)
            if found is not None:
                return found
            slots = self._normal(index)
        else:
            slots = self._slots(index)
        if "done" not in table.columns.tree:
            found = slots
        elif slots.ndim:
            found = find(slots, table.done)
        else:
            found = find(slots.reshape(1), table.done)[0]
        return found - self._start if self._start else found

    # Missing values

    def isnull(self) -> Batch:
        """Tell for every element of all rows, as they lie, whether it is NaN, NaT or None."""
        return nulls(self[: len(self)])  # type: ignore[return-value]

    def hasnull(self) -> bool:
        """Tell whether any element of any row is NaN, NaT or None."""
        return bool(len(self)) and any_null(self[: len(self)])

"""Views of a buffer: its columns as attributes and as one batch, the slots of an index, its summary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samplebatch.batch import summary
from samplebatch.batch.delivery import as_array
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, TENSOR, node, values_of
from samplebatch.batch.nested.rows import shortest
from samplebatch.batch.nested.values import complete_rows, trees_equal
from samplebatch.buffer.columns import Columns, Tree, show
from samplebatch.buffer.gather import rows_at, show_slots
from samplebatch.buffer.ring import Flags, Ints
from samplebatch.buffer.samplers import Sampler
from samplebatch.buffer.store import Range, Slots, Store
from samplebatch.buffer.table import Table
from samplebatch.buffer.writing import FLAGS, drop_empty, numbers
from samplebatch.errors import (
    ColumnLengthError,
    ColumnMismatchError,
    ColumnTypeError,
    RingError,
    RowIndexError,
    StorageError,
    no_such_column,
)

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer


def peer_class(kind: type[Any]) -> type[Any]:
    """Return Tianshou's class of the same name as a buffer's class, if Tianshou is loaded; otherwise the class."""
    peers = sys.modules.get("tianshou.data")
    for base in kind.__mro__ if peers is not None else ():
        if base.__module__.startswith("samplebatch.") and hasattr(peers, base.__name__):
            peer: type[Any] = getattr(peers, base.__name__)
            return peer
    return kind


_MAX_OBJECTS = 100
"""Rows of columns without an array that are looked at: each of them is an object."""

_INTP = np.dtype(np.intp)
_count = np.count_nonzero


class AbsentColumn(NamedTuple):
    """The message of a column that a buffer lacks: near names are looked for when it is read, as `hasattr` never does.

    It is no error of its own: Python suggests methods of near names for `AttributeError` alone.
    """

    kind: str
    name: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind!r} object has no attribute {self.name!r}: {no_such_column(self.name, self.columns)}"


class StepColumn:
    """Read-only attribute of a buffer for a column that every step has."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, buffer: Any, owner: type) -> Any:
        return self if buffer is None else buffer._show(self.name)

    def __set__(self, buffer: Any, value: Any) -> None:
        raise ColumnTypeError(
            f"column {self.name!r} is the buffer's own and cannot be set as an attribute; use set_array_at_key"
        )


class StoredColumns(dict[str, Any]):
    """Columns of a buffer by name, the values of its stored batch: a column that is set becomes the buffer's."""

    def __init__(self, table: Table | None, held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self._table = table

    def __setitem__(self, name: str, value: Any) -> None:
        set_columns(self._table, {name: value})
        super().__setitem__(name, value)

    def update(self, *given: Any, **columns: Any) -> None:
        """Set several columns."""
        for name, value in dict(*given, **columns).items():
            self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied batch is no longer the buffer's.
        return dict, (dict(self),)


def stored_batch(table: Table, start: int, stop: int, *, settable: bool) -> Batch:
    """Return the memory of all columns, in a range of slots, as a batch with columns that can be set."""
    shown = {name: show_slots(table, name, start, stop) for name in table.columns.tree}
    return node(Batch, StoredColumns(table if settable else None, shown))


def set_columns(table: Table | None, given: Any) -> None:
    """Replace columns of a table by other values, or add new ones; those that are there already stay.

    Parameters
    ----------
    table
        The table; None for a part of a buffer.
    given
        Values by name: a row for each slot, or for each slot that is written; a name without values is emptied. Arrays
        with a row for each slot are kept, not copied.
    """
    if table is None:
        raise RingError("columns must be set in the whole buffer, this is a part of it")
    values = values_of(given)
    if values is None:
        raise ColumnTypeError(f"the columns of a buffer are set from a Batch or dict, got {type(given).__name__}")
    with table.lock:
        if table.journal is not None:
            raise StorageError("columns of a buffer in a folder cannot be replaced; use set_array_at_key")
        tree = table.columns.tree
        changed = {
            name: _column(table, name, value)
            for name, value in values.items()
            if name not in tree or not _is_held(tree[name], value)
        }
        tree.update(changed)
        table.forget_fast_add()


def _is_held(held: Store | Tree, value: Any) -> bool:
    """Return whether a value equals a stored column or tree of columns."""
    if isinstance(held, Store):
        shown = held.values
        if value is shown or isinstance(shown, np.ndarray):
            return value is shown
        # Rows that lie otherwise, such as compressed ones, are shown as another value every time.
        return trees_equal(node(Batch, {"value": show(shown)}), node(Batch, {"value": show(value)}))
    names = values_of(value)
    if KINDS[type(value)] != NODE or names is None or names.keys() != held.keys():
        return False
    return bool(held) and all(_is_held(inner, names[name]) for name, inner in held.items())


def _column(table: Table, name: str, value: Any) -> Any:
    """Create the store of a column, or a tree of stores."""
    names = values_of(value)
    if names is not None and not names:
        return {}
    count, stored = table.columns.slots, len(table.rings)
    rows = shortest({name: value}) or 0
    if rows not in (count, stored):
        raise ColumnLengthError(f"column {name!r} must have {count} rows, one a slot, or {stored}, got {rows}")
    if name in (*FLAGS, "done"):
        value = numbers(value, name, (rows,), np.bool_)
    slots: Slots = slice(0, count) if rows == count else table.rings.stored_slots()
    made = Columns(count, table.columns.stores)
    made.write(made.fit({name: value}, rows, keep=rows == count), slots)
    return made.tree[name]


# Rows


def ranges_of(buffer: ReplayBuffer, index: slice) -> list[Range] | None:
    """Return the ranges of slots that a slice stands for; None if there are too many, or none."""
    rings = buffer._table.rings
    if index == slice(None):
        chosen = range(rings.n) if buffer._ring is None else (buffer._ring,)
        return [pair for ring in chosen for pair in rings.stretches(ring)]
    if rings.n > 1 and buffer._ring is None and len(rings) < rings.capacity:
        return None
    start, stop, step = index.indices(len(buffer))
    return [(buffer._start + start, buffer._start + max(start, stop))] if step == 1 else None


def slots_of(buffer: ReplayBuffer, index: Any) -> Ints:
    """Return the slots of the table that an index of this buffer stands for."""
    rings = buffer._table.rings
    if isinstance(index, slice):
        if index == slice(None):
            return rings.chronological(buffer._ring)
        stored = rings.stored_slots() if buffer._ring is None else np.arange(len(buffer)) + buffer._start
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
        if indices.shape != (buffer.maxsize,):
            raise RowIndexError(f"a mask must have {buffer.maxsize} entries, one for each slot, got {indices.shape}")
        indices = np.flatnonzero(indices)
    if indices.dtype.kind not in "iu":
        raise RowIndexError(
            f"rows must be picked by integers, a slice or a mask, got a {type(index).__name__} of dtype {indices.dtype}"
        )
    return slots_at(buffer, indices.astype(_INTP, copy=False))


def require_row(buffer: ReplayBuffer, slot: Ints) -> Ints:
    """Return a single slot, shape (), as shape (1,), if it holds a row, or nothing has been added at all."""
    rings = buffer._table.rings
    if not rings.holds(slot) and "obs" in buffer._table.columns.tree:
        raise RowIndexError(
            f"index {int(slot) - buffer._start} must be of a row, nothing is written there; sample_indices(0) has "
            f"the {len(buffer)} that are"
        )
    return slot.reshape(1)


def slots_at(buffer: ReplayBuffer, indices: Ints) -> Ints:
    """Return the slots of indices, once they are known to lie inside."""
    maxsize = buffer.maxsize
    # As unsigned numbers, negative ones lie outside as well.
    if _count(indices.view(np.uintp) >= maxsize):
        outside = (indices < -maxsize) | (indices >= maxsize)
        if outside.any():
            raise RowIndexError(
                f"index {indices[outside].flat[0]} must lie in [{-maxsize}, {maxsize}) of a buffer of {maxsize} slots"
            )
        indices = indices % maxsize
    return indices + buffer._start if buffer._start else indices


def update_rows(buffer: ReplayBuffer, slots: Ints, generation: Any, columns: Mapping[str, Any]) -> Flags:
    """Write columns of rows whose slots have the given generation; see `ReplayBuffer.update_rows`."""
    table, n = buffer._table, len(slots)
    is_current = table.rings.holds(slots)
    if generation is None:
        if not is_current.all():
            missing = int(slots[~is_current][0]) - buffer._start
            raise RowIndexError(f"index {missing} must be of a row to be updated, its slot is empty")
    else:
        generations = as_array(generation).reshape(-1)
        if len(generations) != n:
            raise ColumnLengthError(f"column 'generation' must have {n} rows, one a row, got {len(generations)}")
        is_current &= table.rings.generation(slots) == generations
    values = Batch(dict(columns)).__dict__
    for name, value in values.items():
        if name in table.columns.tree or table.finals is None or name != "obs_next":
            table.check_column(name, value, n)
        else:
            raise ColumnMismatchError("column 'obs_next' must be stored to be updated, the buffer ignores it")
    for name, value in values.items():
        rows = value if is_current.all() else Batch({name: value})[is_current].__dict__[name]
        if is_current.any():
            table.set_column(name, rows, slots[is_current], None)
    return is_current


def neighbours(
    buffer: ReplayBuffer, index: Any, find_within: Callable[..., Ints | None], find: Callable[..., Ints]
) -> Any:
    """Return the indices that `find` returns; `find_within` is its short form, or returns None if it does not apply."""
    table = buffer._table
    with table.lock:
        has_ends = "done" in table.columns.tree
        if type(index) is np.ndarray and index.dtype == np.intp and index.ndim:
            neighbour_slots = find_within(table.rings, index, table.done) if has_ends else None
            if neighbour_slots is not None:
                return neighbour_slots
            slots = slots_at(buffer, index)
        else:
            slots = slots_of(buffer, index)
        if has_ends:
            neighbour_slots = find(table.rings, slots.reshape(-1), table.done)
            slots = neighbour_slots.reshape(slots.shape) if slots.ndim else neighbour_slots[0]
    return slots - buffer._start if buffer._start else slots


def drop_null_rows(table: Table, ring: int, sampler: Sampler) -> None:
    """Remove the rows of a ring with NaN, NaT or None; rows keep what the sampler knows of them."""
    slots = table.rings.chronological(ring)
    if not len(slots):
        return
    rows = Batch(drop_empty(rows_at(table, slots, 1)))
    complete = complete_rows(rows, len(slots))
    if not complete.all():
        priorities = sampler.state_dict(slots[complete])
        table.reset([ring], keep_statistics=True)
        kept = np.flatnonzero(complete)
        if len(kept):
            gaps = np.flatnonzero(np.diff(kept) > 1)
            moved = table.append(ring, rows[kept].__dict__, len(kept), gaps)
            sampler.on_move(moved, priorities)


def summarize(buffer: ReplayBuffer) -> tuple[str, list[summary.Line], tuple[str, ...]]:
    """Return the title, the lines and the headings of a buffer's summary: columns of its rows in time order."""
    table = buffer._table
    rings = table.rings.n if buffer._ring is None else 1
    parts = f" in {rings} rings" if rings > 1 else ""
    # The part of the table's slots that are this buffer's own.
    share = buffer.maxsize / max(table.rings.capacity, 1)
    size = summary.show_bytes(buffer.nbytes * share)
    lines = []
    with table.lock:
        slots = table.rings.chronological(buffer._ring)
        for path, store in table.columns.leaves():
            chosen = summary.rows_to_read(len(slots), store.row_shape or ())
            if store.dtype is None:
                chosen = chosen[:_MAX_OBJECTS]
            rows = store.to_column(slots[chosen])
            lines.append(summary.describe_column(".".join(path), rows, len(slots), int(store.nbytes * share)))
    title = f"{type(buffer).__name__}({len(buffer)} of {buffer.maxsize} steps{parts}, {size})"
    return title, lines, (*summary.HEADINGS, "memory")

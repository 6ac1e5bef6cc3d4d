"""Attributes, batches, indices and summaries of buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from samplebatch import errors
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

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer


def peer_class(kind: type[Any]) -> type[Any]:
    """Return the Tianshou class with the buffer's class name if Tianshou is loaded, otherwise the buffer's class."""
    peers = sys.modules.get("tianshou.data")
    for base in kind.__mro__ if peers is not None else ():
        if base.__module__.startswith("samplebatch.") and hasattr(peers, base.__name__):
            peer: type[Any] = getattr(peers, base.__name__)
            return peer
    return kind


_MAX_OBJECTS = 100
"""Maximum number of rows read from columns without an array, because each row is an object."""

_INTP = np.dtype(np.intp)
_count = np.count_nonzero


class AbsentColumn(NamedTuple):
    """Lazily formatted error message for a missing column; `hasattr` does not format the message.

    This class is not an exception, because Python suggests similar attribute names only for `AttributeError`.
    """

    kind: str
    name: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        hint = _METHODS_ELSEWHERE.get(self.name) or errors.no_such_column(self.name, self.columns)
        return f"{self.kind!r} object has no attribute {self.name!r}: {hint}"


_ADD = "add(Batch(obs=..., act=..., rew=..., ...)) adds a step, and extend(batch) the steps of a batch"
_SAMPLE = "sample(batch_size) returns sampled rows and their indices"
_METHODS_ELSEWHERE: Final = {
    **dict.fromkeys(("append", "push", "store", "insert", "put", "remember", "add_batch"), _ADD),
    **dict.fromkeys(("sample_batch", "get_batch", "get_sample", "draw"), _SAMPLE),
    **dict.fromkeys(("size", "capacity", "full", "is_full", "pos", "ptr"), "len(buffer) rows are stored, of maxsize"),
    **dict.fromkeys(("clear", "empty", "flush"), "reset() removes all rows"),
    **dict.fromkeys(("update_priorities", "update_priority"), "update_weight(indices, priorities) sets priorities"),
    **dict.fromkeys(("to_torch", "to", "device"), "sample(batch_size, device=...) returns tensors"),
    "shape": "len(buffer) rows are stored, buffer.obs.shape is the shape of a column",
}
"""Attributes of buffers in other libraries, and what has their place here."""


def values_by_position(count: int) -> errors.ArgumentError:
    """Create the error for a step with positional values; buffers of other libraries accept positional values."""
    return errors.ArgumentError(
        f"a step must be a Batch or have its values by name, add(obs=..., act=..., rew=..., terminated=..., "
        f"truncated=..., obs_next=...), got {count} values by position"
    )


REQUIRED: Final[Any] = object()
"""Default of an argument that must be passed."""


def arguments_of_sample(more: Collection[Any], unknown: Iterable[str]) -> errors.ArgumentError:
    """Create the error for invalid arguments of `ReplayBuffer.sample`."""
    arguments = ("batch_size", "n_step", "gamma", "max_age", "once", "device", "floats")
    if more:
        return errors.ArgumentError(
            f"sample accepts batch_size only by position, got {len(more) + 1} values; others have names"
        )
    for name in unknown:
        hint = "did you mean 'batch_size'?" if name in _BATCH_SIZES else errors.near_names(name, arguments)
        return errors.ArgumentError(f"sample has no argument {name!r}; {hint}")
    return errors.ArgumentError("sample requires 'batch_size'")


_BATCH_SIZES = frozenset(("n", "k", "num", "size", "batch", "count", "sample_size", "num_items", "n_samples"))
"""Names of the number of sampled rows in other libraries."""


class StepColumn:
    """Read-only attribute of a buffer for a column that is present in every step."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, buffer: Any, owner: type) -> Any:
        return self if buffer is None else buffer._show(self.name)

    def __set__(self, buffer: Any, value: Any) -> None:
        raise errors.ColumnTypeError(f"column {self.name!r} must not be set as an attribute; use set_array_at_key")


class StoredColumns(dict[str, Any]):
    """Mapping from names to a buffer's columns; columns that are assigned to the mapping are set in the buffer."""

    def __init__(self, table: Table | None, columns: Mapping[str, Any]) -> None:
        super().__init__(columns)
        self._table = table

    def __setitem__(self, name: str, value: Any) -> None:
        set_columns(self._table, {name: value})
        super().__setitem__(name, value)

    def update(self, *given: Any, **columns: Any) -> None:
        """Set several columns."""
        for name, value in dict(*given, **columns).items():
            self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied batch is independent of the buffer.
        return dict, (dict(self),)


def stored_batch(table: Table, start: int, stop: int, *, settable: bool) -> Batch:
    """Return the columns of a slot range as a batch; if `settable`, assigned columns are set in the table."""
    columns = {name: show_slots(table, name, start, stop) for name in table.columns.tree}
    return node(Batch, StoredColumns(table if settable else None, columns))


def set_columns(table: Table | None, batch: Any) -> None:
    """Replace or add columns of a table; skip unchanged columns.

    table: table of the buffer; None if the buffer is a part of another buffer.
    batch: values by name, with one row per slot or per stored row. An empty dict or batch removes the name's values.
        Arrays with one row per slot are not copied.
    """
    if table is None:
        raise errors.RingError("columns must be set in the entire buffer, got one part")
    values = values_of(batch)
    if values is None:
        raise errors.ColumnTypeError(f"the columns of a buffer must be a Batch or dict, got {type(batch).__name__}")
    with table.lock:
        if table.journal is not None:
            raise errors.StorageError("columns of a buffer in a folder cannot be replaced; use set_array_at_key")
        tree = table.columns.tree
        changed = {
            name: _column(table, name, value)
            for name, value in values.items()
            if name not in tree or not _is_stored(tree[name], value)
        }
        tree.update(changed)
        table.forget_fast_add()


def _is_stored(stored: Store | Tree, value: Any) -> bool:
    if isinstance(stored, Store):
        values = stored.values
        if value is values or isinstance(values, np.ndarray):
            return value is values
        # Other stores, such as compressed ones, return a new value every time.
        return trees_equal(node(Batch, {"value": show(values)}), node(Batch, {"value": show(value)}))
    names = values_of(value)
    if KINDS[type(value)] != NODE or names is None or names.keys() != stored.keys():
        return False
    return bool(stored) and all(_is_stored(inner, names[name]) for name, inner in stored.items())


def _column(table: Table, name: str, value: Any) -> Any:
    """Create the store of a column, or a tree of stores for nested columns."""
    names = values_of(value)
    if names is not None and not names:
        return {}
    count, stored = table.columns.slots, len(table.rings)
    rows = shortest({name: value}) or 0
    if rows not in (count, stored):
        raise errors.ColumnLengthError(f"column {name!r} must have {count} rows, one per slot, or {stored}, got {rows}")
    if name in (*FLAGS, "done"):
        value = numbers(value, name, (rows,), np.bool_)
    slots: Slots = slice(0, count) if rows == count else table.rings.stored_slots()
    new_columns = Columns(count, table.columns.stores)
    new_columns.write(new_columns.fit({name: value}, rows, keep=rows == count), slots)
    return new_columns.tree[name]


# Rows


def ranges_of(buffer: ReplayBuffer, index: slice) -> list[Range] | None:
    """Return the slot ranges of a slice; None if the slots of the slice are not a few contiguous ranges."""
    rings = buffer._table.rings
    if index == slice(None):
        chosen = range(rings.n) if buffer._ring is None else (buffer._ring,)
        return [pair for ring in chosen for pair in rings.stretches(ring)]
    if rings.n > 1 and buffer._ring is None and len(rings) < rings.capacity:
        return None
    start, stop, step = index.indices(len(buffer))
    return [(buffer._start + start, buffer._start + max(start, stop))] if step == 1 else None


def slots_of(buffer: ReplayBuffer, index: Any) -> Ints:
    """Convert an index of a buffer to slots of the buffer's table."""
    rings = buffer._table.rings
    if isinstance(index, slice):
        if index == slice(None):
            return rings.chronological(buffer._ring)
        stored = rings.stored_slots() if buffer._ring is None else np.arange(len(buffer)) + buffer._start
        return stored[index]
    if isinstance(index, tuple):
        if len(index) != 1:
            raise errors.RowIndexError(
                f"rows must be indexed along one axis, got {len(index)} indices; index columns separately"
            )
        (index,) = index
    if KINDS[type(index)] == TENSOR:
        index = index.numpy(force=True)
    indices = np.asarray(index)
    if not indices.size and indices.dtype.kind == "f":
        indices = indices.astype(_INTP)
    if indices.dtype.kind == "b" and indices.ndim:
        if indices.shape != (buffer.maxsize,):
            raise errors.RowIndexError(f"a mask must have {buffer.maxsize} entries, one per slot, got {indices.shape}")
        indices = np.flatnonzero(indices)
    if indices.dtype.kind not in "iu":
        raise errors.RowIndexError(
            f"rows must be indexed by integers, a slice or a mask, got {type(index).__name__} of dtype {indices.dtype}"
        )
    return slots_at(buffer, indices.astype(_INTP, copy=False))


def require_row(buffer: ReplayBuffer, slot: Ints) -> Ints:
    """Reshape a single slot from () to (1,); raise RowIndexError if the slot has no row and the buffer has columns."""
    rings = buffer._table.rings
    if not rings.holds(slot) and "obs" in buffer._table.columns.tree:
        raise errors.RowIndexError(
            f"index {int(slot) - buffer._start} must have a row, got an empty slot; sample_indices(0) returns "
            f"the {len(buffer)} indices with rows"
        )
    return slot.reshape(1)


def slots_at(buffer: ReplayBuffer, indices: Ints) -> Ints:
    """Convert indices of a buffer to slots of the buffer's table, and check that the indices are in bounds."""
    maxsize = buffer.maxsize
    # As unsigned numbers, negative indices are also out of bounds.
    if _count(indices.view(np.uintp) >= maxsize):
        outside = (indices < -maxsize) | (indices >= maxsize)
        if outside.any():
            raise errors.RowIndexError(
                f"index {indices[outside].flat[0]} must be in [{-maxsize}, {maxsize}) of a buffer of {maxsize} slots"
            )
        indices = indices % maxsize
    return indices + buffer._start if buffer._start else indices


def update_rows(buffer: ReplayBuffer, slots: Ints, generation: Any, columns: Mapping[str, Any]) -> Flags:
    """Write columns of the rows whose slots still have the given generation; see `ReplayBuffer.update_rows`."""
    table, n = buffer._table, len(slots)
    is_current = table.rings.holds(slots)
    if generation is None:
        if not is_current.all():
            missing = int(slots[~is_current][0]) - buffer._start
            raise errors.RowIndexError(f"index {missing} must have a row to be updated, got an empty slot")
    else:
        generations = as_array(generation).reshape(-1)
        if len(generations) != n:
            raise errors.ColumnLengthError(
                f"column 'generation' must have {n} rows, one per row, got {len(generations)}"
            )
        is_current &= table.rings.generation(slots) == generations
    values = Batch(dict(columns)).__dict__
    for name, value in values.items():
        if name in table.columns.tree or table.finals is None or name != "obs_next":
            table.check_column(name, value, n)
        else:
            raise errors.ColumnMismatchError(
                "column 'obs_next' must be stored to be updated, got a buffer that ignores it"
            )
    for name, value in values.items():
        rows = value if is_current.all() else Batch({name: value})[is_current].__dict__[name]
        if is_current.any():
            table.set_column(name, rows, slots[is_current], None)
    return is_current


def neighbours(
    buffer: ReplayBuffer, index: Any, find_within: Callable[..., Ints | None], find: Callable[..., Ints]
) -> Any:
    """Return the indices that `find` returns; `find_within` is a fast path that may return None."""
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
    """Remove a ring's rows with NaN, NaT or None; preserve the priorities of the remaining rows."""
    slots = table.rings.chronological(ring)
    if not len(slots):
        return
    rows = Batch(drop_empty(rows_at(table, slots, 1)))
    complete = complete_rows(rows, len(slots))
    if not complete.all():
        priorities = sampler.state_dict(slots[complete])
        table.reset([ring], keep_statistics=True)
        complete_indices = np.flatnonzero(complete)
        if len(complete_indices):
            gaps = np.flatnonzero(np.diff(complete_indices) > 1)
            moved = table.append(ring, rows[complete_indices].__dict__, len(complete_indices), gaps)
            sampler.on_move(moved, priorities)


def summarize(buffer: ReplayBuffer) -> tuple[str, list[summary.Line], tuple[str, ...]]:
    """Return the title, lines and headings of a buffer's summary, which shows the rows in time order."""
    table = buffer._table
    rings = table.rings.n if buffer._ring is None else 1
    parts = f" in {rings} rings" if rings > 1 else ""
    # The buffer's share of the table's slots.
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

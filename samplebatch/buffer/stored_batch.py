"""The stored batch of a buffer, `_meta`: Tianshou's algorithms read a buffer's columns there, and set them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, node, values_of
from samplebatch.batch.nested.rows import shortest
from samplebatch.batch.nested.values import trees_equal
from samplebatch.buffer.columns import Columns, Tree, show
from samplebatch.buffer.gather import show_slots
from samplebatch.buffer.store import Slots, Store
from samplebatch.buffer.table import Table
from samplebatch.buffer.writing import FLAGS, numbers
from samplebatch.errors import ColumnLengthError, ColumnTypeError, RingError, StorageError


class StoredColumns(dict[str, Any]):
    """Columns of a buffer by name, the values of its stored batch: a column that is set becomes the buffer's.

    Parameters
    ----------
    table
        Where columns that are set go; None if the buffer is a part of another, whose columns cannot be set.
    held
        The columns.
    """

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

    Raises
    ------
    ColumnLengthError, ColumnTypeError
        If a column has not as many rows, or cannot be stored; names it. Nothing has changed then.
    RingError
        If the buffer is a part of another.
    StorageError
        If it is kept in a folder.
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
    """Tell whether a value equals that of a column or of a tree of columns."""
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
    """Make the store of a column, or a tree of stores."""
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

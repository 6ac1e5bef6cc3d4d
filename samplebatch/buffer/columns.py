"""Columns of a buffer: a tree of stores that is nested like the added batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import ARRAY, FOREIGN, KINDS, NODE, TENSOR, node, values_of
from samplebatch.batch.nested.values import missing_value, narrow
from samplebatch.buffer.store import DenseStore, ObjectStore, Range, Slots, Store
from samplebatch.buffer.stores import Stores
from samplebatch.column import threads
from samplebatch.column.convert import is_plain
from samplebatch.column.interface import Column
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ColumnMismatchError, FormatError

_ndarray = np.ndarray

Tree = dict[str, Any]
"""Names mapped to stores or subtrees; an empty tree is a name without values."""

_NO_NAMES: dict[str, Any] = {}


class Ready(NamedTuple):
    """Validated and converted rows; writing these rows to their stores cannot fail.

    rows: pairs of a store and the rows to write to it.
    new: stores to add before writing, as tuples (tree, name, store or subtree).
    """

    rows: list[tuple[Store, Any]]
    new: list[tuple[Tree, str, Any]]


class Columns:
    """Tree of stores with a common slot numbering, used by `Table` and `FinalObservations`.

    >>> columns = Columns(4, Stores())
    >>> columns.write(
    ...     columns.fit({"obs": {"id": np.array([5, 6])}, "info": {}}, 2), slice(0, 2)
    ... )
    >>> columns.write(columns.fit(Batch(obs={"id": 7}, rew=1.5), 1, single=True), 2)
    >>> take_rows(columns.tree, np.array([2, 0]))
    Batch(
        obs: Batch(
                 id: array([7, 5]),
             ),
        info: Batch(),
        rew: array([1.5, 0. ]),
    )
    """

    __slots__ = ("slots", "stores", "tree")

    def __init__(self, slots: int, stores: Stores) -> None:
        self.slots = slots
        self.stores = stores
        self.tree: Tree = {}

    def fit(self, batch: Any, n: int, *, single: bool = False, keep: bool = False) -> Ready:
        """Validate and convert n rows for all columns, without changing the columns.

        batch: nested values by name, each with leading axis n. Columns without values in `batch` are filled with zeros
            or None, and unknown names become new columns.
        single: whether the values are a single row without the leading axis.
        keep: whether a new column may use an array of `batch` without a copy if the array has one row per slot.
        """
        prepared = Ready([], [])
        self._fit(self.tree, values_of(batch) or _NO_NAMES, n, (single, keep), "", prepared)
        return prepared

    def fit_only(self, name: str, value: Any, n: int) -> Ready:
        """Validate and convert n rows of one column, which may be nested, without changing any column."""
        prepared = Ready([], [])
        self._fit_name(self.tree, name, value, n, (False, False), "", prepared)
        return prepared

    def _fit(
        self, tree: Tree, values: Mapping[str, Any], n: int, how: tuple[bool, bool], prefix: str, prepared: Ready
    ) -> None:
        for name, value in values.items():
            self._fit_name(tree, name, value, n, how, prefix, prepared)
        if not tree.keys() <= values.keys():
            for name, node_value in tree.items():
                if name not in values:
                    prepared.rows.extend((store, store.blank(n)) for _, store in leaves_of(node_value))

    def _fit_name(
        self, tree: Tree, name: str, value: Any, n: int, how: tuple[bool, bool], prefix: str, prepared: Ready
    ) -> None:
        stored = tree.get(name)
        single, keep = how
        if type(value) is _ndarray and type(stored) is DenseStore and not single:
            prepared.rows.append((stored, stored.fit(value, n)))
            return
        names = values_of(value)
        if names is not None:
            if isinstance(stored, Store):
                if names:
                    raise ColumnMismatchError(
                        f"column {prefix + name!r} must have rows of values, got a nested batch of {len(names)}"
                    )
                prepared.rows.append((stored, stored.blank(n)))
                return
            if stored is None:
                stored = {}
                prepared.new.append((tree, name, stored))
            self._fit(stored, names, n, how, f"{prefix}{name}.", prepared)
            return
        if stored and not isinstance(stored, Store):
            raise ColumnMismatchError(f"column {prefix + name!r} must be a nested batch, got a {type(value).__name__}")
        rows = _one_row(value) if single else value
        if not stored:
            stored = self.stores.make(prefix + name, rows, self.slots)
            if keep and type(stored) is DenseStore and is_plain(rows) and rows.flags.writeable and len(rows) == n:
                prepared.new.append((tree, name, DenseStore(prefix + name, rows)))
                return
            prepared.new.append((tree, name, stored))
        prepared.rows.append((stored, stored.fit(rows, n)))

    def fit_others(
        self, prepared: Ready, slots: npt.NDArray[np.intp], default: float | None
    ) -> list[tuple[Store, npt.NDArray[Any]]]:
        """Return default rows of all slots for each new column whose values were passed only for some slots."""
        if default is None and len(np.unique(slots)) == self.slots:
            return []
        new = {id(added) for _, _, added in prepared.new}
        filled = []
        for store, rows in prepared.rows:
            if id(store) in new:
                shape = (self.slots, *np.shape(rows)[1:])
                if default is None:
                    dtype = getattr(rows, "dtype", np.dtype(object))
                    every = np.full(shape, missing_value(dtype, store.name), dtype)
                else:
                    every = np.full(shape, default)
                filled.append((store, store.fit(every, self.slots)))
        return filled

    def write(self, prepared: Ready, slots: Slots) -> None:
        """Write rows returned by `fit`."""
        for tree, name, node_value in prepared.new:
            tree[name] = node_value
        for store, rows in prepared.rows:
            store.write(slots, rows)

    def narrow(self, slots: npt.NDArray[np.intp]) -> bool:
        """Convert each object column to a numeric column if all of its stored rows are numbers.

        Returns: whether any column was converted.
        """
        is_converted = False
        for path, store in list(self.leaves()):
            if isinstance(store, ObjectStore) and len(slots):
                values = narrow(store.values[slots])
                if values.dtype.kind != "O":
                    numbers = self.stores.make(store.name, values, self.slots)
                    numbers.write(slots, numbers.fit(values, len(slots)))
                    reduce(getitem, path[:-1], self.tree)[path[-1]] = numbers
                    is_converted = True
        return is_converted

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Store]]:
        """Iterate over pairs of path and store."""
        return leaves_of(self.tree)

    @property
    def nbytes(self) -> int:
        """Size of all stores in bytes."""
        return _nbytes_of(self.tree)

    # State

    def state_dict(self, slots: npt.NDArray[np.intp]) -> dict[str, Any]:
        """Return the tree structure and the rows of the given slots, for `load_state_dict`.

        Returns: `tree`: names mapped to nested dicts or column indices; `kinds`, `row_shapes` and `columns`: store
        kind, row shape and rows of each column.
        """
        state: dict[str, Any] = {"kinds": [], "row_shapes": [], "columns": []}

        def walk(tree: Tree) -> dict[str, Any]:
            indices: dict[str, Any] = {}
            for name, node_value in tree.items():
                if isinstance(node_value, Store):
                    indices[name] = len(state["kinds"])
                    state["kinds"].append(node_value.kind)
                    state["row_shapes"].append(getattr(node_value, "shape", node_value.row_shape or ()))
                    state["columns"].append(node_value.to_column(slots))
                else:
                    indices[name] = walk(node_value)
            return indices

        state["tree"] = walk(self.tree)
        return state

    def load_state_dict(self, slots: npt.NDArray[np.intp], state: dict[str, Any]) -> None:
        """Restore the stores and the rows of the given slots from a `state_dict`."""
        columns: list[Column] = state["columns"]

        def grow(indices: dict[str, Any], prefix: str) -> Tree:
            tree: Tree = {}
            for name, index in indices.items():
                if isinstance(index, dict):
                    tree[name] = grow(index, f"{prefix}{name}.")
                    continue
                if not 0 <= index < len(columns) or len(columns[index]) != len(slots):
                    raise FormatError(
                        f"column {prefix + name!r} must exist with {len(slots)} rows, got another or none"
                    )
                column, shape = columns[index], tuple(state["row_shapes"][index])
                tree[name] = store = self.stores.like(state["kinds"][index], prefix + name, column, shape, self.slots)
                store.load_column(slots, column)
            return tree

        self.tree = grow(state["tree"], "")


def leaves_of(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Store]]:
    """Iterate over pairs of path and store in a tree."""
    if isinstance(tree, Store):
        yield path, tree
        return
    for name, inner in tree.items():
        yield from leaves_of(inner, (*path, name))


def _nbytes_of(tree: Any) -> int:
    """Return the total size of a tree's stores in bytes; must be fast, because a replay service calls it per sample."""
    return sum([_nbytes_of(inner) for inner in tree.values()]) if type(tree) is dict else int(tree.nbytes)


def _one_row(value: Any) -> Any:
    kind = KINDS[type(value)]
    if kind in (ARRAY, TENSOR):
        return value[None]
    return np.asarray(value)[None] if kind == FOREIGN else [value]


# Reading


def show(value: Any) -> Any:
    """Convert rows to batch values; a column whose rows are not ragged becomes an array."""
    return value.to_numpy() if isinstance(value, Column) and not isinstance(value, VaryingRows) else value


def map_stores(tree: Any, function: Callable[[Store], Any]) -> Any:
    """Apply a function to each store, and return the results as a batch that is nested like the tree."""
    if type(tree) is dict:
        return node(Batch, {name: map_stores(inner, function) for name, inner in tree.items()})
    return function(tree)


def take_rows(tree: Any, slots: npt.NDArray[np.intp]) -> Any:
    """Gather the rows at `slots`, an array of any shape, into new memory; the result is nested like the tree."""
    if type(tree) is dict:
        return node(Batch, {name: take_rows(inner, slots) for name, inner in tree.items()})
    rows = tree.take(slots)
    return rows if type(rows) is np.ndarray else show(rows)


def copy_rows(tree: Any, ranges: list[Range], jobs: list[threads.Job]) -> Any:
    """Allocate memory, nested like the tree, for the rows of slot ranges; append the copy jobs to `jobs`."""
    if type(tree) is dict:
        return node(Batch, {name: copy_rows(inner, ranges, jobs) for name, inner in tree.items()})
    out, copy_jobs = tree.plan_copy(ranges)
    if copy_jobs:
        jobs += copy_jobs
    return out if type(out) is np.ndarray else show(out)


def first_row(value: Any) -> Any:
    """Extract the row from values that contain one row; a number becomes a 0-d array, an object is unchanged."""
    if KINDS[type(value)] == NODE:
        return node(Batch, {name: first_row(inner) for name, inner in value.__dict__.items()})
    if type(value) is np.ndarray and value.dtype.kind != "O":
        return value.reshape(value.shape[1:])
    return value[0]

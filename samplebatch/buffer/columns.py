"""The columns of a buffer: a tree of stores over the same slots, in the structure of the batches that were added."""

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

Tree = dict[str, Any]
"""Names to stores, or to further trees; an empty tree is a name without values yet."""

_NO_NAMES: dict[str, Any] = {}


class Ready(NamedTuple):
    """Rows that every store has checked and converted, ready to be written.

    Attributes
    ----------
    rows
        Stores, and rows ready to be written to them.
    new
        Stores to be added first: tree, name, store or tree.
    """

    rows: list[tuple[Store, Any]]
    new: list[tuple[Tree, str, Any]]


class Columns:
    """A tree of stores over the same slots, for `Table` and `FinalObservations`.

    Examples
    --------
    >>> columns = Columns(4, Stores())
    >>> columns.write(columns.fit({"obs": {"id": np.array([5, 6])}, "info": {}}, 2), slice(0, 2))
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

    def fit(self, given: Any, n: int, *, single: bool = False, keep: bool = False) -> Ready:
        """Check n rows for all columns, and make them ready; nothing is changed.

        Parameters
        ----------
        given
            Values by name, nested, each with leading axis n. Names that are not given get zeros or None, and names not
            known become new columns.
        n
            How many rows.
        single
            Whether the values are those of one row, without the leading axis.
        keep
            Whether new columns may be the very arrays given, where these have as many rows as there are slots.
        """
        ready = Ready([], [])
        self._fit(self.tree, values_of(given) or _NO_NAMES, n, (single, keep), "", ready)
        return ready

    def fit_only(self, name: str, value: Any, n: int) -> Ready:
        """Check n rows for the columns of one name, as `fit` does for all; others are left as they are."""
        ready = Ready([], [])
        self._fit_name(self.tree, name, value, n, (False, False), "", ready)
        return ready

    def _fit(
        self, tree: Tree, given: Mapping[str, Any], n: int, how: tuple[bool, bool], prefix: str, ready: Ready
    ) -> None:
        for name, value in given.items():
            self._fit_name(tree, name, value, n, how, prefix, ready)
        if not tree.keys() <= given.keys():
            for name, held in tree.items():
                if name not in given:
                    ready.rows.extend((store, store.blank(n)) for _, store in leaves_of(held))

    def _fit_name(
        self, tree: Tree, name: str, value: Any, n: int, how: tuple[bool, bool], prefix: str, ready: Ready
    ) -> None:
        held = tree.get(name)
        names = values_of(value)
        single, keep = how
        if names is not None:
            if isinstance(held, Store):
                if names:
                    raise ColumnMismatchError(
                        f"column {prefix + name!r} must have rows of values, got a nested batch of {len(names)}"
                    )
                ready.rows.append((held, held.blank(n)))
                return
            if held is None:
                held = {}
                ready.new.append((tree, name, held))
            self._fit(held, names, n, how, f"{prefix}{name}.", ready)
            return
        if held and not isinstance(held, Store):
            raise ColumnMismatchError(f"column {prefix + name!r} must be a nested batch, got a {type(value).__name__}")
        rows = _one_row(value) if single else value
        if not held:
            held = self.stores.make(prefix + name, rows, self.slots)
            if keep and type(held) is DenseStore and is_plain(rows) and rows.flags.writeable and len(rows) == n:
                ready.new.append((tree, name, DenseStore(prefix + name, rows)))
                return
            ready.new.append((tree, name, held))
        ready.rows.append((held, held.fit(rows, n)))

    def fit_others(
        self, ready: Ready, slots: npt.NDArray[np.intp], default: float | None
    ) -> list[tuple[Store, npt.NDArray[Any]]]:
        """Return the rows of all slots for new columns of which only some slots get values."""
        if default is None and len(np.unique(slots)) == self.slots:
            return []
        new = {id(held) for _, _, held in ready.new}
        found = []
        for store, rows in ready.rows:
            if id(store) in new:
                shape = (self.slots, *np.shape(rows)[1:])
                if default is None:
                    dtype = getattr(rows, "dtype", np.dtype(object))
                    every = np.full(shape, missing_value(dtype, store.name), dtype)
                else:
                    every = np.full(shape, default)
                found.append((store, store.fit(every, self.slots)))
        return found

    def write(self, ready: Ready, slots: Slots) -> None:
        """Write rows that `fit` returned."""
        for tree, name, held in ready.new:
            tree[name] = held
        for store, rows in ready.rows:
            store.write(slots, rows)

    def narrow(self, slots: npt.NDArray[np.intp]) -> bool:
        """Replace columns of objects that are numbers, in all slots that have rows, by columns of numbers.

        Returns
        -------
        Whether there was one.
        """
        found = False
        for path, store in list(self.leaves()):
            if isinstance(store, ObjectStore) and len(slots):
                values = narrow(store.values[slots])
                if values.dtype.kind != "O":
                    numbers = self.stores.make(store.name, values, self.slots)
                    numbers.write(slots, numbers.fit(values, len(slots)))
                    reduce(getitem, path[:-1], self.tree)[path[-1]] = numbers
                    found = True
        return found

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Store]]:
        """Walk over the stores with their names from the root on."""
        return leaves_of(self.tree)

    @property
    def nbytes(self) -> int:
        """Bytes that all stores occupy."""
        return _nbytes_of(self.tree)

    # Carrying on elsewhere

    def state_dict(self, slots: npt.NDArray[np.intp]) -> dict[str, Any]:
        """Return the structure, and the rows of some slots, for `load_state_dict`.

        Returns
        -------
        dict
            `tree`: names to nested dicts, or to the place of a column in the lists that follow; `kinds`, `row_shapes`
            and `columns`: for each column the kind of its store, its row shape and its rows.
        """
        found: dict[str, Any] = {"kinds": [], "row_shapes": [], "columns": []}

        def walk(tree: Tree) -> dict[str, Any]:
            places: dict[str, Any] = {}
            for name, held in tree.items():
                if isinstance(held, Store):
                    places[name] = len(found["kinds"])
                    found["kinds"].append(held.kind)
                    found["row_shapes"].append(getattr(held, "shape", held.row_shape or ()))
                    found["columns"].append(held.to_column(slots))
                else:
                    places[name] = walk(held)
            return places

        found["tree"] = walk(self.tree)
        return found

    def load_state_dict(self, slots: npt.NDArray[np.intp], found: dict[str, Any]) -> None:
        """Replace the stores by those of a `state_dict`, with its rows."""
        columns: list[Column] = found["columns"]

        def grow(places: dict[str, Any], prefix: str) -> Tree:
            tree: Tree = {}
            for name, place in places.items():
                if isinstance(place, dict):
                    tree[name] = grow(place, f"{prefix}{name}.")
                    continue
                if not 0 <= place < len(columns) or len(columns[place]) != len(slots):
                    raise FormatError(f"column {prefix + name!r} must be there with {len(slots)} rows, it is not")
                column, shape = columns[place], tuple(found["row_shapes"][place])
                tree[name] = store = self.stores.like(found["kinds"][place], prefix + name, column, shape, self.slots)
                store.load_column(slots, column)
            return tree

        self.tree = grow(found["tree"], "")


def leaves_of(held: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Store]]:
    """Walk over the stores of a tree with their names from there on."""
    if isinstance(held, Store):
        yield path, held
        return
    for name, inner in held.items():
        yield from leaves_of(inner, (*path, name))


def _nbytes_of(held: Any) -> int:
    """Sum up the bytes of the stores of a tree: a service does before each sample."""
    return sum([_nbytes_of(inner) for inner in held.values()]) if type(held) is dict else int(held.nbytes)


def _one_row(value: Any) -> Any:
    """Give one row's value a leading axis."""
    kind = KINDS[type(value)]
    if kind in (ARRAY, TENSOR):
        return value[None]
    return np.asarray(value)[None] if kind == FOREIGN else [value]


# Reading


def show(value: Any) -> Any:
    """Turn rows into values of a batch: columns that are neither arrays nor ragged become arrays of objects."""
    return value.to_numpy() if isinstance(value, Column) and not isinstance(value, VaryingRows) else value


def map_stores(held: Any, function: Callable[[Store], Any]) -> Any:
    """Apply a function to each store, and nest the results as the stores are."""
    if type(held) is dict:
        return node(Batch, {name: map_stores(inner, function) for name, inner in held.items()})
    return function(held)


def take_rows(held: Any, slots: npt.NDArray[np.intp]) -> Any:
    """Gather the rows of slots of any shape into new memory, nested as they are stored."""
    if type(held) is dict:
        return node(Batch, {name: take_rows(inner, slots) for name, inner in held.items()})
    found = held.take(slots)
    return found if type(found) is np.ndarray else show(found)


def copy_rows(held: Any, ranges: list[Range], jobs: list[threads.Job]) -> Any:
    """Allocate room for ranges of slots, nested as they are stored, and collect the jobs that fill it."""
    if type(held) is dict:
        return node(Batch, {name: copy_rows(inner, ranges, jobs) for name, inner in held.items()})
    out, own = held.plan_copy(ranges)
    if own:
        jobs += own
    return out if type(out) is np.ndarray else show(out)


def first_row(value: Any) -> Any:
    """Take the only row of values: numbers as arrays of no dimension, objects as they are."""
    if KINDS[type(value)] == NODE:
        return node(Batch, {name: first_row(inner) for name, inner in value.__dict__.items()})
    if type(value) is np.ndarray and value.dtype.kind != "O":
        return value.reshape(value.shape[1:])
    return value[0]

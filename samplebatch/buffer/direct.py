"""The shortest way from a batch to its slots, for batches that look as the last one did.

Whoever steps environments adds the same columns, of the same dtypes and shapes, again and again. Once a batch has gone
the long way, where every column is looked at and converted, those like it are checked and written here with a handful
of operations a column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import KINDS, NODE
from samplebatch.buffer.finals import Finals
from samplebatch.buffer.ring import Added
from samplebatch.buffer.store import DenseStore

if TYPE_CHECKING:
    from samplebatch.buffer.table import Table

_Column = tuple[str, np.dtype[Any], tuple[int, ...], npt.NDArray[Any]]
"""Name, dtype and shape of a value, and the array of all slots that it goes to."""

_Group = tuple[tuple[str, ...], int, list[_Column]]
"""Names from the root to a nested batch, how many names it has, and its columns."""

_ndarray = np.ndarray
_FLAG = np.dtype(np.bool_)
_count = np.count_nonzero
_or = np.logical_or
_MADE = ("rew", "terminated", "truncated", "done")


class Direct:
    """Where the values of a batch go, and what they must be for that; `found` makes one.

    Parameters
    ----------
    table
        The table whose columns they are.
    groups
        The columns, nested batch by nested batch.
    finals
        Next observations, if only the final ones are kept.
    lead
        Rows of the batch, one for each ring, in a tuple; an empty one for a single row without a leading axis.
    names
        The names that the batch has.

    Attributes
    ----------
    single
        Whether it is for `add_one`; otherwise it is for `add`.
    """

    __slots__ = (
        "_columns", "_done", "_finals", "_flags", "_groups", "_kept", "_names", "_rew", "_rew_shape", "_rings",
        "_table", "_terminated", "_truncated", "_with_done", "single",
    )  # fmt: skip

    def __init__(
        self, table: Table, groups: list[_Group], finals: list[_Group], lead: tuple[int, ...], names: set[str]
    ) -> None:
        values = {name: table.columns.tree[name].values for name in _MADE}
        self._rew, self._terminated, self._truncated, self._done = values.values()
        self._rew_shape = (*lead, *self._rew.shape[1:])
        self._flags = lead
        self.single = not lead
        self._names = len(names)
        self._with_done = "done" in names
        self._columns = groups[0][2]
        self._groups = groups[1:]
        self._finals = finals
        self._kept: Finals | None = table.finals
        self._rings = table.rings
        self._table = table

    @classmethod
    def found(cls, table: Table, held: dict[str, Any], n: int | None) -> Self | None:
        """Look for a direct way for batches like one that has just been added; None if there is none.

        Parameters
        ----------
        n
            Rows of the batch, one for each ring; None for a single row without a leading axis.
        """
        lead = () if n is None else (n,)
        names = set(held)
        if table.journal is not None or table.last_frame or not names >= {"rew", "terminated", "truncated"}:
            return None
        if not {*names, "done"} >= table.columns.tree.keys():
            return None
        finals: list[_Group] = []
        rest = {name: value for name, value in held.items() if name not in _MADE}
        if table.finals is not None and "obs_next" in rest:
            found = _groups({"obs_next": rest.pop("obs_next")}, table.finals.columns.tree, lead, ())
            if found is None:
                return None
            finals = found
        elif table.finals is not None:
            return None
        groups = _groups(rest, table.columns.tree, lead, ())
        rew = table.columns.tree["rew"]
        if groups is None or type(rew) is not DenseStore:
            return None
        return cls(table, groups, finals, lead, names)

    def add_one(self, held: dict[str, Any]) -> tuple[int, Any, int, int] | None:
        """Add a row to the only ring, or return None if it must go the long way."""
        if len(held) != self._names:
            return None
        try:
            for name, dtype, shape, _ in self._columns:
                value = held[name]
                if type(value) is not _ndarray or value.dtype is not dtype or value.shape != shape:
                    return None
            rew, terminated, truncated = held["rew"], held["terminated"], held["truncated"]
            if type(rew) is not _ndarray or rew.shape != self._rew_shape or rew.dtype.kind not in "fiub":
                return None
            if type(terminated) is not _ndarray or terminated.shape or terminated.dtype.kind not in "biuf":
                return None
            if type(truncated) is not _ndarray or truncated.shape or truncated.dtype.kind not in "biuf":
                return None
            if self._with_done and "done" not in held:
                return None
            if (self._groups or self._finals) and not self._all_fit(held):
                return None
        except (KeyError, AttributeError):
            return None
        rings = self._rings
        slot = rings.cursor
        finals = self._kept
        if finals is not None:
            finals.release(slot)
        for name, _, _, memory in self._columns:
            memory[slot] = held[name]
        self._rew[slot] = rew
        self._terminated[slot] = terminated
        self._truncated[slot] = truncated
        done = True if terminated else bool(truncated)
        self._done[slot] = done
        if self._groups:
            self._write(self._groups, held, slot)
        if finals is not None:
            self._write(self._finals, held, 0)
            finals.owners[0] = slot + 1
            if truncated and not terminated:
                self._keep(finals, np.array([0]), np.array([slot]))
        return rings.advance_one(done, rew if rew.shape else rew.item())

    def add(self, held: dict[str, Any]) -> Added | None:
        """Add a row to each ring, or return None if they must go the long way."""
        if len(held) != self._names:
            return None
        try:
            for name, dtype, shape, _ in self._columns:
                value = held[name]
                if type(value) is not _ndarray or value.dtype is not dtype or value.shape != shape:
                    return None
            rew, terminated, truncated = held["rew"], held["terminated"], held["truncated"]
            if type(rew) is not _ndarray or rew.shape != self._rew_shape or rew.dtype.kind not in "fiub":
                return None
            flags = self._flags
            if type(terminated) is not _ndarray or terminated.shape != flags or terminated.dtype is not _FLAG:
                return None
            if type(truncated) is not _ndarray or truncated.shape != flags or truncated.dtype is not _FLAG:
                return None
            if self._with_done and "done" not in held:
                return None
            if (self._groups or self._finals) and not self._all_fit(held):
                return None
        except (KeyError, AttributeError):
            return None
        rings = self._rings
        slots: Any = rings.targets(None)
        if type(slots) is int:
            slots = slice(slots, slots + 1)
        finals = self._kept
        if finals is not None:
            finals.release(slots)
        for name, _, _, memory in self._columns:
            memory[slots] = held[name]
        self._rew[slots] = rew
        self._terminated[slots] = terminated
        self._truncated[slots] = truncated
        done = _or(terminated, truncated)
        self._done[slots] = done
        if self._groups:
            self._write(self._groups, held, slots)
        found = rings.advance(None, done, rew)
        if finals is not None:
            self._write(self._finals, held, slice(0, rings.n))
            finals.owners[: rings.n] = found[0] + 1
            cut = truncated & ~terminated
            if _count(cut):
                self._keep(finals, np.flatnonzero(cut), found[0][cut])
        return found

    def _all_fit(self, held: dict[str, Any]) -> bool:
        """Tell whether what is nested, and next observations, are as they must be."""
        for path, count, columns in (*self._groups, *self._finals):
            inner = held
            for name in path:
                inner = inner[name].__dict__
            if path and len(inner) != count:
                return False
            for name, dtype, shape, _ in columns:
                value = inner[name]
                if type(value) is not _ndarray or value.dtype is not dtype or value.shape != shape:
                    return False
        return True

    @staticmethod
    def _write(groups: list[_Group], held: dict[str, Any], slots: Any) -> None:
        for path, _, columns in groups:
            inner = held
            for name in path:
                inner = inner[name].__dict__
            for name, _, _, memory in columns:
                memory[slots] = inner[name]

    def _keep(self, finals: Finals, rings: npt.NDArray[np.intp], slots: npt.NDArray[np.intp]) -> None:
        before = finals.columns
        finals.keep_from(rings, slots)
        if finals.columns is not before:
            self._table.forget_ways()


def _groups(held: dict[str, Any], tree: Any, lead: tuple[int, ...], path: tuple[str, ...]) -> list[_Group] | None:
    """Pair the values of a batch with the stores they went to, or return None if one is not of arrays."""
    columns: list[_Column] = []
    inner: list[_Group] = []
    for name, value in held.items():
        store = tree[name]
        if type(store) is DenseStore and type(value) is _ndarray and value.dtype is store.dtype:
            columns.append((name, store.dtype, (*lead, *store.row_shape), store.values))
            continue
        if KINDS[type(value)] != NODE or type(store) is not dict or store.keys() != value.__dict__.keys():
            return None
        found = _groups(value.__dict__, store, lead, (*path, name))
        if found is None:
            return None
        inner += found
    return [(path, len(held), columns), *inner]

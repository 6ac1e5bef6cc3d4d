"""Storage of the final observations of episodes, for buffers that do not store next observations.

The next observation of a step is the observation of the following step, except for a truncated step and for the newest
step of a running episode. Learners do not use the next observation of a terminated step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import KINDS, NODE, RAGGED
from samplebatch.buffer.columns import Columns, Ready, leaves_of, take_rows
from samplebatch.buffer.store import Slots
from samplebatch.buffer.stores import Stores

Ints = npt.NDArray[np.intp]

NAME = "obs_next"
"""Column name of the observations."""

OWNER = "obs_next/owner"
"""Column name of the owners of rows."""

_SPARE = 16
_count = np.count_nonzero


class FinalObservations:
    """Store of a table's bootstrap observations: the observations after each ring's newest step and each truncation.

    Every step that is added to ring k overwrites row k. If the step is truncated, row k is also copied to a permanent
    row, which is freed when the step is overwritten. `owners` contains the slot of the step to which each row belongs,
    plus one; 0 for a free row.
    """

    __slots__ = ("_moved", "_row_of", "_spare", "columns", "num_permanent", "owners", "rings", "slots")

    def __init__(self, rings: int, slots: int, stores: Stores, moved: Callable[[], None]) -> None:
        self.rings = rings
        self._moved = moved
        self.slots = slots
        self._lay_out(Columns(rings + _SPARE, stores.for_final_observations()))

    def _lay_out(self, columns: Columns, owners: npt.NDArray[np.int64] | None = None) -> None:
        """Store final observations in the given columns; copy the given row owners, if any."""
        store = columns.stores.make(OWNER, np.zeros(0, np.int64), columns.slots)
        if owners is not None:
            store.write(slice(0, len(owners)), store.fit(owners, len(owners)))
        self.adopt(columns, store.values)

    def adopt(self, columns: Columns, owners: npt.NDArray[np.int64]) -> None:
        """Store final observations in the given columns, and row owners in the given array, without a copy."""
        self.columns = columns
        self._moved()
        # Slot plus one, so that zeros of new memory mean no owner.
        self.owners: npt.NDArray[np.int64] = owners
        self._row_of = np.zeros(self.slots, np.int32)
        permanent = np.flatnonzero(self.owners[self.rings :]) + self.rings
        self._row_of[self.owners[permanent] - 1] = permanent
        self.num_permanent = len(permanent)
        self._spare: list[int] = (np.flatnonzero(self.owners[self.rings :] == 0) + self.rings)[::-1].tolist()

    @property
    def known(self) -> bool:
        """Whether any observation has been stored."""
        return NAME in self.columns.tree

    def fit(self, obs_next: Any, n: int, *, single: bool) -> Ready:
        """Validate and convert the next observations of n steps, without changes to the store."""
        return self.columns.fit({NAME: obs_next}, n, single=single)

    def rows_for(self, cut: int) -> list[int]:
        """Return `cut` free rows for observations after truncations; allocate rows if fewer are free."""
        while len(self._spare) < cut:
            self._grow()
        return self._spare[len(self._spare) - cut :]

    def rows_touched(self, slots: Slots, cut: int) -> Ints:
        """Return the permanent rows that would change if steps with `cut` truncations were written to slots."""
        released = np.atleast_1d(self._row_of[slots])
        free = self.rows_for(cut) + released[released > 0].tolist()
        return np.array(sorted({*free[len(free) - cut :], *released[released > 0].tolist()}), np.intp)

    def _grow(self) -> None:
        before = self.columns
        state = before.state_dict(np.arange(before.slots))
        columns = Columns(2 * before.slots, before.stores)
        columns.load_state_dict(np.arange(before.slots), state)
        self._lay_out(columns, self.owners)

    def write(self, prepared: Ready, rings: Slots, slots: Ints, cut: npt.NDArray[np.bool_]) -> None:
        """Write next observations that `fit` returned."""
        self.columns.write(prepared, rings)
        self.owners[rings] = slots + 1
        if _count(cut):
            numbers = np.arange(self.rings)[rings] if not isinstance(rings, int) else np.array([rings])
            self.keep_from(numbers[cut], slots[cut])

    def keep_from(self, sources: Ints, slots: Ints) -> None:
        """Copy the rows of the rings `sources` to permanent rows, which are freed when `slots` are overwritten."""
        rows = [(store, store.take(sources)) for _, store in leaves_of(self.columns.tree[NAME])]
        self.keep(Ready([(store, store.fit(values, len(slots))) for store, values in rows], []), slots)

    def keep_newest(self, ring: int, slots: Ints) -> None:
        """Copy a ring's row to permanent rows for `slots` if the row belongs to `slots[0]` and is not permanent yet."""
        if self.known and len(slots) and self.owners[ring] == slots[0] + 1 and not self._row_of[slots[0]]:
            self.keep_from(np.array([ring]), slots)

    def keep(self, prepared: Ready, slots: Ints) -> None:
        """Write next observations, as returned by `fit`, to permanent rows; overwriting `slots` frees these rows."""
        free_rows = self.rows_for(len(slots))
        del self._spare[len(self._spare) - len(free_rows) :]
        rows = np.array(free_rows, np.intp)
        # The stores are replaced if more rows were allocated.
        by_name = {store.name: store for _, store in self.columns.leaves()}
        self.columns.write(
            Ready([(by_name.get(store.name, store), row) for store, row in prepared.rows], prepared.new), rows
        )
        self.owners[rows] = slots + 1
        self._row_of[slots] = rows
        self.num_permanent += len(rows)

    def release(self, slots: Slots) -> None:
        """Free the permanent rows of overwritten slots."""
        if not self.num_permanent:
            return
        rows = np.atleast_1d(self._row_of[slots])
        rows = rows[rows > 0]
        if len(rows):
            self._row_of[slots] = 0
            self.owners[rows] = 0
            self._spare += rows.tolist()
            self.num_permanent -= len(rows)

    def forget(self, start: int, stop: int) -> None:
        """Free all final observations of the slots from `start` to `stop`."""
        self.release(slice(start, stop))
        self.owners[: self.rings][(self.owners[: self.rings] > start) & (self.owners[: self.rings] <= stop)] = 0

    def has_rows(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots that have permanent rows."""
        is_stored: npt.NDArray[np.bool_] = self._row_of[slots] > 0
        return is_stored

    def find(self, slots: Ints, rings: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return one row of this store per slot, shape (k,), and whether each row belongs to its slot."""
        rows = self._row_of[slots].astype(np.intp)
        rows = np.where(rows > 0, rows, rings)
        is_valid: npt.NDArray[np.bool_] = self.owners[rows] == slots + 1
        return rows, is_valid

    def take(self, rows: Ints, path: tuple[str, ...] = ()) -> Any:
        """Gather observations, or only the values that are nested under a path of names."""
        tree = self.columns.tree[NAME]
        for name in path:
            tree = tree[name]
        return take_rows(tree, rows)

    # State

    def state_dict(self, start: int, stop: int, ring: int | None = None) -> dict[str, Any]:
        """Return the final observations of slots from `start` to `stop`, for `load_state_dict`."""
        rows = np.flatnonzero((self.owners > start) & (self.owners <= stop))
        rings = self.rings if ring is None else 1
        ring_count = int(_count(rows < self.rings))
        of_rings = rows[:ring_count] if ring is None else rows[:ring_count] * 0
        positions = np.concatenate([of_rings, rings + np.arange(len(rows) - ring_count)])
        room = rings + max(_SPARE, len(rows) - ring_count)
        owners = self.owners[rows] - start
        return {"rows": positions, "owners": owners, "room": room, "found": self.columns.state_dict(rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        rows = np.asarray(state["rows"], np.intp)
        columns = Columns(int(state["room"]), self.columns.stores)
        columns.load_state_dict(rows, state["found"])
        owners = np.zeros(columns.slots, np.int64)
        owners[rows] = state["owners"]
        self._lay_out(columns, owners)


def patch(values: Any, where: Any, finals: Any) -> Any:
    """Overwrite gathered observations at the given positions with equally nested final observations."""
    if KINDS[type(values)] == NODE:
        for name, inner in values.__dict__.items():
            values.__dict__[name] = patch(inner, where, finals.__dict__[name])
        return values
    if KINDS[type(values)] == RAGGED:
        return values.replace(where[0], finals, NAME)
    if KINDS[type(finals)] == RAGGED:
        finals = finals.to_numpy()
    values[where] = finals
    return values

"""Checks of a buffer's state that comes from outside: rings, final observations, the structure of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from samplebatch.buffer.columns import leaves_of
from samplebatch.buffer.final_observations import NAME
from samplebatch.buffer.fragments import FRAGMENT_END, Form
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Rings
from samplebatch.buffer.table import Table
from samplebatch.buffer.writing import FLAGS
from samplebatch.errors import FormatError
from samplebatch.names import PolicyID

State = dict[str, Any]
"""Plain values, arrays, tensors and columns by name; of no class of the library's but columns."""

_RINGS = ("maxsizes", "cursors", "sizes", "writes", "began", "starts", "origins")


def check_structure(tree: Any, count: int) -> None:
    """Check that the nesting of columns names each of them once.

    Raises
    ------
    FormatError
        If it does not.
    """
    places: list[Any] = []
    left = [tree]
    while left:
        inner = left.pop()
        if isinstance(inner, dict) and all(isinstance(name, str) for name in inner):
            left += inner.values()
        else:
            places.append(inner)
    if any(type(place) is not int for place in places) or sorted(places) != list(range(count)):
        raise FormatError(f"the structure of {count} columns must name each of them once, it does not; it is damaged")


def check_rings(state: Mapping[str, Any]) -> None:
    """Check that the cursors, sizes and episodes of rings lie within their slots.

    Raises
    ------
    FormatError
        If it is not.

    Examples
    --------
    >>> state = Rings([4]).state_dict()
    >>> check_rings(state)
    >>> check_rings(state | {"cursors": np.array([7])})
    Traceback (most recent call last):
    samplebatch.errors.FormatError: the state of rings must have cursors and sizes within their slots, it has not; ...
    """
    try:
        parts = {name: np.asarray(state[name]) for name in _RINGS}
        returns, together = np.asarray(state["returns"], np.float64), bool(state["together"])
        n = len(parts["maxsizes"])
        if not n or any(part.shape != (n,) or part.dtype.kind not in "iu" for part in parts.values()):
            raise ValueError("its parts must be whole numbers, one for each ring")
        if returns.shape[:1] != (n,):
            raise ValueError("it must have a return for each ring")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the state of rings must be whole, it is not: {error}") from error
    maxsizes, cursors, sizes, writes, began, starts, origins = (part.astype(np.int64) for part in parts.values())
    bases = np.cumsum(maxsizes) - maxsizes
    places = starts - bases
    inside = (
        (maxsizes >= 0)
        & (sizes >= 0)
        & (sizes <= maxsizes)
        & (cursors >= 0)
        & (cursors < np.maximum(maxsizes, 1))
        & ((sizes == maxsizes) | (cursors == sizes))
        & (places >= 0)
        & (places < np.maximum(maxsizes, 1))
        & (writes - origins >= sizes)
        & (origins >= 0)
        & (began <= writes)
    )
    alike = all(len(set(part.tolist())) == 1 for part in (maxsizes, cursors, sizes, writes))
    if not inside.all() or (together and not alike):
        raise FormatError(
            "the state of rings must have cursors and sizes within their slots, it has not; it is damaged"
        )


def check_finals(rows: Any, owners: Any, room: int, rings: Rings) -> None:
    """Check that final observations have rows of their own, and belong to slots.

    Parameters
    ----------
    rows, owners
        For each observation its row, and one more than the slot that it belongs to.
    room
        How many rows there are.

    Raises
    ------
    FormatError
        If they do not.
    """
    own = len(set(rows.tolist())) == len(rows) == len(owners)
    inside = ((rows >= 0) & (rows < room)).all() and ((owners > 0) & (owners <= rings.capacity)).all()
    if not own or not inside or not rings.n <= room <= len(rows) + 2 * rings.n + 64:
        raise FormatError("final observations must have rows of their own for slots, they have not; it is damaged")


def check_flags(table: Table) -> None:
    """Check that a table with rows has the flags by which episodes are told apart, a truth value each.

    Raises
    ------
    FormatError
        If it has not; names the column.
    """
    if len(table.rings):
        for name in (*FLAGS, "done"):
            _check_flag(table, name)


def _check_flag(table: Table, name: str) -> None:
    store = table.columns.tree.get(name)
    values = getattr(store, "values", None)
    if not isinstance(values, np.ndarray) or values.dtype != np.bool_ or values.shape != (table.rings.capacity,):
        raise FormatError(f"column {name!r} of a buffer must have a flag for each row, it has not; it is damaged")


def check_fragments(buffers: Mapping[PolicyID, ReplayBuffer], forms: Mapping[PolicyID, Form]) -> None:
    """Check that rows of policies have the columns from which they are handed out as they were added.

    Raises
    ------
    FormatError
        If they have not; names the policy or the column.
    """
    for policy, buffer in buffers.items():
        table = buffer._table
        if policy not in forms:
            raise FormatError(f"policy {policy!r} must have a form of its rows, it has none; it is damaged")
        if not len(table.rings):
            continue
        _check_flag(table, FRAGMENT_END)
        rewards = table.columns.tree.get("rew")
        if rewards is None or isinstance(rewards, dict) or {_kind(rewards), forms[policy].rewards.kind} - set("biuf"):
            raise FormatError(f"column 'rew' of policy {policy!r} must have a number for each row; it is damaged")


def _kind(store: Any) -> str:
    """Return the kind of a store's dtype."""
    kind: str = store.to_column(np.zeros(0, np.intp)).to_numpy().dtype.kind
    return kind


def check_final_shapes(table: Table) -> None:
    """Check that final observations have the names and row shapes of observations, which they replace.

    Raises
    ------
    FormatError
        If they have not; names the column.
    """
    if table.finals is None or not table.finals.known or "obs" not in table.columns.tree:
        return
    none = np.zeros(0, np.intp)
    shapes = [
        {path: store.to_column(none).row_shape for path, store in leaves_of(columns.tree[name])}
        for columns, name in ((table.columns, "obs"), (table.finals.columns, NAME))
    ]
    for path, shape in shapes[0].items():
        if shapes[1].get(path) != shape:
            name = ".".join((NAME, *path))
            raise FormatError(f"column {name!r} must have rows of shape {shape} as observations have, it has not")

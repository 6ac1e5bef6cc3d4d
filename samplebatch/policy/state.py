"""Recurrent states of policies: an array, a tensor, or a tree of them, with a row for each environment.

A tree consists of tuples, lists, dicts and batches, those of other libraries included. A policy gets its own kind back.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.functions import to_numpy
from samplebatch.batch.nested.node import ARRAY, KINDS, NODE, RECORD, TENSOR, node, values_of
from samplebatch.env.infos import Rows
from samplebatch.errors import PolicySpecError


def zero_rows(state: Any, rows: Rows) -> Any:
    """Return a state that is zero in some rows, where episodes begin; None stays None.

    Examples
    --------
    >>> zero_rows((np.ones((3, 1)), np.ones(3)), np.array([1]))[1]
    array([1., 0., 1.])
    """

    def zero(leaf: Any) -> Any:
        if leaf is None:
            return None
        # The policy may hold on to what it returned.
        kept = leaf.clone() if KINDS[type(leaf)] == TENSOR else leaf.copy()
        kept[rows] = 0
        return kept

    return _map_leaves(state, zero)


def check(state: Any, rows: int) -> None:
    """Refuse a state without a row for each of so many environments."""

    def check_leaf(leaf: Any) -> None:
        if leaf is not None and (not leaf.ndim or len(leaf) != rows):
            raise PolicySpecError(
                f"a policy's state must have a row for each of {rows} environments, got shape {tuple(leaf.shape)}; "
                "return a dict, not a Batch, if the state is a tuple: a Batch would stack it"
            )

    _map_leaves(state, check_leaf)


def detach(state: Any) -> Any:
    """Return a copy of a state without the operations that gradients would go back through; None stays None."""

    def copy_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        return leaf.detach().clone() if KINDS[type(leaf)] == TENSOR else leaf.copy()

    return _map_leaves(state, copy_leaf)


def zeros_like(state: Any) -> Any:
    """Return a state of zeros of the same form."""
    return _map_leaves(state, lambda leaf: leaf * 0)


def take(state: Any, rows: Rows) -> Any:
    """Return some rows of a state; None stays None."""
    return _map_leaves(state, lambda leaf: None if leaf is None else leaf[rows])


def put(state: Any, rows: Rows, new: Any, count: int) -> Any:
    """Return the state of `count` environments in which some rows are new; zeros where there was none before."""

    def join(given: Any, leaf: Any) -> Any:
        if given is None:
            return None
        tensor = KINDS[type(given)] == TENSOR
        if leaf is None:
            shape = (count, *given.shape[1:])
            leaf = given.new_zeros(shape) if tensor else np.zeros(shape, given.dtype)
        kept = leaf.clone() if tensor else leaf.copy()
        if kept.dtype != given.dtype:
            promote = sys.modules["torch"].promote_types if tensor else np.promote_types
            dtype = promote(kept.dtype, given.dtype)
            kept = kept.to(dtype) if tensor else kept.astype(dtype)
        kept[rows] = given
        return kept

    return _map_leaves(new, join, state, paired=True)


def as_arrays(state: Any) -> Any:
    """Return a state as an array, or as a nested batch of arrays; the items of a tuple get the names `0`, `1`, ..."""
    parts = _parts(state)
    return to_numpy(state) if parts is None else node(Batch, {str(key): as_arrays(part) for key, part in parts})


def columns_of(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns `state_in_0`, `state_in_1`, ... of a state, and `state_in.key` for dicts, as arrays."""
    if isinstance(state, (tuple, list)):
        for place, part in enumerate(state):
            yield from _name_leaves(f"{names.STATE_IN}_{place}", part)
    elif values_of(state) is not None:
        yield from _name_leaves(names.STATE_IN, state)
    else:
        yield f"{names.STATE_IN}_0", to_numpy(state)


def state_of(rows: Batch) -> Any:
    """Return the state that `columns_of` stored with rows, in the form that the policy gave it; None if there is none.

    A tuple of a single item comes back as that item: both are stored as `state_in_0`.

    Examples
    --------
    >>> state_of(Batch(obs=[0, 1], state_in={"h": [0.0, 0.5], "c": [0.0, 0.25]})).h
    array([0. , 0.5])
    >>> state_of(Batch(obs=[0, 1], state_in_0=[0.0, 0.5], state_in_1=[0.0, 0.25]))
    (array([0. , 0.5]), array([0.  , 0.25]))
    """
    columns = rows.__dict__
    if names.STATE_IN in columns:
        return columns[names.STATE_IN]
    items = tuple(takewhile(lambda item: item is not None, map(columns.get, _numbered_names())))
    return items if len(items) > 1 else items[0] if items else None


def _numbered_names() -> Iterator[str]:
    return (f"{names.STATE_IN}_{position}" for position in count())


def _name_leaves(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    parts = _parts(state)
    if parts is None:
        yield name, to_numpy(state)
        return
    for key, part in parts:
        yield from _name_leaves(f"{name}.{key}", part)


def _parts(state: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(state, (tuple, list)):
        return list(enumerate(state))
    named = values_of(state)
    return None if named is None else list(named.items())


def _map_leaves(state: Any, function: Callable[..., Any], other: Any = None, *, paired: bool = False) -> Any:
    """Apply a function to each leaf of a state; if `paired`, also to the leaf in its place in another one."""
    parts = _parts(state)
    if parts is None:
        if state is not None and KINDS[type(state)] not in (ARRAY, TENSOR):
            raise PolicySpecError(
                f"a policy's state must be an array, a tensor or a tree of them, got a {type(state).__name__}"
            )
        return function(state, other) if paired else function(state)
    others = dict(_parts(other) or ()) if other is not None else {}
    made = {key: _map_leaves(part, function, others.get(key), paired=paired) for key, part in parts}
    if isinstance(state, (tuple, list)):
        return type(state)(made.values()) if type(state) in (tuple, list) else type(state)(*made.values())
    kind = KINDS[type(state)]
    if kind == RECORD:
        make: Any = type(state)
        return make(**made) if dataclasses.is_dataclass(state) else make(made)
    return node(Batch, made) if kind == NODE else made

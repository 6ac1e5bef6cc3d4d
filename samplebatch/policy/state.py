"""Recurrent states of policies: arrays, tensors, or trees of arrays and tensors, with one row per environment.

Trees consist of tuples, lists, dicts and batches, including batches of other libraries. Functions of this module that
return a state preserve the types of the state that is passed.
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
    """Return a copy of a state with zeros in the rows in which episodes start; None if the state is None.

    >>> zero_rows((np.ones((3, 1)), np.ones(3)), np.array([1]))[1]
    array([1., 0., 1.])
    """

    def zero(leaf: Any) -> Any:
        if leaf is None:
            return None
        # A copy, because the policy may still refer to the state that it returned.
        copy = leaf.clone() if KINDS[type(leaf)] == TENSOR else leaf.copy()
        copy[rows] = 0
        return copy

    return _map_leaves(state, zero)


def check(state: Any, rows: int) -> None:
    """Check that a state has one row per environment.

    Raises PolicySpecError if a leaf is not an array or tensor with `rows` rows.
    """

    def check_leaf(leaf: Any) -> None:
        if leaf is not None and (not leaf.ndim or len(leaf) != rows):
            raise PolicySpecError(
                f"a policy's state must have one row for each of {rows} environments, got shape {tuple(leaf.shape)}; "
                "if the state is a tuple, return a dict, because a Batch would stack it"
            )

    _map_leaves(state, check_leaf)


def detach(state: Any) -> Any:
    """Return a copy of a state that is detached from the autograd graph; None if the state is None."""

    def copy_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        return leaf.detach().clone() if KINDS[type(leaf)] == TENSOR else leaf.copy()

    return _map_leaves(state, copy_leaf)


def zeros_like(state: Any) -> Any:
    """Return a state of zeros with the same structure as a state."""
    return _map_leaves(state, lambda leaf: leaf * 0)


def take(state: Any, rows: Rows) -> Any:
    """Select rows of a state; None if the state is None."""
    return _map_leaves(state, lambda leaf: None if leaf is None else leaf[rows])


def put(state: Any, rows: Rows, new: Any, count: int) -> Any:
    """Return a copy of the state of `count` environments with some rows replaced; a state of None represents zeros."""

    def merge(new_leaf: Any, leaf: Any) -> Any:
        if new_leaf is None:
            return None
        is_tensor = KINDS[type(new_leaf)] == TENSOR
        if leaf is None:
            shape = (count, *new_leaf.shape[1:])
            leaf = new_leaf.new_zeros(shape) if is_tensor else np.zeros(shape, new_leaf.dtype)
        merged = leaf.clone() if is_tensor else leaf.copy()
        if merged.dtype != new_leaf.dtype:
            promote = sys.modules["torch"].promote_types if is_tensor else np.promote_types
            dtype = promote(merged.dtype, new_leaf.dtype)
            merged = merged.to(dtype) if is_tensor else merged.astype(dtype)
        merged[rows] = new_leaf
        return merged

    return _map_leaves(new, merge, state, paired=True)


def as_arrays(state: Any) -> Any:
    """Convert a state to an array or a nested batch of arrays; items of tuples are named `0`, `1`, ..."""
    parts = _parts(state)
    return to_numpy(state) if parts is None else node(Batch, {str(key): as_arrays(part) for key, part in parts})


def columns_of(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns `state_in_0`, `state_in_1`, ... of a state, and `state_in.key` for dicts, as arrays."""
    if isinstance(state, (tuple, list)):
        for position, part in enumerate(state):
            yield from _name_leaves(f"{names.STATE_IN}_{position}", part)
    elif values_of(state) is not None:
        yield from _name_leaves(names.STATE_IN, state)
    else:
        yield f"{names.STATE_IN}_0", to_numpy(state)


def state_of(rows: Batch) -> Any:
    """Return the state that `columns_of` stored with rows, in the policy's structure; None if no state is stored.

    A tuple with a single item is returned as the item, because a tuple and an item are stored equally, as `state_in_0`.

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
    """Apply a function to each leaf of a state; if `paired`, also pass the leaf at the same path of `other`."""
    parts = _parts(state)
    if parts is None:
        if state is not None and KINDS[type(state)] not in (ARRAY, TENSOR):
            raise PolicySpecError(
                f"a policy's state must be an array, a tensor or a tree of both, got a {type(state).__name__}"
            )
        return function(state, other) if paired else function(state)
    other_parts = dict(_parts(other) or ()) if other is not None else {}
    mapped = {key: _map_leaves(part, function, other_parts.get(key), paired=paired) for key, part in parts}
    if isinstance(state, (tuple, list)):
        return type(state)(mapped.values()) if type(state) in (tuple, list) else type(state)(*mapped.values())
    kind = KINDS[type(state)]
    if kind == RECORD:
        record_type: Any = type(state)
        return record_type(**mapped) if dataclasses.is_dataclass(state) else record_type(mapped)
    return node(Batch, mapped) if kind == NODE else mapped

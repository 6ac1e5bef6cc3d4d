"""Whether two nested batches are the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from samplebatch.batch.nested.distributions import same_distribution
from samplebatch.batch.nested.node import ARRAY, DISTRIBUTION, FOREIGN, KINDS, NODE, NUMBER, TENSOR, Node

_ndarray = np.ndarray
_FIRST_OBJECT = np.dtype(object).num


def same(a: Node, b: Node) -> bool:
    """Tell whether two trees have the same names and, under each, values of the same type, dtype, shape and elements.

    The order of names does not matter. NaN equals nothing, as in NumPy.
    """
    if a is b and not a.__dict__:
        return True
    mine, theirs = a.__dict__, b.__dict__
    if mine.keys() != theirs.keys():
        return False
    for name, value in mine.items():
        other = theirs[name]
        if type(value) is _ndarray and type(other) is _ndarray and value.dtype.num < _FIRST_OBJECT:
            if value.dtype != other.dtype or value.shape != other.shape or not (value == other).all():
                return False
        elif not _same_leaf(value, other):
            return False
    return True


def _same_leaf(value: Any, other: Any) -> bool:
    kind, other_kind = KINDS[type(value)], KINDS[type(other)]
    if NUMBER in (kind, other_kind) and {kind, other_kind} <= {NUMBER, ARRAY}:
        # A number out of a row is the array of no dimension that it becomes when it is put into a batch.
        value, other, kind = np.asarray(value), np.asarray(other), ARRAY
    elif kind != other_kind:
        return False
    if kind == NODE:
        return same(value, other)
    if kind == TENSOR:
        import torch

        return value.dtype == other.dtype and value.device == other.device and torch.equal(value, other)
    if kind in (ARRAY, FOREIGN):
        if value.dtype != other.dtype or value.shape != other.shape:
            return False
        if value.dtype.kind != "O":
            return bool((value == other).all())
        return all(map(_same_item, value.flat, other.flat))
    if kind == DISTRIBUTION:
        return same_distribution(value, other)
    return type(value) is type(other) and _same_item(value, other)


def _same_item(item: Any, other: Any) -> bool:
    """Compare elements of object arrays: whatever they are, arrays among them by their elements."""
    if item is other:
        return True
    if isinstance(item, dict) and isinstance(other, dict):
        return item.keys() == other.keys() and all(_same_item(value, other[name]) for name, value in item.items())
    if isinstance(item, (list, tuple)) and type(item) is type(other):
        return len(item) == len(other) and all(map(_same_item, item, other))
    if KINDS[type(item)] in (ARRAY, TENSOR, FOREIGN, NODE, DISTRIBUTION):
        return _same_leaf(item, other)
    if KINDS[type(other)] in (ARRAY, TENSOR, FOREIGN):
        return False
    return bool(item == other)

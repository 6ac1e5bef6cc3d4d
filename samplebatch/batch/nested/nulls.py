"""Missing values in nested batches: NaN, NaT and None."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import ARRAY, FOREIGN, KINDS, NODE, NUMBER, TENSOR, Node, node


def _is_null(item: Any) -> bool:
    return item is None or (
        isinstance(item, (float, complex, np.inexact, np.datetime64, np.timedelta64)) and item != item
    )


_are_null = np.frompyfunc(_is_null, 1, 1)


def null_of(value: Any) -> Any:
    """Tell for every element of a leaf whether it is missing; a tensor's answer is a tensor."""
    kind = KINDS[type(value)]
    if kind == TENSOR:
        return value.isnan()
    if kind in (ARRAY, NUMBER, FOREIGN):
        array = np.asarray(value)
        if array.dtype.kind in "fc":
            return np.asarray(np.isnan(array))
        if array.dtype.kind in "mM":
            return np.asarray(np.isnat(array))
        if array.dtype.kind == "O":
            return np.asarray(_are_null(array)).astype(bool)
        return np.zeros(array.shape, bool)
    return np.asarray(_is_null(value))


def nulls(source: Node) -> Node:
    """Return a tree of what `null_of` says of each leaf."""
    kept = {
        name: nulls(value) if KINDS[type(value)] == NODE else null_of(value) for name, value in source.__dict__.items()
    }
    return node(type(source), kept)


def any_null(source: Node) -> bool:
    """Tell whether any element of any leaf is missing."""
    return any(
        any_null(value) if KINDS[type(value)] == NODE else bool(null_of(value).any())
        for value in source.__dict__.values()
    )


def complete_rows(source: Node, length: int) -> npt.NDArray[np.bool_]:
    """Tell for each of the first n rows whether no leaf misses an element of it; shape (n,)."""
    complete = np.ones(length, np.bool_)
    for value in source.__dict__.values():
        if KINDS[type(value)] == NODE:
            complete &= complete_rows(value, length)
            continue
        null = np.asarray(null_of(value))
        if null.ndim == 0:
            complete &= not null
        else:
            complete &= ~null[:length].reshape(length, -1).any(axis=1)
    return complete

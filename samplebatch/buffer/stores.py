"""The choice of a store for each column of a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import KINDS, TENSOR, values_of
from samplebatch.buffer.compressed_store import CompressedStore
from samplebatch.buffer.store import (
    DenseStore,
    ObjectStore,
    RaggedStore,
    Store,
    TorchStore,
    as_rows,
    check_dtype,
    tensor_bits,
)
from samplebatch.column import memory
from samplebatch.column.convert import is_of_arrays
from samplebatch.column.interface import Column
from samplebatch.column.types import NUMBERS
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ArgumentError, ColumnTypeError, near_names
from samplebatch.names import covers

Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Makes the array of all slots, zeroed: takes the column's dotted name, the shape (slots, ...) and the dtype.

When it is asked for a name once more, with more slots, it replaces the array that it made before."""

OBSERVATIONS = ("obs", "obs_next")

_LATER = ("obs_next", "info", "policy")
"""Usual names that a first step need not have."""


def allocate_zeros(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate zeros, 64-byte aligned, of which the system gives no page before it is written to.

    >>> allocate_zeros("obs", (1_000_000, 3), np.dtype("f4")).shape
    (1000000, 3)
    """
    nbytes = dtype.itemsize * prod(shape)
    block = np.zeros(nbytes + memory.ALIGNMENT, np.uint8)
    start = -block.ctypes.data % memory.ALIGNMENT
    return np.ndarray(shape, dtype, block.data, start)


zeroed = allocate_zeros
"""The name that older pickles of buffers have for it."""


@dataclass(frozen=True)
class Stores:
    """The factory of a buffer's stores: their kinds, and the source of their memory.

    Attributes
    ----------
    compress
        Names of columns to keep in LZ4 chunks; a name stands for all that is nested under it, too.
    ragged
        Names of columns whose rows vary in shape, beside observations that come as arrays of arrays.
    max_open
        How many chunks of a compressed column may lie open.
    allocate
        Where the memory of rows of one shape comes from.

    Examples
    --------
    >>> stores = Stores(compress=("obs",), ragged=("info.path",))
    >>> frames, path = np.zeros((1, 84, 84), np.uint8), np.zeros((1, 3))
    >>> [stores.make(name, rows, 9).kind for name, rows in [("obs.camera", frames), ("info.path", path)]]
    ['compressed', 'ragged']
    """

    compress: tuple[str, ...] = ()
    ragged: tuple[str, ...] = ()
    max_open: int = 8
    allocate: Allocate = allocate_zeros

    def check_names(self, *steps: Mapping[str, Any]) -> None:
        """Check that the names of columns stand for some of a buffer's first step, or of several buffers'."""
        if not self.compress and not self.ragged:
            return
        paths = [path for values in steps for path in _paths(values, "")]
        for argument in ("compress", "ragged"):
            for name in getattr(self, argument):
                top = name.partition(".")[0]
                later = top in _LATER and not any(covers((top,), path) for path in paths)
                if not later and not any(covers((name,), path) for path in paths):
                    known = dict.fromkeys([*(own for values in steps for own in values), *paths])
                    raise ArgumentError(
                        f"{argument} must name columns of a step, {name!r} is none; {near_names(name, known)}"
                    )

    def make(self, name: str, first_rows: Any, slots: int) -> Store:
        """Create the store that suits the first rows of a column; they are not written."""
        if covers(self.compress, name):
            return CompressedStore.for_rows(name, first_rows, slots, self.max_open)
        is_ragged = isinstance(first_rows, VaryingRows) or covers(self.ragged, name)
        if is_ragged or (covers(OBSERVATIONS, name) and is_of_arrays(first_rows)):
            return RaggedStore.for_rows(name, first_rows, slots)
        return store_for(name, first_rows, slots, self.allocate)

    def like(self, kind: str, name: str, column: Column, row_shape: tuple[int, ...], slots: int) -> Store:
        """Create an empty store of a kind for the rows of a column that another store's `to_column` returned."""
        if kind == "object":
            return ObjectStore(name, slots, row_shape)
        if kind == "compressed":
            return CompressedStore.for_rows(name, column.slice(0, min(len(column), 1)).to_numpy(), slots, self.max_open)
        if kind == "ragged":
            return RaggedStore.for_rows(name, column, slots)
        return store_for(name, column.to_torch() if kind == "torch" else column.to_numpy(), slots, self.allocate)

    def for_final_observations(self) -> Self:
        """Return the same for final observations: uncompressed, and as ragged under `obs_next` as under `obs`."""
        ragged = (f"obs_next{name[3:]}" for name in self.ragged if covers(("obs",), name))
        return replace(self, compress=(), ragged=(*self.ragged, *ragged))

    def __getstate__(self) -> dict[str, Any]:
        # Memory of another process, or of a file, does not travel.
        return {
            "compress": self.compress,
            "ragged": self.ragged,
            "max_open": self.max_open,
            "allocate": allocate_zeros,
        }


def names_of(given: bool | str | Sequence[str], of_true: tuple[str, ...], argument: str) -> tuple[str, ...]:
    """Turn a user's choice of columns into their names: one or several, or True for the usual ones.

    Examples
    --------
    >>> names_of(True, ("obs",), "compress"), names_of("obs.camera", (), "compress"), names_of(False, (), "compress")
    (('obs',), ('obs.camera',), ())
    """
    if isinstance(given, bool):
        return of_true if given else ()
    names = (given,) if isinstance(given, str) else tuple(given)
    if isinstance(given, Mapping) or not all(isinstance(name, str) for name in names):
        raise ColumnTypeError(f"{argument} must be True, False or names of columns, got {type(given).__name__}")
    return names


def _paths(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Walk over the dotted names of values."""
    for name, value in values.items():
        inner = values_of(value)
        if inner is None:
            yield prefix + name
        else:
            yield from _paths(inner, f"{prefix}{name}.")


def store_for(name: str, first_rows: Any, slots: int, allocate: Allocate = allocate_zeros) -> Store:
    """Create the store that suits the first rows seen of a column; they are not written.

    Examples
    --------
    >>> store_for("rew", np.zeros(2), 10).kind, store_for("info.text", ["a"], 10).kind
    ('dense', 'object')
    """
    if KINDS[type(first_rows)] == TENSOR:
        bits = tensor_bits(first_rows)
        return TorchStore(name, allocate(name, (slots, *bits.shape[1:]), bits.dtype), first_rows.dtype)
    rows = as_rows(first_rows, name)
    if rows.dtype.kind == "O":
        return ObjectStore(name, slots, rows.shape[1:])
    # Not newbyteorder() in any case: dtypes that are one object are told apart fastest.
    dtype = rows.dtype if rows.dtype.isnative else rows.dtype.newbyteorder("=")
    if dtype not in NUMBERS:
        check_dtype(name, dtype)
    return DenseStore(name, allocate(name, (slots, *rows.shape[1:]), dtype))

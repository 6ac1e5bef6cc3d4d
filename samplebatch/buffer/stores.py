"""Selection of a store for each column of a buffer."""

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
"""Allocates the zeroed array of all slots, given the column's dotted name, the shape (slots, ...) and the dtype.

A second call for a name with more slots replaces the first array."""

OBSERVATIONS = ("obs", "obs_next")

_LATER = ("obs_next", "info", "policy")
"""Usual names that the first step may lack."""


def allocate_zeros(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate zeros, 64-byte aligned; the system provides pages when they are written.

    >>> allocate_zeros("obs", (1_000_000, 3), np.dtype("f4")).shape
    (1000000, 3)
    """
    nbytes = dtype.itemsize * prod(shape)
    block = np.zeros(nbytes + memory.ALIGNMENT, np.uint8)
    start = -block.ctypes.data % memory.ALIGNMENT
    return np.ndarray(shape, dtype, block.data, start)


zeroed = allocate_zeros
"""Name of the function in older pickles of buffers."""


@dataclass(frozen=True)
class Stores:
    """Factory of a buffer's stores: store kinds, and source of their memory.

    Attributes
    ----------
    compress
        Names of columns to store in LZ4 chunks; a name includes nested columns.
    ragged
        Names of columns whose rows vary in shape, in addition to observations in arrays of arrays.
    max_open
        Maximum number of open chunks per compressed column.
    allocate
        Allocator for rows of one shape.

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
        """Check that option names match columns of a buffer's first step, or of several buffers'."""
        if not self.compress and not self.ragged:
            return
        paths = [path for values in steps for path in _paths(values, "")]
        for argument in ("compress", "ragged"):
            for name in getattr(self, argument):
                top = name.partition(".")[0]
                later = top in _LATER and not any(covers((top,), path) for path in paths)
                if not later and not any(covers((name,), path) for path in paths):
                    candidates = dict.fromkeys([*(name_in_step for values in steps for name_in_step in values), *paths])
                    raise ArgumentError(
                        f"{argument} must name columns of a step, got {name!r}; {near_names(name, candidates)}"
                    )

    def make(self, name: str, first_rows: Any, slots: int) -> Store:
        """Create the store for the first rows of a column, which are not written."""
        if covers(self.compress, name):
            return CompressedStore.for_rows(name, first_rows, slots, self.max_open)
        is_ragged = isinstance(first_rows, VaryingRows) or covers(self.ragged, name)
        if is_ragged or (covers(OBSERVATIONS, name) and is_of_arrays(first_rows)):
            return RaggedStore.for_rows(name, first_rows, slots)
        return store_for(name, first_rows, slots, self.allocate)

    def like(self, kind: str, name: str, column: Column, row_shape: tuple[int, ...], slots: int) -> Store:
        """Create an empty store of a kind for rows of a column from another store's `to_column`."""
        if kind == "object":
            return ObjectStore(name, slots, row_shape)
        if kind == "compressed":
            return CompressedStore.for_rows(name, column.slice(0, min(len(column), 1)).to_numpy(), slots, self.max_open)
        if kind == "ragged":
            return RaggedStore.for_rows(name, column, slots)
        return store_for(name, column.to_torch() if kind == "torch" else column.to_numpy(), slots, self.allocate)

    def for_final_observations(self) -> Self:
        """Return a factory for final observations: uncompressed, and ragged under `obs_next` if ragged under `obs`."""
        ragged = (f"obs_next{name[3:]}" for name in self.ragged if covers(("obs",), name))
        return replace(self, compress=(), ragged=(*self.ragged, *ragged))

    def __getstate__(self) -> dict[str, Any]:
        # The allocator of another process or of a file cannot be pickled.
        return {
            "compress": self.compress,
            "ragged": self.ragged,
            "max_open": self.max_open,
            "allocate": allocate_zeros,
        }


def names_of(selection: bool | str | Sequence[str], of_true: tuple[str, ...], argument: str) -> tuple[str, ...]:
    """Convert a user's choice of columns to names: one or several, or True for the defaults.

    Examples
    --------
    >>> names_of(True, ("obs",), "compress"), names_of("obs.camera", (), "compress"), names_of(False, (), "compress")
    (('obs',), ('obs.camera',), ())
    """
    if isinstance(selection, bool):
        return of_true if selection else ()
    names = (selection,) if isinstance(selection, str) else tuple(selection)
    if isinstance(selection, Mapping) or not all(isinstance(name, str) for name in names):
        raise ColumnTypeError(f"{argument} must be True, False or names of columns, got {type(selection).__name__}")
    return names


def _paths(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Iterate over the dotted names of values."""
    for name, value in values.items():
        inner = values_of(value)
        if inner is None:
            yield prefix + name
        else:
            yield from _paths(inner, f"{prefix}{name}.")


def store_for(name: str, first_rows: Any, slots: int, allocate: Allocate = allocate_zeros) -> Store:
    """Create the store for the first rows of a column, which are not written.

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
    # newbyteorder() only if required: identical dtype objects compare fastest.
    dtype = rows.dtype if rows.dtype.isnative else rows.dtype.newbyteorder("=")
    if dtype not in NUMBERS:
        check_dtype(name, dtype)
    return DenseStore(name, allocate(name, (slots, *rows.shape[1:]), dtype))

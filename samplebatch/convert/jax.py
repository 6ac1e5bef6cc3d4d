"""Registration of `SampleBatch` as a JAX pytree, for `jit`, `grad`, `vmap` and `jax.tree`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import require

_Structure = tuple[tuple[str, ...], str, Flags]
"""Dotted names, structures of nested columns as JSON, and flags: the static part of a batch under `jit`."""

_registered: list[Any] = []


def register_with_jax() -> None:
    """Register `SampleBatch` as a pytree with JAX; repeated calls have no effect.

    The leaves are the columns in order; their keys are the dotted column names. In traced functions and their results,
    columns are JAX arrays: `batch["obs"]` returns an array, and slicing a batch slices its arrays. Operations that
    store or concatenate batches copy the arrays to the host.

    Raises
    ------
    MissingExtraError
        If JAX is not installed.

    Examples
    --------
    >>> import jax
    >>> register_with_jax()
    >>> mean = jax.jit(lambda batch: batch["rewards"].mean())
    >>> float(mean(SampleBatch(rewards=[1.0, 2.0])))
    1.5
    """
    tree_util = require("jax.tree_util", "jax")
    if tree_util in _registered:
        return

    def with_keys(batch: SampleBatch) -> tuple[list[Any], _Structure]:
        leaves, structure = _flatten(batch)
        return [(tree_util.DictKey(name), leaf) for name, leaf in zip(structure[0], leaves, strict=True)], structure

    tree_util.register_pytree_with_keys(SampleBatch, with_keys, _unflatten, _flatten)
    _registered.append(tree_util)


def _flatten(batch: SampleBatch) -> tuple[list[Any], _Structure]:
    columns, nested = batch._all(), json.dumps(dict(batch._nested))
    return [column.values for column in columns.values()], (tuple(columns), nested, batch._flags)


def _unflatten(structure: _Structure, leaves: Iterable[Any]) -> SampleBatch:
    """Create a batch from leaves of any type, because JAX also passes placeholders as leaves."""
    paths, nested, flags = structure
    batch = SampleBatch.__new__(SampleBatch)
    batch._columns = {path: _column_of(leaf, path) for path, leaf in zip(paths, leaves, strict=True)}
    if nested != "{}":
        batch._nested = json.loads(nested)
    if flags is not DEFAULT:
        batch._flags = flags
    batch._has_sequences = names.SEQ_LENS in batch._columns
    shapes = [getattr(column.values, "shape", ()) for column in batch._columns.values()]
    batch.count = next((shape[0] for shape in shapes if shape), 0)
    return batch


def _column_of(leaf: Any, path: str) -> Column:
    return as_column(leaf, path) if isinstance(leaf, np.ndarray) and leaf.ndim else _LeafColumn(leaf)


class _LeafColumn(Column):
    """Column backed by a JAX array; storing or concatenating the column copies the array to the host."""

    __slots__ = ("_leaf",)
    kind = "tensor"

    def __init__(self, values: Any) -> None:
        self._leaf = values

    @property
    def values(self) -> Any:
        return self._leaf

    def __len__(self) -> int:
        return len(self._leaf)

    @property
    def dtype(self) -> Any:
        return self._leaf.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self._leaf.shape[1:])

    @property
    def nbytes(self) -> int:
        return int(self._leaf.nbytes)

    def slice(self, start: int, stop: int) -> _LeafColumn:
        return _LeafColumn(self._leaf[start:stop])

    def take(self, indices: Indices) -> _LeafColumn:
        return _LeafColumn(self._leaf[indices])

    def copy(self) -> Column:
        return self._on_host().copy()

    def spread(self, length: int, positions: Indices) -> Column:
        return self._on_host().spread(length, positions)

    @classmethod
    def concat(cls, columns: Sequence[_LeafColumn], name: str) -> Column:
        on_host = [column._on_host() for column in columns]
        return type(on_host[0]).concat(on_host, name)

    def equals(self, other: Column) -> bool:
        return self._on_host().equals(other._on_host() if isinstance(other, _LeafColumn) else other)

    def to_numpy(self) -> npt.NDArray[Any]:
        return np.asarray(self._leaf)

    def to_torch(self) -> Any:
        return self._on_host().to_torch()

    def encode(self) -> Any:
        return self._on_host().encode()

    def dump(self) -> tuple[Header, list[Any]]:
        return self._on_host().dump()

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> Column:
        # `dump` writes the header of a tensor column.
        return TensorColumn.load(header, buffers, allow_pickle=allow_pickle)

    def _on_host(self) -> Column:
        return as_column(np.asarray(self._leaf), "column")

"""Columns over arrays of JAX's, which its functions see and return as those of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.tensor import TensorColumn


class LeafColumn(Column):
    """Rows in an array of JAX's, for batches that JAX makes; to be joined or kept they are copied to the host.

    Parameters
    ----------
    values
        The array, or whatever JAX puts in its place.
    """

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

    def slice(self, start: int, stop: int) -> LeafColumn:
        return LeafColumn(self._leaf[start:stop])

    def take(self, indices: Indices) -> LeafColumn:
        return LeafColumn(self._leaf[indices])

    def copy(self) -> Column:
        return self._on_host().copy()

    def spread(self, length: int, positions: Indices) -> Column:
        return self._on_host().spread(length, positions)

    @classmethod
    def concat(cls, columns: Sequence[LeafColumn], name: str) -> Column:
        on_host = [column._on_host() for column in columns]
        return type(on_host[0]).concat(on_host, name)

    def equals(self, other: Column) -> bool:
        return self._on_host().equals(other._on_host() if isinstance(other, LeafColumn) else other)

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
        # Its header is a tensor column's, which loads it.
        return TensorColumn.load(header, buffers, allow_pickle=allow_pickle)

    def _on_host(self) -> Column:
        return as_column(np.asarray(self._leaf), "column")

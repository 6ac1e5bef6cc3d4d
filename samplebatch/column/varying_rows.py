"""VaryingRows: rows of varying shape, laid end to end in an array or a tensor."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from samplebatch.column.flat_array import offsets_of, row_views
from samplebatch.column.interface import Column, Indices
from samplebatch.column.row_keys import resolve
from samplebatch.errors import ColumnMismatchError, ColumnTypeError

if TYPE_CHECKING:
    import torch


class VaryingRows(Column):
    """Rows of one dtype and one number of dimensions, but of varying shape: the base of ragged columns.

    The elements lie end to end in an array or a tensor; where rows begin, and their shapes, are arrays on the host.

    Parameters
    ----------
    elements
        The elements of all rows, contiguous, shape (m,).
    offsets
        Where rows begin and end in `elements`, int64, shape (n + 1,), never decreasing.
    shapes
        The shape of each row, int64, shape (n, ndim); None where rows have one dimension.
    """

    __slots__ = ("elements", "offsets", "shapes")

    def __init__(
        self, elements: Any, offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64] | None = None
    ) -> None:
        self.elements = elements
        self.offsets = offsets
        self.shapes = shapes

    @property
    @abstractmethod
    def flat_column(self) -> Any:
        """The elements of these rows as a column of m rows, over the same memory."""

    @property
    def values(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def ndim(self) -> int:
        """Number of dimensions of one row."""
        return 1 if self.shapes is None else self.shapes.shape[1]

    @property
    def dtype(self) -> Any:
        return self.elements.dtype

    @property
    def row_shape(self) -> tuple[None, ...]:
        return (None,) * self.ndim

    @property
    def nbytes(self) -> int:
        shapes = 0 if self.shapes is None else self.shapes.nbytes
        return int(self.flat.nbytes) + self.offsets.nbytes + shapes

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Elements in each row, shape (n,)."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def extents(self) -> npt.NDArray[np.int64]:
        """The shape of each row, shape (n, ndim)."""
        return self.lengths[:, None] if self.shapes is None else self.shapes

    @property
    def flat(self) -> Any:
        """The elements of these rows end to end, a view of shape (m,)."""
        return self.elements[self.offsets[0] : self.offsets[-1]]

    @property
    def layout(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """Where rows begin and end in `flat`, and their shapes."""
        first = self.offsets[0]
        return (self.offsets - first if first else self.offsets), self.shapes

    def __getitem__(self, key: Any) -> Any:
        """Return one row as an array or a tensor that shares memory, or several rows as a column.

        Raises
        ------
        RowIndexError
            If a row lies outside the column.
        """
        rows = resolve(key, len(self))
        if isinstance(rows, tuple):
            return self.slice(*rows)
        if not isinstance(rows, int):
            return self.take(rows)
        row = self.elements[self.offsets[rows] : self.offsets[rows + 1]]
        return row if self.shapes is None else row.reshape(self.shapes[rows].tolist())

    def __iter__(self) -> Iterator[Any]:
        views = row_views(self.elements, self.offsets[:-1], self.offsets[1:])
        return views if self.shapes is None else map(type(self.elements).reshape, views, self.shapes.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("rows of varying shape become an array of objects, which is always a new one")
        rows = self.to_numpy()
        return rows if dtype is None else rows.astype(dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows of {self.dtype}, row shape {self.row_shape})"

    def slice(self, start: int, stop: int) -> Self:
        shapes = None if self.shapes is None else self.shapes[start:stop]
        return type(self)(self.elements, self.offsets[start : stop + 1], shapes)

    def copy(self) -> Self:
        shapes = None if self.shapes is None else self.shapes.copy()
        return type(self)(self.flat_column.copy().values, self.offsets - self.offsets[0], shapes)

    def spread(self, length: int, positions: Indices) -> Self:
        lengths = np.zeros(length, np.int64)
        lengths[positions] = self.lengths
        shapes = None
        if self.shapes is not None:
            shapes = np.zeros((length, self.ndim), np.int64)
            shapes[positions] = self.shapes
        return type(self)(self.flat_column.copy().values, offsets_of(lengths), shapes)

    @abstractmethod
    def pad(self, value: Any = 0) -> Any:
        """Return the rows in one array or tensor, shape (n, ...), each filled up with a value to the largest extents.

        Raises
        ------
        OverflowError, RuntimeError
            If the dtype does not hold the value.
        """

    @classmethod
    def concat(cls, columns: Sequence[Self], name: str) -> Self:
        ndims = {column.ndim for column in columns}
        if len(ndims) > 1:
            found = " and ".join(map(str, sorted(ndims)))
            raise ColumnMismatchError(
                f"column {name!r} must have rows of one number of dimensions to be joined, got {found}"
            )
        flat = [column.flat_column for column in columns]
        elements = type(flat[0]).concat(flat, name).values
        offsets = offsets_of(np.concatenate([column.lengths for column in columns]))
        shapes = [column.shapes for column in columns if column.shapes is not None]
        return cls(elements, offsets, np.concatenate(shapes) if shapes else None)

    def equals(self, other: Column) -> bool:
        if not isinstance(other, type(self)) or len(self) != len(other) or self.ndim != other.ndim:
            return False
        if self.shapes is not None and other.shapes is not None and not np.array_equal(self.shapes, other.shapes):
            return False
        return np.array_equal(self.lengths, other.lengths) and bool(self.flat_column.equals(other.flat_column))

    def to_torch(self) -> torch.Tensor:
        """Return the rows as a nested tensor in torch's jagged layout, sharing memory with the elements.

        Raises
        ------
        ColumnTypeError
            If torch has no dtype for the elements, or another extent than the first varies.
        """
        elements = self.flat_column.to_torch()
        first = self.lengths
        trailing: tuple[int, ...] = ()
        if self.shapes is not None:
            trailing = tuple(self.shapes[0, 1:].tolist()) if len(self) else (0,) * (self.ndim - 1)
            if (self.shapes[:, 1:] != trailing).any():
                raise ColumnTypeError(
                    "torch's jagged layout lets only the first extent of rows vary, got rows that differ in others; "
                    "pad them to one shape first"
                )
            first = self.shapes[:, 0]
        import torch

        offsets = offsets_of(first)
        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(
            elements.reshape(int(offsets[-1]), *trailing), torch.from_numpy(offsets).to(elements.device)
        )
        return nested

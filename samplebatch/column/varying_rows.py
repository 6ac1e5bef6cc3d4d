"""VaryingRows: rows of varying shape, contiguous in an array or a tensor, with row offsets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.interface import Column, Indices, resolve
from samplebatch.column.types import storage_of
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError, FormatError

if TYPE_CHECKING:
    import torch


def gather(
    elements: npt.NDArray[Any], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Copy rows at arbitrary offsets of a flat array, shape (m,), into contiguous memory.

    Raises FormatError if a row is not within the array.

    Returns
    -------
    elements
        Elements of the rows, in new memory.
    offsets
        Row offsets into the elements, shape (n + 1,).

    Examples
    --------
    >>> gather(np.arange(10), np.array([7, 0]), np.array([2, 1]))
    (array([7, 8, 0]), array([0, 2, 3]))
    """
    from samplebatch import kernels

    # The kernel does not check bounds.
    if len(lengths) and (min(starts.min(), lengths.min()) < 0 or (starts + lengths).max() > len(elements)):
        raise FormatError(f"rows must be within the {len(elements)} elements of their column, got offsets beyond them")
    offsets = offsets_of(lengths)
    out = memory.empty((int(offsets[-1]),), elements.dtype)
    size = elements.itemsize
    if out.nbytes:
        kernels.copy_rows(elements.view(np.uint8), starts * size, lengths * size, out.view(np.uint8))
    return out, offsets


def row_views(elements: Any, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Iterator[Any]:
    """View each row of a flat array or tensor between the row's start and stop offsets."""
    return map(elements.__getitem__, map(slice, starts.tolist(), stops.tolist()))


def offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Convert lengths, shape (n,), to offsets, shape (n + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def arrow_offsets(array: pa.Array, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
    """View the row offsets of an Arrow array, shape (n + 1,)."""
    data, width = array.buffers()[1], np.dtype(dtype).itemsize
    if data is None or not data.size or not len(array):
        return np.zeros(1, dtype)
    return np.frombuffer(data, dtype, len(array) + 1, array.offset * width)


def uniform_layout(shape: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Return the offsets and shapes of rows with equal shapes; shapes are None for one-dimensional rows.

    shape: shape of all rows together, (n, ...), with at least two dimensions.

    >>> uniform_layout((2, 3)), uniform_layout((1, 2, 2))
    ((array([0, 3, 6]), None), (array([0, 4]), array([[2, 2]])))
    """
    rows, *row_shape = shape
    offsets = np.arange(rows + 1) * prod(row_shape)
    return offsets, np.full((rows, len(row_shape)), row_shape, np.int64) if len(row_shape) > 1 else None


def element_type(dtype: np.dtype[Any]) -> pa.DataType:
    """Return the Arrow type of one element: a list of two numbers if the dtype is complex."""
    storage = storage_of(dtype)
    return pa.list_(storage.arrow, 2) if storage.per_element else storage.arrow


def arrow_elements(elements: npt.NDArray[Any]) -> pa.Array:
    """View a flat array, shape (m,), as m Arrow values; complex numbers are lists of two."""
    storage = storage_of(elements.dtype)
    buffers = [None, memory.as_buffer(elements)]
    if not storage.per_element:
        return pa.Array.from_buffers(storage.arrow, len(elements), buffers)
    parts = pa.Array.from_buffers(storage.arrow, 2 * len(elements), buffers)
    return pa.Array.from_buffers(element_type(elements.dtype), len(elements), [None], children=[parts])


class VaryingRows(Column):
    """Rows of one dtype and one number of dimensions with varying shape: base class of ragged columns.

    The elements are contiguous in an array or a tensor; row offsets and shapes are arrays on the host.

    Parameters
    ----------
    elements
        Elements of all rows, contiguous, shape (m,).
    offsets
        Row offsets into `elements`, int64, shape (n + 1,), non-decreasing.
    shapes
        Shape of each row, int64, shape (n, ndim); None for rows of one dimension.
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
        """Elements of the rows as a column of m rows that shares memory with the ragged column."""

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
        """Number of elements per row, shape (n,)."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def extents(self) -> npt.NDArray[np.int64]:
        """Shape of each row, shape (n, ndim)."""
        return self.lengths[:, None] if self.shapes is None else self.shapes

    @property
    def flat(self) -> Any:
        """Concatenated elements of the rows, a view of shape (m,)."""
        return self.elements[self.offsets[0] : self.offsets[-1]]

    @property
    def layout(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """Row offsets into `flat`, and row shapes."""
        first = self.offsets[0]
        return (self.offsets - first if first else self.offsets), self.shapes

    def __getitem__(self, key: Any) -> Any:
        """Return one row as an array or a tensor that shares memory with the column, or several rows as a column.

        Raises RowIndexError if a row is out of range.
        """
        rows = resolve(key, len(self))
        if isinstance(rows, tuple):
            return self.slice(*rows)
        if not isinstance(rows, int):
            return self.take(rows)
        row = self.elements[self.offsets[rows] : self.offsets[rows + 1]]
        return row if self.shapes is None else row.reshape(self.shapes[rows].tolist())

    def __setitem__(self, key: Any, rows: Any) -> None:
        """Overwrite rows with one row, a sequence of rows, or one number for all elements; row shapes must not change.

        Raises ColumnLengthError if the number of rows differs from the number of selected rows. Raises
        ColumnMismatchError if the shape of a row differs from the shape of the replaced row, or the dtype cannot
        represent the row's elements. Raises RowIndexError if a row is out of range.
        """
        targets = resolve(key, len(self))
        if isinstance(targets, int):
            pairs = [(targets, rows)]
        else:
            positions = range(*targets) if isinstance(targets, tuple) else targets.tolist()
            is_single = not hasattr(rows, "__len__") or getattr(rows, "ndim", 1) == 0
            values = [rows] * len(positions) if is_single else list(rows)
            if len(values) != len(positions):
                raise ColumnLengthError(f"rows must be overwritten by {len(positions)} rows, got {len(values)}")
            pairs = list(zip(positions, values, strict=True))
        written = [(self[position], self._fit(position, row)) for position, row in pairs]
        for target, row in written:
            target[...] = row

    def _fit(self, position: int, row: Any) -> Any:
        """Convert a row to the column's dtype, after comparing the row's shape with the stored row's shape."""
        shape = tuple(self.extents[position].tolist())
        array = self._convert_row(row)
        if array.ndim and tuple(array.shape) != shape:
            raise ColumnMismatchError(
                f"row {position} must keep its shape {shape}, got {tuple(array.shape)}; other lengths need a new "
                "column: assign all rows"
            )
        return array

    @abstractmethod
    def _convert_row(self, row: Any) -> Any:
        """Convert a row, or one number for all elements of a row, to the column's dtype.

        Raises ColumnMismatchError if the dtype cannot represent the values exactly.
        """

    def __iter__(self) -> Iterator[Any]:
        views = row_views(self.elements, self.offsets[:-1], self.offsets[1:])
        return views if self.shapes is None else map(type(self.elements).reshape, views, self.shapes.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("rows of varying shape must be copied to become an array of objects, got copy=False")
        rows = self.to_numpy()
        return rows if dtype is None else rows.astype(dtype)

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return self.to_lists().__arrow_c_array__(requested_schema)

    def to_lists(self) -> pa.Array:
        """Return the rows as nested Arrow lists, one level per dimension, for libraries that do not support shapes.

        >>> from samplebatch.column.ragged import RaggedColumn
        >>> RaggedColumn.from_rows(
        ...     [np.ones((2, 1), int), np.zeros((1, 2), int)], "x"
        ... ).to_lists().to_pylist()
        [[[1], [1]], [[0, 0]]]
        """
        extents = self.extents
        flat = self._flat_array()
        lists = pa.array(flat) if flat.dtype.kind != "c" else self.flat_column.to_arrow()
        for axis in reversed(range(self.ndim)):
            # Number of lists at this level per row: the product of the preceding extents.
            counts = extents[:, :axis].prod(1)
            lists = pa.LargeListArray.from_arrays(pa.array(offsets_of(np.repeat(extents[:, axis], counts))), lists)
        return lists

    def _flat_array(self) -> npt.NDArray[Any]:
        """Return the elements as an array; a dtype that NumPy lacks becomes float32."""
        flat: npt.NDArray[Any] = self.flat
        return flat

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

    def replace(self, places: Indices, rows: Self, name: str) -> Self:
        """Return a copy in which rows of any length replace the rows at the distinct indices `places`.

        >>> from samplebatch.column import RaggedColumn
        >>> column = RaggedColumn.from_rows([[1, 2], [3]], "visited")
        >>> list(
        ...     column.replace(
        ...         np.array([0]), RaggedColumn.from_rows([[7, 8, 9]], "visited"), "visited"
        ...     )
        ... )
        [array([7, 8, 9]), array([3])]
        """
        order = np.arange(len(self))
        order[places] = len(self) + np.arange(len(rows))
        return cast("Self", type(self).concat([self, rows], name).take(order))

    @classmethod
    def concat(cls, columns: Sequence[Self], name: str) -> Self:
        """Concatenate columns of this class, with one copy.

        Columns without elements do not affect the dtype, and columns without rows do not affect the number of
        dimensions. Raises ColumnMismatchError if rows differ in their number of dimensions, or no column's dtype
        represents all other dtypes exactly.
        """
        columns = [column for column in columns if len(column)] or columns[:1]
        ndims = {column.ndim for column in columns}
        if len(ndims) > 1:
            dimensions = " and ".join(map(str, sorted(ndims)))
            raise ColumnMismatchError(
                f"column {name!r} must have rows of one number of dimensions to be joined, got {dimensions}"
            )
        flat = [column.flat_column for column in columns]
        flat = [elements for elements in flat if len(elements)] or flat[:1]
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
        """Return the rows as a nested tensor in torch's jagged layout; the tensor shares memory with the elements.

        Raises ColumnTypeError if torch has no dtype for the elements, or an extent after the first varies.
        """
        elements = self.flat_column.to_torch()
        first = self.lengths
        trailing: tuple[int, ...] = ()
        if self.shapes is not None:
            trailing = tuple(self.shapes[0, 1:].tolist()) if len(self) else (0,) * (self.ndim - 1)
            if (self.shapes[:, 1:] != trailing).any():
                raise ColumnTypeError(
                    "torch's jagged layout must vary only in the first extent of rows, got rows that differ in others; "
                    "pad them to one shape first"
                )
            first = self.shapes[:, 0]
        import torch

        offsets = offsets_of(first)
        values = elements.reshape(int(offsets[-1]), *trailing)
        starts = torch.from_numpy(offsets).to(elements.device)
        extremes: dict[str, Any] = {}
        if len(self) and hasattr(torch, "float8_e8m0fnu"):
            # Since torch 2.7. Without them torch computes the extremes itself, which waits for the device.
            extremes = {"min_seqlen": int(first.min()), "max_seqlen": int(first.max())}
        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, starts, **extremes)
        return nested

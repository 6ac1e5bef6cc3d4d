"""RaggedColumn: rows of one dtype and of varying shapes, laid end to end in one array."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.flat_array import arrow_elements, element_type, gather, offsets_of, pad_rows, row_views
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.row_keys import resolve
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import DTYPE_KEY, common_dtype, named_dtype, storage_of, torch_dtype
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, FormatError

if TYPE_CHECKING:
    import torch

_INT64 = np.dtype(np.int64)

WRITES_ANY_OFFSETS = int(pa.__version__.partition(".")[0]) >= 21
"""Whether pyarrow writes lists whose offsets begin past zero right. Where it does not, a slice copies its offsets."""


class RaggedColumn(Column):
    """Rows of one dtype and one number of dimensions, but of varying shape.

    The elements of all rows lie end to end in one array, and 64-bit offsets say where each row begins: an Arrow
    `large_list`. Rows of two or more dimensions carry their shapes beside it. A slice is a view that keeps its offsets.

    Parameters
    ----------
    elements
        The elements of all rows, C-contiguous, shape (m,).
    offsets
        Where rows begin and end in `elements`, int64, shape (n + 1,), never decreasing.
    shapes
        The shape of each row, int64, shape (n, ndim); None where rows have one dimension.

    Examples
    --------
    >>> column = RaggedColumn.from_rows([[1, 2], [3], []], "visited")
    >>> len(column), column.dtype, column.row_shape
    (3, dtype('int64'), (None,))
    >>> column[0], column[1:][0]
    (array([1, 2]), array([3]))
    """

    __slots__ = ("elements", "offsets", "shapes")
    kind: ClassVar[str] = "ragged"

    def __init__(
        self, elements: npt.NDArray[Any], offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64] | None = None
    ) -> None:
        self.elements = elements
        self.offsets = offsets
        self.shapes = shapes

    @classmethod
    def from_rows(cls, rows: Sequence[Any], name: str) -> RaggedColumn:
        """Copy rows into one column.

        Parameters
        ----------
        rows
            Arrays, or nested lists of numbers, of one number of dimensions, at least 1. An empty list fits any dtype.
        name
            The column's name, for errors.

        Raises
        ------
        ColumnTypeError
            If a row is not an array of numbers, rows differ in their number of dimensions, or no dtype among theirs
            holds the others without loss.

        Examples
        --------
        >>> RaggedColumn.from_rows([np.zeros((2, 3)), np.zeros((1, 4))], "obs").row_shape
        (None, None)
        """
        arrays, dtype = _row_arrays(rows, name)
        ndim = arrays[0].ndim if arrays else 1
        shapes = np.array([array.shape for array in arrays], _INT64).reshape(len(arrays), ndim)
        offsets = offsets_of(shapes.prod(1))
        elements = memory.empty((int(offsets[-1]),), dtype)
        if arrays:
            np.concatenate([array.reshape(-1) for array in arrays], 0, elements, casting="unsafe")
        return cls(elements, offsets, shapes if ndim > 1 else None)

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
    def dtype(self) -> np.dtype[Any]:
        return self.elements.dtype

    @property
    def row_shape(self) -> tuple[None, ...]:
        return (None,) * self.ndim

    @property
    def nbytes(self) -> int:
        shapes = 0 if self.shapes is None else self.shapes.nbytes
        return self.flat.nbytes + self.offsets.nbytes + shapes

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Elements in each row, shape (n,)."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def flat(self) -> npt.NDArray[Any]:
        """The elements of these rows end to end, a view of shape (m,)."""
        return self.elements[self.offsets[0] : self.offsets[-1]]

    def __getitem__(self, key: Any) -> Any:
        """Return one row as an array that shares memory, or several rows as a column.

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
        return row if self.shapes is None else row.reshape(self.shapes[rows])

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        if self.shapes is None:
            return row_views(self.elements, self.offsets[:-1], self.offsets[1:])
        return map(
            np.ndarray.reshape, row_views(self.elements, self.offsets[:-1], self.offsets[1:]), self.shapes.tolist()
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("rows of varying shape become an array of objects, which is always a new one")
        rows = self.to_numpy()
        return rows if dtype is None else rows.astype(dtype)

    def __repr__(self) -> str:
        return f"RaggedColumn({len(self)} rows of {self.dtype}, row shape {self.row_shape})"

    def slice(self, start: int, stop: int) -> Self:
        shapes = None if self.shapes is None else self.shapes[start:stop]
        return type(self)(self.elements, self.offsets[start : stop + 1], shapes)

    def take(self, indices: Indices) -> RaggedColumn:
        starts = self.offsets[indices]
        elements, offsets = gather(self.elements, starts, self.offsets[1:][indices] - starts)
        return RaggedColumn(elements, offsets, None if self.shapes is None else self.shapes[indices])

    def copy(self) -> Self:
        shapes = None if self.shapes is None else self.shapes.copy()
        return type(self)(memory.copy_of(self.flat), self.offsets - self.offsets[0], shapes)

    def spread(self, length: int, positions: Indices) -> RaggedColumn:
        lengths = np.zeros(length, _INT64)
        lengths[positions] = self.lengths
        shapes = None
        if self.shapes is not None:
            shapes = np.zeros((length, self.ndim), _INT64)
            shapes[positions] = self.shapes
        return RaggedColumn(memory.copy_of(self.flat), offsets_of(lengths), shapes)

    def pad(self, value: Any = 0) -> npt.NDArray[Any]:
        """Return the rows in one array, shape (n, ...), each filled up with a value to the largest extents.

        >>> RaggedColumn.from_rows([[1, 2], [3], []], "visited").pad(-1).tolist()
        [[1, 2], [3, -1], [-1, -1]]
        """
        extents = self.lengths[:, None] if self.shapes is None else self.shapes
        return pad_rows(self.flat, extents, value)

    @classmethod
    def concat(cls, columns: Sequence[RaggedColumn], name: str) -> RaggedColumn:
        ndims = {column.ndim for column in columns}
        if len(ndims) > 1:
            found = " and ".join(map(str, sorted(ndims)))
            raise ColumnMismatchError(
                f"column {name!r} must have rows of one number of dimensions to be joined, got {found}"
            )
        elements = TensorColumn.concat([TensorColumn(column.flat) for column in columns], name).values
        offsets = offsets_of(np.concatenate([column.lengths for column in columns]))
        shapes = [column.shapes for column in columns if column.shapes is not None]
        return RaggedColumn(elements, offsets, np.concatenate(shapes) if shapes else None)

    def equals(self, other: Column) -> bool:
        if not isinstance(other, RaggedColumn) or len(self) != len(other) or self.ndim != other.ndim:
            return False
        if self.shapes is not None and other.shapes is not None and not np.array_equal(self.shapes, other.shapes):
            return False
        same = np.array_equal(self.lengths, other.lengths)
        return same and TensorColumn(self.flat).equals(TensorColumn(other.flat))

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the rows as an array of n objects, each an array that shares memory with the column."""
        return np.fromiter(self, object, len(self))

    def to_torch(self) -> torch.Tensor:
        """Return the rows as a nested tensor in torch's jagged layout, sharing memory with the elements.

        Raises
        ------
        ColumnTypeError
            If torch has no dtype for the elements, or another extent than the first varies.
        """
        if torch_dtype(self.dtype) is None:
            raise ColumnTypeError(f"torch has no dtype for {self.dtype}")
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
        elements = TensorColumn(self.flat.reshape(int(offsets[-1]), *trailing)).to_torch()
        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(elements, torch.from_numpy(offsets))
        return nested

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        """Encode the rows as a `large_list`, sharing memory.

        Where rows have two dimensions or more, it is a struct of the list, `data`, and the rows' extents, `shape`.
        """
        offsets, elements = self.offsets, self.elements
        if offsets[0] and not WRITES_ANY_OFFSETS:
            offsets, elements = offsets - offsets[0], self.flat
        data = pa.Array.from_buffers(
            pa.large_list(element_type(self.dtype)),
            len(self),
            [None, memory.as_buffer(offsets)],
            children=[arrow_elements(elements)],
        )
        metadata = {DTYPE_KEY: self.dtype.str.encode()} if storage_of(self.dtype).named else {}
        if self.shapes is None:
            return data, metadata
        extents = pa.Array.from_buffers(pa.int64(), self.shapes.size, [None, memory.as_buffer(self.shapes)])
        shape = pa.Array.from_buffers(pa.list_(pa.int64(), self.ndim), len(self), [None], children=[extents])
        return pa.StructArray.from_arrays([data, shape], ["data", "shape"]), metadata

    @staticmethod
    def reads(arrow: pa.DataType) -> bool:
        """Tell whether an Arrow type is a list of numbers, dates or fixed-width bytes, or a struct of `to_arrow`.

        >>> RaggedColumn.reads(pa.list_(pa.float32())), RaggedColumn.reads(pa.list_(pa.string()))
        (True, False)
        """
        if pa.types.is_struct(arrow):
            if [field.name for field in arrow] != ["data", "shape"]:
                return False
            shape = arrow.field("shape").type
            if not (pa.types.is_fixed_size_list(shape) and shape.list_size > 1 and shape.value_type == pa.int64()):
                return False
            arrow = arrow.field("data").type
        if not (pa.types.is_large_list(arrow) or pa.types.is_list(arrow)):
            return False
        element = arrow.value_type
        if pa.types.is_fixed_size_list(element):
            element = element.value_type
        fixed = pa.types.is_primitive(element) or pa.types.is_fixed_size_binary(element)
        return bool(fixed and not pa.types.is_null(element))

    @classmethod
    def from_arrow(cls, array: pa.Array, dtype_name: str | None, name: str) -> RaggedColumn:
        """View an Arrow array that `reads` accepts as rows, after copying and checking its offsets and shapes.

        Parameters
        ----------
        array
            A `large_list`, a `list` (its 32-bit offsets are copied), or a struct of one and the rows' shapes. Elements
            that are fixed-size lists add their extents to the rows'.
        dtype_name
            The dtype that the field names, if it does.
        name
            The column's name, for errors.

        Raises
        ------
        ColumnTypeError
            If the array has nulls, or elements that NumPy cannot view.
        FormatError
            If offsets or shapes do not fit the elements.
        """
        if array.null_count:
            raise ColumnTypeError(f"column {name!r} must have no nulls, got {array.null_count}")
        shapes = None
        if pa.types.is_struct(array.type):
            extents = array.field("shape")
            shapes = TensorColumn.from_arrow(extents, None, name).values.copy()
            array = array.field("data")
            if array.null_count:
                raise ColumnTypeError(f"column {name!r} must have no nulls, got {array.null_count}")
        large = pa.types.is_large_list(array.type)
        elements = TensorColumn.from_arrow(array.values, dtype_name, name).values
        data = array.buffers()[1]
        if data is None or not len(array):
            offsets = np.zeros(1, _INT64)
        else:
            width = np.dtype(np.int64 if large else np.int32)
            found = np.frombuffer(data, width, len(array) + 1, array.offset * width.itemsize)
            # A copy: whoever else can write to this memory must not move rows after they were checked.
            offsets = found.astype(_INT64)
        subject = f"column {name!r}"
        if elements.ndim > 1 and shapes is None:
            _check(offsets, None, len(elements), subject)
            shapes = np.empty((len(array), elements.ndim), _INT64)
            shapes[:, 0] = offsets[1:] - offsets[:-1]
            shapes[:, 1:] = elements.shape[1:]
            offsets = offsets * math.prod(elements.shape[1:])
        elements = elements.reshape(-1)
        _check(offsets, shapes, len(elements), subject)
        return cls(elements, offsets, shapes)

    def dump(self) -> tuple[Header, list[Any]]:
        first = self.offsets[0]
        buffers = [memory.as_bytes(self.flat), self.offsets - first if first else self.offsets]
        if self.shapes is not None:
            buffers.append(self.shapes)
        return (self.kind, self.dtype.str, len(self), self.ndim), buffers

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> RaggedColumn:
        try:
            _, dtype_name, length, ndim = header
            elements, offsets, shapes = buffers if ndim != 1 else (*buffers, None)
            dtype = named_dtype(dtype_name)
            if length < 0 or ndim < 1:
                raise ValueError("a negative number of rows, or rows without dimensions")
            count = memoryview(elements).nbytes // dtype.itemsize
            column = cls(
                memory.as_array(elements, dtype, (count,)),
                # Copies: whoever else can write to this memory must not move rows after they were checked.
                memory.as_array(offsets, _INT64, (length + 1,)).copy(),
                memory.as_array(shapes, _INT64, (length, ndim)).copy() if ndim != 1 else None,
            )
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(f"a ragged column's header {header!r} does not fit its buffers: {error}") from error
        _check(column.offsets, column.shapes, count, "a ragged column")
        return column


def _check(offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64] | None, count: int, subject: str) -> None:
    """Refuse offsets and shapes from outside that do not fit `count` elements."""
    lengths = offsets[1:] - offsets[:-1]
    if offsets[0] < 0 or offsets[-1] > count or (lengths < 0).any():
        raise FormatError(f"{subject} must have offsets that rise within [0, {count}], they do not; it is damaged")
    if shapes is None:
        return
    if (shapes < 0).any() or np.maximum(shapes, 1).prod(1, np.float64).max(initial=0) >= 2.0**62:
        raise FormatError(f"{subject} must have shapes of extents that no array exceeds, it does not; it is damaged")
    if (shapes.prod(1) != lengths).any():
        raise FormatError(f"{subject} must have shapes that fit the rows' lengths, it does not; it is damaged")


def _row_arrays(rows: Sequence[Any], name: str) -> tuple[list[npt.NDArray[Any]], np.dtype[Any]]:
    """View rows as arrays, and find the dtype that holds them all without loss.

    Parameters
    ----------
    rows
        Arrays, or nested lists of numbers. An empty list fits any dtype.
    name
        The column's name, for errors.

    Raises
    ------
    ColumnTypeError
        If a row is not an array of one dimension or more, rows differ in their number of dimensions, or no dtype among
        theirs holds the others.

    Examples
    --------
    >>> _row_arrays([[1, 2], [0.5]], "x")
    ([array([1, 2]), array([0.5])], dtype('float64'))
    """
    arrays = [_row_array(row, i, name) for i, row in enumerate(rows)]
    ndims = {array.ndim for array in arrays}
    if len(ndims) > 1:
        found = " and ".join(map(str, sorted(ndims)))
        raise ColumnTypeError(f"column {name!r} must have rows of one number of dimensions, got {found}")
    return arrays, _rows_dtype(rows, arrays, name)


def _row_array(row: Any, i: int, name: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(row)
        storage_of(array.dtype.newbyteorder("="))
    except (ValueError, ColumnTypeError) as error:
        raise ColumnTypeError(f"column {name!r} must have rows that are arrays, row {i} is not: {error}") from error
    if not array.ndim:
        found = type(row).__name__
        raise ColumnTypeError(f"column {name!r} must have rows that are arrays, row {i} is a single {found}")
    return array


def _rows_dtype(rows: Sequence[Any], arrays: list[npt.NDArray[Any]], name: str) -> np.dtype[Any]:
    """Find the dtype that holds every row without loss; empty lists have no say."""
    voting = [i for i, row in enumerate(rows) if arrays[i].size or not isinstance(row, list | tuple)]
    dtypes = list(dict.fromkeys(arrays[i].dtype.newbyteorder("=") for i in voting))
    if not dtypes:
        return np.dtype(np.float64)
    dtype = common_dtype(dtypes)
    numbers = all(found.kind in "biufc" for found in dtypes)
    if dtype is None and numbers and all(isinstance(rows[i], list | tuple) for i in voting):
        # Python's numbers have no dtype of their own: NumPy's choice for all of them will do, if it changes none.
        wide = np.result_type(*dtypes)
        if all(np.array_equal(arrays[i].astype(wide).astype(arrays[i].dtype), arrays[i]) for i in voting):
            dtype = wide
    if dtype is None:
        raise ColumnTypeError(
            f"column {name!r} must have rows of one dtype, or one that holds the others without loss, got "
            f"{' and '.join(map(str, dtypes))}; convert them first"
        )
    return dtype

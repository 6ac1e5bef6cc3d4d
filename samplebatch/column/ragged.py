"""RaggedColumn: rows of one dtype and of varying shapes, laid end to end in one array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.casting import cast_exactly
from samplebatch.column.interface import Header, Indices
from samplebatch.column.ragged_math import apply_ufunc
from samplebatch.column.ragged_rows import RaggedRows
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import DTYPE_KEY, NUMBERS, common_dtype, named_dtype, storage_of
from samplebatch.column.varying_rows import (
    arrow_elements,
    arrow_offsets,
    element_type,
    gather,
    offsets_of,
    uniform_layout,
)
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, FormatError

_INT64 = np.dtype(np.int64)

WRITES_ANY_OFFSETS = int(pa.__version__.partition(".")[0]) >= 21
"""Whether pyarrow writes lists whose offsets begin past zero right. Where it does not, a slice copies its offsets."""


class RaggedColumn(RaggedRows):
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

    __slots__ = ()
    kind: ClassVar[str] = "ragged"
    elements: npt.NDArray[Any]

    @property
    def flat_column(self) -> TensorColumn:
        return TensorColumn(self.flat)

    @classmethod
    def from_rows(cls, rows: Sequence[Any], name: str = "rows", dtype: npt.DTypeLike | None = None) -> RaggedColumn:
        """Copy rows into one column, whether or not they differ in shape.

        Raises ColumnTypeError if a row is not an array of numbers, rows differ in their number of dimensions, or no
        dtype among theirs holds the others without loss. Raises ColumnMismatchError if the dtype given does not hold
        the rows without loss.

        Parameters
        ----------
        rows
            Arrays, or nested lists of numbers, of one number of dimensions, at least 1. An empty list fits any dtype.
        name
            The column's name, for errors.
        dtype
            The elements' dtype; by default one of the rows' that holds those of the others, float64 if all are empty
            lists.

        Examples
        --------
        >>> RaggedColumn.from_rows([np.zeros((2, 3)), np.zeros((1, 4))], "obs").row_shape
        (None, None)
        >>> RaggedColumn.from_rows([[], []], "ids", "int64").dtype
        dtype('int64')
        """
        declared = None if dtype is None else np.dtype(dtype)
        laid = lay_rows(rows)
        # Lists of numbers are rounded to a declared dtype of floats, row by row.
        if laid is not None and (declared is None or laid[0].dtype == declared or isinstance(rows[0], np.ndarray)):
            column = cls(*laid)
            return column if declared is None else column.cast(declared, name)
        arrays, common = _row_arrays(rows, name, declared)
        ndim = arrays[0].ndim if arrays else 1
        shapes = np.array([array.shape for array in arrays], _INT64).reshape(len(arrays), ndim)
        offsets = offsets_of(shapes.prod(1))
        elements = memory.empty((int(offsets[-1]),), common)
        if arrays:
            np.concatenate([array.reshape(-1) for array in arrays], 0, elements, casting="unsafe")
        column = cls(elements, offsets, shapes if ndim > 1 else None)
        return column if declared is None else column.cast(declared, name)

    @classmethod
    def from_array(cls, values: npt.NDArray[Any]) -> RaggedColumn:
        """View an array of rows of one shape, C-contiguous, shape (n, ...) with two dimensions or more.

        >>> RaggedColumn.from_array(np.zeros((2, 3))).lengths
        array([3, 3])
        """
        return cls(values.reshape(-1), *uniform_layout(values.shape))

    def cast(self, dtype: np.dtype[Any], name: str) -> RaggedColumn:
        """Convert the elements to a dtype, or return the column itself if they have it.

        Raises ColumnMismatchError if the dtype does not hold them without loss; names the column.
        """
        return self if self.dtype == dtype else RaggedColumn(_cast(self.flat, dtype, name), *self.layout)

    def _convert_row(self, row: Any) -> npt.NDArray[Any]:
        return _cast(np.asarray(row), self.dtype, "rows")

    def take(self, indices: Indices) -> RaggedColumn:
        starts = self.offsets[indices]
        elements, offsets = gather(self.elements, starts, self.offsets[1:][indices] - starts)
        return RaggedColumn(elements, offsets, None if self.shapes is None else self.shapes[indices])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return apply_ufunc(self, ufunc, method, inputs, options)

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the rows as an array of n objects, each an array that shares memory with the column."""
        return np.fromiter(self, object, len(self))

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        """Encode the rows as a `large_list`, sharing memory.

        Where rows have two dimensions or more, it is a struct of the list, `data`, and the rows' extents, `shape`.
        """
        offsets, elements = self.offsets, self.elements
        if offsets[0] and not WRITES_ANY_OFFSETS:
            (offsets, _), elements = self.layout, self.flat
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

        Raises ColumnTypeError if the array has nulls, or elements that NumPy cannot view. Raises FormatError if offsets
        or shapes do not fit the elements.

        Parameters
        ----------
        array
            A `large_list`, a `list` (its 32-bit offsets are copied), or a struct of one and the rows' shapes. Elements
            that are fixed-size lists add their extents to the rows'.
        dtype_name
            The dtype that the field names, if it does.
        name
            The column's name, for errors.
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
        # A copy: whoever else can write to this memory must not move rows after they were checked.
        offsets = arrow_offsets(array, np.int64 if large else np.int32).astype(_INT64)
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
        offsets, shapes = self.layout
        buffers = [memory.as_bytes(self.flat), offsets]
        if shapes is not None:
            buffers.append(shapes)
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


def _cast(array: npt.NDArray[Any], dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """Convert values to a dtype that holds them without loss; see `RaggedColumn.cast`."""
    exact = cast_exactly(array, dtype) if array.size else array.astype(dtype)
    if exact is None:
        raise ColumnMismatchError(
            f"column {name!r} must hold its values without loss, got {array.dtype} for {dtype}; convert them, or "
            "give the first row the wider dtype"
        )
    return exact


def _row_arrays(
    rows: Sequence[Any], name: str, declared: np.dtype[Any] | None = None
) -> tuple[list[npt.NDArray[Any]], np.dtype[Any]]:
    """View rows as arrays, and find the dtype that holds them all without loss.

    Raises ColumnTypeError if a row is not an array of one dimension or more, rows differ in their number of dimensions,
    or no dtype among theirs holds the others.

    Parameters
    ----------
    rows
        Arrays, or nested lists of numbers. An empty list fits any dtype.
    name
        The column's name, for errors.
    declared
        The dtype that the column is to have. Lists of numbers are rounded to it if it is of floats, as NumPy does.

    Examples
    --------
    >>> _row_arrays([[1, 2], [0.5]], "x")
    ([array([1, 2]), array([0.5])], dtype('float64'))
    """
    arrays = [_row_array(row, i, name) for i, row in enumerate(rows)]
    if declared is not None and declared.kind in "fc":
        arrays = [
            array.astype(declared) if isinstance(row, list | tuple) and array.dtype.kind in "biufc" else array
            for row, array in zip(rows, arrays, strict=True)
        ]
    ndims = {array.ndim for array in arrays}
    if len(ndims) > 1:
        found = " and ".join(map(str, sorted(ndims)))
        raise ColumnTypeError(f"column {name!r} must have rows of one number of dimensions, got {found}")
    return arrays, _rows_dtype(rows, arrays, name)


def _row_array(row: Any, i: int, name: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(row)
        storage_of(array.dtype.newbyteorder("="))
    except (TypeError, ValueError) as error:
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


_EXACT_INTEGERS = 2.0**53
"""Smaller integers are floats without loss."""


def lay_rows(rows: Sequence[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None:
    """Lay rows of one dimension end to end.

    Returns
    -------
    tuple
        The elements and the offsets of the rows; None for rows that are neither all arrays of numbers of one dtype nor
        all lists of integers or of floats, which take a slower way.

    Examples
    --------
    >>> lay_rows([np.arange(2), np.arange(1)]), lay_rows([[0.5], []])
    ((array([0, 1, 0]), array([0, 2, 3])), (array([0.5]), array([0, 1, 1])))
    >>> lay_rows([[1], "text"])
    """
    kinds = set(map(type, rows))
    if kinds == {np.ndarray}:
        return _lay_arrays(rows)
    return _lay_lists(rows) if kinds == {list} else None


def differ_in_length(rows: Sequence[Any]) -> bool:
    """Tell whether rows are arrays or lists that differ in length.

    >>> differ_in_length([[1], [2, 3]]), differ_in_length([[1], [2]]), differ_in_length(["a", "bc"])
    (True, False, False)
    """
    if not rows or type(rows[0]) not in (list, np.ndarray):
        return False
    try:
        return len(set(map(len, rows))) > 1
    except TypeError:
        return False


def _lay_arrays(rows: Sequence[npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None:
    dtype = rows[0].dtype
    if rows[0].ndim != 1 or dtype not in NUMBERS:
        return None
    try:
        offsets = offsets_of(np.fromiter(map(len, rows), np.int64, len(rows)))
        elements = memory.empty((int(offsets[-1]),), dtype)
        # Refuses rows of another dtype or number of dimensions.
        np.concatenate(rows, 0, elements, casting="no")
    except (TypeError, ValueError):
        return None
    return elements, offsets


def _lay_lists(rows: Sequence[list[Any]]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None:
    kinds: set[type] = set()
    for row in rows:
        kinds.update(map(type, row))
    # As NumPy has it. Empty rows alone, numbers of NumPy's, flags and objects take the slower way.
    dtype = np.int64 if kinds == {int} else np.float64 if kinds in ({float}, {float, int}) else None
    if dtype is None:
        return None
    offsets = offsets_of(np.fromiter(map(len, rows), np.int64, len(rows)))
    try:
        elements = np.fromiter(chain.from_iterable(rows), dtype, int(offsets[-1]))
    except OverflowError:
        return None
    if len(kinds) > 1 and not (np.abs(elements) < _EXACT_INTEGERS).all():
        return None
    return elements, offsets

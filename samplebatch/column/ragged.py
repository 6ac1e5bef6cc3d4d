"""RaggedColumn: rows of one dtype and varying shapes, contiguous in one array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.arguments import describe_value
from samplebatch.column import memory, varying_rows
from samplebatch.column.casting import cast_exactly
from samplebatch.column.interface import Header, Indices
from samplebatch.column.ragged_math import apply_ufunc
from samplebatch.column.ragged_rows import RaggedRows
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import DTYPE_KEY, NUMBERS, common_dtype, named_dtype, storage_of
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, FormatError

_INT64 = np.dtype(np.int64)

WRITES_ANY_OFFSETS = int(pa.__version__.partition(".")[0]) >= 21
"""Whether pyarrow correctly writes lists whose first offset is not zero. If not, a slice copies its offsets."""


class RaggedColumn(RaggedRows):
    """Rows of one dtype and one number of dimensions, with varying shape.

    The elements of all rows are contiguous in one array, with 64-bit row offsets, as in an Arrow `large_list`. Rows of
    two or more dimensions have an additional array of shapes. A slice is a view of elements and offsets; a slice's
    first offset need not be 0.

    Parameters
    ----------
    elements
        Elements of all rows, C-contiguous, shape (m,).
    offsets
        Row offsets into `elements`, int64, shape (n + 1,), non-decreasing.
    shapes
        Shape of each row, int64, shape (n, ndim); None for rows of one dimension.

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
        """Copy rows into one ragged column, even if the rows have equal shapes.

        Raises ColumnTypeError if a row is not a numeric array, rows differ in their number of dimensions, or no row's
        dtype represents all other rows exactly. Raises ColumnMismatchError if the declared dtype cannot represent the
        rows exactly.

        Parameters
        ----------
        rows
            Arrays, or nested lists of numbers, with an equal number of dimensions of at least 1. An empty list is
            compatible with any dtype.
        name
            The column's name, for errors.
        dtype
            Dtype of the elements; by default, the dtype that represents all rows exactly, or float64 if all rows are
            empty lists.

        Examples
        --------
        >>> RaggedColumn.from_rows([np.zeros((2, 3)), np.zeros((1, 4))], "obs").row_shape
        (None, None)
        >>> RaggedColumn.from_rows([[], []], "ids", "int64").dtype
        dtype('int64')
        """
        declared = None if dtype is None else np.dtype(dtype)
        layout = lay_rows(rows)
        # Lists of numbers are rounded to a declared dtype of floats, row by row.
        if layout is not None and (declared is None or layout[0].dtype == declared or isinstance(rows[0], np.ndarray)):
            column = cls(*layout)
            return column if declared is None else column.cast(declared, name)
        arrays, common = _row_arrays(rows, name, declared)
        ndim = arrays[0].ndim if arrays else 1
        shapes = np.array([array.shape for array in arrays], _INT64).reshape(len(arrays), ndim)
        offsets = varying_rows.offsets_of(shapes.prod(1))
        elements = memory.empty((int(offsets[-1]),), common)
        if arrays:
            np.concatenate([array.reshape(-1) for array in arrays], 0, elements, casting="unsafe")
        column = cls(elements, offsets, shapes if ndim > 1 else None)
        return column if declared is None else column.cast(declared, name)

    @classmethod
    def from_array(cls, values: npt.NDArray[Any]) -> RaggedColumn:
        """View a C-contiguous array of shape (n, ...), with at least two dimensions, as rows of equal shape.

        >>> RaggedColumn.from_array(np.zeros((2, 3))).lengths
        array([3, 3])
        """
        return cls(values.reshape(-1), *varying_rows.uniform_layout(values.shape))

    def cast(self, dtype: np.dtype[Any], name: str) -> RaggedColumn:
        """Cast the elements to a dtype, or return the column itself if the column has that dtype.

        Raises ColumnMismatchError if the dtype cannot represent the elements exactly.
        """
        return self if self.dtype == dtype else RaggedColumn(_cast(self.flat, dtype, name), *self.layout)

    def _convert_row(self, row: Any) -> npt.NDArray[Any]:
        return _cast(np.asarray(row), self.dtype, "rows")

    def take(self, indices: Indices) -> RaggedColumn:
        starts = self.offsets[indices]
        elements, offsets = varying_rows.gather(self.elements, starts, self.offsets[1:][indices] - starts)
        return RaggedColumn(elements, offsets, None if self.shapes is None else self.shapes[indices])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return apply_ufunc(self, ufunc, method, inputs, options)

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the rows as an object array of n arrays that share memory with the column."""
        return np.fromiter(self, object, len(self))

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        """Encode the rows as a `large_list`, sharing memory.

        Rows with two or more dimensions become a struct of the list, `data`, and the row shapes, `shape`.
        """
        offsets, elements = self.offsets, self.elements
        if offsets[0] and not WRITES_ANY_OFFSETS:
            (offsets, _), elements = self.layout, self.flat
        data = pa.Array.from_buffers(
            pa.large_list(varying_rows.element_type(self.dtype)),
            len(self),
            [None, memory.as_buffer(offsets)],
            children=[varying_rows.arrow_elements(elements)],
        )
        metadata = {DTYPE_KEY: self.dtype.str.encode()} if storage_of(self.dtype).named else {}
        if self.shapes is None:
            return data, metadata
        extents = pa.Array.from_buffers(pa.int64(), self.shapes.size, [None, memory.as_buffer(self.shapes)])
        shape = pa.Array.from_buffers(pa.list_(pa.int64(), self.ndim), len(self), [None], children=[extents])
        return pa.StructArray.from_arrays([data, shape], ["data", "shape"]), metadata

    @staticmethod
    def reads(arrow: pa.DataType) -> bool:
        """Return whether an Arrow type is a list of numbers, dates or fixed-width bytes.

        A struct of such a list and the row shapes, as `to_arrow` returns, is also accepted.

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
        """View the elements of an Arrow array that `reads` accepts; offsets and shapes are copied and validated.

        Raises ColumnTypeError if the array has nulls, or elements that NumPy cannot view. Raises FormatError if offsets
        or shapes do not match the elements.

        Parameters
        ----------
        array
            A `large_list`, a `list` (the 32-bit offsets are copied), or a struct of a list and the row shapes. The
            extents of fixed-size lists become dimensions of the rows.
        dtype_name
            Dtype in the field's metadata, if any.
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
        # A copy: another writer of this memory must not move rows after validation.
        offsets = varying_rows.arrow_offsets(array, np.int64 if large else np.int32).astype(_INT64)
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
                counts = f"{describe_value(length)} rows of {describe_value(ndim)} dimensions"
                raise ValueError(f"a ragged column must have 0 rows or more of 1 dimension or more, got {counts}")
            count = memoryview(elements).nbytes // dtype.itemsize
            column = cls(
                memory.as_array(elements, dtype, (count,)),
                # Copies: another writer of this memory must not move rows after validation.
                memory.as_array(offsets, _INT64, (length + 1,)).copy(),
                memory.as_array(shapes, _INT64, (length, ndim)).copy() if ndim != 1 else None,
            )
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(f"a ragged column's header {header!r} must match its buffers: {error}") from error
        _check(column.offsets, column.shapes, count, "a ragged column")
        return column


def _check(offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64] | None, count: int, subject: str) -> None:
    """Raise FormatError if untrusted offsets and shapes do not match `count` elements."""
    lengths = offsets[1:] - offsets[:-1]
    if offsets[0] < 0 or offsets[-1] > count or (lengths < 0).any():
        actual = "decreasing ones" if (lengths < 0).any() else f"[{offsets[0]}, {offsets[-1]}]"
        raise FormatError(f"{subject} must have non-decreasing offsets in [0, {count}], got {actual}; it is damaged")
    if shapes is None:
        return
    is_invalid = (shapes < 0).any(1) | (np.maximum(shapes, 1).prod(1, np.float64) >= 2.0**62)
    if is_invalid.any():
        shape = f"{tuple(shapes[is_invalid.argmax()].tolist())!r:.80}"
        raise FormatError(f"{subject} must have shapes that an array can have, got {shape}; it is damaged")
    differs = shapes.prod(1) != lengths
    if differs.any():
        row = int(differs.argmax())
        actual = f"{tuple(shapes[row].tolist())!r:.80} for {lengths[row]} elements in row {row}"
        raise FormatError(f"{subject} must have shapes that match the rows' lengths, got {actual}; it is damaged")


def _cast(array: npt.NDArray[Any], dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    exact = cast_exactly(array, dtype) if array.size else array.astype(dtype)
    if exact is None:
        raise ColumnMismatchError(
            f"column {name!r} must store its values without loss, got {array.dtype} for {dtype}; convert them, or "
            "use the wider dtype in the first row"
        )
    return exact


def _row_arrays(
    rows: Sequence[Any], name: str, declared: np.dtype[Any] | None = None
) -> tuple[list[npt.NDArray[Any]], np.dtype[Any]]:
    """Convert rows to arrays, and determine the dtype that represents all rows exactly.

    Raises ColumnTypeError if a row is not an array of at least one dimension, rows differ in their number of
    dimensions, or no row's dtype represents all other rows exactly.

    rows: arrays, or nested lists of numbers. An empty list is compatible with any dtype. declared: the requested dtype.
    Lists of numbers are rounded to float dtypes.

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
        dimensions = " and ".join(map(str, sorted(ndims)))
        raise ColumnTypeError(f"column {name!r} must have rows of one number of dimensions, got {dimensions}")
    return arrays, _rows_dtype(rows, arrays, name)


def _row_array(row: Any, i: int, name: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(row)
        storage_of(array.dtype.newbyteorder("="))
    except (TypeError, ValueError) as error:
        raise ColumnTypeError(
            f"column {name!r} must have rows that are arrays, got another in row {i}: {error}"
        ) from error
    if not array.ndim:
        kind = type(row).__name__
        raise ColumnTypeError(f"column {name!r} must have rows that are arrays, got a single {kind} in row {i}")
    return array


def _rows_dtype(rows: Sequence[Any], arrays: list[npt.NDArray[Any]], name: str) -> np.dtype[Any]:
    """Return a dtype that represents every row exactly; empty lists are ignored."""
    voting = [i for i, row in enumerate(rows) if arrays[i].size or not isinstance(row, list | tuple)]
    dtypes = list(dict.fromkeys(arrays[i].dtype.newbyteorder("=") for i in voting))
    if not dtypes:
        return np.dtype(np.float64)
    dtype = common_dtype(dtypes)
    numbers = all(dtype_of_row.kind in "biufc" for dtype_of_row in dtypes)
    if dtype is None and numbers and all(isinstance(rows[i], list | tuple) for i in voting):
        # Python numbers have no dtype: NumPy's common dtype is used if it changes no value.
        wide = np.result_type(*dtypes)
        if all(np.array_equal(arrays[i].astype(wide).astype(arrays[i].dtype), arrays[i]) for i in voting):
            dtype = wide
    if dtype is None:
        raise ColumnTypeError(
            f"column {name!r} must have rows of one dtype, or one that represents the others exactly, got "
            f"{' and '.join(map(str, dtypes))}; convert them first"
        )
    return dtype


_EXACT_INTEGERS = 2.0**53
"""Smaller integers are exact in float64."""


def lay_rows(rows: Sequence[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None:
    """Concatenate rows of one dimension.

    Returns: elements and offsets of the rows; None for rows that are neither numeric arrays of one dtype nor lists of
    integers or floats.

    >>> lay_rows([np.arange(2), np.arange(1)]), lay_rows([[0.5], []])
    ((array([0, 1, 0]), array([0, 2, 3])), (array([0.5]), array([0, 1, 1])))
    >>> lay_rows([[1], "text"])
    """
    kinds = set(map(type, rows))
    if kinds == {np.ndarray}:
        return _lay_arrays(rows)
    return _lay_lists(rows) if kinds == {list} else None


def differ_in_length(rows: Sequence[Any]) -> bool:
    """Return whether rows are arrays or lists whose lengths differ from each other.

    >>> (
    ...     differ_in_length([[1], [2, 3]]),
    ...     differ_in_length([[1], [2]]),
    ...     differ_in_length(["a", "bc"]),
    ... )
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
        offsets = varying_rows.offsets_of(np.fromiter(map(len, rows), np.int64, len(rows)))
        elements = memory.empty((int(offsets[-1]),), dtype)
        # Raises for rows of another dtype or number of dimensions.
        np.concatenate(rows, 0, elements, casting="no")
    except (TypeError, ValueError):
        return None
    return elements, offsets


def _lay_lists(rows: Sequence[list[Any]]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None:
    kinds: set[type] = set()
    for row in rows:
        kinds.update(map(type, row))
    # NumPy's dtype. Only empty rows, NumPy numbers, flags and objects use the general path.
    dtype = np.int64 if kinds == {int} else np.float64 if kinds in ({float}, {float, int}) else None
    if dtype is None:
        return None
    offsets = varying_rows.offsets_of(np.fromiter(map(len, rows), np.int64, len(rows)))
    try:
        elements = np.fromiter(chain.from_iterable(rows), dtype, int(offsets[-1]))
    except OverflowError:
        return None
    if len(kinds) > 1 and not (np.abs(elements) < _EXACT_INTEGERS).all():
        return None
    return elements, offsets

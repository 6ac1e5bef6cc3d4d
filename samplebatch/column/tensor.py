"""TensorColumn: rows of equal shape in a NumPy array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory, threads, types
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.text import TextColumn
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, FormatError

if TYPE_CHECKING:
    import torch


_MODE: Final = "clip"
"""Mode of gathers: indices are validated already, and `"raise"` would write to a hidden buffer first."""


class TensorColumn(Column):
    """Rows of equal shape in the layout of an Arrow buffer: C-contiguous and in native byte order.

    The NumPy array, the Arrow array and the torch tensor of a column are views of the same bytes, created on demand.

    Parameters
    ----------
    values
        C-contiguous array of shape (n, ...) in native byte order. The array is stored without a copy or validation;
        `as_column` validates arrays.
    """

    __slots__ = ("values",)
    kind: ClassVar[str] = "tensor"
    values: npt.NDArray[Any]

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.values.shape[1:]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def slice(self, start: int, stop: int) -> TensorColumn:
        return TensorColumn(self.values[start:stop])

    def take(self, indices: Indices) -> TensorColumn:
        values = self.values
        out = memory.empty((len(indices), *values.shape[1:]), values.dtype)
        if out.nbytes < threads.WORTHWHILE:
            values.take(indices, 0, out, _MODE)
        else:
            threads.share(gathering(values, indices, out))
        return TensorColumn(out)

    def copy(self) -> TensorColumn:
        return TensorColumn(memory.copy_of(self.values))

    def spread(self, length: int, positions: Indices) -> TensorColumn:
        values = self.values
        out = memory.zeros((length, *values.shape[1:]), values.dtype)
        out[positions] = values
        return TensorColumn(out)

    @classmethod
    def concat(cls, columns: Sequence[TensorColumn], name: str) -> TensorColumn:
        arrays = [column.values for column in columns]
        first = arrays[0]
        rows = sum(map(len, arrays))
        out = memory.empty((rows, *first.shape[1:]), first.dtype)
        try:
            _join(arrays, out, _concatenate)
        except (TypeError, ValueError):
            out = memory.empty(out.shape, _joined_dtype(arrays, name))
            _join(arrays, out, _cast_and_concatenate)
        return TensorColumn(out)

    def equals(self, other: Column) -> bool:
        if not isinstance(other, TensorColumn):
            return False
        a, b = self.values, other.values
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a is b or np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")

    def to_numpy(self) -> npt.NDArray[Any]:
        return self.values

    def to_torch(self) -> torch.Tensor:
        if types.torch_dtype(self.values.dtype) is None:
            raise ColumnTypeError(f"torch has no dtype for {self.values.dtype}")
        import torch

        # Tensors are always writable: a tensor over read-only memory would bypass the protection.
        writable = self.values if self.values.flags.writeable else memory.copy_of(self.values)
        return torch.from_numpy(writable)

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        values = self.values
        storage = types.storage_of(values.dtype)
        row_shape = values.shape[1:] + storage.per_element
        flat = _flat_arrow(values, storage.arrow, len(values) * prod(row_shape))
        if values.dtype.kind == "b" and not row_shape:
            return pa.ExtensionArray.from_storage(pa.bool8(), flat), {}
        metadata = {types.DTYPE_KEY: values.dtype.str.encode()} if storage.named else {}
        if not row_shape:
            return flat, metadata
        tensor_type = pa.fixed_shape_tensor(storage.arrow, row_shape)
        rows = pa.Array.from_buffers(tensor_type.storage_type, len(values), [None], children=[flat])
        return pa.ExtensionArray.from_storage(tensor_type, rows), metadata

    @classmethod
    def from_arrow(cls, array: pa.Array, dtype_name: str | None, name: str) -> TensorColumn:
        """View an Arrow array of numbers, or of fixed-size lists of numbers, as rows.

        Raises ColumnTypeError if the array has nulls, or a type without NumPy equivalent.

        Parameters
        ----------
        array
            Fixed-shape tensors and fixed-size lists, nested in any way, of numbers, dates or fixed-width bytes.
            Bit-packed bool and dates in days are copied, because their layout differs from NumPy's layout.
        dtype_name
            Dtype that the field's metadata specifies, or None.
        name
            Name of the column, for errors.
        """
        shape = [len(array)]
        while True:
            if array.null_count:
                raise ColumnTypeError(f"column {name!r} must have no nulls, got {array.null_count}")
            arrow = array.type
            if isinstance(arrow, pa.FixedShapeTensorType):
                if arrow.permutation is not None and list(arrow.permutation) != sorted(arrow.permutation):
                    return cls(memory.copy_of(array.to_numpy_ndarray()))
                shape += arrow.shape
                array = array.storage.flatten()
            elif isinstance(arrow, pa.Bool8Type):
                array, dtype_name = array.storage, "|b1"
            elif pa.types.is_fixed_size_list(arrow):
                shape.append(arrow.list_size)
                array = array.flatten()
            else:
                break
        if pa.types.is_boolean(arrow) or pa.types.is_date(arrow):
            converted = array.to_numpy(zero_copy_only=False)
            return cls(memory.copy_of(converted.reshape(shape)))
        dtype = types.dtype_of(array.type)
        if dtype is None:
            raise ColumnTypeError(f"column {name!r} must have an Arrow type that an array can view, got {arrow}")
        if dtype_name is not None:
            dtype = _renamed(array.type, dtype_name, shape, name)
        data = array.buffers()[1]
        if data is None or 0 in shape:
            return cls(np.empty(shape, dtype))
        start = array.offset * array.type.byte_width
        return cls(memory.as_array(data.slice(start), dtype, shape))

    def dump(self) -> tuple[Header, list[Any]]:
        values = self.values
        # Arrays of dates do not export their buffer.
        buffer = values if values.dtype.kind not in "mM" else values.view(np.int64)
        return (self.kind, values.dtype.str, values.shape), [buffer]

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> Column:
        """View the buffer as rows; fixed-width strings that earlier versions wrote become a text column."""
        try:
            _, dtype_name, shape = header
            (buffer,) = buffers
            values = memory.as_array(buffer, types.named_dtype(dtype_name), shape)
            return cls(values) if values.dtype.kind not in "SU" else TextColumn.from_fixed(values, "text")
        except (TypeError, ValueError) as error:
            raise FormatError(f"a tensor column's header must fit its buffers, got {header!r}: {error}") from error


def _flat_arrow(values: npt.NDArray[Any], arrow: pa.DataType, count: int) -> pa.Array:
    return pa.Array.from_buffers(arrow, count, [None, memory.as_buffer(values)])


def _renamed(arrow: pa.DataType, dtype_name: str, shape: list[int], name: str) -> np.dtype[Any]:
    """Return the dtype that the field's metadata specifies, after comparing the dtype with the storage type."""
    try:
        renamed = types.named_dtype(dtype_name)
    except ColumnTypeError as error:
        raise ColumnTypeError(f"column {name!r} must specify a supported dtype: {error}") from error
    storage = types.storage_of(renamed)
    per_element = storage.per_element
    if storage.arrow != arrow or tuple(shape[1:])[len(shape) - 1 - len(per_element) :] != per_element:
        raise ColumnTypeError(f"column {name!r} must name a dtype that fits its Arrow type {arrow}, got {dtype_name}")
    if storage.per_element:
        shape.pop()
    return renamed


def gathering(values: npt.NDArray[Any], indices: Indices, out: npt.NDArray[Any]) -> list[threads.Job]:
    """Split a gather of rows into jobs for `threads.share`."""
    parts = [(indices[part], out[part]) for part in threads.pieces(len(indices), out.nbytes)]
    return [(target.nbytes, partial(values.take, part_indices, 0, target, _MODE)) for part_indices, target in parts]


def _concatenate(arrays: list[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
    np.concatenate(arrays, 0, out, casting="no")


@np.errstate(invalid="ignore")
def _cast_and_concatenate(arrays: list[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
    """Concatenate arrays without NumPy's warning about signaling NaNs, which a cast converts to quiet NaNs."""
    np.concatenate(arrays, 0, out, casting="safe")


_Concatenate = Callable[[list[npt.NDArray[Any]], npt.NDArray[Any]], None]


def joining(
    arrays: list[npt.NDArray[Any]], out: npt.NDArray[Any], concatenate: _Concatenate = _concatenate
) -> list[threads.Job]:
    """Split a concatenation into jobs for `threads.share`; each job copies a few arrays."""
    jobs: list[threads.Job] = []
    first = start = stop = 0
    for last, array in enumerate(arrays, 1):
        stop += len(array)
        target = out[start:stop]
        if last == len(arrays) or target.nbytes >= threads.PIECE_NBYTES:
            jobs.append((target.nbytes, partial(concatenate, arrays[first:last], target)))
            first, start = last, stop
    return jobs


def _join(arrays: list[npt.NDArray[Any]], out: npt.NDArray[Any], concatenate: _Concatenate) -> None:
    if out.nbytes < threads.WORTHWHILE:
        concatenate(arrays, out)
    else:
        threads.share(joining(arrays, out, concatenate))


def _joined_dtype(arrays: list[npt.NDArray[Any]], name: str) -> np.dtype[Any]:
    """Return the common dtype of arrays, or raise ColumnMismatchError."""
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        variants = " and ".join(sorted(map(str, shapes)))
        raise ColumnMismatchError(f"column {name!r} must have one row shape to be concatenated, got {variants}")
    dtypes = [array.dtype for array in arrays]
    dtype = types.common_dtype(dtypes)
    if dtype is None:
        variants = " and ".join(dict.fromkeys(map(str, dtypes)))
        raise ColumnMismatchError(
            f"column {name!r} must have one dtype, or one that represents the others exactly, got {variants}; "
            "convert it first"
        )
    return dtype

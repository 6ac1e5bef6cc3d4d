"""TorchColumn: rows of one shape in a torch tensor, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import TORCH_KEY, numpy_dtype
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, DeviceError, FormatError

if TYPE_CHECKING:
    import torch


class TorchColumn(Column):
    """Rows of one shape in a torch tensor, for tensors that a user gives or that are moved to a device.

    On the host it shares its bytes with NumPy and Arrow like a `TensorColumn`. bfloat16, which NumPy does not have,
    goes through Arrow as uint16 with the dtype named in the field.

    Parameters
    ----------
    values
        Contiguous tensor of shape (n, ...) that needs no gradient bookkeeping. It is kept, not copied and not checked.
    """

    __slots__ = ("values",)
    kind: ClassVar[str] = "torch"
    values: torch.Tensor

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def slice(self, start: int, stop: int) -> Self:
        return type(self)(self.values[start:stop])

    def take(self, indices: Indices) -> TorchColumn:
        import torch

        # A copy: torch takes no array of negative stride, not even one of a single index, which NumPy calls contiguous.
        rows = torch.from_numpy(indices.copy()).to(self.values.device)
        return TorchColumn(movable(self.values).index_select(0, rows).view(self.values.dtype))

    def copy(self) -> Self:
        return type(self)(self.values.clone())

    def spread(self, length: int, positions: Indices) -> TorchColumn:
        import torch

        values = self.values
        out = values.new_zeros((length, *values.shape[1:]))
        movable(out)[torch.from_numpy(positions).to(out.device)] = movable(values)
        return TorchColumn(out)

    @classmethod
    def concat(cls, columns: Sequence[TorchColumn], name: str) -> TorchColumn:
        import torch

        tensors = [column.values for column in columns]
        for kind, found in (
            ("row shape", {str(tuple(t.shape[1:])) for t in tensors}),
            ("dtype", {str(t.dtype) for t in tensors}),
            ("device", {str(t.device) for t in tensors}),
        ):
            if len(found) > 1:
                raise ColumnMismatchError(
                    f"column {name!r} must have one {kind} to be joined, got {' and '.join(sorted(found))}"
                )
        return TorchColumn(torch.cat(tensors))

    def equals(self, other: Column) -> bool:
        if not isinstance(other, TorchColumn):
            return False
        a, b = self.values, other.values
        if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            return False
        same = a == b
        if a.is_floating_point() or a.is_complex():
            same |= a.isnan() & b.isnan()
        return bool(same.all())

    def to_numpy(self) -> npt.NDArray[Any]:
        if numpy_dtype(self.values.dtype) is None:
            raise ColumnTypeError(f"NumPy has no dtype for {self.values.dtype}; convert the tensor first")
        return self._bits()

    def to_torch(self) -> torch.Tensor:
        return self.values

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        array, metadata = TensorColumn(self._bits()).encode()
        return array, {TORCH_KEY: _name(self.values.dtype).encode(), **metadata}

    @classmethod
    def from_bits(cls, bits: npt.NDArray[Any], dtype_name: str) -> TorchColumn:
        """View the bytes of an array as a tensor of the named dtype; read-only bytes are copied first.

        Raises
        ------
        ColumnTypeError
            If torch has no such dtype, or the array's items are not of its size.
        """
        import torch

        dtype = _named(dtype_name)
        if bits.dtype != _bits_dtype(dtype):
            raise ColumnTypeError(f"torch dtype {dtype_name!r} cannot be read from items of {bits.dtype}")
        writable = bits if bits.flags.writeable else memory.copy_of(bits)
        return cls(torch.from_numpy(writable).view(dtype))

    def dump(self) -> tuple[Header, list[Any]]:
        return (self.kind, _name(self.values.dtype), tuple(self.values.shape)), [self._bits()]

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> TorchColumn:
        try:
            _, dtype_name, shape = header
            (buffer,) = buffers
            return cls.from_bits(memory.as_array(buffer, _bits_dtype(_named(dtype_name)), shape), dtype_name)
        except (TypeError, ValueError) as error:
            raise FormatError(f"a torch column's header {header!r} does not fit its buffers: {error}") from error

    def _bits(self) -> npt.NDArray[Any]:
        """View the tensor's bytes as an array, of the same dtype where NumPy has it, else of integers as wide."""
        values = self.values
        if values.device.type != "cpu":
            raise DeviceError(f"a column on {values.device} has no host memory; move the batch first: to_device('cpu')")
        bits: npt.NDArray[Any] = values.detach().view(_bits_torch_dtype(values.dtype)).numpy()
        return bits


def movable(values: torch.Tensor) -> torch.Tensor:
    """View a tensor in a dtype of the same width that torch can gather and scatter.

    It has no such operations for wide unsigned integers, and not all of them for 8-bit floats.
    """
    return values.view(_movable_dtype(values.dtype))


@cache
def _movable_dtype(dtype: torch.dtype) -> torch.dtype:
    return _named({1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}[dtype.itemsize])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ColumnTypeError(f"torch has no dtype {name!r}")
    return dtype


@cache
def _bits_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return numpy_dtype(dtype) or np.dtype(f"u{dtype.itemsize}")


@cache
def _bits_torch_dtype(dtype: torch.dtype) -> torch.dtype:
    return _named(_bits_dtype(dtype).name)

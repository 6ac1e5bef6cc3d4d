"""TorchColumn and RaggedTorchColumn: rows of equal or varying shape in a torch tensor on any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.casting import cast_exactly
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.ragged_rows import RaggedRows
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import TORCH_KEY, TORCH_NBYTES, check_torch_name, movable, named_torch_dtype, numpy_dtype
from samplebatch.column.varying_rows import gather, offsets_of, uniform_layout
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, DeviceError, FormatError

if TYPE_CHECKING:
    import torch


class TorchColumn(Column):
    """Rows of equal shape in a torch tensor that a user passed or that the library moved to a device.

    On the host, NumPy and Arrow share the column's bytes, as with a `TensorColumn`. bfloat16, which NumPy lacks, is
    stored in Arrow as uint16 with the dtype in the field's metadata.

    Parameters
    ----------
    values
        Contiguous tensor of shape (n, ...) without gradient. The tensor is neither copied nor validated.
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

        # A copy, because torch rejects negative strides, which even contiguous arrays of one index can have.
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
        for kind, values in (
            ("row shape", {str(tuple(t.shape[1:])) for t in tensors}),
            ("dtype", {str(t.dtype) for t in tensors}),
            ("device", {str(t.device) for t in tensors}),
        ):
            if len(values) > 1:
                raise ColumnMismatchError(
                    f"column {name!r} must have one {kind} to be joined, got {' and '.join(sorted(values))}"
                )
        return TorchColumn(torch.cat(tensors))

    def equals(self, other: Column) -> bool:
        if not isinstance(other, TorchColumn):
            return False
        a, b = self.values, other.values
        if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            return False
        is_equal = a == b
        if a.is_floating_point() or a.is_complex():
            is_equal |= a.isnan() & b.isnan()
        return bool(is_equal.all())

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
        """View the bytes of an array as a tensor of a named dtype; read-only bytes are copied first.

        Raises ColumnTypeError if tensors of the dtype cannot be built from bytes, or the item sizes differ.
        """
        import torch

        dtype = named_torch_dtype(dtype_name)
        if bits.dtype != _bits_dtype(dtype):
            raise ColumnTypeError(f"torch dtype {dtype_name!r} must be read from items of its size, got {bits.dtype}")
        writable = bits if bits.flags.writeable else memory.copy_of(bits)
        return cls(torch.from_numpy(writable).view(dtype))

    def dump(self) -> tuple[Header, list[Any]]:
        return (self.kind, _name(self.values.dtype), tuple(self.values.shape)), [self._bits()]

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> TorchColumn:
        try:
            _, dtype_name, shape = header
            (buffer,) = buffers
            return cls.from_bits(memory.as_array(buffer, _bits_dtype(named_torch_dtype(dtype_name)), shape), dtype_name)
        except (TypeError, ValueError) as error:
            raise FormatError(f"a torch column's header {header!r} must match its buffers: {error}") from error

    def _bits(self) -> npt.NDArray[Any]:
        """View the bytes as an array of the equivalent NumPy dtype, or of integers if NumPy lacks the dtype."""
        values = self.values
        if values.device.type != "cpu":
            raise DeviceError(
                f"a column must be in host memory, got {values.device}; move the batch first: to_device('cpu')"
            )
        bits: npt.NDArray[Any] = values.detach().view(_bits_torch_dtype(values.dtype)).numpy()
        return bits


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _bits_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return numpy_dtype(dtype) or np.dtype(f"u{dtype.itemsize}")


@cache
def has_bytes(dtype: torch.dtype) -> bool:
    """Whether tensors of the dtype can be written as bytes and built from bytes."""
    return _name(dtype) in TORCH_NBYTES


@cache
def _bits_torch_dtype(dtype: torch.dtype) -> torch.dtype:
    check_torch_name(_name(dtype))
    return named_torch_dtype(_bits_dtype(dtype).name)


class RaggedTorchColumn(RaggedRows):
    """Rows of varying shape in a torch tensor, for ragged columns moved to a device.

    The elements are on the device. Row offsets and shapes are on the host, so that rows and slices are located without
    waiting for the device.

    Parameters
    ----------
    elements
        Elements of all rows, a contiguous tensor of shape (m,) without gradient.
    offsets, shapes
        As in `RaggedColumn`.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> column = SampleBatch(visited=[[1, 2], [3], []]).to_torch()["visited"]
    >>> column
    RaggedTorchColumn(3 rows of torch.int64 on cpu, row shape (None,))
    >>> column[0], column[1:].elements.device
    (tensor([1, 2]), device(type='cpu'))
    """

    __slots__ = ()
    kind: ClassVar[str] = "ragged_torch"
    __array_ufunc__ = None
    elements: torch.Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[torch.Tensor], name: str) -> RaggedTorchColumn:
        """Copy tensors with equal dtypes and devices into one column.

        Raises ColumnTypeError if a tensor is a single number, or tensors differ in dtype, device or number of
        dimensions.

        >>> import torch
        >>> RaggedTorchColumn.from_rows([torch.arange(2), torch.arange(3)], "ids").lengths
        array([2, 3])
        """
        import torch

        ndim, dtype = rows[0].ndim, rows[0].dtype
        if not has_bytes(dtype):
            raise ColumnTypeError(f"column {name!r} must have a dtype that can be built from bytes, got {dtype}")
        if not ndim or any(row.ndim != ndim for row in rows):
            counts = " and ".join(map(str, sorted({row.ndim for row in rows})))
            raise ColumnTypeError(
                f"column {name!r} must have rows of one number of dimensions, at least 1, got {counts}"
            )
        if len({(row.dtype, row.device) for row in rows}) > 1:
            forms = " and ".join(sorted({f"{row.dtype} on {row.device}" for row in rows}))
            raise ColumnTypeError(f"column {name!r} must have tensors of one dtype on one device, got {forms}")
        shapes = np.array([row.shape for row in rows], np.int64).reshape(len(rows), ndim)
        elements = torch.cat([row.detach().reshape(-1) for row in rows]).resolve_conj().resolve_neg()
        return cls(elements, offsets_of(shapes.prod(1)), shapes if ndim > 1 else None)

    def cast(self, dtype: np.dtype[Any], name: str) -> RaggedTorchColumn:
        """Cast the elements to a NumPy dtype on the elements' device; a column of that dtype is returned unchanged.

        Raises ColumnMismatchError if torch lacks the dtype, or the dtype cannot represent the elements exactly.

        >>> import torch
        >>> RaggedTorchColumn.from_rows([torch.arange(2), torch.arange(3)], "ids").cast(
        ...     np.dtype("int32"), "ids"
        ... ).dtype
        torch.int32
        """
        import torch

        target = getattr(torch, dtype.name, None)
        if target is self.dtype:
            return self
        elements = self.flat.cpu()
        # NumPy lacks bfloat16.
        values = (elements.float() if elements.dtype == torch.bfloat16 else elements).numpy()
        exact = None
        if isinstance(target, torch.dtype):
            exact = cast_exactly(values, dtype) if values.size else values.astype(dtype)
        if exact is None:
            raise ColumnMismatchError(
                f"column {name!r} must store its values without loss, got {self.dtype} for {dtype}; convert them first"
            )
        elements = torch.from_numpy(exact).to(self.elements.device)
        return RaggedTorchColumn(elements, *self.layout)

    @classmethod
    def from_tensor(cls, values: torch.Tensor) -> RaggedTorchColumn:
        """View a contiguous tensor of shape (n, ...), with at least two dimensions, as rows of equal shape."""
        return cls(values.reshape(-1), *uniform_layout(values.shape))

    @classmethod
    def from_nested(cls, nested: torch.Tensor, name: str) -> RaggedTorchColumn:
        """View a nested tensor in torch's jagged layout; `to_torch` is the inverse.

        Row offsets are copied to the host. Non-contiguous rows are gathered. Raises ColumnTypeError if a dimension
        other than the second varies, or the tensor requires a gradient.

        >>> import torch
        >>> nested = torch.nested.nested_tensor(
        ...     [torch.arange(2), torch.arange(3)], layout=torch.jagged
        ... )
        >>> RaggedTorchColumn.from_nested(nested, "ids")[1]
        tensor([0, 1, 2])
        """
        ragged: Any = nested
        if ragged.dim() < 2 or ragged._ragged_idx != 1:
            raise ColumnTypeError(
                f"column {name!r} must be a jagged tensor whose second dimension varies, got one of shape "
                f"{tuple(ragged.shape)}"
            )
        if nested.requires_grad:
            raise ColumnTypeError(
                f"column {name!r} must be a tensor without a gradient, got one that requires it; call detach() first"
            )
        values = ragged.values()
        starts = ragged.offsets().cpu().numpy().astype(np.int64)
        lengths = starts[1:] - starts[:-1] if ragged.lengths() is None else ragged.lengths().cpu().numpy()
        trailing = tuple(values.shape[1:])
        size = prod(trailing)
        shapes = None
        if trailing:
            shapes = np.empty((len(lengths), 1 + len(trailing)), np.int64)
            shapes[:, 0], shapes[:, 1:] = lengths, trailing
        elements = values.contiguous().reshape(-1)
        if ragged.lengths() is None:
            return cls(elements, starts * size, shapes)
        row_parts = [
            elements[start * size : (start + rows) * size] for start, rows in zip(starts, lengths, strict=False)
        ]
        import torch

        return cls(
            torch.cat(row_parts) if row_parts else elements[:0], offsets_of(lengths.astype(np.int64) * size), shapes
        )

    @property
    def flat_column(self) -> TorchColumn:
        return TorchColumn(self.flat)

    def __repr__(self) -> str:
        rows = f"{len(self)} rows of {self.dtype} on {self.elements.device}"
        return f"RaggedTorchColumn({rows}, row shape {self.row_shape})"

    def _convert_row(self, row: Any) -> torch.Tensor:
        import torch

        source = torch.as_tensor(row, device=self.elements.device)
        converted = source.to(self.dtype)
        if source.numel() and not torch.equal(converted.to(source.dtype), source):
            raise ColumnMismatchError(
                f"rows must store values of {self.dtype} without loss, got {source.dtype}; convert them first"
            )
        return converted

    def take(self, indices: Indices) -> RaggedTorchColumn:
        import torch

        starts = self.offsets[indices]
        lengths = self.offsets[1:][indices] - starts
        device = self.elements.device
        shapes = None if self.shapes is None else self.shapes[indices]
        if device.type == "cpu":
            joined, offsets = gather(movable(self.elements).numpy(), starts, lengths)
            return RaggedTorchColumn(torch.from_numpy(joined).view(self.dtype), offsets, shapes)
        offsets = offsets_of(lengths)
        count = int(offsets[-1])
        moves = torch.from_numpy(starts - offsets[:-1]).to(device)
        # Passing the number of elements avoids waiting for the device.
        gathered = torch.repeat_interleave(moves, torch.from_numpy(lengths).to(device), output_size=count)
        gathered += torch.arange(count, device=device)
        elements = movable(self.elements).index_select(0, gathered)
        return RaggedTorchColumn(elements.view(self.dtype), offsets, shapes)

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the rows as an object array of n arrays that share memory with the column.

        Raises DeviceError if the elements are not on the host. Raises ColumnTypeError if NumPy has no dtype for the
        elements.
        """
        return RaggedColumn(self.flat_column.to_numpy(), *self.layout).to_numpy()

    def _flat_array(self) -> npt.NDArray[Any]:
        tensor = self.flat.detach().cpu()
        array: npt.NDArray[Any] = (tensor if numpy_dtype(tensor.dtype) is not None else tensor.float()).numpy()
        return array

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        dtype_name, rows = self._bits()
        array, metadata = rows.encode()
        return array, {TORCH_KEY: dtype_name.encode(), **metadata}

    @classmethod
    def from_bits(cls, rows: RaggedColumn, dtype_name: str) -> RaggedTorchColumn:
        """View the bytes of a ragged column as elements of a named torch dtype; read-only bytes are copied first.

        Raises ColumnTypeError if torch lacks the dtype, or the size of the elements differs from the dtype's item size.
        """
        return cls(TorchColumn.from_bits(rows.flat, dtype_name).values, *rows.layout)

    def dump(self) -> tuple[Header, list[Any]]:
        dtype_name, rows = self._bits()
        (_, *header), buffers = rows.dump()
        return (self.kind, dtype_name, *header), buffers

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> RaggedTorchColumn:
        try:
            _, dtype_name, *rows = header
            return cls.from_bits(RaggedColumn.load((RaggedColumn.kind, *rows), buffers), dtype_name)
        except (ColumnTypeError, TypeError, ValueError) as error:
            raise FormatError(f"a ragged torch column's header {header!r} must match its buffers: {error}") from error

    def _bits(self) -> tuple[str, RaggedColumn]:
        """Return the torch dtype's name, and the rows' bytes as arrays; see `TorchColumn.dump`."""
        (_, dtype_name, _), (bits,) = self.flat_column.dump()
        return dtype_name, RaggedColumn(bits, *self.layout)

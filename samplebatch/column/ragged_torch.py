"""RaggedTorchColumn: rows of varying shape, their elements in a torch tensor on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt
import pyarrow as pa

from samplebatch.column.flat_array import offsets_of
from samplebatch.column.interface import Header, Indices
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.torch_tensor import TorchColumn, movable
from samplebatch.column.types import TORCH_KEY
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ColumnTypeError, FormatError

if TYPE_CHECKING:
    import torch


class RaggedTorchColumn(VaryingRows):
    """Rows of varying shape in a torch tensor, for ragged columns that are moved to a device.

    The elements lie on the device. Where rows begin, and their shapes, stay on the host: a row or a slice is found
    without waiting for the device.

    Parameters
    ----------
    elements
        The elements of all rows, a contiguous tensor of shape (m,) that needs no gradient bookkeeping.
    offsets
        Where rows begin and end in `elements`, int64, shape (n + 1,), never decreasing.
    shapes
        The shape of each row, int64, shape (n, ndim); None where rows have one dimension.

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
    elements: torch.Tensor

    @property
    def flat_column(self) -> TorchColumn:
        return TorchColumn(self.flat)

    def __repr__(self) -> str:
        rows = f"{len(self)} rows of {self.dtype} on {self.elements.device}"
        return f"RaggedTorchColumn({rows}, row shape {self.row_shape})"

    def take(self, indices: Indices) -> RaggedTorchColumn:
        import torch

        starts = self.offsets[indices]
        lengths = self.offsets[1:][indices] - starts
        offsets = offsets_of(lengths)
        count, device = int(offsets[-1]), self.elements.device
        moves = torch.from_numpy(starts - offsets[:-1]).to(device)
        # With the number of elements given, the device is not waited for.
        gathered = torch.repeat_interleave(moves, torch.from_numpy(lengths).to(device), output_size=count)
        gathered += torch.arange(count, device=device)
        elements = movable(self.elements).index_select(0, gathered)
        return RaggedTorchColumn(
            elements.view(self.dtype), offsets, None if self.shapes is None else self.shapes[indices]
        )

    def pad(self, value: Any = 0) -> torch.Tensor:
        """Return the rows in one tensor, shape (n, ...), each filled up with a value to the largest extents.

        >>> from samplebatch import SampleBatch
        >>> SampleBatch(visited=[[1, 2], [3], []]).to_torch()["visited"].pad(-1)
        tensor([[ 1,  2],
                [ 3, -1],
                [-1, -1]])
        """
        import torch

        flat = self.flat
        if not flat.dtype.is_signed and flat.dtype != torch.bool and value < 0:
            # Torch itself wraps it around.
            raise OverflowError(f"rows of {flat.dtype} must be padded with a number that is not negative, got {value}")
        widest = self.extents.max(0, initial=0).tolist()
        out: torch.Tensor = flat.new_full((len(self), *widest), value)
        inside = torch.ones(out.shape, dtype=torch.bool, device=flat.device)
        extents = torch.tensor(self.extents, device=flat.device)
        for axis, width in enumerate(widest):
            places = torch.arange(width, device=flat.device).reshape(-1, *(1,) * (len(widest) - axis - 1))
            inside &= places < extents[:, axis].reshape(-1, *(1,) * len(widest))
        movable(out).masked_scatter_(inside, movable(flat))
        return out

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the rows as an array of n objects, each an array that shares memory with the column.

        Raises
        ------
        DeviceError
            If the elements lie on another device than the host.
        ColumnTypeError
            If NumPy has no dtype for them.
        """
        return RaggedColumn(self.flat_column.to_numpy(), *self.layout).to_numpy()

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        dtype_name, rows = self._bits()
        array, metadata = rows.encode()
        return array, {TORCH_KEY: dtype_name.encode(), **metadata}

    @classmethod
    def from_bits(cls, rows: RaggedColumn, dtype_name: str) -> RaggedTorchColumn:
        """View the bytes of rows of arrays as elements of the named torch dtype; read-only bytes are copied first.

        Raises
        ------
        ColumnTypeError
            If torch has no such dtype, or the elements are not of its size.
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
            raise FormatError(f"a ragged torch column's header {header!r} does not fit its buffers: {error}") from error

    def _bits(self) -> tuple[str, RaggedColumn]:
        """Name the torch dtype, and view the rows' bytes as arrays; see `TorchColumn.dump`."""
        (_, dtype_name, _), (bits,) = self.flat_column.dump()
        return dtype_name, RaggedColumn(bits, *self.layout)

"""DenseStore and TorchStore: rows of one shape, in one array."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import KINDS, TENSOR
from samplebatch.buffer.store import Range, Slots, Store, as_rows, check_rows, narrow
from samplebatch.column import memory, threads
from samplebatch.column.casting import cast_exactly
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import ColumnMismatchError

if TYPE_CHECKING:
    import torch

_ndarray = np.ndarray
_POOLED_NBYTES = 1 << 18
"""Rows of at least this size are read into the library's pool, whose warm pages save more than the call costs."""


class DenseStore(Store):
    """Rows of one shape, in one array.

    Parameters
    ----------
    name
        The column's dotted name.
    values
        Array of all slots, shape (slots, ...), C-contiguous; it is kept.

    Examples
    --------
    >>> store = DenseStore("act", np.zeros(4, np.float32))
    >>> store.write(slice(1, 3), store.fit([1, 2], 2))
    >>> store.take(np.array([[2, 1], [0, 0]]))
    array([[2., 1.],
           [0., 0.]], dtype=float32)
    >>> store.fit([0.1], 1)
    Traceback (most recent call last):
    samplebatch.errors.ColumnMismatchError: column 'act' must hold its values without loss, got float64 for float32; ...
    """

    __slots__ = ("_row_nbytes", "_values")
    kind: ClassVar[str] = "dense"
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    def __init__(self, name: str, values: npt.NDArray[Any]) -> None:
        self.name = name
        self._values = values
        self.dtype = values.dtype
        self.row_shape = values.shape[1:]
        self._row_nbytes = values.itemsize * prod(values.shape[1:])

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self._values)

    @property
    def values(self) -> Any:
        """The array of all slots, shape (slots, ...)."""
        return self._values

    @property
    def nbytes(self) -> int:
        """Bytes of the array of all slots."""
        return self._values.nbytes

    def fit(self, rows: Any, n: int) -> npt.NDArray[Any]:
        """Check n rows and convert them to the column's dtype; see `Store.fit`."""
        array = rows if type(rows) is _ndarray else as_rows(rows, self.name)
        check_rows(self.name, array, n, self.row_shape)
        if array.dtype == self.dtype:
            return array
        exact = cast_exactly(array, self.dtype)
        if exact is None:
            exact = narrow(array, self.dtype)
        if exact is None:
            raise ColumnMismatchError(
                f"column {self.name!r} must hold its values without loss, got {array.dtype} for {self.dtype}; "
                "convert them, or give the first row the wider dtype"
            )
        return exact

    def blank(self, n: int) -> npt.NDArray[Any]:
        """Return n rows of zeros."""
        return np.zeros((n, *self.row_shape), self.dtype)

    def write(self, slots: Slots, rows: npt.NDArray[Any]) -> None:
        """Write rows that `fit` returned."""
        self._values[slots] = rows[0] if type(slots) is int else rows

    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        """Gather rows into new memory; shape (*slots.shape, ...)."""
        values = self._values
        if self._row_nbytes * slots.size < _POOLED_NBYTES or not len(values):
            # With "clip", NumPy checks each index once, not twice.
            return values.take(slots, 0, None, "clip")
        out = memory.empty((*slots.shape, *self.row_shape), values.dtype)
        values.take(slots, 0, out, "clip")
        return out

    def plan_copy(self, ranges: Sequence[Range]) -> tuple[Any, list[threads.Job]]:
        """Allocate memory for ranges of slots, and cut the copy into jobs; small ranges are copied at once."""
        values = self._values
        if sum([stop - start for start, stop in ranges]) * self._row_nbytes >= _POOLED_NBYTES:
            return plan_copy(values, ranges)
        if len(ranges) == 1:
            return values[slice(*ranges[0])].copy(), []
        return np.concatenate([values[:0], *(values[start:stop] for start, stop in ranges)]), []

    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather rows into a column."""
        return TensorColumn(self.take(slots))

    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `to_column` made."""
        self.write(slots, self.fit(column.to_numpy(), len(slots)))


class TorchStore(DenseStore):
    """Rows of torch tensors of one shape, on the host, read as tensors.

    Parameters
    ----------
    name
        The column's dotted name.
    values
        Array of all slots, shape (slots, ...), C-contiguous; it is kept.
    torch_dtype
        The tensors' dtype, of the same width as the array's.

    Examples
    --------
    >>> import torch
    >>> store = TorchStore("policy.hidden_state", np.zeros((4, 2), np.float32), torch.float32)
    >>> store.write(0, store.fit(torch.ones(1, 2), 1))
    >>> store.take(np.array([0, 3]))
    tensor([[1., 1.],
            [0., 0.]])
    """

    __slots__ = ("torch_dtype",)
    kind: ClassVar[str] = "torch"

    def __init__(self, name: str, values: npt.NDArray[Any], torch_dtype: torch.dtype) -> None:
        super().__init__(name, values)
        self.torch_dtype = torch_dtype

    @property
    def values(self) -> torch.Tensor:
        """The tensor of all slots, shape (slots, ...), over the array's memory."""
        return self._tensor(self._values)

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(array).view(self.torch_dtype)

    def fit(self, rows: Any, n: int) -> npt.NDArray[Any]:
        """Check n rows and convert them to the column's dtype; see `Store.fit`."""
        if KINDS[type(rows)] == TENSOR and rows.dtype == self.torch_dtype:
            rows = tensor_bits(rows)
            check_rows(self.name, rows, n, self.row_shape)
            return np.asarray(rows)
        if str(self.torch_dtype).removeprefix("torch.") != self.dtype.name:
            found = getattr(rows, "dtype", type(rows).__name__)
            raise ColumnMismatchError(f"column {self.name!r} must have tensors of {self.torch_dtype}, got {found}")
        return super().fit(rows, n)

    def take(self, slots: npt.NDArray[np.intp]) -> torch.Tensor:
        """Gather rows into a new tensor; shape (*slots.shape, ...)."""
        return self._tensor(super().take(slots))

    def plan_copy(self, ranges: Sequence[Range]) -> tuple[Any, list[threads.Job]]:
        """Allocate room for ranges of slots, and cut the copying into jobs."""
        out, jobs = super().plan_copy(ranges)
        return self._tensor(out), jobs

    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather rows into a column."""
        return TorchColumn(self.take(slots))

    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `to_column` made."""
        self.write(slots, self.fit(column.to_torch(), len(slots)))


def tensor_bits(rows: torch.Tensor) -> npt.NDArray[Any]:
    """View a tensor's elements as an array; those of a dtype that NumPy lacks as integers of their width."""
    plain = rows.detach().resolve_conj().resolve_neg()
    try:
        return plain.numpy(force=True)
    except TypeError:
        import torch

        return plain.cpu().contiguous().view({1: torch.uint8, 2: torch.int16}[plain.element_size()]).numpy()


def plan_copy(values: npt.NDArray[Any], ranges: Sequence[Range]) -> tuple[npt.NDArray[Any], list[threads.Job]]:
    """Allocate room for the rows of ranges of an array, one after the other, and cut the copying into jobs."""
    rows = sum([stop - start for start, stop in ranges])
    out = memory.empty((rows, *values.shape[1:]), values.dtype)
    jobs: list[threads.Job] = []
    at = 0
    for start, stop in ranges:
        nbytes = (stop - start) * (values.nbytes // len(values))
        for part in threads.pieces(stop - start, nbytes):
            source = values[start + part.start : start + part.stop]
            jobs.append((source.nbytes, partial(np.copyto, out[at + part.start : at + part.stop], source)))
        at += stop - start
    return out, jobs

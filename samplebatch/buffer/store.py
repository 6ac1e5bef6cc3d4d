"""Stores, which contain the rows of one column of a buffer in numbered slots that can be overwritten.

A row is written in two steps, so that no column changes if any column rejects the row: `fit` validates and converts
rows, and `write` stores the converted rows and cannot fail.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from samplebatch.batch.delivery import column_of_arrays
from samplebatch.batch.nested.node import ARRAY, KINDS, NUMBER, TENSOR
from samplebatch.column import memory, threads
from samplebatch.column.casting import cast_exactly
from samplebatch.column.convert import as_ragged
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn, value_nbytes
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.types import storage_of
from samplebatch.column.varying_rows import gather
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

if TYPE_CHECKING:
    import torch


Slots = npt.NDArray[np.intp] | slice | int
"""Slots to write: numbers of shape (n,) in any order, a slice, or a single number."""

Range = tuple[int, int]
"""Range of slots: start and stop."""

_ndarray = np.ndarray


class Store(ABC):
    """Abstract store of one column's rows in numbered slots, used by `Columns`.

    dtype, row_shape: dtype and shape of rows that `values[slot] = row` can store without `fit`; None if all rows
        require `fit`.
    """

    __slots__ = ("dtype", "name", "row_shape")
    kind: ClassVar[str]
    name: str
    dtype: np.dtype[Any] | None
    row_shape: tuple[int, ...] | None

    @property
    @abstractmethod
    def slots(self) -> int:
        """Number of slots."""

    @property
    @abstractmethod
    def values(self) -> Any:
        """Rows of all slots, for the attributes of buffers; if one array stores all rows, this array without a copy."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size of all slots in bytes; for Python objects, only the references are included."""

    @abstractmethod
    def fit(self, rows: Any, n: int) -> Any:
        """Validate and convert n rows with leading axis n, without changes to the store."""

    @abstractmethod
    def blank(self, n: int) -> Any:
        """Return n rows of default values for `write`: zeros, None, or rows without elements."""

    @abstractmethod
    def write(self, slots: Slots, rows: Any) -> None:
        """Write rows returned by `fit`; for duplicate slots the last row wins."""

    @abstractmethod
    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        """Gather rows into new memory, shape (..., *row shape), for valid slots of shape (...)."""

    @abstractmethod
    def gathered_nbytes(self, slots: npt.NDArray[np.intp]) -> int:
        """Return the size in bytes of the rows that `take` would gather, without gathering the rows."""

    @abstractmethod
    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather the rows of slots, shape (n,), into a column of n rows, for checkpoints and files."""

    @abstractmethod
    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `to_column` returned."""

    def plan_copy(self, ranges: Sequence[Range]) -> tuple[Any, list[threads.Job]]:
        """Allocate memory for the concatenated rows of slot ranges; return the memory and the jobs that fill it."""
        pairs = [np.arange(start, stop) for start, stop in ranges]
        return self.take(np.concatenate([np.zeros(0, np.intp), *pairs])), []


def check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Raise ColumnTypeError if columns do not support a dtype."""
    try:
        storage_of(dtype)
    except ColumnTypeError as error:
        raise ColumnTypeError(f"column {name!r} must have a dtype that columns support, got {dtype}") from error


def check_rows(name: str, array: Any, n: int, row_shape: tuple[int, ...]) -> None:
    """Raise ColumnLengthError or ColumnMismatchError unless an array has the shape (n, *row_shape)."""
    shape = tuple(array.shape)
    if shape == (n, *row_shape):
        return
    if shape[1:] == row_shape:
        raise ColumnLengthError(f"column {name!r} must have {n} rows, got {shape[0]}")
    raise ColumnMismatchError(f"column {name!r} must have rows of shape {row_shape}, got {shape[1:]}")


def as_rows(rows: Any, name: str) -> npt.NDArray[Any]:
    """Convert rows to a numeric array if all rows are numbers of equal shape, otherwise to an object array."""
    if type(rows) is _ndarray:
        array = rows
    elif KINDS[type(rows)] == TENSOR:
        array = rows.detach().resolve_conj().resolve_neg().numpy(force=True)
    elif isinstance(rows, np.ma.MaskedArray):
        raise ColumnTypeError(f"column {name!r} must not be a masked array, got one; call filled() first")
    elif isinstance(rows, Sequence) and not isinstance(rows, (str, bytes)):
        numbers = all(KINDS[cls] in (ARRAY, NUMBER) for cls in set(map(type, rows)))
        one_shape = numbers and len({np.shape(row) for row in rows}) == 1
        array = np.asarray(rows) if one_shape else object_rows(rows, name)
    else:
        array = np.asarray(rows)
    if not array.ndim:
        raise ColumnTypeError(f"column {name!r} must have rows, got a single {type(rows).__name__}")
    return array.astype(object) if array.dtype.kind in "SUT" else array


def object_rows(rows: Any, name: str) -> npt.NDArray[Any]:
    """Convert rows of any type to an array of objects, shape (n,)."""
    if isinstance(rows, _ndarray) and rows.dtype.kind == "O" and rows.ndim == 1:
        return rows
    if isinstance(rows, (str, bytes)) or not hasattr(rows, "__len__") or getattr(rows, "ndim", 1) == 0:
        raise ColumnTypeError(f"column {name!r} must have rows, got a single {type(rows).__name__}")
    return np.fromiter(rows, object, len(rows))


def narrow(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Cast numbers to a dtype of a narrower kind, such as float to integer; return None if a value would change.

    >>> narrow(np.array([2.0, 0.0]), np.dtype("i8")), narrow(np.array([0.7]), np.dtype("i8"))
    (array([2, 0]), None)
    """
    if array.dtype.kind not in "biufc" or dtype.kind not in "biufc":
        return None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        cast = array.astype(dtype)
        restored = cast.astype(array.dtype)
    return cast if np.array_equal(restored, array) else None


_POOLED_NBYTES = 1 << 18
"""Minimum size of rows that are read into pooled memory, whose warm pages outweigh the call."""


class ArrayStore(Store):
    """Base class of stores whose rows are in one array of numbers or Python objects, shape (slots, ...)."""

    __slots__ = ("_values",)
    _values: npt.NDArray[Any]

    @property
    def slots(self) -> int:
        return len(self._values)

    @property
    def values(self) -> Any:
        return self._values

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def write(self, slots: Slots, rows: npt.NDArray[Any]) -> None:
        self._values[slots] = rows[0] if type(slots) is int else rows


class DenseStore(ArrayStore):
    """Store of rows of equal shape, backed by the given C-contiguous array of shape (slots, ...) without a copy.

    >>> store = DenseStore("act", np.zeros(4, np.float32))
    >>> store.write(slice(1, 3), store.fit([1, 2], 2))
    >>> store.take(np.array([[2, 1], [0, 0]]))
    array([[2., 1.],
           [0., 0.]], dtype=float32)
    >>> store.fit([0.1], 1)
    Traceback (most recent call last):
    samplebatch.errors.ColumnMismatchError: column 'act' must store its values without loss,
        got float64 for float32; ...
    """

    __slots__ = ("_row_nbytes",)
    kind: ClassVar[str] = "dense"
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    def __init__(self, name: str, values: npt.NDArray[Any]) -> None:
        self.name = name
        self._values = values
        self.dtype = values.dtype
        self.row_shape = values.shape[1:]
        self._row_nbytes = values.itemsize * prod(values.shape[1:])

    def fit(self, rows: Any, n: int) -> npt.NDArray[Any]:
        array = rows if type(rows) is _ndarray else as_rows(rows, self.name)
        if array.shape != (n, *self.row_shape):
            check_rows(self.name, array, n, self.row_shape)
        if array.dtype == self.dtype:
            return array
        exact = cast_exactly(array, self.dtype)
        if exact is None:
            exact = narrow(array, self.dtype)
        if exact is None:
            raise ColumnMismatchError(
                f"column {self.name!r} must store its values without loss, got {array.dtype} for {self.dtype}; "
                "convert them, or use the wider dtype in the first row"
            )
        return exact

    def blank(self, n: int) -> npt.NDArray[Any]:
        return np.zeros((n, *self.row_shape), self.dtype)

    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        values = self._values
        if self._row_nbytes * slots.size < _POOLED_NBYTES or not len(values):
            # With "clip", NumPy checks each index once instead of twice.
            return values.take(slots, 0, None, "clip")
        out = memory.empty((*slots.shape, *self.row_shape), values.dtype)
        values.take(slots, 0, out, "clip")
        return out

    def gathered_nbytes(self, slots: npt.NDArray[np.intp]) -> int:
        return slots.size * self._row_nbytes

    def plan_copy(self, ranges: Sequence[Range]) -> tuple[Any, list[threads.Job]]:
        values = self._values
        if sum([stop - start for start, stop in ranges]) * self._row_nbytes >= _POOLED_NBYTES:
            return plan_copy(values, ranges)
        if len(ranges) == 1:
            return values[slice(*ranges[0])].copy(), []
        return np.concatenate([values[:0], *(values[start:stop] for start, stop in ranges)]), []

    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        return TensorColumn(self.take(slots))

    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        self.write(slots, self.fit(column.to_numpy(), len(slots)))


class TorchStore(DenseStore):
    """Store of torch tensors of equal shape, in a host array with the same element size as the tensors.

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
        return self._tensor(self._values)

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(array).view(self.torch_dtype)

    def fit(self, rows: Any, n: int) -> npt.NDArray[Any]:
        if KINDS[type(rows)] == TENSOR and rows.dtype == self.torch_dtype:
            rows = tensor_bits(rows)
            check_rows(self.name, rows, n, self.row_shape)
            return np.asarray(rows)
        if str(self.torch_dtype).removeprefix("torch.") != self.dtype.name:
            actual = getattr(rows, "dtype", type(rows).__name__)
            raise ColumnMismatchError(f"column {self.name!r} must have tensors of {self.torch_dtype}, got {actual}")
        return super().fit(rows, n)

    def take(self, slots: npt.NDArray[np.intp]) -> torch.Tensor:
        return self._tensor(super().take(slots))

    def plan_copy(self, ranges: Sequence[Range]) -> tuple[Any, list[threads.Job]]:
        out, jobs = super().plan_copy(ranges)
        return self._tensor(out), jobs

    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        return TorchColumn(self.take(slots))

    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        self.write(slots, self.fit(column.to_torch(), len(slots)))


def tensor_bits(rows: torch.Tensor) -> npt.NDArray[Any]:
    """View a tensor as an array; a dtype that NumPy lacks is viewed as an integer dtype of the same element size."""
    plain = rows.detach().resolve_conj().resolve_neg()
    try:
        return plain.numpy(force=True)
    except TypeError:
        import torch

        return plain.cpu().contiguous().view({1: torch.uint8, 2: torch.int16}[plain.element_size()]).numpy()


def plan_copy(values: npt.NDArray[Any], ranges: Sequence[Range]) -> tuple[npt.NDArray[Any], list[threads.Job]]:
    """Allocate memory for the concatenated rows of array ranges, and split the copy into jobs."""
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


class ObjectStore(ArrayStore):
    """Store of Python objects: one object per row, or object arrays of equal shape. Unwritten slots contain None.

    >>> store = ObjectStore("info.text", 3)
    >>> store.write(1, store.fit(["key found"], 1))
    >>> store.values
    array([None, 'key found', None], dtype=object)
    """

    __slots__ = ("shape",)
    kind: ClassVar[str] = "object"

    def __init__(self, name: str, slots: int, row_shape: tuple[int, ...] = ()) -> None:
        self.name = name
        self.dtype = self.row_shape = None
        self.shape = row_shape
        self._values = np.empty((slots, *row_shape), object)

    def fit(self, rows: Any, n: int) -> npt.NDArray[Any]:
        if self.shape:
            array = as_rows(rows, self.name)
        else:
            # Rows would be views of an array that the caller may modify.
            numbers = isinstance(rows, np.ndarray) and rows.dtype.kind != "O"
            array = object_rows(rows.copy() if numbers else rows, self.name)
        check_rows(self.name, array, n, self.shape)
        return array

    def blank(self, n: int) -> npt.NDArray[Any]:
        return np.empty((n, *self.shape), object)

    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        return self._values.take(slots, 0)

    def gathered_nbytes(self, slots: npt.NDArray[np.intp]) -> int:
        unique_slots, counts = np.unique(slots, return_counts=True)
        rows = self._values[unique_slots].reshape(len(unique_slots), -1).tolist()
        return sum(count * (8 + value_nbytes(row)) for row, count in zip(rows, counts.tolist(), strict=True))

    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        rows = self._values.take(slots, 0)
        return ObjectColumn(rows) if rows.ndim == 1 else ObjectColumn.from_rows(rows.tolist())

    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        rows = column.to_numpy()
        if self.shape:
            block = np.empty((len(rows), *self.shape), object)
            block[...] = rows.tolist()
            rows = block
        self.write(slots, self.fit(rows, len(slots)))


_SPARE = 2
"""Size of a compacted array, as a multiple of the elements in use."""

_PIECE = 1 << 16
"""Rows moved at once during compaction."""


class RaggedStore(Store):
    """Store of rows of varying shape, with a common dtype and number of dimensions, in one array.

    Rows are appended to the array. When the array is full, the rows in use are compacted into a new array of twice the
    total size of these rows. Memory usage is a small multiple of the size of the rows in use, regardless of the number
    of writes. On average, each element is moved about once. An unwritten slot contains a row without elements.

    >>> store = RaggedStore("obs", 4, np.dtype(np.int64), 1)
    >>> store.write(np.array([0, 1]), store.fit([[1, 2], [3]], 2))
    >>> list(store.take(np.array([1, 0, 2])))
    [array([3]), array([1, 2]), array([], dtype=int64)]
    """

    __slots__ = ("_elements", "_end", "_is_open", "_lengths", "_shapes", "_starts", "item", "ndim")
    kind: ClassVar[str] = "ragged"

    def __init__(self, name: str, slots: int, dtype: np.dtype[Any], ndim: int) -> None:
        self.name = name
        self.dtype = self.row_shape = None
        self.item = dtype
        self._is_open = False
        self.ndim = ndim
        self._elements = memory.empty((0,), dtype)
        self._end = 0
        self._starts = np.zeros(slots, np.int64)
        self._lengths = np.zeros(slots, np.int64)
        self._shapes = np.zeros((slots, ndim), np.int64) if ndim > 1 else None

    @classmethod
    def for_rows(cls, name: str, first_rows: Any, slots: int) -> RaggedStore:
        """Create an empty store with the dtype and number of dimensions of the given rows."""
        rows = ragged_rows(first_rows, name)
        store = cls(name, slots, rows.dtype, rows.ndim)
        store._is_open = not len(rows.flat)
        return store

    @property
    def slots(self) -> int:
        return len(self._starts)

    @property
    def values(self) -> RaggedColumn:
        return self._column(np.arange(self.slots))

    @property
    def nbytes(self) -> int:
        shapes = 0 if self._shapes is None else self._shapes.nbytes
        return self._elements.nbytes + self._starts.nbytes + self._lengths.nbytes + shapes

    def fit(self, rows: Any, n: int) -> RaggedColumn:
        column = ragged_rows(rows, self.name)
        if len(column) != n:
            raise ColumnLengthError(f"column {self.name!r} must have {n} rows, got {len(column)}")
        if column.ndim != self.ndim:
            raise ColumnMismatchError(
                f"column {self.name!r} must have rows of {self.ndim} dimensions, got {column.ndim}"
            )
        # The first rows with elements determine the dtype.
        return column if self._is_open and len(column.flat) else column.cast(self.item, self.name)

    def blank(self, n: int) -> RaggedColumn:
        shapes = np.zeros((n, self.ndim), np.int64) if self.ndim > 1 else None
        return RaggedColumn(memory.empty((0,), self.item), np.zeros(n + 1, np.int64), shapes)

    def write(self, slots: Slots, rows: RaggedColumn) -> None:
        count = len(rows.flat)
        if count and self._is_open:
            self._is_open = False
            self.item = rows.dtype
            self._elements = memory.empty((0,), self.item)
        if self._end + count > len(self._elements):
            self._compact(slots, count)
        self._elements[self._end : self._end + count] = rows.flat
        lengths = rows.lengths
        starts = rows.offsets[:-1] - rows.offsets[0] + self._end
        is_single = type(slots) is int
        self._starts[slots] = starts[0] if is_single else starts
        self._lengths[slots] = lengths[0] if is_single else lengths
        if self._shapes is not None and rows.shapes is not None:
            self._shapes[slots] = rows.shapes[0] if is_single else rows.shapes
        self._end += count

    def _compact(self, slots: Slots, count: int) -> None:
        """Move all rows except the rows at `slots` to a new array, with capacity for at least `count` more elements."""
        lengths = self._lengths.copy()
        lengths[slots] = 0
        required = int(lengths.sum()) + count
        # At least one element per slot, or many short rows would be compacted after every few writes.
        elements = memory.empty((max(_SPARE * required, self.slots),), self.item)
        starts = np.empty_like(self._starts)
        end = 0
        for first in range(0, self.slots, _PIECE):
            part = slice(first, first + _PIECE)
            moved, offsets = gather(self._elements, self._starts[part], lengths[part])
            elements[end : end + len(moved)] = moved
            starts[part] = offsets[:-1] + end
            end += len(moved)
        self._elements, self._starts, self._lengths, self._end = elements, starts, lengths, end

    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        column = self._column(slots.reshape(-1))
        return column if slots.ndim == 1 else column.to_numpy().reshape(slots.shape)

    def gathered_nbytes(self, slots: npt.NDArray[np.intp]) -> int:
        elements = int(self._lengths[slots].sum()) * self.item.itemsize
        return elements + slots.size * 8 * (1 + (self.ndim if self.ndim > 1 else 0))

    def _column(self, slots: npt.NDArray[np.intp]) -> RaggedColumn:
        elements, offsets = gather(self._elements, self._starts[slots], self._lengths[slots])
        return RaggedColumn(elements, offsets, None if self._shapes is None else self._shapes[slots])

    def to_column(self, slots: npt.NDArray[np.intp]) -> Column:
        return self._column(slots)

    def load_column(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        self.write(slots, self.fit(column, len(slots)))


def ragged_rows(rows: Any, name: str) -> RaggedColumn:
    """View rows as a ragged column; non-contiguous rows are copied.

    >>> ragged_rows(np.zeros((2, 3)), "obs").lengths, ragged_rows([[1.0], []], "obs").lengths
    (array([3, 3]), array([1, 0]))
    """
    if isinstance(rows, list | tuple):
        return RaggedColumn.from_rows(rows, name)
    return cast("RaggedColumn", column_of_arrays(as_ragged(rows, name)))

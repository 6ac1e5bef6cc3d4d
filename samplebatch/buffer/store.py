"""Where a buffer keeps the rows of one column: numbered slots, each of which may be written many times.

A row is written in two steps, so that an `add` that one column refuses changes no other: `fit` checks rows and makes
them ready, `write` puts them into their slots and cannot fail.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import ARRAY, KINDS, NUMBER, TENSOR
from samplebatch.column import cores, memory
from samplebatch.column.casting import cast_exactly
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.types import NUMBERS, storage_of
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

if TYPE_CHECKING:
    import torch

Slots = npt.NDArray[np.intp] | slice | int
"""Slots to be written: their numbers, shape (n,), in any order; a slice of them; or one."""

Range = tuple[int, int]
"""Slots that follow each other: the first one, and the one after the last."""

Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Makes the array of all slots, zeroed: takes the column's dotted name, the shape (slots, ...) and the dtype.

When it is asked for a name once more, with more slots, it replaces the array that it made before."""

_ndarray = np.ndarray
_POOLED_NBYTES = 1 << 18
"""Gathered rows from this size on come out of the library's pool, whose warm pages save more than the call costs."""


def zeroed(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate zeros, 64-byte aligned, of which the system gives no page before it is written to.

    >>> zeroed("obs", (1_000_000, 3), np.dtype("f4")).shape
    (1000000, 3)
    """
    nbytes = dtype.itemsize * prod(shape)
    block = np.zeros(nbytes + memory.ALIGNMENT, np.uint8)
    start = -block.ctypes.data % memory.ALIGNMENT
    return _ndarray(shape, dtype, block.data, start)


class Store(ABC):
    """Rows of one column in numbered slots.

    Attributes
    ----------
    kind
        The class's name in files.
    name
        The column's dotted name, for errors.
    dtype, row_shape
        Dtype and shape of the arrays that `values[slot] = row` stores without asking `fit`; None where there are none
        such.
    """

    __slots__ = ("dtype", "name", "row_shape")
    kind: ClassVar[str]
    name: str
    dtype: np.dtype[Any] | None
    row_shape: tuple[int, ...] | None

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many slots there are."""

    @property
    @abstractmethod
    def values(self) -> Any:
        """What a buffer hands out for the column: the array of all slots where the rows lie in one."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the slots occupy; for Python objects, those of the references."""

    @abstractmethod
    def fit(self, rows: Any, n: int) -> Any:
        """Check n rows, leading axis n, and return them ready to be written; nothing is changed.

        Raises
        ------
        ColumnLengthError
            If there are not n rows; names the column.
        ColumnMismatchError
            If the rows have another shape, or a value that the dtype cannot hold without loss; names the column.
        ColumnTypeError
            If they are nothing that the column could hold; names the column.
        """

    @abstractmethod
    def blank(self, n: int) -> Any:
        """Return n rows ready to be written that stand for rows not given: zeros, None, rows without elements."""

    @abstractmethod
    def write(self, slots: Slots, rows: Any) -> None:
        """Write rows that `fit` returned; of several rows for one slot the last stays."""

    @abstractmethod
    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        """Gather rows into new memory: slots of any shape (...) in [0, number of slots) give (..., *row shape)."""

    @abstractmethod
    def live(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather the rows of slots, shape (n,), into a column of n rows, for checkpoints and files."""

    @abstractmethod
    def restore(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `live` made.

        Raises
        ------
        SampleBatchError
            As `fit` does.
        """

    def copying(self, ranges: Sequence[Range]) -> tuple[Any, list[cores.Job]]:
        """Return room for the rows of ranges of slots, one after the other, and the jobs that copy them there."""
        pairs = [np.arange(start, stop) for start, stop in ranges]
        return self.take(np.concatenate([np.zeros(0, np.intp), *pairs])), []


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

    __slots__ = ("_values",)
    kind: ClassVar[str] = "dense"
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    def __init__(self, name: str, values: npt.NDArray[Any]) -> None:
        self.name = name
        self._values = values
        self.dtype = values.dtype
        self.row_shape = values.shape[1:]

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
            exact = narrowed(array, self.dtype)
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
        return gathered(self._values, slots)

    def copying(self, ranges: Sequence[Range]) -> tuple[Any, list[cores.Job]]:
        """Allocate room for ranges of slots, and cut the copying into jobs."""
        return copying(self._values, ranges)

    def live(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather rows into a column."""
        return TensorColumn(gathered(self._values, slots))

    def restore(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `live` made."""
        self.write(slots, self.fit(column.to_numpy(), len(slots)))


class TorchStore(DenseStore):
    """Rows of torch tensors of one shape, on the host; what is read comes as tensors again.

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
        return self._tensor(gathered(self._values, slots))

    def copying(self, ranges: Sequence[Range]) -> tuple[Any, list[cores.Job]]:
        """Allocate room for ranges of slots, and cut the copying into jobs."""
        out, jobs = copying(self._values, ranges)
        return self._tensor(out), jobs

    def live(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather rows into a column."""
        return TorchColumn(self.take(slots))

    def restore(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `live` made."""
        self.write(slots, self.fit(column.to_torch(), len(slots)))


class ObjectStore(Store):
    """Rows of Python objects: one a row, or an array of them of one shape. Slots that were never written hold None.

    Parameters
    ----------
    name
        The column's dotted name.
    slots
        How many slots there are.
    row_shape
        Shape of one row.

    Examples
    --------
    >>> store = ObjectStore("info.text", 3)
    >>> store.write(1, store.fit(["key found"], 1))
    >>> store.values
    array([None, 'key found', None], dtype=object)
    """

    __slots__ = ("_values", "shape")
    kind: ClassVar[str] = "object"

    def __init__(self, name: str, slots: int, row_shape: tuple[int, ...] = ()) -> None:
        self.name = name
        self.dtype = self.row_shape = None
        self.shape = row_shape
        self._values = np.empty((slots, *row_shape), object)

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
        """Bytes of the references."""
        return self._values.nbytes

    def fit(self, rows: Any, n: int) -> npt.NDArray[Any]:
        """Put n rows into an array of objects; see `Store.fit`."""
        array = object_rows(rows, self.name) if not self.shape else as_rows(rows, self.name)
        check_rows(self.name, array, n, self.shape)
        return array

    def blank(self, n: int) -> npt.NDArray[Any]:
        """Return n rows of None."""
        return np.empty((n, *self.shape), object)

    def write(self, slots: Slots, rows: npt.NDArray[Any]) -> None:
        """Write rows that `fit` returned."""
        self._values[slots] = rows[0] if type(slots) is int else rows

    def take(self, slots: npt.NDArray[np.intp]) -> Any:
        """Gather references; shape (*slots.shape, ...)."""
        return self._values.take(slots, 0)

    def live(self, slots: npt.NDArray[np.intp]) -> Column:
        """Gather the objects into a column; rows that are arrays of objects become lists."""
        rows = self._values.take(slots, 0)
        return ObjectColumn(rows) if rows.ndim == 1 else ObjectColumn.from_rows(rows.tolist())

    def restore(self, slots: npt.NDArray[np.intp], column: Column) -> None:
        """Write the rows of a column that `live` made."""
        rows = column.to_numpy()
        if self.shape:
            block = np.empty((len(rows), *self.shape), object)
            block[...] = rows.tolist()
            rows = block
        self.write(slots, self.fit(rows, len(slots)))


def store_for(name: str, first_rows: Any, slots: int, allocate: Allocate = zeroed) -> Store:
    """Make the store that suits the first rows seen of a column; they are not written.

    Parameters
    ----------
    name
        The column's dotted name.
    first_rows
        Rows, leading axis n: an array, a tensor, or a sequence.
    slots
        How many slots to make.
    allocate
        Where the memory of rows of one shape comes from.

    Raises
    ------
    ColumnTypeError
        If no column can hold the rows; names the column.

    Examples
    --------
    >>> store_for("rew", np.zeros(2), 10).kind, store_for("info.text", ["a"], 10).kind
    ('dense', 'object')
    """
    if KINDS[type(first_rows)] == TENSOR:
        bits = tensor_bits(first_rows)
        return TorchStore(name, allocate(name, (slots, *bits.shape[1:]), bits.dtype), first_rows.dtype)
    rows = as_rows(first_rows, name)
    if rows.dtype.kind == "O":
        return ObjectStore(name, slots, rows.shape[1:])
    # Not newbyteorder() in any case: dtypes that are one object are told apart fastest.
    dtype = rows.dtype if rows.dtype.isnative else rows.dtype.newbyteorder("=")
    if dtype not in NUMBERS:
        check_dtype(name, dtype)
    return DenseStore(name, allocate(name, (slots, *rows.shape[1:]), dtype))


def check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Raise ColumnTypeError if no column can hold a dtype; names the column."""
    try:
        storage_of(dtype)
    except ColumnTypeError as error:
        raise ColumnTypeError(f"column {name!r} has dtype {dtype}, which no column can hold") from error


def check_rows(name: str, array: Any, n: int, row_shape: tuple[int, ...]) -> None:
    """Raise ColumnLengthError or ColumnMismatchError unless an array has the shape (n, *row_shape)."""
    shape = tuple(array.shape)
    if shape == (n, *row_shape):
        return
    if shape[1:] == row_shape:
        raise ColumnLengthError(f"column {name!r} must have {n} rows, got {shape[0]}")
    raise ColumnMismatchError(f"column {name!r} must have rows of shape {row_shape}, got {shape[1:]}")


def as_rows(rows: Any, name: str) -> npt.NDArray[Any]:
    """Turn rows into an array: of numbers where they are some of one shape, else of objects.

    Raises
    ------
    ColumnTypeError
        If there is no leading axis; names the column.
    """
    if type(rows) is _ndarray:
        array = rows
    elif KINDS[type(rows)] == TENSOR:
        array = rows.detach().resolve_conj().resolve_neg().numpy(force=True)
    elif isinstance(rows, np.ma.MaskedArray):
        raise ColumnTypeError(f"column {name!r} must have no mask, which no column can hold; call filled() first")
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
    """Turn rows into an array of objects, shape (n,), whatever each of them is.

    Raises
    ------
    ColumnTypeError
        If there is no leading axis; names the column.
    """
    if isinstance(rows, _ndarray) and rows.dtype.kind == "O" and rows.ndim == 1:
        return rows
    if isinstance(rows, (str, bytes)) or not hasattr(rows, "__len__") or getattr(rows, "ndim", 1) == 0:
        raise ColumnTypeError(f"column {name!r} must have rows, got a single {type(rows).__name__}")
    return np.fromiter(rows, object, len(rows))


def tensor_bits(rows: torch.Tensor) -> npt.NDArray[Any]:
    """View a tensor's elements as an array; those of a dtype that NumPy lacks as integers of their width."""
    plain = rows.detach().resolve_conj().resolve_neg()
    try:
        return plain.numpy(force=True)
    except TypeError:
        import torch

        return plain.cpu().contiguous().view({1: torch.uint8, 2: torch.int16}[plain.element_size()]).numpy()


def narrowed(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Convert numbers to a dtype of a narrower kind, or give None if a value would change.

    >>> narrowed(np.array([2.0, 0.0]), np.dtype("i8")), narrowed(np.array([0.7]), np.dtype("i8"))
    (array([2, 0]), None)
    """
    if array.dtype.kind not in "biufc" or dtype.kind not in "biufc":
        return None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        cast = array.astype(dtype)
        back = cast.astype(array.dtype)
    return cast if np.array_equal(back, array) else None


def copying(values: npt.NDArray[Any], ranges: Sequence[Range]) -> tuple[npt.NDArray[Any], list[cores.Job]]:
    """Allocate room for the rows of ranges of an array, one after the other, and cut the copying into jobs."""
    rows = sum([stop - start for start, stop in ranges])
    out = memory.empty((rows, *values.shape[1:]), values.dtype)
    jobs: list[cores.Job] = []
    at = 0
    for start, stop in ranges:
        nbytes = (stop - start) * (values.nbytes // len(values))
        for part in cores.pieces(stop - start, nbytes):
            source = values[start + part.start : start + part.stop]
            jobs.append((source.nbytes, partial(np.copyto, out[at + part.start : at + part.stop], source)))
        at += stop - start
    return out, jobs


def gathered(values: npt.NDArray[Any], slots: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
    """Gather rows of an array by slots of any shape, all of which must be in range."""
    if values.itemsize * slots.size * prod(values.shape[1:]) < _POOLED_NBYTES or not len(values):
        # Clipping is what makes NumPy skip a second look at every index.
        return values.take(slots, 0, None, "clip")
    out = memory.empty((*slots.shape, *values.shape[1:]), values.dtype)
    values.take(slots, 0, out, "clip")
    return out

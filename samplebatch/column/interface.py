"""Interface of all columns.

A column stores `n` rows of one kind: `TensorColumn` (rows of equal shape), `RaggedColumn` (rows of varying shape),
`TextColumn` (strings or bytes), `ObjectColumn` (Python objects) or `CompressedColumn` (LZ4 blocks of a tensor column).
`TorchColumn` (rows of equal shape) and `RaggedTorchColumn` (rows of varying shape) store rows in a torch tensor.

Length and dtype of a column are fixed. Values can be overwritten through views, except in text, compressed rows and
read-only memory. `slice` returns a view; `take`, `copy`, `concat` and `spread` return copies. Callers must ensure that
row indices are in `[0, n)`, and that `start` is at most `stop`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from samplebatch.errors import RowIndexError

if TYPE_CHECKING:
    import pyarrow as pa
    import torch


Header = tuple[Any, ...]
"""Description of a column besides its buffers: strings, integers and tuples, `kind` first."""

Indices = npt.NDArray[np.intp]


def _restore(kind: type[Column], header: Header, buffers: list[Any]) -> Column:
    # Unpickling a column means trusting its bytes already.
    return kind.load(header, buffers, allow_pickle=True)


class Column(ABC):
    """Rows of one kind.

    Attributes
    ----------
    kind
        Name of the class in frames and files: `"tensor"`, `"torch"`, `"ragged"`, `"ragged_torch"`, `"text"`, `"object"`
        or `"compressed"`.
    """

    __slots__ = ("__weakref__",)
    kind: ClassVar[str]

    @property
    @abstractmethod
    def values(self) -> Any:
        """Value that a batch returns for the column: an array or a tensor if possible, otherwise the column itself."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows, n."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """Dtype of one element: a `torch.dtype` in columns of torch tensors, otherwise a `numpy.dtype`."""

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int | None, ...]:
        """Shape of one row; extents that vary between rows are None."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size of the rows in bytes; for Python objects, the objects' shallow sizes are included."""

    @abstractmethod
    def slice(self, start: int, stop: int) -> Column:
        """View rows `start` to `stop` without a copy."""

    @abstractmethod
    def take(self, indices: Indices) -> Column:
        """Gather rows, shape (k,), into a new column of k rows."""

    @abstractmethod
    def copy(self) -> Column:
        """Copy every row into newly allocated memory."""

    @abstractmethod
    def spread(self, length: int, positions: Indices) -> Column:
        """Return a column of `length` rows with row i at `positions[i]`; positions are strictly increasing.

        All other rows are zeros, or None in object columns, or empty strings in text columns.
        """

    @classmethod
    @abstractmethod
    def concat(cls, columns: Sequence[Any], name: str) -> Column:
        """Concatenate columns of this class, with one copy.

        Raises ColumnMismatchError if row shapes differ, or no column's dtype represents all other dtypes exactly.
        """

    @abstractmethod
    def equals(self, other: Column) -> bool:
        """Return whether kind, dtype, shape and rows are equal; NaN equals NaN."""

    @abstractmethod
    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the rows as an array of shape (n, ...), without a copy if the layout permits."""

    @abstractmethod
    def to_torch(self) -> torch.Tensor:
        """Return the rows as a tensor of shape (n, ...), without a copy if the layout permits.

        Raises ColumnTypeError if torch has no dtype for the rows.
        """

    @abstractmethod
    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        """Return the rows as an Arrow array, and the field metadata that is required to restore the rows exactly.

        The Arrow array has n values, and shares the column's memory if the layout permits. Only missing text and None
        are nulls.
        """

    def to_arrow(self) -> pa.Array:
        """Return the rows as an Arrow array of n values; see `encode`."""
        return self.encode()[0]

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        """Export the rows through Arrow's PyCapsule interface; rows of varying shape become lists."""
        return self.to_arrow().__arrow_c_array__(requested_schema)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle only this column's rows, with `dump` and `load`; protocol 5 transfers the buffers out of band."""
        header, buffers = self.dump()
        pickled = map(PickleBuffer, buffers)
        return _restore, (type(self), header, list(pickled) if protocol >= 5 else [bytearray(b.raw()) for b in pickled])

    @abstractmethod
    def dump(self) -> tuple[Header, list[Any]]:
        """Return a header and buffers with only this column's rows, as views if possible; `load` is the inverse."""

    @classmethod
    @abstractmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> Column:
        """Create a column from the output of `dump`, as a view if possible, after validating header and lengths.

        Raises FormatError if header and buffers are inconsistent. Raises UntrustedPickleError if the rows are pickled
        and `allow_pickle` is false.
        """


_INTP = np.dtype(np.intp)

Resolved = int | tuple[int, int] | npt.NDArray[np.intp]


def resolve(key: Any, n: int) -> Resolved:
    """Convert an index into n rows to a row number, a range of rows `(start, stop)`, or row indices, shape (k,).

    Raises RowIndexError if a row is outside [-n, n), or the key has another type; the message contains the first
    invalid row.

    key: an integer, a slice, a sequence of integers, or a boolean mask of shape (n,). Negative row numbers count from
        the end.

    >>> resolve(-1, 4), resolve(slice(1, None), 4), resolve(slice(None, None, -2), 4)
    (3, (1, 4), array([3, 1]))
    >>> resolve([True, False, False, True], 4), resolve([2, -4], 4)
    (array([0, 3]), array([2, 0]))
    """
    if isinstance(key, slice):
        start, stop, step = key.indices(n)
        return (start, max(start, stop)) if step == 1 else np.arange(n)[key]
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        row = int(key)
        if not -n <= row < n:
            raise _outside(row, n)
        return row + n if row < 0 else row
    # As unsigned numbers, negative rows exceed all valid rows.
    if type(key) is np.ndarray and key.dtype is _INTP and key.ndim == 1 and key.size and key.view(np.uintp).max() < n:
        return key.copy()
    indices = np.asarray(key)
    if indices.size == 0 and indices.ndim == 1 and not isinstance(key, np.ndarray):
        return np.empty(0, np.intp)
    if indices.ndim != 1 or indices.dtype.kind not in "biu":
        raise RowIndexError(
            f"rows must be indexed by integers, a slice or a mask, got a {type(key).__name__} of dtype {indices.dtype} "
            f"and shape {indices.shape}"
        )
    if indices.dtype.kind == "b":
        if len(indices) != n:
            raise RowIndexError(f"a mask must have {n} entries, one per row, got {len(indices)}")
        return np.flatnonzero(indices)
    rows = indices.astype(np.intp)
    if not rows.size:
        return rows
    lowest = indices.min()
    if lowest < -n or indices.max() >= n:
        outside = (indices < -n) | (indices >= n)
        raise _outside(indices[outside.argmax()], n)
    if lowest < 0:
        rows[rows < 0] += n
    return rows


def _outside(row: int | np.integer[Any], n: int) -> RowIndexError:
    return RowIndexError(f"row {row} must be in [{-n}, {n}) of a column of {n} rows")


def as_indices(key: Any, n: int) -> Indices:
    """Convert a mask or integers to row indices in [0, n); raises RowIndexError for a single integer."""
    rows = resolve(key, n)
    if isinstance(rows, int):
        raise RowIndexError("rows must be gathered by a list of integers or a mask, got a single integer")
    return np.arange(*rows) if isinstance(rows, tuple) else rows

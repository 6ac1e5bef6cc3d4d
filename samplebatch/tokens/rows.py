"""Row operations on token batches: groups with equal keys, repetition of rows, and unions of columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.arguments import whole
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.varying_rows import offsets_of
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnMismatchError, ColumnTypeError

B = TypeVar("B", bound=SampleBatch[Any])
Numbers = npt.NDArray[Any]


class Groups(Generic[B]):
    """Groups of rows of a batch; see `group_by`.

    Values are specified as a column name, or as an array or tensor with one number per row. Reductions return one value
    per group, shape (g,), in the order of `keys`; `spread` repeats these values for the rows of each group.

    Parameters
    ----------
    batch
        The batch, n rows.
    keys
        Key of each group.
    ids
        Group of each row, shape (n,), from 0 to g - 1.

    Attributes
    ----------
    keys
        Key of each group, shape (g,), in the order of first appearance.
    ids
        Group of each row, shape (n,).
    counts
        Number of rows per group, shape (g,).

    Examples
    --------
    >>> groups = group_by(SampleBatch(uid=[7, 7, 8, 8], rewards=[0.0, 1.0, 3.0, 5.0]), "uid")
    >>> groups.keys, groups.mean("rewards"), groups.std("rewards")
    (array([7, 8]), array([0.5, 4. ]), array([0.5, 1. ]))
    >>> groups.normalize("rewards", epsilon=0.0), groups.rank("rewards")
    (array([-1.,  1., -1.,  1.]), array([0, 1, 0, 1]))
    """

    def __init__(self, batch: B, keys: Numbers, ids: npt.NDArray[np.intp]) -> None:
        self.keys = keys
        self.ids = ids
        self.counts = np.bincount(ids, minlength=len(keys))
        self._batch = batch
        self._order = np.argsort(ids, kind="stable")
        self._offsets = offsets_of(self.counts)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[Any, B]]:
        """Yield the key and the rows of each group."""
        for group, key in enumerate(self.keys):
            yield key, self._batch.take(self.rows(group))

    def rows(self, group: int) -> npt.NDArray[np.intp]:
        """Return the rows of the group with a given number."""
        return self._order[self._offsets[group] : self._offsets[group + 1]]

    def sum(self, values: Any) -> Numbers:
        """Sum the values of each group."""
        return np.asarray(self._grouped(values).sum())

    def mean(self, values: Any) -> Numbers:
        """Compute the mean of the values of each group."""
        return np.asarray(self._grouped(values).mean())

    def min(self, values: Any) -> Numbers:
        """Return the smallest value of each group."""
        return np.asarray(self._grouped(values).min())

    def max(self, values: Any) -> Numbers:
        """Return the largest value of each group."""
        return np.asarray(self._grouped(values).max())

    def std(self, values: Any, ddof: int = 0) -> Numbers:
        """Return the standard deviation per group, with `ddof` as in NumPy; NaN for groups with too few rows."""
        grouped = self._floats(values)
        squares = (grouped - grouped.mean()) ** 2
        with np.errstate(invalid="ignore", divide="ignore"):
            degrees = np.maximum(self.counts - whole("ddof", ddof), 0)
            return np.asarray(np.sqrt(squares.sum() / degrees))

    def rank(self, values: Any, *, descending: bool = False) -> npt.NDArray[np.intp]:
        """Rank each row within its group by ascending or descending value, from 0; equal values rank in row order."""
        numbers = self._values(values)
        order = np.lexsort((-numbers.astype(np.float64) if descending else numbers, self.ids))
        ranks = np.empty(len(order), np.intp)
        ranks[order] = np.arange(len(order)) - np.repeat(self._offsets[:-1], self.counts)
        return ranks

    def normalize(self, values: Any, *, scale: bool = True, epsilon: float = 1e-6, ddof: int = 0) -> Numbers:
        """Subtract the group's mean from each value, shape (n,), as in GRPO advantages.

        Parameters
        ----------
        values
            A column or an array.
        scale
            Whether to also divide by the group's standard deviation plus `epsilon`.
        epsilon
            Number that is added to the standard deviation, to prevent division by zero.
        ddof
            As in `std`. Values of groups whose standard deviation is NaN are divided by 1 plus `epsilon`.
        """
        numbers = self._values(values)
        centred = numbers - self.spread(self.mean(numbers))
        if not scale:
            return np.asarray(centred)
        deviation = np.nan_to_num(self.std(numbers, ddof), nan=1.0, posinf=1.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.where(centred == 0, 0.0, centred / (self.spread(deviation) + epsilon)))

    def spread(self, values: npt.ArrayLike) -> Numbers:
        """Broadcast one value per group to the group's rows, shape (n, ...).

        Raises
        ------
        ColumnLengthError
            If the number of values differs from the number of groups.
        """
        group_values = np.asarray(values)
        if not group_values.ndim or len(group_values) != len(self):
            raise ColumnLengthError(f"values must have {len(self)} rows, one per group, got shape {group_values.shape}")
        return np.asarray(group_values[self.ids])

    def _values(self, values: Any) -> Numbers:
        name = values if isinstance(values, str) else "values"
        numbers = self._batch.column(values).to_numpy() if isinstance(values, str) else values
        numbers = np.asarray(numbers.detach().cpu() if hasattr(numbers, "detach") else numbers)
        if numbers.shape != (len(self.ids),):
            raise ColumnLengthError(
                f"{name!r} must have one number for each of {len(self.ids)} rows, got {numbers.shape}"
            )
        if numbers.dtype.kind not in "biuf":
            raise ColumnTypeError(f"{name!r} must be numeric, got dtype {numbers.dtype}")
        return numbers

    def _grouped(self, values: Any) -> RaggedColumn:
        return RaggedColumn(self._values(values)[self._order], self._offsets)

    def _floats(self, values: Any) -> RaggedColumn:
        grouped = self._grouped(values)
        return grouped if grouped.dtype.kind == "f" else grouped.astype(np.float64)


def group_by(batch: B, key: str | npt.ArrayLike) -> Groups[B]:
    """Group rows by a column of numbers or strings, or by an array.

    Parameters
    ----------
    batch
        The batch.
    key
        Name of a column, or one key per row.

    Raises
    ------
    ColumnNotFoundError
        If the column does not exist.
    ColumnTypeError
        If keys are not single numbers or strings.
    ColumnLengthError
        If the number of keys differs from the number of rows.
    ArgumentError
        If a key is missing.

    Examples
    --------
    >>> groups = group_by(SampleBatch(uid=["b", "a", "b"], tokens=[5, 3, 2]), "uid")
    >>> groups.keys.tolist(), groups.sum("tokens").tolist()
    (['b', 'a'], [7, 3])
    """
    column = batch.column(key) if isinstance(key, str) else None
    name = key if isinstance(key, str) else "key"
    if isinstance(column, TextColumn) and not column.row_shape:
        keys: Any = column.array
    elif column is None or isinstance(column, TensorColumn | TorchColumn | ObjectColumn):
        values: Any = key if column is None else column.to_numpy()
        values = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
        if values.ndim != 1 or values.dtype.kind not in "biufUOTmM":
            raise ColumnTypeError(f"{name!r} must have one number or string per row, got {values.dtype} {values.shape}")
        if len(values) != batch.count:
            raise ColumnLengthError(f"{name!r} must have {batch.count} rows, got {len(values)}")
        try:
            keys = pa.array(values.tolist() if values.dtype.kind in "UOT" else values)
        except pa.ArrowException as error:
            raise ColumnTypeError(f"{name!r} must have keys of one type, got several: {error}") from error
    else:
        raise ColumnTypeError(f"{name!r} must have one number or string per row, got a {column.kind} column")
    if keys.null_count:
        raise ArgumentError(f"{name!r} must have a key in every row, got {keys.null_count} missing")
    encoded = keys.dictionary_encode()
    return Groups(batch, encoded.dictionary.to_numpy(zero_copy_only=False), encoded.indices.to_numpy().astype(np.intp))


def repeat(batch: B, k: int, *, interleave: bool = True) -> B:
    """Repeat every row, for example for several completions of one prompt.

    Parameters
    ----------
    batch
        The batch, n rows.
    k
        Number of copies of each row.
    interleave
        Whether the copies of a row are adjacent. If false, copies of the entire batch follow each other.

    Raises
    ------
    ArgumentError
        If `k` is not an integer of at least 0.

    Examples
    --------
    >>> prompts = SampleBatch(uid=[7, 8])
    >>> repeat(prompts, 2)["uid"].tolist(), repeat(prompts, 2, interleave=False)["uid"].tolist()
    ([7, 7, 8, 8], [7, 8, 7, 8])
    """
    rows, times = np.arange(batch.count), whole("k", k)
    return batch.take(np.repeat(rows, times) if interleave else np.tile(rows, times))


def union(batch: B, other: SampleBatch[Any] | Mapping[str, Any]) -> B:
    """Return a batch that has the columns of both batches and shares their memory.

    Parameters
    ----------
    batch
        The batch.
    other
        A batch, or columns by name, with the same number of rows. Common columns must be equal.

    Raises
    ------
    ColumnLengthError
        If the number of rows of `other` differs from the number of rows of the batch.
    ColumnMismatchError
        If the values of a common column are not equal.

    Examples
    --------
    >>> both = union(SampleBatch(ids=[1, 2]), SampleBatch(ids=[1, 2], rewards=[0.5, 1.0]))
    >>> list(both)
    ['ids', 'rewards']
    """
    if not isinstance(other, Mapping):
        raise ColumnTypeError(f"other must be a batch or a mapping of columns, got {type(other).__name__}")
    added = other if isinstance(other, SampleBatch) else SampleBatch(other)
    if added.count != batch.count:
        raise ColumnLengthError(f"other must have {batch.count} rows, got {added.count}")
    for name in added.column_names:
        if name in batch.column_names and not batch.column(name).equals(added.column(name)):
            raise ColumnMismatchError(f"column {name!r} must be equal in both batches, got others; rename or drop one")
    return assign(batch, **{name: added[name] for name in added if name not in batch})


def assign(batch: B, **columns: Any) -> B:
    """Return a batch with added or replaced columns that shares memory with the original batch, which is unchanged.

    Raises
    ------
    ColumnLengthError
        If the number of rows of a column differs from the number of rows of the batch.

    Examples
    --------
    >>> batch = SampleBatch(rewards=[1.0, 3.0])
    >>> assign(batch, advantages=batch["rewards"] - 2.0)["advantages"].tolist(), list(batch)
    ([-1.0, 1.0], ['rewards'])
    """
    new = batch.copy(shallow=True)
    new.update(columns)
    return new

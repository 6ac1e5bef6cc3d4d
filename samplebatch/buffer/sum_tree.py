"""Sum tree, which stores slot weights and supports range sums and weighted sampling in logarithmic time."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from samplebatch import deferred_kernels
from samplebatch.column.interface import resolve
from samplebatch.errors import ColumnLengthError, PriorityError, RowIndexError

Indices = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]


class SumTree:
    """Binary tree of float64 sums over the weights of numbered slots.

    When a weight changes, each sum above the weight is recomputed from the two child nodes, so rounding errors do not
    accumulate. The tree's array has twice as many entries as the smallest power of two that is at least `size`; the
    memory pages of unused slots are not accessed. The loops are compiled after the first calls in a process; see
    `samplebatch.deferred_kernels`.

    size: number of slots; their initial weights are 0.

    Raises ValueError if the size is negative.

    >>> tree = SumTree(5)
    >>> tree.set(np.array([0, 2, 4]), np.array([1.0, 2.0, 3.0]))
    >>> tree.total, tree.sum(1, 5), tree.find(np.array([1.0, 1.5, 6.0]))
    (6.0, 5.0, array([0, 2, 4]))
    >>> tree.draw(6, np.random.default_rng(7), stratified=True)
    array([0, 2, 2, 4, 4, 4])
    """

    __slots__ = ("_leaves", "_limit", "_tree", "size")

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"a tree must have 0 slots or more, got {size}")
        self.size = size
        self._leaves = 1 << max(size - 1, 0).bit_length()
        self._tree = np.zeros(2 * self._leaves)
        # Ensures that no sum can overflow.
        self._limit = float(np.finfo(np.float64).max) / self._leaves

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._tree[1])

    @property
    def limit(self) -> float:
        """Maximum weight of a slot."""
        return self._limit

    @property
    def weights(self) -> Floats:
        """Weights of all slots as a read-only view, shape (size,)."""
        view = self._tree[self._leaves : self._leaves + self.size]
        view.flags.writeable = False
        return view

    def get(self, slots: Indices | int) -> Any:
        """Return the weights of slots as an array in the shape of `slots`, or as a number for a single slot.

        Slots must be in [0, size); the range is not checked.
        """
        return self._tree[slots + self._leaves]

    def set(self, slots: npt.ArrayLike, weights: npt.ArrayLike) -> None:
        """Set weights of slots.

        slots: numbers of slots, integers in [0, size), shape (n,).
        weights: weights of the slots, shape (n,), or one weight for all slots. For duplicate slots, the last weight
            wins.

        Raises ColumnLengthError if the number of weights differs from the number of slots. Raises PriorityError if a
        weight is negative, NaN, infinite, or large enough for a sum to overflow. Raises RowIndexError if a slot is
        outside [0, size), or slots are not integers; the message contains the first invalid slot. If an error is
        raised, no weight is changed.
        """
        slot_array = np.asarray(slots)
        if slot_array.dtype.kind not in "iu" and slot_array.size:
            raise RowIndexError(f"slots must be integers, got dtype {slot_array.dtype}")
        rows = np.ascontiguousarray(slot_array, np.intp).reshape(-1)
        values = np.ascontiguousarray(weights, np.float64).reshape(-1)
        if len(values) != len(rows):
            if len(values) != 1:
                raise ColumnLengthError(f"column 'weight' must have {len(rows)} rows, one per slot, got {len(values)}")
            values = np.full(len(rows), values[0])
        self.put(rows, values)

    def put(self, slots: Indices, weights: Floats) -> None:
        """Set weights like `set`, but only from C-contiguous arrays of dtypes intp and float64, shape (n,) each.

        Raises PriorityError and RowIndexError in the same cases as `set`.
        """
        rejected = deferred_kernels.tree_set(self._tree, self._leaves, self.size, self._limit, slots, weights)
        if rejected >= 0:
            self._raise_invalid(rejected, slots, weights)

    def _raise_invalid(self, position: int, rows: Indices, values: Floats) -> None:
        row, value = int(rows[position]), values[position]
        if not 0 <= row < self.size:
            raise RowIndexError(f"slot must be in [0, {self.size}), got {row}")
        weight = "NaN" if np.isnan(value) else "a negative weight" if value < 0 else "a larger weight"
        raise PriorityError(f"a weight must be in [0, {self._limit:.2g}], got {weight} for slot {row}")

    def sum(self, start: int, stop: int) -> float:
        """Return the sum of the weights of slots from `start` to `stop` (exclusive); 0 for an empty range."""
        if start <= 0 and stop >= self.size:
            return self.total
        low, high = max(start, 0) + self._leaves, min(stop, self.size) + self._leaves
        total = 0.0
        while low < high:
            if low & 1:
                total += float(self._tree[low])
                low += 1
            if high & 1:
                high -= 1
                total += float(self._tree[high])
            low, high = low >> 1, high >> 1
        return total

    def find(self, values: npt.ArrayLike) -> Indices:
        """Return, for each value v, the first slot of positive weight at which the cumulative weight is at least v.

        values: numbers from 0 to the total, which must be positive; shape (n,). For a value above the total, the last
            slot of positive weight is returned.

        Returns: slots, shape (n,).
        """
        targets = np.ascontiguousarray(values, np.float64)
        slots = np.empty(len(targets), np.intp)
        deferred_kernels.tree_find(self._tree, self._leaves, targets, slots)
        return slots

    def draw(
        self,
        n: int,
        rng: np.random.Generator,
        start: int = 0,
        stop: int | None = None,
        *,
        stratified: bool = False,
    ) -> Indices:
        """Sample slots with replacement, with probabilities proportional to their weights.

        rng: source of n uniform numbers.
        start, stop: range of slots from which to sample; all slots by default. The time to sample from fewer than all
            slots is proportional to the length of the range.
        stratified: whether draw k covers the k-th of n equal intervals of the total. If true, the slots are in
            ascending order, and the number of draws of each slot differs from its expected value by less than 2.

        Returns: slots, shape (n,), with positive weights.

        Raises PriorityError if no slot has a positive weight.
        """
        stop = self.size if stop is None else stop
        sums = None if stop - start == self.size else np.cumsum(self.weights[start:stop])
        total = self.total if sums is None else float(sums[-1]) if len(sums) else 0.0
        if not total > 0.0:
            raise PriorityError("slots must include a positive weight to be sampled, got none")
        values = rng.random(n)
        # In (0, 1] instead of [0, 1): a slot covers the values above the previous cumulative sum, up to its own.
        np.subtract(1.0, values, out=values)
        if stratified:
            values += np.arange(n)
            values /= n
        values *= total
        return self.find(values) if sums is None else start + np.searchsorted(sums, values)

    def __getstate__(self) -> tuple[int, Indices | None, Floats]:
        weights = self.weights
        slots = np.flatnonzero(weights)
        # Pairs of slot and weight if they are smaller.
        return (self.size, slots, weights[slots]) if 2 * len(slots) < self.size else (self.size, None, weights.copy())

    def __setstate__(self, state: tuple[int, Indices | None, Floats]) -> None:
        size, slots, weights = state
        SumTree.__init__(self, size)
        self.set(np.arange(size) if slots is None else slots, weights)


class SegmentTree:
    """Array of weights with fast range sums, with the interface of Tianshou's segment tree.

    Parameters
    ----------
    size
        Length of the array, whose initial values are 0.

    Raises
    ------
    ValueError
        If the size is not positive.

    Examples
    --------
    >>> tree = SegmentTree(5)
    >>> tree[np.arange(5)] = [1.0, 2.0, 3.0, 4.0, 5.0]
    >>> tree.reduce(), tree.reduce(1, 3), tree.reduce(end=-1)
    (15.0, 5.0, 10.0)
    >>> tree.get_prefix_sum_idx(np.array([0.5, 1.0, 1.5, 14.0])), tree[4]
    (array([0, 0, 1, 4]), 5.0)
    """

    __slots__ = ("_sums",)

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a segment tree must have a positive size, got {size}")
        self._sums = SumTree(size)

    @classmethod
    def _over(cls, sums: SumTree) -> Self:
        tree = cls.__new__(cls)
        tree._sums = sums
        return tree

    def __len__(self) -> int:
        return self._sums.size

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows(index)
        return float(self._sums.get(rows)) if isinstance(rows, int) else self._sums.get(rows)

    def __setitem__(self, index: Any, value: npt.ArrayLike) -> None:
        self._sums.set(self._rows(index), value)

    def _rows(self, index: Any) -> int | Indices:
        rows = resolve(index, self._sums.size)
        return np.arange(*rows) if isinstance(rows, tuple) else rows

    def reduce(self, start: int = 0, end: int | None = None) -> float:
        """Return the sum of `array[start:end]`; a negative bound counts from the end.

        >>> tree = SegmentTree(3)
        >>> tree[:] = [1.0, 2.0, 4.0]
        >>> tree.reduce(-2), tree.reduce(2, 1)
        (6.0, 0.0)
        """
        first, last, _ = slice(start, end).indices(self._sums.size)
        return self._sums.sum(first, last)

    def get_prefix_sum_idx(self, value: npt.ArrayLike) -> Any:
        """Return, for each value v, the smallest i such that `array[0] + ... + array[i]` is at least v.

        Elements that are 0 are skipped, so that v = 0 returns the index of the first non-zero element.

        Parameters
        ----------
        value
            A number, or an array of any shape.

        Returns
        -------
        int or ndarray
            An index, or an array of indices in the shape of `value`.

        Raises
        ------
        PriorityError
            If a value is negative, NaN, or not less than the total sum.
        """
        values = np.asarray(value, np.float64)
        total = self._sums.total
        if not ((values >= 0.0) & (values < total)).all():
            raise PriorityError(f"a prefix sum must be in [0, {total:g}), below the total, got one outside")
        indices = self._sums.find(values.reshape(-1))
        return int(indices[0]) if values.ndim == 0 else indices.reshape(values.shape)

"""Weights of slots, their sums over any range, and slots drawn in proportion to them, in logarithmic time."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from samplebatch.column.interface import resolve
from samplebatch.errors import ColumnLengthError, PriorityError, RowIndexError

Indices = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]


class SumTree:
    """Weights of numbered slots, and their sums, as a binary tree of float64.

    Every sum is computed again from its two parts whenever one of them changes, so no rounding error adds up, however
    many updates there are. The memory is twice the next power of two; pages that no slot in use needs stay untouched.
    The loops are compiled: see `samplebatch.kernels` for what the first tree of a process costs.

    Parameters
    ----------
    size
        How many slots there are, with weights of 0 at first.

    Raises
    ------
    ValueError
        If the size is negative.

    Examples
    --------
    >>> tree = SumTree(5)
    >>> tree.set(np.array([0, 2, 4]), np.array([1.0, 2.0, 3.0]))
    >>> tree.total, tree.sum(1, 5), tree.find(np.array([1.0, 1.5, 6.0]))
    (6.0, 5.0, array([0, 2, 4]))
    >>> tree.draw(6, np.random.default_rng(7), stratified=True)
    array([0, 2, 2, 4, 4, 4])
    """

    __slots__ = ("_kernels", "_leaves", "_limit", "_tree", "size")

    def __init__(self, size: int) -> None:
        from samplebatch import kernels

        if size < 0:
            raise ValueError(f"a tree must have 0 slots or more, got {size}")
        self.size = size
        self._leaves = 1 << max(size - 1, 0).bit_length()
        self._tree = np.zeros(2 * self._leaves)
        # So that no sum can overflow.
        self._limit = float(np.finfo(np.float64).max) / self._leaves
        self._kernels = kernels

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._tree[1])

    @property
    def limit(self) -> float:
        """The largest weight that a slot may have."""
        return self._limit

    @property
    def weights(self) -> Floats:
        """The weights of all slots, shape (size,): a view that cannot be written to."""
        view = self._tree[self._leaves : self._leaves + self.size]
        view.flags.writeable = False
        return view

    def get(self, slots: Indices | int) -> Any:
        """Return the weights of slots: an array of the shape of theirs, a number for one slot.

        Slots must lie in [0, size): they are not checked.
        """
        return self._tree[slots + self._leaves]

    def set(self, slots: npt.ArrayLike, weights: npt.ArrayLike) -> None:
        """Give slots new weights; nothing is changed if one of either is not allowed.

        Parameters
        ----------
        slots
            Integers in [0, size), shape (n,).
        weights
            Shape (n,), or one weight for all. On duplicate slots the last one wins.

        Raises
        ------
        ColumnLengthError
            If there are not as many weights as slots.
        PriorityError
            If a weight is negative, NaN or infinite, or so large that the sums might overflow.
        RowIndexError
            If a slot lies outside [0, size), or slots are no integers; names the first.
        """
        given = np.asarray(slots)
        if given.dtype.kind not in "iu" and given.size:
            raise RowIndexError(f"slots must be integers, got dtype {given.dtype}")
        rows = np.ascontiguousarray(given, np.intp).reshape(-1)
        values = np.ascontiguousarray(weights, np.float64).reshape(-1)
        if len(values) != len(rows):
            if len(values) != 1:
                raise ColumnLengthError(f"column 'weight' must have {len(rows)} rows, one a slot, got {len(values)}")
            values = np.full(len(rows), values[0])
        self.put(rows, values)

    def put(self, slots: Indices, weights: Floats) -> None:
        """Set weights as `set` does, given C-contiguous arrays of dtype intp and float64, shape (n,) both.

        Raises
        ------
        PriorityError, RowIndexError
            As `set` does.
        """
        refused = self._kernels.tree_set(self._tree, self._leaves, self.size, self._limit, slots, weights)
        if refused >= 0:
            self._refuse(refused, slots, weights)

    def _refuse(self, position: int, rows: Indices, values: Floats) -> None:
        row, value = int(rows[position]), values[position]
        if not 0 <= row < self.size:
            raise RowIndexError(f"slot {row} must lie in [0, {self.size})")
        what = "NaN" if np.isnan(value) else "a negative one" if value < 0 else "one too large"
        raise PriorityError(f"a weight must lie in [0, {self._limit:.2g}], got {what} for slot {row}")

    def sum(self, start: int, stop: int) -> float:
        """Return the sum of the weights of slots start to stop, 0 where there are none between."""
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
        """Find, for each value v, the first slot of positive weight such that the weights up to it sum to at least v.

        Parameters
        ----------
        values
            From 0 to the total, which must be positive; shape (n,). Values above find the last such slot.

        Returns
        -------
        ndarray
            Slots, shape (n,).
        """
        wanted = np.ascontiguousarray(values, np.float64)
        found = np.empty(len(wanted), np.intp)
        self._kernels.tree_find(self._tree, self._leaves, wanted, found)
        return found

    def draw(
        self,
        n: int,
        rng: np.random.Generator,
        start: int = 0,
        stop: int | None = None,
        *,
        stratified: bool = False,
    ) -> Indices:
        """Draw slots with replacement, each with probability proportional to its weight.

        Parameters
        ----------
        n
            How many.
        rng
            Where the n uniform numbers come from.
        start, stop
            The slots to draw from, all by default. Among some of them only, a draw takes time proportional to their
            number.
        stratified
            Whether each draw has an n-th of the total to itself: the k-th comes from the k-th part, so the slots are
            in ascending order, and how often a slot is drawn differs from the expectation by less than 2.

        Returns
        -------
        ndarray
            Slots, shape (n,); none of weight 0.

        Raises
        ------
        PriorityError
            If no slot has a positive weight.
        """
        stop = self.size if stop is None else stop
        sums = None if stop - start == self.size else np.cumsum(self.weights[start:stop])
        total = self.total if sums is None else float(sums[-1]) if len(sums) else 0.0
        if not total > 0.0:
            raise PriorityError("slots can be drawn where one has a positive weight at least, got none")
        values = rng.random(n)
        # In (0, 1] in place of [0, 1): a slot has the values above the sum before it, up to the sum with its own.
        np.subtract(1.0, values, out=values)
        if stratified:
            values += np.arange(n)
            values /= n
        values *= total
        return self.find(values) if sums is None else start + np.searchsorted(sums, values)

    def __getstate__(self) -> tuple[int, Indices | None, Floats]:
        weights = self.weights
        slots = np.flatnonzero(weights)
        # Pairs where they take less room.
        return (self.size, slots, weights[slots]) if 2 * len(slots) < self.size else (self.size, None, weights.copy())

    def __setstate__(self, state: tuple[int, Indices | None, Floats]) -> None:
        size, slots, weights = state
        SumTree.__init__(self, size)
        self.set(np.arange(size) if slots is None else slots, weights)


class SegmentTree:
    """Tianshou's segment tree: an array of weights with fast sums.

    Parameters
    ----------
    size
        Length of the array, whose values are 0 at first.

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
        """Create a segment tree that shares the weights of a sum tree."""
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
        found = resolve(index, self._sums.size)
        return np.arange(*found) if isinstance(found, tuple) else found

    def reduce(self, start: int = 0, end: int | None = None) -> float:
        """Return the sum of `array[start:end]`; as there, a negative bound counts from the end.

        >>> tree = SegmentTree(3)
        >>> tree[:] = [1.0, 2.0, 4.0]
        >>> tree.reduce(-2), tree.reduce(2, 1)
        (6.0, 0.0)
        """
        first, last, _ = slice(start, end).indices(self._sums.size)
        return self._sums.sum(first, last)

    def get_prefix_sum_idx(self, value: npt.ArrayLike) -> Any:
        """Find, for each value v, the smallest i such that `array[0] + ... + array[i]` is at least v.

        Elements of 0 are passed over, so a v of 0 finds the first element that is not.

        Parameters
        ----------
        value
            A number, or an array of any shape.

        Returns
        -------
        int or ndarray
            An index, or an array of them, of the same shape.

        Raises
        ------
        PriorityError
            If a value is negative, NaN, or not below the sum of all.
        """
        values = np.asarray(value, np.float64)
        total = self._sums.total
        if not ((values >= 0.0) & (values < total)).all():
            raise PriorityError(f"a prefix sum must lie in [0, {total:g}), below the sum of all, got one outside")
        found = self._sums.find(values.reshape(-1))
        return int(found[0]) if values.ndim == 0 else found.reshape(values.shape)

"""RaggedRows: padding, arithmetic and slicing of ragged columns."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import choice
from samplebatch.column import ragged_math, ragged_padding
from samplebatch.column.ragged_padding import SIDES, Side
from samplebatch.column.varying_rows import VaryingRows, gather, offsets_of
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnTypeError, RowIndexError

if TYPE_CHECKING:
    import torch

_MAX_INT32 = np.iinfo(np.int32).max


def _binary(function: Callable[[Any, Any], Any], *, reflected: bool = False) -> Any:
    def apply(self: RaggedRows, other: Any) -> Any:
        if isinstance(other, str | bytes | dict | None):
            return NotImplemented
        flat, aligned = self.flat, ragged_math.operand(self, other)
        return ragged_math.with_elements(self, function(aligned, flat) if reflected else function(flat, aligned))

    return apply


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self: ragged_math.with_elements(self, function(self.flat))


class RaggedRows(VaryingRows):
    """Rows of varying length with sequence operations: padding, masks, reductions, arithmetic, slicing.

    Operators and comparisons apply elementwise. An operand in arithmetic is a ragged column with the row lengths of
    this column, an array with one value per row, or a number. Results are new columns. NumPy's elementwise functions
    accept columns of NumPy arrays, but not of tensors; `map` applies any other function.

    Reductions return an array or a tensor with one value per row, shape (n,). Reductions include all elements of a row,
    regardless of the row's number of dimensions. The argument `mask`, a ragged column of flags, restricts reductions to
    the marked elements.

    Examples
    --------
    >>> from samplebatch.column import RaggedColumn
    >>> logp = RaggedColumn.from_rows([[-1.0, -2.0], [-0.5]], "logp")
    >>> list(logp * 2 + np.array([10, 20]))
    [array([8., 6.]), array([19.])]
    >>> logp.sum(), (logp > -1).any(), np.exp(logp)[1].round(2)
    (array([-3. , -0.5]), array([False,  True]), array([0.61]))
    """

    __slots__ = ()

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def seq_lens(self) -> npt.NDArray[np.int64]:
        """First extent of each row, shape (n,), such as the row's number of tokens or steps."""
        return self.extents[:, 0]

    @property
    def max_seqlen(self) -> int:
        """First extent of the longest row; 0 without rows."""
        return int(self.seq_lens.max(initial=0))

    @property
    def cu_seqlens(self) -> Any:
        """Cumulative sequence lengths in `flat`, int32, shape (n + 1,), as FlashAttention expects.

        The lengths are an array, or a tensor on the device of the elements. Raises ColumnLengthError if there are at
        least 2**31 elements.

        >>> from samplebatch.column import RaggedColumn
        >>> RaggedColumn.from_rows([[1, 2], [], [3]], "ids").cu_seqlens
        array([0, 2, 2, 3], dtype=int32)
        """
        offsets = offsets_of(self.seq_lens)
        if offsets[-1] > _MAX_INT32:
            raise ColumnLengthError(f"cu_seqlens must fit 32 bits, got {offsets[-1]} elements; split the batch")
        return self._beside(offsets.astype(np.int32))

    def _beside(self, array: npt.NDArray[Any]) -> Any:
        """Return an array unchanged if the elements are an array, otherwise as a tensor on the elements' device."""
        if isinstance(self.elements, np.ndarray):
            return array
        import torch

        return torch.from_numpy(array).to(self.elements.device)

    @classmethod
    def from_lengths(cls, values: Any, lengths: Any) -> Self:
        """View an array or tensor as rows of the given lengths.

        Raises ColumnLengthError if a length is negative, or the sum of the lengths is not m. Raises ColumnTypeError if
        values have no dimensions.

        Parameters
        ----------
        values
            The concatenated rows, shape (m, ...). C-contiguous values are not copied.
        lengths
            The length of each row, shape (n,).

        Examples
        --------
        >>> from samplebatch.column import RaggedColumn
        >>> list(RaggedColumn.from_lengths(np.arange(3), [2, 0, 1]))
        [array([0, 1]), array([], dtype=int64), array([2])]
        """
        values = values.contiguous() if hasattr(values, "detach") else np.asarray(values, order="C")
        counts = np.asarray(lengths.cpu() if hasattr(lengths, "cpu") else lengths)
        counts = counts.astype(np.int64) if counts.size else counts.reshape(-1).astype(np.int64)
        if not values.ndim:
            raise ColumnTypeError("values must have one dimension or more, got a single number")
        if counts.ndim != 1 or counts.min(initial=0) < 0 or counts.sum() != len(values):
            actual = f"shape {counts.shape}" if counts.ndim != 1 else f"a sum of {counts.sum()}"
            if counts.ndim == 1 and counts.min(initial=0) < 0:
                actual = f"{counts.min()} in row {int(counts.argmin())}"
            raise ColumnLengthError(f"lengths must be at least 0 with a sum of {len(values)}, got {actual}")
        trailing = tuple(values.shape[1:])
        shapes = None
        if trailing:
            shapes = np.empty((len(counts), values.ndim), np.int64)
            shapes[:, 0], shapes[:, 1:] = counts, trailing
        return cls(values.reshape(-1), offsets_of(counts * int(np.prod(trailing, dtype=np.int64))), shapes)

    # -- padding -------------------------------------------------------------------------------------------------------

    def pad(
        self,
        value: Any = 0,
        *,
        side: Side = "right",
        length: int | None = None,
        multiple_of: int | None = None,
        out: Any = None,
    ) -> Any:
        """Return the rows in one array or tensor, shape (n, width, ...), padded with a value.

        Row axes after the first are padded on the right, each to its largest extent.

        Parameters
        ----------
        value
            Padding value.
        side
            Side of the padding, `"right"` or `"left"`.
        length
            The width; default: length of the longest row, or width of `out`.
        multiple_of
            Positive integer; the width is rounded up to a multiple of this integer.
        out
            Destination array or tensor, with the dtype of the rows.

        Raises
        ------
        ArgumentError
            If `side`, `length` or `multiple_of` is invalid.
        ColumnLengthError
            If a row is longer than `length`.
        ColumnMismatchError
            If `out` does not have the shape or the dtype of the padded rows.
        OverflowError, RuntimeError
            If the dtype cannot represent the value.

        Examples
        --------
        >>> from samplebatch.column import RaggedColumn
        >>> ids = RaggedColumn.from_rows([[1, 2], [3], []], "ids")
        >>> ids.pad(-1).tolist()
        [[1, 2], [3, -1], [-1, -1]]
        >>> ids.pad(side="left", multiple_of=4).tolist()
        [[0, 0, 1, 2], [0, 0, 0, 3], [0, 0, 0, 0]]
        """
        return ragged_padding.pad(self, value, side, length, multiple_of, out)

    def mask(self, *, side: Side = "right", length: int | None = None, multiple_of: int | None = None) -> Any:
        """Return a bool mask of the elements in padded rows, shape (n, width); see `pad` for the arguments.

        >>> from samplebatch.column import RaggedColumn
        >>> RaggedColumn.from_rows([[1, 2], [3]], "ids").mask(side="left").tolist()
        [[True, True], [False, True]]
        """
        return ragged_padding.mask(self, side, length, multiple_of)

    def positions(self, *, side: Side = "right", length: int | None = None, multiple_of: int | None = None) -> Any:
        """Return positions of elements in their rows, shape (n, width), 0 for padding; see `pad` for the arguments.

        >>> from samplebatch.column import RaggedColumn
        >>> RaggedColumn.from_rows([[7, 8], [9]], "ids").positions(length=3).tolist()
        [[0, 1, 0], [0, 0, 0]]
        """
        return ragged_padding.positions(self, side, length, multiple_of)

    def to_nested(self) -> torch.Tensor:
        """Return the rows as a nested tensor in torch's jagged layout; alias of `to_torch`.

        >>> from samplebatch.column import RaggedColumn
        >>> RaggedColumn.from_rows([[1, 2], [3]], "ids").to_nested().values()
        tensor([1, 2, 3])
        """
        return self.to_torch()

    # -- reductions ----------------------------------------------------------------------------------------------------

    def sum(self, *, mask: Self | None = None) -> Any:
        """Sum the elements of each row; a row without elements has sum 0. Integers and flags are summed in 64 bits.

        >>> from samplebatch.column import RaggedColumn
        >>> ids = RaggedColumn.from_rows([[1, 2], [], [4]], "ids")
        >>> ids.sum(), ids.sum(mask=ids > 1)
        (array([3, 0, 4]), array([2, 0, 4]))
        """
        return ragged_math.reduce("sum", self if mask is None else self._blank(mask))

    def mean(self, *, mask: Self | None = None) -> Any:
        """Average the elements of each row; the average is NaN for rows without elements.

        >>> from samplebatch.column import RaggedColumn
        >>> RaggedColumn.from_rows([[1, 2], [4]], "ids").mean()
        array([1.5, 4. ])
        """
        if mask is None:
            return ragged_math.mean(self, self.lengths)
        counts = ragged_math.reduce("sum", self._flags(mask))
        return ragged_math.mean(self._blank(mask), counts)

    def min(self, *, initial: Any = None, mask: Self | None = None) -> Any:
        """Return the smallest element of each row.

        Raises ArgumentError if a row has no elements and `initial` is not passed.

        Parameters
        ----------
        initial
            Result for rows without elements.
        mask
            Ragged column of flags that marks the elements to include.
        """
        return ragged_math.reduce("min", self._where(mask), initial)

    def max(self, *, initial: Any = None, mask: Self | None = None) -> Any:
        """Return the largest element of each row; see `min`.

        >>> from samplebatch.column import RaggedColumn
        >>> RaggedColumn.from_rows([[1, 2], []], "ids").max(initial=-1)
        array([ 2, -1])
        """
        return ragged_math.reduce("max", self._where(mask), initial)

    def any(self, *, mask: Self | None = None) -> Any:
        """Return whether each row has a non-zero element; False for rows without elements."""
        return ragged_math.reduce("any", self._where(mask))

    def all(self, *, mask: Self | None = None) -> Any:
        """Return whether all elements of each row are non-zero; True for rows without elements."""
        return ragged_math.reduce("all", self._where(mask))

    def argmax(self, *, mask: Self | None = None) -> Any:
        """Return the position of the first largest element of each row; `mask` restricts the search to marked elements.

        Raises ArgumentError if a row has no elements.

        >>> from samplebatch.column import RaggedColumn
        >>> RaggedColumn.from_rows([[1, 5, 5], [4]], "ids").argmax()
        array([1, 0])
        """
        if mask is None:
            return ragged_math.argmax(self)
        chosen = self._where(mask)
        among = ragged_math.argmax(chosen)
        inside = ragged_math.with_elements(self, ragged_padding.places_of(self))
        return inside._where(mask).gather(among)

    def cumsum(self, *, reverse: bool = False) -> Self:
        """Return the cumulative sums of each row up to each element, or from each element to the end.

        Floats are summed in 64 bits and returned in the column's dtype; integers become 64-bit integers.

        Parameters
        ----------
        reverse
            Whether to sum from each element to the end of the row, as for undiscounted returns-to-go.

        Examples
        --------
        >>> from samplebatch.column import RaggedColumn
        >>> rewards = RaggedColumn.from_rows([[1.0, 2.0, 3.0], [4.0]], "rewards")
        >>> rewards.cumsum()[0], rewards.cumsum(reverse=True)[0]
        (array([1., 3., 6.]), array([6., 5., 3.]))
        """
        return cast("Self", ragged_math.with_elements(self, ragged_math.accumulate(self, reverse=reverse)))

    # -- by element ----------------------------------------------------------------------------------------------------

    def clip(self, low: Any = None, high: Any = None) -> Self:
        """Limit the elements to bounds, which are numbers, arrays of one value per row, or ragged columns.

        >>> from samplebatch.column import RaggedColumn
        >>> list(RaggedColumn.from_rows([[1, 2], [5]], "ids").clip(2, np.array([3, 4])))
        [array([2, 2]), array([4])]
        """
        if low is None and high is None:
            raise ArgumentError("one of low and high must be passed, got none")
        flat = self.flat
        # Applied separately, because torch does not accept a number with a tensor.
        if low is not None:
            flat = flat.clip(ragged_math.operand(self, low), None)
        if high is not None:
            flat = flat.clip(None, ragged_math.operand(self, high))
        return cast("Self", ragged_math.with_elements(self, flat))

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Apply a function of one array or tensor, shape (m,), to the elements of all rows.

        Raises ColumnLengthError if the function changes the number of elements.

        >>> from samplebatch.column import RaggedColumn
        >>> RaggedColumn.from_rows([[1, 2], [3]], "ids").map(lambda ids: ids % 2)[0]
        array([1, 0])
        """
        return cast("Self", ragged_math.map_elements(self, function))

    def astype(self, dtype: Any) -> Self:
        """Cast the elements to a NumPy or torch dtype, with the rounding rules of the dtype's library."""
        flat = self.flat
        return cast(
            "Self", ragged_math.with_elements(self, flat.to(dtype) if hasattr(flat, "to") else flat.astype(dtype))
        )

    def filter(self, mask: Self) -> Self:
        """Select the elements marked by a ragged column of flags; rows must have one dimension.

        >>> from samplebatch.column import RaggedColumn
        >>> ids = RaggedColumn.from_rows([[1, 2, 3], [4]], "ids")
        >>> list(ids.filter(ids > 2))
        [array([3]), array([4])]
        """
        if self.ndim > 1:
            raise ColumnTypeError(f"rows must have one dimension to be filtered, got {self.ndim}")
        return self._where(mask)

    def _flags(self, mask: Self) -> VaryingRows:
        """Validate a mask, and return the mask as a column of flags."""
        if not isinstance(mask, VaryingRows):
            raise ColumnTypeError(f"mask must be a ragged column of flags, got {type(mask).__name__}")
        ragged_math.check_alike(self, mask, "mask")
        if str(mask.dtype).removeprefix("torch.") == "bool":
            return mask
        return cast("VaryingRows", ragged_math.with_elements(mask, mask.flat != 0))

    def _where(self, mask: Self | None) -> Self:
        """Select the elements that a mask marks, in rows of one dimension; None selects all elements."""
        if mask is None:
            return self
        flags = self._flags(mask)
        counts = ragged_math.reduce("sum", flags)
        return type(self)(
            self.flat[flags.flat], offsets_of(np.asarray(counts.cpu() if hasattr(counts, "cpu") else counts))
        )

    def _blank(self, mask: Self) -> Self:
        flags = self._flags(mask)
        if isinstance(self.elements, np.ndarray):
            flat: Any = _clear_elements(self.flat, flags.flat)
        else:
            flat = self.flat.masked_fill(~flags.flat, 0)
        return cast("Self", ragged_math.with_elements(self, flat))

    # -- slicing -------------------------------------------------------------------------------------------------------

    def join(self, *others: Self) -> Self:
        """Concatenate columns row by row: row i of the result is the concatenation of row i of each column.

        Raises ColumnLengthError if the columns differ in their number of rows. Raises ColumnMismatchError if dtypes,
        numbers of dimensions or extents after the first are incompatible.

        >>> from samplebatch.column import RaggedColumn
        >>> prompts, answers = (
        ...     RaggedColumn.from_rows([[1], [2, 3]], "p"),
        ...     RaggedColumn.from_rows([[7, 8], [9]], "a"),
        ... )
        >>> list(prompts.join(answers))
        [array([1, 7, 8]), array([2, 3, 9])]
        """
        parts = [self, *others]
        n, count = len(self), len(parts)
        for part in others:
            if type(part) is not type(self):
                raise ColumnTypeError(f"rows must be joined with a {self.kind} column, got {type(part).__name__}")
            if len(part) != n:
                raise ColumnLengthError(f"rows must be joined with {n} rows, got {len(part)}")
        if not n:
            return self.copy()
        stacked = type(self).concat(parts, "rows")
        rows: Any = stacked.take(np.arange(n * count).reshape(count, n).T.reshape(-1))
        return cast("Self", rows.merge(np.full(n, count)))

    def merge(self, counts: Any) -> Self:
        """Merge each run of consecutive rows into one row; the elements are shared with this column.

        Raises ColumnLengthError if the sum of `counts` is not the number of rows, or extents after the first differ
        within a run.

        Parameters
        ----------
        counts
            Number of rows merged into each row of the result, shape (k,).

        Examples
        --------
        >>> from samplebatch.column import RaggedColumn
        >>> list(RaggedColumn.from_rows([[1], [2, 3], [4]], "ids").merge([2, 0, 1]))
        [array([1, 2, 3]), array([], dtype=int64), array([4])]
        """
        edges = offsets_of(_host(counts).astype(np.int64))
        if edges[-1] != len(self) or (edges[1:] < edges[:-1]).any():
            raise ColumnLengthError(f"counts must be at least 0 with a sum of {len(self)}, got a sum of {edges[-1]}")
        shapes = None
        if self.shapes is not None:
            runs = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
            shapes = np.zeros((len(edges) - 1, self.ndim), np.int64)
            np.add.at(shapes[:, 0], runs, self.shapes[:, 0])
            # Rows without elements match any extents, and determine extents only in runs without elements.
            is_relevant = (self.shapes[:, :1] > 0) | (shapes[runs, :1] == 0)
            np.maximum.at(shapes[:, 1:], runs, np.where(is_relevant, self.shapes[:, 1:], 0))
            differs = ((self.shapes[:, 1:] != shapes[runs, 1:]).any(1)) & (self.shapes[:, 0] > 0)
            if differs.any():
                raise ColumnLengthError(
                    "rows must have the same extents after the first to be merged, got others in row "
                    f"{int(runs[differs.argmax()])}"
                )
        return type(self)(self.elements, np.ascontiguousarray(self.offsets[edges]), shapes)

    def split(self, positions: Any) -> tuple[Self, Self]:
        """Split each row at a position; inverse of `join`.

        Raises RowIndexError if a position is outside its row.

        Parameters
        ----------
        positions
            Number of elements of the first parts: a number, or an array of one number per row; negative numbers count
            from the row's end.

        Examples
        --------
        >>> from samplebatch.column import RaggedColumn
        >>> prompts, answers = RaggedColumn.from_rows([[1, 7, 8], [2, 3, 9]], "ids").split([1, 2])
        >>> list(prompts), list(answers)
        ([array([1]), array([2, 3])], [array([7, 8]), array([9])])
        """
        lengths = self.seq_lens
        cuts = self._per_row("positions", positions)
        cuts = np.where(cuts < 0, cuts + lengths, cuts)
        outside = np.flatnonzero((cuts < 0) | (cuts > lengths))
        if len(outside):
            row = int(outside[0])
            raise RowIndexError(f"positions must be within the rows, got {cuts[row]} of {lengths[row]} in row {row}")
        return self._part(np.zeros_like(cuts), cuts), self._part(cuts, lengths - cuts)

    def truncate(self, length: Any, side: Side = "right") -> Self:
        """Truncate rows to a maximum length on one side; returns the column itself if no row exceeds `length`.

        Raises ArgumentError if a length is negative, or `side` is invalid.

        Parameters
        ----------
        length
            Maximum number of elements per row: a number, or an array of one number per row.
        side
            Side at which elements are removed.

        Examples
        --------
        >>> from samplebatch.column import RaggedColumn
        >>> list(RaggedColumn.from_rows([[1, 2, 3], [4]], "ids").truncate(2, side="left"))
        [array([2, 3]), array([4])]
        """
        choice("side", side, SIDES)
        limits = self._per_row("length", length)
        if limits.min(initial=0) < 0:
            raise ArgumentError(f"length must be at least 0, got {limits.min()}")
        lengths = self.seq_lens
        if (lengths <= limits).all():
            return self
        counts = np.minimum(lengths, limits)
        return self._part(lengths - counts if side == "left" else np.zeros_like(counts), counts)

    def gather(self, positions: Any) -> Any:
        """Return the elements at positions of each row.

        Raises RowIndexError if a position is outside its row. Raises ColumnLengthError if the number of rows in
        `positions` is not n.

        Parameters
        ----------
        positions
            A number; an array of shape (n,) or (n, k); or a ragged column with any number of positions per row.
            Negative positions count from the end of the row.

        Returns
        -------
        ndarray, tensor or column
            Shape (n, ...) if `positions` is a number or has shape (n,); (n, k, ...) if it has shape (n, k); a ragged
            column if `positions` is ragged.

        Examples
        --------
        >>> from samplebatch.column import RaggedColumn
        >>> ids = RaggedColumn.from_rows([[1, 2, 3], [4]], "ids")
        >>> ids.gather(-1), ids.gather([[0, 1], [0, 0]]).tolist()
        (array([3, 4]), [[1, 2], [4, 4]])
        """
        extents = self.extents
        if self.ndim > 1 and len(self) and (differs := (extents[:, 1:] != extents[0, 1:]).any(1)).any():
            row = int(differs.argmax())
            raise ColumnTypeError(
                "rows must have the same extents after the first to gather positions, got "
                f"{tuple(extents[0].tolist())} and, in row {row}, {tuple(extents[row].tolist())}"
            )
        layout = positions.layout if isinstance(positions, VaryingRows) else None
        if isinstance(positions, VaryingRows):
            position_array = _host(positions.flat)
            counts = positions.lengths
        else:
            position_array = _host(positions)
            position_array = np.broadcast_to(position_array, len(self)) if not position_array.ndim else position_array
            counts = np.full(len(position_array), int(np.prod(position_array.shape[1:], dtype=np.int64)))
        if position_array.dtype.kind not in "iu" and position_array.size:
            raise ArgumentError(f"positions must be integers, got dtype {position_array.dtype}")
        if len(counts) != len(self):
            raise ColumnLengthError(f"positions must have {len(self)} rows, got {len(counts)}")
        lengths = np.repeat(self.seq_lens, counts)
        indices = position_array.reshape(-1).astype(np.int64)
        indices = np.where(indices < 0, indices + lengths, indices)
        outside = np.flatnonzero((indices < 0) | (indices >= lengths))
        if len(outside):
            row = int(np.repeat(np.arange(len(self)), counts)[outside[0]])
            position, length = position_array.reshape(-1)[outside[0]], self.seq_lens[row]
            raise RowIndexError(f"positions must be within the rows, got {position} of {length} in row {row}")
        indices += np.repeat(offsets_of(self.seq_lens)[:-1], counts)
        trailing = tuple(extents[0, 1:].tolist()) if len(self) else (0,) * (self.ndim - 1)
        flat = self.flat.reshape(int(self.seq_lens.sum()), *trailing)
        values = flat[indices] if isinstance(flat, np.ndarray) else flat[self._beside(indices)]
        if layout is None:
            return values.reshape(*position_array.shape, *trailing)
        return type(self).from_lengths(values, counts)

    def _per_row(self, name: str, values: Any) -> npt.NDArray[np.int64]:
        numbers = _host(values)
        if numbers.dtype.kind not in "iu" and numbers.size:
            raise ArgumentError(f"{name} must be integers, got dtype {numbers.dtype}")
        if numbers.ndim and numbers.shape != (len(self),):
            raise ColumnLengthError(f"{name} must be a number or have {len(self)} rows, got shape {numbers.shape}")
        return np.broadcast_to(numbers, len(self)).astype(np.int64)

    def _part(self, firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Self:
        """Copy `counts` elements of each row along the row's first axis, starting at position `firsts`."""
        extents = self.extents
        sizes = extents[:, 1:].prod(1)
        shapes = None if self.shapes is None else np.concatenate([counts[:, None], extents[:, 1:]], 1)
        starts = self.offsets[:-1] + firsts * sizes
        if isinstance(self.elements, np.ndarray):
            return type(self)(*gather(self.elements, starts, counts * sizes), shapes)
        offsets = offsets_of(counts * sizes)
        indices = np.repeat(starts - offsets[:-1], counts * sizes) + np.arange(offsets[-1])
        return type(self)(self.elements[self._beside(indices)], offsets, shapes)

    # -- operators -----------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Raise ArgumentError, because comparing columns returns one flag per element and no single truth value."""
        raise ArgumentError(
            "a ragged column has no truth value, got one as a condition; use .any() or .all() for each row, equals() "
            "for entire columns, or len()"
        )

    __hash__ = object.__hash__

    __add__, __radd__ = _binary(operator.add), _binary(operator.add, reflected=True)
    __sub__, __rsub__ = _binary(operator.sub), _binary(operator.sub, reflected=True)
    __mul__, __rmul__ = _binary(operator.mul), _binary(operator.mul, reflected=True)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _binary(operator.truediv, reflected=True)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _binary(operator.floordiv, reflected=True)
    __mod__, __rmod__ = _binary(operator.mod), _binary(operator.mod, reflected=True)
    __pow__, __rpow__ = _binary(operator.pow), _binary(operator.pow, reflected=True)
    __and__, __rand__ = _binary(operator.and_), _binary(operator.and_, reflected=True)
    __or__, __ror__ = _binary(operator.or_), _binary(operator.or_, reflected=True)
    __xor__, __rxor__ = _binary(operator.xor), _binary(operator.xor, reflected=True)
    __lt__, __le__, __gt__, __ge__ = (_binary(f) for f in (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)
    __neg__, __abs__, __invert__ = _unary(operator.neg), _unary(abs), _unary(operator.invert)


def _clear_elements(flat: npt.NDArray[Any], flags: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Copy elements, shape (m,), and set the unmarked elements to 0."""
    if flat.itemsize > 8 or flat.dtype.kind not in "biufc":
        return np.where(flags, flat, flat.dtype.type(0))
    # Multiplication as integers keeps or clears all bits: exact for NaN too, and without a branch per element.
    cleared: npt.NDArray[Any] = (flat.view(f"u{flat.itemsize}") * flags).view(flat.dtype)
    return cleared


def _host(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)

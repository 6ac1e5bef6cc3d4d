"""CompressedColumn: rows of equal shape in LZ4 blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.interface import Column, Header, Indices, resolve
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import named_dtype
from samplebatch.errors import CompressedColumnError, FormatError

if TYPE_CHECKING:
    import torch

BLOCK_NBYTES = 1 << 16
"""Approximate size of a block's rows: small enough to read single rows, and LZ4's maximum match distance."""

_MAX_BLOCK_NBYTES = 1 << 30
_MAX_GROWTH = 255
"""Maximum decompressed bytes per compressed byte of LZ4."""

_codec = pa.Codec("lz4_raw")
_compress = _codec.compress
_decompress = _codec.decompress
_ndarray = np.ndarray


class CompressedColumn(Column):
    """Rows of equal shape in LZ4 raw blocks, decompressed when read.

    Each block contains complete rows. A slice is a view with only the blocks in the slice's range; a slice may start
    and end within a block.

    Parameters
    ----------
    blocks
        Compressed blocks in order.
    rows, skips
        Number of rows in each block, and number of rows at each block's start that do not belong to this column.
    bounds
        Row of this column at which each block's rows start, and the column's length in rows.
    dtype, row_shape
        Dtype and shape of a row.
    trusted
        Whether `compress` created the blocks in this process. If false, blocks are decompressed with length checks.

    Examples
    --------
    >>> frames = TensorColumn(np.zeros((64, 84, 84), np.uint8))
    >>> column = CompressedColumn.compress(frames)
    >>> len(column), column.nbytes < frames.nbytes / 100, column[3].shape
    (64, True, (84, 84))
    """

    __slots__ = ("_row_shape", "blocks", "bounds", "item", "rows", "skips", "trusted")
    kind: ClassVar[str] = "compressed"

    def __init__(
        self,
        blocks: list[Any],
        rows: list[int],
        skips: list[int],
        bounds: list[int],
        dtype: np.dtype[Any],
        row_shape: tuple[int, ...],
        *,
        trusted: bool,
    ) -> None:
        self.blocks = blocks
        self.rows = rows
        self.skips = skips
        self.bounds = bounds
        self.item = dtype
        self._row_shape = row_shape
        self.trusted = trusted

    @classmethod
    def compress(
        cls, column: TensorColumn, rows_per_block: int | None = None, *, bulk: bool = False
    ) -> CompressedColumn:
        """Compress a numeric column.

        Raises CompressedColumnError if a row exceeds the maximum block size (1 GiB).

        Parameters
        ----------
        column
            The rows, shape (n, ...).
        rows_per_block
            Number of rows per block; None for as many rows as fit into about 64 KB, but at least one row.
        bulk
            Whether to create a single block. A single block is fastest for reading all rows, but reading any row
            decompresses the entire block. Columns above 1 GiB are split into blocks of at most 1 GiB.
        """
        values = column.values
        n = len(values)
        nbytes = values.nbytes
        dtype = values.dtype
        row_shape = values.shape[1:]
        if bulk and 0 < nbytes <= _MAX_BLOCK_NBYTES:
            return cls([_compress(values, True)], [n], [0], [0, n], dtype, row_shape, trusted=True)
        if not nbytes:
            return cls([], [], [], [0, n], dtype, row_shape, trusted=True)
        row_nbytes = nbytes // n
        if row_nbytes > _MAX_BLOCK_NBYTES:
            raise CompressedColumnError(
                f"a row must have at most {_MAX_BLOCK_NBYTES} bytes to be compressed, got {row_nbytes}; "
                "split it into columns"
            )
        if bulk:
            rows_per_block = _MAX_BLOCK_NBYTES // row_nbytes
        elif rows_per_block is None:
            # Blocks of equal size avoid a tiny last block; but large rows do not exceed the block size by another row,
            # because LZ4 is slower beyond 64 KB.
            even = -(-n // max(1, round(nbytes / BLOCK_NBYTES)))
            rows_per_block = max(1, min(even, BLOCK_NBYTES * 5 // 4 // row_nbytes))
        size = rows_per_block * row_nbytes
        data = memory.as_bytes(values)
        blocks = [_compress(data[at : at + size], True) for at in range(0, nbytes, size)]
        bounds = [*range(0, n, rows_per_block), n]
        rows = [rows_per_block] * (len(blocks) - 1)
        rows.append(n - bounds[-2])
        return cls(blocks, rows, [0] * len(blocks), bounds, dtype, row_shape, trusted=True)

    @property
    def values(self) -> Self:
        return self

    def __len__(self) -> int:
        return self.bounds[-1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.item

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self._row_shape

    @property
    def nbytes(self) -> int:
        """Size of the compressed blocks in bytes, including the full size of blocks that a slice contains in part."""
        return sum(memoryview(block).nbytes for block in self.blocks)

    @property
    def uncompressed_nbytes(self) -> int:
        """Size of the decompressed rows in bytes."""
        return len(self) * self._row_nbytes()

    def __getitem__(self, key: Any) -> Any:
        """Decompress the selected rows into an array; a slice returns a compressed column.

        Raises RowIndexError if a row is out of range. Raises CompressedColumnError if a block is damaged.
        """
        rows = resolve(key, len(self))
        if isinstance(rows, tuple):
            return self.slice(*rows)
        if not isinstance(rows, int):
            return self.take(rows).values
        return self.slice(rows, rows + 1).decompress().values[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.blocks:
            yield from self.decompress().values
        for i in range(len(self.blocks)):
            yield from self._visible(i)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("compressed rows must be copied to become an array, got copy=False")
        array = self.to_numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"CompressedColumn({len(self)} rows of {self.item}, row shape {self._row_shape}, {self.nbytes} bytes)"

    def slice(self, start: int, stop: int) -> Self:
        blocks, rows, skips, bounds = self.blocks, self.rows, self.skips, self.bounds
        if not blocks or start == stop:
            blocks, rows, skips, bounds = [], [], [], [0, stop - start]
        elif start or stop != bounds[-1]:
            low = bisect_right(bounds, start) - 1
            high = bisect_left(bounds, stop)
            blocks, rows, skips = blocks[low:high], rows[low:high], skips[low:high]
            skips[0] += start - bounds[low]
            bounds = [0, *[bound - start for bound in bounds[low + 1 : high]], stop - start]
        return type(self)(blocks, rows, skips, bounds, self.item, self._row_shape, trusted=self.trusted)

    def decompress(self) -> TensorColumn:
        """Decompress every row into a new array.

        Raises CompressedColumnError if a block is damaged.
        """
        n = self.bounds[-1]
        if self.trusted and len(self.blocks) == 1 and self.rows[0] == n:
            block = _decompress(self.blocks[0], n * self._row_nbytes())
            return TensorColumn(_ndarray((n, *self._row_shape), self.item, block))
        out = memory.empty((n, *self._row_shape), self.item)
        for i in range(len(self.blocks)):
            out[self.bounds[i] : self.bounds[i + 1]] = self._visible(i)
        return TensorColumn(out)

    def take(self, indices: Indices) -> TensorColumn:
        """Gather rows into a tensor column; only blocks with selected rows are decompressed, each block once."""
        out = memory.empty((len(indices), *self._row_shape), self.item)
        if not self.blocks or not len(indices):
            return TensorColumn(out)
        owners = np.searchsorted(self.bounds, indices, "right") - 1
        order = np.argsort(owners, kind="stable")
        cuts = np.flatnonzero(np.diff(owners[order])) + 1
        for positions in np.split(order, cuts):
            first = positions[0]
            i = int(owners[first])
            rows = self._visible(i)
            if len(positions) > 1:
                out[positions] = rows[indices[positions] - self.bounds[i]]
            else:
                # Avoids the temporary copy of array indexing.
                out[first] = rows[indices[first] - self.bounds[i]]
        return TensorColumn(out)

    def copy(self) -> Self:
        """Copy the blocks; blocks that `compress` created are immutable and therefore shared."""
        blocks = self.blocks if self.trusted else [bytes(block) for block in self.blocks]
        return type(self)(blocks, self.rows, self.skips, self.bounds, self.item, self._row_shape, trusted=self.trusted)

    def spread(self, length: int, positions: Indices) -> TensorColumn:
        return self.decompress().spread(length, positions)

    @classmethod
    def concat(cls, columns: Sequence[CompressedColumn], name: str) -> Column:
        """Concatenate columns by their block lists; columns of different dtypes are decompressed first.

        Raises ColumnMismatchError if row shapes differ, or no column's dtype represents all other dtypes exactly.
        """
        first = columns[0]
        if any(column.item != first.item or column._row_shape != first._row_shape for column in columns):
            return TensorColumn.concat([column.decompress() for column in columns], name)
        blocks: list[Any] = []
        rows: list[int] = []
        skips: list[int] = []
        lengths: list[int] = []
        for column in columns:
            blocks += column.blocks
            rows += column.rows
            skips += column.skips
            if column.blocks:
                lengths += _steps(column.bounds)
        bounds = [0, *accumulate(lengths)] if blocks else [0, sum(map(len, columns))]
        trusted = all(column.trusted for column in columns)
        return cls(blocks, rows, skips, bounds, first.item, first._row_shape, trusted=trusted)

    def equals(self, other: Column) -> bool:
        if not isinstance(other, CompressedColumn) or len(self) != len(other):
            return False
        if self.item != other.item or self._row_shape != other._row_shape:
            return False
        return self.decompress().equals(other.decompress())

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the decompressed rows, shape (n, ...)."""
        return self.decompress().values

    def to_torch(self) -> torch.Tensor:
        """Return the decompressed rows as a tensor, shape (n, ...)."""
        return self.decompress().to_torch()

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        """Encode the decompressed rows like a tensor column; Arrow has no array type for compressed blocks."""
        return self.decompress().encode()

    def dump(self) -> tuple[Header, list[Any]]:
        header = (
            self.kind,
            self.item.str,
            self._row_shape,
            tuple(self.rows),
            tuple(self.skips),
            tuple(self.bounds),
        )
        return header, self.blocks

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> CompressedColumn:
        try:
            _, dtype_name, row_shape, rows, skips, bounds = header
            dtype = named_dtype(dtype_name)
            column = cls(list(buffers), list(rows), list(skips), list(bounds), dtype, tuple(row_shape), trusted=False)
            fits = column._fits()
        except (TypeError, ValueError, IndexError) as error:
            raise FormatError(f"a compressed column must have a valid header: {error}") from error
        if not fits:
            raise FormatError(
                "a compressed column must have a header that matches its blocks, got another; it is damaged"
            )
        return column

    def _fits(self) -> bool:
        """Return whether an untrusted header is consistent, and matches the blocks' number and sizes."""
        numbers = [*self._row_shape, *self.rows, *self.skips, *self.bounds]
        if not all(type(number) is int and number >= 0 for number in numbers):
            return False
        row_nbytes = self._row_nbytes()
        count = len(self.blocks)
        if not count:
            return (
                not (self.rows or self.skips or self.bounds[0] or row_nbytes * self.bounds[1]) and len(self.bounds) == 2
            )
        if not (
            len(self.rows) == len(self.skips) == count == len(self.bounds) - 1 and row_nbytes and not self.bounds[0]
        ):
            return False
        return all(
            visible > 0 and skip + visible <= stored and stored * row_nbytes <= _MAX_GROWTH * memoryview(block).nbytes
            for visible, skip, stored, block in zip(
                _steps(self.bounds), self.skips, self.rows, self.blocks, strict=True
            )
        )

    def _row_nbytes(self) -> int:
        nbytes = self.item.itemsize
        for extent in self._row_shape:
            nbytes *= extent
        return nbytes

    def _visible(self, i: int) -> npt.NDArray[Any]:
        """Decompress block i, and view the block's rows that belong to this column."""
        row_count = self.rows[i]
        nbytes = row_count * self._row_nbytes()
        block = self.blocks[i]
        if self.trusted:
            # Within its bounds for any input, but accepts a truncated block.
            data = _decompress(block, nbytes)
        else:
            import lz4.block

            try:
                # A copy, unless the block is immutable: its lengths must not change while it is decompressed.
                data = lz4.block.decompress(bytes(block), uncompressed_size=nbytes)
            except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
                raise CompressedColumnError(
                    f"block {i} of a compressed column must decompress to {nbytes} bytes; it is damaged"
                ) from error
            if len(data) != nbytes:
                raise CompressedColumnError(
                    f"block {i} of a compressed column must decompress to {nbytes} bytes, got {len(data)}"
                )
        skip = self.skips[i]
        stop = skip + self.bounds[i + 1] - self.bounds[i]
        return _ndarray((row_count, *self._row_shape), self.item, data)[skip:stop]


def _steps(bounds: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(bounds)]

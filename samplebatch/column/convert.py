"""Conversion of users' values (arrays, tensors, Arrow arrays, lists) to columns.

Values that already have a column's layout are not copied; other values are copied once.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.arguments import choice
from samplebatch.column import memory
from samplebatch.column.arrow import column_from_arrow
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn, differ_in_length, lay_rows
from samplebatch.column.ragged_padding import SIDES, Side
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn, TorchColumn, has_bytes
from samplebatch.column.types import NUMBERS, storage_of
from samplebatch.column.varying_rows import VaryingRows, gather, offsets_of
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnTypeError

_ndarray = np.ndarray
_new = object.__new__


def is_plain(values: Any) -> bool:
    """Return whether a value is a numeric array that already has a column's layout."""
    return type(values) is _ndarray and values.dtype in NUMBERS and values.flags.carray and values.ndim > 0


def plain_columns(data: Mapping[Any, Any]) -> dict[str, Column] | None:
    """Convert a dict that maps strings to plain arrays to columns; return None for other dicts.

    >>> import numpy as np
    >>> list(plain_columns({"a": np.zeros(3)})), plain_columns({"a": [1, 2]})
    (['a'], None)
    """
    columns: dict[str, Column] = {}
    for name, values in data.items():
        # Same condition as `is_plain`, inlined because most batches are created here.
        if not (type(values) is _ndarray and values.dtype in NUMBERS and values.flags.carray and values.ndim):
            return None
        if type(name) is not str:
            return None
        columns[name] = column = _new(TensorColumn)
        column.values = values
    return columns


def as_column(values: Any, name: str) -> Column:
    """Convert a user's value to a column.

    Parameters
    ----------
    values
        A NumPy array, a torch tensor, an Arrow array, a column, or a list or tuple of rows. Strided, Fortran-ordered,
        byte-swapped and unaligned arrays are copied. Lists of strings or bytes (None if missing), NumPy arrays of
        strings or bytes, and object arrays of strings or bytes with two or more dimensions become a `TextColumn`. Lists
        of rows of different shapes become a `RaggedColumn`, and jagged tensors become a `RaggedTorchColumn`.
        One-dimensional object arrays, including arrays of strings, and other lists without numbers become an
        `ObjectColumn`.
    name
        The column's name, for error messages.

    Raises
    ------
    ColumnTypeError
        If the value has no rows (a number, a string, a 0-d array), has an unsupported dtype, or requires a gradient. A
        tensor that requires a gradient would keep the autograd graph in memory.

    Examples
    --------
    >>> import numpy as np
    >>> rewards = np.zeros(3)
    >>> as_column(rewards, "rewards").values is rewards
    True
    >>> as_column([{}, None], "infos").kind
    'object'
    """
    if is_plain(values):
        return TensorColumn(values)
    if isinstance(values, Column):
        return values
    if isinstance(values, np.ndarray):
        return _from_array(values, name)
    if isinstance(values, (list, tuple)):
        return _from_list(values, name)
    if _is_tensor(values):
        return _from_tensor(values, name)
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        return column_from_arrow(values, pa.field(name, values.type), allow_pickle=False)
    if hasattr(values, "__array__") and not isinstance(values, np.generic):
        return _from_array(np.asarray(values), name)
    raise ColumnTypeError(
        f"column {name!r} must be an array, a tensor or a list of rows, got a single {type(values).__name__}; "
        "wrap it in a list for a batch of one row"
    )


def as_ragged(values: Any, name: str, dtype: npt.DTypeLike | None = None) -> VaryingRows:
    """Convert a user's value to a ragged column, even if all rows have equal shapes.

    Raises ColumnTypeError if the rows are not numeric arrays, have no dimensions, or differ in their number of
    dimensions. Raises ColumnMismatchError if the dtype cannot represent the rows exactly.

    values: a list of arrays, or any input of `as_column`. Arrays and tensors of shape (n, ...) are viewed.
    dtype: dtype of the elements; None for the dtype of the rows.

    >>> as_ragged([[1, 2], [3, 4]], "ids"), as_ragged([], "ids", "int64")
    (RaggedColumn(2 rows of int64, row shape (None,)),
     RaggedColumn(0 rows of int64, row shape (None,)))
    """
    if isinstance(values, (list, tuple)) and not (values and all(map(_is_tensor, values))):
        return RaggedColumn.from_rows(values, name, dtype)
    column = as_column(values, name)
    if isinstance(column, ObjectColumn):
        return RaggedColumn.from_rows(column.values.tolist(), name, dtype)
    if isinstance(column, (TensorColumn, TorchColumn)):
        rows: Any = column.values
        if rows.ndim == 1 and not len(rows):
            rows = rows.reshape(0, 0)
        if rows.ndim < 2:
            raise ColumnTypeError(
                f"column {name!r} must have rows that are arrays, got single values of dtype {rows.dtype}"
            )
        column = (
            RaggedColumn.from_array(rows) if isinstance(column, TensorColumn) else RaggedTorchColumn.from_tensor(rows)
        )
    if not isinstance(column, VaryingRows):
        raise ColumnTypeError(f"column {name!r} must have rows that are arrays, got a {column.kind} column")
    if dtype is None or not isinstance(column, (RaggedColumn, RaggedTorchColumn)):
        return column
    return column.cast(np.dtype(dtype), name)


def is_of_arrays(rows: Any) -> bool:
    """Return whether an object array contains numeric arrays with equal dtypes and numbers of dimensions.

    >>> rows = np.empty(2, object)
    >>> rows[:] = [np.zeros(1), np.zeros(3)]
    >>> is_of_arrays(rows), is_of_arrays(np.zeros((2, 3)))
    (True, False)
    """
    if not (isinstance(rows, np.ndarray) and rows.dtype.kind == "O" and rows.ndim == 1 and len(rows)):
        return False
    kinds = {(row.dtype, row.ndim) if isinstance(row, np.ndarray) else None for row in rows}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return kind is not None and kind[0].kind in "biufc" and kind[1] > 0


def match_ragged(column: Column, dtype: Any, ndim: int, name: str) -> Column:
    """Convert rows of equal shape, or rows without elements, to a ragged column if the rows match a declared column.

    dtype, ndim: dtype of the elements and number of dimensions per row of the declared ragged column.

    Returns: the ragged column, or `column` itself if the rows do not match.

    >>> match_ragged(as_column([[1, 2]], "ids"), np.dtype("int64"), 1, "ids")
    RaggedColumn(1 rows of int64, row shape (None,))
    """
    if isinstance(column, (TensorColumn, TorchColumn)):
        if column.values.ndim != ndim + 1 or (column.dtype != dtype and column.nbytes):
            return column
        column = as_ragged(column, name)
    if isinstance(column, RaggedColumn) and not len(column.flat) and isinstance(dtype, np.dtype):
        return column.cast(dtype, name)
    return column


Ragged = str | Collection[str] | Mapping[str, npt.DTypeLike]
"""Ragged columns: names, or names mapped to element dtypes."""


def ragged_dtypes(ragged: Ragged) -> dict[str, np.dtype[Any] | None]:
    """Return element dtypes by name of the ragged column; an undeclared dtype is None.

    Raises ArgumentError if a name is not a string, or a dtype is invalid.

    >>> ragged_dtypes("ids"), ragged_dtypes({"ids": "int32"})
    ({'ids': None}, {'ids': dtype('int32')})
    """
    if isinstance(ragged, str):
        return {ragged: None}
    dtypes: Any = dict(ragged) if isinstance(ragged, Mapping) else None
    names = list(ragged) if isinstance(ragged, Iterable) else [ragged]
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(
                f"ragged must contain column names, got {type(name).__name__}; pass dtypes by column name in a mapping"
            )
    try:
        return {name: np.dtype(dtypes[name]) if dtypes and dtypes[name] is not None else None for name in names}
    except TypeError as error:
        raise ArgumentError(f"ragged must map column names to element dtypes: {error}") from error


def _from_array(values: np.ndarray[Any, Any], name: str) -> Column:
    if isinstance(values, np.ma.MaskedArray):
        raise ColumnTypeError(f"column {name!r} must not be a masked array, got one; call filled() first")
    if not values.ndim:
        raise ColumnTypeError(f"column {name!r} must have rows, got a 0-d array; for a batch of one row use reshape(1)")
    kind = values.dtype.kind
    if kind == "O":
        text = TextColumn.from_objects(values) if values.ndim > 1 else None
        return ObjectColumn.from_array(values, name) if text is None else text
    if kind in "SUT":
        text = TextColumn.from_array(np.asarray(values), name)
        # Strings that UTF-8 cannot encode remain objects.
        return ObjectColumn.from_array(values.astype(object), name) if text is None else text
    native = values.dtype.newbyteorder("=")
    try:
        storage_of(native)
    except ColumnTypeError as error:
        hint = "; create one column per field" if native.names else ""
        raise ColumnTypeError(
            f"column {name!r} must have a dtype that columns support, got {values.dtype}{hint}"
        ) from error
    plain = np.asarray(values)
    if plain.flags.c_contiguous and plain.flags.aligned and plain.dtype == native:
        return TensorColumn(plain)
    converted = memory.empty(plain.shape, native)
    np.copyto(converted, plain)
    return TensorColumn(converted)


def _from_list(values: Sequence[Any], name: str) -> Column:
    if values and all(map(_is_tensor, values)):
        import torch

        shapes = {tuple(row.shape) for row in values}
        if len(shapes) > 1:
            return RaggedTorchColumn.from_rows(values, name)
        return _from_tensor(torch.stack(list(values)), name)
    if differ_in_length(values) and (layout := lay_rows(values)) is not None:
        return RaggedColumn(*layout)
    text = TextColumn.from_rows(values)
    if text is not None:
        return text
    if any(isinstance(row, (dict, type(None))) or _is_of_records(row) for row in values):
        return ObjectColumn.from_rows(values)
    try:
        array = np.array(values)
    except ValueError:
        # NumPy raises ValueError for rows of different shapes.
        return RaggedColumn.from_rows(values, name)
    if array.dtype.kind in "SU" and array.ravel().tolist() != np.array(values, object).ravel().tolist():
        # NumPy converts numbers among strings to strings, and removes trailing zero bytes.
        return ObjectColumn.from_rows(values)
    return _from_array(array, name)


def _is_of_records(row: Any) -> bool:
    """Return whether a row is a list of dicts, such as chat messages."""
    return type(row) is list and bool(row) and isinstance(row[0], dict)


def _is_tensor(values: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def _from_tensor(values: Any, name: str) -> Column:
    if not values.is_nested and not values.ndim:
        raise ColumnTypeError(
            f"column {name!r} must have rows, got a 0-d tensor; for a batch of one row use reshape(1)"
        )
    if not has_bytes(values.dtype):
        raise ColumnTypeError(f"column {name!r} must have a dtype that can be built from bytes, got {values.dtype}")
    if values.layout is sys.modules["torch"].jagged:
        return RaggedTorchColumn.from_nested(values, name)
    if values.is_nested:
        raise ColumnTypeError(
            f"column {name!r} must be a dense or a jagged tensor, got a nested one; use layout=torch.jagged"
        )
    if values.layout is not sys.modules["torch"].strided:
        raise ColumnTypeError(f"column {name!r} must be a dense tensor, got one with layout {values.layout}")
    if values.requires_grad:
        raise ColumnTypeError(
            f"column {name!r} must be a tensor without a gradient, got one that requires it; pass its detach()"
        )
    return TorchColumn(values.contiguous().resolve_conj().resolve_neg())


def unpad(padded: Any, lengths: Any = None, mask: Any = None, side: Side = "right") -> RaggedColumn | RaggedTorchColumn:
    """Copy the elements of padded rows into a ragged column.

    Parameters
    ----------
    padded
        An array or a tensor of shape (n, width, ...).
    lengths
        The number of elements of each row, shape (n,).
    mask
        Mask of the elements to copy, shape (n, width); instead of `lengths`.
    side
        Side of the padding, `"right"` or `"left"`. Used only with `lengths`.

    Returns
    -------
    RaggedColumn or RaggedTorchColumn
        Rows of shape (length, ...).

    Raises
    ------
    ArgumentError
        If not exactly one of `lengths` and `mask` is passed.
    ColumnLengthError
        If lengths or mask do not match `padded`.
    ColumnTypeError
        If `padded` has fewer than two dimensions.

    Examples
    --------
    >>> list(unpad(np.array([[0, 1, 2], [0, 0, 3]]), [2, 1], side="left"))
    [array([1, 2]), array([3])]
    >>> list(unpad(np.array([[4, 1, 2], [5, 6, 3]]), mask=[[1, 0, 1], [0, 0, 0]]))
    [array([4, 2]), array([], dtype=int64)]
    """
    choice("side", side, SIDES)
    values = as_column(padded, "padded").values
    if isinstance(values, VaryingRows) or getattr(values, "ndim", 0) < 2:
        raise ColumnTypeError("padded must be an array or a tensor of shape (n, width, ...), got one without a width")
    if (lengths is None) == (mask is None):
        raise ArgumentError(
            "exactly one of lengths and mask must be passed, got " + ("none" if mask is None else "both")
        )
    n, width = values.shape[:2]
    trailing = tuple(values.shape[2:])
    size = prod(trailing)
    if mask is not None:
        chosen = _host(mask).astype(np.bool_, copy=False)
        if chosen.shape != (n, width):
            raise ColumnLengthError(f"mask must have shape {(n, width)}, got {chosen.shape}")
        counts = chosen.sum(1, dtype=np.int64)
    else:
        counts = _host(lengths).astype(np.int64)
        if counts.shape != (n,):
            raise ColumnLengthError(f"lengths must have {n} rows, one per row of padded, got shape {counts.shape}")
        if len(counts) and not 0 <= counts.min() <= counts.max() <= width:
            row = int(np.flatnonzero((counts < 0) | (counts > width))[0])
            raise ColumnLengthError(f"lengths must be in [0, {width}], got {counts[row]} in row {row}")
        chosen = None
    shapes = None
    if trailing:
        shapes = np.empty((n, 1 + len(trailing)), np.int64)
        shapes[:, 0], shapes[:, 1:] = counts, trailing
    if isinstance(values, np.ndarray):
        if chosen is not None:
            return _ragged(values[chosen].reshape(-1), offsets_of(counts * size), shapes)
        starts = np.arange(n) * width + (width - counts if side == "left" else 0)
        return _ragged(*gather(values.reshape(-1), starts * size, counts * size), shapes)
    import torch

    if chosen is None:
        positions = np.arange(width)
        chosen = positions >= width - counts[:, None] if side == "left" else positions < counts[:, None]
    rows = torch.from_numpy(np.flatnonzero(chosen)).to(values.device)
    elements = values.reshape(n * width, *trailing).index_select(0, rows).reshape(-1)
    return _ragged(elements, offsets_of(counts * size), shapes)


def _ragged(elements: Any, offsets: Any, shapes: Any) -> RaggedColumn | RaggedTorchColumn:
    kind = RaggedColumn if isinstance(elements, np.ndarray) else RaggedTorchColumn
    return kind(elements, offsets, shapes)


def _host(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)

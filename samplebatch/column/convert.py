"""Conversion of users' values (arrays, tensors, Arrow arrays, lists) to columns, or a refusal by name.

A value that already has a column's layout is kept, the very object; any other is copied once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from samplebatch.column import memory
from samplebatch.column.arrow import column_from_arrow
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.types import NUMBERS, storage_of
from samplebatch.errors import ColumnTypeError

_ndarray = np.ndarray
_new = object.__new__


def is_plain(values: Any) -> bool:
    """Tell whether a value is an array of numbers in a column's layout, which needs no conversion."""
    return type(values) is _ndarray and values.dtype in NUMBERS and values.flags.carray and values.ndim > 0


def plain_columns(data: Mapping[Any, Any]) -> dict[str, Column] | None:
    """Make columns of a dict of plain arrays under string names; return None for any other dict.

    Examples
    --------
    >>> import numpy as np
    >>> list(plain_columns({"a": np.zeros(3)})), plain_columns({"a": [1, 2]})
    (['a'], None)
    """
    columns: dict[str, Column] = {}
    for name, values in data.items():
        # The condition of `is_plain` without a call for each column: most batches are made here.
        if not (type(values) is _ndarray and values.dtype in NUMBERS and values.flags.carray and values.ndim):
            return None
        if type(name) is not str:
            return None
        columns[name] = column = _new(TensorColumn)
        column.values = values
    return columns


def as_column(values: Any, name: str) -> Column:
    """Make a column of a user's value.

    Parameters
    ----------
    values
        A NumPy array, a torch tensor, an Arrow array, a column, or a list or tuple of rows. Arrays in another layout
        than a column's (strided, Fortran-ordered, byte-swapped, unaligned) are copied; lists of rows of unequal
        shape become a `RaggedColumn`, lists of anything else than numbers and strings an `ObjectColumn`.
    name
        The column's name, for errors.

    Raises
    ------
    ColumnTypeError
        If the value has no rows (a number, a string, a 0-d array) or a dtype that no column can hold.

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
        "for a batch of one row wrap it in a list"
    )


def _from_array(values: np.ndarray[Any, Any], name: str) -> Column:
    if isinstance(values, np.ma.MaskedArray):
        raise ColumnTypeError(f"column {name!r} must have no mask, which no column can hold; call filled() first")
    if not values.ndim:
        raise ColumnTypeError(f"column {name!r} must have rows, got a 0-d array; for a batch of one row use reshape(1)")
    if values.dtype.kind == "O" or isinstance(values.dtype, np.dtypes.StringDType):
        return ObjectColumn.from_array(values, name)
    native = values.dtype.newbyteorder("=")
    try:
        storage_of(native)
    except ColumnTypeError as error:
        hint = "; give each of its fields a column" if native.names else ""
        raise ColumnTypeError(f"column {name!r} has dtype {values.dtype}, which no column can hold{hint}") from error
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
            return RaggedColumn.from_rows([row.detach().cpu().resolve_conj().resolve_neg() for row in values], name)
        return _from_tensor(torch.stack(list(values)), name)
    if any(isinstance(row, (dict, type(None))) for row in values):
        return ObjectColumn.from_rows(values)
    try:
        array = np.array(values)
    except ValueError:
        # NumPy's word for rows of unequal shape.
        return RaggedColumn.from_rows(values, name)
    if array.dtype.kind in "SU" and array.ravel().tolist() != np.array(values, object).ravel().tolist():
        # NumPy turns numbers among strings into strings, and drops zero bytes at their end.
        return ObjectColumn.from_rows(values)
    return _from_array(array, name)


def _is_tensor(values: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def _from_tensor(values: Any, name: str) -> Column:
    if not values.ndim:
        raise ColumnTypeError(
            f"column {name!r} must have rows, got a 0-d tensor; for a batch of one row use reshape(1)"
        )
    if values.layout is not sys.modules["torch"].strided or values.is_quantized:
        raise ColumnTypeError(f"column {name!r} must be a dense tensor, got one with layout {values.layout}")
    return TorchColumn(values.contiguous().resolve_conj().resolve_neg())

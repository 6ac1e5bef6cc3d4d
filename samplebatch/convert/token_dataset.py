"""Conversion of tokenized Hugging Face datasets, such as TRL's, and of lists of dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import Ragged
from samplebatch.column.ragged import RaggedColumn, lay_rows
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, require


def from_token_dataset(dataset: Any, columns: Sequence[str] | None = None) -> SampleBatch:
    """Convert a Hugging Face dataset, such as the output of TRL's tokenization, to a batch.

    Lists of numbers become ragged columns, without a copy if the dataset has one chunk and no row selection. Strings
    become text columns; lists of messages become columns of objects.

    Parameters
    ----------
    dataset
        A `datasets.Dataset`, or an Arrow table.
    columns
        Names of the columns to read; None for all columns.

    Raises
    ------
    ColumnTypeError
        If `dataset` is neither a dataset nor a table, for example a streaming dataset, or a column has missing numbers.
    ColumnNotFoundError
        If a column is missing.

    Examples
    --------
    >>> table = pa.table({"input_ids": [[1, 2], [3]], "text": ["ab", "c"]})
    >>> from_token_dataset(table)["input_ids"]
    RaggedColumn(2 rows of int64, row shape (None,))
    """
    if isinstance(dataset, pa.Table):
        table = dataset
    elif hasattr(dataset, "with_format") and hasattr(dataset, "column_names") and hasattr(dataset, "__getitem__"):
        table = dataset.with_format("arrow")[:]
    else:
        raise ColumnTypeError(
            f"dataset must be a Hugging Face Dataset or an Arrow table, got a {type(dataset).__name__}; of a stream, "
            "pass a list of rows to from_dicts"
        )
    batch = SampleBatch.from_arrow(table)
    return batch if columns is None else batch.select(*columns)


def to_token_dataset(batch: SampleBatch[Any]) -> Any:
    """Convert a batch to a Hugging Face dataset, without a copy if the column layouts permit.

    Ragged columns become lists, which TRL's trainers and collators read. Nested columns keep their dotted names.

    Raises
    ------
    ColumnTypeError
        If a column is compressed, or its dtype is not supported by NumPy.
    MissingExtraError
        If datasets is not installed.
    """
    package = require("datasets", "datasets")
    arrays: dict[str, pa.Array] = {}
    for name in batch.column_names:
        column = batch.column(name)
        if isinstance(column, VaryingRows):
            arrays[name] = _short_lists(column.to_lists())
            continue
        if isinstance(column, TensorColumn | TorchColumn):
            values = column.to_numpy()
            plain = pa.array(values.reshape(-1))
            for extent in reversed(values.shape[1:]):
                plain = pa.FixedSizeListArray.from_arrays(plain, extent)
        else:
            plain = column.to_arrow()
        arrays[name] = plain.cast(pa.string()) if pa.types.is_large_string(plain.type) else plain
    return package.Dataset(pa.table(arrays))


def _short_lists(lists: pa.Array) -> pa.Array:
    """Cast lists to 32-bit offsets if the offsets fit into 32 bits, because other libraries expect 32-bit offsets."""
    if not pa.types.is_large_list(lists.type) or len(lists.values) > np.iinfo(np.int32).max:
        return lists
    return lists.cast(pa.list_(lists.type.value_type))


def from_dicts(rows: Iterable[Mapping[str, Any]], ragged: Ragged = ()) -> SampleBatch:
    """Create a batch from a list of dicts, one per row, such as rollout results.

    Lists and arrays of numbers become ragged columns, even if their lengths are equal.

    Parameters
    ----------
    rows
        Dicts with the same keys.
    ragged
        Names of ragged columns and dtypes of their elements, as in `SampleBatch`.

    Raises
    ------
    ColumnTypeError
        If a row is not a dict, or the values of a column have an unsupported type.
    ColumnMismatchError
        If the keys of a row differ from the keys of the first row.

    Examples
    --------
    >>> batch = from_dicts([{"ids": [1, 2], "reward": 0.5}, {"ids": [3, 4], "reward": 1.0}])
    >>> batch["ids"], batch["reward"]
    (RaggedColumn(2 rows of int64, row shape (None,)), array([0.5, 1. ]))
    """
    listed = list(rows)
    for i, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise ColumnTypeError(f"rows must be dicts, got a {type(row).__name__} in row {i}")
        if row.keys() != listed[0].keys():
            differing = ", ".join(sorted(map(repr, row.keys() ^ listed[0].keys())))
            raise ColumnMismatchError(f"rows must have the same keys, got row {i} with other keys: {differing}")
    columns: dict[str, Any] = {}
    for name in listed[0] if listed else ():
        values = [row[name] for row in listed]
        layout = lay_rows(values) if not ragged else None
        columns[name] = values if layout is None else RaggedColumn(*layout)
    return SampleBatch(columns, ragged=ragged)


def to_dicts(batch: SampleBatch[Any]) -> list[dict[str, Any]]:
    """Return each row as a dict of Python numbers, strings, lists and objects.

    Examples
    --------
    >>> to_dicts(SampleBatch(ids=[[1, 2], [3]], rewards=[0.5, 1.0]))
    [{'ids': [1, 2], 'rewards': 0.5}, {'ids': [3], 'rewards': 1.0}]
    """
    return [_plain(row) for row in batch.rows()]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value

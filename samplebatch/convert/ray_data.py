"""Ray Data: datasets whose blocks are Arrow tables of steps."""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.convert.experience import Source, as_flat, fragments_of
from samplebatch.errors import ColumnMismatchError, EmptyBufferError, FormatError, require

if TYPE_CHECKING:
    from ray.data import Dataset


def to_ray_dataset(source: Source) -> Dataset:
    """Create a Ray Data dataset with one block per fragment; columns keep their Arrow types.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.

    Raises
    ------
    ColumnTypeError, SequenceError, EmptyBufferError
        If the source does not consist of steps of one policy.
    MissingExtraError
        If Ray is not installed.
    """
    data = require("ray.data", "ray")
    dataset: Dataset = data.from_arrow([as_flat(part).to_arrow() for part in fragments_of(source)])
    return dataset


def from_ray_dataset(dataset: Dataset, *, allow_pickle: bool = False, max_nbytes: int | None = None) -> SampleBatch:
    """Read a Ray Data dataset into one batch; a single block is not copied.

    Ray's tensor types become arrays. Dotted names become nested columns if the dataset still has the schema that
    `to_ray_dataset` wrote.

    Parameters
    ----------
    dataset
        The dataset, which must fit into memory; use `dataset.limit` otherwise.
    allow_pickle
        Whether to unpickle columns of Python objects that Arrow cannot represent. Only for data that you trust.
    max_nbytes
        Maximum bytes of Python objects; None for the larger of 256 MiB and 1024 times the table's size.

    Raises
    ------
    ColumnTypeError
        If a column has nulls or an unsupported type; names it.
    ColumnMismatchError
        If blocks differ in their columns.
    UntrustedPickleError, CapacityError
        As `SampleBatch.from_arrow`.
    EmptyBufferError
        If there are no steps.
    MissingExtraError
        If Ray is not installed.
    """
    ray = require("ray", "ray")
    blocks: list[Any] = [block for block in ray.get(dataset.to_arrow_refs()) if block.num_rows]
    if not blocks:
        raise EmptyBufferError("a Ray dataset must have steps to be converted, got none")
    try:
        table = pa.concat_tables(map(without_ray_types, blocks), promote_options="permissive")
    except pa.ArrowException as error:
        raise ColumnMismatchError(f"blocks of a Ray dataset must have the same columns: {error}") from error
    return SampleBatch.from_arrow(table, allow_pickle=allow_pickle, max_nbytes=max_nbytes)


_FIXED = frozenset(("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2"))
_VARIABLE = "ray.data.arrow_variable_shaped_tensor"

_MAX_DIMENSIONS = 63
"""Maximum dimensions of a row; NumPy adds one for the rows."""


def without_ray_types(table: pa.Table) -> pa.Table:
    """Convert Ray Data's tensor types to fixed-size or variable-size lists; other columns are unchanged.

    Raises
    ------
    FormatError
        If a tensor is not stored as Ray stores it, contradicts its declared shape, or has rows that vary in shape;
        names the column.
    """
    fields, columns = [], []
    for field, column in zip(table.schema, table.columns, strict=True):
        name, metadata = _extension(field)
        if name == _VARIABLE:
            column = pa.chunked_array([_lists(chunk, field.name) for chunk in column.chunks])
            field = pa.field(field.name, column.type, nullable=False)
        elif name in _FIXED:
            shape = _shape(field, metadata)
            column = pa.chunked_array([_tensor(chunk, shape, field.name) for chunk in column.chunks])
            field = pa.field(field.name, column.type, nullable=False)
        fields.append(field)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, table.schema.metadata))


def _extension(field: pa.Field) -> tuple[str, bytes]:
    """Return name and metadata of a field's extension type, registered or (without Ray) unregistered."""
    if isinstance(field.type, pa.BaseExtensionType):
        extension = field.type.extension_name
        return extension, field.type.__arrow_ext_serialize__() if extension in _FIXED else b""
    metadata = field.metadata or {}
    name = metadata.get(b"ARROW:extension:name", b"").decode("utf-8", "replace")
    return name, metadata.get(b"ARROW:extension:metadata", b"")


def _shape(field: pa.Field, metadata: bytes) -> tuple[int, ...]:
    shape: Any = getattr(field.type, "shape", None)
    if shape is None:
        try:
            shape = json.loads(metadata)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"column {field.name!r} must declare the shape of its tensors in its metadata") from error
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise FormatError(f"column {field.name!r} must declare the shape of its tensors in its metadata")
    if len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"column {field.name!r} must have tensors of at most {_MAX_DIMENSIONS} dimensions")
    return tuple(shape)


def _tensor(chunk: pa.Array, shape: tuple[int, ...], name: str) -> pa.Array:
    storage = _storage_of(chunk)
    size = prod(shape)
    if not size or not _is_list(storage.type) or storage.null_count or not np.all(_lengths(storage) == size):
        raise FormatError(f"column {name!r} must have {size} elements per row, the product of its shape {shape}")
    rows = storage.flatten()
    for extent in reversed(shape):
        rows = pa.FixedSizeListArray.from_arrays(rows, extent)
    return rows


def _lists(chunk: pa.Array, name: str) -> pa.Array:
    storage = _storage_of(chunk)
    kind = storage.type
    field_indices = [kind.get_field_index(part) for part in ("data", "shape")] if pa.types.is_struct(kind) else [-1]
    if min(field_indices) < 0 or storage.null_count:
        raise FormatError(f"column {name!r} must have fields 'data' and 'shape' for each tensor")
    data, shapes = map(storage.field, field_indices)
    if not _is_list(shapes.type) or shapes.null_count or not np.all(_lengths(shapes) <= 1):
        raise FormatError(f"column {name!r} must have tensors of equal shape, or of one dimension")
    return data


def _storage_of(chunk: pa.Array) -> pa.Array:
    return chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _lengths(lists: pa.Array) -> Any:
    return np.diff(lists.offsets.to_numpy())

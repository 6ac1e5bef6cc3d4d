"""Arrow types of Ray Data's own, for tensors: turned into Arrow's, over the same memory."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa

from samplebatch.errors import FormatError

_FIXED = frozenset(("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2"))
_VARIABLE = "ray.data.arrow_variable_shaped_tensor"

_MAX_DIMENSIONS = 63
"""Dimensions that a row may have: NumPy's arrays have one more, for the rows."""


def without_ray_types(table: pa.Table) -> pa.Table:
    """Turn tensors of Ray Data's types into lists of fixed size, or of varying size; all other columns are kept.

    Raises
    ------
    FormatError
        If a tensor is stored in another way than Ray's, has not as many elements as its shape says, or has rows that
        vary in shape; names the column.
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
    """Return name and metadata of a field's extension type: of itself, or of its metadata where Ray is not loaded."""
    if isinstance(field.type, pa.BaseExtensionType):
        own = field.type.extension_name
        return own, field.type.__arrow_ext_serialize__() if own in _FIXED else b""
    metadata = field.metadata or {}
    name = metadata.get(b"ARROW:extension:name", b"").decode("utf-8", "replace")
    return name, metadata.get(b"ARROW:extension:metadata", b"")


def _shape(field: pa.Field, metadata: bytes) -> tuple[int, ...]:
    shape: Any = getattr(field.type, "shape", None)
    if shape is None:
        try:
            shape = json.loads(metadata)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"column {field.name!r} must tell the shape of its tensors, it does not") from error
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise FormatError(f"column {field.name!r} must tell the shape of its tensors, it does not")
    if len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"column {field.name!r} must have tensors of at most {_MAX_DIMENSIONS} dimensions")
    return tuple(shape)


def _tensor(chunk: pa.Array, shape: tuple[int, ...], name: str) -> pa.Array:
    storage = _storage_of(chunk)
    size = prod(shape)
    if not size or not _is_list(storage.type) or storage.null_count or not np.all(_lengths(storage) == size):
        raise FormatError(f"column {name!r} must have {size} elements in each row, as its shape {shape} says")
    rows = storage.flatten()
    for extent in reversed(shape):
        rows = pa.FixedSizeListArray.from_arrays(rows, extent)
    return rows


def _lists(chunk: pa.Array, name: str) -> pa.Array:
    storage = _storage_of(chunk)
    kind = storage.type
    places = [kind.get_field_index(part) for part in ("data", "shape")] if pa.types.is_struct(kind) else [-1]
    if min(places) < 0 or storage.null_count:
        raise FormatError(f"column {name!r} must have data and shape of each of its tensors, it has not")
    data, shapes = map(storage.field, places)
    if not _is_list(shapes.type) or shapes.null_count or not np.all(_lengths(shapes) <= 1):
        raise FormatError(f"column {name!r} must have tensors of one shape, or of one dimension, they vary in more")
    return data


def _storage_of(chunk: pa.Array) -> pa.Array:
    return chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _lengths(lists: pa.Array) -> Any:
    return np.diff(lists.offsets.to_numpy())

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


def without_ray_types(table: pa.Table) -> pa.Table:
    """Turn tensors of Ray Data's types into lists of fixed size, or of varying size; all other columns are kept.

    Raises
    ------
    FormatError
        If a tensor has not as many elements as its shape says, or rows that vary in shape; names the column.
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
        except ValueError as error:
            raise FormatError(f"column {field.name!r} must tell the shape of its tensors, it does not") from error
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise FormatError(f"column {field.name!r} must tell the shape of its tensors, it does not")
    return tuple(shape)


def _tensor(chunk: pa.Array, shape: tuple[int, ...], name: str) -> pa.Array:
    storage = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
    size = prod(shape)
    lengths = np.diff(storage.offsets.to_numpy())
    if storage.null_count or not size or not (lengths == size).all():
        raise FormatError(f"column {name!r} must have {size} elements in each row, as its shape {shape} says")
    rows = storage.flatten()
    for extent in reversed(shape):
        rows = pa.FixedSizeListArray.from_arrays(rows, extent)
    return rows


def _lists(chunk: pa.Array, name: str) -> pa.Array:
    storage = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
    if any(len(shape) > 1 for shape in storage.field("shape").to_pylist()):
        raise FormatError(f"column {name!r} must have tensors of one shape, or of one dimension, they vary in more")
    return storage.field("data")

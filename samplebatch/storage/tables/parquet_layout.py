"""Storage types for Arrow types that Parquet or common Parquet readers do not support.

- Flags are stored as booleans, and tensors are stored as nested fixed-size lists. Every reader supports booleans and
  fixed-size lists, unlike Arrow's extension types. Flag columns whose rows are tensors or lists are stored as lists of
  booleans.
- A struct without fields (an empty dict) and a fixed-size list of size 0 (a row without elements) are stored as the
  boolean value true.
- Dates in seconds are stored as 64-bit integers, because Parquet would convert them to milliseconds, which could
  overflow.
- Fixed-size lists with nulls are stored as variable-size lists, which have the same layout in Parquet, because pyarrow
  before version 19 cannot read fixed-size lists with nulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column.types import DTYPE_KEY
from samplebatch.errors import FormatError

_FLAG = np.dtype(np.bool_).str.encode()


def holds_flags(field: pa.Field) -> bool:
    """Return whether the elements of a field's rows are flags, which Arrow stores as 8-bit integers."""
    return (field.metadata or {}).get(DTYPE_KEY) == _FLAG


def parquet_field(field: pa.Field, *, flags: bool = False) -> pa.Field:
    """Return the field of the array that `to_parquet` returns; `field` itself if no conversion is required."""
    flags = flags or holds_flags(field)
    changed = parquet_type(field.type, nullable=field.nullable, flags=flags)
    return field if changed.equals(field.type) else field.with_type(changed)


def parquet_type(arrow: pa.DataType, *, nullable: bool = False, flags: bool = False) -> pa.DataType:
    """Return the type in which Parquet stores an Arrow type; `arrow` itself if Parquet supports it.

    If `flags` is true, 8-bit integers represent flags.

    >>> parquet_type(pa.struct({"info": pa.struct([]), "hit": pa.bool8()}))
    StructType(struct<info: bool, hit: bool>)
    >>> parquet_type(pa.fixed_shape_tensor(pa.uint8(), (2, 4))).value_type.list_size
    4
    """
    if isinstance(arrow, pa.Bool8Type) or (flags and pa.types.is_int8(arrow)):
        return pa.bool_()
    if isinstance(arrow, pa.FixedShapeTensorType):
        return parquet_type(_nested_type(arrow), nullable=nullable, flags=flags)
    if isinstance(arrow, pa.BaseExtensionType):
        return parquet_type(arrow.storage_type, nullable=nullable, flags=flags)
    if _is_bare(arrow):
        return pa.bool_()
    if pa.types.is_timestamp(arrow) and arrow.unit == "s":
        return pa.int64()
    if pa.types.is_struct(arrow):
        return pa.struct([parquet_field(arrow.field(i), flags=flags) for i in range(arrow.num_fields)])
    if pa.types.is_fixed_size_list(arrow):
        field = parquet_field(arrow.value_field, flags=flags)
        return pa.large_list(field) if nullable else pa.list_(field, arrow.list_size)
    if pa.types.is_large_list(arrow):
        return pa.large_list(parquet_field(arrow.value_field, flags=flags))
    return arrow


def to_parquet(array: pa.Array, *, nullable: bool = False, flags: bool = False) -> pa.Array:
    """Convert an array to its `parquet_type`; returns `array` itself if no conversion is required."""
    arrow = array.type
    target = parquet_type(arrow, nullable=nullable, flags=flags)
    if target.equals(arrow):
        return array
    if isinstance(arrow, pa.FixedShapeTensorType):
        return to_parquet(_nest(array), nullable=nullable, flags=flags)
    if isinstance(arrow, pa.Bool8Type):
        return array.storage.cast(target)
    if isinstance(arrow, pa.BaseExtensionType):
        return to_parquet(array.storage, nullable=nullable, flags=flags)
    if pa.types.is_int8(arrow):
        return array.cast(target)
    if _is_bare(arrow):
        return pa.array(np.ones(len(array), np.bool_), mask=_missing(array))
    if pa.types.is_timestamp(arrow):
        return array.view(target)
    children = [
        to_parquet(child, nullable=arrow.field(i).nullable, flags=flags) for i, child in enumerate(_children(array))
    ]
    return _rebuild(array, target, children)


def from_parquet(array: pa.Array, target: pa.DataType, *, nullable: bool = False, flags: bool = False) -> pa.Array:
    """Convert a result of `to_parquet` back to the original type."""
    if array.type.equals(target):
        return array
    expected = parquet_type(target, nullable=nullable, flags=flags)
    if not array.type.equals(expected):
        raise FormatError(f"values of {target} must be stored as {expected}, got {array.type}")
    return lay_out(array, target, nullable=nullable, flags=flags)


def lay_out(array: pa.Array, target: pa.DataType, *, nullable: bool = False, flags: bool = False) -> pa.Array:
    """Convert an array from the `parquet_type` of `target` to `target`."""
    if isinstance(target, pa.Bool8Type):
        return pa.ExtensionArray.from_storage(target, array.cast(pa.int8()))
    if isinstance(target, pa.FixedShapeTensorType):
        return _unnest(from_parquet(array, _nested_type(target), nullable=nullable, flags=flags), target)
    if isinstance(target, pa.BaseExtensionType):
        stored = from_parquet(array, target.storage_type, nullable=nullable, flags=flags)
        return pa.ExtensionArray.from_storage(target, stored)
    if pa.types.is_int8(target):
        return array.cast(target)
    if _is_bare(target):
        present = pa.array(~_missing(array)).buffers()[1]
        children = [pa.array([], target.value_type)] if pa.types.is_fixed_size_list(target) else []
        return pa.Array.from_buffers(target, len(array), [present], children=children)
    if pa.types.is_timestamp(target):
        return array.view(target)
    fields = [target.field(i) for i in range(target.num_fields)]
    children = [
        from_parquet(child, field.type, nullable=field.nullable, flags=flags)
        for child, field in zip(_children(array), fields, strict=True)
    ]
    return _rebuild(array, target, children)


def byte_paths(schema: pa.Schema) -> list[str]:
    """List the Parquet paths of columns whose elements are 8-bit integers, such as images.

    Parquet stores integers in at least 32 bits, but the dictionary indices of 8-bit integers occupy at most 8 bits.

    >>> byte_paths(pa.schema({"obs": pa.list_(pa.uint8(), 4), "t": pa.int64()}))
    ['obs.list.element']
    """
    return [path for path, arrow in _numbers(schema) if pa.types.is_uint8(arrow) or pa.types.is_int8(arrow)]


def _numbers(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the Parquet path and element type of each column."""
    for field in schema:
        arrow, path = field.type, field.name
        while pa.types.is_fixed_size_list(arrow) or pa.types.is_large_list(arrow):
            arrow, path = arrow.value_type, f"{path}.list.element"
        yield path, arrow


def _nested_type(tensor: pa.DataType) -> pa.DataType:
    """Convert a tensor type to nested fixed-size lists; a tensor type without elements retains its storage type."""
    shape = tensor.shape
    return tensor.storage_type if 0 in shape else _lists_of(tensor.value_type, shape)


def _lists_of(element: pa.DataType, shape: Sequence[int]) -> pa.DataType:
    for extent in reversed(shape):
        element = pa.list_(pa.field("element", element, nullable=False), extent)
    return element


def _nest(array: pa.Array) -> pa.Array:
    shape, (values,) = array.type.shape, _children(array.storage)
    if 0 in shape:
        return array.storage
    for inner in range(len(shape) - 1, 0, -1):
        arrow = _lists_of(array.type.value_type, shape[inner:])
        values = pa.Array.from_buffers(arrow, len(values) // shape[inner], [None], children=[values])
    return _fixed_lists(values, _nested_type(array.type), array)


def _unnest(array: pa.Array, tensor: pa.DataType) -> pa.Array:
    if 0 in tensor.shape:
        return pa.ExtensionArray.from_storage(tensor, array)
    values = array
    for _ in tensor.shape:
        (values,) = _children(values)
    return pa.ExtensionArray.from_storage(tensor, _fixed_lists(values, tensor.storage_type, array))


def _fixed_lists(values: pa.Array, arrow: pa.DataType, like: pa.Array) -> pa.Array:
    """Create fixed-size lists of values, with nulls at the same positions as in `like`."""
    if like.null_count:
        return pa.FixedSizeListArray.from_arrays(values, type=arrow, mask=pa.array(_missing(like)))
    return pa.Array.from_buffers(arrow, len(like), [None], children=[values])


def _is_bare(arrow: pa.DataType) -> bool:
    """Return whether a type has exactly one value besides null."""
    return bool(
        (pa.types.is_struct(arrow) and arrow.num_fields == 0)
        or (pa.types.is_fixed_size_list(arrow) and arrow.list_size == 0)
    )


def _missing(array: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False))


def _children(array: pa.Array) -> list[pa.Array]:
    if pa.types.is_struct(array.type):
        return [array.field(i) for i in range(array.type.num_fields)]
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return [array.values.slice(array.offset * size, len(array) * size)]
    return [array.values]


def _rebuild(array: pa.Array, target: pa.DataType, children: list[pa.Array]) -> pa.Array:
    """Create an array of type `target` with the nulls and offsets of `array`, and with new child arrays."""
    mask = pa.array(_missing(array)) if array.null_count else None
    if pa.types.is_struct(target):
        return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)
    (values,) = children
    if pa.types.is_fixed_size_list(target):
        if pa.types.is_large_list(array.type):
            values = _pad(array, values, target.list_size)
        return pa.FixedSizeListArray.from_arrays(values, type=target, mask=mask)
    if pa.types.is_fixed_size_list(array.type):
        values, offsets = _pack(array, values)
    else:
        # Offsets are copied, because sliced offsets cannot be combined with a mask.
        offsets = np.array(array.offsets)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=target, mask=mask)


def _pack(array: pa.Array, values: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Remove the values of null lists; return the lists' remaining values and the offsets of all lists."""
    size, present = array.type.list_size, ~_missing(array)
    parts = [
        values.slice(start * size, (stop - start) * size) for start, stop, is_present in _spans(present) if is_present
    ]
    return _join(parts, values.type), np.append(0, np.cumsum(present) * size)


def _pad(array: pa.Array, values: pa.Array, size: int) -> pa.Array:
    """Insert null values for null lists, so that all lists have the same size."""
    offsets, present = np.array(array.offsets), ~_missing(array)
    sizes = np.diff(offsets)[present]
    if (sizes != size).any():
        raise FormatError(f"lists must have size {size}, got {sizes[sizes != size][0]}")
    return _join(
        [
            values.slice(offsets[start], (stop - start) * size)
            if is_present
            else pa.nulls((stop - start) * size, values.type)
            for start, stop, is_present in _spans(present)
        ],
        values.type,
    )


def _spans(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    """Return the start, stop and value of each run of consecutive equal flags."""
    bounds = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)] if len(flags) else [0]
    return [(start, stop, bool(flags[start])) for start, stop in pairwise(bounds)]


def _join(parts: list[pa.Array], arrow: pa.DataType) -> pa.Array:
    return pa.concat_arrays(parts) if parts else pa.array([], arrow)

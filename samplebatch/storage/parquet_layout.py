"""What Arrow holds and Parquet does not, and how it is written instead.

- A dict without keys (Arrow's struct without fields) and a row without elements (a fixed-size list of size 0) have
  nothing but their being there: they are written as bools, all of them true.
- Dates in seconds would be multiplied into milliseconds, and may overflow: they are written as 64-bit integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from samplebatch.errors import FormatError


def stored_field(field: pa.Field) -> pa.Field:
    """Return the field of what `stored` makes; the same one where nothing in it changes."""
    changed = stored_type(field.type)
    return field if changed.equals(field.type) else field.with_type(changed)


def stored_type(arrow: pa.DataType) -> pa.DataType:
    """Return the type that is written in place of one; the same one where Parquet has a place for all of it.

    Examples
    --------
    >>> stored_type(pa.struct({"info": pa.struct([]), "hit": pa.bool_()}))
    StructType(struct<info: bool, hit: bool>)
    """
    if isinstance(arrow, pa.BaseExtensionType):
        storage = arrow.storage_type
        changed = stored_type(storage)
        return arrow if changed.equals(storage) else changed
    if _is_bare(arrow):
        return pa.bool_()
    if pa.types.is_timestamp(arrow) and arrow.unit == "s":
        return pa.int64()
    if pa.types.is_struct(arrow):
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        return pa.struct([stored_field(field) for field in fields])
    if pa.types.is_fixed_size_list(arrow):
        return pa.list_(stored_field(arrow.value_field), arrow.list_size)
    if pa.types.is_large_list(arrow):
        return pa.large_list(stored_field(arrow.value_field))
    return arrow


def stored(array: pa.Array) -> pa.Array:
    """Lay an array out as `stored_type` says; the same array where nothing in it changes."""
    arrow = array.type
    wanted = stored_type(arrow)
    if wanted.equals(arrow):
        return array
    if isinstance(arrow, pa.BaseExtensionType):
        return stored(array.storage)
    if _is_bare(arrow):
        return pa.array(np.ones(len(array), np.bool_), mask=_missing(array))
    if pa.types.is_timestamp(arrow):
        return array.view(wanted)
    return _mapped(array, wanted, [stored(child) for child in _children(array)])


def restored(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Lay an array out as the type says of which `stored` made it.

    Raises
    ------
    FormatError
        If no array of that type was stored like this.
    """
    if array.type.equals(wanted):
        return array
    if not array.type.equals(stored_type(wanted)):
        raise FormatError(f"values of {wanted} must be stored as {stored_type(wanted)}, got {array.type}")
    if isinstance(wanted, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(wanted, restored(array, wanted.storage_type))
    if _is_bare(wanted):
        present = pa.array(~_missing(array)).buffers()[1]
        children = [pa.array([], wanted.value_type)] if pa.types.is_fixed_size_list(wanted) else []
        return pa.Array.from_buffers(wanted, len(array), [present], children=children)
    if pa.types.is_timestamp(wanted):
        return array.view(wanted)
    types = [wanted.field(i).type for i in range(wanted.num_fields)]
    return _mapped(array, wanted, [restored(*pair) for pair in zip(_children(array), types, strict=True)])


def float_paths(schema: pa.Schema) -> list[str]:
    """List the floats of a table by their paths in Parquet: numbers, and rows of numbers.

    Their bytes compress better in one stream for the first byte of each number, one for the second, and so on.

    Examples
    --------
    >>> float_paths(pa.schema({"obs": pa.list_(pa.float32(), 4), "rewards": pa.float64(), "t": pa.int64()}))
    ['obs.list.element', 'rewards']
    """
    paths = []
    for field in schema:
        arrow, path = field.type, field.name
        if isinstance(arrow, pa.BaseExtensionType):
            arrow = arrow.storage_type
        if pa.types.is_fixed_size_list(arrow):
            arrow, path = arrow.value_type, f"{path}.list.element"
        if pa.types.is_float32(arrow) or pa.types.is_float64(arrow):
            paths.append(path)
    return paths


def _is_bare(arrow: pa.DataType) -> bool:
    """Tell whether values of a type are there or not there, and have nothing else to say."""
    return bool(
        (pa.types.is_struct(arrow) and arrow.num_fields == 0)
        or (pa.types.is_fixed_size_list(arrow) and arrow.list_size == 0)
    )


def _missing(array: pa.Array) -> np.ndarray[Any, Any]:
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False))


def _children(array: pa.Array) -> list[pa.Array]:
    """Return what a struct's or list's values consist of, without what lies outside of the array's own rows."""
    if pa.types.is_struct(array.type):
        return [array.field(i) for i in range(array.type.num_fields)]
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return [array.values.slice(array.offset * size, len(array) * size)]
    return [array.values]


def _mapped(array: pa.Array, wanted: pa.DataType, children: list[pa.Array]) -> pa.Array:
    """Make an array of the type with the array's rows and other children."""
    mask = pa.array(_missing(array)) if array.null_count else None
    if pa.types.is_struct(wanted):
        return pa.StructArray.from_arrays(children, fields=list(wanted), mask=mask)
    if pa.types.is_fixed_size_list(wanted):
        return pa.FixedSizeListArray.from_arrays(children[0], type=wanted, mask=mask)
    # Fresh offsets: those of a slice go with no mask.
    offsets = pa.array(np.array(array.offsets))
    return pa.LargeListArray.from_arrays(offsets, children[0], type=wanted, mask=mask)

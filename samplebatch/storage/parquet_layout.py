"""Arrow types that Parquet lacks, and the types that they are written as.

- A dict without keys (Arrow's struct without fields) and a row without elements (a fixed-size list of size 0) have
  nothing but their being there: they are written as bools, all of them true.
- Dates in seconds would be multiplied into milliseconds, and may overflow: they are written as 64-bit integers.
- Fixed-size lists among which there may be nulls cannot be read by pyarrow before 19: they are written as lists of any
  size. Parquet's own layout of the two is the same.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.errors import FormatError


def parquet_field(field: pa.Field) -> pa.Field:
    """Return the field of an array that `to_parquet` returns; the same one where nothing in it changes."""
    changed = parquet_type(field.type, nullable=field.nullable)
    return field if changed.equals(field.type) else field.with_type(changed)


def parquet_type(arrow: pa.DataType, *, nullable: bool = False) -> pa.DataType:
    """Return the type that is written in place of one; the same one where Parquet has a place for all of it.

    Examples
    --------
    >>> parquet_type(pa.struct({"info": pa.struct([]), "hit": pa.bool_()}))
    StructType(struct<info: bool, hit: bool>)
    """
    if isinstance(arrow, pa.BaseExtensionType):
        storage = arrow.storage_type
        changed = parquet_type(storage, nullable=nullable)
        return arrow if changed.equals(storage) else changed
    if _is_bare(arrow):
        return pa.bool_()
    if pa.types.is_timestamp(arrow) and arrow.unit == "s":
        return pa.int64()
    if pa.types.is_struct(arrow):
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        return pa.struct([parquet_field(field) for field in fields])
    if pa.types.is_fixed_size_list(arrow):
        field = parquet_field(arrow.value_field)
        return pa.large_list(field) if nullable else pa.list_(field, arrow.list_size)
    if pa.types.is_large_list(arrow):
        return pa.large_list(parquet_field(arrow.value_field))
    return arrow


def to_parquet(array: pa.Array, *, nullable: bool = False) -> pa.Array:
    """Convert an array to its `parquet_type`; the same array where nothing in it changes."""
    arrow = array.type
    wanted = parquet_type(arrow, nullable=nullable)
    if wanted.equals(arrow):
        return array
    if isinstance(arrow, pa.BaseExtensionType):
        return to_parquet(array.storage, nullable=nullable)
    if _is_bare(arrow):
        return pa.array(np.ones(len(array), np.bool_), mask=_missing(array))
    if pa.types.is_timestamp(arrow):
        return array.view(wanted)
    children = [to_parquet(child, nullable=arrow.field(i).nullable) for i, child in enumerate(_children(array))]
    return _rebuild(array, wanted, children)


def from_parquet(array: pa.Array, wanted: pa.DataType, *, nullable: bool = False) -> pa.Array:
    """Lay an array out as the type says of which `to_parquet` made it.

    Raises
    ------
    FormatError
        If no array of that type was stored like this.
    """
    if array.type.equals(wanted):
        return array
    expected = parquet_type(wanted, nullable=nullable)
    if not array.type.equals(expected):
        raise FormatError(f"values of {wanted} must be stored as {expected}, got {array.type}")
    if isinstance(wanted, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(wanted, from_parquet(array, wanted.storage_type, nullable=nullable))
    if _is_bare(wanted):
        present = pa.array(~_missing(array)).buffers()[1]
        children = [pa.array([], wanted.value_type)] if pa.types.is_fixed_size_list(wanted) else []
        return pa.Array.from_buffers(wanted, len(array), [present], children=children)
    if pa.types.is_timestamp(wanted):
        return array.view(wanted)
    fields = [wanted.field(i) for i in range(wanted.num_fields)]
    children = [
        from_parquet(child, field.type, nullable=field.nullable)
        for child, field in zip(_children(array), fields, strict=True)
    ]
    return _rebuild(array, wanted, children)


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
        if pa.types.is_fixed_size_list(arrow) or pa.types.is_large_list(arrow):
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


def _missing(array: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False))


def _children(array: pa.Array) -> list[pa.Array]:
    """Return the children of a struct or list array, cut to the array's own rows."""
    if pa.types.is_struct(array.type):
        return [array.field(i) for i in range(array.type.num_fields)]
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return [array.values.slice(array.offset * size, len(array) * size)]
    return [array.values]


def _rebuild(array: pa.Array, wanted: pa.DataType, children: list[pa.Array]) -> pa.Array:
    """Make an array of the type with the array's rows and other children."""
    mask = pa.array(_missing(array)) if array.null_count else None
    if pa.types.is_struct(wanted):
        return pa.StructArray.from_arrays(children, fields=list(wanted), mask=mask)
    (values,) = children
    if pa.types.is_fixed_size_list(wanted):
        if pa.types.is_large_list(array.type):
            values = _pad(array, values, wanted.list_size)
        return pa.FixedSizeListArray.from_arrays(values, type=wanted, mask=mask)
    if pa.types.is_fixed_size_list(array.type):
        values, offsets = _pack(array, values)
    else:
        # Fresh offsets: those of a slice go with no mask.
        offsets = np.array(array.offsets)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=wanted, mask=mask)


def _pack(array: pa.Array, values: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Leave out the values of lists that are not there, and return the others with the offsets of all lists."""
    size, present = array.type.list_size, ~_missing(array)
    parts = [values.slice(start * size, (stop - start) * size) for start, stop, there in _spans(present) if there]
    return _join(parts, values.type), np.append(0, np.cumsum(present) * size)


def _pad(array: pa.Array, values: pa.Array, size: int) -> pa.Array:
    """Put nulls in the place of lists that are not there, for all lists to be of one size."""
    offsets, present = np.array(array.offsets), ~_missing(array)
    if (np.diff(offsets)[present] != size).any():
        raise FormatError(f"lists of size {size} must have that size, and not all of them have")
    return _join(
        [
            values.slice(offsets[start], (stop - start) * size)
            if there
            else pa.nulls((stop - start) * size, values.type)
            for start, stop, there in _spans(present)
        ],
        values.type,
    )


def _spans(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    """Cut flags into ranges of equal ones."""
    bounds = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)] if len(flags) else [0]
    return [(start, stop, bool(flags[start])) for start, stop in pairwise(bounds)]


def _join(parts: list[pa.Array], arrow: pa.DataType) -> pa.Array:
    return pa.concat_arrays(parts) if parts else pa.array([], arrow)

"""Encoding of Python objects in Arrow: structs, lists and numbers if all rows have one form, else pickled rows.

`encode` infers the form and builds the array in one pass. The form, a tree of `Node`, is stored as JSON beside the
array. It records what the Arrow type does not: tuples, `np.int64` integers, and nulls that represent missing keys.
Hence `decode` restores every object exactly, and other tools can read the fields.

If two rows differ in form (a key with an int in one and a string in the other, a key that is missing in one row and
None in another, keys in contradicting orders), no Arrow type distinguishes the rows, and they are pickled.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, chain, pairwise
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import named_dtype, storage_of
from samplebatch.column.unpickling import unpickle
from samplebatch.column.varying_rows import arrow_elements
from samplebatch.errors import ColumnTypeError, FormatError, SampleBatchError, UntrustedPickleError

_MAX_DEPTH = 32
_MAX_FIELDS = 256
_MAX_KEY_SETS = 64
_MAX_RECORD = 64

PLAIN: dict[type, tuple[str, pa.DataType]] = {
    bool: ("bool", pa.bool_()),
    int: ("int", pa.int64()),
    float: ("float", pa.float64()),
    str: ("str", pa.large_string()),
    bytes: ("bytes", pa.large_binary()),
    np.str_: ("np.str", pa.large_string()),
    np.bytes_: ("np.bytes", pa.large_binary()),
}
"""Scalars stored by type: name of the node kind, and Arrow type."""


@dataclass(frozen=True, slots=True)
class Node:
    """Form of all values at one position of the tree.

    Attributes
    ----------
    kind
        `none` (only None), a name in `PLAIN`, `scalar` (NumPy's), `dict`, `list` or `tuple` (of any length, elements of
        one form), `list_of` or `tuple_of` (of one length, one form per position), `array` (of one shape), `ragged`
        (arrays of varying shape), `pickle`, or `string` (NumPy strings of earlier versions).
    nullable
        Whether nulls represent None.
    dtype, shape
        Dtype and shape of NumPy scalars and arrays; for `ragged`, only the number of dimensions matters.
    names, optional
        Keys of a dict in order, and for each whether a null represents its absence.
    children
        Forms of nested values.
    """

    kind: str
    nullable: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    optional: tuple[bool, ...] = ()
    children: tuple[Node, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return the form as a dict for JSON, without empty fields."""
        fields = {name: getattr(self, name) for name in ("kind", "nullable", "dtype", "shape", "names", "optional")}
        fields["children"] = [child.plain() for child in self.children]
        return {name: value for name, value in fields.items() if value}


class _NotUniform(Exception):
    """The values have no single form that Arrow supports."""


def encode(values: npt.NDArray[Any]) -> tuple[pa.Array, str]:
    """Encode objects as an Arrow array and the JSON form that `decode` requires.

    Raises ColumnTypeError if the objects have no common form, and an object cannot be pickled.

    Parameters
    ----------
    values
        Objects, shape (n,).

    Examples
    --------
    >>> infos = np.array([{"reward": 1.0}, {}, None], object)
    >>> array, form = encode(infos)
    >>> array.type, array.to_pylist()
    (StructType(struct<reward: double>), [{'reward': 1.0}, {'reward': None}, None])
    """
    rows = values.tolist()
    try:
        node, array = _encode(rows, 0)
    except _NotUniform:
        node, array = _encode_pickles(rows)
    return array, json.dumps(node.plain(), separators=(",", ":"))


def _encode(values: list[Any], depth: int) -> tuple[Node, pa.Array]:
    types = set(map(type, values))
    if NoneType not in types:
        return _encode_type(types, values, depth)
    if len(types) == 1:
        return Node("none", nullable=True), pa.nulls(len(values))
    node, array = _encode_type(types - {NoneType}, [value for value in values if value is not None], depth)
    return replace(node, nullable=True), _expand(array, [value is not None for value in values])


def _encode_type(types: set[type], values: list[Any], depth: int) -> tuple[Node, pa.Array]:
    if not types:
        return Node("none"), pa.nulls(0)
    if len(types) > 1 or depth > _MAX_DEPTH:
        raise _NotUniform
    (only,) = types
    if only is dict:
        return _encode_dicts(values, depth)
    if only is list or only is tuple:
        return _encode_sequences(only.__name__, values, depth)
    if only is np.ndarray:
        return _encode_arrays(values)
    plain = PLAIN.get(only)
    if plain is None:
        if issubclass(only, np.generic):
            return _encode_scalars(only, values)
        raise _NotUniform
    kind, arrow = plain
    try:
        return Node(kind), pa.array(values, arrow)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise _NotUniform from error


def _encode_dicts(values: list[dict[Any, Any]], depth: int) -> tuple[Node, pa.Array]:
    if not any(values):
        return Node("dict"), pa.Array.from_buffers(pa.struct([]), len(values), [None])
    # Types first: keys of other types may equal strings.
    if set(map(type, chain.from_iterable(values))) != {str}:
        raise _NotUniform
    names = _merge(dict.fromkeys(map(tuple, values)))
    children = []
    arrays = []
    optional = []
    for name in names:
        try:
            values_of_name = list(map(itemgetter(name), values))
        except KeyError:
            values_of_name = [value[name] for value in values if name in value]
        node, array = _encode(values_of_name, depth + 1)
        absent = len(values_of_name) < len(values)
        if absent:
            if node.nullable:
                raise _NotUniform
            array = _expand(array, [name in value for value in values])
        children.append(node)
        arrays.append(array)
        optional.append(absent)
    node = Node("dict", names=names, optional=tuple(optional), children=tuple(children))
    return node, pa.StructArray.from_arrays(arrays, names)


def _merge(key_sets: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return an order of all keys that is consistent with every dict."""
    key_sets = list(key_sets)
    if len(key_sets) > _MAX_KEY_SETS:
        raise _NotUniform
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for keys in key_sets:
        for name in keys:
            sorter.add(name)
        for before, after in pairwise(keys):
            sorter.add(after, before)
    try:
        names = tuple(sorter.static_order())
        for name in names:
            name.encode()
    except (CycleError, UnicodeError) as error:
        raise _NotUniform from error
    if len(names) > _MAX_FIELDS or any("\0" in name for name in names):
        # Names are passed as C strings to other libraries.
        raise _NotUniform
    return names


def _encode_sequences(kind: str, values: list[Any], depth: int) -> tuple[Node, pa.Array]:
    flat = list(chain.from_iterable(values))
    lengths = list(map(len, values))
    types = set(map(type, flat)) - {NoneType}
    if len(types) > 1:
        if len(set(lengths)) > 1 or lengths[0] > _MAX_RECORD:
            raise _NotUniform
        children, arrays = zip(*(_encode(list(place), depth + 1) for place in zip(*values, strict=True)), strict=True)
        return Node(f"{kind}_of", children=children), pa.StructArray.from_arrays(
            arrays, list(map(str, range(lengths[0])))
        )
    node, elements = _encode(flat, depth + 1)
    offsets = pa.array([0, *accumulate(lengths)], pa.int64())
    return Node(kind, children=(node,)), pa.LargeListArray.from_arrays(offsets, elements)


def _encode_arrays(values: list[npt.NDArray[Any]]) -> tuple[Node, pa.Array]:
    dtypes = set(map(attrgetter("dtype"), values))
    shapes = set(map(attrgetter("shape"), values))
    dtype = dtypes.pop()
    if dtypes or not _storable(dtype):
        raise _NotUniform
    shape = shapes.pop()
    if shapes or 0 in shape:
        if any(len(other) != len(shape) for other in shapes):
            raise _NotUniform
        return Node("ragged", dtype=dtype.str, shape=(0,) * len(shape)), RaggedColumn.from_rows(values, "").to_arrow()
    elements = np.array(values, dtype).reshape(-1)
    if shape and dtype.kind == "c":
        # One list of twice the length: pyarrow's `take` misreads fixed-size lists within fixed-size lists (as of 26.0).
        elements = elements.view(f"f{dtype.itemsize // 2}")
    array = arrow_elements(elements)
    if shape:
        size = len(array) // len(values)
        array = pa.Array.from_buffers(pa.list_(array.type, size), len(values), [None], children=[array])
    return Node("array", dtype=dtype.str, shape=shape), array


def _encode_scalars(only: type, values: list[Any]) -> tuple[Node, pa.Array]:
    dtypes = set(map(attrgetter("dtype"), values))
    dtype = dtypes.pop()
    # np.longlong and similar types share their dtype's name with another type, which decoding would return.
    if dtypes or not _storable(dtype) or np.dtype(dtype.str).type is not only:
        raise _NotUniform
    array = np.array(values, dtype)
    return Node("scalar", dtype=dtype.str), pa.array(array) if dtype.kind == "b" else arrow_elements(array)


def _storable(dtype: np.dtype[Any]) -> bool:
    if not dtype.isnative or not dtype.itemsize or dtype.kind not in "biufcSUmM":
        return False
    try:
        storage_of(dtype)
    except ColumnTypeError:
        return False
    return True


def _encode_pickles(rows: list[Any]) -> tuple[Node, pa.Array]:
    pickles: list[bytes | None] = []
    for i, row in enumerate(rows):
        try:
            pickles.append(None if row is None else pickle.dumps(row, 5))
        except Exception as error:
            raise ColumnTypeError(
                f"objects must be picklable to be written, got a {type(row).__name__} in row {i}: {error}"
            ) from error
    return Node("pickle", nullable=None in pickles), pa.array(pickles, pa.large_binary())


def _expand(array: pa.Array, present: list[bool]) -> pa.Array:
    """Insert nulls into an array at positions where `present` is false."""
    is_present = np.array(present)
    return array.take(pa.array(np.cumsum(is_present) - 1, mask=~is_present))


_ARROW_TYPES = dict(PLAIN.values())
_ABSENT: Any = object()
_REFUSED: Any = object()


def decode(array: pa.Array, form: str | bytes, name: str, *, allow_pickle: bool = False) -> npt.NDArray[Any]:
    """Decode objects encoded by `encode`.

    Raises FormatError if the form is invalid, or does not match the array. Raises UntrustedPickleError if any value is
    pickled, at any depth, and `allow_pickle` is false; names the column.

    Parameters
    ----------
    array
        The array. Equivalent types, as written by other tools, are cast.
    form
        JSON form from `encode`.
    name
        The column's name, for errors.
    allow_pickle
        Whether to unpickle rows and nested values, which can execute code of their writer.

    Returns
    -------
    Objects, or variable-width strings, shape (n,).

    Examples
    --------
    >>> decode(pa.array([[1, 2], [3]]), '{"kind":"tuple","children":[{"kind":"int"}]}', "a")
    array([(1, 2), (3,)], dtype=object)
    """
    node = _read(form, name)
    try:
        array.validate(full=True)
        values = _Decoder(name, allow_pickle=allow_pickle).decode(node, array, _REFUSED)
        if node.kind == "string":
            return np.array(values, _string_dtype(node.dtype))
        return np.fromiter(values, object, len(array))
    except (FormatError, UntrustedPickleError):
        raise
    except (pa.ArrowException, SampleBatchError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(
            f"column {name!r} must have an Arrow array that fits the form of its objects, got {array.type}: {error}"
        ) from error


def _read(form: str | bytes, name: str) -> Node:
    try:
        return _node(json.loads(form))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"column {name!r} must describe the form of its objects: {error}") from error


def _node(plain: dict[str, Any]) -> Node:
    node = Node(
        str(plain["kind"]),
        bool(plain.get("nullable", False)),
        str(plain.get("dtype", "")),
        tuple(map(int, plain.get("shape", ()))),
        tuple(map(str, plain.get("names", ()))),
        tuple(map(bool, plain.get("optional", ()))),
        tuple(map(_node, plain.get("children", ()))),
    )
    if node.kind == "dict" and not len(node.names) == len(node.optional) == len(node.children):
        raise ValueError("a dict must have as many names as children")
    return node


class _Decoder:
    """Decoder of one column's values, which applies the permission to unpickle at every depth."""

    def __init__(self, name: str, *, allow_pickle: bool = False) -> None:
        self._name = name
        self._allow_pickle = allow_pickle

    def decode(self, node: Node, array: pa.Array, null: Any) -> list[Any]:
        """Decode values; nulls that do not represent None become `null`."""
        if node.kind == "none":
            if array.null_count != len(array):
                raise ValueError("values of kind 'none' must be null")
            return [None] * len(array)
        if not array.null_count:
            return self._decode_present(node, array)
        if node.nullable:
            null = np.nan if node.dtype == "nan" else None
        elif null is _REFUSED:
            raise ValueError(f"values of kind {node.kind!r} must not be null")
        present = iter(self._decode_present(node, array.drop_null()))
        return [next(present) if valid else null for valid in array.is_valid().to_pylist()]

    def _decode_present(self, node: Node, array: pa.Array) -> list[Any]:
        kind = node.kind
        if kind in _ARROW_TYPES:
            return _decode_plain(kind, array)
        if kind == "string":
            return _decode_plain("str", array)
        if kind == "dict":
            return self._decode_dicts(node, array)
        if kind in ("list", "tuple"):
            return self._decode_sequences(node, array)
        if kind in ("list_of", "tuple_of"):
            return self._decode_places(node, array)
        if kind in ("scalar", "array"):
            return _decode_arrays(node, array, self._name)
        if kind == "ragged":
            _expect(RaggedColumn.reads(array.type), "lists of its elements")
            return list(RaggedColumn.from_arrow(array, node.dtype, self._name).copy())
        if kind == "pickle":
            pickles = _decode_plain("bytes", array)
            return unpickle(pickles, f"column {self._name!r}", allow_pickle=self._allow_pickle)
        raise ValueError(f"unknown kind {kind!r}")

    def _decode_dicts(self, node: Node, array: pa.Array) -> list[dict[str, Any]]:
        _expect(pa.types.is_struct(array.type), "a struct")
        _expect([field.name for field in array.type] == list(node.names), "a field for each key")
        if not node.names:
            return [{} for _ in range(len(array))]
        fields = [
            self.decode(child, array.field(i), _ABSENT if optional else _REFUSED)
            for i, (child, optional) in enumerate(zip(node.children, node.optional, strict=True))
        ]
        names = node.names
        rows = zip(*fields, strict=True)
        if not any(node.optional):
            return [dict(zip(names, row, strict=True)) for row in rows]
        return [{name: value for name, value in zip(names, row, strict=True) if value is not _ABSENT} for row in rows]

    def _decode_places(self, node: Node, array: pa.Array) -> list[Any]:
        has_fields = pa.types.is_struct(array.type) and array.type.num_fields == len(node.children)
        _expect(has_fields, "a struct with one field per position")
        fields = [self.decode(child, array.field(i), _REFUSED) for i, child in enumerate(node.children)]
        rows = zip(*fields, strict=True)
        return list(rows) if node.kind == "tuple_of" else list(map(list, rows))

    def _decode_sequences(self, node: Node, array: pa.Array) -> list[Any]:
        _expect(pa.types.is_large_list(array.type) or pa.types.is_list(array.type), "lists")
        (child,) = node.children
        flat = self.decode(child, array.flatten(), _REFUSED)
        offsets = array.offsets.to_numpy()
        cuts = pairwise((offsets - offsets[0]).tolist())
        if node.kind == "tuple":
            return [tuple(flat[start:stop]) for start, stop in cuts]
        return [flat[start:stop] for start, stop in cuts]


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"the form requires {what}")


def _decode_plain(kind: str, array: pa.Array) -> list[Any]:
    arrow = _ARROW_TYPES[kind]
    if array.type != arrow:
        # Strings and bytes have several layouts, which other tools may use.
        _expect(str(array.type).removesuffix("_view") == str(arrow).removeprefix("large_"), str(arrow))
        array = array.cast(arrow)
    if kind in ("int", "float"):
        numbers: list[Any] = array.to_numpy().tolist()
        return numbers
    values: list[Any] = array.to_pylist()
    if kind == "np.str":
        return list(map(np.str_, values))
    return list(map(np.bytes_, values)) if kind == "np.bytes" else values


def _decode_arrays(node: Node, array: pa.Array, name: str) -> list[Any]:
    dtype = named_dtype(node.dtype)
    if dtype.kind == "b" and pa.types.is_boolean(array.type):
        return list(array.to_numpy(zero_copy_only=False))
    n = len(array)
    if node.shape:
        _expect(pa.types.is_fixed_size_list(array.type), "lists of one length")
        array = array.flatten()
    halves = dtype.kind == "c" and bool(node.shape)
    values = TensorColumn.from_arrow(array, f"<f{dtype.itemsize // 2}" if halves else node.dtype, name).values
    # A copy, because the source may be read-only and the rows belong to the user.
    rows = np.array(values).view(dtype).reshape(n, *node.shape)
    if node.kind == "array" and not node.shape:
        return [rows[i : i + 1].reshape(()) for i in range(n)]
    return list(rows)


def _string_dtype(missing: str) -> Any:
    if not missing:
        return np.dtypes.StringDType()
    return np.dtypes.StringDType(na_object={"None": None, "nan": np.nan}[missing])

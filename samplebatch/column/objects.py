"""ObjectColumn: one Python object per row, such as the infos of an environment."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, chain, pairwise, repeat
from operator import attrgetter, itemgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column.arrow_bodies import decompressed_stream_nbytes
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.memory import MemoryBound
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.types import named_dtype, storage_of
from samplebatch.column.unpickling import unpickle
from samplebatch.column.varying_rows import arrow_elements, arrow_offsets
from samplebatch.errors import ColumnTypeError, FormatError, SampleBatchError, UntrustedPickleError

if TYPE_CHECKING:
    import torch


FORM_KEY = b"samplebatch.objects"
"""Metadata key of the objects' form, which the Arrow type represents only partially."""

_OBJECT = np.dtype(object)
_BARE_FORM = '{"kind":"dict"}'
_BARE_NBYTES = sys.getsizeof({})
_IMMUTABLE = frozenset((NoneType, bool, int, float, complex, str, bytes))


class ObjectColumn(Column):
    """Column with one Python object of any type per row, such as a dict, a string or None.

    In Arrow, objects with a common form are stored as structs, lists and numbers, and other objects are stored as
    pickles; all objects are restored exactly. Objects are mutable, so encoded arrays are not cached. One call of
    `encode` therefore returns both the Arrow array and the metadata.

    Parameters
    ----------
    values
        Array of objects, shape (n,), stored without a copy.

    Examples
    --------
    >>> column = ObjectColumn.from_rows([{"lives": 3}, {}, {"lives": 2}])
    >>> column.to_arrow().to_pylist()
    [{'lives': 3}, {'lives': None}, {'lives': 2}]
    >>> column.take(np.array([1, 2])).values
    array([{}, {'lives': 2}], dtype=object)
    """

    __slots__ = ("_length", "_values")
    kind: ClassVar[str] = "object"

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._values: npt.NDArray[Any] | None = values
        self._length = len(values)

    @classmethod
    def empty_dicts(cls, rows: int) -> ObjectColumn:
        """Return a column of empty dicts that are created on first access.

        >>> column = ObjectColumn.empty_dicts(2)
        >>> column.is_bare, column.values, column.is_bare
        (True, array([{}, {}], dtype=object), False)
        """
        column = cls.__new__(cls)
        column._values, column._length = None, rows
        return column

    @property
    def values(self) -> npt.NDArray[Any]:
        values = self._values
        if values is None:
            # The fastest way to create many dicts.
            values = self._values = np.fromiter(map(dict.copy, repeat({}, self._length)), object, self._length)
        return values

    @property
    def is_bare(self) -> bool:
        """Whether all rows are empty dicts that have not been created yet."""
        return self._values is None

    @classmethod
    def from_rows(cls, rows: Sequence[Any]) -> ObjectColumn:
        """Create a column with one object per row; a row that is a sequence or an array is stored as one object."""
        return cls(np.fromiter(rows, object, len(rows)))

    @classmethod
    def from_array(cls, values: npt.NDArray[Any], name: str) -> ObjectColumn:
        """Store an array of objects.

        Raises ColumnTypeError if the array has several dimensions, or its dtype is not object.
        """
        if values.dtype.kind != "O":
            raise ColumnTypeError(f"column {name!r} must have objects, got {values.dtype}")
        if values.ndim != 1:
            raise ColumnTypeError(
                f"column {name!r} must have one object per row, got an object array of shape {values.shape}; "
                "convert it to numbers, or convert each row to a list"
            )
        return cls(np.asarray(values))

    def __len__(self) -> int:
        return self._length

    @property
    def dtype(self) -> np.dtype[Any]:
        return _OBJECT

    @property
    def row_shape(self) -> tuple[()]:
        return ()

    @property
    def nbytes(self) -> int:
        """Total shallow size of the objects according to `sys.getsizeof`."""
        return self._length * _BARE_NBYTES if self._values is None else sum(map(sys.getsizeof, self.values.tolist()))

    def slice(self, start: int, stop: int) -> Self:
        return type(self)(self.values[start:stop])

    def take(self, indices: Indices) -> ObjectColumn:
        return ObjectColumn(self.values[indices])

    def copy(self) -> ObjectColumn:
        """Deep-copy the objects."""
        if self.is_bare:
            return self.empty_dicts(self._length)
        values = self.values
        rows = values.tolist()
        types = set(map(type, rows))
        if types <= _IMMUTABLE:
            return type(self)(values.copy())
        if types <= {dict, NoneType} and not any(rows):
            return type(self)(np.fromiter((None if row is None else {} for row in rows), object, len(rows)))
        return type(self)(copy.deepcopy(values))

    def spread(self, length: int, positions: Indices) -> ObjectColumn:
        """Return a column of `length` rows with these rows at `positions`, and None in all other rows."""
        out = np.full(length, None, object)
        out[positions] = self.values
        return ObjectColumn(out)

    @classmethod
    def concat(cls, columns: Sequence[ObjectColumn], name: str) -> ObjectColumn:
        if all(column.is_bare for column in columns):
            return cls.empty_dicts(sum(map(len, columns)))
        return ObjectColumn(np.concatenate([column.values for column in columns]))

    def equals(self, other: Column) -> bool:
        if not isinstance(other, ObjectColumn) or len(self) != len(other):
            return False
        return all(map(_same, self.values.tolist(), other.values.tolist()))

    def to_numpy(self) -> npt.NDArray[Any]:
        return self.values

    def to_torch(self) -> torch.Tensor:
        raise ColumnTypeError("torch has no tensor of Python objects")

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        """Encode objects with a common form as structs and lists, and other objects as pickles.

        Raises ColumnTypeError if the objects have no common form and an object cannot be pickled.
        """
        array, form = encode(self.values)
        return array, {FORM_KEY: form.encode()}

    @staticmethod
    def reads(arrow: pa.DataType, metadata: Mapping[bytes, bytes]) -> bool:
        """Return whether an Arrow type is read as objects: metadata requires it, or no other column supports the type.

        >>> ObjectColumn.reads(pa.list_(pa.string()), {}), ObjectColumn.reads(pa.int64(), {})
        (True, False)
        """
        if FORM_KEY in metadata:
            return True
        if RaggedColumn.reads(arrow) or TextColumn.reads(arrow, metadata) or isinstance(arrow, pa.BaseExtensionType):
            return False
        while pa.types.is_fixed_size_list(arrow):
            arrow = arrow.value_type
        number = pa.types.is_primitive(arrow) or pa.types.is_decimal(arrow)
        return not (number or pa.types.is_fixed_size_binary(arrow))

    @classmethod
    def from_arrow(
        cls, array: pa.Array, metadata: Mapping[bytes, bytes], name: str, *, allow_pickle: bool = False
    ) -> ObjectColumn | TextColumn:
        """Decode an Arrow array: exactly if `encode` created the array, otherwise with pyarrow's `to_pylist`.

        Strings of `StringDType` that earlier versions wrote as objects become a text column. Raises FormatError if
        metadata and array do not match, UntrustedPickleError if objects are pickled and `allow_pickle` is false.
        """
        form = metadata.get(FORM_KEY)
        if form is None:
            return cls.from_rows(array.to_pylist())
        return cls._of_decoded(decode(array, form, name, allow_pickle=allow_pickle), name)

    @classmethod
    def _of_decoded(cls, values: npt.NDArray[Any], name: str) -> ObjectColumn | TextColumn:
        text = TextColumn.from_array(values, name) if values.dtype.kind == "T" else None
        return cls(values) if text is None else text

    def dump(self) -> tuple[Header, list[Any]]:
        if self.is_bare:
            return (self.kind, self._length, _BARE_FORM, False), []
        array, form = encode(self.values)
        nulls = pa.types.is_null(array.type)
        if nulls or (array.type == pa.struct([]) and not array.null_count):
            # Only None, or only {}: no bytes are needed.
            return (self.kind, len(array), form, nulls), []
        batch = pa.record_batch([array], ["values"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return (self.kind, len(array), form, False), [sink.getvalue()]

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> ObjectColumn | TextColumn:
        array, form = _dumped(header, buffers)
        if form == _BARE_FORM and not buffers:
            return cls.empty_dicts(len(array))
        return cls._of_decoded(decode(array, form, "objects", allow_pickle=allow_pickle), "objects")

    @staticmethod
    def check_dumped(header: Header, buffers: Sequence[Any], name: str, bound: MemoryBound) -> None:
        """Subtract from `bound` the memory that `load` would allocate, without decoding the objects.

        Raises CapacityError if the limit is exceeded, FormatError if header and buffers do not match, or the buffers
        are compressed; `dump` never compresses buffers.
        """
        for buffer in buffers:
            if decompressed_stream_nbytes(pa.py_buffer(buffer)):
                raise FormatError(f"column {name!r} must have uncompressed objects, got compressed ones")
        array, _ = _dumped(header, buffers)
        bound.take(object_nbytes(array), f"column {name!r}")


def _dumped(header: Header, buffers: Sequence[Any]) -> tuple[pa.Array, Any]:
    """View the output of `ObjectColumn.dump` as an Arrow array and the objects' form."""
    try:
        _, length, form, nulls = header
        if not buffers:
            array = pa.nulls(length) if nulls else pa.Array.from_buffers(pa.struct([]), length, [None])
        else:
            (buffer,) = buffers
            array = pa.ipc.open_stream(pa.py_buffer(buffer)).read_next_batch().column(0)
        array.validate()
    except (pa.ArrowException, OSError, StopIteration, TypeError, ValueError, OverflowError, IndexError) as error:
        raise FormatError(f"a column of objects must have a header that fits its buffers: {error}") from error
    if len(array) != length:
        raise FormatError(f"a column of objects must have the {length} rows of its header, got {len(array)}")
    return array, form


def _same(a: Any, b: Any) -> bool:
    """Return whether two objects have equal types and contents; NaN equals NaN, and dict order is ignored."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype.kind == "O":
            return all(map(_same, a.ravel().tolist(), b.ravel().tolist()))
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")
    try:
        is_equal = a == b
        if not isinstance(is_equal, bool | np.bool_):
            # Arrays of other libraries compare element by element.
            is_equal = is_equal.all()
        return bool(is_equal) or bool(a != a and b != b)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False


_LEAF_NBYTES, _NODE_NBYTES = 64, 128
"""Bytes of a number or an empty string with its place in a list, and of an empty dict, list or array with its place."""

_VIEWS = (pa.string_view().id, pa.binary_view().id)
_TEXTS = (pa.string().id, pa.binary().id)
_LARGE_TEXTS = (pa.large_string().id, pa.large_binary().id)
_LIST_VIEWS = (pa.list_view(pa.null()).id, pa.large_list_view(pa.null()).id)


def object_nbytes(array: pa.Array) -> int:
    """Estimate the size in bytes of the objects that an array decodes to.

    The estimate includes objects without their own bytes in Arrow: nulls, empty structs and shared values. The caller
    must have validated the buffer sizes, for example with `Array.validate`.

    >>> object_nbytes(pa.nulls(1000)), object_nbytes(pa.array(["abc"] * 10).dictionary_encode())
    (64000, 670)
    """
    arrow, n = array.type, len(array)
    if isinstance(arrow, pa.BaseExtensionType):
        return object_nbytes(array.storage)
    if arrow.id in _TEXTS:
        return n * _LEAF_NBYTES + _span(array, np.int32)
    if arrow.id in _LARGE_TEXTS:
        return n * _LEAF_NBYTES + _span(array, np.int64)
    if arrow.id in _VIEWS:
        return n * _LEAF_NBYTES + int(np.maximum(_view_lengths(array), 0).sum(dtype=np.int64))
    if pa.types.is_dictionary(arrow):
        return n * _largest(array.dictionary)
    if pa.types.is_run_end_encoded(arrow):
        return n * _largest(array.values)
    if arrow.id in _LIST_VIEWS:
        return n * _NODE_NBYTES + _repeated(array)
    if pa.types.is_struct(arrow):
        return n * _NODE_NBYTES + sum(object_nbytes(array.field(i)) for i in range(arrow.num_fields))
    if pa.types.is_fixed_size_list(arrow):
        values = array.values.slice(array.offset * arrow.list_size, n * arrow.list_size)
        return n * _NODE_NBYTES + object_nbytes(values)
    if pa.types.is_list(arrow) or pa.types.is_map(arrow):
        return n * _NODE_NBYTES + _listed(array, np.int32)
    if pa.types.is_large_list(arrow):
        return n * _NODE_NBYTES + _listed(array, np.int64)
    if pa.types.is_union(arrow):
        return n * sum(_NODE_NBYTES + _largest(array.field(i)) for i in range(arrow.num_fields))
    return n * (_LEAF_NBYTES + (arrow.byte_width if pa.types.is_fixed_size_binary(arrow) else 0))


def value_nbytes(value: Any) -> int:
    """Estimate the size of a Python object in a message: 8 bytes per value, plus sizes of strings, arrays and keys.

    >>> value_nbytes({"text": ["abc", "de"], "array": np.zeros(4)}), value_nbytes(None)
    (86, 8)
    """
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        total += 8
        if isinstance(item, str):
            # Without encoding it: each character has 1 to 4 bytes in UTF-8.
            total += len(item) if item.isascii() else 4 * len(item)
        elif isinstance(item, bytes | bytearray):
            total += len(item)
        elif isinstance(item, Mapping):
            total += sum(len(name) for name in item if isinstance(name, str))
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, np.ndarray) and item.dtype.kind == "O":
            pending.extend(item.reshape(-1).tolist())
        else:
            total += int(getattr(item, "nbytes", 0))
    return total


def _view_lengths(array: pa.Array) -> npt.NDArray[np.int32]:
    """View the string lengths in an array of string views; the length is the first of a view's four 32-bit integers."""
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(0, np.int32)
    return np.frombuffer(data, np.int32, len(array) * 4, array.offset * 16)[::4]


def _span(array: pa.Array, dtype: npt.DTypeLike) -> int:
    offsets = arrow_offsets(array, dtype)
    return int(offsets[-1]) - int(offsets[0])


def _listed(array: pa.Array, dtype: npt.DTypeLike) -> int:
    return object_nbytes(array.values.slice(int(arrow_offsets(array, dtype)[0]), max(0, _span(array, dtype))))


def _repeated(array: pa.Array) -> int:
    """Estimate the size in bytes of the values of list views; shared values are counted once per view."""
    starts, sizes = array.offsets.to_numpy(), array.sizes.to_numpy()
    order = np.argsort(starts, kind="stable")
    starts, sizes = starts[order], sizes[order].astype(np.int64)
    if not len(starts):
        return 0
    if (starts[1:] >= starts[:-1] + sizes[:-1]).all():
        first = max(0, int(starts[0]))
        return object_nbytes(array.values.slice(first, max(0, int(starts[-1] + sizes[-1]) - first)))
    return int(sizes.sum()) * _largest(array.values)


def _largest(values: pa.Array) -> int:
    arrow = values.type
    if not len(values):
        return _LEAF_NBYTES
    for kinds, dtype in ((_TEXTS, np.int32), (_LARGE_TEXTS, np.int64)):
        if arrow.id in kinds:
            return _LEAF_NBYTES + int(np.diff(arrow_offsets(values, dtype)).max(initial=0))
    if arrow.id in _VIEWS:
        return _LEAF_NBYTES + int(_view_lengths(values).max(initial=0))
    return object_nbytes(values) if arrow.num_fields or pa.types.is_dictionary(arrow) else object_nbytes(values[:1])


# Objects in Arrow: structs, lists and numbers if all rows have one form, else pickled rows. `encode` infers the form
# and builds the array in one pass. The form, a tree of `Node`, is stored as JSON beside the array. It records what the
# Arrow type does not: tuples, `np.int64` integers, and nulls that represent missing keys. Hence `decode` restores every
# object exactly, and other tools can read the fields. If two rows differ in form (a key with an int in one and a string
# in the other, a key that is missing in one row and None in another, keys in contradicting orders), no Arrow type
# distinguishes the rows, and they are pickled.

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
    """Common form of all values at one position in a tree of Python objects.

    kind: `none` (only None), a name in `PLAIN`, `scalar` (NumPy's), `dict`, `list` or `tuple` (of any length, elements
        of one form), `list_of` or `tuple_of` (of one length, one form per position), `array` (of one shape), `ragged`
        (arrays of varying shape), `pickle`, or `string` (NumPy strings of earlier versions).
    nullable: whether nulls represent None.
    dtype, shape: dtype and shape of NumPy scalars and arrays; for `ragged`, only the number of dimensions matters.
    names, optional: keys of a dict in order, and, for each key, whether a null represents a missing key.
    children: forms of nested values.
    """

    kind: str
    nullable: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    optional: tuple[bool, ...] = ()
    children: tuple[Node, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return the form as a JSON-serializable dict, without empty fields."""
        fields = {name: getattr(self, name) for name in ("kind", "nullable", "dtype", "shape", "names", "optional")}
        fields["children"] = [child.plain() for child in self.children]
        return {name: value for name, value in fields.items() if value}


class _NotUniform(Exception):
    """Error that the values have no common form that Arrow supports."""


def encode(values: npt.NDArray[Any]) -> tuple[pa.Array, str]:
    """Encode objects as an Arrow array and the JSON form that `decode` requires.

    Raises ColumnTypeError if the objects have no common form, and an object cannot be pickled.

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
    """Return one order of all keys that is consistent with the key order of every dict."""
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
        children, arrays = zip(
            *(_encode(list(position), depth + 1) for position in zip(*values, strict=True)), strict=True
        )
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
    pickled, at any depth, and `allow_pickle` is false.

    array: the array; Arrow types that other tools wrote are cast to equivalent types.
    form: JSON form from `encode`.
    allow_pickle: whether to unpickle rows and nested values; unpickling can execute the writer's code.

    Returns: an array of objects or of variable-width strings, shape (n,).

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
        counts = len(node.children), len(node.names), len(node.optional)
        raise ValueError("a dict of {} children must have as many names and flags, got {} and {}".format(*counts))
    return node


class _Decoder:
    """Decoder of one column's values; `allow_pickle` applies to values at every depth."""

    def __init__(self, name: str, *, allow_pickle: bool = False) -> None:
        self._name = name
        self._allow_pickle = allow_pickle

    def decode(self, node: Node, array: pa.Array, null: Any) -> list[Any]:
        """Decode values; nulls that do not represent None become the argument `null`."""
        if node.kind == "none":
            if array.null_count != len(array):
                raise ValueError(f"values of kind 'none' must be null, got {len(array) - array.null_count} others")
            return [None] * len(array)
        if not array.null_count:
            return self._decode_present(node, array)
        if node.nullable:
            null = np.nan if node.dtype == "nan" else None
        elif null is _REFUSED:
            raise ValueError(f"values of kind {node.kind!r} must not be null, got {array.null_count} nulls")
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

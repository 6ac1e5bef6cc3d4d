"""ObjectColumn: one Python object per row, such as the infos of an environment."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from itertools import repeat
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column.arrow_bodies import decompressed_stream_nbytes
from samplebatch.column.encoding import decode, encode
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.memory import MemoryBound
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.varying_rows import arrow_offsets
from samplebatch.errors import ColumnTypeError, FormatError

if TYPE_CHECKING:
    import torch


FORM_KEY = b"samplebatch.objects"
"""Metadata key of the objects' form, which the Arrow type represents only partially."""

_OBJECT = np.dtype(object)
_BARE_FORM = '{"kind":"dict"}'
_BARE_NBYTES = sys.getsizeof({})
_IMMUTABLE = frozenset((NoneType, bool, int, float, complex, str, bytes))


class ObjectColumn(Column):
    """One Python object per row: a dict, None, a string or any other.

    In Arrow, objects with a common form are structs, lists and numbers, others are pickles; both restore them exactly.
    Objects are mutable, so nothing is cached between calls: `encode` returns array and metadata together.

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
            # The fastest of the ways to make many.
            values = self._values = np.fromiter(map(dict.copy, repeat({}, self._length)), object, self._length)
        return values

    @property
    def is_bare(self) -> bool:
        """Whether all rows are empty dicts that have not been created yet."""
        return self._values is None

    @classmethod
    def from_rows(cls, rows: Sequence[Any]) -> ObjectColumn:
        """Store one object per row; sequences and arrays are objects as well."""
        return cls(np.fromiter(rows, object, len(rows)))

    @classmethod
    def from_array(cls, values: npt.NDArray[Any], name: str) -> ObjectColumn:
        """Store an array of objects.

        Raises ColumnTypeError with the column if it has several dimensions or another dtype.
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
        return self._length * _BARE_NBYTES if self.is_bare else sum(map(sys.getsizeof, self.values.tolist()))

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
        """Return a column of `length` rows with these at `positions` and None elsewhere."""
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
        """Encode objects of a common form as structs and lists, others as pickles.

        Raises ColumnTypeError if the objects have no common form and one cannot be pickled.
        """
        array, form = encode(self.values)
        return array, {FORM_KEY: form.encode()}

    @staticmethod
    def reads(arrow: pa.DataType, metadata: Mapping[bytes, bytes]) -> bool:
        """Return whether an Arrow array is read as objects, by its metadata or for lack of another column type.

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
        """Decode an Arrow array: exactly if `encode` wrote it, otherwise like pyarrow.

        Strings of `StringDType`, which earlier versions wrote as objects, become a text column. Raises FormatError if
        metadata and array do not match, UntrustedPickleError if objects are pickled and `allow_pickle` is false; both
        name the column.
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
        """Reserve the memory that `load` would allocate, without decoding.

        Raises CapacityError with the column if the limit is exceeded, FormatError if header and buffers do not match or
        the buffers are compressed, which `dump` never does.
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
        same = a == b
        if not isinstance(same, bool | np.bool_):
            # Arrays of other libraries compare element by element.
            same = same.all()
        return bool(same) or bool(a != a and b != b)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False


_LEAF_NBYTES, _NODE_NBYTES = 64, 128
"""Bytes of a number or an empty string with its place in a list, and of an empty dict, list or array with its place."""

_VIEWS = (pa.string_view().id, pa.binary_view().id)
_TEXTS = (pa.string().id, pa.binary().id)
_LARGE_TEXTS = (pa.large_string().id, pa.large_binary().id)
_LIST_VIEWS = (pa.list_view(pa.null()).id, pa.large_list_view(pa.null()).id)


def object_nbytes(array: pa.Array) -> int:
    """Estimate the bytes of the objects that an array decodes to.

    Rows without bytes count like others: nulls, empty structs, runs, views and indices of shared values. Requires only
    that buffer sizes are validated, as `Array.validate` does.

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
    """Estimate the bytes of a Python object in a message: nested strings and arrays, and 8 for any other value.

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
    """View the lengths of string views, the first of four numbers each."""
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(0, np.int32)
    return np.frombuffer(data, np.int32, len(array) * 4, array.offset * 16)[::4]


def _span(array: pa.Array, dtype: npt.DTypeLike) -> int:
    """Return the difference of the last and the first offset."""
    offsets = arrow_offsets(array, dtype)
    return int(offsets[-1]) - int(offsets[0])


def _listed(array: pa.Array, dtype: npt.DTypeLike) -> int:
    return object_nbytes(array.values.slice(int(arrow_offsets(array, dtype)[0]), max(0, _span(array, dtype))))


def _repeated(array: pa.Array) -> int:
    """Return the bytes of the values of list views, counting repetitions."""
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
    """Return an upper bound of the bytes of one value."""
    arrow = values.type
    if not len(values):
        return _LEAF_NBYTES
    for kinds, dtype in ((_TEXTS, np.int32), (_LARGE_TEXTS, np.int64)):
        if arrow.id in kinds:
            return _LEAF_NBYTES + int(np.diff(arrow_offsets(values, dtype)).max(initial=0))
    if arrow.id in _VIEWS:
        return _LEAF_NBYTES + int(_view_lengths(values).max(initial=0))
    return object_nbytes(values) if arrow.num_fields or pa.types.is_dictionary(arrow) else object_nbytes(values[:1])

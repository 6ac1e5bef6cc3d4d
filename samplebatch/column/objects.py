"""ObjectColumn: a Python object a row, such as the infos of an environment."""

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
from samplebatch.column.decoding import decode
from samplebatch.column.encoding import encode
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.object_size import object_nbytes
from samplebatch.column.ragged import RaggedColumn
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, FormatError

if TYPE_CHECKING:
    import torch

FORM_KEY = b"samplebatch.objects"
"""Key of the field metadata that holds the form of the objects, which their Arrow type gives only in part."""

_OBJECT = np.dtype(object)
_BARE_FORM = '{"kind":"dict"}'
_BARE_NBYTES = sys.getsizeof({})
_IMMUTABLE = frozenset((NoneType, bool, int, float, complex, str, bytes))


class ObjectColumn(Column):
    """A Python object a row: a dict, None, a string, anything.

    In Arrow the objects are structs, lists and numbers wherever they have one form, and pickles where they have not;
    they come back exactly as they were either way. Objects are mutable, so nothing about them is remembered between
    calls: `encode` gives array and metadata at once.

    Parameters
    ----------
    values
        Array of objects, or of variable-width strings (`numpy.dtypes.StringDType`), shape (n,). It is kept, not copied.

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
        """Hold an empty dict a row; none is made before somebody looks.

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
        """Whether it holds empty dicts alone, and none of them has been made yet."""
        return self._values is None

    @classmethod
    def from_rows(cls, rows: Sequence[Any]) -> ObjectColumn:
        """Hold one object a row; sequences and arrays among them are objects too."""
        return cls(np.fromiter(rows, object, len(rows)))

    @classmethod
    def from_array(cls, values: npt.NDArray[Any], name: str) -> ObjectColumn:
        """Hold an array of objects or of variable-width strings.

        Raises
        ------
        ColumnTypeError
            If it has more than one dimension, or other elements; names the column.
        """
        if values.dtype.kind not in "OT":
            raise ColumnTypeError(f"column {name!r} must have objects or variable-width strings, got {values.dtype}")
        if values.ndim != 1:
            raise ColumnTypeError(
                f"column {name!r} must have one object a row, got an array of them of shape {values.shape}; "
                "convert it to numbers, or make each row a list"
            )
        return cls(np.asarray(values))

    def __len__(self) -> int:
        return self._length

    @property
    def dtype(self) -> np.dtype[Any]:
        return _OBJECT if self._values is None else self._values.dtype

    @property
    def row_shape(self) -> tuple[()]:
        return ()

    @property
    def nbytes(self) -> int:
        """Shallow sizes of the objects in total, as `sys.getsizeof` gives them."""
        return self._length * _BARE_NBYTES if self.is_bare else sum(map(sys.getsizeof, self.values.tolist()))

    def slice(self, start: int, stop: int) -> Self:
        return type(self)(self.values[start:stop])

    def take(self, indices: Indices) -> ObjectColumn:
        return ObjectColumn(self.values[indices])

    def copy(self) -> ObjectColumn:
        """Copy the objects in depth, so that nothing in them is shared."""
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
        """Make a column of `length` rows with these at `positions`, and None (for strings, empty ones) elsewhere."""
        strings = self.values.dtype.kind == "T"
        out = np.zeros(length, self.values.dtype) if strings else np.full(length, None, object)
        out[positions] = self.values
        return ObjectColumn(out)

    @classmethod
    def concat(cls, columns: Sequence[ObjectColumn], name: str) -> ObjectColumn:
        if all(column.is_bare for column in columns):
            return cls.empty_dicts(sum(map(len, columns)))
        dtypes = {column.values.dtype for column in columns}
        if len(dtypes) > 1:
            found = " and ".join(sorted(map(str, dtypes)))
            raise ColumnMismatchError(
                f"column {name!r} must have one dtype to be joined, got {found}; convert it first"
            )
        return ObjectColumn(np.concatenate([column.values for column in columns]))

    def equals(self, other: Column) -> bool:
        if not isinstance(other, ObjectColumn) or self.values.dtype != other.values.dtype or len(self) != len(other):
            return False
        return all(map(_same, self.values.tolist(), other.values.tolist()))

    def to_numpy(self) -> npt.NDArray[Any]:
        return self.values

    def to_torch(self) -> torch.Tensor:
        raise ColumnTypeError(f"torch has no tensor of Python objects (dtype {self.values.dtype})")

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        """Encode the objects as structs and lists where they have one form, else as pickles.

        Raises
        ------
        ColumnTypeError
            If the objects have no common form, and one of them cannot be pickled.
        """
        array, form = encode(self.values)
        return array, {FORM_KEY: form.encode()}

    @staticmethod
    def reads(arrow: pa.DataType, metadata: Mapping[bytes, bytes]) -> bool:
        """Tell whether an Arrow array holds objects: by its metadata, or by a type that no other column holds.

        >>> ObjectColumn.reads(pa.string(), {}), ObjectColumn.reads(pa.int64(), {})
        (True, False)
        """
        if FORM_KEY in metadata:
            return True
        if RaggedColumn.reads(arrow) or isinstance(arrow, pa.BaseExtensionType):
            return False
        while pa.types.is_fixed_size_list(arrow):
            arrow = arrow.value_type
        number = pa.types.is_primitive(arrow) or pa.types.is_decimal(arrow)
        return not (number or pa.types.is_fixed_size_binary(arrow))

    @classmethod
    def from_arrow(
        cls, array: pa.Array, metadata: Mapping[bytes, bytes], name: str, *, allow_pickle: bool = False
    ) -> ObjectColumn:
        """Make objects of an Arrow array: as they were if `encode` made it, else as pyarrow converts it.

        Raises
        ------
        FormatError
            If the metadata does not fit the array; names the column.
        UntrustedPickleError
            If the objects are pickled and `allow_pickle` is false; names the column.
        """
        form = metadata.get(FORM_KEY)
        if form is None:
            return cls.from_rows(array.to_pylist())
        return cls(decode(array, form, name, allow_pickle=allow_pickle))

    def dump(self) -> tuple[Header, list[Any]]:
        if self.is_bare:
            return (self.kind, self._length, _BARE_FORM, False), []
        array, form = encode(self.values)
        nulls = pa.types.is_null(array.type)
        if nulls or (array.type == pa.struct([]) and not array.null_count):
            # Nothing but None, or but {}: there are no bytes to carry.
            return (self.kind, len(array), form, nulls), []
        batch = pa.record_batch([array], ["values"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return (self.kind, len(array), form, False), [sink.getvalue()]

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> ObjectColumn:
        array, form = _dumped(header, buffers)
        if form == _BARE_FORM and not buffers:
            return cls.empty_dicts(len(array))
        return cls(decode(array, form, "objects", allow_pickle=allow_pickle))

    @staticmethod
    def check_dumped(header: Header, buffers: Sequence[Any], name: str, bound: MemoryBound) -> None:
        """Take the memory that `load` would make of a header and buffers from a bound; nothing is made yet.

        Raises
        ------
        CapacityError
            If it is more than is left; names the column.
        FormatError
            If header and buffers do not agree, or the buffers are compressed, as `dump` never leaves them.
        """
        for buffer in buffers:
            if decompressed_stream_nbytes(pa.py_buffer(buffer)):
                raise FormatError(f"column {name!r} must have objects that are not compressed, and they are")
        array, _ = _dumped(header, buffers)
        bound.take(object_nbytes(array), f"column {name!r}")


def _dumped(header: Header, buffers: Sequence[Any]) -> tuple[pa.Array, Any]:
    """View the dump of objects by `ObjectColumn.dump`: an Arrow array, and their form."""
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
    """Tell whether two objects are of one type and equal in depth; NaN equals NaN, dicts need not agree in order."""
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

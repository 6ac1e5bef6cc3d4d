"""TextColumn: strings or bytes of varying length, contiguous in Arrow's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.arguments import describe_value
from samplebatch.column import memory
from samplebatch.column.interface import Column, Header, Indices
from samplebatch.column.types import DTYPE_KEY
from samplebatch.column.varying_rows import arrow_offsets, offsets_of
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, FormatError

if TYPE_CHECKING:
    import torch

TEXT: Final = pa.large_string()
BYTES: Final = pa.large_binary()

_NAMES: Final = {TEXT: "text", BYTES: "bytes"}
_TYPES: Final = {name: arrow for arrow, name in _NAMES.items()}
_NONE: Final = "text or none"
_NAN: Final = "text or nan"
_MARKERS: Final[dict[str, float | None]] = {_NONE: None, _NAN: np.nan}
"""Markers of missing strings by dtype name in headers and fields; other dtypes use None if any string is missing."""

_STRINGS: Final = frozenset((str, np.str_))
_BYTE_STRINGS: Final = frozenset((bytes, np.bytes_))
_MAX_CODE_POINT: Final = 0x10FFFF
_LISTED: Final = frozenset(name.encode() for name in (*_TYPES, _NAN))
"""Dtype names in fields of lists that are rows of text."""
_INT64: Final = np.dtype(np.int64)
_OBJECT: Final = np.dtype(object)
_PLAIN: Final = (TEXT, BYTES, pa.string(), pa.binary())
"""Arrow types whose bytes are viewed; other types are copied."""


class TextColumn(Column):
    r"""Strings or bytes of varying length with optional missing values: an Arrow `large_string` or `large_binary`.

    The UTF-8 text (or the bytes) of all rows is contiguous, with 64-bit row offsets. The column never modifies this
    memory: `values` is a read-only array that NumPy creates from the rows on first access.

    Parameters
    ----------
    array
        A validated `large_string` or `large_binary` array of `length * prod(row_shape)` values. It is not copied.
    row_shape
        Shape of one row; `()` for one string per row.
    length
        Number of rows; None for the array's length.
    missing
        Value that represents missing strings in `values`: None or NaN; `""` for columns without missing strings.
        Slices and gathered rows inherit `missing`, so the dtype of `values` does not depend on the selected rows.

    Examples
    --------
    >>> column = TextColumn.from_rows(["left", None, "right"])
    >>> column.to_arrow().type, column.take(np.array([2, 1])).values.tolist()
    (DataType(large_string), ['right', None])
    >>> TextColumn.from_rows([b"\x00", b"ab"]).values
    array([b'\x00', b'ab'], dtype=object)
    """

    __slots__ = ("_length", "_values", "array", "missing", "row_shape")
    kind: ClassVar[str] = "text"
    row_shape: tuple[int, ...]

    def __init__(
        self, array: pa.Array, row_shape: tuple[int, ...] = (), length: int | None = None, *, missing: Any = ""
    ) -> None:
        self.array = array
        self.row_shape = row_shape
        self.missing: float | str | None = None if missing == "" and array.null_count else missing
        self._length = len(array) if length is None else length
        self._values: npt.NDArray[Any] | None = None

    # -- from other forms ----------------------------------------------------------------------------------------------

    @classmethod
    def from_rows(cls, rows: Sequence[Any]) -> TextColumn | None:
        r"""Create a column from strings or from bytes, with optional None; return None for other values or only None.

        None is also returned for strings with lone surrogates, because UTF-8 cannot encode such strings.

        >>> (
        ...     TextColumn.from_rows(["a", 1]),
        ...     TextColumn.from_rows(["\ud800"]),
        ...     TextColumn.from_rows([None]),
        ... )
        (None, None, None)
        """
        types = set(map(type, rows))
        types.discard(NoneType)
        if not types:
            return None
        if types <= _STRINGS:
            arrow = TEXT
        elif types <= _BYTE_STRINGS:
            arrow = BYTES
        else:
            return None
        try:
            return cls(pa.array(rows, arrow))
        except UnicodeEncodeError:
            return None

    @classmethod
    def from_objects(cls, values: npt.NDArray[Any]) -> TextColumn | None:
        """Copy an object array of strings or bytes, shape (n, ...); return None for other values, like `from_rows`."""
        flat = cls.from_rows(values.reshape(-1).tolist())
        return None if flat is None else cls(flat.array, values.shape[1:], len(values))

    @classmethod
    def from_array(cls, values: npt.NDArray[Any], name: str) -> TextColumn | None:
        """Copy an array of fixed-width strings or bytes, or of variable-width strings, shape (n, ...).

        Raises ColumnTypeError if the array represents missing strings by a value other than None or NaN, or has invalid
        characters.

        Returns
        -------
        The column; None if UTF-8 cannot encode a string.
        """
        missing: Any = ""
        if values.dtype.kind == "T":
            missing = getattr(values.dtype, "na_object", "")
            if not (missing is None or _is_nan(missing)) and hasattr(values.dtype, "na_object"):
                raise ColumnTypeError(
                    f"column {name!r} must have None or NaN for missing strings, got an na_object of type "
                    f"{type(missing).__name__}"
                )
        elif values.dtype.kind == "U" and values.size:
            values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
            # Python crashes on larger code points.
            largest = values.reshape(-1).view(np.uint32).max() if values.dtype.itemsize else 0
            if largest > _MAX_CODE_POINT:
                raise ColumnTypeError(f"column {name!r} must have Unicode characters, got code point {largest:#x}")
        arrow = BYTES if values.dtype.kind == "S" else TEXT
        try:
            # A list, because pyarrow truncates strings of arrays at their first zero.
            array = pa.array(values.reshape(-1).tolist(), arrow, from_pandas=_is_nan(missing))
        except UnicodeEncodeError:
            return None
        return cls(array, values.shape[1:], len(values), missing=missing)

    @classmethod
    def unite(cls, columns: Sequence[Column]) -> list[TextColumn] | None:
        """Convert text and object columns to text columns; return None if an object is not a string, bytes or None.

        >>> from samplebatch.column.convert import as_column
        >>> [
        ...     one.values.tolist()
        ...     for one in TextColumn.unite([as_column(["a"], "x"), as_column([None], "x")])
        ... ]
        [['a'], [None]]
        """
        like = next((column for column in columns if isinstance(column, TextColumn)), None)
        if like is None:
            return None
        united = []
        for column in columns:
            text: TextColumn | None = column if isinstance(column, TextColumn) else None
            if column.kind == "object":
                rows = column.values.tolist()
                missing = rows.count(None) == len(rows)
                text = cls(pa.nulls(len(rows), like.array.type)) if missing else cls.from_rows(rows)
            if text is None:
                return None
            united.append(text)
        return united

    @classmethod
    def from_fixed(cls, values: npt.NDArray[Any], name: str, *, exact: bool = False) -> TextColumn:
        """Copy fixed-width strings or bytes that earlier versions wrote, shape (n, ...).

        Raises FormatError if strings have invalid characters.

        Parameters
        ----------
        values
            The array.
        name
            The column's name, for errors.
        exact
            Whether all byte strings have the same length, so that trailing zero bytes are significant.
        """
        if exact and values.dtype.itemsize:
            rows = values.view(f"V{values.dtype.itemsize}").reshape(-1).tolist()
            return cls(pa.array(rows, BYTES), values.shape[1:], len(values))
        try:
            text = cls.from_array(values, name)
        except ColumnTypeError as error:
            raise FormatError(str(error)) from error
        if text is None:
            raise FormatError(f"column {name!r} must have text that UTF-8 can encode, got lone surrogates")
        return text

    @staticmethod
    def reads(arrow: pa.DataType, metadata: Mapping[bytes, bytes]) -> bool:
        """Return whether an Arrow type is a string or bytes type, or a list type of strings or bytes, as in `encode`.

        >>> TextColumn.reads(pa.string(), {}), TextColumn.reads(pa.list_(pa.string()), {})
        (True, False)
        """
        if pa.types.is_fixed_size_list(arrow) and metadata.get(DTYPE_KEY, b"") in _LISTED:
            while pa.types.is_fixed_size_list(arrow):
                arrow = arrow.value_type
            return arrow in _PLAIN
        return _text_type(arrow) is not None

    @staticmethod
    def form_of(arrow: pa.DataType, metadata: Mapping[bytes, bytes]) -> tuple[Any, ...] | None:
        """Return the content kind and row shape of a text or bytes field; None for other fields.

        Fields that earlier versions wrote are included.

        >>> (
        ...     TextColumn.form_of(pa.large_string(), {}),
        ...     TextColumn.form_of(pa.binary(8), {DTYPE_KEY: b"<U2"}),
        ... )
        (('text',), ('text',))
        """
        shape: list[int] = []
        name = metadata.get(DTYPE_KEY, b"")
        if isinstance(arrow, pa.FixedShapeTensorType):
            shape, arrow = list(arrow.shape), arrow.value_type
        while pa.types.is_fixed_size_list(arrow):
            shape.append(arrow.list_size)
            arrow = arrow.value_type
        if pa.types.is_fixed_size_binary(arrow) and name[1:2] in (b"S", b"U"):
            return "text" if name[1:2] == b"U" else "bytes", *shape
        content = _text_type(arrow)
        if content is None or (shape and name not in _LISTED):
            return None
        return (_NAMES[content], *shape, *([_NAN] if name == _NAN.encode() else []))

    @staticmethod
    def expands(arrow: pa.DataType) -> bool:
        """Return whether an array of a type that `reads` accepts may be smaller than the column read from the array."""
        while pa.types.is_fixed_size_list(arrow):
            arrow = arrow.value_type
        return arrow not in _PLAIN

    @classmethod
    def from_arrow(cls, array: pa.Array, dtype_name: str | None, name: str) -> TextColumn:
        """View the strings of an Arrow array that `reads` accepts; offsets are copied, and all rows are validated.

        Raises ColumnTypeError if lists of strings have nulls. Raises FormatError if offsets or indices are out of
        range, or text is not UTF-8.

        Parameters
        ----------
        array
            Strings or bytes. 32-bit offsets are converted to 64 bits, and dictionaries and views are copied.
        dtype_name
            Dtype in the field's metadata, if any.
        name
            The column's name, for errors.
        """
        length, row_shape = len(array), []
        try:
            while pa.types.is_fixed_size_list(array.type):
                if array.null_count:
                    raise ColumnTypeError(
                        f"column {name!r} must not have nulls except single strings, got {array.type}"
                    )
                row_shape.append(array.type.list_size)
                array.validate()
                array = array.flatten()
            arrow = _text_type(array.type)
            if array.type != arrow:
                array.validate(full=cls.expands(array.type))
                array = _cast(array, arrow)
            array = _checked(arrow, *_parts(array))
        except (pa.ArrowException, ValueError) as error:
            if isinstance(error, ColumnTypeError):
                raise
            raise FormatError(f"column {name!r} must have strings or bytes in Arrow's layout: {error}") from error
        if len(array) != length * prod(row_shape):
            raise FormatError(f"column {name!r} must have {prod(row_shape)} strings per row, got {len(array)} in total")
        return cls(array, tuple(row_shape), length, missing=np.nan if dtype_name == _NAN and arrow == TEXT else "")

    # -- the interface of columns --------------------------------------------------------------------------------------

    @property
    def is_text(self) -> bool:
        """Whether the rows are strings and not bytes."""
        return bool(self.array.type == TEXT)

    @property
    def content(self) -> str:
        """Content of the rows: `"text"` or `"bytes"`."""
        return _NAMES[self.array.type]

    @property
    def values(self) -> npt.NDArray[Any]:
        """Rows as a read-only array, shape (n, ...): of dtype `StringDType` for strings, and of dtype object for bytes.

        Raises FormatError if the text is no longer UTF-8, because another process has modified the memory.
        """
        values = self._values
        if values is None:
            values = self.to_objects()
            if self.is_text:
                values = values.astype(self.dtype)
            values.flags.writeable = False
            self._values = values
        return values

    def to_objects(self) -> npt.NDArray[Any]:
        """Return the rows as a new object array, shape (n, ...): strings or bytes, and None or NaN if missing."""
        try:
            objects: npt.NDArray[Any] = self.array.to_numpy(zero_copy_only=False)
        except (UnicodeDecodeError, pa.ArrowException):
            # Not chained, because the messages contain the bytes.
            raise FormatError("text must be UTF-8, got memory that was modified after validation") from None
        if _is_nan(self.missing):
            objects[objects == np.array(None)] = np.nan
        return objects.reshape(self._length, *self.row_shape)

    def __len__(self) -> int:
        return self._length

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of `values`: object for bytes, `StringDType` for strings.

        If strings are missing, the `StringDType` has the missing value None or NaN.
        """
        if not self.is_text:
            return _OBJECT
        if self.missing == "":
            return np.dtypes.StringDType()
        return np.dtypes.StringDType(na_object=self.missing)

    @property
    def nbytes(self) -> int:
        """Size of text, offsets and validity bitmap in bytes."""
        offsets, _, validity = _parts(self.array)
        return int(offsets[-1] - offsets[0]) + offsets.nbytes + (0 if validity is None else validity.nbytes)

    def slice(self, start: int, stop: int) -> TextColumn:
        width = prod(self.row_shape)
        return self._with(self.array.slice(start * width, (stop - start) * width), stop - start)

    def take(self, indices: Indices) -> TextColumn:
        return self._with(self.array.take(pa.array(self._places(indices))), len(indices))

    def copy(self) -> TextColumn:
        offsets, data, validity = _parts(self.array)
        first, last = int(offsets[0]), int(offsets[-1])
        return self._with(
            _array(self.array.type, offsets - first, memory.copy_of(data[first:last]), validity), self._length
        )

    def spread(self, length: int, positions: Indices) -> TextColumn:
        """Return a column of `length` rows with these rows at `positions`, and empty strings in all other rows."""
        flat, count = self._places(positions), length * prod(self.row_shape)
        offsets, data, validity = _parts(self.array)
        lengths = np.zeros(count, _INT64)
        lengths[flat] = np.diff(offsets)
        if validity is not None:
            present = np.ones(count, np.uint8)
            present[flat] = np.unpackbits(validity, count=len(self.array), bitorder="little")
            validity = np.packbits(present, bitorder="little")
        text = memory.copy_of(data[int(offsets[0]) : int(offsets[-1])])
        return self._with(_array(self.array.type, offsets_of(lengths), text, validity), length)

    def _places(self, rows: Indices) -> Indices:
        """Return the indices of the selected rows' strings in the Arrow array."""
        width = prod(self.row_shape)
        return rows if width == 1 else (rows[:, None] * width + np.arange(width)).reshape(-1)

    def _with(self, array: pa.Array, length: int) -> TextColumn:
        return TextColumn(array, self.row_shape, length, missing=self.missing)

    @classmethod
    def concat(cls, columns: Sequence[TextColumn], name: str) -> TextColumn:
        first = columns[0]
        if len(columns) == 1:
            return first.copy()
        for column in columns:
            if column.row_shape != first.row_shape:
                raise ColumnMismatchError(
                    f"column {name!r} must have one row shape to be joined, got {first.row_shape} and "
                    f"{column.row_shape}"
                )
            if column.array.type != first.array.type:
                raise ColumnMismatchError(
                    f"column {name!r} must have one dtype to be joined, got text and bytes; convert it first"
                )
        missing = {"nan" if _is_nan(column.missing) else column.missing for column in columns} - {""}
        if len(missing) > 1:
            raise ColumnMismatchError(
                f"column {name!r} must have one value for missing strings to be joined, got None and NaN"
            )
        marker = next((column.missing for column in columns if column.missing != ""), "")
        joined = pa.concat_arrays([column.array for column in columns])
        return cls(joined, first.row_shape, sum(map(len, columns)), missing=marker)

    def equals(self, other: Column) -> bool:
        return (
            isinstance(other, TextColumn)
            and len(self) == len(other)
            and self.row_shape == other.row_shape
            and bool(self.array.equals(other.array))
            and (not self.array.null_count or _is_nan(self.missing) == _is_nan(other.missing))
        )

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return `values`: a read-only array, shape (n, ...)."""
        return self.values

    def to_torch(self) -> torch.Tensor:
        raise ColumnTypeError(f"torch has no tensor of {self.content}")

    def encode(self) -> tuple[pa.Array, dict[bytes, bytes]]:
        array, shape = self.array, self.row_shape
        for axis in reversed(range(len(shape))):
            rows = self._length * prod(shape[:axis])
            array = pa.Array.from_buffers(pa.list_(array.type, shape[axis]), rows, [None], children=[array])
        name = _NAN if _is_nan(self.missing) else self.content if shape else None
        return array, {} if name is None else {DTYPE_KEY: name.encode()}

    def dump(self) -> tuple[Header, list[Any]]:
        offsets, data, validity = _parts(self.array)
        first, last = int(offsets[0]), int(offsets[-1])
        buffers = [data[first:last], offsets - first if first else offsets]
        if validity is not None:
            buffers.append(validity)
        is_optional = self.missing is None and self.is_text
        name = _NAN if _is_nan(self.missing) else _NONE if is_optional else self.content
        return (self.kind, name, self._length, self.row_shape), buffers

    @classmethod
    def load(cls, header: Header, buffers: Sequence[Any], *, allow_pickle: bool = False) -> TextColumn:
        try:
            _, name, length, row_shape = header
            row_shape = tuple(row_shape)
            data, offsets, *validity = buffers
            count = length * prod(row_shape)
            if length < 0 or min(row_shape, default=0) < 0 or len(validity) > 1:
                raise ValueError(
                    f"a text column must have lengths from 0 and 2 or 3 buffers, got {describe_value(length)} rows of "
                    f"shape {row_shape!r:.80} and {len(buffers)} buffers"
                )
            text = memory.as_array(data, np.dtype(np.uint8), (memoryview(data).nbytes,))
            # Copies: another writer of this memory must not move rows after validation.
            starts = memory.as_array(offsets, _INT64, (count + 1,))
            marks = memory.as_array(validity[0], np.dtype(np.uint8), (-(-count // 8),)).copy() if validity else None
            array = _checked(TEXT if name in _MARKERS else _TYPES[name], starts, text, marks)
        except (pa.ArrowException, TypeError, ValueError, KeyError, OverflowError) as error:
            raise FormatError(f"a text column's header {header!r} must match its buffers: {error}") from error
        return cls(array, row_shape, length, missing=_MARKERS.get(name, ""))


def _is_nan(missing: Any) -> bool:
    return isinstance(missing, float) and missing != missing


def _text_type(arrow: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type in which a column stores strings or bytes of another type; None for other types."""
    if pa.types.is_dictionary(arrow):
        arrow = arrow.value_type
    if pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return TEXT
    if pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow) or pa.types.is_binary_view(arrow):
        return BYTES
    return None


def _cast(array: pa.Array, arrow: pa.DataType) -> pa.Array:
    try:
        return array.cast(arrow)
    except pa.ArrowNotImplementedError:
        # Views, for versions of pyarrow that cannot cast them.
        return pa.array(array.to_pylist(), arrow)


def _parts(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.uint8] | None]:
    """View offsets, bytes and validity bits of an array's rows; the bits are None if no row is missing."""
    length = len(array)
    validity, _, data = array.buffers()
    starts = arrow_offsets(array)
    text = np.zeros(0, np.uint8) if data is None or not data.size else np.frombuffer(data, np.uint8)
    if not array.null_count or validity is None:
        return starts, text, None
    first = array.offset // 8
    marks = np.frombuffer(validity, np.uint8, -(-(array.offset + length) // 8) - first, first)
    if array.offset % 8:
        bits = np.unpackbits(marks, bitorder="little")[array.offset % 8 :]
        marks = np.packbits(bits[:length], bitorder="little")
    return starts, text, marks


def _array(
    arrow: pa.DataType,
    offsets: npt.NDArray[np.int64],
    data: npt.NDArray[np.uint8],
    validity: npt.NDArray[np.uint8] | None,
) -> pa.Array:
    buffers = [None if validity is None else memory.as_buffer(validity), memory.as_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(arrow, len(offsets) - 1, buffers)


def _checked(
    arrow: pa.DataType,
    offsets: npt.NDArray[np.int64],
    data: npt.NDArray[np.uint8],
    validity: npt.NDArray[np.uint8] | None,
) -> pa.Array:
    """Create an array from untrusted buffers with copied offsets, after validation of offsets and UTF-8."""
    array = _array(arrow, offsets.copy(), data, validity)
    array.validate(full=True)
    return array

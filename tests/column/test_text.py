"""Text columns in Arrow's layout keep every character and reject invalid data."""

from __future__ import annotations

import pickle

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import SampleBatch, concat_samples
from samplebatch.batch.frame import dump_columns, load_columns
from samplebatch.column import TextColumn, as_column
from samplebatch.column.arrow import arrow_field_and_array, column_from_arrow
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import DTYPE_KEY
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, FormatError
from tests.column.samples import through_ipc

STRINGS = np.dtypes.StringDType

texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=20) | st.none(), max_size=12)
byte_strings = st.lists(st.binary(max_size=20) | st.none(), max_size=12)


def column_of(rows: list[str | bytes | None]) -> TextColumn:
    column = TextColumn.from_rows(rows)
    if column is None:
        column = TextColumn(pa.array(rows, pa.large_string()))
    return column


def through_everything(column: TextColumn) -> list[TextColumn]:
    """Return the column after each kind of serialization."""
    field, array = arrow_field_and_array(column, "x")
    header, buffers = dump_columns({"x": column})
    return [
        column_from_arrow(array, field),
        column_from_arrow(*through_ipc(field, array)[::-1]),
        load_columns(header, [bytes(memoryview(buffer)) for buffer in buffers])["x"],
        *(pickle.loads(pickle.dumps(column, protocol)) for protocol in (2, 5)),
        column.copy(),
    ]


@given(texts | byte_strings, st.data())
def test_rows_agree_with_a_list(rows: list[str | bytes | None], data: st.DataObject) -> None:
    column = column_of(rows)
    assert column.values.tolist() == rows
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    part = column.slice(start, stop)
    assert part.values.tolist() == rows[start:stop]
    for back in through_everything(part):
        assert back.values.tolist() == rows[start:stop]
        assert back.equals(part)
        assert back.nbytes <= part.nbytes
    indices = data.draw(st.lists(st.integers(0, max(0, len(rows) - 1)), max_size=8)) if rows else []
    assert part.concat([part, column], "x").values.tolist() == rows[start:stop] + rows
    assert column.take(np.array(indices, np.intp)).values.tolist() == [rows[i] for i in indices]
    places = np.arange(len(part)) * 2 + 1
    blank = "" if column.is_text else b""
    expected = [blank] * (2 * len(part) + 1)
    expected[1::2] = rows[start:stop]
    assert part.spread(len(expected), places).values.tolist() == expected


@given(st.lists(st.lists(st.text(st.characters(codec="utf-8"), max_size=4), min_size=6, max_size=6), max_size=5))
def test_rows_of_several_strings_keep_their_shape(rows: list[list[str]]) -> None:
    values = np.array(rows, STRINGS()).reshape(-1, 2, 3)
    column = as_column(values, "x")
    assert column.row_shape == (2, 3)
    for back in (*through_everything(column), *through_everything(column.slice(0, len(rows)))):
        assert back.values.shape == values.shape
        assert back.equals(column)
    order = np.arange(len(rows))[::-1]
    assert column.take(order).values.tolist() == values[::-1].tolist()
    assert column.concat([column, column], "x").values.tolist() == np.concatenate([values, values]).tolist()
    spread = column.spread(len(rows) + 2, np.arange(len(rows)) + 1).values
    assert spread[1:-1].tolist() == values.tolist()
    assert (spread[[0, -1]] == "").all()


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (STRINGS(), ["", "a", "x" * 100, "☃"]),
        (STRINGS(na_object=None), ["a", None, ""]),
        (STRINGS(na_object=np.nan), ["a", np.nan, ""]),
        (STRINGS(), []),
    ],
    ids=str,
)
def test_numpy_gets_the_original_dtype(dtype: np.dtype, values: list) -> None:
    column = as_column(np.array(values, dtype), "x")
    for back in (column, *through_everything(column)):
        assert back.values.dtype == dtype
        assert str(back.values.tolist()) == str(values)


def test_strings_use_only_the_bytes_of_their_characters() -> None:
    column = as_column(["a" * 10_000, "b"], "x")
    assert column.nbytes == 10_001 + 3 * 8
    assert sum(memoryview(buffer).nbytes for buffer in column.dump()[1]) == column.nbytes
    assert column.slice(1, 2).nbytes == 1 + 2 * 8


def test_arrow_shares_the_memory() -> None:
    column = as_column(["left", "right"], "x")
    array = column.to_arrow()
    assert array is column.array
    assert array.type == pa.large_string()
    assert as_column([b"\0"], "x").to_arrow().type == pa.large_binary()
    read = column_from_arrow(array, pa.field("x", array.type))
    assert read.array.buffers()[2].address == array.buffers()[2].address
    assert pl.Series("x", column).to_list() == ["left", "right"]


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a", None, "é"], pa.string()),
        pa.array(["a", None, "é"], pa.large_string()),
        pa.array(["a", None, "é" * 20], pa.string_view()),
        pa.array(["a", None, "é", "a"]).dictionary_encode(),
        pa.array([b"a", None, b"\xff"], pa.binary()),
        pa.array([b"a", None, b"\xff"], pa.large_binary()),
        pa.array([b"ab", b"c\0"], pa.binary(2)),
        pa.DictionaryArray.from_arrays(pa.array([1, 0, None]), pa.array([None, "x"])),
        pa.array([], pa.string()),
    ],
    ids=lambda array: str(array.type),
)
def test_foreign_arrow_strings_become_text(array: pa.Array) -> None:
    for part in (array, array[1:], array[1:2]):
        column = column_from_arrow(part, pa.field("x", part.type))
        assert column.kind == "text"
        assert column.values.tolist() == part.to_pylist()


def test_a_decoded_column_has_separate_offsets() -> None:
    offsets = np.array([0, 1, 2], np.int64)
    array = pa.Array.from_buffers(pa.large_string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(b"ab")])
    loaded = TextColumn.load(("text", "text", 2, ()), [b"ab", offsets])
    column = column_from_arrow(array, pa.field("x", array.type))
    offsets[1] = 1 << 40
    assert column.values.tolist() == loaded.values.tolist() == ["a", "b"]


def test_text_modified_after_validation_is_rejected() -> None:
    data = np.frombuffer(bytearray(b"ab"), np.uint8)
    column = TextColumn.load(("text", "text", 2, ()), [data, np.array([0, 1, 2])])
    data[1] = 0xFF
    with pytest.raises(FormatError, match="text must be UTF-8"):
        column.values  # noqa: B018


def test_the_array_is_read_only() -> None:
    column = as_column(["a", "b"], "x")
    with pytest.raises(ValueError, match="read-only"):
        column.values[0] = "c"
    assert column.values is column.values


def test_conversion_of_text_to_torch_is_rejected() -> None:
    with pytest.raises(ColumnTypeError, match="torch has no tensor of text"):
        as_column(["a"], "x").to_torch()


def test_incompatible_columns_are_rejected_with_the_column_name() -> None:
    text, raw = as_column(["a"], "x"), as_column([b"a"], "x")
    with pytest.raises(ColumnMismatchError, match="'tag' must have one dtype to be joined, got text and bytes"):
        TextColumn.concat([text, raw], "tag")
    with pytest.raises(ColumnMismatchError, match=r"'tag' must have one row shape to be joined, got \(\) and \(1,\)"):
        TextColumn.concat([text, as_column([["a"]], "x")], "tag")
    nan = as_column(np.array([np.nan], STRINGS(na_object=np.nan)), "x")
    with pytest.raises(ColumnMismatchError, match="'tag' must have one value for missing strings"):
        TextColumn.concat([as_column([None, "a"], "x"), nan], "tag")


# -- from outside ------------------------------------------------------------------------------------------------------


def offsets_of(*offsets: int) -> bytes:
    return np.array(offsets, np.int64).tobytes()


@pytest.mark.parametrize(
    ("header", "buffers"),
    [
        (("text", "text", 2, ()), [b"abc", offsets_of(0, 2, 1)]),
        (("text", "text", 2, ()), [b"abc", offsets_of(0, 1, 4)]),
        (("text", "text", 2, ()), [b"abc", offsets_of(-1, 1, 2)]),
        (("text", "text", 2, ()), [b"abc", offsets_of(0, 1 << 62, 3)]),
        (("text", "text", 2, ()), [b"abc", offsets_of(0, 1)]),
        (("text", "text", 2, ()), [b"abc"]),
        (("text", "text", 1, ()), [b"\xff\xfe", offsets_of(0, 2)]),
        (("text", "text", 2, ()), ["é".encode(), offsets_of(0, 1, 2)]),
        (("text", "text", -1, ()), [b"", b""]),
        (("text", "text", 1 << 62, ()), [b"", offsets_of(0)]),
        (("text", "text", 1, (-1,)), [b"", offsets_of(0)]),
        (("text", "text", 1, (1 << 40, 1 << 40)), [b"", offsets_of(0)]),
        (("text", "text", 1, "2"), [b"", offsets_of(0)]),
        (("text", "words", 1, ()), [b"a", offsets_of(0, 1)]),
        (("text", None, 1, ()), [b"a", offsets_of(0, 1)]),
        (("text", "text", 9, ()), [b"", offsets_of(*[0] * 10), b"\xff"]),
        (("text", "text", 1, ()), [b"a", offsets_of(0, 1), b"\1", b"\1"]),
        (("text", "text", 1.5, ()), [b"a", offsets_of(0, 1)]),
        (("text", ["text"], 1, ()), [b"a", offsets_of(0, 1)]),
    ],
)
def test_buffers_of_the_wrong_size_are_rejected(header: tuple, buffers: list[bytes]) -> None:
    with pytest.raises(FormatError, match="a text column's header"):
        TextColumn.load(header, buffers)


@pytest.mark.parametrize("arrow", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str)
@pytest.mark.parametrize("offsets", [(0, 2, 1), (0, 1, 4), (-1, 1, 2), (0, 1 << 30, 3)], ids=str)
def test_arrow_arrays_with_invalid_offsets_are_rejected(arrow: pa.DataType, offsets: tuple[int, ...]) -> None:
    width = np.int64 if "large" in str(arrow) else np.int32
    try:
        array = pa.Array.from_buffers(arrow, 2, [None, pa.py_buffer(np.array(offsets, width)), pa.py_buffer(b"abc")])
    except pa.ArrowInvalid:
        return
    with pytest.raises(FormatError, match="'x' must have strings or bytes"):
        column_from_arrow(array, pa.field("x", arrow))


def test_invalid_utf_8_and_indices_out_of_range_are_rejected() -> None:
    raw = pa.array([b"\xff"], pa.large_binary())
    for array in (
        pa.Array.from_buffers(pa.large_string(), 1, raw.buffers()),
        pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers()),
        pa.DictionaryArray.from_arrays(pa.array([0, 7]), pa.array(["a"]), safe=False),
    ):
        with pytest.raises(FormatError, match="'x' must have strings or bytes"):
            column_from_arrow(array, pa.field("x", array.type))


def test_lists_of_text_with_nulls_are_rejected() -> None:
    array = pa.array([["a", "b"], None], pa.list_(pa.large_string(), 2))
    with pytest.raises(ColumnTypeError, match="'x' must not have nulls except single strings"):
        column_from_arrow(array, pa.field("x", array.type, metadata={DTYPE_KEY: b"text"}))
    assert column_from_arrow(array, pa.field("x", array.type)).kind == "object"


@pytest.mark.parametrize("dtype", ["<U1", "<U2", "S3"])
def test_fixed_width_strings_of_earlier_versions_are_read(dtype: str) -> None:
    values = np.array(["a", "é" if dtype != "S3" else "e", ""], dtype)
    array, metadata = TensorColumn(values).encode()
    column = column_from_arrow(array, pa.field("x", array.type, metadata=metadata))
    assert column.kind == "text"
    assert column.values.tolist() == values.tolist()
    header, buffers = TensorColumn(values).dump()
    assert load_columns([("x", 1, header)], buffers)["x"].equals(column)


@pytest.mark.parametrize("code", [0x110000, 0xFFFFFFFF, 0xD800])
def test_fixed_width_strings_with_invalid_characters_are_rejected(code: int) -> None:
    values = np.array([code], np.uint32).view("<U1")
    array, metadata = TensorColumn(values).encode()
    with pytest.raises(FormatError, match="'x' must have"):
        column_from_arrow(array, pa.field("x", array.type, metadata=metadata))
    header, buffers = TensorColumn(values).dump()
    with pytest.raises(FormatError):
        load_columns([("x", 1, header)], buffers)


def test_declared_text_without_any_value_is_text():
    declared = SampleBatch(t=pa.array([None, None], pa.string()))
    assert declared.column("t").kind == "text"
    undeclared = SampleBatch(t=[None, None])
    assert undeclared.column("t").kind == "object"
    for batch in (declared, undeclared):
        joined = concat_samples([batch, SampleBatch(t=["a", None])])
        assert joined.column("t").kind == "text"
        assert joined["t"].tolist() == [None, None, "a", None]

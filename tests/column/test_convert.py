from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from samplebatch.column import memory
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.convert import as_column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ColumnTypeError
from tests.column.samples import DTYPES, ROW_SHAPES, rows, same
from tests.ids import plain_repr
from tests.optional import torch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row_shape", ROW_SHAPES, ids=str)
@pytest.mark.parametrize("n", [0, 4])
def test_an_array_in_column_layout_is_not_copied(dtype, row_shape, n):
    values = rows(dtype, n, row_shape)
    column = as_column(values, "x")
    assert column.kind == "tensor"
    assert column.values is values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_in_another_layout_is_copied_once(dtype):
    values = rows(dtype, 6, (4,))
    raw = np.frombuffer(b"\0" + values.tobytes(), np.uint8)[1:]
    unaligned = np.ndarray(values.shape, dtype, raw)
    layouts = [
        values[::2],
        values[:, ::2],
        values[::-1],
        np.asfortranarray(values),
        values.astype(dtype.newbyteorder(">")),
    ]
    for layout in (*layouts, unaligned):
        column = as_column(layout, "x")
        assert column.kind == "tensor"
        result = column.values
        assert result.dtype == dtype
        assert result.flags.c_contiguous
        assert result.flags.aligned
        assert result.dtype.isnative
        assert np.array_equal(result, layout, equal_nan=dtype.kind in "fcmM")
        if result is not layout:
            assert result.ctypes.data % memory.ALIGNMENT == 0


def test_read_only_arrays_give_read_only_columns():
    values = np.zeros(3)
    values.flags.writeable = False
    assert as_column(values, "x").values is values


@pytest.mark.parametrize("value", [3, 2.5, "abc", b"abc", None, np.float32(1), {"a": 1}, object()], ids=plain_repr)
def test_single_values_are_rejected_with_the_column_name(value):
    with pytest.raises(ColumnTypeError, match=r"column 'obs\.x' must be an array.*wrap it in a list"):
        as_column(value, "obs.x")


@pytest.mark.parametrize("value", [np.array(3), torch.tensor(3)], ids=["numpy", "torch"])
def test_arrays_without_rows_are_rejected_with_the_column_name(value):
    with pytest.raises(ColumnTypeError, match=r"column 'obs' must have rows, got a 0-d .*reshape\(1\)"):
        as_column(value, "obs")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(2, "f4,i4"), "create one column per field"),
        (np.zeros(2, "V8"), "that columns support"),
        (np.zeros(2, np.longdouble), "that columns support"),
        (np.ma.masked_array([1, 2], [True, False]), "filled"),
        (np.array([[None]], object), "one object per row"),
        (torch.zeros(3).to_sparse(), "dense"),
    ],
    ids=["record", "void", "longdouble", "masked", "objects", "sparse"],
)
def test_unsupported_values_are_rejected_with_the_column_name(value, message):
    with pytest.raises(ColumnTypeError, match=f"column 'obs.*{message}"):
        as_column(value, "obs")


def test_columns_and_their_values_are_returned_unchanged():
    for column in (
        TensorColumn(np.zeros(3)),
        RaggedColumn.from_rows([[1], []], "x"),
        CompressedColumn.compress(TensorColumn(np.zeros(3))),
    ):
        assert as_column(column, "x") is column


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 2], "i8"),
        ([1.0, 2], "f8"),
        ([True, False], "?"),
        ([[1, 2], [3, 4]], "i8"),
        ((np.zeros(3, "f4"), np.ones(3, "f4")), "f4"),
        ([np.datetime64("2024-01-01")], "M8[D]"),
        ([], "f8"),
    ],
    ids=plain_repr,
)
def test_lists_become_arrays(value, dtype):
    column = as_column(value, "x")
    assert column.kind == "tensor"
    assert same(column.values, np.array(value, dtype))


@pytest.mark.parametrize(
    "value",
    [
        [{}, {}],
        [None, {"a": 1}],
        [None, 1.0],
        [1, "a"],
        ["a", b"b"],
        ["\ud800", "b"],
        [["a", 1], ["b", 2]],
        [2**70, 1],
        [object],
    ],
    ids=plain_repr,
)
def test_other_lists_become_objects(value):
    column = as_column(value, "x")
    assert column.kind == "object"
    assert list(column.values) == value


def test_tensors_of_unequal_shape_are_ragged_tensors():
    assert [row.tolist() for row in as_column([torch.zeros(2), torch.ones(1)], "x")] == [[0, 0], [1]]
    column = as_column([torch.ones(1).bfloat16(), torch.ones(2).bfloat16()], "x")
    assert (column.kind, column.dtype) == ("ragged_torch", torch.bfloat16)
    mirrored = [torch.tensor([1j]).conj(), torch.tensor([1j, 2]).conj()]
    assert [row.tolist() for row in as_column(mirrored, "x")] == [[-1j], [-1j, 2]]
    with pytest.raises(
        ColumnTypeError, match=r"column 'obs\.x' must have rows of one number of dimensions, at least 1"
    ):
        as_column([torch.ones(1), torch.ones(2, 2)], "obs.x")
    with pytest.raises(ColumnTypeError, match=r"'x' must have tensors of one dtype on one device, got .*32 on cpu and"):
        as_column([torch.ones(1), torch.ones(2).double()], "x")


def test_rows_of_unequal_shape_are_ragged():
    for value in (
        [[1, 2], [3]],
        [np.zeros(2), np.zeros(3)],
        (np.zeros((1, 2)), np.zeros((2, 2))),
    ):
        column = as_column(value, "x")
        assert column.kind == "ragged"
        assert [row.shape for row in column] == [np.shape(row) for row in value]


def test_unsupported_ragged_rows_are_rejected_with_the_column_name():
    with pytest.raises(ColumnTypeError, match="column 'obs' must have rows"):
        as_column([np.zeros(2), np.zeros((2, 2))], "obs")


def test_tensors_are_preserved():
    tensor = torch.zeros(3, 2)
    assert as_column(tensor, "x").values is tensor
    assert as_column(tensor.bfloat16(), "x").dtype == torch.bfloat16
    stacked = as_column([torch.zeros(2), torch.ones(2)], "x")
    assert stacked.kind == "torch"
    assert stacked.values.tolist() == [[0, 0], [1, 1]]
    assert as_column(torch.arange(6).reshape(2, 3).T, "x").values.is_contiguous()
    assert as_column(torch.tensor([1j]).conj(), "x").to_numpy().tolist() == [-1j]


def test_object_arrays_are_preserved():
    infos = np.array([{}, None], object)
    assert as_column(infos, "infos").values is infos
    words = np.array(["a", "bc"], object)
    assert as_column(words, "names").values is words


@pytest.mark.parametrize(
    "value",
    [
        ["a", "bc"],
        ("a", None, "b"),
        ["a\0", "\0b"],
        [b"a\0", b""],
        [np.str_("a"), "b"],
        [["a", "b"], ["", "c"]],
        np.array(["a", "a\0c", ""]),
        np.array(["漢", "é"], ">U3"),
        np.array([[["a"], ["bc"]], [["d"], [""]]]),
        np.array([b"a", b"\xff\0c"]),
        np.array([[b"a", b""]]),
        np.array(["a", "bc\0"], np.dtypes.StringDType()),
        np.array(["a", None], np.dtypes.StringDType(na_object=None)),
        np.array([["a", "b"], [None, "c"]], object),
        np.array(["a", "b", "c", "d"])[::2],
        np.empty(0, "U3"),
        np.empty((0, 2), "S3"),
        np.empty((2, 0), "U3"),
    ],
    ids=plain_repr,
)
def test_strings_and_bytes_are_text(value):
    column = as_column(value, "x")
    assert column.kind == "text"
    rows = value.tolist() if isinstance(value, np.ndarray) else list(value)
    assert column.values.tolist() == rows
    assert column.values.shape == np.shape(value)
    assert not column.values.flags.writeable


def test_strings_that_utf_8_cannot_encode_become_objects():
    column = as_column(np.array(["a", "\ud800"]), "x")
    assert column.kind == "object"
    assert column.values.tolist() == ["a", "\ud800"]


def test_strings_with_another_missing_value_are_rejected():
    with pytest.raises(ColumnTypeError, match=r"'tag' must have None or NaN for missing strings, got .* object"):
        as_column(np.array(["a"], np.dtypes.StringDType(na_object=object())), "tag")


def test_invalid_characters_are_rejected():
    with pytest.raises(ColumnTypeError, match="'tag' must have Unicode characters"):
        as_column(np.frombuffer(b"\xff" * 8, "<U1"), "tag")


def test_arrow_arrays_are_viewed():
    array = pa.array([1.5, 2.5, 3.5])
    column = as_column(array, "x")
    assert np.shares_memory(column.values, np.frombuffer(array.buffers()[1], np.float64))
    assert as_column(pa.chunked_array([[1, 2], [3]]), "x").values.tolist() == [1, 2, 3]
    assert as_column(pa.array([[1], []]), "x").kind == "ragged"
    words = pa.array(["a", None])
    column = as_column(words, "x")
    assert column.kind == "text"
    assert column.array.buffers()[2].address == words.buffers()[2].address
    with pytest.raises(ColumnTypeError, match="'x' must have no nulls"):
        as_column(pa.array([1, None]), "x")


def test_objects_with_an_array_interface_are_converted_by_it():
    class Frames:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3)

    assert as_column(Frames(), "x").values.tolist() == [0, 1, 2]

    class Tagged(np.ndarray):
        pass

    plain = as_column(np.zeros((2, 3)).view(Tagged), "x").values
    assert type(plain) is np.ndarray

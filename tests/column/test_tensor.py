from __future__ import annotations

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from samplebatch.column import memory
from samplebatch.column.arrow import arrow_field_and_array, column_from_arrow
from samplebatch.column.casting import cast_exactly
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import torch_dtype
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, FormatError
from tests.column.samples import DTYPES, ROW_SHAPES, rows, same, through_ipc

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_shape = pytest.mark.parametrize("row_shape", ROW_SHAPES, ids=str)


@by_dtype
@by_shape
@pytest.mark.parametrize("n", [0, 1, 9])
def test_arrow_shares_memory_both_ways_and_round_trips(dtype, row_shape, n):
    values = rows(dtype, n, row_shape)
    for column, expected in ((TensorColumn(values), values), (TensorColumn(values).slice(n // 3, n), values[n // 3 :])):
        field, array = arrow_field_and_array(column, "x")
        assert len(array) == len(expected)
        assert array.null_count == 0
        back = column_from_arrow(array, field, allow_pickle=False)
        assert back.kind == "tensor"
        assert same(back.values, expected)
        assert np.shares_memory(back.values, values) == bool(expected.nbytes)


@by_dtype
@by_shape
def test_an_arrow_slice_is_a_view_of_its_rows(dtype, row_shape):
    values = rows(dtype, 9, row_shape)
    field, array = arrow_field_and_array(TensorColumn(values), "x")
    back = column_from_arrow(array.slice(2, 4), field, allow_pickle=False)
    assert same(back.values, values[2:6])
    assert np.shares_memory(back.values, values) == bool(values.nbytes)


@by_dtype
@by_shape
@pytest.mark.parametrize("n", [0, 5])
def test_rows_are_restored_from_an_arrow_stream(dtype, row_shape, n):
    values = rows(dtype, n, row_shape)
    back = column_from_arrow(
        *reversed(through_ipc(*arrow_field_and_array(TensorColumn(values), "x"))), allow_pickle=False
    )
    assert same(back.values, values)


@by_dtype
@by_shape
def test_dump_contains_exactly_the_slice_and_load_copies_nothing(dtype, row_shape):
    values = rows(dtype, 9, row_shape)
    header, buffers = TensorColumn(values).slice(2, 5).dump()
    assert sum(memoryview(buffer).nbytes for buffer in buffers) == values[2:5].nbytes
    back = TensorColumn.load(header, buffers, allow_pickle=False)
    assert same(back.values, values[2:5])
    assert np.shares_memory(back.values, values) == bool(values.nbytes)
    assert all(isinstance(part, (str, int, tuple)) for part in header)


@by_dtype
def test_torch_shares_memory_both_ways(dtype):
    values = rows(dtype, 6, (3,))
    column = TensorColumn(values)
    if torch_dtype(dtype) is None:
        with pytest.raises(ColumnTypeError, match=r"torch has no dtype"):
            column.to_torch()
        return
    for part in (column, column.slice(2, 5)):
        tensor = part.to_torch()
        assert tensor.dtype == torch_dtype(dtype)
        assert np.shares_memory(tensor.numpy(), values)
        assert same(tensor.numpy(), part.values)
        tensor.zero_()
    assert not values[2:5].any()


def test_torch_never_aliases_read_only_memory():
    values = np.arange(6.0)
    values.flags.writeable = False
    tensor = TensorColumn(values).to_torch()
    tensor += 1
    assert values.tolist() == [0, 1, 2, 3, 4, 5]


@by_dtype
@by_shape
def test_only_slices_are_views(dtype, row_shape):
    values = rows(dtype, 8, row_shape)
    column = TensorColumn(values)
    assert column.values is values
    assert np.shares_memory(column.slice(1, 4).values, values) == bool(values.nbytes)
    indices = np.array([7, 0, 0, 3])
    for result, expected in (
        (column.take(indices), values[indices]),
        (column.copy(), values),
        (column.slice(2, 7).copy(), values[2:7]),
        (column.take(indices[:0]), values[:0]),
        (
            TensorColumn.concat([column, column.slice(0, 0), column.slice(3, 5)], "x"),
            np.concatenate([values, values[3:5]]),
        ),
    ):
        assert same(result.values, expected)
        assert not np.shares_memory(result.values, values)
        assert result.values.ctypes.data % memory.ALIGNMENT == 0
    assert len(column) == 8
    assert column.dtype == dtype
    assert column.row_shape == row_shape
    assert column.nbytes == values.nbytes


@by_dtype
@by_shape
def test_spread_fills_other_rows_with_zeros(dtype, row_shape):
    values = rows(dtype, 3, row_shape)
    positions = np.array([1, 2, 6])
    expected = np.zeros((7, *row_shape), dtype)
    expected[positions] = values
    assert same(TensorColumn(values).spread(7, positions).values, expected)


@by_dtype
def test_equals_compares_dtype_shape_and_rows_with_equal_nan(dtype):
    values = rows(dtype, 6, (2,))
    column = TensorColumn(values)
    assert column.equals(column.copy())
    assert not column.equals(column.slice(0, 5))
    assert not column.equals(TensorColumn(values.reshape(6, 1, 2)))
    if dtype.kind == "f":
        with_nan = values.copy()
        with_nan[0] = np.nan
        assert TensorColumn(with_nan).equals(TensorColumn(with_nan.copy()))
    if dtype.kind in "iu":
        changed = values.copy()
        changed[3, 1] ^= 1
        assert not column.equals(TensorColumn(changed))


@pytest.mark.parametrize(
    ("left", "right", "joined"),
    [
        ("i4", "i8", "i8"),
        ("f4", "f8", "f8"),
        ("u1", "i2", "i2"),
        ("?", "i4", "i4"),
        ("f8", "i4", "f8"),
        ("f4", "i8", None),
        ("f8", "i8", None),
        ("i1", "u1", None),
        ("M8[s]", "M8[ns]", None),
        ("U3", "U5", "U5"),
        ("U3", "i8", None),
        ("M8[s]", "i8", None),
        ("c8", "f4", "c8"),
        ("c8", "f8", None),
    ],
)
def test_concat_widens_only_without_loss(left, right, joined):
    a, b = rows(left, 4), rows(right, 3)
    for pair in ((a, b), (b, a)):
        columns = [TensorColumn(part) for part in pair]
        if joined is None:
            with pytest.raises(ColumnMismatchError, match=r"column 'act\.x' must have one dtype"):
                TensorColumn.concat(columns, "act.x")
        else:
            out = TensorColumn.concat(columns, "act.x").values
            assert out.dtype == np.dtype(joined)
            assert np.array_equal(out, np.concatenate([part.astype(joined) for part in pair]), equal_nan=left != "U3")


def test_concat_rejects_different_row_shapes():
    with pytest.raises(ColumnMismatchError, match=r"'obs' must have one row shape to be concatenated, got \(3,\) and"):
        TensorColumn.concat([TensorColumn(np.zeros((2, 3))), TensorColumn(np.zeros((2, 4)))], "obs")


@pytest.mark.parametrize(
    ("header", "buffers"),
    [
        (("tensor", "<f8", (10,)), [bytes(79)]),
        (("tensor", "<f8", (-1,)), [bytes(80)]),
        (("tensor", "<f8", ("a",)), [bytes(80)]),
        (("tensor", "O", (1,)), [bytes(8)]),
        (("tensor", ">f8", (1,)), [bytes(8)]),
        (("tensor", "nonsense", (1,)), [bytes(8)]),
        (("tensor", "<f8", (1,)), []),
        (("tensor", "<f8", (1,)), [bytes(8), bytes(8)]),
        (("tensor", "<f8"), [bytes(8)]),
        (("tensor", "<f8", (1 << 62, 1 << 62)), [bytes(8)]),
    ],
)
def test_a_damaged_header_is_rejected(header, buffers):
    with pytest.raises(FormatError):
        TensorColumn.load(header, buffers, allow_pickle=False)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind in "biu" or d in ("f4", "f8", "M8[us]")], ids=str)
def test_polars_and_duckdb_read_the_same_numbers(dtype):
    values = rows(dtype, 5)
    array = TensorColumn(values).to_arrow()
    table = pa.table({"x": array.storage if isinstance(array, pa.ExtensionArray) else array})
    if dtype.kind == "M":
        values[0] = 7
    expected = [None if v != v else v for v in values.astype("i1" if dtype.kind == "b" else dtype).tolist()]
    assert [None if v != v else v for v in pl.from_arrow(table)["x"].to_list()] == expected
    assert [None if v[0] != v[0] else v[0] for v in duckdb.from_arrow(table).fetchall()] == expected


@pytest.mark.parametrize("row_shape", [(3,), (2, 3)], ids=str)
def test_polars_and_duckdb_read_rows_of_numbers(row_shape):
    values = rows("i4", 5, row_shape)
    table = pa.table({"x": TensorColumn(values).to_arrow()})
    assert np.array_equal(pl.from_arrow(table)["x"].to_list(), values.reshape(5, -1))
    assert np.array_equal([list(row[0]) for row in duckdb.from_arrow(table).fetchall()], values.reshape(5, -1))


def test_foreign_arrow_is_read():
    nested = pa.array([[[1, 2], [3, 4]]] * 3, pa.list_(pa.list_(pa.int16(), 2), 2))
    assert TensorColumn.from_arrow(nested, None, "x").values.shape == (3, 2, 2)
    assert TensorColumn.from_arrow(pa.array([True, False, True])[1:], None, "x").values.tolist() == [False, True]
    dates = TensorColumn.from_arrow(pa.array([1, 2], pa.date32()), None, "x").values
    assert dates.tolist() == np.array([1, 2], "M8[D]").tolist()
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(2, 2, 3).transpose(0, 2, 1))
    assert np.array_equal(
        TensorColumn.from_arrow(tensors, None, "x").values, np.arange(12.0).reshape(2, 2, 3).transpose(0, 2, 1)
    )


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None]),
        pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
        pa.array([[1, None]], pa.list_(pa.int64(), 2)),
        pa.array(["a"]),
        pa.array([1], pa.timestamp("ns", "UTC")),
    ],
    ids=lambda array: str(array.type),
)
def test_arrow_data_that_cannot_be_viewed_is_rejected_with_the_name(array):
    with pytest.raises(ColumnTypeError, match="'obs'"):
        TensorColumn.from_arrow(array, None, "obs")


@pytest.mark.parametrize("dtype_name", ["<U2", "<c8", "<M8[D]", "|b1", "|S9", "<i4"])
def test_a_dtype_that_contradicts_the_arrow_type_is_rejected(dtype_name):
    with pytest.raises(ColumnTypeError):
        TensorColumn.from_arrow(
            pa.array([1.5, 2.5], pa.float32() if dtype_name != "<c8" else pa.float64()), dtype_name, "x"
        )


@pytest.mark.parametrize("count", [3, 400_000])
def test_signaling_nans_are_cast_without_a_warning(count: int) -> None:
    """NumPy warns about each signaling NaN; the second size is copied by two threads."""
    signaling = TensorColumn(np.full(count, 0x7F800001, np.uint32).view(np.float32))
    joined = TensorColumn.concat([signaling, TensorColumn(np.zeros(1))], "a").values
    assert joined.dtype == np.float64
    assert np.isnan(joined).sum() == count
    cast = cast_exactly(signaling.values, np.dtype("f8"))
    assert cast is not None
    assert np.isnan(cast).all()

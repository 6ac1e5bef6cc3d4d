from __future__ import annotations

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch.column import memory
from samplebatch.column.arrow import arrow_field_and_array, column_from_arrow
from samplebatch.column.convert import as_column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError, FormatError, RowIndexError
from tests.column.samples import ELEMENTS, rows, same, through_ipc
from tests.optional import torch

by_dtype = pytest.mark.parametrize("dtype", ELEMENTS, ids=str)


def ragged(dtype="f4", lengths=(2, 0, 5, 1, 0, 3), trailing=(), seed=0):
    """Return rows of the given lengths, and their column."""
    result = [rows(dtype, n, trailing, seed + i) for i, n in enumerate(lengths)]
    return result, RaggedColumn.from_rows(result, "x")


def agree(column, expected):
    """Compare a column with a list of arrays through every access method."""
    assert len(column) == len(expected)
    assert all(map(same, column, expected))
    assert all(same(column[i], row) for i, row in enumerate(expected))
    listed = np.asarray(column)
    assert listed.dtype == object
    assert listed.shape == (len(expected),)
    assert all(map(same, listed, expected))
    assert column.values is column


@st.composite
def lists_of_rows(draw, least=0):
    dtype = draw(st.sampled_from(ELEMENTS))
    trailing = draw(st.sampled_from([(), (2,), (3, 1), (0,)]))
    lengths = draw(st.lists(st.integers(0, 6) | st.just(400), min_size=least, max_size=8))
    return ragged(dtype, lengths, trailing, draw(st.integers(0, 100)))


@given(lists_of_rows(), st.data())
def test_every_operation_agrees_with_a_list_of_arrays(result, data):
    expected, column = result
    n = len(expected)
    agree(column, expected)
    for _ in range(3):
        operation = data.draw(st.sampled_from(["slice", "take", "copy", "concat", "spread", "dump", "arrow"]))
        n = len(expected)
        if operation == "slice":
            start = data.draw(st.integers(0, n))
            stop = data.draw(st.integers(start, n))
            expected, column = expected[start:stop], column.slice(start, stop)
        elif operation == "take" and n:
            indices = data.draw(st.lists(st.integers(0, n - 1), max_size=8))
            expected, column = [expected[i] for i in indices], column.take(np.array(indices, np.intp))
        elif operation == "copy":
            column = column.copy()
        elif operation == "concat":
            expected, column = expected * 2, RaggedColumn.concat([column, column], "x")
        elif operation == "spread":
            positions = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=n + 3, max_size=n + 3)))[:n]
            expected, column = expected[: len(positions)], column.slice(0, len(positions))
            empty = np.empty((0,) * column.ndim, column.dtype)
            spread = [empty] * (n + 3)
            for position, row in zip(positions, expected, strict=True):
                spread[position] = row
            expected, column = spread, column.spread(n + 3, positions)
        elif operation == "dump":
            header, buffers = column.dump()
            column = RaggedColumn.load(header, buffers, allow_pickle=False)
        else:
            field, array = arrow_field_and_array(column, "x")
            column = column_from_arrow(array, field, allow_pickle=False)
        agree(column, expected)


@by_dtype
@pytest.mark.parametrize("trailing", [(), (2,)], ids=str)
def test_slices_and_rows_are_views(dtype, trailing):
    _, column = ragged(dtype, trailing=trailing)
    part = column[2:5]
    assert part.elements is column.elements
    assert part.offsets.base is not None
    assert np.shares_memory(part.offsets, column.offsets)
    assert np.shares_memory(part[0], column.elements)
    part[0][...] = np.zeros((), dtype)
    assert same(column[2], np.zeros((5, *trailing), dtype))


@by_dtype
@pytest.mark.parametrize("trailing", [(), (2,)], ids=str)
def test_arrow_shares_memory_both_ways(dtype, trailing):
    expected, column = ragged(dtype, trailing=trailing)
    for part, part_expected in ((column, expected), (column.slice(2, 4), expected[2:4])):
        field, array = arrow_field_and_array(part, "x")
        array.validate(full=True)
        back = column_from_arrow(array, field, allow_pickle=False)
        assert back.kind == "ragged"
        assert np.shares_memory(back.elements, column.elements)
        # Whoever else has the memory must not move rows.
        assert not np.shares_memory(back.offsets, column.offsets)
        agree(back, part_expected)
        agree(column_from_arrow(array.slice(1), field, allow_pickle=False), part_expected[1:])


@by_dtype
@pytest.mark.parametrize("trailing", [(), (2,), (1, 3)], ids=str)
def test_rows_are_restored_from_an_arrow_stream(dtype, trailing):
    expected, column = ragged(dtype, trailing=trailing)
    for start, stop in ((0, 6), (2, 5), (6, 6)):
        field, array = through_ipc(*arrow_field_and_array(column.slice(start, stop), "x"))
        agree(column_from_arrow(array, field, allow_pickle=False), expected[start:stop])


@by_dtype
def test_dump_contains_exactly_the_slice(dtype):
    expected, column = ragged(dtype, trailing=(2,))
    header, buffers = column.slice(2, 4).dump()
    elements, offsets, shapes = (memoryview(buffer).nbytes for buffer in buffers)
    assert elements == sum(row.nbytes for row in expected[2:4])
    assert (offsets, shapes) == (3 * 8, 2 * 2 * 8)
    back = RaggedColumn.load(header, buffers, allow_pickle=False)
    assert np.shares_memory(back.elements, column.elements)
    agree(back, expected[2:4])


def test_copies_are_aligned_and_share_no_memory():
    _, column = ragged()
    for result in (
        column.take(np.array([5, 2])),
        column.copy(),
        column.slice(2, 4).copy(),
        column.spread(9, np.arange(6)),
    ):
        assert not np.shares_memory(result.elements, column.elements)
        assert not np.shares_memory(result.offsets, column.offsets)
        assert result.elements.ctypes.data % memory.ALIGNMENT == 0


@pytest.mark.parametrize("length", [3, 1000])
def test_take_gathers_short_and_long_rows(length):
    expected, column = ragged("u1", [length + i % 7 for i in range(50)])
    indices = np.random.default_rng(0).integers(0, 50, 80)
    agree(column.take(indices), [expected[i] for i in indices])


@pytest.mark.parametrize("offsets", [[0, 4, 9], [-1, 2, 3], [3, 1, 2]])
def test_take_reads_no_memory_outside_of_the_elements(offsets):
    column = RaggedColumn(np.arange(3), np.array(offsets))
    with pytest.raises(FormatError, match="rows must be within the 3 elements of their column"):
        column.take(np.array([0, 1]))


def test_keys():
    expected, column = ragged()
    agree(column[::-2], expected[::-2])
    agree(column[[4, -1]], [expected[4], expected[5]])
    agree(column[np.array([True, False] * 3)], expected[::2])
    agree(column[3:1], [])
    assert same(column[-1], expected[5])
    for key in (6, -7, [0, 6], "a", 1.5, [True], None, np.array([0.5]), True):
        with pytest.raises(RowIndexError):
            column[key]


def test_from_rows_accepts_lists_without_loss():
    column = RaggedColumn.from_rows([[1, 2], [], [2**53 + 1]], "x")
    assert column.dtype == np.int64
    assert [row.tolist() for row in column] == [[1, 2], [], [2**53 + 1]]
    assert RaggedColumn.from_rows([[1], [0.5, 2]], "x").dtype == np.float64
    assert RaggedColumn.from_rows([[], []], "x").dtype == np.float64
    assert RaggedColumn.from_rows([np.zeros(2, ">f4"), np.zeros(1, "f4")], "x").dtype == np.dtype("f4")
    assert RaggedColumn.from_rows([np.zeros(2, "f4"), np.zeros(1, "f8")], "x").dtype == np.dtype("f8")
    strided = np.arange(20.0).reshape(4, 5)[:, ::2]
    agree(RaggedColumn.from_rows([strided, strided[:1]], "x"), [strided.copy(), strided[:1].copy()])


@pytest.mark.parametrize(
    ("given_rows", "message"),
    [
        ([np.zeros(2), np.zeros((2, 2))], "one number of dimensions, got 1 and 2"),
        ([np.zeros(2), 3.0], "got a single float in row 1"),
        ([[1, 2], [[1], [2, 3]]], "got another in row 1"),
        ([np.zeros(1, "f4"), np.zeros(1, "i8")], "got float32 and int64; convert them first"),
        ([[2**53 + 1], [0.5]], "got int64 and float64"),
        ([[object()], []], "got another in row 0"),
        ([["a"], [1]], "one dtype"),
    ],
)
def test_from_rows_errors_contain_the_column_name(given_rows, message):
    with pytest.raises(ColumnTypeError, match=rf"column 'obs\.lidar' must have rows.*{message}"):
        RaggedColumn.from_rows(given_rows, "obs.lidar")


def test_concat_rules():
    a, b = ragged("f4", [1, 2])[1], ragged("f8", [3])[1]
    assert RaggedColumn.concat([a, b], "x").dtype == np.float64
    with pytest.raises(ColumnMismatchError, match="'x' must have one dtype"):
        RaggedColumn.concat([a, ragged("i8", [3])[1]], "x")
    with pytest.raises(
        ColumnMismatchError, match="'x' must have rows of one number of dimensions to be joined, got 1 and 2"
    ):
        RaggedColumn.concat([a, ragged("f4", [3], (2,))[1]], "x")


def test_equality():
    _, column = ragged("f4", seed=3)
    assert column.equals(column.copy())
    assert column.slice(1, 4).equals(column.slice(1, 4).copy())
    assert not column.equals(column.slice(0, 5))
    assert not column.equals(ragged("f8", seed=3)[1])
    assert not column.equals(TensorColumn(np.zeros(6)))
    flat = RaggedColumn(np.arange(4), np.array([0, 1, 4]))
    assert not flat.equals(RaggedColumn(np.arange(4), np.array([0, 2, 4])))
    wide = RaggedColumn(np.arange(6), np.array([0, 6]), np.array([[2, 3]]))
    assert not wide.equals(RaggedColumn(np.arange(6), np.array([0, 6]), np.array([[3, 2]])))
    assert RaggedColumn(np.array([np.nan]), np.array([0, 1])).equals(RaggedColumn(np.array([np.nan]), np.array([0, 1])))


def test_sizes():
    _, column = ragged("f4", [2, 3], (5,))
    assert (column.ndim, column.row_shape, column.dtype) == (2, (None, None), np.float32)
    assert column.nbytes == 25 * 4 + 3 * 8 + 2 * 2 * 8
    assert column.slice(1, 2).nbytes == 15 * 4 + 2 * 8 + 2 * 8
    assert repr(column) == "RaggedColumn(2 rows of float32, row shape (None, None))"


@pytest.mark.parametrize("trailing", [(), (2,)], ids=str)
def test_torch_nests_and_shares_memory(trailing):
    expected, column = ragged("f4", (2, 4, 1), trailing)
    nested = column.to_torch()
    assert nested.is_nested
    assert nested.layout == torch.jagged
    assert all(same(part.numpy(), row) for part, row in zip(nested.unbind(), expected, strict=True))
    assert np.shares_memory(nested.values().numpy(), column.elements)
    parts = column.slice(1, 3).to_torch().unbind()
    assert all(same(part.numpy(), row) for part, row in zip(parts, expected[1:], strict=True))


def test_torch_rejects_unsupported_nested_tensors():
    varying = RaggedColumn.from_rows([np.zeros((2, 3)), np.zeros((2, 4))], "x")
    with pytest.raises(ColumnTypeError, match="only in the first extent"):
        varying.to_torch()
    with pytest.raises(ColumnTypeError, match="torch has no dtype"):
        ragged("M8[s]")[1].to_torch()


def test_polars_and_duckdb_read_lists():
    expected, column = ragged("i4")
    table = pa.table({"x": column.to_arrow()})
    lists = [row.tolist() for row in expected]
    assert pl.from_arrow(table)["x"].to_list() == lists
    assert [row[0] for row in duckdb.from_arrow(table).fetchall()] == lists
    expected, column = ragged("i8", (1, 2), (3,))
    table = pa.table({"x": column.to_arrow()})
    structs = [{"data": row.ravel().tolist(), "shape": list(row.shape)} for row in expected]
    assert pl.from_arrow(table)["x"].to_list() == structs
    read = [row[0] for row in duckdb.from_arrow(table).fetchall()]
    assert [{"data": list(row["data"]), "shape": list(row["shape"])} for row in read] == structs


def test_foreign_arrow_lists_are_read():
    assert RaggedColumn.reads(pa.list_(pa.bool_()))
    column = RaggedColumn.from_arrow(pa.array([[9], [1, 2], [3]], pa.list_(pa.int32()))[1:], None, "x")
    agree(column, [np.array([1, 2], "i4"), np.array([3], "i4")])
    points = pa.array([[[1, 2], [3, 4]], []], pa.list_(pa.list_(pa.int64(), 2)))
    column = RaggedColumn.from_arrow(points, None, "x")
    agree(column, [np.array([[1, 2], [3, 4]]), np.zeros((0, 2), "i8")])
    agree(RaggedColumn.from_arrow(points[1:], None, "x"), [np.zeros((0, 2), "i8")])
    assert not RaggedColumn.reads(pa.struct({"data": pa.list_(pa.int8()), "shape": pa.list_(pa.int64())}))
    assert not RaggedColumn.reads(pa.struct({"shape": pa.list_(pa.int64(), 2), "data": pa.list_(pa.int8())}))


def test_arrow_with_nulls_is_rejected_with_the_column_name():
    for array in (
        pa.array([[1], None]),
        pa.array([[1], [None]]),
        pa.array([None, {"data": [1.0], "shape": [1, 1]}], ragged("f8", [1], (1,))[1].to_arrow().type),
        pa.array([{"data": None, "shape": [1, 1]}], ragged("f8", [1], (1,))[1].to_arrow().type),
        pa.array([{"data": [1.0], "shape": None}], ragged("f8", [1], (1,))[1].to_arrow().type),
    ):
        with pytest.raises(ColumnTypeError, match="'obs' must have no nulls"):
            RaggedColumn.from_arrow(array, None, "obs")


def lists_over(offsets, elements=4):
    buffer = pa.py_buffer(np.array(offsets, "i8"))
    values = pa.array(range(elements), pa.int64())
    return pa.Array.from_buffers(pa.large_list(pa.int64()), len(offsets) - 1, [None, buffer], children=[values])


@pytest.mark.parametrize("offsets", [[0, 5], [-1, 2], [0, 3, 2, 4], [0, 2**62, 4], [3, 2]])
def test_damaged_offsets_are_rejected(offsets):
    if 0 <= offsets[0] <= offsets[-1] <= 4:
        # The others pyarrow refuses to make at all.
        with pytest.raises(FormatError, match="column 'obs' must have non-decreasing offsets"):
            RaggedColumn.from_arrow(lists_over(offsets), None, "obs")
    buffers = [np.arange(4), np.array(offsets)]
    with pytest.raises(FormatError):
        RaggedColumn.load(("ragged", "<i8", len(offsets) - 1, 1), buffers, allow_pickle=False)


@pytest.mark.parametrize("shape", [[2, 3], [-2, -2], [2**32, 2**32], [4, 2], [2**62, 4]])
def test_damaged_shapes_are_rejected(shape):
    buffers = [np.arange(4), np.array([0, 4]), np.array(shape)]
    with pytest.raises(FormatError, match="shapes"):
        RaggedColumn.load(("ragged", "<i8", 1, 2), buffers, allow_pickle=False)
    whole_wrap = [np.arange(0), np.array([0, 0]), np.array([2**32, 2**32])]
    with pytest.raises(FormatError, match="shapes"):
        RaggedColumn.load(("ragged", "<i8", 1, 2), whole_wrap, allow_pickle=False)


@pytest.mark.parametrize(
    "header",
    [
        ("ragged", "<i8", 2, 1),
        ("ragged", "<i8", -1, 1),
        ("ragged", "<i8", -2, 1),
        ("ragged", "<i8", 1, 2),
        ("ragged", "<i8", 1, 0),
        ("ragged", "<i8", "1", 1),
        ("ragged", "O", 1, 1),
        ("ragged", "<i4x", 1, 1),
        ("ragged",),
    ],
)
def test_a_damaged_header_is_rejected(header):
    with pytest.raises(FormatError):
        RaggedColumn.load(header, [np.arange(4), np.array([0, 4])], allow_pickle=False)


def test_numpys_copy_protocol():
    _, column = ragged()
    with pytest.raises(ValueError, match="must be copied"):
        np.asarray(column, copy=False)
    equal = RaggedColumn.from_rows([[1, 2], [3, 4]], "x")
    assert np.asarray(equal).shape == (2,)


# -- padding ----------------------------------------------------------------------------------------------------------


def test_padded_rows_have_the_largest_extents() -> None:
    column = RaggedColumn.from_rows([[1, 2, 3], [4], [], [5, 6]], "a")
    assert column.pad().tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0], [5, 6, 0]]
    assert column[1:].pad(-1).tolist() == [[4, -1], [-1, -1], [5, 6]]
    assert column.take(np.array([3, 3])).pad().tolist() == [[5, 6], [5, 6]]
    assert column[:0].pad().shape == (0, 0)


def test_rows_of_more_dimensions_are_padded_along_each() -> None:
    rows = [np.arange(6.0).reshape(2, 3), np.arange(4.0).reshape(4, 1), np.zeros((0, 5))]
    padded = RaggedColumn.from_rows(rows, "a").pad(np.nan)
    assert padded.shape == (3, 4, 5)
    assert padded.dtype == np.float64
    for row, actual in zip(rows, padded, strict=True):
        assert actual[: row.shape[0], : row.shape[1]].tolist() == row.tolist()
        assert np.isnan(actual).sum() == 20 - row.size


def test_rows_are_written_by_rows_of_the_same_shape():
    for make in (lambda rows: RaggedColumn.from_rows(rows), lambda rows: as_column(list(map(torch.tensor, rows)), "x")):
        column = make([[1, 2], [3], [4, 5]])
        column[0] = [7, 8]
        column[[1, 2]] = [[9], [1, 1]]
        column[-1:] = 0
        assert [row.tolist() for row in column] == [[7, 8], [9], [0, 0]]
        with pytest.raises(
            ColumnMismatchError, match=r"row 1 must keep its shape \(1,\), got \(2,\); .* assign all rows"
        ):
            column[1] = [1, 2]
        with pytest.raises(ColumnMismatchError):
            column[0] = [0.5, 1]
        with pytest.raises(ColumnLengthError, match="rows must be overwritten by 3 rows, got 2"):
            column[:] = [[1, 2], [3]]
        with pytest.raises(ColumnMismatchError):
            # Nothing is half written.
            column[:2] = [[5, 5], [5, 5]]
        with pytest.raises(RowIndexError):
            column[3] = [1]
        assert [row.tolist() for row in column] == [[7, 8], [9], [0, 0]]


def test_rows_are_replaced_by_rows_of_any_length():
    column = RaggedColumn.from_rows([[1, 2], [3], [4]])
    replaced = column.replace(np.array([2, 0]), RaggedColumn.from_rows([[], [5, 6, 7]]), "x")
    assert [row.tolist() for row in replaced] == [[5, 6, 7], [3], []]
    assert column.lengths.tolist() == [2, 1, 1]

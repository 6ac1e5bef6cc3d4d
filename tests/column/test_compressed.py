from __future__ import annotations

import lz4.block
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch.column import compressed
from samplebatch.column.arrow import arrow_field_and_array, column_from_arrow
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ColumnMismatchError, CompressedColumnError, FormatError, RowIndexError
from tests.column.samples import DTYPES, ROW_SHAPES, rows, same

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def agree(column, expected):
    assert len(column) == len(expected)
    assert column.dtype == expected.dtype
    assert column.row_shape == expected.shape[1:]
    assert column.uncompressed_nbytes == expected.nbytes
    assert same(column.decompress().values, expected)
    assert same(np.asarray(column), expected)
    assert len(list(column)) == len(expected)
    assert all(map(same, map(np.asarray, column), map(np.asarray, expected)))
    assert column.values is column


def reloaded(column):
    header, buffers = column.dump()
    return CompressedColumn.load(header, [bytes(buffer) for buffer in buffers], allow_pickle=False)


@by_dtype
@pytest.mark.parametrize("row_shape", ROW_SHAPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 10])
def test_rows_round_trip(dtype, row_shape, n):
    values = rows(dtype, n, row_shape)
    tensor = TensorColumn(values)
    for column in (
        CompressedColumn.compress(tensor),
        CompressedColumn.compress(tensor, bulk=True),
        CompressedColumn.compress(tensor, 3),
    ):
        agree(column, values)
        agree(reloaded(column), values)
        assert not np.shares_memory(column.decompress().values, values)
        assert column.decompress().values.flags.writeable
    assert len(CompressedColumn.compress(tensor, 3).blocks) == (-(-n // 3) if values.nbytes else 0)


@st.composite
def columns(draw):
    dtype = draw(st.sampled_from(DTYPES))
    row_shape = draw(st.sampled_from(ROW_SHAPES))
    values = rows(dtype, draw(st.integers(0, 12)), row_shape, draw(st.integers(0, 9)))
    return values, CompressedColumn.compress(TensorColumn(values), draw(st.none() | st.integers(1, 5)))


@given(columns(), st.data())
def test_every_operation_agrees_with_an_array(result, data):
    values, column = result
    for _ in range(4):
        n = len(values)
        operation = data.draw(st.sampled_from(["slice", "take", "copy", "concat", "spread", "load", "row"]))
        if operation == "slice":
            start = data.draw(st.integers(0, n))
            stop = data.draw(st.integers(start, n))
            values, column = values[start:stop], column.slice(start, stop)
        elif operation == "take" and n:
            indices = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=9)), np.intp)
            assert same(column.take(indices).values, values[indices])
        elif operation == "copy":
            column = column.copy()
        elif operation == "concat":
            other = column.slice(n // 2, n)
            values, column = np.concatenate([values, values[n // 2 :]]), CompressedColumn.concat([column, other], "x")
        elif operation == "spread":
            positions = np.arange(n) * 2
            expected = np.zeros((2 * n + 1, *values.shape[1:]), values.dtype)
            expected[positions] = values
            assert same(column.spread(2 * n + 1, positions).values, expected)
        elif operation == "load":
            column = reloaded(column)
        elif n:
            row = data.draw(st.integers(-n, n - 1))
            assert same(np.asarray(column[row]), np.asarray(values[row]))
        agree(column, values)


def test_blocks_of_about_64_kib_contain_complete_rows():
    for row_nbytes, n in ((68, 1000), (68, 100_000), (28_224, 128), (100_000, 4), (1, 200_000)):
        column = CompressedColumn.compress(TensorColumn(np.zeros((n, row_nbytes), "u1")))
        assert sum(column.rows) == n
        assert all(item * row_nbytes <= 1.6 * compressed.BLOCK_NBYTES or item == 1 for item in column.rows)
        assert max(column.rows) - min(column.rows[:-1], default=max(column.rows)) == 0
    assert len(CompressedColumn.compress(TensorColumn(np.zeros((1000, 17), "f4"))).blocks) == 1


def test_a_row_is_read_without_the_other_blocks():
    values = rows("u1", 64, (4096,))
    column = CompressedColumn.compress(TensorColumn(values))
    assert len(column.blocks) > 2
    damaged = [b"\xff" * len(block) for block in column.blocks]
    damaged[1] = column.blocks[1]
    partly = CompressedColumn(damaged, column.rows, column.skips, column.bounds, column.dtype, (4096,), trusted=False)
    start, stop = column.bounds[1:3]
    assert same(partly[start], values[start])
    assert same(partly[start:stop].decompress().values, values[start:stop])
    assert same(partly.take(np.array([stop - 1, start])).values, values[[stop - 1, start]])
    with pytest.raises(CompressedColumnError):
        partly[0]


def test_small_rows_do_not_grow():
    tensor = TensorColumn(rows("f4", 1000, (17,)))
    assert CompressedColumn.compress(tensor).nbytes < 1.01 * tensor.nbytes


def test_slices_and_dumps_contain_only_the_blocks_of_their_rows():
    column = CompressedColumn.compress(TensorColumn(rows("u1", 100, (10,))), 10)
    part = column[25:45]
    assert part.blocks == column.blocks[2:5]
    assert part.nbytes == sum(map(len, column.blocks[2:5]))
    _header, buffers = part.dump()
    assert buffers == column.blocks[2:5]
    assert len(column[20:30].blocks) == 1
    assert column[50:50].blocks == []


def test_concat_joins_blocks_without_decompressing():
    a = CompressedColumn.compress(TensorColumn(rows("f4", 10, (3,))), 4)
    b = CompressedColumn.compress(TensorColumn(rows("f4", 5, (3,), 1)), 2)
    joined = CompressedColumn.concat([a[3:9], a[:0], b[1:]], "x")
    assert [id(block) for block in joined.blocks] == [id(block) for block in (*a.blocks[0:3], *b.blocks)]
    agree(joined, np.concatenate([np.asarray(a)[3:9], np.asarray(b)[1:]]))


def test_concat_of_other_dtypes_and_shapes():
    narrow = CompressedColumn.compress(TensorColumn(rows("i2", 3)))
    wide = CompressedColumn.compress(TensorColumn(rows("i4", 3)))
    joined = CompressedColumn.concat([narrow, wide], "x")
    assert joined.dtype == np.int32
    assert np.array_equal(joined.to_numpy(), [*narrow, *wide])
    with pytest.raises(ColumnMismatchError, match="'obs' must have one dtype"):
        CompressedColumn.concat([wide, CompressedColumn.compress(TensorColumn(rows("f4", 3)))], "obs")
    with pytest.raises(ColumnMismatchError, match="'obs' must have one row shape"):
        CompressedColumn.concat([wide, CompressedColumn.compress(TensorColumn(rows("i4", 3, (2,))))], "obs")


def test_equality_compares_rows_not_blocks():
    tensor = TensorColumn(rows("f4", 10, (3,)))
    column = CompressedColumn.compress(tensor, 4)
    assert column.equals(CompressedColumn.compress(tensor, bulk=True))
    assert not column.equals(tensor)
    assert not column.equals(column.slice(0, 9))
    assert not column.equals(CompressedColumn.compress(TensorColumn(rows("f4", 10, (3,), 1))))
    assert not column.equals(CompressedColumn.compress(TensorColumn(rows("f8", 10, (3,)))))


@by_dtype
def test_arrow_and_torch_get_the_decompressed_rows(dtype):
    values = rows(dtype, 5, (2,))
    column = CompressedColumn.compress(TensorColumn(values))
    field, array = arrow_field_and_array(column, "x")
    back = column_from_arrow(array, field, allow_pickle=False)
    assert back.kind == "tensor"
    assert same(back.values, values)
    if dtype.kind in "biuf":
        assert same(column.to_torch().numpy(), values)


def test_foreign_blocks_are_copied():
    column = CompressedColumn.compress(TensorColumn(np.arange(100)), 50)
    header, buffers = column.dump()
    shared = [bytearray(buffer) for buffer in buffers]
    loaded = CompressedColumn.load(header, shared, allow_pickle=False)
    copied = loaded.copy()
    for buffer in shared:
        buffer[:] = bytes(len(buffer))
    agree(copied, np.arange(100))
    with pytest.raises(CompressedColumnError):
        loaded.decompress()


@pytest.mark.parametrize("key", [10, -11, [0, 10], "a", None])
def test_invalid_keys_are_rejected(key):
    with pytest.raises(RowIndexError):
        CompressedColumn.compress(TensorColumn(np.arange(10)))[key]


def test_keys():
    values = rows("i8", 20, (2,))
    column = CompressedColumn.compress(TensorColumn(values), 3)
    for key in (slice(2, 9), slice(9, 2), slice(None, None, -3), [3, -1, 3], values[:, 0] > 0, slice(None)):
        assert same(np.asarray(column[key]), values[key])
    with pytest.raises(ValueError, match="must be copied"):
        np.asarray(column, copy=False)
    assert repr(column).startswith("CompressedColumn(20 rows of int64, row shape (2,), ")


def header_of(column, **changes):
    names = ("kind", "dtype", "row_shape", "rows", "skips", "bounds")
    actual = dict(zip(names, column.dump()[0], strict=True)) | changes
    return tuple(actual.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "O"},
        {"dtype": ">i8"},
        {"row_shape": (-1,)},
        {"row_shape": (1 << 40,)},
        {"row_shape": 3},
        {"row_shape": (0,)},
        {"rows": (4, 4)},
        {"rows": (4, 4, 1)},
        {"rows": (4, 4, -2)},
        {"rows": (4, 4, 1 << 60)},
        {"rows": (4, 4, 2.0)},
        {"skips": (0, 1, 0)},
        {"skips": (0, 0, -1)},
        {"skips": (0, 0)},
        {"bounds": (0, 4, 8)},
        {"bounds": (1, 4, 8, 10)},
        {"bounds": (0, 4, 4, 10)},
        {"bounds": (0, 8, 4, 10)},
        {"bounds": (0, 4, 8, 11)},
        {"bounds": ()},
        {"bounds": None},
        {"kind": "compressed", "extra": 1},
    ],
)
def test_a_header_that_contradicts_its_blocks_is_rejected(changes):
    column = CompressedColumn.compress(TensorColumn(np.arange(10)), 4)
    header = header_of(column, **changes)
    with pytest.raises(FormatError):
        CompressedColumn.load(header, column.blocks, allow_pickle=False)


@pytest.mark.parametrize(
    "header",
    [
        ("compressed", "<i8", (), (), (), (0, 5)),
        ("compressed", "<i8", (), (), (), (0,)),
        ("compressed", "<i8", (), (), (), ()),
        ("compressed", "<i8", (), (), (0,), (0, 0)),
        ("compressed", "<i8", (0,), (), (), (0, -5)),
    ],
)
def test_a_header_without_blocks_is_checked(header):
    with pytest.raises(FormatError):
        CompressedColumn.load(header, [], allow_pickle=False)


def block_of(nbytes):
    return lz4.block.compress(bytes(nbytes), store_size=False)


@pytest.mark.parametrize(
    "damaged",
    [
        block_of(79),
        block_of(81),
        block_of(0),
        block_of(80)[:-1],
        block_of(80) + b"\0",
        b"\xff" * 20,
        bytes(20),
    ],
    ids=["short", "long", "empty", "cut", "more", "garbage", "zeros"],
)
def test_a_damaged_block_is_rejected_when_it_is_read(damaged):
    header = ("compressed", "<i8", (), (10,), (0,), (0, 10))
    full = CompressedColumn.load(header, [block_of(80)], allow_pickle=False)
    agree(full, np.zeros(10, np.int64))
    column = CompressedColumn.load(header, [damaged], allow_pickle=False)
    for read in (column.decompress, lambda: column[3], lambda: column.take(np.array([1])), lambda: list(column)):
        with pytest.raises(CompressedColumnError, match="block 0 of a compressed column must decompress to 80 bytes"):
            read()


@given(st.binary(min_size=8, max_size=60))
def test_corrupted_bytes_neither_crash_the_reader_nor_go_undetected(block):
    header = ("compressed", "<u2", (4,), (3,), (1,), (0, 2))
    column = CompressedColumn.load(header, [block], allow_pickle=False)
    try:
        data = lz4.block.decompress(block, uncompressed_size=24)
    except lz4.block.LZ4BlockError:
        data = b""
    if len(data) == 24:
        agree(column, np.frombuffer(data, "<u2").reshape(3, 4)[1:])
    else:
        with pytest.raises(CompressedColumnError):
            column.decompress()


def test_a_decompression_bomb_is_rejected_before_allocation():
    header = ("compressed", "<i8", (), (1 << 40,), (0,), (0, 1 << 40))
    with pytest.raises(FormatError):
        CompressedColumn.load(header, [bytes(1000)], allow_pickle=False)


def test_large_data_is_split_before_a_block_is_too_large(monkeypatch):
    monkeypatch.setattr(compressed, "_MAX_BLOCK_NBYTES", 1000)
    values = rows("u1", 50, (100,))
    column = CompressedColumn.compress(TensorColumn(values), bulk=True)
    assert column.rows == [10] * 5
    agree(column, values)
    with pytest.raises(CompressedColumnError, match="must have at most 1000 bytes"):
        CompressedColumn.compress(TensorColumn(rows("u1", 2, (1001,))), bulk=True)


def test_blocks_are_raw_lz4_for_any_reader():
    values = rows("i4", 100, (5,))
    (block,) = CompressedColumn.compress(TensorColumn(values), bulk=True).blocks
    assert lz4.block.decompress(block, uncompressed_size=values.nbytes) == values.tobytes()
    assert pa.Codec("lz4_raw").decompress(block, values.nbytes, asbytes=True) == values.tobytes()

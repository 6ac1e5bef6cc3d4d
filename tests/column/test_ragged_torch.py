from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from samplebatch import SampleBatch
from samplebatch.column.arrow import arrow_field_and_array, column_from_arrow
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, DeviceError, FormatError, RowIndexError
from tests.column.samples import through_ipc
from tests.optional import torch

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SHAPES = {
    "flat": [(2,), (0,), (5,), (1,)],
    "matrices": [(2, 3), (1, 1), (0, 4), (3, 2)],
    "without elements": [(0,), (0,), (0,), (0,)],
}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_shape = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)


def rows_of(dtype, shapes):
    sizes = [int(np.prod(shape)) for shape in shapes]
    flat = (torch.arange(1, 1 + sum(sizes)) % 7).to(dtype)
    return [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def ragged(dtype=torch.float32, shapes=SHAPES["flat"], device="cpu"):
    """Return rows of the given shapes, and their column."""
    rows = rows_of(dtype, shapes)
    places = RaggedColumn.from_rows([np.zeros(shape) for shape in shapes], "x")
    elements = torch.cat([row.reshape(-1) for row in rows]).to(device)
    return rows, RaggedTorchColumn(elements, places.offsets, places.shapes)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def agree(column, expected):
    assert type(column) is RaggedTorchColumn
    assert len(column) == len(expected)
    assert all(map(same, column, expected))
    assert all(same(column[i], row) for i, row in enumerate(expected))


@by_dtype
@by_shape
def test_every_operation_agrees_with_a_list_of_tensors(dtype, shapes):
    rows, column = ragged(dtype, shapes)
    part = column.slice(1, 4)
    agree(column, rows)
    agree(part, rows[1:4])
    agree(part[1:], rows[2:4])
    agree(part.take(np.array([2, 0, 0])), [rows[3], rows[1], rows[1]])
    agree(part[[]], [])
    agree(part.copy(), rows[1:4])
    agree(RaggedTorchColumn.concat([part, column], "x"), rows[1:4] + rows)
    empty = rows[0].new_empty((0,) * column.ndim)
    agree(part.spread(5, np.array([0, 2, 3])), [rows[1], empty, rows[2], rows[3], empty])
    for restored in (through_arrow(part), RaggedTorchColumn.load(*part.dump()), pickle.loads(pickle.dumps(part))):
        agree(restored, rows[1:4])
        assert restored.equals(part)


def through_arrow(column):
    field, array = through_ipc(*arrow_field_and_array(column, "x"))
    return column_from_arrow(array, field, allow_pickle=False)


@by_dtype
@by_shape
def test_padded_rows_have_the_largest_extents(dtype, shapes):
    rows, column = ragged(dtype, shapes)
    part = column[1:]
    padded = part.pad(1)
    widest = tuple(max(extents) for extents in zip(*shapes[1:], strict=True))
    assert (padded.dtype, tuple(padded.shape)) == (dtype, (3, *widest))
    for actual, row in zip(padded, rows[1:], strict=True):
        inside = tuple(slice(extent) for extent in row.shape)
        assert same(actual[inside], row)
        outside = torch.ones(actual.shape, dtype=torch.bool)
        outside[inside] = False
        assert all(value == 1 for value in np.array(actual.tolist())[outside.numpy()])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint64], ids=str)
def test_unsigned_rows_are_not_padded_with_negative_numbers(dtype):
    _, column = ragged(dtype, [(2,), (1,)])
    for either in (column, RaggedColumn(column.elements.numpy(), *column.layout)):
        with pytest.raises(OverflowError):
            either.pad(-1)
        assert either.pad(255).tolist() == [[1, 2], [3, 255]]


def test_only_slices_and_rows_are_views():
    _, column = ragged()
    start = column.elements.data_ptr()
    assert column[1:].elements is column.elements
    assert column[0].data_ptr() == start
    for converted in (column.copy(), copy.deepcopy(column), column.take(np.arange(4)), column.spread(4, np.arange(4))):
        assert converted.elements.data_ptr() != start
        assert not np.shares_memory(converted.offsets, column.offsets)


def test_arrays_and_nested_tensors_share_memory():
    rows, column = ragged()
    listed = column[2:].to_numpy()
    assert [row.tolist() for row in listed] == [row.tolist() for row in rows[2:]]
    listed[0][0] = 40
    assert column[2][0] == 40
    assert np.asarray(column).dtype == object
    nested = column[2:].to_torch()
    assert [row.tolist() for row in nested.unbind()] == [row.tolist() for row in column[2:]]
    assert nested.values().data_ptr() == column[2].data_ptr()


def test_conversion_of_bfloat16_to_numpy_is_rejected():
    with pytest.raises(ColumnTypeError, match=r"NumPy has no dtype for torch\.bfloat16"):
        ragged(torch.bfloat16)[1].to_numpy()


def test_equality():
    _, column = ragged()
    assert column.equals(column.copy())
    assert not column.equals(column[:3])
    assert not column.equals(ragged(torch.float64)[1])
    assert not column.equals(RaggedColumn(column.elements.numpy(), column.offsets))
    assert not column.equals(ragged(shapes=[(0,), (2,), (5,), (1,)])[1])
    changed = column.copy()
    changed[2][1] = 50
    assert not column.equals(changed)
    _, matrices = ragged(shapes=[(2, 3)])
    assert not matrices.equals(ragged(shapes=[(3, 2)])[1])


def test_keys():
    rows, column = ragged()
    agree(column[np.array([True, False, True, False])], [rows[0], rows[2]])
    assert same(column[-1], rows[3])
    with pytest.raises(RowIndexError):
        column[4]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ragged(torch.float64)[1], "one dtype"),
        (ragged(device="meta")[1], "one device"),
        (ragged(shapes=[(2, 3)])[1], "rows of one number of dimensions"),
    ],
    ids=["dtype", "device", "dimensions"],
)
def test_concat_errors_contain_the_column_name(other, message):
    with pytest.raises(ColumnMismatchError, match=rf"column 'obs\.x' must have {message}"):
        RaggedTorchColumn.concat([ragged()[1], other], "obs.x")


@by_shape
def test_operations_keep_elements_on_their_device(shapes):
    rows, column = ragged(shapes=shapes, device="meta")
    converted = [column[1:], column.take(np.array([3, 0])), column.copy(), column.spread(6, np.arange(4))]
    converted.append(RaggedTorchColumn.concat([column, column], "x"))
    assert all(item.elements.is_meta for item in converted)
    assert [tuple(row.shape) for row in column] == [tuple(row.shape) for row in rows]
    assert column[0].is_meta
    assert column.pad().is_meta
    assert column.row_shape == (None,) * rows[0].ndim


def test_host_memory_of_columns_on_a_device_is_rejected():
    _, column = ragged(device="meta")
    for read in (column.to_numpy, column.to_arrow, column.dump, lambda: np.asarray(column)):
        with pytest.raises(DeviceError, match="meta"):
            read()


def test_sizes_and_string_representations():
    _, column = ragged()
    assert column[1:3].nbytes == 5 * 4 + 3 * 8
    assert repr(column) == "RaggedTorchColumn(4 rows of torch.float32 on cpu, row shape (None,))"


@pytest.mark.parametrize(
    "header",
    [
        ("ragged_torch", "float64", "<f4", 4, 1),
        ("ragged_torch", "nonsense", "<f4", 4, 1),
        ("ragged_torch", 3, "<f4", 4, 1),
        ("ragged_torch", "float32", "<f4", 5, 1),
        ("ragged_torch", "float32", "<f4", 4, 2),
        ("ragged_torch", "float32"),
        ("ragged_torch",),
    ],
)
def test_a_damaged_header_is_rejected(header):
    _, buffers = ragged()[1].dump()
    with pytest.raises(FormatError):
        RaggedTorchColumn.load(header, buffers)


def test_offsets_beyond_the_elements_are_rejected():
    header, (elements, offsets) = ragged()[1].dump()
    with pytest.raises(FormatError, match="non-decreasing offsets"):
        RaggedTorchColumn.load(header, [elements, offsets + 1])


def test_a_field_with_another_dtype_is_rejected():
    field, array = arrow_field_and_array(ragged()[1], "x")
    (key,) = field.metadata
    with pytest.raises(FormatError, match="column 'x' must name the torch dtype"):
        column_from_arrow(array, field.with_metadata({key: b"int64"}), allow_pickle=False)


def test_tensors_are_cast_to_a_declared_dtype_without_loss():
    rows = [torch.tensor([1, 2]), torch.tensor([300])]
    column = SampleBatch(ids=rows, ragged={"ids": "int32"}).column("ids")
    assert column.dtype == torch.int32
    assert [row.tolist() for row in column] == [[1, 2], [300]]
    half = [torch.tensor([0.5, 1.5], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)]
    assert SampleBatch(x=half, ragged={"x": "float32"}).column("x").dtype == torch.float32
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert SampleBatch(ids=nested, ragged={"ids": "int16"})["ids"].lengths.tolist() == [2, 1]
    for dtype, values in (("uint8", rows), ("int8", rows), ("int64", half), ("datetime64[s]", rows)):
        with pytest.raises(ColumnMismatchError, match="without loss"):
            SampleBatch(x=values, ragged={"x": dtype})
    with pytest.raises(ColumnMismatchError, match="without loss"):
        SampleBatch(x=[torch.tensor([-1], dtype=torch.int8)], ragged={"x": "uint8"})

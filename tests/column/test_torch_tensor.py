from __future__ import annotations

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from samplebatch.column.arrow import arrow_field_and_array, column_from_arrow
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, DeviceError, FormatError
from tests.column.samples import through_ipc
from tests.optional import torch

NUMPY_TOO = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
TORCH_ONLY = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
by_dtype = pytest.mark.parametrize("dtype", NUMPY_TOO + TORCH_ONLY, ids=str)


def tensor_of(dtype, n=9, row_shape=(3,)):
    generator = torch.Generator().manual_seed(0)
    shape = (n, *row_shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    return (torch.randn(shape, generator=generator) * 8).abs().to(dtype)


def bits(tensor):
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return tensor.contiguous().view(torch.uint8).numpy() if tensor.dtype != torch.bool else tensor.numpy()


def data_of(array):
    return next(buffer for buffer in array.buffers()[::-1] if buffer is not None)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))


def shared(a, b):
    return np.shares_memory(bits(a), bits(b))


@by_dtype
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 2), (0,)], ids=str)
def test_arrow_shares_memory_and_columns_from_arrow_are_copies(dtype, row_shape):
    tensor = tensor_of(dtype, 9, row_shape)
    for column, expected in ((TorchColumn(tensor), tensor), (TorchColumn(tensor).slice(2, 5), tensor[2:5])):
        field, array = arrow_field_and_array(column, "x")
        back = column_from_arrow(array, field, allow_pickle=False)
        assert back.kind == "torch"
        assert same(back.values, expected)
        if expected.numel():
            assert np.shares_memory(np.frombuffer(data_of(array), np.uint8), bits(tensor))
            # Arrow arrays are not to be written to, and a tensor always can be.
            assert not shared(back.values, tensor)
        field, array = through_ipc(field, array)
        assert same(column_from_arrow(array, field, allow_pickle=False).values, expected)


@by_dtype
def test_dump_contains_the_slice_and_load_copies_nothing(dtype):
    tensor = tensor_of(dtype)
    header, buffers = TorchColumn(tensor).slice(2, 5).dump()
    assert sum(memoryview(buffer).nbytes for buffer in buffers) == tensor[2:5].nbytes
    back = TorchColumn.load(header, buffers, allow_pickle=False)
    assert same(back.values, tensor[2:5])
    assert shared(back.values, tensor)
    read_only = TorchColumn.load(
        header, [bytes(memoryview(buffer).cast("B")) for buffer in buffers], allow_pickle=False
    )
    assert same(read_only.values, tensor[2:5])


@by_dtype
def test_only_slices_are_views(dtype):
    tensor = tensor_of(dtype)
    column = TorchColumn(tensor)
    assert column.values is tensor
    assert column.to_torch() is tensor
    assert shared(column.slice(1, 4).values, tensor)
    indices = np.array([8, 0, 0])
    for result, expected in (
        (column.take(indices), tensor[indices]),
        (column.copy(), tensor),
        (TorchColumn.concat([column, column.slice(0, 2)], "x"), torch.cat([tensor, tensor[:2]])),
    ):
        assert same(result.values, expected)
        assert not shared(result.values, tensor)
    spread = column.slice(0, 2).spread(5, np.array([1, 3]))
    zeros = torch.zeros((1, 3), dtype=dtype)
    expected = torch.cat([zeros, tensor[:1], zeros, tensor[1:2], zeros])
    assert same(spread.values, expected)
    assert (len(column), column.dtype, column.row_shape, column.nbytes) == (9, dtype, (3,), tensor.nbytes)


@by_dtype
def test_single_values_are_gathered_and_spread(dtype):
    tensor = tensor_of(dtype, 9, ())
    column = TorchColumn(tensor)
    assert same(column.take(np.array([8, 0, 0])).values, torch.stack([tensor[8], tensor[0], tensor[0]]))
    assert same(column.spread(9, np.arange(9)).values, tensor)


@by_dtype
def test_equality(dtype):
    column = TorchColumn(tensor_of(dtype))
    assert column.equals(column.copy())
    assert not column.equals(column.slice(0, 8))
    changed = column.copy()
    changed.values[4, 1] = not changed.values[4, 1].item()
    assert not column.equals(changed)
    assert not column.equals(TensorColumn(np.zeros((9, 3))))


def test_nan_equals_nan():
    tensor = torch.tensor([1.0, float("nan")])
    assert TorchColumn(tensor).equals(TorchColumn(tensor.clone()))
    assert not TorchColumn(tensor).equals(TorchColumn(tensor.nan_to_num()))


def test_numpy_shares_memory_if_it_supports_the_dtype():
    tensor = tensor_of(torch.float32)
    assert np.shares_memory(TorchColumn(tensor).to_numpy(), tensor.numpy())
    assert TorchColumn(tensor.clone().requires_grad_()).to_numpy().shape == (9, 3)
    with pytest.raises(ColumnTypeError, match=r"NumPy has no dtype for torch\.bfloat16"):
        TorchColumn(tensor.bfloat16()).to_numpy()


def test_polars_and_duckdb_read_the_bits_of_bfloat16():
    tensor = tensor_of(torch.bfloat16, 4, ())
    table = pa.table({"x": TorchColumn(tensor).to_arrow()})
    expected = tensor.view(torch.uint16).tolist()
    assert pl.from_arrow(table)["x"].to_list() == expected
    assert [row[0] for row in duckdb.from_arrow(table).fetchall()] == expected


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(2, 4), "row shape"),
        (torch.zeros(2, 3).double(), "dtype"),
        (torch.zeros(2, 3, device="meta"), "device"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_concat_errors_contain_the_column_name(other, message):
    with pytest.raises(ColumnMismatchError, match=rf"column 'obs\.x' must have one {message} to be joined"):
        TorchColumn.concat([TorchColumn(torch.zeros(2, 3)), TorchColumn(other)], "obs.x")


def test_host_memory_of_columns_on_a_device_is_rejected():
    column = TorchColumn(torch.zeros(2, device="meta"))
    for read in (column.to_numpy, column.to_arrow, column.dump):
        with pytest.raises(DeviceError, match="meta"):
            read()


@pytest.mark.parametrize(
    ("header", "buffers"),
    [
        (("torch", "float32", (10,)), [bytes(39)]),
        (("torch", "float32", (-1,)), [bytes(40)]),
        (("torch", "load", (10,)), [bytes(40)]),
        (("torch", "nonsense", (10,)), [bytes(40)]),
        (("torch", 3, (10,)), [bytes(40)]),
        (("torch", "float32", (10,)), []),
        (("torch",), [bytes(40)]),
    ],
)
def test_a_damaged_header_is_rejected(header, buffers):
    with pytest.raises(FormatError):
        TorchColumn.load(header, buffers, allow_pickle=False)


@pytest.mark.parametrize("dtype_name", ["int64", "bfloat16", "nonsense", "load"])
def test_a_dtype_that_contradicts_the_bits_is_rejected(dtype_name):
    with pytest.raises(ColumnTypeError):
        TorchColumn.from_bits(np.zeros(3, "f4"), dtype_name)


def test_read_only_bits_are_not_aliased():
    values = np.zeros(3, "f4")
    values.flags.writeable = False
    column = TorchColumn.from_bits(values, "float32")
    column.values += 1
    assert not values.any()

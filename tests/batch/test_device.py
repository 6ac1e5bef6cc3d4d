"""Turning columns into torch tensors: on the host they share the arrays' memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.errors import DeviceError
from tests.batch.every_kind import NUMBERS, every_kind, in_sequences, numbers, tensor
from tests.optional import torch

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=["name", "device"])
def test_tensors_share_memory_and_keep_the_dtype(dtype: str, device: Any) -> None:
    values = numbers(dtype, 4, 2)
    batch = SampleBatch(a=values)
    assert batch.to_device(device) is batch
    column = batch["a"]
    assert isinstance(column, torch.Tensor)
    assert column.numpy().dtype == values.dtype
    assert column.tolist() == values.tolist()
    assert column.data_ptr() == values.ctypes.data
    column[0] = 0
    assert not values[0].any()


def test_a_view_moves_its_rows_only() -> None:
    batch = SampleBatch(a=np.arange(10.0))
    view = batch[3:6].to_device("cpu")
    assert view["a"].tolist() == [3, 4, 5]
    assert view["a"].data_ptr() == batch["a"][3:].ctypes.data
    assert isinstance(batch["a"], np.ndarray)


def test_nested_columns_become_tensors_leaf_by_leaf() -> None:
    batch = SampleBatch(obs={"x": np.ones(2), "y": (np.zeros((2, 3)), torch.ones(2))}).to_device("cpu")
    assert isinstance(batch["obs"]["x"], torch.Tensor)
    assert all(isinstance(leaf, torch.Tensor) for leaf in batch["obs"]["y"])


def test_columns_without_a_torch_dtype_are_unchanged() -> None:
    batch = SampleBatch(every_kind(4), squeezed=np.zeros((4, 2))).compress(columns={"squeezed"})
    before = {name: batch.column(name) for name in batch.column_names}
    batch.to_device("cpu")
    for name, column in before.items():
        if column.kind in ("object", "compressed") or column.dtype.__class__ is np.dtypes.StrDType:
            assert batch.column(name) is column, name
    assert isinstance(batch["flat U5"], np.ndarray)
    assert isinstance(batch["flat S3"], np.ndarray)
    assert isinstance(batch["flat M8[ns]"], np.ndarray)
    assert isinstance(batch["infos"], np.ndarray)
    kinds = {name: batch.column(name).kind for name in batch.column_names}
    assert all(kinds[f"flat {dtype}"] == "torch" for dtype in NUMBERS)
    assert kinds["zero-width"] == "torch"
    assert kinds["ragged"] == kinds["ragged 2-D"] == kinds["ragged torch"] == "ragged_torch"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bool"])
def test_existing_tensors_are_unchanged(dtype: str) -> None:
    values = tensor(dtype, 3)
    assert SampleBatch(a=values).to_device("cpu")["a"] is values


def test_read_only_memory_is_not_aliased() -> None:
    values = np.arange(4.0)
    values.flags.writeable = False
    batch = SampleBatch(a=values).to_device("cpu")
    batch["a"][0] = 100
    assert values.tolist() == [0, 1, 2, 3]
    assert batch["a"].tolist() == [100, 1, 2, 3]


def test_flags_and_sequences_are_unchanged() -> None:
    batch = in_sequences(padded=True).to_device("cpu")
    assert isinstance(batch["seq_lens"], torch.Tensor)
    assert len(batch) == 6
    assert batch.zero_padded
    assert batch.num_grad_updates == 1.5
    assert batch[2:]["a"].tolist() == in_sequences(padded=True)[2:]["a"].tolist()
    assert isinstance(batch[2:]["seq_lens"], torch.Tensor)
    assert batch.slice(1, 4)["seq_lens"].tolist() == [1, 2]
    assert isinstance(batch.slice(1, 4)["seq_lens"], torch.Tensor)


def test_operations_work_on_tensors() -> None:
    arrays = SampleBatch(a=np.arange(6), b=np.arange(12.0).reshape(6, 2), eps_id=[0, 0, 1, 1, 1, 2])
    tensors = arrays.copy().to_device("cpu")
    operations: list[Any] = [
        lambda b: b[1:4],
        lambda b: b[::-2],
        lambda b: b[[0, 5, 5]],
        lambda b: b.slice(-2, 3),
        lambda b: b.split_by_episode()[1],
        lambda b: b.timeslices(4)[1],
        lambda b: b.concat(b),
        lambda b: b.copy().shuffle(rng=3),
        lambda b: b.copy(),
    ]
    for operation in operations:
        expected, result = operation(arrays), operation(tensors)
        assert all(isinstance(values, torch.Tensor) for values in result.values())
        assert {k: v.tolist() for k, v in result.items()} == {k: v.tolist() for k, v in expected.items()}


def test_policies_are_moved_in_place() -> None:
    batch = MultiAgentBatch({"p": SampleBatch(a=np.ones(2)), "q": SampleBatch(b=np.ones(1))}, 2)
    assert batch.to_device("cpu") is batch
    assert isinstance(batch["p"]["a"], torch.Tensor)
    assert isinstance(batch["q"]["b"], torch.Tensor)


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("use_stream", [False, True])
def test_pinning_and_streams_do_nothing_on_the_host(pin_memory: bool, use_stream: bool) -> None:
    values = np.arange(3.0)
    batch = SampleBatch(a=values).to_device("cpu", "torch", pin_memory, use_stream)
    assert batch["a"].data_ptr() == values.ctypes.data


def test_another_framework_is_rejected() -> None:
    batch = SampleBatch(a=[1])
    with pytest.raises(ValueError, match="framework must be 'torch', got 'tf2'"):
        batch.to_device("cpu", framework="tf2")  # type: ignore[arg-type]
    assert isinstance(batch["a"], np.ndarray)


def test_an_unavailable_device_does_not_change_the_batch() -> None:
    batch = SampleBatch(a=[1], b=[2])
    with pytest.raises(DeviceError, match="got 'no such device'"):
        batch.to_device("no such device")
    assert isinstance(batch["a"], np.ndarray)


@cuda
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("use_stream", [False, True])
def test_columns_are_moved_to_cuda_and_back(pin_memory: bool, use_stream: bool) -> None:
    batch = SampleBatch(a=np.arange(1000.0), i=np.arange(1000), infos=[{}] * 1000)
    batch.to_device("cuda", pin_memory=pin_memory, use_stream=use_stream)
    torch.cuda.synchronize()
    assert batch["a"].is_cuda
    assert batch["a"].dtype == torch.float64
    assert batch[10:20]["a"].is_cuda
    assert batch.take([3, 1])["i"].tolist() == [3, 1]
    assert batch.to_device("cpu")["a"].tolist() == list(range(1000))

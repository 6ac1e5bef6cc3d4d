"""Nested batches to torch and back."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import DeviceError
from tests.optional import torch


def test_to_torch_shares_memory() -> None:
    batch = Batch(a=np.zeros((3, 4)), n=Batch(i=np.arange(3), r=Batch()), none=None, x=np.float32(2))
    converted = batch.to_torch()
    assert isinstance(batch.a, np.ndarray)
    assert converted.a.data_ptr() == batch.a.ctypes.data
    assert converted.n.i.data_ptr() == batch.n.i.ctypes.data
    assert converted.n.r == Batch()
    assert converted.none is None
    assert converted.x.dtype == torch.float32
    back = converted.to_numpy()
    assert back.a.ctypes.data == batch.a.ctypes.data
    assert back == Batch(batch, x=np.array(2, "f4"))


def test_in_place_conversion_keeps_addresses_and_nested_batches() -> None:
    batch = Batch(a=np.zeros(3), n=Batch(b=np.ones(3)))
    nested, address = batch.n, batch.n.b.ctypes.data
    batch.to_torch_()
    assert batch.n is nested
    assert nested.b.data_ptr() == address
    batch.to_numpy_()
    assert batch.n is nested
    assert nested.b.ctypes.data == address


def test_read_only_memory_is_never_aliased() -> None:
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = Batch(n=Batch(a=frozen)).to_torch()
    converted.n.a[0] = 7
    assert frozen[0] == 0
    swapped, backwards = np.arange(3, dtype=">i4"), np.arange(3)[::-1]
    assert Batch(a=swapped).to_torch().a.tolist() == [0, 1, 2]
    assert Batch(a=backwards).to_torch().a.tolist() == [2, 1, 0]


def test_to_torch_dtype_and_device() -> None:
    tensor = torch.zeros(2)
    batch = Batch(a=np.zeros(2), i=[1, 2], t=tensor)
    converted = batch.to_torch(dtype=torch.float32, device=torch.device("cpu"))
    assert {converted.a.dtype, converted.i.dtype, converted.t.dtype} == {torch.float32}
    assert converted.t is tensor
    assert batch.to_torch(device="meta").a.device.type == "meta"
    assert batch.to_torch(torch.int16, "meta").i.dtype == torch.int16


def test_columns_without_a_torch_dtype_are_listed_in_the_error() -> None:
    for value in (["x", None], "text", np.array(["2020"], "M8[D]"), object()):
        batch = Batch(ok=[1], n=Batch(bad=value))
        for convert in (batch.to_torch, batch.to_torch_):
            with pytest.raises(TypeError, match=r"column 'n\.bad' cannot be made a tensor"):
                convert()
        assert isinstance(batch.ok, np.ndarray)
        retained = batch.to_torch(keep_objects=True)
        assert retained.ok.tolist() == [1]
        assert retained.n.bad is batch.n.bad


def test_to_numpy_of_every_tensor() -> None:
    grad = torch.zeros(2, requires_grad=True)
    half = torch.tensor([1.5, 3.0], dtype=torch.bfloat16)
    converted = Batch(g=grad, h=half, c=torch.tensor([1 + 2j]).conj()).to_numpy()
    assert converted.g.tolist() == [0, 0]
    assert converted.h.dtype == np.float32
    assert converted.h.tolist() == [1.5, 3.0]
    assert converted.c.tolist() == [1 - 2j]
    rows = np.empty(2, object)
    rows[:] = [torch.zeros(2), torch.ones(3)]
    assert [row.tolist() for row in Batch(a=rows).to_numpy().a] == [[0, 0], [1, 1, 1]]
    assert isinstance(rows[0], torch.Tensor)


def test_pin_memory() -> None:
    batch = Batch(t=torch.zeros(2), n=Batch(a=[1], s="x"))
    if torch.cuda.is_available():
        pinned = batch.to_torch(keep_objects=True).pin_memory()
        assert pinned.t.is_pinned()
        assert batch.to_torch(pin_memory=True, keep_objects=True).n.a.is_pinned()
        assert batch.to_torch(device="cuda", non_blocking=True, keep_objects=True).t.is_cuda
        return
    # Without a device torch pins nothing and says so; what holds no tensors is passed through.
    assert Batch(n=Batch(a=[1], s="x")).pin_memory() == Batch(n=Batch(a=[1], s="x"))
    with pytest.raises(DeviceError, match="pin_memory"):
        batch.to_torch(pin_memory=True, keep_objects=True)

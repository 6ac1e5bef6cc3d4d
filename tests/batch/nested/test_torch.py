"""Nested batches and torch: conversion, distributions, pickles, pytrees, data loaders."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import warnings
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributions as td
from torch.utils import _pytree as torch_pytree
from torch.utils.data import DataLoader

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.distributions import dist_to_atleast_2d, get_len_of_dist, get_sliced_dist
from samplebatch.batch.nested.functions import collate, to_numpy, to_torch, to_torch_as


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


# Conversion


def test_to_torch_shares_memory() -> None:
    batch = Batch(a=np.zeros((3, 4)), n=Batch(i=np.arange(3), r=Batch()), none=None, x=np.float32(2))
    made = batch.to_torch()
    assert isinstance(batch.a, np.ndarray)
    assert made.a.data_ptr() == batch.a.ctypes.data
    assert made.n.i.data_ptr() == batch.n.i.ctypes.data
    assert made.n.r == Batch()
    assert made.none is None
    assert made.x.dtype == torch.float32
    back = made.to_numpy()
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
        made = Batch(n=Batch(a=frozen)).to_torch()
    made.n.a[0] = 7
    assert frozen[0] == 0
    swapped, backwards = np.arange(3, dtype=">i4"), np.arange(3)[::-1]
    assert Batch(a=swapped).to_torch().a.tolist() == [0, 1, 2]
    assert Batch(a=backwards).to_torch().a.tolist() == [2, 1, 0]


def test_to_torch_dtype_and_device() -> None:
    tensor = torch.zeros(2)
    batch = Batch(a=np.zeros(2), i=[1, 2], t=tensor)
    made = batch.to_torch(dtype=torch.float32, device=torch.device("cpu"))
    assert {made.a.dtype, made.i.dtype, made.t.dtype} == {torch.float32}
    assert made.t is tensor
    assert batch.to_torch(device="meta").a.device.type == "meta"
    assert batch.to_torch(torch.int16, "meta").i.dtype == torch.int16


def test_what_torch_cannot_hold_is_named() -> None:
    for value in (["x", None], "text", np.array(["2020"], "M8[D]"), object()):
        batch = Batch(ok=[1], n=Batch(bad=value))
        for convert in (batch.to_torch, batch.to_torch_):
            with pytest.raises(TypeError, match=r"column 'n\.bad' cannot be made a tensor"):
                convert()
        assert isinstance(batch.ok, np.ndarray)
        kept = batch.to_torch(keep_objects=True)
        assert kept.ok.tolist() == [1]
        assert kept.n.bad is batch.n.bad


def test_to_numpy_of_every_tensor() -> None:
    grad = torch.zeros(2, requires_grad=True)
    half = torch.tensor([1.5, 3.0], dtype=torch.bfloat16)
    made = Batch(g=grad, h=half, c=torch.tensor([1 + 2j]).conj()).to_numpy()
    assert made.g.tolist() == [0, 0]
    assert made.h.dtype == np.float32
    assert made.h.tolist() == [1.5, 3.0]
    assert made.c.tolist() == [1 - 2j]


def test_functions() -> None:
    assert to_numpy(torch.zeros(2)).tolist() == [0, 0]
    assert to_numpy({"a": torch.zeros(2)}) == Batch(a=np.zeros(2, "f4"))
    assert to_numpy([{"a": 1}, {"a": 2}]) == Batch(a=[1, 2])
    assert to_numpy([1, 2]).tolist() == [1, 2]
    assert to_numpy(None).item() is None
    thing = object()
    assert to_numpy(thing).item() is thing
    array, tensor = np.zeros(2), torch.zeros(2)
    assert to_torch(array).data_ptr() == array.ctypes.data
    assert to_torch(tensor) is tensor
    assert to_torch(tensor, torch.int32).dtype == torch.int32
    assert to_torch(3).item() == 3
    assert to_torch(np.float32(2)).dtype == torch.float32
    assert to_torch([array, array]).shape == (2, 2)
    assert to_torch({"a": array}).a.dtype == torch.float64
    assert to_torch([{"a": 1}, {"a": 2}]).a.tolist() == [1, 2]
    assert to_torch_as([1], torch.zeros(1, dtype=torch.float16)).dtype == torch.float16
    assert to_torch_as(Batch(a=[1]), tensor).a.dtype == torch.float32
    for value in ("x", None, ["x"], [None, 1], thing):
        with pytest.raises(TypeError, match="must be numbers to become a tensor"):
            to_torch(value)
    with pytest.raises(TypeError, match="must be a tensor, got ndarray"):
        to_torch_as(array, array)
    with pytest.raises(TypeError, match="column 'value'"):
        to_numpy([tensor, torch.zeros(3)])


# Distributions


def distributions() -> list[Any]:
    zeros, ones = torch.zeros(4), torch.ones(4)
    return [
        td.Normal(zeros, ones),
        td.Normal(torch.arange(4.0), 1.0),
        td.Categorical(logits=torch.arange(12.0).reshape(4, 3)),
        td.Categorical(probs=torch.arange(1.0, 13).reshape(4, 3)),
        td.Bernoulli(probs=ones / 3),
        td.Bernoulli(logits=ones / 3),
        td.Gamma(ones * 2, ones * 3),
        td.MultivariateNormal(torch.zeros(4, 2), covariance_matrix=torch.eye(2) * 2),
        td.Independent(td.Normal(torch.zeros(4, 2), torch.ones(4, 2)), 1),
        td.Dirichlet(torch.ones(4, 3)),
    ]


@pytest.mark.parametrize("dist", distributions(), ids=lambda dist: type(dist).__name__)
def test_distributions_are_sliced(dist: Any) -> None:
    sample = dist.sample()
    expected = dist.log_prob(sample)
    batch = Batch(dist=dist, a=np.arange(4))
    assert len(batch) == 4 == get_len_of_dist(dist)
    for index in (slice(1, 3), 2, [3, 1], np.array([True, False, True, True]), torch.tensor([0, 2]), ...):
        part = batch[index].dist
        assert type(part) is type(dist)
        torch.testing.assert_close(part.log_prob(sample[index]), expected[index])
    rows = list(batch)
    assert len(rows) == 4
    torch.testing.assert_close(rows[3].dist.log_prob(sample[3]), expected[3])
    assert rows[0].to_at_least_2d().dist.batch_shape == (1,)
    assert batch.to_at_least_2d().dist is dist
    torch.testing.assert_close(batch[::-1].dist.log_prob(sample.flip(0)), expected.flip(0))
    assert batch.to_torch().dist is batch.to_numpy().dist is dist
    assert Batch(dist=dist).isnull().dist == np.False_


def test_derived_parameters_do_not_stand_in_the_way() -> None:
    dist = td.Categorical(logits=torch.randn(4, 3))
    _ = dist.probs
    torch.testing.assert_close(get_sliced_dist(dist, slice(2)).logits, dist.logits[:2])


def test_distributions_without_rows() -> None:
    scalar = td.Normal(torch.tensor(0.0), torch.tensor(1.0))
    with pytest.raises(TypeError, match="must have a batch dimension"):
        get_len_of_dist(scalar)
    assert get_len_of_dist(dist_to_atleast_2d(scalar)) == 1
    with pytest.raises(TypeError, match="column 'd'"):
        len(Batch(d=scalar))
    with pytest.raises(TypeError, match=r"column 'd'.*must declare its parameters"):
        _ = Batch(d=td.TransformedDistribution(td.Normal(torch.zeros(2), 1.0), []))[0]
    stacked = Batch.stack([Batch(d=scalar), Batch(d=scalar)])
    assert stacked.d.dtype == object
    with pytest.raises(ValueError, match="column 'd' must have rows"):
        Batch.cat([Batch(d=td.Normal(torch.zeros(2), 1.0))])


# Pickles


def test_pickle_out_of_band() -> None:
    batch = Batch(a=np.arange(1000.0), n=Batch(t=torch.arange(1000), r=Batch()), o=["x", None])
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2
    assert len(data) < 1000
    loaded = pickle.loads(data, buffers=buffers)
    assert loaded == batch
    assert loaded.a.ctypes.data == batch.a.ctypes.data
    frozen = [bytes(buffer) for buffer in buffers]
    loaded = pickle.loads(data, buffers=frozen)
    loaded.n.t[0] = 9
    assert np.frombuffer(frozen[1], np.int64)[0] == 0


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_slice_ships_its_rows_alone(protocol: int) -> None:
    batch = Batch(a=np.zeros(100_000), t=torch.zeros(100_000))
    assert len(pickle.dumps(batch[5:10], protocol=protocol)) < 2000
    assert pickle.loads(pickle.dumps(batch[5:10], protocol=protocol)) == batch[5:10]


def test_pickled_tensors_come_back_as_they_were() -> None:
    batch = Batch(
        g=torch.ones(2, requires_grad=True),
        b=torch.ones(2, dtype=torch.bfloat16),
        s=torch.eye(2).to_sparse(),
        m=torch.zeros(2, device="meta"),
        p=torch.nn.Parameter(torch.ones(1)),
        x=torch.arange(6).reshape(2, 3).T,
    )
    loaded = pickle.loads(pickle.dumps(batch))
    assert loaded.g.requires_grad
    assert loaded.b.dtype == torch.bfloat16
    assert loaded.s.is_sparse
    assert loaded.m.device.type == "meta"
    assert isinstance(loaded.p, torch.nn.Parameter)
    assert loaded.x.tolist() == batch.x.tolist()


def test_between_processes_tensors_go_torchs_way() -> None:
    """Torch passes tensors through shared memory there, which beats copying them into the pipe."""
    stream = io.BytesIO()
    batch = Batch(t=torch.zeros(100_000))
    ForkingPickler(stream, 5).dump(batch)
    assert len(stream.getvalue()) < 10_000
    assert batch.t.is_shared()


# Pytrees


def test_torch_pytree() -> None:
    batch = Batch(b=[1.0, 2.0], n=Batch(a=torch.zeros(2), r=Batch()), s="x")
    doubled = torch_pytree.tree_map_only((np.ndarray, torch.Tensor), lambda leaf: leaf * 2 + 1, batch)
    assert doubled == Batch(b=[3.0, 5.0], n=Batch(a=torch.ones(2), r=Batch()), s="x")
    leaves, spec = torch_pytree.tree_flatten(batch)
    assert len(leaves) == 3
    assert torch_pytree.tree_unflatten(leaves, spec) == batch
    paths = [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path(batch)[0]]
    assert paths == ["['b']", "['n']['a']", "['s']"]
    reordered = Batch(s="y", n=Batch(r=Batch(), a=torch.ones(2)), b=[0.0, 0.0])
    assert torch_pytree.tree_structure(reordered) == spec


def test_optree() -> None:
    optree = pytest.importorskip("optree")
    batch = Batch(b=[1.0, 2.0], n=Batch(a=torch.zeros(2), r=Batch()))
    assert optree.tree_map(lambda leaf: leaf + 1, batch) == Batch(b=[2.0, 3.0], n=Batch(a=torch.ones(2), r=Batch()))
    assert optree.tree_paths(batch) == [("b",), ("n", "a")]


JAX = """
import jax, numpy as np
from samplebatch.batch.nested.batch import Batch

batch = Batch(b=np.float32([1, 2]), n=Batch(a=np.float32([[1, 2], [3, 4]]), r=Batch()))
on_device = jax.tree_util.tree_map(jax.numpy.asarray, batch)
assert isinstance(on_device.n.a, jax.Array)
assert (len(on_device), on_device.shape) == (2, [])
assert on_device[0].n.a.tolist() == [1, 2]
assert isinstance(on_device[[1, 0]].n.a, jax.Array)
assert isinstance(Batch.stack([on_device, on_device]).n.a, jax.Array)
assert Batch.cat([on_device, on_device]).b.tolist() == [1, 2, 1, 2]
assert on_device.to_numpy() == batch
assert on_device.to_torch().b.tolist() == [1, 2]
assert (on_device * 2).b.tolist() == [2, 4]
assert float(jax.jit(lambda b: b.b.sum() + b.n.a.sum())(on_device)) == 13
assert jax.grad(lambda b: (b.b**2).sum() + b.n.a.sum())(on_device).b.tolist() == [2, 4]
assert jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(batch)[1][0]) == "['n']['a']"
try:
    on_device[0] = {"b": 1}
except TypeError as error:
    print(error)
"""


def test_jax() -> None:
    """In a process of its own: JAX's threads and the forks of other tests do not go together."""
    if find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    assert run_python(JAX).startswith("column 'b' cannot be written to so")


def test_libraries_are_registered_with_when_they_come() -> None:
    code = """
import sys, numpy as np
from samplebatch.batch.nested.batch import Batch
batch = Batch(a=[1, 2], n=Batch(b=[3]))
batch[0], batch + 1, Batch.cat([batch, batch]), list(batch.split(1)), batch == batch.copy(), batch.as_sample_batch
assert not {"torch", "optree", "jax", "pandas", "numba"} & set(sys.modules), "loaded too much"
import torch
batch = Batch(batch)
print(torch.utils._pytree.tree_map(lambda leaf: leaf + 1, batch).n.b.tolist())
"""
    assert run_python(code).strip() == "[4]"


# Data loaders


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader(own: bool, workers: int) -> None:
    data = Batch(obs={"x": np.arange(10.0).reshape(5, 2)}, act=torch.arange(5), name=list("abcde"), none=None)
    for source in (data, list(data)) if not workers else (data,):
        options: dict[str, Any] = {"collate_fn": collate} if own else {}
        batches = list(DataLoader(source, batch_size=2, num_workers=workers, **options))
        assert [len(batch) for batch in batches] == [2, 2, 1]
        assert all(isinstance(batch, Batch) for batch in batches)
        assert batches[1].obs.x.tolist() == [[4, 5], [6, 7]]
        assert batches[1].act.tolist() == [2, 3]
        assert batches[1].name.tolist() == ["c", "d"]


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
    with pytest.raises((RuntimeError, TypeError)):
        batch.to_torch(pin_memory=True, keep_objects=True)

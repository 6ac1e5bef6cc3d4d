"""Nested batches in pickles, as pytrees, in other libraries."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
from torch.utils import _pytree as torch_pytree

from samplebatch.batch.nested.batch import Batch
from tests.optional import torch


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


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
def test_a_pickled_slice_contains_only_its_rows(protocol: int) -> None:
    batch = Batch(a=np.zeros(100_000), t=torch.zeros(100_000))
    assert len(pickle.dumps(batch[5:10], protocol=protocol)) < 2000
    assert pickle.loads(pickle.dumps(batch[5:10], protocol=protocol)) == batch[5:10]


def test_pickled_tensors_round_trip() -> None:
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


def test_tensors_are_sent_between_processes_by_torch() -> None:
    """Torch sends tensors through shared memory, which is faster than copying them into the pipe."""
    stream = io.BytesIO()
    batch = Batch(t=torch.zeros(100_000))
    ForkingPickler(stream, 5).dump(batch)
    assert len(stream.getvalue()) < 10_000
    assert batch.t.is_shared()


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
    """Runs in a separate process, because JAX's threads are incompatible with the forks of other tests."""
    if find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    assert run_python(JAX).startswith("column 'b' cannot be assigned to")


_SAMPLE = """
import numpy as np
from samplebatch import ReplayBuffer, SampleBatch
buffer = ReplayBuffer(4)
flags = {"terminateds": [0, 1], "truncateds": [0, 0]}
buffer.extend(SampleBatch(obs=[[1.0], [1.0]], actions=[0, 1], rewards=[0.0, 1.0], **flags))
sample, _ = buffer.sample(2)
"""
_USES = {
    "jax": "import jax; print(jax.tree_util.tree_map(lambda leaf: leaf + 1, sample).obs.tolist())",
    "optree": "import optree; print(optree.tree_map(lambda leaf: leaf + 1, sample).obs.tolist())",
    "torch.utils._pytree": "from torch.utils._pytree import tree_map; "
    "print(tree_map(lambda leaf: leaf + 1, sample).obs.tolist())",
    "torch.utils.data": "from torch.utils.data import default_collate; "
    "print((default_collate([sample[0], sample[1]]).obs + 1).tolist())",
    "torch.multiprocessing": "from multiprocessing.reduction import ForkingPickler; "
    "print([[float(type(sample) in ForkingPickler._extra_reducers) + 1]] * 2)",
    "tianshou.data.types": "from tianshou.data.batch import BatchProtocol; "
    "print([[float(isinstance(sample, BatchProtocol)) + 1]] * 2)",
}


@pytest.mark.parametrize(
    "order",
    [
        "libraries first",
        pytest.param("class first", marks=pytest.mark.long),
        pytest.param("sample first", marks=pytest.mark.long),
    ],
)
def test_samples_are_registered_in_any_import_order(order: str) -> None:
    libraries = [library for library in _USES if find_spec(library.partition(".")[0]) is not None]
    imported = "\n".join(f"import {library}" for library in libraries)
    steps = {
        "libraries first": (imported, _SAMPLE),
        "class first": ("from samplebatch import Batch", imported, _SAMPLE),
        "sample first": (_SAMPLE, imported),
    }[order]
    lines = run_python("\n".join([*steps, *(_USES[library] for library in libraries)])).splitlines()
    assert dict(zip(libraries, lines, strict=True)) == dict.fromkeys(libraries, "[[2.0], [2.0]]")


def test_registration_imports_no_other_library() -> None:
    code = """
import sys
import importlib.util
from samplebatch.batch.nested.batch import Batch
batch = Batch(a=[1, 2], n=Batch(b=[3]))
batch[0], batch + 1, Batch.cat([batch, batch]), list(batch.split(1)), batch == batch.copy(), batch.as_sample_batch
assert not {"torch", "optree", "jax", "pandas", "numba"} & set(sys.modules), "loaded too much"
assert type(importlib.util.find_spec("optree").loader).__name__ == "SourceFileLoader"
import optree
assert optree.__spec__.loader.get_source("optree") and "exec_module" not in vars(optree.__spec__.loader)
print(optree.tree_map(lambda leaf: leaf + 1, batch).n.b.tolist())
"""
    pytest.importorskip("optree")
    assert run_python(code).strip() == "[4]"


def test_a_library_whose_registration_fails_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "optree.py").write_text("imported = True")
    (tmp_path / "jax.py").write_text("raise ImportError('damaged')")
    code = f"""
import sys, warnings
sys.path.insert(0, {str(tmp_path)!r})
from samplebatch import Batch
batch = Batch(a=[1])
with warnings.catch_warnings(record=True) as raised:
    warnings.simplefilter("always")
    import optree
    print(optree.imported, *[warning.message for warning in raised])
for _ in range(2):
    try:
        import jax
    except ImportError as error:
        print(error)
"""
    lines = run_python(code).splitlines()
    assert lines[0].startswith("True ")
    assert "Batch could not be registered with optree: AttributeError(" in lines[0]
    assert lines[1:] == ["damaged", "damaged"]

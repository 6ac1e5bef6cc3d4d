"""Conversions of nested batches to flat batches, Arrow, dicts and other shapes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import ColumnLengthError, ColumnTypeError
from tests.optional import torch


def test_nested_to_flat_shares_memory() -> None:
    batch = Batch(obs={"x": np.zeros((3, 2)), "r": {}}, act=torch.zeros(3), info=Batch(), policy=None, done=[True] * 3)
    converted = batch.as_sample_batch()
    assert converted.column_names == ("obs.x", "act", "done")
    assert converted["obs.x"] is batch.obs.x
    assert converted["act"] is batch.act
    converted["obs"]["x"][0] = 4
    assert batch.obs.x[0].tolist() == [4, 4]


def test_leaves_must_have_equal_length() -> None:
    with pytest.raises(ColumnLengthError, match=r"column 'obs\.y' must have 3 rows.*'obs\.x'.*got 2"):
        Batch(obs={"x": np.zeros(3), "y": np.zeros(2)}).as_sample_batch()
    for value in (1, "x", torch.distributions.Normal(torch.zeros(3), 1.0)):
        with pytest.raises(ColumnTypeError, match=r"column 'obs\.s' must have rows"):
            Batch(obs={"x": np.zeros(3), "s": value}).as_sample_batch()


def test_arrow() -> None:
    batch = Batch(obs={"x": np.arange(6.0).reshape(3, 2)}, rew=[1.0, 2.0, 3.0])
    table = batch.to_arrow()
    assert table.column_names == ["obs.x", "rew"]
    assert table.column("rew").chunk(0).buffers()[1].address == batch.rew.ctypes.data
    assert pa.table(batch).column("rew").to_pylist() == [1, 2, 3]
    assert pa.schema(batch).names == ["obs.x", "rew"]


def test_to_at_least_2d() -> None:
    raised = Batch(
        a=[1, 2], b=np.zeros((2, 3)), c=1, t=torch.zeros(2), s="x", none=None, n=Batch(r=Batch())
    ).to_at_least_2d()
    assert (raised.a.shape, raised.b.shape, raised.c.shape, raised.t.shape) == ((1, 2), (2, 3), (1, 1), (1, 2))
    assert raised.s.tolist() == [["x"]]
    assert raised.none.tolist() == [[None]]
    assert raised.n.r == Batch()


def test_replace_empty_batches_by_none() -> None:
    batch = Batch(a=[1], r=Batch(), n=Batch(m=Batch(), k=[1]), q=Batch(z=Batch()))
    assert batch.replace_empty_batches_by_none() is None
    assert batch == Batch(a=[1], r=None, n=Batch(m=None, k=[1]), q=Batch(z=None))


def test_set_array_at_key() -> None:
    batch = Batch(a=[1, 2, 3], n=Batch(x=[1, 2, 3]))
    batch.set_array_at_key(np.array([4, 5, 6]), "b")
    assert batch.b.tolist() == [4, 5, 6]
    batch.set_array_at_key(np.array([9]), "b", index=[1])
    assert batch.b.tolist() == [4, 9, 6]
    batch.set_array_at_key(np.array([4.5]), "f", index=[1])
    assert np.isnan(batch.f[[0, 2]]).all()
    batch.set_array_at_key(np.array([True]), "m", index=slice(1, 2))
    assert batch.m.tolist() == [False, True, False]
    batch.set_array_at_key(np.array(["x"], object), "o", index=[2])
    assert batch.o.tolist() == [None, None, "x"]
    batch.set_array_at_key(np.array([1.5, 2.5, 3.5]), "a")
    assert batch.a.tolist() == [1.5, 2.5, 3.5]
    for arr, key, index, error in (
        (np.array([4, 5]), "z", None, ValueError),
        (np.array([4]), "z", [1], TypeError),
        (np.array([4]), "n", [1], ValueError),
    ):
        with pytest.raises(error, match=f"column '{key}'"):
            batch.set_array_at_key(arr, key, index)


def test_plain_dicts() -> None:
    batch = Batch(a=[1, 2], b={"c": torch.zeros(2)}, r=Batch(), none=None)
    plain = batch.to_dict()
    assert plain["a"] is batch.a
    assert plain["b"]["c"] is batch.b.c
    assert plain["r"] == {}
    assert batch.to_dict(recursive=False)["b"] is batch.b
    assert batch.to_list_of_dicts() == [
        {"a": 1, "b": {"c": torch.tensor(0.0)}, "r": {}, "none": None},
        {"a": 2, "b": {"c": torch.tensor(0.0)}, "r": {}, "none": None},
    ]

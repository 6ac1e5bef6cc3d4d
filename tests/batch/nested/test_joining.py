"""Stacking and concatenating nested batches."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import ColumnMismatchError
from tests.optional import torch


def test_rows_of_missing_columns_are_filled_on_request() -> None:
    batches = [Batch(a=[1, 2], n=Batch(f=[1.0, 2.0])), Batch(a=[3]), Batch(a=[4], n=Batch(f=Batch(), o=["x"]))]
    zeros = Batch.cat(batches)
    assert zeros == Batch.cat(batches, missing="zero")
    assert zeros == Batch(a=[1, 2, 3, 4], n=Batch(f=[1.0, 2.0, 0.0, 0.0], o=[None, None, None, "x"]))
    nans = Batch.cat(batches, missing="nan").n
    assert nans.f[:2].tolist() == [1.0, 2.0]
    assert np.isnan(nans.f[2:]).all()
    assert nans.o.tolist() == [None, None, None, "x"]
    with pytest.raises(ColumnMismatchError, match=r"column 'n\.f' must be in every batch.*batch 1 lacks it"):
        Batch.cat(batches, missing="error")
    with pytest.raises(ColumnMismatchError, match=r"column 'n\.f' must be in every batch to be stacked, got 1 of 3"):
        Batch.stack([batch[:1] for batch in batches], missing="error")
    with pytest.raises(ColumnMismatchError, match=r"column 'i'.*has NaN.*int64"):
        Batch.cat([Batch(a=[1]), Batch(a=[1], i=[1])], missing="nan")
    with pytest.raises(ColumnMismatchError, match="missing must be"):
        Batch.cat([Batch(a=[1])], missing="none")
    assert torch.isnan(Batch.cat([Batch(a=[1]), Batch(a=[1], t=torch.ones(1))], missing="nan").t[0])
    assert np.isnat(Batch.cat([Batch(a=[1]), Batch(a=[1], d=np.array(["2020"], "M8[D]"))], missing="nan").d[0])


def test_joining_nothing_and_batches_without_rows() -> None:
    assert Batch.cat([]) == Batch.stack([]) == Batch()
    assert Batch.cat([Batch(), Batch(a=[1])], missing="error") == Batch(a=[1])
    assert Batch.cat([Batch(a=np.zeros((0, 2))), Batch(a=np.ones((1, 2)), b=[1])]) == Batch(a=np.ones((1, 2)), b=[1])
    batch = Batch()
    batch.stack_([Batch(a=1), Batch(a=2)])
    assert batch == Batch(a=[1, 2])
    batch.cat_([])
    assert batch == Batch(a=[1, 2])
    assert Batch.stack(batch) == Batch.cat(batch) == batch
    assert Batch.cat([{"a": [1], "b": ["x"]}, {"a": [2], "b": ["y"]}]) == Batch(a=[1, 2], b=["x", "y"])


def test_joining_promotes_dtypes() -> None:
    small, wide = Batch(a=np.zeros(1, "f4"), o=["x"]), Batch(a=np.zeros(1, "i8"), o=[1])
    assert Batch.cat([small, wide]).a.dtype == np.float64 == Batch.stack([small, wide]).a.dtype
    assert Batch.cat([small, wide]).o.tolist() == ["x", 1]
    assert Batch.cat([Batch(a=torch.tensor([1])), Batch(a=torch.tensor([1.5]))]).a.dtype == torch.float32
    large = [Batch(a=np.full((300, 400), i, dtype)) for i, dtype in enumerate(("f4", "f8"))]
    assert Batch.cat(large).a.dtype == np.float64
    assert Batch.cat(large).a[[0, 599], 0].tolist() == [0, 1]


def test_shapes_that_do_not_stack_become_objects() -> None:
    with pytest.warns(UserWarning, match=r"column 'o\.a': arrays of different shapes"):
        stacked = Batch.stack([Batch(o=Batch(a=[1, 2])), Batch(o=Batch(a=[3]))])
    assert stacked.o.a.dtype == object
    assert stacked.o.a[1].tolist() == [3]


def test_stacking_scalars() -> None:
    stacked = Batch.stack([{"n": None, "m": None, "s": "x"}, {"n": 1, "m": None, "s": 2}])
    assert stacked == Batch(n=[None, 1], m=[None, None], s=["x", "2"])

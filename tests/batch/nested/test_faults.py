"""Regressions of faults in Tianshou's Batch. Docstrings describe Tianshou's behaviour."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import SampleBatchError
from tests.optional import torch


@pytest.mark.parametrize("value", [np.arange(3), [1, 2], 3, "x", np.zeros((2, 2)), np.array(1)])
def test_values_without_a_name_are_rejected(value: object) -> None:
    """Tianshou: the result is silently empty."""
    with pytest.raises(TypeError, match="a Batch must be built from a dict") as caught:
        Batch(value)
    assert isinstance(caught.value, SampleBatchError)


def test_arithmetic_matches_by_name() -> None:
    """Tianshou: values are paired in the order of insertion."""
    total = Batch(a=[1, 2], b=[3, 4]) + Batch(b=[10, 20], a=[1, 1])
    assert total == Batch(a=[2, 3], b=[13, 24])
    target = Batch(a=[1.0], b=Batch(c=[2.0], d=[3.0]))
    target += Batch(b=Batch(d=[30.0], c=[20.0]), a=[10.0])
    assert target == Batch(a=[11.0], b=Batch(c=[22.0], d=[33.0]))


def test_in_place_transform_changes_nested_references() -> None:
    """Tianshou: references to a nested batch keep the old values."""
    batch = Batch(a=[1, 2], b=Batch(c=[1, 2], d=Batch(e=[3])))
    nested, deeper = batch.b, batch.b.d
    assert batch.apply_values_transform(lambda value: value + 1, inplace=True) is None
    assert batch.b is nested
    assert batch.b.d is deeper
    assert nested.c.tolist() == [2, 3]
    assert deeper.e.tolist() == [4]


@pytest.mark.parametrize(
    "name", ["keys", "values", "items", "get", "pop", "update", "split", "is_empty", "copy", "shape"]
)
def test_any_string_is_accepted_as_a_column_name(name: str) -> None:
    """Tianshou: a column named like a method of dict breaks the library's calls of that method."""
    batch = Batch({name: [1, 2], "n": Batch({name: [3, 4]})})
    assert getattr(batch, name).tolist() == [1, 2]
    assert len(batch) == 2
    assert batch[0] == Batch({name: np.int64(1), "n": Batch({name: np.int64(3)})})
    assert Batch.stack([batch, batch]).n[name].shape == (2, 2)
    assert Batch.cat([batch, batch]).n[name].tolist() == [3, 4, 3, 4]
    assert len(list(Batch.split(batch, 1))) == 2
    assert Batch.copy(batch) == batch == pickle.loads(pickle.dumps(batch))
    assert Batch.to_torch(batch).n[name].tolist() == [3, 4]
    assert (batch + 1).n[name].tolist() == [4, 5]
    assert np.mean(batch)[name] == 1.5
    assert Batch.to_dict(batch)[name].tolist() == [1, 2]
    assert Batch.isnull(batch)[name].tolist() == [False, False]
    batch[0] = {name: 7}
    assert batch["n"][name].tolist() == [0, 4]
    assert str(batch).count(f"{name}: array(") == 2


def test_nan_in_tensors_is_missing() -> None:
    """Tianshou: tensors never have missing values."""
    batch = Batch(a=torch.tensor([1.0, float("nan")]))
    assert batch.isnull().a.tolist() == [False, True]
    assert batch.hasnull()
    assert batch.dropnull().a.tolist() == [1.0]


def test_dropnull_keeps_dimensions_and_names() -> None:
    """Tianshou: one remaining row loses its dimension, and no remaining row loses the names."""
    assert Batch(a=[[1.0, np.nan], [2.0, 3.0]]).dropnull().a.tolist() == [[2.0, 3.0]]
    assert Batch(a=[[np.nan, 1.0]], b=["x"]).dropnull().to_dict()["a"].shape == (0, 2)


def test_integer_columns_become_float_in_new_batches_only() -> None:
    """Tianshou: an integer column cannot become a float column, not even out of place."""
    batch = Batch(a=[1, 2])
    assert (batch / 2).a.tolist() == [0.5, 1.0]
    assert (batch * 0.5 + 1.5).a.tolist() == [2.0, 2.5]
    with pytest.raises(TypeError, match="column 'a'"):
        batch /= 2
    assert batch.a.tolist() == [1, 2]


def test_to_torch_converts_on_the_first_call() -> None:
    """Tianshou: the dtype is ignored for arrays."""
    batch = Batch(a=np.zeros(2), n=Batch(b=[1, 2]))
    assert batch.to_torch(dtype=torch.float32).n.b.dtype == torch.float32
    batch.to_torch_(dtype=torch.float16)
    assert batch.a.dtype == torch.float16


def test_strings_are_scalars() -> None:
    """Tianshou: indexing a batch selects characters of its strings."""
    with pytest.raises(IndexError, match=r"column 'n\.s'"):
        Batch(a=[1, 2], n=Batch(s="xyz"))[0]
    with pytest.raises(TypeError, match="column 's' is a scalar"):
        len(Batch(s="xyz"))
    assert Batch(s="xyz")[...].s == "xyz"


def test_descending_slices_of_tensors() -> None:
    """Tianshou: torch rejects descending slices."""
    batch = Batch(a=torch.arange(6).reshape(3, 2), b=np.arange(6).reshape(3, 2))
    for index in (
        np.s_[::-1],
        np.s_[::-2],
        np.s_[1::-1],
        np.s_[:, ::-1],
        np.s_[..., ::-1],
        np.s_[0, ::-1],
        np.s_[None, ::-1],
    ):
        assert batch[index].a.tolist() == batch[index].b.tolist()
    batch[::-1] = Batch(a=[[1, 2], [3, 4], [5, 6]], b=[[1, 2], [3, 4], [5, 6]])
    assert batch.a.tolist() == batch.b.tolist() == [[5, 6], [3, 4], [1, 2]]


def test_rows_without_values_keep_their_positions() -> None:
    """Tianshou: empty dicts in a list are dropped, which shifts the other rows."""
    assert Batch(info=[{}, {"x": 1}, {}]).info.x.tolist() == [0, 1, 0]


def test_equal_distributions() -> None:
    """Tianshou: comparing distributions raises an error."""
    normal = torch.distributions.Normal
    a, b = Batch(d=normal(torch.zeros(2), torch.ones(2))), Batch(d=normal(torch.zeros(2), torch.ones(2)))
    assert a == b
    assert a != Batch(d=normal(torch.zeros(2), torch.full((2,), 2.0)))
    assert a != Batch(d=torch.distributions.Categorical(torch.ones(2, 2)))

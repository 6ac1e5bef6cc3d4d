"""Rows of nested batches: counting, indexing, assigning, splitting, emptying."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import Selection
from samplebatch.batch.nested.rows import _select, select
from samplebatch.errors import RowIndexError, SampleBatchError
from tests.optional import torch


def test_rows_of_different_lengths() -> None:
    batch = Batch(a=np.arange(4), n=Batch(b=torch.arange(3), r=Batch()), none=None)
    assert len(batch) == 3
    assert [row.n.b.item() for row in batch] == [0, 1, 2]
    assert batch[2].none is None
    assert bool(batch)
    assert not Batch(a=np.zeros(0))
    assert list(Batch()) == list(Batch(r=Batch())) == []


def test_indexing_errors_contain_the_name_of_the_leaf() -> None:
    batch = Batch(a=np.zeros(5), obs={"cam": np.zeros((3, 2))})
    cases: list[tuple[Any, str]] = [
        (4, r"column 'obs\.cam'.*out of bounds"),
        ([0, 4], r"column 'obs\.cam'.*out of bounds"),
        (np.ones(5, bool), r"column 'obs\.cam'.*mask has 5 rows and the column 3"),
        (np.s_[:, 0], "column 'a'.*too many indices"),
        (1.5, "column 'a'"),
        ((0, "a"), "column 'a'"),
        (["a"], "column 'a'"),
    ]
    for index, message in cases:
        with pytest.raises(RowIndexError, match=message):
            _ = batch[index]
    for scalar in (batch[0][...], Batch(), Batch(a=1)):
        with pytest.raises(IndexError):
            _ = scalar[0, 0, 0]


def test_slices_are_views() -> None:
    batch = Batch(a=np.zeros((4, 2)), t=torch.zeros(4, 2), n=Batch(x=np.zeros(4)))
    batch[1:3].n.x[0] = 5
    batch[0].t[1] = 7
    batch[0].a[1] = 8
    assert batch.n.x.tolist() == [0, 5, 0, 0]
    assert batch.t[0].tolist() == [0, 7]
    assert batch.a[0].tolist() == [0, 8]


def test_every_index() -> None:
    values = np.arange(24).reshape(4, 3, 2)
    batch = Batch(a=values.copy(), n=Batch(t=torch.from_numpy(values.copy())))
    mask = np.array([True, False, True, False])
    for index in (
        0, -1, np.int64(2), slice(None), slice(None, None, 2), slice(None, None, -1), slice(3, 0, -2), [3, 1], [-1], [],
        mask, mask.tolist(), torch.tensor([3, 0]), torch.from_numpy(mask), np.array([1, -1], np.int32), None, ...,
        np.s_[:, 1], np.s_[..., 0], np.s_[1, :, 0], np.s_[[0, 1], 1], np.s_[:, [2, 0]], np.s_[:, None, 1:],
        np.array([[0, 1], [2, 3]]), (),
    ):  # fmt: skip
        expected = values[index.numpy() if isinstance(index, torch.Tensor) else index]
        np.testing.assert_array_equal(batch[index].a, expected)
        np.testing.assert_array_equal(batch[index].n.t, expected)
    value = object()
    assert Batch(o=[value, None])[..., 0].o is value
    with pytest.raises(IndexError, match="one descending slice"):
        _ = batch[::-1, ::-1]


def test_assigning_rows() -> None:
    batch = Batch(a=[1, 2], c={"x": [3.0, 4.0], "y": ["a", "b"]}, t=torch.ones(2), r=Batch(), none=None)
    batch[1] = {"a": 3}
    assert batch == Batch(a=[1, 3], c={"x": [3.0, 0.0], "y": ["a", None]}, t=torch.tensor([1.0, 0.0]), r={}, none=None)
    batch[0] = Batch(a=9, c=Batch(x=1), t=np.array(5), r=Batch(), none=None)
    assert batch.c == Batch(x=[1.0, 0.0], y=[None, None])
    assert batch.t.tolist() == [5.0, 0.0]
    batch[:] = {"a": [4, 5], "c": {"x": [6, 7], "y": ["u", "v"]}, "t": [1, 2]}
    assert batch.c == Batch(x=[6.0, 7.0], y=["u", "v"])
    batch[[1]] = batch[[0]]
    assert batch.a.tolist() == [4, 4]
    batch[:] = {"a": (6, 6), "c": [{"x": 1.5, "y": "p"}, {"x": 2.5}]}
    assert batch.c == Batch(x=[1.5, 2.5], y=["p", None])
    assert batch[np.str_("c")] is batch.c
    batch[np.array([True, False])] = {"a": torch.tensor([8])}
    assert batch.a.tolist() == [8, 6]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (5, ValueError, "set from a Batch or dict, got int"),
        ({"z": 1}, ValueError, "got 'z'"),
        ({"c": {"xx": 1}}, ValueError, r"got 'c\.xx'; did you mean 'c\.x'"),
        ({"c": 5}, ValueError, "column 'c'.*nested batch"),
        ({"a": {"b": 1}}, ValueError, "column 'a'.*only be assigned to a nested batch"),
        ({"r": {"b": 1}}, ValueError, r"got 'r\.b'"),
        ({"none": 1}, TypeError, "column 'none'.*no rows"),
        ({"a": 1, "c": {"x": [1, 2, 3]}}, ValueError, r"column 'c\.x'"),
    ],
)
def test_unsupported_assignments_are_rejected(value: Any, error: type[Exception], message: str) -> None:
    batch = Batch(a=[1, 2], c={"x": [3.0, 4.0]}, r=Batch(), none=None)
    with pytest.raises(error, match=message) as caught:
        batch[0] = value
    assert isinstance(caught.value, SampleBatchError)
    with pytest.raises(RowIndexError, match="column 'a'"):
        batch[5] = {"a": 1}


def test_scalars_have_no_rows() -> None:
    for value in (1, None, "x", object()):
        with pytest.raises(ValueError, match=r"column 'o\.s'"):
            Batch.cat([Batch(o=Batch(s=value)), Batch(o=Batch(s=value))])
    with pytest.raises(ValueError, match=r"column 'a'.*axis 1"):
        Batch.stack([Batch(a=1), Batch(a=2)], axis=1)
    for wrong in (3, [3], [Batch(), "x"], {"a": 1}):
        with pytest.raises((TypeError, ValueError), match="must be"):
            Batch.stack(wrong)


def test_split() -> None:
    batch = Batch(a=np.arange(10), t=torch.arange(10))
    assert [len(part) for part in batch.split(7, merge_last=True)] == [10]
    assert [len(part) for part in batch.split(3, merge_last=True)] == [3, 3, 4]
    assert [len(part) for part in batch.split(3)] == [3, 3, 3, 1]
    assert [len(part) for part in batch.split(-1)] == [10]
    assert [len(part) for part in batch.split(20, merge_last=True)] == [10]
    sampled = np.concatenate([part.a for part in batch.split(4)])
    assert sorted(sampled.tolist()) == list(range(10))
    seeded = [np.concatenate([p.a for p in batch.split(4, rng=np.random.default_rng(5))]).tolist() for _ in range(2)]
    assert seeded[0] == seeded[1] != list(range(10))
    assert np.shares_memory(next(batch.split(4, shuffle=False)).a, batch.a)
    assert list(Batch().split(2)) == list(Batch(a=[]).split(2)) == []
    for size in (0, -3):
        with pytest.raises(ValueError, match="size must be a whole number from 1"):
            batch.split(size)


def test_empty() -> None:
    batch = Batch(
        a=[1, 2], t=torch.ones(2), o=["x", "y"], s="s", none=None, r=Batch(), n=Batch(h=[1.5, 2.5]), thing=object()
    )
    emptied = Batch.empty(batch)
    assert emptied.to_dict(recursive=False).keys() == batch.to_dict(recursive=False).keys()
    assert emptied == Batch(
        a=[0, 0], t=torch.zeros(2), o=[None, None], s=None, none=None, r={}, n={"h": [0.0, 0.0]}, thing=None
    )
    assert batch.a.tolist() == [1, 2]
    assert Batch.empty(batch, 0).n.h.tolist() == [0.0, 2.5]
    assert batch.empty_([1]) is batch
    assert batch.t.tolist() == [1, 0]
    assert Batch.empty(Batch(a=1, b=2.5, c=True)) == Batch(a=0, b=0.0, c=False)
    assert Batch.empty(Batch(a=[1, 2])[1]) == Batch(a=0)
    assert Batch.empty(Batch(d=np.array(["2020"], "M8[D]"))).d[0] == np.datetime64(0, "D")
    with pytest.raises(RowIndexError, match=r"column 'n\.h'"):
        Batch(n=Batch(h=[1])).empty_(3)


LEAVES = {
    "array": lambda: np.arange(12.0).reshape(6, 2),
    "flags": lambda: np.arange(6) % 2 == 0,
    "objects": lambda: np.array([{"a": 1}, None, "b", 2, [3], (4,)], object),
    "words": lambda: np.array(["a", "bb", "", "c", "d", "e"], np.dtypes.StringDType()),
    "tensor": lambda: torch.arange(18).reshape(6, 3),
    "missing": lambda: None,
    "reserved": lambda: Batch(),
    "distribution": lambda: torch.distributions.Categorical(logits=torch.arange(12.0).reshape(6, 2)),
}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(LEAVES)), min_size=1, max_size=4, unique=True),
    st.integers(0, 2),
    st.one_of(st.integers(-7, 7), st.slices(6)),
)
def test_single_rows_and_slices_agree_with_index_arrays(kinds: list[str], depth: int, index: Any) -> None:
    batch = Batch({kind: LEAVES[kind]() for kind in kinds})
    for _ in range(depth):
        batch = Batch(inner=batch, own=np.arange(6))
    outcomes = []
    for selected in (lambda: select(batch, index), lambda: _select(batch, Selection(index), "")):
        try:
            outcomes.append(selected())
        except SampleBatchError as error:
            outcomes.append((type(error), str(error)))
    assert repr(outcomes[0]) == repr(outcomes[1])

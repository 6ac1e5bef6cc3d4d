"""What users of Tianshou's Batch rely on, what ours adds, and what errors say."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RowIndexError, SampleBatchError

# What becomes of values


@pytest.mark.parametrize(
    ("given", "dtype", "shape"),
    [
        (4, "int64", ()),
        (True, "bool", ()),
        (1.5, "float64", ()),
        (1j, "complex128", ()),
        (np.float32(2), "float32", ()),
        ([], "float64", (0,)),
        ([[], []], "float64", (2, 0)),
        ([1, 2.5, True], "float64", (3,)),
        (range(3), "int64", (3,)),
        ((True, False), "bool", (2,)),
        (["a", "b"], "object", (2,)),
        ([b"a", b"b"], "object", (2,)),
        (np.array(["x", "y"]), "object", (2,)),
        ([None, 1], "object", (2,)),
        ([[1, 2], [3]], "object", (2,)),
        ([np.zeros(2), np.zeros(3)], "object", (2,)),
        ([np.zeros((2, 2)), np.zeros((3, 2))], "object", (2,)),
        ([np.zeros(2), None], "object", (2,)),
        ([np.zeros(2), [1, 2]], "float64", (2, 2)),
        ([{"x": 1}, None], "object", (2,)),
        ([[{"x": 1}], [{"x": 2}]], "object", (2, 1)),
        ([1, 10**30], "object", (2,)),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64[D]", (1,)),
        (np.float16([1, 2]), "float16", (2,)),
    ],
)
def test_what_becomes_of_a_value(given: Any, dtype: str, shape: tuple[int, ...]) -> None:
    kept = Batch(a=given).a
    assert isinstance(kept, np.ndarray)
    assert (str(kept.dtype), kept.shape) == (dtype, shape)
    assigned = Batch()
    assigned.a = given
    assigned["b"] = given
    assert (str(assigned.a.dtype), assigned.b.shape) == (dtype, shape)


def test_objects_are_kept() -> None:
    thing, names = object(), {"x", "y"}
    batch = Batch(thing=thing, names=names, none=None, text="x", cls=dict, wrapped=np.array(None), word=np.array("w"))
    assert batch.thing is thing
    assert batch.names is names
    assert batch.none is None
    assert (batch.text, batch.cls, batch.wrapped, batch.word) == ("x", dict, None, "w")
    assert Batch(n=10**30).n == 10**30


def test_lists_of_dicts_batches_and_tensors() -> None:
    expected = Batch(x=[1, 2])
    rows = [{"x": 1}, Batch(x=2)]
    objects = np.empty(2, object)
    objects[:] = rows
    for given in (rows, tuple(rows), objects):
        assert Batch(a=given).a == expected
        assert Batch(given) == expected
    assert Batch([]) == Batch(None) == Batch({}) == Batch()
    assert Batch(a={}).a == Batch(a=[{}, {}]).a == Batch()
    assert torch.equal(Batch(a=[torch.zeros(2), torch.ones(2)]).a, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert Batch(a=[torch.tensor(1), torch.tensor(2)]).a.tolist() == [1, 2]


@pytest.mark.parametrize(
    "given",
    [
        [torch.zeros(2), torch.zeros(3)],
        [torch.zeros(2), 1],
        [torch.zeros(2), np.zeros(2)],
        [np.zeros((2, 2)), np.zeros((2, 3))],
    ],
)
def test_what_does_not_stack_is_refused(given: Any) -> None:
    with pytest.raises(ColumnTypeError, match=r"column 'o\.a'"):
        Batch(o={"a": given})


def test_names_are_strings() -> None:
    for given in ({1: 2}, {"a": {1: 2}}, {"a": [{1: 2}]}):
        with pytest.raises(ColumnTypeError, match="must be strings, got int"):
            Batch(given)
    with pytest.raises(ColumnTypeError, match="the names in 'a' must be strings"):
        Batch(a={1: 2})


def test_values_are_held_by_reference() -> None:
    arr, inner = np.zeros(3), Batch(x=[1])
    batch = Batch({"a": arr}, n=inner)
    assert batch.a is arr
    assert batch.n is inner
    assert Batch(batch).a is arr
    assert Batch(copy=False, **batch).n is inner
    assert Batch({"copy": 1}).copy == 1
    assert Batch({"a": 1}, a=2).a == 2
    assert Batch(self=1, batch_dict=None).self == 1


def test_copies() -> None:
    info = {"x": [1]}
    batch = Batch(a=np.zeros(3), t=torch.zeros(3), n=Batch(o=[info, None]))
    for made in (batch.copy(), Batch(batch, copy=True), copy.deepcopy(batch)):
        assert isinstance(made, Batch)
        assert made == batch
        assert not np.shares_memory(made.a, batch.a)
        assert made.t.data_ptr() != batch.t.data_ptr()
        assert made.n.o[0] is not info
    shallow = copy.copy(batch)
    assert shallow.a is batch.a
    assert shallow.n is not batch.n
    assert shallow.n.o is batch.n.o


# Access


def test_dict_methods() -> None:
    batch = Batch(a=1, c=2)
    assert list(batch.keys()) == list(batch.get_keys()) == ["a", "c"]
    assert [int(v) for v in batch.values()] == [1, 2]
    assert "a" in batch
    assert "z" not in batch
    assert batch.pop("z") is None
    assert batch.get("z") is None
    assert batch.get("z", 7) == batch.pop("z", 7) == 7
    assert batch.pop("a") == 1
    assert batch.setdefault("d", [1, 2]) is batch.d
    assert batch.setdefault("c", 9) == 2
    assert batch.popitem()[0] == "d"
    del batch.c
    assert not batch.keys()
    batch.update({"e": {"f": [1]}}, g=[{"h": 1}])
    assert batch == Batch(e=Batch(f=[1]), g=Batch(h=[1]))
    batch.update(Batch(e=1))
    assert batch.e == 1
    del batch["e"]
    batch.clear()
    assert batch == Batch()
    with pytest.raises(TypeError, match="updated from a dict or Batch, got list"):
        batch.update([("a", 1)])


def test_missing_names() -> None:
    batch = Batch(reward=1)
    with pytest.raises(KeyError, match="no column 'rewards'; did you mean 'reward'") as caught:
        _ = batch["rewards"]
    assert isinstance(caught.value, SampleBatchError)
    with pytest.raises(KeyError, match="no column 'x'"):
        del batch["x"]
    with pytest.raises(AttributeError):
        _ = batch.rewards
    assert not hasattr(batch, "rewards")
    assert getattr(batch, "rewards", 3) == 3


# Rows


def test_rows_of_different_lengths() -> None:
    batch = Batch(a=np.arange(4), n=Batch(b=torch.arange(3), r=Batch()), none=None)
    assert len(batch) == 3
    assert [row.n.b.item() for row in batch] == [0, 1, 2]
    assert batch[2].none is None
    assert bool(batch)
    assert not Batch(a=np.zeros(0))
    assert list(Batch()) == list(Batch(r=Batch())) == []


def test_indexing_errors_name_the_leaf() -> None:
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
    thing = object()
    assert Batch(o=[thing, None])[..., 0].o is thing
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
        ({"a": {"b": 1}}, ValueError, "column 'a'.*no nested batch"),
        ({"r": {"b": 1}}, ValueError, r"got 'r\.b'"),
        ({"none": 1}, TypeError, "column 'none'.*no rows"),
        ({"a": 1, "c": {"x": [1, 2, 3]}}, ValueError, r"column 'c\.x'"),
    ],
)
def test_assignments_that_are_refused(value: Any, error: type[Exception], message: str) -> None:
    batch = Batch(a=[1, 2], c={"x": [3.0, 4.0]}, r=Batch(), none=None)
    with pytest.raises(error, match=message) as caught:
        batch[0] = value
    assert isinstance(caught.value, SampleBatchError)
    with pytest.raises(RowIndexError, match="column 'a'"):
        batch[5] = {"a": 1}


# Equality


def test_equality_minds_type_and_dtype() -> None:
    assert Batch(a=1, b=[2]) == Batch(b=[2], a=1)
    assert Batch(a=1) != Batch(a=1.0)
    assert Batch(a=[1]) != Batch(a=torch.tensor([1]))
    assert Batch(a=[1]) != {"a": np.array([1])}
    assert Batch(a=np.zeros(2, "f4")) != Batch(a=np.zeros(2))
    assert Batch(a=np.zeros(2)) != Batch(a=np.zeros((2, 1)))
    assert Batch(a=torch.zeros(2)) != Batch(a=torch.zeros(2).double())
    assert Batch(a=[np.nan]) != Batch(a=[np.nan])
    assert Batch(a=Batch()) == Batch(a=Batch()) != Batch(a=None) != Batch()
    assert Batch(a=[1, None]) == Batch(a=[1, None]) != Batch(a=[1, 2])
    assert Batch(a=[[1, 2], [3]]) == Batch(a=[[1, 2], [3]]) != Batch(a=[[1, 2], [4]])
    assert Batch(a=[{"x": np.zeros(2)}, None]) == Batch(a=[{"x": np.zeros(2)}, None])
    assert Batch(a=[np.zeros(2), None]) != Batch(a=[np.ones(2), None])
    assert Batch(a="x") == Batch(a="x") != Batch(a="y")
    with pytest.raises(TypeError, match="unhashable"):
        hash(Batch())


# Arithmetic and NumPy's functions


def test_operators() -> None:
    batch = Batch(a=[1, 2], n=Batch(t=torch.tensor([1.0, 4.0]), r=Batch()))
    cases = [
        (batch + 1, [2, 3], [2, 5]), (1 + batch, [2, 3], [2, 5]),
        (batch - 1, [0, 1], [0, 3]), (3 - batch, [2, 1], [2, -1]),
        (batch * 2.5, [2.5, 5], [2.5, 10]), (2 * batch, [2, 4], [2, 8]), (batch / 2, [0.5, 1], [0.5, 2]),
        (4 / batch, [4, 2], [4, 1]), (batch // 2, [0, 1], [0, 2]), (batch % 2, [1, 0], [1, 0]),
        (batch**2, [1, 4], [1, 16]),
        (2**batch, [2, 4], [2, 16]), (-batch, [-1, -2], [-1, -4]), (abs(-batch), [1, 2], [1, 4]),
        (batch * batch, [1, 4], [1, 16]),
        (np.float64(2) * batch, [2, 4], [2, 8]), (np.array(2) + batch, [3, 4], [3, 6]),
        (batch + np.array(2), [3, 4], [3, 6]), (7 // batch, [7, 3], [7, 1]),
        (7 % batch, [0, 1], [0, 3]),
    ]  # fmt: skip
    for made, a, t in cases:
        assert made.a.tolist() == a
        assert made.n.t.tolist() == t
        assert made.n.r == Batch()
    assert batch == Batch(a=[1, 2], n=Batch(t=torch.tensor([1.0, 4.0]), r=Batch()))


def test_operators_in_place() -> None:
    floats, tensor = np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])
    batch = Batch(a=floats, n=Batch(t=tensor, r=Batch()))
    same = batch
    batch += 1
    batch *= 4
    batch -= Batch(a=[1.0, 1.0], n=Batch(t=torch.ones(2), r=Batch()))
    batch /= 2
    batch **= 2
    batch //= 1
    batch %= 10
    assert batch is same
    assert floats.tolist() == tensor.tolist() == [2.0, 0.0]


def test_operands_that_are_refused() -> None:
    batch = Batch(a=[1, 2], o=Batch(b=[1.0, 2.0]))
    for operand in ([1], np.array([1, 2]), "x", None, {"a": 1}):
        with pytest.raises(TypeError, match="computed with numbers and Batches"):
            batch += operand
        with pytest.raises(TypeError):
            _ = batch + operand
        with pytest.raises(TypeError):
            _ = operand * batch
    for other in (Batch(a=[1, 2]), Batch(a=[1, 2], o=Batch()), Batch(a=[1, 2], o=Batch(c=[1, 2]))):
        with pytest.raises(ValueError, match=r"only one of them has '(o|o\.b|a)'"):
            _ = batch + other
    with pytest.raises(ValueError, match="column 'a' must be a nested batch in every batch or in none"):
        _ = batch + Batch(a=Batch(x=[1]), o=Batch(b=[1, 2]))
    with pytest.raises(TypeError, match="column 'o'"):
        _ = Batch(o=None) + 1
    with pytest.raises(TypeError, match=r"column 'o\.b' cannot be computed with in place"):
        Batch(o=Batch(b=[1])).__iadd__(0.5)


def test_reductions() -> None:
    batch = Batch(a=[[1, 2], [3, 4]], n=Batch(t=torch.tensor([[1.0, 2.0], [3.0, 6.0]]), r=Batch()))
    assert np.mean(batch) == Batch(a=2.5, n=Batch(t=torch.tensor(3.0), r=Batch()))
    assert np.sum(batch, axis=1) == Batch(a=[3, 7], n=Batch(t=torch.tensor([3.0, 9.0]), r=Batch()))
    assert np.max(batch, 0) == Batch(a=[3, 4], n=Batch(t=torch.tensor([3.0, 6.0]), r=Batch()))
    assert np.min(batch, axis=0, keepdims=True).a.shape == (1, 2)
    np.testing.assert_allclose(np.std(batch).n.t, np.std([1, 2, 3, 6]))
    np.testing.assert_allclose(np.var(batch, ddof=1).a, np.var([1, 2, 3, 4], ddof=1))
    assert np.any(np.greater(batch, 3)).a
    assert np.add.reduce(batch) == np.sum(batch, axis=0)
    assert np.mean(Batch(a=np.ones((2, 3)), b=np.ones(2))).a.tolist() == [1, 1, 1]
    assert np.mean(Batch(a=torch.tensor([1, 2]))).a == 1.5
    assert np.median(Batch(a=[1, 2, 9])).a == 2
    with pytest.raises(TypeError, match=r"column 'n\.t'.*torch has no median"):
        np.median(batch)
    with pytest.raises(TypeError, match="column 'o'"):
        np.mean(Batch(o=None))


def test_numpy_functions() -> None:
    batch = Batch(a=[1.0, 4.0], n=Batch(b=[-1.0, 9.0]))
    assert np.sqrt(abs(batch)) == Batch(a=[1.0, 2.0], n=Batch(b=[1.0, 3.0]))
    assert np.clip(batch, 0, 4).n.b.tolist() == [0, 4]
    assert np.maximum(batch, 2).a.tolist() == [2, 4]
    assert np.where(np.greater(batch, 2), batch, 0).n.b.tolist() == [0, 9]
    assert np.concatenate([batch, batch]) == Batch.cat([batch, batch])
    assert np.stack([batch, batch], axis=1) == Batch.stack([batch, batch], axis=1)
    assert np.shape(batch) == (2,)
    assert np.array_equal(batch, batch.copy())
    assert not np.allclose(batch, batch + 1)
    assert np.exp(Batch(t=torch.zeros(2))).t.tolist() == [1, 1]
    with pytest.raises(TypeError, match="takes numbers and Batches"):
        np.add(batch, np.zeros(2))
    with pytest.raises(TypeError, match=r"column 't'.*does not take tensors"):
        np.clip(Batch(t=torch.zeros(2)), 0, 1)
    with pytest.raises(TypeError):
        np.add(batch, 1, out=batch)


# Joining


def test_missing_rows_on_request() -> None:
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


def test_scalars_have_no_rows() -> None:
    for value in (1, None, "x", object()):
        with pytest.raises(ValueError, match=r"column 'o\.s'"):
            Batch.cat([Batch(o=Batch(s=value)), Batch(o=Batch(s=value))])
    with pytest.raises(ValueError, match=r"column 'a'.*axis 1"):
        Batch.stack([Batch(a=1), Batch(a=2)], axis=1)
    for wrong in (3, [3], [Batch(), "x"], {"a": 1}):
        with pytest.raises((TypeError, ValueError), match="must be"):
            Batch.stack(wrong)


def test_stacking_scalars() -> None:
    stacked = Batch.stack([{"n": None, "m": None, "s": "x"}, {"n": 1, "m": None, "s": 2}])
    assert stacked == Batch(n=[None, 1], m=[None, None], s=["x", "2"])


def test_split() -> None:
    batch = Batch(a=np.arange(10), t=torch.arange(10))
    assert [len(part) for part in batch.split(7, merge_last=True)] == [10]
    assert [len(part) for part in batch.split(3, merge_last=True)] == [3, 3, 4]
    assert [len(part) for part in batch.split(3)] == [3, 3, 3, 1]
    assert [len(part) for part in batch.split(-1)] == [10]
    assert [len(part) for part in batch.split(20, merge_last=True)] == [10]
    drawn = np.concatenate([part.a for part in batch.split(4)])
    assert sorted(drawn.tolist()) == list(range(10))
    seeded = [np.concatenate([p.a for p in batch.split(4, rng=np.random.default_rng(5))]).tolist() for _ in range(2)]
    assert seeded[0] == seeded[1] != list(range(10))
    assert np.shares_memory(next(batch.split(4, shuffle=False)).a, batch.a)
    assert list(Batch().split(2)) == list(Batch(a=[]).split(2)) == []
    for size in (0, -3):
        with pytest.raises(ValueError, match="size must be positive"):
            batch.split(size)


# The rest


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


def test_nulls() -> None:
    batch = Batch(
        a=[1.0, np.nan, 3.0], o=["x", "y", None], n=Batch(e=[1, 2, 3], d=np.array(["NaT", "2020", "2021"], "M8[D]"))
    )
    null = batch.isnull()
    assert null.a.tolist() == [False, True, False]
    assert null.o.tolist() == [False, False, True]
    assert null.n == Batch(e=np.zeros(3, bool), d=[True, False, False])
    assert batch.hasnull()
    assert not batch[:0].hasnull()
    assert len(batch.dropnull()) == 0
    assert Batch(a=[1.0, np.nan], m=[[1], [2]]).dropnull() == Batch(a=[1.0], m=[[1]])
    assert Batch(a=None, s="x", x=1.0, r=Batch()).isnull() == Batch(a=True, s=False, x=False, r=Batch())
    assert len(Batch(a=[1, 2], none=None).dropnull()) == 0
    assert Batch(r=Batch()).dropnull() == Batch(r=Batch())
    with pytest.raises(TypeError, match="column 'x' is a scalar"):
        Batch(x=1.0).dropnull()


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


def test_transform() -> None:
    batch = Batch(a=[1, 2], s="x", none=None, r=Batch(), n=Batch(b=[3]))
    types = batch.apply_values_transform(lambda value: type(value).__name__)
    assert types == Batch(a="ndarray", s="str", none="NoneType", r=Batch(), n=Batch(b="ndarray"))
    assert batch.apply_values_transform(lambda value: {"z": 1}).n.b == Batch(z=1)


def test_printing() -> None:
    class Steps(Batch):
        pass

    assert str(Batch()) == "Batch()"
    assert str(Steps(a=np.float32(2), r={})) == "Steps(\n    a: array(2., dtype=float32),\n    r: Batch(),\n)"
    assert "s: 'line\\nbreak'," in str(Batch(s="line\nbreak"))
    wide = str(Batch(n=Batch(o=np.arange(60))))
    assert wide.splitlines()[3] == " " * 21 + "17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33,"


def test_subclasses_stay_themselves() -> None:
    class Steps(Batch):
        pass

    steps = Steps(a=[1, 2], n={"b": [1, 2]})
    for made in (
        steps[0],
        steps + 1,
        steps.copy(),
        steps.to_torch(),
        next(iter(steps)),
        pickle.loads(pickle.dumps(Batch(s=1))).__class__,
    ):
        assert made is Batch or type(made) is Steps
    assert type(steps.n) is Batch

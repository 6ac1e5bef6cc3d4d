"""Values put into a nested batch: their conversion, equality and missing values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.values import narrow
from samplebatch.column.ragged import RaggedColumn
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RowIndexError
from tests.optional import torch


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
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
def test_values_are_converted_on_assignment(value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    retained = Batch(a=value).a
    assert isinstance(retained, np.ndarray)
    assert (str(retained.dtype), retained.shape) == (dtype, shape)
    assigned = Batch()
    assigned.a = value
    assigned["b"] = value
    assert (str(assigned.a.dtype), assigned.b.shape) == (dtype, shape)


def test_objects_are_preserved() -> None:
    value, names = object(), {"x", "y"}
    batch = Batch(thing=value, names=names, none=None, text="x", cls=dict, wrapped=np.array(None), word=np.array("w"))
    assert batch.thing is value
    assert batch.names is names
    assert batch.none is None
    assert (batch.text, batch.cls, batch.wrapped, batch.word) == ("x", dict, None, "w")
    assert Batch(n=10**30).n == 10**30


def test_lists_of_dicts_batches_and_tensors() -> None:
    expected = Batch(x=[1, 2])
    rows = [{"x": 1}, Batch(x=2)]
    objects = np.empty(2, object)
    objects[:] = rows
    for value in (rows, tuple(rows), objects):
        assert Batch(a=value).a == expected
        assert Batch(value) == expected
    assert Batch([]) == Batch(None) == Batch({}) == Batch()
    assert Batch(a={}).a == Batch(a=[{}, {}]).a == Batch()
    assert torch.equal(Batch(a=[torch.zeros(2), torch.ones(2)]).a, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert Batch(a=[torch.tensor(1), torch.tensor(2)]).a.tolist() == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        [torch.zeros(2), torch.zeros(3)],
        [torch.zeros(2), 1],
        [torch.zeros(2), np.zeros(2)],
        [np.zeros((2, 2)), np.zeros((2, 3))],
    ],
)
def test_values_that_do_not_stack_are_rejected(value: Any) -> None:
    with pytest.raises(ColumnTypeError, match=r"column 'o\.a'"):
        Batch(o={"a": value})


def test_names_are_strings() -> None:
    for value in ({1: 2}, {"a": {1: 2}}, {"a": [{1: 2}]}):
        with pytest.raises(ColumnTypeError, match="must be strings, got int"):
            Batch(value)
    with pytest.raises(ColumnTypeError, match="the names in 'a' must be strings"):
        Batch(a={1: 2})


def test_transform() -> None:
    batch = Batch(a=[1, 2], s="x", none=None, r=Batch(), n=Batch(b=[3]))
    types = batch.apply_values_transform(lambda value: type(value).__name__)
    assert types == Batch(a="ndarray", s="str", none="NoneType", r=Batch(), n=Batch(b="ndarray"))
    assert batch.apply_values_transform(lambda value: {"z": 1}).n.b == Batch(z=1)


def test_equality_compares_type_and_dtype() -> None:
    assert Batch(a=1, b=[2]) == Batch(b=[2], a=1)
    assert Batch(a=1) != Batch(a=1.0)
    assert Batch() != Batch(a=1)
    assert Batch(a=[1]) != Batch(a=torch.tensor([1]))
    assert Batch(a=[1]) != {"a": np.array([1])}
    assert Batch(a=np.zeros(2, "f4")) != Batch(a=np.zeros(2))
    assert Batch(a=np.zeros(2)) != Batch(a=np.zeros(2, "f4"))
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


def test_a_scalar_equals_an_array_of_one_number() -> None:
    assert Batch(a=1) == Batch(a=[1]) == Batch(a=np.int64(1)) == Batch([{"a": 1}])[0]
    assert Batch(a=torch.tensor(1.0)) == Batch(a=torch.tensor([1.0]))
    assert Batch(a=[1]) != Batch(a=[[1]])
    assert Batch(a=1) != Batch(a=[2])
    assert Batch(a=np.int32(1)) != Batch(a=[1])
    assert Batch(a=1) != Batch(a=[True])
    assert Batch(a=torch.tensor(1)) != Batch(a=[1])


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


def test_objects_that_are_numbers_become_numbers_once_nulls_are_dropped() -> None:
    batch = Batch(a=[None, 2, 3, 4], b=[4, 5, None, 7], n=Batch(c=[1, True, 2.5, 3]), s=["x", "y", "z", None])
    rows = batch[:3].dropnull()
    assert rows == Batch(a=[2], b=[5], n=Batch(c=[1.0]), s=["y"])
    assert rows.a.dtype == np.int64
    rows.pop("s")
    assert rows.to_torch().a.tolist() == [2]
    retained = Batch(o=[None, {"x": 1}, 10**30]).dropnull().o
    assert retained.tolist() == [{"x": 1}, 10**30]


@pytest.mark.parametrize("items", [[2**53 + 1, 0.5], [2**64 - 1, -1], [2**60 + 1, 1j]], ids=repr)
def test_numbers_without_an_exact_dtype_remain_objects(items: list[Any]) -> None:
    rows = Batch(a=np.array([None, *items], object)).dropnull()
    assert rows.a.dtype == object
    assert rows.a.tolist() == items


def test_objects_of_numbers_and_nan_become_numbers() -> None:
    numbers = narrow(np.array([[1, float("nan")], [2.5, 3]], object))
    np.testing.assert_array_equal(numbers, np.array([[1, np.nan], [2.5, 3]]), strict=True)


def with_ragged() -> Batch:
    return Batch(ids=RaggedColumn.from_rows([[1, 2], [3], [], [4, 5]]), t=np.arange(4))


def test_ragged_columns_are_preserved_by_every_selection() -> None:
    batch = with_ragged()
    for index, rows in (
        (slice(1, 3), [[3], []]),
        (slice(None, None, -2), [[4, 5], [3]]),
        ([0, -1], [[1, 2], [4, 5]]),
        (np.array([True, False, False, True]), [[1, 2], [4, 5]]),
        (..., [[1, 2], [3], [], [4, 5]]),
        ((np.array([1]),), [[3]]),
    ):
        part = batch[index]
        assert isinstance(part.ids, RaggedColumn), index
        assert [row.tolist() for row in part.ids] == rows
    assert batch[0].ids.tolist() == [1, 2]
    assert batch[np.array([[0, 1], [2, 3]])].ids.shape == (2, 2)
    assert [row.ids.tolist() for row in batch] == [[1, 2], [3], [], [4, 5]]
    assert [part.ids.lengths.tolist() for part in batch.split(3, shuffle=False)] == [[2, 1, 0], [2]]
    with pytest.raises(RowIndexError, match="mask"):
        batch[np.array([True, False])]


def test_rows_of_ragged_columns_are_written_and_emptied() -> None:
    batch = with_ragged()
    batch[0] = Batch(ids=[7, 8], t=9)
    batch[[1, 3]] = Batch(ids=[[6], [1, 1]], t=[0, 0])
    assert [row.tolist() for row in batch.ids] == [[7, 8], [6], [], [1, 1]]
    batch.empty_(0)
    assert batch.ids[0].tolist() == [0, 0]
    with pytest.raises(ColumnMismatchError, match=r"row 1 must keep its shape \(1,\), got \(2,\)"):
        batch[1] = Batch(ids=[1, 2], t=0)


def test_ragged_columns_are_joined_padded_and_compared() -> None:
    batch = with_ragged()
    joined = Batch.cat([batch, Batch(ids=np.array([[8, 9]]), t=[4]), Batch(t=[5, 6])])
    assert isinstance(joined.ids, RaggedColumn)
    assert [row.tolist() for row in joined.ids] == [[1, 2], [3], [], [4, 5], [8, 9], [], []]
    assert batch == with_ragged() == batch.copy()
    other = with_ragged()
    other.ids[0][0] = 0
    assert batch != other
    assert batch != Batch(ids=RaggedColumn.from_rows([[1], [2, 3], [], [4, 5]]), t=np.arange(4))
    assert batch.shape == [4]
    assert len(batch) == 4


def test_arithmetic_applies_to_the_elements_of_ragged_columns() -> None:
    batch = with_ragged()
    doubled = batch + batch
    assert [row.tolist() for row in doubled.ids] == [[2, 4], [6], [], [8, 10]]
    assert [row.tolist() for row in (batch * 2).ids] == [row.tolist() for row in np.negative(-2 * batch).ids]
    batch += 1
    assert batch.ids[0].tolist() == [2, 3]
    with pytest.raises(ColumnMismatchError, match="same shapes"):
        batch + Batch(ids=batch.ids[::-1], t=batch.t)
    with pytest.raises(ColumnTypeError, match=r"column 'ids' .*pad them first"):
        np.sum(batch)


def test_missing_values_of_ragged_columns_are_counted_by_row() -> None:
    batch = Batch(x=RaggedColumn.from_rows([[1.0], [np.nan, 2.0], []]), t=[0, 1, 2])
    assert batch.isnull().x.tolist() == [False, True, False]
    assert batch.hasnull()
    assert batch.dropnull().t.tolist() == [0, 2]

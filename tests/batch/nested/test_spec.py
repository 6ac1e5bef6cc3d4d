"""Every example of the documents that specify the nested batch, with the output they document.

Where a document shows what its own code cannot give (a missing comma, an earlier version's number), the test says so.
"""

from __future__ import annotations

import pickle
import re
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from samplebatch.batch.nested.batch import Batch
from tests.optional import torch


def shown(batch: Any) -> str:
    """Print a batch without indentation, as in the tutorial."""
    return "\n".join(line.strip() for line in str(batch).splitlines())


def text(documented: str) -> str:
    return dedent(documented).strip("\n")


def entries(printed: str) -> set[str]:
    """Split the text of a flat batch into entries, because older versions of Tianshou print names in another order."""
    body = printed.removeprefix("Batch(\n").removesuffix("\n)")
    return set(re.split(r"\n\s*(?=\w+: )", body.strip()))


# The tutorial on Batch


def test_construct_from_dict() -> None:
    data = Batch({"a": 4, "b": [5, 5], "c": "2312312"})
    assert repr(data.b) == "array([5, 5])"
    data.b = np.array([3, 4, 5])
    assert shown(data) == "Batch(\na: 4,\nb: array([3, 4, 5]),\nc: '2312312',\n)"


def test_construct_from_list_of_dicts() -> None:
    data = Batch([{"a": 0.0, "b": "hello"}, {"a": 1.0, "b": "world"}])
    assert shown(data) == "Batch(\na: array([0., 1.]),\nb: array(['hello', 'world'], dtype=object),\n)"


def test_construct_from_keywords() -> None:
    expected = "Batch(\na: array([4, 4]),\nb: array([5, 5]),\nc: array([None, None], dtype=object),\n)"
    assert shown(Batch(a=[4, 4], b=[5, 5], c=[None, None])) == expected
    assert shown(Batch({"a": [4, 4], "b": [5, 5]}, c=[None, None])) == expected
    arr = np.zeros((3, 4))
    assert Batch(arr=arr).arr is arr
    copied = Batch(arr=arr, copy=True).arr
    assert copied is not arr
    assert not np.shares_memory(copied, arr)
    np.testing.assert_array_equal(copied, arr)


def test_access(capsys: pytest.CaptureFixture[str]) -> None:
    data = Batch(a=4, b=[5, 5])
    print(data.b)
    print(data["a"])
    for key, value in data.items():
        print(f"{key}: {value}")
    for key in data.keys():  # noqa: SIM118 (a Batch iterates over its rows)
        print(f"{key}")
    data.update(c=1, d=2, e=3)
    # The page shows `b: [5, 5]` in the loop: what NumPy prints for it is `[5 5]`, as two lines before.
    assert capsys.readouterr().out == "[5 5]\n4\na: 4\nb: [5 5]\na\nb\n"
    assert shown(data) == "Batch(\na: 4,\nb: array([5, 5]),\nc: 1,\nd: 2,\ne: 3,\n)"


def test_length_shape_indexing_slicing(capsys: pytest.CaptureFixture[str]) -> None:
    data = Batch(a=np.array([[0.0, 2.0], [1.0, 3.0]]), b=[[5, -5], [1, -2]])
    assert len(data) == 2
    assert data.shape == [2, 2]
    # The page lacks the comma after the first entry.
    assert shown(data[0]) == "Batch(\na: array([0., 2.]),\nb: array([ 5, -5]),\n)"
    for sample in data:
        print(sample.a)
    assert capsys.readouterr().out == "[0. 2.]\n[1. 3.]\n"
    # The page applies np.mean after the addition, and shows the result of doing so before.
    assert shown(np.mean(data)) == "Batch(\na: 1.5,\nb: -0.25,\n)"
    data[:, 1] += 1
    # The page shows `b: array([[ 5, -4]])` here, without its second row, which its next example has.
    assert shown(data) == "Batch(\na: array([[0., 3.],\n[1., 4.]]),\nb: array([[ 5, -4],\n[ 1, -1]]),\n)"
    listed = "[" + ",\n".join(shown(row) for row in list(data)) + "]"
    assert listed == text("""
        [Batch(
        a: array([0., 3.]),
        b: array([ 5, -4]),
        ),
        Batch(
        a: array([1., 4.]),
        b: array([ 1, -1]),
        )]""")


STACKED = "Batch(\nb: array([ 5, -5]),\na: array([[0., 2.],\n[1., 3.]]),\n)"


def test_stack_split_cat() -> None:
    data_1 = Batch(a=np.array([0.0, 2.0]), b=5)
    data_2 = Batch(a=np.array([1.0, 3.0]), b=-5)
    data = Batch.stack((data_1, data_2))
    assert entries(shown(data)) == entries(STACKED)
    data_split = list(data.split(1, shuffle=False))
    documented = [
        "Batch(\nb: array([5]),\na: array([[0., 2.]]),\n)",
        "Batch(\nb: array([-5]),\na: array([[1., 3.]]),\n)",
    ]
    assert [entries(shown(part)) for part in data_split] == [entries(part) for part in documented]
    assert [shown(part) for part in data.split(1, False)] == [shown(part) for part in data_split]
    assert entries(shown(Batch.cat(data_split))) == entries(STACKED)


def test_key_reservation() -> None:
    tensor = torch.zeros(2)
    a = Batch(b=Batch())
    assert a.b.is_empty()
    a = Batch(b=Batch(c=Batch()), d=Batch())
    assert a.b.c == Batch() == a.d
    a = Batch(key1=tensor, key2=tensor, key3=Batch(key4=Batch(), key5=Batch()))
    assert a.key3.key4 == Batch()
    with pytest.raises(AttributeError):
        _ = Batch().b
    a.key3.key4 = tensor
    a.key3["key5"] = {"deeper": 1}
    assert a.key3.key4 is tensor
    assert a.key3.key5.deeper == 1


def test_is_empty() -> None:
    assert Batch().is_empty() is True
    assert Batch(a=Batch(), b=Batch(c=Batch())).is_empty() is False
    assert Batch(a=Batch(), b=Batch(c=Batch())).is_empty(recurse=True) is True
    assert Batch(d=1).is_empty() is False
    assert Batch(a=np.float64(1.0)).is_empty() is False


def test_len_and_shape() -> None:
    data = Batch(a=[5.0, 4.0], b=np.zeros((2, 3, 4)))
    assert data.shape == [2]
    assert len(data) == 2
    assert data[0].shape == []
    with pytest.raises(TypeError, match=r"(?i)object of type 'Batch' has no len\(\)"):
        len(data[0])


def test_len_and_shape_rules() -> None:
    assert len(Batch(a=np.zeros((4, 5)), b=np.zeros((3, 6)))) == 3
    assert Batch(a=np.zeros((4, 5)), b=np.zeros((3, 6))).shape == [3, 5]
    assert Batch(a=np.zeros((4, 5)), b=np.zeros((4, 5))).shape == [4, 5]
    assert len(Batch(a=np.zeros(4), r=Batch())) == 4
    assert Batch(a=np.zeros(4), r=Batch()).shape == [] == Batch().shape == Batch(a=np.zeros(4), s=1).shape
    # The tutorial says that a batch without any tensor has no length; clients depend on 2.0.1, which says 0.
    assert len(Batch()) == len(Batch(r=Batch())) == 0


def test_aggregate_missing_keys() -> None:
    a = Batch(a=np.zeros([4, 4]), common=Batch(c=np.zeros([4, 5])))
    b = Batch(b=np.zeros([4, 6]), common=Batch(c=np.zeros([4, 5])))
    c = Batch.stack([a, b])
    assert (c.a.shape, c.b.shape, c.common.c.shape) == ((2, 4, 4), (2, 4, 6), (2, 4, 5))
    data_1 = Batch(a=np.array([0.0, 2.0]))
    data_2 = Batch(a=np.array([1.0, 3.0]), b="done")
    data = Batch.stack((data_1, data_2))
    assert shown(data) == "Batch(\na: array([[0., 2.],\n[1., 3.]]),\nb: array([None, 'done'], dtype=object),\n)"
    a = Batch(a=np.zeros([3, 4]), common=Batch(c=np.zeros([3, 5])))
    b = Batch(b=np.zeros([4, 3]), common=Batch(c=np.zeros([4, 5])))
    c = Batch.cat([a, b])
    assert (c.a.shape, c.b.shape, c.common.c.shape) == ((7, 4), (7, 3), (7, 5))


@pytest.mark.parametrize("turn", [1, -1])
def test_too_heterogeneous(turn: int) -> None:
    batches = [Batch(a=np.zeros([4, 4])), Batch(a=Batch(b=Batch()))][::turn]
    with pytest.raises(ValueError, match="column 'a' must be a nested batch in all or in none"):
        Batch.stack(batches)
    with pytest.raises(ValueError, match="column 'a' must be a nested batch in all or in none"):
        Batch.cat(batches)


def test_aggregated_structure() -> None:
    """Every key of any batch exists: reserved if it is reserved in all batches, padded if some lack it."""
    batches = [Batch(x=[1], r=Batch(), s=Batch(), t=Batch(u=Batch())), Batch(x=[2], r=[3], s=Batch(), t=Batch(u=[4]))]
    joined = Batch.cat(batches)
    assert joined == Batch(x=[1, 2], r=[0, 3], s=Batch(), t=Batch(u=[0, 4]))
    assert Batch.stack(batches) == Batch(x=[[1], [2]], r=[[0], [3]], s=Batch(), t=Batch(u=[[0], [4]]))


def test_aggregation_of_mixed_tensors_raises() -> None:
    for join in (Batch.stack, Batch.cat):
        with pytest.raises(TypeError, match=r"column 'o\.a' must contain tensors"):
            join([Batch(o=Batch(a=np.zeros(2))), Batch(o=Batch(a=torch.zeros(2)))])
    with pytest.raises(TypeError, match="column 'a'"):
        Batch.stack([Batch(a=torch.zeros(2)), Batch(a=torch.zeros(3))])
    with pytest.raises(ValueError, match="column 'a'"):
        Batch.cat([Batch(a=np.zeros((1, 2))), Batch(a=np.zeros((1, 3)))])


def test_pickle() -> None:
    data = Batch(a=[1, 2], b=Batch(c=torch.zeros(2), r=Batch()), d="x", e=None)
    assert pickle.loads(pickle.dumps(data)) == data


def test_to_torch_and_to_numpy_in_place() -> None:
    data = Batch(a=np.zeros((3, 4)))
    data.to_torch_(dtype=torch.float32, device="cpu")
    assert str(data.a) == "tensor([[0., 0., 0., 0.],\n        [0., 0., 0., 0.],\n        [0., 0., 0., 0.]])"
    data.to_numpy_()
    assert isinstance(data.a, np.ndarray)
    assert data.a.dtype == np.float32


def test_in_place_joins_are_the_static_ones() -> None:
    def parts() -> list[Batch]:
        return [Batch(a=np.array([[i, i]])) for i in range(3)]

    obj, a, b = parts()
    obj.stack_([a, b])
    assert obj == Batch.stack(parts())
    obj, a, b = parts()
    obj.cat_([a, b])
    assert obj == Batch.cat(parts())
    obj, a, _ = parts()
    obj.cat_(a)
    assert obj == Batch.cat(parts()[:2])
    obj, a, b = parts()
    obj.stack_([a, b], axis=1)
    assert obj == Batch.stack(parts(), axis=1)
    with pytest.raises(ValueError, match="column 'b' must be in every batch to be stacked along axis 1"):
        Batch.stack([Batch(a=[1, 2]), Batch(a=[1, 2], b=[1, 2])], axis=1)


# The page on concepts, current version


def test_concepts() -> None:
    data = Batch(a=4, b=[5, 5], c="2312312", d=("a", -2, -3))
    assert repr(data.b) == "array([5, 5])"
    data.b = np.array([3, 4, 5])
    assert str(data) == text("""
        Batch(
            a: 4,
            b: array([3, 4, 5]),
            c: '2312312',
            d: array(['a', '-2', '-3'], dtype=object),
        )""")
    data = Batch(obs={"index": np.zeros((2, 3))}, act=torch.zeros((2, 2)))
    data[:, 1] += 6
    assert str(data[-1]) == text("""
        Batch(
            obs: Batch(
                     index: array([0., 6., 0.]),
                 ),
            act: tensor([0., 6.]),
        )""")


def test_concepts_batch_of_one_observation() -> None:
    obs = np.zeros(3)
    assert Batch(obs=[obs]).obs.shape == (1, 3)


# The page on concepts, older version


def test_older_concepts_list_of_dicts() -> None:
    data = Batch([{"a": {"b": [0.0, "info"]}}])
    # The older page keeps the number (`array([0.0, 'info'], dtype=object)`); on the newer one mixed lists hold strings.
    assert str(data[0]) == text("""
        Batch(
            a: Batch(
                   b: array(['0.0', 'info'], dtype=object),
               ),
        )""")


def test_older_concepts_indexing(capsys: pytest.CaptureFixture[str]) -> None:
    data = Batch(a=4, b=[5, 5])
    assert str(data["a"]) == "4"
    data = Batch(a=np.array([[0.0, 2.0], [1.0, 3.0]]), b=[[5, -5]])
    # The page lacks the comma after the first entry.
    assert str(data[0]) == "Batch(\n    a: array([0., 2.]),\n    b: array([ 5, -5]),\n)"
    for sample in data:
        print(sample.a)
    assert capsys.readouterr().out == "[0. 2.]\n"
    assert data.shape == [1, 2]
    data[:, 1] += 1
    assert str(data) == text("""
        Batch(
            a: array([[0., 3.],
                      [1., 4.]]),
            b: array([[ 5, -4]]),
        )""")


def test_older_concepts_algebra() -> None:
    data_1 = Batch(a=np.array([0.0, 2.0]), b=5)
    data_2 = Batch(a=np.array([1.0, 3.0]), b=-5)
    data = Batch.stack((data_1, data_2))
    assert entries(shown(np.mean(data))) == entries("Batch(\nb: 0.0,\na: array([0.5, 2.5]),\n)")


def test_older_concepts_inconsistent_data_and_empty() -> None:
    data = Batch.stack((Batch(a=np.array([0.0, 2.0])), Batch(a=np.array([1.0, 3.0]), b="done")))
    assert str(data) == text("""
        Batch(
            a: array([[0., 2.],
                      [1., 3.]]),
            b: array([None, 'done'], dtype=object),
        )""")
    data.empty_()
    assert str(data) == text("""
        Batch(
            a: array([[0., 0.],
                      [0., 0.]]),
            b: array([None, None], dtype=object),
        )""")
    data = Batch(a=[False, True], b={"c": [2.0, "st"], "d": [1.0, 0.0]})
    data[0] = Batch.empty(data[1])
    # The page leaves out `dtype=object` here, which it shows everywhere else.
    assert repr(data) == text("""
        Batch(
            a: array([False,  True]),
            b: Batch(
                   c: array([None, 'st'], dtype=object),
                   d: array([0., 0.]),
               ),
        )""")

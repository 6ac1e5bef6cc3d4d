"""Access to a nested batch by name, as to a dict."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import SampleBatchError


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
    with pytest.raises(TypeError, match="must be a Batch or a dict, got list"):
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


def test_operations_return_the_same_subclass() -> None:
    class Steps(Batch):
        pass

    steps = Steps(a=[1, 2], n={"b": [1, 2]})
    for result in (
        steps[0],
        steps + 1,
        steps.copy(),
        steps.to_torch(),
        next(iter(steps)),
        type(pickle.loads(pickle.dumps(Batch(s=1)))),
    ):
        assert result is Batch or type(result) is Steps
    assert type(steps.n) is Batch

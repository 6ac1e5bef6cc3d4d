"""Operators and NumPy's functions on nested batches."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch.batch.nested.batch import Batch
from tests.optional import torch


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
    for result, a, t in cases:
        assert result.a.tolist() == a
        assert result.n.t.tolist() == t
        assert result.n.r == Batch()
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


def test_unsupported_operands_are_rejected() -> None:
    batch = Batch(a=[1, 2], o=Batch(b=[1.0, 2.0]))
    for operand in ([1], np.array([1, 2]), "x", None, {"a": 1}):
        with pytest.raises(TypeError, match="must be a number or a Batch"):
            batch += operand
        with pytest.raises(TypeError):
            _ = batch + operand
        with pytest.raises(TypeError):
            _ = operand * batch
    for other in (Batch(a=[1, 2]), Batch(a=[1, 2], o=Batch()), Batch(a=[1, 2], o=Batch(c=[1, 2]))):
        with pytest.raises(ValueError, match=r"only one batch has '(o|o\.b|a)'"):
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
    with pytest.raises(TypeError, match="accepts only numbers and Batches"):
        np.add(batch, np.zeros(2))
    with pytest.raises(TypeError, match=r"column 't'.*does not support tensors"):
        np.clip(Batch(t=torch.zeros(2)), 0, 1)
    with pytest.raises(TypeError):
        np.add(batch, 1, out=batch)

"""Torch distributions in nested batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import distributions as td

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.distributions import dist_to_atleast_2d, get_len_of_dist, get_sliced_dist
from tests.optional import torch


def distributions() -> list[Any]:
    zeros, ones = torch.zeros(4), torch.ones(4)
    return [
        td.Normal(zeros, ones),
        td.Normal(torch.arange(4.0), 1.0),
        td.Categorical(logits=torch.arange(12.0).reshape(4, 3)),
        td.Categorical(probs=torch.arange(1.0, 13).reshape(4, 3)),
        td.Bernoulli(probs=ones / 3),
        td.Bernoulli(logits=ones / 3),
        td.Gamma(ones * 2, ones * 3),
        td.MultivariateNormal(torch.zeros(4, 2), covariance_matrix=torch.eye(2) * 2),
        td.Independent(td.Normal(torch.zeros(4, 2), torch.ones(4, 2)), 1),
        td.Dirichlet(torch.ones(4, 3)),
    ]


@pytest.mark.parametrize("dist", distributions(), ids=lambda dist: type(dist).__name__)
def test_distributions_are_sliced(dist: Any) -> None:
    sample = dist.sample()
    expected = dist.log_prob(sample)
    batch = Batch(dist=dist, a=np.arange(4))
    assert len(batch) == 4 == get_len_of_dist(dist)
    for index in (slice(1, 3), 2, [3, 1], np.array([True, False, True, True]), torch.tensor([0, 2]), ...):
        part = batch[index].dist
        assert type(part) is type(dist)
        torch.testing.assert_close(part.log_prob(sample[index]), expected[index])
    rows = list(batch)
    assert len(rows) == 4
    torch.testing.assert_close(rows[3].dist.log_prob(sample[3]), expected[3])
    assert rows[0].to_at_least_2d().dist.batch_shape == (1,)
    assert batch.to_at_least_2d().dist is dist
    torch.testing.assert_close(batch[::-1].dist.log_prob(sample.flip(0)), expected.flip(0))
    assert batch.to_torch().dist is batch.to_numpy().dist is dist
    assert Batch(dist=dist).isnull().dist == np.False_


def test_derived_parameters_do_not_prevent_slicing() -> None:
    dist = td.Categorical(logits=torch.randn(4, 3))
    _ = dist.probs
    torch.testing.assert_close(get_sliced_dist(dist, slice(2)).logits, dist.logits[:2])


def test_distributions_without_rows() -> None:
    scalar = td.Normal(torch.tensor(0.0), torch.tensor(1.0))
    with pytest.raises(TypeError, match="must have a batch dimension"):
        get_len_of_dist(scalar)
    assert get_len_of_dist(dist_to_atleast_2d(scalar)) == 1
    with pytest.raises(TypeError, match="column 'd'"):
        len(Batch(d=scalar))
    with pytest.raises(TypeError, match=r"column 'd'.*must declare its parameters"):
        _ = Batch(d=td.TransformedDistribution(td.Normal(torch.zeros(2), 1.0), []))[0]
    stacked = Batch.stack([Batch(d=scalar), Batch(d=scalar)])
    assert stacked.d.dtype == object
    with pytest.raises(ValueError, match="column 'd' must have rows"):
        Batch.cat([Batch(d=td.Normal(torch.zeros(2), 1.0))])

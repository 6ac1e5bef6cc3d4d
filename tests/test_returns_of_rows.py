"""Returns and advantages of ragged columns, compared with a plain loop over rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import SampleBatch
from samplebatch.column import RaggedColumn
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnTypeError
from samplebatch.returns import discounted_returns, gae
from tests.optional import HAS_TORCH


def loop(rewards, values, last, gamma, gae_lambda):
    advantages = np.zeros(len(rewards))
    following, advantage = last, 0.0
    for t in reversed(range(len(rewards))):
        advantage = rewards[t] + gamma * following - values[t] + gamma * gae_lambda * advantage
        advantages[t], following = advantage, values[t]
    return advantages


@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["f8", "f4"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_advantages_and_returns_agree_with_a_loop(lengths, gamma, gae_lambda, dtype, in_torch, seed):
    rng = np.random.default_rng(seed)
    rewards, values = ([rng.normal(size=n).astype(dtype) for n in lengths] for _ in range(2))
    last = rng.normal(size=len(lengths))
    batch = SampleBatch(r=rewards, v=values, ragged={"r": dtype, "v": dtype})
    if in_torch and HAS_TORCH:
        batch = batch.to_torch()
    returns, advantages = gae(batch["r"], values=batch["v"], next_values=last, gamma=gamma, gae_lambda=gae_lambda)
    sums = discounted_returns(batch["r"], next_values=last, gamma=gamma)
    assert advantages.dtype == returns.dtype == sums.dtype == batch["r"].dtype
    for i, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        expected = loop(reward, value, last[i], gamma, gae_lambda)
        np.testing.assert_allclose(np.asarray(advantages[i]), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.asarray(returns[i]), expected + value, rtol=1e-4, atol=1e-5)
        plain = loop(reward, np.zeros(len(reward)), last[i] if len(reward) else 0, gamma, 1.0)
        np.testing.assert_allclose(np.asarray(sums[i]), plain, rtol=1e-4, atol=1e-5)


def test_rows_agree_with_steps_of_terminated_episodes():
    rewards, values = RaggedColumn.from_rows([[1.0, 2.0], [3.0]], "r"), RaggedColumn.from_rows([[0.5, 1.0], [2.0]], "v")
    returns, advantages = gae(rewards[:], values=values, gamma=0.9, gae_lambda=0.8)
    steps = gae(rewards.flat, [0, 1, 1], values=values.flat, next_values=[1.0, 0, 0], gamma=0.9, gae_lambda=0.8)
    assert (returns.flat.tolist(), advantages.flat.tolist()) == (steps[0].tolist(), steps[1].tolist())
    part = gae(rewards[1:], values=values[1:])[1]
    assert part.flat.tolist() == [1.0]
    assert discounted_returns(RaggedColumn.from_rows([[1, 2]], "r")).flat.tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: gae(r, values=r[:1]), ColumnLengthError, "values must have 2 rows, got 1"),
        (lambda r: gae(r, values=[1.0]), ColumnTypeError, "values must be a ragged column, got list"),
        (lambda r: gae(r, values=r, next_values=[1.0]), ColumnLengthError, "next_values must have 2 rows"),
        (lambda r: gae(r, values=r, gamma=2), ArgumentError, "gamma must be a number from 0 to 1"),
        (
            lambda r: discounted_returns(np.zeros(3)),
            ArgumentError,
            "terminated must be an array with one flag",
        ),
        (lambda r: gae(np.zeros(3), values=np.zeros(3)), ArgumentError, "next_values must be an array of the shape"),
        (lambda r: gae(r, [0, 1], values=r), ArgumentError, "terminated must be None for ragged rewards, got list"),
        (lambda r: discounted_returns(r, None, [0, 1]), ArgumentError, "truncated must be None for ragged rewards"),
        (
            lambda r: discounted_returns(RaggedColumn.from_array(np.zeros((2, 2, 2)))),
            ColumnTypeError,
            "rewards must have rows of one dimension, got 2",
        ),
    ],
)
def test_bad_input_is_rejected(call, error, message):
    with pytest.raises(error, match=message):
        call(RaggedColumn.from_rows([[1.0, 2.0], [3.0]], "r"))

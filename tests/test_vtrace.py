"""V-trace compared with its definition, with RLlib's function, and on every kind of batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import Batch, ReplayBuffer, SampleBatch
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnTypeError, SequenceError
from samplebatch.returns import compute_vtrace_return, gae, vtrace
from tests.optional import HAS_TORCH, torch


def vtrace_written_out(
    rewards: Any,
    terminated: Any,
    truncated: Any,
    values: Any,
    next_values: Any,
    log_ratios: Any,
    gamma: float,
    decay: float,
    clips: tuple[float, float, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Sum equation 1 of the paper from every step to the end of its episode; return targets and advantages."""
    n = len(rewards)
    rho_clip, c_clip, weight_clip = clips
    ratios = [math.exp(ratio) for ratio in log_ratios]
    following = [0.0 if terminated[t] else next_values[t] for t in range(n)]
    is_last = [bool(terminated[t] or truncated[t] or t == n - 1) for t in range(n)]
    differences = [min(rho_clip, ratios[t]) * (rewards[t] + gamma * following[t] - values[t]) for t in range(n)]
    targets = np.zeros(n)
    for first in range(n):
        total, factor = values[first], 1.0
        for t in range(first, n):
            total += factor * differences[t]
            if is_last[t]:
                break
            factor *= gamma * decay * min(c_clip, ratios[t])
        targets[first] = total
    # The estimate of the next observation is replaced by its target, which corrects the same estimate.
    corrected = [following[t] if is_last[t] else following[t] + targets[t + 1] - values[t + 1] for t in range(n)]
    advantages = [min(weight_clip, ratios[t]) * (rewards[t] + gamma * corrected[t] - values[t]) for t in range(n)]
    return targets, np.array(advantages)


bounded = st.floats(0, 1)
threshold = st.one_of(st.none(), st.floats(0.01, 3))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), bounded, bounded, threshold, threshold, threshold, st.integers(0, 9999))
def test_targets_and_advantages_agree_with_the_definition(n, gamma, decay, rho, c, weight, seed):
    rng = np.random.default_rng(seed)
    rewards, values, next_values, log_ratios = rng.normal(size=(4, n))
    terminated, truncated = rng.random((2, n)) < 0.2
    actual = vtrace(
        rewards,
        terminated,
        truncated,
        values=values,
        next_values=next_values,
        log_ratios=log_ratios,
        gamma=gamma,
        vtrace_lambda=decay,
        rho_clip=rho,
        c_clip=c,
        advantage_rho_clip=weight,
    )
    clips = tuple(math.inf if clip is None else clip for clip in (rho, c, weight))
    targets, advantages = vtrace_written_out(
        rewards, terminated, truncated, values, next_values, log_ratios, gamma, decay, clips
    )
    np.testing.assert_allclose(actual.returns, targets, atol=1e-9)
    np.testing.assert_allclose(actual.advantages, advantages, atol=1e-9)


def test_equal_policies_give_the_returns_of_gae_with_lambda_one():
    rng = np.random.default_rng(3)
    rewards, values, next_values = rng.normal(size=(3, 50))
    next_values[:-1] = values[1:]
    terminated, truncated = rng.random((2, 50)) < 0.1
    options = {"values": values, "next_values": next_values, "gamma": 0.9}
    actual = vtrace(rewards, terminated, truncated, log_ratios=np.zeros(50), **options)
    returns, advantages = gae(rewards, terminated, truncated, gae_lambda=1.0, **options)
    np.testing.assert_allclose(actual.returns, returns)
    np.testing.assert_allclose(actual.advantages, advantages)


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_targets_and_advantages_agree_with_rllib():
    peer = pytest.importorskip("ray.rllib.algorithms.impala.torch.vtrace_torch_v2").vtrace_torch
    rng = np.random.default_rng(11)
    steps, envs = 20, 6
    rewards, values, behaviour, target = rng.normal(size=(4, steps, envs))
    terminated, bootstrap = rng.random((steps, envs)) < 0.15, rng.normal(size=envs)
    discounts = 0.9 * ~terminated
    arguments = (target, behaviour, discounts, rewards, values, bootstrap)
    names = ("target_action_log_probs", "behaviour_action_log_probs", "discounts", "rewards", "values")
    tensors = dict(zip((*names, "bootstrap_values"), map(torch.from_numpy, arguments), strict=True))
    expected = peer(**tensors, clip_rho_threshold=1.2, clip_pg_rho_threshold=0.8)
    for env in range(envs):
        following = np.append(values[1:, env], bootstrap[env])
        actual = vtrace(
            rewards[:, env],
            terminated[:, env],
            values=values[:, env],
            next_values=following,
            log_ratios=(target - behaviour)[:, env],
            gamma=0.9,
            rho_clip=1.2,
            advantage_rho_clip=0.8,
        )
        np.testing.assert_allclose(actual.returns, expected[0][:, env], atol=1e-9)
        np.testing.assert_allclose(actual.advantages, expected[1][:, env], atol=1e-9)


def test_autoreset_rows_do_not_change_other_rows():
    # Row 2 is the step that a vector environment spends on resetting after the episode that row 1 ended.
    rewards, values = np.array([1.0, 2.0, 77.0, 3.0]), np.array([0.5, 0.25, -88.0, 0.75])
    following, ratios = np.array([0.25, 9.0, 0.75, 0.1]), np.array([0.3, -0.2, 99.0, 0.4])
    options = {"terminated": [0, 1, 0, 0], "values": values, "next_values": following, "log_ratios": ratios}
    actual = vtrace(rewards, **options)
    retained = [0, 1, 3]
    without = vtrace(rewards[retained], **{name: np.asarray(column)[retained] for name, column in options.items()})
    np.testing.assert_array_equal(actual.returns[retained], without.returns)
    np.testing.assert_array_equal(actual.advantages[retained], without.advantages)


def test_several_rewards_per_step_are_estimated_one_by_one():
    rng = np.random.default_rng(5)
    rewards, values, following = rng.normal(size=(3, 7, 2))
    ratios, terminated = rng.normal(size=7), rng.random(7) < 0.3
    actual = vtrace(rewards, terminated, values=values, next_values=following, log_ratios=ratios)
    for column in range(2):
        arguments = {"values": values[:, column], "next_values": following[:, column]}
        expected = vtrace(rewards[:, column], terminated, log_ratios=ratios, **arguments)
        np.testing.assert_array_equal(actual.returns[:, column], expected.returns)
        np.testing.assert_array_equal(actual.advantages[:, column], expected.advantages)


def test_infinite_ratios_are_clipped_and_nan_is_not():
    options = {"values": [0.0, 0.0], "next_values": [0.0, 0.0]}
    actual = vtrace([1.0, 1.0], [0, 1], log_ratios=[np.inf, -np.inf], gamma=1.0, **options)
    assert actual.returns.tolist() == [1.0, 0.0]
    assert np.isnan(vtrace([1.0, 1.0], [0, 1], log_ratios=[np.nan, 0.0], **options).returns[0])


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"log_ratios": [0.0]}, ColumnLengthError, "'log_ratios' must have 2 elements"),
        ({"log_ratios": ["a", "b"]}, ColumnTypeError, "'log_ratios' must contain numbers"),
        ({"rho_clip": 0.0}, ArgumentError, "rho_clip"),
        ({"c_clip": math.nan}, ArgumentError, "c_clip"),
        ({"advantage_rho_clip": -1}, ArgumentError, "advantage_rho_clip"),
        ({"vtrace_lambda": 1.5}, ArgumentError, "vtrace_lambda"),
    ],
)
def test_wrong_arguments_are_reported(changed, error, match):
    options = {"values": [0.0, 0.0], "next_values": [0.0, 0.0], "log_ratios": [0.0, 0.0], **changed}
    with pytest.raises(error, match=match):
        vtrace([1.0, 1.0], [0, 0], **options)


def test_batches_end_where_episode_ids_change_and_buffers_at_unfinished_rows():
    rng = np.random.default_rng(1)
    columns = {"v_s": rng.normal(size=6), "v_s_": rng.normal(size=6), "log_ratios": rng.normal(size=6)}
    rewards, never = rng.normal(size=6), np.zeros(6, bool)
    batch = SampleBatch(rewards=rewards, terminateds=never, truncateds=never, eps_id=[1, 1, 1, 2, 2, 2])
    actual = compute_vtrace_return(batch, **columns)
    cut = np.array([0, 0, 1, 0, 0, 1], bool)
    arguments = {"values": columns["v_s"], "next_values": columns["v_s_"], "log_ratios": columns["log_ratios"]}
    np.testing.assert_array_equal(actual.returns, vtrace(rewards, never, cut, **arguments).returns)
    buffer = ReplayBuffer(4)
    for reward in rewards:
        buffer.add(Batch(obs=0, act=0, rew=reward, terminated=False, truncated=False, obs_next=0, info={}))
    rows, indices = buffer.sample(0)
    last = {name: column[2:] for name, column in columns.items()}
    split = compute_vtrace_return(rows, buffer, indices, **last)
    expected = vtrace(rewards[2:], never[2:], **{name: column[2:] for name, column in arguments.items()})
    np.testing.assert_array_equal(split.advantages, expected.advantages)
    padded = SampleBatch(rewards=rewards, terminateds=never, seq_lens=[3, 3], _zero_padded=True, _max_seq_len=3)
    with pytest.raises(SequenceError):
        compute_vtrace_return(padded, **columns)


@pytest.mark.parametrize("in_torch", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_TORCH, reason="-"))])
def test_ragged_rows_agree_with_one_call_per_row(in_torch):
    rng = np.random.default_rng(2)
    lengths = [3, 0, 1, 5, 0]
    columns = {name: [rng.normal(size=n).astype("f4") for n in lengths] for name in ("r", "v", "l")}
    last = rng.normal(size=len(lengths))
    batch = SampleBatch(columns, ragged=dict.fromkeys(columns, "f4"))
    if in_torch:
        batch = batch.to_torch()
    targets, advantages = vtrace(
        batch["r"], values=batch["v"], log_ratios=batch["l"], next_values=last, gamma=0.9, c_clip=0.7
    )
    for row, n in enumerate(lengths):
        rewards, values, ratios = (np.asarray(columns[name][row], float) for name in "rvl")
        following = np.append(values[1:], last[row])[:n]
        arguments = {"values": values, "next_values": following, "log_ratios": ratios}
        expected = vtrace(rewards, np.zeros(n), gamma=0.9, c_clip=0.7, **arguments)
        np.testing.assert_allclose(np.asarray(targets[row]), expected.returns, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.asarray(advantages[row]), expected.advantages, rtol=1e-5, atol=1e-6)


def test_ragged_rows_must_have_the_same_lengths():
    batch = SampleBatch(r=[[1.0], [2.0]], l=[[1.0], [2.0, 3.0]], ragged=["r", "l"])
    with pytest.raises(ColumnLengthError, match="log_ratios"):
        vtrace(batch["r"], values=batch["r"], log_ratios=batch["l"])
    with pytest.raises(ColumnTypeError, match="log_ratios must be a ragged column"):
        vtrace(batch["r"], values=batch["r"], log_ratios=np.zeros(2))

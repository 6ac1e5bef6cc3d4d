"""Returns compared with their definitions and with Tianshou, on every kind of batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import Batch, SampleBatch, concat_samples
from samplebatch.errors import ColumnLengthError, ColumnNotFoundError, ColumnTypeError, RowIndexError, SequenceError
from samplebatch.returns import (
    compute_episodic_return,
    compute_nstep_return,
    discounted_returns,
    gae,
    nstep,
)
from samplebatch.returns.batches import value_mask
from tests.optional import torch

NO = [False, False, False]


# The definitions written out


def gae_written_out(
    rewards: Any, terminated: Any, truncated: Any, values: Any, next_values: Any, gamma: float, gae_lambda: float
) -> np.ndarray:
    """Sum the discounted errors from every step to the end of its episode."""
    advantages = np.zeros(len(rewards))
    for first in range(len(rewards)):
        factor = 1.0
        for t in range(first, len(rewards)):
            following = 0.0 if terminated[t] else next_values[t]
            advantages[first] += factor * (rewards[t] + gamma * following - values[t])
            if terminated[t] or truncated[t]:
                break
            factor *= gamma * gae_lambda
    return advantages


def nstep_written_out(rewards: Any, terminated: Any, truncated: Any, n_step: int, gamma: float) -> list[tuple]:
    """Compute n-step returns by iterating over every window."""
    actual = []
    for first in range(len(rewards)):
        total, last = 0.0, first
        for k in range(n_step):
            last = first + k
            total += gamma**k * rewards[last]
            if terminated[last] or truncated[last] or last == len(rewards) - 1:
                break
        actual.append((total, 0.0 if terminated[last] else gamma ** (last - first + 1), last))
    return actual


@st.composite
def some_steps(draw: st.DrawFn) -> SimpleNamespace:
    n = draw(st.integers(0, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ends = rng.random((2, n)) < draw(st.sampled_from([0.0, 0.1, 0.5]))
    rewards, values, next_values = rng.normal(size=(3, n))
    return SimpleNamespace(
        rewards=rewards, terminated=ends[0], truncated=ends[1], values=values, next_values=next_values, n=n
    )


discounts = st.sampled_from([0.0, 0.5, 0.99, 1.0])


@settings(max_examples=100)
@given(some_steps(), discounts, discounts)
def test_gae_agrees_with_its_definition(steps: SimpleNamespace, gamma: float, gae_lambda: float) -> None:
    flags, estimates = (steps.terminated, steps.truncated), (steps.values, steps.next_values)
    returns, advantages = gae(
        steps.rewards, *flags, values=steps.values, next_values=steps.next_values, gamma=gamma, gae_lambda=gae_lambda
    )
    expected = gae_written_out(steps.rewards, *flags, *estimates, gamma, gae_lambda)
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    np.testing.assert_allclose(returns, expected + steps.values, atol=1e-12)


@settings(max_examples=100)
@given(some_steps(), st.integers(1, 40), discounts)
def test_nstep_agrees_with_its_definition(steps: SimpleNamespace, n_step: int, gamma: float) -> None:
    actual = nstep(steps.rewards, steps.terminated, steps.truncated, n_step, gamma)
    expected = nstep_written_out(steps.rewards, steps.terminated, steps.truncated, n_step, gamma)
    totals, discount, last = zip(*expected, strict=True) if expected else ((), (), ())
    np.testing.assert_allclose(actual.returns, totals, atol=1e-12)
    np.testing.assert_allclose(actual.discount, discount, atol=1e-12)
    assert actual.last.tolist() == list(last)


@settings(max_examples=50)
@given(some_steps(), discounts)
def test_discounted_returns_equal_n_step_returns_of_full_length(steps: SimpleNamespace, gamma: float) -> None:
    flags = (steps.terminated, steps.truncated)
    actual = nstep(steps.rewards, *flags, max(steps.n, 1), gamma)
    np.testing.assert_allclose(discounted_returns(steps.rewards, *flags, gamma=gamma), actual.returns, atol=1e-12)
    np.testing.assert_allclose(
        discounted_returns(steps.rewards, *flags, steps.next_values, gamma=gamma),
        actual.returns + actual.discount * steps.next_values[actual.last],
        atol=1e-12,
    )


def test_truncated_steps_are_bootstrapped_and_terminated_ones_not() -> None:
    common = {"values": [0.0, 0.0], "next_values": [8.0, 8.0], "gamma": 0.5, "gae_lambda": 1.0}
    assert gae([1.0, 1.0], [1, 1], [0, 0], **common)[0].tolist() == [1.0, 1.0]
    assert gae([1.0, 1.0], [0, 0], [1, 1], **common)[0].tolist() == [5.0, 5.0]
    assert gae([1.0, 1.0], [1, 1], [1, 1], **common)[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_several_rewards_per_step_are_estimated_separately(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 20, *shape))
    terminated = rng.random(20) < 0.2
    actual = [
        *gae(rewards, terminated, values=values, next_values=next_values),
        discounted_returns(rewards, terminated, None, next_values),
        nstep(rewards, terminated).returns,
    ]
    assert all(part.shape == rewards.shape for part in actual)
    for column in np.ndindex(*shape):
        first = (..., *column)
        expected = [
            *gae(rewards[first], terminated, values=values[first], next_values=next_values[first]),
            discounted_returns(rewards[first], terminated, None, next_values[first]),
            nstep(rewards[first], terminated).returns,
        ]
        for part, is_complete in zip(expected, actual, strict=True):
            np.testing.assert_allclose(is_complete[first], part)


# Values of any kind


@pytest.mark.parametrize(
    "convert",
    [
        list,
        lambda v: v.astype(np.float32),
        lambda v: v.astype(">f8"),
        lambda v: np.repeat(v, 2)[::2],
        lambda v: v[:, None],
        lambda v: torch.tensor(v, requires_grad=True),
        lambda v: torch.tensor(v, dtype=torch.float32)[:, None],
    ],
)
def test_values_of_any_kind(convert: Callable[[Any], Any]) -> None:
    values, next_values = np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0])
    expected = gae([1, 1, 1], [0, 0, 1], values=values, next_values=next_values)
    actual = gae([1, 1, 1], [0, 0, 1], values=convert(values), next_values=convert(next_values))
    for first, other in zip(actual, expected, strict=True):
        assert first.dtype == np.float64
        assert np.array_equal(first, other)


def test_inputs_are_not_changed_and_may_be_read_only() -> None:
    arrays = [np.ones(3), np.array([False, True, False]), np.zeros(3, bool), np.ones(3), np.ones(3)]
    for array in arrays:
        array.flags.writeable = False
    rewards, terminated, truncated, values, next_values = arrays
    gae(rewards, terminated, truncated, values=values, next_values=next_values)
    discounted_returns(rewards, terminated, truncated, next_values)
    nstep(rewards, terminated, truncated)
    assert [a.tolist() for a in arrays] == [[1.0] * 3, [False, True, False], NO, [1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: gae([1, 2], [0], values=[0, 0], next_values=[0, 0]),
            ColumnLengthError,
            "'terminated' must have 2 rows",
        ),
        (lambda: gae([1, 2], [0, 0], [0], values=[0, 0], next_values=[0, 0]), ColumnLengthError, "'truncated' must"),
        (lambda: gae([1], [0], values=[0, 0], next_values=[0]), ColumnLengthError, "'values' must have 1 elements"),
        (lambda: gae([1], [0], values=[0], next_values=[0, 0]), ColumnLengthError, "'next_values' must have 1"),
        (
            lambda: gae(["a"], [0], values=[0], next_values=[0]),
            ColumnTypeError,
            "'rewards' must contain numbers, got dtype <U1",
        ),
        (lambda: nstep([1], [0], n_step=0), ValueError, "n_step must be a whole number from 1, got 0"),
        (lambda: compute_episodic_return({"rew": [1.0]}), ColumnNotFoundError, "no column 'terminated'"),
        (lambda: compute_episodic_return({"terminated": [1]}), ColumnNotFoundError, "no column 'rew'"),
        (lambda: compute_episodic_return({"rew": [1.0], "terminated": [0]}), ValueError, "got 0.95; pass v_s_"),
    ],
)
def test_invalid_arguments_are_rejected(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# Batches


def columns(n: int = 40, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    ends = rng.random((2, n)) < 0.1
    return {"rewards": rng.normal(size=n).astype(np.float32), "terminateds": ends[0], "truncateds": ends[1]}


@pytest.mark.parametrize("make", [SampleBatch, dict, lambda c: SampleBatch(c).as_batch()])
def test_every_kind_of_batch(make: Callable[[Any], Any]) -> None:
    original = columns()
    values, next_values = np.random.default_rng(4).normal(size=(2, 40))
    flags = original["terminateds"], original["truncateds"]
    expected = gae(original["rewards"], *flags, values=values, next_values=next_values, gamma=0.9, gae_lambda=0.8)
    batch = make(original)
    assert np.array_equal(compute_episodic_return(batch, None, None, next_values, values, 0.9, 0.8), expected)

    actual = nstep(original["rewards"], *flags, 4, 0.9)
    requested = []

    def estimate(rows: Any, last: np.ndarray) -> np.ndarray:
        requested.append(rows)
        return next_values[last]

    again = compute_nstep_return(batch, None, None, estimate, 0.9, 4)
    assert again is batch is requested[0]
    assert np.array_equal(batch["returns"][:, 0], actual.returns + actual.discount * next_values[actual.last])


def test_done_without_other_flags_means_terminated() -> None:
    batch = Batch(rew=[1.0, 1.0, 1.0], done=[False, True, False])
    assert compute_episodic_return(batch, gamma=0.5, gae_lambda=1.0)[0].tolist() == [1.5, 1.0, 1.0]


@pytest.mark.parametrize("name", ["eps_id", "agent_index"])
def test_joined_fragments_are_estimated_separately(name: str) -> None:
    fragments = [SampleBatch(rewards=[1.0, 1.0], terminateds=[False, False], **{name: [i, i]}) for i in range(3)]
    batch = concat_samples(fragments)
    values = np.full(6, 8.0)
    returns, _ = compute_episodic_return(batch, v_s_=values, v_s=values, gamma=0.5, gae_lambda=1.0)
    assert returns.tolist() == [3.5, 5.0] * 3
    compute_nstep_return(batch, None, None, lambda _, rows: torch.full((6,), 8.0), 0.5, 5)
    assert batch["returns"][:, 0].tolist() == [3.5, 5.0] * 3


def test_padded_and_time_major_batches_are_rejected() -> None:
    batch = SampleBatch(columns(6) | {"seq_lens": np.array([2, 4])})
    assert len(compute_episodic_return(batch, gae_lambda=1.0)[0]) == 6
    batch.right_zero_pad(4)
    with pytest.raises(SequenceError, match="got a batch that is zero_padded"):
        compute_episodic_return(batch, gae_lambda=1.0)
    with pytest.raises(SequenceError, match="got a batch that is time_major"):
        compute_nstep_return(SampleBatch(columns(6), _time_major=True), None, None, lambda *_: np.zeros(6))


# Buffers


def a_buffer(n: int = 6) -> SimpleNamespace:
    """Imitate a full ring whose newest step is in slot 2, in the middle of an episode."""
    flags = {"terminated": np.arange(n) == 4, "truncated": np.zeros(n, bool), "done": np.arange(n) == 4}
    return SimpleNamespace(
        rew=np.arange(1.0, n + 1),
        **flags,
        subbuffer_edges=np.array([0, n]),
        last_index=np.array([2]),
        unfinished_index=lambda: np.array([2]),
    )


def test_windows_of_a_buffer_wrap_around_to_the_newest_step() -> None:
    requested = []

    def estimate(buffer: Any, slots: np.ndarray) -> torch.Tensor:
        requested.append((buffer, slots.tolist()))
        return torch.full((len(slots), 2), 100.0)

    indices, ring = [3, 4, 5, 0, 1, 2], a_buffer()
    batch = compute_nstep_return(Batch(weight=np.ones(6)), ring, indices, estimate, 0.5, 3)
    assert requested == [(ring, [4, 4, 1, 2, 2, 2])]
    assert batch.returns[:, 0].tolist() == [6.5, 5.0, 6 + 0.5 + 0.5 + 12.5, 2.75 + 12.5, 2 + 1.5 + 25.0, 3 + 50.0]
    assert torch.equal(batch.returns[:, 0], batch.returns[:, 1])
    assert batch.returns.dtype == batch.weight.dtype == torch.float32


def test_estimates_that_do_not_fit_a_buffer_are_rejected() -> None:
    buffer, ones = a_buffer(), lambda buffer, slots: np.ones(len(slots))
    batch = Batch(weight=np.ones(2), rew=np.ones(2), terminated=np.zeros(2))
    with pytest.raises(ColumnLengthError, match=r"indices must have 2 rows .* got shape \(3,\)"):
        compute_nstep_return(batch, buffer, [1, 2, 3], ones)
    with pytest.raises(ColumnLengthError, match="indices must have 2 rows"):
        compute_episodic_return(batch, buffer, [1, 2, 3], gae_lambda=1.0)
    with pytest.raises(ValueError, match="indices must be the slots"):
        compute_nstep_return(batch, buffer, None, ones)
    for slot in (6, -1):
        with pytest.raises(RowIndexError, match=rf"slot must be in \[0, 6\), got {slot}"):
            compute_nstep_return(batch, buffer, [0, slot], ones)
    with pytest.raises(ColumnLengthError, match=r"estimates must have 2 rows, one per window, got shape \(3,\)"):
        compute_nstep_return(batch, buffer, [0, 1], lambda *_: np.ones(3))
    buffer.rew = np.ones((6, 3))
    with pytest.raises(ColumnLengthError, match="estimates must have 3 values per row like the rewards, got 2"):
        compute_nstep_return(batch, buffer, [0, 1], lambda *_: np.ones((2, 2)))
    assert "returns" not in batch


def test_estimates_for_each_of_several_rewards() -> None:
    buffer = a_buffer()
    buffer.rew = np.stack([buffer.rew, -buffer.rew], axis=1)
    batch = compute_nstep_return(Batch(a=np.ones(1)), buffer, [0], lambda *_: np.array([[1.0, 2.0]]), 0.5, 2)
    assert batch.returns.tolist() == [[2.0 + 0.25, -2.0 + 0.5]]


# Beside Tianshou


def filled_by_tianshou(kind: str, size: int, adds: int, seed: int) -> Any:
    data = pytest.importorskip("tianshou.data")
    rng = np.random.default_rng(seed)
    buffer = data.ReplayBuffer(size) if kind == "single" else data.VectorReplayBuffer(size, 5)
    for i in range(adds):
        ids = [0] if kind == "single" else np.flatnonzero(rng.random(5) < 0.8)
        k = len(ids)
        if not k:
            continue
        terminated, truncated = rng.random((2, k)) < 0.1
        columns = {"obs": np.full(k, i), "act": np.full(k, i), "rew": rng.normal(size=k), "obs_next": np.full(k, i + 1)}
        buffer.add(data.Batch(terminated=terminated, truncated=truncated, info=[{}] * k, **columns), buffer_ids=ids)
    return buffer


@pytest.mark.parametrize("kind", ["single", "vector"])
@pytest.mark.parametrize("adds", [3, 20, 57])
def test_returns_agree_with_tianshou(kind: str, adds: int) -> None:
    buffer = filled_by_tianshou(kind, 50, adds, seed=adds)
    theirs = pytest.importorskip("tianshou.algorithm").Algorithm
    rng = np.random.default_rng(1)
    indices = buffer.sample_indices(0)
    n = len(indices)
    batch, ours = (
        buffer[indices],
        Batch(weight=np.ones(n), **{k: buffer[indices][k] for k in ("rew", "terminated", "truncated")}),
    )
    assert len(buffer.unfinished_index()) > 0
    assert np.array_equal(value_mask(buffer, indices), theirs.value_mask(buffer, indices))
    v, v_next = rng.normal(size=(2, n))
    for values in ((v_next, v), (v_next, None), (torch.tensor(v_next), torch.tensor(v)[:, None])):
        for gamma, gae_lambda in [(0.99, 0.95), (0.5, 0.0), (1.0, 1.0)]:
            actual = compute_episodic_return(ours, buffer, indices, *values, gamma, gae_lambda)
            expected = theirs.compute_episodic_return(batch, buffer, indices, *values, gamma, gae_lambda)
            np.testing.assert_allclose(actual, expected, atol=1e-12)
    for values in ((None, None), (None, v)):
        actual = compute_episodic_return(ours, buffer, indices, *values, 0.9, 1.0)
        np.testing.assert_allclose(actual, theirs.compute_episodic_return(batch, buffer, indices, *values, 0.9, 1.0))

    for shape in [(), (1,), (3,), (2, 3)]:
        for n_step, gamma in [(1, 0.99), (3, 0.9), (60, 1.0)]:
            for dtype in (torch.float32, torch.float64):
                estimates = torch.tensor(rng.normal(size=(50, *shape)), dtype=dtype)
                arguments = (buffer, indices, lambda _, slots, e=estimates: e[slots], gamma, n_step)
                batch.weight = np.ones(n)
                expected = theirs.compute_nstep_return(batch, *arguments)
                actual = compute_nstep_return(ours, *arguments)
                assert actual.returns.dtype == expected.returns.dtype
                assert actual.returns.shape == expected.returns.shape
                torch.testing.assert_close(actual.returns, expected.returns)
                assert actual.weight.dtype == expected.weight.dtype


@pytest.mark.parametrize("m", [None, 1, 3])
def test_missing_values_are_taken_from_the_previous_row(m: int | None) -> None:
    rng = np.random.default_rng(0)
    shape = (6,) if m is None else (6, m)
    rewards, next_values = rng.normal(size=shape), rng.normal(size=shape)
    terminated = np.array([0, 1, 0, 0, 0, 1], bool)
    batch = Batch(rew=rewards, terminated=terminated, truncated=np.zeros(6, bool))
    following = next_values.copy()
    following[terminated] = 0.0
    values = np.concatenate([following[-1:], following[:-1]])
    arguments = {"v_s_": next_values, "gamma": 0.9, "gae_lambda": 0.8}
    derived = compute_episodic_return(batch, **arguments)
    explicit = compute_episodic_return(batch, **arguments, v_s=values)
    for first, second in zip(derived, explicit, strict=True):
        assert first.shape == shape
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("convert", [np.ndarray.tolist, lambda q: tuple(q.tolist()), lambda q: q[:, None]])
def test_estimates_of_every_kind_give_the_same_targets(convert: Any) -> None:
    estimates = np.array([8.0, 4.0, 2.0])
    batch = {"rew": [1.0, 1.0, 1.0], "terminated": NO, "truncated": NO}
    expected = compute_nstep_return(dict(batch), None, None, lambda *_: estimates, 0.5, 2)["returns"]
    assert expected.tolist() == [[3.5], [2.5], [2.0]]
    targets = compute_nstep_return(dict(batch), None, None, lambda *_: convert(estimates), 0.5, 2)["returns"]
    assert type(targets) is np.ndarray
    np.testing.assert_array_equal(targets, expected)

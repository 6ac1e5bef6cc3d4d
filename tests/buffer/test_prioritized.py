"""Prioritized buffers: draw frequencies, importance weights and the priority of each row."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferManager,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    VectorReplayBuffer,
)
from samplebatch.errors import (
    ArgumentError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnTypeError,
    EmptyBufferError,
    PriorityError,
    RingError,
    RowIndexError,
)
from tests.optional import torch

EPSILON = float(np.finfo(np.float32).eps)


def step(n: int, **changed: Any) -> Batch:
    return Batch({"obs": n, "act": n, "rew": float(n), "terminated": False, "truncated": False} | changed)


def steps(n: int, envs: int) -> Batch:
    flags = np.zeros(envs, bool)
    numbers = 100 * np.arange(envs) + n
    return Batch(obs=numbers, act=numbers, rew=np.ones(envs), terminated=flags, truncated=flags)


def filled(adds: int, size: int = 8, **options: Any) -> PrioritizedReplayBuffer:
    buf = PrioritizedReplayBuffer(size, **({"alpha": 0.6, "beta": 0.4} | options))
    for n in range(adds):
        buf.add(step(n))
    return buf


def vector(adds: int, total: int = 12, envs: int = 3, **options: Any) -> PrioritizedVectorReplayBuffer:
    buf = PrioritizedVectorReplayBuffer(total, envs, **({"alpha": 0.6, "beta": 0.4} | options))
    for n in range(adds):
        buf.add(steps(n, envs))
    return buf


# How often rows are drawn


def surprise(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the deviation of the chi-square statistic from its expectation, in standard deviations."""
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
def test_frequencies_are_priorities_to_the_power_of_alpha(alpha: float, stratified: bool) -> None:
    buf = filled(130, size=100, alpha=alpha, stratified=stratified)
    priorities = np.random.default_rng(2).uniform(0.2, 5.0, 100)
    buf.update_weight(np.arange(100), priorities)
    counts = sum(np.bincount(buf.sample_indices(256), minlength=100) for _ in range(400))
    expected = priorities**alpha
    assert surprise(counts, 400 * 256 * expected / expected.sum()) < 5


@pytest.mark.parametrize("make", [vector, lambda adds: PrioritizedReplayBufferManager([filled(adds), filled(adds, 3)])])
def test_rings_are_sampled_by_the_priorities_of_their_rows(make: Callable[[int], Any]) -> None:
    buf = make(2)
    indices = buf.sample_indices(0)
    priorities = np.arange(1.0, len(indices) + 1)
    buf.update_weight(indices, priorities)
    counts = np.bincount(buf.sample_indices(60_000), minlength=buf.maxsize)
    assert counts.sum() == counts[indices].sum()
    expected = priorities**0.6
    assert surprise(counts[indices], 60_000 * expected / expected.sum()) < 5


def test_a_part_samples_its_rows_by_their_priorities() -> None:
    buf = vector(4)
    buf.update_weight(np.arange(12), np.arange(1.0, 13.0))
    part = buf.buffers[1]
    assert isinstance(part, PrioritizedReplayBuffer)
    counts = np.bincount(part.sample_indices(40_000), minlength=4)
    expected = np.arange(5.0, 9.0) ** 0.6
    assert surprise(counts, 40_000 * expected / expected.sum()) < 5
    batch, indices = part.sample(5)
    assert np.array_equal(batch.obs, 100 + indices)


def test_stratified_draws_are_closer_to_the_expectation() -> None:
    def spread(stratified: bool) -> float:
        buf = filled(50, size=50, alpha=1.0, stratified=stratified)
        buf.update_weight(np.arange(50), np.arange(1.0, 51.0))
        expected = 200 * np.arange(1.0, 51.0) / np.arange(1.0, 51.0).sum()
        return float(np.abs(np.bincount(buf.sample_indices(200), minlength=50) - expected).max())

    assert spread(True) < 2 < spread(False)


def test_slots_without_a_row_are_never_drawn() -> None:
    buf = vector(4)
    buf.buffers[1].reset()
    assert set(np.unique(buf.sample_indices(2000))) == {0, 1, 2, 3, 8, 9, 10, 11}
    buf.reset()
    for call in (lambda: buf.sample(1), lambda: buf.sample_indices(3), lambda: buf.buffers[0].sample_indices(1)):
        with pytest.raises(EmptyBufferError, match="got an empty buffer"):
            call()
    buf.add(steps(9, 3))
    assert set(np.unique(buf.sample_indices(500))) == {0, 4, 8}
    with pytest.raises(EmptyBufferError):
        filled(0).sample(1)


def test_slots_filled_by_set_batch_are_not_sampled() -> None:
    buf = filled(2, size=4)
    buf.set_batch(
        Batch(obs=np.arange(4), act=np.arange(4), rew=np.ones(4), terminated=np.zeros(4), truncated=np.zeros(4))
    )
    assert set(np.unique(buf.sample_indices(500))) == {0, 1}


def test_draws_use_the_generator_of_the_buffer() -> None:
    def draw(seed: int, disturbed: int) -> list[list[int]]:
        buf = filled(8, random_seed=seed)
        actual = []
        for _ in range(3):
            np.random.seed(disturbed)
            actual.append(buf.sample(16)[1].tolist())
        return actual

    assert draw(1, 5) == draw(1, 6) != draw(2, 5)


def test_all_rows_in_time_order_or_shuffled() -> None:
    buf = filled(11)
    assert buf.sample_indices(0).tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
    assert sorted(buf.sample_indices(None).tolist()) == list(range(8))
    assert buf.sample_indices(-1).tolist() == []
    assert sorted(i for batch, _ in buf.minibatches(3) for i in batch.obs.tolist()) == list(range(3, 11))
    assert all("weight" in batch for batch, _ in buf.minibatches(3))


# What rows weigh


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights_by_their_formula(beta: float) -> None:
    buf = filled(8, alpha=0.7, beta=beta)
    priorities = np.array([0.5, 2.0, 0.0, 8.0, 1.0, 1.0, 3.0, 0.1])
    buf.update_weight(np.arange(8), priorities)
    chances = (priorities + EPSILON) ** 0.7
    chances /= chances.sum()
    of_the_paper = (8 * chances) ** -beta
    for indices in (np.arange(8), [3, 1, 1], [[0, 2], [6, 7]], 5):
        actual = buf[indices]
        np.testing.assert_allclose(actual.weight, of_the_paper[indices] / np.max(of_the_paper[indices]))
    batch, indices = buf.sample(32)
    np.testing.assert_allclose(batch.weight, of_the_paper[indices] / of_the_paper[indices].max())
    np.testing.assert_allclose(buf.get_weight(np.arange(8)), ((priorities + EPSILON) ** 0.7 / EPSILON) ** -beta)


def test_weights_without_the_division() -> None:
    buf = filled(4, weight_norm=False, alpha=1.0, beta=1.0)
    buf.update_weight([0, 1], [4.0, 0.5])
    np.testing.assert_allclose(buf[[0, 1, 2]].weight, [0.125, 1.0, 0.5], rtol=1e-5)
    assert buf.get_weight(1) == pytest.approx(1.0)
    assert isinstance(buf.get_weight(1), float)
    assert buf.get_weight([[0, 1], [2, 3]]).shape == (2, 2)


def test_every_read_method_returns_weight_and_generation() -> None:
    buf = filled(11)
    for rows in (buf[:], buf[2:5], buf[[1, 2]], buf[-1], buf.latest(3), buf.sample(4)[0], next(iter(buf.split(2)))):
        assert np.shape(rows.weight) == np.shape(rows.generation) == np.shape(rows.rew)
    assert buf[:].generation.tolist() == [0] * 5 + [1] * 3


def test_slots_without_a_row_have_weight_zero() -> None:
    buf = filled(2, size=4)
    assert buf[[0, 3]].weight.tolist() == [1.0, 0.0]
    assert buf[[2, 3]].weight.tolist() == [0.0, 0.0]
    assert buf.get_weight([3]).tolist() == [0.0]


def test_beta_may_be_set() -> None:
    buf = vector(2, alpha=1.0, beta=0.0)
    buf.update_weight([0, 4], [4.0, 1.0])
    assert buf[[0, 4]].weight.tolist() == [1.0, 1.0]
    buf.set_beta(1)
    for rows in (buf[[0, 4]], buf.buffers[0][[0, 1]]):
        np.testing.assert_allclose(rows.weight, [0.25, 1.0], rtol=1e-5)
    with pytest.raises(PriorityError, match="beta must be a number from 0, got -1"):
        buf.set_beta(-1)


# Priorities given


def test_a_new_row_has_the_largest_priority_so_far() -> None:
    buf = filled(2, alpha=1.0)
    assert buf.weight[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
    buf.update_weight([0], [5.0])
    buf.update_weight([0], [0.25])
    buf.add(step(2))
    np.testing.assert_allclose(buf.weight[:4], [0.25, 1.0, 5.0, 0.0], rtol=1e-6)
    buf.reset()
    buf.add(step(3))
    np.testing.assert_allclose(buf.weight[:2], [5.0, 0.0], rtol=1e-6)


def test_priorities_are_raised_to_alpha_in_the_dtype_given() -> None:
    priorities = np.random.default_rng(0).random(200).astype(np.float32) * 3
    first, other = filled(200, 200, alpha=0.6), filled(200, 200, alpha=0.6)
    first.update_weight(np.arange(200), torch.from_numpy(priorities))
    other.update_weight(np.arange(200), priorities.astype(np.float64))
    exact = (priorities + np.finfo(np.float32).eps.item()) ** 0.6
    assert exact.dtype == np.float32
    assert np.array_equal(first.weight[:], exact.astype(np.float64))
    assert not np.array_equal(first.weight[:], other.weight[:])
    # So does the priority that new rows enter with, also after the buffer has been carried elsewhere.
    again = pickle.loads(pickle.dumps(first))
    for buf in (first, again):
        buf.add(step(0))
        assert buf.weight[0] == np.float32(priorities.max() + np.finfo(np.float32).eps) ** 0.6


def test_priorities_of_a_narrow_dtype_neither_vanish_nor_overflow() -> None:
    buf = filled(2, alpha=2.0)
    buf.update_weight([0, 1], np.array([0.0, 1.0], np.float16))
    assert (buf.weight[:2] > 0).all()
    buf.update_weight([0], np.array([1e30], np.float32))
    np.testing.assert_allclose(buf.weight[0], 1e60, rtol=1e-5)


def test_rows_can_be_reset_to_the_priority_of_new_rows() -> None:
    buf = filled(3, alpha=1.0)
    buf.update_weight([0, 1], [4.0, 0.5])
    buf.init_weight(np.array([1, 2]))
    np.testing.assert_allclose(buf.weight[:4], [4.0, 4.0, 4.0, 0.0], rtol=1e-6)
    with pytest.raises(IndexError, match="index 5 must have a row"):
        buf.init_weight([0, 5])


@pytest.mark.parametrize(
    "value", [[-3.0], np.array([3], np.uint8), torch.tensor([-3.0]), torch.tensor([3.0], requires_grad=True), 3, -3.0]
)
def test_priorities_of_any_kind(value: Any) -> None:
    buf = filled(3, alpha=1.0)
    buf.update_weight(torch.tensor([1]) if isinstance(value, torch.Tensor) else [1], value)
    np.testing.assert_allclose(buf.weight[:3], [1.0, 3.0, 1.0], rtol=1e-6)


def test_a_single_index_accepts_a_single_priority() -> None:
    buf = filled(3, alpha=1.0)
    buf.update_weight(1, 3.0)
    buf.update_weight(-6, 2.0)
    np.testing.assert_allclose(buf.weight[:3], [1.0, 3.0, 2.0], rtol=1e-6)
    buf.update_weight(slice(None), 7.0)
    np.testing.assert_allclose(buf.weight[:4], [7.0, 7.0, 7.0, 0.0], rtol=1e-6)
    buf.update_weight([], [])


def test_the_last_priority_of_a_repeated_index_is_stored() -> None:
    buf = filled(3, alpha=1.0)
    buf.update_weight([0, 1, 0, 0], [9.0, 2.0, 4.0, 3.0])
    np.testing.assert_allclose(buf.weight[:3], [3.0, 2.0, 1.0], rtol=1e-6)
    buf.add(step(3))
    assert buf.weight[3] == pytest.approx(9.0)


def test_late_priorities_of_overwritten_rows_are_dropped() -> None:
    buf = filled(8, alpha=1.0)
    rows = buf[[0, 1, 2, 1]]
    for n in (8, 9):
        buf.add(step(n))
    buf.update_weight([0, 1, 2, 1], [50.0, 60.0, 7.0, 80.0], generation=rows.generation)
    np.testing.assert_allclose(buf.weight[:3], [1.0, 1.0, 7.0], rtol=1e-6)
    buf.add(step(10))
    assert buf.weight[2] == pytest.approx(7.0), "what was dropped is not the largest so far"
    for _ in range(8):
        buf.add(step(11))
    buf.update_weight([0, 1, 2, 1], np.full(4, 99.0), generation=rows.generation)
    assert buf.weight.reduce() < 99.0


def test_late_priorities_of_rows_removed_are_dropped() -> None:
    for buf in (filled(5, alpha=1.0), vector(3, alpha=1.0)):
        batch, indices = buf.sample(20)
        buf.reset()
        buf.update_weight(indices, np.full(20, 9.0), generation=batch.generation)
        assert buf.weight.reduce() == 0.0
        buf.add(step(0) if type(buf) is PrioritizedReplayBuffer else steps(0, 3))
        buf.update_weight(indices, np.full(20, 9.0), generation=batch.generation)
        assert set(buf.weight[:].tolist()) == {0.0, 1.0}
        read = buf[np.arange(8)].generation
        buf.update_weight(np.arange(8), np.full(8, 2.0), generation=read)
        assert np.count_nonzero(buf.weight[:]) == len(buf)


def test_generations_are_counted_for_each_ring() -> None:
    buf = vector(3, alpha=1.0)
    for n in range(3):
        buf.add(steps(10 + n, 1), buffer_ids=[2])
    before = buf[:]
    assert before.generation.tolist() == [0] * 3 + [0] * 3 + [0, 0, 1, 1]
    buf.add(steps(20, 1), buffer_ids=[2])
    indices = buf.sample_indices(0)
    generation = dict(zip([0, 1, 2, 4, 5, 6, 10, 11, 8, 9], before.generation, strict=True))
    buf.update_weight(indices, np.full(10, 5.0), generation=[generation[i] for i in indices.tolist()])
    weights = buf.weight[:]
    assert weights[10] == 1.0
    assert np.count_nonzero(np.isclose(weights, 5.0)) == 9
    with pytest.raises(RowIndexError, match="index 3 must have a row"):
        buf.update_weight([2, 3], [1.0, 1.0])


def test_rejected_priorities_change_nothing() -> None:
    buf = filled(3, alpha=2.0)
    for index, value, generation, error, message in [
        ([0, 1], [1.0, np.nan], None, PriorityError, "got a priority of NaN"),
        ([0, 1], [1.0, np.inf], None, PriorityError, "got a priority of inf"),
        ([0, 1], [1.0, 1e200], None, PriorityError, "got a priority of 1e.200"),
        ([0, 1], [1.0, 2.0, 3.0], None, ColumnLengthError, "'weight' must have 2 rows, one per row, got 3"),
        ([0, 1], [1.0], None, ColumnLengthError, "got 1"),
        ([0, 1], ["a", "b"], None, ColumnTypeError, "priorities must be numbers"),
        ([0, 1], [5.0, 5.0], [0], ColumnLengthError, "'generation' must have 2 rows, one per row, got 1"),
        ([0, 3], [5.0, 5.0], None, RowIndexError, "index 3 must have a row to get a priority"),
        ([0, 8], [5.0, 5.0], None, RowIndexError, "index 8"),
        ([0.5], [5.0], None, RowIndexError, "indexed by integers"),
    ]:
        with pytest.raises(error, match=message):
            buf.update_weight(index, value, generation=generation)
    buf.add(step(3))
    assert buf.weight[:4].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1}, "alpha must be a number from 0, got -1"),
        ({"alpha": np.nan}, "alpha must be"),
        ({"alpha": "a"}, "alpha must be"),
        ({"beta": np.inf}, "beta must be"),
        ({"beta": True}, "beta must be a number from 0, got True"),
    ],
)
def test_exponents_are_numbers_from_0(options: dict[str, Any], message: str) -> None:
    for make in (filled, vector):
        with pytest.raises(PriorityError, match=message):
            make(0, **options)


# Several buffers as one


def test_classes_are_subclasses_of_the_expected_types() -> None:
    buf = vector(1)
    manager = PrioritizedReplayBufferManager([filled(0), filled(0)])
    assert isinstance(filled(0), ReplayBuffer)
    for item in (buf, manager):
        assert isinstance(item, ReplayBuffer)
        assert isinstance(item, ReplayBufferManager)
        assert isinstance(item, PrioritizedReplayBufferManager)
        assert not isinstance(item, VectorReplayBuffer)
    assert PrioritizedVectorReplayBuffer(10, 3, alpha=0.6, beta=0.4).maxsize == 12
    assert buf.options["alpha"] == 0.6
    with pytest.raises(ArgumentError, match="buffer_num must be a whole number from 1, got 0"):
        PrioritizedVectorReplayBuffer(10, 0, alpha=0.6, beta=0.4)
    with pytest.raises(NotImplementedError):
        buf.update(filled(1))


def test_managers_copy_the_rows_and_priorities_of_their_parts() -> None:
    first, second = filled(11, alpha=1.0), filled(3, alpha=1.0)
    first.update_weight(np.arange(8), np.arange(1.0, 9.0))
    second.update_weight([0, 1, 2], [20.0, 0.5, 4.0])
    buf = PrioritizedReplayBufferManager([first, second])
    np.testing.assert_allclose(buf.weight[:], [*range(1, 9), 20.0, 0.5, 4.0, *[0.0] * 5], rtol=1e-5)
    buf.add(steps(30, 2))
    np.testing.assert_allclose(buf.weight[[3, 11]], [20.0, 20.0], rtol=1e-5)
    second.update_weight([0], [6.0])
    assert buf.weight[8] == pytest.approx(6.0)
    with pytest.raises(RingError, match="read `weight` of the entire buffer"):
        _ = second.weight
    with pytest.raises(ColumnMismatchError, match="must be prioritized buffers, got a ReplayBuffer"):
        PrioritizedReplayBufferManager([filled(0), ReplayBuffer(3)])
    with pytest.raises(ColumnMismatchError, match="must have the same 'alpha'"):
        PrioritizedReplayBufferManager([filled(0), filled(0, alpha=0.5)])


def test_many_rows_added_together_have_the_priority_of_new_rows() -> None:
    source = ReplayBuffer(20)
    for n in range(14):
        source.add(step(n))
    buf = filled(2, alpha=1.0)
    buf.update_weight([0], [3.0])
    buf.update(source)
    np.testing.assert_allclose(buf.weight[:], np.full(8, 3.0), rtol=1e-6)
    rows = {"obs": np.arange(5), "act": np.arange(5), "rew": np.ones(5), "obs_next": np.arange(5)}
    flags = dict.fromkeys(("terminated", "truncated", "done"), np.zeros(5, bool))
    result = PrioritizedReplayBuffer.from_data(**rows, **flags, alpha=0.5, beta=0.5, stratified=True)
    assert result.sample_indices(5).tolist() == [0, 1, 2, 3, 4]


def test_rows_keep_their_priorities_if_others_are_removed() -> None:
    buf = PrioritizedReplayBuffer(6, alpha=1.0, beta=1.0)
    for n in range(8):
        buf.add(step(n, rew=np.nan if n % 3 == 0 else 1.0))
    buf.update_weight(buf.sample_indices(0), np.arange(1.0, 7.0))
    retained = buf[:].obs[~np.isnan(buf[:].rew)]
    buf.dropnull()
    assert np.array_equal(buf[:].obs, retained)
    np.testing.assert_allclose(buf.weight[:], [*(retained - 1), 0.0, 0.0], rtol=1e-5)


# Carrying on elsewhere


@pytest.mark.parametrize("make", [filled, vector])
def test_a_pickled_buffer_resumes_exactly(make: Callable[..., Any]) -> None:
    buf = make(3, stratified=True, weight_norm=False)
    buf.update_weight([0, 1], [5.0, 0.2])
    batch, indices = buf.sample(9)
    again = pickle.loads(pickle.dumps(buf))
    assert type(again) is type(buf)
    again.update_weight(indices, np.ones(9), generation=batch.generation)
    buf.update_weight(indices, np.ones(9), generation=batch.generation)
    for _ in range(3):
        first, other = buf.sample(16), again.sample(16)
        assert np.array_equal(first[1], other[1])
        assert np.array_equal(first[0].weight, other[0].weight)
        for each in (buf, again):
            each.add(step(7) if make is filled else steps(7, 3))
    assert np.array_equal(buf.weight[:], again.weight[:])


def test_a_pickled_part_contains_its_rows() -> None:
    buf = vector(3, alpha=1.0)
    buf.update_weight([4, 5, 6], [2.0, 3.0, 4.0])
    again = pickle.loads(pickle.dumps(buf.buffers[1]))
    assert again.maxsize == 4
    np.testing.assert_allclose(again.weight[:], [2.0, 3.0, 4.0, 0.0], rtol=1e-6)
    assert set(np.unique(again.sample_indices(200))) == {0, 1, 2}


# Beside Tianshou


# Managers of theirs do not hand `weight_norm` on.
@pytest.mark.parametrize(("envs", "weight_norm"), [(0, True), (0, False), (3, True)])
def test_weights_agree_with_tianshou(envs: int, weight_norm: bool) -> None:
    data = pytest.importorskip("tianshou.data")
    options = {"alpha": 0.7, "beta": 0.3, "weight_norm": weight_norm}
    if envs:
        ours = PrioritizedVectorReplayBuffer(9, envs, **options)
        theirs = data.PrioritizedVectorReplayBuffer(9, envs, **options)
    else:
        ours, theirs = PrioritizedReplayBuffer(9, **options), data.PrioritizedReplayBuffer(9, **options)
    rng = np.random.default_rng(4)
    for n in range(14):
        for buf, lib in ((ours, Batch), (theirs, data.Batch)):
            row = steps(n, envs) if envs else step(n)
            buf.add(lib(info={} if not envs else [{}] * envs, **dict(row.items())))
        live = ours.sample_indices(0)
        indices, priorities = rng.choice(live, 4), rng.choice([0.0, 0.5, 2.0, -3.0], 4)
        ours.update_weight(indices, priorities)
        theirs.update_weight(indices.copy(), priorities)
        np.testing.assert_allclose(ours.get_weight(live), theirs.get_weight(live))
        np.testing.assert_allclose(ours.weight[live], theirs.weight[live])
        np.testing.assert_allclose(ours[live].weight, theirs[live].weight)
        np.testing.assert_allclose(ours[int(live[0])].weight, theirs[int(live[0])].weight)


def prioritized(**options: Any) -> PrioritizedReplayBuffer:
    buf = PrioritizedReplayBuffer(6, alpha=0.5, beta=0.5, **options)
    for n in range(4):
        buf.add(step(n))
    return buf


def test_new_items_have_the_largest_priority_so_far() -> None:
    buf = prioritized()
    buf.update_weight(np.array([0, 1]), np.array([4.0, 0.25]))
    buf.add(step(9))
    weights = buf.get_weight(np.arange(5))
    assert weights[4] == pytest.approx(weights[0])
    assert weights[0] < weights[2] < weights[1]


def test_weights_are_divided_by_the_largest_of_the_batch() -> None:
    buf = prioritized()
    buf.update_weight(np.array([0, 1]), np.array([4.0, 0.25]))
    assert buf[[0, 1, 2]].weight.tolist() == pytest.approx([0.5, 1.0, 0.5**0.5], rel=1e-5)
    assert buf[[0, 2]].weight.tolist() == pytest.approx([0.5**0.5, 1.0], rel=1e-5)
    plain = prioritized(weight_norm=False)
    plain.update_weight(np.array([0, 1]), np.array([4.0, 0.25]))
    assert plain[[0, 1, 2]].weight.tolist() == pytest.approx(plain.get_weight(np.arange(3)).tolist())
    buf.set_beta(1.0)
    assert buf[[0, 1, 2]].weight.tolist() == pytest.approx([0.25, 1.0, 0.5], rel=1e-5)


def test_the_last_priority_of_a_repeated_item_is_stored() -> None:
    buf = prioritized()
    buf.update_weight(np.array([0, 1, 0]), np.array([9.0, 4.0, 4.0]))
    assert buf.get_weight(0) == pytest.approx(buf.get_weight(1))

"""Sum trees agree with plain cumulative sums and with Tianshou's segment tree."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch.buffer.sum_tree import SegmentTree, SumTree
from samplebatch.errors import ColumnLengthError, PriorityError, RowIndexError, SampleBatchError

SIZES = [1, 2, 3, 5, 7, 8, 9, 31, 100, 1000, 1025]


def whole_weights(size: int, seed: int = 7) -> np.ndarray:
    """Draw integer weights, a third of which are 0; their sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(size) < 0.3, 0, rng.integers(1, 100, size)).astype(float)


def tree_of(weights: np.ndarray) -> SumTree:
    tree = SumTree(len(weights))
    tree.set(np.arange(len(weights)), weights)
    return tree


def nodes(tree: SumTree) -> np.ndarray:
    return tree._tree


# Sums and searches


@pytest.mark.parametrize("size", SIZES)
def test_every_prefix_sum_finds_its_slot(size: int) -> None:
    weights = whole_weights(size)
    weights[-1] = 1.0
    tree = tree_of(weights)
    values = np.arange(1.0, weights.sum() + 1)
    assert np.array_equal(tree.find(values), np.searchsorted(np.cumsum(weights), values))
    assert np.array_equal(tree.find(values - 0.5), np.searchsorted(np.cumsum(weights), values - 0.5))
    assert tree.total == weights.sum()


@pytest.mark.parametrize("size", SIZES)
def test_sums_over_every_range(size: int) -> None:
    weights = whole_weights(size)
    tree, before = tree_of(weights), np.concatenate([[0.0], np.cumsum(weights)])
    rng = np.random.default_rng(3)
    for start, stop in [(0, size), (-5, size + 5), *np.sort(rng.integers(0, size + 1, (50, 2)), axis=1).tolist()]:
        assert tree.sum(start, stop) == before[min(stop, size)] - before[max(start, 0)]
    assert tree.sum(size, 0) == 0.0


def test_a_value_rounded_past_the_end_selects_a_positive_weight() -> None:
    # In floats 0.1 + 0.2 + 0.3 is more than 0.6 or not, by the order of the additions; the slots after them are empty.
    rng = np.random.default_rng(5)
    for _ in range(200):
        weights = np.where(rng.random(37) < 0.5, 0.0, rng.random(37) * 10.0 ** rng.integers(-12, 1, 37))
        tree = tree_of(weights)
        total = tree.total
        values = np.nextafter(total, [0.0, np.inf])
        for actual in (tree.find([0.0, *values, total]), tree.find(np.cumsum(weights)[weights > 0])):
            assert (weights[actual] > 0).all()


def test_a_tree_of_no_slots() -> None:
    tree = SumTree(0)
    tree.set([], [])
    assert (tree.total, tree.sum(0, 0), len(tree.weights)) == (0.0, 0.0, 0)
    with pytest.raises(RowIndexError, match=r"slot must be in \[0, 0\), got 0"):
        tree.set([0], [1.0])
    with pytest.raises(PriorityError, match="must include a positive weight"):
        tree.draw(1, np.random.default_rng())


@settings(max_examples=100)
@given(st.data())
def test_an_updated_tree_equals_a_rebuilt_tree(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 70))
    slot = st.integers(0, size - 1)
    weight = st.floats(0, 1e6, allow_subnormal=False)
    tree, weights = SumTree(size), np.zeros(size)
    for _ in range(data.draw(st.integers(1, 6))):
        slots = np.array(data.draw(st.lists(slot, max_size=2 * size)), np.intp)
        values = np.array(data.draw(st.lists(weight, min_size=len(slots), max_size=len(slots))))
        tree.set(slots, values)
        weights[slots] = values
        assert np.array_equal(nodes(tree)[1:], nodes(tree_of(weights))[1:])


def test_sums_remain_exact_over_a_million_updates() -> None:
    size = 1000
    tree, weights, rng = SumTree(size), np.zeros(size), np.random.default_rng(11)
    for _ in range(4000):
        slots = rng.integers(0, size, 256)
        values = 10.0 ** rng.uniform(-8, 8, 256)
        tree.set(slots, values)
        weights[slots] = values
    assert np.array_equal(nodes(tree)[1:], nodes(tree_of(weights))[1:])
    tree.set(np.arange(size), 0.0)
    assert not nodes(tree).any()


def test_the_last_weight_of_a_repeated_slot_is_stored() -> None:
    tree = SumTree(4)
    tree.set([2, 1, 2, 2], [1.0, 5.0, 3.0, 2.0])
    assert tree.weights.tolist() == [0.0, 5.0, 2.0, 0.0]
    assert tree.total == 7.0


def test_one_weight_for_many_slots_and_weights_of_other_kinds() -> None:
    tree = SumTree(5)
    tree.set(np.array([0, 1], np.uint8), np.float32(0.5))
    tree.set([3], 2)
    assert tree.weights.tolist() == [0.5, 0.5, 0.0, 2.0, 0.0]
    assert tree.get(3) == 2.0
    assert tree.get(np.array([[0, 3]])).tolist() == [[0.5, 2.0]]
    with pytest.raises(ValueError, match="read-only"):
        tree.weights[0] = 1.0


# What is refused


@pytest.mark.parametrize(
    ("slots", "weights", "error", "message"),
    [
        ([0, 1], [1.0, np.nan], PriorityError, "got NaN for slot 1"),
        ([0, 1], [1.0, -1e-300], PriorityError, "got a negative weight for slot 1"),
        ([0, 1], [np.inf, 1.0], PriorityError, "got a larger weight for slot 0"),
        ([0], [1e308], PriorityError, r"must be in \[0, 2.2e\+307\], got a larger weight"),
        ([0, 5], [1.0, 1.0], RowIndexError, r"slot must be in \[0, 5\), got 5"),
        ([-1], [1.0], RowIndexError, r"slot must be in \[0, 5\), got -1"),
        ([0.5], [1.0], RowIndexError, "slots must be integers, got dtype float64"),
        ([True, False], [1.0, 1.0], RowIndexError, "slots must be integers, got dtype bool"),
        ([0, 1], [1.0, 2.0, 3.0], ColumnLengthError, "'weight' must have 2 rows, one per slot, got 3"),
    ],
)
def test_rejected_updates_change_nothing(
    slots: list[float], weights: list[float], error: type[Exception], message: str
) -> None:
    tree = tree_of(np.arange(5.0))
    before = nodes(tree).copy()
    with pytest.raises(error, match=message):
        tree.set(slots, weights)
    assert np.array_equal(nodes(tree), before)


def test_the_largest_weights_have_a_finite_sum() -> None:
    tree = SumTree(5)
    tree.set(np.arange(5), np.finfo(float).max / 8)
    assert np.isfinite(tree.total)
    with pytest.raises(ValueError, match="0 slots or more"):
        SumTree(-1)


# Draws


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("size", [1, 6, 37])
def test_draws_follow_the_weights(size: int, stratified: bool) -> None:
    weights = whole_weights(size, seed=3)
    weights[size // 2] = 50.0
    tree, rng = tree_of(weights), np.random.default_rng(13)
    counts = sum(np.bincount(tree.draw(100, rng, stratified=stratified), minlength=size) for _ in range(500))
    expected = 50_000 * weights / weights.sum()
    assert not counts[weights == 0].any()
    sampled = weights > 0
    chi_square = float(((counts - expected)[sampled] ** 2 / expected[sampled]).sum())
    freedom = int(sampled.sum()) - 1
    # Five standard deviations above what chance gives.
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom)


def test_stratified_draws_differ_little_from_the_expectation() -> None:
    weights = np.array([1.0, 0.0, 3.0, 2.0, 4.0])
    sampled = tree_of(weights).draw(20, np.random.default_rng(1), stratified=True)
    assert (np.diff(sampled) >= 0).all()
    assert (np.abs(np.bincount(sampled, minlength=5) - 20 * weights / 10) < 2).all()


class EdgeNumbers(np.random.Generator):
    """Generator that draws only the ends of [0, 1)."""

    def random(self, size: int) -> np.ndarray:  # type: ignore[override]
        return np.resize([0.0, 1.0 - 2.0**-53], size)


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("total", [1.0, 1.0 + 2.0**-52, 1.5, 1e-200, 1e200])
def test_the_ends_of_the_range_draw_slots_of_positive_weight(total: float, stratified: bool) -> None:
    tree = tree_of(np.array([0.0, 0.0, total / 2, 0.0, total / 2, 0.0]))
    sampled = tree.draw(7, EdgeNumbers(np.random.PCG64()), stratified=stratified)
    assert set(sampled.tolist()) == {2, 4}


def test_draws_use_the_generator_that_is_passed() -> None:
    tree = tree_of(np.arange(50.0))
    first, second = (tree.draw(20, np.random.default_rng(4)) for _ in range(2))
    assert np.array_equal(first, second)
    assert len(tree.draw(0, np.random.default_rng(4))) == 0


# Pickles


@pytest.mark.parametrize("filled", [0, 3, 900])
def test_a_pickled_tree_contains_only_its_weights(filled: int) -> None:
    tree = SumTree(1000)
    tree.set(np.arange(filled), np.arange(1.0, filled + 1))
    sent = pickle.dumps(tree)
    again = pickle.loads(sent)
    assert np.array_equal(nodes(again), nodes(tree))
    assert len(sent) < 400 + 9 * filled + (8 * 1000 if filled > 500 else 16 * filled)


# Tianshou's segment tree


def test_segment_tree_is_an_array_with_fast_sums() -> None:
    tree = SegmentTree(10)
    tree[np.arange(10)] = np.arange(10.0)
    tree[3] = 30
    tree[[0, 0, 9]] = [5.0, 6.0, 90.0]
    tree[4:6] = 1.0
    array = np.array([6.0, 1.0, 2.0, 30.0, 1.0, 1.0, 6.0, 7.0, 8.0, 90.0])
    assert len(tree) == 10
    assert tree[:].tolist() == array.tolist()
    assert (tree[-1], tree[np.array([0, 3])].tolist(), tree[[True] + [False] * 9].tolist()) == (
        90.0,
        [6.0, 30.0],
        [6.0],
    )
    for start, end in [(0, None), (2, None), (2, 5), (0, -1), (3, -2), (5, 3), (0, 20), (-3, None)]:
        assert tree.reduce(start, end) == array[start:end].sum()


def test_segment_tree_finds_prefix_sums() -> None:
    tree = SegmentTree(4)
    tree[:] = [0.0, 1.0, 2.0, 3.0]
    assert tree.get_prefix_sum_idx(0.0) == 1
    assert isinstance(tree.get_prefix_sum_idx(1), int)
    assert tree.get_prefix_sum_idx([[0.5, 1.0], [1.5, 5.9]]).tolist() == [[1, 1], [2, 3]]


@pytest.mark.parametrize("value", [6.0, 7.0, -0.1, np.nan, [1.0, 6.0]])
def test_prefix_sums_at_or_above_the_total_are_rejected(value: float | list[float]) -> None:
    tree = SegmentTree(3)
    tree[:] = [1.0, 2.0, 3.0]
    with pytest.raises(PriorityError, match=r"must be in \[0, 6\)"):
        tree.get_prefix_sum_idx(value)


def test_segment_tree_rejects_invalid_weights_and_indices() -> None:
    tree = SegmentTree(3)
    for index, value, error in [(3, 1.0, RowIndexError), (0, -1.0, PriorityError), (0, np.nan, PriorityError)]:
        with pytest.raises(error):
            tree[index] = value
    with pytest.raises(RowIndexError, match="row 3 must be in"):
        tree[3]
    with pytest.raises(ValueError, match="a positive size, got 0"):
        SegmentTree(0)
    assert tree.reduce() == 0.0


@pytest.mark.parametrize("size", SIZES)
def test_segment_tree_agrees_with_tianshou(size: int) -> None:
    theirs = pytest.importorskip("tianshou.data").SegmentTree(size)
    ours, rng = SegmentTree(size), np.random.default_rng(size)
    for _ in range(20):
        index = rng.integers(0, size, rng.integers(1, 20))
        values = rng.integers(0, 100, len(index)).astype(float)
        ours[index] = values
        theirs[index] = values
    all_rows = np.arange(size)
    assert np.array_equal(ours[all_rows], theirs[all_rows])
    assert ours.reduce() == theirs.reduce()
    for start, end in np.sort(rng.integers(0, size + 1, (20, 2)), axis=1).tolist():
        assert ours.reduce(start, end) == theirs.reduce(start, end)
    assert ours.reduce(end=-1) == theirs.reduce(end=-1)
    total = ours.reduce()
    if total > 1:
        # Of a value of 0 theirs finds the first element, be it 0 or not.
        values = np.concatenate([rng.integers(1, int(total), 50), rng.random(50) * total])
        assert np.array_equal(ours.get_prefix_sum_idx(values), theirs.get_prefix_sum_idx(values))
        assert ours.get_prefix_sum_idx(values[-1]) == theirs.get_prefix_sum_idx(values[-1])


def test_segment_tree() -> None:
    tree = SegmentTree(5)
    assert len(tree) == 5
    tree[np.arange(5)] = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    tree[1] = 0.5
    assert tree.reduce() == 13.5
    assert tree.reduce(end=-1) == 8.5
    assert tree.reduce(1, 3) == 3.5
    assert tree[1] == 0.5
    assert tree[np.array([0, 4])].tolist() == [1.0, 5.0]
    assert tree.get_prefix_sum_idx(1.2) == 1
    assert tree.get_prefix_sum_idx(np.array([0.0, 1.0, 1.5, 1.6, 13.49])).tolist() == [0, 0, 1, 2, 4]
    for value in (13.5, 14.0, -0.1, np.array([0.0, 13.5])):
        with pytest.raises(SampleBatchError):
            tree.get_prefix_sum_idx(value)

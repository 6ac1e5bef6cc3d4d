"""Tables of steps: they draw as the replay buffers that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    MultiAgentBatch,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
    concat_samples,
)
from samplebatch.buffer.store import DenseStore, ObjectStore, RaggedStore
from samplebatch.buffer.stores import CompressedStore
from samplebatch.errors import (
    ArgumentError,
    CapacityError,
    EmptyBufferError,
    LimitTimeoutError,
    PriorityError,
    RowIndexError,
    SequenceError,
)
from samplebatch.service import RateLimiter, ReplayTable, Sample
from tests.service.table_rows import episode

FRAGMENTS = [
    *(episode(i, range(9), env_id=i % 2) for i in range(4)),
    episode(4, range(5), done=False, env_id=0),
    episode(5, range(6), done=False, env_id=1),
    episode(4, range(5, 8), env_id=0),
]

BUFFERS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "uniform": ({}, lambda: ReplayBuffer(40, random_seed=3)),
    "uniform, two streams": ({"streams": 2}, lambda: VectorReplayBuffer(40, 2, random_seed=3)),
    "uniform, stacked": (
        {"stack_num": 3, "ignore_obs_next": True, "sample_avail": True},
        lambda: ReplayBuffer(40, 3, ignore_obs_next=True, sample_avail=True, random_seed=3),
    ),
    "prioritized": (
        {"kind": "prioritized", "alpha": 0.7, "beta": 0.5},
        lambda: PrioritizedReplayBuffer(40, 0.7, 0.5, random_seed=3),
    ),
    "prioritized, two streams, stratified": (
        {"kind": "prioritized", "streams": 2, "stratified": True},
        lambda: PrioritizedVectorReplayBuffer(40, 2, alpha=0.6, beta=0.4, stratified=True, random_seed=3),
    ),
}


def both(name: str, **limits: Any) -> tuple[ReplayTable, Any]:
    """Return a table and a local buffer with the same seed and fragments."""
    options, make = BUFFERS[name]
    table, buffer = ReplayTable("replay", capacity=40, seed=3, **options, **limits), make()
    for fragment in FRAGMENTS:
        assert table.extend(fragment, writer="w").indices.tolist() == buffer.extend(fragment).tolist()
    return table, buffer


def assert_same(actual: Any, expected: Any) -> None:
    assert sorted(actual.keys()) == sorted(expected.keys())
    for name in list(actual.keys()):
        np.testing.assert_array_equal(actual[name], expected[name])


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("options", [{}, {"n_step": 3, "gamma": 0.9}], ids=["steps", "n-step"])
def test_the_same_seed_gives_the_samples_of_a_local_buffer(name: str, options: dict[str, Any]) -> None:
    table, buffer = both(name)
    for _ in range(5):
        sample = table.sample(16, **options)
        batch, indices = buffer.sample(16, **options)
        assert sample.indices.tolist() == indices.tolist()
        assert_same(sample.batch, batch)
        if "prioritized" in name:
            assert sample.weights is not None
            np.testing.assert_array_equal(sample.weights, batch.weight)
            np.testing.assert_array_equal(sample.generation, batch.generation)
            priorities = indices * 0.25 + 0.1
            table.update_weight(sample.indices, priorities, sample.generation)
            buffer.update_weight(indices, priorities, generation=batch.generation)
        else:
            assert sample.weights is None


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("padded", [True, False])
def test_sequences_agree_with_a_local_buffer(name: str, padded: bool) -> None:
    table, buffer = both(name)
    sample = table.sample(8, mode="sequences", length=4, burn_in=1, padded=padded)
    batch, indices = buffer.sample_sequences(8, 4, burn_in=1, padded=padded)
    np.testing.assert_array_equal(sample.indices, indices)
    assert_same(sample.batch, batch)
    assert sample.generation.shape == (8,)


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("unfinished", [True, False])
def test_episodes_agree_with_a_local_buffer(name: str, unfinished: bool) -> None:
    table, buffer = both(name)
    sample = table.sample(6, mode="episodes", unfinished=unfinished)
    batches, indices = buffer.sample_episodes(6, unfinished=unfinished)
    assert sample.lengths is not None
    assert sample.lengths.tolist() == [len(part) for part in indices]
    assert sample.indices.tolist() == np.concatenate(indices).tolist()
    assert sample.batch.obs.tolist() == np.concatenate([batch.obs for batch in batches]).tolist()


def test_a_table_computes_n_step_returns() -> None:
    table = ReplayTable("replay", capacity=40, seed=3, n_step=3, gamma=0.5)
    table.extend(episode(0, range(9)))
    assert set(np.unique(table.sample(64).batch.returns)) == {1.0, 1.5, 1.75}
    assert set(np.unique(table.sample(64, n_step=1).batch.returns)) == {1.0}


def test_a_seed_applies_to_one_sample_only() -> None:
    table, buffer = both("uniform")
    first = table.sample(16, seed=9).indices.tolist()
    assert table.sample(16, seed=9).indices.tolist() == first
    assert table.sample(16).indices.tolist() == buffer.sample(16)[1].tolist()


def test_an_exponent_applies_to_one_sample_only() -> None:
    table, _ = both("prioritized")
    table.update_weight(np.arange(40), np.arange(40) + 1.0)
    weights = [table.sample(16, seed=1, beta=beta).weights for beta in (0.0, 1.0)]
    assert weights[0] is not None
    assert weights[1] is not None
    assert (weights[0] == 1.0).all()
    assert weights[1].min() < 0.5
    np.testing.assert_array_equal(table.sample(16, seed=1).weights, table.sample(16, seed=1, beta=0.5).weights)


@pytest.mark.parametrize("name", ["uniform", "prioritized"])
def test_the_distribution_agrees_with_a_local_buffer(name: str) -> None:
    table, buffer = both(name)
    priorities = np.arange(40) % 7 + 0.5
    if name == "prioritized":
        table.update_weight(np.arange(40), priorities)
        buffer.update_weight(np.arange(40), priorities)
    draws = 40_000
    counts = [
        np.bincount(table.sample(draws, seed=11).indices, minlength=40),
        np.bincount(buffer.sample(draws)[1], minlength=40),
    ]
    # Two samples of one distribution: chi-square with 39 degrees of freedom, of which 99.9% lie below 72.1.
    total = counts[0] + counts[1]
    assert ((counts[0] - counts[1]) ** 2 / total).sum() < 72.1
    expected = draws * (priorities**0.7 / (priorities**0.7).sum() if name == "prioritized" else np.full(40, 1 / 40))
    assert ((counts[0] - expected) ** 2 / expected).sum() < 72.1


# Priorities


def test_priorities_of_steps_that_were_removed_are_dropped_and_not_counted() -> None:
    table = ReplayTable("prio", kind="prioritized", capacity=4, alpha=1.0, beta=1.0, seed=0)
    table.extend(episode(0, range(4)))
    sample = table.sample(4)
    table.extend(episode(1, range(2)))
    is_present = sample.indices >= 2
    assert table.update_weight(sample.indices, np.full(4, 9.0), sample.generation) == int(is_present.sum())


def test_steps_are_inserted_with_priorities() -> None:
    table = ReplayTable("prio", kind="prioritized", capacity=4, alpha=1.0, beta=1.0, seed=0)
    table.extend(episode(0, range(4)), priorities=[1.0, 0.0, 0.0, 3.0])
    counts = np.bincount(table.sample(4000).indices, minlength=4)
    assert counts[1] == counts[2] == 0
    assert abs(counts[3] - 3000) < 150


def test_a_single_priority_applies_to_all_steps() -> None:
    table = ReplayTable("prio", kind="prioritized", capacity=8, alpha=1.0, beta=1.0, seed=0)
    table.extend(episode(0, range(4)), priorities=3.0)
    table.extend(episode(1, range(4)), priorities=1.0)
    counts = np.bincount(table.sample(8000).indices, minlength=8)
    assert abs(counts[:4].sum() - 6000) < 250


# Streams


def test_fragments_of_each_writer_are_contiguous() -> None:
    table = ReplayTable("replay", capacity=80, streams=4, seed=0)
    for start in range(0, 8, 2):
        for writer in ("a", "b"):
            rows = concat_samples(
                [
                    episode(10 * (writer == "b") + env, range(start, start + 2), done=start == 6, env_id=env)
                    for env in (0, 1)
                ]
            )
            table.extend(rows, writer=writer)
    sample = table.sample(64, mode="episodes")
    assert sample.lengths is not None
    assert set(sample.lengths.tolist()) == {8}
    assert not sample.batch.truncated.any()


def test_a_new_stream_reuses_the_ring_of_the_oldest_stream() -> None:
    table = ReplayTable("replay", capacity=20, streams=2, seed=0)
    for writer in ("a", "b", "a"):
        table.extend(episode(0 if writer == "a" else 1, range(2), done=False), writer=writer)
    assert table.extend(episode(2, range(2)), writer="c").indices.tolist() == [12, 13]
    assert table.extend(episode(3, range(2)), writer="b").indices.tolist() == [4, 5]


def test_fragments_of_several_agents_are_accepted() -> None:
    table = ReplayTable("replay", capacity=20, seed=0)
    rows = MultiAgentBatch({"p": episode(0, range(3)), "q": episode(1, range(2))}, 3)
    assert table.extend(rows).inserted == len(table) == 5


# Steps that are sampled a number of times


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_no_step_is_sampled_more_often_than_allowed(kind: Any) -> None:
    table = ReplayTable("once", kind=kind, capacity=50, max_times_sampled=3, seed=0)
    table.extend(episode(0, range(40)))
    counts = np.zeros(50, int)
    for size in (50, 7, 40, 23):
        counts += np.bincount(table.sample(size, timeout_s=0).indices, minlength=50)
    assert counts.tolist() == [3] * 40 + [0] * 10
    with pytest.raises(LimitTimeoutError, match="1 steps are requested, and 0 may be sampled"):
        table.sample(1, timeout_s=0)
    table.extend(episode(1, range(2)))
    assert sorted(table.sample(6, timeout_s=0).indices.tolist()) == [40, 40, 40, 41, 41, 41]


def test_remaining_draws_are_equally_likely() -> None:
    first, last = np.zeros(4), np.zeros(4)
    table = ReplayTable("once", capacity=4, max_times_sampled=1, seed=0)
    for _ in range(1000):
        table.extend(episode(0, range(4)))
        sample = table.sample(3).indices
        assert len(set(sample.tolist())) == 3
        first[sample[0]] += 1
        last[sample[2]] += 1
    # Of chi-square with 3 degrees of freedom, 99.9% lie below 16.3.
    assert ((first - 250) ** 2 / 250).sum() < 16.3
    assert ((last - 250) ** 2 / 250).sum() < 16.3


def test_weights_of_the_last_draw_agree_with_the_priorities() -> None:
    table = ReplayTable("once", kind="prioritized", capacity=2, max_times_sampled=1, alpha=1.0, beta=1.0, seed=0)
    table.extend(episode(0, range(2)), priorities=[1.0, 4.0])
    sample = table.sample(2)
    assert sample.weights is not None
    np.testing.assert_allclose(sample.weights[np.argsort(sample.indices)], [1.0, 0.25], rtol=1e-5)
    assert table.update_weight(sample.indices, [5.0, 5.0], sample.generation) == 0
    with pytest.raises(LimitTimeoutError):
        table.sample(1, timeout_s=0)


def test_sequences_count_their_sampled_steps() -> None:
    table = ReplayTable("once", capacity=40, max_times_sampled=1, seed=0)
    table.extend(episode(0, range(20)))
    sample = table.sample(20, mode="sequences", length=3)
    assert sorted(sample.indices[:, 0].tolist()) == list(range(20))


def test_a_limit_of_times_can_change() -> None:
    table = ReplayTable("once", kind="prioritized", capacity=10, max_times_sampled=1, seed=0)
    table.extend(episode(0, range(10)))
    table.sample(10)
    table.set_limits(max_times_sampled=2)
    assert sorted(table.sample(10, timeout_s=0).indices.tolist()) == list(range(10))
    table.set_limits(max_times_sampled=0)
    assert len(table.sample(100, timeout_s=0).indices) == 100


def test_rejected_limits_leave_all_limits_unchanged() -> None:
    table = ReplayTable("available", capacity=10, sample_avail=True)
    before = table.info()["limits"]
    with pytest.raises(ArgumentError, match="max_times_sampled must be 0"):
        table.set_limits(min_size=3, max_times_sampled=2)
    assert table.info()["limits"] == before


# Refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kind": "unform"}, ArgumentError, "kind must be one of .* did you mean 'uniform'"),
        ({"capacity": 0}, ArgumentError, "capacity must be a whole number from 1, got 0"),
        ({"streams": 0}, ArgumentError, "streams must be a whole number from 1"),
        ({"remover": "lifo"}, ArgumentError, "remover must be 'fifo' for a table of steps, got 'lifo'"),
        ({"remover": "fifoo"}, ArgumentError, "remover must be one of .* did you mean 'fifo'"),
        ({"items": "rows"}, ArgumentError, "items must be one of 'steps', 'fragments', got 'rows'"),
        ({"kind": "lifo", "items": "steps"}, ArgumentError, "items must be 'fragments' for kind 'lifo', got 'steps'"),
        (
            {"stack_nun": 2},
            ArgumentError,
            "tables of kind 'uniform' have no option 'stack_nun'; did you mean 'stack_num'",
        ),
        ({"alpha": 0.5}, ArgumentError, "tables of kind 'uniform' have no option 'alpha'"),
        ({"kind": "prioritized", "alpha": -1.0}, PriorityError, "alpha must be a number from 0"),
        ({"n_step": 0}, ArgumentError, "n_step must be a whole number from 1, got 0"),
        ({"gamma": 2}, ArgumentError, "gamma must be a number from 0 to 1, got 2"),
        ({"limiter": RateLimiter(11)}, ArgumentError, "min_size must be at most the capacity, 10 steps, got 11"),
        (
            {"limiter": RateLimiter(samples_per_insert=3), "max_times_sampled": 2},
            ArgumentError,
            "samples_per_insert must be at most max_times_sampled, 2, got 3",
        ),
        ({"sample_avail": True, "max_times_sampled": 2}, ArgumentError, "must be 0 for a table with sample_avail"),
    ],
)
def test_invalid_tables_are_rejected(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ReplayTable("replay", **{"capacity": 10, **arguments})


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"batch_size": 0}, ArgumentError, "batch_size must be a whole number from 1, got 0"),
        ({"mode": "fragments"}, ArgumentError, "mode of a table of steps must be one of steps, sequences, episodes"),
        ({"seed": -1}, ArgumentError, "seed must be a whole number from 0, got -1"),
        ({"n_steps": 3}, ArgumentError, "samples of steps have no option 'n_steps'; did you mean 'n_step'"),
        ({"n_step": 0}, ArgumentError, "n_step must be a whole number from 1"),
        ({"beta": 0.5}, ArgumentError, "samples of steps have no option 'beta'"),
        ({"mode": "sequences"}, ArgumentError, "length must be a whole number from 1, got None"),
        ({"mode": "sequences", "length": 2, "burn_in": 2}, ArgumentError, "burn_in must be less than length, 2, got 2"),
        ({"mode": "sequences", "length": 30, "padded": False}, EmptyBufferError, "an episode of 30 steps"),
        ({"timeout_s": -1}, ArgumentError, "timeout_s must be a number above 0, got -1"),
    ],
)
def test_invalid_samples_are_rejected(request_: dict[str, Any], error: type[Exception], message: str) -> None:
    table = ReplayTable("replay", capacity=20)
    table.extend(episode(0, range(9)))
    with pytest.raises(error, match=message):
        table.sample(**{"batch_size": 4, **request_})


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (
            "uniform",
            {"rows": episode(0, range(21))},
            CapacityError,
            "at most 20 steps, the slots of a ring, got 21",
        ),
        ("uniform", {"keys": "k"}, ArgumentError, "a fragment for a table of steps must have no key, got 'k'"),
        ("uniform", {"priorities": 1.0}, PriorityError, "priorities must be omitted for tables of kind 'uniform'"),
        (
            "prioritized",
            {"priorities": [1.0, 2.0]},
            PriorityError,
            "priorities must have 1 or 9 values, one per step, got 2",
        ),
        ("prioritized", {"priorities": np.full(9, np.nan)}, PriorityError, "must be finite, got a priority of NaN"),
        ("prioritized", {"priorities": ["a"] * 9}, PriorityError, "priorities must be numbers"),
        ("prioritized", {"rows": SampleBatch(obs=[1, 2], seq_lens=[2])}, SequenceError, "plain steps"),
    ],
)
def test_invalid_inserts_are_rejected(
    kind: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = ReplayTable("replay", kind=kind, capacity=20)
    with pytest.raises(error, match=message):
        table.extend(**{"rows": episode(0, range(9)), **arguments})
    assert len(table) == table.info()["inserted"] == 0


def test_max_times_sampled_rejects_unsupported_modes() -> None:
    table = ReplayTable("once", capacity=20, max_times_sampled=2)
    for options in ({"mode": "episodes"}, {"mode": "sequences", "length": 2, "padded": False}):
        with pytest.raises(ArgumentError, match="omit max_times_sampled"):
            table.sample(2, **options)
    with pytest.raises(ArgumentError, match="batch_size must be at most 40, the draws of a full table"):
        table.sample(41)


def test_priorities_are_for_prioritized_tables_and_rows_that_exist() -> None:
    with pytest.raises(PriorityError, match="must be of kind 'prioritized' to update priorities, got 'uniform'"):
        ReplayTable("replay", capacity=4).update_weight([0], [1.0])
    table = ReplayTable("prio", kind="prioritized", capacity=4)
    for indices, message in (([4], r"index 4 must be in"), ([0], "got an empty slot")):
        with pytest.raises(RowIndexError, match=message):
            table.update_weight(indices, [1.0])


def test_an_empty_fragment_is_not_inserted() -> None:
    table = ReplayTable("replay", capacity=4)
    assert table.extend(episode(0, range(3))[:0]).inserted == 0
    assert len(table) == 0


# Carrying on


@pytest.mark.parametrize("name", BUFFERS)
def test_a_table_resumes_from_its_state(name: str) -> None:
    options = {"max_times_sampled": 3} if "stacked" not in name else {}
    table, _ = both(name, **options)
    table.sample(8)
    again = ReplayTable("replay", capacity=40, seed=99, **BUFFERS[name][0])
    again.load_state_dict(table.state_dict())
    assert {**again.info(), "nbytes": 0} == {**table.info(), "nbytes": 0}
    more = episode(5, range(6, 9), env_id=1)
    samples: list[Sample] = []
    for item in (table, again):
        item.extend(more, writer="w")
        samples.append(item.sample(16))
    assert samples[0].indices.tolist() == samples[1].indices.tolist()
    assert_same(samples[0].batch, samples[1].batch)


def test_a_reset_table_is_empty_and_counts_from_the_beginning() -> None:
    table = ReplayTable("once", capacity=10, max_times_sampled=2, streams=2)
    table.extend(episode(0, range(4)), writer="a")
    table.sample(3)
    table.reset()
    assert (len(table), table.info()["inserted"], table.info()["sampled"]) == (0, 0, 0)
    with pytest.raises(LimitTimeoutError, match="sampling requires 1 items, and there are 0"):
        table.sample(1, timeout_s=0)
    table.extend(episode(1, range(4)), writer="b")
    assert len(table.sample(8, timeout_s=0).indices) == 8


def wide(rows: int, column: str) -> SampleBatch[Any]:
    """Return steps of an episode; the last row, or every row, is large in a column of some kind."""
    steps = episode(0, range(rows))
    if column == "ragged":
        steps["obs"] = steps["new_obs"] = [np.zeros(20_000 if t == rows - 1 else 2) for t in range(rows)]
    elif column == "object":
        steps["text"] = np.array(["x" * (200_000 if t == rows - 1 else 2) for t in range(rows)], object)
    else:
        steps["obs"] = steps["new_obs"] = np.zeros((rows, 1000))
    return steps


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
@pytest.mark.parametrize("times", [0, 1000])
@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("dense", {}),
        ("dense", {"ignore_obs_next": True}),
        ("dense", {"stack_num": 4}),
        ("dense", {"compress": True}),
        ("ragged", {"ragged": ("obs", "obs_next")}),
        ("object", {}),
    ],
)
@pytest.mark.parametrize(
    "request_",
    [
        {"batch_size": 300},
        {"batch_size": 300, "n_step": 3},
        {"batch_size": 100, "mode": "sequences", "length": 3},
        {"batch_size": 30, "mode": "episodes"},
    ],
)
def test_a_sample_is_measured_before_its_rows_are_gathered(
    kind: str, times: int, column: str, options: dict[str, Any], request_: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if times and (request_.get("mode") == "episodes" or options.get("ragged")):
        pytest.skip("steps of counted tables are not drawn in episodes")
    table = ReplayTable("t", kind=kind, capacity=10, max_times_sampled=times, seed=1, **options)  # type: ignore[arg-type]
    table.extend(wide(10, column))
    if kind == "prioritized":
        # The last row is drawn most of the time.
        table.update_weight(np.arange(10), np.where(np.arange(10) == 9, 1000.0, 1.0))
    gathered: list[int] = []
    for store in (DenseStore, CompressedStore, RaggedStore, ObjectStore):

        def take(ours: Any, slots: Any, take: Any = store.take) -> Any:
            gathered.append(ours.gathered_nbytes(slots))
            return take(ours, slots)

        monkeypatch.setattr(store, "take", take)
    bound = 1 << 20
    before = table.info()
    with pytest.raises(CapacityError, match=f"a sample must have at most {bound} bytes, got"):
        table.sample(max_nbytes=bound, **request_)
    assert sum(gathered) <= bound
    assert table.info() == before
    # What fits is given, and nothing of the refused one was counted.
    small = {**request_, "batch_size": 1}
    assert len(table.sample(max_nbytes=bound, **small).indices)
    if times:
        assert table.sample(10, max_nbytes=1 << 30).batch.rew.shape == (10,)
        items: Any = table._items
        assert items.left.total == 10 * times - 11 == items.left.counts.sum()

"""Shuffling, minibatches, time slices and episodes of batches without sequences."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.batch import episodes as episodes_module
from samplebatch.batch.episodes import distinct_ids, number_env_steps
from samplebatch.column.objects import ObjectColumn
from samplebatch.errors import ColumnNotFoundError
from tests.batch.every_kind import with_every_kind
from tests.optional import HAS_TORCH, torch


def values(parts: Iterable[SampleBatch]) -> list[list[int]]:
    return [part["a"].tolist() for part in parts]


def rows(parts: Iterable[SampleBatch]) -> list[int]:
    return [row for part in parts for row in part["a"].tolist()]


# -- shuffle ----------------------------------------------------------------------------------------------------------


def test_shuffle_moves_complete_rows_of_every_kind() -> None:
    batch, before = with_every_kind(30), with_every_kind(30)
    assert batch.shuffle(rng=0) is batch
    order = (batch["flat i8"] // 3 - 1).tolist()
    assert sorted(order) == list(range(30))
    assert order != list(range(30))
    assert batch == before.take(order)


def test_shuffle_with_a_seed_is_repeatable() -> None:
    def shuffled(rng: Any) -> list[int]:
        return SampleBatch(a=np.arange(50)).shuffle(rng=rng)["a"].tolist()

    assert shuffled(7) == shuffled(7) == shuffled(np.random.default_rng(7))
    assert shuffled(7) != shuffled(8)
    assert shuffled(None) != shuffled(None)
    generator = np.random.default_rng(7)
    assert shuffled(generator) != shuffled(generator)


def test_shuffle_does_not_change_the_global_generator_of_numpy() -> None:
    np.random.seed(3)
    expected = np.random.random(3).tolist()
    np.random.seed(3)
    SampleBatch(a=np.arange(50)).shuffle()
    list(SampleBatch(a=np.arange(50)).minibatches(10))
    assert np.random.random(3).tolist() == expected


def test_shuffle_does_not_write_into_arrays_it_was_given() -> None:
    original = np.arange(20)
    batch = SampleBatch(a=original)
    batch.shuffle(rng=0)
    assert original.tolist() == list(range(20))
    assert not np.shares_memory(batch["a"], original)


@pytest.mark.parametrize("count", [0, 1])
def test_shuffle_of_empty_batches_and_single_rows(count: int) -> None:
    assert SampleBatch(a=np.arange(count)).shuffle()["a"].tolist() == list(range(count))
    assert len(SampleBatch().shuffle()) == 0


_PEAK = """
import numpy as np
from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.column import memory

COLUMN = 4_000_000

def flat(count, **more):
    columns = {f"c{number}": np.ones((count, COLUMN // count // 4), np.float32) for number in range(8)}
    return SampleBatch({**columns, "obs": {"x": columns["c0"], "y": columns["c1"]}, **more})

def read_only(batch):
    for name in batch.column_names:
        batch.column(name).values.flags.writeable = False
    return batch

padded = flat(1000, seq_lens=[40] * 25)
padded.zero_padded = True
batches = {
    "flat": flat(1000),
    "read-only": read_only(flat(1000).copy()),
    "sequences": padded,
    "policies": MultiAgentBatch({"a": flat(1000), "b": flat(500)}, 1500),
}
for name, batch in batches.items():
    batch = batch.copy()
    before = memory._pool.bytes_allocated()
    freed = memory.empty((int(memory._pool.max_memory() - before),), np.dtype(np.uint8))
    before = memory._pool.max_memory()
    del freed
    kept = memory.empty((int(before - memory._pool.bytes_allocated()),), np.dtype(np.uint8))
    batch.shuffle(rng=0)
    print(name, (memory._pool.max_memory() - before) / COLUMN)
    del kept
"""


def test_shuffle_allocates_one_column_at_a_time() -> None:
    """Measures the peak of Arrow's pool in a separate process, where all earlier allocations count as used."""
    printed = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, timeout=120, check=True)
    peaks = {line.split()[0]: float(line.split()[-1]) for line in printed.stdout.splitlines()}
    assert list(peaks) == ["flat", "read-only", "sequences", "policies"]
    assert all(0.9 < peak < 1.2 for peak in peaks.values()), peaks


class _FailsToMove(ObjectColumn):
    def take(self, indices: Any) -> ObjectColumn:
        raise MemoryError("no memory for objects")


def test_a_failed_shuffle_leaves_rows_complete() -> None:
    batch, before = with_every_kind(30), with_every_kind(30)
    other = SampleBatch(a=np.arange(5), infos=[{"n": n} for n in range(5)])
    columns = other._own()
    columns["infos"] = _FailsToMove(columns["infos"].values)
    both = MultiAgentBatch({"first": batch, "second": other}, 30)
    with pytest.raises(MemoryError, match="no memory for objects"):
        both.shuffle(rng=0)
    assert batch == before
    assert other["a"].tolist() == list(range(5))


# -- minibatches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_minibatches_contain_every_row_once_per_epoch(shuffle: bool, epochs: int) -> None:
    batch = SampleBatch(a=np.arange(10), b=np.arange(10))
    parts = list(batch.minibatches(4, epochs=epochs, shuffle=shuffle, rng=0))
    assert [len(part) for part in parts] == [4, 4, 2] * epochs
    for epoch in range(epochs):
        observed = rows(parts[3 * epoch : 3 * epoch + 3])
        assert sorted(observed) == list(range(10))
        assert (observed == list(range(10))) != shuffle
    assert all(part["a"].tolist() == part["b"].tolist() for part in parts)


def test_each_epoch_has_its_own_order() -> None:
    first, second = values(list(SampleBatch(a=np.arange(50)).minibatches(50, epochs=2, rng=0)))
    assert first != second


def test_minibatches_are_repeatable_and_do_not_change_the_batch() -> None:
    batch = SampleBatch(a=np.arange(10))
    assert values(list(batch.minibatches(3, rng=5))) == values(list(batch.minibatches(3, rng=5)))
    assert values(list(batch.minibatches(3, rng=5))) != values(list(batch.minibatches(3, rng=6)))
    assert batch["a"].tolist() == list(range(10))


def test_minibatches_in_order_are_views_and_shuffled_ones_copies() -> None:
    batch = SampleBatch(a=np.arange(10))
    assert all(np.shares_memory(part["a"], batch["a"]) for part in batch.minibatches(3, shuffle=False))
    assert not any(np.shares_memory(part["a"], batch["a"]) for part in batch.minibatches(3, rng=0))


def test_minibatches_of_empty_batches() -> None:
    assert list(SampleBatch().minibatches(3)) == []
    assert list(SampleBatch(a=np.empty(0)).minibatches(3, shuffle=False)) == []


@pytest.mark.parametrize("arguments", [{"size": 0}, {"size": -1}, {"size": 2, "epochs": -1}])
def test_minibatches_reject_arguments_immediately(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"(size|epochs) must be a whole number"):
        SampleBatch(a=[1]).minibatches(**arguments)


# -- time slices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 12])
@pytest.mark.parametrize("number", [1, 2, 5, 13])
def test_timeslices_of_a_given_count_differ_by_one_row_at_most(count: int, number: int) -> None:
    parts = SampleBatch(a=np.arange(count)).timeslices(num_slices=number)
    lengths = [len(part) for part in parts]
    assert len(parts) == number
    assert rows(parts) == list(range(count))
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths)


def test_timeslices_are_views_of_every_kind() -> None:
    batch = with_every_kind(7)
    parts = batch.timeslices(size=3)
    assert parts == [batch[:3], batch[3:6], batch[6:]]
    assert np.shares_memory(parts[1]["wide f4"], batch["wide f4"])


@pytest.mark.parametrize(
    "arguments",
    [{}, {"size": 0}, {"size": -2}, {"num_slices": 0}, {"k": 0}, {"size": 2, "num_slices": 2}, {"size": 2, "k": 2}],
    ids=str,
)
def test_timeslices_require_one_positive_argument(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"exactly one of|must be a whole number from 1"):
        SampleBatch(a=[1, 2, 3]).timeslices(**arguments)


# -- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "parts"),
    [
        ([], []),
        ([5], [[0]]),
        ([1, 1, 1], [[0, 1, 2]]),
        ([1, 2, 3], [[0], [1], [2]]),
        ([1, 1, 2, 1], [[0, 1], [2], [3]]),
        ([2**62, 2**62 + 1, 2**62 + 1], [[0], [1, 2]]),
        ([0.5, 0.5, 0.25], [[0, 1], [2]]),
        (["one", "one", "two"], [[0, 1], [2]]),
    ],
    ids=str,
)
def test_episodes_are_runs_of_equal_ids(ids: list[Any], parts: list[list[int]]) -> None:
    batch = SampleBatch(a=np.arange(len(ids)), eps_id=np.array(ids))
    assert values(batch.split_by_episode()) == parts


def test_episodes_are_views_of_every_kind() -> None:
    batch = with_every_kind(7)
    batch["eps_id"] = [0, 0, 0, 1, 1, 2, 2]
    first, second, third = batch.split_by_episode()
    assert [first, second, third] == [batch[:3], batch[3:5], batch[5:]]
    assert np.shares_memory(second["wide f4"], batch["wide f4"])


@pytest.mark.parametrize("dtype", [bool, int, np.float32, np.uint8])
@pytest.mark.parametrize("key", ["dones", "terminateds", "truncateds"])
def test_episodes_end_after_true_flags(dtype: Any, key: str) -> None:
    batch = SampleBatch({"a": np.arange(5), key: np.array([0, 1, 1, 0, 0], dtype)})
    assert values(batch.split_by_episode(key)) == [[0, 1], [2], [3, 4]]


def test_episodes_of_torch_columns() -> None:
    batch = SampleBatch(a=torch.arange(4), eps_id=torch.tensor([3, 3, 4, 4]))
    assert values(batch.split_by_episode()) == [[0, 1], [2, 3]]
    batch = SampleBatch(a=torch.arange(3), terminateds=torch.tensor([True, False, False]))
    assert values(batch.split_by_episode()) == [[0], [1, 2]]
    assert batch["dones"].tolist() == [True, False, False]


def test_dones_of_mixed_kinds() -> None:
    batch = SampleBatch(terminateds=torch.tensor([True, False, False]), truncateds=np.array([False, True, False]))
    assert np.asarray(batch["dones"]).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("terminateds", "truncateds"),
    [([0, 1, 0], [1, 0, 0]), ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0]), ([0, 1, 0], [True, False, False])],
    ids=["integers", "floats", "mixed"],
)
def test_dones_of_flags_that_are_not_bool(terminateds: list[Any], truncateds: list[Any]) -> None:
    batch = SampleBatch(a=np.arange(3), terminateds=terminateds, truncateds=truncateds)
    assert batch["dones"].astype(bool).tolist() == [True, True, False]
    assert values(batch.split_by_episode()) == [[0], [1], [2]]


def test_episodes_by_any_column() -> None:
    batch = SampleBatch(a=np.arange(4), unroll_id=[1, 1, 2, 2])
    assert values(batch.split_by_episode("unroll_id")) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("key", [None, "eps_id", "dones"])
def test_episodes_need_their_column(key: str | None) -> None:
    with pytest.raises(ColumnNotFoundError, match=r"no column '(dones|eps_id)'"):
        SampleBatch(a=[1, 2]).split_by_episode(key)


# -- the end of a trajectory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terminateds", "truncateds", "ended", "single"),
    [
        ([0, 0, 0], [0, 0, 0], False, True),
        ([0, 0, 1], [0, 0, 0], True, True),
        ([0, 0, 0], [0, 0, 1], True, True),
        ([0, 1, 0], [0, 0, 0], False, False),
        ([0, 0, 0], [1, 0, 1], True, False),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_the_end_of_a_trajectory_is_classified(
    terminateds: list[int], truncateds: list[int], ended: bool, single: bool, padded: bool
) -> None:
    batch = SampleBatch(terminateds=np.array(terminateds, bool), truncateds=np.array(truncateds, bool))
    if padded:
        batch["seq_lens"] = [1, 2]
        batch.right_zero_pad(4)
    assert batch.is_terminated_or_truncated() is ended
    assert bool(batch.is_single_trajectory()) is single


def test_the_end_of_a_trajectory_requires_steps_and_flags() -> None:
    with pytest.raises(IndexError, match="no last one"):
        SampleBatch(terminateds=np.empty(0, bool)).is_terminated_or_truncated()
    with pytest.raises(ColumnNotFoundError, match="'dones'"):
        SampleBatch(a=[1]).is_terminated_or_truncated()
    with pytest.raises(ColumnNotFoundError, match="'dones'"):
        SampleBatch(a=[1]).is_single_trajectory()
    assert SampleBatch(truncateds=[True]).is_terminated_or_truncated()


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_of_every_kind() -> None:
    batch = with_every_kind(5)
    result = list(batch.rows())
    assert len(result) == 5
    row = result[2]
    assert list(row) == list(batch)
    assert row["flat i8"] == 9
    assert row["wide f4"].tolist() == batch["wide f4"][2].tolist()
    assert np.shares_memory(row["wide f4"], batch["wide f4"])
    assert row["infos"] is batch["infos"][2]
    if HAS_TORCH:
        assert row["torch wide float32"].tolist() == [5, 6]
    assert row["ragged"].tolist() == [0, 1]
    assert row["squeezed"].tolist() == batch["squeezed"][2].tolist()
    assert row["nested"]["arm"][1]["grip"] == batch["nested"]["arm"][1]["grip"][2]
    assert row["flat M8[D]"] == np.datetime64(3, "D")
    assert row["flat U5"] == "3"
    assert row["words"] == "word 2word 2"


def test_the_batch_can_be_rebuilt_from_its_rows() -> None:
    batch = SampleBatch(a=np.arange(4), b=np.arange(8.0).reshape(4, 2), infos=[{}, None, {"x": 1}, {}])
    result = list(batch.rows())
    assert SampleBatch({name: [row[name] for row in result] for name in batch}) == batch


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-5, 200)), min_size=1, max_size=40), st.booleans())
def test_counted_environment_steps_equal_the_sorted_ones(rows: list[tuple[int, int]], wide: bool) -> None:
    eps_id = np.array([episode for episode, _ in rows])
    t = np.array([time for _, time in rows]) * (10**15 if wide else 1)
    pairs = sorted(set(zip(eps_id.tolist(), t.tolist(), strict=True)))
    episodes = sorted(set(eps_id.tolist()))
    for limit in (0, episodes_module._FEW_PER_ROW, 10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(episodes_module, "_FEW_PER_ROW", limit if not wide else min(limit, 16))
            step, episode = number_env_steps(eps_id, t)
        assert step.tolist() == [pairs.index(pair) for pair in zip(eps_id.tolist(), t.tolist(), strict=True)]
        assert episode.tolist() == [episodes.index(part) for part, _ in pairs]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([3, -1, 7, 2**62]), min_size=1, max_size=30))
def test_distinct_ids_agree_with_numpy(ids: list[int]) -> None:
    expected = np.unique(np.array(ids), return_index=True, return_inverse=True)
    for actual, reference in zip(distinct_ids(np.array(ids)), expected, strict=True):
        assert actual.tolist() == reference.tolist()

"""Tables of complete fragments, compared with a plain model of their samplers and removers."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.errors import (
    AbandonedError,
    ArgumentError,
    CapacityError,
    ColumnMismatchError,
    ColumnTypeError,
    EmptyBufferError,
    LimitTimeoutError,
    PriorityError,
    TableClosedError,
)
from samplebatch.service import RateLimiter, ReplayTable
from tests.service.table_rows import fragment

CAPACITY = 4
SAMPLERS = ["fifo", "lifo", "key", "uniform", "prioritized"]
REMOVERS = ["fifo", "lifo", "uniform", "lowest_priority", "most_sampled", "none"]


class Model:
    """Reference implementation: the fragments of a table as a list of dicts, oldest first."""

    def __init__(self, kind: str, remover: str, max_times: int) -> None:
        self.kind, self.remover, self.max_times = kind, remover, max_times
        self.items: list[dict[str, Any]] = []
        self.largest = 1.0

    def may_be_removed(self) -> list[int]:
        """Return the numbers of fragments that may be evicted from a full table."""
        if self.remover == "uniform":
            return [item["number"] for item in self.items]
        rank = {
            "fifo": lambda item: item["number"],
            "lifo": lambda item: -item["number"],
            "lowest_priority": lambda item: (item["priority"], item["number"]),
            "most_sampled": lambda item: (-item["times"], item["number"]),
        }[self.remover]
        return [min(self.items, key=rank)["number"]]

    def may_be_sampled(self, key: str) -> list[int]:
        """Return the numbers of fragments that may be sampled."""
        if self.kind == "key":
            return [item["number"] for item in self.items if item["key"] == key]
        if self.kind in ("fifo", "lifo"):
            return [self.items[0 if self.kind == "fifo" else -1]["number"]]
        return [item["number"] for item in self.items if self.kind == "uniform" or item["priority"] > 0]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "sample", "update"]), st.integers(0, 5), st.integers(0, 3)),
    max_size=40,
)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("remover", REMOVERS)
@given(actions=ACTIONS, max_times=st.integers(0, 3))
def test_every_sampler_and_remover_agrees_with_the_model(
    kind: Any, remover: str, actions: list[tuple[str, int, int]], max_times: int
) -> None:
    table = ReplayTable(
        "t", kind=kind, items="fragments", capacity=CAPACITY, remover=remover, max_times_sampled=max_times, seed=1
    )
    model = Model(kind, remover, max_times)
    by_priority = kind == "prioritized" or remover == "lowest_priority"
    number = 0
    for action, a, b in actions:
        if action == "insert":
            key = f"k{b}" if kind == "key" else None
            priority = float(a) if by_priority and b else None
            replaced = [item for item in model.items if kind == "key" and item["key"] == key]
            full = len(model.items) == CAPACITY and not replaced
            if remover == "none" and full:
                with pytest.raises(LimitTimeoutError, match="full with 4 fragments, and only sampling removes"):
                    table.extend(fragment(number), keys=key, priorities=priority, timeout_s=0)
                continue
            before = {item["number"] for item in model.items}
            assert table.extend(fragment(number), keys=key, priorities=priority).indices.tolist() == [number]
            model.items = [item for item in model.items if item not in replaced]
            removed = before - set(numbers_of(table)) - {item["number"] for item in replaced}
            assert len(removed) == (1 if full else 0)
            assert removed <= set(model.may_be_removed() if removed else ())
            model.items = [item for item in model.items if item["number"] not in removed]
            model.largest = max(model.largest, priority or 0.0)
            weight = model.largest if priority is None else priority
            model.items.append({"number": number, "key": key, "times": 0, "priority": weight})
            number += 1
        elif action == "update" and by_priority:
            indices = list({a, b})
            is_present = [item for item in model.items if item["number"] in indices]
            assert table.update_weight(indices, [a + 0.5] * len(indices)) == len(is_present)
            for item in is_present:
                item["priority"] = a + 0.5
                model.largest = max(model.largest, a + 0.5)
        elif action == "sample":
            options = {"key": f"k{b}"} if kind == "key" else {}
            if not model.items or (kind == "key" and not model.may_be_sampled(f"k{b}")):
                with pytest.raises(LimitTimeoutError):
                    table.sample(1, timeout_s=0, **options)
                continue
            sample = table.sample(1, timeout_s=0, **options)
            (actual,) = sample.indices.tolist()
            allowed = model.may_be_sampled(f"k{b}")
            assert actual in allowed or not allowed
            assert sample.batch["number"].tolist() == [actual, actual]
            (item,) = (item for item in model.items if item["number"] == actual)
            item["times"] += 1
            if max_times and item["times"] == max_times:
                model.items.remove(item)
        assert numbers_of(table) == [item["number"] for item in model.items]
        assert len(table) == len(model.items)
        assert table.info()["nbytes"] == 16 * len(model.items)


def numbers_of(table: ReplayTable) -> list[int]:
    actual: list[int] = table.state_dict()["numbers"]
    return actual


def filled(kind: Any, numbers: int = 8, **arguments: Any) -> ReplayTable:
    table = ReplayTable("t", kind=kind, items="fragments", capacity=numbers, seed=3, **arguments)
    for number in range(numbers):
        table.extend(fragment(number), keys=f"k{number}" if kind == "key" else None)
    return table


# Samplers


def test_uniform_fragments_are_equally_likely() -> None:
    counts = np.bincount(filled("uniform").sample(8000).indices, minlength=8)
    # Of chi-square with 7 degrees of freedom, 99.9% lie below 24.3.
    assert ((counts - 1000) ** 2 / 1000).sum() < 24.3


def test_prioritized_fragments_are_drawn_and_weighted_as_steps_are() -> None:
    table = filled("prioritized", alpha=0.5, beta=1.0)
    priorities = np.arange(8) + 0.5
    assert table.update_weight(np.arange(8), priorities) == 8
    sample = table.sample(8000)
    expected = 8000 * priorities**0.5 / (priorities**0.5).sum()
    counts = np.bincount(sample.indices, minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3
    assert sample.weights is not None
    np.testing.assert_allclose(sample.weights, (priorities[0] / priorities[sample.indices]) ** 0.5, rtol=1e-5)


def test_fifo_and_lifo_return_the_oldest_and_the_newest() -> None:
    assert filled("fifo").sample(3).indices.tolist() == [0, 1, 2]
    assert filled("lifo").sample(3).indices.tolist() == [7, 6, 5]


def test_several_fragments_are_joined_with_their_lengths() -> None:
    table = ReplayTable("t", kind="fifo", capacity=8)
    for number, rows in enumerate((1, 3, 2)):
        table.extend(fragment(number, rows))
    sample = table.sample(3)
    assert sample.batch["number"].tolist() == [0, 1, 1, 1, 2, 2]
    assert sample.lengths is not None
    assert sample.lengths.tolist() == [1, 3, 2]


def test_a_single_fragment_is_not_copied() -> None:
    rows = fragment(0)
    table = ReplayTable("t", kind="fifo", capacity=8)
    table.extend(rows)
    assert np.shares_memory(table.sample(1).batch["number"], rows["number"])


def test_fragments_of_several_agents_are_returned_unchanged() -> None:
    rows = MultiAgentBatch({"p": fragment(0, 3), 1: fragment(1, 2)}, 3)
    table = ReplayTable("t", kind="queue", capacity=8)
    assert table.extend(rows).inserted == 5
    assert table.sample(1).batch == rows


def test_a_key_selects_its_newest_fragment() -> None:
    table = filled("key")
    table.extend(fragment(9), keys="k3")
    assert len(table) == 8
    assert table.sample(1, key="k3").indices.tolist() == [8]
    with pytest.raises(LimitTimeoutError, match="no fragment has the key 'k9'"):
        table.sample(1, key="k9", timeout_s=0)


def test_the_same_seed_gives_the_same_fragments() -> None:
    for kind in ("uniform", "prioritized"):
        assert filled(kind).sample(50).indices.tolist() == filled(kind).sample(50).indices.tolist()
        assert filled(kind).sample(50, seed=5).indices.tolist() != filled(kind).sample(50).indices.tolist()


def test_a_fifo_table_that_is_read_once_is_a_queue() -> None:
    table = filled("fifo", 3, max_times_sampled=1)
    assert table.remover == "none"
    with pytest.raises(LimitTimeoutError, match="full with 3 fragments"):
        table.extend(fragment(3), timeout_s=0)
    assert [table.sample(1).indices.item() for _ in range(3)] == [0, 1, 2]
    assert len(table) == 0
    with pytest.raises(LimitTimeoutError, match="sampling requires 1 items, and there are 0"):
        table.sample(1, timeout_s=0)


def test_draws_of_several_fragments_wait_for_all_of_them() -> None:
    table = filled("uniform", 2, max_times_sampled=2)
    assert Counter(table.sample(3).indices.tolist()).total() == 3
    with pytest.raises(LimitTimeoutError, match="2 fragments are requested, and 1 may be sampled"):
        table.sample(2, timeout_s=0)


def test_a_new_sampling_limit_removes_fragments_that_reached_it() -> None:
    table = filled("fifo", 4)
    table.sample(2)
    table.set_limits(max_times_sampled=1)
    assert numbers_of(table) == [2, 3]


def test_the_heap_of_a_remover_has_bounded_size() -> None:
    table = filled("fifo", 4, remover="most_sampled")
    for _ in range(2000):
        table.sample(1)
    remover: Any = table._items._remover  # type: ignore[attr-defined]
    assert len(remover._heap) < 100
    table.extend(fragment(9))
    assert numbers_of(table) == [1, 2, 3, 4]


# Carrying on


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("remover", REMOVERS)
def test_a_table_resumes_from_its_state(kind: Any, remover: str) -> None:
    def make() -> ReplayTable:
        arguments: dict[str, Any] = {"max_times_sampled": 5, "limiter": RateLimiter(2)}
        return ReplayTable("t", kind=kind, items="fragments", capacity=6, seed=1, remover=remover, **arguments)

    table, key = make(), [f"k{i}" if kind == "key" else None for i in range(20)]
    options = {"key": "k3"} if kind == "key" else {}
    for number in range(5):
        table.extend(fragment(number), keys=key[number])
        if number > 2:
            table.sample(1, **options)
    if kind == "prioritized":
        table.update_weight([0, 1, 2], [3.0, 0.2, 2.0])
    again = make()
    again.load_state_dict(table.state_dict())
    assert again.info() == table.info()
    for item in (table, again):
        for number in range(5, 9):
            if remover != "none" or len(item) < 6:
                item.extend(fragment(number), keys=key[number])
        if kind != "key":
            item.sample(3)
    assert numbers_of(again) == numbers_of(table)
    assert again.state_dict()["times"] == table.state_dict()["times"]
    assert again.state_dict()["generator"] == table.state_dict()["generator"]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "fifo", "streams": 2}, "streams must be 1 for table 't' of fragments, got 2"),
        ({"kind": "fifo", "alpha": 0.5}, "tables of fragments of kind 'fifo' have no option 'alpha'; there are none"),
        ({"kind": "prioritized", "alpa": 0.5}, "have no option 'alpa'; did you mean 'alpha'"),
        ({"limiter": RateLimiter(samples_per_insert=2), "remover": "none"}, "must equal max_times_sampled, 0, if"),
        (
            {"limiter": RateLimiter(samples_per_insert=2), "remover": "none", "max_times_sampled": 3},
            "samples_per_insert must equal max_times_sampled, 3, if only sampling removes fragments, got 2: writers",
        ),
        (
            {"kind": "fifo", "limiter": RateLimiter(samples_per_insert=0.5), "max_times_sampled": 1},
            "samples_per_insert must equal max_times_sampled, 1, if only sampling removes fragments, got 0.5: writers",
        ),
    ],
)
def test_invalid_tables_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ReplayTable("t", items="fragments", capacity=4, **arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        ("fifo", {"keys": "k"}, ArgumentError, "a fragment for a table of kind 'fifo' must have no key, got 'k'"),
        ("key", {}, ArgumentError, "a fragment for a table of kind 'key' must have a key"),
        ("key", {"keys": 3}, ArgumentError, "the key of a fragment must be a string, got a int"),
        ("fifo", {"priorities": 1.0}, PriorityError, "kind 'fifo' with remover 'fifo' have no priorities"),
        ("prioritized", {"priorities": [1.0, 2.0]}, PriorityError, "must be one finite number"),
        ("prioritized", {"priorities": float("nan")}, PriorityError, "must be one finite number"),
        ("fifo", {"rows": 3}, ColumnTypeError, "must be extended by a batch, mapping, table or dataset"),
        ("fifo", {"rows": SampleBatch(other=[1, 2])}, ColumnMismatchError, "got the new column 'other'"),
        (
            "fifo",
            {"rows": SampleBatch(number=[1.5, 2])},
            ColumnMismatchError,
            "as in earlier fragments, got tensor of float64",
        ),
        ("fifo", {"rows": SampleBatch(number=[[1], [2]])}, ColumnMismatchError, "rows of shape .1,."),
        (
            "fifo",
            {"rows": MultiAgentBatch({"p": fragment(0)}, 2)},
            ColumnMismatchError,
            "must all be flat or all have policies",
        ),
    ],
)
def test_invalid_inserts_are_rejected(
    kind: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = ReplayTable("t", kind=kind, items="fragments", capacity=4)
    table.extend(fragment(0), keys="first" if kind == "key" else None)
    with pytest.raises(error, match=message):
        table.extend(**{"rows": fragment(1), **arguments})
    assert numbers_of(table) == [0]


def test_a_missing_column_is_rejected() -> None:
    table = ReplayTable("t", kind="fifo", capacity=4)
    table.extend(SampleBatch(a=[1], b=[2]))
    with pytest.raises(
        ColumnMismatchError, match="a fragment must have column 'b', as earlier fragments have, got none"
    ):
        table.extend(SampleBatch(a=[1]))


@pytest.mark.parametrize(
    ("kind", "request_", "message"),
    [
        ("fifo", {"mode": "steps"}, "mode of a table of fragments must be one of fragments; got 'steps'"),
        ("fifo", {"batch_size": 5}, "batch_size must be at most 4, the fragments of a full table, got 5"),
        ("fifo", {"beta": 1.0}, "have no option 'beta'"),
        ("key", {}, "requires batch_size=1 and key=, a string"),
        ("key", {"key": "k1", "batch_size": 2}, "requires batch_size=1 and key=, a string"),
    ],
)
def test_invalid_samples_are_rejected(kind: Any, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        filled(kind, 4).sample(**{"batch_size": 1, **request_})


def test_invalid_priorities_are_rejected() -> None:
    table = filled("prioritized", 4)
    with pytest.raises(PriorityError, match="must have 2 values, one per fragment, got 3"):
        table.update_weight([0, 1], [1.0, 2.0, 3.0])
    with pytest.raises(PriorityError, match="one finite number"):
        table.update_weight([0, 1], [1.0, float("inf")])
    with pytest.raises(PriorityError, match="have no priorities"):
        filled("fifo", 4).update_weight([0], [1.0])


def test_rows_of_one_shape_are_inserted_into_ragged_tables() -> None:
    table = ReplayTable("t", kind="fifo", capacity=8)
    for rows in ([[1], [2, 3]], np.array([[4, 5]]), [[], []]):
        table.extend(SampleBatch(ids=rows))
        table.extend(SampleBatch(ids=rows))
    sampled = table.sample(6).batch
    assert sampled["ids"].kind == "ragged"
    assert sampled["ids"].dtype == np.int64
    assert sampled["ids"].lengths.tolist() == [1, 2, 1, 2, 2, 2, 0, 0, 0, 0]
    with pytest.raises(
        ColumnMismatchError, match=r"column 'ids' must be ragged of int64 .* as in earlier fragments, got"
    ):
        table.extend(SampleBatch(ids=[[0.5]]))


def test_ragged_rows_after_rows_of_one_shape_are_rejected_with_a_fix() -> None:
    table = ReplayTable("t", kind="fifo", capacity=8)
    table.extend(SampleBatch(ids=[[1, 2]]))
    with pytest.raises(ColumnMismatchError, match="rows of varying shape are declared in every fragment: ragged="):
        table.extend(SampleBatch(ids=[[1], [2, 3]]))


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("times", [0, 3])
@pytest.mark.parametrize("column", ["numbers", "objects", "policies"])
def test_fragments_are_measured_before_they_are_sent(kind: str, times: int, column: str) -> None:
    def rows(number: int) -> Any:
        size = 30_000 if number == 9 else 1
        if column == "objects":
            return SampleBatch(text=np.array([{"a": ["x" * 8 * size]}, None], object), number=[number, number])
        achieved = SampleBatch(number=np.full((2, size), number), padded=np.zeros((2, 1)))
        if column == "numbers":
            return SampleBatch(number=np.full(size, number))
        return MultiAgentBatch({f"p{number // 9}": achieved}, 2)

    options: dict[str, Any] = {"kind": kind, "max_times_sampled": times, "remover": "fifo"}
    table = ReplayTable("t", capacity=10, items="fragments", seed=1, **options)
    for number in range(10):
        loaded = {"priorities": 1e6 if number == 9 else 1.0} if kind == "prioritized" else {}
        table.extend(rows(number), keys=str(number) if kind == "key" else None, **loaded)
    before = table.info()
    request: dict[str, Any] = {"batch_size": 1, "key": "9"} if kind == "key" else {"batch_size": 10}
    with pytest.raises(CapacityError, match="a sample must have at most 100000 bytes, got"):
        # All ten drawn, the large one is among them.
        table.sample(max_nbytes=100_000, seed=5, **request)
    assert table.info() == before
    counts = Counter[int]()
    for seed in range(1000 if times else 1):
        # None is lost: each is handed out as often as it may be.
        if not len(table):
            break
        request = {"batch_size": 1, "key": str(9 - sum(counts.values()) // 3)} if kind == "key" else {"batch_size": 1}
        counts.update(table.sample(seed=seed, **request).indices.tolist())
    assert not times or counts == dict.fromkeys(range(10), times)


@pytest.mark.parametrize("ending", ["close", "gone", "reset"])
def test_the_lock_is_released_while_a_large_sample_is_gathered(ending: str) -> None:
    table = ReplayTable("t", items="fragments", capacity=10, seed=1)
    for number in range(10):
        table.extend(fragment(number))
    actual: list[BaseException] = []
    started, left = threading.Event(), threading.Event()
    items: Any = table._items
    pick = items._sampler.pick
    items._sampler.pick = lambda rng: (started.set(), pick(rng))[1]

    def draw() -> None:
        try:
            table.sample(50_000_000, is_cancelled=left.is_set)
        except Exception as error:
            actual.append(error)

    drawing = threading.Thread(target=draw, daemon=True)
    drawing.start()
    started.wait()
    # Both would take minutes if the draw kept the lock.
    assert len(table) == 10
    table.extend(fragment(10))
    {"close": table.close, "gone": left.set, "reset": table.reset}[ending]()
    drawing.join(30)
    assert not drawing.is_alive()
    kinds = {"close": TableClosedError, "gone": AbandonedError, "reset": EmptyBufferError}
    assert [type(error) for error in actual] == [kinds[ending]]
    assert table.info()["sampled"] == 0

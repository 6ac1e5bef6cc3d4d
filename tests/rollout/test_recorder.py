"""The recorder of steps: stream order, exact widening, and refusals that leave earlier rows as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import SampleBatch
from samplebatch.env.stacking import NestedRows
from samplebatch.errors import ColumnMismatchError
from samplebatch.rollout.recorder import EpisodeCount, Recorder, Step, Streams

STREAMS = Streams(np.array([100, 101]), np.array([0, 1]), np.zeros(2, int))


def append(recorder: Recorder, t: int, value: Any, envs: tuple[int, ...] = (0, 1)) -> None:
    numbers = np.array(envs)
    streams = Streams(numbers + 100, numbers, np.zeros(len(envs), int))
    rewards = [float(t)] * len(envs)
    recorder.append([Step("p", {"obs": value, "rewards": rewards}, streams, np.full(len(envs), t))])


def take(recorder: Recorder) -> SampleBatch:
    return recorder.take()["p"]


def nested(x: Any, y: Any) -> NestedRows:
    return NestedRows({"x": None, "y": None}, [np.asarray(x), np.asarray(y)])


def test_steps_recorded_in_time_order_are_returned_in_stream_order() -> None:
    recorder = Recorder()
    for t in range(3):
        append(recorder, t, np.array([t, 10 + t]))
    batch = take(recorder)
    assert batch["env_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["t"].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["obs"].tolist() == [0, 1, 2, 10, 11, 12]
    assert recorder.take() == {}


def test_later_steps_widen_earlier_ones_without_loss() -> None:
    recorder = Recorder()
    for t, value in enumerate([np.array([1, 2]), np.array([0.5, 3.0]), np.array([4, 5])]):
        append(recorder, t, value)
    batch = take(recorder)
    assert batch["obs"].dtype == np.float64
    assert batch["obs"].tolist() == [1.0, 0.5, 4.0, 2.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("before", "unusual"),
    [
        (np.array([2**53 + 1, 0]), np.array([0.5, 0.5])),
        (np.zeros((2, 3)), np.zeros((2, 4))),
        (np.array([1.0, 2.0]), np.array(["a", "b"])),
        (nested([1, 2], [3, 4]), np.array([1, 2])),
        (np.array([1, 2]), nested([1, 2], [3, 4])),
        (nested([1, 2], [3, 4]), NestedRows({"x": None}, [np.array([1, 2])])),
        (nested([1, 2], [3, 4]), nested([1, 2], np.zeros((2, 2)))),
    ],
    ids=["dtypes", "shapes", "kinds", "nested, then not", "not, then nested", "structures", "shapes of leaves"],
)
def test_an_incompatible_step_is_rejected_without_other_changes(before: Any, unusual: Any) -> None:
    recorder = Recorder()
    append(recorder, 0, before)
    with pytest.raises(ColumnMismatchError, match="'obs"):
        append(recorder, 1, unusual)
    batch = take(recorder)
    assert batch["t"].tolist() == [0, 0]
    assert batch["rewards"].tolist() == [0.0, 0.0]


def test_leaves_of_nested_columns_are_widened_separately() -> None:
    recorder = Recorder()
    append(recorder, 0, nested([1, 2], [3, 4]))
    append(recorder, 1, nested([1, 2], [0.5, 1.5]))
    batch = take(recorder)
    assert (batch["obs.x"].dtype, batch["obs.y"].dtype) == (np.int64, np.float64)
    assert batch["obs.y"].tolist() == [3.0, 0.5, 4.0, 1.5]


def test_steps_of_other_columns_are_rejected() -> None:
    recorder = Recorder()
    append(recorder, 0, np.array([1, 2]))
    with pytest.raises(ColumnMismatchError, match="some without 'obs'"):
        recorder.append([Step("p", {"rewards": [0.0]}, STREAMS, STREAMS.env_id)])


def test_rows_of_several_policies_are_written_together_or_not_at_all() -> None:
    recorder = Recorder()
    numbers = [("p", [1.0, 2.0]), ("q", [3.0, 4.0])]

    def write(*values: Any) -> None:
        recorder.append([Step(policy, {"obs": np.array(part)}, STREAMS, STREAMS.env_id) for policy, part in values])

    write(*numbers)
    for unusual in ("p", "q"):
        with pytest.raises(ColumnMismatchError, match="'obs'"):
            write(
                *((policy, ["a", "b"] if policy == unusual else part) for policy, part in numbers), ("new", [5.0, 6.0])
            )
    write(*reversed(numbers))
    actual = {policy: rows["obs"].tolist() for policy, rows in recorder.take().items()}
    assert actual == {"p": [1.0, 1.0, 2.0, 2.0], "q": [3.0, 3.0, 4.0, 4.0]}


@given(
    chunks=st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=4), seed=st.integers(0, 99)
)
def test_one_environment_is_counted_like_one_of_several(chunks: list[list[bool]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, several = EpisodeCount(1), EpisodeCount(2)
    ids: list[dict[int, int]] = [{}, {}]
    for flags in chunks:
        done, rewards = np.array(flags), rng.normal(size=len(flags))
        counted = [
            count.add(done, rewards, np.zeros(len(flags), np.intp), steps=2 + len(flags)) for count in (first, several)
        ]
        assert (counted[0].ended is None) == (counted[1].ended is None) == (not any(flags))
        for mine, general in zip(counted[0][1:3], counted[1][1:3], strict=True):
            np.testing.assert_array_equal(mine, general)
        (eps_id, t), (general_id, general_t) = (each.number() for each in counted)
        np.testing.assert_array_equal(t, general_t)
        # Ids are random: number episodes in order of appearance.
        numbers = [
            [observed.setdefault(number, len(observed)) for number in column.tolist()]
            for observed, column in zip(ids, (eps_id, general_id), strict=True)
        ]
        assert numbers[0] == numbers[1]
    for part, general in zip(first.ended, several.ended, strict=True):
        np.testing.assert_array_equal(part, general)
    mine, general = first.state_dict(), several.state_dict()
    assert mine["t"].tolist() == general["t"][:1].tolist()
    assert mine["returns"].tolist() == general["returns"][:1].tolist()

"""Sequence-aware batches stay right through every operation, states and padding included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samplebatch import SampleBatch, concat_samples
from samplebatch.errors import RowIndexError, SampleBatchError, SequenceError
from tests.batch.every_kind import in_sequences

LENGTHS = [2, 3, 0, 1]

both = pytest.mark.parametrize("padded", [False, True], ids=["back to back", "padded"])


def steps(batch: SampleBatch) -> list[int]:
    """Return column `a` without padding: the numbers of the steps, 0 to 5."""
    return batch["a"][batch.mask()].tolist()


def by_sequence(batch: SampleBatch) -> list[tuple[float, list[int]]]:
    """Return each sequence's state and steps."""
    ends = np.cumsum(batch["seq_lens"]).tolist()
    rows = steps(batch)
    parts = [rows[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    return list(zip(batch["state_in_0"][:, 0].tolist(), parts, strict=True))


def assert_sound(batch: SampleBatch) -> None:
    """Check that every row still holds what belongs to its step, and that padding is zeros."""
    assert len(batch) == int(np.sum(batch["seq_lens"])) == int(batch.mask().sum())
    mask, rows = batch.mask(), np.array(steps(batch), int)
    assert batch["obs"]["x"][mask].tolist() == (rows + 1.0).__truediv__(4).tolist()
    assert batch["state_out_0"][mask].tolist() == rows[:, None].tolist()
    assert [info["step"] for info in batch["infos"][mask]] == rows.tolist()
    assert batch["obs"]["y"][1].numpy()[mask].tolist() == (rows + 1).tolist()
    assert all(info is None for info in batch["infos"][~mask])
    assert not batch["a"][~mask].any()
    assert not batch["b"][~mask].any()
    assert not (batch["words"][~mask] != "").any()
    assert (batch["state_in_1"][:, 0] == 2 * (batch["state_in_0"][:, 0] - 1)).all()
    if batch.zero_padded:
        assert len(mask) == batch.max_seq_len * len(batch["seq_lens"])
    else:
        assert len(mask) == len(batch)
        assert batch.max_seq_len == max(batch["seq_lens"].tolist(), default=0)
    assert batch.num_grad_updates == 1.5
    assert batch.is_training


@both
def test_the_batch_itself(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    assert len(batch) == batch.count == 6
    assert batch.max_seq_len == (4 if padded else 3)
    assert batch.zero_padded == padded
    assert by_sequence(batch) == [(1, [0, 1]), (2, [2, 3, 4]), (3, []), (4, [5])]
    assert_sound(batch)


def test_the_mask_tells_steps_from_padding() -> None:
    assert in_sequences(padded=True).mask().tolist() == [
        *(True, True, False, False),
        *(True, True, True, False),
        *(False, False, False, False),
        *(True, False, False, False),
    ]
    assert in_sequences(padded=False).mask().tolist() == [True] * 6
    assert SampleBatch(a=[1, 2]).mask().tolist() == [True, True]
    assert SampleBatch().mask().tolist() == []


# -- slices -----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("stop", range(7))
def test_slice_cuts_inside_sequences(padded: bool, start: int, stop: int) -> None:
    part = in_sequences(padded=padded).slice(start, stop)
    assert steps(part) == list(range(start, stop))
    assert not part.zero_padded
    expected = [
        (state, [s for s in rows if start <= s < stop]) for state, rows in [(1, [0, 1]), (2, [2, 3, 4]), (4, [5])]
    ]
    assert [pair for pair in by_sequence(part) if pair[1]] == [pair for pair in expected if pair[1]]
    assert_sound(part)


@both
@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("stop", range(7))
def test_brackets_take_whole_sequences(padded: bool, start: int, stop: int) -> None:
    batch = in_sequences(padded=padded)
    part = batch[start:stop]
    snapped = {0: 0, 1: 0, 2: 2, 3: 2, 4: 2, 5: 5, 6: 6}
    assert steps(part) == list(range(snapped[start], snapped[stop]))
    assert all(pair in by_sequence(batch) for pair in by_sequence(part))
    assert part.zero_padded == padded
    assert_sound(part)


@both
def test_brackets_are_views(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    part = batch[2:6]
    for name in ("a", "b", "obs.x", "state_in_0", "seq_lens"):
        assert np.shares_memory(part[name], batch[name]), name
    assert part["obs"]["y"][1].data_ptr() > batch["obs"]["y"][1].data_ptr()


def test_an_exact_slice_is_a_view_but_for_the_lengths() -> None:
    batch = in_sequences(padded=False)
    part = batch.slice(1, 4)
    for name in ("a", "b", "obs.x", "state_in_0"):
        assert np.shares_memory(part[name], batch[name]), name
    assert not np.shares_memory(part["seq_lens"], batch["seq_lens"])
    assert batch["seq_lens"].tolist() == LENGTHS
    assert part["seq_lens"].dtype == batch["seq_lens"].dtype
    whole = batch.slice(2, 6)
    assert np.shares_memory(whole["seq_lens"], batch["seq_lens"])


def test_a_slice_of_a_slice() -> None:
    part = in_sequences(padded=False).slice(1, 6).slice(2, 5).slice(0, 2)
    assert by_sequence(part)[0] == (2, [3, 4])
    assert_sound(part)
    part = in_sequences(padded=True)[2:][:5][:3]
    assert by_sequence(part)[0] == (2, [2, 3, 4])
    assert_sound(part)


def test_slice_with_given_states() -> None:
    batch = SampleBatch(a=np.arange(6), state_in_0=np.array([1.0, 2.0, 3.0]), seq_lens=[2, 3, 1])
    part = batch.slice(2, 6, state_start=1, state_end=3)
    assert part["state_in_0"].tolist() == [2, 3]
    assert part["seq_lens"].tolist() == [3, 1]
    short = batch.slice(2, 4, state_start=1, state_end=2)
    assert short["state_in_0"].tolist() == [2]
    assert short["seq_lens"].tolist() == [2]
    assert batch["seq_lens"].tolist() == [2, 3, 1]


@pytest.mark.parametrize(
    "states",
    [{"state_start": 1}, {"state_end": 1}, {"state_start": 2, "state_end": 3}, {"state_start": 0, "state_end": 0}],
)
def test_states_that_do_not_fit_the_range_are_refused(states: dict[str, int]) -> None:
    batch = SampleBatch(a=np.arange(6), seq_lens=[2, 3, 1])
    with pytest.raises(SequenceError, match=r"sequences|together"):
        batch.slice(2, 5, **states)


@both
@pytest.mark.parametrize("start", [-1, -3])
@pytest.mark.parametrize("stop", [0, 1, 2, 4, 6])
def test_padding_on_the_left_lengthens_the_first_sequence(padded: bool, start: int, stop: int) -> None:
    part = in_sequences(padded=padded).slice(start, stop)
    assert part["a"].tolist() == [0] * -start + list(range(stop))
    assert part["infos"].tolist() == [None] * -start + [{"step": i} for i in range(stop)]
    assert part["obs"]["y"][1].tolist() == [0] * -start + list(range(1, stop + 1))
    assert part["seq_lens"].tolist()[0] == -start + min(stop, 2)
    assert int(part["seq_lens"].sum()) == len(part) == stop - start
    assert len(part["state_in_0"]) == len(part["seq_lens"])
    if stop:
        assert part["state_in_0"][0] == 1
    assert part.max_seq_len == part["seq_lens"].max()


@both
def test_negative_bounds_count_from_the_end(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    assert steps(batch[-4:]) == [2, 3, 4, 5]
    assert steps(batch[:-1]) == [0, 1, 2, 3, 4]
    assert steps(batch[-100:100]) == [0, 1, 2, 3, 4, 5]
    assert steps(batch.slice(1, -2)) == [1, 2, 3]
    assert_sound(batch.slice(1, -2))


@both
def test_stepped_slices_gather_steps(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    part = batch[::2]
    assert by_sequence(part) == [(1, [0]), (2, [2, 4])]
    assert_sound(part)
    backwards = batch[::-1]
    assert by_sequence(backwards) == [(4, [5]), (2, [4, 3, 2]), (1, [1, 0])]
    assert_sound(backwards)
    assert steps(batch[5:0:-2]) == [5, 3, 1]


# -- gathers ----------------------------------------------------------------------------------------------------------


@both
def test_take_forms_a_sequence_of_each_run(padded: bool) -> None:
    part = in_sequences(padded=padded).take([0, 3, 4, 1, -1])
    assert by_sequence(part) == [(1, [0]), (2, [3, 4]), (1, [1]), (4, [5])]
    assert not part.zero_padded
    assert_sound(part)
    assert len(in_sequences(padded=padded).take([])) == 0


@both
def test_masks_count_steps(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    part = batch[np.array([True, False, True, True, False, True])]
    assert by_sequence(part) == [(1, [0]), (2, [2, 3]), (4, [5])]
    assert_sound(part)
    with pytest.raises(RowIndexError, match="must have 6 entries"):
        batch[np.ones(16, bool)]


@both
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1], [1, 1, -1], [], [True, False, False, True]], ids=str)
def test_take_sequences(padded: bool, order: list[Any]) -> None:
    batch = in_sequences(padded=padded)
    part = batch.take_sequences(order)
    chosen = np.flatnonzero(order) if order and isinstance(order[0], bool) else order
    assert by_sequence(part) == [by_sequence(batch)[i] for i in chosen]
    assert part.zero_padded == padded
    if padded:
        assert part.max_seq_len == 4
    assert_sound(part)


def test_take_sequences_refuses_what_is_not_there() -> None:
    with pytest.raises(RowIndexError, match="row 4 must lie"):
        in_sequences(padded=False).take_sequences([0, 4])
    with pytest.raises(SequenceError, match="take_sequences needs a column 'seq_lens'"):
        SampleBatch(a=[1]).take_sequences([0])


def test_shuffle_moves_whole_padded_sequences() -> None:
    orders = set()
    for seed in range(20):
        batch = in_sequences(padded=True)
        assert batch.shuffle(rng=seed) is batch
        assert sorted(by_sequence(batch)) == sorted(by_sequence(in_sequences(padded=True)))
        assert_sound(batch)
        orders.add(tuple(batch["state_in_0"][:, 0].tolist()))
    assert len(orders) > 5


def test_shuffle_refuses_sequences_that_are_not_padded() -> None:
    batch = in_sequences(padded=False)
    with pytest.raises(SequenceError, match="padded"):
        batch.shuffle()
    assert batch == in_sequences(padded=False)


# -- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [3, 4, 7])
def test_padding_and_cutting_again_is_the_identity(width: int) -> None:
    batch = in_sequences(padded=False)
    padded = batch.copy().right_zero_pad(width)
    assert padded.zero_padded
    assert padded.max_seq_len == width
    assert_sound(padded)
    assert padded.slice(0, 6) == batch.slice(0, 6) == batch
    assert padded.take(np.arange(6)) == batch.take(np.arange(6))


def test_padding_anew() -> None:
    batch = in_sequences(padded=True)
    batch.right_zero_pad(3)
    assert batch.max_seq_len == 3
    assert_sound(batch)
    assert by_sequence(batch) == by_sequence(in_sequences(padded=False))
    with pytest.raises(SequenceError, match="longest sequence, 3 steps, got 2"):
        batch.right_zero_pad(2)
    assert batch.max_seq_len == 3
    assert_sound(batch)


def test_padding_does_not_reach_views_made_before() -> None:
    batch = in_sequences(padded=False)
    view, exact = batch[0:5], batch.slice(1, 4)
    batch.right_zero_pad(4)
    assert view["a"].tolist() == [0, 1, 2, 3, 4]
    assert exact["a"].tolist() == [1, 2, 3]
    assert not view.zero_padded


def test_padding_states_as_well() -> None:
    batch = SampleBatch(a=[1, 2, 3], state_in_0=[[7.0], [8.0]], seq_lens=[1, 2]).right_zero_pad(3, exclude_states=False)
    assert batch["state_in_0"].tolist() == [[7], [0], [0], [8], [0], [0]]
    assert len(batch) == 3
    part = batch[1:]
    assert part["a"].tolist() == [2, 3, 0]
    assert part["state_in_0"].tolist() == [[8], [0], [0]]


def test_padding_leaves_states_that_have_a_row_per_step_to_the_caller() -> None:
    batch = SampleBatch(a=[1, 2, 3], state_in_0=[7.0, 8.0, 9.0], seq_lens=[1, 2])
    with pytest.raises(SequenceError, match="'state_in_0' has a row for each step"):
        batch.right_zero_pad(2)
    assert batch.right_zero_pad(2, exclude_states=False)["state_in_0"].tolist() == [7, 0, 8, 9]


def test_padding_torch_and_dates_and_ragged_rows() -> None:
    batch = SampleBatch(
        t=torch.tensor([1, 2, 3], dtype=torch.bfloat16),
        d=np.array([1, 2, 3], "M8[s]"),
        r=[[1], [2, 3], [4]],
        seq_lens=[1, 2],
    ).right_zero_pad(2)
    assert batch["t"].dtype == torch.bfloat16
    assert batch["t"].tolist() == [1, 0, 2, 3]
    assert batch["d"].astype(int).tolist() == [1, 0, 2, 3]
    assert [row.tolist() for row in batch["r"]] == [[1], [], [2, 3], [4]]


# -- joining ----------------------------------------------------------------------------------------------------------


@both
def test_concat_joins_sequences_and_states(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    joined = concat_samples([batch, batch])
    assert by_sequence(joined) == by_sequence(batch) * 2
    assert joined.zero_padded == padded
    assert_sound(joined)
    parts = concat_samples([batch[:2], batch[2:]])
    assert parts == batch


@both
def test_concat_of_exact_slices_keeps_every_step(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    joined = concat_samples([batch.slice(i, i + 2) for i in range(0, 6, 2)])
    assert steps(joined) == [0, 1, 2, 3, 4, 5]
    assert joined["seq_lens"].tolist() == [2, 2, 1, 0, 1]
    assert joined.max_seq_len == 2
    assert_sound(joined)


def test_concat_keeps_the_longest_sequence() -> None:
    short, long = SampleBatch(a=[1], seq_lens=[1]), SampleBatch(a=np.arange(5), seq_lens=[5])
    assert concat_samples([short, long]).max_seq_len == concat_samples([long, short]).max_seq_len == 5


def test_concat_refuses_padding_of_different_width() -> None:
    batch = in_sequences(padded=False)
    with pytest.raises(SequenceError, match="max_seq_len, got 3 and 4"):
        concat_samples([batch.copy().right_zero_pad(3), batch.copy().right_zero_pad(4)])


# -- time slices, episodes, rows --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 10])
def test_timeslices_partition_the_sequences(padded: bool, size: int) -> None:
    batch = in_sequences(padded=padded)
    parts = batch.timeslices(size)
    assert [step for part in parts for step in steps(part)] == [0, 1, 2, 3, 4, 5]
    assert [pair for part in parts for pair in by_sequence(part)] == by_sequence(batch)
    for part in parts:
        assert_sound(part)


@both
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_timeslices_of_a_number(padded: bool, number: int) -> None:
    batch = in_sequences(padded=padded)
    parts = batch.timeslices(num_slices=number)
    assert len(parts) == number
    assert [pair for part in parts for pair in by_sequence(part)] == by_sequence(batch)


@both
def test_split_by_episode_keeps_sequences_and_states(padded: bool) -> None:
    batch = SampleBatch(a=np.arange(6), eps_id=[7, 7, 7, 7, 8, 8], state_in_0=[[1.0], [2.0], [3.0]], seq_lens=[2, 2, 2])
    if padded:
        batch.right_zero_pad(3)
    first, second = batch.split_by_episode()
    assert by_sequence(first) == [(1, [0, 1]), (2, [2, 3])]
    assert by_sequence(second) == [(3, [4, 5])]
    inside = SampleBatch(a=np.arange(4), dones=[0, 0, 1, 0], state_in_0=[[1.0]], seq_lens=[4])
    if padded:
        inside.right_zero_pad(5)
    assert [by_sequence(part) for part in inside.split_by_episode()] == [[(1, [0, 1, 2])], [(1, [3])]]


@both
def test_rows_carry_the_state_of_their_sequence(padded: bool) -> None:
    rows = list(in_sequences(padded=padded).rows())
    assert [row["a"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["state_in_0"].tolist() for row in rows] == [[1], [1], [2], [2], [2], [4]]
    assert [row["infos"] for row in rows] == [{"step": i} for i in range(6)]
    assert all(row["seq_lens"] == 1 for row in rows)
    assert rows[3]["obs"]["y"][1] == 4


@both
@pytest.mark.parametrize("size", [1, 3, 4, 100])
@pytest.mark.parametrize("shuffle", [False, True])
def test_minibatches_are_made_of_whole_sequences(padded: bool, size: int, shuffle: bool) -> None:
    batch = in_sequences(padded=padded)
    for seed in range(5):
        parts = list(batch.minibatches(size, epochs=2, shuffle=shuffle, rng=seed))
        pairs = [pair for part in parts for pair in by_sequence(part)]
        assert sorted(pairs) == sorted(by_sequence(batch) * 2)
        if not shuffle:
            assert pairs == by_sequence(batch) * 2
        for part in parts:
            assert len(part) <= size or len(part["seq_lens"]) == 1
            assert_sound(part)


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_seq_lens_in_a_column_of_their_own_shape() -> None:
    batch = SampleBatch(a=np.arange(6), state_in_0=np.arange(3.0), seq_lens=np.array([[2], [3], [1]]))
    assert len(batch) == 6
    assert batch.max_seq_len == 3
    assert batch[2:]["state_in_0"].tolist() == [1, 2]
    assert batch[2:]["seq_lens"].tolist() == [3, 1]
    assert batch.slice(1, 4)["a"].tolist() == [1, 2, 3]
    assert batch.take_sequences([2, 0])["a"].tolist() == [5, 0, 1]
    joined = concat_samples([batch.slice(0, 4), batch])
    assert joined["seq_lens"].tolist() == [2, 2, 2, 3, 1]
    assert batch.copy().right_zero_pad(3)["a"].tolist() == [0, 1, 0, 2, 3, 4, 5, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_seq_lens_as_a_tensor_stay_one(dtype: torch.dtype) -> None:
    batch = SampleBatch(a=np.arange(6), state_in_0=np.arange(3.0), seq_lens=torch.tensor([2, 3, 1], dtype=dtype))
    parts = [
        batch[2:],
        batch.slice(1, 4),
        batch.slice(-1, 4),
        batch.take([0, 5]),
        batch.take_sequences([1]),
        batch.copy().right_zero_pad(3),
        concat_samples([batch, batch.slice(0, 3)]),
        SampleBatch.from_arrow(batch.to_arrow()),
    ]
    for part in parts:
        assert isinstance(part["seq_lens"], torch.Tensor)
        assert part["seq_lens"].dtype == dtype
        assert len(part) == int(part["seq_lens"].sum())


def test_sequences_that_are_all_empty() -> None:
    batch = SampleBatch(a=np.empty(0), state_in_0=np.zeros((2, 3)), seq_lens=[0, 0])
    assert len(batch) == 0
    assert batch.max_seq_len == 0
    assert list(batch.rows()) == []
    assert batch.timeslices(2) == []
    assert len(batch[0:0]) == 0
    assert batch.copy().right_zero_pad(2)["a"].tolist() == [0, 0, 0, 0]
    assert SampleBatch.from_arrow(batch.to_arrow()) == batch


# -- time-major -------------------------------------------------------------------------------------------------------


@pytest.fixture
def time_major() -> SampleBatch:
    """Return 2 sequences of 3 and 2 steps, laid out as (T, B): row t, column b holds 10 b + t."""
    values = np.array([[0, 10], [1, 11], [2, 0]])
    return SampleBatch(
        a=values, b=np.stack([values, -values], -1), state_in_0=[1.0, 2.0], seq_lens=[3, 2], _time_major=True
    )


def test_a_time_major_batch_counts_steps(time_major: SampleBatch) -> None:
    assert len(time_major) == 5
    assert time_major.time_major
    assert time_major.max_seq_len == 3
    assert time_major.copy() == time_major


@pytest.mark.parametrize(
    "operation",
    [
        lambda batch: batch[0:2],
        lambda batch: batch.slice(0, 2),
        lambda batch: batch.take([0]),
        lambda batch: batch[::2],
        lambda batch: batch.take_sequences([0]),
        lambda batch: batch.right_zero_pad(3),
        lambda batch: batch.to_arrow(),
        lambda batch: batch.timeslices(2),
        lambda batch: list(batch.rows()),
        lambda batch: list(batch.minibatches(2)),
    ],
    ids=["brackets", "slice", "take", "steps", "sequences", "pad", "arrow", "timeslices", "rows", "minibatches"],
)
def test_operations_on_rows_refuse_a_time_major_batch(time_major: SampleBatch, operation: Any) -> None:
    before = time_major.copy()
    with pytest.raises(SequenceError, match="time-major"):
        operation(time_major)
    assert time_major == before


def test_time_major_to_batch_major(time_major: SampleBatch) -> None:
    batch = time_major.to_batch_major()
    assert not batch.time_major
    assert batch.zero_padded
    assert batch["a"].tolist() == [0, 1, 2, 10, 11, 0]
    assert batch["b"][:, 1].tolist() == [0, -1, -2, -10, -11, 0]
    assert batch["state_in_0"].tolist() == [1, 2]
    assert len(batch) == 5
    assert batch.mask().tolist() == [True] * 5 + [False]
    assert batch.slice(0, 5)["a"].tolist() == [0, 1, 2, 10, 11]


def test_time_major_torch_to_batch_major(time_major: SampleBatch) -> None:
    batch = time_major.to_device("cpu").to_batch_major()
    assert isinstance(batch["a"], torch.Tensor)
    assert batch["a"].tolist() == [0, 1, 2, 10, 11, 0]


@pytest.mark.parametrize("device", [False, True], ids=["numpy", "torch"])
def test_time_major_batches_are_joined_along_their_sequences(time_major: SampleBatch, device: bool) -> None:
    if device:
        time_major.to_device("cpu")
    joined = concat_samples([time_major, time_major])
    assert joined["a"].tolist() == [[0, 10, 0, 10], [1, 11, 1, 11], [2, 0, 2, 0]]
    assert tuple(joined["b"].shape) == (3, 4, 2)
    assert joined["seq_lens"].tolist() == [3, 2, 3, 2]
    assert joined["state_in_0"].tolist() == [1, 2, 1, 2]
    assert len(joined) == 10
    assert joined.time_major


@pytest.mark.parametrize(
    "columns",
    [
        {"a": np.zeros((3, 3))},
        {"a": np.zeros(3)},
        {"a": np.zeros((2, 2))},
        {"a": np.zeros((3, 2)), "b": np.zeros((4, 2))},
    ],
    ids=["sequences", "dimensions", "too short", "unequal"],
)
def test_time_major_columns_must_fit_the_sequences(columns: dict[str, np.ndarray]) -> None:
    with pytest.raises(SampleBatchError, match=f"'{list(columns)[-1]}'|longest sequence, 3 steps, got 2"):
        SampleBatch(columns, seq_lens=[3, 2], _time_major=True)


def test_to_batch_major_needs_a_time_major_batch() -> None:
    with pytest.raises(SequenceError, match="time-major"):
        in_sequences(padded=True).to_batch_major()
    with pytest.raises(SequenceError, match="seq_lens"):
        SampleBatch(a=[1], _time_major=True).to_batch_major()


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_padded_columns_must_have_the_padded_rows() -> None:
    with pytest.raises(ValueError, match=r"'a' must have 6 rows.*got 5"):
        SampleBatch(a=np.zeros(5), seq_lens=[1, 2], _zero_padded=True, _max_seq_len=3)
    with pytest.raises(SequenceError, match="longest sequence, 3 steps, got 2"):
        SampleBatch(a=np.zeros(4), seq_lens=[3, 1], _zero_padded=True, _max_seq_len=2)


def test_states_must_have_a_row_per_sequence_or_per_step() -> None:
    with pytest.raises(ValueError, match="'state_in_0' must have 3 rows"):
        SampleBatch(a=[1, 2, 3], state_in_0=np.zeros(4), seq_lens=[1, 2])
    batch = SampleBatch(a=[1, 2, 3], seq_lens=[1, 2])
    with pytest.raises(ValueError, match="'state_in_0' must have 3 rows"):
        batch["state_in_0"] = np.zeros(1)
    batch["state_in_0"] = np.zeros(2)
    batch["state_in_1"] = np.zeros(3)

"""Operations on batches with sequences, including states and padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch, concat_samples
from samplebatch.errors import RowIndexError, SequenceError
from tests.batch.every_kind import in_sequences
from tests.batch.sequence_checks import LENGTHS, assert_sound, both, by_sequence, steps
from tests.optional import torch


@both
def test_a_batch_of_sequences_is_constructed(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    assert len(batch) == batch.count == 6
    assert batch.max_seq_len == (4 if padded else 3)
    assert batch.zero_padded == padded
    assert by_sequence(batch) == [(1, [0, 1]), (2, [2, 3, 4]), (3, []), (4, [5])]
    assert_sound(batch)


def test_the_mask_marks_steps_but_not_padding() -> None:
    assert in_sequences(padded=True).mask().tolist() == [
        *(True, True, False, False),
        *(True, True, True, False),
        *(False, False, False, False),
        *(True, False, False, False),
    ]
    assert in_sequences(padded=False).mask().tolist() == [True] * 6
    assert SampleBatch(a=[1, 2]).mask().tolist() == [True, True]
    assert SampleBatch().mask().tolist() == []


# -- slices ------------------------------------------------------------------------------------------------------------
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
def test_brackets_select_complete_sequences(padded: bool, start: int, stop: int) -> None:
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
    assert np.shares_memory(*(np.asarray(rows["obs"]["y"][1]) for rows in (part, batch)))


def test_an_exact_slice_is_a_view_with_new_lengths() -> None:
    batch = in_sequences(padded=False)
    part = batch.slice(1, 4)
    for name in ("a", "b", "obs.x", "state_in_0"):
        assert np.shares_memory(part[name], batch[name]), name
    assert not np.shares_memory(part["seq_lens"], batch["seq_lens"])
    assert batch["seq_lens"].tolist() == LENGTHS
    assert part["seq_lens"].dtype == batch["seq_lens"].dtype
    full = batch.slice(2, 6)
    assert np.shares_memory(full["seq_lens"], batch["seq_lens"])


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
def test_states_that_do_not_fit_the_range_are_rejected(states: dict[str, int]) -> None:
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


# -- gathers -----------------------------------------------------------------------------------------------------------
@both
def test_take_creates_one_sequence_per_run(padded: bool) -> None:
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


def test_take_sequences_rejects_missing_sequences() -> None:
    with pytest.raises(RowIndexError, match="row 4 must be in"):
        in_sequences(padded=False).take_sequences([0, 4])
    with pytest.raises(SequenceError, match="take_sequences requires a column 'seq_lens'"):
        SampleBatch(a=[1]).take_sequences([0])


def test_shuffle_moves_complete_padded_sequences() -> None:
    orders = set()
    for seed in range(20):
        batch = in_sequences(padded=True)
        assert batch.shuffle(rng=seed) is batch
        assert sorted(by_sequence(batch)) == sorted(by_sequence(in_sequences(padded=True)))
        assert_sound(batch)
        orders.add(tuple(batch["state_in_0"][:, 0].tolist()))
    assert len(orders) > 5


def test_shuffle_rejects_sequences_without_padding() -> None:
    batch = in_sequences(padded=False)
    with pytest.raises(SequenceError, match="padded"):
        batch.shuffle()
    assert batch == in_sequences(padded=False)


# -- joining -----------------------------------------------------------------------------------------------------------
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


def test_concat_rejects_padding_of_different_width() -> None:
    batch = in_sequences(padded=False)
    with pytest.raises(SequenceError, match="max_seq_len, got 3 and 4"):
        concat_samples([batch.copy().right_zero_pad(3), batch.copy().right_zero_pad(4)])


# -- time slices, episodes, rows ---------------------------------------------------------------------------------------
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
def test_minibatches_contain_complete_sequences(padded: bool, size: int, shuffle: bool) -> None:
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


# -- lengths -----------------------------------------------------------------------------------------------------------
def test_seq_lens_may_have_shape_n_1() -> None:
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
def test_seq_lens_given_as_a_tensor_remain_a_tensor(dtype: torch.dtype) -> None:
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

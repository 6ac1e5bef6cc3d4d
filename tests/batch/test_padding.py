"""Padding sequences, cutting them again, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch import SampleBatch
from samplebatch.errors import SequenceError
from tests.batch.every_kind import in_sequences
from tests.batch.sequence_checks import assert_sound, by_sequence
from tests.optional import torch


@pytest.mark.parametrize("width", [3, 4, 7])
def test_padding_and_cutting_again_is_the_identity(width: int) -> None:
    batch = in_sequences(padded=False)
    padded = batch.copy().right_zero_pad(width)
    assert padded.zero_padded
    assert padded.max_seq_len == width
    assert_sound(padded)
    assert padded.slice(0, 6) == batch.slice(0, 6) == batch
    assert padded.take(np.arange(6)) == batch.take(np.arange(6))


def test_padded_sequences_can_be_padded_again() -> None:
    batch = in_sequences(padded=True)
    batch.right_zero_pad(3)
    assert batch.max_seq_len == 3
    assert_sound(batch)
    assert by_sequence(batch) == by_sequence(in_sequences(padded=False))
    with pytest.raises(SequenceError, match="longest sequence, 3 steps, got 2"):
        batch.right_zero_pad(2)
    assert batch.max_seq_len == 3
    assert_sound(batch)


def test_padding_does_not_change_existing_views() -> None:
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
    assert batch.slice(0, 3)["state_in_0"].tolist() == [[7], [8]]
    assert batch.take([2, 0])["state_in_0"].tolist() == [[8], [7]]
    assert batch.right_zero_pad(4)["state_in_0"].tolist() == [[7], [8]]


def test_padded_columns_may_be_assigned_before_seq_lens() -> None:
    batch = SampleBatch(_zero_padded=True)
    batch["a"] = [1, 0, 0, 2, 3, 0]
    batch["seq_lens"] = [1, 2]
    assert (len(batch), batch.max_seq_len, batch.zero_padded) == (3, 3, True)
    batch["state_in_0"] = [7.0, 8.0]
    assert [part["a"].tolist() for part in batch.timeslices(2)] == [[1, 0, 0], [2, 3, 0]]
    empty = SampleBatch()
    empty.zero_padded, empty.max_seq_len = True, 4
    empty.update(seq_lens=[1, 2], a=np.zeros(8))
    assert (len(empty), len(empty["a"])) == (3, 8)


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


def test_padded_columns_must_have_the_padded_rows() -> None:
    with pytest.raises(ValueError, match=r"'a' must have 6 rows.*got 5"):
        SampleBatch(a=np.zeros(5), seq_lens=[1, 2], _zero_padded=True, _max_seq_len=3)
    with pytest.raises(SequenceError, match="longest sequence, 3 steps, got 2"):
        SampleBatch(a=np.zeros(4), seq_lens=[3, 1], _zero_padded=True, _max_seq_len=2)


def test_states_must_have_a_row_per_sequence() -> None:
    # A row for each step as well: which of them was meant would show when padding, if at all.
    for rows in (1, 3, 4):
        with pytest.raises(ValueError, match=f"'state_in_0' must have 2 rows to match the sequences .* got {rows}"):
            SampleBatch(a=[1, 2, 3], state_in_0=np.zeros(rows), seq_lens=[1, 2])
    batch = SampleBatch(a=[1, 2, 3], seq_lens=[1, 2])
    with pytest.raises(ValueError, match="'state_in_0' must have 2 rows"):
        batch["state_in_0"] = np.zeros(3)
    batch["state_in_0"] = np.zeros(2)

"""Batches of sequences in columns of shape (T, B, ...)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch, concat_samples
from samplebatch.errors import SampleBatchError, SequenceError
from tests.batch.every_kind import in_sequences
from tests.optional import torch


@pytest.fixture
def time_major() -> SampleBatch:
    """Return 2 sequences of 3 and 2 steps in layout (T, B); row t of sequence b is 10 b + t."""
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
def test_operations_on_rows_reject_a_time_major_batch(time_major: SampleBatch, operation: Any) -> None:
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


def test_bytes_remain_text_columns_when_made_batch_major() -> None:
    batch = SampleBatch(words=np.array([[b"a", b"c"], [b"b", b"d"]]), seq_lens=[2, 2], _time_major=True)
    column = batch.to_batch_major().column("words")
    assert (column.kind, column.values.tolist()) == ("text", [b"a", b"b", b"c", b"d"])

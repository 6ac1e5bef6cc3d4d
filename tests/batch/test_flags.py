"""The flags: their setters, what operations keep, and how they are merged."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch import SampleBatch, concat_samples
from samplebatch.errors import SampleBatchError, SequenceError
from tests.batch.every_kind import in_sequences


def test_zero_padded_can_be_set_if_rows_are_padded() -> None:
    batch = SampleBatch(a=[1, 2, 3, 4], seq_lens=[2, 2])
    batch.zero_padded = True
    assert batch.zero_padded
    assert batch[2:]["a"].tolist() == [3, 4]
    batch.zero_padded = False
    assert not batch.zero_padded


def test_zero_padded_is_rejected_if_rows_are_not_padded() -> None:
    batch = SampleBatch(a=[1, 2, 3], seq_lens=[1, 2])
    with pytest.raises(SampleBatchError, match="'a' must have 4 rows"):
        batch.zero_padded = True
    assert not batch.zero_padded
    padded = batch.copy().right_zero_pad(2)
    with pytest.raises(SampleBatchError, match="'a' must have 3 rows"):
        padded.zero_padded = False
    assert padded.zero_padded


def test_max_seq_len_can_be_set_within_valid_bounds() -> None:
    batch = SampleBatch(a=[1, 2, 3], seq_lens=[1, 2])
    batch.max_seq_len = 10
    assert batch.max_seq_len == 10
    batch.max_seq_len = None
    assert batch.max_seq_len == 2
    padded = SampleBatch(a=[1, 2, 3], seq_lens=[1, 2]).right_zero_pad(3)
    for width in (2, 4, 1):
        with pytest.raises(SampleBatchError, match=r"'a' must have|longest sequence"):
            padded.max_seq_len = width
    assert padded.max_seq_len == 3


def test_time_major_can_be_set_if_the_columns_have_the_shape() -> None:
    batch = SampleBatch(a=np.zeros((2, 2)), seq_lens=[1, 1])
    batch.time_major = True
    assert batch.time_major
    batch.time_major = False
    assert batch.time_major is False
    with pytest.raises(SequenceError, match="'a' must have shape"):
        SampleBatch(a=np.zeros(2), seq_lens=[1, 1]).time_major = True


def test_num_grad_updates_and_is_training_can_be_set() -> None:
    batch = SampleBatch(a=[1])
    batch.num_grad_updates = 3
    batch.set_training()
    assert batch.num_grad_updates == 3
    assert batch.is_training is True
    batch.set_training(False)
    assert batch.is_training is False
    batch.num_grad_updates = None
    assert batch.num_grad_updates is None


def test_views_have_separate_flags() -> None:
    batch = SampleBatch(a=[1, 2], _num_grad_updates=1)
    view = batch[:1]
    view.num_grad_updates = 2
    view.set_training()
    assert batch.num_grad_updates == 1
    assert not batch.is_training
    batch.num_grad_updates = 5
    assert view.num_grad_updates == 2


def test_setting_flags_on_a_view_does_not_lose_its_rows() -> None:
    view = SampleBatch(a=np.arange(5), seq_lens=[2, 3])[2:]
    view.max_seq_len = 7
    view.time_major = False
    assert view["a"].tolist() == [2, 3, 4]
    assert view.max_seq_len == 7


@pytest.mark.parametrize(
    "operation",
    [
        lambda b: b[1:2],
        lambda b: b[:0],
        lambda b: b[[1, 0]],
        lambda b: b.slice(-1, 2),
        lambda b: b.take([0]),
        lambda b: b.copy(),
        lambda b: b.copy(shallow=True),
        lambda b: b.shuffle(),
        lambda b: b.select("a"),
        lambda b: b.drop("b"),
        lambda b: b.rename({"a": "c"}),
        lambda b: b.timeslices(1)[1],
        lambda b: next(b.minibatches(2)),
        lambda b: b.split_by_episode("b")[0],
        lambda b: b.compress(columns={"a"}),
        lambda b: b.to_device("cpu"),
        lambda b: concat_samples([b, b]),
        lambda b: b.concat(b),
        lambda b: SampleBatch.from_arrow(b.to_arrow()),
    ],
    ids=[
        "slice",
        "empty",
        "gather",
        "pad left",
        "take",
        "copy",
        "shallow",
        "shuffle",
        "select",
        "drop",
        "rename",
        "timeslices",
        "minibatches",
        "split",
        "compress",
        "device",
        "concat_samples",
        "concat",
        "arrow",
    ],
)
def test_operations_keep_flags_about_the_policy(operation) -> None:
    batch = SampleBatch(a=[1, 2], b=[3, 4], _num_grad_updates=2.5, _is_training=True)
    result = operation(batch)
    assert result.num_grad_updates == 2.5
    assert result.is_training is True


def test_num_grad_updates_are_averaged_over_steps_with_a_known_count() -> None:
    counted = SampleBatch(a=np.zeros(50), _num_grad_updates=2), SampleBatch(a=np.zeros(50), _num_grad_updates=3)
    assert concat_samples(counted).num_grad_updates == 2.5
    unknown = SampleBatch(a=np.zeros(100))
    assert concat_samples([*counted, unknown]).num_grad_updates == 2.5
    assert concat_samples([unknown, unknown]).num_grad_updates is None
    skipped = SampleBatch(a=np.zeros(0), _num_grad_updates=1000)
    assert concat_samples([skipped, *counted]).num_grad_updates == 2.5


def test_num_grad_updates_are_weighted_by_steps_not_by_padding() -> None:
    short = SampleBatch(a=[1.0], seq_lens=[1], _num_grad_updates=1).right_zero_pad(10)
    long = SampleBatch(a=np.zeros(9), seq_lens=[9], _num_grad_updates=11).right_zero_pad(10)
    assert concat_samples([short, long]).num_grad_updates == 10


def test_max_seq_len_follows_the_rows() -> None:
    batch = in_sequences(padded=False)
    assert batch.max_seq_len == 3
    assert batch.slice(0, 2).max_seq_len == 2
    assert batch.slice(3, 4).max_seq_len == 1
    assert batch.take([0, 2, 5]).max_seq_len == 1
    assert batch[5:].max_seq_len == 1
    padded = in_sequences(padded=True)
    assert padded[5:].max_seq_len == 4
    assert padded.slice(0, 3).max_seq_len == 2

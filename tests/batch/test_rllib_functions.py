"""Functions that clients of RLlib call, and RLlib's own objects where ours are expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import (
    MultiAgentBatch,
    SampleBatch,
    attempt_count_timesteps,
    concat_samples,
    concat_samples_into_ma_batch,
    convert_ma_batch_to_sample_batch,
)
from samplebatch.column import CompressedColumn
from samplebatch.errors import ArgumentError, ColumnMismatchError, ColumnTypeError, PolicyNotFoundError
from tests.optional import torch

NOTHING = (
    {},
    {"infos": [{}, {}]},
    {"state_in_0": np.zeros((2, 3)), "state_out_0": np.zeros((2, 3)), "state_in_1.h": np.zeros(2)},
    {"a": 3, "b": np.zeros(())},
    {"seq_lens": None},
    {"a": np.zeros((0, 3)), "b": []},
)
COUNTED = (
    {"infos": [{}], "a": [1, 2, 3]},
    {"a": np.zeros((0, 3)), "b": np.zeros((3, 2))},
    {"obs": {"x": np.zeros((3, 1)), "y": np.zeros(3)}},
    {"obs": (np.zeros(3), np.zeros(3))},
    {"obs": torch.zeros(3, 1)},
    {"a": np.zeros(8), "seq_lens": [1, 2]},
    {"a": np.zeros(8), "seq_lens": np.array([[1], [2]])},
    {"a": np.zeros(8), "seq_lens": torch.tensor([1, 2])},
    SampleBatch(infos=[{}] * 3, a=[1, 2, 3]),
    SampleBatch(a=[1, 2, 3], seq_lens=[1, 2]).right_zero_pad(5),
)


@pytest.mark.parametrize(
    ("columns", "steps"), [*((columns, 0) for columns in NOTHING), *((columns, 3) for columns in COUNTED)]
)
def test_steps_are_counted_by_the_first_countable_column(columns: Any, steps: int) -> None:
    assert attempt_count_timesteps(columns) == steps


def test_the_default_policys_batch_becomes_flat() -> None:
    batch = SampleBatch(a=[1, 2])
    assert convert_ma_batch_to_sample_batch(batch) is batch
    assert convert_ma_batch_to_sample_batch(batch.as_multi_agent()) is batch
    for policies in ({}, {"walker": batch}, {"default_policy": batch, 0: batch}):
        with pytest.raises(PolicyNotFoundError, match="single policy 'default_policy' can be flattened"):
            convert_ma_batch_to_sample_batch(MultiAgentBatch(policies, 2))


# -- columns that only some batches have ------------------------------------------------------------------------------


def test_columns_that_some_lack_can_be_dropped_or_filled_up() -> None:
    some = [
        SampleBatch(a=[1, 2], infos=[{"i": 0}, {"i": 1}], obs={"x": np.ones((2, 3))}),
        SampleBatch(a=[3], flags=[True], words=["far"]),
    ]
    with pytest.raises(ColumnMismatchError, match=r"have 'flags', 'infos', 'obs\.x', 'words'; missing='drop'"):
        concat_samples(some)
    assert list(concat_samples(some, missing="drop")) == ["a"]
    joined = concat_samples(some, missing="zero")
    assert list(joined) == ["a", "infos", "obs", "flags", "words"]
    assert joined["infos"].tolist() == [{"i": 0}, {"i": 1}, None]
    assert joined["obs"]["x"].sum(1).tolist() == [3, 3, 0]
    assert joined["flags"].tolist() == [False, False, True]
    assert joined["words"].tolist() == ["", "", "far"]
    assert concat_samples(some[::-1], missing="zero")["a"].tolist() == [3, 1, 2]


@pytest.mark.parametrize("order", [1, -1])
def test_compressed_columns_are_filled_up_compressed(order: int) -> None:
    frames = SampleBatch(a=[1, 2], obs=np.ones((2, 3))).compress()
    joined = concat_samples([frames, SampleBatch(a=[3])][::order], missing="zero")
    assert isinstance(joined["obs"], CompressedColumn)
    assert joined.decompress_if_needed()["obs"].sum(1).tolist() == [3, 3, 0][::order]


def test_filled_states_have_one_row_per_sequence() -> None:
    some = [
        SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 2.0], seq_lens=[1, 2]),
        SampleBatch(a=[4, 5], b=[4, 5], seq_lens=[2]),
    ]
    joined = concat_samples(some, missing="zero")
    assert joined["state_in_0"].tolist() == [1, 2, 0]
    assert joined["b"].tolist() == [0, 0, 0, 4, 5]
    padded = concat_samples([part.right_zero_pad(2) for part in some], missing="zero")
    assert padded["b"].tolist() == [0, 0, 0, 0, 4, 5]


def test_policies_are_joined_with_filled_or_dropped_columns() -> None:
    some = [MultiAgentBatch({0: SampleBatch(a=[1], b=[2])}, 1), MultiAgentBatch({0: SampleBatch(a=[3])}, 1)]
    assert concat_samples(some, missing="zero")[0]["b"].tolist() == [2, 0]
    assert list(concat_samples_into_ma_batch(some, missing="drop")[0]) == ["a"]
    with pytest.raises(ColumnMismatchError, match="have 'b'"):
        concat_samples(some)


def test_columns_that_cannot_be_filled_are_rejected() -> None:
    steps = SampleBatch(a=np.zeros((2, 1)), seq_lens=[2], _time_major=True)
    other = SampleBatch(a=np.zeros((2, 1)), b=np.zeros((2, 1)), seq_lens=[2], _time_major=True)
    with pytest.raises(ColumnMismatchError, match="'b' must be in all batches"):
        concat_samples([steps, other], missing="zero")
    nested = [SampleBatch(obs={"x": [1]}), SampleBatch(obs=[1])]
    with pytest.raises(ColumnMismatchError, match="must be in all batches"):
        concat_samples(nested, missing="zero")
    with pytest.raises(ArgumentError, match="missing must be one of 'error', 'drop', 'zero', got 'nan'"):
        concat_samples([SampleBatch(a=[1])], missing="nan")  # type: ignore[arg-type]


# -- RLlib's batches --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rllib() -> Any:
    return pytest.importorskip("ray.rllib.policy.sample_batch", exc_type=ImportError)


@pytest.mark.filterwarnings("ignore")
def test_rllib_batches_are_joined_with_sample_batches(rllib: Any) -> None:
    theirs = rllib.SampleBatch({"a": np.array([1, 2]), "infos": [{}, {"i": 1}]}, _num_grad_updates=2.0)
    ours = SampleBatch(a=[3], infos=[{}])
    joined = concat_samples([theirs, ours])
    assert type(joined) is SampleBatch
    assert joined["a"].tolist() == [1, 2, 3]
    assert joined.num_grad_updates == 2.0
    assert ours.concat(theirs)["a"].tolist() == [3, 1, 2]
    several = rllib.MultiAgentBatch({0: theirs, "default_policy": theirs}, 2)
    actual = concat_samples([several, ours, theirs, several])
    assert {policy: part["a"].tolist() for policy, part in actual.items()} == {
        0: [1, 2, 1, 2],
        "default_policy": [1, 2, 3, 1, 2, 1, 2],
    }
    assert actual.count == 7


@pytest.mark.filterwarnings("ignore")
def test_padded_rllib_batches_remain_padded(rllib: Any) -> None:
    theirs = rllib.SampleBatch({"a": np.arange(3), "seq_lens": [1, 2]}).right_zero_pad(4)
    joined = concat_samples([theirs])
    assert (len(joined), joined.zero_padded, joined.max_seq_len) == (3, True, 4)
    assert joined["a"].tolist() == [0, 0, 0, 0, 1, 2, 0, 0]


def test_other_mappings_are_rejected_as_batches() -> None:
    for other in ({"a": [1]}, None, [1]):
        with pytest.raises(ColumnTypeError, match="only SampleBatch and MultiAgentBatch can be joined"):
            concat_samples([SampleBatch(a=[1]), other])  # type: ignore[list-item]

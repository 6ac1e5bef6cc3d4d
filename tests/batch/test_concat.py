"""Concatenation of batches: compatible batches, results, and errors that name the column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch, concat_samples, concat_samples_into_ma_batch
from samplebatch.column import memory
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, SampleBatchError, SequenceError
from tests.batch.every_kind import every_kind, with_every_kind
from tests.optional import torch


def test_columns_of_every_kind_are_joined() -> None:
    batch = with_every_kind(7)
    assert concat_samples([batch[:2], batch[2:5], batch[5:]]) == batch
    assert batch[:3].concat(batch[3:]) == batch


def test_joining_copies() -> None:
    batch = SampleBatch(every_kind(4))
    for joined in (concat_samples([batch]), concat_samples([batch, SampleBatch()])):
        assert joined == batch
        for name in ("flat i8", "wide f4", "flat ?", "nested.camera"):
            assert not np.shares_memory(joined[name], batch[name]), name
            assert joined[name].flags.writeable


def test_joined_columns_are_aligned() -> None:
    joined = concat_samples([SampleBatch(a=np.zeros((3, 5), np.float32))] * 3)
    assert joined["a"].ctypes.data % memory.ALIGNMENT == 0


def test_any_iterable_of_batches_is_accepted() -> None:
    batches = [SampleBatch(a=[1]), SampleBatch(a=[2])]
    assert concat_samples(iter(batches)) == concat_samples(tuple(batches)) == SampleBatch(a=[1, 2])


def test_columns_have_the_order_of_the_first_batch() -> None:
    joined = concat_samples([SampleBatch(b=[1], a=[2]), SampleBatch(a=[3], b=[4])])
    assert list(joined) == ["b", "a"]
    assert joined["a"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("dtypes", "joined"),
    [
        (["i4", "i8"], "i8"),
        (["f4", "f8", "f4"], "f8"),
        (["u1", "i2"], "i2"),
        (["?", "u1"], "u1"),
        (["f4", "i2"], "f4"),
        (["f8", "i4"], "f8"),
        (["f4", "c8"], "c8"),
    ],
    ids=str,
)
def test_dtypes_widen_without_loss(dtypes: list[str], joined: str) -> None:
    for order in (dtypes, dtypes[::-1]):
        batches = [SampleBatch(a=np.ones(2).astype(dtype)) for dtype in order]
        result = concat_samples(batches)["a"]
        assert result.dtype == joined
        assert result.tolist() == np.concatenate([batch["a"].astype(joined) for batch in batches]).tolist()


@pytest.mark.parametrize(
    "dtypes",
    [
        ("f4", "i8"),
        ("f4", "i4"),
        ("f8", "i8"),
        ("f8", "u8"),
        ("i8", "u8"),
        ("i4", "u4"),
        ("f2", "i2"),
        ("S2", "U2"),
        ("M8[s]", "i8"),
        ("M8[s]", "M8[ms]"),
        ("m8[s]", "M8[s]"),
    ],
    ids=str,
)
def test_dtypes_that_lose_values_are_rejected_with_the_column_name(dtypes: tuple[str, str]) -> None:
    for order in (dtypes, dtypes[::-1]):
        with pytest.raises(ColumnMismatchError, match=r"'reward'.*dtype.*convert"):
            concat_samples([SampleBatch(reward=np.zeros(2, dtype)) for dtype in order])


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4))),
        (np.zeros((2, 3)), np.zeros(2)),
        (torch.zeros(2, 3), torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), np.zeros(2, np.float32)),
        (np.array([{}, {}]), np.zeros(2)),
        ([[1], [2, 3]], np.zeros((2, 2))),
    ],
    ids=["row shapes", "dimensions", "torch shapes", "torch dtypes", "torch and NumPy", "objects", "ragged"],
)
def test_incompatible_columns_are_rejected_with_the_column_name(mine: Any, theirs: Any) -> None:
    for pair in ((mine, theirs), (theirs, mine)):
        with pytest.raises(ColumnMismatchError, match=r"'a' must (be|have)"):
            concat_samples([SampleBatch(a=values) for values in pair])
        with pytest.raises(ColumnMismatchError, match=r"'o\.x' must (be|have)"):
            concat_samples([SampleBatch(o={"x": values}) for values in pair])


def test_the_error_lists_all_missing_columns() -> None:
    batches = [SampleBatch(a=[1], b=[1]), SampleBatch(a=[1], c=[1]), SampleBatch(a=[1], b=[1], c=[1], d=[1])]
    with pytest.raises(ColumnMismatchError, match="'b', 'c', 'd'"):
        concat_samples(batches)
    with pytest.raises(ColumnMismatchError, match=r"'obs\.x', 'obs\.y'"):
        concat_samples([SampleBatch(obs={"x": [1]}), SampleBatch(obs={"y": [1]})])


def test_a_rejected_join_changes_no_batch() -> None:
    batch = SampleBatch(a=[1])
    with pytest.raises(ColumnMismatchError):
        batch.concat(SampleBatch(b=[1]))
    assert batch == SampleBatch(a=[1])


@pytest.mark.parametrize("stranger", [{"a": [1]}, None, 3, [SampleBatch(a=[1])]], ids=str)
@pytest.mark.parametrize("join", [concat_samples, concat_samples_into_ma_batch])
def test_only_batches_are_joined(stranger: Any, join: Any) -> None:
    with pytest.raises(ColumnTypeError, match=f"got {type(stranger).__name__}"):
        join([SampleBatch(a=[1]), stranger])


def test_concat_with_a_multi_agent_batch_needs_concat_samples() -> None:
    with pytest.raises((ColumnTypeError, TypeError)):
        SampleBatch(a=[1]).concat(MultiAgentBatch({"p": SampleBatch(a=[1])}, 1))  # type: ignore[arg-type]


def test_padded_states_and_states_per_sequence_are_not_joined() -> None:
    def padded(*, states: bool) -> SampleBatch:
        batch = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 2.0], seq_lens=[1, 2])
        return batch.right_zero_pad(2, exclude_states=not states)

    for pair in ([padded(states=True), padded(states=False)], [padded(states=False), padded(states=True)]):
        with pytest.raises(SampleBatchError, match="'state_in_0'"):
            concat_samples(pair)
    assert concat_samples([padded(states=True)] * 2)["state_in_0"].tolist() == [1, 0, 2, 0] * 2
    assert concat_samples([padded(states=False)] * 2)["state_in_0"].tolist() == [1, 2] * 2


def test_time_major_batches_of_unequal_time_are_rejected() -> None:
    batches = [SampleBatch(a=np.zeros((t, 1)), seq_lens=[1], _time_major=True) for t in (2, 3)]
    with pytest.raises(ColumnMismatchError, match="'a' must have equal lengths T"):
        concat_samples(batches)


# -- into multi-agent batches -----------------------------------------------------------------------------------------


def policies(batch: MultiAgentBatch) -> dict[str, list[int]]:
    return {policy: rows["a"].tolist() for policy, rows in batch.items()}


def test_flat_batches_belong_to_the_default_policy() -> None:
    joined = concat_samples_into_ma_batch([SampleBatch(a=[1, 2]), SampleBatch(a=[3])])
    assert policies(joined) == {"default_policy": [1, 2, 3]}
    assert joined.env_steps() == 3


def test_any_mix_is_joined_by_policy() -> None:
    mixed = [
        SampleBatch(a=[1]),
        MultiAgentBatch({"p": SampleBatch(a=[2, 3]), "q": SampleBatch(a=[4])}, 2),
        SampleBatch(),
        MultiAgentBatch({}, 0),
        MultiAgentBatch({"q": SampleBatch(a=[5]), "default_policy": SampleBatch(a=[6])}, 1),
    ]
    for join in (concat_samples, concat_samples_into_ma_batch):
        joined = join(mixed)
        assert policies(joined) == {"default_policy": [1, 6], "p": [2, 3], "q": [4, 5]}
        assert joined.count == 1 + 2 + 0 + 1
        assert joined.agent_steps() == 6


def test_policies_may_have_different_columns() -> None:
    first = MultiAgentBatch({"p": SampleBatch(a=[1]), "q": SampleBatch(b=[1.0])}, 1)
    joined = concat_samples([first, first])
    assert joined["p"] == SampleBatch(a=[1, 1])
    assert joined["q"] == SampleBatch(b=[1.0, 1.0])


def test_the_error_lists_columns_missing_from_a_policy() -> None:
    batches = [MultiAgentBatch({"p": SampleBatch(a=[1])}, 1), MultiAgentBatch({"p": SampleBatch(a=[1], b=[1])}, 1)]
    with pytest.raises(ColumnMismatchError, match="'b'"):
        concat_samples(batches)


def test_empty_batches_of_a_policy_are_ignored() -> None:
    batches = [MultiAgentBatch({"p": SampleBatch()}, 0), MultiAgentBatch({"p": SampleBatch(a=[1])}, 1)]
    assert policies(concat_samples(batches)) == {"p": [1]}
    nothing = concat_samples([MultiAgentBatch({"p": SampleBatch()}, 0)])
    assert nothing.agent_steps() == 0


def test_joining_no_batches() -> None:
    assert concat_samples([]) == SampleBatch()
    assert concat_samples_into_ma_batch([]) == MultiAgentBatch({}, 0)


def test_sequences_of_policies_are_joined() -> None:
    first = MultiAgentBatch({"p": SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 2.0], seq_lens=[1, 2])}, 3)
    joined = concat_samples([first, first])["p"]
    assert joined["seq_lens"].tolist() == [1, 2, 1, 2]
    assert joined["state_in_0"].tolist() == [1, 2, 1, 2]
    with pytest.raises(SequenceError, match="seq_lens"):
        concat_samples([first, MultiAgentBatch({"p": SampleBatch(a=[1], state_in_0=[1.0])}, 1)])


@pytest.mark.parametrize("padded", [False, True])
def test_columns_per_sequence_are_joined_for_large_batches(padded: bool) -> None:
    """Two threads join large batches, which have columns per step and columns per sequence."""
    batch = SampleBatch(
        a=np.arange(600_000.0), seq_lens=[100_000, 200_000, 300_000], state_in_0=np.arange(3), _max_seq_len=300_000
    )
    if padded:
        batch = batch.right_zero_pad(300_000)
    joined = concat_samples([batch[:100_000], batch[100_000:300_000], batch[300_000:]])
    assert joined["seq_lens"].tolist() == [100_000, 200_000, 300_000]
    assert joined["state_in_0"].tolist() == [0, 1, 2]
    assert np.array_equal(joined["a"], batch["a"])


PARTS = {
    "ragged": SampleBatch(ids=[[1], [2, 3]]),
    "equal": SampleBatch(ids=[[4, 5], [6, 7]]),
    "one": SampleBatch(ids=[[8, 9]]),
    "without elements": SampleBatch(ids=[[], []]),
}


@pytest.mark.parametrize("names", [("ragged", "equal"), ("one", "ragged"), ("without elements", "one", "ragged")])
def test_rows_of_one_shape_are_joined_to_ragged_ones(names: tuple[str, ...]) -> None:
    parts = [PARTS[name] for name in names]
    joined = concat_samples(parts)
    assert joined["ids"].kind == "ragged"
    assert joined["ids"].dtype == np.int64
    assert [row.tolist() for row in joined["ids"]] == [list(row) for part in parts for row in part["ids"]]
    policies = concat_samples([MultiAgentBatch({"p": part}, len(part)) for part in parts])
    assert isinstance(policies, MultiAgentBatch)
    assert policies["p"] == joined
    tensors = concat_samples([part.to_torch() for part in parts if len(np.asarray(part["ids"][0]))])
    assert tensors["ids"].kind == "ragged_torch"


def test_rows_without_elements_do_not_affect_the_dtype() -> None:
    empty = SampleBatch(ids=[[], []], ragged="ids")
    assert empty["ids"].dtype == np.float64
    for parts in ([empty, PARTS["ragged"]], [PARTS["ragged"], empty]):
        joined = concat_samples(parts)
        assert joined["ids"].dtype == np.int64
        assert sum(joined["ids"].lengths) == 3


def test_empty_batches_keep_columns_ragged() -> None:
    empty = SampleBatch(ids=[], t=[], ragged={"ids": "int32"})
    for parts in ([empty, empty], [SampleBatch(), empty[:0]], [PARTS["ragged"][:0], empty]):
        joined = concat_samples(parts)
        assert joined.count == 0
        assert joined["ids"].kind == "ragged"
        assert joined["ids"].dtype == next(part for part in parts if "ids" in part)["ids"].dtype
    for parts in ([empty.drop("t"), PARTS["equal"]], [PARTS["equal"], empty.drop("t"), PARTS["equal"]]):
        joined = concat_samples(parts)
        assert joined["ids"].kind == "ragged"
        assert joined["ids"].dtype == np.int64
        assert joined.count == sum(map(len, parts))
    tensors = concat_samples([PARTS["ragged"][:0].to_torch(), PARTS["equal"].to_torch()])
    assert tensors["ids"].kind == "ragged_torch"


def test_ragged_columns_are_not_joined_if_values_would_be_lost() -> None:
    for other, words in (
        (SampleBatch(ids=[1, 2]), "must be of one kind to be concatenated, got ragged and tensor"),
        (SampleBatch(ids=np.zeros((2, 2, 2), int)), "must have rows of one number of dimensions to be joined"),
        (SampleBatch(ids=[[0.5, 1.5]]), "dtype"),
        (SampleBatch(ids=[{}, {}]), "must be of one kind to be concatenated, got ragged and object"),
    ):
        with pytest.raises(ColumnMismatchError, match=f"column 'ids' .*{words}"):
            concat_samples([PARTS["ragged"], other])


def test_missing_ragged_rows_are_filled_without_elements() -> None:
    for parts in ([PARTS["equal"], SampleBatch(t=[0]), PARTS["ragged"]], [PARTS["ragged"], SampleBatch(t=[0])]):
        joined = concat_samples([part.copy() for part in parts], missing="zero")
        row = len(parts[0])
        assert joined["ids"].lengths[row] == 0

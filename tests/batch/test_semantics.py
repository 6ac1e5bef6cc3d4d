"""Behaviour of RLlib's SampleBatch that is kept, and intended differences."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch, channel, concat_samples
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, SequenceError
from tests.optional import torch

# -- values -----------------------------------------------------------------------------------------------------------


def test_a_batch_returns_the_same_array_that_was_assigned() -> None:
    obs, reward = np.zeros((3, 2), np.float32), np.array([1, 2, 3])
    batch = SampleBatch({"obs": obs}, reward=reward)
    assert batch["obs"] is obs
    assert batch["reward"] is reward
    tensor = torch.ones(3, 2)
    batch["t"] = tensor
    assert batch["t"] is tensor


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(4, 3).T,
        np.arange(6)[::2],
        np.arange(3)[::-1],
        np.arange(3, dtype=">i4"),
        np.frombuffer(b"\0" + np.arange(3.0).tobytes(), np.uint8)[1:].view(np.float64),
    ],
    ids=["fortran", "strided", "reversed", "big-endian", "unaligned"],
)
def test_another_layout_is_copied_once_and_keeps_its_values(array: np.ndarray) -> None:
    batch = SampleBatch(a=array)
    held = batch["a"]
    assert held.flags.c_contiguous
    assert held.flags.aligned
    assert held.dtype.isnative
    assert held.dtype == array.dtype.newbyteorder("=")
    assert held.tolist() == array.tolist()
    assert batch["a"] is held


def test_writes_through_a_slice_reach_the_original() -> None:
    batch = SampleBatch(a=np.arange(5), b=torch.arange(5))
    batch[:3]["a"][0] = 100
    batch[2:][1:]["a"][0] = 200
    batch[1:]["b"][0] = 300
    assert batch["a"].tolist() == [100, 1, 2, 200, 4]
    assert batch["b"].tolist() == [0, 300, 2, 3, 4]


def test_writes_through_a_shallow_copy_reach_the_original() -> None:
    batch = SampleBatch(a=np.arange(3))
    shallow = batch.copy(shallow=True)
    shallow["a"][0] = 100
    assert batch["a"].tolist() == [100, 1, 2]


def test_values_and_items_return_the_same_objects() -> None:
    batch = SampleBatch(a=np.arange(3), b=torch.zeros(3), infos=[{}, {}, {}])
    assert all(values is batch[name] for name, values in batch.items())
    assert all(values is batch[name] for name, values in zip(batch, batch.values(), strict=True))
    part = batch[1:]
    assert all(values is part[name] for name, values in part.items())


# -- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths", [[2, 3, 1], np.array([2, 3, 1]), np.array([[2], [3], [1]], np.int32), torch.tensor([2, 3, 1])]
)
def test_the_length_is_the_sum_of_seq_lens(lengths: object) -> None:
    batch = SampleBatch(a=np.arange(6), state_in_0=np.zeros((3, 4)), seq_lens=lengths)
    assert len(batch) == 6
    assert type(batch.count) is int
    padded = SampleBatch(a=np.arange(9), seq_lens=lengths, _zero_padded=True, _max_seq_len=3)
    assert len(padded) == 6


def test_the_length_is_of_the_first_countable_column() -> None:
    with pytest.raises(ColumnLengthError, match="'infos' must have 2 rows as 'a' has, got 3"):
        SampleBatch(infos=[{}, {}, {}], a=[1, 2])
    with pytest.raises(ColumnLengthError, match="'state_in_0' must have 2 rows as 'a' has, got 3"):
        SampleBatch(state_in_0=[1.0, 2.0, 3.0], state_out_0=[1.0, 2.0], a=[1, 2])


def test_infos_and_states_alone_count_no_steps() -> None:
    batch = SampleBatch(infos=[{"i": 0}, {"i": 1}], state_in_0=np.zeros((2, 3)))
    assert len(batch) == len(SampleBatch(infos=[{}, {}])) == 0
    assert list(batch.rows()) == batch.timeslices(1) == []
    assert len(batch[0:2]["infos"]) == 0
    assert batch.copy() == batch.shuffle(rng=0) == batch
    assert [info["i"] for info in batch["infos"]] == [0, 1]
    with pytest.raises(ColumnLengthError, match="'obs' must have 2 rows as 'infos' has, got 3"):
        batch["obs"] = np.zeros(3)
    batch["obs"] = np.zeros(2)
    assert len(batch) == 2
    del batch["obs"]
    assert len(batch) == len(SampleBatch(obs=[1, 2], infos=[{}, {}]).drop("obs")) == 0


def test_columns_that_count_no_steps_are_joined_completely() -> None:
    joined = concat_samples([SampleBatch(), SampleBatch(infos=[{"i": 0}]), SampleBatch(infos=[{"i": 1}, {"i": 2}])])
    assert (len(joined), joined["infos"].tolist()) == (0, [{"i": 0}, {"i": 1}, {"i": 2}])
    # Beside batches that have steps they are empty.
    assert list(concat_samples([SampleBatch(infos=[{}]), SampleBatch(a=[1])])) == ["a"]


def test_columns_that_count_no_steps_are_sent_completely() -> None:
    state = SampleBatch(state_in_0=np.arange(6.0).reshape(2, 3))
    producer, consumer = channel(1 << 16)
    with producer, consumer:
        for _ in range(2):
            producer.send(state)
            received = consumer.recv()
            assert (len(received), received["state_in_0"].tolist()) == (0, [[0, 1, 2], [3, 4, 5]])
            del received
    assert pickle.loads(pickle.dumps(state)) == state == SampleBatch.from_arrow(state.to_arrow())


def test_every_column_must_agree_with_the_length() -> None:
    with pytest.raises(ColumnLengthError, match="'c' must have 2 rows as 'a' has, got 1"):
        SampleBatch(a=[1, 2], b=[3, 4], c=[5])
    with pytest.raises(ColumnLengthError, match=r"'a' must have 3 rows to match 'seq_lens', got 4"):
        SampleBatch(a=[1, 2, 3, 4], seq_lens=[1, 2])
    with pytest.raises(TypeError, match="'_dont_check_lens'"):
        SampleBatch({"a": [1, 2], "b": [1]}, _dont_check_lens=True)


# -- sequences --------------------------------------------------------------------------------------------------------


def test_brackets_snap_to_sequences() -> None:
    batch = SampleBatch(a=np.arange(6), seq_lens=[2, 3, 1])
    assert len(batch[:3]) == 2
    assert batch[:3]["seq_lens"].tolist() == [2]
    assert [batch[i : i + 2]["a"].tolist() for i in range(0, 6, 2)] == [[0, 1], [], [2, 3, 4, 5]]


def test_consecutive_slices_neither_lose_nor_repeat_rows() -> None:
    batch = SampleBatch(a=np.arange(6), seq_lens=[2, 3, 1])
    for i in range(7):
        for j in range(i, 7):
            parts = [batch[:i], batch[i:j], batch[j:]]
            assert np.concatenate([part["a"] for part in parts]).tolist() == list(range(6))
            assert np.concatenate([part["seq_lens"] for part in parts]).tolist() == [2, 3, 1]


def test_slice_cuts_exactly_and_mends_lengths_and_states() -> None:
    batch = SampleBatch(a=np.arange(6), state_in_0=np.array([10.0, 20.0, 30.0]), seq_lens=[2, 3, 1])
    part = batch.slice(1, 4)
    assert part["a"].tolist() == [1, 2, 3]
    assert part["seq_lens"].tolist() == [1, 2]
    assert part["state_in_0"].tolist() == [10.0, 20.0]
    assert batch["seq_lens"].tolist() == [2, 3, 1]


def test_empty_and_stepped_slices_work() -> None:
    batch = SampleBatch(a=np.arange(6))
    assert batch[0:0]["a"].tolist() == []
    assert batch[::2]["a"].tolist() == [0, 2, 4]
    assert batch[::-1]["a"].tolist() == [5, 4, 3, 2, 1, 0]
    sequences = SampleBatch(a=np.arange(6), seq_lens=[2, 3, 1])
    assert sequences[::2]["a"].tolist() == [0, 2, 4]
    assert sequences[::2]["seq_lens"].tolist() == [1, 2]


def test_seq_lens_given_as_a_list_become_int32() -> None:
    assert SampleBatch(a=[1, 2, 3], seq_lens=[1, 2])["seq_lens"].dtype == np.int32
    given = np.array([1, 2])
    assert SampleBatch(a=[1, 2, 3], seq_lens=given)["seq_lens"] is given


@pytest.mark.parametrize("nothing", [None, [], np.array([], np.int32)])
def test_empty_seq_lens_mean_none(nothing: object) -> None:
    batch = SampleBatch(a=[1, 2, 3], seq_lens=nothing)
    assert "seq_lens" not in batch
    assert len(batch) == 3
    assert batch.max_seq_len is None


def test_rows_have_seq_lens_one() -> None:
    batch = SampleBatch(a=np.arange(3), state_in_0=np.array([7.0, 8.0]), seq_lens=[1, 2])
    rows = list(batch.rows())
    assert [row["seq_lens"] for row in rows] == [1, 1, 1]
    assert [row["state_in_0"] for row in rows] == [7.0, 8.0, 8.0]
    assert list(batch.right_zero_pad(4).rows()) == rows


def test_a_negative_start_pads_zeros_on_the_left() -> None:
    assert SampleBatch(a=[1, 2, 3]).slice(-2, 2)["a"].tolist() == [0, 0, 1, 2]
    padded = SampleBatch(a=[1, 2, 3], state_in_0=[7.0, 8.0], seq_lens=[1, 2]).slice(-2, 2)
    assert padded["a"].tolist() == [0, 0, 1, 2]
    assert padded["seq_lens"].tolist() == [3, 1]
    assert padded["state_in_0"].tolist() == [7.0, 8.0]


# -- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "dones"])
def test_split_by_episode_derives_dones(key: str | None) -> None:
    terminated = [False, True, False, False, False]
    truncated = [False, False, False, True, False]
    batch = SampleBatch(a=np.arange(5), terminateds=terminated, truncateds=truncated)
    assert [part["a"].tolist() for part in batch.split_by_episode(key)] == [[0, 1], [2, 3], [4]]


def test_split_by_episode_prefers_eps_id_to_dones() -> None:
    batch = SampleBatch(a=np.arange(3), dones=[1, 1, 1], eps_id=[5, 5, 4])
    assert [part["a"].tolist() for part in batch.split_by_episode()] == [[0, 1], [2]]


def test_a_dones_column_that_was_given_is_kept() -> None:
    batch = SampleBatch(terminateds=[True, False], dones=[False, True])
    assert batch["dones"].tolist() == [False, True]
    batch["dones"] = [False, False]
    assert batch["dones"].tolist() == [False, False]
    del batch["dones"]
    assert batch["dones"].tolist() == [True, False]


def test_derived_dones_are_no_column() -> None:
    batch = SampleBatch(terminateds=[True, False])
    assert "dones" not in batch
    assert list(batch) == ["terminateds"]
    assert batch.get("dones").tolist() == [True, False]


# -- construction -----------------------------------------------------------------------------------------------------


def test_constructor_keywords_set_the_flags() -> None:
    batch = SampleBatch(
        {"a": np.zeros(8)},
        seq_lens=[3, 2],
        _time_major=False,
        _max_seq_len=4,
        _zero_padded=True,
        _is_training=True,
        _num_grad_updates=2.5,
    )
    assert batch.time_major is False
    assert batch.max_seq_len == 4
    assert batch.zero_padded is True
    assert batch.is_training is True
    assert batch.num_grad_updates == 2.5
    plain = SampleBatch(a=[1])
    assert plain.time_major is None
    assert plain.max_seq_len is None
    assert plain.zero_padded is False
    assert plain.is_training is False
    assert plain.num_grad_updates is None


def test_max_seq_len_defaults_to_the_longest_sequence() -> None:
    assert SampleBatch(a=np.zeros(6), seq_lens=[2, 3, 1]).max_seq_len == 3


# -- concat -----------------------------------------------------------------------------------------------------------


def test_concat_samples_skips_empty_batches() -> None:
    joined = concat_samples([SampleBatch(), SampleBatch(a=[1]), SampleBatch(b=np.empty(0)), SampleBatch(a=[2])])
    assert joined == SampleBatch(a=[1, 2])
    assert concat_samples([]) == concat_samples([SampleBatch(), SampleBatch()]) == SampleBatch()
    assert concat_samples([SampleBatch(), SampleBatch(b=np.empty(0))]) == SampleBatch()


def test_one_multi_agent_batch_makes_the_result_one() -> None:
    joined = concat_samples([SampleBatch(a=[1, 2]), MultiAgentBatch({"p": SampleBatch(a=[3])}, 1), SampleBatch(a=[4])])
    assert isinstance(joined, MultiAgentBatch)
    assert {policy: rows["a"].tolist() for policy, rows in joined.items()} == {"default_policy": [1, 2, 4], "p": [3]}
    assert joined.count == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda: SampleBatch(a=np.arange(4)),
        lambda: SampleBatch(a=np.arange(4), seq_lens=[2, 2], _zero_padded=True, _max_seq_len=2),
        lambda: SampleBatch(a=np.arange(4).reshape(2, 2), seq_lens=[2, 2], _time_major=True),
    ],
    ids=["without seq_lens", "zero_padded", "time_major"],
)
def test_batches_with_different_sequence_layout_are_not_joined(other: object) -> None:
    batch = SampleBatch(a=np.arange(4), seq_lens=[1, 3])
    for pair in ([batch, other()], [other(), batch]):
        with pytest.raises(ValueError, match="concatenated") as caught:
            concat_samples(pair)
        assert isinstance(caught.value, SequenceError)


def test_num_grad_updates_are_averaged_by_rows() -> None:
    joined = concat_samples(
        [SampleBatch(a=np.zeros(30), _num_grad_updates=2), SampleBatch(a=np.zeros(10), _num_grad_updates=4)]
    )
    assert joined.num_grad_updates == 2.5


def test_concat_names_differing_columns() -> None:
    with pytest.raises(ValueError, match="'b', 'c'") as caught:
        concat_samples([SampleBatch(a=[1], b=[1]), SampleBatch(a=[1], c=[1])])
    assert isinstance(caught.value, ColumnMismatchError)


def test_concat_widens_dtypes_only_without_loss() -> None:
    joined = concat_samples([SampleBatch(a=np.array([1], np.int32)), SampleBatch(a=np.array([2], np.int64))])
    assert joined["a"].dtype == np.int64
    joined = concat_samples([SampleBatch(a=np.array([1], np.float64)), SampleBatch(a=np.array([2], np.float32))])
    assert joined["a"].dtype == np.float64
    with pytest.raises(ValueError, match=r"'a'.*int64 and float64"):
        concat_samples([SampleBatch(a=[1]), SampleBatch(a=[2.5])])


def test_num_grad_updates_stay_unknown_where_no_batch_knows() -> None:
    assert concat_samples([SampleBatch(a=[1]), SampleBatch(a=[2])]).num_grad_updates is None


# -- what RLlib has beside --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["set_get_interceptor", "accessed_keys", "added_keys", "deleted_keys"])
def test_reading_a_batch_is_not_watched(name: str) -> None:
    assert not hasattr(SampleBatch(a=[1]), name)


def test_a_batch_is_pickled_by_every_protocol() -> None:
    batch = SampleBatch(a=np.arange(3), infos=[{"x": 1}, {}, None])
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(batch, protocol)) == batch

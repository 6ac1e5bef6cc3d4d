"""Behaviour of SampleBatch and MultiAgentBatch: documented examples of RLlib, and intended differences."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from samplebatch import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch, channel, concat_samples
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, SequenceError
from tests.optional import torch


def plain(batch: SampleBatch) -> dict[str, Any]:
    """Return a batch as a dict of lists, like the examples of the specification."""
    return {name: values.tolist() for name, values in batch.items()}


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
def test_an_array_in_another_layout_is_copied_once(array: np.ndarray) -> None:
    batch = SampleBatch(a=array)
    column = batch["a"]
    assert column.flags.c_contiguous
    assert column.flags.aligned
    assert column.dtype.isnative
    assert column.dtype == array.dtype.newbyteorder("=")
    assert column.tolist() == array.tolist()
    assert batch["a"] is column


def test_writes_to_a_slice_change_the_original() -> None:
    batch = SampleBatch(a=np.arange(5), b=torch.arange(5))
    batch[:3]["a"][0] = 100
    batch[2:][1:]["a"][0] = 200
    batch[1:]["b"][0] = 300
    assert batch["a"].tolist() == [100, 1, 2, 200, 4]
    assert batch["b"].tolist() == [0, 300, 2, 3, 4]


def test_only_shallow_copies_share_memory_with_the_original() -> None:
    batch = SampleBatch(a=np.arange(3))
    deep, shallow = batch.copy(), batch.copy(shallow=True)
    shallow["a"][0] = 100
    assert plain(batch) == {"a": [100, 1, 2]}
    batch["a"][1] = 200
    assert plain(shallow) == {"a": [100, 200, 2]}
    assert plain(deep) == {"a": [0, 1, 2]}


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


def test_infos_and_states_do_not_count_as_steps() -> None:
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


def test_brackets_select_sequences_that_end_in_the_range() -> None:
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


def test_slice_splits_sequences_and_adjusts_lengths_and_states() -> None:
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
    original = np.array([1, 2])
    assert SampleBatch(a=[1, 2, 3], seq_lens=original)["seq_lens"] is original


@pytest.mark.parametrize("nothing", [None, [], np.array([], np.int32)])
def test_empty_seq_lens_count_as_no_sequences(nothing: object) -> None:
    batch = SampleBatch(a=[1, 2, 3], seq_lens=nothing)
    assert "seq_lens" not in batch
    assert len(batch) == 3
    assert batch.max_seq_len is None


def test_rows_have_seq_lens_one() -> None:
    documented = SampleBatch({"a": [1, 2, 3], "b": [4, 5, 6], "seq_lens": [1, 2]})
    assert list(documented.rows()) == [
        {"a": 1, "b": 4, "seq_lens": 1},
        {"a": 2, "b": 5, "seq_lens": 1},
        {"a": 3, "b": 6, "seq_lens": 1},
    ]
    batch = SampleBatch(a=np.arange(3), state_in_0=np.array([7.0, 8.0]), seq_lens=[1, 2])
    rows = list(batch.rows())
    assert [row["seq_lens"] for row in rows] == [1, 1, 1]
    assert [row["state_in_0"] for row in rows] == [7.0, 8.0, 8.0]
    assert list(batch.right_zero_pad(4).rows()) == rows


def test_a_negative_start_pads_zeros_on_the_left() -> None:
    documented = SampleBatch({"a": [1, 2, 3], "b": [[1.0], [2.0], [3.0]]})
    assert plain(documented.slice(-2, 2)) == {"a": [0, 0, 1, 2], "b": [[0.0], [0.0], [1.0], [2.0]]}
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


def test_an_explicit_dones_column_is_preserved() -> None:
    batch = SampleBatch(terminateds=[True, False], dones=[False, True])
    assert batch["dones"].tolist() == [False, True]
    batch["dones"] = [False, False]
    assert batch["dones"].tolist() == [False, False]
    del batch["dones"]
    assert batch["dones"].tolist() == [True, False]


def test_derived_dones_are_not_stored_as_a_column() -> None:
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


def test_one_multi_agent_batch_gives_a_multi_agent_result() -> None:
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


def test_concat_errors_list_the_differing_columns() -> None:
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


def test_num_grad_updates_are_unknown_if_no_batch_has_them() -> None:
    assert concat_samples([SampleBatch(a=[1]), SampleBatch(a=[2])]).num_grad_updates is None


# -- what RLlib has beside --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["set_get_interceptor", "accessed_keys", "added_keys", "deleted_keys"])
def test_rllib_attributes_for_access_tracking_do_not_exist(name: str) -> None:
    assert not hasattr(SampleBatch(a=[1]), name)


def test_a_batch_is_pickled_by_every_protocol() -> None:
    batch = SampleBatch(a=np.arange(3), infos=[{"x": 1}, {}, None])
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(batch, protocol)) == batch


# -- documented examples -----------------------------------------------------------------------------------------------


def test_a_batch_of_three_samples() -> None:
    batch = SampleBatch({"obs": [1, 2, 3], "reward": [0, -1, 1]})
    assert len(batch) == 3
    assert plain(batch) == {"obs": [1, 2, 3], "reward": [0, -1, 1]}


def test_the_typical_batch_is_summarised_by_dtype_shape_and_statistics() -> None:
    batch = SampleBatch(
        action_logp=np.linspace(-0.701, -0.685, 200, dtype=np.float32),
        actions=np.arange(200) % 2,
        dones=np.arange(200) % 20 == 19,
        infos=[{} for _ in range(200)],
        new_obs=np.full((200, 4), 2.259, np.float32),
        obs=np.full((200, 4), -2.46, np.float32),
        rewards=np.ones(200, np.float32),
        t=np.arange(200) % 35,
    )
    lines = {line.split()[0]: line.split() for line in str(batch).splitlines()[1:]}
    assert lines["column"] == ["column", "dtype", "shape", "min", "max", "mean"]
    assert lines["rewards"] == ["rewards", "float32", "(200,)", "1", "1", "1"]
    assert lines["actions"] == ["actions", "int64", "(200,)", "0", "1", "0.5"]
    assert lines["dones"] == ["dones", "bool", "(200,)", "0", "1", "0.05"]
    assert lines["obs"] == ["obs", "float32", "(200,", "4)", "-2.46", "-2.46", "-2.46"]
    assert lines["infos"][:2] == ["infos", "object"]
    assert lines["action_logp"][3:5] == ["-0.701", "-0.685"]
    assert lines["t"][3:5] == ["0", "34"]


def test_agent_steps_and_env_steps_are_the_length() -> None:
    batch = SampleBatch(a=[1, 2, 3])
    assert batch.agent_steps() == batch.env_steps() == len(batch) == 3


def test_concat() -> None:
    b1 = SampleBatch({"a": np.array([1, 2])})
    b2 = SampleBatch({"a": np.array([3, 4, 5])})
    joined = b1.concat(b2)
    assert plain(joined) == {"a": [1, 2, 3, 4, 5]}
    assert plain(b1) == {"a": [1, 2]}


def test_columns() -> None:
    batch = SampleBatch({"a": [1], "b": [2], "c": [3]})
    assert [values.tolist() for values in batch.columns(["a", "b"])] == [[1], [2]]
    assert [values.tolist() for values in batch.columns(["b", "a"])] == [[2], [1]]


def test_shuffle_is_in_place_and_returns_the_batch() -> None:
    batch = SampleBatch({"a": [1, 2, 3, 4]})
    orders = set()
    for _ in range(50):
        assert batch.shuffle() is batch
        assert sorted(batch["a"].tolist()) == [1, 2, 3, 4]
        orders.add(tuple(batch["a"].tolist()))
    assert len(orders) > 1


def test_shuffle_rejects_sequences() -> None:
    with pytest.raises(ValueError, match="padded"):
        SampleBatch({"a": [1, 2, 3], "seq_lens": [1, 2]}).shuffle()


@pytest.mark.parametrize(
    ("columns", "episodes"),
    [
        (
            {"a": [1, 2, 3], "eps_id": [0, 0, 1]},
            [{"a": [1, 2], "eps_id": [0, 0]}, {"a": [3], "eps_id": [1]}],
        ),
        (
            {"a": [1, 2, 3, 4, 5], "dones": [0, 0, 1, 0, 1]},
            [{"a": [1, 2, 3], "dones": [0, 0, 1]}, {"a": [4, 5], "dones": [0, 1]}],
        ),
        (
            {"a": [1, 2, 3, 4, 5], "dones": [0, 0, 1, 0, 0]},
            [{"a": [1, 2, 3], "dones": [0, 0, 1]}, {"a": [4, 5], "dones": [0, 0]}],
        ),
        (
            {"a": [1, 2, 3, 4, 5], "dones": [0, 0, 0, 0, 0]},
            [{"a": [1, 2, 3, 4, 5], "dones": [0, 0, 0, 0, 0]}],
        ),
    ],
    ids=["eps_id", "dones", "unfinished", "never done"],
)
def test_split_by_episode(columns: dict[str, list[int]], episodes: list[dict[str, list[int]]]) -> None:
    assert [plain(part) for part in SampleBatch(columns).split_by_episode()] == episodes


def test_split_by_episode_uses_the_requested_key() -> None:
    batch = SampleBatch({"a": [1, 2, 3], "eps_id": [0, 0, 1], "dones": [1, 0, 0]})
    assert [part["a"].tolist() for part in batch.split_by_episode("dones")] == [[1], [2, 3]]
    assert [part["a"].tolist() for part in batch.split_by_episode(key="eps_id")] == [[1, 2], [3]]


def test_split_by_episode_needs_a_column_to_split_by() -> None:
    with pytest.raises(KeyError, match="dones"):
        SampleBatch({"a": [1, 2, 3]}).split_by_episode()


def test_slice_does_not_copy() -> None:
    batch = SampleBatch({"a": np.arange(6)})
    part = batch.slice(1, 4)
    assert plain(part) == {"a": [1, 2, 3]}
    assert np.shares_memory(part["a"], batch["a"])


@pytest.mark.parametrize("how", [{"size": 2}, {"k": 2}])
def test_timeslices_of_a_size(how: dict[str, int]) -> None:
    parts = SampleBatch(a=[1, 2, 3, 4, 5, 6]).timeslices(**how)
    assert [plain(part) for part in parts] == [{"a": [1, 2]}, {"a": [3, 4]}, {"a": [5, 6]}]


def test_timeslices_of_a_number() -> None:
    parts = SampleBatch(a=[1, 2, 3, 4, 5, 6]).timeslices(num_slices=2)
    assert [plain(part) for part in parts] == [{"a": [1, 2, 3]}, {"a": [4, 5, 6]}]


def test_right_zero_pad() -> None:
    batch = SampleBatch({"a": [1, 2, 3], "seq_lens": [1, 2]})
    assert batch.right_zero_pad(max_seq_len=4) is batch
    assert plain(batch) == {"a": [1, 0, 0, 0, 2, 3, 0, 0], "seq_lens": [1, 2]}
    assert batch.zero_padded
    assert batch.max_seq_len == 4


def test_right_zero_pad_does_not_change_states() -> None:
    batch = SampleBatch({"a": [1, 2, 3], "state_in_0": [1.0, 3.0], "seq_lens": [1, 2]})
    assert plain(batch.right_zero_pad(max_seq_len=5)) == {
        "a": [1, 0, 0, 0, 0, 2, 3, 0, 0, 0],
        "state_in_0": [1.0, 3.0],
        "seq_lens": [1, 2],
    }


def test_right_zero_pad_pads_states_when_they_are_not_excluded() -> None:
    batch = SampleBatch({"a": [1, 2, 3], "state_in_0": [1.0, 3.0], "seq_lens": [1, 2]})
    assert plain(batch.right_zero_pad(max_seq_len=2, exclude_states=False)) == {
        "a": [1, 0, 2, 3],
        "state_in_0": [1.0, 0.0, 3.0, 0.0],
        "seq_lens": [1, 2],
    }


def test_right_zero_pad_needs_seq_lens() -> None:
    with pytest.raises(ValueError, match="seq_lens"):
        SampleBatch({"a": [1, 2, 3]}).right_zero_pad(4)


def test_size_bytes_counts_all_columns() -> None:
    batch = SampleBatch(a=np.zeros((3, 2), np.float32), b=np.zeros(3, np.int64), c=np.zeros(3, bool))
    assert batch.size_bytes() == 3 * 2 * 4 + 3 * 8 + 3


def test_get() -> None:
    batch = SampleBatch(a=[1, 2])
    assert batch.get("a") is batch["a"]
    assert batch.get("b") is None
    assert batch.get("b", default=7) == 7


def test_as_multi_agent_uses_the_default_policy() -> None:
    batch = SampleBatch(a=[1, 2])
    wrapped = batch.as_multi_agent()
    assert isinstance(wrapped, MultiAgentBatch)
    assert list(wrapped.policy_batches) == [DEFAULT_POLICY_ID] == ["default_policy"]
    assert wrapped[DEFAULT_POLICY_ID] is batch
    assert wrapped.count == 2


@pytest.mark.parametrize("bulk", [False, True])
def test_compress_and_decompress_obs_and_new_obs_in_place(bulk: bool) -> None:
    columns = {"obs": np.ones((4, 3)), "new_obs": np.zeros((4, 3)), "rewards": np.ones(4)}
    batch = SampleBatch({name: values.copy() for name, values in columns.items()})
    assert batch.compress(bulk=bulk) is batch
    assert batch.column("obs").kind == batch.column("new_obs").kind == "compressed"
    assert batch.column("rewards").kind == "tensor"
    assert batch.decompress_if_needed() is batch
    assert plain(batch) == {name: values.tolist() for name, values in columns.items()}


def test_compress_only_the_given_columns() -> None:
    batch = SampleBatch(obs=np.ones(4), rewards=np.ones(4)).compress(columns={"rewards"})
    assert [batch.column(name).kind for name in ("obs", "rewards")] == ["tensor", "compressed"]
    batch.decompress_if_needed()
    assert batch.column("rewards").kind == "compressed"
    batch.decompress_if_needed(columns={"rewards"})
    assert batch["rewards"].tolist() == [1, 1, 1, 1]


def test_single_step_input_last_differs_from_minus_one() -> None:
    from samplebatch import ViewRequirement

    batch = SampleBatch(obs=[1, 2, 3], new_obs=[2, 3, 4])
    assert plain(batch.get_single_step_input_dict({"obs": ViewRequirement()})) == {"obs": [4], "seq_lens": [1]}
    assert plain(batch.get_single_step_input_dict({"obs": ViewRequirement()}, index=-1)) == {
        "obs": [3],
        "seq_lens": [1],
    }
    assert plain(batch.get_single_step_input_dict({"obs": ViewRequirement()}, index=1)) == {
        "obs": [2],
        "seq_lens": [1],
    }


# -- MultiAgentBatch --------------------------------------------------------------------------------------------------


@pytest.fixture
def agents() -> MultiAgentBatch:
    """Return agent 1 at times 1, 2 and 3, agent 2 at 1 and 3, agent 3 at 3."""
    present = {"agent1": [1, 2, 3], "agent2": [1, 3], "agent3": [3]}
    return MultiAgentBatch(
        {
            agent: SampleBatch(obs=np.array([f"a{agent[-1]}t{t}" for t in times]), t=times, eps_id=[0] * len(times))
            for agent, times in present.items()
        },
        env_steps=3,
    )


def observations(batch: MultiAgentBatch) -> list[str]:
    return [obs for rows in batch.policy_batches.values() for obs in rows["obs"].tolist()]


def test_policy_batches_and_steps(agents: MultiAgentBatch) -> None:
    assert list(agents.policy_batches) == ["agent1", "agent2", "agent3"]
    assert agents.count == agents.env_steps() == 3
    assert agents.agent_steps() == 6


def test_timeslices_of_one_step(agents: MultiAgentBatch) -> None:
    parts = agents.timeslices(1)
    assert [observations(part) for part in parts] == [["a1t1", "a2t1"], ["a1t2"], ["a1t3", "a2t3", "a3t3"]]
    assert [part.count for part in parts] == [1, 1, 1]
    assert all(isinstance(part, MultiAgentBatch) for part in parts)


def test_timeslices_of_two_steps(agents: MultiAgentBatch) -> None:
    parts = agents.timeslices(2)
    assert [observations(part) for part in parts] == [["a1t1", "a1t2", "a2t1"], ["a1t3", "a2t3", "a3t3"]]
    assert [part.count for part in parts] == [2, 1]


def test_wrap_as_needed_returns_the_only_default_policy() -> None:
    batch = SampleBatch(a=[1, 2])
    assert MultiAgentBatch.wrap_as_needed({DEFAULT_POLICY_ID: batch}, env_steps=2) is batch


@pytest.mark.parametrize("policies", [["p"], ["p", "q"], [DEFAULT_POLICY_ID, "p"]])
def test_wrap_as_needed_wraps_other_policies(policies: list[str]) -> None:
    batches = {policy: SampleBatch(a=[1, 2]) for policy in policies}
    wrapped = MultiAgentBatch.wrap_as_needed(batches, env_steps=2)
    assert isinstance(wrapped, MultiAgentBatch)
    assert wrapped.policy_batches == batches
    assert wrapped.count == 2


def test_wrap_as_needed_without_policies_returns_an_empty_batch() -> None:
    wrapped = MultiAgentBatch.wrap_as_needed({}, env_steps=0)
    assert isinstance(wrapped, MultiAgentBatch)
    assert wrapped.policy_batches == {}
    assert wrapped.count == wrapped.agent_steps() == 0


def test_copy_is_deep(agents: MultiAgentBatch) -> None:
    copied = agents.copy()
    assert copied == agents
    agents["agent1"]["t"][0] = 100
    assert copied["agent1"]["t"].tolist() == [1, 2, 3]


def test_size_bytes_counts_all_policies(agents: MultiAgentBatch) -> None:
    assert agents.size_bytes() == sum(batch.size_bytes() for batch in agents.policy_batches.values()) > 0


@pytest.mark.parametrize("bulk", [False, True])
def test_compress_and_decompress_every_policy(bulk: bool) -> None:
    batch = MultiAgentBatch({"p": SampleBatch(obs=np.ones((3, 2))), "q": SampleBatch(obs=np.zeros((2, 2)))}, 3)
    before = batch.copy()
    batch.compress(bulk=bulk)
    assert [rows.column("obs").kind for rows in batch.policy_batches.values()] == ["compressed", "compressed"]
    assert batch.decompress_if_needed() is batch
    assert batch == before


def test_as_multi_agent_of_a_multi_agent_batch_returns_it(agents: MultiAgentBatch) -> None:
    assert agents.as_multi_agent() is agents

"""The examples of the specification of SampleBatch and MultiAgentBatch, each with its documented result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch


def plain(batch: SampleBatch) -> dict[str, Any]:
    """Return a batch as the specification prints it: a dict of lists."""
    return {name: values.tolist() for name, values in batch.items()}


# -- SampleBatch ------------------------------------------------------------------------------------------------------


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


def test_copy() -> None:
    batch = SampleBatch(a=[1, 2])
    deep, shallow = batch.copy(), batch.copy(shallow=True)
    batch["a"][0] = 100
    assert plain(deep) == {"a": [1, 2]}
    assert plain(shallow) == {"a": [100, 2]}


def test_rows_set_seq_lens_to_one() -> None:
    batch = SampleBatch({"a": [1, 2, 3], "b": [4, 5, 6], "seq_lens": [1, 2]})
    assert list(batch.rows()) == [
        {"a": 1, "b": 4, "seq_lens": 1},
        {"a": 2, "b": 5, "seq_lens": 1},
        {"a": 3, "b": 6, "seq_lens": 1},
    ]


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


def test_split_by_episode_uses_the_key_that_is_asked_for() -> None:
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


def test_slice_with_a_negative_start_pads_zeros_on_the_left() -> None:
    batch = SampleBatch({"a": [1, 2, 3], "b": [[1.0], [2.0], [3.0]]})
    assert plain(batch.slice(-2, 2)) == {"a": [0, 0, 1, 2], "b": [[0.0], [0.0], [1.0], [2.0]]}


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


def test_right_zero_pad_leaves_states_as_they_are() -> None:
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


def test_wrap_as_needed_of_nothing_is_an_empty_multi_agent_batch() -> None:
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


def test_as_multi_agent_is_the_batch_itself(agents: MultiAgentBatch) -> None:
    assert agents.as_multi_agent() is agents

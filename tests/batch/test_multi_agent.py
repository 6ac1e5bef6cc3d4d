"""MultiAgentBatch: policies and their batches, and time slices in lockstep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch, concat_samples
from samplebatch.errors import ColumnNotFoundError, ColumnTypeError, PolicyNotFoundError
from tests.batch.every_kind import with_every_kind
from tests.optional import torch


def one_policy(**columns: Any) -> MultiAgentBatch:
    return MultiAgentBatch({"p": SampleBatch(columns)}, 1)


def rows_of(parts: list[MultiAgentBatch], column: str = "a") -> list[dict[str, list[Any]]]:
    return [{policy: batch[column].tolist() for policy, batch in part.items()} for part in parts]


# -- the mapping ------------------------------------------------------------------------------------------------------


def test_policies_are_accessed_by_id() -> None:
    p, q = SampleBatch(a=[1, 2]), SampleBatch(b=[3])
    options = {"p": p, "q": q}
    batch = MultiAgentBatch(options, env_steps=2)
    assert batch["p"] is p
    assert batch.policy_batches is options
    assert list(batch) == list(batch.keys()) == ["p", "q"]
    assert dict(batch.items()) == options
    assert list(batch.values()) == list(options.values())
    assert "p" in batch
    assert "r" not in batch
    assert len(batch) == batch.count == batch.env_steps() == 2
    assert batch.agent_steps() == 3


def test_a_misspelt_policy_lists_similar_ids() -> None:
    with pytest.raises(PolicyNotFoundError, match="no policy 'walke'; did you mean 'walker'"):
        MultiAgentBatch({"walker": SampleBatch(a=[1])}, 1)["walke"]
    with pytest.raises(KeyError):
        MultiAgentBatch({}, 0)["p"]


@pytest.mark.parametrize("value", [{"a": [1]}, None, [1]], ids=str)
def test_only_batches_are_accepted(value: Any) -> None:
    with pytest.raises(ColumnTypeError, match=f"policy 'p' must have a SampleBatch, got a {type(value).__name__}"):
        MultiAgentBatch({"p": value}, 1)


def test_steps_count_environment_steps_and_agent_steps() -> None:
    padded = SampleBatch(a=[1, 2, 3], seq_lens=[1, 2]).right_zero_pad(4)
    batch = MultiAgentBatch({"p": padded, "q": SampleBatch(a=[1, 2, 3])}, env_steps=3)
    assert batch.env_steps() == 3
    assert batch.agent_steps() == 6


def test_as_multi_agent_of_a_flat_batch() -> None:
    batch = SampleBatch(a=[1, 2, 3])
    wrapped = batch.as_multi_agent("walker")
    assert wrapped["walker"] is batch
    assert wrapped.count == 3
    assert batch.as_multi_agent().as_multi_agent()[DEFAULT_POLICY_ID] is batch


def test_copies_share_nothing() -> None:
    batch = MultiAgentBatch({"p": with_every_kind(3), "q": SampleBatch(a=[1])}, 3)
    copied = batch.copy()
    assert copied == batch
    copied.policy_batches["new"] = SampleBatch(a=[1])
    copied["p"]["flat i8"][0] = 100
    assert "new" not in batch
    assert batch["p"]["flat i8"][0] == 3


# -- time slices ------------------------------------------------------------------------------------------------------


@pytest.fixture
def agents() -> MultiAgentBatch:
    """Return 2 episodes of 3 steps; agent 1 of policy p skips the middle steps, and q's agent is in episode 1 only."""
    p = SampleBatch(
        a=[100, 110, 120, 101, 121, 200, 210, 220, 201, 221],
        t=[0, 1, 2, 0, 2, 0, 1, 2, 0, 2],
        eps_id=[1, 1, 1, 1, 1, 2, 2, 2, 2, 2],
        agent_index=[0, 0, 0, 1, 1, 0, 0, 0, 1, 1],
        infos=[{"row": i} for i in range(10)],
    )
    q = SampleBatch(a=[109, 129], t=[1, 2], eps_id=[1, 1], agent_index=[9, 9], infos=[{"row": 10}, {"row": 11}])
    return MultiAgentBatch({"p": p, "q": q}, env_steps=6)


def test_timeslices_are_ordered_by_episode_time_and_agent(agents: MultiAgentBatch) -> None:
    assert rows_of(agents.timeslices(1)) == [
        {"p": [100, 101]},
        {"p": [110], "q": [109]},
        {"p": [120, 121], "q": [129]},
        {"p": [200, 201]},
        {"p": [210]},
        {"p": [220, 221]},
    ]


def test_timeslices_of_several_steps_may_span_episodes(agents: MultiAgentBatch) -> None:
    parts = agents.timeslices(4)
    assert rows_of(parts) == [
        {"p": [100, 101, 110, 120, 121, 200, 201], "q": [109, 129]},
        {"p": [210, 220, 221]},
    ]
    assert [part.count for part in parts] == [4, 2]
    assert rows_of(agents.timeslices(100)) == [{"p": agents.timeslices(100)[0]["p"]["a"].tolist(), "q": [109, 129]}]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 7])
def test_timeslices_partition_the_rows(agents: MultiAgentBatch, k: int) -> None:
    parts = agents.timeslices(k)
    assert sum(part.count for part in parts) == 6
    assert all(part.count == k for part in parts[:-1])
    joined = concat_samples(parts)
    for policy, batch in agents.items():
        order = np.lexsort((batch["agent_index"], batch["t"], batch["eps_id"]))
        assert joined[policy] == batch.take(order)


def test_timeslices_of_rows_in_order_are_views() -> None:
    batch = one_policy(a=np.arange(6), t=[0, 0, 1, 1, 2, 2], eps_id=[0] * 6, agent_index=[0, 1, 0, 1, 0, 1])
    parts = batch.timeslices(2)
    assert rows_of(parts) == [{"p": [0, 1, 2, 3]}, {"p": [4, 5]}]
    assert all(np.shares_memory(part["p"]["a"], batch["p"]["a"]) for part in parts)


def test_timeslices_without_agent_index_keep_the_order_of_rows() -> None:
    batch = one_policy(a=[1, 2, 3, 4], t=[1, 0, 1, 0], eps_id=[0] * 4)
    assert rows_of(batch.timeslices(1)) == [{"p": [2, 4]}, {"p": [1, 3]}]


@pytest.mark.parametrize(
    ("eps_id", "t"),
    [
        (np.array([2**62 + 1, 2**62 + 1, 2**62, 2**62]), np.array([5, 3, 5, 3])),
        (np.array(["b", "b", "a", "a"]), np.array([0.5, 0.25, 0.5, 0.25])),
        (torch.tensor([7, 7, 3, 3]), torch.tensor([1, 0, 1, 0])),
        (np.array([1, 1, -1, -1], np.int8), np.array([255, 0, 255, 0], np.uint8)),
    ],
    ids=["large", "names", "torch", "small"],
)
def test_episodes_and_times_of_any_kind(eps_id: Any, t: Any) -> None:
    batch = one_policy(a=[1, 2, 3, 4], t=t, eps_id=eps_id)
    assert rows_of(batch.timeslices(1)) == [{"p": [4]}, {"p": [3]}, {"p": [2]}, {"p": [1]}]


@pytest.mark.parametrize("padded", [False, True])
def test_timeslices_of_sequences(padded: bool) -> None:
    rows = SampleBatch(
        a=np.arange(6),
        t=[0, 1, 2, 0, 1, 2],
        eps_id=[5] * 3 + [4] * 3,
        state_in_0=[[1.0], [2.0], [3.0]],
        seq_lens=[2, 1, 3],
    )
    if padded:
        rows.right_zero_pad(4)
    parts = MultiAgentBatch({"p": rows}, 6).timeslices(2)
    assert rows_of(parts) == [{"p": [3, 4]}, {"p": [5, 0]}, {"p": [1, 2]}]
    assert rows_of(parts, "seq_lens") == [{"p": [2]}, {"p": [1, 1]}, {"p": [1, 1]}]
    assert rows_of(parts, "state_in_0") == [{"p": [[3]]}, {"p": [[3], [1]]}, {"p": [[1], [2]]}]


def test_timeslices_of_empty_batches() -> None:
    assert MultiAgentBatch({}, 0).timeslices(1) == []
    assert MultiAgentBatch({"p": SampleBatch()}, 0).timeslices(3) == []
    mixed = MultiAgentBatch({"p": SampleBatch(), "q": SampleBatch(a=[1], t=[0], eps_id=[0])}, 1)
    assert rows_of(mixed.timeslices(1)) == [{"q": [1]}]


@pytest.mark.parametrize("missing", ["t", "eps_id"])
def test_timeslices_need_episode_and_time(missing: str) -> None:
    columns = {"a": [1, 2], "t": [0, 1], "eps_id": [0, 0]}
    del columns[missing]
    with pytest.raises(ColumnNotFoundError, match=f"no column '{missing}'"):
        one_policy(**columns).timeslices(1)


@pytest.mark.parametrize("k", [0, -1])
def test_timeslices_need_at_least_one_step(agents: MultiAgentBatch, k: int) -> None:
    with pytest.raises(ValueError, match=f"k must be a whole number from 1, got {k}"):
        agents.timeslices(k)


def test_timeslices_of_every_kind_of_column() -> None:
    rows = with_every_kind(6)
    rows["t"] = [2, 1, 0, 2, 1, 0]
    rows["eps_id"] = [1, 1, 1, 0, 0, 0]
    parts = MultiAgentBatch({"p": rows}, 6).timeslices(2)
    rows.decompress_if_needed({"squeezed", "squeezed_rows"})
    assert [part["p"] for part in parts] == [rows.take([5, 4]), rows.take([3, 2]), rows.take([1, 0])]

"""Rows of several policies: parts by environment step and by episode, minibatches, order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.errors import ArgumentError, ColumnNotFoundError, ColumnTypeError, SequenceError
from tests.optional import torch


@pytest.fixture
def batch() -> MultiAgentBatch:
    """Return two episodes of 3 and 4 steps: 0 acts with two agents in every step, "guard" acts in odd steps."""
    eps_id, t = np.repeat([5, 9], [3, 4]), np.array([0, 1, 2, 0, 1, 2, 3])
    unusual = t % 2 == 1
    return MultiAgentBatch(
        {
            0: SampleBatch(
                eps_id=eps_id.repeat(2), t=t.repeat(2), agent_index=np.tile([0, 1], 7), obs=np.arange(14) * 1.0
            ),
            "guard": SampleBatch(eps_id=eps_id[unusual], t=t[unusual], obs=np.arange(3) + 100.0),
        },
        env_steps=7,
    )


def shown(batch: MultiAgentBatch) -> dict[Any, list[float]]:
    return {policy: part["obs"].tolist() for policy, part in batch.items()}


def steps_of(part: SampleBatch) -> list[tuple[int, int]]:
    return list(zip(part["eps_id"].tolist(), part["t"].tolist(), strict=True))


# -- slices and assignment --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "count", "expected"),
    [
        (slice(0, 1), 1, {0: [0, 1]}),
        (slice(1, 4), 3, {0: [2, 3, 4, 5, 6, 7], "guard": [100]}),
        (slice(-1, None), 1, {0: [12, 13], "guard": [102]}),
        (slice(None), 7, {0: list(range(14)), "guard": [100, 101, 102]}),
        (slice(1, None, 3), 2, {0: [2, 3, 8, 9], "guard": [100, 101]}),
        (slice(None, None, -3), 3, {0: [12, 13, 6, 7, 0, 1], "guard": [102]}),
        (slice(3, 3), 0, {}),
        (slice(5, 2), 0, {}),
    ],
    ids=str,
)
def test_a_slice_has_the_rows_of_all_agents_at_its_steps(
    batch: MultiAgentBatch, key: slice, count: int, expected: dict[Any, list[float]]
) -> None:
    part = batch[key]
    assert (part.count, shown(part)) == (count, expected)


def test_slices_of_rows_in_order_are_views(batch: MultiAgentBatch) -> None:
    batch[1:4][0]["obs"][0] = -1
    assert batch[0]["obs"][2] == -1


def test_slices_need_to_know_the_steps() -> None:
    for name in ("eps_id", "t"):
        with pytest.raises(ColumnNotFoundError, match=r"no column .(eps_id|t)."):
            MultiAgentBatch({"p": SampleBatch({"obs": [1, 2], name: [0, 1]})}, 2)[:1]


def test_a_policys_batch_can_be_assigned(batch: MultiAgentBatch) -> None:
    other = SampleBatch(obs=[1.0])
    batch["guard"] = other
    batch[7] = other
    assert batch["guard"] is batch[7] is other
    assert list(batch) == [0, "guard", 7]
    with pytest.raises(ColumnTypeError, match="policy 'guard' must have a SampleBatch, got a dict"):
        batch["guard"] = {"obs": [1]}  # type: ignore[assignment]
    with pytest.raises(ColumnTypeError, match="a policy id must be a string or an integer, got a float"):
        batch[1.5] = other
    assert batch["guard"] is other


def test_columns_are_selected_in_every_policy(batch: MultiAgentBatch) -> None:
    part = batch.select("t", "obs")
    assert [list(part) for _, part in part.items()] == [["t", "obs"]] * 2
    assert (part.count, part[0]["obs"] is batch[0]["obs"]) == (7, True)
    with pytest.raises(ColumnNotFoundError, match="agent_index"):
        batch.select("agent_index")


# -- minibatches ------------------------------------------------------------------------------------------------------


def test_minibatches_have_every_row_once_per_epoch(batch: MultiAgentBatch) -> None:
    parts = list(batch.minibatches(4, epochs=2, rng=0))
    assert [(part.count, {policy: len(part) for policy, part in part.items()}) for part in parts] == [
        (4, {0: 4, "guard": 3}),
        (4, {0: 4}),
        (4, {0: 4}),
        (2, {0: 2}),
    ] * 2
    for epoch in (parts[:4], parts[4:]):
        sampled = np.concatenate([part[0]["obs"] for part in epoch])
        assert sorted(sampled) == list(range(14)) != sampled.tolist()
    assert [shown(part) for part in batch.minibatches(8, shuffle=False)] == [
        {0: list(range(8)), "guard": [100, 101, 102]},
        {0: list(range(8, 14))},
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_minibatches_in_lockstep_have_all_rows_of_their_steps(batch: MultiAgentBatch, shuffle: bool) -> None:
    parts = list(batch.minibatches(3, shuffle=shuffle, rng=1, lockstep=True))
    assert [part.count for part in parts] == [3, 3, 1]
    recorded = []
    for part in parts:
        steps = list(dict.fromkeys(steps_of(part[0])))
        assert steps_of(part[0]) == [step for step in steps for _ in range(2)]
        unusual = [step for step in steps if step[1] % 2]
        assert (steps_of(part["guard"]) if "guard" in part else []) == unusual
        recorded += steps
    assert (recorded == sorted(recorded)) is not shuffle
    assert sorted(recorded) == sorted(dict.fromkeys(steps_of(batch[0])))


def test_minibatches_are_converted_for_the_learner(batch: MultiAgentBatch) -> None:
    for lockstep in (False, True):
        part = next(batch.minibatches(3, rng=0, lockstep=lockstep, device="cpu", floats="float32", prefetch=1))
        assert part[0]["obs"].dtype == torch.float32
        assert part[0]["t"].dtype == torch.int64


def test_minibatches_reject_other_sizes(batch: MultiAgentBatch) -> None:
    for arguments in ({"size": 0}, {"size": 2, "epochs": -1}, {"size": 2, "prefetch": 1}):
        with pytest.raises(ArgumentError):
            batch.minibatches(**arguments)


def test_sequences_are_not_split() -> None:
    steps = SampleBatch(a=np.arange(6), eps_id=np.zeros(6, int), t=np.arange(6), seq_lens=[2, 3, 1])
    batch = MultiAgentBatch({"p": steps}, 6)
    assert sorted(part["p"]["a"].tolist() for part in batch.minibatches(3, rng=0)) in (
        [[0, 1], [2, 3, 4], [5]],
        [[0, 1, 5], [2, 3, 4]],
        [[2, 3, 4], [5, 0, 1]],
    )
    assert batch[1:4]["p"]["seq_lens"].tolist() == [1, 2]
    with pytest.raises(SequenceError, match="policy 'p' must be single steps"):
        next(batch.minibatches(3, rng=0, lockstep=True))


# -- order and episodes -----------------------------------------------------------------------------------------------


def test_each_policy_is_shuffled_separately(batch: MultiAgentBatch) -> None:
    before = shown(batch)
    views = batch[0:3]
    assert batch.shuffle(rng=3) is batch
    after = shown(batch)
    assert after[0] != before[0]
    assert {policy: sorted(rows) for policy, rows in after.items()} == before
    assert batch[0]["agent_index"].tolist() == [int(obs) % 2 for obs in after[0]]
    assert shown(views)[0] == before[0][:6]


def test_nothing_is_shuffled_if_a_policy_cannot_be(batch: MultiAgentBatch) -> None:
    before = shown(batch)
    batch["sequences"] = SampleBatch(obs=[1.0, 2.0], seq_lens=[1, 1])
    with pytest.raises(SequenceError):
        batch.shuffle(rng=3)
    assert {policy: rows for policy, rows in shown(batch).items() if policy != "sequences"} == before


def test_episodes_have_the_rows_of_all_policies(batch: MultiAgentBatch) -> None:
    first, other = batch.split_by_episode()
    assert (first.count, shown(first)) == (3, {0: [0, 1, 2, 3, 4, 5], "guard": [100]})
    assert (other.count, shown(other)) == (4, {0: list(range(6, 14)), "guard": [101, 102]})
    first[0]["obs"][0] = -1
    assert batch[0]["obs"][0] == -1


def test_rows_of_interleaved_episodes_become_contiguous() -> None:
    batch = MultiAgentBatch(
        {"p": SampleBatch(eps_id=[9, 5, 9], obs=[0, 1, 2]), "q": SampleBatch(eps_id=[1, 5], obs=[3, 4])}, 3
    )
    assert [(part.count, shown(part)) for part in batch.split_by_episode()] == [
        (2, {"p": [0, 2]}),
        (1, {"p": [1], "q": [4]}),
        (1, {"q": [3]}),
    ]
    assert MultiAgentBatch({}, 0).split_by_episode() == []
    with pytest.raises(ColumnNotFoundError, match="no column 'eps_id'"):
        MultiAgentBatch({"p": SampleBatch(obs=[1])}, 1).split_by_episode()

"""Conversion of steps to sequences: boundaries and initial states."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import SampleBatch
from samplebatch.errors import ArgumentError, SequenceError
from tests.optional import torch
from tests.properties.rllib_modules import load


def lengths(max_seq_len: int, **columns: Any) -> list[int]:
    count = len(next(iter(columns.values())))
    sequences = SampleBatch(a=np.arange(count), **columns).to_sequences(max_seq_len)
    assert sequences["a"].tolist() == list(range(count))
    return list(sequences["seq_lens"].tolist())


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"b": [0] * 5}, [2, 2, 1]),
        ({"eps_id": [7, 7, 7, 8, 8]}, [2, 1, 2]),
        ({"eps_id": [7] * 5, "agent_index": [0, 0, 0, 1, 1]}, [2, 1, 2]),
        # RLlib adds ids up: 7 + 1 and 8 + 0 are one sequence there.
        ({"eps_id": [7, 8, 8, 8, 8], "agent_index": [1, 0, 0, 0, 0]}, [1, 2, 2]),
        ({"eps_id": [7] * 5, "env_id": [0, 1, 1, 1, 1]}, [1, 2, 2]),
        ({"eps_id": [7] * 5, "unroll_id": [0, 0, 0, 1, 1]}, [2, 1, 2]),
        ({"eps_id": [7] * 5, "t": [0, 1, 5, 6, 7]}, [2, 2, 1]),
        ({"terminateds": [0, 0, 0, 0, 1], "truncateds": [1, 0, 0, 0, 0]}, [1, 2, 2]),
        ({"eps_id": [7] * 5, "dones": [1, 0, 0, 0, 1]}, [2, 2, 1]),
    ],
    ids=str,
)
def test_sequences_end_where_steps_are_not_consecutive(columns: dict[str, Any], expected: list[int]) -> None:
    assert lengths(2, **columns) == expected


def test_each_sequence_has_its_first_state() -> None:
    states = np.arange(10.0).reshape(5, 2)
    steps = SampleBatch(
        a=np.arange(5), eps_id=[7, 7, 7, 8, 8], state_in_0=states, state_out_0=states + 2, state_in_1=torch.arange(5)
    )
    sequences = steps.to_sequences(2)
    assert sequences["state_in_0"].tolist() == states[[0, 2, 3]].tolist()
    assert sequences["state_in_1"].tolist() == [0, 2, 3]
    assert sequences["seq_lens"].dtype == np.int32
    assert sequences["a"] is steps["a"]
    assert sequences["state_out_0"] is steps["state_out_0"]
    assert "seq_lens" not in steps
    assert steps[1:4].to_sequences(9)["state_in_1"].tolist() == [1, 3]


def test_each_sequence_has_its_first_nested_state() -> None:
    sequences = SampleBatch(a=[1, 2, 3], state_in={"h": [1.0, 2.0, 3.0], "c": [4.0, 5.0, 6.0]}).to_sequences(2)
    assert sequences["state_in"]["h"].tolist() == [1, 3]
    assert sequences["state_in"]["c"].tolist() == [4, 6]


def test_to_sequences_rejects_sequences_and_invalid_lengths() -> None:
    assert len(SampleBatch(a=[]).to_sequences(3)) == 0
    with pytest.raises(SequenceError, match="requires a batch without sequences"):
        SampleBatch(a=[1, 2], seq_lens=[2]).to_sequences(1)
    for length in (0, -1, 1.5):
        with pytest.raises(ArgumentError, match="max_seq_len must be a whole number from 1"):
            SampleBatch(a=[1, 2]).to_sequences(length)  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[rllib]")
@pytest.mark.filterwarnings("ignore")
@given(
    episodes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1)), min_size=1, max_size=6), width=st.integers(1, 6)
)
def test_padded_sequences_equal_the_sequences_of_rllib(episodes: list[tuple[int, int]], width: int) -> None:
    chop = load("ray.rllib.policy.rnn_sequencing").chop_into_sequences
    eps_id = np.repeat(10 * np.arange(len(episodes)), [length for length, _ in episodes])
    unroll_id = np.repeat([unroll for _, unroll in episodes], [length for length, _ in episodes])
    steps = np.arange(len(eps_id))
    batch = SampleBatch(
        a=steps, b=steps * 0.5, eps_id=eps_id, unroll_id=unroll_id, agent_index=steps * 0, state_in_0=steps[:, None]
    )
    features, states, expected = chop(
        episode_ids=eps_id,
        unroll_ids=unroll_id,
        agent_indices=steps * 0,
        feature_columns=[batch["a"], batch["b"]],
        state_columns=[batch["state_in_0"]],
        max_seq_len=width,
        dynamic_max=False,
    )
    sequences = batch.to_sequences(width).right_zero_pad(width)
    assert sequences["seq_lens"].tolist() == expected.tolist()
    assert [sequences[name].tolist() for name in ("a", "b")] == [column.tolist() for column in features]
    assert sequences["state_in_0"].tolist() == states[0].tolist()

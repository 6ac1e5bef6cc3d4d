"""Regressions of faults in RLlib's SampleBatch, one test per fault."""

from __future__ import annotations

import time

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch, concat_samples
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, SequenceError


def test_an_empty_slice_is_empty() -> None:
    batch = SampleBatch(a=np.arange(5), b=np.zeros((5, 3)))
    for empty in (batch[0:0], batch[2:2], batch[3:1], batch.slice(0, 0)):
        assert len(empty) == 0
        assert empty["a"].shape == (0,)
        assert empty["b"].shape == (0, 3)


def test_an_empty_slice_of_sequences_is_empty() -> None:
    batch = SampleBatch(a=np.arange(5), state_in_0=np.zeros((2, 3)), seq_lens=[3, 2])
    for empty in (batch[0:0], batch.slice(0, 0)):
        assert len(empty) == 0
        assert empty["a"].shape == empty["seq_lens"].shape == (0,)
        assert empty["state_in_0"].shape == (0, 3)


@pytest.mark.parametrize("rows", range(8))
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_timeslices_end_when_the_size_does_not_divide_the_rows(rows: int, size: int) -> None:
    parts = SampleBatch(a=np.arange(rows)).timeslices(size)
    assert [len(part) for part in parts] == [size] * (rows // size) + [rows % size] * (rows % size > 0)
    assert [value for part in parts for value in part["a"].tolist()] == list(range(rows))


def test_superfluous_timeslices_are_empty() -> None:
    parts = SampleBatch(a=np.arange(2)).timeslices(num_slices=5)
    assert len(parts) == 5
    assert [value for part in parts for value in part["a"].tolist()] == [0, 1]


def test_shuffle_keeps_infos_with_their_rows() -> None:
    batch = SampleBatch(a=np.arange(20), infos=[{"row": i} for i in range(20)])
    batch.shuffle(rng=0)
    assert batch["a"].tolist() != list(range(20))
    assert [info["row"] for info in batch["infos"]] == batch["a"].tolist()


@pytest.mark.parametrize("names", [(["a"], ["a", "b"]), (["a", "b"], ["a"]), (["a", "b"], ["a", "c"])])
def test_concat_errors_list_columns_that_some_batches_lack(names: tuple[list[str], list[str]]) -> None:
    batches = [SampleBatch({name: [1, 2] for name in part}) for part in names]
    with pytest.raises(ColumnMismatchError, match="'b'"):
        concat_samples(batches)


def test_concat_does_not_promote_to_a_dtype_that_loses_integers() -> None:
    floats = SampleBatch(rewards=np.ones(2, np.float32))
    integers = SampleBatch(rewards=np.array([2**62 + 1]))
    for pair in ([floats, integers], [integers, floats]):
        with pytest.raises(ColumnMismatchError, match=r"'rewards'.*float32|'rewards'.*int64"):
            concat_samples(pair)


def test_right_zero_pad_rejects_lengths_that_lose_rows() -> None:
    batch = SampleBatch(a=[1, 2, 3, 4, 5], seq_lens=[3, 2])
    with pytest.raises(SequenceError, match="3 steps, got 2"):
        batch.right_zero_pad(2)
    assert batch["a"].tolist() == [1, 2, 3, 4, 5]
    assert not batch.zero_padded


def test_dones_are_terminated_or_truncated() -> None:
    batch = SampleBatch(terminateds=[True, False, False], truncateds=[False, True, False])
    assert batch["dones"].tolist() == [True, True, False]


@pytest.mark.parametrize("ended", ["terminateds", "truncateds"])
def test_dones_equal_the_only_flag_column(ended: str) -> None:
    assert SampleBatch({ended: [True, False]})["dones"].tolist() == [True, False]


def test_compressing_rows_does_not_enlarge_small_observations() -> None:
    obs = np.random.default_rng(0).normal(size=(1000, 17)).astype(np.float32)
    batch = SampleBatch(obs=obs).compress(bulk=False)
    assert batch.size_bytes() < 1.05 * obs.nbytes
    repetitive = SampleBatch(obs=np.zeros((1000, 17), np.float32)).compress(bulk=False)
    assert repetitive.size_bytes() < obs.nbytes / 2


def test_multi_agent_timeslices_keep_rows_of_equal_time() -> None:
    rows = {"eps_id": [0, 0, 0, 0], "t": [1, 1, 1, 2], "agent_index": [0, 0, 0, 0], "a": [1, 2, 3, 4]}
    batch = MultiAgentBatch({"p": SampleBatch(rows), "q": SampleBatch(rows)}, env_steps=2)
    first, second = batch.timeslices(1)
    assert first["p"]["a"].tolist() == first["q"]["a"].tolist() == [1, 2, 3]
    assert second["p"]["a"].tolist() == second["q"]["a"].tolist() == [4]


def test_multi_agent_timeslices_of_forty_thousand_rows_are_quick() -> None:
    steps = np.arange(10_000)
    batch = MultiAgentBatch(
        {
            f"policy{i}": SampleBatch(
                obs=np.zeros((10_000, 4), np.float32),
                t=steps,
                eps_id=np.zeros_like(steps),
                agent_index=np.full_like(steps, i),
            )
            for i in range(4)
        },
        env_steps=10_000,
    )
    began = time.process_time()
    parts = batch.timeslices(20)
    assert time.process_time() - began < 0.5
    assert len(parts) == 500
    assert all(part.count == 20 and part.agent_steps() == 80 for part in parts)


def test_columns_of_unequal_length_are_rejected() -> None:
    with pytest.raises(ColumnLengthError, match=r"'b' must have 3 rows.*'a'.*got 2"):
        SampleBatch(a=[1, 2, 3], b=[1, 2])
    batch = SampleBatch(a=[1, 2, 3])
    with pytest.raises(ColumnLengthError, match=r"'b' must have 3 rows.*'a'.*got 4"):
        batch["b"] = [1, 2, 3, 4]
    assert list(batch) == ["a"]

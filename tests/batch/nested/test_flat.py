"""Nested and flat batches over the same memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from samplebatch import SampleBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.functions import as_batch
from samplebatch.errors import ColumnLengthError, ColumnTypeError


def flat() -> SampleBatch:
    return SampleBatch(
        {
            "obs": {"camera": np.arange(8.0).reshape(4, 2), "arm": (np.arange(4), np.ones(4))},
            "new_obs": {"camera": np.arange(8.0).reshape(4, 2), "arm": (np.arange(4), np.ones(4))},
            "actions": torch.arange(4),
            "rewards": np.zeros(4),
            "terminateds": np.zeros(4, bool),
            "truncateds": np.zeros(4, bool),
            "infos": [{"x": 1}, {}, {}, {}],
            "logp": np.zeros(4, "f4"),
        }
    )


def test_flat_to_nested_shares_memory() -> None:
    source = flat()
    batch = as_batch(source)
    assert batch.rewards is source["rewards"]
    assert batch.actions is source["actions"]
    assert batch.obs.camera is source["obs.camera"]
    assert batch.obs.arm["1"] is source["obs.arm.1"]
    assert batch.infos is source["infos"]
    batch[1:2].obs.camera[:] = 77
    assert source["obs"]["camera"][1].tolist() == [77, 77]
    source["rewards"][0] = 5
    assert batch.rewards[0] == 5
    assert len(batch) == len(source)


def test_names_are_mapped_on_request() -> None:
    batch = as_batch(flat(), names="tianshou")
    assert set(batch.keys()) == {"obs", "obs_next", "act", "rew", "terminated", "truncated", "info", "logp"}
    assert set(as_batch(flat()).keys()) == set(flat())
    back = batch.as_sample_batch(names="rllib")
    assert set(back) == set(flat())
    assert back["rewards"] is batch.rew
    assert set(batch.as_sample_batch()) == set(batch.keys())


def test_nested_to_flat_shares_memory() -> None:
    batch = Batch(obs={"x": np.zeros((3, 2)), "r": {}}, act=torch.zeros(3), info=Batch(), policy=None, done=[True] * 3)
    made = batch.as_sample_batch()
    assert made.column_names == ("obs.x", "act", "done")
    assert made["obs.x"] is batch.obs.x
    assert made["act"] is batch.act
    made["obs"]["x"][0] = 4
    assert batch.obs.x[0].tolist() == [4, 4]


def test_leaves_must_have_equal_length() -> None:
    with pytest.raises(ColumnLengthError, match=r"column 'obs\.y' must have 3 rows.*'obs\.x'.*got 2"):
        Batch(obs={"x": np.zeros(3), "y": np.zeros(2)}).as_sample_batch()
    for value in (1, "x", torch.distributions.Normal(torch.zeros(3), 1.0)):
        with pytest.raises(ColumnTypeError, match=r"column 'obs\.s' must have rows"):
            Batch(obs={"x": np.zeros(3), "s": value}).as_sample_batch()


def test_columns_that_are_no_arrays_are_refused() -> None:
    compressed = SampleBatch(obs=np.zeros((4, 3)), rewards=np.zeros(4)).compress(columns={"obs"})
    with pytest.raises(ColumnTypeError, match=r"column 'obs' must be an array.*compressed"):
        as_batch(compressed)


def test_arrow() -> None:
    batch = Batch(obs={"x": np.arange(6.0).reshape(3, 2)}, rew=[1.0, 2.0, 3.0])
    table = batch.to_arrow()
    assert table.column_names == ["obs.x", "rew"]
    assert table.column("rew").chunk(0).buffers()[1].address == batch.rew.ctypes.data
    assert pa.table(batch).column("rew").to_pylist() == [1, 2, 3]
    assert pa.schema(batch).names == ["obs.x", "rew"]

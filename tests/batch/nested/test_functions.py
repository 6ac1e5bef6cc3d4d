"""Functions that create nested batches from flat batches, and for NumPy, torch and data loaders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from samplebatch import SampleBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.functions import as_batch, collate, to_numpy, to_torch, to_torch_as
from samplebatch.errors import ColumnMismatchError, ColumnTypeError
from samplebatch.names import Convention
from tests.optional import torch


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
    batch = as_batch(flat(), convention="tianshou")
    assert set(batch.keys()) == {"obs", "obs_next", "act", "rew", "terminated", "truncated", "info", "logp"}
    assert set(as_batch(flat()).keys()) == set(flat())
    back = batch.as_sample_batch(convention="rllib")
    assert set(back) == set(flat())
    assert back["rewards"] is batch.rew
    assert set(batch.as_sample_batch()) == set(batch.keys())


@pytest.mark.parametrize("convention", [None, "rllib", "tianshou"])
def test_both_directions_accept_the_same_convention(convention: Convention | None) -> None:
    for source in (flat(), flat().as_batch(convention="tianshou").as_sample_batch()):
        assert list(source.as_batch(convention=convention).keys()) == list(
            source.as_batch().as_sample_batch(convention=convention)
        )


def test_two_columns_with_one_name_are_rejected() -> None:
    with pytest.raises(ColumnMismatchError, match="'rewards' and 'rew' would both be named 'rew'; drop one"):
        SampleBatch(rewards=[1.0], rew=[2.0]).as_batch(convention="tianshou")
    with pytest.raises(ColumnMismatchError, match="'rewards' and 'rew' would both be named 'rewards'; drop one"):
        Batch(rewards=[1.0], rew=[2.0]).as_sample_batch(convention="rllib")


def test_columns_that_are_not_arrays_are_rejected() -> None:
    compressed = SampleBatch(obs=np.zeros((4, 3)), rewards=np.zeros(4)).compress(columns={"obs"})
    with pytest.raises(ColumnTypeError, match=r"column 'obs' must be an array.*compressed"):
        as_batch(compressed)


def test_functions() -> None:
    assert to_numpy(torch.zeros(2)).tolist() == [0, 0]
    assert to_numpy({"a": torch.zeros(2)}) == Batch(a=np.zeros(2, "f4"))
    assert to_numpy([{"a": 1}, {"a": 2}]) == Batch(a=[1, 2])
    assert to_numpy([1, 2]).tolist() == [1, 2]
    assert to_numpy(None).item() is None
    item = object()
    assert to_numpy(item).item() is item
    array, tensor = np.zeros(2), torch.zeros(2)
    assert to_torch(array).data_ptr() == array.ctypes.data
    assert to_torch(tensor) is tensor
    assert to_torch(tensor, torch.int32).dtype == torch.int32
    assert to_torch(3).item() == 3
    assert to_torch(np.float32(2)).dtype == torch.float32
    assert to_torch([array, array]).shape == (2, 2)
    assert to_torch({"a": array}).a.dtype == torch.float64
    assert to_torch([{"a": 1}, {"a": 2}]).a.tolist() == [1, 2]
    assert to_torch_as([1], torch.zeros(1, dtype=torch.float16)).dtype == torch.float16
    assert to_torch_as(Batch(a=[1]), tensor).a.dtype == torch.float32
    for value in ("x", None, ["x"], [None, 1], item):
        with pytest.raises(TypeError, match="must be numbers to become a tensor"):
            to_torch(value)
    with pytest.raises(TypeError, match="must be a tensor, got ndarray"):
        to_torch_as(array, array)
    with pytest.raises(TypeError, match="column 'value'"):
        to_numpy([tensor, torch.zeros(3)])


@pytest.mark.parametrize("with_collate", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader(with_collate: bool, workers: int) -> None:
    data = Batch(obs={"x": np.arange(10.0).reshape(5, 2)}, act=torch.arange(5), name=list("abcde"), none=None)
    for source in (data, list(data)) if not workers else (data,):
        options: dict[str, Any] = {"collate_fn": collate} if with_collate else {}
        batches = list(DataLoader(source, batch_size=2, num_workers=workers, **options))
        assert [len(batch) for batch in batches] == [2, 2, 1]
        assert all(isinstance(batch, Batch) for batch in batches)
        assert batches[1].obs.x.tolist() == [[4, 5], [6, 7]]
        assert batches[1].act.tolist() == [2, 3]
        assert batches[1].name.tolist() == ["c", "d"]


def test_ragged_columns_become_object_arrays_of_rows() -> None:
    flat = SampleBatch(visited=[[1, 2], [3], []], obs={"path": [np.zeros((1, 2)), np.ones((2, 2)), np.ones((0, 2))]})
    batch = flat.as_batch()
    assert [row.tolist() for row in batch.visited] == [[1, 2], [3], []]
    assert [row.shape for row in batch[1:].obs.path] == [(2, 2), (0, 2)]
    batch.visited[0][1] = 9
    assert flat["visited"][0].tolist() == [1, 9]
    again = batch.as_sample_batch()
    assert [row.tolist() for row in again["visited"]] == [[1, 9], [3], []]

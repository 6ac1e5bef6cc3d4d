"""TensorDicts under TorchRL's names, by tensordict itself, and TorchRL's rollouts where it is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import ReplayBuffer, SampleBatch
from samplebatch.convert import from_tensordict, to_tensordict
from samplebatch.errors import ColumnMismatchError, ColumnTypeError
from tests.convert.experience import two_episodes
from tests.optional import torch

tensordict = pytest.importorskip("tensordict")


def test_names_and_shapes_agree_with_torchrl() -> None:
    td = to_tensordict(two_episodes())
    assert td.batch_size == (5,)
    assert td["observation"].shape == td["next", "observation"].shape == (5, 2)
    assert td["next", "reward"].shape == td["next", "terminated"].shape == td["next", "truncated"].shape == (5, 1)
    assert td["next", "done"].flatten().tolist() == [False, False, True, False, True]
    assert td["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("column", ["obs", "new_obs", "rewards", "actions", "terminateds"])
def test_memory_is_shared_in_both_directions(column: str) -> None:
    batch = two_episodes()
    actual = from_tensordict(to_tensordict(batch))[column]
    assert actual.data_ptr() == batch[column].ctypes.data


def test_a_batch_is_restored() -> None:
    batch = two_episodes()
    actual = from_tensordict(to_tensordict(batch))
    assert set(actual) == set(batch)
    for name in batch:
        assert actual[name].numpy().dtype == batch[name].dtype
        assert np.array_equal(actual[name].numpy(), batch[name])


def test_parts_of_observations_are_root_entries() -> None:
    batch = two_episodes(nested=True)
    td = to_tensordict(batch)
    assert td["camera"].shape == td["next", "camera"].shape == (5, 4, 1)
    assert td["next", "pair", "1"].tolist() == batch["new_obs.pair.1"].tolist()
    actual = from_tensordict(td)
    assert actual["new_obs"].keys() == {"x", "camera", "pair"}
    assert actual["obs.pair.0"].tolist() == batch["obs.pair.0"].tolist()


def test_parts_with_the_name_of_another_entry_are_rejected() -> None:
    batch = SampleBatch(obs={"action": [1.0, 2.0]}, actions=[0, 1])
    with pytest.raises(ColumnMismatchError, match=r"column 'actions' must have a unique name.*'action' twice"):
        to_tensordict(batch)


def test_objects_and_other_columns_are_included() -> None:
    batch = SampleBatch(obs=[[1.0], [2.0]], infos=[{"a": 1}, {}], name=["x", "y"], action_logp=[0.5, 1.0], extra=[1, 2])
    td = to_tensordict(batch)
    assert td["action_log_prob"].tolist() == [0.5, 1.0]
    actual = from_tensordict(td)
    assert list(actual["infos"]) == [{"a": 1}, {}]
    assert list(actual["name"]) == ["x", "y"]
    assert actual["extra"].tolist() == [1, 2]
    assert actual["action_logp"].tolist() == [0.5, 1.0]


def test_rows_of_several_dimensions_are_streams() -> None:
    td = tensordict.TensorDict(
        {"observation": torch.arange(6.0).reshape(2, 3, 1), "next": {"done": torch.zeros(2, 3, 1, dtype=torch.bool)}},
        batch_size=[2, 3],
    )
    actual = from_tensordict(td)
    assert actual["env_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert actual["obs"].data_ptr() == td["observation"].data_ptr()
    assert actual["dones"].shape == (6,)


def test_a_tensordict_without_next_has_its_rewards_and_flags_in_the_root() -> None:
    td = tensordict.TensorDict({"observation": torch.zeros(2, 3), "reward": torch.ones(2, 1)}, batch_size=[2])
    assert from_tensordict(td)["rewards"].tolist() == [1.0, 1.0]


def test_entries_only_in_next_become_columns_of_next() -> None:
    td = tensordict.TensorDict({"observation": torch.zeros(2, 3), "next": {"cost": torch.ones(2)}}, batch_size=[2])
    assert from_tensordict(td)["next.cost"].tolist() == [1.0, 1.0]


def test_a_tensordict_without_rows_is_rejected() -> None:
    with pytest.raises(ColumnTypeError, match="must have a batch dimension, got none"):
        from_tensordict(tensordict.TensorDict({"observation": torch.zeros(3)}, batch_size=[]))


def test_buffers_are_converted_in_time_order() -> None:
    buffer = ReplayBuffer(8)
    buffer.add(two_episodes().as_batch(convention="tianshou"), buffer_ids=np.zeros(5, int))
    assert to_tensordict(buffer)["next", "reward"].flatten().tolist() == two_episodes()["rewards"].tolist()


def cart_pole() -> Any:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1")


@pytest.mark.filterwarnings("ignore")  # TorchRL's own, when it is imported
def test_a_rollout_of_torchrl_becomes_steps() -> None:
    rollout = cart_pole().rollout(40, break_when_any_done=False)
    batch = from_tensordict(rollout)
    assert set(batch) == {"obs", "new_obs", "actions", "rewards", "terminateds", "truncateds"}
    assert torch.equal(batch["new_obs"], rollout["next", "observation"])
    back = to_tensordict(batch)
    for key in (("next", "reward"), ("next", "done"), ("next", "terminated"), "observation", "action"):
        assert torch.equal(back[key], rollout[key])


@pytest.mark.filterwarnings("ignore")  # TorchRL's own, when it is imported
def test_a_torchrl_buffer_stores_and_returns_converted_steps() -> None:
    pytest.importorskip("torchrl")
    from torchrl.data import LazyTensorStorage
    from torchrl.data import ReplayBuffer as TheirBuffer

    theirs = TheirBuffer(storage=LazyTensorStorage(10), batch_size=4)
    theirs.extend(to_tensordict(two_episodes()))
    assert from_tensordict(theirs[:])["rewards"].tolist() == two_episodes()["rewards"].tolist()
    assert set(theirs.sample().keys()) >= {"observation", "next"}

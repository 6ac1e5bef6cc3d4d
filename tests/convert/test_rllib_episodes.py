"""RLlib's episodes of one agent and of several, made and checked by RLlib."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.convert import from_rllib_episodes, to_rllib_episodes
from samplebatch.errors import ColumnNotFoundError, ColumnTypeError
from tests.convert.experience import two_episodes

pytest.importorskip("ray")
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode


def observed(i: int, nested: bool) -> Any:
    x = np.array([i, i + 0.5], np.float32)
    return {"x": x, "pair": (np.float32(i), np.int64(i))} if nested else x


def episode(*, nested: bool = False) -> SingleAgentEpisode:
    result = SingleAgentEpisode(id_="7f")
    result.add_env_reset(observed(0, nested), {"reset": True})
    for i in range(3):
        logp = {"action_logp": np.float32(-i)}
        result.add_env_step(
            observed(i + 1, nested), i % 2, i / 2, {"lives": i}, terminated=i == 2, extra_model_outputs=logp
        )
    result.t_started, result.t = 4, 7
    return result


@pytest.mark.parametrize("numpy", [False, True], ids=["lists", "arrays"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_an_episode_becomes_steps(numpy: bool, nested: bool) -> None:
    source = episode(nested=nested)
    batch = from_rllib_episodes([source.to_numpy() if numpy else source])
    obs, following = (batch["obs.x"], batch["new_obs.x"]) if nested else (batch["obs"], batch["new_obs"])
    assert obs[:, 0].tolist() == [0, 1, 2]
    assert following[:, 1].tolist() == [1.5, 2.5, 3.5]
    if nested:
        assert batch["new_obs"]["pair"][1].tolist() == [1, 2, 3]
    assert batch["actions"].tolist() == [0, 1, 0]
    assert batch["rewards"].tolist() == [0, 0.5, 1]
    assert batch["terminateds"].tolist() == [False, False, True]
    assert not batch["truncateds"].any()
    assert batch["action_logp"].tolist() == [0, -1, -2]
    assert list(batch["infos"]) == [{"lives": i} for i in range(3)]
    assert batch["eps_id"].tolist() == ["7f"] * 3
    assert batch["t"].tolist() == [4, 5, 6]


def test_conversion_shares_memory_in_both_directions() -> None:
    source = episode().to_numpy()
    batch = from_rllib_episodes([source])
    assert np.shares_memory(batch["obs"], source.observations.data)
    assert np.shares_memory(batch["actions"], source.actions.data)
    (back,) = to_rllib_episodes(batch)
    assert np.shares_memory(back.observations.data, source.observations.data)
    assert back.observations.data.shape == (4, 2)


def test_the_lookback_is_omitted() -> None:
    source = SingleAgentEpisode(
        id_="a", observations=[0.0, 1.0, 2.0, 3.0], actions=[0, 1, 2], rewards=[0.0, 1.0, 2.0], len_lookback_buffer=2
    )
    for value in (source, source.to_numpy()):
        batch = from_rllib_episodes([value])
        assert batch["obs"].tolist() == [2.0]
        assert batch["actions"].tolist() == [2]


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_steps_become_episodes_that_rllib_accepts(nested: bool) -> None:
    batch = two_episodes(nested=nested)
    batch["action_logp"] = np.arange(5.0)
    first, second = to_rllib_episodes(batch)
    for result in (first, second):
        result.validate()
        assert result.is_numpy
    assert first.is_terminated
    assert second.is_truncated
    assert len(first), len(second) == (3, 2)
    assert second.get_rewards().tolist() == [0.5, 1.5]
    assert first.get_extra_model_outputs("action_logp").tolist() == [0, 1, 2]
    assert first[1:].get_actions().tolist() == [1, 0]
    actual = from_rllib_episodes([first, second])
    for name in ("obs", "new_obs"):
        for path in batch.select(name).column_names:
            assert actual[path].tolist() == batch[path].tolist()
    assert actual["t"].tolist() == batch["t"].tolist()
    assert actual["eps_id"].tolist() == ["0", "0", "0", "1", "1"]


def test_an_episode_is_restored_with_infos_and_time() -> None:
    (back,) = to_rllib_episodes(from_rllib_episodes([episode()]))
    assert back.id_ == "7f"
    assert back.t_started == 4
    assert back.get_infos() == [{}, {"lives": 0}, {"lives": 1}, {"lives": 2}]


def test_other_objects_than_episodes_are_rejected() -> None:
    for value in ([], [1], [episode(), MultiAgentEpisode()]):
        with pytest.raises(ColumnTypeError, match="episodes must contain at least one RLlib episode"):
            from_rllib_episodes(value)
    with pytest.raises(ColumnNotFoundError, match="column 'new_obs' must exist"):
        to_rllib_episodes(two_episodes().drop("new_obs"))
    with pytest.raises(ColumnNotFoundError, match="column 't' must exist"):
        to_rllib_episodes(MultiAgentBatch({"p": two_episodes().drop("t")}, 5))


def turns() -> MultiAgentEpisode:
    """Return alternating turns of two agents, rewarded between turns; b is terminated first."""
    return MultiAgentEpisode(
        "game",
        observations=[{"a": 0.0}, {"b": 1.0}, {"a": 2.0}, {"b": 3.0, "a": 4.0}, {"a": 5.0}],
        actions=[{"a": 10}, {"b": 11}, {"a": 12}, {"a": 13}],
        rewards=[{"a": 0.5}, {"b": 1.0, "a": 0.25}, {"a": 2.0}, {"a": 3.0}],
        terminateds={"b": True, "a": True, "__all__": True},
        len_lookback_buffer=0,
        agent_module_ids={"a": "pa", "b": "pb"},
    )


def test_several_agents_become_a_batch_for_each_module() -> None:
    batch = from_rllib_episodes([turns()])
    assert isinstance(batch, MultiAgentBatch)
    assert batch.count == 4
    assert set(batch.policy_batches) == {"pa", "pb"}
    rows = batch["pa"]
    assert rows["obs"].tolist() == [0, 2, 4]
    assert rows["new_obs"].tolist() == [2, 4, 5]
    assert rows["rewards"].tolist() == [0.75, 2.0, 3.0]
    assert rows["t"].tolist() == [0, 2, 3]
    assert rows["agent_id"].tolist() == ["a"] * 3
    assert batch["pb"]["t"].tolist() == [1]
    assert batch["pb"]["terminateds"].tolist() == [True]


def test_several_agents_are_restored() -> None:
    (restored,) = to_rllib_episodes(from_rllib_episodes([turns()]))
    restored.validate()
    assert restored.id_ == "game"
    assert restored.is_terminated
    assert len(restored) == 4
    assert restored.module_for("b") == "pb"
    again = from_rllib_episodes([restored])
    assert again == from_rllib_episodes([turns()])


def test_agents_that_continue_are_not_terminated() -> None:
    steps = SampleBatch(
        obs=np.arange(4.0), new_obs=np.arange(4.0) + 1, actions=[0, 1, 0, 1], rewards=np.ones(4),
        terminateds=[False, False, False, True], eps_id=[5] * 4, agent_index=[0, 0, 1, 1], t=[0, 1, 0, 1],
    )  # fmt: skip
    (restored,) = to_rllib_episodes(MultiAgentBatch({"shared": steps}, 2))
    assert not restored.is_done
    assert restored.agent_episodes[1].is_terminated
    assert not restored.agent_episodes[0].is_done
    assert restored.agent_episodes[0].get_observations().tolist() == [0, 1, 2]

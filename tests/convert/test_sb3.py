"""Buffers of Stable-Baselines3, filled and sampled by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import ActionUnit, SampleBatch
from samplebatch.convert import from_sb3, to_sb3_replay, to_sb3_rollout
from samplebatch.errors import ArgumentError, CapacityError, ColumnMismatchError, ColumnNotFoundError, ColumnTypeError
from tests.convert.experience import two_episodes

buffers = pytest.importorskip("stable_baselines3.common.buffers")
spaces = pytest.importorskip("gymnasium").spaces

LINE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
PARTS = spaces.Dict(x=LINE, place=spaces.Discrete(9))
ARM = spaces.Box(-1, 1, (2, 3), np.float64)


def observed(step: int, n: int, space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: observed(step, n, part) for name, part in space.items()}
    values = np.arange(n) * 100 + step
    return np.broadcast_to(values.reshape(n, *[1] * len(space.shape)), (n, *space.shape)).astype(space.dtype)


def fill(buffer: Any, steps: int) -> Any:
    """Add steps; environment e ends an episode after every third step, by truncation if e is even."""
    for i in range(steps):
        done = np.full(buffer.n_envs, i % 3 == 2)
        infos = [{"TimeLimit.truncated": bool(done[e] and e % 2 == 0)} for e in range(buffer.n_envs)]
        space = buffer.observation_space
        obs, following = observed(i, buffer.n_envs, space), observed(i + 1, buffer.n_envs, space)
        action = observed(i % 2, buffer.n_envs, buffer.action_space) % 2
        buffer.add(obs, following, action, np.full(buffer.n_envs, i, np.float32), done, infos)
    return buffer


@pytest.mark.parametrize("steps", [4, 6, 8])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("optimize", [False, True])
def test_steps_are_ordered_environment_by_environment_in_time_order(steps: int, n_envs: int, optimize: bool) -> None:
    options = {"optimize_memory_usage": optimize, "handle_timeout_termination": not optimize}
    batch = from_sb3(fill(buffers.ReplayBuffer(6 * n_envs, LINE, spaces.Discrete(2), "cpu", n_envs, **options), steps))
    first = max(0, steps - 6 + (optimize and steps >= 6))
    observed = np.arange(first, steps)
    for e, part in enumerate(batch.split_by_episode("env_id")):
        assert part["obs"][:, 0].tolist() == (100 * e + observed).tolist()
        assert part["new_obs"][:, 0].tolist() == (100 * e + observed + 1).tolist()
        assert part["actions"].tolist() == (observed % 2).tolist()
        assert part["rewards"].tolist() == observed.tolist()
        truncates = e % 2 == 0 and not optimize
        ends = (observed % 3 == 2).tolist()
        assert part["truncateds" if truncates else "terminateds"].tolist() == ends
        assert not part["terminateds" if truncates else "truncateds"].any()
        assert np.unique(part["eps_id"]).size == np.unique(observed // 3).size
    assert np.unique(batch["env_id"]).size == n_envs


def test_columns_of_one_environment_share_the_memory() -> None:
    buffer = fill(buffers.ReplayBuffer(6, LINE, spaces.Discrete(2), "cpu"), 4)
    batch = from_sb3(buffer)
    for name, theirs in (("obs", buffer.observations), ("actions", buffer.actions), ("rewards", buffer.rewards)):
        assert np.shares_memory(batch[name], theirs)


def test_dicts_and_shaped_actions() -> None:
    batch = from_sb3(fill(buffers.DictReplayBuffer(6, PARTS, ARM, "cpu"), 4))
    assert batch["obs.x"].shape == (4, 2)
    assert batch["obs.place"].tolist() == [0, 1, 2, 3]
    assert batch["new_obs"]["place"].tolist() == [1, 2, 3, 4]
    assert batch["actions"].shape == (4, 2, 3)


@pytest.mark.parametrize("sampled", [False, True], ids=["fresh", "drawn from"])
def test_rollout_buffers(sampled: bool) -> None:
    import torch

    buffer = buffers.RolloutBuffer(4, LINE, spaces.Discrete(2), "cpu", n_envs=2)
    for i in range(4):
        starts = np.array([i % 2 == 0] * 2, np.float32)
        values = torch.tensor([i, i + 10.0])
        actions = np.array([i % 2, 1 - i % 2])
        buffer.add(observed(i, 2, LINE), actions, np.full(2, i, np.float32), starts, values, values / 2)
    buffer.compute_returns_and_advantage(torch.zeros(2), np.zeros(2))
    returns = buffer.returns.copy()
    if sampled:
        next(buffer.get(3))
    batch = from_sb3(buffer)
    assert batch["obs"][:, 1].tolist() == [0, 1, 2, 3, 100, 101, 102, 103]
    assert batch["actions"].tolist() == [0, 1, 0, 1, 1, 0, 1, 0]
    assert batch["vf_preds"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert batch["action_logp"].tolist() == [0, 0.5, 1, 1.5, 5, 5.5, 6, 6.5]
    assert batch["value_targets"].tolist() == returns.T.reshape(-1).tolist()
    assert batch["dones"].tolist() == [False, True, False, False] * 2
    assert batch["eps_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_another_buffer_is_rejected() -> None:
    with pytest.raises(ColumnTypeError, match="must be a Stable-Baselines3 replay or rollout buffer, got a list"):
        from_sb3([])  # type: ignore[arg-type]


def test_a_replay_buffer_is_filled_and_sampled() -> None:
    buffer = to_sb3_replay(two_episodes(), LINE, spaces.Discrete(3), capacity=8, device="cpu")
    assert buffer.size() == buffer.pos == 5
    batch = from_sb3(buffer)
    for name in ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds"):
        assert batch[name].tolist() == two_episodes()[name].tolist()
    sample = buffer.sample(50)
    assert set(sample.dones.flatten().tolist()) == {0.0, 1.0}
    # Truncation is no termination: only the first episode's last step counts as done.
    assert {tuple(row) for row in sample.observations[sample.dones.flatten() > 0].tolist()} == {(2.0, 2.5)}


def test_steps_are_distributed_over_environments() -> None:
    batch = two_episodes()[:4]
    buffer = to_sb3_replay(batch, LINE, spaces.Discrete(3), n_envs=2, device="cpu")
    assert buffer.full
    assert buffer.rewards.tolist() == batch["rewards"].reshape(2, 2).T.tolist()
    assert from_sb3(buffer)["rewards"].tolist() == batch["rewards"].tolist()


def test_dict_observations_are_stored_in_dict_buffers() -> None:
    batch = two_episodes()
    batch["obs"] = batch["new_obs"] = {"x": batch["obs"], "place": np.arange(5)}
    buffer = to_sb3_replay(batch, PARTS, spaces.Discrete(3), device="cpu")
    assert isinstance(buffer, buffers.DictReplayBuffer)
    assert from_sb3(buffer)["obs.place"].tolist() == list(range(5))


def test_a_rollout_buffer_is_filled_and_drawn_from() -> None:
    batch = two_episodes()
    batch.update(vf_preds=np.arange(5.0), action_logp=np.ones(5), advantages=np.arange(5.0), value_targets=np.ones(5))
    buffer = to_sb3_rollout(batch, LINE, spaces.Discrete(3), device="cpu")
    assert buffer.episode_starts[:, 0].tolist() == [1, 0, 0, 1, 0]
    assert sorted(value for part in buffer.get(2) for value in part.advantages.tolist()) == [0, 1, 2, 3, 4]
    assert from_sb3(buffer)["dones"].tolist() == [False, False, True, False, False]


def test_unsupported_columns_are_rejected_with_the_name() -> None:
    two = spaces.Discrete(3)
    with pytest.raises(ColumnNotFoundError, match="column 'new_obs' must exist"):
        to_sb3_replay(two_episodes().drop("new_obs"), LINE, two)
    with pytest.raises(ColumnNotFoundError, match="column 'vf_preds' must exist"):
        to_sb3_rollout(two_episodes(), LINE, two)
    with pytest.raises(ColumnMismatchError, match=r"column 'obs' must have rows of shape \(3,\) to fit its space, got"):
        to_sb3_replay(two_episodes(), spaces.Box(-1, 1, (3,)), two)
    with pytest.raises(ColumnMismatchError, match=r"column 'obs' must be a single array for a space other than Dict"):
        to_sb3_replay(two_episodes(nested=True), LINE, two)
    with pytest.raises(
        ColumnMismatchError, match=r"column 'obs' must have the parts of its space, (place, x|x, place)"
    ):
        to_sb3_replay(two_episodes(nested=True), PARTS, two)
    with pytest.raises(ColumnTypeError, match=r"column 'obs' must be convertible to uint8, .*, got float32"):
        to_sb3_replay(two_episodes(), spaces.Box(0, 255, (2,), np.uint8), two)
    with pytest.raises(ArgumentError, match="n_envs must divide the number of steps, which is 5, got 2; drop 1"):
        to_sb3_replay(two_episodes(), LINE, two, n_envs=2)
    with pytest.raises(CapacityError, match="capacity must be at least 5, the number of steps, got 4"):
        to_sb3_replay(two_episodes(), LINE, two, capacity=4)


def test_an_algorithm_continues_training_with_converted_steps() -> None:
    from stable_baselines3 import DQN

    model = DQN("MlpPolicy", "CartPole-v1", buffer_size=100, learning_starts=0, device="cpu", seed=1)
    steps = SampleBatch(
        obs=np.ones((40, 4), np.float32),
        new_obs=np.ones((40, 4), np.float32),
        actions=np.arange(40) % 2,
        rewards=np.ones(40),
        terminateds=np.arange(40) % 20 == 19,
    )
    model.replay_buffer = to_sb3_replay(steps, model.observation_space, model.action_space, capacity=100)
    model.learn(20)
    assert model.replay_buffer.size() == 60


def test_replay_buffers_store_scaled_actions() -> None:
    """SAC, TD3 and DDPG of Stable-Baselines3 store and sample scaled actions."""
    torques, steps = spaces.Box(-2.0, 2.0, (1,)), two_episodes()
    steps["actions"] = np.linspace(-2.0, 2.0, len(steps), dtype=np.float32)[:, None]
    steps.action_unit = ActionUnit()
    theirs = to_sb3_replay(steps, LINE, torques, device="cpu")
    np.testing.assert_allclose(theirs.actions.ravel(), np.linspace(-1.0, 1.0, len(steps)))
    again = from_sb3(theirs)
    assert again.action_unit == ActionUnit("scale", np.float32(-2), np.float32(2))
    np.testing.assert_allclose(again.to_environment_actions()["actions"], steps["actions"])
    retained = to_sb3_replay(again, LINE, torques, device="cpu")
    np.testing.assert_array_equal(retained.actions, theirs.actions)
    steps.action_unit = None
    np.testing.assert_array_equal(to_sb3_replay(steps, LINE, torques, device="cpu").actions[:, 0], steps["actions"])

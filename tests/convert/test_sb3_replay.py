"""Users' scripts of Stable-Baselines3 with our replay buffers: the same seeds learn the same parameters."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch.convert import SB3HerReplayBuffer, SB3ReplayBuffer
from samplebatch.errors import ArgumentError, EmptyBufferError
from tests.optional import torch

sb3 = pytest.importorskip("stable_baselines3")
buffers = pytest.importorskip("stable_baselines3.common.buffers")
env_util = pytest.importorskip("stable_baselines3.common.env_util")
vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
spaces = pytest.importorskip("gymnasium.spaces")

LINE = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def train(algorithm: Any, env: Any, buffer: Any, size: int = 1000, policy: str = "MlpPolicy", **kwargs: Any) -> Any:
    torch.set_num_threads(1)
    model = algorithm(
        policy,
        env,
        seed=3,
        device="cpu",
        buffer_size=size,
        learning_starts=60,
        train_freq=4,
        policy_kwargs={"net_arch": [16]},
        replay_buffer_class=buffer,
        **kwargs,
    )
    before = [value.clone() for value in model.policy.state_dict().values()]
    model.learn(240)
    after = list(model.policy.state_dict().values())
    assert not all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    return model


def assert_same_parameters(left: Any, right: Any) -> None:
    for name, value in left.policy.state_dict().items():
        assert torch.equal(value, right.policy.state_dict()[name]), name


@pytest.mark.parametrize("size", [1000, 90], ids=["partly filled", "wrapped around"])
@pytest.mark.parametrize(("name", "env", "n_envs"), [("DQN", "CartPole-v1", 3), ("SAC", "Pendulum-v1", 2)])
def test_algorithms_learn_the_same_parameters(name: str, env: str, n_envs: int, size: int) -> None:
    ours, theirs = (
        train(getattr(sb3, name), env_util.make_vec_env(env, n_envs), buffer, size)
        for buffer in (SB3ReplayBuffer, None)
    )
    assert isinstance(ours.replay_buffer, SB3ReplayBuffer)
    assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("size", [1000, 90])
def test_n_step_returns_learn_the_same_parameters(size: int) -> None:
    options = {"n_steps": 3, "gamma": 0.99}
    ours, theirs = (
        train(sb3.DQN, env_util.make_vec_env("CartPole-v1", 2), buffer, size, replay_buffer_kwargs=options)
        for buffer in (SB3ReplayBuffer, buffers.NStepReplayBuffer)
    )
    assert_same_parameters(ours, theirs)


def test_observations_and_rewards_are_normalized() -> None:
    options = {"n_steps": 3, "gamma": 0.99}
    ours, theirs = (
        train(
            sb3.DQN,
            vec_env.VecNormalize(env_util.make_vec_env("CartPole-v1", 2)),
            buffer,
            replay_buffer_kwargs=options,
        )
        for buffer in (SB3ReplayBuffer, buffers.NStepReplayBuffer)
    )
    assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_hindsight_learns_the_same_parameters(strategy: str) -> None:
    from stable_baselines3.common.envs import BitFlippingEnv

    options = {"n_sampled_goal": 4, "goal_selection_strategy": strategy}
    ours, theirs = (
        train(sb3.DQN, BitFlippingEnv(n_bits=5), buffer, policy="MultiInputPolicy", replay_buffer_kwargs=options)
        for buffer in (SB3HerReplayBuffer, sb3.HerReplayBuffer)
    )
    assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("optimize", [False, True])
def test_hindsight_samples_finished_episodes_of_many_environments(optimize: bool) -> None:
    from stable_baselines3.common.envs import BitFlippingEnv

    env = env_util.make_vec_env(lambda: BitFlippingEnv(n_bits=4), 3)
    # 60 slots a ring, no multiple of the episodes' lengths: the oldest episode is cut.
    model = train(sb3.DQN, env, SB3HerReplayBuffer, 182, "MultiInputPolicy", optimize_memory_usage=optimize)
    buffer = model.replay_buffer
    assert buffer.full
    data = buffer.sample(500)
    ours, relabelled = slice(0, 100), slice(100, 500)
    stored = buffer.buffer[data.indices]
    assert torch.equal(data.observations["desired_goal"][ours], torch.as_tensor(stored.obs.desired_goal[ours]))
    achieved = data.next_observations["achieved_goal"]
    is_reached = (achieved == data.next_observations["desired_goal"]).all(1, keepdim=True)
    assert torch.equal(data.rewards[relabelled], is_reached[relabelled].float() - 1)
    running = buffer.buffer.unfinished_index()
    assert not np.isin(data.indices, running).any()


def steps_of(n_envs: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(n_envs, 2)).astype(np.float32)
    while True:
        following = rng.normal(size=(n_envs, 2)).astype(np.float32)
        done = rng.random(n_envs) < 0.2
        infos = [{"TimeLimit.truncated": bool(end and rng.random() < 0.5)} for end in done]
        yield obs, following, rng.integers(0, 3, n_envs), rng.normal(size=n_envs).astype(np.float32), done, infos
        obs = np.where(done[:, None], rng.normal(size=(n_envs, 2)).astype(np.float32), following)


@pytest.mark.parametrize("n_steps", [None, 1, 4])
@pytest.mark.parametrize("timeouts", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_add_and_sample_agree_with_stable_baselines3(n_steps: int | None, timeouts: bool, seed: int) -> None:
    n_envs = 1 + seed % 3
    options = {"n_envs": n_envs, "handle_timeout_termination": timeouts}
    window = {} if n_steps is None else {"n_steps": n_steps, "gamma": 0.9}
    kind = buffers.ReplayBuffer if n_steps is None else buffers.NStepReplayBuffer
    theirs = kind(20, LINE, spaces.Discrete(3), "cpu", **options, **window)
    ours = SB3ReplayBuffer(20, LINE, spaces.Discrete(3), "cpu", **options, **window)
    for k, step in zip(range(45), steps_of(n_envs, seed), strict=False):
        ours.add(*step)
        theirs.add(*step)
        assert (ours.pos, ours.full, ours.size()) == (theirs.pos, theirs.full, theirs.size())
        np.random.seed(k)
        expected = theirs.sample(16)
        np.random.seed(k)
        data = ours.sample(16)
        for name in expected._fields:
            left, right = getattr(data, name), getattr(expected, name)
            if right is None:
                assert left is None
                continue
            assert left.shape == right.shape
            assert left.dtype == right.dtype
            if name != "discounts":
                torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
        if n_steps is not None:
            continues = data.dones == 0
            torch.testing.assert_close(data.discounts[continues], expected.discounts[continues])


def test_memory_optimization_keeps_observations_after_truncations() -> None:
    ours = SB3ReplayBuffer(40, LINE, spaces.Discrete(3), "cpu", n_envs=2, optimize_memory_usage=True)
    plain = SB3ReplayBuffer(40, LINE, spaces.Discrete(3), "cpu", n_envs=2)
    for _, step in zip(range(50), steps_of(2, 5), strict=False):
        ours.add(*step)
        plain.add(*step)
    assert ours.buffer.nbytes < plain.buffer.nbytes
    np.random.seed(1)
    left = ours.sample(400)
    np.random.seed(1)
    right = plain.sample(400)
    assert torch.equal(left.observations, right.observations)
    continues = right.dones[:, 0] == 0
    assert torch.equal(left.next_observations[continues], right.next_observations[continues])


@pytest.mark.parametrize("optimize", [False, True])
def test_windows_do_not_cross_an_unreported_reset(optimize: bool) -> None:
    options = {"n_steps": 5, "gamma": 1.0, "optimize_memory_usage": optimize}
    buffer = SB3ReplayBuffer(40, LINE, spaces.Discrete(3), "cpu", **options)
    for start in (0, 100):
        for i in range(4):
            obs = np.full((1, 2), start + i, np.float32)
            buffer.add(obs, obs + 1, np.zeros(1), np.ones(1), np.zeros(1, bool), [{}])
    data = buffer.sample(200)
    first = data.observations[:, 0] < 50
    assert data.next_observations[first].unique().tolist() == [4.0]
    assert data.next_observations[~first].unique().tolist() == [104.0]
    assert torch.equal(data.rewards[first][:, 0], 4 - data.observations[first][:, 0])


def test_priorities_determine_draws_and_weights() -> None:
    buffer = SB3ReplayBuffer(40, LINE, spaces.Discrete(3), "cpu", n_envs=2, alpha=1.0, beta=1.0)
    for _, step in zip(range(20), steps_of(2, 5), strict=False):
        buffer.add(*step)
    data = buffer.sample(64)
    assert data.weights.shape == (64, 1)
    buffer.update_priorities(np.arange(40), np.where(np.arange(40) == 7, 1e9, 1.0))
    assert (buffer.sample(32).indices == 7).all()
    buffer.update_priorities(data.indices, torch.ones(64, 1), data.generation)
    assert len(np.unique(buffer.sample(200).indices)) > 10


def test_a_saved_buffer_is_loaded_into_a_model(tmp_path: Path) -> None:
    from stable_baselines3.common.envs import BitFlippingEnv

    model = train(sb3.DQN, "CartPole-v1", SB3ReplayBuffer)
    model.save_replay_buffer(tmp_path / "rows")
    model.save(tmp_path / "model")
    again = sb3.DQN.load(tmp_path / "model", env_util.make_vec_env("CartPole-v1", 1))
    again.load_replay_buffer(tmp_path / "rows")
    assert again.replay_buffer.buffer[:].obs.tolist() == model.replay_buffer.buffer[:].obs.tolist()
    again.learn(8)
    goals = train(sb3.DQN, BitFlippingEnv(n_bits=4), SB3HerReplayBuffer, policy="MultiInputPolicy")
    goals.save_replay_buffer(tmp_path / "goals")
    stored = len(goals.replay_buffer)
    goals.load_replay_buffer(tmp_path / "goals")
    assert len(goals.replay_buffer) == stored
    goals.replay_buffer.sample(10)
    with pytest.raises(ArgumentError, match="env must be set"):
        pickle.loads(pickle.dumps(goals.replay_buffer)).sample(1)


def test_unsupported_arguments_are_reported() -> None:
    buffer = SB3ReplayBuffer(40, LINE, spaces.Discrete(3), "cpu", n_envs=2)
    with pytest.raises(EmptyBufferError, match="must contain rows"):
        buffer.sample(1)
    step = next(steps_of(3, 0))
    with pytest.raises(ValueError, match=r"obs must have shape \(2, 2\), got \(3, 2\)"):
        buffer.add(*step)
    with pytest.raises(ArgumentError, match="infos must contain 2 dicts, one per environment, got 1"):
        buffer.add(*(part[:2] for part in step[:4]), np.ones(2, bool), [{}])
    with pytest.raises(ArgumentError, match="alpha and beta must be passed together"):
        SB3ReplayBuffer(40, LINE, spaces.Discrete(3), alpha=0.6)
    with pytest.raises(ArgumentError, match="goal_selection_strategy must be"):
        SB3HerReplayBuffer(40, LINE, spaces.Discrete(3), None, goal_selection_strategy="past")  # type: ignore[arg-type]

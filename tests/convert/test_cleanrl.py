"""The loops of CleanRL's scripts with our replay buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.convert import CleanRLReplayBuffer
from samplebatch.errors import PriorityError
from tests.optional import torch

gymnasium = pytest.importorskip("gymnasium")


def collect(rb: Any, envs: Any, steps: int) -> None:
    """Add steps like CleanRL's DQN and SAC."""
    obs, _ = envs.reset(seed=1)
    for _ in range(steps):
        actions = envs.action_space.sample()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for idx, trunc in enumerate(truncations):
            if trunc:
                real_next_obs[idx] = infos["final_obs"][idx]
        rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = next_obs


def make_envs(n_envs: int) -> Any:
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    make = lambda: gymnasium.make("CartPole-v1", max_episode_steps=9)  # noqa: E731
    envs = gymnasium.vector.SyncVectorEnv([make] * n_envs, autoreset_mode=same_step)
    envs.action_space.seed(1)
    return envs


def test_a_dqn_loop_samples_what_was_added() -> None:
    torch.manual_seed(0)
    envs = make_envs(2)
    rb = CleanRLReplayBuffer(
        400,
        envs.single_observation_space,
        envs.single_action_space,
        torch.device("cpu"),
        n_envs=2,
        handle_timeout_termination=False,
    )
    collect(rb, envs, 100)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        data = rb.sample(64)
        with torch.no_grad():
            target_max, _ = net(data.next_observations).max(dim=1)
            td_target = data.rewards.flatten() + 0.5 * target_max * (1 - data.dones.flatten())
        old_val = net(data.observations).gather(1, data.actions).squeeze()
        loss = torch.nn.functional.mse_loss(td_target, old_val)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])


@pytest.mark.parametrize("n_envs", [1, 3])
def test_samples_equal_those_of_the_replaced_buffer(n_envs: int) -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    pair = []
    for kind in (CleanRLReplayBuffer, buffers.ReplayBuffer):
        envs = make_envs(n_envs)
        arguments = (60, envs.single_observation_space, envs.single_action_space, torch.device("cpu"))
        rb = kind(*arguments, n_envs=n_envs, handle_timeout_termination=False)
        collect(rb, envs, 75)
        np.random.seed(4)
        pair.append(rb.sample(50))
    for name in ("observations", "actions", "next_observations", "dones", "rewards"):
        assert torch.equal(getattr(pair[0], name), getattr(pair[1], name)), name


def test_returns_do_not_cross_unreported_truncations() -> None:
    envs = make_envs(1)
    space = envs.single_observation_space
    rb = CleanRLReplayBuffer(200, space, envs.single_action_space, "cpu", handle_timeout_termination=False, n_steps=20)
    collect(rb, envs, 100)
    rows = rb.buffer[:]
    assert rows.truncated.any()
    assert not (rows.truncated & rows.terminated).any()
    data = rb.sample(300)
    # Episodes have nine steps at most.
    assert (1 - 0.99 ** np.arange(10)) / 0.01 == pytest.approx(
        np.concatenate([[0.0], np.unique(data.rewards.numpy().round(4))]), abs=1e-3
    )


def test_gymnasium_infos_report_time_limits() -> None:
    space = gymnasium.spaces.Box(-1, 1, (1,))
    rb = CleanRLReplayBuffer(10, space, space, "cpu", n_envs=2)
    ones = np.ones((2, 1))
    rb.add(ones, ones, ones, np.ones(2), np.ones(2, bool), {"TimeLimit.truncated": np.array([True, False])})
    assert rb.buffer[:].truncated.tolist() == [True, False]
    assert rb.dones.sum() == 2
    with pytest.raises(PriorityError, match="alpha and beta must be set to update priorities"):
        rb.update_priorities([0], [1.0])


@pytest.mark.parametrize("space", ["box", "dict"])
def test_reused_arrays_do_not_end_an_episode(space: str) -> None:
    spaces = gymnasium.spaces
    box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    buffer = CleanRLReplayBuffer(20, spaces.Dict(x=box) if space == "dict" else box, spaces.Discrete(2), "cpu")
    following, done = np.zeros((1, 2), np.float32), np.zeros(1, np.bool_)
    for step in range(6):
        # An environment that writes every observation to the same array.
        obs = following.copy()
        following += 1.0
        done[:] = step == 3
        parts = ({"x": obs}, {"x": following}) if space == "dict" else (obs, following)
        buffer.add(*parts, np.zeros(1, np.int64), np.ones(1), done, {})
    assert buffer.buffer.done[:6].tolist() == [False, False, False, True, False, False]
    assert not buffer.buffer.truncated.any()


def test_one_reset_environment_of_several_truncates_its_episode_only() -> None:
    spaces = gymnasium.spaces
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    buffer = CleanRLReplayBuffer(30, space, spaces.Discrete(2), "cpu", n_envs=3)
    obs = np.full((3, 2), np.nan, np.float32)
    for step in range(4):
        following = np.full((3, 2), step, np.float32)
        following[2] = np.nan
        buffer.add(obs, following, np.zeros(3, np.int64), np.ones(3), np.array([step == 1, False, False]), {})
        obs = following.copy()
        if step in (1, 2):
            # The first was reported, the second was not, and the third has NaN observations.
            obs[step - 1] = -1.0
    assert buffer.buffer.truncated.reshape(3, 10)[:, :4].tolist() == [
        [False, False, False, False],
        [False, False, True, False],
        [False, False, False, False],
    ]

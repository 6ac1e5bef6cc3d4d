"""Atari environments: preprocessing, lives, fire, clipped rewards, and buffers that store each frame once."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("ale_py")
pytest.importorskip("cv2")
from samplebatch import Collector, VectorReplayBuffer
from samplebatch.env.atari import FireOnReset, LifeEpisodes, make_atari
from samplebatch.errors import ArgumentError, EnvironmentSpecError

BREAKOUT = "ALE/Breakout-v5"
TRAINING: dict[str, Any] = {"terminal_on_life_loss": True, "clip_rewards": True}


def names(env: Any) -> list[str]:
    actual = []
    while isinstance(env, gymnasium.Wrapper):
        actual.append(type(env).__name__)
        env = env.env
    return actual


def test_observations_are_stacked_grey_images() -> None:
    env = make_atari(BREAKOUT)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    obs, _ = env.reset(seed=0)
    assert (obs == obs[-1]).all()
    assert env.observation_space.contains(env.step(0)[0])
    assert make_atari(BREAKOUT, stack_num=2, screen_size=42).observation_space.shape == (2, 42, 42)


def test_a_lost_life_ends_an_episode_and_the_game_continues() -> None:
    env = make_atari(BREAKOUT, repeat_action_probability=0.0, **TRAINING)
    lives, frames = [], []
    for _ in range(6):
        _, info = env.reset(seed=0 if not lives else None)
        lives.append(info["lives"])
        frames.append(info["episode_frame_number"])
        done = False
        while not done:
            _, reward, terminated, truncated, info = env.step(0)
            done = terminated or truncated
            assert reward in (-1.0, 0.0, 1.0)
    # Five lives are a game, whose frames go on; the sixth episode is a new game.
    assert lives == [5, 4, 3, 2, 1, 5]
    assert frames[:5] == sorted(frames[:5])
    assert frames[5] < frames[4]


def test_a_seed_starts_a_new_game() -> None:
    env = make_atari(BREAKOUT, repeat_action_probability=0.0, **TRAINING)
    env.reset(seed=0)
    while not env.step(0)[2]:
        pass
    assert env.reset(seed=1)[1]["lives"] == 5


def test_an_evaluated_game_starts_each_life_automatically() -> None:
    """Without the wrapper, a policy that never fires waits for 27,000 steps."""
    env = make_atari(BREAKOUT, repeat_action_probability=0.0)
    _, info = env.reset(seed=0)
    steps, lives, done = 0, [info["lives"]], False
    while not done and steps < 1000:
        _, _, terminated, truncated, info = env.step(0)
        steps, done = steps + 1, terminated or truncated
        lives.append(info["lives"])
    assert done
    assert sorted(set(lives)) == [0, 1, 2, 3, 4, 5]


def test_games_without_a_fire_action_have_no_fire_wrapper() -> None:
    assert "FireOnReset" in names(make_atari(BREAKOUT))
    assert "FireOnReset" not in names(make_atari(BREAKOUT, fire_on_reset=False))
    assert "FireOnReset" not in names(make_atari("ALE/MsPacman-v5"))
    assert names(make_atari(BREAKOUT, **TRAINING))[:4] == [
        "FrameStackObservation",
        "TransformReward",
        FireOnReset.__name__,
        LifeEpisodes.__name__,
    ]


def test_environments_are_pickled_for_workers_and_checkpoints() -> None:
    env = pickle.loads(pickle.dumps(make_atari(BREAKOUT, **TRAINING)))
    assert env.reset(seed=0)[0].shape == (4, 84, 84)


def test_other_environments_are_rejected() -> None:
    with pytest.raises(EnvironmentSpecError, match="must have an id such as 'ALE/Breakout-v5', got 'CartPole-v1'"):
        make_atari("CartPole-v1")
    with pytest.raises(EnvironmentSpecError, match=r"no environment 'ALE/Brakeout-v5'; .*'ALE/Breakout-v5'"):
        make_atari("ALE/Brakeout-v5")
    with pytest.raises(ArgumentError, match="stack_num"):
        make_atari(BREAKOUT, stack_num=0)


def test_a_buffer_of_last_frames_rebuilds_the_observed_stacks() -> None:
    make = partial(make_atari, BREAKOUT, **TRAINING)
    buffers = [
        VectorReplayBuffer(600, 2),
        VectorReplayBuffer(600, 2, stack_num=4, ignore_obs_next=True, save_only_last_obs=True, compress=True),
    ]
    for buffer in buffers:
        space = make().action_space
        space.seed(3)
        with Collector("random", [make] * 2, buffer, seed=5, infos=False) as collector:
            collector.collect(n_step=300)
    indices = np.arange(300)
    indices = np.concatenate([indices[:150], 300 + indices[:150]])
    full, frames = (buffer[indices] for buffer in buffers)
    np.testing.assert_array_equal(full.act, frames.act)
    assert full.terminated.sum() > 3
    np.testing.assert_array_equal(full.obs, frames.obs)
    ends = full.terminated | full.truncated
    np.testing.assert_array_equal(full.obs_next[~ends], frames.obs_next[~ends])

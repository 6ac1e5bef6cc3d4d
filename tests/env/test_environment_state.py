"""Environments continue from their pickles exactly as they would have, and keep what cannot be pickled."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import EzPickle
from gymnasium.vector import SyncVectorEnv
from mpe2 import simple_spread_v3

from samplebatch.env.environment_state import load_environments, save_environment, save_environments
from samplebatch.errors import EnvironmentSpecError


def vector() -> Any:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)


def step(env: Any) -> list[Any]:
    """Step a Gymnasium environment, and reset it after an episode."""
    actions = np.zeros(env.action_space.shape, env.action_space.dtype)
    actual = env.step(actions if actions.shape else 0)
    if not isinstance(env, SyncVectorEnv) and (actual[2] or actual[3]):
        return [*actual, env.reset()]
    return [*actual]


@pytest.mark.parametrize("make", [lambda: gymnasium.make("CartPole-v1"), lambda: gymnasium.make("Pendulum-v1"), vector])
def test_steps_and_resets_resume_exactly(make: Any) -> None:
    env, again = make(), make()
    env.reset(seed=1)
    for _ in range(30):
        step(env)
    saved = pickle.loads(pickle.dumps(save_environments([env])))
    assert load_environments([again], saved)
    for _ in range(60):
        assert str(step(env)) == str(step(again))


def test_objects_that_pickle_only_their_arguments_are_pickled_completely() -> None:
    env, again = simple_spread_v3.parallel_env(), simple_spread_v3.parallel_env()
    assert isinstance(env.unwrapped, EzPickle)
    env.reset(seed=1)
    saved = save_environments([env])
    screen = again.unwrapped.screen
    assert load_environments([again], saved)
    for _ in range(40):
        if not env.agents:
            env.reset()
            again.reset()
        actions = dict.fromkeys(env.agents, 1)
        assert str(env.step(actions)) == str(again.step(actions))
    assert again.unwrapped.screen is screen, "windows are not saved: those of the environment stay"


class Simulated(gymnasium.Env[Any, Any]):
    """Environment with an attribute that cannot be pickled."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.simulator = threading.Lock()


def test_an_environment_that_cannot_be_pickled_reports_the_reason() -> None:
    saved = save_environments([gymnasium.make("CartPole-v1"), Simulated()])
    assert saved["pickles"] is None
    assert "cannot pickle" in str(saved["why"])
    assert not load_environments([gymnasium.make("CartPole-v1"), Simulated()], saved)


def test_the_state_of_another_class_is_rejected() -> None:
    saved = save_environments([vector()])
    with pytest.raises(EnvironmentSpecError, match=r"must be of a .*, got a SyncVectorEnv"):
        load_environments([gymnasium.make("CartPole-v1")], saved)


def test_other_references_see_the_restored_state_of_the_environment() -> None:
    env, again = gymnasium.make("Pendulum-v1"), gymnasium.make("Pendulum-v1")
    env.reset(seed=1)
    known_to_its_maker = again
    load_environments([again], {"pickles": [save_environment(env)], "why": None})
    assert step(known_to_its_maker)[1] == step(env)[1]

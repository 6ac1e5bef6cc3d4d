"""Environments of a list are stepped in sequence, reset immediately, converted exactly, and rejected by name."""

from __future__ import annotations

from typing import Any

import gymnasium
import gyms
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv

from samplebatch import Collector, ReplayBuffer
from samplebatch.env.as_environments import as_environments
from samplebatch.env.gymnasium import EnvironmentList
from samplebatch.errors import ArgumentError, EnvironmentSpecError

PUSH = spaces.Discrete(2)
"""Acts at random in CartPole."""


def stay(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


def make_cart() -> Any:
    return gymnasium.make("CartPole-v1")


# What a collector takes as its environment


@pytest.mark.parametrize(
    ("env", "options", "count"),
    [
        ("CartPole-v1", {}, 1),
        ("CartPole-v1", {"num_envs": 3}, 3),
        ("gymnasium.envs.classic_control:CartPoleEnv", {"num_envs": 2}, 2),
        (make_cart, {"num_envs": 2}, 2),
        (CartPoleEnv, {"num_envs": 2}, 2),
        ([make_cart, make_cart], {}, 2),
        ([make_cart, "CartPole-v1"], {"num_envs": 2}, 2),
        ((make_cart,), {}, 1),
    ],
)
def test_environments_are_created_from_ids_and_functions(env: Any, options: dict[str, Any], count: int) -> None:
    with Collector(PUSH, env, seed=1, **options) as collector:
        batch = collector.collect(n_step=10 * count).batch
        assert [isinstance(item, gymnasium.Env) for item in collector.env] == [True] * count
    assert collector.num_envs == count
    assert np.unique(batch["env_id"]).tolist() == list(range(count))


def test_environments_of_a_list_are_stepped_directly() -> None:
    envs = [gyms.Ladder(number, 4) for number in range(2)]
    with Collector(stay, envs) as collector:
        collector.collect(n_step=6)
        assert collector.env == envs
    assert [len(env.made) for env in envs] == [3, 3]
    assert all(env.closed for env in envs)


def test_a_vector_environment_may_be_created_by_a_function() -> None:
    def make() -> Any:
        return gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")

    with Collector(PUSH, make) as collector:
        assert collector.num_envs == 3


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ([make_cart, make_cart], {"num_envs": 3}, "num_envs must be 2, the number of environments in env, a list"),
        (gyms.Ladder(0), {"num_envs": 2}, "num_envs must be 1, the number of environments in env, a Ladder"),
        (make_cart, {"num_envs": 0}, "num_envs must be a whole number from 1, got 0"),
        (make_cart, {"num_envs": 2.0}, r"num_envs must be a whole number from 1, got 2\.0"),
    ],
)
def test_a_wrong_number_of_environments_is_rejected(env: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Collector(stay, env, **options)


class Wide(gyms.Ladder):
    def __init__(self) -> None:
        super().__init__(1)
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)


class Armed(gyms.Nested):
    def __init__(self) -> None:
        super().__init__(1)
        self.action_space["hands"] = spaces.MultiDiscrete([2, 4])


TWICE = gyms.Ladder(0)


@pytest.mark.parametrize(
    ("envs", "message"),
    [
        ([], "at least one environment, got none"),
        ([gyms.Ladder(0), 7], "environment 1 must be a single Gymnasium environment, got a int"),
        (
            [gymnasium.make_vec("CartPole-v1", 2)],
            "environment 0 must be a single Gymnasium environment, got a Cart",
        ),
        ([TWICE, gyms.Ladder(1), TWICE], "got environment 2 twice"),
        (
            [gyms.Ladder(0), Wide()],
            r"column 'obs' must have the space of environment 0, .*\(3,\).*, got .*\(4,\).* environment 1",
        ),
        ([gyms.Nested(0), Armed()], r"column 'actions\.hands' must .*\[2 3\].*, got .*\[2 4\].* environment 1"),
        ([gyms.Ladder(0), gyms.Nested(1)], r"column 'obs' must have the space of environment 0, Box.*, got Dict"),
        (["mpe2/simple_spread_v3"], "environment 0 must be a single Gymnasium environment"),
        ("mpe2/simple_spread_v3", "several agents; use a MultiAgentCollector"),
        (["CartPoll-v1"], "no environment 'CartPoll-v1'; did you mean 'CartPole-v1'"),
        ([lambda: 7], "must create an environment"),
    ],
)
def test_incompatible_environments_are_rejected(envs: Any, message: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=message):
        as_environments(envs)


def test_a_failed_creation_closes_environments_created_before() -> None:
    created: list[Any] = []

    def make() -> Any:
        created.append(gyms.Ladder(0))
        return created[-1]

    with pytest.raises(EnvironmentSpecError, match="CartPoll"):
        as_environments([make, make, "CartPoll-v1"])
    assert [env.closed for env in created] == [True, True]


# Resets


def test_every_environment_of_a_list_is_seeded() -> None:
    envs = [gyms.Ladder(number, 2) for number in range(2)]
    environments = EnvironmentList(envs)
    environments.reset(seeds=[3, 4], options={"level": 1})
    environments.reset(seeds=[3, 4], seed=8)
    environments.reset(seed=[5, None])
    environments.reset()
    assert [env.resets for env in envs] == [
        [(3, {"level": 1}), (8, None), (5, None), (None, None)],
        [(4, {"level": 1}), (9, None), (None, None), (None, None)],
    ]
    with pytest.raises(EnvironmentSpecError, match="one number for each of 2 environments, got 3"):
        environments.reset(seed=[1, 2, 3])


class Stuck(gyms.Ladder):
    """Ladder that raises an error in its second reset."""

    def reset(self, **options: Any) -> Any:
        if len(self.resets) == 1:
            self.resets.append(None)
            raise OSError("the rope tore")
        return super().reset(**options)


def test_a_failed_reset_loses_no_step() -> None:
    buffer = ReplayBuffer(20)
    with Collector(stay, Stuck(0, 3), buffer) as collector:
        with pytest.raises(OSError, match="the rope tore"):
            collector.collect(n_step=9)
        assert buffer.terminated.sum() == 1
        assert len(buffer) == 3
        assert collector.collect(n_step=3).n_collected_episodes == 1


class Forgetful(gyms.Ladder):
    """Ladder whose second reset returns no observation or an invalid result."""

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return (obs, info) if self._episode == 0 else self.say(obs)

    def say(self, obs: Any) -> Any:
        return None, {}


class Old(Forgetful):
    """Ladder whose reset returns only an observation, as in old Gym."""

    def say(self, obs: Any) -> Any:
        return obs


class Silent(Forgetful):
    """Ladder whose infos are not a dict."""

    def say(self, obs: Any) -> Any:
        return obs, ["begun"]


@pytest.mark.parametrize(
    ("kind", "requirement"),
    [
        (Forgetful, "column 'obs' must contain numbers, got a NoneType"),
        (Old, "reset must return 2 values, got a single ndarray"),
        (Silent, "column 'infos' must contain dicts, got a list"),
    ],
)
def test_values_of_resets_after_an_episode_are_checked(kind: type[Any], requirement: str) -> None:
    match = f"^{requirement} from environment 1 in the reset after step 4$"
    with (
        pytest.raises(EnvironmentSpecError, match=match),
        Collector(stay, [gyms.Ladder(0, 9), kind(1, 4)]) as collector,
    ):
        collector.collect(n_step=30)


class Renamed(gyms.Ladder):
    """Ladder whose third step returns four values, as in old Gym."""

    def step(self, action: Any) -> Any:
        obs, reward, over, _, info = super().step(action)
        return (obs, reward, over, info) if len(self.made) == 3 else (obs, reward, over, False, info)


def test_steps_of_another_number_of_values_are_rejected() -> None:
    match = "^step must return 5 values, got 4 from environment 1 in step 3$"
    with Collector(stay, [gyms.Ladder(0, 9), Renamed(1, 9)]) as collector:
        with pytest.raises(EnvironmentSpecError, match=match):
            collector.collect(n_step=30)
        assert collector.collect(n_step=2).n_collected_steps == 4


# What is handed out


@pytest.mark.parametrize("count", [1, 3])
def test_environments_may_reuse_their_arrays_and_infos(count: int) -> None:
    with Collector(stay, [gyms.Reusing(number, 4, with_infos=True) for number in range(count)]) as collector:
        batch = collector.collect(n_step=10 * count).batch
    assert (batch["new_obs"][:, 2] == batch["obs"][:, 2] + 1).all()
    assert [info["step"] for info in batch["infos"]] == (batch["t"] + 1).tolist()


def test_a_first_observation_of_a_wider_dtype_is_preserved() -> None:
    class Wider(gyms.Ladder):
        def _observe(self) -> Any:
            obs = super()._observe()
            return obs.astype(np.float64) + 1e-9 if self._episode else obs

    with Collector(stay, [gyms.Ladder(0, 9), Wider(1, 2)]) as collector:
        batch = collector.collect(n_step=8).batch
    started = (batch["env_id"] == 1) & (batch["t"] == 0)
    assert batch["obs"].dtype == np.float64
    assert (batch["obs"][started][1] != batch["obs"][started][1].astype(np.float32)).all()


def test_every_environment_is_rendered_and_closed() -> None:
    class Sticking(gyms.Ladder):
        def close(self) -> None:
            super().close()
            raise OSError("the door sticks")

    envs = [Sticking(0), gyms.Ladder(1), Sticking(2)]
    collector = Collector(stay, envs)
    collector.collect(n_step=6, render=0.0)
    assert [env.renders for env in envs] == [2, 2, 2]
    with pytest.raises(OSError, match="the door sticks"):
        collector.close()
    assert all(env.closed for env in envs)

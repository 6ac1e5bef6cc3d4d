"""A plain SyncVectorEnv is stepped environment by environment: values are stored exactly or rejected."""

from __future__ import annotations

from typing import Any

import gymnasium
import gyms
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from samplebatch import Collector
from samplebatch.env.as_environments import as_environments
from samplebatch.env.gymnasium import SyncEnvironments
from samplebatch.errors import EnvironmentSpecError

MODES = list(AutoresetMode)


def stay(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


class Odd(gyms.Ladder):
    """Ladder that returns an invalid value in its second step, or in the reset after its first episode."""

    def __init__(self, position: int, value: Any, *, resets: bool = False) -> None:
        super().__init__(1, 4)
        self._position, self._value, self._resets_oddly = position, value, resets

    def step(self, action: Any) -> Any:
        step: list[Any] = list(super().step(action))
        if self._step == 2 and not self._resets_oddly:
            step[self._position] = self._value
        return tuple(step)

    def reset(self, **options: Any) -> Any:
        result = super().reset(**options)
        return (self._value, {}) if self._resets_oddly and self._episode else result


def vector(*envs: Any, mode: Any = AutoresetMode.NEXT_STEP, **options: Any) -> SyncVectorEnv:
    return SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=mode, **options)


CONVERTED = [
    (0, None, "'obs' must contain numbers, got a NoneType"),
    (1, None, "'rewards' must contain numbers, got a NoneType"),
    (1, 2**53 + 1, "'rewards' must have dtype float64"),
    (2, 0.5, "'terminateds' must have dtype bool, got a value of float64"),
    (3, "no", "'truncateds' must contain numbers, got a str"),
]
"""Values that Gymnasium would make NaN, True, or something near."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("position", "value", "requirement"), CONVERTED)
def test_values_that_gymnasium_would_change_are_rejected(
    position: int, value: Any, requirement: str, mode: Any
) -> None:
    with (
        pytest.raises(EnvironmentSpecError, match=f"^column {requirement}.* from environment 1 in step 2$"),
        Collector(stay, vector(gyms.Ladder(0), Odd(position, value), mode=mode)) as collector,
    ):
        collector.collect(n_step=12)


@pytest.mark.parametrize("mode", MODES)
def test_values_that_gymnasium_would_round_are_preserved(mode: Any) -> None:
    wide = np.array([0.1, 1e300, 0.2])
    with Collector(stay, vector(gyms.Ladder(0), Odd(0, wide), mode=mode)) as collector:
        batch = collector.collect(n_step=8).batch
    assert batch["new_obs"][(batch["env_id"] == 1) & (batch["t"] == 1)].tolist() == [wide.tolist()]


@pytest.mark.parametrize("mode", MODES)
def test_resets_are_checked_in_every_mode(mode: Any) -> None:
    where = "step 5" if mode == AutoresetMode.NEXT_STEP else "the reset after step 4"
    requirement = f"^column 'obs' must contain numbers, got a NoneType from environment 1 in {where}$"
    env = vector(gyms.Ladder(0, 9), Odd(0, None, resets=True), mode=mode)
    with pytest.raises(EnvironmentSpecError, match=requirement), Collector(stay, env) as collector:
        collector.collect(n_step=30)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_infos", [False, True])
def test_steps_agree_with_gymnasium(mode: Any, with_infos: bool) -> None:
    def create(env: Any) -> Any:
        with Collector(stay, env, seed=5) as collector:
            return [collector.collect(n_step=31).batch for _ in range(2)]

    def ladders() -> SyncVectorEnv:
        return vector(*(gyms.Ladder(n, 2 + n, truncates=n == 1, with_infos=with_infos) for n in range(3)), mode=mode)

    wrapped = gymnasium.wrappers.vector.TransformReward(ladders(), lambda reward: reward)
    for ours, theirs in zip(create(ladders()), create(wrapped), strict=True):
        assert list(ours) == list(theirs)
        for name in set(ours) - {"eps_id"}:
            assert ours[name].dtype == theirs[name].dtype
            assert ours[name].tolist() == theirs[name].tolist(), name


@pytest.mark.parametrize("mode", MODES)
def test_seeds_and_options_are_passed_to_the_environments(mode: Any) -> None:
    env = vector(gyms.Ladder(0, 2), gyms.Ladder(1, 2), mode=mode)
    environments = as_environments(env)
    environments.reset(seeds=[3, 4], options={"level": 1})
    environments.reset(seeds=[3, 4], seed=8)
    assert [item.resets for item in env.envs] == [
        [(3, {"level": 1}), (8, None)],
        [(4, {"level": 1}), (9, None)],
    ]
    with pytest.raises(EnvironmentSpecError, match="options must have no 'reset_mask'"):
        environments.reset(options={"reset_mask": np.array([True, False])})


@pytest.mark.parametrize("mode", MODES)
def test_the_vector_environment_can_be_used_again(mode: Any) -> None:
    env = vector(gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1"), mode=mode)
    fresh = vector(gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1"), mode=mode)
    collector = Collector("random", env, seed=1)
    assert collector.env is env
    collector.collect(n_step=100)
    for part in (env, fresh):
        part.action_space.seed(3)
    observed = [item.reset(seed=7)[0].tolist() for item in (env, fresh)]
    assert observed[0] == observed[1]
    actions = [fresh.action_space.sample() for _ in range(8)]
    stepped = [[item.step(action)[0].tolist() for action in actions] for item in (env, fresh)]
    assert stepped[0] == stepped[1]
    # One generator each, which the collector let run on.
    assert [item.bit_generator.state for item in env.np_random] == [
        item.bit_generator.state for item in fresh.np_random
    ]
    collector.close()
    assert env.closed


def test_environments_are_rendered_and_closed_by_the_vector_environment() -> None:
    env = vector(gyms.Ladder(0), gyms.Ladder(1))
    with Collector(stay, env) as collector:
        collector.collect(n_step=4, render=0.0)
    assert [item.renders for item in env.envs] == [2, 2]
    assert all(item.closed for item in env.envs)


class Doubled(SyncVectorEnv):
    """Wrapper that doubles rewards."""

    def step(self, actions: Any) -> Any:
        obs, rewards, *others = super().step(actions)
        return obs, 2 * rewards, *others


def test_vector_environments_with_overrides_are_stepped_together() -> None:
    makers = [lambda: gyms.Ladder(0)] * 2
    replaced = SyncVectorEnv(makers)
    replaced.step = Doubled(makers).step  # type: ignore[method-assign]
    wider = spaces.Box(-9, 9, (3,), np.float32)
    of_their_own = SyncVectorEnv(makers, observation_mode=(gymnasium.vector.utils.batch_space(wider, 2), wider))
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(SyncVectorEnv(makers))
    for env in (Doubled(makers), replaced, of_their_own, wrapped):
        assert not isinstance(as_environments(env), SyncEnvironments)
    assert isinstance(as_environments(SyncVectorEnv(makers)), SyncEnvironments)
    with Collector(stay, Doubled(makers)) as collector:
        assert collector.collect(n_step=4).batch["rewards"].tolist() == [2, 4, 2, 4]

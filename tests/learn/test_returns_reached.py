"""DDPG, TD3, SAC and the offline algorithms reach the required returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samplebatch import Collector, Dataset, VectorReplayBuffer
from samplebatch.learn import (
    CQL,
    DDPG,
    SAC,
    TD3,
    AdamOptimizerFactory,
    AutoAlpha,
    BehaviourCloning,
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    DiscreteActor,
    DiscreteBCQ,
    DiscreteBCQPolicy,
    DiscreteCritic,
    GaussianNoise,
    ImitationPolicy,
    Net,
    OfflineTrainerParams,
    OffPolicyTrainerParams,
    SACPolicy,
)
from tests.learn.tasks import Aim, Match

SILENT: Any = {"verbose": False, "show_progress": False}


def parts(env: Any, hidden: list[int], rate: float) -> dict[str, Any]:
    factory = AdamOptimizerFactory(lr=rate)
    critics = [ContinuousCritic.for_space(env.observation_space, env.action_space, hidden) for _ in range(2)]
    return {"policy_optim": factory, "critic_optim": factory, "critic": critics[0], "critic2": critics[1]}


def soft_policy(env: Any, hidden: list[int]) -> SACPolicy:
    body = Net.for_space(env.observation_space, hidden)
    actor = ContinuousActorProbabilistic.for_space(body, env.action_space, conditioned_sigma=True)
    return SACPolicy(actor=actor, action_space=env.action_space)


def deterministic_policy(env: Any, hidden: list[int]) -> ContinuousDeterministicPolicy:
    return ContinuousDeterministicPolicy(
        actor=ContinuousActorDeterministic.for_space(Net.for_space(env.observation_space, hidden), env.action_space),
        action_space=env.action_space,
        exploration_noise=GaussianNoise(sigma=0.2),
    )


def td3(env: Any, hidden: list[int], rate: float, **options: Any) -> TD3:
    return TD3(policy=deterministic_policy(env, hidden), **parts(env, hidden, rate), **options)


def ddpg(env: Any, hidden: list[int], rate: float, **options: Any) -> DDPG:
    one_critic = {name: part for name, part in parts(env, hidden, rate).items() if name != "critic2"}
    return DDPG(policy=deterministic_policy(env, hidden), **one_critic, **options)


def sac(env: Any, hidden: list[int], rate: float, **options: Any) -> SAC:
    alpha = AutoAlpha(-1.0, 0.0, AdamOptimizerFactory(lr=rate))
    return SAC(policy=soft_policy(env, hidden), alpha=alpha, **parts(env, hidden, rate), **options)


def cql(env: Any) -> CQL:
    options: dict[str, Any] = {"gamma": 0.5, "alpha": 0.02, "tau": 0.05, "num_repeat_actions": 4}
    penalty: dict[str, Any] = {"with_lagrange": False, "cql_weight": 0.1, "calibrated": False}
    return CQL(policy=soft_policy(env, [32]), **parts(env, [32], 3e-3), **options, **penalty)


def bcq(env: Any) -> DiscreteBCQ:
    heads = [
        head.for_space(Net.for_space(env.observation_space, [32]), env.action_space)
        for head in (DiscreteCritic, DiscreteActor)
    ]
    policy = DiscreteBCQPolicy(model=heads[0], imitator=heads[1], action_space=env.action_space)
    return DiscreteBCQ(policy=policy, optim=AdamOptimizerFactory(lr=3e-3), gamma=0.5, target_update_freq=20)


def cloning(env: Any) -> BehaviourCloning:
    policy = ImitationPolicy(
        actor=DiscreteActor.for_space(Net.for_space(env.observation_space, [32]), env.action_space),
        action_space=env.action_space,
    )
    return BehaviourCloning(policy=policy, optim=AdamOptimizerFactory(lr=1e-2))


def mean_return(policy: Any, env: Any, episodes: int = 30) -> float:
    with Collector(policy, env, seed=5) as collector:
        return float(np.mean(collector.collect(n_episode=episodes).returns))


def learn_online(
    algorithm: Any, envs: Any, *, steps: int, start: int, batch_size: int, enough: float | None = None
) -> None:
    """Train with one gradient step per environment step, after `start` random steps.

    With `enough`, stop after 1,000, 2,000, ... steps if the mean return of 20 test episodes exceeds `enough`.
    """
    buffer = VectorReplayBuffer(20_000, len(envs))
    with (
        Collector(algorithm.policy, envs, buffer, exploration_noise=True, seed=1) as collector,
        Collector(algorithm.policy, envs, seed=2) as tests,
    ):
        collector.collect(n_step=start, random=True)
        params = OffPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1 if enough is None else steps // 1000,
            epoch_num_steps=steps if enough is None else 1000,
            test_collector=None if enough is None else tests,
            test_step_num_episodes=20,
            stop_fn=None if enough is None else lambda reward: reward > enough,
            collection_step_num_env_steps=len(envs),
            batch_size=batch_size,
            **SILENT,
        )
        algorithm.run_training(params)


@pytest.mark.parametrize("make", [pytest.param(td3, marks=pytest.mark.long), ddpg, sac])
def test_continuous_actions_are_learned_from_observed_targets(make: Any) -> None:
    """A random policy gets about -9, the best one 0."""
    torch.manual_seed(0)
    algorithm = make(Aim(), [32], 3e-3, gamma=0.5, tau=0.05)
    learn_online(algorithm, [Aim] * 4, steps=500, start=200, batch_size=64)
    assert mean_return(algorithm.policy, Aim()) > -1.5


@pytest.mark.long
@pytest.mark.parametrize("make", [td3, ddpg, sac])
def test_the_pendulum_task_is_learned(make: Any) -> None:
    """A random policy gets about -1200, good ones about -150."""
    import gymnasium

    torch.manual_seed(0)
    env = gymnasium.make("Pendulum-v1")
    algorithm = make(env, [64, 64], 1e-3, gamma=0.98, tau=0.02)
    learn_online(algorithm, ["Pendulum-v1"] * 2, steps=8000, start=1000, batch_size=128, enough=-250)
    assert mean_return(algorithm.policy, env, 10) > -300


def learn_offline(algorithm: Any, collector: Collector, folder: Path, *, updates: int, random: bool) -> Any:
    """Write some steps of a collector into a dataset, and learn from its folder."""
    with collector:
        Dataset(folder).extend(collector.collect(n_step=1500, random=random).batch)
    params = OfflineTrainerParams(buffer=folder, max_epochs=1, epoch_num_steps=updates, batch_size=64, **SILENT)
    algorithm.run_training(params)
    return algorithm.policy


@pytest.mark.parametrize("make", [bcq, cloning])
def test_discrete_actions_are_learned_from_data(make: Any, tmp_path: Path) -> None:
    """80 % of the actions in the data are right; the best return is 8, random actions get 8 / 3."""
    rng, env = np.random.default_rng(0), Match()
    torch.manual_seed(0)

    def mostly_right(obs: Any) -> Any:
        return np.where(rng.random(len(obs)) < 0.8, obs.argmax(1), rng.integers(0, 3, len(obs)))

    collector = Collector(mostly_right, [Match] * 2, seed=0)
    policy = learn_offline(make(env), collector, tmp_path / "steps", updates=200, random=False)
    assert mean_return(policy, env) > 7.5


@pytest.mark.long
def test_cql_learns_a_better_policy_than_its_random_data(tmp_path: Path) -> None:
    torch.manual_seed(0)
    algorithm = cql(Aim())
    collector = Collector(algorithm.policy, [Aim] * 2, seed=0)
    policy = learn_offline(algorithm, collector, tmp_path / "steps", updates=400, random=True)
    assert mean_return(policy, Aim()) > -3.0

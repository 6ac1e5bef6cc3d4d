"""Algorithms learn from hindsight buffers: targets are of the goals that rows were given, networks join their parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samplebatch import Collector, HERVectorReplayBuffer, RolloutWorkers, VectorReplayBuffer
from samplebatch.learn import (
    DQN,
    SAC,
    TD3,
    AdamOptimizerFactory,
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    DiscreteCritic,
    DiscreteQLearningPolicy,
    GaussianNoise,
    Net,
    OffPolicyTrainerParams,
    SACPolicy,
    policy_within_training_step,
)
from tests.learn.goals import BitFlipping, PointReaching, bit_reward, point_reward

SPACE, ACTIONS = PointReaching.observation_space, PointReaching.action_space
ENVS = 4


def two_critics(hidden: list[int], rate: float) -> dict[str, Any]:
    factory = AdamOptimizerFactory(lr=rate)
    return {
        "policy_optim": factory,
        "critic_optim": factory,
        "critic": ContinuousCritic.for_space(SPACE, ACTIONS, hidden),
        "critic2": ContinuousCritic.for_space(SPACE, ACTIONS, hidden),
    }


def sac(hidden: list[int], rate: float = 1e-3, **options: Any) -> SAC:
    actor = ContinuousActorProbabilistic.for_space(Net.for_space(SPACE, hidden), ACTIONS, conditioned_sigma=True)
    return SAC(policy=SACPolicy(actor=actor, action_space=ACTIONS), **two_critics(hidden, rate), **options)


def td3(hidden: list[int], rate: float = 1e-3, **options: Any) -> TD3:
    policy = ContinuousDeterministicPolicy(
        actor=ContinuousActorDeterministic.for_space(Net.for_space(SPACE, hidden), ACTIONS),
        action_space=ACTIONS,
        exploration_noise=GaussianNoise(sigma=0.3),
    )
    return TD3(policy=policy, **two_critics(hidden, rate), **options)


def dqn(hidden: list[int], **options: Any) -> DQN:
    space, actions = BitFlipping.observation_space, BitFlipping.action_space
    policy = DiscreteQLearningPolicy(
        model=DiscreteCritic.for_space(Net.for_space(space, hidden), actions), action_space=actions, eps_training=0.2
    )
    return DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), **options)


def buffer_for(env: Any, hindsight: bool = True, size: int = 40_000) -> Any:
    reward = point_reward if env is PointReaching else bit_reward
    if not hindsight:
        return VectorReplayBuffer(size, ENVS)
    return HERVectorReplayBuffer(size, ENVS, reward, horizon=12, future_k=5.0)


def train(algorithm: Any, env: Any, buffer: Any, *, steps: int, batch: int = 128) -> float:
    """Alternate collection and updates; return the fraction of 100 test episodes that end at the goal."""
    with Collector(algorithm.policy, [env] * ENVS, buffer, exploration_noise=True, seed=1) as collector:
        collector.collect(n_step=400, random=True)
        for _ in range(steps // ENVS):
            with policy_within_training_step(algorithm.policy):
                collector.collect(n_step=ENVS)
            algorithm.update(buffer=buffer, sample_size=batch)
    with Collector(algorithm.policy, [env] * ENVS, seed=2) as test:
        steps_made = test.collect(n_episode=100).batch
    ends = steps_made["terminateds"] | steps_made["truncateds"]
    return float((steps_made["rewards"][ends] == 0.0).mean())


class GoalValue(torch.nn.Module):
    """Critic whose value is the first number of the goal."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = torch.nn.Parameter(torch.zeros(1))

    def forward(self, obs: Any, act: torch.Tensor) -> torch.Tensor:
        return obs["desired_goal"][:, :1] + self.zero * act[:, :1]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("make", [sac, td3])
def test_targets_use_the_substituted_goals(make: Any, n_step: int) -> None:
    buffer = buffer_for(PointReaching)
    with Collector("random", [PointReaching] * ENVS, buffer, seed=0) as collector:
        collector.collect(n_step=200)
    algorithm = make([8], n_step_return_horizon=n_step, gamma=0.9, **({"alpha": 0.0} if make is sac else {}))
    algorithm.critic_old.module = algorithm.critic2_old.module = GoalValue()
    batch, indices = algorithm._sample_batch(buffer, 256)
    stored = buffer[indices]
    goals = batch.obs.desired_goal.numpy()
    changed = (goals != stored.obs.desired_goal).any(-1)
    assert 0.6 < changed.mean() < 0.95
    np.testing.assert_array_equal(batch.obs_next.desired_goal.numpy(), goals)
    summed, discount = batch.returns.clone(), batch.discount.clone()
    reached = algorithm._preprocess_batch(batch, buffer, indices).returns
    torch.testing.assert_close(reached, summed + discount * batch.obs.desired_goal[:, 0])
    if n_step == 1:
        achieved = stored.obs_next.achieved_goal
        np.testing.assert_allclose(summed.numpy(), point_reward(achieved, goals), rtol=1e-6)
        assert (summed.numpy() != stored.rew.astype(np.float32)).any()


@pytest.mark.long
@pytest.mark.parametrize("make", [sac, td3])
def test_a_point_learns_to_reach_its_goals(make: Any) -> None:
    torch.manual_seed(0)
    algorithm = make([64, 64], gamma=0.95, tau=0.02, **({"alpha": 0.05} if make is sac else {}))
    assert train(algorithm, PointReaching, buffer_for(PointReaching), steps=8000) > 0.9


@pytest.mark.long
def test_workers_fill_a_hindsight_buffer_while_the_algorithm_updates() -> None:
    torch.manual_seed(0)
    algorithm, buffer = dqn([16]), buffer_for(BitFlipping)
    with RolloutWorkers(algorithm.policy, BitFlipping, buffer, num_workers=2, envs_per_worker=2, seed=0) as workers:
        params = OffPolicyTrainerParams(
            training_collector=workers, max_epochs=1, epoch_num_steps=160, collection_step_num_env_steps=40,
            update_step_num_gradient_steps_per_sample=0.1, overlap=True, verbose=False, show_progress=False,
        )  # fmt: skip
        info = algorithm.run_training(params)
    assert (info.train_step, algorithm.updates, len(buffer)) == (160, 16, 160)
    rows, indices = buffer.sample(500)
    after = rows.obs_next
    np.testing.assert_array_equal(rows.rew, bit_reward(after.achieved_goal, after.desired_goal))
    changed = (after.desired_goal != buffer[indices].obs_next.desired_goal).any(-1)
    assert 0.5 < changed.mean() < 0.95


@pytest.mark.long
def test_bit_flipping_is_learned_with_hindsight_and_not_without() -> None:
    reached = []
    for hindsight in (True, False):
        torch.manual_seed(0)
        algorithm = dqn([128], gamma=0.98, target_update_freq=100)
        reached.append(train(algorithm, BitFlipping, buffer_for(BitFlipping, hindsight), steps=16_000))
    assert reached[0] > 0.8
    assert reached[1] < 0.2

"""DQN on CartPole, with double Q-learning and prioritized three-step replay.

python docs/examples/dqn_cartpole.py

prints a line for every epoch and test, and then the mean return of 20 episodes without
exploration. `--steps` sets the number of environment steps, and `--seed` sets the seed.
"""

from __future__ import annotations

import argparse

import gymnasium
import torch

from samplebatch import Collector, PrioritizedVectorReplayBuffer
from samplebatch.learn import (
    DQN,
    AdamOptimizerFactory,
    DiscreteCritic,
    DiscreteQLearningPolicy,
    LinearSchedule,
    LRSchedulerFactoryLinear,
    Net,
    OffPolicyTrainerParams,
)

ENV, ENVS, CAPACITY, WARM_UP, EPOCHS = "CartPole-v1", 8, 50_000, 1_000, 5


def main(steps: int, seed: int) -> float:
    """Train the policy and return the mean return of 20 evaluation episodes."""
    torch.set_num_threads(
        1
    )  # for networks as small as these, threads cost more than they save
    torch.manual_seed(seed)
    env = gymnasium.make(ENV)
    policy = DiscreteQLearningPolicy(
        model=DiscreteCritic.for_space(
            Net.for_space(env.observation_space, [128, 128]), env.action_space
        ),
        action_space=env.action_space,
        eps_training=LinearSchedule(1.0, 0.02, steps // 5),
    )
    # An update for every two steps that are collected.
    rate = LRSchedulerFactoryLinear(EPOCHS, steps // EPOCHS, 2)
    algorithm = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-3).with_lr_scheduler_factory(rate),
        n_step_return_horizon=3,
        target_update_freq=100,
        huber_loss_delta=1.0,
        max_grad_norm=10.0,
    )
    buffer = PrioritizedVectorReplayBuffer(
        CAPACITY, ENVS, alpha=0.5, beta=0.4, random_seed=seed
    )
    beta = LinearSchedule(0.4, 1.0, steps)
    with (
        Collector(
            policy, ENV, buffer, num_envs=ENVS, exploration_noise=True, seed=seed
        ) as training,
        Collector(policy, ENV, seed=seed + 1) as test,
    ):
        training.collect(n_step=WARM_UP, random=True)
        params = OffPolicyTrainerParams(
            training_collector=training,
            test_collector=test,
            max_epochs=EPOCHS,
            epoch_num_steps=steps // EPOCHS,
            collection_step_num_env_steps=ENVS,
            update_step_num_gradient_steps_per_sample=0.5,
            batch_size=64,
            test_step_num_episodes=5,
            training_fn=lambda epoch, step: buffer.set_beta(beta(step)),
        )
        algorithm.run_training(params)
        returns = test.collect(n_episode=20, reset_before_collect=True).returns
    print(
        f"20 episodes without exploration: mean return {returns.mean():.1f}, "
        f"worst {returns.min():.0f}"
    )
    return float(returns.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=60_000, help="environment steps to learn from"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.steps, options.seed)

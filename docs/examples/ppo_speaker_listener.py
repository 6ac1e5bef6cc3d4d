"""PPO with two policies: a speaker that observes the goal, and a listener that moves.

python docs/examples/ppo_speaker_listener.py

prints a line for every epoch and test, then the mean return of 100 episodes of the
trained pair and of 100 random episodes. `--steps` sets the number of environment steps,
and `--seed` sets the seed.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from samplebatch import MultiAgentCollector, MultiAgentReplayBuffer
from samplebatch.learn import (
    PPO,
    AdamOptimizerFactory,
    DiscreteActor,
    DiscreteActorPolicy,
    LRSchedulerFactoryLinear,
    MultiAgentOnPolicyAlgorithm,
    Net,
    OnPolicyTrainerParams,
    ValueCritic,
)
from samplebatch.rollout import make_environment

ENV, ENVS, STEPS, EPOCHS = "mpe2/simple_speaker_listener_v4", 16, 3200, 5


def learner(
    observation_space: Any, action_space: Any, rate: LRSchedulerFactoryLinear
) -> PPO:
    """Create the algorithm of one policy, with separate networks."""
    actor = DiscreteActor.for_space(
        Net.for_space(observation_space, [64, 64], nn.Tanh), action_space
    )
    return PPO(
        policy=DiscreteActorPolicy(actor=actor, action_space=action_space),
        critic=ValueCritic(Net.for_space(observation_space, [64, 64], nn.Tanh)),
        optim=AdamOptimizerFactory(lr=1e-3).with_lr_scheduler_factory(rate),
        gamma=0.95,
        return_scaling=True,
        max_grad_norm=0.5,
    )


def main(steps: int, seed: int) -> tuple[float, float]:
    """Train; return the mean returns of 100 trained and of 100 random episodes."""
    torch.set_num_threads(
        1
    )  # for networks as small as these, threads cost more than they save
    torch.manual_seed(seed)
    env = make_environment(ENV)
    rate = LRSchedulerFactoryLinear(EPOCHS, steps // EPOCHS, STEPS)
    algorithm = MultiAgentOnPolicyAlgorithm(
        {
            agent.removesuffix("_0"): learner(
                env.observation_space(agent), env.action_space(agent), rate
            )
            for agent in env.possible_agents
        }
    )
    buffer = MultiAgentReplayBuffer(STEPS)
    with (
        MultiAgentCollector(
            algorithm.policy, ENV, buffer, num_envs=ENVS, seed=seed
        ) as training,
        MultiAgentCollector(
            algorithm.policy, ENV, num_envs=ENVS, seed=seed + 1
        ) as test,
        MultiAgentCollector("random", ENV, num_envs=ENVS, seed=seed + 1) as chance,
    ):
        params = OnPolicyTrainerParams(
            training_collector=training,
            test_collector=test,
            max_epochs=EPOCHS,
            epoch_num_steps=steps // EPOCHS,
            collection_step_num_env_steps=STEPS,
            update_step_num_repetitions=8,
            batch_size=400,
            test_step_num_episodes=50,
        )
        algorithm.run_training(params)
        trained, random = (
            float(of.collect(n_episode=100).returns.mean()) for of in (test, chance)
        )
    print(f"100 episodes: mean return {trained:.1f}, at random {random:.1f}")
    return trained, random


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=300_000, help="environment steps to learn from"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.steps, options.seed)

"""A recurrent policy learns a partially observed task, with a critic on the actor's features."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from samplebatch import Collector, VectorReplayBuffer
from samplebatch.learn import (
    PPO,
    AdamOptimizerFactory,
    DiscreteActor,
    DiscreteActorPolicy,
    OnPolicyTrainerParams,
    RecurrentBody,
    ValueCritic,
)


class Masked(gymnasium.ObservationWrapper):  # type: ignore[misc, type-arg]
    """CartPole without velocities."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[[0, 2]]


@pytest.mark.long
def test_masked_cart_pole_is_learned_without_critic_gradients() -> None:
    """A random policy gets a return of about 22, a policy without memory about 45."""
    torch.manual_seed(0)
    env = Masked()
    body = RecurrentBody(env.observation_space, 64, "lstm")
    policy = DiscreteActorPolicy(
        actor=DiscreteActor.for_space(body, env.action_space), action_space=env.action_space, deterministic_eval=True
    )
    algorithm = PPO(
        policy=policy,
        critic=ValueCritic(body, trains_body=False),
        optim=AdamOptimizerFactory(lr=3e-3),
        gamma=0.98,
        gae_lambda=0.9,
        ent_coef=0.0,
        max_grad_norm=0.5,
    )
    with Collector(policy, [Masked] * 16, VectorReplayBuffer(1024, 16), seed=1, infos=False) as collector:
        params = OnPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=40 * 1024,
            collection_step_num_env_steps=1024,
            update_step_num_repetitions=5,
            batch_size=256,
            verbose=False,
            show_progress=False,
        )
        algorithm.run_training(params)
    with Collector(policy, Masked, seed=5) as collector:
        assert float(np.mean(collector.collect(n_episode=20).returns)) > 100

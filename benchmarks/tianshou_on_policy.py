"""Short runs of Tianshou's on-policy algorithms.

Every public function is a run: it takes the data package whose classes it makes, and how many updates to do.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch

from benchmarks.tianshou_setup import (
    continuous,
    discrete,
    discrete_actor,
    environments,
    gaussian_policy,
    learn_on_policy,
    optimizer,
    pair_values,
    state_values,
)


def _of_actor_and_critic(kind: Any, data: Any, updates: int, envs: Any, policy: Any, **options: Any) -> Any:
    algorithm = kind(policy=policy, critic=state_values(envs), optim=optimizer(), **options)
    return learn_on_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def ppo(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.ppo import PPO

    envs = discrete()
    options = {"recompute_advantage": True, "return_scaling": True, "value_clip": True, "dual_clip": 2.0}
    return _of_actor_and_critic(PPO, data, updates, envs, discrete_actor(envs), **options)


def ppo_of_continuous_actions(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.ppo import PPO

    envs = continuous()
    return _of_actor_and_critic(PPO, data, updates, envs, gaussian_policy(envs))


def a2c(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.a2c import A2C

    envs = discrete()
    return _of_actor_and_critic(A2C, data, updates, envs, discrete_actor(envs))


def trpo(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.trpo import TRPO

    envs = continuous()
    return _of_actor_and_critic(TRPO, data, updates, envs, gaussian_policy(envs))


def npg(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.npg import NPG

    envs = continuous()
    # With a wider region its networks may end up with infinite weights: which do depends on the processor.
    return _of_actor_and_critic(NPG, data, updates, envs, gaussian_policy(envs), trust_region_size=0.01)


def reinforce(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.reinforce import Reinforce

    envs = discrete()
    algorithm = Reinforce(policy=discrete_actor(envs), optim=optimizer(), return_standardization=True)
    return learn_on_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def adversarial_imitation(data: Any, updates: int) -> Any:
    from tianshou.algorithm.imitation.gail import GAIL
    from tianshou.data import Collector

    envs = continuous()
    policy = gaussian_policy(envs)
    expert = data.VectorReplayBuffer(100, 2)
    collector = Collector(policy, envs, expert)
    collector.reset()
    collector.collect(n_step=100, random=True)
    options = {"expert_buffer": expert, "disc_net": pair_values(envs), "disc_optim": optimizer(), "disc_update_num": 2}
    return _of_actor_and_critic(GAIL, data, updates, envs, policy, **options)


def posterior_sampling(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelbased.psrl import PSRL, PSRLPolicy

    envs = environments("FrozenLake-v1", make=lambda: gymnasium.make("FrozenLake-v1", max_episode_steps=20))
    states, actions = 16, 4
    policy = PSRLPolicy(
        trans_count_prior=np.ones((states, actions, states)),
        rew_mean_prior=np.zeros((states, actions)),
        rew_std_prior=np.ones((states, actions)),
        action_space=envs.action_space[0],
    )
    algorithm = learn_on_policy(PSRL(policy=policy), envs, data.VectorReplayBuffer(300, 2), updates)
    model = algorithm.policy.model
    for name in ("trans_count", "rew_mean", "rew_std", "rew_square_sum", "value"):
        algorithm.register_buffer(name, torch.from_numpy(np.asarray(getattr(model, name), float)))
    return algorithm

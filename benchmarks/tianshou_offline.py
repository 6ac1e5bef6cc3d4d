"""Short runs of Tianshou's offline algorithms, over random steps.

Every public function is a run: it takes the data package whose classes it makes, and how many updates to do.
"""

from __future__ import annotations

from typing import Any

from benchmarks.tianshou_setup import (
    action_values,
    continuous,
    deterministic_policy,
    discrete,
    discrete_actor,
    learn_offline,
    network,
    optimizer,
    pair_values,
    soft_policy,
)


def discrete_bcq(data: Any, updates: int) -> Any:
    from tianshou.algorithm.imitation.discrete_bcq import DiscreteBCQ, DiscreteBCQPolicy
    from tianshou.utils.net.discrete import DiscreteActor

    envs = discrete()
    features = network(envs, actions=False)
    nets = [DiscreteActor(preprocess_net=features, action_shape=2, softmax_output=False) for _ in range(2)]
    policy = DiscreteBCQPolicy(model=nets[0], imitator=nets[1], target_update_freq=5, action_space=envs.action_space[0])
    algorithm = DiscreteBCQ(policy=policy, optim=optimizer(), target_update_freq=5, n_step_return_horizon=2)
    return learn_offline(algorithm, data, envs, updates)


def discrete_cql(data: Any, updates: int) -> Any:
    from tianshou.algorithm.imitation.discrete_cql import DiscreteCQL
    from tianshou.algorithm.modelfree.qrdqn import QRDQNPolicy

    envs = discrete()
    policy = QRDQNPolicy(model=network(envs, num_atoms=9), action_space=envs.action_space[0])
    algorithm = DiscreteCQL(policy=policy, optim=optimizer(), num_quantiles=9, target_update_freq=5)
    return learn_offline(algorithm, data, envs, updates)


def discrete_crr(data: Any, updates: int) -> Any:
    from tianshou.algorithm.imitation.discrete_crr import DiscreteCRR

    envs = discrete()
    algorithm = DiscreteCRR(
        policy=discrete_actor(envs), critic=action_values(envs), optim=optimizer(), target_update_freq=5
    )
    return learn_offline(algorithm, data, envs, updates)


def offline_imitation(data: Any, updates: int) -> Any:
    from tianshou.algorithm.imitation.imitation_base import ImitationPolicy, OfflineImitationLearning

    envs = discrete()
    policy = ImitationPolicy(actor=discrete_actor(envs).actor, action_space=envs.action_space[0])
    return learn_offline(OfflineImitationLearning(policy=policy, optim=optimizer()), data, envs, updates)


def cql(data: Any, updates: int) -> Any:
    from tianshou.algorithm.imitation.cql import CQL

    envs = continuous()
    algorithm = CQL(
        policy=soft_policy(envs),
        policy_optim=optimizer(),
        critic=pair_values(envs),
        critic_optim=optimizer(),
        num_repeat_actions=3,
        calibrated=True,
    )
    return learn_offline(algorithm, data, envs, updates)


def td3_with_behaviour_cloning(data: Any, updates: int) -> Any:
    from tianshou.algorithm.imitation.td3_bc import TD3BC

    envs = continuous()
    algorithm = TD3BC(
        policy=deterministic_policy(envs), policy_optim=optimizer(), critic=pair_values(envs), critic_optim=optimizer()
    )
    return learn_offline(algorithm, data, envs, updates)


def bcq(data: Any, updates: int) -> Any:
    from tianshou.algorithm.imitation.bcq import BCQ, BCQPolicy
    from tianshou.utils.net.common import MLP
    from tianshou.utils.net.continuous import VAE, Perturbation

    envs = continuous()
    vae = VAE(
        encoder=MLP(input_dim=4, hidden_sizes=[16]),
        decoder=MLP(input_dim=5, output_dim=1, hidden_sizes=[16]),
        hidden_dim=16,
        latent_dim=2,
        max_action=2.0,
    )
    perturbation = Perturbation(preprocess_net=MLP(input_dim=4, output_dim=1, hidden_sizes=[16]), max_action=2.0)
    policy = BCQPolicy(
        actor_perturbation=perturbation,
        action_space=envs.action_space[0],
        critic=pair_values(envs),
        vae=vae,
        forward_sampled_times=5,
    )
    algorithm = BCQ(
        policy=policy,
        actor_perturbation_optim=optimizer(),
        critic_optim=optimizer(),
        vae_optim=optimizer(),
        num_sampled_action=3,
    )
    return learn_offline(algorithm, data, envs, updates)

"""Short runs of Tianshou's algorithms; each run returns the final parameters.

Every public function is one run; its arguments are the data package that `classes_of` yields and the number of updates.
Offline algorithms learn from random steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from typing import Any

import gymnasium
import numpy as np
import torch

from benchmarks.training.tianshou_setup import (
    Parameters,
    Walk,
    action_values,
    continuous,
    deterministic_policy,
    discrete,
    discrete_actor,
    environments,
    gaussian_actor,
    gaussian_policy,
    learn_off_policy,
    learn_offline,
    learn_on_policy,
    network,
    optimizer,
    pair_values,
    q_policy,
    reached,
    soft_policy,
    state_values,
    training,
)


def dqn(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.dqn import DQN

    envs = discrete()
    algorithm = DQN(policy=q_policy(envs), optim=optimizer(), n_step_return_horizon=3, target_update_freq=5)
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def dqn_with_priorities(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.dqn import DQN

    envs = discrete()
    algorithm = DQN(policy=q_policy(envs), optim=optimizer(), target_update_freq=5)
    buffer = data.PrioritizedVectorReplayBuffer(300, 2, alpha=0.6, beta=0.4)
    return learn_off_policy(algorithm, envs, buffer, updates)


def dqn_of_stacked_frames(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.dqn import DQN
    from tianshou.utils.net.common import Net

    envs = discrete()
    net = Net(state_shape=(3, 4), action_shape=2, hidden_sizes=[16])
    algorithm = DQN(policy=q_policy(envs, net), optim=optimizer(), target_update_freq=5)
    buffer = data.VectorReplayBuffer(300, 2, stack_num=3)
    learner = learn_off_policy(algorithm, envs, buffer, 0)
    with training(learner):
        for _ in range(updates):
            learner.update(buffer=buffer, sample_size=32)
    return learner


def drqn(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.dqn import DQN
    from tianshou.utils.net.common import Recurrent

    envs = discrete()
    net = Recurrent(layer_num=1, state_shape=(4,), action_shape=2, hidden_layer_size=8)
    algorithm = DQN(policy=q_policy(envs, net), optim=optimizer(), target_update_freq=5)
    buffer = data.VectorReplayBuffer(300, 2, stack_num=4)
    return learn_off_policy(algorithm, envs, buffer, updates)


def c51(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.c51 import C51, C51Policy

    envs = discrete()
    net = network(envs, softmax=True, num_atoms=11)
    policy = C51Policy(model=net, action_space=envs.action_space[0], num_atoms=11, eps_training=0.1)
    algorithm = C51(policy=policy, optim=optimizer(), n_step_return_horizon=2, target_update_freq=5)
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def rainbow(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.c51 import C51Policy
    from tianshou.algorithm.modelfree.rainbow import RainbowDQN
    from tianshou.utils.net.discrete import NoisyLinear

    envs = discrete()
    head = {"linear_layer": lambda x, y: NoisyLinear(x, y, 0.1), "hidden_sizes": [8]}
    net = network(envs, softmax=True, num_atoms=11, dueling_param=(head, head))
    policy = C51Policy(model=net, action_space=envs.action_space[0], num_atoms=11, eps_training=0.1)
    algorithm = RainbowDQN(policy=policy, optim=optimizer(), n_step_return_horizon=2, target_update_freq=5)
    buffer = data.PrioritizedVectorReplayBuffer(300, 2, alpha=0.6, beta=0.4, weight_norm=True)
    return learn_off_policy(algorithm, envs, buffer, updates)


def quantiles(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.qrdqn import QRDQN, QRDQNPolicy

    envs = discrete()
    policy = QRDQNPolicy(model=network(envs, num_atoms=9), action_space=envs.action_space[0], eps_training=0.1)
    algorithm = QRDQN(policy=policy, optim=optimizer(), num_quantiles=9, target_update_freq=5)
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def implicit_quantiles(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.iqn import IQN, IQNPolicy
    from tianshou.utils.net.discrete import ImplicitQuantileNetwork

    envs = discrete()
    net = ImplicitQuantileNetwork(preprocess_net=network(envs, actions=False), action_shape=2, num_cosines=8)
    policy = IQNPolicy(model=net, action_space=envs.action_space[0], sample_size=8, eps_training=0.1)
    return learn_off_policy(
        IQN(policy=policy, optim=optimizer(), target_update_freq=5), envs, data.VectorReplayBuffer(300, 2), updates
    )


def full_quantiles(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.fqf import FQF, FQFPolicy
    from tianshou.utils.net.discrete import FractionProposalNetwork, FullQuantileFunction

    envs = discrete()
    features = network(envs, actions=False)
    net = FullQuantileFunction(preprocess_net=features, action_shape=2, num_cosines=8)
    fractions = FractionProposalNetwork(8, features.output_dim)
    policy = FQFPolicy(model=net, fraction_model=fractions, action_space=envs.action_space[0], eps_training=0.1)
    algorithm = FQF(
        policy=policy, optim=optimizer(), fraction_optim=optimizer(1e-4), num_fractions=8, target_update_freq=5
    )
    return learn_off_policy(algorithm, envs, data.PrioritizedVectorReplayBuffer(300, 2, alpha=0.6, beta=0.4), updates)


def discrete_soft_actor_critic(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.discrete_sac import DiscreteSAC, DiscreteSACPolicy

    envs = discrete()
    actor = discrete_actor(envs).actor
    algorithm = DiscreteSAC(
        policy=DiscreteSACPolicy(actor=actor, action_space=envs.action_space[0]),
        policy_optim=optimizer(),
        critic=action_values(envs),
        critic_optim=optimizer(),
        n_step_return_horizon=2,
    )
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def curiosity(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelbased.icm import ICMOffPolicyWrapper
    from tianshou.algorithm.modelfree.dqn import DQN
    from tianshou.utils.net.common import MLP
    from tianshou.utils.net.discrete import IntrinsicCuriosityModule

    envs = discrete()
    wrapped = DQN(policy=q_policy(envs), optim=optimizer(), target_update_freq=5)
    features = MLP(input_dim=4, output_dim=8, hidden_sizes=[16])
    model = IntrinsicCuriosityModule(feature_net=features, feature_dim=8, action_dim=2, hidden_sizes=[16])
    algorithm = ICMOffPolicyWrapper(
        wrapped_algorithm=wrapped,
        model=model,
        optim=optimizer(),
        lr_scale=1.0,
        reward_scale=0.1,
        forward_loss_weight=0.2,
    )
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def dqn_by_the_trainer(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.dqn import DQN
    from tianshou.data import Collector
    from tianshou.trainer import OffPolicyTrainerParams

    envs = discrete()
    algorithm = DQN(policy=q_policy(envs), optim=optimizer(), target_update_freq=5)
    collectors = [Collector(algorithm, envs, data.VectorReplayBuffer(300, 2), exploration_noise=True)]
    collectors.append(Collector(algorithm, discrete(), data.VectorReplayBuffer(300, 2)))
    for collector in collectors:
        collector.reset()
    collectors[0].collect(n_step=32, random=True)
    params = OffPolicyTrainerParams(
        training_collector=collectors[0],
        test_collector=collectors[1],
        max_epochs=1,
        epoch_num_steps=4 * updates,
        collection_step_num_env_steps=4,
        update_step_num_gradient_steps_per_sample=0.25,
        batch_size=16,
        test_step_num_episodes=2,
        show_progress=False,
        verbose=False,
    )
    algorithm.run_training(params)
    return algorithm


# Continuous actions


def ddpg(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.ddpg import DDPG

    envs = continuous()
    algorithm = DDPG(
        policy=deterministic_policy(envs), policy_optim=optimizer(), critic=pair_values(envs), critic_optim=optimizer()
    )
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def td3(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.td3 import TD3

    envs = continuous()
    algorithm = TD3(
        policy=deterministic_policy(envs),
        policy_optim=optimizer(),
        critic=pair_values(envs),
        critic_optim=optimizer(),
        n_step_return_horizon=2,
    )
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def sac(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.sac import SAC, AutoAlpha

    envs = continuous()
    algorithm = SAC(
        policy=soft_policy(envs),
        policy_optim=optimizer(),
        critic=pair_values(envs),
        critic_optim=optimizer(),
        alpha=AutoAlpha(-1.0, 0.0, optimizer()),
    )
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def sac_with_a_cache(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.sac import SAC

    envs = environments("Pendulum-v1", make=lambda: gymnasium.make("Pendulum-v1", max_episode_steps=20))
    algorithm = SAC(
        policy=soft_policy(envs), policy_optim=optimizer(), critic=pair_values(envs), critic_optim=optimizer()
    )
    return learn_off_policy(algorithm, envs, data.CachedReplayBuffer(data.ReplayBuffer(300), 2, 25), updates)


def randomized_ensemble(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.redq import REDQ, REDQPolicy
    from tianshou.utils.net.common import EnsembleLinear, Net
    from tianshou.utils.net.continuous import ContinuousCritic

    envs = continuous()

    def linear(x: int, y: int) -> Any:
        return EnsembleLinear(4, x, y)

    net = Net(state_shape=(3,), action_shape=(1,), hidden_sizes=[16], concat=True, linear_layer=linear)
    critic = ContinuousCritic(preprocess_net=net, linear_layer=linear, flatten_input=False)
    algorithm = REDQ(
        policy=REDQPolicy(actor=gaussian_actor(envs), action_space=envs.action_space[0]),
        policy_optim=optimizer(),
        critic=critic,
        critic_optim=optimizer(),
        ensemble_size=4,
        actor_delay=2,
    )
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates)


def hindsight(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.sac import SAC, SACPolicy
    from tianshou.utils.net.common import Net, get_dict_state_decorator
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

    envs = environments("walk", make=Walk)
    shapes = {name: space.shape for name, space in envs.observation_space[0].items()}
    flat, shape = get_dict_state_decorator(shapes, list(shapes))
    nets = [
        flat(Net)(state_shape=shape, action_shape=(1,) if c else 0, hidden_sizes=[16], concat=c) for c in (False, True)
    ]
    actor = flat(ContinuousActorProbabilistic)(
        preprocess_net=nets[0], action_shape=(1,), unbounded=True, conditioned_sigma=True
    )
    algorithm = SAC(
        policy=SACPolicy(actor=actor, action_space=envs.action_space[0]),
        policy_optim=optimizer(),
        critic=flat(ContinuousCritic)(preprocess_net=nets[1]),
        critic_optim=optimizer(),
    )
    buffer = data.HERVectorReplayBuffer(300, 2, compute_reward_fn=reached, horizon=10, future_k=4.0)
    buffer.future_p = 0.7
    return learn_off_policy(algorithm, envs, buffer, updates)


# Several agents


def _spread() -> Any:
    import mpe2.simple_spread_v3
    from tianshou.env import PettingZooEnv

    def make() -> Any:
        return PettingZooEnv(mpe2.simple_spread_v3.env(max_cycles=8))

    return environments("simple_spread_v3", make=make), make()


def several_agents(data: Any, updates: int) -> Any:
    from tianshou.algorithm.modelfree.dqn import DQN
    from tianshou.algorithm.multiagent.marl import MultiAgentOffPolicyAlgorithm

    envs, single = _spread()
    algorithms = [
        DQN(policy=q_policy(envs), optim=optimizer(), n_step_return_horizon=2, target_update_freq=5)
        for _ in single.agents
    ]
    algorithm = MultiAgentOffPolicyAlgorithm(algorithms=algorithms, env=single)
    return learn_off_policy(algorithm, envs, data.VectorReplayBuffer(300, 2), updates, per_update=6)


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
    # With a wider trust region, some weights may become infinite; which weights do depends on the processor.
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


# Runs by name


Run = Callable[[Any, int], Parameters]


def _seeded(function: Callable[[Any, int], Any]) -> Run:
    @wraps(function)
    def seeded(data: Any, updates: int) -> Parameters:
        np.random.seed(0)
        torch.manual_seed(0)
        return _parameters_of(function(data, updates))

    return seeded


def _parameters_of(algorithm: Any) -> Parameters:
    """Return the parameters of networks, including target networks, as arrays."""
    named = [(name, value) for name, value in algorithm.state_dict().items() if isinstance(value, torch.Tensor)]
    return {name: value.numpy().copy() for name, value in named}


RUNS = {
    name.replace("_", " "): _seeded(value)
    for name, value in sorted(globals().items())
    if isfunction(value) and value.__module__ == __name__ and not name.startswith("_")
}
"""Short runs by name."""

"""Share between tests of several agents: policies and critics for PettingZoo's environments of particles."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samplebatch.learn import AdamOptimizerFactory, DiscreteActor, DiscreteActorPolicy, JointCritic, Net
from samplebatch.rollout import make_environment

SPREAD = "mpe2/simple_spread_v3"
SPEAKER_LISTENER = "mpe2/simple_speaker_listener_v4"


def spaces_of(name: str) -> tuple[list[Any], list[Any]]:
    """Return the observation and action spaces of each agent."""
    env = make_environment(name)
    agents = env.possible_agents
    return [env.observation_space(agent) for agent in agents], [env.action_space(agent) for agent in agents]


def actor(observation_space: Any, action_space: Any, seed: int = 0) -> DiscreteActorPolicy:
    torch.manual_seed(seed)
    network = DiscreteActor.for_space(Net.for_space(observation_space, [64, 64], nn.Tanh), action_space)
    return DiscreteActorPolicy(actor=network, action_space=action_space)


def joint_critic(name: str, seed: int = 0) -> JointCritic:
    torch.manual_seed(seed)
    return JointCritic(spaces_of(name)[0])


def adam(rate: float = 1e-3) -> AdamOptimizerFactory:
    return AdamOptimizerFactory(lr=rate)

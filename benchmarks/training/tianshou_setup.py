"""Environments, training loops and small networks for short runs of Tianshou's algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import torch

Parameters = dict[str, np.ndarray]

HIDDEN = (16,)
"""Widths of hidden layers."""

# Environments and loops


def environments(name: str, number: int = 2, make: Callable[[], Any] | None = None) -> Any:
    """Create Tianshou's vector environment with seeded environments."""
    from tianshou.env import DummyVectorEnv

    envs = DummyVectorEnv([make or (lambda: gymnasium.make(name))] * number)
    envs.seed(0)
    for index, space in enumerate(envs.action_space):
        space.seed(index)
    return envs


def discrete(number: int = 2) -> Any:
    """Create CartPole environments: observations of 4 numbers, 2 discrete actions."""
    return environments("CartPole-v1", number)


def continuous(number: int = 2) -> Any:
    """Create Pendulum environments: observations of 3 numbers, 1 continuous action."""
    return environments("Pendulum-v1", number)


@contextmanager
def training(algorithm: Any) -> Iterator[None]:
    """Set the training mode of an algorithm and its policy within the context."""
    from tianshou.utils.torch_utils import policy_within_training_step, torch_train_mode

    with policy_within_training_step(algorithm.policy), torch_train_mode(algorithm):
        yield


def learn_off_policy(
    algorithm: Any, envs: Any, buffer: Any, updates: int, *, warm_up: int = 64, per_update: int = 2, sample: int = 32
) -> Any:
    """Collect random steps, then alternate between collecting steps with the policy and one update."""
    from tianshou.data import Collector

    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    collector.collect(n_step=warm_up, random=True)
    with training(algorithm):
        for _ in range(updates):
            collector.collect(n_step=per_update)
            algorithm.update(buffer=buffer, sample_size=sample)
    return algorithm


def learn_on_policy(algorithm: Any, envs: Any, buffer: Any, updates: int, *, steps: int = 64, repeat: int = 2) -> Any:
    """Repeatedly collect steps, update with the steps, and discard the steps."""
    from tianshou.data import Collector

    collector = Collector(algorithm, envs, buffer)
    collector.reset()
    with training(algorithm):
        for _ in range(updates):
            collector.collect(n_step=steps)
            algorithm.update(buffer=buffer, batch_size=32, repeat=repeat)
            collector.reset_buffer(keep_statistics=True)
    return algorithm


def learn_offline(algorithm: Any, data: Any, envs: Any, updates: int, *, steps: int = 200) -> Any:
    """Collect random steps, then update from these steps only."""
    from tianshou.data import Collector

    buffer = data.VectorReplayBuffer(steps, len(envs))
    collector = Collector(algorithm, envs, buffer)
    collector.reset()
    collector.collect(n_step=steps, random=True)
    buffer = algorithm.process_buffer(buffer)
    with training(algorithm):
        for _ in range(updates):
            algorithm.update(buffer=buffer, sample_size=32)
    return algorithm


# Networks


def optimizer(rate: float = 1e-3) -> Any:
    """Create an optimizer factory."""
    from tianshou.algorithm.optim import AdamOptimizerFactory

    return AdamOptimizerFactory(lr=rate)


def network(
    envs: Any, hidden: Sequence[int] = HIDDEN, *, actions: bool = True, together: bool = False, **options: Any
) -> Any:
    """Create a small network with observations, and optionally actions, as inputs and one output per action."""
    from tianshou.utils.net.common import Net

    observed, acted = envs.observation_space[0].shape, envs.action_space[0]
    shape = getattr(acted, "n", None) or acted.shape
    return Net(
        state_shape=observed,
        action_shape=shape if actions or together else 0,
        hidden_sizes=hidden,
        concat=together,
        **options,
    )


def q_policy(envs: Any, net: Any = None) -> Any:
    """Create a policy that maximizes Q values."""
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy

    return DiscreteQLearningPolicy(
        model=net or network(envs), action_space=envs.action_space[0], eps_training=0.1, eps_inference=0.05
    )


def discrete_actor(envs: Any, hidden: Sequence[int] = HIDDEN, **options: Any) -> Any:
    """Create a categorical policy from logits."""
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.utils.net.discrete import DiscreteActor

    actor = DiscreteActor(
        preprocess_net=network(envs, hidden, actions=False, **options),
        action_shape=envs.action_space[0].n,
        softmax_output=False,
    )
    return DiscreteActorPolicy(
        actor=actor,
        dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
        action_space=envs.action_space[0],
    )


def state_values(envs: Any, hidden: Sequence[int] = HIDDEN, **options: Any) -> Any:
    """Create a critic of observations."""
    from tianshou.utils.net.discrete import DiscreteCritic

    return DiscreteCritic(preprocess_net=network(envs, hidden, actions=False, **options))


def action_values(envs: Any) -> Any:
    """Create a critic that returns one value per discrete action."""
    from tianshou.utils.net.discrete import DiscreteCritic

    return DiscreteCritic(preprocess_net=network(envs, actions=False), last_size=envs.action_space[0].n)


def pair_values(envs: Any, hidden: Sequence[int] = HIDDEN) -> Any:
    """Create a critic of pairs of observation and action."""
    from tianshou.utils.net.continuous import ContinuousCritic

    return ContinuousCritic(preprocess_net=network(envs, hidden, actions=False, together=True))


def deterministic_policy(envs: Any) -> Any:
    """Create a deterministic policy of continuous actions, with exploration noise."""
    from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
    from tianshou.exploration import GaussianNoise
    from tianshou.utils.net.continuous import ContinuousActorDeterministic

    class SingleNoise(GaussianNoise):  # type: ignore[misc]
        """Float32 noise, because the float32 action column rejects float64 values that would be rounded."""

        def __call__(self, size: Any) -> Any:
            return super().__call__(size).astype(np.float32)

    space = envs.action_space[0]
    actor = ContinuousActorDeterministic(
        preprocess_net=network(envs, actions=False), action_shape=space.shape, max_action=float(space.high[0])
    )
    return ContinuousDeterministicPolicy(
        actor=actor, exploration_noise=SingleNoise(sigma=0.1), action_space=space, observation_space=None
    )


def gaussian_actor(envs: Any, hidden: Sequence[int] = HIDDEN) -> Any:
    """Create a network that returns means and standard deviations."""
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic

    return ContinuousActorProbabilistic(
        preprocess_net=network(envs, hidden, actions=False),
        action_shape=envs.action_space[0].shape,
        unbounded=True,
        conditioned_sigma=True,
    )


def gaussian_policy(envs: Any) -> Any:
    """Create a policy that draws actions from normal distributions."""
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy

    def distribution(loc_scale: Any) -> Any:
        return torch.distributions.Independent(torch.distributions.Normal(*loc_scale), 1)

    return ProbabilisticActorPolicy(
        actor=gaussian_actor(envs), dist_fn=distribution, action_space=envs.action_space[0], action_scaling=True
    )


def soft_policy(envs: Any, hidden: Sequence[int] = HIDDEN) -> Any:
    """Create a policy for soft actor-critic."""
    from tianshou.algorithm.modelfree.sac import SACPolicy

    return SACPolicy(actor=gaussian_actor(envs, hidden), action_space=envs.action_space[0])


class Walk(gymnasium.Env[Any, Any]):
    """Environment of a walk along a line to a goal, with the observations that hindsight replay requires."""

    def __init__(self) -> None:
        line = gymnasium.spaces.Box(-20.0, 20.0, (1,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(
            {"observation": line, "achieved_goal": line, "desired_goal": line}
        )
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def _observation(self) -> dict[str, Any]:
        return {"observation": self._position, "achieved_goal": self._position, "desired_goal": self._goal}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._goal = self.np_random.uniform(-3, 3, 1).astype(np.float32)
        self._position, self._steps = np.zeros(1, np.float32), 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._position, self._steps = self._position + np.float32(action), self._steps + 1
        reward = float(reached(self._position[None], self._goal[None])[0])
        return self._observation(), reward, reward == 0.0, self._steps >= 10, {}


def reached(achieved: Any, desired: Any) -> Any:
    """Return 0 for rows near their goal, otherwise -1."""
    return np.where(np.abs(achieved - desired)[:, 0] < 0.5, 0.0, -1.0)

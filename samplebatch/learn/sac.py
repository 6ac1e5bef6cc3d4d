"""SAC: soft actor-critic, a maximum-entropy policy (Haarnoja et al., arXiv:1812.05905), for both kinds of actions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Independent, Normal

from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import ArgumentError
from samplebatch.learn.action_values import ContinuousPolicyWithExplorationNoise, PolicyT, TwinCritics
from samplebatch.learn.algorithm import OffPolicyAlgorithm, TrainingStats
from samplebatch.learn.networks import call_network
from samplebatch.learn.optimizer import OptimizerFactory, descend
from samplebatch.learn.policy import ProbabilisticActorPolicy

_TINY = torch.finfo(torch.float32).eps
"""Keeps the logarithm of tanh's slope finite where an action is at its bound."""
_HALF_LOG_TAU = math.log(2 * math.pi) / 2
"""The logarithm of the standard normal distribution's constant, less its sign."""


class SACPolicy(ContinuousPolicyWithExplorationNoise):
    """Policy of tanh-squashed normal distributions, for SAC and CQL.

    Parameters
    ----------
    actor
        From observations to a pair of means and standard deviations, and the state: `((loc, scale), state)`.
    action_space, **options
        See `ContinuousPolicyWithExplorationNoise`. The policy explores without noise, too.
    deterministic_eval
        Whether the most likely action before squashing is taken outside of training steps, where others are drawn.

    Raises
    ------
    PolicySpecError
        If the action space is not a Box.
    """

    def __init__(
        self,
        *,
        actor: nn.Module,
        action_space: gymnasium.Space[Any],
        deterministic_eval: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(action_space=action_space, **options)
        self.actor, self.deterministic_eval = actor, deterministic_eval

    def forward(self, batch: Batch, state: Any = None) -> Batch:
        """Return actions in [-1, 1] as `act`, their log-densities as `log_prob`, shape (n, 1), and the state.

        A log-density is that of the normal distribution less the logarithm of tanh's slope (arXiv:1801.01290, equation
        21).
        """
        obs, _ = self.observations(batch)
        (loc, scale), state = call_network(self.actor, obs, state)
        # Parameters that are not finite show in the loss, whose error names the columns with such values.
        dist = Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False)
        is_drawn = self.is_within_training_step or not self.deterministic_eval
        noise = torch.randn_like(loc) if is_drawn else torch.zeros_like(loc)
        act = torch.tanh(torch.addcmul(loc, scale, noise))
        # The density at loc + scale * noise, told by the noise: its derivatives by loc and scale need no action.
        density = noise.square() / 2 + scale.log() + _HALF_LOG_TAU
        log_prob = -(density + torch.log(1 - act.square() + _TINY)).sum(-1, keepdim=True)
        return Batch(act=act, log_prob=log_prob, logits=(loc, scale), dist=dist, state=state)


class Alpha(nn.Module, ABC):
    """The temperature of a soft actor-critic: the weight of its policy's entropy beside the rewards.

    Attributes
    ----------
    optim
        The factory of the optimizer that learns it; None for a fixed one.
    """

    optim: OptimizerFactory | None = None

    @property
    @abstractmethod
    def value(self) -> float:
        """The weight."""

    def loss(self, entropy: torch.Tensor) -> torch.Tensor:
        """Return the loss of the weight where the policy has such entropies.

        Raises
        ------
        NotImplementedError
            If it is fixed.
        """
        raise NotImplementedError


class FixedAlpha(Alpha):
    """A temperature that stays as it is.

    Parameters
    ----------
    alpha
        The weight, from 0 on.

    Raises
    ------
    ArgumentError
        If it is none.

    Examples
    --------
    >>> FixedAlpha(0.2).value
    0.2
    """

    def __init__(self, alpha: float) -> None:
        super().__init__()
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha >= 0:
            raise ArgumentError(f"alpha must be a number from 0, or a temperature, got {alpha!r}")
        self._value = float(alpha)

    @property
    def value(self) -> float:
        """The weight."""
        return self._value


class AutoAlpha(Alpha):
    """A temperature that is learned, so that the policy has a given entropy (Haarnoja et al. 2018, arXiv:1812.05905).

    Its loss is J = E[log(alpha) (entropy - target)]: equation 18, with log(alpha) in place of alpha as a factor.

    Parameters
    ----------
    target_entropy
        The entropy that the policy is to have; minus the number of the actions' dimensions for most tasks.
    log_alpha
        The logarithm of the first weight.
    optim
        The factory of its optimizer. The algorithm makes it, and its state is part of the algorithm's.

    Examples
    --------
    >>> from samplebatch.learn import AdamOptimizerFactory
    >>> alpha = AutoAlpha(-1.0, 0.0, AdamOptimizerFactory(lr=3e-4))
    >>> alpha.value, alpha.loss(torch.tensor([1.0, 2.0])).item()
    (1.0, 0.0)
    """

    def __init__(self, target_entropy: float, log_alpha: float, optim: OptimizerFactory) -> None:
        super().__init__()
        self.target_entropy, self.optim = float(target_entropy), optim
        self.log_alpha = nn.Parameter(torch.tensor(float(log_alpha)))

    @property
    def value(self) -> float:
        """The weight."""
        return self.log_alpha.detach().exp().item()

    def loss(self, entropy: torch.Tensor) -> torch.Tensor:
        """Return the loss of the weight where the policy has such entropies, shape ()."""
        return (self.log_alpha * (entropy.detach() - self.target_entropy)).mean()


@dataclass(kw_only=True)
class SACTrainingStats(TrainingStats):
    """Losses of an update of SAC, and the temperature after it; None for the loss of a fixed one."""

    actor_loss: float
    critic1_loss: float
    critic2_loss: float
    alpha: float
    alpha_loss: float | None = None


class SoftActorCritic(TwinCritics[PolicyT], ABC):
    """Base of actor-critics that count entropy as a reward, for SAC, discrete SAC and CQL.

    Parameters
    ----------
    policy, policy_optim, **options
        See `TwinCritics`.
    alpha
        The temperature: the weight of entropy beside rewards, fixed or an `AutoAlpha` that learns it.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the algorithm does not learn actions of the policy's action space.
    """

    def __init__(
        self, *, policy: PolicyT, policy_optim: OptimizerFactory, alpha: float | Alpha = 0.2, **options: Any
    ) -> None:
        super().__init__(policy=policy, policy_optim=policy_optim, **options)
        self.alpha = alpha if isinstance(alpha, Alpha) else FixedAlpha(alpha)
        self.alpha_optim = None if self.alpha.optim is None else self._create_optimizer(self.alpha, self.alpha.optim)

    def _update_with_batch(self, batch: Batch) -> SACTrainingStats:
        critic1_loss, critic2_loss = self._update_critics(batch)
        figures = self._update_actor(batch)
        self._update_lagged_network_weights(self.tau)
        return SACTrainingStats(critic1_loss=critic1_loss, critic2_loss=critic2_loss, **figures)

    def _update_actor(self, batch: Batch) -> dict[str, Any]:
        """Move the policy to actions of high value and entropy, and a learned temperature to its target.

        The loss of the temperature is that of equation 18.
        """
        loss, entropy = self._policy_loss(batch)
        steps = [(self.policy_optim, loss)]
        figures = {"actor_loss": loss.item()}
        if self.alpha_optim is not None:
            alpha_loss = self.alpha.loss(entropy.detach())
            steps.append((self.alpha_optim, alpha_loss))
            figures["alpha_loss"] = alpha_loss.item()
        descend(steps)
        return figures | {"alpha": self.alpha.value}

    @abstractmethod
    def _policy_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of the policy, shape (), and its entropies, shape (n,)."""


class ContinuousSoftActorCritic(SoftActorCritic[SACPolicy]):
    """Soft actor-critic of continuous actions, for SAC and CQL; its parameters are those of `SoftActorCritic`."""

    def _target_q(self, batch: Batch) -> torch.Tensor:
        # Equation 3, for one action of the policy.
        drawn = self.policy(Batch(obs=batch.obs_next))
        entropy: torch.Tensor = -drawn.log_prob.flatten()
        return self._min_target_value(batch.obs_next, drawn.act) + self.alpha.value * entropy

    def _policy_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        # Equation 9, with the smaller of both critics.
        drawn = self.policy(batch)
        log_prob = drawn.log_prob.flatten()
        values = torch.min(self.critic(batch.obs, drawn.act), self.critic2(batch.obs, drawn.act)).flatten()
        return (self.alpha.value * log_prob - values).mean(), -log_prob


class SAC(ContinuousSoftActorCritic, OffPolicyAlgorithm[SACPolicy]):
    """Soft actor-critic, for continuous actions; its parameters are those of `SoftActorCritic`."""


class DiscreteSAC(SoftActorCritic[ProbabilisticActorPolicy], OffPolicyAlgorithm[ProbabilisticActorPolicy]):
    """Soft actor-critic, for discrete actions (Christodoulou, arXiv:1910.07207).

    Expectations over the policy's actions are sums over all actions by their probabilities (equations 10 to 12), so
    that no action is drawn for an update. Actions that a mask forbids have probability 0.

    Parameters
    ----------
    policy, policy_optim, alpha, **options
        See `SoftActorCritic`. The policy draws Discrete actions, such as a `DiscreteActorPolicy`; critics return the
        value of each action, shape (n, actions), such as a `DiscreteCritic`.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the policy's action space is not Discrete.
    """

    _action_spaces = spaces.Discrete
    _action_words = "a Discrete space"

    def _expected(self, obs: Any, critics: Sequence[nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expected value of the smaller critic's estimates, and the policy's entropies, shape (n,) each."""
        dist: Any = self.policy.distribution(Batch(obs=obs))[0]
        with torch.no_grad():
            values = torch.min(*(self._all_action_values(critic, obs) for critic in critics))
        expected: torch.Tensor = (dist.probs * values).sum(-1)
        return expected, dist.entropy()

    def _target_q(self, batch: Batch) -> torch.Tensor:
        # Equation 10.
        values, entropy = self._expected(batch.obs_next, [self.critic_old, self.critic2_old])
        return values + self.alpha.value * entropy

    def _policy_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        # Equation 12.
        values, entropy = self._expected(batch.obs, [self.critic, self.critic2])
        return -(values + self.alpha.value * entropy).mean(), entropy

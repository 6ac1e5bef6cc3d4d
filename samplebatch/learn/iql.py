"""IQL: implicit Q-learning, which evaluates only actions in the data (Kostrikov et al., arXiv:2110.06169)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from samplebatch.arguments import finite, fraction, positive
from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import ArgumentError
from samplebatch.learn.action_values import TwinCritics
from samplebatch.learn.algorithm import OfflineAlgorithm, TrainingStats
from samplebatch.learn.networks import call_network
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import ProbabilisticActorPolicy, log_probability, require_critic


@dataclass(kw_only=True)
class IQLTrainingStats(TrainingStats):
    """Losses of an update of IQL, and the mean advantage of the data's actions."""

    actor_loss: float
    value_loss: float
    critic1_loss: float
    critic2_loss: float
    advantage: float


class IQL(TwinCritics[ProbabilisticActorPolicy], OfflineAlgorithm[ProbabilisticActorPolicy]):
    r"""Implicit Q-learning from data, for continuous and discrete actions (Kostrikov et al., arXiv:2110.06169).

    A network V(s) learns an expectile of the minimum of both target critics for the actions in the data (equation 5).
    The critics' targets bootstrap from V of the next observation (equation 6). The policy imitates actions weighted by
    advantages (equation 7):

    .. math:: L_V = E[|\tau - 1_{u < 0}|\, u^2], \quad u = \min(Q_1'(s, a), Q_2'(s, a)) - V(s)

    .. math:: L_\pi = -E[\min(e^{\beta u}, w_{max}) \log \pi(a | s)]

    Parameters
    ----------
    policy, policy_optim, critic, critic_optim, **options
        See `TwinCritics`. The policy has a Box or Discrete action space.
    value, value_optim
        Network from observations to V(s), shape (n, 1), such as a `ValueCritic`, and its optimizer factory. By default,
        `critic_optim` creates the optimizer of `value`.
    expectile
        :math:`\tau`, above 0 and below 1: at 0.5, V evaluates the behaviour policy; near 1, V approaches the value of
        the best action in the data.
    temperature
        :math:`\beta`, at least 0; 0 corresponds to behaviour cloning.
    max_weight
        :math:`w_{max}`, the maximum weight of an action.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the policy's action space is neither a Box nor Discrete.
    """

    _policy_class = ProbabilisticActorPolicy
    _action_spaces = (spaces.Box, spaces.Discrete)
    _action_words = "a Box or a Discrete space"

    def __init__(
        self,
        *,
        policy: ProbabilisticActorPolicy,
        policy_optim: OptimizerFactory,
        critic: nn.Module,
        critic_optim: OptimizerFactory,
        value: nn.Module,
        value_optim: OptimizerFactory | None = None,
        expectile: float = 0.7,
        temperature: float = 3.0,
        max_weight: float = 100.0,
        **options: Any,
    ) -> None:
        require_critic(value)
        super().__init__(policy=policy, policy_optim=policy_optim, critic=critic, critic_optim=critic_optim, **options)
        if not 0.0 < fraction("expectile", expectile) < 1.0:
            raise ArgumentError(f"expectile must be above 0 and below 1, got {expectile}")
        self.expectile, self.temperature = expectile, finite("temperature", temperature)
        self.max_weight = positive("max_weight", max_weight)
        self.value = value
        self.value_optim = self._create_optimizer(value, value_optim or critic_optim)

    def _preprocess_batch(self, batch: Batch, buffer: Any, indices: Any) -> Batch:
        """Return the batch unchanged; `_update_with_batch` computes targets after the gradient step of V."""
        return batch

    def _target_q(self, batch: Batch) -> torch.Tensor:
        return self._values(batch.obs_next)

    def _values(self, obs: Any) -> torch.Tensor:
        """Return V of observations, shape (n,)."""
        values: torch.Tensor = call_network(self.value, self.policy.observations(Batch(obs=obs))[0])[0]
        return values.flatten()

    def _update_with_batch(self, batch: Batch) -> IQLTrainingStats:
        weight = batch.get("weight")
        with torch.no_grad():
            values = torch.min(*(self._action_values(critic, batch) for critic in (self.critic_old, self.critic2_old)))
        advantages = values - self._values(batch.obs)
        sides = (self.expectile - (advantages.detach() < 0.0).to(advantages.dtype)).abs()
        value_loss = _mean(sides * advantages.square(), weight)
        self.value_optim.step(value_loss)
        with torch.no_grad():
            # Advantages and targets are computed after the gradient step of V, as in the authors' code.
            advantages = values - self._values(batch.obs)
            factors = (self.temperature * advantages).exp().clamp(max=self.max_weight)
            batch.returns = batch.returns + batch.discount * self._target_q(batch)
        dist, _ = self.policy.distribution(batch)
        actor_loss = _mean(-factors * log_probability(dist, batch.act), weight)
        self.policy_optim.step(actor_loss)
        critic1_loss, critic2_loss = self._update_critics(batch)
        self._update_lagged_network_weights(self.tau)
        return IQLTrainingStats(
            actor_loss=actor_loss.item(),
            value_loss=value_loss.item(),
            critic1_loss=critic1_loss,
            critic2_loss=critic2_loss,
            advantage=advantages.mean().item(),
        )


def _mean(losses: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of the losses, each multiplied by its importance weight unless `weight` is None."""
    return (losses if weight is None else losses * weight).mean()

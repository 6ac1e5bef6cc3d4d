"""DDPG: deep deterministic policy gradient (Lillicrap et al., arXiv:1509.02971)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from samplebatch.batch.nested.batch import Batch
from samplebatch.learn.action_values import ActionValueLearner, ContinuousDeterministicPolicy
from samplebatch.learn.algorithm import OffPolicyAlgorithm, TrainingStats
from samplebatch.learn.optimizer import OptimizerFactory


@dataclass(kw_only=True)
class DDPGTrainingStats(TrainingStats):
    """Losses of an update of DDPG."""

    actor_loss: float
    critic_loss: float


class DDPG(ActionValueLearner[ContinuousDeterministicPolicy], OffPolicyAlgorithm[ContinuousDeterministicPolicy]):
    """Deep deterministic policy gradient, for continuous actions (Lillicrap et al., arXiv:1509.02971, algorithm 1).

    Targets bootstrap from the target critic's values of the target policy's actions. Each update performs one gradient
    step of the critic and one gradient step of the policy, and then updates the target networks.

    Parameters
    ----------
    policy, policy_optim, **options
        See `ActionValueLearner`.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the policy's action space is not a Box.
    """

    _policy_class = ContinuousDeterministicPolicy

    def __init__(
        self, *, policy: ContinuousDeterministicPolicy, policy_optim: OptimizerFactory, **options: Any
    ) -> None:
        super().__init__(policy=policy, policy_optim=policy_optim, **options)
        self.actor_old = self._add_lagged_network(policy.actor)

    def _target_q(self, batch: Batch) -> torch.Tensor:
        act = self.policy(Batch(obs=batch.obs_next), model=self.actor_old).act
        values: torch.Tensor = self._action_value(self.critic_old, batch.obs_next, act)
        return values.flatten()

    def _update_with_batch(self, batch: Batch) -> DDPGTrainingStats:
        (critic_loss,) = self._update_critics(batch)
        loss = -self._action_value(self.critic, batch.obs, self.policy(batch).act).mean()
        self.policy_optim.step(loss)
        self._update_lagged_network_weights(self.tau)
        return DDPGTrainingStats(actor_loss=loss.item(), critic_loss=critic_loss)

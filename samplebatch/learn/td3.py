"""TD3: deterministic policy gradient with clipped double Q-learning (Fujimoto et al., arXiv:1802.09477)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.learn.action_values import ContinuousDeterministicPolicy, TwinCritics
from samplebatch.learn.algorithm import OffPolicyAlgorithm, TrainingStats
from samplebatch.learn.optimizer import OptimizerFactory


@dataclass(kw_only=True)
class TD3TrainingStats(TrainingStats):
    """Losses of an update of TD3; `actor_loss` is None if the policy was not updated."""

    actor_loss: float | None
    critic1_loss: float
    critic2_loss: float


class TD3(TwinCritics[ContinuousDeterministicPolicy], OffPolicyAlgorithm[ContinuousDeterministicPolicy]):
    """Twin delayed deterministic policy gradient, for continuous actions (Fujimoto et al., arXiv:1802.09477).

    Clipped noise is added to the target policy's actions in the targets, which smooths the critics (section 5.3). Every
    `update_actor_freq` updates, the policy is updated with the gradient of the first critic. All target networks are
    updated afterwards (section 5.2).

    Parameters
    ----------
    policy, policy_optim, **options
        See `TwinCritics`.
    policy_noise, noise_clip
        Standard deviation of the noise in target actions, and bound of its absolute value; 0 for no bound.
    update_actor_freq
        Number of critic updates per policy update.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the policy's action space is not a Box.
    """

    _policy_class = ContinuousDeterministicPolicy

    def __init__(
        self,
        *,
        policy: ContinuousDeterministicPolicy,
        policy_optim: OptimizerFactory,
        policy_noise: float = 0.2,
        update_actor_freq: int = 2,
        noise_clip: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(policy=policy, policy_optim=policy_optim, **options)
        self.actor_old = self._add_lagged_network(policy.actor)
        self.policy_noise, self.noise_clip = policy_noise, noise_clip
        self.update_actor_freq = whole("update_actor_freq", update_actor_freq, 1)

    def _target_q(self, batch: Batch) -> torch.Tensor:
        act = self.policy(Batch(obs=batch.obs_next), model=self.actor_old).act
        noise = torch.randn_like(act) * self.policy_noise
        if self.noise_clip > 0:
            noise = noise.clamp(-self.noise_clip, self.noise_clip)
        return self._min_target_value(batch.obs_next, act + noise)

    def _update_with_batch(self, batch: Batch) -> TD3TrainingStats:
        critic1_loss, critic2_loss = self._update_critics(batch)
        actor_loss = None
        if self.updates % self.update_actor_freq == 0:
            loss = -self._action_value(self.critic, batch.obs, self.policy(batch).act).mean()
            self.policy_optim.step(loss)
            self._update_lagged_network_weights(self.tau)
            actor_loss = loss.item()
        return TD3TrainingStats(actor_loss=actor_loss, critic1_loss=critic1_loss, critic2_loss=critic2_loss)

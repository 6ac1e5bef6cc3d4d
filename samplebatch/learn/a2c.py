"""A2C: synchronous advantage actor-critic (Mnih et al., arXiv:1602.01783)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.learn.actor_critic import ActorCriticOnPolicyAlgorithm
from samplebatch.learn.algorithm import Indices
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import ProbabilisticActorPolicy, log_probability
from samplebatch.learn.ppo import ActorCriticTrainingStats, summarize_steps


class A2C(ActorCriticOnPolicyAlgorithm):
    """Advantage actor-critic: policy gradient without clipping, with advantages that a critic estimates.

    The loss of a minibatch is the mean of `-log_prob * advantage`, plus `vf_coef` times the critic's mean squared
    error, minus `ent_coef` times the mean entropy (arXiv:1602.01783, section 4).

    Parameters
    ----------
    policy, critic, optim, **options
        See `ActorCriticOnPolicyAlgorithm`.
    advantage_normalization
        Whether advantages are standardized in each minibatch.
    vf_coef, ent_coef
        Weights of the critic's loss and of the entropy in the loss.

    Raises
    ------
    ArgumentError
        If an argument is out of range.
    """

    def __init__(
        self,
        *,
        policy: ProbabilisticActorPolicy,
        critic: nn.Module,
        optim: OptimizerFactory,
        advantage_normalization: bool = False,
        vf_coef: float = 0.5,
        ent_coef: float = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(policy=policy, critic=critic, optim=optim, **options)
        self.advantage_normalization, self.vf_coef, self.ent_coef = advantage_normalization, vf_coef, ent_coef

    def _preprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        return self._add_returns_and_advantages(self._mark_episode_starts(batch, buffer, indices), buffer, indices)

    def _update_with_batch(self, batch: Batch, batch_size: int | None, repeat: int) -> ActorCriticTrainingStats:
        metrics: list[torch.Tensor] = []
        if "logp_old" not in batch and (repeat > 1 or (batch_size or len(batch)) < len(batch)):
            batch = self._add_log_probabilities(batch)
        for _ in range(repeat):
            for rows, dist, values in self._evaluate_minibatches(batch, batch_size):
                log_probabilities, advantages = log_probability(dist, rows.act), rows.adv
                if self.advantage_normalization and len(advantages) > 1:
                    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                actor_loss = -(log_probabilities * advantages).mean()
                vf_loss = (rows.returns - values).square().mean()
                entropy = dist.entropy().mean()
                loss = actor_loss + self.vf_coef * vf_loss - self.ent_coef * entropy
                self.optim.step(loss)
                with torch.no_grad():
                    # The estimator k3 of http://joschu.net/blog/kl-approx.html
                    # Without logp_old there is only one gradient step, by the policy before the update.
                    log_ratio = log_probabilities - rows.get("logp_old", log_probabilities)
                    kl = (log_ratio.exp() - 1.0 - log_ratio).mean()
                metrics.append(torch.stack([loss, actor_loss, vf_loss, entropy, kl]).detach())
        return summarize_steps(metrics)

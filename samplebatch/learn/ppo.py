"""PPO: proximal policy optimization (Schulman et al., arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributions import Distribution

from samplebatch.arguments import positive
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.learn.actor_critic import ActorCriticOnPolicyAlgorithm
from samplebatch.learn.algorithm import Indices, TrainingStats, summarize
from samplebatch.learn.compiler import Compiler
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import ProbabilisticActorPolicy, log_probability
from samplebatch.rollout.statistics import SequenceSummaryStats

_METRICS = ("loss", "actor_loss", "vf_loss", "ent_loss", "approx_kl")


class Minibatch(NamedTuple):
    """Tensors of a minibatch; `torch.compile` can trace this type but not a `Batch`."""

    obs: torch.Tensor
    act: torch.Tensor
    adv: torch.Tensor
    returns: torch.Tensor
    v_s: torch.Tensor
    logp_old: torch.Tensor


Loss = tuple[torch.Tensor, torch.Tensor]
"""Loss of a minibatch, and its metrics in the order of `ActorCriticTrainingStats`, shape (5,)."""


@dataclass(kw_only=True)
class ActorCriticTrainingStats(TrainingStats):
    """Statistics of an actor-critic update, summarized over its gradient steps.

    loss, actor_loss, vf_loss, ent_loss: total loss, actor loss, critic loss and entropy.
    approx_kl: estimated KL divergence from the behaviour policy.
    """

    loss: SequenceSummaryStats | None
    actor_loss: SequenceSummaryStats | None
    vf_loss: SequenceSummaryStats | None
    ent_loss: SequenceSummaryStats | None
    approx_kl: SequenceSummaryStats | None

    def get_loss_stats_dict(self) -> dict[str, float]:
        """Return the metrics, including the number of gradient steps as in Tianshou."""
        return super().get_loss_stats_dict() | {"gradient_steps": self.gradient_steps}


class PPO(ActorCriticOnPolicyAlgorithm):
    """Proximal policy optimization: policy gradient with clipped probability ratios.

    Parameters
    ----------
    policy, critic, optim, **options
        See `ActorCriticOnPolicyAlgorithm`.
    eps_clip
        Clipping range: ratios of new to old action probabilities are clipped to [1 - eps_clip, 1 + eps_clip].
    dual_clip
        Upper bound of the ratio for negative advantages (arXiv:1912.09729); None for no bound.
    value_clip
        Whether changes of the critic's values are clipped to [-eps_clip, eps_clip] (arXiv:1811.02553, section 4.1).
    advantage_normalization
        Whether advantages are standardized in each minibatch.
    recompute_advantage
        Whether advantages are recomputed before each pass (arXiv:2006.05990, section 3.5).
    vf_coef, ent_coef
        Weights of the critic's loss and of the entropy in the loss.
    target_kl
        An update stops before the first minibatch whose estimated KL divergence exceeds 1.5 times this value; None for
        no early stopping.
    compile
        Whether networks and loss are compiled with `torch.compile`, which requires a C++ compiler. Results agree within
        rounding. Each process compiles in its first update, and a second time if minibatches differ in size. Each
        compilation takes several seconds. Observations must be tensors, and the policy must not be recurrent.

    Raises
    ------
    ArgumentError
        If an argument is out of range; if `compile` is true for a recurrent policy, or without a C++ compiler.
    """

    def __init__(
        self,
        *,
        policy: ProbabilisticActorPolicy,
        critic: nn.Module,
        optim: OptimizerFactory,
        eps_clip: float = 0.2,
        dual_clip: float | None = None,
        value_clip: bool = False,
        advantage_normalization: bool = True,
        recompute_advantage: bool = False,
        vf_coef: float = 0.5,
        ent_coef: float = 0.01,
        target_kl: float | None = None,
        compile: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(policy=policy, critic=critic, optim=optim, **options)
        if compile and self._is_recurrent:
            raise ArgumentError("compile must be False for a recurrent policy, got True")
        self._compiler = Compiler() if compile else None
        if dual_clip is not None and not positive("dual_clip", dual_clip) > 1.0:
            raise ArgumentError(f"dual_clip must be a number above 1, got {dual_clip}")
        self.eps_clip, self.dual_clip, self.value_clip = positive("eps_clip", eps_clip), dual_clip, value_clip
        self.advantage_normalization, self.recompute_adv = advantage_normalization, recompute_advantage
        self._source: tuple[ReplayBuffer, Indices] | None = None
        self.vf_coef, self.ent_coef = vf_coef, ent_coef
        self.target_kl = None if target_kl is None else positive("target_kl", target_kl)

    def _preprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        batch = self._mark_episode_starts(batch, buffer, indices)
        batch = self._add_log_probabilities(self._add_returns_and_advantages(batch, buffer, indices))
        if self.recompute_adv:
            self._source = buffer, indices
        return batch

    def _update_with_batch(self, batch: Batch, batch_size: int | None, repeat: int) -> ActorCriticTrainingStats:
        metrics: list[torch.Tensor] = []
        # Not kept after the update: it refers to the buffer.
        source, self._source = self._source, None
        for pass_index in range(repeat):
            if pass_index and source is not None:
                batch = self._add_returns_and_advantages(batch, *source)
            for loss, step_metrics in self._losses(batch, batch_size):
                if self.target_kl is not None and step_metrics[-1] > 1.5 * self.target_kl:
                    return summarize_steps(metrics)
                self.optim.step(loss)
                metrics.append(step_metrics)
        return summarize_steps(metrics)

    def _losses(self, batch: Batch, batch_size: int | None) -> Iterator[Loss]:
        """Evaluate minibatches one by one, each with the parameters after the previous gradient step."""
        if self._compiler is None:
            for rows, dist, values in self._evaluate_minibatches(batch, batch_size):
                yield self._loss(rows, dist, values)
            return
        for rows in self._minibatches(batch, batch_size, Minibatch._fields):
            yield self._compiler.call(self._loss_of_minibatch, Minibatch(*(rows[name] for name in Minibatch._fields)))

    def _loss_of_minibatch(self, rows: Minibatch) -> Loss:
        named: Any = rows
        return self._loss(named, self.policy.distribution(named)[0], self._values(rows.obs))

    def _loss(self, rows: Any, dist: Distribution, values: torch.Tensor) -> Loss:
        log_ratio = log_probability(dist, rows.act) - rows.logp_old
        ratio = log_ratio.exp()
        with torch.no_grad():
            # The estimator k3 of http://joschu.net/blog/kl-approx.html
            kl = (ratio - 1.0 - log_ratio).mean()
        actor_loss, vf_loss = self._actor_loss(ratio, rows.adv), self._critic_loss(values, rows)
        entropy = dist.entropy().mean()
        loss = actor_loss + self.vf_coef * vf_loss - self.ent_coef * entropy
        return loss, torch.stack([loss, actor_loss, vf_loss, entropy, kl]).detach()

    def _actor_loss(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Return the clipped loss (arXiv:1707.06347, equation 7)."""
        if self.advantage_normalization and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = ratio.clamp(1.0 - self.eps_clip, 1.0 + self.eps_clip)
        gain = torch.min(ratio * advantages, clipped * advantages)
        if self.dual_clip is not None:
            # arXiv:1912.09729, equation 3
            gain = torch.where(advantages < 0.0, torch.max(gain, self.dual_clip * advantages), gain)
        return -gain.mean()

    def _critic_loss(self, values: torch.Tensor, rows: Any) -> torch.Tensor:
        """Return the mean squared error; with `value_clip`, each error is at least the error of the clipped value."""
        errors = (rows.returns - values).square()
        if self.value_clip:
            clipped = rows.v_s + (values - rows.v_s).clamp(-self.eps_clip, self.eps_clip)
            errors = torch.max(errors, (rows.returns - clipped).square())
        loss: torch.Tensor = errors.mean()
        return loss


def summarize_steps(metrics: list[torch.Tensor]) -> ActorCriticTrainingStats:
    """Summarize the metrics of gradient steps: one tensor of shape (5,) per step, in the order of the statistics."""
    summaries: Any = dict(zip(_METRICS, summarize(metrics, len(_METRICS)), strict=True))
    return ActorCriticTrainingStats(**summaries, gradient_steps=len(metrics))

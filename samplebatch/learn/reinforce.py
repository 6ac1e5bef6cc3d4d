"""Reinforce: the policy gradient (Williams, Machine Learning 8, 1992)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from samplebatch.arguments import fraction
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.learn.algorithm import Indices, OnPolicyAlgorithm, TrainingStats, summarize
from samplebatch.learn.networks import recurrent_parts
from samplebatch.learn.normalization import RunningMeanStd
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import ProbabilisticActorPolicy, log_probability
from samplebatch.rollout.statistics import SequenceSummaryStats


@dataclass(kw_only=True)
class LossSequenceTrainingStats(TrainingStats):
    """Statistics of an update that performs several gradient steps, each with one loss."""

    loss: SequenceSummaryStats | None


class Reinforce(OnPolicyAlgorithm[ProbabilisticActorPolicy]):
    """Policy gradient that weights the log-probabilities of actions by returns.

    Parameters
    ----------
    policy, optim, allow_nonfinite
        Policy to train, and its optimizer factory; see `Algorithm` for `allow_nonfinite`.
    gamma, max_grad_norm
        Discount per step, and maximum L2 norm of gradients; None for no clipping.
    return_standardization
        Whether returns are standardized by the running mean and standard deviation of returns.

    Raises
    ------
    ArgumentError
        If an argument is out of range, or the policy is recurrent.
    """

    _policy_class = ProbabilisticActorPolicy

    def __init__(
        self,
        *,
        policy: ProbabilisticActorPolicy,
        gamma: float = 0.99,
        return_standardization: bool = False,
        optim: OptimizerFactory,
        max_grad_norm: float | None = None,
        allow_nonfinite: bool = False,
    ) -> None:
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        if recurrent_parts(policy):
            raise ArgumentError("policy must not be recurrent, because Reinforce learns from single steps; use PPO")
        self.gamma = fraction("gamma", gamma)
        self.ret_rms = RunningMeanStd() if return_standardization else None
        self.optim = self._create_optimizer(policy, optim, max_grad_norm)

    def _preprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        moments = self.ret_rms
        # The bootstrap value of incomplete episodes is the mean of all returns.
        bootstrap = torch.full((len(indices),), 0.0 if moments is None else moments.mean.item(), dtype=torch.float64)
        returns, _ = self.compute_episodic_return(batch, buffer, indices, bootstrap, gamma=self.gamma, gae_lambda=1.0)
        if moments is not None:
            standardized = (returns - moments.mean.item()) / moments.std.item()
            moments.update(returns[np.isfinite(returns)])
            returns = standardized
        batch.returns = torch.as_tensor(returns, dtype=batch.rew.dtype, device=batch.rew.device)
        return batch

    def _update_with_batch(self, batch: Batch, batch_size: int | None, repeat: int) -> LossSequenceTrainingStats:
        losses = []
        for _ in range(repeat):
            for rows in self._minibatches(batch, batch_size, ("obs", "act", "returns")):
                dist, _ = self.policy.distribution(rows)
                loss = -(log_probability(dist, rows.act) * rows.returns).mean()
                self.optim.step(loss)
                losses.append(loss.detach())
        (loss,) = summarize(losses, 1)
        return LossSequenceTrainingStats(loss=loss, gradient_steps=len(losses))

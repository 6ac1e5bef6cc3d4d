"""CQL: soft actor-critic with a penalty on the values of actions outside the data (Kumar et al., arXiv:2006.04779)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import mse_loss

from samplebatch.arguments import positive, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError, ColumnNotFoundError
from samplebatch.learn.algorithm import OfflineAlgorithm
from samplebatch.learn.optimizer import AdamOptimizerFactory, OptimizerFactory
from samplebatch.learn.sac import ContinuousSoftActorCritic, SACPolicy, SACTrainingStats
from samplebatch.storage.datasets.dataset import Dataset

PenaltyActions = list[tuple[torch.Tensor, torch.Tensor, bool]]
"""Sampled actions by source: actions, log-densities, and whether the source is the policy."""

_RETURNS = "calibration_returns"
"""Column of the discounted return from each step on."""


@dataclass(kw_only=True)
class CQLTrainingStats(SACTrainingStats):
    """Losses of an update of CQL; the Lagrange multiplier's value and loss are None if `with_lagrange` is false."""

    cql_alpha: float | None = None
    cql_alpha_loss: float | None = None


class LagrangeMultiplier(nn.Module):
    """Learned weight, parameterized by its logarithm and clamped to bounds; initially 1."""

    def __init__(self, minimum: float, maximum: float) -> None:
        super().__init__()
        self.bounds = minimum, maximum
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self) -> torch.Tensor:
        """Return the weight, shape ()."""
        return self.log.exp().clamp(*self.bounds)


class CQL(ContinuousSoftActorCritic, OfflineAlgorithm[SACPolicy]):
    """Conservative Q-learning based on soft actor-critic, for continuous actions (Kumar et al. 2020, arXiv:2006.04779).

    The critics' loss contains a penalty on actions outside the data: CQL(H), equation 4, with the sum over actions
    estimated from `num_repeat_actions` uniform actions, policy actions at s, and policy actions at s' (appendix F),

        cql_weight * (T log sum over a of exp((Q(s, a) - log density(a)) / T) - Q(s, a of the data)).

    If `with_lagrange` is true, the penalty is also weighted by a Lagrange multiplier, which is learned so that the
    penalty reaches a threshold (equation 30).

    Parameters
    ----------
    policy, policy_optim, max_grad_norm, **options
        See `SAC`.
    cql_weight, temperature
        Weight of the penalty, and T in the formula, above 0.
    with_lagrange, lagrange_threshold
        Whether to learn the weight as a Lagrange multiplier, and the target value of the penalty.
    cql_alpha_lr, alpha_min, alpha_max
        Learning rate and bounds of the Lagrange multiplier.
    min_action, max_action, num_repeat_actions
        Bounds of the uniform actions, and number of actions per step that are sampled from each of three sources: the
        uniform distribution, the policy at s, and the policy at s'.
    calibrated
        Whether to clip the values of policy actions in the penalty from below at the discounted return of the data
        (Cal-QL, Nakamoto et al. 2023, arXiv:2303.05479, section 5). Requires the column `calibration_returns`:
        `process_buffer` adds this return to the rows of a replay buffer as a column; for a `Dataset`, the return is
        added to sampled rows.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the policy's actions are not continuous.
    """

    def __init__(
        self,
        *,
        policy: SACPolicy,
        policy_optim: OptimizerFactory,
        cql_alpha_lr: float = 1e-4,
        cql_weight: float = 1.0,
        temperature: float = 1.0,
        with_lagrange: bool = True,
        lagrange_threshold: float = 10.0,
        min_action: float = -1.0,
        max_action: float = 1.0,
        num_repeat_actions: int = 10,
        alpha_min: float = 0.0,
        alpha_max: float = 1e6,
        max_grad_norm: float = 1.0,
        calibrated: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(policy=policy, policy_optim=policy_optim, max_grad_norm=max_grad_norm, **options)
        if not min_action < max_action:
            raise ArgumentError(f"min_action must be below max_action, got {min_action} and {max_action}")
        self.cql_weight, self.temperature = cql_weight, positive("temperature", temperature)
        self.action_bounds = min_action, max_action
        self.num_repeat_actions = whole("num_repeat_actions", num_repeat_actions, 1)
        self.calibrated = calibrated
        self._cached_returns: tuple[Dataset, npt.NDArray[np.float32]] | None = None
        """The most recently sampled dataset, and the discounted return from each of its rows on."""
        self.lagrange_threshold = lagrange_threshold if with_lagrange else 0.0
        self.multiplier = LagrangeMultiplier(alpha_min, alpha_max) if with_lagrange else None
        if self.multiplier is not None:
            self.multiplier_optim = self._create_optimizer(self.multiplier, AdamOptimizerFactory(cql_alpha_lr))

    def process_buffer(self, buffer: Any) -> Any:
        """Return the source of rows (see `OfflineAlgorithm.process_buffer`) after computing returns for calibration."""
        source = super().process_buffer(buffer)
        if self.calibrated and isinstance(source, ReplayBuffer):
            indices = source.sample_indices(0)
            rows = source[indices]
            returns, _ = self.compute_episodic_return(rows, source, indices, gamma=self.gamma, gae_lambda=1.0)
            source.set_array_at_key(returns, _RETURNS, indices, 0.0)
        elif self.calibrated and isinstance(source, Dataset):
            self._dataset_returns(source)
        return source

    def _dataset_returns(self, dataset: Dataset) -> npt.NDArray[np.float32]:
        """Return the discounted return from each row of a dataset; returns are recomputed if rows were added."""
        cached = self._cached_returns
        if cached is None or cached[0] is not dataset or len(cached[1]) != len(dataset):
            cached = self._cached_returns = dataset, dataset.discounted_rewards(self.gamma)
        return cached[1]

    def _preprocess_batch(self, batch: Batch, buffer: Any, indices: Any) -> Batch:
        """Add returns for calibration; `_update_with_batch` computes targets after the policy's gradient step."""
        if self.calibrated and _RETURNS not in batch:
            if not isinstance(buffer, Dataset):
                raise ColumnNotFoundError(
                    f"rows must have column {_RETURNS!r}, which process_buffer adds to a replay buffer; pass "
                    f"calibrated=False to learn from a {type(buffer).__name__} without it"
                )
            returns = torch.from_numpy(self._dataset_returns(buffer)[indices])
            batch[_RETURNS] = returns.to(batch.returns.device, batch.returns.dtype)
        return batch

    def _update_with_batch(self, batch: Batch) -> CQLTrainingStats:
        metrics = self._update_actor(batch)
        with torch.no_grad():
            batch.returns = batch.returns + batch.discount * self._target_q(batch)
            penalty_actions = self._sample_penalty_actions(batch)
        weight = 1.0 if self.multiplier is None else self.multiplier().item()
        losses, excesses = [], []
        for critic, optim in ((self.critic, self.critic_optim), (self.critic2, self.critic2_optim)):
            values = self._action_value(critic, batch.obs, batch.act).flatten()
            penalty = self.cql_weight * (self._soft_maximum(critic, batch, penalty_actions) - values).mean()
            excess = penalty - self.lagrange_threshold
            loss = mse_loss(values, batch.returns) + weight * excess
            optim.step(loss)
            losses.append(loss.item())
            excesses.append(excess.detach())
        if self.multiplier is not None:
            multiplier_loss = -self.multiplier() * (excesses[0] + excesses[1]) / 2
            self.multiplier_optim.step(multiplier_loss)
            metrics |= {"cql_alpha": weight, "cql_alpha_loss": multiplier_loss.item()}
        self._update_lagged_network_weights(self.tau)
        return CQLTrainingStats(critic1_loss=losses[0], critic2_loss=losses[1], **metrics)

    def _sample_penalty_actions(self, batch: Batch) -> PenaltyActions:
        """Sample k actions per row from each source: uniform actions, policy actions at s, and policy actions at s'.

        Actions have shape (n * k, ...), grouped by row; log-densities have shape (n, k).
        """
        n, k = len(batch.act), self.num_repeat_actions
        low, high = self.action_bounds
        uniform = torch.empty_like(batch.act.repeat_interleave(k, 0)).uniform_(low, high)
        log_density = -batch.act[0].numel() * math.log(high - low)
        samples = [(uniform, uniform.new_full((n, k), log_density), False)]
        for obs in (batch.obs, batch.obs_next):
            output = self.policy(Batch(obs=_repeat(obs, n, k)))
            samples.append((output.act, output.log_prob.view(n, k), True))
        return samples

    def _soft_maximum(self, critic: nn.Module, batch: Batch, penalty_actions: PenaltyActions) -> torch.Tensor:
        """Estimate T log sum over a of exp(Q(s, a) / T) by importance sampling, shape (n,)."""
        n, obs = len(batch.act), _repeat(batch.obs, len(batch.act), self.num_repeat_actions)
        scores = []
        for actions, log_density, is_policy in penalty_actions:
            values = self._action_value(critic, obs, actions).view(n, -1)
            if self.calibrated and is_policy:
                values = torch.max(values, batch[_RETURNS][:, None])
            scores.append((values - log_density) / self.temperature)
        return self.temperature * torch.logsumexp(torch.cat(scores, 1), 1)


def _repeat(obs: Any, n: int, k: int) -> Any:
    return obs[np.repeat(np.arange(n), k)]

"""CQL: a soft actor-critic that holds values down where data have no actions (Kumar et al., arXiv:2006.04779)."""

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

Contrasts = list[tuple[torch.Tensor, torch.Tensor, bool]]
"""Actions by how they were drawn, with their log-densities, and whether the policy drew them."""

_RETURNS = "calibration_returns"
"""The column of the discounted rewards that the data have from a step on."""


@dataclass(kw_only=True)
class CQLTrainingStats(SACTrainingStats):
    """Losses of an update of CQL; None for the multiplier's where the penalty has a fixed weight."""

    cql_alpha: float | None = None
    cql_alpha_loss: float | None = None


class LagrangeMultiplier(nn.Module):
    """A weight between two bounds that is learned by its logarithm, from 1 on."""

    def __init__(self, least: float, most: float) -> None:
        super().__init__()
        self.bounds = least, most
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self) -> torch.Tensor:
        """Return the weight, shape ()."""
        return self.log.exp().clamp(*self.bounds)


class CQL(ContinuousSoftActorCritic, OfflineAlgorithm[SACPolicy]):
    """Conservative Q-learning over a soft actor-critic, for continuous actions (Kumar et al. 2020, arXiv:2006.04779).

    The critics' loss has a penalty on actions that the data do not have: CQL(H), equation 4, with the sum over actions
    estimated from `num_repeat_actions` uniform ones, as many of the policy at s, and as many at s' (appendix F),

        cql_weight * (T log sum over a of exp((Q(s, a) - log density(a)) / T) - Q(s, a of the data)).

    With a Lagrange multiplier, its weight is learned so that the penalty comes to a threshold (equation 30).

    Parameters
    ----------
    policy, policy_optim, **options
        See `SAC`.
    cql_alpha_lr
        The learning rate of the Lagrange multiplier.
    cql_weight
        The weight of the penalty.
    temperature
        T in the formula, above 0.
    with_lagrange
        Whether there is a Lagrange multiplier.
    lagrange_threshold
        What the penalty is to come to then.
    min_action, max_action
        The bounds of the uniform actions.
    num_repeat_actions
        How many actions of each kind are drawn for a step.
    alpha_min, alpha_max
        The bounds of the Lagrange multiplier.
    max_grad_norm
        The largest norm of a critic's gradients.
    calibrated
        Whether values of the policy's actions count at least as the return that the data had from there on, so that
        they are not held down below it (Cal-QL, Nakamoto et al. 2023, arXiv:2303.05479, section 5). Rows must have
        the column `calibration_returns`, which `process_buffer` adds to a replay buffer; rows of a `Dataset` get theirs
        when they are sampled.

    Raises
    ------
    ArgumentError
        If a number lies outside.
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
        self._returns_of: tuple[Dataset, npt.NDArray[np.float32]] | None = None
        """The dataset that was sampled last, with the discounted rewards that follow each of its rows."""
        self.lagrange_threshold = lagrange_threshold if with_lagrange else 0.0
        self.multiplier = LagrangeMultiplier(alpha_min, alpha_max) if with_lagrange else None
        if self.multiplier is not None:
            self.multiplier_optim = self._create_optimizer(self.multiplier, AdamOptimizerFactory(cql_alpha_lr))

    def process_buffer(self, buffer: Any) -> Any:
        """Add the returns that calibration needs to a replay buffer, or compute those of a `Dataset`; open a folder."""
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
        """Return the discounted rewards that follow each row of a dataset, computed once and when rows are added."""
        if self._returns_of is None or self._returns_of[0] is not dataset or len(self._returns_of[1]) != len(dataset):
            self._returns_of = dataset, dataset.discounted_rewards(self.gamma)
        return self._returns_of[1]

    def _preprocess_batch(self, batch: Batch, buffer: Any, indices: Any) -> Batch:
        """Leave targets to the update, which makes them with the policy after its step."""
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
        figures = self._update_actor(batch)
        with torch.no_grad():
            batch.returns = batch.returns + batch.discount * self._target_q(batch)
            contrasts = self._draw_contrasts(batch)
        weight = 1.0 if self.multiplier is None else self.multiplier().item()
        losses, excesses = [], []
        for critic, optim in ((self.critic, self.critic_optim), (self.critic2, self.critic2_optim)):
            values = critic(batch.obs, batch.act).flatten()
            penalty = self.cql_weight * (self._soft_maximum(critic, batch, contrasts) - values).mean()
            excess = penalty - self.lagrange_threshold
            loss = mse_loss(values, batch.returns) + weight * excess
            optim.step(loss)
            losses.append(loss.item())
            excesses.append(excess.detach())
        if self.multiplier is not None:
            multiplier_loss = -self.multiplier() * (excesses[0] + excesses[1]) / 2
            self.multiplier_optim.step(multiplier_loss)
            figures |= {"cql_alpha": weight, "cql_alpha_loss": multiplier_loss.item()}
        self._update_lagged_network_weights(self.tau)
        return CQLTrainingStats(critic1_loss=losses[0], critic2_loss=losses[1], **figures)

    def _draw_contrasts(self, batch: Batch) -> Contrasts:
        """Draw k actions a row for the penalty: uniform ones, those of the policy at s, those of the policy at s'.

        Returns
        -------
        For each kind the actions, shape (n k, ...), those of a row together; their log-densities, shape (n, k); and
        whether they are the policy's.
        """
        n, k = len(batch.act), self.num_repeat_actions
        least, most = self.action_bounds
        uniform = torch.empty_like(batch.act.repeat_interleave(k, 0)).uniform_(least, most)
        density = -batch.act[0].numel() * math.log(most - least)
        found = [(uniform, uniform.new_full((n, k), density), False)]
        for obs in (batch.obs, batch.obs_next):
            drawn = self.policy(Batch(obs=_repeat(obs, n, k)))
            found.append((drawn.act, drawn.log_prob.view(n, k), True))
        return found

    def _soft_maximum(self, critic: nn.Module, batch: Batch, contrasts: Contrasts) -> torch.Tensor:
        """Estimate T log sum over a of exp(Q(s, a) / T) from actions drawn by densities, shape (n,)."""
        n, obs = len(batch.act), _repeat(batch.obs, len(batch.act), self.num_repeat_actions)
        scores = []
        for actions, log_density, of_policy in contrasts:
            values = critic(obs, actions).view(n, -1)
            if self.calibrated and of_policy:
                values = torch.max(values, batch[_RETURNS][:, None])
            scores.append((values - log_density) / self.temperature)
        return self.temperature * torch.logsumexp(torch.cat(scores, 1), 1)


def _repeat(obs: Any, n: int, k: int) -> Any:
    return obs[np.repeat(np.arange(n), k)]

"""IMPALA and APPO: actor-critic algorithms that correct off-policy steps with V-trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samplebatch.arguments import positive
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ColumnNotFoundError
from samplebatch.learn.a2c import A2C
from samplebatch.learn.actor_critic import ActorCriticOnPolicyAlgorithm, Floats
from samplebatch.learn.algorithm import Indices
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import ProbabilisticActorPolicy, log_probability
from samplebatch.learn.ppo import PPO
from samplebatch.names import ACTION_LOGP
from samplebatch.policy.state import state_of
from samplebatch.returns.batches import compute_vtrace_return


def _check_bound(name: str, bound: float | None) -> float | None:
    return None if bound is None else positive(name, bound)


def _behaviour_log_probabilities(batch: Batch) -> torch.Tensor:
    """Return the log-probabilities of the actions under the behaviour policy, shape (n,)."""
    if ACTION_LOGP not in batch:
        raise ColumnNotFoundError(
            f"rows must have column {ACTION_LOGP!r}, the log-probability of each action under the behaviour policy, "
            "got none; create the algorithm before collectors and workers, so that its policy records the column"
        )
    recorded: torch.Tensor = batch[ACTION_LOGP]
    return recorded


@torch.no_grad()
def _log_ratios(algorithm: ActorCriticOnPolicyAlgorithm, batch: Batch) -> Floats:
    """Return the log importance ratios of the algorithm's policy to the behaviour policy, shape (n,)."""
    target = [
        log_probability(algorithm.policy.distribution(rows, state_of(rows))[0], rows.act)
        for rows in batch.split(algorithm.max_batchsize, shuffle=False, merge_last=True)
    ]
    ratios: Floats = (torch.cat(target) - _behaviour_log_probabilities(batch)).double().cpu().numpy()
    return ratios


class IMPALA(A2C):
    """Importance-weighted actor-learner: policy gradient with V-trace targets (Espeholt et al., arXiv:1802.01561).

    Steps may be collected by older policies, so workers can collect during updates (`asynchronous` and `overlap` of
    `OnPolicyTrainerParams`). The policy records the log-probability of each action in the column `action_logp`, so
    create the algorithm before collectors and workers.

    Parameters
    ----------
    policy, critic, optim, **options
        See `A2C`.
    gae_lambda
        Decay of the traces in V-trace, lambda in remark 2 of the paper.
    rho_clip, c_clip, advantage_rho_clip
        Upper bounds of the importance ratios in temporal differences, in traces and in advantages; None for no bound.

    Raises
    ------
    ArgumentError
        If an argument is out of range.
    """

    allows_stale_steps = True

    def __init__(
        self,
        *,
        policy: ProbabilisticActorPolicy,
        critic: nn.Module,
        optim: OptimizerFactory,
        gae_lambda: float = 1.0,
        rho_clip: float | None = 1.0,
        c_clip: float | None = 1.0,
        advantage_rho_clip: float | None = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(policy=policy, critic=critic, optim=optim, gae_lambda=gae_lambda, **options)
        self.rho_clip, self.c_clip = _check_bound("rho_clip", rho_clip), _check_bound("c_clip", c_clip)
        self.advantage_rho_clip = _check_bound("advantage_rho_clip", advantage_rho_clip)
        policy.records_log_probability = True

    def _estimate(
        self, batch: Batch, buffer: ReplayBuffer, indices: Indices, values: Floats, next_values: Floats
    ) -> tuple[Floats, Floats]:
        return compute_vtrace_return(
            batch,
            buffer,
            indices,
            v_s=values,
            v_s_=next_values,
            log_ratios=_log_ratios(self, batch),
            gamma=self.gamma,
            vtrace_lambda=self.gae_lambda,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
            advantage_rho_clip=self.advantage_rho_clip,
        )

    def _preprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        batch.logp_old = _behaviour_log_probabilities(batch)
        return self._add_returns_and_advantages(self._mark_episode_starts(batch, buffer, indices), buffer, indices)


class APPO(PPO):
    """Asynchronous proximal policy optimization: PPO's clipped loss with V-trace targets and advantages.

    As in `IMPALA`, steps may be collected by older policies. The clipped ratio is relative to the policy before the
    update; V-trace corrects for changes of the policy in earlier updates (architecture of Espeholt et al.,
    arXiv:1802.01561, loss of Schulman et al., arXiv:1707.06347).

    Parameters
    ----------
    policy, critic, optim, gae_lambda, rho_clip, c_clip, advantage_rho_clip
        See `IMPALA`.
    **options
        See `PPO`.

    Raises
    ------
    ArgumentError
        If an argument is out of range.
    """

    allows_stale_steps = True

    def __init__(
        self,
        *,
        policy: ProbabilisticActorPolicy,
        critic: nn.Module,
        optim: OptimizerFactory,
        gae_lambda: float = 0.95,
        rho_clip: float | None = 1.0,
        c_clip: float | None = 1.0,
        advantage_rho_clip: float | None = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(policy=policy, critic=critic, optim=optim, gae_lambda=gae_lambda, **options)
        self.rho_clip, self.c_clip = _check_bound("rho_clip", rho_clip), _check_bound("c_clip", c_clip)
        self.advantage_rho_clip = _check_bound("advantage_rho_clip", advantage_rho_clip)
        policy.records_log_probability = True

    _estimate = IMPALA._estimate

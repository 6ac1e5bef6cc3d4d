"""Discrete BCQ: Q-learning restricted to actions that are likely in the data (Fujimoto et al., arXiv:1910.01708)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, smooth_l1_loss

from samplebatch.arguments import fraction, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import ArgumentError
from samplebatch.learn.algorithm import OfflineAlgorithm, SimpleLossTrainingStats
from samplebatch.learn.dqn import DiscreteQLearningPolicy
from samplebatch.learn.networks import call_network
from samplebatch.learn.optimizer import OptimizerFactory


class DiscreteBCQPolicy(DiscreteQLearningPolicy):
    """Greedy policy among actions that are likely in the data.

    Parameters
    ----------
    model
        Network from observations to the value of each action.
    imitator
        Network from observations to the logits of the actions in the data.
    unlikely_action_threshold
        Minimum ratio of an action's probability to the probability of the most likely action, from 0 (all actions are
        allowed) to below 1.
    **options
        See `DiscreteQLearningPolicy`: `action_space`, `observation_space` and `eps_inference`.

    Raises
    ------
    ArgumentError
        If the threshold is out of range.
    PolicySpecError
        If the action space is not Discrete.
    """

    def __init__(
        self, *, model: nn.Module, imitator: nn.Module, unlikely_action_threshold: float = 0.3, **options: Any
    ) -> None:
        super().__init__(model=model, **options)
        if fraction("unlikely_action_threshold", unlikely_action_threshold) == 1.0:
            raise ArgumentError("unlikely_action_threshold must be below 1, got 1")
        self.imitator = imitator
        self._log_threshold = math.log(unlikely_action_threshold) if unlikely_action_threshold else -math.inf

    def forward(self, batch: Batch, state: Any = None, model: nn.Module | None = None) -> Batch:
        """Return actions as `act` (an array), values as `q_value`, and the imitator's output as `imitation_logits`.

        `model`, if passed, is evaluated instead of `self.model`.
        """
        values, state = self.action_values(batch, state, model)
        obs, mask = self.observations(batch)
        logits, _ = call_network(self.imitator, obs)
        allowed = logits if mask is None else logits.masked_fill(~mask, -math.inf)
        # Equation 17 with logarithms: the normalization of the softmax cancels.
        unlikely = allowed - allowed.max(-1, keepdim=True).values < self._log_threshold
        act = values.masked_fill(unlikely, -math.inf).argmax(-1).numpy(force=True)
        return Batch(act=act, q_value=values, imitation_logits=logits, logits=logits, state=state)


@dataclass(kw_only=True)
class DiscreteBCQTrainingStats(SimpleLossTrainingStats):
    """Losses of an update of discrete BCQ: total loss, and the losses of action values, imitation and logits."""

    q_loss: float
    i_loss: float
    reg_loss: float


class DiscreteBCQ(OfflineAlgorithm[DiscreteBCQPolicy]):
    """Batch-constrained Q-learning, for discrete actions.

    Double Q-learning restricted to actions that are likely in the data. An imitator network learns the probabilities of
    actions; targets evaluate only actions that the imitator considers likely.

    Parameters
    ----------
    policy, optim, allow_nonfinite
        Policy to train, and an optimizer factory for both networks; see `Algorithm` for `allow_nonfinite`.
    gamma, n_step_return_horizon
        Discount per step, and maximum number of rewards summed before the bootstrap value.
    target_update_freq
        Number of updates between copies of the weights to the target network.
    imitation_logits_penalty
        Weight of the mean square of the imitator's logits in the loss.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    """

    _policy_class = DiscreteBCQPolicy

    def __init__(
        self,
        *,
        policy: DiscreteBCQPolicy,
        optim: OptimizerFactory,
        gamma: float = 0.99,
        n_step_return_horizon: int = 1,
        target_update_freq: int = 8000,
        imitation_logits_penalty: float = 1e-2,
        allow_nonfinite: bool = False,
    ) -> None:
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        self.gamma, self.n_step = fraction("gamma", gamma), whole("n_step_return_horizon", n_step_return_horizon, 1)
        self.target_update_freq = whole("target_update_freq", target_update_freq, 1)
        self.imitation_logits_penalty = imitation_logits_penalty
        self.optim = self._create_optimizer(policy, optim)
        self.model_old = self._add_lagged_network(policy.model)

    @torch.no_grad()
    def _preprocess_batch(self, batch: Batch, buffer: Any, indices: Any) -> Batch:
        next_rows = Batch(obs=batch.obs_next)
        values = self.policy(next_rows, model=self.model_old).q_value
        actions = torch.as_tensor(self.policy(next_rows).act, device=values.device)
        values = values.gather(-1, actions[:, None])[:, 0]
        batch.returns = batch.returns + batch.discount * values
        return batch

    def _update_with_batch(self, batch: Batch) -> DiscreteBCQTrainingStats:
        if self.updates % self.target_update_freq == 0:
            self._update_lagged_network_weights()
        output, act = self.policy(batch), batch.act.long()
        q_loss = smooth_l1_loss(output.q_value.gather(-1, act[:, None])[:, 0], batch.returns)
        i_loss = cross_entropy(output.imitation_logits, act)
        reg_loss = output.imitation_logits.square().mean()
        loss = q_loss + i_loss + self.imitation_logits_penalty * reg_loss
        self.optim.step(loss)
        return DiscreteBCQTrainingStats(
            loss=loss.item(), q_loss=q_loss.item(), i_loss=i_loss.item(), reg_loss=reg_loss.item()
        )

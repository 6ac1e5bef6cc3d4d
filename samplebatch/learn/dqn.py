"""DQN: Q-learning with a target network (Mnih et al., Nature 518, 2015).

The classes support double Q-learning (van Hasselt et al., arXiv:1509.06461), n-step returns, prioritized buffers
(Schaul et al., arXiv:1511.05952) and dueling networks (`DuelingCritic`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium
import torch
from gymnasium import spaces
from torch import nn

from samplebatch.arguments import fraction, positive, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.functions import to_numpy
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.learn.algorithm import Indices, OffPolicyAlgorithm, SimpleLossTrainingStats
from samplebatch.learn.networks import call_network
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import Policy, mask_logits

Epsilon = float | Callable[[int], float]
"""Probability of a random action, or its schedule over collected steps."""


class DiscreteQLearningPolicy(Policy):
    """Epsilon-greedy policy for discrete actions.

    Parameters
    ----------
    model
        Network from observations to the value of each action.
    action_space, observation_space
        Spaces of a single environment; the action space is Discrete.
    eps_training, eps_inference
        Probability of a random action within training steps, and outside training steps. `eps_training` may be a
        schedule over collected steps, such as a `LinearSchedule`.

    Raises
    ------
    PolicySpecError
        If the action space is not Discrete.

    Examples
    --------
    >>> policy = DiscreteQLearningPolicy(model=nn.Identity(), action_space=spaces.Discrete(3))
    >>> policy(Batch(obs=[[0.1, 0.5, 0.2]])).act
    array([1])
    """

    _action_spaces = spaces.Discrete
    _action_words = "a Discrete space"

    def __init__(
        self,
        *,
        model: nn.Module,
        action_space: gymnasium.Space[Any],
        observation_space: gymnasium.Space[Any] | None = None,
        eps_training: Epsilon = 0.0,
        eps_inference: float = 0.0,
    ) -> None:
        super().__init__(action_space, observation_space, action_bound_method=None)
        self.model, self.action_count = model, int(spaces.flatdim(action_space))
        self.set_eps_training(eps_training)
        self.set_eps_inference(eps_inference)
        self._steps: torch.Tensor
        self.register_buffer("_steps", torch.zeros((), dtype=torch.int64))

    def set_eps_training(self, eps: Epsilon) -> None:
        """Set `eps_training`."""
        self.eps_training = eps if callable(eps) else fraction("eps", eps)

    def set_eps_inference(self, eps: float) -> None:
        """Set `eps_inference`."""
        self.eps_inference = fraction("eps", eps)

    def forward(self, batch: Batch, state: Any = None, model: nn.Module | None = None) -> Batch:
        """Return the best actions as `act` (an array), the values of all actions as `logits`, and the new state.

        `model`, if passed, is evaluated instead of `self.model`.
        """
        output, mask, state = self.network_output(batch, state, model)
        values = self.compute_q_value(output, mask)
        # If the output consists of values, return the masked values.
        logits = values if output.shape == values.shape else output
        return Batch(act=to_numpy(values.argmax(-1)), logits=logits, state=state)

    def action_values(
        self, batch: Batch, state: Any = None, model: nn.Module | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Return the values of all actions, shape (n, actions), and the state; see `forward` for arguments."""
        output, mask, state = self.network_output(batch, state, model)
        return self.compute_q_value(output, mask), state

    def network_output(
        self, batch: Batch, state: Any = None, model: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return the network's output, shape (n, actions, ...), the mask of allowed actions and the state."""
        obs, mask = self.observations(batch)
        output, state = call_network(self.model if model is None else model, obs, state)
        return output, mask, state

    def compute_q_value(self, logits: torch.Tensor, mask: Any) -> torch.Tensor:
        """Compute action values from the output of the network; overridden by distributional policies.

        Actions that are False in the mask, shape (n, actions), are assigned a value below the values of all allowed
        actions.
        """
        if mask is None:
            return logits
        return mask_logits(logits, torch.as_tensor(mask, dtype=torch.bool, device=logits.device))

    def add_exploration_noise(self, act: Any, batch: Batch) -> Any:
        """Replace each action by a random allowed action with probability epsilon.

        Raises ArgumentError if a row's mask allows no action.
        """
        eps = self.eps_inference
        if self.is_within_training_step:
            eps = self.eps_training(int(self._steps)) if callable(self.eps_training) else self.eps_training
            self._steps += len(act)
        if eps and (is_random := torch.rand(len(act)).numpy() < eps).any():
            _, mask = self.observations(batch)
            if mask is None:
                mask = torch.ones(len(act), self.action_count, dtype=torch.bool)
            elif not (is_possible := mask.any(-1).cpu()).all():
                raise ArgumentError(f"a mask must allow an action, got none in row {int(is_possible.int().argmin())}")
            act[is_random] = torch.multinomial(mask.cpu().float(), 1).numpy()[is_random, 0]
        return act

    def note_steps(self, steps: int) -> None:
        """Add the number of steps that policy copies in other processes collected, for the schedule of epsilon."""
        self._steps += steps


QPolicyT = TypeVar("QPolicyT", bound=DiscreteQLearningPolicy)


class QLearningOffPolicyAlgorithm(OffPolicyAlgorithm[QPolicyT], ABC):
    """Base class of Q-learning algorithms for discrete actions, including distributional algorithms.

    Parameters
    ----------
    policy, optim, allow_nonfinite
        Policy to train, and its optimizer factory; see `Algorithm` for `allow_nonfinite`.
    gamma, n_step_return_horizon
        Discount per step, and maximum number of rewards summed before the bootstrap value.
    target_update_freq
        Number of updates between copies of the weights to the target network; 0 for no target network.
    is_double
        Whether the online network chooses the action that the target network evaluates (van Hasselt et al.,
        arXiv:1509.06461, equation 4).
    max_grad_norm
        Maximum L2 norm of gradients; None for no clipping.

    Raises
    ------
    ArgumentError
        If an argument is out of range.
    """

    _policy_class = DiscreteQLearningPolicy

    def __init__(
        self,
        *,
        policy: QPolicyT,
        optim: OptimizerFactory,
        gamma: float = 0.99,
        n_step_return_horizon: int = 1,
        target_update_freq: int = 0,
        is_double: bool = True,
        max_grad_norm: float | None = None,
        allow_nonfinite: bool = False,
    ) -> None:
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        self.gamma, self.n_step = fraction("gamma", gamma), whole("n_step_return_horizon", n_step_return_horizon, 1)
        self.target_update_freq = whole("target_update_freq", target_update_freq)
        self.is_double = is_double
        self.optim = self._create_optimizer(policy, optim, max_grad_norm)
        self.model_old = self._add_lagged_network(policy.model) if self.target_update_freq else None

    @torch.no_grad()
    def _next_output(self, batch: Batch) -> torch.Tensor:
        """Return the target network's output for the best actions at `obs_next`, shape (n, ...)."""
        next_rows = Batch(obs=batch.obs_next)
        output, mask, _ = self.policy.network_output(next_rows, model=self.model_old)
        if self.is_double and self.model_old is not None:
            values, _ = self.policy.action_values(next_rows)
        else:
            values = self.policy.compute_q_value(output, mask)
        return _select_actions(output, values.argmax(-1))

    def _preprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        # Sampled rows contain the n-step sum of rewards and the discount of the bootstrap value.
        output = self._next_output(batch)
        shape = (-1, *[1] * (output.ndim - 1))
        batch.returns = self._target(batch.returns.view(shape), batch.discount.view(shape), output)
        return batch

    def _target(self, returns: torch.Tensor, discount: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the targets, shape (n, ...), from n-step returns, discounts, and the result of `_next_output`."""
        return returns + discount * output

    @abstractmethod
    def _losses(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the priority of each row, shape (n,), from targets and the outputs for the actions."""

    def _update_with_batch(self, batch: Batch) -> SimpleLossTrainingStats:
        if self.target_update_freq and self.updates % self.target_update_freq == 0:
            self._update_lagged_network_weights()
        output, _, _ = self.policy.network_output(batch)
        losses, priorities = self._losses(_select_actions(output, batch.act.long()), batch.returns)
        weight = batch.get("weight")
        loss = (losses if weight is None else losses * weight).mean()
        self.optim.step(loss)
        batch.weight = priorities.detach()
        return SimpleLossTrainingStats(loss=loss.item())


def _select_actions(output: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
    # The gradient of gather is cheaper than the gradient of indexing.
    indices = act[:, None]
    if output.ndim > 2:
        indices = indices.view(-1, *[1] * (output.ndim - 1)).expand(-1, 1, *output.shape[2:])
    return output.gather(1, indices)[:, 0]


class DQN(QLearningOffPolicyAlgorithm[DiscreteQLearningPolicy]):
    """Deep Q-learning, for discrete actions.

    Parameters
    ----------
    policy, optim, **options
        See `QLearningOffPolicyAlgorithm`.
    huber_loss_delta
        Threshold between quadratic and linear loss; None for the squared error.

    Raises
    ------
    ArgumentError
        If an argument is out of range.
    """

    def __init__(
        self,
        *,
        policy: DiscreteQLearningPolicy,
        optim: OptimizerFactory,
        huber_loss_delta: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(policy=policy, optim=optim, **options)
        self.huber_loss_delta = None if huber_loss_delta is None else positive("huber_loss_delta", huber_loss_delta)

    def _losses(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if output.ndim != 1:
            raise ArgumentError(
                f"policy of DQN must return one value per action, got {output.shape[1]} outputs per action of a "
                f"{type(self.policy).__name__}; use C51 or QRDQN"
            )
        if self.huber_loss_delta is None:
            losses = nn.functional.mse_loss(output, target, reduction="none")
        else:
            losses = nn.functional.huber_loss(output, target, reduction="none", delta=self.huber_loss_delta)
        return losses, (target - output).abs()

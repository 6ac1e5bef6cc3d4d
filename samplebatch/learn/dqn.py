"""DQN: Q-learning with a target network (Mnih et al., Nature 518, 2015).

With double Q-learning (van Hasselt et al., arXiv:1509.06461), returns of several steps, prioritized replay (Schaul et
al., arXiv:1511.05952) where the buffer is prioritized, and dueling networks (`DuelingCritic`) where the model is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import nn

from samplebatch.arguments import fraction, positive, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.functions import to_numpy
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.learn.algorithm import Indices, OffPolicyAlgorithm, SimpleLossTrainingStats
from samplebatch.learn.networks import ask
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import Policy

Epsilon = float | Callable[[int], float]
"""The probability of a random action, or a schedule of it over the steps that are collected."""


class DiscreteQLearningPolicy(Policy):
    """Epsilon-greedy policy of discrete actions.

    Parameters
    ----------
    model
        Network from observations to the value of each action.
    action_space, observation_space
        The spaces of one environment; actions are Discrete.
    eps_training, eps_inference
        The probability of a random action within training steps and outside of them. That of training may be a
        schedule over the steps made with it, such as a `LinearSchedule`.

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
        """Set the probability of a random action within training steps, or its schedule."""
        self.eps_training = eps if callable(eps) else fraction("eps", eps)

    def set_eps_inference(self, eps: float) -> None:
        """Set the probability of a random action outside of training steps."""
        self.eps_inference = fraction("eps", eps)

    def forward(self, batch: Batch, state: Any = None, model: nn.Module | None = None) -> Batch:
        """Return the best actions as `act`, an array, the values of all actions as `logits`, and the state.

        Parameters
        ----------
        batch, state
            See `Policy.forward`.
        model
            The network that is evaluated; None for the policy's own.
        """
        values, state = self.action_values(batch, state, model)
        return Batch(act=to_numpy(values.argmax(-1)), logits=values, state=state)

    def action_values(
        self, batch: Batch, state: Any = None, model: nn.Module | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Return the values of all actions, shape (n, actions), and the state; arguments are those of `forward`."""
        obs, mask = self.observations(batch)
        values, state = ask(self.model if model is None else model, obs, state)
        return self.compute_q_value(values, mask), state

    def compute_q_value(self, logits: torch.Tensor, mask: Any) -> torch.Tensor:
        """Return action values of a network's output; a subclass for another kind of output overrides this.

        Parameters
        ----------
        logits
            Output of the network; here the values themselves.
        mask
            Flags of the allowed actions, shape (n, actions), or None. Values of other actions are below all others.
        """
        if mask is None:
            return logits
        allowed = torch.as_tensor(mask, dtype=torch.bool, device=logits.device)
        return torch.where(allowed, logits, logits.min() - 1.0)

    def add_exploration_noise(self, act: Any, batch: Batch) -> Any:
        """Put random actions, of those allowed, in the place of some."""
        eps = self.eps_inference
        if self.is_within_training_step:
            eps = self.eps_training(int(self._steps)) if callable(self.eps_training) else self.eps_training
            self._steps += len(act)
        if eps and (chosen := torch.rand(len(act)).numpy() < eps).any():
            _, mask = self.observations(batch)
            chances = torch.ones(len(act), self.action_count) if mask is None else mask.cpu().float()
            act[chosen] = torch.multinomial(chances, 1).numpy()[chosen, 0]
        return act

    def note_steps(self, steps: int) -> None:
        """Count steps that copies of the policy have made, for the schedule of epsilon."""
        self._steps += steps


class DQN(OffPolicyAlgorithm[DiscreteQLearningPolicy]):
    """Deep Q-learning of a policy for discrete actions.

    Parameters
    ----------
    policy
        The trained policy.
    optim
        Optimizer factory.
    gamma, n_step_return_horizon
        Discount per step, and maximum number of rewards summed before the bootstrap value.
    target_update_freq
        Updates between copies to the target network; 0 for no target network.
    is_double
        Whether the policy's own network chooses the action that the target network estimates.
    huber_loss_delta
        Where the loss turns from squares to absolute errors; None for squares alone.
    max_grad_norm
        Maximum L2 norm of gradients; None for no clipping.
    allow_nonfinite
        See `Algorithm`.

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
        gamma: float = 0.99,
        n_step_return_horizon: int = 1,
        target_update_freq: int = 0,
        is_double: bool = True,
        huber_loss_delta: float | None = None,
        max_grad_norm: float | None = None,
        allow_nonfinite: bool = False,
    ) -> None:
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        self.gamma, self.n_step = fraction("gamma", gamma), whole("n_step_return_horizon", n_step_return_horizon, 1)
        self.target_update_freq = whole("target_update_freq", target_update_freq)
        self.is_double = is_double
        self.huber_loss_delta = None if huber_loss_delta is None else positive("huber_loss_delta", huber_loss_delta)
        self.optim = self._create_optimizer(policy, optim, max_grad_norm)
        self.model_old = self._add_lagged_network(policy.model) if self.target_update_freq else None

    @torch.no_grad()
    def _target_q(self, batch: Batch) -> torch.Tensor:
        """Estimate the values of the observations after the last steps of windows."""
        after = Batch(obs=batch.obs_next)
        values, _ = self.policy.action_values(after, model=self.model_old)
        if not self.is_double:
            return values.max(-1).values
        # arXiv:1509.06461, equation 4: one network chooses, the other estimates.
        best = values.argmax(-1) if self.model_old is None else self.policy.action_values(after)[0].argmax(-1)
        return values.gather(-1, best[:, None])[:, 0]

    def _preprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        # The sum of rewards, and the factor of the estimate, come with rows that stand for windows.
        batch.returns = batch.returns + batch.discount * self._target_q(batch)
        return batch

    def _update_with_batch(self, batch: Batch) -> SimpleLossTrainingStats:
        if self.target_update_freq and self.updates % self.target_update_freq == 0:
            self._update_lagged_network_weights()
        values = self.policy.action_values(batch)[0].gather(-1, batch.act[:, None].long())[:, 0]
        weight, delta = batch.get("weight"), self.huber_loss_delta
        reduction = "mean" if weight is None else "none"
        if delta is None:
            losses = nn.functional.mse_loss(values, batch.returns, reduction=reduction)
        else:
            losses = nn.functional.huber_loss(values, batch.returns, reduction=reduction, delta=delta)
        loss = losses if weight is None else (losses * weight).mean()
        self.optim.step(loss)
        batch.weight = (batch.returns - values.detach()).abs()
        return SimpleLossTrainingStats(loss=loss.item())

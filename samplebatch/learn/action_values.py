"""Base classes of DDPG, TD3, SAC, CQL and IQL: policies with exploration noise, and action-value critics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal, TypeVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from samplebatch.arguments import fraction, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import PolicySpecError
from samplebatch.learn.algorithm import Algorithm
from samplebatch.learn.exploration import BaseNoise, GaussianNoise
from samplebatch.learn.networks import call_network
from samplebatch.learn.optimizer import Optimizer, OptimizerFactory, descend
from samplebatch.learn.policy import Policy, require_critic

PolicyT = TypeVar("PolicyT", bound=Policy)


class ContinuousPolicyWithExplorationNoise(Policy):
    """Base class of policies for continuous actions with optional exploration noise.

    Parameters
    ----------
    exploration_noise
        Noise added to actions; `"default"` for Gaussian noise with a standard deviation of 0.1; None for no noise.
    action_space, action_scaling, **options
        See `Policy`; the action space is a Box, and actions are scaled by default.

    Raises
    ------
    PolicySpecError
        If the action space is not a Box, or `action_scaling` is true and the Box is unbounded.
    """

    _action_spaces = spaces.Box
    _action_words = "a Box"

    def __init__(
        self,
        *,
        exploration_noise: BaseNoise | Literal["default"] | None = None,
        action_space: gymnasium.Space[Any],
        action_scaling: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(action_space, action_scaling=action_scaling, **options)
        self.set_exploration_noise(exploration_noise)

    def set_exploration_noise(self, noise: BaseNoise | Literal["default"] | None) -> None:
        """Set the exploration noise; see the class parameter `exploration_noise`."""
        self.exploration_noise = GaussianNoise(sigma=0.1) if noise == "default" else noise

    def add_exploration_noise(self, act: Any, batch: Batch) -> Any:
        """Add exploration noise to actions; the result has the dtype of the actions."""
        if self.exploration_noise is None:
            return act
        noisy = np.asarray(act) + self.exploration_noise(act.shape)
        return noisy.astype(act.dtype, copy=False)

    def get_exploration_state(self) -> dict[str, Any]:
        """Return the state of the exploration noise; empty if the policy has no noise."""
        return {} if self.exploration_noise is None else self.exploration_noise.state_dict()

    def set_exploration_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_exploration_state`."""
        if self.exploration_noise is not None:
            self.exploration_noise.load_state_dict(dict(state))


class ContinuousDeterministicPolicy(ContinuousPolicyWithExplorationNoise):
    """Deterministic policy for continuous actions, for DDPG and TD3.

    Parameters
    ----------
    actor
        Network from observations to actions; the actions are in [-1, 1] if `action_scaling` is true.
    action_space, **options
        See `ContinuousPolicyWithExplorationNoise`.

    Raises
    ------
    PolicySpecError
        If the action space is not a Box.

    Examples
    --------
    >>> policy = ContinuousDeterministicPolicy(
    ...     actor=nn.Tanh(), action_space=gymnasium.spaces.Box(-2.0, 2.0, (1,))
    ... )
    >>> policy.compute_action([100.0])
    array([2.], dtype=float32)
    """

    def __init__(self, *, actor: nn.Module, action_space: gymnasium.Space[Any], **options: Any) -> None:
        super().__init__(action_space=action_space, **options)
        self.actor = actor

    def forward(self, batch: Batch, state: Any = None, model: nn.Module | None = None, **unused: Any) -> Batch:
        """Return actions as `act`, and the new `state`; `model`, if passed, is evaluated instead of `self.actor`.

        Additional keyword arguments, which Tianshou's algorithms pass, are ignored.
        """
        obs, _ = self.observations(batch)
        act, state = call_network(self.actor if model is None else model, obs, state)
        return Batch(act=act, state=state)


class ActionValueLearner(Algorithm[PolicyT], ABC):
    r"""Base class of algorithms with a policy and a critic Q(s, a): `DDPG` and `TwinCritics`.

    The critic learns from the targets

    .. math:: y = \sum_{i<k} \gamma^i r_i + \gamma^k (1 - d_k) Q'(s_k, a')

    where k is the number of summed rewards, at most `n_step_return_horizon`; d_k is the termination flag; Q' is a
    target critic; and a' is an action that the algorithm chooses. Rewards and s_k are read from the buffer for each
    sample, so a hindsight buffer replaces the goals in s_k and recomputes the rewards.

    Parameters
    ----------
    policy, policy_optim, allow_nonfinite
        The policy, and its optimizer factory; see `Algorithm` for `allow_nonfinite`.
    critic, critic_optim
        Network from observations and actions to values, shape (n, 1), and its optimizer factory. For discrete
        actions, a network from observations to the value of each action, shape (n, actions).
    tau
        Weight of the source networks in updates of target networks, from 0 to 1.
    gamma, n_step_return_horizon
        Discount per step, and maximum number of rewards summed before the bootstrap value.
    max_grad_norm
        Maximum L2 norm of a critic's gradients; None for no clipping.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the algorithm does not support the policy's action space.
    """

    _action_spaces: ClassVar[Any] = spaces.Box
    _action_words: ClassVar[str] = "a Box"
    """Supported action spaces, and their description in errors."""

    def __init__(
        self,
        *,
        policy: PolicyT,
        policy_optim: OptimizerFactory,
        critic: nn.Module,
        critic_optim: OptimizerFactory,
        tau: float = 0.005,
        gamma: float = 0.99,
        n_step_return_horizon: int = 1,
        max_grad_norm: float | None = None,
        allow_nonfinite: bool = False,
    ) -> None:
        require_critic(critic)
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        if not isinstance(policy.action_space, self._action_spaces):
            raise PolicySpecError(
                f"action_space of the policy must be {self._action_words} for {type(self).__name__}, "
                f"got {policy.action_space}"
            )
        self.tau, self.gamma = fraction("tau", tau), fraction("gamma", gamma)
        self.n_step = whole("n_step_return_horizon", n_step_return_horizon, 1)
        self.critic = critic
        self.critic_old = self._add_lagged_network(critic)
        self.policy_optim = self._create_optimizer(policy, policy_optim)
        self.critic_optim = self._create_optimizer(critic, critic_optim, max_grad_norm)

    def _preprocess_batch(self, batch: Batch, buffer: Any, indices: Any) -> Batch:
        """Replace the sums of rewards in `returns` with the targets of the critics, shape (n,)."""
        with torch.no_grad():
            batch.returns = batch.returns + batch.discount * self._target_q(batch)
        return batch

    @abstractmethod
    def _target_q(self, batch: Batch) -> torch.Tensor:
        """Return the bootstrap values of `obs_next`, shape (n,)."""

    def _action_values(self, critic: nn.Module, batch: Any) -> torch.Tensor:
        if self.policy.action_type == "discrete":
            values: torch.Tensor = self._all_action_values(critic, batch.obs)
            return values.gather(-1, batch.act[:, None].long())[:, 0]
        return self._action_value(critic, batch.obs, batch.act).flatten()

    def _action_value(self, critic: nn.Module, obs: Any, act: torch.Tensor) -> torch.Tensor:
        """Return a critic's values of continuous actions, shape (n, 1), from observations normalized by the policy."""
        values: torch.Tensor = critic(self.policy.normalize(obs), act)
        return values

    def _all_action_values(self, critic: nn.Module, obs: Any) -> torch.Tensor:
        """Return a critic's values of all discrete actions, shape (n, actions)."""
        values: torch.Tensor = call_network(critic, self.policy.observations(Batch(obs=obs))[0])[0]
        return values

    def _update_critics(self, batch: Batch) -> list[float]:
        """Perform one gradient step per critic, and return the losses.

        Importance weights in the column `weight` multiply the squared errors. Afterwards, the column `weight` contains
        each row's priority: the absolute value of the row's mean error over the critics.
        """
        errors: list[Any] = []
        losses = []
        for group in self._critic_groups():
            critics, optimizers = zip(*group, strict=True)
            group_losses, group_errors = self._critic_losses(batch, critics, batch.get("weight"))
            descend([*zip(optimizers, group_losses, strict=True)])
            losses += [loss.item() for loss in group_losses]
            errors += group_errors
        batch.weight = (sum(errors) / len(errors)).abs()
        return losses

    def _critic_losses(
        self, rows: Any, critics: Sequence[nn.Module], weight: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return each critic's loss, and its errors without gradients, shape (n,)."""
        errors = [self._action_values(critic, rows) - rows.returns for critic in critics]
        losses = [(error.square() if weight is None else error.square() * weight).mean() for error in errors]
        return losses, [error.detach() for error in errors]

    def _critic_groups(self) -> list[list[tuple[nn.Module, Optimizer]]]:
        """Return critics and their optimizers in groups that share a backward pass."""
        return [[(self.critic, self.critic_optim)]]


class TwinCritics(ActionValueLearner[PolicyT], ABC):
    """Base class of actor-critic algorithms with two critics: TD3, SAC, CQL and IQL.

    The minimum of two critics reduces overestimation of the values of actions that the policy prefers (clipped double
    Q-learning, Fujimoto et al., arXiv:1802.09477, equation 10). Both critics learn from the same targets.

    Parameters
    ----------
    critic, critic_optim, max_grad_norm, **options
        See `ActionValueLearner`.
    critic2, critic2_optim
        The second critic, and its optimizer factory. By default, the second critic is a copy of the first critic, and
        `critic_optim` creates its optimizer.

    Raises
    ------
    ArgumentError, PolicySpecError
        As in `ActionValueLearner`.
    """

    def __init__(
        self,
        *,
        critic: nn.Module,
        critic_optim: OptimizerFactory,
        critic2: nn.Module | None = None,
        critic2_optim: OptimizerFactory | None = None,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(critic=critic, critic_optim=critic_optim, max_grad_norm=max_grad_norm, **options)
        self.critic2 = deepcopy(critic) if critic2 is None else critic2
        self.critic2_old = self._add_lagged_network(self.critic2)
        self.critic2_optim = self._create_optimizer(self.critic2, critic2_optim or critic_optim, max_grad_norm)
        shared = {*self.critic_optim.parameters} & {*self.critic2_optim.parameters}
        self._has_separate_critics = not shared
        """Whether the critics share no parameters, for example of a common body."""

    def _min_target_value(self, obs: Any, act: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = torch.min(
            *(self._action_value(critic, obs, act) for critic in (self.critic_old, self.critic2_old))
        )
        return values.flatten()

    def _critic_groups(self) -> list[list[tuple[nn.Module, Optimizer]]]:
        pairs = [(self.critic, self.critic_optim), (self.critic2, self.critic2_optim)]
        # One backward pass would add the gradients of both losses in shared parameters.
        return [pairs] if self._has_separate_critics else [[pair] for pair in pairs]

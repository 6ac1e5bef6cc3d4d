"""Parts of DDPG, TD3, SAC, CQL and IQL: policies that explore by noise, and critics of actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
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
    """Base of policies of continuous actions, which collectors may be told to explore with noise.

    Parameters
    ----------
    exploration_noise
        Makes noise of a shape; `"default"` for normal noise with a standard deviation of 0.1; None for none.
    action_space, action_scaling, **options
        See `Policy`; actions are a Box, and scaled by default.

    Raises
    ------
    PolicySpecError
        If the action space is no Box, or has no bounds to scale to.
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
        """Set the exploration noise: a noise, `"default"` for a standard deviation of 0.1, or None."""
        self.exploration_noise = GaussianNoise(sigma=0.1) if noise == "default" else noise

    def add_exploration_noise(self, act: Any, batch: Batch) -> Any:
        """Add noise to actions, in their dtype, if the policy has some."""
        if self.exploration_noise is None:
            return act
        noisy = np.asarray(act) + self.exploration_noise(act.shape)
        return noisy.astype(act.dtype, copy=False)

    def get_exploration_state(self) -> dict[str, Any]:
        """Return the state of the noise, if the policy has some."""
        return {} if self.exploration_noise is None else self.exploration_noise.state_dict()

    def set_exploration_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the noise from a state that `get_exploration_state` returned."""
        if self.exploration_noise is not None:
            self.exploration_noise.load_state_dict(dict(state))


class ActionValueLearner(Algorithm[PolicyT], ABC):
    r"""Base of algorithms that learn a policy beside a critic of its actions: of DDPG, and of `TwinCritics`.

    The critic learns from the targets

    .. math:: y = \sum_{i<k} \gamma^i r_i + \gamma^k (1 - d_k) Q'(s_k, a')

    with up to `n_step_return_horizon` steps, k of them, d_k for termination, a lagged critic Q' and an action a' of the
    algorithm's choice. Rewards and s_k are those of the sampled rows: a hindsight buffer exchanges the goals in both.

    Parameters
    ----------
    policy, policy_optim
        The policy, and the factory of its optimizer.
    critic, critic_optim
        A network of observations and actions to values, shape (n, 1), and the factory of its optimizer. For discrete
        actions, a network of observations to the value of each action, shape (n, actions).
    tau
        How far lagged networks move towards their sources at a time, from 0 to 1.
    gamma, n_step_return_horizon
        Discount per step, and maximum number of rewards summed before the bootstrap value.
    max_grad_norm
        Maximum L2 norm of a critic's gradients; None for no clipping.
    allow_nonfinite
        See `Algorithm`.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the algorithm does not learn actions of the policy's action space.
    """

    _action_spaces: ClassVar[Any] = spaces.Box
    _action_words: ClassVar[str] = "a Box"
    """The kinds of spaces whose actions the algorithm learns, and how its error names them."""

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
                f"{type(self).__name__} must have a policy of {self._action_words} of actions, "
                f"got one of {policy.action_space}"
            )
        self.tau, self.gamma = fraction("tau", tau), fraction("gamma", gamma)
        self.n_step = whole("n_step_return_horizon", n_step_return_horizon, 1)
        self.critic = critic
        self.critic_old = self._add_lagged_network(critic)
        self.policy_optim = self._create_optimizer(policy, policy_optim)
        self.critic_optim = self._create_optimizer(critic, critic_optim, max_grad_norm)

    def _preprocess_batch(self, batch: Batch, buffer: Any, indices: Any) -> Batch:
        """Turn the sums of rewards in `returns` into the targets of the critics, shape (n,)."""
        with torch.no_grad():
            batch.returns = batch.returns + batch.discount * self._target_q(batch)
        return batch

    @abstractmethod
    def _target_q(self, batch: Batch) -> torch.Tensor:
        """Estimate the values of the observations after the last steps of windows, shape (n,)."""

    def _values_of_actions(self, critic: nn.Module, batch: Batch) -> torch.Tensor:
        """Return a critic's values of the rows' actions, shape (n,)."""
        if self.policy.action_type == "discrete":
            values: torch.Tensor = self._values_of_choices(critic, batch.obs)
            return values.gather(-1, batch.act[:, None].long())[:, 0]
        values = critic(batch.obs, batch.act)
        return values.flatten()

    def _values_of_choices(self, critic: nn.Module, obs: Any) -> torch.Tensor:
        """Return a critic's values of all discrete actions, shape (n, actions)."""
        values: torch.Tensor = call_network(critic, self.policy.observations(Batch(obs=obs))[0])[0]
        return values

    def _update_critics(self, batch: Batch) -> list[float]:
        """Move the critics towards the targets, and leave the mean of their errors in the batch, as `weight`.

        Errors of rows that were drawn by priority count by the weights that they came with. Returns a loss per critic.
        """
        weight = batch.get("weight")
        errors, losses = [], []
        for group in self._critic_groups():
            steps = []
            for critic, optim in group:
                error = self._values_of_actions(critic, batch) - batch.returns
                steps.append((optim, (error.square() if weight is None else error.square() * weight).mean()))
                errors.append(error.detach())
            descend(steps)
            losses += [loss.item() for _, loss in steps]
        batch.weight = (sum(errors) / len(errors)).abs()
        return losses

    def _critic_groups(self) -> list[list[tuple[nn.Module, Optimizer]]]:
        """Return critics with their optimizers, in groups whose gradients one backward pass computes."""
        return [[(self.critic, self.critic_optim)]]


class TwinCritics(ActionValueLearner[PolicyT], ABC):
    """Base of actor-critics with two critics, for TD3, SAC, CQL and IQL.

    One critic alone comes to overestimate the actions that the policy prefers; the smaller of two does so less (clipped
    double Q-learning, Fujimoto et al., arXiv:1802.09477, equation 10). Both learn from the same targets.

    Parameters
    ----------
    critic, critic_optim, **options
        See `ActionValueLearner`.
    critic2, critic2_optim
        The second critic, and the factory of its optimizer; None for a copy of the first, and for the same factory.
    max_grad_norm
        Maximum L2 norm of a critic's gradients; None for no clipping.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the algorithm does not learn actions of the policy's action space.
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
        self._are_apart = not shared
        """Whether the critics share no parameters, such as those of a body."""

    def _smaller_target(self, obs: Any, act: torch.Tensor) -> torch.Tensor:
        smaller: torch.Tensor = torch.min(self.critic_old(obs, act), self.critic2_old(obs, act))
        return smaller.flatten()

    def _critic_groups(self) -> list[list[tuple[nn.Module, Optimizer]]]:
        pairs = [(self.critic, self.critic_optim), (self.critic2, self.critic2_optim)]
        # The gradients of a shared body would be those of both losses.
        return [pairs] if self._are_apart else [[pair] for pair in pairs]

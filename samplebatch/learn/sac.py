"""SAC: soft actor-critic (Haarnoja et al., arXiv:1812.05905), for continuous and discrete actions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Independent, Normal

from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import ArgumentError
from samplebatch.learn.action_values import ContinuousPolicyWithExplorationNoise, PolicyT, TwinCritics
from samplebatch.learn.algorithm import OffPolicyAlgorithm, TrainingStats
from samplebatch.learn.compiler import Compiler
from samplebatch.learn.networks import call_network, first_parameter
from samplebatch.learn.optimizer import OptimizerFactory, descend
from samplebatch.learn.policy import DiscreteActorPolicy, ProbabilisticActorPolicy

_TINY = torch.finfo(torch.float32).eps
"""Keeps the logarithm of the slope of tanh finite for actions at a bound."""
_HALF_LOG_TAU = math.log(2 * math.pi) / 2
"""Logarithm of the normalization constant of the standard normal distribution."""


class SACPolicy(ContinuousPolicyWithExplorationNoise):
    """Policy of tanh-squashed normal distributions, for SAC and CQL.

    Parameters
    ----------
    actor
        Network from observations to means and standard deviations, and the state: `((loc, scale), state)`.
    action_space, **options
        See `ContinuousPolicyWithExplorationNoise`. The policy explores by sampling even if `exploration_noise` is None.
    deterministic_eval
        Whether, outside training steps, the action is the squashed mean of the normal distribution instead of a sample.

    Raises
    ------
    PolicySpecError
        If the action space is not a Box.
    """

    def __init__(
        self,
        *,
        actor: nn.Module,
        action_space: gymnasium.Space[Any],
        deterministic_eval: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(action_space=action_space, **options)
        self.actor, self.deterministic_eval = actor, deterministic_eval

    def forward(self, batch: Batch, state: Any = None, **unused: Any) -> Batch:
        """Return actions in [-1, 1] as `act`, their log-densities as `log_prob`, shape (n, 1), and the new state.

        The log-density is the normal log-density minus the logarithm of the slope of tanh (arXiv:1801.01290, equation
        21). Additional keyword arguments are ignored, as in Tianshou.
        """
        obs, _ = self.observations(batch)
        (loc, scale), state = call_network(self.actor, obs, state)
        # Non-finite parameters are reported with the loss, whose error names the non-finite columns.
        dist = Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False)
        is_sampled = self.is_within_training_step or not self.deterministic_eval
        act, log_prob = _squash(loc, scale, torch.randn_like(loc) if is_sampled else torch.zeros_like(loc))
        return Batch(act=act, log_prob=log_prob, logits=(loc, scale), dist=dist, state=state)


def _squash(loc: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the squashed action of standard normal noise, and its log-density, shape (n, 1)."""
    act = torch.tanh(torch.addcmul(loc, scale, noise))
    # The density at loc + scale * noise as a function of noise: its gradients do not depend on the action.
    density = noise.square() / 2 + scale.log() + _HALF_LOG_TAU
    return act, -(density + torch.log(1 - act.square() + _TINY)).sum(-1, keepdim=True)


class Alpha(nn.Module, ABC):
    """Base class of temperatures of soft actor-critics; a temperature is the weight of entropy relative to rewards.

    Attributes
    ----------
    optim
        Optimizer factory of a learned temperature; None for a fixed temperature.
    """

    optim: OptimizerFactory | None = None

    @property
    @abstractmethod
    def value(self) -> float:
        """The temperature."""

    def loss(self, entropy: torch.Tensor) -> torch.Tensor:
        """Compute the loss of a learned temperature from the policy's entropies; the loss has shape ().

        Raises
        ------
        NotImplementedError
            If the temperature is fixed.
        """
        raise NotImplementedError


class FixedAlpha(Alpha):
    """Fixed temperature.

    Parameters
    ----------
    alpha
        The temperature, at least 0.

    Raises
    ------
    ArgumentError
        If `alpha` is not a number of at least 0.

    Examples
    --------
    >>> FixedAlpha(0.2).value
    0.2
    """

    def __init__(self, alpha: float) -> None:
        super().__init__()
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha >= 0:
            raise ArgumentError(f"alpha must be a number from 0, or a temperature, got {alpha!r}")
        self._value = float(alpha)

    @property
    def value(self) -> float:
        """The temperature."""
        return self._value


class AutoAlpha(Alpha):
    """Temperature that is learned from a target entropy of the policy (Haarnoja et al. 2018, arXiv:1812.05905).

    The loss is J = E[log(alpha) (entropy - target)], which is equation 18 with the factor log(alpha) instead of alpha.

    Parameters
    ----------
    target_entropy
        Target entropy of the policy; usually minus the number of action dimensions.
    log_alpha
        Logarithm of the initial temperature.
    optim
        Optimizer factory; the state of the optimizer is part of the algorithm's state.

    Examples
    --------
    >>> from samplebatch.learn import AdamOptimizerFactory
    >>> alpha = AutoAlpha(-1.0, 0.0, AdamOptimizerFactory(lr=3e-4))
    >>> alpha.value, alpha.loss(torch.tensor([1.0, 2.0])).item()
    (1.0, 0.0)
    """

    def __init__(self, target_entropy: float, log_alpha: float, optim: OptimizerFactory) -> None:
        super().__init__()
        self.target_entropy, self.optim = float(target_entropy), optim
        self.log_alpha = nn.Parameter(torch.tensor(float(log_alpha)))

    @property
    def value(self) -> float:
        """The temperature."""
        return self.log_alpha.detach().exp().item()

    def loss(self, entropy: torch.Tensor) -> torch.Tensor:
        """Compute the loss of the temperature from the policy's entropies; the loss has shape ()."""
        return (self.log_alpha * (entropy.detach() - self.target_entropy)).mean()


@dataclass(kw_only=True)
class SACTrainingStats(TrainingStats):
    """Losses of an update of SAC, and the new temperature; `alpha_loss` is None if the temperature is fixed."""

    actor_loss: float
    critic1_loss: float
    critic2_loss: float
    alpha: float
    alpha_loss: float | None = None


class SoftActorCritic(TwinCritics[PolicyT], ABC):
    """Base class of maximum-entropy actor-critic algorithms: SAC, discrete SAC and CQL.

    Parameters
    ----------
    policy, policy_optim, **options
        See `TwinCritics`.
    alpha
        Temperature: the weight of entropy relative to rewards, a number or an `AutoAlpha`.

    Raises
    ------
    ArgumentError, PolicySpecError
        As in `TwinCritics`.
    """

    def __init__(
        self, *, policy: PolicyT, policy_optim: OptimizerFactory, alpha: float | Alpha = 0.2, **options: Any
    ) -> None:
        super().__init__(policy=policy, policy_optim=policy_optim, **options)
        self.alpha = alpha if isinstance(alpha, Alpha) else FixedAlpha(alpha)
        self.alpha_optim = None if self.alpha.optim is None else self._create_optimizer(self.alpha, self.alpha.optim)

    def _update_with_batch(self, batch: Batch) -> SACTrainingStats:
        critic1_loss, critic2_loss = self._update_critics(batch)
        metrics = self._update_actor(batch)
        self._update_lagged_network_weights(self.tau)
        return SACTrainingStats(critic1_loss=critic1_loss, critic2_loss=critic2_loss, **metrics)

    def _update_actor(self, batch: Batch) -> dict[str, Any]:
        """Perform one gradient step of the policy and of a learned temperature (equation 18); return metrics."""
        loss, entropy = self._policy_loss(batch)
        steps = [(self.policy_optim, loss)]
        metrics = {"actor_loss": loss.item()}
        if self.alpha_optim is not None:
            alpha_loss = self.alpha.loss(entropy.detach())
            steps.append((self.alpha_optim, alpha_loss))
            metrics["alpha_loss"] = alpha_loss.item()
        descend(steps)
        return metrics | {"alpha": self.alpha.value}

    @abstractmethod
    def _policy_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of the policy, shape (), and its entropies, shape (n,)."""


class ContinuousSoftActorCritic(SoftActorCritic[SACPolicy]):
    """Soft actor-critic for continuous actions, base class of SAC and CQL; see `SoftActorCritic` for parameters."""

    _policy_class = SACPolicy

    def _target_q(self, batch: Batch) -> torch.Tensor:
        return self._soft_value(Batch(obs=batch.obs_next), self.alpha.value)

    def _policy_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._soft_policy_loss(batch, self.alpha.value)

    def _soft_value(self, rows: Any, alpha: float | torch.Tensor) -> torch.Tensor:
        """Return the soft value of the observations (equation 3), with one sampled action."""
        act, log_prob = self._sample(rows)
        return self._min_target_value(rows.obs, act) - alpha * log_prob

    def _soft_policy_loss(self, rows: Any, alpha: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of equation 9, with the minimum of both critics, and the entropies."""
        act, log_prob = self._sample(rows)
        values = torch.min(*(self._action_value(critic, rows.obs, act) for critic in (self.critic, self.critic2)))
        return (alpha * log_prob - values.flatten()).mean(), -log_prob

    def _sample(self, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample an action per row; return the actions and their log-densities, shape (n,)."""
        output = self.policy(rows)
        return output.act, output.log_prob.flatten()


class _Observed(NamedTuple):
    """Observations and noise of actions; `torch.compile` can trace this type but not a `Batch`."""

    obs: torch.Tensor
    noise: torch.Tensor


class _Valued(NamedTuple):
    """Rows from which critics learn."""

    obs: torch.Tensor
    act: torch.Tensor
    returns: torch.Tensor


class SAC(ContinuousSoftActorCritic, OffPolicyAlgorithm[SACPolicy]):
    """Soft actor-critic, for continuous actions.

    Parameters
    ----------
    policy, policy_optim, **options
        See `SoftActorCritic`.
    compile
        Whether networks and losses are compiled with `torch.compile`, which requires a C++ compiler. Results agree
        within rounding. Each process compiles in its first updates, which together take ten to twenty seconds.
        Observations must be tensors, and the policy must not override `SACPolicy.forward`.

    Raises
    ------
    ArgumentError, PolicySpecError
        As in `SoftActorCritic`; if `compile` is true for a policy that overrides `forward`, or without a C++ compiler.
    """

    def __init__(
        self, *, policy: SACPolicy, policy_optim: OptimizerFactory, compile: bool = False, **options: Any
    ) -> None:
        super().__init__(policy=policy, policy_optim=policy_optim, **options)
        if compile and type(policy).forward is not SACPolicy.forward:
            raise ArgumentError(
                "compile must be False for a policy that overrides SACPolicy.forward, got True for a "
                f"{type(policy).__name__}"
            )
        self._compiler = Compiler() if compile else None

    def _target_q(self, batch: Batch) -> torch.Tensor:
        if self._compiler is None:
            return super()._target_q(batch)
        value: torch.Tensor = self._compiler.call(self._soft_value, self._observed(batch.obs_next), self._alpha())
        return value

    def _policy_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if self._compiler is None:
            return super()._policy_loss(batch)
        loss, entropy = self._compiler.call(self._soft_policy_loss, self._observed(batch.obs), self._alpha())
        return loss, entropy

    def _critic_losses(
        self, rows: Any, critics: Sequence[nn.Module], weight: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._compiler is None:
            return super()._critic_losses(rows, critics, weight)
        valued = _Valued(rows.obs, rows.act, rows.returns)
        losses, errors = self._compiler.call(super()._critic_losses, valued, critics, weight)
        return losses, errors

    def _sample(self, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self._compiler is None:
            return super()._sample(rows)
        obs, _ = self.policy.observations(rows)
        (loc, scale), _ = call_network(self.policy.actor, obs)
        act, log_prob = _squash(loc, scale, rows.noise)
        return act, log_prob.flatten()

    def _observed(self, obs: Any) -> _Observed:
        space: Any = self.policy.action_space
        parameter = first_parameter(self.policy)
        options: dict[str, Any] = {} if parameter is None else {"dtype": parameter.dtype, "device": parameter.device}
        # Drawn here, because compiled functions draw other numbers than torch.
        return _Observed(obs, torch.randn(len(obs), *space.shape, **options))

    def _alpha(self) -> torch.Tensor:
        # A compiled function is compiled again for each new number, but not for each tensor.
        return torch.tensor(self.alpha.value)


class DiscreteSACPolicy(DiscreteActorPolicy):
    """Policy of categorical distributions, for discrete SAC.

    Parameters
    ----------
    actor, action_space, **options
        See `DiscreteActorPolicy`. The actor returns logits, or probabilities if its `softmax_output` is true.
    deterministic_eval
        Whether, outside training steps, the most likely action is chosen instead of a sample.

    Raises
    ------
    PolicySpecError
        If the action space is not Discrete.

    Examples
    --------
    >>> policy = DiscreteSACPolicy(actor=nn.Linear(2, 3), action_space=spaces.Discrete(3))
    >>> policy(Batch(obs=torch.zeros(4, 2))).act.shape, policy.deterministic_eval
    (torch.Size([4]), True)
    """

    def __init__(
        self, *, actor: nn.Module, action_space: gymnasium.Space[Any], deterministic_eval: bool = True, **options: Any
    ) -> None:
        super().__init__(actor=actor, action_space=action_space, deterministic_eval=deterministic_eval, **options)


class DiscreteSAC(SoftActorCritic[ProbabilisticActorPolicy], OffPolicyAlgorithm[ProbabilisticActorPolicy]):
    """Soft actor-critic, for discrete actions (Christodoulou, arXiv:1910.07207).

    Expectations over actions are computed from all action probabilities (equations 10 to 12), without sampling. Masked
    actions have probability 0.

    Parameters
    ----------
    policy, policy_optim, alpha, **options
        See `SoftActorCritic`. The policy samples Discrete actions, for example `DiscreteSACPolicy`; critics return
        the value of each action, shape (n, actions), for example `DiscreteCritic`.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    PolicySpecError
        If the policy's action space is not Discrete.
    """

    _policy_class = ProbabilisticActorPolicy
    _action_spaces = spaces.Discrete
    _action_words = "a Discrete space"

    def _expected(self, obs: Any, critics: Sequence[nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expected minimum of the critics' values, and the policy's entropies, shape (n,) each."""
        dist: Any = self.policy.distribution(Batch(obs=obs))[0]
        with torch.no_grad():
            values = torch.min(*(self._all_action_values(critic, obs) for critic in critics))
        expected: torch.Tensor = (dist.probs * values).sum(-1)
        return expected, dist.entropy()

    def _target_q(self, batch: Batch) -> torch.Tensor:
        # Equation 10.
        values, entropy = self._expected(batch.obs_next, [self.critic_old, self.critic2_old])
        return values + self.alpha.value * entropy

    def _policy_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        # Equation 12.
        values, entropy = self._expected(batch.obs, [self.critic, self.critic2])
        return -(values + self.alpha.value * entropy).mean(), entropy

"""Distributional Q-learning: C51 (Bellemare et al., arXiv:1707.06887) and QR-DQN (arXiv:1710.10044).

Rainbow (Hessel et al., arXiv:1710.02298) is `C51` with a dueling network (`DuelingCritic`) that has noisy layers
(`NoisyLinear`), with prioritized replay and n-step returns.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import torch
from torch import nn

from samplebatch.arguments import positive, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import ArgumentError
from samplebatch.learn.dqn import DiscreteQLearningPolicy, QLearningOffPolicyAlgorithm
from samplebatch.learn.optimizer import OptimizerFactory

_TINY = 1e-8
"""Keeps logarithms of probabilities finite."""


class C51Policy(DiscreteQLearningPolicy):
    """Epsilon-greedy policy over a categorical distribution of the return of each action, for `C51`.

    Parameters
    ----------
    model
        Network from observations to one logit per action and atom, shape (n, actions, num_atoms) or (n, actions *
        num_atoms). Outputs are probabilities if the network's `softmax_output` is true, as in `Net(..., softmax=True)`.
    action_space, **options
        See `DiscreteQLearningPolicy`.
    num_atoms
        Number of atoms of the distribution.
    v_min, v_max
        Lowest and highest atom of the distribution; the atoms are evenly spaced.

    Raises
    ------
    ArgumentError
        If there are fewer than two atoms, or `v_min` and `v_max` are not finite numbers in ascending order.
    PolicySpecError
        If the action space is not Discrete.

    Examples
    --------
    >>> space = gymnasium.spaces.Discrete(2)
    >>> policy = C51Policy(
    ...     model=nn.Identity(), action_space=space, num_atoms=3, v_min=-1.0, v_max=1.0
    ... )
    >>> policy(Batch(obs=[[0.0, 0.0, 9.0, 9.0, 0.0, 0.0]])).act
    array([0])
    """

    support: torch.Tensor

    def __init__(
        self,
        *,
        model: nn.Module,
        action_space: gymnasium.Space[Any],
        num_atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        **options: Any,
    ) -> None:
        super().__init__(model=model, action_space=action_space, **options)
        self.num_atoms = whole("num_atoms", num_atoms, 2)
        if not (
            isinstance(v_min, int | float) and isinstance(v_max, int | float) and -math.inf < v_min < v_max < math.inf
        ):
            raise ArgumentError(f"v_min must be a finite number below v_max, got {v_min!r} and {v_max!r}")
        self.v_min, self.v_max = float(v_min), float(v_max)
        self.register_buffer("support", torch.linspace(self.v_min, self.v_max, self.num_atoms))

    def network_output(
        self, batch: Batch, state: Any = None, model: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return the network's output, shape (n, actions, num_atoms), the mask of allowed actions, and the state."""
        output, mask, state = super().network_output(batch, state, model)
        return _by_action(output, self.action_count, self.num_atoms), mask, state

    def log_probabilities(self, output: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the atoms for a network's output, with the same shape as the output."""
        if getattr(self.model, "softmax_output", False):
            return (output + _TINY).log()
        return output.log_softmax(-1)

    def compute_q_value(self, logits: torch.Tensor, mask: Any) -> torch.Tensor:
        """Return the expected returns for a network's output, shape (n, actions)."""
        return super().compute_q_value((self.log_probabilities(logits).exp() * self.support).sum(-1), mask)


class C51(QLearningOffPolicyAlgorithm[C51Policy]):
    r"""Categorical deep Q-learning, for discrete actions (Bellemare et al., arXiv:1707.06887, algorithm 1).

    The atoms z of the bootstrap distribution, scaled by the discount and shifted by the n-step return, are projected
    onto the atoms of the support (equation 7). The loss of a row is the cross-entropy to the projected distribution m
    of the chosen next action. The priority of the row is the KL divergence (Rainbow, arXiv:1710.02298, section 4).

    .. math:: m_i = \sum_j \left[1 - \frac{|[r + \gamma^k z_j]_{v_{min}}^{v_{max}} - z_i|}{\Delta z}\right]_0^1 p_j

    Parameters
    ----------
    policy, optim, **options
        See `QLearningOffPolicyAlgorithm`.

    Raises
    ------
    ArgumentError
        If an argument is out of range.
    """

    _policy_class = C51Policy

    def __init__(self, *, policy: C51Policy, optim: OptimizerFactory, **options: Any) -> None:
        super().__init__(policy=policy, optim=optim, **options)

    def _target(self, returns: torch.Tensor, discount: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        policy, support = self.policy, self.policy.support
        atoms = (returns + discount * support).clamp(policy.v_min, policy.v_max)
        width = (policy.v_max - policy.v_min) / (policy.num_atoms - 1)
        # Axes: rows, atoms of the support, projected atoms.
        shares = (1.0 - (atoms[:, None, :] - support[:, None]).abs() / width).clamp(0.0, 1.0)
        return (shares * policy.log_probabilities(output).exp()[:, None, :]).sum(-1)

    def _losses(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cross_entropy = -(target * self.policy.log_probabilities(output)).sum(-1)
        divergence = cross_entropy + torch.xlogy(target, target).sum(-1)
        return cross_entropy, divergence.clamp(min=0.0)


class QRDQNPolicy(DiscreteQLearningPolicy):
    """Epsilon-greedy policy over quantiles of the return of each action, for `QRDQN`.

    Parameters
    ----------
    model
        Network from observations to one value per action and quantile, shape (n, actions, quantiles) or (n, actions *
        quantiles).
    action_space, **options
        See `DiscreteQLearningPolicy`.

    Raises
    ------
    PolicySpecError
        If the action space is not Discrete.
    """

    def network_output(
        self, batch: Batch, state: Any = None, model: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return the network's output, shape (n, actions, quantiles), the mask of allowed actions, and the state."""
        output, mask, state = super().network_output(batch, state, model)
        return _by_action(output, self.action_count), mask, state

    def compute_q_value(self, logits: torch.Tensor, mask: Any) -> torch.Tensor:
        """Return the means of the quantiles for a network's output, shape (n, actions)."""
        return super().compute_q_value(logits.mean(-1), mask)


class QRDQN(QLearningOffPolicyAlgorithm[QRDQNPolicy]):
    r"""Deep Q-learning by quantile regression, for discrete actions (Dabney et al., arXiv:1710.10044, algorithm 1).

    The targets y are the quantiles of the chosen next action, scaled by the discount and shifted by the n-step return.
    The loss of a row is a Huber loss L, summed over the N quantiles and averaged over the targets (equation 10). The
    priority of a row is the loss divided by N.

    .. math:: \sum_i \frac{1}{N} \sum_j |\hat\tau_i - 1_{y_j < \theta_i}|\, L(y_j - \theta_i),
        \quad \hat\tau_i = \frac{2 i - 1}{2 N}

    Parameters
    ----------
    policy, optim, **options
        See `QLearningOffPolicyAlgorithm`.
    num_quantiles
        Number of quantiles that the network must return; None for any number.
    huber_loss_delta
        Threshold between quadratic and linear loss.

    Raises
    ------
    ArgumentError
        If an argument is out of range, or, at the first update, the network's number of quantiles is not
        `num_quantiles`.
    """

    _policy_class = QRDQNPolicy

    def __init__(
        self,
        *,
        policy: QRDQNPolicy,
        optim: OptimizerFactory,
        num_quantiles: int | None = None,
        huber_loss_delta: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(policy=policy, optim=optim, **options)
        self.num_quantiles = None if num_quantiles is None else whole("num_quantiles", num_quantiles, 1)
        self.huber_loss_delta = positive("huber_loss_delta", huber_loss_delta)

    def _losses(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = output.shape[-1]
        if self.num_quantiles not in (None, count):
            raise ArgumentError(
                f"num_quantiles must be {count}, as the policy's network returns, got {self.num_quantiles}"
            )
        midpoints = (torch.arange(count, device=output.device, dtype=output.dtype) + 0.5) / count
        # Axes: rows, quantiles, targets.
        estimates, targets = (
            output[:, :, None].expand(-1, -1, target.shape[-1]),
            target[:, None, :].expand(-1, count, -1),
        )
        errors = nn.functional.huber_loss(estimates, targets, reduction="none", delta=self.huber_loss_delta)
        weights = (midpoints[:, None] - (targets < estimates).to(output.dtype)).abs()
        losses = (weights * errors).mean(-1).sum(-1)
        return losses, losses / count


def _by_action(output: torch.Tensor, actions: int, count: int | None = None) -> torch.Tensor:
    """Reshape an output to (n, actions, count); a `count` of None accepts any number."""
    shaped = output
    if output.ndim == 2 and output.shape[1] % actions == 0:
        shaped = output.view(len(output), actions, output.shape[1] // actions)
    if shaped.ndim != 3 or shaped.shape[1] != actions or count not in (None, shaped.shape[2]):
        per_action = "quantiles" if count is None else count
        raise ArgumentError(
            f"model must return shape (n, {actions}, {per_action}), one row per action, got {tuple(output.shape)}"
        )
    return shaped

"""Temperatures of soft actor-critics: the weight of a policy's entropy beside its rewards, fixed or learned."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from samplebatch.errors import ArgumentError
from samplebatch.learn.optimizer import OptimizerFactory


class Alpha(nn.Module, ABC):
    """The temperature of a soft actor-critic: the weight of its policy's entropy beside the rewards.

    Attributes
    ----------
    optim
        The factory of the optimizer that learns it; None for a fixed one.
    """

    optim: OptimizerFactory | None = None

    @property
    @abstractmethod
    def value(self) -> float:
        """The weight."""

    def loss(self, entropy: torch.Tensor) -> torch.Tensor:
        """Return the loss of the weight where the policy has such entropies.

        Raises
        ------
        NotImplementedError
            If it is fixed.
        """
        raise NotImplementedError


class FixedAlpha(Alpha):
    """A temperature that stays as it is.

    Parameters
    ----------
    alpha
        The weight, from 0 on.

    Raises
    ------
    ArgumentError
        If it is none.

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
        """The weight."""
        return self._value


class AutoAlpha(Alpha):
    """A temperature that is learned, so that the policy has a given entropy (Haarnoja et al. 2018, arXiv:1812.05905).

    Its loss is J = E[log(alpha) (entropy - target)]: equation 18, with log(alpha) in place of alpha as a factor.

    Parameters
    ----------
    target_entropy
        The entropy that the policy is to have; minus the number of the actions' dimensions for most tasks.
    log_alpha
        The logarithm of the first weight.
    optim
        The factory of its optimizer. The algorithm makes it, and its state is part of the algorithm's.

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
        """The weight."""
        return self.log_alpha.detach().exp().item()

    def loss(self, entropy: torch.Tensor) -> torch.Tensor:
        """Return the loss of the weight where the policy has such entropies, shape ()."""
        return (self.log_alpha * (entropy.detach() - self.target_entropy)).mean()

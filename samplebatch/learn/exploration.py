"""Exploration: noises that are added to actions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from samplebatch.arguments import positive
from samplebatch.errors import ArgumentError

Floats = npt.NDArray[np.floating[Any]]


class BaseNoise(ABC):
    """A noise that policies add to actions. It is drawn from torch's default generator."""

    @abstractmethod
    def __call__(self, size: Sequence[int]) -> Floats:
        """Return noise of a given shape."""

    @abstractmethod
    def reset(self) -> None:
        """Reset to the state at the start of an episode."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state between draws."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""


class GaussianNoise(BaseNoise):
    """Independent normal noise.

    Parameters
    ----------
    mu, sigma
        Its mean and standard deviation.

    Raises
    ------
    ArgumentError
        If `sigma` is negative.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> GaussianNoise(sigma=0.1)((2, 3)).shape
    (2, 3)
    """

    def __init__(self, mu: float = 0.0, sigma: float = 1.0) -> None:
        if not sigma >= 0.0:
            raise ArgumentError(f"sigma must be a number from 0, got {sigma}")
        self.mu, self.sigma = mu, sigma

    def __call__(self, size: Sequence[int]) -> Floats:
        """Return noise of a given shape."""
        return self.mu + self.sigma * _standard_normal(size)

    def reset(self) -> None:
        """Do nothing: each draw is independent of the last."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: no draw depends on the last."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: no draw depends on the last."""


class OUNoise(BaseNoise):
    r"""Ornstein-Uhlenbeck noise, which drifts: each draw starts from the last (Lillicrap et al., arXiv:1509.02971).

    .. math:: x \leftarrow x + \theta (\mu - x)\,dt + \sigma \sqrt{dt}\, \mathcal{N}(0, 1)

    Parameters
    ----------
    mu, sigma, theta, dt
        As in the formula.
    x0
        The value before the first draw.

    Raises
    ------
    ArgumentError
        If `sigma` is negative or `dt` not above 0.

    Examples
    --------
    >>> noise = OUNoise(sigma=0.0, theta=1.0, dt=0.5, mu=4.0)
    >>> noise((2,)), noise((2,))
    (array([2., 2.]), array([3., 3.]))
    """

    def __init__(
        self,
        mu: float = 0.0,
        sigma: float = 0.3,
        theta: float = 0.15,
        dt: float = 1e-2,
        x0: float | Floats = 0.0,
    ) -> None:
        if not sigma >= 0.0:
            raise ArgumentError(f"sigma must be a number from 0, got {sigma}")
        self.mu = mu
        self.pull, self.spread = theta * positive("dt", dt), sigma * math.sqrt(dt)
        self.x0 = x0
        self._last: Floats | None = None

    def __call__(self, size: Sequence[int]) -> Floats:
        """Draw noise of a shape; another one than the last starts again."""
        last = self._last
        if last is None or last.shape != tuple(size):
            last = np.full(tuple(size), self.x0, np.float64)
        moved: Floats = last + self.pull * (self.mu - last) + self.spread * _standard_normal(size)
        self._last = moved
        return moved

    def reset(self) -> None:
        """Start again from the first value."""
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        """Return the last draw."""
        return {"last": None if self._last is None else torch.from_numpy(self._last.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the last draw of such a noise."""
        self._last = None if state["last"] is None else state["last"].numpy().copy()


def _standard_normal(size: Sequence[int]) -> Floats:
    drawn: Floats = torch.randn(tuple(size), dtype=torch.float64).numpy()
    return drawn

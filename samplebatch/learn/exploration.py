"""Exploration noise for continuous actions."""

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
    """Base class of exploration noise, drawn from torch's default generator."""

    @abstractmethod
    def __call__(self, size: Sequence[int]) -> Floats:
        """Draw noise of a given shape."""

    @abstractmethod
    def reset(self) -> None:
        """Reset the noise to its state at the start of an episode."""

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
        Mean and standard deviation.

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
        """Draw noise of a given shape."""
        return self.mu + self.sigma * _standard_normal(size)

    def reset(self) -> None:
        """Do nothing: draws are independent."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because draws are independent of each other."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: draws are independent."""


class OUNoise(BaseNoise):
    r"""Ornstein-Uhlenbeck noise: each draw depends on the previous draw (Lillicrap et al., arXiv:1509.02971).

    .. math:: x \leftarrow x + \theta (\mu - x)\,dt + \sigma \sqrt{dt}\, \mathcal{N}(0, 1)

    Parameters
    ----------
    mu, sigma, theta, dt
        Parameters of the formula.
    x0
        Value before the first draw.

    Raises
    ------
    ArgumentError
        If `sigma` is negative or `dt` is not positive.

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
        """Draw noise of a given shape; the process restarts from `x0` if the shape changes."""
        last = self._last
        if last is None or last.shape != tuple(size):
            last = np.full(tuple(size), self.x0, np.float64)
        noise: Floats = last + self.pull * (self.mu - last) + self.spread * _standard_normal(size)
        self._last = noise
        return noise

    def reset(self) -> None:
        """Restart from `x0`."""
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        """Return the previous draw."""
        return {"last": None if self._last is None else torch.from_numpy(self._last.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self._last = None if state["last"] is None else state["last"].numpy().copy()


def _standard_normal(size: Sequence[int]) -> Floats:
    noise: Floats = torch.randn(tuple(size), dtype=torch.float64).numpy()
    return noise

"""Running moments: mean and variance of all numbers so far, by which algorithms scale returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn


class RunningMoments(nn.Module):
    """Mean and variance of all numbers so far, kept by algorithms that scale returns; its buffers are in `state_dict`.

    Examples
    --------
    >>> moments = RunningMoments()
    >>> for numbers in ([1.0, 3.0], [5.0]):
    ...     moments.add(np.array(numbers))
    >>> moments.mean, round(moments.std**2, 4)
    (3.0, 2.6667)
    """

    count: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, start in (("count", 0.0), ("first", 0.0), ("second", 1.0)):
            self.register_buffer(name, torch.tensor(start, dtype=torch.float64))

    @property
    def mean(self) -> float:
        """The mean; 0 before the first number."""
        return self.first.item()

    @property
    def std(self) -> float:
        """The standard deviation, a little above 0; 1 before the first number."""
        return float(np.sqrt(self.second.item() + 1e-8))

    def add(self, numbers: npt.NDArray[Any]) -> None:
        """Take more numbers in (Chan, Golub and LeVeque, 1979: the pairwise update)."""
        count, first, second = (buffer.item() for buffer in (self.count, self.first, self.second))
        total, shift = count + numbers.size, float(numbers.mean()) - first
        squares = second * count + float(numbers.var()) * numbers.size + shift**2 * count * numbers.size / total
        self.count.fill_(total)
        self.first.fill_(first + shift * numbers.size / total)
        self.second.fill_(squares / total)

"""Lagged networks: copies of networks that follow them slowly, for the targets of an algorithm."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from samplebatch.arguments import fraction
from samplebatch.learn.modules import tensors_of


class LaggedNetwork(nn.Module):
    """A copy of a network that follows it when told to, for targets; it is never trained itself.

    It is always in evaluation mode, and its parameters need no gradients.

    Parameters
    ----------
    source
        The network that it copies.

    Attributes
    ----------
    module
        The copy.

    Examples
    --------
    >>> source = nn.Linear(1, 1)
    >>> target = LaggedNetwork(source)
    >>> with torch.no_grad():
    ...     _ = target.module.weight.fill_(0.0), source.weight.fill_(1.0)
    >>> target.follow(0.25)
    >>> target.module.weight.item()
    0.25
    >>> target.follow()
    >>> target.module.weight.item()
    1.0
    """

    module: nn.Module

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(source).requires_grad_(False)
        super().train(False)
        # In a tuple, the source is no part of this module: its parameters belong to the policy.
        self._source = (source,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the copy."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return self

    def follow(self, tau: float = 1.0) -> None:
        """Move the parameters towards those of the source: `tau * source + (1 - tau) * own`.

        Buffers, such as the running means of batch normalization, are copied.

        Parameters
        ----------
        tau
            How far: 1 for a plain copy, less for Polyak averaging.

        Raises
        ------
        ArgumentError
            If it is no number from 0 to 1.
        """
        follow([self], tau)


@torch.no_grad()
def follow(networks: Sequence[LaggedNetwork], tau: float = 1.0) -> None:
    """Move lagged networks towards their sources, all parameters in one operation; see `LaggedNetwork.follow`.

    Examples
    --------
    >>> source = nn.Linear(1, 1, bias=False)
    >>> targets = [LaggedNetwork(source), LaggedNetwork(source)]
    >>> with torch.no_grad():
    ...     _ = source.weight.fill_(3.0)
    >>> follow(targets)
    >>> [target.module.weight.item() for target in targets]
    [3.0, 3.0]
    """
    tau = fraction("tau", tau)
    own: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for network in networks:
        (source,) = network._source
        parameters, buffers = tensors_of(network.module)
        newer, given = tensors_of(source)
        own += parameters
        new += newer
        for buffer, now in zip(buffers, given, strict=True):
            buffer.copy_(now)
    if not own:
        return
    if tau == 1.0:
        torch._foreach_copy_(own, new)
    else:
        torch._foreach_lerp_(own, new, tau)

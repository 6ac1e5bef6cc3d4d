"""Heads of networks, built from spaces: actions, distributions and values of the features that a body makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from samplebatch.errors import ArgumentError
from samplebatch.learn.networks import MLP, Activation, Space, ask

_SIGMA_MIN, _SIGMA_MAX = -20.0, 2.0
"""Bounds of the logarithm of a standard deviation that depends on the observation, as SAC's first code has them."""


class DiscreteActor(nn.Module):
    """A head for discrete actions: a logit each.

    Parameters
    ----------
    body
        What makes the features.
    action_space
        A Discrete space.
    """

    def __init__(self, body: nn.Module, action_space: Space) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(_width(body), _choices(action_space))

    def forward(self, obs: Any, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the logits of the actions, and the state."""
        features, state = ask(self.body, obs, state)
        return self.head(features), state


class ContinuousActorProbabilistic(nn.Module):
    """A head for continuous actions: the mean and the standard deviation of each.

    Parameters
    ----------
    body
        What makes the features.
    action_space
        A Box of one axis.
    max_action
        The largest mean; None for means without bounds.
    conditioned_sigma
        Whether standard deviations depend on the observation, as SAC's do, or are parameters.
    """

    def __init__(
        self, body: nn.Module, action_space: Space, *, max_action: float | None = None, conditioned_sigma: bool = False
    ) -> None:
        super().__init__()
        width = _measures(action_space)
        self.body, self.max_action = body, max_action
        self.mu = nn.Linear(_width(body), width)
        self.sigma = nn.Linear(_width(body), width) if conditioned_sigma else None
        self.sigma_param = None if conditioned_sigma else nn.Parameter(torch.zeros(width))

    def forward(self, obs: Any, state: Any = None) -> tuple[tuple[torch.Tensor, torch.Tensor], Any]:
        """Return means and standard deviations, and the state."""
        features, state = ask(self.body, obs, state)
        mu = self.mu(features)
        if self.max_action is not None:
            mu = self.max_action * torch.tanh(mu)
        if self.sigma is not None:
            return (mu, self.sigma(features).clamp(_SIGMA_MIN, _SIGMA_MAX).exp()), state
        assert self.sigma_param is not None
        return (mu, self.sigma_param.exp().expand_as(mu)), state


class ContinuousActorDeterministic(nn.Module):
    """A head for continuous actions: one action, each number of it in [-max_action, max_action].

    Parameters
    ----------
    body
        What makes the features.
    action_space
        A Box of one axis.
    max_action
        The largest number.
    """

    def __init__(self, body: nn.Module, action_space: Space, *, max_action: float = 1.0) -> None:
        super().__init__()
        self.body, self.max_action = body, max_action
        self.head = nn.Linear(_width(body), _measures(action_space))

    def forward(self, obs: Any, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return actions, and the state."""
        features, state = ask(self.body, obs, state)
        return self.max_action * torch.tanh(self.head(features)), state


class DiscreteCritic(DiscreteActor):
    """A head for the values Q(s, a) of all discrete actions."""


class DuelingCritic(nn.Module):
    r"""A dueling head for the values of all discrete actions (Wang et al., arXiv:1511.06581, equation 9).

    .. math:: Q(s, a) = V(s) + A(s, a) - \frac{1}{|A|} \sum_{a'} A(s, a')

    Parameters
    ----------
    body
        What makes the features.
    action_space
        A Discrete space.
    """

    def __init__(self, body: nn.Module, action_space: Space) -> None:
        super().__init__()
        self.body = body
        self.value, self.advantage = nn.Linear(_width(body), 1), nn.Linear(_width(body), _choices(action_space))

    def forward(self, obs: Any, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the values of the actions, and the state."""
        features, state = ask(self.body, obs, state)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True), state


class ValueCritic(nn.Module):
    """A head for the value V(s) of observations.

    Parameters
    ----------
    body
        What makes the features; if it is recurrent, the actor's own, whose state is known.
    trains_body
        Whether errors of values train the body. Where the actor has the same one, they may drown its own gradients;
        without them, values are read from the features that the actor learns.
    """

    def __init__(self, body: nn.Module, *, trains_body: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.trains_body = body, nn.Linear(_width(body), 1), trains_body

    def forward(self, obs: Any, state: Any = None) -> torch.Tensor:
        """Return a value for each observation, shape (n, 1)."""
        features = ask(self.body, obs, state)[0]
        values: torch.Tensor = self.head(features if self.trains_body else features.detach())
        return values


class ContinuousCritic(nn.Module):
    """A critic for the value Q(s, a) of continuous actions.

    Parameters
    ----------
    observation_space, action_space
        The spaces; actions are a Box.
    hidden_sizes, activation
        As of `MLP`.
    """

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: Activation = nn.ReLU,
    ) -> None:
        super().__init__()
        self.body = MLP(observation_space, hidden_sizes, activation, _measures(action_space))
        self.head = nn.Linear(self.body.output_dim, 1)

    def forward(self, obs: Any, act: torch.Tensor) -> torch.Tensor:
        """Return a value for each observation and action, shape (n, 1)."""
        values: torch.Tensor = self.head(self.body(obs, extra=act)[0])
        return values


class JointCritic(nn.Module):
    """A critic of a team, for `MAPPO`: from the observations of all agents to a value for each.

    Parameters
    ----------
    observation_spaces
        The space of each agent's observations, by `agent_index`: in the order of the environment's `possible_agents`.
    hidden_sizes, activation
        As of `MLP`.

    Examples
    --------
    >>> critic = JointCritic([spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,))])
    >>> critic(torch.zeros(4, 5)).shape
    torch.Size([4, 2])
    """

    def __init__(
        self,
        observation_spaces: Sequence[Space],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = nn.Tanh,
    ) -> None:
        super().__init__()
        self._starts = [*accumulate((math.prod(space.shape or ()) for space in observation_spaces), initial=0)]
        joint = spaces.Box(-math.inf, math.inf, (self._starts[-1],))
        self.body = MLP(joint, hidden_sizes, activation)
        self.head = nn.Linear(self.body.output_dim, len(observation_spaces))

    def forward(self, joint: torch.Tensor) -> torch.Tensor:
        """Return the value of each agent, shape (steps, agents), of joint observations, shape (steps, width)."""
        values: torch.Tensor = self.head(self.body(joint)[0])
        return values

    def join(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Lay the observations of all agents at each environment step side by side; zeros for agents that are missing.

        Parameters
        ----------
        parts
            Of each policy the observations, shape (n, ...), and the environment step and agent index of each row.
            Steps are numbered from 0.
        """
        steps = 1 + max(int(step.max()) for _, step, _ in parts)
        joint = self.head.weight.new_zeros((steps, self._starts[-1]))
        for obs, step, agent in parts:
            for index in torch.unique(agent).tolist():
                rows, begin, end = agent == index, *self._starts[index : index + 2]
                joint[step[rows], begin:end] = obs[rows].reshape(-1, end - begin)
        return joint


def initialize_orthogonally(network: nn.Module, gain: float = math.sqrt(2.0), head_gain: float | None = None) -> None:
    """Give linear and convolutional layers orthogonal weights and biases of 0, as PPO is usually begun with.

    Parameters
    ----------
    network
        The network.
    gain
        The gain of its layers (Engstrom et al., arXiv:2005.12729, section 3).
    head_gain
        The gain of those of a head, which are no part of its `body`; None for `gain`.

    Examples
    --------
    >>> actor = DiscreteActor(MLP(spaces.Box(-1, 1, (3,)), [8]), spaces.Discrete(2))
    >>> initialize_orthogonally(actor, head_gain=0.01)
    >>> round(float(actor.head.weight.detach().norm(dim=1)[0]), 4)
    0.01
    """
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            outer = head_gain is not None and not name.startswith("body.")
            nn.init.orthogonal_(layer.weight, head_gain if outer and head_gain is not None else gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _width(body: nn.Module) -> int:
    width = getattr(body, "output_dim", None)
    if not isinstance(width, int):
        raise ArgumentError(f"a body must say the width of its features as output_dim, got a {type(body).__name__}")
    return width


def _choices(space: Space) -> int:
    if not isinstance(space, spaces.Discrete):
        raise ArgumentError(f"action_space must be a Discrete space for this head, got a {type(space).__name__}")
    return int(space.n)


def _measures(space: Space) -> int:
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ArgumentError(f"action_space must be a Box of one axis for this head, got {space}")
    return space.shape[0]

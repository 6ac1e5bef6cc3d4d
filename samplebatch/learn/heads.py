"""Actors and critics: heads on networks that compute features of observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Self

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from samplebatch.arguments import whole
from samplebatch.errors import ArgumentError
from samplebatch.learn.joint_actions import JOINT_SPACES, JointActions
from samplebatch.learn.networks import (
    FOR_SPACE,
    MLP,
    Activation,
    Flatten,
    LinearLayer,
    Net,
    Space,
    VectorOutput,
    as_floats,
    call_network,
    shape_size,
    type_name,
)

_SIGMA_MIN, _SIGMA_MAX = -20.0, 2.0
"""Bounds of the logarithm of a standard deviation that depends on the observation, as in the original SAC code."""


class DiscreteActor(VectorOutput):
    """Actor for discrete actions, with Tianshou's arguments.

    Parameters
    ----------
    preprocess_net
        Network from observations to features of width `output_dim`.
    action_shape
        Number of actions, or a shape whose product is the number of actions.
    hidden_sizes
        Widths of the hidden layers between the features and the output.
    softmax_output
        Whether the outputs are action probabilities instead of logits.

    Attributes
    ----------
    preprocess, last
        The feature network, and the `MLP` from features to the output.

    Raises
    ------
    ArgumentError
        If `preprocess_net` has no `output_dim`, or a number is not a positive whole number.
    """

    def __init__(
        self,
        preprocess_net: nn.Module,
        action_shape: int | Sequence[int],
        hidden_sizes: Sequence[int] = (),
        softmax_output: bool = True,
    ) -> None:
        super().__init__()
        self.output_dim, self.softmax_output = shape_size("action_shape", action_shape, 1), softmax_output
        self.preprocess = preprocess_net
        self.last = MLP(_width(preprocess_net), self.output_dim, hidden_sizes, flatten_input=False)

    @classmethod
    def for_space(cls, body: nn.Module, action_space: Space) -> Self:
        """Create an actor that returns logits; the action space is Discrete or a space that `JointActions` supports."""
        return cls(body, _logit_count(action_space), softmax_output=False)

    def get_preprocess_net(self) -> nn.Module:
        """Return the feature network."""
        return self.preprocess

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the logits or probabilities of actions, and the new state."""
        features, state = call_network(self.preprocess, obs, state)
        output = self.last(features)
        return (output.softmax(-1) if self.softmax_output else output), state


class ContinuousActorProbabilistic(VectorOutput):
    """Actor that returns the mean and standard deviation of continuous actions, with Tianshou's arguments.

    Parameters
    ----------
    preprocess_net, action_shape, hidden_sizes
        See `DiscreteActor`; `action_shape` is the shape of an action.
    max_action, unbounded
        Bound of the means' absolute values, applied by tanh; and whether the means are unbounded instead.
    conditioned_sigma
        Whether standard deviations are computed from the observation, as in SAC, instead of being parameters.

    Attributes
    ----------
    mu, sigma
        Networks that compute the mean and the logarithm of the standard deviation from features.
    sigma_param
        Logarithms of the standard deviations, shape (actions, 1), if `conditioned_sigma` is false.

    Raises
    ------
    ArgumentError
        If `preprocess_net` has no `output_dim`, or a number is not a positive whole number.
    """

    def __init__(
        self,
        preprocess_net: nn.Module,
        action_shape: int | Sequence[int],
        hidden_sizes: Sequence[int] = (),
        max_action: float = 1.0,
        unbounded: bool = False,
        conditioned_sigma: bool = False,
    ) -> None:
        super().__init__()
        if unbounded:
            max_action = 1.0
        self.preprocess, self.max_action, self.unbounded = preprocess_net, _as_bound(max_action), unbounded
        self.output_dim, width = shape_size("action_shape", action_shape, 1), _width(preprocess_net)
        self.mu = MLP(width, self.output_dim, hidden_sizes, flatten_input=False)
        self.sigma = MLP(width, self.output_dim, hidden_sizes, flatten_input=False) if conditioned_sigma else None
        self.sigma_param = None if conditioned_sigma else nn.Parameter(torch.zeros(self.output_dim, 1))

    @classmethod
    def for_space(
        cls, body: nn.Module, action_space: Space, *, max_action: float | None = None, conditioned_sigma: bool = False
    ) -> Self:
        """Create an actor for a Box with one axis; means are unbounded if `max_action` is None."""
        width, is_unbounded = _action_width(action_space), max_action is None
        bound = 1.0 if max_action is None else max_action
        return cls(body, width, max_action=bound, unbounded=is_unbounded, conditioned_sigma=conditioned_sigma)

    def get_preprocess_net(self) -> nn.Module:
        """Return the feature network."""
        return self.preprocess

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[tuple[torch.Tensor, torch.Tensor], Any]:
        """Return the pair of means and standard deviations, and the new state."""
        features, state = call_network(self.preprocess, obs, state)
        mu = self.mu(features)
        if not self.unbounded:
            mu = _bound_like(mu, self.max_action) * torch.tanh(mu)
        if self.sigma is not None:
            return (mu, self.sigma(features).clamp(_SIGMA_MIN, _SIGMA_MAX).exp()), state
        assert self.sigma_param is not None
        return (mu, self.sigma_param.flatten().exp().expand_as(mu)), state


class ContinuousActorDeterministic(VectorOutput):
    """Actor that returns a continuous action within [-max_action, max_action], with Tianshou's arguments.

    Parameters
    ----------
    preprocess_net, action_shape, hidden_sizes
        See `DiscreteActor`; `action_shape` is the shape of an action.
    max_action
        Bound of the absolute value of actions, applied by tanh.

    Raises
    ------
    ArgumentError
        If `preprocess_net` has no `output_dim`, or a number is not a positive whole number.
    """

    def __init__(
        self,
        preprocess_net: nn.Module,
        action_shape: int | Sequence[int],
        hidden_sizes: Sequence[int] = (),
        max_action: float = 1.0,
    ) -> None:
        super().__init__()
        self.preprocess, self.max_action = preprocess_net, _as_bound(max_action)
        self.output_dim = shape_size("action_shape", action_shape, 1)
        self.last = MLP(_width(preprocess_net), self.output_dim, hidden_sizes, flatten_input=False)

    @classmethod
    def for_space(cls, body: nn.Module, action_space: Space, *, max_action: float = 1.0) -> Self:
        """Create an actor from the features of a body; the action space is a Box with one axis."""
        return cls(body, _action_width(action_space), max_action=max_action)

    def get_preprocess_net(self) -> nn.Module:
        """Return the feature network."""
        return self.preprocess

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, Any]:
        """Return actions, and the state."""
        features, state = call_network(self.preprocess, obs, state)
        output = self.last(features)
        return _bound_like(output, self.max_action) * torch.tanh(output), state


class DiscreteCritic(VectorOutput):
    """Critic V(s), or Q(s, a) for each discrete action, with Tianshou's arguments.

    Parameters
    ----------
    preprocess_net, hidden_sizes
        See `DiscreteActor`.
    last_size
        Width of the output: 1 for V(s), the number of actions for Q(s, a).
    linear_layer
        See `MLP`.

    Raises
    ------
    ArgumentError
        If `preprocess_net` has no `output_dim`, or a number is not a positive whole number.
    """

    def __init__(
        self,
        preprocess_net: nn.Module,
        hidden_sizes: Sequence[int] = (),
        last_size: int = 1,
        linear_layer: LinearLayer = nn.Linear,
    ) -> None:
        super().__init__()
        self.preprocess = preprocess_net
        if isinstance(hidden_sizes, gymnasium.Space):
            raise ArgumentError(f"hidden_sizes must be widths of layers, got a {type_name(hidden_sizes)}; {FOR_SPACE}")
        size = whole("last_size", last_size, 1)
        self.last = MLP(_width(preprocess_net), size, hidden_sizes, linear_layer=linear_layer, flatten_input=False)
        self.output_dim = last_size

    @classmethod
    def for_space(
        cls, body: nn.Module, action_space: Space, *, num_atoms: int = 1, linear_layer: LinearLayer = nn.Linear
    ) -> Self:
        """Create a critic Q(s, a) of a Discrete space from the features of a body.

        `num_atoms` is the number of outputs per action, for `C51Policy` and `QRDQNPolicy`.
        """
        size = _action_count(action_space) * whole("num_atoms", num_atoms, 1)
        return cls(body, last_size=size, linear_layer=linear_layer)

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
        """Return the values, shape (n, last_size), or a pair of values and state if the network is recurrent."""
        features, state = call_network(self.preprocess, obs, state)
        values = self.last(features)
        return values if state is None else (values, state)


class ActorCritic(nn.Module):
    """Module that contains an actor and a critic, for initializing both or moving both to a device."""

    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic


class DuelingCritic(VectorOutput):
    r"""Dueling critic Q(s, a) of discrete actions (Wang et al., arXiv:1511.06581, equation 9).

    .. math:: Q(s, a) = V(s) + A(s, a) - \frac{1}{|A|} \sum_{a'} A(s, a')

    Parameters
    ----------
    preprocess_net, action_shape
        See `DiscreteActor`.
    num_atoms
        Number of outputs per action, for `C51Policy` and `QRDQNPolicy`. If `num_atoms` is greater than 1, the output
        has shape (n, actions, num_atoms), and the formula applies to each atom.
    linear_layer
        See `MLP`.

    Raises
    ------
    ArgumentError
        If `preprocess_net` has no `output_dim`, or `action_shape` or `num_atoms` is not positive.
    """

    def __init__(
        self,
        preprocess_net: nn.Module,
        action_shape: int | Sequence[int],
        num_atoms: int = 1,
        linear_layer: LinearLayer = nn.Linear,
    ) -> None:
        super().__init__()
        self.output_dim, width = shape_size("action_shape", action_shape, 1), _width(preprocess_net)
        self.preprocess, self.num_atoms = preprocess_net, whole("num_atoms", num_atoms, 1)
        self.value = linear_layer(width, self.num_atoms)
        self.advantage = linear_layer(width, self.output_dim * self.num_atoms)

    @classmethod
    def for_space(
        cls, body: nn.Module, action_space: Space, *, num_atoms: int = 1, linear_layer: LinearLayer = nn.Linear
    ) -> Self:
        """Create a critic for Discrete actions from the features of a body."""
        return cls(body, _action_count(action_space), num_atoms, linear_layer)

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the action values and the new state."""
        features, state = call_network(self.preprocess, obs, state)
        advantage = self.advantage(features).unflatten(-1, (-1, self.num_atoms))
        values = self.value(features)[..., None, :] + advantage - advantage.mean(-2, keepdim=True)
        return (values if self.num_atoms > 1 else values[..., 0]), state


class ValueCritic(nn.Module):
    """Critic V(s) that computes values from the features of a body.

    Parameters
    ----------
    body
        Network that computes the features. A recurrent body must also be the actor's body, because only the actor's
        state is collected.
    trains_body
        Whether the critic's loss trains the body. If actor and critic share the body, the critic's gradients may
        dominate the actor's gradients; False trains only the head.
    """

    def __init__(self, body: nn.Module, *, trains_body: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.trains_body = body, nn.Linear(_width(body), 1), trains_body

    def forward(self, obs: Any, state: Any = None) -> torch.Tensor:
        """Return a value for each observation, shape (n, 1)."""
        features = call_network(self.body, obs, state)[0]
        values: torch.Tensor = self.head(features if self.trains_body else features.detach())
        return values


class ContinuousCritic(VectorOutput):
    """Critic Q(s, a) of continuous actions, or V(s) without actions, with Tianshou's arguments.

    Parameters
    ----------
    preprocess_net
        Network that returns features of width `output_dim`. The network's input is the concatenation of observations
        and actions, as for a `Net` that is created with `concat=True`; for V(s), the input is the observations.
    hidden_sizes, linear_layer
        See `MLP`.
    flatten_input
        Whether observations and actions are flattened to shape (n, -1).
    apply_preprocess_net_to_obs_only
        Whether actions are concatenated with the features instead of with the observations; `output_dim` then includes
        the width of the actions.

    Raises
    ------
    ArgumentError
        If `preprocess_net` has no `output_dim`, or a number is not a positive whole number.
    """

    def __init__(
        self,
        preprocess_net: nn.Module,
        hidden_sizes: Sequence[int] = (),
        linear_layer: LinearLayer = nn.Linear,
        flatten_input: bool = True,
        apply_preprocess_net_to_obs_only: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(preprocess_net, gymnasium.Space):
            raise ArgumentError(f"preprocess_net must be a network, got a {type_name(preprocess_net)}; {FOR_SPACE}")
        self.preprocess, self.flatten_input = preprocess_net, flatten_input
        self.apply_preprocess_net_to_obs_only = apply_preprocess_net_to_obs_only
        self.last = MLP(_width(preprocess_net), 1, hidden_sizes, linear_layer=linear_layer, flatten_input=False)
        self.output_dim = 1
        self.flatten: Flatten | None = None

    @classmethod
    def for_space(
        cls,
        observation_space: Space,
        action_space: Space,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: Activation = nn.ReLU,
    ) -> Self:
        """Create a critic Q(s, a) for observations of any space and actions of a Box with one axis; see `MLP`."""
        flatten, actions = Flatten(observation_space), _action_width(action_space)
        critic = cls(Net(flatten.output_dim, actions, hidden_sizes, activation=activation, concat=True))
        critic.flatten = flatten
        return critic

    def forward(self, obs: Any, act: Any = None, info: Any = None) -> torch.Tensor:
        """Return a value for each observation and action, shape (n, 1)."""
        rows = as_floats(obs, self) if self.flatten is None else self.flatten(obs)
        if self.flatten is None and self.flatten_input:
            rows = rows.flatten(1)
        if self.apply_preprocess_net_to_obs_only:
            rows = call_network(self.preprocess, rows)[0]
        if act is not None:
            actions = as_floats(act, self)
            rows = torch.cat([rows, actions.flatten(1) if self.flatten_input else actions], -1)
        if not self.apply_preprocess_net_to_obs_only:
            rows = call_network(self.preprocess, rows)[0]
        values: torch.Tensor = self.last(rows)
        return values


class JointCritic(nn.Module):
    """Centralized critic for `MAPPO`: maps the observations of all agents to one value per agent.

    Parameters
    ----------
    observation_spaces
        Observation space of each agent. The spaces are in the order of the environment's `possible_agents`, to which
        `agent_index` refers.
    hidden_sizes, activation
        See `MLP`.

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
        self.body = Net.for_space(joint, hidden_sizes, activation)
        self.head = nn.Linear(self.body.output_dim, len(observation_spaces))

    def forward(self, joint: torch.Tensor) -> torch.Tensor:
        """Return the value of each agent, shape (steps, agents), for joint observations of shape (steps, width)."""
        values: torch.Tensor = self.head(self.body(joint)[0])
        return values

    def join(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Concatenate all agents' observations at each environment step; observations of missing agents are zeros.

        Parameters
        ----------
        parts
            Per policy: observations, shape (n, ...), and the environment step (from 0) and agent index of each row.
        """
        steps = 1 + max(int(step.max()) for _, step, _ in parts)
        joint = self.head.weight.new_zeros((steps, self._starts[-1]))
        for obs, step, agent in parts:
            for index in torch.unique(agent).tolist():
                rows, start, end = agent == index, *self._starts[index : index + 2]
                joint[step[rows], start:end] = obs[rows].reshape(-1, end - start)
        return joint


def _as_bound(max_action: Any) -> Any:
    return torch.as_tensor(max_action) if isinstance(max_action, np.ndarray | Sequence) else max_action


def _bound_like(actions: torch.Tensor, bound: Any) -> Any:
    return bound.to(actions) if isinstance(bound, torch.Tensor) else bound


def _width(body: nn.Module) -> int:
    width = getattr(body, "output_dim", None)
    if not isinstance(width, int):
        raise ArgumentError(
            f"preprocess_net must have the width of its features as output_dim, got a {type_name(body)} without one"
        )
    return width


def _logit_count(space: Space) -> int:
    return JointActions(space).output_dim if isinstance(space, JOINT_SPACES) else _action_count(space)


def _action_count(space: Space) -> int:
    if not isinstance(space, spaces.Discrete):
        raise ArgumentError(f"action_space must be a Discrete space for this head, got a {type(space).__name__}")
    return int(space.n)


def _action_width(space: Space) -> int:
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ArgumentError(f"action_space must be a Box of one axis for this head, got {space}")
    return space.shape[0]

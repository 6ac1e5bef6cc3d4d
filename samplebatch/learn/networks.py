"""Bodies of networks, built from spaces: they make features of observations, for the heads of policies and critics.

A network takes observations and, if it is recurrent, the state that it returned last, and returns a pair of output and
state. Any other module can take its place: `ask` calls those that return just an output, too.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Self, cast

import gymnasium
import torch
from gymnasium import spaces
from torch import nn

from samplebatch.arguments import choice, fraction, whole
from samplebatch.batch.nested.node import values_of
from samplebatch.errors import ArgumentError


def set_training(module: nn.Module, mode: bool) -> None:
    """Set torch's training mode as `nn.Module.train` does: parts with a `train` of their own are told by that.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    >>> set_training(network, False)
    >>> [part.training for part in network.modules()]
    [False, False, False]
    """
    module.training = mode
    rest = [module]
    while rest:
        for part in rest.pop()._modules.values():
            if part is None:
                continue
            kind, held = type(part), part.__dict__
            if kind.train is nn.Module.train and kind.__setattr__ is nn.Module.__setattr__ and "training" in held:
                held["training"] = mode
                rest.append(part)
            else:
                part.train(mode)


def first_parameter(module: nn.Module) -> torch.Tensor | None:
    """Return the first parameter of a module, of which policies and algorithms take the device and dtype; None if none.

    Examples
    --------
    >>> first_parameter(nn.Sequential(nn.ReLU(), nn.Linear(3, 2))).shape
    torch.Size([2, 3])
    """
    for held in module._parameters.values():
        if held is not None:
            return held
    for part in module._modules.values():
        found = None if part is None else first_parameter(part)
        if found is not None:
            return found
    return None


def tensors_of(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters and the buffers of a module, each once; in the same order for a copy of it.

    Examples
    --------
    >>> parameters, buffers = tensors_of(nn.BatchNorm1d(2))
    >>> len(parameters), len(buffers)
    (2, 3)
    """
    parameters: dict[int, torch.Tensor] = {}
    buffers: dict[int, torch.Tensor] = {}
    rest = [module]
    for part in rest:
        for found, held in ((parameters, part._parameters), (buffers, part._buffers)):
            for tensor in held.values():
                if tensor is not None:
                    found[id(tensor)] = tensor
        rest += [inner for inner in part._modules.values() if inner is not None]
    return [*parameters.values()], [*buffers.values()]


Activation = Callable[[], nn.Module]
Space = gymnasium.Space[Any]


def ask(network: nn.Module, obs: Any, state: Any = None) -> tuple[Any, Any]:
    """Ask a network, recurrent or not, and return its output and its state; None for the state of one that has none.

    A state is given to networks that have a parameter of that name, or take any number of arguments.

    >>> ask(nn.Identity(), 3, state="another's")
    (3, None)
    """
    kind: Any = type(network)
    found = network(obs) if state is None or not _takes_state(kind) else network(obs, state)
    return found if isinstance(found, tuple) and len(found) == 2 else (found, None)


@cache
def _takes_state(kind: type[nn.Module]) -> bool:
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(one.name == "state" or one.kind is one.VAR_POSITIONAL for one in parameters)


def recurrent_parts(network: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers of a network.

    >>> recurrent_parts(nn.Sequential(nn.Linear(2, 3), nn.GRU(3, 3)))
    [GRU(3, 3)]
    """
    return [part for part in network.modules() if isinstance(part, nn.RNNBase)]


class Flatten(nn.Module):
    """A layer that makes a row of numbers of each observation: parts of dicts and tuples side by side, choices one-hot.

    Parameters
    ----------
    space
        The space of the observations.

    Attributes
    ----------
    output_dim
        Numbers in a row.

    Examples
    --------
    >>> flatten = Flatten(spaces.Dict(x=spaces.Box(0, 1, (2,)), n=spaces.Discrete(3)))
    >>> flatten({"x": torch.tensor([[0.5, 0.6]]), "n": torch.tensor([1])})
    tensor([[0.5000, 0.6000, 0.0000, 1.0000, 0.0000]])
    """

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space
        self.output_dim = int(spaces.flatdim(space))
        self._is_flat = _is_row(space)
        self._rows: tuple[str, ...] = ()
        """The parts of dicts that are rows all."""
        if isinstance(space, spaces.Dict) and all(map(_is_row, space.spaces.values())):
            self._rows = tuple(space.spaces)

    def forward(self, obs: Any) -> torch.Tensor:
        """Flatten observations behind the axes of rows and steps."""
        if self._is_flat and obs.is_floating_point():
            return cast(torch.Tensor, obs)
        if self._rows:
            held = values_of(obs) or obs
            parts = [held[name] for name in self._rows]
            if all(part.is_floating_point() for part in parts):
                return torch.cat(parts, -1)
        return _flatten(self.space, obs)


class MLP(nn.Module):
    """A body of linear layers with activations between and after them.

    Parameters
    ----------
    observation_space
        The space of the observations, which are flattened.
    hidden_sizes
        The widths of the layers.
    activation
        Makes an activation.
    extra_dim
        Further inputs a row, such as an action.

    Attributes
    ----------
    output_dim
        The width of the features.

    Raises
    ------
    ArgumentError
        If a width is no whole number from 1 on.

    Examples
    --------
    >>> body = MLP(spaces.Box(-1, 1, (3,)), [8, 8])
    >>> body(torch.zeros(5, 3))[0].shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        observation_space: Space,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = nn.ReLU,
        extra_dim: int = 0,
    ) -> None:
        super().__init__()
        self.flatten = Flatten(observation_space)
        widths = [self.flatten.output_dim + extra_dim, *(whole("hidden_sizes", size, 1) for size in hidden_sizes)]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), activation()]
        self.layers = nn.Sequential(*layers)
        self.output_dim = widths[-1]

    def forward(self, obs: Any, state: Any = None, extra: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Return the features of observations, and no state."""
        rows = self.flatten(obs)
        if extra is not None:
            rows = torch.cat([rows, extra], -1)
        # One call of a module less than by the sequence itself, whose layers take no longer than a call.
        for layer in self.layers:
            rows = layer(rows)
        return rows, None


class Convolutional(nn.Module):
    """A body of convolutions for images, in the sizes of the Nature DQN (Mnih et al., 2015).

    Parameters
    ----------
    observation_space
        A Box of images, the channels first or last: the shortest of the first and the last axis is theirs. Images of
        bytes are divided by 255.
    features
        The width of the features.

    Attributes
    ----------
    output_dim
        The width of the features.

    Raises
    ------
    ArgumentError
        If it is no Box of three axes, or images are too small for the convolutions.

    Examples
    --------
    >>> body = Convolutional(spaces.Box(0, 255, (84, 84, 4), "uint8"))
    >>> body(torch.zeros(2, 84, 84, 4, dtype=torch.uint8))[0].shape
    torch.Size([2, 512])
    """

    def __init__(self, observation_space: Space, features: int = 512) -> None:
        super().__init__()
        shape = observation_space.shape or ()
        if not isinstance(observation_space, spaces.Box) or len(shape) != 3:
            raise ArgumentError(f"observation_space must be a Box of images with three axes, got shape {shape}")
        self._channels_last = shape[2] < shape[0]
        height, width = shape[:2] if self._channels_last else shape[1:]
        if min(height, width) < 36:
            raise ArgumentError(f"images must be at least 36 by 36, got {height} by {width}")
        self._scale = 1.0 / 255.0 if observation_space.dtype == "uint8" else 1.0
        self.layers = nn.Sequential(
            nn.Conv2d(min(shape[0], shape[2]), 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = self.layers(torch.zeros(1, min(shape[0], shape[2]), height, width)).shape[1]
        self.layers.extend([nn.Linear(flat, features), nn.ReLU()])
        self.output_dim = features

    def forward(self, obs: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the features of images, and no state."""
        images = obs.reshape(-1, *obs.shape[-3:])
        if self._channels_last:
            images = images.movedim(-1, -3)
        found = self.layers(images.to(next(self.parameters()).dtype) * self._scale)
        return found.reshape(*obs.shape[:-3], -1), None


class Recurrent(nn.Module):
    """A recurrent body: it takes one step a row, or a sequence of steps, and a state to go on from.

    Parameters
    ----------
    observation_space
        The space of the observations, which are flattened.
    hidden_size
        The width of the state and of the features.
    kind
        `"gru"` or `"lstm"`.

    Attributes
    ----------
    output_dim
        The width of the features.

    Raises
    ------
    ArgumentError
        If the kind is another.

    Examples
    --------
    >>> body = Recurrent(spaces.Box(-1, 1, (3,)), 8)
    >>> features, state = body(torch.zeros(5, 3))
    >>> features.shape, state["h"].shape
    (torch.Size([5, 8]), torch.Size([5, 8]))
    >>> body(torch.zeros(5, 10, 3), state)[0].shape
    torch.Size([5, 10, 8])
    """

    def __init__(self, observation_space: Space, hidden_size: int = 64, kind: str = "gru") -> None:
        super().__init__()
        self.flatten = Flatten(observation_space)
        self.output_dim = hidden_size
        cell = {"gru": nn.GRU, "lstm": nn.LSTM}[choice("kind", kind, ("gru", "lstm"))]
        self.cell = cell(self.flatten.output_dim, hidden_size, batch_first=True)

    def forward(self, obs: Any, state: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the features of each step and the state after the last one, a row each in a dict of tensors.

        Parameters
        ----------
        obs
            Observations, n of them, or n sequences: an axis more.
        state
            The state to go on from, a row for each of the n; None for zeros.
        """
        rows = self.flatten(obs)
        steps = rows[:, None] if rows.ndim == 2 else rows
        lstm = isinstance(self.cell, nn.LSTM)
        held = None if state is None else values_of(state) or state
        given = None if held is None else tuple(held[name][None].contiguous() for name in ("h", "c")[: 1 + lstm])
        features, after = self.cell(steps, given if given is None or lstm else given[0])
        parts = after if lstm else (after,)
        kept = {name: part[0] for name, part in zip(("h", "c"), parts, strict=False)}
        return features[:, 0] if rows.ndim == 2 else features, kept


def _is_row(space: Space) -> bool:
    return isinstance(space, spaces.Box) and len(space.shape) == 1


def _flatten(space: Space, obs: Any) -> torch.Tensor:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        held = values_of(obs)
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return torch.cat([_flatten(part, obs[name] if held is None else held[str(name)]) for name, part in parts], -1)
    if isinstance(space, spaces.Discrete):
        rows: torch.Tensor = nn.functional.one_hot(obs.long() - int(space.start), int(space.n))
    elif isinstance(space, spaces.MultiDiscrete):
        choices = zip(obs.long().unbind(-1), space.nvec.tolist(), strict=True)
        rows = torch.cat([nn.functional.one_hot(one, count) for one, count in choices], -1)
    else:
        axes = len(space.shape or ())
        rows = obs.flatten(-axes) if axes > 1 else obs if axes else obs[..., None]
    return rows if rows.is_floating_point() else rows.to(torch.get_default_dtype())


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

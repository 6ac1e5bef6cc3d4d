"""Bodies of networks, built from spaces: they make features of observations, for the heads of policies and critics.

A network takes observations and, if it is recurrent, the state that it returned last, and returns a pair of output and
state. Any other module can take its place: `ask` calls those that return just an output, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, cast

import gymnasium
import torch
from gymnasium import spaces
from torch import nn

from samplebatch.arguments import choice, whole
from samplebatch.batch.nested.node import values_of
from samplebatch.errors import ArgumentError

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

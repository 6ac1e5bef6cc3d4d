"""Networks from observations to features, logits or values, for the heads of policies and critics.

A network takes observations and, if it is recurrent, its last state, and returns a pair of output and state. `ask` also
calls modules that return an output alone.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Self, TypeAlias, TypeVar, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from samplebatch.arguments import choice, fraction, positive, whole
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
    """Return the first parameter of a module, which determines device and dtype; None without parameters.

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


Activation = Callable[..., nn.Module]
LinearLayer = Callable[[int, int], nn.Module]
Arguments = tuple[Any, ...] | dict[Any, Any]
Item = TypeVar("Item")
PerLayer: TypeAlias = Item | Sequence[Item]
Space = gymnasium.Space[Any]
FOR_SPACE = "the class method for_space takes a space"


def ask(network: nn.Module, obs: Any, state: Any = None) -> tuple[Any, Any]:
    """Call a network and return its output and its state, None without one.

    Networks get the state if they have a parameter of that name or `*args`.

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


class VectorOutput(nn.Module):
    """Base of networks that return one vector per observation; `output_dim` is the width of the vector."""

    output_dim: int

    def get_output_dim(self) -> int:
        """Return the width of the output."""
        return self.output_dim


class NoisyLinear(nn.Module):
    r"""Linear layer with learned noise on its weights, for exploration (Fortunato et al., arXiv:1706.10295).

    The noise is factorized (equations 10 and 11) and drawn anew in every call: all rows of a call have the same noise.

    .. math:: y = (\mu_W + \sigma_W \circ f(\epsilon_q) f(\epsilon_p)^T) x + \mu_b + \sigma_b \circ f(\epsilon_q),
        \quad f(x) = \mathrm{sgn}(x) \sqrt{|x|}

    A policy has noise within training steps and none outside of them; target networks have none.

    Parameters
    ----------
    in_features, out_features
        Widths of the input and the output.
    noisy_std
        Initial standard deviation of the noise, times the square root of `in_features`.

    Attributes
    ----------
    is_noisy
        Whether calls draw noise; policies set it with `is_within_training_step`.

    Raises
    ------
    ArgumentError
        If a width is not a positive whole number, or `noisy_std` not a positive number.

    Examples
    --------
    >>> layer = NoisyLinear(3, 2)
    >>> obs = torch.ones(1, 3)
    >>> torch.equal(layer(obs), layer(obs))
    True
    >>> layer.is_noisy = True
    >>> torch.equal(layer(obs), layer(obs))
    False
    """

    def __init__(self, in_features: int, out_features: int, noisy_std: float = 0.5) -> None:
        super().__init__()
        self.in_features, self.out_features = (
            whole("in_features", in_features, 1),
            whole("out_features", out_features, 1),
        )
        self.is_noisy = False
        # Section 3.2 of the paper: uniform means, and constant deviations.
        bound = 1.0 / math.sqrt(in_features)
        deviation = positive("noisy_std", noisy_std) * bound
        self.mu_W = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.mu_bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))
        self.sigma_W = nn.Parameter(torch.full((out_features, in_features), deviation))
        self.sigma_bias = nn.Parameter(torch.full((out_features,), deviation))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the output for rows of shape (..., in_features)."""
        output = nn.functional.linear(rows, self.mu_W, self.mu_bias)
        if not self.is_noisy:
            return output
        # Noise on inputs and outputs instead of on weights, whose factors they are.
        noise_in, noise_out = (_signed_root(torch.randn_like(own)) for own in (self.sigma_W[0], self.sigma_bias))
        return output + nn.functional.linear(rows * noise_in, self.sigma_W, self.sigma_bias) * noise_out


def _signed_root(noise: torch.Tensor) -> torch.Tensor:
    return noise.sign() * noise.abs().sqrt()


def set_noise(module: nn.Module, is_noisy: bool) -> None:
    """Set whether the noisy layers within a module draw noise."""
    for part in module._modules.values():
        if isinstance(part, NoisyLinear):
            part.is_noisy = is_noisy
        elif part is not None and part._modules:
            set_noise(part, is_noisy)


class MLP(VectorOutput):
    """Linear layers with activations between them; takes Tianshou's arguments.

    Parameters
    ----------
    input_dim
        Width of the input.
    output_dim
        Width of a last linear layer without activation; 0 for no such layer.
    hidden_sizes
        Widths of the hidden layers, each followed by an activation.
    norm_layer, norm_args
        Class of a normalization layer before each activation, and its further arguments; one, or one per hidden layer.
    activation, act_args
        Class of the activation and its arguments; one, or one per hidden layer. None for no activations.
    linear_layer
        Creates a layer from its input and output width.
    flatten_input
        Whether inputs with more than two axes are flattened to shape (n, -1).

    Attributes
    ----------
    output_dim
        Width of the output.
    model
        The layers.

    Raises
    ------
    ArgumentError
        If a width is not a positive whole number, or there is not one `norm_layer`, `activation` or set of their
        arguments per hidden layer.

    Examples
    --------
    >>> MLP(input_dim=3, output_dim=2, hidden_sizes=[8])(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int = 0,
        hidden_sizes: Sequence[int] = (),
        norm_layer: PerLayer[type[nn.Module]] | None = None,
        norm_args: PerLayer[Arguments] | None = None,
        activation: PerLayer[Activation] | None = nn.ReLU,
        act_args: PerLayer[Arguments] | None = None,
        linear_layer: LinearLayer = nn.Linear,
        flatten_input: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(input_dim, gymnasium.Space):
            raise ArgumentError(f"input_dim must be a whole number from 1, got a {type_name(input_dim)}; {FOR_SPACE}")
        if isinstance(output_dim, Sequence):
            raise ArgumentError(
                f"output_dim must be a whole number from 0, got {output_dim}; pass hidden_sizes= by name"
            )
        self.input_dim, self.flatten_input = whole("input_dim", input_dim, 1), flatten_input
        widths = [self.input_dim, *(whole("hidden_sizes", size, 1) for size in hidden_sizes)]
        hidden = len(widths) - 1
        norms, norms_args = _per_layer("norm_layer", norm_layer, hidden), _per_layer("norm_args", norm_args, hidden)
        acts, acts_args = _per_layer("activation", activation, hidden), _per_layer("act_args", act_args, hidden)
        layers: list[nn.Module] = []
        for layer, (before, after) in enumerate(pairwise(widths)):
            layers.append(linear_layer(before, after))
            if norms[layer] is not None:
                layers.append(_build(norms[layer], norms_args[layer], after))
            if acts[layer] is not None:
                layers.append(_build(acts[layer], acts_args[layer]))
        if whole("output_dim", output_dim):
            layers.append(linear_layer(widths[-1], output_dim))
        self.output_dim = output_dim or widths[-1]
        self.model = nn.Sequential(*layers)

    def forward(self, obs: Any) -> torch.Tensor:
        """Return the output for inputs of shape (n, input_dim), or with more axes."""
        rows = as_rows(obs, self.input_dim, self) if self.flatten_input else obs
        # Iterating over the layers saves one module call compared with calling the sequence.
        for layer in self.model:
            rows = layer(rows)
        return cast(torch.Tensor, rows)


class Net(VectorOutput):
    """Network from flat observations to features, logits or action values; takes Tianshou's arguments.

    `Net.for_space` creates one for any observation space.

    Parameters
    ----------
    state_shape
        Shape of an observation, or its width.
    action_shape
        Shape of the output, or its width; 0 for the features of the last hidden layer.
    hidden_sizes, norm_layer, norm_args, activation, act_args, linear_layer
        See `MLP`.
    softmax
        Whether the output is a probability per action.
    concat
        Whether inputs are observations followed by actions of `action_shape`, as `ContinuousCritic` passes them; the
        output is then the features.
    num_atoms
        Outputs per action, for distributional algorithms. With more than 1 the shape is (n, actions, num_atoms).
    dueling_param
        Arguments of two `MLP`: the advantage head and the value head of a dueling network (Wang et al.,
        arXiv:1511.06581, equation 9). None for no dueling network.

    Attributes
    ----------
    output_dim
        Width of the output.
    model
        The shared layers, an `MLP`.
    Q, V
        The heads of a dueling network, None otherwise.

    Raises
    ------
    ArgumentError
        As `MLP` does.

    Examples
    --------
    >>> Net(state_shape=(3,), action_shape=2, hidden_sizes=[8])(torch.zeros(5, 3))[0].shape
    torch.Size([5, 2])
    >>> Net.for_space(spaces.Dict(x=spaces.Box(0, 1, (2,)), n=spaces.Discrete(3)), [8]).model.input_dim
    5
    """

    def __init__(
        self,
        state_shape: int | Sequence[int],
        action_shape: int | Sequence[int] = 0,
        hidden_sizes: Sequence[int] = (),
        norm_layer: PerLayer[type[nn.Module]] | None = None,
        norm_args: PerLayer[Arguments] | None = None,
        activation: PerLayer[Activation] | None = nn.ReLU,
        act_args: PerLayer[Arguments] | None = None,
        softmax: bool = False,
        concat: bool = False,
        num_atoms: int = 1,
        dueling_param: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
        linear_layer: LinearLayer = nn.Linear,
    ) -> None:
        super().__init__()
        inputs, actions = shape_size("state_shape", state_shape), shape_size("action_shape", action_shape)
        self.softmax, self.num_atoms = softmax, whole("num_atoms", num_atoms, 1)
        outputs = 0 if concat else actions * self.num_atoms
        options: dict[str, Any] = {
            "norm_layer": norm_layer,
            "norm_args": norm_args,
            "activation": activation,
            "act_args": act_args,
            "linear_layer": linear_layer,
        }
        self.model = MLP(
            inputs + actions * concat, 0 if dueling_param else outputs, hidden_sizes, flatten_input=False, **options
        )
        self.flatten: Flatten | None = None
        self.output_dim = self.model.output_dim
        self.Q = self.V = None
        if dueling_param is not None:
            for_advantages, for_values = dueling_param
            self.Q = MLP(**{"input_dim": self.output_dim, "output_dim": outputs} | options | dict(for_advantages))
            self.V = MLP(**{"input_dim": self.output_dim, "output_dim": num_atoms} | options | dict(for_values))
            self.output_dim = self.Q.output_dim

    @classmethod
    def for_space(
        cls,
        observation_space: Space,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: Activation = nn.ReLU,
        *,
        linear_layer: LinearLayer = nn.Linear,
    ) -> Self:
        """Create a network from the observations of any space to features.

        Parameters
        ----------
        observation_space
            Space of the observations, which are flattened: parts of dicts and tuples side by side, choices one-hot.
        hidden_sizes, activation, linear_layer
            See `MLP`.
        """
        flatten = Flatten(observation_space)
        network = cls(flatten.output_dim, hidden_sizes=hidden_sizes, activation=activation, linear_layer=linear_layer)
        network.flatten = flatten
        return network

    @property
    def softmax_output(self) -> bool:
        """Whether the output is a probability per action."""
        return self.softmax

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the output for observations, and the state as it was given."""
        rows = as_rows(obs, self.model.input_dim, self) if self.flatten is None else self.flatten(obs)
        output = self.model(rows)
        if self.Q is not None and self.V is not None:
            advantage, value = (head(output).unflatten(-1, (-1, self.num_atoms)) for head in (self.Q, self.V))
            output = (value + advantage - advantage.mean(-2, keepdim=True)).flatten(-2)
        if self.num_atoms > 1:
            output = output.unflatten(-1, (-1, self.num_atoms))
        return (output.softmax(-1) if self.softmax else output), state


class Convolutional(VectorOutput):
    """A body of convolutions for images, in the sizes of the Nature DQN (Mnih et al., 2015).

    Parameters
    ----------
    observation_space
        A Box of images, the channels first or last: the shortest of the first and the last axis is theirs. Images of
        bytes are divided by 255.
    features
        The width of the features.
    linear_layer
        Creates the last layer from its input and output width.

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

    def __init__(self, observation_space: Space, features: int = 512, linear_layer: LinearLayer = nn.Linear) -> None:
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
        self.layers.extend([linear_layer(flat, features), nn.ReLU()])
        self.output_dim = features

    def forward(self, obs: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the features of images, and no state."""
        images = obs.reshape(-1, *obs.shape[-3:])
        if self._channels_last:
            images = images.movedim(-1, -3)
        found = self.layers(images.to(next(self.parameters()).dtype) * self._scale)
        return found.reshape(*obs.shape[:-3], -1), None


class RecurrentBody(VectorOutput):
    """Recurrent features of each step, for one step per row or sequences of steps, from a given state.

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
    >>> body = RecurrentBody(spaces.Box(-1, 1, (3,)), 8)
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


class Recurrent(VectorOutput):
    """LSTM from observations to logits or action values of the last step; takes Tianshou's arguments.

    `RecurrentBody` returns features of every step of a sequence, as recurrent PPO needs them.

    Parameters
    ----------
    layer_num
        LSTM layers.
    state_shape, action_shape
        Shape or width of an observation, and of the output.
    hidden_layer_size
        Width of the LSTM.

    Attributes
    ----------
    output_dim
        Width of the output.

    Raises
    ------
    ArgumentError
        If a number is not a positive whole number.

    Examples
    --------
    >>> network = Recurrent(layer_num=2, state_shape=3, action_shape=4, hidden_layer_size=8)
    >>> values, state = network(torch.zeros(5, 10, 3))
    >>> values.shape, state["hidden"].shape
    (torch.Size([5, 4]), torch.Size([5, 2, 8]))
    """

    def __init__(
        self,
        layer_num: int,
        state_shape: int | Sequence[int],
        action_shape: int | Sequence[int],
        hidden_layer_size: int = 128,
    ) -> None:
        super().__init__()
        if isinstance(layer_num, gymnasium.Space):
            raise ArgumentError(
                f"layer_num must be a whole number from 1, got a {type_name(layer_num)}; RecurrentBody takes a space"
            )
        width = whole("hidden_layer_size", hidden_layer_size, 1)
        self.input_dim, self.output_dim = (
            shape_size("state_shape", state_shape, 1),
            shape_size("action_shape", action_shape, 1),
        )
        self.nn = nn.LSTM(width, width, whole("layer_num", layer_num, 1), batch_first=True)
        self.fc1, self.fc2 = nn.Linear(self.input_dim, width), nn.Linear(width, self.output_dim)

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the output of the last step, and the state after it.

        Parameters
        ----------
        obs
            Observations of shape (n, width), or sequences of shape (n, steps, width).
        state
            State before the first step: `hidden` and `cell`, each of shape (n, layers, width); None for zeros.
        info
            Ignored.
        """
        rows = as_floats(obs, self)
        steps = rows[:, None] if rows.ndim == 2 else rows
        if steps.ndim != 3:
            steps = steps.flatten(2)
        parts = None if state is None else values_of(state) or state
        before = None
        if parts is not None:
            before = tuple(as_floats(parts[name], self).transpose(0, 1).contiguous() for name in ("hidden", "cell"))
        features, after = self.nn(self.fc1(steps), before)
        hidden, cell = (part.transpose(0, 1).detach() for part in after)
        return self.fc2(features[:, -1]), {"hidden": hidden, "cell": cell}


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
    """Target network: a copy that follows its source and is never trained.

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
        """Call the copy."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return self

    def follow(self, tau: float = 1.0) -> None:
        """Move the parameters towards the source's: `tau * source + (1 - tau) * own`.

        Buffers, such as the running means of batch normalization, are copied.

        Parameters
        ----------
        tau
            How far: 1 for a plain copy, less for Polyak averaging.

        Raises
        ------
        ArgumentError
            If it is not between 0 and 1.
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
    >>> from samplebatch.learn.heads import DiscreteActor
    >>> actor = DiscreteActor.for_space(Net.for_space(spaces.Box(-1, 1, (3,)), [8]), spaces.Discrete(2))
    >>> initialize_orthogonally(actor, head_gain=0.01)
    >>> round(float(actor.last.model[0].weight.detach().norm(dim=1)[0]), 4)
    0.01
    """
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            outer = head_gain is not None and not name.startswith(("preprocess.", "body."))
            nn.init.orthogonal_(layer.weight, head_gain if outer and head_gain is not None else gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def as_floats(values: Any, module: nn.Module) -> torch.Tensor:
    """Return values as a floating-point tensor; arrays are moved to the device of a module's parameters."""
    if not isinstance(values, torch.Tensor):
        parameter = first_parameter(module)
        values = torch.as_tensor(values, device=None if parameter is None else parameter.device)
        if parameter is not None:
            return cast(torch.Tensor, values.to(parameter.dtype))
    return cast(torch.Tensor, values if values.is_floating_point() else values.to(torch.get_default_dtype()))


def as_rows(values: Any, width: int, module: nn.Module) -> torch.Tensor:
    """Return values as floating-point rows of a width; trailing axes are flattened if the last axis differs from it."""
    rows = as_floats(values, module)
    if rows.ndim == 1:
        return rows[:, None]
    return rows if rows.shape[-1] == width else rows.flatten(1)


def _per_layer(name: str, value: Any, layers: int) -> list[Any]:
    """Return one value per hidden layer. A tuple or dict of arguments belongs to all layers."""
    if not isinstance(value, list) and not (isinstance(value, tuple) and name in ("norm_layer", "activation")):
        return [value] * layers
    if len(value) != layers:
        raise ArgumentError(f"{name} must have one entry per hidden layer, {layers}, got {len(value)}")
    return list(value)


def _build(layer: Any, arguments: Any, *first: Any) -> nn.Module:
    if isinstance(arguments, Mapping):
        return cast(nn.Module, layer(*first, **arguments))
    return cast(nn.Module, layer(*first, *(arguments or ())))


def shape_size(name: str, shape: int | Sequence[int], least: int = 0) -> int:
    """Return the number of elements of a shape, or the width that was given instead of one."""
    if isinstance(shape, gymnasium.Space):
        raise ArgumentError(f"{name} must be a shape or a width, got a {type_name(shape)}; {FOR_SPACE}")
    if isinstance(shape, Sequence | np.ndarray):
        return math.prod(whole(name, size, 1) for size in shape)
    return whole(name, shape, least)


def type_name(value: object) -> str:
    """Return the name of a value's class, for errors."""
    return type(value).__name__

"""Networks from observations to features, logits or values.

A network receives observations and, if the network is recurrent, its previous state; it returns a pair of output and
new state. `call_network` also supports modules that return only an output.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Self, TypeAlias, TypeVar, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from samplebatch.arguments import choice, fraction, positive, suggest_names, whole
from samplebatch.batch.nested.node import values_of
from samplebatch.errors import ArgumentError, PolicySpecError


def set_training(module: nn.Module, mode: bool) -> None:
    """Set torch's training mode like `nn.Module.train`, including submodules that override `train`.

    >>> network = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    >>> set_training(network, False)
    >>> [part.training for part in network.modules()]
    [False, False, False]
    """
    module.training = mode
    pending = [module]
    while pending:
        for part in pending.pop()._modules.values():
            if part is None:
                continue
            kind, state = type(part), part.__dict__
            if kind.train is nn.Module.train and kind.__setattr__ is nn.Module.__setattr__ and "training" in state:
                state["training"] = mode
                pending.append(part)
            else:
                part.train(mode)


def first_parameter(module: nn.Module) -> torch.Tensor | None:
    """Return the first parameter of a module, which determines its device and dtype; None if it has no parameters.

    >>> first_parameter(nn.Sequential(nn.ReLU(), nn.Linear(3, 2))).shape
    torch.Size([2, 3])
    """
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for part in module._modules.values():
        first = None if part is None else first_parameter(part)
        if first is not None:
            return first
    return None


def tensors_of(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the distinct parameters and buffers of a module, in the same order for all copies of the module.

    >>> parameters, buffers = tensors_of(nn.BatchNorm1d(2))
    >>> len(parameters), len(buffers)
    (2, 3)
    """
    parameters: dict[int, torch.Tensor] = {}
    buffers: dict[int, torch.Tensor] = {}
    pending = [module]
    for part in pending:
        for collected, tensors in ((parameters, part._parameters), (buffers, part._buffers)):
            for tensor in tensors.values():
                if tensor is not None:
                    collected[id(tensor)] = tensor
        pending += [inner for inner in part._modules.values() if inner is not None]
    return [*parameters.values()], [*buffers.values()]


Activation = Callable[..., nn.Module]
LinearLayer = Callable[[int, int], nn.Module]
Arguments = tuple[Any, ...] | dict[Any, Any]
Item = TypeVar("Item")
PerLayer: TypeAlias = Item | Sequence[Item]
Space = gymnasium.Space[Any]
FOR_SPACE = "the class method for_space accepts a space"


def call_network(network: nn.Module, obs: Any, state: Any = None) -> tuple[Any, Any]:
    """Call a network; return its output, and its new state or None.

    The previous state is passed to networks that have a parameter `state` or `*args`. Raises PolicySpecError if the
    width of observations differs from the input width of the network's first layer.

    >>> call_network(nn.Identity(), 3, state="another's")
    (3, None)
    """
    kind: Any = type(network)
    try:
        result = network(obs) if state is None or not _accepts_state(kind) else network(obs, state)
    except RuntimeError as error:
        if "shapes cannot be multiplied" not in str(error):
            raise
        shape = f"shape {tuple(obs.shape)}" if isinstance(obs, torch.Tensor) else f"a {type_name(obs)}"
        raise PolicySpecError(
            f"observations must have a leading axis of rows and the width of the network's input, got {shape}: {error}"
        ) from error
    return result if isinstance(result, tuple) and len(result) == 2 else (result, None)


@cache
def _accepts_state(kind: type[nn.Module]) -> bool:
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(parameter.name == "state" or parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


def recurrent_parts(network: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers of a network.

    >>> recurrent_parts(nn.Sequential(nn.Linear(2, 3), nn.GRU(3, 3)))
    [GRU(3, 3)]
    """
    return [part for part in network.modules() if isinstance(part, nn.RNNBase)]


class Flatten(nn.Module):
    """Layer that flattens observations to vectors; discrete values are one-hot encoded, and parts are concatenated.

    The attribute `output_dim` is the width of the vectors.

    >>> flatten = Flatten(spaces.Dict(x=spaces.Box(0, 1, (2,)), n=spaces.Discrete(3)))
    >>> flatten({"x": torch.tensor([[0.5, 0.6]]), "n": torch.tensor([1])})
    tensor([[0.5000, 0.6000, 0.0000, 1.0000, 0.0000]])
    """

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space
        self.output_dim = int(spaces.flatdim(space))
        self._is_flat = _is_vector(space)
        self._vector_parts: tuple[str, ...] = ()
        """Keys of a Dict space whose parts are all vectors, otherwise empty."""
        if isinstance(space, spaces.Dict) and all(map(_is_vector, space.spaces.values())):
            self._vector_parts = tuple(space.spaces)

    def forward(self, obs: Any) -> torch.Tensor:
        """Flatten observations; the leading axes, rows and optionally steps, are preserved."""
        if self._is_flat and obs.is_floating_point():
            return cast(torch.Tensor, obs)
        if self._vector_parts:
            values = values_of(obs) or obs
            parts = [values[name] for name in self._vector_parts]
            if all(part.is_floating_point() for part in parts):
                return torch.cat(parts, -1)
        return _flatten(self.space, obs)


class VectorOutput(nn.Module):
    """Base class of networks that return one vector of width `output_dim` per observation."""

    output_dim: int

    # Tianshou's algorithms recognize such networks by `isinstance`.
    __class__: Any = property(lambda self: _peer_class(type(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle's default requires that `__class__` is the type.
        return object.__new__, (type(self),), self.__dict__

    def get_output_dim(self) -> int:
        """Return `output_dim`."""
        return self.output_dim


_PEER_MODULES = tuple(f"tianshou.utils.net.{name}" for name in ("common", "discrete", "continuous"))


def _peer_class(kind: type[Any]) -> type[Any]:
    """Return Tianshou's class with the same name as a network's class; without such a class, the network's class."""
    if kind.__module__.startswith("samplebatch."):
        for name in _PEER_MODULES:
            peer: type[Any] | None = getattr(sys.modules.get(name), kind.__name__, None)
            if peer is not None:
                return peer
    return kind


class NoisyLinear(nn.Module):
    r"""Linear layer with learned noise on its weights, for exploration (Fortunato et al., arXiv:1706.10295).

    The noise is factorized (equations 10 and 11) and drawn once per call, so all rows of a call share the noise.

    .. math:: y = (\mu_W + \sigma_W \circ f(\epsilon_q) f(\epsilon_p)^T) x + \mu_b + \sigma_b \circ f(\epsilon_q),
        \quad f(x) = \mathrm{sgn}(x) \sqrt{|x|}

    Policies draw noise only within training steps; target networks never draw noise.

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
        If a width is not a positive whole number, or `noisy_std` is not a positive number.

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
        # Section 3.2 of the paper: uniform means, constant standard deviations.
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
        # The weights' noise is a product of factors; scaling inputs and outputs by them avoids the product.
        noise_in, noise_out = (_signed_root(torch.randn_like(like)) for like in (self.sigma_W[0], self.sigma_bias))
        return output + nn.functional.linear(rows * noise_in, self.sigma_W, self.sigma_bias) * noise_out


def _signed_root(noise: torch.Tensor) -> torch.Tensor:
    return noise.sign() * noise.abs().sqrt()


def set_noise(module: nn.Module, is_noisy: bool) -> None:
    """Set whether the noisy layers of a module draw noise."""
    for part in module._modules.values():
        if isinstance(part, NoisyLinear):
            part.is_noisy = is_noisy
        elif part is not None and part._modules:
            set_noise(part, is_noisy)


class MLP(VectorOutput):
    """Linear layers with activations between them, with Tianshou's arguments.

    Parameters
    ----------
    input_dim, hidden_sizes, output_dim
        Widths of the input, of the hidden layers (each followed by an activation), and of a last linear layer without
        activation; 0 for no last layer.
    norm_layer, norm_args
        Class of a normalization layer before each activation, and its further arguments; either may be a list with one
        entry per hidden layer.
    activation, act_args
        Class of the activation, and its arguments; either may be a list with one entry per hidden layer. None for no
        activations.
    linear_layer
        Factory of linear layers, called with the input and output widths.
    flatten_input
        Whether inputs with more than two axes are flattened to shape (n, -1).

    Attributes
    ----------
    output_dim, model
        Width of the output, and the layers.

    Raises
    ------
    ArgumentError
        If a width is not a positive whole number, or a list of `norm_layer`, `activation` or arguments does not have
        one entry per hidden layer.

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
        if not isinstance(hidden_sizes, Iterable):
            raise ArgumentError(f"hidden_sizes must be a list of widths, got {hidden_sizes!r}; pass [{hidden_sizes!r}]")
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
        """Return the output for inputs of shape (n, input_dim), or of a shape with more axes."""
        rows = as_rows(obs, self.input_dim, self) if self.flatten_input else obs
        # Iterating over the layers saves the module call of nn.Sequential.
        for layer in self.model:
            rows = layer(rows)
        return cast(torch.Tensor, rows)


class Net(VectorOutput):
    """Network from vector observations to features, logits or action values, with Tianshou's arguments.

    `Net.for_space` creates a network for any observation space.

    Parameters
    ----------
    state_shape, action_shape
        Shape or width of an observation, and of the output; 0 for the features of the last hidden layer.
    hidden_sizes, norm_layer, norm_args, activation, act_args, linear_layer
        See `MLP`.
    softmax
        Whether the outputs are action probabilities.
    concat
        Whether each input is an observation followed by an action of `action_shape`, as `ContinuousCritic` passes it;
        the network then returns features.
    num_atoms
        Number of outputs per action, for distributional algorithms. If `num_atoms` is greater than 1, the output shape
        is (n, actions, num_atoms).
    dueling_param
        Arguments of the `MLP`s of the advantage head and the value head of a dueling network (Wang et al.,
        arXiv:1511.06581, equation 9). None for no dueling network.

    Attributes
    ----------
    output_dim, model
        Width of the output, and the `MLP` of shared layers.
    Q, V
        The heads of a dueling network; None for other networks.

    Raises
    ------
    ArgumentError
        As in `MLP`.

    Examples
    --------
    >>> Net(state_shape=(3,), action_shape=2, hidden_sizes=[8])(torch.zeros(5, 3))[0].shape
    torch.Size([5, 2])
    >>> Net.for_space(
    ...     spaces.Dict(x=spaces.Box(0, 1, (2,)), n=spaces.Discrete(3)), [8]
    ... ).model.input_dim
    5
    """

    @suggest_names()
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
        """Create a network that flattens observations of any space with `Flatten` and maps them to features.

        See `MLP` for the other parameters.
        """
        flatten = Flatten(observation_space)
        network = cls(flatten.output_dim, hidden_sizes=hidden_sizes, activation=activation, linear_layer=linear_layer)
        network.flatten = flatten
        return network

    @property
    def softmax_output(self) -> bool:
        """Whether the outputs are action probabilities."""
        return self.softmax

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the output for observations, and the unchanged state."""
        rows = as_rows(obs, self.model.input_dim, self) if self.flatten is None else self.flatten(obs)
        output = self.model(rows)
        if self.Q is not None and self.V is not None:
            advantage, value = (head(output).unflatten(-1, (-1, self.num_atoms)) for head in (self.Q, self.V))
            output = (value + advantage - advantage.mean(-2, keepdim=True)).flatten(-2)
        if self.num_atoms > 1:
            output = output.unflatten(-1, (-1, self.num_atoms))
        return (output.softmax(-1) if self.softmax else output), state


class Convolutional(VectorOutput):
    """Convolutional network from images to features, with the layers of the Nature DQN (Mnih et al., 2015).

    Parameters
    ----------
    observation_space
        A Box of images; the shorter of the first and the last axis is the channel axis. uint8 images are divided by
        255.
    features
        Width of the output; also available as the attribute `output_dim`.
    linear_layer
        Factory of the last layer, called with the input and output widths.

    Raises
    ------
    ArgumentError
        If the space is not a Box with three axes, or images are too small for the convolutions.

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
            raise ArgumentError(f"observation_space must be a Box of images with three axes, got {observation_space}")
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
        """Return the features of images, and None as the state."""
        images = obs.reshape(-1, *obs.shape[-3:])
        if self._channels_last:
            images = images.movedim(-1, -3)
        features = self.layers(images.to(next(self.parameters()).dtype) * self._scale)
        return features.reshape(*obs.shape[:-3], -1), None


class RecurrentBody(VectorOutput):
    """Recurrent network that returns the features of each step; inputs are single steps or sequences.

    Parameters
    ----------
    observation_space
        The observation space; observations are flattened.
    hidden_size
        Width of the state and of the features; also available as the attribute `output_dim`.
    kind
        `"gru"` or `"lstm"`.

    Raises
    ------
    ArgumentError
        If `kind` is unknown.

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
        """Return the features of each step, and the state after the last step as a dict of tensors.

        `obs` contains n observations, or n sequences with an additional time axis. The argument `state` has n rows;
        None represents a state of zeros.
        """
        rows = self.flatten(obs)
        steps = rows[:, None] if rows.ndim == 2 else rows
        is_lstm = isinstance(self.cell, nn.LSTM)
        parts = None if state is None else values_of(state) or state
        before = None if parts is None else tuple(parts[name][None].contiguous() for name in ("h", "c")[: 1 + is_lstm])
        features, after = self.cell(steps, before if before is None or is_lstm else before[0])
        new_state = {name: part[0] for name, part in zip(("h", "c"), after if is_lstm else (after,), strict=False)}
        return features[:, 0] if rows.ndim == 2 else features, new_state


class Recurrent(VectorOutput):
    """LSTM network that returns logits or action values of the last step, with Tianshou's arguments.

    `RecurrentBody` returns features of every step of a sequence, as recurrent PPO requires.

    Parameters
    ----------
    layer_num, hidden_layer_size
        Number and width of the LSTM layers.
    state_shape, action_shape
        Shape or width of an observation, and of the output; the width of the output is the attribute `output_dim`.

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
                f"layer_num must be a whole number from 1, got a {type_name(layer_num)}; RecurrentBody accepts a space"
            )
        width = whole("hidden_layer_size", hidden_layer_size, 1)
        self.input_dim, self.output_dim = (
            shape_size("state_shape", state_shape, 1),
            shape_size("action_shape", action_shape, 1),
        )
        self.nn = nn.LSTM(width, width, whole("layer_num", layer_num, 1), batch_first=True)
        self.fc1, self.fc2 = nn.Linear(self.input_dim, width), nn.Linear(width, self.output_dim)

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the output of the last step, and the state after this step.

        Parameters
        ----------
        obs
            Observations of shape (n, width), or sequences of shape (n, steps, width).
        state
            State before the first step: `hidden` and `cell`, each of shape (n, layers, width); None for zeros.
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


def _is_vector(space: Space) -> bool:
    return isinstance(space, spaces.Box) and len(space.shape) == 1


def _flatten(space: Space, obs: Any) -> torch.Tensor:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        values = values_of(obs)
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return torch.cat(
            [_flatten(part, obs[name] if values is None else values[str(name)]) for name, part in parts], -1
        )
    if isinstance(space, spaces.Discrete):
        rows: torch.Tensor = nn.functional.one_hot(obs.long() - int(space.start), int(space.n))
    elif isinstance(space, spaces.MultiDiscrete):
        choices = zip(obs.long().unbind(-1), space.nvec.tolist(), strict=True)
        rows = torch.cat([nn.functional.one_hot(indices, count) for indices, count in choices], -1)
    else:
        axes = len(space.shape or ())
        rows = obs.flatten(-axes) if axes > 1 else obs if axes else obs[..., None]
    return rows if rows.is_floating_point() else rows.to(torch.get_default_dtype())


class LaggedNetwork(nn.Module):
    """Target network: a copy (`module`) of a source network, updated only from the source network.

    A target network is always in evaluation mode, and its parameters require no gradients.

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
        # The tuple prevents torch from registering the source, whose parameters belong to the policy, as a submodule.
        self._source = (source,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the copy."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Do nothing: target networks stay in evaluation mode."""
        return self

    def follow(self, tau: float = 1.0) -> None:
        """Update the parameters from the source: `tau * source + (1 - tau) * target`.

        If `tau` is 1, parameters are copied; otherwise, Polyak averages are computed. Buffers, such as the running
        means of batch normalization, are copied.

        Raises ArgumentError if `tau` is not between 0 and 1.
        """
        follow([self], tau)


@torch.no_grad()
def follow(networks: Sequence[LaggedNetwork], tau: float = 1.0) -> None:
    """Update all parameters of target networks from their sources in one operation; see `LaggedNetwork.follow`.

    >>> source = nn.Linear(1, 1, bias=False)
    >>> targets = [LaggedNetwork(source), LaggedNetwork(source)]
    >>> with torch.no_grad():
    ...     _ = source.weight.fill_(3.0)
    >>> follow(targets)
    >>> [target.module.weight.item() for target in targets]
    [3.0, 3.0]
    """
    tau = fraction("tau", tau)
    target_parameters: list[torch.Tensor] = []
    source_parameters: list[torch.Tensor] = []
    for network in networks:
        (source,) = network._source
        parameters, buffers = tensors_of(network.module)
        new_parameters, new_buffers = tensors_of(source)
        target_parameters += parameters
        source_parameters += new_parameters
        for buffer, new_buffer in zip(buffers, new_buffers, strict=True):
            buffer.copy_(new_buffer)
    if not target_parameters:
        return
    if tau == 1.0:
        torch._foreach_copy_(target_parameters, source_parameters)
    else:
        torch._foreach_lerp_(target_parameters, source_parameters, tau)


def initialize_orthogonally(network: nn.Module, gain: float = math.sqrt(2.0), head_gain: float | None = None) -> None:
    """Initialize linear and convolutional layers with orthogonal weights and zero biases, as is usual for PPO.

    gain, head_gain: gain of the layers inside `preprocess` and `body` (Engstrom et al., arXiv:2005.12729, section 3),
        and gain of all other layers; if `head_gain` is None, it equals `gain`.

    >>> from samplebatch.learn.heads import DiscreteActor
    >>> actor = DiscreteActor.for_space(
    ...     Net.for_space(spaces.Box(-1, 1, (3,)), [8]), spaces.Discrete(2)
    ... )
    >>> initialize_orthogonally(actor, head_gain=0.01)
    >>> round(float(actor.last.model[0].weight.detach().norm(dim=1)[0]), 4)
    0.01
    """
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            is_head = head_gain is not None and not name.startswith(("preprocess.", "body."))
            nn.init.orthogonal_(layer.weight, head_gain if is_head and head_gain is not None else gain)
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
    """Return values as floating-point rows; trailing axes are flattened unless the last axis has length `width`."""
    rows = as_floats(values, module)
    if rows.ndim == 1:
        return rows[:, None]
    return rows if rows.shape[-1] == width else rows.flatten(1)


def _per_layer(name: str, value: Any, layers: int) -> list[Any]:
    """Expand an argument to one value per hidden layer; a tuple or dict of arguments is shared by all layers."""
    if not isinstance(value, list) and not (isinstance(value, tuple) and name in ("norm_layer", "activation")):
        return [value] * layers
    if len(value) != layers:
        raise ArgumentError(f"{name} must have one entry per hidden layer, {layers}, got {len(value)}")
    return list(value)


def _build(layer: Any, arguments: Any, *first: Any) -> nn.Module:
    if isinstance(arguments, Mapping):
        return cast(nn.Module, layer(*first, **arguments))
    return cast(nn.Module, layer(*first, *(arguments or ())))


def shape_size(name: str, shape: int | Sequence[int], minimum: int = 0) -> int:
    """Return the number of elements of a shape; a single integer is a width."""
    if isinstance(shape, gymnasium.Space):
        raise ArgumentError(f"{name} must be a shape or a width, got a {type_name(shape)}; {FOR_SPACE}")
    if isinstance(shape, Sequence | np.ndarray):
        return math.prod(whole(name, size, 1) for size in shape)
    return whole(name, shape, minimum)


def type_name(value: object) -> str:
    """Return the name of a value's class, for error messages."""
    return type(value).__name__

"""Joint distributions of composite actions: MultiDiscrete, MultiBinary, Dict and Tuple spaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from samplebatch.batch.nested.functions import to_numpy
from samplebatch.env.spaces import SpaceLayout
from samplebatch.errors import PolicySpecError

_LEAVES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)
JOINT_SPACES = (spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)
"""Spaces whose actions have several parts."""


class JointActions:
    """Factory of joint distributions of independent action parts, parameterized by the outputs of a network.

    The parts of an action are the leaves of the space, in the same order as in the space. A Discrete leaf has one
    output per choice, a MultiDiscrete leaf one output per choice of each number, and a MultiBinary leaf one output per
    bit; these outputs are logits. The outputs of a Box leaf are the means followed by the logarithms of the standard
    deviations. Actions are in the environment's unit, but Box leaves may exceed the bounds until `clip` clips them.

    Parameters
    ----------
    space
        A MultiDiscrete, MultiBinary, Dict or Tuple space; Dict and Tuple spaces of Discrete, MultiDiscrete,
        MultiBinary and Box leaves, nested to any depth.

    Attributes
    ----------
    output_dim, mask_dim
        Number of outputs of the network, and length of a mask. A mask contains one flag per logit, in the order of the
        outputs. A flag of False forbids a choice, or the value 1 of a bit.

    Raises
    ------
    PolicySpecError
        If a leaf has an unsupported type.

    Examples
    --------
    >>> joint = JointActions(
    ...     spaces.Dict(gear=spaces.Discrete(3), steer=spaces.Box(-1, 1, (2,)))
    ... )
    >>> joint.output_dim, joint.mask_dim
    (7, 3)
    >>> action = joint(torch.zeros(4, 7)).sample()
    >>> action.gear.shape, action.steer.shape
    (torch.Size([4]), torch.Size([4, 2]))
    """

    def __init__(self, space: Any) -> None:
        self.space, self._layout = space, SpaceLayout(space)
        self.leaves = self._layout.spaces
        for name, leaf in zip(self._layout.names, self.leaves, strict=True):
            if not isinstance(leaf, _LEAVES):
                subject = f"part {name!r} of action_space" if name else "action_space"
                raise PolicySpecError(
                    f"{subject} must be a Discrete, MultiDiscrete, MultiBinary or Box, got a {type(leaf).__name__}"
                )
        self._widths = [_width(leaf) for leaf in self.leaves]
        self.output_dim = sum(self._widths)
        is_logit = [not isinstance(leaf, spaces.Box) for leaf in self.leaves]
        self._is_logit = np.repeat(is_logit, self._widths)
        self.mask_dim = int(self._is_logit.sum())

    def __call__(self, output: torch.Tensor) -> JointDistribution:
        """Return the distribution of actions for outputs of shape (n, output_dim).

        Raises
        ------
        PolicySpecError
            If the number of the network's outputs differs from `output_dim`.
        """
        if output.shape[-1] != self.output_dim:
            raise PolicySpecError(
                f"actor must have {self.output_dim} outputs for {self.space}, got {output.shape[-1]}; "
                "DiscreteActor.for_space creates it"
            )
        return JointDistribution(self, output)

    def mask(self, output: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Set the logits of masked choices to the lowest finite number.

        Raises
        ------
        PolicySpecError
            If the length of the mask differs from `mask_dim`.
        """
        if mask.shape[-1] != self.mask_dim:
            raise PolicySpecError(f"mask must have {self.mask_dim} flags for {self.space}, got {mask.shape[-1]}")
        forbidden = torch.zeros_like(output, dtype=torch.bool)
        forbidden[..., torch.from_numpy(self._is_logit).to(output.device)] = ~mask
        return output.masked_fill(forbidden, torch.finfo(output.dtype).min)

    def split(self, output: torch.Tensor) -> list[list[Distribution]]:
        """Return the distributions of each leaf: one per number of a MultiDiscrete leaf, and one for any other leaf."""
        parts = output.split_with_sizes(self._widths, -1)
        return [_distributions(leaf, part) for leaf, part in zip(self.leaves, parts, strict=True)]

    def pack(self, values: list[list[torch.Tensor]]) -> Any:
        """Combine the values of the leaves into actions in the environment's unit."""
        packed = []
        for leaf, numbers in zip(self.leaves, values, strict=True):
            if isinstance(leaf, spaces.Discrete):
                packed.append(numbers[0] + int(leaf.start))
            elif isinstance(leaf, spaces.MultiDiscrete):
                start = torch.as_tensor(np.ravel(leaf.start), device=numbers[0].device)
                packed.append(_shaped(torch.stack(numbers, -1) + start, leaf.shape))
            elif isinstance(leaf, spaces.MultiBinary):
                packed.append(_shaped(numbers[0].to(torch.int8), leaf.shape))
            else:
                packed.append(_shaped(numbers[0], leaf.shape))
        return self._layout.batch(packed)

    def unpack(self, action: Any) -> list[list[torch.Tensor]]:
        """Split actions of n rows into the values of each leaf, in the unit of the leaf's distributions."""
        unpacked = []
        for leaf, value in zip(self.leaves, self._layout.flatten(action), strict=True):
            rows = torch.as_tensor(value)
            if isinstance(leaf, spaces.Discrete):
                unpacked.append([rows - int(leaf.start)])
            elif isinstance(leaf, spaces.MultiDiscrete):
                start = torch.as_tensor(np.ravel(leaf.start), device=rows.device)
                unpacked.append([*(rows.flatten(1) - start).unbind(-1)])
            elif isinstance(leaf, spaces.MultiBinary):
                unpacked.append([rows.flatten(1).float()])
            else:
                unpacked.append([rows.flatten(1) if leaf.shape else rows[:, None]])
        return unpacked

    def clip(self, action: Any) -> Any:
        """Return actions as arrays in the dtypes of the space; Box leaves are clipped to their bounds."""
        leaves = []
        for leaf, value in zip(self.leaves, self._layout.flatten(action), strict=True):
            array = to_numpy(value)
            array = array.clip(leaf.low, leaf.high) if isinstance(leaf, spaces.Box) else array
            leaves.append(array.astype(leaf.dtype, copy=False))
        return self._layout.batch(leaves)

    def row(self, action: Any, index: int) -> Any:
        """Return the action of one row for the environment, as dicts and tuples of single values."""
        leaves = [np.asarray(leaf)[index] for leaf in self._layout.flatten(action)]
        return self._layout.nest(leaves)


class JointDistribution(Distribution):
    """Distribution of actions with independent parts, created by `JointActions`."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 - the attribute of torch's base class

    def __init__(self, joint: JointActions, output: torch.Tensor) -> None:
        super().__init__(output.shape[:-1], validate_args=False)
        self.joint, self.output = joint, output
        self._parts = joint.split(output)

    def take_rows(self, select: Callable[[torch.Tensor], Any]) -> JointDistribution:
        """Return the distribution of selected rows; `select` maps the tensor of outputs to an index of rows."""
        return JointDistribution(self.joint, self.output[select(self.output)])

    def sample(self, sample_shape: Any = ()) -> Any:
        """Sample one action per row; return a tensor, or a batch of tensors for Dict and Tuple spaces."""
        return self.joint.pack([[part.sample(torch.Size(sample_shape)) for part in leaf] for leaf in self._parts])

    @property
    def mode(self) -> Any:
        """The most likely action of each row."""
        return self.joint.pack([[_mode(part) for part in leaf] for leaf in self._parts])

    def log_prob(self, value: Any) -> torch.Tensor:
        """Return the log-probability of each row's action, shape (n,): the sum over the action's parts."""
        values = self.joint.unpack(value)
        terms = [
            part.log_prob(part_value)
            for leaf, numbers in zip(self._parts, values, strict=True)
            for part, part_value in zip(leaf, numbers, strict=True)
        ]
        return torch.stack(terms).sum(0)

    def entropy(self) -> torch.Tensor:
        """Return the entropy of each row's action distribution, shape (n,): the sum over the action's parts."""
        return torch.stack([part.entropy() for leaf in self._parts for part in leaf]).sum(0)


def _width(leaf: Any) -> int:
    if isinstance(leaf, spaces.Discrete):
        return int(leaf.n)
    if isinstance(leaf, spaces.MultiDiscrete):
        return int(np.sum(leaf.nvec))
    return int(math.prod(leaf.shape)) * (2 if isinstance(leaf, spaces.Box) else 1)


def _shaped(numbers: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return numbers.reshape(*numbers.shape[:-1], *shape)


def _distributions(leaf: Any, output: torch.Tensor) -> list[Distribution]:
    if isinstance(leaf, spaces.Discrete):
        return [Categorical(logits=output, validate_args=False)]
    if isinstance(leaf, spaces.MultiDiscrete):
        parts = output.split_with_sizes([int(n) for n in np.ravel(leaf.nvec)], -1)
        return [Categorical(logits=part, validate_args=False) for part in parts]
    if isinstance(leaf, spaces.MultiBinary):
        return [Independent(Bernoulli(logits=output, validate_args=False), 1, validate_args=False)]
    mean, log_sigma = output.chunk(2, -1)
    normal = Normal(mean, log_sigma.clamp(-20.0, 2.0).exp(), validate_args=False)
    return [Independent(normal, 1, validate_args=False)]


def _mode(part: Distribution) -> torch.Tensor:
    # In torch, a bit with probability 0.5 has no mode.
    if isinstance(part, Independent) and isinstance(part.base_dist, Bernoulli):
        return (part.base_dist.logits > 0.0).to(part.base_dist.logits)
    return part.mode

"""Walks over the modules of a network, which algorithms take several times in each update.

Torch's own walks build the dotted name of each part, and look through all kinds of attributes for each mode that they
set: for small networks that takes as long as the network itself.
"""

from __future__ import annotations

import torch
from torch import nn


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

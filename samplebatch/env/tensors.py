"""Tensors of torch that vector environments speak: observations stay tensors, on their device, as far as into columns.

Rewards, flags and infos are looked at in every step, and so become arrays: over the same memory on the host.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import KINDS, TENSOR
from samplebatch.column.exact import Refuse
from samplebatch.column.types import torch_dtype


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor; torch need not be loaded."""
    return KINDS[type(value)] == TENSOR


def check_tensor(name: str, tensor: Any, dtype: np.dtype[Any], shape: tuple[int, ...], refuse: Refuse) -> None:
    """Refuse observations of another shape than their space has, or of another kind of numbers.

    Raises
    ------
    SampleBatchError
        The error that `refuse` makes.
    """
    found = tuple(tensor.shape)
    if found[:1] != shape[:1]:
        raise refuse(f"column {name!r} must have {shape[0]} rows, got {found[0] if found else 'a single number'}", None)
    if found != shape:
        raise refuse(f"column {name!r} must have rows of shape {shape[1:]}, got {found[1:]}", None)
    if tensor.is_complex() or (tensor.is_floating_point() and dtype.kind != "f"):
        raise refuse(f"column {name!r} must hold {dtype}, got {tensor.dtype}", None)


def own_tensor(tensor: Any) -> Any:
    """Copy a tensor that an environment may write over, on its device."""
    return tensor.detach().clone()


def to_host(value: Any) -> Any:
    """Return a tensor as an array, over the same memory if it is on the host; anything else stays as it is."""
    if not is_tensor(value):
        return value
    if value.dtype is sys.modules["torch"].bfloat16:
        value = value.float()
    return value.numpy(force=True)


def infos_to_host(infos: Any) -> Any:
    """Return infos with arrays in place of tensors, in nested dicts too."""
    if isinstance(infos, dict):
        return {key: infos_to_host(value) for key, value in infos.items()}
    return to_host(infos)


def to_tensor(values: npt.NDArray[Any], device: Any) -> Any:
    """Return an array as a tensor on a device, over the same memory if that is the host.

    An array that no tensor can hold, such as one of objects, stays as it is.
    """
    if is_tensor(values) or torch_dtype(values.dtype) is None:
        return values
    return sys.modules["torch"].from_numpy(values).to(device)


def actions_to_device(actions: npt.NDArray[Any], space: Any, device: Any) -> Any:
    """Return actions as a tensor on a device, floats in the dtype of their space."""
    if actions.dtype.kind == "f" and space.dtype is not None:
        actions = actions.astype(space.dtype, copy=False)
    # Policies may give arrays that must not be written to.
    return to_tensor(actions if actions.flags.writeable else actions.copy(), device)

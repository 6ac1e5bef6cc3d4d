"""Copies of nested batches, and what is pickled of them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import ARRAY, KINDS, NODE, NUMBER, TENSOR, Node, node

_ndarray = np.ndarray
_FIRST_OBJECT = np.dtype(object).num


def copied(source: Node, memo: dict[int, Any] | None = None) -> Node:
    """Copy a tree and everything under it: arrays, tensors and objects."""
    if memo is None:
        memo = {}
    kept: dict[str, Any] = {}
    for name, value in source.__dict__.items():
        if type(value) is _ndarray and value.dtype.num < _FIRST_OBJECT:
            kept[name] = value.copy()
            continue
        kind = KINDS[type(value)]
        if kind == NODE:
            kept[name] = copied(value, memo)
        elif kind == TENSOR:
            kept[name] = value.clone()
        elif kind == NUMBER or value is None or type(value) is str:
            kept[name] = value
        else:
            kept[name] = copy.deepcopy(value, memo)
    return node(type(source), kept)


def mirrored(source: Node) -> Node:
    """Make another tree over the same leaves."""
    kept = {name: mirrored(value) if KINDS[type(value)] == NODE else value for name, value in source.__dict__.items()}
    return node(type(source), kept)


class _ShippedTensor:
    """A tensor on its way through pickle: the array of its elements alone, which can travel out of band.

    torch itself pickles the whole storage that a slice is a view of, and never out of band.
    """

    __slots__ = ("requires_grad", "values")

    def __init__(self, tensor: Any) -> None:
        self.requires_grad = tensor.requires_grad
        self.values = tensor.detach().resolve_conj().resolve_neg().numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.values, self.requires_grad)


def _received(values: npt.NDArray[Any], requires_grad: bool) -> Any:
    import torch

    # Out-of-band buffers may be read-only; a tensor over them would be a way around the protection.
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    return tensor.requires_grad_() if requires_grad else tensor


def shipped(source: Node) -> dict[str, Any]:
    """Return the values of one node as they are pickled: tensors on the host as arrays."""
    held = source.__dict__
    if all(KINDS[type(value)] in (ARRAY, NODE) for value in held.values()):
        return held
    return {name: _ship(value) for name, value in held.items()}


def _ship(value: Any) -> Any:
    if KINDS[type(value)] != TENSOR or value.device.type != "cpu" or value.grad_fn is not None:
        return value
    import torch

    plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    return _ShippedTensor(value) if plain and str(value.dtype) in _NUMPY_DTYPES else value


_NUMPY_DTYPES = frozenset(
    f"torch.{name}"
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
        "float64",
        "complex64", "complex128",
    )
)  # fmt: skip

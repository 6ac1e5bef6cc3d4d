"""Tensors: nested batches and single values from NumPy to torch and back, sharing memory wherever both can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import ARRAY, DISTRIBUTION, FOREIGN, KINDS, NODE, NUMBER, TENSOR, Node, fault, node

if TYPE_CHECKING:
    import torch

N = TypeVar("N", bound=Node)

_FIRST_OBJECT = np.dtype(object).num


class TorchTarget:
    """Target of a conversion to torch: the dtype and device of every tensor; None leaves either as it is.

    Attributes
    ----------
    dtype
        The dtype of every tensor.
    device
        The device of every tensor.
    pin_memory
        Whether to page-lock host memory, so that the copy to a device runs asynchronously.
    non_blocking
        Whether to return before copies to a device have ended.
    keep_objects
        Whether to keep values that torch has no dtype for.
    """

    __slots__ = ("device", "dtype", "keep_objects", "moves", "non_blocking", "pin_memory", "torch")

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        device: str | int | torch.device | None = "cpu",
        *,
        pin_memory: bool = False,
        non_blocking: bool = False,
        keep_objects: bool = False,
    ) -> None:
        import torch

        self.torch = torch
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        self.pin_memory = pin_memory
        self.non_blocking = non_blocking
        self.keep_objects = keep_objects
        self.moves = dtype is not None or pin_memory or (self.device is not None and self.device.type != "cpu")

    def from_array(self, array: npt.NDArray[Any]) -> Any:
        """Return an array as a tensor: over the same memory if it is writable and laid out for torch."""
        if self.keep_objects and array.dtype.kind in "OmM":
            return array
        if not array.flags.writeable or array.dtype.byteorder == ">" or (array.ndim and min(array.strides) < 0):
            # A tensor is always writable: over read-only memory it would be a way around the protection.
            array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        tensor = self.torch.from_numpy(array)
        return self.move(tensor) if self.moves else tensor

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the target's device and in its dtype: itself, if it is there already."""
        if self.pin_memory and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device=self.device, dtype=self.dtype, non_blocking=self.non_blocking)

    def convert(self, value: Any, kind: int) -> Any:
        """Return a leaf as a tensor; None and distributions are kept.

        Raises
        ------
        TypeError
            If torch cannot hold it.
        """
        if kind == ARRAY:
            return self.from_array(value)
        if kind == TENSOR:
            return self.move(value)
        if kind in (NUMBER, FOREIGN):
            return self.from_array(np.asarray(value))
        if value is None or kind == DISTRIBUTION or self.keep_objects:
            return value
        raise TypeError(f"torch has no dtype for {type(value).__name__}")


def tree_to_torch(source: N, target: TorchTarget, prefix: str = "") -> N:
    """Convert the leaves of a tree to tensors.

    Raises
    ------
    ColumnTypeError
        If torch cannot hold a leaf; names it.
    """
    converted: dict[str, Any] = {}
    from_numpy = target.torch.from_numpy
    direct = not target.moves
    name = ""
    try:
        for name, value in source.__dict__.items():
            kind = KINDS[type(value)]
            if kind == ARRAY:
                # Most arrays are C-contiguous, writable and native: torch takes those directly.
                if direct and value.dtype.num < _FIRST_OBJECT and value.flags.carray and value.dtype.isnative:
                    converted[name] = from_numpy(value)
                else:
                    converted[name] = target.from_array(value)
            elif kind == NODE:
                converted[name] = tree_to_torch(value, target, f"{prefix}{name}.")
            else:
                converted[name] = target.convert(value, kind)
    except Exception as error:
        fault(prefix + name, "made a tensor", error)
    return node(type(source), converted)


def tree_to_numpy(source: N, prefix: str = "") -> N:
    """Convert the tensors of a tree to arrays, over the same memory if that is on the host."""
    converted: dict[str, Any] = {}
    name = ""
    try:
        for name, value in source.__dict__.items():
            kind = KINDS[type(value)]
            if kind == TENSOR:
                converted[name] = array_of(value)
            elif kind == NODE:
                converted[name] = tree_to_numpy(value, f"{prefix}{name}.")
            elif kind in (NUMBER, FOREIGN):
                converted[name] = np.asarray(value)
            else:
                converted[name] = value
    except Exception as error:
        fault(prefix + name, "made an array", error)
    return node(type(source), converted)


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array, over the same memory if that is on the host.

    bfloat16 becomes float32, which holds it exactly; NumPy has no bfloat16.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    array: npt.NDArray[Any] = tensor.numpy() if not tensor.is_conj() else tensor.resolve_conj().numpy()
    return array

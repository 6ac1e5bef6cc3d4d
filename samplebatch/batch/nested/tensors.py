"""Tensors: nested batches and single values from NumPy to torch and back, sharing memory wherever both can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import ARRAY, FOREIGN, KINDS, NODE, NUMBER, TENSOR, Node, fault, node
from samplebatch.batch.targets import Target
from samplebatch.column.interface import Column
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.ragged_torch import RaggedTorchColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn

if TYPE_CHECKING:
    import torch

N = TypeVar("N", bound=Node)

_FIRST_OBJECT = np.dtype(object).num


def tree_to(source: N, target: Target, prefix: str = "") -> N:
    """Convert the leaves of a tree to a target's form: to tensors, or to another floating-point dtype.

    Raises
    ------
    ColumnTypeError
        If torch cannot hold a leaf; names it.
    """
    converted: dict[str, Any] = {}
    direct = target.direct
    name = ""
    try:
        for name, value in source.__dict__.items():
            kind = KINDS[type(value)]
            if kind == ARRAY:
                # Most arrays are C-contiguous, writable and native: torch takes those directly.
                if (
                    direct is not None
                    and value.dtype.num < _FIRST_OBJECT
                    and value.flags.carray
                    and value.dtype.isnative
                ):
                    converted[name] = direct(value)
                else:
                    converted[name] = target.from_array(value)
            elif kind == NODE:
                converted[name] = tree_to(value, target, f"{prefix}{name}.")
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
                converted[name] = _rows_to_numpy(value) if kind == ARRAY else value
    except Exception as error:
        fault(prefix + name, "made an array", error)
    return node(type(source), converted)


def _rows_to_numpy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert rows that vary in shape, an array of tensors, to arrays; return any other array itself."""
    if array.dtype.kind != "O" or array.ndim != 1 or not array.size or KINDS[type(array[0])] != TENSOR:
        return array
    rows = np.empty(len(array), object)
    for place, row in enumerate(array):
        rows[place] = array_of(row) if KINDS[type(row)] == TENSOR else row
    return rows


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


def as_array(value: Any) -> npt.NDArray[Any]:
    """Return an array, a tensor on any device, or numbers as an array."""
    return array_of(value) if KINDS[type(value)] == TENSOR else np.asarray(value)


def column_of_arrays(column: Column) -> Column:
    """Return a column of tensors as one of arrays, over the same memory if that is on the host; others as they are."""
    if isinstance(column, TorchColumn):
        return TensorColumn(array_of(column.values))
    return RaggedColumn(array_of(column.flat), *column.layout) if isinstance(column, RaggedTorchColumn) else column

"""Conversion of values to arrays, tensors and nested batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch.batch.delivery import TorchTarget, array_of, tree_to, tree_to_numpy
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import ARRAY, FOREIGN, KINDS, NODE, NUMBER, OBJECT, TENSOR, node, set_unit
from samplebatch.batch.nested.values import parse
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ColumnTypeError
from samplebatch.names import Convention, rename

if TYPE_CHECKING:
    import torch


def _parse(value: Any) -> tuple[Any, int]:
    if KINDS[type(value)] not in (OBJECT, NODE, TENSOR):
        value = parse(value, Batch, "value")
    return value, KINDS[type(value)]


def to_numpy(x: Any) -> Any:
    """Convert a value to an array; dicts, batches and lists of dicts become a batch of arrays.

    If the value is a tensor on the host, the array shares the tensor's memory.

    Examples
    --------
    >>> import torch
    >>> to_numpy([torch.zeros(2), torch.ones(2)])
    array([[0., 0.],
           [1., 1.]], dtype=float32)
    """
    value, kind = _parse(x)
    if kind == NODE:
        return tree_to_numpy(value)
    return array_of(value) if kind == TENSOR else np.asanyarray(value)


def to_torch(x: Any, dtype: torch.dtype | None = None, device: str | int | torch.device = "cpu") -> Any:
    """Convert a value to a tensor; dicts, batches and lists of dicts become a batch of tensors.

    Parameters
    ----------
    x
        A number, an array, a tensor, or a nested structure with numeric leaves.
    dtype
        Dtype of all tensors; None keeps each leaf's dtype.
    device
        Device of all tensors. A tensor that already has the target device and dtype is not copied.

    Raises
    ------
    ColumnTypeError
        If torch has no dtype for the value.
    DeviceError
        If torch cannot use the device.

    Examples
    --------
    >>> import torch
    >>> to_torch([1, 2], dtype=torch.float32)
    tensor([1., 2.])
    """
    value, kind = _parse(x)
    target = TorchTarget(dtype, device)
    if kind == NODE:
        return tree_to(value, target)
    if kind not in (ARRAY, TENSOR, NUMBER, FOREIGN) or (kind == ARRAY and value.dtype.kind not in "biufc"):
        raise ColumnTypeError(f"a value must be numbers to become a tensor, got {type(x).__name__}")
    return target.convert(value, kind)


def to_torch_as(x: Any, y: torch.Tensor) -> Any:
    """Convert a value to a tensor with another tensor's dtype and device.

    Raises
    ------
    ColumnTypeError
        If `y` is not a tensor.

    Examples
    --------
    >>> import torch
    >>> to_torch_as([1, 2], torch.zeros(1))
    tensor([1., 2.])
    """
    if KINDS[type(y)] != TENSOR:
        raise ColumnTypeError(f"y must be a tensor, got {type(y).__name__}")
    return to_torch(x, y.dtype, y.device)


def collate(rows: Sequence[Any] | Batch) -> Batch:
    """Collate rows into one batch of tensors; use it as the `collate_fn` of a torch `DataLoader`.

    Strings, None and other objects remain object arrays.

    Parameters
    ----------
    rows
        One Batch or dict per row, or one Batch of all rows, as a `DataLoader` passes if the dataset is a Batch.

    Examples
    --------
    >>> from torch.utils.data import DataLoader
    >>> data = Batch(obs=[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], act=[0, 1, 2])
    >>> for batch in DataLoader(data, batch_size=2, collate_fn=collate):
    ...     print(batch.act)
    tensor([0, 1])
    tensor([2])
    """
    batch = rows if isinstance(rows, Batch) else Batch.stack(rows)
    return batch.to_torch(keep_objects=True)


def as_batch(sample_batch: SampleBatch[Any], convention: Convention | None = None) -> Batch:
    """Return a nested batch that shares arrays and tensors with a flat batch; see `SampleBatch.as_batch`."""
    batch = node(Batch, rename({name: _to_nested(sample_batch[name], name) for name in sample_batch}, convention))
    if sample_batch.action_unit is not None:
        set_unit(batch, sample_batch.action_unit)
    return batch


def _to_nested(value: Any, path: str) -> Any:
    if type(value) is np.ndarray:
        return value
    if isinstance(value, tuple):
        value = {str(position): item for position, item in enumerate(value)}
    if isinstance(value, Mapping):
        return node(Batch, {name: _to_nested(item, f"{path}.{name}") for name, item in value.items()})
    if isinstance(value, Column) and not isinstance(value, VaryingRows):
        raise ColumnTypeError(
            f"column {path!r} must be an array to be in a Batch, got {value.kind}; decompress it first"
        )
    return value

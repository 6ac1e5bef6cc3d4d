"""Functions that make nested batches of other values: to NumPy, to torch, from a flat batch, for data loaders."""

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
    """Return a value as an array, or a batch of arrays for dicts, batches and lists of them.

    Tensors on the host share their memory with the array.

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
    """Return a value as a tensor, or a batch of tensors for dicts, batches and lists of them.

    Parameters
    ----------
    x
        Anything of numbers.
    dtype
        The dtype of all tensors; None leaves each as it is.
    device
        The device of all tensors. A tensor that is there already is returned itself.

    Raises
    ------
    ColumnTypeError
        If torch has no dtype for it.
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
    """Return a value as a tensor of another tensor's dtype, on its device.

    Raises
    ------
    ColumnTypeError
        If the other is not a tensor.

    Examples
    --------
    >>> import torch
    >>> to_torch_as([1, 2], torch.zeros(1))
    tensor([1., 2.])
    """
    if KINDS[type(y)] != TENSOR:
        raise ColumnTypeError(f"the model for a tensor must be a tensor, got {type(y).__name__}")
    return to_torch(x, y.dtype, y.device)


def collate(rows: Sequence[Any] | Batch) -> Batch:
    """Collate rows into one batch of tensors: the `collate_fn` of a torch `DataLoader`.

    Strings, None and other objects stay arrays of objects.

    Parameters
    ----------
    rows
        Batches or dicts, one a row; or a Batch of the rows, which a `DataLoader` over a Batch takes at once.

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
    """Make a nested batch over the arrays and tensors of a flat one; see `SampleBatch.as_batch`."""
    made = node(Batch, rename({name: _to_nested(sample_batch[name], name) for name in sample_batch}, convention))
    if sample_batch.action_unit is not None:
        set_unit(made, sample_batch.action_unit)
    return made


def _to_nested(value: Any, path: str) -> Any:
    if isinstance(value, tuple):
        value = {str(place): item for place, item in enumerate(value)}
    if isinstance(value, Mapping):
        return node(Batch, {name: _to_nested(item, f"{path}.{name}") for name, item in value.items()})
    if isinstance(value, Column) and not isinstance(value, VaryingRows):
        raise ColumnTypeError(
            f"column {path!r} must be an array to be in a Batch, it is {value.kind}; decompress it first"
        )
    return value

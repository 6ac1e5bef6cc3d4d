"""Moving columns to a device as torch tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.types import torch_dtype


def move_columns(
    columns: dict[str, Column],
    device: torch.device | str,
    *,
    pin_memory: bool,
    use_stream: bool,
    stream: torch.cuda.Stream | None,
) -> dict[str, Column]:
    """Move columns to a device as tensors; columns without a torch dtype stay unchanged."""
    target = torch.device(device)
    on_stream = _stream(target, use_stream, stream)
    with on_stream:
        return {name: _move(column, target, pin_memory=pin_memory) for name, column in columns.items()}


def _move(column: Column, device: torch.device, *, pin_memory: bool) -> Column:
    if isinstance(column, TensorColumn):
        if torch_dtype(column.dtype) is None:
            return column
        tensor = column.to_torch()
    elif isinstance(column, TorchColumn):
        tensor = column.values
    else:
        return column
    if pin_memory and device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return TorchColumn(tensor.to(device, non_blocking=pin_memory))


def _stream(device: torch.device, use_stream: bool, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    if not use_stream or device.type != "cuda":
        return nullcontext()
    own = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
    context: AbstractContextManager[Any] = torch.cuda.stream(own)
    return context

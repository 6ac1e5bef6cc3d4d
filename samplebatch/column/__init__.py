"""Columns: rows of one kind in Arrow memory. Public names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.column.compressed import CompressedColumn as CompressedColumn
    from samplebatch.column.convert import as_column as as_column
    from samplebatch.column.convert import unpad as unpad
    from samplebatch.column.interface import Column as Column
    from samplebatch.column.memory import MemoryBound as MemoryBound
    from samplebatch.column.objects import ObjectColumn as ObjectColumn
    from samplebatch.column.ragged import RaggedColumn as RaggedColumn
    from samplebatch.column.tensor import TensorColumn as TensorColumn
    from samplebatch.column.text import TextColumn as TextColumn
    from samplebatch.column.torch_tensor import RaggedTorchColumn as RaggedTorchColumn
    from samplebatch.column.torch_tensor import TorchColumn as TorchColumn

__getattr__, __dir__, __all__ = exports(__name__)

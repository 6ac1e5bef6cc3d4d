"""Columns: rows of one kind in Arrow memory.

Every public name of columns, loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

_HOMES = {
    "as_column": "samplebatch.column.convert",
    "Column": "samplebatch.column.interface",
    "TensorColumn": "samplebatch.column.tensor",
    "TorchColumn": "samplebatch.column.torch_tensor",
    "RaggedColumn": "samplebatch.column.ragged",
    "RaggedTorchColumn": "samplebatch.column.ragged_torch",
    "ObjectColumn": "samplebatch.column.objects",
    "CompressedColumn": "samplebatch.column.compressed",
    "MemoryBound": "samplebatch.column.memory_bound",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from samplebatch.column.compressed import CompressedColumn as CompressedColumn
    from samplebatch.column.convert import as_column as as_column
    from samplebatch.column.interface import Column as Column
    from samplebatch.column.memory_bound import MemoryBound as MemoryBound
    from samplebatch.column.objects import ObjectColumn as ObjectColumn
    from samplebatch.column.ragged import RaggedColumn as RaggedColumn
    from samplebatch.column.ragged_torch import RaggedTorchColumn as RaggedTorchColumn
    from samplebatch.column.tensor import TensorColumn as TensorColumn
    from samplebatch.column.torch_tensor import TorchColumn as TorchColumn

__getattr__, __dir__ = exports(__name__, _HOMES)

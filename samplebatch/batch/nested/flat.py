"""Flat batches and nested ones over the same memory, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import ARRAY, KINDS, NODE, TENSOR, Node, node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.errors import ColumnTypeError
from samplebatch.names import TO_FLAT, TO_NESTED

FlatNames = Literal["kept", "rllib"]
"""Column names of the flat batch: the nested one's, or RLlib's for columns that both libraries know."""

NestedNames = Literal["kept", "tianshou"]
"""Names of the nested batch: the flat one's, or Tianshou's for columns that both libraries know."""


def as_sample_batch(batch: Node, names: FlatNames = "kept") -> SampleBatch:
    """Make a flat batch over the arrays and tensors of a nested one; see `Batch.as_sample_batch`."""
    columns = _to_columns(batch, "")
    if names == "rllib":
        columns = {TO_FLAT.get(name, name): value for name, value in columns.items()}
    return SampleBatch(columns)


def _to_columns(source: Node, prefix: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in source.__dict__.items():
        kind = KINDS[type(value)]
        if kind == NODE:
            nested = _to_columns(value, f"{prefix}{name}.")
            if nested:
                columns[name] = nested
        elif kind in (ARRAY, TENSOR) and value.ndim:
            columns[name] = value
        elif value is not None:
            raise ColumnTypeError(
                f"column {prefix + name!r} must have rows to be in a SampleBatch, it is a single value"
            )
    return columns


def as_batch(sample_batch: SampleBatch, names: NestedNames = "kept") -> Batch:
    """Make a nested batch over the arrays and tensors of a flat one; see `SampleBatch.as_batch`."""
    renamed = TO_NESTED if names == "tianshou" else {}
    return node(Batch, {renamed.get(name, name): _to_nested(sample_batch[name], name) for name in sample_batch})


def _to_nested(value: Any, path: str) -> Any:
    if isinstance(value, tuple):
        value = {str(place): item for place, item in enumerate(value)}
    if isinstance(value, Mapping):
        return node(Batch, {name: _to_nested(item, f"{path}.{name}") for name, item in value.items()})
    if isinstance(value, Column):
        raise ColumnTypeError(
            f"column {path!r} must be an array to be in a Batch, it is {value.kind}; decompress or pad it first"
        )
    return value

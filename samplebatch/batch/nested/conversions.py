"""Conversions of nested batches to flat batches, dicts, summaries, other shapes and page-locked memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch import summary
from samplebatch.batch.action_unit import ENVIRONMENT
from samplebatch.batch.nested.distributions import dist_to_atleast_2d
from samplebatch.batch.nested.node import (
    ARRAY,
    DISTRIBUTION,
    KINDS,
    NODE,
    RAGGED,
    TENSOR,
    Node,
    copy_nodes,
    node,
    set_unit,
    unit_of,
    with_unit_of,
)
from samplebatch.batch.nested.rows import select, shortest
from samplebatch.batch.nested.values import complete_rows, missing_value, narrow
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import as_column
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError
from samplebatch.names import ACTIONS, Convention, rename

if TYPE_CHECKING:
    pass


def _map_leaves(source: Node, function: Any) -> Node:
    """Return a tree in which every leaf is replaced by `function(leaf, kind)`."""
    results = {}
    for name, value in source.__dict__.items():
        kind = KINDS[type(value)]
        results[name] = _map_leaves(value, function) if kind == NODE else function(value, kind)
    return with_unit_of(source, node(type(source), results))


def to_dict(source: Node) -> dict[str, Any]:
    """Return the values of a tree as nested dicts."""
    return {name: to_dict(value) if KINDS[type(value)] == NODE else value for name, value in source.__dict__.items()}


def summary_lines(source: Node, prefix: str) -> list[summary.Line]:
    """Summarize the leaves of a tree, one line per leaf; a leaf without rows has only a name and a type."""
    lines: list[summary.Line] = []
    for name, value in source.__dict__.items():
        path, kind = prefix + name, KINDS[type(value)]
        if kind == NODE and value.__dict__:
            lines += summary_lines(value, f"{path}.")
        elif kind in (ARRAY, TENSOR, RAGGED) and value.ndim:
            lines += summary.describe({path: as_column(value, path)})
        else:
            lines.append(summary.Line(path, type(value).__name__, "()" if kind in (ARRAY, TENSOR) else ""))
    return lines


def drop_reserved(source: Node) -> None:
    """Set all reserved names to None."""
    for name, value in source.__dict__.items():
        if KINDS[type(value)] == NODE:
            if value.__dict__:
                drop_reserved(value)
            else:
                source.__dict__[name] = None


def as_sample_batch(batch: Node, convention: Convention | None = None) -> SampleBatch:
    """Return a flat batch that shares arrays and tensors with a tree; see `Batch.as_sample_batch`."""
    return SampleBatch(rename(_to_columns(batch, ""), convention), _action_unit=unit_of(batch))


def _to_columns(source: Node, prefix: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in source.__dict__.items():
        kind = KINDS[type(value)]
        if kind == NODE:
            nested = _to_columns(value, f"{prefix}{name}.")
            if nested:
                columns[name] = nested
        elif kind in (ARRAY, TENSOR, RAGGED) and value.ndim:
            columns[name] = value
        elif value is not None:
            raise ColumnTypeError(f"column {prefix + name!r} must have rows to be in a SampleBatch, got a single value")
    return columns


def pin_memory(source: Node) -> Node:
    """Return a tree with its tensors in page-locked memory."""

    def pin(value: Any, kind: int) -> Any:
        if kind == RAGGED and hasattr(value.elements, "pin_memory"):
            return type(value)(pin(value.elements, TENSOR), value.offsets, value.shapes)
        return value.pin_memory() if kind == TENSOR and value.device.type == "cpu" else value

    return _map_leaves(source, pin)


def to_at_least_2d(source: Node) -> Node:
    """Return a tree whose leaves have at least two dimensions."""

    def raise_dimensions(value: Any, kind: int) -> Any:
        if kind == RAGGED:
            return value
        if kind == DISTRIBUTION:
            return dist_to_atleast_2d(value)
        if kind == TENSOR:
            import torch

            return torch.atleast_2d(value)  # type: ignore[no-untyped-call]
        return np.atleast_2d(np.asarray(value, None if kind == ARRAY or not isinstance(value, str) else object))

    return _map_leaves(source, raise_dimensions)


def to_environment_actions(source: Node) -> Node:
    """Map a tree's actions to the environment's action space; return the tree itself if no mapping is needed."""
    unit = unit_of(source)
    if unit is None or unit.mapping is None:
        return source
    mapped = copy_nodes(source)
    for name in (ACTIONS, "act"):
        if name in mapped.__dict__:
            actions = mapped.__dict__[name]
            if KINDS[type(actions)] not in (ARRAY, TENSOR):
                raise ColumnMismatchError(
                    f"column {name!r} must be one array or tensor to be mapped, got {type(actions).__name__}"
                )
            mapped.__dict__[name] = unit.to_environment(actions)
    set_unit(mapped, ENVIRONMENT)
    return mapped


def drop_null_rows(source: Node, length: int) -> Node:
    """Return the rows without missing values; object arrays that contain only numbers become numeric."""
    rows = select(source, np.flatnonzero(complete_rows(source, length)))
    return _map_leaves(rows, lambda value, kind: narrow(value) if kind == ARRAY else value)


def set_array(target: Node, arr: npt.NDArray[Any], key: str, index: Any, default_value: float | None) -> None:
    """Assign an array to a column, or to some rows of a column; see `Batch.set_array_at_key`."""
    columns = target.__dict__
    length = shortest({name: value for name, value in columns.items() if name != key or index is not None}) or 0
    if index is None:
        if columns.keys() - {key} and len(arr) != length:
            raise ColumnLengthError(
                f"column {key!r} must have {length} rows, got {len(arr)}; use index to set only some rows"
            )
        columns[key] = arr
    elif key not in columns:
        default = missing_value(arr.dtype, key) if default_value is None else default_value
        column = np.full((length, *arr.shape[1:]), default, arr.dtype)
        column[index] = arr
        columns[key] = column
    elif KINDS[type(columns[key])] == NODE:
        raise ColumnMismatchError(f"column {key!r} must be an array to have rows set, got a nested batch")
    else:
        columns[key][index] = arr

"""JAX: `SampleBatch` as a pytree, so that whole batches go through `jit`, `grad`, `vmap` and `jax.tree`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.column.leaf import LeafColumn
from samplebatch.errors import require

_Structure = tuple[tuple[str, ...], str, Flags]
"""Dotted names, structures of nested columns as JSON, and flags: the part of a batch that JAX compiles for."""

_registered: list[Any] = []


def register_with_jax() -> None:
    """Register `SampleBatch` as a pytree with JAX; calling it again does nothing.

    The leaves are the columns, in order, under their dotted names. Within a function that JAX traces, and after it,
    they are JAX's arrays: `batch["obs"]` is one, slices cut them, and what keeps or joins batches copies them to the
    host.

    Raises
    ------
    MissingExtraError
        If JAX is not installed.

    Examples
    --------
    >>> import jax
    >>> register_with_jax()
    >>> mean = jax.jit(lambda batch: batch["rewards"].mean())
    >>> float(mean(SampleBatch(rewards=[1.0, 2.0])))
    1.5
    """
    tree_util = require("jax.tree_util", "jax")
    if tree_util in _registered:
        return

    def with_keys(batch: SampleBatch) -> tuple[list[Any], _Structure]:
        leaves, structure = _flatten(batch)
        return [(tree_util.DictKey(name), leaf) for name, leaf in zip(structure[0], leaves, strict=True)], structure

    tree_util.register_pytree_with_keys(SampleBatch, with_keys, _unflatten, _flatten)
    _registered.append(tree_util)


def _flatten(batch: SampleBatch) -> tuple[list[Any], _Structure]:
    columns, nested = batch._all(), json.dumps(dict(batch._nested))
    return [column.values for column in columns.values()], (tuple(columns), nested, batch._flags)


def _unflatten(structure: _Structure, leaves: Iterable[Any]) -> SampleBatch:
    """Make a batch of leaves, which may be anything: JAX builds trees of its own markers."""
    paths, nested, flags = structure
    batch = SampleBatch.__new__(SampleBatch)
    batch._columns = {path: _column_of(leaf, path) for path, leaf in zip(paths, leaves, strict=True)}
    if nested != "{}":
        batch._nested = json.loads(nested)
    if flags is not DEFAULT:
        batch._flags = flags
    batch._has_sequences = names.SEQ_LENS in batch._columns
    shapes = [getattr(column.values, "shape", ()) for column in batch._columns.values()]
    batch.count = next((shape[0] for shape in shapes if shape), 0)
    return batch


def _column_of(leaf: Any, path: str) -> Column:
    return as_column(leaf, path) if isinstance(leaf, np.ndarray) and leaf.ndim else LeafColumn(leaf)

"""A nested batch as a flat one over the same memory."""

from __future__ import annotations

from typing import Any, Literal

from samplebatch.batch.nested.node import ARRAY, KINDS, NODE, TENSOR, Node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ColumnTypeError
from samplebatch.names import TO_FLAT

FlatNames = Literal["kept", "rllib"]
"""Names of the flat batch: those of the nested one, or RLlib's for those that both have."""


def as_sample_batch(batch: Node, names: FlatNames = "kept") -> SampleBatch:
    """Return a flat batch over the same arrays and tensors; nested batches become nested columns.

    Arrays are shared that are C-contiguous and in native byte order; others are copied once. Names that are only
    reserved, and
    None, have no rows and are left out.

    Parameters
    ----------
    batch
        A nested batch whose leaves all have n rows.
    names
        `"rllib"` renames the columns that both libraries know: `rew` becomes `rewards`, `obs_next` becomes `new_obs`.

    Raises
    ------
    ColumnLengthError
        If leaves differ in length; names them.
    ColumnTypeError
        If a leaf is a scalar or a distribution; names it.

    Examples
    --------
    >>> from samplebatch.batch.nested.batch import Batch
    >>> flat = as_sample_batch(Batch(obs={"x": [1.0, 2.0]}, rew=[0.5, 1.0]), names="rllib")
    >>> flat.column_names
    ('obs.x', 'rewards')
    """
    columns = _columns_of(batch, "")
    if names == "rllib":
        columns = {TO_FLAT.get(name, name): value for name, value in columns.items()}
    return SampleBatch(columns)


def _columns_of(source: Node, prefix: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in source.__dict__.items():
        kind = KINDS[type(value)]
        if kind == NODE:
            nested = _columns_of(value, f"{prefix}{name}.")
            if nested:
                columns[name] = nested
        elif kind in (ARRAY, TENSOR) and value.ndim:
            columns[name] = value
        elif value is not None:
            raise ColumnTypeError(
                f"column {prefix + name!r} must have rows to be in a SampleBatch, it is a single value"
            )
    return columns

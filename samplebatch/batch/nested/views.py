"""A flat batch as a nested one over the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.errors import ColumnTypeError
from samplebatch.names import TO_NESTED

NestedNames = Literal["kept", "tianshou"]
"""Names of the nested batch: those of the flat one, or Tianshou's for those that both have."""


def as_batch(sample_batch: SampleBatch, names: NestedNames = "kept") -> Batch:
    """Return a nested batch over the same arrays and tensors; nested columns become nested batches.

    A tuple of columns becomes a batch with the names `0`, `1`, ... What is written through one of the two is seen
    through
    the other; columns added to one are not.

    Parameters
    ----------
    sample_batch
        A flat batch.
    names
        `"tianshou"` renames the columns that both libraries know: `rewards` becomes `rew`, `new_obs` becomes
        `obs_next`.

    Raises
    ------
    ColumnTypeError
        If a column is ragged or compressed; names it.

    Examples
    --------
    >>> flat = SampleBatch(obs={"x": [1.0, 2.0]}, rewards=[0.5, 1.0])
    >>> as_batch(flat, names="tianshou")
    Batch(
        obs: Batch(
                 x: array([1., 2.]),
             ),
        rew: array([0.5, 1. ]),
    )
    """
    renamed = TO_NESTED if names == "tianshou" else {}
    return node(Batch, {renamed.get(name, name): _nested(sample_batch[name], name) for name in sample_batch})


def _nested(value: Any, path: str) -> Any:
    if isinstance(value, tuple):
        value = {str(place): item for place, item in enumerate(value)}
    if isinstance(value, Mapping):
        return node(Batch, {name: _nested(item, f"{path}.{name}") for name, item in value.items()})
    if isinstance(value, Column):
        raise ColumnTypeError(
            f"column {path!r} must be an array to be in a Batch, it is {value.kind}; decompress or pad it first"
        )
    return value

"""Ray Data: datasets of steps in blocks that are Arrow tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.convert.ray_types import without_ray_types
from samplebatch.convert.steps import Source, as_flat, fragments_of
from samplebatch.errors import ColumnMismatchError, EmptyBufferError, require

if TYPE_CHECKING:
    from ray.data import Dataset


def to_ray_dataset(source: Source) -> Dataset:
    """Return steps as a dataset of Ray Data, a block for each fragment; columns keep their Arrow types.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.

    Raises
    ------
    ColumnTypeError, SequenceError, EmptyBufferError
        If the source is no steps of one policy.
    MissingExtraError
        If Ray is not installed.
    """
    data = require("ray.data", "ray")
    dataset: Dataset = data.from_arrow([as_flat(part).to_arrow() for part in fragments_of(source)])
    return dataset


def from_ray_dataset(dataset: Dataset, *, allow_pickle: bool = False, max_nbytes: int | None = None) -> SampleBatch:
    """Read a dataset of Ray Data into one batch; one block is not copied.

    Tensors of Ray's own types become arrays, too. Names with dots are nested columns again as long as the dataset has
    the schema that `to_ray_dataset` gave it.

    Parameters
    ----------
    dataset
        The dataset. Take less of it with `limit` where not all of it fits into memory.
    allow_pickle
        Whether columns of Python objects that Arrow could not hold may be unpickled. Only for data that you trust.
    max_nbytes
        Bytes that Python objects may take; 256 MiB or 1024 times the table's own, whichever is more, if None.

    Raises
    ------
    ColumnTypeError
        If a column has nulls or a type that no column can hold; names it.
    ColumnMismatchError
        If blocks differ in their columns.
    UntrustedPickleError, CapacityError
        As `SampleBatch.from_arrow` does.
    EmptyBufferError
        If there are no steps.
    MissingExtraError
        If Ray is not installed.
    """
    ray = require("ray", "ray")
    blocks: list[Any] = [block for block in ray.get(dataset.to_arrow_refs()) if block.num_rows]
    if not blocks:
        raise EmptyBufferError("a dataset of Ray must have steps to be converted, it has none")
    try:
        table = pa.concat_tables(map(without_ray_types, blocks), promote_options="permissive")
    except pa.ArrowException as error:
        raise ColumnMismatchError(
            f"blocks of a dataset of Ray must have the same columns, they differ: {error}"
        ) from error
    return SampleBatch.from_arrow(table, allow_pickle=allow_pickle, max_nbytes=max_nbytes)

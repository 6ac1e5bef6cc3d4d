"""Nested batches out of a torch `DataLoader`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samplebatch.batch.nested.batch import Batch


def collate(rows: Sequence[Any] | Batch) -> Batch:
    """Make one batch of tensors of the rows that a data set gave: the `collate_fn` of a torch `DataLoader`.

    Strings, None and other objects stay arrays of objects.

    Parameters
    ----------
    rows
        Batches or dicts, one a row; or a Batch that has been taken from a Batch at once, as a `DataLoader` over one
        does.

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

"""Splitting: a batch that is too large for its way, as two of fewer rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import CapacityError, SampleBatchError


def halves(
    batch: SampleBatch | MultiAgentBatch | Batch, refused: CapacityError
) -> Iterator[SampleBatch | MultiAgentBatch | Batch]:
    """Yield views of the first and the second half of a batch.

    Sequences are not cut. A `MultiAgentBatch` is split between environment steps, for which it needs `eps_id` and `t`.

    Parameters
    ----------
    batch
        The batch.
    refused
        What to raise if it cannot be split.

    Raises
    ------
    CapacityError
        If it has a single row, sequence or environment step, or no rows.

    Examples
    --------
    >>> whole = SampleBatch(a=[1, 2, 3])
    >>> [part["a"].tolist() for part in halves(whole, CapacityError("too large"))]
    [[1], [2, 3]]
    """
    parts: Sequence[SampleBatch | MultiAgentBatch | Batch]
    try:
        if isinstance(batch, Batch):
            rows = len(batch)
            parts = [batch[: rows // 2], batch[rows // 2 :]] if rows > 1 else []
        elif isinstance(batch, MultiAgentBatch):
            parts = batch.timeslices(max(1, (len(batch) + 1) // 2))
        else:
            parts = _of_rows(batch)
    except (SampleBatchError, TypeError) as error:
        raise refused from error
    if len(parts) < 2:
        raise refused
    yield from parts


def _of_rows(batch: SampleBatch) -> list[SampleBatch]:
    if not batch._has_sequences:
        return [batch[: len(batch) // 2], batch[len(batch) // 2 :]] if len(batch) > 1 else []
    lengths = batch._lengths()
    if len(lengths) < 2:
        return []
    # Between the two sequences where the steps are closest to being halved; slices begin where sequences do.
    ends = lengths.cumsum()
    middle = min(len(ends) - 2, int(ends.searchsorted(batch.count / 2)))
    cut = int(ends[middle])
    return [batch[:cut], batch[cut:]] if 0 < cut < batch.count else []

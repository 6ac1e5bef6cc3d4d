"""Splitting: a batch that is too large for its way, as two of fewer rows."""

from __future__ import annotations

from collections.abc import Sequence

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import SampleBatchError

AnyBatch = SampleBatch | MultiAgentBatch | Batch


def halves(batch: AnyBatch) -> Sequence[AnyBatch]:
    """Return views of the first and the second half of a batch; none if it cannot be split.

    Sequences are not cut. A `MultiAgentBatch` is split between environment steps, for which it needs `eps_id` and `t`.

    Examples
    --------
    >>> [part["a"].tolist() for part in halves(SampleBatch(a=[1, 2, 3]))]
    [[1], [2, 3]]
    >>> halves(SampleBatch(a=[1]))
    []
    """
    parts: Sequence[AnyBatch]
    try:
        if isinstance(batch, Batch):
            rows = len(batch)
            parts = [batch[: rows // 2], batch[rows // 2 :]] if rows > 1 else []
        elif isinstance(batch, MultiAgentBatch):
            parts = batch.timeslices(max(1, (len(batch) + 1) // 2))
        else:
            parts = _of_rows(batch)
    except (SampleBatchError, TypeError):
        return []
    return parts if len(parts) > 1 else []


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

"""Lockstep: the rows of several agents at the same environment steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch import names
from samplebatch.batch.episodes import number_env_steps
from samplebatch.names import PolicyID

if TYPE_CHECKING:
    from samplebatch.batch.sample_batch import SampleBatch


def lockstep(
    policy_batches: Mapping[PolicyID, SampleBatch[Any]], k: int
) -> Iterator[tuple[dict[PolicyID, SampleBatch[Any]], int]]:
    """Yield the rows of every k consecutive environment steps by policy, and their number of steps.

    Raises
    ------
    ColumnNotFoundError
        If a batch has no `eps_id` or no `t`.
    """
    batches = {policy: _order(batch) for policy, batch in policy_batches.items() if batch.count}
    if not batches:
        return
    eps_id, t = (
        np.concatenate([np.asarray(batch[name]) for batch in batches.values()]) for name in (names.EPS_ID, names.T)
    )
    steps, episode = number_env_steps(eps_id, t)
    total = len(episode)
    starts = np.arange(0, total, k)
    bounds = []
    offset = 0
    for batch in batches.values():
        mine = steps[offset : offset + batch.count]
        bounds.append([*mine.searchsorted(starts).tolist(), batch.count])
        offset += batch.count
    policies = [(policy, batch._view if not batch._has_sequences else batch.slice) for policy, batch in batches.items()]
    for i, start in enumerate(starts.tolist()):
        parts = {}
        for (policy, part), bound in zip(policies, bounds, strict=True):
            if bound[i] < bound[i + 1]:
                parts[policy] = part(bound[i], bound[i + 1])
        yield parts, min(k, total - start)


def _order(batch: SampleBatch) -> SampleBatch:
    """Return the batch with its rows by episode, time and agent: itself if they are in order."""
    if batch.zero_padded:
        batch = batch._unpad()
    keys = [
        np.asarray(batch[name])
        for name in (names.AGENT_INDEX, names.T, names.EPS_ID)
        if name != names.AGENT_INDEX or name in batch
    ]
    order = np.lexsort(keys)
    if (order[1:] > order[:-1]).all():
        return batch
    return batch._gather(order)

"""Lockstep: the rows of several agents at the same environment steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch import names
from samplebatch.batch.episodes import number_env_steps
from samplebatch.batch.sequences import steps_of
from samplebatch.column.interface import Indices
from samplebatch.errors import SequenceError
from samplebatch.names import PolicyID

if TYPE_CHECKING:
    from samplebatch.batch.sample_batch import SampleBatch


class Lockstep:
    """The rows of several policies by environment step, from which `MultiAgentBatch` cuts and gathers parts.

    Parameters
    ----------
    policy_batches
        Batch of each policy, with columns `eps_id` and `t`.

    Attributes
    ----------
    count
        Environment steps.

    Raises
    ------
    ColumnNotFoundError
        If a batch has no `eps_id` or no `t`.
    """

    __slots__ = ("_batches", "_starts", "_steps", "count")

    def __init__(self, policy_batches: Mapping[PolicyID, SampleBatch[Any]]) -> None:
        self._batches = {policy: _order(batch) for policy, batch in policy_batches.items() if batch.count}
        self._steps: dict[PolicyID, Indices] = {}
        self._starts: dict[PolicyID, Indices] = {}
        self.count = 0
        if not self._batches:
            return
        eps_id, t = (
            np.concatenate([np.asarray(batch[name]) for batch in self._batches.values()])
            for name in (names.EPS_ID, names.T)
        )
        steps, episode = number_env_steps(eps_id, t)
        self.count = len(episode)
        offset = 0
        for policy, batch in self._batches.items():
            self._steps[policy] = steps[offset : offset + batch.count]
            offset += batch.count

    def parts(self, k: int) -> Iterator[tuple[dict[PolicyID, SampleBatch[Any]], int]]:
        """Yield the rows of every k consecutive environment steps by policy, and their number of steps."""
        starts = np.arange(0, self.count, k)
        policies = [
            (
                policy,
                batch.slice if batch._has_sequences else batch._view,
                [*self._steps[policy].searchsorted(starts).tolist(), batch.count],
            )
            for policy, batch in self._batches.items()
        ]
        for i, start in enumerate(starts.tolist()):
            parts = {}
            for policy, part, bounds in policies:
                if bounds[i] < bounds[i + 1]:
                    parts[policy] = part(bounds[i], bounds[i + 1])
            yield parts, min(k, self.count - start)

    def part(self, start: int, stop: int) -> dict[PolicyID, SampleBatch[Any]]:
        """View the rows of environment steps `start` to `stop` by policy."""
        parts = {}
        for policy, batch in self._batches.items():
            first, last = self._steps[policy].searchsorted((start, stop)).tolist()
            if first < last:
                parts[policy] = batch.slice(first, last)
        return parts

    def take(self, steps: Indices) -> dict[PolicyID, SampleBatch[Any]]:
        """Gather the rows of environment steps in the given order by policy.

        Raises
        ------
        SequenceError
            If a policy's rows are sequences: their steps would be torn apart.
        """
        parts = {}
        for policy, batch in self._batches.items():
            if batch._has_sequences:
                raise SequenceError(
                    f"rows of policy {policy!r} must be plain steps to be gathered by environment steps, they come as "
                    "sequences"
                )
            starts = self._starts.get(policy)
            if starts is None:
                starts = self._starts[policy] = self._steps[policy].searchsorted(np.arange(self.count + 1))
            rows = steps_of(np.diff(starts), steps, starts[:-1])
            if len(rows):
                parts[policy] = batch._gather(rows)
        return parts


def _order(batch: SampleBatch[Any]) -> SampleBatch[Any]:
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

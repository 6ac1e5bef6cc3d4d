"""SlotBuilder: joins the steps of several agents where they will be sent from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.concat import join
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.multi_agent_builder import MultiAgentBatchBuilder
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.tensor import TensorColumn
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from samplebatch.transport.reservation import Reservation

Reserve = Callable[[Any], Reservation | None]
"""Takes a slot for so many rows, by policy; None if there can be none."""


class SlotBuilder(MultiAgentBatchBuilder):
    """A builder that joins the columns of its agents into a slot, if there is one that they fit into.

    Attributes
    ----------
    reserve
        Takes the slot.
    slot
        The slot that the last batch lies in; None if it does not lie in one.
    """

    __slots__ = ("reserve", "slot")

    def __init__(self, policy_mapping: Mapping[Any, str], dtypes: Mapping[str, npt.DTypeLike] | None) -> None:
        super().__init__(policy_mapping, dtypes=dtypes)
        self.reserve: Reserve | None = None
        self.slot: Reservation | None = None

    def build_and_reset(self) -> MultiAgentBatch:
        """Hand over all steps added so far as a batch; see `MultiAgentBatchBuilder.build_and_reset`."""
        policies: dict[str, list[SampleBatch]] = {}
        for policy_id, builder in self._agents.values():
            if builder.count:
                policies.setdefault(policy_id, []).append(builder._build())
        rows = {policy_id: sum(part.count for part in parts) for policy_id, parts in policies.items()}
        self.slot = slot = None if self.reserve is None or not rows else self.reserve(rows)
        if slot is not None and not all(_fits(parts, slot[policy_id]) for policy_id, parts in policies.items()):
            slot.cancel()
            self.slot = slot = None
        joined = {
            policy_id: join(parts) if slot is None else _joined(parts, slot[policy_id])
            for policy_id, parts in policies.items()
        }
        batch = MultiAgentBatch(joined, self.count)
        self._capacities = {agent_id: builder.count for agent_id, (_, builder) in self._agents.items()}
        self._agents = {}
        self.count = 0
        return batch


class SlotMultiAgentCollector(MultiAgentCollector):
    """A `MultiAgentCollector` that can join steps in a slot.

    Parameters
    ----------
    environments
        What is stepped.
    **given
        As for `MultiAgentCollector`.

    Attributes
    ----------
    builder
        What joins them.
    """

    def __init__(self, environments: Sequence[Any], **given: Any) -> None:
        super().__init__(list(environments), **given)
        self.builder = self._builder = SlotBuilder(self._policy_of, self._builder._dtypes)


def _fits(parts: Sequence[SampleBatch], columns: Mapping[str, Any]) -> bool:
    """Tell whether all numbers of a policy's agents have a place of their dtype and row shape."""
    for part in parts:
        for name in part.column_names:
            column = part.column(name)
            if not isinstance(column, TensorColumn):
                continue
            place = columns.get(name)
            if place is None or place.dtype != column.dtype or place.shape[1:] != column.row_shape:
                return False
        if part.column_names != parts[0].column_names:
            return False
    return True


def _joined(parts: Sequence[SampleBatch], columns: Mapping[str, Any]) -> SampleBatch:
    """Join the steps of a policy's agents, numbers in their places."""
    first = parts[0]
    loose = []
    for name in first.column_names:
        if isinstance(first.column(name), TensorColumn):
            np.concatenate([part.column(name).values for part in parts], out=columns[name])
        else:
            loose.append(name)
    objects: Mapping[str, Any] = join([_only(part, loose) for part in parts]) if loose else {}
    # A nested column has no objects among its parts where there is a slot.
    return SampleBatch({name: objects[name] if name in loose else columns[name] for name in first})


def _only(steps: SampleBatch, names: Sequence[str]) -> SampleBatch:
    return SampleBatch({name: steps[name] for name in names})

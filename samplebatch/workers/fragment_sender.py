"""FragmentSender: sends a worker's fragments, those that can be from where they were made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.transport.producer import Producer
from samplebatch.transport.reservation import Reservation
from samplebatch.workers.counters import FRAGMENTS, SENT

Fragment = SampleBatch | MultiAgentBatch

_MOST = 4
"""A fragment is made in the arena if that has room for so many: some may be on their way while the next is made."""
_SLACK = 1.2


class FragmentSender:
    """Sends fragments, and hands out slots like the last one to make the next in.

    Columns that lie in the slot already are not copied. Others are copied into it once, and so are fragments that were
    not made in a slot, because there was none before them, they are too large, or their columns differ.

    Parameters
    ----------
    producer
        The end of the channel to send from.
    line
        The worker's line on the board.

    Attributes
    ----------
    in_place, copied
        Fragments that went in the slots that they were made in, and others.
    moved_nbytes
        Bytes of the former that did not lie in their slot, and were copied into it.
    """

    def __init__(self, producer: Producer, line: Any) -> None:
        self._producer = producer
        self._line = line
        self._like: Fragment | None = None
        self._row_nbytes = 0.0
        self.in_place = self.copied = self.moved_nbytes = 0

    def reserve(self, rows: int | Mapping[str, int]) -> Reservation | None:
        """Take a slot for so many rows, by policy if there are several; None if there can be none.

        Waits for a slot to be free.
        """
        like = self._like
        if like is None:
            return None
        if isinstance(rows, Mapping):
            if not isinstance(like, MultiAgentBatch) or rows.keys() != like.policy_batches.keys():
                return None
            count = sum(rows.values())
        else:
            count = rows
        if count * self._row_nbytes * _SLACK > self._producer.capacity_bytes // _MOST:
            return None
        return self._producer.reserve(like, rows)

    def send(self, fragment: Fragment, slot: Reservation | None = None) -> None:
        """Send a fragment.

        Parameters
        ----------
        fragment
            What is sent. If it is too large it goes in parts.
        slot
            The slot that columns of it may lie in; it is used up.
        """
        steps = fragment.env_steps()
        if slot is not None and self._fits(fragment, slot):
            self.moved_nbytes += _fill(slot, fragment)
            self.in_place += 1
        else:
            if slot is not None:
                fragment = fragment.copy()
                slot.cancel()
            self._producer.send(fragment, split=True)
            self.copied += 1
            self._learn(fragment)
        self._line[SENT] += steps
        self._line[FRAGMENTS] += 1

    def _learn(self, fragment: Fragment) -> None:
        """Make the next slots like this fragment."""
        agent_steps = fragment.agent_steps()
        self._row_nbytes = fragment.size_bytes() / max(1, agent_steps)
        if isinstance(fragment, MultiAgentBatch):
            like: Fragment = MultiAgentBatch(
                {policy: steps.slice(0, 0).copy() for policy, steps in fragment.policy_batches.items()}, 0
            )
        else:
            like = fragment.slice(0, 0).copy()
        # Parts of a nested column lie together, or not at all.
        batches = like.as_multi_agent().policy_batches.values()
        self._like = None if any(map(_has_nested_objects, batches)) else like

    def _fits(self, fragment: Fragment, slot: Reservation) -> bool:
        """Tell whether a fragment has the columns of a slot, and no more rows."""
        like = self._like
        if type(fragment) is not type(like) or like is None:
            return False
        own, others = fragment.as_multi_agent().policy_batches, like.as_multi_agent().policy_batches
        rooms = slot.rows if isinstance(fragment, MultiAgentBatch) else dict.fromkeys(own, slot.rows)
        return own.keys() == others.keys() and all(
            steps.count <= rooms[policy] and _alike(steps, others[policy]) for policy, steps in own.items()
        )


def _has_nested_objects(steps: SampleBatch) -> bool:
    return any("." in name and isinstance(steps.column(name), ObjectColumn) for name in steps.column_names)


def _alike(steps: SampleBatch, like: SampleBatch) -> bool:
    if set(steps.column_names) != set(like.column_names) or steps._nested != like._nested:
        return False
    for name in like.column_names:
        column, other = steps.column(name), like.column(name)
        if type(column) is not type(other) or not isinstance(column, (TensorColumn, ObjectColumn)):
            return False
        if isinstance(column, TensorColumn) and (column.dtype, column.row_shape) != (other.dtype, other.row_shape):
            return False
    return True


def _fill(slot: Reservation, fragment: Fragment) -> int:
    """Copy the columns into a slot that do not lie there yet, and send it; return how many bytes these were."""
    nbytes = 0
    if isinstance(fragment, MultiAgentBatch):
        extra: dict[str, Any] = {}
        rows: Any = {}
        for policy, steps in fragment.policy_batches.items():
            rows[policy] = steps.count
            extra[policy], own = _fill_columns(slot[policy], steps)
            nbytes += own
        slot.commit(rows, env_steps=fragment.count, extra=extra if any(extra.values()) else None)
    else:
        extra, nbytes = _fill_columns(slot, fragment)
        slot.commit(fragment.count, extra=extra or None)
    return nbytes


def _fill_columns(columns: Any, steps: SampleBatch) -> tuple[dict[str, Any], int]:
    """Copy columns into their places; return those that have none, and how many bytes were copied."""
    extra: dict[str, Any] = {}
    places, nbytes = set(columns), 0
    for name in steps.column_names:
        if name not in places:
            extra[name] = steps[name]
            continue
        values, place = np.asarray(steps.column(name).values), columns[name][: steps.count]
        if values.ctypes.data != place.ctypes.data:
            place[...] = values
            nbytes += values.nbytes
    return extra, nbytes

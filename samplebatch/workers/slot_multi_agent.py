"""SlotMultiAgentCollector: steps of several agents, written where they will be sent from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samplebatch import names
from samplebatch.rollout.fragment_rows import FragmentRows
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from samplebatch.rollout.places import Forecast
from samplebatch.transport.reservation import Reservation

Reserve = Callable[[Any], Reservation | None]
"""Takes a slot for so many rows, by policy; None if there can be none."""


class SlotMultiAgentCollector(MultiAgentCollector):
    """A `MultiAgentCollector` that writes steps to a slot, if there is one that they fit into.

    How many rows each agent will have is known from the fragment before, so the first one lies in no slot. Rows for
    which there is no room, and columns that the slot lacks or has with another dtype, are moved out of it; then those
    that are still to come are written elsewhere too.

    Parameters
    ----------
    environments
        What is stepped.
    **given
        As for `MultiAgentCollector`.

    Attributes
    ----------
    reserve
        Takes the slot.
    slot
        The slot that the last batch was begun in; None if there was none. Some of its columns may lie elsewhere.
    weights_version
        The version of the policies' weights, which all rows have.
    """

    def __init__(self, environments: list[Any], **given: Any) -> None:
        super().__init__(environments, **given)
        self.reserve: Reserve | None = None
        self.slot: Reservation | None = None
        self.weights_version = 0

    def _opened(self, forecast: Forecast) -> FragmentRows:
        rows = forecast.rows()
        self.slot = slot = self.reserve(rows) if self.reserve is not None and rows else None
        return FragmentRows(forecast, None if slot is None else {policy_id: slot[policy_id] for policy_id in slot})

    def _stamps(self) -> dict[str, int]:
        return {**super()._stamps(), names.WEIGHTS_VERSION: self.weights_version}

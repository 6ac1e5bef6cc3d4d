"""Steps of several agents: one for each policy, of all its agents in all environments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.env.pettingzoo import AgentGroup, AgentOutcomes
from samplebatch.rollout.recorder import Block, Streams
from samplebatch.rollout.stacking import stack_rows


class PolicyStep:
    """The step of all agents of a policy that act next: observations, streams and, once it was asked, actions.

    Where the same agents act in the next step, its observations are the next ones of this.
    """

    __slots__ = ("actions", "columns", "groups", "observations", "starts", "streams", "t")

    def __init__(self, groups: list[AgentGroup]) -> None:
        self.groups = groups
        self.observations: Block = stack_rows(names.OBS, [seen for group in groups for seen in group.observations])
        eps_id, env_id, agent_index = (
            np.concatenate([getattr(group, name) for group in groups]) for name in ("eps_ids", "env_ids", "indices")
        )
        self.streams = Streams(eps_id, env_id, agent_index)
        self.t = np.array([group.adapter.t for group in groups for _ in group.agents])
        sizes = [len(group.agents) for group in groups]
        self.starts = dict(zip(groups, np.cumsum([0, *sizes]).tolist(), strict=False))
        self.actions: Sequence[Any] = ()
        self.columns: dict[str, Block] = {}

    def actions_of(self, group: AgentGroup) -> Sequence[Any]:
        """Return the actions of a group."""
        if len(self.groups) == 1:
            return self.actions
        start = self.starts[group]
        return self.actions[start : start + len(group.agents)]

    def advance(self, observations: Block) -> None:
        """Go on to the next step of the same agents."""
        self.observations = observations
        self.t = self.t + 1


def lay_end_to_end(outcomes: Sequence[AgentOutcomes]) -> Sequence[list[Any]]:
    """Join the outcomes of several groups, field by field; the agents' ids are left out."""
    if len(outcomes) == 1:
        return [[*part] for part in outcomes[0][1:]]
    return [[*chain.from_iterable(parts)] for parts in islice(zip(*outcomes, strict=True), 1, None)]

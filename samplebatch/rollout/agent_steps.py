"""Steps of several agents: one for each policy, of all its agents in all environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.env.agent_adapter import AgentGroup, AgentOutcomes, MultiAgentAdapter
from samplebatch.env.stacking import stack_rows
from samplebatch.names import PolicyID
from samplebatch.policy.agents import AgentActor, PolicyActors
from samplebatch.rollout.recorder import Block, Ints, Step, Streams, rows_of_block

Outcomes = Mapping[MultiAgentAdapter, Sequence[AgentOutcomes]]
"""The outcomes of the environments in which agents act at once: of each of their groups."""

_FURTHER = np.arange(1, 17)[:, None]
"""Times are counted on for so many steps at once."""


class PolicyStep:
    """The step of all agents of a policy that act next: observations, streams and, once it was asked, actions.

    Where the same agents act in the next step, its observations are the next ones of this.

    Parameters
    ----------
    policy_id, actor
        The policy.
    groups
        Its agents, at most one group of each environment.

    Attributes
    ----------
    parts
        The rows of each of the `groups`.
    """

    __slots__ = (
        "_actor",
        "_places",
        "_times",
        "actions",
        "columns",
        "groups",
        "observations",
        "parts",
        "policy_id",
        "streams",
        "t",
    )

    def __init__(self, policy_id: PolicyID, actor: AgentActor, groups: list[AgentGroup]) -> None:
        self.policy_id = policy_id
        self.groups = groups
        self.parts: list[slice] = []
        self.actions: Sequence[Any] = ()
        self.columns: dict[str, Block] = {}
        self._actor = actor
        self._places: dict[MultiAgentAdapter, int] = {}
        seen: list[Any] = []
        streams: list[Streams] = []
        t: list[int] = []
        for group in groups:
            self.parts.append(slice(len(t), len(t) + len(group.agents)))
            self._places[group.adapter] = group.adapter.groups.index(group)
            seen += group.observations
            streams.append(Streams(group.eps_ids, group.env_ids, group.indices))
            t += [group.adapter.t] * len(group.agents)
        self.observations: Block = stack_rows(names.OBS, seen)
        self.streams = streams[0] if len(streams) == 1 else Streams(*map(np.concatenate, zip(*streams, strict=True)))
        self.t = np.array(t)
        self._times = _count_on(self.t)

    def ask(self) -> None:
        """Ask the policy for the actions of all of its agents."""
        seen = self.observations
        self.actions, self.columns = self._actor.act(self.groups, seen if isinstance(seen, np.ndarray) else None)
        self.columns[names.OBS] = seen

    def end(self, outcomes: Outcomes) -> Step | None:
        """Put together the rows of agents that acted at once, and go on; None if there are no outcomes of theirs."""
        places, columns, streams, t = self._places, self.columns, self.streams, self.t
        if not outcomes.keys() >= places.keys():
            there = [part for part, adapter in zip(self.parts, places, strict=True) if adapter in outcomes]
            if not there:
                return None
            rows = [row for part in there for row in range(part.start, part.stop)]
            places = {adapter: place for adapter, place in places.items() if adapter in outcomes}
            columns = {name: rows_of_block(block, rows) for name, block in columns.items()}
            streams, t = Streams(*[part[rows] for part in streams]), t[rows]
        found: Sequence[Any] = [outcomes[adapter][place] for adapter, place in places.items()]
        over = [not adapter.groups for adapter in places]
        columns[names.EPS_DONE] = [False] * len(t) if True not in over else _repeat(over, found)
        # Those of several environments are laid end to end.
        joined = found[0] if len(found) == 1 else [[*chain.from_iterable(part)] for part in zip(*found, strict=True)]
        _, seen, columns[names.REWARDS], columns[names.TERMINATEDS], columns[names.TRUNCATEDS], infos = joined
        columns[names.NEXT_OBS] = self.observations = stack_rows(names.NEXT_OBS, seen)
        self.t = next(self._times)
        return self.policy_id, columns, streams, t, infos


Share = tuple[AgentGroup, PolicyStep, slice]
"""A group, the step of its policy, and the group's rows there."""


class JointStep:
    """The step of all agents that act next, for multi-agent collectors: a part for each policy.

    Where the same groups act in the next step, it is the next step, too.

    Parameters
    ----------
    acting
        The groups of each environment.
    actors
        The policies.

    Attributes
    ----------
    policy_steps
        The parts.
    shares
        The share of each group of each environment.
    """

    def __init__(self, acting: Sequence[list[AgentGroup]], actors: PolicyActors) -> None:
        by_policy: dict[PolicyID, list[AgentGroup]] = {}
        for group in chain.from_iterable(acting):
            by_policy.setdefault(group.policy_id, []).append(group)
        self.acting = acting
        self.policy_steps = [PolicyStep(policy_id, actors[policy_id], own) for policy_id, own in by_policy.items()]
        shares = {
            group: (group, step, part)
            for step in self.policy_steps
            for group, part in zip(step.groups, step.parts, strict=True)
        }
        self.shares: list[list[Share]] = [[shares[group] for group in groups] for groups in acting]


def _count_on(t: Ints) -> Iterator[Ints]:
    """Yield the times of the steps after one, shape (k,) each."""
    while True:
        times = t + _FURTHER
        yield from times
        t = times[-1]


def _repeat(flags: Sequence[bool], outcomes: Sequence[AgentOutcomes]) -> list[bool]:
    """Give every agent the flag of its environment."""
    return [flag for flag, own in zip(flags, outcomes, strict=True) for _ in own.agents]

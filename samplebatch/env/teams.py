"""Team: the agents of one environment that a policy acts for, and that act at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from samplebatch.env.pettingzoo import Run

Key = tuple[int, Any]
"""What tells an agent from those of other environments: `env_id` and the agent's id."""


class Team:
    """Agents of one environment that a policy acts for, and that are to act.

    Attributes
    ----------
    run
        Where they act.
    policy_id
        The policy.
    agents, keys
        Who they are, k of them.
    indices
        The `agent_index` of each.
    of_each
        Takes what belongs to them out of a mapping by agent: a tuple.
    observations, infos
        What each saw last, as the environment gave it, which may write over it in its next step.
    begins
        Whether each has not acted yet, since the episode began or it came back to life; None for nobody.
    actions
        What each does next, as the environment takes it.
    decided, at
        The decision that this is a part of, and where it begins there.
    owner
        Where what it sees and does is taken down; None if that is to be found.
    places
        The owner's notes about each agent.
    """

    __slots__ = (
        "actions",
        "agents",
        "at",
        "begins",
        "decided",
        "indices",
        "infos",
        "keys",
        "observations",
        "of_each",
        "owner",
        "places",
        "policy_id",
        "run",
    )

    def __init__(self, run: Run, policy_id: str, agents: list[Any], indices: list[int]) -> None:
        self.run = run
        self.policy_id = policy_id
        self.agents = agents
        self.keys: list[Key] = [(run.env_id, agent) for agent in agents]
        self.indices = indices
        self.of_each: Callable[[Any], tuple[Any, ...]] = itemgetter(*agents) if len(agents) > 1 else _only(agents[0])
        self.observations: Sequence[Any] = ()
        self.infos: Sequence[Any] = ()
        self.begins: list[bool] | None = None
        self.actions: Sequence[Any] = ()
        self.decided: Any = None
        self.at = 0
        self.places: list[Any] = []
        self.owner: Any = None


class Outcome(NamedTuple):
    """What came of a team's actions, an item an agent."""

    observations: Sequence[Any]
    rewards: Sequence[Any]
    terminateds: Sequence[Any]
    truncateds: Sequence[Any]
    infos: Sequence[Any]
    ended: bool
    """Whether any agent of the environment is terminated or truncated."""
    eps_done: bool
    """Whether the episode is over for all agents."""


class Acted(NamedTuple):
    """What one agent saw and did in a step that is not whole."""

    observation: Any
    action: Any
    further: dict[str, Any]
    """Further columns of its row."""


def _only(agent: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda by_agent: (by_agent[agent],)

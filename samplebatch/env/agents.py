"""Agents: which of them share a policy, and where each has its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

_NUMBERED = re.compile(r"(?P<kind>.*[^_\d])_?\d+")


def policy_by_kind(environment: Any) -> Callable[[Any], str]:
    """Map the agents of one kind to one policy: an agent's id without the number at its end.

    Agents whose ids differ in the number alone but whose spaces differ cannot share a batch, and get a policy each.

    Parameters
    ----------
    environment
        A PettingZoo environment, of either interface, or a `MultiAgentEnv` of RLlib's.

    Examples
    --------
    >>> from samplebatch.env.registry import make_environment
    >>> mapping = policy_by_kind(make_environment("mpe2/simple_tag_v3"))
    >>> [mapping(agent) for agent in ("adversary_0", "adversary_2", "agent_0")]
    ['adversary', 'adversary', 'agent']
    """
    spaces: dict[str, Any] = {}
    mixed = set()
    for agent in getattr(environment, "possible_agents", ()):
        own = (observation_space_of(environment, agent), action_space_of(environment, agent))
        if spaces.setdefault(kind_of(agent), own) != own:
            mixed.add(kind_of(agent))
    return partial(_policy_of, mixed=frozenset(mixed))


def _policy_of(agent: Any, *, mixed: frozenset[str]) -> str:
    kind = kind_of(agent)
    return str(agent) if kind in mixed else kind


def kind_of(agent: Any) -> str:
    """Take the number off the end of an agent's id.

    >>> [kind_of(agent) for agent in ("agent_0", "walker12", "red_knight", 3)]
    ['agent', 'walker', 'red_knight', 'agent']
    """
    if isinstance(agent, int):
        return "agent"
    found = _NUMBERED.fullmatch(str(agent))
    return found["kind"] if found else str(agent)


def observation_space_of(environment: Any, agent: Any) -> Any:
    """Return the space of an agent's observations; None where the environment does not tell.

    >>> from samplebatch.env.registry import make_environment
    >>> observation_space_of(make_environment("mpe2/simple_spread_v3"), "agent_0").shape
    (18,)
    """
    # RLlib's environments have the same names for their spaces, but no function.
    space_of = getattr(environment, "get_observation_space", None) or getattr(environment, "observation_space", None)
    return None if space_of is None else space_of(agent)


def action_space_of(environment: Any, agent: Any) -> Any:
    """Return the space of an agent's actions."""
    space_of = getattr(environment, "get_action_space", None) or environment.action_space
    return space_of(agent)


def agent_positions(environment: Any) -> dict[Any, int]:
    """Number the agents that the environment says are possible, in its order.

    >>> from samplebatch.env.registry import make_environment
    >>> agent_positions(make_environment("mpe2/simple_spread_v3"))
    {'agent_0': 0, 'agent_1': 1, 'agent_2': 2}
    """
    possible: Iterable[Any] = getattr(environment, "possible_agents", ())
    return {agent: position for position, agent in enumerate(possible)}

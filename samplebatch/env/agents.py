"""Agents: which of them share a policy, and where each has its place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from samplebatch.batch.multi_agent_builder import PolicyMapping
from samplebatch.errors import PolicyNotFoundError, near_names
from samplebatch.names import PolicyID

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


class Episode(NamedTuple):
    """The episode that a policy mapping is asked about, for self-play in which seats change.

    Attributes
    ----------
    eps_id
        Its id, unlike any other: 63 random bits.
    env_id
        Its environment.
    number
        How many episodes the environment had before; the same in every run, unlike `eps_id`.
    """

    eps_id: int
    env_id: int
    number: int

    @property
    def id_(self) -> int:
        """The id by the name under which RLlib's mapping functions read it."""
        return self.eps_id


class PolicyOfAgents:
    """The policies of agents as users map them, by agent or by agent and episode, for multi-agent collectors.

    Parameters
    ----------
    mapping
        A mapping from agent ids to policy ids, or a function of the agent id, or of the agent id and the `Episode`. A
        function gets the episode if it has a second parameter without a default, one named `episode`, or any number.

    Attributes
    ----------
    sees_episodes
        Whether the policy of an agent may be another in every episode.

    Examples
    --------
    >>> by_turns = PolicyOfAgents(lambda agent, episode: "even" if (agent + episode.number) % 2 == 0 else "odd")
    >>> [by_turns(agent, Episode(7, 0, number)) for number in range(2) for agent in range(2)]
    ['even', 'odd', 'odd', 'even']
    """

    def __init__(self, mapping: PolicyMapping) -> None:
        self._mapping = mapping
        self.sees_episodes = not isinstance(mapping, Mapping) and _takes_episode(mapping)

    def __call__(self, agent: Any, episode: Episode) -> PolicyID:
        """Find the policy that acts for an agent.

        Raises
        ------
        PolicyNotFoundError
            If a mapping lacks the agent; lists the near ones.
        """
        mapping = self._mapping
        if not isinstance(mapping, Mapping):
            return mapping(agent, episode) if self.sees_episodes else mapping(agent)
        if agent not in mapping:
            raise PolicyNotFoundError(
                f"agent {agent!r} must have a policy in policy_mapping; {near_names(agent, mapping)}"
            )
        return mapping[agent]


def _takes_episode(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return True
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return len(by_place) > 1 and (by_place[1].default is inspect.Parameter.empty or by_place[1].name == "episode")


def agent_positions(environment: Any) -> dict[Any, int]:
    """Number the agents that the environment says are possible, in its order.

    >>> from samplebatch.env.registry import make_environment
    >>> agent_positions(make_environment("mpe2/simple_spread_v3"))
    {'agent_0': 0, 'agent_1': 1, 'agent_2': 2}
    """
    possible: Iterable[Any] = getattr(environment, "possible_agents", ())
    return {agent: position for position, agent in enumerate(possible)}

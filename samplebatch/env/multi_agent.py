"""adapt_agents: the environment adapter for anything that a multi-agent collector steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samplebatch.env.pettingzoo import MultiAgentAdapter, ParallelAdapter, TurnBasedAdapter
from samplebatch.env.registry import environment_kind
from samplebatch.env.rllib import RLlibAdapter
from samplebatch.errors import EnvironmentSpecError
from samplebatch.names import PolicyID

_BY_KIND: dict[str, type[MultiAgentAdapter]] = {
    "parallel": ParallelAdapter,
    "aec": TurnBasedAdapter,
    "rllib": RLlibAdapter,
}


def adapt_agents(environment: Any, env_id: int, seed: int, policy_of: Callable[[Any], PolicyID]) -> MultiAgentAdapter:
    """Make the adapter of an environment of several agents; see `MultiAgentAdapter` for the arguments.

    Raises
    ------
    EnvironmentSpecError
        If it is none.
    """
    adapter = _BY_KIND.get(environment_kind(environment))
    if adapter is None:
        raise EnvironmentSpecError(
            "an environment of several agents must have one of PettingZoo's interfaces or RLlib's, got a "
            f"{type(environment).__name__}, which Collector steps"
        )
    return adapter(environment, env_id, seed, policy_of)

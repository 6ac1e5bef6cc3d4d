"""adapt_agents: the environment adapter for anything that a multi-agent collector steps."""

from __future__ import annotations

from typing import Any

from samplebatch.arguments import whole
from samplebatch.env.agent_adapter import MultiAgentAdapter
from samplebatch.env.agents import PolicyOfAgents
from samplebatch.env.as_environments import is_factory, make_all
from samplebatch.env.pettingzoo import ParallelAdapter, TurnBasedAdapter
from samplebatch.env.registry import environment_kind
from samplebatch.env.rllib import RLlibAdapter
from samplebatch.errors import EnvironmentSpecError

_BY_KIND: dict[str, type[MultiAgentAdapter]] = {
    "parallel": ParallelAdapter,
    "aec": TurnBasedAdapter,
    "rllib": RLlibAdapter,
}


def adapt_agents(environment: Any, env_id: int, seed: int, policy_of: PolicyOfAgents) -> MultiAgentAdapter:
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


def make_several(env: Any, num_envs: int) -> list[Any]:
    """Make the environments that a multi-agent collector is given: `num_envs` of a function or id, or those of a list.

    Raises
    ------
    ArgumentError
        If `num_envs` is no whole number from 1 on.
    EnvironmentSpecError
        If one cannot be made. Those made before it are closed.
    """
    whole("num_envs", num_envs, 1)
    if isinstance(env, list | tuple):
        return make_all(env)
    return make_all([env] * num_envs if is_factory(env) else [env])

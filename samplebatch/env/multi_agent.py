"""adapt_agents: the environment adapter for anything that a multi-agent collector steps."""

from __future__ import annotations

from typing import Any

from samplebatch.arguments import whole
from samplebatch.env.agent_adapter import MultiAgentAdapter
from samplebatch.env.agents import PolicyOfAgents
from samplebatch.env.as_environments import check_num_envs, is_factory, make_all
from samplebatch.env.environment_list import check_different
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
    try:
        kind = environment_kind(environment)
    except EnvironmentSpecError:
        raise EnvironmentSpecError(
            "env must be a PettingZoo environment or a MultiAgentEnv of RLlib's, a list of these, a function or an id, "
            f"got a {type(environment).__name__}"
        ) from None
    adapter = _BY_KIND.get(kind)
    if adapter is None:
        raise EnvironmentSpecError(
            "an environment of several agents must have one of PettingZoo's interfaces or RLlib's, got a "
            f"{type(environment).__name__}, which Collector steps"
        )
    return adapter(environment, env_id, seed, policy_of)


def make_several(env: Any, num_envs: int | None) -> list[Any]:
    """Make the environments that a multi-agent collector is given: `num_envs` of a function or id, or those of a list.

    Raises
    ------
    ArgumentError
        If `num_envs` is no whole number from 1 on, or another number than that of the environments given.
    EnvironmentSpecError
        If there is none, or one cannot be made, or stands in the list twice. Those made before it are closed.
    """
    if num_envs is not None:
        whole("num_envs", num_envs, 1)
    listed = isinstance(env, list | tuple)
    if not listed and is_factory(env):
        return make_all([env] * (num_envs or 1))
    given = env if listed else [env]
    check_num_envs(num_envs, len(given), env)
    if not given:
        raise EnvironmentSpecError("there must be at least one environment, got none")
    check_different(given)
    return make_all(given)

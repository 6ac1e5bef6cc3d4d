"""adapt_agents: the environment adapter for anything that a multi-agent collector steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from samplebatch.arguments import whole
from samplebatch.env.agents import PolicyOfAgents
from samplebatch.env.as_environments import is_factory, make_all
from samplebatch.env.environment_state import load_environments, save_environments
from samplebatch.env.pettingzoo import AgentGroup, MultiAgentAdapter, ParallelAdapter, TurnBasedAdapter
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


_APART = frozenset({"environment", "env_id", "groups", "_policy_of"})
"""Attributes of adapters that are no part of their state, or are saved in another form."""


class AdapterState:
    """The state of an environment of several agents and of the episode under way in it, for multi-agent collectors.

    Parameters
    ----------
    adapter
        The adapter.
    """

    def __init__(self, adapter: MultiAgentAdapter) -> None:
        self._adapter = adapter

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which can be pickled, for `load_state_dict`."""
        adapter = self._adapter
        groups = [
            (group.policy_id, group.agents, group.indices.tolist(), group.observations, group.infos, group.begins)
            for group in adapter.groups
        ]
        values = {name: value for name, value in vars(adapter).items() if name not in _APART}
        return {
            "saved": save_environments([adapter.environment]),
            **copy.deepcopy({"values": values, "groups": groups}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue where an environment made alike was; return whether that could be saved.

        Raises
        ------
        EnvironmentSpecError
            If it is of another class.
        """
        adapter = self._adapter
        if not load_environments([adapter.environment], state["saved"]):
            return False
        vars(adapter).update(copy.deepcopy(state["values"]))
        adapter.groups = []
        for policy_id, agents, indices, observations, infos, begins in copy.deepcopy(state["groups"]):
            group = AgentGroup(adapter, policy_id, agents, indices)
            group.observations, group.infos, group.begins = observations, infos, begins
            adapter.groups.append(group)
        return True

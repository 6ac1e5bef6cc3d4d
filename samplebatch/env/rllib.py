"""Adapter of RLlib's MultiAgentEnv.

Agents that receive an observation act next: all, some, or one at a time. An agent may therefore observe the outcome of
its action several steps later, with the sum of its rewards until then, and agents may join and leave.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from samplebatch import names
from samplebatch.column.casting import BOOL, FLOAT, exact_number
from samplebatch.env.agents import AgentOutcomes, MultiAgentAdapter, PolicyOfAgents, copy_observation

_ALL = "__all__"


class RLlibAdapter(MultiAgentAdapter):
    """Adapter of an RLlib `MultiAgentEnv` for multi-agent collectors.

    An agent's reward is the sum of its rewards since its last action; rewards before its first action are added to the
    first action's reward. `"__all__"` ends the episode for all remaining agents. A terminated agent without a new
    observation keeps its last one.
    """

    together = False

    def __init__(self, environment: Any, env_id: int, seed: int, policy_of: PolicyOfAgents) -> None:
        super().__init__(environment, env_id, seed, policy_of)
        self._waiting: dict[Any, float] = {}
        """Rewards of agents that have not observed the outcome of their last action."""
        self._early: dict[Any, float] = {}
        """Rewards of agents that have not acted yet."""
        self._seen: dict[Any, Any] = {}
        """Newest observation of each agent."""

    def abandon(self) -> None:
        super().abandon()
        self._waiting, self._early, self._seen = {}, {}, {}

    def _reset(self, seed: int | None, **arguments: Any) -> None:
        self.abandon()
        observations, infos = self.environment.reset(seed=seed, **arguments)
        self._await(observations, infos, ())

    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        pairs = zip(self.groups, actions, strict=True)
        actions_by_agent = {
            agent: action
            for group, group_actions in pairs
            for agent, action in zip(group.agents, group_actions, strict=True)
        }
        self._waiting |= {agent: self._early.pop(agent, 0.0) for agent in actions_by_agent}
        outcomes, is_over = self._advance(actions_by_agent)
        while not (self.groups or is_over):
            # If no agent acts next, step the environment without actions.
            more, is_over = self._advance({})
            outcomes += more
        return outcomes

    def _advance(self, actions: dict[Any, Any]) -> tuple[list[AgentOutcomes], bool]:
        """Step the environment once; return the observed outcomes, and whether the episode is over."""
        observations, rewards, terminateds, truncateds, infos = self.environment.step(actions)
        for agent, reward in rewards.items():
            pending = self._waiting if agent in self._waiting else self._early
            pending[agent] = pending.get(agent, 0.0) + exact_number(names.REWARDS, reward, FLOAT, self.refusing(agent))
        all_terminate = self._flag(names.TERMINATEDS, terminateds, _ALL)
        all_truncate = self._flag(names.TRUNCATEDS, truncateds, _ALL)
        outcomes: list[AgentOutcomes] = []
        acting: dict[Any, Any] = {}
        for agent in {**self._waiting, **observations}:
            terminated = all_terminate or self._flag(names.TERMINATEDS, terminateds, agent)
            truncated = self._flag(names.TRUNCATEDS, truncateds, agent) or (all_truncate and not terminated)
            ends = terminated or truncated
            if agent in self._waiting and (ends or agent in observations):
                reward = self._waiting.pop(agent)
                seen = self._last(agent, observations, truncated=truncated and not terminated)
                info = infos.get(agent, {})
                outcomes.append(AgentOutcomes([agent], [seen], [reward], [terminated], [truncated], [info]))
            if agent in observations and not ends:
                acting[agent] = observations[agent]
        self.t += 1
        self._await(acting, infos, {outcome.agents[0] for outcome in outcomes})
        return outcomes, all_terminate or all_truncate

    def _await(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any], going_on: Collection[Any]) -> None:
        for agent, seen in observations.items():
            if seen is None:
                raise self.refusing(agent)(f"column {names.OBS!r} must hold an observation, got None", None)
        # The environment may overwrite observations before the outcomes of actions are known.
        copies = {agent: copy_observation(seen) for agent, seen in observations.items()}
        self._seen |= copies
        self.groups = self._group(copies, copies, infos, going_on)

    def _last(self, agent: Any, observations: Mapping[Any, Any], *, truncated: bool) -> Any:
        if agent in observations:
            return observations[agent]
        if truncated:
            must = f"column {names.NEXT_OBS!r} must have a final observation for a truncated agent, got none"
            raise self.refusing(agent)(must, None)
        return self._seen[agent]

    def _flag(self, name: str, flags: Mapping[Any, Any], agent: Any) -> bool:
        return bool(exact_number(name, flags.get(agent, False), BOOL, self.refusing(agent)))

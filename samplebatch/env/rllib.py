"""RLlib's MultiAgentEnv behind the interface of environments of several agents.

Agents that get an observation act next: all at once, some of them, or one after the other. So an agent may see the
outcome of its action several steps later, with all rewards that it got by then, and agents may come and go.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from samplebatch import names
from samplebatch.column.casting import BOOL, FLOAT, exact_number
from samplebatch.env.agents import AgentOutcomes, MultiAgentAdapter, PolicyOfAgents, copy_observation

_ALL = "__all__"


class RLlibAdapter(MultiAgentAdapter):
    """Adapter of a `MultiAgentEnv` of RLlib's, for multi-agent collectors.

    An agent's reward is the sum of those since its last action; one from before its first action counts with that.
    The episode ends with `"__all__"`, for all agents that are still in it. A terminated agent that gets no observation
    keeps its last one.
    """

    together = False

    def __init__(self, environment: Any, env_id: int, seed: int, policy_of: PolicyOfAgents) -> None:
        super().__init__(environment, env_id, seed, policy_of)
        self._waiting: dict[Any, float] = {}
        """Rewards of the agents that have not seen the outcome of their last action."""
        self._early: dict[Any, float] = {}
        """Rewards of agents that have not acted yet."""
        self._seen: dict[Any, Any] = {}
        """The observation that each agent saw last."""

    def abandon(self) -> None:
        super().abandon()
        self._waiting, self._early, self._seen = {}, {}, {}

    def _reset(self, seed: int | None, **arguments: Any) -> None:
        self.abandon()
        observations, infos = self.environment.reset(seed=seed, **arguments)
        self._await(observations, infos, ())

    def step(self, actions: Sequence[Sequence[Any]]) -> list[AgentOutcomes]:
        pairs = zip(self.groups, actions, strict=True)
        given = {agent: action for group, own in pairs for agent, action in zip(group.agents, own, strict=True)}
        self._waiting |= {agent: self._early.pop(agent, 0.0) for agent in given}
        outcomes, is_over = self._advance(given)
        while not (self.groups or is_over):
            # Where nobody is to act, the environment goes on by itself.
            more, is_over = self._advance({})
            outcomes += more
        return outcomes

    def _advance(self, given: dict[Any, Any]) -> tuple[list[AgentOutcomes], bool]:
        """Step the environment once; return the outcomes that agents see with that, and whether the episode is over."""
        observations, rewards, terminateds, truncateds, infos = self.environment.step(given)
        for agent, reward in rewards.items():
            held = self._waiting if agent in self._waiting else self._early
            held[agent] = held.get(agent, 0.0) + exact_number(names.REWARDS, reward, FLOAT, self.refusing(agent))
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
        """Let the agents with an observation be the next to act."""
        for agent, seen in observations.items():
            if seen is None:
                raise self.refusing(agent)(f"column {names.OBS!r} must hold an observation, got None", None)
        # The environment may write over them before it is known what their agents' actions led to.
        kept = {agent: copy_observation(seen) for agent, seen in observations.items()}
        self._seen |= kept
        self.groups = self._group(kept, kept, infos, going_on)

    def _last(self, agent: Any, observations: Mapping[Any, Any], *, truncated: bool) -> Any:
        """Return the observation that an agent's action led to."""
        if agent in observations:
            return observations[agent]
        if truncated:
            must = f"column {names.NEXT_OBS!r} must hold the last observation of an agent that is truncated, got none"
            raise self.refusing(agent)(must, None)
        return self._seen[agent]

    def _flag(self, name: str, flags: Mapping[Any, Any], agent: Any) -> bool:
        return bool(exact_number(name, flags.get(agent, False), BOOL, self.refusing(agent)))

"""Multi-agent tasks of the learning benchmark: learning curves, evaluation, and agents as single environments.

Single-agent learners train one policy for all agents of a team, as in PettingZoo's tutorials. Each agent is one
environment of a vector environment; the team steps after all its agents have acted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from pettingzoo.utils import BaseParallelWrapper

from benchmarks.training.tasks import Act, Curve, Task


class WatchedTeam(BaseParallelWrapper):  # type: ignore[misc, type-arg]
    """Parallel environment that records its steps and the mean return of its agents in a curve."""

    def __init__(self, env: Any, curve: Curve) -> None:
        super().__init__(env)
        self._curve, self._return = curve, 0.0

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self._return = 0.0
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        results = self.env.step(actions)
        self._curve.steps += 1
        self._return += float(np.mean([*results[1].values()]))
        if not self.env.agents:
            self._curve.points.append((self._curve.steps, self._return))
        return results


def play_team(make: Callable[[], Any], act: Act, episodes: int, seed: int = 10_000) -> list[float]:
    """Run episodes in a new environment and return the mean return of the agents per episode."""
    env, returns = make(), []
    for number in range(episodes):
        obs, _ = env.reset(seed=seed + number)
        total = 0.0
        while env.agents:
            agents = list(env.agents)
            actions, _ = act(np.stack([obs[agent] for agent in agents]), None)
            obs, rewards, *_ = env.step({agent: int(action) for agent, action in zip(agents, actions, strict=True)})
            total += float(np.mean([*rewards.values()]))
        returns.append(total)
    env.close()
    return returns


class Seat(gymnasium.Env[Any, Any]):
    """Single-agent environment of one agent of a team, for vector environments that send all actions at once."""

    def __init__(self, env: Any, agent: str, sent: dict[str, Any], received: dict[str, Any]) -> None:
        self.observation_space, self.action_space = env.observation_space(agent), env.action_space(agent)
        self._team, self._agent, self._sent, self._received = env, agent, sent, received

    def send(self, action: Any) -> None:
        """Send an action, or None to reset; the team steps after all its agents have sent."""
        self._sent[self._agent] = action
        if len(self._sent) < len(self._team.possible_agents):
            return
        actions = dict(self._sent)
        self._sent.clear()
        if action is None:
            obs, _ = self._team.reset()
            self._received.update({agent: (obs[agent], {}) for agent in obs})
            return
        obs, rewards, terminated, truncated, _ = self._team.step(actions)
        self._received.update(
            {agent: (obs[agent], rewards[agent], terminated[agent], truncated[agent], {}) for agent in obs}
        )

    def receive(self) -> Any:
        """Return the result of the last step or reset."""
        return self._received.pop(self._agent)


def seats(task: Task, curve: Curve, seed: int) -> list[Seat]:
    """Create one environment per agent of a task's teams; the teams have consecutive seeds."""
    teams = []
    for number in range(task.envs):
        env = WatchedTeam(task.make(), curve)
        env.reset(seed=seed + number)
        sent: dict[str, Any] = {}
        received: dict[str, Any] = {}
        teams += [Seat(env, agent, sent, received) for agent in env.possible_agents]
    return teams

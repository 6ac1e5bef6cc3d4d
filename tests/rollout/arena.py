"""Small parallel environments, each with a habit of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import SyncVectorEnv
from pettingzoo import AECEnv, ParallelEnv

Step = tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]


class Relay(ParallelEnv):
    """Runners that join before step 2k and leave after step 2k + 3, for runner k; episodes have eight steps.

    An observation is (step, runner), written into one array that every step reuses; the reward is 100 * step + runner.
    """

    metadata: ClassVar = {"name": "relay"}
    possible_agents: ClassVar = ["runner_0", "runner_1", "runner_2"]

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        self._buffers = {agent: np.zeros(2, np.float32) for agent in self.possible_agents}
        self._spaces = {agent: Discrete(5) for agent in self.possible_agents}
        self.closed = False

    def observation_space(self, agent: str) -> Box:
        return Box(-np.inf, np.inf, (2,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        return self._spaces[agent]

    def _observe(self, agent: str) -> np.ndarray:
        self._buffers[agent][:] = self._step, int(agent[-1])
        return self._buffers[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._step = 0
        self.agents = ["runner_0"]
        return {"runner_0": self._observe("runner_0")}, {"runner_0": {}}

    def step(self, actions: dict[str, Any]) -> Step:
        time.sleep(self._pause_s)
        acted, now = self.agents, self._step
        assert sorted(actions) == sorted(acted)
        self._step += 1
        leaving = {agent: now == 2 * int(agent[-1]) + 3 for agent in acted}
        joining = [agent for agent in self.possible_agents if self._step == 2 * int(agent[-1]) > 0]
        self.agents = [agent for agent in acted if not leaving[agent]] + joining
        return (
            {agent: self._observe(agent) for agent in [*acted, *joining]},
            {agent: 100 * now + int(agent[-1]) for agent in acted},
            leaving,
            dict.fromkeys(acted, False),
            {agent: {"now": now} for agent in acted},
        )

    def close(self) -> None:
        self.closed = True


def slow_relay() -> Relay:
    return Relay(pause_s=0.002)


class Announcing(Relay):
    """Slow relay that creates the file named in `ARENA_STARTED` after twenty steps."""

    made = 0

    def step(self, actions: dict[str, Any]) -> Step:
        self.made += 1
        if self.made == 20:
            Path(os.environ["ARENA_STARTED"]).touch()
        time.sleep(0.002)
        return super().step(actions)


class Failing(Relay):
    """Relay that raises an error in its thirtieth step."""

    made = 0

    def step(self, actions: dict[str, Any]) -> Step:
        self.made += 1
        if self.made == 30:
            raise RuntimeError("the baton was dropped")
        return super().step(actions)


class Hanging(Relay):
    """Relay that never returns from its thirtieth step and ignores SIGTERM."""

    made = 0

    def step(self, actions: dict[str, Any]) -> Step:
        self.made += 1
        if self.made == 30:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        return super().step(actions)


class Forgetful(Relay):
    """Relay that omits the reward of leaving runners."""

    def step(self, actions: dict[str, Any]) -> Step:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        return observations, {a: r for a, r in rewards.items() if not terminations[a]}, terminations, truncations, infos


class Deserted(Relay):
    """Relay without runners."""

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed)
        self.agents = []
        return {}, {}


class Nested(Relay):
    """Relay whose observations are dicts that every step reuses."""

    def _observe(self, agent: str) -> Any:
        return {"where": super()._observe(agent), "who": int(agent[-1])}


class Mixed(ParallelEnv):
    """Two robots with different observation spaces, and two lamps with equal ones."""

    metadata: ClassVar = {"name": "mixed"}
    possible_agents: ClassVar = ["robot_0", "robot_1", "lamp_0", "lamp_1"]
    widths: ClassVar = {"robot_0": 2, "robot_1": 3, "lamp_0": 1, "lamp_1": 1}

    def observation_space(self, agent: str) -> Box:
        return Box(0, 1, (self.widths[agent],), np.float32)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def _observations(self) -> dict[str, Any]:
        return {agent: np.zeros(self.widths[agent], np.float32) for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents = list(self.possible_agents)
        return self._observations(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Step:
        everyone = self.possible_agents
        return (
            self._observations(),
            dict.fromkeys(everyone, 0),
            dict.fromkeys(everyone, False),
            dict.fromkeys(everyone, False),
            {agent: {} for agent in everyone},
        )


def whose(agent: str) -> str:
    """Map each agent to a separate policy."""
    return f"policy of {agent}"


def steady(obs: np.ndarray) -> np.ndarray:
    return np.ones(len(obs), np.int64)


def not_an_environment() -> object:
    return object()


def vector_of_carts() -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)


class Bazaar(AECEnv):
    """Turn-based traders in an irregular order.

    Trader k leaves after k + 2 of its turns; all traders leave after 9 turns. In turn t, the acting trader receives the
    reward 10 t, and the other active traders receive t. An observation is (turn, trader), written into one array that
    every turn reuses. The mask allows one action per turn.
    """

    metadata: ClassVar = {"name": "bazaar"}
    possible_agents: ClassVar = ["trader_0", "trader_1", "trader_2"]
    order: ClassVar = [2, 0, 0, 1, 2, 2, 1, 0, 2, 1, 0, 2]

    def __init__(self) -> None:
        self._buffer = np.zeros(2, np.float32)

    def observation_space(self, agent: str) -> Dict:
        return Dict(observation=Box(-np.inf, np.inf, (2,), np.float32), action_mask=Box(0, 1, (4,), np.int8))

    def action_space(self, agent: str) -> Discrete:
        return Discrete(4)

    def observe(self, agent: str) -> dict[str, Any]:
        self._buffer[:] = self.turn, int(agent[-1])
        return {"observation": self._buffer, "action_mask": np.arange(4) == self.turn % 4}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.turn = 0
        self.agents = list(self.possible_agents)
        self.turns = dict.fromkeys(self.agents, 0)
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self._choose()

    def _choose(self) -> None:
        living = [agent for agent in self.agents if not (self.terminations[agent] or self.truncations[agent])]
        if living:
            self.agent_selection = living[self.order[self.turn % len(self.order)] % len(living)]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert action == self.turn % 4
        self._cumulative_rewards[agent] = 0
        self.turn += 1
        self.turns[agent] += 1
        self.rewards = {item: self.turn * (10 if item == agent else 1) for item in self.agents}
        self._accumulate_rewards()
        self.terminations[agent] = self.turns[agent] == int(agent[-1]) + 2
        if self.turn == 9:
            self.truncations = dict.fromkeys(self.agents, True)
        self.infos = {item: {"turn": self.turn} for item in self.agents}
        self._choose()
        self._deads_step_first()

    def close(self) -> None:
        self.closed = True


class Immortal(Bazaar):
    """Bazaar that never removes dead agents."""

    def _was_dead_step(self, action: Any) -> None:
        pass


class Abrupt(Bazaar):
    """Bazaar that ends without a last turn for its traders."""

    def step(self, action: Any) -> None:
        super().step(action)
        if self.turn == 5:
            self.agents = []

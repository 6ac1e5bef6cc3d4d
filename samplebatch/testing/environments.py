"""Small environments with predictable steps for the test suites of collectors, and checks of collected steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.concat import join
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import SampleBatchError, require
from samplebatch.rollout.postprocessing import Trajectory


class RungError(RuntimeError):
    """Error that a `ladder` raises in a failing step."""


def ladder(
    number: int, length: int = 4, *, truncates: bool = False, fails_at: int | None = None, odd_at: int | None = None
) -> Any:
    """Create a Gymnasium environment with episodes of fixed length.

    An observation is `(number, episode, step)`, float32. The reward of a step is `100 * number + step`, and the info is
    `{"step": step}`; `step` is counted from 1. Actions are 0, 1 or 2.

    truncates: whether episodes end by truncation.
    fails_at: step, counted from 1 over all episodes, in which `RungError` is raised. odd_at: step whose observation has
    a different shape.

    >>> env = ladder(7, length=2)
    >>> env.reset()
    (array([7., 0., 0.], dtype=float32), {})
    >>> env.step(0)
    (array([7., 0., 1.], dtype=float32), 701.0, False, False, {'step': 1})
    """
    return _ladder_class()(number, length, truncates, fails_at, odd_at)


def walk(number: int = 0) -> Any:
    """Create a Gymnasium environment that moves left or right randomly until it is four steps from its start.

    An observation is the position, float64, shape (1,); the reward is a random number.
    """
    return _walk_class()()


@cache
def _ladder_class() -> Any:
    gymnasium: Any = require("gymnasium", "envs")

    class Ladder(gymnasium.Env):  # type: ignore[misc]
        """Episodes of fixed length."""

        metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

        def __init__(self, number: int, length: int, truncates: bool, fails_at: int | None, odd_at: int | None) -> None:
            self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
            self.action_space = gymnasium.spaces.Discrete(3)
            self._number, self._length, self._truncates = number, length, truncates
            self._fails_at, self._odd_at = fails_at, odd_at
            self._episode, self._num_steps = -1, 0

        def _observe(self) -> Any:
            # A new array each time: with same-step autoreset, Gymnasium stores final observations by reference.
            return np.array([self._number, self._episode, self._step], np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self._episode += 1
            self._step = 0
            return self._observe(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if self._step >= self._length:
                raise AssertionError("an environment must be reset after its episode has ended, got a step")
            self._num_steps += 1
            if self._num_steps == self._fails_at:
                raise RungError("the rung broke")
            self._step += 1
            obs = self._observe() if self._num_steps != self._odd_at else np.zeros(4, np.float32)
            over, info = self._step == self._length, {"step": self._step}
            ends = over and not self._truncates, over and self._truncates
            return obs, 100.0 * self._number + self._step, *ends, info

    return Ladder


@cache
def _walk_class() -> Any:
    gymnasium: Any = require("gymnasium", "envs")

    class Walk(gymnasium.Env):  # type: ignore[misc]
        """A random walk."""

        metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

        def __init__(self) -> None:
            self.observation_space = gymnasium.spaces.Box(-5, 5, (1,), np.float64)
            self.action_space = gymnasium.spaces.Discrete(3)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self._position = 0
            return np.zeros(1), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self._position += 1 if self.np_random.random() < 0.5 else -1
            return (
                np.array([float(self._position)]),
                float(self.np_random.random()),
                abs(self._position) == 4,
                False,
                {},
            )

    return Walk


class Relay:
    """Parallel PettingZoo environment whose agents join and leave during an episode.

    Runner k of three joins before step 2k and leaves after step 2k + 3; an episode has eight steps. An observation is
    `(step, runner)`, float32, written to the same array in every step. The reward is `100 * step + runner`, and the
    info is `{"now": step}`. Actions are 0 to 4.

    fails_at: step, counted from 1 over all episodes, in which `RungError` is raised. odd_at: step whose rewards are
    None.

    length, rows: environment steps and agent steps per episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "relay"}
    possible_agents: ClassVar[list[str]] = ["runner_0", "runner_1", "runner_2"]
    length: ClassVar[int] = 8
    rows: ClassVar[int] = 12

    def __init__(self, *, fails_at: int | None = None, odd_at: int | None = None) -> None:
        spaces = require("gymnasium.spaces", "envs")
        self._observations = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self._actions = {agent: spaces.Discrete(5) for agent in self.possible_agents}
        self._arrays = {agent: np.zeros(2, np.float32) for agent in self.possible_agents}
        self._fails_at, self._odd_at, self._num_steps = fails_at, odd_at, 0
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        """Return the observation space of an agent."""
        return self._observations

    def action_space(self, agent: str) -> Any:
        """Return the action space of an agent."""
        return self._actions[agent]

    def _observe(self, agent: str) -> Any:
        self._arrays[agent][:] = self._step, int(agent[-1])
        return self._arrays[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode with the first runner."""
        self._step = 0
        self.agents = ["runner_0"]
        return {"runner_0": self._observe("runner_0")}, {"runner_0": {}}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Execute the actions of all active runners."""
        acted, now = self.agents, self._step
        if sorted(actions) != sorted(acted):
            raise AssertionError(f"an action must be passed for each of {acted}, got {sorted(actions)}")
        self._num_steps += 1
        if self._num_steps == self._fails_at:
            raise RungError("the baton was dropped")
        self._step += 1
        leaving = {agent: now == 2 * int(agent[-1]) + 3 for agent in acted}
        joining = [agent for agent in self.possible_agents if self._step == 2 * int(agent[-1]) > 0]
        self.agents = [agent for agent in acted if not leaving[agent]] + joining
        rewards = {agent: None if self._num_steps == self._odd_at else 100.0 * now + int(agent[-1]) for agent in acted}
        observations = {agent: self._observe(agent) for agent in [*acted, *joining]}
        return observations, rewards, leaving, dict.fromkeys(acted, False), {agent: {"now": now} for agent in acted}

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""


class Market:
    """Turn-based PettingZoo environment whose agents pay each other and leave one by one.

    Trader k of three leaves after k + 2 of its turns, and all traders leave after seven turns. In every turn, the
    reward of each active trader is the turn number, except that the acting trader's reward is ten times the turn
    number. An observation is `(turn, trader)`, float32; the info is `{"turn": turn}`. Actions are 0 to 3.

    fails_at: turn, counted from 1 over all episodes, in which `RungError` is raised. odd_at: turn after which `last`
    returns None as the reward.

    length, rows: environment steps and agent steps per episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "market"}
    possible_agents: ClassVar[list[str]] = ["trader_0", "trader_1", "trader_2"]
    length: ClassVar[int] = 7
    rows: ClassVar[int] = 7

    def __init__(self, *, fails_at: int | None = None, odd_at: int | None = None) -> None:
        spaces = require("gymnasium.spaces", "envs")
        self._observations = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self._actions = spaces.Discrete(4)
        self._fails_at, self._odd_at, self._num_steps = fails_at, odd_at, 0
        self._array = np.zeros(2, np.float32)
        self.agents: list[str] = []
        self.agent_selection = ""

    def observation_space(self, agent: str) -> Any:
        """Return the observation space of an agent."""
        return self._observations

    def action_space(self, agent: str) -> Any:
        """Return the action space of an agent."""
        return self._actions

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        """Start an episode with the first trader's turn."""
        self._turn = 0
        self.agents = list(self.possible_agents)
        self._own_turns = dict.fromkeys(self.agents, 0)
        self._paid = dict.fromkeys(self.agents, 0.0)
        self._out: dict[str, bool] = dict.fromkeys(self.agents, False)
        self.agent_selection = self.agents[0]

    def last(self, observe: bool = True) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Return the trader's observation, rewards since its last turn, flags and info."""
        agent = self.agent_selection
        self._array[:] = self._turn, int(agent[-1])
        is_odd = self._turn > 0 and self._num_steps == self._odd_at
        terminated = self._out[agent]
        truncated = self._turn == self.length and not terminated
        return self._array, None if is_odd else self._paid[agent], terminated, truncated, {"turn": self._turn}

    def step(self, action: Any) -> None:
        """Execute the trader's action; an action of None removes a trader that has no further turn."""
        agent = self.agent_selection
        over = self._turn == self.length
        if self._out[agent] or over:
            if action is not None:
                raise AssertionError("a dead agent must be stepped with None")
            self.agents.remove(agent)
            self._choose(agent)
            return
        self._num_steps += 1
        if self._num_steps == self._fails_at:
            raise RungError("the scales broke")
        self._turn += 1
        self._own_turns[agent] += 1
        self._paid[agent] = 0.0
        for other in self.agents:
            self._paid[other] += self._turn * (10.0 if other == agent else 1.0)
        self._out[agent] = self._own_turns[agent] == int(agent[-1]) + 2
        self._choose(agent)

    def _choose(self, agent: str) -> None:
        """Select a dead agent if one exists, otherwise the next agent in cyclic order."""
        waiting = [trader for trader in self.agents if self._out[trader]] or self.agents
        later = [trader for trader in waiting if trader > agent]
        self.agent_selection = (later or waiting or [""])[0]

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""


DTYPES = {
    names.REWARDS: np.float64,
    names.TERMINATEDS: np.bool_,
    names.TRUNCATEDS: np.bool_,
    names.INFOS: np.object_,
    names.EPS_ID: np.int64,
    names.ENV_ID: np.int64,
    names.AGENT_INDEX: np.int64,
    names.T: np.int64,
    names.UNROLL_ID: np.int64,
}
"""Dtypes of columns that do not depend on the environment."""


def check(holds: Any, sentence: str) -> None:
    """Raise AssertionError with a message unless a condition holds.

    >>> check(np.array([True, False]).all(), "rewards must equal the environment's")
    Traceback (most recent call last):
    AssertionError: rewards must equal the environment's
    """
    if not holds:
        raise AssertionError(sentence)


def check_steps(batch: SampleBatch, *, together: bool = True) -> None:
    """Check that the rows of each stream are contiguous and in time order, and that no trajectory has gaps.

    Parameters
    ----------
    batch
        Collected steps, with the columns that all collectors store.
    together
        Whether every agent acts in every environment step, so that `t` has no gaps; False for turn-based environments.

    Raises
    ------
    AssertionError
        If a column is missing or has a wrong dtype, a stream is not contiguous, time decreases, an observation is not
        the next observation of the previous step, or an episode continues after its end.
    """
    for name in (names.OBS, names.NEXT_OBS, names.ACTIONS, *DTYPES):
        check(name in batch, f"a batch of steps must have a column {name!r}, got {', '.join(map(repr, batch))}")
    for name, dtype in DTYPES.items():
        check(batch[name].dtype == dtype, f"column {name!r} must have dtype {np.dtype(dtype)}, got {batch[name].dtype}")
    if not len(batch):
        return
    env_id, agent, eps_id, t = (
        np.asarray(batch[name]) for name in (names.ENV_ID, names.AGENT_INDEX, names.EPS_ID, names.T)
    )
    check((eps_id >= 0).all(), "column 'eps_id' must not be negative")
    stream = _changes(env_id) | _changes(agent)
    pieces = np.flatnonzero(stream)
    streams = set(zip(env_id[pieces].tolist(), agent[pieces].tolist(), strict=True))
    check(len(streams) == len(pieces), "the steps of an agent must be contiguous")
    begins = stream | _changes(eps_id)
    starts = np.flatnonzero(begins)
    episodes = set(zip(env_id[starts].tolist(), agent[starts].tolist(), eps_id[starts].tolist(), strict=True))
    check(len(episodes) == len(starts), "the steps of an episode must be contiguous")
    inside = ~begins[1:]
    ahead = np.diff(t)[inside]
    check((ahead == 1).all() if together else (ahead > 0).all(), "column 't' must increase within an episode")
    check((t >= 0).all(), "column 't' must count from 0")
    done = np.asarray(batch[names.TERMINATEDS]) | np.asarray(batch[names.TRUNCATEDS])
    check(not done[:-1][inside].any(), "no episode must continue after its terminated or truncated step")
    same_stream = ~stream[1:]
    check(done[:-1][same_stream & begins[1:]].all(), "an episode must end before the next episode of its stream starts")
    obs, new_obs = np.asarray(batch[names.OBS]), np.asarray(batch[names.NEXT_OBS])
    check(
        np.array_equal(new_obs[:-1][inside], obs[1:][inside]),
        "column 'obs' must equal 'new_obs' of the previous step",
    )


def by_stream(batches: list[SampleBatch]) -> dict[tuple[int, int], SampleBatch]:
    """Concatenate the steps of each stream over several batches; a stream is a pair of `env_id` and `agent_index`."""
    parts_by_key: dict[tuple[int, int], list[SampleBatch]] = {}
    for batch in batches:
        keys = list(zip(batch[names.ENV_ID].tolist(), batch[names.AGENT_INDEX].tolist(), strict=True))
        for key in dict.fromkeys(keys):
            rows = [row for row, stream in enumerate(keys) if stream == key]
            parts_by_key.setdefault(key, []).append(batch.take(rows))
    return {key: join(parts) for key, parts in parts_by_key.items()}


def number_rows(trajectory: Trajectory, others: Mapping[Any, Trajectory]) -> None:
    """Hook that adds the column `place`: the index of each step in its trajectory, from 0."""
    trajectory.steps["place"] = np.arange(trajectory.steps.count)


def says(error: BaseException, kind: type[BaseException], words: str) -> bool:
    """Return whether an error has type `kind` or is a library error, and its message contains `words`."""
    return words in str(error) and isinstance(error, (kind, SampleBatchError))


def _changes(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the first row and of every row that differs from the previous row."""
    marks = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=marks[1:])
    return marks

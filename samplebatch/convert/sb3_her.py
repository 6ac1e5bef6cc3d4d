"""Stable-Baselines3: a hindsight replay buffer that replaces its `HerReplayBuffer`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import choice, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.hindsight import achieved_after, relabel
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.sequences import find_episodes, shift_slots
from samplebatch.convert.cleanrl import TransitionSamples
from samplebatch.convert.sb3_replay import SB3ReplayBuffer
from samplebatch.errors import ArgumentError, EmptyBufferError, MissingExtraError, require

_STRATEGIES = ("future", "final", "episode")


class SB3HerReplayBuffer(SB3ReplayBuffer):
    """Replay buffer with hindsight goals for `replay_buffer_class` of Stable-Baselines3 (arXiv:1707.01495).

    Accepts the arguments of `HerReplayBuffer`; algorithms also pass their environment. Only finished episodes whose
    steps are all stored are sampled. With one environment and a ring that is not yet full, draws are the same as
    Stable-Baselines3's; otherwise they have the same distribution.

    Parameters
    ----------
    buffer_size, observation_space, action_space
        As for `SB3ReplayBuffer`; the observation space has `observation`, `achieved_goal` and `desired_goal`.
    env
        Environment whose `compute_reward(achieved, desired, infos)` returns the rewards of new goals; `infos` are
        empty dicts. The environment is not pickled.
    n_sampled_goal
        Relabelled transitions per transition with its own goal.
    goal_selection_strategy
        Step whose achieved goal is used: `"future"`, this one or a later one; `"final"`, the last; `"episode"`, any.
    **kwargs
        As for `SB3ReplayBuffer`, without `n_steps`, `alpha` and `beta`.

    Raises
    ------
    ArgumentError
        If a number is out of range, the strategy is unknown, or `n_steps` or `alpha` is given.
    MissingExtraError
        If Stable-Baselines3 is not installed.

    Examples
    --------
    >>> from stable_baselines3 import DQN
    >>> from stable_baselines3.common.envs import BitFlippingEnv
    >>> model = DQN(
    ...     "MultiInputPolicy",
    ...     BitFlippingEnv(n_bits=4),
    ...     learning_starts=20,
    ...     replay_buffer_class=SB3HerReplayBuffer,
    ...     replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"},
    ...     device="cpu",
    ... )
    >>> model.learn(40).replay_buffer.size()
    40
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        env: Any,
        *args: Any,
        n_sampled_goal: int = 4,
        goal_selection_strategy: Literal["future", "final", "episode"] = "future",
        **kwargs: Any,
    ) -> None:
        super().__init__(buffer_size, observation_space, action_space, *args, **kwargs)
        if self.n_steps is not None or "alpha" in kwargs:
            raise ArgumentError("n_steps, alpha and beta must be None for a buffer with goals; use SB3ReplayBuffer")
        self.env: Any = env
        self.n_sampled_goal = whole("n_sampled_goal", n_sampled_goal)
        self.her_ratio = 1 - 1 / (self.n_sampled_goal + 1)
        strategy = getattr(goal_selection_strategy, "name", goal_selection_strategy)
        strategy = strategy.lower() if isinstance(strategy, str) else strategy
        self.goal_selection_strategy = choice("goal_selection_strategy", strategy, _STRATEGIES)
        self._goals: tuple[Ints, Ints] | None = None

    @classmethod
    def _register(cls) -> None:
        super()._register()
        require("stable_baselines3.her", "sb3").HerReplayBuffer.register(SB3HerReplayBuffer)

    def set_env(self, env: Any) -> None:
        """Set the environment that computes rewards, after unpickling.

        Raises
        ------
        ArgumentError
            If the buffer already has an environment.
        """
        if self.env is not None:
            raise ArgumentError("env must be set only once, got a second environment")
        self.env = env

    def truncate_last_trajectory(self) -> None:
        """Truncate the running episodes, so that they can be sampled."""
        with self.buffer._table.lock:
            for index in self.buffer.unfinished_index().tolist():
                self.buffer._table.truncate_newest(index)
            self._is_running[:] = False

    def sample(self, batch_size: int, env: Any = None) -> TransitionSamples:
        """Draw transitions with replacement: original goals first, relabelled transitions last.

        Parameters
        ----------
        batch_size
            Number of transitions; `n_sampled_goal / (n_sampled_goal + 1)` of the number, rounded down, are relabelled.
        env
            A `VecNormalize` that normalizes observations and rewards; None returns them as stored.

        Raises
        ------
        ArgumentError
            If `batch_size` is not an integer of at least 1, or no environment is set.
        EmptyBufferError
            If there is no finished episode.
        """
        with self.buffer._table.lock:
            return super().sample(batch_size, env)

    def _draw(self, batch_size: int) -> Ints:
        if self.env is None:
            raise ArgumentError("an environment must be set to compute rewards of new goals; call set_env")
        table = self.buffer._table
        rings = table.rings
        episodes = find_episodes(rings, table.done)
        candidates = np.flatnonzero(episodes.whole & episodes.finished)
        if not len(candidates):
            raise EmptyBufferError(
                "a buffer with goals must have a finished episode to draw from, got none; set learning_starts "
                "above the length of an episode"
            )
        first, length = episodes.first[candidates], episodes.length[candidates]
        stops = np.cumsum(length)
        picks = np.random.randint(0, int(stops[-1]), size=batch_size)
        episode = np.searchsorted(stops, picks, "right")
        offset = picks - (stops - length)[episode]
        relabelled = slice(0, int(self.her_ratio * batch_size))
        goal_offset = self._draw_goals(offset[relabelled], length[episode[relabelled]])
        # Transitions with their own goal come first.
        order = np.roll(np.arange(batch_size), -relabelled.stop)
        goal_slots = shift_slots(rings, first[episode[relabelled]], goal_offset)
        self._goals = np.arange(batch_size - relabelled.stop, batch_size), goal_slots
        return shift_slots(rings, first[episode], offset)[order]

    def _draw_goals(self, offset: Ints, length: Ints) -> Ints:
        """Draw the steps whose achieved goals replace the desired goals, as offsets in their episodes."""
        if self.goal_selection_strategy == "final" or not len(offset):
            return length - 1
        low = offset if self.goal_selection_strategy == "future" else 0
        return np.random.randint(low, length)

    def _rows(self, slots: Ints) -> Batch:
        rows = super()._rows(slots)
        if self._goals is None:
            return rows
        (chosen, goal_slots), self._goals = self._goals, None
        table = self.buffer._table
        goals = achieved_after(table, goal_slots)
        return relabel(table, slots, rows, goals, chosen, self._compute_rewards)

    def _compute_rewards(self, achieved: Any, desired: Any) -> npt.NDArray[Any]:
        infos: list[dict[str, Any]] = [{} for _ in range(len(achieved))]
        if hasattr(self.env, "env_method"):
            rewards = self.env.env_method("compute_reward", achieved, desired, infos, indices=[0])[0]
        else:
            rewards = self.env.unwrapped.compute_reward(achieved, desired, infos)
        return np.asarray(rewards, np.float32)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"env": None}


with suppress(MissingExtraError):
    # Algorithms pass their environment to subclasses of HerReplayBuffer when they create a buffer.
    SB3HerReplayBuffer._register()

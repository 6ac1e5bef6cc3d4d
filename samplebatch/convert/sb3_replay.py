"""Stable-Baselines3: a replay buffer for the `replay_buffer_class` of its off-policy algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.nested.node import values_of
from samplebatch.convert.cleanrl import CleanRLReplayBuffer, TransitionSamples
from samplebatch.errors import require


class SB3ReplayBuffer(CleanRLReplayBuffer):
    """Replay buffer for `replay_buffer_class` of Stable-Baselines3's DQN, SAC, TD3 and DDPG.

    Pass `n_steps`, `alpha`, `beta`, `compress` and other options in `replay_buffer_kwargs`. Uniform draws are the same
    as Stable-Baselines3's, so an algorithm with the same seed learns the same parameters. Its algorithms apply n-step
    returns, but importance weights and `update_priorities` require your own `train` method. For goals, use
    `SB3HerReplayBuffer`.

    Parameters
    ----------
    *args, **kwargs
        As for `CleanRLReplayBuffer`. With `optimize_memory_usage`, truncations are not treated as terminations.

    Raises
    ------
    ArgumentError
        If a number is out of range, or only one of `alpha` and `beta` is given.
    MissingExtraError
        If Stable-Baselines3 is not installed.

    Examples
    --------
    >>> from stable_baselines3 import DQN
    >>> model = DQN(
    ...     "MlpPolicy",
    ...     "CartPole-v1",
    ...     buffer_size=1000,
    ...     learning_starts=50,
    ...     replay_buffer_class=SB3ReplayBuffer,
    ...     replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99},
    ...     device="cpu",
    ... )
    >>> model.learn(100).replay_buffer.size()
    100
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._register()
        super().__init__(*args, **kwargs)
        self._env: Any = None

    @classmethod
    def _register(cls) -> None:
        """Register the class as a virtual subclass of Stable-Baselines3's replay buffer, for `isinstance` checks."""
        require("stable_baselines3.common.buffers", "sb3").ReplayBuffer.register(SB3ReplayBuffer)

    def sample(self, batch_size: int, env: Any = None) -> TransitionSamples:
        """Draw transitions with replacement.

        Parameters
        ----------
        batch_size
            Number of transitions.
        env
            A `VecNormalize` that normalizes observations and rewards; None returns them as stored.

        Raises
        ------
        ArgumentError
            If `batch_size` is not an integer of at least 1.
        EmptyBufferError
            If the buffer is empty.
        """
        with self.buffer._table.lock:
            self._env = env
            try:
                return self._transitions(self._draw(whole("batch_size", batch_size, 1)))
            finally:
                self._env = None

    def _normalize_observations(self, obs: Any) -> Any:
        if self._env is None:
            return obs
        parts = values_of(obs)
        return self._env.normalize_obs(obs if parts is None else dict(parts))

    def _normalize_rewards(self, rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if self._env is None:
            return rewards
        normalized: npt.NDArray[np.float32] = self._env.normalize_reward(rewards).astype(np.float32)
        return normalized

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._register()
        self.__dict__.update(state)

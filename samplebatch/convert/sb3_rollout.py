"""Stable-Baselines3: a rollout buffer for the `rollout_buffer_class` of PPO and A2C."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import fraction, whole
from samplebatch.batch.delivery import as_array, require_device
from samplebatch.batch.nested.node import values_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.convert.cleanrl import find_device, fit_observation, fit_rows
from samplebatch.errors import CapacityError, EmptyBufferError
from samplebatch.returns.arrays import gae

_FLOAT = np.dtype(np.float32)


class RolloutSamples(NamedTuple):
    """A minibatch of a rollout as tensors, with the field names of Stable-Baselines3."""

    observations: Any
    """Shape (n, ...); a dict of tensors for a Dict space."""
    actions: Any
    """float32, shape (n, action_dim)."""
    old_values: Any
    """Value estimates of the behaviour policy, shape (n,)."""
    old_log_prob: Any
    """Log-probabilities of the behaviour policy, shape (n,)."""
    advantages: Any
    """Shape (n,)."""
    returns: Any
    """Value targets, shape (n,)."""


class SB3RolloutBuffer:
    """Rollout buffer for `rollout_buffer_class` of Stable-Baselines3's PPO and A2C.

    Advantages are computed by the compiled `samplebatch.returns.gae`. Minibatches are drawn in the same order as
    Stable-Baselines3's. `to_sample_batch` returns the rollout over the same memory.

    Parameters
    ----------
    buffer_size
        Steps per environment and rollout.
    observation_space, action_space
        Spaces of a single environment.
    device
        Device of minibatches; `"auto"` is the GPU if there is one.
    gae_lambda, gamma
        Decay of the advantage estimates, and discount per step.
    n_envs
        Number of environments.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    DeviceError
        If torch cannot use the device.

    Examples
    --------
    >>> from stable_baselines3 import PPO
    >>> model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, rollout_buffer_class=SB3RolloutBuffer, device="cpu")
    >>> model.learn(64).rollout_buffer.to_sample_batch()["advantages"].shape
    (64,)
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: Any = "auto",
        gae_lambda: float = 1.0,
        gamma: float = 0.99,
        n_envs: int = 1,
    ) -> None:
        self.buffer_size, self.n_envs = whole("buffer_size", buffer_size, 1), whole("n_envs", n_envs, 1)
        self.observation_space, self.action_space = observation_space, action_space
        self.device = find_device() if isinstance(device, str) and device == "auto" else require_device(device)
        self.gae_lambda, self.gamma = fraction("gae_lambda", gae_lambda), fraction("gamma", gamma)
        self._action_dim = int(np.prod(action_space.shape, dtype=int))
        self.reset()

    def reset(self) -> None:
        """Remove all steps; batches of earlier rollouts keep their memory."""
        self.pos = 0
        # Rows are stored environment by environment, so that flattening a rollout needs no copy.
        self._columns: dict[str, Any] = {names.OBS: self._allocate(self.observation_space)}
        self._columns[names.ACTIONS] = self._zeros((self._action_dim,), self.action_space.dtype)
        for name in (names.REWARDS, names.VF_PREDS, names.ACTION_LOGP, names.ADVANTAGES, names.VALUE_TARGETS):
            self._columns[name] = self._zeros((), _FLOAT)
        self._starts = self._zeros((), np.bool_)
        self._last_dones = np.zeros(self.n_envs, np.bool_)

    def _allocate(self, space: Any) -> Any:
        spaces = getattr(space, "spaces", None)
        if isinstance(spaces, Mapping):
            return {name: self._allocate(part) for name, part in spaces.items()}
        return self._zeros(space.shape or (1,), space.dtype)

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        return np.zeros((self.n_envs, self.buffer_size, *shape), dtype)

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        """Add one step of each environment.

        Parameters
        ----------
        obs
            Observations, shape (n_envs, ...); a dict of arrays for a Dict space.
        action
            Actions, shape (n_envs, ...).
        reward, episode_start, value, log_prob
            Rewards, whether the step starts an episode, value estimates and log-probabilities, shape (n_envs,).

        Raises
        ------
        CapacityError
            If the buffer is full; call `reset`.
        ColumnMismatchError
            If an argument does not have the shape of its space; names it.
        """
        if self.full:
            raise CapacityError(f"a rollout must have at most {self.buffer_size} steps per environment; call reset")
        lead = (self.n_envs,)
        actions = fit_rows("action", action, np.dtype(self.action_space.dtype), (*lead, self._action_dim))
        numbers = {names.REWARDS: reward, names.VF_PREDS: value, names.ACTION_LOGP: log_prob}
        step = {names.OBS: fit_observation("obs", obs, self.observation_space, self.n_envs), names.ACTIONS: actions}
        step |= {name: fit_rows(name, number, _FLOAT, lead) for name, number in numbers.items()}
        starts = fit_rows("episode_start", episode_start, np.dtype(np.bool_), lead)
        for name, rows in step.items():
            self._write(self._columns[name], rows)
        self._starts[:, self.pos] = starts
        self.pos += 1

    def _write(self, column: Any, rows: Any) -> None:
        if isinstance(column, dict):
            for name, part in column.items():
                self._write(part, rows[name])
        else:
            column[:, self.pos] = rows

    def compute_returns_and_advantage(self, last_values: Any, dones: Any) -> None:
        """Compute advantages and value targets by GAE (arXiv:1506.02438).

        Parameters
        ----------
        last_values
            Value estimates after the last step, shape (n_envs,) or (n_envs, 1).
        dones
            Whether the last step ended its episode, shape (n_envs,).

        Raises
        ------
        EmptyBufferError
            If the rollout is incomplete.
        ColumnMismatchError
            If an argument does not have one value per environment.
        """
        self._require_full()
        values = self._columns[names.VF_PREDS]
        self._last_dones = fit_rows("dones", dones, np.dtype(np.bool_), (self.n_envs,))
        after = fit_rows("last_values", last_values, _FLOAT, (self.n_envs,))
        next_values = np.concatenate([values[:, 1:], after[:, None]], axis=1)
        is_last = np.zeros((self.n_envs, self.buffer_size), np.bool_)
        is_last[:, -1] = True
        returns, advantages = gae(
            self._columns[names.REWARDS].reshape(-1),
            self._dones(),
            is_last.reshape(-1),
            values=values.reshape(-1),
            next_values=next_values.reshape(-1),
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        self._columns[names.ADVANTAGES].reshape(-1)[:] = advantages
        self._columns[names.VALUE_TARGETS].reshape(-1)[:] = returns

    def _dones(self) -> npt.NDArray[np.bool_]:
        return np.concatenate([self._starts[:, 1:], self._last_dones[:, None]], axis=1).reshape(-1)

    def get(self, batch_size: int | None = None) -> Iterator[RolloutSamples]:
        """Iterate over all steps in random minibatches.

        Parameters
        ----------
        batch_size
            Steps per minibatch; None for all in one.

        Raises
        ------
        ArgumentError
            If `batch_size` is less than 1.
        EmptyBufferError
            If the rollout is incomplete.
        """
        self._require_full()
        count = self.buffer_size * self.n_envs
        size = count if batch_size is None else whole("batch_size", batch_size, 1)
        # Scripts seed NumPy's global generator.
        order = np.random.permutation(count)
        return (self._minibatch(order[start : start + size]) for start in range(0, count, size))

    def _minibatch(self, rows: npt.NDArray[np.intp]) -> RolloutSamples:
        numbers = (names.VF_PREDS, names.ACTION_LOGP, names.ADVANTAGES, names.VALUE_TARGETS)
        actions = self._flat(names.ACTIONS)[rows].astype(_FLOAT, copy=False)
        parts = [self._flat(name)[rows] for name in numbers]
        obs = _select(self._columns[names.OBS], rows)
        return RolloutSamples(*(self._deliver(value) for value in (obs, actions, *parts)))

    def _deliver(self, value: Any) -> Any:
        import torch

        parts = values_of(value)
        if parts is not None:
            return {name: self._deliver(part) for name, part in parts.items()}
        return torch.as_tensor(value, device=self.device)

    def _flat(self, name: str) -> npt.NDArray[Any]:
        column = self._columns[name]
        flat: npt.NDArray[Any] = column.reshape(-1, *column.shape[2:])
        return flat

    def _require_full(self) -> None:
        if not self.full:
            raise EmptyBufferError(f"a rollout must have {self.buffer_size} steps per environment, got {self.pos}")

    def to_sample_batch(self) -> SampleBatch:
        """Return a complete rollout under RLlib's names, environment by environment, over the same memory.

        Raises
        ------
        EmptyBufferError
            If the rollout is incomplete.
        """
        self._require_full()
        count = self.buffer_size * self.n_envs
        starts = self._starts.copy()
        starts[:, 0] = True
        columns = {name: self._flat(name) for name in self._columns if name != names.OBS}
        columns[names.OBS] = _select(self._columns[names.OBS], slice(0, count))
        if not self.action_space.shape:
            columns[names.ACTIONS] = columns[names.ACTIONS].reshape(-1)
        env_id = np.repeat(np.arange(self.n_envs), self.buffer_size)
        ids = {names.ENV_ID: env_id, names.EPS_ID: np.cumsum(starts.reshape(-1)) - 1}
        return SampleBatch({**columns, names.DONES: self._dones(), **ids})

    def size(self) -> int:
        """Return the number of steps per environment."""
        return self.pos

    @property
    def full(self) -> bool:
        """Whether the rollout is complete."""
        return self.pos == self.buffer_size

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """Value estimates, environment by environment, shape (buffer_size * n_envs,)."""
        return as_array(self._flat(names.VF_PREDS))

    @property
    def returns(self) -> npt.NDArray[np.float32]:
        """Value targets, environment by environment, shape (buffer_size * n_envs,)."""
        return as_array(self._flat(names.VALUE_TARGETS))

    @property
    def advantages(self) -> npt.NDArray[np.float32]:
        """Advantages, environment by environment, shape (buffer_size * n_envs,)."""
        return as_array(self._flat(names.ADVANTAGES))


def _select(column: Any, rows: Any) -> Any:
    """Select flat rows of a column or of a dict of columns, shape (n_envs, buffer_size, ...) each."""
    if isinstance(column, dict):
        return {name: _select(part, rows) for name, part in column.items()}
    return column.reshape(-1, *column.shape[2:])[rows]

"""Conversion of Stable-Baselines3's buffers, and classes that replace the replay, hindsight and rollout buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import errors, names
from samplebatch.arguments import choice, fraction, whole
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.delivery import as_array, require_device
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import values_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.hindsight import achieved_after, relabel
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.sequences import find_episodes, shift_slots
from samplebatch.column.casting import as_flags
from samplebatch.convert.cleanrl import (
    CleanRLReplayBuffer,
    TransitionSamples,
    find_device,
    fit_observation,
    fit_rows,
    observation_form,
)
from samplebatch.convert.experience import Source, arrays_of, flags_of, require_columns, steps_as_recorded
from samplebatch.returns.arrays import gae

if TYPE_CHECKING:
    from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer, RolloutBuffer


_NAMES = names.PEERS["stable_baselines3"]
_ESTIMATES = (names.VF_PREDS, names.ACTION_LOGP, names.ADVANTAGES, names.VALUE_TARGETS)


# Reading


def from_sb3(buffer: BaseBuffer) -> SampleBatch:
    """Return the steps of a Stable-Baselines3 buffer, grouped by environment, in time order.

    Off-policy algorithms store scaled actions. If all actions of a replay buffer are within [-1, 1] and the action
    space is a bounded Box, `action_unit` therefore records that the actions are scaled. If there is one environment and
    the ring has not wrapped around, columns are views of the buffer's arrays. `env_id` is the index of the environment,
    and `eps_id` is the index of the episode.

    Parameters
    ----------
    buffer
        A `ReplayBuffer`, a `RolloutBuffer`, or the dict variant of either class. The steps of a rollout buffer have
        `dones`, `vf_preds`, `action_logp`, `advantages` and `value_targets`, but neither `terminateds` nor `new_obs`.

    Raises
    ------
    ColumnTypeError
        If `buffer` is neither a replay buffer nor a rollout buffer of Stable-Baselines3.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> from stable_baselines3.common.buffers import ReplayBuffer
    >>> theirs = ReplayBuffer(10, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), "cpu")
    >>> obs = np.ones((1, 3))
    >>> theirs.add(obs, obs, np.array([1]), np.array([0.5]), np.array([False]), [{}])
    >>> from_sb3(theirs)["actions"]
    array([1])
    """
    if hasattr(buffer, "episode_starts"):
        columns = _rollout_columns(buffer)
    elif hasattr(buffer, "timeouts"):
        columns = _replay_columns(buffer)
    else:
        raise errors.ColumnTypeError(
            f"buffer must be a Stable-Baselines3 replay or rollout buffer, got a {type(buffer).__name__}"
        )
    n, envs = len(columns[names.REWARDS]), buffer.n_envs
    env_id = np.repeat(np.arange(envs), n // envs)
    done = columns.get(names.DONES)
    done = columns[names.TERMINATEDS] | columns[names.TRUNCATEDS] if done is None else done
    # The last step of an environment is the last stored step of its episode.
    done = done | np.append(env_id[1:] != env_id[:-1], True)
    batch = SampleBatch({**columns, names.ENV_ID: env_id, names.EPS_ID: np.cumsum(done) - done})
    unit = _unit_of(buffer.action_space)
    if hasattr(buffer, "timeouts") and unit is not None and np.all(np.abs(batch[names.ACTIONS]) <= 1.0):
        batch.action_unit = unit
    return batch


def _replay_columns(buffer: Any) -> dict[str, Any]:
    size, pos = buffer.buffer_size, buffer.pos
    shared = buffer.optimize_memory_usage
    # With one array for both observations, the newest observation has overwritten the oldest step's observation.
    positions = slice(0, pos) if not buffer.full else (np.arange(pos + bool(shared), pos + size) % size)
    if buffer.full and pos == 0 and not shared:
        positions = slice(0, size)
    obs, following = buffer.observations, buffer.observations if shared else buffer.next_observations
    after = (np.arange(size)[positions] + 1) % size if shared else positions
    dones = as_flags(_rows(buffer.dones, positions), names.DONES)
    truncated = as_flags(_rows(buffer.timeouts, positions), names.TRUNCATEDS) & dones
    return {
        names.OBS: _spaced(obs, positions, buffer.observation_space),
        names.NEXT_OBS: _spaced(following, after, buffer.observation_space),
        names.ACTIONS: _spaced(buffer.actions, positions, buffer.action_space),
        names.REWARDS: _rows(buffer.rewards, positions),
        names.TERMINATEDS: dones & ~truncated,
        names.TRUNCATEDS: truncated,
    }


def _rollout_columns(buffer: Any) -> dict[str, Any]:
    steps = buffer.buffer_size if buffer.full else buffer.pos
    positions = slice(0, steps)
    starts = np.vstack([buffer.episode_starts[1:steps], np.zeros((1, buffer.n_envs), np.float32)])
    # The first call to `get` flattens these arrays environment by environment.
    flat = bool(buffer.generator_ready)
    columns = {
        names.OBS: _spaced(buffer.observations, positions, buffer.observation_space, flat=flat),
        names.ACTIONS: _spaced(buffer.actions, positions, buffer.action_space, flat=flat),
        names.REWARDS: _rows(buffer.rewards, positions),
        names.DONES: as_flags(_rows(starts, slice(None)), "episode_starts"),
    }
    return columns | {name: _rows(getattr(buffer, _NAMES[name]), positions, flat=flat) for name in _ESTIMATES}


def _spaced(values: Any, positions: Any, space: Any, *, flat: bool = False) -> Any:
    """Reshape rows to the shape of their space, and remove the axis that Stable-Baselines3 adds to scalars."""
    if isinstance(values, dict):
        return {name: _spaced(value, positions, space[name], flat=flat) for name, value in values.items()}
    return _rows(values, positions, space.shape, flat=flat)


def _rows(values: Any, positions: Any, shape: tuple[int, ...] = (), *, flat: bool = False) -> npt.NDArray[Any]:
    """Reshape T rows of an array of shape (size, n, ...) to shape (T * n, ...), grouped by environment."""
    if not flat:
        values = values[positions].swapaxes(0, 1)
    flattened: npt.NDArray[Any] = values.reshape(-1, *shape)
    return flattened


# Writing


def to_sb3_replay(
    source: Source,
    observation_space: Any,
    action_space: Any,
    *,
    capacity: int | None = None,
    n_envs: int = 1,
    device: Any = "auto",
) -> ReplayBuffer:
    """Copy steps into a replay buffer of Stable-Baselines3, to initialize an off-policy algorithm.

    If the unit of the actions is known, actions of a Box are scaled to [-1, 1], as off-policy algorithms require; other
    actions are copied unchanged. The buffer stores rewards and actions as 32-bit floats, and observations in the dtype
    of their space; floats are rounded. Columns that are not part of a transition are omitted.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.
    observation_space, action_space
        Spaces of the environment; a Dict space creates a `DictReplayBuffer`.
    capacity
        Total capacity in steps; None for the number of steps in `source`.
    n_envs
        Number of environments that will add steps. The given steps are divided evenly among the environments, in time
        order.
    device
        Torch device of samples.

    Raises
    ------
    ArgumentError
        If the number of steps is not divisible by `n_envs`.
    CapacityError
        If there are more steps than `capacity`.
    ColumnNotFoundError, ColumnMismatchError, ColumnTypeError
        If a required column is missing, or its values do not match their space.
    MissingExtraError
        If Stable-Baselines3 is not installed.
    """
    buffers = errors.require("stable_baselines3.common.buffers", "sb3")
    steps = steps_as_recorded(source)
    require_columns(steps.batch, names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS)
    n = steps.batch.count
    length = _share(n, n_envs)
    size = n if capacity is None else whole("capacity", capacity, 1)
    if size // n_envs < length:
        raise errors.CapacityError(f"capacity must be at least {n}, the number of steps, got {size}")
    kind = buffers.DictReplayBuffer if hasattr(observation_space, "spaces") else buffers.ReplayBuffer
    buffer: ReplayBuffer = kind(size, observation_space, action_space, device, n_envs)
    terminated, truncated = flags_of(steps.batch)
    for name, theirs in ((names.OBS, buffer.observations), (names.NEXT_OBS, buffer.next_observations)):
        _fill(theirs, arrays_of(steps.batch, name), name, length)
    actions, unit, target_unit = arrays_of(steps.batch, names.ACTIONS), steps.batch.action_unit, _unit_of(action_space)
    if unit is not None and target_unit is not None and unit != target_unit:
        actions = target_unit.from_environment(unit.to_environment(actions))
    _fill(buffer.actions, actions, names.ACTIONS, length)
    _fill(buffer.rewards, arrays_of(steps.batch, names.REWARDS), names.REWARDS, length)
    _fill(buffer.dones, terminated | truncated, names.DONES, length)
    _fill(buffer.timeouts, truncated & ~terminated, names.TRUNCATEDS, length)
    buffer.full, buffer.pos = length == buffer.buffer_size, length % buffer.buffer_size
    return buffer


def to_sb3_rollout(
    source: Source,
    observation_space: Any,
    action_space: Any,
    *,
    n_envs: int = 1,
    gamma: float = 0.99,
    gae_lambda: float = 1.0,
    device: Any = "auto",
) -> RolloutBuffer:
    """Copy steps into a full rollout buffer of Stable-Baselines3, for training with PPO or A2C.

    Actions are copied as recorded, because `action_logp` refers to the recorded actions.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments, with `vf_preds` and `action_logp`. If `source` has no
        `advantages` and `value_targets`, call `compute_returns_and_advantage` on the result.
    observation_space, action_space
        Spaces of the environment; a Dict space creates a `DictRolloutBuffer`.
    n_envs
        Number of environments, among which the steps are divided evenly, in time order.
    gamma, gae_lambda
        Discount factor and GAE lambda with which the buffer computes advantages.
    device
        Torch device of samples.

    Raises
    ------
    ArgumentError
        If the number of steps is not divisible by `n_envs`.
    ColumnNotFoundError, ColumnMismatchError, ColumnTypeError
        If a required column is missing, or its values do not match their space.
    MissingExtraError
        If Stable-Baselines3 is not installed.
    """
    buffers = errors.require("stable_baselines3.common.buffers", "sb3")
    steps = steps_as_recorded(source)
    batch = steps.batch
    require_columns(batch, names.OBS, names.ACTIONS, names.REWARDS, names.VF_PREDS, names.ACTION_LOGP)
    length = _share(batch.count, n_envs)
    kind = buffers.DictRolloutBuffer if hasattr(observation_space, "spaces") else buffers.RolloutBuffer
    buffer: RolloutBuffer = kind(length, observation_space, action_space, device, gae_lambda, gamma, n_envs)
    for name in (names.OBS, names.ACTIONS, names.REWARDS, *_ESTIMATES):
        if name in batch:
            _fill(getattr(buffer, _NAMES[name]), arrays_of(batch, name), name, length)
    starts = np.zeros(batch.count, np.bool_)
    starts[steps.bounds[:-1]] = True
    _fill(buffer.episode_starts, starts, "episode_starts", length)
    buffer.full, buffer.pos = True, length
    return buffer


def _unit_of(space: Any) -> ActionUnit | None:
    """Return the unit of actions in replay buffers: scaled to [-1, 1] for a bounded Box, otherwise None."""
    if not hasattr(space, "low") or not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        return None
    return ActionUnit("scale", space.low, space.high)


def _share(n: int, n_envs: int) -> int:
    if n % whole("n_envs", n_envs, 1):
        raise errors.ArgumentError(
            f"n_envs must divide the number of steps, which is {n}, got {n_envs}; drop {n % n_envs}"
        )
    return n // n_envs


def _fill(theirs: Any, values: Any, name: str, length: int) -> None:
    """Copy rows that are grouped by environment to the start of arrays of shape (size, n_envs, ...)."""
    if isinstance(theirs, dict):
        if not isinstance(values, dict) or values.keys() != theirs.keys():
            parts = ", ".join(values) if isinstance(values, dict) else "a single array"
            raise errors.ColumnMismatchError(
                f"column {name!r} must have the parts of its space, {', '.join(theirs)}, got {parts}"
            )
        for part, inner in theirs.items():
            _fill(inner, values[part], f"{name}.{part}", length)
        return
    if isinstance(values, dict | tuple):
        raise errors.ColumnMismatchError(
            f"column {name!r} must be a single array for a space other than Dict, got nested columns"
        )
    n, size = len(values), int(np.prod(theirs.shape[2:], dtype=int))
    if values[0].size != size:
        raise errors.ColumnMismatchError(
            f"column {name!r} must have rows of shape {theirs.shape[2:]} to fit its space, got {values.shape[1:]}"
        )
    if not np.can_cast(values.dtype, theirs.dtype, "same_kind") and values.dtype.kind != "b":
        raise errors.ColumnTypeError(
            f"column {name!r} must be convertible to {theirs.dtype}, the dtype of its space, got {values.dtype}"
        )
    rows = values.reshape(n // length, length, *theirs.shape[2:]).swapaxes(0, 1)
    theirs[:length] = rows


# Buffers for Stable-Baselines3's algorithms


class SB3ReplayBuffer(CleanRLReplayBuffer):
    """Replay buffer for `replay_buffer_class` of Stable-Baselines3's DQN, SAC, TD3 and DDPG.

    Pass `n_steps`, `alpha`, `beta`, `compress` and other options in `replay_buffer_kwargs`. Uniform sampling draws the
    same rows as Stable-Baselines3, so an algorithm with the same seed learns the same parameters as with
    Stable-Baselines3's buffer. Stable-Baselines3's algorithms apply n-step returns, but neither use importance weights
    nor call `update_priorities`. For prioritized replay, override the algorithm's `train` method. For goal-conditioned
    environments, use `SB3HerReplayBuffer`.

    Parameters
    ----------
    *args, **kwargs
        As in `CleanRLReplayBuffer`. With `optimize_memory_usage`, the buffer still distinguishes truncations from
        terminations.

    Raises
    ------
    ArgumentError
        If a numeric argument is out of range, or only one of `alpha` and `beta` is passed.
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
        errors.require("stable_baselines3.common.buffers", "sb3").ReplayBuffer.register(SB3ReplayBuffer)

    def sample(self, batch_size: int, env: Any = None) -> TransitionSamples:
        """Draw transitions with replacement.

        Parameters
        ----------
        batch_size
            Number of transitions.
        env
            A `VecNormalize` that normalizes observations and rewards; None for the stored values.

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


_STRATEGIES = ("future", "final", "episode")


class SB3HerReplayBuffer(SB3ReplayBuffer):
    """Replay buffer with hindsight goals for `replay_buffer_class` of Stable-Baselines3 (arXiv:1707.01495).

    The constructor accepts the arguments of `HerReplayBuffer`; algorithms pass their environment as `env`. Only
    finished episodes whose steps are all stored are sampled. With one environment and a ring that is not full yet, the
    buffer samples the same transitions as Stable-Baselines3; otherwise, the sampled transitions have the same
    distribution as in Stable-Baselines3.

    Parameters
    ----------
    buffer_size, observation_space, action_space
        As in `SB3ReplayBuffer`; the observation space is a Dict with `observation`, `achieved_goal` and `desired_goal`.
    env
        Environment whose `compute_reward(achieved, desired, infos)` returns the rewards for relabelled goals; `infos`
        are empty dicts. The environment is not pickled.
    n_sampled_goal
        Number of relabelled transitions per transition with its original goal.
    goal_selection_strategy
        Step whose achieved goal replaces the desired goal: `"future"` for the same or a later step, `"final"` for the
        last step, or `"episode"` for any step of the episode.
    **kwargs
        As in `SB3ReplayBuffer`, without `n_steps`, `alpha` and `beta`.

    Raises
    ------
    ArgumentError
        If a numeric argument is out of range, the strategy is unknown, or `n_steps` or `alpha` is passed.
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
            raise errors.ArgumentError(
                f"n_steps, alpha and beta must be None for SB3HerReplayBuffer, got n_steps={self.n_steps} and "
                f"alpha={kwargs.get('alpha')}; use SB3ReplayBuffer"
            )
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
        errors.require("stable_baselines3.her", "sb3").HerReplayBuffer.register(SB3HerReplayBuffer)

    def set_env(self, env: Any) -> None:
        """Set the environment that computes rewards; a call is required after unpickling.

        Raises
        ------
        ArgumentError
            If the buffer already has an environment.
        """
        if self.env is not None:
            raise errors.ArgumentError("env must be set only once, got a second environment")
        self.env = env

    def truncate_last_trajectory(self) -> None:
        """Truncate the running episodes, so that their steps can be sampled."""
        with self.buffer._table.lock:
            for index in self.buffer.unfinished_index().tolist():
                self.buffer._table.truncate_newest(index)
            self._expected = None

    def sample(self, batch_size: int, env: Any = None) -> TransitionSamples:
        """Draw transitions with replacement; relabelled transitions follow the transitions with original goals.

        Parameters
        ----------
        batch_size
            Number of transitions; `batch_size * n_sampled_goal / (n_sampled_goal + 1)` of them, rounded down, are
            relabelled.
        env
            A `VecNormalize` that normalizes observations and rewards; None for the stored values.

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
            raise errors.ArgumentError("env must be set to compute rewards of relabelled goals, got None; call set_env")
        table = self.buffer._table
        rings = table.rings
        episodes = find_episodes(rings, table.done)
        candidates = np.flatnonzero(episodes.complete & episodes.finished)
        if not len(candidates):
            raise errors.EmptyBufferError(
                "a buffer must contain a finished episode before sampling, got none; set learning_starts "
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
        """Draw the steps whose achieved goals replace the desired goals; return their offsets within the episodes."""
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


with suppress(errors.MissingExtraError):
    # Algorithms pass their environment to subclasses of HerReplayBuffer when they create a buffer.
    SB3HerReplayBuffer._register()


_FLOAT = np.dtype(np.float32)


class RolloutSamples(NamedTuple):
    """Minibatch of a rollout as tensors, with the field names of Stable-Baselines3."""

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

    Advantages are computed by the compiled `samplebatch.returns.gae`. Minibatches are drawn in the same order as in
    Stable-Baselines3. `to_sample_batch` returns the rollout without a copy.

    Parameters
    ----------
    buffer_size
        Number of steps per environment in a rollout.
    observation_space, action_space
        Spaces of a single environment.
    device
        Torch device of minibatches; `"auto"` selects the GPU if one is available, otherwise the CPU.
    gae_lambda, gamma
        GAE lambda (decay of the advantage estimates), and discount factor per step.
    n_envs
        Number of environments.

    Raises
    ------
    ArgumentError
        If a numeric argument is out of range.
    DeviceError
        If torch cannot use the device.

    Examples
    --------
    >>> from stable_baselines3 import PPO
    >>> model = PPO(
    ...     "MlpPolicy",
    ...     "CartPole-v1",
    ...     n_steps=64,
    ...     rollout_buffer_class=SB3RolloutBuffer,
    ...     device="cpu",
    ... )
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
        self._observation_form = observation_form(observation_space, self.n_envs)
        self.reset()

    def reset(self) -> None:
        """Remove all steps and allocate new memory, so that batches of earlier rollouts stay valid."""
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
            Rewards, whether each step starts an episode, value estimates and log-probabilities, shape (n_envs,).

        Raises
        ------
        CapacityError
            If the buffer is full; call `reset`.
        ColumnMismatchError
            If the shape of an argument does not match its space.
        """
        if self.full:
            raise errors.CapacityError(
                f"a rollout must contain at most {self.buffer_size} steps per environment, got another; call reset"
            )
        lead = (self.n_envs,)
        actions = fit_rows("action", action, (np.dtype(self.action_space.dtype), (*lead, self._action_dim)))
        numbers = {names.REWARDS: reward, names.VF_PREDS: value, names.ACTION_LOGP: log_prob}
        step = {names.OBS: fit_observation("obs", obs, self._observation_form), names.ACTIONS: actions}
        step |= {name: fit_rows(name, number, (_FLOAT, lead)) for name, number in numbers.items()}
        starts = fit_rows("episode_start", episode_start, (np.dtype(np.bool_), lead))
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
            If an argument does not contain one value per environment.
        """
        self._require_full()
        values = self._columns[names.VF_PREDS]
        self._last_dones = fit_rows("dones", dones, (np.dtype(np.bool_), (self.n_envs,)))
        after = fit_rows("last_values", last_values, (_FLOAT, (self.n_envs,)))
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
            Number of steps per minibatch; None for a single minibatch.

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
            raise errors.EmptyBufferError(
                f"a rollout must contain {self.buffer_size} steps per environment, got {self.pos}"
            )

    def to_sample_batch(self) -> SampleBatch:
        """Return a complete rollout with RLlib's column names, grouped by environment, without a copy.

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
        """Value estimates, grouped by environment, shape (buffer_size * n_envs,)."""
        return as_array(self._flat(names.VF_PREDS))

    @property
    def returns(self) -> npt.NDArray[np.float32]:
        """Value targets, grouped by environment, shape (buffer_size * n_envs,)."""
        return as_array(self._flat(names.VALUE_TARGETS))

    @property
    def advantages(self) -> npt.NDArray[np.float32]:
        """Advantages, grouped by environment, shape (buffer_size * n_envs,)."""
        return as_array(self._flat(names.ADVANTAGES))


def _select(column: Any, rows: Any) -> Any:
    """Select rows by flat index from an array of shape (n_envs, buffer_size, ...), or from a dict of such arrays."""
    if isinstance(column, dict):
        return {name: _select(part, rows) for name, part in column.items()}
    return column.reshape(-1, *column.shape[2:])[rows]

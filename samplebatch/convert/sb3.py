"""Stable-Baselines3: replay buffers and rollout buffers, of arrays and of dicts of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.casting import as_flags
from samplebatch.convert.experience import Source, arrays_of, flags_of, require_columns, steps_as_recorded
from samplebatch.errors import ArgumentError, CapacityError, ColumnMismatchError, ColumnTypeError, require

if TYPE_CHECKING:
    from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer, RolloutBuffer

_NAMES = names.PEERS["stable_baselines3"]
_ESTIMATES = (names.VF_PREDS, names.ACTION_LOGP, names.ADVANTAGES, names.VALUE_TARGETS)


# Reading


def from_sb3(buffer: BaseBuffer) -> SampleBatch:
    """Return the steps of a Stable-Baselines3 buffer, environment by environment, each in time order.

    Actions of a replay buffer within [-1, 1] are in the unit of off-policy algorithms: scaled to the bounds of a Box.
    For one environment and a ring that has not wrapped around, columns are views of the buffer's arrays. `env_id` is
    the number of the environment, `eps_id` the number of the episode.

    Parameters
    ----------
    buffer
        A `ReplayBuffer`, a `RolloutBuffer`, or a dict variant. A rollout buffer has `dones`, `vf_preds`,
        `action_logp`, `advantages` and `value_targets`, but neither terminations nor next observations.

    Raises
    ------
    ColumnTypeError
        If the buffer is of another class.

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
        raise ColumnTypeError(
            f"buffer must be a replay or rollout buffer of Stable-Baselines3, got a {type(buffer).__name__}"
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
    # With one array for both observations, the newest observation has overwritten the oldest step's.
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
    # `get` flattens these environment by environment, once.
    flat = bool(buffer.generator_ready)
    columns = {
        names.OBS: _spaced(buffer.observations, positions, buffer.observation_space, flat=flat),
        names.ACTIONS: _spaced(buffer.actions, positions, buffer.action_space, flat=flat),
        names.REWARDS: _rows(buffer.rewards, positions),
        names.DONES: as_flags(_rows(starts, slice(None)), "episode_starts"),
    }
    return columns | {name: _rows(getattr(buffer, _NAMES[name]), positions, flat=flat) for name in _ESTIMATES}


def _spaced(values: Any, positions: Any, space: Any, *, flat: bool = False) -> Any:
    """Return rows in the shape of their space: Stable-Baselines3 adds an axis of length 1 to scalars."""
    if isinstance(values, dict):
        return {name: _spaced(value, positions, space[name], flat=flat) for name, value in values.items()}
    return _rows(values, positions, space.shape, flat=flat)


def _rows(values: Any, positions: Any, shape: tuple[int, ...] = (), *, flat: bool = False) -> npt.NDArray[Any]:
    """Flatten an array of shape (size, n, ...) environment by environment to shape (T * n, ...)."""
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
    """Copy steps into a replay buffer of Stable-Baselines3, to start an off-policy algorithm with.

    Actions of a Box are scaled to [-1, 1], the unit of off-policy algorithms, if their unit is known; other actions
    are copied unchanged. The buffer stores rewards and actions as 32-bit floats and observations in the dtype of their
    space; floats are rounded. Columns that are not part of a transition are omitted.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.
    observation_space, action_space
        Spaces of the environment; a Dict space creates a `DictReplayBuffer`.
    capacity
        Total capacity in steps; None for the number of steps in `source`.
    n_envs
        Number of environments that will add steps; existing steps are split evenly, in time order.
    device
        Device of samples.

    Raises
    ------
    ArgumentError
        If the steps cannot be split evenly.
    CapacityError
        If there are more steps than `capacity`.
    ColumnNotFoundError, ColumnMismatchError, ColumnTypeError
        If a column is missing, or does not fit its space; names it.
    MissingExtraError
        If Stable-Baselines3 is not installed.
    """
    buffers = require("stable_baselines3.common.buffers", "sb3")
    steps = steps_as_recorded(source)
    require_columns(steps.batch, names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS)
    n = steps.batch.count
    length = _share(n, n_envs)
    size = n if capacity is None else whole("capacity", capacity, 1)
    if size // n_envs < length:
        raise CapacityError(f"capacity must be at least the number of steps, {n}, got {size}")
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
    """Copy steps into a full rollout buffer of Stable-Baselines3, for PPO or A2C to train on.

    Actions are copied as recorded, because `action_logp` refers to recorded actions.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments, with `vf_preds` and `action_logp`. Without `advantages` and
        `value_targets`, call `compute_returns_and_advantage` on the result.
    observation_space, action_space
        Spaces of the environment; a Dict space creates a `DictRolloutBuffer`.
    n_envs
        Number of environments; the steps are split evenly, in time order.
    gamma, gae_lambda
        Discount and lambda with which the buffer computes advantages.
    device
        Device of samples.

    Raises
    ------
    ArgumentError
        If the steps cannot be split evenly.
    ColumnNotFoundError, ColumnMismatchError, ColumnTypeError
        If a column is missing, or does not fit its space; names it.
    MissingExtraError
        If Stable-Baselines3 is not installed.
    """
    buffers = require("stable_baselines3.common.buffers", "sb3")
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
    """Return the action unit of replay buffers: actions of a bounded Box are scaled to [-1, 1]."""
    if not hasattr(space, "low") or not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        return None
    return ActionUnit("scale", space.low, space.high)


def _share(n: int, n_envs: int) -> int:
    if n % whole("n_envs", n_envs, 1):
        raise ArgumentError(f"n_envs must divide the number of steps, which is {n}, got {n_envs}; drop {n % n_envs}")
    return n // n_envs


def _fill(theirs: Any, values: Any, name: str, length: int) -> None:
    """Copy rows to the start of arrays of shape (size, n_envs, ...), environment by environment."""
    if isinstance(theirs, dict):
        if not isinstance(values, dict) or values.keys() != theirs.keys():
            raise ColumnMismatchError(f"column {name!r} must have the parts of its space, {', '.join(theirs)}")
        for part, inner in theirs.items():
            _fill(inner, values[part], f"{name}.{part}", length)
        return
    if isinstance(values, dict | tuple):
        raise ColumnMismatchError(f"column {name!r} must be one array for a space other than Dict, got nested columns")
    n, size = len(values), int(np.prod(theirs.shape[2:], dtype=int))
    if values[0].size != size:
        raise ColumnMismatchError(
            f"column {name!r} must have rows of shape {theirs.shape[2:]} to fit its space, got {values.shape[1:]}"
        )
    if not np.can_cast(values.dtype, theirs.dtype, "same_kind") and values.dtype.kind != "b":
        raise ColumnTypeError(f"column {name!r} must fit {theirs.dtype} of its space, got {values.dtype}")
    rows = values.reshape(n // length, length, *theirs.shape[2:]).swapaxes(0, 1)
    theirs[:length] = rows

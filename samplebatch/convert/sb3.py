"""Stable-Baselines3: replay buffers and rollout buffers, of arrays and of dicts of them."""

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
    """Return the steps of a buffer of Stable-Baselines3, environment by environment, each in time order.

    Actions of a replay buffer that lie in [-1, 1] are of the unit that off-policy algorithms keep: scaled to the bounds
    of a Box. Where it has one environment and has not wrapped around, columns are views of its arrays. `env_id` numbers
    its environments, `eps_id` the episodes.

    Parameters
    ----------
    buffer
        A `ReplayBuffer`, a `RolloutBuffer`, or one of dicts. A rollout buffer tells `dones`, but neither whether they
        are terminations nor next observations; it has `vf_preds`, `action_logp`, `advantages` and `value_targets`.

    Raises
    ------
    ColumnTypeError
        If it is another buffer.

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
            f"a buffer of Stable-Baselines3 must be a replay or rollout buffer, got a {type(buffer).__name__}"
        )
    n, envs = len(columns[names.REWARDS]), buffer.n_envs
    env_id = np.repeat(np.arange(envs), n // envs)
    done = columns.get(names.DONES)
    done = columns[names.TERMINATEDS] | columns[names.TRUNCATEDS] if done is None else done
    # The last step of an environment is the last of its episode that is there.
    done = done | np.append(env_id[1:] != env_id[:-1], True)
    batch = SampleBatch({**columns, names.ENV_ID: env_id, names.EPS_ID: np.cumsum(done) - done})
    unit = _unit_of(buffer.action_space)
    if hasattr(buffer, "timeouts") and unit is not None and np.all(np.abs(batch[names.ACTIONS]) <= 1.0):
        batch.action_unit = unit
    return batch


def _replay_columns(buffer: Any) -> dict[str, Any]:
    size, pos = buffer.buffer_size, buffer.pos
    shared = buffer.optimize_memory_usage
    # With one array for both observations, the newest one stands where the oldest step was.
    places = slice(0, pos) if not buffer.full else (np.arange(pos + bool(shared), pos + size) % size)
    if buffer.full and pos == 0 and not shared:
        places = slice(0, size)
    obs, following = buffer.observations, buffer.observations if shared else buffer.next_observations
    after = (np.arange(size)[places] + 1) % size if shared else places
    dones = as_flags(_rows(buffer.dones, places), names.DONES)
    truncated = as_flags(_rows(buffer.timeouts, places), names.TRUNCATEDS) & dones
    return {
        names.OBS: _spaced(obs, places, buffer.observation_space),
        names.NEXT_OBS: _spaced(following, after, buffer.observation_space),
        names.ACTIONS: _spaced(buffer.actions, places, buffer.action_space),
        names.REWARDS: _rows(buffer.rewards, places),
        names.TERMINATEDS: dones & ~truncated,
        names.TRUNCATEDS: truncated,
    }


def _rollout_columns(buffer: Any) -> dict[str, Any]:
    steps = buffer.buffer_size if buffer.full else buffer.pos
    places = slice(0, steps)
    starts = np.vstack([buffer.episode_starts[1:steps], np.zeros((1, buffer.n_envs), np.float32)])
    # `get` lays these out environment by environment, once.
    flat = bool(buffer.generator_ready)
    columns = {
        names.OBS: _spaced(buffer.observations, places, buffer.observation_space, flat=flat),
        names.ACTIONS: _spaced(buffer.actions, places, buffer.action_space, flat=flat),
        names.REWARDS: _rows(buffer.rewards, places),
        names.DONES: as_flags(_rows(starts, slice(None)), "episode_starts"),
    }
    return columns | {name: _rows(getattr(buffer, _NAMES[name]), places, flat=flat) for name in _ESTIMATES}


def _spaced(values: Any, places: Any, space: Any, *, flat: bool = False) -> Any:
    """Return rows in the shape of their space: Stable-Baselines3 gives single numbers an axis of length 1."""
    if isinstance(values, dict):
        return {name: _spaced(value, places, space[name], flat=flat) for name, value in values.items()}
    return _rows(values, places, space.shape, flat=flat)


def _rows(values: Any, places: Any, shape: tuple[int, ...] = (), *, flat: bool = False) -> npt.NDArray[Any]:
    """Return rows environment by environment, shape (T * n, ...), of an array of shape (size, n, ...)."""
    if not flat:
        values = values[places].swapaxes(0, 1)
    found: npt.NDArray[Any] = values.reshape(-1, *shape)
    return found


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
    """Copy steps into a replay buffer of Stable-Baselines3, for an off-policy algorithm to start from.

    Actions of a Box are scaled to [-1, 1], as off-policy algorithms keep them, if their unit is known; others are
    written as they are. It has 32-bit floats for rewards and for actions, and the dtypes of the spaces for
    observations: floats are rounded to those. Other columns than those of a transition are left out.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.
    observation_space, action_space
        The environment's; a Dict space makes a `DictReplayBuffer`.
    capacity
        Steps that the buffer holds, of all environments; as many as there are if None.
    n_envs
        How many environments will add to it; the steps are shared out among them in time order.
    device
        Where its samples go.

    Raises
    ------
    ArgumentError
        If the steps cannot be shared out evenly.
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
        raise CapacityError(f"a buffer of {size} steps must be larger to take {n}; pass a larger capacity")
    kind = buffers.DictReplayBuffer if hasattr(observation_space, "spaces") else buffers.ReplayBuffer
    buffer: ReplayBuffer = kind(size, observation_space, action_space, device, n_envs)
    terminated, truncated = flags_of(steps.batch)
    for name, theirs in ((names.OBS, buffer.observations), (names.NEXT_OBS, buffer.next_observations)):
        _fill(theirs, arrays_of(steps.batch, name), name, length)
    actions, unit, own = arrays_of(steps.batch, names.ACTIONS), steps.batch.action_unit, _unit_of(action_space)
    if unit is not None and own is not None and unit != own:
        actions = own.from_environment(unit.to_environment(actions))
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

    Actions are written as they were recorded, since their log-probabilities are of these.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments, with `vf_preds` and `action_logp`; `advantages` and
        `value_targets` are taken if they are there, else call `compute_returns_and_advantage`.
    observation_space, action_space
        The environment's; a Dict space makes a `DictRolloutBuffer`.
    n_envs
        How many environments it has; the steps are shared out among them in time order.
    gamma, gae_lambda
        Of the advantages that it computes.
    device
        Where its samples go.

    Raises
    ------
    ArgumentError
        If the steps cannot be shared out evenly.
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
    """Return the steps of each environment."""
    if n % whole("n_envs", n_envs, 1):
        raise ArgumentError(f"n_envs must divide the number of steps, which is {n}, got {n_envs}; drop {n % n_envs}")
    return n // n_envs


def _fill(theirs: Any, values: Any, name: str, length: int) -> None:
    """Write rows into the first places of arrays of shape (size, n_envs, ...), environment by environment."""
    if isinstance(theirs, dict):
        if not isinstance(values, dict) or values.keys() != theirs.keys():
            raise ColumnMismatchError(f"column {name!r} must have the parts of its space: {', '.join(theirs)}")
        for part, inner in theirs.items():
            _fill(inner, values[part], f"{name}.{part}", length)
        return
    if isinstance(values, dict | tuple):
        raise ColumnMismatchError(f"column {name!r} must be one array for a space that is no Dict, it is nested")
    n, size = len(values), int(np.prod(theirs.shape[2:], dtype=int))
    if values[0].size != size:
        raise ColumnMismatchError(
            f"column {name!r} must have rows of shape {theirs.shape[2:]} to fit its space, got {values.shape[1:]}"
        )
    if not np.can_cast(values.dtype, theirs.dtype, "same_kind") and values.dtype.kind != "b":
        raise ColumnTypeError(f"column {name!r} must fit {theirs.dtype} of its space, got {values.dtype}")
    rows = values.reshape(n // length, length, *theirs.shape[2:]).swapaxes(0, 1)
    theirs[:length] = rows

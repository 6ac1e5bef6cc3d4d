"""Replay buffer that replaces the `ReplayBuffer` of CleanRL's scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import fraction, whole
from samplebatch.batch.delivery import as_array, require_device
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node, values_of
from samplebatch.buffer.extending import end_episode
from samplebatch.buffer.prioritized import PrioritizedVectorReplayBuffer
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.sequences import shift_slots, steps_after
from samplebatch.buffer.vector import VectorReplayBuffer
from samplebatch.errors import ArgumentError, ColumnMismatchError, EmptyBufferError, PriorityError

if TYPE_CHECKING:
    import torch

_INTP, _BOOL = np.dtype(np.intp), np.dtype(np.bool_)
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)

RowForm = tuple[np.dtype[Any], tuple[int, ...]]
"""Dtype and shape of a step's rows of all environments."""


class TransitionSamples(NamedTuple):
    """Sampled transitions as tensors, with the field names of Stable-Baselines3 and CleanRL."""

    observations: Any
    """Shape (n, ...); a dict of tensors for a Dict space."""
    actions: Any
    """Shape (n, action_dim)."""
    next_observations: Any
    """Shape (n, ...): the observation after the last step of the n-step window."""
    dones: Any
    """1 where the last step is terminated, 0 elsewhere, float32, shape (n, 1)."""
    rewards: Any
    """Rewards or n-step returns, float32, shape (n, 1)."""
    discounts: Any = None
    """Factor of the bootstrap value, `gamma` to the number of steps, float32, shape (n, 1); None without `n_steps`."""
    weights: Any = None
    """Importance weights, float32, shape (n, 1); None unless rows are drawn by priority."""
    indices: Any = None
    """Indices of the rows in `buffer`, shape (n,), for `update_priorities`."""
    generation: Any = None
    """Generation of each row's slot, shape (n,), for `update_priorities`; None unless rows are drawn by priority."""


class CleanRLReplayBuffer:
    """Replay buffer for CleanRL's scripts; stores steps of all environments and samples transitions as tensors.

    `CleanRLReplayBuffer` replaces the `ReplayBuffer` that CleanRL's scripts import. Uniform sampling makes the same
    calls to NumPy's global generator as the replaced class, so a seeded script samples the same transitions. Rows are
    stored in `buffer`, with one ring per environment. If the observation of a step differs from the next observation of
    the previous step, the running episode is truncated. Therefore no n-step return and no shared observation crosses an
    environment's reset.

    Parameters
    ----------
    buffer_size
        Total capacity in steps; each environment's ring has `buffer_size // n_envs` slots.
    observation_space, action_space
        Spaces of a single environment. With a Dict space, observations are dicts.
    device
        Device of sampled tensors; `"auto"` selects the GPU if one is available, otherwise the CPU.
    n_envs
        Number of environments.
    optimize_memory_usage
        Whether to store each observation once instead of twice, as `obs` and as `next_obs`. The final observation of a
        truncated episode is stored separately.
    handle_timeout_termination
        Whether an episode end with `"TimeLimit.truncated"` in `infos` is a truncation. CleanRL's scripts pass False,
        because their `done` is true only for terminations.
    n_steps
        Maximum number of steps per transition; None samples single steps without `discounts`.
    gamma
        Discount factor per step, used with `n_steps`.
    alpha, beta
        Exponents of priorities and of importance weights; None for uniform sampling.
    **kwargs
        Options of `VectorReplayBuffer`, such as `compress` and `storage`.

    Attributes
    ----------
    buffer
        The `VectorReplayBuffer` or `PrioritizedVectorReplayBuffer` that stores the rows.

    Raises
    ------
    ArgumentError
        If a numeric argument is out of range, or only one of `alpha` and `beta` is passed.
    DeviceError
        If torch is not installed, or cannot use the device.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> rb = CleanRLReplayBuffer(100, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), "cpu")
    >>> for i in range(5):
    ...     obs, next_obs = np.full((1, 3), i), np.full((1, 3), i + 1)
    ...     rb.add(obs, next_obs, np.array([1]), np.array([0.5]), np.array([i == 4]), {})
    >>> data = rb.sample(16)
    >>> (
    ...     data.observations.shape,
    ...     data.rewards.shape,
    ...     bool((data.next_observations == data.observations + 1).all()),
    ... )
    (torch.Size([16, 3]), torch.Size([16, 1]), True)
    """

    buffer: VectorReplayBuffer | PrioritizedVectorReplayBuffer

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int | None = None,
        gamma: float = 0.99,
        alpha: float | None = None,
        beta: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.n_envs = whole("n_envs", n_envs, 1)
        self.buffer_size = max(whole("buffer_size", buffer_size, 1) // self.n_envs, 1)
        self.observation_space, self.action_space = observation_space, action_space
        self.device = find_device() if isinstance(device, str) and device == "auto" else require_device(device)
        self.optimize_memory_usage = bool(optimize_memory_usage)
        self.handle_timeout_termination = bool(handle_timeout_termination)
        self.n_steps = None if n_steps is None else whole("n_steps", n_steps, 1)
        self.gamma = fraction("gamma", gamma)
        if (alpha is None) != (beta is None):
            raise ArgumentError(f"alpha and beta must be passed together, got alpha={alpha} and beta={beta}")
        self._action_dim = int(np.prod(action_space.shape, dtype=int))
        options = {"ignore_obs_next": self.optimize_memory_usage, **kwargs}
        total = self.buffer_size * self.n_envs
        if alpha is None or beta is None:
            self.buffer = VectorReplayBuffer(total, self.n_envs, **options)
        else:
            # Scripts seed NumPy's global generator.
            options.setdefault("random_seed", int(np.random.randint(2**31)))
            self.buffer = PrioritizedVectorReplayBuffer(total, self.n_envs, alpha=alpha, beta=beta, **options)
        self._observation_form = observation_form(observation_space, self.n_envs)
        dtype = np.dtype(action_space.dtype)
        self._action_form: RowForm = (_FLOAT32 if dtype == np.float64 else dtype, (self.n_envs, self._action_dim))
        self._no_flags = np.zeros(self.n_envs, np.bool_)
        self._expected: Any = None
        self._last_done = self._no_flags

    # Adding

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any = ()) -> None:
        """Add one step of each environment.

        Parameters
        ----------
        obs, next_obs
            Observations before and after the step, shape (n_envs, ...); dicts of arrays for a Dict space. Observations
            are cast to the dtype of the space. For the last step of an episode, `next_obs` is the final observation.
        action
            Actions, shape (n_envs, ...).
        reward, done
            Rewards, and whether each step ends its episode, shape (n_envs,).
        infos
            One dict per environment, as in Stable-Baselines3, or the infos dict of a Gymnasium vector environment. Only
            truncation flags are read.

        Raises
        ------
        ColumnMismatchError, ColumnTypeError
            If the shape of an argument does not match its space.
        """
        obs = fit_observation("obs", obs, self._observation_form)
        next_obs = fit_observation("next_obs", next_obs, self._observation_form)
        actions = fit_rows("action", action, self._action_form)
        rewards = fit_rows("reward", reward, (_FLOAT64, (self.n_envs,)))
        done = terminated = fit_rows("done", done, (_BOOL, (self.n_envs,)))
        truncated = self._no_flags
        if self.handle_timeout_termination and 1 in done.tobytes():
            truncated = _truncations(infos, self.n_envs) & done
            terminated = done & ~truncated
        values = {"obs": obs, "act": actions, "rew": rewards, "terminated": terminated, "truncated": truncated}
        values["obs_next"] = next_obs
        table = self.buffer._table
        with table.lock:
            if self._expected is not None and not _is_snapshot_of(self._expected, obs):
                self._end_interrupted_episodes(obs)
            if table.fast_add is None or table.fast_add(values) is None:
                self.buffer.add(node(Batch, values))
        # Copies: scripts reuse their arrays.
        self._expected, self._last_done = _snapshot(next_obs), done.copy()

    def extend(self, *columns: Sequence[Any]) -> None:
        """Add several steps; each argument is as in `add`, with an additional leading axis of steps."""
        for step in zip(*columns, strict=True):
            self.add(*step)

    def reset(self) -> None:
        """Remove all rows."""
        self.buffer.reset()
        self._expected = None

    def _end_interrupted_episodes(self, obs: Any) -> None:
        for ring in np.flatnonzero(~self._last_done & ~_equal_rows(obs, self._expected)).tolist():
            end_episode(self.buffer, int(self.buffer.last_index[ring]))

    # Sampling

    def sample(self, batch_size: int) -> TransitionSamples:
        """Draw transitions with replacement.

        Parameters
        ----------
        batch_size
            Number of transitions.

        Raises
        ------
        ArgumentError
            If `batch_size` is not an integer of at least 1.
        EmptyBufferError
            If the buffer is empty.
        """
        with self.buffer._table.lock:
            return self._transitions(self._draw(whole("batch_size", batch_size, 1)))

    def _draw(self, batch_size: int) -> Ints:
        buffer = self.buffer
        if not len(buffer):
            raise EmptyBufferError("a buffer must contain rows before sampling, got none; add steps first")
        if isinstance(buffer, PrioritizedVectorReplayBuffer):
            return buffer.sample_indices(batch_size)
        sizes = buffer._table.rings.sizes_of_all()
        if (sizes != sizes[0]).any():
            # Rows that were added to `buffer` directly fill the rings unevenly.
            stored = buffer._table.rings.stored_slots()
            return stored[np.random.randint(0, len(stored), size=batch_size)]
        positions = np.random.randint(0, int(sizes[0]), size=batch_size)
        rings = np.random.randint(0, self.n_envs, size=batch_size)
        return (positions + rings * self.buffer_size).astype(_INTP, copy=False)

    def _rows(self, slots: Ints) -> Batch:
        rows: Batch = self.buffer[slots]
        return rows

    def _transitions(self, slots: Ints) -> TransitionSamples:
        buffer, table = self.buffer, self.buffer._table
        rows, discounts = self._rows(slots), None
        if self.n_steps is None:
            rewards = self._normalize_rewards(np.asarray(rows.rew, np.float32))
            obs_next, terminated = rows.obs_next, rows.terminated
        else:
            ahead = steps_after(table.rings, table.done, slots, self.n_steps - 1)
            steps = np.arange(self.n_steps, dtype=np.float32)
            in_window = steps <= ahead[:, None]
            window = shift_slots(table.rings, slots[:, None], np.minimum(np.arange(self.n_steps), ahead[:, None]))
            step_rewards = self._normalize_rewards(buffer.rew[window].astype(np.float32))
            rewards = (step_rewards * self.gamma**steps * in_window).sum(axis=1)
            discounts = self.gamma ** (ahead + 1).astype(np.float32)
            last = window[np.arange(len(slots)), ahead]
            obs_next, terminated = buffer.get(last, "obs_next"), buffer.terminated[last]
        weights, generation = rows.__dict__.get("weight"), rows.__dict__.get("generation")
        return TransitionSamples(
            self._deliver(self._normalize_observations(rows.obs)),
            self._deliver(rows.act),
            self._deliver(self._normalize_observations(obs_next)),
            self._deliver_numbers(terminated),
            self._deliver_numbers(rewards),
            None if discounts is None else self._deliver_numbers(discounts),
            None if weights is None else self._deliver_numbers(weights),
            slots,
            generation,
        )

    def _normalize_observations(self, obs: Any) -> Any:
        return obs

    def _normalize_rewards(self, rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return rewards

    def _deliver(self, value: Any) -> Any:
        """Convert newly allocated arrays to tensors, without a copy on the CPU."""
        import torch

        parts = values_of(value)
        if parts is not None:
            return {name: self._deliver(part) for name, part in parts.items()}
        return torch.as_tensor(value, device=self.device)

    def _deliver_numbers(self, values: npt.NDArray[Any]) -> Any:
        return self._deliver(np.asarray(values, np.float32).reshape(-1, 1))

    def update_priorities(self, indices: Any, priorities: Any, generation: Any = None) -> None:
        """Set the priorities of sampled rows, for example to absolute TD errors.

        Parameters
        ----------
        indices
            `indices` of a sample, shape (n,).
        priorities
            Array or tensor of shape (n,) or (n, 1).
        generation
            `generation` of the sample; if passed, priorities of rows that have been overwritten since they were sampled
            are ignored.

        Raises
        ------
        PriorityError
            If the buffer samples uniformly, or a priority is NaN or too large.
        ColumnLengthError, RowIndexError
            As in `PrioritizedReplayBuffer.update_weight`.
        """
        if not isinstance(self.buffer, PrioritizedVectorReplayBuffer):
            raise PriorityError("alpha and beta must be set to update priorities, got a buffer with uniform sampling")
        self.buffer.update_weight(as_array(indices), as_array(priorities).reshape(-1), generation=generation)

    # State

    def size(self) -> int:
        """Return the number of steps per environment."""
        return int(self.buffer._table.rings.sizes_of_all()[0])

    def __len__(self) -> int:
        return len(self.buffer)

    @property
    def full(self) -> bool:
        """Whether the next step overwrites the oldest step."""
        return self.size() == self.buffer_size

    @property
    def pos(self) -> int:
        """Position in each environment's ring at which the next step is written."""
        return int(self.buffer._table.rings.cursors_of_all()[0]) % self.buffer_size

    @property
    def dones(self) -> npt.NDArray[np.bool_]:
        """Whether each step ended its episode, shape (buffer_size, n_envs); the array is a copy."""
        done = self.buffer._table.done
        if not len(done):
            return np.zeros((self.buffer_size, self.n_envs), np.bool_)
        return done.reshape(self.n_envs, self.buffer_size).T.copy()

    def __copy__(self) -> Self:
        raise TypeError(f"copy.deepcopy must be used for a {type(self).__name__}, got copy.copy")


def observation_form(space: Any, n_envs: int) -> RowForm | dict[str, Any]:
    """Return the dtype and shape of all environments' observations, or of each part of a Dict space."""
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, Mapping):
        return {name: observation_form(part, n_envs) for name, part in spaces.items()}
    return np.dtype(space.dtype), (n_envs, *(space.shape or (1,)))


def fit_observation(name: str, value: Any, form: RowForm | dict[str, Any]) -> Any:
    """Cast observations to the dtype and shape in `form`; observations of a Dict space become a `Batch`."""
    if type(form) is tuple:
        return fit_rows(name, value, form)
    assert isinstance(form, dict)
    parts = values_of(value)
    if parts is None or parts.keys() != form.keys():
        present = type(value).__name__ if parts is None else ", ".join(sorted(map(str, parts)))
        raise ColumnMismatchError(f"{name} must have the parts {', '.join(sorted(form))}, got {present}")
    return node(Batch, {key: fit_observation(f"{name}.{key}", parts[key], part) for key, part in form.items()})


def fit_rows(name: str, value: Any, form: RowForm) -> npt.NDArray[Any]:
    """Cast rows to the dtype in `form` and reshape them.

    Raises ColumnMismatchError if the number of elements does not match the shape in `form`.
    """
    dtype, shape = form
    array = value if type(value) is np.ndarray else as_array(value)
    if array.shape != shape:
        if array.size != prod(shape):
            raise ColumnMismatchError(f"{name} must have shape {shape}, got {array.shape}")
        array = array.reshape(shape)
    return array if array.dtype is dtype else array.astype(dtype, copy=False)


def find_device() -> torch.device:
    """Return the GPU if one is available, otherwise the CPU."""
    cpu = require_device("cpu")
    import torch

    return require_device("cuda") if torch.cuda.is_available() else cpu


def _truncations(infos: Any, n_envs: int) -> npt.NDArray[np.bool_]:
    """Return whether each environment reports a time limit, shape (n_envs,)."""
    if isinstance(infos, Mapping):
        flags = infos.get("TimeLimit.truncated", False)
        return np.broadcast_to(np.asarray(flags, np.bool_), (n_envs,)).copy()
    if len(infos) != n_envs:
        raise ArgumentError(f"infos must contain {n_envs} dicts, one per environment, got {len(infos)}")
    return np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos], np.bool_)


def _snapshot(obs: Any) -> Any:
    """Copy an observation to bytes (a dict of bytes for a Dict space), because bytes compare faster than arrays."""
    if type(obs) is np.ndarray:
        return obs.tobytes()
    return {name: _snapshot(part) for name, part in obs.__dict__.items()}


def _is_snapshot_of(snapshot: Any, obs: Any) -> bool:
    if type(obs) is np.ndarray:
        return bool(obs.tobytes() == snapshot)
    return all(_is_snapshot_of(snapshot[name], part) for name, part in obs.__dict__.items())


def _equal_rows(obs: Any, snapshot: Any) -> npt.NDArray[np.bool_]:
    """Return whether each row of an observation equals the same row of a snapshot, shape (n,); NaN equals NaN."""
    if isinstance(obs, Batch):
        parts = [_equal_rows(part, snapshot[name]) for name, part in obs.__dict__.items()]
        return np.asarray(np.logical_and.reduce(parts), np.bool_)
    expected = np.frombuffer(snapshot, obs.dtype).reshape(obs.shape)
    is_equal = obs == expected
    if obs.dtype.kind == "f":
        is_equal |= np.isnan(obs) & np.isnan(expected)
    flat: npt.NDArray[np.bool_] = is_equal.reshape(len(obs), -1).all(axis=1)
    return flat

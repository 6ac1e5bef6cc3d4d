"""Conversion of TorchRL's TensorDicts without copies, and a replay buffer that stores and samples TensorDicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch import errors, names
from samplebatch.arguments import fraction, whole
from samplebatch.batch.delivery import as_array
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.extending import flatten_rows
from samplebatch.buffer.gather import check_window
from samplebatch.buffer.prioritized import PrioritizedReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.sequences import shift_slots, steps_after
from samplebatch.buffer.writing import drop_empty
from samplebatch.column.objects import ObjectColumn
from samplebatch.convert.experience import Source, as_flat

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


_NAMES = names.PEERS["torchrl"]
_TO_FLAT = {theirs: name for name, theirs in _NAMES.items()}
_FLAGS = frozenset(("done", "terminated", "truncated"))
_SINGLE = frozenset((names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS, names.DONES))
"""Columns of one number per step, to which TorchRL adds an axis of length 1."""


def to_tensordict(source: Source) -> TensorDict:
    """Return steps as a TensorDict with TorchRL's entry names, without a copy if torch supports the layout.

    `obs` becomes `observation` and `new_obs` becomes `("next", "observation")`. With nested observations, each part
    becomes an entry in the root and an entry in `"next"`, as in TorchRL's environments. Rewards and flags have shape
    (n, 1), and the entry `done` is added. `eps_id` becomes `("collector", "traj_ids")`. Other columns keep their names;
    objects become non-tensor data.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.

    Raises
    ------
    ColumnMismatchError
        If a part of the observations has the same name as another entry.
    ColumnTypeError, SequenceError, EmptyBufferError
        If the source does not consist of steps of one policy.
    MissingExtraError
        If tensordict is not installed.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> steps = SampleBatch(
    ...     obs=[[0.0], [1.0]], actions=[0, 1], rewards=[0.5, 1.0], terminateds=[False, True]
    ... )
    >>> td = to_tensordict(steps)
    >>> td["next", "reward"].shape, td["next", "done"].flatten().tolist()
    (torch.Size([2, 1]), [False, True])
    """
    tensordict = errors.require("tensordict", "tensordict")
    batch = as_flat(source)
    entries: dict[str, Any] = {}
    for name in batch:
        path = tuple(_NAMES[name].split(".")) if name in _NAMES else (name,)
        value = _entry(batch, name, batch[name])
        if name in (names.OBS, names.NEXT_OBS) and isinstance(value, dict):
            for part, inner in value.items():
                _put(entries, (*path[:-1], part), inner, f"{name}.{part}")
        else:
            _put(entries, path, value, name)
    done = None if names.DONES in batch else batch.get(names.DONES)
    if done is not None:
        flags = SampleBatch({names.DONES: done})
        _put(entries, ("next", "done"), _entry(flags, names.DONES, done), names.DONES)
    converted: TensorDict = tensordict.TensorDict(entries, batch_size=[batch.count])
    return converted


def _entry(batch: SampleBatch, path: str, value: Any) -> Any:
    """Convert a column to a tensor, a tree of tensors, or, if torch does not support the dtype, non-tensor data."""
    if isinstance(value, tuple):
        value = {str(index): item for index, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {key: _entry(batch, f"{path}.{key}", item) for key, item in value.items()}
    column = batch.column(path)
    if isinstance(column, ObjectColumn) or getattr(column.dtype, "kind", "f") not in "biufc":
        import tensordict

        return tensordict.NonTensorStack(*column.to_numpy().tolist())
    tensor = column.to_torch()
    return tensor.unsqueeze(-1) if path in _SINGLE and tensor.ndim == 1 else tensor


def _put(entries: dict[str, Any], path: tuple[str, ...], value: Any, column: str) -> None:
    *parents, key = path
    for parent in parents:
        entries = entries.setdefault(parent, {})
    if key in entries:
        raise errors.ColumnMismatchError(
            f"column {column!r} must have a unique name in a TensorDict, got {key!r} twice"
        )
    entries[key] = value


def from_tensordict(td: TensorDict) -> SampleBatch:
    """Return the steps of a TensorDict with RLlib's column names; columns share memory with the TensorDict's tensors.

    Entries in both the root and `"next"` are observations: a single entry `observation` becomes `obs` and `new_obs`,
    and several entries become nested columns. Rewards and flags are read from `"next"` and reshaped to (n,). The last
    batch dimension is time; `env_id` numbers the positions in the other batch dimensions.

    Parameters
    ----------
    td
        A TensorDict with at least one batch dimension, such as a TorchRL rollout or a sample of a TorchRL buffer.

    Raises
    ------
    ColumnTypeError, MissingExtraError
        If `td` has no batch dimension, or tensordict is not installed.

    Examples
    --------
    >>> import torch
    >>> from tensordict import TensorDict
    >>> steps = {"observation": torch.zeros(2, 3), "next": {"reward": torch.ones(2, 1)}}
    >>> from_tensordict(TensorDict(steps, batch_size=[2]))["rewards"]
    tensor([1., 1.])
    """
    errors.require("tensordict", "tensordict")
    if not td.batch_dims:
        raise errors.ColumnTypeError("td must have a batch dimension, got none; use unsqueeze(0)")
    rows = td if td.batch_dims == 1 else td.reshape(-1)
    root: dict[Any, Any] = {key: _value(rows.get(key)) for key in rows.keys()}  # noqa: SIM118 - iteration goes over rows
    following = root.pop("next", {})
    columns = _observations(root, following)
    for key, value in following.items():
        name = _TO_FLAT.get(f"next.{key}")
        if name is None:
            columns.setdefault("next", {})[key] = value
        else:
            columns[name] = _single(value)
    for key, value in root.items():
        if key == "collector" and isinstance(value, dict) and "traj_ids" in value:
            columns[names.EPS_ID] = value.pop("traj_ids")
            if not value:
                continue
        flat = _TO_FLAT.get(f"next.{key}")
        if flat is None:
            columns[_TO_FLAT.get(key, key)] = value
        elif not following:
            columns[flat] = _single(value)
    if names.TERMINATEDS in columns and names.TRUNCATEDS in columns:
        columns.pop(names.DONES, None)
    if td.batch_dims > 1:
        columns[names.ENV_ID] = np.repeat(np.arange(td.numel() // td.batch_size[-1]), td.batch_size[-1])
    return SampleBatch(columns)


def _observations(root: dict[str, Any], following: dict[str, Any]) -> dict[str, Any]:
    keys = [key for key in root if key in following and key not in _FLAGS and key != "reward"]
    if keys in ([], ["observation"]):
        columns = {names.OBS: root.pop("observation", None), names.NEXT_OBS: following.pop("observation", None)}
        return {name: value for name, value in columns.items() if value is not None}
    return {
        names.OBS: {key: root.pop(key) for key in keys},
        names.NEXT_OBS: {key: following.pop(key) for key in keys},
    }


def _value(entry: Any) -> Any:
    from tensordict import is_non_tensor, is_tensor_collection

    if is_non_tensor(entry):
        return entry.tolist()
    if is_tensor_collection(entry):
        return {key: _value(entry.get(key)) for key in entry.keys()}  # noqa: SIM118 - iteration goes over rows
    return entry


def _single(value: Any) -> Any:
    return value.squeeze(-1) if value.ndim == 2 and value.shape[-1] == 1 else value


class TorchRLReplayBuffer:
    """Replay buffer for TorchRL's training loops, backed by one of the library's buffers.

    `extend` accepts the TensorDicts of a collector, and `sample` returns TensorDicts for loss modules. Each row is
    copied once when it is written to the ring, and once when it is sampled; the conversion itself does not copy.

    Parameters
    ----------
    buffer
        A buffer with one or more rings. If added data has several environments, the buffer must have one ring per
        environment, or the data must contain `("collector", "traj_ids")`.
    batch_size
        Default number of steps that `sample` returns.
    n_step
        Maximum number of steps per n-step return; None for single steps. If `n_step` is set, rewards are n-step
        returns, and samples contain `steps_to_next_obs`.
    gamma
        Discount factor per step of n-step returns.
    device
        Torch device of samples; None for the CPU.

    Raises
    ------
    ArgumentError, ColumnTypeError
        If a numeric argument is out of range, or `buffer` is not a `ReplayBuffer`.
    MissingExtraError
        If tensordict is not installed.

    Examples
    --------
    >>> import torch
    >>> from tensordict import TensorDict
    >>> flags = torch.zeros(3, 1, dtype=torch.bool)
    >>> following = {
    ...     "observation": torch.ones(3, 2),
    ...     "reward": torch.ones(3, 1),
    ...     "terminated": flags,
    ... }
    >>> steps = {"observation": torch.zeros(3, 2), "action": torch.arange(3)}
    >>> rb = TorchRLReplayBuffer(ReplayBuffer(100), batch_size=8)
    >>> rb.extend(
    ...     TensorDict(steps | {"next": following | {"truncated": flags}}, batch_size=[3])
    ... )
    tensor([0, 1, 2])
    >>> rb.sample()["next", "observation"].shape
    torch.Size([8, 2])
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        batch_size: int | None = None,
        *,
        n_step: int | None = None,
        gamma: float = 0.99,
        device: Any = None,
    ) -> None:
        errors.require("tensordict", "tensordict")
        if not isinstance(buffer, ReplayBuffer):
            raise errors.ColumnTypeError(f"buffer must be a samplebatch ReplayBuffer, got a {type(buffer).__name__}")
        self.buffer = buffer
        self.batch_size = None if batch_size is None else whole("batch_size", batch_size, 1)
        self.n_step = None if n_step is None else whole("n_step", n_step, 1)
        self.gamma = fraction("gamma", gamma)
        self.device = device

    def extend(self, td: TensorDict) -> torch.Tensor:
        """Add steps, and return their indices, shape (n,).

        Parameters
        ----------
        td
            Steps with at least one batch dimension; the last batch dimension is time.

        Raises
        ------
        ArgumentError
            If `td` has several environments, but the buffer does not have one ring per environment, and `td` has no
            `("collector", "traj_ids")`.
        ColumnTypeError, ColumnNotFoundError, ColumnMismatchError
            If `td` has no batch dimension, or a required entry is missing or does not match the stored rows.
        """
        import torch

        steps = from_tensordict(td)
        rings = len(self.buffer.subbuffer_edges) - 1
        environments = 1 if td.batch_dims == 1 else td.numel() // max(td.batch_size[-1], 1)
        if environments > 1 and rings != environments and names.EPS_ID not in steps:
            raise errors.ArgumentError(f"the buffer must have {environments} rings, one per environment, got {rings}")
        if rings != environments:
            steps.pop(names.ENV_ID, None)
        return torch.from_numpy(self.buffer.extend(steps))

    def add(self, td: TensorDict) -> int:
        """Add one step, a TensorDict without batch dimensions, and return the step's index.

        Raises the same errors as `extend`.
        """
        return int(self.extend(td.unsqueeze(0))[0])

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Draw steps as a TensorDict with `index`; a prioritized buffer adds `priority_weight` and `generation`.

        Parameters
        ----------
        batch_size
            Number of steps; None for `batch_size` of the buffer.

        Raises
        ------
        ArgumentError
            If `batch_size` is not an integer of at least 1, or is None and the buffer has no default.
        EmptyBufferError
            If the buffer is empty.
        """
        import torch

        if batch_size is None and self.batch_size is None:
            raise errors.ArgumentError("batch_size must be passed to the buffer or to sample, got None")
        count = whole("batch_size", self.batch_size if batch_size is None else batch_size, 1)
        buffer, table = self.buffer, self.buffer._table
        with table.lock:
            check_window(table, self.n_step, self.gamma)
            rows, indices = buffer.sample(count, n_step=self.n_step, gamma=self.gamma)
            values, steps = rows.__dict__, None
            if self.n_step is not None:
                slots = indices + buffer._start
                ahead = steps_after(table.rings, table.done, slots, self.n_step - 1)
                last = shift_slots(table.rings, slots, ahead)
                values["rew"], steps = values.pop("returns"), ahead + 1
                values.pop("discount")
                for name in ("terminated", "truncated", "done"):
                    values[name] = table.columns.tree[name].values[last]
        weights, generation = values.pop("weight", None), values.pop(names.GENERATION, None)
        values["rew"] = as_array(values["rew"]).astype(np.float32, copy=False)
        td = to_tensordict(flatten_rows(node(Batch, drop_empty(values)), "rllib"))
        td.set("index", torch.from_numpy(indices))
        if steps is not None:
            td.set("steps_to_next_obs", torch.from_numpy(steps).unsqueeze(-1))
        if weights is not None:
            td.set("priority_weight", torch.from_numpy(weights.astype(np.float32)))
            td.set("generation", torch.from_numpy(generation))
        return td if self.device is None else td.to(self.device)

    def update_tensordict_priority(self, td: TensorDict) -> None:
        """Set priorities from the entry `td_error` that a loss module has written to a sample.

        The priority of a row that has been overwritten since it was sampled is not updated.

        Raises
        ------
        ColumnNotFoundError
            If `td_error` or `index` is missing.
        PriorityError
            If the buffer is not prioritized, or a priority is NaN or too large.
        """
        for name in ("td_error", "index"):
            if name not in td.keys():  # noqa: SIM118 - iteration goes over rows
                raise errors.ColumnNotFoundError(f"td must have the entry {name!r} to set priorities, got none")
        self.update_priority(td["index"], td["td_error"], td.get("generation", None))

    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Set row priorities with `PrioritizedReplayBuffer.update_weight`; `index` and `priority` have shape (n,).

        Raises
        ------
        PriorityError
            If the buffer is not prioritized, or a priority is NaN or too large.
        """
        if not isinstance(self.buffer, PrioritizedReplayBuffer):
            raise errors.PriorityError(
                f"buffer must be prioritized to update priorities, got a {type(self.buffer).__name__}"
            )
        self.buffer.update_weight(as_array(index), as_array(priority).reshape(-1), generation=generation)

    def empty(self) -> None:
        """Remove all rows."""
        self.buffer.reset()

    def __len__(self) -> int:
        return len(self.buffer)

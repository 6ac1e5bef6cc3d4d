"""TorchRL: a replay buffer that stores TensorDicts of collectors and samples TensorDicts for loss modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch import names
from samplebatch.arguments import fraction, whole
from samplebatch.batch.delivery import as_array
from samplebatch.buffer.extending import flatten_rows
from samplebatch.buffer.gather import check_window
from samplebatch.buffer.prioritized import PrioritizedReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.sequences import shift_slots, steps_after
from samplebatch.convert.tensordict import from_tensordict, to_tensordict
from samplebatch.errors import ArgumentError, ColumnNotFoundError, ColumnTypeError, PriorityError, require

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


class TorchRLReplayBuffer:
    """Replay buffer for TorchRL's training loops, backed by one of the library's buffers.

    `extend` accepts the TensorDicts of a collector, `sample` returns TensorDicts for loss modules. Tensors are passed
    without a copy in both directions; each row is copied once into the ring, and once when sampled.

    Parameters
    ----------
    buffer
        A buffer of one or several rings; several environments in the first batch dimension need one ring each, or
        `("collector", "traj_ids")`.
    batch_size
        Default number of steps of `sample`.
    n_step
        Maximum steps per row; rewards are then n-step returns with `steps_to_next_obs`.
    gamma
        Discount per step of n-step returns.
    device
        Device of samples; None for the CPU.

    Raises
    ------
    ArgumentError
        If a number is out of range.
    ColumnTypeError
        If `buffer` is not a `ReplayBuffer`.
    MissingExtraError
        If tensordict is not installed.

    Examples
    --------
    >>> import torch
    >>> from tensordict import TensorDict
    >>> flags = torch.zeros(3, 1, dtype=torch.bool)
    >>> following = {"observation": torch.ones(3, 2), "reward": torch.ones(3, 1), "terminated": flags}
    >>> steps = {"observation": torch.zeros(3, 2), "action": torch.arange(3)}
    >>> rb = TorchRLReplayBuffer(ReplayBuffer(100), batch_size=8)
    >>> rb.extend(TensorDict(steps | {"next": following | {"truncated": flags}}, batch_size=[3]))
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
        require("tensordict", "tensordict")
        if not isinstance(buffer, ReplayBuffer):
            raise ColumnTypeError(f"buffer must be a ReplayBuffer of the library, got a {type(buffer).__name__}")
        self.buffer = buffer
        self.batch_size = None if batch_size is None else whole("batch_size", batch_size, 1)
        self.n_step = None if n_step is None else whole("n_step", n_step, 1)
        self.gamma = fraction("gamma", gamma)
        self.device = device

    def extend(self, td: TensorDict) -> torch.Tensor:
        """Add steps; return their indices, shape (n,).

        Parameters
        ----------
        td
            Steps with at least one batch dimension; the last batch dimension is time.

        Raises
        ------
        ArgumentError
            If several environments have neither one ring each nor `("collector", "traj_ids")`.
        ColumnTypeError, ColumnNotFoundError, ColumnMismatchError
            If `td` has no batch dimension, or a required entry is missing or does not fit; names the entry.
        """
        import torch

        steps = from_tensordict(td)
        rings = len(self.buffer.subbuffer_edges) - 1
        environments = 1 if td.batch_dims == 1 else td.numel() // max(td.batch_size[-1], 1)
        if environments > 1 and rings != environments and names.EPS_ID not in steps:
            raise ArgumentError(f"the buffer must have one ring per environment, {environments}, got {rings}")
        if rings != environments:
            steps.pop(names.ENV_ID, None)
        return torch.from_numpy(self.buffer.extend(steps))

    def add(self, td: TensorDict) -> int:
        """Add one step, a TensorDict without batch dimensions; return its index. Raises as `extend`."""
        return int(self.extend(td.unsqueeze(0))[0])

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Draw steps as a TensorDict with `index`, and `priority_weight` and `generation` of a prioritized buffer.

        Parameters
        ----------
        batch_size
            Number of steps; None for the default.

        Raises
        ------
        ArgumentError
            If there is no default, or it is not an integer of at least 1.
        EmptyBufferError
            If the buffer is empty.
        """
        import torch

        if batch_size is None and self.batch_size is None:
            raise ArgumentError("batch_size must be given to the buffer or to sample, got None")
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
        td = to_tensordict(flatten_rows(rows, "rllib"))
        td.set("index", torch.from_numpy(indices))
        if steps is not None:
            td.set("steps_to_next_obs", torch.from_numpy(steps).unsqueeze(-1))
        if weights is not None:
            td.set("priority_weight", torch.from_numpy(weights.astype(np.float32)))
            td.set("generation", torch.from_numpy(generation))
        return td if self.device is None else td.to(self.device)

    def update_tensordict_priority(self, td: TensorDict) -> None:
        """Set priorities from the entry `td_error` that a loss module has written to a sample.

        Priorities of rows that were overwritten since they were sampled are not updated.

        Raises
        ------
        ColumnNotFoundError
            If `td_error` or `index` is missing.
        PriorityError
            If the buffer is not prioritized, or a priority is NaN or too large.
        """
        for name in ("td_error", "index"):
            if name not in td.keys():  # noqa: SIM118 - iteration goes over rows
                raise ColumnNotFoundError(f"td must have the entry {name!r} to set priorities")
        self.update_priority(td["index"], td["td_error"], td.get("generation", None))

    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Set priorities of rows, both shape (n,), as `PrioritizedReplayBuffer.update_weight`.

        Raises
        ------
        PriorityError
            If the buffer is not prioritized, or a priority is NaN or too large.
        """
        if not isinstance(self.buffer, PrioritizedReplayBuffer):
            raise PriorityError(f"buffer must be prioritized to update priorities, got a {type(self.buffer).__name__}")
        self.buffer.update_weight(as_array(index), as_array(priority).reshape(-1), generation=generation)

    def empty(self) -> None:
        """Remove all rows."""
        self.buffer.reset()

    def __len__(self) -> int:
        return len(self.buffer)

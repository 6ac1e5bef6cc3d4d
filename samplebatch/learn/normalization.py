"""Running mean and variance, which normalize observations, rewards and returns."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from samplebatch.arguments import positive
from samplebatch.errors import ArgumentError

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer

ArrayT = TypeVar("ArrayT", npt.NDArray[Any], torch.Tensor)


class RunningMeanStd(nn.Module):
    """Running mean and variance of rows, computed by the parallel formula of Chan, Golub and LeVeque (1979).

    Apart from float64 rounding, the result does not depend on how rows are split into updates. The statistics are
    buffers of a torch module: they are part of `state_dict`, and therefore of checkpoints, of the weights that workers
    receive, and of exported policies.

    Parameters
    ----------
    shape
        Shape of a row; () for numbers.
    clip_max
        Bound of the absolute value of the results of `norm`; None for no bound.
    epsilon
        Number that is added to the variance to prevent division by zero.

    Attributes
    ----------
    mean, var
        Mean and population variance, float64 tensors of shape `shape`; 0 and 1 before the first row.
    count
        Number of rows, a float64 tensor of shape ().

    Raises
    ------
    ArgumentError
        If `clip_max` or `epsilon` is not a positive number.

    Examples
    --------
    >>> rows = RunningMeanStd((2,))
    >>> for part in ([[0.0, 1.0], [2.0, 1.0]], [[4.0, 4.0]]):
    ...     rows.update(np.array(part))
    >>> rows.mean.tolist(), rows.var.round(decimals=4).tolist(), rows.count.item()
    ([2.0, 2.0], [2.6667, 2.0], 3.0)
    >>> rows.norm(np.array([[2.0, 2.0]]))
    array([[0., 0.]])
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor

    def __init__(self, shape: tuple[int, ...] = (), *, clip_max: float | None = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.clip_max = None if clip_max is None else positive("clip_max", clip_max)
        self.epsilon = positive("epsilon", epsilon)
        self.register_buffer("mean", torch.zeros(self.shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(self.shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @property
    def std(self) -> torch.Tensor:
        """Square root of the sum of the variance and `epsilon`, a float64 tensor of shape `shape`."""
        return (self.var + self.epsilon).sqrt()

    @torch.no_grad()
    def update(self, data_array: Any) -> None:
        """Add rows: an array or tensor of shape (n, *shape).

        Raises
        ------
        ArgumentError
            If the shape of rows is not `shape`, values are not finite, or their variance overflows; the statistics are
            unchanged.
        """
        rows = torch.as_tensor(data_array).to(self.mean)
        if rows.ndim == 0 or tuple(rows.shape[1:]) != self.shape:
            raise ArgumentError(
                f"rows of running statistics must have shape {self.shape}, got an array of shape {tuple(rows.shape)}"
            )
        if not len(rows):
            return
        nonfinite = int((~rows.isfinite().reshape(len(rows), -1).all(1)).sum())
        if nonfinite:
            raise ArgumentError(
                f"rows of running statistics must be finite, got NaN or infinity in {nonfinite} of {len(rows)} rows"
            )
        self._add(rows.mean(0), rows.var(0, correction=0), torch.full_like(self.count, len(rows)))

    def merge(self, other: RunningMeanStd) -> Self:
        """Merge other statistics into these statistics in place, and return `self`.

        Examples
        --------
        >>> rows, others = RunningMeanStd(), RunningMeanStd()
        >>> rows.update(np.array([1.0]))
        >>> others.update(np.array([3.0, 5.0]))
        >>> rows.merge(others).mean.item()
        3.0

        Raises
        ------
        ArgumentError
            If the shape of rows in the other statistics differs from `shape`, or the variance overflows.
        """
        if other.shape != self.shape:
            raise ArgumentError(f"running statistics must have shape {self.shape}, got {other.shape}")
        if other.count > 0:
            self._add(other.mean.to(self.mean), other.var.to(self.var), other.count.to(self.count))
        return self

    def _add(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        total = self.count + count
        shift = mean - self.mean
        new_mean = self.mean + shift * (count / total)
        squares = self.var * self.count + var * count + shift.square() * (self.count * count / total)
        new_var = squares / total
        if not bool(new_mean.isfinite().all() and new_var.isfinite().all()):
            raise ArgumentError(
                "rows of running statistics must have a variance that float64 can represent, got an overflow"
            )
        # In place: workers and views of `state_dict` share the storage.
        self.mean.copy_(new_mean)
        self.var.copy_(new_var)
        self.count.copy_(total)

    def norm(self, data_array: ArrayT) -> ArrayT:
        """Subtract the mean, divide by the standard deviation and clip; before the first update, rows are unchanged.

        Arrays and tensors have shape (..., *shape). Results have the shape and dtype of the rows; integers become
        float64 arrays and float32 tensors.
        """
        if isinstance(data_array, torch.Tensor):
            tensor: torch.Tensor = self(data_array)
            return tensor
        array = np.asarray(data_array)
        dtype = array.dtype if array.dtype.kind == "f" else np.dtype(np.float64)
        normalized = self(torch.from_numpy(array.astype(np.float64)))
        result: npt.NDArray[Any] = normalized.cpu().numpy().astype(dtype)
        return result

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor; see `norm`."""
        dtype = rows.dtype if rows.is_floating_point() else torch.float32
        normalized = (rows.to(self.mean) - self.mean) / self.std
        if self.clip_max is not None:
            normalized = normalized.clamp(-self.clip_max, self.clip_max)
        # Before the first update, rows are not clipped either; `where` can be exported, `if` cannot.
        return torch.where(self.count > 0, normalized.to(dtype), rows.to(dtype))


class AddedRows:
    """Tracker of the buffer rows that running statistics already include, so that each row is included once.

    Examples
    --------
    >>> from samplebatch import Batch, ReplayBuffer
    >>> buffer, rows = ReplayBuffer(3), AddedRows()
    >>> def count(number):
    ...     step = Batch(obs=number, act=0, rew=0.0, terminated=False, truncated=False)
    ...     buffer.add(step)
    ...     return rows.take(buffer).tolist()
    >>> [count(number) for number in range(4)]
    [[0], [1], [2], [0]]
    """

    def __init__(self) -> None:
        self._buffer: weakref.ref[ReplayBuffer] | None = None
        self._writes: npt.NDArray[np.intp] | None = None

    def take(self, buffer: ReplayBuffer) -> npt.NDArray[np.intp]:
        """Return the indices of rows added since the last call, or of all rows if the last call used another buffer."""
        rings = buffer._table.rings
        writes, counted = rings.writes_of_all(), self._writes
        is_known = self._buffer is None or self._buffer() is buffer
        if counted is None or not is_known or counted.shape != writes.shape or (counted > writes).any():
            counted = np.zeros_like(writes)
        self._buffer, self._writes = weakref.ref(buffer), writes
        return rings.slots_since(counted)

    def state_dict(self) -> list[int] | None:
        """Return the number of rows written to each ring up to the last call to `take`; None before the first call.

        After `load_state_dict`, the next call to `take` compares its buffer with these numbers.
        """
        return None if self._writes is None else self._writes.tolist()

    def load_state_dict(self, state: list[int] | None) -> None:
        """Restore the number of rows written to each ring from the result of `state_dict`."""
        self._buffer, self._writes = None, None if state is None else np.array(state, np.intp)

    def __getstate__(self) -> dict[str, Any]:
        # A copied buffer is another object.
        return {"_buffer": None, "_writes": self._writes}

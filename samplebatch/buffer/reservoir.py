"""Reservoir buffer, which stores a uniform sample of all steps that were ever added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.buffer import views
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Added, Ints
from samplebatch.buffer.vector import VectorReplayBuffer
from samplebatch.buffer.writing import step_values
from samplebatch.errors import ColumnLengthError


class ReservoirReplayBuffer(VectorReplayBuffer):
    """Buffer that stores a uniform random sample of all steps that were ever added (Vitter 1985, algorithm R).

    A full buffer stores step t with probability `size / t`, replacing a row that is selected uniformly. A ring buffer,
    in contrast, stores only the newest steps. Averages over a reservoir's rows estimate averages over the entire
    training, as neural fictitious self-play requires (arXiv:1603.01121). Rows are single transitions without adjacent
    steps, so frames cannot be stacked, and n-step returns contain only one reward.

    Parameters
    ----------
    size
        Maximum number of stored rows.
    random_seed
        Seed of the generator that selects replaced and sampled rows.
    **kwargs
        `compress`, `ragged` and `reward_dtype`, as in `ReplayBuffer`.

    Attributes
    ----------
    seen
        Number of steps that have ever been added.

    Raises
    ------
    ArgumentError
        If `size` is not an integer of at least 1.

    Examples
    --------
    >>> buffer = ReservoirReplayBuffer(4, random_seed=1)
    >>> for number in range(100):
    ...     added = buffer.add(
    ...         Batch(
    ...             obs=[number],
    ...             act=[0],
    ...             rew=[1.0],
    ...             terminated=[False],
    ...             truncated=[False],
    ...             obs_next=[number + 1],
    ...         )
    ...     )
    >>> len(buffer), buffer.seen, sorted(buffer.obs.tolist())
    (4, 100, [19, 31, 41, 74])
    """

    def __init__(
        self,
        size: int,
        random_seed: int = 42,
        *,
        compress: bool | str | Sequence[str] = False,
        ragged: str | Sequence[str] = (),
        reward_dtype: str | None = None,
    ) -> None:
        size = whole("size", size, 1)
        options: dict[str, Any] = {} if reward_dtype is None else {"reward_dtype": reward_dtype}
        super().__init__(size, size, random_seed=random_seed, compress=compress, ragged=ragged, **options)
        self.seen = 0

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        *more: Never,
        **columns: Any,
    ) -> Added:
        """Offer steps to the reservoir.

        Parameters
        ----------
        batch
            Values by name, with a leading axis of k steps; the values can also be passed as keyword arguments, as in
            older versions of Tianshou.
        buffer_ids
            Environment of each row, accepted for compatibility with collectors; only the length is used, which must
            equal the number of rows.

        Returns
        -------
        tuple
            Index of each step, or -1 if the step is not stored or was replaced by another step of the same call. The
            other three arrays, which contain returns, lengths and first indices of episodes, are zeros because rows
            have no episodes.

        Raises
        ------
        ColumnNotFoundError, ColumnLengthError, ColumnMismatchError, ColumnTypeError
            If a required column is missing, or a column cannot store its value exactly.
        ArgumentError
            If values are passed by position.
        """
        if more:
            raise views.values_by_position(len(more) + 2)
        values = step_values(batch, columns)
        count = len(np.asarray(values["rew"])) if "rew" in values else 0
        if buffer_ids is not None and len(buffer_ids) != count:
            raise ColumnLengthError(f"column 'rew' must have {len(buffer_ids)} rows, as buffer_ids, got {count}")
        with self._table.lock:
            times = self.seen + np.arange(count)
            draws = np.where(times < self.maxsize, times, self._rng.integers(0, times + 1)) if count else times
            stored = np.flatnonzero(draws < self.maxsize)
            rows: Batch = node(Batch, values)
            if len(stored) or not count:
                super().add(rows if len(stored) == count else rows[stored], buffer_ids=draws[stored])
            self.seen += count
        slots = np.full(count, -1, np.intp)
        last = {int(draws[row]): int(row) for row in stored}
        slots[list(last.values())] = list(last)
        return slots, np.zeros(count), np.zeros(count, np.intp), np.zeros(count, np.intp)

    def extend(self, batch: Any) -> Ints:
        """Add all steps of a batch as in `add`, and return their indices; see `ReplayBuffer.extend`."""
        steps = len(batch)
        ordered = ReplayBuffer(max(steps, 1))
        ordered.action_unit = self.action_unit
        ordered.extend(batch)
        if not len(ordered):
            return np.zeros(0, np.intp)
        rows = {name: value for name, value in ordered[:].__dict__.items() if name not in ("info", "policy", "done")}
        return self.add(node(Batch, rows))[0]

    def reset(self, keep_statistics: bool = False) -> None:
        """Remove all rows, and set the number of added steps to 0."""
        super().reset(keep_statistics)
        self.seen = 0

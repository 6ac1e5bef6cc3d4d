"""Conversion of steps from and to cpprb's replay buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.casting import as_flags
from samplebatch.convert.experience import Source, arrays_of, as_steps, flags_of, require_columns
from samplebatch.errors import CapacityError, ColumnTypeError, EmptyBufferError, require

if TYPE_CHECKING:
    import cpprb

_NAMES = names.PEERS["cpprb"]
_TO_FLAT = {theirs: name for name, theirs in _NAMES.items()}


def from_cpprb(buffer: cpprb.ReplayBuffer) -> SampleBatch:
    """Return the steps of a cpprb buffer in insertion order.

    `obs`, `act`, `rew`, `next_obs` and `done` become `obs`, `actions`, `rewards`, `new_obs` and `terminateds`; other
    columns keep their names. Rewards, flags and integers of shape (n, 1) are reshaped to (n,).

    Raises
    ------
    EmptyBufferError, ColumnMismatchError
        If the buffer has no steps, or `done` contains a value other than 0 and 1.
    """
    if not buffer.get_stored_size():
        raise EmptyBufferError("a cpprb buffer must contain steps, got none")
    transitions = buffer.get_all_transitions()
    first = buffer.get_next_index() if buffer.get_stored_size() == buffer.get_buffer_size() else 0
    columns: dict[str, Any] = {}
    for name, values in transitions.items():
        single = values.ndim == 2 and values.shape[1] == 1 and (name in ("rew", "done") or values.dtype.kind in "biu")
        rows = values.reshape(-1) if single else values
        columns[_TO_FLAT.get(name, name)] = np.roll(rows, -first, axis=0) if first else rows
    for name in (names.TERMINATEDS, names.TRUNCATEDS):
        if name in columns:
            columns[name] = as_flags(columns[name], name)
    return SampleBatch(columns)


def to_cpprb(source: Source, *, capacity: int | None = None) -> cpprb.ReplayBuffer:
    """Copy steps into a new cpprb buffer with the same columns.

    `done` is true for terminations only, because code that uses cpprb does not bootstrap after steps with `done`.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.
    capacity
        Maximum number of steps; None for the number of steps in `source`.

    Raises
    ------
    ColumnNotFoundError, ColumnTypeError
        If a required column is missing, or a column is nested, is not numeric or has rows of varying shape.
    CapacityError
        If there are more steps than `capacity`.
    SequenceError, EmptyBufferError
        If steps of an episode are missing, or there are no steps.
    MissingExtraError
        If cpprb is not installed.
    """
    module = require("cpprb", "cpprb")
    batch = as_steps(source).batch
    require_columns(batch, names.OBS, names.ACTIONS, names.REWARDS)
    columns = {name: arrays_of(batch, name) for name in batch if name != names.DONES}
    columns[names.TERMINATEDS] = flags_of(batch)[0]
    for name, values in columns.items():
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            kind = values.dtype if isinstance(values, np.ndarray) else "several arrays"
            raise ColumnTypeError(
                f"column {name!r} must be a single numeric array for a cpprb buffer, got {kind}; drop it"
            )
    room = batch.count if capacity is None else whole("capacity", capacity, 1)
    if room < batch.count:
        raise CapacityError(f"capacity must be at least {batch.count}, the number of steps, got {room}")
    rows = {_NAMES.get(name, name): values for name, values in columns.items()}
    about = {name: {"shape": values.shape[1:] or 1, "dtype": values.dtype} for name, values in rows.items()}
    buffer: cpprb.ReplayBuffer = module.ReplayBuffer(room, about)
    buffer.add(**rows)
    return buffer

"""Episode hooks: columns computed once an episode has ended, and kept with its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import run_starts
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ColumnLengthError

EpisodeHook = Callable[[Batch], Mapping[str, Any] | None]
"""Called on the steps of every episode that ended, under Tianshou's names; what it returns, arrays with a row a step by
name, is kept with them."""


def call_on_buffer(hook: EpisodeHook, buffer: Any, start: int, last: int, length: int) -> None:
    """Call a hook on an episode in a buffer, and write the returned columns there.

    Parameters
    ----------
    hook
        The hook to call.
    buffer
        Where the steps are.
    start, last
        Where the episode begins, or one before it that was cut off; and where it ends.
    length
        Its steps. Where the buffer has lost the first of them, the hook gets the others.
    """
    indices = buffer.get_buffer_indices(start, last + 1)[-length:]
    if len(indices) < length:
        indices = _remaining(buffer, last, length)
    for name, values in _results(hook, buffer[indices], len(indices)):
        # Other rows of a new column are missing, which integers cannot say.
        whole = values.dtype.kind in "iu" and not hasattr(buffer, name)
        buffer.set_array_at_key(values.astype(np.float64) if whole else values, name, index=indices)


def _remaining(buffer: Any, last: int, length: int) -> npt.NDArray[np.intp]:
    """Go back from the last step to the first one that is still there."""
    found = [last]
    while len(found) < length:
        before = int(buffer.prev(np.array([found[-1]]))[0])
        if before == found[-1] or before == last:
            break
        found.append(before)
    return np.array(found[::-1])


def call_on_rows(hook: EpisodeHook, batch: SampleBatch) -> None:
    """Call a hook on every episode that ends in a batch, and add the returned columns, NaN in all other rows.

    Of an episode that began in an earlier batch, the hook gets the rows that are in this one.

    Parameters
    ----------
    hook
        The hook to call.
    batch
        Steps with the columns `eps_id` and `dones`, the ones of an episode together and in order of time.
    """
    if not len(batch):
        return
    starts = run_starts(np.asarray(batch[names.EPS_ID]))
    stops = np.append(starts[1:], len(batch))
    done = np.asarray(batch[names.DONES])
    rows = batch.as_batch(names="tianshou")
    rows.done = done
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if done[stop - 1]:
            for name, values in _results(hook, rows[start:stop], stop - start):
                if name not in batch:
                    batch[name] = _blank(values, len(batch))
                batch[name][start:stop] = values


def _results(hook: EpisodeHook, episode: Batch, steps: int) -> list[tuple[str, npt.NDArray[Any]]]:
    found = []
    for name, values in (hook(episode) or {}).items():
        array = np.asarray(values)
        if not array.ndim or len(array) != steps:
            raise ColumnLengthError(
                f"column {name!r} must have {steps} rows, as the episode has, got {len(array) if array.ndim else 'one'}"
            )
        found.append((name, array))
    return found


def _blank(values: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Make a column of NaN, False or None, whichever the widest dtype of that kind has for no value."""
    kind = values.dtype.kind
    dtype = values.dtype if kind in "fcbO" else np.dtype(np.float64)
    return np.full((rows, *values.shape[1:]), {"b": False, "O": None}.get(kind, np.nan), dtype)

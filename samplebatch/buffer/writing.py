"""Conversion of steps to stored values, and assignment of steps, possibly several per ring, to slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from samplebatch import errors
from samplebatch.batch.delivery import as_array
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, node, values_of
from samplebatch.buffer.ring import Added, Flags, Ints, Rings
from samplebatch.column.casting import as_flags
from samplebatch.names import TO_FLAT

FLAGS: Final = ("terminated", "truncated")
"""Flags of a step; `done` is computed from them."""

_MAX_FRAMES = 16
"""Maximum number of stacked frames, to distinguish stacks from images."""

_REQUIRED = ("obs", "act", "rew", *FLAGS)
_DTYPES = {kind: np.dtype(kind) for kind in (np.float64, np.bool_)}
_ndarray = np.ndarray


def step_values(batch: Any, columns: dict[str, Any]) -> dict[str, Any]:
    """Return a step's values by name; the step is passed as a batch, as a dict or as keyword arguments."""
    if batch is None:
        return Batch(columns).__dict__
    if columns:
        raise errors.ColumnTypeError(
            f"a step must be passed as a batch or as columns, got both; put {next(iter(columns))!r} into the batch"
        )
    return batch.__dict__ if isinstance(batch, Batch) else Batch(batch).__dict__


def count_steps(buffer_ids: Any) -> int:
    """Return the number of steps that `buffer_ids` specifies for a buffer with one ring."""
    numbers = buffer_ids if type(buffer_ids) is list else np.asarray(buffer_ids).tolist()
    if not isinstance(numbers, list) or not numbers or numbers != [0] * len(numbers):
        raise errors.RingError(f"buffer_ids of a buffer with one ring must be [0], or one 0 per row, got {buffer_ids}")
    return len(numbers)


def drop_empty(rows: dict[str, Any]) -> dict[str, Any]:
    """Remove names without values."""
    return {name: value for name, value in rows.items() if KINDS[type(value)] != NODE or value.__dict__}


def convert_step(step: Mapping[str, Any], n: int, *, single: bool, last_frame: bool) -> dict[str, Any]:
    """Convert n rows, or a single row without a leading axis, to stored values.

    If `done` is the only flag in the step, `done` is used as `terminated`. If `last_frame` is true, stacked
    observations are reduced to their newest frame.

    >>> convert_step(
    ...     {"obs": 1, "act": 2, "rew": 3, "done": 1}, 1, single=True, last_frame=False
    ... )["done"]
    array(True)
    """
    values = dict(step)
    if "terminated" not in values and "truncated" not in values and "done" in values:
        # The older form accepted any non-zero number as true.
        values["terminated"] = numbers(values["done"], "done", () if single else (n,), np.float64) != 0.0
        values["truncated"] = np.zeros(() if single else n, np.bool_)
    for name in _REQUIRED:
        if name not in values:
            raise errors.ColumnNotFoundError(f"a step must have column {name!r}; {errors.near_names(name, step)}")
    lead = () if single else (n,)
    values["rew"] = numbers(values["rew"], "rew", lead, np.float64)
    for name in FLAGS:
        values[name] = numbers(values[name], name, lead, np.bool_).reshape(lead)
    values["done"] = np.asarray(values["terminated"] | values["truncated"])
    if last_frame:
        for name in ("obs", "obs_next"):
            if name in values:
                values[name] = newest_frame(values[name], name, single=single)
    return values


def check_nan(values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ColumnMismatchError if a floating-point column contains NaN.

    >>> check_nan({"obs": {"speed": np.array([0.0, np.nan])}})
    Traceback (most recent call last):
    samplebatch.errors.ColumnMismatchError: column 'obs.speed' must have no NaN
        (raise_on_nan=True), got 1 of 2 values
    """
    for name, value in values.items():
        parts = values_of(value)
        if parts is not None:
            check_nan(parts, f"{prefix}{name}.")
            continue
        array = as_array(value)
        if array.dtype.kind not in "fc":
            continue
        is_nan = np.isnan(array)
        if is_nan.any():
            raise errors.ColumnMismatchError(
                f"column '{prefix}{name}' must have no NaN (raise_on_nan=True), got {int(np.count_nonzero(is_nan))} "
                f"of {array.size} values"
            )


def numbers(value: Any, name: str, lead: tuple[int, ...], kind: type[Any]) -> npt.NDArray[Any]:
    """Validate rewards or flags, and convert the values to `kind`, float64 or bool.

    >>> numbers([1, 0], "terminated", (2,), np.bool_)
    array([ True, False])
    """
    if type(value) is _ndarray and value.dtype is _DTYPES[kind] and value.shape == lead:
        return value
    array = as_array(value)
    if array.dtype.kind not in "biuf":
        raise errors.ColumnTypeError(f"column {name!r} must have numbers, got {array.dtype}")
    if array.shape[: len(lead)] != lead:
        actual = array.shape[0] if array.ndim else "a single number"
        raise errors.ColumnLengthError(f"column {name!r} must have {lead[0]} rows, got {actual}")
    if kind is np.bool_ and array.size != (lead[0] if lead else 1):
        raise errors.ColumnMismatchError(
            f"column {name!r} must have one flag per row, got shape {array.shape[len(lead) :]}"
        )
    return as_flags(array, name) if kind is np.bool_ else array.astype(kind, copy=False)


def end_flags(rows: Mapping[str, Any], n: int) -> tuple[Flags, Flags]:
    """Return masks of terminated and truncated rows; if `terminated` is missing, `done` replaces it.

    >>> end_flags({"done": [0, 1]}, 2)
    (array([False,  True]), array([False, False]))
    """
    flag = "terminated" if "terminated" in rows else "done"
    terminated = as_flags(as_array(rows[flag]), TO_FLAT[flag])
    if "truncated" not in rows:
        return terminated, np.zeros(n, np.bool_)
    return terminated, as_flags(as_array(rows["truncated"]), TO_FLAT["truncated"])


def newest_frame(value: Any, path: str, *, single: bool) -> Any:
    """Return the newest frame of stacked observations, for a single row or for each row."""
    names = values_of(value)
    if names is not None:
        return node(
            Batch, {name: newest_frame(inner, f"{path}.{name}", single=single) for name, inner in names.items()}
        )
    shape = np.shape(value) if single else np.shape(value)[1:]
    if _has_pixels_first(shape, getattr(value, "dtype", None)):
        raise errors.ColumnMismatchError(
            f"column {path!r} must have frames along the first axis to save only the last frame, got rows of "
            f"shape {shape}, which are images; move the frame axis to the front, or pass the newest as a stack of 1"
        )
    try:
        return value[-1] if single else value[:, -1]
    except (TypeError, IndexError) as error:
        raise errors.ColumnMismatchError(
            f"column {path!r} must have stacks of frames to save only the last frame, got rows of shape {shape}"
        ) from error


def _has_pixels_first(shape: tuple[int, ...], dtype: Any) -> bool:
    """Return whether rows have the shape of images without stacked frames, with channels last or without channels."""
    if not shape or shape[0] <= _MAX_FRAMES:
        return False
    return (len(shape) == 3 and shape[-1] <= _MAX_FRAMES) or (len(shape) == 2 and dtype == np.uint8)


def rows_at(values: Any, index: Any) -> Any:
    """Select rows of values; a nested batch without values is returned unchanged."""
    return values if KINDS[type(values)] == NODE and not values.__dict__ else values[index]


_INTP = np.dtype(np.intp)

_FEW_ENDS = 16
"""Maximum number of episode ends per ring for which a loop over episodes is faster than sorting."""


class Series:
    """Assignment of k steps in time order, possibly several per ring, to slots of rings.

    slots: slot of each step, shape (k,).
    target: slots of the steps as a slice if these slots are contiguous, otherwise `slots`.
    lasting: positions of steps that no later step overwrites, shape (l,), ascending; None for all steps.
    rings, newest: numbers of the rings that receive steps, ascending, and position of each ring's newest step.

    >>> rings = Rings([2, 2])
    >>> series = Series(rings, np.array([0, 0, 1, 0]))
    >>> series.slots, series.lasting, series.newest
    (array([0, 1, 2, 0]), array([1, 2, 3]), array([3, 2]))
    >>> series.advance(np.array([False, True, False, False]), np.array([1.0, 2.0, 4.0, 8.0]))
    (array([0, 1, 2, 0]), array([0., 3., 0., 0.]), array([0, 2, 0, 0]), array([0, 0, 2, 0]))
    """

    def __init__(self, rings: Rings, numbers: Ints) -> None:
        self._all = rings
        if rings.n == 1:
            self._fill_only_ring(rings, numbers)
            return
        # NumPy sorts short integers by radix, in linear time.
        key = numbers.astype(np.uint16) if rings.n <= 1 << 16 else numbers
        self._order: Ints = key.argsort(kind="stable")
        self._ring: Ints = numbers[self._order]
        self._counts = np.bincount(numbers, minlength=rings.n)
        self._stops = np.cumsum(self._counts)
        # Number of earlier steps in the ring.
        self._rank = np.arange(len(numbers)) - (self._stops - self._counts)[self._ring]
        cursors, maxsizes = rings.cursors_of_all(), rings.maxsizes
        offsets = (cursors[self._ring] + self._rank) % maxsizes[self._ring]
        self.slots: Ints = np.empty(len(numbers), _INTP)
        self.slots[self._order] = rings.bases[self._ring] + offsets
        self.rings: Ints = self._counts.nonzero()[0]
        self.newest: Ints = self._order[self._stops[self.rings] - 1]
        self.target: Ints | slice = self.slots
        self.lasting: Ints | None = None
        if (self._counts > maxsizes).any():
            self.lasting = np.sort(self._order[self._rank >= (self._counts - maxsizes)[self._ring]])

    def _fill_only_ring(self, rings: Rings, numbers: Ints) -> None:
        count, cursor = len(numbers), rings.cursor
        self._order = self._rank = np.arange(count)
        self._ring, self._counts = numbers, np.array([count])
        self.rings, self.newest, self.lasting = numbers[:1], self._order[-1:], None
        if cursor + count <= rings.capacity:
            self.slots, self.target = self._order + cursor, slice(cursor, cursor + count)
            return
        self.slots = self.target = (self._order + cursor) % rings.capacity
        if count > rings.capacity:
            self.lasting = self._order[-rings.capacity :]

    def advance(self, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        """Advance the rings by the k steps; see `Rings.advance`."""
        rings, order, ring = self._all, self._order, self._ring
        if rings.n == 1 and np.count_nonzero(done) <= _FEW_ENDS:
            return self.slots, *rings.advance_run(done, rew)
        state = rings.state_dict()
        done, rew, slots = done[order], rew[order], self.slots[order]
        written = state["writes"][ring] + self._rank
        # A run consists of the steps of one episode in one ring.
        opens = self._rank == 0
        begins = opens.copy()
        begins[1:] |= done[:-1]
        starts = begins.nonzero()[0]
        lasts = np.append(starts[1:], len(ring)) - 1
        run = begins.cumsum() - 1
        goes_on, ring_of = opens[starts], ring[starts]
        began = np.where(goes_on, state["began"][ring_of], written[starts])
        first_slots = np.where(goes_on, state["starts"][ring_of], slots[starts])
        totals = _sums(np.where(_as_wide(goes_on, rew), state["returns"][ring_of], 0.0), rew, run)
        lengths = written[lasts] + 1 - began
        ended = done[lasts]

        returns, lens, firsts = np.zeros(rew.shape), np.zeros(len(ring), _INTP), np.empty(len(ring), _INTP)
        closing = order[lasts[ended]]
        returns[closing] = totals[ended]
        lens[closing] = lengths[ended]
        firsts[order] = first_slots[run]

        # State of each ring after its last run.
        final = np.append(goes_on[1:], True)
        changed, over = ring_of[final], ended[final]
        state["writes"] += self._counts
        state["cursors"] = (state["cursors"] + self._counts) % np.maximum(rings.maxsizes, 1)
        state["sizes"] = np.minimum(state["sizes"] + self._counts, rings.maxsizes)
        state["began"][changed] = np.where(over, state["writes"][changed], began[final])
        next_slots = rings.bases[changed] + state["cursors"][changed]
        state["starts"][changed] = np.where(over, next_slots, first_slots[final])
        state["returns"][changed] = np.where(_as_wide(over, rew), 0.0, totals[final])
        is_uniform = all(len(set(state[name].tolist())) == 1 for name in ("cursors", "sizes", "writes"))
        state["together"] = rings.n == 1 or (bool(rings.even) and is_uniform)
        rings.load_state_dict(state)
        return self.slots, returns, lens, firsts


def _sums(before: npt.NDArray[np.float64], rew: npt.NDArray[np.float64], run: Ints) -> npt.NDArray[np.float64]:
    """Sum the rewards of each run in sequence, so that sums are rounded as if each step were added by its own call."""
    count = len(before)
    runs = np.concatenate([np.arange(count), run])
    values = np.concatenate([before, rew]).reshape(len(runs), -1)
    sums = np.zeros((count, values.shape[1]))
    for position, column in enumerate(values.T):
        sums[:, position] = np.bincount(runs, column, minlength=count)
    return sums.reshape(before.shape)


def _as_wide(flags: Flags, like: npt.NDArray[Any]) -> Flags:
    return flags.reshape(len(flags), *(1,) * (like.ndim - 1))

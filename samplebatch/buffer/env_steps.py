"""Index that maps environment steps to rows in several buffers, for lockstep sampling of complete steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import number_env_steps
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.ring import Ints
from samplebatch.errors import EmptyBufferError, FormatError, SequenceError
from samplebatch.names import PolicyID

_SPARE = 64
"""Excess of incomplete steps over complete ones at which the incomplete ones are removed."""


class _Run:
    __slots__ = ("_memory", "size")

    def __init__(self, dtype: Any, size: int = 0) -> None:
        self._memory = np.zeros(max(size, _SPARE), dtype)
        self.size = size

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._memory[: self.size]

    def extend(self, values: npt.NDArray[Any]) -> None:
        size = self.size + len(values)
        if size > len(self._memory):
            memory = np.zeros(2 * size, self._memory.dtype)
            memory[: self.size] = self.values
            self._memory = memory
        self._memory[self.size : size] = values
        self.size = size

    def __getstate__(self) -> npt.NDArray[Any]:
        return self.values.copy()

    def __setstate__(self, state: npt.NDArray[Any]) -> None:
        self._memory, self.size = state, len(state)


class _Rows:
    """Index of one buffer's rows by step: number of rows per step, and position of each step's first row."""

    __slots__ = ("counts", "of_slot", "offsets", "slots")

    def __init__(self, steps: int, capacity: int) -> None:
        self.counts = _Run(np.intp, steps)
        self.offsets = _Run(np.intp, steps)
        self.slots = _Run(np.intp)
        self.of_slot: Ints = np.zeros(capacity, np.intp)

    def at(self, positions: Ints) -> Ints:
        """Return, for the steps at `positions`, the slots of all rows, grouped by step."""
        counts = self.counts.values[positions]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        before = self.offsets.values[positions] - ends + counts
        slots: Ints = self.slots.values[np.repeat(before, counts) + np.arange(total)]
        return slots


class EnvSteps:
    """Index of environment steps, used by `MultiAgentReplayBuffer` to sample complete steps in lockstep.

    A row is identified by the name of its buffer and its slot.

    >>> steps = EnvSteps()
    >>> walker, guard = (
    ...     (np.array([0, 1, 1]), np.array([0, 1, 2]), 3),
    ...     (np.array([1]), np.array([0]), 3),
    ... )
    >>> steps.add(2, {"walker": walker, "guard": guard})
    >>> (
    ...     len(steps),
    ...     steps.rows("walker", np.array([1, 0])),
    ...     steps.rows("guard", np.array([1, 0])),
    ... )
    (2, array([1, 2, 0]), array([0]))
    >>> steps.lose("walker", np.array([0]))
    >>> len(steps), steps.draw(4, np.random.default_rng(0))
    (1, array([1, 1, 1, 1]))
    """

    def __init__(self) -> None:
        self._numbers = _Run(np.intp)
        self._is_complete = _Run(np.bool_)
        self._buffers: dict[PolicyID, _Rows] = {}
        self._alive = 0
        self._next_number = 0

    def __len__(self) -> int:
        return self._alive

    def lose(self, buffer: PolicyID, slots: Ints) -> None:
        """Mark environment steps as incomplete because a row of each of these steps is overwritten or removed."""
        if buffer in self._buffers:
            self._lose(self._buffers[buffer].of_slot[slots])

    def _lose(self, numbers: Ints) -> None:
        step_numbers = self._numbers.values
        if not len(step_numbers) or not len(numbers):
            return
        positions = np.unique(np.searchsorted(step_numbers, numbers))
        positions = positions[positions < len(step_numbers)]
        # A removed number is located at the position of the next one.
        positions = positions[np.isin(step_numbers[positions], numbers)]
        is_complete = self._is_complete.values
        self._alive -= int(np.count_nonzero(is_complete[positions]))
        is_complete[positions] = False

    def add(self, count: int, rows: dict[PolicyID, tuple[Ints, Ints, int]]) -> None:
        """Append steps.

        rows: for each buffer, a tuple of three values: the step of each row, counted from 0, shape (n,); the slots of
            the stored rows, which are the last m rows, shape (m,); and the buffer's number of slots.
        """
        if self._is_complete.size - self._alive > self._alive + _SPARE:
            self._compact()
        first_number = self._next_number
        self._next_number += count
        steps = self._numbers.size
        self._numbers.extend(np.arange(first_number, self._next_number))
        self._is_complete.extend(np.ones(count, np.bool_))
        self._alive += count
        for name, (step, slots, capacity) in rows.items():
            if name not in self._buffers:
                self._buffers[name] = _Rows(steps, capacity)
            buffer_rows = self._buffers[name]
            skipped = len(step) - len(slots)
            stored_steps = step[skipped:]
            counts = np.bincount(stored_steps, minlength=count)
            buffer_rows.offsets.extend(buffer_rows.slots.size + np.cumsum(counts) - counts)
            buffer_rows.counts.extend(counts)
            buffer_rows.slots.extend(slots[np.argsort(stored_steps, kind="stable")])
            buffer_rows.of_slot[slots] = first_number + stored_steps
            self._lose(first_number + step[:skipped])
        for name, buffer_rows in self._buffers.items():
            if name not in rows:
                buffer_rows.offsets.extend(np.full(count, buffer_rows.slots.size))
                buffer_rows.counts.extend(np.zeros(count, np.intp))

    def _compact(self) -> None:
        complete = np.flatnonzero(self._is_complete.values)
        for buffer_rows in self._buffers.values():
            slots, counts = buffer_rows.at(complete), buffer_rows.counts.values[complete]
            buffer_rows.slots, buffer_rows.counts, buffer_rows.offsets = _Run(np.intp), _Run(np.intp), _Run(np.intp)
            buffer_rows.slots.extend(slots)
            buffer_rows.counts.extend(counts)
            buffer_rows.offsets.extend(np.cumsum(counts) - counts)
        numbers = self._numbers.values[complete]
        self._numbers, self._is_complete = _Run(np.intp), _Run(np.bool_)
        self._numbers.extend(numbers)
        self._is_complete.extend(np.ones(len(complete), np.bool_))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the index as arrays, for `from_state_dict`."""
        self._compact()
        parts = {
            name: {
                "counts": buffer_rows.counts.values,
                "slots": buffer_rows.slots.values,
                "of_slot": buffer_rows.of_slot.copy(),
            }
            for name, buffer_rows in self._buffers.items()
        }
        return {"numbers": self._numbers.values, "begun": self._next_number, "buffers": parts}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Create an index from a `state_dict`."""
        steps = cls()
        numbers = np.asarray(state["numbers"], np.intp)
        steps._numbers.extend(numbers)
        steps._is_complete.extend(np.ones(len(numbers), np.bool_))
        steps._alive, steps._next_number = len(numbers), int(state["begun"])
        for name, part in state["buffers"].items():
            counts, slots, of_slot = (np.array(part[key], np.intp) for key in ("counts", "slots", "of_slot"))
            inside = (slots >= 0) & (slots < len(of_slot))
            if len(counts) != len(numbers) or counts.sum() != len(slots) or (counts < 0).any() or not inside.all():
                raise FormatError(f"the steps of buffer {name!r} must match its rows, got inconsistent counts or slots")
            steps._buffers[name] = buffer_rows = _Rows(0, len(of_slot))
            buffer_rows.counts.extend(counts)
            buffer_rows.offsets.extend(np.cumsum(counts) - counts)
            buffer_rows.slots.extend(slots)
            buffer_rows.of_slot = of_slot
        return steps

    def all(self) -> Ints:
        """Return the positions of all complete steps in ascending order."""
        return np.flatnonzero(self._is_complete.values)

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """Sample positions of complete steps uniformly with replacement."""
        if not self._alive:
            raise EmptyBufferError("a buffer must have a complete environment step to sample in lockstep, got none")
        is_complete = self._is_complete.values
        if 4 * self._alive < len(is_complete):
            every = self.all()
            return every[rng.integers(0, len(every), count)]
        positions = np.zeros(0, np.intp)
        while len(positions) < count:
            missing = count - len(positions)
            picked = rng.integers(0, len(is_complete), missing + missing // 2 + 4)
            positions = np.concatenate([positions, picked[is_complete[picked]]])
        return positions[:count]

    def rows(self, buffer: PolicyID, positions: Ints) -> Ints:
        """Return the slots of a buffer's rows in the given environment steps, grouped by step."""
        buffer_rows = self._buffers.get(buffer)
        return np.zeros(0, np.intp) if buffer_rows is None else buffer_rows.at(positions)


def env_steps_of(parts: dict[PolicyID, SampleBatch], env_steps: int) -> tuple[int, dict[PolicyID, Ints]]:
    """Number the environment steps of a multi-agent batch.

    parts: rows of each policy. If all policies have the columns `eps_id` and `t`, each distinct pair of `eps_id` and
        `t` is a step. Otherwise every policy must have one row per step, in order.

    Returns: the number of environment steps and, by policy, the step number of each row, counted from 0.

    >>> env_steps_of(
    ...     {
    ...         "walker": SampleBatch(eps_id=[5, 5, 6], t=[0, 1, 0]),
    ...         "guard": SampleBatch(eps_id=[5], t=[1]),
    ...     },
    ...     env_steps=3,
    ... )
    (3, {'walker': array([0, 1, 2]), 'guard': array([1])})
    """
    if not parts:
        return 0, {}
    if all({names.EPS_ID, names.T} <= set(part.column_names) for part in parts.values()):
        episodes, times = (
            np.concatenate([np.asarray(part[name]) for part in parts.values()]) for name in (names.EPS_ID, names.T)
        )
        step, episode = number_env_steps(episodes, times)
        ends = np.cumsum([part.count for part in parts.values()])[:-1]
        return len(episode), dict(zip(parts, np.split(step, ends), strict=True))
    for policy, part in parts.items():
        if part.count != env_steps:
            raise SequenceError(
                f"policy {policy!r} must have one row for each of {env_steps} environment steps, or all policies the "
                f"columns {names.EPS_ID!r} and {names.T!r}, got {part.count} rows"
            )
    return env_steps, {policy: np.arange(env_steps) for policy in parts}

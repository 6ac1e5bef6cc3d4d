"""Environment steps: the rows of several buffers at each, so that complete steps can be drawn in lockstep."""

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
"""Excess of incomplete steps over complete ones at which the incomplete ones are dropped together."""


class _Run:
    """An array that grows at its end."""

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
    """Rows of one buffer: their number per step, and each step's first position among all slots."""

    __slots__ = ("counts", "of_slot", "offsets", "slots")

    def __init__(self, steps: int, capacity: int) -> None:
        self.counts = _Run(np.intp, steps)
        self.offsets = _Run(np.intp, steps)
        self.slots = _Run(np.intp)
        self.of_slot: Ints = np.zeros(capacity, np.intp)

    def at(self, places: Ints) -> Ints:
        """Return the slots of the rows of steps, step by step."""
        counts = self.counts.values[places]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        before = self.offsets.values[places] - ends + counts
        found: Ints = self.slots.values[np.repeat(before, counts) + np.arange(total)]
        return found


class EnvSteps:
    """An index of environment steps, from which `MultiAgentReplayBuffer` draws complete ones in lockstep.

    Rows are told by the names of their buffers and their slots.

    Examples
    --------
    >>> steps = EnvSteps()
    >>> walker, guard = (np.array([0, 1, 1]), np.array([0, 1, 2]), 3), (np.array([1]), np.array([0]), 3)
    >>> steps.add(2, {"walker": walker, "guard": guard})
    >>> len(steps), steps.rows("walker", np.array([1, 0])), steps.rows("guard", np.array([1, 0]))
    (2, array([1, 2, 0]), array([0]))
    >>> steps.lose("walker", np.array([0]))
    >>> len(steps), steps.draw(4, np.random.default_rng(0))
    (1, array([1, 1, 1, 1]))
    """

    def __init__(self) -> None:
        self._numbers = _Run(np.intp)
        self._whole = _Run(np.bool_)
        self._buffers: dict[PolicyID, _Rows] = {}
        self._alive = 0
        self._begun = 0

    def __len__(self) -> int:
        return self._alive

    def lose(self, buffer: PolicyID, slots: Ints) -> None:
        """Mark the steps of rows that are overwritten or removed as incomplete."""
        if buffer in self._buffers:
            self._lose(self._buffers[buffer].of_slot[slots])

    def _lose(self, numbers: Ints) -> None:
        known = self._numbers.values
        if not len(known) or not len(numbers):
            return
        places = np.unique(np.searchsorted(known, numbers))
        places = places[places < len(known)]
        # A number that has been dropped is found in the place of the next one.
        places = places[np.isin(known[places], numbers)]
        whole = self._whole.values
        self._alive -= int(np.count_nonzero(whole[places]))
        whole[places] = False

    def add(self, count: int, rows: dict[PolicyID, tuple[Ints, Ints, int]]) -> None:
        """Add steps, in order.

        Parameters
        ----------
        count
            How many.
        rows
            For each buffer that has rows of them: the step of each row, from 0 on, shape (n,); the slots that the rows
            went to, the last m of them if there were more rows than slots, shape (m,); and how many slots there are.
        """
        if self._whole.size - self._alive > self._alive + _SPARE:
            self._compact()
        begun = self._begun
        self._begun += count
        steps = self._numbers.size
        self._numbers.extend(np.arange(begun, self._begun))
        self._whole.extend(np.ones(count, np.bool_))
        self._alive += count
        for name, (step, slots, capacity) in rows.items():
            if name not in self._buffers:
                self._buffers[name] = _Rows(steps, capacity)
            own = self._buffers[name]
            skipped = len(step) - len(slots)
            kept = step[skipped:]
            counts = np.bincount(kept, minlength=count)
            own.offsets.extend(own.slots.size + np.cumsum(counts) - counts)
            own.counts.extend(counts)
            own.slots.extend(slots[np.argsort(kept, kind="stable")])
            own.of_slot[slots] = begun + kept
            self._lose(begun + step[:skipped])
        for name, own in self._buffers.items():
            if name not in rows:
                own.offsets.extend(np.full(count, own.slots.size))
                own.counts.extend(np.zeros(count, np.intp))

    def _compact(self) -> None:
        """Drop incomplete steps."""
        kept = np.flatnonzero(self._whole.values)
        for own in self._buffers.values():
            slots, counts = own.at(kept), own.counts.values[kept]
            own.slots, own.counts, own.offsets = _Run(np.intp), _Run(np.intp), _Run(np.intp)
            own.slots.extend(slots)
            own.counts.extend(counts)
            own.offsets.extend(np.cumsum(counts) - counts)
        numbers = self._numbers.values[kept]
        self._numbers, self._whole = _Run(np.intp), _Run(np.bool_)
        self._numbers.extend(numbers)
        self._whole.extend(np.ones(len(kept), np.bool_))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as arrays for `from_state_dict`."""
        self._compact()
        parts = {
            name: {"counts": own.counts.values, "slots": own.slots.values, "of_slot": own.of_slot.copy()}
            for name, own in self._buffers.items()
        }
        return {"numbers": self._numbers.values, "begun": self._begun, "buffers": parts}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Create the steps of a `state_dict`."""
        made = cls()
        numbers = np.asarray(state["numbers"], np.intp)
        made._numbers.extend(numbers)
        made._whole.extend(np.ones(len(numbers), np.bool_))
        made._alive, made._begun = len(numbers), int(state["begun"])
        for name, part in state["buffers"].items():
            counts, slots, of_slot = (np.array(part[key], np.intp) for key in ("counts", "slots", "of_slot"))
            inside = (slots >= 0) & (slots < len(of_slot))
            if len(counts) != len(numbers) or counts.sum() != len(slots) or (counts < 0).any() or not inside.all():
                raise FormatError(f"the steps of buffer {name!r} must fit its rows, they do not")
            made._buffers[name] = own = _Rows(0, len(of_slot))
            own.counts.extend(counts)
            own.offsets.extend(np.cumsum(counts) - counts)
            own.slots.extend(slots)
            own.of_slot = of_slot
        return made

    def all(self) -> Ints:
        """Return the places of all complete steps, in order."""
        return np.flatnonzero(self._whole.values)

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """Draw the places of complete steps uniformly with replacement."""
        if not self._alive:
            raise EmptyBufferError(
                "a buffer must have a step of the environment whose rows are all there to draw from, it has none"
            )
        whole = self._whole.values
        if 4 * self._alive < len(whole):
            every = self.all()
            return every[rng.integers(0, len(every), count)]
        found = np.zeros(0, np.intp)
        while len(found) < count:
            wanted = count - len(found)
            picked = rng.integers(0, len(whole), wanted + wanted // 2 + 4)
            found = np.concatenate([found, picked[whole[picked]]])
        return found[:count]

    def rows(self, buffer: PolicyID, places: Ints) -> Ints:
        """Return the slots of the rows that a buffer has of steps, step by step."""
        own = self._buffers.get(buffer)
        return np.zeros(0, np.intp) if own is None else own.at(places)


def env_steps_of(parts: dict[PolicyID, SampleBatch], env_steps: int) -> tuple[int, dict[PolicyID, Ints]]:
    """Number the steps of the environment of a multi-agent batch.

    Parameters
    ----------
    parts
        The rows of each policy. With columns `eps_id` and `t` in all of them, a step is a distinct pair of both;
        otherwise every policy must have a row for each step, in order.
    env_steps
        How many steps the batch stands for.

    Returns
    -------
    tuple
        How many steps there are, and for each policy the step of each row, from 0 on.

    Examples
    --------
    >>> env_steps_of(
    ...     {"walker": SampleBatch(eps_id=[5, 5, 6], t=[0, 1, 0]), "guard": SampleBatch(eps_id=[5], t=[1])}, env_steps=3
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
                f"policy {policy!r} must have a row for each of {env_steps} environment steps, or all policies the "
                f"columns {names.EPS_ID!r} and {names.T!r}, it has {part.count}"
            )
    return env_steps, {policy: np.arange(env_steps) for policy in parts}

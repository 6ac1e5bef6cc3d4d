"""How the rows to sample are chosen: a part that a buffer holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np

from samplebatch.buffer.ring import Ints
from samplebatch.buffer.table import Table
from samplebatch.errors import EmptyBufferError

_ROUNDS = 3
"""Rounds of drawing and looking before all rows are looked at."""


class Sampler(ABC):
    """Chooses rows of a table, whose slots it knows by number.

    Attributes
    ----------
    listens
        Whether it wants to be told of every row that is added or removed.
    """

    listens: ClassVar[bool] = False

    @abstractmethod
    def draw(self, table: Table, ring: int | None, count: int, rng: np.random.Generator) -> Ints:
        """Draw the slots of `count` rows, of one ring or of all.

        Raises
        ------
        EmptyBufferError
            If there are none to draw from.
        """

    def added(self, slots: Ints) -> None:
        """Take notice that rows were written to slots."""
        return None

    def removed(self, slots: Ints) -> None:
        """Take notice that slots have no rows any more."""
        return None

    def moved(self, slots: Ints, state: Any) -> None:
        """Take notice that rows of which `live` returned this state are in other slots now, shape (n,)."""
        return None

    def columns(self, table: Table, slots: Ints) -> dict[str, Any]:
        """Return what rows that are read have from the sampler: values of shape (...) for slots of shape (...)."""
        return {}

    @abstractmethod
    def live(self, slots: Ints) -> Any:
        """Return what the sampler knows of itself and of slots, shape (n,); `revived` is the inverse."""

    @classmethod
    @abstractmethod
    def revived(cls, capacity: int, slots: Ints, state: Any) -> Self:
        """Make a sampler of what `live` returned, for a table of so many slots and n of them."""


class Uniform(Sampler):
    """Every row as likely as any other.

    Parameters
    ----------
    frames
        How many steps of its episode a row must have up to it to be drawn: the frames of a whole stack.
    """

    def __init__(self, frames: int = 1) -> None:
        self.frames = frames

    def draw(self, table: Table, ring: int | None, count: int, rng: np.random.Generator) -> Ints:
        """Draw the slots of `count` rows with replacement; see `Sampler.draw`."""
        if self.frames < 2:
            return table.rings.draw(count, rng, ring)
        found = np.zeros(0, np.intp)
        for _ in range(_ROUNDS):
            wanted = count - len(found)
            picked = table.rings.draw(wanted + wanted // 4 + 4, rng, ring)
            whole = picked[table.rings.has_frames(picked, self.frames, table.done)]
            found = np.concatenate([found, whole]) if len(found) else whole
            if len(found) >= count:
                return found[:count]
        every = whole_stacks(table, ring, self.frames)
        if not len(every):
            raise EmptyBufferError(
                f"a buffer with sample_avail must have a row with {self.frames} frames to draw from, it has none yet; "
                "add more steps, or leave sample_avail out"
            )
        return np.concatenate([found, every[rng.integers(0, len(every), count - len(found))]])

    def live(self, slots: Ints) -> int:
        """Return the number of frames."""
        return self.frames

    @classmethod
    def revived(cls, capacity: int, slots: Ints, state: Any) -> Self:
        """Make a sampler for as many frames."""
        return cls(int(state))


def whole_stacks(table: Table, ring: int | None, frames: int) -> Ints:
    """Return the slots of all rows with so many frames, of one ring or of all, oldest first, ring by ring."""
    every = table.rings.chronological(ring)
    if frames < 2 or not len(every):
        return every
    return every[table.rings.has_frames(every, frames, table.done)]

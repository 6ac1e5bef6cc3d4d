"""Items: the content of a replay table, behind one interface for steps and for fragments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from samplebatch.buffer import samplers
from samplebatch.errors import ArgumentError, near_names
from samplebatch.service.declared_columns import DeclaredColumns
from samplebatch.service.limiter import Hold

if TYPE_CHECKING:
    from _thread import RLock

Mode = Literal["steps", "sequences", "episodes", "fragments"]
Ints = npt.NDArray[np.int64]
Pause = Callable[[int], None]
"""Called between portions of a draw with the items that were sampled since: others get the lock meanwhile."""


@dataclass(frozen=True)
class Request:
    """A checked request for a sample.

    - `batch_size`: steps, sequences, episodes or fragments that are asked for.
    - `mode`: unit of `batch_size`.
    - `options`: arguments of that mode.
    - `seed`: of the generator that draws; None for the table's own generator.
    - `max_nbytes`: bytes that the sample may have; None for any number.
    """

    batch_size: int
    mode: Mode
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    max_nbytes: int | None = None


class Sample(samplers.Sample[Any, Any]):
    """A `samplebatch.Sample` of a replay table.

    Attributes
    ----------
    batch
        Rows. From a table of steps a `Batch`, as from the replay buffer: shape (n, ...) for steps and for the
        concatenated steps of episodes; (n, length, ...) for sequences. From a table of fragments the concatenated
        fragments, of the inserted type.
    indices
        Where they are, to be handed back to `update_weight`: slots of steps, shape (n,); of sequences, shape
        (n, length), -1 where there is none; numbers of fragments, shape (k,).
    generation
        Generations of the slots, shape (n,); for sequences those of their first steps after burn-in; for fragments
        zeros.
    weights
        Importance weights, shape of `generation`; None where nothing is drawn by priority.
    lengths
        Rows of each episode or fragment, shape (k,); None for steps and sequences.
    held_s
        Seconds that the table held the request back.
    """

    lengths: Ints | None
    held_s: float

    def __new__(  # noqa: D102
        cls,
        batch: Any,
        indices: Any,
        generation: Any = None,
        weights: Any = None,
        lengths: Ints | None = None,
        held_s: float = 0.0,
    ) -> Self:
        sample = super().__new__(cls, batch, indices, weights, generation)
        sample.lengths, sample.held_s = lengths, held_s
        return sample


@dataclass(frozen=True)
class InsertResult:
    """The result of an insert into a replay table, for writers.

    Attributes
    ----------
    inserted
        Rows that were inserted.
    indices
        Where the items are: slots of steps, shape (rows,); the number of a fragment, shape (1,).
    size
        Items of the table afterwards.
    held_s
        Seconds that the table held the request back.
    """

    inserted: int
    indices: npt.NDArray[np.int64]
    size: int
    held_s: float


class Items(ABC):
    """The items of a replay table; all but `prepare`, `request` and `finish` are called with the lock held.

    - `unit`: the word for several items.
    - `modes`: the modes of sampling, the usual one first.
    - `lock`: the lock of the table.
    - `capacity`: how many items there may be.
    - `max_times`: how often each may be sampled; 0 for any number of times.
    - `declared`: columns that rows must have; None if the first rows decide.
    """

    unit: str
    modes: tuple[Mode, ...]
    lock: RLock
    capacity: int
    max_times: int
    declared: DeclaredColumns | None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    def declare(self, columns: DeclaredColumns | None) -> None:
        """Accept only rows with these columns from now on; None accepts those that the first rows have."""
        self.declared = columns

    @abstractmethod
    def prepare(self, rows: Any, priorities: Any, key: Any) -> tuple[Any, int, int]:
        """Check rows, and return them ready for `insert`, how many items they are, and how many rows."""

    @abstractmethod
    def hold_insert(self, ready: Any) -> Hold | None:
        """Return why there is no room for the result of `prepare`; None if there is room."""

    @abstractmethod
    def insert(self, ready: Any, writer: str) -> Ints:
        """Insert rows, and return the indices of the items."""

    @abstractmethod
    def request(self, batch_size: int, mode: Mode, options: Mapping[str, Any], seed: int | None) -> Request:
        """Check a request for a sample."""

    @abstractmethod
    def hold_sample(self, request: Request) -> Hold | None:
        """Return which items a request lacks; None if it lacks none."""

    @abstractmethod
    def draw(self, request: Request, pause: Pause) -> tuple[Any, int]:
        """Draw a sample for `finish`, and return it and how many items were sampled.

        Raises CapacityError if it would have more bytes than the request permits; nothing is sampled then, and nothing
        gathered.
        """

    @abstractmethod
    def finish(self, drawn: Any) -> Sample:
        """Make a sample of one that is drawn; the lock is free."""

    @abstractmethod
    def update_weight(self, indices: Any, weights: Any, generations: Any) -> int:
        """Give items new priorities, and return how many were there."""

    @abstractmethod
    def set_max_times(self, times: int) -> None:
        """Change how often each item may be sampled."""

    @abstractmethod
    def reset(self) -> None:
        """Remove all items."""

    @property
    def weight(self) -> float:
        """The sum of the weights by which items are drawn: their number, unless it goes by priority."""
        return float(len(self))

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory of the items in bytes."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the items, and all that it needs to carry on as it would have."""

    def freeze(self) -> dict[str, Any]:
        """Return the state as it is at this moment, for a checkpoint; large parts may be read later."""
        return self.state_dict()

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a state of items of the same kind."""


def take_options(options: Mapping[str, Any], defaults: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Merge options into their defaults.

    Raises ArgumentError if one is unknown; names the near ones.

    >>> take_options({"length": 8}, {"length": 1, "burn_in": 0}, "sequences")
    {'length': 8, 'burn_in': 0}
    """
    for name in options:
        if name not in defaults:
            raise ArgumentError(f"{owner} have no option {name!r}; {near_names(name, defaults)}")
    return {**defaults, **options}

"""Items: interface of a replay table's content, either steps or fragments."""

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
"""Callback that releases the lock between portions of a draw; its argument is the size of the last portion in items."""


@dataclass(frozen=True)
class Request:
    """Validated request for a sample.

    - `batch_size`: number of requested steps, sequences, episodes or fragments.
    - `mode`: unit of `batch_size`.
    - `options`: options of the mode, such as `n_step` for steps.
    - `seed`: seed of the generator for this sample; None for the table's generator.
    - `max_nbytes`: maximum size of the sample in bytes; None for no limit.
    """

    batch_size: int
    mode: Mode
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    max_nbytes: int | None = None


class Sample(samplers.Sample[Any, Any]):
    """Sample of a replay table: a `samplebatch.Sample` with the lengths of episodes or fragments and the waiting time.

    Attributes
    ----------
    batch
        Sampled rows. A table of steps returns a `Batch`, as replay buffers do. Columns have shape (n, ...) for steps
        and concatenated episodes, and (n, length, ...) for sequences. A table of fragments returns the concatenated
        fragments as a batch of the inserted type.
    indices
        Indices for `update_weight`. For steps and episodes, `indices` contains slots, shape (n,). For sequences,
        `indices` contains slots, shape (n, length), and -1 for padding. For fragments, `indices` contains sequence
        numbers, shape (k,).
    generation
        Generations of the slots, shape (n,). For sequences, `generation` contains the generation of each sequence's
        first step after burn-in. For fragments, `generation` contains zeros, shape (k,).
    weights
        Importance weights, with the same shape as `generation`; None if the table does not use priorities.
    lengths
        Number of rows of each episode or fragment, shape (k,); None for steps and sequences.
    held_s
        Seconds for which the table blocked the request.
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
    """Result of an insert into a replay table.

    Attributes
    ----------
    inserted
        Number of inserted rows.
    indices
        Slots of the inserted steps, shape (rows,), or sequence number of the fragment, shape (1,); empty if nothing was
        inserted.
    size
        Number of items in the table after the insert.
    held_s
        Seconds for which the table blocked the request.
    """

    inserted: int
    indices: npt.NDArray[np.int64]
    size: int
    held_s: float


class Items(ABC):
    """Content of a replay table; callers must hold the lock, except for `prepare`, `request` and `finish`.

    - `unit`: `"steps"` or `"fragments"`.
    - `modes`: supported sampling modes, with the default mode first.
    - `lock`: lock of the table.
    - `capacity`: maximum number of items.
    - `max_times`: maximum number of times that each item is sampled; 0 for no limit.
    - `declared`: required columns; None if the first rows determine them.
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
        """Set the columns that later rows must have; None lets the first rows determine the columns."""
        self.declared = columns

    @abstractmethod
    def prepare(self, rows: Any, priorities: Any, key: Any) -> tuple[Any, int, int]:
        """Validate rows; return the argument for `insert`, the number of items and the number of rows."""

    @abstractmethod
    def hold_insert(self, prepared: Any) -> Hold | None:
        """Return why a full table blocks the insert of prepared rows; None if the insert is not blocked."""

    @abstractmethod
    def insert(self, prepared: Any, writer: str) -> Ints:
        """Insert rows; return the indices of the items."""

    @abstractmethod
    def request(self, batch_size: int, mode: Mode, options: Mapping[str, Any], seed: int | None) -> Request:
        """Validate a request for a sample."""

    @abstractmethod
    def hold_sample(self, request: Request) -> Hold | None:
        """Return why a request must wait for items; None if enough items are available."""

    @abstractmethod
    def draw(self, request: Request, pause: Pause) -> tuple[Any, int]:
        """Draw a sample; return the argument for `finish` and the number of sampled items.

        Raises CapacityError if the sample would exceed `max_nbytes` of the request; nothing is sampled or gathered.
        """

    @abstractmethod
    def finish(self, selection: Any) -> Sample:
        """Gather the rows of a drawn sample; does not require the lock."""

    @abstractmethod
    def update_weight(self, indices: Any, weights: Any, generations: Any) -> int:
        """Set new priorities of items; return the number of items that still exist."""

    @abstractmethod
    def set_max_times(self, times: int) -> None:
        """Change the maximum number of times that each item is sampled."""

    @abstractmethod
    def reset(self) -> None:
        """Remove all items."""

    @property
    def weight(self) -> float:
        """Sum of all sampling weights; the number of items if the table does not use priorities."""
        return float(len(self))

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory use of all items in bytes."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the items and all state that later samples depend on."""

    def freeze(self) -> dict[str, Any]:
        """Return a snapshot of the state for a checkpoint; the rows may be read after the lock is released."""
        return self.state_dict()

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], max_times: int) -> None:
        """Restore the result of `state_dict` of a table of the same kind; an error leaves the items unchanged.

        - `max_times`: maximum number of times that each item of the state may be sampled; 0 for no limit.
        """


def take_options(options: Mapping[str, Any], defaults: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Merge options into their defaults.

    Raises ArgumentError, with similar names as a hint, if an option is unknown.

    >>> take_options({"length": 8}, {"length": 1, "burn_in": 0}, "sequences")
    {'length': 8, 'burn_in': 0}
    """
    for name in options:
        if name not in defaults:
            raise ArgumentError(f"{owner} have no option {name!r}; {near_names(name, defaults)}")
    return {**defaults, **options}

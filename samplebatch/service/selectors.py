"""Selectors: item selection policies of a table of fragments, for sampling and for eviction."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from samplebatch.arguments import finite
from samplebatch.buffer.samplers import Prioritized
from samplebatch.errors import FormatError


@dataclass(slots=True, eq=False)
class Item:
    """Fragment in a table.

    - `number`: sequence number of the insertion, which identifies the fragment.
    - `fragment`: the fragment.
    - `priority`: priority, for selectors that use priorities.
    - `key`: key of the fragment in a table of kind `"key"`; None in other tables.
    - `times`: number of times that the fragment was sampled.
    - `nbytes`: size of the fragment's columns in bytes.
    """

    number: int
    fragment: Any
    priority: float = 1.0
    key: str | None = None
    times: int = field(default=0)
    nbytes: int = 0


Items = OrderedDict[int, Item]
"""Fragments of a table by number, oldest first."""


class Selector(ABC):
    """Item selection policy of a table; notified of insertions, updates and removals.

    - `items`: fragments of the table; the table updates this mapping.
    """

    by_priority: ClassVar[bool] = False

    def __init__(self, items: Items) -> None:
        self._items = items

    @abstractmethod
    def pick(self, rng: np.random.Generator) -> Item:
        """Select a fragment from a non-empty table."""

    def add(self, item: Item) -> None:
        """Add a fragment."""
        return None

    def change(self, item: Item) -> None:
        """Handle a change of a fragment's `priority` or `times`."""
        return None

    def remove(self, item: Item) -> None:
        """Handle the removal of a fragment."""
        return None

    def state_dict(self) -> Any:
        """Return the state of the selector as plain values; the fragments are not included."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore the result of `state_dict`; all fragments of the saved selector must have been added before.

        Raises FormatError if the state does not match the fragments.
        """
        return None


class Oldest(Selector):
    """First-in, first-out selection."""

    def pick(self, rng: np.random.Generator) -> Item:
        """Select the oldest fragment."""
        return self._items[next(iter(self._items))]


class Newest(Selector):
    """Last-in, first-out selection."""

    def pick(self, rng: np.random.Generator) -> Item:
        """Select the newest fragment."""
        return self._items[next(reversed(self._items))]


class AnyItem(Selector):
    """Uniform random selection."""

    def __init__(self, items: Items) -> None:
        super().__init__(items)
        self._numbers: list[int] = []
        self._positions: dict[int, int] = {}

    def pick(self, rng: np.random.Generator) -> Item:
        """Draw a fragment uniformly."""
        return self._items[self._numbers[int(rng.integers(len(self._numbers)))]]

    def add(self, item: Item) -> None:
        """Add a fragment."""
        self._positions[item.number] = len(self._numbers)
        self._numbers.append(item.number)

    def remove(self, item: Item) -> None:
        """Remove a fragment; the last fragment of the internal order moves to the free position."""
        position, last = self._positions.pop(item.number), self._numbers.pop()
        if last != item.number:
            self._numbers[position] = last
            self._positions[last] = position

    def state_dict(self) -> list[int]:
        """Return the numbers of the fragments in internal order, which determines later draws."""
        return list(self._numbers)

    def load_state_dict(self, state: list[int]) -> None:
        """Restore the internal order; see `Selector.load_state_dict`."""
        if sorted(state) != sorted(self._numbers):
            raise FormatError("the state of a selector must match the fragments of its table, got other fragments")
        self._numbers = list(state)
        self._positions = {number: position for position, number in enumerate(state)}


class ByPriority(Selector):
    """Selection with probability proportional to priority, as in prioritized buffers.

    - `items`: fragments of the table.
    - `capacity`: maximum number of fragments.
    - `alpha`, `beta`: as in `PrioritizedReplayBuffer`.
    """

    by_priority = True

    def __init__(self, items: Items, capacity: int, alpha: float, beta: float) -> None:
        super().__init__(items)
        self._sampler = Prioritized(capacity, alpha, beta)
        self._free = [*range(capacity - 1, -1, -1)]
        self._slots: dict[int, int] = {}
        self._owners: dict[int, Item] = {}

    def pick(self, rng: np.random.Generator) -> Item:
        """Draw a fragment with probability proportional to its priority."""
        return self._owners[int(self._sampler.tree.draw(1, rng)[0])]

    def weight(self, item: Item, beta: float | None) -> float:
        """Return the unnormalized importance weight of a fragment; `beta` defaults to the table's exponent."""
        table_beta = self._sampler.beta
        try:
            self._sampler.beta = table_beta if beta is None else beta
            return float(self._sampler.importance(np.array([self._slots[item.number]]))[0])
        finally:
            self._sampler.beta = table_beta

    def add(self, item: Item) -> None:
        """Add a fragment."""
        slot = self._free.pop()
        self._slots[item.number], self._owners[slot] = slot, item
        self._set(slot, item)

    def change(self, item: Item) -> None:
        """Update the sampling weight of a fragment."""
        self._set(self._slots[item.number], item)

    def _set(self, slot: int, item: Item) -> None:
        self._sampler.update(np.array([slot]), np.array([item.priority]))

    def remove(self, item: Item) -> None:
        """Set the sampling weight of a removed fragment to 0."""
        slot = self._slots.pop(item.number)
        del self._owners[slot]
        self._sampler.on_remove(np.array([slot]))
        self._free.append(slot)

    def state_dict(self) -> dict[str, Any]:
        """Return the slots of the fragments in the sum tree, the free slots, and the smallest priority so far."""
        slots = [self._slots[number] for number in self._items]
        return {"slots": slots, "free": list(self._free), "smallest": float(self._sampler.smallest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the slots of the fragments; see `Selector.load_state_dict`."""
        slots, free = list(state["slots"]), list(state["free"])
        smallest = finite("smallest", state["smallest"])
        if len(slots) != len(self._items) or sorted(slots + free) != list(range(len(slots) + len(self._free))):
            raise FormatError("the state of a selector must match the fragments of its table, got other fragments")
        self._sampler.on_remove(np.array(list(self._owners), np.intp))
        self._slots = dict(zip(self._items, slots, strict=True))
        self._owners = dict(zip(slots, self._items.values(), strict=True))
        self._free = free
        for slot, item in self._owners.items():
            self._set(slot, item)
        self._sampler.smallest = smallest


class _Heap(Selector):
    """Selection of the fragment with the lowest rank, by a heap with lazy deletion; ties select the oldest fragment."""

    def __init__(self, items: Items) -> None:
        super().__init__(items)
        self._heap: list[tuple[float, int]] = []

    @abstractmethod
    def rank(self, item: Item) -> float:
        """Return the rank of a fragment."""

    def pick(self, rng: np.random.Generator) -> Item:
        while True:
            rank, number = self._heap[0]
            item = self._items.get(number)
            if item is not None and self.rank(item) == rank:
                return item
            heapq.heappop(self._heap)

    def add(self, item: Item) -> None:
        """Insert a fragment; rebuild the heap if most entries are stale."""
        heapq.heappush(self._heap, (self.rank(item), item.number))
        if len(self._heap) > 64 + 2 * len(self._items):
            self._heap = [(self.rank(entry), entry.number) for entry in self._items.values()]
            heapq.heapify(self._heap)

    def change(self, item: Item) -> None:
        """Insert a fragment with its new rank; the previous entry becomes stale."""
        self.add(item)


class LowestPriority(_Heap):
    """Selection of the fragment with the lowest priority; ties select the oldest fragment."""

    by_priority = True

    def rank(self, item: Item) -> float:
        """Return the priority."""
        return item.priority


class MostSampled(_Heap):
    """Selection of the most frequently sampled fragment; ties select the oldest fragment."""

    def rank(self, item: Item) -> float:
        """Return the negated number of times that the fragment was sampled."""
        return -item.times


REMOVERS: dict[str, type[Selector]] = {
    "fifo": Oldest,
    "lifo": Newest,
    "uniform": AnyItem,
    "lowest_priority": LowestPriority,
    "most_sampled": MostSampled,
}
"""Eviction policies by name."""

"""Selectors: how a table of fragments chooses the next to sample, or to remove to make room."""

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
    """A fragment in a table.

    - `number`: how many fragments were inserted before it, ever: its id.
    - `fragment`: the fragment.
    - `priority`: how much it counts for samplers and removers that look at priorities.
    - `key`: its key in a table by key.
    - `times`: how often it was sampled.
    - `nbytes`: bytes of its columns.
    """

    number: int
    fragment: Any
    priority: float = 1.0
    key: str | None = None
    times: int = field(default=0)
    nbytes: int = 0


Items = OrderedDict[int, Item]
"""The fragments of a table by their numbers, oldest first."""


class Selector(ABC):
    """Item selection policy of a table; notified of insertions, updates and removals.

    - `items`: the table's fragments, which the table changes.
    """

    by_priority: ClassVar[bool] = False

    def __init__(self, items: Items) -> None:
        self._items = items

    @abstractmethod
    def pick(self, rng: np.random.Generator) -> Item:
        """Choose one of at least one fragment."""

    def add(self, item: Item) -> None:
        """Add a fragment."""
        return None

    def change(self, item: Item) -> None:
        """Note that a fragment was sampled, or has another priority."""
        return None

    def remove(self, item: Item) -> None:
        """Note that a fragment has gone."""
        return None

    def state_dict(self) -> Any:
        """Return as plain values all that later draws depend on beside the fragments, for `load_state_dict`."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore a state, after `add` was called for the same fragments.

        Raises FormatError if it is the state of other fragments.
        """
        return None


class Oldest(Selector):
    """First in, first out."""

    def pick(self, rng: np.random.Generator) -> Item:
        """Choose the oldest."""
        return self._items[next(iter(self._items))]


class Newest(Selector):
    """Last in, first out."""

    def pick(self, rng: np.random.Generator) -> Item:
        """Choose the newest."""
        return self._items[next(reversed(self._items))]


class AnyItem(Selector):
    """Each as likely as any other."""

    def __init__(self, items: Items) -> None:
        super().__init__(items)
        self._numbers: list[int] = []
        self._places: dict[int, int] = {}

    def pick(self, rng: np.random.Generator) -> Item:
        """Draw one."""
        return self._items[self._numbers[int(rng.integers(len(self._numbers)))]]

    def add(self, item: Item) -> None:
        """Add a fragment."""
        self._places[item.number] = len(self._numbers)
        self._numbers.append(item.number)

    def remove(self, item: Item) -> None:
        """Remove a fragment; the last one moves to its position."""
        position, last = self._places.pop(item.number), self._numbers.pop()
        if last != item.number:
            self._numbers[position] = last
            self._places[last] = position

    def state_dict(self) -> list[int]:
        """Return the order in which fragments are drawn from."""
        return list(self._numbers)

    def load_state_dict(self, state: list[int]) -> None:
        """Draw from the fragments in this order; see `Selector.load_state_dict`."""
        if sorted(state) != sorted(self._numbers):
            raise FormatError("the state of a selector must have the numbers of its fragments, got others")
        self._numbers = list(state)
        self._places = {number: position for position, number in enumerate(state)}


class ByPriority(Selector):
    """In proportion to priorities, with the sum tree and the importance weights of prioritized buffers.

    - `items`: the table's fragments.
    - `capacity`: how many there may be.
    - `alpha`, `beta`: as for `PrioritizedReplayBuffer`.
    """

    by_priority = True

    def __init__(self, items: Items, capacity: int, alpha: float, beta: float) -> None:
        super().__init__(items)
        self._sampler = Prioritized(capacity, alpha, beta)
        self._free = [*range(capacity - 1, -1, -1)]
        self._slots: dict[int, int] = {}
        self._owners: dict[int, Item] = {}

    def pick(self, rng: np.random.Generator) -> Item:
        """Draw one in proportion to its priority."""
        return self._owners[int(self._sampler.tree.draw(1, rng)[0])]

    def weight(self, item: Item, beta: float | None) -> float:
        """Return the importance weight of a fragment, not divided by the largest."""
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
        """Note that a fragment has another priority."""
        self._set(self._slots[item.number], item)

    def _set(self, slot: int, item: Item) -> None:
        self._sampler.update(np.array([slot]), np.array([item.priority]))

    def remove(self, item: Item) -> None:
        """Set the weight of one that has gone to zero."""
        slot = self._slots.pop(item.number)
        del self._owners[slot]
        self._sampler.on_remove(np.array([slot]))
        self._free.append(slot)

    def state_dict(self) -> dict[str, Any]:
        """Return the slots of fragments in the tree, and the smallest priority so far."""
        slots = [self._slots[number] for number in self._items]
        return {"slots": slots, "free": list(self._free), "smallest": float(self._sampler.smallest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the fragments into these slots; see `Selector.load_state_dict`."""
        slots, free = list(state["slots"]), list(state["free"])
        smallest = finite("smallest", state["smallest"])
        if len(slots) != len(self._items) or sorted(slots + free) != list(range(len(slots) + len(self._free))):
            raise FormatError("the state of a selector must have the numbers of its fragments, got others")
        self._sampler.on_remove(np.array(list(self._owners), np.intp))
        self._slots = dict(zip(self._items, slots, strict=True))
        self._owners = dict(zip(slots, self._items.values(), strict=True))
        self._free = free
        for slot, item in self._owners.items():
            self._set(slot, item)
        self._sampler.smallest = smallest


class _Heap(Selector):
    """The fragment with the least rank, the oldest of equals: a heap from which stale entries are dropped late."""

    def __init__(self, items: Items) -> None:
        super().__init__(items)
        self._heap: list[tuple[float, int]] = []

    @abstractmethod
    def rank(self, item: Item) -> float:
        """Return the number that the least of is chosen."""

    def pick(self, rng: np.random.Generator) -> Item:
        """Choose the one of least rank."""
        while True:
            rank, number = self._heap[0]
            item = self._items.get(number)
            if item is not None and self.rank(item) == rank:
                return item
            heapq.heappop(self._heap)

    def add(self, item: Item) -> None:
        """Enter a fragment, and drop stale entries once they are most of all."""
        heapq.heappush(self._heap, (self.rank(item), item.number))
        if len(self._heap) > 64 + 2 * len(self._items):
            self._heap = [(self.rank(one), one.number) for one in self._items.values()]
            heapq.heapify(self._heap)

    def change(self, item: Item) -> None:
        """Enter a fragment with its new rank; the old entry is stale."""
        self.add(item)


class LowestPriority(_Heap):
    """The lowest priority, the oldest of equals."""

    by_priority = True

    def rank(self, item: Item) -> float:
        """Return the priority."""
        return item.priority


class MostSampled(_Heap):
    """The most often sampled, the oldest of equals."""

    def rank(self, item: Item) -> float:
        """Return how often it was sampled, negative."""
        return -item.times


REMOVERS: dict[str, type[Selector]] = {
    "fifo": Oldest,
    "lifo": Newest,
    "uniform": AnyItem,
    "lowest_priority": LowestPriority,
    "most_sampled": MostSampled,
}
"""The rules by which a fragment is removed to make room, by the words for them."""

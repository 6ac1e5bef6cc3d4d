"""Values that are slow to make and often asked for again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Memory of the values that were made last, held by readers of many things of a few kinds.

    Parameters
    ----------
    limit
        How many values are remembered; the one that was made first is forgotten first.

    Examples
    --------
    >>> squares = Recent[int, int](limit=2)
    >>> squares.get(3, lambda: 9), squares.get(3, lambda: 10)
    (9, 9)
    """

    __slots__ = ("_adding", "_limit", "_values")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[K, V] = {}
        self._adding = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, which is made if it is not remembered; raises as that does."""
        try:
            return self._values[key]
        except KeyError:
            pass
        value = make()
        with self._adding:
            while len(self._values) >= self._limit:
                del self._values[next(iter(self._values))]
            self._values[key] = value
        return value

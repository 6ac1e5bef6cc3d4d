"""TakenNumbers: the fragments that a table has taken from its writers, so that none is taken twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from samplebatch.arguments import whole
from samplebatch.errors import FormatError

MAX_STREAMS: Final = 1 << 16
"""Streams of writers of which a table remembers the last fragment."""


class TakenNumbers:
    """The number of the last fragment that a table has taken from each stream of its writers.

    The fragments of a stream come in the order of their numbers, so one whose number is not above that of the last one
    was sent again.

    Examples
    --------
    >>> taken = TakenNumbers()
    >>> taken.note("actor-0", "a", 1)
    >>> taken.includes("actor-0", "a", 1), taken.includes("actor-0", "a", 2), taken.includes("actor-0", "b", 1)
    (True, False, False)
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], int] = OrderedDict()

    def last(self, writer: str, stream: str) -> int:
        """Return the number of the last fragment that was taken from a stream of a writer; 0 if there is none."""
        return self._last.get((writer, stream), 0)

    def includes(self, writer: str, stream: str, number: int) -> bool:
        """Tell whether a fragment was taken; fragments without a number, 0, never were."""
        return 0 < number <= self.last(writer, stream)

    def note(self, writer: str, stream: str, number: int) -> None:
        """Note that a fragment was taken, if it has a number.

        The stream that was silent for the longest time is forgotten, if there are too many.
        """
        if not number:
            return
        self._last[writer, stream] = number
        self._last.move_to_end((writer, stream))
        if len(self._last) > MAX_STREAMS:
            self._last.popitem(last=False)

    def state(self) -> list[list[Any]]:
        """List the writer, the name and the number of each stream, the one that was silent for the longest time first.

        Examples
        --------
        >>> taken = TakenNumbers.from_state([["actor-0", "a", 7]])
        >>> taken.state()
        [['actor-0', 'a', 7]]
        """
        return [[writer, stream, number] for (writer, stream), number in self._last.items()]

    @classmethod
    def from_state(cls, state: Any) -> TakenNumbers:
        """Make the numbers that `state` returned.

        Raises
        ------
        FormatError
            If they are none.
        """
        found = cls()
        try:
            for writer, stream, number in state:
                found.note(str(writer), str(stream), whole("number", number))
        except (TypeError, ValueError) as error:
            raise FormatError("the state must list the number of each stream's last fragment, it does not") from error
        return found

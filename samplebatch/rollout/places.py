"""Places: which rows of a policy's columns each of its agents has.

Each agent has a range of rows to itself, so that its steps lie together from the moment they are made. How long the
ranges are is a guess, from what the agents made of the last fragment. What is left of a range when all is done is a
gap, which is closed by moving the rows behind it; an agent for which the range was too short gets another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.env.teams import Key

FIRST_ROOM = 64
"""Rows of an agent of which nothing is known."""

_MORE = 1.25
_AT_LEAST = 4


class Place:
    """The rows of one agent.

    Attributes
    ----------
    key, index
        The agent, and its `agent_index`.
    row, stop
        The row that is written next, and where its range ends.
    pieces
        Start and stop of what it has written in earlier ranges.
    since, eps_id, t
        The first row of the episode in this range, the episode, and the time in it then; None where rows say
        themselves.
    """

    __slots__ = ("eps_id", "index", "key", "pieces", "row", "since", "start", "stop", "t")

    def __init__(self, key: Key, index: int, start: int, stop: int) -> None:
        self.key = key
        self.index = index
        self.start = self.row = start
        self.stop = stop
        self.pieces: list[tuple[int, int]] = []
        self.since: int | None = None
        self.eps_id = self.t = 0

    def ranges(self) -> list[tuple[int, int]]:
        """Return start and stop of all that it has written, in order."""
        return [*self.pieces, (self.start, self.row)] if self.row > self.start else self.pieces

    def go_on_at(self, start: int, stop: int) -> None:
        """Give it another range."""
        self.pieces = self.ranges()
        self.start = self.row = start
        self.stop = stop


class Forecast:
    """How many rows each agent will have of the next fragment.

    As many as it had of the last one, in proportion to the length of the two, with room for some more. An agent that
    had a row of every step will have one of every step. One that was not there will have as many as the others of its
    policy had on average.

    Parameters
    ----------
    steps
        How many steps each environment makes, by `env_id`; None if that is not known.
    last
        What agents had of the last fragment, by policy.
    last_steps
        How many steps each environment made then.

    Examples
    --------
    >>> forecast = Forecast({0: 10, 1: 12}, {"cat": {(0, "tom"): 20, (1, "tom"): 4}}, {0: 20, 1: 20})
    >>> forecast.room("cat", (0, "tom")), forecast.room("cat", (1, "tom")), forecast.room("cat", (1, "kit"))
    (10, 7, 12)
    >>> forecast.room("dog", (0, "rex"))
    10
    >>> forecast.rows()
    {'cat': 17}
    """

    def __init__(
        self, steps: Mapping[int, int] | None, last: Mapping[str, Mapping[Key, int]], last_steps: Mapping[int, int]
    ) -> None:
        self._steps = steps
        self._last = last
        self._last_steps = last_steps

    def room(self, policy_id: str, key: Key) -> int:
        """Return how many rows an agent will have at the most, as far as can be foreseen."""
        steps = None if self._steps is None else self._steps.get(key[0], 0)
        last = self._last.get(policy_id)
        if not last:
            return FIRST_ROOM if steps is None else max(steps, 1)
        known = last.get(key) or -(-sum(last.values()) // len(last))
        made = self._last_steps.get(key[0], 0)
        if steps is None or not made:
            return int(known * _MORE) + _AT_LEAST
        if known == made:
            return max(steps, 1)
        return max(1, min(steps, int(known * steps / made * _MORE) + _AT_LEAST))

    def rows(self) -> dict[str, int]:
        """Return how many rows each policy will have, if its agents are those of the last fragment."""
        return {policy_id: sum(self.room(policy_id, key) for key in own) for policy_id, own in self._last.items()}


class Places:
    """The places of all agents of a policy.

    Parameters
    ----------
    room
        How many rows an agent will have.
    make_room
        Called with a number of rows if there must be so many, returns how many there are then.
    capacity
        How many there are.

    Attributes
    ----------
    by_key
        The places, in the order in which agents act first.
    end
        Rows that belong to somebody.
    """

    def __init__(self, room: Callable[[Key], int], make_room: Callable[[int], int], capacity: int) -> None:
        self.by_key: dict[Key, Place] = {}
        self.end = 0
        self._room = room
        self._make_room = make_room
        self._capacity = capacity

    def expect(self, keys: list[Key]) -> None:
        """Make room for agents of whom some may not have acted before."""
        if not self._capacity:
            self._capacity = self._make_room(sum(map(self._room, keys)))

    def of(self, key: Key, index: int) -> Place:
        """Return the place of an agent."""
        found = self.by_key.get(key)
        if found is None:
            found = self.by_key[key] = Place(key, index, *self._range(self._room(key)))
        return found

    def more(self, place: Place) -> None:
        """Give an agent more rows, whose range is full."""
        wanted = max(place.stop - place.start, _AT_LEAST)
        if place.stop < self.end:
            place.go_on_at(*self._range(wanted))
        else:
            self.end = place.stop
            _, place.stop = self._range(wanted)

    def _range(self, rows: int) -> tuple[int, int]:
        start = self.end
        if start + rows > self._capacity:
            if start < self._capacity and self.by_key:
                # What is left may do.
                rows = self._capacity - start
            else:
                self._capacity = self._make_room(start + rows)
        self.end = start + rows
        return start, self.end

    def moves(
        self, order: Callable[[Key], int] | None = None
    ) -> tuple[int, list[tuple[int, int, int]], npt.NDArray[np.intp] | None]:
        """Find what has to be moved for the rows to lie one agent after the other, without gaps.

        Parameters
        ----------
        order
            What agents are sorted by; by default they are in the order in which they act first.

        Returns
        -------
        tuple
            How many rows there are; the ranges that are moved down, one after the other, as source start and stop and
            target start; and the rows of which the rest is made, in order, or None if that is none.
        """
        moves: list[tuple[int, int, int]] = []
        rest: list[npt.NDArray[np.intp]] = []
        target = reached = 0
        keys = self.by_key if order is None else sorted(self.by_key, key=order)
        for place in map(self.by_key.__getitem__, keys):
            for start, stop in place.ranges():
                if rest or start < reached:
                    rest.append(np.arange(start, stop))
                elif start != target:
                    moves.append((start, stop, target))
                reached = max(reached, stop)
                target += stop - start
        return target, moves, np.concatenate(rest) if rest else None


def counts(places: Mapping[Key, Any]) -> dict[Key, int]:
    """Count the rows of each agent."""
    return {key: sum(stop - start for start, stop in place.ranges()) for key, place in places.items()}

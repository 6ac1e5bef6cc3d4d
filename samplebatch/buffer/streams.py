"""Streams: the steps of each agent in rows that come in any order, and where they do not go on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.buffer.ring import Flags, Ints


class Tail(NamedTuple):
    """The newest row of a buffer: its episode, its agent and its time."""

    episode: Any
    agent: Any
    t: int


class Streams(NamedTuple):
    """How the rows of a fragment are to be laid out."""

    order: Ints | None
    """The rows, stream by stream, each in time order; None if they lie so already."""
    ends: Flags
    """Whether each row, in that order, is followed by none of its stream."""
    tail: Tail | None
    """The last row; None if no row can be told to follow it."""
    goes_on: bool
    """Whether the first row follows the newest one of before."""


def find_streams(
    n: int,
    episode: npt.NDArray[Any] | None,
    agent: npt.NDArray[Any] | None,
    t: npt.NDArray[Any] | None,
    before: Tail | None = None,
) -> Streams:
    """Find the order and the ends of the streams of n rows.

    Parameters
    ----------
    episode, agent
        Ids, shape (n,). Without those of episodes, all rows are one stream; without those of agents, those of an
        episode are.
    t
        Times, shape (n,): rows of a stream follow each other only if they are one apart. None: they do as they come.
    before
        The newest row that there was before.

    Examples
    --------
    >>> find_streams(4, np.array([7, 8, 7, 8]), None, np.array([0, 4, 1, 6]), Tail(8, None, 3))
    Streams(order=array([1, 3, 0, 2]), ends=array([ True,  True, False,  True]), tail=Tail(episode=7, agent=None, t=1),
        goes_on=True)
    """
    if episode is None or not n:
        return Streams(None, np.arange(n) == n - 1, None, False)
    first, of = _number_ids(episode)
    if agent is not None:
        _, number = _number_ids(agent)
        first, of = _number_ids(of * (int(number.max()) + 1) + number)
    continued = _find_continued(first, episode, agent, t, before)
    keys = first.copy()
    if continued is not None:
        # The stream that goes on comes first, the others as they begin.
        keys[continued] = -1
    rank = keys[of]
    order: Ints | None = None
    time = np.zeros(n, np.intp) if t is None else t
    steady = (rank[1:] > rank[:-1]) | ((rank[1:] == rank[:-1]) & (time[1:] >= time[:-1]))
    if not steady.all():
        order = np.lexsort((time, rank)) if t is not None else np.argsort(rank, kind="stable")
        rank, time = rank[order], time[order]
    ends = np.ones(n, np.bool_)
    ends[:-1] = rank[1:] != rank[:-1]
    if t is not None:
        ends[:-1] |= time[1:] != time[:-1] + 1
    if t is None:
        return Streams(order, ends, None, False)
    leading, last = (0, n - 1) if order is None else (int(order[0]), int(order[-1]))
    begin, tail = (
        Tail(plain_value(episode[row]), None if agent is None else plain_value(agent[row]), int(t[row]))
        for row in (leading, last)
    )
    goes_on = before is not None and begin == before._replace(t=before.t + 1)
    return Streams(order, ends, tail, goes_on)


def _number_ids(ids: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Return where each id stands first, and the number of each row's id."""
    if len(ids) and (ids == ids[0]).all():
        return np.zeros(1, np.intp), np.zeros(len(ids), np.intp)
    _, first, number = np.unique(ids, return_index=True, return_inverse=True)
    return first, number.reshape(-1)


def _find_continued(first: Ints, episode: Any, agent: Any, t: Any, before: Tail | None) -> int | None:
    """Find the stream that continues the newest row of before."""
    if before is None or t is None:
        return None
    same = episode[first] == before.episode
    if agent is not None:
        same = same & (agent[first] == before.agent)
    found = np.flatnonzero(same)
    return int(found[0]) if len(found) else None


def plain_value(value: Any) -> Any:
    """Return the plain value of one element of a column."""
    return value.item() if isinstance(value, np.generic) else value

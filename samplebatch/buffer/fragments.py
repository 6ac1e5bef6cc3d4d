"""Fragments of several agents' steps: laid out by stream for the buffer of a policy, and turned back when sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Flags, Ints
from samplebatch.column.casting import as_flags
from samplebatch.errors import ColumnMismatchError, ColumnNotFoundError, SequenceError, near_names
from samplebatch.names import PolicyID

FRAGMENT_END: Final = "fragment_end"
"""The column that tells the steps that count as truncated because a fragment ended with them."""

_FLAGS: Final = {names.TERMINATEDS: "terminated", names.TRUNCATEDS: "truncated", names.DONES: "done"}


class Form(NamedTuple):
    """The flags and the dtype of rewards of a policy's batches, which its buffer does not keep."""

    flags: frozenset[str]
    """Which flags they have."""
    rewards: np.dtype[Any]
    """The dtype of their rewards."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Rows of one policy, ready for its buffer."""

    buffer: ReplayBuffer
    rows: dict[str, Any]
    """The last rows, as many as there are slots."""
    count: int
    """How many rows there were."""
    streams: Streams
    form: Form


def prepare_fragment(
    policy: PolicyID, part: SampleBatch, buffer: ReplayBuffer, tail: Tail | None, form: Form | None
) -> Fragment:
    """Lay out the rows of a policy stream by stream, and check that a buffer can take them; nothing is changed.

    Parameters
    ----------
    policy
        The policy id, for errors.
    part
        The rows, one at least.
    buffer
        Where they are to go.
    tail
        The newest row of the buffer, if another could follow it.
    form
        That of the batches before, if there were any.

    Raises
    ------
    ColumnNotFoundError
        If a column is missing that rows must have; names policy and column.
    SampleBatchError
        If the rows are sequences, or a column cannot take its rows; names it.
    """
    held = set(part.column_names)
    if names.SEQ_LENS in held:
        raise SequenceError(f"rows of policy {policy!r} must be plain steps, they come as sequences; unpad them first")
    if FRAGMENT_END in held:
        raise ColumnMismatchError(f"rows of policy {policy!r} have a column {FRAGMENT_END!r} of their own; rename it")
    for name in (names.OBS, names.ACTIONS, names.REWARDS):
        if name not in part:
            raise ColumnNotFoundError(f"policy {policy!r} must have column {name!r}; {near_names(name, held)}")
    flags = frozenset(_FLAGS) & held
    if not flags & {names.TERMINATEDS, names.DONES}:
        raise ColumnNotFoundError(
            f"policy {policy!r} must have column {names.TERMINATEDS!r}; {near_names(names.TERMINATEDS, held)}"
        )
    episode, agent, t = (
        np.asarray(part[name]) if name in held else None for name in (names.EPS_ID, names.AGENT_INDEX, names.T)
    )
    streams = find_streams(part.count, episode, agent, t, tail)
    if streams.order is not None:
        part = part.take(streams.order)
    count, kept = part.count, min(part.count, buffer.maxsize)
    part, ends = part.slice(count - kept, count), streams.ends[count - kept :]
    rows = dict(part.as_batch(names="tianshou").__dict__)
    done = rows.pop("done", None)
    given = names.DONES if "terminated" not in rows else names.TERMINATEDS
    terminated = as_flags(np.asarray(rows.get("terminated", done)), given)
    truncated = as_flags(np.asarray(rows.get("truncated", np.zeros(kept))), names.TRUNCATEDS)
    cut = ends & ~(terminated | truncated)
    rows |= {"terminated": terminated, "truncated": truncated | cut, FRAGMENT_END: cut}
    buffer._table.check(rows, kept)
    known = form or Form(frozenset(), np.asarray(part[names.REWARDS]).dtype)
    return Fragment(buffer, rows, count, streams, Form(known.flags | flags, known.rewards))


def rows_as_added(held: dict[str, Any], form: Form) -> SampleBatch:
    """Turn rows of a buffer into a batch with the columns that were added, under RLlib's names."""
    rows = dict(held)
    rows["truncated"] = rows["truncated"] & ~rows.pop(FRAGMENT_END)
    rows["done"] = rows["terminated"] | rows["truncated"]
    for flat, nested in _FLAGS.items():
        if flat not in form.flags:
            del rows[nested]
    rows["rew"] = rows["rew"].astype(form.rewards, copy=False)
    return node(Batch, rows).as_sample_batch("rllib")


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
        Tail(_plain(episode[row]), None if agent is None else _plain(agent[row]), int(t[row]))
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


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value

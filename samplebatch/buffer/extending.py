"""Addition of entire batches to buffers: column names, the ring of each row, and episode ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.concat import join
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, node
from samplebatch.batch.sample_batch import SampleBatch, require_flat
from samplebatch.batch.tree import Structure
from samplebatch.buffer.ring import Flags, Ints
from samplebatch.buffer.writing import end_flags
from samplebatch.errors import ColumnTypeError, RingError, SequenceError

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer


class Tail(NamedTuple):
    """Episode, agent and time of the newest row of a buffer."""

    episode: Any
    agent: Any
    t: int


class Streams(NamedTuple):
    """Row order of a fragment, and ends of its streams. A stream contains the rows of one agent in one episode."""

    order: Ints | None
    """Row order: stream by stream, each in time order; None if the rows are already in order."""
    ends: Flags
    """Whether each row, in this order, is the last of consecutive rows of its stream."""
    tail: Tail | None
    """The last row; None if later rows cannot be matched to it."""
    goes_on: bool
    """Whether the first row continues the previous newest row."""


def find_streams(
    n: int,
    episode: npt.NDArray[Any] | None,
    agent: npt.NDArray[Any] | None,
    t: npt.NDArray[Any] | None,
    before: Tail | None = None,
) -> Streams:
    """Determine the stream order of n rows, and the ends of streams.

    episode, agent: ids, shape (n,). Without episode ids, all rows are one stream. Without agent ids, all rows of an
        episode are one stream.
    t: times, shape (n,); two rows of a stream are consecutive if their times differ by one. If `t` is None, all rows
        are consecutive.
    before: the newest row that was added before the fragment.

    >>> find_streams(4, np.array([7, 8, 7, 8]), None, np.array([0, 4, 1, 6]), Tail(8, None, 3))
    Streams(order=array([1, 3, 0, 2]), ends=array([ True,  True, False,  True]),
        tail=Tail(episode=7, agent=None, t=1), goes_on=True)
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
        # The continued stream is first, the others are ordered by first row.
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
    if len(ids) and (ids == ids[0]).all():
        return np.zeros(1, np.intp), np.zeros(len(ids), np.intp)
    _, first, number = np.unique(ids, return_index=True, return_inverse=True)
    return first, number.reshape(-1)


def _find_continued(first: Ints, episode: Any, agent: Any, t: Any, before: Tail | None) -> int | None:
    """Return the number of the stream that continues the newest row before the fragment; None if no stream does."""
    if before is None or t is None:
        return None
    is_same = episode[first] == before.episode
    if agent is not None:
        is_same = is_same & (agent[first] == before.agent)
    matches = np.flatnonzero(is_same)
    return int(matches[0]) if len(matches) else None


def plain_value(value: Any) -> Any:
    """Convert an element of a column to a plain Python value."""
    return value.item() if isinstance(value, np.generic) else value


_STREAM = (names.EPS_ID, names.AGENT_INDEX, names.T)


def as_flat(batch: Any) -> SampleBatch[Any]:
    """Convert a batch of this library or RLlib, a mapping or an Arrow table to a flat batch with RLlib's names."""
    if isinstance(batch, SampleBatch):
        return batch
    if hasattr(batch, "zero_padded"):
        return require_flat(batch)
    if isinstance(batch, Batch):
        return flatten_rows(batch, "rllib")
    if isinstance(batch, Mapping):
        return flatten_rows(Batch(batch), "rllib")
    if hasattr(batch, "__arrow_c_stream__"):
        return SampleBatch.from_arrow(batch)
    raise ColumnTypeError(
        f"a buffer must be extended by a batch, mapping, table or dataset of steps, got a {type(batch).__name__}"
    )


def is_dataset(source: Any) -> bool:
    """Return whether a source is a `Dataset`; the episodes of a `Dataset` are assembled one at a time."""
    return hasattr(type(source), "iter_episodes")


def flatten_rows(batch: Batch, convention: Literal["rllib"] | None = None) -> SampleBatch:
    """Flatten a nested batch to a mapping of values by dotted name; preserve empty nested batches.

    >>> flatten_rows(Batch(obs={"x": [1, 2], "y": {}}, info={})).as_batch()
    Batch(
        obs: Batch(
                 x: array([1, 2]),
                 y: Batch(),
             ),
        info: Batch(),
    )
    """
    rows = batch.as_sample_batch(convention)
    nested = {
        names.TO_FLAT.get(name, name) if convention == "rllib" else name: _structure_of(value)
        for name, value in batch.__dict__.items()
        if KINDS[type(value)] == NODE
    }
    # A new dict, because batches without nested columns share theirs.
    rows._nested = {**rows._nested, **nested}
    return rows


def _structure_of(batch: Batch) -> dict[str, Structure]:
    """Describe the nesting of a batch; a name without values is described by an empty dict."""
    return {
        name: _structure_of(value) if KINDS[type(value)] == NODE else None
        for name, value in batch.__dict__.items()
        if value is not None
    }


def steps_of(batch: Any) -> tuple[dict[str, Any], int, ActionUnit | None]:
    """Return a batch's columns under the buffer's names, the number of rows, and the action unit.

    The rows of several policies are concatenated, one policy after another.
    """
    if hasattr(batch, "policy_batches"):
        flat = join([as_flat(part) for part in batch.policy_batches.values()])
    else:
        flat = as_flat(batch)
    if names.SEQ_LENS in flat:
        raise SequenceError("rows must be plain steps to be added to a buffer, got sequences; add steps only")
    columns = dict(flat.as_batch("tianshou").__dict__)
    _check_ids(columns, flat.count)
    return columns, flat.count, flat.action_unit


def _check_ids(columns: Mapping[str, Any], count: int) -> None:
    for name in (names.EPS_ID, names.AGENT_INDEX):
        if name in columns:
            row_ids(columns, name, count)
    if names.T in columns:
        times = np.asarray(columns[names.T])
        if times.shape != (count,) or times.dtype.kind not in "biuf" or not np.isfinite(times).all():
            raise ColumnTypeError(f"column {names.T!r} must have one finite number per row, got {_form(times)}")


def row_ids(columns: Mapping[str, Any], name: str, count: int) -> npt.NDArray[Any]:
    """Return the ids in a column of n rows, shape (n,); the ids are numbers, strings or sortable objects."""
    ids = np.asarray(columns[name])
    if ids.shape != (count,) or (ids.dtype.kind == "O" and not _can_sort(ids)):
        raise ColumnTypeError(f"column {name!r} must have one sortable id per row, got {_form(ids)}")
    return ids


def _can_sort(values: npt.NDArray[Any]) -> bool:
    try:
        np.sort(values)
    except (TypeError, ValueError):
        return False
    return True


def _form(values: npt.NDArray[Any]) -> str:
    return f"dtype {values.dtype} and shape {values.shape}"


def env_ids(columns: Mapping[str, Any], count: int) -> Ints | None:
    """Return the environment ids of n rows, shape (n,); None without the column `env_id`."""
    if names.ENV_ID not in columns:
        return None
    ids: Ints = np.asarray(columns[names.ENV_ID])
    if ids.shape != (count,) or ids.dtype.kind not in "biu":
        raise ColumnTypeError(
            f"column {names.ENV_ID!r} must have one integer per row to select its ring, got {_form(ids)}"
        )
    return ids


def add_steps(buffer: ReplayBuffer, columns: dict[str, Any], count: int, rings: Ints | None = None) -> Ints:
    """Add n rows to a buffer's rings, each agent's steps in time order; return the index of each row.

    If other rows interrupt the running episode of a ring, the last stored step of this episode is marked as truncated.
    `rings` contains the ring of each row, shape (n,); if `rings` is None, the environment and episode of a row
    determine its ring.
    """
    rings = _rings_of(buffer, columns, count) if rings is None else rings
    if names.EPS_ID not in columns and count and (rings == rings[0]).all():
        # All rows are one stream, already in order.
        return buffer.add(node(Batch, _with_end_flags(columns, count)), buffer_ids=rings)[0]
    order = np.empty(count, np.intp)
    cut = np.zeros(count, np.bool_)
    episode, agent, t = (np.asarray(columns[name]) if name in columns else None for name in _STREAM)
    ended: list[int] = []
    at = 0
    chosen = np.unique(rings).tolist()
    moves = len(chosen) > 1
    for ring in chosen:
        rows = np.flatnonzero(rings == ring)
        ring_episode, ring_agent, ring_t = (None if part is None else part[rows] for part in (episode, agent, t))
        newest = _newest(buffer, ring)
        streams = find_streams(len(rows), ring_episode, ring_agent, ring_t, newest[1] if newest else None)
        order[at : at + len(rows)] = rows if streams.order is None else rows[streams.order]
        moves = moves or streams.order is not None
        cut[order[at : at + len(rows) - 1]] = streams.ends[:-1]
        at += len(rows)
        if newest and episode is not None and t is not None and not streams.goes_on:
            ended.append(newest[0])
    columns = _with_end_flags(columns, count)
    if "terminated" in columns:
        columns["truncated"] = columns["truncated"] | (cut & ~columns["terminated"])
    steps = node(Batch, columns)
    if moves:
        steps = steps[order]
    if ended:
        # Rejected rows must not end an episode.
        buffer._table.check(steps.__dict__, count, stored=False)
        for index in ended:
            end_episode(buffer, index)
    added = buffer.add(steps, buffer_ids=rings[order])[0]
    slots = np.empty(count, np.intp)
    slots[order] = added
    return slots


def _with_end_flags(columns: dict[str, Any], count: int) -> dict[str, Any]:
    """Replace end flags with `terminated` and `truncated`; return columns without end flags unchanged.

    The result has no column `done`, because the buffer computes `done`.
    """
    if "terminated" not in columns and "done" not in columns:
        return columns
    terminated, truncated = end_flags(columns, count)
    flagged = {**columns, "terminated": terminated, "truncated": truncated}
    flagged.pop("done", None)
    return flagged


def _count_rings(buffer: ReplayBuffer) -> tuple[int, int]:
    """Return the number of rings that accept steps, and the index of the first of these rings."""
    every = len(buffer.subbuffer_edges) - 1
    accepting = len(buffer.__dict__.get("_order", (0,)))
    return accepting, every - accepting


def _rings_of(buffer: ReplayBuffer, columns: Mapping[str, Any], count: int) -> npt.NDArray[np.intp]:
    """Return the ring of each row, shape (n,): with several rings, the row's `env_id`.

    Without the column `env_id`, episodes are assigned to rings in turn.
    """
    number, _ = _count_rings(buffer)
    if number == 1:
        return np.zeros(count, np.intp)
    environments = env_ids(columns, count)
    if environments is not None:
        outside = (environments < 0) | (environments >= number)
        if outside.any():
            raise RingError(f"column 'env_id' must be in [0, {number}), the rings, got {environments[outside][0]}")
        return environments.astype(np.intp)
    if names.EPS_ID not in columns:
        raise RingError(f"rows for {number} rings must have a column 'env_id' or 'eps_id', got neither")
    ids, first, episode = np.unique(np.asarray(columns[names.EPS_ID]), return_index=True, return_inverse=True)
    rings = np.empty(len(ids), np.intp)
    rings[np.argsort(first)] = np.arange(len(ids)) % number
    for ring in range(number):
        newest = _newest(buffer, ring)
        if newest is not None:
            # A running episode continues in its ring.
            rings[ids == newest[1].episode] = ring
    return rings[episode.reshape(-1)]


def _newest(buffer: ReplayBuffer, ring: int) -> tuple[int, Tail] | None:
    """Return index and identity of a ring's newest step; None if the step is in no running episode with an id."""
    index = int(buffer.last_index[ring + _count_rings(buffer)[1]])
    tree = buffer._table.columns.tree
    if names.EPS_ID not in tree or names.T not in tree or index not in buffer.unfinished_index():
        return None
    identity = [
        plain_value(buffer.get(np.array([index]), name, stack_num=1)[0]) if name in tree else None for name in _STREAM
    ]
    return index, Tail(identity[0], identity[1], int(identity[2] or 0))


def end_episode(buffer: ReplayBuffer, index: int) -> None:
    """Truncate the running episode of a ring at the ring's newest step, whose index is `index`."""
    buffer._table.truncate_newest(index + buffer._start)

"""Fragments of several agents' steps: laid out by stream for the buffer of a policy, and turned back when sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from samplebatch import names
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.streams import Streams, Tail, find_streams
from samplebatch.buffer.writing import end_flags
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
    """The dtype of their rewards, or the one that the buffer was told."""


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
    terminated, truncated = end_flags(rows, kept)
    rows.pop("done", None)
    cut = ends & ~(terminated | truncated)
    rows |= {"terminated": terminated, "truncated": truncated | cut, FRAGMENT_END: cut}
    buffer._table.check(rows, kept)
    asked = buffer.options.get("reward_dtype")
    known = form or Form(frozenset(), np.dtype(asked) if asked else np.asarray(part[names.REWARDS]).dtype)
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

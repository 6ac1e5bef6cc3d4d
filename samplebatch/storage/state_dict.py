"""States of whole buffers: `state_dict` and `load_state_dict` of `ReplayBuffer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch.buffer.samplers import Prioritized
from samplebatch.errors import ColumnMismatchError, FormatError, RingError
from samplebatch.storage.buffer_description import check_description, describe
from samplebatch.storage.buffer_state import (
    generator_from_state,
    generator_state,
    sampler_from_state,
    sampler_state,
    table_from_state,
    table_state,
)
from samplebatch.storage.state_checksums import check_state, with_checksums
from samplebatch.storage.untrusted_state import State, check_flags

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer
    from samplebatch.buffer.table import Table


def export_state(buffer: ReplayBuffer) -> State:
    """Return the state of a buffer; see `ReplayBuffer.state_dict`."""
    table = buffer._table
    with table.lock:
        slots = table.rings.stored_slots() if buffer._ring is None else buffer._start + np.arange(len(buffer))
        state = describe(buffer) | {
            "generator": generator_state(buffer._rng),
            "sampler": sampler_state(buffer._sampler, slots),
            "table": table_state(table, buffer._ring),
        }
    return with_checksums(state)


def load_state(buffer: ReplayBuffer, state: Mapping[str, Any], *, verify: bool = True) -> None:
    """Replace the state of a buffer; see `ReplayBuffer.load_state_dict`."""
    if buffer._ring is not None:
        raise RingError("a part of a buffer cannot be loaded by itself; load the whole")
    check_description(state)
    if verify:
        check_state(state)
    absent = {"table", "sampler", "generator"} - state.keys()
    if absent:
        raise FormatError(f"the state of a buffer must have {min(absent)!r}, it has not")
    if state["class"] != type(buffer).__name__:
        raise ColumnMismatchError(f"the state must be of a {type(buffer).__name__}, it is of a {state['class']}")
    with buffer._table.lock:
        _replace(buffer, state)


def _replace(buffer: ReplayBuffer, state: Mapping[str, Any]) -> None:
    """Replace rows, sampler and generator; nothing has changed if the state is refused."""
    own = buffer._table
    journal = own.journal
    if journal is not None:
        journal.begin([])
    table = table_from_state(state["table"], own.columns.stores)
    _check_alike(table, own)
    check_flags(table)
    sampler = sampler_from_state(state["sampler"], buffer.maxsize, table.rings.stored_slots())
    rng = generator_from_state(state["generator"])
    own.rings, own.columns = table.rings, table.columns
    if own.finals is not None and table.finals is not None:
        own.finals.adopt(table.finals.columns, table.finals.owners)
    buffer._rng = rng
    buffer._use(sampler)
    parts = buffer.__dict__.get("_parts")
    for part in () if parts is None else parts:
        part._sampler = sampler
    if journal is not None:
        if isinstance(sampler, Prioritized):
            sampler.mirror = journal.mirror_weights(sampler.tree.weights)
        journal.commit()


def _check_alike(table: Table, own: Table) -> None:
    """Check that the table of a state has the sizes and options of the buffer's own."""
    sizes, wanted = table.rings.maxsizes.tolist(), own.rings.maxsizes.tolist()
    if sizes != wanted:
        raise ColumnMismatchError(f"the state must be of rings of {wanted[:8]} slots, it is of {sizes[:8]}")
    for name, option in (("keeps_next", "ignore_obs_next"), ("last_frame", "save_only_last_obs")):
        if getattr(table, name) != getattr(own, name):
            raise ColumnMismatchError(f"the state must be of a buffer with the same {option!r}, it is of another")

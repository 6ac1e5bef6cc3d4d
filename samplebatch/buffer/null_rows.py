"""Removal of rows in which a value is missing."""

from __future__ import annotations

import numpy as np

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.values import complete_rows
from samplebatch.buffer.gather import rows_at
from samplebatch.buffer.samplers import Sampler
from samplebatch.buffer.table import Table
from samplebatch.buffer.writing import drop_empty


def drop_null_rows(table: Table, sampler: Sampler, ring: int | None) -> None:
    """Remove the rows with NaN, NaT or None of one ring, or of all; the others move together, in time order.

    Columns of objects that are numbers then become columns of numbers. Rows keep what the sampler knows of them.
    """
    for own in range(table.rings.n) if ring is None else (ring,):
        _drop_from_ring(table, sampler, own)
    if table.columns.narrow(table.rings.stored_slots()):
        table.forget_fast_add()


def _drop_from_ring(table: Table, sampler: Sampler, ring: int) -> None:
    slots = table.rings.chronological(ring)
    if not len(slots):
        return
    rows = Batch(drop_empty(rows_at(table, slots, 1)))
    complete = complete_rows(rows, len(slots))
    if not complete.all():
        kept = slots[complete]
        known = sampler.state_dict(kept)
        table.reset([ring], keep_statistics=True)
        if len(kept):
            places = np.flatnonzero(complete)
            gaps = np.flatnonzero(np.diff(places) > 1)
            moved = table.append(ring, rows[places].__dict__, len(kept), gaps)
            sampler.on_move(moved, known)

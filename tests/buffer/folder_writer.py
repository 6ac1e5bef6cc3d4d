"""A child that writes to a mapped folder until it is killed."""

from __future__ import annotations

import struct

import numpy as np
from nursery import payload, started

from samplebatch.buffer.mapped import MappedFolder

SLOTS = 64
WIDTHS = {"small": 1, "wide": 400, "image": 6_000}


def create(path: str) -> None:
    folder = MappedFolder.create(path, {"slots": SLOTS}, struct.pack("<q", 0))
    for name, width in WIDTHS.items():
        folder.allocate(name, (SLOTS, width), np.dtype(np.int64))
    folder.commit(struct.pack("<q", 0))
    folder.close()


def write(path: str) -> None:
    """Go on from the last step: rows 0, 1, 2, ... into a ring, as many at once as the step's number says."""
    folder = MappedFolder.open(path)
    (count,) = struct.unpack("<q", folder.state)
    started()
    while True:
        rows = np.arange(count, count + 1 + count % 7)
        slots = rows % SLOTS
        folder.begin([(WIDTHS, slots[rows >= SLOTS])])
        for name, values in folder.columns.items():
            values[slots] = payload(rows, WIDTHS[name])
        count += len(rows)
        folder.commit(struct.pack("<q", count))


WORK = {"write": write}

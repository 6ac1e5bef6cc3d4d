"""A child that writes to a mapped folder until it is killed."""

from __future__ import annotations

import itertools
import struct

import numpy as np

from samplebatch.storage.buffers.folder import BufferFolder
from tests.storage.buffer_folder.nursery import payload, started

SLOTS = 64
WIDTHS = {"small": 1, "wide": 400, "image": 6_000}


def create(path: str) -> None:
    folder = BufferFolder.create(path, {"slots": SLOTS}, struct.pack("<q", 0))
    for name, width in WIDTHS.items():
        folder.allocate(name, (SLOTS, width), np.dtype(np.int64))
    folder.commit(struct.pack("<q", 0))
    folder.close()


def step(folder: BufferFolder) -> None:
    """Continue from the last step: write rows 0, 1, 2, ... into a ring; the row number determines how many at once."""
    (count,) = struct.unpack("<q", folder.state)
    rows = np.arange(count, count + 1 + count % 7)
    slots = rows % SLOTS
    folder.begin([(WIDTHS, slots[rows >= SLOTS])])
    for name, values in folder.columns.items():
        values[slots] = payload(rows, WIDTHS[name])
    folder.commit(struct.pack("<q", count + len(rows)))


def write(path: str) -> None:
    """Write steps one by one."""
    folder = BufferFolder.open(path)
    started()
    while True:
        step(folder)


def reopen(path: str) -> None:
    """Repeatedly open, add a step and close; occasionally a column grows."""
    started()
    for i in itertools.count():
        folder = BufferFolder.open(path)
        step(folder)
        if i % 3 == 2:
            old = folder.columns["small"]
            folder.allocate("small", old.shape, old.dtype)[:] = old
            folder.commit(folder.state)
        folder.close()


WORK = {"write": write, "reopen": reopen}

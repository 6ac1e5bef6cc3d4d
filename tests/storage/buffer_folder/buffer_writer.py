"""A child that adds steps to a buffer in a folder until it is killed."""

from __future__ import annotations

from typing import Any

from samplebatch.buffer.replay import ReplayBuffer
from tests.storage.buffer_folder.nursery import started
from tests.storage.streams import BUFFERS, step


def steps_in(buffer: Any) -> int:
    """Return the number of steps that have been added to each ring."""
    return int(buffer._table.rings.state_dict()["writes"][0])


def add_from(path: str, kind: str) -> None:
    """Continue from the last step."""
    n = BUFFERS[kind][1]
    buffer = ReplayBuffer.open(path)
    i = steps_in(buffer)
    started()
    while True:
        buffer.add(step(i, n))
        if i % 50 == 0:
            buffer.sample(4)
        i += 1


# The compiled kernels, which take longer to load than most children live.
BUFFERS["prioritized"][0]().add(step(0, 0))

WORK = {kind.replace(" ", "-"): lambda path, kind=kind: add_from(path, kind) for kind in BUFFERS}

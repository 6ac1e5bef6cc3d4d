"""Single bytes that change in files: what tests of every format share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from samplebatch.errors import SampleBatchError

COUNT = int(os.environ.get("SAMPLEBATCH_FLIPS", "300"))
"""Bytes to change in each file, one at a time."""


def flipped(path: Path, count: int = COUNT, seed: int = 0) -> Iterator[int]:
    """Change one byte of a file at a time, restore it before the next change, and yield its position."""
    data = path.read_bytes()
    rng = np.random.default_rng(seed)
    # The ends, where formats say what is where, in full if there is room for it; then anywhere.
    ends = [*range(min(24, len(data))), *range(max(0, len(data) - 48), len(data))]
    places = [*ends, *rng.integers(0, len(data), max(0, count - len(ends))).tolist()]
    for at in places:
        bad = bytearray(data)
        bad[at] ^= int(rng.integers(1, 256))
        path.write_bytes(bad)
        yield at
    path.write_bytes(data)


def unnoticed(path: Path, read: Callable[[], Any], equal: Callable[[Any], bool], count: int = COUNT) -> list[int]:
    """List the offsets at which a changed byte neither raised a library error nor was harmless."""
    actual = []
    for at in flipped(path, count):
        try:
            back = read()
        except SampleBatchError:
            continue
        if not equal(back):
            actual.append(at)
    return actual

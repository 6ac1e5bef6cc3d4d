"""Checksums of memory, at the speed of memory.

CRC-32 reads one to four gigabytes a second, which is more than a file in the page cache takes to be read. Bytes are
therefore laid out as a grid of 64-bit words, 512 to a row, and CRC-32 is taken of the sums of the grid's rows and
columns, modulo 2**64: adding reads 10 GB/s and more. A byte that changes, a word that moves, a page of zeros or of
another place changes the sum of a row or of a column. Two random contents share a checksum with a probability of
2**-32. Nothing here protects from someone who means to deceive.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from samplebatch.column.threads import WORTHWHILE, share

BLOCK_NBYTES = 1 << 20
"""Bytes that have one checksum where memory is checked a block at a time: small enough for a core's cache."""

_ROW_WORDS = 512
_ROW_NBYTES = 8 * _ROW_WORDS


def checksum(data: Any) -> int:
    """Compute the checksum of memory, a number of 32 bits.

    Parameters
    ----------
    data
        Contiguous bytes: `bytes`, a `memoryview`, a C-contiguous array.

    Examples
    --------
    >>> checksum(b"123456789") == zlib.crc32(b"123456789")
    True
    >>> words = np.arange(4096)
    >>> checksum(words) == checksum(words[::-1].copy())
    False
    """
    view = memoryview(data).cast("B")
    start = len(view) - len(view) % _ROW_NBYTES
    found = zlib.crc32(view[start:])
    if start:
        found = zlib.crc32(len(view).to_bytes(8, "little"), found)
        grid = np.frombuffer(view[:start], "<u8").reshape(-1, _ROW_WORDS)
        for axis in (1, 0):
            found = zlib.crc32(np.add.reduce(grid, axis=axis).astype("<u8", copy=False), found)
    return found


def block_checksums(data: Any, known: Mapping[int, int] = MappingProxyType({})) -> list[int]:
    """Compute the checksums of memory, one for each block of `BLOCK_NBYTES`; of large memory on two cores.

    Parameters
    ----------
    data
        Contiguous bytes.
    known
        Checksums of some of the blocks, by number, which are not computed again.

    Examples
    --------
    >>> len(block_checksums(bytes(BLOCK_NBYTES + 1)))
    2
    """
    view = memoryview(data).cast("B")
    starts = range(0, len(view), BLOCK_NBYTES)
    found = [known.get(block, 0) for block in range(len(starts))]

    def compute(block: int) -> None:
        found[block] = checksum(view[starts[block] : starts[block] + BLOCK_NBYTES])

    jobs = [(BLOCK_NBYTES, partial(compute, block)) for block in range(len(starts)) if block not in known]
    if len(jobs) * BLOCK_NBYTES < WORTHWHILE:
        for _, job in jobs:
            job()
    else:
        share(jobs)
    return found

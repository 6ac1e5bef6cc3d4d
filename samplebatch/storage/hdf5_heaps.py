"""A look at the heaps of an HDF5 file, which hold its strings: HDF5 walks through damaged ones for ever."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from samplebatch.errors import FormatError

_START = b"GCOL\x01\0\0\0"
"""How a heap begins: magic, version, and three bytes of nothing."""

_MAGIC = int.from_bytes(_START[:4], "little")

_OBJECT = struct.Struct("<H6xQ")
"""Number of an object, 0 for free space, and its bytes."""

_PIECE = 1 << 20
"""Bytes that are looked through at once."""


def check_heaps(path: str) -> None:
    """Check that every heap of strings has an end.

    Heaps are looked for everywhere: HDF5 puts them at any byte.

    Parameters
    ----------
    path
        The file; another path than that of a file is not looked at.

    Raises
    ------
    FormatError
        If an object in one has fewer bytes than say how large it is, or more than are left.
    """
    if not os.path.isfile(path) or os.path.getsize(path) < len(_START):
        return
    data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
    for start in range(0, len(data), _PIECE):
        for place in _magic_places(data[start : start + _PIECE + 3]):
            if data[start + place : start + place + len(_START)].tobytes() == _START:
                _check_heap(data, start + place, path)


def _magic_places(data: npt.NDArray[np.uint8]) -> Iterator[int]:
    """Find the magic of heaps, as words at each of the four places that a word can begin at."""
    for shift in range(4):
        words = data[shift : shift + (len(data) - shift) // 4 * 4].view("<u4")
        yield from (4 * np.flatnonzero(words == _MAGIC) + shift).tolist()


def _check_heap(data: npt.NDArray[np.uint8], start: int, path: str) -> None:
    head = data[start : start + 16].tobytes()
    end = min(len(data), start + int.from_bytes(head[8:], "little"))
    place = start + 16
    while place + 16 <= end:
        number, nbytes = _OBJECT.unpack(data[place : place + 16].tobytes())
        # HDF5 adds with 64 bits, so that a size above all others brings it back to where it was.
        step = 16 + -(-nbytes // 8) * 8 if number else nbytes
        if step < 16 or step > end - place:
            raise FormatError(f"{path!r} must have heaps of strings that end, and one at {start} does not; damaged")
        place += step

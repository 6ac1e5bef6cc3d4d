"""A look at the heaps of an HDF5 file, which hold its strings: HDF5 walks through damaged ones for ever."""

from __future__ import annotations

import os
import struct

import numpy as np
import numpy.typing as npt

from samplebatch.errors import FormatError

_START = int.from_bytes(b"GCOL\x01\0\0\0", "little")
"""How a heap begins: magic, version, and three bytes of nothing."""

_OBJECT = struct.Struct("<H6xQ")
"""Number of an object, 0 for free space, and its bytes."""

_PIECE = 1 << 17
"""Words that are looked through at once."""


def check_heaps(path: str) -> None:
    """Check that every heap of strings has an end.

    Heaps are looked for at multiples of eight bytes, where HDF5 puts them.

    Parameters
    ----------
    path
        The file; another path than that of a file is not looked at.

    Raises
    ------
    FormatError
        If free space in one has fewer bytes than say how large it is.
    """
    if not os.path.isfile(path) or os.path.getsize(path) < 8:
        return
    words = np.memmap(path, "<u8", "r", shape=(os.path.getsize(path) // 8,))
    for start in range(0, len(words), _PIECE):
        for place in np.flatnonzero(words[start : start + _PIECE] == _START).tolist():
            _check_heap(words.view(np.uint8), 8 * (start + place), path)


def _check_heap(data: npt.NDArray[np.uint8], start: int, path: str) -> None:
    head = data[start : start + 16].tobytes()
    end = min(len(data), start + int.from_bytes(head[8:], "little"))
    place = start + 16
    while place + 16 <= end:
        number, nbytes = _OBJECT.unpack(data[place : place + 16].tobytes())
        if not number and nbytes < 16:
            raise FormatError(f"{path!r} must have heaps of strings that end, and one at {start} does not; damaged")
        place += 16 + -(-nbytes // 8) * 8 if number else nbytes

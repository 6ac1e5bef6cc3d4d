"""Checksums within files, in places that other readers skip.

::

    body                    all that the format writes before its footer
    checksums               of each block of the body, 32 bits each
    trailer                 bytes in the body, checksum of the footer, CRC-32 of all this, magic
    footer                  as the format writes it; files of HDF5 have none

Readers of Arrow and Parquet files find the footer from the end, and go from there to places counted from the start;
HDF5 counts from the start and does not look behind its end. A file that another tool writes again has no checksums.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.column.checksum import BLOCK_NBYTES, block_checksums, checksum
from samplebatch.column.threads import share
from samplebatch.errors import FormatError

_MAGIC = b"SBCHECKS"
_FIELDS = struct.Struct("<QI")
_END = struct.Struct("<I8s")
_TRAILER_NBYTES = _FIELDS.size + _END.size
_LENGTH = struct.Struct("<I")

ColumnsAt = Callable[[int, int], Sequence[str]]
"""Names the columns that have bytes between two places of a file."""


class Format(NamedTuple):
    """The end of a format's files: the magic, before which stands the length of the footer; b"" if there is none."""

    magic: bytes

    def footer_nbytes(self, data: memoryview) -> int:
        """Read how many bytes the footer of a file has, with all that stands behind it."""
        if not self.magic:
            return 0
        at = len(data) - len(self.magic) - _LENGTH.size
        if at < 0 or data[-len(self.magic) :] != self.magic:
            return 0
        return min(len(data), int(_LENGTH.unpack_from(data, at)[0]) + _LENGTH.size + len(self.magic))


ARROW, PARQUET, HDF5 = Format(b"ARROW1"), Format(b"PAR1"), Format(b"")


class FileChecksums(NamedTuple):
    """The checksums that a file has."""

    body_nbytes: int
    blocks: npt.NDArray[np.uint32]
    footer_start: int
    footer: int


class SummedFile:
    """File for the writers of other libraries that sums blocks of bytes while the system takes them.

    Blocks that come in several pieces are left to `add`, which reads them from the file.

    Attributes
    ----------
    blocks
        Checksums of the blocks that came in one piece, by number.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._nbytes = 0
        self.blocks: dict[int, int] = {}

    def write(self, data: Any) -> int:
        """Write bytes behind those that are there."""
        view = memoryview(data).cast("B")
        start = self._nbytes
        self._nbytes += len(view)
        first, stop = -(-start // BLOCK_NBYTES), self._nbytes // BLOCK_NBYTES

        def add(block: int) -> None:
            at = block * BLOCK_NBYTES - start
            self.blocks[block] = checksum(view[at : at + BLOCK_NBYTES])

        if first >= stop:
            self._file.write(view)
        else:
            share(
                [(len(view), partial(self._file.write, view))]
                + [(BLOCK_NBYTES, partial(add, block)) for block in range(first, stop)]
            )
        return len(view)

    def tell(self) -> int:
        """Return the bytes that have been written."""
        return self._nbytes

    def flush(self) -> None:
        """Hand the bytes in memory to the system."""
        self._file.flush()


def add(file: BinaryIO, form: Format, known: Mapping[int, int] = MappingProxyType({}), nbytes: int = 0) -> None:
    """Put checksums into a file that has been written and is open for reading, too.

    Parameters
    ----------
    file
        The file, whole as its format has it.
    form
        The format.
    known
        Checksums of some blocks of the file, by number.
    nbytes
        Its bytes, where more are reserved; 0 if none are.
    """
    file.flush()
    with mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        body_nbytes, ending = _sum(data, form, known)
    file.seek(body_nbytes)
    file.write(ending)


def write(file: BinaryIO, data: memoryview, form: Format) -> None:
    """Write all bytes of an empty file from memory, with their checksums."""
    body_nbytes, ending = _sum(data, form, {})
    file.write(data[:body_nbytes])
    file.write(ending)


def _sum(data: memoryview, form: Format, known: Mapping[int, int]) -> tuple[int, bytes]:
    """Return the size of the body of an intact file, and its suffix: checksums, trailer and footer."""
    body_nbytes = len(data) - form.footer_nbytes(data)
    # Those with bytes of the footer, which moves behind the checksums, have others then.
    known = {block: value for block, value in known.items() if (block + 1) * BLOCK_NBYTES <= body_nbytes}
    with data[:body_nbytes] as body:
        blocks = np.array(block_checksums(body, known), "<u4").tobytes()
    footer = bytes(data[body_nbytes:])
    fields = _FIELDS.pack(body_nbytes, checksum(footer))
    return body_nbytes, blocks + fields + _END.pack(zlib.crc32(blocks + fields), _MAGIC) + footer


def _read(data: memoryview, form: Format, name: str) -> FileChecksums | None:
    """Read the checksums of a file; None if it has none. Rejects damaged ones."""
    footer_start = len(data) - form.footer_nbytes(data)
    start = footer_start - _TRAILER_NBYTES
    if start < 0:
        return None
    crc, magic = _END.unpack_from(data, start + _FIELDS.size)
    if magic != _MAGIC:
        return None
    body_nbytes, footer = _FIELDS.unpack_from(data, start)
    count = -(-body_nbytes // BLOCK_NBYTES)
    if body_nbytes + 4 * count != start or zlib.crc32(data[body_nbytes : start + _FIELDS.size]) != crc:
        raise FormatError(f"{name!r} must have whole checksums, and they have changed; the file is damaged")
    return FileChecksums(body_nbytes, np.frombuffer(data, "<u4", count, body_nbytes), footer_start, footer)


def verify(data: Any, form: Format, name: str, columns_at: ColumnsAt | None) -> bool:
    """Verify a file, or its footer alone without `columns_at`; return whether it has checksums at all.

    The error names the columns in the first block with a changed byte.
    """
    view = memoryview(data).cast("B")
    found = _read(view, form, name)
    if found is None:
        return False
    if checksum(bytes(view[found.footer_start :])) != found.footer:
        raise FormatError(f"{name!r} must have the footer that was written, and it has changed; the file is damaged")
    if columns_at is None:
        return True
    with view[: found.body_nbytes] as body:
        blocks = block_checksums(body)
    for i, (now, written) in enumerate(zip(blocks, found.blocks.tolist(), strict=True)):
        if now != written:
            start, stop = i * BLOCK_NBYTES, min((i + 1) * BLOCK_NBYTES, found.body_nbytes)
            columns = list(columns_at(start, stop))
            where = f", in column{'s' * (len(columns) > 1)} {', '.join(map(repr, columns))}" if columns else ""
            raise FormatError(
                f"{name!r} must have the bytes that were written, and among those from {start} to {stop} some have "
                f"changed{where}; the file is damaged"
            )
    return True

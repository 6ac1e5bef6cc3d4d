"""Checksums of a file, stored inside the file where other readers ignore them.

::

        body                    all bytes before the format's footer
        checksums               32 bits per block of the body
        trailer                 size of the body, checksum of the footer, CRC-32 of checksums and trailer, magic
        footer                  footer of the format; absent in HDF5

Arrow and Parquet readers locate the footer from the end of the file, and the footer contains absolute offsets. HDF5
readers ignore bytes after the end of the HDF5 data. Files rewritten by other tools have no checksums.
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
"""Returns the names of columns with bytes between two offsets of a file."""


class Format(NamedTuple):
    """File trailer of a format: footer length followed by `magic`, or empty."""

    magic: bytes

    def footer_nbytes(self, data: memoryview) -> int:
        """Return the size of a file's footer, including its length field and magic."""
        if not self.magic:
            return 0
        at = len(data) - len(self.magic) - _LENGTH.size
        if at < 0 or data[-len(self.magic) :] != self.magic:
            return 0
        return min(len(data), int(_LENGTH.unpack_from(data, at)[0]) + _LENGTH.size + len(self.magic))


ARROW, PARQUET, HDF5 = Format(b"ARROW1"), Format(b"PAR1"), Format(b"")


class FileChecksums(NamedTuple):
    """Block checksums and footer checksum of a file."""

    body_nbytes: int
    blocks: npt.NDArray[np.uint32]
    footer_start: int
    footer: int


class SummedFile:
    """File object that computes block checksums in parallel with the writes of other libraries.

    For blocks that were written in several pieces, `add` reads the file and computes the checksums.

    blocks: checksums of the blocks that were written in one piece, by block number.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._nbytes = 0
        self.blocks: dict[int, int] = {}

    def write(self, data: Any) -> int:
        """Append bytes and update the block checksums."""
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
        """Return the number of bytes written."""
        return self._nbytes

    def flush(self) -> None:
        """Pass buffered bytes to the operating system."""
        self._file.flush()


def add(file: BinaryIO, form: Format, checksums: Mapping[int, int] = MappingProxyType({}), nbytes: int = 0) -> None:
    """Insert checksums into a complete file that is open for reading and writing.

    file: the open file, which must be valid in its format.
    checksums: precomputed checksums by block number.
    nbytes: size of the contents if reserved bytes follow the contents; 0 if the contents are the entire file.
    """
    file.flush()
    with mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        body_nbytes, ending = _sum(data, form, checksums)
    file.seek(body_nbytes)
    file.write(ending)


def write(file: BinaryIO, data: memoryview, form: Format) -> None:
    """Write contents from memory, with their checksums, into an empty file."""
    body_nbytes, ending = _sum(data, form, {})
    file.write(data[:body_nbytes])
    file.write(ending)


def _sum(data: memoryview, form: Format, checksums: Mapping[int, int]) -> tuple[int, bytes]:
    """Return the body size of a file and the bytes that follow the body: checksums, trailer and footer."""
    body_nbytes = len(data) - form.footer_nbytes(data)
    # Blocks that include footer bytes change, because the footer moves behind the checksums.
    sums = {block: value for block, value in checksums.items() if (block + 1) * BLOCK_NBYTES <= body_nbytes}
    with data[:body_nbytes] as body:
        blocks = np.array(block_checksums(body, sums), "<u4").tobytes()
    footer = bytes(data[body_nbytes:])
    fields = _FIELDS.pack(body_nbytes, checksum(footer))
    return body_nbytes, blocks + fields + _END.pack(zlib.crc32(blocks + fields), _MAGIC) + footer


def _read(data: memoryview, form: Format, name: str) -> FileChecksums | None:
    """Read the checksums of a file; return None if the file has no checksums.

    Raises FormatError if the checksums are damaged.
    """
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
        raise FormatError(f"{name!r} must have intact checksums, got changed ones; the file is damaged")
    return FileChecksums(body_nbytes, np.frombuffer(data, "<u4", count, body_nbytes), footer_start, footer)


def verify(data: Any, form: Format, name: str, columns_at: ColumnsAt | None) -> bool:
    """Verify a file, or only its footer if `columns_at` is None; return whether the file has checksums.

    The error message lists the columns in the first block that has a changed byte.
    """
    view = memoryview(data).cast("B")
    sums = _read(view, form, name)
    if sums is None:
        return False
    if checksum(bytes(view[sums.footer_start :])) != sums.footer:
        raise FormatError(f"{name!r} must have the footer that was written, got changed bytes; the file is damaged")
    if columns_at is None:
        return True
    with view[: sums.body_nbytes] as body:
        blocks = block_checksums(body)
    for i, (now, written) in enumerate(zip(blocks, sums.blocks.tolist(), strict=True)):
        if now != written:
            start, stop = i * BLOCK_NBYTES, min((i + 1) * BLOCK_NBYTES, sums.body_nbytes)
            columns = list(columns_at(start, stop))
            where = f", in column{'s' * (len(columns) > 1)} {', '.join(map(repr, columns))}" if columns else ""
            raise FormatError(
                f"{name!r} must have the bytes that were written, got changed bytes between {start} and {stop}{where}; "
                "the file is damaged"
            )
    return True

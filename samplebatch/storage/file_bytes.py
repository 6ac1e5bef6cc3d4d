"""All bytes of a file, mapped or read, and the first ones, by which formats are told apart."""

from __future__ import annotations

import errno
import os

import pyarrow as pa

from samplebatch.errors import FormatError


def file_bytes(name: str, *, memory_map: bool) -> pa.Buffer:
    """Return all bytes of a file, mapped or read; of a mapped file none is loaded before it is touched.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    try:
        with pa.memory_map(name) if memory_map else pa.OSFile(name) as source:
            if not memory_map or not source.size():
                return source.read_buffer()
            # For a buffer of all the file, Arrow would ask the system to load all of it.
            first = source.read_buffer(1)
            return pa.foreign_buffer(first.address, source.size(), first)
    except OSError as error:
        # As Python's own, with the name apart.
        number = error.errno or (errno.EISDIR if os.path.isdir(name) else errno.EIO)
        raise OSError(number, os.strerror(number), name) from error


def check_magic(data: pa.Buffer, magic: bytes, form: str, name: str) -> None:
    """Check that a file begins as those of its format do.

    Raises
    ------
    FormatError
        If it does not.
    """
    if data[: len(magic)].to_pybytes() != magic:
        article = "an" if form == "Arrow" else "a"
        raise FormatError(f"{name!r} must be {article} {form} file, and its first bytes are not those of one")

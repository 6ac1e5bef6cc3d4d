"""HDF5 files as wholes: written at once or not at all, with checksums behind their end, where HDF5 does not look."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from samplebatch.errors import FormatError, require
from samplebatch.storage.arrow_file import replacing
from samplebatch.storage.file_bytes import file_bytes
from samplebatch.storage.file_checksums import HDF5, add_checksums, check_whole
from samplebatch.storage.hdf5_heaps import check_heaps
from samplebatch.storage.suffixes import check_suffix

if TYPE_CHECKING:
    import h5py


@contextlib.contextmanager
def hdf5_writer(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[h5py.File]:
    """Open an HDF5 file for writing, which takes the path's place, with checksums, when the block ends well.

    Raises
    ------
    MissingExtraError
        If h5py is not installed.
    FormatError
        If the file's name has the ending of another format.
    OSError
        If the path is a folder, or no file there can be written.
    """
    h5py = require("h5py", "hdf5")
    check_suffix(path, "HDF5")
    with replacing(path, durable=durable) as written:
        # The first format in which attributes may be of any size.
        with h5py.File(written.name, "w", libver=("v108", "v108")) as file:
            yield file
        add_checksums(written, HDF5)


@contextlib.contextmanager
def hdf5_file(path: str | os.PathLike[str], *, verify: bool = True) -> Iterator[h5py.File]:
    """Open an HDF5 file for reading, after checking its heaps and, if asked for, its checksums.

    Raises
    ------
    MissingExtraError
        If h5py is not installed.
    FormatError
        If it is no HDF5 file, or its bytes have changed.
    OSError
        If it cannot be read.
    """
    h5py = require("h5py", "hdf5")
    name = os.fspath(path)
    with open(name, "rb"):
        pass
    if not h5py.is_hdf5(name):
        raise FormatError(f"{name!r} must be an HDF5 file, it is not")
    check_heaps(name)
    if verify:
        check_hdf5(file_bytes(name, memory_map=True), name)
    try:
        file = h5py.File(name, "r")
    except (OSError, RuntimeError) as error:
        raise FormatError(f"{name!r} must be a whole HDF5 file, and it is damaged: {error}") from error
    with file:
        yield file


def check_hdf5(data: pa.Buffer, name: str) -> bool:
    """Hold all bytes of an HDF5 file against its checksums, and tell whether it has any.

    Raises
    ------
    FormatError
        If a byte is not as it was written; names the datasets.
    """
    return check_whole(data, HDF5, name, lambda start, stop: _datasets_at(name, start, stop))


def _datasets_at(name: str, start: int, stop: int) -> list[str]:
    """Name the datasets of an HDF5 file with values between two places; those of columns as the columns."""
    import h5py

    found: list[str] = []

    def visit(path: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            chunks = [item.id.get_chunk_info(i) for i in range(item.id.get_num_chunks())] if item.chunks else []
            places = [(chunk.byte_offset, chunk.size) for chunk in chunks]
            if not item.chunks and item.id.get_offset() is not None:
                places = [(item.id.get_offset(), item.id.get_storage_size())]
            if any(at < stop and at + nbytes > start for at, nbytes in places):
                found.append(path.removeprefix("_meta/").replace("/", "."))

    # What is damaged may be what says where the datasets are.
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError), h5py.File(name, "r") as file:
        file.visititems(visit)
    return found

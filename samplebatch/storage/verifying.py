"""Verification of files and folders of every format against their checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from samplebatch.errors import FormatError, require
from samplebatch.storage.buffers.commits import Commits
from samplebatch.storage.buffers.multi_agent import MANIFEST, files_of
from samplebatch.storage.buffers.status import ABOUT, BUFFER_FILE, LOCK, FolderStatus, read_about
from samplebatch.storage.datasets.commit_log import CommitLog
from samplebatch.storage.files import file_bytes, form_of_file, open_locked
from samplebatch.storage.hdf5 import check_hdf5
from samplebatch.storage.tables.arrow import check_arrow
from samplebatch.storage.tables.parquet import check_parquet


class FileReport(NamedTuple):
    """Result of `verify` for one file.

    Attributes
    ----------
    path
        The file, or the folder of an open buffer.
    format
        Format: `"Arrow"`, `"Parquet"`, `"HDF5"`, `"buffer folder"` or `"commits"`, the log of a dataset.
    nbytes
        Recorded size in bytes if known, else the actual size.
    has_checksums
        Whether the file has checksums of all bytes. If not, it was only read in its format.
    fault
        Description of the damage; empty if intact.
    """

    path: Path
    format: str
    nbytes: int
    has_checksums: bool
    fault: str


def verify(path: str | os.PathLike[str]) -> list[FileReport]:
    """Verify every byte of a file or folder written by this library against its checksums.

    Parameters
    ----------
    path
        An Arrow, Parquet or HDF5 file, or the folder of a `Dataset` or replay buffer.

    Returns
    -------
    list of FileReport
        One report per file, ordered by name or, in a dataset, by part. Damage is reported, not raised.

    Raises
    ------
    FormatError
        If the format is unknown.
    StorageError
        If the folder belongs to an open buffer.
    MissingExtraError
        If the file is an HDF5 file and h5py is not installed.
    OSError
        If the file cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import SampleBatch, write_arrow
    >>> path = tempfile.mkdtemp() + "/batch.arrow"
    >>> write_arrow(SampleBatch(rewards=[1.0, 2.0]), path)
    >>> [(report.format, report.has_checksums, report.fault) for report in verify(path)]
    [('Arrow', True, '')]
    >>> with open(path, "r+b") as file:
    ...     place = file.seek(300)
    ...     written = file.write(b"?")
    >>> verify(path)[0].fault
    "'...batch.arrow' must have the bytes that were written, and among those from 0 to ... some have changed...; ..."
    """
    target = Path(path)
    if target.is_dir():
        if (target / BUFFER_FILE).exists():
            return [_file(target / BUFFER_FILE)]
        if (target / MANIFEST).exists():
            return list(map(_file, files_of(target)))
        return list(_buffer_folder(target) if (target / ABOUT).exists() else _dataset(target))
    return [_file(target)]


def _file(path: Path) -> FileReport:
    form = form_of_file(path)
    nbytes = path.stat().st_size
    if not nbytes:
        return FileReport(path, form, 0, has_checksums=False, fault=f"{str(path)!r} must have bytes, got an empty file")
    try:
        return FileReport(path, form, nbytes, _CHECKS[form](file_bytes(str(path), memory_map=True), str(path)), "")
    except FormatError as error:
        return FileReport(path, form, nbytes, has_checksums=True, fault=str(error))
    # Damage in a file without checksums is detected by its format.
    except (pa.ArrowException, OSError, ValueError, RuntimeError, KeyError) as error:
        return FileReport(
            path,
            form,
            nbytes,
            has_checksums=False,
            fault=f"{str(path)!r} must be an intact {form} file: {error}",
        )


def _check_arrow(data: pa.Buffer, name: str) -> bool:
    if check_arrow(data, name):
        return True
    pa.ipc.open_file(data).read_all().validate(full=True)
    return False


def _check_parquet(data: pa.Buffer, name: str) -> bool:
    from pyarrow import parquet

    if check_parquet(data, name):
        return True
    with parquet.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
        for part in file.iter_batches():
            part.validate(full=True)
    return False


def _check_hdf5(data: pa.Buffer, name: str) -> bool:
    h5py = require("h5py", "hdf5")
    if check_hdf5(data, name):
        return True
    with h5py.File(name, "r") as file:
        file.visititems(lambda path, item: None)
    return False


_CHECKS: dict[str, Callable[[pa.Buffer, str], bool]] = {
    "Arrow": _check_arrow,
    "Parquet": _check_parquet,
    "HDF5": _check_hdf5,
}


def _dataset(folder: Path) -> Iterator[FileReport]:
    log = CommitLog(folder).path
    if log is None:
        raise FormatError(f"{str(folder)!r} must be the folder of a dataset or of a replay buffer, got another folder")
    try:
        snapshot = CommitLog(folder).read()
    except FormatError as error:
        yield FileReport(log, "commits", log.stat().st_size, has_checksums=True, fault=str(error))
        return
    fault = (
        ""
        if snapshot.is_sealed
        else f"{str(log)!r} must end with a complete commit and its seal, got {snapshot.torn} other bytes"
    )
    yield FileReport(log, "commits", log.stat().st_size, has_checksums=True, fault=fault)
    for part in snapshot.parts:
        path = folder / part.name
        yield (
            _file(path)
            if path.exists()
            else FileReport(
                path, "Parquet", part.size, has_checksums=True, fault=f"{str(path)!r} must exist, got no file"
            )
        )


def _buffer_folder(folder: Path) -> Iterator[FileReport]:
    form = "buffer folder"
    lock = open_locked(folder / LOCK)
    try:
        version, _ = read_about(folder)
        status = FolderStatus.read(folder, version)
        if status is not None and status.closed:
            for name, nbytes, fault in status.faults(always=True):
                yield FileReport(folder / name, form, nbytes, has_checksums=True, fault=fault)
            return
        if status is not None:
            status.check_open()
        Commits.open(folder).close()
        nbytes = sum(entry.stat().st_size for entry in folder.iterdir())
        yield FileReport(folder, form, nbytes, has_checksums=False, fault="")
    except FormatError as error:
        yield FileReport(folder, form, 0, has_checksums=True, fault=str(error))
    finally:
        os.close(lock)

"""Saving, loading and verification of batches and buffers in all file formats."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from samplebatch.arguments import choice
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError, FormatError, StorageError, require
from samplebatch.storage.buffers import file as buffer_file
from samplebatch.storage.buffers.folder import Commits
from samplebatch.storage.buffers.mapped import copy_to_folder, is_mappable, open_buffer
from samplebatch.storage.buffers.status import ABOUT, BUFFER_FILE, LOCK, FolderStatus, read_about
from samplebatch.storage.buffers.tianshou import load_hdf5_buffer, save_hdf5_buffer
from samplebatch.storage.datasets.commit_log import CommitLog
from samplebatch.storage.datasets.dataset import Dataset
from samplebatch.storage.files import file_bytes, form_of_bytes, form_of_file, form_to_write, open_locked, sync
from samplebatch.storage.foreign.damage import name_file_damage
from samplebatch.storage.hdf5 import check_hdf5, holds_batch, read_hdf5, write_hdf5
from samplebatch.storage.tables import batches
from samplebatch.storage.tables.arrow import arrow_table, check_arrow, write_arrow
from samplebatch.storage.tables.batches import Filters, RowFilter
from samplebatch.storage.tables.parquet import check_parquet, parquet_table, write_parquet

_Buffer = TypeVar("_Buffer", bound=ReplayBuffer)

_HDF5_FILTERS = ("gzip", "lzf", "none")


def save(thing: Any, path: str | os.PathLike[str], compression: str | None = None, *, durable: bool = True) -> None:
    """Write a batch or a buffer; see `SampleBatch.save`."""
    form = form_to_write(path)
    if form is None and not durable:
        raise ArgumentError(f"durable must be True for a folder, got False for {os.fspath(path)!r}")
    if isinstance(thing, MultiAgentReplayBuffer):
        if form is not None:
            raise FormatError(
                f"{os.fspath(path)!r} must be a folder with one file per policy, got a file name; remove the suffix"
            )
        buffer_file.write_policies(thing, path, compression)
    elif form == "HDF5":
        write = save_hdf5_buffer if isinstance(thing, ReplayBuffer) else write_hdf5
        write(thing, path, _hdf5_filter(thing, compression), durable=durable)
    elif isinstance(thing, ReplayBuffer):
        if form is None:
            _save_in_folder(thing, path, compression)
        else:
            buffer_file.write_buffer(thing, path, form, compression, durable=durable)
    elif form == "Parquet":
        write_parquet(thing, path, compression=compression or "zstd", durable=durable)
    elif form == "Arrow":
        write_arrow(thing, path, compression=compression, durable=durable)
    else:
        dataset = Dataset(path)
        if dataset.parts():
            raise StorageError(f"{os.fspath(path)!r} must be a new folder, got an existing dataset; extend it")
        dataset.extend(thing, compression=compression or "zstd")


def _save_in_folder(buffer: ReplayBuffer, path: str | os.PathLike[str], compression: str | None) -> None:
    """Copy the columns of a memory-mappable buffer into a folder; write other buffers as one file in the folder."""
    if is_mappable(buffer):
        copy_to_folder(buffer, path)
        return
    folder = Path(path)
    if folder.exists() and any(entry.name != BUFFER_FILE for entry in folder.iterdir()):
        raise StorageError(
            f"{str(folder)!r} must be a new folder, or one that contains such a buffer, got a folder with other files"
        )
    folder.mkdir(exist_ok=True)
    buffer_file.write_buffer(buffer, folder / BUFFER_FILE, "Arrow", compression)
    sync(folder)


def _hdf5_filter(value: Any, compression: str | None) -> str | None:
    """Select the h5py filter for HDF5 datasets; by default LZF if columns are compressed in memory, otherwise None."""
    if compression is None:
        compressed = (
            value._table.columns.stores.compress if isinstance(value, ReplayBuffer) else batches.is_compressed(value)
        )
        return "lzf" if compressed else None
    return None if compression == "none" else choice("compression", compression, _HDF5_FILTERS)


def load(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    memory_map: bool = True,
    allow_pickle: bool = False,
    verify: bool | None = None,
    max_nbytes: int | None = None,
    **missing: Any,
) -> Any:
    """Read a batch or buffer written by `save`, with its original type.

    Parameters
    ----------
    path
        The file or folder.
    columns
        Names of the columns of a batch to read; None for all columns. A name selects all columns nested under it.
        Columns that are not selected are neither read nor decompressed.
    filters
        Conditions on the rows of a batch, in pyarrow's form: a list of conditions that are combined by "and", such as
        `[("rewards", ">", 0.0)]`, or a list of such lists that are combined by "or". Row groups whose statistics
        exclude all rows are not read.
    memory_map
        Whether to memory-map an Arrow file instead of reading it. The columns of a mapped file are read-only views.
    allow_pickle
        Whether to unpickle Python objects for which the format has no type. A pickle can execute arbitrary code, so
        pass True only for files from a trusted writer.
    verify
        Whether to verify all bytes against their checksums. None verifies the bytes only if all bytes of the file are
        read.
    max_nbytes
        Maximum bytes to allocate; None for the larger of 256 MiB and 1024 times the file's size.
    **missing
        Arguments of the buffer that files cannot store, such as the reward function of a hindsight buffer.

    Returns
    -------
    SampleBatch, MultiAgentBatch, Batch or a replay buffer
        An object of the saved type. For a `MultiAgentBatch` with filters, environment steps are distinct pairs of
        `eps_id` and `t`; if these columns are not read, the number of environment steps is the maximum row count of a
        policy.

    Raises
    ------
    FormatError
        If the format is unknown, or the file is damaged, is truncated, or contains neither a batch nor a buffer. The
        error message lists the columns with changed bytes.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false.
    CapacityError
        If more than `max_nbytes` would be allocated.
    ColumnNotFoundError
        If a requested column does not exist.
    ArgumentError
        If a filter is invalid, or columns or filters are passed for a buffer.
    OSError
        If the file cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import Batch
    >>> path = tempfile.mkdtemp() + "/steps.arrow"
    >>> Batch(obs={"x": [1.0, 2.0]}, rew=[0.5, 1.0]).save(path)
    >>> load(path)
    Batch(
        obs: Batch(
                 x: array([1., 2.]),
             ),
        rew: array([0.5, 1. ]),
    )
    """
    name = os.fspath(path)
    trust: dict[str, Any] = {"allow_pickle": allow_pickle, "max_nbytes": max_nbytes}
    try:
        data = file_bytes(name, memory_map=True)
    except IsADirectoryError:
        return _load_folder(path, columns, filters, verify, missing, trust)
    form = form_of_bytes(data, path)
    if form == "HDF5":
        if not holds_batch(path):
            _refuse_selection(name, columns, filters)
            return load_buffer(ReplayBuffer, path, verify=verify is not False, missing=missing, **trust)
        batch = read_hdf5(path, None if filters is not None else columns, verify=verify is not False, **trust)
        return batch if filters is None else _select(batch, columns, filters, name)
    file: batches.TableFile
    if form == "Parquet":
        verify_all = columns is None and filters is None if verify is None else verify
        file, bound = parquet_table(data, name, verify=verify_all, max_nbytes=max_nbytes)
    else:
        data = data if memory_map else file_bytes(name, memory_map=False)
        verify_all = not memory_map if verify is None else verify
        file, bound = arrow_table(data, name, verify=verify_all, max_nbytes=max_nbytes)
    with name_file_damage(name, form):
        kind = batches.kind_of(file.about)
    if kind == "ReplayBuffer":
        _refuse_selection(name, columns, filters)
        return load_buffer(ReplayBuffer, path, verify=verify is not False, missing=missing, **trust)
    if missing:
        _refuse_missing(name, missing)
    requirement = f"{name!r} must be a batch or a buffer that save wrote"
    return batches.read_batch(file, bound, requirement, columns, filters, allow_pickle=allow_pickle)


def load_buffer(
    cls: type[_Buffer],
    path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    verify: bool = True,
    max_nbytes: int | None = None,
    missing: dict[str, Any],
) -> _Buffer:
    """Read a buffer from a file as an instance of `cls`; see `ReplayBuffer.load`."""
    form = form_of_file(path)
    trust: dict[str, Any] = {"allow_pickle": allow_pickle, "verify": verify, "max_nbytes": max_nbytes}
    if form == "HDF5":
        return load_hdf5_buffer(cls, path, missing=missing, **trust)
    return buffer_file.read_buffer(cls, path, form, missing=missing, **trust)


def _load_folder(
    path: str | os.PathLike[str],
    columns: Sequence[str] | None,
    filters: Filters | None,
    verify: bool | None,
    missing: dict[str, Any],
    trust: dict[str, Any],
) -> Any:
    folder, name = Path(path), os.fspath(path)
    if CommitLog(folder).path is not None:
        _refuse_missing(name, missing)
        dataset = Dataset(path, columns=columns, filters=filters, **trust)
        return dataset.read(verify=verify)
    _refuse_selection(name, columns, filters)
    if (folder / ABOUT).exists():
        _refuse_missing(name, missing)
        return open_buffer(ReplayBuffer, path, verify=verify)
    if (folder / BUFFER_FILE).exists():
        return load_buffer(ReplayBuffer, folder / BUFFER_FILE, verify=verify is not False, missing=missing, **trust)
    if (folder / buffer_file.MANIFEST).exists():
        return buffer_file.read_policies(path, verify=verify is not False, missing=missing, **trust)
    raise FormatError(f"{name!r} must be a folder that save wrote, got another folder")


def _refuse_selection(name: str, columns: Sequence[str] | None, filters: Filters | None) -> None:
    if columns is not None or filters is not None:
        raise ArgumentError(
            f"columns and filters must be None for the buffer in {name!r}, got {columns!r} and {filters!r}"
        )


def _refuse_missing(name: str, missing: dict[str, Any]) -> None:
    if missing:
        raise TypeError(f"load has no argument {min(missing)!r} that {name!r} requires")


def _select(batch: batches.AnyBatch, columns: Sequence[str] | None, filters: Filters, name: str) -> batches.AnyBatch:
    table = batches.to_table(batch)
    rows = batches.take_rows(batch, RowFilter(filters, table.schema, repr(name)).rows(table))
    if columns is None:
        return rows
    return batches.select_columns(rows, columns)


class FileReport(NamedTuple):
    """Result of `verify` for one file.

    Attributes
    ----------
    path
        Path of the file, or of the folder if the buffer in it is open.
    format
        Format of the file: `"Arrow"`, `"Parquet"`, `"HDF5"`, `"buffer folder"`, or `"commits"` for a dataset's log.
    nbytes
        File size in bytes, as recorded in the dataset's log or the buffer folder's status; otherwise the actual size.
    has_checksums
        Whether the file has checksums of all bytes. Files without checksums are only parsed.
    fault
        Description of the damage; empty if the file is intact.
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
        One report per file, ordered by name; reports of a dataset are ordered by part. No exception is raised for a
        damaged file.

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
    "'...batch.arrow' must have the bytes that were written, got changed bytes between 0 and
        ...; ..."
    """
    target = Path(path)
    if target.is_dir():
        if (target / BUFFER_FILE).exists():
            return [_file(target / BUFFER_FILE)]
        if (target / buffer_file.MANIFEST).exists():
            return list(map(_file, buffer_file.files_of(target)))
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

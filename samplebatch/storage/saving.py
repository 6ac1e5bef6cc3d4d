"""Saving and loading of batches and buffers: one way for all types and formats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from samplebatch.arguments import choice
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError, FormatError, StorageError
from samplebatch.storage.buffers.file import read_buffer, write_buffer
from samplebatch.storage.buffers.hdf5 import load_hdf5_buffer, save_hdf5_buffer
from samplebatch.storage.buffers.mapped import copy_to_folder, is_mappable, open_buffer
from samplebatch.storage.buffers.multi_agent import MANIFEST, read_policies, write_policies
from samplebatch.storage.buffers.status import ABOUT, BUFFER_FILE
from samplebatch.storage.datasets.commit_log import CommitLog
from samplebatch.storage.datasets.dataset import Dataset
from samplebatch.storage.files import file_bytes, form_of_bytes, form_of_file, form_to_write, sync
from samplebatch.storage.foreign.damage import name_file_damage
from samplebatch.storage.hdf5 import holds_batch, read_hdf5, write_hdf5
from samplebatch.storage.tables import batches
from samplebatch.storage.tables.arrow import arrow_table, write_arrow
from samplebatch.storage.tables.batches import Filters, RowFilter
from samplebatch.storage.tables.parquet import parquet_table, write_parquet

_Buffer = TypeVar("_Buffer", bound=ReplayBuffer)

_HDF5_FILTERS = ("gzip", "lzf", "none")


def save(thing: Any, path: str | os.PathLike[str], compression: str | None = None, *, durable: bool = True) -> None:
    """Write a batch or a buffer; see `SampleBatch.save`."""
    form = form_to_write(path)
    if form is None and not durable:
        raise ArgumentError(f"durable must be True for a folder, and {os.fspath(path)!r} has the name of one")
    if isinstance(thing, MultiAgentReplayBuffer):
        if form is not None:
            raise FormatError(f"{os.fspath(path)!r} must be a folder, with a file a policy; leave out the ending")
        write_policies(thing, path, compression)
    elif form == "HDF5":
        write = save_hdf5_buffer if isinstance(thing, ReplayBuffer) else write_hdf5
        write(thing, path, _hdf5_filter(thing, compression), durable=durable)
    elif isinstance(thing, ReplayBuffer):
        if form is None:
            _save_in_folder(thing, path, compression)
        else:
            write_buffer(thing, path, form, compression, durable=durable)
    elif form == "Parquet":
        write_parquet(thing, path, compression=compression or "zstd", durable=durable)
    elif form == "Arrow":
        write_arrow(thing, path, compression=compression, durable=durable)
    else:
        dataset = Dataset(path)
        if dataset.parts():
            raise StorageError(f"{os.fspath(path)!r} must be a new folder, and it is a dataset; extend it")
        dataset.extend(thing, compression=compression or "zstd")


def _save_in_folder(buffer: ReplayBuffer, path: str | os.PathLike[str], compression: str | None) -> None:
    """Copy a buffer to a new folder to be opened; if its rows cannot be mapped, write one file into it."""
    if is_mappable(buffer):
        copy_to_folder(buffer, path)
        return
    folder = Path(path)
    if folder.exists() and any(entry.name != BUFFER_FILE for entry in folder.iterdir()):
        raise StorageError(f"{str(folder)!r} must be a new folder, or one of such a buffer; it holds other files")
    folder.mkdir(exist_ok=True)
    write_buffer(buffer, folder / BUFFER_FILE, "Arrow", compression)
    sync(folder)


def _hdf5_filter(thing: Any, compression: str | None) -> str | None:
    """Select the compression of HDF5 datasets; by default that of the columns in memory."""
    if compression is None:
        compressed = (
            thing._table.columns.stores.compress if isinstance(thing, ReplayBuffer) else batches.is_compressed(thing)
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
    """Read a batch or a buffer that `save` wrote, of the type that it had.

    Parameters
    ----------
    path
        The file or folder.
    columns
        Names of the columns of a batch to read; None for all. A name stands for all that is nested under it. Others are
        neither read nor decompressed.
    filters
        Conditions on the rows of a batch to read, as `pyarrow.parquet` takes them: `[("rewards", ">", 0.0)]` for all of
        several, a list of such lists for one of them. Row groups whose statistics rule them out are not read.
    memory_map
        Whether to map an Arrow file instead of reading it. Columns then lie in the file, and writing to them raises.
    allow_pickle
        Whether to unpickle Python objects that the format has no type for. Only for files whose writer you trust: a
        pickle can run any code.
    verify
        Whether to hold all bytes against their checksums. By default that is done where all of them are read.
    max_nbytes
        Bytes of memory that may be made of a file; 256 MiB or 1024 times its own, whichever is more, if None.
    **missing
        Arguments of a buffer that no file can hold, such as the reward function of a hindsight buffer.

    Returns
    -------
    SampleBatch, MultiAgentBatch, Batch or a replay buffer
        The type that was saved. Of a `MultiAgentBatch` with filters, the environment steps are counted by `eps_id` and
        `t`, or are the most rows of a policy if these are not read.

    Raises
    ------
    FormatError
        If it is of no format that the library writes, holds something else, or is damaged or cut short. Names the
        columns where bytes have changed.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false; names it.
    CapacityError
        If more memory than `max_nbytes` would be allocated; names the column.
    ColumnNotFoundError
        If there is no column of such a name.
    ArgumentError
        If a filter is none, or columns or filters are given for a buffer.
    OSError
        If it cannot be read.

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
        whole = columns is None and filters is None if verify is None else verify
        file, bound = parquet_table(data, name, verify=whole, max_nbytes=max_nbytes)
    else:
        data = data if memory_map else file_bytes(name, memory_map=False)
        whole = not memory_map if verify is None else verify
        file, bound = arrow_table(data, name, verify=whole, max_nbytes=max_nbytes)
    with name_file_damage(name, form):
        kind = batches.kind_of(file.about)
    if kind == "ReplayBuffer":
        _refuse_selection(name, columns, filters)
        return load_buffer(ReplayBuffer, path, verify=verify is not False, missing=missing, **trust)
    if missing:
        _refuse_missing(name, missing)
    must = f"{name!r} must be a batch or a buffer that save wrote"
    return batches.read_batch(file, bound, must, columns, filters, allow_pickle=allow_pickle)


def load_buffer(
    cls: type[_Buffer],
    path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    verify: bool = True,
    max_nbytes: int | None = None,
    missing: dict[str, Any],
) -> _Buffer:
    """Read a buffer of a class from a file of any format; see `ReplayBuffer.load`."""
    form = form_of_file(path)
    trust: dict[str, Any] = {"allow_pickle": allow_pickle, "verify": verify, "max_nbytes": max_nbytes}
    if form == "HDF5":
        return load_hdf5_buffer(cls, path, missing=missing, **trust)
    return read_buffer(cls, path, form, missing=missing, **trust)


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
    if (folder / MANIFEST).exists():
        return read_policies(path, verify=verify is not False, missing=missing, **trust)
    raise FormatError(f"{name!r} must be a folder that save wrote, it is another")


def _refuse_selection(name: str, columns: Sequence[str] | None, filters: Filters | None) -> None:
    if columns is not None or filters is not None:
        raise ArgumentError(f"columns and filters are for batches, and {name!r} holds a buffer; leave them out")


def _refuse_missing(name: str, missing: dict[str, Any]) -> None:
    if missing:
        raise TypeError(f"load has no argument {min(missing)!r}, and {name!r} holds nothing that lacks one")


def _select(batch: batches.AnyBatch, columns: Sequence[str] | None, filters: Filters, name: str) -> batches.AnyBatch:
    """Choose rows and columns of a batch in memory."""
    table = batches.to_table(batch)
    kept = batches.take_rows(batch, RowFilter(filters, table.schema, repr(name)).rows(table))
    if columns is None:
        return kept
    return batches.select_columns(kept, columns)

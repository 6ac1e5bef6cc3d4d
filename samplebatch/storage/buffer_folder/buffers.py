"""Replay buffers in folders: one that is new, one that is opened."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from samplebatch.buffer.dense_store import DenseStore
from samplebatch.buffer.samplers import Prioritized, Sampler
from samplebatch.buffer.stores import Stores
from samplebatch.buffer.table import Table
from samplebatch.errors import FormatError, StorageError
from samplebatch.storage.buffer_description import describe, give_rows, make_rowless, set_checked
from samplebatch.storage.buffer_folder.folder import BufferFolder
from samplebatch.storage.buffer_folder.journal import WEIGHTS, FolderJournal, MappedStores, adopt_columns, unpack_state
from samplebatch.storage.buffer_state import generator_from_state, sampler_from_state, sampler_state
from samplebatch.storage.state_dict import export_state
from samplebatch.storage.untrusted_state import State

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer

_Buffer = TypeVar("_Buffer", bound="ReplayBuffer")


def store_in_folder(buffer: ReplayBuffer, path: str | os.PathLike[str]) -> None:
    """Store the rows of a buffer, which must be empty, in a new folder from now on.

    Raises
    ------
    StorageError
        If the folder is not new, or the buffer has columns or attributes that no folder can hold.
    """
    table = buffer._table
    stores = table.columns.stores
    if stores.compress or stores.ragged:
        option = "compress" if stores.compress else "ragged"
        raise StorageError(f"rows in a folder must be numbers of one shape; leave out {option!r}, or 'storage'")
    described = describe(buffer)
    if described["missing"]:
        raise StorageError(
            f"a {type(buffer).__name__} must be all plain values to be kept in a folder, "
            f"it has {described['missing'][0]!r}; leave out 'storage'"
        )
    maxsizes = table.rings.maxsizes.tolist()
    folder = BufferFolder.create(path, described | {"maxsizes": maxsizes}, b"")
    try:
        buffer._table = Table(
            maxsizes,
            MappedStores(allocate=folder.allocate),
            keeps_next=table.keeps_next,
            last_frame=table.last_frame,
        )
        buffer._use(buffer._sampler)
        _attach_journal(buffer, folder).commit_state()
    except BaseException:
        folder.close()
        raise


def is_mappable(buffer: ReplayBuffer) -> bool:
    """Tell whether a folder can hold a buffer to be opened: rows of numbers of one shape, and plain attributes."""
    columns = buffer._table.columns
    return (
        not (columns.stores.compress or columns.stores.ragged or describe(buffer)["missing"])
        # Those in torch tensors are, too.
        and all(isinstance(store, DenseStore) for _, store in columns.leaves())
    )


def copy_to_folder(buffer: ReplayBuffer, path: str | os.PathLike[str]) -> None:
    """Copy a buffer that is mappable into a new folder, closed, for `ReplayBuffer.open` to go on from.

    Raises
    ------
    StorageError
        If the folder is not new.
    """
    state = export_state(buffer)
    own, nothing = buffer._table, np.zeros(0, np.intp)
    maxsizes = [buffer.maxsize] if buffer._ring is not None else own.rings.maxsizes.tolist()
    copied = make_rowless(type(buffer), describe(buffer), {})
    table = Table(maxsizes, Stores(), keeps_next=own.keeps_next, last_frame=own.last_frame)
    sampler = sampler_from_state(sampler_state(buffer._sampler, nothing), buffer.maxsize, nothing)
    give_rows(copied, table, sampler, np.random.default_rng())
    store_in_folder(copied, path)
    with copied:
        copied.load_state_dict(state, verify=False)


def open_buffer(cls: type[_Buffer], path: str | os.PathLike[str], *, verify: bool | None = None) -> _Buffer:
    """Open the folder of a buffer; see `ReplayBuffer.open`."""
    folder = BufferFolder.open(path, verify=verify)
    try:
        return _buffer_in(folder, cls)
    except BaseException:
        folder.close()
        raise


def _buffer_in(folder: BufferFolder, cls: type[_Buffer]) -> _Buffer:
    """Make the buffer of an open folder, in the state that was committed last."""
    about = folder.about
    buffer: _Buffer = make_rowless(cls, about, {})
    table = _table_in(folder)
    rings = table.rings
    rest: State = about
    if folder.state:
        rew = table.columns.tree.get("rew")
        state, rest = unpack_state(folder.state, rings.maxsizes.tolist(), () if rew is None else rew.row_shape)
        rings.load_state_dict(state)
    set_checked(buffer, rest)
    sampler = sampler_from_state(rest.get("sampler"), rings.capacity, np.zeros(0, np.intp))
    _restore_weights(sampler, folder, table)
    give_rows(buffer, table, sampler, generator_from_state(rest.get("generator")))
    _attach_journal(buffer, folder)
    return buffer


def _table_in(folder: BufferFolder) -> Table:
    """Make a table of the columns of a folder; its rings are empty."""
    about = folder.about
    try:
        maxsizes = [int(size) for size in about["maxsizes"]]
        options = about["own"]["options"]
        keeps_next, last_frame = not options["ignore_obs_next"], bool(options["save_only_last_obs"])
        table = Table(maxsizes, MappedStores(), keeps_next=keeps_next, last_frame=last_frame)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{str(folder.path)!r} must describe a buffer, it does not: {error!r}") from error
    stores = MappedStores(allocate=folder.allocate)
    table.columns.stores = stores
    if table.finals is not None:
        table.finals.columns.stores = stores
    adopt_columns(folder, table)
    return table


def _restore_weights(sampler: Sampler, folder: BufferFolder, table: Table) -> None:
    """Give a prioritized sampler the weights that the folder has of stored rows."""
    if not isinstance(sampler, Prioritized) or WEIGHTS not in folder.columns:
        return
    stored = table.rings.stored_slots()
    weights = folder.columns[WEIGHTS][stored]
    # A reset may have got as far as the weights; its rows are still there, and enter as new ones do.
    valid = (weights > 0.0) & (weights < sampler.tree.limit)
    sampler.tree.set(stored, np.where(valid, weights, sampler.new_weight))


def _attach_journal(buffer: ReplayBuffer, folder: BufferFolder) -> FolderJournal:
    """Commit every step of a buffer to a folder from now on."""
    sampler = buffer._sampler
    if isinstance(sampler, Prioritized):
        if WEIGHTS not in folder.columns:
            folder.allocate(WEIGHTS, (buffer.maxsize,), np.dtype(np.float64))
        sampler.mirror = folder.columns[WEIGHTS]
    journal = FolderJournal(folder, buffer)
    buffer._table.journal = journal
    buffer._table.forget_fast_add()
    return journal

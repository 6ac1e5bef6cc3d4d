"""Replay buffers in folders: stored, copied and opened, with a journal that commits each step."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import KINDS, TENSOR
from samplebatch.buffer.columns import Columns, Tree
from samplebatch.buffer.final_observations import OWNER
from samplebatch.buffer.samplers import Prioritized, Sampler
from samplebatch.buffer.store import DenseStore, Slots, Store, TorchStore, as_rows
from samplebatch.buffer.stores import Stores
from samplebatch.buffer.table import Table
from samplebatch.column.interface import Column
from samplebatch.column.types import named_torch_dtype
from samplebatch.errors import ColumnTypeError, FormatError, StorageError
from samplebatch.storage.buffers.folder import BufferFolder
from samplebatch.storage.buffers.state import (
    State,
    action_unit_in,
    check_rings,
    describe,
    export_state,
    generator_from_state,
    generator_state,
    give_rows,
    make_rowless,
    plain,
    sampler_from_state,
    sampler_state,
    set_checked,
)

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
    """Return whether a folder can hold a buffer to be opened: rows of numbers of one shape, and plain attributes."""
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
    """Create the buffer of an open folder, in the state that was committed last."""
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
    buffer.action_unit = action_unit_in(rest)
    _attach_journal(buffer, folder)
    return buffer


def _table_in(folder: BufferFolder) -> Table:
    """Create a table of the columns of a folder; its rings are empty."""
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


WEIGHTS = "sampler/weights"
"""The name of the column that holds a sampler's weights."""

_NUMBERS = ("cursors", "sizes", "writes", "began", "starts", "origins")
_HEAD = struct.Struct("<?QQ")
"""Whether rings go together, how many they are, and numbers in the return of an episode."""


@dataclass(frozen=True)
class MappedStores(Stores):
    """A factory of stores in the memory of a folder, for numbers of one shape alone."""

    def make(self, name: str, first_rows: Any, slots: int) -> Store:
        """Create the store that suits the first rows of a column; they are not written.

        Raises
        ------
        ColumnTypeError
            If they are not numbers of one shape; names the column.
        """
        if KINDS[type(first_rows)] != TENSOR and as_rows(first_rows, name).dtype.kind == "O":
            raise ColumnTypeError(
                f"column {name!r} must have numbers of one shape to be stored in a folder, got objects; "
                "leave it out, or make it numbers"
            )
        return super().make(name, first_rows, slots)

    def like(self, kind: str, name: str, column: Column, row_shape: tuple[int, ...], slots: int) -> Store:
        """Create an empty store for rows such as those of a column that another store's `to_column` returned.

        Raises
        ------
        ColumnTypeError
            If they are not numbers of one shape; names the column.
        """
        if kind == "compressed":
            return self.make(name, column.slice(0, min(len(column), 1)).to_numpy(), slots)
        if kind not in ("dense", "torch"):
            raise ColumnTypeError(
                f"column {name!r} must have numbers of one shape to be stored in a folder, got {kind}"
            )
        return super().like(kind, name, column, row_shape, slots)

    def __reduce__(self) -> tuple[Any, ...]:
        # Elsewhere the rows are in memory, where every kind of them can be.
        return Stores, ()


class FolderJournal:
    """The write-ahead log of a buffer in a folder, to which the buffer's table commits every step.

    Parameters
    ----------
    folder
        The folder, in whose memory the table's columns lie.
    buffer
        The buffer.

    Attributes
    ----------
    folder
        As given.
    """

    def __init__(self, folder: BufferFolder, buffer: ReplayBuffer) -> None:
        self.folder = folder
        self._buffer = buffer
        self._table = buffer._table
        self._noted: tuple[int, int] = (-1, -1)
        self._encoded: tuple[str, bytes] = ("", b"")

    def begin(self, overwritten: Sequence[tuple[Iterable[str], Slots]]) -> None:
        """Save the rows that a step will overwrite, as far as they count."""
        rings = self._table.rings
        kept: list[tuple[Iterable[str], Slots]] = []
        for names, slots in overwritten:
            if OWNER in names:
                kept.append((names, slots))
                continue
            if WEIGHTS in self.folder.columns:
                names = [*names, WEIGHTS]
            kept.append((names, slots if len(rings) == rings.capacity else self._counting(slots)))
        self.folder.begin(kept)

    def _counting(self, slots: Slots) -> Slots:
        """Leave out slots that hold no rows yet."""
        rings = self._table.rings
        numbers = np.atleast_1d(np.arange(rings.capacity)[slots] if isinstance(slots, slice) else np.asarray(slots))
        ring = rings.ring_of(numbers)
        return numbers[numbers - rings.bases[ring] < rings.sizes_of_all()[ring]]

    def commit(self) -> None:
        """Commit a step that is written, and the state after it."""
        table = self._table
        noted = (_count(table.columns.tree), 0 if table.finals is None else _count(table.finals.columns.tree))
        if noted != self._noted:
            self.folder.note(notes_of(table))
            self._noted = noted
        self.folder.commit(pack_state(table.rings.state_dict(), self._rest()))

    def commit_state(self) -> None:
        """Commit changes since the last step, such as those of the generator."""
        self.begin([])
        self.commit()

    def _rest(self) -> bytes:
        """Return the state of generator and sampler, `stack_num` and the unit of actions, as JSON."""
        buffer = self._buffer
        none = np.zeros(0, np.intp)
        unit = buffer.action_unit
        found = repr((buffer._rng.bit_generator.state, buffer._sampler.state_dict(none), buffer.stack_num, unit))
        # Encoding the same again would be most of the cost of a step.
        if found != self._encoded[0]:
            state = {
                "generator": generator_state(buffer._rng),
                "sampler": plain(sampler_state(buffer._sampler, none)),
                "stack_num": buffer.stack_num,
                **({} if unit is None else {"action_unit": unit.describe()}),
            }
            self._encoded = found, json.dumps(state, separators=(",", ":")).encode()
        return self._encoded[1]

    def mirror_weights(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Store the weights of all slots, and return the array that is to get every further one."""
        mirror = self.folder.allocate(WEIGHTS, weights.shape, weights.dtype)
        mirror[:] = weights
        return mirror

    def flush(self) -> None:
        """Commit the state, and wait until it is on the disk; see `ReplayBuffer.flush`."""
        self.commit_state()
        self.folder.flush()

    def close(self) -> None:
        """Commit the state, and close the folder; closing again does nothing. See `ReplayBuffer.close`."""
        if not self.folder.closed:
            self.commit_state()
            self.folder.close()


def _count(tree: Tree) -> int:
    """Count the names in a tree."""
    return sum([1 + _count(held) if type(held) is dict else 1 for held in tree.values()])


def notes_of(table: Table) -> State:
    """Return nesting and torch dtypes of a table's columns, as plain values."""
    finals = table.finals
    return {"columns": _notes(table.columns.tree), "finals": None if finals is None else _notes(finals.columns.tree)}


def _notes(tree: Tree) -> State:
    found: State = {}
    for name, held in tree.items():
        if isinstance(held, Store):
            found[name] = [held.name, str(held.torch_dtype) if isinstance(held, TorchStore) else ""]
        else:
            found[name] = _notes(held)
    return found


def pack_state(rings: State, rest: bytes) -> bytes:
    """Encode the state of rings, followed by the rest of the state as JSON.

    Examples
    --------
    >>> state = Table([4], Stores(), keeps_next=True, last_frame=False).rings.state_dict()
    >>> again, rest = unpack_state(pack_state(state, b'{"stack_num": 4}'), [4], ())
    >>> again["cursors"], rest
    (array([0]), {'stack_num': 4})
    """
    returns = rings["returns"]
    n = len(returns)
    head = _HEAD.pack(rings["together"], n, returns.size // max(n, 1))
    numbers = [rings[name].astype(np.int64, copy=False).tobytes() for name in _NUMBERS]
    return b"".join([head, *numbers, returns.tobytes(), rest])


def unpack_state(data: bytes, maxsizes: Sequence[int], reward_shape: tuple[int, ...]) -> tuple[State, State]:
    """Decode and check the bytes of `pack_state`.

    Raises
    ------
    FormatError
        If it is not the state of rings of these sizes.
    """
    try:
        together, n, width = _HEAD.unpack_from(data)
        if n != len(maxsizes):
            raise ValueError(f"it is of {n} rings, not {len(maxsizes)}")
        state: State = {"maxsizes": np.array(maxsizes), "together": together}
        at = _HEAD.size
        for name in _NUMBERS:
            state[name] = np.frombuffer(data, np.int64, n, at)
            at += 8 * n
        state["returns"] = np.frombuffer(data, np.float64, n * width, at).reshape(n, *reward_shape)
        rest = json.loads(data[at + 8 * n * width :])
        if not isinstance(rest, dict):
            raise ValueError("its end is no dict")
    except (struct.error, ValueError, RecursionError) as error:
        raise FormatError(f"a commit must hold the state of a buffer, it does not: {error}") from error
    check_rings(state)
    return state, rest


def adopt_columns(folder: BufferFolder, table: Table) -> None:
    """Give an empty table the columns of a folder.

    Raises
    ------
    FormatError
        If the folder's notes do not fit its columns, or the columns the table.
    """
    notes = folder.notes or {"columns": {}, "finals": None}
    try:
        arrays = folder.columns
        table.columns.tree = _tree(notes["columns"], arrays, table.rings.capacity)
        finals = table.finals
        if finals is not None and OWNER in arrays:
            owners = arrays[OWNER]
            if owners.dtype != np.int64 or owners.ndim != 1 or owners.min(initial=0) < 0:
                raise ValueError(f"column {OWNER!r} must have the slots that observations belong to")
            if len(owners) < table.rings.n or owners.max(initial=0) > table.rings.capacity:
                raise ValueError(f"column {OWNER!r} must have slots of the buffer")
            columns = Columns(len(owners), finals.columns.stores)
            columns.tree = _tree(notes["finals"], arrays, len(owners))
            finals.adopt(columns, owners)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{str(folder.path)!r} must have columns that fit its notes: {error}") from error


def _tree(notes: Any, arrays: dict[str, npt.NDArray[Any]], slots: int) -> Tree:
    tree: Tree = {}
    for name, held in notes.items():
        if isinstance(held, dict):
            tree[name] = _tree(held, arrays, slots)
            continue
        path, torch_name = held
        values = arrays[path]
        if len(values) != slots:
            raise ValueError(f"column {path!r} must have {slots} rows, got {len(values)}")
        tree[name] = (
            TorchStore(path, values, _torch_dtype(torch_name, values)) if torch_name else DenseStore(path, values)
        )
    return tree


def _torch_dtype(name: str, values: npt.NDArray[Any]) -> Any:
    dtype = named_torch_dtype(name.removeprefix("torch."))
    if dtype.itemsize != values.itemsize:
        raise ValueError(f"a torch dtype must have {values.itemsize} bytes per element, got {name!r}")
    return dtype

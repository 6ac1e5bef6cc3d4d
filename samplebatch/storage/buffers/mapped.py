"""Storage of replay buffers in memory-mapped folders, and a journal that commits each step."""

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
from samplebatch.storage.buffers import state as buffer_state
from samplebatch.storage.buffers.folder import BufferFolder

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer


_Buffer = TypeVar("_Buffer", bound="ReplayBuffer")


def store_in_folder(buffer: ReplayBuffer, path: str | os.PathLike[str]) -> None:
    """Attach a new folder to an empty buffer; rows that are added later are stored in the folder.

    Raises StorageError if the folder is not empty, or the buffer has columns or attributes that folders cannot store.
    """
    table = buffer._table
    stores = table.columns.stores
    if stores.compress or stores.ragged:
        option = "compress" if stores.compress else "ragged"
        raise StorageError(
            f"rows in a folder must be numeric and of one shape, got option {option!r}; remove {option!r} or 'storage'"
        )
    described = buffer_state.describe(buffer)
    if described["missing"]:
        raise StorageError(
            f"a {type(buffer).__name__} must have plain attributes to be stored in a folder, "
            f"got {described['missing'][0]!r}; remove 'storage'"
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
    """Return whether a folder can store a buffer: rows must be numeric and of equal shape, attributes plain values."""
    columns = buffer._table.columns
    return (
        not (columns.stores.compress or columns.stores.ragged or buffer_state.describe(buffer)["missing"])
        # Torch stores are dense, too.
        and all(isinstance(store, DenseStore) for _, store in columns.leaves())
    )


def copy_to_folder(buffer: ReplayBuffer, path: str | os.PathLike[str]) -> None:
    """Copy a memory-mappable buffer into a new, closed folder.

    Raises StorageError if the folder exists and is not empty.
    """
    state = buffer_state.export_state(buffer)
    source, nothing = buffer._table, np.zeros(0, np.intp)
    maxsizes = [buffer.maxsize] if buffer._ring is not None else source.rings.maxsizes.tolist()
    copied = buffer_state.make_rowless(type(buffer), buffer_state.describe(buffer), {})
    table = Table(maxsizes, Stores(), keeps_next=source.keeps_next, last_frame=source.last_frame)
    sampler = buffer_state.sampler_from_state(
        buffer_state.sampler_state(buffer._sampler, nothing), buffer.maxsize, nothing
    )
    buffer_state.give_rows(copied, table, sampler, np.random.default_rng())
    store_in_folder(copied, path)
    with copied:
        copied.load_state_dict(state, verify=False)


def open_buffer(cls: type[_Buffer], path: str | os.PathLike[str], *, verify: bool | None = None) -> _Buffer:
    """Open the buffer that a folder contains; see `ReplayBuffer.open`."""
    folder = BufferFolder.open(path, verify=verify)
    try:
        return _create_buffer(folder, cls)
    except BaseException:
        folder.close()
        raise


def _create_buffer(folder: BufferFolder, cls: type[_Buffer]) -> _Buffer:
    about = folder.about
    buffer: _Buffer = buffer_state.make_rowless(cls, about, {})
    table = _create_table(folder)
    rings = table.rings
    extra: buffer_state.State = about
    if folder.state:
        rew = table.columns.tree.get("rew")
        state, extra = unpack_state(folder.state, rings.maxsizes.tolist(), () if rew is None else rew.row_shape)
        rings.load_state_dict(state)
    buffer_state.set_checked(buffer, extra)
    sampler = buffer_state.sampler_from_state(extra.get("sampler"), rings.capacity, np.zeros(0, np.intp))
    _restore_weights(sampler, folder, table)
    buffer_state.give_rows(buffer, table, sampler, buffer_state.generator_from_state(extra.get("generator")))
    buffer.action_unit = buffer_state.action_unit_in(extra)
    _attach_journal(buffer, folder)
    return buffer


def _create_table(folder: BufferFolder) -> Table:
    about = folder.about
    try:
        maxsizes = [int(size) for size in about["maxsizes"]]
        options = about["own"]["options"]
        keeps_next, last_frame = not options["ignore_obs_next"], bool(options["save_only_last_obs"])
        table = Table(maxsizes, MappedStores(), keeps_next=keeps_next, last_frame=last_frame)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{str(folder.path)!r} must describe a buffer: {error!r}") from error
    stores = MappedStores(allocate=folder.allocate)
    table.columns.stores = stores
    if table.finals is not None:
        table.finals.columns.stores = stores
    adopt_columns(folder, table)
    return table


def _restore_weights(sampler: Sampler, folder: BufferFolder, table: Table) -> None:
    if not isinstance(sampler, Prioritized) or WEIGHTS not in folder.columns:
        return
    stored = table.rings.stored_slots()
    weights = folder.columns[WEIGHTS][stored]
    # An interrupted reset may have cleared weights of rows that still exist: these rows receive the weight of new rows.
    valid = (weights > 0.0) & (weights < sampler.tree.limit)
    sampler.tree.set(stored, np.where(valid, weights, sampler.new_weight))


def _attach_journal(buffer: ReplayBuffer, folder: BufferFolder) -> FolderJournal:
    """Attach a journal to a buffer, so that every later step is committed to a folder."""
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
"""Name of the column with the sampler's weights."""

_NUMBERS = ("cursors", "sizes", "writes", "began", "starts", "origins")
_HEAD = struct.Struct("<?QQ")
"""Whether rings are in lockstep, number of rings, and number of elements in an episode's return."""


@dataclass(frozen=True)
class MappedStores(Stores):
    """Factory of stores in a folder's memory-mapped files; supports numeric rows of equal shape."""

    def make(self, name: str, first_rows: Any, slots: int) -> Store:
        """Create an empty store with the layout of the first rows of a column.

        Raises ColumnTypeError if the rows are not numeric or differ in shape.
        """
        if KINDS[type(first_rows)] != TENSOR and as_rows(first_rows, name).dtype.kind == "O":
            raise ColumnTypeError(
                f"column {name!r} must have numeric rows of one shape to be stored in a folder, got objects; "
                "remove it or convert it to numbers"
            )
        return super().make(name, first_rows, slots)

    def like(self, kind: str, name: str, column: Column, row_shape: tuple[int, ...], slots: int) -> Store:
        """Create an empty store for rows of a column that another store's `to_column` returned.

        Raises ColumnTypeError if the rows are not numeric or differ in shape.
        """
        if kind == "compressed":
            return self.make(name, column.slice(0, min(len(column), 1)).to_numpy(), slots)
        if kind not in ("dense", "torch"):
            raise ColumnTypeError(
                f"column {name!r} must have numeric rows of one shape to be stored in a folder, got {kind}"
            )
        return super().like(kind, name, column, row_shape, slots)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled copy is in memory, which supports all types of rows.
        return Stores, ()


class FolderJournal:
    """Write-ahead log of a buffer in a folder; the buffer's table commits every step to the log.

    folder: folder whose memory-mapped files contain the table's columns.
    """

    def __init__(self, folder: BufferFolder, buffer: ReplayBuffer) -> None:
        self.folder = folder
        self._buffer = buffer
        self._table = buffer._table
        self._noted: tuple[int, int] = (-1, -1)
        self._encoded: tuple[str, bytes] = ("", b"")

    def begin(self, overwritten: Sequence[tuple[Iterable[str], Slots]]) -> None:
        """Copy the rows that a step will overwrite to the folder's undo log."""
        rings = self._table.rings
        saved: list[tuple[Iterable[str], Slots]] = []
        for names, slots in overwritten:
            if OWNER in names:
                saved.append((names, slots))
                continue
            if WEIGHTS in self.folder.columns:
                names = [*names, WEIGHTS]
            saved.append((names, slots if len(rings) == rings.capacity else self._counting(slots)))
        self.folder.begin(saved)

    def _counting(self, slots: Slots) -> Slots:
        """Select the slots that contain rows."""
        rings = self._table.rings
        numbers = np.atleast_1d(np.arange(rings.capacity)[slots] if isinstance(slots, slice) else np.asarray(slots))
        ring = rings.ring_of(numbers)
        return numbers[numbers - rings.bases[ring] < rings.sizes_of_all()[ring]]

    def commit(self) -> None:
        """Commit the table's state after a step whose columns have been written."""
        table = self._table
        noted = (_count(table.columns.tree), 0 if table.finals is None else _count(table.finals.columns.tree))
        if noted != self._noted:
            self.folder.note(notes_of(table))
            self._noted = noted
        self.folder.commit(pack_state(table.rings.state_dict(), self._encode_extra()))

    def commit_state(self) -> None:
        """Commit state changes since the last step, such as a new generator state."""
        self.begin([])
        self.commit()

    def _encode_extra(self) -> bytes:
        """Encode the states of the random generator and the sampler, `stack_num` and the action unit as JSON."""
        buffer = self._buffer
        no_slots = np.zeros(0, np.intp)
        unit = buffer.action_unit
        key = repr((buffer._rng.bit_generator.state, buffer._sampler.state_dict(no_slots), buffer.stack_num, unit))
        # Encoding unchanged values again would dominate the cost of a step.
        if key != self._encoded[0]:
            state = {
                "generator": buffer_state.generator_state(buffer._rng),
                "sampler": buffer_state.plain(buffer_state.sampler_state(buffer._sampler, no_slots)),
                "stack_num": buffer.stack_num,
                **({} if unit is None else {"action_unit": unit.describe()}),
            }
            self._encoded = key, json.dumps(state, separators=(",", ":")).encode()
        return self._encoded[1]

    def mirror_weights(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Store the weights of all slots; return the mapped array, in which the caller must store later changes."""
        mirror = self.folder.allocate(WEIGHTS, weights.shape, weights.dtype)
        mirror[:] = weights
        return mirror

    def flush(self) -> None:
        """Commit the state and sync the folder to disk; see `ReplayBuffer.flush`."""
        self.commit_state()
        self.folder.flush()

    def close(self) -> None:
        """Commit the state and close the folder; idempotent. See `ReplayBuffer.close`."""
        if not self.folder.closed:
            self.commit_state()
            self.folder.close()


def _count(tree: Tree) -> int:
    return sum([1 + _count(node) if type(node) is dict else 1 for node in tree.values()])


def notes_of(table: Table) -> buffer_state.State:
    """Return the nesting and torch dtypes of a table's columns as plain values."""
    finals = table.finals
    return {"columns": _notes(table.columns.tree), "finals": None if finals is None else _notes(finals.columns.tree)}


def _notes(tree: Tree) -> buffer_state.State:
    notes: buffer_state.State = {}
    for name, node in tree.items():
        if isinstance(node, Store):
            notes[name] = [node.name, str(node.torch_dtype) if isinstance(node, TorchStore) else ""]
        else:
            notes[name] = _notes(node)
    return notes


def pack_state(rings: buffer_state.State, trailer: bytes) -> bytes:
    """Encode the state of rings as bytes, and append `trailer`, which contains the remaining state as JSON.

    >>> state = Table([4], Stores(), keeps_next=True, last_frame=False).rings.state_dict()
    >>> again, rest = unpack_state(pack_state(state, b'{"stack_num": 4}'), [4], ())
    >>> again["cursors"], rest
    (array([0]), {'stack_num': 4})
    """
    returns = rings["returns"]
    n = len(returns)
    head = _HEAD.pack(rings["together"], n, returns.size // max(n, 1))
    numbers = [rings[name].astype(np.int64, copy=False).tobytes() for name in _NUMBERS]
    return b"".join([head, *numbers, returns.tobytes(), trailer])


def unpack_state(
    data: bytes, maxsizes: Sequence[int], reward_shape: tuple[int, ...]
) -> tuple[buffer_state.State, buffer_state.State]:
    """Decode and validate the bytes of `pack_state`.

    Raises FormatError if the bytes are not the state of rings with these `maxsizes`.
    """
    try:
        together, n, width = _HEAD.unpack_from(data)
        if n != len(maxsizes):
            raise ValueError(f"it must have {len(maxsizes)} rings, got {n}")
        state: buffer_state.State = {"maxsizes": np.array(maxsizes), "together": together}
        at = _HEAD.size
        for name in _NUMBERS:
            state[name] = np.frombuffer(data, np.int64, n, at)
            at += 8 * n
        state["returns"] = np.frombuffer(data, np.float64, n * width, at).reshape(n, *reward_shape)
        trailer = json.loads(data[at + 8 * n * width :])
        if not isinstance(trailer, dict):
            raise ValueError(f"its trailer must be a dict, got a {type(trailer).__name__}")
    except (struct.error, ValueError, RecursionError) as error:
        raise FormatError(f"a commit must contain the state of a buffer: {error}") from error
    buffer_state.check_rings(state)
    return state, trailer


def adopt_columns(folder: BufferFolder, table: Table) -> None:
    """Use the columns of a folder as the columns of an empty table.

    Raises FormatError if the folder's notes do not match its columns, or the columns do not match the table.
    """
    notes = folder.notes or {"columns": {}, "finals": None}
    try:
        arrays = folder.columns
        table.columns.tree = _tree(notes["columns"], arrays, table.rings.capacity)
        finals = table.finals
        if finals is not None and OWNER in arrays:
            owners = arrays[OWNER]
            if owners.dtype != np.int64 or owners.ndim != 1 or owners.min(initial=0) < 0:
                raise ValueError(
                    f"column {OWNER!r} must contain slots from 0, shape (n,), got {owners.dtype}, shape {owners.shape}"
                )
            if len(owners) < table.rings.n or owners.max(initial=0) > table.rings.capacity:
                raise ValueError(
                    f"column {OWNER!r} must have at least {table.rings.n} slots of at most {table.rings.capacity}, got "
                    f"{len(owners)} of at most {owners.max(initial=0)}"
                )
            columns = Columns(len(owners), finals.columns.stores)
            columns.tree = _tree(notes["finals"], arrays, len(owners))
            finals.adopt(columns, owners)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{str(folder.path)!r} must have columns that match its notes: {error}") from error


def _tree(notes: Any, arrays: dict[str, npt.NDArray[Any]], slots: int) -> Tree:
    tree: Tree = {}
    for name, node in notes.items():
        if isinstance(node, dict):
            tree[name] = _tree(node, arrays, slots)
            continue
        path, torch_name = node
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

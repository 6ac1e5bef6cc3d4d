"""RowStore: storage of keyed rows with separately written columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import errors
from samplebatch.arguments import count_of
from samplebatch.batch.concat import join
from samplebatch.batch.flags import Flags
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import match_ragged
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.service.protocol import MAX_NAME_NBYTES

KEY: Final = "key"
"""Name of the column of keys in messages and results."""

MAX_COLUMNS: Final = 1024
"""Maximum number of columns per table; each column requires memory for every row."""

UNKNOWN: Final = np.iinfo(np.int64).min
"""Value of the version, length or group of a row whose column has not been written."""

_FIRST_ROOM: Final = 1024
_PORTION: Final = 4096
"""Maximum number of rows per fragment of a checkpoint."""
_FREE, _LEASED, _TAKEN = 0, 1, 2

Ints = npt.NDArray[np.int64]
Key = int | str


@dataclass(eq=False)
class _Block:
    """Columns of one write, stored while rows reference them."""

    columns: dict[str, Column]
    nbytes: int
    references: int


@dataclass(frozen=True)
class SelectionColumns:
    """Names of the columns by which `RowTable` selects rows, and names and element dtypes of the ragged columns.

    - `group`: column of integers or text, where equal values identify the rows of a group; None if the table has no
      groups.
    - `version`: integer column, the version of the weights that generated each row; None if rows have no version.
    - `length`: ragged column, or column of one token count per row; None if tokens are not counted.
    - `ragged`: element dtype of each column that is always stored as ragged; None to keep the dtype of the column.
    """

    group: str | None = None
    version: str | None = None
    length: str | None = None
    ragged: Mapping[str, np.dtype[Any] | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Write:
    """Validated columns and keys for `RowStore.write`."""

    keys: list[Any] | None
    columns: dict[str, Column]
    count: int
    nbytes: int


class RowStore:
    """Storage of keyed rows in insertion order; the caller must hold the store's lock for all methods except `prepare`.

    A write stores its columns as one block without copying. Each row stores, per column, a block number and a position
    within the block, so that columns of a row may originate from different writes.

    - `consumers`: names of the consumers; a row has one mark per consumer (free, leased or taken).
    - `selection_columns`: names of the columns for row selection.
    """

    def __init__(self, consumers: Sequence[str], selection_columns: SelectionColumns) -> None:
        self.selection_columns = selection_columns
        self.consumers = tuple(consumers)
        self.next_key = 0
        self._next_number = 0
        self._next_block = 0
        self.clear()

    def clear(self) -> None:
        """Remove all rows and columns; row numbers and assigned keys are not reused."""
        self._used = 0
        self._count = 0
        self._arrays: dict[Any, npt.NDArray[Any]] = {
            "number": np.zeros(0, np.int64),
            "alive": np.zeros(0, np.bool_),
            **{("mark", consumer): np.zeros(0, np.uint8) for consumer in self.consumers},
            **{role: np.zeros(0, np.int64) for role in ("group", "version", "length")},
        }
        self._empty: dict[Any, Any] = {"group": UNKNOWN, "version": UNKNOWN, "length": UNKNOWN}
        self._keys = np.zeros(0, object)
        self._numbers: dict[Any, int] = {}
        """Row number by key."""
        self._groups: dict[Any, int] = {}
        """Code of each text group."""
        self._blocks: dict[int, _Block] = {}
        self.forms: dict[str, tuple[Any, ...]] = {}
        """Kind, dtype and row shape of each column."""
        self.nbytes = 0

    def __len__(self) -> int:
        return self._count

    # Writing

    def prepare(self, keys: Any, columns: Mapping[str, Any]) -> Write:
        """Validate the keys and columns of a write; the lock is not required.

        Raises ArgumentError if there are no columns, a key is neither an integer nor text, or a key is repeated.
        Raises ColumnLengthError if a column's length differs from the number of keys. Raises ColumnTypeError if a
        column contains Python objects.
        """
        batch = columns if isinstance(columns, SampleBatch) else SampleBatch(dict(columns))
        data = dict(batch._all())
        if keys is not None and KEY in data:
            raise errors.ArgumentError(f"columns must not contain {KEY!r}, which is reserved for the keys")
        key_list = list_keys(keys if keys is not None else data.pop(KEY, None))
        if not data:
            raise errors.ArgumentError("columns must contain at least one column, got none")
        count = len(next(iter(data.values())) if key_list is None else key_list)
        for name, column in data.items():
            data[name] = column = check_column(name, column, count)
            if (name in self.selection_columns.ragged or name == self.selection_columns.length) and len(
                column.row_shape
            ):
                dtype = self.selection_columns.ragged.get(name) or column.dtype
                data[name] = match_ragged(column, dtype, len(column.row_shape), name)
        if key_list is not None and len(set(key_list)) < count:
            raise errors.ArgumentError(f"keys must be unique, got {count - len(set(key_list))} repeated of {count}")
        return Write(key_list, data, count, sum(column.nbytes for column in data.values()))

    def find(self, keys: Sequence[Any]) -> Ints:
        """Return row numbers by key, shape (n,); -1 for unknown keys."""
        return np.fromiter((self._numbers.get(key, -1) for key in keys), np.int64, len(keys))

    def new_rows(self, write: Write) -> int:
        """Count the rows that a write would create."""
        if write.keys is None:
            return write.count
        return write.count - sum(map(self._numbers.__contains__, write.keys))

    def write(self, write: Write, update: bool | None = None) -> Ints | list[str]:
        """Store a write and return the keys of its rows; a rejected write stores nothing.

        Raises ArgumentError if a row already has one of the columns, or a key exists and `update` is False. Raises
        RowIndexError if a key is unknown and `update` is True. Raises ColumnMismatchError if a column differs from
        earlier writes in kind, dtype or row shape. Raises CapacityError if the table would have more than `MAX_COLUMNS`
        columns.
        """
        columns = {name: self._match(name, column) for name, column in write.columns.items()}
        if (count := len(self.forms.keys() | columns.keys())) > MAX_COLUMNS:
            raise errors.CapacityError(f"a table of rows must have at most {MAX_COLUMNS} columns, got {count}")
        keys: Any = write.keys
        if keys is None:
            keys = range(self.next_key, self.next_key + write.count)
        numbers = self.find(keys)
        self._check_keys(keys, numbers, columns, update)
        values_by_role = self._read_selection_values(columns)
        is_new = numbers < 0
        num_added = int(is_new.sum())
        if num_added:
            numbers[is_new] = self._append(list(compress(keys, is_new.tolist())))
        positions = self._positions(numbers)
        for name in columns:
            self._add_column(name)
            self._arrays["block", name][positions] = self._next_block
            self._arrays["row", name][positions] = np.arange(write.count)
        for role, values in values_by_role.items():
            self._arrays[role][positions] = values
        nbytes = sum(column.nbytes for column in columns.values())
        self._blocks[self._next_block] = _Block(columns, nbytes, write.count * len(columns))
        self.nbytes += nbytes
        self._next_block += 1
        self.forms.update({name: form_of(column) for name, column in columns.items()})
        if write.keys is None:
            self.next_key += write.count
        return keys_array(keys)

    def _match(self, name: str, column: Column) -> Column:
        """Convert a column to the kind of the stored column, and validate its dtype and row shape."""
        stored = self.forms.get(name)
        if stored is None or form_of(column) == stored:
            return column
        if stored[0] == "ragged":
            column = match_ragged(column, np.dtype(stored[1]), len(stored[2]), name)
        if form_of(column) != stored:
            kind, dtype, shape = form_of(column)
            hint = ""
            if stored[0] in ("tensor", "torch") and len(stored[2]) == len(shape) > 0 and stored[1] == dtype:
                hint = f"; declare rows of varying shape at the table: ragged=[{name!r}]"
            raise errors.ColumnMismatchError(
                f"column {name!r} must be {stored[0]} of {stored[1]} with row shape {stored[2]}, as before, "
                f"got {kind} of {dtype} with {shape}{hint}"
            )
        return column

    def _check_keys(self, keys: Any, numbers: Ints, columns: Mapping[str, Column], update: bool | None) -> None:
        exists = numbers >= 0
        known_count = int(exists.sum())
        if self._numbers and isinstance(keys[0], str) != isinstance(next(iter(self._numbers)), str):
            raise errors.ArgumentError("keys of a table must be all integers or all text, got both")
        if update is True and known_count < len(numbers):
            raise unknown_keys(keys, exists)
        if update is False and known_count:
            raise errors.ArgumentError(
                f"keys must be new, got {known_count} of {len(numbers)} existing, first "
                f"{_first_selected(keys, exists)!r}"
            )
        if not known_count:
            return
        positions = self._positions(numbers[exists])
        for name in columns:
            written = self._has(name)[positions]
            if written.any():
                first = list(compress(keys, exists.tolist()))[int(written.argmax())]
                raise errors.ArgumentError(
                    f"column {name!r} must be written once per key, got {int(written.sum())} of {len(numbers)} keys "
                    f"with it, first {first!r}"
                )

    def _read_selection_values(self, columns: Mapping[str, Column]) -> dict[str, Ints]:
        """Return the group, the version and the length of each row of a write, by role.

        Raises ColumnTypeError if a column does not contain one group, version or length per row.
        """
        values_by_role: dict[str, Ints] = {}
        group, version, length = (
            self.selection_columns.group,
            self.selection_columns.version,
            self.selection_columns.length,
        )
        if version is not None and version in columns:
            values_by_role["version"] = _integers(columns[version], version)
        if length is not None and length in columns:
            column: Any = columns[length]
            is_ragged = column.kind in ("ragged", "ragged_torch")
            lengths = np.asarray(column.lengths) if is_ragged else _integers(column, length)
            if lengths.ndim != 1 or (lengths < 0).any():
                raise errors.ColumnTypeError(
                    f"column {length!r} must have one non-negative length per row, got shape {lengths.shape} with "
                    f"minimum {lengths.min(initial=0)}"
                )
            values_by_role["length"] = lengths.astype(np.int64)
        if group is not None and group in columns:
            column = columns[group]
            if column.kind == "text":
                self._drop_groups()
                codes = self._groups
                values = column.to_objects().tolist()
                values_by_role["group"] = np.fromiter(
                    (codes.setdefault(value, len(codes)) for value in values), np.int64, len(values)
                )
            else:
                values_by_role["group"] = _integers(column, group)
        return values_by_role

    def _drop_groups(self) -> None:
        """Discard the codes of text groups without rows if most codes are unused."""
        if len(self._groups) <= 2 * self._count + _FIRST_ROOM:
            return
        codes = self._arrays["group"][: self._used]
        is_used = np.zeros(max(self._groups.values()) + 1, np.bool_)
        is_used[codes[self._arrays["alive"][: self._used] & (codes != UNKNOWN)]] = True
        new = {code: rank for rank, code in enumerate(np.flatnonzero(is_used).tolist())}
        table = np.full(len(is_used), UNKNOWN)
        table[is_used] = np.arange(len(new))
        has_code = codes != UNKNOWN
        codes[has_code] = table[codes[has_code]]
        self._groups = {value: new[code] for value, code in self._groups.items() if code in new}

    def _append(self, keys: list[Any]) -> Ints:
        """Append rows without columns and return the row numbers."""
        count = len(keys)
        self._make_room(count)
        numbers = np.arange(self._next_number, self._next_number + count)
        rows = slice(self._used, self._used + count)
        for name, values in self._arrays.items():
            values[rows] = self._empty.get(name, 0)
        self._arrays["number"][rows] = numbers
        self._arrays["alive"][rows] = True
        objects = np.empty(count, object)
        objects[:] = keys
        self._keys[rows] = objects
        self._numbers.update(zip(keys, numbers.tolist(), strict=True))
        self._used += count
        self._count += count
        self._next_number += count
        return numbers

    def _make_room(self, count: int) -> None:
        """Reserve capacity for `count` rows: compact the arrays, or allocate larger arrays."""
        room = len(self._keys)
        if self._used + count <= room:
            return
        rows = np.flatnonzero(self._arrays["alive"][: self._used])
        if len(rows) + count > room // 2:
            room = max(2 * (len(rows) + count), _FIRST_ROOM)
        for name, values in [*self._arrays.items(), (None, self._keys)]:
            new = np.full(room, self._empty.get(name, 0), values.dtype) if name else np.empty(room, object)
            new[: len(rows)] = values[rows]
            if name is None:
                self._keys = new
            else:
                self._arrays[name] = new
        self._used = len(rows)

    def _add_column(self, name: str) -> None:
        if ("block", name) not in self._arrays:
            self._empty["block", name] = -1
            self._arrays["block", name] = np.full(len(self._keys), -1, np.int64)
            self._arrays["row", name] = np.zeros(len(self._keys), np.int32)

    # Queries

    def _positions(self, numbers: Ints) -> Ints:
        return np.searchsorted(self._arrays["number"][: self._used], numbers)

    def _has(self, name: str) -> npt.NDArray[np.bool_]:
        """Return a mask of the positions whose rows have a column."""
        blocks = self._arrays.get(("block", name))
        return np.zeros(self._used, np.bool_) if blocks is None else blocks[: self._used] >= 0

    def candidates(self, consumer: str | None = None) -> npt.NDArray[np.bool_]:
        """Return a mask of positions with rows; rows that `consumer` has taken or leased are excluded."""
        alive = self._arrays["alive"][: self._used]
        return alive.copy() if consumer is None else alive & (self._arrays["mark", consumer][: self._used] == _FREE)

    def complete(self, rows: npt.NDArray[np.bool_], columns: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Restrict a mask of positions to the rows that have all given columns."""
        for name in columns:
            rows = rows & self._has(name)
        return rows

    def selection_values(self, role: str) -> Ints:
        """Return the group, version or length at each position; UNKNOWN for rows without this column."""
        return self._arrays[role][: self._used]

    def lacking(self, rows: npt.NDArray[np.bool_], columns: Sequence[str]) -> dict[str, int]:
        """Count the masked rows that lack each column; columns that all rows have are omitted."""
        counts = {name: int((rows & ~self._has(name)).sum()) for name in columns}
        return {name: count for name, count in counts.items() if count}

    def mask_of(self, numbers: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask that selects the positions of rows."""
        mask = np.zeros(self._used, np.bool_)
        mask[self._positions(numbers)] = True
        return mask

    def numbers_at(self, positions: Ints) -> Ints:
        """Return the row numbers at positions."""
        numbers: Ints = self._arrays["number"][positions]
        return numbers

    def existing(self, numbers: Ints) -> Ints:
        """Return the numbers of the rows that still exist."""
        positions = self._positions(numbers)
        in_range = positions < self._used
        numbers, positions = numbers[in_range], positions[in_range]
        exists = (self._arrays["number"][positions] == numbers) & self._arrays["alive"][positions]
        existing: Ints = numbers[exists]
        return existing

    def keys_of(self, numbers: Ints) -> Ints | list[str]:
        """Return the keys of rows: an integer array, shape (n,), or a list of strings."""
        return keys_array(self._keys[self._positions(numbers)].tolist())

    def view(self, numbers: Ints, columns: Sequence[str]) -> Callable[[], SampleBatch[Any]]:
        """Return a function that gathers columns of rows and may be called without the lock."""
        positions = self._positions(numbers)
        keys = self._keys[positions].tolist()
        units: list[tuple[Ints, Any, list[str], dict[int, _Block]]] = []
        for name in columns:
            blocks, rows = self._arrays["block", name][positions], self._arrays["row", name][positions]
            for unit_blocks, unit_rows, names, _ in units:
                if np.array_equal(unit_blocks, blocks) and np.array_equal(unit_rows, rows):
                    names.append(name)
                    break
            else:
                block_map = {number: self._blocks[number] for number in np.unique(blocks).tolist()}
                units.append((blocks, rows, [name], block_map))

        def gather() -> SampleBatch[Any]:
            gathered: dict[str, Column] = {KEY: _key_column(keys)}
            for blocks, rows, names, block_map in units:
                gathered.update(_gather(blocks, rows, names, block_map))
            return SampleBatch._of({name: gathered[name] for name in (KEY, *columns)}, {}, Flags())

        return gather

    def nbytes_of(self, numbers: Ints, columns: Sequence[str]) -> int:
        """Estimate the size of some columns of rows in bytes from the mean row size in each block."""
        positions = self._positions(numbers)
        total = 8.0 * len(numbers)
        for name in columns:
            blocks, counts = np.unique(self._arrays["block", name][positions], return_counts=True)
            for number, count in zip(blocks.tolist(), counts.tolist(), strict=True):
                column = self._blocks[number].columns[name]
                total += column.nbytes * count / max(len(column), 1)
        return int(total)

    # Checkpoints

    def freeze(self) -> dict[str, Any]:
        """Return a snapshot: `fragments`, row `numbers`, consumers' `marks` and `next_key`.

        Entry `fragments` is an iterator that yields batches and gathers their columns without the lock. All rows of a
        fragment have the same columns. `numbers` and `marks` list the rows in the order of the fragments.
        """
        rows = np.flatnonzero(self._arrays["alive"][: self._used])
        names = sorted(self.forms)
        # Rows with equal codes have the same columns.
        codes = np.zeros(len(rows), np.int64)
        for name in names:
            codes = np.unique(codes * 2 + self._has(name)[rows], return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        bounds = np.flatnonzero(np.diff(codes[order], prepend=-1, append=-1)).tolist() if len(rows) else [0]
        views = []
        for start, stop in pairwise(bounds):
            columns = [name for name in names if self._has(name)[rows[order[start]]]]
            for first in range(start, stop, _PORTION):
                part = rows[order[first : min(first + _PORTION, stop)]]
                views.append(self.view(self.numbers_at(part), columns))
        ordered = rows[order]
        return {
            "fragments": (view() for view in views),
            "numbers": self.numbers_at(ordered).tolist(),
            "marks": {
                consumer: (self._arrays["mark", consumer][ordered] == _TAKEN).tolist() for consumer in self.consumers
            },
            "next_key": self.next_key,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the rows of a state into an empty store.

        Raises FormatError if keys, numbers and marks are inconsistent. Raises ColumnMismatchError if the store lacks a
        consumer of the state. Raises SampleBatchError in the same cases as `prepare` and `write`.
        """
        batches: list[Any] = list(state["fragments"])
        for batch in batches:
            if KEY not in batch.column_names:
                raise errors.FormatError(f"every fragment of rows must have a column {KEY!r}, got one without")
        writes = [self.prepare(None, batch) for batch in batches]
        keys = [key for write in writes for key in write.keys or []]
        numbers = np.array([count_of("a number", number) for number in state["numbers"]], np.int64)
        marks = state["marks"]
        sizes = {len(numbers), *map(len, marks.values()), len(keys)}
        if len(sizes) > 1 or len(set(keys)) < len(keys) or len(np.unique(numbers)) < len(numbers):
            raise errors.FormatError(
                f"rows must have a unique key, a unique number and one mark per consumer, got {len(keys)} keys and "
                f"{len(numbers)} numbers"
            )
        for consumer in marks:
            if consumer not in self.consumers:
                raise errors.ColumnMismatchError(f"consumers must include {consumer!r}, got {list(self.consumers)}")
        order = np.argsort(numbers)
        self._append([keys[position] for position in order.tolist()])
        for consumer, mark in marks.items():
            self._arrays["mark", consumer][: len(keys)] = np.where(np.array(mark, np.bool_)[order], _TAKEN, _FREE)
        for write in writes:
            self.write(write)
        self.next_key = count_of("next_key", state["next_key"])

    # Marks and removal

    def lease(self, consumer: str, numbers: Ints) -> None:
        """Mark rows as leased to a consumer until `commit` or `release` is called."""
        self._arrays["mark", consumer][self._positions(numbers)] = _LEASED

    def release(self, consumer: str, numbers: Ints) -> None:
        """Mark leased rows as free; removed rows are ignored."""
        self._arrays["mark", consumer][self._positions(self.existing(numbers))] = _FREE

    def commit(self, consumer: str, numbers: Ints) -> Ints | list[str]:
        """Mark leased rows as taken; remove the rows that all consumers have taken, and return their keys."""
        numbers = self.existing(numbers)
        positions = self._positions(numbers)
        self._arrays["mark", consumer][positions] = _TAKEN
        is_taken = np.ones(len(numbers), np.bool_)
        for other in self.consumers:
            is_taken &= self._arrays["mark", other][positions] == _TAKEN
        keys = self.keys_of(numbers[is_taken])
        self.remove(numbers[is_taken])
        return keys

    def oldest(self, count: int) -> Ints:
        """Return the numbers of the `count` oldest rows."""
        return self.numbers_at(np.flatnonzero(self._arrays["alive"][: self._used])[:count])

    def remove(self, numbers: Ints) -> None:
        """Remove existing rows, and free the blocks that no row references."""
        if not len(numbers):
            return
        positions = self._positions(numbers)
        self._arrays["alive"][positions] = False
        self._count -= len(numbers)
        deque(map(self._numbers.pop, self._keys[positions].tolist()), maxlen=0)
        self._keys[positions] = None
        for name in self.forms:
            used = self._arrays["block", name][positions]
            blocks, counts = np.unique(used[used >= 0], return_counts=True)
            for number, count in zip(blocks.tolist(), counts.tolist(), strict=True):
                block = self._blocks[number]
                block.references -= count
                if not block.references:
                    del self._blocks[number]
                    self.nbytes -= block.nbytes


def _gather(
    blocks: Ints, rows: npt.NDArray[np.int32], names: list[str], block_map: Mapping[int, _Block]
) -> dict[str, Column]:
    """Gather columns whose rows are stored at the same positions of the same blocks; the row order is retained."""
    order = None
    if (np.diff(blocks) < 0).any():
        order = np.argsort(blocks, kind="stable")
        blocks, rows = blocks[order], rows[order]
    starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
    parts = []
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        columns, indices = block_map[int(blocks[start])].columns, rows[start:stop].astype(np.intp)
        first, last = int(indices[0]), int(indices[-1])
        is_range = last - first == len(indices) - 1 and bool((np.diff(indices) == 1).all())
        parts.append(
            {name: columns[name].slice(first, last + 1) if is_range else columns[name].take(indices) for name in names}
        )
    if len(parts) > 1:
        parts = [dict(join([SampleBatch._of(part, {}, Flags()) for part in parts])._all())]
    gathered = parts[0]
    if order is None:
        return gathered
    inverse = np.empty(len(order), np.intp)
    inverse[order] = np.arange(len(order))
    return {name: column.take(inverse) for name, column in gathered.items()}


def form_of(column: Column) -> tuple[Any, ...]:
    """Return the kind, dtype and row shape that all writes of a column must have in common."""
    if isinstance(column, TextColumn):
        # The dtype of a text column depends on whether rows are missing.
        return column.kind, column.content, ()
    return column.kind, str(column.dtype), column.row_shape


def check_column(name: str, column: Column, count: int) -> Column:
    """Validate a column and return it; a column that contains only None is converted to text with missing rows.

    Raises ColumnLengthError if the column does not have `count` rows. Raises ColumnTypeError if the column contains
    Python objects. Raises CapacityError if the column's name has more than `MAX_NAME_NBYTES` bytes in UTF-8.
    """
    if isinstance(column, ObjectColumn) and len(column) and all(row is None for row in column.values.tolist()):
        column = TextColumn(pa.nulls(len(column), pa.large_string()))
    if column.kind == "object":
        raise errors.ColumnTypeError(f"column {name!r} must contain numbers, flags or text, got Python objects")
    if len(name.encode()) > MAX_NAME_NBYTES:
        raise errors.CapacityError(f"column names must have at most {MAX_NAME_NBYTES} bytes, got {len(name.encode())}")
    if len(column) != count:
        raise errors.ColumnLengthError(f"column {name!r} must have {count} rows, one per key, got {len(column)}")
    return column


def list_keys(keys: Any) -> list[Any] | None:
    """Validate keys and return them as a list of integers or strings; None is returned unchanged.

    Raises ArgumentError if the keys are neither text nor integers that are convertible to int64. Raises CapacityError
    if a text key has more than `MAX_NAME_NBYTES` characters.

    >>> list_keys(range(3)), list_keys(["a", "b"]), list_keys([0.5])
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: keys must be integers or text, got float64
    """
    if keys is None:
        return None
    if isinstance(keys, TextColumn):
        keys = keys.to_objects().tolist()
    elif isinstance(keys, Column):
        keys = keys.to_numpy()
    if isinstance(keys, str | bytes | int):
        raise errors.ArgumentError(f"keys must be a list of integers or text, got a {type(keys).__name__}")
    values = list(keys) if not isinstance(keys, np.ndarray) else keys
    if not len(values):
        return []
    is_text = values.dtype.kind in "UOT" if isinstance(values, np.ndarray) else isinstance(values[0], str)
    if is_text:
        texts = values if isinstance(values, list) else values.tolist()
        if not all(map(str.__instancecheck__, texts)):
            raise errors.ArgumentError("keys must be all integers or all text, got both")
        if max(map(len, texts)) > MAX_NAME_NBYTES:
            raise errors.CapacityError(
                f"keys must have at most {MAX_NAME_NBYTES} characters, got {max(map(len, texts))}"
            )
        return texts
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype == np.uint64:
        received = array.dtype if array.ndim == 1 else f"shape {array.shape}"
        raise errors.ArgumentError(f"keys must be integers or text, got {received}")
    key_list: list[Any] = array.tolist()
    return key_list


def keys_array(keys: Any) -> Ints | list[str]:
    """Return keys as an integer array, shape (n,), or as a list of strings."""
    key_list = list(keys)
    return key_list if key_list and isinstance(key_list[0], str) else np.array(key_list, np.int64)


def _key_column(keys: list[Any]) -> Column:
    text = TextColumn.from_rows(keys) if keys and isinstance(keys[0], str) else None
    return TensorColumn(np.array(keys, np.int64)) if text is None else text


def unknown_keys(keys: Any, exists: npt.NDArray[np.bool_]) -> errors.RowIndexError:
    """Create the error for keys that do not exist in a table."""
    count = int((~exists).sum())
    return errors.RowIndexError(
        f"keys must exist in the table, got {count} of {len(exists)} unknown, first {_first_selected(keys, ~exists)!r}"
    )


def _first_selected(keys: Any, mask: npt.NDArray[np.bool_]) -> Any:
    return list(keys)[int(mask.argmax())]


def _integers(column: Column, name: str) -> Ints:
    values = column.to_numpy() if column.kind in ("tensor", "torch") else np.zeros((0, 0))
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise errors.ColumnTypeError(
            f"column {name!r} must have one integer per row, got {column.kind} of {column.dtype}"
        )
    return values.astype(np.int64)

"""Decoding of validated messages to batches whose arrays are views of the messages' bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import describe_value
from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.frame import load_columns
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node, set_unit
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.memory import ALIGNMENT, MemoryBound
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import CapacityError, FormatError, SampleBatchError, UntrustedPickleError
from samplebatch.names import SEQ_LENS
from samplebatch.transport import wire
from samplebatch.transport.arena import GOODBYE_IDENT, Lease, LeaseRef, ReturnPipe
from samplebatch.transport.channel_end import HEADER_NBYTES
from samplebatch.transport.encode import AnyBatch
from samplebatch.transport.schema import (
    BARE,
    GRADIENT,
    NESTED_BATCH,
    SAMPLE_BATCH,
    SCALAR,
    Fixed,
    Part,
    Place,
    Plan,
    Schema,
    Variable,
    align,
)

DAMAGE = (
    SampleBatchError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    StopIteration,
)
"""Errors of Python, NumPy, torch and the library for an invalid message."""

Root = npt.NDArray[np.uint8]
"""The bytes of a block, which is held as long as there is an array over them."""

_TOO_MANY = (
    "column {!r} must have objects that are proportionate to the bytes of its message; send fewer rows at a time"
)
_ndarray = np.ndarray
_new = object.__new__

Cut = Callable[[int], Root]
"""Function that slices the next buffer of a given size in bytes."""


def decode(
    schema: Schema, plan: Plan, metadata: Mapping[str, Any], root: Root, cut: Cut, *, allow_pickle: bool = False
) -> AnyBatch:
    """Create a batch whose arrays view the bytes of a block.

    - `schema`: description of the columns.
    - `plan`: offsets of the columns.
    - `metadata`: metadata of the message.
    - `root`: block of at least `plan.nbytes` bytes.
    - `cut`: function that slices the buffers of variable columns in order.
    - `allow_pickle`: whether pickled columns may be unpickled.

    Raises UntrustedPickleError if a column is pickled and `allow_pickle` is false. Raises FormatError, or another error
    type in `DAMAGE`, if the arguments are inconsistent.
    """
    missing = [()] * len(schema.parts)
    all_entries, all_flags = metadata.get(wire.VARIABLE) or missing, metadata.get(wire.FLAGS, missing)
    bound = MemoryBound("the message", root.nbytes)
    batches = {}
    for part, places, entries, flags in zip(schema.parts, plan.parts, all_entries, all_flags, strict=True):
        variable = VariableColumns(entries, cut, bound, allow_pickle=allow_pickle)
        if schema.kind == NESTED_BATCH:
            tree = build_tree(part, places, root, variable)
            if part.flags.action_unit is not None:
                set_unit(tree, part.flags.action_unit)
            return tree
        part_flags = part.flags if flags == () else wire.flags_of(flags)
        batches[part.label] = _sample_batch(part, places, root, variable, part_flags)
    if schema.kind == SAMPLE_BATCH:
        return next(iter(batches.values()))
    return MultiAgentBatch._of(batches, wire.count_of(metadata[wire.ENV_STEPS]))


class VariableColumns:
    """Decoder for the variable columns of one batch in a message; columns must be decoded in order."""

    def __init__(self, entries: Iterable[Any], cut: Cut, bound: MemoryBound, *, allow_pickle: bool = False) -> None:
        self._entries = iter(entries)
        self._cut = cut
        self._bound = bound
        self._allow_pickle = allow_pickle

    def fixed(self, location: Place, root: Root) -> Column:
        """Create a fixed column as a view of a block, or a column of empty dicts.

        Raises the same errors as `decode`.
        """
        if location.column.form != BARE:
            return fixed_column(location, root)
        column = ObjectColumn.empty_dicts(location.shape[0])
        try:
            self._bound.take(column.nbytes, "")
        except CapacityError as error:
            raise CapacityError(_TOO_MANY.format(location.column.name)) from error
        return column

    def entry(self) -> Any:
        """Return the metadata entry of the next variable column.

        Raises the same errors as `decode`.
        """
        entry = next(self._entries, None)
        if entry is None:
            raise FormatError("a message must describe each variable column in its metadata, got fewer descriptions")
        return entry

    def column(self, name: str, entry: Any) -> Column:
        """Create a variable column from its metadata entry and its buffers.

        Raises the same errors as `decode`.
        """
        header, sizes = entry
        buffers = [self._cut(wire.count_of(nbytes)) for nbytes in sizes]
        if header[0] == ObjectColumn.kind:
            # Copied because objects may retain their source, which must not be the block.
            buffers = [buffer.copy() for buffer in buffers]
            try:
                ObjectColumn.check_dumped(header, buffers, name, self._bound)
            except CapacityError as error:
                raise CapacityError(_TOO_MANY.format(name)) from error
        try:
            return load_columns([(name, len(buffers), header)], buffers, allow_pickle=self._allow_pickle)[name]
        except UntrustedPickleError as error:
            raise UntrustedPickleError(
                f"column {name!r} holds pickled objects, which may execute code of the sender; create the channel "
                "with allow_pickle=True if you trust it"
            ) from error


def _sample_batch(part: Part, places: list[Place], root: Root, variable: VariableColumns, flags: Flags) -> SampleBatch:
    columns: dict[str, Column] = {}
    if part.has_variable:
        fixed = iter(places)
        for column in part.columns:
            if isinstance(column, Variable):
                columns[column.name] = variable.column(column.name, variable.entry())
            else:
                columns[column.name] = variable.fixed(next(fixed), root)
    else:
        for location in places:
            (name, dtype, _, torch, form), shape, offset = location
            if torch is None and form != BARE:
                columns[name] = tensor = _new(TensorColumn)
                tensor.values = _ndarray(shape, dtype, root, offset)
            else:
                columns[name] = variable.fixed(location, root)
    if SEQ_LENS in columns:
        # Copied before validation: the sender must not change the boundaries of sequences.
        columns[SEQ_LENS] = columns[SEQ_LENS].copy()
    return SampleBatch._of(columns, part.nested, flags)


def fixed_column(location: Place, root: Root) -> TensorColumn | TorchColumn:
    """Create a column whose values are views of bytes in a block."""
    column, shape, offset = location
    values: npt.NDArray[Any] = _ndarray(shape, column.dtype, root, offset)
    return TensorColumn(values) if column.torch is None else TorchColumn.from_bits(values, column.torch)


def build_tree(part: Part, places: list[Place], root: npt.NDArray[np.uint8], variable: VariableColumns) -> Batch:
    """Create a nested batch whose arrays view the bytes of a block.

    Raises the same errors as `decode`.
    """
    columns, fixed = iter(part.columns), iter(places)

    def leaf(path: str) -> Any:
        column = next(columns)
        if isinstance(column, Variable):
            return _variable_leaf(variable, path)
        return _fixed_leaf(column, next(fixed), root)

    batch = _build(part.structure, leaf, "")
    if next(columns, None) is not None:
        raise FormatError("a nested batch must have one name per value, got fewer names")
    return batch


def _build(structure: Any, leaf: Callable[[str], Any], prefix: str) -> Batch:
    values: dict[str, Any] = {}
    for name, under in structure:
        if not isinstance(name, str):
            raise FormatError(f"a nested batch must have strings as names, got a {type(name).__name__}")
        path = prefix + name
        values[name] = leaf(path) if under is None else _build(under, leaf, f"{path}.")
    return node(Batch, values)


def _fixed_leaf(column: Fixed, location: Place, root: npt.NDArray[np.uint8]) -> Any:
    values: npt.NDArray[Any] = _ndarray(location.shape, column.dtype, root, location.offset)
    if column.torch is not None:
        tensor = TorchColumn.from_bits(values, column.torch).values
        return tensor.requires_grad_() if GRADIENT in column.form else tensor
    return values[()] if SCALAR in column.form else values


def _variable_leaf(variable: VariableColumns, path: str) -> Any:
    what, *entry = variable.entry()
    if what == wire.VALUE:
        (value,) = entry
        if type(value) not in wire.PLAIN:
            raise FormatError(f"a message must have plain values in its metadata, got a {type(value).__name__}")
        return value
    shape, *described = entry
    column = variable.column(path, described)
    if what == wire.COLUMN:
        return column
    if what != wire.OBJECTS or not isinstance(column, ObjectColumn):
        raise FormatError(
            f"a message must describe each value as a plain value, a column or objects, got {describe_value(what)}"
        )
    if shape is None:
        (only,) = column.values.tolist()
        return only
    if prod(shape) != len(column):
        raise FormatError(f"an array of objects must have as many as its shape {shape} requires, got {len(column)}")
    return column.values.reshape(shape)


_MAX_SCHEMAS = 1 << 12
_BYTE: Final = np.dtype(np.uint8)
_UP: Final = ALIGNMENT - 1


class BlockColumns:
    """Columns of a received batch by name; each column is created from its offset in a block on first use.

    - `root`: bytes of the block.
    - `places`: offsets of the columns by name.
    """

    __slots__ = ("_places", "_root")

    def __init__(self, root: npt.NDArray[np.uint8], places: Mapping[str, Place]) -> None:
        self._root = root
        self._places = places

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, name: str) -> LazyColumn:
        return LazyColumn(self._root, self._places[name])

    @classmethod
    def batch(cls, root: npt.NDArray[np.uint8], places: Mapping[str, Place], rows: int, part: Part) -> SampleBatch:
        """Create a batch of arrays without sequences; the batch's columns are created on first use."""
        batch = _new(SampleBatch)
        batch._columns = {}
        batch.count = rows
        batch._window = (cast("dict[str, Column]", cls(root, places)), 0, rows, 0, 0)
        if part.nested:
            batch._nested = part.nested
        if part.flags is not DEFAULT:
            batch._flags = part.flags
        return batch


class LazyColumn:
    """Column in a block; each selection of rows creates a `TensorColumn` that views the block."""

    __slots__ = ("_location", "_root")

    def __init__(self, root: npt.NDArray[np.uint8], location: Place) -> None:
        self._root = root
        self._location = location

    def slice(self, start: int, stop: int) -> TensorColumn:
        """Create a column of the rows from `start` to `stop`."""
        (_, dtype, row_shape, _, _), _, offset = self._location
        if start:
            offset += start * prod(row_shape) * dtype.itemsize
        column = _new(TensorColumn)
        column.values = _ndarray((stop - start, *row_shape), dtype, self._root, offset)
        return column


class Decoder:
    """Decoder of channel messages, used by the consumer.

    - `memory`: region of the channel.
    - `returns`: pipe through which blocks are returned.
    - `allow_pickle`: whether pickled columns may be unpickled.

    Its attributes:
    - `ident`: number of the newest message whose block was leased; 0 before the first lease.
    - `unfinished`: lease of the message that is being decoded, until the caller has received the batch. After an
      interrupt, the message is decoded again with the lease in `unfinished`.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], returns: ReturnPipe, *, allow_pickle: bool = False) -> None:
        self._memory = memory
        self._lent, self._on_deleted = returns.lent, returns.on_deleted
        self._allow_pickle = allow_pickle
        self._schemas: dict[int, Schema] = {}
        self.ident = 0
        self.unfinished: Lease | None = None

    def open(self, fields: tuple[Any, ...]) -> AnyBatch:
        """Lease the block of a message, and create a batch whose arrays are views of the block.

        The caller sets `unfinished` to None after it has received the batch.

        - `fields`: result of `unpack_fields` for a message of kind `BATCH` with a valid checksum.

        Raises FormatError if the message is invalid. Raises UntrustedPickleError if a column is pickled and
        `allow_pickle` is false.
        """
        _, version, _, flags, number, ident, start, nbytes, _, metadata_nbytes, _, rows, _ = fields
        memory = self._memory
        try:
            if version != wire.VERSION:
                raise FormatError(
                    f"a message must have version {wire.VERSION}, got {version}; both ends must use the same release"
                )
            if start & _UP or start < HEADER_NBYTES or start + nbytes > memory.nbytes:
                raise FormatError(
                    f"a message's block must be within {memory.nbytes} bytes of memory, got {nbytes} bytes at {start}"
                )
            lease = self.unfinished
            if lease is None:
                if not self.ident < ident < GOODBYE_IDENT:
                    raise FormatError(f"a message must have a number greater than {self.ident}, got {ident}")
                lease = Lease((nbytes,), _BYTE, memory, start)
                reference = LeaseRef(lease, self._on_deleted)
                # No call between these statements, so no signal handler can run: the block is leased completely or not.
                reference.ident = ident
                self._lent[ident] = reference
                self.ident = ident
                self.unfinished = lease
            if metadata_nbytes:
                batch = self._open_with_metadata(fields, lease)
            else:
                schema = self._schemas.get(number)
                if schema is None or flags:
                    raise FormatError(f"a message must have a known schema, got schema number {number}")
                plan = schema.simple_plan(rows)
                if plan.nbytes > nbytes:
                    raise FormatError(f"a message's columns must fit in its {nbytes} bytes, got {plan.nbytes} bytes")
                if plan.by_name is not None:
                    batch = BlockColumns.batch(lease, plan.by_name, rows, schema.parts[0])
                else:
                    batch = decode(schema, plan, {}, lease, _no_buffers, allow_pickle=self._allow_pickle)
        except (FormatError, UntrustedPickleError):
            raise
        except DAMAGE as error:
            raise FormatError(f"a message must match its schema: {error}") from error
        return batch

    def _open_with_metadata(self, fields: tuple[Any, ...], lease: Lease) -> AnyBatch:
        _, _, _, flags, number, _, start, nbytes, metadata_start, metadata_nbytes, metadata_sum, rows, _ = fields
        memory = self._memory
        if metadata_start & _UP or metadata_start < HEADER_NBYTES or metadata_start + metadata_nbytes > memory.nbytes:
            raise FormatError(
                f"a message's metadata must be in the arena, got {metadata_nbytes} bytes at {metadata_start}"
            )
        metadata = wire.unpack_metadata(
            memory[metadata_start : metadata_start + metadata_nbytes].tobytes(), metadata_sum
        )
        if flags & wire.DEFINES:
            if number >= _MAX_SCHEMAS:
                raise FormatError(f"a schema must have a number below {_MAX_SCHEMAS}, got {number}")
            self._schemas[number] = Schema.read(metadata.get(wire.SCHEMA))
        schema = self._schemas.get(number)
        if schema is None:
            raise FormatError(f"a message must have a known schema, got schema number {number}")
        rows_used = wire.read_rows(metadata[wire.ROWS]) if wire.ROWS in metadata else (rows,)
        plan = schema.plan(wire.read_rows(metadata[wire.ROOMS]) if wire.ROOMS in metadata else rows_used, rows_used)
        if plan.nbytes > nbytes:
            raise FormatError(f"a message's columns must fit in its {nbytes} bytes, got {plan.nbytes} bytes")
        cut: Cut = _no_buffers
        if wire.VARIABLE in metadata:
            cut = _Cut(lease, memory, start, nbytes, metadata_start + align(metadata_nbytes)).cut
        return decode(schema, plan, metadata, lease, cut, allow_pickle=self._allow_pickle)


class _Cut:
    """Reader that slices the consecutive buffers of variable columns; each buffer starts at an aligned offset.

    The buffers follow the metadata, in the message's first or second block.
    """

    def __init__(self, lease: Lease, memory: npt.NDArray[np.uint8], start: int, nbytes: int, at: int) -> None:
        if start <= at <= start + nbytes:
            self._root, self._at = lease, at - start
            return
        self._root, self._at = Lease((memory.nbytes - at,), _BYTE, memory, at), 0
        self._root.first = lease

    def cut(self, nbytes: int) -> npt.NDArray[np.uint8]:
        cut: npt.NDArray[np.uint8] = np.ndarray((nbytes,), _BYTE, self._root, self._at)
        self._at += align(nbytes)
        return cut


def _no_buffers(nbytes: int) -> npt.NDArray[np.uint8]:
    raise FormatError(f"a message with a buffer of {nbytes} bytes must describe its variable columns in its metadata")

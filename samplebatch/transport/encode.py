"""Encoding of batches as a schema, arrays at offsets that the schema determines, and metadata.

Only Python objects without an Arrow type are pickled, and only if the channel allows pickles.

The leaves of a nested batch are encoded in depth-first order. A leaf that is an array or tensor is a fixed column, even
without an axis of rows. All leaves other than arrays and tensors are variable columns: the metadata contains plain
values, and `ObjectColumn` encodes columns and arrays of objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.flags import DEFAULT, flags_of_unit
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, TENSOR, Node, unit_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column, Header
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn, has_bytes
from samplebatch.errors import ColumnTypeError, DeviceError, SampleBatchError, UntrustedPickleError
from samplebatch.transport import wire
from samplebatch.transport.schema import (
    BARE,
    GRADIENT,
    MULTI_AGENT_BATCH,
    NESTED_BATCH,
    SAMPLE_BATCH,
    SCALAR,
    WHOLE,
    Fixed,
    Part,
    Rows,
    Schema,
    Variable,
    freeze,
)

AnyBatch = SampleBatch | MultiAgentBatch | Batch
"""Kinds of batches that a channel accepts."""

_MAX_SCHEMAS = 1024
_FIXED_KINDS = "biufcSUmM"
_ndarray = np.ndarray
_BARE_KEY = (np.dtype(np.uint8), (0,), None, BARE)
"""Key of a column of empty dicts, after its name."""


class Frame:
    """Encoded batch before its arrays are copied.

    - `schema`: description of the columns.
    - `rows`: number of rows of each part.
    - `arrays`: values of the fixed columns, in order over all parts.
    - `metadata`: JSON-serializable values that neither the schema nor `rows` contains; may be empty.
    - `buffers`: buffers of the variable columns.
    """

    __slots__ = ("arrays", "buffers", "metadata", "rows", "schema")

    def __init__(
        self,
        schema: Schema,
        rows: Rows,
        arrays: list[npt.NDArray[Any]],
        metadata: dict[str, Any],
        buffers: list[npt.NDArray[np.uint8]],
    ) -> None:
        self.schema = schema
        self.rows = rows
        self.arrays = arrays
        self.metadata = metadata
        self.buffers = buffers


class PartEncoder:
    """Encoder for the columns of one batch in a message."""

    __slots__ = ("allow_pickle", "arrays", "buffers", "counts", "key", "variable")

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self.allow_pickle = allow_pickle
        self.key: list[tuple[Any, ...]] = []
        self.arrays: list[npt.NDArray[Any]] = []
        self.counts: list[int] = []
        self.variable: list[Any] = []
        self.buffers: list[npt.NDArray[np.uint8]] = []

    @property
    def rows(self) -> Any:
        """Number of rows, if all columns with a row axis have the same number; otherwise one number per such column."""
        counts = self.counts
        if not counts:
            return 0
        return counts[0] if counts.count(counts[0]) == len(counts) else tuple(counts)

    def add(self, name: str, column: Column) -> None:
        """Encode a column; raises UntrustedPickleError, ColumnTypeError and DeviceError as `Producer.send` does."""
        if isinstance(column, TensorColumn):
            values = column.values
            self.key.append((name, values.dtype, values.shape[1:], None, ""))
        elif isinstance(column, TorchColumn):
            (_, dtype_name, shape), (values,) = column.dump()
            self.key.append((name, values.dtype, tuple(shape[1:]), dtype_name, ""))
        elif isinstance(column, ObjectColumn) and column.is_bare:
            values = _no_bytes(len(column))
            self.key.append((name, *_BARE_KEY))
        else:
            self.key.append((name,))
            self.variable.append(self.dump(name, column))
            return
        self.arrays.append(values)
        self.counts.append(len(values))

    def dump(self, name: str, column: Column) -> list[Any]:
        """Encode a variable column as a header and buffer sizes, and store the buffers for a later copy.

        Raises UntrustedPickleError if the column must be pickled and pickles are not allowed. Raises ColumnTypeError if
        an object cannot be pickled.
        """
        try:
            header, buffers = column.dump()
        except ColumnTypeError as error:
            raise ColumnTypeError(f"column {name!r} cannot be sent: {error}") from error
        if not self.allow_pickle and is_pickled(header):
            raise UntrustedPickleError(
                f"column {name!r} contains objects that must be pickled to be sent; use numbers, strings, lists and "
                "dicts of one structure, drop the column, or create the channel with allow_pickle=True"
            )
        flat = [bytes_of(buffer) for buffer in buffers]
        self.buffers += flat
        return [header, [buffer.nbytes for buffer in flat]]


def _no_bytes(rows: int) -> npt.NDArray[np.uint8]:
    """Return the array that represents a column of empty dicts."""
    return np.empty((rows, 0), np.uint8)


def is_pickled(header: Header) -> bool:
    """Return whether a column's header specifies that the rows are pickles."""
    return bool(header[0] == ObjectColumn.kind and json.loads(header[2])["kind"] == "pickle")


def bytes_of(buffer: Any) -> npt.NDArray[np.uint8]:
    """View the bytes of a buffer, shape (nbytes,)."""
    if isinstance(buffer, _ndarray):
        return buffer.reshape(-1).view(np.uint8) if buffer.nbytes else np.empty(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)


class Encoder:
    """Encoder of batches, with a cache for the schemas of encoded batches."""

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._schemas: dict[Any, Schema] = {}
        self._recent: tuple[Schema | None, list[tuple[Any, ...]]] = (None, [])
        self.next_number = 0
        """Number of the next schema for the consumer."""

    def encode(self, batch: AnyBatch) -> Frame:
        """Encode a batch.

        Raises ColumnTypeError if `batch` is not a batch, or contains a value that cannot be sent. Raises
        UntrustedPickleError if a column must be pickled and pickles are not allowed. Raises DeviceError if a column is
        not in host memory.
        """
        if isinstance(batch, SampleBatch):
            columns = batch._all()
            plain = self._plain(batch, columns)
            return self._of_sample_batch(batch, columns) if plain is None else plain
        if isinstance(batch, MultiAgentBatch):
            return self._of_multi_agent(batch)
        if isinstance(batch, Batch):
            part = PartEncoder(allow_pickle=self._allow_pickle)
            structure = encode_tree(batch, part)
            schema = self.intern(NESTED_BATCH, (("", tuple(part.key), structure, unit_of(batch)),))
            metadata: dict[str, Any] = {wire.VARIABLE: [part.variable]} if part.variable else {}
            return Frame(schema, (part.rows,), part.arrays, metadata, part.buffers)
        raise ColumnTypeError(
            f"a channel sends SampleBatch, MultiAgentBatch and Batch, got a {type(batch).__name__}; convert it first"
        )

    def _plain(self, batch: SampleBatch, columns: dict[str, Column]) -> Frame | None:
        """Encode a batch that consists only of arrays of equal length; return None for any other batch."""
        if batch._nested or batch._has_sequences or not batch.count:
            return None
        flags = batch._flags
        if flags is not DEFAULT and flags is not flags_of_unit(flags.action_unit):
            return None
        schema, checks = self._recent
        if schema is not None and len(columns) == len(checks) and flags is schema.parts[0].flags:
            # The same columns as in the last batch need no lookup.
            arrays = []
            for (name, column), (recent_name, dtype, row_shape) in zip(columns.items(), checks, strict=True):
                if name != recent_name:
                    break
                if type(column) is not TensorColumn:
                    if dtype is not None or type(column) is not ObjectColumn or not column.is_bare:
                        break
                    arrays.append(_no_bytes(len(column)))
                    continue
                values = column.values
                if values.dtype is not dtype or values.shape[1:] != row_shape:
                    break
                arrays.append(values)
            else:
                return Frame(schema, (batch.count,), arrays, {}, [])
        key: list[tuple[Any, ...]] = []
        arrays = []
        for name, column in columns.items():
            if type(column) is ObjectColumn and column.is_bare:
                arrays.append(_no_bytes(len(column)))
                key.append((name, *_BARE_KEY))
                continue
            if type(column) is not TensorColumn:
                return None
            values = column.values
            arrays.append(values)
            key.append((name, values.dtype, values.shape[1:], None, ""))
        schema = self.intern(SAMPLE_BATCH, (("", tuple(key), "", flags.action_unit),))
        self._recent = (
            schema,
            [(column_key[0], None, ()) if column_key[4] == BARE else column_key[:3] for column_key in key],
        )
        return Frame(schema, (batch.count,), arrays, {}, [])

    def _of_sample_batch(self, batch: SampleBatch, columns: Mapping[str, Column]) -> Frame:
        part = self._encode_part(columns)
        flags, unit = batch._flags, batch._flags.action_unit
        schema = self.intern(SAMPLE_BATCH, (("", tuple(part.key), freeze(batch._nested), unit),))
        metadata: dict[str, Any] = {} if flags == flags_of_unit(unit) else {wire.FLAGS: [wire.plain_flags(flags)]}
        if part.variable:
            metadata[wire.VARIABLE] = [part.variable]
        return Frame(schema, (part.rows,), part.arrays, metadata, part.buffers)

    def _of_multi_agent(self, batch: MultiAgentBatch) -> Frame:
        parts, rows, flags, variable = [], [], [], []
        arrays: list[npt.NDArray[Any]] = []
        buffers: list[npt.NDArray[np.uint8]] = []
        for policy_id, steps in batch.policy_batches.items():
            part = self._encode_part(steps._all())
            parts.append((policy_id, tuple(part.key), freeze(steps._nested), steps._flags.action_unit))
            rows.append(part.rows)
            flags.append(steps._flags)
            variable.append(part.variable)
            arrays += part.arrays
            buffers += part.buffers
        metadata: dict[str, Any] = {wire.ENV_STEPS: int(batch.count)}
        if any(part_flags != flags_of_unit(part_flags.action_unit) for part_flags in flags):
            metadata[wire.FLAGS] = [*map(wire.plain_flags, flags)]
        if any(variable):
            metadata[wire.VARIABLE] = variable
        return Frame(self.intern(MULTI_AGENT_BATCH, tuple(parts)), tuple(rows), arrays, metadata, buffers)

    def _encode_part(self, columns: Mapping[str, Column]) -> PartEncoder:
        part = PartEncoder(allow_pickle=self._allow_pickle)
        for name, column in columns.items():
            part.add(name, column)
        return part

    def intern(self, kind: str, parts: Any) -> Schema:
        """Find or create the schema of parts; each part is a tuple of label, columns, structure and action unit."""
        key = (kind, parts)
        schema = self._schemas.get(key)
        if schema is None:
            if len(self._schemas) >= _MAX_SCHEMAS:
                # Numbers restart at 0: a message with a new schema replaces the previous schema of that number.
                for old in self._schemas.values():
                    old.number = None
                self.next_number = 0
                self._recent = (None, [])
                self._schemas.clear()
            schema = Schema(
                kind, [Part.of(label, tuple(map(_column, columns)), *details) for label, columns, *details in parts]
            )
            self._schemas[key] = schema
        return schema

    def close(self) -> None:
        """Release cached references to the memory to which batches were copied."""
        for schema in self._schemas.values():
            schema.forget_targets()

    def mark_known(self, schema: Schema) -> None:
        """Assign the next free number to a schema that has been sent to the consumer."""
        schema.number = self.next_number
        self.next_number += 1


def _column(key: tuple[Any, ...]) -> Fixed | Variable:
    return Variable(*key) if len(key) == 1 else Fixed(*key)


def encode_tree(source: Node, part: PartEncoder, prefix: str = "") -> tuple[Any, ...]:
    """Encode a tree and return its structure: None for a leaf, otherwise (name, structure) pairs.

    Raises ColumnTypeError if a leaf cannot be sent. Raises UntrustedPickleError if a leaf must be pickled and pickles
    are not allowed. Raises DeviceError if a tensor is not in host memory.
    """
    structure: list[tuple[str, Any]] = []
    for name, value in source.__dict__.items():
        kind = KINDS[type(value)]
        if kind == NODE:
            structure.append((name, encode_tree(value, part, f"{prefix}{name}.")))
            continue
        if type(value) is _ndarray and value.dtype.kind in _FIXED_KINDS:
            _add_array(value, part, "")
        elif kind == TENSOR:
            _add_tensor(value, part, prefix + name)
        elif isinstance(value, np.generic) and value.dtype.kind in _FIXED_KINDS and not isinstance(value, (str, bytes)):
            _add_array(np.asarray(value), part, SCALAR)
        else:
            part.key.append(("",))
            part.variable.append(_dump_variable_leaf(value, part, prefix + name))
        structure.append((name, None))
    return tuple(structure)


def _add_array(values: npt.NDArray[Any], part: PartEncoder, form: str, torch: str | None = None) -> None:
    part.arrays.append(values)
    if values.ndim:
        part.counts.append(len(values))
    elif form != SCALAR:
        form = WHOLE + form
    part.key.append(("", values.dtype.newbyteorder("="), values.shape[1:], torch, form))


def _add_tensor(tensor: Any, part: PartEncoder, path: str) -> None:
    import torch

    if tensor.device.type != "cpu":
        raise DeviceError(f"column {path!r} must be in host memory to be sent, got a tensor on {tensor.device}")
    if tensor.grad_fn is not None:
        raise ColumnTypeError(f"column {path!r} must not require gradients of a computation to be sent; detach() it")
    if not has_bytes(tensor.dtype):
        raise ColumnTypeError(
            f"column {path!r} must have a dtype with a byte representation to be sent, got {tensor.dtype}"
        )
    if tensor.layout is not torch.strided:
        raise ColumnTypeError(f"column {path!r} must be a dense tensor to be sent, got one of layout {tensor.layout}")
    dense = tensor.detach().contiguous().resolve_conj().resolve_neg()
    (_, dtype_name, _), (values,) = TorchColumn(dense).dump()
    _add_array(values, part, GRADIENT if tensor.requires_grad else "", dtype_name)


def _dump_variable_leaf(value: Any, part: PartEncoder, path: str) -> list[Any]:
    if type(value) in wire.PLAIN:
        return [wire.VALUE, value]
    if isinstance(value, Column):
        return [wire.COLUMN, None, *part.dump(path, value)]
    if type(value) is _ndarray and value.dtype.kind in "OT":
        column = ObjectColumn(value.reshape(-1).astype(object, copy=False))
        return [wire.OBJECTS, value.shape, *part.dump(path, column)]
    return [wire.OBJECTS, None, *part.dump(path, ObjectColumn(_alone(value)))]


def _alone(value: Any) -> npt.NDArray[Any]:
    row = np.empty(1, object)
    row[0] = value
    return row


def halve(batch: AnyBatch) -> Sequence[AnyBatch]:
    """Return views of the first and the second half of a batch, or an empty list if the batch cannot be split.

    Sequences are not cut. A `MultiAgentBatch` is split between environment steps, which requires the columns `eps_id`
    and `t`.

    >>> [part["a"].tolist() for part in halve(SampleBatch(a=[1, 2, 3]))]
    [[1], [2, 3]]
    >>> halve(SampleBatch(a=[1]))
    []
    """
    parts: Sequence[AnyBatch]
    try:
        if isinstance(batch, Batch):
            rows = len(batch)
            parts = [batch[: rows // 2], batch[rows // 2 :]] if rows > 1 else []
        elif isinstance(batch, MultiAgentBatch):
            parts = batch.timeslices(max(1, (len(batch) + 1) // 2))
        else:
            parts = _of_rows(batch)
    except (SampleBatchError, TypeError):
        return []
    return parts if len(parts) > 1 else []


def _of_rows(batch: SampleBatch) -> list[SampleBatch]:
    if not batch._has_sequences:
        return [batch[: len(batch) // 2], batch[len(batch) // 2 :]] if len(batch) > 1 else []
    lengths = batch._lengths()
    if len(lengths) < 2:
        return []
    # Split at the sequence boundary nearest to the middle, because slices start at sequence boundaries.
    ends = lengths.cumsum()
    middle = min(len(ends) - 2, int(ends.searchsorted(batch.count / 2)))
    cut = int(ends[middle])
    return [batch[:cut], batch[cut:]] if 0 < cut < batch.count else []

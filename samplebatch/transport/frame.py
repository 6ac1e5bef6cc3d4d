"""Frame: a batch as what a channel carries, a schema, arrays that go to places that it determines, and a note.

Nothing is pickled but Python objects that Arrow cannot hold, and those only if the channel allows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.flags import DEFAULT
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column, Header
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import ColumnTypeError, UntrustedPickleError
from samplebatch.transport import tree_frame
from samplebatch.transport.note import ENV_STEPS, FLAGS, LOOSE, plain_flags
from samplebatch.transport.schema import (
    MULTI_AGENT_BATCH,
    NESTED_BATCH,
    SAMPLE_BATCH,
    Fixed,
    Loose,
    Part,
    Rows,
    Schema,
    frozen,
)

AnyBatch = SampleBatch | MultiAgentBatch | Batch
"""What a channel carries."""

_MOST_SCHEMAS = 1024
_ndarray = np.ndarray


class Frame:
    """A batch taken apart, nothing of it copied yet.

    Attributes
    ----------
    schema
        What its columns are.
    rows
        Rows of each part.
    arrays
        The values of its fixed columns, in order over all parts.
    note
        What the schema and the rows do not say, as JSON can hold it; empty if that is nothing.
    buffers
        The buffers of its loose columns.
    """

    __slots__ = ("arrays", "buffers", "note", "rows", "schema")

    def __init__(
        self,
        schema: Schema,
        rows: Rows,
        arrays: list[npt.NDArray[Any]],
        note: dict[str, Any],
        buffers: list[npt.NDArray[np.uint8]],
    ) -> None:
        self.schema = schema
        self.rows = rows
        self.arrays = arrays
        self.note = note
        self.buffers = buffers


class Taken:
    """The columns of one part, taken apart one after the other."""

    __slots__ = ("allow_pickle", "arrays", "buffers", "counts", "key", "loose")

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self.allow_pickle = allow_pickle
        self.key: list[tuple[Any, ...]] = []
        self.arrays: list[npt.NDArray[Any]] = []
        self.counts: list[int] = []
        self.loose: list[Any] = []
        self.buffers: list[npt.NDArray[np.uint8]] = []

    @property
    def rows(self) -> Any:
        """The number of rows that all counted columns have, or that of each."""
        counts = self.counts
        if not counts:
            return 0
        return counts[0] if counts.count(counts[0]) == len(counts) else tuple(counts)

    def add(self, name: str, column: Column) -> None:
        """Take a column apart; raises as `samplebatch.transport.producer.Producer.send` does."""
        if isinstance(column, TensorColumn):
            values = column.values
            self.key.append((name, values.dtype, values.shape[1:], None, ""))
        elif isinstance(column, TorchColumn):
            (_, dtype_name, shape), (values,) = column.dump()
            self.key.append((name, values.dtype, tuple(shape[1:]), dtype_name, ""))
        else:
            self.key.append((name,))
            self.loose.append(self.dump(name, column))
            return
        self.arrays.append(values)
        self.counts.append(len(values))

    def dump(self, name: str, column: Column) -> list[Any]:
        """Take a loose column apart into a header and the sizes of its buffers, which are kept.

        Raises
        ------
        UntrustedPickleError
            If it has to be pickled and that is not allowed; names the column.
        ColumnTypeError
            If one of its objects cannot be; names the column.
        """
        try:
            header, buffers = column.dump()
        except ColumnTypeError as error:
            raise ColumnTypeError(f"column {name!r} cannot be sent: {error}") from error
        if not self.allow_pickle and is_pickled(header):
            raise UntrustedPickleError(
                f"column {name!r} holds objects that must be pickled to be sent; give it numbers, strings, lists and "
                "dicts of one form, drop it, or make the channel with allow_pickle=True"
            )
        flat = [bytes_of(buffer) for buffer in buffers]
        self.buffers += flat
        return [header, [buffer.nbytes for buffer in flat]]


def is_pickled(header: Header) -> bool:
    """Tell whether the header of a column says that its rows are pickles."""
    return bool(header[0] == ObjectColumn.kind and json.loads(header[2])["kind"] == "pickle")


def bytes_of(buffer: Any) -> npt.NDArray[np.uint8]:
    """View the bytes of a buffer, shape (nbytes,)."""
    if isinstance(buffer, _ndarray):
        return buffer.reshape(-1).view(np.uint8) if buffer.nbytes else np.empty(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)


class Encoder:
    """Takes batches apart, and remembers their schemas."""

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._schemas: dict[Any, Schema] = {}
        self._recent: tuple[Schema | None, list[tuple[Any, ...]]] = (None, [])
        self.next_number = 0
        """The number that the next schema to be told the consumer gets."""

    def encode(self, batch: AnyBatch) -> Frame:
        """Take a batch apart.

        Raises
        ------
        ColumnTypeError
            If it is no batch, or has a value that cannot be sent; names it.
        UntrustedPickleError
            If a column has to be pickled and that is not allowed; names it.
        DeviceError
            If a column is not in host memory.
        """
        if isinstance(batch, SampleBatch):
            columns = batch._all()
            plain = self._plain(batch, columns)
            return self._of_sample_batch(batch, columns) if plain is None else plain
        if isinstance(batch, MultiAgentBatch):
            return self._of_multi_agent(batch)
        if isinstance(batch, Batch):
            taken = Taken(allow_pickle=self._allow_pickle)
            structure = tree_frame.take(batch, taken)
            schema = self.intern(NESTED_BATCH, (("", tuple(taken.key), structure),))
            note = {LOOSE: [taken.loose]} if taken.loose else {}
            return Frame(schema, (taken.rows,), taken.arrays, note, taken.buffers)
        raise ColumnTypeError(
            f"a channel carries SampleBatch, MultiAgentBatch and Batch, got a {type(batch).__name__}; make one of it"
        )

    def _plain(self, batch: SampleBatch, columns: dict[str, Column]) -> Frame | None:
        """Take a batch apart that has nothing but arrays of as many rows; None if it has more."""
        if batch._nested or batch._flags is not DEFAULT or batch._has_sequences:
            return None
        schema, checks = self._recent
        if schema is not None and len(columns) == len(checks):
            # The same columns as last time: nothing is looked up.
            arrays = []
            for (name, column), (own, dtype, row_shape) in zip(columns.items(), checks, strict=True):
                if name != own or type(column) is not TensorColumn:
                    break
                values = column.values
                if values.dtype is not dtype or values.shape[1:] != row_shape:
                    break
                arrays.append(values)
            else:
                return Frame(schema, (batch.count,), arrays, {}, [])
        key = []
        arrays = []
        for name, column in columns.items():
            if type(column) is not TensorColumn:
                return None
            values = column.values
            arrays.append(values)
            key.append((name, values.dtype, values.shape[1:], None, ""))
        schema = self.intern(SAMPLE_BATCH, (("", tuple(key), ""),))
        self._recent = schema, [own[:3] for own in key]
        return Frame(schema, (batch.count,), arrays, {}, [])

    def _of_sample_batch(self, batch: SampleBatch, columns: Mapping[str, Column]) -> Frame:
        taken = self._take(columns)
        schema = self.intern(SAMPLE_BATCH, (("", tuple(taken.key), frozen(batch._nested)),))
        note: dict[str, Any] = {}
        if batch._flags != DEFAULT:
            note[FLAGS] = [plain_flags(batch._flags)]
        if taken.loose:
            note[LOOSE] = [taken.loose]
        return Frame(schema, (taken.rows,), taken.arrays, note, taken.buffers)

    def _of_multi_agent(self, batch: MultiAgentBatch) -> Frame:
        parts = [(policy, own, self._take(own._all())) for policy, own in batch.policy_batches.items()]
        schema = self.intern(
            MULTI_AGENT_BATCH,
            tuple([(policy, tuple(taken.key), frozen(own._nested)) for policy, own, taken in parts]),
        )
        note: dict[str, Any] = {ENV_STEPS: int(batch.count)}
        if any(own._flags != DEFAULT for _, own, _ in parts):
            note[FLAGS] = [plain_flags(own._flags) for _, own, _ in parts]
        if any(taken.loose for _, _, taken in parts):
            note[LOOSE] = [taken.loose for _, _, taken in parts]
        return Frame(
            schema,
            tuple([taken.rows for _, _, taken in parts]),
            [array for _, _, taken in parts for array in taken.arrays],
            note,
            [buffer for _, _, taken in parts for buffer in taken.buffers],
        )

    def _take(self, columns: Mapping[str, Column]) -> Taken:
        taken = Taken(allow_pickle=self._allow_pickle)
        for name, column in columns.items():
            taken.add(name, column)
        return taken

    def intern(self, kind: str, parts: Any) -> Schema:
        """Find the schema of parts, or make it: a label, columns and a structure for each."""
        key = (kind, parts)
        schema = self._schemas.get(key)
        if schema is None:
            if len(self._schemas) >= _MOST_SCHEMAS:
                # Numbers begin anew: a message that defines one replaces what had it.
                for old in self._schemas.values():
                    old.number = None
                self.next_number = 0
                self._recent = (None, [])
                self._schemas.clear()
            schema = Schema(kind, [Part.of(label, tuple(map(_column, columns)), own) for label, columns, own in parts])
            self._schemas[key] = schema
        return schema

    def close(self) -> None:
        """Let go of the memory that batches were copied to."""
        for schema in self._schemas.values():
            schema.forget_targets()

    def told(self, schema: Schema) -> None:
        """Note that the consumer knows a schema from now on, by the next number."""
        schema.number = self.next_number
        self.next_number += 1


def _column(key: tuple[Any, ...]) -> Fixed | Loose:
    return Loose(*key) if len(key) == 1 else Fixed(*key)

"""Decoder: the messages of a channel opened one after the other, their blocks leased to the arrays over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure
from samplebatch.column.interface import Column
from samplebatch.column.memory import ALIGNMENT
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import FormatError, UntrustedPickleError
from samplebatch.transport.channel_end import HEADER_NBYTES
from samplebatch.transport.decode import DAMAGE, decode
from samplebatch.transport.encode import AnyBatch
from samplebatch.transport.lease import GOODBYE_IDENT, Lease, LeaseRef, ReturnPipe
from samplebatch.transport.schema import Place, Schema, align
from samplebatch.transport.wire import DEFINES, SCHEMA, VERSION, rows_in, unpack_metadata

_MAX_SCHEMAS = 1 << 12
_BYTE: Final = np.dtype(np.uint8)
_UP: Final = ALIGNMENT - 1
_ndarray = np.ndarray
_new = object.__new__


class BlockColumns:
    """The columns in the window of a batch that was received: their places in a block, which they keep.

    Parameters
    ----------
    root
        The bytes of the block.
    places
        Where the columns lie, by name.
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
    def batch(
        cls, root: npt.NDArray[np.uint8], places: Mapping[str, Place], rows: int, nested: dict[str, Structure]
    ) -> SampleBatch:
        """Make a batch of arrays without sequences and with no flags set, of which no column is made yet."""
        batch = _new(SampleBatch)
        batch._columns = {}
        batch.count = rows
        batch._window = (cast("dict[str, Column]", cls(root, places)), 0, rows, 0, 0)
        if nested:
            batch._nested = nested
        return batch


class LazyColumn:
    """A column in a block that is made when it is known which of its rows are wanted."""

    __slots__ = ("_place", "_root")

    def __init__(self, root: npt.NDArray[np.uint8], place: Place) -> None:
        self._root = root
        self._place = place

    def slice(self, start: int, stop: int) -> TensorColumn:
        """Make a column of the rows from `start` to `stop`."""
        (_, dtype, row_shape, _, _), _, offset = self._place
        if start:
            offset += start * prod(row_shape) * dtype.itemsize
        column = _new(TensorColumn)
        column.values = _ndarray((stop - start, *row_shape), dtype, self._root, offset)
        return column


class Decoder:
    """The consumer's decoder of the messages of one channel, one after the other.

    Parameters
    ----------
    memory
        The region.
    returns
        Where blocks go back.
    allow_pickle
        Whether pickled columns may be unpickled.

    Attributes
    ----------
    ident
        Number of the newest message that a block was leased for; 0 if there is none yet.
    unfinished
        The lease of the message that is being opened, until the caller has its batch. One that was interrupted is
        opened again with it.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], returns: ReturnPipe, *, allow_pickle: bool = False) -> None:
        self._memory = memory
        self._lent, self._gone = returns.lent, returns.gone
        self._allow_pickle = allow_pickle
        self._schemas: dict[int, Schema] = {}
        self.ident = 0
        self.unfinished: Lease | None = None

    def open(self, fields: tuple[Any, ...]) -> AnyBatch:
        """Make a batch over the block of a message, and lease the block. The caller sets `unfinished` to None after it.

        Parameters
        ----------
        fields
            The fields of a message of kind `BATCH`, as `unpack_fields` gives them, whose checksum is right.

        Raises
        ------
        FormatError
            If it is impossible.
        UntrustedPickleError
            If a column is pickled and that is not allowed; names it.
        """
        _, version, _, flags, number, ident, start, nbytes, _, metadata_nbytes, _, rows, _ = fields
        memory = self._memory
        try:
            if version != VERSION:
                raise FormatError(f"a message must be of version {VERSION}, got {version}; both ends need one release")
            if start & _UP or start < HEADER_NBYTES or start + nbytes > memory.nbytes:
                raise FormatError(
                    f"a message's block must lie within the {memory.nbytes - HEADER_NBYTES} bytes of the arena, "
                    "it does not"
                )
            lease = self.unfinished
            if lease is None:
                if not self.ident < ident < GOODBYE_IDENT:
                    raise FormatError(f"a message must have a number greater than {self.ident}, got {ident}")
                lease = Lease((nbytes,), _BYTE, memory, start)
                reference = LeaseRef(lease, self._gone)
                # No call stands between these, so no signal does: the block is leased as a whole or not at all.
                reference.ident = ident
                self._lent[ident] = reference
                self.ident = ident
                self.unfinished = lease
            if metadata_nbytes:
                batch = self._open_with_metadata(fields, lease)
            else:
                schema = self._schemas.get(number)
                if schema is None or flags:
                    raise FormatError(f"a message must have a schema that is known, and number {number} is not")
                plan = schema.simple_plan(rows)
                if plan.nbytes > nbytes:
                    raise FormatError(f"a message's columns must fit in its {nbytes} bytes, they take {plan.nbytes}")
                if plan.by_name is not None:
                    batch = BlockColumns.batch(lease, plan.by_name, rows, schema.parts[0].nested)
                else:
                    batch = decode(schema, plan, {}, lease, _no_buffers, allow_pickle=self._allow_pickle)
        except (FormatError, UntrustedPickleError):
            raise
        except DAMAGE as error:
            raise FormatError(f"a message must say what fits its schema, it does not: {error}") from error
        return batch

    def _open_with_metadata(self, fields: tuple[Any, ...], lease: Lease) -> AnyBatch:
        """Open the batch of a message with metadata."""
        _, _, _, flags, number, _, start, nbytes, metadata_start, metadata_nbytes, metadata_sum, rows, _ = fields
        memory = self._memory
        if metadata_start & _UP or metadata_start < HEADER_NBYTES or metadata_start + metadata_nbytes > memory.nbytes:
            raise FormatError("a message's metadata must lie in the arena, it does not")
        metadata = unpack_metadata(memory[metadata_start : metadata_start + metadata_nbytes].tobytes(), metadata_sum)
        if flags & DEFINES:
            if number >= _MAX_SCHEMAS:
                raise FormatError(f"a schema must have a number below {_MAX_SCHEMAS}, got {number}")
            self._schemas[number] = Schema.read(metadata.get(SCHEMA))
        schema = self._schemas.get(number)
        if schema is None:
            raise FormatError(f"a message must have a schema that is known, and number {number} is not")
        plan = schema.plan(*rows_in(metadata, rows))
        if plan.nbytes > nbytes:
            raise FormatError(f"a message's columns must fit in its {nbytes} bytes, they take {plan.nbytes}")
        cut = _Cut(lease, memory, start, nbytes, metadata_start + align(metadata_nbytes)).cut
        return decode(schema, plan, metadata, lease, cut, allow_pickle=self._allow_pickle)


class _Cut:
    """Cuts the buffers of variable columns, each behind the other at an aligned place.

    They lie behind the metadata, which lies in the message's block, or in another block of the same message.
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
    raise FormatError(f"a message with a buffer of {nbytes} bytes must have metadata, it has none")

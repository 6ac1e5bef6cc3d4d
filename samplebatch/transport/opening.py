"""Opening: from a message to a batch over the slot that it names.

Everything that a message says is checked before the memory is looked at.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import ref

import numpy as np
import numpy.typing as npt

from samplebatch.column.memory import ALIGNMENT
from samplebatch.errors import FormatError, UntrustedPickleError
from samplebatch.transport.decoding import DAMAGE, decode
from samplebatch.transport.end import HEADER_NBYTES
from samplebatch.transport.frame import AnyBatch
from samplebatch.transport.lease import GOODBYE_IDENT, Lease, Returns, Tie
from samplebatch.transport.message import DEFINES, VERSION
from samplebatch.transport.note import SCHEMA, rows_in, unpack_note
from samplebatch.transport.schema import Schema, aligned
from samplebatch.transport.slot_columns import SlotColumns

_MOST_SCHEMAS = 1 << 12
_BYTE: Final = np.dtype(np.uint8)
_UP: Final = ALIGNMENT - 1


class Opener:
    """Opens the messages of one channel, one after the other.

    Parameters
    ----------
    memory
        The region.
    returns
        Where slots go back.
    allow_pickle
        Whether pickled columns may be unpickled.

    Attributes
    ----------
    ident
        Number of the newest message that a slot was leased for; 0 if there is none yet.
    unfinished
        The lease of the message that is being opened, until the caller has its batch. One that was interrupted is
        opened again with it.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], returns: Returns, *, allow_pickle: bool = False) -> None:
        self._memory = memory
        self._lent, self._gone = returns.lent, returns.gone
        self._allow_pickle = allow_pickle
        self._schemas: dict[int, Schema] = {}
        self.ident = 0
        self.unfinished: Lease | None = None

    def open(self, fields: tuple[Any, ...]) -> AnyBatch:
        """Make a batch over the slot of a message, and lease the slot. The caller sets `unfinished` to None after it.

        Parameters
        ----------
        fields
            What `unpack_fields` gives of a message of kind `BATCH`, after its checksum was seen to be right.

        Raises
        ------
        FormatError
            If it says what cannot be.
        UntrustedPickleError
            If a column is pickled and that is not allowed; names it.
        """
        _, version, _, flags, number, ident, start, nbytes, _, note_nbytes, _, rows, _ = fields
        memory = self._memory
        try:
            if version != VERSION:
                raise FormatError(f"a message must be of version {VERSION}, got {version}; both ends need one release")
            if start & _UP or start < HEADER_NBYTES or start + nbytes > memory.nbytes:
                raise FormatError(
                    f"a message's slot must lie within the {memory.nbytes - HEADER_NBYTES} bytes of the arena, it does "
                    "not"
                )
            lease = self.unfinished
            if lease is None:
                if not self.ident < ident < GOODBYE_IDENT:
                    raise FormatError(f"a message must have a number greater than {self.ident}, got {ident}")
                lease = Lease((nbytes,), _BYTE, memory, start)
                tie = Tie(lease, self._gone)
                # No call stands between these, so no signal does: the slot is leased as a whole or not at all.
                tie.ident = ident
                self._lent[ident] = tie
                self.ident = ident
                self.unfinished = lease
            if note_nbytes:
                batch = self._noted(fields, lease)
            else:
                schema = self._schemas.get(number)
                if schema is None or flags:
                    raise FormatError(f"a message must have a schema that is known, and number {number} is not")
                plan = schema.simple_plan(rows)
                if plan.nbytes > nbytes:
                    raise FormatError(f"a message's columns must fit in its {nbytes} bytes, they take {plan.nbytes}")
                if plan.by_name is not None:
                    batch = SlotColumns.batch(lease, plan.by_name, rows, schema.parts[0].nested)
                else:
                    batch = decode(schema, plan, {}, lease, _no_buffers, allow_pickle=self._allow_pickle)
        except (FormatError, UntrustedPickleError):
            raise
        except DAMAGE as error:
            raise FormatError(f"a message must say what fits its schema, it does not: {error}") from error
        lease.batch = ref(batch)
        return batch

    def _noted(self, fields: tuple[Any, ...], lease: Lease) -> AnyBatch:
        """Open a batch whose message has a note."""
        _, _, _, flags, number, _, start, nbytes, note_start, note_nbytes, note_sum, rows, _ = fields
        memory = self._memory
        if note_start & _UP or note_start < HEADER_NBYTES or note_start + note_nbytes > memory.nbytes:
            raise FormatError("a message's note must lie in the arena, it does not")
        note = unpack_note(memory[note_start : note_start + note_nbytes].tobytes(), note_sum)
        if flags & DEFINES:
            if number >= _MOST_SCHEMAS:
                raise FormatError(f"a schema must have a number below {_MOST_SCHEMAS}, got {number}")
            self._schemas[number] = Schema.read(note.get(SCHEMA))
        schema = self._schemas.get(number)
        if schema is None:
            raise FormatError(f"a message must have a schema that is known, and number {number} is not")
        plan = schema.plan(*rows_in(note, rows))
        if plan.nbytes > nbytes:
            raise FormatError(f"a message's columns must fit in its {nbytes} bytes, they take {plan.nbytes}")
        cut = _Cut(lease, memory, start, nbytes, note_start + aligned(note_nbytes)).cut
        return decode(schema, plan, note, lease, cut, allow_pickle=self._allow_pickle)


class _Cut:
    """Cuts the buffers of loose columns, each behind the other at an aligned place.

    They lie behind the note, which lies in the message's slot, or in another slot of the same message.
    """

    def __init__(self, lease: Lease, memory: npt.NDArray[np.uint8], start: int, nbytes: int, at: int) -> None:
        if start <= at <= start + nbytes:
            self._root, self._at = lease, at - start
            return
        self._root, self._at = Lease((memory.nbytes - at,), _BYTE, memory, at), 0
        self._root.first = lease

    def cut(self, nbytes: int) -> npt.NDArray[np.uint8]:
        cut: npt.NDArray[np.uint8] = np.ndarray((nbytes,), _BYTE, self._root, self._at)
        self._at += aligned(nbytes)
        return cut


def _no_buffers(nbytes: int) -> npt.NDArray[np.uint8]:
    raise FormatError(f"a message with a buffer of {nbytes} bytes must have a note, it has none")

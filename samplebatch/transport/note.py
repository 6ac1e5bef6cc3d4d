"""Note: what a message says beside its 64 bytes, as JSON, in the slot behind the columns.

The numbers of rows where they differ, flags, the headers of loose columns, whose buffers follow it, and a schema that
the consumer does not know yet. Most messages have none.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from samplebatch.batch.flags import Flags
from samplebatch.errors import FormatError
from samplebatch.transport.schema import Rows, Schema, aligned

ENV_STEPS: Final = "e"
FLAGS: Final = "f"
LOOSE: Final = "l"
SCHEMA: Final = "s"
ROWS: Final = "r"
ROOMS: Final = "m"


def written(schema: Schema, rows: Rows, rooms: Rows, note: dict[str, Any]) -> bytes:
    """Write what the consumer must know beside the schema's number and one number of rows; empty if nothing."""
    simple = len(rows) == 1 and type(rows[0]) is int and rows == rooms
    if schema.number is not None and simple:
        return pack_note(note) if note else b""
    whole = dict(note)
    if schema.number is None:
        whole[SCHEMA] = schema.describe()
    if not simple:
        whole[ROWS] = rows
        if rooms != rows:
            whole[ROOMS] = rooms
    return pack_note(whole)


def size_of(note: bytes, buffers: list[npt.NDArray[np.uint8]]) -> int:
    """Return the bytes that a note takes, with the buffers of loose columns behind it."""
    return aligned(len(note)) + sum([aligned(buffer.nbytes) for buffer in buffers])


def put(memory: npt.NDArray[np.uint8], start: int, note: bytes, buffers: list[npt.NDArray[np.uint8]]) -> None:
    """Copy a note to its place, and the buffers of loose columns behind it."""
    memory[start : start + len(note)] = np.frombuffer(note, np.uint8)
    at = start + aligned(len(note))
    for buffer in buffers:
        memory[at : at + buffer.nbytes] = buffer
        at += aligned(buffer.nbytes)


def pack_note(note: dict[str, Any]) -> bytes:
    """Write a note as JSON."""
    return json.dumps(note, separators=(",", ":")).encode()


def unpack_note(raw: bytes, checksum: int) -> dict[str, Any]:
    """Read a note.

    Raises
    ------
    FormatError
        If its bytes have another checksum, or are no JSON.
    """
    if crc32(raw) != checksum:
        raise FormatError("a message's note must have the checksum that the message says; it is damaged")
    try:
        note = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a message's note must be JSON, it is not: {error}") from error
    if not isinstance(note, dict):
        raise FormatError("a message's note must be a mapping, it is not")
    return note


def plain_flags(flags: Flags) -> list[Any]:
    """Turn flags into what JSON can hold."""
    time_major, zero_padded, max_seq_len, updates, is_training = astuple(flags)
    return [
        None if time_major is None else bool(time_major),
        bool(zero_padded),
        None if max_seq_len is None else int(max_seq_len),
        None if updates is None else (updates if isinstance(updates, int) else float(updates)),
        bool(is_training),
    ]


def flags_of(plain: Any) -> Flags:
    """Take flags that `plain_flags` wrote; raises as `count_of` does."""
    time_major, zero_padded, max_seq_len, updates, is_training = plain
    kinds_fit = isinstance(zero_padded, bool) and isinstance(is_training, bool)
    if not (kinds_fit and isinstance(time_major, bool | None) and isinstance(updates, int | float | None)):
        raise FormatError("a message must have flags of their own kinds, it has others")
    return Flags(time_major, zero_padded, None if max_seq_len is None else count_of(max_seq_len), updates, is_training)


def count_of(value: Any) -> int:
    """Take a number that another process gave for a count.

    Raises
    ------
    FormatError
        If it is none.
    """
    if type(value) is not int or value < 0:
        raise FormatError("a message must have numbers that count something, it has others")
    return value


def rows_in(note: dict[str, Any], rows: int) -> tuple[Rows, Rows]:
    """Return the rows that there is room for, and those in use; `rows` is what the message says itself.

    Raises
    ------
    FormatError
        If they count nothing.
    """
    used: Rows = _rows(note[ROWS]) if ROWS in note else (rows,)
    return (_rows(note[ROOMS]) if ROOMS in note else used), used


def _rows(plain: Any) -> Rows:
    return tuple([tuple(map(count_of, rows)) if isinstance(rows, list) else count_of(rows) for rows in plain])

"""Wire format: 64-byte messages in a channel's pipe, and optional metadata in a message's block.

A message is written by a single call and is shorter than the system's limit for atomic writes, so the message arrives
completely or not at all. The arrival of a message commits all data that the message refers to.

The metadata is JSON: flags, the headers of variable columns, a schema that is new to the consumer and, unless all
columns have the same number of rows, the numbers of rows. The buffers of variable columns follow the metadata. Most
messages have no metadata.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from struct import Struct
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import describe_value
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.flags import Flags, flags_of_unit, read_declarations
from samplebatch.column.arrow import Recent
from samplebatch.errors import FormatError
from samplebatch.transport.schema import Rows, Schema, align

BATCH: Final = 1
FAILURE: Final = 2
END: Final = 3
HELLO: Final = 4
STARVED: Final = 5
"""The producer is waiting for a block: the consumer should collect garbage, which may hold batches."""

MESSAGE_NBYTES: Final = 64

DEFINES: Final = 1
"""Flag: the metadata defines the schema of this number."""

MAGIC: Final = b"SBMS"
VERSION: Final = 1
CHECKED_NBYTES: Final = 60
"""Number of bytes that the checksum covers; the checksum follows."""

pack_body = Struct("<4sBBHIQQQQIIQ").pack
pack_sum = Struct("<I").pack
unpack_fields = Struct("<4sBBHIQQQQIIQI").unpack


class Message(NamedTuple):
    """Message of a channel.

    - `kind`: `BATCH`, `FAILURE`, `END`, `HELLO` or `STARVED`.
    - `flags`: `DEFINES` if the metadata contains a new schema, otherwise 0.
    - `schema`: number of the schema.
    - `ident`: number of the message, which increases with every message; the consumer returns the message's blocks by
      this number.
    - `start`, `nbytes`: start of the block, relative to the arena, and its size.
    - `metadata_start`, `metadata_nbytes`, `metadata_sum`: start of the metadata, its size (0 without metadata), and its
      checksum.
    - `rows`: number of rows of every fixed column, unless the metadata contains row counts.
    """

    kind: int
    flags: int
    schema: int
    ident: int
    start: int
    nbytes: int
    metadata_start: int
    metadata_nbytes: int
    metadata_sum: int
    rows: int


def pack(
    kind: int,
    flags: int = 0,
    schema: int = 0,
    ident: int = 0,
    start: int = 0,
    nbytes: int = 0,
    metadata_start: int = 0,
    metadata_nbytes: int = 0,
    metadata_sum: int = 0,
    rows: int = 0,
) -> bytes:
    """Pack a message and its checksum into bytes.

    >>> len(pack(HELLO)), unpack(pack(BATCH, ident=7, rows=3)).rows
    (64, 3)
    """
    body = pack_body(
        MAGIC, VERSION, kind, flags, schema, ident, start, nbytes, metadata_start, metadata_nbytes, metadata_sum, rows
    )
    return body + pack_sum(crc32(body))


def unpack(raw: bytes | bytearray) -> Message:
    """Unpack a message; raises FormatError if the bytes are damaged or are not a message."""
    if len(raw) != MESSAGE_NBYTES:
        raise FormatError(f"a message must have {MESSAGE_NBYTES} bytes, got {len(raw)}")
    magic, version, *fields, checksum = unpack_fields(raw)
    if magic != MAGIC:
        raise FormatError(f"a message must start with {MAGIC!r}, got {magic!r}; another program writes to the channel")
    if version != VERSION:
        raise FormatError(f"a message must have version {VERSION}, got {version}; both ends must use the same release")
    if crc32(raw[:CHECKED_NBYTES]) != checksum:
        raise FormatError("a message must match its checksum; it is damaged")
    return Message(*fields)


ENV_STEPS: Final = "e"
FLAGS: Final = "f"
VARIABLE: Final = "l"
SCHEMA: Final = "s"
ROWS: Final = "r"
ROOMS: Final = "m"
"""Names of the entries of metadata."""

VALUE: Final = "value"
COLUMN: Final = "column"
OBJECTS: Final = "objects"
"""Kinds of variable leaves of a nested batch: plain value, column, object or array of objects."""

PLAIN: Final = frozenset((type(None), str, bool, int, float))
"""Types of values that metadata contain unchanged."""


def write_metadata(schema: Schema, rows: Rows, rooms: Rows, metadata: dict[str, Any]) -> bytes:
    """Serialize a message's metadata; the result is empty if the 64-byte message suffices."""
    simple = len(rows) == 1 and type(rows[0]) is int and rows == rooms
    if schema.number is not None and simple:
        return pack_metadata(metadata) if metadata else b""
    entries = dict(metadata)
    if schema.number is None:
        entries[SCHEMA] = schema.describe()
    if not simple:
        entries[ROWS] = rows
        if rooms != rows:
            entries[ROOMS] = rooms
    return pack_metadata(entries)


def size_of(metadata: bytes, buffers: list[npt.NDArray[np.uint8]]) -> int:
    """Return the total aligned size in bytes of metadata and the buffers of variable columns."""
    return align(len(metadata)) + sum([align(buffer.nbytes) for buffer in buffers])


def put(memory: npt.NDArray[np.uint8], start: int, metadata: bytes, buffers: list[npt.NDArray[np.uint8]]) -> None:
    """Copy metadata to an offset in memory, and the buffers of variable columns to the aligned offsets after it."""
    memory[start : start + len(metadata)] = np.frombuffer(metadata, np.uint8)
    at = start + align(len(metadata))
    for buffer in buffers:
        memory[at : at + buffer.nbytes] = buffer
        at += align(buffer.nbytes)


def pack_metadata(metadata: dict[str, Any]) -> bytes:
    """Serialize metadata as JSON."""
    return json.dumps(metadata, separators=(",", ":")).encode()


def unpack_metadata(raw: bytes, checksum: int) -> dict[str, Any]:
    """Parse metadata; raises FormatError if the bytes do not match the checksum or are not JSON."""
    if crc32(raw) != checksum:
        raise FormatError("a message's metadata must match its checksum; it is damaged")
    try:
        metadata = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a message's metadata must be valid JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise FormatError(f"a message's metadata must be a mapping, got a {type(metadata).__name__}")
    return metadata


_units = Recent[str, ActionUnit](limit=16)
"""Cache of action units by text."""
_PLAIN_FLAGS = [None, False, None, None, False]


def plain_flags(flags: Flags) -> list[Any]:
    """Convert flags to JSON-serializable values."""
    time_major, zero_padded, max_seq_len, updates, is_training, unit, per_sequence = astuple(flags)
    plain = [
        None if time_major is None else bool(time_major),
        bool(zero_padded),
        None if max_seq_len is None else int(max_seq_len),
        None if updates is None else (updates if isinstance(updates, int) else float(updates)),
        bool(is_training),
    ]
    if per_sequence:
        return [*plain, None if unit is None else unit.describe(), list(per_sequence)]
    return plain if unit is None else [*plain, unit.describe()]


def flags_of(plain: Any) -> Flags:
    """Validate and convert flags that `plain_flags` created; raises FormatError if the flags are invalid."""
    time_major, zero_padded, max_seq_len, updates, is_training, *extras = plain
    kinds_fit = isinstance(zero_padded, bool) and isinstance(is_training, bool)
    if not (kinds_fit and isinstance(time_major, bool | None) and isinstance(updates, int | float | None)):
        raise FormatError(f"a message's flags must have the types of a batch's flags, got {plain!r:.80}")
    if len(extras) > 2:
        raise FormatError(f"a message must have 5 to 7 flags of a batch, got {len(plain)}")
    described = extras[0] if extras else None
    unit = None if described is None else _units.get(repr(described), lambda: ActionUnit.from_description(described))
    per_sequence = read_declarations(extras[1]) if len(extras) == 2 else ()
    if unit is not None and plain[:5] == _PLAIN_FLAGS and not per_sequence:
        return flags_of_unit(unit)
    width = None if max_seq_len is None else count_of(max_seq_len)
    return Flags(time_major, zero_padded, width, updates, is_training, unit, per_sequence)


def count_of(value: Any) -> int:
    """Validate a count from another process; raises FormatError if the value is not a non-negative integer."""
    if type(value) is not int or value < 0:
        raise FormatError(f"a message's counts must be integers from 0, got {describe_value(value)}")
    return value


def read_rows(plain: Any) -> Rows:
    """Validate the numbers of rows that another process has sent for the parts of a schema.

    Raises FormatError if the value is not a list whose elements are counts or lists of counts.
    """
    if not isinstance(plain, list):
        raise FormatError(f"a message's rows must be a list of counts, got a {type(plain).__name__}")
    counts: list[Any] = []
    for rows in plain:
        counts.append(tuple(map(count_of, rows)) if isinstance(rows, list) else count_of(rows))
    return tuple(counts)

"""Messages: what goes through a channel's pipe, 64 bytes each, and what it says of a slot.

A message is written by one call and is shorter than what the system writes at once, so it is there as a whole or not at
all: its arrival is the commit mark of everything that it refers to.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from samplebatch.errors import FormatError

BATCH: Final = 1
FAILURE: Final = 2
END: Final = 3
HELLO: Final = 4
STARVED: Final = 5
"""Says that the producer has waited for a slot for a while: the consumer may have batches that are garbage."""

MESSAGE_NBYTES: Final = 64

DEFINES: Final = 1
"""Bit of the flags: the note defines the schema under its number."""

MAGIC: Final = b"SBMS"
VERSION: Final = 1
CHECKED_NBYTES: Final = 60
"""Bytes of a message that its checksum is of; the checksum follows."""

pack_body = Struct("<4sBBHIQQQQIIQ").pack
pack_sum = Struct("<I").pack
unpack_fields = Struct("<4sBBHIQQQQIIQI").unpack


class Message(NamedTuple):
    """One message.

    Attributes
    ----------
    kind
        `BATCH`, `FAILURE`, `END`, `HELLO` or `STARVED`.
    flags
        `DEFINES` or nothing.
    schema
        Number of the schema.
    ident
        Number of the message, by which its slots are given back; each is greater than the one before.
    start, nbytes
        Where the slot begins, counted from the beginning of the arena, and its size.
    note_start, note_nbytes, note_sum
        Where the note lies, its size, 0 if there is none, and its checksum.
    rows
        Rows of every fixed column, if the note does not say.
    """

    kind: int
    flags: int
    schema: int
    ident: int
    start: int
    nbytes: int
    note_start: int
    note_nbytes: int
    note_sum: int
    rows: int


def pack(
    kind: int,
    flags: int = 0,
    schema: int = 0,
    ident: int = 0,
    start: int = 0,
    nbytes: int = 0,
    note_start: int = 0,
    note_nbytes: int = 0,
    note_sum: int = 0,
    rows: int = 0,
) -> bytes:
    """Pack a message, with a checksum.

    >>> len(pack(HELLO)), unpack(pack(BATCH, ident=7, rows=3)).rows
    (64, 3)
    """
    body = pack_body(MAGIC, VERSION, kind, flags, schema, ident, start, nbytes, note_start, note_nbytes, note_sum, rows)
    return body + pack_sum(crc32(body))


def unpack(raw: bytes | bytearray) -> Message:
    """Unpack a message.

    Raises
    ------
    FormatError
        If the bytes are no message, or damaged.
    """
    if len(raw) != MESSAGE_NBYTES:
        raise FormatError(f"a message must have {MESSAGE_NBYTES} bytes, got {len(raw)}")
    magic, version, *fields, checksum = unpack_fields(raw)
    if magic != MAGIC:
        raise FormatError(f"a message must begin with {MAGIC!r}, it does not; something else writes to the channel")
    if version != VERSION:
        raise FormatError(f"a message must be of version {VERSION}, got {version}; both ends must be of one release")
    if crc32(raw[:CHECKED_NBYTES]) != checksum:
        raise FormatError("a message must have the checksum that it says, it has another; it is damaged")
    return Message(*fields)

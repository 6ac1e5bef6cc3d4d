"""Columns that RLlib packed, row by row: pickles in LZ4 frames, as bytes or in base64."""

from __future__ import annotations

import base64
from typing import Any, Final

import pyarrow as pa

from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import CapacityError, FormatError

_MAGIC: Final = b"\x04\x22\x4d\x18"
_MAGIC_BASE64: Final = b"BCJNG"
"""The beginning of an LZ4 frame, and of its base64."""

_PART_NBYTES: Final = 1 << 20


def is_packed(column: Column) -> bool:
    """Tell whether a column was packed by RLlib's `pack`, by its first row.

    >>> is_packed(as_column(["BCJNGGBA"], "obs")), is_packed(as_column(["north"], "obs"))
    (True, False)
    """
    # Torch's dtypes, which have no kind, are of numbers.
    kind = getattr(column.dtype, "kind", "f")
    return kind in "USO" and len(column) > 0 and looks_packed(column.values[0])


def looks_packed(value: Any) -> bool:
    """Tell whether a value begins as those of RLlib's `pack` do.

    >>> looks_packed("BCJNGGBA"), looks_packed(b"BCJNGGBA"), looks_packed("north"), looks_packed(3)
    (True, True, False, False)
    """
    return _encode(value).startswith((_MAGIC, _MAGIC_BASE64))


def unpack_column(column: Column, name: str, *, allow_pickle: bool = False) -> Column:
    """Unpack the rows of a packed column, without running any code unless that is allowed.

    Raises
    ------
    FormatError
        If a row is damaged, or not packed as the first one is; names the column.
    UntrustedPickleError
        If a row is more than arrays, numbers and strings and `allow_pickle` is false; names the column.
    CapacityError
        If rows take more memory than 256 MiB and 1024 times their packed bytes; names the column.
    """
    subject = f"column {name!r}"
    bound = MemoryBound(subject, column.nbytes)
    return as_column([unpack(row, subject, bound, allow_pickle=allow_pickle) for row in column.values.tolist()], name)


def unpack(row: str | bytes, subject: str, bound: MemoryBound, *, allow_pickle: bool = False) -> Any:
    """Unpack a value of RLlib's `pack`. Pickles of arrays, numbers, strings, dicts and lists are read as data.

    Raises
    ------
    FormatError
        If it is damaged, or no packed value; names the subject.
    UntrustedPickleError
        If it is of other objects, and `allow_pickle` is false; names the subject.
    CapacityError
        If it takes more memory than is left of the bound; names the subject.
    """
    from samplebatch.batch.inert_pickle import is_plain, read_pickle

    data = _encode(row)
    try:
        frame = data if data.startswith(_MAGIC) else base64.b64decode(data, validate=True)
        pickled = _decompress(frame, subject, bound)
        if not allow_pickle and is_plain(value := read_pickle(pickled)):
            return value
    except (ValueError, OSError, EOFError) as error:
        if isinstance(error, CapacityError):
            raise
        raise FormatError(f"{subject} must have rows as RLlib packs them, one is damaged: {error}") from error
    return unpickle([pickled], subject, allow_pickle=allow_pickle)[0]


def _decompress(frame: bytes, subject: str, bound: MemoryBound) -> bytes:
    parts = []
    with pa.CompressedInputStream(pa.BufferReader(frame), "lz4") as stream:
        while part := stream.read(_PART_NBYTES):
            bound.take(len(part), subject)
            parts.append(part)
    return b"".join(parts)


def _encode(row: Any) -> bytes:
    if isinstance(row, str):
        return row.encode()
    return row if isinstance(row, bytes) else b""

"""RLlib's packed values: pickles that are compressed with LZ4 and written as base64, in its JSON and Parquet files."""

from __future__ import annotations

import base64
import binascii
import pickle
from typing import Any

from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import FormatError, SampleBatchError
from samplebatch.storage.inert_pickle import is_plain, read_pickle

_PART_NBYTES = 1 << 20


def pack(value: Any) -> str:
    """Pack a value as RLlib's `pack` does.

    >>> import numpy as np
    >>> unpack(pack(np.arange(3)), "column 'obs'", MemoryBound("'steps.json'", 100))
    array([0, 1, 2])
    """
    import lz4.frame

    return base64.b64encode(lz4.frame.compress(pickle.dumps(value, 5))).decode("ascii")


def unpack(text: str | bytes, subject: str, bound: MemoryBound, *, allow_pickle: bool = False) -> Any:
    """Unpack a value that RLlib has packed. Pickles of arrays, numbers, strings, dicts and lists are read as data.

    Parameters
    ----------
    text
        The packed value.
    subject
        Where it stands, for errors.
    bound
        What memory may be made of it.
    allow_pickle
        Whether to unpickle other objects, which runs code that their writer chose.

    Raises
    ------
    FormatError
        If it is no packed value; names the subject.
    UntrustedPickleError
        If it is of other objects, and `allow_pickle` is false; names the subject.
    CapacityError
        If it takes more memory than is left of the bound; names the subject.
    """
    data = _decompress(text, subject, bound)
    try:
        value = read_pickle(data)
    except FormatError as error:
        raise FormatError(f"{subject} must be packed as RLlib packs values, and it is not: {error}") from error
    return value if is_plain(value) else unpickle([data], subject, allow_pickle=allow_pickle)[0]


def _decompress(text: str | bytes, subject: str, bound: MemoryBound) -> bytes:
    import lz4.frame

    decompressor = lz4.frame.LZ4FrameDecompressor()
    parts = []
    try:
        rest = base64.b64decode(text, validate=True)
        # All of it is given at once: what then asks for more is cut short.
        while not decompressor.eof and (rest or not decompressor.needs_input):
            parts.append(decompressor.decompress(rest, max_length=_PART_NBYTES))
            bound.take(len(parts[-1]), subject)
            rest = b""
    except (binascii.Error, ValueError, RuntimeError, EOFError) as error:
        if isinstance(error, SampleBatchError):
            raise
        raise FormatError(f"{subject} must be packed as RLlib packs values, and it is not: {error}") from error
    if not decompressor.eof:
        raise FormatError(f"{subject} must be packed as RLlib packs values, and it is cut short")
    return b"".join(parts)

"""How much memory may be made of bytes from outside.

A file of a few bytes can describe rows without end: nulls, empty dicts, runs, and all that compresses well. So whoever
reads says what is about to be made, before it is, and it is held against the bytes that it is made of.
"""

from __future__ import annotations

from samplebatch.errors import CapacityError

FLOOR_NBYTES = 1 << 28
"""Bytes that may be made of anything, 256 MiB."""

MAX_GROWTH = 1024
"""How many bytes may be made of one, beyond the floor. Deflate cannot make more; experience compresses less."""


class MemoryBound:
    """The memory that reading something from outside may take, held by its reader.

    Parameters
    ----------
    source
        Name of what is read, for errors.
    nbytes
        Bytes of that.
    max_nbytes
        Bytes that may be made of it; 256 MiB or 1024 times its own, whichever is more, if None.

    Raises
    ------
    CapacityError
        If `max_nbytes` is not a number from 0.

    Examples
    --------
    >>> bound = MemoryBound("'batch.arrow'", 1000)
    >>> bound.take(1 << 20, "column 'infos'")
    >>> bound.take(1 << 30, "column 'words'")
    Traceback (most recent call last):
    samplebatch.errors.CapacityError: column 'words' would take 1073741824 bytes of memory, and all that is made of \
'batch.arrow' may take 268435456; pass a larger max_nbytes if it is to be trusted
    """

    def __init__(self, source: str, nbytes: int, max_nbytes: int | None = None) -> None:
        if max_nbytes is not None and (isinstance(max_nbytes, bool) or not max_nbytes >= 0):
            raise CapacityError(f"max_nbytes must be a number of bytes from 0, got {max_nbytes!r}")
        self._source = source
        self._limit = max(FLOOR_NBYTES, MAX_GROWTH * nbytes) if max_nbytes is None else max_nbytes
        self._taken = 0

    def take(self, nbytes: int, subject: str) -> None:
        """Take bytes that are about to be allocated from the bound.

        Raises
        ------
        CapacityError
            If it is more than is left; names the subject, its bytes and the bound.
        """
        self._taken += nbytes
        if self._taken > self._limit:
            raise CapacityError(
                f"{subject} would take {nbytes} bytes of memory, and all that is made of {self._source} may take "
                f"{self._limit}; pass a larger max_nbytes if it is to be trusted"
            )

"""Unpickling of untrusted bytes: the only module that decides whether code in pickles may run.

Loading a pickle can execute code that the pickle's writer chose. All readers (of Arrow, Parquet and HDF5 files, saved
buffers, channels, broadcasts) pass the caller's permission to `unpickle`; no other module loads untrusted pickles.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from samplebatch.errors import FormatError, UntrustedPickleError


def unpickle(pickles: Iterable[bytes], subject: str, *, allow_pickle: bool = False) -> list[Any]:
    """Unpickle untrusted bytes if the caller permits unpickling.

    Raises UntrustedPickleError if `allow_pickle` is false. Raises FormatError if a pickle is invalid.

    pickles: one pickle per object. Permission is required even for an empty iterable; without permission, pickles are
        not inspected.
    subject: column or file that contains the pickles, for error messages.
    allow_pickle: whether to unpickle; unpickling can execute the writer's code.

    >>> unpickle([pickle.dumps({1, 2})], "column 'infos'", allow_pickle=True)
    [{1, 2}]
    >>> unpickle([pickle.dumps({1, 2})], "column 'infos'")
    Traceback (most recent call last):
    samplebatch.errors.UntrustedPickleError: column 'infos' holds pickled objects, and
        unpickling runs code that its writer chose; pass allow_pickle=True if you trust its
        source
    """
    if not allow_pickle:
        require_permission(subject)
    try:
        return list(map(pickle.loads, pickles))
    except Exception as error:
        raise FormatError(f"{subject} must have rows that can be unpickled: {error}") from error


def require_permission(subject: str, *, allow_pickle: bool = False) -> None:
    """Raise UntrustedPickleError if `allow_pickle` is false.

    subject: column, file or state that contains the pickles.
    """
    if not allow_pickle:
        raise UntrustedPickleError(
            f"{subject} holds pickled objects, and unpickling runs code that its writer chose; "
            "pass allow_pickle=True if you trust its source"
        )

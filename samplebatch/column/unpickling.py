"""Unpickling of bytes from elsewhere: the one place that decides whether their code may run.

A pickle is a program that its writer chose. Every way in (Arrow, Parquet and HDF5 files, saved buffers, channels,
broadcasts) hands its permission down to `unpickle`, and no other module loads bytes that may be foreign.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from samplebatch.errors import FormatError, UntrustedPickleError


def unpickle(pickles: Iterable[bytes], subject: str, *, allow_pickle: bool = False) -> list[Any]:
    """Unpickle bytes from elsewhere, if the caller trusts their writer.

    Raises UntrustedPickleError if `allow_pickle` is false; names the subject. Raises FormatError if one cannot be
    unpickled; names the subject.

    Parameters
    ----------
    pickles
        One pickle for each object. None of them is looked at without permission, and having none needs it as well.
    subject
        The column or file that holds them, for errors.
    allow_pickle
        Whether they may be unpickled, which runs code that their writer chose.

    Examples
    --------
    >>> unpickle([pickle.dumps({1, 2})], "column 'infos'", allow_pickle=True)
    [{1, 2}]
    >>> unpickle([pickle.dumps({1, 2})], "column 'infos'")
    Traceback (most recent call last):
    samplebatch.errors.UntrustedPickleError: column 'infos' holds pickled objects, and unpickling runs code that its
    writer chose; pass allow_pickle=True if you trust where it comes from
    """
    require_permission(subject, allow_pickle=allow_pickle)
    try:
        return list(map(pickle.loads, pickles))
    except Exception as error:
        raise FormatError(f"{subject} must have rows that can be unpickled, one cannot: {error}") from error


def require_permission(subject: str, *, allow_pickle: bool = False) -> None:
    """Refuse to unpickle without permission.

    Raises UntrustedPickleError if `allow_pickle` is false; names the subject.

    Parameters
    ----------
    subject
        The column, file or state that holds the pickles.
    allow_pickle
        Whether they may be unpickled.
    """
    if not allow_pickle:
        raise UntrustedPickleError(
            f"{subject} holds pickled objects, and unpickling runs code that its writer chose; "
            "pass allow_pickle=True if you trust where it comes from"
        )

"""Formats of files by their names and by their first bytes."""

from __future__ import annotations

import os
from typing import Literal

import pyarrow as pa

from samplebatch.errors import FormatError
from samplebatch.storage.file_bytes import file_bytes

Form = Literal["Arrow", "Parquet", "HDF5"]

SUFFIXES: dict[str, Form] = {
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".ipc": "Arrow",
    ".parquet": "Parquet",
    ".hdf5": "HDF5",
    ".h5": "HDF5",
}
"""The format that each ending of a name stands for."""

_MAGIC: dict[bytes, Form] = {b"ARROW1": "Arrow", b"PAR1": "Parquet", b"\x89HDF\r\n\x1a\n": "HDF5"}

_OTHERS = frozenset(
    (".csv", ".gz", ".json", ".jsonl", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth", ".tfrecord", ".txt", ".zip")
)
"""Endings of other formats, which no file of ours may have."""


def _suffix_of(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(os.fspath(path).rstrip(os.sep))[1].lower()


def check_suffix(path: str | os.PathLike[str], form: Form) -> None:
    """Check that the ending of a file's name does not stand for another format than the one to be written.

    Raises
    ------
    FormatError
        If it does.

    Examples
    --------
    >>> check_suffix("steps.csv", "Arrow")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: 'steps.csv' must end as Arrow files do ('.arrow', '.feather', '.ipc'), got '.csv'
    """
    suffix = _suffix_of(path)
    if suffix in _OTHERS or SUFFIXES.get(suffix, form) != form:
        own = ", ".join(repr(known) for known, other in SUFFIXES.items() if other == form)
        raise FormatError(f"{os.fspath(path)!r} must end as {form} files do ({own}), got {suffix!r}")


def form_to_write(path: str | os.PathLike[str]) -> Form | None:
    """Return the format that a path asks for by its ending; None for a folder, which has none.

    Raises
    ------
    FormatError
        If no format has that ending.
    """
    suffix = _suffix_of(path)
    if not suffix or os.path.isdir(path):
        return None
    form = SUFFIXES.get(suffix)
    if form is None:
        raise FormatError(
            f"{os.fspath(path)!r} must end in one of {', '.join(SUFFIXES)}, or be a folder without ending"
        )
    return form


def form_of_file(path: str | os.PathLike[str]) -> Form:
    """Tell the format of a file by its first or last bytes, or by its name where these may be damaged.

    Raises
    ------
    FormatError
        If it is none of ours.
    OSError
        If it cannot be read.
    """
    return form_of_bytes(file_bytes(os.fspath(path), memory_map=True), path)


def form_of_bytes(data: pa.Buffer, path: str | os.PathLike[str]) -> Form:
    """Tell the format of a file's bytes, as `form_of_file` does; `path` is the file.

    Raises
    ------
    FormatError
        If it is none of ours.
    """
    start, end = data[:8].to_pybytes(), data[-8:].to_pybytes()
    for magic, form in _MAGIC.items():
        if start.startswith(magic) or (end.endswith(magic) and form != "HDF5"):
            return form
    named = SUFFIXES.get(_suffix_of(path))
    if named is None:
        raise FormatError(
            f"{os.fspath(path)!r} must be an Arrow, Parquet or HDF5 file, and its first bytes are of none of them"
        )
    return named

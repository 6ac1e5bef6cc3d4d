"""Tables of Parquet files that other libraries wrote, read within a bound of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from samplebatch.column.memory_bound import MemoryBound
from samplebatch.errors import FormatError
from samplebatch.storage.parquet import open_parquet


def read_tables(path: str | os.PathLike[str], max_nbytes: int | None = None) -> Iterator[tuple[pa.Table, MemoryBound]]:
    """Read a Parquet file, or those of a folder and the folders in it by name, with the bound of each.

    Raises
    ------
    FormatError
        If there is no Parquet file, or one is damaged or has two columns of one name; names it.
    CapacityError
        If a file takes more memory than its bound; names the column.
    OSError
        If a file cannot be read.
    """
    for place in files_in(path, ".parquet"):
        file, bound = open_parquet(place, max_nbytes=max_nbytes)
        names = file.schema.names
        again = next((name for name in names if names.count(name) > 1), None)
        if again is not None:
            raise FormatError(f"{str(place)!r} must have column {again!r} once, it is there again")
        table = file.read(range(file.num_groups), names, bound)
        try:
            table.validate(full=True)
        except pa.ArrowInvalid as error:
            raise FormatError(f"{str(place)!r} must hold valid values, it is damaged: {error}") from error
        yield table, bound


def files_in(path: str | os.PathLike[str], suffix: str) -> list[Path]:
    """List a file, or the files of a suffix in a folder and the folders in it, by name.

    Raises
    ------
    FormatError
        If there is none.
    OSError
        If there is no such path.
    """
    place = Path(path)
    if not place.is_dir():
        place.stat()
        return [place]
    found = sorted(file for file in place.rglob(f"*{suffix}") if file.is_file())
    if not found:
        raise FormatError(f"{str(place)!r} must be a folder with {suffix} files, it has none")
    return found

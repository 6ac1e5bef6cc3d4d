"""Files of a replay table: its steps as a buffer's file, its fragments as record batches, the rest as plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from samplebatch.batch.arrow import metadata_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import FormatError
from samplebatch.storage.arrow_file import arrow_writer, open_arrow, read_arrow, write_arrow
from samplebatch.storage.batch_table import batch_in, to_table
from samplebatch.storage.buffer_file import read_buffer

Plain = dict[str, Any]
_LEFT = "left"


def write_state(state: Mapping[str, Any], folder: Path, stem: str) -> Plain:
    """Write the frozen state of a table to files named after `stem`, and return the parts that are in none of them.

    Raises
    ------
    ColumnTypeError
        If a column holds objects that cannot be pickled; names it.
    OSError
        If a file cannot be written.
    """
    found = {name: value for name, value in state.items() if name not in ("buffer", _LEFT, "fragments")}
    if "fragments" in state:
        return found | {"fragments": _write_fragments(state["fragments"], folder, stem)}
    with state["buffer"] as buffer:
        buffer.write(folder / f"{stem}.arrow")
    if state[_LEFT] is not None:
        write_arrow(SampleBatch({_LEFT: state[_LEFT]}), folder / f"{stem}-{_LEFT}.arrow")
    return found | {"buffer": f"{stem}.arrow", _LEFT: None if state[_LEFT] is None else f"{stem}-{_LEFT}.arrow"}


def read_state(plain: Plain, folder: Path, *, allow_pickle: bool = False) -> Plain:
    """Return the state of a table from its files.

    Raises
    ------
    FormatError
        If a file is damaged, is another, or lies elsewhere.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false; names it.
    OSError
        If a file cannot be read.
    """
    if "fragments" in plain:
        return plain | {"fragments": _read_fragments(plain["fragments"], folder, allow_pickle=allow_pickle)}
    left = plain[_LEFT]
    return plain | {
        "buffer": read_buffer(ReplayBuffer, _file(folder, plain["buffer"]), allow_pickle=allow_pickle, missing={}),
        _LEFT: None if left is None else np.array(read_arrow(_file(folder, left), memory_map=False)[_LEFT]),
    }


def _file(folder: Path, name: str) -> Path:
    """Return the path of a file that the rest of a state names, which must lie in the folder."""
    if Path(name).name != name:
        raise FormatError(f"the files of a table must lie in its folder, {name!r} does not")
    return folder / name


def _write_fragments(fragments: list[Any], folder: Path, stem: str) -> Plain:
    """Write fragments as record batches, into one file for all that have the same schema."""
    files: dict[bytes, tuple[int, Any]] = {}
    about: dict[bytes, int] = {}
    places: list[list[int]] = []
    with ExitStack() as stack:
        for fragment in fragments:
            table = to_table(fragment).combine_chunks()
            # Metadata of whole batches, such as numbers of steps, differ from one to the next.
            schema = table.schema.remove_metadata()
            form = schema.serialize().to_pybytes()
            if form not in files:
                path = folder / f"{stem}-{len(files)}.arrow"
                files[form] = len(files), stack.enter_context(arrow_writer(path, schema))
            number, writer = files[form]
            told = json.dumps({key.decode(): text.decode() for key, text in (table.schema.metadata or {}).items()})
            writer.write_batch(pa.record_batch([column.chunk(0) for column in table.columns], schema=schema))
            places.append([number, about.setdefault(told.encode(), len(about))])
    return {
        "files": [f"{stem}-{i}.arrow" for i in range(len(files))],
        "about": [*map(json.loads, about)],
        "places": places,
    }


def _read_fragments(plain: Plain, folder: Path, *, allow_pickle: bool = False) -> list[Any]:
    files = [open_arrow(_file(folder, name), memory_map=False) for name in plain["files"]]
    groups = [0] * len(files)
    found = []
    for number, about in plain["places"]:
        file, bound = files[number]
        table = file.read([groups[number]], file.schema.names, bound)
        groups[number] += 1
        table = table.replace_schema_metadata(plain["about"][about])
        must = f"{file.name!r} must be of fragments of a table"
        found.append(batch_in(table, metadata_of(table.schema), must, bound, allow_pickle=allow_pickle))
    if any(file.num_groups != count for (file, _), count in zip(files, groups, strict=True)):
        raise FormatError("the files of a table must have the fragments that are listed, they have others")
    return found

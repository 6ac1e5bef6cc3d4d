"""RLlib's offline data as JSON: a batch a line, some columns packed, as its `JsonWriter` writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.concat import concat_samples
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.packed import unpack
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.convert.parquet_tables import files_in
from samplebatch.convert.rllib_packing import pack
from samplebatch.convert.steps import Source, arrays_of, as_flat, fragments_of
from samplebatch.errors import ColumnTypeError, FormatError
from samplebatch.storage.arrow_file import replacing

_COMPRESSED = (names.OBS, names.NEXT_OBS)
_GROWTH = 32
"""Bytes of memory that a character of JSON may become: two make a number in a list, or an empty list."""


def read_rllib_json(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, max_nbytes: int | None = None
) -> SampleBatch | MultiAgentBatch:
    """Read the batches of RLlib's JSON files, and join them.

    Packed columns are pickles; those of arrays and plain values are read as data, without running them.

    Parameters
    ----------
    path
        A file, or a folder of files that end in `.json`.
    allow_pickle
        Whether to unpickle packed columns of other objects. Only for files whose writer you trust: a pickle can run
        any code.
    max_nbytes
        Bytes of memory that may be made of each file; 256 MiB or 1024 times its own, whichever is more, if None.

    Raises
    ------
    FormatError
        If a line is no batch as RLlib writes it; names file, line and column.
    UntrustedPickleError
        If a column is of packed objects, and `allow_pickle` is false; names it.
    CapacityError
        If more memory would be made of a file than `max_nbytes`.
    ColumnMismatchError
        If the batches differ in their columns.
    OSError
        If a file cannot be read.
    """
    batches: list[SampleBatch | MultiAgentBatch] = []
    for file in files_in(path, ".json"):
        bound = MemoryBound(repr(str(file)), file.stat().st_size, max_nbytes)
        with open(file, encoding="utf-8") as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        batches.append(_read_line(line, f"line {number} of {str(file)!r}", bound, allow_pickle))
            except UnicodeDecodeError as error:
                raise FormatError(f"{str(file)!r} must be text, and it is not: {error}") from error
    if not batches:
        raise FormatError(f"{os.fspath(path)!r} must have batches of RLlib, it has none")
    return concat_samples(batches)


def _read_line(line: str, where: str, bound: MemoryBound, allow_pickle: bool) -> SampleBatch | MultiAgentBatch:
    bound.take(_GROWTH * len(line), where)
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} must be JSON, and it is not: {error}") from error
    kind = found.pop("type", None) if isinstance(found, dict) else None

    def batch_of(columns: Any) -> SampleBatch:
        if not isinstance(columns, dict):
            raise FormatError(f"{where} must have columns by name, it has not")
        return SampleBatch({name: unpacked(value, name) for name, value in columns.items()})

    def unpacked(value: Any, name: str) -> Any:
        subject = f"column {name!r} in {where}"
        return unpack(value, subject, bound, allow_pickle=allow_pickle) if isinstance(value, str) else value

    if kind == "SampleBatch":
        return batch_of(found)
    policies = found.get("policy_batches") if isinstance(found, dict) else None
    if kind != "MultiAgentBatch" or not isinstance(policies, dict):
        raise FormatError(f"{where} must be a SampleBatch or MultiAgentBatch of RLlib, it is neither")
    count = found.get("count")
    if type(count) is not int or count < 0:
        raise FormatError(f"{where} must have a count of environment steps, it has not")
    return MultiAgentBatch({policy: batch_of(columns) for policy, columns in policies.items()}, count)


def write_rllib_json(
    source: Source, path: str | os.PathLike[str], *, compress_columns: Iterable[str] = _COMPRESSED
) -> None:
    """Write experience as RLlib's offline data: a line for each fragment, the file whole or not at all.

    Parameters
    ----------
    source
        A batch of one or several policies, a buffer, or an iterable of fragments.
    path
        The file; RLlib looks for names that end in `.json`.
    compress_columns
        Columns to pack as RLlib does, which keeps their dtypes; all others become numbers in lists. Nested ones are
        packed in any case.

    Raises
    ------
    ColumnTypeError
        If rows vary in shape, or hold objects that JSON has no form for; names the column.
    EmptyBufferError, SequenceError
        If there are no steps, or they are time-major.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/steps.json"
    >>> write_rllib_json(SampleBatch(obs=[[0.5], [1.0]], rewards=[1.0, 2.0]), path)
    >>> read_rllib_json(path)["obs"].tolist()
    [[0.5], [1.0]]
    """
    packed = frozenset(compress_columns)
    with replacing(path) as file:
        for fragment in fragments_of(source):
            file.write(json.dumps(_line(fragment, packed)).encode() + b"\n")


def _line(fragment: SampleBatch | MultiAgentBatch, packed: frozenset[str]) -> dict[str, Any]:
    if isinstance(fragment, SampleBatch):
        return {"type": "SampleBatch", **_columns(fragment, packed)}
    policies = {str(policy): _columns(as_flat(batch), packed) for policy, batch in fragment.policy_batches.items()}
    return {"type": "MultiAgentBatch", "count": fragment.count, "policy_batches": policies}


def _columns(batch: SampleBatch, packed: frozenset[str]) -> dict[str, Any]:
    columns = {}
    for name in batch:
        values = arrays_of(batch, name)
        # RLlib reads nested columns only if they are packed.
        columns[name] = pack(values) if name in packed or not isinstance(values, np.ndarray) else _as_json(name, values)
    return columns


def _as_json(path: str, values: npt.NDArray[Any]) -> Any:
    rows = values.tolist()
    if values.dtype.kind in "biuf":
        return rows
    try:
        json.dumps(rows)
    except (TypeError, ValueError) as error:
        raise ColumnTypeError(f"column {path!r} must hold what JSON has a form for, got {values.dtype}") from error
    return rows

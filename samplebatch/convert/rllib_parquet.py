"""RLlib's offline data as Parquet: rows of steps, or whole episodes in msgpack, as its new API stack keeps them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from samplebatch import names
from samplebatch.batch.packed import looks_packed, unpack
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.types import named_dtype
from samplebatch.column.unpickling import unpickle
from samplebatch.convert.parquet_tables import read_tables
from samplebatch.convert.ray_types import without_ray_types
from samplebatch.convert.rllib_episodes import AGENT_ID, MODULE_ID, EpisodeParts, to_rllib_episodes, trim
from samplebatch.convert.rllib_packing import pack
from samplebatch.convert.steps import (
    Source,
    arrays_of,
    as_steps,
    flags_of,
    gather_leaves,
    join_episodes,
    require_columns,
)
from samplebatch.errors import ColumnTypeError, FormatError, SampleBatchError, require
from samplebatch.storage.arrow_file import replacing

_EPISODE = "item"
"""The column in which Ray Data keeps items that are no dicts."""

_COMPRESSED = (names.OBS, names.NEXT_OBS)


# Reading


def read_rllib_parquet(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, max_nbytes: int | None = None
) -> SampleBatch:
    """Read the steps or episodes that RLlib's new API stack has recorded in Parquet files.

    Packed values are pickles; those of arrays and plain values are read as data, without running them.

    Parameters
    ----------
    path
        A file, or a folder of files that end in `.parquet`, in folders of their own or not.
    allow_pickle
        Whether to unpickle other objects. Only for files whose writer you trust: a pickle can run any code.
    max_nbytes
        Bytes of memory that may be made of each file; 256 MiB or 1024 times its own, whichever is more, if None.

    Raises
    ------
    FormatError
        If a file is damaged, or a value in it is not as RLlib writes it; names file and column.
    UntrustedPickleError
        If a value is a packed object, and `allow_pickle` is false; names the column.
    CapacityError
        If more memory would be made of a file than `max_nbytes`; names the column.
    ColumnMismatchError
        If files differ in their columns, or packed values of one in how they are nested.
    MissingExtraError
        If msgpack is not installed and there are episodes in it.
    OSError
        If a file cannot be read.
    """
    batches: list[SampleBatch] = []
    for table, bound in read_tables(path, max_nbytes):
        if table.column_names == [_EPISODE]:
            batches += _read_episodes(table.column(0), bound, allow_pickle)
        else:
            batches.append(_read_steps(table, bound, allow_pickle))
    return join_episodes([batch for batch in batches if batch.count] or [SampleBatch()])


def _read_steps(table: pa.Table, bound: MemoryBound, allow_pickle: bool) -> SampleBatch:
    columns: dict[str, Any] = {}
    packed: dict[str, list[Any]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count == len(column):
            continue
        # Columns of ids are strings, too, but are not packed.
        text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        if text and name not in (names.EPS_ID, AGENT_ID, MODULE_ID) and looks_packed(column[0].as_py()):
            subject = f"column {name!r}"
            packed[name] = [unpack(row, subject, bound, allow_pickle=allow_pickle) for row in column.to_pylist()]
        else:
            columns[name] = column
    batch = SampleBatch.from_arrow(without_ray_types(table.select(list(columns))), allow_pickle=allow_pickle)
    ordered = {
        name: gather_leaves(packed[name], name) if name in packed else batch[name]
        for name in table.column_names
        if name in packed or name in columns
    }
    return SampleBatch(ordered)


def _read_episodes(column: pa.ChunkedArray, bound: MemoryBound, allow_pickle: bool) -> list[SampleBatch]:
    msgpack = require("msgpack", "rllib")
    batches = []
    for number, data in enumerate(column.to_pylist()):
        subject = f"episode {number}"
        if not isinstance(data, bytes):
            raise FormatError(f"{subject} must be bytes of msgpack, got a {type(data).__name__}")
        bound.take(16 * len(data), subject)

        def decode(found: dict[Any, Any], subject: str = subject) -> Any:
            return _decode(found, subject, allow_pickle)

        try:
            state = msgpack.unpackb(data, object_hook=decode, strict_map_key=False)
            batches.append(_parts_in(state).to_batch())
        except SampleBatchError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise FormatError(f"{subject} must be an episode of RLlib in msgpack, and it is not: {error}") from error
    return batches


def _parts_in(state: dict[str, Any]) -> EpisodeParts:
    """Take the state of an episode apart, as `SingleAgentEpisode.get_state` gives it."""

    def cut(name: str, of: Any = state) -> Any:
        return trim(of[name]["data"], int(of[name]["lookback"]))

    extras = state["extra_model_outputs"] or {}
    return EpisodeParts(
        str(state["id_"]),
        cut("observations"),
        cut("infos"),
        cut("actions"),
        cut("rewards"),
        {str(name): cut(name, extras) for name in extras},
        bool(state["is_terminated"]),
        bool(state["is_truncated"]),
        int(state["t_started"]),
    )


def _decode(found: dict[Any, Any], subject: str, allow_pickle: bool) -> Any:
    """Make an array or a number of the dict by which `msgpack_numpy` describes it."""
    if found.get(b"complex") is True:
        return complex(found[b"data"])
    if b"nd" not in found:
        return found
    if found.get(b"kind") == b"O":
        return unpickle([found[b"data"]], subject, allow_pickle=allow_pickle)[0]
    if found.get(b"kind") == b"V" or not isinstance(found[b"type"], str):
        raise FormatError(f"{subject} must have arrays of numbers, it has others")
    values = np.frombuffer(found[b"data"], named_dtype(found[b"type"]))
    return values.reshape(found[b"shape"]) if found[b"nd"] is True else values[0]


# Writing


def write_rllib_parquet(
    source: Source, path: str | os.PathLike[str], *, compress_columns: Iterable[str] = _COMPRESSED
) -> None:
    """Write steps as a Parquet file of rows, as RLlib's offline stack reads them (`input_read_method="read_parquet"`).

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.
    path
        The file.
    compress_columns
        Columns to pack row by row as RLlib does, which keeps shapes of two dimensions and more; nested ones have to be.

    Raises
    ------
    ColumnNotFoundError
        If there are no rewards, or nothing tells episodes apart.
    ColumnTypeError
        If a column that is not packed is nested, or has rows that vary in shape; names it.
    EmptyBufferError, SequenceError
        If there are no steps, or some of an episode are missing.
    OSError
        If the file cannot be written.
    """
    from pyarrow import parquet

    steps = as_steps(source)
    require_columns(steps.batch, names.REWARDS)
    packed = frozenset(compress_columns)
    terminated, truncated = flags_of(steps.batch)
    ids = np.asarray(steps.batch[names.EPS_ID]) if names.EPS_ID in steps.batch else steps.numbers()
    flags = {names.TERMINATEDS: pa.array(terminated), names.TRUNCATEDS: pa.array(truncated)}
    columns: dict[str, Any] = {names.EPS_ID: pa.array([str(number) for number in ids.tolist()]), **flags}
    for name in steps.batch:
        if name not in columns and name != names.DONES:
            columns[name] = _packed_rows(steps.batch, name) if name in packed else _plain_rows(steps.batch, name)
    with replacing(path) as file:
        parquet.write_table(pa.table(columns), file)


def _packed_rows(batch: SampleBatch, name: str) -> pa.Array:
    return pa.array([pack(row[name]) for row in batch.select(*dict.fromkeys((name, names.REWARDS))).rows()])


def _plain_rows(batch: SampleBatch, name: str) -> pa.Array:
    values = arrays_of(batch, name)
    if not isinstance(values, np.ndarray):
        raise ColumnTypeError(f"column {name!r} is nested and must be packed; name it in compress_columns")
    return pa.array(list(values) if values.ndim == 2 else values.tolist() if values.ndim > 2 else values)


def write_rllib_episodes(source: Source, path: str | os.PathLike[str]) -> None:
    """Write episodes as a Parquet file of msgpack, as RLlib's offline stack reads them (`input_read_episodes=True`).

    Raises
    ------
    ColumnNotFoundError, ColumnTypeError, EmptyBufferError, SequenceError
        As `to_rllib_episodes` does.
    MissingExtraError
        If RLlib or msgpack is not installed.
    OSError
        If the file cannot be written.
    """
    from pyarrow import parquet

    msgpack = require("msgpack", "rllib")
    episodes: list[Any] = to_rllib_episodes(as_steps(source).batch)
    rows = [msgpack.packb(episode.get_state(), default=_encode) for episode in episodes]
    with replacing(path) as file:
        parquet.write_table(pa.table({_EPISODE: pa.array(rows, pa.large_binary())}), file)


def _encode(value: Any) -> Any:
    """Describe an array or a number as `msgpack_numpy` does."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return value.tolist()
    if isinstance(value, np.ndarray):
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": value.tobytes()}
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(f"an episode must have values that msgpack has a form for, got a {type(value).__name__}")

"""Batches of every type as the tables that files hold, and tables of files as the batches that they were."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import names
from samplebatch.batch.arrow import METADATA_KEY, Parts, from_policy_table, from_table, metadata_of
from samplebatch.batch.concat import concat_samples
from samplebatch.batch.episodes import number_env_steps
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE
from samplebatch.batch.nested.tensors import tree_to
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.targets import Target
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.errors import ColumnTypeError, FormatError
from samplebatch.storage.damage import name_damage
from samplebatch.storage.selection import Filters, RowFilter, choose
from samplebatch.storage.table_file import TableFile, name_file_damage

AnyBatch = SampleBatch | MultiAgentBatch | Batch
BatchT = TypeVar("BatchT", bound=AnyBatch)

_EMPTY = "empty"
"""Key of a nested batch's metadata: paths to the values without rows, and whether they are None or reserved names."""

_POLICY = "policy_id"


def convert(batch: BatchT, target: Target) -> BatchT:
    """Convert the values of a batch to a target's form."""
    return cast("BatchT", tree_to(batch, target) if isinstance(batch, Batch) else batch._to(target))


def to_table(batch: AnyBatch) -> pa.Table:
    """Lay a batch out as a table, with metadata that says of which type it is.

    Raises
    ------
    ColumnTypeError
        If a nested batch has a single value, which is no column; names it.
    SequenceError
        If the batch is time-major.
    """
    table = batch.to_arrow()
    if not isinstance(batch, Batch):
        return table
    about: dict[str, Any] = metadata_of(table.schema) or {}
    metadata = json.dumps({**about, _EMPTY: list(_empty_paths(batch, []))}).encode()
    return table.replace_schema_metadata({**(table.schema.metadata or {}), METADATA_KEY: metadata})


def is_compressed(batch: AnyBatch) -> bool:
    """Tell whether a column of a batch is compressed; those of nested batches never are."""
    parts: Iterable[SampleBatch] = (batch,) if isinstance(batch, SampleBatch) else ()
    if isinstance(batch, MultiAgentBatch):
        parts = batch.policy_batches.values()
    return any(column.kind == CompressedColumn.kind for part in parts for column in part._all().values())


def _empty_paths(batch: Any, path: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Walk through the None and the reserved names of a nested batch; true stands for None."""
    for name, value in batch.__dict__.items():
        here = [*path, name]
        if value is None:
            yield here, True
        elif KINDS[type(value)] == NODE:
            if value.__dict__:
                yield from _empty_paths(value, here)
            else:
                yield here, False


def _as_nested(batch: SampleBatch, empty: Any) -> Batch:
    """Undo the flattening of a nested batch, and put values without rows where they were."""
    nested = batch.as_batch()
    for path, is_none in empty:
        inner: Any = nested
        for name in path[:-1]:
            inner = inner.__dict__.setdefault(str(name), Batch())
        inner.__dict__[str(path[-1])] = None if is_none else Batch()
    return nested


def kind_of(about: Mapping[str, Any] | None) -> str:
    """Read the kind of a table from its schema's metadata: the name of a class, or "table"."""
    kind = (about or {}).get("type")
    return kind if isinstance(kind, str) else "table"


def batch_in(
    table: pa.Table, about: dict[str, Any] | None, must: str, bound: MemoryBound, *, allow_pickle: bool = False
) -> AnyBatch:
    """View the table of a file as the batch that its metadata says it is.

    Parameters
    ----------
    table
        The table, of which the sizes of buffers have been checked.
    about
        What `metadata_of` read in its schema.
    must
        What the file must be, for errors: the first half of a sentence, which names it.
    bound
        What memory may be made of the file.
    allow_pickle
        Whether columns may be unpickled.

    Raises
    ------
    FormatError
        If no batch wrote it, or it does not fit its own description.
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false; names it.
    """
    kind = kind_of(about)
    if about is None or kind not in ("SampleBatch", "MultiAgentBatch"):
        advice = "SampleBatch.from_arrow may take it" if kind == "table" else f"{kind}.load may take it"
        raise FormatError(f"{must}, got a {'table of another program' if kind == 'table' else kind}; {advice}")
    try:
        if kind == "MultiAgentBatch":
            policies, env_steps = from_policy_table(table, about=about, allow_pickle=allow_pickle, bound=bound)
            return MultiAgentBatch({policy: SampleBatch._of(*parts) for policy, parts in policies.items()}, env_steps)
        return _one_batch(from_table(table, about=about, allow_pickle=allow_pickle, bound=bound), about)
    except (pa.ArrowException, ColumnTypeError) as error:
        raise FormatError(f"{must}, and it does not fit its own description: {error}") from error


def _one_batch(parts: Parts, about: Mapping[str, Any]) -> AnyBatch:
    """Make a batch that has no policies of its parts and its metadata."""
    batch = SampleBatch._of(*parts)
    return _as_nested(batch, about[_EMPTY]) if _EMPTY in about else batch


def read_batch(
    file: TableFile,
    bound: MemoryBound,
    must: str,
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    *,
    allow_pickle: bool = False,
) -> AnyBatch:
    """Read the batch in a file, or columns and rows of it.

    Parameters
    ----------
    file
        The file.
    bound
        What memory may be made of it.
    must
        What the file must be, for errors.
    columns
        Names of the columns to read; None for all.
    filters
        Conditions on the rows to read.

    Raises
    ------
    FormatError, UntrustedPickleError
        As `batch_in` does.
    CapacityError
        If more memory would be made of the file than the bound allows; names the column.
    ColumnNotFoundError, ArgumentError
        If columns or filters name what is not there, or what cannot be compared.
    """
    with name_file_damage(file.name, file.form), name_damage(repr(file.name)):
        if filters is not None and columns is not None and (more := _counting(file, columns)):
            whole = read_batch(file, bound, must, [*columns, *more], filters, allow_pickle=allow_pickle)
            return select_columns(whole, columns)
        chosen, about = _project(file, columns)
        if filters is None:
            parts = file.view(chosen)
            if parts is not None and about is not None:
                return _one_batch(parts, about)
            table = file.read(range(file.num_groups), chosen, bound)
            return batch_in(table, about, must, bound, allow_pickle=allow_pickle)
        return _read_rows(file, bound, must, chosen, about, filters, allow_pickle=allow_pickle)


def read_group(
    file: TableFile, group: int, columns: Sequence[str] | None, bound: MemoryBound, *, allow_pickle: bool = False
) -> AnyBatch:
    """Read the batch that a group of rows makes by itself; raises as `read_batch` does."""
    must = f"{file.name!r} must be a part of a dataset"
    with name_file_damage(file.name, file.form), name_damage(repr(file.name)):
        chosen, about = _project(file, columns)
        return _batch_of_group(file, group, chosen, about, bound, must, allow_pickle=allow_pickle)


def select_columns(batch: AnyBatch, columns: Sequence[str]) -> AnyBatch:
    """View some columns of a batch; of several policies, those that each has."""
    if isinstance(batch, MultiAgentBatch):
        parts = {
            policy: part.select(*[column for column in columns if column in part]) for policy, part in batch.items()
        }
        return MultiAgentBatch(parts, batch.count)
    if isinstance(batch, SampleBatch):
        return batch.select(*columns)
    return Batch({column: batch[column] for column in columns})


def _counting(file: TableFile, columns: Sequence[str]) -> list[str]:
    """List columns that count the steps of a flat batch, a policy's each, where none of those asked for does."""
    about = file.about
    if about is None or kind_of(about) not in ("SampleBatch", "MultiAgentBatch"):
        return []
    if any(map(names.counts_steps, columns)):
        return []
    policies = about["policies"].values() if kind_of(about) == "MultiAgentBatch" else [{"columns": file.schema.names}]
    return list(dict.fromkeys(name for part in policies for name in [*filter(names.counts_steps, part["columns"])][:1]))


def _project(file: TableFile, columns: Sequence[str] | None) -> tuple[list[str], dict[str, Any] | None]:
    """Return the table's columns to be read, and the metadata of a table that has no others."""
    known, about = file.schema.names, file.about
    if columns is None or about is None:
        return choose(columns, known, repr(file.name)), about
    if kind_of(about) != "MultiAgentBatch":
        about = {**about, "lists": [name for name in about["lists"] if name in known]}
        return choose(columns, known, repr(file.name)), about
    own = list(dict.fromkeys(name for part in about["policies"].values() for name in part["columns"]))
    asked = set(choose(columns, own, repr(file.name)))
    policies = {
        policy: {**part, "columns": {name: placed for name, placed in part["columns"].items() if name in asked}}
        for policy, part in about["policies"].items()
    }
    placed = {_POLICY}.union(*(part["columns"].values() for part in policies.values()))
    return [name for name in known if name in placed], {**about, "policies": policies}


def _batch_of_group(
    file: TableFile,
    group: int,
    chosen: Sequence[str],
    about: dict[str, Any] | None,
    bound: MemoryBound,
    must: str,
    *,
    allow_pickle: bool = False,
) -> AnyBatch:
    parts = file.view(chosen) if file.num_groups == 1 else None
    if parts is not None and about is not None:
        return _one_batch(parts, about)
    table = file.read([group], chosen, bound)
    if about is not None and kind_of(about) == "MultiAgentBatch":
        labels = table.column(_POLICY)
        labels.validate(full=True)
        found = {pair["values"]: pair["counts"] for pair in labels.value_counts().to_pylist()}
        policies = {policy: {**part, "rows": found.get(policy, 0)} for policy, part in about["policies"].items()}
        about = {**about, "policies": {policy: part for policy, part in policies.items() if part["rows"]}}
    return batch_in(table, about, must, bound, allow_pickle=allow_pickle)


def _read_rows(
    file: TableFile,
    bound: MemoryBound,
    must: str,
    chosen: Sequence[str],
    about: dict[str, Any] | None,
    filters: Filters,
    *,
    allow_pickle: bool = False,
) -> AnyBatch:
    """Read the rows that conditions hold for, group by group: those that have none are read no further."""
    condition = RowFilter(filters, file.schema, repr(file.name))
    found: list[AnyBatch] = []
    for group in file.matching(condition):
        looked_at = file.read([group], condition.names, bound)
        # Strings that end before they begin are compared beyond all memory.
        looked_at.validate(full=True)
        kept = condition.rows(looked_at)
        if len(kept):
            whole = _batch_of_group(file, group, chosen, about, bound, must, allow_pickle=allow_pickle)
            found.append(whole if len(kept) == file.group_rows[group] else take_rows(whole, kept))
    if found:
        joined = join(found)
        if isinstance(joined, MultiAgentBatch):
            return MultiAgentBatch(joined.policy_batches, _env_steps(joined.policy_batches))
        return joined
    table = file.read([], chosen, bound)
    if about is not None and kind_of(about) == "MultiAgentBatch":
        about = {**about, "policies": {}, "env_steps": 0}
    return batch_in(table, about, must, bound, allow_pickle=allow_pickle)


def take_rows(batch: AnyBatch, rows: npt.NDArray[np.int64]) -> AnyBatch:
    """Gather rows of the table that a batch makes: steps, sequences, or steps of policy after policy."""
    if isinstance(batch, MultiAgentBatch):
        parts, start = {}, 0
        for policy, part in batch.items():
            stop = start + part.count
            own = rows[(rows >= start) & (rows < stop)] - start
            if len(own):
                parts[policy] = part.take(own)
            start = stop
        return MultiAgentBatch(parts, _env_steps(parts))
    if isinstance(batch, SampleBatch):
        return batch.take_sequences(rows) if names.SEQ_LENS in batch else batch.take(rows)
    return batch[rows]


def join(batches: Sequence[AnyBatch]) -> AnyBatch:
    """Join batches of one type; raises as `concat_samples` and `Batch.cat` do."""
    if len(batches) == 1:
        return batches[0]
    if isinstance(batches[0], Batch):
        return Batch.cat([batch for batch in batches if isinstance(batch, Batch)])
    joined: AnyBatch = concat_samples([batch for batch in batches if not isinstance(batch, Batch)])
    return joined


def _env_steps(parts: Mapping[str, SampleBatch]) -> int:
    """Count the environment steps of rows: by episode and time where every policy has these, else the most rows."""
    filled = [part for part in parts.values() if part.count]
    if not filled:
        return 0
    if all(names.EPS_ID in part and names.T in part for part in filled):
        eps_id, t = (np.concatenate([np.asarray(part[name]) for part in filled]) for name in (names.EPS_ID, names.T))
        return len(number_env_steps(eps_id, t).episode)
    return max(part.count for part in filled)

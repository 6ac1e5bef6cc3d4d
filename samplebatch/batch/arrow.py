"""Zero-copy conversion between batches and Arrow tables.

Flags, nesting and each policy's columns are stored as JSON in the schema's metadata under `METADATA_KEY`. A table
without the key `METADATA_KEY` is read as plain columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import names
from samplebatch.arguments import describe_value
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.flags import DEFAULT, Flags, describe_flags, read_declarations
from samplebatch.batch.sequences import is_per_sequence
from samplebatch.batch.tree import Structure, leaf_names
from samplebatch.column.arrow import FieldReader, Recent, arrow_field_and_array, check_size
from samplebatch.column.arrow_bodies import Body
from samplebatch.column.interface import Column
from samplebatch.column.memory import MemoryBound, check_rows
from samplebatch.column.plan import Plan
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import FormatError, SampleBatchError, SequenceError
from samplebatch.names import PolicyID

METADATA_KEY = b"samplebatch"
_VERSION = 1
_POLICY = "policy_id"

Parts = tuple[dict[str, Column], Mapping[str, Structure], Flags]
"""Parts of a SampleBatch: columns, structures of nested columns, flags."""


def to_table(columns: dict[str, Column], nested: Mapping[str, Structure], flags: Flags) -> pa.Table:
    """Return a table with one row per step or, if the batch has sequences, one row of lists per sequence.

    Raises SequenceError if sequences are time-major.
    """
    fields, arrays = [], []
    offsets = None
    if names.SEQ_LENS in columns:
        if flags.time_major:
            raise SequenceError(
                "an Arrow table needs a batch-major batch, got a time-major one; call to_batch_major() first"
            )
        offsets = _offsets(columns[names.SEQ_LENS], flags)
    lists = []
    for name, column in columns.items():
        field, array = arrow_field_and_array(column, name)
        if offsets is not None and not is_per_sequence(columns, name, flags):
            array = pa.LargeListArray.from_arrays(offsets, array)
            field = pa.field(name, array.type, nullable=False, metadata=field.metadata)
            lists.append(name)
        fields.append(field)
        arrays.append(array)
    if flags is DEFAULT and not nested and not lists:
        metadata = _PLAIN
    else:
        metadata = _metadata({"type": "SampleBatch", "version": _VERSION, **_describe(nested, flags), "lists": lists})
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata))


def from_table(
    source: Any, *, about: dict[str, Any] | None = None, allow_pickle: bool = False, bound: MemoryBound | None = None
) -> Parts:
    """View a table as a batch's columns, structures and flags; `to_table` is the inverse.

    The table may lack columns of the original batch or have additional columns. A nested column with missing or
    additional leaves becomes plain columns with dots in their names. `about` is the batch metadata; None reads the
    metadata from the table's schema. Raises FormatError if `to_table` did not write the metadata. Raises
    ColumnTypeError if a column has nulls or an unsupported type. Raises UntrustedPickleError if a column is pickled and
    `allow_pickle` is false. Raises CapacityError if Python objects exceed `bound`; if `bound` is None, the table's size
    determines the bound.
    """
    table = as_table(source)
    reader = _reader_of(table.schema) if about is None else make_reader(table.schema, about)
    return reader.read(table, bound or bound_of(table), allow_pickle=allow_pickle)


def to_policy_table(policies: dict[PolicyID, Parts], env_steps: int) -> pa.Table:
    """Concatenate the tables of several policies, and add a column `policy_id`.

    Integer ids are stored as strings in the column and as integers in the metadata.
    """
    labels = names.label_policies(policies)
    tables = {labels[policy]: to_table(*parts) for policy, parts in policies.items()}
    placed = _assign_columns(tables)
    fields: dict[str, pa.Field] = {}
    for label, table in tables.items():
        for field in table.schema:
            name = placed[label][field.name]
            fields[name] = field.with_name(name)
    chunks: dict[str, list[pa.Array]] = {name: [] for name in fields}
    for label, table in tables.items():
        policy_columns = {placed[label][name]: table.column(name) for name in table.column_names}
        for name, field in fields.items():
            chunks[name] += (
                policy_columns[name].chunks if name in policy_columns else [pa.nulls(table.num_rows, field.type)]
            )
    everywhere = {name for name in fields if all(name in placed[label].values() for label in tables)}
    schema = [pa.field(_POLICY, pa.dictionary(pa.int32(), pa.string()), nullable=False)]
    schema += [field.with_nullable(field.nullable or name not in everywhere) for name, field in fields.items()]
    numbers = {label: {"id": int(policy)} for policy, label in labels.items() if not isinstance(policy, str)}
    about = {
        "type": "MultiAgentBatch",
        "version": _VERSION,
        "env_steps": env_steps,
        "policies": {
            label: {
                **(metadata_of(table.schema) or {}),
                "rows": table.num_rows,
                "columns": placed[label],
                **numbers.get(label, {}),
            }
            for label, table in tables.items()
        },
    }
    columns = [_policy_ids(tables)]
    columns += [pa.chunked_array(chunks[name], field.type) for name, field in fields.items()]
    return pa.Table.from_arrays(columns, schema=pa.schema(schema, _metadata(about)))


def _assign_columns(tables: dict[str, pa.Table]) -> dict[str, dict[str, str]]:
    """Map each policy's columns to columns of the joint table; columns of equal type and metadata share one column."""
    kinds: dict[str, set[Any]] = {}
    for table in tables.values():
        for field in table.schema:
            kinds.setdefault(field.name, set()).add((field.type, frozenset((field.metadata or {}).items())))
    shared = {name for name, alike in kinds.items() if len(alike) == 1} - {_POLICY}
    reserved = {_POLICY, *shared}
    placed: dict[str, dict[str, str]] = {}
    for policy, table in tables.items():
        placed[policy] = {name: name for name in table.column_names}
        for name in placed[policy].keys() - shared:
            unique = f"{policy}/{name}"
            while unique in reserved:
                unique += "_"
            reserved.add(unique)
            placed[policy][name] = unique
    return placed


def as_table(source: Any) -> pa.Table:
    """Convert an object with the Arrow PyCapsule interface to a table; return tables unchanged."""
    return source if isinstance(source, pa.Table) else pa.table(source)


def bound_of(table: pa.Table, max_nbytes: int | None = None) -> MemoryBound:
    """Return the memory bound for reading a table."""
    return MemoryBound("the table", table.get_total_buffer_size(), max_nbytes)


def from_policy_table(
    source: Any, *, about: dict[str, Any] | None = None, allow_pickle: bool = False, bound: MemoryBound | None = None
) -> tuple[dict[PolicyID, Parts], int]:
    """View a table as each policy's batch; return these views and the number of environment steps.

    The inverse is `to_policy_table`.

    `about` is the batch metadata; None reads the metadata from the table's schema. Raises FormatError if the metadata
    was not written by `to_policy_table`, or does not match the table's rows.
    """
    table = as_table(source)
    about = about or metadata_of(table.schema) or {}
    if about.get("type") != "MultiAgentBatch":
        raise FormatError(
            f"the table must contain a MultiAgentBatch, got {about.get('type', 'one without metadata of a batch')!r}"
        )
    bound = bound or bound_of(table)
    policies: dict[PolicyID, Parts] = {}
    start = 0
    try:
        for label, part in about["policies"].items():
            policy = part.get("id", label)
            if policy in policies or type(policy) not in (str, int):
                raise FormatError(f"policy {label!r} must have a unique id, a string or an integer, got {policy!r}")
            rows = table.slice(start, _count(part["rows"]))
            start += rows.num_rows
            columns = [rows.column(placed) for placed in part["columns"].values()]
            fields = [table.schema.field(placed).with_name(name) for name, placed in part["columns"].items()]
            policy_table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
            policies[policy] = TableReader(policy_table.schema, part).read(
                policy_table, bound, allow_pickle=allow_pickle
            )
            if rows.num_rows != part["rows"]:
                raise FormatError(f"policy {policy!r} must have {part['rows']} rows, got {rows.num_rows}")
        env_steps = _count(about["env_steps"])
    except SampleBatchError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"the metadata of the batch must be complete, got {error!r}") from error
    if start != table.num_rows:
        raise FormatError(f"the table must have the {start} rows that its metadata counts, got {table.num_rows}")
    return policies, env_steps


def metadata_of(schema: pa.Schema) -> dict[str, Any] | None:
    """Return the batch metadata in a schema; None if the schema has no batch metadata.

    Raises FormatError if the metadata is malformed or has an unsupported version.
    """
    raw = (schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        return None
    try:
        about = json.loads(raw)
        version = about["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"the metadata of the batch must be a JSON object with a version: {error}") from error
    if version != _VERSION:
        raise FormatError(f"the batch must have format version {_VERSION}, got version {describe_value(version)}")
    return dict(about)


def _describe(nested: Mapping[str, Structure], flags: Flags) -> dict[str, Any]:
    return {"nested": dict(nested), "flags": describe_flags(flags)}


_encode = json.JSONEncoder(default=np.generic.item).encode
"""JSON encoder that supports NumPy numbers, which flags may contain."""


def _metadata(about: dict[str, Any]) -> dict[bytes, bytes]:
    return {METADATA_KEY: _encode(about).encode()}


_PLAIN = _metadata({"type": "SampleBatch", "version": _VERSION, **_describe({}, DEFAULT), "lists": []})
"""Metadata of a batch without nested columns, sequences and flags."""


class TableReader:
    """Reader of tables with one schema; the schema is validated only once.

    Raises FormatError if the metadata is malformed, or does not match the fields.
    """

    __slots__ = ("_fields", "_flags", "_lists", "_nested")

    def __init__(self, schema: pa.Schema, about: dict[str, Any]) -> None:
        try:
            nested, flags = read_structures(about["nested"]), read_flags(about["flags"])
            lists = set(map(str, about["lists"]))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise FormatError(f"the metadata of the batch must be complete, got {error!r}") from error
        columns = dict.fromkeys(schema.names)
        if len(columns) < len(schema):
            name = next(name for name in columns if schema.names.count(name) > 1)
            raise FormatError(f"column {name!r} must be unique, got {schema.names.count(name)} columns with this name")
        for field in schema:
            if field.name in lists and not pa.types.is_large_list(field.type):
                raise FormatError(f"column {field.name!r} must have one list per sequence, got {field.type}")
        self._lists = lists.intersection(columns)
        self._fields = [
            (field, FieldReader(field, field.type.value_type if field.name in lists else None)) for field in schema
        ]
        self._nested = {top: tree for top, tree in nested.items() if _is_whole(top, tree, columns)}
        self._flags = flags
        if names.SEQ_LENS not in columns:
            self._flags = replace(flags, zero_padded=False, max_seq_len=None)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [reader.name for _, reader in self._fields]

    def view(self, plan: Plan, data: pa.Buffer, body: Body) -> Parts | None:
        """View a record batch in a file's bytes as a batch's columns, structures and flags; see `Plan.view`."""
        arrays = plan.view(data, body, self.names)
        return None if arrays is None else self.parts({name: TensorColumn(array) for name, array in arrays.items()})

    def parts(self, columns: dict[str, Column]) -> Parts:
        """Combine columns with the structures and flags from the metadata."""
        return columns, dict(self._nested), self._flags

    def read(self, table: pa.Table, bound: MemoryBound, *, allow_pickle: bool = False) -> Parts:
        """View a table as a batch's columns, structures and flags; raises the same errors as `from_table`."""
        columns: dict[str, Column] = {}
        cuts = {}
        nbytes = table.get_total_buffer_size()
        if not any(reader.is_bounded for _, reader in self._fields):
            # The bound of objects counts rows without bytes.
            check_rows(table.num_rows, nbytes, "a table")
        for (field, reader), chunked in zip(self._fields, table.columns, strict=True):
            name = reader.name
            if reader.is_bounded or name in self._lists:
                check_size(chunked.chunks, field, bound)
            array = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
            if name in self._lists:
                if array.null_count:
                    raise FormatError(f"column {name!r} must have one list per sequence, got {array.type}")
                cuts[name] = np.diff(array.offsets.to_numpy())
                array = array.flatten()
                check_rows(len(array), nbytes, f"column {name!r}")
            columns[name] = reader.read(array, allow_pickle=allow_pickle)
        if names.SEQ_LENS in columns:
            # Copied before validation: another writer of the table's memory must not change the sequence lengths.
            columns[names.SEQ_LENS] = columns[names.SEQ_LENS].copy()
            for name, lengths in cuts.items():
                if not np.array_equal(lengths, _stored_lengths(columns[names.SEQ_LENS], self._flags)):
                    raise FormatError(f"column {name!r} must have lists with the lengths in {names.SEQ_LENS!r}")
        return self.parts(columns)


_MAX_SCHEMA_NBYTES = 1 << 16
_readers = Recent[bytes, TableReader](limit=64)
"""Readers of recent schemas, by serialized schema."""


def _reader_of(schema: pa.Schema) -> TableReader:
    key = schema.serialize().to_pybytes()

    def make() -> TableReader:
        return make_reader(schema, metadata_of(schema))

    return _readers.get(key, make) if len(key) <= _MAX_SCHEMA_NBYTES else make()


def make_reader(schema: pa.Schema, about: dict[str, Any] | None) -> TableReader:
    """Create a table reader from a schema and batch metadata; if `about` is None, the table has plain columns only."""
    if about is None:
        about = {"type": "SampleBatch", **_describe({}, DEFAULT), "lists": []}
    if about.get("type") != "SampleBatch":
        raise FormatError(f"the table must contain a SampleBatch, got a {about.get('type')!r}")
    return TableReader(schema, about)


def _is_whole(top: str, structure: Structure, columns: Mapping[str, Any]) -> bool:
    """Return whether the columns at or below the name `top` are exactly the leaves of the structure."""
    return set(leaf_names(top, structure)) == {name for name in columns if name == top or name.startswith(f"{top}.")}


def read_structures(plain: Any) -> dict[str, Structure]:
    """Validate the structures of nested columns in metadata; return the structures by column name.

    Raises ValueError, AttributeError or RecursionError if a structure is malformed.
    """
    return {top: _structure(tree) for top, tree in plain.items()}


def _structure(plain: Any) -> Structure:
    if isinstance(plain, dict):
        return {key: None if tree is None else _structure(tree) for key, tree in plain.items()}
    if isinstance(plain, list):
        return [None if tree is None else _structure(tree) for tree in plain]
    raise ValueError(f"a nested column must be a dict or a list, got a {type(plain).__name__}")


def read_flags(plain: Any) -> Flags:
    """Validate flags from metadata.

    Raises ValueError or TypeError if a flag is malformed.
    """
    if isinstance(plain, dict) and "action_unit" in plain:
        plain = {**plain, "action_unit": ActionUnit.from_description(plain["action_unit"])}
    if isinstance(plain, dict) and "per_sequence" in plain:
        plain = {**plain, "per_sequence": read_declarations(plain["per_sequence"])}
    flags = Flags(**plain)
    for name in ("time_major", "zero_padded", "is_training"):
        flag = getattr(flags, name)
        if not isinstance(flag, bool) and (flag is not None or name != "time_major"):
            raise ValueError(f"{name} must be true or false, got {describe_value(flag)}")
    if flags.max_seq_len is not None:
        _count(flags.max_seq_len)
    if not isinstance(flags.num_grad_updates, (int, float, NoneType)):
        raise ValueError(f"num_grad_updates must be a number, got {describe_value(flags.num_grad_updates)}")
    return flags


def _count(plain: Any) -> int:
    if type(plain) is not int or plain < 0:
        raise ValueError(f"a count must be an integer of at least 0, got {describe_value(plain)}")
    return plain


def _stored_lengths(seq_lens: Column, flags: Flags) -> npt.NDArray[Any]:
    """Return the number of stored rows per sequence, including padding."""
    lengths = np.asarray(seq_lens.to_numpy()).reshape(-1)
    return np.full(len(lengths), flags.max_seq_len or 0) if flags.zero_padded else lengths


def _offsets(seq_lens: Column, flags: Flags) -> pa.Array:
    stored = _stored_lengths(seq_lens, flags)
    return TensorColumn(np.concatenate(([0], stored.cumsum())).astype(np.int64)).to_arrow()


def _policy_ids(tables: dict[str, pa.Table]) -> pa.ChunkedArray:
    dictionary = pa.array(list(tables), pa.string())
    ids = [
        pa.DictionaryArray.from_arrays(pa.array(np.full(table.num_rows, i, np.int32)), dictionary)
        for i, table in enumerate(tables.values())
    ]
    return pa.chunked_array(ids, pa.dictionary(pa.int32(), pa.string()))

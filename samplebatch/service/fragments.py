"""Conversion between fragments and Arrow record batches, without a copy where possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from samplebatch import names
from samplebatch.batch.arrow import METADATA_KEY, metadata_of
from samplebatch.batch.concat import join
from samplebatch.batch.flags import Flags
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node, unit_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure
from samplebatch.buffer.extending import as_flat, flatten_rows
from samplebatch.buffer.writing import convert_step, drop_empty, step_values
from samplebatch.column.plan import Plan
from samplebatch.column.tensor import TensorColumn
from samplebatch.env.infos import batch_of
from samplebatch.errors import ArgumentError, ColumnLengthError, FormatError


def fragment_rows(batch: Any, priorities: Any = None) -> SampleBatch | MultiAgentBatch:
    """Convert a batch to the rows of a fragment, without a copy where possible.

    - `batch`: batch of n rows, of any type that `ReplayBuffer.extend` accepts.
    - `priorities`: priority of each row, shape (n,); None for the default priority.

    Raises ColumnTypeError if `batch` is not a batch. Raises ArgumentError if priorities are passed with a batch of
    several policies. Raises ColumnLengthError if the number of priorities is not n.

    >>> fragment_rows({"obs": [1, 2], "rew": [0.5, 1.0]}, [1.0, 2.0]).column_names
    ('obs', 'rewards', 'priority')
    """
    if isinstance(batch, MultiAgentBatch):
        if priorities is not None:
            raise ArgumentError(
                "priorities must be for the steps of one policy, got a batch of several policies; "
                "add the steps of each policy separately"
            )
        return batch
    several = hasattr(batch, "policy_batches")
    rows = join([as_flat(part) for part in batch.policy_batches.values()]) if several else as_flat(batch)
    if priorities is not None:
        values = np.asarray(priorities, np.float64).reshape(-1)
        if len(values) != rows.count:
            raise ColumnLengthError(f"priorities must have {rows.count} values, one per row, got {len(values)}")
        rows = rows.copy(shallow=True)
        rows[names.PRIORITY] = values
    return rows


def with_info_columns(fragment: SampleBatch | MultiAgentBatch) -> SampleBatch | MultiAgentBatch:
    """Convert the infos of a collector's steps to separate columns, as replay buffers do.

    >>> infos = np.array([{"lives": 3}, {}], object)
    >>> with_info_columns(SampleBatch(obs=[1, 2], infos=infos)).column_names
    ('obs', 'infos.lives')
    """
    if isinstance(fragment, MultiAgentBatch):
        parts = {policy: _with_info_columns(steps) for policy, steps in fragment.policy_batches.items()}
        return MultiAgentBatch(parts, fragment.env_steps())
    return _with_info_columns(fragment)


def _with_info_columns(steps: SampleBatch) -> SampleBatch:
    if names.INFOS not in steps.column_names:
        return steps
    rows = steps.copy(shallow=True)
    infos = rows.pop(names.INFOS)
    if any(infos):
        rows[names.INFOS] = batch_of(infos.tolist()).as_sample_batch()
    return rows


def step_rows(batch: Batch | Mapping[str, Any] | None, buffer_ids: Any, columns: dict[str, Any]) -> SampleBatch:
    """Convert a step of one or several environments to rows; parameters as in `ReplayBuffer.add`.

    Raises SampleBatchError in the same cases as `ReplayBuffer.add`.

    >>> step_rows(
    ...     {"obs": 1, "act": 0, "rew": 1.0, "terminated": False, "truncated": False}, None, {}
    ... )["rewards"]
    array([1.])
    """
    ids = None if buffer_ids is None else np.asarray(buffer_ids).reshape(-1)
    single = ids is None
    values = convert_step(
        drop_empty(step_values(batch, columns)), 1 if ids is None else len(ids), single=single, last_frame=False
    )
    steps = node(Batch, values)
    rows = flatten_rows(Batch.stack([steps]) if single else steps, "rllib")
    if ids is not None:
        rows[names.ENV_ID] = np.asarray(ids, np.int64)
    rows.action_unit = unit_of(batch)
    return rows


def as_record_batch(table: pa.Table) -> pa.RecordBatch:
    """Convert an Arrow table to one record batch; only columns of several chunks are copied."""
    chunks = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(chunks, schema=table.schema)


def with_batch_text(rows: pa.RecordBatch, text: str | None) -> pa.RecordBatch:
    """Replace the batch description in the schema metadata of `rows`; None leaves the metadata unchanged."""
    if text is None:
        return rows
    return rows.replace_schema_metadata({**(rows.schema.metadata or {}), METADATA_KEY: text.encode()})


def read_fragment(rows: pa.RecordBatch) -> SampleBatch | MultiAgentBatch:
    """Convert a record batch to a fragment without a copy.

    Raises SampleBatchError in the same cases as `SampleBatch.from_arrow` and `MultiAgentBatch.from_arrow`.
    """
    table = pa.Table.from_batches([rows])
    try:
        about = metadata_of(table.schema)
        table.column_names  # noqa: B018 (names are decoded on first access)
    except UnicodeDecodeError as error:
        raise FormatError(f"a fragment must have column names in UTF-8: {error}") from error
    several = about is not None and about.get("type") == "MultiAgentBatch"
    return MultiAgentBatch.from_arrow(table) if several else SampleBatch.from_arrow(table)


_MAX_FORMS: Final = 8
"""Maximum number of cached fragment layouts per client."""


class _Layout(NamedTuple):
    """Layout of fragments: structure, flags and the plan to encode and decode record batches."""

    nested: dict[str, Structure]
    flags: Flags
    plan: Plan


class FragmentEncoder:
    """Thread-safe encoder of a client's fragments, with one cached plan per fragment layout.

    >>> encoder = FragmentEncoder()
    >>> for rows in (2, 3):
    ...     print(encoder.encode(SampleBatch(obs=list(range(rows)))).to_pydict())
    {'obs': [0, 1]}
    {'obs': [0, 1, 2]}
    """

    def __init__(self) -> None:
        self._forms: tuple[_Layout, ...] = ()
        """Cached layouts, newest first."""

    def encode(self, batch: Any, priorities: Any = None) -> pa.RecordBatch:
        """Encode a batch as a record batch; parameters as in `fragment_rows`.

        Raises SampleBatchError in the same cases as `fragment_rows` and `SampleBatch.to_arrow`.
        """
        rows = fragment_rows(batch, priorities)
        if isinstance(rows, MultiAgentBatch):
            return as_record_batch(rows.to_arrow())
        columns = rows._all()
        if not all(type(column) is TensorColumn for column in columns.values()):
            return as_record_batch(rows.to_arrow())
        arrays = {name: column.to_numpy() for name, column in columns.items()}
        for nested, flags, plan in self._forms:
            if plan.fits(arrays) and rows._flags == flags and rows._nested == nested:
                return plan.write(arrays)
        record_batch = as_record_batch(rows.to_arrow())
        new_plan = Plan.of(record_batch.schema)
        if new_plan is not None:
            self._forms = (_Layout(dict(rows._nested), rows._flags, new_plan), *self._forms[: _MAX_FORMS - 1])
        return record_batch


class FragmentDecoder:
    """Decoder of the fragments of one stream; the fragments share a schema.

    Arrow decodes and validates the first fragment. For later fragments, only the sizes of buffers are validated.

    >>> encoder, decoder = FragmentEncoder(), FragmentDecoder()
    >>> for rows in (2, 3):
    ...     print(
    ...         decoder.decode(encoder.encode(SampleBatch(obs=list(range(rows)))), None)["obs"]
    ...     )
    [0 1]
    [0 1 2]
    """

    def __init__(self) -> None:
        self._layout: _Layout | None = None

    def nbytes_of(self, rows: pa.RecordBatch) -> int:
        """Return the size of a fragment's rows in bytes, an upper bound for the columns that `decode` copies."""
        # Arrow's `nbytes` inspects each buffer.
        nbytes = None if self._layout is None else self._layout.plan.nbytes_of(rows)
        return int(rows.nbytes) if nbytes is None else nbytes

    def decode(self, rows: pa.RecordBatch, text: str | None) -> SampleBatch | MultiAgentBatch:
        """Convert a record batch to a fragment without a copy.

        - `rows`: rows of the fragment.
        - `text`: description of the batch if it differs from the description in the schema, otherwise None.

        Raises SampleBatchError in the same cases as `read_fragment`. Raises pyarrow.ArrowException if the buffers of
        `rows` do not match the schema.
        """
        layout = self._layout
        if layout is not None and text is None:
            arrays = layout.plan.read(rows)
            if arrays is not None:
                columns: dict[str, Any] = {name: TensorColumn(values) for name, values in arrays.items()}
                return SampleBatch._of(columns, dict(layout.nested), layout.flags)
        rows.validate()
        fragment = read_fragment(with_batch_text(rows, text))
        if text is None and isinstance(fragment, SampleBatch):
            plan = Plan.of(rows.schema)
            self._layout = None if plan is None else _Layout(dict(fragment._nested), fragment._flags, plan)
        return fragment

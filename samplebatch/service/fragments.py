"""Fragments of writers as Arrow record batches, over the memory of their columns."""

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
    """Return a batch as the rows of a fragment, over the same memory.

    - `batch`: as for `ReplayBuffer.extend`.
    - `priorities`: one for each row, shape (n,); None for none.

    Raises ColumnTypeError if it is no batch. Raises ArgumentError if there are priorities for the steps of several
    policies. Raises ColumnLengthError if there are not n priorities.

    >>> fragment_rows({"obs": [1, 2], "rew": [0.5, 1.0]}, [1.0, 2.0]).column_names
    ('obs', 'rewards', 'priority')
    """
    if isinstance(batch, MultiAgentBatch):
        if priorities is not None:
            raise ArgumentError(
                "priorities must be for the steps of one policy, the batch has several; add them one by one"
            )
        return batch
    several = hasattr(batch, "policy_batches")
    rows = join([as_flat(part) for part in batch.policy_batches.values()]) if several else as_flat(batch)
    if priorities is not None:
        given = np.asarray(priorities, np.float64).reshape(-1)
        if len(given) != rows.count:
            raise ColumnLengthError(f"priorities must be {rows.count}, one a row, got {len(given)}")
        rows = rows.copy(shallow=True)
        rows[names.PRIORITY] = given
    return rows


def with_info_columns(fragment: SampleBatch | MultiAgentBatch) -> SampleBatch | MultiAgentBatch:
    """Turn the infos of a collector's steps into separate columns, as buffers do.

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
    """Return a step, or a row for each of some environments, as rows; parameters as of `ReplayBuffer.add`.

    Raises SampleBatchError as `ReplayBuffer.add` does.

    >>> step_rows({"obs": 1, "act": 0, "rew": 1.0, "terminated": False, "truncated": False}, None, {})["rewards"]
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
    """View a table as one record batch."""
    chunks = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(chunks, schema=table.schema)


def with_batch_text(rows: pa.RecordBatch, text: str | None) -> pa.RecordBatch:
    """Put a description of the batch into the metadata of a schema; None leaves it as it is."""
    if text is None:
        return rows
    return rows.replace_schema_metadata({**(rows.schema.metadata or {}), METADATA_KEY: text.encode()})


def read_fragment(rows: pa.RecordBatch) -> SampleBatch | MultiAgentBatch:
    """View a record batch that a writer has put, or a learner has got, as a fragment.

    Raises SampleBatchError as `SampleBatch.from_arrow` and `MultiAgentBatch.from_arrow` do.
    """
    table = pa.Table.from_batches([rows])
    try:
        about = metadata_of(table.schema)
        table.column_names  # noqa: B018 (they are decoded when they are first looked at)
    except UnicodeDecodeError as error:
        raise FormatError("a fragment must have names in UTF-8, it has others") from error
    several = about is not None and about.get("type") == "MultiAgentBatch"
    return MultiAgentBatch.from_arrow(table) if several else SampleBatch.from_arrow(table)


_MAX_FORMS: Final = 8
"""Forms of fragments that a client remembers."""


class _Form(NamedTuple):
    """Form of fragments: batches with these parts beside their columns have record batches of this plan."""

    nested: dict[str, Structure]
    flags: Flags
    plan: Plan


class FragmentEncoder:
    """Encoder of a client's fragments, which are much like the ones before. Threads may share one.

    >>> encoder = FragmentEncoder()
    >>> for rows in (2, 3):
    ...     print(encoder.encode(SampleBatch(obs=list(range(rows)))).to_pydict())
    {'obs': [0, 1]}
    {'obs': [0, 1, 2]}
    """

    def __init__(self) -> None:
        self._forms: tuple[_Form, ...] = ()
        """The newest one first."""

    def encode(self, batch: Any, priorities: Any = None) -> pa.RecordBatch:
        """View a batch as a fragment; parameters as of `fragment_rows`.

        Raises SampleBatchError as `fragment_rows` and `SampleBatch.to_arrow` do.
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
        new = Plan.of(record_batch.schema)
        if new is not None:
            self._forms = (_Form(dict(rows._nested), rows._flags, new), *self._forms[: _MAX_FORMS - 1])
        return record_batch


class FragmentDecoder:
    """Decoder of the fragments of one stream, which have one schema, for the service.

    The first one is read by Arrow and checked. Of the others, only the sizes of buffers are checked.

    >>> encoder, decoder = FragmentEncoder(), FragmentDecoder()
    >>> for rows in (2, 3):
    ...     print(decoder.decode(encoder.encode(SampleBatch(obs=list(range(rows)))), None)["obs"])
    [0 1]
    [0 1 2]
    """

    def __init__(self) -> None:
        self._form: _Form | None = None

    def decode(self, rows: pa.RecordBatch, text: str | None) -> SampleBatch | MultiAgentBatch:
        """View a record batch as a fragment.

        - `rows`: the record batch.
        - `text`: the description of the batch, where it is another than in the schema; None where it is the same.

        Raises SampleBatchError as `read_fragment` does. Raises pyarrow.ArrowException if the buffers do not fit the
        schema.
        """
        form = self._form
        if form is not None and text is None:
            arrays = form.plan.read(rows)
            if arrays is not None:
                columns: dict[str, Any] = {name: TensorColumn(values) for name, values in arrays.items()}
                return SampleBatch._of(columns, dict(form.nested), form.flags)
        rows.validate()
        fragment = read_fragment(with_batch_text(rows, text))
        if text is None and isinstance(fragment, SampleBatch):
            plan = Plan.of(rows.schema)
            self._form = None if plan is None else _Form(dict(fragment._nested), fragment._flags, plan)
        return fragment

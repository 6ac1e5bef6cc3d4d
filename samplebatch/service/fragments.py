"""Fragments of writers as Arrow record batches, over the memory of their columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from samplebatch import names
from samplebatch.batch.concat import join
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.extending import as_flat, flatten_rows
from samplebatch.buffer.writing import convert_step, drop_empty, step_values
from samplebatch.env.infos import batch_of
from samplebatch.errors import ArgumentError, ColumnLengthError


def fragment_rows(batch: Any, priorities: Any = None) -> SampleBatch | MultiAgentBatch:
    """Return a batch as the rows of a fragment, over the same memory.

    Parameters
    ----------
    batch
        What `ReplayBuffer.extend` takes.
    priorities
        One for each row, shape (n,); None for none.

    Raises
    ------
    ColumnTypeError
        If it is no batch.
    ArgumentError
        If there are priorities for the steps of several policies.
    ColumnLengthError
        If there are not n priorities.

    Examples
    --------
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
    """Turn the infos of a collector's steps into columns of their own, as the buffers of this process have them.

    Examples
    --------
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

    Raises
    ------
    SampleBatchError
        As `ReplayBuffer.add` does.

    Examples
    --------
    >>> step_rows({"obs": 1, "act": 0, "rew": 1.0, "terminated": False, "truncated": False}, None, {})["rewards"]
    array([1.])
    """
    ids = None if buffer_ids is None else np.asarray(buffer_ids).reshape(-1)
    single = ids is None
    held = convert_step(
        drop_empty(step_values(batch, columns)), 1 if ids is None else len(ids), single=single, last_frame=False
    )
    steps = node(Batch, held)
    rows = flatten_rows(Batch.stack([steps]) if single else steps, "rllib")
    if ids is not None:
        rows[names.ENV_ID] = np.asarray(ids, np.int64)
    return rows


def as_record_batch(table: pa.Table) -> pa.RecordBatch:
    """View a table of whole columns as one record batch."""
    chunks = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(chunks, schema=table.schema)

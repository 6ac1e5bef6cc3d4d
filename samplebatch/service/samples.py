"""Samples as Arrow record batches, over the memory that their rows were gathered in, and back.

The columns of a sample are those of `SampleBatch.to_arrow`, under the names that the table gives them, and two more:
`batch_indexes`, where the rows are, and `generation`, to be handed back with priorities. A row is a step, a sequence or
an episode; the columns of an episode are lists of its steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from samplebatch import names
from samplebatch.batch.arrow import METADATA_KEY, metadata_of
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.extending import flatten_rows
from samplebatch.errors import FormatError
from samplebatch.service.fragments import as_record_batch
from samplebatch.service.items import Sample
from samplebatch.service.protocol import SAMPLE_KEY

ROWS, EPISODES, FRAGMENTS = "rows", "episodes", "fragments"
"""Forms of a sample: rows of steps or sequences, a list of episodes, fragments as they were inserted."""


class Packed(NamedTuple):
    """A sample on its way, as one message of a stream.

    Attributes
    ----------
    batch
        Its rows.
    metadata
        What else is said of it, for JSON.
    """

    batch: pa.RecordBatch
    metadata: dict[str, Any]


class Drawn(NamedTuple):
    """A sample as a learner gets it.

    Attributes
    ----------
    batch
        The rows: a `Batch` of steps or sequences, a list of episodes, or a `SampleBatch` or `MultiAgentBatch`.
    indices
        Where they are, of the same form; of fragments their numbers.
    """

    batch: Any
    indices: Any


def pack(sample: Sample) -> Packed:
    """View a table's sample as a record batch.

    Raises
    ------
    SampleBatchError
        If a column has no form in Arrow; names it.

    Examples
    --------
    >>> rows, indices = Batch(obs=np.zeros((2, 3)), info=Batch()), np.array([7, 9])
    >>> packed = pack(Sample(rows, indices, np.array([1, 1])))
    >>> packed.batch.column_names, packed.batch.num_rows
    (['obs', 'batch_indexes', 'generation'], 2)
    >>> unpack(*packed).batch.info, unpack(*packed).indices
    (Batch(), array([7, 9]))
    """
    if not isinstance(sample.batch, Batch):
        said = {
            "numbers": sample.indices.tolist(),
            "lengths": _listed(sample.lengths),
            "weights": _listed(sample.weights),
        }
        return Packed(_describe(sample.batch.to_arrow(), {"form": FRAGMENTS}), said)
    rows = flatten_rows(sample.batch)
    about = {"form": ROWS if sample.lengths is None else EPISODES, "names": list(sample.batch.__dict__)}
    rows[names.BATCH_INDEXES] = sample.indices
    if names.GENERATION not in rows:
        rows[names.GENERATION] = sample.generations
    if sample.lengths is not None:
        rows = SampleBatch({**rows, names.SEQ_LENS: sample.lengths})
    return Packed(_describe(rows.to_arrow(), about), {})


def _describe(table: pa.Table, about: Mapping[str, Any]) -> pa.RecordBatch:
    """Make a record batch of a table, with a description in the metadata of its schema."""
    metadata = {**(table.schema.metadata or {}), SAMPLE_KEY: json.dumps(about).encode()}
    return as_record_batch(table).replace_schema_metadata(metadata)


def _listed(values: Any) -> Any:
    return None if values is None else values.tolist()


def unpack(packed: pa.RecordBatch, metadata: Mapping[str, Any]) -> Drawn:
    """View a record batch as the sample that it was made of; columns of numbers stay where they lie, read-only.

    Raises
    ------
    FormatError
        If the batch is no sample.
    SampleBatchError
        As `SampleBatch.from_arrow` does.
    """
    try:
        about = json.loads((packed.schema.metadata or {})[SAMPLE_KEY])
        form, tops = about["form"], [str(name) for name in about.get("names", ())]
        if form == FRAGMENTS:
            return Drawn(read_fragment(packed), np.array(metadata["numbers"], np.int64))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise FormatError("a sample must be described in the metadata of its schema, it is not") from error
    rows = SampleBatch.from_arrow(pa.Table.from_batches([packed]))
    held = rows.as_batch().__dict__
    if names.BATCH_INDEXES not in held:
        raise FormatError(f"a sample must have a column {names.BATCH_INDEXES!r}, it has none")
    batch, indices = node(Batch, {name: held.get(name, node(Batch, {})) for name in tops}), held[names.BATCH_INDEXES]
    if form != EPISODES:
        return Drawn(batch, indices)
    ends = np.cumsum(held[names.SEQ_LENS]).tolist()
    cuts = [slice(*pair) for pair in zip([0, *ends[:-1]], ends, strict=True)]
    return Drawn([batch[cut] for cut in cuts], [indices[cut] for cut in cuts])


def have_same_columns(schema: pa.Schema, other: pa.Schema) -> bool:
    """Tell whether record batches of one schema may follow those of another in a stream."""
    return bool(schema.remove_metadata().equals(other.remove_metadata(), check_metadata=True))


def batch_text(schema: pa.Schema, known: pa.Schema) -> str | None:
    """Return the description of a batch in the metadata of its schema; None if it is that of a known schema."""
    told = [(own.metadata or {}).get(METADATA_KEY, b"") for own in (schema, known)]
    return None if told[0] == told[1] else told[0].decode()


def with_batch_text(rows: pa.RecordBatch, told: str | None) -> pa.RecordBatch:
    """Put a description of the batch into the metadata of a schema; None leaves it as it is."""
    if told is None:
        return rows
    return rows.replace_schema_metadata({**(rows.schema.metadata or {}), METADATA_KEY: told.encode()})


def read_fragment(rows: pa.RecordBatch) -> SampleBatch | MultiAgentBatch:
    """View a record batch that a writer has put, or a learner has got, as a fragment.

    Raises
    ------
    SampleBatchError
        As `SampleBatch.from_arrow` and `MultiAgentBatch.from_arrow` do.
    """
    table = pa.Table.from_batches([rows])
    try:
        about = metadata_of(table.schema)
        table.column_names  # noqa: B018 (they are decoded when they are first looked at)
    except UnicodeDecodeError as error:
        raise FormatError("a fragment must have names in UTF-8, it has others") from error
    several = about is not None and about.get("type") == "MultiAgentBatch"
    return MultiAgentBatch.from_arrow(table) if several else SampleBatch.from_arrow(table)


def write_stream(rows: pa.RecordBatch) -> bytes:
    """Write a record batch as an Arrow stream of its own."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return bytes(sink.getvalue())


def read_stream(raw: Any) -> pa.RecordBatch:
    """Read the record batch of an Arrow stream.

    Raises
    ------
    FormatError
        If it is none, or has no record batch.
    """
    try:
        with ipc.open_stream(raw) as stream:
            return stream.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise FormatError("a sample must be an Arrow stream with a record batch, it is not") from error

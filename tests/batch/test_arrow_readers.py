"""Tables with a cached schema are read like the first one, and everything that may differ is validated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import SampleBatch
from samplebatch.batch import arrow
from samplebatch.errors import CapacityError, ColumnTypeError, FormatError, SampleBatchError, UntrustedPickleError


class Strange:
    """Object that no Arrow type can represent."""


def test_batches_with_the_columns_of_another_keep_their_own_description() -> None:
    first = SampleBatch({"obs": {"a": [1, 2], "b": [3, 4]}}, _num_grad_updates=1.0)
    second = SampleBatch({"obs": ([1, 2], [3, 4])}, _is_training=True)
    third = SampleBatch({"obs.a": [1, 2], "obs.b": [3, 4]})
    for _ in range(3):
        for batch in (first, second, third):
            actual = SampleBatch.from_arrow(batch.to_arrow())
            assert actual == batch
            assert (actual.num_grad_updates, actual.is_training) == (batch.num_grad_updates, batch.is_training)


def test_a_batch_does_not_share_its_description_with_the_next_one() -> None:
    table = SampleBatch(obs={"a": [1, 2]}, rewards=[0.0, 1.0]).to_arrow()
    first = SampleBatch.from_arrow(table)
    del first["obs"]
    first["rewards"] = {"x": [1, 2]}
    assert SampleBatch.from_arrow(table)["obs"]["a"].tolist() == [1, 2]
    assert SampleBatch.from_arrow(table)["rewards"].tolist() == [0.0, 1.0]


def test_nulls_are_checked_in_each_table() -> None:
    schema = pa.schema([pa.field("a", pa.int64())])
    for _ in range(2):
        assert SampleBatch.from_arrow(pa.table([pa.array([1, 2])], schema))["a"].tolist() == [1, 2]
        with pytest.raises(ColumnTypeError, match="column 'a' must have no nulls"):
            SampleBatch.from_arrow(pa.table([pa.array([1, None])], schema))


def test_lengths_of_sequences_are_checked_in_each_table() -> None:
    batch = SampleBatch(obs=np.arange(5), seq_lens=[2, 3])
    table = batch.to_arrow()
    lists = pa.LargeListArray.from_arrays(pa.array([0, 3, 5], pa.int64()), pa.array(np.arange(5)))
    other = table.set_column(0, table.schema.field(0), lists)
    assert other.schema.equals(table.schema, check_metadata=True)
    for _ in range(2):
        assert SampleBatch.from_arrow(table) == batch
        with pytest.raises(FormatError, match="must have lists with the lengths in 'seq_lens'"):
            SampleBatch.from_arrow(other)


def test_the_memory_of_objects_is_bounded_in_each_table() -> None:
    table = SampleBatch(obs=np.arange(20), infos=np.array([{"words": ["x"] * 50}] * 20, object)).to_arrow()
    for _ in range(2):
        assert len(SampleBatch.from_arrow(table)) == 20
        with pytest.raises(CapacityError, match="column 'infos'"):
            SampleBatch.from_arrow(table, max_nbytes=100)


def test_trust_in_pickles_is_not_remembered() -> None:
    table = SampleBatch(obs=[1, 2], infos=np.array([1, Strange()], object)).to_arrow()
    for _ in range(2):
        assert len(SampleBatch.from_arrow(table, allow_pickle=True)["infos"]) == 2
        with pytest.raises(UntrustedPickleError):
            SampleBatch.from_arrow(table)


def test_a_rejected_schema_is_rejected_again() -> None:
    table: Any = pa.table({"a": [1]}).replace_schema_metadata({arrow.METADATA_KEY: b'{"version": 1}'})
    for _ in range(3):
        with pytest.raises(SampleBatchError):
            SampleBatch.from_arrow(table)


def test_few_schemas_are_remembered_and_no_long_ones() -> None:
    for number in range(100):
        SampleBatch.from_arrow(pa.table({f"column {number}": [1]}))
    assert len(arrow._readers) == 64
    before = dict(arrow._readers._values)
    SampleBatch.from_arrow(pa.table({"a" * arrow._MAX_SCHEMA_NBYTES: [1]}))
    assert arrow._readers._values == before

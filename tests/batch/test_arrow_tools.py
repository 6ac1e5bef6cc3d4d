"""Other tools read batches as Arrow tables, and batches read the tables of other tools."""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from samplebatch import SampleBatch
from samplebatch.errors import (
    ColumnTypeError,
)
from tests.batch.arrow_tables import PICKLED, address, as_frame
from tests.batch.every_kind import every_kind, in_sequences, numbers
from tests.ids import plain_repr

# -- other tools -------------------------------------------------------------------------------------------------------


@pytest.fixture
def batch() -> SampleBatch:
    return SampleBatch(
        rewards=np.array([1.0, 2.0, 3.0], np.float32),
        t=[0, 1, 2],
        dones=[False, False, True],
        obs=np.arange(6.0).reshape(3, 2),
        when=np.array(["2020-01-01", "2020-01-02", "2020-01-03"], "M8[ms]"),
        infos=[{"lives": 3, "name": "x"}, {"lives": 2, "name": "y"}, {"lives": 1, "name": "z"}],
        lidar=[[1], [2, 3], []],
    )


def test_pyarrow_reads_a_batch(batch: SampleBatch) -> None:
    table = pa.table(batch)
    assert table.equals(batch.to_arrow(), check_metadata=True)
    assert pa.schema(batch) == table.schema
    assert address(table["rewards"].chunk(0)) == batch["rewards"].ctypes.data
    assert pa.RecordBatchReader.from_stream(batch).read_all() == table
    assert SampleBatch.from_arrow(pa.table(batch)) == batch


def test_a_schema_may_be_requested() -> None:
    batch = SampleBatch(a=[1, 2])
    expected = pa.schema([pa.field("a", pa.int32())])
    try:
        capsule = batch.__arrow_c_stream__(expected.__arrow_c_schema__())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return
    assert type(capsule).__name__ == "PyCapsule"


def test_polars_reads_a_batch(batch: SampleBatch) -> None:
    frame = as_frame(batch)
    assert frame.columns == list(batch)
    assert frame.height == 3
    assert frame["rewards"].dtype == pl.Float32
    assert frame["rewards"].to_list() == [1, 2, 3]
    assert frame["infos"].to_list() == batch["infos"].tolist()
    assert frame["lidar"].to_list() == [[1], [2, 3], []]
    assert np.shares_memory(frame["rewards"].to_numpy(allow_copy=False), batch["rewards"])
    assert pl.from_arrow(batch.to_arrow())["t"].to_list() == [0, 1, 2]


def test_a_batch_round_trips_through_polars(batch: SampleBatch) -> None:
    plain = batch.select("rewards", "t", "when")
    restored = SampleBatch.from_arrow(as_frame(plain))
    assert restored == plain


@pytest.mark.parametrize("padded", [False, True])
def test_polars_reads_sequences(padded: bool) -> None:
    batch = in_sequences(padded=padded).select("a", "seq_lens", "infos")
    frame = as_frame(batch)
    assert frame.height == 4
    assert frame["seq_lens"].to_list() == [2, 3, 0, 1]
    assert frame["a"].list.sum().to_list() == [1, 9, 0, 5]


def test_duckdb_reads_a_batch(batch: SampleBatch) -> None:
    query = "select sum(rewards), max(t), bool_or(dones), max(infos.lives), max(len(lidar)) from batch"
    assert duckdb.sql(query).fetchall() == [(6, 2, True, 3, 2)]
    assert duckdb.from_arrow(batch.to_arrow()).aggregate("sum(rewards)").fetchall() == [(6,)]
    assert duckdb.from_arrow(pa.table(batch)).aggregate("count(*)").fetchall() == [(3,)]
    assert duckdb.sql("select obs[2] from batch order by t").fetchall() == [(1,), (3,), (5,)]


def test_duckdb_reads_sequences() -> None:
    sequences = in_sequences(padded=False).select("a", "seq_lens")
    assert duckdb.sql("select list_sum(a), seq_lens from sequences").fetchall() == [(1, 2), (9, 3), (None, 0), (5, 1)]
    assert len(sequences) == 6


def test_pandas_reads_a_batch(batch: SampleBatch) -> None:
    frame = pa.table(batch.drop("obs")).to_pandas()
    assert frame["rewards"].tolist() == [1, 2, 3]
    assert frame["infos"].tolist() == batch["infos"].tolist()
    restored = SampleBatch.from_arrow(pa.Table.from_pandas(pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})))
    assert restored == SampleBatch(a=[1, 2], b=[0.5, 1.5])


def test_infos_of_one_form_are_structs(batch: SampleBatch) -> None:
    field = batch.to_arrow().schema.field("infos")
    assert {child.name for child in field.type} == {"lives", "name"}


# -- foreign tables ----------------------------------------------------------------------------------------------------


def test_a_foreign_table_becomes_columns() -> None:
    table = pa.table({"a": pa.array([1, 2, 3], pa.int16()), "b": [1.5, 2.5, 3.5], "l": [[1], [2, 3], []]})
    batch = SampleBatch.from_arrow(table)
    assert batch["a"].dtype == np.int16
    assert batch["b"].tolist() == [1.5, 2.5, 3.5]
    assert [row.tolist() for row in batch["l"]] == [[1], [2, 3], []]
    assert batch["a"].ctypes.data == table["a"].chunk(0).buffers()[1].address


def test_foreign_layouts_are_converted() -> None:
    table = pa.table(
        {
            "bits": pa.array([True, False, True]),
            "date": pa.array([1, 2, 3], pa.date32()),
            "date64": pa.array([86400000, 0, 86400000 * 2], pa.date64()),
            "word": ["x", "yy", ""],
            "large": pa.array(["x", None, ""], pa.large_string()),
            "dictionary": pa.array(["x", "y", "x"]).dictionary_encode(),
            "bytes": pa.array([b"x", b"", b"yyy"]),
            "fixed": pa.array([b"xxx", b"yyy", b"zzz"], pa.binary(3)),
            "pairs": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
            "struct": [{"x": 1}, {"x": 2}, None],
            "small list": pa.array([[1.0], [], [2.0, 3.0]], pa.list_(pa.float32())),
            "list of words": [["x"], [], None],
            "nothing": pa.nulls(3),
            "duration": pa.array([1, 2, 3], pa.duration("ms")),
        }
    )
    batch = SampleBatch.from_arrow(table)
    assert {name: values.tolist() for name, values in batch.items() if isinstance(values, np.ndarray)} == {
        "bits": [True, False, True],
        "date": np.array([1, 2, 3], "M8[D]").tolist(),
        "date64": batch["date64"].tolist(),
        "word": ["x", "yy", ""],
        "large": ["x", None, ""],
        "dictionary": ["x", "y", "x"],
        "bytes": [b"x", b"", b"yyy"],
        "fixed": [b"xxx", b"yyy", b"zzz"],
        "pairs": [[1, 2], [3, 4], [5, 6]],
        "struct": [{"x": 1}, {"x": 2}, None],
        "list of words": [["x"], [], None],
        "nothing": [None, None, None],
        "duration": np.array([1, 2, 3], "m8[ms]").tolist(),
    }
    assert batch["date64"].astype("M8[D]").astype(int).tolist() == [1, 0, 2]
    assert [row.tolist() for row in batch["small list"]] == [[1], [], [2, 3]]
    assert batch["bits"].dtype == bool
    assert {batch.column(name).kind for name in ("word", "large", "dictionary", "bytes", "fixed")} == {"text"}


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, None, 3]),
        pa.array([1.5, None, 3.5]),
        pa.array([True, None, False]),
        pa.array([None, 1, 2], pa.timestamp("ms")),
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
        pa.array([[1, 2], [None, 1], [3, 4]], pa.list_(pa.int32(), 2)),
        pa.array([[1], None, []]),
        pa.array([[1], [None], []]),
    ],
    ids=lambda values: str(values.type),
)
def test_nulls_are_rejected_with_the_column_name(values: pa.Array) -> None:
    with pytest.raises(ColumnTypeError, match="column 'speed' must have no nulls, got 1"):
        SampleBatch.from_arrow(pa.table({"speed": values}))
    with pytest.raises(ColumnTypeError, match="column 'speed' must have no nulls, got 1"):
        SampleBatch(speed=values)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, 2], pa.timestamp("s", "UTC")),
        pa.array([1, 2], pa.time32("s")),
    ],
    ids=lambda values: str(values.type),
)
def test_unsupported_types_are_rejected_with_the_column_name(values: pa.Array) -> None:
    with pytest.raises(ColumnTypeError, match="column 'speed' must have an Arrow type"):
        SampleBatch.from_arrow(pa.table({"speed": values}))


def test_chunks_are_joined() -> None:
    chunked = pa.table(
        {"a": pa.chunked_array([[1, 2], [], [3]]), "infos": pa.chunked_array([[{"x": 1}], [{"x": 2}, None]])}
    )
    batch = SampleBatch.from_arrow(chunked)
    assert batch["a"].tolist() == [1, 2, 3]
    assert batch["infos"].tolist() == [{"x": 1}, {"x": 2}, None]
    empty = SampleBatch.from_arrow(pa.table({"a": pa.chunked_array([], pa.int64())}))
    assert empty["a"].tolist() == []


@pytest.mark.parametrize("padded", [False, True])
def test_exported_tables_can_be_joined(padded: bool) -> None:
    batch = in_sequences(padded=padded).drop("words", "infos")
    table = pa.concat_tables([batch.to_arrow(), batch.to_arrow()])
    assert SampleBatch.from_arrow(table) == batch.concat(batch)


def test_exported_tables_can_be_sliced_and_filtered() -> None:
    batch = SampleBatch(every_kind(7)).drop(*PICKLED)
    table = batch.to_arrow()
    for start, length in ((0, 3), (2, 4), (6, 1), (3, 0)):
        assert SampleBatch.from_arrow(table.slice(start, length)) == batch[start : start + length]
    plain = SampleBatch(a=np.arange(7), obs={"x": numbers("f4", 7, 2)}, infos=[{"i": i} for i in range(7)])
    retained = plain.to_arrow().filter(pa.array([True, False] * 3 + [True]))
    assert SampleBatch.from_arrow(retained) == plain[::2]


@pytest.mark.parametrize("padded", [False, True])
def test_tables_of_sequences_can_be_sliced(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    table = batch.to_arrow()
    for start, stop in ((0, 2), (1, 4), (3, 4), (2, 2), (2, 3)):
        part = SampleBatch.from_arrow(table.slice(start, stop - start))
        assert part == batch.take_sequences(np.arange(start, stop))


def test_columns_of_exported_tables_can_be_selected() -> None:
    batch = SampleBatch(a=[1, 2], obs={"x": [3, 4], "y": [5, 6]}, infos=[{}, {}])
    table = batch.to_arrow()
    assert SampleBatch.from_arrow(table.select(["a"])) == SampleBatch(a=[1, 2])
    assert SampleBatch.from_arrow(table.select(["obs.y", "obs.x"])) == batch.select("obs")
    leaf = SampleBatch.from_arrow(table.select(["a", "obs.x"]))
    assert leaf["obs.x"].tolist() == [3, 4]
    assert list(leaf) == ["a", "obs.x"]
    added = table.append_column("new", pa.array([0.5, 1.5]))
    assert SampleBatch.from_arrow(added)["new"].tolist() == [0.5, 1.5]
    renamed = table.rename_columns({"a": "b"})
    assert SampleBatch.from_arrow(renamed).column_names == ("b", "obs.x", "obs.y", "infos")


def test_columns_of_tables_of_sequences_can_be_selected() -> None:
    table = in_sequences(padded=True).to_arrow()
    part = SampleBatch.from_arrow(table.select(["a", "seq_lens", "state_in_0"]))
    assert part == in_sequences(padded=True).select("a", "seq_lens", "state_in_0")


@pytest.mark.parametrize(
    "source", [{"a": [1]}, pa.record_batch({"a": [1]}), pa.RecordBatchReader.from_batches], ids=plain_repr
)
def test_objects_with_an_arrow_interface_are_accepted(source: Any) -> None:
    if source is pa.RecordBatchReader.from_batches:
        record = pa.record_batch({"a": [1]})
        source = pa.RecordBatchReader.from_batches(record.schema, [record])
    assert SampleBatch.from_arrow(source)["a"].tolist() == [1]


@pytest.mark.parametrize("source", [3, None, "table", object()], ids=plain_repr)
def test_other_objects_than_tables_are_rejected(source: Any) -> None:
    with pytest.raises(TypeError):
        SampleBatch.from_arrow(source)

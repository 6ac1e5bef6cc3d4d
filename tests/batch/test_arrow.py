"""Batches as Arrow tables: exact in both directions, over the same memory, and readable by other tools."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.batch.arrow import METADATA_KEY
from samplebatch.errors import (
    ColumnTypeError,
    DeviceError,
    FormatError,
    SampleBatchError,
    SequenceError,
    UntrustedPickleError,
)
from tests.batch.every_kind import DATES, NUMBERS, STRINGS, TORCH, every_kind, in_sequences, numbers, tensor

PICKLED = {"infos mixed", "objects"}
"""Columns of `every_kind` whose rows have no one form, so that Arrow holds pickles of them."""


def through_ipc(table: pa.Table) -> pa.Table:
    """Write a table as an Arrow stream and read it back over the written bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def tampered(table: pa.Table, change: Callable[[dict[str, Any]], Any]) -> pa.Table:
    """Return a table whose metadata has been changed."""
    about = json.loads(table.schema.metadata[METADATA_KEY])
    changed = change(about)
    about = about if changed is None else changed
    return table.replace_schema_metadata({METADATA_KEY: json.dumps(about).encode()})


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(None), slice(2, 5), slice(3, 3), slice(6, 7)], ids=str)
@pytest.mark.parametrize("through", [lambda table: table, through_ipc], ids=["table", "ipc"])
def test_every_kind_comes_back_exactly(rows: slice, through: Callable[[pa.Table], pa.Table]) -> None:
    batch = SampleBatch(every_kind(7))[rows]
    table = through(batch.to_arrow())
    table.validate(full=True)
    assert table.num_rows == len(batch)
    made = SampleBatch.from_arrow(table, allow_pickle=True)
    assert made == batch
    assert list(made) == list(batch)
    assert made.column_names == batch.column_names
    assert [made.column(name).kind for name in made.column_names] == [
        batch.column(name).kind for name in batch.column_names
    ]


@pytest.mark.parametrize("dtype", [*NUMBERS, *DATES, *STRINGS])
@pytest.mark.parametrize("shape", [(5,), (5, 2, 3), (0,), (0, 2), (5, 0), (5, 0, 2), (5, 1)], ids=str)
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    batch = SampleBatch(a=numbers(dtype, *shape))
    for table in (batch.to_arrow(), through_ipc(batch.to_arrow())):
        made = SampleBatch.from_arrow(table)["a"]
        assert made.dtype == dtype
        assert made.shape == shape
        assert made.tobytes() == batch["a"].tobytes()


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("shape", [(5,), (5, 2), (0,), (0, 2)], ids=str)
def test_every_torch_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    batch = SampleBatch(a=tensor(dtype, *shape))
    for table in (batch.to_arrow(), through_ipc(batch.to_arrow())):
        made = SampleBatch.from_arrow(table)
        assert made == batch
        assert str(made["a"].dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("padded", [False, True])
def test_sequences_are_lists(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.num_rows == 4
    assert table["seq_lens"].to_pylist() == [2, 3, 0, 1]
    assert table["state_in_0"].to_pylist() == [[1.0], [2.0], [3.0], [4.0]]
    lists = [[0, 1, 0, 0], [2, 3, 4, 0], [0] * 4, [5, 0, 0, 0]] if padded else [[0, 1], [2, 3, 4], [], [5]]
    assert table["a"].to_pylist() == lists
    assert pa.types.is_large_list(table.schema.field("obs.y.0").type)
    for made in (SampleBatch.from_arrow(table), SampleBatch.from_arrow(through_ipc(table))):
        assert made == batch
        assert list(made) == list(batch)
        assert made.zero_padded == padded
        assert made.max_seq_len == batch.max_seq_len
        assert made.num_grad_updates == 1.5
        assert made.is_training


@pytest.mark.parametrize("padded", [False, True])
def test_views_of_sequences(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    for part in (batch[2:], batch.slice(1, 4), batch[:0], batch.take_sequences([3, 1])):
        assert SampleBatch.from_arrow(part.to_arrow()) == part
        assert part.to_arrow().num_rows == len(part["seq_lens"])


def test_states_padded_or_per_step_are_lists_too() -> None:
    padded = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 2.0], seq_lens=[1, 2]).right_zero_pad(2, exclude_states=False)
    per_step = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 2.0, 3.0], seq_lens=[1, 2])
    for batch in (padded, per_step):
        assert SampleBatch.from_arrow(batch.to_arrow()) == batch
    assert per_step.to_arrow()["state_in_0"].to_pylist() == [[1.0], [2.0, 3.0]]


def test_flags_come_back() -> None:
    batch = SampleBatch(a=[1], _num_grad_updates=2.5, _is_training=True, _time_major=False)
    made = SampleBatch.from_arrow(through_ipc(batch.to_arrow()))
    assert (made.num_grad_updates, made.is_training, made.time_major) == (2.5, True, False)


def test_flags_may_be_numpy_numbers() -> None:
    batch = SampleBatch(
        a=np.zeros(4),
        seq_lens=[2, 1],
        _num_grad_updates=np.float32(2.5),
        _max_seq_len=np.int64(2),
        _zero_padded=np.bool_(True),
        _time_major=np.bool_(False),
        _is_training=np.bool_(True),
    )
    made = SampleBatch.from_arrow(batch.to_arrow())
    assert made == batch
    assert made.num_grad_updates == 2.5
    assert made.max_seq_len == 2


def test_names_of_any_sort() -> None:
    batch = SampleBatch({"": [1, 2], "a b": [3, 4], "ä/ö": [5, 6], "a.b.c": [7, 8], "\0": [9, 10]})
    assert SampleBatch.from_arrow(through_ipc(batch.to_arrow())) == batch


def test_a_batch_without_columns() -> None:
    table = SampleBatch().to_arrow()
    assert table.num_columns == 0
    assert SampleBatch.from_arrow(table) == SampleBatch()


def test_time_major_has_no_rows_of_steps() -> None:
    batch = SampleBatch(a=np.zeros((2, 2)), seq_lens=[2, 1], _time_major=True)
    with pytest.raises(SequenceError, match="to_batch_major"):
        batch.to_arrow()
    assert batch.to_batch_major().to_arrow().num_rows == 2


def test_parquet_keeps_everything(tmp_path: Path) -> None:
    plain = {name: values for name, values in every_kind(5).items() if name not in PICKLED and "zero" not in name}
    for batch in (
        SampleBatch(a=numbers("f4", 5, 2), b=numbers("i8", 5), infos=plain["infos"]),
        in_sequences(padded=True),
    ):
        pq.write_table(batch.to_arrow(), tmp_path / "batch.parquet")
        assert SampleBatch.from_arrow(pq.read_table(tmp_path / "batch.parquet")) == batch


# -- memory -----------------------------------------------------------------------------------------------------------


def address(array: pa.Array) -> int:
    """Return where an Arrow array's values lie."""
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    while not pa.types.is_primitive(array.type) and not pa.types.is_fixed_size_binary(array.type):
        array = array.values
    return int(array.buffers()[1].address) + array.offset * array.type.byte_width


@pytest.mark.parametrize("rows", [slice(None), slice(2, 6)], ids=["whole", "view"])
@pytest.mark.parametrize("dtype", [*NUMBERS, *DATES, *STRINGS])
def test_no_array_is_copied(dtype: str, rows: slice) -> None:
    batch = SampleBatch(flat=numbers(dtype, 8), wide=numbers(dtype, 8, 2, 3))[rows]
    table = batch.to_arrow()
    made = SampleBatch.from_arrow(table)
    for name in batch:
        assert address(table[name].chunk(0)) == batch[name].ctypes.data
        assert np.shares_memory(made[name], batch[name])
        assert made[name].ctypes.data == batch[name].ctypes.data


@pytest.mark.parametrize("dtype", TORCH)
def test_no_tensor_is_copied_into_arrow(dtype: str) -> None:
    batch = SampleBatch(a=tensor(dtype, 8, 2))[2:6]
    table = batch.to_arrow()
    assert address(table["a"].chunk(0)) == batch["a"].data_ptr()
    # A tensor cannot be read-only, as what comes out of Arrow is: it is copied, so that nobody writes to it.
    made = SampleBatch.from_arrow(table)
    made["a"][0] = 0
    assert batch["a"][0].any()


@pytest.mark.parametrize("padded", [False, True])
def test_no_sequence_is_copied(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    table = batch.to_arrow()
    made = SampleBatch.from_arrow(table)
    for name in ("a", "b", "obs.x", "obs.y.0", "state_in_0", "state_in_1", "state_out_0", "seq_lens"):
        assert np.shares_memory(made[name], batch[name]), name
    part = SampleBatch.from_arrow(table.slice(1, 1))
    assert np.shares_memory(part["a"], batch["a"])


def test_no_ragged_column_is_copied() -> None:
    batch = SampleBatch(r=[[1.0], [2.0, 3.0], []])
    made = SampleBatch.from_arrow(batch.to_arrow())
    assert np.shares_memory(made["r"].elements, batch["r"].elements)
    assert np.shares_memory(made["r"].offsets, batch["r"].offsets)


def test_what_is_read_from_elsewhere_is_read_only() -> None:
    made = SampleBatch.from_arrow(pa.ipc.open_stream(pa.py_buffer(ipc_bytes(SampleBatch(a=np.arange(4))))).read_all())
    with pytest.raises(ValueError, match="read-only"):
        made["a"][0] = 1
    made.copy()["a"][0] = 1


def ipc_bytes(batch: SampleBatch) -> bytes:
    sink = pa.BufferOutputStream()
    table = batch.to_arrow()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_a_table_keeps_the_memory_alive() -> None:
    table = SampleBatch(a=np.arange(1000)).to_arrow()
    made = SampleBatch.from_arrow(table)
    del table
    filler = [np.zeros(1000, np.int64) for _ in range(10)]
    assert made["a"].tolist() == list(range(1000))
    assert len(filler) == 10


# -- other tools ------------------------------------------------------------------------------------------------------


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


def as_frame(batch: SampleBatch | MultiAgentBatch) -> pl.DataFrame:
    """Read a batch by Polars, which makes of a stream a frame, or a series of structs, by its version."""
    made = pl.from_arrow(batch)
    return made if isinstance(made, pl.DataFrame) else made.struct.unnest()


def test_pyarrow_reads_a_batch(batch: SampleBatch) -> None:
    table = pa.table(batch)
    assert table.equals(batch.to_arrow(), check_metadata=True)
    assert pa.schema(batch) == table.schema
    assert address(table["rewards"].chunk(0)) == batch["rewards"].ctypes.data
    assert pa.RecordBatchReader.from_stream(batch).read_all() == table
    assert SampleBatch.from_arrow(pa.table(batch)) == batch


def test_a_schema_can_be_asked_for() -> None:
    batch = SampleBatch(a=[1, 2])
    wanted = pa.schema([pa.field("a", pa.int32())])
    try:
        capsule = batch.__arrow_c_stream__(wanted.__arrow_c_schema__())
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


def test_a_batch_comes_back_from_polars(batch: SampleBatch) -> None:
    plain = batch.select("rewards", "t", "when")
    made = SampleBatch.from_arrow(as_frame(plain))
    assert made == plain


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
    made = SampleBatch.from_arrow(pa.Table.from_pandas(pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})))
    assert made == SampleBatch(a=[1, 2], b=[0.5, 1.5])


def test_infos_of_one_form_are_structs(batch: SampleBatch) -> None:
    field = batch.to_arrow().schema.field("infos")
    assert {child.name for child in field.type} == {"lives", "name"}


# -- foreign tables ---------------------------------------------------------------------------------------------------


def test_a_foreign_table_is_taken_as_columns() -> None:
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
    assert batch["fixed"].dtype == "S3"


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
def test_nulls_are_refused_by_name(values: pa.Array) -> None:
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
def test_types_that_no_column_can_hold_are_refused_by_name(values: pa.Array) -> None:
    with pytest.raises(ColumnTypeError, match="column 'speed' has Arrow type"):
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
def test_our_own_tables_can_be_joined(padded: bool) -> None:
    batch = in_sequences(padded=padded).drop("words", "infos")
    table = pa.concat_tables([batch.to_arrow(), batch.to_arrow()])
    assert SampleBatch.from_arrow(table) == batch.concat(batch)


def test_our_own_tables_can_be_sliced_and_filtered() -> None:
    batch = SampleBatch(every_kind(7)).drop(*PICKLED)
    table = batch.to_arrow()
    for start, length in ((0, 3), (2, 4), (6, 1), (3, 0)):
        assert SampleBatch.from_arrow(table.slice(start, length)) == batch[start : start + length]
    plain = SampleBatch(a=np.arange(7), obs={"x": numbers("f4", 7, 2)}, infos=[{"i": i} for i in range(7)])
    kept = plain.to_arrow().filter(pa.array([True, False] * 3 + [True]))
    assert SampleBatch.from_arrow(kept) == plain[::2]


@pytest.mark.parametrize("padded", [False, True])
def test_tables_of_sequences_can_be_sliced(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    table = batch.to_arrow()
    for start, stop in ((0, 2), (1, 4), (3, 4), (2, 2), (2, 3)):
        part = SampleBatch.from_arrow(table.slice(start, stop - start))
        assert part == batch.take_sequences(np.arange(start, stop))


def test_columns_of_our_own_tables_can_be_chosen() -> None:
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


def test_columns_of_sequences_can_be_chosen() -> None:
    table = in_sequences(padded=True).to_arrow()
    part = SampleBatch.from_arrow(table.select(["a", "seq_lens", "state_in_0"]))
    assert part == in_sequences(padded=True).select("a", "seq_lens", "state_in_0")


@pytest.mark.parametrize(
    "source", [{"a": [1]}, pa.record_batch({"a": [1]}), pa.RecordBatchReader.from_batches], ids=str
)
def test_what_else_is_taken_for_a_table(source: Any) -> None:
    if source is pa.RecordBatchReader.from_batches:
        record = pa.record_batch({"a": [1]})
        source = pa.RecordBatchReader.from_batches(record.schema, [record])
    assert SampleBatch.from_arrow(source)["a"].tolist() == [1]


@pytest.mark.parametrize("source", [3, None, "table", object()], ids=str)
def test_what_is_no_table_is_refused(source: Any) -> None:
    with pytest.raises(TypeError):
        SampleBatch.from_arrow(source)


# -- trust ------------------------------------------------------------------------------------------------------------


def test_pickled_rows_are_refused_by_name_unless_allowed() -> None:
    batch = SampleBatch(a=[1, 2], infos=[{"set": {1}}, None])
    table = batch.to_arrow()
    with pytest.raises(UntrustedPickleError, match=r"'infos'.*allow_pickle=True"):
        SampleBatch.from_arrow(table)
    assert SampleBatch.from_arrow(table, allow_pickle=True) == batch
    policies = MultiAgentBatch({"p": batch}, 2).to_arrow()
    with pytest.raises(UntrustedPickleError, match="'infos'"):
        MultiAgentBatch.from_arrow(policies)
    assert MultiAgentBatch.from_arrow(policies, allow_pickle=True)["p"] == batch


class Bomb:
    """An object whose unpickling would leave a trace."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.trace),)


def test_nothing_is_unpickled_unasked(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    batch = SampleBatch(infos=[{"bomb": Bomb(str(trace))}])
    table = through_ipc(batch.to_arrow())
    with pytest.raises(UntrustedPickleError):
        SampleBatch.from_arrow(table)
    with pytest.raises(UntrustedPickleError):
        SampleBatch.from_arrow(table.slice(0, 1))
    assert not trace.exists()
    SampleBatch.from_arrow(table, allow_pickle=True)
    assert trace.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.pop("nested"),
        lambda about: about.pop("flags"),
        lambda about: about.pop("lists"),
        lambda about: about.pop("version"),
        lambda about: about.update(version=99),
        lambda about: about.update(version="1"),
        lambda about: about.update(type="MultiAgentBatch"),
        lambda about: about.pop("type"),
        lambda about: about.update(nested=3),
        lambda about: about.update(nested={"obs": 3}),
        lambda about: about.update(nested={"obs": {"x": "y"}}),
        lambda about: about.update(nested={"obs": [None, None]}),
        lambda about: about.update(nested=["obs"]),
        lambda about: about.update(flags=[]),
        lambda about: about.update(flags={"unknown": 1}),
        lambda about: about["flags"].update(max_seq_len="3"),
        lambda about: about["flags"].update(max_seq_len=-1),
        lambda about: about["flags"].update(zero_padded="no"),
        lambda about: about["flags"].update(zero_padded=True, max_seq_len=None),
        lambda about: about["flags"].update(zero_padded=True, max_seq_len=2),
        lambda about: about["flags"].update(time_major=True),
        lambda about: about["flags"].update(num_grad_updates="many"),
        lambda about: about.update(lists=3),
        lambda about: about.update(lists=["seq_lens"]),
        lambda about: about.update(lists=[]),
        lambda about: [],
        lambda about: None if about.clear() else "text",
    ],
)
def test_tampered_metadata_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    batch = SampleBatch(obs={"x": np.arange(6)}, a=np.arange(6), state_in_0=np.zeros(3), seq_lens=[1, 2, 3])
    with pytest.raises(SampleBatchError):
        SampleBatch.from_arrow(tampered(batch.to_arrow(), change))["obs"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"null", b"3", b'"x"', b"[]", b"{}"])
def test_metadata_that_is_no_description_is_refused(raw: bytes) -> None:
    table = SampleBatch(a=[1]).to_arrow().replace_schema_metadata({METADATA_KEY: raw})
    for kind in (SampleBatch, MultiAgentBatch):
        with pytest.raises(FormatError):
            kind.from_arrow(table)


def test_lists_that_do_not_fit_the_lengths_are_refused() -> None:
    table = SampleBatch(a=np.arange(3), seq_lens=[1, 2]).to_arrow()
    for lengths in ([2, 1], [2, 2], [0, 3], [-1, 4]):
        changed = table.set_column(1, table.schema.field(1), pa.array(lengths, pa.int32()))
        with pytest.raises(SampleBatchError):
            SampleBatch.from_arrow(changed)


def test_field_metadata_that_does_not_fit_is_refused() -> None:
    from samplebatch.column.types import DTYPE_KEY, TORCH_KEY

    array = pa.array([1, 2, 3], pa.int64())
    for metadata in (
        {DTYPE_KEY: b"O"},
        {DTYPE_KEY: b"no dtype"},
        {DTYPE_KEY: b"<f4"},
        {DTYPE_KEY: b"V8"},
        {DTYPE_KEY: b">i8"},
        {DTYPE_KEY: b"\xff"},
        {DTYPE_KEY: b"<c8"},
        {TORCH_KEY: b"no_dtype"},
        {TORCH_KEY: b"float32"},
        {TORCH_KEY: b"nn"},
        {TORCH_KEY: b"\xff"},
        {b"samplebatch.objects": b"{}"},
        {b"samplebatch.objects": b'{"kind": "pickle"}'},
        {b"samplebatch.objects": b'{"kind": "list", "children": [{"kind": "int"}]}'},
    ):
        table = pa.Table.from_arrays([array], schema=pa.schema([pa.field("a", pa.int64(), metadata=metadata)]))
        with pytest.raises(SampleBatchError, match="'a'"):
            SampleBatch.from_arrow(table)


def test_memory_on_a_device_is_refused() -> None:
    batch = SampleBatch(a=torch.zeros(3, device="meta"))
    with pytest.raises(DeviceError, match="to_device"):
        batch.to_arrow()
    with pytest.raises(DeviceError, match="to_device"):
        pickle.dumps(batch, 5)


# -- policies ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def alike() -> MultiAgentBatch:
    return MultiAgentBatch(
        {
            "p": SampleBatch(a=[1, 2], obs={"x": numbers("f4", 2, 3)}, infos=[{"i": 1}, {"i": 2}]),
            "q": SampleBatch(a=[3], obs={"x": numbers("f4", 1, 3)}, infos=[{"i": 3}]),
        },
        env_steps=2,
    )


@pytest.fixture
def unlike() -> MultiAgentBatch:
    columns = {name: values for name, values in every_kind(4).items() if name not in PICKLED}
    return MultiAgentBatch(
        {
            "every kind": SampleBatch(columns),
            "sequences": in_sequences(padded=False),
            "padded": in_sequences(padded=True),
            "one": SampleBatch(a=[1.5], only=np.zeros((1, 2))),
            "nothing": SampleBatch(),
        },
        env_steps=9,
    )


def test_policies_with_equal_columns_share_them(alike: MultiAgentBatch) -> None:
    table = alike.to_arrow()
    table.validate(full=True)
    assert table.column_names == ["policy_id", "a", "obs.x", "infos"]
    assert table["policy_id"].to_pylist() == ["p", "p", "q"]
    assert table["a"].to_pylist() == [1, 2, 3]
    assert MultiAgentBatch.from_arrow(table) == alike


@pytest.mark.parametrize("through", [lambda table: table, through_ipc], ids=["table", "ipc"])
@pytest.mark.parametrize("which", ["alike", "unlike"])
def test_policies_come_back_exactly(
    which: str, through: Callable[[pa.Table], pa.Table], request: pytest.FixtureRequest
) -> None:
    batch = request.getfixturevalue(which)
    table = through(batch.to_arrow())
    table.validate(full=True)
    made = MultiAgentBatch.from_arrow(table)
    assert made == batch
    assert list(made) == list(batch)
    assert made.count == batch.count
    for policy, rows in batch.items():
        assert list(made[policy]) == list(rows)
        assert made[policy].zero_padded == rows.zero_padded


def test_policies_with_different_columns_keep_them_apart(unlike: MultiAgentBatch) -> None:
    table = unlike.to_arrow()
    assert "one/a" in table.column_names
    assert "only" in table.column_names
    assert table["only"].null_count == table.num_rows - 1
    assert table.schema.field("only").nullable
    assert not table.schema.field("policy_id").nullable


def test_no_policy_is_copied(alike: MultiAgentBatch, unlike: MultiAgentBatch) -> None:
    for batch in (alike, unlike):
        made = MultiAgentBatch.from_arrow(batch.to_arrow())
        for policy, rows in batch.items():
            for name in rows.column_names:
                if rows.column(name).kind == "tensor" and rows.column(name).nbytes:
                    assert np.shares_memory(made[policy][name], rows[name]), (policy, name)


@pytest.mark.parametrize(
    "policies",
    [
        {},
        {"p": SampleBatch()},
        {"p": SampleBatch(a=np.zeros(0)), "q": SampleBatch(a=np.zeros((0, 3)))},
        {"": SampleBatch(a=[1])},
        {"p/q": SampleBatch(a=[1]), "p": SampleBatch({"q/a": [1.5], "a": ["x"]})},
        {"p": SampleBatch({"x": [1], "p/x": [2]}), "q": SampleBatch(x=[1.5])},
        {"p": SampleBatch(policy_id=[1, 2]), "q": SampleBatch(policy_id=[3])},
        {"p": SampleBatch(policy_id=["x"]), "q": SampleBatch(policy_id=[3])},
        {"p": SampleBatch(infos=[{}, None]), "q": SampleBatch(infos=[{"x": 1}]), "r": SampleBatch(infos=[None])},
    ],
    ids=["none", "empty", "no rows", "no name", "slashes", "clash", "policy_id", "policy_ids", "infos"],
)
def test_odd_policies_come_back(policies: dict[str, SampleBatch]) -> None:
    batch = MultiAgentBatch(policies, 3)
    for table in (batch.to_arrow(), through_ipc(batch.to_arrow())):
        assert MultiAgentBatch.from_arrow(table) == batch


def test_other_tools_read_policies(alike: MultiAgentBatch) -> None:
    assert pa.table(alike).equals(alike.to_arrow(), check_metadata=True)
    assert pa.schema(alike) == alike.to_arrow().schema
    frame = as_frame(alike)
    assert frame["a"].to_list() == [1, 2, 3]
    assert frame["policy_id"].cast(pl.String).to_list() == ["p", "p", "q"]
    rows = duckdb.sql("select policy_id, sum(a) from alike group by policy_id order by policy_id").fetchall()
    assert rows == [("p", 3), ("q", 3)]


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.pop("policies"),
        lambda about: about.pop("env_steps"),
        lambda about: about.update(env_steps="many"),
        lambda about: about.update(env_steps=None),
        lambda about: about.update(policies=[]),
        lambda about: about.update(policies={"p": 3}),
        lambda about: about["policies"].pop("q"),
        lambda about: about["policies"]["p"].update(rows=1),
        lambda about: about["policies"]["p"].update(rows=-1),
        lambda about: about["policies"]["p"].update(rows="2"),
        lambda about: about["policies"]["p"].pop("columns"),
        lambda about: about["policies"]["p"]["columns"].update(a="nothing"),
        lambda about: about["policies"]["p"].update(columns=[]),
        lambda about: about["policies"]["p"].pop("flags"),
        lambda about: about.update(type="SampleBatch"),
        lambda about: about.update(version=2),
    ],
)
def test_tampered_metadata_of_policies_is_refused(
    alike: MultiAgentBatch, change: Callable[[dict[str, Any]], Any]
) -> None:
    with pytest.raises(FormatError):
        MultiAgentBatch.from_arrow(tampered(alike.to_arrow(), change))


def test_tables_of_policies_must_be_whole(alike: MultiAgentBatch) -> None:
    table = alike.to_arrow()
    for changed in (table.slice(1), table.slice(0, 2), pa.concat_tables([table, table]), table.drop_columns(["a"])):
        with pytest.raises(FormatError):
            MultiAgentBatch.from_arrow(changed)
    with pytest.raises(FormatError, match="must hold a MultiAgentBatch, got 'SampleBatch'"):
        MultiAgentBatch.from_arrow(alike["p"].to_arrow())
    with pytest.raises(FormatError, match="must hold a MultiAgentBatch"):
        MultiAgentBatch.from_arrow(pa.table({"a": [1]}))
    with pytest.raises(FormatError, match="must hold a SampleBatch, got a 'MultiAgentBatch'"):
        SampleBatch.from_arrow(table)
